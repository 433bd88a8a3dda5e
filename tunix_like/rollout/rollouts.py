"""Scores completions and computes the metrics of scored groups.

The sampled tokens are used for training unchanged. Text is decoded only for the reward functions and for files, and is
never tokenized again.
"""

from __future__ import annotations

import collections
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from tunix_like.algorithms.pass_rates import bins_of, count_groups
from tunix_like.config.schema import AlgorithmConfig, RolloutConfig
from tunix_like.data.source import REWARD_COLUMN, SOURCE_COLUMN, DataSource
from tunix_like.errors import UserError, check_type
from tunix_like.rewards import Scores, check_arguments, check_form, resolve, score
from tunix_like.rewards.services import PerCompletion, WaitingFunction, scores_one
from tunix_like.rewards.turns import TurnReward, inner
from tunix_like.rollout.episodes import Episode, episode_metrics
from tunix_like.runtime.moment import START
from tunix_like.runtime.processes import across_processes, gather
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.types import Completions, Problem, RewardFunction

logger = logging.getLogger("tunix_like")

MOST_CUT = 0.5
"""Share of the completions of an evaluation or of the first step above which `warn_cut` warns."""

WeightedReward = tuple[str, RewardFunction, float]


def weighted_rewards(functions: Any, weights: Sequence[float] | None) -> list[WeightedReward]:
    """Returns the name, the function and the weight of each reward function.

    Args:
      functions: the learner's `reward_fns`: a function, a list of functions, or a mapping of names to functions.
      weights: the learner's `reward_weights`; defaults to ones.

    Raises:
      UserError: `reward_fns` or `reward_weights` is not valid.
    """
    named = functions if isinstance(functions, Mapping) else None
    if not callable(functions):
        cure = "give a function f(prompts, completions, **columns), a list of functions, or a mapping of names to them"
        check_type("reward_fns", functions, (Mapping, list, tuple), cure)
    functions = [functions] if callable(functions) else list(functions if named is None else named.values())
    weights = [1.0] * len(functions) if weights is None else list(weights)
    if not functions:
        raise UserError("reward_fns: give at least one reward function, or an environment.")
    if len(weights) != len(functions):
        raise UserError(f"reward_weights: got {len(weights)} for {len(functions)} reward functions.")
    for i, weight in enumerate(weights):
        cure = "give one finite number per reward function"
        check_type(f"reward_weights[{i}]", weight, (int, float, np.number), cure)
        if not math.isfinite(weight):
            raise UserError(f"reward_weights[{i}]: got {weight}; {cure}.")
    if named is None:
        names = [getattr(function, "__name__", type(function).__name__) for function in functions]
        names = [f"{name}_{names[:i].count(name) + 1}" if name in names[:i] else name for i, name in enumerate(names)]
    else:
        names = list(named)
    for name, function in zip(names, functions, strict=True):
        check_form(name, function)
    return [(n, _single(n, f), weight) for n, f, weight in zip(names, functions, weights, strict=True)]


def _single(name: str, function: Any) -> Any:
    """Returns a function that scores one completion, or turn, per call as one that scores groups."""
    if isinstance(function, TurnReward):
        return function.with_function(_single(name, function.function))
    return PerCompletion(name, function) if scores_one(function) else function


def check_rewards(source: DataSource, functions: Sequence[tuple[str, RewardFunction, float]]) -> None:
    """Checks that the rows of each source have the columns that the reward functions need. The rows are checked before
    they are mixed, because a mixed row has the columns of all sources."""
    for label, part in source.parts.items():
        columns = [*(name for name in part.train[0] if name != "prompt"), SOURCE_COLUMN, REWARD_COLUMN]
        called = [
            (name, resolve(part.reward) if name == "by_source" else function, weight)
            for name, function, weight in functions
        ]
        try:
            check_arguments(called, columns)
        except UserError as error:
            raise UserError(f"data source '{label}': {error}") from error


def call_metrics(rewards: Sequence[WeightedReward]) -> dict[str, float]:
    """Returns the number of calls and what else the rewards that wait for services count, of all processes."""
    called = {name: inner(function) for name, function, _ in rewards}
    own = {name: function.take_counts() for name, function in called.items() if isinstance(function, WaitingFunction)}
    metrics: collections.Counter[str] = collections.Counter()
    for counts in gather(own) if own else ():
        for name, values in counts.items():
            metrics.update({f"reward/{name}/{key}": value for key, value in values.items()})
    return {name: float(value) for name, value in metrics.items()}


class Task(NamedTuple):
    """The settings of sampling and scoring: group size, lengths, reward functions and success threshold."""

    algo: AlgorithmConfig
    rollout_config: RolloutConfig
    rewards: Sequence[WeightedReward]
    success_threshold: float


class Rollout(NamedTuple):
    """Scored groups: the `G` sampled completions of each of `P` prompts, with their texts and rewards.

    `texts`, `scores` and `episodes` have `P * G` entries, prompt after prompt. `episodes` is None without an
    environment.
    """

    problems: list[Problem]
    texts: list[str]
    completions: Completions
    scores: Scores
    episodes: list[Episode] | None = None

    @property
    def sampled_lengths(self) -> Int[np.ndarray, "P G"]:
        """The number of sampled tokens of each completion, without those of the environment's replies."""
        mask = self.completions.token_mask
        return self.completions.lengths if mask is None else mask.sum(axis=-1, dtype=np.int32)


def with_width(completions: Completions, width: int, segments: bool = False) -> Completions:
    """Pads or cuts the token axis of completions to `width`, and adds the `token_mask`, and with `segments` also a
    `segment_start` of zeros, if they are None."""

    def fit(values: np.ndarray) -> np.ndarray:
        return with_length(values, width, axis=2)

    mask = completions.token_mask
    mask = np.arange(width) < completions.lengths[..., None] if mask is None else fit(mask)
    start = completions.segment_start
    if start is None and segments:
        start = np.zeros(completions.tokens.shape, np.int32)
    return completions._replace(
        tokens=fit(completions.tokens),
        logprobs=fit(completions.logprobs),
        token_mask=mask,
        segment_start=None if start is None else fit(start),
        experts=None if completions.experts is None else fit(completions.experts),
    )


def with_length(values: np.ndarray, length: int, axis: int) -> np.ndarray:
    """Pads an axis of an array with zeros, or cuts it, to `length`."""
    values = values[(slice(None),) * axis + (slice(length),)]
    missing = [(0, length - values.shape[axis] if i == axis else 0) for i in range(values.ndim)]
    return np.pad(values, missing) if values.shape[axis] < length else values


def join_rollouts(first: Rollout, second: Rollout) -> Rollout:
    scores = first.scores.join(second.scores)
    sides = [first.completions, second.completions]
    if any(side.segment_start is not None for side in sides):  # no segments: one segment, which starts at 0
        sides = [s._replace(segment_start=np.zeros_like(s.tokens)) if s.segment_start is None else s for s in sides]
    if first.completions.prompt_experts is not None and second.completions.prompt_experts is not None:
        width = max(side.prompt_experts.shape[1] for side in sides)  # type: ignore[union-attr]
        sides = [s._replace(prompt_experts=with_length(s.prompt_experts, width, axis=1)) for s in sides]  # type: ignore[arg-type]
    parts = zip(*sides, strict=True)
    completions = Completions(*(None if part[0] is None else np.concatenate(part) for part in parts))  # type: ignore[arg-type]
    episodes = None if first.episodes is None else [*first.episodes, *(second.episodes or ())]
    return Rollout([*first.problems, *second.problems], [*first.texts, *second.texts], completions, scores, episodes)


def pick_groups(rollout: Rollout, groups: Int[np.ndarray, "N"]) -> Rollout:
    size = rollout.completions.lengths.shape[1]
    rows = (groups[:, None] * size + np.arange(size)).reshape(-1)
    scores = rollout.scores.pick(rows)
    completions = first_axis(rollout.completions, groups)
    episodes = None if rollout.episodes is None else [rollout.episodes[r] for r in rows]
    problems = [rollout.problems[g] for g in groups]
    texts = [rollout.texts[r] for r in rows]
    return Rollout(problems, texts, completions, scores, episodes)


def first_axis(completions: Completions, index: Any) -> Completions:
    """Applies `index` to the first axis of all arrays, that of the prompts."""
    return Completions(*(None if values is None else values[index] for values in completions))  # type: ignore[arg-type]


def segment_starts(completions: Completions) -> list[list[int]]:
    """Returns one list per completion, prompt after prompt: the index of the first token of each segment."""
    assert completions.segment_start is not None
    rows = completions.segment_start.reshape(-1, completions.tokens.shape[-1])
    lengths = completions.lengths.reshape(-1)
    return [np.unique(row[: max(length, 1)]).tolist() for row, length in zip(rows, lengths, strict=True)]


def warn_cut(what: str, finished: Bool[np.ndarray, "*shape"]) -> None:
    """Warns if most completions were cut at the token limit."""
    if (share := 1.0 - float(finished.mean())) > MOST_CUT:
        logger.warning(
            "%s: %.0f%% of the completions were cut at rollout.max_tokens_to_generate before they ended. Raise it; if "
            "completions never end, check the chat template (data.apply_chat_template) and rollout.eos_tokens.",
            what, 100 * share,
        )  # fmt: skip


def completion_texts(completions: Completions, tokenizer: Tokenizer) -> list[str]:
    """Decodes completions to text without special tokens, prompt after prompt, each process a share of them.

    If a completion has several segments, only the last one is decoded, which contains the history and the last turn. If
    it has one segment, its text begins with the first sampled token.
    """
    rows = completions.tokens.reshape(-1, completions.tokens.shape[-1])
    lengths = completions.lengths.reshape(-1)
    starts = [0] * len(rows)
    if completions.segment_start is not None and completions.token_mask is not None:
        first = completions.token_mask.reshape(rows.shape).argmax(axis=-1).tolist()
        starts = [each[-1] or first[row] for row, each in enumerate(segment_starts(completions))]

    def decoded(part: Sequence[int]) -> list[str]:
        return [tokenizer.decode(rows[i, starts[i] : lengths[i]].tolist()) for i in part]

    return across_processes(range(len(rows)), decoded)


def score_completions(
    functions: Sequence[WeightedReward],
    problems: Sequence[Problem],
    texts: Sequence[str],
    size: int,
    environments: Sequence[Any] | None = None,
) -> Scores:
    """Computes the rewards of all completions, each process those of a share of the problems.

    Each problem has `size` consecutive completions in `texts`. The reward functions get the data columns of the problem
    for each of them, and its environment as `environments` (see `RolloutTrajectories.environments`). All problems have
    the same `moment`.

    Raises:
      UserError: a reward function needs a column that the data does not have, or a column cannot be sent to worker
        processes.
    """
    names = [name for name, _, _ in functions]
    if not problems:
        none = np.zeros(0)
        return Scores(none, dict.fromkeys(names, none), none > 0, none > 0, none > 0, None)
    columns = {name for problem in problems for name in problem.columns}  # including columns that a share lacks

    def share(groups: Sequence[int]) -> list[tuple[list[list[float]], str | None]]:
        if not groups:
            return []
        selected = [problems[group] for group in groups]
        prompts, values = repeat_columns(selected, size, columns)
        own = slice(groups[0] * size, (groups[-1] + 1) * size)
        if environments is not None:
            values = {"environments": list(environments[own])} | values  # a column of this name goes first
        sources = [problem.source for problem in selected for _ in range(size)]
        moment = selected[0].moment or START
        scores = score(functions, prompts, list(texts[own]), values, size, sources, moment)
        masks = scores.failed, scores.timeouts, scores.errors
        # processes exchange text: for each prompt, numbers [total, 3 masks and a row per function; size]
        rows = np.stack([scores.total, *masks, *(scores.by_function[name] for name in names)])
        parts = np.moveaxis(rows.reshape(len(rows), len(selected), size), 1, 0).tolist()
        return [(part, None if i else scores.first_failure) for i, part in enumerate(parts)]

    parts, failures = zip(*across_processes(range(len(problems)), share), strict=True)
    total, *rest = np.moveaxis(np.array(parts, np.float64), 1, 0).reshape(len(names) + 4, -1)
    failed, timeouts, errors = (mask > 0 for mask in rest[:3])
    first = next(filter(None, failures), None)
    return Scores(total, dict(zip(names, rest[3:], strict=True)), failed, timeouts, errors, first)


def repeat_columns(
    problems: Sequence[Problem], size: int, among: Collection[str] = ()
) -> tuple[list[str], dict[str, list[Any]]]:
    """Returns the prompt of each problem `size` times, and likewise the values of each column by its name. The columns
    are those of all problems and those in `among`; a value that a problem lacks is None."""
    names = sorted(set(among).union(*(problem.columns for problem in problems)))
    columns = {name: [problem.columns.get(name) for problem in problems for _ in range(size)] for name in names}
    return [problem.text for problem in problems for _ in range(size)], columns


def rollout_metrics(rollout: Rollout, threshold: float) -> dict[str, Any]:
    """Computes the metrics of a rollout: rewards, lengths, pass-rate histogram and fraction of mixed groups.

    A group has all completions of one prompt. It is mixed if its rewards differ. If the data has several sources, the
    result also has `pass@1/<source>` and `rewards/mean/<source>`.
    """
    completions = rollout.completions
    scores = rollout.scores
    lengths = rollout.sampled_lengths
    shape = completions.lengths.shape
    total = scores.total.reshape(shape)
    scored = scores.scored.reshape(shape)
    seen = total[scored]
    metrics: dict[str, Any] = {
        f"rewards/{name}": _mean(values[~np.isnan(values)]) for name, values in scores.by_function.items()
    }
    metrics |= {
        "rewards/mean": _mean(seen),
        "rewards/std": float(seen.std()) if seen.size else float("nan"),
        "rewards/min": float(seen.min()) if seen.size else float("nan"),
        "rewards/max": float(seen.max()) if seen.size else float("nan"),
        "pass@1": _mean(succeeds(seen, threshold)),
        "reward/unscored_frac": 1.0 - float(scored.mean()),
        "reward/timeout_frac": float(scores.timeouts.mean()),
        "reward/error_frac": float(scores.errors.mean()),
        "groups/mixed_frac": float(mixed_groups(total, scored).mean()),
        "pass_rate/drawn": count_groups(pass_rate_bins(rollout, threshold)),
        "completions/mean_length": float(lengths.mean()),
        "completions/max_length": float(lengths.max()),
        "completions/min_length": float(lengths.min()),
        "completions/clipped_ratio": 1.0 - float(completions.finished.mean()),
    }
    if rollout.episodes is not None:
        metrics |= episode_metrics(rollout.episodes)
        metrics["completions/mean_total_length"] = float(completions.lengths.mean())
    for label, groups in groups_by_source(rollout.problems).items():
        seen = total[groups][scored[groups]]
        metrics |= {f"pass@1/{label}": _mean(succeeds(seen, threshold)), f"rewards/mean/{label}": _mean(seen)}
    return metrics


def pass_rate_bins(rollout: Rollout, threshold: float) -> Int[np.ndarray, "P"]:
    """Returns for each prompt the index of its pass-rate bin in `PASS_RATES`; -1 for a prompt without a
    scored completion. The pass rate is the fraction of the scored completions whose reward reaches `threshold`."""
    shape = rollout.completions.lengths.shape
    passed = succeeds(rollout.scores.total, threshold)
    return bins_of(passed.reshape(shape), rollout.scores.scored.reshape(shape))


def groups_by_source(problems: Sequence[Problem]) -> dict[str, Bool[np.ndarray, "P"]]:
    """Maps each data source (column `data_source`) to a mask of the problems from this source.

    The result is empty if the data has a single source. If the data is a mix of sources, the result is not empty, even
    if all given problems have the same source.
    """
    labels = [problem.columns.get(SOURCE_COLUMN) for problem in problems]
    names = sorted({label for label in labels if isinstance(label, str)})
    if len(names) < 2 and not any(REWARD_COLUMN in problem.columns for problem in problems):
        return {}
    return {name: np.array([label == name for label in labels]) for name in names}


def succeeds(rewards: np.ndarray, threshold: float) -> np.ndarray:
    """Returns for each total reward whether it reaches the threshold. The tolerance of 1e-6 is for rounding errors,
    e.g. in 0.7 + 0.2 + 0.1."""
    return rewards >= threshold - 1e-6


def mixed_groups(rewards: Float[np.ndarray, "P G"], scored: Bool[np.ndarray, "P G"]) -> Bool[np.ndarray, "P"]:
    """Returns for each prompt whether at least two of its scored completions have different rewards."""
    top = np.where(scored, rewards, -np.inf).max(axis=1)
    return top > np.where(scored, rewards, np.inf).min(axis=1)


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else float("nan")
