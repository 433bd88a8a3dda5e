"""The command `advantages`: prints the advantages that each estimator computes for the same rewards.

The advantages are computed by the code of the training step. `weights_figure.py` draws the figure of `--plot`.
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
_LONG_GROUP = 16  # in larger groups, completions with identical values share one row of the table
_LOG_WIDTH = 140  # width in characters if the output is not a terminal


@dataclasses.dataclass(frozen=True)
class Request:
    """The parsed arguments of the command `advantages`.

    Attributes:
      rewards: the rewards of each group; NaN for an unscored completion.
      lengths: completion lengths in tokens; None if not given.
      numbers: the given values of `k`, `truncation_order` and `ddof`, by name.
      own: the user-defined estimator with its parameters; None if not given.
    """

    rewards: Float[np.ndarray, "P G"]
    lengths: Int[np.ndarray, "P G"] | None
    numbers: dict[str, int]
    own: GroupEstimator | None

    @property
    def k(self) -> int:
        """The given value of the parameter `k`; if none was given, 1 for groups of one or two rewards, and 2 for larger
        groups."""
        return self.numbers.get("k", max(1, min(2, self.rewards.shape[1] - 1)))


def show(rewards: str, options: Sequence[str], plot: str | None) -> None:
    """Prints the table of advantages, and notes on estimators that the table leaves out.

    If `plot` is given, also draws the population weights: the weight of a prompt as a function of its pass rate.

    Args:
      rewards: the rewards of one or several groups of equal size, such as `1,0,0,0` or `1,0;1,1`; `none` marks an
        unscored completion.
      options: `key=value` arguments: `k`, `truncation_order`, `ddof`, `lengths`, `estimator` and its parameters.
      plot: the file for the figure; None draws no figure.

    Raises:
      UserError: an argument cannot be parsed, a user-defined estimator fails, or the file cannot be written.
    """
    request = read_request(rewards, options)
    count, size = request.rewards.shape
    if plot is not None and size == 1:
        raise UserError("--plot: a group of one has no advantages, so there are no weights; give two rewards or more.")
    shown, notes = columns(request)
    results = advantages_of(shown, request.rewards, request.lengths)
    if plot is not None:
        notes += draw(request, plot)
    title = f"advantages of {'a group' if count == 1 else f'{count} groups'} of {size}"
    named = {header(estimator): result for estimator, result in zip(shown, results, strict=True)}
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _LOG_WIDTH
    for part in side_by_side(*_cells(request, named), width):
        console.table(title, part[0], part[1:])
        title = "continued"
    for note in notes:
        console.print_text(note)


def draw(request: Request, path: str) -> list[str]:
    """Writes the figure of the population weights to `path`. Returns lines of text to print.

    The last line contains the path. If the user-defined estimator could not be drawn, the first line gives the reason.
    """
    size = request.rewards.shape[1]
    rates = pass_rates(size)
    order, ddof = request.numbers.get("truncation_order"), request.numbers.get("ddof")
    lines = drawn_estimators(size, request.k, order, ddof)
    notes = []
    try:
        own = [] if request.own is None else [(header(request.own), "other", request.own)]
        curves = curves_of([*lines, *own], size, rates)
    except UserError as error:  # only a user-defined estimator can raise this error
        notes.append(f"not drawn: {error}")
        curves = curves_of(lines, size, rates)
    save(weights_figure(curves, size, rates), path)
    return [*notes, f"population weights w(p) for groups of {size}: {path}"]


def read_request(rewards: str, options: Sequence[str]) -> Request:
    """Parses and checks the rewards and the `key=value` options of the command `advantages`."""
    groups = _groups("reward", rewards, _reward)
    words: dict[str, str] = {}
    for word in options:
        key, equals, value = word.partition("=")
        if not equals:
            raise UserError(
                f"'{word}': expected key=value. The rewards are a single argument, e.g. 1,0,0,0 or '1,0;1,1'."
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
            raise UserError(f"lengths: expected one per reward, {_extent(groups)}; got {_extent(lengths)}.")
    numbers: dict[str, Any] = {key: _whole(key, words[key]) for key in _NUMBERS if key in words}
    AlgorithmConfig(**numbers)  # raises for values that are invalid in a config
    own = None
    if place is not None:
        params = {key: numbers[key] if key in numbers else _plain(words[key]) for key in declared if key in words}
        own = GroupEstimator(place, params)
        check_parameters(place, params, groups.shape[1])
    return Request(groups, lengths, numbers, own)


def columns(request: Request) -> tuple[list[GroupEstimator], list[str]]:
    """Returns the estimators that accept the rewards of `request`, and the notes to print below the table of
    advantages."""
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
    for group, count in enumerate(scored.sum(axis=1) if size > 1 else ()):
        dropping = [
            header(estimator) for estimator in shown if count < estimator.registered.least_scored(estimator.params)
        ]
        if dropping:
            which = "every estimator" if len(dropping) == len(shown) else ", ".join(dropping)
            notes.append(f"group {group + 1} has {count} scored completions, too few for {which}: dropped.")
    if size == 1:
        notes.append("a group of one has no advantage: there is no other completion to compare with.")
    elif "k" not in request.numbers:
        notes.append(f"k is not given: k={request.k} is shown.")
    if request.lengths is None and size > 1:
        notes.append("lengths are not given: opo and reinforce_pp assume that all completions are equally long.")
    return shown, notes


def header(estimator: GroupEstimator) -> str:
    """Returns the column header of an estimator: its name, and the parameters that are set. If the name is
    `FOLDER/FILE.py:function`, the folder is left out."""
    return " ".join([Path(estimator.name).name, *(f"{key}={value}" for key, value in estimator.params.items())])


def _candidates(request: Request) -> list[GroupEstimator]:
    """Returns every built-in estimator with its parameters from `request`, and the user-defined estimator, if any.

    If `truncation_order` is given, `maxrl` is returned twice: without and with `truncation_order`.
    """
    given = {**request.numbers, "k": request.k}
    candidates: list[GroupEstimator] = []
    seen = set()
    for name, estimator in ADVANTAGE_ESTIMATORS.items():
        if estimator.function in seen or estimator.function.__module__ != _BUILT_IN:
            continue
        seen.add(estimator.function)
        params = {key: given[key] for key in estimator.parameters() if key in given}
        if "truncation_order" in params:
            candidates.append(GroupEstimator(name, {}))
        candidates.append(GroupEstimator(name, params))
    if request.own is not None and request.own not in candidates:
        candidates.append(request.own)
    return candidates


def _cells(request: Request, named: Mapping[str, Float[np.ndarray, "P G"]]) -> tuple[int, list[list[str]]]:
    """Returns the number of columns before the first estimator, and the rows of the table of advantages, starting with
    the header.

    Args:
      named: the advantages of each estimator, by column header.
    """
    rewards, lengths = request.rewards, request.lengths
    count, size = rewards.shape
    values = {"reward": rewards} | ({} if lengths is None else {"length": lengths.astype(np.float64)}) | dict(named)
    left = ["completion"] if size <= _LONG_GROUP else ["count"]
    left = left if count == 1 else ["group", *left]
    rows = [[*left, *values]]
    for group in range(count):
        of_group = {name: array[group] for name, array in values.items()}
        label = [] if count == 1 else [str(group + 1)]
        texts = (_column(column, 1e-6 if name in named else 0.0) for name, column in of_group.items())
        lines = list(zip(*texts, strict=True))
        if size <= _LONG_GROUP:
            rows += [[*label, str(sample + 1), *line] for sample, line in enumerate(lines)]
        else:
            order = np.argsort(-of_group["reward"], kind="stable")  # NaN last
            tally: dict[tuple[str, ...], int] = {}
            for sample in order:
                tally[lines[sample]] = tally.get(lines[sample], 0) + 1
            rows += [[*label, str(number), *line] for line, number in tally.items()]
        rows.append([*label, "sum", *(_total(column) for column in of_group.values())])
        rows.append([*label, "mean size", *(_number(_mean_size(column)) for column in of_group.values())])
    return len(left) + (1 if lengths is None else 2), rows


def _column(values: Float[np.ndarray, "G"], rounding: float) -> list[str]:
    """Formats values with four significant digits. A value whose magnitude is at most `rounding` times the largest
    magnitude is taken for a rounding error and shown as 0."""
    small = rounding * np.nanmax(np.abs(values), initial=0.0)
    return ["none" if math.isnan(value) else _number(0.0 if abs(value) <= small else value) for value in values]


def _total(values: Float[np.ndarray, "G"]) -> str:
    total = float(np.nansum(values))
    return _number(0.0 if abs(total) <= 1e-5 * np.nansum(np.abs(values)) else total)


def _mean_size(values: Float[np.ndarray, "G"]) -> float:
    return float(np.nanmean(np.abs(values))) if not np.isnan(values).all() else 0.0


def _number(value: float) -> str:
    return f"{value + 0.0:.4g}"  # adding 0.0 turns -0.0 into 0.0


def side_by_side(left: int, rows: list[list[str]], width: int) -> list[list[list[str]]]:
    """Divides the columns of a table into narrower tables of at most `width` characters per line. Each of these tables
    begins with the first `left` columns."""
    widths = [max(len(row[at]) for row in rows) + 3 for at in range(len(rows[0]))]
    parts, part = [], list(range(left))
    for at in range(left, len(rows[0])):
        if len(part) > left and sum(widths[i] for i in part) + widths[at] + 1 > width:
            parts.append(part)
            part = list(range(left))
        part.append(at)
    return [[[row[at] for at in part] for row in rows] for part in [*parts, part]]


def _groups(what: str, text: str, read: Callable[[str, str], float]) -> Float[np.ndarray, "P G"]:
    """Parses groups such as `1,0;1,1`. Raises UserError if a group is empty or the groups differ in size.

    Args:
      what: what the values are, `reward` or `length`, for error messages.
      read: `read(word, place)` parses one value; `place` describes the position of the value, for error messages.
    """
    groups: list[list[float]] = []
    for number, part in enumerate(text.split(";"), 1):
        if not part.strip():
            raise UserError(f"group {number} of the {what}s is empty; write e.g. 1,0,0,0 or '1,0,0,0;1,1,0,0'.")
        words = [word.strip() for word in part.split(",")]
        groups.append([read(word, f"{what} {place} of group {number}") for place, word in enumerate(words, 1)])
        if len(groups[-1]) != len(groups[0]):
            raise UserError(
                f"group {number} of the {what}s has {len(groups[-1])}, group 1 has {len(groups[0])}; all groups must "
                "have the same size."
            )
    return np.array(groups, np.float64)


def _reward(word: str, place: str) -> float:
    if word.lower() in ("none", "nan"):
        return math.nan
    try:
        value = float(word)
    except ValueError:
        raise UserError(
            f"{place}: {word!r} is not a number; write numbers, or none for an unscored completion."
        ) from None
    if not abs(value) <= LARGEST_REWARD:
        raise UserError(f"{place}: {word} is out of range; the largest magnitude is {LARGEST_REWARD:g}.")
    return value


def _length(word: str, place: str) -> float:
    if not word.isdecimal() or int(word) >= 2**31:
        raise UserError(f"{place}: {word!r} is not a number of tokens; write integers, e.g. lengths=3,1,2,5.")
    return float(word)


def _whole(key: str, word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise UserError(f"{key}: expected an integer, got {word!r}.") from None


def _plain(word: str) -> int | float | bool | str:
    """Parses a parameter of a user-defined estimator as an int, float or bool if possible, else as text."""
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
    """Runs the command `advantages`: prints the table and, with `--plot`, writes the figure."""
    setup_jax()
    show(arguments.rewards, arguments.overrides, arguments.plot)
