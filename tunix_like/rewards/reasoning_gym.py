"""Tasks of the package `reasoning_gym` (arXiv 2505.24760), which generates problems and scores their answers."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from tunix_like.errors import UserError, nearest, one_line

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@functools.lru_cache(maxsize=32)
def make_generator(text: str) -> Any:
    """Returns the generator of a task's problems: `make_generator(text)[i]` is problem `i` with the fields `question`,
    `answer` and `metadata`.

    Args:
      text: JSON text with the name of the `task`, its `arguments`, the `seed` and the `size`.

    Raises:
      UserError: the package is not installed, there is no such task, or it does not accept the arguments.
    """
    fields = json.loads(text)
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError(
            f"data.name=reasoning_gym needs its package ({one_line(error)}); run pip install "
            "'tunix-like[reasoning-gym]'."
        ) from None
    task = fields["task"]
    if task not in DATASETS:
        raise UserError(f"data.task={task} is not a task of reasoning_gym. {nearest(str(task), DATASETS)}")
    try:
        return reasoning_gym.create_dataset(task, seed=fields["seed"], size=fields["size"], **fields["arguments"])
    except Exception as error:  # tasks check their arguments with assertions
        raise UserError(f"data.arguments: {task} does not accept {fields['arguments']}: {one_line(error)}.") from None


def reasoning_gym(
    prompts: list[str], completions: list[str], generator: list[str], number: list[int], **_: Any
) -> list[float]:
    """Scores the final answer of each completion by the task's own function, from 0 to 1. A completion that is cut
    before its answer gets the score of what its last line says.

    `generator` and `number` are columns of the data source: the text of `make_generator` and the number of the problem.
    """
    scores = []
    for text, index, completion in zip(generator, number, completions, strict=True):
        task = make_generator(text)
        answer = final_answer(completion)
        problem = task[index]
        try:
            scores.append(float(task.score_answer(answer, problem)))
        except Exception:  # some tasks fail at an answer that they cannot parse
            scores.append(0.0)
    return scores


def final_answer(completion: str) -> str | None:
    """Returns the text of the last `<answer>...</answer>`, or else the last line that is not empty; None if there is
    none."""
    if tagged := _TAGGED.findall(completion):
        return str(tagged[-1].strip()) or None
    lines = completion.strip().splitlines()
    return lines[-1].strip() if lines else None
