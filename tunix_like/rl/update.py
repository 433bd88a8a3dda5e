"""The compiled step: advantages of the whole batch and the loss of one optimizer update, in one jit.

Rewards come in, new parameters go out; nothing between them is seen by the host. Micro-batches are scanned and their
gradients added, which is exact because every token's weight is known before the first of them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tunix_like.errors import UserError
from tunix_like.rl.losses import Rows, TokenInputs, Tokens, token_logprobs
from tunix_like.rl.packing import MicroBatches
from tunix_like.types import GroupBatch

if TYPE_CHECKING:
    from tunix_like.types import AnyArray

logger = logging.getLogger("tunix_like")

MOST_SKIPPED = 5
"""Steps in a row without an update after which a run stops."""


@runtime_checkable
class StepObjective(Protocol):
    """What a step follows the gradient of; `rl.objective.Objective` is the one of reinforcement learning."""

    def advantages(
        self,
        rewards: Float[Array, "P G"],
        scored: Bool[Array, "P G"],
        lengths: Int[Array, "P G"],
        ids: Int[Array, "P"],
    ) -> Float[Array, "P G"]:
        """One advantage per completion, from the whole rollout batch; `ids` says which estimator a group has."""

    def weights(
        self,
        scored: Bool[Array, "P G"],
        trained: Bool[Array, "P G"],
        lengths: Int[Array, "P G"],
        in_update: Bool[Array, "P"],
        ids: Int[Array, "P"],
    ) -> Float[Array, "P G"]:
        """The weight of each token of each completion in this update."""

    def token_loss(self, tokens: TokenInputs, advantages: Rows) -> tuple[Tokens, dict[str, Tokens]]:
        """Loss per token (0 where masked) and per-token metrics."""


class UpdateInput(NamedTuple):
    """One optimizer update. Advantages are taken over the whole rollout batch, weights over `in_update` only."""

    rewards: Float[AnyArray, "P G"]
    scored: Bool[AnyArray, "P G"]
    trained: Bool[AnyArray, "P G"]
    lengths: Int[AnyArray, "P G"]
    estimator_ids: Int[AnyArray, "P"]
    in_update: Bool[AnyArray, "P"]
    micro: MicroBatches


def update_input(batch: GroupBatch, in_update: Bool[np.ndarray, "P"], micro: MicroBatches) -> UpdateInput:
    """The update of the groups `in_update` of a rollout batch, packed in `micro`."""
    everyone, own = np.ones(batch.scored.shape, bool), np.zeros(len(batch.scored), np.int32)
    return UpdateInput(
        batch.rewards,
        batch.scored,
        everyone if batch.trained is None else batch.trained,
        batch.completion_lengths,
        own if batch.estimator_ids is None else batch.estimator_ids,
        in_update,
        micro,
    )


class SkipWatch:
    """Called with the metrics of each step's updates: warns of skipped ones, and stops when whole steps are skipped.

    Raises:
      UserError: no update of `MOST_SKIPPED` steps in a row was made.
    """

    def __init__(self, what: str):
        self.what, self.steps = what, 0

    def __call__(self, updates: Sequence[dict[str, Any]]) -> None:
        skipped = sum(int(row["update/skipped"]) for row in updates)
        self.steps = self.steps + 1 if skipped == len(updates) else 0
        if skipped:
            message = "%d of %d updates of this step skipped: %s or its gradient is not finite"
            logger.warning(message, skipped, len(updates), self.what)
        if self.steps == MOST_SKIPPED:
            raise UserError(
                f"{self.what} or its gradient was not finite in {MOST_SKIPPED} steps in a row; the weights are as they "
                "were before them. Lower the learning rate, or look at the loss."
            )


class ForwardOptions(NamedTuple):
    """How log-probabilities are computed: sampling temperature, tokens per logits chunk, recomputation of layers, and
    whether the entropy has a gradient."""

    temperature: float
    chunk: int
    remat: bool
    entropy_gradient: bool = False


def micro_logprobs(
    graphdef: Any, params: Any, micro: MicroBatches, options: ForwardOptions
) -> tuple[Float[Array, "p g T"], Float[Array, "p g T"]]:
    """Log-probabilities and entropies of one micro-batch's completion tokens, the prompt computed once per group."""
    model = nnx.merge(graphdef, params)
    hidden = model.group_hidden(micro.prompt_tokens, micro.prompt_lengths, micro.tokens, remat=options.remat)
    flat = hidden.reshape(-1, hidden.shape[-1])
    logprobs, entropy = token_logprobs(
        flat, model.head(), jnp.reshape(micro.tokens, -1), options.temperature, options.chunk, options.entropy_gradient
    )
    return logprobs.reshape(micro.tokens.shape), entropy.reshape(micro.tokens.shape)


def batch_logprobs(graphdef: Any, params: Any, micro: MicroBatches, options: ForwardOptions) -> Float[Array, "M p g T"]:
    """Log-probabilities of all micro-batches, without gradient."""
    return jax.lax.map(lambda one: micro_logprobs(graphdef, params, one, options)[0], micro)


def micro_loss(
    params: Any,
    graphdef: Any,
    objective: StepObjective,
    options: ForwardOptions,
    micro: MicroBatches,
    advantages: Float[Array, "P G"],
    weights: Float[Array, "P G"],
) -> tuple[Float[Array, ""], dict[str, Any]]:
    """This micro-batch's share of the update's loss, and sums for the metrics."""
    logprobs, entropy = micro_logprobs(graphdef, params, micro, options)
    mask = jnp.arange(micro.tokens.shape[-1])[None, None] < micro.lengths[..., None]
    row_advantages = advantages[micro.group[:, None], micro.sample][..., None]
    row_weights = jnp.where(micro.lengths > 0, weights[micro.group[:, None], micro.sample], 0.0)[..., None]
    old = jax.lax.stop_gradient(logprobs) if micro.old_logprobs is None else micro.old_logprobs
    tokens = TokenInputs(logprobs, old, micro.rollout_logprobs, micro.ref_logprobs, entropy, mask)
    token_loss, token_metrics = objective.token_loss(tokens, row_advantages)
    largest: dict[str, Array] = {}
    if micro.rollout_logprobs is not None:  # how far the sampler's arithmetic is from the trainer's
        gap = jnp.abs(jax.lax.stop_gradient(old) - micro.rollout_logprobs)
        token_metrics |= {"logprob_gap/mean": gap}
        largest["logprob_gap/max"] = jnp.where(mask, gap, 0.0).max()
    if "is_ratio/mean" in token_metrics:
        largest["is_ratio/max"] = jnp.where(mask, token_metrics["is_ratio/mean"], 0.0).max()
    sums = {name: jnp.where(mask, value, 0.0).sum() for name, value in token_metrics.items()}
    sums |= {"entropy": jnp.where(mask, entropy, 0.0).sum(), "tokens": mask.sum().astype(jnp.float32)}
    return (row_weights * token_loss).sum(), {"sums": jax.lax.stop_gradient(sums), "largest": largest}


def update_step(
    graphdef: Any,
    objective: StepObjective,
    optimizer: optax.GradientTransformation,
    options: ForwardOptions,
    params: Any,
    opt_state: Any,
    data: UpdateInput,
) -> tuple[Any, Any, dict[str, Array], Float[Array, "P G"]]:
    """One optimizer update: rewards -> advantages -> weights -> loss and gradient -> new parameters.

    Returns the new parameters and optimizer state, scalar metrics and the advantages. Where an advantage, the loss or
    the gradient is not finite, parameters and optimizer state stay as they were (`update/skipped` is 1).
    """
    advantages = objective.advantages(data.rewards, data.scored, data.lengths, data.estimator_ids)
    weights = objective.weights(data.scored, data.trained, data.lengths, data.in_update, data.estimator_ids)
    usable = jnp.isfinite(advantages).all()

    def share(micro: MicroBatches) -> Any:
        loss = functools.partial(micro_loss, graphdef=graphdef, objective=objective, options=options, micro=micro)
        return jax.value_and_grad(loss, has_aux=True)(params, advantages=advantages, weights=weights)

    def add(total: Any, micro: MicroBatches) -> tuple[Any, Any]:
        nothing = lambda micro: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(share, micro))  # noqa: E731
        live = (micro.lengths > 0).any() & usable  # padding costs nothing
        (loss, extra), grads = jax.lax.cond(live, share, nothing, micro)
        return jax.tree.map(jnp.add, total, grads), (loss, extra)

    grads, (losses, extra) = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), data.micro)
    updates, new_state = optimizer.update(grads, opt_state, params)
    norm = optax.tree.norm(grads)
    usable &= jnp.isfinite(losses).all() & jnp.isfinite(norm)
    params, opt_state = jax.tree.map(
        functools.partial(jnp.where, usable), (optax.apply_updates(params, updates), new_state), (params, opt_state)
    )
    sums = {name: parts.sum() for name, parts in extra["sums"].items()}
    tokens = sums.pop("tokens")
    metrics = {name: total / tokens for name, total in sums.items()}  # of no tokens: NaN, which is written as null
    metrics |= {name: jnp.where(tokens > 0, parts.max(), jnp.nan) for name, parts in extra["largest"].items()}
    metrics |= {"loss": losses.sum(), "grad_norm": norm, "update/skipped": 1.0 - usable}
    return params, opt_state, metrics, advantages
