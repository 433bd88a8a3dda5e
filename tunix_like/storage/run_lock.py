"""One process at a time trains into a run folder: `run.lock` says which, and whether it is still there.

The lock is a file of JSON, made only where there is none. Its owner touches it every `BEAT_SECONDS`. A lock whose owner
is gone is taken over: at once where the process can be looked up (same host, boot and process namespace), else after
`PATIENCE_SECONDS` without a touch, which need no clocks that agree. This module knows no training.
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
"""How often the owner touches its lock."""

PATIENCE_SECONDS = 180.0
"""How long a lock of another machine must stay untouched to be nobody's. Network file systems may show a touch a minute
late."""

_LOOKS = 4
"""How often a lock that is there and cannot be read is looked at before it counts as lost, a second later each time."""

_owned: dict[Path, int] = {}
"""The folders that this process owns, and the thread that took each."""


@contextlib.contextmanager
def owned(folder: str | Path | None) -> Iterator[Callable[[], None]]:
    """Inside, this run (of one or several processes) is the only one that writes to `folder`, which is made if absent.
    The thread that owns a folder may own it again. None: there is no folder, and nothing to own.

    Yields:
      a function for all processes to call before they write: it raises `UserError` if the run was taken over by
      another one all the same, because this one stood still for longer than `PATIENCE_SECONDS`.

    Raises:
      UserError: another process is at work there, named by its number and host; or the lock cannot be written.
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
        time.sleep(look)  # a network disk may fail to read a file that is there
    if _gone(lock.parent):
        raise UserError(
            f"{lock.parent} was deleted while this run was at work. Nothing more is written; the same command starts "
            "anew."
        )
    if not owner and _gone(lock):
        raise UserError(
            f"{lock} was deleted while this run was at work, so that another one may have begun. Nothing more is "
            "written; start it again to go on from the newest checkpoint."
        )
    raise UserError(
        f"{lock.parent} is no longer this process's run: {lock} names {_called(owner)}. Nothing more is written; that "
        "process goes on from the newest checkpoint."
    )


def _called(owner: dict[str, Any]) -> str:
    """The owner of a lock, for a message."""
    if not owner:
        return "a process that its lock does not name (the file is empty or cannot be read)"
    return f"process {owner.get('pid')} on {owner.get('host')}"


def _take(lock: Path) -> None:
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        while not _create(lock):
            _wait_until_gone(lock)
    except OSError as error:
        raise UserError(f"{lock} cannot be written ({error}); choose another training.output_dir.") from error


def _create(lock: Path) -> bool:
    """Makes the lock, which exactly one of several processes can. False where there is one."""
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
    """Returns when there is no lock any more: its owner left or was found dead. Raises `UserError` otherwise."""
    owner = _read(lock)
    if not owner:  # just made, and about to be written
        time.sleep(0.5)
        owner = _read(lock)
    said = f"{lock.parent} is in use by {_called(owner)} ({lock})"
    cure = "Wait for it, stop it, or choose another training.output_dir."
    if _within_reach(owner):
        if owner.get("began") == _began(owner["pid"]):
            raise UserError(f"{said}. {cure}")
        logger.warning("%s: process %s, which had this run, is gone; its lock is taken over", lock.parent, owner["pid"])
    elif not _untouched(lock, said):
        raise UserError(f"{said}, which is alive. {cure} If you know better, remove that file.")
    _remove(lock, owner)


def _untouched(lock: Path, said: str) -> bool:
    """Watches a lock of another machine; False as soon as it is touched."""
    logger.warning("%s; waiting up to %g s to see whether that process is alive", said, PATIENCE_SECONDS)
    before, end = _touched(lock), time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        time.sleep(min(1.0, PATIENCE_SECONDS / 10))
        now = _touched(lock)
        if now is None:
            return True
        if now != before:
            return False
    logger.warning("%s gave no sign of life in that time; its lock is taken over", said)
    return True


def _remove(lock: Path, owner: dict[str, Any]) -> None:
    """Removes the lock of a dead owner, and none that was made meanwhile by one who found it dead too."""
    folder = os.open(lock.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without it leaves a gap of microseconds; `_check` sees it
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
    """The boot and the process namespace that process numbers mean something in; None where they cannot be had."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _began(pid: int) -> str | None:
    """When a process began, in ticks since boot, which tells it from a later one of the same number ("?" where the
    system does not say). None: there is none, or it has ended and waits for its parent to notice."""
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
    """Whether the owner's process number means something here."""
    me = _me()
    return all(owner.get(name, "") == me[name] for name in ("host", "place"))


def _read(lock: Path) -> dict[str, Any]:
    """What a lock says; nothing where it is gone, or its owner died before it had written a word."""
    try:
        found = json.loads(lock.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


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
