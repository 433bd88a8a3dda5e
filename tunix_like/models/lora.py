"""Low-rank adapters (LoRA, arXiv 2106.09685), which add `x A B * alpha / rank` to the outputs of frozen projections.
The matrices A `[inputs, rank]` and B `[rank, outputs]` are trained.

Adapters are parameters of the projections (`layers.Linear`), so training, sampling and sharding treat them like any
other parameters. This module adds adapters, separates them from frozen weights, merges them, and reads and writes them
in the PEFT format.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from flax import nnx
from flax.nnx.traversals import flatten_mapping, unflatten_mapping
from jax.sharding import Mesh
from safetensors.numpy import load_file

from tunix_like.config.argument_names import named_arguments
from tunix_like.config.schema import (
    ATTENTION_TARGETS,
    LORA_TARGETS,
    MLP_TARGETS,
    RECURRENT_TARGETS,
    LoraConfig,
)
from tunix_like.errors import UserError
from tunix_like.models.config import Adapters, DecoderConfig
from tunix_like.models.decoder import Decoder, check_decoder
from tunix_like.models.families import MULTIMODAL
from tunix_like.models.layers import Linear
from tunix_like.models.quantization import LEAVES as QUANTIZED
from tunix_like.models.quantization import dequantize
from tunix_like.models.sharding import fetch
from tunix_like.models.weights import Params, not_finite, save_tensors, write_json
from tunix_like.runtime.input_files import file_problem
from tunix_like.storage.output_folder import write_files, written_whole

LEAVES = ("lora_a", "lora_b")
"""Names of the arrays of an adapter, A `[in, r]` and B `[r, out]`, float32. In a model with adapters, only these arrays
are trained."""

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

_PEFT_NAMES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}
_PEFT_PREFIX = "base_model.model.model."
_PEFT_PREFIX_MULTIMODAL = "base_model.model.model.language_model."
_PREFIXES = re.compile(r"base_model\.model\.(?:model\.language_model|language_model\.model|model)\.")
"""Beginnings of the names of tensors, also those of other versions of transformers."""

_IGNORED = """
r lora_alpha peft_type bias init_lora_weights target_modules base_model_name_or_path revision task_type inference_mode
lora_dropout auto_mapping peft_version exclude_modules layers_to_transform layers_pattern megatron_core loftq_config
eva_config corda_config lora_ga_config qalora_group_size runtime_config ensure_weight_tying quantize param_dtype
"""
"""Fields of a PEFT config that are read, or that do not change the computation of an adapter; the last two are of the
adapters of a run. Any other field must be empty: it belongs to a variant of LoRA."""

_ADDED_TO_THE_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the weights of the base model unchanged. Others (PiSSA, OLoRA, LoftQ, CorDA,
LoRA-GA) subtract the initial adapter from them."""


@named_arguments
def add_lora(model: Decoder, config: LoraConfig, seed: int = 0) -> Decoder:
    """Returns the model with adapters on its projections.

    An adapter adds `x A B * alpha / rank` to the output of a projection. In a new adapter, B is 0, so this term is 0.
    A `[inputs, rank]` is uniform between `-inputs ** -0.5` and `inputs ** -0.5`, as in PEFT.

    Args:
      model: the decoder, which is not changed. The result shares its arrays, which may be abstract (shapes only).
      config: `rank` must be set.
      seed: random seed of all matrices A.

    Raises:
      UserError: the rank is not set, a target does not exist in the model, or the model already has adapters.
    """
    check_decoder("model", model)
    if model.adapters is not None:
        raise UserError("the model already has adapters; call merge_lora first.")
    adapters = resolve_adapters(model.config, config)
    adapted = nnx.merge(*nnx.split(model))
    adapted.adapters = adapters
    for index, linear in enumerate(_adapted(adapted).values()):
        param = linear.kernel_codes if linear.kernel is None else linear.kernel
        assert param is not None
        inputs, outputs = param.shape
        inputs *= 2 if param.dtype == jnp.uint8 else 1  # two NF4 codes per byte
        linear_key = jax.random.fold_in(jax.random.key(seed), index)

        def arrays(key: Any = linear_key, inputs: int = inputs, outputs: int = outputs) -> tuple[Any, Any]:
            bound = inputs**-0.5
            a = jax.random.uniform(key, (inputs, adapters.rank), jnp.float32, -bound, bound)
            return a, jnp.zeros((adapters.rank, outputs), jnp.float32)

        a, b = jax.eval_shape(arrays) if isinstance(param.get_value(), jax.ShapeDtypeStruct) else arrays()
        linear.lora_a, linear.lora_b = nnx.Param(a), nnx.Param(b)
        linear.lora_scale = adapters.scale
    return adapted


def resolve_adapters(model: DecoderConfig, config: LoraConfig) -> Adapters:
    """Returns the adapters that a LoRA config defines for a model. Default alpha is the rank, and default targets are
    all projections that support adapters."""
    if config.rank is None:
        raise UserError("lora.rank: set the rank of the adapters, e.g. 16.")
    supported = supported_targets(model)
    targets = supported if config.targets is None else tuple(name for name in LORA_TARGETS if name in config.targets)
    if unsupported := [name for name in targets if name not in supported]:
        cause = "no layer of this model is recurrent"
        if set(unsupported) & set(MLP_TARGETS):
            cause = "the MLPs of this model are mixtures of experts, which do not support adapters"
        raise UserError(f"lora.targets: {', '.join(unsupported)}: {cause}; choose from {', '.join(supported)}.")
    return Adapters(config.rank, float(config.alpha or config.rank), targets)


def supported_targets(model: DecoderConfig) -> tuple[str, ...]:
    """Returns those of `LORA_TARGETS` that layers of the model have."""
    supported: tuple[str, ...] = ATTENTION_TARGETS
    supported += MLP_TARGETS if model.experts is None or model.experts.shared else ()
    return supported + (RECURRENT_TARGETS if model.recurrent_layers else ())


def _adapted(model: Decoder) -> dict[str, Linear]:
    assert model.adapters is not None
    targets = model.adapters.targets
    return {name: module for name, module in model.projections().items() if name.rpartition(".")[2] in targets}


def split_params(params: Params) -> tuple[Params, Params]:
    """Splits a parameter tree into trained and frozen parameters, as `part_params`. Raises UserError if the trained
    parameters are quantised or not float32."""
    trained, frozen = part_params(params)
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(trained)}
    if any(not jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        raise UserError("the weights are quantised and cannot be trained; add adapters (lora.rank, add_lora).")
    if other := dtypes - {jnp.dtype(jnp.float32)}:
        raise UserError(
            f"the weights are stored in {min(map(str, other))}, which loses small updates; train in float32 "
            "(load_model(..., param_dtype=jnp.float32); dtype, for the matrix products, can differ), or train "
            "adapters (add_lora)."
        )
    return trained, frozen


def part_params(params: Params) -> tuple[Params, Params]:
    """Splits a parameter tree into trained parameters (adapters and a scalar head; without adapters, all) and frozen
    parameters."""
    flat = flatten_mapping(params)
    if not any(path[-1] in LEAVES for path in flat):
        return params, {}
    trained = {path: leaf for path, leaf in flat.items() if path[-1] in LEAVES or path[0] == "score"}
    return unflatten_mapping(trained), unflatten_mapping({path: flat[path] for path in flat if path not in trained})


def join_params(trained: Params, frozen: Params) -> Params:
    return unflatten_mapping(flatten_mapping(frozen) | flatten_mapping(trained))


def fingerprint(config: DecoderConfig, frozen: Params, mesh: Mesh | None) -> dict[str, str | None]:
    """Returns a fingerprint of the frozen weights of a model with adapters.

    Each digest is computed from sums of bit patterns, so it does not depend on the sharding.

    Returns:
      `all`: the digest of all frozen weights.
      `backend`: the backend of JAX. Weights that are quantised or drawn at random may differ in their last bits between
        backends, so values of `all` are comparable only on the same backend.
      `read`: the digest of the frozen weights that are not quantised, which is comparable between backends. None if the
        base model has no name; the weights of such a model are drawn at random.
    """
    leaves = jax.tree_util.tree_leaves_with_path(frozen)
    # One sum at a time: many programs at once over simulated devices can block each other.
    sums = [fetch(_bit_sum(leaf), mesh) for _, leaf in leaves]
    totals = {jax.tree_util.keystr(path): int(total) for (path, _), total in zip(leaves, sums, strict=True)}
    named = (config.source or {}).get("_name_or_path") is not None
    read = {name: total for name, total in totals.items() if not any(leaf in name for leaf in QUANTIZED)}
    return {"backend": jax.default_backend(), "all": _digest(totals), "read": _digest(read) if named else None}


@jax.jit
def _bit_sum(x: jax.Array) -> jax.Array:
    """Returns the sum of the bit patterns of all elements of an array, modulo 2 ** 32. The order of summation does not
    change the result. NF4 codes are summed as if each byte held the codes of two neighbouring inputs."""
    if x.dtype == jnp.uint8:  # nf4: earlier versions stored two neighbouring inputs per byte; this sum equals theirs
        codes = (x & 15).astype(jnp.uint32) + (x >> 4).astype(jnp.uint32)
        return codes[::2].sum(dtype=jnp.uint32) + 16 * codes[1::2].sum(dtype=jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return bits.astype(jnp.uint32).sum(dtype=jnp.uint32)


def _digest(sums: Mapping[str, int]) -> str:
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()[:16]


def check_base(folder: Path, held: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises UserError if the adapters in `folder` belong to another base model: if the stored identity `held` and this
    run's identity (`Trainer.identity`) both have a fingerprint `base`, and they differ."""
    then = held.get("base")
    here = now.get("base")
    if then is None or here is None:
        return
    kind = "all" if then["backend"] == here["backend"] else "read"
    if then[kind] != here[kind]:
        raise UserError(
            f"{folder}: the adapters were trained with another base model: its frozen weights differ. Set that base "
            "model (model.path, model.quantize, model.param_dtype; training.seed for random weights), or set another "
            "training.output_dir."
        )


def without_adapters(graphdef: Any) -> Any:
    """Removes the adapters from the graph definition of a model, so that it fits the frozen parameters."""
    model: Decoder = nnx.merge(graphdef, [None] * graphdef.num_leaves)
    _take_out(model)
    return nnx.split(model)[0]


def _take_out(model: Decoder) -> None:
    for linear in model.projections().values():
        linear.lora_a = linear.lora_b = None
        linear.lora_scale = 1.0
    model.adapters = None


def merge_lora(model: Decoder) -> Decoder:
    """Returns a model without adapters and with merged weights.

    For weights W and an adapter with the matrices A and B, `W + A B * alpha / rank` is computed in float32 and rounded
    once to the dtype of the weights. Quantised weights are dequantised, even if the model has no adapters. The model
    itself is not changed.
    """
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
    """Returns the path or hub id of the initial weights; None if they were drawn at random."""
    return (config.source or {}).get("_name_or_path")


def save_adapter(
    model: Decoder, folder: str | Path, *, overwrite: bool = False, further: Mapping[str, bytes] | None = None
) -> None:
    """Writes the adapters in the PEFT format: `adapter_config.json` and `adapter_model.safetensors`, which
    `peft.PeftModel.from_pretrained(base, folder)` loads. If the weights are those of a multimodal model, the names are
    those in the multimodal class of transformers (`...ForConditionalGeneration`). The folder is created atomically.

    Args:
      overwrite: whether the folder of an earlier export is replaced, with all its files.
      further: contents of further files by name, such as a model card `README.md`.

    Raises:
      UserError: the model has no adapters, or the folder cannot be written or replaced (`output_folder.check_folder`).
    """
    check_decoder("model", model)
    if model.score is not None:
        raise UserError("the adapters of a reward model are useless without its head; export the whole model.")
    with written_whole(folder, overwrite, source_of(model.config)) as part:
        write_files(part, further)
        save_adapter_config(model, part)
        multimodal = (model.config.source or {}).get(MULTIMODAL)
        prefix = _PEFT_PREFIX_MULTIMODAL if multimodal else _PEFT_PREFIX
        tensors = {
            f"{prefix}{name}.{_PEFT_NAMES[leaf]}": np.ascontiguousarray(np.asarray(getattr(linear, leaf)[...]).T)
            for name, linear in _adapted(model).items()
            for leaf in LEAVES
        }
        save_tensors(tensors, part / ADAPTER_WEIGHTS)


def save_adapter_config(model: Decoder, folder: str | Path, **further: str | None) -> None:
    """Writes only `adapter_config.json`, with `further` fields."""
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
    """Returns the model with the adapters of a folder in the PEFT format, for further training or sampling.

    Raises:
      UserError: a file is missing, the adapter is of another type, or its tensors do not match the model. The message
        names the file and the field or tensor.
    """
    fields = read_adapter_config(folder)
    file = Path(folder) / ADAPTER_WEIGHTS
    if problem := file_problem(file):
        raise UserError(f"{file} {problem}. Save the adapter with PEFT again.")
    try:
        tensors = {_PREFIXES.sub(_PEFT_PREFIX, name, count=1): tensor for name, tensor in load_file(file).items()}
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{file}: cannot be read as safetensors ({error}). Save the adapter with PEFT again.") from None
    # `target_modules` may be a pattern, so the targets are taken from the tensor names
    present = {part for name in tensors for part in name.split(".") if part in LORA_TARGETS}
    targets = [name for name in LORA_TARGETS if name in present]
    if not targets:
        raise UserError(f"{file}: has no adapter of {', '.join(LORA_TARGETS)}.")
    adapted = add_lora(model, LoraConfig(rank=fields["r"], alpha=fields["lora_alpha"], targets=targets))
    wanted = {
        f"{_PEFT_PREFIX}{name}.{_PEFT_NAMES[leaf]}": (linear, leaf)
        for name, linear in _adapted(adapted).items()
        for leaf in LEAVES
    }
    for kind, names in (("lacks", wanted.keys() - tensors), ("has unexpected", tensors.keys() - wanted)):
        if names:
            raise UserError(f"{file}: {kind} tensor(s) {', '.join(sorted(names)[:3])}; it is for another model.")
    for name, (linear, leaf) in wanted.items():
        param = getattr(linear, leaf)
        if tensors[name].shape[::-1] != param.shape:
            raise UserError(
                f"{file}: tensor {name} has shape {tensors[name].shape}, but this model with r = {fields['r']} needs "
                f"{param.shape[::-1]}; it is for another model."
            )
        if not np.isfinite(tensors[name]).all():
            raise UserError(not_finite(file, name))
        param.set_value(jnp.asarray(tensors[name].T, jnp.float32))
    return adapted


def read_adapter_config(folder: str | Path) -> dict[str, Any]:
    """Reads the `adapter_config.json` of a plain LoRA adapter."""
    file = Path(folder) / ADAPTER_CONFIG
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read as JSON ({error}). Pass the folder of an adapter.") from None
    if not isinstance(fields, dict) or fields.get("peft_type") != "LORA":
        raise UserError(f"{file}: not the config of a LoRA adapter (peft_type = LORA).")
    wrong = [name for name in fields if name not in _IGNORED.split() and fields[name]]
    wrong += ["bias"] if fields.get("bias", "none") != "none" else []
    wrong += ["init_lora_weights"] if fields.get("init_lora_weights", True) not in _ADDED_TO_THE_BASE else []
    if wrong:
        raise UserError(
            f"{file}: {wrong[0]} = {fields[wrong[0]]!r} is not supported; merge the adapter with PEFT instead."
        )
    for name, kind in (("r", int), ("lora_alpha", int | float)):
        if isinstance(fields.get(name), bool) or not isinstance(fields.get(name), kind) or not fields[name] > 0:
            raise UserError(f"{file}: {name} = {fields.get(name)!r} must be a positive number.")
    return fields
