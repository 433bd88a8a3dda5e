"""Remembers the results of recent prompts, and finds the one that has the longest prefix in common with a new prompt.

The lookup needs no hashes: in a sorted list of prompts, the longest common prefix with a new prompt is that of a
neighbour of its place in the list.
"""

from __future__ import annotations

import bisect
from typing import Generic, TypeVar

Value = TypeVar("Value")

Tokens = tuple[int, ...]


class Prefixes(Generic[Value]):
    """Values of prompts, whose sizes sum to at most `room`. The least recently used ones are dropped."""

    def __init__(self, room: int):
        self.room = room
        self.clear()

    def clear(self) -> None:
        self._used = 0
        self._entries: dict[Tokens, tuple[Value, int]] = {}  # the least recently used entry is the first
        self._sorted: list[Tokens] = []

    def find(self, prompt: Tokens) -> tuple[Tokens, int] | None:
        """Returns the stored prompt that has the longest prefix in common with `prompt`, and the number of tokens of
        this prefix. Returns None if no stored prompt begins with the same token."""
        place = bisect.bisect_left(self._sorted, prompt)
        near = self._sorted[max(place - 1, 0) : place + 1]
        common, stored = max(((_common(prompt, each), each) for each in near), default=(0, ()))
        return (stored, common) if common else None

    def use(self, prompt: Tokens) -> Value:
        """Returns the value of a stored prompt, which becomes the most recently used one."""
        entry = self._entries[prompt] = self._entries.pop(prompt)
        return entry[0]

    def add(self, prompt: Tokens, value: Value, size: int) -> None:
        """Stores a value; `size` is at most `room`. Drops the stored prompts just before it in the sorted order with
        which it begins: whoever continues these finds the new prompt."""
        self._drop(prompt)
        while place := bisect.bisect_left(self._sorted, prompt):
            if prompt[: len(before := self._sorted[place - 1])] != before:
                break
            self._drop(before)
        while self._used + size > self.room:
            self._drop(next(iter(self._entries)))
        bisect.insort(self._sorted, prompt)
        self._entries[prompt] = value, size
        self._used += size

    def _drop(self, prompt: Tokens) -> None:
        if prompt in self._entries:
            self._used -= self._entries.pop(prompt)[1]
            del self._sorted[bisect.bisect_left(self._sorted, prompt)]


def _common(first: Tokens, second: Tokens) -> int:
    """Returns the number of tokens with which both begin."""
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return place
    return min(len(first), len(second))
