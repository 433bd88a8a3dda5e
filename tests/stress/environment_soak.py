"""Trains 300 steps with an environment that randomly hangs, exits, raises, forks, allocates memory and returns invalid
values.

    python tests/stress/environment_soak.py [--steps 300]

Not a part of the test suite: it takes some minutes, and needs Linux (`/proc`). The run must continue, all affected
trajectories must be unscored, and the numbers of processes and file descriptors and the memory must return to their
initial values. Exit status 0: they do.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

import tunix_like
from tests.callbacks import OnRow
from tunix_like import EnvironmentConfig, EnvironmentPool, MaxRLConfig, MaxRLLearner, RLTrainingConfig, RolloutConfig
from tunix_like.data import reverse_text

MARK = "ENVIRONMENT_SOAK"
SETTLED = 100
"""Steps before the first measurement, in which programs are compiled."""

MISBEHAVING = '''
import os, subprocess, sys, time

def forks():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    if os.fork() == 0:
        time.sleep(1000)
    raise RuntimeError("forked")

ACTIONS = {
    "a": lambda: time.sleep(1000),
    "b": lambda: os._exit(3),
    "c": lambda: [][1],
    "d": lambda: ("x" * 10_000_000, 0.0, False),
    "e": lambda: (b"bytes", 0.0, True),
    "f": forks,
    "g": lambda: len(bytearray(10**10)) and bytes(10**10) * 2,
}
FAIL = "abcefg"

class Soak:
    """What the policy writes decides what happens, in one of eight turns."""

    def reset(self, answer, **columns):
        self.turns = 0

    def step(self, completion):
        self.turns += 1
        letter = completion[:1]
        if letter in ACTIONS and hash((completion, os.getpid())) % 8 == 0:
            return ACTIONS[letter]()
        return "h", float(len(completion) % 2), self.turns == 3
'''
MODEL = {
    "model_type": "qwen2", "vocab_size": 13, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip


def descendants() -> list[int]:
    """Returns the ids of all other processes that have the mark of this script in their environment variables."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={os.getpid()}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return [pid for pid in found if pid != os.getpid()]


def state() -> tuple[int, int, float]:
    """Returns the numbers of other processes and of file descriptors, and the resident memory in MB."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(descendants()), len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> int:
    """Runs the steps and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    folder = Path(tempfile.mkdtemp())
    (folder / "soak.py").write_text(MISBEHAVING)
    tokenizer = reverse_text.tokenizer()
    ends = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abcdefgh"]
    pool = EnvironmentPool(f"{folder / 'soak.py'}:Soak", workers=4, timeout_seconds=0.5, memory_gb=0.5)
    rows: list[dict] = []
    learner = MaxRLLearner(
        model=tunix_like.load_model(MODEL, init="random")[0],
        tokenizer=tokenizer,
        environment=pool,
        environment_config=EnvironmentConfig(max_turns=4, max_observation_tokens=40),
        algo_config=MaxRLConfig(num_generations=4, truncation_order=1),
        rollout_config=RolloutConfig(max_prompt_length=8, max_tokens_to_generate=48, eos_tokens=ends),
        training_config=RLTrainingConfig(max_steps=10),
    )
    data = [reverse_text.record(text) for text in ("ab", "cd", "ef", "gh")]
    os.environ[MARK] = str(os.getpid())
    before = None
    while len(rows) < steps:
        learner.train(data, batch_size=4, callbacks=[OnRow(lambda row: rows.append(dict(row)))])
        before = state() if before is None and len(rows) >= SETTLED else before
        print(f"step {len(rows)}: processes, descriptors, MB = {state()}", flush=True)
    after = state()
    assert before is not None
    failed = np.array([row["train/reward/unscored_frac"] for row in rows])
    kinds = {name: float(np.mean([row[f"train/reward/{name}_frac"] for row in rows])) for name in ("timeout", "error")}
    print(
        f"{len(rows)} steps, {failed.mean():.1%} of the trajectories unscored ({kinds}); before {before}, after {after}"
    )
    kept = after[0] == before[0] == 0 and after[1] <= before[1] and after[2] < before[2] + 50 and failed.mean() > 0
    print("kept" if kept else "NOT KEPT")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
