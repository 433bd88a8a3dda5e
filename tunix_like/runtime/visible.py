"""Escapes characters in untrusted text that could control a terminal or reorder a line."""

from __future__ import annotations

import unicodedata


class _Table(dict[int, str]):
    """A table for `str.translate` that computes a replacement at its first use."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        harmless = character in "\n\t" or character.isprintable() or unicodedata.category(character) == "Zs"
        self[code] = character if harmless else repr(character)[1:-1]
        return self[code]


_TABLE = _Table()


def visible(text: str) -> str:
    r"""Replaces every non-printable character by its escape, such as `\x1b`, `\r` or `\u202e`.

    Non-printable characters are control characters, format characters (such as bidirectional ones) and lone surrogates.
    Line breaks, tabs and spaces are kept.
    """
    return text if text.isascii() and text.isprintable() else text.translate(_TABLE)
