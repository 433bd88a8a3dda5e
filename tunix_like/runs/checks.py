"""Checks a config, and fills in the defaults of its section `algorithm`, before any data or model is loaded."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from jax.sharding import Mesh

from tunix_like.algorithms.losses import loss_parameters
from tunix_like.algorithms.objective import build_objective, check_accepts_negative, resolve, trace_user_functions
from tunix_like.algorithms.registry import find_estimator
from tunix_like.algorithms.sources import source_estimators
from tunix_like.config.schema import (
    PAIR_LEARNERS,
    AlgorithmConfig,
    Config,
    CriticConfig,
    PreferenceConfig,
    RolloutConfig,
    TeacherConfig,
)
from tunix_like.config.sources import OF_OTHER_SOURCES, entries, teachers_of, template_variables
from tunix_like.data.curriculum import check_curriculum, curriculum_of
from tunix_like.environments.kinds import kind_of
from tunix_like.errors import UserError
from tunix_like.evaluation.evaluate import ks_of
from tunix_like.models.sharding import check_batch, check_lengths
from tunix_like.rollout.engines.registry import find_engine
from tunix_like.runs.reward_functions import reward_entries
from tunix_like.runtime.profile import check_profile_steps
from tunix_like.session.callbacks import named_callbacks
from tunix_like.step.optimizer import build_schedule
from tunix_like.storage.loggers import check_loggers
from tunix_like.training.critic import resolve_critic
from tunix_like.training.engine import check_settings
from tunix_like.training.learner import Learner
from tunix_like.training.learners import LEARNERS, find_learner
from tunix_like.training.preferences import PAIR_LEARNER_CLASSES, DPOLearner
from tunix_like.training.teacher import check_served, resolve_teacher


def check_config(config: Config) -> tuple[Config, type[Learner] | type[DPOLearner]]:
    """Fills in the defaults of the section `algorithm`, and runs all checks of a config that need no data and no model.
    Returns the resulting config and the learner class."""
    if config.trains_pairs:
        return _check_pairs(config)
    if unread := _changed(config.preference, PreferenceConfig()):
        raise UserError(
            f"preference.{unread[0]}: only algorithm.advantage_estimator={' and '.join(PAIR_LEARNERS)} read the "
            "section preference. Unset it."
        )
    learner = find_learner(config.algorithm.advantage_estimator)
    algorithm = resolve(config.algorithm, learner.config_class)
    template_variables(config.data)
    max_tokens = config.rollout.max_tokens_to_generate
    by_source = source_estimators(config.data, algorithm)
    teachers = teachers_of(config)
    of_sources = any(each.key != OF_OTHER_SOURCES for each in teachers)
    teacher = resolve_teacher(None, config.teacher, of_sources)
    for key, settings, _ in teachers:
        check_served(settings, config.rollout, key)
    resolve_critic(None, config.critic, algorithm)
    objective = build_objective(algorithm, max_tokens, updates_per_batch(config), by_source, teacher)
    for part in entries(config.data) if config.teacher.path is None else ():
        if part.teacher is None:
            objective.check_taught(part.label, f"{part.place}.teacher")
    trace_user_functions(objective, config.data.batch_size, algorithm.num_generations)
    algorithm = dataclasses.replace(algorithm, **defaults_read(algorithm))
    if algorithm.dynamic_sampling and config.training.max_steps is None:
        build_schedule(config.optimizer, None)  # the number of steps is not known with dynamic sampling
    plays = kind_of(config) is not None
    elsewhere = find_engine(config.rollout.engine).make is not None
    check_settings(algorithm, config.rollout, config.training, plays=plays, elsewhere=elsewhere)
    check_curriculum(curriculum_of(config.data), algorithm, config.rollout)
    _check_shared(config)
    for i, entry in enumerate(reward_entries(config)):
        if entry.weight < 0 and entry.per != "potential":
            place = f"rewards.functions[{i}].weight={entry.weight:g}"
            check_accepts_negative(objective, place, "a weight of at least 0")
    return dataclasses.replace(config, algorithm=algorithm), learner


def _check_shared(config: Config) -> None:
    """Runs the checks of keys that every learner reads."""
    _check_lora(config)
    ks_of(config.eval)
    check_profile_steps(config.training.profile_steps)
    check_loggers(config.training.loggers)
    named_callbacks(config.training.callbacks)
    if config.model.path is None and config.model.config is None:
        raise UserError("model.path: set a model folder or hub id, or set model.config and model.init: random.")


def _changed(section: Any, unset: Any) -> list[str]:
    """Returns the names of the fields of a config section whose values are not those of `unset`."""
    return [
        field.name for field in dataclasses.fields(unset) if getattr(section, field.name) != getattr(unset, field.name)
    ]


def _check_pairs(config: Config) -> tuple[Config, type[DPOLearner]]:
    """Does what `check_config` does for a learner that trains on pairs, which samples only for evaluations."""
    name = str(config.algorithm.advantage_estimator)
    unset = AlgorithmConfig(advantage_estimator=name)
    pairs = dataclasses.replace(unset, num_generations=2)  # as this function returns it, and a run folder stores it
    unread = [f"algorithm.{key}" for key in _changed(config.algorithm, unset) if config.algorithm != pairs]
    rollout = RolloutConfig()
    for key in ("engine", "max_staleness", "devices", "routing_replay"):
        unread += [f"rollout.{key}"] if getattr(config.rollout, key) != getattr(rollout, key) else []
    unread += ["training.mini_batch_size"] if config.training.mini_batch_size is not None else []
    unread += ["environment.name"] if kind_of(config) is not None else []
    unread += ["data.curriculum"] if config.data.curriculum else []
    unread += [f"teacher.{key}" for key in _changed(config.teacher, TeacherConfig())]
    unread += [each.key for each in teachers_of(config)]
    unread += [f"critic.{key}" for key in _changed(config.critic, CriticConfig())]
    if name == "reward_model":  # it neither samples nor answers
        unread += ["rewards.functions"] if config.rewards.functions is not None else []
        unread += ["sft.max_steps"] if config.sft.max_steps else []
    if unread:
        raise UserError(f"{unread[0]}: {name} trains on pairs of completions and does not read it. Unset it.")
    learner = PAIR_LEARNER_CLASSES[name]
    learner.check_preference(config.preference)
    _check_shared(config)
    return dataclasses.replace(config, algorithm=pairs), learner


def _check_lora(config: Config) -> None:
    lora = config.lora
    model = config.model
    if lora.rank is not None:
        return
    if unread := [name for name in ("alpha", "targets") if getattr(lora, name) is not None]:
        raise UserError(f"lora.{unread[0]}: it needs lora.rank; set lora.rank, e.g. 16.")
    if model.quantize is not None:
        raise UserError(
            f"model.quantize: weights in {model.quantize} cannot be trained; set lora.rank to train adapters."
        )
    if model.param_dtype != "float32":
        raise UserError(
            "model.param_dtype: small updates of bfloat16 weights are lost to rounding; use float32 (model.dtype may "
            "differ), or train adapters (lora.rank)."
        )


def defaults_read(algorithm: AlgorithmConfig) -> dict[str, Any]:
    """Returns the defaults of unset keys that the estimator and the loss read. Parameters of a user's estimator are
    left out, because their names can equal those of unrelated keys."""
    read = dict(loss_parameters(str(algorithm.policy_loss_fn)))
    if algorithm.advantage_estimator in LEARNERS:
        read |= find_estimator(algorithm.advantage_estimator).parameters()
    keys = [field.name for field in dataclasses.fields(algorithm) if getattr(algorithm, field.name) is None]
    given = algorithm.estimator_params or {}
    return {
        key: read[key] for key in keys if key in read and key not in given and read[key] is not inspect.Parameter.empty
    }


def check_batches(config: Config, mesh: Mesh | None) -> None:
    """Raises UserError if batches or lengths cannot be divided over the mesh."""
    batch_size = config.data.batch_size
    check_batch(mesh, "data.batch_size", batch_size)
    check_lengths(mesh, config.rollout)
    check_batch(mesh, "training.mini_batch_size", config.training.prompts_per_update(batch_size))
    if config.sft.max_steps:
        check_batch(mesh, "sft.batch_size", config.sft.batch_size)


def updates_per_batch(config: Config) -> int:
    """Returns the number of optimizer updates per rollout batch."""
    batch_size = config.data.batch_size
    return -(-batch_size // config.training.prompts_per_update(batch_size)) * config.algorithm.num_iterations
