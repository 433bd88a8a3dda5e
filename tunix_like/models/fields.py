"""Reads the fields of a Hugging Face config.json that are equal in all families: names, types and ranges of single
values, the scaling of rotary frequencies, and windows, rotary positions and experts per layer. This module does not
import jax."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
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
PARTIAL_ROPE_FIELDS = frozenset({"partial_rotary_factor", "mrope_section", "mrope_interleaved"})
EXPERT_FIELDS = frozenset({*EXPERT_NAMES.values(), "num_local_experts", "decoder_sparse_step", "mlp_only_layers"})
_SAME = {"num_experts": ("num_local_experts",), "num_experts_per_tok": ("experts_per_token", "top_k_experts")}
"""Other names of HF fields of experts."""

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
_KINDS: dict[str, type[Scaling] | None] = {
    "default": None,
    "proportional": ProportionalScaling,
    "linear": LinearScaling,
    "llama3": RopeScaling,
    "yarn": YarnScaling,
}


def read_rope(fields: Mapping[str, Any], only_known: bool, query_scaling: bool = False) -> dict[str, Any]:
    """Reads `rope_theta` and `rope_scaling` from the older HF fields of the same names, or from the newer field
    `rope_parameters`. The result has no entry for an absent value.

    `only_known` is whether an entry of the mapping that transformers does not read for its `rope_type` is an error.

    In a family with `query_scaling`, the mapping must have this number, and may have a copy of
    `max_position_embeddings`, which has no effect.
    """
    old, new = fields.get("rope_scaling"), fields.get("rope_parameters")
    if old and new and old != new:
        raise UserError("rope_scaling and rope_parameters are both given and differ; keep one of them.")
    rope = new or old or {}
    if not isinstance(rope, Mapping):
        raise UserError(f"rope_scaling / rope_parameters must be a mapping, not {rope!r}.")
    thetas = [mapping["rope_theta"] for mapping in (fields, rope) if mapping.get("rope_theta") is not None]
    if len(thetas) == 2 and thetas[0] != thetas[1]:
        raise UserError(f"rope_theta is given twice, as {thetas[0]!r} and {thetas[1]!r}; keep one of them.")
    result: dict[str, Any] = {"rope_theta": checked("rope_theta", thetas[0])} if thetas else {}

    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _KINDS:
        raise UserError(
            f"rope_scaling / rope_parameters: rope_type {kind!r} is not supported; only "
            f"{', '.join(map(repr, _KINDS))} are."
        )
    scaling = _KINDS[kind]
    accepted = () if scaling is None else dataclasses.fields(scaling)
    wanted = {field.name: ROPE_NAMES[field.name] for field in accepted}
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *wanted.values()}
    if query_scaling:
        known |= {QUERY_SCALING, "max_position_embeddings"}
    unknown = sorted(map(str, set(rope) - known)) if only_known else []  # a key from YAML may be no str
    partial = "partial_rotary_factor"
    if unknown or (partial not in wanted.values() and rope.get(partial, 1) != 1):
        raise UserError(
            f"rope_scaling / rope_parameters: field(s) not supported with rope_type {kind!r}: "
            f"{', '.join(map(repr, unknown)) or 'partial_rotary_factor'}."
        )
    # transformers counts an mscale of 0 as absent
    given = {
        name: rope[hf]
        for name, hf in wanted.items()
        if rope.get(hf) is not None and not (name in ("mscale", "mscale_all_dim") and rope[hf] == 0)
    }
    missing = [
        wanted[field.name] for field in accepted if field.default is dataclasses.MISSING and field.name not in given
    ]
    if query_scaling and rope.get(QUERY_SCALING) is None:
        missing.append(QUERY_SCALING)
    if missing:
        raise UserError(f"required field(s) missing for rope_type {kind!r}: {', '.join(missing)}.")
    if query_scaling and rope[QUERY_SCALING] != 0:
        result["query_scaling"] = checked("query_scaling", rope[QUERY_SCALING])
    if scaling is not None:
        result["rope_scaling"] = scaling(**{name: checked(name, value) for name, value in given.items()})
    return result


def read_partial_rope(fields: Mapping[str, Any], only_known: bool) -> dict[str, Any]:
    """Reads the rotary fields of a family in which only the first `rotary_width` entries of a head are rotated: a share
    `partial_rotary_factor` of the head, by default a quarter. Fields of multimodal positions have no effect on text."""
    key = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    rope = fields.get(key) or {}
    if not isinstance(rope, Mapping):
        raise UserError(f"{key} must be a mapping, not {rope!r}.")
    plain = {name: value for name, value in rope.items() if name not in PARTIAL_ROPE_FIELDS}
    share = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor", 0.25))
    width = checked("head_dim", fields.get("head_dim")) * checked("partial_rotary_factor", share)
    return read_rope({**fields, key: plain}, only_known) | {"rotary_width": int(width)}


def read_two_ropes(fields: Mapping[str, Any], only_known: bool) -> dict[str, Any]:
    """Reads the rotary fields of a family in which layers with a window have their own theta.

    Older HF folders have this theta in `rope_local_base_freq` (Gemma 3) or nowhere (OLMo 3). Newer folders have it in
    `rope_parameters`, which then has one entry per kind of layer.

    Returns:
      `rope_theta` and `rope_scaling` of the layers without a window, and `local_rope_theta`, the theta of the layers
        with a window. An absent value has no entry.
    """
    both = fields.get("rope_parameters") or {}
    if not isinstance(both, Mapping) or set(both) - {"full_attention", "sliding_attention"}:
        raise UserError(f"rope_parameters must have only full_attention and sliding_attention, not {both!r}.")
    rest = {name: value for name, value in fields.items() if name != "rope_parameters"}
    result = read_rope(rest | {"rope_parameters": both.get("full_attention")}, only_known)
    theta = fields.get("rope_local_base_freq")
    local = read_rope({"rope_theta": theta, "rope_parameters": both.get("sliding_attention")}, only_known)
    if "rope_scaling" in local:
        raise UserError("rope_parameters: a scaling of sliding_attention layers is not supported.")
    scaling = result.get("rope_scaling")
    if isinstance(scaling, YarnScaling) and not scaling.truncate:
        raise UserError("truncate = false is not supported; transformers does not read it in this family.")
    return result | ({"local_rope_theta": local["rope_theta"]} if local else {})


def rope_fields(theta: float, scaling: Scaling | None) -> dict[str, Any]:
    """Returns the rotary fields of config.json in the older form, which all readers support, including transformers
    5."""
    if scaling is None:
        return {"rope_theta": theta}
    kind = next(name for name, scaling_type in _KINDS.items() if scaling_type is type(scaling))
    numbers = {ROPE_NAMES[name]: value for name, value in dataclasses.asdict(scaling).items() if value is not None}
    return {"rope_theta": theta, "rope_scaling": {"rope_type": kind, **numbers}}


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


def recurrent_of(fields: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Reads the fields `delta_rule` and `recurrent_layers` of `DecoderConfig` from the fields of a config.json.

    In `layer_types`, recurrent layers are 'linear_attention'. Without this field, every `full_attention_interval`-th
    layer (by default every fourth) has attention.
    """
    if missing := [hf for hf in DELTA_NAMES.values() if fields.get(hf) is None]:
        raise UserError(f"required field(s) missing: {', '.join(missing)}.")
    rule = DeltaRule(**{ours: checked(ours, fields[hf], DELTA_NAMES) for ours, hf in DELTA_NAMES.items()})
    if kinds := fields.get("layer_types"):
        layers = tuple(kind == "linear_attention" for kind in _per_layer("layer_types", kinds, count))
    else:
        interval = checked("full_attention_interval", fields.get("full_attention_interval") or 4)
        layers = tuple(bool((layer + 1) % interval) for layer in range(count))
    if all(layers):
        raise UserError("every layer is recurrent ('linear_attention'); at least one must have 'full_attention'.")
    return {"delta_rule": rule, "recurrent_layers": layers}


def windows_of(fields: Mapping[str, Any], count: int, pattern: int) -> tuple[int | None, ...]:
    """Returns the window of every layer, in positions; None for a layer without a window.

    In config.json, the field `layer_types` defines which layers have a window. Without this field, every n-th layer has
    no window, and all other layers have a window; n is the field `sliding_window_pattern`, or else `pattern`. With
    `pattern` 0, these fields are not read, and all layers have the same window.
    """
    size = fields.get("sliding_window")
    if not pattern:
        return (None if size is None else checked("sliding_window", size),) * count
    period = fields.get("sliding_window_pattern") or fields.get("_sliding_window_pattern") or pattern
    slides = [bool((layer + 1) % checked("sliding_window_pattern", period)) for layer in range(count)]
    if kinds := fields.get("layer_types"):
        slides = [kind == "sliding_attention" for kind in _per_layer("layer_types", kinds, count)]
    if any(slides) and size is None:
        raise UserError("required field(s) missing: sliding_window, because some layers use 'sliding_attention'.")
    return tuple(checked("sliding_window", size) if slide else None for slide in slides)


def rotary_of(fields: Mapping[str, Any], count: int) -> tuple[bool, ...]:
    """Returns which layers have rotary positions.

    Contrary to its name, the field `no_rope_layers` of config.json has a 1 for each layer with rotary positions, and a
    0 for each other layer. Without this field, every `no_rope_layer_interval`-th layer (by default every fourth) has no
    rotary positions.
    """
    kinds = fields.get("no_rope_layers")
    if kinds is None:
        interval = checked("no_rope_layer_interval", fields.get("no_rope_layer_interval") or 4)
        return tuple(bool((layer + 1) % interval) for layer in range(count))
    kinds = _per_layer("no_rope_layers", kinds, count)
    if any(kind not in (0, 1) for kind in kinds):
        raise UserError(f"no_rope_layers must contain only 0 and 1, not {kinds!r}.")
    return tuple(bool(kind) for kind in kinds)


def nope_fields(rotary: Sequence[bool]) -> dict[str, Any]:
    return {"no_rope_layers": [int(rotates) for rotates in rotary]}


def experts_of(fields: Mapping[str, Any], count: int, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the fields `experts` and `expert_layers` of `DecoderConfig` from the fields of a config.json. `fixed` has
    the fields of `Experts` that all models of the family share.

    Every `decoder_sparse_step`-th layer has experts, except the layers in `mlp_only_layers`. The number of experts is
    in the field `num_experts`, or in `num_local_experts` if transformers 5 wrote the config.json.
    """
    values = {hf: fields.get(hf) for hf in EXPERT_NAMES.values()}
    for name, others in _SAME.items():
        given = {key: fields[key] for key in (name, *others) if fields.get(key) is not None}
        if len(set(given.values())) > 1:
            raise UserError(f"{' and '.join(given)} are both given and differ; keep one of them.")
        values[name] = next(iter(given.values()), None)
    if values["num_experts"] is None:
        raise UserError("required field(s) missing: num_experts.")
    read = {ours: checked(ours, values[hf], EXPERT_NAMES) for ours, hf in EXPERT_NAMES.items() if ours not in fixed}
    experts = Experts(**read, **fixed)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int and 0 <= layer < count for layer in dense):
        raise UserError(f"mlp_only_layers must be a list of layer numbers from 0 to {count - 1}, not {dense!r}.")
    step = checked("decoder_sparse_step", fields.get("decoder_sparse_step") or 1)
    layers = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(count))
    return {"experts": experts, "expert_layers": layers}


def layer_kinds_of(fields: Mapping[str, Any], windows: Sequence[int | None]) -> dict[str, Any]:
    """Reads the fields of `LAYER_NAMES`, and `windows`, whose last entry is None in transformers.

    Width and number of the key heads of layers without a window are in `global_head_dim` and, for `attention_k_eq_v`,
    `num_global_key_value_heads`; or since transformers 5.24 in `per_layer_config`, which has an entry for each of these
    layers.
    """
    if windows[-1] is not None:
        if fields.get("layer_types"):
            raise UserError("layer_types: the last layer must be 'full_attention'; transformers would make it so.")
        windows = (*windows[:-1], None)
    given = {ours: fields[hf] for ours, hf in LAYER_NAMES.items() if fields.get(hf) is not None}
    if (per_layer := fields.get("per_layer_config")) is not None:
        if given.keys() & {"full_head_dim", "full_kv_heads"}:
            raise UserError("per_layer_config and global_head_dim (or num_global_key_value_heads): keep one of them.")
        full = {str(layer) for layer, window in enumerate(windows) if window is None}
        if not isinstance(per_layer, Mapping):
            raise UserError(f"per_layer_config must be a mapping, not {per_layer!r}.")
        entries = list(per_layer.values())
        one = entries[0] if entries and isinstance(entries[0], Mapping) else {}
        # without an entry, all layers have the width and the number of the others
        if {str(key) for key in per_layer} not in (full, set()) or any(entry != one for entry in entries):
            raise UserError("per_layer_config must have equal mappings for all 'full_attention' layers and no others.")
        if unknown := sorted(map(str, one.keys() - {"head_dim", "num_key_value_heads"})):
            raise UserError(f"per_layer_config: {', '.join(unknown)} is not supported.")
        given |= {"full_head_dim": one.get("head_dim", fields["head_dim"])}
        given |= {"full_kv_heads": one["num_key_value_heads"]} if "num_key_value_heads" in one else {}
    elif "full_head_dim" not in given:
        raise UserError("required field(s) missing: global_head_dim, or per_layer_config.")
    elif not given.get("keys_as_values"):
        given.pop("full_kv_heads", None)  # as in transformers
    absent = {name for name in ("shared_kv_layers", "layer_input_width") if given.get(name) == 0}
    if given.get("layer_input_width", 0) == 0:
        absent.add("layer_input_vocab")
    elif "layer_input_vocab" not in given:
        raise UserError("required field(s) missing: vocab_size_per_layer_input.")
    kept = {name: checked(name, value) for name, value in given.items() if name not in absent}
    return kept | {"windows": tuple(windows)}


def _per_layer(name: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, list) or len(value) != count:
        raise UserError(f"{name} must be a list with one entry for each of the {count} layers, not {value!r}.")
    return value
