"""Reads the tool calls in the text of a turn, in the format of Hermes and Qwen or in the format of Llama 3."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_THINKING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
LLAMA_TAG = "<|python_tag|>"
_DECODER = json.JSONDecoder()

MOST_CALLS = 32
"""Maximum number of tool calls of one turn that are read. All further calls together become one malformed call."""


class ToolCall(NamedTuple):
    """One call. `name` is "" if it could not be read; `error` is why the call is malformed."""

    name: str
    arguments: dict[str, Any]
    error: str | None = None


def without_thinking(text: str) -> str:
    text = _THINKING.sub("", text)
    # The chat template may have opened the block in the prompt.
    return text.rpartition("</think>")[2]


def tool_calls(text: str) -> list[ToolCall]:
    """Returns the tool calls in the text of a turn, in their order. Returns an empty list if there are none. This
    function raises no exception.

    Two forms are read. Hermes and Qwen write `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` once per call,
    anywhere in the turn. In Llama 3, the whole turn consists of one object `{"name": ..., "parameters": {...}}` per
    call. The objects are separated by `;` or newlines. The text of a `<think>` block is not searched.
    """
    text = without_thinking(text)
    bodies = _HERMES.findall(text)
    calls = [_hermes_call(body) for body in bodies[:MOST_CALLS]] if bodies else _llama_calls(text)
    if len(bodies) > MOST_CALLS or len(calls) > MOST_CALLS:
        calls = [*calls[:MOST_CALLS], ToolCall("", {}, f"a turn may have at most {MOST_CALLS} tool calls")]
    return calls


def without_calls(text: str) -> str:
    """Returns the text of a turn, without its thoughts, outside of its tool calls, if it has any."""
    return _HERMES.sub("", text) if _HERMES.search(text) else text.rpartition(LLAMA_TAG)[0]


def _hermes_call(body: str) -> ToolCall:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"the tool call is not valid JSON: {_reason(error)}")
    return _call_of(value)


def _llama_calls(text: str) -> list[ToolCall]:
    """Returns the calls in the format of Llama 3. Text that looks like a call but cannot be read becomes a call with an
    error."""
    marked = LLAMA_TAG in text
    text = text.rpartition(LLAMA_TAG)[2].strip()
    if not text.startswith("{"):
        return [ToolCall("", {}, "the tool call is not a JSON object")] if marked else []
    calls: list[ToolCall] = []
    position = 0
    while position < len(text) and len(calls) <= MOST_CALLS:
        try:
            value, position = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            # a turn that begins with an opening brace is not always a call; it can be an answer in LaTeX or JSON
            if not (calls or marked or _looks_like_call(text)):
                return []
            return [*calls, ToolCall("", {}, f"the tool call is not valid JSON: {_reason(error)}")]
        if not (calls or marked or _is_call(value)):
            return []
        calls.append(_call_of(value))
        while position < len(text) and (text[position].isspace() or text[position] == ";"):
            position += 1
    return calls


def _looks_like_call(text: str) -> bool:
    return '"name"' in text and ('"parameters"' in text or '"arguments"' in text)


def _is_call(value: Any) -> bool:
    return isinstance(value, dict) and "name" in value and ("parameters" in value or "arguments" in value)


def _call_of(value: Any) -> ToolCall:
    if not isinstance(value, dict):
        return ToolCall("", {}, "the tool call is not a JSON object")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return ToolCall("", {}, 'the tool call has no "name"')
    try:
        return ToolCall(name, arguments_of(value.get("arguments", value.get("parameters"))))
    except ValueError:
        return ToolCall(name, {}, "the arguments of the tool call are not a JSON object")


def arguments_of(value: Any) -> dict[str, Any]:
    """Returns the arguments of a tool call as a dict. OpenAI, and some models, write them as JSON text, and an empty
    text for no arguments. Raises ValueError if they are not an object."""
    try:
        arguments = json.loads(value.strip() or "{}") if isinstance(value, str) else value
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if arguments is not None and not isinstance(arguments, Mapping):
        raise ValueError("it is not an object")
    return dict(arguments or {})


def _reason(error: Exception) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else "it is nested too deeply or a number is too long"
