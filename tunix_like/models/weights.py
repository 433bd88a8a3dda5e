"""Reads and writes model weights as safetensors under Hugging Face names.

The modules of the decoder have the attribute names of HF, so the tensor names follow a rule (`hf_name`), and no list
per family is needed. The experts of a layer are stacked in one array in memory, and are separate tensors in the files.
Experts with biases (GPT-OSS) are fused in the files instead: one tensor for all experts, in which the columns of gate
and up alternate. It may be packed in MXFP4. Experts beside a shared MLP are fused with the rows of gate before those of
up, or separate. Parameter trees are pure dicts, such as `nnx.to_pure_dict` returns. Pickled
weights are never opened.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import safetensors
from flax.nnx.traversals import flatten_mapping, unflatten_mapping
from safetensors.numpy import save_file

from tunix_like.config.schema import LORA_TARGETS
from tunix_like.errors import UserError
from tunix_like.models import gguf_files
from tunix_like.models.config import DecoderConfig
from tunix_like.models.quantization import LEAVES as QUANTIZED_LEAVES
from tunix_like.models.quantization import quantize
from tunix_like.models.stored_tensors import FLOATS, Index, OfExpert, PackedExpert, RowsOfExpert, Stored, Tensor
from tunix_like.runtime import progress
from tunix_like.runtime.atomic import write_atomically
from tunix_like.runtime.input_files import path_below, read_object

Params = dict[Any, Any]
"""Nested dict of arrays. The keys are attribute names of modules, ints for layer numbers, and `kernel`, `bias`, `scale`
or `embedding` at the leaves."""

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_DECODER = "language_model."  # in the tensor names of the text decoder of a multimodal model, before or after `model.`
_OTHER_PARTS = re.compile(
    r"(model\.)?(vision_tower|multi_modal_projector|visual|audio_tower|embed_vision|embed_audio)\.|mtp\."
)
"""Encoders of images and sounds, and layers that predict several tokens."""
_OF_KEYS = re.compile(r"model\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.weight$")
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
# Buffers in old exports. They are ignored, because their values follow from the config.
_HARMLESS = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_LEAVES = {"kernel": "weight", "embedding": "weight", "scale": "weight", "bias": "bias", "sinks": "sinks"}
_LEAVES |= {"taps": "weight", "A_log": "A_log", "dt_bias": "dt_bias"}  # of recurrent layers
_LEAVES |= {"input_scale": "scale", "per_expert_scale": "per_expert_scale", "layer_scalar": "layer_scalar"}
_EXPERTS = "experts"
_HALVES = ("gate_proj", "up_proj")
"""The projections that share a fused tensor of experts, in this order."""
_PACKED = ("_blocks", "_scales")
_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"


def hf_name(path: tuple[Any, ...], expert: int | None = None) -> str:
    """Returns the HF name of a parameter. For example, `("layers", 0, "mlp", "up_proj", "kernel")` becomes
    `"model.layers.0.mlp.up_proj.weight"`. The number `expert`, if given, is inserted after the part `experts`.

    Kernels are `[in, out]` here and `[out, in]` in HF; all other parameters have the same shape in both.

    Raises:
      UserError: the leaf is not a weight of a plain decoder (for example, it belongs to an adapter).
    """
    if path[-1] not in _LEAVES:
        raise UserError(f"parameter {'.'.join(map(str, path))} has no Hugging Face name; merge adapters first.")
    prefix = () if path[0] in ("lm_head", "score") else ("model",)
    modules = (
        part for name in path[:-1] for part in ((name, expert) if expert is not None and name == _EXPERTS else (name,))
    )
    return ".".join(map(str, (*prefix, *modules, _LEAVES[path[-1]])))


def fused_name(path: tuple[Any, ...]) -> str:
    """Returns the HF name of the fused tensor that has a parameter of experts, without `.weight` and with `_bias` for
    `.bias`. The tensors of gate and up have the same name."""
    name = hf_name(path).replace(".gate_proj.", ".gate_up_proj.").replace(".up_proj.", ".gate_up_proj.")
    return name.removesuffix(".weight").replace("_proj.bias", "_proj_bias")


def _alternate(config: DecoderConfig) -> bool:
    return config.experts is not None and config.experts.biases


def _is_fused(path: tuple[Any, ...], config: DecoderConfig, found: Container[str]) -> bool:
    """Returns whether a parameter is part of a fused tensor; for an empty `found`, in the files that are written."""
    if _EXPERTS not in path or config.experts is None:
        return False
    return config.experts.biases or (config.experts.shared is not None and hf_name(path, 0) not in found)


def _names(path: tuple[Any, ...], leaf: Any, config: DecoderConfig, found: Container[str] = ()) -> list[str]:
    """Returns the names of the tensors that hold a parameter: of packed tensors, if `found` has these."""
    if _alternate(config) and _EXPERTS not in path:
        return [hf_name(tuple("router" if name == "gate" else name for name in path))]
    if _is_fused(path, config, found):
        name = fused_name(path)
        packed = [name + end for end in _PACKED]
        return packed if any(part in found for part in packed) else [name]
    return [hf_name(path, expert) for expert in range(leaf.shape[0])] if _EXPERTS in path else [hf_name(path)]


def _all_names(abstract_params: Params, config: DecoderConfig, found: Container[str]) -> set[str]:
    leaves = flatten_mapping(abstract_params).items()
    return {name for path, leaf in leaves for name in _names(path, leaf, config, found)}


def _source(path: tuple[Any, ...], leaf: Any, config: DecoderConfig, stored: Mapping[str, Any]) -> ParameterSource:
    tensors = [stored[name] for name in _names(path, leaf, config, stored)]
    kernel = path[-1] == "kernel"
    stacked = _EXPERTS in path
    if not stacked or not _is_fused(path, config, stored):
        return ParameterSource(tensors, kernel, stacked)
    if len(found := tensors[0].shape) < 2 or found[0] != leaf.shape[0]:
        raise UserError(
            f"{tensors[0].file}: tensor {tensors[0].name} has shape {found}, but config.json needs {leaf.shape[0]}"
            " experts. Weights and config are of different models; use the files of one model."
        )
    parts = len(_HALVES) if path[-2] in _HALVES else 1
    if not _alternate(config):
        return ParameterSource(
            [RowsOfExpert(tensors[0], i, _half(path), parts) for i in range(leaf.shape[0])], True, True
        )
    columns = slice(_half(path), None, parts)
    if len(tensors) == 1:
        return ParameterSource([OfExpert(tensors[0], expert, columns) for expert in range(leaf.shape[0])], False, True)
    codes, scales = tensors
    return ParameterSource(
        [PackedExpert(codes, scales, expert, columns) for expert in range(leaf.shape[0])], True, True
    )


def _half(path: tuple[Any, ...]) -> int:
    return _HALVES.index(path[-2]) if path[-2] in _HALVES else 0


def load_weights(
    folder: str | Path, abstract_params: Params, config: DecoderConfig, quantized: str | None = None
) -> Params:
    """Reads the weights of a model. For a multimodal model, only the weights of its text decoder are read.

    Each shard of a parameter is read directly to its device, and the host holds one shard at a time.

    Args:
      folder: contains `model.safetensors`, or `model.safetensors.index.json` with its shards.
      abstract_params: tree of `jax.ShapeDtypeStruct`; each tensor is cast to the dtype of its leaf and placed with the
        sharding of the leaf (None: the default device).
      quantized: quantisation of the projections of the layers, one of `schema.QUANTIZATIONS`.

    Returns:
      the tree of `abstract_params` with arrays; quantised kernels are replaced by codes and scales.

    Raises:
      UserError: there are no safetensors, a file is truncated, a tensor is missing, unexpected, of the wrong shape,
        not of a float type or not finite, or a head differs from the embedding that it is tied to. The message names
        file and tensor.
    """
    with contextlib.ExitStack() as stack:
        wanted, stored = _compared(Path(folder), abstract_params, config, stack)
        if config.tie_embeddings and _HEAD in stored:
            _check_tied(stored)
        params: dict[tuple[Any, ...], jax.Array] = {}
        advance = stack.enter_context(progress.task("loading weights", len(wanted)))
        for path, leaf, source in wanted:
            array = place(source, leaf)
            if quantized is not None and _is_projection(path):  # immediately, so at most one kernel is held unquantised
                for name, part in zip(QUANTIZED_LEAVES, quantize(array, quantized), strict=True):
                    params[*path[:-1], name] = part
            else:
                params[path] = array
            advance(1)
    return unflatten_mapping(params)


def _is_projection(path: tuple[Any, ...]) -> bool:
    return path[-1] == "kernel" and path[-2] in LORA_TARGETS and _EXPERTS not in path


def check_weights(folder: str | Path, abstract_params: Params, config: DecoderConfig) -> str:
    """Checks, without reading weights, that the safetensors headers of a folder have the names, shapes and types that
    `load_weights` needs; if files of the index are missing, only the names. Returns a description of what was compared.
    """
    folder = Path(folder)
    if not (folder / SINGLE).is_file():
        if (folder / INDEX).is_file():
            weight_map = index_of(folder)
            files = set(weight_map.values())
            if absent := [name for name in files if not (folder / name).is_file()]:
                _check_names(folder, abstract_params, config, set(of_decoder(dict(weight_map))))
                return f"{len(absent)} of {len(files)} files are missing; the names in the index match"
        elif not any(file.suffix in (*PICKLES, gguf_files.SUFFIX) for file in folder.iterdir()):
            return "not present, so not compared"
    with contextlib.ExitStack() as stack:
        _, stored = _compared(folder, abstract_params, config, stack)
    count = len(_all_names(abstract_params, config, stored))
    return f"the headers of all {count} tensors match; the values were not read"


def _compared(
    folder: Path, abstract_params: Params, config: DecoderConfig, stack: contextlib.ExitStack
) -> tuple[list[tuple[tuple[Any, ...], Any, ParameterSource]], dict[str, Tensor]]:
    """Opens the weight files and checks their headers. Returns for every parameter its path in the tree, its abstract
    array and where it is stored; and all open tensors by name."""
    _check_head(abstract_params, config)
    stored = open_tensors(folder, stack)
    _check_names(folder, abstract_params, config, set(stored))
    wanted = []
    for path, leaf in flatten_mapping(abstract_params).items():
        source = _source(path, leaf, config, stored)
        shape = leaf.shape[1:] if source.stacked else leaf.shape
        for tensor in source.tensors:
            _check_tensor(tensor, shape[::-1] if source.transposed else shape)
        wanted.append((path, leaf, source))
    return wanted, stored


def save_weights(
    params: Params, folder: str | Path, config: DecoderConfig, *, max_file_bytes: int = 4 * 1024**3
) -> None:
    """Writes `model.safetensors`, or shards with an index if the weights exceed `max_file_bytes` (a tensor is never
    split). A tied head is not written.

    Files are written under temporary names, and are renamed when all files are complete. Existing weights in the folder
    are replaced. A concurrent reader sees the old weights, no weights or the new weights, and never a mixture.

    Raises:
      UserError: the folder cannot be written, or the tree does not match the config.
    """
    folder = Path(folder)
    _check_head(params, config)
    tensors: dict[str, list[tuple[tuple[Any, ...], Any, int | None]]] = {}
    sizes: dict[str, int] = {}
    for path, leaf in flatten_mapping(params).items():
        names = _names(path, leaf, config)
        separate = _EXPERTS in path and not _is_fused(path, config, ())
        for expert, name in enumerate(names):
            tensors.setdefault(name, []).append((path, leaf, expert if separate else None))
            sizes[name] = sizes.get(name, 0) + leaf.nbytes // len(names)
    files = _plan(sizes, max_file_bytes)
    temporary = {file: f".{file}.{os.getpid()}.tmp" for file in files}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            for file, names in files.items():
                arrays = {name: _to_host(tensors[name], _alternate(config)) for name in names}
                save_tensors(arrays, folder / temporary[file])
                del arrays
            _publish(folder, temporary, files, sum(sizes.values()))
        finally:
            for left_over in temporary.values():
                (folder / left_over).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot write the weights: {error}") from error


def save_tensors(arrays: dict[str, np.ndarray], file: Path) -> None:
    """Writes a safetensors file with the permissions that the umask gives. The safetensors library alone would make the
    file readable for its owner only."""
    file.touch()
    mode = file.stat().st_mode
    try:
        # transformers before version 5 rejects a file without this entry
        save_file(arrays, file, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from error
    file.chmod(stat.S_IMODE(mode))


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, json.dumps(value, indent=2) + "\n")


def _publish(folder: Path, temporary: Mapping[str, str], files: Mapping[str, list[str]], total: int) -> None:
    """Renames the finished temporary files and removes old weight files, an index first; a new index comes last."""
    stale = [path for path in folder.iterdir() if _SHARD.fullmatch(path.name) and path.name not in files]
    if SINGLE in files:
        (folder / temporary[SINGLE]).replace(folder / SINGLE)
        (folder / INDEX).unlink(missing_ok=True)
    else:
        (folder / SINGLE).unlink(missing_ok=True)
        (folder / INDEX).unlink(missing_ok=True)
        for file, name in temporary.items():
            (folder / name).replace(folder / file)
        weight_map = {name: file for file, names in files.items() for name in names}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    for path in stale:
        path.unlink()


def _plan(sizes: Mapping[str, int], limit: int) -> dict[str, list[str]]:
    """Returns file name -> tensor names. A file has at most `limit` bytes, or one larger tensor."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if groups[-1] and used + size > limit:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": names for i, names in enumerate(groups, start=1)}


def _check_head(params: Params, config: DecoderConfig) -> None:
    if ("lm_head" in params) == (config.tie_embeddings or config.scalar_head):
        raise UserError(
            f"the parameter tree has {'an' if 'lm_head' in params else 'no'} lm_head, but the config has"
            f" tie_embeddings = {config.tie_embeddings}; use parameters and config of the same model."
        )


def _check_names(folder: Path, abstract_params: Params, config: DecoderConfig, found: set[str]) -> None:
    wanted = _all_names(abstract_params, config, found)
    missing = sorted(wanted - found)
    # The files of a tied model may contain a head; `_check_tied` compares its values.
    unexpected = sorted(
        name for name in found - wanted - {_HEAD} if not _HARMLESS.search(name) and not _is_unused(name, config)
    )
    for kind, names in (("lack", missing), ("have unexpected", unexpected)):
        if names:
            rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
            tied = " If the head is the embedding, set tie_word_embeddings = true." if names == [_HEAD] else ""
            raise UserError(
                f"{folder}: its weights {kind} tensor(s) {', '.join(names[:3])}{rest}. The weights do not match"
                f" config.json, or a file is missing.{tied}"
            )


def _is_unused(name: str, config: DecoderConfig) -> bool:
    """Whether a tensor is for keys and values of a layer that uses those of another layer."""
    found = _OF_KEYS.match(name)
    return found is not None and config.num_layers - config.shared_kv_layers <= int(found[1]) < config.num_layers


def _check_tensor(tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise UserError(
            f"{tensor.file}: tensor {tensor.name} has shape {tensor.shape}, but config.json needs {shape}. Weights and"
            " config are of different models; use the files of one model."
        )
    if tensor.kind not in FLOATS:
        raise UserError(
            f"{tensor.file}: tensor {tensor.name} is stored as {tensor.kind}; quantised weights are not supported. Use"
            " the checkpoint in bfloat16, float16 or float32."
        )


def _check_tied(stored: Mapping[str, Tensor]) -> None:
    if not tensors_equal(stored[_HEAD], stored[_EMBEDDING]):
        raise UserError(
            f"{stored[_HEAD].file}: {_HEAD} differs from {_EMBEDDING}, but config.json has tie_word_embeddings = true."
            " Set it to false to use the head, or remove the tensor."
        )


def _to_host(parts: list[tuple[tuple[Any, ...], Any, int | None]], alternate: bool) -> np.ndarray:
    """Returns a tensor for a file, from one parameter (of one expert), or from those of gate and up, whose columns
    alternate in the file or follow each other as rows."""
    arrays = [
        np.asarray(leaf if expert is None else leaf[expert])
        for _, leaf, expert in sorted(parts, key=lambda part: _half(part[0]))
    ]
    if alternate and len(arrays) > 1:
        return np.stack(arrays, axis=-1).reshape(*arrays[0].shape[:-1], -1)
    path = parts[0][0]
    transposed = path[-1] == "kernel" and not (alternate and _EXPERTS in path)
    arrays = [array.swapaxes(-1, -2) if transposed else array for array in arrays]
    return np.ascontiguousarray(arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=-2))


class ParameterSource(NamedTuple):
    """Where a parameter is stored.

    Attributes:
      transposed: whether the last two axes are swapped in the file.
      stacked: whether the first axis of the parameter runs over the tensors.
    """

    tensors: Sequence[Tensor]
    transposed: bool
    stacked: bool


def place(source: ParameterSource, leaf: Any) -> jax.Array:
    """Reads one parameter, with at most one shard on the host at a time. `leaf` has its shape, dtype and sharding;
    without a sharding, the default device is used."""
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    holders: dict[Any, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        full = tuple(slice(*part.indices(size)) for part, size in zip(index or (), leaf.shape, strict=True))
        holders.setdefault(tuple((part.start, part.stop) for part in full), []).append(device)

    def to_devices(index: Index, devices: list[Any]) -> list[jax.Array]:
        host = _read(source, index, leaf.dtype)
        return jax.block_until_ready([jax.device_put(host, device) for device in devices])

    parts: list[jax.Array] = []
    for bounds, devices in holders.items():
        parts += to_devices(tuple(slice(*ends) for ends in bounds), devices)
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)


def _read(source: ParameterSource, index: Index, dtype: Any) -> np.ndarray:
    out = np.empty([part.stop - part.start for part in index], dtype)
    pairs: Iterable[tuple[Tensor, np.ndarray]] = [(source.tensors[0], out)]
    if source.stacked:
        pairs = zip(source.tensors[index[0]], list(out), strict=True)
    within = index[1:] if source.stacked else index
    for tensor, array in pairs:
        file_index, target = (within[::-1], array.T) if source.transposed else (within, array)
        for rows, block in tensor.blocks(file_index):
            if not _all_finite(block):
                raise UserError(not_finite(tensor.file, tensor.name))
            target[rows] = block
    return out


def _all_finite(block: np.ndarray) -> bool:
    """Returns whether no value is NaN or infinite. The bits of infinity are the exponent bits; they are all set only in
    NaN and infinity. `np.isfinite` takes ten times as long for bfloat16."""
    bits = np.dtype(f"u{block.dtype.itemsize}")
    exponent = np.array(np.inf, block.dtype).view(bits)
    return not block.size or bool((block.view(bits) & exponent).max() != exponent)


def not_finite(file: Path, name: str) -> str:
    return (
        f"{file}: tensor {name} has NaN or infinite values. Download the file again, or use weights that were saved"
        " before they diverged."
    )


def tensors_equal(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape:
        return False
    everything = tuple(slice(None) for _ in first.shape)
    pairs = zip(first.blocks(everything), second.blocks(everything), strict=True)
    return all(np.array_equal(one, other) for (_, one), (_, other) in pairs)


def open_tensors(folder: Path, stack: contextlib.ExitStack) -> dict[str, Tensor]:
    """Opens the weight files of a folder; returns the tensors by the names that a text-only model uses."""
    tensors: dict[str, Tensor] = {}
    for file in _files(folder):
        if file.suffix == gguf_files.SUFFIX:
            return gguf_files.open_gguf(file)
        try:
            reader = stack.enter_context(safetensors.safe_open(file, framework="numpy"))
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(
                f"{file}: cannot be read as safetensors ({error}). It may be truncated or a Git LFS pointer;"
                " download it again."
            ) from None
        tensors |= {name: Stored(file, reader, name) for name in reader.keys()}  # noqa: SIM118 (not a mapping)
    return of_decoder(tensors)


def of_decoder(tensors: dict[str, Any]) -> dict[str, Any]:
    """Selects the tensors of the text decoder and renames them to the names that a text-only model uses."""
    decoder = {name: tensor for name, tensor in tensors.items() if not _OTHER_PARTS.match(name)}
    return {name.replace(_DECODER, "", 1): tensor for name, tensor in decoder.items()}


def _files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        if packed := sorted(folder.glob(f"*{gguf_files.SUFFIX}")):
            return packed[:1]
        pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
        if pickles:
            raise UserError(
                f"{folder}: has only pickled weights ({', '.join(pickles[:3])}), which can run code when opened and"
                f" are never read here. Save the model as safetensors (with transformers: `AutoModelForCausalLM"
                f'.from_pretrained("{folder}").save_pretrained("OUT")`), or download its safetensors files.'
            )
        raise UserError(
            f"{folder}: has no {SINGLE} and no {INDEX}. Put the model's safetensors there, or set init to 'random'."
        )
    files = [folder / name for name in sorted(set(index_of(folder).values()))]
    if absent := [file.name for file in files if not file.is_file()]:
        raise UserError(f"{folder}: {INDEX} names files that do not exist: {', '.join(absent)}. Download them.")
    return files


def index_of(folder: Path) -> dict[str, str]:
    """Reads the weight index of a folder: tensor name -> file name."""
    index = folder / INDEX
    files = read_object(index, "Download it again.").get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
        raise UserError(f"{index}: not a valid weight index, since its weight_map names no files. Download it again.")
    for file in set(files.values()):
        path_below(folder, file, str(index))
    return files
