"""Tests examples/maxrl_paper/classification.py: its gradient by enumeration, its samples, a tiny study from the command
line to the figure, and the numbers of docs/studies.md against the stored results."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "maxrl_paper" / "classification.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("maxrl_classification", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        patch.setitem(sys.modules, spec.name, module)  # dataclasses look up their module there
        spec.loader.exec_module(module)
        yield module


def test_mean_gradient_is_the_weighted_gradient_of_the_pass_rate(script):
    """Over all 4^3 groups of three samples the gradient is `w(p) grad p`, with the weights of the papers."""
    logits = jnp.array([0.3, -1.0, 0.5, -0.2])
    draws = np.array(list(itertools.product(range(4), repeat=3)))
    p, label = np.exp(np.asarray(jax.nn.log_softmax(logits), np.float64)), 1
    pull = p[label] * (np.eye(4)[label] - p)  # gradient of p of the softmax
    weights = {"REINFORCE": 1.0, "MaxRL": (1 - (1 - p[label]) ** 2) / p[label]}
    for name, weight in weights.items():

        def descended(logits, samples, name=name):
            logprobs = jax.nn.log_softmax(logits)[None]
            return script.surrogate(script.Method(name, 3).estimator, logprobs, jnp.array([label]), samples[None])

        each = jax.jit(jax.vmap(jax.grad(descended), in_axes=(None, 0)))(logits, draws)
        mean = p[draws].prod(axis=1) @ np.asarray(each, np.float64)
        np.testing.assert_allclose(-mean, weight * pull, rtol=1e-5, atol=1e-7)


def test_samples_follow_the_probabilities_of_the_model(script):
    """The frequencies are within four standard errors of the probabilities. A class of probability zero is never
    drawn."""
    p = np.array([[0.5, 0.0, 0.3, 0.2], [0.01, 0.01, 0.0, 0.98]])
    logprobs = jnp.asarray(np.log(np.maximum(p, 1e-300)), jnp.float32)
    found = np.asarray(script.sample_classes(jax.random.key(1), logprobs, 20_000))
    for row, expected in zip(found, p, strict=True):
        shares = np.bincount(row, minlength=4) / len(row)
        assert (np.abs(shares - expected) <= 4 * np.sqrt(expected * (1 - expected) / len(row))).all(), shares


def test_study_from_the_command_line_to_the_figure(script, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(script, "ESTIMATORS", {"MaxRL": "maxrl", "REINFORCE": "rloo"})
    setting = script.Setting(
        classes=6, latent=3, inputs=6, noise=0.2, hidden=8, train_per_class=20, held_out=60, batch=16, steps=20,
        evaluations=2, sizes=(512,), learning_rates=(3e-2, 6e-2), seeds=(0,), snapshots=(10,), compared=32, draws=2,
    )  # fmt: skip
    script.main(["--out", str(tmp_path / "out")], setting)
    said = capsys.readouterr().out
    results = json.loads((tmp_path / "out" / "classification.json").read_text())
    assert (tmp_path / "out" / "maxrl_classification.png").read_bytes()[1:4] == b"PNG"
    for table in (script.results_table, script.tuning_table, script.gradients_table):
        assert table(results) in said
    assert said.count("seed 100") == 3 * 2 == len(results["tuning"]) and len(results["runs"]) == 3

    runs = {(run["method"], run["N"], run["seed"]): run for run in results["runs"]}
    for (name, size, seed), run in runs.items():
        curves, exact = run["curves"], runs["cross-entropy", None, seed]["curves"]
        assert curves["step"] == [0, 10, 20]
        assert [curves[key][0] for key in curves] == [exact[key][0] for key in exact], "one start for all methods"
        tried = [row for row in results["tuning"] if (row["method"], row["N"]) == (name, size)]
        best = max(tried, key=lambda row: row["validation accuracy"])
        assert len(tried) == 2 and run["learning_rate"] == best["learning_rate"]
        assert curves["test pass rate"][-1] > curves["test pass rate"][0] + 0.05, "it learns"

    along = {row["method"]: row for row in results["gradients"]}
    assert along["MaxRL"]["expected"] > 0.9999 > 0.99 > along["REINFORCE"]["expected"]
    assert along["MaxRL"]["sampled"] > 0.99 > along["REINFORCE"]["sampled"]


def test_numbers_of_the_documentation_are_those_of_the_stored_study(script):
    """The stored study has the settings of the script. The documentation contains its tables, and the text contains no
    other numbers."""
    results = json.loads((SCRIPT.parent / "results" / "classification.json").read_text())
    assert results["setting"] == json.loads(json.dumps(dataclasses.asdict(script.Setting())))
    page = (ROOT / "docs" / "studies.md").read_text()
    section = page[page.index("## Classification: MaxRL becomes maximum likelihood") :].partition("\n## ")[0]
    tables = [table(results) for table in (script.results_table, script.tuning_table, script.gradients_table)]
    assert f"\n\n{tables[0]}\n\n" in section
    section = section.replace(tables[0], "")
    tables[0] = re.sub(r"\(.*?\)", "", tables[0])  # the text states means, never the limits of a range
    known = set(re.findall(r"\d+\.\d+", "".join(tables)))
    said = re.sub(rf"jax {re.escape(results['jax'])}|\d{{4}}\.\d{{5}}", "", section)
    assert set(re.findall(r"\d+\.\d+", said)) <= known


def test_stored_study_supports_the_statements_of_the_documentation(script):
    results = json.loads((SCRIPT.parent / "results" / "classification.json").read_text())
    sizes, guess = results["setting"]["sizes"], np.log(results["setting"]["classes"])

    def mean(name, size, key):
        ends = [run["curves"][key][-1] for run in results["runs"] if (run["method"], run["N"]) == (name, size)]
        assert len(ends) == 3
        return np.mean(ends)

    for size in sizes:
        for key, sign in (("test accuracy", 1), ("test NLL", -1)):
            ends = [sign * mean(name, size, key) for name in ("MaxRL", "GRPO", "REINFORCE")]
            assert ends == sorted(ends, reverse=True), (size, key)
        assert mean("REINFORCE", size, "train NLL") > guess
    assert mean("MaxRL", 16, "train NLL") > guess > mean("MaxRL", 128, "train NLL")
    tuning = {(row["method"], row["N"], row["learning_rate"]): row["validation accuracy"] for row in results["tuning"]}
    for rate in results["setting"]["learning_rates"][:3]:
        assert tuning["MaxRL", 1024, rate] == pytest.approx(tuning["cross-entropy", None, rate], abs=0.006)
    for step in results["setting"]["snapshots"]:
        along = {(row["method"], row["N"]): row for row in results["gradients"] if row["step"] == step}
        for kind in ("expected", "sampled"):
            nearing = [along["MaxRL", size][kind] for size in sizes]
            assert nearing == sorted(nearing), (step, kind)
        assert along["MaxRL", 1024]["expected"] > 0.995 > 0.95 > along["GRPO", 1024]["expected"]
        assert along["REINFORCE", 1024]["expected"] < 0.9
