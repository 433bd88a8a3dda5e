"""The folder that a model is exported to: written whole or not at all, and only in the place of an earlier export.

It knows which files tell a model's folder from a run's. It does NOT know what is written.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tunix_like.errors import UserError

MODEL_FILES = ("config.json", "adapter_config.json")
"""A folder with one of these is an export: of a model, or of adapters."""

RUN_FILES = ("config.yaml", "metrics.jsonl", "checkpoints", "sft_checkpoints")
"""A folder with one of these is a run."""

_CHECKPOINTS = ("checkpoints", "sft_checkpoints")


def check_folder(folder: str | Path, overwrite: bool, source: str | None = None) -> Path:
    """The place of `folder`, its links followed, if a model may be written there.

    Args:
      overwrite: an earlier export may be replaced, with every file that is in it.
      source: path (or hub id) of the model that is exported.

    Raises:
      UserError: it is a file; a folder that is not empty, without `overwrite`; or, with `overwrite`, something other
        than an export: a run, a checkpoint, the source, a folder with folders or links in it.
    """
    target = Path(folder).resolve()
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        there = sorted(path.name for path in target.iterdir())
        more = ", ..." if len(there) > 3 else ""
        raise UserError(
            f"{folder} is not empty ({', '.join(there[:3])}{more}): give another folder, or --overwrite "
            "(overwrite=True in Python) to replace an earlier export."
        )
    if problem := _problem(target, source):
        raise UserError(f"{folder} {problem}, which an export does not replace; give another folder.")
    return target


def _problem(target: Path, source: str | None) -> str | None:
    """Why nothing may be written there; None where it may."""
    if {target.name, target.parent.name} & set(_CHECKPOINTS):
        return "holds checkpoints of a run"
    if not target.exists():
        return None
    if not target.is_dir():
        return "is a file"
    there = sorted(target.iterdir())
    if any(path.name in RUN_FILES for path in there):
        return "is the folder of a run"
    if target.name == "model" and any((target.parent / name).exists() for name in RUN_FILES):
        return "belongs to the run beside it"
    if source is not None and Path(source).resolve() == target:
        return "is what would be exported"
    for path in there:
        if path.is_symlink() or path.is_dir():
            return f"holds the {'link' if path.is_symlink() else 'folder'} {path.name}"
    if there and not any(path.name in MODEL_FILES for path in there):
        return f"holds no {' or '.join(MODEL_FILES)}"
    return None


@contextlib.contextmanager
def written_whole(folder: str | Path, overwrite: bool, source: str | None = None) -> Iterator[Path]:
    """Yields an empty folder to write to, which takes the place of `folder` if the block ends without an exception.

    Modes are those that the umask says, or that of an empty folder that is there. A folder that is a mount point, or
    whose parent cannot be written to, is filled by one rename a file instead.

    Raises:
      UserError: as `check_folder`; or the place cannot be written.
    """
    target = check_folder(folder, overwrite, source)
    inside = target.is_dir() and (os.path.ismount(target) or not os.access(target.parent, os.W_OK))
    part = (target if inside else target.parent) / f".{target.name}.{os.getpid()}.part"
    try:
        part.mkdir(parents=True)
        yield part
        if inside:
            _fill(target, part)
        else:
            _replace(target, part)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error}.") from error
    except UserError as error:
        raise UserError(str(error).replace(str(part), str(folder))) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _replace(target: Path, part: Path) -> None:
    if not target.is_dir():
        part.rename(target)
        return
    shutil.copymode(target, part)
    old = part.with_suffix(".old")
    target.rename(old)
    try:
        part.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old)


def _fill(target: Path, part: Path) -> None:
    """The description goes first and comes last: what an end in between leaves is not taken for a model."""
    described = lambda path: path.name in MODEL_FILES  # noqa: E731
    for path in sorted((path for path in target.iterdir() if path != part), key=described, reverse=True):
        path.unlink()
    for path in sorted(part.iterdir(), key=described):
        path.rename(target / path.name)
