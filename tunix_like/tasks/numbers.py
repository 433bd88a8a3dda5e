r"""Parses plain numbers as language models write them.

Supports digits, signs, separators, fractions, currency, percent and units, in ASCII, Unicode and LaTeX. Nothing is
evaluated: sums, products and powers are not plain numbers.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

from tunix_like.tasks.units import keeps_value

LONGEST = 200
"""Maximum number of characters of a number. Longer texts are not parsed, to limit the time for long completions."""

_MINUS = re.compile("[\u2010-\u2013\u2212\ufe63\uff0d]")
_SLASH = re.compile("[\u2044\u2215]")
# NFKC normalisation would join these characters to adjacent digits (5² to 52, 2½ to 21⁄2), so they are rewritten before
# NFKC is applied.
_RAISED = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b]+")
_VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e]")
# Thousands separators: a no-break or thin space, or LaTeX's \, {,} ,\! between digits. A plain space is not a
# separator.
_GROUPING = re.compile(r"(?<=\d)(?:\\,|\{,\}|,\\!|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
_SPACING = re.compile(
    r"\\(?:[,;:!>() \[\]]|q?quad\b|(?:thin|med|thick|negthin|en)(?:space|skip)\b|left\b|right\b|displaystyle\b)|~"
)
_STYLED = re.compile(r"\\(?:text|mbox|operatorname|(?:text|math)(?:bf|it|rm|sf|tt)|boldsymbol)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[cdt]?frac\s*(?:\{\s*(-?[\d,]+)\s*\}|(\d))\s*(?:\{\s*([\d,]+)\s*\}|(\d))")
_DEGREE = re.compile(r"\^\s*(?:\\circ\b|\{\s*\\circ\s*\})")
_UNIT_POWER = re.compile(
    r"(?<![a-z])((?:[cdkm]?m|in|inch(?:es)?|ft|feet|yd|yards?|mi|miles?|units?|(?:centi|kilo)?met(?:er|re)s?|s|sec)\s*)"
    r"\^\s*(?:[23](?!\d)|\{\s*[23]\s*\})",
    re.IGNORECASE,
)
_EQUALS = re.compile(r"(?<![!<>])=|≈|\\approx\b")
_SEVERAL = re.compile(r"[;\n]|,(?!\d)|\b(?:or|and)\b")
_SCRIPT = re.compile(r"[_^]\s*(?:\{[^{}]*\}|\w)")
_TWO_PARTS = re.compile(r"\\[a-z]*(?:frac|binom)\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_NEIGHBOURS = re.compile(r"\d[\s${}']+\.?\d")
_CURRENCY = re.compile(r"([+-]?)\s*[$€£¥₹]\s*")
_BRACKETS = {"(": ")", "[": "]", "{": "}", "$": "$"}

_WHOLE = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s*(?:(?:(?P<whole>{_WHOLE})\s+)?(?P<top>{_WHOLE})\s*/\s*(?P<bottom>{_WHOLE})"
    r"|(?P<leading>[1-9](?:\.\d+)?)\s*(?:[×x*·⋅]|\\times\b|\\cdot\b)\s*10\s*\^\s*(?P<open>\{)?\s*(?P<power>[+-]?\d{1,3})"
    rf"(?(open)\s*\}})|(?P<decimal>(?:{_WHOLE}(?:\.\d*)?|\.\d+)(?:e[+-]?\d{{1,3}})?))"
    r"(?:\s*(?P<percent>%|percent\b))?(?P<tail>.*)",
    re.IGNORECASE | re.DOTALL,
)


class Number(NamedTuple):
    """A plain number.

    Attributes:
      value: the exact value; 50 for `50%`.
      percent: whether `%` or `percent` follows the number.
      quotient: True for a fraction whose value is an integer (`36/2`), which is a division that was not carried out.
    """

    value: Fraction
    percent: bool
    quotient: bool


def parse_number(text: str) -> Number | None:
    """Parses a text that is one plain number. Returns None for any other text and for a text of over 200 characters.

    If the text is an equation, the side after the last `=` or `≈` is parsed. A text with several equations is not a
    number. Units and words can follow the number (see `keeps_value`). Two adjacent numbers are not a number.
    """
    if len(text) > LONGEST:
        return None
    *others, last = _EQUALS.split(plain(text))
    match = _NUMBER.fullmatch(_bare(last))
    if match is None or has_odd_digits(match[0]) or any(map(_SEVERAL.search, others)):
        return None
    sign = -1 if match["sign"] == "-" else 1
    quotient = False
    if match["top"]:
        whole, top, bottom = (int((match[part] or "0").replace(",", "")) for part in ("whole", "top", "bottom"))
        if bottom == 0 or (match["whole"] and not 0 < top < bottom):  # 5 6/1 is a sum, not a mixed number
            return None
        value = whole + Fraction(top, bottom)
        quotient = top % bottom == 0
    elif match["leading"]:
        value = Fraction(f"{match['leading']}e{match['power']}")
    else:
        value = Fraction(match["decimal"].replace(",", ""))
    if not keeps_value(match["tail"], abs(value)):
        return None
    return Number(sign * value, match["percent"] is not None, quotient)


def written_out(text: str) -> str:
    r"""Rewrites Unicode numerals in ASCII and LaTeX: `5²` as `5^{2}`, `2½` as `2\frac{1}{2}`, minus signs as hyphens,
    thousands separators as commas.

    Other characters are normalised one by one (NFKC), except characters that would become digits and join adjacent
    digits, such as `₂`, `①` or `㎡`; `has_odd_digits` detects these.
    """
    text = _RAISED.sub(lambda raised: f"^{{{_MINUS.sub('-', unicodedata.normalize('NFKC', raised[0]))}}}", text)
    text = _VULGAR.sub(_as_fraction, text)
    text = _GROUPING.sub(",", _SLASH.sub("/", _MINUS.sub("-", text)))
    if text.isascii():
        return text
    return "".join(character if _is_odd(character) else _folded(character) for character in text)


def plain(text: str) -> str:
    r"""Applies `written_out` to a text, then converts LaTeX to plain text.

    A style such as `\text{...}` becomes its content between spaces, spacing commands become spaces, and a fraction of
    integers becomes ` 1/2 `. A power of a unit (`cm^2`) loses its exponent. `\%` and `\$` lose their backslash.
    """
    text = _STYLED.sub(r" \1 ", written_out(text))
    text = _FRACTION.sub(lambda parts: f" {parts[1] or parts[2]}/{parts[3] or parts[4]} ", text)
    text = _SPACING.sub(" ", text).replace("\\%", "%").replace("\\$", "$")
    return _UNIT_POWER.sub(r"\1", _DEGREE.sub("°", text))


def has_neighbours(text: str) -> bool:
    """Returns whether two numbers are adjacent (`5 6`, `5{6}`, `5\\frac{6}{1}`). Such a text is not a number."""
    return _NEIGHBOURS.search(_TWO_PARTS.sub(r"(\1)/(\2)", _SCRIPT.sub("^", plain(text)))) is not None


def has_odd_digits(text: str) -> bool:
    """Returns whether the text has characters that are not digits but become digits by NFKC (`₂`, `①`, `㎡`)."""
    return any(map(_is_odd, text))


def _as_fraction(vulgar: re.Match[str]) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", vulgar[0]).partition("\u2044")
    return f"\\frac{{{top}}}{{{bottom}}}"


def _is_odd(character: str) -> bool:
    if character.isascii() or character.isdecimal():
        return False
    return any(part.isdigit() for part in unicodedata.normalize("NFKC", character))


def _folded(character: str) -> str:
    return str(unicodedata.decimal(character)) if character.isdecimal() else unicodedata.normalize("NFKC", character)


def _bare(text: str) -> str:
    """Strips Markdown emphasis marks, brackets around the whole text, and a leading currency sign from a number."""
    text = text.strip(" \t\r\n*_`")
    while len(text) > 1 and _BRACKETS.get(text[0]) == text[-1]:
        text = text[1:-1].strip(" \t\r\n*_`")
    return _CURRENCY.sub(r"\1", text, count=1) if _CURRENCY.match(text) else text
