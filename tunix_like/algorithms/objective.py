"""Resolves and checks the objective of a learner: estimator, policy loss, aggregation and KL.

All errors in an algorithm's configuration are raised here, before any compilation.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import tunix_like.algorithms.advantages  # noqa: F401  (registers the built-in estimators)
from tunix_like.algorithms.distillation import DISTILLATION
from tunix_like.algorithms.losses import (
    Rows,
    TokenInputs,
    Tokens,
    aggregation_weights,
    find_policy_loss,
    kl_estimate,
    loss_parameters,
)
from tunix_like.algorithms.off_policy import check_correction, kept_by_mask, sampler_correction
from tunix_like.algorithms.ppo import PPO
from tunix_like.algorithms.registry import Estimator, find_estimator, float32_rewards, with_schedules
from tunix_like.algorithms.token_baseline import TOKEN_BASELINE
from tunix_like.algorithms.turns import BY_CRITIC, BY_RETURN, NOT_BY_TURN, GroupTurns, turn_terms
from tunix_like.config.schedules import Schedule
from tunix_like.config.schema import AlgorithmConfig, TeacherConfig
from tunix_like.config.sources import ESTIMATOR_KEYS
from tunix_like.errors import UserError
from tunix_like.runtime.user_code import describe_error, is_own, kind_of
from tunix_like.types import ById

if TYPE_CHECKING:
    from tunix_like.types import AnyArray

LOSS_KEYS = (
    *("epsilon", "epsilon_high", "epsilon_c", "dppo_mask_high", "dppo_mask_low", "kl_tau"),
    *("sapo_tau_pos", "sapo_tau_neg", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
)
_NEED = {"max_extra_batches": "dynamic_sampling"}
_NEED |= {key: "sampler_is" for key in ("sampler_is_threshold", "sampler_is_min", "sampler_is_kl")}


@dataclasses.dataclass(frozen=True)
class GroupEstimator:
    """An advantage estimator with its configured parameters, some of which may be schedules.

    Attributes:
      by_turn: whether the advantages of turns, or of a critic that reads their rewards, take the place of its own,
        which are then 0.
    """

    name: str
    params: dict[str, Any]
    by_turn: bool = False

    @property
    def schedules(self) -> dict[str, Schedule]:
        return {key: value for key, value in self.params.items() if isinstance(value, Schedule)}

    def at(self, step: int) -> GroupEstimator:
        """Returns this estimator with the values that the schedules have in a step."""
        return dataclasses.replace(
            self, params=self.params | {key: value(step) for key, value in self.schedules.items()}
        )

    def table(self, step: int, group_size: int) -> Float[np.ndarray, "..."] | None:
        """Returns the array that the estimator reads in a step; None without a schedule."""
        build = self.registered.table
        if build is None or not self.schedules:
            return None
        return np.asarray(build(group_size, **self.at(step).params), np.float32)

    @property
    def registered(self) -> Estimator:
        return find_estimator(self.name)

    def __call__(
        self,
        rewards: Float[Array, "P G"],
        scored: Bool[Array, "P G"],
        lengths: Int[Array, "P G"],
        table: Float[Array, "..."] | None = None,
    ) -> Float[Array, "P G"]:
        if self.by_turn:
            return jnp.zeros_like(rewards)
        # With a table, the values of scheduled parameters are not read: those of any step give the same program.
        params = self.params if table is None else self.at(1).params | {"table": table}
        try:
            out = self.registered.function(rewards, scored=scored, lengths=lengths, **params)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"advantage estimator '{self.name}' raised {describe_error(error)}.") from error
        if getattr(out, "shape", None) != rewards.shape:
            raise UserError(
                f"advantage estimator '{self.name}' returned {kind_of(out)} for rewards of shape "
                f"{list(rewards.shape)} [groups, completions]; it must return one advantage per completion."
            )
        return out


class Scheduled(NamedTuple):
    """The inputs of the compiled step from the schedules of an objective, one entry per estimator.

    Attributes:
      tables: the arrays of `GroupEstimator.table`.
      least_scored: minimum number of scored completions of a group.
    """

    tables: tuple[Float[AnyArray, "..."] | None, ...]
    least_scored: Int[AnyArray, "E"]


@dataclasses.dataclass(frozen=True)
class Objective:
    """The objective of a learner; all defaults are filled in and all values are checked.

    Attributes:
      estimators: the advantage estimator of the run, followed by the estimators of individual data sources.
      sources: maps a data source to the index of its estimator in `estimators`. Other sources use the run's estimator.
      loss_params: the configured parameters of the policy loss.
      max_tokens: `rollout.max_tokens_to_generate`.
      teacher: the settings of the teachers; None without a teacher.
      arrays: the values of the schedules, inside the compiled step (see `bound`).
    """

    config: AlgorithmConfig
    estimators: tuple[GroupEstimator, ...]
    sources: dict[str, int]
    loss_params: dict[str, Any]
    max_tokens: int
    teacher: TeacherConfig | None = None
    arrays: Scheduled | None = None

    @property
    def functions(self) -> tuple[Any, ...]:
        """The functions of the estimators and of the loss, which the training step traces."""
        loss = find_policy_loss(str(self.config.policy_loss_fn))
        return (*(estimator.registered.function for estimator in self.estimators), loss.function)

    @property
    def built_in(self) -> bool:
        """True if the policy loss and all advantage estimators are part of this library, not code of the user."""
        return not any(map(is_own, self.functions))

    def key(self) -> Hashable:
        """Returns a hashable key of this objective. Objectives with equal keys are traced to the same program."""
        estimators = [(estimator.name, sorted(estimator.params.items())) for estimator in self.estimators]
        taught = None if self.teacher is None else (self.teacher.mixture, self.teacher.coef)
        settings = repr((self.config, estimators, sorted(self.loss_params.items()), taught))
        return tuple(map(ById, self.functions)), settings, self.max_tokens  # a function of the user may be unhashable

    def at(self, step: int) -> Objective:
        """Returns this objective with the values that the schedules have in a step; the first step is 1.

        It is for the host. The compiled step gets the values as the input `scheduled(step)`, which it gives to `bound`,
        so another step needs no other program.
        """
        if not any(estimator.schedules for estimator in self.estimators):
            return self
        return dataclasses.replace(self, estimators=tuple(estimator.at(step) for estimator in self.estimators))

    def scheduled(self, step: int) -> Scheduled | None:
        """Returns the arrays that the schedules give to the compiled step; None without a schedule."""
        tables = tuple(estimator.table(step, self.config.num_generations) for estimator in self.estimators)
        return None if all(table is None for table in tables) else Scheduled(tables, self.at(step)._least_scored())

    def bound(self, scheduled: Scheduled) -> Objective:
        """Returns this objective with the arrays that `scheduled` returned, which may be traced."""
        return dataclasses.replace(self, arrays=scheduled)

    def schedule_metrics(self, step: int) -> dict[str, float]:
        """Returns the values of the schedules in a step."""
        prefixes = {0: ""} | {index: f"{source}/" for source, index in self.sources.items()}
        return {
            f"schedule/{prefixes[index]}{key}": float(schedule(step))
            for index, estimator in enumerate(self.estimators)
            for key, schedule in estimator.schedules.items()
        }

    def parameters(self) -> dict[str, Any]:
        """Returns all parameters of the run's advantage estimator and of the policy loss, with their values."""
        estimator = self.estimators[0]
        loss = loss_parameters(str(self.config.policy_loss_fn))
        return {**estimator.registered.parameters(), **loss, **estimator.params, **self.loss_params}

    @property
    def reference_in_loss(self) -> bool:
        return self.config.beta > 0 and not self.config.kl_in_reward

    @property
    def reads_rewards(self) -> bool:
        """False if every estimator is `distillation`, so that completions need no rewards."""
        return any(estimator.name != DISTILLATION for estimator in self.estimators)

    def check_taught(self, source: Any, key: str) -> None:
        """Raises UserError, with `key` first, if rows of a data source (None: unknown) have no signal without a
        teacher."""
        if self.estimators[int(self.estimator_ids([source])[0])].name == DISTILLATION:
            raise UserError(
                f"{key}: the estimator '{DISTILLATION}' has no rewards, so it needs a teacher. Set a model folder, a "
                "hub id, or self with teacher.prompt."
            )

    @property
    def teacher_in_loss(self) -> float | None:
        """`beta` of the Jensen-Shannon divergence from the teacher; None if the loss has no such term."""
        return None if self.teacher is None else self.teacher.mixture

    @property
    def extra_term(self) -> bool:
        """True if the loss has a term without the group's advantage: a KL, an entropy bonus, a term of the policy loss
        or of a teacher."""
        declared = find_policy_loss(str(self.config.policy_loss_fn)).extra_term
        loss_params = loss_parameters(str(self.config.policy_loss_fn)) | self.loss_params
        extra = loss_params[declared] != 0 if isinstance(declared, str) else declared
        return self.reference_in_loss or self.config.entropy_coef > 0 or extra or self.teacher is not None

    @property
    def gives_token_advantages(self) -> bool:
        """True if tokens of a completion have advantages of their own: `StepInputs.token_advantages`."""
        own = any(estimator.name in (TOKEN_BASELINE, PPO) for estimator in self.estimators)
        teacher_adds = self.teacher is not None and self.teacher_in_loss is None
        return own or teacher_adds or self.config.credit == "turn"

    @property
    def skips_zero_advantages(self) -> bool:
        """True if advantages should be computed before the update, to skip completions with advantage 0."""
        by_turn = self.config.credit == "turn"
        return not (self.extra_term or by_turn) and any(estimator.registered.sparse for estimator in self.estimators)

    @property
    def needs_rollout_logprobs(self) -> bool:
        loss = find_policy_loss(str(self.config.policy_loss_fn))
        keys = self.config.sampler_is, self.config.off_policy_mask_threshold
        return keys != (None, None) or loss.behaviour == "rollout"

    def estimator_ids(self, sources: Sequence[Any]) -> Int[np.ndarray, "P"]:
        """Returns the index in `estimators` of each group's estimator, given the prompts' `sources` (None: unknown)."""
        return np.array([self.sources.get(source, 0) if isinstance(source, str) else 0 for source in sources], np.int32)

    def turn_terms(self, estimator: GroupEstimator, turns: GroupTurns) -> list[Float[np.ndarray, " T"]]:
        """Returns the advantages of the turns of a group beside those of its estimator (`turns.turn_terms`); for a
        critic, which estimates the values of states itself, the rewards of the turns."""
        config = self.config
        if estimator.name == BY_CRITIC:
            return [np.array([np.nan if reward is None else reward for reward in row]) for row in turns.rewards]
        gamma = 1.0 if config.gamma is None else config.gamma
        coef = 1.0 if config.turn_coef is None else config.turn_coef
        params = estimator.params if estimator.by_turn else None
        return turn_terms(turns, estimator.name, gamma, config.turn_baseline or "fixed_index", coef, params)

    def float32_rewards(
        self, rewards: Float[np.ndarray, "P G"], scored: Bool[np.ndarray, "P G"], ids: Int[np.ndarray, "P"]
    ) -> Float[np.ndarray, "P G"]:
        """Returns the rewards as the estimators get them in float32 (see `registry.float32_rewards`)."""
        free = np.array([estimator.registered.offset_free(estimator.params) for estimator in self.estimators])
        return float32_rewards(rewards, scored, free[ids])

    def kept_groups(self, scored: Bool[np.ndarray, "P G"], ids: Int[np.ndarray, "P"]) -> Bool[np.ndarray, "P"]:
        """Returns which groups have enough scored completions for their estimator. Other groups are not trained on."""
        return scored.sum(axis=-1) >= self._least_scored()[ids]

    def _least_scored(self) -> Int[AnyArray, "E"]:
        if self.arrays is not None:
            return self.arrays.least_scored
        return np.array([e.registered.least_scored(e.params) for e in self.estimators], np.int32)

    def live_rows(
        self,
        rewards: Float[np.ndarray, "P G"],
        scored: Bool[np.ndarray, "P G"],
        ids: Int[np.ndarray, "P"],
        advantages: Float[np.ndarray, "P G"] | None = None,
        credited: Bool[np.ndarray, "P G"] | None = None,
    ) -> Bool[np.ndarray, "P G"]:
        """Returns which completions can have a gradient. The training step skips all other completions.

        Args:
          advantages: if given, completions with advantage 0 are also excluded, except those of `otb`.
          credited: completions that have advantages of turns; None without `credit=turn`.
        """
        rows = scored & self.kept_groups(scored, ids)[:, None]
        if self.extra_term:
            return rows
        varied = np.where(scored, rewards, -np.inf).max(axis=1) > np.where(scored, rewards, np.inf).min(axis=1)
        zero = np.array([e.registered.zero_when_constant(e.params) for e in self.estimators])
        signal = (varied | ~zero[ids])[:, None]
        rows = rows & (signal if credited is None else signal | credited)
        if advantages is None:
            return rows
        later = np.array([e.name == TOKEN_BASELINE for e in self.estimators])  # their advantages come per token
        return rows & ((advantages != 0) | later[ids][:, None])

    def advantages(
        self,
        rewards: Float[Array, "P G"],
        scored: Bool[Array, "P G"],
        lengths: Int[Array, "P G"],
        ids: Int[Array, "P"],
    ) -> Float[Array, "P G"]:
        """Computes the advantages of each group with its estimator. Completions that are unscored, or in a group with
        too few scored completions, get 0."""
        tables = (None,) * len(self.estimators) if self.arrays is None else self.arrays.tables
        if len(self.estimators) == 1:
            out = self.estimators[0](rewards, scored, lengths, tables[0])
        else:
            out = jnp.zeros_like(rewards)
            for index, (estimator, table) in enumerate(zip(self.estimators, tables, strict=True)):
                selected = scored & (ids == index)[:, None]
                out = jnp.where(selected, estimator(rewards, selected, lengths, table), out)
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
        """Computes, for each completion of one optimizer update, the weight of its tokens in the loss. Completions that
        are unscored, not `trained`, or in a group with too few scored completions get 0 and do not affect the rest."""
        kept = scored.sum(axis=-1) >= jnp.asarray(self._least_scored())[ids]
        counted = scored & trained & (kept & in_update)[:, None]
        return aggregation_weights(str(self.config.loss_agg_mode), lengths, counted, self.max_tokens)

    def token_loss(self, tokens: TokenInputs, advantages: Rows) -> tuple[Tokens, dict[str, Tokens]]:
        """Computes the loss per token (0 where masked) and per-token metrics."""
        config = self.config
        mask = tokens.mask
        if self.needs_rollout_logprobs and tokens.rollout_logprobs is None:
            raise UserError("the loss needs the sampler's log-probabilities, and these rollouts have none.")
        loss_fn = find_policy_loss(str(config.policy_loss_fn))
        old = tokens.rollout_logprobs if loss_fn.behaviour == "rollout" else tokens.old_logprobs
        loss, metrics = self._policy_loss(tokens.logprobs, old, advantages, mask)
        correction = sampler_correction(config)
        rollout = tokens.rollout_logprobs
        if correction is not None and rollout is not None:
            ratios = correction.ratios(tokens.old_logprobs, rollout, mask)
            weights = correction.weights(ratios)
            loss = weights * loss
            metrics = metrics | correction.metrics(ratios, weights, mask)
        if config.off_policy_mask_threshold is not None and rollout is not None:
            kept = kept_by_mask(config.off_policy_mask_threshold, tokens.logprobs, rollout, advantages, mask)
            loss = jnp.where(kept, loss, 0.0)
            metrics = metrics | {"off_policy_mask/dropped_frac": 1.0 - kept}
        if self.reference_in_loss:
            assert tokens.ref_logprobs is not None
            kl = kl_estimate(str(config.kl_loss_mode), tokens.logprobs, tokens.ref_logprobs, mask)
            metrics = metrics | {"kl": kl}
            if correction is not None and rollout is not None and config.sampler_is_kl:
                kl = correction.weights(correction.ratios(tokens.logprobs, rollout, mask)) * kl
            loss = loss + config.beta * kl
        if self.teacher_in_loss is not None:
            divergence = tokens.teacher_divergence
            known = tokens.teacher_logprobs
            assert self.teacher is not None and divergence is not None and known is not None
            loss = loss + self.teacher.coef * divergence
            metrics = metrics | {"teacher/divergence": divergence, "teacher/logprob": known}
        if config.entropy_coef > 0:
            loss = loss - config.entropy_coef * tokens.entropy
        return jnp.where(mask, loss, 0.0), metrics

    def _policy_loss(self, *inputs: Any) -> tuple[Tokens, dict[str, Tokens]]:
        """Calls the configured loss function and checks its loss and metrics per token.

        Raises:
          UserError: the function raises, does not return a pair `(loss, metrics)`, or returns a value that does not
            have the shape of the tokens.
        """
        name = str(self.config.policy_loss_fn)
        shape = inputs[0].shape
        try:
            result = find_policy_loss(name).function(*inputs, **self.loss_params)
        except Exception as error:
            raise UserError(f"policy loss '{name}' raised {describe_error(error)}.") from error
        form = f"one number per token, {list(shape)}. Return (loss, metrics), metrics a dict of such arrays or {{}}."
        loss, metrics = result if isinstance(result, tuple | list) and len(result) == 2 else (result, None)
        if not isinstance(metrics, Mapping):
            raise UserError(f"policy loss '{name}' returned {kind_of(result)}; the loss must be {form}")
        for what, value in {"loss": loss, **metrics}.items():
            if getattr(value, "shape", None) != shape:
                raise UserError(f"policy loss '{name}': {what} is {kind_of(value)}; it must be {form}")
        return loss, metrics


def trace_user_functions(objective: Objective, groups: int, group_size: int) -> None:
    """Traces the user's own estimators and policy loss with abstract shapes, to find errors before the first step.

    Raises:
      UserError: a function raises, or its result has a wrong form or shape.
    """
    shape = (groups, group_size)
    loss = find_policy_loss(str(objective.config.policy_loss_fn))

    def array(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    for estimator in objective.estimators:
        if is_own(estimator.registered.function):
            jax.eval_shape(estimator.at(1), array(shape), array(shape, jnp.bool_), array(shape, jnp.int32))
    if is_own(loss.function):
        tokens = (*shape, objective.max_tokens)
        advantages = tokens if objective.gives_token_advantages else (*shape, 1)
        jax.eval_shape(
            objective._policy_loss, array(tokens), array(tokens), array(advantages), array(tokens, jnp.bool_)
        )


def resolve(config: AlgorithmConfig, defaults: type[AlgorithmConfig]) -> AlgorithmConfig:
    """Fills the unset keys of `config` with the defaults of a learner's config class."""
    plain = defaults()
    values = {
        field.name: getattr(plain, field.name) if getattr(config, field.name) is None else getattr(config, field.name)
        for field in dataclasses.fields(AlgorithmConfig)
    }
    if values["kl_loss_mode"] is None:  # in the reward, only k1 gives a KL's gradient; in the loss, k1 gives none
        values["kl_loss_mode"] = "kl" if values["kl_in_reward"] else "low_var_kl"
    return dataclasses.replace(plain, **values)


def build_objective(
    config: AlgorithmConfig,
    max_tokens: int,
    updates_per_batch: int,
    source_estimators: Mapping[str, Mapping[str, Any]] | None = None,
    teacher: TeacherConfig | None = None,
) -> Objective:
    """Builds the objective of `config`, a result of `resolve`. Checks its keys against the estimators and the loss.

    Args:
      max_tokens: `rollout.max_tokens_to_generate`.
      updates_per_batch: optimizer updates per rollout batch.
      source_estimators: maps a data source to its estimator, `{advantage_estimator: NAME, PARAMETER: VALUE, ...}`.
      teacher: the settings of the teachers; None if there are none (see `resolve_teacher`).

    Raises:
      UserError: a key is set but not used, a required key is unset, a value is out of range, or keys conflict.
    """
    params = {key: value for key in ESTIMATOR_KEYS if (value := getattr(config, key)) is not None}
    by_source = source_estimators or {}
    estimators = (
        _group_estimator(str(config.advantage_estimator), params, config),
        *(_source_estimator(source, fields, config) for source, fields in by_source.items()),
    )
    sources = {source: index for index, source in enumerate(by_source, start=1)}
    if config.credit == "turn":
        estimators = tuple(_by_turn(estimator, config) for estimator in estimators)
        if config.turn_coef is not None and all(estimator.by_turn for estimator in estimators):
            raise UserError(f"algorithm.turn_coef: '{estimators[0].name}' does not read it; unset it.")
    objective = Objective(config, estimators, sources, _loss_parameters(config), max_tokens, teacher)
    _check_combinations(objective, updates_per_batch)
    return objective


def _group_estimator(name: str, params: dict[str, Any], config: AlgorithmConfig) -> GroupEstimator:
    extra = config.estimator_params or {}
    declared = find_estimator(name).parameters()
    for key in extra:
        if key not in declared:
            reads = ", ".join(sorted(declared)) or "none"
            raise UserError(
                f"algorithm.estimator_params.{key}: the estimator '{name}' has no such keyword-only parameter; "
                f"it has: {reads}."
            )
        if key in params:
            raise UserError(f"algorithm.{key} and algorithm.estimator_params.{key} are both set; unset one of them.")
    return GroupEstimator(name, with_schedules(name, params | extra, config.num_generations))


def _by_turn(estimator: GroupEstimator, config: AlgorithmConfig) -> GroupEstimator:
    if estimator.name in NOT_BY_TURN:
        raise UserError(
            f"algorithm.credit: '{estimator.name}' has no advantages of turns; use another, such as rloo or maxrl."
        )
    by_turn = estimator.name in (*BY_RETURN, BY_CRITIC)
    if config.binarize and by_turn:
        raise UserError(
            "algorithm.binarize: it replaces a sum of rewards, and algorithm.credit=turn reads each; unset it."
        )
    if estimator.name == BY_CRITIC and config.gamma is not None:
        raise UserError(f"algorithm.gamma: '{BY_CRITIC}' does not read it; set critic.gamma, which is per token.")
    if estimator.name == BY_CRITIC and config.turn_baseline is not None:
        raise UserError(f"algorithm.turn_baseline: the baseline of '{BY_CRITIC}' is its critic; unset it.")
    return dataclasses.replace(estimator, by_turn=by_turn)


def _source_estimator(source: str, given: Mapping[str, Any], config: AlgorithmConfig) -> GroupEstimator:
    fields = dict(given)
    name = fields.pop("advantage_estimator", str(config.advantage_estimator))
    try:
        find_estimator(name)
    except UserError as error:
        raise UserError(f"data source '{source}': {error}") from error
    return GroupEstimator(name, with_schedules(name, fields, config.num_generations, f"data source '{source}'"))


def _loss_parameters(config: AlgorithmConfig) -> dict[str, Any]:
    name = str(config.policy_loss_fn)
    declared = loss_parameters(name)
    params = {key: value for key in LOSS_KEYS if (value := getattr(config, key)) is not None}
    for key in config.loss_params or {}:
        if key in params:
            raise UserError(f"algorithm.{key} and algorithm.loss_params.{key} are both set; unset one of them.")
        if key in LOSS_KEYS and not is_own(find_policy_loss(name).function):
            raise UserError(f"algorithm.loss_params.{key}: '{name}' is built in; set algorithm.{key}.")
        if key not in declared:
            reads = ", ".join(sorted(declared)) or "none"
            raise UserError(
                f"algorithm.loss_params.{key}: the loss '{name}' has no such keyword-only parameter; it has: {reads}."
            )
    params |= config.loss_params or {}
    for key in params:
        if key not in declared:
            raise UserError(f"algorithm.{key}: the loss '{name}' does not read it. Unset it.")
    for key, default in declared.items():
        if default is inspect.Parameter.empty and key not in params:
            raise UserError(f"algorithm.{key}: the loss '{name}' requires it. Set it.")
    return params


def _check_teacher(objective: Objective) -> None:
    config = objective.config
    for source in (None, *objective.sources) if objective.teacher is None else ():
        objective.check_taught(source, "teacher.path")
    if objective.reads_rewards:
        return
    unread = {
        "dynamic_sampling": config.dynamic_sampling,
        "binarize": config.binarize,
        "overlong=penalty": config.overlong == "penalty",
        "kl_in_reward": config.kl_in_reward and config.beta > 0,
    }
    for key in (key for key, used in unread.items() if used):
        raise UserError(f"algorithm.{key}: the estimator '{DISTILLATION}' does not read rewards. Unset it.")


def _check_ppo(objective: Objective) -> None:
    names = [estimator.name for estimator in objective.estimators]
    if PPO not in names:
        return
    if other := [(source, names[index]) for source, index in objective.sources.items() if names[index] != names[0]]:
        source, name = other[0]
        raise UserError(
            f"data source '{source}': advantage_estimator={name} cannot be combined with {names[0]}: with {PPO}, all "
            "sources have the advantages of the critic. Use one estimator."
        )
    if objective.config.dynamic_sampling:
        raise UserError(
            f"algorithm.dynamic_sampling: the estimator '{PPO}' learns from groups of equal rewards too. Unset it."
        )


def _check_combinations(objective: Objective, updates_per_batch: int) -> None:
    config = objective.config
    for estimator in objective.estimators:
        least = estimator.registered.least_scored(estimator.at(1).params)
        if config.num_generations < least:
            raise UserError(
                f"algorithm.num_generations: got {config.num_generations}; the estimator '{estimator.name}' compares "
                f"the completions of a prompt, so it must be at least {least}."
            )
    _check_teacher(objective)
    _check_ppo(objective)
    if config.policy_loss_fn == "reinforce" and updates_per_batch > 1:
        raise UserError(
            f"algorithm.policy_loss_fn: 'reinforce' allows one update per rollout batch, but "
            f"num_iterations and mini_batch_size give {updates_per_batch}. Use ppo_clip."
        )
    for key, needed in _NEED.items():
        if getattr(config, key) not in (None, False) and not getattr(config, needed):
            raise UserError(f"algorithm.{key} needs algorithm.{needed}. Set algorithm.{needed} or unset {key}.")
    check_correction(config, find_policy_loss(str(config.policy_loss_fn)).behaviour)
    if config.overlong == "penalty" and config.overlong_buffer is None:
        raise UserError("algorithm.overlong_buffer: algorithm.overlong=penalty requires it. Set a number of tokens.")
    if config.overlong != "penalty" and (config.overlong_buffer or config.overlong_penalty):
        raise UserError("algorithm.overlong_buffer, overlong_penalty: they need algorithm.overlong=penalty. Set it.")
    if (config.overlong_buffer or 0) > objective.max_tokens:
        raise UserError(
            f"algorithm.overlong_buffer: got {config.overlong_buffer}; it must be at most "
            f"rollout.max_tokens_to_generate ({objective.max_tokens})."
        )
    in_reward = bool(config.kl_in_reward and config.beta > 0)
    by_function = [estimator.name for estimator in objective.estimators if estimator.registered.by_function]
    changes = {"binarize": config.binarize, "overlong=penalty": config.overlong == "penalty", "kl_in_reward": in_reward}
    for setting in (setting for setting, on in changes.items() if on and by_function):
        raise UserError(
            f"algorithm.{setting}: it changes the total reward, but '{by_function[0]}' normalises the reward of each "
            "function. Unset it, or use another estimator."
        )
    if in_reward:  # subtracted after algorithm.binarize
        _refuse_negative(objective, "algorithm.kl_in_reward", "algorithm.kl_in_reward=false")
    if config.overlong == "penalty":
        check_accepts_negative(objective, "algorithm.overlong=penalty", "algorithm.binarize=true")


def check_accepts_negative(objective: Objective, cause: str, cure: str) -> None:
    """Checks that all estimators accept negative rewards, which the setting `cause` produces. Does nothing if rewards
    are binarized.

    Raises:
      UserError: an estimator rejects negative rewards. The message names the setting, the estimator and the remedy
        (`cure`).
    """
    if not objective.config.binarize:
        _refuse_negative(objective, cause, cure)


def _refuse_negative(objective: Objective, cause: str, cure: str) -> None:
    sections = {index: f"data source '{source}'" for source, index in objective.sources.items()}
    for index, estimator in enumerate(objective.estimators):
        kind = estimator.registered.takes(estimator.at(1).params)
        if kind != "any":
            section = sections.get(index, "algorithm")
            order = f"{section}.truncation_order, or " if estimator.name == "maxrl" else ""
            without = " without truncation_order" if order else ""
            owner = f" of {section}" if index else ""
            raise UserError(
                f"{cause}: it makes rewards negative, but {estimator.name}{without}{owner} accepts {kind} rewards "
                f"only. Set {order}{cure}."
            )
