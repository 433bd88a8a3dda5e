"""Tests the engine benchmarks: every case runs at a small size, lengths are the forced ones, operation counts are
correct, and both sides of a comparison alternate. No test depends on measured times."""

import ast
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

from benchmarks import against_trl, against_tunix, ours, run, zero_signal  # noqa: E402
from benchmarks.cases import CASES, MODELS, Case, Model, floating_operations, make_case, write_model  # noqa: E402
from benchmarks.worker import Finished, Gate, Worker, case_command  # noqa: E402

MINIATURE = Model(layers=1, width=64, inner=64, heads=2, kv_heads=1, head=8, vocab=64)


def shrunk(name):
    """Returns the case with the same features and few tokens."""
    case = make_case(name, "tiny")
    return dataclasses.replace(
        case,
        model=MINIATURE,
        prompts=2,
        group=min(case.group, 3),
        prompt_length=5,
        length=6,
        room=None if case.room is None else 17,
        peer_prompts=None,
    )


class Counter(Gate):
    """A gate without a process: permits a few repeats and stores their reports."""

    def __init__(self, repeats):
        self.left, self.reports = repeats, []

    def begin(self):
        assert not self.reports

    def end(self, tokens, **more):
        self.reports.append({"tokens": tokens} | more)
        if len(self.reports) == self.left:
            raise Finished


ALIKE = {shrunk(name): name for name in reversed(CASES)}
"""Each case that differs from the others at the small size, with its first name."""


@pytest.mark.parametrize("case", ALIKE, ids=ALIKE.values())
def test_each_case_runs_with_its_configured_lengths(case, tmp_path):
    gate = Counter(2)
    write_model(case, tmp_path)
    with pytest.raises(Finished):
        ours.run_case(case, gate, tmp_path)
    everything = case.rows * case.length
    for report in gate.reports:
        if case.kind == "update":
            assert report["tokens"] == case.batch().lengths.sum()
        elif case.spread:
            assert case.rows <= report["tokens"] < everything
        else:  # also if the sampler has more room: every row then ends exactly at the last token
            assert report["tokens"] == everything
        if "loss" in report:
            assert np.isfinite([report["loss"], report["grad_norm"]]).all()
            assert case.counting or report["grad_norm"] > 0  # the counting model has no gradient
    assert case.max_tokens > case.length or case.room is None


def test_lengths_and_rewards_of_a_batch():
    case = make_case("update_eos", "mid")
    batch = case.batch()
    shares = dataclasses.replace(case, prompts=500).batch().lengths.mean() / case.length
    assert abs(shares - 55 / 128) < 0.02
    assert abs(len(case.eos_ids()) / case.model.vocab * 128 - 2.0) < 0.2, "a hazard of 1 / 64, more or less"
    assert 0 not in case.eos_ids() and len(set(case.eos_ids())) == len(case.eos_ids())
    assert min(make_case("rollout", "mid").eos_ids()) >= case.model.vocab, "an end that cannot be drawn"
    assert (batch.prompts > 0).all() and batch.prompts.max() < case.model.vocab
    assert ((batch.completions > 0) == (np.arange(case.length) < batch.lengths[..., None])).all()
    assert (np.ptp(batch.rewards.reshape(case.prompts, case.group), axis=1) > 0).all()
    assert Case.from_json(case.to_json()) == case


def test_operation_counts_equal_a_count_token_by_token():
    case = Case(Model(3, 4, 5, 2, 1, 6, 7), "rollout", prompts=2, group=2, prompt_length=3, length=4)
    lengths = np.array([[1, 4], [2, 3]])
    width, inner, heads, kv, head, vocab = 4, 5, 2, 1, 6, 7

    def token(seen):
        """Counts one token through a layer: the products of a row with each matrix, then its attention."""
        matrices = [(width, heads * head), (width, kv * head), (width, kv * head), (heads * head, width)]
        matrices += [(width, inner), (width, inner), (inner, width)]
        return sum(2 * a * b for a, b in matrices) + sum(2 * head + 2 * head for _ in range(heads) for _ in range(seen))

    total = 0
    for group in lengths:
        total += 3 * sum(token(seen) for seen in range(1, 4))
        for length in group:
            total += 3 * sum(token(3 + seen) for seen in range(1, length)) + length * 2 * width * vocab
    assert floating_operations(case, lengths) == total
    for kind, beta, passes in (("update", 0.0, 3), ("step", 0.0, 4), ("step", 0.1, 5)):
        assert floating_operations(dataclasses.replace(case, kind=kind, beta=beta), lengths) == passes * total


def test_run_prints_a_table_and_writes_json(monkeypatch, tmp_path, capsys):
    """Uses a real worker process, and a case that cannot run before one that can."""
    monkeypatch.setitem(MODELS, "tiny", MINIATURE)
    monkeypatch.setitem(
        CASES, "rollout", {"kind": "rollout", "prompts": 1, "group": 2, "prompt_length": 4, "length": 3}
    )
    measure = run.measure

    def fail_first(case, repeats):
        if case.kind == "update":
            raise RuntimeError("ended (-9)")
        return measure(case, repeats)

    monkeypatch.setattr(run, "measure", fail_first)
    monkeypatch.setattr(run, "matmul_rate", lambda repeats: 1e6)
    file = tmp_path / "found.json"
    assert run.main(["--case", "update", "rollout", "--repeats", "2", "--json", str(file)]) == 1
    out = capsys.readouterr().out
    assert "ended (-9)" in out and "\ntiny/rollout " in out
    found = json.loads(file.read_text())
    assert list(found["cases"]) == ["tiny/rollout"] and found["machine"]["cores"] >= 1
    row = found["cases"]["tiny/rollout"]
    assert row["tokens"] == 6 and len(row["repeats"]) == 2 and row["programs"] > 0 and row["later_programs"] == 0
    assert row["min_s"] <= row["median_s"] <= row["max_s"] < row["first_s"]
    assert row["floor_s"] * 1e6 == floating_operations(make_case("rollout", "tiny"), np.array([[3, 3]]))
    assert row["peak_mb"] > row["base_mb"] > 50


@pytest.mark.parametrize("program", [run.main, against_tunix.main, against_trl.main, zero_signal.main])
@pytest.mark.parametrize("number", ["0", "-1", "few"])
def test_no_repeats_are_refused(program, number, capsys):
    with pytest.raises(SystemExit, match="2"):
        program(["--repeats", number])
    said = capsys.readouterr()
    assert f"--repeats: expected a whole number of at least 1, got '{number}'" in said.err and not said.out


def test_rate_of_a_matrix_product():
    gate = Counter(2)
    with pytest.raises(Finished):
        ours.run_case(Case(MINIATURE, "matmul", length=8), gate, None)
    assert [report["operations"] for report in gate.reports] == [2 * 8**3] * 2


def test_error_of_a_dead_worker_states_the_cause():
    with pytest.raises(RuntimeError, match="No module named benchmarks.nothing"):
        Worker(case_command(shrunk("rollout"), None, "benchmarks.nothing"))


SECONDS = {"benchmarks.peer_tunix": [9.0, 4.0, 6.0], "benchmarks.ours": [9.0, 2.0, 1.0]}
NORMS = {"benchmarks.peer_tunix": 1.0, "benchmarks.ours": 1.0}
TURNS = []


class Side:
    """Replaces a worker: scripted repeats, and a record of the order of calls."""

    def __init__(self, command):
        self.module = command[2]
        self.script = iter(SECONDS[self.module])
        self.built = {"base_mb": 100.0}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def repeat(self):
        TURNS.append(self.module.rpartition(".")[2])
        usage = {"peak_mb": 600.0 if "peer" in self.module else 200.0, "compile_s": 0.0, "programs": 0}
        return {"seconds": next(self.script), "tokens": 12, "grad_norm": NORMS[self.module]} | usage


def test_comparison_alternates_the_sides(monkeypatch):
    monkeypatch.setattr(against_tunix, "Worker", Side)
    TURNS.clear()
    case = make_case("update", "tiny")
    found = against_tunix.compare(case, Path("python"), Path("folder"), 2)
    assert TURNS == ["peer_tunix", "ours", "peer_tunix", "ours", "ours", "peer_tunix"]
    assert (found["ratio_min"], found["ratio"], found["ratio_max"]) == (2.0, 4.0, 6.0), "the warm-up is left out"
    assert found["memory"] == 3.0 and found["peer"]["median_s"] == 5.0 and found["ours"]["median_s"] == 1.5
    text = against_tunix.line(against_tunix.Row("tiny", "update", 1.5, 2.5), found)
    assert "2.00..6.00" in text and ">= 1.5" in text and ">= 2.5" in text
    monkeypatch.setitem(NORMS, "benchmarks.peer_tunix", 1.01)
    with pytest.raises(RuntimeError, match="not the same work: the gradient's norm"):
        against_tunix.compare(case, Path("python"), Path("folder"), 2)


def test_comparison_with_trl_trains_both_sides(monkeypatch, tmp_path, capsys):
    pytest.importorskip("trl")
    gguf_models = pytest.importorskip("tests.models.gguf_models")
    gguf_models.written(tmp_path / "tiny.gguf", "llama")
    monkeypatch.setattr(against_trl, "MODEL", str(tmp_path / "tiny.gguf"))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    options = ["--repeats", "1", "--json", str(tmp_path / "out.json")]
    assert against_trl.main([*options, "--weights", "lora"]) == 0
    found = json.loads((tmp_path / "out.json").read_text())["weights"]["lora"]
    for side in ("peer", "ours"):
        most = against_trl.PROMPTS * against_trl.GROUP * against_trl.LENGTH
        assert all(0 < repeat["tokens"] <= most and 0 <= repeat["reward"] < 1 for repeat in found[side]["repeats"])
    assert capsys.readouterr().out.splitlines()[-1].startswith("lora ")


def test_peer_is_installed_once_with_torch_first(monkeypatch, tmp_path, capsys):
    asked = []
    monkeypatch.setattr(against_tunix.subprocess, "run", lambda args, **_: asked.append(args))
    python = against_tunix.prepare(tmp_path)
    assert asked[0][1:] == ["-m", "venv", str(tmp_path)]
    assert [args[0] for args in asked[1:]] == [str(python)] * 2
    assert [args[-1] for args in asked[1:]] == ["torch==2.13.0", "google-tunix==0.1.7"]
    monkeypatch.undo()
    asked.clear()
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho 0.1.7\n")
    python.chmod(0o755)
    real = subprocess.run
    monkeypatch.setattr(
        against_tunix.subprocess, "run", lambda args, **kinds: asked.append(args) or real(args, **kinds)
    )
    assert against_tunix.prepare(tmp_path) == python and len(asked) == 1


def test_command_of_the_peer():
    case = make_case("rollout_eos", "mid")
    line = case_command(case, Path("weights"), against_tunix.PEER, "python")
    assert line[:3] == ["python", "-m", "benchmarks.peer_tunix"] and line[4] == "weights"
    assert Case.from_json(line[3]) == case
    assert all(make_case(row.case, row.size).kind in ("rollout", "update", "step") for row in against_tunix.TABLE)


@pytest.mark.parametrize("name", ["cases", "worker", "peer_tunix", "__init__"])
def test_peer_modules_do_not_import_the_package(name):
    tree = ast.parse((ROOT / "benchmarks" / f"{name}.py").read_text(encoding="utf-8"))
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    found |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    own = {module for module in found if module.partition(".")[0] in ("benchmarks", "tunix_like")}
    assert own <= {"benchmarks.cases", "benchmarks.worker"}
    assert name != "cases" or {m.partition(".")[0] for m in found} <= {*sys.stdlib_module_names, "numpy", "safetensors"}
