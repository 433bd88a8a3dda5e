"""The program of the processes that call reward functions (see `pool.py`)."""

from __future__ import annotations

import io
import pickle
import socket
from collections.abc import Callable, Mapping
from typing import Any

from tunix_like.rewards.calls import WrongCount, call
from tunix_like.runtime.user_code import load_function
from tunix_like.workers.child import send, serve
from tunix_like.workers.failures import Failure, explain


def main(channel: socket.socket, places: list[str]) -> None:
    """Loads the functions at `places`, sends `{}`, and answers calls. If a function cannot be loaded, only its own
    calls fail.

    A call is two pickled tuples, `(place, name, count)` and `(arguments,)`. An answer is `{"rewards": [...],
    "failures": [[index, kind, reason], ...]}`, or `{"failure": [kind, reason], "of_all": whether the failure concerns
    all completions of the call}`.
    """
    name = "?"
    functions = {place: _load(place) for place in places}
    send(channel, {})

    def answer(request: bytes) -> Mapping[str, Any]:
        nonlocal name
        stream = io.BytesIO(request)
        place, name, count = pickle.load(stream)
        found = functions[place]
        if isinstance(found, str):
            reason = f"Reward function '{name}' could not be loaded in a worker. {found}"
            return {"failure": Failure("error", reason), "of_all": True}
        (arguments,) = pickle.load(stream)  # after the name, because this can fail
        results = call(name, found, arguments, count)
        failures = [[i, *failure] for i, failure in results.failures.items()]
        return {"rewards": results.values(), "failures": failures}

    def failed(error: BaseException) -> Mapping[str, Any]:
        return {"failure": Failure("error", explain(name, error)), "of_all": isinstance(error, WrongCount)}

    serve(channel, answer, failed)


def _load(place: str) -> Callable[..., Any] | str:
    """Returns the function at `place`, or the reason why it cannot be loaded."""
    try:
        return load_function(place, "Reward")
    except BaseException as error:  # includes SystemExit
        return explain(place, error)
