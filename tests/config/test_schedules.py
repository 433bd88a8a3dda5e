"""Tests the values of schedules over the steps, and the errors of their mappings."""

from __future__ import annotations

import pytest

from tunix_like import AlgorithmConfig, UserError
from tunix_like.config.load import load
from tunix_like.config.schedules import Schedule, read_schedule


def test_values_are_on_the_line_from_the_first_step_to_the_last():
    rise = Schedule(0.5, 1.5, 5, whole=False)
    assert [rise(step) for step in (1, 2, 3, 4, 5, 6, 999)] == [0.5, 0.75, 1.0, 1.25, 1.5, 1.5, 1.5]
    fall = Schedule(1, 0, 3, whole=False)
    assert [fall(step) for step in (1, 2, 3, 4)] == [1.0, 0.5, 0.0, 0.0]
    assert Schedule(0.1, 0.3, 2, whole=False)(2) == 0.3 and str(fall) == "1 to 0 over 3 steps"


def test_integers_are_rounded_to_the_nearest_with_halves_up():
    assert [Schedule(1, 4, 7, whole=True)(step) for step in range(1, 9)] == [1, 2, 2, 3, 3, 4, 4, 4]
    assert [Schedule(3, 1, 5, whole=True)(step) for step in range(1, 6)] == [3, 3, 2, 2, 1]
    assert type(Schedule(1, 4, 7, whole=True)(2)) is int


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "algorithm.k: got {}; a schedule has the keys start, end and steps"),
        ({"start": 1, "end": 2}, "algorithm.k: got .*; a schedule has the keys"),
        ({"start": 1, "end": 2, "steps": 9, "power": 2}, "algorithm.k: got .*; a schedule has the keys"),
        ({"start": 1, "end": 2, "steps": 1}, "algorithm.k.steps: got 1; it must be at least 2"),
        ({"start": 1, "end": 2, "steps": 2.0}, "algorithm.k.steps: got 2.0.*; it must be an integer"),
        ({"start": 1, "end": 2.5, "steps": 9}, "algorithm.k.end: got 2.5.*; it must be an integer"),
        ({"start": True, "end": 2, "steps": 9}, "algorithm.k.start: got True.*; it must be an integer"),
        ({"start": None, "end": 2, "steps": 9}, "algorithm.k.start: got"),
        ({"start": 1, "end": 2**40, "steps": 9}, "algorithm.k.end: got .*integers must be between"),
    ],
)
def test_bad_schedules_name_the_field(given, message):
    with pytest.raises(UserError, match=message):
        read_schedule(given, "algorithm.k", whole=True)
    with pytest.raises(UserError, match=message):
        AlgorithmConfig(k=given)


def test_schedules_of_a_config_are_checked_at_both_ends():
    assert load(None, ["algorithm.alpha={start: 0, end: 1.5, steps: 9}"]).algorithm.alpha == {
        "start": 0, "end": 1.5, "steps": 9,
    }  # fmt: skip
    for given, message in (
        ({"alpha": {"start": -1, "end": 1, "steps": 9}}, "algorithm.alpha: got -1"),
        ({"alpha": {"start": 1, "end": float("nan"), "steps": 9}}, "algorithm.alpha.end: got nan.*finite"),
        ({"alpha": {"start": 1, "end": "2", "steps": 9}}, "algorithm.alpha.end: got '2'.*a number"),
        ({"k": {"start": 0, "end": 2, "steps": 9}}, "algorithm.k: got 0"),
        ({"truncation_order": {"start": 1, "end": 0, "steps": 9}}, "algorithm.truncation_order: got 0"),
    ):
        with pytest.raises(UserError, match=message):
            AlgorithmConfig(**given)
