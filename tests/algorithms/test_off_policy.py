"""Tests the correction for the sampler: the expected gradient of every mode, by enumeration in float64, against the
true gradient and against the documented bias, and its weights and metrics, with the weights of TRL as an oracle.

The policy is a table of logits, and the sampler is another table. Completions have at most two sampled tokens, so all
completions and all groups of three can be enumerated.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.parameters import others_slow
from tunix_like.algorithms.losses import POLICY_LOSSES, TokenInputs, kl_estimate
from tunix_like.algorithms.objective import build_objective
from tunix_like.algorithms.off_policy import DEFAULT_UPPER, SamplerCorrection, finish_metrics
from tunix_like.algorithms.population_weights import population_weights
from tunix_like.config.schema import KL_LOSS_MODES, AlgorithmConfig
from tunix_like.errors import UserError

SIZE = 3
NO_BOUND = 1e9
GARBAGE = {"policy": 7.0, "sampler": -3.0}
"""The values at tokens that the policy did not sample. Their ratio would be `exp(10)`."""


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


class World(NamedTuple):
    """All completions: the state of the table before each token, the token, and whether the policy sampled it."""

    states: np.ndarray
    tokens: np.ndarray
    sampled: np.ndarray

    @property
    def draws(self) -> np.ndarray:
        """Returns all groups of three completions."""
        return np.array(list(itertools.product(range(len(self.tokens)), repeat=SIZE)))


_STATES = np.array([[0, 0], *([0, 1],) * 3, *([0, 2],) * 3])
_TOKENS = np.array([[0, 0], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2]])
_SAMPLED = np.array([[True, False], *[[True, True]] * 6])
TWO_TOKENS = World(_STATES, _TOKENS, _SAMPLED)
"""Token 0 ends the completion. State 0 is the prompt, states 1 and 2 follow the tokens 1 and 2."""
TWO_TURNS = World(*(np.insert(part, 1, 0, axis=1) for part in (_STATES, _TOKENS, _SAMPLED)))
"""The same completions with a token of an environment in between, which the policy did not sample."""
ONE_TOKEN = World(np.zeros((3, 1), int), np.arange(3)[:, None], np.ones((3, 1), bool))
REAL = np.array([-0.75, 1.0, -0.5, 0.25, 1.5, 0.0, -1.25])
BINARY = np.array([0.0, 1, 0, 0, 1, 0, 0])
CURRENT, DIRECTION, REFERENCE = np.random.default_rng(19).normal(size=(3, 3, 3)) * np.array([0.6, 1, 1])[:, None, None]
SAMPLER = CURRENT + 0.8 * DIRECTION
"""The ratios of the completions range from 0.37 to 4.8, those of the tokens from 0.3 to 2.6."""


def logprobs(table, world=TWO_TOKENS, garbage: str = "policy"):
    """Returns the log-probabilities `[completions, tokens]`."""
    found = jax.nn.log_softmax(jnp.asarray(table, jnp.float64))[world.states, world.tokens]
    return jnp.where(world.sampled, found, GARBAGE[garbage])


def chances(table, world=TWO_TOKENS):
    """Returns the probability of every completion."""
    return jnp.exp(jnp.where(world.sampled, logprobs(table, world), 0.0).sum(axis=1))


def scores(table=CURRENT, world=TWO_TOKENS) -> np.ndarray:
    """Returns the gradients of the log-probabilities `[completions, tokens, 3, 3]`, 0 at tokens that were not
    sampled."""
    return np.asarray(jax.jacobian(lambda table: logprobs(table, world))(jnp.asarray(table)))


def make(mode: str | None = None, upper: float | None = None, lower: float | None = None, **changes):
    settings = {
        "advantage_estimator": "rloo", "policy_loss_fn": "ppo_clip", "loss_agg_mode": "seq-mean-token-sum",
        "kl_loss_mode": "low_var_kl", "kl_in_reward": False, "num_generations": SIZE, "sampler_is": mode,
        "sampler_is_threshold": upper, "sampler_is_min": lower,
    }  # fmt: skip
    return build_objective(AlgorithmConfig(**settings | changes), 4, 1)


def expected(objective, rewards=REAL, sampler=SAMPLER, world=TWO_TOKENS) -> np.ndarray:
    """Returns the expected ascent direction of the loss over all groups that the sampler draws, `[3, 3]`."""
    draws, mask = world.draws, jnp.asarray(world.sampled[world.draws])
    rewards = jnp.asarray(rewards[: len(world.tokens)][draws])
    everyone, ids = jnp.ones(draws.shape, bool), jnp.zeros(len(draws), jnp.int32)
    advantages = objective.advantages(rewards, everyone, mask.sum(-1), ids)[..., None]
    rollout, ref = (logprobs(table, world, "sampler")[draws] for table in (sampler, REFERENCE))
    chance = chances(sampler, world)[draws].prod(axis=1)[:, None, None]

    def loss(table):
        new = logprobs(table, world)[draws]
        tokens = TokenInputs(new, jax.lax.stop_gradient(new), rollout, ref, jnp.zeros_like(new), mask)
        return (chance * objective.token_loss(tokens, advantages)[0]).sum() / SIZE

    return -np.asarray(jax.jit(jax.grad(loss))(jnp.asarray(CURRENT)))


def true_gradient(rewards=REAL, world=TWO_TOKENS) -> np.ndarray:
    """Returns the gradient of the expected reward."""
    given = jnp.asarray(rewards[: len(world.tokens)])
    return np.asarray(jax.grad(lambda table: (chances(table, world) * given).sum())(jnp.asarray(CURRENT)))


def distance(found, wanted) -> float:
    """Returns the length of the difference relative to the length of the expected value."""
    return float(np.linalg.norm(np.asarray(found) - wanted) / np.linalg.norm(wanted))


def both_chances(world=TWO_TOKENS) -> tuple[np.ndarray, np.ndarray]:
    """Returns the probability of every completion under the policy and under the sampler."""
    return np.asarray(chances(CURRENT, world)), np.asarray(chances(SAMPLER, world))


# --- the expected gradient --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce", "cispo", "gspo"])
@pytest.mark.parametrize(
    "world",
    [pytest.param(TWO_TOKENS, id="two tokens"), pytest.param(TWO_TURNS, id="two turns")],
)
def test_the_ratio_of_the_completion_has_no_bias(world, loss):
    """The expected gradient is exact if no ratio reaches a bound, whatever values the tokens of an environment have.
    This also holds for `rloo` and `drgrpo`, because the mean reward of the sampler is a valid baseline."""
    pi, mu = both_chances(world)
    true = true_gradient(world=world)
    for mode in ("sequence", "sequence_mask"):
        for upper in (NO_BOUND, (pi / mu).max() * 1.001):
            assert distance(expected(make(mode, upper, policy_loss_fn=loss), world=world), true) <= 1e-9
        lower = (pi / mu).min() * 0.999
        assert distance(expected(make(mode, NO_BOUND, lower, policy_loss_fn=loss), world=world), true) <= 1e-9
    plain = make("sequence", NO_BOUND, policy_loss_fn=loss, advantage_estimator="drgrpo")
    assert distance(expected(plain, world=world), 2 / 3 * true) <= 1e-6
    assert distance(expected(make(policy_loss_fn=loss), world=world), true) > 0.5, "without a correction"


def test_no_correction_is_biased_by_the_difference_of_the_policies():
    """The expected gradient is `sum_y (m - p)(y) g(y)`, with the mean reward of the sampler as the baseline."""
    pi, mu = both_chances()
    own = (REAL - mu @ REAL)[:, None, None] * scores().sum(axis=1)
    found = expected(make()) - true_gradient()
    np.testing.assert_allclose(found, np.einsum("y,yab->ab", mu - pi, own), atol=1e-12)


@pytest.mark.parametrize("bounds", [(1.05, None), (1.7, 0.6), (2.0, 0.5), (3.0, 0.9), (NO_BOUND, 0.7)], ids=str)
def test_bias_of_bounds_on_the_completion(bounds):
    """Truncation replaces `p` by `clip(p, lower m, upper m)`. A mask removes the completions outside the bounds. The
    moved probability limits the bias, and a mask moves at least as much as truncation from above."""
    pi, mu = both_chances()
    upper, lower = bounds[0], bounds[1] or 0.0
    outside = (pi > upper * mu) | (pi < lower * mu)
    assert outside.any() and not outside.all()
    effective = {"sequence": np.clip(pi, lower * mu, upper * mu), "sequence_mask": np.where(outside, 0.0, pi)}
    own = (REAL - mu @ REAL)[:, None, None] * scores().sum(axis=1)
    most = max(np.linalg.norm(each) for each in own)
    for mode, mass in effective.items():
        bias = expected(make(mode, *bounds)) - true_gradient()
        np.testing.assert_allclose(bias, np.einsum("y,yab->ab", mass - pi, own), atol=1e-12)
        assert 1e-3 < np.linalg.norm(bias) <= np.abs(mass - pi).sum() * most
    above = pi > upper * mu
    removed = {mode: (pi - mass)[above].sum() for mode, mass in effective.items()}
    assert removed["sequence_mask"] >= removed["sequence"] and (removed["sequence"] > 0) == above.any()


def test_bias_of_one_completion_outside_the_bounds():
    """Tests the sign and the size of the bias. Above the upper bound, truncation keeps `upper m` of `p` and a mask
    keeps nothing. Below the lower bound, truncation adds probability."""
    pi, mu = both_chances()
    order = np.argsort(pi / mu)
    own = (REAL - mu @ REAL)[:, None, None] * scores().sum(axis=1)
    top, ratio = order[-1], np.sort(pi / mu)
    upper = (ratio[-1] + ratio[-2]) / 2
    for mode, lost in {"sequence": pi[top] - upper * mu[top], "sequence_mask": pi[top]}.items():
        found = expected(make(mode, upper)) - true_gradient()
        np.testing.assert_allclose(found, -lost * own[top], atol=1e-12)
    low, lower = order[0], (ratio[0] + ratio[1]) / 2
    for mode, gained in {"sequence": lower * mu[low] - pi[low], "sequence_mask": -pi[low]}.items():
        found = expected(make(mode, NO_BOUND, lower)) - true_gradient()
        np.testing.assert_allclose(found, gained * own[low], atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("mode", DEFAULT_UPPER)
def test_bias_as_the_bounds_widen(mode):
    """The bias converges to 0 for ratios of completions, and to the bias of unbounded token ratios for ratios of
    tokens."""
    pi, mu = both_chances()
    limit = true_gradient() if "sequence" in mode else expected(make("token", NO_BOUND))
    bounds = [1.2, 1.5, 2.0, 4.0, 8.0]
    away = [distance(expected(make(mode, upper)), limit) for upper in bounds]
    assert away[0] > 0.05 and away[-1] <= 1e-9 and (pi / mu).max() < bounds[-1]
    if mode == "sequence":
        left = [np.maximum(pi - upper * mu, 0).sum() for upper in bounds]
        assert sorted(left, reverse=True) == left and left[-1] == 0


def surrogate() -> np.ndarray:
    """Returns `sum_s m(s) sum_a grad pi(a | s) Q_mu(s, a)`, computed over the states of the tree."""
    table = jnp.asarray(CURRENT)
    inner = jax.nn.softmax(jnp.asarray(SAMPLER))
    after = {1: REAL[1:4], 2: REAL[4:]}

    def total(table):
        policy = jax.nn.softmax(table)
        values = jnp.stack([jnp.asarray(REAL[0]), inner[1] @ after[1], inner[2] @ after[2]])
        first = policy[0] @ values
        return first + sum(inner[0, state] * (policy[state] @ after[state]) for state in after)

    return np.asarray(jax.grad(total)(table))


@pytest.mark.slow
def test_bias_of_the_ratios_of_tokens():
    """Without bounds, the gradient is that of the tokens of the policy, at the prefixes and with the continuations of
    the sampler. It differs from the true gradient, but has no bias for completions of one token."""
    for mode in ("token", "token_mask"):
        for world in (TWO_TOKENS, TWO_TURNS):
            found = expected(make(mode, NO_BOUND), world=world)
            np.testing.assert_allclose(found, surrogate(), atol=1e-12)
            assert distance(found, true_gradient()) > 0.1
        found = expected(make(mode, NO_BOUND), world=ONE_TOKEN)
        assert distance(found, true_gradient(world=ONE_TOKEN)) <= 1e-9


def test_bounds_on_the_ratios_of_tokens():
    """Compares truncation and masks by the ratios of single tokens with a plain sum over completions."""
    _, mu = both_chances()
    ratios = np.where(_SAMPLED, np.exp(np.asarray(logprobs(CURRENT) - logprobs(SAMPLER))), 1.0)
    upper, lower = 1.5, 0.6
    outside = (ratios > upper) | (ratios < lower)
    for mode, weights in {"token": ratios.clip(lower, upper), "token_mask": np.where(outside, 0, ratios)}.items():
        wanted = np.einsum("y,yt,ytab->ab", mu * (REAL - mu @ REAL), weights, scores())
        np.testing.assert_allclose(expected(make(mode, upper, lower)), wanted, atol=1e-12)
        assert distance(wanted, expected(make("token", NO_BOUND))) > 0.05


@pytest.mark.slow
def test_bias_of_similar_policies():
    """The policies differ as after one update. Without a correction and with ratios of tokens the bias is of first
    order in the difference. Ratios of completions have no bias if all are within the bounds."""
    gaps = [0.1, 0.01]
    true, near = true_gradient(), {gap: CURRENT + gap * DIRECTION for gap in gaps}
    for mode in (None, "token", "token_mask"):
        away = [distance(expected(make(mode), sampler=near[gap]), true) for gap in gaps]
        assert away[1] > 1e-4 and away[0] / away[1] == pytest.approx(10, rel=0.25)
    for mode in ("sequence", "sequence_mask"):
        assert all(distance(expected(make(mode), sampler=table), true) <= 1e-9 for table in near.values())


PAGE = {
    "off": (5.9, 24.8, 99.5), "token": (4.1, 16.6, 62.5), "token_mask": (4.1, 16.6, 64.1),
    "sequence": (0.0, 0.0, 29.1), "sequence_mask": (0.0, 0.0, 49.6), "token, no bound": (4.1, 16.6, 64.1),
    "sequence, no bound": (0.0, 0.0, 0.0),
}  # fmt: skip
"""The table of docs/off_policy.md: the bias in percent of the length of the true gradient, for three samplers."""


@pytest.mark.slow
def test_biases_of_the_documentation_page():
    ranges = []
    for place, gap in enumerate((0.05, 0.2, 0.8)):
        sampler = CURRENT + gap * DIRECTION
        ratios = np.asarray(chances(CURRENT) / chances(sampler))
        ranges.append((round(ratios.min(), 2), round(ratios.max(), 2)))
        for name, values in PAGE.items():
            mode, unbounded = name.split(",")[0], "," in name
            objective = make(None if mode == "off" else mode, NO_BOUND if unbounded else None)
            found = 100 * distance(expected(objective, sampler=sampler), true_gradient())
            assert found == pytest.approx(values[place], abs=0.05), (name, gap)
    assert ranges == [(0.92, 1.07), (0.72, 1.35), (0.37, 4.82)]


# --- estimators of the maximum of several completions -----------------------------------------------------------------

BINARY_ESTIMATORS = [
    ("rloo", {}), ("grpo", {"ddof": 0}), ("maxrl", {}), ("maxrl", {"truncation_order": 1}), ("maxpo", {"k": 2}),
    ("pkpo", {"k": 2}), ("pkpo", {"k": 3}), ("passk", {"k": 2}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "params"), BINARY_ESTIMATORS, ids=str)
def test_off_policy_advantages_of_successes(name, params):
    """For 0/1 rewards the expected gradient is `w(q) grad p`, where `q` is the pass rate of the sampler. The direction
    of every prompt is right, and its population weight is that of the pass rate of the sampler."""
    pi, mu = both_chances()
    rate, wanted = float(mu @ BINARY), true_gradient(BINARY)
    objective = make("sequence", NO_BOUND, advantage_estimator=name, **params)
    weight, on_policy = population_weights(name, SIZE, np.array([rate, float(pi @ BINARY)]), **params)
    assert distance(expected(objective, BINARY), weight * wanted) <= 1e-5
    if name not in ("rloo", "grpo") and params != {"truncation_order": 1}:  # the weight of grpo is constant at G = 3
        assert abs(weight / on_policy - 1) > 0.01, "which is a bias"


def gradient_of_best(k: int, others, rewards=REAL) -> np.ndarray:
    """Returns the gradient of the expected maximum of `k` completions, one of the policy, the others of this table."""
    draws = np.array(list(itertools.product(range(7), repeat=k)))
    best = jnp.asarray(rewards[draws].max(axis=1))
    rest = chances(others)[draws[:, 1:]].prod(axis=1)
    return np.asarray(jax.grad(lambda table: (chances(table)[draws[:, 0]] * rest * best).sum())(jnp.asarray(CURRENT)))


MAXIMA = {
    "maxpo": ({"k": 2}, {2: 1.0}), "pkpo": ({"k": 3}, {3: 1.0}), "maxrl": ({"truncation_order": 2}, {1: 1.0, 2: 0.5}),
}  # fmt: skip
"""Estimator, parameters, and its objective as a weighted sum of max@k, `{k: factor}`."""


@pytest.mark.parametrize("name", MAXIMA)
def test_off_policy_advantages_of_real_rewards(name):
    """The expected gradient is k times that of the maximum of one completion of the policy and k - 1 of the sampler."""
    params, factors = MAXIMA[name]
    found = expected(make("sequence", NO_BOUND, advantage_estimator=name, **params))
    mixed = sum(factor * k * gradient_of_best(k, SAMPLER) for k, factor in factors.items())
    assert distance(found, mixed) <= 1e-6
    true = sum(factor * k * gradient_of_best(k, CURRENT) for k, factor in factors.items())
    assert distance(found, true) > 0.02


@pytest.mark.parametrize("k", [1, 2, 3])
def test_mean_over_subsets_of_the_product_of_ratios_is_unbiased(k):
    """Shows why the library does not offer this correction, although it is known.

    The mean of `product of ratios x maximum` over subsets of k has the expectation max@k, and its gradient with respect
    to the log-ratios is an unbiased advantage. It needs the ratios before the advantages, and it multiplies the ratios
    of k completions.
    """
    draws = TWO_TOKENS.draws
    subsets = list(itertools.combinations(range(SIZE), k))

    def estimate(log_ratios, rewards):  # [groups, 3]
        parts = [jnp.exp(log_ratios[:, s].sum(1)) * rewards[:, s].max(axis=1) for s in map(list, subsets)]
        return sum(parts) / len(parts)

    chance = chances(SAMPLER)[draws].prod(axis=1)
    rewards = jnp.asarray(REAL[draws])

    def loss(table):
        return (chance * estimate(jnp.log(chances(table) / chances(SAMPLER))[draws], rewards)).sum()

    assert distance(jax.grad(loss)(jnp.asarray(CURRENT)), k * gradient_of_best(k, CURRENT)) <= 1e-9


# --- the KL -----------------------------------------------------------------------------------------------------------


def kl_gradient(objective, **changes) -> np.ndarray:
    """Returns the expected gradient of the KL alone. Equal rewards give zero advantages."""
    return -expected(objective, rewards=np.ones(7), **changes)


def kl_per_prefix(mode: str, prefixes) -> np.ndarray:
    """Returns the expected gradient of the KL loss at tokens of the policy, at the prefixes of this table."""
    seen = np.concatenate([[1.0], np.asarray(jax.nn.softmax(jnp.asarray(prefixes)))[0, 1:]])
    weights = jnp.asarray(seen)[:, None] * jax.nn.softmax(jnp.asarray(CURRENT))
    ref, everywhere = jax.nn.log_softmax(jnp.asarray(REFERENCE)), jnp.ones((3, 3), bool)
    total = lambda table: (weights * kl_estimate(mode, jax.nn.log_softmax(table), ref, everywhere)).sum()  # noqa: E731
    return np.asarray(jax.grad(total)(jnp.asarray(CURRENT)))


@pytest.mark.slow
@pytest.mark.parametrize("mode", others_slow(KL_LOSS_MODES, "low_var_kl"))
def test_gradient_of_the_kl_loss_with_its_own_ratio(mode):
    """Ratios of completions give every KL loss its on-policy gradient. Ratios of tokens give the gradient at the
    prefixes of the sampler. Without ratios the tokens also come from the sampler."""
    plain = {"beta": 1.0, "kl_loss_mode": mode}
    on_policy = kl_gradient(make(**plain), sampler=CURRENT)
    np.testing.assert_allclose(on_policy, kl_per_prefix(mode, CURRENT), atol=1e-12)
    for world in (TWO_TOKENS, TWO_TURNS):
        by_sequence = kl_gradient(make("sequence", NO_BOUND, sampler_is_kl=True, **plain), world=world)
        np.testing.assert_allclose(by_sequence, on_policy, atol=1e-12)
        by_token = kl_gradient(make("token", NO_BOUND, sampler_is_kl=True, **plain), world=world)
        np.testing.assert_allclose(by_token, kl_per_prefix(mode, SAMPLER), atol=1e-12)
    off = kl_gradient(make("sequence", NO_BOUND, **plain))
    np.testing.assert_allclose(off, kl_gradient(make(**plain)), atol=1e-12)
    assert np.linalg.norm(off - on_policy) > 0.05 and np.linalg.norm(by_token - off) > 0.05


def test_kl_with_the_ratio_of_trl_has_the_gradient_of_mse_kl():
    """`use_bias_correction_kl` multiplies k3 by a ratio with gradient. Its expected gradient equals that of `mse_kl`
    with the detached ratio of tokens: KL(pi || ref) of the next token, at the prefixes of the sampler."""
    rollout, ref = logprobs(SAMPLER), logprobs(REFERENCE)

    def loss(table):
        new = logprobs(table)
        per_token = jnp.exp(new - rollout) * (jnp.exp(ref - new) - (ref - new) - 1)
        return (chances(SAMPLER) * jnp.where(_SAMPLED, per_token, 0.0).sum(axis=1)).sum()

    found = jax.grad(loss)(jnp.asarray(CURRENT))
    own = kl_gradient(make("token", NO_BOUND, beta=1.0, kl_loss_mode="mse_kl", sampler_is_kl=True))
    np.testing.assert_allclose(found, own, atol=1e-12)


def test_ratio_of_the_completion_corrects_the_kl_in_the_reward():
    """The KL is a part of the reward, so the ratio of the completion corrects it."""

    def kl(table):
        return jnp.where(_SAMPLED, logprobs(table) - logprobs(REFERENCE), 0.0).sum(axis=1)

    wanted = jax.grad(lambda table: (chances(table) * kl(table)).sum())(jnp.asarray(CURRENT))
    assert distance(expected(make("sequence", NO_BOUND), np.asarray(kl(CURRENT))), np.asarray(wanted)) <= 1e-6


# --- weights and metrics ----------------------------------------------------------------------------------------------

SHAPE = (5, 4, 6)
MASK = np.arange(6) < np.random.default_rng(5).integers(0, 7, SHAPE[:2])[..., None]
MASK[0, 0] = [True, False, True, False, True, True]


def some_logprobs() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(6)
    trainer = rng.uniform(-3, 0, SHAPE)
    return jnp.asarray(trainer), jnp.asarray(trainer + rng.normal(size=SHAPE))


def trl_weights(mode: str, old, sampling, mask, clip_min, clip_max) -> np.ndarray:
    """Implements `vllm_importance_sampling_mode` of `grpo_trainer.py` in TRL 1.16.0 in NumPy."""
    difference = np.nan_to_num((old - sampling) * mask, nan=0.0)
    if mode.startswith("sequence"):
        difference = difference.sum(axis=-1, keepdims=True)
    ratio = np.exp(difference)
    if mode.endswith("truncate"):
        return np.clip(ratio, clip_min, clip_max)
    low, high = -np.inf if clip_min is None else clip_min, np.inf if clip_max is None else clip_max
    return np.where((ratio < low) | (ratio > high), 0.0, ratio)


TRL_NAMES = {
    "token": "token_truncate", "sequence": "sequence_truncate", "token_mask": "token_mask",
    "sequence_mask": "sequence_mask",
}  # fmt: skip


@pytest.mark.parametrize("bounds", [(None, 3.0), (0.5, 2.0), (0.8, None)], ids=str)
@pytest.mark.parametrize("mode", DEFAULT_UPPER)
def test_weights_equal_those_of_trl(mode, bounds):
    old, sampling = some_logprobs()
    lower, upper = bounds
    correction = SamplerCorrection(mode, lower or 0.0, NO_BOUND if upper is None else upper)
    found = correction.weights(correction.ratios(old, sampling, jnp.asarray(MASK)))
    wanted = np.broadcast_to(trl_weights(TRL_NAMES[mode], np.asarray(old), np.asarray(sampling), MASK, *bounds), SHAPE)
    np.testing.assert_allclose(np.asarray(found)[MASK], wanted[MASK], rtol=1e-12)
    assert 0.02 < np.isin(wanted[MASK], [0.0, *filter(None, bounds)]).mean() < 0.98, "some outside, some inside"


def trl_off_policy_mask(advantages, new, sampling, mask, threshold) -> np.ndarray:
    """Implements `get_off_policy_mask` of `grpo_trainer.py` in TRL in NumPy, one completion at a time."""
    kept = np.ones(mask.shape, bool)
    for place in np.ndindex(mask.shape[:2]):
        sampled = mask[place]
        divergence = sum(sampling[place][sampled] - new[place][sampled]) / max(sampled.sum(), 1)
        kept[place] = advantages[place][0] >= 0 or divergence <= threshold
    return kept


@pytest.mark.parametrize("name", sorted(name for name in POLICY_LOSSES if ":" not in name))
def test_off_policy_mask_removes_the_policy_loss_of_the_completions_of_trl(name):
    """Completions that are not dropped keep their loss and gradient bit for bit. Dropped ones keep the other terms."""
    new, sampling = some_logprobs()
    old, mask = 0.5 * new + 0.5 * sampling, jnp.asarray(MASK)
    advantages = np.random.default_rng(8).normal(size=(*SHAPE[:2], 1))
    kept = trl_off_policy_mask(advantages, np.asarray(new), np.asarray(sampling), MASK, 0.3)
    dropped = ~kept & MASK
    assert 0.1 < dropped.mean() < 0.9 and (MASK & kept & (advantages < 0)).any()

    def both(**settings):
        objective = make(policy_loss_fn=name, beta=0.3, kl_loss_mode="mse_kl", **settings)

        def total(table):
            loss, metrics = objective.token_loss(
                TokenInputs(table, old, sampling, 0.9 * new, -new, mask), jnp.asarray(advantages)
            )
            return loss.sum(), (loss, metrics)

        (_, (loss, metrics)), gradient = jax.value_and_grad(total, has_aux=True)(new)
        return np.asarray(loss), np.asarray(gradient), metrics

    loss, gradient, metrics = both(off_policy_mask_threshold=0.3)
    plain_loss, plain_gradient, _ = both()
    np.testing.assert_array_equal(loss[kept], plain_loss[kept])
    np.testing.assert_array_equal(gradient[kept], plain_gradient[kept])
    distance = np.asarray(new - 0.9 * new)
    np.testing.assert_allclose(loss[dropped], 0.3 * distance[dropped] ** 2 / 2, rtol=1e-12)
    np.testing.assert_allclose(gradient[dropped], 0.3 * distance[dropped], rtol=1e-12)
    np.testing.assert_array_equal(metrics["off_policy_mask/dropped_frac"], 1.0 - kept)
    with pytest.raises(UserError, match="needs the sampler's log-probabilities"):
        make(off_policy_mask_threshold=0.1).token_loss(
            TokenInputs(new, new, None, None, new, mask), jnp.asarray(advantages)
        )


@pytest.mark.parametrize("mode", DEFAULT_UPPER)
def test_ratios_are_detached_and_clamped_and_ignore_masked_places(mode):
    correction, (old, sampling), mask = SamplerCorrection(mode, 0.0, NO_BOUND), some_logprobs(), jnp.asarray(MASK)
    total = lambda *given: correction.weights(correction.ratios(*given, mask)).sum()  # noqa: E731
    for gradient in jax.grad(total, argnums=(0, 1))(old, sampling):
        assert not np.asarray(gradient).any()
    ratios = correction.ratios(old, sampling, mask)
    for garbage in (np.nan, np.inf, -1e30):
        found = correction.ratios(jnp.where(mask, old, garbage), jnp.where(mask, sampling, -garbage), mask)
        np.testing.assert_array_equal(found, ratios)
    far = correction.ratios(jnp.zeros(SHAPE), jnp.full(SHAPE, -30.0), mask)
    np.testing.assert_allclose(np.asarray(far)[MASK], np.exp(20.0))


@pytest.mark.parametrize("mode", DEFAULT_UPPER)
def test_on_policy_every_mode_is_bitwise_equal_to_no_correction(mode):
    """The loss and its gradient, in float32 with every term of the loss, are bitwise unchanged."""
    with jax.enable_x64(False):
        new = jnp.asarray(np.random.default_rng(7).uniform(-3, 0, SHAPE), jnp.float32)
        advantages = jnp.asarray(np.random.default_rng(8).normal(size=(*SHAPE[:2], 1)), jnp.float32)

        def both(objective):
            def total(table):
                given = TokenInputs(table, new, new, 0.9 * new, -new, jnp.asarray(MASK))
                loss = objective.token_loss(given, advantages)[0]
                return loss.sum(), loss

            return jax.jit(jax.value_and_grad(total, has_aux=True))(new)

        terms = {"beta": 0.3, "entropy_coef": 0.1, "epsilon": 0.2}
        wanted = both(make(**terms))
        for lower in (None, 0.5):
            corrected = both(make(mode, lower=lower, sampler_is_kl=True, **terms))
            jax.tree.map(np.testing.assert_array_equal, corrected, wanted)


@pytest.mark.parametrize("mode", DEFAULT_UPPER)
def test_metrics(mode):
    """The metrics are means over tokens or over completions, whatever the number of tokens of each completion."""
    correction, (old, sampling), mask = SamplerCorrection(mode, 0.5, 1.5), some_logprobs(), jnp.asarray(MASK)
    ratios = correction.ratios(old, sampling, mask)
    weights = correction.weights(ratios)
    sums = correction.metrics(ratios, weights, mask)
    means = {name: jnp.where(mask, value, 0.0).sum() / mask.sum() for name, value in sums.items()} | {"entropy": 0.25}
    found = finish_metrics(means)
    first = np.argmax(MASK, axis=-1)[..., None]
    pick = lambda values: np.take_along_axis(np.asarray(values), first, -1)[MASK.any(-1)][:, 0]  # noqa: E731
    r, w = (pick(x) if "sequence" in mode else np.asarray(x)[MASK] for x in (ratios, weights))
    outside = (r < 0.5) | (r > 1.5)
    assert {name: float(value) for name, value in found.items()} == pytest.approx(
        {
            "entropy": 0.25, "sampler_is/mean": w.mean(), "sampler_is/ratio_mean": r.mean(),
            "sampler_is/outside_frac": outside.mean(), "sampler_is/ess": w.sum() ** 2 / (len(w) * (w**2).sum()),
        }
    )  # fmt: skip
    assert 0 < outside.mean() < 1


def test_metrics_without_weights():
    """If all tokens are masked, no effective sample is left. Without tokens the metrics are NaN, which is written as
    null."""
    names = ("unit", "mean", "square", "ratio_mean", "outside_frac")
    nothing = dict(zip((f"sampler_is/{name}" for name in names), jnp.asarray([1.0, 0, 0, 5, 1]), strict=True))
    assert finish_metrics(nothing)["sampler_is/ess"] == 0
    assert all(np.isnan(value) for value in finish_metrics(dict.fromkeys(nothing, jnp.asarray(jnp.nan))).values())
    assert finish_metrics({"kl": jnp.ones(())}) == {"kl": 1.0}
