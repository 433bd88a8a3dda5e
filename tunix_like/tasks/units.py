"""Recognises the units and words that can follow a number without changing its value: `5 km/h`, `5 (five) apples`."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction

_UNIT = re.compile(
    r"[mckdnuμ]m|in|ft|yd|mi|[mkµμ]gs?|kms|lbs?|oz|ms|secs?|mins?|hrs?|yrs?|wks?|mo|m[lL]|[cd]l|gal|pt|qt|kJ|kWh?|Wh|[kMG]?Hz"
    r"|[kM]Pa|kN|[mk]A|[mkMG][VW]|[kMG]?eV|dB|[kM]?[\u03a9\u2126]|psi|[mk]ph|kmh|rpm|bpm|hp|rad|deg|sq|cu|sqft|ha|[kKMGT]B|am|pm|AM|PM|st|nd|rd|th|pts|pcs|USD|EUR|GBP|JPY"
    r"|CNY|INR|RMB|Rs"
)
_APART = frozenset("mgshLl")
"""Units of one letter. They must stand apart from the number, as `5m` is a product in a formula."""

_FUNCTION = re.compile(
    r"in|of|to|on|at|by|is|an|as|we|he|it|my|so|if|up|us|be|go|do|me|no|and|are|but|for|from|the|this|that|than|then|each"
    r"|all|any|every|per|with|without|more|less|fewer|greater|over|under|above|below|times|when|where|which|only|about",
    re.IGNORECASE,
)
"""Words that name nothing: `5 more than x` is not 5, but `5 more apples than x` is."""

_COUNTS = (
    ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    ("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
    ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"),
)
_NUMBERS = {word: 10 * i + 20 for i, word in enumerate(_COUNTS[2])} | {
    word: i for i, word in enumerate(_COUNTS[0] + _COUNTS[1])
}
_PART = re.compile(r"half|halves|quarters?|thirds?|fourths?|(?:fif|six|seven|eigh|nin|ten)ths?", re.IGNORECASE)
_CHANGING = re.compile(
    # multiples
    r"(?:hundred|thousand|million|billion|trillion|dozen|milliard|tausend|hundert|millon|dutzend|docena).*"
    r"|doz|gross|grand|lakhs?|crores?|mil|milles?|mio|mrd|mln|тысяч.?|тыс|миллион.*|млн|миллиард.*|млрд|twice|thrice"
    # operations, functions, constants and the names of letters
    r"|squared|cubed|doubled|tripled|halved|sqrt|factorial|mod|modulo|negative|choose|base|imaginary|aleph|nan|null"
    r"|a?(?:sin|cos|tan|cot|sec|csc)h?|arc.*|log|exp|lim|max|gcd|lcm|det|inf|infinit.*|undefined"
    r"|alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|omicron|rho|sigma|tau|upsilon|phi|chi|psi|omega"
    # other answers and retractions
    r"|or|not|none|wrong|incorrect|false|never|.*n['\u2019]t",
    re.IGNORECASE,
)
_OPERATION = re.compile("plus|minus|divided|multiplied", re.IGNORECASE)
_PIECE = re.compile(
    r"<[^<>\d\s=]{3,40}>|</?s>"  # a control token or a tag, as text
    r"|[^\W\d_]+(?:['\u2019][^\W\d_]+)*|\S"
)
_POINTS = frozenset(".,;:'\"()[]_`°\u2019\u201d")
_CURRENCIES = frozenset("$€£¥₹")
_MULTIPLES = frozenset("万萬亿億千百十兆仟佰拾")


def keeps_value(tail: str, value: Fraction) -> bool:
    """Returns whether the text after a number consists of units and words that leave its value unchanged.

    The first word that names something must be a unit, or look like a word: at least three letters, a vowel, no capital
    after the first letter. Multiples, parts, operations and retractions (`5 dozen`, `5 and a half`, `5 squared`),
    letters (`5x`, `5 k`, `5 theta`) and marks (`5!`, `5 < x`) are not accepted. After that word, any words follow,
    except operations, additions (`5 hours and a half`) and variables. The word of a number can be the number itself:
    `5 (five)`.
    """
    words: list[str] = []
    named = False
    pieces = [*_PIECE.finditer(tail)]
    for place, match in enumerate(pieces):
        piece = match[0]
        before = pieces[place - 1][0] if place else ""
        follows = place + 1 < len(pieces) and pieces[place + 1][0][0].isalpha()
        if piece[0].isalpha():
            adjacent = match.start() == 0
            if not (_is_unit(piece, adjacent, before) or _is_word(piece, value, words, named, adjacent, follows)):
                return False
            named |= not _FUNCTION.fullmatch(piece) and len(piece) > 1
            words.append(piece.lower())
        elif piece == "/":
            if not follows:
                return False
        elif piece == "!":
            if not words:
                return False
        elif piece in _CURRENCIES:
            if place:
                return False
        elif not (piece in _POINTS or (piece[0] == "<" and len(piece) > 1) or unicodedata.category(piece[0]) == "So"):
            return False
    return True


def _is_unit(word: str, adjacent: bool, before: str) -> bool:
    """Returns whether a word is a unit. `adjacent`: it follows the number without white space; `before`: the piece of
    text before it."""
    known = _UNIT.fullmatch(word) is not None or (before == "°" and word in ("C", "F", "K"))
    return known or (not adjacent and word in _APART)


def _is_word(word: str, value: Fraction, words: Sequence[str], named: bool, adjacent: bool, follows: bool) -> bool:
    """Returns whether a word that is not a unit leaves the value unchanged.

    Args:
      words: the words before it.
      named: whether one of these names something.
      adjacent: whether it follows the number without white space.
      follows: whether another word follows.
    """
    if word.lower() in _NUMBERS or _PART.fullmatch(word):
        described = named or (words[-1:] and words[-1] in ("for", "in", "on", "from", "the"))
        return _NUMBERS.get(word.lower()) == value or (bool(described) and "and" not in words[-2:])
    if _OPERATION.fullmatch(word) or (_CHANGING.fullmatch(word) and not named):
        return False
    if not word.isascii():
        wide = ord(word[0]) >= 0x2E80  # scripts that put no space between words
        return (wide and _MULTIPLES.isdisjoint(word)) or (not adjacent and len(word) > 2)
    if len(word) == 1:
        return not adjacent and ((word in "aA" and follows) or word == "I" or (named and word.isupper()))
    if adjacent or named or _FUNCTION.fullmatch(word) or re.fullmatch("[A-Z]{2,5}s", word):
        return not adjacent
    regular = len(word) > 2 and word[1:].replace("'", "").islower() and re.search("[aeiouy]", word, re.IGNORECASE)
    return bool(regular) and not (len(word) == 3 and set(word.lower()) <= set("abcxyz"))
