"""Runs environments in this process, without deadlines. Use this module for trusted environments, and for classes that
are defined in a function or a notebook."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tunix_like.environments.adapters import Adapted, Trajectory, as_environment
from tunix_like.environments.outcomes import Outcome, failure_of
from tunix_like.runtime.moment import START, Moment


class LocalEnvironments:
    """Runs environments in this process (see `Environments`). The methods `reset`, `step` and `finish` return after the
    environment has answered.

    An exception in an environment ends only the trajectory of this environment. An environment that hangs or ends the
    process stops the run; use `EnvironmentPool` for such environments.

    Args:
      factory: a class or a function that makes environments, or a list of functions that are tools.

    Raises:
      UserError: `factory` cannot make environments.
    """

    where = "in this process"
    workers = 0

    def __init__(self, factory: Callable[..., Any] | Sequence[Callable[..., Any]] | Adapted):
        self._adapted = as_environment(factory)
        self._tools: list[Mapping[str, Any]] | None = None
        self._trajectories: dict[int, Trajectory] = {}
        self._ready: list[Outcome] = []

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        if self._tools is None:
            self._tools = self._adapted.tools()
        return self._tools

    def reset(self, number: int, columns: Mapping[str, Any], moment: Moment = START) -> None:
        if number in self._trajectories:
            raise ValueError(f"Trajectory {number} already has an environment; finish it first.")

        def start() -> Outcome:
            self._trajectories[number] = trajectory = self._adapted.start(columns)
            return Outcome(number, trajectory.reset(columns, moment))

        self._run(number, start)

    def step(self, number: int, completion: str) -> None:
        if number not in self._trajectories:
            raise ValueError(f"Trajectory {number} has no environment; reset it first.")
        self._run(number, lambda: Outcome(number, *self._trajectories[number].step(completion)))

    def finish(self, number: int) -> None:
        trajectory = self._trajectories.get(number)
        if trajectory is None:
            self._ready.append(Outcome(number))
            return
        environment = getattr(trajectory, "environment", None)
        self._run(number, lambda: Outcome(number, reward=trajectory.finish(), environment=environment))
        self._trajectories.pop(number, None)

    def outcomes(self, wait: bool) -> list[Outcome]:
        """See `Environments.outcomes`. The outcomes are always ready."""
        ready = self._ready
        self._ready = []
        return ready

    def close(self) -> None:
        self._trajectories.clear()
        self._ready.clear()

    def _run(self, number: int, call: Callable[[], Outcome]) -> None:
        start = time.perf_counter()
        try:
            outcome = call()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # includes SystemExit and asyncio.CancelledError
            outcome = Outcome(number, failure=failure_of(self._adapted.name, error))
            self._trajectories.pop(number, None)
        self._ready.append(outcome._replace(called=(start, time.perf_counter())))
