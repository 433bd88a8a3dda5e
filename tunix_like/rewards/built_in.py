"""The reward functions `exact_match` and `by_source`."""

from __future__ import annotations

from typing import Any

from tunix_like.errors import UserError
from tunix_like.rewards.calls import arguments_of, call, given_text, is_number
from tunix_like.rewards.registry import REWARDS


def exact_match(prompts: list[str], completions: list[str], answer: list[Any], **_: Any) -> list[float]:
    """Returns 1 for each completion that equals its `answer`, else 0. White space at both ends is ignored.

    Raises:
      UserError: an answer is missing or empty.
    """
    rows = zip(prompts, completions, answer, strict=True)
    return [float(text.strip() == given_text(right, "answer", prompt).strip()) for prompt, text, right in rows]


def by_source(
    prompts: list[str],
    completions: list[str],
    source_reward: list[str],
    step: Any = None,
    progress: Any = None,
    **columns: Any,
) -> list[float | None]:
    """Scores each completion with a registered reward function. `source_reward` has the name of this function for each
    completion.

    Each reward function is called once, with all its completions, and gets `step` and `progress` if it asks for them.

    Raises:
      UserError: a name is not registered, or a reward function returned an invalid reward (the message names the
        function). `scoring.score` then calls `by_source` again with fewer completions, to find the failing completion.
      Exception: any exception that a reward function raises.
    """
    given = {"prompts": prompts, "completions": completions, **columns}
    named = {"step": step, "progress": progress}  # columns of the data, or numbers of the run
    given |= {key: value for key, value in named.items() if isinstance(value, list)}
    moment = {key: value for key, value in named.items() if is_number(value)}
    out: list[float | None] = [None] * len(completions)
    for name in dict.fromkeys(source_reward):
        if name not in REWARDS:  # data must not be able to run code, so `FILE.py:function` is not accepted here
            raise UserError(
                f"Reward function 'by_source': the column 'source_reward' contains {name!r:.80}, which is not a "
                "registered function. Name your own function in rewards.functions."
            )
        rows = [i for i, row_name in enumerate(source_reward) if row_name == name]
        function = REWARDS[name]
        names = arguments_of(name, function, given, moment)
        arguments = {key: [given[key][i] for i in rows] if key in given else moment[key] for key in names}
        results = call(name, function, arguments, len(rows))
        if results.failures:
            raise UserError(next(iter(results.failures.values())).reason)
        for i, value in zip(rows, results.values(), strict=True):
            out[i] = value
    return out
