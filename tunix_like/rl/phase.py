"""Reinforcement learning as a phase of the loop: the data stream, one step from prompts to new weights, its metrics.

It knows the order of things in a step; what they are is the business of the rooms it calls.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grain.python as grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Bool, Float

from tunix_like import progress
from tunix_like.best import check_best_metric
from tunix_like.config import OptimizerConfig, RLTrainingConfig
from tunix_like.data.shared import warn_shared
from tunix_like.data.stream import Resumable, check_prompts, prompt_batches
from tunix_like.errors import UserError
from tunix_like.models.lora import fingerprint
from tunix_like.models.operations import forward_operations, update_operations
from tunix_like.models.sharding import check_batch, fetch, place_replicated, prompt_parts, scope, shardings_of
from tunix_like.optimizer import build_optimizer, build_schedule, init_optimizer
from tunix_like.processes import is_first
from tunix_like.rl.collection import Collector
from tunix_like.rl.diagnosis import SignalWatch
from tunix_like.rl.forward import batch_logprobs, place_packed
from tunix_like.rl.guards import FOLDER, GapWatch, Skipped, SkipWatch, keep
from tunix_like.rl.losses import kl_estimate
from tunix_like.rl.objective import Objective, build_objective
from tunix_like.rl.packing import Packed, choose_layout, pack, token_places
from tunix_like.rl.pass_rates import count_groups, sum_advantages
from tunix_like.rl.rollouts import (
    Rollout,
    cut_steps,
    pass_rate_bins,
    repeat_columns,
    saved_on_failure,
    write_rollouts,
)
from tunix_like.rl.samples import pick_samples
from tunix_like.rl.update import jit_update, update_input
from tunix_like.sizes import chunk_size
from tunix_like.speed import Clock, Compilations, Profile, peak_flops
from tunix_like.types import GroupBatch

if TYPE_CHECKING:
    from tunix_like.rl.learner import Learner

logger = logging.getLogger("tunix_like")


class RLPhase:
    """One call of `Learner.train`, as a phase of the loop: the data, the optimizer and the compiled functions."""

    name, step_key = "train", "step"

    def __init__(
        self,
        learner: Learner,
        train_ds: Any,
        eval_ds: Any,
        batch_size: int,
        shuffle: bool,
        overlong: str,
        folder: Path | None,
    ):
        self.learner, self.rollouts = learner, None if folder is None or not is_first() else folder / "rollouts"
        training, rollout = learner.training, learner.rollout_config
        self._rollouts_lost = False
        self.compilations = Compilations()
        sized = isinstance(train_ds, Sequence | grain.MapDataset)
        if sized:
            found = check_prompts(train_ds, learner.tokenizer, rollout.max_prompt_length, overlong, "training")
            found.warn("training")
            skipped = found.prompts
            batch_size = min(batch_size, len(train_ds) - skipped)
        self.batch_size = batch_size
        self.total = training.max_steps
        if self.total is None and sized and not learner.algo.dynamic_sampling:
            self.total = (len(train_ds) - skipped) // batch_size
        self.profile = Profile(training.profile_steps, folder)
        self.mini_batch_size = min(training.mini_batch_size or batch_size, batch_size)
        check_batch(learner.mesh, "data.batch_size", batch_size)
        check_batch(learner.mesh, "training.mini_batch_size", self.mini_batch_size)
        updates = -(-batch_size // self.mini_batch_size) * learner.algo.num_iterations
        self.updates_per_step = updates
        self.objective: Objective = build_objective(
            learner.algo, rollout.max_tokens_to_generate, updates, learner.source_estimators
        )
        self.schedule, optimizer = run_optimizer(training, None if self.total is None else self.total * updates)
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
        self.iterator = self.batches if isinstance(self.batches, Resumable) else None
        self.collector = Collector(learner, self.objective, self.batches, batch_size, self.rollouts)
        warn_shared(train_ds, eval_ds)
        self.evaluator = None if eval_ds is None or len(eval_ds) == 0 else learner.evaluator(eval_ds, overlong)
        check_best_metric(training, self.evaluator)
        self.identity = _identity(learner) | {"batch_size": batch_size, "mini_batch_size": self.mini_batch_size}
        self.identity |= {"rows": len(train_ds)} if sized else {}
        if learner.model.adapters is not None:
            self.identity["base"] = fingerprint(learner.model.config, learner.frozen, learner.mesh)
        self.opt_state = init_optimizer(optimizer, learner.trained)
        self.watch = SkipWatch(f"the loss '{learner.algo.policy_loss_fn}'", training.max_skipped_updates)
        self.gap_watch, self.signal_watch = GapWatch(training.max_logprob_gap), SignalWatch(learner)
        self._compile(optimizer)

    def _compile(self, optimizer: optax.GradientTransformation) -> None:
        learner = self.learner

        def traced() -> None:
            learner.compilations += 1

        fixed = learner.graphdef, self.objective, optimizer, learner.options
        shardings = shardings_of((learner.trained, self.opt_state), learner.mesh)
        self.update_step = jit_update(*fixed, shardings, traced)
        self.logprobs = jax.jit(functools.partial(batch_logprobs, options=learner.options), static_argnums=0)
        self.advantages = jax.jit(self.objective.advantages)

    def state(self) -> Any:
        drawn = place_replicated(jnp.asarray(self.collector.drawn, jnp.int32), self.learner.mesh)
        return {"params": self.learner.trained, "opt_state": self.opt_state, "drawn": drawn}

    def load_state(self, state: Any, step: int) -> None:
        self.learner.trained, self.opt_state = state["params"], state["opt_state"]
        self.collector.drawn = int(state["drawn"])
        if self.iterator is None:
            read = self.collector.drawn // self.batch_size
            next(itertools.islice(self.batches, read, read), None)

    def cut(self, step: int) -> None:
        if self.rollouts is not None:
            cut_steps(self.rollouts, step)
            cut_steps(self.rollouts.parent / FOLDER, step)

    def finished(self, row: dict[str, Any]) -> bool:
        return False

    def evaluate(self, step: int, last: bool) -> dict[str, float]:
        every = self.learner.training.eval_every_n_steps
        due = step == 0 or last or (every is not None and step % every == 0)
        if self.evaluator is None or not due:
            return {}
        kept = None if self.rollouts is None else self.rollouts / "eval"
        return self.evaluator(self.learner.params, rollouts=kept, step=step).metrics

    def advance(self, step: int) -> dict[str, Any] | None:
        with self.profile.around(step), scope(self.learner.mesh):
            return self._advance(step)

    def _advance(self, step: int) -> dict[str, Any] | None:
        clock, before = Clock(), self.learner.sampler.row_steps
        collected = self.collector(step, clock.lap)
        if collected is None:
            return None
        rollout, batch, metrics, sampled = collected
        with progress.task("reference"):
            batch, ref, kl_metrics = self._reference(batch, clock)
        with progress.task("update"), saved_on_failure(self.rollouts, step, rollout.problems, rollout.texts):
            advantages, update_metrics = self._update(step, rollout, batch, ref, clock)
        metrics |= kl_metrics | update_metrics | _advantage_metrics(advantages)
        bins = pass_rate_bins(rollout, self.learner.success_threshold)
        metrics |= {"pass_rate/trained": count_groups(bins), "pass_rate/advantage": sum_advantages(bins, advantages)}
        assert batch.estimator_ids is not None
        kept = self.objective.kept_groups(batch.scored, batch.estimator_ids)
        metrics["groups/dropped_frac"] = float((~kept).mean())
        metrics["groups/zero_signal_frac"] = float((kept & (advantages == 0).all(axis=1)).mean())
        if self.schedule is not None:
            metrics["learning_rate"] = float(self.schedule((step - 1) * self.updates_per_step))
        metrics |= self._user_metrics(rollout, advantages)
        if self.rollouts is not None and (step == 1 or step % self.learner.training.log_rollouts_every_n_steps == 0):
            self._write(step, rollout, batch, advantages)
        self.signal_watch(step, rollout, batch, advantages)
        every = self.learner.training.log_samples_every_n_steps
        if self.learner.on_samples is not None and every is not None and (step == 1 or step % every == 0):
            self.learner.on_samples(step, pick_samples(rollout, advantages))
        clock.lap("other")
        row_steps = self.learner.sampler.row_steps - before
        return metrics | clock.seconds | self._speed(batch, sampled, row_steps, metrics | clock.seconds)

    def _write(self, step: int, rollout: Rollout, batch: GroupBatch, advantages: np.ndarray) -> None:
        assert self.rollouts is not None
        shaped = np.where(batch.scored, batch.rewards, np.nan)
        columns = {"reward": rollout.scores.total, "estimator_reward": shaped, "advantage": advantages}
        columns |= {"length": batch.completion_lengths, "finished": rollout.completions.finished}
        columns |= {f"reward/{name}": values for name, values in rollout.scores.by_function.items()}
        try:
            write_rollouts(self.rollouts, step, rollout.problems, rollout.texts, columns)
        except OSError as error:
            if not self._rollouts_lost:
                logger.warning("%s: the completions of step %d are not written (%s)", self.rollouts, step, error)
            self._rollouts_lost = True

    def _speed(self, batch: GroupBatch, sampled: int, row_steps: int, known: dict[str, Any]) -> dict[str, float]:
        """Completion tokens a second, the share of the work that was on live rows, what was compiled since the step
        before (its evaluation and checkpoint included), and the share of the device's peak arithmetic, prompts counted
        once per group (`*_mfu`, where the peak is known). With dynamic sampling the rollout's share counts the groups
        that were kept alone."""
        rollout, update = (max(known[f"time/{name}"], 1e-9) for name in ("rollout", "update"))
        programs, compiling = self.compilations.take()
        metrics = {
            "perf/generation_tokens_per_sec": sampled / rollout,
            "perf/training_tokens_per_sec": int(batch.completion_lengths.sum()) / update,
            "perf/rollout_occupancy": sampled / row_steps if row_steps else float("nan"),
            "perf/update_programs": float(self.learner.compilations),
            "perf/programs_compiled": float(programs),
            "perf/compile_sec": compiling,
        }
        if (peak := peak_flops()) is not None:
            forward = forward_operations(self.learner.model.config, batch.prompt_lengths, batch.completion_lengths)
            done = {"rollout": forward / rollout, "update": known["perf/update_operations"] / update}
            metrics |= {f"perf/{name}_mfu": rate / peak for name, rate in done.items()}
        return metrics

    def _reference(
        self, batch: GroupBatch, clock: Clock
    ) -> tuple[GroupBatch, Float[np.ndarray, "P G T"] | None, dict[str, float]]:
        """The reference's log-probabilities where there is one, and the KL in the reward where it belongs there."""
        learner = self.learner
        if learner.ref_params is None:
            return batch, None, {}
        ref, metrics = self._logprobs(learner.ref_graphdef, learner.ref_params, batch), {}
        if learner.algo.kl_in_reward:
            batch, metrics["kl"] = self._kl_into_reward(batch, ref)
        clock.lap("reference")
        return batch, ref, metrics

    def _pack(self, batch: GroupBatch, rows: np.ndarray, most_prompts: int) -> Packed:
        learner, widths = self.learner, (batch.prompt_tokens.shape[1], batch.completion_tokens.shape[2])
        parts, reference = prompt_parts(learner.mesh), learner.ref_params is not None
        shape = most_prompts, learner.algo.num_generations
        size = chunk_size(learner.training, learner.model, shape, widths, reference, learner.mesh)
        layout = choose_layout(learner.algo.num_generations, most_prompts, widths, size, parts)
        return pack(batch.completion_lengths, rows, widths[1], layout, most_prompts)

    def _logprobs(self, graphdef: Any, params: Any, batch: GroupBatch, rows: np.ndarray | None = None) -> np.ndarray:
        """Of the completions `rows`; None: of all."""
        rows = np.ones(batch.scored.shape, bool) if rows is None else rows
        packed = place_packed(self._pack(batch, rows, len(rows)), self.learner.mesh)
        return np.asarray(fetch(self.logprobs(graphdef, params, self._place(batch), packed), self.learner.mesh))

    def _place(self, batch: GroupBatch) -> GroupBatch:
        """Everywhere on the mesh: it is small, and chunks take rows out of it."""
        return place_replicated(batch, self.learner.mesh)

    def _kl_into_reward(self, batch: GroupBatch, ref: np.ndarray) -> tuple[GroupBatch, float]:
        """`r - beta sum_t kl_t`, with the trainer's own log-probabilities, before the estimator; and the mean KL per
        token."""
        mask = np.arange(ref.shape[-1]) < batch.completion_lengths[..., None]
        own = self._logprobs(self.learner.graphdef, self.learner.params, batch)
        tokens = kl_estimate(str(self.learner.algo.kl_loss_mode), jnp.asarray(own), jnp.asarray(ref), jnp.asarray(mask))
        kl = np.where(mask, np.asarray(tokens), 0.0)
        rewards = (batch.rewards - self.learner.algo.beta * kl.sum(-1)).astype(np.float32)
        return batch._replace(rewards=rewards), float(kl.sum() / mask.sum())

    def _update(
        self, step: int, rollout: Rollout, batch: GroupBatch, ref: np.ndarray | None, clock: Clock
    ) -> tuple[np.ndarray, dict[str, float]]:
        """All optimizer updates of one rollout batch; metrics are their mean.

        Raises:
          UserError: the estimator gave an advantage that is no finite number (the weights are as before), too many
            updates in a row were skipped, or sampler and trainer disagree.
        """
        learner, count, width = self.learner, len(batch.prompt_lengths), batch.completion_tokens.shape[2]
        live, out = self._live_rows(batch)
        several = self.updates_per_step > 1
        old = self._logprobs(learner.graphdef, learner.params, batch, live) if several else None
        kept = ref if self.objective.reference_in_loss else None
        placed, placed_logprobs = self._place(batch), place_replicated((old, kept), learner.mesh)
        starts = [*range(0, count, self.mini_batch_size)] * learner.algo.num_iterations
        parts = [(np.arange(count) >= start) & (np.arange(count) < start + self.mini_batch_size) for start in starts]
        rows: list[dict[str, Any]] = []
        advantages: Any = None
        real, places = 0, 0
        for in_update in parts:
            packed = self._pack(batch, live & in_update[:, None], self.mini_batch_size)
            data = update_input(placed, in_update, place_packed(packed, learner.mesh), *placed_logprobs)
            learner.trained, self.opt_state, metrics, advantages = self.update_step(
                learner.trained, self.opt_state, data, learner.frozen
            )
            real, places = real + int(np.sum(packed.length)), places + token_places(packed, width)
            rows.append(metrics)
            if len(rows) == 1:
                self._check_advantages(fetch(advantages, learner.mesh), rollout, batch)
        rows, advantages = fetch((rows, advantages), learner.mesh)
        self._guard(rows, [Skipped(step, i, batch, live, part, old, kept) for i, part in enumerate(parts)])
        clock.lap("update")
        out["perf/update_occupancy"] = real / places if places else float("nan")
        computed = np.where(live, batch.completion_lengths, 0)
        frozen = learner.model.adapters is not None
        done = update_operations(learner.model.config, batch.prompt_lengths, computed, frozen)
        out["perf/update_operations"] = done * learner.algo.num_iterations
        return np.asarray(advantages), {name: _mean([row[name] for row in rows]) for name in rows[0]} | out

    def _guard(self, rows: list[dict[str, Any]], updates: list[Skipped]) -> None:
        """Keeps the updates that were skipped, then stops the run where its numbers are not to be trusted."""
        for number in self.watch(rows):
            if self.rollouts is not None:
                try:
                    file = keep(self.rollouts.parent / FOLDER, updates[number])
                    logger.warning("what the skipped update was made from is kept: tunix-like replay %s", file)
                except OSError as error:
                    logger.warning("what the skipped update was made from cannot be written: %s", error)
        self.watch.check()
        self.gap_watch(rows)

    def _live_rows(self, batch: GroupBatch) -> tuple[Bool[np.ndarray, "P G"], dict[str, float]]:
        """The completions that go through the model, and what share of groups and completions does not, and why."""
        objective, ids, known = self.objective, batch.estimator_ids, None
        assert ids is not None
        if objective.looks_for_zeros:
            known = self.advantages(batch.rewards, batch.scored, batch.completion_lengths, ids)
            known = fetch(known, self.learner.mesh)
        live = objective.live_rows(batch.rewards, batch.scored, ids, known)
        metrics: dict[str, float] = {}
        if batch.trained is not None:
            live = live & batch.trained
            metrics["overlong/masked_frac"] = float((~batch.trained).mean())
        return live, metrics | {"update/rows_left_out_frac": float(1 - live.mean())}

    def _check_advantages(self, advantages: np.ndarray, rollout: Rollout, batch: GroupBatch) -> None:
        if np.isfinite(advantages).all():
            return
        group, sample = (int(i) for i in np.argwhere(~np.isfinite(advantages))[0])
        assert batch.estimator_ids is not None
        name = self.objective.estimators[int(batch.estimator_ids[group])].name
        raise UserError(
            f"advantage estimator '{name}' gave {advantages[group, sample]} for completion {sample} of group {group} "
            f"(prompt {rollout.problems[group].text!r:.80}), whose rewards are {batch.rewards[group].tolist()}. "
            "The weights are as they were before this step."
        )

    def _user_metrics(self, rollout: Rollout, advantages: np.ndarray) -> dict[str, float]:
        out: dict[str, float] = {}
        for function in self.learner.metric_fns:
            prompts, columns = repeat_columns(rollout.problems, self.learner.algo.num_generations)
            found = function(prompts, rollout.texts, rollout.scores.total, advantages.reshape(-1), **columns)
            out |= {name: float(aggregate(value)) for name, (value, aggregate) in found.items()}
        return out


def _identity(learner: Learner) -> dict[str, Any]:
    """What a run's next step depends on, besides its state, its data and its code."""
    rollout = dataclasses.asdict(learner.rollout_config)
    del rollout["max_concurrent_rows"]
    optimizer = learner.training.actor_optimizer or OptimizerConfig()
    adapters = learner.model.adapters
    return {
        "algorithm": dataclasses.asdict(learner.algo),
        "rollout": rollout,
        "optimizer": dataclasses.asdict(optimizer) if isinstance(optimizer, OptimizerConfig) else None,
        "rewards": {name: weight for name, _, weight in learner.rewards},
        "success_threshold": learner.success_threshold,
        "source_estimators": learner.source_estimators,
        "adapters": adapters and str(adapters),
        "quantized": learner.model.quantized,
        "seed": learner.training.seed,
    }


def run_optimizer(
    training: RLTrainingConfig, total: int | None
) -> tuple[optax.Schedule | None, optax.GradientTransformation]:
    """The optimizer, and its learning rate where that is known."""
    chosen = training.actor_optimizer or OptimizerConfig()
    if isinstance(chosen, OptimizerConfig):
        return build_schedule(chosen, total), build_optimizer(chosen, total)
    return None, chosen


def _mean(values: Any) -> float:
    """The mean of what is a number; NaN where nothing is."""
    finite = [float(value) for value in values if np.isfinite(value)]
    return float(np.mean(finite)) if finite else float("nan")


def _advantage_metrics(advantages: np.ndarray) -> dict[str, float]:
    return {
        "advantage/abs_mean": float(np.abs(advantages).mean()),
        "advantage/max": float(advantages.max()),
        "advantage/min": float(advantages.min()),
        "advantage/nonzero_frac": float((advantages != 0).mean()),
    }
