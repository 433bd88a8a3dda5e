"""Reads and writes model weights as safetensors under Hugging Face names.

The modules of the decoder have the attribute names of HF, so the tensor names follow a rule (`hf_name`), and no list
per family is needed. The experts of a layer are stacked in one array in memory, and are separate tensors in the files.
Parameter trees are pure dicts, such as `nnx.to_pure_dict` returns. Pickled weights are never opened.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from safetensors.numpy import save_file

from tunix_like.config.schema import LORA_TARGETS
from tunix_like.errors import UserError
from tunix_like.models.config import DecoderConfig
from tunix_like.models.quantization import LEAVES as QUANTIZED_LEAVES
from tunix_like.models.quantization import quantize
from tunix_like.models.stored import (
    INDEX,
    PICKLES,
    SINGLE,
    Stored,
    index_of,
    of_decoder,
    open_tensors,
    place,
    tensors_equal,
)
from tunix_like.runtime import progress

Params = dict[Any, Any]
"""Nested dict of arrays. The keys are attribute names of modules, ints for layer numbers, and `kernel`, `bias`, `scale`
or `embedding` at the leaves."""

_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_FLOATS = ("F64", "F32", "F16", "BF16")
# Buffers in old exports. They are ignored, because their values follow from the config.
_HARMLESS = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_LEAVES = {"kernel": "weight", "embedding": "weight", "scale": "weight", "bias": "bias"}
_EXPERTS = "experts"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def hf_name(path: tuple[Any, ...], expert: int | None = None) -> str:
    """Returns the HF name of a parameter. For example, `("layers", 0, "mlp", "up_proj", "kernel")` becomes
    `"model.layers.0.mlp.up_proj.weight"`. The number `expert`, if given, is inserted after the part `experts`.

    Kernels are `[in, out]` here and `[out, in]` in HF; all other parameters have the same shape in both.

    Raises:
      UserError: the leaf is not a weight of a plain decoder (for example, it belongs to an adapter).
    """
    if path[-1] not in _LEAVES:
        raise UserError(f"parameter {'.'.join(map(str, path))} has no Hugging Face name; merge adapters first.")
    prefix = () if path[0] == "lm_head" else ("model",)
    modules = (part for name in path[:-1] for part in ((name, expert) if name == _EXPERTS else (name,)))
    return ".".join(map(str, (*prefix, *modules, _LEAVES[path[-1]])))


def _names(path: tuple[Any, ...], leaf: Any) -> list[str]:
    """Returns the names of the tensors of a parameter: one name, or one name per expert."""
    return [hf_name(path, expert) for expert in range(leaf.shape[0])] if _EXPERTS in path else [hf_name(path)]


def load_weights(
    folder: str | Path, abstract_params: Params, config: DecoderConfig, quantized: str | None = None
) -> Params:
    """Reads the weights of a model. For a multimodal model, only the weights of its text decoder are read.

    Each shard of a parameter is read directly to its device, and the host holds one shard at a time.

    Args:
      folder: contains `model.safetensors`, or `model.safetensors.index.json` with its shards.
      abstract_params: tree of `jax.ShapeDtypeStruct`; each tensor is cast to the dtype of its leaf and placed with the
        sharding of the leaf (None: the default device).
      config: defines whether the output head is tied to the embedding.
      quantized: quantisation of the projections of the layers, one of `schema.QUANTIZATIONS`; None: no quantisation.

    Returns:
      the tree of `abstract_params` with arrays; quantised kernels are replaced by codes and scales.

    Raises:
      UserError: there are no safetensors, a file is truncated, a tensor is missing, unexpected, of the wrong shape or
        not of a float type, or a head differs from the embedding that it is tied to. The message names file and
        tensor.
    """
    with contextlib.ExitStack() as stack:
        wanted, stored = _compared(Path(folder), abstract_params, config, stack)
        if config.tie_embeddings and _HEAD in stored:
            _check_tied(stored)
        params: Params = {}
        advance = stack.enter_context(progress.task("loading weights", len(wanted)))
        for path, leaf, names in wanted:
            tensors = [stored[name] for name in names]
            array = place(tensors, leaf, transposed=path[-1] == "kernel", stacked=_EXPERTS in path)
            if quantized is not None and _is_projection(path):  # immediately, so at most one kernel is held unquantised
                for name, part in zip(QUANTIZED_LEAVES, quantize(array, quantized), strict=True):
                    _put(params, (*path[:-1], name), part)
            else:
                _put(params, path, array)
            advance(1)
    return params


def _is_projection(path: tuple[Any, ...]) -> bool:
    """Returns whether a parameter is the kernel of a projection of attention or of an MLP without experts."""
    return path[-1] == "kernel" and path[-2] in LORA_TARGETS and _EXPERTS not in path


def check_weights(folder: str | Path, abstract_params: Params, config: DecoderConfig) -> str:
    """Checks, without reading weights, that the safetensors headers of a folder have the names, shapes and types that
    `load_weights` needs. If files that the index names are missing, only the names in the index are compared.

    Returns:
      a description of what was compared.

    Raises:
      UserError: as in `load_weights`, with two exceptions. The values of a tied head are not compared, and missing
        weight files are not an error.
    """
    folder = Path(folder)
    if not (folder / SINGLE).is_file():
        if (folder / INDEX).is_file():
            weight_map = index_of(folder)
            files = set(weight_map.values())
            if absent := [name for name in files if not (folder / name).is_file()]:
                needed = {name for path, leaf in _leaves(abstract_params) for name in _names(path, leaf)}
                _check_names(folder, needed, set(of_decoder(dict(weight_map))))
                return f"{len(absent)} of {len(files)} files are missing; the names in the index match"
        elif not any(file.suffix in PICKLES for file in folder.iterdir()):
            return "not present, so not compared"
    with contextlib.ExitStack() as stack:
        wanted, _ = _compared(folder, abstract_params, config, stack)
    return f"the headers of all {sum(len(names) for *_, names in wanted)} tensors match; the values were not read"


def _compared(
    folder: Path, abstract_params: Params, config: DecoderConfig, stack: contextlib.ExitStack
) -> tuple[list[tuple[tuple[Any, ...], Any, list[str]]], dict[str, Stored]]:
    """Opens the weight files and checks their headers against the abstract parameters. Returns for every parameter its
    path in the tree, its abstract array and the names of its tensors; and all open tensors by name."""
    _check_head(abstract_params, config)
    wanted = [(path, leaf, _names(path, leaf)) for path, leaf in _leaves(abstract_params)]
    stored = open_tensors(folder, stack)
    _check_names(folder, {name for _, _, names in wanted for name in names}, set(stored))
    for path, leaf, names in wanted:
        for name in names:
            _check_tensor(stored[name], leaf.shape[-2:][::-1] if path[-1] == "kernel" else leaf.shape)
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
    tensors, sizes = {}, {}
    for path, leaf in _leaves(params):
        for expert, name in enumerate(names := _names(path, leaf)):
            tensors[name] = path, leaf, expert
            sizes[name] = leaf.nbytes // len(names)
    files = _plan(sizes, max_file_bytes)
    temporary = {file: f".{file}.{os.getpid()}.tmp" for file in files}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            for file, names in files.items():
                arrays = {name: _to_host(*tensors[name]) for name in names}
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
    file readable for its owner only.

    Raises:
      OSError: the file cannot be written.
    """
    file.touch()
    mode = file.stat().st_mode
    try:
        # transformers before version 5 rejects a file without this entry
        save_file(arrays, file, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from error
    file.chmod(stat.S_IMODE(mode))


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def _publish(folder: Path, temporary: Mapping[str, str], files: Mapping[str, list[str]], total: int) -> None:
    """Renames the finished temporary weight files to their final names, and removes old weight files. If there are
    several new files, the old single file and the old index are removed first, and a new index is written last."""
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
    """Assigns tensors to files in the order of `sizes`; returns file name -> tensor names. A file has at most `limit`
    bytes, or only one tensor, which is larger."""
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
    if ("lm_head" in params) == config.tie_embeddings:
        raise UserError(
            f"the parameter tree has {'an' if 'lm_head' in params else 'no'} lm_head, but the config has"
            f" tie_embeddings = {config.tie_embeddings}; use parameters and config of the same model."
        )


def _check_names(folder: Path, wanted: set[str], found: set[str]) -> None:
    missing = sorted(wanted - found)
    # The files of a tied model may contain a head; `_check_tied` compares its values.
    unexpected = sorted(name for name in found - wanted - {_HEAD} if not _HARMLESS.search(name))
    for kind, names in (("lack", missing), ("have unexpected", unexpected)):
        if names:
            rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
            tied = " If the head is the embedding, set tie_word_embeddings = true." if names == [_HEAD] else ""
            raise UserError(
                f"{folder}: its weights {kind} tensor(s) {', '.join(names[:3])}{rest}. The weights do not match"
                f" config.json, or a file is missing.{tied}"
            )


def _check_tensor(tensor: Stored, shape: tuple[int, ...]) -> None:
    """Checks shape and dtype in the header of a tensor, before any weights are read."""
    if tensor.shape != shape:
        raise UserError(
            f"{tensor.file}: tensor {tensor.name} has shape {tensor.shape}, but config.json needs {shape}. Weights and"
            " config are of different models; use the files of one model."
        )
    if tensor.kind not in _FLOATS:
        raise UserError(
            f"{tensor.file}: tensor {tensor.name} is stored as {tensor.kind}; quantised weights are not supported. Use"
            " the checkpoint in bfloat16, float16 or float32."
        )


def _check_tied(stored: Mapping[str, Stored]) -> None:
    if not tensors_equal(stored[_HEAD], stored[_EMBEDDING]):
        raise UserError(
            f"{stored[_HEAD].file}: {_HEAD} differs from {_EMBEDDING}, but config.json has tie_word_embeddings = true."
            " Set it to false to use the head, or remove the tensor."
        )


def _to_host(path: tuple[Any, ...], leaf: Any, expert: int) -> np.ndarray:
    array = np.asarray(leaf[expert] if _EXPERTS in path else leaf)
    return np.ascontiguousarray(array.T if path[-1] == "kernel" else array)


def _leaves(tree: Mapping[Any, Any], path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value


def _put(tree: Params, path: tuple[Any, ...], value: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value
