"""Converts chat messages and tools to tokens, and the text of an answer to its content and tool calls."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from tunix_like.data.tokenizer import Tokenizer
from tunix_like.errors import UserError
from tunix_like.rollout.environments.tool_calls import tool_calls
from tunix_like.rollout.serving.fields import RequestError

_CALL, _THOUGHT = "<tool_call>", "</think>"
_STARTS_OF_ANSWER = ("{", "<|python_tag|>")
"""An answer that begins with one of these texts may be a tool call in the format of Llama 3."""

_FIXED = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "pad_token")
MOST_MESSAGES, MOST_TOOLS = 4096, 512


def checked_messages(given: Any) -> list[dict[str, Any]]:
    """Checks messages and converts them for the chat template: the content of a message becomes a text, and the
    arguments of a tool call become an object.

    Raises:
      RequestError: `given` is not a list of valid messages, or the content of a message has a part that is not text.
    """
    if not isinstance(given, list) or not given:
        raise RequestError("messages: it must be a list with at least one message", "messages")
    if len(given) > MOST_MESSAGES:
        raise RequestError(f"messages: it has {len(given)} items, at most {MOST_MESSAGES} are allowed", "messages")
    return [_checked_message(f"messages[{place}]", message) for place, message in enumerate(given)]


def _checked_message(name: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f"{name}: it must be an object with a role", name)
    content = message.get("content")
    if isinstance(content, list):
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if not all(isinstance(text, str) for text in texts):
            raise RequestError(f"{name}.content: only parts of type text are supported", f"{name}.content")
        content = "".join(map(str, texts))
    calls = message.get("tool_calls")
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise RequestError(f"{name}.content: it must be a text or a list of parts", f"{name}.content")
    found = {key: value for key, value in message.items() if value is not None} | {"content": content}
    if calls is not None:
        found["tool_calls"] = _checked_calls(f"{name}.tool_calls", calls)
    return found


def _checked_calls(name: str, calls: Any) -> list[dict[str, Any]]:
    """Checks tool calls and parses their arguments, because chat templates take parsed arguments and write the
    arguments as JSON."""
    if not isinstance(calls, list):
        raise RequestError(f"{name}: it must be a list", name)
    found = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"{name}: each call must have a function with a name", name)
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments else {}
            except (ValueError, RecursionError):
                raise RequestError(f"{name}: the arguments of {function['name']!r} are not valid JSON", name) from None
        found.append({**call, "function": {**function, "arguments": arguments}})
    return found


def checked_tools(given: Any) -> list[dict[str, Any]]:
    """Returns the tools of a request. Raises RequestError if a tool is not a function with a name."""
    if given is None:
        return []
    if not isinstance(given, list) or len(given) > MOST_TOOLS:
        raise RequestError(f"tools: it must be a list of at most {MOST_TOOLS} tools", "tools")
    for tool in given:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise RequestError('tools: each must be {"type": "function", "function": {"name": ...}}', "tools")
    return given


def chat_tokens(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    most: int,
) -> list[int]:
    """Returns the token ids of a conversation, followed by the token ids with which an answer begins.

    Control tokens that are written in messages are encoded as plain text. If a conversation has more than `most`
    tokens, the result may contain only the beginning of the conversation.

    Raises:
      RequestError: there is no chat template, the template fails, `variables` has a name that cannot be set, or the
        result has no tokens.
    """
    if tokenizer.chat_template is None:
        raise RequestError("the model has no chat template; use /v1/completions", "messages")
    for name in _FIXED:
        if name in variables:
            raise RequestError(f"chat_template_kwargs.{name}: it cannot be set", f"chat_template_kwargs.{name}")
    further = {**variables, **({"tools": [dict(tool) for tool in tools]} if tools else {})}
    try:
        (text,) = tokenizer.render_guarded([messages], True, **further)
        if isinstance(text, UserError):
            raise text
        tokens = tokenizer.encode_guarded(text, most)
    except UserError as error:
        raise RequestError(str(error), "messages") from None
    if not tokens:
        raise RequestError("messages: the prompt has no tokens", "messages")
    return tokens


def parsed_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Splits the text of an answer into the content before the tool calls and the tool calls in the format of OpenAI.

    If a call is malformed, the whole text is the content and the list of calls is empty.
    """
    calls = tool_calls(text)
    if not calls or any(call.error is not None for call in calls):
        return text, []
    thought, end, answer = text.rpartition(_THOUGHT)
    first = answer.find(_CALL)
    content = f"{thought}{end}{answer[: max(first, 0)]}".rstrip()
    return content, [
        {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in calls
    ]


class CallStream:
    """Separates the streamed text of an answer into content and tool calls."""

    def __init__(self) -> None:
        self._text, self._sent = "", 0

    def add(self, text: str) -> str:
        """Adds text of the answer. Returns the content that was not returned before and is certainly not part of a tool
        call."""
        self._text += text
        first = self._text.rfind(_THOUGHT)
        first = 0 if first < 0 else first + len(_THOUGHT)
        begun = self._text[first:].lstrip()
        if any(begun.startswith(start) or start.startswith(begun) for start in _STARTS_OF_ANSWER):
            end = first
        elif (end := self._text.find(_CALL, first)) < 0:
            sizes = range(min(len(_CALL) - 1, len(self._text)), 0, -1)
            end = len(self._text) - next((size for size in sizes if _CALL.startswith(self._text[-size:])), 0)
        end = max(len(self._text[:end].rstrip()), self._sent)
        ready, self._sent = self._text[self._sent : end], end
        return ready

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """Returns the content that `add` has not returned, and the tool calls in the format of OpenAI. No text may be
        added afterwards."""
        content, calls = parsed_calls(self._text)
        return content[self._sent :], calls
