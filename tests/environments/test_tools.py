"""Tests the schemas of tools. `transformers` is the oracle."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from tunix_like.environments.tools import argument_problem, schema_of
from tunix_like.errors import UserError


def plain(a: int, b: float, c: str, d: bool) -> str:
    """Does something.

    Args:
        a: the first
        b: the second
        c: the third
        d: the fourth
    """


def nested(a: list[int], b: dict[str, float], c: list[list[str]], d: list, e: dict, f: Any) -> dict:
    """Does something with lists.

    It takes two lines: one and two.

    Args:
        a: numbers: many
        b: by name,
            on a second line
        c: texts
        d: anything
        e: also anything
        f: whatever

    Returns:
        something
    """


def optional(a: int | None, b: str | None = None, c: Literal["x", "y"] = "x", d: Literal[1, 2] = 1, e: int | str = 3):
    """Has defaults.

    Args:
        a: perhaps
        b: perhaps
        c: a letter
        d: a number
        e: either
    """


def mixed(a: list[int] | str | None = None, b: Literal[1, "x"] = 1):
    """Has parts.

    Args:
        a: either
        b: either
    """


def nothing() -> float:
    """Returns the time."""


class Holder:
    def method(self, word: str, *, count: int = 1) -> str:
        """Says a word.

        Args:
            word: the word
            count: how often
        """


@pytest.mark.parametrize("function", [plain, nested, optional, mixed, nothing, Holder.method, Holder().method])
def test_schemas_equal_those_of_transformers(function):
    pytest.importorskip("transformers")
    from transformers.utils import get_json_schema

    expected = get_json_schema(function)
    expected["function"].pop("return", None)
    assert schema_of(function) == expected


def test_a_docstring_with_types():
    def search(query: str, limit: int = 3):
        """Searches.

        Args:
          query (str): what to find
          limit (int, optional): how many
        Raises:
          ValueError: never
        """

    schema = schema_of(search)["function"]
    assert schema["description"] == "Searches." and schema["parameters"]["required"] == ["query"]
    assert {n: p["description"] for n, p in schema["parameters"]["properties"].items()} == {
        "query": "what to find",
        "limit": "how many",
    }


def no_docstring(a: int):
    pass


def no_hint(a, b: int):
    """Does.

    Args:
        a: a
        b: b
    """


def not_described(a: int, b: int):
    """Does.

    Args:
        a: a
    """


def odd_type(a: set[int]):
    """Does.

    Args:
        a: a
    """


def unknown_name(a: Unknown):  # noqa: F821
    """Does.

    Args:
        a: a
    """


def starred(*a: int):
    """Does.

    Args:
        a: a
    """


async def asynchronous(a: int):
    """Does."""


def generator(a: int):
    """Does."""
    yield a


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_docstring, "Tool 'no_docstring' has no docstring; add one"),
        (no_hint, "Tool 'no_hint': the parameter 'a' has no type hint; add one, e.g. 'a: str'"),
        (not_described, "Tool 'not_described': the docstring does not describe the parameter 'b'; add the line"),
        (odd_type, "the parameter 'a' has no JSON form; use int"),
        (unknown_name, "its type hints cannot be read (NameError"),
        (starred, "the parameter '*a: "),
        (asynchronous, "Tool 'asynchronous' is async"),
        (generator, "Tool 'generator' is a generator"),
        (3, "which is not callable"),
    ],
)
def test_tools_without_a_schema_are_rejected(function, message):
    with pytest.raises(UserError) as caught:
        schema_of(function)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("function", "arguments", "problem"),
    [
        (plain, {"a": 1, "b": 2, "c": "x", "d": True}, None),
        (plain, {"a": 1, "b": 2.5, "c": "x"}, "the argument 'd' is missing"),
        (plain, {"a": 1, "b": 2, "c": "x", "d": True, "e": 1}, "there is no argument 'e'; valid: a, b, c, d"),
        (plain, {"a": True, "b": 2, "c": "x", "d": True}, "the argument 'a' must be of type integer"),
        (plain, {"a": 1.5, "b": 2, "c": "x", "d": True}, "the argument 'a' must be of type integer"),
        (plain, {"a": 1, "b": "2", "c": "x", "d": True}, "the argument 'b' must be of type number"),
        (plain, {"a": 1, "b": 2, "c": None, "d": True}, "the argument 'c' must be of type string"),
        (nested, {"a": [1], "b": {}, "c": [["x"]], "d": [1, "x"], "e": {"k": 1}, "f": None}, None),
        (nested, {"a": ["x"], "b": {}, "c": [], "d": [], "e": {}, "f": 1}, "the argument 'a' must be of type array"),
        (optional, {"a": None}, None),
        (optional, {"a": 1, "b": None, "c": "y", "d": 2, "e": "x"}, None),
        (optional, {"a": 1, "c": "z"}, "the argument 'c' must be one of ['x', 'y']"),
        (optional, {"a": 1, "d": True}, "the argument 'd' must be one of [1, 2]"),
        (optional, {"a": 1, "e": []}, "the argument 'e' must be of type ['integer', 'string']"),
        (mixed, {"a": [1]}, None),
        (mixed, {"a": None, "b": "x"}, None),
        (mixed, {"a": 3}, "the argument 'a' must be of type another"),
        (nothing, {"a": 3}, "there is no argument 'a'; valid: none"),
    ],
)
def test_arguments_are_validated(function, arguments, problem):
    assert argument_problem(schema_of(function), arguments) == problem
