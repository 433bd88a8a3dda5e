"""Text that comes out of data stays text: a control token that a row spells (`<|im_end|>` in a question) is encoded as
the characters it is written with, never as the token.

What a template inserts is remembered by characters that Unicode keeps out of all text (U+FDD0 to U+FDEF); once the
control tokens are known, those in inserted text are replaced by a reference, which survives a chat template. This
module knows no tokenizer.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

_BEGIN, _END, _OPEN, _CLOSE = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
_RESERVED = re.compile("[\ufdd0-\ufdef]")
_MARKED = re.compile(f"{_BEGIN}([^{_BEGIN}{_END}]*){_END}")
_REFERENCE = re.compile(f"{_OPEN}(\\d+){_CLOSE}")


class _Marking(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        return f"{_BEGIN}{_clean(format(value, format_spec))}{_END}"


class Filled(str):
    """A template with its values; `marked` says which parts of it were values."""

    marked: str


def fill(template: str, values: Mapping[str, Any]) -> Filled:
    """`template.format_map(values)`, which remembers what was inserted."""
    marked = _Marking().vformat(template, (), values)
    filled = Filled(_MARKED.sub(r"\1", marked))
    filled.marked = marked
    return filled


def refer(text: str, control: Sequence[str], *, everything: bool) -> str:
    """The text with references in the place of the `control` tokens that data brought: anywhere where `everything` is
    data, else in what filled a template."""
    if everything:
        return _referred(_clean(text), control)
    if not isinstance(text, Filled):
        return text
    return _MARKED.sub(lambda found: _referred(found[1], control), text.marked)


def parts(text: str, control: Sequence[str]) -> list[tuple[str, bool]]:
    """The text cut at its references: pieces, and whether a piece is a control token that data spelt."""
    pieces = _REFERENCE.split(text)  # text, number, text, number, ..., text
    return [
        (control[int(piece)], True) if i % 2 else (piece, False) for i, piece in enumerate(pieces) if i % 2 or piece
    ]


def _referred(text: str, control: Sequence[str]) -> str:
    if not any(token in text for token in control):
        return text
    longest = sorted(control, key=len, reverse=True)
    found = re.compile("|".join(map(re.escape, longest)))
    return found.sub(lambda token: f"{_OPEN}{control.index(token[0])}{_CLOSE}", text)


def _clean(text: str) -> str:
    """Without the reserved characters, so that data cannot mark anything itself."""
    return _RESERVED.sub("\ufffd", text)
