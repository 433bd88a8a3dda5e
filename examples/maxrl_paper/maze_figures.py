"""Sums up the runs of `maze.py`: `results/maze.json` beside this file, pictures, and the tables of docs/studies.md.

python examples/maxrl_paper/maze_figures.py --out runs/maxrl_paper
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "maze.json"
FIGURES = HERE.parents[1] / "docs" / "figures"
BEFORE = "start"
ORDER = (BEFORE, "grpo", "rloo", "maxrl", "pkpo", "maxpo")
LABELS = {
    BEFORE: "before RL",
    "grpo": "GRPO",
    "rloo": "RLOO",
    "maxrl": "MaxRL",
    "maxpo": "MaxPO(4)",
    "pkpo": "PKPO(4)",
}
STYLES: dict[str, dict[str, Any]] = {
    BEFORE: {"color": "#7f7f7f", "linestyle": "--"},
    "grpo": {"color": "#d55e00", "marker": "s"},
    "rloo": {"color": "#e69f00", "marker": "v"},
    "maxrl": {"color": "#0072b2", "marker": "o"},
    "pkpo": {"color": "#cc79a7", "marker": "^"},
    "maxpo": {"color": "#009e73", "marker": "D"},
}
TABLE_KS = (1, 4, 16, 64, 128)
EDGES = (0.25, 0.5, 0.75)
BINS = ("0", "0 to 1/4", "1/4 to 1/2", "1/2 to 3/4", "3/4 to 1", "1")
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Two-sided 95 % quantiles of Student's t for the mean of so many runs."""


def collected(out: Path) -> dict[str, Any]:
    """All that was measured under `out`: of each run pass@k with its interval over problems, and how many problems
    have which pass rate (`BINS`)."""
    runs = {}
    for file in sorted((out / "eval").glob("*.summary.json")):
        name = file.name.removesuffix(".summary.json")
        summary = json.loads(file.read_text())
        parts = re.fullmatch(r"(\w+?)(?:-g(\d+))?-s(\d+)", name)
        if parts is None:
            raise SystemExit(f"{file}: expected ESTIMATOR-gGROUP-sSEED or start-sSEED; move other files away")
        metrics = summary["metrics"]
        ks = sorted(int(key.removeprefix("eval/pass@")) for key in metrics if re.fullmatch(r"eval/pass@\d+", key))
        rows = [json.loads(line) for line in (out / "eval" / f"{name}.jsonl").read_text().splitlines()]
        rates = np.array([np.mean(row["succeeded"]) for row in rows])
        inner = np.digitize(rates, EDGES, right=True) + 1
        bins = np.where(rates == 0, 0, np.where(rates == 1, len(BINS) - 1, inner))
        runs[name] = {
            "estimator": parts[1],
            "group": int(parts[2]) if parts[2] else None,
            "seed": int(parts[3]),
            "problems": summary["problems"],
            "samples": summary["samples"],
            "pass": {str(k): [round(metrics[f"eval/pass@{k}{end}"], 5) for end in ("", "/low", "/high")] for k in ks},
            "rates": np.bincount(bins, minlength=len(BINS)).tolist(),
        }
    return runs


def at(runs: dict[str, Any], estimator: str, k: int, group: int | None = 16) -> dict[int, float]:
    """pass@k in per cent of an estimator's runs, by seed."""
    group = None if estimator == BEFORE else group
    chosen = (run for run in runs.values() if run["estimator"] == estimator and run["group"] == group)
    return {run["seed"]: 100 * run["pass"][str(k)][0] for run in chosen}


def mean_and_half(values: Sequence[float]) -> tuple[float, float]:
    """Mean of a few runs, and half the width of its 95 % interval by Student's t."""
    n = len(values)
    return float(np.mean(values)), STUDENT[n] * float(np.std(values, ddof=1)) / math.sqrt(n)


def shown(values: Sequence[float], sign: bool = False) -> str:
    mean, half = mean_and_half(values)
    return f"{mean:+.1f} ± {half:.1f}" if sign else f"{mean:.1f} ± {half:.1f}"


def tables(runs: dict[str, Any]) -> dict[str, str]:
    """The tables `passk`, `paired` (differences to MaxRL of the same start), `rates` and `scaling`."""
    head = ["", *(f"pass@{k}" for k in TABLE_KS)]
    passk = [[LABELS[name], *(shown(list(at(runs, name, k).values())) for k in TABLE_KS)] for name in ORDER]
    paired = []
    for name in ORDER:
        if name != "maxrl":
            pairs = [(at(runs, "maxrl", k), at(runs, name, k)) for k in TABLE_KS]
            paired.append(
                [f"MaxRL - {LABELS[name]}", *(shown([a[s] - b[s] for s in sorted(a)], True) for a, b in pairs)]
            )
    rates = []
    for name in ORDER:
        counts = [run["rates"] for run in runs.values() if run["estimator"] == name and run["group"] in (None, 16)]
        share = 100 * np.sum(counts, axis=0) / np.sum(counts)
        rates.append([LABELS[name], *(f"{value:.1f}" for value in share)])
    found = {
        "passk": _table(head, passk),
        "paired": _table(head, paired),
        "rates": _table(["pass rate", *BINS], rates),
    }
    if groups := scaled_groups(runs):
        rows = []
        for name in ("rloo", "grpo", "maxrl"):
            for group in groups:
                run = runs[f"{name}-g{group}-s0"]
                cells = ("{:.1f} [{:.1f}, {:.1f}]".format(*(100 * v for v in run["pass"][str(k)])) for k in TABLE_KS)
                rows.append([f"{LABELS[name]}, G={group}", *cells])
        found["scaling"] = _table(head, rows)
    return found


def scaled_groups(runs: dict[str, Any]) -> list[int]:
    """Group sizes of which all the scaled estimators were run."""
    groups = sorted({run["group"] for run in runs.values() if run["group"]})
    whole = [g for g in groups if all(f"{name}-g{g}-s0" in runs for name in ("rloo", "grpo", "maxrl"))]
    return whole if len(whole) > 1 else []


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def draw(runs: dict[str, Any], folder: Path) -> list[Path]:
    """The pictures: pass@k, pass rates of the held-out mazes, and pass@k by group size where that was run."""
    files = [folder / "maxrl_maze_passk.png", folder / "maxrl_maze_rates.png"]
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    _draw_passk(figure.subplots(), runs)
    figure.savefig(files[0], dpi=130)
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    _draw_rates(figure.subplots(), runs)
    figure.savefig(files[1], dpi=130)
    if groups := scaled_groups(runs):
        files.append(folder / "maxrl_maze_scaling.png")
        figure = Figure(figsize=(10, 3.6), layout="constrained")
        for axes, k in zip(figure.subplots(1, 3), (1, 16, 128), strict=True):
            _draw_scaling(axes, runs, groups, k)
        figure.savefig(files[-1], dpi=130)
    return files


def _draw_passk(axes: Axes, runs: dict[str, Any]) -> None:
    ks = [int(k) for k in runs["start-s0"]["pass"]]
    for name in ORDER:
        values = np.array([list(at(runs, name, k).values()) for k in ks])
        axes.plot(ks, values.mean(axis=1), label=LABELS[name], linewidth=2, markersize=5, **STYLES[name])
        axes.fill_between(
            ks, values.min(axis=1), values.max(axis=1), color=STYLES[name]["color"], alpha=0.13, linewidth=0
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.set(xlabel="k", ylabel="pass@k, %", title="Held-out 9x9 mazes; bands: lowest to highest of the seeds")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)


def _draw_rates(axes: Axes, runs: dict[str, Any]) -> None:
    width = 0.8 / len(ORDER)
    for i, name in enumerate(ORDER):
        counts = [run["rates"] for run in runs.values() if run["estimator"] == name and run["group"] in (None, 16)]
        share = 100 * np.sum(counts, axis=0) / np.sum(counts)
        places = np.arange(len(BINS)) + (i - (len(ORDER) - 1) / 2) * width
        axes.bar(places, share, width, label=LABELS[name], color=STYLES[name]["color"])
    axes.set_xticks(range(len(BINS)), BINS)
    axes.set(xlabel="pass rate of a maze, of 128 samples", ylabel="held-out mazes, %")
    axes.set_title("Never solved, sometimes solved, always solved")
    axes.grid(alpha=0.25, axis="y")
    axes.legend(frameon=False, ncols=2)


def _draw_scaling(axes: Axes, runs: dict[str, Any], groups: list[int], k: int) -> None:
    axes.axhline(100 * runs["start-s0"]["pass"][str(k)][0], color="#7f7f7f", linestyle="--", label=LABELS[BEFORE])
    for i, name in enumerate(("rloo", "grpo", "maxrl")):
        points = 100 * np.array([runs[f"{name}-g{group}-s0"]["pass"][str(k)] for group in groups])
        error = [points[:, 0] - points[:, 1], points[:, 2] - points[:, 0]]
        places = [group * 1.06 ** (i - 1) for group in groups]
        axes.errorbar(places, points[:, 0], error, label=LABELS[name], linewidth=2, capsize=3, **STYLES[name])
    axes.set_xscale("log", base=2)
    axes.set_xticks(groups, [str(group) for group in groups])
    axes.minorticks_off()
    axes.set(xlabel="completions per prompt, G", ylabel="%", title=f"pass@{k}")
    axes.grid(alpha=0.25)
    if k == 1:
        axes.legend(frameon=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder given to maze.py")
    runs = collected(parser.parse_args().out)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(runs, indent=1) + "\n")
    for name, table in tables(runs).items():
        print(f"\n{name}\n\n{table}")
    print("\nwrote", ", ".join(str(file) for file in [RESULTS, *draw(runs, FIGURES)]))


if __name__ == "__main__":
    main()
