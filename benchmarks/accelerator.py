"""`python -m benchmarks.accelerator --minutes N --out DIR`: all measurements on a GPU or TPU that is available for
minutes.

The stages run one after the other on one device, each in a separate process with a time limit. Nothing is downloaded;
random weights have the shapes of Qwen3-0.6B. `DIR/results.jsonl` gets a line per stage as soon as it ends, also if it
failed or exceeded its limit, with what it had measured until then. `DIR/report.md` is written at the end and on
interruption. The same command with the same DIR repeats the stages that did not succeed and continues the maze run.
`--size tiny` runs all stages with a tiny model on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.accelerator_report import write_report

ROOT = Path(__file__).parents[1]
SIZES = ("tiny", "qwen3_0.6b")

STAGES = {
    "machine": 0.06,
    "parity": 0.16,
    "update": 0.16,
    "decode": 0.13,
    "step": 0.16,
    "memory": 0.13,
    "maze": 1.0,
}
"""Stages in their order, and the limit of each as a share of the whole time. The last stage gets the remaining time."""

SHORTEST = 2.0
"""A stage is skipped if fewer seconds are left."""

RUN_GRACE = 45.0
"""Seconds between the request to stop a training run and the kill: it finishes its step and writes a checkpoint."""
USUAL_GRACE = 3.0

QUICK = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
"""Flags of the CPU compiler for tiny models, whose compilations take nearly all of the time."""

ONE_DEVICE = {
    "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
    "TPU_VISIBLE_CHIPS": "0",
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
    "TPU_PROCESS_BOUNDS": "1,1,1",
}
"""Variables that restrict a process to one device of a host with several."""

MAZE = {
    "qwen3_0.6b": ["examples/maxrl_paper/maze17.yaml"],
    "tiny": [
        "examples/maze.yaml",
        "model.config.num_hidden_layers=1",
        *("data.train_size=64", "data.eval_size=8", "data.batch_size=4", "algorithm.num_generations=4"),
        *("sft.max_steps=2", "training.max_steps=2", "eval.samples=4", "eval.k=[1,4]", "eval.batch_size=8"),
    ],
}


@dataclasses.dataclass
class Battery:
    """A call of the program.

    Attributes:
      out: the folder of the results, as an absolute path.
      size: one of `SIZES`.
      seconds: the whole time.
      end: when the time is over, as `time.monotonic`.
      stopped: whether a signal has asked to stop.
    """

    out: Path
    size: str
    seconds: float
    end: float
    stopped: bool = False

    stages: ClassVar[Mapping[str, float]] = STAGES

    def stop(self, number: int, frame: Any) -> None:
        """Handles a signal. It raises nothing, because an exception during the start of a stage would lose the
        stage."""
        self.stopped = True

    @property
    def results(self) -> Path:
        return self.out / "results.jsonl"

    def command(self, stage: str) -> list[str]:
        """Returns the command of a stage."""
        if stage == "maze":
            return [sys.executable, "-m", "tunix_like", "train", *MAZE[self.size], f"training.output_dir={self.maze}"]
        return [sys.executable, "-m", "benchmarks.accelerator_stages", stage, self.size, str(self.out)]

    @property
    def maze(self) -> Path:
        return self.out / "maze"

    def run_folder(self, stage: str) -> Path | None:
        """Returns the run folder of a stage that is a training run."""
        return self.maze if stage == "maze" else None

    def grace(self, stage: str) -> float:
        return USUAL_GRACE if self.run_folder(stage) is None else RUN_GRACE

    def limit(self, stage: str) -> float:
        """Returns the seconds that a stage may take from now on."""
        left = self.end - time.monotonic() - self.grace(stage) * (self.seconds >= 300)
        return min(left, max(30.0, self.stages[stage] * self.seconds))

    def environment(self) -> dict[str, str]:
        """Returns the environment of the stages: one device, compiled programs kept for the next call, no downloads."""
        cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(self.out / "cache"))
        chosen = {"JAX_COMPILATION_CACHE_DIR": cache, "HF_HUB_OFFLINE": "1", **ONE_DEVICE}
        if self.size == "tiny":
            chosen["JAX_PLATFORMS"] = "cpu"
            if importlib.metadata.version("jaxlib").startswith("0.10."):  # an unknown flag would end the process
                chosen["XLA_FLAGS"] = QUICK
        return {**os.environ, **chosen}


def read_results(file: Path) -> dict[str, dict[str, Any]]:
    """Returns the newest line of each stage."""
    if not file.exists():
        return {}
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {line["stage"]: line for line in lines}


def run_stage(battery: Battery, stage: str) -> dict[str, Any]:
    """Runs a stage to its end or its limit and returns its line, with a status if it was interrupted."""
    limit, start = battery.limit(stage), time.monotonic()
    line: dict[str, Any] = {"stage": stage, "size": battery.size, "limit": round(max(limit, 0.0), 1)}
    if limit < SHORTEST:
        return line | {"status": "skipped", "seconds": 0.0, "error": "no time was left", "found": {}}
    log, found = battery.out / f"{stage}.log", battery.out / f"{stage}.jsonl"
    found.unlink(missing_ok=True)
    with log.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(
            battery.command(stage),
            cwd=ROOT,
            env=battery.environment(),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that all processes that it started end with it
        )
        status = _wait(process, limit, battery)
        _stop(process, battery.grace(stage))
    line |= {"status": status, "seconds": round(time.monotonic() - start, 1)}
    line["error"] = None if status == "ok" else _error(status, limit, log)
    folder = battery.run_folder(stage)
    line["found"] = merged(found) if folder is None else progress_of_run(folder)
    return line


def _wait(process: subprocess.Popen[bytes], limit: float, battery: Battery) -> str:
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if battery.stopped:
            return "interrupted"
        with contextlib.suppress(subprocess.TimeoutExpired):
            return "ok" if process.wait(0.2) == 0 else "failed"
    return "timed out"


def _stop(process: subprocess.Popen[bytes], grace: float) -> None:
    """Asks a process to stop. Kills it and all processes that it started after `grace` seconds."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
    with contextlib.suppress(ProcessLookupError):  # the process has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _error(status: str, limit: float, log: Path) -> str:
    if status == "timed out":
        return f"stopped at its limit of {limit:.0f} s"
    if status == "interrupted":
        return "interrupted"
    return log.read_text(encoding="utf-8", errors="replace")[-2000:].strip() or "it ended without a message"


def merged(file: Path) -> dict[str, Any]:
    """Returns what a stage has reported. Its lines are objects, and later keys replace earlier ones."""
    found: dict[str, Any] = {}
    if file.exists():
        for text in file.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # the last line of a killed process may be incomplete
                found |= json.loads(text)
    return found


def progress_of_run(folder: Path) -> dict[str, Any]:
    """Returns the progress of a run: its newest step, step time and evaluation, and its first evaluation."""
    file, found, first = folder / "metrics.jsonl", {}, {}
    if not file.exists():
        return {}
    for text in file.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            row = json.loads(text)
            kept = ("step", "sft/step", "train/step_time_sec", "train/rewards/mean", "train/perf/update_mfu")
            evaluated = {name: row[name] for name in row if name.startswith(("eval/pass@", "eval/avg@"))}
            first = first or {f"first {name}": value for name, value in evaluated.items()}
            found |= {name: row[name] for name in row if name in kept} | evaluated
    return first | found


def run(battery: Battery) -> None:
    """Runs the stages that have not succeeded yet."""
    done = read_results(battery.results)
    for stage in battery.stages:
        if done.get(stage, {}).get("status") == "ok":
            print(f"{stage}: done before", flush=True)
            continue
        if battery.stopped:
            return
        line = run_stage(battery, stage)
        with battery.results.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
        print(f"{stage}: {line['status']}, {line['seconds']:.0f} s", flush=True)
        if stage == "machine" and line["found"].get("backend") == "cpu" and battery.size != "tiny":
            print("jax sees no accelerator here; --size tiny runs everything on the CPU", flush=True)
            return


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accelerator", description=__doc__)
    parser.add_argument("--minutes", type=float, required=True, help="time for all stages together")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results; the same one continues")
    parser.add_argument("--size", choices=SIZES, default="qwen3_0.6b", help="the model (default: qwen3_0.6b)")
    options = parser.parse_args(arguments)
    if not options.minutes > 0:
        parser.error(f"--minutes: expected a positive number, got {options.minutes}")
    sizes = {line["size"] for line in read_results(options.out / "results.jsonl").values()}
    if sizes - {options.size}:
        parser.error(f"--out {options.out} holds results of --size {sizes.pop()}; choose another folder")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    seconds = 60 * options.minutes
    battery = Battery(options.out.resolve(), options.size, seconds, time.monotonic() + seconds)
    return run_all(battery)


def run_all(battery: Battery) -> int:
    """Runs the stages, also up to an interruption, and writes the report. Returns the exit status."""
    previous = {number: signal.signal(number, battery.stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        run(battery)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        lines = read_results(battery.results)
        write_report(battery.out / "report.md", [lines[stage] for stage in battery.stages if stage in lines])
        print(f"report: {battery.out / 'report.md'}", flush=True)
    complete = all(lines.get(stage, {}).get("status") == "ok" for stage in battery.stages)
    return 130 if battery.stopped else int(not complete)


if __name__ == "__main__":
    sys.exit(main())
