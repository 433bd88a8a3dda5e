"""An `OptimizerConfig` as optax: AdamW, a warm-up, a schedule, clipping.

Knows optax and how many optimizer updates the run will make. Does NOT know steps, batches, the model or any checkpoint.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from tunix_like.config.schema import OptimizerConfig
from tunix_like.errors import UserError


def build_schedule(config: OptimizerConfig, total_updates: int | None) -> optax.Schedule:
    """The learning rate of update `n` (from 0), as a function of `n` that can be traced.

    Update `n` of a warm-up of `w` has `(n + 1) / w` of the peak, so no update is lost at rate 0. From update `w` on,
    `linear` and `cosine` fall from the peak to `end_fraction` of it at `n = total_updates` and stay there. Where the
    warm-up is as long as the run, the run ends in it.

    Raises:
      UserError: `linear` or `cosine` without `total_updates`.
    """
    if config.schedule != "constant" and total_updates is None:
        raise UserError(
            f"{config.section}.schedule: '{config.schedule}' needs to know the last update, but this run has no known "
            "end; set training.max_steps, or use 'constant'."
        )
    warmup, peak, end = config.warmup_steps, config.learning_rate, config.end_fraction
    length = max((total_updates or 0) - warmup, 1)

    def learning_rate(update: Any) -> jax.Array:
        progress = jnp.clip((update - warmup) / length, 0.0, 1.0)
        if config.schedule == "linear":
            share = 1.0 - (1.0 - end) * progress
        elif config.schedule == "cosine":
            share = end + (1.0 - end) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
        else:
            share = jnp.ones_like(progress)
        return peak * share * jnp.minimum((update + 1) / max(warmup, 1), 1.0)

    return learning_rate


def follows_total(optimizer: Any) -> bool:
    """Whether the learning rate of an update depends on the number of updates of the run: not if it is constant, nor
    with an `optax.GradientTransformation` of the user's own, which is never told that number."""
    return isinstance(optimizer, OptimizerConfig) and optimizer.schedule != "constant"


def build_optimizer(config: OptimizerConfig, total_updates: int | None) -> optax.GradientTransformation:
    """Returns the same object for equal settings, so that compiled programs are found again.

    Global-norm clipping, then AdamW on `build_schedule`; weight decay on arrays of two or more axes only.

    The structure of the state depends on the parameters alone, so a resumed run may have another `total_updates`.

    Raises:
      UserError: as `build_schedule`.
    """
    return _adamw(config, None if config.schedule == "constant" else total_updates)


@functools.lru_cache(maxsize=32)
def _adamw(config: OptimizerConfig, total_updates: int | None) -> optax.GradientTransformation:
    clip = optax.identity() if config.max_grad_norm is None else optax.clip_by_global_norm(config.max_grad_norm)
    adamw = optax.adamw(
        build_schedule(config, total_updates),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=_matrices,
    )
    return optax.chain(clip, adamw)


def init_optimizer(optimizer: optax.GradientTransformation, params: optax.Params) -> optax.OptState:
    """The optimizer's state, its moments lying where their parameters lie."""
    place = jax.tree.leaves(params)[0].sharding
    if not isinstance(place, NamedSharding):
        return jax.device_put(jax.jit(optimizer.init)(params), place)  # bound to it, as the parameters are
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state_shapes(optimizer, params))
    return jax.jit(optimizer.init, out_shardings=shardings)(params)


def state_shapes(optimizer: optax.GradientTransformation, params: optax.Params) -> optax.OptState:
    """What `init_optimizer` makes, as `jax.ShapeDtypeStruct`s; so may the parameters be."""
    state = jax.eval_shape(optimizer.init, params)
    place = jax.tree.leaves(params)[0].sharding
    if not isinstance(place, NamedSharding):
        return state
    everywhere = NamedSharding(place.mesh, PartitionSpec())
    shardings = optax.tree.map_params(
        optimizer, lambda _, param: param.sharding, state, params, transform_non_params=lambda _: everywhere
    )
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state, shardings)


def updates_done(state: optax.OptState) -> int:
    """How many updates went into the state of a `build_optimizer`; those that were skipped or empty did not."""
    return int(optax.tree.get_all_with_path(state, "count")[0][1])


def _matrices(params: optax.Params) -> Any:
    return jax.tree.map(lambda x: x.ndim >= 2, params)
