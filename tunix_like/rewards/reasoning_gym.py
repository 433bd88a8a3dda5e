"""The reward `reasoning_gym`: a task of this package scores the answers to its problems."""

from __future__ import annotations

import re
from typing import Any

from tunix_like.tasks.reasoning_gym import make_generator

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


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
