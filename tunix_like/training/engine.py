"""Builds the in-process engine that samples completions."""

from __future__ import annotations

from typing import Any

from flax import nnx
from jax.sharding import Mesh

from tunix_like.config.schema import RolloutConfig
from tunix_like.data.tokenizer import Tokenizer
from tunix_like.rollout.sampler import Sampler, slot_shape
from tunix_like.training.rollout_layout import concurrent_rows, rollout_mesh


def make_engine(graphdef: Any, tokenizer: Tokenizer, rollout: RolloutConfig, mesh: Mesh | None = None) -> Sampler:
    """Builds the sampler for a model, its tokenizer and the `rollout` section of a config.

    Args:
      graphdef: graph of a `Decoder` (`nnx.split(model)[0]`).

    Raises:
      UserError: the device memory is too small for a single completion, or `rollout.mesh` does not fit.
    """
    model = nnx.merge(graphdef, [None] * graphdef.num_leaves)  # the module without weights
    sampling_mesh = rollout_mesh(model, rollout, mesh, slot_shape)
    return Sampler(
        graphdef,
        rollout.eos_tokens or tokenizer.eos_ids,
        max_prompt_length=rollout.max_prompt_length,
        max_tokens=rollout.max_tokens_to_generate,
        max_concurrent_rows=concurrent_rows(model, rollout, slot_shape, mesh, sampling_mesh),
        mesh=sampling_mesh,
    )
