"""Where arrays live on several devices: one table from a parameter's name to its axes, and prompts over `fsdp`.

It knows meshes and names of parameters; the compiler derives everything else from where inputs lie. One process so far.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tunix_like.config import MeshConfig
from tunix_like.errors import UserError

AXES = ("fsdp", "tp")

PARAMETER_AXES: dict[str, tuple[str | None, ...]] = {
    "embedding": ("tp", "fsdp"),
    "experts.gate_proj.kernel": (None, "fsdp", "tp"),
    "experts.up_proj.kernel": (None, "fsdp", "tp"),
    "experts.down_proj.kernel": (None, "tp", "fsdp"),
    "q_proj.kernel": ("fsdp", "tp"),
    "k_proj.kernel": ("fsdp", "tp"),
    "v_proj.kernel": ("fsdp", "tp"),
    "o_proj.kernel": ("tp", "fsdp"),
    "gate_proj.kernel": ("fsdp", "tp"),
    "up_proj.kernel": ("fsdp", "tp"),
    "down_proj.kernel": ("tp", "fsdp"),
    "lm_head.kernel": ("fsdp", "tp"),
}
"""End of a parameter's dotted name to the mesh axis of each of its dimensions, the first that fits; what is not listed
is replicated."""


def build_mesh(config: MeshConfig) -> Mesh | None:
    """The mesh of a config over all devices, or None when there is only one.

    Raises:
      UserError: unknown axis names, or a shape that does not use every device.
    """
    unknown = [name for name in config.axis_names if name not in AXES]
    if unknown or len(set(config.axis_names)) != len(config.axis_names):
        raise UserError(
            f"mesh.axis_names: expected names out of {', '.join(AXES)}, each once, not {config.axis_names}."
        )
    devices = jax.devices()
    if isinstance(config.shape, str):
        if config.shape != "auto":
            raise UserError(f"mesh.shape: expected auto or a list of numbers, got '{config.shape}'.")
        shape = [len(devices)] + [1] * (len(config.axis_names) - 1)
    else:
        shape = list(config.shape)
    if len(shape) != len(config.axis_names) or min(shape) < 1:
        raise UserError(f"mesh.shape: {shape} must give one positive number per axis of {config.axis_names}.")
    if math.prod(shape) != len(devices):
        raise UserError(
            f"mesh.shape: {shape} needs {math.prod(shape)} devices, there are {len(devices)}; set auto, or numbers "
            "with that product."
        )
    if len(devices) == 1:
        return None
    return jax.make_mesh(shape, config.axis_names, axis_types=(AxisType.Auto,) * len(shape))


def parameter_shardings(params: Any, mesh: Mesh) -> Any:
    """A `NamedSharding` for every parameter of a pure dict (arrays or abstract ones).

    Raises:
      UserError: a dimension that its mesh axis does not divide; the parameter is named.
    """

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        name = ".".join(str(getattr(key, "key", key)) for key in path)
        axes = next((axes for end, axes in PARAMETER_AXES.items() if name.endswith(end)), (None,) * leaf.ndim)
        axes = tuple(axis if axis in mesh.shape else None for axis in axes)
        for size, axis in zip(leaf.shape, axes, strict=True):
            if axis is not None and size % mesh.shape[axis]:
                raise UserError(
                    f"mesh.shape: {mesh.shape[axis]} devices along '{axis}' do not divide {name} {list(leaf.shape)}; "
                    "choose a mesh that does."
                )
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree_util.tree_map_with_path(sharding, params)


def place_params(params: Any, mesh: Mesh | None) -> Any:
    """Puts parameters where the table says; without a mesh they stay where they are, but bound to that device, so that
    programs see them at every step as they come out of the first and are not compiled twice."""
    if mesh is None:
        return jax.device_put(params, jax.tree.map(lambda x: x.sharding, params))
    return jax.device_put(params, parameter_shardings(params, mesh))


def prompt_parts(mesh: Mesh | None) -> int:
    """Into how many parts prompts are split."""
    return 1 if mesh is None else mesh.shape.get("fsdp", 1)


def place_prompts(tree: Any, mesh: Mesh | None, axis: int) -> Any:
    """Puts arrays on the mesh, dimension `axis` (prompts) split over `fsdp` where it divides, else replicated."""
    if mesh is None:
        return tree
    arrays = jax.tree.map(np.asarray, tree)
    return jax.tree.map(lambda x: jax.device_put(x, _split(x.shape, mesh, axis)), arrays)


def place_replicated(tree: Any, mesh: Mesh | None) -> Any:
    """Puts whole arrays on every device of the mesh."""
    return tree if mesh is None else jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def split_leading(tree: Any, mesh: Mesh | None) -> Any:
    """Puts device arrays on the mesh, their first dimension split over `fsdp` where it divides, else replicated."""
    return tree if mesh is None else jax.tree.map(lambda x: jax.device_put(x, _split(x.shape, mesh, 0)), tree)


def _split(shape: tuple[int, ...], mesh: Mesh, axis: int) -> NamedSharding:
    split = len(shape) > axis and shape[axis] % prompt_parts(mesh) == 0 and "fsdp" in mesh.shape
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, "fsdp") if split else PartitionSpec())


def param_shapes(params: Any, mesh: Mesh | None) -> Any:
    """Where `place_params` puts parameters, as `jax.ShapeDtypeStruct`s."""
    return params if mesh is None else jax.tree.map(_placed, params, parameter_shardings(params, mesh))


def replicated_shapes(tree: Any, mesh: Mesh | None) -> Any:
    """The same of `place_replicated`."""
    return tree if mesh is None else jax.tree.map(lambda x: _placed(x, NamedSharding(mesh, PartitionSpec())), tree)


def leading_shapes(tree: Any, mesh: Mesh | None) -> Any:
    """The same of `split_leading`."""
    return tree if mesh is None else jax.tree.map(lambda x: _placed(x, _split(x.shape, mesh, 0)), tree)


def _placed(x: Any, place: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
