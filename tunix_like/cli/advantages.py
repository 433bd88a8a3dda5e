"""What `tunix-like advantages` says: every estimator's advantages for the same rewards, side by side.

It reads the command's words and lays out a table. The numbers are those of the training step; the picture is
`weights_figure.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from tunix_like.algorithms.objective import GroupEstimator
from tunix_like.algorithms.population_weights import advantages_of
from tunix_like.algorithms.registry import (
    ADVANTAGE_ESTIMATORS,
    LARGEST_REWARD,
    check_parameters,
    check_rewards,
    find_estimator,
)
from tunix_like.cli.common import setup_jax
from tunix_like.cli.weights_figure import curves_of, drawn_estimators, pass_rates, save, weights_figure
from tunix_like.config.schema import AlgorithmConfig
from tunix_like.errors import UserError, nearest
from tunix_like.runtime import console

_BUILT_IN = "tunix_like.algorithms.advantages"  # the module whose estimators are always shown
_NUMBERS = ("k", "truncation_order", "ddof")
_LONG_GROUP = 16  # beyond this, completions whose rows look the same share one
_LOG_WIDTH = 140  # columns where there is no terminal to ask


@dataclasses.dataclass(frozen=True)
class Request:
    """The command's words, read.

    Attributes:
      rewards: NaN is unscored.
      lengths: completion lengths in tokens; None: not given.
      numbers: those of `k`, `truncation_order`, `ddof` that were given.
      own: an estimator of the user's own, with its parameters.
    """

    rewards: Float[np.ndarray, "P G"]
    lengths: Int[np.ndarray, "P G"] | None
    numbers: dict[str, int]
    own: GroupEstimator | None

    @property
    def k(self) -> int:
        """`k`, or 2 where it was not given and the group allows it."""
        return self.numbers.get("k", max(1, min(2, self.rewards.shape[1] - 1)))


def show(rewards: str, options: Sequence[str], plot: str | None) -> None:
    """Prints the table, and what could not be in it and why; draws the weights where `plot` names a file.

    Args:
      rewards: `1,0,0,0`, several groups of one size separated by `;`, `none` for what could not be scored.
      options: `key=value` words: `k`, `truncation_order`, `ddof`, `lengths`, `estimator` and its own parameters.

    Raises:
      UserError: a word that cannot be read, an own estimator that fails, a file that cannot be written.
    """
    request = read_request(rewards, options)
    count, size = request.rewards.shape
    if plot is not None and size == 1:
        raise UserError("--plot: a group of one has no advantages, so no weights to draw; give two rewards or more.")
    shown, notes = columns(request)
    results = advantages_of(shown, request.rewards, request.lengths)
    if plot is not None:
        notes += draw(request, plot)
    title = f"advantages of {'a group' if count == 1 else f'{count} groups'} of {size}"
    named = {header(each): result for each, result in zip(shown, results, strict=True)}
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else _LOG_WIDTH
    for part in side_by_side(*_cells(request, named), room):
        console.table(title, part[0], part[1:])
        title = "continued"
    for note in notes:
        console.say(note)


def draw(request: Request, path: str) -> list[str]:
    """Writes the figure of the population weights. Returns what there is to say about it."""
    size = request.rewards.shape[1]
    rates = pass_rates(size)
    order, ddof = request.numbers.get("truncation_order"), request.numbers.get("ddof")
    lines = drawn_estimators(size, request.k, order, ddof)
    notes = []
    try:
        own = [] if request.own is None else [(header(request.own), "other", request.own)]
        curves = curves_of([*lines, *own], size, rates)
    except UserError as error:  # the built-in ones have weights; advantages of the user's own were computed before
        notes.append(f"not drawn: {error}")
        curves = curves_of(lines, size, rates)
    save(weights_figure(curves, size, rates), path)
    return [*notes, f"population weights w(p) for groups of {size}: {path}"]


def read_request(rewards: str, options: Sequence[str]) -> Request:
    """The words as values, each checked."""
    groups = _groups("reward", rewards, _reward)
    words: dict[str, str] = {}
    for word in options:
        key, equals, value = word.partition("=")
        if not equals:
            raise UserError(
                f"'{word}': expected key=value after the rewards, which are one word: 1,0,0,0 or '1,0;1,1'."
            )
        if key in words:
            raise UserError(f"{key}: given twice.")
        words[key] = value
    place = words.pop("estimator", None)
    declared = {} if place is None else find_estimator(place).parameters()
    known = (*_NUMBERS, "lengths", "estimator", *declared)
    for key in words:
        if key not in known:
            raise UserError(f"{key}: unknown key. {nearest(key, known)}")
    lengths = None
    if "lengths" in words:
        lengths = _groups("length", words["lengths"], _length).astype(np.int32)
        if lengths.shape != groups.shape:
            raise UserError(f"lengths: one per reward, {_extent(groups)}; got {_extent(lengths)}.")
    numbers: dict[str, Any] = {key: _whole(key, words[key]) for key in _NUMBERS if key in words}
    AlgorithmConfig(**numbers)  # refuses what a config may not say
    own = None
    if place is not None:
        params = {key: numbers[key] if key in numbers else _plain(words[key]) for key in declared if key in words}
        own = GroupEstimator(place, params)
        check_parameters(place, params, groups.shape[1])
    return Request(groups, lengths, numbers, own)


def columns(request: Request) -> tuple[list[GroupEstimator], list[str]]:
    """The estimators that take these rewards, and a line for each thing that a reader should know."""
    size = request.rewards.shape[1]
    scored = ~np.isnan(request.rewards)
    shown: list[GroupEstimator] = []
    notes: list[str] = []
    for estimator in _candidates(request):
        try:
            params = check_parameters(estimator.name, estimator.params, size)
            check_rewards(
                estimator.name, params, request.rewards, scored, lambda g, i: f"reward {i + 1} of group {g + 1}"
            )
        except UserError as error:
            if size > 1:
                notes.append(f"{estimator.name} is not shown: {str(error).removeprefix('algorithm.')}")
            continue
        shown.append(estimator)
    for group, found in enumerate(scored.sum(axis=1) if size > 1 else ()):
        short = [header(each) for each in shown if found < each.registered.least_scored(each.params)]
        if short:
            which = "every estimator" if len(short) == len(shown) else ", ".join(short)
            notes.append(f"group {group + 1} has {found} scored, too few for {which}: dropped.")
    if size == 1:
        notes.append("a group of one has no advantage: there is nothing to compare its completion with.")
    elif "k" not in request.numbers:
        notes.append(f"k is not given: k={request.k} is shown.")
    if request.lengths is None and size > 1:
        notes.append("lengths are not given: opo and reinforce_pp take all completions as equally long.")
    return shown, notes


def header(estimator: GroupEstimator) -> str:
    """The name of a column: the estimator, a file without its folder, and the parameters that were set."""
    return " ".join([Path(estimator.name).name, *(f"{key}={value}" for key, value in estimator.params.items())])


def _candidates(request: Request) -> list[GroupEstimator]:
    """Every built-in estimator with what was given of its parameters; `maxrl` without its order and, if set, with."""
    given = {**request.numbers, "k": request.k}
    found: list[GroupEstimator] = []
    seen = set()
    for name, estimator in ADVANTAGE_ESTIMATORS.items():
        if estimator.function in seen or estimator.function.__module__ != _BUILT_IN:
            continue
        seen.add(estimator.function)
        params = {key: given[key] for key in estimator.parameters() if key in given}
        if "truncation_order" in params:
            found.append(GroupEstimator(name, {}))
        found.append(GroupEstimator(name, params))
    if request.own is not None and request.own not in found:
        found.append(request.own)
    return found


def _cells(request: Request, named: Mapping[str, Float[np.ndarray, "P G"]]) -> tuple[int, list[list[str]]]:
    """How many columns stand on the left of the estimators', and the lines of the table, the header first."""
    rewards, lengths = request.rewards, request.lengths
    count, size = rewards.shape
    values = {"reward": rewards} | ({} if lengths is None else {"length": lengths.astype(np.float64)}) | dict(named)
    left = ["completion"] if size <= _LONG_GROUP else ["count"]
    left = left if count == 1 else ["group", *left]
    rows = [[*left, *values]]
    for group in range(count):
        taken = {name: array[group] for name, array in values.items()}
        label = [] if count == 1 else [str(group + 1)]
        shown = (_column(column, 1e-6 if name in named else 0.0) for name, column in taken.items())
        lines = list(zip(*shown, strict=True))
        if size <= _LONG_GROUP:
            rows += [[*label, str(sample + 1), *line] for sample, line in enumerate(lines)]
        else:
            order = np.argsort(-taken["reward"], kind="stable")  # NaN last
            tally: dict[tuple[str, ...], int] = {}
            for sample in order:
                tally[lines[sample]] = tally.get(lines[sample], 0) + 1
            rows += [[*label, str(number), *line] for line, number in tally.items()]
        rows.append([*label, "sum", *(_total(column) for column in taken.values())])
        rows.append([*label, "mean size", *(_number(_mean_size(column)) for column in taken.values())])
    return len(left) + (1 if lengths is None else 2), rows


def _column(values: Float[np.ndarray, "G"], rounding: float) -> list[str]:
    """Four digits each; what is within `rounding` of the largest is the rest of a zero."""
    small = rounding * np.nanmax(np.abs(values), initial=0.0)
    return ["none" if math.isnan(value) else _number(0.0 if abs(value) <= small else value) for value in values]


def _total(values: Float[np.ndarray, "G"]) -> str:
    total = float(np.nansum(values))
    return _number(0.0 if abs(total) <= 1e-5 * np.nansum(np.abs(values)) else total)


def _mean_size(values: Float[np.ndarray, "G"]) -> float:
    return float(np.nanmean(np.abs(values))) if not np.isnan(values).all() else 0.0


def _number(value: float) -> str:
    return f"{value + 0.0:.4g}"  # + 0.0: no "-0"


def side_by_side(left: int, rows: list[list[str]], room: int) -> list[list[list[str]]]:
    """The table in as many parts as a width of `room` characters needs; each repeats the `left` columns."""
    widths = [max(len(row[at]) for row in rows) + 3 for at in range(len(rows[0]))]
    parts, part = [], list(range(left))
    for at in range(left, len(rows[0])):
        if len(part) > left and sum(widths[i] for i in part) + widths[at] + 1 > room:
            parts.append(part)
            part = list(range(left))
        part.append(at)
    return [[[row[at] for at in part] for row in rows] for part in [*parts, part]]


def _groups(what: str, text: str, read: Callable[[str, str], float]) -> Float[np.ndarray, "P G"]:
    """`1,0;1,1` as an array, each value read by `read`, all groups of one size."""
    groups: list[list[float]] = []
    for number, part in enumerate(text.split(";"), 1):
        if not part.strip():
            raise UserError(f"group {number} of the {what}s is empty; write e.g. 1,0,0,0 or '1,0,0,0;1,1,0,0'.")
        words = [word.strip() for word in part.split(",")]
        groups.append([read(word, f"{what} {place} of group {number}") for place, word in enumerate(words, 1)])
        if len(groups[-1]) != len(groups[0]):
            raise UserError(
                f"group {number} of the {what}s has {len(groups[-1])}, group 1 has {len(groups[0])}; all groups of a "
                "run have the same size."
            )
    return np.array(groups, np.float64)


def _reward(word: str, place: str) -> float:
    if word.lower() in ("none", "nan"):
        return math.nan
    try:
        value = float(word)
    except ValueError:
        raise UserError(
            f"{place}: {word!r} is no number; write numbers, or none for what could not be scored."
        ) from None
    if not abs(value) <= LARGEST_REWARD:
        raise UserError(f"{place}: {word} is beyond {LARGEST_REWARD:g}.")
    return value


def _length(word: str, place: str) -> float:
    if not word.isdecimal() or int(word) >= 2**31:
        raise UserError(f"{place}: {word!r} is no number of tokens; write whole numbers, e.g. lengths=3,1,2,5.")
    return float(word)


def _whole(key: str, word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise UserError(f"{key}: expected a whole number, got {word!r}.") from None


def _plain(word: str) -> int | float | bool | str:
    """The value of an own estimator's parameter: a number or a truth value where it reads as one, else text."""
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(word.lower(), word)


def _extent(values: np.ndarray) -> str:
    count, size = values.shape
    return f"{count} group{'s' if count > 1 else ''} of {size}"


def run(arguments: argparse.Namespace) -> None:
    """Prints the table and, with `--plot`, draws the picture."""
    setup_jax()
    show(arguments.rewards, arguments.overrides, arguments.plot)
