"""What a decoder is, in numbers, and how those numbers are read from and written to a Hugging Face `config.json`.

It knows the HF fields of the supported families; a family's name appears here and nowhere else. It knows no jax, no
weights and no tokenizer. A field that is not in the tables below is an error and never a guess, because a silently
ignored field is a silently different model.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunix_like.errors import UserError, nearest

# family -> what it adds to the plain decoder, and the architecture's name in config.json
_FAMILIES: dict[str, dict[str, bool]] = {"llama": {}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# our field -> HF's, for the fields that are read as they stand
_HF_NAMES = {
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
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
# Where transformers fills an absent field with a constant of the family's largest model, absence is more likely an
# accident than a wish for that constant. Elsewhere both are derived from the required fields, in every version.
_ALSO_REQUIRED = {"llama": (), "qwen2": ("num_kv_heads",), "qwen3": ("num_kv_heads", "head_dim")}
_ROPE_NAMES = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_positions": "original_max_position_embeddings",
}
# our fields that are not positive integers
_BOOLEANS = frozenset({"tie_embeddings"})
_FLOATS = frozenset({"norm_eps", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"})
_ROPE_FIELDS = frozenset({"rope_theta", "rope_scaling", "rope_parameters"})

# Fields that must hold one of these values (or be absent or null), because another value is another model.
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
    "quantization_config": (),
    "pruned_heads": ({},),
}
# Fields that do not change the logits. `sliding_window` and `max_window_layers` act only under `use_sliding_window`.
_HARMLESS = frozenset(
    [
        "model_type",
        "architectures",
        "torch_dtype",
        "dtype",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "initializer_range",
        "use_cache",
        "transformers_version",
        "_name_or_path",
        "name_or_path",
        "sliding_window",
        "max_window_layers",
        "pretraining_tp",
        "tokenizer_class",
        "id2label",
        "label2id",
        "problem_type",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "torchscript",
        "is_llama_config",
        "transformers.js_config",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "attn_implementation",
        "unsloth_version",
        "unsloth_fixed",
    ]
)
_KNOWN = frozenset(_HF_NAMES.values()) | _ROPE_FIELDS | frozenset(_FIXED) | _HARMLESS | {"layer_types"}
# What an export does not copy from the config it came from: it is written anew, or may no longer be true.
_NOT_COPIED = frozenset(_HF_NAMES.values()) | _ROPE_FIELDS | {"layer_types", "torch_dtype", "dtype"}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama-3 style stretching of the rotary frequencies.

    Wavelengths (in positions) longer than `original_max_positions / low_freq_factor` are stretched by `factor`, those
    shorter than `original_max_positions / high_freq_factor` stay, those between are blended.

    Raises:
      UserError: a value that is not a positive number, or `high_freq_factor <= low_freq_factor`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        for name in _ROPE_NAMES:
            _checked(name, getattr(self, name))
        if self.high_freq_factor <= self.low_freq_factor:
            raise UserError(
                f"high_freq_factor ({self.high_freq_factor}) must be larger than low_freq_factor"
                f" ({self.low_freq_factor})."
            )


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The numbers of one decoder; hashable, so that it can be static under jit.

    Attributes:
      vocab_size: rows of the embedding table, V.
      hidden_size: model width, D.
      intermediate_size: width of the gated MLP.
      num_layers: blocks.
      num_heads: query heads, H.
      num_kv_heads: key and value heads, K; it divides H.
      head_dim: width of one head, h; even, and not always D / H.
      rope_theta: base of the rotary wavelengths.
      rope_scaling: None, or Llama-3 style stretching.
      norm_eps: added to the mean square in every RMS norm.
      tie_embeddings: the output head is the embedding table.
      qkv_bias: q, k and v projections have a bias.
      qk_norm: an RMS norm on each head of q and k, before the rotation.
      max_positions: longest sequence, in tokens, that the model was made for.
      source: the HF mapping this came from, so that an export keeps the fields that say nothing about the model's
        numbers. It takes no part in comparison or hash, and no number is ever read from it again.

    Raises:
      UserError: a number that makes no decoder.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 1e4
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    max_positions: int = 32768
    source: Mapping[str, Any] | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in (*_HF_NAMES, "rope_theta"):
            _checked(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"{_spelt('num_heads')} is {self.num_heads}, which {_spelt('num_kv_heads')} = {self.num_kv_heads}"
                " does not divide; every key head serves the same number of query heads."
            )
        if self.head_dim % 2:
            raise UserError(f"{_spelt('head_dim')} is {self.head_dim}; rotary positions need an even number.")

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path) -> DecoderConfig:
        """Reads an HF config: a mapping, a folder with a `config.json`, or the path of such a file.

        Raises:
          UserError: no such file or no JSON object in it; a family that is not supported; a missing, unknown or
            unsupported field. The message names the file and the field.
        """
        where, fields = _read(source)
        try:
            return cls(**_numbers(fields), source=fields)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None

    def to_hf(
        self, eos_ids: Sequence[int] | None = None, bos_id: int | None = None, pad_id: int | None = None
    ) -> dict[str, Any]:
        """The `config.json` that transformers loads this decoder from.

        Fields of `source` that are not numbers of the model are kept; the numbers are always this object's own. An id
        that is None keeps what `source` says of it. `dtype` is left to whoever writes the weights.

        Raises:
          UserError: no family has both `qkv_bias` and `qk_norm`.
        """
        extras = {name: True for name in ("qkv_bias", "qk_norm") if getattr(self, name)}
        family = next((name for name, adds in _FAMILIES.items() if adds == extras), None)
        if family is None:
            raise UserError(
                "qkv_bias and qk_norm together are no Hugging Face family; this decoder cannot be exported."
            )
        result = {name: value for name, value in (self.source or {}).items() if name not in _NOT_COPIED}
        result |= {"model_type": family, "architectures": [_ARCHITECTURES[family]], "hidden_act": "silu"}
        result |= {hf: getattr(self, name) for name, hf in _HF_NAMES.items()}
        # The older spelling of the rotary fields: every reader of HF folders knows it, transformers 5 included.
        result["rope_theta"] = self.rope_theta
        if self.rope_scaling is not None:
            scaling = {hf: getattr(self.rope_scaling, name) for name, hf in _ROPE_NAMES.items()}
            result["rope_scaling"] = {"rope_type": "llama3", **scaling}
        eos = None if not eos_ids else eos_ids[0] if len(eos_ids) == 1 else list(eos_ids)
        for name, value in (("eos_token_id", eos), ("bos_token_id", bos_id), ("pad_token_id", pad_id)):
            # Written even when null: transformers fills an absent id with a default of the family's.
            result[name] = result.get(name) if value is None else value
        return result


def _read(source: Mapping[str, Any] | str | Path) -> tuple[str, dict[str, Any]]:
    """What to call the source in messages, and its fields."""
    if isinstance(source, Mapping):
        return "HF config", dict(source)
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file. A model folder needs the Hugging Face config.json of the model."
        ) from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}). Download the file again or mend it.") from None
    if not isinstance(fields, dict):
        raise UserError(f"{path}: expected a JSON object with the model's fields, found {type(fields).__name__}.")
    return str(path), fields


def _numbers(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The constructor's arguments from HF fields; null counts as absent, as it does in transformers."""
    family = fields.get("model_type")
    if family not in _FAMILIES:
        hint = nearest(str(family), _FAMILIES)
        raise UserError(f"model_type {family!r} is not a supported family. {hint}")
    _refuse_unsupported(fields)
    numbers: dict[str, Any] = dict(_FAMILIES[family])
    numbers |= {name: _checked(name, fields[hf]) for name, hf in _HF_NAMES.items() if fields.get(hf) is not None}
    missing = [_HF_NAMES[name] for name in (*_REQUIRED, *_ALSO_REQUIRED[family]) if name not in numbers]
    if missing:
        raise UserError(f"required field(s) missing: {', '.join(missing)}.")
    numbers.setdefault("num_kv_heads", numbers["num_heads"])
    if "head_dim" not in numbers:
        numbers["head_dim"] = _default_head_dim(numbers)
    return numbers | _rope(fields)


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    if fields.get("auto_map") or fields.get("trust_remote_code"):
        raise UserError(
            "auto_map asks for Python code from the model folder (trust_remote_code); none is ever run here. Use a"
            " checkpoint of a supported family in its plain form."
        )
    for name, value in fields.items():
        if value is None:
            continue
        if name not in _KNOWN:
            raise UserError(
                f"field '{name}' = {value!r} is not understood. If it does not change the model's outputs, take it out"
                " of config.json; otherwise the model is not supported."
            )
        if name in _FIXED and value not in _FIXED[name]:
            wanted = json.dumps(_FIXED[name][0]) if _FIXED[name] else "no such field"
            raise UserError(f"field '{name}' = {value!r} is not supported; only {wanted} is.")
    kinds = fields.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise UserError(f"field 'layer_types' = {kinds!r} is not supported; every layer must be 'full_attention'.")


def _default_head_dim(numbers: Mapping[str, Any]) -> int:
    hidden, heads = numbers["hidden_size"], numbers["num_heads"]
    if hidden % heads:
        raise UserError(
            f"hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}; with no head_dim given, it"
            " must be."
        )
    return hidden // heads


def _rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` from the older form (`rope_theta`, `rope_scaling`) or the newer
    (`rope_parameters`)."""
    old, new = fields.get("rope_scaling"), fields.get("rope_parameters")
    if old and new and old != new:
        raise UserError("rope_scaling and rope_parameters are both given and differ; keep one of them.")
    rope = new or old or {}
    if not isinstance(rope, Mapping):
        raise UserError(f"rope_scaling / rope_parameters must be a mapping, not {rope!r}.")
    thetas = [place["rope_theta"] for place in (fields, rope) if place.get("rope_theta") is not None]
    if len(thetas) == 2 and thetas[0] != thetas[1]:
        raise UserError(f"rope_theta is given twice, as {thetas[0]!r} and {thetas[1]!r}; keep one of them.")
    result: dict[str, Any] = {"rope_theta": _checked("rope_theta", thetas[0])} if thetas else {}

    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UserError(f"rope_type {kind!r} is not supported; only 'default' and 'llama3' are.")
    names = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    names |= set(_ROPE_NAMES.values()) if kind == "llama3" else set()
    unknown = sorted(set(rope) - names)
    if unknown or rope.get("partial_rotary_factor", 1) != 1:
        raise UserError(
            f"rotary field(s) not supported with rope_type {kind!r}: {', '.join(unknown) or 'partial_rotary_factor'}."
        )
    if kind == "llama3":
        missing = [hf for hf in _ROPE_NAMES.values() if rope.get(hf) is None]
        if missing:
            raise UserError(f"required field(s) missing for rope_type 'llama3': {', '.join(missing)}.")
        result["rope_scaling"] = RopeScaling(**{name: _checked(name, rope[hf]) for name, hf in _ROPE_NAMES.items()})
    return result


def _spelt(name: str) -> str:
    """Our field's name and, where it differs, HF's: the message must be findable in either place."""
    hf = _HF_NAMES.get(name) or _ROPE_NAMES.get(name) or name
    return name if hf == name else f"{hf} ({name})"


def _checked(name: str, value: Any) -> Any:
    """The value of one of our fields if it is of the field's type; a whole number may stand for a float."""
    if name in _BOOLEANS:
        if not isinstance(value, bool):
            raise UserError(f"{_spelt(name)} must be true or false, not {value!r}.")
        return value
    kinds, what = ((int, float), "number") if name in _FLOATS else (int, "integer")
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
        raise UserError(f"{_spelt(name)} must be a positive {what}, not {value!r}.")
    return float(value) if name in _FLOATS else value
