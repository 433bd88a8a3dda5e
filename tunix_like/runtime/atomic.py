"""Replaces files atomically: a killed process leaves either the old or the new file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the path of a temporary file in the folder of `path`. At the end of the context it takes the place of
    `path`; after an error it is removed. A killed process may leave it behind (`is_temporary`)."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Writes a text file in UTF-8."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def is_temporary(path: Path) -> bool:
    """Whether a killed process left this file of `replacing`."""
    return path.name.startswith(".") and path.name.endswith(".part")
