"""The command `init`: writes the files of a new run from the templates in `starts/`."""

from __future__ import annotations

import argparse
import importlib.resources
import json
import re
from pathlib import Path

from tunix_like.errors import UserError
from tunix_like.runtime import console

_NAME = re.compile(r"[A-Za-z_][\w-]*")
_SUMS = [(7, 5), (12, 9), (30, 14), (8, 8), (21, 17), (40, 2), (13, 13), (6, 19), (25, 4), (11, 22), (9, 33), (50, 16)]


def write_start(name: str, kind: str, folder: Path) -> list[Path]:
    """Writes the files of a new run and returns their paths. If a file exists, nothing is written."""
    if not _NAME.fullmatch(name):
        raise UserError(
            f"init {name!r}: give a name of letters, digits, _ and - that starts with a letter or _; files and the run "
            "are named after it."
        )
    starts = importlib.resources.files("tunix_like.cli") / "starts"
    code = kind if kind in ("env", "tools") else "rewards"
    texts = {f"{name}.yaml": starts / f"{kind}.yaml", f"{name}_{code}.py": starts / f"{kind}.py.txt"}
    files = {folder / file: text.read_text(encoding="utf-8").replace("NAME", name) for file, text in texts.items()}
    if kind == "own":
        rows = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in _SUMS]
        files[folder / f"{name}.jsonl"] = "".join(json.dumps(row) + "\n" for row in rows)
    if existing := [str(file) for file in files if file.exists()]:
        raise UserError(f"{', '.join(existing)}: exists already and was not changed; choose another name, or move it.")
    for file, text in files.items():
        file.write_text(text, encoding="utf-8")
    return list(files)


def init(arguments: argparse.Namespace) -> None:
    """Writes the files of a new run into the current folder."""
    files = write_start(arguments.name, arguments.like, Path())
    console.print_text(f"wrote {', '.join(map(str, files))}; the next steps are at the top of {files[0]}")
