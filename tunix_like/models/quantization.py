"""Weight-only quantisation of frozen projections: int8 with a scale per output channel, or NF4 in blocks of 64.

NF4 is QLoRA's 4-bit type (arXiv 2305.14314, appendix E): the 16 values stand where a normal distribution has equal
shares, and the largest number of each block is kept by its scale. Codes are turned back into numbers where they are
used; embedding, head, norms and biases stay as they are.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int8, UInt8

from tunix_like.config.schema import QUANTIZATIONS
from tunix_like.errors import UserError, nearest

if TYPE_CHECKING:
    from tunix_like.models.decoder import Decoder

BLOCK = 64
"""Numbers along the input dimension that share a scale in NF4."""

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
"""The published values, in rising order: a code is a place in this table."""

LEAVES = ("kernel_codes", "kernel_scale")
"""Names of a quantised kernel's two arrays."""

Codes = Int8[Array, "I O"] | UInt8[Array, "J O"]
"""int8 numbers, or two NF4 codes a byte, `I = 2 J`: an even row in the low half, the odd one after it in the high."""


def check_kind(kind: str) -> None:
    """Raises UserError where there is no such quantisation."""
    if kind not in QUANTIZATIONS:
        raise UserError(f"model.quantize: unknown value '{kind}'. {nearest(kind, QUANTIZATIONS)}")


@functools.partial(jax.jit, static_argnames="kind")
def quantize(kernel: Float[Array, "I O"], kind: str) -> tuple[Codes, Float[Array, "B O"]]:
    """Codes and scales of a matrix: the nearest number that there is, `B` is 1 for int8 and `I / 64` for nf4."""
    inputs, outputs = kernel.shape
    wide = kernel.astype(jnp.float32)
    if kind == "int8":
        scale = jnp.abs(wide).max(axis=0, keepdims=True) / 127
        return jnp.round(wide / _not_zero(scale)).astype(jnp.int8), scale
    blocks = wide.reshape(-1, BLOCK, outputs)
    scale = jnp.abs(blocks).max(axis=1, keepdims=True)
    shares = (blocks / _not_zero(scale)).reshape(inputs, outputs)
    codes = sum((shares > (low + high) / 2).astype(jnp.uint8) for low, high in itertools.pairwise(NF4))
    pairs = jnp.asarray(codes).reshape(-1, 2, outputs)
    return pairs[:, 0] | (pairs[:, 1] << 4), scale[:, 0]


def dequantize(codes: Codes, scale: Float[Array, "B O"]) -> Float[Array, "I O"]:
    """The matrix that codes and scales stand for, float32."""
    if codes.dtype == jnp.int8:
        return codes.astype(jnp.float32) * jnp.broadcast_to(scale, codes.shape)
    outputs = codes.shape[1]
    both = jnp.stack([codes & 15, codes >> 4], axis=1).reshape(-1, BLOCK, outputs)
    return (_nf4(both) * jnp.broadcast_to(scale[:, None], both.shape)).reshape(-1, outputs)


def quantized_product(
    x: Float[Array, "... I"], codes: Codes, scale: Float[Array, "B O"], dtype: Any
) -> Float[Array, "... O"]:
    """`x W` with W turned back here. The barrier ties it to `x`, so that no compiler moves it out of a loop; the
    backward pass does it again instead of keeping it."""

    def product(x: Array, codes: Array, scale: Array) -> Array:
        x, codes, scale = jax.lax.optimization_barrier((x, codes, scale))
        # the barrier's derivative makes a tangent of every operand; that of the scales would cost `x^T dy`
        return x @ dequantize(codes, jax.lax.stop_gradient(scale)).astype(dtype)

    return jax.checkpoint(product)(x, codes, scale)


def quantize_base(model: Decoder, kind: str | None) -> Decoder:
    """Replaces the kernel of every projection in a model's layers by its codes and scales, in place; with None nothing.

    Raises:
      UserError: an unknown kind, or as `check_blocks`.
    """
    if kind is None:
        return model
    check_kind(kind)
    for name, linear in model.projections().items():
        assert linear.kernel is not None, "quantised before"
        check_blocks(name, linear.kernel.shape, kind)
        codes, scale = quantize(linear.kernel[...], kind)
        linear.kernel, linear.kernel_codes, linear.kernel_scale = None, nnx.Param(codes), nnx.Param(scale)
    model.quantized = kind
    return model


def check_blocks(name: str, shape: tuple[int, ...], kind: str) -> None:
    """Raises UserError where blocks of NF4 do not divide the inputs of a kernel."""
    if kind == "nf4" and shape[0] % BLOCK:
        raise UserError(
            f"model.quantize: nf4 has blocks of {BLOCK} along the inputs, which do not divide the {shape[0]} of "
            f"{name}; use int8."
        )


def _nf4(codes: Array) -> Array:
    """The table's values by choices between neighbours, bit by bit: a look-up would be a gather, which no matrix unit
    waits for gladly."""
    values: list[Any] = [jnp.float32(value) for value in NF4]
    for bit in (1, 2, 4, 8):
        chosen = (codes & bit) > 0
        values = [jnp.where(chosen, high, low) for low, high in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _not_zero(scale: Array) -> Array:
    return jnp.where(scale > 0, scale, 1.0)
