"""From the data stream to scored groups: draw prompts, sample, score, shape the rewards; draw again where asked.

It knows what a reward is made of and when a group teaches nothing; it knows no estimator's formula, no loss and no
optimizer.
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
from tunix_like.config.schema import AlgorithmConfig
from tunix_like.data.stream import Prompt
from tunix_like.data.tokenizer import Tokenizer
from tunix_like.errors import UserError
from tunix_like.rollout.rollouts import (
    FirstFailure,
    Rollout,
    Task,
    completion_texts,
    join_rollouts,
    mixed_groups,
    nothing_scored,
    pick_groups,
    rollout_metrics,
    saved_on_failure,
    score_completions,
    succeeds,
    to_batch,
)
from tunix_like.runtime import progress
from tunix_like.types import Engine, GroupBatch, Problem, SamplingParams

logger = logging.getLogger("tunix_like")

TRAIN_KEY = 1
"""Branch of the run's random key; evaluation has `EVAL_KEY`, so the two never share a draw."""

EXTRA_BATCHES = 4
"""Further rollout batches a step when `algorithm.max_extra_batches` is unset."""


class Collected(NamedTuple):
    """One step's groups. `metrics` and `tokens` (completion tokens sampled) speak of everything that was drawn for
    it."""

    rollout: Rollout
    batch: GroupBatch
    metrics: dict[str, Any]
    tokens: int


@dataclasses.dataclass
class Collector:
    """Draws prompts, samples a group for each, scores it and shapes the rewards; called once a step.

    Attributes:
      key: random key that all completions of the run are drawn from.
      rollouts: folder for completions that cannot be scored, or None.
      drawn: prompts taken from the stream so far: the number of the next problem, so that none repeats in a run.
      started: True once a batch was drawn, in this call or before the checkpoint that is resumed.
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
    started: bool = False
    _warned: bool = False

    def __call__(self, step: int, params: Any, lap: Callable[[str], None]) -> Collected | None:
        """Returns the groups of a step, or None when the data is used up.

        Args:
          params: all weights of the model.
          lap: called with the name of each part of the work when it is done.

        Raises:
          UserError: the reward functions failed for every completion of the first batch, or gave what the estimator
            does not take; the completions are in `rollouts/` by then. Or the data does not make one batch.
        """
        algo, lengths = self.task.algo, self.task.rollout_config
        metrics: dict[str, Any] = {}
        drawn = self._draw(step, params, lap)
        if drawn is None:
            return None
        rollout, rewards = drawn
        if algo.dynamic_sampling:
            rollout, rewards, metrics = self._further(step, params, rollout, rewards, lap)
        metrics |= rollout_metrics(rollout, self.task.success_threshold)
        tokens = int(rollout.completions.lengths.sum())
        if len(rollout.problems) > self.batch_size:
            chosen = np.sort(np.argsort(~self._teaches(rollout, rewards), kind="stable")[: self.batch_size])
            rollout, rewards = pick_groups(rollout, chosen), rewards[chosen]
        batch = to_batch(rollout, rewards, lengths.max_prompt_length, lengths.max_tokens_to_generate)
        batch = batch._replace(estimator_ids=self._estimator_ids(rollout))
        if algo.overlong == "mask":
            batch = batch._replace(trained=rollout.completions.finished)
        return Collected(rollout, batch, metrics, tokens)

    def _further(
        self,
        step: int,
        params: Any,
        rollout: Rollout,
        rewards: Float[np.ndarray, "P G"],
        lap: Callable[[str], None],
    ) -> tuple[Rollout, Float[np.ndarray, "N G"], dict[str, float]]:
        """Dynamic sampling (DAPO, arXiv 2503.14476): further batches until there are enough groups whose rewards
        differ, or the cap is reached. Returns all that were drawn."""
        cap, extra = self.task.algo.max_extra_batches or EXTRA_BATCHES, 0
        while (short := self.batch_size - int(self._teaches(rollout, rewards).sum())) > 0 and extra < cap:
            drawn = self._draw(step, params, lap)
            if drawn is None:
                break
            rollout, rewards = join_rollouts(rollout, drawn[0]), np.concatenate([rewards, drawn[1]])
            extra += 1
        if short > 0 and not self._warned:
            self._warned = True
            logger.warning(
                "step %d: dynamic sampling found %d groups of differing rewards for %d in %d extra batch(es) and fills "
                "up with others; the metric dynamic_sampling/short_groups counts them from here on",
                step,
                self.batch_size - short,
                self.batch_size,
                extra,
            )
        counts = {"extra_batches": extra, "short_groups": max(short, 0), "unused_groups": max(-short, 0)}
        return rollout, rewards, {f"dynamic_sampling/{name}": float(count) for name, count in counts.items()}

    def _teaches(self, rollout: Rollout, rewards: Float[np.ndarray, "P G"]) -> Bool[np.ndarray, "P"]:
        """Groups whose rewards differ, and of which enough are scored for their estimator."""
        scored = ~np.isnan(rewards)
        return mixed_groups(rewards, scored) & self.objective.kept_groups(scored, self._estimator_ids(rollout))

    def _estimator_ids(self, rollout: Rollout) -> Int[np.ndarray, "P"]:
        return self.objective.estimator_ids([problem.columns.get("data_source") for problem in rollout.problems])

    def _draw(
        self, step: int, params: Any, lap: Callable[[str], None]
    ) -> tuple[Rollout, Float[np.ndarray, "P G"]] | None:
        """Returns the next batch of prompts, sampled and scored, and its shaped rewards (NaN where unscored)."""
        size, rollout = self.task.algo.num_generations, self.task.rollout_config
        prompts = next(self.batches, None)
        if prompts is None and not self.started:
            raise UserError(
                f"the training data has fewer than {self.batch_size} usable prompts, which make one step; lower the "
                "batch size (data.batch_size). An iterator that was read before is empty."
            )
        if prompts is None:
            return None
        self.started = True
        problems = [Problem(self.drawn + i, *prompt) for i, prompt in enumerate(prompts)]
        self.drawn += len(problems)
        lap("data")
        completions = self.engine.generate(
            params,
            [problem.tokens for problem in problems],
            [problem.number for problem in problems],
            size,
            jax.random.fold_in(self.key, TRAIN_KEY),
            SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k),
        )
        lap("rollout")
        texts = completion_texts(completions, self.tokenizer)
        with progress.task("rewards"), saved_on_failure(self.rollouts, step, problems, texts):
            scores = score_completions(self.task.rewards, problems, texts, size)
            sampled = Rollout(problems, texts, completions, scores)
            rewards = self._rewards(sampled)
            if problems[0].number == 0 and not scores.scored.any():
                raise UserError(nothing_scored(scores))
        self.first_failure(scores, self.rollouts)
        lap("reward")
        return sampled, rewards

    def _rewards(self, rollout: Rollout) -> Float[np.ndarray, "P G"]:
        """What the estimator is given: the functions' total, shaped and checked."""
        lengths, algo = rollout.completions.lengths, self.task.algo
        total = rollout.scores.total.reshape(lengths.shape)
        rewards = shape_rewards(
            total, lengths, algo, self.task.rollout_config.max_tokens_to_generate, self.task.success_threshold
        )
        scored = ~np.isnan(total)
        ids = self._estimator_ids(rollout)

        def place(group: int, sample: int) -> str:
            parts = {
                name: values.reshape(lengths.shape)[group, sample]
                for name, values in rollout.scores.by_function.items()
            }
            given = ", ".join(f"{name} gave {value:g}" for name, value in parts.items())
            return f"prompt {rollout.problems[group].text!r:.80} (group {group}), completion {sample} ({given})"

        for number, each in enumerate(self.objective.estimators):
            own = scored & (ids == number)[:, None]
            check_rewards(each.name, each.params, rewards, own, place)
        return rewards


def shape_rewards(
    total: Float[np.ndarray, "P G"],
    lengths: Int[np.ndarray, "P G"],
    algo: AlgorithmConfig,
    max_tokens: int,
    success_threshold: float,
) -> Float[np.ndarray, "P G"]:
    """The functions' total less the overlong penalty, then binarized if so configured. NaN stays NaN.

    The penalty of DAPO (arXiv 2503.14476), in tokens: 0 up to `max_tokens - overlong_buffer`, then linear, up to
    `overlong_penalty` at `max_tokens`.
    """
    if algo.overlong == "penalty":
        assert algo.overlong_buffer is not None
        over = np.clip((lengths - (max_tokens - algo.overlong_buffer)) / algo.overlong_buffer, 0.0, 1.0)
        total = total - (1.0 if algo.overlong_penalty is None else algo.overlong_penalty) * over
    if algo.binarize:
        total = np.where(np.isnan(total), np.nan, succeeds(total, success_threshold).astype(np.float64))
    return total.astype(np.float32)  # as the estimator gets them: what differs in float64 alone does not differ
