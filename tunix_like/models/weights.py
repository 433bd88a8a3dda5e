"""Safetensors in and out, under Hugging Face's names.

The decoder's modules carry HF's attribute names, so the table of names is a rule (`hf_name`) and not a list per family.
Experts lie side by side in one array here and each under its own name there.
This module knows files and parameter trees (pure dicts, as `nnx.to_pure_dict` makes them). It does not know what the
model computes, and it never opens a pickle.
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
from tunix_like.models.stored import INDEX, PICKLES, SINGLE, Stored, index_of, of_decoder, open_tensors, place, same
from tunix_like.runtime import progress

Params = dict[Any, Any]
"""Nested dict of arrays: module attribute names (layer numbers are ints) down to `kernel`, `bias`, `scale`,
`embedding`."""

_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_FLOATS = ("F64", "F32", "F16", "BF16")
# Buffers that old exports saved beside the weights and that are computed from the config.
_HARMLESS = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_LEAVES = {"kernel": "weight", "embedding": "weight", "scale": "weight", "bias": "bias"}
_EXPERTS = "experts"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def hf_name(path: tuple[Any, ...], expert: int | None = None) -> str:
    """`("layers", 0, "mlp", "up_proj", "kernel")` -> `"model.layers.0.mlp.up_proj.weight"`; an expert's number stands
    behind `experts`.

    Kernels are `[in, out]` here and `[out, in]` under HF's name; everything else has the same shape in both.

    Raises:
      UserError: the leaf is no weight of a plain decoder (an adapter's, say).
    """
    if path[-1] not in _LEAVES:
        raise UserError(f"parameter {'.'.join(map(str, path))} has no Hugging Face name; merge adapters first.")
    prefix = () if path[0] == "lm_head" else ("model",)
    modules = (part for name in path[:-1] for part in ((name, expert) if name == _EXPERTS else (name,)))
    return ".".join(map(str, (*prefix, *modules, _LEAVES[path[-1]])))


def _names(path: tuple[Any, ...], leaf: Any) -> list[str]:
    """The names of a parameter's tensors: one, or one for each expert."""
    return [hf_name(path, expert) for expert in range(leaf.shape[0])] if _EXPERTS in path else [hf_name(path)]


def load_weights(
    folder: str | Path, abstract_params: Params, config: DecoderConfig, quantized: str | None = None
) -> Params:
    """Reads a model's weights, each device's part of a parameter straight to it: the host holds one part at a time. Of
    a model that reads more than text, the decoder's.

    Args:
      folder: holds `model.safetensors`, or `model.safetensors.index.json` with its shards.
      abstract_params: tree of `jax.ShapeDtypeStruct`; each tensor is cast to its leaf's dtype and put where the leaf's
        sharding says (the default device when it says nothing).
      config: says whether the output head is tied.
      quantized: one of `config.QUANTIZATIONS`, for the projections of the layers; None: as they are.

    Returns:
      the tree of `abstract_params`, with arrays; codes and scales in the place of what is quantised.

    Raises:
      UserError: no safetensors, a truncated file, a tensor that is missing, unexpected, mis-shaped or not of a float
        type, or a head that differs from the embedding it should be tied to. File and tensor are named.
    """
    with contextlib.ExitStack() as stack:
        wanted, found = _compared(Path(folder), abstract_params, config, stack)
        if config.tie_embeddings and _HEAD in found:
            _check_tied(found)
        params: Params = {}
        advance = stack.enter_context(progress.task("loading weights", len(wanted)))
        for path, leaf, names in wanted:
            tensors = [found[name] for name in names]
            array = place(tensors, leaf, transposed=path[-1] == "kernel", stacked=_EXPERTS in path)
            if quantized is not None and _is_projection(path):  # before the next is read: they never exist together
                for name, part in zip(QUANTIZED_LEAVES, quantize(array, quantized), strict=True):
                    _put(params, (*path[:-1], name), part)
            else:
                _put(params, path, array)
            advance(1)
    return params


def _is_projection(path: tuple[Any, ...]) -> bool:
    """Whether a parameter is the kernel of one of `Decoder.projections`."""
    return path[-1] == "kernel" and path[-2] in LORA_TARGETS and _EXPERTS not in path


def check_weights(folder: str | Path, abstract_params: Params, config: DecoderConfig) -> str:
    """Compares names, shapes and types in the headers of a folder's safetensors with what `load_weights` would ask for,
    and reads no weights. Where files that an index names are missing, the names in it are compared.

    Returns:
      what was compared, in words.

    Raises:
      UserError: as `load_weights`, but a tied head's numbers are not looked at, and missing weights are no error.
    """
    folder = Path(folder)
    if not (folder / SINGLE).is_file():
        if (folder / INDEX).is_file():
            where = index_of(folder)
            files = set(where.values())
            if absent := [name for name in files if not (folder / name).is_file()]:
                asked = {name for path, leaf in _leaves(abstract_params) for name in _names(path, leaf)}
                _check_names(folder, asked, set(of_decoder(dict(where))))
                return f"{len(absent)} of {len(files)} files are not here; the names in their index fit"
        elif not any(file.suffix in PICKLES for file in folder.iterdir()):
            return "none here to compare"
    with contextlib.ExitStack() as stack:
        wanted, _ = _compared(folder, abstract_params, config, stack)
    return f"all {sum(len(names) for *_, names in wanted)} tensors fit by their headers; they were not read"


def _compared(
    folder: Path, abstract_params: Params, config: DecoderConfig, stack: contextlib.ExitStack
) -> tuple[list[tuple[tuple[Any, ...], Any, list[str]]], dict[str, Stored]]:
    """Path, leaf and tensor names of every parameter, and the tensors of the open files, which fit them."""
    _check_head(abstract_params, config)
    wanted = [(path, leaf, _names(path, leaf)) for path, leaf in _leaves(abstract_params)]
    found = open_tensors(folder, stack)
    _check_names(folder, {name for _, _, names in wanted for name in names}, set(found))
    for path, leaf, names in wanted:
        for name in names:
            _check_tensor(found[name], leaf.shape[-2:][::-1] if path[-1] == "kernel" else leaf.shape)
    return wanted, found


def save_weights(
    params: Params, folder: str | Path, config: DecoderConfig, *, max_file_bytes: int = 4 * 1024**3
) -> None:
    """Writes `model.safetensors`, or shards with an index when the weights exceed `max_file_bytes` (a tensor is never
    split). A tied head is not written. Files appear under their names only when complete; weights that stood in the
    folder before are replaced, and a reader meets the old ones, none, or the new ones, never a mixture.

    Raises:
      UserError: the folder cannot be written, or the tree is not this config's.
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
    """Writes a safetensors file with the mode that the umask says: the library makes one for its owner alone. Raises
    OSError."""
    file.touch()
    mode = file.stat().st_mode
    try:
        # transformers before 5 refuses a file without this entry, which says how tensors are laid out
        save_file(arrays, file, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from error
    file.chmod(stat.S_IMODE(mode))


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file that is complete or absent."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def _publish(folder: Path, temporary: Mapping[str, str], files: Mapping[str, list[str]], total: int) -> None:
    """Renames the finished files into place; the old way in goes before any shard of its is replaced."""
    stale = [path for path in folder.iterdir() if _SHARD.fullmatch(path.name) and path.name not in files]
    if SINGLE in files:
        (folder / temporary[SINGLE]).replace(folder / SINGLE)
        (folder / INDEX).unlink(missing_ok=True)
    else:
        (folder / SINGLE).unlink(missing_ok=True)
        (folder / INDEX).unlink(missing_ok=True)
        for file, name in temporary.items():
            (folder / name).replace(folder / file)
        where = {name: file for file, names in files.items() for name in names}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    for path in stale:
        path.unlink()


def _plan(sizes: Mapping[str, int], limit: int) -> dict[str, list[str]]:
    """Which tensors go into which file, in order, filling each file up to `limit` bytes."""
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
            f"the parameter tree has {'an' if 'lm_head' in params else 'no'} lm_head, but the config says"
            f" tie_embeddings = {config.tie_embeddings}; they are of two models."
        )


def _check_names(folder: Path, wanted: set[str], found: set[str]) -> None:
    missing = sorted(wanted - found)
    # a head beside a tied config is not stray: `_check_tied` looks at what it holds
    unexpected = sorted(name for name in found - wanted - {_HEAD} if not _HARMLESS.search(name))
    for kind, names in (("lack", missing), ("have unexpected", unexpected)):
        if names:
            rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
            tied = " Where the head is the embedding, set tie_word_embeddings = true in it." if names == [_HEAD] else ""
            raise UserError(
                f"{folder}: its weights {kind} tensor(s) {', '.join(names[:3])}{rest}. They do not belong to this"
                f" config.json, or a file is missing.{tied}"
            )


def _check_tensor(tensor: Stored, shape: tuple[int, ...]) -> None:
    """Looks at the header alone, so that nothing large is read before everything is known to fit."""
    if tensor.shape != shape:
        raise UserError(
            f"{tensor.file}: tensor {tensor.name} has shape {tensor.shape}, config.json asks for {shape}. The weights"
            " are of another model than the config: use the files of one model."
        )
    if tensor.kind not in _FLOATS:
        raise UserError(
            f"{tensor.file}: tensor {tensor.name} is stored as {tensor.kind}; quantised weights are not supported. Use"
            " the checkpoint in bfloat16, float16 or float32."
        )


def _check_tied(found: Mapping[str, Stored]) -> None:
    if not same(found[_HEAD], found[_EMBEDDING]):
        raise UserError(
            f"{found[_HEAD].file}: {_HEAD} differs from {_EMBEDDING}, but config.json says tie_word_embeddings = true."
            " Set it to false to use the head, or take the tensor out."
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
