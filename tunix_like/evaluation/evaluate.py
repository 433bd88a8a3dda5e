"""Evaluation: sample held-out problems several times, score them, and say how good they are and how sure that is.

It knows how to sample and score; it does not know what training is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from tunix_like.config.schema import EvalConfig, RLTrainingConfig
from tunix_like.data.source import REWARD_COLUMN
from tunix_like.data.stream import Skipped, check_overlong, render, tokens_to_count, unusable, usable
from tunix_like.data.tokenizer import Tokenizer
from tunix_like.errors import UserError, nearest
from tunix_like.evaluation.statistics import intervals, mean_known, problem_values, value_ranges
from tunix_like.rewards import ANSWERS, REWARDS, Scores
from tunix_like.rewards.pool import PooledFunction
from tunix_like.rollout.rollouts import (
    FirstFailure,
    WeightedReward,
    completion_texts,
    groups_by_source,
    nothing_scored,
    saved_on_failure,
    score_completions,
    succeeds,
)
from tunix_like.runtime import progress
from tunix_like.types import Completions, Engine, Problem, SamplingParams

EVAL_KEY = 2
"""Branch of the run's random key that evaluation draws from."""


class Evaluation(NamedTuple):
    """Metrics (`eval/...`), and per problem: what they are means of (`pass@1`, ...; NaN: not known), the sampled texts,
    their rewards (NaN: not scored), which succeed, and their answers (None: no reward tells them).

    Of every mean there are the ends of its 95 % interval, `eval/low/<name>` and `eval/high/<name>`.
    """

    metrics: dict[str, float]
    values: dict[str, Float[np.ndarray, "N"]]
    texts: list[list[str]]
    rewards: Float[np.ndarray, "N n"]
    succeeded: Bool[np.ndarray, "N n"]
    answers: list[list[Hashable] | None]

    @property
    def scored(self) -> Int[np.ndarray, "N"]:
        return (~np.isnan(self.rewards)).sum(axis=1)

    @property
    def successes(self) -> Int[np.ndarray, "N"]:
        return self.succeeded.sum(axis=1)


def ks_of(config: EvalConfig) -> list[int]:
    """The k of pass@k and maj@k: those of the config, else 1, 2, 4, ... up to the number of samples."""
    if config.k is None:
        return [2**i for i in range(config.samples.bit_length())]
    if bad := [k for k in config.k if not 1 <= k <= config.samples]:
        raise UserError(f"eval.k: got {bad[0]}; each k must lie between 1 and eval.samples ({config.samples}).")
    return sorted(set(config.k))


def eval_problems(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    max_prompt_length: int,
    max_problems: int | None,
    overlong: str = "skip",
) -> tuple[list[Problem], Skipped]:
    """The first `max_problems` rows whose prompt has 1 to `max_prompt_length` tokens, and how many were skipped.

    The number of a problem is that of its row, from 0: two evaluations that skipped different rows differ in it.

    Args:
      overlong: `data.overlong_prompts`; "error" refuses what "skip" leaves out.

    Raises:
      UserError: no prompt can be used, one cannot be rendered, or one is refused (naming the row).
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
        long, empty = long + (len(prompt.tokens) > max_prompt_length), empty + (not prompt.tokens)
        read += 1
    if not problems:
        raise UserError(
            f"none of {len(rows)} evaluation prompts has 1 to rollout.max_prompt_length={max_prompt_length} tokens."
        )
    return problems, Skipped(len(rows), read, max_prompt_length, long, empty)


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Everything an evaluation needs but the weights; call it with them.

    A completion succeeds when its total reward reaches `success_threshold`. Completions that could not be scored are
    left out of their problem's count (and reported as `eval/unscored_frac`; those for which a reward function was late
    or failed as `eval/timeout_frac` and `eval/error_frac` too); a problem with fewer than k scored ones is left out of
    pass@k and maj@k. Rows whose prompt is too long or empty are no problems, and are counted in
    `eval/skipped_prompts`. maj@k is there for problems whose answers a reward tells (`rewards.ANSWERS`; of several
    rewards the first that does). With several data sources there is a pass@k of each, `eval/pass@<k>/<source>`. The
    same `key` draws the same random numbers at every call.
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

    @property
    def skipped_prompts(self) -> int:
        """How many of the rows up to the last problem were left out, as their prompt is too long or empty."""
        return 0 if self.skipped is None else self.skipped.prompts

    def __call__(
        self,
        params: Any,
        rollouts: Path | None = None,
        step: int = 0,
    ) -> Evaluation:
        """Samples `eval.samples` completions of each problem, scores them and sums up.

        Args:
          rollouts, step: the folder for completions that cannot be scored, and the step they are of.

        Raises:
          UserError: at step 0 a reward function failed for the whole first batch, or nothing could be scored; later the
            metrics are NaN, and the run goes on.
        """
        with progress.task("evaluation", len(self.problems)) as advance:
            return self._summary(*self._sampled(params, advance, rollouts, step))

    def _sampled(
        self, params: Any, advance: progress.Advance, rollouts: Path | None, step: int
    ) -> tuple[Scores, Int[np.ndarray, "N n"], Bool[np.ndarray, "N n"], list[list[str]]]:
        """All problems' scores, lengths, whether completions ended by themselves, and their texts."""
        config, problems = self.config, self.problems
        sampling = SamplingParams(config.temperature, config.top_p)
        size = min(config.batch_size, len(problems))
        parts: list[tuple[Completions, Scores]] = []
        texts: list[list[str]] = []
        for start in range(0, len(problems), size):
            part = list(problems[start : start + size])
            padded = part + [part[-1]] * (size - len(part))  # one shape, one compile
            out = self.engine.generate(
                params, [p.tokens for p in padded], [p.number for p in padded], config.samples, self.key, sampling
            )
            out = Completions(*(values[: len(part)] for values in out))
            flat = completion_texts(out, self.tokenizer)
            with saved_on_failure(rollouts, step, part, flat):
                scores = score_completions(self.rewards, part, flat, config.samples)
                if step == 0 and not parts and (scores.timeouts | scores.errors).all():
                    raise UserError(f"evaluation: {nothing_scored(scores)}")
            self.first_failure(scores, rollouts)
            texts += [flat[i : i + config.samples] for i in range(0, len(flat), config.samples)]
            parts.append((out, scores))
            advance(len(part))
        found = functools.reduce(Scores.join, [each for _, each in parts])
        if step == 0 and not found.scored.any():
            raise UserError(f"evaluation: {nothing_scored(found)}")
        lengths = np.concatenate([out.lengths for out, _ in parts])
        finished = np.concatenate([out.finished for out, _ in parts])
        return found, lengths, finished, texts

    def objectives(self) -> list[str]:
        """Names of the metrics of an evaluation of which more is better; nothing is sampled to know them."""
        told = any(_teller(self.rewards, problem) is not None for problem in self.problems)
        samples = self.config.samples
        none = np.zeros((1, samples))
        names = list(problem_values(none, none > 0, [[None] * samples if told else None], ks_of(self.config)))
        by_source = [f"{name}/{label}" for label in groups_by_source(self.problems) for name in _passes(names)]
        ends = [f"{end}/{name}" for end in ("low", "high") for name in names]
        return [f"eval/{name}" for name in (*names, "rewards/mean", *by_source, *ends)]

    def _summary(
        self,
        scores: Scores,
        lengths: Int[np.ndarray, "N n"],
        finished: Bool[np.ndarray, "N n"],
        texts: list[list[str]],
    ) -> Evaluation:
        total: np.ndarray = scores.total.reshape(lengths.shape)
        known = ~np.isnan(total)
        succeeded = known & succeeds(np.nan_to_num(total, nan=-np.inf), self.success_threshold)
        answers = told_answers(self.rewards, self.problems, texts)
        values = problem_values(total, succeeded, answers, ks_of(self.config))
        metrics = {f"eval/{name}": mean_known(each) for name, each in values.items()}
        metrics |= {
            "eval/rewards/mean": float(total[known].mean()) if known.any() else float("nan"),
            "eval/mean_length": float(lengths.mean()),
            "eval/clipped_ratio": 1.0 - float(finished.mean()),
            "eval/unscored_frac": 1.0 - float(known.mean()),
            "eval/timeout_frac": float(scores.timeouts.mean()),
            "eval/error_frac": float(scores.errors.mean()),
            "eval/skipped_prompts": self.skipped_prompts,
        }
        for label, own in groups_by_source(self.problems).items():
            metrics |= {f"eval/{name}/{label}": mean_known(values[name][own]) for name in _passes(values)}
        ranges = value_ranges(values, [total, [self.success_threshold]])
        for name, ends in intervals(values, ranges).items():
            metrics |= {f"eval/{end}/{name}": value for end, value in zip(("low", "high"), ends, strict=True)}
        return Evaluation(metrics, values, texts, total, succeeded, answers)


def told_answers(
    rewards: Sequence[WeightedReward], problems: Sequence[Problem], texts: Sequence[Sequence[str]]
) -> list[list[Hashable] | None]:
    """What each completion answers by the first reward that tells answers (`rewards.ANSWERS`), None where none is
    found in it; instead of a problem's list None where no reward tells."""
    tellers = (_teller(rewards, problem) for problem in problems)
    return [None if tell is None else [tell(text) for text in own] for tell, own in zip(tellers, texts, strict=True)]


def _teller(rewards: Sequence[WeightedReward], problem: Problem) -> Callable[[str], Hashable | None] | None:
    for name, function, _ in rewards:
        if function is not REWARDS.get(name) and not isinstance(function, PooledFunction):
            continue  # a function of the user's that is called like a registered one
        own = problem.columns.get(REWARD_COLUMN) if name == "by_source" else name
        if own in ANSWERS:
            return ANSWERS[own]
    return None


def _passes(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith("pass@")]


def check_best_metric(training: RLTrainingConfig, evaluator: Evaluator | None) -> None:
    """Raises UserError where `training.best_metric` names what no evaluation will measure; it lists what will be."""
    name = training.best_metric
    if name is None:
        return
    if evaluator is None:
        raise UserError("training.best_metric: there are no held-out rows, so nothing is evaluated; leave it unset.")
    names = evaluator.objectives()
    if name not in names:
        raise UserError(f"training.best_metric: got '{name}', which no evaluation has. {nearest(name, names)}")
    if training.eval_every_n_steps is None:
        raise UserError(
            f"training.best_metric: {name} is known only before and after training while training.eval_every_n_steps "
            f"is unset; set that, e.g. 20. An evaluation has: {', '.join(sorted(names))}."
        )
