"""Options of `DecoderConfig` of Gemma 4, for tests of programs that treat layers differently."""

from __future__ import annotations

from typing import Any

from tunix_like.models.fields import Experts, ProportionalScaling

_BOTH: dict[str, Any] = dict(
    qk_norm=True,
    value_norm=True,
    post_norms=True,
    layer_scalars=True,
    full_head_dim=16,
    local_rope_theta=100.0,
    rope_scaling=ProportionalScaling(0.25),
)
SHARED_KEYS = _BOTH | dict(
    num_layers=5,
    windows=(3, 3, None, 3, None),
    shared_kv_layers=2,
    wide_shared_mlps=True,
    layer_input_width=8,
    layer_input_vocab=600,
)
"""As Gemma 4 E2B: the last two layers read the keys of the second and of the third one."""
EXPERTS_BESIDE = _BOTH | dict(
    num_layers=4,
    windows=(3, None) * 2,
    full_kv_heads=1,
    keys_as_values=True,
    experts=Experts(number=4, per_token=2, intermediate_size=6, normalised=True, shared="beside"),
)
"""As Gemma 4 26B-A4B."""
