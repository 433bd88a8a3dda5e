"""Splits an answer into thought, text and tool calls for the protocols that send them as separate parts, and restores
the content of the chat message from these parts.

The parts contain all characters of the content. A conversation that comes back in a protocol is therefore rendered as
the same conversation in the format of chat completions.
"""

from __future__ import annotations

import abc
import base64
import binascii
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tunix_like.environments.chat_messages import MOST_MESSAGES, THOUGHT, wrong
from tunix_like.text.tool_calls import arguments_of

THINK = "<think>"
_SEAL = "tunix-like:"

Event = dict[str, Any]


class Usage(NamedTuple):
    """Numbers of tokens. `cached`: those of the prompt that were not computed, because an earlier prompt has them."""

    prompt: int
    completion: int = 0
    cached: int = 0


def is_opened(prompt_end: str) -> bool:
    """Whether the chat template has opened the thought of the answer at the end of the prompt."""
    return prompt_end.rstrip().endswith(THINK)


def sealed(raw: str) -> str:
    """Returns an opaque text for `unsealed`: a thought with its marks and the spaces around them."""
    return _SEAL + base64.b64encode(raw.encode(errors="surrogatepass")).decode()


def unsealed(seal: Any, thought: str) -> str:
    """Returns the thought with its marks, from `seal` if `sealed` wrote it."""
    if isinstance(seal, str) and seal.startswith(_SEAL):
        try:
            return base64.b64decode(seal.removeprefix(_SEAL), validate=True).decode(errors="surrogatepass")
        except (binascii.Error, UnicodeDecodeError):
            pass
    return f"{THINK}\n{thought}\n{THOUGHT}\n\n"


class Thoughts:
    """Splits the streamed content of an answer into `thought`, `seal` (see `sealed`) and `text`. The seal follows the
    last part of the thought.

    Args:
      opened: whether the content begins within a thought.
    """

    def __init__(self, opened: bool):
        self._opened = opened
        self._held = ""
        self._raw = ""
        self._state = "start"

    def add(self, content: str, last: bool) -> Iterator[tuple[str, str]]:
        """Yields the kind and the text of each new part. Spaces beside the marks belong to the seal only."""
        self._held += content
        if self._state == "start":
            begun = self._held.lstrip()
            if THINK.startswith(begun) and begun != THINK and not last:
                return
            marked = begun.startswith(THINK)
            if marked or self._opened:
                rest = (begun.removeprefix(THINK) if marked else begun).lstrip()
                if not rest and not last:
                    return
                self._pass(len(self._held) - len(rest))
                self._state = "thought"
            else:
                self._state = "text"
        if self._state == "thought":
            yield from self._thought(last)
        if self._state == "text" and self._held:
            text = self._held
            self._held = ""
            yield "text", text

    def _thought(self, last: bool) -> Iterator[tuple[str, str]]:
        end = self._held.find(THOUGHT)
        known = self._held if end < 0 else self._held[:end]
        if end < 0 and not last:
            sizes = range(min(len(THOUGHT) - 1, len(known)), 0, -1)
            known = known[: len(known) - next((size for size in sizes if THOUGHT.startswith(known[-size:])), 0)]
        if body := self._pass(len(known.rstrip())):
            yield "thought", body
        rest = "" if end < 0 else self._held.lstrip().removeprefix(THOUGHT).lstrip()
        if last or rest:
            self._pass(len(self._held) - len(rest))
            self._state = "text"
            yield "seal", sealed(self._raw)

    def _pass(self, size: int) -> str:
        """Moves the next characters from the held text to the sealed text."""
        passed = self._held[:size]
        self._held = self._held[size:]
        self._raw += passed
        return passed


class ProtocolReply(abc.ABC):
    """The answer to a request in the form of a protocol. The events of the stream build the body of the whole answer.

    Attributes:
      body: the body of the whole answer; complete after `finish`.
    """

    body: dict[str, Any]

    def __init__(self, opened: bool):
        self._thoughts = Thoughts(opened)

    @abc.abstractmethod
    def begin(self, usage: Usage) -> Iterator[Event]: ...

    def add(self, content: str, last: bool = False) -> Iterator[Event]:
        """Adds content of the answer, which must not include tool calls."""
        for kind, text in self._thoughts.add(content, last):
            yield from self._part(kind, text)

    def finish(
        self, content: str, calls: Sequence[Mapping[str, Any]], reason: str, stop: str | None, usage: Usage
    ) -> Iterator[Event]:
        """Adds the last content and the tool calls in the format of OpenAI.

        Args:
          reason: "stop" or "length".
          stop: the stop string that ended the answer.
        """
        yield from self.add(content, last=True)
        yield from self._end(calls, reason, stop, usage)

    @abc.abstractmethod
    def _part(self, kind: str, text: str) -> Iterator[Event]:
        """Adds a part (see `Thoughts`)."""

    @abc.abstractmethod
    def _end(
        self, calls: Sequence[Mapping[str, Any]], reason: str, stop: str | None, usage: Usage
    ) -> Iterator[Event]: ...


def sse(event: Event) -> str:
    """Returns the text of a server-sent event with its name."""
    return f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n"


def items_of(name: str, given: Any) -> list[dict[str, Any]]:
    """Returns a list of objects of a request. Fields with the value null count as absent."""
    if not isinstance(given, list) or not 0 < len(given) <= MOST_MESSAGES:
        raise wrong(name, f"it must be a list of 1 to {MOST_MESSAGES} objects")
    if not all(isinstance(item, dict) for item in given):
        raise wrong(name, "each entry must be an object")
    return [{key: value for key, value in item.items() if value is not None} for item in given]


def text_of(name: str, content: Any, kinds: Sequence[str]) -> str:
    """Returns a content, which is a text or a list of parts with texts of these kinds, as one text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(name, "it must be a text or a list of parts")
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") in kinds else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise wrong(name, f"only parts of type {' or '.join(kinds)} are supported")
    return "".join(map(str, texts))


def field_of(name: str, item: Mapping[str, Any], key: str) -> str:
    value = item.get(key)
    if not isinstance(value, str) or not value:
        raise wrong(f"{name}.{key}", "it must be a text that is not empty")
    return value


def call_of(name: str, id: str, function: str, arguments: Any) -> dict[str, Any]:
    """Returns a tool call of a chat message, with the JSON text of its arguments."""
    try:
        found = arguments_of(arguments)
    except ValueError:
        raise wrong(name, f"the arguments of {function!r} are not a JSON object") from None
    text = json.dumps(found, ensure_ascii=False)  # of an object, the values that are None would be left out
    return {"id": id, "type": "function", "function": {"name": function, "arguments": text}}


def tool_of(name: str, tool: Mapping[str, Any], parameters: str) -> dict[str, Any]:
    """Returns a tool in the format of chat completions. `parameters` is the name of the field with the schema."""
    fields = {"name": field_of(name, tool, "name"), "description": tool.get("description")}
    fields["parameters"] = tool.get(parameters)
    return {"type": "function", "function": {key: value for key, value in fields.items() if value is not None}}


def with_system(texts: Sequence[str], messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with one system message before them, because many chat templates have only one. It holds
    `texts` and the system messages at the beginning of `messages`."""
    count = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
    parts = [*texts, *(message["content"] for message in messages[:count])]
    head = [{"role": "system", "content": "\n\n".join(parts)}] if parts else []
    return [*head, *messages[count:]]
