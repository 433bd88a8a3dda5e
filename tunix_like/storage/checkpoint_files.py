"""Lists, verifies and removes checkpoints of a run. Orbax writes each checkpoint to a folder whose name is the number
of the training step. `checksums.json` in this folder has the SHA-256 checksums of the files in its subfolders."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import time
from pathlib import Path

from tunix_like.errors import UserError
from tunix_like.runtime.input_files import path_below

logger = logging.getLogger("tunix_like")

CHECKSUMS = "checksums.json"
_STAMP = "_CHECKPOINT_METADATA"  # orbax adds the time of the final rename to this file, so it has no checksum
_ITEMS = {_STAMP, CHECKSUMS, "commit_success.txt", "state", "meta", "iterator"}
"""Names of the files and folders in the folder of a checkpoint."""


MARKS = (_STAMP, "state/_METADATA")
"""The files without which the folder of a checkpoint is not complete."""


def is_mark(path: str) -> bool:
    """Whether a file is the one of a checkpoint that is written last and removed first in object storage."""
    return path.rpartition("/")[2] == _STAMP


def complete_steps(folder: Path) -> list[int]:
    """Returns the step numbers of the complete checkpoints in `folder`, ascending. Orbax would count every folder whose
    name is a number."""
    if not folder.is_dir():
        return []
    steps = {path: step_of(path.name) for path in folder.iterdir()}
    return sorted(step for path, step in steps.items() if step is not None and is_complete(path))


def step_of(name: str) -> int | None:
    """Returns the step of the folder of a checkpoint. None for other names, such as `009` and `²`."""
    return int(name) if re.fullmatch("0|[1-9][0-9]{0,17}", name) else None


def is_complete(step: Path) -> bool:
    """Returns whether the folder of a checkpoint has the files that are written last and removed first."""
    return all((step / mark).is_file() for mark in MARKS)


def remove(step: Path) -> None:
    """Removes a checkpoint, or as many of its files as possible. What remains is not a complete checkpoint."""
    with contextlib.suppress(OSError):
        (step / _STAMP).unlink()
        shutil.rmtree(step)


def write_checksums(step: Path) -> None:
    """Writes `{"sha256": {file: digest}}` for all files in the subfolders of `step`."""
    files = sorted(path for path in step.glob("*/**/*") if path.is_file())
    digests = {path.relative_to(step).as_posix(): digest for path, digest in _digests(files).items()}
    (step / CHECKSUMS).write_text(json.dumps({"sha256": digests}), encoding="utf-8")


def damage(step: Path) -> str | None:
    """Describes the first damage to a checkpoint; None if there is none. Missing checksums give only a warning."""
    for path in step.rglob("*"):
        if not path.is_file() and not path.is_dir():  # reading a pipe would wait for a writer, a device has no end
            return f"{path.relative_to(step)} is not a regular file"
    try:
        json.loads((step / _STAMP).read_bytes())
    except (OSError, ValueError):
        return f"{_STAMP} cannot be read"
    try:
        text = (step / CHECKSUMS).read_bytes()
    except FileNotFoundError:
        logger.warning("%s has no checksums (it was written by an older version); it is used without a check", step)
        return None
    try:
        digests = json.loads(text)["sha256"].items()
        expected = {path_below(step, name, CHECKSUMS): digest for name, digest in digests}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return f"{CHECKSUMS} cannot be read"
    if missing := [path for path in expected if not path.is_file()]:
        return f"{missing[0].relative_to(step)}, which {CHECKSUMS} names, is missing"
    try:
        actual = _digests(list(expected))
    except OSError as error:
        return str(error)
    changed = [path for path in expected if actual[path] != expected[path]]
    return f"{changed[0].relative_to(step)} does not match its checksum" if changed else None


def _digests(files: list[Path]) -> dict[Path, str]:
    def digest(file: Path) -> str:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()

    # Hashing releases the GIL, so the files are hashed in parallel threads.
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(files, pool.map(digest, files), strict=True))


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
      UserError: the folder cannot be written, or has a numbered folder with files that are not those of a checkpoint.
        These files are not removed: the folder may be a link to something else.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if ".orbax-checkpoint-tmp" in path.name:
                clear(path)
            elif step_of(path.name) is not None and not is_complete(path):
                if foreign := [item.name for item in path.iterdir() if item.name not in _ITEMS]:
                    raise UserError(f"{path} has files that are not those of a checkpoint ({foreign[0]}); move them.")
                clear(path)
    except OSError as error:
        raise UserError(f"{folder}: checkpoints cannot be written there ({error}).") from error
