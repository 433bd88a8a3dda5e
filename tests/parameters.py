"""Helpers for the values of parametrized tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def others_slow(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Marks all values that are not in `quick` as slow, so that plain `pytest` runs the test with `quick` only."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]
