"""Checks the arguments of a learner, and collects the settings that a run must share with its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tunix_like.algorithms.objective import resolve
from tunix_like.config.keys import fixed_settings
from tunix_like.config.schema import (
    AlgorithmConfig,
    EnvironmentConfig,
    EvalConfig,
    RLTrainingConfig,
    RolloutConfig,
)
from tunix_like.errors import UserError, check_type
from tunix_like.rollout.engines.registry import MEMBERS
from tunix_like.step.forward import ForwardOptions
from tunix_like.types import Engine

_TYPES: dict[str, tuple[Any, str]] = {
    "eval_config": (EvalConfig, "give a tunix_like.EvalConfig(...)"),
    "metric_fns": (Sequence, "give a list of functions"),
    "engine": (Engine, MEMBERS),
    "success_threshold": ((int, float, np.number), "give a number"),
    "source_estimators": (Mapping, "give {data source: {'advantage_estimator': ...}}"),
    "source_teachers": (Mapping, "give {data source: model}"),
}
"""Maps the name of an argument of a learner to its type and to the advice in the error message."""


def check_arguments(**arguments: Any) -> None:
    """Raises UserError for the first argument of a `Learner` that has a wrong type."""
    for name, value in arguments.items():
        if value is not None or name in ("metric_fns", "success_threshold"):
            check_type(name, value, *_TYPES[name])
    for i, function in enumerate(arguments["metric_fns"]):
        check_type(f"metric_fns[{i}]", function, Callable, _TYPES["metric_fns"][1])  # type: ignore[arg-type]


def likelihood_options(training: RLTrainingConfig, backend: str | None = None) -> ForwardOptions:
    """Returns options for computing log-probabilities at temperature 1 on a JAX backend (None: the current one). The
    weights of layers are not stacked on the CPU, where each slice of stacked weights would be a copy."""
    stacked = (backend or jax.default_backend()) != "cpu"
    return ForwardOptions(1.0, training.logprob_chunk_size, training.remat, stacked=stacked)


def forward_options(
    rollout: RolloutConfig, training: RLTrainingConfig, algorithm: AlgorithmConfig, backend: str | None = None
) -> ForwardOptions:
    """Returns the options of a learner's log-probability computation."""
    options = likelihood_options(training, backend)
    return options._replace(temperature=rollout.temperature, entropy_gradient=algorithm.entropy_coef > 0)


def rollout_identity(config: RolloutConfig) -> dict[str, Any]:
    """Returns the settings of rollouts that a run must share with its checkpoint. A learner gets its engine and the
    devices of its mesh as arguments."""
    fields = fixed_settings(config)
    del fields["engine"], fields["devices"]
    return fields


def environment_identity(config: EnvironmentConfig) -> dict[str, Any]:
    """Returns the environment settings on which the tokens of a trajectory depend."""
    fields = fixed_settings(config)
    del fields["mode"]
    if config.history == "sampled":  # checkpoints of earlier versions do not have this field
        del fields["history"]
    return fields


def check_rows(rows: Any) -> None:
    if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")) or isinstance(rows, str | Mapping):
        raise UserError(f"eval_ds: got {type(rows).__name__}; give a list of rows, each a dict with a 'prompt'.")


def source_settings(source_estimators: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    for source, entry in source_estimators.items():
        if not isinstance(entry, Mapping):
            raise UserError(
                f"source_estimators['{source}']: expected {{'advantage_estimator': ..., <its parameters>}}, got "
                f"{entry!r}."
            )
    return {source: dict(entry) for source, entry in source_estimators.items()}


def resolve_algorithm(
    learner: str, config_class: type[AlgorithmConfig], config: AlgorithmConfig | None
) -> AlgorithmConfig:
    """Returns `config` (None: an empty one) with the defaults of the class named `learner`. Raises UserError for the
    config of another learner."""
    config = config_class() if config is None else config
    if type(config) not in (AlgorithmConfig, config_class):
        raise UserError(
            f"{learner} takes a {config_class.__name__}, got a {type(config).__name__}; "
            f"pass a {config_class.__name__}, which has the learner's default loss and aggregation."
        )
    estimator = config_class().advantage_estimator
    if estimator is not None and config.advantage_estimator not in (None, estimator):
        raise UserError(
            f"{learner} is the learner of '{estimator}', but the config has "
            f"advantage_estimator='{config.advantage_estimator}'; use the learner of that estimator."
        )
    return resolve(config, config_class)
