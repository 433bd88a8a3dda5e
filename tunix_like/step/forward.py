"""Computes log-probabilities of packed completions; `packing.py` explains sets, chunks, lanes and bins."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Integer

from tunix_like.models.decoder import Bins, Decoder, Kept
from tunix_like.models.divergence import Outputs, token_divergence
from tunix_like.models.log_probabilities import token_logprobs, token_score_norms
from tunix_like.models.sharding import place_prompts, place_replicated, prompt_shapes, replicated_shapes
from tunix_like.step.packing import Packed
from tunix_like.step.working_weights import working_weights
from tunix_like.types import GroupBatch

if TYPE_CHECKING:
    from tunix_like.types import AnyArray


SETS = "sets"
CHUNKS = "chunks"
"""Names of two loops in a compiled program: over sets of prompts, and over chunks of completions. The text of the
program does not contain the number of iterations of these loops. `compile/costs.py` finds the loops by their
names."""


class ForwardOptions(NamedTuple):
    """Options of the log-probability computation.

    Attributes:
      temperature: sampling temperature.
      logits_chunk: number of tokens whose logits are computed at once.
      remat: whether layers are recomputed in the backward pass.
      entropy_gradient: whether the entropy has a gradient.
      stacked: whether the weights of layers of the same kind are stacked into one array.
    """

    temperature: float
    logits_chunk: int
    remat: bool
    entropy_gradient: bool = False
    stacked: bool = False

    def for_trained(self, adapters: bool, mesh: Mesh | None) -> ForwardOptions:
        """Returns the options for a run that trains adapters, or all weights. The layers beside adapters on a single
        device are not stacked, because the stacked weights would be a second copy of the frozen base."""
        return self._replace(stacked=False) if adapters and (mesh is None or mesh.size == 1) else self


class PromptStates(NamedTuple):
    """Outputs of the model for `p` prompts, which all completions of these prompts use.

    Attributes:
      hidden: the hidden state from which the first token of a completion is predicted.
      cache: what `prefill` returned of each layer, or of each stack of layers if layers are stacked.
    """

    hidden: Float[Array, "p D"]
    cache: list[Kept]


class Chunk(NamedTuple):
    """The completions that the model processes at once: `A` lanes of `b` bins of at most `r` completions.

    Attributes:
      lane: index of each lane's prompt in the set of prompts; None if lane `i` belongs to prompt `i` of the set.
      group: index in the batch of each lane's prompt.
      sample: index of each completion among the completions of its prompt.
      start: first position of each completion in its bin.
      length: number of tokens of each completion; 0 for unused entries.
      experts: experts of each place of a bin; None: those of the router.
    """

    lane: Int[AnyArray, "A"] | None
    group: Int[AnyArray, "A"]
    sample: Int[AnyArray, "A b r"]
    start: Int[AnyArray, "A b r"]
    length: Int[AnyArray, "A b r"]
    experts: Integer[AnyArray, "A b T l k"] | None = None

    @property
    def mask(self) -> Bool[Array, "A b r"]:
        return self.length > 0

    def rows_of(self, values: Float[AnyArray, "P G ..."]) -> Array:
        """Gathers the values of the chunk's completions from `values`, an array over all completions of the batch. The
        first axes of the result, `[A b r]`, are lanes, bins of a lane and completions of a bin."""
        return jnp.asarray(values)[self.group[:, None, None], self.sample]


def place_packed(packed: Packed, mesh: Mesh | None) -> Packed:
    """Places the indices of packed completions on the mesh, with the axes of prompts and of lanes sharded over the mesh
    axes `data` and `fsdp`."""
    return _on_mesh(packed, mesh, place_prompts, place_replicated)


def packed_shapes(packed: Packed, mesh: Mesh | None) -> Packed:
    """Returns the shapes and shardings of packed completions on the mesh, as `jax.ShapeDtypeStruct`s."""
    return _on_mesh(packed, mesh, prompt_shapes, replicated_shapes)


def _on_mesh(packed: Packed, mesh: Mesh | None, split: Callable[..., Any], replicated: Callable[..., Any]) -> Packed:
    if mesh is None:
        return packed
    numbers = replicated({"sets": packed.sets, "chunks": packed.chunks}, mesh)
    lanes = {name: split(getattr(packed, name), mesh, axis=2) for name in ("sample", "start", "length", "experts")}
    prompts = {name: split(getattr(packed, name), mesh, axis=1) for name in ("prompts", "prompt_experts")}
    return packed._replace(**prompts, **numbers, **lanes)


def prompt_states(
    graphdef: Any,
    params: Any,
    batch: GroupBatch,
    prompts: Int[Array, "p"],
    options: ForwardOptions,
    experts: Integer[Array, "p S l k"] | None = None,
) -> PromptStates:
    """Runs the model on the prompts of the batch with the indices `prompts`, with the given experts or those of its
    router. Returns their last hidden states, keys and values."""
    tokens = jnp.asarray(batch.prompt_tokens)[prompts]
    lengths = jnp.asarray(batch.prompt_lengths)[prompts]
    return PromptStates(*nnx.merge(graphdef, params).prefill(tokens, lengths, options.remat, experts)[:2])


def chunk_of(packed: Packed, number: Any, chunk: Any) -> Chunk:
    """Returns chunk `chunk` of the set of prompts `number`."""
    packed = jax.tree.map(jnp.asarray, packed)
    lane = None if packed.lane is None else packed.lane[number, chunk]
    group = packed.prompts[number] if lane is None else packed.prompts[number][lane]
    arrays = packed.sample, packed.start, packed.length, packed.experts
    return Chunk(lane, group, *(None if array is None else array[number, chunk] for array in arrays))


def set_experts(packed: Packed, number: Any) -> Integer[Array, "p S l k"] | None:
    """Returns the recorded experts of the prompts of set `number`."""
    return None if packed.prompt_experts is None else jnp.asarray(packed.prompt_experts)[number]


class ChunkTeacher(NamedTuple):
    """A teacher of a chunk: its graph, weights and batch (with its own prompts), its states of the set's prompts, and
    `beta` of the divergence from it (`models/divergence.py`)."""

    graphdef: Any
    params: Any
    batch: GroupBatch
    states: PromptStates
    beta: float


class ChunkOutputs(NamedTuple):
    """Values of the tokens of a chunk, undefined beyond a completion's length: log-probabilities and entropies, and
    with a teacher the divergence from it and its log-probabilities."""

    logprobs: Float[Array, "A b r T"]
    entropy: Float[Array, "A b r T"]
    teacher_divergence: Float[Array, "A b r T"] | None = None
    teacher_logprobs: Float[Array, "A b r T"] | None = None


def chunk_logprobs(
    graphdef: Any,
    params: Any,
    states: PromptStates,
    batch: GroupBatch,
    chunk: Chunk,
    options: ForwardOptions,
    teacher: ChunkTeacher | None = None,
) -> ChunkOutputs:
    """Computes the outputs of the tokens of a chunk. The teacher's log-probabilities have no gradient.

    A model with a scalar head has, instead of the log-probability of a token, the number that its head gives before
    this token, and the entropy 0.
    """
    model, hidden, tokens = _chunk_hidden(graphdef, params, states, batch, chunk, options)
    if model.score is not None:
        scores = model.values(hidden)
        return ChunkOutputs(_of_completions(chunk, tokens, scores), jnp.zeros(chunk.length.shape + tokens.shape[-1:]))
    targets = tokens.reshape(len(tokens), -1)
    outputs = _outputs(model, hidden)
    found: tuple[Array, ...] = token_logprobs(
        outputs.hidden,
        outputs.head,
        targets,
        options.temperature,
        options.logits_chunk,
        options.entropy_gradient,
        outputs.cap,
    )
    if teacher is not None:
        theirs = _outputs(
            *_chunk_hidden(
                teacher.graphdef, teacher.params, teacher.states, teacher.batch, chunk._replace(experts=None), options
            )[:2]
        )
        found = (
            *found,
            *token_divergence(outputs, theirs, targets, teacher.beta, options.temperature, options.logits_chunk),
        )
    return ChunkOutputs(*(_of_completions(chunk, tokens, values) for values in found))


def _of_completions(chunk: Chunk, tokens: Int[Array, "A b T"], values: Float[Array, "A bT"]) -> Float[Array, "A b r T"]:
    """Returns for each completion the values of its tokens, from those of the places of its bin."""
    steps = tokens.shape[-1]
    position = chunk.start[..., None] + jnp.arange(steps)[None, None, None]
    by_bin = values.reshape(tokens.shape)[:, :, None]
    return jnp.take_along_axis(by_bin, jnp.minimum(position, steps - 1), axis=-1)


def chunk_score_norms(
    graphdef: Any, params: Any, states: PromptStates, batch: GroupBatch, chunk: Chunk, options: ForwardOptions
) -> Float[Array, "A b r T"]:
    """Computes `token_score_norms` of the tokens of a chunk, undefined beyond a completion's length."""
    model, hidden, tokens = _chunk_hidden(graphdef, params, states, batch, chunk, options)
    outputs = _outputs(model, hidden)
    targets = tokens.reshape(len(tokens), -1)
    return _of_completions(
        chunk,
        tokens,
        token_score_norms(
            outputs.hidden, outputs.head, targets, options.temperature, options.logits_chunk, outputs.cap
        ),
    )


def _chunk_hidden(
    graphdef: Any, params: Any, states: PromptStates, batch: GroupBatch, chunk: Chunk, options: ForwardOptions
) -> tuple[Decoder, Float[Array, "A bT D"], Int[Array, "A b T"]]:
    """Returns the model, its hidden states at each place of the bins of a chunk, and the tokens at these places."""
    model = nnx.merge(graphdef, params)
    if chunk.lane is not None:
        pick = _picked if model.segments is None else jax.vmap(_picked, (0, None))
        cache = jax.tree.map(lambda x: pick(x, chunk.lane), states.cache)
        states = PromptStates(_picked(states.hidden, chunk.lane), cache)
    first = None if batch.segment_start is None else chunk.rows_of(batch.segment_start)
    bins = Bins(*_bins(chunk, chunk.rows_of(batch.completion_tokens), first))
    lengths = jnp.asarray(batch.prompt_lengths)[chunk.group]
    hidden = model.completion_hidden(states.hidden, states.cache, lengths, bins, options.remat, chunk.experts)
    return model, hidden.reshape(len(hidden), -1, hidden.shape[-1]), bins.tokens


def _outputs(model: Decoder, hidden: Float[Array, "A bT D"]) -> Outputs:
    return Outputs(hidden, model.output_weights(), model.config.logits_cap)


@jax.custom_vjp
def _picked(x: Float[Array, "p ..."], lane: Int[Array, "A"]) -> Float[Array, "A ..."]:
    """Returns `x[lane]`, with a gradient that is summed in float32 and in a fixed order.

    The default gradient is a scatter-add, which adds in the dtype of `x` and, on a GPU, in an undefined order.
    """
    return x[lane]


def _picked_forward(x: Array, lane: Array) -> tuple[Array, tuple[Array, Array]]:
    return x[lane], (lane, jnp.arange(x.shape[0]))


def _picked_backward(saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, None]:
    lane, prompts = saved
    chosen = (lane[None] == prompts[:, None]).astype(cotangent.dtype)
    total = jnp.tensordot(chosen, cotangent, axes=1, preferred_element_type=jnp.float32)
    return total.astype(cotangent.dtype), None


_picked.defvjp(_picked_forward, _picked_backward)


def _bins(chunk: Chunk, rows: Int[Array, "A b r T"], first: Int[Array, "A b r T"] | None) -> tuple[Array, Array, Array]:
    """Returns three arrays `[A b T]`: for each place in a bin, the token, its position and its segment number.

    Token positions count from 0 at the first token after the prompt. The segment number is unique in the bin, and -1 at
    unused places.

    Args:
      rows: the tokens of the chunk's completions.
      first: for each token, the index in the completion at which the token's segment starts. Token positions then count
        from this index. None: each completion is one segment.
    """

    def of_owner(values: Array) -> Array:  # [A b r T] -> [A b T]
        values = jnp.take_along_axis(values, jnp.maximum(offsets, 0)[:, :, None], axis=-1)  # for every completion
        return jnp.take_along_axis(values, owner[:, :, None], axis=2)[:, :, 0]

    slots = jnp.arange(rows.shape[-1])[None, None]
    start = chunk.start[..., None]
    end = (chunk.start + chunk.length)[..., None]
    inside = (slots[None] >= start) & (slots[None] < end)
    owner = jnp.argmax(inside, axis=2)
    real = inside.any(axis=2)
    offsets = slots - jnp.take_along_axis(chunk.start, owner, axis=2)
    tokens = of_owner(rows)
    number = owner
    if first is not None:
        own = of_owner(first)
        number = slots - offsets + own  # a segment's number is its start in the bin
        offsets = offsets - own
    return tuple(jnp.where(real, x, other) for x, other in ((tokens, 0), (offsets, 1), (number, -1)))  # type: ignore[return-value]


def with_prompts(
    batch: GroupBatch, tokens: Int[AnyArray, "P S"], lengths: Int[AnyArray, "P"], vocabulary: int
) -> GroupBatch:
    """Returns the batch with the prompts of a teacher. Token ids outside its vocabulary become its last id."""
    known = batch.completion_tokens.clip(max=vocabulary - 1)
    return batch._replace(prompt_tokens=tokens, prompt_lengths=lengths, completion_tokens=known)


def batch_logprobs(
    graphdef: Any, params: Any, batch: GroupBatch, packed: Packed, options: ForwardOptions
) -> Float[Array, "P G T"]:
    """Computes log-probabilities of all packed completions, without a gradient; 0 at all other entries."""
    return _batch_values(lambda *chunk: chunk_logprobs(*chunk).logprobs, graphdef, params, batch, packed, options)


def batch_score_norms(
    graphdef: Any, params: Any, batch: GroupBatch, packed: Packed, options: ForwardOptions
) -> Float[Array, "P G T"]:
    """Computes `token_score_norms` of all packed completions; 0 at all other entries."""
    return _batch_values(chunk_score_norms, graphdef, params, batch, packed, options)


def _batch_values(
    of_chunk: Callable[..., Array],
    graphdef: Any,
    params: Any,
    batch: GroupBatch,
    packed: Packed,
    options: ForwardOptions,
) -> Float[Array, "P G T"]:
    graphdef, params, _, _ = working_weights(graphdef, params, {}, options.stacked)
    shape = batch.completion_tokens.shape

    def one_set(number: Array, out: Array) -> Array:
        prompts = jnp.asarray(packed.prompts)[number]
        experts = set_experts(packed, number)
        states = prompt_states(graphdef, params, batch, prompts, options, experts)

        def one_chunk(index: Array, out: Array) -> Array:
            chunk = chunk_of(packed, number, index)
            values = of_chunk(graphdef, params, states, batch, chunk, options)
            values = jnp.where(jnp.arange(shape[-1])[None, None, None] < chunk.length[..., None], values, 0.0)
            group = jnp.where(chunk.mask, chunk.group[:, None, None], shape[0])  # an index out of range is dropped
            return out.at[group, chunk.sample].set(values, mode="drop")

        with jax.named_scope(CHUNKS):
            return jax.lax.fori_loop(0, jnp.asarray(packed.chunks)[number], one_chunk, out)

    with jax.named_scope(SETS):
        return jax.lax.fori_loop(0, packed.sets, one_set, jnp.zeros(shape, jnp.float32))
