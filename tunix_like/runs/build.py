"""Runs on disk, and the parts a config names: data, model, tokenizer, rewards, learner.

A run is one folder: `config.yaml` (resolved), `model/` (what the model is, without weights), `metrics.jsonl`,
`checkpoints/`, `sft_checkpoints/`, `rollouts/`. This module knows which parts belong together; it trains nothing.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from tunix_like.algorithms.losses import loss_parameters
from tunix_like.algorithms.objective import (
    ESTIMATOR_KEYS,
    LOSS_KEYS,
    build_objective,
    check_takes_negative,
    resolve,
    trace_own,
)
from tunix_like.algorithms.registry import find_estimator
from tunix_like.config.load import as_dict, differences, read_yaml, save, temporary_of
from tunix_like.config.schema import (
    AlgorithmConfig,
    Config,
    EvalConfig,
    ModelConfig,
    RewardsConfig,
    number_problem,
    shortened,
)
from tunix_like.data import (
    DataSource,
    check_parts,
    check_rewards,
    load_source,
    source_estimators,
    template_variables,
)
from tunix_like.data.tokenizer import Tokenizer
from tunix_like.errors import UserError, nearest
from tunix_like.evaluation.evaluate import EVAL_KEY, Evaluator, check_best_metric, eval_problems, ks_of
from tunix_like.models.decoder import Decoder
from tunix_like.models.loading import (
    check_fit,
    load_abstract,
    load_config,
    load_model,
    save_description,
)
from tunix_like.models.lora import (
    add_lora,
    resolve_adapters,
    save_adapter_config,
)
from tunix_like.models.sharding import build_mesh, check_batch, check_model
from tunix_like.rewards import check_arguments, pooled
from tunix_like.rewards import resolve as resolve_reward
from tunix_like.rewards.pool import PooledFunction
from tunix_like.rollout.collection import EXTRA_BATCHES
from tunix_like.rollout.rollouts import WeightedReward
from tunix_like.rollout.sampler import slot_shape
from tunix_like.runtime.processes import by_first
from tunix_like.runtime.profile import check_profile_steps
from tunix_like.storage.checkpoints import Checkpoints
from tunix_like.storage.loggers import check_loggers
from tunix_like.storage.run_lock import FILE as LOCK
from tunix_like.training.engine import make_engine
from tunix_like.training.learner import Learner
from tunix_like.training.learners import LEARNERS, find_learner
from tunix_like.training.memory import adapter_count, parameter_count
from tunix_like.training.optimizer import build_schedule
from tunix_like.training.sizes import Foreseen, foresee

CHANGEABLE = (
    "training.max_steps",
    "training.output_dir",
    "training.eval_every_n_steps",
    "training.checkpoint_every_n_steps",
    "training.max_checkpoints_to_keep",
    "training.best_metric",
    "training.log_rollouts_every_n_steps",
    "training.log_samples_every_n_steps",
    "training.loggers",
    "training.profile_steps",
    "training.train_micro_batch_size",
    "rollout.max_concurrent_rows",
    "rewards.workers",
    "rewards.timeout_seconds",
    "rewards.memory_gb",
    "eval.",
)
"""Keys (or their beginnings) that a run may be resumed with other values of."""

MOST_WORKERS = 4
"""Processes for rewards when `rewards.workers` is unset."""


class Parts(NamedTuple):
    """What a config names, ready to be put together. `weights` says of a model of shapes alone what weights they were
    compared with."""

    config: Config
    learner: type[Learner]
    source: DataSource
    model: Decoder
    tokenizer: Tokenizer
    rewards: list[WeightedReward]
    mesh: Mesh | None
    weights: str = ""

    def evaluator(self, settings: EvalConfig) -> Evaluator:
        """An evaluator on the run's held-out problems, with `settings` in place of its `eval` section."""
        graphdef = nnx.split(self.model)[0]
        return make_evaluator(self.config, settings, graphdef, self.tokenizer, self.source, self.rewards, self.mesh)

    @property
    def source_estimators(self) -> dict[str, dict[str, Any]]:
        """What the learner is told of the sources of a mix that name estimators of their own, by label."""
        return source_estimators(self.config.data, self.config.algorithm)


def check_config(config: Config) -> tuple[Config, type[Learner]]:
    """Resolves the algorithm's defaults and checks all that needs neither data nor model.

    Raises:
      UserError: naming the key.
    """
    learner = find_learner(config.algorithm.advantage_estimator)
    algorithm = resolve(config.algorithm, learner.config_class)
    template_variables(config.data)
    lengths, own = config.rollout.max_tokens_to_generate, source_estimators(config.data, algorithm)
    objective = build_objective(algorithm, lengths, updates_per_batch(config), own)
    trace_own(objective, config.data.batch_size, algorithm.num_generations)
    algorithm = dataclasses.replace(algorithm, **_defaults_read(algorithm))
    if config.rollout.temperature == 0:
        raise UserError("rollout.temperature: 0 is greedy, which explores nothing; training needs it above 0.")
    _check_lora(config)
    if algorithm.dynamic_sampling and config.training.max_steps is None:
        build_schedule(config.optimizer, None)  # how many steps the data makes is not known then
    ks_of(config.eval)
    check_profile_steps(config.training.profile_steps)
    check_loggers(config.training.loggers)
    for i, (_, weight) in enumerate(reward_entries(config)):
        if weight < 0:
            check_takes_negative(objective, f"rewards.functions[{i}].weight={weight:g}", "a weight of at least 0")
    if config.model.path is None and config.model.config is None:
        raise UserError("model.path: name a model folder or hub id, or write model.config and model.init: random.")
    return dataclasses.replace(config, algorithm=algorithm), learner


def _check_lora(config: Config) -> None:
    """What adapters need, and what needs adapters."""
    lora, model = config.lora, config.model
    if lora.rank is not None:
        return
    if unread := [name for name in ("alpha", "targets") if getattr(lora, name) is not None]:
        raise UserError(f"lora.{unread[0]}: there are no adapters without lora.rank; set it, e.g. 16.")
    if model.quantize is not None:
        raise UserError(
            f"model.quantize: weights in {model.quantize} cannot be trained; set lora.rank to train adapters beside "
            "them."
        )
    if model.param_dtype != "float32":
        raise UserError(
            "model.param_dtype: bfloat16 weights lose small updates; train in float32 (model.dtype may differ), or "
            "adapters beside them (lora.rank)."
        )


def _defaults_read(algorithm: AlgorithmConfig) -> dict[str, Any]:
    """Values of the unset keys that the estimator and the loss read. A parameter of an estimator of one's own may be
    called like a key that means something else, and is left alone."""
    read = dict(loss_parameters(str(algorithm.policy_loss_fn)))
    if algorithm.advantage_estimator in LEARNERS:
        read |= find_estimator(algorithm.advantage_estimator).parameters()
    keys = [field.name for field in dataclasses.fields(algorithm) if getattr(algorithm, field.name) is None]
    given = algorithm.estimator_params or {}
    return {
        key: read[key] for key in keys if key in read and key not in given and read[key] is not inspect.Parameter.empty
    }


def reward_entries(config: Config, default: str | None = None) -> list[tuple[str, float]]:
    """Names and weights of `rewards.functions`. Raises UserError naming the entry that is no `{name, weight}`."""
    entries = config.rewards.functions
    if entries is None:
        return [] if default is None else [(default, 1.0)]
    if not entries:
        raise UserError("rewards.functions: the list is empty; leave it unset for the data source's own reward.")
    out = []
    for i, entry in enumerate(entries):
        unknown = set(entry) - {"name", "weight"}
        if unknown or not isinstance(entry.get("name"), str):
            hint = f" {nearest(str(min(unknown)), ('name', 'weight'))}" if unknown else ""
            raise UserError(
                f"rewards.functions[{i}]: expected {{name: ...}} and, if not 1, a weight; got {entry}.{hint}"
            )
        weight = entry.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise UserError(f"rewards.functions[{i}].weight: expected a number, got {shortened(weight)}.")
        if problem := number_problem(weight):
            raise UserError(f"rewards.functions[{i}].weight: got {shortened(weight)}; {problem}.")
        out.append((entry["name"], float(weight)))
    if doubled := {name for name, _ in out if [n for n, _ in out].count(name) > 1}:
        raise UserError(f"rewards.functions: {', '.join(sorted(doubled))} is named twice; give it one weight.")
    return out


def reward_functions(config: Config, source: DataSource) -> list[WeightedReward]:
    """The functions of `rewards`, which must find what they ask for in the source's rows; those that are to run in
    workers do (`rewards.workers`)."""
    functions = [(name, resolve_reward(name), weight) for name, weight in reward_entries(config, source.reward)]
    check_arguments(functions, [name for name in source.train[0] if name != "prompt"])
    check_rewards(source, functions)
    return _in_workers(config.rewards, functions)


def _in_workers(config: RewardsConfig, functions: list[WeightedReward]) -> list[WeightedReward]:
    """Of functions that may hang or crash (math-verify and what users write), or of all if a number of workers is set,
    those that run in workers."""
    workers = min(MOST_WORKERS, os.cpu_count() or 1) if config.workers is None else config.workers
    if not workers:
        return functions

    risky = {name for name, _, _ in functions if ":" in name or name in ("gsm8k", "gsm8k_lenient", "by_source")}
    chosen = {name: each for name, each, _ in functions if config.workers is not None or name in risky}
    if not chosen:
        return functions
    apart = pooled(chosen, workers=workers, timeout_seconds=config.timeout_seconds, memory_gb=config.memory_gb)
    return [(name, apart.get(name, function), weight) for name, function, weight in functions]


def assemble(config: Config, *, abstract: bool = False) -> Parts:
    """Checks a config and loads what it names: cheap things first, weights last; an `abstract` model has shapes alone,
    and no weights are read, made or downloaded."""
    config, learner = check_config(config)
    mesh = build_mesh(config.mesh)
    check_batches(config, mesh)
    source = load_source(config.data)
    rewards = reward_functions(config, source)
    entries = [{"name": name, "weight": weight} for name, _, weight in rewards]
    config = dataclasses.replace(config, rewards=dataclasses.replace(config.rewards, functions=entries))
    model, tokenizer, weights = _load_model(config, source.tokenizer, abstract, mesh)
    check_fit(model.config, tokenizer, config.rollout)
    check_model(mesh, model.config, nnx.to_pure_dict(nnx.split(model)[1]))
    check_parts(source, tokenizer, config.rollout.max_prompt_length, needs_answer=config.sft.max_steps > 0)
    parts = Parts(config, learner, source, model, tokenizer, rewards, mesh, weights)
    if config.training.best_metric is not None:  # here, as supervised fine-tuning may come before the learner
        check_best_metric(config.training, parts.evaluator(config.eval) if len(source.eval) else None)
    return parts


def check_batches(config: Config, mesh: Mesh | None) -> None:
    """Raises UserError naming the key of a batch that the mesh does not divide."""
    mini = config.training.mini_batch_size or config.data.batch_size
    check_batch(mesh, "data.batch_size", config.data.batch_size)
    check_batch(mesh, "training.mini_batch_size", min(mini, config.data.batch_size))
    if config.sft.max_steps:
        check_batch(mesh, "sft.batch_size", config.sft.batch_size)


def named_model(section: ModelConfig, own: Tokenizer | None) -> str | dict[str, Any]:
    """What `load_model` takes: a path or hub id, or an HF config, which a data source's own tokenizer completes.

    Raises:
      UserError: naming the key, where both are given, or a config without weights is to be loaded.
    """
    if section.path is not None:
        if section.config is not None:
            raise UserError(
                "model.path: model.config describes another model; add model.config=null model.init=pretrained."
            )
        return section.path
    if section.init != "random":
        raise UserError("model.init: model.config describes a model without weights; set model.init=random.")
    fields = dict(section.config or {})
    return fields if own is None else {"vocab_size": own.vocab_size} | fields


def _load_model(
    config: Config, own: Tokenizer | None, abstract: bool, mesh: Mesh | None
) -> tuple[Decoder, Tokenizer, str]:
    section, what = config.model, named_model(config.model, own)
    if config.lora.rank is not None:
        resolve_adapters(load_config(what), config.lora)  # before any weights are read, which may take minutes
    if abstract:
        model, tokenizer, weights = load_abstract(
            what, init=section.init, quantize=section.quantize, **kinds_of(config)
        )
    else:
        model, tokenizer = loaded(config, what, mesh)
        weights = ""
    if config.lora.rank is not None:
        model = add_lora(model, config.lora, config.training.seed)
    tokenizer = own or tokenizer
    if tokenizer is None:
        raise UserError(f"model.path: {section.path} has no tokenizer, and data.name={config.data.name} brings none.")
    return model, tokenizer.with_template_variables(template_variables(config.data)), weights


def run_folder(config: Config, config_path: str | Path, kind: str) -> Path:
    """`training.output_dir`, or `runs/<config>-<kind>-s<seed>`; an estimator that is named by its place
    (`FILE.py:function`) is called by its function there."""
    if config.training.output_dir is not None:
        return Path(config.training.output_dir)
    name = kind.replace(":", ".").rpartition(".")[2]
    return Path("runs") / f"{Path(config_path).stem}-{name}-s{config.training.seed}"


def claim(folder: Path, parts: Parts) -> None:
    """Writes what the run is, or checks that the folder already holds this very run.

    Raises:
      UserError: the folder holds another config; the keys that differ are named, and which of them may.
    """
    begun = newest_checkpoints(folder) is not None
    by_first(lambda: _claim(folder, parts, begun))


def _claim(folder: Path, parts: Parts, begun: bool) -> None:
    file = folder / "config.yaml"
    if file.exists():
        changed = differences(read_yaml(file), as_dict(parts.config))
        fixed = [line for line in changed if not line.startswith(CHANGEABLE)]
        free = [line for line in changed if line.startswith(CHANGEABLE)]
        if fixed and begun:  # without one, nothing is lost by starting over
            raise UserError(
                f"{folder} holds a run with another config:\n  " + "\n  ".join(fixed) + "\n"
                "Use the same values to resume it, or training.output_dir=<another folder> to start anew."
                + ("\nThese differ too, and may:\n  " + "\n  ".join(free) if free else "")
            )
    elif folder.exists() and any(path.name not in (LOCK, temporary_of(file).name) for path in folder.iterdir()):
        raise UserError(f"{folder} is not empty and holds no run; choose another training.output_dir.")
    folder.mkdir(parents=True, exist_ok=True)
    save(parts.config, file)
    save_description(parts.model.config, parts.tokenizer, folder / "model", parts.config.model.param_dtype)
    if parts.model.adapters is not None:
        save_adapter_config(parts.model, folder / "model")


def loaded(config: Config, what: Any, mesh: Mesh | None) -> tuple[Decoder, Tokenizer | None]:
    section, seed = config.model, config.training.seed
    return load_model(what, init=section.init, seed=seed, quantize=section.quantize, mesh=mesh, **kinds_of(config))


def kinds_of(config: Config) -> dict[str, Any]:
    """`load_model`'s dtypes and way to attend; an unset compute dtype is left to the device."""
    dtype = config.model.dtype
    return {
        "dtype": None if dtype is None else jnp.dtype(dtype),
        "param_dtype": jnp.dtype(config.model.param_dtype),
        "attention": config.model.attention,
    }


def make_evaluator(
    config: Config,
    settings: EvalConfig,
    graphdef: Any,
    tokenizer: Tokenizer,
    source: DataSource,
    rewards: list[WeightedReward],
    mesh: Mesh | None,
) -> Evaluator:
    rollout = config.rollout
    problems, skipped = eval_problems(
        source.eval, tokenizer, rollout.max_prompt_length, settings.max_problems, config.data.overlong_prompts
    )
    return Evaluator(
        make_engine(graphdef, tokenizer, rollout, mesh),
        tokenizer,
        problems,
        rewards,
        settings,
        config.rewards.success_threshold,
        jax.random.fold_in(jax.random.key(config.training.seed), EVAL_KEY),
        skipped=skipped,
    )


def newest_checkpoints(run: Path) -> Path | None:
    for name in ("checkpoints", "sft_checkpoints"):
        checkpoints = Checkpoints(run / name)
        found = checkpoints.latest_step()
        checkpoints.close()
        if found is not None:
            return run / name
    return None


def describe(parts: Parts) -> list[tuple[str, str]]:
    """What is about to run, for the screen: learner, loss, aggregation, KL, and what the batch sizes mean."""
    config, algorithm = parts.config, parts.config.algorithm
    prompts, size = config.data.batch_size, algorithm.num_generations
    updates = updates_per_batch(config)
    place = "reward" if algorithm.kl_in_reward else "loss"
    kl = f"{algorithm.kl_loss_mode} in the {place}, beta {algorithm.beta:g}" if algorithm.beta else "none (beta 0)"
    lengths = config.rollout
    way = "plain, or blocked where calls are large" if parts.model.attention == "auto" else parts.model.attention
    kind = f"{jnp.dtype(parts.model.dtype).name} on {jax.default_backend()}, attention {way}"
    return [
        ("learner", f"{parts.learner.__name__} ({algorithm.advantage_estimator})"),
        *_describe_sources(parts),
        ("loss", f"{algorithm.policy_loss_fn}, aggregation {algorithm.loss_agg_mode}, KL {kl}"),
        ("options", _describe_options(algorithm)),
        ("batch", f"{prompts} prompts x {size} completions = {prompts * size} a step, {updates} optimizer update(s)"),
        ("rewards", ", ".join(map(_describe_reward, parts.rewards))),
        ("model", f"{describe_model(parts.model)}, {kind}"),
        *([("weights", parts.weights)] if parts.weights else []),
        ("lengths", f"prompt <= {lengths.max_prompt_length}, completion <= {lengths.max_tokens_to_generate} tokens"),
        *_foreseen(parts).lines(),
    ]


def _foreseen(parts: Parts) -> Foreseen:
    """What the run will hold. Of a model of shapes alone everything can be said, though it does not fit; with weights
    there is something to run, and sizes that do not fit are refused."""
    return foresee(parts.config, parts.model, parts.mesh, slot_shape, refuse=not parts.weights)


def check_memory(parts: Parts) -> bool:
    """Whether the memory of this machine's devices is known.

    Raises:
      UserError: it is, and the run of these parts is foreseen to need more.
    """
    found = _foreseen(parts)
    if problems := found.problems():
        raise UserError(
            f"dry run: {found.peak_line()}. {' '.join(problems).rstrip('.')}. For other devices than this machine's: "
            "tunix-like doctor --config CONFIG --devices v5e-8."
        )
    return found.known


def _describe_reward(reward: WeightedReward) -> str:
    name, function, weight = reward
    place = f" (in {function.pool.workers} workers)" if isinstance(function, PooledFunction) else ""
    return f"{weight:g} x {name}{place}"


def describe_model(model: Decoder) -> str:
    """How many parameters there are, which of them are trained, and how the others are held."""
    text = f"{parameter_count(model.config) / 1e6:.2f} M parameters"
    if model.adapters is None:
        return text
    count = adapter_count(model.config, model.adapters)
    held = model.quantized or model.param_dtype.name
    return f"{text} frozen in {held}, {count / 1e6:.2f} M trained ({model.adapters})"


def _describe_options(algorithm: AlgorithmConfig) -> str:
    """Every parameter of estimator and loss, and whatever else changes the objective."""
    said = [
        f"{key} {value:g}" for key in (*ESTIMATOR_KEYS, *LOSS_KEYS) if (value := getattr(algorithm, key)) is not None
    ]
    given = (algorithm.estimator_params or {}) | (algorithm.loss_params or {})
    said += [f"{key} {value}" for key, value in given.items()]
    if algorithm.binarize:
        said.append("rewards binarized")
    if algorithm.overlong == "mask":
        said.append("completions cut at the limit masked")
    if algorithm.overlong == "penalty":
        most = 1.0 if algorithm.overlong_penalty is None else algorithm.overlong_penalty
        said.append(f"penalty up to {most:g} over the last {algorithm.overlong_buffer} tokens")
    if algorithm.sampler_is:
        bound = 2.0 if algorithm.sampler_is_threshold is None else algorithm.sampler_is_threshold
        said.append(f"sampler correction by {algorithm.sampler_is}, at most {bound:g}")
    if algorithm.entropy_coef:
        said.append(f"entropy bonus {algorithm.entropy_coef:g}")
    if algorithm.dynamic_sampling:
        said.append(f"dynamic sampling, up to {algorithm.max_extra_batches or EXTRA_BATCHES} more batches a step")
    return ", ".join(said) or "none"


def _describe_sources(parts: Parts) -> list[tuple[str, str]]:
    """Of a mix, each source's share of the prompts and its estimator; of any other source nothing."""
    told, out = parts.source_estimators, []
    for label, part in parts.source.parts.items():
        given = dict(told.get(label, {}))
        name = given.pop("advantage_estimator", parts.config.algorithm.advantage_estimator)
        estimator = ", ".join([str(name), *(f"{key} {value}" for key, value in given.items())])
        out.append(f"{label} {len(part.train) / len(parts.source.train):.0%} ({estimator})")
    return [("sources", "; ".join(out))] if out else []


def updates_per_batch(config: Config) -> int:
    mini = min(config.training.mini_batch_size or config.data.batch_size, config.data.batch_size)
    return -(-config.data.batch_size // mini) * config.algorithm.num_iterations
