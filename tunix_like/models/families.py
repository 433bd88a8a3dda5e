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
from tunix_like.models.fields import HF_NAMES, ROPE_FIELDS, SWITCHES, ProportionalScaling
from tunix_like.models.hf_fields import (
    ConfigFile,
    ExpertLayers,
    FixedLocalRope,
    NamedLocalRope,
    Numbers,
    PartialRope,
    ProportionalRopes,
    RecurrentLayers,
    Rope,
    RotaryLayers,
    ScoreDivisor,
    Sizes,
    TwoWay,
    UnlikeLayers,
    Windows,
)

_SIZES = Sizes()


@dataclasses.dataclass(frozen=True)
class Family:
    """The properties of a family of Hugging Face models.

    Attributes:
      architecture: name of the architecture in config.json.
      adds: the values of those fields of `DecoderConfig` that are equal in all models of the family, by field name.
      fields: the conversions between config.json and `DecoderConfig`, in the order in which they are applied.
      required: HF fields that config.json must set, in addition to the fields that every family needs. transformers
        fills an absent field with a constant of the family's largest model. Here, an absent field is an error, because
        the absence is probably a mistake.
      named: HF fields that must be present but can be null. An absent field is an error, as for `required`.
      defaults: defaults of transformers for fields of `DecoderConfig`, if they differ from the defaults of
        `DecoderConfig`.
      text_defaults: defaults of transformers for HF fields that the `text_config` of published multimodal models omits.
      others: further HF fields that are allowed in this family only. Most of them have no effect.
      fixed: maps HF fields to their allowed values in this family. An entry replaces the entry of the same field in
        `_FIXED`, which holds the allowed values for all families.
      writes: HF fields of every export.
      packed: the `quant_method` in which weights may be stored; they are dequantised when they are read.
    """

    architecture: str
    adds: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fields: tuple[TwoWay, ...] = (_SIZES, Rope())
    required: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    text_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    others: frozenset[str] = frozenset()
    fixed: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    writes: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"hidden_act": "silu"})
    packed: str | None = None

    @property
    def options(self) -> frozenset[str]:
        """Fields of `DecoderConfig` that a model of the family may set, apart from those of every family."""
        return frozenset().union(*(field.options for field in self.fields))

    @property
    def needed(self) -> frozenset[str]:
        """Those of `options` without which a decoder is not exported as this family."""
        return frozenset().union(*(field.needed for field in self.fields))

    @property
    def hf(self) -> frozenset[str]:
        """HF fields that are allowed in this family, but not in every family."""
        return self.others.union(*(field.hf for field in self.fields))


_GEMMA = {"activation": "gelu_tanh", "post_norms": True, "norm_offset": True, "scale_embeddings": True}
_GEMMA_ACTIVATION = "gelu_pytorch_tanh"
_GEMMA_FIXED = {
    "hidden_act": (_GEMMA_ACTIVATION,),
    "hidden_activation": (_GEMMA_ACTIVATION,),
    "use_bidirectional_attention": (False,),
}
_GEMMA_WRITES = {"hidden_activation": _GEMMA_ACTIVATION}
_GEMMA_OTHERS = frozenset({"hidden_activation", "cache_implementation", "sliding_window_size"})
_GEMMA_REQUIRED = ("num_key_value_heads", "head_dim", "query_pre_attn_scalar")
_LOGITS_CAP = Numbers({"logits_cap": "final_logit_softcapping"})
_CAPS = Numbers({"attention_cap": "attn_logit_softcapping", "logits_cap": "final_logit_softcapping"})

_OLMO3_THETA = 5e5
_QWEN35 = {"qk_norm": True, "norm_offset": True, "output_gate": True}
# As in transformers, the layers that predict several tokens are not read.
_QWEN35_OTHERS = frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"})
_QWEN35_FIXED = {"attn_output_gate": (True,), "mlp_only_layers": ([],), "mamba_ssm_dtype": ("float32",)}

FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", {"qkv_bias": True}, required=("num_key_value_heads",)),
    "qwen3": Family("Qwen3ForCausalLM", {"qk_norm": True}, required=("num_key_value_heads", "head_dim")),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {"qk_norm": True},
        fields=(
            _SIZES,
            Rope(),
            ExpertLayers({"biases": False}, others=frozenset({"num_local_experts"}), dense_layers=True),
        ),
        required=("num_key_value_heads", "head_dim"),
        named=("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
        others=frozenset({"router_aux_loss_coef"}),
        fixed={"output_router_logits": (False,)},
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {"qkv_bias": True, "o_bias": True, "sinks": True, "activation": "clamped_swiglu"},
        fields=(
            _SIZES,
            Rope(scaled=True),
            Windows(2),
            ExpertLayers(
                {"normalised": True, "biases": True},
                names={"number": "num_local_experts", "intermediate_size": "intermediate_size"},
                others=frozenset({"num_experts", "experts_per_token"}),
            ),
        ),
        required=("num_key_value_heads", "head_dim"),
        named=("num_experts_per_tok", "sliding_window"),
        defaults={"rope_theta": 1.5e5, "norm_eps": 1e-5},
        others=frozenset({"initial_context_length", "router_aux_loss_coef"}),
        fixed={
            "attention_bias": (True,),
            "swiglu_alpha": (1.702,),
            "swiglu_limit": (7.0,),
            "output_router_logits": (False,),
        },
        packed="mxfp4",
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        _QWEN35,
        fields=(_SIZES, PartialRope(), RecurrentLayers()),
        required=("num_key_value_heads", "head_dim"),
        others=_QWEN35_OTHERS,
        fixed=_QWEN35_FIXED,
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        _QWEN35,
        fields=(
            Sizes("shared_expert_intermediate_size"),
            PartialRope(),
            ExpertLayers({"normalised": True, "biases": False, "shared": "gated"}),
            RecurrentLayers(),
        ),
        required=("num_key_value_heads", "head_dim"),
        named=("num_experts_per_tok", "moe_intermediate_size"),
        others=_QWEN35_OTHERS | {"shared_expert_intermediate_size", "router_aux_loss_coef"},
        fixed=_QWEN35_FIXED | {"output_router_logits": (False,)},
    ),
    "mistral": Family(
        "MistralForCausalLM",
        fields=(_SIZES, Rope(), Windows(0)),
        required=("num_key_value_heads",),
        named=("sliding_window",),
        fixed={"layer_types": ([],)},  # transformers ignores this field for this family
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        fields=(_SIZES, Rope(scaled=True, query_scaling=True), Windows(0)),
        required=("num_key_value_heads", "head_dim"),
        defaults={"norm_eps": 1e-5},
        fixed={"layer_types": ([],)},
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        {"qk_norm": True, "joint_qk_norm": True, "input_norms": False, "post_norms": True},
        fields=(_SIZES, FixedLocalRope(_OLMO3_THETA), Windows(4)),
        named=("sliding_window",),
        defaults={"rope_theta": _OLMO3_THETA, "local_rope_theta": _OLMO3_THETA, "norm_eps": 1e-5},
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        fields=(_SIZES, Rope(), RotaryLayers()),
        required=("num_key_value_heads",),
        defaults={"rope_theta": 2e6, "tie_embeddings": True},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _GEMMA,
        fields=(_SIZES, _CAPS, ScoreDivisor(), Rope(), Windows(2)),
        required=_GEMMA_REQUIRED,
        named=("sliding_window", "attn_logit_softcapping", "final_logit_softcapping"),
        defaults={"tie_embeddings": True},
        others=_GEMMA_OTHERS,
        fixed=_GEMMA_FIXED,
        writes=_GEMMA_WRITES,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _GEMMA | {"qk_norm": True},
        fields=(_SIZES, _LOGITS_CAP, ScoreDivisor(), NamedLocalRope(), Windows(6)),
        required=_GEMMA_REQUIRED,
        named=("sliding_window",),
        defaults={"rope_theta": 1e6, "local_rope_theta": 1e4, "tie_embeddings": True},
        text_defaults={
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
        },
        others=_GEMMA_OTHERS | {"sliding_window_pattern", "_sliding_window_pattern"},
        # transformers has this field for Gemma 3, but does not apply the cap
        fixed=_GEMMA_FIXED | {"attn_logit_softcapping": ()},
        writes=_GEMMA_WRITES,
    ),
    "gemma4_text": Family(
        "Gemma4ForCausalLM",
        {"activation": "gelu_tanh", "post_norms": True, "scale_embeddings": True, "qk_norm": True, "value_norm": True}
        | {"layer_scalars": True, "query_pre_attn_scalar": 1.0},
        fields=(
            _SIZES,
            _LOGITS_CAP,
            ProportionalRopes(),
            UnlikeLayers(6),
            ExpertLayers(
                {"normalised": True, "biases": False, "shared": "beside"},
                names={"per_token": "top_k_experts"},
                switch="enable_moe_block",
            ),
        ),
        required=("num_key_value_heads", "head_dim"),
        named=("sliding_window", "hidden_size_per_layer_input"),
        defaults={"rope_theta": 1e6, "local_rope_theta": 1e4, "tie_embeddings": True},
        others=frozenset({"hidden_activation"}),
        # "vision" lets tokens of an image see each other. transformers does not read the older fields of rotation.
        fixed=_GEMMA_FIXED | {"use_bidirectional_attention": ("vision",), "rope_theta": (), "rope_scaling": ()},
        writes=_GEMMA_WRITES,
    ),
}
_PROPORTIONAL = [
    name for name, family in FAMILIES.items() if any(isinstance(each, ProportionalRopes) for each in family.fields)
]
_OPTIONS = frozenset().union(*(family.options for family in FAMILIES.values()))

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
_SPECIAL = frozenset().union(*(family.hf for family in FAMILIES.values())) - {"cache_implementation"}
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
    return {**FAMILIES[inner].text_defaults, **text} | outside | {"model_type": inner, MULTIMODAL: True}


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
    required = [hf for field in family.fields for hf in field.required]
    missing = [hf for hf in (*required, *family.required) if fields.get(hf) is None]
    missing += [hf for hf in family.named if hf not in fields]
    if missing:
        raise UserError(f"required field(s) missing: {', '.join(missing)}.")
    file = ConfigFile(fields, only_known)
    result: dict[str, Any] = {**family.defaults, **family.adds}
    for field in family.fields:
        result |= field.read(file)
    if isinstance(result.get("rope_scaling"), ProportionalScaling) and name not in _PROPORTIONAL:
        raise UserError(f"rope_type 'proportional' is supported for {' and '.join(_PROPORTIONAL)} only.")
    result.setdefault("num_kv_heads", result["num_heads"])
    if "head_dim" not in result:
        result["head_dim"] = _default_head_dim(result)
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


def _head_fields(name: str, scalar: bool) -> dict[str, Any]:
    """Returns the HF fields of the head of a family's model, which gives one number if `scalar` is True."""
    architecture = FAMILIES[name].architecture
    if not scalar:
        return {"architectures": [architecture]}
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {"architectures": [architecture.replace("ForCausalLM", _SCALAR)]} | labels


def family_of(changed: Mapping[str, Any], preferred: str | None) -> str:
    """Returns a family, if possible `preferred`, whose models can have the fields `changed` of `DecoderConfig`: those
    that do not have the default. Raises UserError if there is none."""
    switches = {name: value for name, value in changed.items() if name in (*SWITCHES, "activation")}
    options = {name: value for name, value in changed.items() if name in _OPTIONS}

    def matches(family: Family) -> bool:
        own = {name: value for name, value in options.items() if name in family.adds}
        return family.adds == {**switches, **own} and family.needed <= options.keys() - own.keys() <= family.options

    matching = [name for name, family in FAMILIES.items() if matches(family)]
    if not matching:
        together = " and ".join([*switches, *sorted(options)])
        raise UserError(f"no Hugging Face family has {together} together; this decoder cannot be exported.")
    return preferred if preferred in matching else matching[0]


def written(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the HF fields of a family's model with the fields `values` of `DecoderConfig` (`TwoWay.write`). Raises
    UserError if the family cannot represent the windows or the experts."""
    family = FAMILIES[name]
    result = {"model_type": name} | _head_fields(name, values["scalar_head"]) | dict(family.writes)
    for field in family.fields:
        if (what := field.unsupported(values)) is not None:
            raise UserError(f"model_type {name!r} does not support {what}; this decoder cannot be exported.")
        result |= field.write(values)
    return result


def _refuse_unsupported(fields: Mapping[str, Any], family: Family, only_known: bool) -> None:
    fixed = {name: values for name, values in _FIXED.items() if name not in family.hf} | dict(family.fixed)
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
        if only_known and name not in _KNOWN | family.hf | fixed.keys():
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
