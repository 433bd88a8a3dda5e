"""Tests that the tables of the studies with SmolLM2 in docs/studies.md have the stored results."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("task", ["sums", "letters"])
def test_the_table_of_the_documentation_has_the_stored_results(task):
    spec = importlib.util.spec_from_file_location("smollm2_study", ROOT / "examples" / "smollm2" / "study.py")
    study = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(study)
    page = (ROOT / "docs" / "studies.md").read_text(encoding="utf-8")
    results = study.results(task)
    assert results.keys() == {study.BEFORE, *study.TASKS[task].learners} and study.table(task) in page
