"""Builds optax optimizers from an `OptimizerConfig`: AdamW with warm-up, schedule and gradient clipping."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tunix_like.config.schema import OptimizerConfig
from tunix_like.errors import UserError
from tunix_like.models.config import DecoderConfig
from tunix_like.models.layer_stack import Segment, segments_of, with_single_layers, with_stacked_layers
from tunix_like.models.sharding import param_shapes

Segments = tuple[Segment, ...] | None
"""The patterns of layers whose moments are stacked (see `moment_segments`); None if no moments are stacked."""


def build_schedule(config: OptimizerConfig, total_updates: int | None) -> optax.Schedule:
    """Builds the learning rate schedule, a traceable function of the update number `n`, which starts at 0.

    The peak rate is `config.learning_rate`. During a warm-up of `w` updates, the rate is `(n + 1) / w` times the peak,
    so the first update has a non-zero rate. From update `w` on, the schedules `linear`, `cosine` and `exponential` move
    from the peak to `end_fraction` times the peak at `n = total_updates`, and then stay constant. If the warm-up is as
    long as the run, the rate stays at the peak.

    Raises:
      UserError: the schedule is not `constant`, and `total_updates` is None.
    """
    if config.schedule != "constant" and total_updates is None:
        raise UserError(
            f"{config.section}.schedule: '{config.schedule}' needs the number of updates, but this run has no known "
            "end; set training.max_steps, or use 'constant'."
        )
    warmup = config.warmup_steps
    peak = config.learning_rate
    end = config.end_fraction
    length = max((total_updates or 0) - warmup, 1)

    def learning_rate(update: Any) -> jax.Array:
        progress = jnp.clip((update - warmup) / length, 0.0, 1.0)
        if config.schedule == "linear":
            decay = 1.0 - (1.0 - end) * progress
        elif config.schedule == "cosine":
            decay = end + (1.0 - end) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
        elif config.schedule == "exponential":
            decay = end**progress
        else:
            decay = jnp.ones_like(progress)
        return peak * decay * jnp.minimum((update + 1) / max(warmup, 1), 1.0)

    return learning_rate


def build_optimizer(
    config: OptimizerConfig, total_updates: int | None, stacked: bool = False
) -> optax.GradientTransformation:
    """Builds the optimizer: global-norm clipping, then AdamW with the schedule of `build_schedule`.

    Weight decay applies only to arrays of two or more axes, without the axis of stacked layers (`stacked`). Calls with
    equal settings return the same object, so that compiled programs are reused. The structure of the optimizer state
    depends only on the parameters, so a resumed run can have another `total_updates`.
    """
    return _adamw(config, None if config.schedule == "constant" else total_updates, stacked)


@functools.lru_cache(maxsize=32)
def _adamw(config: OptimizerConfig, total_updates: int | None, stacked: bool) -> optax.GradientTransformation:
    clip = optax.identity() if config.max_grad_norm is None else optax.clip_by_global_norm(config.max_grad_norm)
    adamw = optax.adamw(
        build_schedule(config, total_updates),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=functools.partial(_matrices, stacked=stacked),
    )
    return optax.chain(clip, adamw)


def moment_segments(config: DecoderConfig, optimizer: Any, stacked: bool, copies_base: bool) -> Segments:
    """Returns which layers' optimizer moments are stacked, or None if each layer has its own moments.

    AdamW is elementwise, so stacking does not change its result. An optax transformation of the user can compute with
    whole arrays, so the state of such an optimizer is never stacked.

    Args:
      stacked, copies_base: as in `working_weights`; the moments can be stacked only if the weights of an update are.
    """
    return segments_of(config) if stacked and not copies_base and isinstance(optimizer, OptimizerConfig) else None


def init_optimizer(
    optimizer: optax.GradientTransformation, params: optax.Params, segments: Segments = None
) -> optax.OptState:
    """Initialises the optimizer state. Moments get the shardings of their parameters."""
    # `_init` is defined in the module, because a function that is defined here would be compiled in each call.
    compiled = functools.partial(jax.jit, _init, static_argnums=(0, 2))
    sharding = jax.tree.leaves(params)[0].sharding
    if not isinstance(sharding, NamedSharding):
        state = compiled()(optimizer, params, segments)
        return jax.device_put(state, sharding)  # committed to the device of the parameters
    shardings = _shardings(state_shapes(optimizer, params, segments))
    return compiled(out_shardings=shardings)(optimizer, params, segments)


def _init(optimizer: optax.GradientTransformation, params: optax.Params, segments: Segments) -> optax.OptState:
    return optimizer.init(with_stacked_layers(params, segments))


def state_shapes(
    optimizer: optax.GradientTransformation, params: optax.Params, segments: Segments = None
) -> optax.OptState:
    """Returns the shapes of the optimizer state as `jax.ShapeDtypeStruct`s; `params` are arrays or such structs."""
    params = params if segments is None else _stacked_shapes(params, segments)
    state = jax.eval_shape(optimizer.init, params)
    first = jax.tree.leaves(params)[0].sharding
    if not isinstance(first, NamedSharding):
        return state
    replicated = NamedSharding(first.mesh, PartitionSpec())
    shardings = optax.tree.map_params(
        optimizer, lambda _, param: param.sharding, state, params, transform_non_params=lambda _: replicated
    )
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state, shardings)


def stack_moments(
    optimizer: optax.GradientTransformation, state: optax.OptState, params: optax.Params, segments: Segments
) -> optax.OptState:
    """Converts an optimizer state in which each layer has its own moments to a state with stacked moments."""
    if segments is None:
        return state
    shardings = _shardings(state_shapes(optimizer, params, segments))
    return jax.jit(with_stacked_layers, static_argnums=1, out_shardings=shardings)(state, segments)


def unstack_moments(
    optimizer: optax.GradientTransformation, state: optax.OptState, params: optax.Params, segments: Segments
) -> optax.OptState:
    """Inverse of `stack_moments`. Checkpoints have the result, which every backend can restore."""
    if segments is None:
        return state
    shardings = _shardings(state_shapes(optimizer, params))
    return jax.jit(with_single_layers, static_argnums=1, out_shardings=shardings)(state, segments)


def _shardings(shapes: Any) -> Any:
    """Returns the sharding of each `jax.ShapeDtypeStruct` of a pytree; None for a struct without a sharding."""
    return jax.tree.map(lambda shape: shape.sharding, shapes)


def _stacked_shapes(params: optax.Params, segments: Segments) -> optax.Params:
    shapes = jax.eval_shape(lambda tree: with_stacked_layers(tree, segments), params)
    sharding = jax.tree.leaves(params)[0].sharding
    if not isinstance(sharding, NamedSharding):
        return shapes
    assert isinstance(sharding.mesh, Mesh)
    return param_shapes(shapes, sharding.mesh)


def updates_done(state: optax.OptState) -> int:
    """Returns the number of updates that the optimizer state has counted, without skipped and empty updates."""
    return int(optax.tree.get_all_with_path(state, "count")[0][1])


def _matrices(params: optax.Params, stacked: bool) -> Any:
    def is_matrix(path: Any, x: Any) -> bool:
        return x.ndim - (stacked and path[0] == jax.tree_util.DictKey("layers")) >= 2

    return jax.tree_util.tree_map_with_path(is_matrix, params)
