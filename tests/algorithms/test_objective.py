"""Tests the conversion of a config into an objective or an error message, and the objective itself: the arguments that
its functions get, masks, the estimator of each group, and which completions count."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_like.algorithms import losses, objective
from tunix_like.algorithms import registry as estimators
from tunix_like.algorithms.advantages import compute_advantages
from tunix_like.algorithms.losses import (
    POLICY_LOSSES,
    TokenInputs,
    dppo,
    kl_estimate,
    loss_parameters,
    ppo_clip,
    register_policy_loss_fn,
)
from tunix_like.algorithms.objective import build_objective, resolve
from tunix_like.algorithms.off_policy import SamplerCorrection
from tunix_like.algorithms.registry import ADVANTAGE_ESTIMATORS, find_estimator, register_advantage_estimator
from tunix_like.config.schema import LOSS_AGG_MODES, AlgorithmConfig
from tunix_like.config.sources import ESTIMATOR_KEYS
from tunix_like.errors import UserError

PLAIN = {
    "advantage_estimator": "rloo",
    "policy_loss_fn": "ppo_clip",
    "loss_agg_mode": "token-mean",
    "kl_loss_mode": "low_var_kl",
    "kl_in_reward": False,
    "num_generations": 4,
}
REWARDS = np.array([[1, 0, 0, 0.5], [1, 1, 0, 3]], np.float32)
SCORED = np.array([[True, True, True, True], [True, False, True, False]])
LENGTHS = np.array([[3, 1, 2, 5], [4, 4, 1, 2]], np.int32)
OWN = np.zeros(2, np.int32)
MAX_TOKENS = 7


def advantages_of(objective, *arrays) -> np.ndarray:
    return np.asarray(objective.advantages(*(jnp.asarray(array) for array in arrays)))


def make(updates: int = 1, sources=None, **changes):
    return build_objective(AlgorithmConfig(**PLAIN | changes), MAX_TOKENS, updates, sources)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Defaults(AlgorithmConfig):
    advantage_estimator: str | None = "maxrl"
    loss_agg_mode: str | None = "token-mean"
    kl_in_reward: bool | None = True


@pytest.fixture
def registry(monkeypatch):
    """Restores the registries after the test, so that later tests do not see its registrations."""
    monkeypatch.setattr(estimators, "ADVANTAGE_ESTIMATORS", dict(ADVANTAGE_ESTIMATORS))
    monkeypatch.setattr(losses, "POLICY_LOSSES", dict(POLICY_LOSSES))


# --- from a config ----------------------------------------------------------------------------------------------------


def test_unset_keys_take_the_default_of_the_learner():
    given = AlgorithmConfig(loss_agg_mode="seq-mean-token-sum", kl_in_reward=False, num_generations=3, beta=0.5)
    found = resolve(given, Defaults)
    assert type(found) is Defaults
    expected = Defaults(loss_agg_mode="seq-mean-token-sum", kl_in_reward=False, num_generations=3, beta=0.5)
    assert found == dataclasses.replace(expected, kl_loss_mode="low_var_kl"), "k3 in the loss"
    assert found.advantage_estimator == "maxrl" and found.epsilon is None
    assert resolve(AlgorithmConfig(kl_in_reward=True), Defaults).kl_loss_mode == "kl", "k1 in the reward"
    assert resolve(AlgorithmConfig(kl_in_reward=True, kl_loss_mode="mse_kl"), Defaults).kl_loss_mode == "mse_kl"


def test_each_function_gets_only_the_arguments_that_it_reads():
    assert make().estimators[0].params == {} and make().loss_params == {}
    objective = make(advantage_estimator="maxpo", k=2, epsilon=0.1, epsilon_c=3.0)
    assert objective.estimators[0].params == {"k": 2}
    assert objective.loss_params == {"epsilon": 0.1, "epsilon_c": 3.0}
    assert make(advantage_estimator="grpo", ddof=0).estimators[0].params == {"ddof": 0}
    clip = {"epsilon": 0.1, "epsilon_high": None, "epsilon_c": 3.0}
    assert objective.parameters() == {"k": 2} | clip, "what is read, with the value it has"
    assert make(advantage_estimator="grpo", policy_loss_fn="reinforce").parameters() == {"ddof": 1}
    dppo_keys = {"dppo_mask_high": 0.2, "dppo_mask_low": 0.3, "kl_tau": 1e-3}
    assert make(policy_loss_fn="dppo", dppo_mask_low=0.3).parameters() == dppo_keys


def test_parameters_of_a_user_defined_estimator(registry):
    register_advantage_estimator("mine", takes="non-negative")(
        lambda rewards, *, scored, lengths, price, floor=0.0: jnp.maximum(rewards - price * lengths, floor)
    )
    found = make(advantage_estimator="mine", estimator_params={"price": 0.5})
    assert found.estimators[0].params == {"price": 0.5}
    np.testing.assert_array_equal(
        advantages_of(found, REWARDS, SCORED, LENGTHS, OWN), np.where(SCORED, np.maximum(REWARDS - 0.5 * LENGTHS, 0), 0)
    )
    for given, message in [
        ({}, "algorithm.estimator_params.price: the estimator 'mine' requires it"),
        ({"prize": 1.0}, "algorithm.estimator_params.prize: .*'mine' has no such keyword-only .*it has: floor, price"),
    ]:
        with pytest.raises(UserError, match=message):
            make(advantage_estimator="mine", estimator_params=given)


def test_parameters_of_built_in_functions_are_keys_of_their_kind():
    """A parameter that is a key of `algorithm`, but is not in these lists, would never be passed."""
    fields = {field.name for field in dataclasses.fields(AlgorithmConfig)}
    built_in = [e for e in ADVANTAGE_ESTIMATORS.values() if e.function.__module__.startswith("tunix_like.")]
    own = losses.POLICY_LOSSES.items()
    names = [name for name, loss in own if loss.function.__module__.startswith("tunix_like.")]
    assert {key for e in built_in for key in e.parameters()} & fields <= set(ESTIMATOR_KEYS)
    assert {key for name in names for key in losses.loss_parameters(name)} & fields <= set(objective.LOSS_KEYS)
    assert len(built_in) > 10 and len(names) > 5


KEYS = {"k": 2, "truncation_order": 2, "ddof": 0}
LOSS_KEYS = {"epsilon": 0.1, "epsilon_high": 0.3, "epsilon_c": 3.0}
LOSS_KEYS |= {"dppo_mask_high": 0.1, "dppo_mask_low": 0.1, "kl_tau": 0.1, "sapo_tau_pos": 2.0, "sapo_tau_neg": 3.0}
LOSS_KEYS |= {"vespo_k_pos": 1.0, "vespo_lambda_pos": 1.0, "vespo_k_neg": 1.0, "vespo_lambda_neg": 1.0}
GDPO = {"advantage_estimator": "gdpo"}
NEGATIVE = {"kl_in_reward": True, "beta": 0.1}
PENALTY = {"overlong": "penalty", "overlong_buffer": 2}


@pytest.mark.parametrize(
    "name", ["grpo", "drgrpo", "rloo", "maxrl", "maxpo", "pkpo", "passk", "opo", "reinforce_pp", "gdpo"]
)
def test_a_key_that_the_estimator_does_not_read_is_an_error(name):
    read = {key: value for key, value in KEYS.items() if key in find_estimator(name).parameters()}
    assert make(advantage_estimator=name, **read).estimators[0].params == read
    for key in KEYS.keys() - read.keys():
        with pytest.raises(UserError, match=f"algorithm.{key}: the estimator '{name}' does not read it"):
            make(advantage_estimator=name, **read, **{key: KEYS[key]})


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_key_that_the_loss_does_not_read_is_an_error(name):
    read = {key: value for key, value in LOSS_KEYS.items() if key in loss_parameters(name)}
    assert make(policy_loss_fn=name, **read).loss_params == read
    for key in LOSS_KEYS.keys() - read.keys():
        with pytest.raises(UserError, match=f"algorithm.{key}: the loss '{name}' does not read it"):
            make(policy_loss_fn=name, **{key: LOSS_KEYS[key]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (GDPO | {"binarize": True}, "algorithm.binarize: it changes the total reward, but 'gdpo' normalises"),
        (
            GDPO | {"overlong": "penalty", "overlong_buffer": 2},
            "algorithm.overlong=penalty: it changes the total reward",
        ),
        (GDPO | {"kl_in_reward": True, "beta": 0.1}, "algorithm.kl_in_reward: it changes the total reward"),
        ({"policy_loss_fn": "vespo", "sampler_is": "token"}, "algorithm.sampler_is: 'vespo' already uses the sampler"),
        ({"advantage_estimator": "rlo"}, "algorithm.advantage_estimator: unknown .* 'rlo'. Did you mean 'rloo'"),
        ({"advantage_estimator": "maxpo"}, "algorithm.k: the estimator 'maxpo' requires it"),
        ({"advantage_estimator": "maxpo", "k": 4}, "algorithm.k: got 4.*1 <= k <= 3"),
        ({"advantage_estimator": "passk", "k": 4}, "algorithm.k: got 4.*1 <= k <= 3"),
        ({"advantage_estimator": "pkpo", "k": 5}, "algorithm.k: got 5.*1 <= k <= 4"),
        ({"advantage_estimator": "maxrl", "truncation_order": 4}, "algorithm.truncation_order: got 4"),
        ({"estimator_params": {"k": 2}}, "algorithm.estimator_params.k: .*'rloo' has no such .* it has: none"),
        (
            {"advantage_estimator": "maxpo", "k": 2, "estimator_params": {"k": 3}},
            "algorithm.k and algorithm.estimator_params.k are both set",
        ),
        ({"policy_loss_fn": "ppo_clp"}, "unknown loss 'ppo_clp'. Did you mean 'ppo_clip'"),
        ({"policy_loss_fn": "reinforce", "updates": 2}, "'reinforce' allows one update per rollout batch.*give 2"),
        ({"sampler_is_threshold": 3.0}, "algorithm.sampler_is_threshold needs algorithm.sampler_is. Set"),
        ({"sampler_is_min": 0.5}, "algorithm.sampler_is_min needs algorithm.sampler_is. Set"),
        ({"sampler_is_kl": True, "beta": 0.1}, "algorithm.sampler_is_kl needs algorithm.sampler_is. Set"),
        (
            {"sampler_is": "token", "sampler_is_min": 0.7, "sampler_is_threshold": 0.6},
            "algorithm.sampler_is_min: got 0.7; it must be below algorithm.sampler_is_threshold \\(0.6\\)",
        ),
        ({"sampler_is": "token", "sampler_is_min": 2.0}, "algorithm.sampler_is_min: got 2.0; it must be below 1"),
        (
            {"sampler_is": "sequence_mask", "sampler_is_threshold": 1.0},
            "algorithm.sampler_is_threshold: got 1; sequence_mask would mask tokens .* agree .*Set it above 1",
        ),
        (
            {"sampler_is": "token", "sampler_is_kl": True},
            "algorithm.sampler_is_kl: the loss has no KL, since algorithm.beta is 0. Unset it",
        ),
        (
            {"sampler_is": "token", "sampler_is_kl": True, "beta": 0.1, "kl_in_reward": True},
            "algorithm.sampler_is_kl: the loss has no KL, since algorithm.kl_in_reward puts .*Unset it",
        ),
        ({"max_extra_batches": 3}, "algorithm.max_extra_batches needs algorithm.dynamic_sampling. Set"),
        ({"overlong_buffer": 3}, "overlong_buffer, .*: they need algorithm.overlong=penalty"),
        ({"loss_params": {"epsilon": -1.0}}, "algorithm.loss_params.epsilon: .* is built in; set algorithm.epsilon"),
        ({"policy_loss_fn": "dppo", "sampler_is": "token"}, "algorithm.sampler_is: 'dppo' already uses the sampler"),
        ({"overlong": "penalty"}, "algorithm.overlong_buffer: algorithm.overlong=penalty requires it"),
        ({"overlong": "mask", "overlong_buffer": 2}, "overlong_buffer, .*: they need algorithm.overlong=penalty"),
        ({"overlong": "mask", "overlong_penalty": 2.0}, "overlong_penalty: they need algorithm.overlong=penalty"),
        ({**PENALTY, "overlong_buffer": 8}, "algorithm.overlong_buffer: got 8; .*max_tokens_to_generate \\(7\\)"),
        (
            {"advantage_estimator": "passk", "k": 2, **NEGATIVE, "binarize": True},
            "algorithm.kl_in_reward: it makes rewards negative, but passk accepts binary rewards only",
        ),
        (
            {"advantage_estimator": "maxrl", **NEGATIVE},
            "algorithm.kl_in_reward: it makes rewards negative, but maxrl without truncation_order accepts "
            "non-negative rewards only. Set algorithm.truncation_order, or algorithm.kl_in_reward=false",
        ),
        (
            {"advantage_estimator": "passk", "k": 2, **NEGATIVE},
            "algorithm.kl_in_reward: it makes .* passk accepts binary rewards only. Set algorithm.kl_in_reward=false",
        ),
        ({"advantage_estimator": "maxrl", **PENALTY}, "overlong=penalty: it makes .* Set .*order, or .*binarize=true"),
        ({"advantage_estimator": "passk", "k": 2, **PENALTY}, "overlong=penalty: .* Set algorithm.binarize=true"),
    ],
    ids=str,
)
def test_invalid_configs_are_rejected_before_any_compilation(changes, message):
    with pytest.raises(UserError, match=message):
        make(**changes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"advantage_estimator": "maxlr"}, "data source 'maths': .*unknown estimator 'maxlr'. Did you mean 'maxrl'"),
        ({"advantage_estimator": "maxpo"}, "data source 'maths'.k: the estimator 'maxpo' requires it"),
        ({"advantage_estimator": "maxpo", "k": 4}, "data source 'maths'.k: got 4"),
        ({"advantage_estimator": "grpo", "k": 2}, "data source 'maths'.k: the estimator 'grpo' does not read it"),
        ({"k": 2}, "data source 'maths'.k: the estimator 'rloo' does not read it"),
        (
            {"advantage_estimator": "maxrl"},
            "it makes rewards negative, but maxrl without truncation_order of data source 'maths' accepts non-negative "
            "rewards only. Set data source 'maths'.truncation_order, or algorithm.kl_in_reward=false",
        ),
    ],
    ids=str,
)
def test_errors_of_a_data_source_name_it(given, message):
    with pytest.raises(UserError, match=message):
        make(sources={"fine": {"advantage_estimator": "grpo", "ddof": 0}, "maths": given}, **NEGATIVE)


def test_unusual_but_valid_configs_are_accepted():
    """These configs are similar to invalid ones but valid. Their values are kept."""
    for changes, params in (
        ({"policy_loss_fn": "reinforce", "sampler_is": "sequence", "sampler_is_threshold": 3.0}, {}),
        ({"sampler_is": "token", "sampler_is_threshold": 0.5}, {}),
        ({"sampler_is": "token_mask", "sampler_is_threshold": 5.0, "sampler_is_min": 0.2, "sampler_is_kl": False}, {}),
        ({"sampler_is": "sequence_mask", "sampler_is_kl": True, "beta": 0.1}, {}),
        ({"updates": 2, "dynamic_sampling": True, "max_extra_batches": 3}, {}),
        ({"advantage_estimator": "maxrl", "truncation_order": 2, **NEGATIVE}, {"truncation_order": 2}),
        ({"advantage_estimator": "maxrl", "beta": 0.0, "kl_in_reward": True}, {}),
        ({"advantage_estimator": "maxrl", "binarize": True, **PENALTY}, {}),
        ({"advantage_estimator": "passk", "k": 3, "beta": 0.1}, {"k": 3}),
        ({"overlong": "penalty", "overlong_buffer": MAX_TOKENS, "overlong_penalty": 0.5}, {}),
        ({"overlong": "mask", "advantage_estimator": "pkpo", "k": 4}, {"k": 4}),
        ({"advantage_estimator": "maxpo", "estimator_params": {"k": 3}}, {"k": 3}),
    ):
        objective = make(**changes)
        assert objective.estimators[0].params == params
        assert all(getattr(objective.config, key) == value for key, value in changes.items() if key != "updates")


# --- which completions count ------------------------------------------------------------------------------------------


def test_the_reference_is_in_the_loss_only_when_configured():
    assert make(beta=0.1).reference_in_loss
    assert not make(**NEGATIVE).reference_in_loss
    assert not make(beta=0.0).reference_in_loss


@pytest.mark.parametrize(
    ("changes", "extra", "looks"),
    [
        ({}, False, False),
        ({"advantage_estimator": "maxpo", "k": 2}, False, True),
        ({"advantage_estimator": "maxpo", "k": 2, "beta": 0.1}, True, False),
        (NEGATIVE, False, False),
        ({"advantage_estimator": "pkpo", "k": 2, **NEGATIVE}, False, True),
        ({"advantage_estimator": "passk", "k": 2, "entropy_coef": 0.01}, True, False),
        ({"advantage_estimator": "maxpo", "k": 2, "policy_loss_fn": "dppo"}, True, False),
        ({"advantage_estimator": "maxpo", "k": 2, "policy_loss_fn": "dppo", "kl_tau": 0.0}, False, True),
        ({"sources": {"maths": {"advantage_estimator": "passk", "k": 2}}}, False, True),
        ({"sampler_is": "token"}, False, False),
    ],
    ids=str,
)
def test_terms_without_the_advantage(changes, extra, looks):
    objective = make(**changes)
    assert objective.extra_term is extra and objective.skips_zero_advantages is looks


@pytest.mark.parametrize("weight", [0.5, -0.5, 0.0])
def test_the_extra_term_of_a_user_defined_loss(weight, registry):
    register_policy_loss_fn("anchored", extra_term="pull")(
        lambda logprobs, old, advantages, mask, *, pull=weight: (-advantages * logprobs + pull * logprobs**2, {})
    )
    assert make(policy_loss_fn="anchored").extra_term is (weight != 0)


GROUPS = np.array(
    [[1, 0, 0, 0], [1, 1, 1, 1], [0.5, 9, 0.5, 0.5], [1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]], np.float32
)
FEW = np.array([[1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 1, 1], [0, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1]], bool)
"""Mixed, constant, constant except for an unscored one, one scored, two scored, and again mixed."""


@pytest.mark.parametrize(
    ("changes", "kept", "live"),
    [
        ({}, [0, 1, 2, 4, 5], [0, 4, 5]),
        ({"advantage_estimator": "reinforce_pp"}, [0, 1, 2, 4, 5], [0, 1, 2, 4, 5]),
        ({"advantage_estimator": "pkpo", "k": 1}, [0, 1, 2, 4, 5], [0, 1, 2, 4, 5]),
        ({"advantage_estimator": "pkpo", "k": 3}, [0, 1, 2, 5], [0, 5]),
        ({"advantage_estimator": "passk", "k": 2}, [0, 1, 2, 4, 5], [0, 4, 5]),
        ({"advantage_estimator": "maxpo", "k": 2}, [0, 1, 2, 5], [0, 5]),
        ({"advantage_estimator": "maxpo", "k": 3}, [0, 1, 5], [0, 5]),
        ({"beta": 0.1}, [0, 1, 2, 4, 5], [0, 1, 2, 4, 5]),
        ({"entropy_coef": 0.1, "advantage_estimator": "maxpo", "k": 2}, [0, 1, 2, 5], [0, 1, 2, 5]),
        ({"policy_loss_fn": "dppo"}, [0, 1, 2, 4, 5], [0, 1, 2, 4, 5]),
        ({"policy_loss_fn": "dppo", "kl_tau": 0.0}, [0, 1, 2, 4, 5], [0, 4, 5]),
    ],
    ids=str,
)
def test_which_completions_can_change_the_gradient(changes, kept, live):
    objective, ids = make(**changes), np.zeros(len(GROUPS), np.int32)
    assert np.flatnonzero(objective.kept_groups(FEW, ids)).tolist() == kept
    rows = objective.live_rows(GROUPS, FEW, ids)
    np.testing.assert_array_equal(rows, FEW & np.isin(np.arange(len(GROUPS)), live)[:, None])
    zeros = np.where(np.arange(4) < 2, 1.0, 0.0) * np.ones((len(GROUPS), 1))  # example advantages, half of them 0
    known = objective.live_rows(GROUPS, FEW, ids, zeros.astype(np.float32))
    np.testing.assert_array_equal(known, rows if objective.extra_term else rows & (zeros != 0))


@pytest.mark.parametrize("name", ["maxpo", "pkpo", "passk", "grpo", "opo", "maxrl"])
def test_completions_that_are_not_live_have_advantage_zero(name):
    """On all 0/1 groups of four with every subset unscored, every completion that is not live has advantage zero."""
    every = np.array(list(itertools.product([0, 1, np.nan], repeat=4)), np.float32)
    scored, rewards = ~np.isnan(every), np.nan_to_num(every)
    objective = make(advantage_estimator=name, **{"k": 2} if name in ("maxpo", "pkpo", "passk") else {})
    ids = np.zeros(len(every), np.int32)
    values = advantages_of(objective, rewards, scored, np.ones(every.shape, np.int32), ids)
    live = objective.live_rows(rewards, scored, ids)
    assert not values[~live].any() and live.sum() < scored.sum()
    finer = objective.live_rows(rewards, scored, ids, values)
    np.testing.assert_array_equal(finer, values != 0)
    assert finer.sum() < live.sum() or not objective.skips_zero_advantages


def slow_weights(mode: str, counted: np.ndarray) -> np.ndarray:
    places = [tuple(place) for place in np.argwhere(counted)]
    sizes = {"token-mean": sum(int(LENGTHS[place]) for place in places)}
    out = np.zeros(LENGTHS.shape)
    for place in places:
        sizes["sequence-mean-token-mean"] = len(places) * int(LENGTHS[place])
        sizes["seq-mean-token-sum"] = len(places)
        sizes["sequence-mean-token-scale"] = len(places) * MAX_TOKENS
        out[place] = 1 / sizes[mode]
    return out


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_only_live_completions_have_weight(mode):
    """These completions have weight zero and are not counted: unscored, not trained, of groups with too few scored
    completions for their estimator, and of groups of another update."""
    everyone, groups = np.ones((2, 4), bool), np.array([[True], [False]])
    all_in, trained = np.ones(2, bool), np.array([[True, False, True, True], [True, True, False, True]])
    sources = {"maths": {"advantage_estimator": "maxpo", "k": 2}, "easy": {"advantage_estimator": "maxpo", "k": 1}}
    mixed = make(loss_agg_mode=mode, sources=sources)
    maths, easy, plain = (mixed.estimator_ids([name, name]) for name in ("maths", "easy", None))
    for in_loss, in_update, ids, counted in [
        (everyone, all_in, plain, SCORED),
        (everyone, ~groups[:, 0], plain, SCORED & ~groups),
        (trained, all_in, plain, SCORED & trained),
        (everyone, all_in, maths, SCORED & groups),
        (everyone, all_in, easy, SCORED),
        (everyone, all_in, mixed.estimator_ids(["easy", "maths"]), SCORED & groups),
        (everyone, all_in, mixed.estimator_ids(["maths", "else"]), SCORED),
    ]:
        found = mixed.weights(*(jnp.asarray(array) for array in (SCORED, in_loss, LENGTHS, in_update, ids)))
        np.testing.assert_allclose(found, slow_weights(mode, counted), rtol=1e-6)


# --- advantages -------------------------------------------------------------------------------------------------------


def test_a_user_defined_estimator_is_masked_and_its_shape_checked(registry):
    register_advantage_estimator("lengths")(lambda rewards, *, scored, lengths: lengths * 1.0)
    found = advantages_of(make(advantage_estimator="lengths"), REWARDS, SCORED, LENGTHS, OWN)
    np.testing.assert_array_equal(found, np.where(SCORED, LENGTHS, 0))
    assert found.dtype == jnp.float32
    for wrong, shape in [
        (lambda rewards: rewards.mean(axis=1), r"an array of shape \[2\]"),
        (lambda rewards: 1.0, "one number"),
    ]:
        name = f"wrong_{len(estimators.ADVANTAGE_ESTIMATORS)}"
        register_advantage_estimator(name)(lambda rewards, *, scored, lengths, wrong=wrong: wrong(rewards))
        with pytest.raises(UserError, match=rf"'{name}' returned {shape} for rewards of shape \[2, 4\]"):
            advantages_of(make(advantage_estimator=name), REWARDS, SCORED, LENGTHS, OWN)


BY_SOURCE = {
    "plain": {},
    "maxrl": {"advantage_estimator": "maxrl"},
    "order 2": {"advantage_estimator": "maxrl", "truncation_order": 2},
    "max of 2": {"advantage_estimator": "maxpo", "k": 2},
    "max of 3": {"advantage_estimator": "maxpo", "k": 3},
    "passk": {"advantage_estimator": "passk", "k": 2},
    "whitened": {"advantage_estimator": "reinforce_pp"},
    "raw": {"advantage_estimator": "pkpo", "k": 1},
}


def test_errors_of_a_user_defined_estimator_name_it(registry):
    """Tests a Python `if` on a traced value, which is the usual mistake, and an error without a message."""

    def branches(rewards, *, scored, lengths):
        return rewards if rewards.max() > 0 else -rewards

    def silent(rewards, *, scored, lengths):
        raise ZeroDivisionError

    for function, said in (
        (branches, "TracerBoolConversionError: .* write jnp.where"),
        (silent, "ZeroDivisionError: "),
    ):
        register_advantage_estimator(function.__name__)(function)
        objective = make(advantage_estimator=function.__name__)
        with pytest.raises(UserError, match=f"'{function.__name__}' raised {said}"):
            jax.jit(objective.advantages)(REWARDS, SCORED, LENGTHS, jnp.zeros(2, jnp.int32))


def test_each_group_has_the_advantages_of_its_own_estimator():
    """The advantages equal those of a run with this estimator alone, in any order of the groups, with one
    compilation."""
    objective = make(advantage_estimator="grpo", ddof=0, sources=BY_SOURCE | {"plain": {"ddof": 1}})
    rng, each, traces = np.random.default_rng(0), 5, []
    names = [None, *BY_SOURCE] * each
    count = len(names)
    rewards = rng.integers(0, 2, (count, 4)).astype(np.float32)
    scored, lengths = rng.random((count, 4)) < 0.85, rng.integers(1, 9, (count, 4)).astype(np.int32)
    first = np.arange(count) < count // each  # a group of each kind with nonzero advantages under every estimator
    rewards[first], scored[first] = [1, 0, 0, 0], True
    expected = np.zeros((count, 4))
    for name in [None, *BY_SOURCE]:
        own = np.array([source == name for source in names])
        given = {None: {"ddof": 0}, "plain": {"ddof": 1}}.get(name, BY_SOURCE.get(name))
        values, given = np.where(scored, rewards, np.nan)[own], {"advantage_estimator": "grpo"} | given
        expected[own] = compute_advantages(values, **given, lengths=lengths[own])
        assert own.sum() == each and np.abs(expected[own]).max() > 0.1

    @jax.jit
    def run(*args):
        traces.append(None)
        return objective.advantages(*args)

    for order in (np.arange(count), rng.permutation(count)):
        ids = objective.estimator_ids([names[i] for i in order])
        found = run(rewards[order], scored[order], lengths[order], ids)
        np.testing.assert_allclose(found, expected[order], rtol=1e-5, atol=1e-6)
    assert len(traces) == 1


def test_data_sources_select_their_estimators():
    objective = make(sources={"a": {"advantage_estimator": "grpo"}, "b": {"advantage_estimator": "maxpo", "k": 3}})
    assert objective.estimator_ids(["b", None, "a", "else"]).tolist() == [2, 0, 1, 0]
    assert [each.name for each in objective.estimators] == ["rloo", "grpo", "maxpo"]
    ids, scored = objective.estimator_ids(["b", "a", "b"]), np.array([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]], bool)
    assert objective.kept_groups(scored, ids).tolist() == [False, True, True]
    constant = objective.live_rows(np.ones((3, 4), np.float32), scored, ids)
    assert not constant.any()
    whitened = make(sources={"a": {"advantage_estimator": "reinforce_pp"}})
    rows = whitened.live_rows(np.ones((2, 4), np.float32), np.ones((2, 4), bool), whitened.estimator_ids(["a", "b"]))
    assert rows.all(axis=1).tolist() == [True, False]


# --- schedules --------------------------------------------------------------------------------------------------------


def ramp(start, end, steps=4):
    return {"start": start, "end": end, "steps": steps}


@pytest.mark.parametrize(
    ("name", "given", "values"),
    [
        ("maxk_mix", {"alpha": ramp(0.0, 1.5)}, [{"alpha": alpha} for alpha in (0.0, 0.5, 1.0, 1.5, 1.5)]),
        ("maxrl", {"truncation_order": ramp(3, 1, 3)}, [{"truncation_order": order} for order in (3, 2, 1, 1, 1)]),
        ("maxpo", {"k": ramp(1, 3, 5)}, [{"k": k} for k in (1, 2, 2, 3, 3)]),
        ("pkpo", {"k": ramp(2, 4, 3)}, [{"k": k} for k in (2, 3, 4, 4, 4)]),
        ("passk", {"k": ramp(1, 3, 3)}, [{"k": k} for k in (1, 2, 3, 3, 3)]),
        (
            "order_statistic",
            {"k": ramp(1, 3, 3), "statistic": "lower_tail_mean:0.5"},
            [{"k": k, "statistic": "lower_tail_mean:0.5"} for k in (1, 2, 3, 3, 3)],
        ),
    ],
)
def test_a_schedule_gives_the_advantages_of_its_value_in_one_program(name, given, values):
    """Advantages, loss weights and kept groups of a step equal those of an objective with the value of this step, also
    with unscored completions, in a run of several estimators. Only the first step is traced."""
    rng, traces = np.random.default_rng(0), []
    rewards = rng.integers(0, 2, (24, 4)).astype(np.float32)
    scored, lengths = rng.random((24, 4)) < 0.8, rng.integers(1, 9, (24, 4)).astype(np.int32)
    everyone = np.ones(24, bool)
    sources = {"fixed": {"advantage_estimator": "maxpo", "k": 2}}
    scheduled = make(sources={"ramp": {"advantage_estimator": name, **given}} | sources)
    ids = scheduled.estimator_ids([(None, "ramp", "ramp", "fixed")[i % 4] for i in range(24)])

    @jax.jit
    def run(arrays, *batch):
        traces.append(None)
        objective = scheduled.bound(arrays)
        weights = objective.weights(batch[1], jnp.ones_like(batch[1]), batch[2], jnp.asarray(everyone), batch[3])
        return objective.advantages(*batch), weights

    for step, value in enumerate(values, start=1):
        plain = make(sources={"ramp": {"advantage_estimator": name, **value}} | sources)
        advantages, weights = run(scheduled.scheduled(step), rewards, scored, lengths, ids)
        expected = plain.advantages(*map(jnp.asarray, (rewards, scored, lengths, ids)))
        np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-6)
        expected = plain.weights(*map(jnp.asarray, (scored, np.ones_like(scored), lengths, everyone, ids)))
        np.testing.assert_allclose(weights, expected, rtol=1e-6)
        np.testing.assert_array_equal(scheduled.at(step).kept_groups(scored, ids), plain.kept_groups(scored, ids))
        changed = {key: float(number) for key, number in value.items() if key != "statistic"}
        assert scheduled.schedule_metrics(step) == {f"schedule/ramp/{key}": each for key, each in changed.items()}
    assert len(traces) == 1
    alone = make(**{"advantage_estimator": name, **given})
    assert alone.scheduled(1).tables[0].dtype == np.float32 and scheduled.scheduled(1).tables[2] is None
    assert all(key.startswith("schedule/") and "ramp" not in key for key in alone.schedule_metrics(1))
    assert make(advantage_estimator="maxpo", k=2).scheduled(1) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantage_estimator": "maxpo", "k": ramp(1, 4)}, "algorithm.k: got 4; 'maxpo' needs 1 <= k <= 3"),
        ({"advantage_estimator": "maxrl", "truncation_order": ramp(4, 1)}, "truncation_order: got 4; .* <= 3"),
        ({"advantage_estimator": "maxk_mix", "alpha": ramp(0, 1e9)}, "alpha: got 1000000000.0; a coefficient"),
        ({"advantage_estimator": "maxk_mix", "alpha": ramp(0, 1), "coefficients": [1.0]}, "alpha, coefficients: "),
        ({"advantage_estimator": "pkpo", "k": ramp(1, 4)}, "algorithm.k: 'pkpo' with k = 1 .*Start the schedule at 2"),
        ({"advantage_estimator": "pkpo", "k": ramp(3, 1)}, "algorithm.k: 'pkpo' with k = 1"),
        (
            {"advantage_estimator": "order_statistic", "k": ramp(2, 3), "weights": [1.0, 0.0]},
            r"algorithm.weights: got 2; 'order_statistic' needs k \(3\)",
        ),
        (
            {"advantage_estimator": "order_statistic", "k": ramp(3, 1), "statistic": "top_mean:2"},
            r"algorithm.statistic: got 'top_mean:2'.*from 1 to k \(1\)",
        ),
        ({"advantage_estimator": "rloo", "k": ramp(1, 2)}, "algorithm.k: the estimator 'rloo' does not read it"),
        ({"sources": {"a": {"advantage_estimator": "maxpo", "k": ramp(1, 4)}}}, "data source 'a'.k: got 4; "),
        ({"sources": {"a": {"advantage_estimator": "maxpo", "k": {"end": 2}}}}, "'a'.k: got .* a schedule has"),
        ({"sources": {"a": {"advantage_estimator": "grpo", "ddof": ramp(0, 1)}}}, "'a'.ddof: .* takes no schedule"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_schedules_are_rejected_before_any_compilation(changes, message):
    with pytest.raises(UserError, match=message):
        make(**changes)


def test_a_user_defined_estimator_may_have_a_table(registry):
    """The scheduled parameter reaches the compiled function only as the table."""

    def table(size, *, power):
        return np.arange(size)[None] ** power

    @register_advantage_estimator(
        "by_rank", takes=lambda params: "any" if params["power"] > 1 else "binary", table=table
    )
    def by_rank(rewards, *, scored, lengths, power, table=None):
        return jnp.sort(rewards, axis=-1) * (jnp.arange(rewards.shape[-1])[None] ** power if table is None else table)

    objective = make(advantage_estimator="by_rank", estimator_params={"power": ramp(2.0, 3.0, 2)})
    batch = [jnp.asarray(array) for array in (REWARDS, np.ones_like(SCORED), LENGTHS, OWN)]
    for step, power in ((1, 2), (2, 3)):
        found = objective.bound(jax.tree.map(jnp.asarray, objective.scheduled(step))).advantages(*batch)
        np.testing.assert_allclose(found, np.sort(REWARDS) * np.arange(4) ** power, rtol=1e-6)


# --- the loss of a token ----------------------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
MASK = np.arange(5) < np.array([[3, 1, 2, 5], [4, 0, 1, 2]])[..., None]
ADVANTAGES = jnp.asarray(RNG.normal(size=(2, 4, 1)), jnp.float32)
NEW, OLD, SAMPLER, REF, ENTROPY = (RNG.uniform(-2, 0, (2, 4, 5)).astype(np.float32) for _ in range(5))


def tokens(garbage: float = 0.0, **changes) -> TokenInputs:
    """Returns log-probabilities with arbitrary values at masked places."""
    given = [jnp.asarray(np.where(MASK, values, garbage)) for values in (NEW, OLD, SAMPLER, REF, ENTROPY)]
    return TokenInputs(*given, jnp.asarray(MASK))._replace(**changes)


def test_the_loss_is_the_sum_of_its_terms():
    """The correction for the sampler multiplies only the policy loss."""
    given = tokens()
    policy = ppo_clip(given.logprobs, given.old_logprobs, ADVANTAGES, given.mask, epsilon=0.1)[0]
    loss, metrics = make(epsilon=0.1, beta=0.25, **{"kl_in_reward": True}).token_loss(given, ADVANTAGES)
    np.testing.assert_array_equal(loss, jnp.where(MASK, policy, 0))
    assert "kl" not in metrics and "sampler_is/mean" not in metrics
    for correction, bound, kl_mode in [("token", None, "low_var_kl"), ("sequence", 0.7, "mse_kl"), (None, None, "kl")]:
        objective = make(
            epsilon=0.1,
            beta=0.25,
            kl_loss_mode=kl_mode,
            entropy_coef=0.125,
            sampler_is=correction,
            sampler_is_threshold=bound,
        )
        loss, metrics = objective.token_loss(given, ADVANTAGES)
        weight = 1.0
        if correction is not None:
            own = SamplerCorrection(correction, 0.0, 2.0 if bound is None else bound)
            weight = own.weights(own.ratios(given.old_logprobs, given.rollout_logprobs, given.mask))
            unit = 1.0 if correction == "token" else 1 / np.maximum(MASK.sum(-1, keepdims=True), 1)
            np.testing.assert_allclose(metrics["sampler_is/mean"], weight * unit, rtol=1e-6)
        kl = kl_estimate(kl_mode, given.logprobs, given.ref_logprobs, given.mask)
        expected = jnp.where(MASK, weight * policy + 0.25 * kl - 0.125 * given.entropy, 0)
        np.testing.assert_allclose(loss, expected, rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(metrics["kl"], kl)
        if correction is not None:  # the loss has the weighted estimate, the metric the estimate itself
            weighted = dataclasses.replace(objective, config=dataclasses.replace(objective.config, sampler_is_kl=True))
            np.testing.assert_array_equal(weighted.token_loss(given, ADVANTAGES)[1]["kl"], kl)


def test_each_loss_gets_the_log_probabilities_of_its_definition():
    """A loss gets the log-probabilities of the trainer before the update, or those of the sampler."""
    given = tokens()
    loss, _ = make(policy_loss_fn="dppo", kl_tau=0.3).token_loss(given, ADVANTAGES)
    expected = dppo(given.logprobs, given.rollout_logprobs, ADVANTAGES, given.mask, kl_tau=0.3)[0]
    np.testing.assert_array_equal(loss, jnp.where(MASK, expected, 0))
    assert make(policy_loss_fn="dppo").needs_rollout_logprobs and make(sampler_is="token").needs_rollout_logprobs
    assert not make().needs_rollout_logprobs
    make().token_loss(tokens(rollout_logprobs=None), ADVANTAGES)
    for changes in ({"policy_loss_fn": "dppo"}, {"sampler_is": "sequence"}):
        with pytest.raises(
            UserError, match="the loss needs the sampler's log-probabilities, and these rollouts have none"
        ):
            make(**changes).token_loss(tokens(rollout_logprobs=None), ADVANTAGES)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_masked_places_change_neither_loss_nor_gradient(name):
    extra = {} if POLICY_LOSSES[name].behaviour == "rollout" else {"sampler_is": "sequence"}
    objective = make(policy_loss_fn=name, beta=0.25, entropy_coef=0.125, **extra)

    @jax.jit
    def both(given):
        total = lambda new, entropy: objective.token_loss(  # noqa: E731
            given._replace(logprobs=new, entropy=entropy), ADVANTAGES
        )[0]
        gradients = jax.grad(lambda *args: total(*args).sum(), argnums=(0, 1))(given.logprobs, given.entropy)
        return total(given.logprobs, given.entropy), gradients

    loss, gradients = both(tokens())
    assert (np.asarray(loss)[MASK] != 0).all() and not np.asarray(loss)[~MASK].any()
    np.testing.assert_array_equal(gradients[1], np.where(MASK, np.float32(-0.125), 0))
    jax.tree.map(np.testing.assert_array_equal, both(tokens(np.nan)), (loss, gradients))
    assert not np.asarray(gradients[0])[~MASK].any()
