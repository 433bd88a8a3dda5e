"""Prepares the optimizer updates of a rollout batch, and checks their results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
from tunix_like.training.forward import place_packed
from tunix_like.training.guards import GapWatch, SkipWatch, UpdateInputs, check_updates
from tunix_like.training.optimizer import updates_done
from tunix_like.training.packing import Packed, choose_layout, pack, token_places
from tunix_like.training.reference import Reference
from tunix_like.training.sizes import chunk_size
from tunix_like.training.train_step import MAXIMA, StepInputs, step_inputs
from tunix_like.training.trainer import Trainer
from tunix_like.types import GroupBatch


class Updates:
    """Prepares the optimizer updates of each rollout batch of a call of `train`, and checks their results.

    This class does not change the train state. `Learner.step` runs the compiled step, which replaces the state.

    Args:
      mini_batch_size: prompts per optimizer update.
      reference: the reference model of the KL, or None.
      own_engine: whether another engine than the in-process sampler generates the completions.
    """

    def __init__(
        self,
        trainer: Trainer,
        algo: AlgorithmConfig,
        objective: Objective,
        mini_batch_size: int,
        reference: Reference | None,
        own_engine: bool,
    ):
        self.trainer, self.algo, self.objective = trainer, algo, objective
        self.mini_batch_size, self.reference = mini_batch_size, reference
        self.skip_watch = SkipWatch(f"the loss '{algo.policy_loss_fn}'", trainer.training.max_skipped_updates)
        self.gap_watch = GapWatch(trainer.training.max_logprob_gap, own_engine)

    def apply_reference(
        self, batch: GroupBatch
    ) -> tuple[GroupBatch, Float[np.ndarray, "P G T"] | None, dict[str, float]]:
        """Returns the batch, the reference model's log-probabilities (None if there is no such model), and metrics.

        With `kl_in_reward`, the KL is subtracted from the rewards of the returned batch.
        """
        if self.reference is None:
            return batch, None, {}
        ref = self.logprobs(*self.reference, batch)
        if not self.algo.kl_in_reward:
            return batch, ref, {}
        batch, kl = self.kl_into_reward(batch, ref)
        return batch, ref, {"kl": kl}

    def kl_into_reward(self, batch: GroupBatch, ref: Float[np.ndarray, "P G T"]) -> tuple[GroupBatch, float]:
        """Subtracts `beta` times the KL of each completion to the reference model from the completion's reward.

        The KL of a completion is the sum over its sampled tokens. The trainer computes the log-probabilities of the
        policy for the KL; those of the sampler are not used. Returns the new batch, and the mean KL per token in nats.
        """
        mask = batch.sampled
        policy = self.logprobs(self.trainer.graphdef, self.trainer.params, batch)
        tokens = kl_estimate(str(self.algo.kl_loss_mode), jnp.asarray(policy), jnp.asarray(ref), jnp.asarray(mask))
        kl = np.where(mask, np.asarray(tokens), 0.0)
        rewards = (batch.rewards - self.algo.beta * kl.sum(-1)).astype(np.float32)
        return batch._replace(rewards=rewards), float(kl.sum() / mask.sum())

    def prepare(
        self, step: int, batch: GroupBatch, prompts: Sequence[str], ref: Float[np.ndarray, "P G T"] | None
    ) -> BatchUpdates:
        """Selects the completions of a rollout batch that the model must process. If the batch has several updates,
        also computes the log-probabilities under the weights before the first update. All updates use these values.

        Args:
          prompts: texts of the prompts, for error messages.
          ref: the reference model's log-probabilities, or None.
        """
        trainer, count = self.trainer, len(batch.prompt_lengths)
        live, metrics = self._live_rows(batch)
        starts = [*range(0, count, self.mini_batch_size)] * self.algo.num_iterations
        parts = [(np.arange(count) >= start) & (np.arange(count) < start + self.mini_batch_size) for start in starts]
        old = self.logprobs(trainer.graphdef, trainer.params, batch, live) if len(parts) > 1 else None
        if trainer.schedule is not None:
            metrics["learning_rate"] = float(trainer.schedule(updates_done(trainer.state.opt_state)))
        kept = ref if self.objective.reference_in_loss else None
        inputs = [UpdateInputs(step, number, batch, live, part, old, kept) for number, part in enumerate(parts)]
        return BatchUpdates(self, inputs, prompts, metrics)

    def logprobs(
        self, graphdef: Any, params: Any, batch: GroupBatch, rows: Bool[np.ndarray, "P G"] | None = None
    ) -> Float[np.ndarray, "P G T"]:
        """Computes the log-probabilities of the tokens of the completions that the mask `rows` selects (None: of all
        completions). The other entries of the result are 0."""
        rows = np.ones(batch.scored.shape, bool) if rows is None else rows
        packed = place_packed(self.pack(batch, rows, len(rows)), self.trainer.mesh)
        placed = place_replicated(batch, self.trainer.mesh)
        logprobs = self.trainer.programs.logprobs(graphdef, params, placed, packed)
        return np.asarray(fetch(logprobs, self.trainer.mesh))

    def pack(self, batch: GroupBatch, rows: Bool[np.ndarray, "P G"], most_prompts: int) -> Packed:
        """Divides the completions that the mask `rows` selects into forward and backward passes (see `pack_update`)."""
        trainer, reference = self.trainer, self.reference is not None
        return pack_update(trainer.training, trainer.model, trainer.mesh, batch, rows, most_prompts, reference)

    def _live_rows(self, batch: GroupBatch) -> tuple[Bool[np.ndarray, "P G"], dict[str, float]]:
        """Returns a mask of the completions that the model must process, and metrics about the completions that are
        left out."""
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


class BatchUpdates:
    """The optimizer updates of one rollout batch: yields the inputs of each update and collects the results.

    Args:
      updates: the object that prepared these updates. It also packs completions and watches all updates of a run.
      inputs: the inputs of each update, in host memory.
      prompts: texts of the prompts, for error messages.
      metrics: metrics of the batch that are known before the first update.
    """

    def __init__(
        self, updates: Updates, inputs: Sequence[UpdateInputs], prompts: Sequence[str], metrics: Mapping[str, float]
    ):
        self._updates, self._inputs, self._prompts, self._metrics = updates, inputs, prompts, metrics
        self._batch, self._live = inputs[0].batch, inputs[0].live  # the same for all updates
        self._rows: list[dict[str, Any]] = []
        self._advantages: Any = None
        self._tokens = self._places = 0  # computed tokens, and all token places of the packed chunks

    def inputs(self) -> Iterator[StepInputs]:
        """Yields the inputs of each optimizer update of the rollout batch, on the devices of the trainer."""
        updates, first, mesh = self._updates, self._inputs[0], self._updates.trainer.mesh
        placed, *logprobs = place_replicated((self._batch, first.old_logprobs, first.ref_logprobs), mesh)
        for update in self._inputs:
            packed = updates.pack(self._batch, self._live & update.in_update[:, None], updates.mini_batch_size)
            self._tokens += int(np.sum(packed.length))
            self._places += token_places(packed, self._batch.completion_tokens.shape[2])
            yield step_inputs(placed, update.in_update, place_packed(packed, mesh), *logprobs)

    def record(self, metrics: dict[str, Any], advantages: Any) -> None:
        """Records the results of one update: its metrics, and the advantages.

        Raises:
          UserError: the estimator returned a non-finite advantage. The compiled step has not changed the weights.
        """
        self._rows.append(metrics)
        self._advantages = advantages
        if len(self._rows) == 1:
            self._check_advantages(fetch(advantages, self._updates.trainer.mesh))

    def finish(self) -> tuple[Float[np.ndarray, "P G"], dict[str, float]]:
        """Checks the results of all updates of the rollout batch. Returns its advantages and its metrics.

        Raises:
          UserError: too many consecutive updates were skipped, or the log-probabilities of sampler and trainer differ
            too much.
        """
        updates, trainer, batch = self._updates, self._updates.trainer, self._batch
        rows, advantages = fetch((self._rows, self._advantages), trainer.mesh)
        check_updates(rows, self._inputs, updates.skip_watch, updates.gap_watch, trainer.written_folder)
        computed = np.where(self._live, batch.completion_lengths, 0)
        adapters = trainer.model.adapters is not None
        done = update_operations(trainer.model.config, batch.prompt_lengths, computed, adapters)
        means = {name: _aggregate(name, [row[name] for row in rows]) for name in rows[0]}
        return np.asarray(advantages), {
            **means,
            **self._metrics,
            "perf/update_occupancy": self._tokens / self._places if self._places else float("nan"),
            "perf/update_operations": done * updates.algo.num_iterations,
        }

    def _check_advantages(self, advantages: np.ndarray) -> None:
        if np.isfinite(advantages).all():
            return
        group, sample = (int(i) for i in np.argwhere(~np.isfinite(advantages))[0])
        batch = self._batch
        assert batch.estimator_ids is not None
        name = self._updates.objective.estimators[int(batch.estimator_ids[group])].name
        raise UserError(
            f"advantage estimator '{name}' returned {advantages[group, sample]} for completion {sample} of group "
            f"{group} (prompt {self._prompts[group]!r:.80}) with rewards {batch.rewards[group].tolist()}; it must "
            "return finite numbers. The weights are those before this step."
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
    """Packs completions of a rollout batch into chunks. The model processes one chunk per forward and backward pass.
    `train_micro_batch_size` is the size of the chunks; with `auto`, the size depends on the available memory.

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
    """Combines the values of the metric `name` from several updates. Returns the maximum for a metric in `MAXIMA`, else
    the mean. Non-finite values are ignored. If no value is finite, returns NaN."""
    finite = [float(value) for value in values if np.isfinite(value)]
    if not finite:
        return float("nan")
    return max(finite) if name in MAXIMA else float(np.mean(finite))
