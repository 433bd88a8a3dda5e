"""What one learner optimises: its estimator, loss, aggregation and KL, resolved from a config and checked once.

Everything that can be wrong about an algorithm is found here, before any compile. This module knows no model and no
data.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import tunix_like.algorithms.advantages  # noqa: F401  (registers the built-in estimators)
from tunix_like.algorithms.losses import (
    Rows,
    TokenInputs,
    Tokens,
    aggregation_weights,
    find_policy_loss,
    kl_estimate,
    loss_parameters,
    sampler_correction,
)
from tunix_like.algorithms.registry import Estimator, check_parameters, find_estimator
from tunix_like.config.schema import AlgorithmConfig
from tunix_like.errors import UserError
from tunix_like.runtime.user_code import is_own, kind_of, said_of

ESTIMATOR_KEYS = ("k", "truncation_order", "ddof")
LOSS_KEYS = ("epsilon", "epsilon_high", "epsilon_c", "dppo_mask_high", "dppo_mask_low", "kl_tau")
_NEED = {"sampler_is_threshold": "sampler_is", "max_extra_batches": "dynamic_sampling"}
_NEED |= {"overlong_buffer": "overlong", "overlong_penalty": "overlong"}


@dataclasses.dataclass(frozen=True)
class GroupEstimator:
    """An estimator with the parameters that were set for it."""

    name: str
    params: dict[str, Any]

    @property
    def registered(self) -> Estimator:
        return find_estimator(self.name)

    def __call__(
        self, rewards: Float[Array, "P G"], scored: Bool[Array, "P G"], lengths: Int[Array, "P G"]
    ) -> Float[Array, "P G"]:
        try:
            out = self.registered.function(rewards, scored=scored, lengths=lengths, **self.params)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"advantage estimator '{self.name}' raised {said_of(error)}.") from error
        if getattr(out, "shape", None) != rewards.shape:
            raise UserError(
                f"advantage estimator '{self.name}' returned {kind_of(out)} for rewards of shape "
                f"{list(rewards.shape)} [groups, completions]; it must return one advantage per completion."
            )
        return out


@dataclasses.dataclass(frozen=True)
class Objective:
    """The resolved objective.

    Attributes:
      estimators: the run's own, then those that data sources name.
      sources: data source to its place in `estimators`; a source that is not there has the run's own.
      loss_params: only what the loss reads.
    """

    config: AlgorithmConfig
    estimators: tuple[GroupEstimator, ...]
    sources: dict[str, int]
    loss_params: dict[str, Any]
    max_tokens: int

    @property
    def functions(self) -> tuple[Any, ...]:
        """The estimators' functions and the loss function, which the training step traces."""
        loss = find_policy_loss(str(self.config.policy_loss_fn))
        return (*(each.registered.function for each in self.estimators), loss.function)

    @property
    def built_in(self) -> bool:
        """True when no function comes from the user."""
        return all(function.__module__.startswith("tunix_like.") for function in self.functions)

    def key(self) -> Hashable:
        """Equal for objectives that are traced to the same program."""
        params = [sorted(each.params.items()) for each in self.estimators]
        return self.functions, repr((self.config, params, sorted(self.loss_params.items()))), self.max_tokens

    def parameters(self) -> dict[str, Any]:
        """Every parameter that the run's own estimator and the loss read, with the value it has."""
        own = self.estimators[0]
        loss = loss_parameters(str(self.config.policy_loss_fn))
        return {**own.registered.parameters(), **loss, **own.params, **self.loss_params}

    @property
    def reference_in_loss(self) -> bool:
        return self.config.beta > 0 and not self.config.kl_in_reward

    @property
    def extra_term(self) -> bool:
        """True when the loss has a term without the advantage: then completions of advantage 0 have a gradient too."""
        weigher = find_policy_loss(str(self.config.policy_loss_fn)).extra_term
        loss_params = loss_parameters(str(self.config.policy_loss_fn)) | self.loss_params
        extra = loss_params[weigher] != 0 if isinstance(weigher, str) else weigher
        return self.reference_in_loss or self.config.entropy_coef > 0 or extra

    @property
    def looks_for_zeros(self) -> bool:
        """True when it is worth asking for the advantages before the update, to leave zeros out."""
        return not self.extra_term and any(each.registered.sparse for each in self.estimators)

    @property
    def needs_rollout_logprobs(self) -> bool:
        loss = find_policy_loss(str(self.config.policy_loss_fn))
        return self.config.sampler_is is not None or loss.behaviour == "rollout"

    def estimator_ids(self, sources: Sequence[Any]) -> Int[np.ndarray, "P"]:
        """The place in `estimators` of each group, given the data source of its prompt (None: none named)."""
        return np.array([self.sources.get(source, 0) if isinstance(source, str) else 0 for source in sources], np.int32)

    def kept_groups(self, scored: Bool[np.ndarray, "P G"], ids: Int[np.ndarray, "P"]) -> Bool[np.ndarray, "P"]:
        """Groups with enough scored completions for their estimator; the others are dropped."""
        return scored.sum(axis=-1) >= self._least_scored()[ids]

    def _least_scored(self) -> Int[np.ndarray, "E"]:
        return np.array([each.registered.least_scored(each.params) for each in self.estimators], np.int32)

    def live_rows(
        self,
        rewards: Float[np.ndarray, "P G"],
        scored: Bool[np.ndarray, "P G"],
        ids: Int[np.ndarray, "P"],
        advantages: Float[np.ndarray, "P G"] | None = None,
    ) -> Bool[np.ndarray, "P G"]:
        """Completions that can change the gradient; only these need to go through the model.

        Args:
          advantages: where known, zeros among them are left out too.
        """
        rows = scored & self.kept_groups(scored, ids)[:, None]
        if self.extra_term:
            return rows
        varied = np.where(scored, rewards, -np.inf).max(axis=1) > np.where(scored, rewards, np.inf).min(axis=1)
        silent = np.array([each.registered.zero_when_constant(each.params) for each in self.estimators])
        rows = rows & (varied | ~silent[ids])[:, None]
        return rows if advantages is None else rows & (advantages != 0)

    def advantages(
        self,
        rewards: Float[Array, "P G"],
        scored: Bool[Array, "P G"],
        lengths: Int[Array, "P G"],
        ids: Int[Array, "P"],
    ) -> Float[Array, "P G"]:
        """Each group's own estimator's advantages, 0 where unscored or dropped; traced inside the training step."""
        if len(self.estimators) == 1:
            out = self.estimators[0](rewards, scored, lengths)
        else:
            out = jnp.zeros_like(rewards)
            for place, estimator in enumerate(self.estimators):
                own = scored & (ids == place)[:, None]
                out = jnp.where(own, estimator(rewards, own, lengths), out)
        kept = scored.sum(axis=-1) >= jnp.asarray(self._least_scored())[ids]
        return jnp.where(scored & kept[:, None], out, 0.0).astype(jnp.float32)

    def weights(
        self,
        scored: Bool[Array, "P G"],
        trained: Bool[Array, "P G"],
        lengths: Int[Array, "P G"],
        in_update: Bool[Array, "P"],
        ids: Int[Array, "P"],
    ) -> Float[Array, "P G"]:
        """Token weight of each completion over one optimizer update. Unscored completions, those not `trained`, and
        groups with too few scored ones weigh nothing and are not counted."""
        kept = scored.sum(axis=-1) >= jnp.asarray(self._least_scored())[ids]
        counted = scored & trained & (kept & in_update)[:, None]
        return aggregation_weights(str(self.config.loss_agg_mode), lengths, counted, self.max_tokens)

    def token_loss(self, tokens: TokenInputs, advantages: Rows) -> tuple[Tokens, dict[str, Tokens]]:
        """Loss per token, 0 where masked, and per-token metrics."""
        config, mask = self.config, tokens.mask
        if self.needs_rollout_logprobs and tokens.rollout_logprobs is None:
            raise UserError("these rollouts carry no log-probabilities of the sampler, which the loss needs.")
        loss_fn = find_policy_loss(str(config.policy_loss_fn))
        old = tokens.rollout_logprobs if loss_fn.behaviour == "rollout" else tokens.old_logprobs
        loss, metrics = self._policy_loss(tokens.logprobs, old, advantages, mask)
        if config.sampler_is is not None:
            assert tokens.rollout_logprobs is not None
            bound = 2.0 if config.sampler_is_threshold is None else config.sampler_is_threshold
            weight = sampler_correction(config.sampler_is, tokens.old_logprobs, tokens.rollout_logprobs, mask, bound)
            loss, metrics = weight * loss, metrics | {"sampler_is/mean": weight}
        if self.reference_in_loss:
            assert tokens.ref_logprobs is not None
            kl = kl_estimate(str(config.kl_loss_mode), tokens.logprobs, tokens.ref_logprobs, mask)
            loss, metrics = loss + config.beta * kl, metrics | {"kl": kl}
        if config.entropy_coef > 0:
            loss = loss - config.entropy_coef * tokens.entropy
        return jnp.where(mask, loss, 0.0), metrics

    def _policy_loss(self, *inputs: Any) -> tuple[Tokens, dict[str, Tokens]]:
        """Loss and metrics per token of the loss function that the config names.

        Raises:
          UserError: the function raises, returns no pair `(loss, metrics)`, or one of its values is not of the shape of
            the tokens.
        """
        name, shape = str(self.config.policy_loss_fn), inputs[0].shape
        try:
            result = find_policy_loss(name).function(*inputs, **self.loss_params)
        except Exception as error:
            raise UserError(f"policy loss '{name}' raised {said_of(error)}.") from error
        form = f"one number per token, {list(shape)}. Return (loss, metrics), metrics a dict of such arrays or {{}}."
        loss, metrics = result if isinstance(result, tuple | list) and len(result) == 2 else (result, None)
        if not isinstance(metrics, Mapping):
            raise UserError(f"policy loss '{name}' returned {kind_of(result)}; the loss must be {form}")
        for what, value in {"loss": loss, **metrics}.items():
            if getattr(value, "shape", None) != shape:
                raise UserError(f"policy loss '{name}': {what} is {kind_of(value)}; it must be {form}")
        return loss, metrics


def trace_own(objective: Objective, groups: int, group_size: int) -> None:
    """Traces estimators and a loss of one's own on shapes alone, as the training step will.

    Raises:
      UserError: one that raises, or whose result has a wrong form or shape.
    """
    places, loss = (groups, group_size), find_policy_loss(str(objective.config.policy_loss_fn))

    def array(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    for estimator in objective.estimators:
        if is_own(estimator.registered.function):
            jax.eval_shape(estimator, array(places), array(places, jnp.bool_), array(places, jnp.int32))
    if is_own(loss.function):
        tokens = (*places, objective.max_tokens)
        inputs = array(tokens), array(tokens), array((*places, 1)), array(tokens, jnp.bool_)
        jax.eval_shape(objective._policy_loss, *inputs)


def resolve(config: AlgorithmConfig, defaults: type[AlgorithmConfig]) -> AlgorithmConfig:
    """Fills unset keys from a learner's config class."""
    plain = defaults()
    values = {
        field.name: getattr(plain, field.name) if getattr(config, field.name) is None else getattr(config, field.name)
        for field in dataclasses.fields(AlgorithmConfig)
    }
    if values["kl_loss_mode"] is None:  # in the reward only k1 has the gradient of a KL, in the loss k1 has none
        values["kl_loss_mode"] = "kl" if values["kl_in_reward"] else "low_var_kl"
    return dataclasses.replace(plain, **values)


def build_objective(
    config: AlgorithmConfig,
    max_tokens: int,
    updates_per_batch: int,
    source_estimators: Mapping[str, Mapping[str, Any]] | None = None,
) -> Objective:
    """Checks a resolved config against what its estimators and its loss read.

    Args:
      max_tokens: `rollout.max_tokens_to_generate`.
      updates_per_batch: optimizer updates per rollout batch.
      source_estimators: data source to `{advantage_estimator: ..., <its parameters>}`, for groups of that source.

    Raises:
      UserError: a key set that nothing reads, a required one unset, one out of range, or a combination that is wrong.
    """
    params = {key: value for key in ESTIMATOR_KEYS if (value := getattr(config, key)) is not None}
    named = source_estimators or {}
    estimators = (
        _group_estimator(str(config.advantage_estimator), params, config),
        *(_source_estimator(source, given, config) for source, given in named.items()),
    )
    sources = {source: place for place, source in enumerate(named, start=1)}
    objective = Objective(config, estimators, sources, _loss_parameters(config), max_tokens)
    _check_combinations(objective, updates_per_batch)
    return objective


def _group_estimator(name: str, params: dict[str, Any], config: AlgorithmConfig) -> GroupEstimator:
    free = config.estimator_params or {}
    declared = find_estimator(name).parameters()
    for key in free:
        if key not in declared:
            reads = ", ".join(sorted(declared)) or "none"
            raise UserError(
                f"algorithm.estimator_params.{key}: the estimator '{name}' has no such keyword-only parameter; "
                f"it has: {reads}."
            )
        if key in params:
            raise UserError(f"algorithm.{key} and algorithm.estimator_params.{key} are both set; drop one.")
    return GroupEstimator(name, check_parameters(name, params | free, config.num_generations))


def _source_estimator(source: str, given: Mapping[str, Any], config: AlgorithmConfig) -> GroupEstimator:
    fields = dict(given)
    name = fields.pop("advantage_estimator", str(config.advantage_estimator))
    try:
        find_estimator(name)
    except UserError as error:
        raise UserError(f"data source '{source}': {error}") from error
    return GroupEstimator(name, check_parameters(name, fields, config.num_generations, f"data source '{source}'"))


def _loss_parameters(config: AlgorithmConfig) -> dict[str, Any]:
    name = str(config.policy_loss_fn)
    declared = loss_parameters(name)
    params = {key: value for key in LOSS_KEYS if (value := getattr(config, key)) is not None}
    for key in config.loss_params or {}:
        if key not in declared or key in params:
            reads = ", ".join(sorted(declared)) or "none"
            raise UserError(
                f"algorithm.loss_params.{key}: the loss '{name}' has no such keyword-only parameter that is not set "
                f"already; it has: {reads}."
            )
    params |= config.loss_params or {}
    for key in params:
        if key not in declared:
            raise UserError(f"algorithm.{key}: the loss '{name}' does not read it. Unset it.")
    for key, default in declared.items():
        if default is inspect.Parameter.empty and key not in params:
            raise UserError(f"algorithm.{key}: the loss '{name}' needs it.")
    return params


def _check_combinations(objective: Objective, updates_per_batch: int) -> None:
    config = objective.config
    if config.policy_loss_fn == "reinforce" and updates_per_batch > 1:
        raise UserError(
            f"algorithm.policy_loss_fn: 'reinforce' has no ratio and allows one update per rollout batch, but "
            f"num_iterations and mini_batch_size make {updates_per_batch}. Use ppo_clip."
        )
    for key, needed in _NEED.items():
        if getattr(config, key) is not None and not getattr(config, needed):
            raise UserError(f"algorithm.{key} is read only with algorithm.{needed}; set that, or unset this.")
    if config.sampler_is is not None and find_policy_loss(str(config.policy_loss_fn)).behaviour == "rollout":
        raise UserError(
            f"algorithm.sampler_is: '{config.policy_loss_fn}' takes its ratio to the sampler already. Unset it."
        )
    if config.overlong == "penalty" and config.overlong_buffer is None:
        raise UserError("algorithm.overlong_buffer: overlong=penalty needs it: tokens over which the penalty grows.")
    if config.overlong != "penalty" and (config.overlong_buffer or config.overlong_penalty):
        raise UserError("algorithm.overlong_buffer, overlong_penalty: read only with algorithm.overlong=penalty.")
    if (config.overlong_buffer or 0) > objective.max_tokens:
        raise UserError(
            f"algorithm.overlong_buffer: got {config.overlong_buffer}; it is at most rollout.max_tokens_to_generate "
            f"({objective.max_tokens})."
        )
    in_reward = bool(config.kl_in_reward and config.beta > 0)
    if in_reward and config.binarize:
        raise UserError(
            "algorithm.kl_in_reward: with algorithm.binarize the threshold would swallow the KL. "
            "Set algorithm.kl_in_reward=false."
        )
    if in_reward:
        check_takes_negative(objective, "algorithm.kl_in_reward", "algorithm.kl_in_reward=false")
    if config.overlong == "penalty":
        check_takes_negative(objective, "algorithm.overlong=penalty", "algorithm.binarize=true")


def check_takes_negative(objective: Objective, cause: str, cure: str) -> None:
    """Refuses a setting that makes negative rewards where an estimator does not take them (and they are not binarized).

    Raises:
      UserError: naming the setting, the estimator and what to do.
    """
    if objective.config.binarize:
        return
    homes = {place: f"data source '{source}'" for source, place in objective.sources.items()}
    for place, each in enumerate(objective.estimators):
        kind = each.registered.takes(each.params)
        if kind != "any":
            home = homes.get(place, "algorithm")
            order = f"{home}.truncation_order, or " if each.name == "maxrl" else ""
            without = " without truncation_order" if order else ""
            whose = f" of {home}" if place else ""
            raise UserError(
                f"{cause}: it makes negative rewards, and {each.name}{without}{whose} takes {kind} ones only. "
                f"Set {order}{cure}."
            )
