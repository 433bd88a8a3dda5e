"""Describes a run for the screen: learner, loss, batch sizes, model and estimated memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tunix_like.algorithms.objective import (
    ESTIMATOR_KEYS,
    LOSS_KEYS,
)
from tunix_like.config.schema import (
    AlgorithmConfig,
)
from tunix_like.errors import UserError
from tunix_like.models.decoder import Decoder
from tunix_like.rewards.pool import PooledFunction
from tunix_like.rollout.collection import EXTRA_BATCHES
from tunix_like.rollout.rollouts import WeightedReward
from tunix_like.rollout.sampler import slot_shape
from tunix_like.runs.build import Parts, updates_per_batch
from tunix_like.training.memory import adapter_count, parameter_count
from tunix_like.training.sizes import Foreseen, foresee


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
