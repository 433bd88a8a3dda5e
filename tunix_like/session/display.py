"""Callbacks that show a run: lines and samples on a terminal, live curves in a notebook."""

from __future__ import annotations

import contextlib
import io
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tunix_like.config.schema import RLTrainingConfig
from tunix_like.rollout.samples import Samples
from tunix_like.runtime import console, progress
from tunix_like.session.callbacks import Callback, RunControl, check_callbacks, named_callbacks

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@contextlib.contextmanager
def shown(training: RLTrainingConfig, callbacks: Sequence[Callback]) -> Iterator[list[Callback]]:
    """Yields the callbacks of a call of `train`: those of `training.callbacks`, those of the caller and, in a notebook
    or on a terminal, the display of this library, unless something shows the progress already."""
    check_callbacks(callbacks)
    chosen = [*named_callbacks(training.callbacks), *callbacks]
    with displayed(chosen) as all_callbacks:
        yield all_callbacks


@contextlib.contextmanager
def displayed(callbacks: Sequence[Callback]) -> Iterator[list[Callback]]:
    """The part of `shown` that adds the display."""
    if any(callback.shows_progress and not isinstance(callback, LiveCurves) for callback in callbacks):
        yield [*callbacks]
        return
    with progress.watched() as started:
        default = LiveCurves if console.in_notebook() else StepLines
        add = started and not any(isinstance(callback, default) for callback in callbacks)
        yield [*callbacks, *([default()] if add else [])]


class StepLines(Callback):
    """Prints a line for each RL step and for selected SFT steps, with example completions of a step below its line."""

    shows_progress = True

    def on_row(self, run: RunControl, row: dict[str, Any]) -> None:
        if console.is_shown(row, run.total):
            console.print_text(console.row_line(row, run.total))

    def on_samples(self, run: RunControl, samples: Samples) -> None:
        show_samples(run.step, samples)


def show_samples(step: int, samples: Samples) -> None:
    """Prints the best and the worst completion of a prompt; only one completion if all rewards are equal."""
    chosen = {"best": samples.best, "worst": samples.worst}
    if samples.scored == 0 or samples.best.reward == samples.worst.reward:
        names = {0: "none scored", 1: "one scored", samples.size: f"{samples.size} equal rewards"}
        chosen = {names.get(samples.scored, f"{samples.scored} scored, equal rewards"): samples.best}
    rows = [
        (name, f"{each.reward:g}" if samples.scored else "-", f"{each.advantage:.3g}",
         f"{each.length}{'' if each.finished else ' (cut)'}", console.excerpt(each.text, 600))
        for name, each in chosen.items()
    ]  # fmt: skip
    prompt = console.excerpt(samples.prompt, 300).replace("\n", "\\n")
    known = "" if samples.scored == samples.size else f", {samples.scored} of {samples.size} completions scored"
    columns = ["", "reward", "advantage", "tokens", "completion"]
    console.table(f'step {step}, prompt "{prompt}"{known}', columns, rows, texts=columns[-1:])


_DEFAULT = (
    "rewards/mean",
    "pass@1",
    "rewards/accuracies",
    "teacher/divergence",
    "turns/mean",
    "completions/mean_length",
    "entropy",
    "loss",
)
"""The metrics of which `LiveCurves` draws the first four that a run has."""

_SHARE = 0.1
"""Share of the time that drawing may take."""


_SMOOTH = 15
"""A curve of training is the mean over the last part of its points, one of so many; the points are drawn faintly."""


class LiveCurves(Callback):
    """Draws curves of a run while it runs, in the output of the notebook's cell. Several calls of `train` with the same
    object continue the curves; a resumed run begins them with its logged rows.

    Args:
      metrics: names without their prefix, such as `rewards/mean`: a panel has the metric of training and that of
        evaluations. Defaults to up to four main metrics.
    """

    shows_progress = True

    def __init__(self, metrics: Sequence[str] | None = None) -> None:
        self._names = metrics
        self._points: dict[str, dict[int, float]] = {}
        self._drawn = -math.inf
        self._took = 0.0

    def on_begin(self, run: RunControl, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            self._add(row, run.trainer.step_key)

    def on_row(self, run: RunControl, row: dict[str, Any]) -> None:
        self._add(row, run.trainer.step_key)
        progress.show_row(row, run.total)
        if time.monotonic() - self._drawn > max(1.0, self._took / _SHARE):
            self._draw()

    def on_end(self, run: RunControl) -> None:
        self._draw()

    def _add(self, row: Mapping[str, Any], step_key: str) -> None:
        if (step := row.get(step_key)) is None:
            return
        for name, value in row.items():
            if isinstance(value, int | float) and math.isfinite(value):
                self._points.setdefault(name, {})[step] = value

    def _draw(self) -> None:
        began = time.monotonic()
        if not progress.in_cell() or not self._points:
            return
        file = io.BytesIO()
        figure = self.figure()
        figure.savefig(file, format="png", dpi=144)
        progress.show_figure(file.getvalue(), width=round(figure.get_figwidth() * 72))
        first = self._drawn < 0
        self._drawn = time.monotonic()
        self._took = 0.0 if first else self._drawn - began  # the first also loads matplotlib and its fonts

    def figure(self) -> Figure:
        """Returns a matplotlib figure of the curves, for example to save it."""
        from matplotlib.figure import Figure

        found = {name.removeprefix("sft/").removeprefix("train/").removeprefix("eval/") for name in self._points}
        names = [name for name in _DEFAULT if name in found][:4] if self._names is None else self._names
        figure = Figure(figsize=(min(3.4 * max(len(names), 1), 13.6), 2.6), layout="constrained")
        for axes, name in zip(figure.subplots(1, max(len(names), 1), squeeze=False)[0], names, strict=False):
            for prefix, label, style in _STYLES:
                if not (points := self._points.get(prefix + name)):
                    continue
                steps = np.array([*points])
                values = np.array([*points.values()])
                width = max(1, len(values) // _SMOOTH)
                if width > 1 and "marker" not in style:
                    axes.plot(steps, values, color=style["color"], linewidth=0.8, alpha=0.3)
                    sums = np.cumsum(np.concatenate([[0.0], values]))
                    last = np.arange(1, len(values) + 1)
                    first = np.maximum(last - width, 0)
                    values = (sums[last] - sums[first]) / (last - first)
                axes.plot(steps, values, label=label, **style)
            axes.set_title(name, fontsize=10, loc="left")
            axes.set_xlabel("step", fontsize=8)
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.tick_params(labelsize=8)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
            if len(axes.get_legend_handles_labels()[1]) > 1:
                axes.legend(fontsize=8, frameon=False)
        return figure


_STYLES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("train/", "training", {"color": "#2a78d6", "linewidth": 1.4}),
    ("sft/", "SFT", {"color": "#6b7280", "linewidth": 1.4}),
    ("eval/", "evaluation", {"color": "#e0631b", "linewidth": 1.4, "marker": "o", "markersize": 4}),
    ("sft/eval/", "evaluation of SFT", {"color": "#b08968", "linewidth": 1.4, "marker": "o", "markersize": 4}),
)
"""The prefix, label and style of each curve of a panel."""
