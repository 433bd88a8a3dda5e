"""From a path, a hub id or a bare config to a decoder with its tokenizer, and back to a Hugging Face folder.

It knows the layout of such a folder: `config.json`, `generation_config.json`, safetensors, tokenizer files. What stands
in each file is the business of `config`, `weights` and `tokenizer`; training and sampling are unknown here.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from tunix_like.config.schema import RolloutConfig
from tunix_like.data.tokenizer import Tokenizer
from tunix_like.errors import UserError, check_type, nearest, one_line
from tunix_like.models.config import DecoderConfig
from tunix_like.models.decoder import Decoder, check_decoder
from tunix_like.models.lora import merge_lora, source_of
from tunix_like.models.quantization import quantize_base
from tunix_like.models.sharding import check_model, param_shapes, place_params
from tunix_like.models.weights import Params, check_weights, load_weights, save_weights, write_json
from tunix_like.runtime import progress
from tunix_like.runtime.json_files import read_object
from tunix_like.storage.output_folder import written_whole

_INITS = ("pretrained", "random")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


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
    """Makes a decoder, and the tokenizer that belongs to it if the folder has one.

    Args:
      path_or_hub_id: a model folder, a hub id `owner/name` (needs the extra `hub`), or with `init="random"` an HF
        config as a mapping.
      init: "pretrained" reads the folder's safetensors; "random" draws new weights and needs none.
      seed: of the random weights.
      dtype: of the matrix products; None is float32 on CPU and bfloat16 on accelerators.
      param_dtype: of the stored weights.
      attention: how to attend, one of `config.ATTENTIONS`; "auto" takes what suits device and size.
      quantize: "int8" or "nf4": the projections of the layers are quantised as they are read, one at a time. Such a
        model samples, and trains adapters (`add_lora`).
      mesh: where the weights go, each device's part of them straight to it; None is one device.

    Returns:
      the model, and the tokenizer with the model's end-of-sequence ids, or None where the folder has none.

    Raises:
      UserError: whatever is wrong with the argument, the folder, its config, weights or tokenizer; or this machine
        cannot attend that way, or the mesh does not divide the model.
    """
    kinds = {"dtype": default_dtype() if dtype is None else dtype, "param_dtype": param_dtype, "attention": attention}
    folder, config, tokenizer = _described(path_or_hub_id, init, with_weights=init == "pretrained")
    graphdef, shapes = _abstract(config, kinds, quantize)  # so that random weights never exist beside loaded ones
    check_model(mesh, config, shapes)
    if folder is None or init == "random":
        with progress.task("drawing weights"):
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
    """As `load_model`, but the parameters are shapes (`jax.ShapeDtypeStruct`) without numbers: a folder needs no
    weights, and none are downloaded.

    Returns:
      the model, the tokenizer, and what the folder's weights were compared by (`weights.check_weights`).

    Raises:
      UserError: as `load_model`.
    """
    kinds = {"dtype": default_dtype() if dtype is None else dtype, "param_dtype": param_dtype, "attention": attention}
    folder, config, tokenizer = _described(path_or_hub_id, init, with_weights=False)
    if folder is None or init == "random":
        found = "drawn at random"
    else:
        found = check_weights(folder, _abstract(config, kinds)[1], config)
    return nnx.merge(*_abstract(config, kinds, quantize)), tokenizer, found


def load_config(path_or_hub_id: str | Path | Mapping[str, Any]) -> DecoderConfig:
    """The numbers of a model alone: no tokenizer is read, and no weights are read or downloaded.

    Raises:
      UserError: as `load_model`.
    """
    named = path_or_hub_id
    return DecoderConfig.from_hf(named if isinstance(named, Mapping) else _find(named, with_weights=False))


def _described(
    path_or_hub_id: str | Path | Mapping[str, Any], init: str, *, with_weights: bool
) -> tuple[Path | None, DecoderConfig, Tokenizer | None]:
    """The folder, the config and the tokenizer; of a config mapping the config alone."""
    if init not in _INITS:
        raise UserError(f"init {init!r} is unknown. {nearest(str(init), _INITS)}")
    if isinstance(path_or_hub_id, Mapping):
        if init != "random":
            raise UserError("a config mapping has no weights: pass init='random', or a model folder.")
        return None, DecoderConfig.from_hf(path_or_hub_id), None
    folder = _find(path_or_hub_id, with_weights=with_weights)
    config = DecoderConfig.from_hf(folder)
    name = {"_name_or_path": str(path_or_hub_id) if init == "pretrained" else None}  # what adapters will be for
    config = dataclasses.replace(config, source={**(config.source or {}), **name})
    # The tokenizer before any weights: what is wrong with it shows in milliseconds, and weights may take minutes.
    return folder, config, _load_tokenizer(folder, config)


def export_model(model: Decoder, tokenizer: Tokenizer | None, folder: str | Path, *, overwrite: bool = False) -> None:
    """Writes a folder that transformers and `load_model` load: weights, configs and, if given, the tokenizer. It is
    whole, or not there. Adapters are merged into what is written, and quantised weights turned back into numbers; the
    model stays as it is.

    Args:
      overwrite: the folder may be that of an earlier export, which is replaced with all that is in it.

    Raises:
      UserError: the folder cannot be written or replaced (`output_folder.check_folder`).
    """
    check_decoder("model", model)
    with written_whole(folder, overwrite, source_of(model.config)) as part:
        merged = merge_lora(model)
        save_model(nnx.to_pure_dict(nnx.split(merged)[1]), merged.config, tokenizer, part)


def save_model(params: Params, config: DecoderConfig, tokenizer: Tokenizer | None, folder: str | Path) -> None:
    """Writes the files of a model's folder one by one, given bare parameters.

    Args:
      params: the decoder's parameters as a pure dict; they are written in the dtype they have.
      tokenizer: gives the end-of-sequence, begin and padding ids; without one those of `config.source` are kept.

    Raises:
      UserError: the folder cannot be written, or the parameters are not this config's.
    """
    save_weights(params, folder, config)
    save_description(config, tokenizer, folder, params["embed_tokens"]["embedding"].dtype.name)


def save_description(config: DecoderConfig, tokenizer: Tokenizer | None, folder: str | Path, dtype: str) -> None:
    """Writes all of a Hugging Face folder but the weights; `dtype` is that of the weights it describes."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    ids = (tokenizer.eos_ids, tokenizer.bos_id, tokenizer.pad_id) if tokenizer is not None else ()
    fields = config.to_hf(*ids)
    # transformers casts to the dtype that config.json names, so it must be that of the weights just written
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
    """The graph, the abstract parameters (with their places on the mesh), the config and the tokenizer of a folder that
    needs no weights.

    Raises:
      UserError: the folder has no config or no tokenizer, or they are wrong, or this machine cannot attend that way.
    """
    folder = Path(folder)
    config = DecoderConfig.from_hf(folder)
    tokenizer = _load_tokenizer(folder, config)
    if tokenizer is None:
        raise UserError(f"{folder} has no tokenizer.json.")
    kinds = {"dtype": default_dtype() if dtype is None else dtype, "param_dtype": param_dtype, "attention": attention}
    graphdef, params = _abstract(config, kinds)
    return graphdef, param_shapes(params, mesh), config, tokenizer


def check_fit(config: DecoderConfig, tokenizer: Tokenizer, rollout: RolloutConfig) -> None:
    """That a model, a tokenizer and the lengths to sample at go together.

    Raises:
      UserError: more tokens than the model has embeddings, longer texts than it has positions, or nothing that could
        end a completion.
    """
    ends = tokenizer.eos_ids if rollout.eos_tokens is None else rollout.eos_tokens
    if not ends or not all(0 <= end < config.vocab_size for end in ends):
        raise UserError(
            f"nothing can end a completion: the end-of-sequence ids are {list(ends)}, the vocabulary has "
            f"{config.vocab_size} tokens (vocab_size). Set rollout.eos_tokens, or use a tokenizer that names its "
            "eos_token."
        )
    total = rollout.max_prompt_length + rollout.max_tokens_to_generate
    if total > config.max_positions:
        raise UserError(
            f"rollout.max_prompt_length + rollout.max_tokens_to_generate is {total}, but the model has "
            f"{config.max_positions} positions (max_position_embeddings). Set both (RolloutConfig in Python) so that "
            "their sum fits."
        )
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model's vocabulary only {config.vocab_size}: they "
            "do not belong together. Use the model's own tokenizer, or for a random model set vocab_size to at least "
            f"{tokenizer.vocab_size}."
        )


def default_dtype() -> Any:
    """float32 on the CPU, bfloat16 on accelerators."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def _random(config: DecoderConfig, seed: int, kinds: Mapping[str, Any]) -> Decoder:
    # Eagerly on purpose: one small compilation per shape. Under one jit, 24 layers of generators compile for 15 s.
    return Decoder(config, rngs=nnx.Rngs(params=seed), **kinds)


def _abstract(
    config: DecoderConfig, kinds: Mapping[str, Any], quantize: str | None = None
) -> tuple[nnx.GraphDef, Params]:
    """The model without numbers; one of 36 layers takes seconds to trace, so a process does it once."""
    graphdef, params = _traced(config, json.dumps(config.source), tuple(kinds.items()), quantize)
    return graphdef, jax.tree.map(lambda shape: shape, params)


@functools.lru_cache(maxsize=4)
def _traced(  # two configs are equal whatever their `source`, which an export needs
    config: DecoderConfig, source: str, kinds: tuple[tuple[str, Any], ...], quantize: str | None
) -> tuple[nnx.GraphDef, Params]:
    graphdef, state = nnx.split(nnx.eval_shape(lambda: quantize_base(_random(config, 0, dict(kinds)), quantize)))
    return graphdef, nnx.to_pure_dict(state)


def _load_tokenizer(folder: Path, config: DecoderConfig) -> Tokenizer | None:
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{folder}: its tokenizer has {tokenizer.vocab_size} tokens, but config.json says vocab_size ="
            f" {config.vocab_size}. They do not belong together: use the model's own tokenizer, or for a random"
            f" model set vocab_size to at least {tokenizer.vocab_size}."
        )
    eos = _eos_ids(folder, config, tokenizer)
    return tokenizer.with_eos_ids(eos) if eos else tokenizer


def _eos_ids(folder: Path, config: DecoderConfig, tokenizer: Tokenizer) -> Sequence[int]:
    """The ids that end a completion by `generation_config.json`, else by `config.json`; empty when neither says. The
    tokenizer adds its own."""
    path = folder / "generation_config.json"
    generation = read_object(path, "Mend it, or remove it to use config.json.") if path.is_file() else {}
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
                f"{file}: eos_token_id = {value!r}, but the folder's tokenizer has only {tokenizer.vocab_size} tokens:"
                " it is of another model. Use the model's own tokenizer, or for a random model name its own ids here."
            )
        if ids:
            return ids
    return ()


def _find(path_or_hub_id: str | Path, *, with_weights: bool) -> Path:
    """The model's folder on this machine, downloaded first if it is a hub id."""
    cure = "give a model folder, a hub id like 'Qwen/Qwen2.5-0.5B-Instruct', or with init='random' a config"
    check_type("load_model", path_or_hub_id, (str, Path), cure)
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"{path} is a file; give the folder that holds config.json and the weights.")
    if not isinstance(path_or_hub_id, str) or not _HUB_ID.fullmatch(path_or_hub_id):
        raise UserError(
            f"{path}: no such folder. Give a model folder, or a hub id like 'Qwen/Qwen2.5-0.5B-Instruct', as "
            "model.path."
        )
    wanted = [pattern for pattern in _HUB_FILES if with_weights or pattern != "*.safetensors"]
    by_hand = (
        f"There is no folder {path} here either. Download {', '.join(wanted)} from https://huggingface.co/{path} into a"
        " folder and give its path instead"
    )
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(
            f"{path} looks like a hub id, and downloading needs the extra: pip install 'tunix-like[hub]'. {by_hand}."
        ) from None
    try:
        return Path(huggingface_hub.snapshot_download(path_or_hub_id, allow_patterns=wanted))
    except Exception as error:  # the hub's client raises its HTTP library's own exceptions, which change with versions
        raise UserError(
            f"{path} could not be downloaded from the hub. {by_hand} (on a machine with a network: hf download {path} "
            "--local-dir FOLDER). With HF_HUB_OFFLINE=1 only what was downloaded before is used, "
            f"and no network is waited for. The hub's client said: {one_line(error)}."
        ) from error
