"""A checkpoint's files: which steps of a folder are whole, what is damaged, and what may be removed.

Knows what orbax leaves on disk. Does NOT know what the arrays mean, or which step is wanted.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import time
from pathlib import Path

from tunix_like.errors import UserError
from tunix_like.storage import checksums

STAMP = "_CHECKPOINT_METADATA"
"""Orbax's own description of a step: its handlers and times."""


def whole_steps(folder: Path) -> list[int]:
    """The numbers of the whole steps in a folder, ascending. Orbax takes any numbered folder for a step; one whose
    removal was interrupted lacks its last-written files."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit() and is_whole(path))


def is_whole(step: Path) -> bool:
    """Whether a step has the files that are written last and removed first."""
    return (step / STAMP).is_file() and (step / "state" / "_METADATA").is_file()


def remove(step: Path) -> None:
    """Removes a step as far as it can. Whatever interrupts it, what is left is not taken for a whole step."""
    with contextlib.suppress(OSError):
        (step / STAMP).unlink()
        shutil.rmtree(step)


def damage(step: Path) -> str | None:
    """What of a step is not as it was written, or None."""
    try:
        json.loads((step / STAMP).read_bytes())  # without a checksum: orbax writes the time of its move into it
    except (OSError, ValueError):
        return f"{STAMP} cannot be read"
    return checksums.damage(step)


def clear(folder: Path) -> None:
    """Removes a folder into which a thread of this process, whose write failed, may still put files."""
    for _ in range(20):
        try:
            return shutil.rmtree(folder)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            time.sleep(0.1)
    shutil.rmtree(folder)


def prepare(folder: Path) -> None:
    """Makes the folder, and removes what a killed writer left there: temporary folders, and numbered ones that are not
    whole. Raises `UserError` where the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if ".orbax-checkpoint-tmp" in path.name or (path.name.isdigit() and not is_whole(path)):
                clear(path)
    except OSError as error:
        raise UserError(f"{folder}: checkpoints cannot be written there ({error}).") from error
