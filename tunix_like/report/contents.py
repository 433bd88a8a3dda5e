"""Computes the contents of a report: curves, summary, facts and config differences of its runs.

This module defines the titles and the order of the curves, for the page and for the figures.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tunix_like.config.shown import shown
from tunix_like.report.reading import Run, Table

ENDS = 10
"""Number of steps in each window over which the summary averages a training metric. Single steps of RL are noisy."""


TIME_PARTS = {
    "rollout": "#0072b2",
    "environment": "#5ab4e5",
    "reward": "#009e73",
    "data": "#b9d14a",
    "reshard": "#6b4fa3",
    "reference": "#b4558f",
    "update": "#d98200",
    "trainer_idle": "#f0c9b0",
    "other": "#97a1ad",
}
"""The parts of a step (metrics `train/time/<part>`) in the order in which they are stacked, with their colours. The
page has the same colours in light mode."""


class Curve(NamedTuple):
    """One chart: a metric over the steps of the phase `rl` or `sft`. The unit `%` shows fractions as percentages; `log`
    is the initial axis."""

    key: str
    title: str
    unit: str = ""
    log: bool = False
    phase: str = "rl"


_BEFORE = (Curve("train/rewards/mean", "Reward"), Curve("train/pass@1", "pass@1 in training", "%"))
_AFTER = (
    Curve("train/completions/mean_length", "Completion length", "tokens"),
    Curve("train/turns/mean", "Turns of a trajectory"),
    Curve("train/completions/clipped_ratio", "Truncated at the token limit", "%"),
    Curve("train/entropy", "Entropy", "nats per token"),
    Curve("train/kl", "KL to the reference", "nats per token"),
    Curve("train/grad_norm", "Gradient norm", "", True),
    Curve("train/loss", "Loss"),
    Curve("train/groups/mixed_frac", "Prompts whose rewards differ", "%"),
    Curve("train/advantage/abs_mean", "Mean |advantage|"),
    Curve("train/logprob_gap/mean", "Sampler/trainer log-probability gap", "nats", True),
    Curve("train/reward/unscored_frac", "Unscored completions", "%"),
    Curve("train/perf/generation_tokens_per_sec", "Sampling", "tokens/s"),
    Curve("train/step_time_sec", "Time of a step", "s", True),
    Curve("train/learning_rate", "Learning rate"),
    Curve("sft/loss", "SFT loss", "nats per token", phase="sft"),
    Curve("sft/entropy", "SFT entropy", "nats per token", phase="sft"),
    Curve("sft/eval/pass@1", "pass@1 during SFT, held out", "%", phase="sft"),
)


def curves(runs: Sequence[Run]) -> list[Curve]:
    """Returns the charts of the main metrics, in the order of the page. A metric that no run recorded has no chart."""
    recorded = {(phase, name) for run in runs for phase in ("rl", "sft") for name in getattr(run, phase).columns}
    return [curve for curve in (*_BEFORE, *_held_out(runs), *_AFTER) if (curve.phase, curve.key) in recorded]


def _held_out(runs: Sequence[Run]) -> Iterator[Curve]:
    names = {name for run in runs for name in run.rl.columns}
    matches = [match for name in names if (match := re.fullmatch(r"eval/pass@(\d+)(?:/(.+))?", name))]
    for match in sorted(matches, key=lambda match: (match[2] or "", int(match[1]))):
        yield Curve(match[0], f"pass@{match[1]}, held out" + (f", {match[2]}" if match[2] else ""), "%")
    for name in sorted(name for name in names if name.startswith("train/pass@1/")):
        yield Curve(name, f"pass@1 in training, {name.removeprefix('train/pass@1/')}", "%")


def others(runs: Sequence[Run]) -> list[Curve]:
    """Returns the charts of all recorded metrics that have no chart in `curves`."""
    shown = {curve.key for curve in curves(runs)} | {"seconds"}
    names = {("rl", name) for run in runs for name in run.rl.columns}
    names |= {("sft", name) for run in runs for name in run.sft.columns}
    return [Curve(name, name, phase=phase) for phase, name in sorted(names) if name not in shown]


def missing(runs: Sequence[Run]) -> list[str]:
    """Returns why KL, held-out pass@k or pass rates of prompts are missing from the report."""
    keys = {curve.key for curve in curves(runs)}
    out = []
    if "train/kl" not in keys:
        out.append("KL: these runs have no KL term (algorithm.beta is 0).")
    if not any(key.startswith("eval/pass@") for key in keys):
        out.append("Held-out pass@k: these runs were not evaluated.")
    if not any(run.rl.histograms for run in runs):
        out.append("Pass rates of prompts: these runs did not record train/pass_rate.")
    return out


def summary(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Returns one row `{title, unit, cells}` per metric, with a cell `{first, last, best, step}` per run (None: not
    recorded): the first, the last and the best evaluation, or means over the first, the last and the best window of
    `ENDS` training steps. `best` and `step` exist only if a higher value is better."""
    wanted = [curve for curve in curves(runs) if curve.phase == "rl" and _summarised(curve.key)]
    return [
        {"title": curve.title, "unit": curve.unit, "cells": [_ends(run.rl, curve.key) for run in runs]}
        for curve in wanted
    ]


def _summarised(key: str) -> bool:
    lengths = ("train/completions/mean_length", "train/completions/clipped_ratio", "train/entropy", "train/kl")
    return _higher_is_better(key) or key in lengths


def _higher_is_better(key: str) -> bool:
    return "pass@" in key or key == "train/rewards/mean"


def _ends(table: Table, key: str) -> dict[str, float] | None:
    values = table.columns.get(key, [])
    known = [(step, value) for step, value in zip(table.steps, values, strict=False) if value is not None]
    if not known:
        return None
    size = 1 if key.startswith("eval/") else min(ENDS, len(known))
    windows = [known[i : i + size] for i in range(len(known) - size + 1)]
    means = [sum(value for _, value in window) / size for window in windows]
    best = max(range(len(means)), key=means.__getitem__)
    if len(means) == 1:
        return {"last": means[0]}
    out = {"first": means[0], "last": means[-1]}
    return out | ({"best": means[best], "step": windows[best][-1][0]} if _higher_is_better(key) else {})


_FACTS = {
    "algorithm.advantage_estimator": "estimator",
    "data.name": "data",
    "model.path": "model",
    "algorithm.num_generations": "completions per prompt",
    "data.batch_size": "prompts per step",
    "optimizer.learning_rate": "learning rate",
    "algorithm.beta": "KL beta",
    "lora.rank": "LoRA rank",
    "training.seed": "seed",
}


def facts(run: Run) -> list[tuple[str, str]]:
    """Returns titles and values that summarise a run: steps, time and the most important config keys."""
    out = []
    for table, name in ((run.sft, "SFT"), (run.rl, "RL")):
        if table.steps:
            seconds = table.columns["seconds"][-1] or 0.0
            out.append((f"{name} steps", f"{table.steps[-1]} ({_duration(seconds)} in steps)"))
    return out + [(title, text_of(run, key)) for key, title in _FACTS.items() if run.config.get(key) is not None]


def differing(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Returns a row `{key, values}` for each config key whose value differs between runs, except
    `training.output_dir`."""
    keys = sorted({key for run in runs for key in run.config} - {"training.output_dir"})
    values = {key: [run.config.get(key) for run in runs] for key in keys}
    differ = [key for key in keys if any(value != values[key][0] for value in values[key])]
    return [{"key": key, "values": [text_of(run, key) for run in runs]} for key in differ]


def text_of(run: Run, key: str) -> str:
    """Formats what may be shown of a config value."""
    value = shown(key, run.config.get(key))
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"
