"""Tests the scoring of a batch: sums computed by hand, unscored completions, failures that name the function, and the
registry of names."""

import asyncio
import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from tests.rewards import misbehaving
from tunix_like.config.load import load
from tunix_like.errors import UserError
from tunix_like.rewards import REWARDS, close_pools, pooled, register_reward_fn, resolve, score, verl_compatible
from tunix_like.rewards.built_in import by_source
from tunix_like.rewards.registry import label_of, labels_of
from tunix_like.rewards.services import waiting
from tunix_like.rollout.episodes import Episode, with_environment
from tunix_like.runs.reward_functions import reward_entries

THREE = ["a", "bb", "ccc"]


def run(*functions, columns=None, group_size=3):
    named = [(f"f{i}", f, weight) for i, (f, weight) in enumerate(functions)]
    return score(named, ["p"] * 3, THREE, columns or {}, group_size)


def constant(values):
    return lambda prompts, completions, **_: values


def test_weighted_sum_by_hand():
    got = run((constant([1, 0, 2.5]), 2.0), (constant([-1, 4, 0]), 0.5))
    assert got.total.tolist() == [1.5, 2.0, 5.0] and got.total.dtype == np.float64
    assert got.scored.tolist() == [True] * 3
    assert got.by_function["f0"].tolist() == [1, 0, 2.5] and got.by_function["f1"].tolist() == [-1, 4, 0]


NAN = float("nan")


def abstaining(workers):
    """Returns functions that give 1 or 4 to each completion, except those whose text says that they do not apply."""
    functions = {"one": one_or_none, "four": four_or_none}
    pool = pooled(functions, workers=1) if workers else functions
    return [("one", pool["one"], 1.0), ("four", pool["four"], 0.5)]


def one_or_none(completions):
    return [None if text in ("two", "none") else NAN if text == "nan" else 1.0 for text in completions]


def four_or_none(completions):
    return [None if text in ("one", "none") else "x" if text == "fails" else 4.0 for text in completions]


@pytest.mark.parametrize("workers", [False, True])
def test_functions_that_do_not_apply_leave_the_others(workers):
    """None means that a function does not apply to a completion, NaN and failures that it cannot be scored."""
    texts = ["both", "one", "two", "none", "nan", "fails"]
    functions = abstaining(workers)
    got = score(functions, ["p"] * 6, texts, {}, 3)
    close_pools(function for _, function, _ in functions)
    np.testing.assert_array_equal(got.total, [3, 1, 2, NAN, NAN, NAN])
    assert got.failed.tolist() == [False] * 4 + [True, True] and got.errors.tolist() == [False] * 5 + [True]
    np.testing.assert_array_equal(got.by_function["one"], [1, 1, NAN, NAN, NAN, 1])
    joined = got.join(got.pick(np.array([0, 3])))
    assert joined.scored.tolist() == [True] * 3 + [False] * 3 + [True, False] and joined.failed.sum() == 2


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([([1, 2], 1.0), ([None, None], 0.0)], [1, 2]),
        ([([None, 2], 1.0), ([3, None], 1.0)], [3, 2]),
        ([([None, None], 1.0)], [NAN, NAN]),
        ([([1, 2], 1.0), ([NAN, None], 0.0)], [NAN, 2]),
        ([([1, 2], 1.0), (["x", None], 0.0)], [NAN, 2]),
        ([([1, 2], 1.0), (np.array([np.nan, 1]), 1.0)], [NAN, 3]),
        ([([None, -2], 2.0), ([None, None], 1.0), ([None, 1], -1.0)], [NAN, -5]),
        ([(np.array([None, 5], object), 1.0), ([1, 1], 1.0)], [1, 6]),
    ],
)
def test_totals_of_functions_that_do_not_apply(values, expected):
    functions = [(f"f{i}", constant(each), weight) for i, (each, weight) in enumerate(values)]
    np.testing.assert_array_equal(score(functions, ["p"] * 2, ["a", "b"], {}, 2).total, expected)


def test_an_environment_is_a_function_that_applies():
    scores = score([("one", one_or_none, 1.0)], ["p"] * 4, ["a", "two", "nan", "a"], {}, 2)
    episodes = [Episode([], 1, False, 0, reward, {}, None) for reward in (0.5, 0.5, 0.5, NAN)]
    got = with_environment(scores, episodes)
    np.testing.assert_array_equal(got.total, [1.5, 0.5, NAN, NAN])
    assert got.failed.tolist() == [False, False, True, True]


def test_nested_functions_keep_none(monkeypatch):
    """`by_source`, and an object of this library that is called directly, return None where a function does."""
    monkeypatch.setitem(REWARDS, "some", lambda completions, **_: [None, NAN])
    given = {"prompts": ["p"] * 2, "completions": ["a", "b"]}
    found = by_source(**given, source_reward=["some"] * 2)
    assert found[0] is None and found[1] != found[1]

    async def one(completion):
        return {"a": None, "b": 2.0}[completion]

    assert waiting(one)(**given) == [None, 2.0]


@pytest.mark.parametrize(
    "values",
    [
        (1, 0, 1),
        [True, False, True],
        np.array([1, 0, 1], np.float32),
        np.array([True, False, True]),
        jnp.array([1.0, 0.0, 1.0], jnp.bfloat16),
        [np.float32(1), np.bool_(False), np.int64(1)],
        [jnp.float32(1), jnp.zeros(()), jnp.array(True)],
        [np.array(1.0), 0, 1],
    ],
)
def test_accepted_values(values):
    assert run((constant(values), 1.0)).total.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    "values, failing, message",
    [
        ([1, 2], [0, 1, 2], "'f0' returned 2 values for 3 completions"),
        (None, [0, 1, 2], "'f0' must return one number per completion; it returned None"),
        (1.0, [0, 1, 2], "'f0' must return one number per completion"),
        ("101", [0, 1, 2], "'f0' must return one number per completion"),
        ({0: 1}, [0, 1, 2], "'f0' must return one number per completion"),
        ([1, "1", "x"], [1, 2], "'f0': value 1, '1', is not a number"),
        ([1, 1, [1]], [2], "'f0': value 2, [1], is not a number"),
        (np.ones((3, 1)), [0, 1, 2], "value 0, [1.0], is not a number"),
        ([0, 1 + 1j, 0], [1], "value 1, (1+1j), is not a number"),
        ([0, float("inf"), 0], [1], "value 1, inf, is not within +-1e+15"),
        ([0, 0, -1.1e15], [2], "value 2, -1100000000000000.0, is not within"),
        ([0, 10**400, 0], [1], "value 1, 1000"),
    ],
)
def test_bad_values(values, failing, message):
    got = run((constant(values), 1.0))
    assert np.flatnonzero(got.errors).tolist() == failing == np.flatnonzero(~got.scored).tolist()
    assert not got.timeouts.any() and message in got.first_failure
    assert f"Prompt: 'p'\nCompletion: {THREE[failing[0]]!r}" in got.first_failure


def test_function_that_raises_is_called_again_with_fewer_completions():
    """The function is called with all completions, then with whole groups, then with single ones. Only the completion
    for which it raises is unscored."""
    calls = []

    def broken(completions, **_):
        calls.append(completions)
        if "dddd" in completions:
            raise KeyError("gold")
        return [len(text) for text in completions]

    completions = ["a", "bb", "ccc", "dddd"]
    got = score([("broken", broken, 2.0), ("one", constant([1] * 4), 1.0)], ["p"] * 4, completions, {}, 2)
    np.testing.assert_array_equal(got.total, [3, 5, 7, np.nan])
    assert got.errors.tolist() == [False, False, False, True] and got.by_function["one"].tolist() == [1] * 4
    assert calls == [completions, completions[:2], completions[2:], ["ccc"], ["dddd"]]
    assert got.first_failure.startswith("Reward function 'broken' raised KeyError: 'gold'\nTraceback")
    assert "in broken" in got.first_failure and "calls.py" not in got.first_failure
    assert got.first_failure.endswith("Completion: 'dddd'")


def test_failure_shows_the_users_line_above_calls_of_libraries():
    def user(completions, **_):
        return verl_compatible(lambda **_: json.loads("{"))(completions=completions, answer=["1"] * len(completions))

    got = score([("user", user, 1.0)], ["p"], ["a"], {}, 1)
    assert "in user" in got.first_failure and "json" in got.first_failure and "calls.py" not in got.first_failure


@pytest.mark.parametrize(
    "error", [SystemExit("leaving"), asyncio.CancelledError("gone"), RecursionError(), UserError("the row is bad")]
)
def test_no_error_of_a_function_in_this_process_propagates(error):
    def broken(completions, **_):
        raise error

    got = run((broken, 1.0))
    assert got.errors.all() and str(error) in got.first_failure


def test_keyboard_interrupt_propagates():
    def broken(completions, **_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run((broken, 1.0))


def test_long_error_message_is_truncated():
    def broken(completions, **_):
        raise ValueError("x" * 10_000_000)

    assert len(run((broken, 1.0)).first_failure) < 30_000


def test_functions_get_the_columns_they_name():
    seen = {}

    def picky(completions, gold):
        seen["picky"] = (completions, gold)
        return [0, 0, 0]

    def greedy(prompts, completions, **columns):
        completions.sort(reverse=True)  # each function gets its own list
        seen["greedy"] = columns
        return [0, 0, 0]

    def defaulted(prompts, completions, missing=7):
        seen["defaulted"] = missing
        return [0, 0, 0]

    columns = {"gold": [1, 2, 3], "other": ("x", "y", "z")}
    run((greedy, 1.0), (picky, 1.0), (defaulted, 1.0), columns=columns)
    assert seen == {
        "picky": (THREE, [1, 2, 3]),
        "greedy": {"gold": [1, 2, 3], "other": ["x", "y", "z"]},
        "defaulted": 7,
    }
    with pytest.raises(UserError, match="'f0' needs an argument 'gold'.*they have: completions, other, prompts"):
        run((picky, 1.0), columns={"other": [1, 2, 3]})
    with pytest.raises(UserError, match="must not be called 'prompts'"):
        run((greedy, 1.0), columns={"prompts": [1, 2, 3]})
    with pytest.raises(UserError, match="names one function twice"):
        score([("a", greedy, 1.0), ("a", greedy, 1.0)], ["p"], ["c"], {})


def test_exact_match():
    got = REWARDS["exact_match"](["p"] * 4, [" dcba\n", "abcd", "", "7"], answer=["dcba", "dcba", "x", 7], text=[])
    assert got == [1, 0, 0, 1]


def test_registry(monkeypatch):
    monkeypatch.setattr("tunix_like.rewards.registry.REWARDS", dict(REWARDS))

    @register_reward_fn("mine")
    def mine(prompts, completions, **_):
        return [0.0]

    assert resolve("mine") is mine and resolve("maze") is REWARDS["maze"]
    with pytest.raises(UserError, match="'mine' is already registered"):
        register_reward_fn("mine")(mine)
    with pytest.raises(UserError, match="names with .:. are reserved"):
        register_reward_fn("a:b")(mine)
    with pytest.raises(UserError, match="'mase' is unknown. Did you mean 'maze'"):
        resolve("mase")


def test_a_function_of_a_users_file(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import dataclasses, os\n"
        "@dataclasses.dataclass\nclass C:\n    x: int = 3\n"
        "def helper(): ...\ndef _hidden(): ...\n"
        "def length(prompts, completions, **_):\n    return [C().x * len(c) for c in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    before = set(REWARDS)
    assert run((resolve("mine.py:length"), 1.0)).total.tolist() == [3, 6, 9]
    assert resolve("mine.py:length") is resolve(f"{tmp_path}/mine.py:length") and set(REWARDS) == before
    with pytest.raises(UserError, match="mine.py has no function 'lenght'; it has: helper, length"):
        resolve("mine.py:lenght")
    with pytest.raises(UserError, match="gone.py does not exist"):
        resolve("gone.py:length")
    (tmp_path / "bad.py").write_text("1/0")
    with pytest.raises(UserError, match="bad.py failed to load: ZeroDivisionError") as caught:
        resolve("bad.py:f")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_function_of_a_module():
    from tunix_like.rewards.built_in import exact_match

    assert resolve("tunix_like.rewards.built_in:exact_match") is exact_match
    with pytest.raises(UserError, match="it has: .*exact_match"):
        resolve("tunix_like.rewards.built_in:nothing")
    with pytest.raises(UserError, match="no_such_module_x failed to import"):
        resolve("no_such_module_x:f")


def test_reward_function_with_the_signature_of_verl():
    def positional(completion, truth):
        return len(completion) + truth

    def keyword(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": f"{data_source}{extra_info}" == "gsmNone" and ground_truth == solution_str, "acc": 1}

    def everything(**given):
        return float(sorted(given) == ["data_source", "extra_info", "ground_truth", "solution_str"])

    assert run((verl_compatible(positional), 1.0), columns={"ground_truth": [10, 20, 30]}).total.tolist() == [
        11,
        22,
        33,
    ]
    truths = {"reward_model": [{"ground_truth": text} for text in ("a", "x", "ccc")], "data_source": ["gsm"] * 3}
    assert run((verl_compatible(keyword), 1.0), columns=truths).total.tolist() == [1, 0, 1]
    assert run((verl_compatible(everything), 1.0), columns={"gold": [1, 2, 3]}).total.tolist() == [1, 1, 1]
    assert run((verl_compatible(positional), 1.0), columns={"answer": [1, 1, 1]}).total.tolist() == [2, 3, 4]
    got = run((verl_compatible(positional), 1.0), columns={"x": [1, 2, 3]})
    assert got.errors.all() and "'answer'; the rows have: x" in got.first_failure


async def lengths_later(prompts, completions, scale=1, **columns):
    """Waits for all completions at the same time; the result of each is its length."""

    async def one(text):
        await asyncio.sleep(0)
        if text == "ccc":
            raise ValueError("no value")
        return scale * len(text)

    return await asyncio.gather(*map(one, completions))


class Judge:
    async def __call__(self, prompts, completions):
        return await lengths_later(prompts, completions)


async def one_later(solution, truth):
    return {"score": float(len(await lengths_later([], [truth])) == 1 and solution == truth)}


ASYNC = {"function": lengths_later, "partial": functools.partial(lengths_later, scale=1), "object": Judge()}


@pytest.mark.parametrize("inside", [False, True], ids=["plain", "in a running loop"])
@pytest.mark.parametrize("kind", ASYNC)
def test_async_functions_score_as_plain_ones_also_inside_a_running_event_loop(kind, inside):
    async def cell():
        return run((ASYNC[kind], 1.0))

    got = asyncio.run(cell()) if inside else run((ASYNC[kind], 1.0))
    assert got.total[:2].tolist() == [1, 2] and got.errors.tolist() == [False, False, True]
    assert "no value" in got.first_failure


def test_an_async_function_of_verl_and_one_in_a_worker():
    async def cell():
        return run((verl_compatible(one_later), 1.0), columns={"answer": ["a", "a", "b"]})

    assert asyncio.run(cell()).total.tolist() == [1, 0, 0]
    functions = pooled([misbehaving.later], workers=1)
    try:
        got = score([("later", functions["later"], 1.0)], ["p"] * 3, THREE, {}, 3)
    finally:
        close_pools(functions.values())
    assert got.total.tolist() == [1, 2, 3]


def test_async_generators_are_refused():
    async def yields(prompts, completions):
        yield 1.0

    with pytest.raises(UserError, match="generator"):
        run((yields, 1.0))


NAMES = {
    "gsm8k": "gsm8k", "a.py:f": "a.py:f", "/home/x/a.py:f": "a.py:f", "../x/a.py:f": "a.py:f", "pkg.mod:f": "pkg.mod:f",
    "model:/home/x/rm": "model:rm", "model:owner/rm": "model:rm", "~/x/a.py:f": "a.py:f",
}  # fmt: skip


@pytest.mark.parametrize("name, label", NAMES.items())
def test_metrics_name_functions_without_folders(name, label):
    assert label_of(name) == label


def test_functions_of_equal_names_have_different_labels():
    functions = "rewards.functions=[{name: 'a/r.py:f'}, {name: 'b/r.py:f'}, {name: 'r.py:f'}, {name: 'r.py:g'}]"
    labels = [entry.label for entry in reward_entries(load(None, [functions]))]
    assert labels == ["r.py:f", "r.py:f_2", "r.py:f_3", "r.py:g"]
    assert labels_of(["a/r.py:f", "b/r.py:f", "r.py:f_2"]) == ["r.py:f", "r.py:f_2", "r.py:f_2_2"]
