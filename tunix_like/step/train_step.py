"""Defines the compiled training step, one jitted program.

The program computes the advantages of the whole rollout batch and runs one optimizer update. For each set of prompts
(see `packing.py`), the gradients of its chunks with respect to the weights and to the states of the prompts (keys,
values and last hidden states) are added up. Then the backward pass of the prompts runs. The gradient is exact, because
the loss weight of every token is computed before the first chunk. Peak memory is that of one set and one chunk.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tunix_like.algorithms.losses import Rows, TokenInputs, Tokens
from tunix_like.algorithms.off_policy import finish_metrics
from tunix_like.models.layer_stack import Segment, with_single_layers, with_stacked_layers
from tunix_like.models.lora import join_params
from tunix_like.step.forward import (
    CHUNKS,
    SETS,
    Chunk,
    ChunkOutputs,
    ChunkTeacher,
    ForwardOptions,
    PromptStates,
    batch_logprobs,
    batch_score_norms,
    chunk_logprobs,
    chunk_of,
    prompt_states,
    set_experts,
    with_prompts,
)
from tunix_like.step.packing import Packed
from tunix_like.step.working_weights import constrain_working, gradients_of, working_weights
from tunix_like.types import ById, GroupBatch

if TYPE_CHECKING:
    from tunix_like.types import AnyArray


@runtime_checkable
class StepObjective(Protocol):
    """What a compiled step needs from its objective. `algorithms.objective.Objective` implements it for RL."""

    @property
    def built_in(self) -> bool:
        """Whether all functions of the objective are part of this library."""

    def key(self) -> Hashable:
        """Objectives with equal keys give the same program."""

    def advantages(
        self,
        rewards: Float[Array, "P G"],
        scored: Bool[Array, "P G"],
        lengths: Int[Array, "P G"],
        ids: Int[Array, "P"],
    ) -> Float[Array, "P G"]:
        """Computes advantages over the whole rollout batch.

        `ids` has the index of each group's estimator. `lengths` has the number of sampled tokens of each completion.
        """

    def weights(
        self,
        scored: Bool[Array, "P G"],
        trained: Bool[Array, "P G"],
        lengths: Int[Array, "P G"],
        in_update: Bool[Array, "P"],
        ids: Int[Array, "P"],
    ) -> Float[Array, "P G"]:
        """Computes one loss weight per completion. All tokens of the completion have this weight in the update."""

    def token_loss(self, tokens: TokenInputs, advantages: Rows) -> tuple[Tokens, dict[str, Tokens]]:
        """Computes the loss per token, which is 0 for masked tokens, and metrics per token."""


def bound(objective: Any, scheduled: Any) -> Any:
    """Returns a `StepObjective` with the arrays of its schedules (`Objective.bound`); None: there are none."""
    return objective if scheduled is None else objective.bound(scheduled)


MAXIMA = ("is_ratio/max", "logprob_gap/max")
"""Metrics of an update that are maxima over its tokens; the other metrics are means or counts."""


class TrainState(NamedTuple):
    """The arrays that a training step replaces.

    Attributes:
      params: the trained weights: all weights of the model, or its adapters.
      opt_state: the optimizer state of `params`.
    """

    params: Any
    opt_state: Any


class TeacherInputs(NamedTuple):
    """The weights of the teacher and its prompts, in the order of the batch. `params` is None if the teacher has the
    current weights of the policy."""

    params: Any
    prompt_tokens: Int[AnyArray, "P S"]
    prompt_lengths: Int[AnyArray, "P"]


class StepInputs(NamedTuple):
    """The inputs of one optimizer update, on the devices.

    Advantages are computed over the whole rollout batch, and loss weights over the groups that `in_update` marks. The
    model processes only the completions in `packed`.

    Attributes:
      token_advantages: added to the advantages of the estimator, for signals per token such as that of a teacher; 0 at
        tokens that the policy did not sample.
      teacher: the teacher whose divergence is a term of the loss (`StepSpec.teacher`).
      scheduled: the arrays of the step for an objective whose parameters follow schedules.
    """

    batch: GroupBatch
    in_update: Bool[AnyArray, "P"]
    packed: Packed
    old_logprobs: Float[AnyArray, "P G T"] | None = None
    ref_logprobs: Float[AnyArray, "P G T"] | None = None
    token_advantages: Float[AnyArray, "P G T"] | None = None
    teacher: TeacherInputs | None = None
    scheduled: Any = None


class TeacherSpec(NamedTuple):
    """The graph of a teacher, and `beta` of the divergence from it (`models/divergence.py`)."""

    graphdef: Any
    beta: float


class StepSpec(NamedTuple):
    """The static arguments of a compiled training step.

    Attributes:
      graphdef: the model's graph (`nnx.split(model)[0]`).
      objective: advantages, token weights and token loss.
      optimizer: an optax transformation.
      options: options of the log-probability computation.
      shardings: shardings of the train state on a mesh; None on a single device.
      segments: describes which layers' moments are stacked in the optimizer state; None: each layer has its own
        moments. With stacked moments, the optimizer has fewer operations, which shortens compilation.
      teacher: the teacher whose divergence is a term of the loss; None if the loss has no such term.
    """

    graphdef: Any
    objective: StepObjective
    optimizer: optax.GradientTransformation
    options: ForwardOptions
    shardings: TrainState | None = None
    segments: tuple[Segment, ...] | None = None
    teacher: TeacherSpec | None = None


def step_inputs(
    batch: GroupBatch,
    in_update: Bool[np.ndarray, "P"],
    packed: Packed,
    old_logprobs: Float[AnyArray, "P G T"] | None = None,
    ref_logprobs: Float[AnyArray, "P G T"] | None = None,
    token_advantages: Float[AnyArray, "P G T"] | None = None,
    teacher: TeacherInputs | None = None,
    scheduled: Any = None,
) -> StepInputs:
    """Builds the inputs of one update, with arrays for `batch.trained` and `batch.estimator_ids` if they are None."""
    all_trained = np.ones(batch.scored.shape, bool)
    batch = batch._replace(
        trained=all_trained if batch.trained is None else batch.trained,
        estimator_ids=batch.group_estimators if batch.estimator_ids is None else batch.estimator_ids,
    )
    return StepInputs(batch, in_update, packed, old_logprobs, ref_logprobs, token_advantages, teacher, scheduled)


def chunk_loss(
    spec: StepSpec,
    params: Any,
    states: PromptStates,
    chunk: Chunk,
    inputs: StepInputs,
    advantages: Float[Array, "P G #T"],
    weights: Float[Array, "P G"],
    teacher: ChunkTeacher | None = None,
) -> tuple[Float[Array, ""], dict[str, dict[str, Float[Array, ""]]]]:
    """Computes the contribution of a chunk to the loss, and sums and maxima over its tokens for the metrics."""
    outputs = chunk_logprobs(spec.graphdef, params, states, inputs.batch, chunk, spec.options, teacher)
    return _loss_of(spec, outputs, chunk, inputs, advantages, weights)


def _loss_of(
    spec: StepSpec,
    outputs: ChunkOutputs,
    chunk: Chunk,
    inputs: StepInputs,
    advantages: Float[Array, "P G #T"],
    weights: Float[Array, "P G"],
) -> tuple[Float[Array, ""], dict[str, dict[str, Float[Array, ""]]]]:
    """Like `chunk_loss`, from the outputs of the chunk's tokens."""

    def of_chunk(values: Any) -> Any:  # [P G ...] -> [A (b r) ...]
        if values is None:
            return None
        selected = chunk.rows_of(values)
        return selected.reshape(len(selected), -1, *selected.shape[3:])

    logprobs, entropy, *taught = (x.reshape(len(x), -1, x.shape[-1]) for x in outputs if x is not None)
    length = chunk.length.reshape(len(chunk.length), -1, 1)
    mask = of_chunk(inputs.batch.sampled) & (length > 0)
    weight = jnp.where(length > 0, of_chunk(weights)[..., None], 0.0)
    rollout = of_chunk(inputs.batch.rollout_logprobs)
    old = jax.lax.stop_gradient(logprobs) if inputs.old_logprobs is None else of_chunk(inputs.old_logprobs)
    tokens = TokenInputs(logprobs, old, rollout, of_chunk(inputs.ref_logprobs), entropy, mask, *taught)
    token_loss, token_metrics = spec.objective.token_loss(tokens, of_chunk(advantages))
    largest: dict[str, Array] = {}
    if rollout is not None:  # the numerical difference between sampler and trainer
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
    """Computes the gradient of the loss with respect to `params`, and sums and maxima over tokens for the metrics.

    The gradients of layers are stacked in the same way as the optimizer's moments (`spec.segments`).

    Args:
      sets: number of sets of prompts to process.
      frozen: the model's other parameters, which have no gradient; None if there are none.
    """
    packed = jax.tree.map(jnp.asarray, inputs.packed)
    graphdef, working, fixed, segments = working_weights(spec.graphdef, params, frozen or {}, spec.options.stacked)
    spec = spec._replace(graphdef=graphdef)

    def loss(params: Any, states: PromptStates, chunk: Chunk, teacher: ChunkTeacher | None) -> Any:
        return chunk_loss(spec, join_params(params, fixed), states, chunk, inputs, advantages, weights, teacher)

    def states_of(params: Any, number: Any) -> PromptStates:
        whole = join_params(params, fixed)
        prompts = packed.prompts[number]
        experts = set_experts(packed, number)
        return prompt_states(spec.graphdef, whole, inputs.batch, prompts, spec.options, experts)

    teacher_of = _teacher(spec, join_params(working, fixed), inputs)
    add = functools.partial(jax.tree.map, lambda total, part: total + part.astype(total.dtype))

    def one_set(number: Array, carry: Any) -> Any:
        states, pull_back = jax.vjp(lambda params: states_of(params, number), working)
        teacher = teacher_of(packed.prompts[number])

        def one_chunk(place: Array, carry: Any) -> Any:
            grads, cotangents, totals = carry
            both = jax.grad(loss, argnums=(0, 1), has_aux=True)
            (of_weights, of_states), extra = both(working, states, chunk_of(packed, number, place), teacher)
            sums = jax.tree.map(jnp.add, totals["sums"], extra["sums"])
            largest = jax.tree.map(jnp.maximum, totals["largest"], extra["largest"])
            return add(grads, of_weights), add(cotangents, of_states), {"sums": sums, "largest": largest}

        grads, totals = carry
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), states)
        start = (grads, zeros, totals)
        with jax.named_scope(CHUNKS):
            grads, cotangents, totals = jax.lax.fori_loop(0, packed.chunks[number], one_chunk, start)
        (of_prompts,) = pull_back(jax.tree.map(lambda x, like: x.astype(like.dtype), cotangents, states))
        return add(grads, of_prompts), totals

    # The shapes of the metrics do not depend on the model, so the model is not traced for them.
    chunk = jax.eval_shape(chunk_of, packed, 0, 0)
    values = jax.ShapeDtypeStruct((*chunk.length.shape, inputs.batch.completion_tokens.shape[-1]), jnp.float32)
    outputs: Any = ChunkOutputs(*[values] * (2 if spec.teacher is None else 4))  # type: ignore[arg-type]
    _, extra = jax.eval_shape(functools.partial(_loss_of, spec), outputs, chunk, inputs, advantages, weights)
    totals = {
        "sums": jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), extra["sums"]),
        "largest": jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), extra["largest"]),
    }
    # The sum of the gradients is constrained, because the compiler could otherwise replicate it on every device.
    start = constrain_working(jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), working))
    with jax.named_scope(SETS):
        sums, totals = jax.lax.fori_loop(0, sets, one_set, (start, totals))
    assert spec.segments in (None, segments), "moments are stacked only if the weights of the update are"
    return gradients_of(sums, segments if spec.segments is None else None), totals


def _teacher(spec: StepSpec, policy: Any, inputs: StepInputs) -> Callable[[Int[Array, "p"]], ChunkTeacher | None]:
    """Returns a function that runs the teacher on the prompts with given indices; it returns None if the loss has no
    teacher. `policy` are the working weights of the policy. No gradient is taken with respect to the results."""
    if spec.teacher is None:
        return lambda prompts: None
    given = inputs.teacher
    beta = spec.teacher.beta
    assert given is not None
    graphdef = spec.graphdef
    params = policy
    if given.params is not None:
        graphdef, params, _, _ = working_weights(spec.teacher.graphdef, given.params, {}, spec.options.stacked)
    size = nnx.merge(graphdef, params).config.vocab_size
    batch = with_prompts(inputs.batch, given.prompt_tokens, given.prompt_lengths, size)

    def run(prompts: Int[Array, "p"]) -> ChunkTeacher:
        return ChunkTeacher(
            graphdef, params, batch, prompt_states(graphdef, params, batch, prompts, spec.options), beta
        )

    return run


def jit_train_step(spec: StepSpec, traced: Callable[[], None] = lambda: None) -> Any:
    """Compiles `train_step` as a function of `(TrainState, StepInputs, frozen parameters)`. The state is donated.

    Args:
      traced: called each time the function is traced.
    """

    def step(state: TrainState, inputs: StepInputs, frozen: Any) -> Any:
        traced()
        return train_step(spec, state, inputs, frozen)

    # On a mesh the output state keeps the shardings of the input, so that the next step is not compiled again.
    return jax.jit(step, donate_argnums=0, out_shardings=(spec.shardings, None, None))


def train_step(
    spec: StepSpec, state: TrainState, inputs: StepInputs, frozen: Any = None
) -> tuple[TrainState, dict[str, Array], Float[Array, "P G"]]:
    """Runs one optimizer update: rewards -> advantages -> weights -> loss and gradient -> new parameters.

    Args:
      frozen: parameters of the model that are not trained; None if there are none.

    Returns:
      the new state, scalar metrics and the advantages of the estimator. The state is unchanged in two cases: an
      advantage, the loss or the gradient is non-finite (`update/skipped` is 1), or no token contributes to the loss
      (`update/empty` is 1). In the second case, an optimizer step would change the weights by momentum and weight decay
      only. A batch whose advantages are all 0 is not empty: the optimizer gets its gradient, which is 0 if every term
      of the loss contains the advantage.
    """
    batch = jax.tree.map(jnp.asarray, inputs.batch)
    lengths = batch.sampled_lengths
    ids = batch.estimator_ids
    objective = bound(spec.objective, inputs.scheduled)
    advantages = objective.advantages(batch.rewards, batch.scored, lengths, ids)
    weights = loss_weights(objective, batch, inputs.in_update)
    by_token = advantages[..., None]
    if inputs.token_advantages is not None:
        by_token = by_token + jnp.asarray(inputs.token_advantages)
    usable = jnp.isfinite(by_token).all()
    sets = jnp.where(usable, inputs.packed.sets, 0)
    grads, totals = gradient(spec, state.params, inputs, by_token, weights, sets, frozen)
    state = state._replace(params=with_stacked_layers(state.params, spec.segments))
    updates, opt_state = spec.optimizer.update(grads, state.opt_state, state.params)
    norm = optax.tree.norm(grads)
    loss = totals["sums"].pop("loss")
    tokens = totals["sums"].pop("tokens")
    usable &= jnp.isfinite(loss) & jnp.isfinite(norm)
    empty = ~((weights > 0) & (lengths > 0)).any()
    new = TrainState(optax.apply_updates(state.params, updates), opt_state)
    state = jax.tree.map(functools.partial(jnp.where, usable & ~empty), new, state)
    state = state._replace(params=with_single_layers(state.params, spec.segments))
    means = {name: total / tokens for name, total in totals["sums"].items()}  # NaN if no tokens; written as null
    metrics = finish_metrics(means)
    metrics |= {name: jnp.where(tokens > 0, value, jnp.nan) for name, value in totals["largest"].items()}
    metrics |= {"loss": loss, "grad_norm": norm, "update/skipped": 1.0 - usable, "update/empty": 1.0 * empty}
    return state, metrics, advantages


def loss_weights(objective: Any, batch: GroupBatch, in_update: Bool[Array, "P"]) -> Float[Array, "P G"]:
    """Returns the weight of each completion's tokens in the loss of an update."""
    assert batch.trained is not None and batch.estimator_ids is not None
    lengths = batch.sampled_lengths
    ids = batch.estimator_ids
    weights = objective.weights(batch.scored, batch.trained, lengths, in_update, ids)
    return weights if batch.prompt_weights is None else weights * batch.prompt_weights[:, None]


MOST_PROGRAMS = 16
"""Maximum number of entries of a cache of compiled programs. If there are more entries, the least recently used entry
is dropped."""


class StepPrograms:
    """The compiled functions of a training step.

    Attributes:
      train_step: runs one optimizer update (see `jit_train_step`).
      logprobs, score_norms: compiled `batch_logprobs` and `batch_score_norms`, functions of graph, parameters, batch
        and packed completions.
      advantages: compiled `StepObjective.advantages`, with `StepInputs.scheduled` as first argument.
      traces: number of times `train_step` was traced so far, once for each set of array shapes.
    """

    def __init__(self, spec: StepSpec):
        self.traces = 0

        def count() -> None:
            self.traces += 1

        self.train_step = jit_train_step(spec, count)
        self.logprobs = jax.jit(functools.partial(batch_logprobs, options=spec.options), static_argnums=0)
        self.score_norms = jax.jit(functools.partial(batch_score_norms, options=spec.options), static_argnums=0)
        self.advantages = jax.jit(lambda scheduled, *inputs: bound(spec.objective, scheduled).advantages(*inputs))


ProgramCache = OrderedDict[Hashable, StepPrograms]

_SHARED: ProgramCache = OrderedDict()


def step_programs(spec: StepSpec, own: ProgramCache | None) -> StepPrograms:
    """Returns the compiled functions for the settings in `spec`, from the cache if the cache has them.

    Programs that contain functions of the user are not shared between learners: such a function can read a global
    variable whose value changes, and a compiled program keeps the old value.

    Args:
      own: the learner's own cache, used if the objective or optimizer is not part of this library; None means the cache
        that all learners share.
    """
    cache = _SHARED if own is None else own
    leaves, structure = jax.tree.flatten(spec.shardings)
    static = spec.graphdef, spec.objective.key(), ById(spec.optimizer), spec.options, spec.segments, spec.teacher
    key = (*static, tuple(leaves), structure)
    if key not in cache:
        cache[key] = StepPrograms(spec)
    cache.move_to_end(key)
    if len(cache) > MOST_PROGRAMS:
        cache.popitem(last=False)
    return cache[key]
