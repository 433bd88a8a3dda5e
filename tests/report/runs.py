"""Runs on disk, written by the library's own writers, with texts that contain markup and control characters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import yaml

from tunix_like.algorithms.pass_rates import bins_of, count_groups, sum_advantages
from tunix_like.data import maze
from tunix_like.data.source import SOURCE_COLUMN
from tunix_like.rollout.files import write_rollouts
from tunix_like.storage.metrics import MetricsLog
from tunix_like.types import Problem

HOSTILE = "</script><img src=x onerror=\"window.broken='img'\"><script>window.broken='script'</script><!-- &amp;"
HOSTILE, SHOWN = f"{HOSTILE} \u2028 \x1b[2J\u202e\u2069", f"{HOSTILE} \\u2028 \\x1b[2J\\u202e\\u2069"
"""A text with markup and control characters, and the same text as the page shows it."""
GRID = "#####\n#S..#\n###.#\n#..G#\n#####"
PATHS = ["RIGHT RIGHT DOWN DOWN DONE", "RIGHT RIGHT DOWN UP DONE", "DOWN DONE", HOSTILE]


def problems(step: int) -> list[Problem]:
    """Returns three prompts: one with markup, a plain one that contains its step, and a maze."""
    prompts = [HOSTILE, f"What is {step} + {step}?", maze.record(GRID)["prompt"]]
    return [Problem(3 * step + i, text, [1], {SOURCE_COLUMN: "<b>mix</b>"}) for i, text in enumerate(prompts)]


def texts(step: int) -> list[str]:
    plain = [f"It is {2 * step}", "NO IDEA", "no idea", "it is " + "very " * 5 + "long"]
    return [*(f"{HOSTILE} {i}" for i in range(4)), *plain, *PATHS]


REWARDS = np.array([[1.0, 0.0, np.nan, 0.5], [1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
ADVANTAGES = np.array([[0.5, -0.5, 0.0, 0.25], [3.0, -1.0, -1.5, -1.0], [3.0, -1.0, -1.0, -1.0]])
LENGTHS = np.array([[9, 8, 7, 6], [5, 4, 4, 12], [6, 6, 3, 9]])


TURNS = [
    [
        {"role": "assistant", "content": f"I look it up. {HOSTILE}"},
        {"role": "tool", "content": HOSTILE, "name": HOSTILE},
        {"role": "user", "content": '<tool_call>{"name": "fake"}</tool_call>'},
        {"role": "assistant", "content": 'so <tool_call>{"name": "find", "arguments": {"q": "needle"}}</tool_call>'},
        {"role": "tool", "content": "hay", "name": "find"},
        {"role": "assistant", "content": f"<tool_call>{HOSTILE}<tool_call>[1]</tool_call> after"},
        {"role": "<b>odd</b>", "content": ""},
        {"role": "assistant", "content": '{"name": "llama", "parameters": {}}'},
    ],
    [{"role": "assistant", "content": "one turn"}],
]
"""Two trajectories: one of several turns with valid and invalid tool calls, and one of a single turn."""


def write_trajectories(folder: Path) -> Path:
    """Writes a run of one step with an environment."""
    columns = {"reward": [1.0, 0.0], "advantage": [1.0, -1.0], "length": [40, 3], "finished": [True, True]}
    columns |= {"sampled": [25, 3], "turns": TURNS}
    MetricsLog(folder).write({"step": 1, "train/rewards/mean": 0.5, "train/turns/mean": 2.5})
    whole = ["".join(turn["content"] for turn in turns) for turns in TURNS]
    write_rollouts(folder / "rollouts", 1, [Problem(0, "Find it.", [1], {})], whole, columns)
    return folder


def write_run(folder: Path, steps: int = 6, **config: object) -> Path:
    """Writes a run of SFT and RL with an evaluation before and after it, and completions at every second step."""
    log = MetricsLog(folder)
    for step in range(1, 4):
        log.write({"sft/step": step, "sft/loss": 3.0 / step, "sft/step_time_sec": 0.5})
    log.write({"step": 0, "eval/pass@1": 0.25, "eval/pass@4": 0.5})
    scored = ~np.isnan(REWARDS)
    bins = bins_of(np.nan_to_num(REWARDS) >= 1, scored)
    groups = {"train/pass_rate/drawn": count_groups(bins), "train/pass_rate/trained": count_groups(bins)}
    groups["train/pass_rate/advantage"] = sum_advantages(bins, ADVANTAGES)
    for step in range(1, steps + 1):
        row = {"step": step, "train/rewards/mean": step / steps, "train/grad_norm": float("nan") if step == 2 else 0.1}
        row |= {"train/time/rollout": 1.0, "train/time/update": 3.0, "train/step_time_sec": 4.0, "train/<i>odd</i>": 1}
        log.write(row | groups)
        if step % 2 == 0:
            columns = {"reward": REWARDS, "estimator_reward": REWARDS, "advantage": ADVANTAGES, "length": LENGTHS}
            columns |= {"finished": LENGTHS < 12, "reward/a": REWARDS, "reward/<u>b</u>": 0 * REWARDS}
            write_rollouts(folder / "rollouts", step, problems(step), texts(step), columns)
    evaluated = {name: columns[name] for name in ("reward", "length", "finished")}
    write_rollouts(folder / "rollouts" / "eval", steps, problems(100), texts(100), evaluated)
    log.write({"step": steps, "eval/pass@1": 0.5, "eval/pass@4": 0.75})
    tree = {"algorithm": {"advantage_estimator": "maxrl"}, "data": {"system_prompt": HOSTILE}, "optimizer": config}
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return folder
