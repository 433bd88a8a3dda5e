"""A config becomes an objective or a clear error; the objective hands its functions what they read, masks, and counts
only what can teach."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from tunix_like.config import AlgorithmConfig
from tunix_like.errors import UserError
from tunix_like.rl import advantages
from tunix_like.rl import objective as objectives
from tunix_like.rl.advantages import (
    ADVANTAGE_ESTIMATORS,
    ZERO_WHEN_CONSTANT,
    compute_advantages,
    register_advantage_estimator,
)
from tunix_like.rl.losses import aggregation_weights, kl_estimate, ppo_clip
from tunix_like.rl.objective import build_objective, resolve

PLAIN = {
    "advantage_estimator": "rloo",
    "policy_loss_fn": "ppo_clip",
    "loss_agg_mode": "token-mean",
    "kl_loss_mode": "low_var_kl",
    "kl_in_reward": False,
    "num_generations": 4,
}
REWARDS = jnp.asarray([[1.0, 0.0, 0.0, 0.5], [1.0, 1.0, 0.0, 3.0]])
SCORED = jnp.asarray([[True, True, True, True], [True, False, True, False]])
LENGTHS = jnp.asarray([[3, 1, 2, 5], [4, 4, 1, 2]])
EVERYONE = jnp.ones(2, bool)


def make(updates: int = 1, **changes):
    return build_objective(AlgorithmConfig(**PLAIN | changes), 7, updates)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Defaults(AlgorithmConfig):
    advantage_estimator: str | None = "maxrl"
    loss_agg_mode: str | None = "token-mean"
    kl_in_reward: bool | None = True


@pytest.fixture
def registry(monkeypatch):
    """Copies of the registry, so that what a test registers does not outlive it."""
    monkeypatch.setattr(advantages, "ADVANTAGE_ESTIMATORS", dict(ADVANTAGE_ESTIMATORS))
    monkeypatch.setattr(advantages, "ZERO_WHEN_CONSTANT", zero := set(ZERO_WHEN_CONSTANT))
    monkeypatch.setattr(objectives, "ZERO_WHEN_CONSTANT", zero)


def test_unset_keys_take_the_learners_default():
    given = AlgorithmConfig(loss_agg_mode="seq-mean-token-sum", kl_in_reward=False, num_generations=3, beta=0.5)
    found = resolve(given, Defaults)
    assert type(found) is Defaults
    assert found == Defaults(loss_agg_mode="seq-mean-token-sum", kl_in_reward=False, num_generations=3, beta=0.5)
    assert found.advantage_estimator == "maxrl" and found.epsilon is None


def test_each_function_gets_only_what_it_reads():
    assert make().estimator_params == {} and make().loss_params == {}
    objective = make(advantage_estimator="maxpo", k=2, epsilon=0.1, epsilon_c=3.0)
    assert objective.estimator_params == {"k": 2}
    assert objective.loss_params == {"epsilon": 0.1, "epsilon_c": 3.0}
    assert make(advantage_estimator="grpo", ddof=0).estimator_params == {"ddof": 0}
    clip = {"epsilon": 0.1, "epsilon_high": None, "epsilon_c": 3.0}
    assert objective.parameters() == {"k": 2} | clip, "what is read, with the value it has"
    assert make(advantage_estimator="grpo", policy_loss_fn="reinforce").parameters() == {"ddof": 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantage_estimator": "rlo"}, "unknown estimator 'rlo'. Did you mean 'rloo'"),
        ({"advantage_estimator": "maxpo"}, "algorithm.k: the estimator 'maxpo' needs it"),
        ({"advantage_estimator": "maxpo", "k": 4}, "algorithm.k: got 4.*1 <= k <= 3"),
        ({"k": 2}, "algorithm.k: the estimator 'rloo' does not read it"),
        ({"ddof": 0}, "algorithm.ddof: the estimator 'rloo' does not read it"),
        ({"advantage_estimator": "maxrl", "truncation_order": 4}, "algorithm.truncation_order: got 4"),
        ({"policy_loss_fn": "ppo_clp"}, "unknown loss 'ppo_clp'. Did you mean 'ppo_clip'"),
        ({"policy_loss_fn": "reinforce", "epsilon": 0.1}, "algorithm.epsilon: the loss 'reinforce' does not read it"),
        ({"policy_loss_fn": "reinforce", "updates": 2}, "'reinforce' has no ratio.*make 2"),
        ({"advantage_estimator": "maxrl", "beta": 0.1, "kl_in_reward": True}, "algorithm.kl_in_reward: it makes negat"),
    ],
    ids=str,
)
def test_what_is_wrong_is_told_before_any_compile(changes, message):
    with pytest.raises(UserError, match=message):
        make(**changes)


def test_what_is_near_an_error_and_right():
    make(policy_loss_fn="reinforce")
    make(updates=2)
    make(advantage_estimator="maxrl", beta=0.1, kl_in_reward=True, truncation_order=2)
    make(advantage_estimator="maxrl", beta=0.0, kl_in_reward=True)


def test_the_reference_is_in_the_loss_only_when_asked():
    assert make(beta=0.1).reference_in_loss
    assert not make(beta=0.1, kl_in_reward=True).reference_in_loss
    assert not make(beta=0.0).reference_in_loss


def test_which_groups_can_be_left_out(registry):
    """Constant ones, where the estimator promises zeros for them and no KL in the loss moves them all the same."""
    assert make().needs_signal and make(beta=0.1, kl_in_reward=True).needs_signal
    assert not make(beta=0.1).needs_signal
    register_advantage_estimator("promises", zero_when_constant=True)(advantages.drgrpo)
    register_advantage_estimator("does_not")(advantages.drgrpo)
    assert make(advantage_estimator="promises").needs_signal
    assert not make(advantage_estimator="does_not").needs_signal


def test_advantages_are_those_of_the_named_estimator():
    for name, params in [("rloo", {}), ("maxpo", {"k": 2}), ("grpo", {"ddof": 0})]:
        found = make(advantage_estimator=name, **params).advantages(REWARDS, SCORED, LENGTHS)
        expected = compute_advantages(np.where(SCORED, REWARDS, np.nan), name, **params)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


def test_a_users_estimator_is_masked_and_its_shape_checked(registry):
    register_advantage_estimator("lengths")(lambda rewards, *, scored, lengths: lengths * 1.0)
    found = make(advantage_estimator="lengths").advantages(REWARDS, SCORED, LENGTHS)
    np.testing.assert_array_equal(found, np.where(SCORED, LENGTHS, 0))
    assert found.dtype == jnp.float32
    register_advantage_estimator("flat")(lambda rewards, *, scored, lengths: rewards.mean(axis=1))
    with pytest.raises(UserError, match=r"'flat' returned shape \[2\] for rewards of shape \[2, 4\]"):
        make(advantage_estimator="flat").advantages(REWARDS, SCORED, LENGTHS)


def test_weights_count_what_can_teach():
    """Unscored completions, groups with too few scored ones, and groups of another update weigh nothing and are not
    counted."""
    max_tokens = 7
    modes = ("token-mean", "seq-mean-token-sum", "sequence-mean-token-scale")
    cases = [
        ({}, EVERYONE, SCORED),
        ({}, jnp.asarray([False, True]), SCORED & jnp.asarray([[False], [True]])),
        ({"advantage_estimator": "maxpo", "k": 2}, EVERYONE, SCORED & jnp.asarray([[True], [False]])),
        ({"advantage_estimator": "maxpo", "k": 1}, EVERYONE, SCORED),
    ]
    for changes, in_update, counted in cases:
        for mode in modes:
            found = make(loss_agg_mode=mode, **changes).weights(SCORED, LENGTHS, in_update)
            np.testing.assert_array_equal(found, aggregation_weights(mode, LENGTHS, counted, max_tokens))


def test_a_group_of_one_scored_completion_is_dropped():
    scored = jnp.asarray([[True, False, False, False], [True, True, False, False]])
    found = make(loss_agg_mode="seq-mean-token-sum").weights(scored, LENGTHS, EVERYONE)
    np.testing.assert_array_equal(found, [[0, 0, 0, 0], [0.5, 0.5, 0, 0]])


def test_token_loss_is_policy_loss_plus_beta_kl_where_unmasked():
    rng = np.random.default_rng(0)
    new, old, ref = (jnp.asarray(rng.uniform(-2, 0, (2, 4, 5)), jnp.float32) for _ in range(3))
    advantage = jnp.asarray(rng.normal(size=(2, 4, 1)), jnp.float32)
    mask = jnp.arange(5)[None, None] < LENGTHS[..., None]
    policy = ppo_clip(new, old, advantage, mask, epsilon=0.1)[0]
    objective = make(epsilon=0.1, beta=0.25)
    loss, metrics = objective.token_loss(new, old, None, advantage, mask)
    np.testing.assert_array_equal(loss, jnp.where(mask, policy, 0))
    assert "kl" not in metrics
    for mode in ("low_var_kl", "mse_kl"):
        kl = kl_estimate(mode, new, ref, mask)
        loss, metrics = make(epsilon=0.1, beta=0.25, kl_loss_mode=mode).token_loss(new, old, ref, advantage, mask)
        np.testing.assert_allclose(loss, jnp.where(mask, policy + 0.25 * kl, 0), rtol=1e-6)
        np.testing.assert_array_equal(metrics["kl"], kl)
