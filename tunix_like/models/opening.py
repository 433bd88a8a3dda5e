"""Opens models by their path: a run folder (its newest checkpoint), `RUN/checkpoints/STEP`, `RUN/checkpoints/best`, or
whatever `models/loading.py` loads. A run counts with its adapters merged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from tunix_like.config.load import load, read_yaml
from tunix_like.config.schema import SELF, Config, LoraConfig
from tunix_like.config.urls import is_server
from tunix_like.errors import UserError
from tunix_like.models import loading
from tunix_like.models.config import DecoderConfig
from tunix_like.models.decoder import Decoder, add_scalar_head
from tunix_like.models.loading import load_description
from tunix_like.models.lora import (
    ADAPTER_CONFIG,
    add_lora,
    check_base,
    fingerprint,
    join_params,
    merge_lora,
    read_adapter_config,
    split_params,
)
from tunix_like.models.quantized_base import quantize_base
from tunix_like.models.sharding import place_params
from tunix_like.models.weights import Params
from tunix_like.runtime.moment import START, Moment, moment_of
from tunix_like.runtime.object_storage import is_remote, local_copy, names_below
from tunix_like.storage import checkpoint_files
from tunix_like.storage.checkpoints import Checkpoints
from tunix_like.storage.metrics import best_of
from tunix_like.storage.mirror import checkpoints_among, latest
from tunix_like.text.tokenizer import Tokenizer

BEST = "best"
"""The path `RUN/checkpoints/best` stands for the best checkpoint of a run. There is no folder with this name."""

_STEPS = ("checkpoints", "sft_checkpoints")


class RunCheckpoint(NamedTuple):
    """A checkpoint of a run: its local folder `RUN/checkpoints/STEP` and the path that a user can write for it, which
    differs in object storage. `verified` says that its checksums were compared."""

    folder: Path
    name: str
    verified: bool = False

    @property
    def run(self) -> Path:
        return self.folder.parent.parent

    def config(self, overrides: Sequence[str] = ()) -> Config:
        """Returns the config of the run. A run of the Python interface has none; then the defaults count, with the base
        model that its adapters name."""
        if (file := self.run / "config.yaml").is_file():
            read_yaml(file)  # rejects an empty file, which `load` would read as all defaults
            return load(file, overrides)
        adapted = (self.run / "model" / ADAPTER_CONFIG).is_file()
        return load(None, [*(_named_base(self.run) if adapted else ()), *overrides])

    def moment(self) -> Moment:
        """Returns the moment after the last step of the checkpoint. SFT precedes the run, so that of its steps is the
        start."""
        if self.folder.parent.name != _STEPS[0]:
            return START
        step = int(self.folder.name)
        with Checkpoints(self.folder.parent) as checkpoints:
            return moment_of(step, step, checkpoints.meta(step).get("total"))


def find_checkpoint(path: str | Path, overrides: Sequence[str] = ()) -> RunCheckpoint | None:
    """Returns the checkpoint that `path` names: the newest undamaged one of a run folder, `RUN/checkpoints/STEP`, or
    with `overrides` of the run's config `RUN/checkpoints/best`. None if `path` is no run.

    Raises:
      UserError: the run has no checkpoint, or all are damaged.
    """
    if is_remote(path):
        if (local := local_run(str(path), overrides)) is None:
            return None
        return RunCheckpoint(local, "/".join([split_address(str(path))[0], *local.parts[-2:]]))
    place = Path(path).expanduser()
    if (place / "config.json").is_file():
        return None
    if (place.parent.name, place.name) == ("checkpoints", BEST):
        place = best_checkpoint(place.parent.parent, overrides)
    if checkpoint_files.step_of(place.name) is not None and place.parent.name in _STEPS:
        return RunCheckpoint(place, str(place))
    if not (place / "model" / "config.json").is_file():
        return None
    if (steps_folder := newest_checkpoints(place)) is None:
        raise UserError(f"{place} has no checkpoint yet; training.checkpoint_every_n_steps sets when one is written.")
    with Checkpoints(steps_folder) as checkpoints:
        step = checkpoints.newest()
    return RunCheckpoint(steps_folder / str(step), f"{steps_folder}/{step}", verified=True)


def with_pinned_checkpoints(config: Config) -> Config:
    """Returns the config with the step in each path of a run (`model.path`, `teacher.path`, `critic.path` and the
    teachers of `data.sources`), so that a resumed run does not open newer weights."""
    for name in ("model", "teacher", "critic"):
        section = getattr(config, name)
        config = dataclasses.replace(config, **{name: dataclasses.replace(section, path=_with_step(section.path))})
    if config.data.sources is None:
        return config
    sources = [
        entry if entry.get("teacher") is None else {**entry, "teacher": _with_step(entry["teacher"])}
        for entry in config.data.sources
    ]
    return dataclasses.replace(config, data=dataclasses.replace(config.data, sources=sources))


def _with_step(path: str | None) -> str | None:
    """Returns the path of a checkpoint of a run, or any other path unchanged."""
    if path is None or path == SELF or is_server(path):
        return path
    found = find_checkpoint(path)
    return path if found is None else found.name


def newest_checkpoints(run: Path) -> Path | None:
    """Returns the folder of a run's RL checkpoints, or else of its SFT checkpoints; None without a checkpoint."""
    for name in _STEPS:
        checkpoints = Checkpoints(run / name)
        step = checkpoints.latest_step()
        checkpoints.close()
        if step is not None:
            return run / name
    return None


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
    """Loads what `loading.load_model` loads, or a run with merged adapters and other settings than its own."""
    kinds = {"dtype": dtype, "param_dtype": param_dtype, "attention": attention}
    found = None if isinstance(path_or_hub_id, Mapping) else find_checkpoint(path_or_hub_id)
    if found is None or init == "random":
        what = path_or_hub_id if found is None else found.run / "model"
        return loading.load_model(what, init=init, seed=seed, quantize=quantize, mesh=mesh, **kinds)
    graphdef, params, _, tokenizer = restore(found, found.config(), mesh)
    stored = nnx.to_pure_dict(nnx.split(merge_lora(nnx.merge(graphdef, params)))[1])
    model, _, _ = _described(found, kinds)
    graphdef, shapes = nnx.split(model)
    cast = jax.tree.map(lambda leaf, shape: leaf.astype(shape.dtype), stored, nnx.to_pure_dict(shapes))
    graphdef, state = nnx.split(quantize_base(nnx.merge(graphdef, cast), quantize))
    return nnx.merge(graphdef, place_params(nnx.to_pure_dict(state), mesh)), tokenizer


def load_abstract(
    path_or_hub_id: str | Path | Mapping[str, Any], *, init: str = "pretrained", **kinds: Any
) -> tuple[Decoder, Tokenizer | None, str]:
    """Does what `loading.load_abstract` does, also for a run."""
    found = None if isinstance(path_or_hub_id, Mapping) else find_checkpoint(path_or_hub_id)
    if found is None:
        return loading.load_abstract(path_or_hub_id, init=init, **kinds)
    model, tokenizer, text = _described(found, kinds)
    return model, tokenizer, text if init == "random" else f"a checkpoint of a run, {found.name}"


def _described(found: RunCheckpoint, kinds: Mapping[str, Any]) -> tuple[Decoder, Tokenizer | None, str]:
    model, tokenizer, text = loading.load_abstract(found.run / "model", init="random", **kinds)
    # An export of adapters stores this name as the name of the base model.
    model.config = dataclasses.replace(
        model.config, source={**(model.config.source or {}), "_name_or_path": found.name}
    )
    return model, tokenizer, text


def load_config(path_or_hub_id: str | Path | Mapping[str, Any], key: str = "model.path") -> DecoderConfig:
    """Does what `loading.load_config` does, also for a run."""
    return loading.load_config(_description(path_or_hub_id), key)


def load_tokenizer(path_or_hub_id: str) -> Tokenizer:
    """Does what `loading.load_tokenizer` does, also for a run."""
    return loading.load_tokenizer(str(_description(path_or_hub_id)))


def _description(path_or_hub_id: Any) -> Any:
    """Returns the folder `model` of a run, which needs no checkpoint; anything else unchanged."""
    if isinstance(path_or_hub_id, Mapping):
        return path_or_hub_id
    if is_remote(path_or_hub_id):
        found = find_checkpoint(path_or_hub_id)
        return path_or_hub_id if found is None else found.run / "model"
    place = Path(path_or_hub_id).expanduser()
    model = (place.parent.parent if place.parent.name in _STEPS else place) / "model"
    is_run = (model / "config.json").is_file() and not (place / "config.json").is_file()
    return model if is_run else path_or_hub_id


def loaded(config: Config, what: Any, mesh: Mesh | None) -> tuple[Decoder, Tokenizer | None]:
    """Loads the model `what` (a path, a hub id or a Hugging Face config) and its tokenizer with the settings of a
    config."""
    section = config.model
    seed = config.training.seed
    return load_model(what, init=section.init, seed=seed, quantize=section.quantize, mesh=mesh, **kinds_of(config))


def kinds_of(config: Config) -> dict[str, Any]:
    """Returns the dtype and attention arguments of `load_model`. `dtype` None means the default of the device."""
    dtype = config.model.dtype
    return {
        "dtype": None if dtype is None else jnp.dtype(dtype),
        "param_dtype": jnp.dtype(config.model.param_dtype),
        "attention": config.model.attention,
    }


def restore(found: RunCheckpoint, config: Config, mesh: Mesh | None) -> tuple[Any, Params, DecoderConfig, Tokenizer]:
    """Returns graph definition, parameters, config and tokenizer of a run, with adapters and dtypes as in `config`."""
    place = found.run
    step = int(found.folder.name)
    adapted = (found.run / "model" / ADAPTER_CONFIG).is_file()
    graphdef, abstract, model_config, tokenizer = load_description(place / "model", mesh=mesh, **kinds_of(config))
    frozen: Any = {}
    if adapted:
        model = _adapted_base(place, config, model_config, mesh)
        graphdef, state = nnx.split(model)
        abstract, frozen = split_params(place_params(nnx.to_pure_dict(state), mesh))
    with Checkpoints(found.folder.parent) as checkpoints:
        if not found.verified:
            checkpoints.check(step)
        if adapted:
            base = {"base": fingerprint(model.config, frozen, mesh)}
            check_base(checkpoints.folder / str(step), checkpoints.meta(step)["identity"], base)
        params = join_params(checkpoints.restore(step, {"params": abstract})[0]["params"], frozen)
    return graphdef, params, model_config, tokenizer


def split_address(url: str) -> tuple[str, str | None]:
    """Splits the address of a checkpoint into that of its run and the rest, such as `checkpoints/10`; None without."""
    run, folder, step = url.rstrip("/").rsplit("/", 2)
    if folder in ("checkpoints", "sft_checkpoints") and (checkpoint_files.step_of(step) is not None or step == BEST):
        return run, f"{folder}/{step}"
    return url.rstrip("/"), None


def local_run(url: str, overrides: Sequence[str] = ()) -> Path | None:
    """Returns the local copy of a checkpoint of a run in object storage, as `RUN/checkpoints/STEP`: the given one, the
    best or the newest. The copy has what opening it needs. Returns None if `url` is no run and no checkpoint."""
    run, step = split_address(url)
    names = names_below(run, "model.path")
    if "config.json" in names or "model/config.json" not in names:
        return None
    complete = checkpoints_among(names)[0]
    if step == f"checkpoints/{BEST}":
        marks = [f"{each}/{mark}" for each in complete for mark in checkpoint_files.MARKS]
        step = (
            "checkpoints/"
            + best_checkpoint(
                local_copy(run, "model.path", ("config.yaml", "metrics.jsonl", *marks)), overrides, shown=run
            ).name
        )
    elif step is None:
        step = latest(complete)
        if step is None:
            raise UserError(f"{run} has no checkpoint yet; training.checkpoint_every_n_steps sets when one is written.")
    if step not in complete:
        raise UserError(f"{run}: no checkpoint {step}; there are: {', '.join(sorted(complete)) or 'none'}.")
    return local_copy(run, "model.path", ("config.yaml", "model/*", f"{step}/*")) / step


def best_checkpoint(run: Path, overrides: Sequence[str] = (), shown: str | None = None) -> Path:
    """Returns the checkpoint with the best value of `training.best_metric`. Errors call the run `shown`."""
    file = run / "config.yaml"
    metric = load(file if file.is_file() else None, overrides).training.best_metric
    if metric is None:
        raise UserError(
            f"{shown or run}: the best checkpoint is not known, because training.best_metric is unset in its config; "
            "add e.g. training.best_metric=eval/pass@1 to select the best of its checkpoints."
        )
    with Checkpoints(run / "checkpoints") as checkpoints:
        steps = checkpoints.steps()
    step = best_of(run, metric).among(steps)
    if step is None:
        raise UserError(
            f"{shown or run}/checkpoints: no checkpoint has a value of {metric}; its steps are: {steps or 'none'}."
        )
    return run / "checkpoints" / str(step)


def _named_base(run: Path) -> list[str]:
    """Returns overrides for the base model that the adapter config of a run names."""
    fields = read_adapter_config(run / "model")
    names = {"path": "base_model_name_or_path", "quantize": "quantize", "param_dtype": "param_dtype"}
    return [f"model.{key}={fields[name]}" for key, name in names.items() if fields.get(name) is not None]


def _adapted_base(run: Path, config: Config, description: DecoderConfig, mesh: Mesh | None) -> Decoder:
    """Loads the base model of a run's adapters, and adds newly initialised adapters."""
    fields = read_adapter_config(run / "model")
    section = config.model
    what = run / "model" if section.init == "random" else section.path
    cure = "Set the base: model.path=FOLDER, or model.init=random and training.seed if it was initialised at random."
    if what is None:
        raise UserError(f"{run} has only adapters, and does not name their base. {cure}")
    try:
        base, _ = loaded(config, what, mesh)
    except UserError as error:
        raise UserError(f"{run} has only adapters, and their base cannot be loaded: {error} {cure}") from None
    if base.config != dataclasses.replace(description, scalar_head=base.config.scalar_head):
        raise UserError(f"{run} has adapters of another model than {what}. {cure}")
    if description.scalar_head:
        base = add_scalar_head(base)
    lora = LoraConfig(rank=fields["r"], alpha=fields["lora_alpha"], targets=fields["target_modules"])
    return add_lora(base, lora)
