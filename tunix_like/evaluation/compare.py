"""Compares two evaluations of the same problems: the paired difference of every metric, with its confidence interval.

This module reads files that `tunix-like eval --out` wrote. It does not sample completions.
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

CURE = "Give a file written by `tunix-like eval --out`."
_KINDS = {"problem": int, "prompt": str, "columns": dict, "values": dict}
_SETTINGS = ("samples", "temperature", "top_p")


class Difference(NamedTuple):
    """The comparison of one metric of two evaluations A and B, over the problems that have a value in A and in B.

    Attributes:
      a, b: means of the metric in A and in B.
      difference, low, high: mean of B - A, and its 95 % confidence interval.
      won, lost: number of problems with a higher value in B than in A, and with a lower value in B than in A.
    """

    name: str
    a: float
    b: float
    difference: float
    low: float
    high: float
    won: int
    lost: int


def read_problems(file: Path) -> list[dict[str, Any]]:
    """Reads a file written by `eval --out`, with one row per problem."""
    try:
        lines = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read ({error}). {CURE}") from None
    if lines == [""]:
        raise UserError(f"{file} is empty. {CURE}")
    return [_row(line, f"{file}:{number}") for number, line in enumerate(lines, start=1)]


def read_settings(file: Path) -> dict[str, Any] | None:
    """Reads the summary file of `eval --out`. Returns None if the file cannot be read or lacks a sampling setting."""
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    complete = isinstance(summary, dict) and all(isinstance(summary.get(name), int | float) for name in _SETTINGS)
    return summary if complete else None


def settings_line(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> str:
    """Returns the sampling settings that differ between A and B as a text; empty if none is known to differ."""
    if a is None or b is None:
        return ""
    names = [name for name in _SETTINGS if a[name] != b[name]]
    sides = (", ".join(_setting(name, settings[name]) for name in names) for settings in (a, b))
    return "A: {}; B: {}".format(*sides) if names else ""


def threshold_of(settings: Iterable[Mapping[str, Any] | None]) -> float:
    """Returns the largest `success_threshold` in the summaries of evaluations; 1 if no summary has a threshold."""
    thresholds = [summary.get("success_threshold") for summary in settings if summary is not None]
    return max((float(value) for value in thresholds if isinstance(value, int | float)), default=1.0)


def skipped_line(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> str:
    """Returns the numbers of prompts that A and B skipped as a text, which is empty if each is 0 or unknown."""
    counts = [summary.get("skipped_prompts") if summary else None for summary in (a, b)]
    if not any(counts):
        return ""
    texts = ["an unknown number" if count is None else count for count in counts]
    return f"A skipped {texts[0]} prompts, B {texts[1]} (too long or empty); the metrics exclude these problems"


def _setting(name: str, value: float) -> str:
    return f"{value:g} sample{'s' * (value != 1)}" if name == "samples" else f"{name} {value:g}"


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({error}). {CURE}") from None
    for name, kind in _KINDS.items():
        if not isinstance(row, dict) or not isinstance(row.get(name), kind):
            raise UserError(f"{where}: not a problem of an evaluation, '{name}' is missing. {CURE}")
    for name, value in row["values"].items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UserError(f"{where}: values['{name}'] is not a number, got {value!r:.80}. {CURE}")
    return row


def check_same(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], names: tuple[str, str]) -> None:
    """Raises UserError, which names the first difference, unless A and B have the same problems in the same order.

    Two problems are the same if their row numbers and data columns are equal. If the problems have no columns, their
    prompts must be equal too. If they have columns, their prompts can differ, because two models can use different chat
    templates.
    """
    cure = "Evaluate both on the same data, with prompts that fit into rollout.max_prompt_length of both."
    for one, other in zip(a, b, strict=False):
        if one["problem"] != other["problem"]:
            first, second = names if one["problem"] < other["problem"] else names[::-1]
            raise UserError(
                f"--compare: problem {min(one['problem'], other['problem'])} is in {first}, but not in {second}: its "
                f"prompt was skipped there, or the data differ. {cure}"
            )
        same = one["columns"] == other["columns"] and (bool(one["columns"]) or one["prompt"] == other["prompt"])
        if not same:
            raise UserError(
                f"--compare: problem {one['problem']} is not the same in {names[0]} and {names[1]}: "
                f"{one['prompt']!r:.200} and {other['prompt']!r:.200}. {cure}"
            )
    if len(a) != len(b):
        raise UserError(
            f"--compare: {names[0]} has {len(a)} problems, {names[1]} {len(b)}; evaluate both on the same number "
            "(eval.max_problems)."
        )


def differences(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], threshold: float = 1.0
) -> list[Difference]:
    """Compares two evaluations A and B of the same problems. For each metric that both have, computes the mean of B - A
    over the problems and the confidence interval of this mean.

    The interval of avg@n (the mean reward of a problem) needs the largest possible difference of two avg@n values. This
    difference is the maximum minus the minimum of a list of numbers: all avg@n values of A and B, 0, and `threshold`
    (the smallest reward with which a completion succeeds).
    """
    names = [name for name in a[0]["values"] if name in b[0]["values"]]
    left, right = (
        {name: np.array([row["values"].get(name) for row in rows], np.float64) for name in names} for rows in (a, b)
    )
    change = {name: right[name] - left[name] for name in names}
    averages = [values for side in (left, right) for name, values in side.items() if name.startswith("avg@")]
    ranges = value_ranges(change, [*averages, [threshold]])
    ends = intervals(change, {name: (low - high, high - low) for name, (low, high) in ranges.items()})
    out = []
    for name, values in change.items():
        known = ~np.isnan(values)
        out.append(
            Difference(
                name,
                mean_known(left[name][known]),
                mean_known(right[name][known]),
                mean_known(values),
                *ends[name],
                int((values > 1e-9).sum()),
                int((values < -1e-9).sum()),
            )
        )
    return out


def cells(rows: Sequence[Difference]) -> list[tuple[str, str, str, str, str]]:
    """Formats rows of a table: metric, A, B, B - A, and the numbers of problems that are higher and lower in B."""
    return [
        (
            row.name,
            figure(row.name, row.a),
            figure(row.name, row.b),
            "+" * (row.difference > 0) + figure(row.name, row.difference, row.low, row.high),
            f"{row.won} / {row.lost}",
        )
        for row in rows
    ]
