"""Converts tokens to text as the tokens arrive: finds stop strings, separates tool calls from content."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tunix_like.environments.chat_messages import THOUGHT, parsed_calls
from tunix_like.text.tool_calls import LLAMA_TAG

_STARTS_OF_CALLS = ("<tool_call>", LLAMA_TAG)

Decode = Callable[[Sequence[int]], str]


class Added(NamedTuple):
    """The text that new tokens add to a completion.

    Attributes:
      text: new text that later tokens cannot change, without the stop string.
      used: number of tokens that belong to the completion. Tokens after a stop string do not belong to it.
      stop: the stop string that ended the completion.
    """

    text: str
    used: int
    stop: str | None


class TextStream:
    """Converts the tokens of one completion to text as the tokens arrive. New tokens are decoded with the last earlier
    ones, not with the whole completion.

    Incomplete characters, and text that may be the beginning of a stop string, are held until further tokens arrive.
    All returned texts together are `decode(all tokens)`, up to the stop string.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = ()):
        self._decode = decode
        self._stops = [stop for stop in stops if stop]
        self._window: list[int] = []  # the last tokens; the first `_read` are decoded already
        self._read = 0
        self._held = ""

    def add(self, tokens: Sequence[int], last: bool) -> Added:
        """Adds tokens to the completion. `last` is True if no more tokens follow. If there are stop strings, tokens are
        decoded one by one."""
        if not self._stops:
            return Added(self._decoded(tokens, last), len(tokens), None)
        text = ""
        for place, token in enumerate(tokens):
            self._held += self._decoded([token], last and place == len(tokens) - 1)
            found = [(start, stop) for stop in self._stops if (start := self._held.find(stop)) >= 0]
            if found:
                start, stop = min(found)
                return Added(text + self._held[:start], place + 1, stop)
            kept = 0 if last and place == len(tokens) - 1 else self._beginning()
            text += self._held[: len(self._held) - kept]
            self._held = self._held[len(self._held) - kept :]
        if last:
            text = text + self._held
            self._held = ""
        return Added(text, len(tokens), None)

    def _beginning(self) -> int:
        """Returns the length of the longest suffix of the held text that is a prefix of a stop string."""
        longest = min(len(self._held), max(map(len, self._stops)) - 1)
        sizes = range(longest, 0, -1)
        return next((size for size in sizes if any(stop.startswith(self._held[-size:]) for stop in self._stops)), 0)

    def _decoded(self, tokens: Sequence[int], last: bool) -> str:
        self._window += tokens
        before = self._decode(self._window[: self._read])
        after = self._decode(self._window)
        if not last and after.endswith("\ufffd"):  # probably an incomplete character
            return ""
        # The next tokens are decoded together with these tokens, because a leading space can depend on the text before
        # it.
        if len(after) > len(before):
            self._window = self._window[self._read :]
        self._read = len(self._window)
        return after[len(before) :]


class CallStream:
    """Separates the streamed text of an answer into content and tool calls."""

    def __init__(self) -> None:
        self._text = ""
        self._sent = 0

    def add(self, text: str) -> str:
        """Adds text of the answer. Returns the content that was not returned before and is certainly not part of a tool
        call."""
        self._text += text
        first = self._text.rfind(THOUGHT)
        first = 0 if first < 0 else first + len(THOUGHT)
        begun = self._text[first:].lstrip()
        if not begun or begun.startswith("{"):  # the whole answer may be a tool call in the format of Llama 3
            end = first
        else:
            starts = [place for start in _STARTS_OF_CALLS if (place := self._text.find(start, first)) >= 0]
            end = min(starts, default=len(self._text) - self._beginning())
        end = max(len(self._text[:end].rstrip()), self._sent)
        ready = self._text[self._sent : end]
        self._sent = end
        return ready

    def _beginning(self) -> int:
        """Returns the length of the longest suffix of the text that is the beginning of a tool call."""
        longest = min(len(self._text), max(map(len, _STARTS_OF_CALLS)) - 1)
        return next(
            (n for n in range(longest, 0, -1) if any(s.startswith(self._text[-n:]) for s in _STARTS_OF_CALLS)), 0
        )

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """Returns the content that `add` has not returned, and the tool calls in the format of OpenAI. No text may be
        added afterwards."""
        content, calls = parsed_calls(self._text)
        return content[self._sent :], calls
