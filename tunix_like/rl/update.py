"""The compiled step: advantages of the whole batch and the loss of one optimizer update, in one jit.

Rewards come in, new parameters go out; nothing between them is seen by the host. Prompts go through the model once, a
set at a time; the completions of a set follow in chunks, whose gradients with respect to the weights and to what they
saw of their prompts are added up before the prompts' own backward pass. That is exact, because every token's weight is
known before the first of them, and the memory is that of one set of prompts and one chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from tunix_like.models.lora import join_params
from tunix_like.rl.forward import Chunk, ForwardOptions, PromptStates, chunk_logprobs, chunk_of, prompt_states
from tunix_like.rl.losses import Rows, TokenInputs, Tokens
from tunix_like.rl.packing import Packed
from tunix_like.types import GroupBatch

if TYPE_CHECKING:
    from tunix_like.types import AnyArray


@runtime_checkable
class StepObjective(Protocol):
    """What a step follows the gradient of; `rl.objective.Objective` is the one of reinforcement learning."""

    def advantages(
        self,
        rewards: Float[Array, "P G"],
        scored: Bool[Array, "P G"],
        lengths: Int[Array, "P G"],
        ids: Int[Array, "P"],
    ) -> Float[Array, "P G *T"]:
        """Returns one advantage per completion `[P, G]`, or what broadcasts to one per token `[P, G, T]`, from the
        whole rollout batch; `ids` says which estimator a group has, `lengths` counts sampled tokens."""

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


MAXIMA = ("is_ratio/max", "logprob_gap/max")
"""Metrics of an update that are maxima over its tokens; all others are means or counts."""


class UpdateInput(NamedTuple):
    """One optimizer update. Advantages are taken over the whole rollout batch, weights over the groups `in_update`; the
    completions in `packed` go through the model."""

    batch: GroupBatch
    in_update: Bool[AnyArray, "P"]
    packed: Packed
    old_logprobs: Float[AnyArray, "P G T"] | None = None
    ref_logprobs: Float[AnyArray, "P G T"] | None = None


def update_input(
    batch: GroupBatch,
    in_update: Bool[np.ndarray, "P"],
    packed: Packed,
    old_logprobs: Float[AnyArray, "P G T"] | None = None,
    ref_logprobs: Float[AnyArray, "P G T"] | None = None,
) -> UpdateInput:
    """The update of the groups `in_update` of a rollout batch. What the batch leaves open is filled in: all completions
    are trained, with the run's own estimator."""
    everyone, own = np.ones(batch.scored.shape, bool), np.zeros(len(batch.scored), np.int32)
    batch = batch._replace(
        trained=everyone if batch.trained is None else batch.trained,
        estimator_ids=own if batch.estimator_ids is None else batch.estimator_ids,
    )
    return UpdateInput(batch, in_update, packed, old_logprobs, ref_logprobs)


def chunk_loss(
    params: Any,
    states: PromptStates,
    chunk: Chunk,
    data: UpdateInput,
    graphdef: Any,
    objective: StepObjective,
    options: ForwardOptions,
    advantages: Float[Array, "P G #T"],
    weights: Float[Array, "P G"],
) -> tuple[Float[Array, ""], dict[str, dict[str, Float[Array, ""]]]]:
    """Computes this chunk's share of the update's loss; sums over its tokens, and maxima, for the metrics."""

    def rows(values: Any) -> Any:  # [P G ...] -> [A (b r) ...]
        if values is None:
            return None
        found = chunk.rows_of(values)
        return found.reshape(len(found), -1, *found.shape[3:])

    found = chunk_logprobs(graphdef, params, states, data.batch, chunk, options)
    logprobs, entropy = (x.reshape(len(x), -1, x.shape[-1]) for x in found)
    length = chunk.length.reshape(len(chunk.length), -1, 1)
    mask = rows(data.batch.sampled) & (length > 0)
    weight = jnp.where(length > 0, rows(weights)[..., None], 0.0)
    rollout = rows(data.batch.rollout_logprobs)
    old = jax.lax.stop_gradient(logprobs) if data.old_logprobs is None else rows(data.old_logprobs)
    tokens = TokenInputs(logprobs, old, rollout, rows(data.ref_logprobs), entropy, mask)
    token_loss, token_metrics = objective.token_loss(tokens, rows(advantages))
    largest: dict[str, Array] = {}
    if rollout is not None:  # how far the sampler's arithmetic is from the trainer's
        gap = jnp.abs(jax.lax.stop_gradient(old) - rollout)
        token_metrics |= {"logprob_gap/mean": gap}
        largest["logprob_gap/max"] = jnp.where(mask, gap, 0.0).max()
    if "is_ratio/mean" in token_metrics:
        largest["is_ratio/max"] = jnp.where(mask, token_metrics["is_ratio/mean"], 0.0).max()
    loss = (weight * token_loss).sum()
    sums = {name: jnp.where(mask, value, 0.0).sum() for name, value in token_metrics.items()}
    sums |= {"entropy": jnp.where(mask, entropy, 0.0).sum(), "tokens": mask.sum().astype(jnp.float32), "loss": loss}
    return loss, jax.lax.stop_gradient({"sums": sums, "largest": largest})


def gradient(
    graphdef: Any,
    objective: StepObjective,
    options: ForwardOptions,
    params: Any,
    data: UpdateInput,
    advantages: Float[Array, "P G #T"],
    weights: Float[Array, "P G"],
    sets: Int[Array, ""],
    shardings: Any = None,
    frozen: Any = None,
) -> tuple[Any, dict[str, dict[str, Array]]]:
    """Computes the gradient of the loss with respect to `params` over the first `sets` sets, laid out as `shardings`
    says; sums and maxima for the metrics. `frozen` are the model's other parameters (None: it has none), which have no
    gradient."""
    packed = jax.tree.map(jnp.asarray, data.packed)

    def loss(params: Any, states: PromptStates, chunk: Chunk) -> Any:
        whole = join_params(params, frozen or {})
        return chunk_loss(whole, states, chunk, data, graphdef, objective, options, advantages, weights)

    def states_of(params: Any, number: Any) -> PromptStates:
        whole = join_params(params, frozen or {})
        return prompt_states(graphdef, whole, data.batch, packed.prompts[number], options)

    def one_set(number: Array, carry: Any) -> Any:
        states, pull_back = jax.vjp(lambda params: states_of(params, number), params)

        def one_chunk(place: Array, carry: Any) -> Any:
            grads, cotangents, totals = carry
            both = jax.grad(loss, argnums=(0, 1), has_aux=True)
            (own, seen), extra = both(params, states, chunk_of(packed, number, place))
            sums = jax.tree.map(jnp.add, totals["sums"], extra["sums"])
            largest = jax.tree.map(jnp.maximum, totals["largest"], extra["largest"])
            add = functools.partial(jax.tree.map, lambda total, part: total + part.astype(total.dtype))
            return add(grads, own), add(cotangents, seen), {"sums": sums, "largest": largest}

        grads, totals = carry
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), states)
        start = (grads, nothing, totals)
        grads, cotangents, totals = jax.lax.fori_loop(0, packed.chunks[number], one_chunk, start)
        (prompts,) = pull_back(jax.tree.map(lambda x, like: x.astype(like.dtype), cotangents, states))
        return jax.tree.map(jnp.add, grads, prompts), totals

    states = jax.eval_shape(states_of, params, 0)
    _, extra = jax.eval_shape(loss, params, states, jax.eval_shape(chunk_of, packed, 0, 0))
    totals = {
        "sums": jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), extra["sums"]),
        "largest": jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), extra["largest"]),
    }
    start = jax.tree.map(jnp.zeros_like, params)
    if shardings is not None:  # else the compiler may keep the sum of a large model whole on every device
        start = jax.lax.with_sharding_constraint(start, shardings)
    return jax.lax.fori_loop(0, sets, one_set, (start, totals))


def jit_update(
    graphdef: Any,
    objective: StepObjective,
    optimizer: optax.GradientTransformation,
    options: ForwardOptions,
    shardings: tuple[Any, Any] | None = None,
    traced: Callable[[], None] = lambda: None,
) -> Any:
    """`update_step` as one program of trained parameters, optimizer state, `UpdateInput` and frozen parameters; it
    takes the first two over.

    Args:
      shardings: of trained parameters and optimizer state on a mesh. They come out as they went in, so that the next
        step meets what it was compiled for.
      traced: called once per trace.
    """
    params_lie, state_lies = shardings or (None, None)

    def update(params: Any, opt_state: Any, data: UpdateInput, frozen: Any) -> Any:
        traced()
        return update_step(graphdef, objective, optimizer, options, params, opt_state, data, params_lie, frozen)

    return jax.jit(update, donate_argnums=(0, 1), out_shardings=(params_lie, state_lies, None, None))


def update_step(
    graphdef: Any,
    objective: StepObjective,
    optimizer: optax.GradientTransformation,
    options: ForwardOptions,
    params: Any,
    opt_state: Any,
    data: UpdateInput,
    shardings: Any = None,
    frozen: Any = None,
) -> tuple[Any, Any, dict[str, Array], Float[Array, "P G *T"]]:
    """One optimizer update: rewards -> advantages -> weights -> loss and gradient -> new parameters.

    `shardings` says where parameters, and so their gradients, lie on a mesh. `frozen` are parameters of the model that
    are not trained (None: there are none).

    Returns the new parameters and optimizer state, scalar metrics and the advantages. Parameters and optimizer state
    stay as they were where an advantage, the loss or the gradient is not finite (`update/skipped` is 1), and where no
    token counts in the loss (`update/empty` is 1): momentum and weight decay would move the weights without any
    observation. A batch of equal rewards is an observation, whose gradient estimate is 0, and goes to the optimizer.
    """
    batch = jax.tree.map(jnp.asarray, data.batch)
    lengths, ids = batch.sampled_lengths, batch.estimator_ids
    advantages = objective.advantages(batch.rewards, batch.scored, lengths, ids)
    weights = objective.weights(batch.scored, batch.trained, lengths, data.in_update, ids)
    usable = jnp.isfinite(advantages).all()
    sets = jnp.where(usable, data.packed.sets, 0)
    by_token = advantages if advantages.ndim == 3 else advantages[..., None]
    grads, totals = gradient(graphdef, objective, options, params, data, by_token, weights, sets, shardings, frozen)
    updates, new_state = optimizer.update(grads, opt_state, params)
    norm, loss, tokens = optax.tree.norm(grads), totals["sums"].pop("loss"), totals["sums"].pop("tokens")
    usable &= jnp.isfinite(loss) & jnp.isfinite(norm)
    empty = ~((weights > 0) & (lengths > 0)).any()
    new = optax.apply_updates(params, updates), new_state
    params, opt_state = jax.tree.map(functools.partial(jnp.where, usable & ~empty), new, (params, opt_state))
    metrics = {name: total / tokens for name, total in totals["sums"].items()}  # of no tokens: NaN, written as null
    metrics |= {name: jnp.where(tokens > 0, value, jnp.nan) for name, value in totals["largest"].items()}
    metrics |= {"loss": loss, "grad_norm": norm, "update/skipped": 1.0 - usable, "update/empty": 1.0 * empty}
    return params, opt_state, metrics, advantages
