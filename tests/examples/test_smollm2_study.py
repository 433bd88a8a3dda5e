"""Tests that the table of the study with SmolLM2 in docs/studies.md has the stored results."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_of_the_documentation_has_the_stored_results():
    spec = importlib.util.spec_from_file_location("smollm2_study", ROOT / "examples" / "smollm2" / "study.py")
    study = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(study)
    page = (ROOT / "docs" / "studies.md").read_text(encoding="utf-8")
    assert study.results().keys() == study.LABELS.keys() and study.table() in page
