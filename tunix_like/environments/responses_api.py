"""Converts requests of OpenAI's `/v1/responses` to chats, and answers to its form."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tunix_like.environments.chat_messages import MOST_TOOLS, wrong
from tunix_like.environments.wire import (
    Event,
    ProtocolReply,
    Usage,
    call_of,
    field_of,
    items_of,
    text_of,
    tool_of,
    unsealed,
    with_system,
)

STATELESS = "answers are not stored; send the whole conversation in `input`"

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXTS = ("input_text", "output_text", "text")


def messages_of(given: Any, instructions: str | None) -> list[dict[str, Any]]:
    """Returns the chat messages of `input` and `instructions`. Consecutive items of the assistant become one message:
    a reasoning item, a message, function calls. Raises RequestError."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the assistant's message to which further items belong
    for place, item in enumerate(items_of("input", given)):
        name = f"input[{place}]"
        kind = item.get("type", "message")
        if kind == "function_call_output":
            turn = None
            output = text_of(f"{name}.output", item.get("output"), _TEXTS)
            messages.append({"role": "tool", "tool_call_id": field_of(name, item, "call_id"), "content": output})
            continue
        if kind == "message" and (role := _role(name, item)) != "assistant":
            turn = None
            content = text_of(f"{name}.content", item.get("content"), _TEXTS)
            messages.append({"role": role, "content": content})
            continue
        if kind == "item_reference":
            raise wrong(name, STATELESS)
        if kind not in ("message", "reasoning", "function_call"):
            raise wrong(f"{name}.type", f"{str(kind)[:64]!r} is not supported")
        if turn is None or kind == "reasoning" or (kind == "message" and "tool_calls" in turn):
            turn = {"role": "assistant", "content": ""}
            messages.append(turn)
        if kind == "reasoning":
            thought = text_of(f"{name}.content", item.get("content", []), ("reasoning_text",))
            turn["content"] += unsealed(item.get("encrypted_content"), thought)
        elif kind == "message":
            turn["content"] += text_of(f"{name}.content", item.get("content"), _TEXTS)
        else:
            function = field_of(name, item, "name")
            call = call_of(name, field_of(name, item, "call_id"), function, item.get("arguments"))
            turn.setdefault("tool_calls", []).append(call)
    return with_system([instructions] if instructions else [], messages)


def _role(name: str, item: Mapping[str, Any]) -> str:
    if (role := item.get("role")) not in _ROLES:
        raise wrong(f"{name}.role", f"got {str(role)[:24]!r}; valid: {', '.join(_ROLES)}")
    return _ROLES[str(role)]


def tools_of(given: Any) -> list[dict[str, Any]]:
    """Returns the tools in the format of chat completions. Raises RequestError for tools that are no functions."""
    if given is None or given == []:
        return []
    if not isinstance(given, list) or len(given) > MOST_TOOLS:
        raise wrong("tools", f"it must be a list of at most {MOST_TOOLS} tools")
    found = []
    for place, tool in enumerate(items_of("tools", given)):
        if tool.get("type") != "function":
            raise wrong(f"tools[{place}].type", f"got {str(tool.get('type'))[:64]!r}; only 'function' is supported")
        found.append(tool_of(f"tools[{place}]", tool, "parameters"))
    return found


class ResponsesReply(ProtocolReply):
    """An answer of `/v1/responses`: a reasoning item, a message and function calls, each if there is one. An empty
    answer has a message, so that the turn is not missing in the history that comes back.

    The text of the reasoning is not counted in `reasoning_tokens`.
    """

    def __init__(self, model: str, opened: bool, fields: Mapping[str, Any]):
        super().__init__(opened)
        self._output: list[dict[str, Any]] = []
        self._number = 0
        self.body = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "model": model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None,
            "instructions": None,
            "metadata": {},
            "temperature": None,
            "top_p": None,
            "max_output_tokens": None,
            "tool_choice": "auto",
            "tools": [],
            **fields,
        }

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number - 1, **fields}

    def begin(self, usage: Usage) -> Iterator[Event]:
        yield self._event("created", response=dict(self.body))
        yield self._event("in_progress", response=dict(self.body))

    def _part(self, kind: str, text: str) -> Iterator[Event]:
        if kind == "text":
            yield from self._more("message", text)
        elif kind == "thought":
            yield from self._more("reasoning", text)
        else:
            yield from self._more("reasoning", "")
            self._output[-1]["encrypted_content"] = text
            yield from self._close("completed")

    def _more(self, kind: str, text: str) -> Iterator[Event]:
        """Adds text to the current item, or to a new one."""
        delta = "output_text" if kind == "message" else "reasoning_text"
        if not self._output or self._output[-1]["type"] != kind:
            own: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            prefix = "msg" if kind == "message" else "rs"
            item = {"id": f"{prefix}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress", **own}
            yield self._event("output_item.added", output_index=len(self._output), item={**item, "content": []})
            lists: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "message" else {}
            part = {"type": delta, "text": "", **lists}
            self._output.append({**item, "content": [part]})
            yield self._event("content_part.added", **self._at(), part=dict(part))
        if text:
            self._output[-1]["content"][0]["text"] += text
            yield self._event(f"{delta}.delta", **self._at(), delta=text, **_no_logprobs(kind))

    def _at(self) -> dict[str, Any]:
        place = len(self._output) - 1
        return {"item_id": self._output[place]["id"], "output_index": place, "content_index": 0}

    def _close(self, status: str) -> Iterator[Event]:
        """Completes the current item, a message or reasoning."""
        item = self._output[-1]
        item["status"] = status
        (part,) = item["content"]
        yield self._event(f"{part['type']}.done", **self._at(), text=part["text"], **_no_logprobs(item["type"]))
        yield self._event("content_part.done", **self._at(), part=part)
        yield self._event("output_item.done", output_index=len(self._output) - 1, item=item)

    def _end(self, calls: Sequence[Mapping[str, Any]], reason: str, stop: str | None, usage: Usage) -> Iterator[Event]:
        status = "incomplete" if reason == "length" else "completed"
        if not calls and (not self._output or self._output[-1]["type"] == "reasoning"):
            yield from self._more("message", "")
        if self._output and self._output[-1]["type"] == "message":
            yield from self._close(status)
        for call in calls:
            yield from self._call(call)
        self.body |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if reason == "length" else None,
            "output": self._output,
            "usage": {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt + usage.completion,
            },
        }
        yield self._event(status, response=self.body)

    def _call(self, call: Mapping[str, Any]) -> Iterator[Event]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        item = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "call_id": call["id"], "name": name}
        item |= {"arguments": "", "status": "in_progress"}
        at = {"item_id": item["id"], "output_index": len(self._output)}
        yield self._event("output_item.added", output_index=len(self._output), item=dict(item))
        item |= {"arguments": arguments, "status": "completed"}
        yield self._event("function_call_arguments.delta", **at, delta=arguments)
        yield self._event("function_call_arguments.done", **at, name=name, arguments=arguments)
        yield self._event("output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)


def _no_logprobs(kind: str) -> dict[str, Any]:
    return {"logprobs": []} if kind == "message" else {}
