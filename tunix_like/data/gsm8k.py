"""Loads GSM8K, grade-school word problems (arXiv 2110.14168), from a local folder or the Hugging Face Hub."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from tunix_like.data.jsonl import local_path, split_folder, split_hub
from tunix_like.data.source import DataSource, PromptFormat, Record
from tunix_like.errors import UserError
from tunix_like.tasks.numbers import parse_number

if TYPE_CHECKING:
    from tunix_like.config.schema import DataConfig

HUB_ID = "openai/gsm8k"


@dataclasses.dataclass(frozen=True)
class _Rows:
    format: PromptFormat

    def __call__(self, row: Record) -> Record:
        return self.format({**row, "gold": gold(row["answer"])})

    def check(self, row: Record, where: str) -> None:
        for column in ("question", "answer"):
            if not isinstance(row.get(column), str):
                raise UserError(f"{where}: a GSM8K row must have the text column '{column}'; it has: {', '.join(row)}.")
        if "####" not in row["answer"] or parse_number(gold(row["answer"])) is None:
            raise UserError(f"{where}: column 'answer' must end in '#### ' and a number.")
        self.format.check({**row, "gold": gold(row["answer"])}, where)


def gold(solution: str) -> str:
    """Returns the final answer of a solution: the text after its last `####`."""
    return solution.rpartition("####")[2].strip()


def load(config: DataConfig) -> DataSource:
    """Loads GSM8K from a folder or the hub. A row has the columns `prompt`, `question`, `answer` (the full solution,
    for SFT) and `gold` (the final answer)."""
    rows = _Rows(PromptFormat.of(config, template="{question}"))
    if config.path is not None and (folder := local_path(config.path)).is_dir():
        return split_folder(config, folder, rows.check, rows, reward="gsm8k")
    path = HUB_ID if config.path is None else config.path
    if Path(path).exists() or path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise UserError(f"data.path={path} must be a folder with train.jsonl and test.jsonl, or a hub id (owner/name).")
    path = f"{path}:main" if path == HUB_ID else path
    return split_hub(config, path, rows.check, rows, reward="gsm8k")
