"""Tests the benchmarks at a small size: the variance formula against full enumeration, the tables of the documentation
against a new run, and the update that leaves out groups."""

from __future__ import annotations

import importlib
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from tunix_like import compute_advantages
from tunix_like.models.config import DecoderConfig

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
variance = importlib.import_module("benchmarks.gradient_variance")
zero_signal = importlib.import_module("benchmarks.zero_signal")
old_weights = importlib.import_module("benchmarks.old_weights")

ARMS, GOOD, SIZE = 5, 2, 4
P = GOOD / ARMS


def enumerated(pair, arms, rewards, scores):
    """Returns the variance and the squared signal of the gradient estimate over every possible group.

    Args: `arms` are the probabilities of the answers, `rewards` and `scores` (gradients of the log-probabilities) their
    values.
    """
    mean, square = 0.0, 0.0
    for drawn in map(list, itertools.product(range(len(arms)), repeat=SIZE)):
        successes = int(rewards[drawn].sum())
        advantages = np.where(rewards[drawn] == 1, pair[0][successes], pair[1][successes])
        gradient = (advantages[:, None] * scores[drawn]).mean(axis=0)
        weight = np.prod(arms[drawn])
        mean, square = mean + weight * gradient, square + weight * (gradient @ gradient)
    return square - mean @ mean, mean @ mean


@pytest.mark.parametrize("name", ["rloo", "alpha 0.5", "grpo", "maxrl", "maxpo k=3", "pkpo k=3", "s_loo k=3"])
def test_variance_formula_equals_enumeration(name):
    pair = variance.advantage_pairs(SIZE)[name]
    two, many, _ = variance.policies(P, ARMS)
    softmax = np.eye(ARMS) - np.full(ARMS, 1 / ARMS)
    for policy, arms, rewards, scores in (
        (two, np.array([P, 1 - P]), np.array([1, 0]), np.array([[1 - P], [-P]])),
        (many, np.full(ARMS, 1 / ARMS), (np.arange(ARMS) < GOOD).astype(int), softmax),
    ):
        found = variance.moments(*pair, P, policy)
        np.testing.assert_allclose((found.variance, found.signal), enumerated(pair, arms, rewards, scores), rtol=1e-9)


def test_variance_with_many_arms_approaches_the_limit():
    pairs = variance.advantage_pairs(8)
    _, *pair_of_policies = variance.policies(0.25, 40_000)
    large, limit = (
        [variance.moments(*pair, 0.25, policy).variance for pair in pairs.values()] for policy in pair_of_policies
    )
    np.testing.assert_allclose(large, limit, rtol=1e-3)
    with pytest.raises(ValueError, match="whole number"):
        variance.policies(0.03)


def test_advantages_equal_those_of_the_library():
    for name, (success, failure) in variance.advantage_pairs(6).items():
        estimator, _, k = name.partition(" k=")
        params = {"k": int(k)} if k else {}
        if name.startswith("alpha"):
            estimator, params = "maxk_mix", {"alpha": float(name.partition(" ")[2])}
        if estimator != "s_loo":
            found = compute_advantages([1, 1, 0, 0, 0, 0], estimator, **params)
            np.testing.assert_allclose(found, [success[2]] * 2 + [failure[2]] * 4, rtol=1e-6, err_msg=name)


def share(i, k, rewards, members):
    """Returns S(i, k, members) of the paper: the mean over the k-subsets of `members` of `max if i is a member, else
    0`."""
    subsets = list(itertools.combinations(members, k))
    return sum(max(rewards[j] for j in subset) for subset in subsets if i in subset) / len(subsets)


@pytest.mark.parametrize("k", range(1, 6))
def test_s_loo_matches_its_definition(k):
    size, everyone = 6, range(6)
    success, failure = variance.plain_leave_one_out(size, k)
    for c in range(size + 1):
        rewards = [1] * c + [0] * (size - c)
        for i in everyone:
            others = [j for j in everyone if j != i]
            baseline = sum(share(j, k, rewards, others) for j in others) / (size - 1)
            expected = size * (share(i, k, rewards, everyone) - baseline)
            assert math.isclose(success[c] if rewards[i] else failure[c], expected, abs_tol=1e-12)


def test_estimators_of_the_same_objective_have_the_same_signal():
    """Variances are compared only between estimators with the same expected gradient, that of pass@K."""
    rows = variance.study([0.1, 0.5], [8])
    for row in rows:
        _, _, k = row["estimator"].partition(" k=")
        if k and row["policy"] == "two-arm":
            p, order = row["p"], int(k)
            pull = order * (1 - p) ** (order - 1) * p * (1 - p)
            assert math.isclose(row["signal"], pull**2, rel_tol=1e-4), row


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def number(cell):
    try:
        return float(cell)
    except ValueError:
        return cell


def test_table_of_the_documentation_matches_a_new_run(tmp_path, capsys):
    """Every line of the table of ratios is a line of a new run, within the rounding of the third digit."""
    variance.main(["--json", str(tmp_path / "out" / "variance.json")])
    said = [cells(line) for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    fresh = {tuple(line[:3]): [number(cell) for cell in line[3:]] for line in said[: said.index(said[0], 1)]}
    documented = [cells(line) for line in (ROOT / "docs" / "studies.md").read_text().splitlines() if line[:1] == "|"]
    start = documented.index(said[0]) + 2
    shown = list(itertools.takewhile(lambda line: line[0].isdigit(), documented[start:]))
    assert len(said) > 60 and len(shown) >= 5
    for line in shown:
        assert [number(cell) for cell in line[3:]] == pytest.approx(fresh[tuple(line[:3])], rel=6e-3), line
    rows = json.loads((tmp_path / "out" / "variance.json").read_text())
    assert {"policy", "p", "G", "estimator", "variance", "signal"} == set(rows[0])


TINY = zero_signal.Setting(
    DecoderConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4
    ),
    prompts=4,
    size=2,
    prompt_length=3,
    completion_length=4,
)


def test_zero_signal_computes_half_in_one_program(tmp_path, capsys, monkeypatch):
    real = zero_signal.measure
    monkeypatch.setattr(zero_signal, "measure", lambda setting, repeats: real(TINY, repeats))
    zero_signal.main(["--repeats", "3", "--json", str(tmp_path / "zero.json")])
    result = json.loads((tmp_path / "zero.json").read_text())
    assert result["completions_computed"] == {"full": 8, "half": 4}
    assert result["compilations"] == 1, "a batch with constant groups must not compile the step again"
    for clock in ("wall", "processor"):
        found = result[clock]
        assert [len(values) for values in found["seconds"].values()] == [3, 3]
        assert found["ratio"] == found["median"]["half"] / found["median"]["full"]
    assert "ratio of medians" in capsys.readouterr().out


@pytest.mark.slow
def test_both_sides_of_the_turns_benchmark_sample_equally_many_tokens(monkeypatch):
    """`measure` asserts the equal token counts. The size is tiny."""
    from benchmarks import turns

    for name, value in {"PROMPTS": 1, "SIZE": 2, "TURNS": 2, "TURN": 4, "REPLY": 3, "PROMPT": 6, "LAYERS": 1}.items():
        monkeypatch.setattr(turns, name, value)
    found = turns.measure(1)
    assert found["tokens"] == 2 * 2 * 4 and len(found["prefilled again / appended"]) == 1


@pytest.mark.slow
def test_sampling_during_the_update_is_measured():
    """The saved time depends on the work, so the test only checks that all ages are measured."""
    from benchmarks import staleness

    found = staleness.measure(0.01, 6, 1)
    assert all(len(found[age]) == 1 for age in "0124")


def test_completions_of_older_weights(tmp_path):
    """The sampler uses older weights, so its log-probabilities differ from those of the trainer from step 2 on."""
    short = ("training.max_steps=3", "sft.max_steps=100", "optimizer.learning_rate=1e-2", "optimizer.warmup_steps=0")
    short += ("data.eval_size=8", "eval.samples=1", "eval.k=[1]")
    now, before = (old_weights.trained(age, "sequence", 0, tmp_path / str(age), short) for age in (0, 1))
    assert now["logprob_gap/mean"] < 1e-4 < 1e-2 < before["logprob_gap/mean"]
    assert before["sampler_is/ess"] < now["sampler_is/ess"] == pytest.approx(1, abs=1e-4)


def test_calls_of_environments_are_timed_beside_another_checkout():
    found = importlib.import_module("benchmarks.environments").measure(ROOT, 3, 1, 1, 1)
    assert {"plain, after", "plain, workers 0, after"} <= set(found)
    assert all(value > 0 for rows in found.values() for values in rows.values() for value in values)
