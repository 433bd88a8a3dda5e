"""Scores math problems: extracts the final answer of a completion and compares it with the gold (correct) answer.

A gold answer that is a plain number is compared as a number (`tasks/numbers.py`). Formulas are compared by
`math-verify`, which is imported when first needed.
"""

from __future__ import annotations

import math
import re
import threading
from fractions import Fraction
from typing import Any

from tunix_like.errors import UserError
from tunix_like.rewards.calls import given_text
from tunix_like.tasks.numbers import (
    LONGEST,
    Number,
    has_neighbours,
    has_odd_digits,
    parse_number,
    plain,
    written_out,
)

SECONDS = 2
"""Time limit of each call of math-verify in seconds. It is an integer, because math-verify uses `signal.alarm`."""

_NUMBERS = re.compile(r"(?:(?<![\w.])-)?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?", re.ASCII)

_BOXES = 16  # number of boxes, from the last one backwards, that are searched for a text
_DIGITS = 60  # of formulas that are compared; by default math-verify rounds to 6 decimals, so that 1e-20 equals 1e-30
_EQUALITY = re.compile(r"(?<![!<>])=")
_NAME = re.compile(r"\s*[^\W\d]\w*\s*(?:\(\s*[^\W\d]\w*\s*\)\s*)?")
_ONE_NUMBER = re.compile(r"[^\d+*/^\\{}()!×÷·⋅√±=-]*\d[\d.,]*[^\d+*/^\\{}()!×÷·⋅√±=-]*")


def gsm8k(prompts: list[str], completions: list[str], gold: list[Any], **_: Any) -> list[float]:
    """Returns 1 for each completion whose final answer equals its entry of the column `gold`, else 0.

    The final answer is the text after the last `#### `, or inside the last `\\boxed{}` or `<answer></answer>`,
    whichever comes last. A completion without such a text has no answer and gets 0. If `gold` is a plain number, the
    answer must be a plain number too: unevaluated arithmetic (`2*9`, `36/2`, `5²`) gets 0. If `gold` is a formula,
    math-verify compares the answer with the formula, without rounding. If math-verify fails or times out, the reward is
    NaN.

    Raises:
      UserError: a gold answer is missing or empty.
    """
    return _graded(prompts, completions, gold, lenient=False)


def gsm8k_lenient(prompts: list[str], completions: list[str], gold: list[Any], **_: Any) -> list[float]:
    """Returns 1 for each completion whose final answer is correct, else 0. Scores like `gsm8k`, but also accepts an
    answer that math-verify evaluates to the number in `gold` (`2*9` for 18)."""
    return _graded(prompts, completions, gold, lenient=True)


def _graded(prompts: list[str], completions: list[str], gold: list[Any], lenient: bool) -> list[float]:
    rows = zip(prompts, completions, gold, strict=True)
    rewards = [grade(text, given_text(right, "gold", prompt), lenient) for prompt, text, right in rows]
    return [math.nan if reward is None else reward for reward in rewards]  # None would mean that gsm8k does not apply


def last_number(prompts: list[str], completions: list[str], gold: list[Any], **_: Any) -> list[float]:
    """Returns 1 for each completion whose last number equals its entry of the column `gold`, else 0. Unlike `gsm8k`, it
    needs no mark before the answer, so a completion that ends with an unrelated number gets 0, and a number that is
    right by accident gets 1."""
    rights = []
    for prompt, right in zip(prompts, gold, strict=True):
        rights.append(last_number_of(given_text(right, "gold", prompt)))
        if rights[-1] is None:
            raise UserError(f"column 'gold' has no number for the prompt {prompt!r:.80}: {right!r:.80}.")
    return [float(last_number_of(text) == right) for text, right in zip(completions, rights, strict=True)]


def last_number_of(completion: str) -> Fraction | None:
    """Returns the last number in a completion, such as 1234.5 of `1,234.5`; None if there is none, or if it has more
    than `LONGEST` characters."""
    found = _NUMBERS.findall(completion)
    return Fraction(found[-1].replace(",", "")) if found and len(found[-1]) <= LONGEST else None


def grade(completion: str, gold: str, lenient: bool = False) -> float | None:
    """Returns the reward of one completion for the correct answer `gold`: 1 or 0, or None if `gold` is a formula that
    math-verify cannot compare with the completion's answer.

    Args:
      lenient: applies if `gold` is a plain number and the answer is a formula. True: the formula is evaluated, and gets
        0 if it cannot be evaluated. False: the formula gets 0.
    """
    answer = final_answer(completion)
    if answer is None or len(answer) > LONGEST:
        return 0.0
    if answer == gold.strip():
        return 1.0
    ours = parse_number(answer)
    right = None if _is_equation(gold) else parse_number(gold)
    if ours is not None and right is not None:
        return float((lenient or not ours.quotient) and not _readings(ours).isdisjoint(_readings(right)))
    if right is not None and not (lenient and any(character.isdigit() for character in answer)):
        return 0.0  # includes words, which math-verify would parse as products of letters
    if right is not None and _ONE_NUMBER.fullmatch(plain(answer)):
        return 0.0  # nothing to evaluate; math-verify would ignore some letters as units
    if _is_equation(gold) and not _EQUALITY.search(answer):
        return 0.0  # math-verify would compare the answer with a side of the equation
    if has_neighbours(answer) or has_odd_digits(written_out(answer)):
        return 0.0  # math-verify would add or join adjacent numbers
    verdict = _math_verify(answer, gold)
    return 0.0 if verdict is None and right is not None else verdict


def _is_equation(gold: str) -> bool:
    """Returns whether a gold answer is an equation that no number can replace. `x = 5` and `2*9 = 18` are numbers."""
    *others, _ = _EQUALITY.split(plain(gold))
    return any(re.search("[^\\W\\d_]", other) and not _NAME.fullmatch(other) for other in others)


def _readings(number: Number) -> set[Fraction]:
    """Returns the values that a number can stand for. `25%` can stand for 25 and for 0.25, because some problems ask
    for a percentage and some for a fraction."""
    return {number.value, number.value / 100} if number.percent else {number.value}


def final_answer(completion: str) -> str | None:
    """Returns the text of the last answer that is marked with `####`, `\\boxed{}` or `<answer></answer>` and is not
    empty; None if there is no such answer. A box or `<answer>` that comes last and is not closed is a cut answer, in
    place of which no earlier one counts."""
    marks: list[tuple[int, str]] = []
    hashes = completion.rfind("####")
    while hashes >= 0:
        line = completion[hashes + 4 : hashes + 4 + 2 * LONGEST].split("\n")[0]
        text = line.split("</answer>")[0].strip()
        if text:
            marks.append((hashes, text))
            break
        hashes = completion.rfind("####", 0, hashes)
    close = completion.rfind("</answer>")
    start = completion.rfind("<answer>", 0, max(close, 0))
    if close >= 0 and start >= 0 and completion[start + 8 : close].strip():
        marks.append((start, completion[start + 8 : close].strip()))
    opened = completion.rfind("<answer>")
    if opened > close:
        marks.append((opened, ""))
    # Each attempt scans up to the length limit. Their number is bounded, as a text may have thousands of empty boxes.
    for match in list(re.finditer(r"\\boxed\s*(?:\{|\Z)", completion))[: -1 - _BOXES : -1]:
        boxed = _braced(completion, match.end())
        if boxed != "":
            marks.append((match.start(), boxed or ""))
            break
    return max(marks)[1] or None if marks else None


def vote(completion: str) -> Fraction | str | None:
    """Returns the answer of a completion as a hashable key for majority votes, or None if there is no answer.

    The key of a plain number is its value, so all spellings of a number count as one answer. A percent sign is ignored,
    because grading accepts `25%` as 25 and as 0.25. The key of any other answer, such as an unevaluated division, is
    its text without white space. Two spellings of a formula count as two answers.
    """
    answer = final_answer(completion)
    if answer is None or len(answer) > LONGEST:
        return None
    number = parse_number(answer)
    return "".join(answer.split()) if number is None or number.quotient else number.value


def _braced(text: str, start: int) -> str | None:
    """Returns the text from `start`, just after an open brace, to the matching closing brace. Returns None if the
    closing brace is missing or more than `2 * LONGEST` (400) characters away."""
    depth = 1
    for i in range(start, min(len(text), start + 2 * LONGEST)):
        if text[i] in "{}" and text[i - 1] != "\\":
            depth += 1 if text[i] == "{" else -1
            if depth == 0:
                return text[start:i].strip()
    return None


def _math_verify(answer: str, gold: str) -> float | None:
    """Compares two formulas with math-verify. Returns 1 or 0, or None if math-verify fails or times out.

    The time limits of math-verify are alarms, which work only in the main thread. Without a time limit, the evaluation
    of an expression such as 9^{9^9} would not end. In any other thread, this function therefore returns None.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    from math_verify import LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException

    def read(text: str) -> Any:
        # Between dollar signs, the whole text is parsed as one formula. Without dollar signs, math-verify would search
        # the text for a number.
        formula = written_out(text).replace("\\$", "").replace("$", "")
        return parse(
            f"${formula}$",
            extraction_config=[LatexExtractionConfig()],
            fallback_mode="no_fallback",
            parsing_timeout=SECONDS,
            raise_on_error=True,
        )

    try:
        # gold comes first: the comparison is not symmetric
        right, ours = read(gold), read(answer)
        limits = {"timeout_seconds": SECONDS, "raise_on_error": True}
        return float(verify(right, ours, float_rounding=_DIGITS, numeric_precision=_DIGITS + 20, **limits))
    except (Exception, TimeoutException):  # the TimeoutException of math-verify is not an Exception
        return None
