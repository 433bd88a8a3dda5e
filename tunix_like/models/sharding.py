"""Shards parameters over a device mesh by a table of parameter names, prompts over the axes `BATCH_AXES`, and the
tokens of a sequence over `cp`.

The compiler derives all other shardings from the shardings of the inputs. The devices can belong to several processes.
Every process must call the functions of this module with the same values.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from tunix_like.config.schema import LORA_TARGETS, MeshConfig, RolloutConfig
from tunix_like.errors import UserError, check_type
from tunix_like.models.config import DecoderConfig

AXES = ("data", "fsdp", "ep", "cp", "tp")
SCALE = "kernel_scale"
"""Name of the scales of a quantised kernel (`quantization.py`)."""
BATCH_AXES = ("data", "fsdp", "ep")
"""Mesh axes that shard prompts and their completions. Weights are sharded over `fsdp`, `ep`, `cp` and `tp`."""

PARAMETER_AXES: dict[str, tuple[str | None, ...]] = {
    "embedding": ("tp", "fsdp"),
    "experts.gate_proj.kernel": ("ep", "fsdp", "tp"),
    "experts.up_proj.kernel": ("ep", "fsdp", "tp"),
    "experts.down_proj.kernel": ("ep", "tp", "fsdp"),
    "experts.gate_proj.bias": ("ep", "tp"),
    "experts.up_proj.bias": ("ep", "tp"),
    "experts.down_proj.bias": ("ep", None),
    "q_proj.kernel": ("fsdp", "tp"),
    "k_proj.kernel": ("fsdp", "tp"),
    "v_proj.kernel": ("fsdp", "tp"),
    "o_proj.kernel": ("tp", "fsdp"),
    "gate_proj.kernel": ("fsdp", "tp"),
    "up_proj.kernel": ("fsdp", "tp"),
    "down_proj.kernel": ("tp", "fsdp"),
    "lm_head.kernel": ("fsdp", "tp"),
    "per_layer_model_projection.kernel": ("fsdp", "tp"),
    "per_layer_input_gate.kernel": ("fsdp", None),
    "per_layer_projection.kernel": (None, "fsdp"),
    "in_proj_qkv.kernel": ("fsdp", "tp"),
    "in_proj_z.kernel": ("fsdp", "tp"),
    "in_proj_b.kernel": ("fsdp", None),
    "in_proj_a.kernel": ("fsdp", None),
    "out_proj.kernel": ("tp", "fsdp"),
}
"""Maps the suffix of a parameter's dotted name to the mesh axis of each dimension. The first matching suffix applies. A
parameter without a matching suffix is replicated. With `ep`, other parameters than those of experts are split over
`fsdp` and `ep` together where the table says `fsdp`, unless `fsdp` has one device: they are then not gathered."""

for _name in LORA_TARGETS:  # entries for adapters and for the arrays of a quantised kernel
    _input, _output = PARAMETER_AXES[f"{_name}.kernel"]
    PARAMETER_AXES |= {f"{_name}.lora_a": (_input, None), f"{_name}.lora_b": (None, _output)}
    PARAMETER_AXES |= {f"{_name}.{leaf}": (_input, _output) for leaf in ("kernel_codes", SCALE)}


def build_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh | None:
    """Builds the mesh that a config defines over all devices; returns None if there is only one device.

    The axis `data` goes over the slices of several TPU slices, the other axes stay inside a slice. The network between
    slices is much slower, and only `data` does not gather weights.

    Args:
      devices: descriptions of devices (`compile/devices.py`), used instead of `jax.devices()`. A single described
        device gets a mesh too, because a program is compiled for the devices in the shardings of its inputs.

    Raises:
      UserError: an axis name is unknown, the shape does not use every device or needs another axis than `data` to go
        over several slices, or there are several processes that are not connected yet.
    """
    unknown = [name for name in config.axis_names if name not in AXES]
    if unknown or not config.axis_names or len(set(config.axis_names)) != len(config.axis_names):
        raise UserError(f"mesh.axis_names: expected distinct names out of {', '.join(AXES)}, not {config.axis_names}.")
    here = devices is None
    devices = jax.devices() if devices is None else devices
    names = list(config.axis_names)
    slices = count_slices(devices)
    if slices > 1 and len(set(Counter(d.slice_index for d in devices).values())) > 1:
        raise UserError(
            f"{len(devices)} devices cannot be divided equally among {slices} TPU slices; reserve whole slices with "
            "rollout.devices."
        )
    if jax.process_count() > 1 and not jax.distributed.is_initialized():
        raise UserError(
            f"the devices belong to {jax.process_count()} processes that are not connected yet; add --distributed to "
            "the command (in Python: call jax.distributed.initialize() first)."
        )
    if isinstance(config.shape, str):
        if config.shape != "auto":
            raise UserError(f"mesh.shape: expected auto or a list of numbers, got '{config.shape}'.")
        shape = [len(devices)] + [1] * (len(names) - 1)
        if slices > 1 and names != ["data"]:
            names = ["data", *(name for name in names if name != "data")]
            shape = [slices, len(devices) // slices] + [1] * (len(names) - 2)
    else:
        shape = list(config.shape)
    if len(shape) != len(names) or min(shape) < 1:
        raise UserError(f"mesh.shape: {shape} must give one positive number per axis of {names}.")
    if math.prod(shape) != len(devices):
        raise UserError(
            f"mesh.shape: {shape} needs {math.prod(shape)} devices, but there are {len(devices)}; set auto, or numbers "
            f"with the product {len(devices)}."
        )
    if len(devices) == 1 and here:
        return None
    types = (AxisType.Auto,) * len(shape)
    if slices == 1:
        # An axis may be a part of an axis of the physical torus, such as 8 of 4 x 4 x 4.
        arranged = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(arranged, names, axis_types=types)
    check_slices("mesh.shape", dict(zip(names, shape, strict=True)), devices)
    between = [slices if name == "data" else 1 for name in names]
    inside = [size // parts for size, parts in zip(shape, between, strict=True)]
    arranged = mesh_utils.create_hybrid_device_mesh(inside, between, devices, allow_split_physical_axes=True)
    return Mesh(arranged, names, axis_types=types)


def count_slices(devices: Iterable[Any]) -> int:
    """Returns the number of TPU slices of the devices; 1 for other devices: jax counts a host of GPUs as a slice."""
    return len({getattr(d, "slice_index", 0) if d.device_kind.startswith("TPU") else 0 for d in devices})


def check_slices(key: str, sizes: Mapping[str, int], devices: Iterable[Any]) -> None:
    """Raises UserError if axes of `sizes` other than `data` would go over several TPU slices."""
    slices = count_slices(devices)
    data = sizes.get("data", 1)
    if data % slices:
        raise UserError(
            f"{key}: {data} devices along 'data', but there are {slices} TPU slices, and only 'data' may go over the "
            f"network between them; set a multiple of {slices} for 'data', or auto."
        )


def layout_mesh(mesh: Mesh, sizes: Mapping[str, int]) -> Mesh:
    """Returns a mesh of the devices of `mesh` with the axes `data`, `fsdp`, `tp`, and others of `sizes` above 1; a
    missing size is 1. The devices keep their order, except that `data` becomes the first axis, so that each of several
    slices stays whole."""
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index("data"), 0) if "data" in mesh.shape else mesh.devices
    names = [name for name in AXES if name in ("data", "fsdp", "tp") or sizes.get(name, 1) > 1]
    return Mesh(
        devices.reshape([sizes.get(name, 1) for name in names]), names, axis_types=(AxisType.Auto,) * len(names)
    )


def parameter_shardings(params: Any, mesh: Mesh) -> Any:
    """Returns a `NamedSharding` for every parameter of a pure dict of arrays or shapes.

    Raises:
      UserError: a dimension is not divisible by the size of its mesh axis. The message names the parameter.
    """
    return jax.tree_util.tree_map_with_path(lambda path, x: NamedSharding(mesh, _spec(path, x.shape, mesh)), params)


def constrain_params(params: Any) -> Any:
    """Constrains parameters (also of stacked layers) to the shardings of `PARAMETER_AXES` in a compiled function."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return params
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jax.lax.with_sharding_constraint(x, _spec(path, x.shape, mesh)), params
    )


def _spec(path: Any, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Returns the `PartitionSpec` of a parameter. The additional first axis of a stacked parameter is not sharded."""
    name = ".".join(str(getattr(key, "key", key)) for key in path)
    table = next((axes for end, axes in PARAMETER_AXES.items() if name.endswith(end)), (None,) * len(shape))
    both = "ep" not in table and mesh.shape.get("fsdp", 1) > 1
    axes: list[tuple[str, ...]] = [()] * (len(shape) - len(table))
    for axis in table:
        wanted = ("fsdp", *(("ep",) if both else ()), "cp") if axis == "fsdp" else (axis,)
        axes.append(tuple(each for each in wanted if each is not None and each in mesh.shape))
    counts = [math.prod(mesh.shape[each] for each in names) for names in axes]
    for index, (size, count) in enumerate(zip(shape, counts, strict=True)):
        if size % count and name.endswith(SCALE):  # small, so replicated along an axis that does not divide it
            axes[index] = ()
        elif size % count:
            along = " and ".join(f"'{each}'" for each in axes[index])
            raise UserError(
                f"mesh.shape: {count} devices along {along} do not divide {name} {list(shape)}; set a shape that does."
            )
    return PartitionSpec(*((names[0] if len(names) == 1 else names) or None for names in axes))


def place_params(params: Any, mesh: Mesh | None) -> Any:
    """Shards parameters over a mesh by the table `PARAMETER_AXES`. Without a mesh, parameters stay on their device, but
    are committed to it. The outputs of a training step are committed too, so the second step is not compiled again."""
    if mesh is None:
        return jax.device_put(params, jax.tree.map(lambda x: x.sharding, params))
    return jax.tree.map(_put, params, parameter_shardings(params, mesh))


def _put(x: Any, sharding: NamedSharding) -> jax.Array:
    """Places an array with a sharding, like `jax.device_put`.

    If each of several processes has a copy of the array, each process slices its own copy. `jax.device_put` would send
    the copies to all processes to compare them, and would report a difference for NaN.
    """
    if jax.process_count() == 1 or not _is_own(x):
        return jax.device_put(x, sharding)
    host = np.asarray(x)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _is_own(x: Any) -> bool:
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def without_shared(params: Any, held: Any) -> Any:
    """Returns parameters with copies of those arrays that share memory with an array of `held`."""
    taken = set().union(*map(_addresses, jax.tree.leaves(held)))
    return jax.tree.map(lambda x: jnp.copy(x) if _addresses(x) & taken else x, params)


def _addresses(x: jax.Array) -> set[int]:
    """Returns the memory addresses of the parts of an array that are on this process's devices."""
    return {shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards}


def check_divides(mesh: Mesh | None, config: DecoderConfig) -> None:
    """Raises a UserError if `tp` does not divide the heads of a model, or if several processes have no mesh."""
    if mesh is not None:
        check_type("mesh", mesh, Mesh, "give a jax.sharding.Mesh, e.g. tunix_like.models.sharding.build_mesh(...)")
    if mesh is None and jax.process_count() > 1:
        raise UserError(
            f"mesh: no mesh is given, but there are {jax.process_count()} processes, each of which would train its own "
            "model; pass tunix_like.models.sharding.build_mesh(MeshConfig()) in all of them."
        )
    parts = 1 if mesh is None else mesh.shape.get("tp", 1)
    counts = [("query", config.num_heads), *(("key", config.kv_heads(layer)) for layer in range(config.num_layers))]
    for name, heads in dict.fromkeys(counts):
        if heads % parts:
            raise UserError(
                f"mesh.shape: {parts} devices along 'tp' do not divide the {heads} {name} heads of this model; "
                "use fewer devices for tp and more for fsdp."
            )
    if sequence_parts(mesh) > 1 and any(map(config.is_recurrent, range(config.num_layers))):
        raise UserError(
            "mesh.axis_names: cp splits the tokens of a sequence, which recurrent layers do not support yet; use fsdp."
        )


def check_experts(key: str, mesh: Mesh | None, config: DecoderConfig) -> None:
    """Raises UserError if the mesh splits experts, and the model, whose experts it is for, has none."""
    if mesh is not None and mesh.shape.get("ep", 1) > 1 and config.experts is None:
        raise UserError(f"{key}: 'ep' splits experts, and this model has none; use fsdp.")


def check_model(mesh: Mesh | None, config: DecoderConfig, params: Any) -> None:
    """Raises a UserError if a mesh does not divide the heads of a model or its parameters (arrays or shapes)."""
    check_divides(mesh, config)
    param_shapes(params, mesh)


def check_batch(mesh: Mesh | None, key: str, prompts: int) -> None:
    if prompts % (parts := prompt_parts(mesh)):
        raise UserError(
            f"{key}: {prompts} prompts are not divisible by the {parts} devices along data, fsdp and ep (mesh.shape); "
            f"set a multiple of {parts}."
        )


def prompt_parts(mesh: Mesh | None) -> int:
    """Returns the number of parts into which the mesh splits the prompts."""
    return 1 if mesh is None else math.prod(mesh.shape.get(axis, 1) for axis in BATCH_AXES)


def sequence_parts(mesh: Mesh | None) -> int:
    """Returns the number of parts into which the mesh splits the tokens of a sequence in training."""
    return 1 if mesh is None else mesh.shape.get("cp", 1)


def token_parts(mesh: Mesh | None) -> int:
    """Returns the number of parts into which the mesh splits the tokens of a batch in training."""
    return prompt_parts(mesh) * sequence_parts(mesh)


def check_lengths(mesh: Mesh | None, rollout: RolloutConfig) -> None:
    """Raises UserError if `cp` does not split the longest sequences of a run."""
    parts = 2 * sequence_parts(mesh)  # two parts each (`attention_sequence.py`)
    for key in ("max_prompt_length", "max_tokens_to_generate"):
        if parts > 2 and (length := getattr(rollout, key)) % parts:
            raise UserError(
                f"rollout.{key}: {length} tokens cannot be split over the {parts // 2} devices along cp (mesh.shape); "
                f"set a multiple of {parts}, e.g. {-(-length // parts) * parts}."
            )


def place_prompts(tree: Any, mesh: Mesh | None, axis: int) -> Any:
    """Shards dimension `axis` (prompts) of arrays over the mesh axes `BATCH_AXES`. An array is replicated if these axes
    do not divide the dimension."""
    if mesh is None:
        return tree
    arrays = jax.tree.map(np.asarray, tree)
    return jax.tree.map(lambda x: _put(x, _prompts(x.shape, mesh, axis)), arrays)


def place_replicated(tree: Any, mesh: Mesh | None) -> Any:
    return tree if mesh is None else jax.tree.map(lambda x: _put(x, NamedSharding(mesh, PartitionSpec())), tree)


def place_slots(tree: Any, mesh: Mesh | None) -> Any:
    """Places the arrays of the sampler on the mesh: the first dimension (prompts or completions) over
    `BATCH_AXES`, the heads of a cache of keys or values (four dimensions) over `tp`, if they divide it."""
    if mesh is None:
        return tree
    return jax.tree.map(lambda x: _put(x, _slots(x.shape, mesh)), tree)


def fetch(tree: Any, mesh: Mesh | None) -> Any:
    """Copies whole arrays from the mesh to the host, in every process."""
    if mesh is None or jax.process_count() == 1:
        return jax.device_get(tree)
    return jax.device_get(jax.tree.map(lambda x: x if _is_own(x) else place_replicated(x, mesh), tree))


def shardings_of(tree: Any, mesh: Mesh | None) -> Any:
    """Returns the shardings of the arrays of a tree, for the outputs of a compiled step; None without a mesh."""
    return None if mesh is None else jax.tree.map(lambda x: x.sharding, tree)


def scope(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """Returns a context manager that sets the mesh for compilation; `split_tokens` and similar functions read it."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def split_tokens(x: jax.Array) -> jax.Array:
    """Shards vectors of tokens `[rows, ..., tokens, width]` over the mesh inside a compiled function: rows over
    `BATCH_AXES`, tokens over `cp`.

    Without this constraint, the compiler would shard the vectors over the model width, like the embedding table. Every
    device would then hold a part of every token.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty else jax.lax.with_sharding_constraint(x, token_spec(mesh, x.shape))


def token_spec(mesh: Mesh | AbstractMesh, shape: tuple[int, ...]) -> PartitionSpec:
    """Returns the `PartitionSpec` of vectors of tokens, `[rows, ..., tokens, width]` or `[rows, width]`."""
    if len(shape) < 3:
        return PartitionSpec(row_axes(mesh, shape[0]) or None)
    return PartitionSpec(row_axes(mesh, shape[0]) or None, *[None] * (len(shape) - 3), token_axis(mesh, shape[-2]))


def token_axis(mesh: Mesh | AbstractMesh, count: int) -> str | None:
    """Returns the mesh axis that splits the `count` tokens of a sequence. It is None for short sequences that cannot
    be split into two parts per device."""
    return "cp" if mesh.shape.get("cp", 1) > 1 and count % (2 * mesh.shape["cp"]) == 0 else None


def sequence_split(count: int) -> int:
    """Returns the number of parts into which the mesh splits `count` tokens of a sequence, inside a compiled
    function."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty or token_axis(mesh, count) is None else mesh.shape["cp"]


def split_vocabulary(x: jax.Array) -> jax.Array:
    """Shards the last dimension of an array, the vocabulary, over all mesh axes inside a compiled function.

    Each device then holds its part of the output matrix, of its gradient and of the logits. Devices exchange hidden
    states, which are smaller than the output matrix. If all axes together do not divide the vocabulary, only `tp`
    splits it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    spec = PartitionSpec(*[None] * (x.ndim - 1), _vocabulary_axes(mesh, x.shape[-1]))
    return jax.lax.with_sharding_constraint(x, spec)


def vocabulary_parts(size: int) -> int:
    """Returns the number of parts into which `split_vocabulary` splits a vocabulary of this size."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(mesh.shape[name] for name in _vocabulary_axes(mesh, size))


def gather_layer(params: Any) -> Any:
    """Gathers the parameters of a layer over `fsdp` and `cp`, before the layer runs, inside a compiled function.

    Without this gathering, the compiler splits each matrix product along the sharded dimension and adds up partial
    results of the size of the activations. The gradients have the sharding that the parameters have before gathering.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if all(mesh.shape.get(name, 1) == 1 for name in ("fsdp", "cp")):
        return params

    def gather(path: Any, x: jax.Array) -> jax.Array:
        spec = _spec(path, x.shape, mesh)
        whole = _gathered(spec)
        return x if whole == spec else _moved(x, whole, spec)

    return jax.tree_util.tree_map_with_path(gather, params)


def gather_after(x: jax.Array, params: Any) -> tuple[jax.Array, Any]:
    """Keeps the compiler from gathering the parameters of a layer over `fsdp` before the layer's input `x` is known.

    In the loop over tokens, XLA otherwise holds many gathered layers at the same time: 4.5 GB more for OLMo 3 7B with
    `fsdp` 4 on v5e, and 1.7 times the memory traffic.
    """
    if jax.sharding.get_abstract_mesh().shape.get("fsdp", 1) == 1:
        return x, params
    return jax.lax.optimization_barrier((x, params))


def replicate(x: jax.Array) -> jax.Array:
    return x if jax.sharding.get_abstract_mesh().empty else jax.lax.with_sharding_constraint(x, PartitionSpec())


def per_device(function: Callable[..., Any], params: Any, shape: tuple[int, ...]) -> Callable[..., Any]:
    """Wraps `function(params, *arrays) -> (out, *others)`, so that each device processes its own tokens of the arrays,
    in a compiled function.

    If parameters are split along `tp`, each device computes a partial `out`, and these are added up. Over `ep`, which
    splits experts, `function` exchanges rows itself (`MixtureOfExperts`).

    Args:
      params: parameters that are gathered (`gather_layer`), or their shapes.
      shape: shape of the arrays and of the results, except for the last axis: `[rows, ..., tokens, width]`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function
    specs = jax.tree_util.tree_map_with_path(lambda path, x: _gathered(_spec(path, x.shape, mesh)), params)
    shared = "tp" in mesh.shape and any("tp" in spec for spec in jax.tree.leaves(specs))

    def run(params: Any, *arrays: jax.Array) -> Any:
        out, *others = function(params, *arrays)
        return jax.lax.psum(out, "tp") if shared else out, *others

    own = token_spec(mesh, shape)
    return lambda params, *arrays: jax.shard_map(
        run, mesh=mesh, in_specs=(specs, *[own] * len(arrays)), out_specs=own, check_vma=False
    )(params, *arrays)


def splits_over_experts(rows: int) -> bool:
    """Whether the mesh splits `rows` rows over `ep`."""
    return jax.sharding.get_abstract_mesh().shape.get("ep", 1) > 1 and "ep" in row_axes(
        jax.sharding.get_abstract_mesh(), rows
    )


def row_axes(mesh: Mesh | AbstractMesh, rows: int) -> tuple[str, ...]:
    """Returns the mesh axes (of `BATCH_AXES`) that split `rows` rows of prompts; `()` if the product of the sizes of
    these axes does not divide `rows`."""
    axes = tuple(name for name in BATCH_AXES if name in mesh.shape)
    return axes if rows % math.prod(mesh.shape[name] for name in axes) == 0 else ()


def _gathered(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*(axis if axis in ("ep", "tp") else None for axis in spec))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _moved(x: jax.Array, to: PartitionSpec, back: PartitionSpec) -> jax.Array:
    """Constrains an array to the sharding `to`, and its gradient to the former sharding `back`.

    `with_sharding_constraint` would constrain the gradient to `to`, with an all-reduce instead of a reduce-scatter.
    """
    return jax.lax.with_sharding_constraint(x, to)


_moved.defvjp(
    lambda x, to, back: (jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(x, back), to), None),
    lambda to, back, _, cotangent: (jax.lax.with_sharding_constraint(cotangent, back),),
)


def _vocabulary_axes(mesh: AbstractMesh, size: int) -> tuple[str, ...]:
    axes = tuple(name for name in AXES if name in mesh.shape)
    for names in (axes, tuple(name for name in axes if name == "tp")):
        if size % math.prod(mesh.shape[name] for name in names) == 0:
            return names
    return ()


def _prompts(shape: tuple[int, ...], mesh: Mesh, axis: int) -> NamedSharding:
    axes = row_axes(mesh, shape[axis]) if len(shape) > axis else ()
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, axes) if axes else PartitionSpec())


def _slots(shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> NamedSharding:
    axes: list[Any] = [(row_axes(mesh, shape[0]) or None) if shape else None]
    axes += ["tp"] if len(shape) == 4 and "tp" in mesh.shape and shape[1] % mesh.shape["tp"] == 0 else []
    return NamedSharding(mesh, PartitionSpec(*axes[: len(shape)]))


def constrain_slots(tree: Any, mesh: Mesh | AbstractMesh | None) -> Any:
    """Inside a compiled program, shards arrays like `place_slots` does."""
    if mesh is None:
        return tree
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, _slots(x.shape, mesh)), tree)


def param_shapes(params: Any, mesh: Mesh | None) -> Any:
    """Returns the shapes and shardings after `place_params`; so do the functions below for the other placements."""
    return params if mesh is None else jax.tree.map(_placed, params, parameter_shardings(params, mesh))


def replicated_shapes(tree: Any, mesh: Mesh | None) -> Any:
    return tree if mesh is None else jax.tree.map(lambda x: _placed(x, NamedSharding(mesh, PartitionSpec())), tree)


def prompt_shapes(tree: Any, mesh: Mesh | None, axis: int) -> Any:
    return tree if mesh is None else jax.tree.map(lambda x: _placed(x, _prompts(x.shape, mesh, axis)), tree)


def slot_shapes(tree: Any, mesh: Mesh | None) -> Any:
    return tree if mesh is None else jax.tree.map(lambda x: _placed(x, _slots(x.shape, mesh)), tree)


def _placed(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
