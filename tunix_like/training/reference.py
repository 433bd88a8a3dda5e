"""The reference model of the KL: which weights it has, and which of them must be copied."""

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
    """Returns `ref_model`, or where it is None the trainer's model as it is now.

    Weights that share memory with trained ones are copied, because the compiled step takes those over. Of adapters that
    have learnt nothing yet, the reference is the frozen weights without them, and nothing is copied.
    """
    graphdef, params, trained = trainer.graphdef, trainer.params, trainer.state.params
    if ref_model is not None:
        graphdef, state = nnx.split(ref_model)
        params = place_params(nnx.to_pure_dict(state), trainer.mesh)
    elif trainer.frozen and not any(fetch([leaf.any() for leaf in _second_halves(trained)], trainer.mesh)):
        return Reference(without_adapters(graphdef), trainer.frozen)
    taken = set().union(*map(_addresses, jax.tree.leaves(trained)))
    return Reference(graphdef, jax.tree.map(lambda x: jnp.copy(x) if _addresses(x) & taken else x, params))


def _addresses(x: jax.Array) -> set[int]:
    """The memory addresses of an array on this process's devices."""
    return {shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards}


def _second_halves(adapters: Any) -> list[jax.Array]:
    """The matrices B of adapters: where all are 0, adapters add nothing to the frozen weights."""
    found = jax.tree_util.tree_leaves_with_path(adapters)
    return [leaf for path, leaf in found if path[-1].key == "lora_b"]
