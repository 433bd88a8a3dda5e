"""Writes the card of an exported model from its run: training, data, settings, pass@k with intervals, a curve."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

import tunix_like
from tunix_like.algorithms.objective import resolve
from tunix_like.config.load import as_dict
from tunix_like.config.schema import AlgorithmConfig, Config
from tunix_like.config.shown import HIDDEN, given, shown
from tunix_like.report.contents import curves
from tunix_like.report.figures import draw
from tunix_like.report.reading import read_runs
from tunix_like.runs.checks import defaults_read
from tunix_like.runtime import console
from tunix_like.runtime.visible import visible
from tunix_like.storage import metrics
from tunix_like.training.learners import LEARNERS, CustomLearner

CARD = "README.md"
CURVE = "curve.png"

_LEFT_OUT = ("training.output_dir", "training.loggers", "mesh.", "eval.")
"""Beginnings of keys that say nothing about the model."""

_NOT_OF_SFT = ("algorithm.", "teacher.", "critic.", "preference.", "rewards.", "environment.", "optimizer.")
"""Beginnings of keys that supervised fine-tuning does not read."""


def card_files(checkpoint: Path, config: Config, adapter: bool, license: str | None) -> dict[str, bytes]:
    """Returns the files of a card by name: the text, and the curve of the held-out pass rate or of the reward.

    Args:
      checkpoint: the folder of the exported checkpoint, in the folder of its run.
      adapter: whether only the adapters are exported.
      license: its id on the hub; None: to be chosen.
    """
    run = checkpoint.parent.parent
    step = int(checkpoint.name)
    supervised = checkpoint.parent.name == "sft_checkpoints"
    found = read_runs([run]) if metrics.rows(run) and not supervised else []
    drawn = [curve for curve in curves(found) if curve.key in ("eval/pass@1", "train/rewards/mean")][-1:]
    files = {}
    if drawn:
        buffer = io.BytesIO()
        draw(found, drawn[0]).savefig(buffer, format="png")
        files[CURVE] = buffer.getvalue()
    head: dict[str, Any] = {"library_name": "peft" if adapter else "transformers", "tags": ["tunix_like"]}
    values = given(as_dict(config))
    data, base, dataset = (shown(key, values[key]) for key in ("data.name", "model.path", "data.path"))
    tags, training = _training(config, step, supervised)
    head["tags"] += tags
    base = None if base == HIDDEN else base
    head |= {} if base is None else {"base_model": base}
    head |= {"datasets": [dataset]} if data == "hub" and dataset != HIDDEN else {}
    head |= {"license": "other", "license_name": "to-be-chosen"} if license is None else {"license": license}
    title = run.resolve().name
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n# {_plain(title)}",
        f"Trained with tunix_like {tunix_like.__version__}: "
        f"{_plain(training)}, on the data {_plain(data)}"
        + (f", from {_plain(base)}" if base else "")
        + (". The licence is that of the base model and of the data: choose it." if license is None else "."),
        *([] if supervised else _results(run, step)),
        *([f"![{drawn[0].title}]({CURVE})"] if drawn else []),
        "## Settings that differ from the defaults\n\n| key | value |\n|---|---|\n" + _settings(config, supervised),
    ]
    return files | {CARD: ("\n\n".join(parts) + "\n").encode()}


def _training(config: Config, step: int, supervised: bool) -> tuple[list[str], str]:
    """Returns the tags of the training that made a checkpoint, and a text that describes it."""
    if supervised:
        return ["sft"], f"supervised fine-tuning, {step} steps of {config.sft.batch_size} examples"
    estimator = str(shown("algorithm.advantage_estimator", config.algorithm.advantage_estimator))
    steps = f"{estimator}, {step} steps of {config.data.batch_size}"
    if config.trains_pairs:
        return [estimator], f"{steps} pairs of completions"
    generations = config.algorithm.num_generations
    return ["reinforcement-learning", estimator], f"{steps} prompts with {generations} completions each"


def _results(run: Path, step: int) -> list[str]:
    """Returns the table of the first evaluation and of the last one up to the exported step."""
    rows = {row["step"]: row for row in metrics.rows(run) if row.get("step", step + 1) <= step and _is_evaluated(row)}
    if not rows:
        return []
    ends = sorted({min(rows), max(rows)})
    cells = [console.evaluation_cells(rows[end]) for end in ends]
    names = [name for name in cells[-1] if "@" in name]
    lines = ["| " + " | ".join(["held out", *(f"step {end}" for end in ends)]) + " |", "|---" * (len(ends) + 1) + "|"]
    lines += ["| " + " | ".join([_plain(name), *(each.get(name, "") for each in cells)]) + " |" for name in names]
    return ["## Evaluation\n\nWith 95 % intervals over problems.\n\n" + "\n".join(lines)]


def _is_evaluated(row: Mapping[str, Any]) -> bool:
    return any(name.startswith("eval/pass@") for name in row)


def _settings(config: Config, supervised: bool) -> str:
    learner = LEARNERS.get(str(config.algorithm.advantage_estimator), CustomLearner)
    algorithm = resolve(AlgorithmConfig(), learner.config_class)  # a run fills in the defaults of its estimator
    algorithm = dataclasses.replace(algorithm, **defaults_read(algorithm))
    defaults = given(as_dict(dataclasses.replace(Config(), algorithm=algorithm)))
    defaults["algorithm.advantage_estimator"] = None  # always listed
    values = given(as_dict(config))
    left_out = _LEFT_OUT + (_NOT_OF_SFT if supervised else ())
    changed = [key for key, value in values.items() if value != defaults[key] and not key.startswith(left_out)]
    return "\n".join(f"| `{key}` | {_plain(shown(key, values[key]))} |" for key in changed)


def _plain(value: Any) -> str:
    """Returns a text without markup: references in place of all characters that Markdown or HTML could interpret."""
    return re.sub(r"[^\w .,:@+()-]", lambda match: f"&#{ord(match[0])};", visible(str(value)))
