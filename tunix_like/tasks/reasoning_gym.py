"""Makes the generators of the package `reasoning_gym` (arXiv 2505.24760), which generate problems and score answers."""

from __future__ import annotations

import functools
import json
from typing import Any

from tunix_like.errors import UserError, nearest, one_line


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
