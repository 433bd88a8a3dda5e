"""Two evaluations of the same problems: the paired difference of every metric, with its interval.

It knows the file that `eval --out` writes. It does NOT sample: runs and models are evaluated by `eval_command`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tunix_like.errors import UserError
from tunix_like.evaluation.statistics import intervals, mean_known, value_ranges
from tunix_like.runtime.console import figure

CURE = "Give a file that `tunix-like eval --out` has written."
_KINDS = {"problem": int, "prompt": str, "columns": dict, "values": dict}
_SETTINGS = ("samples", "temperature", "top_p")


class Difference(NamedTuple):
    """Of one metric: both means and B - A with its 95 % interval, over the problems of which both know it; on how many
    of these B is better and worse."""

    name: str
    a: float
    b: float
    difference: float
    low: float
    high: float
    won: int
    lost: int


def read_problems(file: Path) -> list[dict[str, Any]]:
    """The rows of a file that `eval --out` has written.

    Raises:
      UserError: it cannot be read, is empty, or a line is no such row (file and line).
    """
    try:
        lines = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read ({error}). {CURE}") from None
    if lines == [""]:
        raise UserError(f"{file} is empty. {CURE}")
    return [_row(line, f"{file}:{number}") for number, line in enumerate(lines, start=1)]


def read_settings(file: Path) -> dict[str, Any] | None:
    """How the completions were sampled, out of the summary that `eval --out` writes; None where it cannot be known."""
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    known = isinstance(summary, dict) and all(isinstance(summary.get(name), int | float) for name in _SETTINGS)
    return summary if known else None


def settings_line(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> str:
    """Where A and B were sampled in different ways; empty where they were not, or one way is not known."""
    if a is None or b is None:
        return ""
    names = [name for name in _SETTINGS if a[name] != b[name]]
    sides = (", ".join(_setting(name, each[name]) for name in names) for each in (a, b))
    return "A: {}; B: {}".format(*sides) if names else ""


def threshold_of(settings: Iterable[Mapping[str, Any] | None]) -> float:
    """The largest `success_threshold` of the summaries that are known, or its default."""
    known = [each.get("success_threshold") for each in settings if each is not None]
    return max((float(each) for each in known if isinstance(each, int | float)), default=1.0)


def skipped_line(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> str:
    """How many prompts A and B skipped; empty where neither is known to have skipped any."""
    counts = [each.get("skipped_prompts") if each else None for each in (a, b)]
    if not any(counts):
        return ""
    said = ["an unknown number" if count is None else count for count in counts]
    return f"A skipped {said[0]} prompts, B {said[1]} (too long or empty); the figures are of the other problems"


def _setting(name: str, value: float) -> str:
    return f"{value:g} sample{'s' * (value != 1)}" if name == "samples" else f"{name} {value:g}"


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({error}). {CURE}") from None
    for name, kind in _KINDS.items():
        if not isinstance(row, dict) or not isinstance(row.get(name), kind):
            raise UserError(f"{where}: no problem of an evaluation, it lacks '{name}'. {CURE}")
    for name, value in row["values"].items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UserError(f"{where}: values['{name}'] is no number but {value!r:.80}. {CURE}")
    return row


def check_same(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], names: tuple[str, str]) -> None:
    """Checks that A and B are of the same problems, in the same order.

    Problems are the same where the numbers of their rows and their columns are; where rows have no columns, the
    prompts must be. (Two models may write one prompt in different chat templates.)

    Raises:
      UserError: naming the first that is not the same, or the numbers of problems.
    """
    cure = "Evaluate both on the same data, with prompts that fit into rollout.max_prompt_length of both."
    for one, other in zip(a, b, strict=False):
        same = one["columns"] == other["columns"] and (bool(one["columns"]) or one["prompt"] == other["prompt"])
        if not same:
            raise UserError(
                f"--compare: problem {one['problem']} is not the same in {names[0]} and {names[1]}: "
                f"{one['prompt']!r:.200} and {other['prompt']!r:.200}. {cure}"
            )
        if one["problem"] != other["problem"]:
            raise UserError(
                f"--compare: {names[0]} has row {one['problem']} of its data where {names[1]} has row "
                f"{other['problem']}: one of them skipped a prompt that the other did not. {cure}"
            )
    if len(a) != len(b):
        raise UserError(
            f"--compare: {names[0]} has {len(a)} problems, {names[1]} {len(b)}; evaluate both on the same number "
            "(eval.max_problems)."
        )


def differences(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], threshold: float = 1.0
) -> list[Difference]:
    """B - A of each metric that both have, paired: the interval is that of the mean of the problems' differences.

    `threshold` is the reward of a success. A difference of avg@n is at most as large as the range of the values of A
    and B, of 0 and of the threshold.
    """
    names = [name for name in a[0]["values"] if name in b[0]["values"]]
    left, right = (
        {name: np.array([row["values"].get(name) for row in rows], np.float64) for name in names} for rows in (a, b)
    )
    change = {name: right[name] - left[name] for name in names}
    averages = [each for side in (left, right) for name, each in side.items() if name.startswith("avg@")]
    ranges = value_ranges(change, [*averages, [threshold]])
    ends = intervals(change, {name: (low - high, high - low) for name, (low, high) in ranges.items()})
    found = []
    for name, each in change.items():
        known = ~np.isnan(each)
        means = mean_known(left[name][known]), mean_known(right[name][known]), mean_known(each)
        found.append(Difference(name, *means, *ends[name], int((each > 1e-9).sum()), int((each < -1e-9).sum())))
    return found


def cells(found: Sequence[Difference]) -> list[tuple[str, str, str, str, str]]:
    """Rows of a table: metric, A, B, B - A, problems won and lost."""
    return [
        (
            each.name,
            figure(each.name, each.a),
            figure(each.name, each.b),
            "+" * (each.difference > 0) + figure(each.name, each.difference, each.low, each.high),
            f"{each.won} / {each.lost}",
        )
        for each in found
    ]
