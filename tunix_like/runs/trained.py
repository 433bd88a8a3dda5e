"""Opens a model together with the config of its run, or with that of a config file."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from tunix_like.config.argument_names import named_arguments
from tunix_like.config.load import load
from tunix_like.config.schema import Config, LoraConfig
from tunix_like.config.sources import template_variables
from tunix_like.config.urls import plain_hub_id
from tunix_like.config.yaml_files import config_file
from tunix_like.data import load_source
from tunix_like.environments.kinds import environments_of
from tunix_like.errors import UserError
from tunix_like.evaluation.evaluate import Evaluator, ks_of
from tunix_like.models import loading
from tunix_like.models.decoder import Decoder
from tunix_like.models.gguf_files import PACKAGE
from tunix_like.models.loading import check_fit
from tunix_like.models.lora import ADAPTER_CONFIG
from tunix_like.models.opening import find_checkpoint, loaded, restore
from tunix_like.models.sharding import build_mesh
from tunix_like.runs.build import chosen_tokenizer, load_policy, make_evaluator, warn_of_text
from tunix_like.runs.reward_functions import reward_functions
from tunix_like.runtime.moment import START, Moment
from tunix_like.runtime.object_storage import is_remote
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.training.engine import make_engine


class Trained(NamedTuple):
    """A model with its weights and config.

    Attributes:
      of_run: whether the config is that of a run or a file, and names the data of the model.
    """

    config: Config
    graphdef: Any
    model_config: Any
    params: Any
    tokenizer: Tokenizer
    mesh: Mesh | None
    origin: str
    moment: Moment = START
    of_run: bool = False

    @property
    def model(self) -> Decoder:
        return nnx.merge(self.graphdef, self.params)


@named_arguments
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
    found = find_checkpoint(path_or_hub_id) if isinstance(path_or_hub_id, str | Path) else None
    if found is None:
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
    trained = open_trained(str(found.folder), overrides, mesh=mesh)
    return trained.model, trained.tokenizer


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
      path: a run folder, a checkpoint of a run, a model folder, a hub id, or a config file, which names its model.
      overrides: `key=value` strings for the config.
      need_data: whether to raise if neither the config nor the overrides name the data.
      mesh: the devices of the model: "config" for the mesh of the config, None for a single device.

    Raises:
      UserError: the path is not a run, checkpoint or model, the run has no checkpoint, or the checkpoints are damaged.
    """
    path = plain_hub_id(path, "SOURCE")
    if (config_path := _as_config(path)) is not None:
        return _open_config(config_path, overrides, mesh)
    found = find_checkpoint(path, overrides)
    if found is None:
        return _open_model(path, overrides, need_data, mesh)
    config = found.config(overrides)
    of_run = (found.run / "config.yaml").is_file()  # not of a run from Python
    if not of_run:
        _check_data(path, overrides, need_data)
    mesh = build_mesh(config.mesh) if mesh == "config" else mesh
    graphdef, params, model_config, tokenizer = restore(found, config, mesh)
    tokenizer = tokenizer.with_template_variables(template_variables(config.data))
    return Trained(config, graphdef, model_config, params, tokenizer, mesh, found.name, found.moment(), of_run)


def _as_config(path: str) -> Path | None:
    """Returns the config file that a source names, by its path or by its name in this package; None for others."""
    if is_remote(path) or Path(path).is_dir():
        return None
    file = config_file(Path(path))
    return file if file.suffix in (".yaml", ".yml") else None


def _open_config(file: Path, overrides: Sequence[str], mesh: Mesh | Literal["config"] | None) -> Trained:
    """Opens the model from which a config starts, without adapters, which do not change a new model."""
    config = load(file, overrides)
    config = dataclasses.replace(config, lora=LoraConfig())
    mesh = build_mesh(config.mesh) if mesh == "config" else mesh
    own = chosen_tokenizer(config, load_source(config.data))
    model, tokenizer, _ = load_policy(config, own, abstract=False, mesh=mesh)
    graphdef, state = nnx.split(model)
    origin = f"{file}, before training: {config.model.path or 'a random model'}"
    params = nnx.to_pure_dict(state)
    return Trained(config, graphdef, model.config, params, tokenizer, mesh, origin, of_run=True)


def _check_data(path: str, overrides: Sequence[str], need_data: bool) -> None:
    given = {override.partition("=")[0] for override in overrides}
    if need_data and "data.name" not in given:
        exists = Path(path).exists() or path.startswith(PACKAGE)
        missing = "" if exists else " (There is no folder of that name; it is used as a hub id.)"
        raise UserError(f"{path} names no data to evaluate on; add e.g. data.name=gsm8k.{missing}{_similar_run(path)}")


def _similar_run(path: str) -> str:
    """Returns a hint at a run whose folder has a similar name, if there is no folder `path`; otherwise no text."""
    place = Path(path)
    if is_remote(path) or path.startswith(PACKAGE) or place.exists() or not place.parent.is_dir():
        return ""
    runs = [folder.name for folder in place.parent.iterdir() if (folder / "config.yaml").is_file()]
    close = difflib.get_close_matches(place.name, runs, n=1)
    return f" Or is it the run {place.parent / close[0]}?" if close else ""


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
    warn_of_text(config, source, trained.tokenizer, environments)
    if not rewards and environments is None:
        pairs = "; its held-out pairs are evaluated during training (training.eval_every_n_steps)"
        raise UserError(
            f"rewards.functions: this run ({config.algorithm.advantage_estimator}) had no rewards"
            f"{pairs * config.trains_pairs}. To sample completions and score them, set it."
        )
    engine = make_engine(trained.graphdef, trained.tokenizer, config.rollout, trained.mesh)
    evaluator = make_evaluator(config, config.eval, engine, trained.tokenizer, source, rewards, environments)
    if evaluator.skipped is not None:
        evaluator.skipped.warn("evaluation")
    return evaluator


def _open_model(path: str, overrides: Sequence[str], need_data: bool, mesh: Mesh | Literal["config"] | None) -> Trained:
    place = Path(path)
    if (place / ADAPTER_CONFIG).is_file() and not (place / "config.json").is_file():
        raise UserError(
            f"{place} has only an adapter, not a whole model: load it with its base by tunix_like.load_adapter (in "
            "Python), or export the whole model without --adapter."
        )
    _check_data(path, overrides, need_data)
    config = load(None, [f"model.path={path}", *overrides])
    mesh = build_mesh(config.mesh) if mesh == "config" else mesh
    try:
        model, tokenizer = loaded(config, path, mesh)
    except UserError as error:
        raise UserError(f"{error}{_similar_run(path)}") from error
    if tokenizer is None:
        raise UserError(f"{path} has no tokenizer.")
    tokenizer = tokenizer.with_template_variables(template_variables(config.data))
    graphdef, state = nnx.split(model)
    return Trained(config, graphdef, model.config, nnx.to_pure_dict(state), tokenizer, mesh, path)
