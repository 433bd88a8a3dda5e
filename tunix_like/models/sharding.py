"""Where arrays live on several devices: one table from a parameter's name to its axes; prompts over `data` and `fsdp`.

It knows meshes and names of parameters; the compiler derives everything else from where inputs lie. Devices may belong
to several processes, of which each calls everything here with the same numbers.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tunix_like.config.schema import LORA_TARGETS, MeshConfig
from tunix_like.errors import UserError, check_type
from tunix_like.models.config import DecoderConfig

AXES = ("data", "fsdp", "tp")
SCALE = "kernel_scale"
"""Name of the scales of a quantised kernel (`quantization.py`)."""
BATCH_AXES = ("data", "fsdp")
"""Over these prompts are split, with all that belongs to them; weights are split over `fsdp` and `tp`."""

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

for _name in LORA_TARGETS:  # beside a kernel, or in its place
    _input, _output = PARAMETER_AXES[f"{_name}.kernel"]
    PARAMETER_AXES |= {f"{_name}.lora_a": (_input, None), f"{_name}.lora_b": (None, _output)}
    PARAMETER_AXES |= {f"{_name}.{leaf}": (_input, _output) for leaf in ("kernel_codes", SCALE)}


def build_mesh(config: MeshConfig) -> Mesh | None:
    """The mesh of a config over all devices, or None when there is only one.

    Raises:
      UserError: unknown axis names, or a shape that does not use every device; several processes, not yet joined.
    """
    unknown = [name for name in config.axis_names if name not in AXES]
    if unknown or not config.axis_names or len(set(config.axis_names)) != len(config.axis_names):
        raise UserError(
            f"mesh.axis_names: expected names out of {', '.join(AXES)}, each once, not {config.axis_names}."
        )
    devices = jax.devices()
    if jax.process_count() > 1 and not jax.distributed.is_initialized():
        raise UserError(
            f"the devices here belong to {jax.process_count()} processes that do not know of each other yet: add "
            "--distributed to the command (in Python: jax.distributed.initialize(), before anything else)."
        )
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
        if name.endswith(SCALE):  # small: it is whole along what the mesh does not divide
            axes = tuple(
                axis if axis is None or size % mesh.shape[axis] == 0 else None
                for size, axis in zip(leaf.shape, axes, strict=True)
            )
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
    return jax.tree.map(_put, params, parameter_shardings(params, mesh))


def _put(x: Any, place: NamedSharding) -> jax.Array:
    """`jax.device_put`; but what each of several processes has a copy of is cut here, where it would be sent to all and
    compared (and where NaN is like nothing else, found to differ)."""
    if jax.process_count() == 1 or not _is_own(x):
        return jax.device_put(x, place)
    host = np.asarray(x)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
    return jax.make_array_from_callback(host.shape, place, lambda index: host[index])


def _is_own(x: Any) -> bool:
    """Whether it lies in this process alone, on the host or on devices of its own."""
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def check_divides(mesh: Mesh | None, config: DecoderConfig) -> None:
    """Raises UserError where the devices along `tp` do not divide the heads of a model, or where several processes have
    no mesh in common."""
    if mesh is not None:
        check_type("mesh", mesh, Mesh, "give a jax.sharding.Mesh, e.g. tunix_like.models.sharding.build_mesh(...)")
    if mesh is None and jax.process_count() > 1:
        raise UserError(
            f"mesh: none is given, and there are {jax.process_count()} processes, each of which would train a model of "
            "its own; give all of them tunix_like.models.sharding.build_mesh(MeshConfig())."
        )
    parts = 1 if mesh is None else mesh.shape.get("tp", 1)
    for name, heads in (("query", config.num_heads), ("key", config.num_kv_heads)):
        if heads % parts:
            raise UserError(
                f"mesh.shape: {parts} devices along 'tp' do not divide the {heads} {name} heads of this model; "
                "give tp fewer devices, and fsdp more."
            )


def check_model(mesh: Mesh | None, config: DecoderConfig, params: Any) -> None:
    """Raises UserError where a mesh does not divide the heads of a model or its parameters (arrays or shapes)."""
    check_divides(mesh, config)
    param_shapes(params, mesh)


def check_batch(mesh: Mesh | None, key: str, prompts: int) -> None:
    """Raises UserError, naming `key`, where the mesh does not divide a number of prompts."""
    if prompts % (parts := prompt_parts(mesh)):
        raise UserError(
            f"{key}: {prompts} prompts are not divided by the {parts} devices along data and fsdp (mesh.shape); "
            f"make it a multiple of {parts}."
        )


def prompt_parts(mesh: Mesh | None) -> int:
    """Into how many parts prompts are split."""
    return 1 if mesh is None else math.prod(mesh.shape.get(axis, 1) for axis in BATCH_AXES)


def place_prompts(tree: Any, mesh: Mesh | None, axis: int) -> Any:
    """Puts arrays on the mesh, dimension `axis` (prompts) split over `data` and `fsdp` where that divides, else
    replicated."""
    if mesh is None:
        return tree
    arrays = jax.tree.map(np.asarray, tree)
    return jax.tree.map(lambda x: _put(x, _prompts(x.shape, mesh, axis)), arrays)


def place_replicated(tree: Any, mesh: Mesh | None) -> Any:
    """Puts whole arrays on every device of the mesh."""
    return tree if mesh is None else jax.tree.map(lambda x: _put(x, NamedSharding(mesh, PartitionSpec())), tree)


def place_slots(tree: Any, mesh: Mesh | None) -> Any:
    """Puts the sampler's arrays on the mesh: the first dimension (slots, or their rows) over `data` and `fsdp`, the
    heads of a cache `[R K ...]` of four dimensions over `tp`. What is not divided is replicated; what lies right
    already stays."""
    if mesh is None:
        return tree
    return jax.tree.map(lambda x: _put(x, _slots(x.shape, mesh)), tree)


def fetch(tree: Any, mesh: Mesh | None) -> Any:
    """Arrays of the mesh on the host, whole, in every process."""
    if mesh is None or jax.process_count() == 1:
        return jax.device_get(tree)
    return jax.device_get(jax.tree.map(lambda x: x if _is_own(x) else place_replicated(x, mesh), tree))


def shardings_of(tree: Any, mesh: Mesh | None) -> Any:
    """Where the arrays of a tree lie, to hold a compiled step to it; None without a mesh."""
    return None if mesh is None else jax.tree.map(lambda x: x.sharding, tree)


def scope(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """While programs are compiled inside it, `split_batch` and `split_columns` know the mesh."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def split_batch(x: jax.Array) -> jax.Array:
    """Inside a compiled function: the first dimension over `data` and `fsdp`.

    Left to itself the compiler follows the weights instead: what is looked up in a split embedding would come out split
    over the model's width, with every token on every device.
    """
    return _constrained(x, BATCH_AXES)


def split_columns(x: jax.Array) -> jax.Array:
    """Inside a compiled function: a matrix that is whole over `data` and `fsdp`, its columns over `tp`."""
    return _constrained(x, (), ("tp",))


def _constrained(x: jax.Array, *axes: tuple[str, ...]) -> jax.Array:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    spec = []
    for size, names in zip(x.shape, axes, strict=False):
        known = tuple(name for name in names if name in mesh.shape)
        spec.append(known if known and size % math.prod(mesh.shape[name] for name in known) == 0 else None)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def _batch(mesh: Mesh) -> tuple[str, ...]:
    return tuple(axis for axis in BATCH_AXES if axis in mesh.shape)


def _prompts(shape: tuple[int, ...], mesh: Mesh, axis: int) -> NamedSharding:
    split = len(shape) > axis and shape[axis] % prompt_parts(mesh) == 0
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, _batch(mesh)) if split else PartitionSpec())


def _slots(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    axes: list[Any] = [_batch(mesh) if shape and shape[0] % prompt_parts(mesh) == 0 else None]
    axes += ["tp"] if len(shape) == 4 and "tp" in mesh.shape and shape[1] % mesh.shape["tp"] == 0 else []
    return NamedSharding(mesh, PartitionSpec(*axes[: len(shape)]))


def param_shapes(params: Any, mesh: Mesh | None) -> Any:
    """Where `place_params` puts parameters, as `jax.ShapeDtypeStruct`s."""
    return params if mesh is None else jax.tree.map(_placed, params, parameter_shardings(params, mesh))


def replicated_shapes(tree: Any, mesh: Mesh | None) -> Any:
    """The same of `place_replicated`."""
    return tree if mesh is None else jax.tree.map(lambda x: _placed(x, NamedSharding(mesh, PartitionSpec())), tree)


def slot_shapes(tree: Any, mesh: Mesh | None) -> Any:
    """The same of `place_slots`."""
    return tree if mesh is None else jax.tree.map(lambda x: _placed(x, _slots(x.shape, mesh)), tree)


def _placed(x: Any, place: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
