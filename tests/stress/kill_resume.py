"""Kills a real run again and again, and compares what it comes to with the same run left alone.

    python tests/stress/kill_resume.py [--kills 20] [--seed 0] [--folder FOLDER]

Not a part of the test suite: it takes some minutes. The lives of the run get SIGKILL in turn some steps after their
first (of supervised warm-up, then of training), while a checkpoint is being written, and at a random moment of their
start; the last life is let finish. Exit status 0: metrics (times aside), completions and weights are the same to the
bit.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.numpy import load_file
from tiny_run import command, prepare, train_command

RUN = [
    "training.max_steps=100", "training.checkpoint_every_n_steps=1", "training.eval_every_n_steps=10",
    "training.log_rollouts_every_n_steps=1", "sft.max_steps=8",
]  # fmt: skip


MOMENTS = ("step", "checkpoint", "start-up")


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
    began, left, start = time.monotonic(), chance.randint(1, 5), chance.uniform(0, first)
    reached, phase, rows = float("nan"), "start-up", Appended(folder / "run" / "metrics.jsonl")
    with (folder / "said.txt").open("w+") as said:
        with subprocess.Popen(train_command(*RUN), cwd=folder, stdout=said, stderr=subprocess.STDOUT) as process:
            while process.poll() is None:
                time.sleep(0.001)
                now = time.monotonic() - began
                if names := rows.new():
                    phase, left = "training" if "step" in names[-1] else "SFT", left - len(names)
                    reached = reached if reached == reached else now
                if (
                    (moment == "start-up" and now > start)
                    or (moment == "step" and left <= 0)
                    or (moment == "checkpoint" and left <= 0 and unfinished(folder))
                ):
                    time.sleep(chance.uniform(0, 0.02))
                    process.kill()
                    process.wait()
        said.seek(0)
        text = said.read()
    writing = phase != "start-up" and unfinished(folder)
    return Life(process.returncode, reached, text, f"{phase}, writing" if writing else phase)


class Appended:
    """The rows that are appended to `metrics.jsonl` from now on. When a phase begins the file is replaced by what is
    kept of it, which is not new."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen = self._state()

    def _state(self) -> tuple[int, int]:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return 0, 0
        return found.st_ino, found.st_size

    def new(self) -> list[dict[str, Any]]:
        (inode, size), (now, end) = self.seen, self._state()
        if now != inode:
            self.seen = now, end if inode else 0
            return []
        with contextlib.suppress(ValueError):  # a row of which a part is there
            rows = [json.loads(line) for line in self._between(size, end).splitlines()]
            self.seen = now, end
            return rows
        return []

    def _between(self, begin: int, end: int) -> bytes:
        if begin == end:
            return b""
        with self.path.open("rb") as file:
            file.seek(begin)
            return file.read(end - begin)


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
    print(f"{'kill':>4}  {'killed in':>17}  {'first step':>10}  newest checkpoint  warnings", flush=True)
    for kill in range(1, arguments.kills + 1):
        before = newest(parts / "run")
        life = live(parts, MOMENTS[(kill - 1) % len(MOMENTS)], chance, first)
        if life.code != -signal.SIGKILL:
            print(f"ended with {life.code} instead of being killed: {'finished' if life.code == 0 else life.said}")
            break
        phases[life.phase] += 1
        first = life.first if life.first == life.first else first
        reached = "-" if life.first != life.first else f"{life.first:.1f} s"
        warned = len(re.findall(r"^WARNING", life.said, re.M))
        print(f"{kill:>4}  {life.phase:>17}  {reached:>10}  {before} -> {newest(parts / 'run')}  {warned}", flush=True)
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
