"""The program of the processes that run environments: loads the user's environment or tools, and answers calls."""

from __future__ import annotations

import gc
import json
import os
import pickle
import resource
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tunix_like.environments import deadline
from tunix_like.environments.adapters import Adapted, Trajectory, as_environment
from tunix_like.environments.outcomes import failure_of
from tunix_like.environments.registry import ENVIRONMENTS, environment_place, resolve
from tunix_like.errors import UserError
from tunix_like.rewards.environment_state import plain_attributes
from tunix_like.runtime.user_code import load_function
from tunix_like.workers.child import adopt_orphans, send, serve
from tunix_like.workers.fork_server import SIGNALS, run
from tunix_like.workers.process import children_of

_LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})


def settings_of(place: str | Sequence[str], arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the settings of the process: the location of an environment and its arguments, or the locations of tools.

    Args:
      place: the name or location of an environment, or the locations of tools.

    Raises:
      UserError: another process cannot import the environment, the arguments cannot be written as JSON, or arguments
        are given for tools.
    """
    if not isinstance(place, str):
        if arguments:
            raise UserError("environment.arguments: tools take no arguments; set environment.name to a class.")
        return {"tools": list(place)}
    try:
        json.dumps(settings := {"environment": place, "arguments": dict(arguments or {})})
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"environment.arguments: they cannot be written as JSON ({error}); use plain values."
        ) from error
    if place in ENVIRONMENTS:
        settings["environment"] = environment_place(place, resolve(place))
    return settings


def load(settings: Mapping[str, Any]) -> Adapted:
    """Loads an environment, or functions that are tools.

    Raises:
      UserError: the code cannot be loaded (see `load_function`), or cannot be an environment or a tool (see
        `as_environment`).
    """
    if "tools" in settings:
        return as_environment([load_function(tool, "Tool") for tool in settings["tools"]])
    return as_environment(load_function(settings["environment"], "Environment"), settings["arguments"])


def main(channel: socket.socket, settings: Mapping[str, Any]) -> None:
    """Loads the environment, and runs the fork server. The first message to the training process is `{"tools": [...]}`,
    or `{"failure": [kind, reason]}` if the environment cannot be loaded."""
    adopt_orphans()
    try:
        adapted = load(settings)
        ready = {"tools": adapted.tools()}
        json.dumps(ready)
    except BaseException as error:  # includes SystemExit
        name = settings.get("environment", "tools")
        return send(channel, {"failure": failure_of(name, error)})
    run(channel, ready, lambda channel: _answer_calls(channel, adapted))


def _answer_calls(channel: socket.socket, adapted: Adapted) -> None:
    """Answers the calls of one trajectory after the other.

    A call is `("reset", (columns, moment), seconds)`, `("step", text, seconds)` or `("finish", None, seconds)`.
    `seconds` is the time limit of the call. An answer is `{"observation": ...}` for `reset`, all fields of an
    `EnvStepResult` for `step`, `{"reward": ..., "attributes": plain attributes of the environment, "reusable": whether
    this process can run another trajectory}` for `finish`, or `{"failure": [kind, reason]}`.
    """
    before = _surroundings()
    trajectory: Trajectory | None = None

    def answer(request: bytes) -> Mapping[str, Any]:
        nonlocal trajectory
        what, given, seconds = pickle.loads(request)
        deadline.set_limit(seconds)
        if what == "reset":
            columns, moment = given
            trajectory = adapted.start(columns)
            return {"observation": trajectory.reset(columns, moment)}
        assert trajectory is not None
        if what == "step":
            return trajectory.step(given)._asdict()
        end: dict[str, Any] = {"reward": trajectory.finish()}
        if (environment := getattr(trajectory, "environment", None)) is not None:  # None: plain functions as tools
            end["attributes"] = plain_attributes(environment)
        trajectory = environment = None  # frees the object within the time limit of the call
        gc.collect()
        return {**end, "reusable": _surroundings() == before}

    serve(channel, answer, lambda error: {"failure": failure_of(adapted.name, error)})


def _surroundings() -> tuple[Any, ...]:
    """Returns what an environment can change or leave behind in its process and what could disturb the next trajectory
    there: processes, threads, open files, timers, signal handlers, limits, directory and environment variables."""
    return (
        sys.platform == "linux" or object(),  # elsewhere, remaining processes cannot be found
        list(children_of(os.getpid())),
        threading.active_count(),
        len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0,
        signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        [signal.getsignal(number) for number in (*SIGNALS, signal.SIGPIPE, signal.SIGUSR1, signal.SIGUSR2)],
        [resource.getrlimit(number) for number in _LIMITS],
        os.getcwd(),
        dict(os.environb),
    )
