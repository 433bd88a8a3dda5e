"""The values of a decoder config: their names in a Hugging Face config.json, their types and ranges, and the records of
the scaling of rotary frequencies, of experts and of recurrent layers. This module does not import jax."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tunix_like.config.keys import LARGEST_FLOAT, number_problem, shortened
from tunix_like.errors import UserError

HF_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "max_positions": "max_position_embeddings",
}
"""Maps fields of `DecoderConfig` to HF fields. Every family has these fields, and their values need no conversion."""

OPTION_NAMES = {
    "attention_cap": "attn_logit_softcapping",
    "logits_cap": "final_logit_softcapping",
    "query_pre_attn_scalar": "query_pre_attn_scalar",
}
"""Maps optional fields of `DecoderConfig` to HF fields. Only some families have these fields. A value can be None."""

LAYER_NAMES = {
    "full_head_dim": "global_head_dim",
    "full_kv_heads": "num_global_key_value_heads",
    "keys_as_values": "attention_k_eq_v",
    "shared_kv_layers": "num_kv_shared_layers",
    "wide_shared_mlps": "use_double_wide_mlp",
    "layer_input_width": "hidden_size_per_layer_input",
    "layer_input_vocab": "vocab_size_per_layer_input",
}
"""Maps further fields of `DecoderConfig` to HF fields. Only Gemma 4 has these fields."""

ROPE_NAMES = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_positions": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "share": "partial_rotary_factor",
}
"""Maps fields of the scalings below to keys of `rope_scaling` or `rope_parameters`."""
QUERY_SCALING = "llama_4_scaling_beta"
"""The key of `DecoderConfig.query_scaling` there."""
EXPERT_NAMES = {
    "number": "num_experts",
    "per_token": "num_experts_per_tok",
    "intermediate_size": "moe_intermediate_size",
    "normalised": "norm_topk_prob",
}

DELTA_NAMES = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_width": "linear_key_head_dim",
    "value_width": "linear_value_head_dim",
    "taps": "linear_conv_kernel_dim",
}

SHARED = ("gated", "beside")

ROPE_FIELDS = frozenset({"rope_theta", "rope_scaling", "rope_parameters"})

LARGEST = 2**24
MOST = {"num_layers": 1000, "rope_theta": LARGEST_FLOAT, "local_rope_theta": LARGEST_FLOAT}
"""The largest allowed value of a field: its entry in `MOST`, or else `LARGEST`. These limits are far above the values
of published models. They reject a mistyped or corrupted number before memory is allocated."""

SWITCHES = (
    "qkv_bias",
    "o_bias",
    "sinks",
    "qk_norm",
    "joint_qk_norm",
    "input_norms",
    "post_norms",
    "norm_offset",
    "scale_embeddings",
    "output_gate",
    "value_norm",
    "layer_scalars",
)
_BOOLEANS = frozenset({"tie_embeddings", "normalised", "biases", "truncate", *SWITCHES})
_BOOLEANS |= {"keys_as_values", "wide_shared_mlps"}
_INTEGERS = frozenset({"original_max_positions", "truncate"})
_FLOATS = (
    frozenset(
        {
            *("norm_eps", "rope_theta", "local_rope_theta", "partial_rotary_factor", "query_scaling"),
            *OPTION_NAMES,
            *ROPE_NAMES,
        }
    )
    - _INTEGERS
)
# every other field is a positive integer


def spelt(name: str, names: dict[str, str] | None = None) -> str:
    """Returns the field name for an error message: the HF name, followed by the name in `DecoderConfig` if it
    differs."""
    hf = (names or HF_NAMES | OPTION_NAMES | LAYER_NAMES | ROPE_NAMES | {"query_scaling": QUERY_SCALING}).get(
        name, name
    )
    return name if hf == name else f"{hf} ({name})"


def checked(name: str, value: Any, names: dict[str, str] | None = None) -> Any:
    """Returns the value of field `name`; an integer of a float field is converted. Raises UserError, which names the
    field by the table `names` (None: the tables of this module), if its type or range is wrong."""
    if name in _BOOLEANS:
        if not isinstance(value, bool):
            raise UserError(f"{spelt(name, names)} must be true or false, not {value!r}.")
        return value
    kinds, what = ((int, float), "number") if name in _FLOATS else (int, "integer")
    if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0:
        raise UserError(f"{spelt(name, names)} must be a positive {what}, not {shortened(value)}.")
    if value > (most := MOST.get(name, LARGEST)):
        raise UserError(f"{spelt(name, names)} is {shortened(value)}; it must be at most {most}.")
    if problem := number_problem(value):
        raise UserError(f"{spelt(name, names)} is {shortened(value)}; {problem}.")
    return float(value) if name in _FLOATS else value


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3 scaling of the rotary frequencies.

    Wavelengths (in positions) above `original_max_positions / low_freq_factor` are multiplied by `factor`. Wavelengths
    below `original_max_positions / high_freq_factor` are unchanged. Wavelengths in between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            checked(field.name, getattr(self, field.name))
        if self.high_freq_factor <= self.low_freq_factor:
            raise UserError(
                f"high_freq_factor ({self.high_freq_factor}) must be larger than low_freq_factor"
                f" ({self.low_freq_factor})."
            )


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Every wavelength is multiplied by `factor`, which is equivalent to dividing positions by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        checked("factor", self.factor)


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al., arXiv 2309.00071), as in transformers.

    A frequency with less than `beta_slow` turns in `original_max_positions` positions is divided by `factor`. One with
    more than `beta_fast` turns is unchanged. Between these two entries of the frequency table, the share of the
    division grows linearly with the index.

    Attributes:
      truncate: whether the two indices are rounded outwards.
      attention_factor: queries and keys are multiplied by it. None: by the value of `attention`.
      mscale, mscale_all_dim: only read by `attention`, if both are given.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None or field.default is not None:
                checked(field.name, getattr(self, field.name))
        if self.beta_fast < self.beta_slow:
            raise UserError(f"beta_fast ({self.beta_fast}) must not be smaller than beta_slow ({self.beta_slow}).")

    @property
    def attention(self) -> float:
        """The factor of queries and keys: `attention_factor`, or else `0.1 ln(factor) + 1`, or this with `mscale`
        before the logarithm, divided by this with `mscale_all_dim`."""

        def magnitude(scale: float) -> float:
            return 0.1 * scale * math.log(max(self.factor, 1)) + 1

        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is not None and self.mscale_all_dim is not None:
            return magnitude(self.mscale) / magnitude(self.mscale_all_dim)
        return magnitude(1)

    def bounds(self, head_dim: int, theta: float) -> tuple[float, float]:
        """Returns the (fractional) indices of the frequencies with `beta_fast` and with `beta_slow` turns."""

        def index(turns: float) -> float:
            return head_dim * math.log(self.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, head_dim - 1)
        return low, high + 0.001 if high == low else high


@dataclasses.dataclass(frozen=True)
class ProportionalScaling:
    """Only the first `share` of the frequencies, which are those of a whole head divided by `factor`, are not 0, so
    the other entries of a head are not rotated (Gemma 4)."""

    share: float = 1.0
    factor: float = 1.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            checked(field.name, getattr(self, field.name))
        if self.share > 1:
            raise UserError(f"{spelt('share')} is {self.share}; it must be at most 1.")

    def rotated(self, head_dim: int) -> int:
        """Returns the number of frequencies that are not 0."""
        return int(self.share * head_dim // 2)


Scaling = LinearScaling | RopeScaling | YarnScaling | ProportionalScaling


@dataclasses.dataclass(frozen=True)
class Experts:
    """The mixture of experts of an MLP: a router selects some experts for every token.

    Attributes:
      number: number of experts, E.
      per_token: experts per token, k.
      intermediate_size: width of the gated MLP of one expert.
      normalised: whether the weights of the k selected experts are normalised to a sum of 1. If False, the weights are
        the softmax probabilities over all experts.
      biases: whether the router and the projections of the experts have biases.
      shared: how the gated MLP of width `DecoderConfig.intermediate_size` that processes every token in addition is
        added, one of `SHARED`: "gated" multiplies its output by a sigmoid gate (Qwen3.5); "beside" gives both their own
        norms, and the router a norm and learned scales of its inputs and of the experts (Gemma 4). None: no such MLP.
    """

    number: int
    per_token: int
    intermediate_size: int
    normalised: bool
    biases: bool = False
    shared: str | None = None

    def __post_init__(self) -> None:
        if self.shared not in (None, *SHARED):
            raise UserError(f"shared must be one of {', '.join(SHARED)} or None, not {self.shared!r}.")
        for name in (*EXPERT_NAMES, "biases"):
            checked(name, getattr(self, name), EXPERT_NAMES)
        if self.per_token > self.number:
            raise UserError(
                f"{spelt('per_token', EXPERT_NAMES)} is {self.per_token}, but there are {self.number} experts."
            )

    @property
    def index_dtype(self) -> str:
        """The smallest dtype of indices of experts."""
        return "uint8" if self.number <= 256 else "uint16"


@dataclasses.dataclass(frozen=True)
class DeltaRule:
    """The sizes of recurrent layers with the gated delta rule (`delta_rule.py`).

    Attributes:
      key_heads: heads of queries and keys, K.
      value_heads: heads of values and states, H; a multiple of K.
      key_width, value_width: width of one head of keys and of values.
      taps: width of the convolution, in tokens.
    """

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    taps: int

    def __post_init__(self) -> None:
        for name in DELTA_NAMES:
            checked(name, getattr(self, name), DELTA_NAMES)
        if self.value_heads % self.key_heads:
            raise UserError(
                f"linear_num_value_heads is {self.value_heads}, which is not a multiple of linear_num_key_heads ="
                f" {self.key_heads}."
            )
        if self.taps < 2:
            raise UserError(f"linear_conv_kernel_dim is {self.taps}; a convolution over one token is not supported.")

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_width + self.value_heads * self.value_width
