"""Runs a thousand tiny steps with all features enabled, and measures from outside the resources that must not grow.

    python tests/stress/soak.py [--steps 1000] [--folder FOLDER] [OVERRIDE ...]

Not a part of the test suite: it takes some minutes, and needs Linux (`/proc`). It measures the run and its reward
workers ten times a second, prints a line every 50 steps, and at the end a result for each requirement. A short run
before it fills the compilation cache, because the memory that the compiler keeps would hide a leak. Other processes
slow down the steps. The table shows how many processors they used, so repeat a run that they disturbed. Exit status 0:
every requirement is met.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tiny_run import prepare, train_command

RUN = [
    "training.checkpoint_every_n_steps=10", "training.eval_every_n_steps=20", "training.log_rollouts_every_n_steps=5",
    "rewards.workers=2", "optimizer.learning_rate=1e-6", "optimizer.schedule=constant",
]  # fmt: skip
"""The learning rate is very small, so that completions keep their lengths and the last steps do the same work as the
first. It is constant, because the length of a schedule is part of the program that the short run compiles."""

WINDOW = 50
"""Steps per line of the table."""

SETTLED = 100
"""The step from which nothing may grow."""

WARM_UP, COMPARED = 10, 100
"""Steps whose time is not counted, and the number of steps at the start that are compared with as many at the end."""

GROWTH, SLOWER = 0.03, 0.05

PAGE, TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass
class Sample:
    """The state of the run at one time: resident bytes, open files, threads, and the resident bytes of its workers (by
    process).

    `cpu`: CPU seconds of all of them; `busy`: seconds in which the processors of the machine were busy.
    """

    step: int
    at: float
    resident: int
    files: int
    threads: int
    workers: dict[int, int]
    cpu: float
    busy: float


def look(pid: int, step: int) -> Sample | None:
    """Measures the processes. Returns None if a process has just ended."""
    try:
        resident, cpu, threads = _status(pid)
        files = len(os.listdir(f"/proc/{pid}/fd"))
        children = {child: _status(child) for child in _children(pid)}
    except (OSError, IndexError):
        return None
    user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8])
    busy = (user + nice + system + sum(interrupts)) / TICKS
    cpu += sum(seconds for _, seconds, _ in children.values())
    workers = {child: size for child, (size, _, _) in children.items()}
    return Sample(step, time.monotonic(), resident, files, threads, workers, cpu, busy)


def _status(pid: int) -> tuple[int, float, int]:
    """Returns resident bytes, CPU seconds and threads (proc_pid_stat(5), counted from the field after the name)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[21]) * PAGE, (int(fields[11]) + int(fields[12])) / TICKS, int(fields[17])


def _children(pid: int) -> list[int]:
    return [int(word) for task in Path(f"/proc/{pid}/task").glob("*/children") for word in task.read_text().split()]


class Rows:
    """Reads the new rows of `metrics.jsonl`. The file is replaced when a phase begins, and is then read from its
    start."""

    def __init__(self, path: Path) -> None:
        self.path, self.file, self.torn, self.step = path, None, "", 0

    def new(self) -> list[dict[str, Any]]:
        """Returns the training steps since the last call."""
        if not self.path.exists():
            return []
        if self.file is None or os.fstat(self.file.fileno()).st_ino != self.path.stat().st_ino:
            self.file, self.torn = self.path.open(), ""
        *lines, self.torn = (self.torn + self.file.read()).split("\n")
        rows = [row for row in map(json.loads, lines) if row.get("step", 0) > self.step]
        self.step = rows[-1]["step"] if rows else self.step
        return rows


@dataclasses.dataclass
class Window:
    """Consecutive steps: their rows of metrics, the measurements during them, and the size of the run folder in bytes
    at their end."""

    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    samples: list[Sample] = dataclasses.field(default_factory=list)
    disk: int = 0

    @property
    def last(self) -> int:
        return int(self.rows[-1]["step"])

    @property
    def resident(self) -> int:
        """The largest resident memory of the run, in bytes."""
        return max(sample.resident for sample in self.samples)

    @property
    def workers(self) -> int:
        """The largest resident memory of all workers together, in bytes."""
        return max(sum(sample.workers.values()) for sample in self.samples)

    @property
    def files(self) -> int:
        return at_rest([sample.files for sample in self.samples])

    @property
    def threads(self) -> int:
        return at_rest([sample.threads for sample in self.samples])

    @property
    def compiled(self) -> int:
        return round(sum(row["train/perf/programs_compiled"] for row in self.rows))

    @property
    def rate(self) -> float:
        """Steps per second, including evaluations and checkpoints."""
        first, last = self.samples[0], self.samples[-1]
        return (last.step - first.step) / (last.at - first.at)

    @property
    def others(self) -> float:
        """The number of processors that other processes used."""
        first, last = self.samples[0], self.samples[-1]
        return max(0.0, last.busy - first.busy - last.cpu + first.cpu) / (last.at - first.at)


def at_rest(counts: Sequence[int]) -> int:
    """Returns the 20 % quantile of the measurements, because a checkpoint that is being written opens files and starts
    threads."""
    return sorted(counts)[len(counts) // 5]


COLUMNS: dict[str, Callable[[Window], str]] = {
    "step": lambda window: f"{window.last}",
    "RSS MB": lambda window: f"{window.resident / 1e6:.1f}",
    "workers MB": lambda window: f"{window.workers / 1e6:.1f}",
    "files": lambda window: f"{window.files}",
    "threads": lambda window: f"{window.threads}",
    "compiled": lambda window: f"{window.compiled}",
    "ms a step": lambda window: f"{1e3 * typical(window.rows):.1f}",
    "steps/s": lambda window: f"{window.rate:.1f}",
    "others": lambda window: f"{window.others:.2f}",
    "disk MB": lambda window: f"{window.disk / 1e6:.2f}",
}


def soak(folder: Path, steps: int, overrides: Sequence[str], say: Callable[..., None]) -> list[Window]:
    """Runs the training once and prints a line at the end of each window."""
    prepare(folder)
    windows, rows = [Window()], Rows(folder / "run" / "metrics.jsonl")
    with (folder / "said.txt").open("wb") as said:
        command = train_command(*RUN, f"training.max_steps={steps}", *overrides)
        with subprocess.Popen(command, cwd=folder, stdout=said, stderr=subprocess.STDOUT) as process:
            while process.poll() is None:
                time.sleep(0.1)
                for row in rows.new():
                    windows[-1].rows.append(row)
                    if row["step"] % WINDOW == 0:
                        windows[-1].disk = _size(folder)
                        say(*(f"| {cell(windows[-1]):>{len(name)}}" for name, cell in COLUMNS.items()), "|")
                        windows.append(Window())
                if rows.step and (sample := look(process.pid, rows.step)) is not None:
                    windows[-1].samples.append(sample)
    if process.returncode:
        raise SystemExit((folder / "said.txt").read_text())
    return [window for window in windows if window.rows]


def _size(folder: Path) -> int:
    """Returns the size of the files in bytes. Files may appear and disappear meanwhile."""
    found = subprocess.run(["du", "-sb", str(folder)], capture_output=True, text=True, check=False)
    return int(found.stdout.split()[0])


def verdicts(windows: Sequence[Window]) -> list[tuple[str, str, bool]]:
    """Returns for each requirement its name, the measured values as text, and whether it is met."""
    at = next(window for window in windows if window.last == SETTLED)
    after = [window for window in windows if window.last > SETTLED]
    result = []
    for name, what in (("memory of the run", "resident"), ("memory of its workers", "workers")):
        before, most = getattr(at, what), max(getattr(window, what) for window in after)
        seen = f"{before / 1e6:.1f} MB up to step {SETTLED}, then {most / 1e6:.1f} MB ({most / before - 1:+.1%})"
        result.append((name, seen, most <= before * (1 + GROWTH)))
    for what in ("files", "threads"):  # a leak persists, but a busy machine increases single windows
        before = max(getattr(window, what) for window in windows if window.last <= SETTLED)
        kept = min(getattr(window, what) for window in after[len(after) // 2 :])
        result.append((what, f"{before} up to step {SETTLED}, {kept} in the second half", kept <= before))
    workers = {pid for window in windows for sample in window.samples for pid in sample.workers}
    result.append(("worker processes", f"{len(workers)} in the whole run", len(workers) == 2))
    late = sum(window.compiled for window in after)
    result.append(("programs", f"{sum(window.compiled for window in windows)}, {late} after step {SETTLED}", late == 0))
    rows = [row for window in windows for row in window.rows]
    first, last = typical(rows[WARM_UP : WARM_UP + COMPARED]), typical(rows[-COMPARED:])
    seen = f"{1e3 * first:.1f} ms from step {WARM_UP + 1} on, {1e3 * last:.1f} ms in the end ({last / first - 1:+.1%})"
    result.append((f"{COMPARED} steps", seen, last <= first * (1 + SLOWER)))
    return result


def typical(rows: Sequence[dict[str, Any]]) -> float:
    """Returns the median seconds of a step without its evaluation and its checkpoint."""
    return statistics.median(row["train/step_time_sec"] for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="at least 300, a multiple of 50")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="KEY=VALUE, as of `tunix-like train`")
    arguments = parser.parse_args()
    if arguments.steps < 300 or arguments.steps % WINDOW:
        parser.error("--steps: at least 300, a multiple of 50")
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="soak_"))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "xla")
    # otherwise glibc keeps freed memory in an arena of each thread, which looks like a leak
    os.environ["MALLOC_ARENA_MAX"] = "2"
    soak(folder / "short", 2 * WINDOW, arguments.overrides, lambda *cells: None)
    say = functools.partial(print, flush=True)
    say(*(f"| {name}" for name in COLUMNS), "|")
    say("|--:" * len(COLUMNS) + "|")
    found = verdicts(soak(folder / "long", arguments.steps, arguments.overrides, say))
    for name, seen, kept in found:
        print(f"{name}: {seen}: {'kept' if kept else 'BROKEN'}")
    return 0 if all(kept for _, _, kept in found) else 1


if __name__ == "__main__":
    sys.exit(main())
