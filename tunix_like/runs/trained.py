"""Opens a trained model: the newest or best checkpoint of a run, the checkpoint of a step, a model folder or a hub id.

This module also loads the config, the model description and the base model of adapters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from tunix_like.config.load import load, read_yaml
from tunix_like.config.schema import Config, LoraConfig
from tunix_like.config.urls import plain_hub_id
from tunix_like.data import load_source, template_variables
from tunix_like.data.tokenizer import Tokenizer
from tunix_like.environments.kinds import environments_of
from tunix_like.errors import UserError
from tunix_like.evaluation.evaluate import Evaluator, ks_of
from tunix_like.models import loading
from tunix_like.models.config import DecoderConfig
from tunix_like.models.decoder import Decoder, add_scalar_head
from tunix_like.models.loading import check_fit, load_description
from tunix_like.models.lora import (
    ADAPTER_CONFIG,
    add_lora,
    check_base,
    fingerprint,
    join_params,
    read_adapter_config,
    split_params,
)
from tunix_like.models.sharding import build_mesh, place_params
from tunix_like.runs.build import kinds_of, loaded, make_evaluator
from tunix_like.runs.folder import newest_checkpoints
from tunix_like.runs.reward_functions import reward_functions
from tunix_like.runtime.object_storage import is_remote, local_copy, names_below
from tunix_like.storage import checkpoint_files
from tunix_like.storage.checkpoints import Checkpoints
from tunix_like.storage.metrics import best_of
from tunix_like.storage.mirror import checkpoints_among, latest
from tunix_like.training.engine import make_engine

BEST = "best"
"""The path `RUN/checkpoints/best` stands for the best checkpoint of a run. There is no folder with this name."""


class Trained(NamedTuple):
    """A model with its weights and config."""

    config: Config
    graphdef: Any
    model_config: Any
    params: Any
    tokenizer: Tokenizer
    mesh: Mesh | None
    origin: str

    @property
    def model(self) -> Decoder:
        return nnx.merge(self.graphdef, self.params)


def load_model(
    path_or_hub_id: str | Path | Mapping[str, Any],
    *,
    init: str = "pretrained",
    seed: int = 0,
    dtype: Any = None,
    param_dtype: Any = None,
    attention: str | None = None,
    quantize: str | None = None,
    mesh: Mesh | None = None,
) -> tuple[Decoder, Tokenizer | None]:
    """Loads a decoder, and its tokenizer if the folder has one.

    Args:
      path_or_hub_id: a model folder, a hub id `owner/name` (needs the pip extra `hub`), a run folder (its newest
        checkpoint), `RUN/checkpoints/STEP`, `RUN/checkpoints/best`, or an HF config as a mapping (only with
        `init="random"`).
      init: "pretrained" reads the stored weights; "random" initialises weights at random and needs none. Not for runs.
      seed: random seed of the weights.
      dtype: dtype of matrix products; None: that of the run's config, or else float32 on CPU and bfloat16 on
        accelerators.
      param_dtype: dtype of the weights; None: that of the run's config, or else float32.
      attention: attention implementation, one of `schema.ATTENTIONS`; None: that of the run's config, or else "auto",
        which selects one by the device and the number of attention scores.
      quantize: "int8" or "nf4": the projections of the layers are quantised one by one while they are read. A quantised
        model supports sampling and the training of adapters (`add_lora`). None: no quantisation. Not for runs.
      mesh: device mesh over which the weights are sharded; each shard is read directly to its device. None: one device.

    Returns:
      the model and the tokenizer. The tokenizer includes the end-of-sequence ids of the model; it is None if the folder
        has no tokenizer.

    Raises:
      UserError: an argument, the folder, or its config, weights or tokenizer is invalid; this device does not support
        the attention implementation; or the mesh does not divide the model.
    """
    path_or_hub_id = plain_hub_id(path_or_hub_id, "load_model")
    if is_remote(path_or_hub_id) and (stored := local_run(str(path_or_hub_id))) is not None:
        path_or_hub_id = stored
    if (
        not isinstance(path_or_hub_id, (str, Path))
        or is_remote(path_or_hub_id)
        or not _is_of_run(Path(path_or_hub_id).expanduser())
    ):
        kinds = {"dtype": dtype, "param_dtype": jnp.float32 if param_dtype is None else param_dtype}
        kinds |= {"attention": attention or "auto"}
        return loading.load_model(path_or_hub_id, init=init, seed=seed, quantize=quantize, mesh=mesh, **kinds)
    if init != "pretrained" or quantize is not None:
        raise UserError(
            f"{path_or_hub_id}: init and quantize do not apply to a run, which has weights; leave them out."
        )
    given = {"attention": attention}
    given |= {name: jnp.dtype(kind).name for name, kind in {"dtype": dtype, "param_dtype": param_dtype}.items() if kind}
    overrides = [f"model.{name}={value}" for name, value in given.items() if value is not None]
    trained = open_trained(str(Path(path_or_hub_id).expanduser()), overrides, mesh=mesh)
    return trained.model, trained.tokenizer


def _is_of_run(place: Path) -> bool:
    """Returns whether a path is a run folder with checkpoints or a checkpoint of a run, and not a model folder."""
    if (place / "config.json").is_file():
        return False
    run = place.parent.parent if place.parent.name in ("checkpoints", "sft_checkpoints") else place
    return (run / "model" / "config.json").is_file()


def open_trained(
    path: str,
    overrides: Sequence[str] = (),
    *,
    need_data: bool = False,
    mesh: Mesh | Literal["config"] | None = "config",
) -> Trained:
    """Opens a trained model: the newest checkpoint of a run folder, the checkpoint `RUN/checkpoints/STEP` or
    `RUN/checkpoints/best`, or a model.

    Args:
      path: a run folder, a checkpoint of a run, a model folder or a hub id.
      overrides: `key=value` strings for the config.
      need_data: whether to raise if neither the config nor the overrides name the data.
      mesh: the devices of the model: "config" for the mesh of the config, None for a single device.

    Raises:
      UserError: the path is not a run, checkpoint or model, the run has no checkpoint, or the checkpoints are damaged.
    """
    path = plain_hub_id(path, "SOURCE")
    if is_remote(path) and (local := local_run(path, overrides)) is not None:
        trained = open_trained(str(local), overrides, need_data=need_data, mesh=mesh)
        return trained._replace(origin="/".join([split_address(path)[0], *local.parts[-2:]]))
    place = Path(path)
    if (place.parent.name, place.name) == ("checkpoints", BEST):
        place = best_checkpoint(place.parent.parent, overrides)
    if (place / ADAPTER_CONFIG).is_file() and not (place / "config.json").is_file():
        raise UserError(
            f"{place} has only an adapter, not a whole model: load it with its base by tunix_like.load_adapter (in "
            "Python), or export the whole model without --adapter."
        )
    step: int | None = None
    named = checkpoint_files.step_of(place.name)
    if named is not None and place.parent.name in ("checkpoints", "sft_checkpoints"):
        step, steps_folder, place = named, place.parent, place.parent.parent
    elif (place / "model" / "config.json").is_file():
        found = newest_checkpoints(place)
        if found is None:
            raise UserError(
                f"{place} has no checkpoint yet; training.checkpoint_every_n_steps sets when one is written."
            )
        steps_folder = found
    else:
        return _open_model(path, overrides, need_data, mesh)
    file = place / "config.yaml"  # runs of the Python interface have no such file
    adapters = (place / "model" / ADAPTER_CONFIG).is_file()
    if file.is_file():
        read_yaml(file)  # rejects an empty file, which `load` would read as all defaults
        config = load(file, overrides)
    else:
        config = _config_without_file(path, [*(_named_base(place) if adapters else ()), *overrides], need_data)
    mesh = build_mesh(config.mesh) if mesh == "config" else mesh
    graphdef, abstract, model_config, tokenizer = load_description(place / "model", mesh=mesh, **kinds_of(config))
    frozen: Any = {}
    if adapters:
        model = _adapted_base(place, config, model_config, mesh)
        graphdef, state = nnx.split(model)
        abstract, frozen = split_params(place_params(nnx.to_pure_dict(state), mesh))
    with Checkpoints(steps_folder) as checkpoints:
        if step is None:
            step = checkpoints.newest()
            assert step is not None
        else:
            checkpoints.check(step)
        if adapters:
            base = {"base": fingerprint(model.config, frozen, mesh)}
            check_base(checkpoints.folder / str(step), checkpoints.meta(step)["identity"], base)
        params = join_params(checkpoints.restore(step, {"params": abstract})[0]["params"], frozen)
    tokenizer = tokenizer.with_template_variables(template_variables(config.data))
    return Trained(config, graphdef, model_config, params, tokenizer, mesh, f"{steps_folder}/{step}")


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
    fields, section = read_adapter_config(run / "model"), config.model
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


def _config_without_file(path: str, overrides: Sequence[str], need_data: bool) -> Config:
    given = {override.partition("=")[0] for override in overrides}
    if need_data and "data.name" not in given:
        missing = "" if Path(path).exists() else " (There is no folder of that name; it is used as a hub id.)"
        raise UserError(f"{path} names no data to evaluate on; add e.g. data.name=gsm8k.{missing}")
    return load(None, overrides)


def evaluator_of(trained: Trained, on_training_rows: bool = False) -> Evaluator:
    """Builds the evaluator of a trained model, for the held-out rows (or the training rows) of its config."""
    config = trained.config
    ks_of(config.eval)
    check_fit(trained.model_config, trained.tokenizer, config.rollout)
    source = load_source(config.data)
    rewards = reward_functions(config, source, trained.mesh)
    if on_training_rows:
        source = dataclasses.replace(source, eval=source.train)
    if not len(source.eval):
        raise UserError(
            f"data.name={config.data.name} has no held-out rows. Set data.path=<another file or folder> with rows that "
            "were not trained on."
        )
    environments = environments_of(config)
    if not rewards and environments is None:
        raise UserError(
            "rewards.functions: this run had no rewards (distillation), and an evaluation needs one; set it."
        )
    engine = make_engine(trained.graphdef, trained.tokenizer, config.rollout, trained.mesh)
    given = trained.tokenizer, source, rewards, environments
    evaluator = make_evaluator(config, config.eval, engine, *given)
    if evaluator.skipped is not None:
        evaluator.skipped.warn("evaluation")
    return evaluator


def _open_model(path: str, overrides: Sequence[str], need_data: bool, mesh: Mesh | Literal["config"] | None) -> Trained:
    config = _config_without_file(path, [f"model.path={path}", *overrides], need_data)
    mesh = build_mesh(config.mesh) if mesh == "config" else mesh
    model, tokenizer = loaded(config, path, mesh)
    if tokenizer is None:
        raise UserError(f"{path} has no tokenizer.")
    tokenizer = tokenizer.with_template_variables(template_variables(config.data))
    graphdef, state = nnx.split(model)
    return Trained(config, graphdef, model.config, nnx.to_pure_dict(state), tokenizer, mesh, path)
