"""Reads input files of the user and of other programs; the error for an invalid file is one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tunix_like.errors import UserError


def file_problem(path: str | Path) -> str | None:
    """Returns why a file cannot be read, as the predicate of a sentence ("does not exist"); None if it can be read."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for a writer
            return "is a folder, not a file" if path.is_dir() else "is not a regular file"
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
    except (FileNotFoundError, NotADirectoryError):
        return "does not exist"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except ValueError:  # a NUL character or a lone surrogate
        return "is not a valid file name"
    return "is compressed (gzip); decompress it with gunzip" if packed else None


def path_below(folder: Path, name: str, source: str) -> Path:
    """Returns the path in `folder` of a file whose name comes from elsewhere: of an object in a bucket, or from the
    index of a model.

    Raises:
      UserError: the name is absolute, has empty parts, `.` or `..`, or leads through a link out of the folder. The
        message begins with `source`.
    """
    path = folder / name
    if {"", ".", ".."} & set(name.split("/")) or not path.parent.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{source}: the file name {name!r} leads out of its folder, so nothing of it is used.")
    return path


def read_object(file: Path, cure: str) -> dict[str, Any]:
    """Reads a JSON file that contains one object, in any Unicode encoding. `cure` ends an error message."""
    if os.path.lexists(file) and (problem := file_problem(file)):
        raise UserError(f"{file}: it {problem}. {cure}")
    try:
        value = json.loads(raw := file.read_bytes())
        if b"\\ud" in raw.lower():  # Python accepts a lone surrogate, but other libraries fail on it
            json.dumps(value, ensure_ascii=False).encode()
    except FileNotFoundError:
        raise UserError(f"{file}: no such file. {cure}") from None
    except (OSError, ValueError, RecursionError) as error:
        what = "cannot be read" if isinstance(error, OSError) else "not valid JSON"
        raise UserError(f"{file}: {what} ({error}). {cure}") from None
    if not isinstance(value, dict):
        raise UserError(f"{file}: expected a JSON object, found {type(value).__name__}. {cure}")
    return value
