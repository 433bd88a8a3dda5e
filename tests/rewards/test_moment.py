"""Tests which reward functions get the step and the progress of the run: in this process, in workers, by waiting calls
and through `by_source`."""

from __future__ import annotations

import functools

import pytest

from tests.rewards import asking
from tunix_like.errors import UserError
from tunix_like.rewards import REWARDS, check_arguments, close_pools, pooled, score
from tunix_like.rollout.rollouts import score_completions, weighted_rewards
from tunix_like.runtime.moment import START, moment_of
from tunix_like.types import Problem

MOMENT = moment_of(3, 2, 4)
SEEN = 3.5
"""The sum of step and progress at `MOMENT`."""


def rewards_of(function, moment=MOMENT, size=2, **columns):
    """Returns the rewards of four completions."""
    functions = weighted_rewards({"mine": function}, None)
    scores = score(functions, ["p"] * 4, ["a", "b", "c", "d"], columns, size, None, moment)
    return scores.total.tolist()


def test_the_moment_of_a_run():
    assert moment_of(1, 0, 4) == {"step": 1, "progress": 0.0}
    assert moment_of(4, 4, 4) == {"step": 4, "progress": 1.0}
    assert moment_of(9, 9, 4)["progress"] == 1.0, "training may be continued with fewer steps"
    assert moment_of(2, 1, None) == {"step": 2}


@pytest.mark.parametrize("name", ["both", "defaults", "one_completion", "all_at_once", "instance"])
def test_functions_get_numbers(name):
    assert rewards_of(getattr(asking, name)) == [SEEN] * 4


def test_functions_in_workers_get_numbers():
    functions = pooled([asking.both, asking.fails_for_c], workers=1)
    assert rewards_of(functions["both"]) == [SEEN] * 4
    assert rewards_of(functions["fails_for_c"])[:2] == [SEEN] * 2
    assert rewards_of(functions["fails_for_c"])[3] == SEEN, "calls of single completions get them too"
    given = {"prompts": ["p"], "completions": ["a"]}
    assert functions["both"](**given, step=7, progress=0.25) == [7.25], "called by hand, they are arguments"
    with pytest.raises(UserError, match="'both' needs an argument 'step'"):
        functions["both"](**given)
    close_pools(functions.values())


def test_by_source_passes_them_on(monkeypatch):
    for name in ("both", "both_of_row", "only_columns"):
        monkeypatch.setitem(REWARDS, name, getattr(asking, name))
    names = ["both", "only_columns", "only_columns", "both"]
    assert rewards_of(REWARDS["by_source"], source_reward=names) == [SEEN, 0.0, 0.0, SEEN]
    names = ["both_of_row", "only_columns", "only_columns", "both_of_row"]
    got = rewards_of(REWARDS["by_source"], source_reward=names, step=[10, 20, 30, 40])
    assert got == [10.5, 1.0, 1.0, 40.5], "a column goes first, and is passed on like others"
    scores = score(
        [("by_source", REWARDS["by_source"], 1.0)], ["p"] * 2, ["a", "b"], {"source_reward": ["both"] * 2}, 2,
        moment=moment_of(2, 1, None),
    )  # fmt: skip
    assert scores.errors.all() and "'both' needs an argument 'progress': the number of steps" in scores.first_failure


def test_columns_go_first():
    assert rewards_of(asking.both_of_row, step=[1, 2, 3, 4]) == [1.5, 2.5, 3.5, 4.5]
    assert rewards_of(asking.one_completion, progress=[0.1, 0.2, 0.3, 0.4]) == [3.1, 3.2, 3.3, 3.4]


def test_functions_that_do_not_name_them_do_not_get_them():
    assert rewards_of(asking.only_columns) == [0.0] * 4
    assert rewards_of(asking.with_collected) == [0.0] * 4
    assert rewards_of(functools.partial(asking.both, step=10)) == [10.5] * 4, "a value that the user has set stays"


def test_unknown_progress_is_an_error_only_if_it_is_needed():
    unknown = moment_of(3, 2, None)
    assert rewards_of(asking.only_step, unknown) == [3.0] * 4
    assert rewards_of(asking.defaults, unknown) == [3.0] * 4
    with pytest.raises(UserError, match="'mine' needs an argument 'progress': the number of steps.*training.max_steps"):
        rewards_of(asking.both, unknown)


def test_the_check_of_columns_knows_them():
    check_arguments([("both", asking.both, 1.0)], ["answer"])
    with pytest.raises(UserError, match="'positional' needs an argument 'step'"):
        check_arguments([("positional", asking.positional, 1.0)], ["answer"])


def test_problems_carry_the_moment():
    functions = [("both", asking.both, 1.0)]
    problems = [Problem(0, "p", [1], {}, moment=MOMENT), Problem(1, "q", [1], {}, moment=MOMENT)]
    assert score_completions(functions, problems, ["a", "b"], 1).total.tolist() == [SEEN] * 2
    assert score_completions(functions, [Problem(0, "p", [1], {})], ["a"], 1).total.tolist() == [sum(START.values())]
