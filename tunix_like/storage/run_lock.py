"""Locks a run folder, so that only one run at a time can write to it.

The lock is the JSON file `run.lock`. The process that creates this file owns the lock. The owner touches the file (sets
its modification time) every `BEAT_SECONDS`. If the owner has exited, another process can take over the lock. A process
on the same host (and in the same boot and process namespace) can look up the owner's process, and takes over the lock
at once. Any other process watches the lock, and takes it over if it is not touched for `PATIENCE_SECONDS`. Clocks need
not be synchronised.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tunix_like.errors import UserError
from tunix_like.runtime.processes import by_first, is_first

logger = logging.getLogger("tunix_like")

FILE = "run.lock"

BEAT_SECONDS = 30.0
"""Seconds between two touches of the lock by its owner."""

PATIENCE_SECONDS = 180.0
"""Seconds without a touch after which a lock of another machine counts as abandoned. Network file systems may show a
touch a minute late."""

_LOOKS = 4
"""Number of attempts to read an existing lock before it counts as lost. The wait after each attempt is a second longer
than the wait before it."""

_owned: dict[Path, int] = {}
"""Maps the path of each lock that this process owns to the id of the thread that took the lock."""


@contextlib.contextmanager
def owned(folder: str | Path | None) -> Iterator[Callable[[], None]]:
    """Locks `folder` for this run of one or several processes, and creates the folder if it does not exist.

    The thread that took the lock may enter `owned` again for the same folder. If `folder` is None, nothing is locked.

    Yields:
      a function that all processes of this run must call before they write. The function raises `UserError` if another
      run has taken over the folder, which is possible if this run was suspended for longer than `PATIENCE_SECONDS`.

    Raises:
      UserError: another process owns the folder (the message names its process id and host), or the lock cannot be
        written.
    """
    if folder is None:
        yield lambda: None
        return
    lock = Path(folder).absolute() / FILE
    check = lambda: by_first(lambda: _check(lock))  # noqa: E731
    if _owned.get(lock) == threading.get_ident():
        yield check
        return
    by_first(lambda: _take(lock))
    _owned[lock] = threading.get_ident()
    done = threading.Event()
    if is_first():
        threading.Thread(target=_beat, args=(lock, done), name="run lock", daemon=True).start()
    try:
        yield check
    finally:
        done.set()
        del _owned[lock]
        if is_first() and _read(lock) == _me():
            with contextlib.suppress(OSError):
                lock.unlink()


def _check(lock: Path) -> None:
    for look in range(_LOOKS):
        if (owner := _read(lock)) == _me():
            return
        if owner or _gone(lock):
            break
        time.sleep(look)  # a network file system may temporarily fail to read an existing file
    if _gone(lock.parent):
        raise UserError(
            f"{lock.parent} was deleted while this run was active. Nothing more is written; the same command starts "
            "a new run."
        )
    if not owner and _gone(lock):
        raise UserError(
            f"{lock} was deleted while this run was active, so another run may have started. Nothing more is written; "
            "start it again to resume from the newest checkpoint."
        )
    raise UserError(
        f"{lock.parent} is no longer this process's run: it was taken over by {_called(owner)} ({lock}). Nothing more "
        "is written; the other process resumes from the newest checkpoint."
    )


def _called(owner: dict[str, Any]) -> str:
    """Describes the owner of a lock for a message."""
    if not owner:
        return "an unknown process (the lock is empty or cannot be read)"
    return f"process {owner.get('pid')} on {owner.get('host')}"


def _take(lock: Path) -> None:
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        while not _create(lock):
            _wait_until_gone(lock)
    except OSError as error:
        raise UserError(f"{lock} cannot be written ({error}); choose another training.output_dir.") from error


def _create(lock: Path) -> bool:
    """Creates the lock file. Returns False if it already exists. If several processes try at once, exactly one
    succeeds."""
    try:
        file = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    try:
        os.write(file, json.dumps(_me()).encode())
    except OSError:
        lock.unlink()
        raise
    finally:
        os.close(file)
    return True


def _wait_until_gone(lock: Path) -> None:
    """Removes the lock if its owner has exited, and raises `UserError` if the owner is alive. If the owner's process
    cannot be looked up (e.g. on another host), watches the lock for up to `PATIENCE_SECONDS` to find out."""
    owner = _read(lock)
    if not owner:  # the file was just created and is not yet written
        time.sleep(0.5)
        owner = _read(lock)
    message = f"{lock.parent} is in use by {_called(owner)} ({lock})"
    cure = "Wait for it, stop it, or choose another training.output_dir."
    if _within_reach(owner):
        if owner.get("began") == _began(owner["pid"]):
            raise UserError(f"{message}. {cure}")
        logger.warning(
            "%s: process %s, which owned this run, is gone; its lock is taken over", lock.parent, owner["pid"]
        )
    elif not _untouched(lock, message):
        raise UserError(f"{message}, which is alive. {cure} If that process has exited, remove that file.")
    _remove(lock, owner)


def _untouched(lock: Path, message: str) -> bool:
    """Watches a lock for `PATIENCE_SECONDS`, to find out whether its owner is alive. Returns False as soon as the lock
    is touched. Returns True if the lock is removed or is not touched in this time."""
    logger.warning("%s; waiting up to %g s to check whether that process is alive", message, PATIENCE_SECONDS)
    before, end = _touched(lock), time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        time.sleep(min(1.0, PATIENCE_SECONDS / 10))
        now = _touched(lock)
        if now is None:
            return True
        if now != before:
            return False
    logger.warning("%s; the lock was not touched in that time and is taken over", message)
    return True


def _remove(lock: Path, owner: dict[str, Any]) -> None:
    """Removes the lock of an owner that has exited, but not a lock that another process has created in its place."""
    folder = os.open(lock.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # without flock a race of microseconds remains, which `_check` detects
            fcntl.flock(folder, fcntl.LOCK_EX)
        if _read(lock) == owner:
            lock.unlink(missing_ok=True)
    finally:
        os.close(folder)


def _beat(lock: Path, done: threading.Event) -> None:
    while not done.wait(BEAT_SECONDS):
        with contextlib.suppress(OSError):
            if _read(lock) == _me():
                os.utime(lock)


def _me() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "place": _place(), "began": _began(os.getpid())}


def _place() -> str | None:
    """Returns the boot id of this machine and the namespace of its process ids as one text; None if they are
    unavailable. Two processes with equal texts have different process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _began(pid: int) -> str | None:
    """Returns the start time of a process in ticks since boot, which distinguishes the process from a later process
    with the same id. Returns "?" if the system does not provide the start time, and None if the process does not exist
    or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except OSError:
        if Path("/proc/self").exists():
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "?"


def _within_reach(owner: dict[str, Any]) -> bool:
    """Returns whether the owner of a lock runs in the same host, boot and process namespace as this process. Only then
    can the process id of the owner be looked up."""
    me = _me()
    return all(owner.get(name, "") == me[name] for name in ("host", "place"))


def _read(lock: Path) -> dict[str, Any]:
    """Returns the description of the owner in a lock file; an empty dict if the file does not exist, cannot be read or
    has no valid content."""
    try:
        owner = json.loads(lock.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _gone(lock: Path) -> bool:
    try:
        lock.stat()
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False


def _touched(lock: Path) -> int | None:
    try:
        return lock.stat().st_mtime_ns
    except FileNotFoundError:
        return None
