"""Runs the optimizer updates of a rollout batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float

from tunix_like.algorithms.objective import Objective, Scheduled
from tunix_like.algorithms.ppo import Estimates
from tunix_like.errors import UserError
from tunix_like.models.counts import update_operations
from tunix_like.models.sharding import fetch, place_replicated
from tunix_like.runtime import progress
from tunix_like.runtime.host_memory import return_freed_memory
from tunix_like.session.guards import GapWatch, SkippedUpdate, SkipWatch, save_skipped
from tunix_like.step.forward import place_packed
from tunix_like.step.optimizer import updates_done
from tunix_like.step.packing import Packed, token_places
from tunix_like.step.train_step import MAXIMA, StepInputs, TeacherInputs, step_inputs
from tunix_like.training.companions import Reference
from tunix_like.training.critic import Critic, metrics_to_log
from tunix_like.training.step_metrics import expert_metrics
from tunix_like.training.token_signals import SignalInputs, SignalSource, TokenSignals, all_signals, token_kl
from tunix_like.training.trainer import Trainer
from tunix_like.types import GroupBatch, Problem


class _Shared(NamedTuple):
    """What all updates of a rollout batch share, on the devices (see `StepInputs`).

    Attributes:
      estimates: what the critic learns from; None without one.
    """

    batch: GroupBatch
    old_logprobs: Any
    ref_logprobs: Any
    token_advantages: Any
    teacher: TeacherInputs | None
    scheduled: Any
    estimates: Estimates | None

    def of_update(self, in_update: Bool[np.ndarray, "P"], packed: Packed) -> StepInputs:
        """Returns the inputs of the update with the groups `in_update`."""
        return step_inputs(
            self.batch,
            in_update,
            packed,
            old_logprobs=self.old_logprobs,
            ref_logprobs=self.ref_logprobs,
            token_advantages=self.token_advantages,
            teacher=self.teacher,
            scheduled=self.scheduled,
        )


class _Update(NamedTuple):
    """What one optimizer update gave. The arrays of the first three fields are on the devices.

    Attributes:
      metrics: of the policy.
      critic_metrics: of the critic; None without one.
      advantages: those of the estimator.
      tokens, token_places: computed tokens, and all token places of the packed chunks.
    """

    metrics: dict[str, Any]
    critic_metrics: dict[str, Any] | None
    advantages: Any
    tokens: int
    token_places: int


class _CompiledAhead(NamedTuple):
    """An update that is compiled before its batch is there.

    Attributes:
      widths: lengths of the padded prompts and of the padded completions.
    """

    widths: tuple[int, int]
    compiled: Future[Any]


class Updates:
    """Runs the optimizer updates of each rollout batch of a call of `train`.

    Args:
      mini_batch_size: prompts per optimizer update.
      sources: the sources of signals per token.
      reference: the reference model of the KL, or None.
      critic: trained beside the policy, or None.
      external_engine: whether another engine than the in-process sampler generates the completions.
    """

    def __init__(
        self,
        trainer: Trainer,
        objective: Objective,
        mini_batch_size: int,
        sources: Sequence[SignalSource],
        reference: Reference | None,
        critic: Critic | None,
        external_engine: bool,
    ):
        self.trainer = trainer
        self.algo = objective.config
        self.objective = objective
        self.mini_batch_size = mini_batch_size
        self.sources = sources
        self.reference = reference
        self.critic = critic
        self._ahead: _CompiledAhead | None = None
        most_skipped = trainer.training.max_skipped_updates
        self.skip_watch = SkipWatch(f"the loss '{self.algo.policy_loss_fn}'", most_skipped)
        self.critic_watch = SkipWatch("the loss of the critic", most_skipped)
        self.gap_watch = GapWatch(
            trainer.training.max_logprob_gap, trainer.training.later_logprob_gap == "error", external_engine
        )

    def apply_reference(
        self, batch: GroupBatch
    ) -> tuple[GroupBatch, Float[np.ndarray, "P G T"] | None, dict[str, float]]:
        """Returns the batch, the reference model's log-probabilities (None if there is no such model), and metrics.

        With `kl_in_reward` and without a critic, `beta` times the KL of each completion to the reference model is
        subtracted from its reward. The KL is the sum over its sampled tokens, with the trainer's log-probabilities of
        the policy. The metric is the mean KL per token in nats.
        """
        if self.reference is None:
            return batch, None, {}
        trainer = self.trainer
        ref = trainer.token_logprobs(*self.reference, batch.routed_freely)
        if not self.algo.kl_in_reward or self.critic is not None:
            return batch, ref, {}
        kl = token_kl(self.algo, trainer.token_logprobs(trainer.graphdef, trainer.params, batch), ref, batch.sampled)
        rewards = batch.rewards - self.algo.beta * kl.sum(-1)
        return batch._replace(rewards=rewards), ref, {"kl": float(kl.sum() / max(batch.sampled.sum(), 1))}

    def compile_ahead(self, batch: GroupBatch) -> None:
        """Starts to compile the first update in another thread, for a batch of these shapes. That update waits for it,
        if it has these shapes.

        Nothing is compiled ahead if the update needs signals per token, if there are several processes, whose
        compilations could then have different orders, or if the batch does not fit into memory. A process that ends
        meanwhile waits for the compiler.
        """
        trainer = self.trainer
        if self.sources or jax.process_count() > 1:
            return
        if trainer.programs.traces:  # compiled before, by an earlier call of `train` or another learner
            return
        in_update, *others = self._mini_batches(len(batch.scored))
        per_token = np.zeros(batch.completion_tokens.shape, np.float32)
        old = per_token if others else None
        ref = per_token if self.objective.reference_in_loss else None
        try:
            packed = self._pack(batch, batch.scored & in_update[:, None])
        except UserError:  # completions of the maximum length may never come
            return
        shared = self._shared(batch, old, ref, TokenSignals(), self.objective.scheduled(1))
        inputs = shared.of_update(in_update, place_packed(packed, trainer.mesh))
        lowered = trainer.programs.train_step.lower(trainer.state, inputs, trainer.frozen)
        pool = ThreadPoolExecutor(1, "compiler")
        # jax keeps the compiled program for calls with these shapes.
        self._ahead = _CompiledAhead(batch.widths, pool.submit(lowered.compile))
        pool.shutdown(wait=False)

    def run(
        self,
        step: int,
        problems: Sequence[Problem],
        batch: GroupBatch,
        ref: Float[np.ndarray, "P G T"] | None,
        stale: bool,
        turn_credit: Float[np.ndarray, "P G T"] | None = None,
    ) -> tuple[Float[np.ndarray, "P G"], dict[str, float]]:
        """Replaces the train state by that after the updates of a rollout batch. Returns the advantages and metrics.

        If there are several updates, all use the log-probabilities under the weights before the first update.

        Args:
          ref: the reference model's log-probabilities, or None.
          stale: whether older weights have sampled the completions. Their log-probabilities are then not compared.
          turn_credit: see `SignalInputs`.

        Raises:
          UserError: the estimator returned a non-finite advantage, too many consecutive updates were skipped, or the
            log-probabilities of sampler and trainer differ too much.
        """
        rewards = self.objective.at(step).float32_rewards(batch.rewards, batch.scored, batch.group_estimators)
        scheduled = self.objective.scheduled(step)
        given = batch  # with the rewards of the run, for messages and files; `batch` has those that the estimators get
        batch = batch._replace(rewards=rewards)
        live, metrics = self._live_rows(step, batch, scheduled, turn_credit)
        signal_inputs = SignalInputs(self.trainer, problems, batch, live, ref, turn_credit)
        signals = all_signals(self.sources, signal_inputs)
        mini_batches = self._mini_batches(len(problems))
        # A single update takes its own log-probabilities, which have the same gradient and cost nothing.
        old = signal_inputs.policy_logprobs if len(mini_batches) > 1 else None
        ref = ref if self.objective.reference_in_loss else None
        shared = self._shared(batch, old, ref, signals, scheduled)
        trains_policy = self.critic is None or step > self.critic.settings.warmup_steps
        metrics = {**metrics, **signals.metrics, **expert_metrics(batch, self.trainer.model.config)}
        if self.trainer.schedule is not None:
            metrics["learning_rate"] = float(self.trainer.schedule(updates_done(self.trainer.state.opt_state)))
        updates = [self._update(batch, live, in_update, shared, trains_policy) for in_update in mini_batches]
        # Each update computes the advantages of the whole batch, and is skipped if one is not finite.
        advantages, rows, critic_rows = fetch(
            (updates[0].advantages, [each.metrics for each in updates], [each.critic_metrics for each in updates]),
            self.trainer.mesh,
        )
        self._check_advantages(advantages, given, problems)
        for number in self.skip_watch(rows):
            if (folder := self.trainer.written_folder) is not None:
                save_skipped(folder, SkippedUpdate(step, number, given, live, mini_batches[number], old, ref))
        if self.critic is not None:
            self.critic_watch(critic_rows)
            self.critic_watch.check()
            metrics |= metrics_to_log(_aggregated(critic_rows))
        self.skip_watch.check()
        if not stale:
            self.gap_watch(step, rows)
        metrics["perf/update_occupancy"] = _occupancy(updates)
        metrics["perf/update_operations"] = self._operations(batch, live, trains_policy)
        return advantages + signals.means(signal_inputs.mask), _aggregated(rows) | metrics

    def _mini_batches(self, count: int) -> list[Bool[np.ndarray, "P"]]:
        """Returns for each update the mask of its groups, of `count` groups."""
        places = np.arange(count)
        starts = range(0, count, self.mini_batch_size)
        masks = [(places >= start) & (places < start + self.mini_batch_size) for start in starts]
        return masks * self.algo.num_iterations

    def _shared(
        self,
        batch: GroupBatch,
        old: Float[np.ndarray, "P G T"] | None,
        ref: Float[np.ndarray, "P G T"] | None,
        signals: TokenSignals,
        scheduled: Scheduled | None,
    ) -> _Shared:
        """Places what all updates share on the devices."""

        def placed(arrays: Any) -> Any:
            return place_replicated(arrays, self.trainer.mesh)

        return _Shared(
            batch=placed(batch.routed_freely),
            old_logprobs=placed(old),
            ref_logprobs=placed(ref),
            token_advantages=placed(signals.advantages),
            teacher=signals.teacher_loss,
            scheduled=placed(scheduled),
            estimates=placed(signals.estimates),
        )

    def _update(
        self,
        batch: GroupBatch,
        live: Bool[np.ndarray, "P G"],
        in_update: Bool[np.ndarray, "P"],
        shared: _Shared,
        trains_policy: bool,
    ) -> _Update:
        """Replaces the train state by that after one update with the completions `live` of the groups `in_update`. If
        not `trains_policy`, only the critic learns."""
        trainer = self.trainer
        packed = self._pack(batch, live & in_update[:, None])
        tokens = int(np.sum(packed.length))
        places = token_places(packed, batch.widths[1])
        packed = place_packed(packed, trainer.mesh)
        critic_metrics = None
        if self.critic is not None:
            assert shared.estimates is not None
            critic_metrics = self.critic.update(shared.batch, in_update, packed, shared.estimates)
        if not trains_policy:  # an update without tokens changes nothing
            in_update = np.zeros_like(in_update)
            packed = packed._replace(sets=0 * packed.sets)
        inputs = shared.of_update(in_update, packed)
        if self._ahead is not None and self._ahead.widths == batch.widths:
            with progress.task("compilation of the update"):
                wait([self._ahead.compiled])  # an error comes up again in the call
            return_freed_memory()
        self._ahead = None
        trainer.state, metrics, advantages = trainer.programs.train_step(trainer.state, inputs, trainer.frozen)
        return _Update(metrics, critic_metrics, advantages, tokens, places)

    def _operations(self, batch: GroupBatch, live: Bool[np.ndarray, "P G"], trains_policy: bool) -> float:
        """Returns the number of floating-point operations that the models need for the updates of a batch."""
        lengths = np.where(live, batch.completion_lengths, 0)
        models = [self.trainer.model] if trains_policy else []
        if self.critic is not None:
            models.append(self.critic.model)
        frozen = self.trainer.model.adapters is not None
        once = sum(update_operations(model.config, batch.prompt_lengths, lengths, frozen) for model in models)
        return once * self.algo.num_iterations

    def _pack(self, batch: GroupBatch, rows: Bool[np.ndarray, "P G"]) -> Packed:
        return self.trainer.planner.pack(batch, rows, self.mini_batch_size)

    def _live_rows(
        self,
        step: int,
        batch: GroupBatch,
        scheduled: Scheduled | None,
        turn_credit: Float[np.ndarray, "P G T"] | None,
    ) -> tuple[Bool[np.ndarray, "P G"], dict[str, float]]:
        """Returns a mask of the completions that the model must process, and metrics about the completions that are
        left out."""
        ids = batch.group_estimators
        advantages = None
        if self.objective.skips_zero_advantages:
            advantages = fetch(
                self.trainer.programs.advantages(scheduled, batch.rewards, batch.scored, batch.sampled_lengths, ids),
                self.trainer.mesh,
            )
        credited = None if turn_credit is None else (turn_credit != 0).any(-1)
        live = self.objective.at(step).live_rows(batch.rewards, batch.scored, ids, advantages, credited)
        metrics = self.objective.schedule_metrics(step)
        if batch.trained is not None:
            live = live & batch.trained
            metrics["overlong/masked_frac"] = float((~batch.trained).mean())
        return live, metrics | {"update/rows_left_out_frac": float(1 - live.mean())}

    def _check_advantages(self, advantages: np.ndarray, batch: GroupBatch, problems: Sequence[Problem]) -> None:
        if np.isfinite(advantages).all():
            return
        group, sample = (int(i) for i in np.argwhere(~np.isfinite(advantages))[0])
        name = self.objective.estimators[int(batch.group_estimators[group])].name
        raise UserError(
            f"advantage estimator '{name}' returned {advantages[group, sample]} for completion {sample} of group "
            f"{group} (prompt {problems[group].text!r:.80}) with rewards {batch.rewards[group].tolist()}; it must "
            "return finite numbers. The weights are those before this step."
        )


def _aggregated(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Combines the metrics of several updates: the maximum of a metric in `MAXIMA`, the mean of another one. Non-finite
    values are ignored. A metric without a finite value is NaN."""
    finite = {name: [float(row[name]) for row in rows if np.isfinite(row[name])] for name in rows[0]}
    return {
        name: math.nan if not values else max(values) if name in MAXIMA else float(np.mean(values))
        for name, values in finite.items()
    }


def _occupancy(updates: Sequence[_Update]) -> float:
    """Returns the share of the token places of packed chunks that have a token."""
    token_places = sum(update.token_places for update in updates)
    return sum(update.tokens for update in updates) / token_places if token_places else math.nan
