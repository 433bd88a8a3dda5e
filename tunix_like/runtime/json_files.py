"""Reads small JSON files from other programs. The error for an invalid file is one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tunix_like.errors import UserError
from tunix_like.runtime.input_files import file_problem


def read_object(file: Path, cure: str) -> dict[str, Any]:
    """Reads a JSON file that contains one object. The file can have any Unicode encoding.

    Args:
      cure: a sentence for the error message that tells how to correct the file.

    Raises:
      UserError: the file cannot be read, is not one JSON object, or contains a lone surrogate.
    """
    if os.path.lexists(file) and (problem := file_problem(file)):
        raise UserError(f"{file}: it {problem}. {cure}")
    try:
        raw = file.read_bytes()
        value = json.loads(raw)
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
