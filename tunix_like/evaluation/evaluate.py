"""Evaluates a policy: samples completions of held-out problems, scores them and computes metrics with intervals."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from tunix_like.config.schema import EvalConfig, RLTrainingConfig
from tunix_like.data.source import REWARD_COLUMN
from tunix_like.data.stream import Skipped, check_overlong, render, tokens_to_count, unusable, usable
from tunix_like.environments.trajectories import Player
from tunix_like.errors import UserError, nearest
from tunix_like.evaluation.statistics import intervals, mean_known, problem_values, value_ranges
from tunix_like.rewards import ANSWERS, REWARDS, Scores, close_pools
from tunix_like.rewards.pool import PooledFunction
from tunix_like.rewards.turns import is_potential
from tunix_like.rollout.episodes import episode_metrics
from tunix_like.rollout.files import FirstFailure, nothing_scored_message, saved_on_failure, write_evaluation
from tunix_like.rollout.requests import generate
from tunix_like.rollout.rollouts import (
    Rollout,
    WeightedReward,
    completion_texts,
    first_axis,
    groups_by_source,
    succeeds,
    warn_cut,
    with_width,
)
from tunix_like.rollout.scoring import score_trajectories
from tunix_like.runtime import progress, trace
from tunix_like.runtime.moment import START, Moment
from tunix_like.runtime.profile import Stopwatch
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.types import Engine, Problem, SamplingParams

logger = logging.getLogger("tunix_like")

MOST_WITHOUT_ANSWER = 0.5
"""Share of completions without an answer above which an evaluation without a success warns."""

EVAL_KEY = 2
"""Number that is folded into the run's random key for evaluations."""


class Evaluation(NamedTuple):
    """The result of an evaluation.

    Attributes:
      metrics: `eval/<name>`, and the ends of the 95 % confidence intervals, `eval/low/<name>` and `eval/high/<name>`.
      values: one value per problem, by name (`pass@1`, ...); NaN if not known. `eval/<name>` is the mean of the known
        values.
      texts: for each problem, the list of its sampled completions.
      rewards: total reward of each completion; NaN if unscored.
      succeeded: whether each completion succeeds.
      answers: for each problem, the list of the answers of its completions; None if no reward extracts answers.
      seconds: time of the sampling, without compilation.
    """

    metrics: dict[str, float]
    values: dict[str, Float[np.ndarray, "N"]]
    texts: list[list[str]]
    rewards: Float[np.ndarray, "N n"]
    succeeded: Bool[np.ndarray, "N n"]
    answers: list[list[Hashable] | None]
    seconds: float = 0.0

    def __repr__(self) -> str:
        problems, samples = self.rewards.shape
        means = [f"{name} {self.metrics[f'eval/{name}']:.3g}" for name in self.values]
        return f"Evaluation({problems} problems, {samples} samples each: {', '.join(means)})"

    @property
    def scored(self) -> Int[np.ndarray, "N"]:
        return (~np.isnan(self.rewards)).sum(axis=1)

    @property
    def successes(self) -> Int[np.ndarray, "N"]:
        return self.succeeded.sum(axis=1)


def ks_of(config: EvalConfig) -> list[int]:
    """Returns the values of k for pass@k and maj@k: `eval.k`, or 1, 2, 4, ... up to the number of samples."""
    if config.k is None:
        return [2**i for i in range(config.samples.bit_length())]
    if bad := [k for k in config.k if not 1 <= k <= config.samples]:
        raise UserError(f"eval.k: got {bad[0]}; each k must be between 1 and eval.samples ({config.samples}).")
    return sorted(set(config.k))


def eval_problems(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    max_prompt_length: int,
    max_problems: int | None,
    overlong: str = "skip",
) -> tuple[list[Problem], Skipped]:
    """Returns the first `max_problems` rows whose prompt has 1 to `max_prompt_length` tokens, and the counts of
    skipped rows.

    `Problem.number` is the index of the row, from 0. A comparison of two evaluations reads these numbers to find rows
    that only one evaluation skipped.

    Args:
      overlong: `data.overlong_prompts`. "skip" skips each prompt that is empty or has more than `max_prompt_length`
        tokens. "error" raises UserError for such a prompt.
    """
    check_overlong(overlong)
    problems: list[Problem] = []
    most = tokens_to_count(overlong, max_prompt_length)
    read = long = empty = 0
    while read < len(rows) and len(problems) != max_problems:
        try:
            prompt = render(rows[read], tokenizer, most)
        except UserError as error:
            raise UserError(f"evaluation row {read}: {error}") from error
        if usable(prompt, max_prompt_length):
            problems.append(Problem(read, *prompt))
        elif overlong == "error":
            raise unusable(len(prompt.tokens), max_prompt_length, f"evaluation row {read}", most)
        long = long + (len(prompt.tokens) > max_prompt_length)
        empty = empty + (not prompt.tokens)
        read += 1
    if not problems:
        raise UserError(
            f"all {len(rows)} evaluation prompts are empty or longer than "
            f"rollout.max_prompt_length={max_prompt_length}; raise it."
        )
    return problems, Skipped(len(rows), read, max_prompt_length, long, empty)


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Evaluates weights on a fixed set of problems. An instance is called with the weights.

    A completion succeeds if its total reward is at least `success_threshold`. Unscored completions are not counted;
    `eval/unscored_frac` is their fraction. `eval/timeout_frac` and `eval/error_frac` are the fractions of completions
    whose scoring had a timeout or an error. A problem with fewer than k scored completions is excluded from pass@k and
    maj@k. Rows with an empty or overlong prompt are excluded and counted in `eval/skipped_prompts`. maj@k needs a
    reward that extracts answers (`rewards.ANSWERS`). If there are several such rewards, the first is used. With several
    data sources, there are also metrics `eval/pass@<k>/<source>`. All calls use the same `key`, and thus the same
    random numbers.
    """

    engine: Engine
    tokenizer: Tokenizer
    problems: Sequence[Problem]
    rewards: Sequence[WeightedReward]
    config: EvalConfig
    success_threshold: float
    key: jax.Array
    first_failure: FirstFailure = dataclasses.field(default_factory=FirstFailure)
    skipped: Skipped | None = None
    player: Player | None = None

    @property
    def skipped_prompts(self) -> int:
        return 0 if self.skipped is None else self.skipped.prompts

    def __call__(
        self,
        params: Any,
        rollouts: Path | None = None,
        step: int = 0,
        moment: Moment = START,
    ) -> Evaluation:
        """Samples `eval.samples` completions of each problem, scores them and computes the metrics.

        Args:
          rollouts: folder for the completions, also those of a batch whose scoring raises an error, and for the text
            of the first failure of a reward function. If None, nothing is written.
          step: number of the training step after which the weights are evaluated; 0 before training or without a run.
          moment: that of the weights, for reward functions and environments.

        Raises:
          UserError: `step` is 0, and either no completion could be scored, or the scoring of every completion of the
            first batch had a timeout or an error. At a later step, the reward metrics are NaN instead, and the run
            continues.
        """
        with progress.task("evaluation", len(self.problems)) as advance, trace.span("evaluation"):
            parts, seconds = self._sampled(self.engine.place(params), advance, rollouts, step, moment)
            if step == 0:
                warn_cut("evaluation", np.concatenate([rollout.completions.finished for rollout in parts]))
            if rollouts is not None:
                write_evaluation(rollouts, step, parts)
            evaluation = self._summary(parts)._replace(seconds=seconds)
            if step == 0:
                _warn_no_answers(evaluation)
            return evaluation

    def _sampled(
        self, params: Any, advance: progress.Advance, rollouts: Path | None, step: int, moment: Moment
    ) -> tuple[list[Rollout], float]:
        """Returns one `Rollout` per batch of problems, and the seconds of sampling."""
        config = self.config
        problems = [dataclasses.replace(problem, moment=moment) for problem in self.problems]
        sampling = SamplingParams(config.temperature, config.top_p)
        size = min(config.batch_size, len(problems))
        parts: list[Rollout] = []
        seconds = 0.0
        unused = 1 + max(problem.number for problem in problems)
        for start in range(0, len(problems), size):
            part = list(problems[start : start + size])
            # All batches are padded to one shape, so that the sampler is compiled once. With environments, there is no
            # padding, because the environment of a padded problem would run a second time.
            padded = part + [part[-1]] * (size - len(part) if self.player is None else 0)
            # Each problem of a call must have a unique number.
            padded[len(part) :] = [dataclasses.replace(p, number=unused + i) for i, p in enumerate(padded[len(part) :])]
            watch = Stopwatch()
            padded, out, trajectories = generate(
                self.engine, self.player, params, padded, config.samples, self.key, sampling
            )
            seconds += watch.seconds()
            part = padded[: len(part)]
            out = first_axis(with_width(out, out.tokens.shape[-1]), slice(len(part)))
            flat = completion_texts(out, self.tokenizer)
            with saved_on_failure(rollouts, step, part, flat):
                episodes = None if trajectories is None else trajectories.episodes()
                played = None if trajectories is None else trajectories.environments()
                rewards = [reward for reward in self.rewards if not is_potential(reward[1])]  # no part of the total
                scores, episodes = score_trajectories(rewards, part, flat, config.samples, episodes, played)
                if step == 0 and not parts and (scores.timeouts | scores.errors).all():
                    raise UserError(f"evaluation: {nothing_scored_message(scores)}")
            self.first_failure(scores, rollouts)
            parts.append(Rollout(part, flat, out, scores, episodes))
            advance(len(part))
        if step == 0 and not any(rollout.scores.scored.any() for rollout in parts):
            scores = functools.reduce(Scores.join, [rollout.scores for rollout in parts])
            raise UserError(f"evaluation: {nothing_scored_message(scores)}")
        return parts, seconds

    def close(self) -> None:
        """Stops the worker processes of rewards and environments. The next evaluation starts these processes again."""
        close_pools(function for _, function, _ in self.rewards)
        if self.player is not None:
            self.player.environments.close()

    def objectives(self) -> list[str]:
        """Returns the names of the metrics for which a higher value is better, without sampling."""
        has_answers = any(_answer_function(self.rewards, problem) is not None for problem in self.problems)
        samples = self.config.samples
        none = np.zeros((1, samples))
        names = list(problem_values(none, none > 0, [[None] * samples if has_answers else None], ks_of(self.config)))
        by_source = [f"{name}/{label}" for label in groups_by_source(self.problems) for name in _passes(names)]
        ends = [f"{end}/{name}" for end in ("low", "high") for name in names]
        return [f"eval/{name}" for name in (*names, "rewards/mean", *by_source, *ends)]

    def _summary(self, parts: Sequence[Rollout]) -> Evaluation:
        scores = functools.reduce(Scores.join, [rollout.scores for rollout in parts])
        lengths = np.concatenate([rollout.sampled_lengths for rollout in parts])
        finished = np.concatenate([rollout.completions.finished for rollout in parts])
        samples = self.config.samples
        flat = [text for rollout in parts for text in rollout.texts]
        texts = [flat[i : i + samples] for i in range(0, len(flat), samples)]
        total: np.ndarray = scores.total.reshape(lengths.shape)
        known = ~np.isnan(total)
        succeeded = known & succeeds(np.nan_to_num(total, nan=-np.inf), self.success_threshold)
        answers = extract_answers(self.rewards, self.problems, texts)
        values = problem_values(total, succeeded, answers, ks_of(self.config))
        metrics = {f"eval/{name}": mean_known(per_problem) for name, per_problem in values.items()}
        metrics |= {
            "eval/rewards/mean": float(total[known].mean()) if known.any() else float("nan"),
            "eval/mean_length": float(lengths.mean()),
            "eval/clipped_ratio": 1.0 - float(finished.mean()),
            "eval/unscored_frac": 1.0 - float(known.mean()),
            "eval/timeout_frac": float(scores.timeouts.mean()),
            "eval/error_frac": float(scores.errors.mean()),
            "eval/skipped_prompts": self.skipped_prompts,
        }
        if episodes := [episode for rollout in parts for episode in rollout.episodes or ()]:
            metrics |= {f"eval/{name}": value for name, value in episode_metrics(episodes).items()}
        for label, selected in groups_by_source(self.problems).items():
            metrics |= {f"eval/{name}/{label}": mean_known(values[name][selected]) for name in _passes(values)}
        ranges = value_ranges(values, [total, [self.success_threshold]])
        for name, ends in intervals(values, ranges).items():
            metrics |= {f"eval/{end}/{name}": value for end, value in zip(("low", "high"), ends, strict=True)}
        return Evaluation(metrics, values, texts, total, succeeded, answers)


def extract_answers(
    rewards: Sequence[WeightedReward], problems: Sequence[Problem], texts: Sequence[Sequence[str]]
) -> list[list[Hashable] | None]:
    """Extracts the answers of the completions of each problem, with the first reward that extracts answers
    (`rewards.ANSWERS`). A completion without an answer has None; so has a problem for which no reward extracts answers.
    """
    functions = (_answer_function(rewards, problem) for problem in problems)
    return [
        None if answer is None else [answer(text) for text in completions]
        for answer, completions in zip(functions, texts, strict=True)
    ]


def _warn_no_answers(evaluation: Evaluation) -> None:
    """Warns if no completion succeeds, and in most of them no answer is found."""
    answers = [answer for group in evaluation.answers if group is not None for answer in group]
    missing = sum(answer is None for answer in answers)
    if missing > MOST_WITHOUT_ANSWER * len(answers) and not evaluation.succeeded.any():
        logger.warning(
            "evaluation: in %d of %d completions no answer is found, so they count as wrong. Tell the model how to "
            "write it, by data.system_prompt or data.prompt_template (docs/rewards.md has what each reward reads).",
            missing, len(answers),
        )  # fmt: skip


def _answer_function(rewards: Sequence[WeightedReward], problem: Problem) -> Callable[[str], Hashable | None] | None:
    for name, function, _ in rewards:
        if function is not REWARDS.get(name) and not isinstance(function, PooledFunction):
            continue  # a function of the user with the name of a registered function
        reward = problem.columns.get(REWARD_COLUMN) if name == "by_source" else name
        if reward in ANSWERS:
            return ANSWERS[reward]
    return None


def _passes(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith("pass@")]


def check_best_metric(training: RLTrainingConfig, evaluator: Evaluator | None) -> None:
    """Raises UserError if no evaluation of the run will compute `training.best_metric`."""
    name = training.best_metric
    if name is None:
        return
    if evaluator is None:
        raise UserError("training.best_metric: there are no held-out rows for an evaluation; leave it unset.")
    names = evaluator.objectives()
    if name not in names:
        raise UserError(f"training.best_metric: got '{name}', which no evaluation computes. {nearest(name, names)}")
    if training.eval_every_n_steps is None:
        raise UserError(
            f"training.best_metric: {name} needs evaluations during training; set training.eval_every_n_steps, e.g. "
            f"20. The metrics of an evaluation are: {', '.join(sorted(names))}."
        )
