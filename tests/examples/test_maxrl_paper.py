"""Tests `examples/maxrl_paper/`: the maze runs start from one SFT model, are evaluated, and are resumed. The tables of
docs/studies.md are those of the stored results. The config with the sizes of the paper is valid."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from tunix_like.cli import main as cli

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "maxrl_paper"


def script(name):
    spec = importlib.util.spec_from_file_location(f"maxrl_paper_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


maze, figures = script("maze"), script("maze_figures")


class InProcess:
    """Replaces `maze.Cores`: runs the same commands in this process."""

    def __init__(self, out):
        self.out, self.calls = out, []

    def __call__(self, log, *arguments):
        self.calls.append((log, arguments[0]))
        assert cli.main(list(arguments)) == 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One start model and two estimators, at a size that takes seconds."""
    out = tmp_path_factory.mktemp("maxrl_paper")
    config = yaml.safe_load((FOLDER / "maze.yaml").read_text())
    config["model"]["config"] |= {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config["data"] |= {"maze_size": 7, "train_size": 8, "eval_size": 8, "batch_size": 8}
    config["rollout"] |= {"max_prompt_length": 64, "max_tokens_to_generate": 8}
    config["sft"] |= {"max_steps": 2, "batch_size": 8}
    config["training"] |= {"max_steps": 1, "checkpoint_every_n_steps": 1}
    (out / "maze.yaml").write_text(yaml.safe_dump(config))
    patch = pytest.MonkeyPatch()
    patch.setattr(maze, "CONFIG", out / "maze.yaml")
    patch.setattr(maze, "SAMPLES", 4)
    call = InProcess(out)
    maze.start(call, 0)
    maze.train(call, maze.Run("maxrl", 2, 0))
    yield call
    patch.undo()


def test_run_starts_from_the_sft_weights_of_its_seed(runs):
    assert runs.calls == [("start-s0", c) for c in ("sft", "export", "eval")] + [
        ("maxrl-g2-s0", c) for c in ("train", "eval")
    ]
    rows = (json.loads(line) for line in (runs.out / "maxrl-g2-s0" / "metrics.jsonl").read_text().splitlines())
    before = next(row for row in rows if "eval/mean_length" in row)
    start = json.loads((runs.out / "eval" / "start-s0.summary.json").read_text())["metrics"]
    assert before["eval/mean_length"] == start["eval/mean_length"], "the same samples, as seed and weights are the same"
    assert 1 < before["eval/mean_length"] < 8


def test_finished_parts_are_skipped_and_missing_parts_are_repeated(runs):
    done = len(runs.calls)
    maze.start(runs, 0)
    maze.train(runs, maze.Run("maxrl", 2, 0))
    assert len(runs.calls) == done
    summary = runs.out / "eval" / "maxrl-g2-s0.summary.json"
    kept = summary.read_text()
    summary.unlink()
    maze.train(runs, maze.Run("maxrl", 2, 0))
    assert json.loads(summary.read_text())["metrics"] == json.loads(kept)["metrics"]


def test_collected_metrics_match_the_samples(runs):
    found = figures.collected(runs.out)
    assert set(found) == {"start-s0", "maxrl-g2-s0"}
    for name, run in found.items():
        lines = (runs.out / "eval" / f"{name}.jsonl").read_text().splitlines()
        succeeded = np.array([json.loads(line)["succeeded"] for line in lines], float)
        assert run["pass"]["1"][0] == pytest.approx(succeeded.mean(), abs=1e-5)
        assert run["pass"]["4"][0] == pytest.approx(succeeded.any(axis=1).mean(), abs=1e-5)
        assert sum(run["rates"]) == run["problems"] == len(lines)


def test_pass_rates_are_counted_in_their_bins(tmp_path):
    (tmp_path / "eval").mkdir()
    counts = [0, 1, 2, 3, 4, 5, 6, 7, 8]  # of 8: at the limits 1/4, 1/2, 3/4 and between
    rows = [{"succeeded": [True] * c + [False] * (8 - c)} for c in counts]
    (tmp_path / "eval" / "rloo-g16-s1.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    metrics = {f"eval/pass@1{end}": 0.5 for end in ("", "/low", "/high")}
    (tmp_path / "eval" / "rloo-g16-s1.summary.json").write_text(
        json.dumps({"metrics": metrics, "problems": 9, "samples": 8})
    )
    assert figures.collected(tmp_path)["rloo-g16-s1"]["rates"] == [1, 2, 2, 2, 1, 1]


def test_interval_is_that_of_student_t():
    scipy = pytest.importorskip("scipy.stats", reason="scipy comes with jax")
    values = [44.5, 46.1, 39.7]
    low, high = scipy.t.interval(0.95, 2, np.mean(values), scipy.sem(values))
    mean, half = figures.mean_and_half(values)
    np.testing.assert_allclose((mean - half, mean + half), (low, high), rtol=1e-4)


@pytest.mark.parametrize("name", ["passk", "paired"])
def test_documentation_shows_the_stored_results(name):
    table = figures.tables(json.loads(figures.RESULTS.read_text()))[name]
    assert table in (ROOT / "docs" / "studies.md").read_text()


def test_config_with_the_sizes_of_the_paper_is_valid(capsys):
    """Prompts and answers fit the configured lengths, because all prompts of 17x17 mazes have the same number of
    tokens."""
    assert cli.main(["train", str(FOLDER / "maze17.yaml"), "--dry-run", "data.train_size=64"]) == 0
    assert "32 prompts x 128" in capsys.readouterr().out
