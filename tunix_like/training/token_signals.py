"""Defines the signals per token of a rollout batch: advantages of single tokens beside those of the estimator, and what
the loss reads of a teacher or a critic.

`signal_sources` lists the sources of a run. Each source is called once per rollout batch, before its first update.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from tunix_like.algorithms.distillation import teacher_advantages
from tunix_like.algorithms.losses import kl_estimate
from tunix_like.algorithms.objective import Objective
from tunix_like.algorithms.ppo import Estimates, at_last_action, estimate
from tunix_like.algorithms.token_baseline import TOKEN_BASELINE, token_baseline_advantages
from tunix_like.config.schema import AlgorithmConfig
from tunix_like.models.sharding import place_replicated
from tunix_like.step.train_step import TeacherInputs
from tunix_like.training.critic import Critic
from tunix_like.training.teacher import Teacher, Teachers
from tunix_like.training.trainer import Trainer
from tunix_like.types import GroupBatch, Problem


@dataclasses.dataclass(frozen=True)
class SignalInputs:
    """A rollout batch before its first update, as the sources of signals see it.

    Attributes:
      batch: with the rewards that the estimators get.
      live: mask of the completions that the model must process; the others get no signal.
      ref_logprobs: the reference model's log-probabilities; None without one.
      turn_credit: what `collection.credit_of_turns` gives: the advantages of tokens, or for a critic their rewards;
        None without `credit: turn`.
    """

    trainer: Trainer
    problems: Sequence[Problem]
    batch: GroupBatch
    live: Bool[np.ndarray, "P G"]
    ref_logprobs: Float[np.ndarray, "P G T"] | None
    turn_credit: Float[np.ndarray, "P G T"] | None

    @property
    def mask(self) -> Bool[np.ndarray, "P G T"]:
        """Mask of the sampled tokens of the completions `live`."""
        return self.batch.sampled & self.live[..., None]

    @functools.cached_property
    def policy_logprobs(self) -> Float[np.ndarray, "P G T"]:
        """The policy's log-probabilities, computed when a source or the update first asks for them."""
        return self.trainer.token_logprobs(self.trainer.graphdef, self.trainer.params, self.batch, self.live)


class TokenSignals(NamedTuple):
    """What sources give.

    Attributes:
      logged, unlogged: advantages that are added to those of the estimator. The advantages that a step logs and writes
        contain the mean of `logged` over the tokens of each completion.
      teacher_loss: the teacher, if its divergence is a term of the loss.
      estimates: what a critic learns from.
      metrics: of the batch.
    """

    logged: Float[np.ndarray, "P G T"] | None = None
    unlogged: Float[np.ndarray, "P G T"] | None = None
    teacher_loss: TeacherInputs | None = None
    estimates: Estimates | None = None
    metrics: Mapping[str, float] = MappingProxyType({})

    @property
    def advantages(self) -> Float[np.ndarray, "P G T"] | None:
        return _sum(self.logged, self.unlogged)

    def means(self, mask: Bool[np.ndarray, "P G T"]) -> Float[np.ndarray, "P G"] | float:
        """Returns for each completion the mean of `logged` over its tokens `mask`."""
        if self.logged is None:
            return 0.0
        return (self.logged * mask).sum(-1) / np.maximum(mask.sum(-1), 1)


SignalSource = Callable[[SignalInputs], TokenSignals]


def signal_sources(objective: Objective, teachers: Teachers | None, critic: Critic | None) -> list[SignalSource]:
    """Returns the sources of signals per token of a run. `Objective.gives_token_advantages` says whether one of them
    gives advantages, for programs that are compiled without a run."""
    sources: list[SignalSource] = []
    if teachers is not None:
        if teachers.spec is None:
            sources.append(functools.partial(teacher_signals, teachers, objective))
        else:
            assert teachers.default is not None
            sources.append(functools.partial(teacher_loss_signals, teachers.default))
    # A critic reads the rewards of turns itself, and `build_objective` refuses `otb` with turns or a critic.
    if critic is not None:
        sources.append(functools.partial(critic_signals, critic, objective.config))
    elif objective.config.credit == "turn":
        sources.append(turn_signals)
    elif any(estimator.name == TOKEN_BASELINE for estimator in objective.estimators):
        sources.append(functools.partial(token_baseline_signals, objective))
    return sources


def all_signals(sources: Iterable[SignalSource], inputs: SignalInputs) -> TokenSignals:
    """Returns the signals of all sources: the sum of their advantages, the teacher and the estimates of the source that
    has them, and the metrics of all."""
    total = TokenSignals()
    for source in sources:
        signals = source(inputs)
        total = TokenSignals(
            logged=_sum(total.logged, signals.logged),
            unlogged=_sum(total.unlogged, signals.unlogged),
            teacher_loss=signals.teacher_loss if total.teacher_loss is None else total.teacher_loss,
            estimates=signals.estimates if total.estimates is None else total.estimates,
            metrics={**total.metrics, **signals.metrics},
        )
    return total


def teacher_signals(teachers: Teachers, objective: Objective, inputs: SignalInputs) -> TokenSignals:
    """The advantages of tokens that teachers give (reverse KL), 0 in rows without a teacher."""
    batch = inputs.batch
    scores = np.zeros_like(inputs.policy_logprobs)
    mask = np.zeros_like(batch.sampled)
    for teacher, taught in teachers.of_batch(inputs.problems, objective):
        rows = inputs.live & taught[:, None]
        seen = teacher.batch(batch.routed_freely, inputs.problems, taught)
        logprobs = teacher.logprobs(inputs.trainer, seen, rows)
        logprobs = np.where(batch.completion_tokens < teacher.config.vocab_size, logprobs, -np.inf)
        scores = np.where(rows[..., None], logprobs, scores)
        mask = mask | (batch.sampled & rows[..., None])
    policy = jnp.asarray(inputs.policy_logprobs)
    values = np.asarray(teacher_advantages(jnp.asarray(scores), policy, jnp.asarray(mask)))
    metrics = {}
    if mask.any():
        metrics["teacher/divergence"] = float(-values[mask].mean())
        metrics["teacher/logprob"] = float(scores[mask].mean())
    return TokenSignals(unlogged=teachers.settings.coef * values, metrics=metrics)


def teacher_loss_signals(teacher: Teacher, inputs: SignalInputs) -> TokenSignals:
    """The teacher whose divergence is a term of the loss, with its prompts."""
    seen = teacher.batch(inputs.batch.routed_freely, inputs.problems, np.ones(len(inputs.problems), bool))
    prompts = place_replicated((seen.prompt_tokens, seen.prompt_lengths), inputs.trainer.mesh)
    return TokenSignals(teacher_loss=TeacherInputs(teacher.params, *prompts))


def critic_signals(critic: Critic, algo: AlgorithmConfig, inputs: SignalInputs) -> TokenSignals:
    """What the critic gives. The reward of a completion comes at its last action if there are no rewards of turns. With
    `kl_in_reward`, `beta` times the KL to the reference is subtracted from the reward of each token."""
    batch = inputs.batch
    mask = inputs.mask
    rewards = inputs.turn_credit
    if rewards is None:
        rewards = at_last_action(batch.rewards, batch.sampled)
    metrics = dict[str, float]()
    if algo.kl_in_reward and inputs.ref_logprobs is not None:
        kl = token_kl(algo, inputs.policy_logprobs, inputs.ref_logprobs, mask)
        rewards = rewards - algo.beta * kl
        metrics = {"kl": float(kl.sum() / max(mask.sum(), 1))}
    # With a scalar head, these are the values of the states before the tokens.
    values = inputs.trainer.token_logprobs(critic.graphdef, critic.params, batch.routed_freely, inputs.live)
    estimates = estimate(rewards, values, mask, critic.settings.gamma, critic.settings.gae_lambda)
    return TokenSignals(logged=estimates.advantages, estimates=estimates, metrics=metrics | estimates.metrics(mask))


def turn_signals(inputs: SignalInputs) -> TokenSignals:
    """The advantages of turns (`credit: turn`)."""
    assert inputs.turn_credit is not None
    return TokenSignals(logged=np.where(inputs.mask, inputs.turn_credit, 0.0))


def token_baseline_signals(objective: Objective, inputs: SignalInputs) -> TokenSignals:
    """The advantages of the completions whose estimator is `otb`, 0 in others."""
    batch = inputs.batch
    trainer = inputs.trainer
    names = np.array([estimator.name for estimator in objective.estimators])[batch.group_estimators]
    if not (names == TOKEN_BASELINE).any():  # a batch with them then has the same compiled step
        return TokenSignals(logged=np.zeros(batch.completion_tokens.shape, np.float32))
    # like the other estimators, also with completions that are scored but not trained
    counted = batch.scored & (inputs.live.any(-1) & (names == TOKEN_BASELINE))[:, None]
    norms = trainer.run_per_token(trainer.programs.score_norms, trainer.graphdef, trainer.params, batch, counted)
    advantages = token_baseline_advantages(batch.rewards, counted, norms, batch.sampled)
    return TokenSignals(logged=advantages.astype(np.float32))


def token_kl(
    algo: AlgorithmConfig,
    policy: Float[np.ndarray, "P G T"],
    reference: Float[np.ndarray, "P G T"],
    mask: Bool[np.ndarray, "P G T"],
) -> Float[np.ndarray, "P G T"]:
    """Returns the KL estimate of each token `mask` from log-probabilities, 0 elsewhere."""
    estimates = kl_estimate(str(algo.kl_loss_mode), jnp.asarray(policy), jnp.asarray(reference), jnp.asarray(mask))
    return np.where(mask, np.asarray(estimates), 0.0)


def _sum(one: Any, other: Any) -> Any:
    """Returns the sum of two arrays, of which each can be missing."""
    if one is None or other is None:
        return other if one is None else one
    return one + other
