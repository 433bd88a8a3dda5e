"""The advantage estimators that the sources of a mix set."""

from __future__ import annotations

from typing import Any

from tunix_like.algorithms.registry import with_schedules
from tunix_like.config.schema import AlgorithmConfig, DataConfig
from tunix_like.config.sources import entries
from tunix_like.errors import UserError


def source_estimators(config: DataConfig, algorithm: AlgorithmConfig) -> dict[str, dict[str, Any]]:
    """Returns the advantage estimators that the entries of `data.sources` set, by the label of the entry: the name
    under `advantage_estimator`, and the parameters. An entry that sets only parameters uses the estimator of the
    run."""
    estimators = {}
    for entry in entries(config):
        if not entry.estimator:
            continue
        params = dict(entry.estimator)
        name = str(params.pop("advantage_estimator", algorithm.advantage_estimator))
        try:
            with_schedules(name, params, algorithm.num_generations, key=entry.place)
        except UserError as error:
            entry_key = f"{entry.place}.advantage_estimator"
            raise UserError(str(error).replace("algorithm.advantage_estimator", entry_key, 1)) from error
        estimators[entry.label] = {"advantage_estimator": name, **params}
    return estimators
