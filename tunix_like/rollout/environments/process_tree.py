"""Reads the tree of processes and their memory from `/proc` (Linux). On other systems the functions find no process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


def children_of(pid: int) -> Iterator[int]:
    """Yields the ids of the child processes of a process."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                yield from map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())


def descendants_of(pid: int) -> Iterator[int]:
    """Yields the ids of all descendants of a process. Each descendant comes after its own descendants."""
    for child in children_of(pid):
        yield from descendants_of(child)
        yield child


def members_of(session: int) -> Iterator[int]:
    """Yields the ids of the processes in the session with the id `session`."""
    with contextlib.suppress(OSError):
        for entry in os.listdir("/proc"):
            if entry.isdecimal() and _session(entry) == session:
                yield int(entry)


def memory_of(pid: int) -> int:
    """Returns the resident memory of a process and all its descendants, in bytes; 0 if the memory is not known."""
    return _resident(pid) + sum(map(_resident, descendants_of(pid)))


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def _session(entry: str) -> int | None:
    try:
        text = Path(f"/proc/{entry}/stat").read_text(errors="replace")
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[3])
