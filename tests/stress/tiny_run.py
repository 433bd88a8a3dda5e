"""The run that the stress scripts start: `tunix-like train` in a process, with a model of a few thousand weights.

It trains with supervised warm-up, dynamic sampling, a KL to a reference, evaluations, checkpoints, and a reward
function from a file, which therefore runs in workers.
"""

from __future__ import annotations

import sys
from pathlib import Path

YAML = Path(__file__).resolve().parents[2] / "examples" / "debug" / "reverse_text.yaml"
RUN = [
    "model.config.hidden_size=64", "model.config.intermediate_size=64", "model.config.num_hidden_layers=1",
    "data.batch_size=8", "data.train_size=200", "data.eval_size=8", "algorithm.num_generations=4",
    "algorithm.advantage_estimator=grpo", "algorithm.beta=0.05", "algorithm.dynamic_sampling=true",
    "sft.max_steps=20", "sft.batch_size=8", "eval.batch_size=8", "eval.samples=2",
    "training.output_dir=run", "rewards.functions=[{name: reward.py:graded}]",
]  # fmt: skip

REWARD = """
def graded(prompts, completions, answer, **columns):
    return [sum(a == b for a, b in zip(text, gold)) + 0.1 * len(text) for text, gold in zip(completions, answer)]
"""


def prepare(folder: Path) -> None:
    """Makes the working directory of a run."""
    folder.mkdir(parents=True)
    (folder / "reward.py").write_text(REWARD)


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "tunix_like", *words]


def train_command(*overrides: str) -> list[str]:
    return command("train", str(YAML), *RUN, *overrides)
