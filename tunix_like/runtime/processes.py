"""Several processes as one run: how they find each other, who does what, and an end when one of them is gone.

Every process runs the same program over one mesh of all devices, so each must take the same turn at every branch: what
only one process can know (its share of the rewards, a signal, a file) is told to all before anything depends on it.
Alone, a process does everything itself and nothing is sent. This module knows no model and no training.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from tunix_like.errors import UserError
from tunix_like.runtime.coordinator import check_port, wait_for

HEARTBEAT_SECONDS = 30
"""After so long without a sign of life a process counts as gone, and the others are stopped."""

START_SECONDS = 300
"""How long a process waits for the others at the start."""

LEAVE_SECONDS = 15
"""How long a process that is done waits for the others."""

EXIT_LOST = 70
"""Exit status after an error that the other processes do not know of."""

Item = TypeVar("Item")


def start(coordinator: str | None = None, count: int | None = None, index: int | None = None) -> None:
    """Joins the processes of a run, before anything else is asked of jax.

    Args:
      coordinator: `host:port` of process 0, the same for all. None: as the scheduler or the TPU slice says.
      count, index: how many processes there are, and the number of this one, from 0.

    Raises:
      UserError: they do not find each other.
    """
    # It would swallow SIGTERM, after which a run saves itself and ends.
    jax.config.update("jax_enable_preemption_service", False)
    if coordinator is not None and index == 0:
        check_port(coordinator)
    elif coordinator is not None:
        wait_for(coordinator, START_SECONDS)
    late = threading.Timer(START_SECONDS, _leave_late, [coordinator])
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            coordinator,
            count,
            index,
            initialization_timeout=2 * START_SECONDS,  # at its end jax aborts with a stack trace
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=LEAVE_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(_not_found(coordinator, str(error))) from error
    finally:
        late.cancel()
    if not is_first():
        for name in (None, "tunix_like"):
            logging.getLogger(name).setLevel(logging.ERROR)


def _not_found(coordinator: str | None, why: str) -> str:
    where = "as the environment says" if coordinator is None else f"at {coordinator}"
    return (
        f"the processes of this run did not find each other {where} ({why}). Start every one of them with the same "
        "--coordinator HOST:PORT (process 0's) and --num-processes, and its own --process-id."
    )


def _leave_late(coordinator: str | None) -> NoReturn:
    """Ends this process, which waits inside jax for the others, where no exception reaches it."""
    print(f"error: {_not_found(coordinator, f'not all are there after {START_SECONDS} seconds')}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(UserError.status)


def is_first() -> bool:
    """Whether this is the process that writes files and talks."""
    return jax.process_index() == 0


def gather(value: Any) -> list[Any]:
    """What every process has, in their order; `value` is anything that JSON keeps."""
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.int32(len(data)))).reshape(-1)
    room = 1 << int(sizes.max() - 1).bit_length()  # few shapes: each is compiled once
    rows = np.asarray(multihost_utils.process_allgather(np.pad(data, (0, room - len(data)))))
    return [json.loads(bytes(row[:size])) for row, size in zip(rows.reshape(len(sizes), room), sizes, strict=True)]


def spread(items: Sequence[Item], work: Callable[[Sequence[Item]], list[Any]]) -> list[Any]:
    """`work(items)`, a list with one result an item, each process doing its share of neighbouring items.

    Results are sent as JSON, and so are lists, dicts, text, numbers or None where there are several processes.

    Raises:
      UserError: in every process, what was raised in the first that raised one.
    """
    if jax.process_count() == 1:
        return work(items)
    bounds = np.linspace(0, len(items), jax.process_count() + 1).astype(int)
    start, stop = bounds[jax.process_index()], bounds[jax.process_index() + 1]
    return [result for part in _all_or_none(lambda: work(items[start:stop])) for result in part]


def by_first(work: Callable[[], Any]) -> Any:
    """What `work` returns in process 0, the only one to do it.

    Raises:
      UserError: in every process, what process 0 raised.
    """
    return _all_or_none(lambda: work() if is_first() else None)[0]


def any_of(here: bool) -> bool:
    """Whether it is so in any process."""
    return any(gather(here))


def _all_or_none(work: Callable[[], Any]) -> list[Any]:
    try:
        told = {"result": work()}
    except UserError as error:
        if jax.process_count() == 1:
            raise
        told = {"error": str(error)}
    answers = gather(told)
    for answer in answers:
        if "error" in answer:
            raise UserError(answer["error"])
    return [answer["result"] for answer in answers]


def leave_refused(status: int) -> NoReturn:
    """Ends this process after bad input that it alone may know of. A usual end would wait for the others for
    `LEAVE_SECONDS` and then abort; process 0, whom the others watch, ends last, so that all can say what they know."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(2 if is_first() else 1)
    os._exit(status)


def leave(error: BaseException) -> NoReturn:
    """Ends this process at once after an error of its own. A usual end would wait for the others, who wait for it."""
    traceback.print_exception(error, limit=-1 if isinstance(error, jax.errors.JaxRuntimeError) else None)
    print(
        f"process {jax.process_index()} of {jax.process_count()} stops: the error above is its own, or another process "
        "is gone (then their connection is what failed). Start all of them again with the same command: the run goes "
        "on from its newest checkpoint, or from the start where there is none.",
        file=sys.stderr,
        flush=True,
    )
    sys.stdout.flush()
    os._exit(EXIT_LOST)
