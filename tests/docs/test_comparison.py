"""Tests that the page that compares libraries names existing tests, for every "yes" of tunix_like."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")


def rows(heading: str | None = None) -> dict[str, str]:
    """Returns the second cell of the rows of the first table with several libraries, or of the table below a heading,
    by the first cell."""
    text = PAGE.split(f"## {heading}", 1)[1] if heading else PAGE.split("**Estimators**", 1)[1]
    lines = text.split("\n## ", 1)[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]
    return {row[0]: row[1].strip() for row in cells if not row[0].startswith("**") and row[0] != "row"}


TESTS = rows("Tests of the column tunix_like")


def test_every_yes_has_a_test():
    said = rows()
    assert len(said) > 30
    assert {name for name, cell in said.items() if cell == "yes"} <= TESTS.keys() <= said.keys()


@pytest.mark.parametrize("row", TESTS)
def test_named_tests_exist(row):
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", TESTS[row])
    assert named
    for file, name in named:
        assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(encoding="utf-8"), re.M), (
            f"{file}::{name}"
        )
