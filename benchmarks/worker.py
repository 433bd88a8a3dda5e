"""Runs one case in a process that is controlled over standard input and output. The module contains both ends.

A separate process has the peak memory of the case only. The command to start a repeat comes from the other end, so that
two libraries alternate and only one computes at a time. Before a case runs, only the standard library is imported,
because the module also runs in the peer's environment.
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


class Finished(BaseException):  # not an Exception, which a peer's loop may handle
    """The other end requests no further repeat."""


class Gate:
    """The worker's end: `begin` when everything is built, then `end` after each repeat."""

    def __init__(self) -> None:
        # Output of libraries must not be mixed with the messages.
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._compilations: list[float] = []
        import jax

        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILED:
            self._compilations.append(duration_secs)

    def begin(self) -> None:
        """Reports that the case is built. Returns when the first repeat must start. Earlier compilations belong to the
        creation of the model and are not counted."""
        self._compilations.clear()
        self._send({"base_mb": peak_memory_mb()})
        self._wait()

    def end(self, tokens: int, **more: float) -> None:
        """Reports a completed repeat and its number of useful tokens. Returns when the next must start.

        Raises:
          Finished: there is no next repeat.
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
    """Returns the peak memory of this process: that of the device if it reports one, otherwise resident memory."""
    import jax

    stats = jax.local_devices()[0].memory_stats()
    if stats is not None:
        return stats["peak_bytes_in_use"] / 1e6
    status = Path("/proc/self/status")
    if status.exists():  # `ru_maxrss` below also counts the memory of the parent process
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6


def serve(run_case: Callable[..., None]) -> None:
    """The main function of a worker, with `CASE_AS_JSON [MODEL_FOLDER]` on its command line."""
    arguments = sys.argv[1:]
    with contextlib.suppress(Finished):
        run_case(Case.from_json(arguments[0]), Gate(), Path(arguments[1]) if len(arguments) > 1 else None)


class Worker:
    """The controlling end: starts a command whose process has a `Gate`, and requests repeats.

    Raises:
      RuntimeError: the process died; the message has the end of what it printed.
    """

    def __init__(self, command: Sequence[str]):
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the worker)
        environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
        self._command = command
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
        with contextlib.suppress(BrokenPipeError):  # the read reports the reason
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


def case_command(
    case: Case, folder: Path | None, module: str = "benchmarks.ours", python: str = sys.executable
) -> Sequence[str]:
    """Returns the command of a worker: `python -m module` on a case."""
    return [python, "-m", module, case.to_json(), *([] if folder is None else [str(folder)])]


def count(text: str) -> int:
    """Parses a number of repeats from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got '{text}'")
    return int(text)


class Series:
    """The repeats of one worker. The first is the warm-up, which compiles."""

    def __init__(self, worker: Worker):
        self.worker = worker
        self.first = worker.repeat()
        self.repeats: list[dict[str, float]] = []

    def add(self) -> None:
        self.repeats.append(self.worker.repeat())

    def rates(self) -> list[float]:
        """Returns the useful tokens per second of each repeat."""
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
            "first": self.first,
            "first_s": self.first["seconds"],
            "compile_s": self.first["compile_s"],
            "programs": self.first["programs"],
            "later_programs": sum(repeat["programs"] for repeat in self.repeats),
            "repeats": self.repeats,
        }


def alternate(peer: Worker, ours: Worker, repeats: int) -> dict[str, Any]:
    """Runs both sides alternately. The side that starts a round changes from round to round. Returns the summary of
    each side, and the ratios of this library's useful tokens per second to the peer's and of the peer's peak memory to
    this library's."""
    sides = (Series(peer), Series(ours))
    for number in range(repeats):
        for side in sides if number % 2 == 0 else sides[::-1]:
            side.add()
    theirs, own = sides
    paired = [b / a for a, b in zip(theirs.rates(), own.rates(), strict=True)]
    found = {"peer": theirs.summary(), "ours": own.summary()}
    memory = found["peer"]["peak_mb"] / found["ours"]["peak_mb"]
    return found | {"ratio": median(paired), "ratio_min": min(paired), "ratio_max": max(paired), "memory": memory}


def median(values: Sequence[float]) -> float:
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
