"""Tests which values the environment of a user may return, and the error messages for all others."""

from __future__ import annotations

import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunix_like.environments.protocol import (
    MOST_CHARACTERS,
    EnvStepResult,
    checked_number,
    checked_observation,
    checked_step,
)
from tunix_like.errors import UserError

MESSAGE = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    "value",
    [
        EnvStepResult("a", 1.5, True, {"n": 2, "text": "b", "flag": np.bool_(True), "nan": float("nan")}),
        ("a", 1.5, True, {"n": 2.0, "flag": 1}),
        ("a", np.float32(1.5), np.bool_(True), {"n": np.int64(2), "flag": 1, 3: 4, "none": None, "list": [1]}),
        types.SimpleNamespace(observation="a", reward=np.array(1.5), done=True, info={"n": 2, "flag": 1}),
    ],
)
def test_valid_results_are_accepted(value):
    assert checked_step(value, "Env.step") == EnvStepResult("a", 1.5, True, {"n": 2.0, "flag": 1.0})


def test_defaults():
    assert checked_step(EnvStepResult(), "Env.step") == EnvStepResult()
    assert checked_step((None, 0, False), "Env.step") == EnvStepResult()
    assert checked_step(types.SimpleNamespace(observation=[MESSAGE], reward=0, done=False), "E.s").observation == [
        MESSAGE
    ]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "Env.step returned None; return EnvStepResult"),
        (("a", 1.0), "Env.step returned a tuple of 2"),
        (("a", 1.0, False, False, {}), "Env.step returned a tuple of 5"),
        ({"observation": "a"}, "Env.step returned {'observation': 'a'}; return EnvStepResult"),
        ((b"a", 1.0, False), "the observation is b'a', of type bytes; decode it; it must be a str"),
        ((3, 1.0, False), "the observation is 3, of type int; it must be a str"),
        (([{"role": "user"}], 1.0, False), "contains {'role': 'user'}, which is not a message"),
        (([{"role": "user", "content": None}], 1.0, False), "which is not a message"),
        (([MESSAGE] * 1001, 1.0, False), "the observation has 1001 messages"),
        (("a", "1", False), "Env.step: reward '1' is not a number"),
        (("a", None, False), "Env.step: reward None is not a number; return a float (0.0 means no reward)"),
        (("a", float("nan"), False), "reward nan is not a finite number"),
        (("a", 10**400, False), "is not a finite number within"),
        (("a", 2e15, False), "is not a finite number within"),
        (("a", [1.0], False), "is not a number"),
        (("a", 1.0, 1), "done is 1, of type int; it must be True or False"),
        (("a", 1.0, None), "done is None"),
        (("a", 1.0, False, [1]), "info is [1], of type list; it must be a dict"),
    ],
)
def test_invalid_results_are_rejected(value, message):
    with pytest.raises(UserError) as caught:
        checked_step(value, "Env.step")
    assert message in str(caught.value) and str(caught.value).startswith("Env.step")


def test_long_observations_are_cut():
    assert checked_observation("x" * 10_000_000, "E") == "x" * MOST_CHARACTERS
    messages = [{"role": "tool", "content": "y" * 300_000, "name": "f", "number": 3}] * 3
    lengths = [len(message["content"]) for message in checked_observation(messages, "E")]
    assert lengths == [300_000, MOST_CHARACTERS - 300_000, 0]
    assert checked_observation(messages, "E")[2].keys() == {"role", "content", "name"}
    many = {f"n{i}": i for i in range(1000)} | {"k" * 1000: 1}
    assert len(checked_step(("a", 0.0, False, many), "E").info) == 100


@given(st.text() | st.lists(st.fixed_dictionaries({"role": st.text(), "content": st.text()})))
def test_text_can_be_encoded(observation):
    """Lone surrogates, which UTF-8 cannot encode, are replaced. Other text is unchanged."""
    checked = checked_observation(observation, "E")
    for text, original in zip(
        [checked] if isinstance(checked, str) else [m["content"] for m in checked],
        [observation] if isinstance(observation, str) else [m["content"] for m in observation],
        strict=True,
    ):
        text.encode()
        assert text == original or any("\ud800" <= c <= "\udfff" for c in original)


def test_surrogates():
    assert checked_observation("a\ud800b", "E") == "a?b"


def test_a_value_whose_repr_raises():
    class Odd:
        def __repr__(self):
            raise RuntimeError

    with pytest.raises(UserError, match="an object of type Odd is not a number"):
        checked_number(Odd(), "E: reward")


@pytest.mark.parametrize("potential", ["high", float("nan"), None])
def test_a_potential_that_is_no_number_is_an_error(potential):
    with pytest.raises(UserError, match=r"E\.step: info\['potential'\]"):
        checked_step((None, 0.0, False, {"potential": potential}), "E.step")
    assert checked_step((None, 0.0, False, {"potential": 1, "state": "a" * 200}), "E.step").info["state"] != "a" * 200
