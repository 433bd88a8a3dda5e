"""Prepares the weights of an update: matrices in the compute dtype, stacked layers, a separate output matrix.

These weights are computed once per update. All passes over the chunks of completions then read weights in the compute
dtype. On a mesh, the devices also exchange weights in this dtype. Gradients with respect to `WorkingWeights` are added
up in float32. `gradients_of` converts the sums to the structure of the parameters. `WorkingWeights` are a linear
function of the parameters, so the result is the gradient with respect to the parameters.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from flax import nnx
from jaxtyping import Array

from tunix_like.models.decoder import Decoder
from tunix_like.models.layer_stack import Segment, segments_of, stack_layers, unstack_layers
from tunix_like.models.lora import join_params
from tunix_like.models.quantization import LEAVES as QUANTIZED
from tunix_like.models.sharding import constrain_params, split_vocabulary

Params = dict[Any, Any]

_AS_STORED = (*QUANTIZED, "embedding", "lm_head", "score")
"""Names of matrices that keep their dtype: quantised matrices, the embedding, the output matrix and the scalar head.
The embedding keeps its dtype because only some of its rows are read. The output matrix and the scalar head keep theirs
so that their gradients are added up in float32 over the pieces of a chunk of completions. `token_logprobs` casts the
output matrix."""


class WorkingWeights(NamedTuple):
    """The weights that an update computes with. Layers can be stacked.

    Matrices have the compute dtype, except quantised matrices, the embedding and the output matrix (`_AS_STORED`).

    Attributes:
      graphdef: the graph of the decoder with these weights.
      trained, frozen: the trained and the frozen weights.
      segments: describes which layers are stacked (`layer_stack.Segment`); None if no layers are stacked.
    """

    graphdef: Any
    trained: Params
    frozen: Params
    segments: tuple[Segment, ...] | None


def working_weights(graphdef: Any, params: Params, frozen: Params, stacked: bool) -> WorkingWeights:
    """Builds `WorkingWeights` from trained parameters (`params`) and frozen parameters.

    Args:
      stacked: whether layers of the same kind are stacked.
    """
    model: Decoder = nnx.merge(graphdef, join_params(params, frozen))
    segments = segments_of(model.config) if stacked else None
    trained, fixed = (_prepared(part, model, segments) for part in (params, frozen))
    whole = join_params(trained, fixed)
    model.segments = segments
    if segments is not None:
        model.layers = nnx.List([model.layers[i] for s in segments for i in range(s.start, s.start + s.period)])
    if "output_matrix" in whole:
        model.output_matrix = nnx.Param(whole["output_matrix"])
    return WorkingWeights(nnx.split(model)[0], trained, fixed, segments)


def gradients_of(sums: Params, segments: tuple[Segment, ...] | None) -> Params:
    """Converts gradients with respect to `WorkingWeights.trained` to gradients with respect to the parameters.

    `segments` describes which layers' gradients are unstacked; None leaves the layers as they are.
    """
    grads = dict(sums)
    if (output := grads.pop("output_matrix", None)) is not None:
        embedding = grads["embed_tokens"]["embedding"]
        grads["embed_tokens"] = {"embedding": embedding + output.T}
    if segments is not None and "layers" in grads:
        grads["layers"] = unstack_layers(grads["layers"], segments)
    return constrain_params(grads)


def _prepared(tree: Params, model: Decoder, segments: tuple[Segment, ...] | None) -> Params:
    out = jax.tree_util.tree_map_with_path(lambda path, x: _cast(path, x, model.dtype), tree)
    if "layers" in out and segments is not None:
        out["layers"] = stack_layers(out["layers"], segments)
    if "embed_tokens" in out and model.lm_head is None and model.score is None:
        out["output_matrix"] = out["embed_tokens"]["embedding"].T
    return constrain_working(out)


def constrain_working(tree: Params) -> Params:
    """Constrains working weights, or their gradients, to the shardings of the parameters, in compiled functions."""
    by_vocabulary = {name: tree[name] for name in ("output_matrix", "lm_head") if name in tree}
    others = {name: value for name, value in tree.items() if name not in by_vocabulary}
    return constrain_params(others) | jax.tree.map(split_vocabulary, by_vocabulary)


def _cast(path: Any, x: Array, dtype: Any) -> Array:
    kept = any(getattr(key, "key", None) in _AS_STORED for key in path)
    return x if kept or x.ndim < 2 else x.astype(dtype)
