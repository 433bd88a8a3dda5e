"""Converts requests of Anthropic's `/v1/messages` to chats, and answers to its form."""

from __future__ import annotations

import json
import secrets
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

_KINDS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


def messages_of(given: Any, system: Any) -> list[dict[str, Any]]:
    """Returns the chat messages of `messages` and `system`. A tool result becomes a message of its own. Raises
    RequestError."""
    messages: list[dict[str, Any]] = []
    for place, message in enumerate(items_of("messages", given)):
        name = f"messages[{place}]"
        role = message.get("role")
        content = message.get("content")
        if role not in ("user", "assistant", "system"):
            raise wrong(f"{name}.role", f"got {str(role)[:24]!r}; valid: user, assistant, system")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
            raise wrong(f"{name}.content", "it must be a text or a list of blocks")
        if role == "assistant":
            messages.append(_turn(f"{name}.content", blocks))
        else:
            messages += _given(f"{name}.content", role, blocks)
    text = "" if system is None else text_of("system", system, ("text",))
    return with_system([text] if text else [], messages)


def _given(name: str, role: str, blocks: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    texts: list[str] = []
    for place, block in enumerate(blocks):
        if block.get("type") != "tool_result":
            texts.append(text_of(name, [block], ("text", "tool_result")))
            continue
        if texts:
            yield {"role": role, "content": "".join(texts)}
            texts = []
        where = f"{name}[{place}]"
        content = block.get("content")
        result = "" if content is None else text_of(f"{where}.content", content, ("text",))
        yield {"role": "tool", "tool_call_id": field_of(where, block, "tool_use_id"), "content": result}
    if texts or not blocks:
        yield {"role": role, "content": "".join(texts)}


def _turn(name: str, blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    content = ""
    calls = []
    for place, block in enumerate(blocks):
        where = f"{name}[{place}]"
        kind = block.get("type")
        if kind == "text":
            content += text_of(name, [block], ("text",))
        elif kind == "thinking":
            content += unsealed(block.get("signature"), str(block.get("thinking", "")))
        elif kind == "tool_use":
            function = field_of(where, block, "name")
            calls.append(call_of(where, field_of(where, block, "id"), function, block.get("input")))
        else:
            raise wrong(f"{where}.type", f"{str(kind)[:64]!r} is not supported; valid: text, thinking, tool_use")
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


def tools_of(given: Any) -> list[dict[str, Any]]:
    """Returns the tools in the format of chat completions. Raises RequestError for tools of Anthropic's servers."""
    if given is None or given == []:
        return []
    if not isinstance(given, list) or len(given) > MOST_TOOLS:
        raise wrong("tools", f"it must be a list of at most {MOST_TOOLS} tools")
    found = []
    for place, tool in enumerate(items_of("tools", given)):
        if tool.get("type", "custom") != "custom":
            raise wrong(f"tools[{place}].type", f"got {str(tool['type'])[:64]!r}; only 'custom' is supported")
        found.append(tool_of(f"tools[{place}]", tool, "input_schema"))
    return found


def calls_allowed(choice: Any) -> bool:
    """Whether the tools are shown to the model. Raises RequestError if `tool_choice` demands a call."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind not in (None, "auto", "none"):
        raise wrong("tool_choice.type", f"got {str(kind)[:64]!r}; valid: auto, none")
    if isinstance(choice, dict) and choice.get("disable_parallel_tool_use"):
        raise wrong("tool_choice.disable_parallel_tool_use", "it is not supported")
    return kind != "none"


def error_of(message: str, status: int) -> dict[str, Any]:
    """Returns the body of an error response, and the event of an error in a stream."""
    kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}


class MessagesReply(ProtocolReply):
    """An answer of `/v1/messages`: a block of thinking, of text and of each tool use. The signature of the thinking
    holds its exact text (see `wire.sealed`)."""

    def __init__(self, model: str, opened: bool):
        super().__init__(opened)
        self._content: list[dict[str, Any]] = []
        self.body = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {},
        }

    def begin(self, usage: Usage) -> Iterator[Event]:
        self.body["usage"] = _usage(usage)
        yield {"type": "message_start", "message": dict(self.body)}

    def _part(self, kind: str, text: str) -> Iterator[Event]:
        if kind == "text":
            if not self._content or self._content[-1]["type"] != "text":
                yield from self._open({"type": "text", "text": "", "citations": None})
            self._content[-1]["text"] += text
            yield self._delta(type="text_delta", text=text)
            return
        if not self._content:
            yield from self._open({"type": "thinking", "thinking": "", "signature": ""})
        if kind == "thought":
            self._content[-1]["thinking"] += text
            yield self._delta(type="thinking_delta", thinking=text)
        else:
            self._content[-1]["signature"] = text
            yield self._delta(type="signature_delta", signature=text)
            yield self._stop()

    def _open(self, block: dict[str, Any]) -> Iterator[Event]:
        self._content.append(block)
        yield {"type": "content_block_start", "index": len(self._content) - 1, "content_block": dict(block)}

    def _delta(self, **delta: Any) -> Event:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _stop(self) -> Event:
        return {"type": "content_block_stop", "index": len(self._content) - 1}

    def _end(self, calls: Sequence[Mapping[str, Any]], reason: str, stop: str | None, usage: Usage) -> Iterator[Event]:
        if self._content and self._content[-1]["type"] == "text":
            yield self._stop()
        for call in calls:
            function = call["function"]
            block = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
            yield from self._open(block)
            yield self._delta(type="input_json_delta", partial_json=function["arguments"])
            block["input"] = json.loads(function["arguments"])
            yield self._stop()
        if reason == "length":
            why = "max_tokens"
        elif stop is not None:
            why = "stop_sequence"
        else:
            why = "tool_use" if calls else "end_turn"
        ended = {"stop_reason": why, "stop_sequence": stop}
        self.body |= {**ended, "content": self._content, "usage": _usage(usage)}
        yield {"type": "message_delta", "delta": ended, "usage": _usage(usage)}
        yield {"type": "message_stop"}


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }
