"""Low-rank adapters (LoRA, arXiv 2106.09685): frozen projections get `x A B * alpha / rank` beside them.

They live in the projections themselves (`layers.Linear`), so that training, sampling and a mesh see arrays like any
others. Here they are added, told apart from what is frozen, merged into it, and written and read in PEFT's format.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from flax import nnx
from jax.sharding import Mesh
from safetensors.numpy import load_file

from tunix_like.config.schema import LORA_TARGETS, LoraConfig
from tunix_like.errors import UserError
from tunix_like.models.config import DecoderConfig
from tunix_like.models.decoder import Decoder, check_decoder
from tunix_like.models.layer_kinds import Adapters
from tunix_like.models.layers import Linear
from tunix_like.models.quantization import LEAVES as QUANTIZED
from tunix_like.models.quantization import dequantize
from tunix_like.models.sharding import fetch
from tunix_like.models.weights import Params, save_tensors, write_json
from tunix_like.storage.output_folder import written_whole

LEAVES = ("lora_a", "lora_b")
"""Names of the arrays that are trained where there are any: A `[in, r]` and B `[r, out]`, float32."""

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_PEFT_NAMES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}
_PEFT_PREFIX = "base_model.model.model."
_NOT_READ = (
    "use_dora",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
)
"""Fields of PEFT's config that would change what an adapter computes."""


def add_lora(model: Decoder, config: LoraConfig, seed: int = 0) -> Decoder:
    """The model with adapters beside its projections, which add nothing yet: A is uniform in `+-in ** -0.5`, as PEFT
    draws it, and B is 0.

    Args:
      model: stays as it is; the result has its arrays, not copies. Its arrays may be abstract.
      config: `rank` must be set.
      seed: of the As.

    Raises:
      UserError: no rank, a target that the model does not have, or a model that has adapters.
    """
    check_decoder("model", model)
    if model.adapters is not None:
        raise UserError("the model has adapters already; merge_lora takes them in first.")
    adapters = resolve_adapters(model.config, config)
    made = nnx.merge(*nnx.split(model))
    made.adapters = adapters
    for index, linear in enumerate(_adapted(made).values()):
        inputs, outputs = _shape_of(linear)
        draw = jax.random.fold_in(jax.random.key(seed), index)

        def arrays(key: Any = draw, inputs: int = inputs, outputs: int = outputs) -> tuple[Any, Any]:
            bound = inputs**-0.5
            a = jax.random.uniform(key, (inputs, adapters.rank), jnp.float32, -bound, bound)
            return a, jnp.zeros((adapters.rank, outputs), jnp.float32)

        a, b = jax.eval_shape(arrays) if _is_abstract(linear) else arrays()
        linear.lora_a, linear.lora_b = nnx.Param(a), nnx.Param(b)
        linear.lora_scale = adapters.scale
    return made


def resolve_adapters(model: DecoderConfig, config: LoraConfig) -> Adapters:
    """What a config means for a model.

    Raises:
      UserError: no rank, or a target that the model does not have.
    """
    if config.rank is None:
        raise UserError("lora.rank: set the rank of the adapters, e.g. 16.")
    known = LORA_TARGETS if model.experts is None else LORA_TARGETS[:4]
    targets = known if config.targets is None else tuple(name for name in LORA_TARGETS if name in config.targets)
    if beyond := [name for name in targets if name not in known]:
        raise UserError(
            f"lora.targets: {', '.join(beyond)}: the MLPs of this model are made of experts, which take no adapters; "
            f"name out of {', '.join(known)}."
        )
    return Adapters(config.rank, float(config.alpha or config.rank), targets)


def _adapted(model: Decoder) -> dict[str, Linear]:
    """The projections that `model.adapters` names, by their dotted names."""
    assert model.adapters is not None
    targets = model.adapters.targets
    return {name: module for name, module in model.projections().items() if name.rpartition(".")[2] in targets}


def _shape_of(linear: Linear) -> tuple[int, int]:
    param = linear.kernel_codes if linear.kernel is None else linear.kernel
    assert param is not None
    inputs, outputs = param.shape
    return (2 * inputs if param.dtype == jnp.uint8 else inputs), outputs  # two codes of NF4 a byte


def _is_abstract(linear: Linear) -> bool:
    param = linear.kernel_codes if linear.kernel is None else linear.kernel
    assert param is not None
    return isinstance(param.get_value(), jax.ShapeDtypeStruct)


def split_params(params: Params) -> tuple[Params, Params]:
    """What is trained and what is frozen of a parameter tree: the adapters and the rest, or everything and nothing.

    Raises:
      UserError: weights are quantised and there are no adapters to train, or what is trained is not float32.
    """
    trained, frozen = _parted(params)
    if not trained:
        trained, frozen = params, {}
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(trained)}
    if any(not jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        raise UserError("the weights are quantised and cannot be trained; add adapters (lora.rank, add_lora).")
    if other := dtypes - {jnp.dtype(jnp.float32)}:
        raise UserError(
            f"the weights are held in {min(map(str, other))}, which loses small updates: train in float32 "
            "(load_model(..., param_dtype=jnp.float32); dtype, of the matrix products, may differ), or adapters beside "
            "them (add_lora)."
        )
    return trained, frozen


def _parted(tree: Mapping[Any, Any]) -> tuple[Params, Params]:
    trained: Params = {}
    frozen: Params = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            for part, found in zip((trained, frozen), _parted(value), strict=True):
                if found:
                    part[name] = found
        else:
            (trained if name in LEAVES else frozen)[name] = value
    return trained, frozen


def join_params(trained: Params, frozen: Params) -> Params:
    """The tree that `split_params` took apart."""
    joined = dict(frozen)
    for name, value in trained.items():
        joined[name] = join_params(value, joined[name]) if name in joined else value
    return joined


def fingerprint(config: DecoderConfig, frozen: Params, mesh: Mesh | None) -> dict[str, str | None]:
    """What tells the frozen weights beside adapters from others: `all` of them by the sums of their bit patterns, which
    are the same wherever they lie; the `backend`; and, of a base with a name, those that were `read` and not computed,
    since what one backend draws or quantises may differ in its last bits on another."""
    leaves = jax.tree_util.tree_leaves_with_path(frozen)
    sums = fetch([_bit_sum(leaf) for _, leaf in leaves], mesh)
    found = {jax.tree_util.keystr(path): int(total) for (path, _), total in zip(leaves, sums, strict=True)}
    named = (config.source or {}).get("_name_or_path") is not None
    read = {name: total for name, total in found.items() if not any(leaf in name for leaf in QUANTIZED)}
    return {"backend": jax.default_backend(), "all": _digest(found), "read": _digest(read) if named else None}


@jax.jit
def _bit_sum(x: jax.Array) -> jax.Array:
    """Modulo 2 ** 32, so that the order of summation makes no difference."""
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return bits.astype(jnp.uint32).sum(dtype=jnp.uint32)


def _digest(sums: Mapping[str, int]) -> str:
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()[:16]


def check_base(folder: Path, held: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises UserError where two identities (`loop.Phase.identity`) have different fingerprints under `base`. One that
    was kept without any is let through."""
    then, here = held.get("base"), now.get("base")
    if then is None or here is None:
        return
    kind = "all" if then["backend"] == here["backend"] else "read"
    if then[kind] != here[kind]:
        raise UserError(
            f"{folder}: the adapters belong to another base: the frozen weights are not those that they were trained "
            "beside. Name that base (model.path, model.quantize, model.param_dtype; for a random one training.seed), "
            "or train into another output_dir."
        )


def without_adapters(graphdef: Any) -> Any:
    """The graph of the same model with its adapters off; the frozen parameters are its parameters."""
    model: Decoder = nnx.merge(graphdef, [None] * graphdef.num_leaves)
    _take_out(model)
    return nnx.split(model)[0]


def _take_out(model: Decoder) -> None:
    for linear in model.projections().values():
        linear.lora_a = linear.lora_b = None
        linear.lora_scale = 1.0
    model.adapters = None


def merge_lora(model: Decoder) -> Decoder:
    """A model without adapters that computes the same: `W + A B * alpha / rank` in float32, rounded once to the dtype
    of the weights. Quantised weights, with adapters or without, are turned back into numbers. The model itself stays as
    it is."""
    check_decoder("model", model)
    merged = nnx.merge(*nnx.split(model))
    for linear in merged.projections().values():
        if linear.lora_a is None and linear.kernel is not None:
            continue
        linear.kernel = nnx.Param(_merged(linear, merged.param_dtype))
        linear.kernel_codes = linear.kernel_scale = None
    _take_out(merged)
    merged.quantized = None
    return merged


def _merged(linear: Linear, dtype: Any) -> jax.Array:
    if linear.kernel is not None:
        wide = linear.kernel[...].astype(jnp.float32)
    else:
        assert linear.kernel_codes is not None and linear.kernel_scale is not None
        wide = dequantize(linear.kernel_codes[...], linear.kernel_scale[...])
    if linear.lora_a is not None and linear.lora_b is not None:
        product = jnp.matmul(linear.lora_a[...], linear.lora_b[...], precision=jax.lax.Precision.HIGHEST)
        wide = wide + linear.lora_scale * product
    return wide.astype(dtype)


def source_of(config: DecoderConfig) -> str | None:
    """Path or hub id of the weights that a model began with; None where they were drawn at random."""
    return (config.source or {}).get("_name_or_path")


def save_adapter(model: Decoder, folder: str | Path, *, overwrite: bool = False) -> None:
    """Writes the adapters as PEFT does: `adapter_config.json` and `adapter_model.safetensors`, which
    `peft.PeftModel.from_pretrained(base, folder)` loads beside the base. The folder is whole, or not there.

    Args:
      overwrite: the folder may be that of an earlier export, which is replaced with all that is in it.

    Raises:
      UserError: the model has no adapters, or the folder cannot be written or replaced (`output_folder.check_folder`).
    """
    check_decoder("model", model)
    with written_whole(folder, overwrite, source_of(model.config)) as part:
        save_adapter_config(model, part)
        tensors = {
            f"{_PEFT_PREFIX}{name}.{_PEFT_NAMES[leaf]}": np.ascontiguousarray(np.asarray(getattr(linear, leaf)[...]).T)
            for name, linear in _adapted(model).items()
            for leaf in LEAVES
        }
        save_tensors(tensors, part / ADAPTER_WEIGHTS)


def save_adapter_config(model: Decoder, folder: str | Path, **further: str | None) -> None:
    """Writes `adapter_config.json` alone: rank, alpha, targets, the base they are for where that has a name, and
    `further` fields.

    Raises:
      UserError: as `save_adapter`.
    """
    check_decoder("model", model)
    if (adapters := model.adapters) is None:
        raise UserError("the model has no adapters; train with lora.rank, or export the whole model.")
    alpha = int(adapters.alpha) if adapters.alpha == int(adapters.alpha) else adapters.alpha
    fields = {
        "base_model_name_or_path": source_of(model.config),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": adapters.rank,
        "target_modules": list(adapters.targets),
        "task_type": "CAUSAL_LM",
        **further,
    }
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_json(Path(folder) / ADAPTER_CONFIG, fields)
    except OSError as error:
        raise UserError(f"{folder}: cannot write the adapter: {error}") from error


def load_adapter(model: Decoder, folder: str | Path) -> Decoder:
    """The model with the adapters of a folder in PEFT's format, to go on training them or to sample.

    Raises:
      UserError: no such files, an adapter of another kind, or tensors that are not this model's. File and field, or
        tensor, are named.
    """
    fields, file = read_adapter_config(folder), Path(folder) / ADAPTER_WEIGHTS
    try:
        tensors = load_file(file)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{file}: cannot be read as safetensors ({error}). Save the adapter with PEFT again.") from None
    # `target_modules` may be a pattern; the tensors say what there is
    found = {part for name in tensors for part in name.split(".") if part in LORA_TARGETS}
    targets = [name for name in LORA_TARGETS if name in found]
    if not targets:
        raise UserError(f"{file}: holds no adapter of {', '.join(LORA_TARGETS)}.")
    made = add_lora(model, LoraConfig(rank=fields["r"], alpha=fields["lora_alpha"], targets=targets))
    wanted = {
        f"{_PEFT_PREFIX}{name}.{_PEFT_NAMES[leaf]}": (linear, leaf)
        for name, linear in _adapted(made).items()
        for leaf in LEAVES
    }
    for kind, names in (("lacks", wanted.keys() - tensors), ("has unexpected", tensors.keys() - wanted)):
        if names:
            raise UserError(f"{file}: {kind} tensor(s) {', '.join(sorted(names)[:3])}; it is of another model.")
    for name, (linear, leaf) in wanted.items():
        param = getattr(linear, leaf)
        if tensors[name].shape[::-1] != param.shape:
            raise UserError(
                f"{file}: tensor {name} has shape {tensors[name].shape}, this model with r = {fields['r']} asks for "
                f"{param.shape[::-1]}."
            )
        param.set_value(jnp.asarray(tensors[name].T, jnp.float32))
    return made


def read_adapter_config(folder: str | Path) -> dict[str, Any]:
    """The fields of a folder's `adapter_config.json`. Raises UserError where it is absent or no plain LoRA's."""
    file = Path(folder) / ADAPTER_CONFIG
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read as JSON ({error}). Give the folder of an adapter.") from None
    if not isinstance(fields, dict) or fields.get("peft_type") != "LORA":
        raise UserError(f"{file}: not the config of a LoRA adapter (peft_type = LORA).")
    for name in _NOT_READ:
        if fields.get(name):
            raise UserError(f"{file}: {name} = {fields[name]!r} is not supported; merge the adapter with PEFT instead.")
    if fields.get("bias", "none") != "none":
        raise UserError(f"{file}: bias = {fields['bias']!r} is not supported; merge the adapter with PEFT instead.")
    for name, kind in (("r", int), ("lora_alpha", int | float)):
        if isinstance(fields.get(name), bool) or not isinstance(fields.get(name), kind) or not fields[name] > 0:
            raise UserError(f"{file}: {name} = {fields.get(name)!r} must be a positive number.")
    return fields
