"""Lists, verifies and removes the steps of a run. A step is the numbered folder of a checkpoint, written by orbax."""

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
"""Metadata file of a step with handlers and times, written by orbax."""


def complete_steps(folder: Path) -> list[int]:
    """Returns the numbers of the complete steps in a folder, ascending.

    Orbax treats any numbered folder as a step. This function skips a step without the files that are written last and
    removed first. It therefore skips a step whose removal was interrupted.
    """
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit() and is_complete(path))


def is_complete(step: Path) -> bool:
    """Returns whether a step has the files that are written last and removed first."""
    return (step / STAMP).is_file() and (step / "state" / "_METADATA").is_file()


def remove(step: Path) -> None:
    """Removes a step, or as many of its files as possible. If the removal is interrupted, the rest is not treated as a
    complete step."""
    with contextlib.suppress(OSError):
        (step / STAMP).unlink()
        shutil.rmtree(step)


def damage(step: Path) -> str | None:
    """Returns a description of the damage to the files of a step, or None."""
    try:
        json.loads((step / STAMP).read_bytes())  # no checksum: orbax adds the time of the final rename to this file
    except (OSError, ValueError):
        return f"{STAMP} cannot be read"
    return checksums.damage(step)


def clear(folder: Path) -> None:
    """Removes a folder into which a thread of this process may still write files after a failed save."""
    for _ in range(20):
        try:
            return shutil.rmtree(folder)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            time.sleep(0.1)
    shutil.rmtree(folder)


def prepare(folder: Path) -> None:
    """Creates the folder, and removes what a killed process left there: temporary folders and incomplete steps.

    Raises:
      UserError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if ".orbax-checkpoint-tmp" in path.name or (path.name.isdigit() and not is_complete(path)):
                clear(path)
    except OSError as error:
        raise UserError(f"{folder}: checkpoints cannot be written there ({error}).") from error
