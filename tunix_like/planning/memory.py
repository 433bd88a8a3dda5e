"""Estimates the peak memory of each phase of a run, by component, from shapes.

The estimate counts the arrays that the programs of `step/train_step.py` and `rollout/decoding.py` hold at their
peak, for sequences of full length. The constants below were measured from XLA's buffer assignment (`memory_analysis()`
of both compiled programs, CPU backend, jax 0.10.2), by varying one dimension at a time. `tests/training/test_memory.py`
compares the estimates with the buffer assignment. `sizes.py` chooses the batch sizes with these estimates.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from tunix_like.models.attention import SCORES
from tunix_like.models.attention_blocked import BLOCK
from tunix_like.models.config import Adapters, DecoderConfig
from tunix_like.models.counts import Share, layer_count, memory_bytes
from tunix_like.models.delta_rule import CHUNK
from tunix_like.models.layer_stack import longest_period
from tunix_like.rollout.shapes import FIRST_CACHE, prefill_piece
from tunix_like.step.packing import Layout, choose_layout

KEPT_PER_TOKEN = {"inner": 5, "hidden": 6, "query": 5, "key": 3}
"""Number of vectors per token that a layer saves for its backward pass, for each of four widths: the width of the MLP,
of the model, of all query heads, and of all key heads. The numbers were measured by doubling one width at a time: 4.9,
4.6 (and 1 vector whose size does not grow), 4.7 and 3.1. The MLP saves its two products, the sigmoid, the activation
and the input of the last product."""

KEPT_WITH_REMAT = {"inner": 3, "hidden": 5, "query": 5, "key": 2}
"""The numbers of `KEPT_PER_TOKEN` for recomputed layers on the CPU. On the CPU, XLA removes the optimization barriers
around a recomputed layer. Common subexpression elimination then keeps most arrays of the layer (measured: 1224 of 1696
numbers per token, and all scores). On other backends, a layer saves only its input (`_with_stacked_layers`)."""

KEPT_IN_FLOAT32 = {"hidden": 9.5, "normed": 4.7}
"""Number of further values that XLA:GPU keeps per token and layer, in units of the compute dtype, for each number of a
hidden state and, with norms of queries and keys, for each number of these: float32 copies around norms. Fitted to three
updates in bfloat16 with cuDNN attention, compiled for an H200 (jax 0.11.2). Recomputed layers keep only their input."""

KEPT_SCORES = {"plain": 1.05, "one block": 2.1, "blocks": 0.0}
"""Number of float32 arrays `[heads, queries, keys]` that a layer saves. Plain attention saves the exponentials. Their
measured size is 1.21 times the size of the scores for 96 keys, and 1.03 times for 1056 keys. Blocked attention saves no
such arrays, except on the CPU if all keys are in one block: without a loop over blocks, XLA keeps the arrays."""

WORKING_SCORES = 2
"""Number of arrays `[heads, queries, keys]` that exist in the forward or backward pass of attention."""

LANE_COPIES = 4
"""Number of copies of a prompt's keys and values per layer, for each lane (some completions of the prompt, see
`step/packing.py`): the keys and values that the lane reads, their gradient, and both in another layout."""

WORKING_INNER = 3
"""Number of temporary arrays of the MLP's width, and also of the model's width, in the backward pass of one layer
(measured: 3.1 and 2.6)."""

KEPT_RECURRENT = {"chunk": 5.5, "width": 18.0}
"""Number of float32 values that a recurrent layer saves per token and value head, for each token of a chunk, and for
each number of a key and of a value. Fitted to compiled updates on the CPU (4 and 8 heads of width 16 and 64)."""

WORKING_RECURRENT = 4
"""Number of float32 arrays `[tokens, value heads, chunk + key width + value width]` in the backward pass of a recurrent
layer, before the factor `ALLOCATED`. Measured by compiling a layer of Qwen3.5-4B's shapes for v5e: 3.4."""

ROUTED_COPIES = 8
"""Number of temporary arrays in the backward pass of one layer with experts. Each array has the model's width, and one
row per token and chosen expert. Measured by compiling the update of Qwen3-30B-A3B's shapes for v5p-64."""

EXCHANGED_COPIES = 6
"""Number of temporary arrays of the model's width in the backward pass of one layer whose experts are split over `ep`,
each with a row per token of the devices along `ep`: tokens, outputs, and both gradients in float32 (two each)."""

GRADIENT_COPIES = 2
"""Number of arrays of the size of the trained weights while chunks of completions are processed: the sum of the
gradients, and the gradient of one chunk."""

ALLOCATED = {"tpu": 1.95, "gpu": 1.2}
"""Ratio of allocated to counted bytes for the temporaries of an update with stacked and recomputed layers. XLA
allocates more than this module counts. Fitted to compiled programs (jax 0.10.2, libtpu 0.0.42.1): Qwen3-1.7B with 4 and
28 layers and chunks of 8 and 16 completions per device for v5e-8; `examples/gsm8k` for one and eight H200s."""

LANES = 128
"""XLA:TPU pads the last axis of an array to a multiple of this number, e.g. keys and values with heads of size 64."""

STEP_COPIES = {True: 2, False: 3}
"""Number of arrays of the size of the trained weights that the optimizer step needs in addition to the weights and the
optimizer state (gradients and new values), with (True) and without (False) clipping by the global norm."""

MUON_COPIES = 7
"""The same for Muon, which orthogonalises all matrices at once (measured with 1 and 6 layers, clipped or not: 7.0). For
weights that are mostly embeddings, whose optimizer is AdamW, the number is an upper bound."""

DEQUANTIZED_COPIES = {False: 1, True: 2}
"""Number of float32 arrays of the size of the quantised matrices on the CPU, without (False) and with (True) a backward
pass (measured: 0.99 and 1.98). XLA:CPU removes the barriers between layers, and dequantises all matrices first."""

LOGITS_COPIES = 2
"""Number of float32 arrays `[tokens, vocabulary]` in the forward and backward pass of the log-probabilities, for the
tokens whose logits are computed at once."""

DIVERGENCE_COPIES = 8
"""The same with the divergence from a teacher in the loss (measured: 8.1 and 9.0)."""

SAMPLED_LOGITS_COPIES = {False: 2, True: 3}
"""Number of float32 arrays `[rows, vocabulary]` while sampling, without (False) and with (True) top-p or top-k."""

LAID_OUT = {"tpu": 1.9, "gpu": 1.2}
"""Peak memory of the conversion of weights to the sampler's layout, relative to the size of the result. The peak
contains the result, and gathered weights before their final layout. Measured from compiled programs: 2.03 (Qwen3-1.7B,
v5e-8), 1.67 (Qwen3-30B-A3B, v5p-64) and 1.19 (Qwen3-1.7B, eight H200s)."""

DEQUANTIZED = {"tpu": 2.25, "gpu": 1.2}
"""The same if the conversion dequantises: 2.21 (Qwen3-8B in NF4, v5e-64) and 1.01 (one H200)."""


OF_THE_MODEL = (
    "weights",
    "reference",
    "teacher",
    "critic",
    "optimizer",
    "gradients",
    "gradients and new weights",
    "cast weights",
)
"""Components of the memory of a phase that do not depend on lengths or on the number of completions."""


@dataclasses.dataclass(frozen=True)
class Phase:
    """The estimated peak memory of a phase of a run (such as sampling or the update) on one device.

    Attributes:
      parts: number of bytes of each component, such as the weights.
      decode: the same for a decode step, without the arrays that are always in memory (weights, optimizer state and
        reference model); empty if the phase does not sample.
    """

    name: str
    parts: dict[str, int]
    decode: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def fixed(self) -> int:
        """Number of bytes of the components that do not depend on lengths or on the number of completions."""
        return sum(self.parts.get(name, 0) for name in OF_THE_MODEL)

    def __str__(self) -> str:
        parts = sorted(self.parts.items(), key=lambda part: -part[1])
        shown = [f"{name} {amount(size)}" for name, size in parts if size >= 0.01 * self.bytes]
        return f"{amount(self.bytes)} = {' + '.join(shown)}"


def amount(size: float) -> str:
    """Formats a number of bytes with a decimal unit and three significant digits."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size / 1e3:.3g} kB"


@dataclasses.dataclass(frozen=True)
class TeacherWork:
    """The quantities of a teacher that the memory estimate depends on.

    Attributes:
      model: the configuration of the teacher.
      share: the part of its own weights on one device; None if it has the weights of the policy.
      param_dtype, quantized: the dtype of these weights and their quantisation.
      prompt_width: length in tokens of its padded prompts.
      in_loss: whether its divergence is a term of the loss, so that it runs inside the update.
    """

    model: DecoderConfig
    share: Share | None
    param_dtype: Any
    quantized: str | None
    prompt_width: int
    in_loss: bool

    @property
    def weights(self) -> int:
        """Bytes of its own weights on one device."""
        return 0 if self.share is None else self.share.weights


@dataclasses.dataclass(frozen=True)
class CriticWork:
    """The quantities of a critic that the memory estimate depends on. Its dtypes, adapters and quantisation are those
    of the policy.

    Attributes:
      model: the configuration of the critic.
      share: the part of its weights on one device.
      own: bytes of those that are not the frozen weights of the policy.
      moments: bytes of its optimizer state on one device.
    """

    model: DecoderConfig
    share: Share
    own: int
    moments: int


class Companions(NamedTuple):
    """The models that a run holds in memory beside its policy.

    Attributes:
      reference: whether there is a reference of the KL.
      teachers: those in memory.
      critic: None without one.
    """

    reference: bool = False
    teachers: tuple[TeacherWork, ...] = ()
    critic: CriticWork | None = None


ALONE = Companions()
"""A policy without companions."""


@dataclasses.dataclass(frozen=True)
class Work:
    """The quantities that the memory estimate depends on.

    Attributes:
      model: the configuration of the decoder.
      share: the part of the weights on one device.
      moments: bytes of the optimizer state on one device.
      prompts, group: number of prompts of a rollout batch, and of completions per prompt (1 in supervised fine-tuning).
      widths: lengths in tokens of padded prompts and of padded completions.
      update_prompts: prompts of one optimizer update; None means all prompts of the batch.
      dtype, param_dtype: dtype of the matrix products and of the stored weights.
      adapters: the adapters (float32), if only adapters are trained.
      quantized: quantisation of the frozen projections of a model with adapters.
      clipped: whether the gradient's global norm is clipped.
      muon: whether the optimizer is Muon.
      reference: whether a second model, the reference of the KL, is held in memory.
      teachers: the teachers in memory; only one, if its divergence is a term of the loss.
      critic: the critic; None without one.
      remat: whether layers are recomputed in the backward pass.
      logits_chunk: number of tokens whose logits are computed at once.
      attention: value of `Decoder.attention`. Plain attention saves its scores for the backward pass.
      filtered: whether sampling uses top-p or top-k.
      backend: the JAX backend. On the CPU, `remat` saves less memory than on other backends.
      parts: number of parts into which the prompts of an update and their completions are divided over devices.
      devices: number of devices.
      sequence: number of devices that share the tokens of a sequence in an update (`attention_sequence.py`).
      whole_groups: whether all completions of a prompt are in one chunk (`packing.choose_layout`).
      expert_parts: number of parts into which experts are divided over devices (`ep`).
      recorded: bytes per token of the recorded experts (`rollout.routing_replay`).
      copied: bytes of a dequantised copy of the projections while sampling, if sampling uses the weights in `share`.
      rollout_share: the part of the weights on one device while sampling; None: sampling uses the weights in `share`.
      rollout_parts: while sampling, the number of parts into which prompts and completions are divided over devices,
        and the number of devices that share the attention heads of one part; None means `parts` and 1.
    """

    model: DecoderConfig
    share: Share
    moments: int
    prompts: int
    group: int
    widths: tuple[int, int]
    update_prompts: int | None = None
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    adapters: Adapters | None = None
    quantized: str | None = None
    clipped: bool = True
    muon: bool = False
    reference: bool = False
    teachers: tuple[TeacherWork, ...] = ()
    critic: CriticWork | None = None
    remat: bool = False
    logits_chunk: int = 1024
    attention: str = "auto"
    filtered: bool = False
    backend: str = "cpu"
    devices: int = 1
    parts: int = 1
    sequence: int = 1
    whole_groups: bool = False
    expert_parts: int = 1
    recorded: int = 0
    copied: int = 0
    rollout_share: Share | None = None
    rollout_parts: tuple[int, int] | None = None

    @property
    def rows(self) -> int:
        return self.prompts * self.group

    @property
    def weights(self) -> int:
        return self.share.weights

    @property
    def trained(self) -> int:
        return self.share.trained

    @property
    def size(self) -> int:
        """Number of bytes of one value in the compute dtype."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def inner(self) -> int:
        """Total width of the MLPs (several with experts) that process a token, in the widest layer."""
        return max(map(self.model.active_width, range(self.model.num_layers)))

    @property
    def query(self) -> int:
        """Total width of the query heads, in the widest layer."""
        return self.model.num_heads * max(map(self.model.head_width, range(self.model.num_layers)))

    @property
    def key(self) -> int:
        """Total width of the key heads, in the widest layer."""
        layers = range(self.model.num_layers)
        return max(self.model.kv_heads(layer) * self.model.head_width(layer) for layer in layers)

    @property
    def recurrent_layers(self) -> int:
        return sum(map(self.model.is_recurrent, range(self.model.num_layers)))


def update_phases(work: Work, micro_batch: int) -> list[Phase]:
    """Estimates the two peaks of an optimizer update: a backward pass, and the optimizer step. With a critic, also the
    peak of its update, which runs before.

    Args:
      micro_batch: approximate number of completions of full length per forward and backward pass.
    """
    held = _held(work) | {"batch": _batch(work)}
    phases = _update_phases(work, micro_batch, held)
    if work.critic is not None:
        own = dataclasses.replace(work, model=work.critic.model, share=work.critic.share, teachers=())
        peak = max(_update_phases(own, micro_batch, held), key=lambda phase: phase.bytes)
        phases.append(dataclasses.replace(peak, name="critic"))
    return phases


def _update_phases(work: Work, micro_batch: int, held: dict[str, int]) -> list[Phase]:
    prompt_width, width = work.widths
    most = work.update_prompts or work.prompts
    layout = choose_layout(work.group, most, work.widths, micro_batch, work.parts, work.whole_groups)
    lanes = -(-layout.lanes // work.parts)
    prompts = -(-layout.prompts // work.parts)
    tokens, prompt_tokens = (
        -(-count // work.sequence) for count in (lanes * layout.bins * width, prompts * prompt_width)
    )
    heads = work.model.num_heads
    scores = tokens * heads * (prompt_width + width)
    copies = LANE_COPIES * lanes * _cache(work, prompt_width) // work.sequence
    temporaries = {
        "gradients": GRADIENT_COPIES * work.trained + _output_gradient(work),
        "cast weights": _cast_weights(work) + _dequantized(work, backward=True),
        "prompts": _kept(work, prompt_tokens, prompt_tokens * prompt_width * heads),
        "chunk": _kept(work, tokens, scores) + copies,
        "logits or a layer's backward": max(_logits(work, tokens), _layer_backward(work, lanes * layout.bins)),
        "gathered keys": _gathered_keys(work, lanes * layout.bins * width + lanes * prompt_width),
    }
    if work.backend != "cpu" and work.remat:
        copied = 0 if layout.own_lanes else lanes * prompt_width // work.sequence
        temporaries |= _with_stacked_layers(work, tokens, prompt_tokens, copied)
        factor = ALLOCATED.get(work.backend, max(ALLOCATED.values()))
        temporaries = {name: int(factor * size) for name, size in temporaries.items()}
    for teacher in work.teachers:
        temporaries |= _teacher_forward(work, teacher, layout) if teacher.in_loss else {}
    gradient = held | temporaries
    copies = MUON_COPIES if work.muon else STEP_COPIES[work.clipped]
    step = held | {"gradients and new weights": copies * work.trained}
    phases = [Phase("update", gradient), Phase("optimizer", step)]
    before = [
        Phase("teacher", held | _teacher_forward(work, teacher, layout) | {"logits": _logits(work, tokens)})
        for teacher in work.teachers
        if not teacher.in_loss
    ]
    return [*phases, max(before, key=lambda phase: phase.bytes)] if before else phases


def _teacher_forward(work: Work, teacher: TeacherWork, layout: Layout) -> dict[str, int]:
    """Returns the bytes of the states of a teacher's prompts, of the temporaries of one of its layers, for the prompts
    or for a chunk of completions, and of the weights that its own weights are cast, stacked or dequantised to."""
    own = dataclasses.replace(work, model=teacher.model, widths=(teacher.prompt_width, work.widths[1]))
    lanes = -(-layout.lanes // work.parts)
    prompts = -(-layout.prompts // work.parts)
    steps = -(-work.widths[1] // work.sequence)
    width = -(-teacher.prompt_width // work.sequence)
    tokens = lanes * layout.bins * steps
    states = (prompts + (0 if layout.own_lanes else lanes)) * _cache(own, width)
    layer = WORKING_INNER * tokens * (own.inner + teacher.model.hidden_size) * work.size
    layer = max(layer, _scores_bytes(own, lanes * layout.bins, steps, sum(own.widths)))
    layer = max(layer, _scores_bytes(own, prompts, width, teacher.prompt_width))
    working = 0
    if teacher.share is not None:
        kinds = {"param_dtype": teacher.param_dtype, "quantized": teacher.quantized}
        own = dataclasses.replace(own, share=teacher.share, adapters=None, **kinds)
        stacked = _in_compute_dtype(own, teacher.share) if _stacks(work) else 0
        working = max(_cast_weights(own), stacked) + _dequantized(own, backward=False)
    return {
        "teacher's prompts": states,
        "teacher's layer": layer,
        "teacher's cast weights": working,
    }


def _with_stacked_layers(work: Work, tokens: int, prompt_tokens: int, lane_tokens: int) -> dict[str, int]:
    """Returns the components of an update that are different if layers are stacked and recomputed.

    Args:
      tokens, prompt_tokens: numbers of completion tokens and of prompt tokens that are processed at once.
      lane_tokens: number of prompt tokens whose keys and values are copied for these completions.
    """
    model = work.model
    # Counts 3.2 bytes per logit, before the factor `ALLOCATED`. XLA:TPU has the logits in float32 and in bfloat16.
    logits = _logits(work, tokens) * 2 // 5
    own = range(model.num_layers - model.shared_kv_layers)
    unit = LANES if work.backend == "tpu" else 1
    key = 2 * work.size * sum(model.kv_heads(layer) * -(-model.head_width(layer) // unit) * unit for layer in own)
    hidden = model.num_layers * (model.hidden_size + (model.layer_input_width or 0)) * work.size
    # Keys and values of the prompts, the sum of their gradients in float32, and their gradient from one chunk.
    states = key * (2 + 4 // work.size)
    stacked = _in_compute_dtype(work, work.share) if _stacks(work) else 0
    return {
        "gradients": work.trained + work.trained * work.size // 4 + _output_gradient(work),
        "cast weights": max(_cast_weights(work), stacked) + _dequantized(work, backward=True),
        "prompts": prompt_tokens * (states + hidden),
        "chunk": tokens * hidden + 2 * lane_tokens * key,
        "logits or a layer's backward": max(logits, _layer_working(work, tokens)),
    }


def _stacks(work: Work) -> bool:
    """Returns whether layers are stacked (`likelihood_options` and `ForwardOptions.for_trained`)."""
    return work.backend != "cpu" and (work.adapters is None or work.devices > 1)


def _in_compute_dtype(work: Work, share: Share) -> int:
    """Returns the bytes of the weights `share` in the compute dtype; adapters and quantised matrices are not cast."""
    return share.weights - share.plain * (jnp.dtype(work.param_dtype).itemsize - work.size)


def _layer_working(work: Work, tokens: int) -> int:
    """Returns the bytes of one layer's recomputation and backward pass, with an attention kernel. If `work.parts` or
    `work.sequence` is above 1, they include the gathered matrices of the layer and their gradient."""
    model = work.model
    parts = work.parts
    widths = work.inner + model.hidden_size + work.query
    routed = 0
    layer = layer_count(model) if parts * work.sequence > 1 else 0
    if (experts := model.experts) is not None:
        routed = ROUTED_COPIES * experts.per_token * model.hidden_size
        if work.expert_parts > 1:
            routed += EXCHANGED_COPIES * work.expert_parts * model.hidden_size
            every = 3 * experts.number * model.hidden_size * experts.intermediate_size
            layer -= every - every // work.expert_parts  # experts are not gathered over `ep`
    gathered = layer * work.size * (1 if work.adapters else 2)
    # XLA:GPU recomputes layers of a pattern early, during collectives (measured: half of the six layers of Gemma 3).
    layers = max(1, longest_period(model) // 2) if work.backend == "gpu" and parts > 1 else 1
    each = (WORKING_INNER * widths + routed) * work.size + _recurrent(work, WORKING_RECURRENT, WORKING_RECURRENT)
    return layers * (tokens * each + gathered)


def rollout_phase(
    work: Work, rows: int, slots: int, held: dict[str, int] | None = None, prefilled: int | None = None
) -> Phase:
    """Estimates the peak memory of sampling with `rows` concurrent completions in `slots` slots.

    The peak is the largest of four estimates: the weights while they are laid out for sampling; the forward pass of the
    prompts; a decode step with caches of full size; the caches while the last layer is replaced, when the cache grows
    or is halved.

    Args:
      held: number of bytes, by component, of the arrays that are always in memory; defaults to those of a trainer.
      prefilled: number of different prompts in the slots, which one forward pass processes; defaults to `slots`.
    """
    parts, tp = work.rollout_parts or (work.parts, 1)
    rows, slots = -(-rows // parts), -(-slots // parts)
    model = work.model
    prompt_width, width = work.widths
    cache = rows * _cache(work, width, tp)
    prompt_cache = slots * _cache(work, prompt_width, tp)
    logits = SAMPLED_LOGITS_COPIES[work.filtered] * rows * model.vocab_size * 4 // tp
    scores = rows * model.num_heads * (prompt_width + width) * 4 // tp
    copy = work.copied if work.rollout_share is None else _in_compute_dtype(work, work.rollout_share)
    cast = _sampled_weights(work)
    dequantized = _dequantized(work, backward=False)
    laid_out = DEQUANTIZED if work.quantized is None and work.share.quantized else LAID_OUT
    # While a larger cache replaces the old one, a layer of the old one; while a cache with half as many rows or slots
    # does, one layer of it on every device.
    layers = sum(model.key_widths) // max(model.key_widths, default=1) + work.recurrent_layers
    layer = max(cache * _room_before(width) // width, parts * max(cache // 2, prompt_cache)) // layers
    forward = _prompt_forward(work, slots if prefilled is None else -(-prefilled // parts), tp)
    prefill_weights = max(copy, cast * (work.size < 4)) + dequantized
    buffers = rows * ((8 + work.recorded) * width + 16) + (rows + slots) * model.hidden_size * work.size
    kept = {"prompt cache": prompt_cache, "buffers": buffers}
    moments = [
        kept | {"cast weights": cast + dequantized, "logits": logits + scores, "completion cache": cache},
        kept | {"cast weights": copy, "completion cache": cache, "a layer of another cache": layer},
        kept | {"cast weights": prefill_weights, "prompts": forward},
        {"laying out the weights": int(laid_out.get(work.backend, max(laid_out.values())) * copy)},
    ]
    worst = max(moments, key=lambda parts: sum(parts.values()))
    return Phase("rollout", (_held(work) if held is None else held) | worst, moments[0])


def _prompt_forward(work: Work, prompts: int, tp: int) -> int:
    """Returns the bytes of the temporaries of the forward pass of prompts, whose heads and MLP are split over `tp`
    devices."""
    width = work.widths[0]
    model = work.model
    piece = prefill_piece(prompts, width)
    tokens = prompts * piece
    # XLA:GPU keeps the queries of every layer in float32 and in the compute dtype (measured: 5.9 to 7 bytes a number).
    queries = tokens * model.num_layers * work.query * (4 + work.size) * (work.backend == "gpu")
    forward = max(_scores_bytes(work, prompts, piece, width), WORKING_INNER * tokens * work.inner * work.size)
    return (forward + queries) // tp + tokens * model.hidden_size * work.size


def _held(work: Work) -> dict[str, int]:
    """Returns the components that a trainer always holds in memory."""
    held = {"weights": work.weights, "optimizer": work.moments}
    # With adapters, the reference is the frozen base, which is already counted as weights.
    held |= {"reference": work.weights} if work.reference and work.adapters is None else {}
    if work.critic is not None:
        held["critic"] = work.critic.own + work.critic.moments
    return held | ({"teacher": sum(teacher.weights for teacher in work.teachers)} if work.teachers else {})


def _cache(work: Work, width: int, tp: int = 1) -> int:
    """Returns the bytes of the keys and values of one completion of `width` tokens, and of its memories of recurrent
    layers, in all layers, on each of `tp` devices that share its heads."""
    model = work.model
    recurrent = work.recurrent_layers
    memories = recurrent * memory_bytes(model, work.dtype, tp) if recurrent else 0
    return 2 * sum(model.key_widths) * work.size * width // tp + memories


def _cast_weights(work: Work) -> int:
    """Returns the bytes of the weights in the compute dtype, or of the transposed tied embedding if none are cast."""
    if jnp.dtype(work.dtype) != jnp.dtype(work.param_dtype):
        return work.share.plain * work.size
    return work.share.embedding * work.size if _ties(work) else 0


def _ties(work: Work) -> bool:
    """Whether the embedding is also the output matrix."""
    return work.model.tie_embeddings and not work.model.scalar_head


def _output_gradient(work: Work) -> int:
    """Returns the bytes of the separate gradient of a tied output matrix."""
    return 0 if work.adapters is not None or not _ties(work) else 4 * work.share.embedding


def _sampled_weights(work: Work) -> int:
    if (share := work.rollout_share) is None:
        return _cast_weights(work) + work.copied
    copied = work.model.tie_embeddings or work.backend == "tpu"  # transposed, or laid out in blocks (`in_blocks`)
    return _in_compute_dtype(work, share) + share.embedding * work.size * copied


def _dequantized(work: Work, backward: bool) -> int:
    """Returns the bytes of the dequantised matrices in memory: all on the CPU, one on other backends."""
    if work.quantized is None:
        return 0
    sizes = work.share.quantized
    if work.backend == "cpu":
        return DEQUANTIZED_COPIES[backward] * 4 * sum(sizes)
    return (4 + work.size) * max(sizes)


def _kept(work: Work, tokens: int, scores: int) -> int:
    """Returns the bytes that all layers save for the backward pass of `tokens` tokens with `scores` scores a layer."""
    model = work.model
    inner = work.inner + (work.model.layer_input_width or 0)
    widths = {"inner": inner, "hidden": model.hidden_size, "query": work.query, "key": work.key}
    per_token = KEPT_WITH_REMAT if work.remat else KEPT_PER_TOKEN
    numbers: float = sum(per_token[name] * width for name, width in widths.items())
    if work.backend == "gpu" and work.size < 4 and not work.remat:
        normed = (work.query + work.key) * model.qk_norm
        numbers += KEPT_IN_FLOAT32["hidden"] * model.hidden_size + KEPT_IN_FLOAT32["normed"] * normed
    token = int(numbers * work.size)
    recurrent = work.recurrent_layers
    plain = (model.num_layers - recurrent) * int(KEPT_SCORES[_attention_kind(work, scores)] * scores * 4)
    return model.num_layers * tokens * token + plain + recurrent * tokens * _recurrent(work, **KEPT_RECURRENT)


def _recurrent(work: Work, chunk: float, width: float) -> int:
    """Returns the bytes per token of `chunk` float32 values per token of a chunk, and of `width` float32 values per
    number of a key and a value, of all value heads of a recurrent layer."""
    if not work.recurrent_layers or (rule := work.model.delta_rule) is None:
        return 0
    return int(4 * rule.value_heads * (chunk * CHUNK + width * (rule.key_width + rule.value_width)))


def _attention_kind(work: Work, scores: int) -> str:
    """Returns the key of `KEPT_SCORES` of the attention implementation that is used for `scores` attention scores."""
    if work.attention == "plain" or (
        work.attention == "auto" and scores * (work.parts if work.sequence == 1 else 1) <= SCORES
    ):
        return "plain"
    one = work.backend == "cpu" and max(work.widths) <= BLOCK
    return "one block" if one else "blocks"


def _gathered_keys(work: Work, positions: int) -> int:
    """Returns the bytes of the keys and values of a layer at `positions`, and of their gradients, that a device gathers
    if the tokens of a sequence are divided over devices."""
    position = 2 * work.key * work.size
    return 0 if work.sequence == 1 else 2 * position * positions


def _scores_bytes(work: Work, rows: int, queries: int, keys: int) -> int:
    """Returns the bytes of the attention scores that exist at the same time in a layer."""
    scores = rows * queries * keys * work.model.num_heads
    if _attention_kind(work, scores) == "blocks":
        scores = min(scores, rows * BLOCK * BLOCK * work.model.num_heads)
    return WORKING_SCORES * scores * 4


def _layer_backward(work: Work, rows: int) -> int:
    """Returns the bytes of the temporaries of one layer's backward pass, including recomputed arrays."""
    model = work.model
    prompt_width, width = work.widths
    tokens = rows * width // work.sequence
    mlp = WORKING_INNER * tokens * (work.inner + model.hidden_size) * work.size
    scores = _scores_bytes(work, rows, width // work.sequence, prompt_width + width)
    if _attention_kind(work, tokens * model.num_heads * (prompt_width + width)) != "blocks":
        scores -= tokens * (KEPT_PER_TOKEN["inner"] * work.inner + 2 * model.hidden_size) * work.size
    total = max(mlp, scores)
    if work.remat and work.backend != "cpu":
        one = dataclasses.replace(work, remat=False, model=dataclasses.replace(model, num_layers=1, shared_kv_layers=0))
        total += _kept(one, tokens, tokens * model.num_heads * (prompt_width + width))
    return total


def _logits(work: Work, tokens: int) -> int:
    if work.model.scalar_head:
        return 4 * tokens
    pieces = -(-tokens // work.logits_chunk)
    copies = DIVERGENCE_COPIES if any(teacher.in_loss for teacher in work.teachers) else LOGITS_COPIES
    return copies * -(-tokens // pieces) * work.model.vocab_size * 4


def _batch(work: Work) -> int:
    """Returns the bytes of prompts, and of completions with up to three log-probabilities per token, and with a critic
    its values, returns and advantages."""
    prompt_width, width = work.widths
    each = 3 + work.reference + 3 * (work.critic is not None)
    experts = (work.prompts * prompt_width + work.rows * width) * work.recorded // work.parts
    return 4 * (work.prompts * prompt_width + work.rows * width * each + 8 * work.rows) + experts


def _room_before(width: int) -> int:
    """Returns the columns of the sampler's cache before it grows for the last time, to `width`."""
    room = min(FIRST_CACHE, width)
    while 2 * room < width:
        room *= 2
    return room if room < width else 0
