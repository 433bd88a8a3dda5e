"""Kills a real run again and again, and compares what it comes to with the same run left alone.

    python tests/stress/kill_resume.py [--kills 20] [--seed 0] [--folder FOLDER]

Not a part of the test suite: it takes some minutes. The lives of the run get SIGKILL in turn at a random moment of
their start, at one after one to eight steps (of supervised warm-up, then of training), and while a checkpoint is being
written; the last life is let finish. Exit status 0: metrics (times aside), completions and weights are the same to the
bit.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.numpy import load_file
from tiny_run import command, prepare, train_command

RUN = [
    "training.max_steps=100", "training.checkpoint_every_n_steps=1", "training.eval_every_n_steps=10",
    "training.log_rollouts_every_n_steps=1",
]  # fmt: skip


MOMENTS = ("start-up", "step", "checkpoint")


def newest(folder: Path) -> str:
    """The newest whole checkpoint, as `checkpoints/12`."""
    for name in ("checkpoints", "sft_checkpoints"):
        steps = [int(path.name) for path in (folder / name).glob("*") if path.name.isdigit()]
        if steps:
            return f"{name}/{max(steps)}"
    return "none"


class Life(NamedTuple):
    """One life of the run: its exit status, the seconds to its first step, what it said, where it ended."""

    code: int
    first: float
    said: str
    phase: str


def live(folder: Path, moment: str = "never", chance: random.Random | None = None, first: float = 0.0) -> Life:
    """Lives until `moment`, one of `MOMENTS`; a start is taken to last `first` seconds."""
    chance = chance or random.Random()
    began, reached, said, phase, left = time.monotonic(), float("nan"), [], "start-up", chance.randint(1, 8)
    with subprocess.Popen(
        train_command(*RUN), cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        timer = threading.Timer(chance.uniform(0, first), process.kill)
        if moment == "start-up":
            timer.start()
        for line in process.stdout or ():
            said.append(line)
            if (match := re.match(r"(sft|train) +[1-9]\d*/", line)) is None:
                continue
            phase, reached, left = match[1], reached if reached == reached else time.monotonic() - began, left - 1
            if left == 0 and moment in ("step", "checkpoint"):
                while moment == "checkpoint" and not unfinished(folder) and process.poll() is None:
                    time.sleep(0.001)
                time.sleep(chance.uniform(0, 0.05 if moment == "step" else 0.01))
                process.kill()
        code = process.wait()
        timer.cancel()
    return Life(code, reached, "".join(said), "checkpoint" if unfinished(folder) else phase)


def unfinished(folder: Path) -> bool:
    """Whether a checkpoint is being written, or was when the run was killed."""
    return any((folder / "run").glob("*checkpoints/*.orbax-checkpoint-tmp*"))


def outcome(folder: Path) -> dict[str, Any]:
    """All that must be the same."""
    subprocess.run(command("export", "run", "out"), cwd=folder, check=True, capture_output=True)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = [{k: v for k, v in row.items() if "time" not in k and "perf" not in k} for row in rows]
    weights = {name: value.tobytes() for name, value in load_file(folder / "out" / "model.safetensors").items()}
    rollouts = {path.name: path.read_text() for path in (folder / "run" / "rollouts").glob("*.jsonl")}
    return {"rows of metrics": rows, "tensors": weights, "files of rollouts": rollouts}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="kill_resume_"))
    whole, parts = folder / "whole", folder / "parts"
    for each in (whole, parts):
        prepare(each)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "xla"))
    life = live(whole)  # compiles
    assert life.code == 0, life.said
    expected, first = outcome(whole), life.first
    chance, phases = random.Random(arguments.seed), collections.Counter[str]()
    print(f"{'kill':>4}  {'killed in':>10}  {'first step':>10}  newest checkpoint  warnings", flush=True)
    for kill in range(1, arguments.kills + 1):
        before = newest(parts / "run")
        life = live(parts, MOMENTS[kill % len(MOMENTS)], chance, first)
        if life.code != -signal.SIGKILL:
            print(f"ended with {life.code} instead of being killed: {'finished' if life.code == 0 else life.said}")
            break
        phases[life.phase] += 1
        first = life.first if life.first == life.first else first
        reached = "-" if life.first != life.first else f"{life.first:.1f} s"
        warned = len(re.findall(r"^WARNING", life.said, re.M))
        print(f"{kill:>4}  {life.phase:>10}  {reached:>10}  {before} -> {newest(parts / 'run')}  {warned}", flush=True)
    life = live(parts)
    assert life.code == 0, life.said
    found, same = outcome(parts), True
    for name, value in expected.items():
        equal = found[name] == value
        same &= equal
        print(f"{len(value)} {name}: {'the same' if equal else 'DIFFERENT'}")
    kills = sum(phases.values())
    spread = ", ".join(f"{count} in {phase}" for phase, count in phases.most_common())
    print(f"{kills} kills ({spread}): {'the same to the bit' if same else 'NOT the same'}")
    return 0 if same and kills == arguments.kills else 1


if __name__ == "__main__":
    sys.exit(main())
