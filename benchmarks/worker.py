"""One case in one process, commanded over stdin and stdout: both ends of the line.

A process of its own makes its peak memory the case's; the command to start a repeat comes from outside, so that two
libraries can take turns and only one computes at a time. It imports nothing but the standard library before a case
runs, because it also serves in the peer's environment.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import Case

ROOT = Path(__file__).parents[1]
_COMPILED = "/jax/core/compile/backend_compile_duration"


class Finished(Exception):
    """The other end wants no further repeat."""


class Gate:
    """The worker's end: `begin` once everything is built, then `end` after each repeat."""

    def __init__(self) -> None:
        # Whatever a library prints must not get into the line.
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._compilations: list[float] = []
        import jax

        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILED:
            self._compilations.append(duration_secs)

    def begin(self) -> None:
        """Says that the case is built; returns when the first repeat is to start. What was compiled so far made the
        model and is not counted."""
        self._compilations.clear()
        self._send({"base_mb": peak_memory_mb()})
        self._wait()

    def end(self, tokens: int, **more: float) -> None:
        """Reports the repeat that is over, of so many useful tokens; returns when the next is to start.

        Raises:
          Finished: there is no next.
        """
        seconds = time.perf_counter() - self._started
        compiled = {"compile_s": sum(self._compilations), "programs": len(self._compilations)}
        self._compilations.clear()
        self._send({"seconds": seconds, "tokens": tokens, "peak_mb": peak_memory_mb()} | compiled | more)
        self._wait()

    def _send(self, message: Mapping[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()

    def _wait(self) -> None:
        if sys.stdin.readline() != "go\n":
            raise Finished
        self._started = time.perf_counter()


def peak_memory_mb() -> float:
    """Returns the peak memory of this process: that of the device if it reports one, else resident memory."""
    import jax

    stats = jax.local_devices()[0].memory_stats()
    if stats is not None:
        return stats["peak_bytes_in_use"] / 1e6
    status = Path("/proc/self/status")
    if status.exists():  # `ru_maxrss` below also counts what the starting process held
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6


def serve(run_case: Callable[..., None]) -> None:
    """The main function of a worker: `CASE_AS_JSON [MODEL_FOLDER]` on its command line."""
    arguments = sys.argv[1:]
    with contextlib.suppress(Finished):
        run_case(Case.from_json(arguments[0]), Gate(), Path(arguments[1]) if len(arguments) > 1 else None)


class Worker:
    """The commanding end: starts `python -m module` on a case and asks for repeats.

    Raises:
      RuntimeError: the process died; the message has the end of what it printed.
    """

    def __init__(self, case: Case, folder: Path | None, module: str = "benchmarks.ours", python: str = sys.executable):
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the worker)
        environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
        self._command = command(case, folder, module, python)
        self._process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.built = self._read()

    def repeat(self) -> dict[str, float]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the reading says why
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return dict(json.loads(line))
        self._process.wait()
        self._log.seek(0)
        end = self._log.read()[-3000:]
        raise RuntimeError(f"{' '.join(self._command)} ended ({self._process.returncode}):\n{end}")

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()


def command(case: Case, folder: Path | None, module: str, python: str) -> Sequence[str]:
    return [python, "-m", module, case.to_json(), *([] if folder is None else [str(folder)])]


def count(text: str) -> int:
    """A number of repeats, from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got '{text}'")
    return int(text)


class Series:
    """The repeats of one worker: the first is the warm-up, with its compilations."""

    def __init__(self, worker: Worker):
        self.worker = worker
        self.first = worker.repeat()
        self.repeats: list[dict[str, float]] = []

    def add(self) -> None:
        self.repeats.append(self.worker.repeat())

    def rates(self) -> list[float]:
        """Useful tokens per second of each repeat."""
        return [repeat["tokens"] / repeat["seconds"] for repeat in self.repeats]

    def summary(self) -> dict[str, Any]:
        seconds = [repeat["seconds"] for repeat in self.repeats]
        return {
            "median_s": median(seconds),
            "min_s": min(seconds),
            "max_s": max(seconds),
            "tokens": median([repeat["tokens"] for repeat in self.repeats]),
            "tokens_per_s": median(self.rates()),
            "peak_mb": self.repeats[-1]["peak_mb"],
            "base_mb": self.worker.built["base_mb"],
            "first_s": self.first["seconds"],
            "compile_s": self.first["compile_s"],
            "programs": self.first["programs"],
            "later_programs": sum(repeat["programs"] for repeat in self.repeats),
            "repeats": self.repeats,
        }


def median(values: Sequence[float]) -> float:
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
