"""Builds the reference model of the KL, and copies only the weights that must be copied."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from tunix_like.models.decoder import Decoder
from tunix_like.models.lora import without_adapters
from tunix_like.models.sharding import fetch, place_params
from tunix_like.training.trainer import Trainer


class Reference(NamedTuple):
    """Graph and weights of the reference model."""

    graphdef: Any
    params: Any


def make_reference(trainer: Trainer, ref_model: Decoder | None) -> Reference:
    """Returns the reference model: `ref_model`, or the trainer's current model if `ref_model` is None.

    Weights that share memory with trained weights are copied, because trained weights are donated to the compiled step.
    If `ref_model` is None and the adapters are newly initialised, the reference is the frozen weights without adapters,
    and nothing is copied.
    """
    graphdef, params, trained = trainer.graphdef, trainer.params, trainer.state.params
    if ref_model is not None:
        graphdef, state = nnx.split(ref_model)
        params = place_params(nnx.to_pure_dict(state), trainer.mesh)
    elif trainer.frozen and not any(fetch([leaf.any() for leaf in _second_halves(trained)], trainer.mesh)):
        return Reference(without_adapters(graphdef), trainer.frozen)
    donated = set().union(*map(_addresses, jax.tree.leaves(trained)))
    return Reference(graphdef, jax.tree.map(lambda x: jnp.copy(x) if _addresses(x) & donated else x, params))


def _addresses(x: jax.Array) -> set[int]:
    """Returns the memory addresses of the parts of an array that are on this process's devices."""
    return {shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards}


def _second_halves(adapters: Any) -> list[jax.Array]:
    """Returns the B matrices of LoRA adapters. If all B matrices are 0, the adapters do not change the model."""
    leaves = jax.tree_util.tree_leaves_with_path(adapters)
    return [leaf for path, leaf in leaves if path[-1].key == "lora_b"]
