"""Text of models, data and users made safe to show: what would command a terminal or reorder a line is written out.

Knows Unicode's categories. Does NOT know where the text comes from, or where it is shown.
"""

from __future__ import annotations

import unicodedata


class _Table(dict[int, str]):
    """What `str.translate` puts for each code point, looked up once."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        harmless = character in "\n\t" or character.isprintable() or unicodedata.category(character) == "Zs"
        self[code] = character if harmless else repr(character)[1:-1]
        return self[code]


_TABLE = _Table()


def visible(text: str) -> str:
    r"""The text with every character that does not print as its escape, such as `\x1b`, `\r` or `\u202e`: control
    characters, bidirectional and other format characters, lone surrogates. Line breaks, tabs and spaces stay."""
    return text if text.isascii() and text.isprintable() else text.translate(_TABLE)
