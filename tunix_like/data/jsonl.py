"""Rows of JSON-lines files, and of data sets on the Hugging Face hub.

It knows one JSON object per line, read where it stands: a file of a million rows costs 8 bytes a row of memory. Every
row is parsed once when the file is opened, so a bad one is an error before training, not in it. It does NOT know what
the columns mean, beyond `prompt` and `answer`.
"""

from __future__ import annotations

import array
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunix_like.data.source import DataSource, MappedRows, PromptFormat, Record, RowRange, take
from tunix_like.errors import UserError

if TYPE_CHECKING:
    from tunix_like.config import DataConfig

DEFAULT_EVAL = 256


class JsonlRows(Sequence[Record]):
    """The rows of one file, parsed when they are asked for; picklable, safe to read from several threads.

    Columns that a row lacks are None, so every row has the same columns. Blank lines are no rows.
    """

    def __init__(self, path: str | Path, check: Callable[[Record, str], None]) -> None:
        """Indexes the file and runs `check(row, "file:line")` on every row.

        Raises:
          UserError: a missing file, one without rows, or a line that is no JSON object (with its number).
        """
        self._path = Path(path)
        self._descriptor: int | None = None
        self._starts = array.array("q")
        columns: dict[str, None] = {}
        if not self._path.is_file():
            raise UserError(f"{self._path} does not exist: data.path must name a JSON-lines file, or a folder of them.")
        place = 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    where = f"{self._path}:{number}"
                    row = _parse(line, where)
                    check(row, where)
                    columns.update(dict.fromkeys(row))
                    self._starts.append(place)
                place += len(line)
        if not self._starts:
            raise UserError(f"{self._path} is empty: it must hold one JSON object per line.")
        self._starts.append(place)
        self._columns = dict.fromkeys(columns)

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


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.rstrip())
    except ValueError as error:
        # json counts lines within the row, which would be mistaken for the file's
        problem = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise UserError(f"{where}: not valid JSON ({problem}); write one object per line.") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: a row must be a JSON object, not {type(row).__name__}.")
    return row


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
        if not file.is_file():
            found = ", ".join(sorted(each.name for each in folder.glob("*.jsonl"))) or "no .jsonl file"
            raise UserError(f"{file} does not exist (data.{key}={split}); {folder} has {found}.")
        rows.append(JsonlRows(file, check))
    return make_source(config, rows[0], rows[1], make, reward)


def load_hub(config: DataConfig) -> DataSource:
    """A data set of the hub: `data.path` is `owner/name`, or `owner/name:configuration`.

    Raises:
      UserError: no `data.path`, `datasets` not installed, the data set unreachable, or a bad first row.
    """
    if config.path is None:
        raise UserError("data.path is required with data.name=hub: the id of a data set, as owner/name.")
    format = PromptFormat.of(config, template=None)
    train, held_out = hub_rows(config.path, config.split), hub_rows(config.path, config.eval_split)
    # Every row of a hub data set has the same columns and types, so the first one speaks for all.
    format.check(train[0], f"{config.path}, first row of {config.split}")
    return make_source(config, train, held_out, format, reward="exact_match")


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
            f"The data set {path} (split '{split}') could not be loaded from the hub: {type(error).__name__}: {error}. "
            f"Check data.path and the network. Without one, download https://huggingface.co/datasets/{name} and name a "
            "folder with its train.jsonl and test.jsonl: data.path=FOLDER (with data.name=jsonl, or gsm8k for GSM8K)."
        ) from error
    if len(rows) == 0:
        raise UserError(f"The data set {path} has no rows in split '{split}'.")
    return rows
