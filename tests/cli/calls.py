"""Runs the command line in processes, for the tests of whole runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

YAML = str(Path(__file__).resolve().parents[2] / "examples" / "debug" / "reverse_text.yaml")
SCRIPT = str(Path(sys.executable).with_name("tunix-like"))
SMALL = (
    "model.config.hidden_size=16",
    "model.config.intermediate_size=16",
    "model.config.num_hidden_layers=1",
    "data.batch_size=8",
    "data.train_size=50",
    "data.eval_size=8",
    "algorithm.num_generations=4",
    "sft.max_steps=4",
    "sft.batch_size=8",
    "eval.batch_size=8",
    "training.max_steps=3",
    "training.log_rollouts_every_n_steps=2",
)


def call(*argv, cwd, code=0, **environment):
    """Runs a program to its end, checks that its exit status is `code`, and returns its output."""
    done = subprocess.run(
        argv, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == code, f"{argv}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done
