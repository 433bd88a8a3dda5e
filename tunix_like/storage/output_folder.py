"""Writes the folder of an exported model atomically. A folder that is not empty is replaced only if it is an earlier
export."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from tunix_like.errors import UserError
from tunix_like.runtime import object_storage
from tunix_like.runtime.object_storage import is_remote

MODEL_FILES = ("config.json", "adapter_config.json")
"""A folder with one of these files is treated as an export of a model or of adapters."""

RUN_FILES = ("config.yaml", "metrics.jsonl", "checkpoints", "sft_checkpoints")
"""A folder with one of these files or folders is treated as the folder of a run."""

_CHECKPOINTS = ("checkpoints", "sft_checkpoints")


def check_target(folder: str | Path, overwrite: bool, source: str | None = None) -> None:
    """Checks that a model may be written to a folder (`check_folder`) or to an address in object storage."""
    if is_remote(folder):
        if problem := _problem_of_address(str(folder)):
            raise UserError(f"{folder} {problem}, so an export does not replace it; give another address.")
        object_storage.check_target(str(folder), overwrite)
    else:
        check_folder(folder, overwrite, source)


def check_folder(folder: str | Path, overwrite: bool, source: str | None = None) -> Path:
    """Checks that a model may be written to `folder`. Returns the path of `folder` with symbolic links resolved.

    Args:
      overwrite: whether an earlier export may be replaced, with all of its files.
      source: path (or hub id) of the model to export.

    Raises:
      UserError: `folder` is a file, a run folder, a checkpoint or `source`; `folder` is an earlier export and
        `overwrite` is False; `folder` is an earlier export that contains folders or links; or `folder` is another
        folder that is not empty.
    """
    target = Path(folder).resolve()
    if problem := _problem(target, source):
        raise UserError(f"{folder} {problem}, so an export does not replace it; give another folder.")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        names = sorted(path.name for path in target.iterdir())
        more = ", ..." if len(names) > 3 else ""
        raise UserError(
            f"{folder} is not empty ({', '.join(names[:3])}{more}): give another folder, or --overwrite "
            "(overwrite=True in Python) to replace an earlier export."
        )
    return target


def _problem(target: Path, source: str | None) -> str | None:
    """Returns the reason why an export must not be written to `target`, or None."""
    if {target.name, target.parent.name} & set(_CHECKPOINTS):
        return "contains checkpoints of a run"
    if not target.exists():
        return None
    if not target.is_dir():
        return "is a file"
    paths = sorted(target.iterdir())
    if any(path.name in RUN_FILES for path in paths):
        return "is the folder of a run"
    if target.name == "model" and any((target.parent / name).exists() for name in RUN_FILES):
        return "belongs to the run in its parent folder"
    if source is not None and Path(source).resolve() == target:
        return "is the model to export"
    for path in paths:
        if path.is_symlink() or path.is_dir():
            return f"contains the {'link' if path.is_symlink() else 'folder'} {path.name}"
    if paths and not any(path.name in MODEL_FILES for path in paths):
        return f"contains no {' or '.join(MODEL_FILES)}"
    return None


def _problem_of_address(url: str) -> str | None:
    """Returns the reason why an export must not be written to an address in object storage, or None."""
    bucket, *parts = url.partition("://")[2].rstrip("/").split("/")
    if set(parts) & set(_CHECKPOINTS):
        return "contains checkpoints of a run"
    for name in object_storage.names_below(url, "the export"):
        if set(name.split("/")) & {*RUN_FILES, "run.lock"}:
            return "is or contains the folder of a run"
    for index, part in enumerate(parts):
        parent = "/".join([url.partition("://")[0] + ":/", bucket, *parts[:index]])
        if part == "model" and any(object_storage.exists(f"{parent}/{name}", "the export") for name in RUN_FILES):
            return f"belongs to the run {parent}"
    return None


@contextlib.contextmanager
def written_whole(folder: str | Path, overwrite: bool, source: str | None = None) -> Iterator[Path]:
    """Yields an empty temporary folder, which replaces `folder` if the `with` block ends without an exception.

    The new folder has the permissions of the existing `folder`, or the permissions that the umask gives if `folder`
    does not exist. If `folder` is a mount point or its parent is not writable, `folder` itself stays, and the files in
    it are replaced one by one. An address in object storage gets the files at the end, first those that are not named
    in `MODEL_FILES`.

    Raises:
      UserError: `folder` must not be replaced (see `check_folder`), or cannot be written.
    """
    if is_remote(folder):
        check_target(folder, overwrite)
        with tempfile.TemporaryDirectory() as temporary:
            yield Path(temporary)
            object_storage.upload(Path(temporary), str(folder), MODEL_FILES)
        return
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


def write_files(folder: Path, files: Mapping[str, bytes] | None) -> None:
    for name, content in (files or {}).items():
        (folder / name).write_bytes(content)


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
    """Replaces the files in the folder `target` by the files in the folder `part`. The files named in `MODEL_FILES`,
    which mark a folder as a model, are removed first and moved last, so that an interrupted export is not treated as a
    model."""
    is_model_file = lambda path: path.name in MODEL_FILES  # noqa: E731
    for path in sorted((path for path in target.iterdir() if path != part), key=is_model_file, reverse=True):
        path.unlink()
    for path in sorted(part.iterdir(), key=is_model_file):
        path.rename(target / path.name)
