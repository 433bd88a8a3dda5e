"""Defines the layers of a decoder: projections, norms, rotary positions, attention projections, the MLP and the mixture
of experts.

Modules have the attribute names of Hugging Face. Inputs can have any leading axes. The caller of a layer passes the
attention function (`Attend`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Integer

from tunix_like.models.config import DecoderConfig
from tunix_like.models.delta_rule import Memory, Past, convolve, delta_rule, tail_after
from tunix_like.models.fields import Experts, LinearScaling, ProportionalScaling, RopeScaling, Scaling, YarnScaling
from tunix_like.models.grouped_products import grouped_product
from tunix_like.models.quantization import quantized_product
from tunix_like.models.sharding import per_device, split_tokens, splits_over_experts

Gating = Callable[[Array, Array], Array]
"""`gating(gate, up)`: the product of a gated MLP before its last projection."""
KeyValue = tuple[Array, Array]
Tables = tuple[Array, Array]


class Rotation(NamedTuple):
    """The tables (`rope_tables`) of queries and of keys."""

    queries: Tables
    keys: Tables


Chosen = Array | None
"""Indices of the selected experts of each token, `[... k]`; None: those that the router selects."""

Attend = Callable[[Array, Any, Any, Array | None], tuple[Array, Any]]
"""`attend(q [... H h], k [... K h], v [... K h], sinks [H] or None) -> (out [... H h], kept)`: attention with the
caller's mask and cache, and what the caller keeps of the (rotated) keys and values. `k` and `v` are None in a layer
that uses those of another layer (`DecoderConfig.shared_kv_layers`)."""


def rope_tables(head_dim: int, theta: float, scaling: Scaling | None, positions: Int[Array, "..."]) -> Tables:
    """Computes cosines and sines (float32, `[..., head_dim / 2]`) of the rotary angles of `positions`. With `scaling`,
    the rotary frequencies are scaled, and YaRN also multiplies both tables by its attention factor."""
    angles = jnp.multiply.outer(positions.astype(jnp.float32), rope_frequencies(head_dim, theta, scaling))
    size = scaling.attention if isinstance(scaling, YarnScaling) else 1.0
    return jnp.cos(angles) * size, jnp.sin(angles) * size


def rotation(
    config: DecoderConfig, width: int, theta: float, scaling: Scaling | None, positions: Int[Array, "..."]
) -> Rotation:
    """Returns the tables of `positions` for heads of a width; those of the queries contain the factor of
    `DecoderConfig.query_scaling`."""
    cosine, sine = tables = rope_tables(config.rotary_width or width, theta, scaling, positions)
    if config.query_scaling is None:
        return Rotation(tables, tables)
    assert isinstance(config.rope_scaling, RopeScaling | YarnScaling)
    periods = jnp.maximum(positions, 0) // config.rope_scaling.original_max_positions  # -1 is the position of padding
    size = 1 + config.query_scaling * jnp.log1p(periods.astype(jnp.float32))[..., None]
    return Rotation((cosine * size, sine * size), tables)


def rope_frequencies(head_dim: int, theta: float, scaling: Scaling | None) -> Float[Array, "f"]:
    """Computes the rotary frequencies (float32), in radians per position."""
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    frequencies = 1.0 / theta**exponents
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, YarnScaling):
        low, high = scaling.bounds(head_dim, theta)
        divided = jnp.clip((jnp.arange(head_dim // 2, dtype=jnp.float32) - low) / (high - low), 0, 1)
        return frequencies * (1 - divided) + frequencies / scaling.factor * divided
    if isinstance(scaling, ProportionalScaling):
        rotated = jnp.arange(head_dim // 2) < scaling.rotated(head_dim)
        return jnp.where(rotated, frequencies / scaling.factor, 0)
    return frequencies if scaling is None else _llama3(frequencies, scaling)


def _llama3(frequencies: Float[Array, "f"], scaling: RopeScaling) -> Float[Array, "f"]:
    wavelengths = 2 * jnp.pi / frequencies
    low = scaling.original_max_positions / scaling.low_freq_factor
    high = scaling.original_max_positions / scaling.high_freq_factor
    blend = (scaling.original_max_positions / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    return jnp.where(
        wavelengths > low, frequencies / scaling.factor, jnp.where(wavelengths < high, frequencies, between)
    )


def _clamped_swiglu(gate: Float[Array, "*B"], up: Float[Array, "*B"]) -> Float[Array, "*B"]:
    gate = jnp.minimum(gate, 7.0)
    up = jnp.clip(up, -7.0, 7.0)
    return (up + 1) * (gate * jax.nn.sigmoid(1.702 * gate))


_GATINGS: dict[str, Gating] = {
    "silu": lambda gate, up: jax.nn.silu(gate) * up,
    "gelu_tanh": lambda gate, up: jax.nn.gelu(gate) * up,
    "clamped_swiglu": _clamped_swiglu,
}


def rotate(x: Float[Array, "... N h"], tables: Tables) -> Float[Array, "... N h"]:
    """Applies the rotary embedding (Su et al., arXiv 2104.09864). As in Hugging Face, entry `i` of the first half of a
    head is rotated with entry `i` of the second half. If the tables are for narrower heads, only the first entries of a
    head are rotated."""
    x, rest = jnp.split(x, [2 * tables[0].shape[-1]], axis=-1)
    rotated = jax.lax.platform_dependent(x, *tables, tpu=_rotate_by_product, default=_rotate)
    return jnp.concatenate([rotated, rest], axis=-1) if rest.size else rotated


def _rotate_by_product(
    x: Float[Array, "... N h"], cosine: Float[Array, "... k"], sine: Float[Array, "... k"]
) -> Float[Array, "... N h"]:
    """Applies the rotary embedding, and exchanges the halves of each head through a product with a permutation matrix.
    On a TPU, moving the halves without a product would take twice as long."""
    width = x.shape[-1]
    exchange = jnp.roll(jnp.eye(width, dtype=x.dtype), width // 2, axis=1)
    other = jnp.matmul(x, exchange, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST)
    both = jnp.concatenate([cosine, cosine], axis=-1), jnp.concatenate([-sine, sine], axis=-1)
    cosine, sine = (table[..., None, :] for table in both)
    return (x.astype(jnp.float32) * cosine + other * sine).astype(x.dtype)


def _rotate(x: Float[Array, "... N h"], *tables: Float[Array, "... k"]) -> Float[Array, "... N h"]:
    cosine, sine = (table[..., None, :] for table in tables)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return rotated.astype(x.dtype)


class Linear(nnx.Module):
    """Computes `x W + b`. An adapter (`lora.py`) with the matrices A and B adds `(x A) B * lora_scale`, where
    `lora_scale` is `alpha / rank`.

    W is stored in `kernel`. A quantised W is frozen and stored in `kernel_codes` and `kernel_scale`
    (`quantization.py`).
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool, rngs: nnx.Rngs, dtype: Any, param_dtype: Any):
        self.kernel: nnx.Param | None = nnx.Param(
            inputs**-0.5 * jax.random.normal(rngs.params(), (inputs, outputs), param_dtype)
        )
        # These attributes are nnx.data from the start. The graph definition then does not depend on whether they were
        # ever set.
        self.kernel_codes: nnx.Param | None = nnx.data(None)
        self.kernel_scale: nnx.Param | None = nnx.data(None)
        self.bias = nnx.Param(jnp.zeros(outputs, param_dtype)) if bias else None
        self.lora_a: nnx.Param | None = nnx.data(None)
        self.lora_b: nnx.Param | None = nnx.data(None)
        self.lora_scale = 1.0
        self.dtype = dtype

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        out = self._product(x)
        if self.bias is not None:
            out = out + jnp.broadcast_to(self.bias[...].astype(self.dtype), out.shape)
        if self.lora_a is None or self.lora_b is None:
            return out
        low = x @ self.lora_a[...].astype(self.dtype)
        return out + (low @ self.lora_b[...].astype(self.dtype)) * self.lora_scale

    def _product(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        if self.kernel is not None:
            return x @ self.kernel[...].astype(self.dtype)
        assert self.kernel_codes is not None and self.kernel_scale is not None
        return quantized_product(x, self.kernel_codes[...], self.kernel_scale[...], self.dtype)


class RMSNorm(nnx.Module):
    """Divides each vector by its root mean square and multiplies the result by the weight, or by `1 + weight` with
    `offset`."""

    def __init__(self, width: int, epsilon: float, *, offset: bool, param_dtype: Any):
        self.scale = nnx.Param((jnp.zeros if offset else jnp.ones)(width, param_dtype))
        self.epsilon = epsilon
        self.offset = offset

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        wide = _unit(x.astype(jnp.float32), self.epsilon)
        scale = self.scale[...].astype(jnp.float32)
        scale = scale + 1 if self.offset else scale
        return (wide * jnp.broadcast_to(scale, wide.shape)).astype(x.dtype)


def _unit(x: Float[Array, "... D"], epsilon: float) -> Float[Array, "... D"]:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)


class Embedding(nnx.Module):
    """Looks up rows of the embedding table, which consist of `parts` vectors of the same width. With `scaled`,
    multiplies them by the square root of this width, rounded to the compute dtype."""

    def __init__(
        self,
        vocabulary: int,
        width: int,
        *,
        parts: int = 1,
        scaled: bool,
        rngs: nnx.Rngs,
        dtype: Any,
        param_dtype: Any,
    ):
        shape = vocabulary, parts * width
        self.embedding = nnx.Param(width**-0.5 * jax.random.normal(rngs.params(), shape, param_dtype))
        self.dtype = dtype
        self.factor = width**0.5 if scaled else None

    def __call__(self, tokens: Int[Array, "..."]) -> Float[Array, "... D"]:
        rows = split_tokens(self.embedding[...][tokens].astype(self.dtype))
        return rows if self.factor is None else rows * jnp.asarray(self.factor, self.dtype)


class Attention(nnx.Module):
    def __init__(self, config: DecoderConfig, index: int, **kinds: Any):
        width = config.hidden_size
        head = config.head_width(index)
        key_heads = config.kv_heads(index)
        shared = config.kv_source(index) != index
        values = not shared and not (config.keys_as_values and config.window(index) is None)
        self.output_gate = config.output_gate
        queries = config.num_heads * head * (2 if config.output_gate else 1)
        self.q_proj = Linear(width, queries, bias=config.qkv_bias, **kinds)
        self.k_proj = None if shared else Linear(width, key_heads * head, bias=config.qkv_bias, **kinds)
        self.v_proj = Linear(width, key_heads * head, bias=config.qkv_bias, **kinds) if values else None
        self.o_proj = Linear(config.num_heads * head, width, bias=config.o_bias, **kinds)
        self.sinks = nnx.Param(jnp.zeros(config.num_heads, kinds["param_dtype"])) if config.sinks else None
        joint = config.joint_qk_norm
        self.q_norm = norm_of(config.num_heads * head if joint else head, config, **kinds) if config.qk_norm else None
        self.k_norm = (
            norm_of(key_heads * head if joint else head, config, **kinds) if config.qk_norm and not shared else None
        )
        self.joint_norms = joint
        self.value_epsilon = config.norm_eps if config.value_norm else None
        self.head_dim = head
        # Attention divides scores by sqrt(head_dim). This factor changes the divisor to sqrt(query_pre_attn_scalar).
        self.query_scale = (head / (config.query_pre_attn_scalar or head)) ** 0.5

    def __call__(self, x: Float[Array, "... D"], rope: Rotation | None, attend: Attend) -> tuple[Array, Any]:
        heads = (*x.shape[:-1], -1, self.head_dim)
        q = self.q_proj(x)
        gate = None
        k: Array | None = None if self.k_proj is None else self.k_proj(x)
        v = k if self.v_proj is None else self.v_proj(x)
        if self.output_gate:  # each head has its queries first, and then its gate
            q, gate = jnp.split(q.reshape(*x.shape[:-1], -1, 2 * self.head_dim), 2, axis=-1)
        if self.joint_norms:
            q, k = normed(self.q_norm, q), normed(self.k_norm, k)
        q = q.reshape(heads)
        k, v = (None if y is None else y.reshape(heads) for y in (k, v))
        if not self.joint_norms:
            q, k = normed(self.q_norm, q), normed(self.k_norm, k)
        if v is not None and self.value_epsilon is not None:
            v = _unit(v.astype(jnp.float32), self.value_epsilon).astype(v.dtype)
        if rope is not None:
            q = rotate(q, rope.queries)
            k = None if k is None else rotate(k, rope.keys)
        if self.query_scale != 1:
            q = q * self.query_scale
        sinks = None if self.sinks is None else self.sinks[...].astype(jnp.float32)
        out, kept = attend(q, k, v, sinks)
        if gate is not None:
            out = out * jax.nn.sigmoid(gate)
        return self.o_proj(out.reshape(*x.shape[:-1], -1)), kept


class Convolution(nnx.Module):
    """Holds the weights of a causal convolution of each channel, in the layout of Hugging Face."""

    def __init__(self, channels: int, taps: int, *, rngs: nnx.Rngs, param_dtype: Any, **_: Any):
        self.taps = nnx.Param(taps**-0.5 * jax.random.normal(rngs.params(), (channels, 1, taps), param_dtype))


class GatedDeltaNet(nnx.Module):
    """A recurrent layer with the gated delta rule (`delta_rule.py`)."""

    def __init__(self, config: DecoderConfig, **kinds: Any):
        assert config.delta_rule is not None
        self.sizes = sizes = config.delta_rule
        width = config.hidden_size
        values = sizes.value_heads * sizes.value_width
        self.in_proj_qkv = Linear(width, sizes.channels, bias=False, **kinds)
        self.in_proj_z = Linear(width, values, bias=False, **kinds)
        self.in_proj_b = Linear(width, sizes.value_heads, bias=False, **kinds)
        self.in_proj_a = Linear(width, sizes.value_heads, bias=False, **kinds)
        self.conv1d = Convolution(sizes.channels, sizes.taps, **kinds)
        # As in transformers, A is uniform between 0.01 and 16.
        rate = jax.random.uniform(kinds["rngs"].params(), (sizes.value_heads,), minval=0.01, maxval=16.0)
        self.A_log = nnx.Param(jnp.log(rate).astype(kinds["param_dtype"]))
        self.dt_bias = nnx.Param(jnp.ones(sizes.value_heads, kinds["param_dtype"]))
        self.norm = RMSNorm(sizes.value_width, config.norm_eps, offset=False, param_dtype=kinds["param_dtype"])
        self.out_proj = Linear(values, width, bias=False, **kinds)

    def __call__(self, x: Float[Array, "... D"], past: Past) -> tuple[Float[Array, "... D"], Memory]:
        """Returns the outputs, and the memory after the last token of each row of `past`."""
        rows = past.offsets.shape
        sizes = self.sizes
        state, tail = past.memory
        inputs = self.in_proj_qkv(x).reshape(*rows, sizes.channels)
        mixed = jax.nn.silu(convolve(inputs, self.conv1d.taps[...], tail, past.offsets))
        ends = [sizes.key_heads * sizes.key_width, 2 * sizes.key_heads * sizes.key_width]
        widths = sizes.key_width, sizes.key_width, sizes.value_width
        q, k, v = (part.reshape(*rows, -1, n) for part, n in zip(jnp.split(mixed, ends, axis=-1), widths, strict=True))
        step = self.in_proj_a(x).astype(jnp.float32)
        bias = self.dt_bias[...].astype(jnp.float32)
        step = jax.nn.softplus(step + jnp.broadcast_to(bias, step.shape))
        rate = jnp.exp(self.A_log[...].astype(jnp.float32))
        decay = -step * jnp.broadcast_to(rate, step.shape)
        beta = jax.nn.sigmoid(self.in_proj_b(x).astype(jnp.float32))
        decay, beta = (gate.reshape(*rows, -1) for gate in (decay, beta))
        out, state = delta_rule(q, k, v, decay, beta, state, past.offsets)
        gate = self.in_proj_z(x).astype(jnp.float32).reshape(out.shape)
        out = (self.norm(out.astype(jnp.float32)) * jax.nn.silu(gate)).astype(x.dtype)
        return self.out_proj(out.reshape(*x.shape[:-1], -1)), Memory(state, tail_after(inputs, tail, past.offsets))


class MLP(nnx.Module):
    def __init__(self, config: DecoderConfig, width: int, **kinds: Any):
        self.gate_proj = Linear(config.hidden_size, width, bias=False, **kinds)
        self.up_proj = Linear(config.hidden_size, width, bias=False, **kinds)
        self.down_proj = Linear(width, config.hidden_size, bias=False, **kinds)
        self.gating = _GATINGS[config.activation]

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return self.down_proj(self.gating(self.gate_proj(x), self.up_proj(x)))


class Kernel(nnx.Module):
    """Holds one weight matrix or, if `number` is given, a stack of `number` matrices (one per expert), with `bias` also
    a bias of each."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        number: int | None = None,
        *,
        bias: bool,
        rngs: nnx.Rngs,
        dtype: Any,
        param_dtype: Any,
    ):
        stack = () if number is None else (number,)
        shape = *stack, inputs, outputs
        self.kernel = nnx.Param(inputs**-0.5 * jax.random.normal(rngs.params(), shape, param_dtype))
        self.bias = nnx.Param(jnp.zeros((*stack, outputs), param_dtype)) if bias else None
        self.dtype = dtype


class ExpertMLPs(nnx.Module):
    """The gated MLPs of all experts. For E experts of width i and model width D, the gate and up kernels are
    `[E, D, i]`, and the down kernel is `[E, i, D]`. Biases are `[E, i]` and `[E, D]`."""

    def __init__(self, width: int, experts: Experts, gating: Gating, **kinds: Any):
        kinds |= {"bias": experts.biases}
        self.gate_proj = Kernel(width, experts.intermediate_size, experts.number, **kinds)
        self.up_proj = Kernel(width, experts.intermediate_size, experts.number, **kinds)
        self.down_proj = Kernel(experts.intermediate_size, width, experts.number, **kinds)
        self.gating = gating
        self.width = experts.intermediate_size
        self.dtype = kinds["dtype"]

    def __call__(self, x: Float[Array, "N D"], chosen: Int[Array, "N"]) -> Float[Array, "N D"]:
        """Applies expert `chosen[i]` to row `i` of `x`. `chosen` is sorted. Rows whose expert is beyond the last give
        zeros."""
        gate, up = (self._product(x, projection, chosen) for projection in (self.gate_proj, self.up_proj))
        # On a mesh with `tp`, a device has a share of the width and `per_device` adds the results up, so each device
        # adds this share of the bias.
        share = self.down_proj.kernel.shape[1] / self.width
        return self._product(self.gating(gate, up), self.down_proj, chosen, share)

    def _product(
        self, x: Float[Array, "N I"], projection: Kernel, chosen: Int[Array, "N"], share: float = 1.0
    ) -> Float[Array, "N O"]:
        number = projection.kernel.shape[0]
        sizes = jnp.bincount(chosen, length=number).astype(jnp.int32)
        out = grouped_product(x, projection.kernel[...].astype(self.dtype), sizes)
        if projection.bias is None:
            return out
        # A product, because the gradient of a gather would be a scatter to few rows.
        return out + jax.nn.one_hot(chosen, number, dtype=self.dtype) @ (projection.bias[...] * share).astype(
            self.dtype
        )


ROUNDS = "rounds"
"""Name of the loop over the rows of the experts of a device in a compiled program."""

ROUND = 1.25
"""Rows that a device with a part of the experts processes at once, relative to those that it gets if all experts get
the same number. More rows take further rounds, so no row is dropped, and memory does not grow with an uneven choice."""


class MixtureOfExperts(nnx.Module):
    """Selects experts for every token, without a capacity limit. Tokens are sorted by expert, and a grouped matrix
    product processes groups of any size.

    Computes `sum over the k selected experts of weight * expert(x)`. The weights come from the router's softmax, in
    float32 (`route`). With `Experts.biases`, router and experts have biases. With `Experts.shared`, adds
    `sigmoid(x g) * shared_expert(x)`.

    On a mesh, each device sorts and multiplies its own tokens (`per_device`). Without `per_device`, the compiler would
    sort the tokens of all devices together. With the axis `ep`, a device has a part of the experts: it receives the
    tokens of all devices along `ep`, and these add up their results (an all-gather and a reduce-scatter; for `k` of at
    least the size of `ep`, an exchange of the k copies of each token would move no less). The router matrix is cast to
    the compute dtype in training and in sampling, because trainer and sampler must select the same experts.
    """

    def __init__(self, config: DecoderConfig, experts: Experts, **kinds: Any):
        width = config.hidden_size
        self.gate = Kernel(width, experts.number, bias=experts.biases, **kinds)
        self.experts = ExpertMLPs(width, experts, _GATINGS[config.activation], **kinds)
        self.shared_expert = MLP(config, config.intermediate_size, **kinds) if experts.shared else None
        self.shared_expert_gate = Linear(width, 1, bias=False, **kinds) if experts.shared else None
        self.numbers = experts

    def __call__(
        self, x: Float[Array, "B *N D"], chosen: Integer[Array, "B *N k"] | None = None
    ) -> tuple[Float[Array, "B *N D"], Integer[Array, "B *N k"]]:
        """Returns the outputs, and the selected experts of each token: `chosen`, or by the router if it is None."""
        out, chosen = RoutedExperts(self.gate, self.experts, self.numbers)(x, x, chosen)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            share = jax.nn.sigmoid(self.shared_expert_gate(x).astype(jnp.float32))
            out = out + (share * self.shared_expert(x)).astype(x.dtype)
        return out, chosen


class RoutedExperts(nnx.Module):
    """The router and the experts of a layer, with a factor of the weight of each expert (None: 1)."""

    def __init__(self, gate: Kernel, experts: ExpertMLPs, numbers: Experts, factors: nnx.Param | None = None):
        self.gate = gate
        self.experts = experts
        self.numbers = numbers
        self.factors = factors

    def __call__(
        self, x: Float[Array, "B *N D"], routed_by: Float[Array, "B *N D"], chosen: Chosen
    ) -> tuple[Float[Array, "B *N D"], Integer[Array, "B *N k"]]:
        """Returns the outputs of the experts for `x`, and the experts that the router selects by `routed_by`, or
        `chosen`."""
        graph, state = nnx.split(self)
        exchanged = splits_over_experts(x.shape[0])
        params = nnx.to_pure_dict(state)
        run = per_device(lambda params, *rows: nnx.merge(graph, params).mix(exchanged, *rows), params, x.shape)
        return run(params, x, routed_by, *(() if chosen is None else (chosen,)))

    def mix(self, exchanged: bool, x: Array, routed_by: Array, chosen: Array | None = None) -> tuple[Array, Array]:
        """Computes the method `__call__` on one device."""
        flat = x.reshape(-1, x.shape[-1])
        k = self.numbers.per_token
        weights, chosen = self.route(routed_by.reshape(flat.shape), None if chosen is None else chosen.reshape(-1, k))
        part = self.experts.gate_proj.kernel.shape[0] < self.numbers.number
        mixed = self._exchange(flat, weights, chosen, exchanged) if part else self._apply(flat, weights, chosen)
        return mixed.astype(x.dtype).reshape(x.shape), chosen.reshape(*x.shape[:-1], k)

    def _apply(self, x: Float[Array, "N D"], weights: Float[Array, "N k"], chosen: Integer[Array, "N k"]) -> Array:
        assigned = chosen.reshape(-1)
        order = jnp.argsort(assigned, stable=True)
        out = self.experts(x[order // self.numbers.per_token], assigned[order])
        back = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0]), unique_indices=True)
        out = out[back].reshape(*chosen.shape, -1)  # the k outputs of a token, in the order of `chosen`
        return jnp.einsum("nkd,nk->nd", out, weights.astype(out.dtype), preferred_element_type=jnp.float32)

    def _exchange(
        self, x: Float[Array, "N D"], weights: Float[Array, "N k"], chosen: Integer[Array, "N k"], exchanged: bool
    ) -> Float[Array, "N D"]:
        """Like `_apply`, on a device that has a part of the experts. `exchanged`: the devices along `ep` have different
        rows, and not the same."""
        dtype = x.dtype
        here = self.experts.gate_proj.kernel.shape[0]
        if exchanged:
            x, weights, chosen = (jax.lax.all_gather(y, "ep", axis=0, tiled=True) for y in (x, weights, chosen))
        own = (chosen - jax.lax.axis_index("ep") * here).reshape(-1)
        own = jnp.where((own >= 0) & (own < here), own, here)
        order = jnp.argsort(own, stable=True)
        size = min(own.size, math.ceil(ROUND * own.size * here / self.numbers.number))
        order = jnp.pad(order, (0, -own.size % size))
        own = jnp.where(jnp.arange(order.size) < own.size, own[order], here)
        graph, params = nnx.split(self.experts)
        rounds = -(-(own < here).sum() // size)
        one = functools.partial(_one_round, graph, size)
        mixed = _summed(one, rounds, (order, own), (nnx.to_pure_dict(params), x, weights)).astype(dtype)
        if exchanged:
            return jax.lax.psum_scatter(mixed, "ep", scatter_dimension=0, tiled=True)
        return jax.lax.psum(mixed, "ep")

    def route(
        self, x: Float[Array, "N D"], chosen: Integer[Array, "N k"] | None = None
    ) -> tuple[Float[Array, "N k"], Integer[Array, "N k"]]:
        """Returns the weights (float32) and indices of the k selected experts of each token. With `chosen`, these are
        the selected experts, and the router gives only the weights."""
        logits = jnp.matmul(x, self.gate.kernel[...].astype(x.dtype), preferred_element_type=jnp.float32)
        if self.gate.bias is not None:
            logits += jnp.broadcast_to(self.gate.bias[...].astype(jnp.float32), logits.shape)
        shares = jax.nn.softmax(logits, axis=-1)
        if chosen is None:
            weights, chosen = jax.lax.top_k(shares, self.numbers.per_token)
        else:
            chosen = chosen.astype(jnp.int32)
            weights = jnp.take_along_axis(shares, chosen, axis=-1)
        if self.numbers.normalised:
            weights /= weights.sum(-1, keepdims=True)
        if self.factors is not None:
            weights *= self.factors[...].astype(jnp.float32)[chosen]
        return weights, chosen


class Router(nnx.Module):
    """The router of experts beside an MLP. It reads vectors that are normalised and multiplied by a learned weight and
    `D ** -0.5`, and multiplies the weight of each expert by a learned factor (`per_expert_scale`)."""

    def __init__(self, config: DecoderConfig, experts: Experts, **kinds: Any):
        self.input_scale = nnx.Param(jnp.ones(config.hidden_size, kinds["param_dtype"]))
        self.proj = Kernel(config.hidden_size, experts.number, bias=False, **kinds)
        self.per_expert_scale = nnx.Param(jnp.ones(experts.number, kinds["param_dtype"]))
        self.epsilon = config.norm_eps

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Returns what `proj` reads."""
        unit = _unit(x.astype(jnp.float32), self.epsilon) * x.shape[-1] ** -0.5
        return (unit * jnp.broadcast_to(self.input_scale[...].astype(jnp.float32), unit.shape)).astype(x.dtype)


def _one_round(graph: Any, size: int, number: Array, indices: Any, inputs: Any) -> Float[Array, "N D"]:
    """Returns what `size` rows of experts, from row `number * size` on, add to the outputs of N tokens (float32).

    Args:
      indices: for each row, in the order of the experts, the index of its token and choice, and its expert.
      inputs: the weights of the experts, the tokens `[N D]` and the weights of their choices `[N k]`.
    """
    params, x, weights = inputs
    place, expert = (jax.lax.dynamic_slice_in_dim(y, number * size, size) for y in indices)
    token = place // weights.shape[1]
    out = nnx.merge(graph, params)(x[token], expert)
    share = weights.reshape(-1)[place].astype(out.dtype)[:, None]
    added = out.astype(jnp.float32) * share.astype(jnp.float32)
    return jnp.zeros(x.shape, jnp.float32).at[token].add(added)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(function: Callable[..., Array], count: Int[Array, ""], indices: Any, inputs: Any) -> Array:
    """Returns the sum of `function(number, indices, inputs)` over `number` below `count`, with a gradient that computes
    `function` again, one number after the other."""
    shape = jax.eval_shape(function, 0, indices, inputs)
    with jax.named_scope(ROUNDS):
        return jax.lax.fori_loop(
            0, count, lambda i, total: total + function(i, indices, inputs), jnp.zeros(shape.shape, shape.dtype)
        )


def _summed_backward(function: Callable[..., Array], saved: Any, cotangent: Array) -> tuple[None, None, Any]:
    count, indices, inputs = saved

    def add(number: Array, total: Any) -> Any:
        _, pull_back = jax.vjp(lambda inputs: function(number, indices, inputs), inputs)
        return jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, pull_back(cotangent)[0])

    with jax.named_scope(ROUNDS):
        total = jax.lax.fori_loop(0, count, add, jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), inputs))
    return None, None, jax.tree.map(lambda x, like: x.astype(like.dtype), total, inputs)


_summed.defvjp(lambda function, *given: (_summed(function, *given), given), _summed_backward)


class Layer(nnx.Module):
    """A decoder layer with norms of the inputs of attention and MLP (`DecoderConfig.input_norms`), of their outputs
    (`post_norms`) or of both. With `post_norms`, `post_attention_layernorm` is the norm of the attention output, not of
    the MLP input. A recurrent layer has `linear_attn` instead of attention."""

    def __init__(self, config: DecoderConfig, index: int, **kinds: Any):
        width = config.hidden_size
        before = config.input_norms
        post = config.post_norms
        self.input_layernorm = norm_of(width, config, **kinds) if before else None
        recurrent = config.is_recurrent(index)
        self.self_attn = None if recurrent else Attention(config, index, **kinds)
        self.linear_attn = GatedDeltaNet(config, **kinds) if recurrent else None
        self.post_attention_layernorm = norm_of(width, config, **kinds)
        self.pre_feedforward_layernorm = norm_of(width, config, **kinds) if before and post else None
        numbers = config.experts if config.has_experts(index) else None
        beside = numbers if numbers is not None and numbers.shared == "beside" else None
        self.mlp: MLP | MixtureOfExperts
        if numbers is not None and beside is None:
            self.mlp = MixtureOfExperts(config, numbers, **kinds)
        else:
            self.mlp = MLP(config, config.mlp_width(index), **kinds)
        self.numbers = beside
        self.gating = _GATINGS[config.activation]
        self.router = None if beside is None else Router(config, beside, **kinds)
        self.experts = None if beside is None else ExpertMLPs(width, beside, self.gating, **kinds)
        self.pre_feedforward_layernorm_2 = None if beside is None else norm_of(width, config, **kinds)
        self.post_feedforward_layernorm_1 = None if beside is None else norm_of(width, config, **kinds)
        self.post_feedforward_layernorm_2 = None if beside is None else norm_of(width, config, **kinds)
        self.post_feedforward_layernorm = norm_of(width, config, **kinds) if post else None
        own = config.layer_input_width
        self.per_layer_input_gate = None if own is None else Linear(width, own, bias=False, **kinds)
        self.per_layer_projection = None if own is None else Linear(own, width, bias=False, **kinds)
        self.post_per_layer_input_norm = None if own is None else norm_of(width, config, **kinds)
        self.layer_scalar = nnx.Param(jnp.ones(1, kinds["param_dtype"])) if config.layer_scalars else None

    def __call__(
        self,
        x: Float[Array, "... D"],
        rope: Rotation | None,
        attend: Attend,
        chosen: Chosen = None,
        own_input: Any = None,
    ) -> tuple[Array, Any, Chosen]:
        """Returns the output of the layer, what `attend` keeps, and the selected experts of each token. These are
        `chosen`, or selected by the router; None without experts. `own_input [... p]` is the part of the layer in the
        second embedding of each token (`DecoderConfig.layer_input_width`)."""
        assert self.self_attn is not None
        mixed, kept = self.self_attn(normed(self.input_layernorm, x), rope, attend)
        x, chosen = self._finish(x, mixed, chosen)
        if self.per_layer_input_gate is not None and self.per_layer_projection is not None:
            own = self.per_layer_projection(self.gating(self.per_layer_input_gate(x), own_input))
            x = x + normed(self.post_per_layer_input_norm, own)
        if self.layer_scalar is not None:
            x = x * jax.lax.stop_gradient(self.layer_scalar[...][0]).astype(x.dtype)
        return x, kept, chosen

    def recur(
        self, x: Float[Array, "... D"], past: Past, chosen: Chosen = None
    ) -> tuple[Float[Array, "... D"], Memory, Chosen]:
        """Returns the output of a recurrent layer, its memory after the last token of each row of `past`, and the
        selected experts of each token."""
        assert self.linear_attn is not None
        mixed, memory = self.linear_attn(normed(self.input_layernorm, x), past)
        x, chosen = self._finish(x, mixed, chosen)
        return x, memory, chosen

    def _finish(
        self, x: Float[Array, "... D"], mixed: Float[Array, "... D"], chosen: Chosen
    ) -> tuple[Float[Array, "... D"], Chosen]:
        if self.post_feedforward_layernorm is None:
            x = x + mixed
            out, chosen = self._feed_forward(self.post_attention_layernorm(x), chosen)
            return x + out, chosen
        x = x + self.post_attention_layernorm(mixed)
        out, selected = self._feed_forward(normed(self.pre_feedforward_layernorm, x), chosen)
        if self.router is not None and self.experts is not None and self.numbers is not None:
            routed = RoutedExperts(self.router.proj, self.experts, self.numbers, self.router.per_expert_scale)
            added, selected = routed(normed(self.pre_feedforward_layernorm_2, x), self.router(x), chosen)
            out = normed(self.post_feedforward_layernorm_1, out) + normed(self.post_feedforward_layernorm_2, added)
        return x + self.post_feedforward_layernorm(out), selected

    def _feed_forward(self, x: Float[Array, "... D"], chosen: Chosen) -> tuple[Float[Array, "... D"], Chosen]:
        return self.mlp(x, chosen) if isinstance(self.mlp, MixtureOfExperts) else (self.mlp(x), None)


def normed(norm: RMSNorm | None, x: Any) -> Any:
    """Returns the normalised `x [... D]`; `x` without a norm."""
    return x if norm is None else norm(x)


def norm_of(width: int, config: DecoderConfig, *, param_dtype: Any, **_: Any) -> RMSNorm:
    return RMSNorm(width, config.norm_eps, offset=config.norm_offset, param_dtype=param_dtype)
