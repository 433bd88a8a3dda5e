"""GSM8K: grade-school word problems (2110.14168), from a local folder or the hub.

It knows the two columns of the set and where the final answer stands in a solution. It does NOT grade: the reward
`gsm8k` does.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from tunix_like.data.jsonl import check_hub_rows, hub_rows, make_source, split_folder
from tunix_like.data.source import DataSource, PromptFormat, Record
from tunix_like.errors import UserError
from tunix_like.rewards.numbers import parse_number

if TYPE_CHECKING:
    from tunix_like.config.schema import DataConfig

HUB_ID = "openai/gsm8k"


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Completes a row: the prompt by its format, and `gold`, the text after `####`."""

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
    """The final answer of a solution: what follows its last `####`."""
    return solution.rpartition("####")[2].strip()


def load(config: DataConfig) -> DataSource:
    """Rows with `question`, `answer` (the whole solution, which SFT trains on), `gold` and the prompt.

    `data.path` is a folder with `{split}.jsonl` and `{eval_split}.jsonl`, or a hub id; unset means openai/gsm8k.

    Raises:
      UserError: a missing folder or file, a bad row (file and line), or a hub that cannot be read.
    """
    rows = _Rows(PromptFormat.of(config, template="{question}"))
    if config.path is not None and Path(config.path).is_dir():
        return split_folder(config, Path(config.path), rows.check, rows, reward="gsm8k")
    path = HUB_ID if config.path is None else config.path
    if Path(path).exists() or path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise UserError(f"data.path={path} is no folder with train.jsonl and test.jsonl, and no hub id (owner/name).")
    path = f"{path}:main" if path == HUB_ID else path
    train, held_out = hub_rows(path, config.split), hub_rows(path, config.eval_split)
    check_hub_rows(config, path, train, held_out, rows.check)
    return make_source(config, train, held_out, rows, reward="gsm8k")
