"""Measures training steps: wall time by activity, compilations, profiler traces, and the peak FLOPs of the devices.

Importing this module registers listeners that report jax compilations to `progress`.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax

from tunix_like.errors import UserError
from tunix_like.runtime import progress, trace
from tunix_like.runtime.accelerators import PEAK_FLOPS, known_name

logger = logging.getLogger("tunix_like")


def peak_flops() -> float | None:
    """Returns the sum of the peak bfloat16 FLOPs per second of all devices; None if the kind of device is unknown."""
    name = known_name(jax.devices()[0].device_kind)
    return None if name is None else PEAK_FLOPS[name] * jax.device_count()


class Clock:
    """Adds up wall time in seconds by the name of an activity; the keys of `seconds` are `time/<name>`. Activities are
    events of the trace."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str, traced: bool = True) -> None:
        """Adds the time since the previous call of `lap` to the total of the activity `name`. `traced`: the calling
        thread did only this in that time."""
        now = time.perf_counter()
        if traced:
            trace.add(name, self._last, now)
        self.seconds[f"time/{name}"] = self.seconds.get(f"time/{name}", 0.0) + now - self._last
        self._last = now

    def move(self, seconds: float, source: str, target: str) -> None:
        """Moves a part of the time of the activity `source` to the activity `target`."""
        for name, change in ((source, -seconds), (target, seconds)):
            self.seconds[f"time/{name}"] = self.seconds.get(f"time/{name}", 0.0) + change


class Compilations:
    """Counts the programs that XLA compiled (or loaded from the compilation cache), and the seconds of compilation."""

    def __init__(self) -> None:
        self._seen = len(_DURATIONS)

    def take(self) -> tuple[int, float]:
        """Returns the number of compilations since the last call of `take`, and their total seconds."""
        new = _DURATIONS[self._seen :]
        self._seen += len(new)
        return len(new), sum(new)


class Stopwatch:
    """Measures seconds since its construction, without compilations."""

    def __init__(self) -> None:
        self._compilations = Compilations()
        self._began = time.perf_counter()
        self._compiled = 0.0

    def seconds(self) -> float:
        self._compiled += self._compilations.take()[1]
        return max(time.perf_counter() - self._began - self._compiled, 1e-9)


_DURATIONS: list[float] = []


_COMPILE = "/jax/core/compile/backend_compile_duration"


def _program(metadata: Mapping[str, str | int]) -> str:
    name = re.sub(r"^jit\((.*)\)$", r"\1", str(metadata.get("fun_name", "a program")))
    return "decoding" if name == "advance" else name


def _on_event(event: str, duration_secs: float, **metadata: str | int) -> None:
    if event == _COMPILE:
        _DURATIONS.append(duration_secs)
        now = time.perf_counter()
        trace.add(f"compile {_program(metadata)}", now - duration_secs, now)
        progress.compiling(None)


def _on_begin(event: str, value: float, **metadata: str | int) -> None:
    """jax sends a scalar event at the start of a compilation and a duration event at its end."""
    if event == _COMPILE:
        progress.compiling(_program(metadata))


jax.monitoring.register_event_duration_secs_listener(_on_event)
jax.monitoring.register_scalar_listener(_on_begin)


def check_profile_steps(steps: Sequence[int] | None) -> None:
    """Raises UserError if `training.profile_steps` is not a pair of a first and a last step."""
    if steps is not None and (len(steps) != 2 or not 1 <= steps[0] <= steps[1]):
        raise UserError(f"training.profile_steps: expected the first and the last step, e.g. [5, 6], got {steps}.")


class Profile:
    """Writes a profiler trace of the steps `steps[0]` to `steps[1]` to `folder/profile`."""

    def __init__(self, steps: Sequence[int] | None, folder: Path | None) -> None:
        self.steps = steps
        self.folder = folder
        self._running = False
        check_profile_steps(steps)
        if steps is not None and folder is None:
            raise UserError("training.profile_steps: the trace needs an output folder; set training.output_dir.")

    @contextlib.contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Starts the profiler trace before the first step to be traced, and stops it after the last one or on an error.
        This context manager must enclose each training step."""
        if self.steps is None or self.folder is None or not self.steps[0] <= step <= self.steps[1]:
            yield
            return
        if not self._running:  # at the first step, or at the first step of a resumed run
            jax.profiler.start_trace(str(self.folder / "profile"))
            self._running = True
        ended = True
        try:
            yield
            ended = step == self.steps[1]
        finally:
            if ended:
                self.close()

    def close(self) -> None:
        """Stops the profiler trace if it is running. Must be called at the end of the run."""
        if self._running and self.folder is not None:
            self._running = False
            jax.profiler.stop_trace()
            logger.warning("profiler trace written to %s; open it in XProf", self.folder / "profile")
