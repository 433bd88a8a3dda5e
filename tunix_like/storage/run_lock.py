"""Locks a run folder, so that only one run at a time can write to it.

The lock is the file `run.lock`, a lease of the package filelock. Its owner touches it every `BEAT_SECONDS`. If the
owner has exited, a process on the same host takes over the lock at once, unless the file system cannot exchange two
names (NFS, SMB). Any other process watches the file, and takes it over if it is not touched for `LEASE_SECONDS` of its
own clock.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import SoftFileLease, Timeout

from tunix_like.errors import UserError
from tunix_like.runtime.object_storage import is_remote
from tunix_like.runtime.processes import by_first, is_first
from tunix_like.storage.mirror import local_folder, mirrored

logger = logging.getLogger("tunix_like")

FILE = "run.lock"

BEAT_SECONDS = 5.0
"""Seconds between two touches of the lock by its owner. A second run in the same folder waits about this long until it
knows that the first is alive."""

LEASE_SECONDS = 180.0
"""Seconds without a touch after which the owner counts as dead. Network file systems may show a touch a minute late."""

_LOOKS = 4
"""Number of attempts to read an existing lock before it counts as lost, with 0, 1, 2 ... seconds between them."""

_owned: dict[Path, tuple[int, SoftFileLease | None]] = {}
"""Maps each lock that this process owns to the thread that took it, and the lease (None: process 0 has it)."""

_stored: dict[Path, Callable[[], None]] = {}
"""Maps the locks of local copies to the check that this process owns the folder in object storage."""


@contextlib.contextmanager
def owned(folder: str | Path | None) -> Iterator[Callable[[], None]]:
    """Locks `folder` for this run of one or several processes, and creates the folder if it does not exist. A folder in
    object storage is locked there too, and its local copy (`mirror.local_folder`) is brought up to date and, until the
    end, stored.

    The thread that took the lock may enter `owned` again for the same folder or for its local copy. If `folder` is
    None, nothing is locked.

    Yields:
      a function that all processes of this run must call before they write. The function raises `UserError` if another
      run has taken over the folder, which is possible if this run was suspended for longer than `LEASE_SECONDS`.

    Raises:
      UserError: another process owns the folder (the message names its process id and host), or the lock cannot be
        written.
      NotSaved: not all could be stored in object storage at the end.
    """
    if folder is None:
        yield lambda: None
        return
    lock = local_folder(folder).absolute() / FILE
    check = lambda: by_first(lambda: _check(lock))  # noqa: E731
    if lock in _owned and _owned[lock][0] == threading.get_ident():
        yield check
        return
    by_first(lambda: _take(lock))
    if not is_first():
        _owned[lock] = threading.get_ident(), None
    try:
        if is_remote(folder):
            with mirrored(str(folder), lock.parent) as _stored[lock]:
                yield check
        else:
            yield check
    finally:
        _stored.pop(lock, None)
        lease = _owned.pop(lock)[1]
        if lease is not None:
            with contextlib.suppress(OSError):
                lease.release()


def _take(lock: Path) -> None:
    lease = SoftFileLease(
        lock, lease_duration=LEASE_SECONDS, heartbeat_interval=BEAT_SECONDS, thread_local=False, mode=0o644
    )
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        owner = _described(lease)
        before = _touched(lock)
        try:
            lease.acquire(timeout=0)
        except Timeout:
            used = f"{lock.parent} is in use by {owner} ({lock})"
            logger.warning("%s; checking for up to %g s whether that process is alive", used, LEASE_SECONDS)
            try:
                _take_over(lease, lambda: _touched(lock) not in (None, before))
            except Timeout:
                raise UserError(
                    f"{used}, which is alive. Wait for it, stop it, or choose another training.output_dir. If that "
                    "process has exited, remove that file."
                ) from None
    except OSError as error:
        raise UserError(f"{lock} cannot be written ({error}); choose another training.output_dir.") from error
    if before is not None:
        logger.warning("%s: %s, which owned this run, is gone; its lock is taken over", lock.parent, owner)
    _owned[lock] = threading.get_ident(), lease


def _take_over(lease: SoftFileLease, is_touched: Callable[[], bool]) -> None:
    """Waits until the owner of a lock has exited or has not touched the lock for `LEASE_SECONDS`, and takes the lock
    over. Raises Timeout when the owner touches it."""
    interval = min(1.0, BEAT_SECONDS / 5)
    try:
        lease.acquire(timeout=LEASE_SECONDS + 10 * interval, poll_interval=interval, cancel_check=is_touched)
    except Timeout:
        if is_touched():
            raise
        # filelock replaces no lock on a file system without an exchange of names (such as NFS), and no empty lock. If
        # another process does the same at this moment, `_check` finds out.
        lease.force_break()
        lease.acquire(timeout=0)


def _check(lock: Path) -> None:
    lease = _owned[lock][1]
    assert lease is not None
    if lock in _stored:
        _stored[lock]()
    for look in range(_LOOKS):
        owner = lease.owner
        if owner is not None and owner.token == lease.token:
            return
        if owner is not None or _touched(lock) is None:
            break
        time.sleep(look)  # a network file system may temporarily fail to read an existing file
    if not lock.parent.exists():
        raise UserError(
            f"{lock.parent} was deleted while this run was active. Nothing more is written; the same command starts "
            "a new run."
        )
    if _touched(lock) is None:
        raise UserError(
            f"{lock} was deleted while this run was active, so another run may have started. Nothing more is written; "
            "start it again to resume from the newest checkpoint."
        )
    raise UserError(
        f"{lock.parent} is no longer this process's run: it was taken over by {_described(lease)} ({lock}). Nothing "
        "more is written; the other process resumes from the newest checkpoint."
    )


def _described(lease: SoftFileLease) -> str:
    """Describes the owner of a lock for a message."""
    owner = lease.owner
    return "an unknown process" if owner is None else f"process {owner.pid} on {owner.hostname}"


def _touched(lock: Path) -> int | None:
    """Returns the time of the last touch of the lock in nanoseconds; None if there is no lock."""
    try:
        return lock.stat().st_mtime_ns
    except FileNotFoundError:
        return None
