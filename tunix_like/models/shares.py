"""Computes how many parameters of a model one device of a mesh holds, from the shapes of the parameters."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from tunix_like.config.schema import LoraConfig
from tunix_like.models.config import DecoderConfig
from tunix_like.models.decoder import Decoder
from tunix_like.models.layer_kinds import Adapters
from tunix_like.models.lora import add_lora, part_params
from tunix_like.models.quantization import LEAVES, quantize_base
from tunix_like.models.sharding import param_shapes
from tunix_like.models.weights import Params


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


def parameter_shapes(
    model: DecoderConfig, param_dtype: Any, adapters: Adapters | None, quantized: str | None
) -> Params:
    """Returns the abstract parameters of a decoder. The shapes of two layers differ only if one layer has experts and
    the other has none, so only one layer of each kind is traced."""
    trees: dict[bool, Params] = {}
    for kind in set(map(model.has_experts, range(model.num_layers))):
        experts = model.experts if kind else None
        single = dataclasses.replace(model, num_layers=1, windows=(), rotary=(), experts=experts, expert_layers=())

        def make(single: DecoderConfig = single) -> Decoder:
            return quantize_base(Decoder(single, rngs=nnx.Rngs(0), param_dtype=param_dtype), quantized)

        one = nnx.eval_shape(make)
        if adapters is not None:
            one = add_lora(one, LoraConfig(adapters.rank, adapters.alpha, list(adapters.targets)))
        trees[kind] = nnx.to_pure_dict(nnx.split(one)[1])
    layers = {index: trees[model.has_experts(index)]["layers"][0] for index in range(model.num_layers)}
    return trees[model.has_experts(0)] | {"layers": layers}


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
