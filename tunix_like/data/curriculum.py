"""Draws training prompts by the estimated probability that their completions both succeed and fail.

A group whose completions all succeed or all fail gives no gradient with most estimators. For each prompt, the number of
successes and of failures in earlier steps is kept, with older results discounted. With a uniform prior, the pass rate
then has a Beta distribution, and with it the probability `m` that a group is mixed. New prompts have a high `m`, and
solved prompts a low one, but every prompt is still drawn at a rate of at least `floor / N`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import grain.python as grain
import numpy as np
from jaxtyping import Float, Int

from tunix_like.config.schema import AlgorithmConfig, DataConfig, RolloutConfig
from tunix_like.data.stream import Prompt, SharedBatches, usable
from tunix_like.errors import UserError
from tunix_like.runtime import progress
from tunix_like.runtime.processes import across_processes
from tunix_like.tasks.results import PASS_RATES
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.types import Problem


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """Settings of a curriculum.

    Attributes:
      correct: whether the loss of a prompt that is drawn with probability `q` is multiplied by `1 / (N q)`. The
        expected gradient is then that of uniform draws from the `N` prompts, for a loss whose denominator does not
        depend on the prompts (`loss_agg_mode: seq-mean-token-sum`). Prompts are then drawn in proportion to `sqrt(m)`,
        which gives the smallest variance if the gradients of all mixed groups have the same norm; else to `m`.
      floor: fraction of the draws that are uniform. No correction factor is above `1 / floor`.
      discount: factor of the earlier counts of a prompt whenever it is drawn.
    """

    correct: bool = True
    floor: float = 0.2
    discount: float = 0.9

    def __post_init__(self) -> None:
        for name, low in (("floor", "above 0"), ("discount", "from 0")):
            value = getattr(self, name)
            if not 0 <= value <= 1 or (name == "floor" and value == 0):
                raise UserError(f"curriculum {name}: got {value!r}; give a number {low} to 1.")


def curriculum_of(config: DataConfig) -> Curriculum | None:
    """Returns the curriculum that the section `data` sets, or None."""
    given = {name: getattr(config, f"curriculum_{name}") for name in ("correct", "floor", "discount")}
    given = {name: value for name, value in given.items() if value is not None}
    if not config.curriculum and given:
        raise UserError(
            f"data.curriculum_{next(iter(given))}: it needs data.curriculum=true; set it or unset this key."
        )
    if config.curriculum and any("weight" in source for source in config.sources or ()):
        raise UserError(
            "data.curriculum: a weight in data.sources repeats rows, and copies would have counts of their own. "
            "Unset the weights."
        )
    return Curriculum(**given) if config.curriculum else None


def check_curriculum(curriculum: Curriculum | None, algorithm: AlgorithmConfig, rollout: RolloutConfig) -> None:
    """Checks that the other settings of a run allow a curriculum."""
    if curriculum is None:
        return
    if rollout.max_staleness:
        raise UserError(
            "data.curriculum: prompts are drawn by the results of all earlier steps, so completions cannot be sampled "
            "ahead. Set rollout.max_staleness=0."
        )
    if algorithm.advantage_estimator == "distillation":
        raise UserError(
            "data.curriculum: prompts are drawn by their rewards, and advantage_estimator=distillation has none. Set "
            "data.curriculum=false, or an estimator of rewards."
        )
    if algorithm.num_generations < 2:
        raise UserError(
            "data.curriculum: prompts are drawn by the probability that their completions both succeed and fail, so it "
            "needs at least 2. Raise algorithm.num_generations or set data.curriculum=false."
        )
    if curriculum.correct and algorithm.dynamic_sampling:
        raise UserError(
            "data.curriculum: algorithm.dynamic_sampling selects prompts by their rewards, so the draws cannot be "
            "corrected. Set data.curriculum_correct=false or algorithm.dynamic_sampling=false."
        )


def mixed_probability(counts: Float[np.ndarray, "N 2"], group_size: int) -> Float[np.ndarray, "N"]:
    """Returns, for prompts with the given numbers of successes and failures, the probability that `group_size`
    completions are neither all successes nor all failures, under a uniform prior of the pass rate."""
    from scipy.special import gammaln  # imported here, because the import takes 0.15 s

    a, b = 1.0 + counts.astype(np.float64).T

    def all_of(own: np.ndarray) -> np.ndarray:  # E[p^G] of a Beta distribution
        return np.exp(gammaln(own + group_size) - gammaln(own) + gammaln(a + b) - gammaln(a + b + group_size))

    return np.maximum(1.0 - all_of(a) - all_of(b), 0.0)


def draw(probabilities: Float[np.ndarray, "N"], size: int, random: np.random.Generator) -> Int[np.ndarray, "size"]:
    """Draws indices such that the expected number of draws of index `i` is exactly `size * probabilities[i]`, and every
    entry of the result has the distribution `probabilities`.

    Systematic sampling: no index is drawn twice unless `size * probabilities[i]` is above 1.
    """
    order = random.permutation(len(probabilities))
    ends = np.cumsum(probabilities[order])
    places = np.searchsorted(ends, (random.random() + np.arange(size)) / size * ends[-1], side="right")
    return random.permutation(order[places])


class CurriculumBatches(SharedBatches):
    """Iterates over batches of prompts that are drawn by their difficulty. An epoch has as many draws as there are rows
    with a usable prompt.

    All rows are rendered once at the start; rows without a usable prompt are never drawn. `Prompt.row` is the index of
    a prompt's row, and `Prompt.weight` the factor of its loss if the draws are corrected.

    Attributes:
      counts: discounted numbers of successes and failures of each row.
      next: number of batches drawn.
    """

    def __init__(
        self,
        rows: Sequence[Any] | grain.MapDataset,
        tokenizer: Tokenizer,
        batch_size: int,
        limit: int,
        seed: int,
        curriculum: Curriculum,
        group_size: int,
        forever: bool = True,
    ):
        source = rows if isinstance(rows, grain.MapDataset) else grain.MapDataset.source(rows)
        numbered = source.map_with_index(lambda place, row: (place, row))
        super().__init__(numbered, tokenizer, batch_size, limit, len(rows), forever)
        self.seed = seed
        self.curriculum = curriculum
        self.group_size = group_size
        self.counts = np.zeros((len(rows), 2), np.float32)
        with progress.task("reading prompts", len(rows)) as advance:

            def check(places: Sequence[int]) -> list[bool]:
                found = []
                for place in places:
                    (prompt,) = self._render([place])
                    found.append(prompt is not None and usable(prompt, limit))
                    advance(1)
                return found

            self._usable = np.array(across_processes(range(len(rows)), check), bool)
        self.epoch = int(self._usable.sum()) // batch_size  # in batches
        self.end = None if forever else self.epoch

    def probabilities(self) -> Float[np.ndarray, "N"]:
        """Returns the probability of each row in the next draw."""
        mixed = mixed_probability(self.counts, self.group_size) * self._usable
        wanted = np.sqrt(mixed) if self.curriculum.correct else mixed
        uniform = self._usable / self._usable.sum()
        total = wanted.sum()
        return uniform if total == 0 else (1 - self.curriculum.floor) * wanted / total + self.curriculum.floor * uniform

    def __next__(self) -> list[Prompt]:
        if self.end is not None and self.next >= self.end:
            raise StopIteration
        probabilities = self.probabilities()
        rows = draw(probabilities, self.batch_size, np.random.default_rng((self.seed, self.next)))
        factors = 1.0 / (self._usable.sum() * probabilities[rows])
        self.next += 1
        prompts = [Prompt(*fields) for fields in across_processes(rows.tolist(), self._render)]
        return [
            prompt._replace(row=int(row), weight=float(factor) if self.curriculum.correct else None)
            for prompt, row, factor in zip(prompts, rows, factors, strict=True)
        ]

    def observe(
        self, problems: Sequence[Problem], passed: Int[np.ndarray, "P"], scored: Int[np.ndarray, "P"]
    ) -> dict[str, Any]:
        """Adds the results of a step, the numbers of completions that passed and that were scored, to the counts.
        Returns metrics."""
        for problem, successes, count in zip(problems, passed, scored, strict=True):
            self.counts[problem.row] *= self.curriculum.discount
            self.counts[problem.row] += (successes, count - successes)
        return self.metrics()

    def metrics(self) -> dict[str, Any]:
        """Returns the fraction of the prompts that were drawn before, a histogram of their discounted pass rates, and
        the number of prompts that draws with equal probabilities would need for the same sum of squared
        probabilities."""
        seen = self.counts[self.counts.sum(axis=1) > 0]
        rates = seen[:, 0] / seen.sum(axis=1)
        inner = np.clip(np.ceil(8 * rates), 1, 8)
        bins = np.where(seen[:, 0] == 0, 0, np.where(seen[:, 1] == 0, len(PASS_RATES) - 1, inner)).astype(int)
        return {
            "curriculum/seen_frac": len(seen) / int(self._usable.sum()),
            "curriculum/effective_prompts": float(1.0 / (self.probabilities() ** 2).sum()),
            "pass_rate/all": np.bincount(bins, minlength=len(PASS_RATES)).tolist(),
        }
