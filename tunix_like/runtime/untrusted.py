"""Text that comes out of data stays text: a control token that a row spells (`<|im_end|>` in a question) is encoded as
the characters it is written with, never as the token.

What a template inserts is remembered by characters that Unicode keeps out of all text (U+FDD0 to U+FDEF); once the
control tokens are known, those in inserted text are replaced by a reference, which survives a chat template. This
module knows no tokenizer.
"""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_BEGIN, _END, _OPEN, _CLOSE = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
_RESERVED = re.compile("[\ufdd0-\ufdef]")
_MARKED = re.compile(f"{_BEGIN}([^{_BEGIN}{_END}]*){_END}")
_REFERENCE = re.compile(f"{_OPEN}(\\d*){_CLOSE}")
_WIDEST = 10_000
"""Width or precision that a format may ask for: `{column:>1000000000}` would fill the memory."""

_CUT = _OPEN + _CLOSE
"""A reference to no token: what stands at its sides is encoded apart."""


class _Marking(string.Formatter):
    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        """A name with dots or brackets is that of a value, where there is one, before it is a way into another."""
        if kwargs.get(field_name) is not None:
            return kwargs[field_name], field_name
        return super().get_field(field_name, args, kwargs)

    def format_field(self, value: Any, format_spec: str) -> str:
        for number in re.findall(r"\d+", format_spec):
            if len(number) > 18 or int(number) > _WIDEST:
                raise ValueError(
                    f"'{format_spec:.40}' asks for {number:.20} characters, and a format for at most {_WIDEST}"
                )
        return f"{_BEGIN}{_clean(format(value, format_spec))}{_END}"


class Filled(str):
    """A template with its values; `values` says where in it they stand, each from its begin to before its end."""

    values: list[tuple[int, int]]

    def beginning(self, size: int) -> Filled:
        """The first `size` characters."""
        out = Filled(self[:size])
        out.values = [(begin, min(end, size)) for begin, end in self.values if begin < size]
        return out


def fill(template: str, values: Mapping[str, Any]) -> Filled:
    """`template.format_map(values)`, but a value may be called `a.b` or `a[b]`; remembers what was inserted."""
    pieces = _MARKED.split(_Marking().vformat(_clean(template), (), values))  # template, value, template, ...
    filled, ends = Filled("".join(pieces)), list(itertools.accumulate(map(len, pieces)))
    filled.values = list(zip(ends[::2], ends[1::2], strict=False))
    return filled


def refer(text: str, control: Sequence[str], *, everything: bool) -> str:
    """The text with references in the place of the `control` tokens that data brought, or a part of one: anywhere
    where `everything` is data, else in what filled a template."""
    clean = _clean(text)
    if not any(token in clean for token in control):
        return clean
    values = [(0, len(clean))] if everything else text.values if isinstance(text, Filled) else []

    def replace(token: re.Match[str]) -> str:
        brought = any(begin < token.end() and token.start() < end for begin, end in values)
        return f"{_OPEN}{control.index(token[0])}{_CLOSE}" if brought else token[0]

    longest = sorted(control, key=len, reverse=True)
    return re.sub("|".join(map(re.escape, longest)), replace, clean)


def refer_deep(value: Any, control: Sequence[str]) -> Any:
    """`refer` for each string, keys of mappings too, in what a message may hold: JSON values, all of them data.

    A template joins the texts of a list, so one that ends as a control token begins is cut from what follows.
    """
    if isinstance(value, str):
        return refer(value, control, everything=True)
    if isinstance(value, Mapping):
        return {refer_deep(key, control): refer_deep(inner, control) for key, inner in value.items()}
    if not isinstance(value, list | tuple):
        return value
    items = [refer_deep(item, control) for item in value]
    for item in items:
        if isinstance(item, dict) and isinstance(item.get("text"), str):
            item["text"] = _cut(item["text"], control)
    return [_cut(item, control) if isinstance(item, str) else item for item in items]


def texts(value: Any) -> Iterator[str]:
    """The texts in plain values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from texts(inner)


def beginnings(value: Any, size: int) -> Any:
    """The value with the first `size` characters of each text in it."""
    if isinstance(value, Filled):
        return value.beginning(size)
    if isinstance(value, str):
        return value[:size]
    if isinstance(value, Mapping):
        return {key: beginnings(inner, size) for key, inner in value.items()}
    return [beginnings(inner, size) for inner in value] if isinstance(value, list | tuple) else value


def parts(text: str, control: Sequence[str]) -> list[tuple[str, bool]]:
    """The text cut at its references: pieces, and whether a piece is a control token that data spelt (or
    empty: a cut)."""
    pieces = _REFERENCE.split(text)  # text, number, text, number, ..., text
    return [
        (control[int(piece)] if piece else "", True) if i % 2 else (piece, False)
        for i, piece in enumerate(pieces)
        if i % 2 or piece
    ]


def _cut(text: str, control: Sequence[str]) -> str:
    kept = text.rstrip()  # a template may trim it
    begun = any(kept.endswith(token[:size]) for token in control for size in range(1, len(token)))
    return f"{kept}{_CUT}{text[len(kept) :]}" if begun else text


def _clean(text: str) -> str:
    """Without the reserved characters, so that data cannot mark anything itself."""
    return _RESERVED.sub("\ufffd", text)
