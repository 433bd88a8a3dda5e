"""Weight-only quantisation of frozen projections: int8 with a scale per output channel, or NF4 in blocks of 64.

NF4 is the 4-bit type of QLoRA (arXiv 2305.14314, appendix E): its 16 values are quantiles of a normal distribution, and
the scale of each block is its largest absolute value. Each matrix product dequantises the codes that it uses.
Embedding, head, norms and biases are not quantised.

The order of the NF4 codes in memory (`Codes`) was chosen so that XLA:TPU fuses the dequantisation into a matrix product
if the input has few rows. Decoding then reads each weight from memory as 4 or 8 bits.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, UInt8

from tunix_like.models.sharding import row_axes

BLOCK = 64
"""Number of weights along the input dimension that share a scale in NF4."""

FEW_ROWS = 2048
"""Maximum number of rows per device for which `fused_product` is used on TPU.

With more rows, `fused_product` saves little time and needs more memory. The compiler for TPU v5e gives these numbers of
cycles for a product with a matrix of 4,096 x 12,288:
- nf4, 2 rows: 0.37 million with `fused_product`, 1.55 million with `plain_product`
- nf4, 2,048 rows: 1.85 and 3.12 million
- int8, 32 rows: 0.04 and 0.14 million
- int8, 2,048 rows: 1.66 and 1.61 million
- nf4, 8,192 rows, product and gradient: 16.8 million (403 MB) and 17.7 million (151 MB)
"""

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The 16 values of the 4-bit type NF4 in ascending order, as published. A code is an index into this table."""

NF4_BYTES = 1 / 2 + 4 / BLOCK
"""Bytes of a weight in NF4: half a byte, and its share of the float32 scale."""

LEAVES = ("kernel_codes", "kernel_scale")
"""Names of the two arrays of a quantised kernel."""

Codes = Int8[Array, "I O"] | UInt8[Array, "J O"]
"""Codes of a quantised matrix: int8 values, or bytes with two NF4 codes each (`I = 2 J`). A block of 64 inputs has 32
bytes per output. The low four bits of these bytes are the codes of the first 32 inputs of the block, and the high four
bits are the codes of the other 32 inputs."""


@functools.partial(jax.jit, static_argnames="kind")
def quantize(kernel: Float[Array, "I O"], kind: str) -> tuple[Codes, Float[Array, "B O"]]:
    """Replaces each weight of a matrix `[I, O]` by the nearest code. Returns codes and scales. The scales are `[1, O]`
    for int8 and `[I / 64, O]` for nf4."""
    inputs, outputs = kernel.shape
    wide = kernel.astype(jnp.float32)
    if kind == "int8":
        scale = jnp.abs(wide).max(axis=0, keepdims=True) / 127
        return jnp.round(wide / _not_zero(scale)).astype(jnp.int8), scale
    blocks = wide.reshape(-1, BLOCK, outputs)
    scale = jnp.abs(blocks).max(axis=1, keepdims=True)
    shares = (blocks / _not_zero(scale)).reshape(inputs, outputs)
    codes = sum((shares > (low + high) / 2).astype(jnp.uint8) for low, high in itertools.pairwise(NF4))
    halves = jnp.asarray(codes).reshape(-1, 2, BLOCK // 2, outputs)
    return (halves[:, 0] | (halves[:, 1] << 4)).reshape(-1, outputs), scale[:, 0]


def dequantize(codes: Codes, scale: Float[Array, "B O"]) -> Float[Array, "I O"]:
    """Returns the matrix that codes and scales represent, in float32."""
    if codes.dtype == jnp.int8:
        return codes.astype(jnp.float32) * jnp.broadcast_to(scale, codes.shape)
    low, high = (half.reshape(-1, BLOCK // 2, codes.shape[1]) for half in _half_weights(codes, scale))
    return jnp.stack([low, high], axis=1).reshape(-1, codes.shape[1])


def quantized_product(
    x: Float[Array, "... I"], codes: Codes, scale: Float[Array, "B O"], dtype: Any
) -> Float[Array, "... O"]:
    """Dequantises the matrix W of `codes` and `scale`, and computes `x W` in `dtype`. An optimization barrier makes the
    dequantisation depend on `x`, so the compiler cannot move the dequantisation out of a loop. The backward pass
    dequantises W again, so W is not stored."""
    return _product(x, codes, scale, dtype=dtype, few_rows=_rows_per_device(x) <= FEW_ROWS)


# `jax.checkpoint` alone would compile anew at each call outside of a compiled function: 210 programs for SmolLM2-135M.
@functools.partial(jax.jit, static_argnames=("dtype", "few_rows"), inline=True)
def _product(
    x: Float[Array, "... I"], codes: Codes, scale: Float[Array, "B O"], *, dtype: Any, few_rows: bool
) -> Float[Array, "... O"]:
    def product(x: Array, codes: Array, scale: Array) -> Array:
        x, codes, scale = jax.lax.optimization_barrier((x, codes, scale))
        # The derivative of the barrier needs a tangent of every operand, so the gradient of the scales is stopped
        # here. This gradient would cost the product `x^T dy`.
        scale = jax.lax.stop_gradient(scale)
        plain = functools.partial(plain_product, dtype)
        if not few_rows:
            return plain(x, codes, scale)
        return jax.lax.platform_dependent(x, codes, scale, tpu=functools.partial(fused_product, dtype), default=plain)

    return jax.checkpoint(product)(x, codes, scale)


def _rows_per_device(x: Float[Array, "... I"]) -> int:
    """Returns the number of rows of `x` that one device multiplies. A mesh splits the first axis of `x` over `data` and
    `fsdp` if this axis is divisible."""
    rows = math.prod(x.shape[:-1])
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or x.ndim == 1:
        return rows
    return rows // math.prod(mesh.shape[name] for name in row_axes(mesh, x.shape[0]))


def plain_product(dtype: Any, x: Array, codes: Array, scale: Array) -> Array:
    """Dequantises the whole matrix of `codes` and `scale`, then multiplies `x` by the matrix."""
    return x @ dequantize(codes, scale).astype(dtype)


def fused_product(dtype: Any, x: Array, codes: Array, scale: Array) -> Array:
    """Multiplies `x` by the matrix of `codes` and `scale` so that XLA:TPU fuses the dequantisation into the product.

    If `x` has few rows, the dequantised matrix is then not stored. For int8, `x` is multiplied by the codes, which are
    exact in bfloat16, and the product is multiplied by the scales. For nf4, one product takes the first half of the
    inputs of each block, and a second product takes the other half. The two products accumulate in float32, and their
    sum is computed in float32.
    """
    product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    if codes.dtype == jnp.int8:
        out = product(x, codes.astype(dtype))
        return (out * jnp.broadcast_to(scale[0], out.shape)).astype(dtype)
    low, high = (half.astype(dtype) for half in _half_weights(codes, scale))
    blocks = x.reshape(*x.shape[:-1], -1, 2, BLOCK // 2)
    first, second = (blocks[..., half, :].reshape(*x.shape[:-1], -1) for half in (0, 1))
    return (product(first, low) + product(second, high)).astype(dtype)


def _half_weights(codes: UInt8[Array, "J O"], scale: Float[Array, "B O"]) -> tuple[Array, Array]:
    """Returns the dequantised NF4 weights of the first and of the second half of the inputs of each block of 64. For a
    matrix of I inputs and O outputs, both arrays are `[I / 2, O]` in float32."""
    outputs = codes.shape[1]
    scales = jnp.broadcast_to(scale[:, None], (len(scale), BLOCK // 2, outputs)).reshape(-1, outputs)
    return _nf4(codes & 15) * scales, _nf4(codes >> 4) * scales


def _nf4(codes: Array) -> Array:
    """Looks up 4-bit codes in the table `NF4` of 16 values. Each bit of a code halves the number of possible values. A
    gather would be slow on accelerators."""
    values: list[Any] = [jnp.float32(value) for value in NF4]
    for bit in (1, 2, 4, 8):
        chosen = (codes & bit) > 0
        values = [jnp.where(chosen, high, low) for low, high in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _not_zero(scale: Array) -> Array:
    return jnp.where(scale > 0, scale, 1.0)
