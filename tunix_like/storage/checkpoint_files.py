"""Lists, verifies and removes checkpoints of a run. Orbax writes each checkpoint to a folder whose name is the number
of the training step."""

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
"""Name of the metadata file that orbax writes into the folder of a checkpoint."""


def complete_steps(folder: Path) -> list[int]:
    """Returns the step numbers of the complete checkpoints in `folder`, ascending.

    Orbax treats any folder with a number as its name as a checkpoint. This function skips such a folder if it lacks the
    files that are written last and removed first, for example if the removal of a checkpoint was interrupted.
    """
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit() and is_complete(path))


def is_complete(step: Path) -> bool:
    """Returns whether the folder of a checkpoint has the files that are written last and removed first."""
    return (step / STAMP).is_file() and (step / "state" / "_METADATA").is_file()


def remove(step: Path) -> None:
    """Removes the folder of a checkpoint, or as many of its files as possible. If the removal is interrupted, the
    remaining files are not treated as a complete checkpoint."""
    with contextlib.suppress(OSError):
        (step / STAMP).unlink()
        shutil.rmtree(step)


def damage(step: Path) -> str | None:
    """Returns a description of the damage to the files of a checkpoint, or None if they are undamaged."""
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
    """Creates the folder of the checkpoints, and removes temporary folders and incomplete checkpoints of killed
    processes.

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
