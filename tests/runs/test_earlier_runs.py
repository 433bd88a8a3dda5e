"""Runs that version 0.2 began are resumed: the weights are those of its uninterrupted runs (`earlier_runs.py`)."""

from __future__ import annotations

import tarfile

import jax
import numpy as np
import pytest

from tests.runs import earlier_runs

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", earlier_runs.RUNS)
def test_a_run_of_an_earlier_version_resumes(name, tmp_path):
    with tarfile.open(earlier_runs.ARCHIVES / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / name
    expected = np.load(folder / "expected.npz")
    earlier_runs.train(earlier_runs.write_config(tmp_path), folder, name, 4)
    found = earlier_runs.weights(folder)
    assert set(found) == set(expected)
    same_compiler = jax.__version__ == earlier_runs.JAX
    same_processor = (folder / "processor.txt").read_text() == earlier_runs.processor()
    tolerance = (0 if same_processor else 1e-6) if same_compiler else 1e-4
    for tensor in expected:
        np.testing.assert_allclose(found[tensor], expected[tensor], rtol=0, atol=tolerance)
