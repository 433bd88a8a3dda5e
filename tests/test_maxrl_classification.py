"""examples/maxrl_paper/classification.py: its gradient by enumeration, its samples, a tiny study from the command line
to the figure, and the numbers of docs/results.md, which are those of the file it wrote."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "maxrl_paper" / "classification.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("maxrl_classification", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_the_mean_gradient_is_the_pull_on_the_pass_rate(script):
    """Over all 4^3 groups of three samples: `w(p) grad p`, with the weights of the papers written out."""
    logits = jnp.array([0.3, -1.0, 0.5, -0.2])
    draws = np.array(list(itertools.product(range(4), repeat=3)))
    p, label = np.exp(np.asarray(jax.nn.log_softmax(logits), np.float64)), 1
    pull = p[label] * (np.eye(4)[label] - p)  # grad of the softmax's p
    weights = {"REINFORCE": 1.0, "MaxRL": (1 - (1 - p[label]) ** 2) / p[label]}
    for name, weight in weights.items():

        def descended(logits, samples, name=name):
            logprobs = jax.nn.log_softmax(logits)[None]
            return script.surrogate(script.Method(name, 3).estimator, logprobs, jnp.array([label]), samples[None])

        each = jax.jit(jax.vmap(jax.grad(descended), in_axes=(None, 0)))(logits, draws)
        mean = p[draws].prod(axis=1) @ np.asarray(each, np.float64)
        np.testing.assert_allclose(-mean, weight * pull, rtol=1e-5, atol=1e-7)


def test_samples_are_the_models(script):
    """Frequencies within four standard errors of the probabilities; an impossible class never comes."""
    p = np.array([[0.5, 0.0, 0.3, 0.2], [0.01, 0.01, 0.0, 0.98]])
    logprobs = jnp.asarray(np.log(np.maximum(p, 1e-300)), jnp.float32)
    found = np.asarray(script.sample_classes(jax.random.key(1), logprobs, 20_000))
    for row, expected in zip(found, p, strict=True):
        shares = np.bincount(row, minlength=4) / len(row)
        assert (np.abs(shares - expected) <= 4 * np.sqrt(expected * (1 - expected) / len(row))).all(), shares


def test_a_study_from_the_command_to_the_figure(script, tmp_path, capsys):
    setting = script.Setting(
        classes=6, latent=3, inputs=6, hidden=8, train_per_class=20, held_out=60, batch=16, steps=20, evaluations=2,
        sizes=(2, 512), learning_rates=(1e-2, 3e-2), seeds=(0, 1), snapshots=(10,), compared=32, draws=2,
    )  # fmt: skip
    script.main(["--out", str(tmp_path / "out")], setting)
    said = capsys.readouterr().out
    results = json.loads((tmp_path / "out" / "classification.json").read_text())
    assert (tmp_path / "out" / "maxrl_classification.png").read_bytes()[1:4] == b"PNG"
    assert script.results_table(results) in said and script.gradients_table(results) in said
    assert said.count("seed 100") == 7 * 2 == len(results["tuning"]) and len(results["runs"]) == 7 * 2

    runs = {(run["method"], run["N"], run["seed"]): run for run in results["runs"]}
    for (name, size, seed), run in runs.items():
        curves, exact = run["curves"], runs["cross-entropy", None, seed]["curves"]
        assert curves["step"] == [0, 10, 20]
        assert [curves[key][0] for key in curves] == [exact[key][0] for key in exact], "one start for all methods"
        tried = [row for row in results["tuning"] if (row["method"], row["N"]) == (name, size)]
        best = max(tried, key=lambda row: row["validation accuracy"])
        assert len(tried) == 2 and run["learning_rate"] == best["learning_rate"]
    assert all(run["curves"]["train NLL"][-1] < run["curves"]["train NLL"][0] - 0.1 for run in runs.values())

    along = {(row["method"], row["N"]): row for row in results["gradients"]}
    assert along["MaxRL", 512]["expected"] > 0.9999, "maximum likelihood, but for inputs of pass rate below 1/512"
    assert along["MaxRL", 512]["sampled"] > 0.99
    assert along["MaxRL", 2]["expected"] == pytest.approx(along["REINFORCE", 2]["expected"], rel=1e-4), "order 1"
    assert along["REINFORCE", 512]["expected"] == pytest.approx(along["REINFORCE", 2]["expected"], rel=1e-4)
    assert along["REINFORCE", 512]["expected"] < 0.999
