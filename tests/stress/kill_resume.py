"""Kills and resumes a real run repeatedly, and compares its results with the same run without interruption.

    python tests/stress/kill_resume.py [--kills 20] [--seed 0] [--folder FOLDER]

Not a part of the test suite: it takes some minutes, and needs Linux. The processes of the run end in turn some steps
after their first step (of supervised warm-up, then of training), while a checkpoint is written, and at a random time of
their start. They end in turn by SIGKILL, by SIGKILL after the reader of their output has ended, and by a closed
terminal: its shell and the kernel send SIGHUP, and later writes to it fail. The last process finishes the run. Exit
status 0: metrics (except times), completions and weights are bitwise equal, and no closed terminal lost a step.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fcntl
import json
import os
import pty
import random
import signal
import subprocess
import sys
import tempfile
import termios
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

WAYS = ("killed", "reader ended, killed", "terminal closed")


def newest(folder: Path) -> str:
    """Returns the newest complete checkpoint, as `checkpoints/12`."""
    for name in ("checkpoints", "sft_checkpoints"):
        steps = [int(path.name) for path in (folder / name).glob("*") if path.name.isdigit()]
        if steps:
            return f"{name}/{max(steps)}"
    return "none"


class Screen:
    """The output of a run, which this process reads: a pipe, or a terminal that controls the run.

    Attributes:
      text: the text that was read so far.
    """

    def __init__(self, terminal: bool) -> None:
        self.terminal, self.text = terminal, ""
        self._reader, self.writer = pty.openpty() if terminal else os.pipe()
        os.set_blocking(self._reader, False)

    def start(self, folder: Path) -> subprocess.Popen[bytes]:
        """Starts the run in a separate session, in which its processes get the signals of its terminal."""
        control = (lambda: fcntl.ioctl(1, termios.TIOCSCTTY, 0)) if self.terminal else None
        process = subprocess.Popen(
            train_command(*RUN), cwd=folder, stdin=subprocess.DEVNULL, stdout=self.writer, stderr=self.writer,
            start_new_session=True, preexec_fn=control,
        )  # fmt: skip
        os.close(self.writer)
        return process

    def read(self) -> None:
        """Reads the available text."""
        with contextlib.suppress(OSError):  # no text is available, or one end of the terminal is closed
            while self._reader >= 0 and (part := os.read(self._reader, 1 << 16)):
                self.text += part.decode(errors="replace")

    def close(self) -> None:
        if self._reader >= 0:
            os.close(self._reader)
            self._reader = -1


class Life(NamedTuple):
    """One process of the run: its exit status, the seconds to its first step, its output, and where it ended."""

    code: int
    first: float
    said: str
    phase: str


def live(
    folder: Path, moment: str = "never", way: str = "killed", chance: random.Random | None = None, first: float = 0.0
) -> Life:
    """Runs the process until `moment`, one of `MOMENTS`, and ends it in one of `WAYS`. A start is assumed to take
    `first` seconds."""
    chance = chance or random.Random()
    began, left, start = time.monotonic(), chance.randint(1, 5), chance.uniform(0, first)
    reached, phase, rows = float("nan"), "start-up", Appended(folder / "run" / "metrics.jsonl")
    screen, ending = Screen(way == "terminal closed"), False
    with screen.start(folder) as process:
        while process.poll() is None:
            time.sleep(0.001)
            screen.read()
            now = time.monotonic() - began
            if names := rows.new():
                phase, left = "training" if "step" in names[-1] else "SFT", left - len(names)
                reached = reached if reached == reached else now
            if way == "reader ended, killed" and screen.text:
                screen.close()  # after the first output
            if not ending and (
                (moment == "start-up" and now > start)
                or (moment == "step" and left <= 0)
                or (moment == "checkpoint" and left <= 0 and unfinished(folder))
            ):
                ending = True
                time.sleep(chance.uniform(0, 0.02))
                end(process, screen, way)
    screen.read()
    screen.close()
    writing = phase != "start-up" and unfinished(folder)
    return Life(process.returncode, reached, screen.text, f"{phase}, writing" if writing else phase)


def end(process: subprocess.Popen[bytes], screen: Screen, way: str) -> None:
    if way == "terminal closed":
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGHUP)  # the shell, before it ends itself
        screen.close()  # the kernel sends another one
    else:
        process.kill()


def as_expected(life: Life, way: str, run: Path) -> bool:
    """Returns whether the process ended correctly: after SIGHUP with all of its steps saved, or before the first
    step."""
    if way != "terminal closed":
        return life.code == -signal.SIGKILL
    if life.code == -signal.SIGHUP:
        return True
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    name, key = ("checkpoints", "step") if "step" in rows[-1] else ("sft_checkpoints", "sft/step")
    return life.code == 75 and newest(run) == f"{name}/{rows[-1][key]}"


class Appended:
    """The rows that are appended to `metrics.jsonl` from now on. When a phase begins, the file is replaced by its kept
    rows, which are not new."""

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
        with contextlib.suppress(ValueError):  # an incomplete row
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
    """Returns whether a checkpoint is being written, or was being written when the run was killed."""
    return any((folder / "run").glob("*checkpoints/*.orbax-checkpoint-tmp*"))


def outcome(folder: Path) -> dict[str, Any]:
    """Returns all results that must be equal."""
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
    chance, ends = random.Random(arguments.seed), collections.Counter[str]()
    print(f"{'life':>4}  {'end':<20}  {'status':>6}  {'in':>17}  {'first step':>10}  newest checkpoint", flush=True)
    for kill in range(1, arguments.kills + 1):
        before = newest(parts / "run")
        way = WAYS[(kill - 1) // len(MOMENTS) % len(WAYS)]
        life = live(parts, MOMENTS[(kill - 1) % len(MOMENTS)], way, chance, first)
        if not as_expected(life, way, parts / "run"):
            print(f"{way}: ended with {life.code}, newest checkpoint {newest(parts / 'run')}\n{life.said}")
            break
        ends[f"{way}, {life.code}"] += 1
        first = life.first if life.first == life.first else first
        reached = "-" if life.first != life.first else f"{life.first:.1f} s"
        place = f"{before} -> {newest(parts / 'run')}"
        print(f"{kill:>4}  {way:<20}  {life.code:>6}  {life.phase:>17}  {reached:>10}  {place}", flush=True)
    life = live(parts)
    assert life.code == 0, life.said
    found, same = outcome(parts), True
    for name, value in expected.items():
        equal = found[name] == value
        same &= equal
        print(f"{len(value)} {name}: {'the same' if equal else 'DIFFERENT'}")
    kills = sum(ends.values())
    spread = "; ".join(f"{count} {how}" for how, count in ends.most_common())
    print(f"{kills} ends ({spread}): {'the same to the bit' if same else 'NOT the same'}")
    return 0 if same and kills == arguments.kills else 1


if __name__ == "__main__":
    sys.exit(main())
