"""Collects the groups of completions of a training step: takes prompts, samples and scores completions.

With dynamic sampling, further batches are sampled until enough prompts have completions with different rewards.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from tunix_like.algorithms.advantages import sum_of_normalised
from tunix_like.algorithms.objective import Objective
from tunix_like.algorithms.registry import check_rewards
from tunix_like.algorithms.turns import BY_CRITIC, GroupTurns
from tunix_like.config.schema import AlgorithmConfig, RLTrainingConfig
from tunix_like.data.curriculum import CurriculumBatches
from tunix_like.data.source import SOURCE_COLUMN
from tunix_like.data.stream import Prompt
from tunix_like.errors import EngineLost, UserError
from tunix_like.rewards import Scores
from tunix_like.rollout.episodes import Episode
from tunix_like.rollout.files import FirstFailure, nothing_scored_message, saved_on_failure
from tunix_like.rollout.requests import RolloutPlayer, RolloutTrajectories, generate
from tunix_like.rollout.rollouts import (
    Rollout,
    Task,
    call_metrics,
    completion_texts,
    join_rollouts,
    mixed_groups,
    pick_groups,
    rollout_metrics,
    succeeds,
    with_length,
    with_width,
)
from tunix_like.rollout.scoring import score_trajectories
from tunix_like.rollout.shapes import length_bucket, pad_tokens
from tunix_like.runtime import progress
from tunix_like.runtime.moment import moment_of
from tunix_like.runtime.profile import Clock
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.types import Completions, Engine, GroupBatch, Problem, SamplingParams

logger = logging.getLogger("tunix_like")

TRAIN_KEY = 1
"""Number that is folded into the random key of the run for training. Evaluation folds in `EVAL_KEY` instead, so
training and evaluation use different random numbers."""

EXTRA_BATCHES = 4
"""Maximum number of extra rollout batches per step if `algorithm.max_extra_batches` is not set."""

Collected = tuple[Rollout, dict[str, Any]]
"""The groups to train on in a step, and metrics of all groups that were sampled for it."""


class _Sampled(NamedTuple):
    """The completions of a batch of prompts before they are scored."""

    problems: list[Problem]
    texts: list[str]
    completions: Completions
    trajectories: RolloutTrajectories | None
    episodes: list[Episode] | None


@dataclasses.dataclass
class Collector:
    """Takes prompts, and samples and scores completions of each prompt. An instance is called once per training step.

    Attributes:
      batches: iterator over the batches of prompts of the run.
      key: random key from which the random keys of all completions of the run are derived.
      folder: folder for the completions of a batch whose scoring raises an error, and for the text of the first
        failure of a reward function. If None, nothing is written.
      player: passes the turns of completions to environments; None if completions have a single turn.
      drawn: number of prompts taken from `batches` so far. The next prompt gets this value as its `Problem.number`, so
        these numbers are unique in a run.
      most_unscored: the number of consecutive steps without a scored completion after which EngineLost is raised.
      total: the number of the last step; None if it is unknown.
      on_first_prompts: called with the prompts of the first batch of this collector, before they are sampled.
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
    folder: Path | None = None
    first_failure: FirstFailure = dataclasses.field(default_factory=FirstFailure)
    drawn: int = 0
    player: RolloutPlayer | None = None
    most_unscored: int = RLTrainingConfig.max_unscored_steps
    total: int | None = None
    on_first_prompts: Callable[[Sequence[Problem]], None] | None = None
    started: bool = False
    _warned: bool = False
    _unscored: int = 0

    def __call__(self, step: int, params: Any, clock: Clock) -> Collected | None:
        """Returns the groups to train on in step `step`, and metrics of all groups that were sampled for it. Returns
        None if the data has no further batch.

        Args:
          params: the weights, from `Engine.place`.
          clock: a new clock, which gets the time of each part of the work: "data", "rollout" (without the wait for
            environments), "environment" (this wait) and "reward".

        Raises:
          UserError: no completion of the first batch could be scored, the advantage estimator does not accept the
            rewards, or the data has fewer prompts than one batch. In the first two cases the completions are written to
            `folder`.
          EngineLost: this is the last of `most_unscored` consecutive steps without a scored completion.
        """
        finish = self.sample(step, params, clock)
        return None if finish is None else finish()

    def sample(self, step: int, params: Any, clock: Clock) -> Callable[[], Collected] | None:
        """Does the first part of a call, which uses the data and the engine. Returns the function that does the rest,
        which can run while the completions of the next step are sampled.

        With dynamic sampling, the first part includes the rewards, because they determine how many prompts are taken.
        """
        row_steps = self.engine.row_steps
        sampled = self._sample(step, params, clock)
        if sampled is None:
            return None
        rollout: Rollout | None = None
        counts: dict[str, float] = {}
        if self.task.algo.dynamic_sampling:
            rollout, counts = self._sample_dynamically(step, params, self._score(step, sampled, clock), clock)
        row_steps = self.engine.row_steps - row_steps

        def finish() -> Collected:
            scored = self._score(step, sampled, clock) if rollout is None else rollout
            return self._finish(step, scored, counts, row_steps, clock)

        return finish

    def _finish(self, step: int, rollout: Rollout, metrics: dict[str, Any], row_steps: int, clock: Clock) -> Collected:
        calls = call_metrics(self.task.rewards)
        self._check_scored(rollout, calls)
        metrics |= rollout_metrics(rollout, self.task.success_threshold) | calls
        tokens = int(rollout.sampled_lengths.sum())
        metrics["perf/generation_tokens_per_sec"] = tokens / sampling_seconds(clock.seconds)
        metrics["perf/rollout_occupancy"] = tokens / row_steps if row_steps else float("nan")
        if isinstance(self.batches, CurriculumBatches):
            scored = rollout.scores.scored.reshape(rollout.completions.lengths.shape)
            passed = succeeds(rollout.scores.total, self.task.success_threshold).reshape(scored.shape) & scored
            metrics |= self.batches.observe(rollout.problems, passed.sum(axis=1), scored.sum(axis=1))
        if len(rollout.problems) > self.batch_size:
            chosen = np.sort(np.argsort(~self._has_signal(step, rollout), kind="stable")[: self.batch_size])
            rollout = pick_groups(rollout, chosen)
        return rollout, metrics

    def _check_scored(self, rollout: Rollout, calls: Mapping[str, float]) -> None:
        """Counts steps without a scored completion, or in which a service answered no call: completions whose rewards
        are known from before would then train on."""
        silent = [
            f"no call of the reward '{name}' was answered"
            for name, _, _ in self.task.rewards
            if (begun := calls.get(f"reward/{name}/calls", 0.0) - calls.get(f"reward/{name}/retries", 0.0)) > 0
            and calls[f"reward/{name}/unanswered"] >= begun
        ]
        if self.objective.reads_rewards and not rollout.scores.scored.any():
            silent = [nothing_scored_message(rollout.scores)]
        self._unscored = self._unscored + 1 if silent else 0
        if self._unscored >= self.most_unscored:
            raise EngineLost(f"in each of the last {self._unscored} steps (training.max_unscored_steps) {silent[0]}")

    def _sample_dynamically(
        self, step: int, params: Any, rollout: Rollout, clock: Clock
    ) -> tuple[Rollout, dict[str, float]]:
        """Dynamic sampling (DAPO, arXiv 2503.14476): samples extra batches until `batch_size` prompts have a training
        signal (see `_has_signal`), the maximum number of extra batches is reached, or the data has no further batch.

        Returns `rollout`, the groups of the first batch, joined with those of the extra batches, and metrics.
        """
        cap = self.task.algo.max_extra_batches or EXTRA_BATCHES
        extra = 0
        while (short := self.batch_size - int(self._has_signal(step, rollout).sum())) > 0 and extra < cap:
            sampled = self._sample(step, params, clock)
            if sampled is None:
                break
            rollout = join_rollouts(rollout, self._score(step, sampled, clock))
            extra = extra + 1
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
        return rollout, {f"dynamic_sampling/{name}": float(count) for name, count in counts.items()}

    def _has_signal(self, step: int, rollout: Rollout) -> Bool[np.ndarray, "P"]:
        """Returns for each prompt whether it has a training signal: the rewards of its completions differ, and it has
        as many scored completions as its advantage estimator needs."""
        rewards = rewards_for_estimators(rollout, self.task, self.objective)
        ids = estimator_ids(self.objective, rollout)
        scored = ~np.isnan(rewards)
        objective = self.objective.at(step)
        mixed = mixed_groups(objective.float32_rewards(rewards, scored, ids), scored)
        if self.task.algo.credit == "turn":  # equal sums may be of different rewards
            mixed |= _turns_differ(rollout, scored)
        return mixed & objective.kept_groups(scored, ids)

    def _sample(self, step: int, params: Any, clock: Clock) -> _Sampled | None:
        """Samples completions for the next batch of prompts; None if there is none."""
        size = self.task.algo.num_generations
        settings = self.task.rollout_config
        prompts = next(self.batches, None)
        if prompts is None and not self.started:
            raise UserError(
                f"the training data has fewer than {self.batch_size} usable prompts, which one step needs; lower the "
                "batch size (data.batch_size). If the data is an iterator, check that it was not consumed before."
            )
        if prompts is None:
            return None
        self.started = True
        moment = moment_of(step, step - 1, self.total)
        problems = [Problem(self.drawn + i, *prompt, moment=moment) for i, prompt in enumerate(prompts)]
        self.drawn += len(problems)
        clock.lap("data")
        if self.on_first_prompts is not None:
            self.on_first_prompts(problems)
            self.on_first_prompts = None
        key = jax.random.fold_in(self.key, TRAIN_KEY)
        sampling = SamplingParams(settings.temperature, settings.top_p, settings.top_k)
        if self.player is not None:
            self.player.seconds = 0.0  # evaluations have increased it
        problems, out, trajectories = generate(self.engine, self.player, params, problems, size, key, sampling)
        rewrites = self.player is not None and self.player.rewrites
        completions = with_width(out, settings.max_tokens_to_generate, segments=rewrites)
        episodes = None if trajectories is None else trajectories.episodes()
        clock.lap("rollout")
        if self.player is not None:
            clock.move(self.player.seconds, "rollout", "environment")
        texts = completion_texts(completions, self.tokenizer)
        clock.lap("reward")
        return _Sampled(problems, texts, completions, trajectories, episodes)

    def _score(self, step: int, sampled: _Sampled, clock: Clock) -> Rollout:
        problems, texts, completions, trajectories, episodes = sampled
        with progress.task("rewards"), saved_on_failure(self.folder, step, problems, texts):
            played = None if trajectories is None else trajectories.environments()
            size = self.task.algo.num_generations
            scores, episodes = score_trajectories(self.task.rewards, problems, texts, size, episodes, played)
            rollout = Rollout(problems, texts, completions, scores, episodes)
            self._check_rewards(step, rollout)
            if self.objective.reads_rewards and problems[0].number == 0 and not scores.scored.any():
                raise UserError(nothing_scored_message(scores))
        self.first_failure(scores, self.folder)
        clock.lap("reward")
        return rollout

    def _check_rewards(self, step: int, rollout: Rollout) -> None:
        """Raises UserError if an advantage estimator does not accept one of the rewards."""
        rewards = rewards_for_estimators(rollout, self.task, self.objective)
        ids = estimator_ids(self.objective, rollout)

        def describe(group: int, sample: int) -> str:
            parts = {
                name: values.reshape(rewards.shape)[group, sample]
                for name, values in rollout.scores.by_function.items()
            }
            values = ", ".join(f"{name} gave {value:g}" for name, value in parts.items())
            return f"prompt {rollout.problems[group].text!r:.80} (group {group}), completion {sample} ({values})"

        for index, estimator in enumerate(self.objective.at(step).estimators):
            selected = ~np.isnan(rewards) & (ids == index)[:, None]
            check_rewards(estimator.name, estimator.params, rewards, selected, describe)


def sampling_seconds(seconds: Mapping[str, float], prefix: str = "time") -> float:
    """Returns the seconds of sampling, including the wait for environments, from the times `<prefix>/<part>`."""
    return max(seconds[f"{prefix}/rollout"] + seconds.get(f"{prefix}/environment", 0.0), 1e-9)


def estimator_ids(objective: Objective, rollout: Rollout) -> Int[np.ndarray, "P"]:
    """Returns for each prompt of a rollout the index of its advantage estimator in `objective.estimators`."""
    return objective.estimator_ids([problem.columns.get(SOURCE_COLUMN) for problem in rollout.problems])


def training_batch(rollout: Rollout, task: Task, objective: Objective) -> GroupBatch:
    """Converts groups to the arrays of a training step.

    The lengths of the prompt axis and of the completion axis are the lengths of the longest prompt and of the longest
    completion, rounded up by `length_bucket`.
    """
    out = rollout.completions
    limits = task.rollout_config
    lengths = np.array([len(problem.tokens) for problem in rollout.problems], np.int32)
    width = length_bucket(int(lengths.max()), limits.max_prompt_length)
    steps = length_bucket(int(out.lengths.max()), limits.max_tokens_to_generate)
    rewards = rewards_for_estimators(rollout, task, objective)
    factors = [problem.weight for problem in rollout.problems]
    return GroupBatch(
        prompt_tokens=pad_tokens([problem.tokens for problem in rollout.problems], width),
        prompt_lengths=lengths,
        completion_tokens=out.tokens[:, :, :steps],
        completion_lengths=out.lengths,
        token_mask=None if out.token_mask is None else out.token_mask[:, :, :steps],
        segment_start=None if out.segment_start is None else out.segment_start[:, :, :steps],
        rollout_logprobs=out.logprobs[:, :, :steps],
        rewards=np.where(np.isnan(rewards), 0, rewards),
        scored=~np.isnan(rewards) if objective.reads_rewards else np.ones(rewards.shape, bool),
        trained=out.finished if task.algo.overlong == "mask" else None,
        estimator_ids=estimator_ids(objective, rollout),
        prompt_weights=None if None in factors else np.array(factors, np.float32),
        experts=None if out.experts is None else out.experts[:, :, :steps],
        prompt_experts=None if out.prompt_experts is None else with_length(out.prompt_experts, width, axis=1),
    )


def longest_batch(problems: Sequence[Problem], task: Task, objective: Objective) -> GroupBatch:
    """Returns a `training_batch` of prompts whose completions, of a single turn, have the maximum length."""
    shape = len(problems), task.algo.num_generations
    length = task.rollout_config.max_tokens_to_generate
    completions = Completions(
        tokens=np.zeros((*shape, length), np.int32),
        lengths=np.full(shape, length, np.int32),
        logprobs=np.zeros((*shape, length), np.float32),
        finished=np.zeros(shape, bool),
    )
    completions = with_width(completions, length)
    rewards = np.zeros(completions.lengths.size)
    none = np.zeros(rewards.shape, bool)
    scores = Scores(rewards, {name: rewards for name, _, _ in task.rewards}, none, none, none, None)
    return training_batch(Rollout(list(problems), [], completions, scores), task, objective)


def rewards_for_estimators(rollout: Rollout, task: Task, objective: Objective) -> Float[np.ndarray, "P G"]:
    """Returns the rewards for the advantage estimators; NaN for an unscored completion. They are the total rewards
    after `shape_rewards`, for an estimator of outcomes with `credit=turn` without those before the last turn, and for
    an estimator with `by_function` the results of `sum_of_normalised`."""
    lengths = rollout.completions.lengths
    total = rollout.scores.total.reshape(lengths.shape)
    most = task.rollout_config.max_tokens_to_generate
    if task.algo.credit == "turn":
        by_turn = np.array([estimator.by_turn for estimator in objective.estimators])
        total = np.where(by_turn[estimator_ids(objective, rollout)][:, None], total, outcomes(rollout))
    rewards = shape_rewards(total, lengths, task.algo, most, task.success_threshold).copy()  # not the scores' own
    by_function = np.array([estimator.registered.by_function for estimator in objective.estimators])
    groups = by_function[estimator_ids(objective, rollout)]
    if groups.any():
        weights = {name: weight for name, _, weight in task.rewards}  # that of an environment is 1
        parts = {name: values.reshape(lengths.shape)[groups] for name, values in rollout.scores.by_function.items()}
        scored = rollout.scores.scored.reshape(lengths.shape)[groups]
        factors = [weights.get(name, 1.0) for name in parts]
        rewards[groups] = sum_of_normalised(np.stack([*parts.values()]), factors, scored)
    return rewards


def outcomes(rollout: Rollout) -> Float[np.ndarray, "P G"]:
    """Returns the reward of the last turn of each trajectory, with those of reward functions; NaN if unscored."""
    assert rollout.episodes is not None
    total = rollout.scores.total
    found = [
        reward - episode.reward + (episode.turn_rewards[-1] if len(episode.turn_rewards) else 0.0)
        for reward, episode in zip(total, rollout.episodes, strict=True)
    ]
    # The difference of two sums: without rounding, a reward of 1 may be 0.9999999999999999.
    return np.array(found).round(12).reshape(rollout.completions.lengths.shape)


def _turns_differ(rollout: Rollout, scored: Bool[np.ndarray, "P G"]) -> Bool[np.ndarray, "P"]:
    """Returns for each prompt whether the rewards of the turns of its scored trajectories differ."""
    assert rollout.episodes is not None
    size = scored.shape[1]
    kinds = [
        {tuple(rollout.episodes[group * size + sample].turn_rewards) for sample in np.flatnonzero(row)}
        for group, row in enumerate(scored)
    ]
    return np.array([len(kind) > 1 for kind in kinds])


def credit_of_turns(rollout: Rollout, batch: GroupBatch, objective: Objective) -> Float[np.ndarray, "P G T"]:
    """Returns what the sampled tokens get by `algorithm.credit=turn`, in float32: the advantage of their turn, or the
    reward of a turn at its last token for a critic (`Objective.turn_terms`). Rewards of functions that score whole
    completions, and penalties, belong to the last turn."""
    assert rollout.episodes is not None
    later = [state for episode in rollout.episodes for state in episode.turn_states[1:]]
    if objective.config.turn_baseline == "state" and later and not any(state is not None for state in later):
        raise UserError(
            "algorithm.turn_baseline: state needs a text or number `state` in the info of each step; none has it."
        )
    size = batch.rewards.shape[1]
    out = np.zeros(batch.sampled.shape, np.float32)
    for group, index in enumerate(batch.group_estimators.tolist()):
        estimator = objective.estimators[index]
        episodes = rollout.episodes[group * size : (group + 1) * size]
        longest = max(1, *(len(episode.turn_rewards) for episode in episodes))
        rows: list[list[float | None]] = []
        for sample, episode in enumerate(episodes):
            before = list(episode.turn_rewards[:-1])
            last = float(batch.rewards[group, sample]) - (sum(before) if estimator.by_turn else 0.0)
            rows.append([*before, last] if batch.scored[group, sample] else [None] * longest)
        lengths = [len(row) for row in rows]
        potentials = [_filled(episode.turn_potentials, n, 0.0) for episode, n in zip(episodes, lengths, strict=True)]
        states = [_filled(episode.turn_states, n, None) for episode, n in zip(episodes, lengths, strict=True)]
        terms = objective.turn_terms(estimator, GroupTurns(rows, potentials, states))
        for sample, (episode, term) in enumerate(zip(episodes, terms, strict=True)):
            if batch.scored[group, sample]:
                turn = _turn_of_tokens(batch.sampled[group, sample], episode.turn_tokens)
                last_tokens = np.append(turn[1:] != turn[:-1], True) if estimator.name == BY_CRITIC else True
                out[group, sample] = np.where((turn >= 0) & last_tokens, term[np.minimum(turn, len(term) - 1)], 0.0)
    return out


def advantages_of_turns(
    rollout: Rollout, batch: GroupBatch, turn_credit: Float[np.ndarray, "P G T"], advantages: Float[np.ndarray, "P G"]
) -> list[list[float]]:
    """Returns the advantages of the turns of each trajectory.

    Args:
      turn_credit: `credit_of_turns`.
      advantages: means over the tokens, with those of the estimator.
    """
    assert rollout.episodes is not None
    found = []
    for number, episode in enumerate(rollout.episodes):
        row = divmod(number, batch.rewards.shape[1])
        sampled = batch.sampled[row]
        if not sampled.any() or (batch.trained is not None and not batch.trained[row]):
            found.append([0.0] * len(episode.turn_tokens))
            continue
        turn = _turn_of_tokens(sampled, episode.turn_tokens)
        of_estimator = advantages[row] - turn_credit[row][sampled].mean()
        own = [turn_credit[row][turn == each] for each in range(len(episode.turn_tokens))]
        found.append([float(of_estimator + values[0]) if values.size else 0.0 for values in own])
    return found


def _filled(values: Sequence[Any], length: int, missing: Any) -> list[Any]:
    """Returns one value per turn. Those of a trajectory without turns, or that is unscored, are not known."""
    return [*values[:length], *[missing] * (length - len(values))]


def _turn_of_tokens(sampled: Bool[np.ndarray, " T"], turn_tokens: Sequence[int]) -> Int[np.ndarray, " T"]:
    """Returns for each token the index of its turn; -1 for tokens that were not sampled."""
    ends = np.cumsum(turn_tokens[:-1])
    turn = np.searchsorted(ends, np.maximum(sampled.cumsum() - 1, 0), side="right")
    return np.where(sampled, turn, -1)


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
    return total
