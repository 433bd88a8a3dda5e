"""Rows of JSON-lines files, and of data sets on the Hugging Face hub.

It knows one JSON object per line, read where it stands: a file of a million rows costs 8 bytes a row of memory. Every
row is parsed once when the file is opened, so a bad one is an error before training, not in it. It does NOT know what
the columns mean, beyond `prompt` and `answer`.
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

from tunix_like.data.source import DataSource, MappedRows, PromptFormat, Record, RowRange, take
from tunix_like.errors import UserError, one_line
from tunix_like.runtime import progress
from tunix_like.runtime.input_files import file_problem

if TYPE_CHECKING:
    from tunix_like.config.schema import DataConfig

DEFAULT_EVAL = 256

MOST_COLUMNS = 1000
"""Different columns that the rows of a file may have; every row is given all of them."""

MOST_NESTED = 100
"""Levels of lists and objects within a row; what is handed to reward functions and other processes must not run into
Python's own limit, which depends on the caller."""

LONG_FILE = 32
"""MiB of a file whose reading is shown as it goes on."""

_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # the escape of half a character; two of them may make a whole one


class JsonlRows(Sequence[Record]):
    """The rows of one file, parsed when they are asked for; picklable, safe to read from several threads.

    Columns that a row lacks are None, so every row has the same columns. Blank lines are no rows.
    """

    def __init__(self, path: str | Path, check: Callable[[Record, str], None]) -> None:
        """Indexes the file and runs `check(row, "file:line")` on every row.

        Raises:
          UserError: a file that is missing or cannot be read as text, one without rows, rows of more than
            `MOST_COLUMNS` columns, or a line (with its number) that is no JSON object in UTF-8, or holds half a
            character or more than `MOST_NESTED` levels.
        """
        self._path = Path(path)
        self._descriptor: int | None = None
        self._starts = array.array("q")
        self._columns: dict[str, None] = {}
        if problem := file_problem(self._path):
            raise UserError(f"{self._path} {problem}. data.path must name a JSON-lines file, or a folder of them.")
        end = self._index(check)
        if not self._starts:
            raise UserError(f"{self._path} is empty: it must hold one JSON object per line.")
        self._starts.append(end)

    def _index(self, check: Callable[[Record, str], None]) -> int:
        """Finds where each row begins, and which columns there are. Returns the size of the file in bytes."""
        place = 0
        with self._path.open("rb") as file, _shown(self._path) as advance:
            for number, line in enumerate(file, start=1):
                if _content(line):
                    where = f"{self._path}:{number}"
                    row = _parse(line, where)
                    check(row, where)
                    self._columns.update(dict.fromkeys(row))
                    if len(self._columns) > MOST_COLUMNS:
                        raise UserError(
                            f"{where}: the rows have more than {MOST_COLUMNS} different columns by now; every row is "
                            "given all of them: put what differs from row to row into one column."
                        )
                    self._starts.append(place)
                advance(((place + len(line)) >> 20) - (place >> 20))
                place += len(line)
        return place

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        start, stop = self._starts[index], self._starts[index + 1]
        line = os.pread(self._open(), stop - start, start)
        return {**self._columns, **_parse(line, f"{self._path}, row {index + 1} (changed since it was opened)")}

    def _open(self) -> int:
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDONLY)
        return self._descriptor

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_descriptor": None}  # a worker process opens the file for itself

    def __del__(self) -> None:
        if getattr(self, "_descriptor", None) is not None:
            os.close(self._descriptor)  # type: ignore[arg-type]


@contextlib.contextmanager
def _shown(path: Path) -> Iterator[Callable[[int], None]]:
    """A function to call with the MiB just read, which shows the progress of a long file."""
    size = path.stat().st_size >> 20
    if size < LONG_FILE:
        yield lambda done: None
        return
    with progress.task(f"reading {path.name} (MiB)", size) as advance:
        yield lambda done: advance(done) if done else None


def _content(line: bytes) -> bytes:
    """Without white space and the byte order mark that some editors put in front of a file."""
    return line.removeprefix(codecs.BOM_UTF8).strip()


def _parse(line: bytes, where: str) -> dict[str, Any]:
    content = _content(line)
    try:
        row = json.loads(content.decode())
    except UnicodeDecodeError as error:
        encoding = "UTF-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "LATIN1"
        raise UserError(
            f"{where}: byte {error.start + 1} of the line (0x{content[error.start]:02x}) is not UTF-8; convert the "
            f"file, e.g. iconv -f {encoding} -t UTF-8, or leave the row out."
        ) from error
    except json.JSONDecodeError as error:
        # json counts lines within the row, which would be mistaken for the file's
        problem = f"{error.msg} at column {error.colno}"
        raise UserError(f"{where}: not valid JSON ({problem}); write one object per line.") from error
    except ValueError as error:
        most = sys.get_int_max_str_digits()
        raise UserError(f"{where}: a number has more than {most} digits; write it as text.") from error
    except RecursionError as error:
        raise UserError(_too_deep(where)) from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: a row must be a JSON object, not {type(row).__name__}.")
    if content.count(b"[") + content.count(b"{") > MOST_NESTED and _levels(row) > MOST_NESTED:
        raise UserError(_too_deep(where))
    if _HALF.search(content):
        _check_whole(row, where)
    return row


def _too_deep(where: str) -> str:
    return f"{where}: lists and objects are nested more than {MOST_NESTED} levels deep; write the column as text."


def _levels(value: Any) -> int:
    levels, inside = 0, [value]
    while inside := [each for each in inside if isinstance(each, dict | list)]:
        levels += 1
        inside = [inner for each in inside for inner in (each.values() if isinstance(each, dict) else each)]
    return levels


def _check_whole(row: dict[str, Any], where: str) -> None:
    """Raises a UserError where a text holds a lone surrogate, which no tokenizer takes and UTF-8 cannot hold."""
    for name, value in row.items():
        try:
            json.dumps({name: value}, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{where}: column {name!r} holds half of a character ({error.object[error.start]!r}, a surrogate "
                "without its other half); write the whole character, or leave the row out."
            ) from error


def load(config: DataConfig) -> DataSource:
    """A folder with `{split}.jsonl` and `{eval_split}.jsonl`, or one file, whose last rows are held out.

    Of one file `data.eval_size` rows are held out, by default a tenth and at most 256.

    Raises:
      UserError: no `data.path`, a missing or empty file, a row that does not parse (file and line), a column that the
        template names and a row lacks, fewer rows than asked for.
    """
    if config.path is None:
        raise UserError("data.path is required with data.name=jsonl: a JSON-lines file, or a folder of them.")
    path, format = Path(config.path), PromptFormat.of(config, template=None)
    if path.is_dir():
        return split_folder(config, path, format.check, format, reward="exact_match")
    for key, unset in (("split", "train"), ("eval_split", "test")):
        if getattr(config, key) != unset:
            raise UserError(f"data.{key} is set, but data.path={path} is one file, not a folder of splits.")
    rows = JsonlRows(path, format.check)
    held_out = min(DEFAULT_EVAL, len(rows) // 10) if config.eval_size is None else config.eval_size
    if held_out >= len(rows):
        raise UserError(f"data.eval_size={held_out} leaves no training rows: {path} has {len(rows)}; lower it.")
    first = len(rows) - held_out
    train = take(RowRange(rows, 0, first), config.train_size, "data.train_size")
    evaluation = RowRange(rows, first, len(rows))
    return DataSource(MappedRows(train, format), MappedRows(evaluation, format), None, reward="exact_match")


def split_folder(
    config: DataConfig,
    folder: Path,
    check: Callable[[Record, str], None],
    make: Callable[[Record], Record],
    reward: str,
) -> DataSource:
    """The source in a folder of `{split}.jsonl` files; `check` sees every row once, `make` completes those asked for.

    Raises:
      UserError: as for `load`.
    """
    rows: list[Sequence[Record]] = []
    for key, split in (("split", config.split), ("eval_split", config.eval_split)):
        file = folder / f"{split}.jsonl"
        if not os.path.lexists(file):
            found = ", ".join(sorted(each.name for each in folder.glob("*.jsonl*"))) or "no .jsonl file"
            raise UserError(f"{file} does not exist (data.{key}={split}); data.path={folder} has {found}.")
        rows.append(JsonlRows(file, check))
    return make_source(config, rows[0], rows[1], make, reward)


def load_hub(config: DataConfig) -> DataSource:
    """A data set of the hub: `data.path` is `owner/name`, or `owner/name:configuration`.

    Raises:
      UserError: no `data.path`, `datasets` not installed, the data set unreachable, or a bad row (split and number).
    """
    if config.path is None:
        raise UserError("data.path is required with data.name=hub: the id of a data set, as owner/name.")
    format = PromptFormat.of(config, template=None)
    train, held_out = hub_rows(config.path, config.split), hub_rows(config.path, config.eval_split)
    check_hub_rows(config, config.path, train, held_out, format.check)
    return make_source(config, train, held_out, format, reward="exact_match")


def check_hub_rows(
    config: DataConfig,
    path: str,
    train: Sequence[Record],
    held_out: Sequence[Record],
    check: Callable[[Record, str], None],
) -> None:
    """Runs `check` on every row of both splits: columns have types there, but any value may be missing."""
    for split, rows in ((config.split, train), (config.eval_split, held_out)):
        with progress.task(f"checking {path}, {split}", len(rows)) as advance:
            for number, row in enumerate(rows, start=1):
                check(row, f"{path}, row {number} of {split}")
                if number % 1000 == 0:
                    advance(1000)


def make_source(
    config: DataConfig,
    train: Sequence[Record],
    held_out: Sequence[Record],
    make: Callable[[Record], Record],
    reward: str,
) -> DataSource:
    """Cuts both splits to the sizes asked for and completes their rows."""
    if config.split == config.eval_split:
        raise UserError(f"data.split and data.eval_split are both '{config.split}': evaluation rows must be held out.")
    return DataSource(
        MappedRows(take(train, config.train_size, "data.train_size"), make),
        MappedRows(take(held_out, config.eval_size, "data.eval_size"), make),
        None,
        reward,
    )


def hub_rows(path: str, split: str) -> Sequence[Record]:
    """One split of a hub data set, memory-mapped.

    Raises:
      UserError: `datasets` not installed, the data set or the network not there, or no rows.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"Reading {path} from the hub needs the package 'datasets': pip install 'tunix-like[hub]', or point "
            "data.path at a local copy."
        ) from error
    name, _, configuration = path.partition(":")
    try:
        rows = datasets.load_dataset(name, configuration or None, split=split)
    except Exception as error:  # network, id, configuration and split errors come in many classes
        raise UserError(
            f"The data set {path} (split '{split}') could not be loaded from the hub. Check data.path and the network. "
            f"Without one, download https://huggingface.co/datasets/{name} and name a folder with its train.jsonl and "
            "test.jsonl: data.path=FOLDER (with data.name=jsonl, or gsm8k for GSM8K). With HF_HUB_OFFLINE=1 only "
            f"what was downloaded before is used. The hub's client said: {one_line(error)}."
        ) from error
    if len(rows) == 0:
        raise UserError(f"The data set {path} has no rows in split '{split}'.")
    return rows
