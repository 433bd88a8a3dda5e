"""Counts the parameters of a decoder and of its adapters from the configuration of the decoder."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tunix_like.config.schema import LORA_TARGETS
from tunix_like.models.config import DecoderConfig
from tunix_like.models.layer_kinds import Adapters


def parameter_count(model: DecoderConfig) -> int:
    """Returns the number of parameters of a decoder without adapters."""
    layers = sum(map(functools.partial(_layer_count, model), range(model.num_layers)))
    width = model.hidden_size
    return layers + model.vocab_size * width * (1 if model.tie_embeddings else 2) + width


def layer_count(model: DecoderConfig) -> int:
    """Returns the number of parameters of the largest layer of a decoder."""
    return max(map(functools.partial(_layer_count, model), range(model.num_layers)))


def _layer_count(model: DecoderConfig, layer: int) -> int:
    width, head = model.hidden_size, model.head_dim
    query, key = model.num_heads * head, model.num_kv_heads * head
    attention = width * (2 * query + 2 * key) + (4 if model.post_norms else 2) * width
    return attention + (query + 2 * key) * model.qkv_bias + 2 * head * model.qk_norm + _mlp_count(model, layer)


def adapter_count(model: DecoderConfig, adapters: Adapters) -> int:
    """Returns the number of parameters of all adapters of a decoder."""
    return adapters.rank * sum(map(sum, _kernels(model, adapters.targets)))


def _kernels(model: DecoderConfig, targets: Sequence[str] = LORA_TARGETS) -> list[tuple[int, int]]:
    """Returns the input and output widths of every projection (`Decoder.projections`) whose name is in `targets`."""
    width, inner = model.hidden_size, model.intermediate_size
    query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = {"q_proj": (width, query), "k_proj": (width, key), "v_proj": (width, key), "o_proj": (query, width)}
    mlp = {"gate_proj": (width, inner), "up_proj": (width, inner), "down_proj": (inner, width)}
    layers = (attention if model.has_experts(layer) else attention | mlp for layer in range(model.num_layers))
    return [shape for layer in layers for name, shape in layer.items() if name in targets]


def _mlp_count(model: DecoderConfig, layer: int) -> int:
    if (experts := model.experts) is None or not model.has_experts(layer):
        return 3 * model.hidden_size * model.intermediate_size
    return model.hidden_size * experts.number * (3 * experts.intermediate_size + 1)
