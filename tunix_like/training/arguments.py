"""Checks the arguments of a learner, and derives from them what a checkpoint depends on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tunix_like.algorithms.objective import resolve
from tunix_like.config.schema import AlgorithmConfig, EvalConfig, OptimizerConfig, RLTrainingConfig, RolloutConfig
from tunix_like.errors import UserError, check_type
from tunix_like.training.forward import ForwardOptions

if TYPE_CHECKING:
    from tunix_like.training.learner import Learner

_TYPES: dict[str, tuple[Any, str]] = {
    "eval_config": (EvalConfig, "give a tunix_like.EvalConfig(...)"),
    "metric_fns": (Sequence, "give a list of functions"),
    "success_threshold": ((int, float, np.number), "give a number"),
    "source_estimators": (Mapping, "give {data source: {'advantage_estimator': ...}}"),
}
"""Arguments of a learner: what each must be, and what to give in place of anything else."""


def check_arguments(**given: Any) -> None:
    """Raises UserError naming the first of these arguments that is of another type; those whose default is None may be
    None."""
    for name, value in given.items():
        if value is not None or name in ("metric_fns", "success_threshold"):
            check_type(name, value, *_TYPES[name])
    for i, function in enumerate(given["metric_fns"]):
        check_type(f"metric_fns[{i}]", function, Callable, _TYPES["metric_fns"][1])  # type: ignore[arg-type]


def forward_options(rollout: RolloutConfig, training: RLTrainingConfig, algorithm: AlgorithmConfig) -> ForwardOptions:
    """Returns how a learner computes log-probabilities."""
    entropy = algorithm.entropy_coef > 0
    return ForwardOptions(rollout.temperature, training.logprob_chunk_size, training.remat, entropy_gradient=entropy)


def identity_of(learner: Learner) -> dict[str, Any]:
    """What a run's next step depends on, besides its state, its data and its code."""
    rollout = dataclasses.asdict(learner.rollout_config)
    del rollout["max_concurrent_rows"]
    optimizer = learner.training.actor_optimizer or OptimizerConfig()
    adapters = learner.model.adapters
    return {
        "algorithm": dataclasses.asdict(learner.algo),
        "rollout": rollout,
        "optimizer": dataclasses.asdict(optimizer) if isinstance(optimizer, OptimizerConfig) else None,
        "rewards": {name: weight for name, _, weight in learner.rewards},
        "success_threshold": learner.success_threshold,
        "source_estimators": learner.source_estimators,
        "adapters": adapters and str(adapters),
        "quantized": learner.model.quantized,
        "seed": learner.training.seed,
    }


def check_rows(rows: Any) -> None:
    """Raises UserError where held-out rows cannot be counted and read by their number."""
    if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")) or isinstance(rows, str | Mapping):
        raise UserError(f"eval_ds: got {type(rows).__name__}; give a list of rows, each a dict with a 'prompt'.")


def source_settings(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns `source_estimators` as plain dicts. Raises UserError naming the source whose entry is something else."""
    for source, entry in given.items():
        if not isinstance(entry, Mapping):
            raise UserError(
                f"source_estimators['{source}']: expected {{'advantage_estimator': ..., <its parameters>}}, got "
                f"{entry!r}."
            )
    return {source: dict(entry) for source, entry in given.items()}


def resolve_algorithm(learner: type[Learner], config: AlgorithmConfig | None) -> AlgorithmConfig:
    """Fills unset keys with the learner's defaults. Raises UserError for the config of another learner."""
    own = learner.config_class
    config = own() if config is None else config
    if type(config) not in (AlgorithmConfig, own):
        raise UserError(
            f"{learner.__name__} takes a {own.__name__}, got a {type(config).__name__}; "
            "each learner has its own config, which brings its loss and aggregation."
        )
    named = own().advantage_estimator
    if named is not None and config.advantage_estimator not in (None, named):
        raise UserError(
            f"{learner.__name__} is the learner of '{named}', the config names '{config.advantage_estimator}'; "
            "take that estimator's learner, which brings its own loss and aggregation."
        )
    return resolve(config, own)
