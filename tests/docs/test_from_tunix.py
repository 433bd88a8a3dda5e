"""Tests that the names which the page for users of Tunix gives them exist here: classes, keys with values, commands."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import tunix_like
from tunix_like.algorithms.losses import POLICY_LOSSES
from tunix_like.cli.main import build_parser
from tunix_like.config.load import load
from tunix_like.config.schema import Config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "from_tunix.md").read_text(encoding="utf-8")
TABLE = PAGE.split("## Names of Tunix", 1)[1].split("\n## ", 1)[0]
ROWS = dict(re.findall(r"^\| (?!\*\*|Tunix)(.+?) \| (.+) \|$", TABLE, re.M))
NAMES = {name for here in ROWS.values() for name in re.findall(r"`([^`]+)`", here)}
PLACEHOLDERS = {"environment=": "environment", "rollout.engine: FILE.py:NAME": "rollout.engine"}


def test_rows_are_found():
    assert len(ROWS) > 50 and len(ROWS) == len(re.findall(r"^\| (?!\*\*|Tunix|---)", TABLE, re.M))


@pytest.mark.parametrize("name", sorted(NAMES))
def test_names_exist(name):
    key, _, value = name.partition(": ")
    section, _, field = PLACEHOLDERS.get(name, key).partition(".")
    if name.startswith("tunix-like "):
        assert name.removeprefix("tunix-like ") in build_parser()._subparsers._group_actions[0].choices
    elif name.endswith(".yaml"):
        load(ROOT / name)
    elif hasattr(Config(), section):
        assert not field or field in {each.name for each in dataclasses.fields(getattr(Config(), section))}
        if value and name not in PLACEHOLDERS:
            load(None, [f"{key}={value}"])
    else:
        assert name in tunix_like.__all__ or name in POLICY_LOSSES
