"""Lower bounds of the programs of a run: the bytes that a device must read from and write to its main memory in a
training step, and the time for these bytes and for the arithmetic of the model.

What can stay on the chip is not counted: activations, attention scores, logits, and weights that are received from
other devices. All sequences have full length.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tunix_like.models.counts import memory_bytes, parameter_shapes
from tunix_like.models.decoder import Decoder
from tunix_like.models.sharding import param_shapes, prompt_parts, token_parts
from tunix_like.rollout.decoding import cast_matrices
from tunix_like.runtime.accelerators import Accelerator

PEAK = 1.0, 1.0
TYPICAL = (0.45, 0.85), (0.3, 0.4)
"""The upper and the lower end of what other libraries reach by published measurements: shares of the peak arithmetic
and of the peak memory bandwidth."""


def held_bytes(tree: Any) -> float:
    """Returns the bytes of the shards that one device holds of arrays or shapes."""
    shapes = ((x, x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree))
    return float(sum(math.prod(shape) * x.dtype.itemsize for x, shape in shapes))


def weight_bytes(model: Decoder, mesh: Mesh | None, tokens: float, head: bool = True) -> float:
    """Returns the bytes of weights that a device reads in a forward pass over `tokens` tokens.

    These are its shards of all matrices, in the compute dtype or quantised, and one row of the embedding per token. A
    mixture of experts reads at most `per_token` experts per token, also of the other devices along `ep`.

    Args:
      head: whether logits are computed, so that the output matrix (with tied embeddings, the embedding) is read too.
    """
    held = parameter_shapes(model.config, model.param_dtype, model.adapters, model.quantized)
    cast = jax.eval_shape(functools.partial(cast_matrices, model.dtype), held)
    params = param_shapes(cast, mesh)
    config = model.config
    table, second = (held_bytes(params.get(name, {})) for name in ("embed_tokens", "embed_tokens_per_layer"))
    total = held_bytes(params) - second - table * (not (head and config.tie_embeddings))
    total -= 0 if head or config.tie_embeddings else held_bytes(params["lm_head"])
    if config.experts is not None:
        layers = params["layers"].values()
        experts = [part["experts"] for layer in layers for part in (layer, layer["mlp"]) if "experts" in part]
        received = tokens * (1 if mesh is None else mesh.shape.get("ep", 1))
        total -= held_bytes(experts) * max(0.0, 1 - received * config.experts.per_token / config.experts.number)
    rows_of_second = config.layer_input_vocab or 1
    return total + table * min(tokens / config.vocab_size, 1.0) + second * min(tokens / rows_of_second, 1.0)


def prefill_bytes(model: Decoder, mesh: Mesh | None, prompts: int, width: int, calls: int) -> float:
    """Returns the needed bytes of the prefill of `prompts` prompts of `width` tokens in `calls` calls: the weights in
    each call, and the written keys and values, and memories of recurrent layers."""
    tokens = prompts * width / prompt_parts(mesh)
    weights = calls * weight_bytes(model, mesh, tokens / calls, head=False)
    recurrent = _recurrent_layers(model)
    written = tokens * sum(model.config.key_widths) * _number_bytes(model, mesh)
    return weights + written + prompts / prompt_parts(mesh) * recurrent * _memory_bytes(model, mesh)


def decode_bytes(
    model: Decoder, mesh: Mesh | None, group: tuple[int, int], widths: tuple[int, int], rounds: int
) -> float:
    """Returns the needed bytes of sampling `P` prompts x `G` completions (`group`) of `T` tokens after prompts of `S`
    tokens (`widths`), in `rounds` rounds of `T` iterations:

        rounds * T * weights + k * (P * G * (T * (T - 1) / 2 + T) + P * T * S)

    `k` is the bytes of the keys and values of a position that all layers read. In iteration `t`, a completion reads the
    `t` positions that are filled (on average about half of its room) and writes one. The completions of a group read
    their prompt together. In a layer with a window, only the positions in the window are read. In a recurrent layer,
    every iteration reads and writes the memory of a completion; the first one reads that of the prompt instead.
    """
    prompts, size = group
    width, steps = widths
    parts = prompt_parts(mesh)
    weights = rounds * steps * weight_bytes(model, mesh, prompts * size / parts / rounds)
    filled = np.arange(steps)
    own = 0.0
    of_prompt = 0.0
    for layer in range(model.config.num_layers):
        if model.config.is_recurrent(layer):
            continue
        window = model.config.window(layer) or width + steps
        numbers = model.config.kv_heads(layer) * model.config.head_width(layer)
        own += numbers * (np.minimum(filled, window - 1).sum() + steps)
        of_prompt += numbers * np.clip(window - 1 - filled, 0, width).sum()
    cache = _number_bytes(model, mesh) * (prompts * size * own + prompts * of_prompt)
    memories = prompts * size * (2 * steps - 1) + prompts
    return float(weights + (cache + _recurrent_layers(model) * _memory_bytes(model, mesh) * memories) / parts)


def update_bytes(model: Decoder, mesh: Mesh | None, tokens: int, state: Any) -> float:
    """Returns the needed bytes of an optimizer update with `tokens` tokens: the weights in the forward and in the
    backward pass, and the trained weights and their moments (`state`), which are read and written once."""
    return 2 * weight_bytes(model, mesh, tokens / token_parts(mesh)) + 2 * held_bytes(state)


def _number_bytes(model: Decoder, mesh: Mesh | None) -> float:
    """Returns the bytes of one number of a key and one of a value; `tp` splits the key heads."""
    tp = 1 if mesh is None else mesh.shape.get("tp", 1)
    return 2 * jnp.dtype(model.dtype).itemsize / tp


def _recurrent_layers(model: Decoder) -> int:
    return sum(map(model.config.is_recurrent, range(model.config.num_layers)))


def _memory_bytes(model: Decoder, mesh: Mesh | None) -> float:
    if model.config.delta_rule is None:
        return 0.0
    return memory_bytes(model.config, model.dtype, 1 if mesh is None else mesh.shape.get("tp", 1))


def bound_seconds(operations: float, needed: float, kind: Accelerator, shares: tuple[float, float] = PEAK) -> float:
    """Returns the time of a number of operations or of `needed` bytes, whichever takes longer, at `shares` of the peak
    arithmetic and of the peak memory bandwidth of a device."""
    arithmetic, bandwidth = shares
    return max(operations / (arithmetic * kind.operations), needed / (bandwidth * kind.memory_bytes))
