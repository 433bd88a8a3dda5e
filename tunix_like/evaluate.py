"""Evaluation: sample held-out problems several times and report unbiased pass@k.

It knows how to sample and score; it does not know what training is.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

from tunix_like.config import EvalConfig
from tunix_like.data.stream import render, usable
from tunix_like.errors import UserError
from tunix_like.rewards import Scores
from tunix_like.rl.rollouts import (
    FirstFailure,
    WeightedReward,
    completion_texts,
    groups_by_source,
    nothing_scored,
    saved_on_failure,
    score_completions,
    succeeds,
)
from tunix_like.sampling.logits import SamplingParams
from tunix_like.sampling.sampler import Completions, Sampler
from tunix_like.tokenizer import Tokenizer
from tunix_like.types import Problem

EVAL_KEY = 2
"""Branch of the run's random key that evaluation draws from."""


class Evaluation(NamedTuple):
    """Metrics (`eval/...`), and per problem the counts and the sampled texts with their rewards."""

    metrics: dict[str, float]
    successes: Int[np.ndarray, "N"]
    scored: Int[np.ndarray, "N"]
    texts: list[list[str]]
    rewards: list[list[float]]


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """The unbiased estimate of pass@k from `samples` draws: `1 - C(n-c, k) / C(n, k)` (Chen et al., arXiv
    2107.03374)."""
    if samples - successes < k:
        return 1.0
    return 1.0 - math.prod((samples - successes - i) / (samples - i) for i in range(k))


def ks_of(config: EvalConfig) -> list[int]:
    """The k of pass@k: those of the config, else 1, 4, 16, ... up to the number of samples."""
    if config.k is None:
        return [4**i for i in range(16) if 4**i <= config.samples]
    if bad := [k for k in config.k if not 1 <= k <= config.samples]:
        raise UserError(f"eval.k: got {bad[0]}; each k must lie between 1 and eval.samples ({config.samples}).")
    return sorted(config.k)


def eval_problems(
    rows: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, max_prompt_length: int, max_problems: int | None
) -> list[Problem]:
    """The first `max_problems` rows whose prompt is usable, numbered from 0. Raises UserError if none is."""
    prompts = (render(rows[i], tokenizer, max_prompt_length) for i in range(len(rows)))
    fitting = (prompt for prompt in prompts if usable(prompt, max_prompt_length))
    problems = [Problem(i, *prompt) for i, prompt in enumerate(itertools.islice(fitting, max_problems))]
    if not problems:
        raise UserError(
            f"none of {len(rows)} evaluation prompts has 1 to rollout.max_prompt_length={max_prompt_length} tokens."
        )
    return problems


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Everything an evaluation needs but the weights; call it with them.

    A completion succeeds when its total reward reaches `success_threshold`. Completions that could not be scored are
    left out of their problem's count (and reported as `eval/unscored_frac`; those for which a reward function was late
    or failed as `eval/timeout_frac` and `eval/error_frac` too); a problem with fewer than k scored ones is left out of
    pass@k. With several data sources there is a pass@k of each, `eval/pass@<k>/<source>`. The same `key` draws the same
    random numbers at every call.
    """

    sampler: Sampler
    tokenizer: Tokenizer
    problems: Sequence[Problem]
    rewards: Sequence[WeightedReward]
    config: EvalConfig
    success_threshold: float
    key: jax.Array
    first_failure: FirstFailure = dataclasses.field(default_factory=FirstFailure)

    def __call__(
        self,
        params: Any,
        on_progress: Callable[[int], None] = lambda done: None,
        rollouts: Path | None = None,
        step: int = 0,
    ) -> Evaluation:
        """Samples `eval.samples` completions of each problem, scores them and sums up.

        Args:
          on_progress: called with the number of problems just done.
          rollouts, step: the folder for completions that cannot be scored, and the step they are of.

        Raises:
          UserError: at step 0 a reward function failed for the whole first batch, or nothing could be scored; later the
            metrics are NaN, and the run goes on.
        """
        config, problems = self.config, self.problems
        sampling = SamplingParams(config.temperature, config.top_p)
        size = min(config.batch_size, len(problems))
        parts: list[tuple[Completions, Scores]] = []
        texts: list[list[str]] = []
        for start in range(0, len(problems), size):
            part = list(problems[start : start + size])
            padded = part + [part[-1]] * (size - len(part))  # one shape, one compile
            out = self.sampler.generate(
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
            on_progress(len(part))
        found = functools.reduce(Scores.join, [each for _, each in parts])
        if step == 0 and not found.scored.any():
            raise UserError(f"evaluation: {nothing_scored(found)}")
        lengths = np.concatenate([out.lengths for out, _ in parts])
        finished = np.concatenate([out.finished for out, _ in parts])
        sources = groups_by_source(problems)
        return _summary(found, lengths, finished, texts, config, self.success_threshold, sources)


def _summary(
    scores: Scores,
    lengths: Int[np.ndarray, "N n"],
    finished: Bool[np.ndarray, "N n"],
    texts: list[list[str]],
    config: EvalConfig,
    success_threshold: float,
    sources: Mapping[str, Bool[np.ndarray, "N"]],
) -> Evaluation:
    total: np.ndarray = scores.total.reshape(lengths.shape)
    known = ~np.isnan(total)
    scored = known.sum(axis=1)
    successes = (known & succeeds(np.nan_to_num(total, nan=-np.inf), success_threshold)).sum(axis=1)

    def mean_pass(k: int, of: np.ndarray) -> float:
        counts = zip(scored[of], successes[of], strict=True)
        values = [pass_at_k(int(n), int(c), k) for n, c in counts if n >= k]
        return float(np.mean(values)) if values else float("nan")

    everything = np.ones(len(scored), bool)
    metrics = {f"eval/pass@{k}": mean_pass(k, everything) for k in ks_of(config)}
    metrics |= {
        "eval/rewards/mean": float(total[known].mean()) if known.any() else float("nan"),
        "eval/mean_length": float(lengths.mean()),
        "eval/clipped_ratio": 1.0 - float(finished.mean()),
        "eval/unscored_frac": 1.0 - float(known.mean()),
        "eval/timeout_frac": float(scores.timeouts.mean()),
        "eval/error_frac": float(scores.errors.mean()),
    }
    metrics |= {f"eval/pass@{k}/{label}": mean_pass(k, own) for label, own in sources.items() for k in ks_of(config)}
    return Evaluation(metrics, successes, scored, texts, total.tolist())
