"""Describes a run for the screen: learner, loss, batch sizes, model and estimated memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tunix_like.algorithms.objective import LOSS_KEYS
from tunix_like.algorithms.off_policy import sampler_correction
from tunix_like.algorithms.ppo import PPO
from tunix_like.config.schedules import Schedule
from tunix_like.config.schema import SELF, AlgorithmConfig, Config, CriticConfig, RolloutConfig
from tunix_like.config.sources import ESTIMATOR_KEYS, NamedTeacher, teachers_of
from tunix_like.errors import UserError
from tunix_like.models.counts import adapter_count, parameter_count
from tunix_like.models.decoder import Decoder
from tunix_like.planning.sizes import MemoryEstimate, estimate_memory
from tunix_like.rewards.pool import PooledFunction
from tunix_like.rewards.services import WaitingFunction
from tunix_like.rewards.turns import TurnReward, inner
from tunix_like.rollout.collection import EXTRA_BATCHES
from tunix_like.rollout.engines.registry import find_engine
from tunix_like.rollout.rollouts import WeightedReward
from tunix_like.runs.build import Parts
from tunix_like.runs.checks import updates_per_batch


def describe(parts: Parts) -> list[tuple[str, str]]:
    """Returns labels and texts that describe a run for the screen."""
    config = parts.config
    algorithm = parts.config.algorithm
    prompts = config.data.batch_size
    size = algorithm.num_generations
    updates = updates_per_batch(config)
    place = "reward" if algorithm.kl_in_reward else "loss"
    kl = f"{algorithm.kl_loss_mode} in the {place}, beta {algorithm.beta:g}" if algorithm.beta else "none (beta 0)"
    lengths = config.rollout
    attention = "plain, or blocked for large calls" if parts.model.attention == "auto" else parts.model.attention
    kind = f"{jnp.dtype(parts.model.dtype).name} on {jax.default_backend()}, attention {attention}"
    learning = [("loss", _describe_preference(config)), ("batch", f"{prompts} pairs per step, one optimizer update")]
    if not config.trains_pairs:
        total = f"{prompts} prompts x {size} completions = {prompts * size} per step"
        learning = [
            ("loss", f"{algorithm.policy_loss_fn}, aggregation {algorithm.loss_agg_mode}, KL {kl}"),
            *[("teacher", _describe_teacher(teacher)) for teacher in teachers_of(config)],
            *([("critic", _describe_critic(config.critic))] if algorithm.advantage_estimator == PPO else []),
            ("options", _describe_options(algorithm)),
            ("batch", f"{total}, {updates} optimizer update(s)"),
        ]
    return [
        ("learner", f"{parts.learner.__name__} ({algorithm.advantage_estimator})"),
        *_describe_sources(parts),
        *learning,
        *([("rewards", ", ".join(map(_describe_reward, parts.rewards)))] if parts.rewards else []),
        *([] if parts.environments is None else [("environment", _describe_environment(parts))]),
        ("model", f"{describe_model(parts.model)}, {kind}"),
        ("devices", describe_devices(parts.mesh)),
        ("engine", _describe_engine(config.rollout)),
        *([("weights", parts.weights)] if parts.weights else []),
        ("lengths", f"prompt <= {lengths.max_prompt_length}, completion <= {lengths.max_tokens_to_generate} tokens"),
        *_memory_estimate(parts).lines(),
    ]


def _memory_estimate(parts: Parts) -> MemoryEstimate:
    """Estimates the memory of the run. Raises if a single completion does not fit and the model has weights."""
    return estimate_memory(parts.config, parts.model, parts.mesh, refuse=not parts.weights)


def check_memory(parts: Parts) -> bool:
    """Checks that the run fits into the memory of this machine's devices. Returns whether that memory is known."""
    estimate = _memory_estimate(parts)
    if problems := estimate.problems():
        adapters = parts.model.adapters
        if adapters is not None and adapter_count(parts.model.config, adapters) > parameter_count(parts.model.config):
            problems = [*problems, f"Lower lora.rank ({adapters.rank}): the adapters are larger than the model."]
        raise UserError(
            f"dry run: {estimate.peak_line()}. {' '.join(problems).rstrip('.')}. To check other devices: "
            "tunix-like doctor --config CONFIG --devices v5e-8."
        )
    return estimate.device.known


def _describe_teacher(named: NamedTeacher) -> str:
    teacher = named.settings
    sources = f", for {', '.join(named.sources)}" if named.sources else ""
    beta = "" if teacher.mixture is None else f" (beta {teacher.mixture:g})"
    weights = f" with its {teacher.weights or 'current'} weights" if teacher.path == SELF else ""
    quantized = "" if teacher.quantize is None else f" in {teacher.quantize}"
    prompt = "" if teacher.prompt is None else f", prompt {teacher.prompt!r}"
    return f"{teacher.path}{weights}{quantized}, {teacher.divergence}{beta}, coef {teacher.coef:g}{prompt}{sources}"


def _describe_critic(critic: CriticConfig) -> str:
    clip = "none" if critic.value_clip is None else f"{critic.value_clip:g}"
    alone = f", alone for {critic.warmup_steps} steps" if critic.warmup_steps else ""
    start = "from the policy" if critic.path is None else critic.path
    numbers = f"gamma {critic.gamma:g}, gae_lambda {critic.gae_lambda:g}, value_clip {clip}"
    return f"{start}, {numbers}, learning rate {critic.learning_rate:g}{alone}"


def _describe_environment(parts: Parts) -> str:
    section = parts.config.environment
    tools = f"tools {', '.join(section.tools or ())}" if section.tools else ""
    name = section.name or tools or f"{parts.config.data.name} {parts.config.data.path}"
    where = [where] if (where := getattr(parts.environments, "where", "")) else []
    return ", ".join([name, f"up to {section.max_turns} turns", section.mode, *where])


def _describe_engine(rollout: RolloutConfig) -> str:
    where = "in this process" if find_engine(rollout.engine).make is None else f"on {', '.join(rollout.urls or ())}"
    return rollout.engine if where == "on " else f"{rollout.engine}, {where}"


def _describe_reward(reward: WeightedReward) -> str:
    name, given, weight = reward
    function = inner(given)
    per = f" per {'potential' if given.potential else 'turn'}" if isinstance(given, TurnReward) else ""
    place = f" (in {function.pool.workers} workers)" if isinstance(function, PooledFunction) else ""
    place = f" (up to {function.limits.concurrency} calls at once)" if isinstance(function, WaitingFunction) else place
    return f"{weight:g} x {name}{per}{place}"


def describe_devices(mesh: Mesh | None) -> str:
    if mesh is None:
        return "one device"
    return ", ".join(f"{name} {size}" for name, size in mesh.shape.items())


def describe_model(model: Decoder) -> str:
    """Describes the number of parameters of a model and of its adapters."""
    text = f"{parameter_count(model.config) / 1e6:.2f} M parameters"
    if model.adapters is None:
        return text
    count = adapter_count(model.config, model.adapters)
    held = model.quantized or model.param_dtype.name
    return f"{text} frozen in {held}, {count / 1e6:.2f} M trained ({model.adapters})"


def _describe_options(algorithm: AlgorithmConfig) -> str:
    texts = [
        f"{key} {_describe_value(value)}"
        for key in (*ESTIMATOR_KEYS, *LOSS_KEYS)
        if (value := getattr(algorithm, key)) is not None
    ]
    given = (algorithm.estimator_params or {}) | (algorithm.loss_params or {})
    texts += [f"{key} {value}" for key, value in given.items()]
    if algorithm.binarize:
        texts.append("rewards binarized")
    if algorithm.overlong == "mask":
        texts.append("truncated completions masked")
    if algorithm.overlong == "penalty":
        most = 1.0 if algorithm.overlong_penalty is None else algorithm.overlong_penalty
        texts.append(f"penalty up to {most:g} over the last {algorithm.overlong_buffer} tokens")
    if (correction := sampler_correction(algorithm)) is not None:
        kl = ", KL included" if algorithm.sampler_is_kl else ""
        texts.append(f"sampler correction {correction.mode} from {correction.lower:g} to {correction.upper:g}{kl}")
    if algorithm.entropy_coef:
        texts.append(f"entropy bonus {algorithm.entropy_coef:g}")
    if algorithm.dynamic_sampling:
        texts.append(f"dynamic sampling, up to {algorithm.max_extra_batches or EXTRA_BATCHES} extra batches per step")
    return ", ".join(texts) or "none"


def _describe_value(value: Any) -> str:
    if isinstance(value, dict):
        return str(Schedule(**value, whole=False))
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _describe_preference(config: Config) -> str:
    section = config.preference
    if config.algorithm.advantage_estimator == "reward_model":
        centred = f", centred by {section.center_rewards:g}" if section.center_rewards else ""
        return f"Bradley-Terry{centred}"
    smoothing = f", label smoothing {section.label_smoothing:g}" if section.label_smoothing else ""
    reference = "the initial weights" if config.has_reference else "none"
    return f"{section.loss}, beta {section.beta:g}{smoothing}, reference {reference}"


def _describe_sources(parts: Parts) -> list[tuple[str, str]]:
    by_source = parts.source_estimators
    out = []
    for label, part in parts.source.parts.items():
        given = dict(by_source.get(label, {}))
        name = given.pop("advantage_estimator", parts.config.algorithm.advantage_estimator)
        estimator = ", ".join([str(name), *(f"{key} {_describe_value(value)}" for key, value in given.items())])
        out.append(f"{label} {len(part.train) / len(parts.source.train):.0%} ({estimator})")
    return [("sources", "; ".join(out))] if out else []
