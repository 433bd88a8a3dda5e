"""The supported Hugging Face families, and the conversion of their `config.json` fields from and to `DecoderConfig`.

No other module refers to a family by name. A field that changes the model and is not supported is an error, because an
ignored one would silently give a different model.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from tunix_like.errors import UserError, nearest
from tunix_like.models.fields import (
    DELTA_NAMES,
    EXPERT_FIELDS,
    EXPERT_NAMES,
    HF_NAMES,
    LAYER_NAMES,
    OPTION_NAMES,
    PARTIAL_ROPE_FIELDS,
    QUERY_SCALING,
    ROPE_FIELDS,
    DeltaRule,
    Experts,
    ProportionalScaling,
    Scaling,
    checked,
    experts_of,
    layer_kinds_of,
    nope_fields,
    read_partial_rope,
    read_rope,
    read_two_ropes,
    recurrent_of,
    rope_fields,
    rotary_of,
    windows_of,
)


@dataclasses.dataclass(frozen=True)
class Family:
    """The properties of a family of Hugging Face models.

    Attributes:
      architecture: name of the architecture in config.json.
      adds: the values of those fields of `DecoderConfig` that are equal in all models of the family, by field name.
      options: fields of `DecoderConfig` that a model of the family may set.
      required: fields of `DecoderConfig` that config.json must set, in addition to the fields that every family needs.
        If it is `rope_scaling`, a decoder without one is not exported as this family.
        transformers fills an absent field with a constant of the family's largest model. Here, an absent field is an
        error, because the absence is probably a mistake.
      named: HF fields that must be present but can be null. An absent field is an error, as for `required`.
      defaults: defaults of transformers for fields of `DecoderConfig`, if they differ from the defaults of
        `DecoderConfig`.
      fields: HF fields that are allowed in this family only. Some of these fields are read; the other fields have no
        effect.
      fixed: maps HF fields to their allowed values in this family. An entry replaces the entry of the same field in
        `_FIXED`, which holds the allowed values for all families.
      experts: the fields of `Experts` that are equal in all models of the family; empty: its models have none.
      names: the HF names of fields of `DecoderConfig` whose names differ from `HF_NAMES`.
      packed: the `quant_method` in which weights may be stored; they are dequantised when they are read.
    """

    architecture: str
    adds: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options: frozenset[str] = frozenset({"rope_scaling"})
    required: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fields: frozenset[str] = frozenset()
    fixed: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    experts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    names: dict[str, str] = dataclasses.field(default_factory=dict)
    packed: str | None = None


_GEMMA = {"activation": "gelu_tanh", "post_norms": True, "norm_offset": True, "scale_embeddings": True}
_GEMMA_FIXED = {
    "hidden_act": ("gelu_pytorch_tanh",),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "use_bidirectional_attention": (False,),
}
_GEMMA_FIELDS = frozenset({"hidden_activation", "cache_implementation", "sliding_window_size", *OPTION_NAMES.values()})
_GEMMA_REQUIRED = ("num_kv_heads", "head_dim", "query_pre_attn_scalar")

OLMO3_THETA = 5e5
"""The theta of layers with a window in transformers 5, unless `rope_parameters` has another one. There, the field
`rope_theta` is that of the other layers; in transformers 4, that of all layers."""
_MTP_FIELDS = frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"})
"""Fields of the layers that predict several tokens. As in transformers, these layers are not read."""
_QWEN35 = {"qk_norm": True, "norm_offset": True, "output_gate": True}
_QWEN35_OPTIONS = frozenset({"rope_scaling", "rotary_width", "delta_rule", "recurrent_layers"})
_QWEN35_FIELDS = PARTIAL_ROPE_FIELDS | {*DELTA_NAMES.values(), "full_attention_interval"} | _MTP_FIELDS
_QWEN35_FIXED = {"attn_output_gate": (True,), "mlp_only_layers": ([],), "mamba_ssm_dtype": ("float32",)}

_EXPERTS_OR_NOT = "enable_moe_block"
"""HF field of families whose models may have experts or not."""

FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", {"qkv_bias": True}, required=("num_kv_heads",)),
    "qwen3": Family("Qwen3ForCausalLM", {"qk_norm": True}, required=("num_kv_heads", "head_dim")),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {"qk_norm": True},
        options=frozenset({"rope_scaling", "experts", "expert_layers"}),
        required=("num_kv_heads", "head_dim"),
        named=("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
        fields=EXPERT_FIELDS | {"router_aux_loss_coef"},
        fixed={"output_router_logits": (False,)},
        experts={"biases": False},
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {"qkv_bias": True, "o_bias": True, "sinks": True, "activation": "clamped_swiglu"},
        options=frozenset({"rope_scaling", "windows", "experts"}),
        required=("num_kv_heads", "head_dim", "rope_scaling"),
        named=("num_experts_per_tok", "sliding_window"),
        defaults={"rope_theta": 1.5e5, "norm_eps": 1e-5},
        fields=frozenset({"num_experts", "num_local_experts", "num_experts_per_tok", "experts_per_token"})
        | {"initial_context_length", "router_aux_loss_coef"},
        fixed={
            "attention_bias": (True,),
            "swiglu_alpha": (1.702,),
            "swiglu_limit": (7.0,),
            "output_router_logits": (False,),
        },
        experts={"normalised": True, "biases": True},
        packed="mxfp4",
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        _QWEN35,
        options=_QWEN35_OPTIONS,
        required=("num_kv_heads", "head_dim"),
        fields=_QWEN35_FIELDS,
        fixed=_QWEN35_FIXED,
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        _QWEN35,
        options=_QWEN35_OPTIONS | {"experts"},
        required=("num_kv_heads", "head_dim"),
        named=("num_experts_per_tok", "moe_intermediate_size"),
        fields=_QWEN35_FIELDS
        | {"num_experts", "num_experts_per_tok", "moe_intermediate_size"}
        | {"shared_expert_intermediate_size", "router_aux_loss_coef"},
        fixed=_QWEN35_FIXED | {"output_router_logits": (False,)},
        experts={"normalised": True, "biases": False, "shared": "gated"},
        names={"intermediate_size": "shared_expert_intermediate_size"},
    ),
    "mistral": Family(
        "MistralForCausalLM",
        options=frozenset({"rope_scaling", "windows"}),
        required=("num_kv_heads",),
        named=("sliding_window",),
        fixed={"layer_types": ([],)},  # transformers ignores this field for this family
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        options=frozenset({"rope_scaling", "query_scaling", "windows"}),
        required=("num_kv_heads", "head_dim", "rope_scaling"),
        defaults={"norm_eps": 1e-5},
        fixed={"layer_types": ([],)},
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        {"qk_norm": True, "joint_qk_norm": True, "input_norms": False, "post_norms": True},
        options=frozenset({"rope_scaling", "windows", "local_rope_theta"}),
        named=("sliding_window",),
        defaults={"rope_theta": OLMO3_THETA, "local_rope_theta": OLMO3_THETA, "norm_eps": 1e-5},
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        options=frozenset({"rope_scaling", "rotary"}),
        required=("num_kv_heads",),
        defaults={"rope_theta": 2e6, "tie_embeddings": True},
        fields=frozenset({"no_rope_layers", "no_rope_layer_interval"}),
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _GEMMA,
        options=frozenset({"rope_scaling", "windows", *OPTION_NAMES}),
        required=_GEMMA_REQUIRED,
        named=("sliding_window", "attn_logit_softcapping", "final_logit_softcapping"),
        defaults={"tie_embeddings": True},
        fields=_GEMMA_FIELDS,
        fixed=_GEMMA_FIXED,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _GEMMA | {"qk_norm": True},
        options=frozenset({"rope_scaling", "windows", "local_rope_theta", "logits_cap", "query_pre_attn_scalar"}),
        required=_GEMMA_REQUIRED,
        named=("sliding_window",),
        defaults={"rope_theta": 1e6, "local_rope_theta": 1e4, "tie_embeddings": True},
        fields=_GEMMA_FIELDS | {"rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern"},
        # transformers has this field for Gemma 3, but does not apply the cap
        fixed=_GEMMA_FIXED | {"attn_logit_softcapping": ()},
    ),
    "gemma4_text": Family(
        "Gemma4ForCausalLM",
        {"activation": "gelu_tanh", "post_norms": True, "scale_embeddings": True, "qk_norm": True, "value_norm": True}
        | {"layer_scalars": True, "query_pre_attn_scalar": 1.0},
        options=frozenset({"rope_scaling", "windows", "local_rope_theta", "logits_cap", "experts", *LAYER_NAMES}),
        required=("num_kv_heads", "head_dim"),
        named=("sliding_window", "hidden_size_per_layer_input"),
        defaults={"rope_theta": 1e6, "local_rope_theta": 1e4, "tie_embeddings": True},
        fields=frozenset({"hidden_activation", "final_logit_softcapping", "per_layer_config", *LAYER_NAMES.values()})
        | {_EXPERTS_OR_NOT, "num_experts", "top_k_experts", "moe_intermediate_size"},
        # "vision" lets tokens of an image see each other. transformers does not read the older fields of rotation.
        fixed=_GEMMA_FIXED | {"use_bidirectional_attention": ("vision",), "rope_theta": (), "rope_scaling": ()},
        experts={"normalised": True, "biases": False, "shared": "beside"},
    ),
}
_WINDOWED = {"mistral": 0, "ministral3": 0, "olmo3": 4, "gpt_oss": 2, "gemma2": 2, "gemma3_text": 6, "gemma4_text": 6}
"""Maps families with windows to their default pattern n: every n-th layer has no window. With n = 0, every layer has a
window. The HF field `layer_types` overrides a pattern n > 0."""

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")

_MULTIMODAL = {
    "gemma3": ("gemma3_text",),
    "gemma4": ("gemma4_text",),
    "mistral3": ("mistral", "ministral3"),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
}
"""Maps multimodal families to the families of their `text_config`, first the default. The weights of their other parts
are not read."""

MULTIMODAL = "_multimodal"
"""Field of `DecoderConfig.source` that is True for the decoder of a multimodal model."""

_TEXT_DEFAULTS = {
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
}
"""Defaults of transformers for fields that published `text_config`s omit."""

_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_FROM_OUTSIDE = (*_IDS, "tie_word_embeddings", "torch_dtype", "dtype", "quantization_config")

# Fields that must have one of these values (or be absent or null), because any other value changes the model.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0,),
    "use_sliding_window": (False,),
    "use_mrope": (False,),
    "partial_rotary_factor": (1,),
    "rope_interleaved": (False,),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "chunk_size_feed_forward": (0,),
    "quantization_config": (),  # with a message of its own
    "pruned_heads": ({},),
    "is_causal": (True,),  # False: transformers lets all tokens see each other, as in models of embeddings
    "per_layer_config": ({},),
}
# Fields that do not change the logits. In families without windows, `sliding_window` and `max_window_layers` only have
# an effect with `use_sliding_window`.
_HARMLESS = """
model_type architectures torch_dtype dtype bos_token_id eos_token_id pad_token_id sep_token_id initializer_range
use_cache transformers_version _name_or_path name_or_path sliding_window max_window_layers pretraining_tp
tokenizer_class id2label label2id problem_type return_dict output_attentions output_hidden_states torchscript
is_llama_config transformers.js_config _attn_implementation _attn_implementation_autoset attn_implementation
unsloth_version unsloth_fixed _model_name_or_path unk_token_id auto_map trust_remote_code
"""
_KNOWN = frozenset(HF_NAMES.values()) | ROPE_FIELDS | frozenset(_FIXED) | set(_HARMLESS.split())
_KNOWN |= {"layer_types", MULTIMODAL}
_SPECIAL = frozenset().union(*(family.fields for family in FAMILIES.values())) - {"cache_implementation"}
_REWRITTEN = {MULTIMODAL, "layer_types", "torch_dtype", "dtype", "hidden_act", "quantization_config"}
_NOT_OF_AN_EXPORT = {"auto_map", "trust_remote_code"}
NOT_COPIED = frozenset(HF_NAMES.values()) | ROPE_FIELDS | _SPECIAL | _REWRITTEN | _NOT_OF_AN_EXPORT
"""HF fields in `DecoderConfig.source` that an export does not copy. Some of these fields are written from the fields of
`DecoderConfig` instead; the other fields may be outdated."""


def text_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json fields of the text decoder: all fields, or for a multimodal model those of its
    `text_config`, with defaults for absent fields, with some outer fields (such as the ids of special tokens) and with
    `MULTIMODAL`."""
    allowed = _MULTIMODAL.get(str(fields.get("model_type")))
    if allowed is None:
        return dict(fields)
    text = fields.get("text_config")
    if not isinstance(text, Mapping):
        raise UserError(f"model_type {fields['model_type']!r} needs a mapping text_config, not {text!r}.")
    inner = text.get("model_type", allowed[0])
    if inner not in allowed:
        known = " or ".join(map(repr, allowed))
        raise UserError(f"text_config: model_type {inner!r} is not supported; only {known} is.")
    outside = {name: fields[name] for name in _FROM_OUTSIDE if fields.get(name) is not None}
    return _TEXT_DEFAULTS.get(inner, {}) | dict(text) | outside | {"model_type": inner, MULTIMODAL: True}


def numbers(fields: Mapping[str, Any], only_known: bool) -> dict[str, Any]:
    """Converts HF fields to fields of `DecoderConfig`. As in transformers, a field with the value null counts as
    absent. A required field can be null only if it is in `Family.named`.

    `only_known` is whether a field that no table of this module has is an error. Such fields have no effect in
    transformers either: the tables have all fields that the classes of these families read there."""
    name = str(fields.get("model_type"))
    if name not in FAMILIES:
        hint = nearest(name, [*FAMILIES, *_MULTIMODAL])
        raise UserError(f"model_type {fields.get('model_type')!r} is not a supported family. {hint}")
    family = FAMILIES[name]
    _refuse_unsupported(fields, family, only_known)
    result: dict[str, Any] = {**family.defaults, **family.adds}
    names = HF_NAMES | family.names | {ours: hf for ours, hf in OPTION_NAMES.items() if ours in family.options}
    result |= {ours: checked(ours, fields[hf]) for ours, hf in names.items() if fields.get(hf) is not None}
    result |= _ropes(fields, name, only_known)
    if isinstance(result.get("rope_scaling"), ProportionalScaling) and name != "gemma4_text":
        raise UserError("rope_type 'proportional' is supported for gemma4_text only.")
    missing = [names.get(ours, ours) for ours in (*_REQUIRED, *family.required) if ours not in result]
    missing += [hf for hf in family.named if hf not in fields]
    if missing:
        raise UserError(f"required field(s) missing: {', '.join(missing)}.")
    result.setdefault("num_kv_heads", result["num_heads"])
    if "head_dim" not in result:
        result["head_dim"] = _default_head_dim(result)
    return result | _layers(fields, family, name, result["num_layers"])


def _ropes(fields: Mapping[str, Any], name: str, only_known: bool) -> dict[str, Any]:
    options = FAMILIES[name].options
    if "rotary_width" in options:
        return read_partial_rope(fields, only_known) if fields.get("head_dim") is not None else {}
    if "local_rope_theta" not in options:
        return read_rope(fields, only_known, "query_scaling" in options)
    both = fields.get("rope_parameters")
    if name == "gemma4_text":
        if both is None:
            return {"rope_scaling": ProportionalScaling(0.25)}
        if not isinstance(both, Mapping) or len(both) < 2:
            raise UserError("rope_parameters must have full_attention and sliding_attention.")
    result = read_two_ropes(fields, only_known)
    if name == "gemma4_text" and not isinstance(result.setdefault("rope_scaling", None), ProportionalScaling | None):
        raise UserError("rope_parameters: full_attention must have the rope_type 'default' or 'proportional'.")
    theta = fields.get("rope_theta")
    if name == "olmo3" and theta not in (None, OLMO3_THETA) and "local_rope_theta" not in result:
        raise UserError(
            f"rope_theta = {theta!r} is ambiguous: transformers 4 uses it for all layers, transformers 5 uses"
            f" {OLMO3_THETA:g} for layers with a window. Give rope_parameters with a rope_theta for full_attention and"
            " one for sliding_attention."
        )
    return result


_SCALAR = "ForSequenceClassification"
"""End of the names of architectures that have a head for labels instead of the output matrix."""


def scalar_head(fields: Mapping[str, Any]) -> bool:
    """Returns whether HF fields are of a model whose head gives one number. Raises UserError for several labels."""
    if not any(str(name).endswith(_SCALAR) for name in fields.get("architectures") or ()):
        return False
    labels = fields.get("id2label")
    if not isinstance(labels, Mapping) or len(labels) != 1:
        raise UserError(f"a {_SCALAR} model is supported with one label only, a reward model; id2label is {labels!r}.")
    return True


def head_fields(name: str, scalar: bool) -> dict[str, Any]:
    """Returns the HF fields of the head of a family's model, which gives one number if `scalar` is True."""
    architecture = FAMILIES[name].architecture
    if not scalar:
        return {"architectures": [architecture]}
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {"architectures": [architecture.replace("ForCausalLM", _SCALAR)]} | labels


def _layers(fields: Mapping[str, Any], family: Family, name: str, count: int) -> dict[str, Any]:
    """Reads the fields of `DecoderConfig` that have one value per layer (windows, rotary positions, experts) from HF
    fields, if models of the family can have them."""
    result: dict[str, Any] = {}
    if name in _WINDOWED:
        result["windows"] = windows_of(fields, count, _WINDOWED[name])
    if "full_head_dim" in family.options:
        result |= layer_kinds_of(fields, result["windows"])
    if "rotary" in family.options:
        result["rotary"] = rotary_of(fields, count)
    if "experts" in family.options and fields.get(_EXPERTS_OR_NOT, _EXPERTS_OR_NOT not in family.fields):
        # a family without a field for the width of an expert has it in `intermediate_size`
        width = (
            {} if "moe_intermediate_size" in family.fields else {"moe_intermediate_size": fields["intermediate_size"]}
        )
        result |= experts_of({**fields, **width}, count, family.experts)
    if "delta_rule" in family.options:
        result |= recurrent_of(fields, count)
    return result


def family_of(switches: Mapping[str, Any], options: Mapping[str, Any], preferred: str | None) -> str:
    """Returns a family, if possible `preferred`, whose models all have exactly the settings `switches` and may set all
    fields in `options`, or all have this value of the field. Raises UserError if there is none."""

    def matches(family: Family) -> bool:
        own = {name: value for name, value in options.items() if name in family.adds}
        needed = {"rope_scaling"} & set(family.required)
        with_experts = "experts" in options or _EXPERTS_OR_NOT in family.fields
        return (
            family.adds == {**switches, **own}
            and needed <= options.keys() - own.keys() <= family.options
            and bool(family.experts) == with_experts
        )

    matching = [name for name, family in FAMILIES.items() if matches(family)]
    if not matching:
        together = " and ".join([*switches, *sorted(options)])
        raise UserError(f"no Hugging Face family has {together} together; this decoder cannot be exported.")
    return preferred if preferred in matching else matching[0]


def family_fields(
    name: str,
    windows: tuple[int | None, ...],
    rotary: tuple[bool, ...],
    experts: Experts | None,
    with_experts: tuple[bool, ...],
    recurrent: tuple[DeltaRule | None, tuple[bool, ...]],
    options: Mapping[str, Any],
    rope: tuple[float, Scaling | None],
    local_theta: float,
    query_scaling: float | None,
    no_window: int,
) -> dict[str, Any]:
    """Returns the HF fields that are specific to a family; `windows`, `rotary`, `with_experts` and the layers of
    `recurrent` must have an entry for every layer. `no_window` is the number for a decoder without windows of a family
    with windows. Raises UserError if the family cannot represent the windows or the experts."""
    family = FAMILIES[name]
    gelu = family.adds.get("activation") == "gelu_tanh"
    result: dict[str, Any] = {"hidden_activation": "gelu_pytorch_tanh"} if gelu else {"hidden_act": "silu"}
    result |= {hf: options[ours] for ours, hf in (OPTION_NAMES | LAYER_NAMES).items() if ours in family.options}
    result |= rope_fields(*rope)
    if "query_scaling" in family.options:
        result["rope_scaling"][QUERY_SCALING] = query_scaling or 0.0
    if name == "gemma4_text" or (name == "olmo3" and (rope[0], local_theta) != (OLMO3_THETA, OLMO3_THETA)):
        full = {"rope_type": "default"} | result.pop("rope_scaling", {}) | {"rope_theta": result.pop("rope_theta")}
        local = {"rope_type": "default", "rope_theta": local_theta}
        result["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
    elif "rope_local_base_freq" in family.fields:
        result["rope_local_base_freq"] = local_theta
    if name in _WINDOWED:
        sizes = {window for window in windows if window is not None}
        if len(sizes) > 1 or (_WINDOWED[name] == 0 and len(set(windows)) > 1):
            raise UserError(
                f"model_type {name!r} does not support the windows {windows}; this decoder cannot be exported."
            )
        result["sliding_window"] = next(iter(sizes), None)
        if _WINDOWED[name]:
            # transformers needs a number, also if no layer has a window
            result["sliding_window"] = next(iter(sizes), no_window)
            result["layer_types"] = ["full_attention" if size is None else "sliding_attention" for size in windows]
    if "rotary" in family.options:
        result |= nope_fields(rotary)
    if "experts" in family.options and experts is not None:
        if any(getattr(experts, ours) != value for ours, value in family.experts.items()):
            raise UserError(f"model_type {name!r} does not support {experts}; this decoder cannot be exported.")
        fields = {hf: getattr(experts, ours) for ours, hf in EXPERT_NAMES.items()}
        fields |= {"top_k_experts": experts.per_token}
        fields |= {"decoder_sparse_step": 1, "mlp_only_layers": [i for i, has in enumerate(with_experts) if not has]}
        if "moe_intermediate_size" not in family.fields:
            result["intermediate_size"] = fields["moe_intermediate_size"]
            fields["num_local_experts"] = fields.pop("num_experts")  # as in published files
        result |= {hf: value for hf, value in fields.items() if hf in family.fields}
    if _EXPERTS_OR_NOT in family.fields:
        result[_EXPERTS_OR_NOT] = experts is not None
    rule, layers = recurrent
    if rule is not None:
        result |= {hf: getattr(rule, ours) for ours, hf in DELTA_NAMES.items()}
        result["layer_types"] = ["linear_attention" if one else "full_attention" for one in layers]
    return result


def _refuse_unsupported(fields: Mapping[str, Any], family: Family, only_known: bool) -> None:
    fixed = {name: values for name, values in _FIXED.items() if name not in family.fields} | dict(family.fixed)
    for name, value in fields.items():
        if value is None:
            continue
        if name == "quantization_config":
            if family.packed and _quant_method(value) == family.packed:
                continue
            raise UserError(
                f"{name}: weights quantised with {_quant_method(value)!r} are not supported; use the weights that they "
                "were made from, which model.quantize rounds here."
            )
        if only_known and name not in _KNOWN | family.fields | fixed.keys():
            raise UserError(
                f"field '{name}' = {value!r} is unknown. If it does not change the outputs of the model, remove it;"
                " otherwise the model is not supported."
            )
        if name in fixed and value not in fixed[name]:
            wanted = json.dumps(fixed[name][0]) if fixed[name] else "no such field"
            raise UserError(f"field '{name}' = {value!r} is not supported; only {wanted} is.")
    kinds = fields.get("layer_types") or []
    allowed = {"full_attention"} | ({"sliding_attention"} if "windows" in family.options else set())
    allowed |= {"linear_attention"} if "delta_rule" in family.options else set()
    if not isinstance(kinds, list) or any(kind not in allowed for kind in kinds):
        known = " or ".join(f"'{kind}'" for kind in sorted(allowed))
        raise UserError(f"field 'layer_types' = {kinds!r} is not supported; every layer must be {known}.")


def _quant_method(value: Any) -> Any:
    return value.get("quant_method") if isinstance(value, Mapping) else None


def _default_head_dim(numbers: Mapping[str, Any]) -> int:
    hidden, heads = numbers["hidden_size"], numbers["num_heads"]
    if hidden % heads:
        raise UserError(
            f"hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}, and head_dim is not given; set"
            " head_dim."
        )
    return hidden // heads
