"""Builds optax optimizers from an `OptimizerConfig`, with warm-up, schedule, weight decay and gradient clipping."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tunix_like.config.schema import OptimizerConfig
from tunix_like.errors import UserError
from tunix_like.models.config import DecoderConfig
from tunix_like.models.layer_stack import Segment, segments_of, with_single_layers, with_stacked_layers
from tunix_like.models.sharding import param_shapes

Segments = tuple[Segment, ...] | None
"""The patterns of layers whose moments are stacked (see `moment_segments`); None if no moments are stacked."""

_MUON_DECAY = 0.95
"""Decay of Muon's momentum in its published recipes (github.com/KellerJordan/Muon, arXiv 2502.16982)."""
_MUON_RMS = 0.2
"""Root mean square of Muon's updates before the learning rate, the one that AdamW's updates have (arXiv 2502.16982,
section 2.2), so that one learning rate serves the parameters of both."""
_MUON_AXES = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
"""Kernels are `[..., inputs, outputs]`. The axes of experts and of stacked layers come first, and Muon treats each of
their matrices alone."""
_HEADS = ("lm_head", "score")


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
    """Builds the optimizer: global-norm clipping, the direction of `config.name`, decoupled weight decay (arXiv
    1711.05101), and the schedule of `build_schedule`.

    Weight decay applies only to arrays of two or more axes, without the axis of stacked layers (`stacked`). Calls with
    equal settings return the same object, so that compiled programs are reused. The structure of the optimizer state
    depends only on the parameters, so a resumed run can have another `total_updates`.
    """
    return _built(config, None if config.schedule == "constant" else total_updates, stacked)


@functools.lru_cache(maxsize=32)
def _built(config: OptimizerConfig, total_updates: int | None, stacked: bool) -> optax.GradientTransformation:
    clip = optax.identity() if config.max_grad_norm is None else optax.clip_by_global_norm(config.max_grad_norm)
    direction = _direction(config)
    if config.moments_dtype != "float32":
        direction = _with_moments_in(jnp.dtype(config.moments_dtype), direction)
    # The states of two chains, as `optax.adamw` in a chain has them, are the structure in older checkpoints.
    descent = optax.chain(
        direction,
        optax.add_decayed_weights(config.weight_decay, functools.partial(_matrices, stacked=stacked)),
        optax.scale_by_learning_rate(build_schedule(config, total_updates)),
    )
    return optax.chain(clip, descent)


def _direction(config: OptimizerConfig) -> optax.GradientTransformation:
    """Returns the transformation of gradients to updates of learning rate -1.

    - `lion`: arXiv 2302.06675.
    - `adafactor`: arXiv 1804.04235 without momentum and without the factor of the parameter's scale, so that the
      learning rate is that of other optimizers.
    - `muon`: Nesterov momentum, orthogonalised, for the matrices of `_muon_labels`, AdamW for all other parameters.
    """
    if config.name == "lion":
        return optax.scale_by_lion(config.b1, config.b2)
    if config.name == "adafactor":
        return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
    adam = optax.scale_by_adam(config.b1, config.b2, config.eps)
    if config.name == "adamw":
        return adam
    momentum = optax.contrib.scale_by_muon(beta=_MUON_DECAY, weight_dimension_numbers=_muon_axes)
    muon = optax.chain(momentum, optax.stateless(_with_rms))
    return optax.partition({"muon": muon, "adamw": adam}, functools.partial(_muon_labels, section=config.section))


def _muon_labels(params: optax.Params, section: str) -> Any:
    """Returns `muon` for the kernels of layers, in the tree of the parameters, and `adamw` for all others: embeddings,
    heads, norms, biases, convolutions and adapters.

    Raises:
      UserError: there is no such kernel, because only adapters are trained.
    """

    def label(path: Any, x: Any) -> str:
        return "muon" if path[-1].key == "kernel" and path[0].key not in _HEADS else "adamw"

    labels = jax.tree_util.tree_map_with_path(label, params)
    found = jax.tree.leaves(labels)
    if found and "muon" not in found:
        raise UserError(
            f"{section}.name: muon is for matrices of the model, but only adapters are trained; use adamw or lion."
        )
    return labels


def _muon_axes(params: optax.Params) -> Any:
    return jax.tree.map(lambda _: _MUON_AXES, params)


def _with_rms(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
    """Scales updates with singular values of about 1 to a root mean square of `_MUON_RMS`."""
    return jax.tree.map(lambda x: _MUON_RMS * max(x.shape[-2:]) ** 0.5 * x, updates)


def _with_moments_in(dtype: Any, inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns `inner` with moments that are computed in float32 and stored in `dtype`, rounded to the nearest.

    `mu_dtype` of optax applies to the first moment only, and multiplies the old moment in that dtype.
    """

    def cast(state: optax.OptState, dtype: Any) -> optax.OptState:
        return optax.tree.map_params(inner, lambda x: x.astype(dtype), state)

    def init(params: optax.Params) -> optax.OptState:
        return cast(inner.init(params), dtype)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        updates, state = inner.update(updates, cast(state, jnp.float32), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(init, update)


def critic_optimizer(optimizer: Any, learning_rate: float) -> OptimizerConfig:
    """Returns the optimizer of a critic: that of the policy with another learning rate, and AdamW if that of the policy
    is an optax transformation or unset."""
    settings = optimizer if isinstance(optimizer, OptimizerConfig) else OptimizerConfig()
    return dataclasses.replace(settings, learning_rate=learning_rate)


def moment_segments(config: DecoderConfig, optimizer: Any, stacked: bool) -> Segments:
    """Returns which layers' optimizer moments are stacked, or None if each layer has its own moments.

    Stacking changes no result of an optimizer that computes with each number, or as Muon with each matrix, alone.
    Adafactor and an optax transformation of the user can compute with whole arrays, so their state is never stacked.

    Args:
      stacked: as in `working_weights`; the moments can be stacked only if the weights of an update are.
    """
    separable = isinstance(optimizer, OptimizerConfig) and optimizer.name != "adafactor"
    return segments_of(config) if stacked and separable else None


def init_optimizer(
    optimizer: optax.GradientTransformation, params: optax.Params, segments: Segments = None
) -> optax.OptState:
    """Initialises the optimizer state, with the shardings of `state_shapes`."""
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
    """Returns the shapes of the optimizer state as `jax.ShapeDtypeStruct`s; `params` are arrays or such structs.

    On a mesh, moments have the shardings of their parameters. Arrays of other shapes, such as the sums over rows and
    over columns of Adafactor, are small and replicated.
    """
    params = params if segments is None else _stacked_shapes(params, segments)
    state = jax.eval_shape(optimizer.init, params)
    first = jax.tree.leaves(params)[0].sharding
    if not isinstance(first, NamedSharding):
        return state
    replicated = NamedSharding(first.mesh, PartitionSpec())

    def masked(x: Any) -> bool:  # a parameter of another optimizer of the partition
        return isinstance(x, optax.MaskedNode)

    def sharding(x: Any, param: Any) -> Any:
        return x if masked(x) else param.sharding if x.shape == param.shape else replicated

    shardings = optax.tree.map_params(
        optimizer, sharding, state, params, transform_non_params=lambda _: replicated, is_leaf=masked
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
