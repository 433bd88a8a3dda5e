"""Checks messages and tools of chat requests, and converts the text of an answer to its content and tool calls."""

from __future__ import annotations

import json
import secrets
from typing import Any

from tunix_like.errors import UserError
from tunix_like.text.conversations import chat_messages
from tunix_like.text.tool_calls import tool_calls, without_calls

THOUGHT = "</think>"

MOST_MESSAGES = 4096
MOST_TOOLS = 512


class RequestError(UserError):
    """A request that cannot be answered: the name of the wrong field, the HTTP status and the type of the error."""

    def __init__(
        self, message: str, param: str | None = None, http: int = 400, kind: str = "invalid_request_error"
    ) -> None:
        super().__init__(message)
        self.param = param
        self.http = http
        self.kind = kind


def wrong(field: str, reason: str) -> RequestError:
    return RequestError(f"{field}: {reason}", field)


def checked_messages(given: Any) -> list[dict[str, Any]]:
    """Checks messages and converts them for the chat template (see `chat_messages`)."""
    if not isinstance(given, list) or not 0 < len(given) <= MOST_MESSAGES:
        raise wrong("messages", f"it must be a list of 1 to {MOST_MESSAGES} messages")
    return chat_messages(given, "messages", wrong)


def checked_tools(given: Any) -> list[dict[str, Any]]:
    if given is None:
        return []
    if not isinstance(given, list) or len(given) > MOST_TOOLS:
        raise wrong("tools", f"it must be a list of at most {MOST_TOOLS} tools")
    for tool in given:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise wrong("tools", 'each must be {"type": "function", "function": {"name": ...}}')
    return given


def parsed_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Splits the text of an answer into the content outside of the tool calls and the tool calls in the format of
    OpenAI.

    If a call is malformed, the whole text is the content and the list of calls is empty.
    """
    calls = tool_calls(text)
    if not calls or any(call.error is not None for call in calls):
        return text, []
    thought, end, answer = text.rpartition(THOUGHT)
    content = f"{thought}{end}{without_calls(answer)}".rstrip()
    return content, [
        {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in calls
    ]
