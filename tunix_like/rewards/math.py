"""The reward for problems whose answer is a number: find the answer in a completion, compare it with the gold one.

It knows how models mark final answers. A gold answer that is a plain number is compared as a number (`numbers.py`);
`math-verify` (imported when first needed) compares formulas. It does NOT know data sets.
"""

from __future__ import annotations

import re
import threading
from fractions import Fraction
from typing import Any

from tunix_like.errors import UserError
from tunix_like.rewards.numbers import LONGEST, Number, has_neighbours, has_odd_digits, parse_number, written_out

SECONDS = 2
"""Limit of each of math-verify's steps, in whole seconds (it uses signal.alarm)."""

_BOXES = 16  # how many of the last boxes are looked at for one that is closed


def gsm8k(prompts: list[str], completions: list[str], gold: list[Any], **_: Any) -> list[float | None]:
    """1 where the completion's final answer is the column `gold`, else 0.

    The final answer is what follows the last `#### `, or stands in the last `\\boxed{}` or `<answer></answer>`,
    whichever comes last; a completion with none of them has no answer and gets 0. Where `gold` is a plain number the
    answer must be one too: arithmetic that was not carried out (`2*9`, `36/2`, `5²`) gets 0. Where `gold` is a
    formula, math-verify compares the two; None where it cannot.

    Raises:
      UserError: a gold answer that is empty.
    """
    return [grade(completion, str(right)) for completion, right in zip(completions, gold, strict=True)]


def gsm8k_lenient(prompts: list[str], completions: list[str], gold: list[Any], **_: Any) -> list[float | None]:
    """As `gsm8k`, but a formula is right where math-verify evaluates it to the number in `gold` (`2*9` for 18)."""
    return [grade(completion, str(right), lenient=True) for completion, right in zip(completions, gold, strict=True)]


def grade(completion: str, gold: str, lenient: bool = False) -> float | None:
    """The reward of one completion: 1, 0, or None where `gold` is a formula and math-verify settles nothing.

    Args:
      lenient: formulas are evaluated and compared with a gold answer that is a plain number; one that cannot be
        evaluated gets 0.
    """
    if not gold.strip():
        raise UserError("Reward gsm8k: a row's column 'gold' is empty; it must hold the right answer.")
    answer = final_answer(completion)
    if answer is None or len(answer) > LONGEST:
        return 0.0
    if answer == gold.strip():
        return 1.0
    ours, right = parse_number(answer), parse_number(gold)
    if ours is not None and right is not None:
        return float((lenient or not ours.quotient) and not _readings(ours).isdisjoint(_readings(right)))
    if right is not None and not (lenient and any(character.isdigit() for character in answer)):
        return 0.0  # words too, which the parser would read as products of letters
    if has_neighbours(answer) or has_odd_digits(written_out(answer)):
        return 0.0  # the parser would add or join them
    verdict = _math_verify(answer, gold)
    return 0.0 if verdict is None and right is not None else verdict


def _readings(number: Number) -> set[Fraction]:
    """The values that count: a percentage is read both ways, as problems ask for "what percentage" and for shares."""
    return {number.value, number.value / 100} if number.percent else {number.value}


def final_answer(completion: str) -> str | None:
    """The text of the last marked answer that is not empty, or None."""
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
    # A few tries, as each reads on to the limit: junk may open thousands of boxes and close none.
    for match in list(re.finditer(r"\\boxed\s*\{", completion))[: -1 - _BOXES : -1]:
        boxed = _braced(completion, match.end())
        if boxed:
            marks.append((match.start(), boxed))
            break
    return max(marks)[1] if marks else None


def vote(completion: str) -> Fraction | str | None:
    """What a completion answers, so that answers which mean the same number are equal; None where there is none.

    A plain number is its value (a percent sign is passed over, as grading reads it both ways); anything else, such as a
    division that was not carried out, is its text without white space, and two ways to write one formula are two
    answers.
    """
    answer = final_answer(completion)
    if answer is None or len(answer) > LONGEST:
        return None
    number = parse_number(answer)
    return "".join(answer.split()) if number is None or number.quotient else number.value


def _braced(text: str, start: int) -> str | None:
    """What stands between an opened brace and the one that closes it; None if that one is far or missing."""
    depth = 1
    for i in range(start, min(len(text), start + 2 * LONGEST)):
        if text[i] in "{}" and text[i - 1] != "\\":
            depth += 1 if text[i] == "{" else -1
            if depth == 0:
                return text[start:i].strip()
    return None


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
        formula = written_out(text).replace("\\$", "").replace("$", "")
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
