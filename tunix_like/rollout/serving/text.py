"""Converts tokens to text as the tokens arrive, and finds stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

Decode = Callable[[Sequence[int]], str]


class Added(NamedTuple):
    """The text that new tokens add to a completion.

    Attributes:
      text: new text that later tokens cannot change. Text that can still change is returned by a later call of
        `TextStream.add`.
      used: number of tokens that belong to the completion. Tokens after a stop string do not belong to it.
      stop: the stop string that ended the completion; None if there is none. The stop string is not part of `text`.
    """

    text: str
    used: int
    stop: str | None


class TextStream:
    """Converts the tokens of one completion to text as the tokens arrive. When new tokens arrive, only the last earlier
    tokens are decoded again with them, not the whole completion.

    An incomplete character is returned only when it is complete. Text that may be the beginning of a stop string is
    held until further text shows that no stop string begins there. All returned texts together are `decode(all
    tokens)`, up to the stop string.

    Args:
      decode: function that converts token ids to text.
      stops: strings that end the completion.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = ()):
        self._decode, self._stops = decode, [stop for stop in stops if stop]
        self._window: list[int] = []  # the last tokens; the first `_read` are decoded already
        self._read = 0
        self._held = ""

    def add(self, tokens: Sequence[int], last: bool) -> Added:
        """Adds tokens to the completion, and returns the new text. `last` is True if no more tokens follow. If there
        are stop strings, tokens are decoded one by one."""
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
            text, self._held = text + self._held, ""
        return Added(text, len(tokens), None)

    def _beginning(self) -> int:
        """Returns the length of the longest suffix of the held text that is a prefix of a stop string. Held text is
        text that `add` has not returned yet."""
        longest = min(len(self._held), max(map(len, self._stops)) - 1)
        sizes = range(longest, 0, -1)
        return next((size for size in sizes if any(stop.startswith(self._held[-size:]) for stop in self._stops)), 0)

    def _decoded(self, tokens: Sequence[int], last: bool) -> str:
        """Returns the text that new tokens add. The result is empty if the text ends with an incomplete character and
        more tokens follow (`last` is False)."""
        self._window += tokens
        before, after = self._decode(self._window[: self._read]), self._decode(self._window)
        if not last and after.endswith("\ufffd"):  # probably an incomplete character
            return ""
        # The next tokens are decoded together with these tokens, because a leading space can depend on the text before
        # it.
        if len(after) > len(before):
            self._window = self._window[self._read :]
        self._read = len(self._window)
        return after[len(before) :]
