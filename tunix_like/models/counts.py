"""Counts the parameters of a model, the bytes that one device of a mesh holds, and the arithmetic operations (FLOPs) of
forward and backward passes."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Float, Int

from tunix_like.config.schema import LoraConfig
from tunix_like.models.config import Adapters, DecoderConfig
from tunix_like.models.decoder import Decoder
from tunix_like.models.lora import add_lora, part_params
from tunix_like.models.quantization import LEAVES
from tunix_like.models.quantized_base import quantize_base
from tunix_like.models.sharding import param_shapes
from tunix_like.models.weights import Params


def parameter_count(model: DecoderConfig) -> int:
    """Returns the number of parameters of a decoder without adapters."""
    return _size(_shapes(model))


def layer_count(model: DecoderConfig) -> int:
    """Returns the number of parameters of the largest layer of a decoder."""
    return max(_size(layer) for layer in _shapes(model)["layers"].values())


def adapter_count(model: DecoderConfig, adapters: Adapters) -> int:
    """Returns the number of parameters of all adapters of a decoder."""
    return _size(part_params(parameter_shapes(model, jnp.float32, adapters, None))[0])


def _shapes(model: DecoderConfig) -> Params:
    return parameter_shapes(model, jnp.float32, None, None)


def _size(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


@functools.lru_cache(maxsize=16)
def parameter_shapes(
    model: DecoderConfig, param_dtype: Any, adapters: Adapters | None, quantized: str | None
) -> Params:
    """Returns the abstract parameters of a decoder. Only one layer of each kind (`DecoderConfig.kind`) is traced. The
    others have the same shapes. Calls share the returned tree, so it must not be changed."""
    kinds = [model.kind(layer) for layer in range(model.num_layers)]
    firsts = {kind: kinds.index(kind) for kind in kinds}
    places = {kind: place for place, kind in enumerate(firsts)}
    layers = list(firsts.values())
    few = dataclasses.replace(
        model,
        num_layers=len(layers),
        windows=tuple(map(model.window, layers)),
        rotary=(),
        expert_layers=tuple(map(model.has_experts, layers)),
        recurrent_layers=tuple(map(model.is_recurrent, layers)),
        shared_kv_layers=sum(model.kv_source(layer) != layer for layer in layers),
    )

    def make() -> Decoder:
        return quantize_base(Decoder(few, rngs=nnx.Rngs(0), param_dtype=param_dtype), quantized)

    made = nnx.eval_shape(make)
    if adapters is not None:
        made = add_lora(made, LoraConfig(adapters.rank, adapters.alpha, list(adapters.targets)))
    tree = nnx.to_pure_dict(nnx.split(made)[1])
    for name, leaf in (("embed_tokens_per_layer", "embedding"), ("per_layer_model_projection", "kernel")):
        if name in tree:  # the columns of all layers
            one = tree[name][leaf]
            size = one.shape[0], one.shape[1] // len(layers) * model.num_layers
            tree[name] = {leaf: jax.ShapeDtypeStruct(size, one.dtype)}
    return tree | {"layers": {layer: tree["layers"][places[kind]] for layer, kind in enumerate(kinds)}}


def memory_bytes(config: DecoderConfig, dtype: Any, tp: int = 1) -> int:
    """Returns the bytes of the memory of one sequence in a recurrent layer (`delta_rule.Memory`) on each of `tp`
    devices. They split the heads of the state, if their number divides them; each holds the whole tail."""
    rule = config.delta_rule
    assert rule is not None
    state = 4 * rule.value_heads * rule.key_width * rule.value_width
    share = tp if rule.value_heads % tp == 0 else 1
    return state // share + (rule.taps - 1) * rule.channels * jnp.dtype(dtype).itemsize


class Share(NamedTuple):
    """Sizes of the parameters of a model that one device holds.

    Attributes:
      weights, trained: bytes of all parameters, and bytes of the trained parameters.
      plain: number of weights that are not quantised; adapters are not counted.
      embedding: number of weights in the embedding.
      quantized: number of weights in each quantised matrix.
    """

    weights: int
    trained: int
    plain: int
    embedding: int
    quantized: tuple[int, ...]


def share_of(params: Any, mesh: Mesh | None) -> Share:
    """Returns the sizes of the parameters that one device holds when the parameters are sharded over a mesh.

    `params` is a tree of arrays or shapes. A parameter is replicated along a mesh axis that does not shard it.

    Raises:
      UserError: a dimension is not divisible by the size of its mesh axis.
    """
    shapes = param_shapes(params, mesh)
    trained, frozen = part_params(shapes)
    base = jax.tree_util.tree_leaves_with_path(frozen or trained)
    codes = [leaf for path, leaf in base if path[-1].key == LEAVES[0]]
    return Share(
        weights=sum(_count(leaf) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes)),
        trained=sum(_count(leaf) * leaf.dtype.itemsize for leaf in jax.tree.leaves(trained)),
        plain=sum(_count(leaf) for path, leaf in base if path[-1].key not in LEAVES),
        embedding=_count(shapes["embed_tokens"]["embedding"]),
        # two NF4 codes per byte
        quantized=tuple(_count(leaf) * (2 if leaf.dtype == jnp.uint8 else 1) for leaf in codes),
    )


def _count(leaf: Any) -> int:
    """Returns the number of elements of one device's shard of an array."""
    return math.prod(leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape))


def forward_operations(
    config: DecoderConfig, prompt_lengths: Int[np.ndarray, "P"], lengths: Int[np.ndarray, "P G"]
) -> float:
    """Returns the number of multiplications and additions of one forward pass over `P` prompts with `G` completions
    each. Each prompt is computed once.

    The number includes matrix products, attention over the visible tokens, the recurrence of recurrent layers (one
    token at a time), and logits at completion tokens. For a
    mixture of experts, the number includes the router, and for each token the experts that process this token. Adapters
    are not counted; adapters take about one percent of the operations. Completions of length 0 and prompts without
    completions are ignored.
    """
    return sum(_operations(config, prompt_lengths, lengths))


def update_operations(
    config: DecoderConfig, prompt_lengths: Int[np.ndarray, "P"], lengths: Int[np.ndarray, "P G"], frozen: bool
) -> float:
    """Returns the number of operations of a forward and a backward pass together. The backward pass takes twice the
    operations of the forward pass. If the weight matrices are `frozen`, products with them take as many operations in
    the backward pass as in the forward pass, because no weight gradient is computed."""
    matrices, scores = _operations(config, prompt_lengths, lengths)
    return (2 if frozen else 3) * matrices + 3 * scores


def _operations(
    config: DecoderConfig, prompt_lengths: Int[np.ndarray, "P"], lengths: Int[np.ndarray, "P G"]
) -> tuple[float, float]:
    """Returns the number of operations of a forward pass for products with weights, and the number for attention."""
    n = lengths.astype(np.float64)
    s = np.where(n.any(axis=1), prompt_lengths, 0).astype(np.float64)
    inputs = np.maximum(n - 1, 0)  # the last token is never an input
    width = config.hidden_size
    layers = range(config.num_layers)
    rule = config.delta_rule
    recurrent = 0 if rule is None else width * (rule.channels + 2 * rule.value_heads * (rule.value_width + 1))

    def attention(layer: int) -> int:
        products = 1 if config.keys_as_values and config.window(layer) is None else 2
        keys = products * config.kv_heads(layer) if config.kv_source(layer) == layer else 0
        return width * config.head_width(layer) * ((3 if config.output_gate else 2) * config.num_heads + keys)

    mixers = [recurrent if config.is_recurrent(layer) else attention(layer) for layer in layers]
    matrices = sum(mixers) + sum(3 * width * config.active_width(layer) for layer in layers)
    if config.experts is not None:
        routers = sum(config.has_experts(layer) for layer in layers)
        gate = width if config.experts.shared == "gated" else 0
        matrices += (width * config.experts.number + gate) * routers
    matrices += 3 * width * (config.layer_input_width or 0) * config.num_layers
    scores = 0.0
    for layer in layers:
        if rule is not None and config.is_recurrent(layer):  # two reads of the state and its correction
            each = 6 * rule.value_heads * rule.key_width * rule.value_width + 2 * rule.taps * rule.channels
            scores += each * (s.sum() + inputs.sum())
            continue
        window = config.window(layer)
        whole = _pairs(s[:, None] + inputs, window) - _pairs(s, window)[:, None]
        scores += 4 * config.num_heads * config.head_width(layer) * (_pairs(s, window).sum() + whole.sum())
    outputs = 1 if config.scalar_head else config.vocab_size
    return float(2 * matrices * (s.sum() + inputs.sum()) + 2 * width * outputs * n.sum()), float(scores)


def _pairs(count: Float[np.ndarray, "..."], window: int | None) -> Float[np.ndarray, "..."]:
    """Returns the number of attention scores of the first `count` positions. A position has one score with itself and
    one with each earlier position in its window."""
    full = count if window is None else np.minimum(count, window)
    return full * (full + 1) / 2 + (count - full) * full
