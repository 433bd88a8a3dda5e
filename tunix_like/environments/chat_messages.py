"""Checks messages and tools of chat requests, and converts the text of an answer to its content and tool calls."""

from __future__ import annotations

import json
import secrets
from typing import Any

from tunix_like.errors import UserError
from tunix_like.runtime.tool_calls import arguments_of, tool_calls

CALL, THOUGHT = "<tool_call>", "</think>"

_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
"""Valid roles. Some templates write `<|ROLE|>`, so another role could form any control token, such as `<|end|>`."""

MOST_MESSAGES, MOST_TOOLS = 4096, 512


class RequestError(UserError):
    """A request that cannot be answered: the name of the wrong field, the HTTP status and the type of the error."""

    def __init__(
        self, message: str, param: str | None = None, http: int = 400, kind: str = "invalid_request_error"
    ) -> None:
        super().__init__(message)
        self.param, self.http, self.kind = param, http, kind


def wrong(field: str, reason: str) -> RequestError:
    return RequestError(f"{field}: {reason}", field)


def checked_messages(given: Any) -> list[dict[str, Any]]:
    """Checks messages and converts them for the chat template: the content of a message becomes a text, and the
    arguments of a tool call become an object. All other fields and their order stay as they are."""
    if not isinstance(given, list) or not 0 < len(given) <= MOST_MESSAGES:
        raise wrong("messages", f"it must be a list of 1 to {MOST_MESSAGES} messages")
    return [_checked_message(f"messages[{place}]", message) for place, message in enumerate(given)]


def _checked_message(name: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise wrong(name, "it must be an object with a role")
    if message["role"] not in _ROLES:
        raise wrong(f"{name}.role", f"got {message['role'][:24]!r}; valid: {', '.join(_ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if not all(isinstance(text, str) for text in texts):
            raise wrong(f"{name}.content", "only parts of type text are supported")
        content = "".join(map(str, texts))
    calls = message.get("tool_calls")
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise wrong(f"{name}.content", "it must be a text or a list of parts")
    found = {key: value for key, value in message.items() if value is not None} | {"content": content}
    if calls is not None:
        found["tool_calls"] = _checked_calls(f"{name}.tool_calls", calls)
    return found


def _checked_calls(name: str, calls: Any) -> list[dict[str, Any]]:
    """Checks tool calls and parses their arguments, which chat templates write as JSON themselves."""
    if not isinstance(calls, list):
        raise wrong(name, "it must be a list")
    found = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise wrong(name, "each call must have a function with a name")
        try:
            arguments = arguments_of(function.get("arguments"))
        except ValueError:
            raise wrong(name, f"the arguments of {function['name']!r} are not a JSON object") from None
        found.append({**call, "function": {**function, "arguments": arguments}})
    return found


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
    """Splits the text of an answer into the content before the tool calls and the tool calls in the format of OpenAI.

    If a call is malformed, the whole text is the content and the list of calls is empty.
    """
    calls = tool_calls(text)
    if not calls or any(call.error is not None for call in calls):
        return text, []
    thought, end, answer = text.rpartition(THOUGHT)
    first = answer.find(CALL)
    content = f"{thought}{end}{answer[: max(first, 0)]}".rstrip()
    return content, [
        {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in calls
    ]
