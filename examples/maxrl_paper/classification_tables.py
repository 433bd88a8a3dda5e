"""The tables and the figure of `classification.py`, from the file that it writes: what docs/studies.md shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

EXACT = "cross-entropy"
SHADES = ("#9ecae1", "#4292c6", "#08306b")
"""One colour, the larger N the darker."""
MEASURED = {"test accuracy": "{:.3f}", "test pass rate": "{:.3f}", "test NLL": "{:.2f}", "train NLL": "{:.2f}"}
"""Accuracy is that of the most likely class, pass rate the mean probability of the right one, NLL in nats."""


def results_table(results: dict[str, Any]) -> str:
    """Markdown: each method at the end of training, the mean over seeds and the lowest and highest in brackets."""
    lines = [f"| method | N | learning rate | {' | '.join(MEASURED)} |", "|---|---:|---:|" + "---:|" * len(MEASURED)]
    for name, size in dict.fromkeys((run["method"], run["N"]) for run in results["runs"]):
        same = [run for run in results["runs"] if (run["method"], run["N"]) == (name, size)]
        cells = [name, "" if size is None else str(size), f"{same[0]['learning_rate']:g}"]
        for key, text in MEASURED.items():
            last = [run["curves"][key][-1] for run in same]
            shown = [text.format(value) for value in (np.mean(last), min(last), max(last))]
            cells.append(f"{shown[0]} ({shown[1]} to {shown[2]})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def tuning_table(results: dict[str, Any]) -> str:
    """Markdown: validation accuracy of each method and learning rate on the tuning task, the chosen one bold."""
    rates = results["setting"]["learning_rates"]
    lines = [f"| method | N | {' | '.join(f'{rate:g}' for rate in rates)} |", "|---|---:|" + "---:|" * len(rates)]
    for name, size in dict.fromkeys((row["method"], row["N"]) for row in results["tuning"]):
        same = [row["validation accuracy"] for row in results["tuning"] if (row["method"], row["N"]) == (name, size)]
        cells = [f"**{each:.3f}**" if each == max(same) else f"{each:.3f}" for each in same]
        lines.append(f"| {name} | {'' if size is None else size} | {' | '.join(cells)} |")
    return "\n".join(lines)


def gradients_table(results: dict[str, Any]) -> str:
    """Markdown: cosine with the log-likelihood's gradient, expected and (in brackets) sampled."""
    rows = results["gradients"]
    names = list(dict.fromkeys(row["method"] for row in rows))
    lines = [f"| step | mean pass rate | N | {' | '.join(names)} |", "|---:|---:|---:|" + "---:|" * len(names)]
    for step, size in dict.fromkeys((row["step"], row["N"]) for row in rows):
        same = {row["method"]: row for row in rows if (row["step"], row["N"]) == (step, size)}
        cells = [f"{same[name]['expected']:.3f} ({same[name]['sampled']:.3f})" for name in names]
        rate = same[names[0]]["mean pass rate"]
        lines.append(f"| {step} | {rate:.2g} | {size} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(results: dict[str, Any], path: Path) -> None:
    """A column for each estimator, cross-entropy in all; lines are means over seeds, bands the lowest and highest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.2), dpi=130, layout="constrained", facecolor="white")
    names = list(dict.fromkeys(run["method"] for run in results["runs"] if run["method"] != EXACT))[::-1]
    grid = figure.subplots(2, len(names), sharex=True, sharey="row")
    sizes = results["setting"]["sizes"]
    for column, name in enumerate(names):
        for axes, key in zip(grid[:, column], ("test accuracy", "train NLL"), strict=True):
            for place, size in enumerate(sizes):
                _line(axes, results, (name, size), key, SHADES[place % len(SHADES)], "-")
            _line(axes, results, (EXACT, None), key, "#000000", (0, (4, 2)))
            if key == "train NLL":
                guess = float(np.log(results["setting"]["classes"]))
                axes.axhline(guess, color="#909090", linewidth=1, zorder=0)
                if column == 0:
                    end = results["setting"]["steps"]
                    axes.text(end, guess - 0.15, "all classes alike", ha="right", va="top", color="#606060", fontsize=9)
                axes.set_xlabel("step")
            axes.grid(color="#e4e4e4", linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_xlim(0, results["setting"]["steps"])
        grid[0, column].set_title(name)
    grid[0, 0].set_ylabel("test accuracy")
    grid[0, 0].set_ylim(0, 1)
    grid[1, 0].set_ylabel("training NLL, nats")
    lines = grid[0, 0].get_lines()
    labels = [*(f"N = {size}" for size in sizes), EXACT]
    figure.legend(lines, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    figure.savefig(path)


def _line(axes: Any, results: dict[str, Any], which: tuple, key: str, color: str, style: Any) -> None:
    same = [run["curves"] for run in results["runs"] if (run["method"], run["N"]) == which]
    values = np.array([curves[key] for curves in same])
    axes.plot(same[0]["step"], values.mean(axis=0), color=color, linestyle=style, linewidth=1.8)
    axes.fill_between(same[0]["step"], values.min(axis=0), values.max(axis=0), color=color, alpha=0.2, linewidth=0)
