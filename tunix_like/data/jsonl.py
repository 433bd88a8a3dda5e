"""Loads rows from JSON-lines files and from datasets on the Hugging Face Hub.

Rows of a file are read from disk when they are needed. Only their positions in the file stay in memory, with 8 bytes
per row. Every row is parsed once when the file is opened, so an invalid row is reported before training.
"""

from __future__ import annotations

import array
import codecs
import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunix_like.data.files import PATTERNS, as_json_lines, is_saved, split_files
from tunix_like.data.source import DataSource, MappedRows, PromptFormat, Record, RowRange, RowSequence, take
from tunix_like.errors import UserError, one_line
from tunix_like.runtime import progress
from tunix_like.runtime.input_files import file_problem
from tunix_like.runtime.object_storage import is_remote, local_copy

if TYPE_CHECKING:
    from tunix_like.config.schema import DataConfig

DEFAULT_EVAL = 256

MOST_COLUMNS = 1000
"""Maximum number of distinct columns in a file. A loaded row has all columns of the file."""

LONG_FILE = 32
"""Progress is shown while a file of at least this size (in MiB) is read."""

_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # the JSON escape of a surrogate; two surrogates encode one character


class JsonlRows(RowSequence):
    """The rows of one JSON-lines file, parsed on access, with None for columns that a row lacks. The object can be
    pickled and read from several threads."""

    def __init__(self, path: str | Path, check: Callable[[Record, str], None], name: str | Path | None = None) -> None:
        """Indexes the file and runs `check(row, "name:line")` on every row. `name` is that of a file that was converted
        to this one (`data/files.py`)."""
        self._path = Path(path)
        self._name = Path(path if name is None else name)
        self._descriptor: int | None = None
        self._starts = array.array("q")
        self._columns: dict[str, None] = {}
        if problem := file_problem(self._path):
            raise UserError(f"{self._name} {problem}. data.path must name a file of rows, or a folder of them.")
        end = self._index(check)
        if not self._starts:
            raise UserError(f"{self._name} is empty; it must contain one JSON object per line.")
        self._starts.append(end)

    def _index(self, check: Callable[[Record, str], None]) -> int:
        """Finds the offset of each row and the set of columns. Returns the size of the file in bytes."""
        offset = 0
        with self._path.open("rb") as file, _shown(self._path) as advance:
            for number, line in enumerate(file, start=1):
                if _content(line):
                    where = f"{self._name}:{number}"
                    row = _parse(line, where)
                    check(row, where)
                    self._columns.update(dict.fromkeys(row))
                    if len(self._columns) > MOST_COLUMNS:
                        raise UserError(
                            f"{where}: the rows up to here have more than {MOST_COLUMNS} different columns; put values "
                            "that differ from row to row into one column."
                        )
                    self._starts.append(offset)
                advance(((offset + len(line)) >> 20) - (offset >> 20))
                offset += len(line)
        return offset

    def __len__(self) -> int:
        return len(self._starts) - 1

    def _row(self, index: int) -> Record:
        start = self._starts[index]
        stop = self._starts[index + 1]
        line = os.pread(self._open(), stop - start, start)
        return {**self._columns, **_parse(line, f"{self._name}, row {index + 1} (changed since it was opened)")}

    def _open(self) -> int:
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDONLY)
        return self._descriptor

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_descriptor": None}  # a worker process opens the file again

    def __del__(self) -> None:
        if getattr(self, "_descriptor", None) is not None:
            os.close(self._descriptor)  # type: ignore[arg-type]


@contextlib.contextmanager
def _shown(path: Path) -> Iterator[Callable[[int], None]]:
    """Shows the progress of reading a long file. The yielded function takes the MiB read since its last call."""
    size = path.stat().st_size >> 20
    if size < LONG_FILE:
        yield lambda done: None
        return
    with progress.task(f"reading {path.name} (MiB)", size) as advance:
        yield lambda done: advance(done) if done else None


def _content(line: bytes) -> bytes:
    """Removes white space around a line, and the byte order mark at the start of a file."""
    return line.removeprefix(codecs.BOM_UTF8).strip()


def _parse(line: bytes, where: str) -> dict[str, Any]:
    content = _content(line)
    try:
        row = json.loads(content.decode())
        if _HALF.search(content):  # tokenizers and UTF-8 cannot represent a lone surrogate
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        encoding = "UTF-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "LATIN1"
        raise UserError(
            f"{where}: byte {error.start + 1} of the line (0x{content[error.start]:02x}) is not UTF-8; convert the "
            f"file, e.g. iconv -f {encoding} -t UTF-8, or remove the row."
        ) from error
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: it contains a lone surrogate ({error.object[error.start]!r}, half of a character); write the "
            "whole character, or remove the row."
        ) from error
    except json.JSONDecodeError as error:
        # json counts lines from the start of the row, so its line number is left out
        problem = f"{error.msg} at column {error.colno}"
        raise UserError(f"{where}: not valid JSON ({problem}); write one object per line.") from error
    except ValueError as error:
        most = sys.get_int_max_str_digits()
        raise UserError(f"{where}: a number has more than {most} digits; write it as text.") from error
    except RecursionError as error:
        raise UserError(f"{where}: lists and objects are nested too deeply; write the column as text.") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: a row must be a JSON object, not {type(row).__name__}.")
    return row


def load(config: DataConfig) -> DataSource:
    """Loads rows from a folder with `{split}.jsonl` and `{eval_split}.jsonl`, or from a file whose last rows are held
    out (`with_held_out`). Other formats: `data/files.py`."""
    if config.path is None:
        raise UserError("data.path is required with data.name=jsonl; set it to a JSON-lines file or a folder of them.")
    path = local_path(config.path)
    format = PromptFormat.of(config, template=None)
    if path.is_dir() and not is_saved(path):
        return split_folder(config, path, format.check, format, reward="exact_match")
    for key, unset in (("split", "train"), ("eval_split", "test")):
        if getattr(config, key) != unset:
            raise UserError(f"data.{key} is set, but data.path={path} is one file, not a folder of splits; unset it.")
    train, held_out = with_held_out(JsonlRows(as_json_lines([path]), format.check, path), config, path)
    return DataSource(MappedRows(train, format), MappedRows(held_out, format), None, reward="exact_match")


def with_held_out(rows: Sequence[Record], config: DataConfig, path: Path) -> tuple[Sequence[Record], Sequence[Record]]:
    """Returns the rows of a file for training and the last ones, which are held out: `data.eval_size`, or a tenth, but
    at most 256."""
    count = min(DEFAULT_EVAL, len(rows) // 10) if config.eval_size is None else config.eval_size
    if count >= len(rows):
        raise UserError(f"data.eval_size={count} leaves no training rows: {path} has {len(rows)}; lower it.")
    first = len(rows) - count
    return take(RowRange(rows, 0, first), config.train_size, "data.train_size"), RowRange(rows, first, len(rows))


def local_path(path: str) -> Path:
    """Returns the path of data files; those in object storage are copied."""
    return local_copy(path, "data.path", PATTERNS) if is_remote(path) else Path(path)


def split_folder(
    config: DataConfig,
    folder: Path,
    check: Callable[[Record, str], None],
    make: Callable[[Record], Record],
    reward: str,
) -> DataSource:
    """Loads a source from a folder of `{split}.jsonl` files, or of other formats (`data/files.py`). `check(row, place)`
    is called once on every row; `make` adds the prompt and further columns to a row when it is read."""
    rows: list[Sequence[Record]] = []
    for key, split in (("split", config.split), ("eval_split", config.eval_split)):
        if not (files := split_files(folder, split)):
            names = ", ".join(sorted(path.name for path in folder.iterdir())[:20]) or "no files"
            file = folder / f"{split}.jsonl"
            raise UserError(f"{file} does not exist (data.{key}={split}); data.path={folder} has {names}.")
        rows.append(JsonlRows(as_json_lines(files), check, files[0]))
    return make_source(config, rows[0], rows[1], make, reward)


def load_hub(config: DataConfig) -> DataSource:
    """Loads a dataset of the Hugging Face Hub; `data.path` is `owner/name`, or `owner/name:configuration`."""
    if config.path is None:
        raise UserError("data.path is required with data.name=hub; set it to the id of a dataset, as owner/name.")
    format = PromptFormat.of(config, template=None)
    return split_hub(config, config.path, format.check, format, reward="exact_match")


def split_hub(
    config: DataConfig,
    path: str,
    check: Callable[[Record, str], None],
    make: Callable[[Record], Record],
    reward: str,
) -> DataSource:
    """Loads a source from two splits on the hub, as `split_folder` does from files. All rows are checked, because any
    value can be missing in a hub dataset."""
    splits = {split: hub_rows(path, split) for split in (config.split, config.eval_split)}
    for split, rows in splits.items():
        with progress.task(f"checking {path}, {split}", len(rows)) as advance:
            for number, row in enumerate(rows, start=1):
                check(row, f"{path}, row {number} of {split}")
                if number % 1000 == 0:
                    advance(1000)
    return make_source(config, splits[config.split], splits[config.eval_split], make, reward)


def make_source(
    config: DataConfig,
    train: Sequence[Record],
    held_out: Sequence[Record],
    make: Callable[[Record], Record],
    reward: str,
) -> DataSource:
    """Builds a data source from two splits, cut to the configured sizes. `make` is applied to a row when it is read."""
    if config.split == config.eval_split:
        raise UserError(
            f"data.split and data.eval_split are both '{config.split}', but evaluation rows must be held out; set two "
            "different splits."
        )
    return DataSource(
        MappedRows(take(train, config.train_size, "data.train_size"), make),
        MappedRows(take(held_out, config.eval_size, "data.eval_size"), make),
        None,
        reward,
    )


def hub_rows(path: str, split: str) -> Sequence[Record]:
    """Loads one split of a dataset of the Hugging Face Hub, memory-mapped."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"Reading {path} from the hub needs the package 'datasets' ({one_line(error)}); run pip install "
            "'tunix-like[hub]', or set data.path to a local copy."
        ) from error
    name, _, configuration = path.partition(":")
    try:
        rows = datasets.load_dataset(name, configuration or None, split=split)
    except Exception as error:  # errors of the network, id, configuration and split have many classes
        raise UserError(
            f"The dataset {path} (split '{split}') could not be loaded from the hub. Check data.path and the network. "
            f"Without a network, download https://huggingface.co/datasets/{name} elsewhere and set data.path to a "
            "folder with its train.jsonl and test.jsonl (with data.name=jsonl, or gsm8k for GSM8K). With "
            f"HF_HUB_OFFLINE=1 only cached data is used. The error of the hub client: {one_line(error)}."
        ) from error
    if len(rows) == 0:
        raise UserError(f"The dataset {path} has no rows in split '{split}'; check data.split and data.eval_split.")
    return rows
