"""Tests the registry of estimators, user-defined functions in files and modules, and all checks of their input."""

from __future__ import annotations

import math
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_like.algorithms import advantages
from tunix_like.algorithms import registry as estimators
from tunix_like.algorithms.advantages import compute_advantages
from tunix_like.algorithms.registry import (
    ADVANTAGE_ESTIMATORS,
    check_parameters,
    check_rewards,
    find_estimator,
    register_advantage_estimator,
)
from tunix_like.errors import UserError

from .oracles import EVERY, NAN

BUILT_IN = ", ".join(sorted({name for name, _ in EVERY}))


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Restores the registry of built-in estimators, and unloads the modules that a test imports."""
    built_in = {name: each for name, each in ADVANTAGE_ESTIMATORS.items() if hasattr(advantages, name)}
    monkeypatch.setattr(estimators, "ADVANTAGE_ESTIMATORS", dict(built_in))
    before = set(sys.modules)
    yield built_in
    for name in set(sys.modules) - before:
        if name.startswith(("tunix_like_user_", "my_package")):
            del sys.modules[name]


# --- parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("maxlr", {}, f"unknown estimator 'maxlr'. Did you mean 'maxrl'.*{BUILT_IN}.*path/to/file.py:function"),
        ("rloo", {"k": 2}, "algorithm.k: the estimator 'rloo' does not read it .it has no parameters of its own"),
        ("grpo", {"kk": 2}, "algorithm.kk: the estimator 'grpo' does not read it .it reads ddof"),
        ("maxpo", {"truncation_order": 2}, "algorithm.truncation_order: the estimator 'maxpo' does not read it"),
        ("maxpo", {}, "algorithm.k: the estimator 'maxpo' requires it"),
        ("pkpo", {}, "algorithm.k: the estimator 'pkpo' requires it"),
        ("passk", {"k": None}, "algorithm.k: the estimator 'passk' requires it. Set algorithm.k="),
        ("maxpo", {"k": 3}, "algorithm.k: got 3; 'maxpo' needs 1 <= k <= 2, one less than algorithm.num_generations"),
        ("maxpo", {"k": 0}, "algorithm.k: got 0; 'maxpo' needs 1 <= k"),
        ("passk", {"k": 3}, "algorithm.k: got 3; 'passk' needs 1 <= k <= 2"),
        ("pkpo", {"k": 4}, r"algorithm.k: got 4; 'pkpo' needs 1 <= k <= 3, algorithm.num_generations \(3\).$"),
        ("pkpo", {"k": -1}, "algorithm.k: got -1; 'pkpo' needs 1 <= k"),
        ("maxrl", {"truncation_order": 3}, "algorithm.truncation_order: got 3.*<= 2"),
        ("maxrl", {"truncation_order": 0}, "algorithm.truncation_order: got 0"),
        ("maxpo", {"k": "2"}, "algorithm.k: got '2'; 'maxpo' needs an integer"),
        ("pkpo", {"k": 1.5}, "algorithm.k: got 1.5; 'pkpo' needs an integer"),
        ("passk", {"k": True}, "algorithm.k: got True; 'passk' needs an integer"),
        ("grpo", {"ddof": 2}, "algorithm.ddof: got 2; 'grpo' needs 0 or 1"),
    ],
)
def test_invalid_parameters_raise_a_message(name, params, message):
    with pytest.raises(UserError, match=message):
        compute_advantages([1.0, 0.0, 0.0], name, **params)


def test_limits_of_the_ranges_are_valid():
    for name, params in (
        ("maxpo", {"k": 2}),
        ("passk", {"k": 2}),
        ("pkpo", {"k": 3}),
        ("maxrl", {"truncation_order": 2}),
    ):
        assert compute_advantages([1.0, 0.0, 0.0], name, **params)[0] > 0
    assert check_parameters("maxpo", {"k": np.int64(3)}, 4) == {"k": 3}


def test_error_message_names_the_config_section():
    with pytest.raises(UserError, match=r"data source 'gsm8k'.k: got 4"):
        check_parameters("maxpo", {"k": 4}, 4, "data source 'gsm8k'")


def test_declarations_of_the_built_in_estimators():
    assert find_estimator("maxrl").parameters() == {"truncation_order": None}
    assert set(find_estimator("maxpo").parameters()) == {"k"}
    assert check_parameters("grpo", {"k": None, "ddof": 0}, 4) == {"ddof": 0}
    for name, takes in (("maxrl", "non-negative"), ("passk", "binary"), ("rloo", "any"), ("reinforce_pp", "any")):
        assert find_estimator(name).takes({}) == takes
    assert find_estimator("maxrl").takes({"truncation_order": 2}) == "any"


# --- rewards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "name", "params", "message"),
    [
        (["a", 0], "rloo", {}, "rewards: expected numbers"),
        ([[1, 0], [1]], "rloo", {}, "rewards: expected numbers"),
        ([], "rloo", {}, "rewards: expected shape"),
        (1.0, "rloo", {}, "rewards: expected shape"),
        (np.zeros((2, 2, 2)), "rloo", {}, r"rewards: expected shape .*\[2, 2, 2\]"),
        ([1, 0, 0], "rloo", {"lengths": [1, 2]}, r"lengths: expected the shape of rewards, \[3\], got \[2\]"),
        ([[1, 0], [0, 1]], "opo", {"lengths": [[1, 2], [1]]}, r"lengths: expected the shape of rewards, \[2, 2\]"),
        ([1, 0], "opo", {"lengths": [1, -2]}, "lengths: expected integers >= 0"),
        ([1, 0], "opo", {"lengths": [1, 2.5]}, "lengths: expected integers >= 0"),
        ([[1, 0], [0, 2e15]], "rloo", {}, r"group 1, completion 1: the reward 2e\+15 has an absolute value above 1e15"),
        ([1, 0, -math.inf], "rloo", {}, "group 0, completion 2: the reward -inf has an absolute value above 1e15"),
        (
            [[1, 0], [0, -0.5]],
            "maxrl",
            {},
            "group 1, completion 1: the reward -0.5 is negative, but the estimator 'maxrl' accepts non-negative "
            "rewards only. Set algorithm.truncation_order, algorithm.binarize=true, or return rewards >= 0",
        ),
        (
            [[1, 0, 1], [NAN, 0.1, 1]],
            "passk",
            {"k": 1},
            "group 1, completion 1: the reward 0.1 is not 0 or 1, which the estimator 'passk' requires. "
            "Set algorithm.binarize=true",
        ),
        ([-1, 0, 1], "passk", {"k": 1}, "completion 0: the reward -1 is not 0 or 1"),
    ],
)
def test_invalid_rewards_raise_a_message(rewards, name, params, message):
    with pytest.raises(UserError, match=message):
        compute_advantages(rewards, name, **params)


def test_valid_rewards_are_accepted():
    assert np.isfinite(compute_advantages([1.0, -0.5, 0.0], "maxrl", truncation_order=2)).all()
    assert np.isfinite(compute_advantages([1e15, -1e15, 0.0], "rloo")).all()
    scored = np.array([[True, False, True]])
    check_rewards("maxrl", {}, np.array([[1.0, -7.0, -0.0]]), scored)
    check_rewards("passk", {"k": 1}, np.array([[1.0, 0.5, 0.0]]), scored)
    check_rewards("rloo", {}, np.array([[1.0, 2e15, 0.0]]), scored)


def test_error_message_uses_the_location_of_the_caller():
    with pytest.raises(UserError, match="prompt 70, sample 2: the reward -1 is negative"):
        rewards = np.array([[0.0, 1.0, 1.0], [0.0, 1.0, -1.0]])
        check_rewards("maxrl", {}, rewards, rewards < 2, lambda group, i: f"prompt {group * 70}, sample {i}")


def test_error_message_of_another_estimator_does_not_suggest_the_remedy_of_maxrl():
    register_advantage_estimator("root", takes="non-negative")(lambda rewards, *, scored, lengths: rewards**0.5)
    with pytest.raises(
        UserError, match="the estimator 'root' accepts non-negative.*Set algorithm.binarize=true, or return"
    ):
        compute_advantages([1, -1], "root")


# --- the registry -----------------------------------------------------------------------------------------------------


def test_a_registered_estimator_is_traced_with_its_own_parameters():
    seen = []

    @register_advantage_estimator("long_is_bad")
    def long_is_bad(rewards, *, scored, lengths, price: float, floor: float = 0.0):
        seen.append(isinstance(rewards, jax.core.Tracer) and isinstance(lengths, jax.core.Tracer))
        return jnp.maximum(rewards - price * lengths, floor)

    values = compute_advantages([[3, 1], [2, 9]], "long_is_bad", lengths=[[1, 2], [3, 4]], price=0.5)
    np.testing.assert_array_equal(values, [[2.5, 0.0], [0.5, 7.0]])
    assert seen == [True]
    with pytest.raises(UserError, match="algorithm.estimator_params.price: the estimator 'long_is_bad' requires it"):
        compute_advantages([3, 1], "long_is_bad")


def test_declared_properties_of_a_registered_estimator_are_used():
    @register_advantage_estimator(
        "mine",
        zero_when_constant=lambda params: params["k"] > 1,
        takes=lambda params: "binary" if params["k"] > 2 else "any",
        headroom={"k": 2},
        scored_beyond_k=3,
        sparse=True,
    )
    def mine(rewards, *, scored, lengths, k: int):
        return rewards

    found = find_estimator("mine")
    assert [found.zero_when_constant({"k": k}) for k in (1, 2)] == [False, True]
    assert [found.least_scored({"k": k}) for k in (1, 2)] == [4, 5] and found.sparse
    assert compute_advantages([2, 0, 1, 1], "mine", k=2).tolist() == [2, 0, 1, 1]
    with pytest.raises(UserError, match="'mine' needs 1 <= k <= 2"):
        compute_advantages([1, 0, 0, 0], "mine", k=3)
    with pytest.raises(UserError, match="completion 0: the reward 2 is not 0 or 1, which the estimator 'mine'"):
        compute_advantages([2, 0, 0, 0, 0], "mine", k=3)


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        (
            lambda rewards, lengths: rewards[0],
            r"'mine' returned \(2,\) for rewards of shape \[2, 2\] .groups, completion",
        ),
        (
            lambda rewards, lengths: (rewards, lengths),
            "'mine' returned .*; it must return one advantage per completion",
        ),
        (lambda rewards, lengths: 1.0 / lengths, "group 0, completion 1: the advantage estimator 'mine' returned inf"),
        (
            lambda rewards, lengths: 0 * rewards / lengths,
            "group 0, completion 1: .* 'mine' returned nan; it must return",
        ),
    ],
)
def test_invalid_return_values_of_an_estimator_raise_a_message(returns, message):
    register_advantage_estimator("mine")(lambda rewards, *, scored, lengths: returns(rewards, lengths))
    with pytest.raises(UserError, match=message):
        compute_advantages([[1, 0], [0, 1]], "mine", lengths=[[1, 0], [1, 1]])


def test_unscored_completions_get_zero_whatever_the_estimator_returns():
    register_advantage_estimator("mine")(lambda rewards, *, scored, lengths: jnp.where(scored, rewards, jnp.nan))
    np.testing.assert_array_equal(compute_advantages([3, None, 1], "mine"), [3, 0, 1])


def test_default_properties_of_a_registered_estimator():
    register_advantage_estimator("plain")(lambda rewards, *, scored, lengths: rewards)
    found = find_estimator("plain")
    assert (found.zero_when_constant({}), found.takes({}), found.sparse) == (False, "any", False)
    assert found.least_scored({}) == 2


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("maxrl", {}, "'maxrl' is already registered; choose another name"),
        (
            "my.estimator",
            {},
            "'my.estimator': names with '.' or ':' are reserved for files and modules; choose another",
        ),
        ("file:mine", {}, "'file:mine': names with '.' or ':' are reserved for files and modules"),
        ("mine", {"takes": "positive"}, "'mine': takes='positive'.*non-negative"),
    ],
)
def test_invalid_registration_raises_an_error_and_adds_nothing(registry, name, options, message):
    with pytest.raises(UserError, match=message):
        register_advantage_estimator(name, **options)(lambda rewards, *, scored, lengths: rewards)
    assert registry == estimators.ADVANTAGE_ESTIMATORS, "nothing was added"
    assert find_estimator("maxrl").function is advantages.maxrl


# --- functions in files and modules -----------------------------------------------------------------------------------

CODE = textwrap.dedent("""\
    import jax.numpy as jnp
    from tunix_like import register_advantage_estimator

    def twice(rewards, *, scored, lengths, power: int = 1):
        return jnp.where(scored, 2 * rewards**power, 0.0)

    @register_advantage_estimator("sum_of_roots", takes="non-negative", zero_when_constant=True, headroom={"k": 1})
    def roots(rewards, *, scored, lengths, k: int):
        return jnp.where(scored, k * rewards**0.5, 0.0)

    def anything(rewards, **others):
        return rewards * others["scored"] * others["lengths"]

    def short(rewards, *, lengths):
        return rewards

    def shorter(rewards, *, scored):
        return rewards

    NUMBER = 3
    """)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    return path


def test_estimator_from_a_file(file):
    place = f"{file}:twice"
    np.testing.assert_array_equal(compute_advantages([3, NAN, -1], place), [6, 0, -2])
    np.testing.assert_array_equal(compute_advantages([3, NAN, -1], place, power=2), [18, 0, 2])
    found = find_estimator(place)
    assert (found.zero_when_constant({}), found.takes({}), found.sparse) == (False, "any", False)
    with pytest.raises(
        UserError, match="algorithm.k: the estimator '.*mine.py:twice' does not read it .it reads power"
    ):
        compute_advantages([3, 1], place, k=1)
    np.testing.assert_array_equal(
        compute_advantages([[3, NAN]], f"{file}:anything", lengths=[[2, 5]]), [[6, 0]], "takes whatever it is given"
    )


@pytest.mark.parametrize("spelling", ["my_package.inner.twice", "my_package.inner:twice"])
def test_estimator_from_a_module(tmp_path, monkeypatch, spelling):
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").write_text("")
    (tmp_path / "my_package" / "inner.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    np.testing.assert_array_equal(compute_advantages([3, 1], spelling), [6, 2])


def test_estimator_from_a_file_that_registers_it_keeps_the_registered_properties(file):
    place = f"{file}:roots"
    np.testing.assert_array_equal(compute_advantages([4, 1, 0], place, k=2), [4, 2, 0])
    assert find_estimator(place) is find_estimator("sum_of_roots")
    assert find_estimator(place).zero_when_constant({"k": 1})
    with pytest.raises(
        UserError, match="group 0, completion 1: the reward -1 is negative, but the estimator '.*:roots'"
    ):
        compute_advantages([4, -1, 0], place, k=2)
    with pytest.raises(UserError, match="algorithm.k: got 3; '.*mine.py:roots' needs 1 <= k <= 2"):
        compute_advantages([4, 1, 0], place, k=3)
    np.testing.assert_array_equal(compute_advantages([4, 1, 0], "sum_of_roots", k=1), [2, 1, 0])


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("{folder}/nobody.py:twice", "algorithm.advantage_estimator '.*': the file .*nobody.py does not exist"),
        ("{folder}/mine.py:twise", "has no function 'twise'; it has: anything, roots, short, shorter, twice"),
        ("{folder}/mine.py:NUMBER", "has no function 'NUMBER'"),
        (
            "{folder}/mine.py:short",
            "the function does not accept the keyword 'scored'; write def f.rewards, ., scored, lengths",
        ),
        ("{folder}/mine.py:shorter", "the function does not accept the keyword 'lengths'"),
        ("{folder}/broken.py:twice", "broken.py failed to load: NameError: name 'nothing' is not defined"),
        ("{folder}/thief.py:f", "thief.py failed to load.*advantage estimator 'rloo' is already registered"),
        (
            "my_package_nowhere.twice",
            "my_package_nowhere failed to import.*ModuleNotFoundError.*path/to/file.py:function",
        ),
        ("builtins.max", "the function does not accept the keyword 'scored'"),
    ],
)
def test_location_without_an_estimator_raises_a_message(file, place, message):
    (file.parent / "broken.py").write_text("nothing\n")
    (file.parent / "thief.py").write_text(
        "from tunix_like import register_advantage_estimator\n"
        "f = register_advantage_estimator('rloo')(lambda rewards, *, scored, lengths: rewards)\n"
    )
    with pytest.raises(UserError, match=message):
        compute_advantages([1, 0], place.format(folder=file.parent))
    with pytest.raises(UserError, match=f"unknown estimator 'x'.*Valid: {BUILT_IN}(, sum_of_roots)?\\."):
        find_estimator("x")
