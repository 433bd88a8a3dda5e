"""Advantages of turns against the exact policy gradient of a small decision process: all groups of trajectories are
enumerated, in float64. What is biased is shown to be biased."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import numpy as np
import pytest

from tunix_like import UserError, compute_advantages, turn_advantages
from tunix_like.algorithms import turns
from tunix_like.algorithms.turns import BASELINES

STATES = 3
MOST_TURNS = 4
LOGITS = np.array([[0.3, -0.4], [-0.2, 0.5], [0.1, 0.8]])
STOPS = np.array([[0.2, 0.6], [0.5, 0.3], [0.7, 0.4]])
"""The chance that a trajectory ends after an action in a state: it depends on the action."""
NEXT = np.array([[1, 2], [2, 0], [0, 1]])
REWARDS = np.array([[0.7, -0.4], [1.3, 0.2], [-0.9, 0.5]])
OUTCOMES = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
"""Of the last turn, for estimators of an outcome."""
POLICY = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)


POTENTIALS = [0.4, -1.1, 0.8]


class Trajectory(NamedTuple):
    chance: float
    rewards: list[float]
    scores: list[np.ndarray]  # the gradient of the log-probability of each turn
    outcome: float
    states: list[int]  # in which the turns begin

    @property
    def potentials(self):
        return [POTENTIALS[state] for state in self.states]


def trajectories(most=MOST_TURNS):
    """Returns every trajectory of at most `most` turns."""
    found = []

    def walk(states, chance, rewards, scores):
        state = states[-1]
        for action in range(2):
            score = np.zeros_like(LOGITS)
            score[state] = (np.arange(2) == action) - POLICY[state]
            here = chance * POLICY[state, action]
            gained, learned = [*rewards, REWARDS[state, action]], [*scores, score]
            last = len(gained) == most
            stop = 1.0 if last else STOPS[state, action]
            found.append(Trajectory(here * stop, gained, learned, OUTCOMES[state, action], states))
            if not last:
                walk([*states, NEXT[state, action]], here * (1 - stop), gained, learned)

    walk([0], 1.0, [], [])
    return found


ALL = trajectories()
SHORTER = trajectories(3)


def expected(advantages_of, size=2, among=ALL):
    """Returns the expectation of `1/n sum_i sum_t A_i,t grad log pi` over all groups of `size` trajectories."""
    total = np.zeros_like(LOGITS)
    for group in itertools.combinations_with_replacement(among, size):
        arrangements = len(set(itertools.permutations(map(id, group))))
        chance = arrangements * np.prod([each.chance for each in group])
        for each, advantages in zip(group, advantages_of(group), strict=True):
            for advantage, score in zip(advantages, each.scores, strict=True):
                total += chance / size * advantage * score
    return total


def exact(weights_of, among=ALL):
    """Returns `E[sum_t weight_t grad log pi(turn t)]` for the weights of a trajectory's turns."""
    return sum(each.chance * w * s for each in among for w, s in zip(weights_of(each), each.scores, strict=True))


def returns(rewards, gamma=1.0):
    return [sum(gamma ** (s - t) * rewards[s] for s in range(t, len(rewards))) for t in range(len(rewards))]


def whole(each):
    """Returns the weights of the gradient of the expected sum of rewards: every turn times the whole return."""
    return [sum(each.rewards)] * len(each.rewards)


GRADIENT = exact(whole)


def test_the_process_is_a_distribution_with_trajectories_of_every_length():
    assert sum(each.chance for each in ALL) == pytest.approx(1, abs=1e-15)
    assert {len(each.rewards) for each in ALL} == {1, 2, 3, 4}
    step = 1e-6
    numeric = np.zeros_like(LOGITS)
    for place in np.ndindex(LOGITS.shape):
        for sign in (1, -1):
            moved = LOGITS.copy()
            moved[place] += sign * step
            policy = np.exp(moved) / np.exp(moved).sum(axis=1, keepdims=True)
            numeric[place] += sign / (2 * step) * value(policy)
    np.testing.assert_allclose(GRADIENT, numeric, atol=1e-9)


def value(policy, state=0, turn=1):
    """Returns the expected sum of the rewards from a state on, by recursion."""
    later = [0.0, 0.0] if turn == MOST_TURNS else [value(policy, NEXT[state, a], turn + 1) for a in range(2)]
    return sum(policy[state, a] * (REWARDS[state, a] + (1 - STOPS[state, a]) * later[a]) for a in range(2))


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize(
    "size, among", [(2, ALL), pytest.param(3, SHORTER, marks=pytest.mark.slow)], ids=["pairs", "groups of three"]
)
def test_rloo_and_drgrpo_are_unbiased(baseline, size, among):
    gradient = exact(whole, among)
    for name, factor in (("rloo", 1), ("drgrpo", (size - 1) / size)):

        def of_turns(group, name=name):
            states = [each.states for each in group]
            return turn_advantages([each.rewards for each in group], name, baseline=baseline, states=states)

        np.testing.assert_allclose(expected(of_turns, size, among), factor * gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("gamma", [0.0, 0.6])
def test_a_discount_gives_the_direction_of_rewards_to_go(baseline, gamma):
    """The expectation is `E[sum_t R_t grad log pi]`. Times `gamma^(t-1)` it is the gradient of the discounted sum."""

    def plain(group):
        states = [each.states for each in group]
        return turn_advantages([each.rewards for each in group], gamma=gamma, baseline=baseline, states=states)

    def weighted(group):
        return [gamma ** np.arange(len(advantages)) * advantages for advantages in plain(group)]

    directions = exact(lambda each: returns(each.rewards, gamma), SHORTER)
    np.testing.assert_allclose(expected(plain, 2, SHORTER), directions, atol=1e-12)
    of_start = exact(lambda each: [sum(gamma**s * r for s, r in enumerate(each.rewards))] * len(each.rewards), SHORTER)
    np.testing.assert_allclose(expected(weighted, 2, SHORTER), of_start, atol=1e-12)


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("name, gamma", [("rloo", 1.0), ("rloo", 0.6), ("drgrpo", 1.0), ("maxrl", 1.0)])
def test_potentials_change_the_advantages_and_not_their_expectation(name, gamma, baseline, monkeypatch):
    known = functools.cache(lambda outcomes: compute_advantages(outcomes, name))
    monkeypatch.setattr(turns, "compute_advantages", lambda outcomes, *_, **__: known(tuple(outcomes.tolist())))

    def of_turns(group, shaped):
        potentials = [each.potentials for each in group] if shaped else None
        rows = [[*each.rewards[:-1], each.outcome] for each in group]
        states = [each.states for each in group]
        return turn_advantages(rows, name, gamma, baseline, potentials=potentials, states=states)

    group = [SHORTER[1], SHORTER[4], SHORTER[11]]
    if baseline != "state":  # in which a potential cancels
        one = np.concatenate(of_turns(group, True))
        assert not np.allclose(one, np.concatenate(of_turns(group, False)), atol=0.01)
    difference = [expected(functools.partial(of_turns, shaped=shaped), 2, SHORTER) for shaped in (True, False)]
    np.testing.assert_allclose(*difference, rtol=0, atol=1e-12)


def test_potentials_are_rewards_between_states():
    """`r_t + gamma Phi(s_t+1) - Phi(s_t)`, with 0 after the end: the same advantages as with these rewards."""
    group = [ALL[3], ALL[8], ALL[12]]
    gamma = 0.7
    shaped = []
    for each in group:
        after = [*each.potentials[1:], 0.0]
        shaped.append([r + gamma * b - a for r, a, b in zip(each.rewards, each.potentials, after, strict=True)])
    found = turn_advantages(
        [each.rewards for each in group], "grpo", gamma, potentials=[each.potentials for each in group]
    )
    for one, two in zip(found, turn_advantages(shaped, "grpo", gamma), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-12)


def test_turns_in_equal_states_are_compared_with_those_of_other_trajectories():
    rows = [[1.0, 2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    states = [[None, "a", "a"], [None, "a"], [None, "b"]]
    first, second, third = turn_advantages(rows, baseline="state", states=states)
    unknown = turn_advantages(rows, baseline="state", states=[[None] * len(row) for row in rows])
    for one, two in zip(unknown, turn_advantages(rows), strict=True):
        np.testing.assert_allclose(one, two, err_msg="states that are not known are equal to none")
    np.testing.assert_allclose(first, [6 - (9 + 13) / 2, 5 - 5, 3 - 5], err_msg="not with its own turns in `a`")
    np.testing.assert_allclose(second, [9 - (6 + 13) / 2, 5 - (5 + 3) / 2])
    np.testing.assert_allclose(third, [13 - (6 + 9) / 2, 7 - (5 + 5) / 2], err_msg="nobody else was in `b`: by index")


def own_mean_of_state(group):
    """Subtracts the mean over all turns of the group that begin in the state, the own ones among them (GiGPO's groups
    of steps, arXiv 2505.10978, without their standard deviation)."""
    visits = [(s, r) for each in group for s, r in zip(each.states, returns(each.rewards), strict=True)]
    return [
        [
            r - np.mean([other for s, other in visits if s == state])
            for state, r in zip(each.states, returns(each.rewards), strict=True)
        ]
        for each in group
    ]


def test_the_mean_over_all_turns_in_a_state_is_biased():
    found = expected(own_mean_of_state, 3, SHORTER)
    gradient = exact(whole, SHORTER)
    factor = (found * gradient).sum() / (gradient**2).sum()
    assert np.abs(found - factor * gradient).max() > 0.005
    print(factor, np.linalg.norm(found - factor * gradient) / np.linalg.norm(factor * gradient))


def own_mean(group):
    """Subtracts the mean over the trajectories that reach the turn, the own one among them."""
    all_returns = [returns(each.rewards) for each in group]
    return [
        [r - np.mean([other[t] for other in all_returns if len(other) > t]) for t, r in enumerate(own)]
        for own in all_returns
    ]


def test_the_usual_mean_over_those_that_reach_a_turn_is_biased():
    found = expected(own_mean, 3, SHORTER)
    gradient = exact(whole, SHORTER)
    factor = (found * gradient).sum() / (gradient**2).sum()
    assert np.abs(found - factor * gradient).max() > 0.005, "not even its direction is that of the gradient"


def test_grpo_is_biased_as_for_whole_completions():
    found = expected(lambda group: turn_advantages([each.rewards for each in group], "grpo"))
    factor = (found * GRADIENT).sum() / (GRADIENT**2).sum()
    assert np.abs(found - factor * GRADIENT).max() > 0.01


@pytest.mark.parametrize(
    "name, parameters, baseline",
    [("maxrl", {}, "fixed_index"), ("maxrl", {}, "reached"), ("maxpo", {"k": 2}, "fixed_index")],
)
def test_an_outcome_keeps_its_advantage_and_the_rewards_before_it_are_credited_by_turn(
    name, parameters, baseline, monkeypatch
):
    """The expectation is that of the estimator on outcomes plus the gradient of the other rewards."""
    known = functools.cache(lambda outcomes: compute_advantages(outcomes, name, **parameters))  # it compiles each time
    monkeypatch.setattr(turns, "compute_advantages", lambda outcomes, *_, **__: known(tuple(outcomes.tolist())))

    def of_turns(group):
        rows = [[*each.rewards[:-1], each.outcome] for each in group]
        return turn_advantages(rows, name, baseline=baseline, turn_coef=0.3, **parameters)

    def by_outcome(group):
        advantages = known(tuple(each.outcome for each in group))
        return [[float(a)] * len(each.rewards) for a, each in zip(advantages, group, strict=True)]

    before = exact(lambda each: [sum(each.rewards[:-1])] * len(each.rewards), SHORTER)
    expectation = expected(by_outcome, 3, SHORTER) + 0.3 * before
    np.testing.assert_allclose(expected(of_turns, 3, SHORTER), expectation, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["rloo", "grpo", "drgrpo", "maxrl"])
@pytest.mark.parametrize("baseline", BASELINES)
def test_one_turn_is_a_completion(name, baseline):
    rewards = [1.0, 0.0, 0.25, 0.0, None]
    found = turn_advantages([[reward] for reward in rewards], name, baseline=baseline, states=[["start"]] * 5)
    whole = compute_advantages(np.array(rewards, float), name)
    np.testing.assert_allclose(np.concatenate(found), whole, rtol=1e-5, atol=1e-7)


def test_what_could_not_be_scored_is_in_no_baseline():
    rows = [[1.0, 2.0, 3.0], [4.0, None, 5.0], [7.0]]
    first, second, third = turn_advantages(rows)
    np.testing.assert_allclose(first, [6 - 7, 5 - 0, 3 - 5 / 2])
    np.testing.assert_allclose(second, [0, 0, 5 - 3 / 2])
    np.testing.assert_allclose(third, [7 - 6])
    first, second, third = turn_advantages(rows, baseline="reached")
    np.testing.assert_allclose(first, [6 - 7, 5, 3 - 5])
    np.testing.assert_allclose(second, [0, 0, 5 - 3])
    assert [list(row) for row in turn_advantages([[None], [2.0]])] == [[0.0], [0.0]], "no other return is known"
    assert [list(row) for row in turn_advantages([[2.0, 1.0], [2.0, 1.0]])] == [[0.0, 0.0]] * 2
    assert [list(row) for row in turn_advantages([[0.0, 1.0], [1.0, 0.0]], "grpo")] == [[0.0, 0.0]] * 2


@pytest.mark.parametrize(
    "arguments, named",
    [
        (([[1.0], [0.0]], "ppo"), "advantage_estimator"),
        (([[1.0], [0.0]], "rlo"), "unknown estimator 'rlo'"),
        (([[1.0], [0.0]], "rloo", 1.5), "gamma"),
        (([[1.0], [0.0]], "rloo", 1.0, "reach"), "'reached'"),
        (([[1.0]],), "at least two"),
        (([[1.0], []],), r"turn_rewards\[1\]"),
        (([[1.0], [0.0, float("nan")]],), r"turn_rewards\[1\]\[1\]"),
    ],
)
def test_wrong_arguments(arguments, named):
    with pytest.raises(UserError, match=named):
        turn_advantages(*arguments)


@pytest.mark.parametrize(
    "arguments, named",
    [
        ({"baseline": "state"}, "states"),
        ({"baseline": "state", "states": [[0], [0, 1]]}, "states"),
        ({"potentials": [[0.0]]}, "potentials"),
        ({"potentials": [[0.0], [float("inf")]]}, "potentials"),
    ],
)
def test_wrong_states_and_potentials(arguments, named):
    with pytest.raises(UserError, match=named):
        turn_advantages([[1.0], [0.0]], **arguments)


def test_parameters_are_those_of_the_estimator():
    for name, parameters, named in (("grpo", {"ddof": 5}, "ddof"), ("rloo", {"k": 2}, "k"), ("maxpo", {"k": 9}, "k")):
        with pytest.raises(UserError, match=rf"algorithm\.{named}"):
            turn_advantages([[1.0], [0.0]], name, **parameters)
