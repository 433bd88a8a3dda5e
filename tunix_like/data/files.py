"""Data files of other formats, as JSON lines: CSV, parquet, arrays of JSON, compressed files, and folders that
`save_to_disk` of the package `datasets` wrote.

Such files are converted once per version, into `$TUNIX_LIKE_CACHE` (`~/.cache/tunix_like`); copies of earlier versions
stay there. Values of CSV files are text. Dates and other values without a form in JSON become text.
"""

from __future__ import annotations

import bz2
import csv
import errno
import gzip
import hashlib
import importlib
import io
import json
import lzma
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tunix_like.errors import UserError, one_line
from tunix_like.runtime import progress
from tunix_like.runtime.atomic import replacing
from tunix_like.runtime.input_files import file_problem
from tunix_like.runtime.object_storage import cache_folder, cannot_cache

ENDINGS = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv")
PACKED: dict[str, Callable[[str], Any]] = {
    "": io.FileIO,
    ".gz": gzip.open,
    ".zst": lambda path: _package("pyarrow").input_stream(path, compression="zstd"),
    ".xz": lzma.open,
    ".bz2": bz2.open,
}
"""How a file with this last ending is opened for reading bytes."""

PATTERNS = (*(f"*{ending}{packed}" for ending in ENDINGS for packed in PACKED), "*.arrow")
"""The files of a folder in object storage that can be data."""

_SAVED = "state.json"
"""A file of every folder that `Dataset.save_to_disk` wrote."""


def is_saved(folder: Path) -> bool:
    """Returns whether `Dataset.save_to_disk` wrote the folder."""
    return (folder / _SAVED).is_file()


def split_files(folder: Path, split: str) -> list[Path]:
    """Returns the files of a split: `train.jsonl`, another format, or the parts `train-00000-of-00002.parquet`; or the
    folder of a split that `DatasetDict.save_to_disk` wrote. Empty if there is none."""
    for ending in (ending + packed for ending in ENDINGS for packed in PACKED):
        if os.path.lexists(file := folder / f"{split}{ending}"):
            return [file]
        if parts := sorted(folder.glob(f"{split}-*-of-*{ending}")):
            wanted = parts[-1].name.rpartition("-of-")[2].partition(".")[0]
            if wanted.isdecimal() and int(wanted) != len(parts):
                raise UserError(f"{folder}: {split} has {len(parts)} of {int(wanted)} parts; download the others.")
            return parts
    return [folder / split] if is_saved(folder / split) else []


def as_json_lines(paths: Sequence[Path]) -> Path:
    """Returns a file with the rows of all `paths` as JSON lines; a single JSON-lines file unchanged.

    Raises:
      UserError: a file cannot be read, or a package that reads it is missing.
    """
    if len(paths) == 1 and not paths[0].is_dir() and _kind(paths[0]) == (".jsonl", ""):
        return paths[0]
    for path in paths:
        packed = path.is_file() and _kind(path)[1] == ".gz"  # which is a problem of other files
        if not path.is_dir() and not packed and (problem := file_problem(path)):
            raise UserError(f"{path} {problem}. data.path must name a file of rows, or a folder of them.")
    files = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    versions = [(str(file.absolute()), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    target = cache_folder() / f"rows-{hashlib.sha256(json.dumps(versions).encode()).hexdigest()[:24]}.jsonl"
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        what = f"converting {paths[0].name} to JSON lines"
        with replacing(target) as part, part.open("wb") as out, progress.task(what):
            for path in paths:
                _write(path, out)
    except OSError as error:
        raise UserError(f"{cannot_cache(error)} data.path: {paths[0]} is converted there.") from error
    return target


def _kind(path: Path) -> tuple[str, str]:
    """Returns the ending of a file's format and that of its compression; unknown formats count as JSON lines."""
    packed = path.suffix if path.suffix in PACKED else ""
    ending = Path(path.name.removesuffix(packed)).suffix
    return (ending if ending in ENDINGS[2:] else ".jsonl"), packed


def _write(path: Path, out: Any) -> None:
    try:
        if path.is_dir():
            _write_rows(_package("datasets").load_from_disk(str(path)), out)
            return
        ending, packed = _kind(path)
        with PACKED[packed](str(path)) as opened, io.BufferedReader(opened) as file:
            if ending in (".jsonl", ".json") and not (ending == ".json" and _is_array(file)):
                shutil.copyfileobj(file, out)
                out.write(b"\n")
            else:
                _write_rows(_ROWS[ending](file), out)
    except Exception as error:  # each reader has its own exceptions
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise
        raise UserError(f"{path}: it cannot be read ({one_line(error)}).") from error


def _write_rows(rows: Any, out: Any) -> None:
    for row in rows:
        out.write(json.dumps(row, ensure_ascii=False, default=_text).encode("utf-8", "surrogatepass") + b"\n")


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        raise ValueError("a column holds bytes; data columns are text, numbers, lists or objects")
    return str(value)


def _is_array(file: Any) -> bool:
    """Returns whether a JSON file is one array."""
    return file.peek(100).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _json(file: Any) -> list[Any]:
    return json.loads(file.read().decode("utf-8-sig"))


def _csv(file: Any, separator: str = ",") -> Iterator[dict[str, Any]]:
    csv.field_size_limit(2**31 - 1)
    with io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        reader = csv.DictReader(text, delimiter=separator, restkey="")
        names = reader.fieldnames or ()
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"the header has the column {min(repeated)!r} twice")
        for row in reader:
            if "" in row:
                raise ValueError(f"line {reader.line_num} has more fields than the header, or the header an empty name")
            yield row


def _parquet(file: Any) -> Iterator[dict[str, Any]]:
    for batch in _package("pyarrow.parquet").ParquetFile(file).iter_batches():
        yield from batch.to_pylist()


_ROWS: dict[str, Callable[[Any], Any]] = {
    ".json": _json,
    ".csv": _csv,
    ".tsv": lambda file: _csv(file, "\t"),
    ".parquet": _parquet,
}


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{error}; run pip install 'tunix-like[hub]'") from error
