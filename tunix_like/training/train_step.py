"""The compiled training step: the advantages of the whole batch and the loss of one optimizer update, in one jit.

Rewards go in, new parameters come out. Prompts go through the model once, one set at a time. The completions of a set
follow in chunks; their gradients with respect to the weights and to the prompts' states are added up before the
backward pass of the prompts. This is exact, because the weight of every token is known before the first chunk. The
memory is that of one set of prompts and one chunk.
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

from tunix_like.algorithms.losses import Rows, TokenInputs, Tokens
from tunix_like.models.lora import join_params
from tunix_like.training.forward import Chunk, ForwardOptions, PromptStates, chunk_logprobs, chunk_of, prompt_states
from tunix_like.training.packing import Packed
from tunix_like.types import GroupBatch

if TYPE_CHECKING:
    from tunix_like.types import AnyArray


@runtime_checkable
class StepObjective(Protocol):
    """What a step follows the gradient of; `algorithms.objective.Objective` is the one of reinforcement learning."""

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


class TrainState(NamedTuple):
    """The arrays that a training step replaces.

    Attributes:
      params: the weights that are trained: all of the model's, or its adapters.
      opt_state: the optimizer's state for them.
    """

    params: Any
    opt_state: Any


class StepInputs(NamedTuple):
    """The inputs of one optimizer update. Advantages are computed over the whole rollout batch, weights over the groups
    `in_update`; only the completions in `packed` go through the model."""

    batch: GroupBatch
    in_update: Bool[AnyArray, "P"]
    packed: Packed
    old_logprobs: Float[AnyArray, "P G T"] | None = None
    ref_logprobs: Float[AnyArray, "P G T"] | None = None


class StepSpec(NamedTuple):
    """What a training step is compiled for.

    Attributes:
      graphdef: the model's graph (`nnx.split(model)[0]`).
      objective: advantages, token weights and token loss.
      optimizer: an optax transformation.
      options: how log-probabilities are computed.
      shardings: those of the train state on a mesh; None on one device.
    """

    graphdef: Any
    objective: StepObjective
    optimizer: optax.GradientTransformation
    options: ForwardOptions
    shardings: TrainState | None = None


def step_inputs(
    batch: GroupBatch,
    in_update: Bool[np.ndarray, "P"],
    packed: Packed,
    old_logprobs: Float[AnyArray, "P G T"] | None = None,
    ref_logprobs: Float[AnyArray, "P G T"] | None = None,
) -> StepInputs:
    """Returns the update of the groups `in_update` of a rollout batch. Unset fields of the batch get their defaults:
    every completion is trained on, with the run's own estimator."""
    everyone, own = np.ones(batch.scored.shape, bool), np.zeros(len(batch.scored), np.int32)
    batch = batch._replace(
        trained=everyone if batch.trained is None else batch.trained,
        estimator_ids=own if batch.estimator_ids is None else batch.estimator_ids,
    )
    return StepInputs(batch, in_update, packed, old_logprobs, ref_logprobs)


def chunk_loss(
    spec: StepSpec,
    params: Any,
    states: PromptStates,
    chunk: Chunk,
    inputs: StepInputs,
    advantages: Float[Array, "P G #T"],
    weights: Float[Array, "P G"],
) -> tuple[Float[Array, ""], dict[str, dict[str, Float[Array, ""]]]]:
    """Computes this chunk's share of the update's loss; sums over its tokens, and maxima, for the metrics."""

    def rows(values: Any) -> Any:  # [P G ...] -> [A (b r) ...]
        if values is None:
            return None
        found = chunk.rows_of(values)
        return found.reshape(len(found), -1, *found.shape[3:])

    found = chunk_logprobs(spec.graphdef, params, states, inputs.batch, chunk, spec.options)
    logprobs, entropy = (x.reshape(len(x), -1, x.shape[-1]) for x in found)
    length = chunk.length.reshape(len(chunk.length), -1, 1)
    mask = rows(inputs.batch.sampled) & (length > 0)
    weight = jnp.where(length > 0, rows(weights)[..., None], 0.0)
    rollout = rows(inputs.batch.rollout_logprobs)
    old = jax.lax.stop_gradient(logprobs) if inputs.old_logprobs is None else rows(inputs.old_logprobs)
    tokens = TokenInputs(logprobs, old, rollout, rows(inputs.ref_logprobs), entropy, mask)
    token_loss, token_metrics = spec.objective.token_loss(tokens, rows(advantages))
    largest: dict[str, Array] = {}
    if rollout is not None:  # the difference between the sampler's arithmetic and the trainer's
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
    spec: StepSpec,
    params: Any,
    inputs: StepInputs,
    advantages: Float[Array, "P G #T"],
    weights: Float[Array, "P G"],
    sets: Int[Array, ""],
    frozen: Any = None,
) -> tuple[Any, dict[str, dict[str, Array]]]:
    """Computes the gradient of the loss with respect to `params` over the first `sets` sets of prompts; sums and maxima
    for the metrics. `frozen` are the model's other parameters (None: it has none), which have no gradient."""
    packed = jax.tree.map(jnp.asarray, inputs.packed)

    def loss(params: Any, states: PromptStates, chunk: Chunk) -> Any:
        return chunk_loss(spec, join_params(params, frozen or {}), states, chunk, inputs, advantages, weights)

    def states_of(params: Any, number: Any) -> PromptStates:
        whole = join_params(params, frozen or {})
        return prompt_states(spec.graphdef, whole, inputs.batch, packed.prompts[number], spec.options)

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
    if spec.shardings is not None:  # else the compiler may keep the sum of a large model whole on every device
        start = jax.lax.with_sharding_constraint(start, spec.shardings.params)
    return jax.lax.fori_loop(0, sets, one_set, (start, totals))


def jit_train_step(spec: StepSpec, traced: Callable[[], None] = lambda: None) -> Any:
    """Compiles `train_step` as one program of `(TrainState, StepInputs, frozen parameters)`; the state is donated.

    Args:
      traced: called once per trace.
    """

    def step(state: TrainState, inputs: StepInputs, frozen: Any) -> Any:
        traced()
        return train_step(spec, state, inputs, frozen)

    # On a mesh the state comes out as it went in, so that the next step finds the program that was compiled for it.
    return jax.jit(step, donate_argnums=0, out_shardings=(spec.shardings, None, None))


def train_step(
    spec: StepSpec, state: TrainState, inputs: StepInputs, frozen: Any = None
) -> tuple[TrainState, dict[str, Array], Float[Array, "P G *T"]]:
    """Does one optimizer update: rewards -> advantages -> weights -> loss and gradient -> new parameters.

    `frozen` are parameters of the model that are not trained (None: there are none).

    Returns the new state, scalar metrics and the advantages. The state is unchanged where an advantage, the loss or the
    gradient is not finite (`update/skipped` is 1), and where no token counts in the loss (`update/empty` is 1):
    momentum and weight decay would move the weights without any observation. A batch of equal rewards is an
    observation, whose gradient estimate is 0, and goes to the optimizer.
    """
    batch = jax.tree.map(jnp.asarray, inputs.batch)
    lengths, ids = batch.sampled_lengths, batch.estimator_ids
    advantages = spec.objective.advantages(batch.rewards, batch.scored, lengths, ids)
    weights = spec.objective.weights(batch.scored, batch.trained, lengths, inputs.in_update, ids)
    usable = jnp.isfinite(advantages).all()
    sets = jnp.where(usable, inputs.packed.sets, 0)
    by_token = advantages if advantages.ndim == 3 else advantages[..., None]
    grads, totals = gradient(spec, state.params, inputs, by_token, weights, sets, frozen)
    updates, opt_state = spec.optimizer.update(grads, state.opt_state, state.params)
    norm, loss, tokens = optax.tree.norm(grads), totals["sums"].pop("loss"), totals["sums"].pop("tokens")
    usable &= jnp.isfinite(loss) & jnp.isfinite(norm)
    empty = ~((weights > 0) & (lengths > 0)).any()
    new = TrainState(optax.apply_updates(state.params, updates), opt_state)
    state = jax.tree.map(functools.partial(jnp.where, usable & ~empty), new, state)
    metrics = {name: total / tokens for name, total in totals["sums"].items()}  # of no tokens: NaN, written as null
    metrics |= {name: jnp.where(tokens > 0, value, jnp.nan) for name, value in totals["largest"].items()}
    metrics |= {"loss": loss, "grad_norm": norm, "update/skipped": 1.0 - usable, "update/empty": 1.0 * empty}
    return state, metrics, advantages
