"""Quantises the frozen projections of a decoder (`quantization`)."""

from __future__ import annotations

from flax import nnx

from tunix_like.config.schema import QUANTIZATIONS
from tunix_like.errors import UserError, nearest
from tunix_like.models.decoder import Decoder
from tunix_like.models.quantization import BLOCK, quantize


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
