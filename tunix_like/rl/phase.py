"""Reinforcement learning as a phase of the loop: the data stream, one step from prompts to new weights, its metrics.

It knows the order of things in a step; what they are is the business of the rooms it calls.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grain.python as grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tunix_like.config import OptimizerConfig, RLTrainingConfig
from tunix_like.data.stream import Prompt, check_prompts, prompt_batches
from tunix_like.errors import UserError
from tunix_like.models.sharding import place_prompts, prompt_parts
from tunix_like.optimizer import build_optimizer, build_schedule, init_optimizer
from tunix_like.rl.advantages import check_rewards
from tunix_like.rl.losses import kl_estimate
from tunix_like.rl.objective import Objective, build_objective
from tunix_like.rl.packing import MicroBatches, pack, split_shape, unpack
from tunix_like.rl.rollouts import (
    Rollout,
    completion_texts,
    cut_rollouts,
    mixed_groups,
    repeat_columns,
    rollout_metrics,
    saved_on_failure,
    score_completions,
    to_batch,
    write_rollouts,
)
from tunix_like.rl.update import UpdateInput, batch_logprobs, update_step
from tunix_like.sampling.logits import SamplingParams
from tunix_like.types import GroupBatch, Problem

if TYPE_CHECKING:
    from tunix_like.rl.learner import Learner

logger = logging.getLogger("tunix_like")

TRAIN_KEY = 1
"""Branch of the run's random key; evaluation has `EVAL_KEY`, so the two never share a draw."""


class RLPhase:
    """One call of `Learner.train`, as a phase of the loop: the data, the optimizer and the compiled functions."""

    name, step_key = "train", "step"

    def __init__(
        self, learner: Learner, train_ds: Any, eval_ds: Any, batch_size: int, shuffle: bool, folder: Path | None
    ):
        self.learner, self.folder = learner, folder
        training, rollout = learner.training, learner.rollout_config
        sized = isinstance(train_ds, Sequence | grain.MapDataset)
        if sized:
            long = check_prompts(train_ds, learner.tokenizer, rollout.max_prompt_length, "skip", "training")
            if long:
                logger.warning("%d training prompts are longer than rollout.max_prompt_length and are skipped", long)
            batch_size = min(batch_size, len(train_ds) - long)
        self.batch_size = batch_size
        self.total = training.max_steps
        if self.total is None and sized:
            self.total = (len(train_ds) - long) // batch_size
        self.mini_batch_size = min(training.mini_batch_size or batch_size, batch_size)
        updates = -(-batch_size // self.mini_batch_size) * learner.algo.num_iterations
        self.updates_per_step = updates
        self.objective: Objective = build_objective(learner.algo, rollout.max_tokens_to_generate, updates)
        self.schedule, optimizer = _optimizer(training, None if self.total is None else self.total * updates)
        self.batches = prompt_batches(
            train_ds,
            learner.tokenizer,
            batch_size=batch_size,
            max_prompt_length=rollout.max_prompt_length,
            seed=training.seed,
            shuffle=shuffle,
            forever=training.max_steps is not None,
        )
        # A plain iterable has no place that could be saved; a resumed run reads up to it instead.
        self.iterator = self.batches if isinstance(self.batches, grain.DatasetIterator) else None
        self.evaluator = None if eval_ds is None or len(eval_ds) == 0 else learner.evaluator(eval_ds)
        self.identity = {"algorithm": dataclasses.asdict(learner.algo), "batch_size": batch_size, "seed": training.seed}
        self.identity |= {"rows": len(train_ds)} if sized else {}
        self.opt_state = init_optimizer(optimizer, learner.params)
        self.shape = split_shape(
            learner.algo.num_generations,
            training.train_micro_batch_size,
            self.mini_batch_size,
            prompt_parts(learner.mesh),
        )
        self._compile(optimizer)

    def _compile(self, optimizer: optax.GradientTransformation) -> None:
        learner = self.learner

        def step(params: Any, opt_state: Any, data: UpdateInput) -> Any:
            learner.compilations += 1  # runs once per trace
            return update_step(learner.graphdef, self.objective, optimizer, learner.options, params, opt_state, data)

        self.update_step = jax.jit(step, donate_argnums=(0, 1))
        self.logprobs = jax.jit(functools.partial(batch_logprobs, learner.graphdef, options=learner.options))

    def state(self) -> Any:
        return {"params": self.learner.params, "opt_state": self.opt_state}

    def load_state(self, state: Any, step: int) -> None:
        self.learner.params, self.opt_state = state["params"], state["opt_state"]
        if self.iterator is None:
            next(itertools.islice(self.batches, step, step), None)
        if self.folder is not None:
            cut_rollouts(self.folder / "rollouts", step)

    def finished(self, row: dict[str, Any]) -> bool:
        return False

    def evaluate(self, step: int, last: bool) -> dict[str, float]:
        every = self.learner.training.eval_every_n_steps
        due = step == 0 or last or (every is not None and step % every == 0)
        if self.evaluator is None or not due:
            return {}
        kept = None if self.folder is None else self.folder / "rollouts" / "eval"
        return self.evaluator(self.learner.params, rollouts=kept, step=step).metrics

    def advance(self, step: int) -> dict[str, float] | None:
        clock = _Clock()
        prompts: list[Prompt] | None = next(self.batches, None)
        if prompts is None and step == 1:
            raise UserError(
                f"the training data has fewer than {self.batch_size} usable prompts, which make one step; lower the "
                "batch size (data.batch_size)."
            )
        if prompts is None:
            return None
        first = (step - 1) * self.batch_size
        problems = [Problem(first + i, *prompt) for i, prompt in enumerate(prompts)]
        clock.lap("data")
        rollout, batch, ref, kl_metrics = self._collect(step, problems, clock)
        metrics = rollout_metrics(rollout, self.learner.success_threshold) | kl_metrics
        advantages, update_metrics = self._update(batch, ref, clock)
        metrics |= update_metrics | _advantage_metrics(advantages)
        if self.schedule is not None:
            metrics["learning_rate"] = float(self.schedule((step - 1) * self.updates_per_step))
        metrics |= clock.seconds
        tokens = int(batch.completion_lengths.sum())
        metrics["perf/generation_tokens_per_sec"] = tokens / max(clock.seconds["time/rollout"], 1e-9)
        metrics["perf/training_tokens_per_sec"] = tokens / max(clock.seconds["time/update"], 1e-9)
        metrics["perf/compilations"] = float(self.learner.compilations)
        metrics |= self._user_metrics(rollout, advantages)
        if self.folder is not None and (step == 1 or step % self.learner.training.log_rollouts_every_n_steps == 0):
            columns = {"reward": rollout.scores.total, "advantage": advantages} | {
                f"reward/{name}": values for name, values in rollout.scores.by_function.items()
            }
            write_rollouts(self.folder / "rollouts", step, problems, rollout.texts, columns)
        return metrics

    def _collect(
        self, step: int, problems: list[Problem], clock: _Clock
    ) -> tuple[Rollout, GroupBatch, np.ndarray | None, dict[str, float]]:
        """Samples and scores; a failing reward function leaves the completions in `rollouts/`."""
        learner, rollout = self.learner, self.learner.rollout_config
        completions = learner.sampler.generate(
            learner.params,
            [problem.tokens for problem in problems],
            [problem.number for problem in problems],
            learner.algo.num_generations,
            jax.random.fold_in(learner.key, TRAIN_KEY),
            SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k),
        )
        clock.lap("rollout")
        texts = completion_texts(completions, learner.tokenizer)
        shape = completions.lengths.shape
        with saved_on_failure(None if self.folder is None else self.folder / "rollouts", step, problems, texts):
            scores = score_completions(learner.rewards, problems, texts, learner.algo.num_generations)
            total = scores.total.reshape(shape)
            check_rewards(
                str(learner.algo.advantage_estimator),
                self.objective.estimator_params,
                total,
                scores.scored.reshape(shape),
            )
            if step == 1 and not scores.scored.any():
                raise UserError("no completion could be scored: every reward is None or NaN. Check rewards.functions.")
        clock.lap("reward")
        sampled = Rollout(problems, texts, completions, scores)
        batch = to_batch(sampled, total, rollout.max_prompt_length, rollout.max_tokens_to_generate)
        ref, metrics = None, {}
        if learner.ref_params is not None:
            ref = self._logprobs(learner.ref_params, batch)
            if learner.algo.kl_in_reward:
                batch, metrics["kl"] = self._kl_into_reward(batch, ref)
            clock.lap("reference")
        return sampled, batch, ref, metrics

    def _pack(
        self, batch: GroupBatch, groups: Sequence[int], room: int | None = None, **extra: np.ndarray | None
    ) -> MicroBatches:
        return place_prompts(pack(batch, groups, self.shape, room, **extra), self.learner.mesh, axis=1)

    def _logprobs(self, params: Any, batch: GroupBatch) -> np.ndarray:
        micro = self._pack(batch, range(len(batch.prompt_lengths)))
        return unpack(np.asarray(self.logprobs(params, micro)), micro, batch.completion_lengths.shape)

    def _kl_into_reward(self, batch: GroupBatch, ref: np.ndarray) -> tuple[GroupBatch, float]:
        """`r - beta sum_t kl_t`, with the trainer's own log-probabilities, before the estimator; and the mean KL per
        token."""
        mask = np.arange(ref.shape[-1]) < batch.completion_lengths[..., None]
        own = self._logprobs(self.learner.params, batch)
        tokens = kl_estimate(str(self.learner.algo.kl_loss_mode), jnp.asarray(own), jnp.asarray(ref), jnp.asarray(mask))
        kl = np.where(mask, np.asarray(tokens), 0.0)
        rewards = (batch.rewards - self.learner.algo.beta * kl.sum(-1)).astype(np.float32)
        return batch._replace(rewards=rewards), float(kl.sum() / mask.sum())

    def _update(self, batch: GroupBatch, ref: np.ndarray | None, clock: _Clock) -> tuple[np.ndarray, dict[str, float]]:
        """All optimizer updates of one rollout batch; metrics are their mean."""
        learner, count = self.learner, len(batch.prompt_lengths)
        old = self._logprobs(learner.params, batch) if self.updates_per_step > 1 else None
        kept = ref if self.objective.reference_in_loss else None
        live = mixed_groups(batch.rewards, batch.scored)
        rows, advantages = [], None
        for _ in range(learner.algo.num_iterations):
            for start in range(0, count, self.mini_batch_size):
                groups = range(start, min(start + self.mini_batch_size, count))
                in_update = np.isin(np.arange(count), groups)
                computed = [g for g in groups if live[g]] if self.objective.needs_signal else groups
                micro = self._pack(batch, computed, room=self.mini_batch_size, old_logprobs=old, ref_logprobs=kept)
                data = UpdateInput(batch.rewards, batch.scored, batch.completion_lengths, in_update, micro)
                learner.params, self.opt_state, metrics, advantages = self.update_step(
                    learner.params, self.opt_state, data
                )
                rows.append(metrics)
        rows = jax.device_get(rows)
        clock.lap("update")
        return np.asarray(advantages), {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}

    def _user_metrics(self, rollout: Rollout, advantages: np.ndarray) -> dict[str, float]:
        out: dict[str, float] = {}
        for function in self.learner.metric_fns:
            prompts, columns = repeat_columns(rollout.problems, self.learner.algo.num_generations)
            found = function(prompts, rollout.texts, rollout.scores.total, advantages.reshape(-1), **columns)
            out |= {name: float(aggregate(value)) for name, (value, aggregate) in found.items()}
        return out


def _optimizer(
    training: RLTrainingConfig, total: int | None
) -> tuple[optax.Schedule | None, optax.GradientTransformation]:
    """The optimizer, and its learning rate where that is known."""
    chosen = training.actor_optimizer or OptimizerConfig()
    if isinstance(chosen, OptimizerConfig):
        return build_schedule(chosen, total), build_optimizer(chosen, total)
    return None, chosen


def _advantage_metrics(advantages: np.ndarray) -> dict[str, float]:
    return {
        "advantage/abs_mean": float(np.abs(advantages).mean()),
        "advantage/max": float(advantages.max()),
        "advantage/min": float(advantages.min()),
        "advantage/nonzero_frac": float((advantages != 0).mean()),
    }


class _Clock:
    """Splits a step's wall time into named laps, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[f"time/{name}"] = self.seconds.get(f"time/{name}", 0.0) + now - self._last
        self._last = now
