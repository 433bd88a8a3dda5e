"""Writes the figures of a report as PNG files for papers, one file per chart. The HTML page shows the same data.

This module uses matplotlib without pyplot, so there is no global state, window or display.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from tunix_like.errors import UserError
from tunix_like.report.contents import TIME_PARTS, Curve, curves
from tunix_like.report.reading import Run, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from tunix_like.report.gradients import Gradients

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b4558f", "#b8860b", "#2f4b7c", "#8c510a", "#5ab4ac")
"""Colours of the runs, in the order of the runs. The HTML page has the same colours in light mode."""

SMOOTHING = 0.6
"""Weight of past values in the exponential moving average. A chart shows this average and the values of single
steps."""

_BINS = ("0", "1/8", "1/4", "3/8", "1/2", "5/8", "3/4", "7/8", "<1", "1")
_WINDOWS = 48


def save_figures(runs: Sequence[Run], folder: Path, gradients: Sequence[Gradients] = ()) -> list[Path]:
    """Draws and writes all figures of a report, and returns the paths of their files."""
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in _figures(runs, gradients):
            written.append(folder / f"{name}.png")
            figure.savefig(written[-1], format="png")
    except OSError as error:
        raise UserError(f"--png {folder}: cannot write it: {error.strerror or error}.") from error
    return written


def _figures(runs: Sequence[Run], gradients: Sequence[Gradients]) -> Iterator[tuple[str, Figure]]:
    for curve in curves(runs):
        yield slug(curve.title), draw(runs, curve)
    recorded = [run for run in runs if {"drawn", "trained", "advantage"} <= run.rl.histograms.keys()]
    if recorded:
        yield "pass_rates", _pass_rates(recorded, "drawn", "share of prompts")
        curricula = [run for run in recorded if "all" in run.rl.histograms]
        if curricula:
            yield "pass_rates_of_all_prompts", _pass_rates(curricula, "all", "share of the prompts seen so far")
        yield "advantage_by_pass_rate_over_training", _pass_rates(recorded, "advantage", "share of |advantage|")
        yield "advantage_by_pass_rate", _advantage(runs)
    if gradients:
        yield "gradient_norm_by_pass_rate", _gradients(runs, gradients)
    timed = [run for run in runs if time_parts(run.rl)]
    if timed:
        yield "time", _time(timed)


def slug(title: str) -> str:
    """Converts a title to a file name: `pass@16, held out` becomes `pass_at_16_held_out`."""
    return re.sub(r"\W+", "_", title.lower().replace("@", "_at_")).strip("_")


def _new(columns: int = 1, rows: int = 1) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(5.2 * columns, 3.4 * rows), dpi=200, layout="constrained", facecolor="white")


def _style(axes: Axes, xlabel: str, ylabel: str) -> None:
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(color="#e3e6ea", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def draw(runs: Sequence[Run], curve: Curve) -> Figure:
    """Draws a curve of runs."""
    figure = _new()
    axes = figure.subplots()
    scale = 100.0 if curve.unit == "%" else 1.0
    for run, colour in zip(runs, _colours(len(runs)), strict=True):
        table: Table = getattr(run, curve.phase)
        values = np.array([np.nan if x is None else x * scale for x in table.columns.get(curve.key, [])], float)
        steps = np.array(table.steps[: len(values)])
        known = np.isfinite(values)
        if not known.any():
            continue
        if "eval/" in curve.key:
            axes.plot(steps[known], values[known], color=colour, marker="o", markersize=4, label=run.name)
        else:
            axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
            axes.plot(steps, smoothed(values, SMOOTHING), color=colour, linewidth=1.6, label=run.name)
    _style(
        axes, "SFT step" if curve.phase == "sft" else "step", f"{curve.title}{f' [{curve.unit}]' * bool(curve.unit)}"
    )
    if curve.log and any((np.asarray(line.get_ydata()) > 0).any() for line in axes.lines):
        axes.set_yscale("log", nonpositive="mask")
    if len(runs) > 1:
        axes.legend(frameon=False, fontsize=8)
    return figure


def smoothed(values: Float[np.ndarray, "N"], weight: float) -> Float[np.ndarray, "N"]:
    """Computes the bias-corrected exponential moving average. NaN values are skipped and stay NaN."""
    out = np.full_like(values, np.nan)
    total = 0.0
    mass = 0.0
    for i in np.flatnonzero(np.isfinite(values)):
        total = weight * total + (1 - weight) * values[i]
        mass = weight * mass + (1 - weight)
        out[i] = total / mass
    return out


def _colours(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def windows(table: Table, name: str, count: int = _WINDOWS) -> tuple[Float[np.ndarray, "W"], Float[np.ndarray, "W B"]]:
    """Adds up the histogram `name` over at most `count` windows of steps. Returns the last step of each window, and the
    sums `[windows, bins]`."""
    rows = [(step, row) for step, row in zip(table.steps, table.histograms[name], strict=True) if row is not None]
    parts = np.array_split(np.arange(len(rows)), min(count, len(rows)))
    sums = np.array([np.sum([rows[i][1] for i in part], axis=0) for part in parts], float)
    return np.array([rows[part[-1]][0] for part in parts], float), sums


def _pass_rates(runs: Sequence[Run], name: str, label: str) -> Figure:
    figure = _new(rows=len(runs))
    for run, axes in zip(runs, np.atleast_1d(figure.subplots(len(runs))), strict=True):
        ends, sums = windows(run.rl, name)
        shares = sums / np.maximum(sums.sum(axis=1, keepdims=True), 1e-12)
        edges = np.concatenate([[run.rl.steps[0]], ends])
        image = axes.pcolormesh(edges, np.arange(len(_BINS) + 1), shares.T, cmap="Blues", vmin=0, rasterized=True)
        axes.set_yticks(np.arange(len(_BINS)) + 0.5, _BINS)
        axes.set_xlabel("step")
        axes.set_ylabel("pass rate of a prompt")
        axes.set_title(run.name, fontsize=9, loc="left")
        figure.colorbar(image, ax=axes, label=label)
    return figure


def _advantage(runs: Sequence[Run]) -> Figure:
    """Draws the share of each pass rate in the sum of |advantage|, and the mean |advantage| of a prompt."""
    figure = _new(columns=2)
    left, right = figure.subplots(1, 2)
    positions = np.arange(len(_BINS))
    colours = _colours(len(runs))
    shown = [(run, colour) for run, colour in zip(runs, colours, strict=True) if "advantage" in run.rl.histograms]
    for number, (run, colour) in enumerate(shown):
        total, count = (windows(run.rl, name, 1)[1][0] for name in ("advantage", "trained"))
        width = 0.8 / len(shown)
        share = total / max(total.sum(), 1e-12)
        left.bar(positions + (number + 0.5) * width - 0.4, 100 * share, width, color=colour, label=run.name)
        mean = np.where(count > 0, total / np.maximum(count, 1), np.nan)
        right.plot(positions, mean, color=colour, marker="o", markersize=4)
    for axes, label in ((left, "share of |advantage| [%]"), (right, "mean |advantage| of a prompt")):
        axes.set_xticks(positions, _BINS)
        _style(axes, "pass rate of a prompt", label)
    if len(shown) > 1:
        left.legend(frameon=False, fontsize=8)
    return figure


def _gradients(runs: Sequence[Run], gradients: Sequence[Gradients]) -> Figure:
    """Draws a point per prompt, and a line through the means of the pass-rate bins."""
    figure = _new()
    axes = figure.subplots()
    for run, measured, colour in zip(runs, gradients, _colours(len(runs)), strict=True):
        rates, bins, norms = (np.array(values, float) for values in measured[:3])
        axes.scatter(rates, norms, s=9, color=colour, alpha=0.3, linewidths=0)
        means = [(rates[bins == number].mean(), norms[bins == number].mean()) for number in np.unique(bins)]
        axes.plot(*zip(*means, strict=True), color=colour, marker="o", markersize=4, label=run.name)
    _style(axes, "pass rate of a prompt", "gradient norm of a prompt")
    if len(runs) > 1:
        axes.legend(frameon=False, fontsize=8)
    return figure


def time_parts(table: Table) -> dict[str, float]:
    """Returns the total seconds of each recorded part of a step, in the order of `TIME_PARTS`."""
    columns = {name: table.columns.get(f"train/time/{name}") for name in TIME_PARTS}
    return {name: sum(value or 0.0 for value in values) for name, values in columns.items() if values is not None}


def _time(runs: Sequence[Run]) -> Figure:
    figure = _new()
    axes = figure.subplots()
    found = [time_parts(run.rl) for run in runs]
    start = np.zeros(len(runs))
    for name, colour in TIME_PARTS.items():
        if not any(name in parts for parts in found):
            continue
        values = np.array([parts.get(name, 0.0) for parts in found])
        axes.barh([run.name for run in runs], values, left=start, color=colour, label=name, height=0.6)
        start += values
    axes.invert_yaxis()
    _style(axes, "seconds in steps", "")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    return figure
