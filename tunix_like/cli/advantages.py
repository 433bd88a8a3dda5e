"""The command `advantages`: prints the advantages that each estimator computes for the same rewards.

The advantages are computed by the code of the training step. `--plot` draws the population weights of the estimators:
the weight of a prompt as a function of its pass rate, as in the MaxRL paper (arXiv 2602.02710).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import shutil
import sys
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from tunix_like.algorithms.objective import GroupEstimator
from tunix_like.algorithms.population_weights import (
    advantages_of,
    likelihood_weight,
    reinforcement_weight,
    weights_of,
)
from tunix_like.algorithms.registry import (
    ADVANTAGE_ESTIMATORS,
    check_parameters,
    check_rewards,
    find_estimator,
)
from tunix_like.cli.common import setup_jax
from tunix_like.config.schema import AlgorithmConfig
from tunix_like.config.sources import ESTIMATOR_KEYS
from tunix_like.errors import UserError, nearest
from tunix_like.runtime import console
from tunix_like.tasks.results import LARGEST_REWARD

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BUILT_IN = "tunix_like.algorithms.advantages"  # the module whose estimators are always shown
_LONG_GROUP = 16  # in larger groups, completions with identical values share one row of the table
_LOG_WIDTH = 140  # width in characters if the output is not a terminal


# The colours are the Okabe-Ito palette, which colour-blind readers can distinguish. Curves that can overlap others are
# dashed. The orders of MaxRL have shades of one colour; the highest order is the darkest.
_STYLES: dict[str, dict[str, Any]] = {
    "ml": {"color": "#000000", "linestyle": (0, (5, 3)), "linewidth": 1.4, "zorder": 4},
    "rl": {"color": "#7f7f7f", "linewidth": 2.0},
    "grpo": {"color": "#d55e00", "linewidth": 2.0},
    "maxrl": {"linewidth": 2.2},
    "max@k": {"color": "#009e73", "linestyle": (0, (6, 1.5, 1.5, 1.5)), "linewidth": 2.0},
    "maxk_mix": {"color": "#e69f00", "linewidth": 2.0},
    "order_statistic": {"color": "#8c564b", "linestyle": (0, (3, 1.5)), "linewidth": 2.0},
    "other": {"color": "#cc79a7", "linestyle": ":", "linewidth": 2.6},
}
_BLUES = ("#08306b", "#2171b5", "#6baed6", "#9ecae1")
_TICKS = (1e-5, 1e-4, 1e-3, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99)
_LEGEND_WIDTH = 18  # characters
_LOWEST = 0.03  # lower end of the y axis; needed because the weight of max@k falls to 0


@dataclasses.dataclass(frozen=True)
class AdvantageRequest:
    """The parsed arguments. `rewards` has NaN for an unscored completion; `lengths` are in tokens; `given` has the
    given parameters of the built-in estimators; `own` is the estimator of the user."""

    rewards: Float[np.ndarray, "P G"]
    lengths: Int[np.ndarray, "P G"] | None
    given: dict[str, Any]
    own: GroupEstimator | None

    @property
    def k(self) -> int:
        """The given `k`; if none was given, 1 for groups of one or two rewards, and 2 for larger groups."""
        return self.given.get("k", max(1, min(2, self.rewards.shape[1] - 1)))


def show(rewards: str, options: Sequence[str], plot: str | None) -> None:
    """Prints the table of advantages of `1,0,0,0` or `1,0;1,1` (`none`: unscored), and notes on estimators that it
    leaves out. `options` are `key=value` arguments; `plot` is the file of the figure."""
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


def draw(request: AdvantageRequest, path: str) -> list[str]:
    """Writes the figure and returns lines of text to print: the path, and before it why the user's estimator was not
    drawn."""
    size = request.rewards.shape[1]
    rates = pass_rates(size)
    lines = drawn_estimators(size, {**request.given, "k": request.k})
    notes = []
    try:
        own = [] if request.own is None else [(header(request.own), "other", request.own)]
        curves = curves_of([*lines, *own], size, rates)
    except UserError as error:  # only a user-defined estimator can raise this error
        notes.append(f"not drawn: {error}")
        curves = curves_of(lines, size, rates)
    save(weights_figure(curves, size, rates), path)
    return [*notes, f"population weights w(p) for groups of {size}: {path}"]


def read_request(rewards: str, options: Sequence[str]) -> AdvantageRequest:
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
    known = (*ESTIMATOR_KEYS, "lengths", "estimator", *declared)
    for key in words:
        if key not in known:
            raise UserError(f"{key}: unknown key. {nearest(key, known)}")
    lengths = None
    if "lengths" in words:
        lengths = _groups("length", words["lengths"], _length).astype(np.int32)
        if lengths.shape != groups.shape:
            raise UserError(f"lengths: expected one per reward, {_extent(groups)}; got {_extent(lengths)}.")
    given = {key: _parameter(key, words[key]) for key in ESTIMATOR_KEYS if key in words}
    AlgorithmConfig(**given)  # raises for values that are invalid in a config
    own = None
    if place is not None:
        params = {key: given[key] if key in given else _plain(words[key]) for key in declared if key in words}
        own = GroupEstimator(place, params)
        check_parameters(place, params, groups.shape[1])
    return AdvantageRequest(groups, lengths, given, own)


def columns(request: AdvantageRequest) -> tuple[list[GroupEstimator], list[str]]:
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
    elif "k" not in request.given:
        notes.append(f"k is not given: k={request.k} is shown.")
    if request.lengths is None and size > 1:
        notes.append("lengths are not given: opo and reinforce_pp assume that all completions are equally long.")
    return shown, notes


def header(estimator: GroupEstimator) -> str:
    """Returns the column header of an estimator: its name, and the parameters that are set. If the name is
    `FOLDER/FILE.py:function`, the folder is left out."""
    return " ".join([Path(estimator.name).name, *(f"{key}={_text(value)}" for key, value in estimator.params.items())])


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _candidates(request: AdvantageRequest) -> list[GroupEstimator]:
    """Returns every built-in estimator (`maxrl` also with `truncation_order` if that is given) and that of the user."""
    given = {**request.given, "k": request.k}
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


def _cells(request: AdvantageRequest, named: Mapping[str, Float[np.ndarray, "P G"]]) -> tuple[int, list[list[str]]]:
    """Returns the number of columns before the first estimator, and the rows of the table, first the header."""
    rewards = request.rewards
    lengths = request.lengths
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
    """Formats values with four significant digits. Up to `rounding` times the largest magnitude, a value is shown as
    0."""
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
    parts = []
    part = list(range(left))
    for at in range(left, len(rows[0])):
        if len(part) > left and sum(widths[i] for i in part) + widths[at] + 1 > width:
            parts.append(part)
            part = list(range(left))
        part.append(at)
    return [[[row[at] for at in part] for row in rows] for part in [*parts, part]]


def _groups(what: str, text: str, read: Callable[[str, str], float]) -> Float[np.ndarray, "P G"]:
    """Parses groups such as `1,0;1,1` with `read(word, place)`. `what` is `reward` or `length`, for messages."""
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


def _parameter(key: str, word: str) -> Any:
    """Parses a parameter of the built-in estimators by the type of its key."""
    kinds = set(typing.get_args(typing.get_type_hints(AlgorithmConfig)[key]))
    if str in kinds:
        return word
    several = list[float] in kinds
    kind = int if int in kinds else float
    try:
        values = [kind(part) for part in (word.split(",") if several else [word])]
    except ValueError:
        what = "an integer" if kind is int else "numbers such as 1,0.5" if several else "a number"
        raise UserError(f"{key}: expected {what}, got {word!r}.") from None
    return values if several else values[0]


def _plain(word: str) -> int | float | bool | str:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(word.lower(), word)


def _extent(values: np.ndarray) -> str:
    count, size = values.shape
    return f"{count} group{'s' if count > 1 else ''} of {size}"


@dataclasses.dataclass(frozen=True)
class WeightCurve:
    """The weight at each pass rate. `family` is a key of `_STYLES`."""

    label: str
    family: str
    weights: Float[np.ndarray, "N"]


def pass_rates(group_size: int) -> Float[np.ndarray, "N"]:
    """Returns the pass rates at which the curves of the figure are computed. The rates are dense near 0 and 1. The
    lowest rate is below 1/G, where G is the group size: 1/G is the pass rate of one success in a group."""
    end = min(0.01, 0.1 / group_size)
    logits = np.linspace(np.log(end / (1 - end)), np.log(0.99 / 0.01), 400)
    return 1 / (1 + np.exp(-logits))


def drawn_estimators(group_size: int, given: Mapping[str, Any]) -> list[tuple[str, str, GroupEstimator]]:
    """Returns the label, the family (which sets the line style) and the estimator of each curve that the group size and
    the given parameters, with `k`, allow. MaxRL of order `G - 1` is Algorithm 1 of the MaxRL paper; a lower order
    truncates the Taylor series of the log-likelihood earlier."""
    k = given["k"]
    truncation_order = given.get("truncation_order")
    ddof = given.get("ddof")
    label = "GRPO" if ddof is None else f"GRPO (ddof {ddof})"
    lines = [(label, "grpo", GroupEstimator("grpo", {} if ddof is None else {"ddof": ddof}))]
    for order in sorted({1, 4, group_size - 1, truncation_order or 1}, reverse=True):
        if order <= group_size - 1:
            params: dict[str, Any] = {} if order == group_size - 1 else {"truncation_order": order}
            lines.append((f"MaxRL order {order}", "maxrl", GroupEstimator("maxrl", params)))
    for name, label, highest in (("maxpo", "MaxPO", group_size - 1), ("pkpo", "PKPO", group_size)):
        if k <= highest:
            lines.append((f"{label}({k})", "max@k", GroupEstimator(name, {"k": k})))
    for name, label, keys in (
        ("maxk_mix", "mix", ("alpha", "coefficients")),
        ("order_statistic", "order statistic", ("weights", "statistic")),
    ):
        named = {key: given[key] for key in keys if key in given}
        params = named | ({"k": k} if name == "order_statistic" else {})
        try:
            check_parameters(name, params, group_size)
        except UserError:
            continue  # not given, or the table has a note about it
        ((key, value),) = named.items()
        lines.append((f"{label} ({key} {_text(value)})", name, GroupEstimator(name, params)))
    return lines


def curves_of(
    estimators: Sequence[tuple[str, str, GroupEstimator]], group_size: int, rates: Float[np.ndarray, "N"]
) -> list[WeightCurve]:
    """Computes the weight of a prompt at each pass rate as curves for maximum likelihood, for plain RL and for each
    `(label, family, estimator)`. Curves that coincide are merged into one, whose label contains all names."""
    weights = weights_of([estimator for _, _, estimator in estimators], group_size, rates)
    curves = [
        WeightCurve("ML, 1/p", "ml", likelihood_weight(rates)),
        WeightCurve("RL", "rl", reinforcement_weight(rates)),
    ]
    for (label, family, _), values in zip(estimators, weights, strict=True):
        for index, curve in enumerate(curves):
            if np.allclose(values, curve.weights, rtol=1e-4, atol=1e-4):
                curves[index] = dataclasses.replace(curve, label=f"{curve.label} = {label}")
                break
        else:
            curves.append(WeightCurve(label, family, values))
    return curves


def weights_figure(curves: Sequence[WeightCurve], group_size: int, rates: Float[np.ndarray, "N"]) -> Figure:
    """Draws the weight of a prompt as a function of its pass rate. A PNG file of the figure has 1200 x 750 pixels. This
    function does not use pyplot, so it changes no global state and needs no display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained", facecolor="white")
    axes = figure.subplots()
    blues = iter(_BLUES)
    for curve in curves:
        positive = np.where(curve.weights > 0, curve.weights, np.nan)  # a logarithmic axis shows positive values only
        style = _STYLES[curve.family] | ({"color": next(blues)} if curve.family == "maxrl" else {})
        axes.plot(rates, positive, label=curve.label, **style)
    _format_axes(figure, curves, group_size, rates)
    return figure


def _format_axes(figure: Figure, curves: Sequence[WeightCurve], group_size: int, rates: Float[np.ndarray, "N"]) -> None:
    from matplotlib.ticker import NullLocator

    (axes,) = figure.axes
    highest = [float(curve.weights.max()) for curve in curves if curve.weights.max() > 0]
    axes.set_xscale("logit")  # stretches both ends: very hard and nearly solved prompts
    axes.set_yscale("log")
    axes.set_xlim(rates[0], rates[-1])
    axes.set_ylim(min(_LOWEST, 0.5 * min(highest)), 1.3 * max(highest))
    axes.set_xticks([tick for tick in _TICKS if rates[0] * (1 - 1e-9) <= tick <= rates[-1] * (1 + 1e-9)])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.tick_params(labelsize=11)
    axes.set_xlabel("pass rate p", fontsize=13)
    axes.set_ylabel("weight w(p)", fontsize=13)
    axes.set_title(f"Population weights for groups of G = {group_size}", fontsize=14, pad=10, loc="left")
    axes.text(0.02, 0.03, "E[gradient] = w(p) ∇p", transform=axes.transAxes, fontsize=12, color="#404040")
    axes.grid(which="major", color="#d9d9d9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    at_left = {line: float(np.nan_to_num(np.asarray(line.get_ydata())[0])) for line in axes.get_lines()}
    lines = sorted(at_left, key=lambda line: -at_left[line])  # the order of the legend
    labels = [str(line.get_label()).replace(" = ", " =\N{NO-BREAK SPACE}") for line in lines]
    labels = [textwrap.fill(label, _LEGEND_WIDTH) for label in labels]
    figure.legend(lines, labels, loc="outside right upper", frameon=False, fontsize=11, handlelength=2.4)


def save(figure: Figure, path: str) -> None:
    """Writes the figure in the format of the file name extension; PNG if there is no extension."""
    kind = Path(path).suffix.removeprefix(".").lower() or "png"
    if kind not in figure.canvas.get_supported_filetypes():
        raise UserError(f"--plot {path}: '.{kind}' is not a supported format; give e.g. weights.png.")
    try:
        figure.savefig(path, format=kind)
    except OSError as error:
        raise UserError(f"--plot {path}: the file cannot be written: {error.strerror or error}.") from error


def run(arguments: argparse.Namespace) -> None:
    """Runs the command `advantages`: prints the table and, with `--plot`, writes the figure."""
    setup_jax()
    show(arguments.rewards, arguments.overrides, arguments.plot)
