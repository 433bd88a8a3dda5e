"""Collects the data of a training step: takes prompts, samples completions, scores the completions and adjusts the
rewards (overlong penalty, binarization).

With dynamic sampling, further batches are sampled until enough prompts have completions with different rewards.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from tunix_like.algorithms.objective import Objective
from tunix_like.algorithms.registry import check_rewards
from tunix_like.config.schema import AlgorithmConfig, RolloutConfig
from tunix_like.data.source import SOURCE_COLUMN
from tunix_like.data.stream import Prompt
from tunix_like.data.tokenizer import Tokenizer
from tunix_like.errors import UserError
from tunix_like.rollout.environments.episodes import with_environment
from tunix_like.rollout.environments.generation import generate
from tunix_like.rollout.environments.trajectories import Player
from tunix_like.rollout.files import FirstFailure, nothing_scored_message, saved_on_failure
from tunix_like.rollout.rollouts import (
    Rollout,
    Task,
    completion_texts,
    join_rollouts,
    mixed_groups,
    pick_groups,
    rollout_metrics,
    score_completions,
    succeeds,
    to_batch,
    with_width,
)
from tunix_like.runtime import progress
from tunix_like.types import Engine, GroupBatch, Problem, SamplingParams

logger = logging.getLogger("tunix_like")

TRAIN_KEY = 1
"""Number that is folded into the random key of the run for training. Evaluation folds in `EVAL_KEY` instead, so
training and evaluation use different random numbers."""

EXTRA_BATCHES = 4
"""Maximum number of extra rollout batches per step if `algorithm.max_extra_batches` is not set."""


class Collected(NamedTuple):
    """The prompts and completions of one training step. A group has all completions of one prompt.

    Attributes:
      rollout: the groups to train on.
      batch: `rollout` with its rewards after `shape_rewards`, as the arrays of the training step.
      metrics: metrics of all groups that were sampled for the step, including groups that are not trained on.
      tokens: number of completion tokens that were sampled for the step, including groups that are not trained on.
    """

    rollout: Rollout
    batch: GroupBatch
    metrics: dict[str, Any]
    tokens: int


@dataclasses.dataclass
class Collector:
    """Takes prompts, samples completions of each prompt, scores the completions and adjusts the rewards (see
    `shape_rewards`).

    An instance is called once per training step.

    Attributes:
      batches: iterator over the batches of prompts of the run.
      key: random key from which the random keys of all completions of the run are derived.
      rollouts: folder for the completions of a batch whose scoring raises an error, and for the text of the first
        failure of a reward function. If None, nothing is written.
      player: passes the turns of completions to environments; None if completions have a single turn.
      drawn: number of prompts taken from `batches` so far. The next prompt gets this value as its `Problem.number`, so
        these numbers are unique in a run.
      started: whether the run has taken a batch from `batches`. For a resumed run, batches taken before the checkpoint
        count too.
    """

    task: Task
    engine: Engine
    tokenizer: Tokenizer
    objective: Objective
    batches: Iterator[list[Prompt]]
    batch_size: int
    key: jax.Array
    rollouts: Path | None = None
    first_failure: FirstFailure = dataclasses.field(default_factory=FirstFailure)
    drawn: int = 0
    player: Player | None = None
    started: bool = False
    _warned: bool = False

    def __call__(self, step: int, params: Any, lap: Callable[[str], None]) -> Collected | None:
        """Samples and scores the completions of training step `step`. Returns None if the data has no further batch.

        Args:
          params: the weights, from `Engine.place`.
          lap: called at the end of each part of the work with the name of the part: "data", "rollout" or "reward".

        Raises:
          UserError: no completion of the first batch could be scored, the advantage estimator does not accept the
            rewards, or the data has fewer prompts than one batch. In the first two cases the completions are written to
            the folder `rollouts`.
        """
        algo, lengths = self.task.algo, self.task.rollout_config
        metrics: dict[str, Any] = {}
        if self.player is not None:
            self.player.seconds = 0.0  # evaluations have increased it
        drawn = self._draw(step, params, lap)
        if drawn is None:
            return None
        rollout, rewards = drawn
        if algo.dynamic_sampling:
            rollout, rewards, metrics = self._sample_dynamically(step, params, rollout, rewards, lap)
        metrics |= rollout_metrics(rollout, self.task.success_threshold)
        if self.player is not None:
            metrics["time/environment"] = self.player.seconds
        tokens = int(rollout.sampled_lengths.sum())
        if len(rollout.problems) > self.batch_size:
            chosen = np.sort(np.argsort(~self._has_signal(rollout, rewards), kind="stable")[: self.batch_size])
            rollout, rewards = pick_groups(rollout, chosen), rewards[chosen]
        return Collected(rollout, training_batch(rollout, rewards, self.objective, lengths), metrics, tokens)

    def _sample_dynamically(
        self,
        step: int,
        params: Any,
        rollout: Rollout,
        rewards: Float[np.ndarray, "P G"],
        lap: Callable[[str], None],
    ) -> tuple[Rollout, Float[np.ndarray, "N G"], dict[str, float]]:
        """Samples extra batches until `batch_size` prompts have a training signal (roughly: different rewards; see
        `_has_signal`), the maximum number of extra batches is reached, or the data has no further batch.

        This is dynamic sampling (DAPO, arXiv 2503.14476). `rollout` and `rewards` are the results of the first batch.
        Returns the rollout and the rewards of all batches, the first batch included, and the metrics
        `dynamic_sampling/*`.
        """
        cap, extra = self.task.algo.max_extra_batches or EXTRA_BATCHES, 0
        while (short := self.batch_size - int(self._has_signal(rollout, rewards).sum())) > 0 and extra < cap:
            drawn = self._draw(step, params, lap)
            if drawn is None:
                break
            rollout, rewards = join_rollouts(rollout, drawn[0]), np.concatenate([rewards, drawn[1]])
            extra += 1
        if short > 0 and not self._warned:
            self._warned = True
            logger.warning(
                "step %d: dynamic sampling found %d of %d groups with different rewards after %d extra batch(es); "
                "other groups fill the rest of the batch. Later steps do not repeat this warning; see the metric "
                "dynamic_sampling/short_groups",
                step,
                self.batch_size - short,
                self.batch_size,
                extra,
            )
        counts = {"extra_batches": extra, "short_groups": max(short, 0), "unused_groups": max(-short, 0)}
        return rollout, rewards, {f"dynamic_sampling/{name}": float(count) for name, count in counts.items()}

    def _has_signal(self, rollout: Rollout, rewards: Float[np.ndarray, "P G"]) -> Bool[np.ndarray, "P"]:
        """Returns for each prompt whether it has a training signal: the rewards of its completions differ, and it has
        as many scored completions as its advantage estimator needs."""
        scored = ~np.isnan(rewards)
        return mixed_groups(rewards, scored) & self.objective.kept_groups(
            scored, estimator_ids(self.objective, rollout)
        )

    def _draw(
        self, step: int, params: Any, lap: Callable[[str], None]
    ) -> tuple[Rollout, Float[np.ndarray, "P G"]] | None:
        """Samples and scores completions for the next batch of prompts.

        Returns the rollout and its shaped rewards (see `shape_rewards`); the reward of an unscored completion is NaN.
        Returns None if the data has no further batch.
        """
        size, rollout = self.task.algo.num_generations, self.task.rollout_config
        prompts = next(self.batches, None)
        if prompts is None and not self.started:
            raise UserError(
                f"the training data has fewer than {self.batch_size} usable prompts, which one step needs; lower the "
                "batch size (data.batch_size). If the data is an iterator, check that it was not consumed before."
            )
        if prompts is None:
            return None
        self.started = True
        problems = [Problem(self.drawn + i, *prompt) for i, prompt in enumerate(prompts)]
        self.drawn += len(problems)
        lap("data")
        key = jax.random.fold_in(self.key, TRAIN_KEY)
        sampling = SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k)
        problems, out, trajectories = generate(self.engine, self.player, params, problems, size, key, sampling)
        rewrites = self.player is not None and self.player.rewrites
        completions = with_width(out, rollout.max_tokens_to_generate, segments=rewrites)
        episodes = None if trajectories is None else trajectories.episodes()
        lap("rollout")
        texts = completion_texts(completions, self.tokenizer)
        with progress.task("rewards"), saved_on_failure(self.rollouts, step, problems, texts):
            scores = score_completions(self.task.rewards, problems, texts, size)
            scores = scores if episodes is None else with_environment(scores, episodes)
            sampled = Rollout(problems, texts, completions, scores, episodes)
            rewards = self._rewards(sampled)
            if problems[0].number == 0 and not scores.scored.any():
                raise UserError(nothing_scored_message(scores))
        self.first_failure(scores, self.rollouts)
        lap("reward")
        return sampled, rewards

    def _rewards(self, rollout: Rollout) -> Float[np.ndarray, "P G"]:
        """Returns the rewards of a rollout after the overlong penalty and the binarization (see `shape_rewards`).
        Raises UserError if an advantage estimator does not accept one of its rewards."""
        lengths, algo = rollout.completions.lengths, self.task.algo
        total = rollout.scores.total.reshape(lengths.shape)
        rewards = shape_rewards(
            total, lengths, algo, self.task.rollout_config.max_tokens_to_generate, self.task.success_threshold
        )
        scored = ~np.isnan(total)
        ids = estimator_ids(self.objective, rollout)

        def describe(group: int, sample: int) -> str:
            parts = {
                name: values.reshape(lengths.shape)[group, sample]
                for name, values in rollout.scores.by_function.items()
            }
            values = ", ".join(f"{name} gave {value:g}" for name, value in parts.items())
            return f"prompt {rollout.problems[group].text!r:.80} (group {group}), completion {sample} ({values})"

        for index, estimator in enumerate(self.objective.estimators):
            selected = scored & (ids == index)[:, None]
            check_rewards(estimator.name, estimator.params, rewards, selected, describe)
        return rewards


def estimator_ids(objective: Objective, rollout: Rollout) -> Int[np.ndarray, "P"]:
    """Returns for each prompt of a rollout the index of its advantage estimator in `objective.estimators`."""
    return objective.estimator_ids([problem.columns.get(SOURCE_COLUMN) for problem in rollout.problems])


def training_batch(
    rollout: Rollout, rewards: Float[np.ndarray, "P G"], objective: Objective, lengths: RolloutConfig
) -> GroupBatch:
    """Converts a rollout and its rewards (after `shape_rewards`) to the batch of a training step. `lengths` has the
    maximum lengths of prompts and completions."""
    batch = to_batch(rollout, rewards, lengths.max_prompt_length, lengths.max_tokens_to_generate)
    trained = rollout.completions.finished if objective.config.overlong == "mask" else None
    return batch._replace(estimator_ids=estimator_ids(objective, rollout), trained=trained)


def shape_rewards(
    total: Float[np.ndarray, "P G"],
    lengths: Int[np.ndarray, "P G"],
    algo: AlgorithmConfig,
    max_tokens: int,
    success_threshold: float,
) -> Float[np.ndarray, "P G"]:
    """Applies the overlong penalty and then the binarization to the total rewards, if `algo` enables them.

    If `algo.overlong` is `penalty`, the overlong penalty of DAPO (arXiv 2503.14476) is subtracted from each reward. The
    penalty is 0 up to a length of `max_tokens - overlong_buffer` tokens. Above this length the penalty increases
    linearly to `overlong_penalty` at `max_tokens` tokens.

    If `algo.binarize` is True, each reward is then replaced by 1 if it reaches `success_threshold`, otherwise by 0. The
    reward of an unscored completion stays NaN.
    """
    if algo.overlong == "penalty":
        assert algo.overlong_buffer is not None
        over = np.clip((lengths - (max_tokens - algo.overlong_buffer)) / algo.overlong_buffer, 0.0, 1.0)
        total = total - (1.0 if algo.overlong_penalty is None else algo.overlong_penalty) * over
    if algo.binarize:
        total = np.where(np.isnan(total), np.nan, succeeds(total, success_threshold).astype(np.float64))
    return total.astype(np.float32)  # as in the estimator, so rewards that differ only in float64 are equal
