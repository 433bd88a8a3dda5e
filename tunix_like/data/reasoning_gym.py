"""Problems of a task of the package `reasoning_gym`, which its own function scores."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from tunix_like.data.source import DataSource, MappedRows, PromptFormat, Record
from tunix_like.errors import UserError
from tunix_like.runtime import progress
from tunix_like.tasks.reasoning_gym import make_generator

if TYPE_CHECKING:
    from tunix_like.config.schema import DataConfig

DEFAULT_TRAIN = 2000
DEFAULT_EVAL = 128

MOST_DRAWS = 20
"""Number of problems that are generated per wanted one before a task counts as having too few different ones."""


@dataclasses.dataclass(frozen=True)
class _Row:
    """Generates a row from the number of a problem."""

    generator: str
    format: PromptFormat

    def __call__(self, number: int) -> Record:
        problem = make_generator(self.generator)[number]
        row = {"question": problem["question"], "answer": str(problem["answer"])}
        return self.format(row | {"generator": self.generator, "number": number})


def load(config: DataConfig) -> DataSource:
    """Generates problems with the seed `data.seed`. Held-out problems are generated first and differ from each other;
    no training row has the question of one of them.

    Rows have the columns `prompt`, `question`, `answer`, and those that the reward needs. Only the numbers of problems
    are kept; a row is generated again when it is read.

    Raises:
      UserError: `data.task` is unset or unknown, the package is not installed, or there are too few problems.
    """
    if config.task is None:
        raise UserError("data.task: data.name=reasoning_gym needs the name of a task, such as chain_sum.")
    train_size = DEFAULT_TRAIN if config.train_size is None else config.train_size
    eval_size = DEFAULT_EVAL if config.eval_size is None else config.eval_size
    most = MOST_DRAWS * (train_size + eval_size)
    arguments = config.arguments or {}
    text = json.dumps({"task": config.task, "arguments": arguments, "seed": config.seed, "size": most})
    problems = make_generator(text)
    held_out: dict[str, int] = {}
    train: list[int] = []
    with progress.task(f"generating {config.task}", train_size + eval_size) as advance:
        for number in range(most):
            question = problems[number]["question"]
            if len(held_out) < eval_size:
                held_out.setdefault(question, number)
            elif question not in held_out:
                train.append(number)
                if len(train) == train_size:
                    break
            advance(1)
        else:
            raise UserError(
                f"data.task={config.task}: of {most} problems, only {len(held_out)} differ for evaluation and "
                f"{len(train)} further ones are not among these; lower data.eval_size or data.train_size, or choose "
                "data.arguments with more problems."
            )
    row = _Row(text, PromptFormat.of(config, template="{question}"))
    return DataSource(MappedRows(train, row), MappedRows(list(held_out.values()), row), None, reward="reasoning_gym")
