"""Writes and verifies SHA-256 checksums of the files in the subfolders of a folder."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import logging
import os
from pathlib import Path

logger = logging.getLogger("tunix_like")

FILE = "checksums.json"


def write(folder: Path) -> None:
    """Writes `checksums.json` in `folder`: `{"sha256": {file: digest}}` for all files in its subfolders."""
    files = sorted(path for path in folder.glob("*/**/*") if path.is_file())
    digests = {path.relative_to(folder).as_posix(): digest for path, digest in _digests(files).items()}
    (folder / FILE).write_text(json.dumps({"sha256": digests}), encoding="utf-8")


def damage(folder: Path) -> str | None:
    """Compares the files with `checksums.json` in `folder`. Returns a description of the first missing or changed file,
    or None. A folder without checksums is accepted with a warning."""
    try:
        text = (folder / FILE).read_bytes()
    except FileNotFoundError:
        logger.warning("%s has no checksums (it was written by an older version); it is used without a check", folder)
        return None
    try:
        expected = {folder / name: digest for name, digest in json.loads(text)["sha256"].items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{FILE} cannot be read"
    if missing := [path for path in expected if not path.is_file()]:
        return f"{missing[0].relative_to(folder)}, which {FILE} names, is missing"
    try:
        actual = _digests(list(expected))
    except OSError as error:
        return str(error)
    changed = [path for path in expected if actual[path] != expected[path]]
    return f"{changed[0].relative_to(folder)} does not match its checksum" if changed else None


def _digests(files: list[Path]) -> dict[Path, str]:
    # Hashing releases the GIL, so the files are hashed in parallel threads.
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(files, pool.map(_digest, files), strict=True))


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
