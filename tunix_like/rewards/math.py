"""The reward for problems whose answer is a number: find the answer in a completion, compare it with the gold one.

It knows how models write final answers and numbers. Where both sides are plain numbers it compares them exactly;
`math-verify` (imported when first needed) settles the rest, such as LaTeX. It does NOT know data sets.
"""

from __future__ import annotations

import re
import threading
import unicodedata
from fractions import Fraction
from typing import Any

from tunix_like.errors import UserError

LONGEST_ANSWER = 200
"""Characters; a longer text after an answer mark is no answer. Keeps comparing cheap whatever a model writes."""

SECONDS = 2
"""Limit of each of math-verify's steps, in whole seconds (it uses signal.alarm)."""

_BOXES = 16  # how many of the last boxes are looked at for one that is closed

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_UNSIGNED = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)(?:e[+-]?\d{{1,3}})?"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s*(?:(?P<whole>\d+)\s+(?=\d+\s*/))?(?P<top>{_UNSIGNED})(?:\s*/\s*(?P<bottom>{_UNSIGNED}))?"
    r"\s*(?P<percent>%|percent\b)?(?P<unit>[^\d=+*/^\\{}-]*(?:/\s*[a-z]+)?)",
    re.IGNORECASE,
)
_CURRENCY = re.compile(r"\\?\$|[€£¥₹]|\\[()\[\],!;]|\*\*")


def gsm8k(prompts: list[str], completions: list[str], gold: list[Any], **_: Any) -> list[float | None]:
    """1 where the completion's final answer equals the column `gold`, else 0; None where the comparison timed out.

    The final answer is what follows the last `#### `, or stands in the last `\\boxed{}` or `<answer></answer>`,
    whichever comes last; a completion with none of them has no answer and gets 0.

    Raises:
      UserError: a gold answer that is empty.
    """
    return [grade(completion, str(right)) for completion, right in zip(completions, gold, strict=True)]


def grade(completion: str, gold: str) -> float | None:
    """1, 0, or None (could not be settled in time) for one completion."""
    if not gold.strip():
        raise UserError("Reward gsm8k: a row's column 'gold' is empty; it must hold the right answer.")
    answer = final_answer(completion)
    if answer is None or len(answer) > LONGEST_ANSWER:
        return 0.0
    if answer == gold.strip():
        return 1.0
    ours, right = parse_number(answer), parse_number(gold)
    if ours is not None and right is not None:
        # A percent sign is read both ways, because problems ask for "what percentage" and for shares alike.
        values = [{number, number / 100} if percent else {number} for number, percent in (ours, right)]
        return float(not values[0].isdisjoint(values[1]))
    if right is not None and not any(character.isdigit() for character in answer):
        return 0.0  # words, which the parser would read as products of letters
    return _math_verify(answer, gold)


def final_answer(completion: str) -> str | None:
    """The text of the last marked answer that is not empty, or None."""
    marks: list[tuple[int, str]] = []
    hashes = completion.rfind("####")
    while hashes >= 0:
        line = completion[hashes + 4 : hashes + 4 + 2 * LONGEST_ANSWER].split("\n")[0]
        text = line.split("</answer>")[0].strip()
        if text:
            marks.append((hashes, text))
            break
        hashes = completion.rfind("####", 0, hashes)
    close = completion.rfind("</answer>")
    start = completion.rfind("<answer>", 0, max(close, 0))
    if close >= 0 and start >= 0 and completion[start + 8 : close].strip():
        marks.append((start, completion[start + 8 : close].strip()))
    # A few tries, as each reads on to the limit: junk may open thousands of boxes and close none.
    for match in list(re.finditer(r"\\boxed\s*\{", completion))[: -1 - _BOXES : -1]:
        boxed = _braced(completion, match.end())
        if boxed:
            marks.append((match.start(), boxed))
            break
    return max(marks)[1] if marks else None


def vote(completion: str) -> Fraction | str | None:
    """What a completion answers, so that answers which mean the same number are equal; None where there is none.

    A plain number is its value (a percent sign is passed over, as grading reads it both ways); anything else is its
    text without white space, and two ways to write one formula are two answers.
    """
    answer = final_answer(completion)
    if answer is None or len(answer) > LONGEST_ANSWER:
        return None
    number = parse_number(answer)
    return "".join(answer.split()) if number is None else number[0]


def _braced(text: str, start: int) -> str | None:
    """What stands between an opened brace and the one that closes it; None if that one is far or missing."""
    depth = 1
    for i in range(start, min(len(text), start + 2 * LONGEST_ANSWER)):
        if text[i] in "{}" and text[i - 1] != "\\":
            depth += 1 if text[i] == "{" else -1
            if depth == 0:
                return text[start:i].strip()
    return None


def parse_number(text: str) -> tuple[Fraction, bool] | None:
    """The exact value of a plain number and whether a percent sign follows it; None if the text is not just that.

    Currency signs, thousands separators, a unit after the number, a trailing dot, `3/4`, `1 1/2`, `1e3` and Unicode
    minus signs and digits are understood; anything else in LaTeX is not plain.
    """
    if len(text) > LONGEST_ANSWER:
        return None
    text = unicodedata.normalize("NFKC", text.replace("{,}", ",").replace("\\%", "%"))
    text = re.sub(r"\\text\s*\{([^{}\d]*)\}", r" \1", text)
    text = _CURRENCY.sub("", re.sub("[\u2212\u2012\u2013]", "-", text)).strip().removeprefix("=").strip()
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    top, bottom = (Fraction((match[name] or "1").replace(",", "")) for name in ("top", "bottom"))
    if bottom == 0:
        return None
    value = int(match["whole"] or 0) + top / bottom
    return (-value if match["sign"] == "-" else value), match["percent"] is not None


def _math_verify(answer: str, gold: str) -> float | None:
    """Equality as math-verify sees it; None when it fails or runs out of time.

    Its limits are alarms, which exist only in the main thread; elsewhere nothing is settled, rather than risking an
    expression such as 9^{9^9} that never ends.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    from math_verify import LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException

    def read(text: str) -> Any:
        # Between dollar signs all of it is read as one formula; loose text would be searched for any number in it.
        formula = re.sub("[\u2212\u2012\u2013]", "-", text).replace("\\$", "").replace("$", "")
        return parse(
            f"${formula}$",
            extraction_config=[LatexExtractionConfig()],
            fallback_mode="no_fallback",
            parsing_timeout=SECONDS,
            raise_on_error=True,
        )

    try:
        # gold first: the comparison is not symmetric
        return float(verify(read(gold), read(answer), timeout_seconds=SECONDS, raise_on_error=True))
    except (Exception, TimeoutException):  # its TimeoutException is not an Exception
        return None
