"""Where a step's time goes: laps of its clock, programs compiled meanwhile, the device's peak, a profiler trace.

It knows jax and its devices; no model and no training. Which program is being compiled it tells `progress`.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from tunix_like.errors import UserError
from tunix_like.runtime import progress

logger = logging.getLogger("tunix_like")

PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L4": 121e12,
}
"""Beginning of a device's kind to its dense bfloat16 operations per second, from the makers' data sheets."""


def peak_flops() -> float | None:
    """Of all devices together; None where it is not known."""
    kind = jax.devices()[0].device_kind
    known = [name for name in PEAK_FLOPS if kind.startswith(name)]
    return PEAK_FLOPS[max(known, key=len)] * jax.device_count() if known else None


class Clock:
    """Splits wall time into named laps, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[f"time/{name}"] = self.seconds.get(f"time/{name}", 0.0) + now - self._last
        self._last = now


class Compilations:
    """Programs that XLA built (or took from the compilation cache) since the last `take`, and the seconds it took."""

    def __init__(self) -> None:
        self._seen = len(_DURATIONS)

    def take(self) -> tuple[int, float]:
        new = _DURATIONS[self._seen :]
        self._seen += len(new)
        return len(new), sum(new)


_DURATIONS: list[float] = []


_COMPILE = "/jax/core/compile/backend_compile_duration"


def _on_event(event: str, duration_secs: float, **_: str | int) -> None:
    if event == _COMPILE:
        _DURATIONS.append(duration_secs)
        progress.compiling(None)


def _on_begin(event: str, value: float, **known: str | int) -> None:
    """jax tells of a duration twice: when it begins, with its time as the value, and when it is over."""
    if event == _COMPILE:
        name = re.sub(r"^jit\((.*)\)$", r"\1", str(known.get("fun_name", "a program")))
        progress.compiling("decoding" if name == "advance" else name)


jax.monitoring.register_event_duration_secs_listener(_on_event)
jax.monitoring.register_scalar_listener(_on_begin)


def check_profile_steps(steps: Sequence[int] | None) -> None:
    """Raises UserError where `training.profile_steps` is no first and last step."""
    if steps is not None and (len(steps) != 2 or not 1 <= steps[0] <= steps[1]):
        raise UserError(f"training.profile_steps: expected the first and the last step, e.g. [5, 6], got {steps}.")


class Profile:
    """A profiler trace of some steps.

    Args:
      steps: the first and the last of them, or None for no trace.
      folder: of the run; the trace goes into its `profile/`.

    Raises:
      UserError: there is no folder, or `steps` is no pair of numbers in order.
    """

    def __init__(self, steps: Sequence[int] | None, folder: Path | None) -> None:
        self.steps, self.folder = steps, folder
        self._running = False
        check_profile_steps(steps)
        if steps is not None and folder is None:
            raise UserError("training.profile_steps: the trace needs a place; set training.output_dir.")

    @contextlib.contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Around each step: starts the trace before the first of them, and ends it after the last or on an error."""
        if self.steps is None or self.folder is None or not self.steps[0] <= step <= self.steps[1]:
            yield
            return
        if not self._running:  # at the first of them, or where a resumed run comes in
            jax.profiler.start_trace(str(self.folder / "profile"))
            self._running = True
        over = True
        try:
            yield
            over = step == self.steps[1]
        finally:
            if over:
                self.close()

    def close(self) -> None:
        """Ends a trace that is running: the run is over."""
        if self._running and self.folder is not None:
            self._running = False
            jax.profiler.stop_trace()
            logger.warning("a profile is in %s; open it in XProf", self.folder / "profile")
