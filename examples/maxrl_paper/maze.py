"""The maze comparison of the MaxRL paper (arXiv 2602.02710, section 6.2) at the size of two CPU cores.

For each seed one model is taught by SFT; from it every estimator trains with the same number of rollouts, and each
result is evaluated with 128 samples on the same 256 held-out mazes. `--scaling` trains with other group sizes instead.

    python examples/maxrl_paper/maze.py --out runs/maxrl_paper
    python examples/maxrl_paper/maze.py --out runs/maxrl_paper --scaling
    python examples/maxrl_paper/maze_figures.py --out runs/maxrl_paper

Nothing is done twice: the same command goes on where it was stopped. Each run writes what it says to `logs/`.
"""

from __future__ import annotations

import argparse
import os
import queue
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

CONFIG = Path(__file__).with_name("maze.yaml")
SAMPLES = 128
ESTIMATORS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "rloo": (),
    "maxrl": (),
    "maxpo": ("algorithm.k=4",),
    "pkpo": ("algorithm.k=4",),
}
GROUP = 16
SCALED = ("rloo", "grpo", "maxrl")
OTHER_GROUPS = (4, 64)


class Run(NamedTuple):
    """One training run from the SFT model of its seed."""

    estimator: str
    group: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.estimator}-g{self.group}-s{self.seed}"


def compared(seeds: int) -> list[Run]:
    """The runs of the comparison: every estimator from every start, with the same group."""
    return [Run(estimator, GROUP, seed) for seed in range(seeds) for estimator in ESTIMATORS]


def scaled() -> list[Run]:
    """The runs of the scaling figure beyond those of the comparison, from the first start."""
    return [Run(estimator, group, 0) for group in OTHER_GROUPS for estimator in SCALED]


class Cores:
    """Runs commands, at most `jobs` at once, each on cores of its own: models as small as this one use one core well
    and two badly."""

    def __init__(self, out: Path, jobs: int):
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self.out, self.jobs = out, jobs
        self._shares: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        for i in range(jobs):
            self._shares.put(cores[i::jobs] or cores)

    def __call__(self, log: str, *arguments: str) -> None:
        """Calls `tunix-like` with these arguments; what it prints is appended to `logs/<log>.txt`.

        Raises:
          SystemExit: it failed; the message says where its output is.
        """
        share = self._shares.get()
        file = self.out / "logs" / f"{log}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with file.open("a") as stream:
                pinned = (lambda: os.sched_setaffinity(0, share)) if share else None
                command = [sys.executable, "-m", "tunix_like", *arguments]
                code = subprocess.run(command, stdout=stream, stderr=stream, preexec_fn=pinned, check=False).returncode
        finally:
            self._shares.put(share)
        if code:
            raise SystemExit(f"tunix-like {arguments[0]} ended with {code}: see {file}")


def start(call: Cores, seed: int) -> Path:
    """The SFT model of a seed as a Hugging Face folder, made and evaluated unless it is there."""
    name, model = f"start-s{seed}", call.out / f"start-s{seed}-model"
    if not (call.out / "eval" / f"{name}.summary.json").exists():
        run = str(call.out / name)
        call(name, "sft", str(CONFIG), f"training.seed={seed}", f"training.output_dir={run}")
        if not model.exists():
            call(name, "export", run, str(model))
        evaluate(call, name)
    return model


def train(call: Cores, run: Run) -> None:
    """Trains and evaluates one run, unless that is done."""
    if (call.out / "eval" / f"{run.name}.summary.json").exists():
        return
    overrides = [
        f"model.path={call.out / f'start-s{run.seed}-model'}",
        "model.init=pretrained",
        "model.config=null",
        "sft.max_steps=0",
        f"algorithm.advantage_estimator={run.estimator}",
        f"algorithm.num_generations={run.group}",
        f"training.seed={run.seed}",
        f"training.output_dir={call.out / run.name}",
        *ESTIMATORS[run.estimator],
    ]
    began = time.monotonic()
    call(run.name, "train", str(CONFIG), *overrides)
    trained = time.monotonic()
    evaluate(call, run.name)
    evaluated = time.monotonic()
    print(f"{run.name}: trained in {trained - began:.0f} s, evaluated in {evaluated - trained:.0f} s", flush=True)


def evaluate(call: Cores, name: str) -> None:
    out = call.out / "eval" / f"{name}.jsonl"
    out.unlink(missing_ok=True)  # half of a pair, from a run that was stopped between the two files
    call(name, "eval", str(call.out / name), f"eval.samples={SAMPLES}", "--out", str(out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=3, help="starts to compare from (default 3)")
    parser.add_argument("--scaling", action="store_true", help="other group sizes from the first start instead")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, each on its share of the cores (default 2)")
    arguments = parser.parse_args()
    runs = scaled() if arguments.scaling else compared(arguments.seeds)
    call = Cores(arguments.out.resolve(), arguments.jobs)
    began = time.monotonic()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(lambda seed: start(call, seed), sorted({run.seed for run in runs})))
        list(pool.map(lambda run: train(call, run), runs))
    print(f"{len(runs)} runs in {(time.monotonic() - began) / 60:.1f} minutes: {arguments.out}")


if __name__ == "__main__":
    main()
