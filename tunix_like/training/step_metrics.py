"""Computes advantage and speed metrics of a training step; `rollout/rollouts.py` computes rollout metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from tunix_like.algorithms.objective import Objective
from tunix_like.algorithms.pass_rates import count_groups, sum_advantages
from tunix_like.models.config import DecoderConfig
from tunix_like.models.counts import forward_operations
from tunix_like.rollout.collection import sampling_seconds
from tunix_like.rollout.rollouts import Rollout, pass_rate_bins, repeat_columns
from tunix_like.runtime.profile import Compilations, peak_flops
from tunix_like.types import GroupBatch


def expert_metrics(batch: GroupBatch, model: DecoderConfig) -> dict[str, float]:
    """Returns the tokens of the expert with the most, relative to the mean of all experts: mean and maximum over the
    layers. Empty if the experts of the completions are not recorded."""
    if batch.experts is None or model.experts is None:
        return {}
    inside = np.arange(batch.experts.shape[2]) < batch.completion_lengths[..., None]
    chosen = batch.experts[inside]  # [tokens, layers, k]
    counts = [np.bincount(layer.ravel(), minlength=model.experts.number) for layer in np.moveaxis(chosen, 1, 0)]
    loads = [float(count.max() / count.mean()) for count in counts if count.any()]
    return {"experts/load_mean": float(np.mean(loads)), "experts/load_max": max(loads)} if loads else {}


def advantage_metrics(
    rollout: Rollout,
    batch: GroupBatch,
    advantages: Float[np.ndarray, "P G"],
    objective: Objective,
    success_threshold: float,
) -> dict[str, Any]:
    """Computes statistics of the advantages, sums of advantages by pass rate, and two fractions of groups.

    The first fraction counts dropped groups: groups with fewer scored completions than their estimator needs. The
    second fraction counts groups that are not dropped and whose advantages are all 0.
    """
    bins = pass_rate_bins(rollout, success_threshold)
    kept = objective.kept_groups(batch.scored, batch.group_estimators)
    return {
        "advantage/abs_mean": float(np.abs(advantages).mean()),
        "advantage/max": float(advantages.max()),
        "advantage/min": float(advantages.min()),
        "advantage/nonzero_frac": float((advantages != 0).mean()),
        "pass_rate/trained": count_groups(bins),
        "pass_rate/advantage": sum_advantages(bins, advantages),
        "groups/dropped_frac": float((~kept).mean()),
        "groups/zero_signal_frac": float((kept & (advantages == 0).all(axis=1)).mean()),
    }


def speed_metrics(
    config: DecoderConfig,
    batch: GroupBatch,
    known: dict[str, Any],
    compilations: Compilations,
) -> dict[str, float]:
    """Computes throughput, compilations and MFU of a step.

    Throughput is in completion tokens per second. Compilations are counted from the end of the previous step, including
    compilations for the evaluation and the checkpoint after that step. The MFU (`*_mfu`) is the used fraction of the
    device's peak FLOP/s. The MFU is computed only if this peak is known. The MFU counts each prompt once per group.
    With dynamic sampling, the MFU of the rollout counts only the groups that are trained on.

    Args:
      known: the metrics of the step that are already computed, including times in seconds.
    """
    update = max(known["time/update"], 1e-9)
    programs, compiling = compilations.take()
    metrics = {
        "perf/training_tokens_per_sec": int(batch.completion_lengths.sum()) / update,
        "perf/programs_compiled": float(programs),
        "perf/compile_sec": compiling,
    }
    if (peak := peak_flops()) is not None:
        forward = forward_operations(config, batch.prompt_lengths, batch.completion_lengths)
        rollout = sampling_seconds(known, "sampler_time" if "sampler_time/rollout" in known else "time")
        done = {"rollout": forward / rollout, "update": known["perf/update_operations"] / update}
        metrics |= {f"perf/{name}_mfu": rate / peak for name, rate in done.items()}
    return metrics


def user_metrics(
    functions: Sequence[Callable[..., Any]], rollout: Rollout, advantages: Float[np.ndarray, "P G"]
) -> dict[str, float]:
    """Computes the metrics of the user's functions (`metric_fns` of a learner)."""
    out: dict[str, float] = {}
    for function in functions:
        prompts, columns = repeat_columns(rollout.problems, advantages.shape[1])
        metrics = function(prompts, rollout.texts, rollout.scores.total, advantages.reshape(-1), **columns)
        out |= {name: float(aggregate(value)) for name, (value, aggregate) in metrics.items()}
    return out
