"""Prevents control tokens in data: a control token in the text of a row (`<|im_end|>` in a question) is encoded as
ordinary characters, never as the token.

Text from data that a template inserts is marked with Unicode noncharacters (U+FDD0 to U+FDEF), which do not occur in
valid text. Control tokens in the marked text are replaced by references, which a chat template does not change.
"""

from __future__ import annotations

import functools
import itertools
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

_BEGIN = "\ufdd0"
_END = "\ufdd1"
_OPEN = "\ufdd2"
_CLOSE = "\ufdd3"
_RESERVED = re.compile("[\ufdd0-\ufdef]")
_MARKED = re.compile(f"{_BEGIN}([^{_BEGIN}{_END}]*){_END}")
_REFERENCE = re.compile(f"{_OPEN}(\\d*){_CLOSE}")
_WIDEST = 10_000
"""Maximum width or precision of a field in a template. Without a limit, `{column:>1000000000}` would exhaust the
memory."""

_CUT = _OPEN + _CLOSE
"""A separator between two texts, so that they are encoded separately. It is written like a reference to a control
token, but names no token."""


class _Marking(string.Formatter):
    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        """Looks up the value for a field of a template. A field name with dots or brackets is first looked up as the
        name of a value. If there is no such value, the name is read as an attribute or item of another value."""
        if kwargs.get(field_name) is not None:
            return kwargs[field_name], field_name
        return super().get_field(field_name, args, kwargs)

    def format_field(self, value: Any, format_spec: str) -> str:
        for number in re.findall(r"\d+", format_spec):
            if len(number) > 18 or int(number) > _WIDEST:
                raise ValueError(
                    f"the format '{format_spec:.40}' has a width or precision of {number:.20}; the maximum is {_WIDEST}"
                )
        return f"{_BEGIN}{_clean(format(value, format_spec))}{_END}"


class Filled(str):
    """The text of a filled template; `values` are the `[begin, end)` positions of the inserted values."""

    values: list[tuple[int, int]]

    def beginning(self, size: int) -> Filled:
        """Returns the first `size` characters of the text, with the positions of the inserted values in them."""
        out = Filled(self[:size])
        out.values = [(begin, min(end, size)) for begin, end in self.values if begin < size]
        return out


def fill(template: str, values: Mapping[str, Any]) -> Filled:
    """Returns `template.format_map(values)` together with the positions of the inserted values. Names of values can
    contain dots and brackets: `a.b`, `a[b]`."""
    pieces = _MARKED.split(_Marking().vformat(_clean(template), (), values))  # template, value, template, ...
    filled = Filled("".join(pieces))
    ends = list(itertools.accumulate(map(len, pieces)))
    filled.values = list(zip(ends[::2], ends[1::2], strict=False))
    return filled


def refer(text: str, control: Sequence[str], *, everything: bool) -> str:
    """Replaces each control token in a text by a reference if at least a part of the token comes from data.

    Args:
      control: the texts of the control tokens; a reference contains an index into this list.
      everything: True if the whole text is data; False if only the values inserted into a template are data.
    """
    clean = _clean(text)
    if not any(token in clean for token in control):
        return clean
    values = [(0, len(clean))] if everything else text.values if isinstance(text, Filled) else []

    def replace(token: re.Match[str]) -> str:
        from_data = any(begin < token.end() and token.start() < end for begin, end in values)
        return f"{_OPEN}{control.index(token[0])}{_CLOSE}" if from_data else token[0]

    longest = sorted(control, key=len, reverse=True)
    return re.sub("|".join(map(re.escape, longest)), replace, clean)


def refer_deep(value: Any, control: Sequence[str]) -> Any:
    """Replaces control tokens by references (see `refer`) in each string of a JSON value, including the keys of
    mappings. The whole value counts as data.

    A chat template can join two texts, or write a text between `<` and `>`. If a text ends with the beginning of a
    control token, or begins with the rest of one, a separator is added, because the text and its neighbour could
    otherwise form the token together.
    """
    if isinstance(value, str):
        return _cut(refer(value, control, everything=True), tuple(control))
    if isinstance(value, Mapping):
        return {refer_deep(key, control): refer_deep(inner, control) for key, inner in value.items()}
    return [refer_deep(item, control) for item in value] if isinstance(value, list | tuple) else value


def texts(value: Any) -> Iterator[str]:
    """Yields all strings in a JSON value, except the keys of mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from texts(inner)


def beginnings(value: Any, size: int) -> Any:
    """Returns a JSON value in which each string, except the keys of mappings, is truncated to `size` characters."""
    if isinstance(value, Filled):
        return value.beginning(size)
    if isinstance(value, str):
        return value[:size]
    if isinstance(value, Mapping):
        return {key: beginnings(inner, size) for key, inner in value.items()}
    return [beginnings(inner, size) for inner in value] if isinstance(value, list | tuple) else value


def parts(text: str, control: Sequence[str]) -> list[tuple[str, bool]]:
    """Splits a text at the references that `refer` inserted in place of control tokens. Returns pairs
    `(piece, from_data)`: for a reference, its control token and True; for other text, this text and False. A separator,
    which `refer_deep` inserts between two texts, gives an empty text and True."""
    pieces = _REFERENCE.split(text)  # text, number, text, number, ..., text
    return [
        (control[int(piece)] if piece else "", True) if i % 2 else (piece, False)
        for i, piece in enumerate(pieces)
        if i % 2 or piece
    ]


def _cut(text: str, control: tuple[str, ...]) -> str:
    """Adds separators to a text whose end or beginning can be a part of a control token. White space at the ends of the
    text is ignored, because a template can strip it."""
    kept = text.strip()
    pieces = _pieces(control)
    head = kept[: pieces.longest]
    tail = kept[-pieces.longest :]
    # Most texts lack the first and the last characters of control tokens (such as `<` and `>`), and need no search.
    front = back = kept in pieces.inner
    if not pieces.lasts.isdisjoint(head):
        front |= any(head[:size] in pieces.rests for size in range(1, len(head) + 1))
    if not pieces.firsts.isdisjoint(tail):
        back |= any(tail[-size:] in pieces.prefixes for size in range(1, len(tail) + 1))
    begin = len(text) - len(text.lstrip())
    end = len(text.rstrip())
    return f"{text[:begin]}{_CUT * front}{kept}{_CUT * back}{text[end:]}" if front or back else text


class _Pieces(NamedTuple):
    """Parts of the control tokens: first and last characters, beginnings, rests and inner parts."""

    firsts: frozenset[str]
    lasts: frozenset[str]
    prefixes: frozenset[str]
    rests: frozenset[str]
    inner: frozenset[str]
    longest: int


@functools.lru_cache(maxsize=8)
def _pieces(control: tuple[str, ...]) -> _Pieces:
    """Returns the parts of the control tokens, and the length of the longest token.

    Rests and inner parts that are words, or are single characters, are left out, because they are common in texts and
    names, such as `user` in `<|user|>`. No template writes the rest of such a token beside a text.
    """
    prefixes = {token[:size] for token in control for size in range(1, len(token))}
    rests = {token[size:] for token in control for size in range(1, len(token) - 1)}
    inner = {token[begin:end] for token in control for end in range(len(token)) for begin in range(1, end)}

    def unusual(pieces: set[str]) -> frozenset[str]:
        return frozenset(piece for piece in pieces if len(piece) > 1 and not piece.isidentifier())

    return _Pieces(
        frozenset(token[0] for token in control),
        frozenset(token[-1] for token in control),
        frozenset(prefixes),
        unusual(rests),
        unusual(inner),
        max(map(len, control), default=0),
    )


def _clean(text: str) -> str:
    """Replaces the noncharacters U+FDD0 to U+FDEF in a text by U+FFFD. This module uses them as marks, so data must not
    contain them."""
    return _RESERVED.sub("\ufffd", text)
