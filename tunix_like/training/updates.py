"""Runs the optimizer updates of a rollout batch: packs completions, runs the compiled step and checks the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float

from tunix_like.algorithms.losses import kl_estimate
from tunix_like.algorithms.objective import Objective
from tunix_like.config.schema import AlgorithmConfig, RLTrainingConfig
from tunix_like.errors import UserError
from tunix_like.models.decoder import Decoder
from tunix_like.models.operations import update_operations
from tunix_like.models.sharding import fetch, place_replicated, prompt_parts
from tunix_like.training.engine import CheckedEngine
from tunix_like.training.forward import place_packed
from tunix_like.training.guards import GapWatch, Skipped, SkipWatch, check_updates
from tunix_like.training.optimizer import updates_done
from tunix_like.training.packing import Packed, choose_layout, pack, token_places
from tunix_like.training.sizes import chunk_size
from tunix_like.training.train_step import MAXIMA, step_inputs
from tunix_like.types import GroupBatch

if TYPE_CHECKING:
    from tunix_like.training.learner import Learner


class Updates:
    """Runs the optimizer updates of each rollout batch of a run. Each update replaces the state of the trainer.

    Args:
      mini_batch_size: prompts per optimizer update.
      reference: whether a reference model is held in memory in addition to the policy.
    """

    def __init__(
        self, trainer: Learner, algo: AlgorithmConfig, objective: Objective, mini_batch_size: int, reference: bool
    ):
        self.trainer, self.algo, self.objective = trainer, algo, objective
        self.mini_batch_size, self.reference = mini_batch_size, reference
        self.skip_watch = SkipWatch(f"the loss '{algo.policy_loss_fn}'", trainer.training.max_skipped_updates)
        self.gap_watch = GapWatch(trainer.training.max_logprob_gap, isinstance(trainer.engine, CheckedEngine))

    def __call__(
        self, step: int, batch: GroupBatch, prompts: Sequence[str], ref: Float[np.ndarray, "P G T"] | None
    ) -> tuple[Float[np.ndarray, "P G"], dict[str, float]]:
        """Runs all optimizer updates of one rollout batch. Returns the advantages and the metrics of the updates.

        Args:
          prompts: texts of the prompts, for error messages.
          ref: the reference model's log-probabilities, or None.

        Raises:
          UserError: the estimator returned a non-finite advantage (the weights are unchanged), too many consecutive
            updates were skipped, or sampler and trainer disagree.
        """
        trainer, count, width = self.trainer, len(batch.prompt_lengths), batch.completion_tokens.shape[2]
        live, out = self._live_rows(batch)
        starts = [*range(0, count, self.mini_batch_size)] * self.algo.num_iterations
        parts = [(np.arange(count) >= start) & (np.arange(count) < start + self.mini_batch_size) for start in starts]
        old = self.logprobs(trainer.graphdef, trainer.params, batch, live) if len(parts) > 1 else None
        kept = ref if self.objective.reference_in_loss else None
        placed, *placed_logprobs = place_replicated((batch, old, kept), trainer.mesh)
        if trainer.schedule is not None:
            out["learning_rate"] = float(trainer.schedule(updates_done(trainer.state.opt_state)))
        rows: list[dict[str, Any]] = []
        advantages: Any = None
        real, places = 0, 0
        for in_update in parts:
            packed = self._pack(batch, live & in_update[:, None], self.mini_batch_size)
            inputs = step_inputs(placed, in_update, place_packed(packed, trainer.mesh), *placed_logprobs)
            trainer.state, metrics, advantages = trainer.programs.train_step(trainer.state, inputs, trainer.frozen)
            real, places = real + int(np.sum(packed.length)), places + token_places(packed, width)
            rows.append(metrics)
            if len(rows) == 1:
                self._check_advantages(fetch(advantages, trainer.mesh), prompts, batch)
        rows, advantages = fetch((rows, advantages), trainer.mesh)
        inputs_of = [Skipped(step, i, batch, live, part, old, kept) for i, part in enumerate(parts)]
        check_updates(rows, inputs_of, self.skip_watch, self.gap_watch, trainer.written_folder)
        out["perf/update_occupancy"] = real / places if places else float("nan")
        computed = np.where(live, batch.completion_lengths, 0)
        adapters = trainer.model.adapters is not None
        done = update_operations(trainer.model.config, batch.prompt_lengths, computed, adapters)
        out["perf/update_operations"] = done * self.algo.num_iterations
        return np.asarray(advantages), {name: _aggregate(name, [row[name] for row in rows]) for name in rows[0]} | out

    def logprobs(
        self, graphdef: Any, params: Any, batch: GroupBatch, rows: Bool[np.ndarray, "P G"] | None = None
    ) -> Float[np.ndarray, "P G T"]:
        """Computes the log-probabilities of the completions that `rows` marks (None: all); other entries are 0."""
        rows = np.ones(batch.scored.shape, bool) if rows is None else rows
        packed = place_packed(self._pack(batch, rows, len(rows)), self.trainer.mesh)
        placed = place_replicated(batch, self.trainer.mesh)
        logprobs = self.trainer.programs.logprobs(graphdef, params, placed, packed)
        return np.asarray(fetch(logprobs, self.trainer.mesh))

    def kl_into_reward(self, batch: GroupBatch, ref: Float[np.ndarray, "P G T"]) -> tuple[GroupBatch, float]:
        """Subtracts `beta` times the KL of each completion from its reward.

        The KL of a completion is the sum over its sampled tokens. Returns the new batch, and the mean KL per token in
        nats.

        The log-probabilities of the policy are computed by the trainer and not taken from the sampler.
        """
        mask = batch.sampled
        policy = self.logprobs(self.trainer.graphdef, self.trainer.params, batch)
        tokens = kl_estimate(str(self.algo.kl_loss_mode), jnp.asarray(policy), jnp.asarray(ref), jnp.asarray(mask))
        kl = np.where(mask, np.asarray(tokens), 0.0)
        rewards = (batch.rewards - self.algo.beta * kl.sum(-1)).astype(np.float32)
        return batch._replace(rewards=rewards), float(kl.sum() / mask.sum())

    def _pack(self, batch: GroupBatch, rows: np.ndarray, most_prompts: int) -> Packed:
        trainer = self.trainer
        return pack_update(trainer.training, trainer.model, trainer.mesh, batch, rows, most_prompts, self.reference)

    def _live_rows(self, batch: GroupBatch) -> tuple[Bool[np.ndarray, "P G"], dict[str, float]]:
        """Returns a mask of the completions that the model processes, and metrics about the other completions."""
        objective, ids, advantages = self.objective, batch.estimator_ids, None
        assert ids is not None
        if objective.skips_zero_advantages:
            advantages = self.trainer.programs.advantages(batch.rewards, batch.scored, batch.sampled_lengths, ids)
            advantages = fetch(advantages, self.trainer.mesh)
        live = objective.live_rows(batch.rewards, batch.scored, ids, advantages)
        metrics: dict[str, float] = {}
        if batch.trained is not None:
            live = live & batch.trained
            metrics["overlong/masked_frac"] = float((~batch.trained).mean())
        return live, metrics | {"update/rows_left_out_frac": float(1 - live.mean())}

    def _check_advantages(self, advantages: np.ndarray, prompts: Sequence[str], batch: GroupBatch) -> None:
        if np.isfinite(advantages).all():
            return
        group, sample = (int(i) for i in np.argwhere(~np.isfinite(advantages))[0])
        assert batch.estimator_ids is not None
        name = self.objective.estimators[int(batch.estimator_ids[group])].name
        raise UserError(
            f"advantage estimator '{name}' returned {advantages[group, sample]} for completion {sample} of group "
            f"{group} (prompt {prompts[group]!r:.80}) with rewards {batch.rewards[group].tolist()}; it must return "
            "finite numbers. The weights are those before this step."
        )


def pack_update(
    training: RLTrainingConfig,
    model: Decoder,
    mesh: Mesh | None,
    batch: GroupBatch,
    rows: Bool[np.ndarray, "P G"],
    most_prompts: int,
    reference: bool = False,
) -> Packed:
    """Packs completions of a batch into chunks of the configured size.

    Args:
      rows: mask of the completions to pack.
      most_prompts: maximum number of prompts of an update.
      reference: whether a reference model is held in memory in addition to the policy.
    """
    widths, size = (batch.prompt_tokens.shape[1], batch.completion_tokens.shape[2]), rows.shape[1]
    chunk = chunk_size(training, model, (most_prompts, size), widths, reference, mesh)
    layout = choose_layout(size, most_prompts, widths, chunk, prompt_parts(mesh))
    return pack(batch.completion_lengths, rows, widths[1], layout, most_prompts)


def _aggregate(name: str, values: Sequence[Any]) -> float:
    """Returns the maximum (metrics in `MAXIMA`) or the mean of the finite values; NaN if no value is finite."""
    finite = [float(value) for value in values if np.isfinite(value)]
    if not finite:
        return float("nan")
    return max(finite) if name in MAXIMA else float(np.mean(finite))
