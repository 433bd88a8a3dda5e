"""Coordinates the processes of a run: start, communication, and shutdown if one of them fails.

Every process runs the same program on one mesh of all devices, so all processes must take the same branches. Data that
only one process has (its share of the rewards, a signal, a file) is sent to all processes before it is used. With one
process, nothing is sent.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from tunix_like.errors import EngineLost, UserError, one_line

HEARTBEAT_SECONDS = 30
"""Seconds without a heartbeat after which a process counts as lost and the other processes are stopped."""

NOTE_SECONDS = 10
"""Seconds after which a process says that it waits for the others."""

START_SECONDS = 300
"""Seconds that a process waits for the other processes at the start."""

LEAVE_SECONDS = 15
"""Seconds that a finished process waits until the other processes have finished."""

EXIT_LOST = 70
"""Exit status after an error that was not sent to the other processes."""

Item = TypeVar("Item")


def start(coordinator: str | None = None, count: int | None = None, index: int | None = None) -> None:
    """Connects the processes of a run; must be called before any other use of jax. `coordinator` is `host:port` of
    process 0 (None: jax finds it from the scheduler or the TPU slice), `index` the number of this process, from 0."""
    # The preemption service would intercept SIGTERM, but a run must get SIGTERM to save a checkpoint and exit.
    jax.config.update("jax_enable_preemption_service", False)
    place = "" if coordinator is None else f" at {coordinator}"
    said = f"waiting for the other processes{place}"
    note = threading.Timer(NOTE_SECONDS, print, [said], {"file": sys.stderr, "flush": True})
    note.daemon = True
    note.start()
    try:
        _connect(coordinator, count, index)
    finally:
        note.cancel()
    if not is_first():
        for name in (None, "tunix_like"):
            logging.getLogger(name).setLevel(logging.ERROR)


def _connect(coordinator: str | None, count: int | None, index: int | None) -> None:
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
            initialization_timeout=2 * START_SECONDS,  # on this timeout jax aborts with a stack trace
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=LEAVE_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(_not_found(coordinator, str(error))) from error
    finally:
        late.cancel()


def start_pathways() -> None:
    """Registers the jax backend of Pathways, through which this single process drives all chips of all slices."""
    try:
        import pathwaysutils
    except ImportError as error:
        raise UserError(
            "JAX_PLATFORMS=proxy is the backend of Pathways, which needs pip install 'tunix-like[pathways]' "
            f"({one_line(error)}); unset the variable elsewhere."
        ) from error
    pathwaysutils.initialize()


def check_port(address: str) -> None:
    """Raises UserError if process 0 cannot listen on the port of `address` (`host:port`). The service of jax
    would crash with a segmentation fault."""
    port = _split(address)[1]
    if "JAX_COORDINATOR_BIND_ADDRESS" in os.environ:  # jax listens on the address in this variable instead of `address`
        return
    dualstack = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dualstack else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=dualstack).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"--coordinator {address}: port {port} is in use by another run or program on this machine; give all "
                "processes another port."
            ) from None
        raise UserError(f"--coordinator {address}: cannot listen on port {port}: {error.strerror or error}.") from None


def wait_for(address: str, seconds: float) -> None:
    """Waits until a server listens at `address`. Raises UserError if there is none within `seconds`; the client of jax
    would abort the process."""
    host, port = _split(address)
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=5.0).close()
            return
        except OSError as error:  # the server has not started, or its host name cannot be resolved yet
            why = error.strerror or error
        if time.monotonic() > end:
            raise UserError(
                f"--coordinator {address}: no answer after {seconds:g} seconds ({why}). Start process 0 on that host "
                "with the same address, and check that the port can be reached from this machine."
            )
        time.sleep(0.25)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not 0 < int(port) < 65536:
        raise UserError(f"--coordinator {address}: port {port} is not valid; give one from 1 to 65535.")
    return host.strip("[]"), int(port)


def _not_found(coordinator: str | None, why: str) -> str:
    where = "from the environment variables" if coordinator is None else f"at {coordinator}"
    return (
        f"the processes of this run did not find each other {where} ({why}). Start every process with the same "
        "--coordinator HOST:PORT (of process 0) and --num-processes, and with its own --process-id."
    )


def _leave_late(coordinator: str | None) -> NoReturn:
    """Exits this process, which waits inside jax for the others; an exception could not interrupt this wait."""
    why = f"not all processes connected within {START_SECONDS} seconds"
    print(f"error: {_not_found(coordinator, why)}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(UserError.status)


def is_first() -> bool:
    """Returns whether this is process 0, which writes files and prints."""
    return jax.process_index() == 0


def gather(value: Any) -> list[Any]:
    """Returns the `value` of every process, in process order; `value` must be JSON-serialisable."""
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.int32(len(data)))).reshape(-1)
    width = 1 << int(sizes.max() - 1).bit_length()  # a power of two, so that few shapes are compiled
    rows = np.asarray(multihost_utils.process_allgather(np.pad(data, (0, width - len(data)))))
    return [json.loads(bytes(row[:size])) for row, size in zip(rows.reshape(len(sizes), width), sizes, strict=True)]


def across_processes(items: Sequence[Item], work: Callable[[Sequence[Item]], list[Any]]) -> list[Any]:
    """Divides `items` among the processes and returns the results of all items in every process. `work` gets a
    contiguous share and returns one JSON value per item. A UserError of one process is raised in all."""
    own = share(len(items))
    return [result for part in all_or_none(lambda: work(items[own.start : own.stop])) for result in part]


def share(count: int) -> range:
    bounds = np.linspace(0, count, jax.process_count() + 1).astype(int)
    return range(bounds[jax.process_index()], bounds[jax.process_index() + 1])


def by_first(work: Callable[[], Any]) -> Any:
    """Calls `work` in process 0 only and returns its result, or raises its UserError, in every process."""
    return all_or_none(lambda: work() if is_first() else None)[0]


def any_of(here: bool) -> bool:
    """Returns whether `here` is True in at least one process."""
    return any(gather(here))


def all_or_none(work: Callable[[], Any]) -> list[Any]:
    """Calls `work` in every process. Returns their results (JSON values), in process order, or raises the first
    UserError in every process."""
    try:
        outcome = {"result": work()}
    except UserError as error:
        if jax.process_count() == 1:
            raise
        outcome = {"error": str(error), "lost": isinstance(error, EngineLost)}
    answers = gather(outcome)
    for answer in answers:
        if "error" in answer:
            raise (EngineLost if answer["lost"] else UserError)(answer["error"])
    return [answer["result"] for answer in answers]


def leave_refused(status: int) -> NoReturn:
    """Exits this process after invalid input; a normal exit would wait for the other processes and then abort. Process
    0 waits a second longer than the others, because jax stops them when it is gone, before they have printed their
    errors."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(2 if is_first() else 1)
    os._exit(status)


def leave(error: BaseException) -> NoReturn:
    """Prints `error` and exits this process immediately. A normal exit would wait for the other processes, while they
    wait for this process."""
    traceback.print_exception(error, limit=-1 if isinstance(error, jax.errors.JaxRuntimeError) else None)
    print(
        f"process {jax.process_index()} of {jax.process_count()} stops: the error above is from this process, or the "
        "connection failed because another process is gone. Start all processes again with the same command: the run "
        "resumes from its newest checkpoint, or starts from the beginning if there is none.",
        file=sys.stderr,
        flush=True,
    )
    sys.stdout.flush()
    os._exit(EXIT_LOST)
