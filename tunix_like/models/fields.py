"""Maps field names of `DecoderConfig` to Hugging Face field names, and checks the type and range of single values."""

from __future__ import annotations

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

ROPE_NAMES = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_positions": "original_max_position_embeddings",
}
EXPERT_NAMES = {
    "number": "num_experts",
    "per_token": "num_experts_per_tok",
    "intermediate_size": "moe_intermediate_size",
    "normalised": "norm_topk_prob",
}

LARGEST, MOST = 2**24, {"num_layers": 1000, "rope_theta": LARGEST_FLOAT, "local_rope_theta": LARGEST_FLOAT}
"""The largest allowed value of a field: its entry in `MOST`, or else `LARGEST`. These limits are far above the values
of published models. They reject a mistyped or corrupted number before memory is allocated."""

SWITCHES = ("qkv_bias", "qk_norm", "post_norms", "norm_offset", "scale_embeddings")
_BOOLEANS = frozenset({"tie_embeddings", "normalised", *SWITCHES})
_FLOATS = frozenset(
    {"norm_eps", "rope_theta", "local_rope_theta", "factor", "low_freq_factor", "high_freq_factor", *OPTION_NAMES}
)  # every other field is a positive integer


def spelt(name: str, names: dict[str, str] | None = None) -> str:
    """Returns the field name for an error message: the HF name, followed by the name in `DecoderConfig` if it
    differs."""
    hf = (names or HF_NAMES | OPTION_NAMES | ROPE_NAMES).get(name, name)
    return name if hf == name else f"{hf} ({name})"


def checked(name: str, value: Any, names: dict[str, str] | None = None) -> Any:
    """Checks the type and range of the value of field `name`, and returns the value. For a float field, an integer is
    converted to float.

    Args:
      names: maps field names to HF names, for the error message; None: the tables of this module.

    Raises:
      UserError: the value is invalid. The message names the field.
    """
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
