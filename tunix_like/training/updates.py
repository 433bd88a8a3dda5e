"""Runs the optimizer updates of a rollout batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from tunix_like.algorithms.distillation import teacher_advantages
from tunix_like.algorithms.losses import kl_estimate
from tunix_like.algorithms.objective import Objective, Scheduled
from tunix_like.algorithms.ppo import Estimates, at_last_action, estimate
from tunix_like.algorithms.token_baseline import TOKEN_BASELINE, token_baseline_advantages
from tunix_like.config.schema import AlgorithmConfig
from tunix_like.errors import UserError
from tunix_like.models.counts import update_operations
from tunix_like.models.sharding import fetch, place_replicated, prompt_parts
from tunix_like.planning.sizes import Planner
from tunix_like.runtime import progress
from tunix_like.runtime.host_memory import return_freed_memory
from tunix_like.session.guards import GapWatch, SkippedUpdate, SkipWatch, save_skipped
from tunix_like.step.forward import place_packed
from tunix_like.step.optimizer import updates_done
from tunix_like.step.packing import Packed, choose_layout, pack, token_places, with_experts
from tunix_like.step.train_step import MAXIMA, StepInputs, TeacherInputs, step_inputs
from tunix_like.training.companions import Reference
from tunix_like.training.critic import Critic
from tunix_like.training.step_metrics import expert_metrics
from tunix_like.training.teacher import Teachers
from tunix_like.training.trainer import Trainer
from tunix_like.types import GroupBatch, Problem


class _TokenSignals(NamedTuple):
    """What the tokens of a batch get in addition to the advantages of the estimator.

    Attributes:
      from_teacher: advantages that a teacher adds.
      from_rewards: advantages of turns, of a critic or of the estimator `otb`, beside those of completions.
      teacher_loss: the teacher, if its divergence is a term of the loss.
      estimates: what a critic learns from.
    """

    from_teacher: Float[np.ndarray, "P G T"] | None = None
    from_rewards: Float[np.ndarray, "P G T"] | None = None
    teacher_loss: TeacherInputs | None = None
    estimates: Estimates | None = None
    metrics: dict[str, float] | None = None

    @property
    def advantages(self) -> Float[np.ndarray, "P G T"] | None:
        if self.from_teacher is None or self.from_rewards is None:
            return self.from_rewards if self.from_teacher is None else self.from_teacher
        return self.from_teacher + self.from_rewards

    def means(self, mask: Bool[np.ndarray, "P G T"]) -> Float[np.ndarray, "P G"] | float:
        """Returns for each completion the mean of `from_rewards` over its tokens `mask`."""
        if self.from_rewards is None:
            return 0.0
        return (self.from_rewards * mask).sum(-1) / np.maximum(mask.sum(-1), 1)


class _Shared(NamedTuple):
    """What all updates of a rollout batch share, on the devices (see `StepInputs`).

    Attributes:
      estimates: what the critic learns from; None without one.
    """

    batch: GroupBatch
    old_logprobs: Any
    ref_logprobs: Any
    token_advantages: Any
    scheduled: Any
    estimates: Estimates | None
    teacher: TeacherInputs | None


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
      reference: the reference model of the KL, or None.
      external_engine: whether another engine than the in-process sampler generates the completions.
      teachers: score the sampled tokens, or None.
      critic: gives the advantages of tokens, or None.
    """

    def __init__(
        self,
        trainer: Trainer,
        algo: AlgorithmConfig,
        objective: Objective,
        mini_batch_size: int,
        reference: Reference | None,
        external_engine: bool,
        teachers: Teachers | None = None,
        critic: Critic | None = None,
    ):
        self.trainer = trainer
        self.algo = algo
        self.objective = objective
        self.teachers = teachers
        self.critic = critic
        self.critic_watch = SkipWatch("the loss of the critic", trainer.training.max_skipped_updates)
        self.mini_batch_size = mini_batch_size
        self.reference = reference
        self._ahead: _CompiledAhead | None = None
        self.skip_watch = SkipWatch(f"the loss '{algo.policy_loss_fn}'", trainer.training.max_skipped_updates)
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
        ref = self._logprobs(*self.reference, batch.routed_freely)
        if not self.algo.kl_in_reward or self.critic is not None:
            return batch, ref, {}
        mask = batch.sampled
        policy = self._logprobs(self.trainer.graphdef, self.trainer.params, batch)
        tokens = kl_estimate(str(self.algo.kl_loss_mode), jnp.asarray(policy), jnp.asarray(ref), jnp.asarray(mask))
        kl = np.where(mask, np.asarray(tokens), 0.0)
        rewards = batch.rewards - self.algo.beta * kl.sum(-1)
        return batch._replace(rewards=rewards), ref, {"kl": float(kl.sum() / max(mask.sum(), 1))}

    def compile_ahead(self, batch: GroupBatch) -> None:
        """Starts to compile the first update in another thread, for a batch of these shapes. That update waits for it,
        if it has these shapes.

        Nothing is compiled ahead if the update needs signals per token (of a teacher, a critic or a token baseline), if
        there are several processes, whose compilations could then have different orders, or if the batch does not fit
        into memory. A process that ends meanwhile waits for the compiler.
        """
        trainer = self.trainer
        by_token = any(estimator.name == TOKEN_BASELINE for estimator in self.objective.estimators)
        if self.teachers is not None or self.critic is not None or by_token or jax.process_count() > 1:
            return
        if trainer.programs.traces:  # compiled before, by an earlier call of `train` or another learner
            return
        prompts, *others = self._mini_batches(len(batch.scored))
        per_token = np.zeros(batch.completion_tokens.shape, np.float32)
        old = per_token if others else None
        ref = None if self.reference is None else per_token
        try:
            packed = self._pack(batch, batch.scored & prompts[:, None], self.mini_batch_size)
        except UserError:  # completions of the maximum length may never come
            return
        shared = self._shared(batch, old, ref, _TokenSignals(), self.objective.scheduled(1))
        inputs = _inputs(shared, prompts, place_packed(packed, trainer.mesh))
        lowered = trainer.programs.train_step.lower(trainer.state, inputs, trainer.frozen)
        pool = ThreadPoolExecutor(1, "compiler")
        # jax keeps the compiled program for calls with these shapes.
        self._ahead = _CompiledAhead(_widths(batch), pool.submit(lowered.compile))
        pool.shutdown(wait=False)

    def run(
        self,
        step: int,
        problems: Sequence[Problem],
        batch: GroupBatch,
        ref: Float[np.ndarray, "P G T"] | None,
        stale: bool,
        by_turn: Float[np.ndarray, "P G T"] | None = None,
    ) -> tuple[Float[np.ndarray, "P G"], dict[str, float]]:
        """Replaces the train state by that after the updates of a rollout batch. Returns the advantages and metrics.

        If there are several updates, all use the log-probabilities under the weights before the first update.

        Args:
          ref: the reference model's log-probabilities, or None.
          stale: whether older weights have sampled the completions. Their log-probabilities are then not compared.
          by_turn: what `collection.turn_signals` gives: the advantages of tokens, or for a critic their rewards.

        Raises:
          UserError: the estimator returned a non-finite advantage, too many consecutive updates were skipped, or the
            log-probabilities of sampler and trainer differ too much.
        """
        given = batch  # with the rewards of the run, for messages and files
        # `batch.rewards` are from here on what the estimators get: float32, where they allow it without an offset
        rewards = self.objective.at(step).float32_rewards(batch.rewards, batch.scored, batch.group_estimators)
        batch = batch._replace(rewards=rewards)
        scheduled = self.objective.scheduled(step)
        credited = None if by_turn is None else (by_turn != 0).any(-1)
        live, metrics = self._live_rows(step, batch, scheduled, credited)
        mini_batches = self._mini_batches(len(problems))
        several = len(mini_batches) > 1
        old = self._old_logprobs(batch, live, ref, several)
        signals = self._token_signals(problems, batch, live, ref, old, by_turn)
        metrics |= (signals.metrics or {}) | expert_metrics(batch, self.trainer.model.config)
        if self.trainer.schedule is not None:
            metrics["learning_rate"] = float(self.trainer.schedule(updates_done(self.trainer.state.opt_state)))
        # A single update takes its own log-probabilities, which have the same gradient and cost nothing.
        shared = self._shared(batch, old if several else None, ref, signals, scheduled)
        trains_policy = self.critic is None or step > self.critic.settings.warmup_steps
        updates: list[_Update] = []
        advantages = np.zeros_like(rewards)
        for prompts in mini_batches:
            updates.append(self._update(batch, live, prompts, shared, trains_policy))
            if len(updates) == 1:  # each update computes those of the whole batch
                advantages = fetch(updates[0].advantages, self.trainer.mesh)
                self._check_advantages(advantages, given, problems)
        policy_metrics, critic_metrics = fetch(
            ([each.metrics for each in updates], [each.critic_metrics for each in updates]), self.trainer.mesh
        )
        for number in self.skip_watch(policy_metrics):
            if self.trainer.written_folder is not None:
                prompts = mini_batches[number]
                old = shared.old_logprobs
                ref = shared.ref_logprobs
                skipped = SkippedUpdate(step, number, given, live, prompts, old, ref)
                save_skipped(self.trainer.written_folder, skipped)
        if self.critic is not None:
            self.critic_watch(critic_metrics)
            self.critic_watch.check()
            metrics |= _critic_metrics(critic_metrics)
        self.skip_watch.check()
        if not stale:
            self.gap_watch(step, policy_metrics)
        token_places = sum(each.token_places for each in updates)
        means = {name: _aggregate(name, [row[name] for row in policy_metrics]) for name in policy_metrics[0]}
        return np.asarray(advantages) + signals.means(batch.sampled & live[..., None]), {
            **means,
            **metrics,
            "perf/update_occupancy": sum(each.tokens for each in updates) / token_places if token_places else math.nan,
            "perf/update_operations": self._operations(batch, live, trains_policy),
        }

    def _mini_batches(self, prompts: int) -> list[Bool[np.ndarray, "P"]]:
        """Returns for each update the mask of its prompts."""
        places = np.arange(prompts)
        starts = range(0, prompts, self.mini_batch_size)
        masks = [(places >= start) & (places < start + self.mini_batch_size) for start in starts]
        return masks * self.algo.num_iterations

    def _shared(
        self,
        batch: GroupBatch,
        old: Float[np.ndarray, "P G T"] | None,
        ref: Float[np.ndarray, "P G T"] | None,
        signals: _TokenSignals,
        scheduled: Scheduled | None,
    ) -> _Shared:
        """Places what all updates share on the devices."""

        def placed(arrays: Any) -> Any:
            return place_replicated(arrays, self.trainer.mesh)

        return _Shared(
            batch=placed(batch.routed_freely),
            old_logprobs=placed(old),
            ref_logprobs=placed(ref if self.objective.reference_in_loss else None),
            token_advantages=placed(signals.advantages),
            scheduled=placed(scheduled),
            estimates=placed(signals.estimates),
            teacher=signals.teacher_loss,
        )

    def _update(
        self,
        batch: GroupBatch,
        live: Bool[np.ndarray, "P G"],
        prompts: Bool[np.ndarray, "P"],
        shared: _Shared,
        trains_policy: bool,
    ) -> _Update:
        """Replaces the train state by that after one update with the completions `live` of the mini-batch `prompts`.
        If not `trains_policy`, only the critic learns."""
        trainer = self.trainer
        packed = self._pack(batch, live & prompts[:, None], self.mini_batch_size)
        tokens = int(np.sum(packed.length))
        places = token_places(packed, batch.completion_tokens.shape[2])
        packed = place_packed(packed, trainer.mesh)
        critic_metrics = None
        if self.critic is not None:
            assert shared.estimates is not None
            critic_metrics = _update_critic(self.critic, shared.batch, prompts, packed, shared.estimates)
        if not trains_policy:  # an update without tokens changes nothing
            prompts = np.zeros_like(prompts)
            packed = packed._replace(sets=0 * packed.sets)
        inputs = _inputs(shared, prompts, packed)
        if self._ahead is not None and self._ahead.widths == _widths(batch):
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

    def _old_logprobs(
        self,
        batch: GroupBatch,
        live: Bool[np.ndarray, "P G"],
        ref: Float[np.ndarray, "P G T"] | None,
        several: bool,
    ) -> Float[np.ndarray, "P G T"] | None:
        """Returns the log-probabilities of the policy; None if they are not needed before the first update. `several`:
        the batch has several updates."""
        by_teacher = self.teachers is not None and self.teachers.spec is None
        if several or by_teacher or self._penalises_tokens(ref):
            return self._logprobs(self.trainer.graphdef, self.trainer.params, batch, live)
        return None

    def _penalises_tokens(self, ref: Float[np.ndarray, "P G T"] | None) -> bool:
        """Returns whether the KL to the reference is subtracted from the rewards of tokens, which the critic gets."""
        return self.critic is not None and ref is not None and bool(self.algo.kl_in_reward)

    def _token_signals(
        self,
        problems: Sequence[Problem],
        batch: GroupBatch,
        live: Bool[np.ndarray, "P G"],
        ref: Float[np.ndarray, "P G T"] | None,
        old: Float[np.ndarray, "P G T"] | None,
        by_turn: Float[np.ndarray, "P G T"] | None,
    ) -> _TokenSignals:
        """Returns the signals per token of the completions `live`."""
        signals = _TokenSignals() if self.teachers is None else self._teacher_signals(problems, batch, live, old)
        if self.critic is not None:
            rewards = at_last_action(batch.rewards, batch.sampled) if by_turn is None else by_turn
            policy = old if self._penalises_tokens(ref) else None
            estimates, metrics = self._estimates(self.critic, batch, live, rewards, policy, ref)
            metrics |= signals.metrics or {}
            return signals._replace(from_rewards=estimates.advantages, estimates=estimates, metrics=metrics)
        if by_turn is not None:
            return signals._replace(from_rewards=by_turn)
        return signals._replace(from_rewards=self._token_baseline(batch, live))

    def _teacher_signals(
        self,
        problems: Sequence[Problem],
        batch: GroupBatch,
        live: Bool[np.ndarray, "P G"],
        old: Float[np.ndarray, "P G T"] | None,
    ) -> _TokenSignals:
        teachers = self.teachers
        assert teachers is not None
        if teachers.spec is None:
            assert old is not None
            taught, metrics = self._taught_advantages(teachers, batch, problems, live, old)
            return _TokenSignals(from_teacher=taught, metrics=metrics)
        teacher = teachers.default
        assert teacher is not None
        seen = teacher.batch(batch.routed_freely, problems, np.ones(len(problems), bool))
        prompts = place_replicated((seen.prompt_tokens, seen.prompt_lengths), self.trainer.mesh)
        return _TokenSignals(teacher_loss=TeacherInputs(teacher.params, *prompts))

    def _token_baseline(self, batch: GroupBatch, live: Bool[np.ndarray, "P G"]) -> Float[np.ndarray, "P G T"] | None:
        """Returns the advantages of the completions whose estimator is `otb`, 0 in others; None if there are none."""
        names = np.array([estimator.name for estimator in self.objective.estimators])[batch.group_estimators]
        if not (names == TOKEN_BASELINE).any():
            return None
        # like the other estimators, also with completions that are scored but not trained
        counted = batch.scored & (live.any(-1) & (names == TOKEN_BASELINE))[:, None]
        trainer = self.trainer
        norms = self._values(trainer.programs.score_norms, trainer.graphdef, trainer.params, batch, counted)
        advantages = token_baseline_advantages(batch.rewards, counted, norms, batch.sampled)
        return advantages.astype(np.float32)

    def _taught_advantages(
        self,
        teachers: Teachers,
        batch: GroupBatch,
        problems: Sequence[Problem],
        live: Bool[np.ndarray, "P G"],
        old: Float[np.ndarray, "P G T"],
    ) -> tuple[Float[np.ndarray, "P G T"], dict[str, float]]:
        """Returns the advantages of tokens that teachers give, 0 in rows without a teacher, and metrics.

        Args:
          old: log-probabilities of the policy.
        """
        found = np.zeros_like(old)
        mask = np.zeros_like(batch.sampled)
        for teacher, taught in teachers.of_batch(problems, self.objective):
            rows = live & taught[:, None]
            seen = teacher.batch(batch.routed_freely, problems, taught)
            scores = teacher.logprobs(self._logprobs, self.trainer.params, seen, rows)
            scores = np.where(batch.completion_tokens < teacher.config.vocab_size, scores, -np.inf)
            found = np.where(rows[..., None], scores, found)
            mask = mask | (batch.sampled & rows[..., None])
        values = np.asarray(teacher_advantages(jnp.asarray(found), jnp.asarray(old), jnp.asarray(mask)))
        metrics = {}
        if mask.any():
            metrics["teacher/divergence"] = float(-values[mask].mean())
            metrics["teacher/logprob"] = float(found[mask].mean())
        return teachers.settings.coef * values, metrics

    def _estimates(
        self,
        critic: Critic,
        batch: GroupBatch,
        live: Bool[np.ndarray, "P G"],
        rewards: Float[np.ndarray, "P G T"],
        old: Float[np.ndarray, "P G T"] | None,
        ref: Float[np.ndarray, "P G T"] | None,
    ) -> tuple[Estimates, dict[str, float]]:
        """Returns what the critic gives for the tokens of the completions `live`, and metrics.

        Args:
          rewards: of the tokens.
          old: log-probabilities of the policy, if the KL to the reference is subtracted from the rewards of tokens.
        """
        mask = batch.sampled & live[..., None]
        metrics = dict[str, float]()
        if old is not None:
            assert ref is not None
            given = (jnp.asarray(values) for values in (old, ref, mask))
            kl = np.where(mask, np.asarray(kl_estimate(str(self.algo.kl_loss_mode), *given)), 0.0)
            rewards = rewards - self.algo.beta * kl
            metrics = {"kl": float(kl.sum() / max(mask.sum(), 1))}
        values = self._logprobs(critic.graphdef, critic.params, batch.routed_freely, live)
        settings = critic.settings
        found = estimate(rewards, values, mask, settings.gamma, settings.gae_lambda)
        return found, metrics | found.metrics(mask)

    def _logprobs(
        self, graphdef: Any, params: Any, batch: GroupBatch, rows: Bool[np.ndarray, "P G"] | None = None
    ) -> Float[np.ndarray, "P G T"]:
        """Computes the log-probabilities of the tokens of the completions that the mask `rows` selects (None: of all
        completions). The other entries of the result are 0."""
        rows = np.ones(batch.scored.shape, bool) if rows is None else rows
        return self._values(self.trainer.programs.logprobs, graphdef, params, batch, rows)

    def _values(
        self, program: Any, graphdef: Any, params: Any, batch: GroupBatch, rows: Bool[np.ndarray, "P G"]
    ) -> Float[np.ndarray, "P G T"]:
        """Runs a program that gives one number per token on the completions `rows`; the other entries are 0."""
        packed = place_packed(self._pack(batch, rows, len(rows)), self.trainer.mesh)
        placed = place_replicated(batch.routed_freely, self.trainer.mesh)
        return np.asarray(fetch(program(graphdef, params, placed, packed), self.trainer.mesh))

    def _pack(self, batch: GroupBatch, rows: Bool[np.ndarray, "P G"], most_prompts: int) -> Packed:
        """Divides the completions that the mask `rows` selects into forward and backward passes (see `pack_update`)."""
        return pack_update(self.trainer.planner, batch, rows, most_prompts)

    def _live_rows(
        self,
        step: int,
        batch: GroupBatch,
        scheduled: Scheduled | None,
        credited: Bool[np.ndarray, "P G"] | None,
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


def _inputs(shared: _Shared, prompts: Bool[np.ndarray, "P"], packed: Packed) -> StepInputs:
    return step_inputs(
        shared.batch,
        prompts,
        packed,
        shared.old_logprobs,
        shared.ref_logprobs,
        shared.token_advantages,
        shared.teacher,
        shared.scheduled,
    )


def _update_critic(
    critic: Critic, placed: GroupBatch, in_update: Bool[np.ndarray, "P"], packed: Packed, estimates: Estimates
) -> dict[str, Any]:
    """Replaces the train state of a critic by that after one update. Returns its metrics, on the device."""
    batch = placed._replace(rollout_logprobs=None)
    packed = packed._replace(experts=None, prompt_experts=None)  # those of the policy
    # In the step, values have the place of log-probabilities, and returns that of advantages (`ppo.ValueObjective`).
    inputs = step_inputs(batch, in_update, packed, old_logprobs=estimates.values, token_advantages=estimates.returns)
    critic.state, row, _ = critic.programs.train_step(critic.state, inputs, critic.frozen)
    return row


def _critic_metrics(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    names = {"loss": "loss", "grad_norm": "grad_norm", "clipfrac": "clipfrac", "update/skipped": "skipped"}
    return {
        f"critic/{name}": _aggregate(key, [row[key] for row in rows]) for key, name in names.items() if key in rows[0]
    }


def _widths(batch: GroupBatch) -> tuple[int, int]:
    """Returns the lengths of the padded prompts and of the padded completions."""
    return batch.prompt_tokens.shape[1], batch.completion_tokens.shape[2]


def pack_update(
    planner: Planner,
    batch: GroupBatch,
    rows: Bool[np.ndarray, "P G"],
    most_prompts: int,
    whole_groups: bool = False,
) -> Packed:
    """Packs completions of a rollout batch into chunks. The model processes one chunk per forward and backward pass.
    `train_micro_batch_size` is the size of the chunks; with `auto`, the size depends on the available memory.

    Args:
      rows: mask of the completions to pack.
      most_prompts: maximum number of prompts of an update.
      whole_groups: whether all completions of a prompt are in one chunk.
    """
    widths = _widths(batch)
    size = rows.shape[1]
    work = planner.update_work((most_prompts, size), widths, whole_groups)
    chunk = planner.chunk_size(work)
    layout = choose_layout(size, most_prompts, widths, chunk, prompt_parts(planner.mesh), whole_groups)
    packed = pack(batch.completion_lengths, rows, widths[1], layout, most_prompts)
    if batch.experts is None or planner.model.config.experts is None:
        return packed
    return with_experts(packed, batch, planner.model.config.experts.number)


def _aggregate(name: str, values: Sequence[Any]) -> float:
    """Combines the values of the metric `name` from several updates. Returns the maximum for a metric in `MAXIMA`, else
    the mean. Non-finite values are ignored. If no value is finite, returns NaN."""
    finite = [float(value) for value in values if np.isfinite(value)]
    if not finite:
        return float("nan")
    return max(finite) if name in MAXIMA else float(np.mean(finite))
