"""Loads a decoder and its tokenizer from a path, a hub id or a config, and writes them as a Hugging Face folder.

A folder has `config.json`, `generation_config.json`, safetensors and tokenizer files; the modules `config`, `weights`
and `tokenizer` read and write them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from tunix_like.config.schema import RolloutConfig
from tunix_like.config.urls import HUB_ID
from tunix_like.errors import UserError, check_type, nearest, one_line
from tunix_like.models.config import DecoderConfig
from tunix_like.models.decoder import Decoder, check_decoder
from tunix_like.models.gguf_files import described, find_gguf
from tunix_like.models.lora import merge_lora, source_of
from tunix_like.models.quantized_base import quantize_base
from tunix_like.models.sharding import check_model, param_shapes, place_params
from tunix_like.models.weights import Params, check_weights, load_weights, save_weights, write_json
from tunix_like.runtime import progress
from tunix_like.runtime.input_files import read_object
from tunix_like.runtime.object_storage import is_remote, local_copy
from tunix_like.storage.output_folder import write_files, written_whole
from tunix_like.text.tokenizer import Tokenizer

_INITS = ("pretrained", "random")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt")


def load_model(
    path_or_hub_id: str | Path | Mapping[str, Any],
    *,
    init: str = "pretrained",
    seed: int = 0,
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
    attention: str = "auto",
    quantize: str | None = None,
    mesh: Mesh | None = None,
) -> tuple[Decoder, Tokenizer | None]:
    """Loads a decoder and its tokenizer, as `tunix_like.load_model` does, which also opens runs."""
    kinds = {"dtype": default_dtype() if dtype is None else dtype, "param_dtype": param_dtype, "attention": attention}
    folder, config, tokenizer = _described(path_or_hub_id, init, with_weights=init == "pretrained")
    graphdef, shapes = _abstract(config, kinds, quantize)  # abstract, so no random weights are allocated
    check_model(mesh, config, shapes)
    if folder is None or init == "random":
        with progress.task("initialising weights"):
            model = quantize_base(_random(config, seed, kinds), quantize)
        nnx.update(model, place_params(nnx.to_pure_dict(nnx.split(model)[1]), mesh))
        return model, tokenizer
    stored = shapes if quantize is None else _abstract(config, kinds)[1]
    params = load_weights(folder, param_shapes(stored, mesh), config, quantize)
    # `nnx.merge` assigns leaves by position; `load_weights` has compared every name, shape and dtype before.
    return nnx.merge(graphdef, params if quantize is None else place_params(params, mesh)), tokenizer


def load_abstract(
    path_or_hub_id: str | Path | Mapping[str, Any],
    *,
    init: str = "pretrained",
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
    attention: str = "auto",
    quantize: str | None = None,
) -> tuple[Decoder, Tokenizer | None, str]:
    """Loads a model like `load_model`, but with shapes (`jax.ShapeDtypeStruct`) as parameters. No weights are needed or
    downloaded.

    Returns:
      the model, the tokenizer, and a text that says how the weights were checked (`weights.check_weights`).
    """
    kinds = {"dtype": default_dtype() if dtype is None else dtype, "param_dtype": param_dtype, "attention": attention}
    folder, config, tokenizer = _described(path_or_hub_id, init, with_weights=False)
    if folder is None or init == "random":
        checked = "initialised at random"
    else:
        checked = check_weights(folder, _abstract(config, kinds)[1], config)
    return nnx.merge(*_abstract(config, kinds, quantize)), tokenizer, checked


def load_config(path_or_hub_id: str | Path | Mapping[str, Any], key: str = "model.path") -> DecoderConfig:
    """Loads only the configuration of a model; no weights are downloaded. `key` names the path in an error message."""
    source = path_or_hub_id
    return DecoderConfig.from_hf(source if isinstance(source, Mapping) else _find(source, with_weights=False, key=key))


def _described(
    path_or_hub_id: str | Path | Mapping[str, Any], init: str, *, with_weights: bool
) -> tuple[Path | None, DecoderConfig, Tokenizer | None]:
    """Returns folder, config and tokenizer of a model. `with_weights` is whether a download includes the weights."""
    if init not in _INITS:
        raise UserError(f"init {init!r} is unknown. {nearest(str(init), _INITS)}")
    if isinstance(path_or_hub_id, Mapping):
        if init != "random":
            raise UserError("a config mapping has no weights; pass init='random', or a model folder.")
        return None, DecoderConfig.from_hf(path_or_hub_id), None
    folder = _find(path_or_hub_id, with_weights=with_weights)
    config = DecoderConfig.from_hf(folder)
    # An export of adapters stores this name as the name of the base model.
    name = {"_name_or_path": str(path_or_hub_id) if init == "pretrained" else None}
    config = dataclasses.replace(config, source={**(config.source or {}), **name})
    # The tokenizer is loaded before the weights. Loading weights can take minutes, and errors of the tokenizer appear
    # within milliseconds.
    return folder, config, _load_tokenizer(folder, config)


def export_model(
    model: Decoder,
    tokenizer: Tokenizer | None,
    folder: str | Path,
    *,
    overwrite: bool = False,
    further: Mapping[str, bytes] | None = None,
) -> None:
    """Writes a folder that transformers and `load_model` load: weights, configs and, if given, the tokenizer.

    The folder is created atomically. In the written weights, adapters are merged and quantised weights are dequantised.
    The model is not changed.

    Args:
      overwrite: whether the folder of an earlier export is replaced, with all its files.
      further: contents of further files by name, such as a model card `README.md`.

    Raises:
      UserError: the folder cannot be written or replaced (`output_folder.check_folder`).
    """
    check_decoder("model", model)
    with written_whole(folder, overwrite, source_of(model.config)) as part:
        write_files(part, further)
        merged = merge_lora(model)
        save_model(nnx.to_pure_dict(nnx.split(merged)[1]), merged.config, tokenizer, part)


def save_model(params: Params, config: DecoderConfig, tokenizer: Tokenizer | None, folder: str | Path) -> None:
    """Writes the files of a model folder, with parameters in their own dtype, not atomically. The tokenizer defines the
    ids of special tokens; without one, they are those of `config.source`."""
    save_weights(params, folder, config)
    save_description(config, tokenizer, folder, params["embed_tokens"]["embedding"].dtype.name)


def save_description(config: DecoderConfig, tokenizer: Tokenizer | None, folder: str | Path, dtype: str) -> None:
    """Writes all files of a Hugging Face folder except the weights; `dtype` is the dtype of the weights."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if config.scalar_head and tokenizer is not None:
        # transformers reads the score of the last token that is not the pad token
        tokenizer = tokenizer.with_own_pad(config.vocab_size)
    ids = (tokenizer.eos_ids, tokenizer.bos_id, tokenizer.pad_id) if tokenizer is not None else ()
    fields = config.to_hf(*ids)
    if config.scalar_head and tokenizer is not None and tokenizer.pad_id in tokenizer.eos_ids:
        fields["pad_token_id"] = None  # it has no other token; transformers then takes one text at a time
    # transformers casts weights to the dtype in config.json, so this must be the dtype of the written weights
    fields["torch_dtype"] = dtype
    generation = {name: fields[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    try:
        write_json(folder / "config.json", fields)
        write_json(folder / "generation_config.json", generation)
        if tokenizer is not None:
            tokenizer.save(folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot write the model's configuration: {error}") from error


def load_description(
    folder: str | Path,
    *,
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
    attention: str = "auto",
    mesh: Mesh | None = None,
) -> tuple[nnx.GraphDef, Params, DecoderConfig, Tokenizer]:
    """Returns the graph definition, the abstract parameters with their shardings on the mesh, the config and the
    tokenizer of a folder, which needs no weights."""
    folder = Path(folder)
    config = DecoderConfig.from_hf(folder)
    tokenizer = _load_tokenizer(folder, config)
    if tokenizer is None:
        raise UserError(f"{folder} has no tokenizer.json; add the tokenizer files of the model.")
    kinds = {"dtype": default_dtype() if dtype is None else dtype, "param_dtype": param_dtype, "attention": attention}
    graphdef, params = _abstract(config, kinds)
    return graphdef, param_shapes(params, mesh), config, tokenizer


def check_fit(config: DecoderConfig, tokenizer: Tokenizer, rollout: RolloutConfig) -> None:
    """Raises UserError if model, tokenizer and sequence lengths do not fit together."""
    ends = tokenizer.eos_ids if rollout.eos_tokens is None else rollout.eos_tokens
    if not ends or not all(0 <= end < config.vocab_size for end in ends):
        raise UserError(
            f"no valid token ends a completion: the end-of-sequence ids are {list(ends)}, and the vocabulary has "
            f"{config.vocab_size} tokens (vocab_size). Set rollout.eos_tokens, or use a tokenizer that defines "
            "eos_token."
        )
    total = rollout.max_prompt_length + rollout.max_tokens_to_generate
    if total > config.max_positions:
        raise UserError(
            f"rollout.max_prompt_length + rollout.max_tokens_to_generate is {total}, but the model has "
            f"{config.max_positions} positions (max_position_embeddings). Lower them (in Python: in RolloutConfig)."
        )
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the vocabulary of the model has only "
            f"{config.vocab_size}. Use the model's own tokenizer, or for a random model set vocab_size to at least "
            f"{tokenizer.vocab_size}."
        )


def default_dtype() -> Any:
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def _random(config: DecoderConfig, seed: int, kinds: Mapping[str, Any]) -> Decoder:
    # Not jitted on purpose. Without jit, JAX compiles one small program per shape. A single jit of 24 layers would
    # compile for 15 s.
    return Decoder(config, rngs=nnx.Rngs(params=seed), **kinds)


def _abstract(
    config: DecoderConfig, kinds: Mapping[str, Any], quantize: str | None = None
) -> tuple[nnx.GraphDef, Params]:
    """Returns graph definition and abstract parameters, cached, because tracing 36 layers takes seconds."""
    graphdef, params = _traced(config, json.dumps(config.source), tuple(kinds.items()), quantize)
    return graphdef, jax.tree.map(lambda shape: shape, params)


@functools.lru_cache(maxsize=4)
def _traced(  # `source` is part of the cache key, because an export needs it and comparison of configs ignores it
    config: DecoderConfig, source: str, kinds: tuple[tuple[str, Any], ...], quantize: str | None
) -> tuple[nnx.GraphDef, Params]:
    graphdef, state = nnx.split(nnx.eval_shape(lambda: quantize_base(_random(config, 0, dict(kinds)), quantize)))
    return graphdef, nnx.to_pure_dict(state)


def load_tokenizer(path_or_hub_id: str) -> Tokenizer:
    """Loads the tokenizer of a folder or hub id (`model.tokenizer`)."""
    folder = _find(path_or_hub_id, with_weights=False, key="model.tokenizer")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise UserError(f"model.tokenizer: {folder} has no tokenizer.json.")
    return Tokenizer.from_folder(folder)


def _load_tokenizer(folder: Path, config: DecoderConfig) -> Tokenizer | None:
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{folder}: its tokenizer has {tokenizer.vocab_size} tokens, but config.json has vocab_size ="
            f" {config.vocab_size}. To fix it, use the model's own tokenizer, or for a random model set vocab_size to"
            f" at least {tokenizer.vocab_size}."
        )
    eos = _eos_ids(folder, config, tokenizer)
    return tokenizer.with_eos_ids(eos) if eos else tokenizer


def _eos_ids(folder: Path, config: DecoderConfig, tokenizer: Tokenizer) -> Sequence[int]:
    """Returns the ids of the tokens that end a completion, from `generation_config.json` or else from `config.json`,
    without that of the tokenizer; `()` if neither file has ids."""
    path = folder / "generation_config.json"
    generation = read_object(path, "Correct it, or remove it to use config.json.") if path.is_file() else {}
    for file, fields in ((path, generation), (folder / "config.json", config.source or {})):
        value = fields.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(i) is int and 0 <= i < config.vocab_size for i in ids):
            raise UserError(
                f"{file}: eos_token_id = {value!r} must be a token id, or a list of them, from 0 to"
                f" {config.vocab_size - 1}."
            )
        if not all(i < tokenizer.vocab_size for i in ids):
            raise UserError(
                f"{file}: eos_token_id = {value!r}, but the tokenizer of the folder has only {tokenizer.vocab_size}"
                " tokens. Use the model's own tokenizer, or for a random model set ids of this tokenizer here."
            )
        if ids:
            return ids
    return ()


def _find(path_or_hub_id: str | Path, *, with_weights: bool, key: str = "model.path") -> Path:
    """Returns the local folder of a model, which is downloaded if `path_or_hub_id` is a hub id or in object storage."""
    cure = "give a model folder, a hub id like 'Qwen/Qwen2.5-0.5B-Instruct', or with init='random' a config"
    check_type("load_model", path_or_hub_id, (str, Path), cure)
    wanted = [pattern for pattern in _HUB_FILES if with_weights or pattern != "*.safetensors"]
    if is_remote(path_or_hub_id):
        return local_copy(str(path_or_hub_id), key, wanted)
    if (packed := find_gguf(path_or_hub_id, key)) is not None:
        return described(packed)
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"{path} is a file; give the folder that contains config.json and the weights.")
    if not isinstance(path_or_hub_id, str) or not HUB_ID.fullmatch(path_or_hub_id):
        raise UserError(
            f"{path}: no such folder. Give a model folder, or a hub id like 'Qwen/Qwen2.5-0.5B-Instruct', as {key}."
        )
    by_hand = (
        f"There is no local folder {path} either. Download {', '.join(wanted)} from https://huggingface.co/{path} into"
        " a folder and give its path instead"
    )
    try:
        import huggingface_hub
    except ImportError as error:
        raise UserError(
            f"{path} looks like a hub id, but downloading needs pip install 'tunix-like[hub]' ({one_line(error)}). "
            f"{by_hand}."
        ) from None
    try:
        return Path(huggingface_hub.snapshot_download(path_or_hub_id, allow_patterns=wanted))
    except Exception as error:  # the hub client raises exceptions of its HTTP library, which differ between versions
        raise UserError(
            f"{path} could not be downloaded from the hub. {by_hand} (on a machine with a network: hf download {path} "
            "--local-dir FOLDER). With HF_HUB_OFFLINE=1 only cached files are used, without network access. "
            f"The error of the hub client: {one_line(error)}."
        ) from error
