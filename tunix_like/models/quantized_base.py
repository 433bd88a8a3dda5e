"""Quantises the frozen projections of a decoder (`quantization`), and builds decoders with dequantised projections."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from tunix_like.config.schema import QUANTIZATIONS
from tunix_like.errors import UserError, nearest
from tunix_like.models.decoder import Decoder
from tunix_like.models.layers import Linear
from tunix_like.models.quantization import BLOCK, dequantize, quantize


def quantize_base(model: Decoder, kind: str | None) -> Decoder:
    """Replaces the kernel of every projection (`Decoder.projections`) by codes and scales, in place; returns the model.

    Args:
      kind: one of `schema.QUANTIZATIONS`; None: the model is not changed.

    Raises:
      UserError: the kind is unknown, or the NF4 block size does not divide the inputs of a kernel.
    """
    if kind is None:
        return model
    if kind not in QUANTIZATIONS:
        raise UserError(f"model.quantize: unknown value '{kind}'. {nearest(kind, QUANTIZATIONS)}")
    for name, linear in model.projections().items():
        assert linear.kernel is not None, "already quantised"
        if kind == "nf4" and (inputs := linear.kernel.shape[0]) % BLOCK:
            raise UserError(
                f"model.quantize: nf4 has blocks of {BLOCK} inputs, which do not divide the {inputs} inputs of {name}; "
                "use int8."
            )
        codes, scale = quantize(linear.kernel[...], kind)
        linear.kernel = None
        linear.kernel_codes = nnx.Param(codes)
        linear.kernel_scale = nnx.Param(scale)
    model.quantized = kind
    return model


@functools.partial(jax.jit, static_argnames="graphdef")
def dequantized_kernels(graphdef: Any, params: Any) -> dict[str, jax.Array]:
    """Returns the projections of a quantised decoder, in its compute dtype."""
    model: Decoder = nnx.merge(graphdef, params)
    kernels = {}
    for name, linear in model.projections().items():
        assert linear.kernel_codes is not None and linear.kernel_scale is not None
        kernels[name] = dequantize(linear.kernel_codes[...], linear.kernel_scale[...]).astype(model.dtype)
    return kernels


def with_kernels(graphdef: Any, params: Any, kernels: Mapping[str, jax.Array]) -> Any:
    """Returns the parameters of a quantised decoder with `dequantized_kernels`; other arrays are not copied. Adapters
    stay beside the projections. Their graph is `dequantized_graph(graphdef)`."""
    model: Decoder = nnx.merge(graphdef, params)
    for name, linear in model.projections().items():
        _replace_codes(linear, kernels[name])
    return nnx.to_pure_dict(nnx.split(model)[1])


def dequantized_graph(graphdef: Any) -> Any:
    """Returns the graph of a quantised decoder with `dequantized_kernels`."""
    return nnx.split(dequantized_model(nnx.merge(graphdef, [None] * graphdef.num_leaves)))[0]


def dequantized_model(model: Decoder) -> Decoder:
    """Returns a quantised decoder with `dequantized_kernels`, without the values of its projections."""
    made: Decoder = nnx.merge(*nnx.split(model))
    for linear in made.projections().values():
        _replace_codes(linear, None)
    made.quantized = None
    return made


def _replace_codes(linear: Linear, kernel: jax.Array | None) -> None:
    linear.kernel = nnx.Param(kernel)
    linear.kernel_codes = linear.kernel_scale = None
