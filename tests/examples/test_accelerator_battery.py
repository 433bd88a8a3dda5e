"""Tests the benchmark stages for accelerators on the CPU: every stage writes its result, and no failing stage ends the
program. Also tests the table that compares compiled programs."""

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

from benchmarks import accelerator, peer_compiled  # noqa: E402
from benchmarks.accelerator import STAGES, Battery, merged, read_results, run_stage  # noqa: E402
from benchmarks.accelerator_report import shown, wanted, write_report  # noqa: E402
from benchmarks.compiled import Work  # noqa: E402

HANGS = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def test_every_stage_writes_its_result_and_the_next_call_skips_all_stages(tmp_path, capsys):
    """The time limit is long, so that the load of the machine does not matter."""
    arguments = ["--minutes", "30", "--out", str(tmp_path), "--size", "tiny"]
    assert accelerator.main(arguments) == 0, (tmp_path / "report.md").read_text()
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [line["stage"] for line in lines] == list(STAGES)
    assert {line["status"] for line in lines} == {"ok"}
    found = {line["stage"]: line["found"] for line in lines}
    assert found["machine"]["backend"] == "cpu" and found["machine"]["copy_bytes"] > 0
    assert found["machine"]["matmul_operations"] > 0 and "jax" in found["machine"]["versions"]
    parity = found["parity"]
    assert 0 < parity["logits"]["relative"] < 0.1 and parity["attention"]["kind"] == "blocked"
    assert 0 < parity["logprobs"]["mean"] < 0.1 and 0 <= parity["gradients"]["relative"] < 0.1
    for stage in ("update", "decode"):
        assert (
            found[stage]["seconds"] > 0 and found[stage]["mfu"] > 0 and found[stage]["model"]["predicted_seconds"] > 0
        )
    assert found["decode"]["memory_share"] > 0 and found["step"]["parts"]["time/update"] > 0
    assert found["memory"]["update"]["compiled_mb"] > 0 and found["memory"]["estimate"]["update"] > 0
    assert found["maze"]["step"] == 2 and "eval/pass@1" in found["maze"]
    report = (tmp_path / "report.md").read_text()
    assert all(f"\n## {stage}\n" in report for stage in STAGES)
    capsys.readouterr()
    assert accelerator.main(arguments) == 0
    assert capsys.readouterr().out.count("done before") == len(STAGES)
    with pytest.raises(SystemExit, match="2"):
        accelerator.main([*arguments[:-1], "qwen3_0.6b"])


@pytest.fixture
def battery(tmp_path, monkeypatch):
    """A battery whose stages are short programs, with a limit of one minute."""
    scripts = dict.fromkeys(STAGES, "pass")
    monkeypatch.setattr(Battery, "command", lambda self, stage: [sys.executable, "-c", scripts[stage]])
    monkeypatch.setattr(accelerator, "USUAL_GRACE", 0.2)
    battery = Battery(tmp_path, "tiny", 60.0, time.monotonic() + 60)
    battery.scripts = scripts
    return battery


def test_hanging_or_failing_stage_does_not_end_the_other_stages(battery, monkeypatch):
    limit = Battery.limit
    monkeypatch.setattr(Battery, "limit", lambda self, stage: 3.0 if stage == "parity" else limit(self, stage))
    file = battery.out / "parity.jsonl"
    battery.scripts["parity"] = f"open({str(file)!r}, 'w').write('{{\"before\": 1}}\\n{{\"cut'); {HANGS}"
    battery.scripts["update"] = "raise RuntimeError('out of memory')"
    accelerator.run(battery)
    found = read_results(battery.results)
    assert list(found) == list(STAGES)
    status = {stage: line["status"] for stage, line in found.items()}
    assert status == {**dict.fromkeys(STAGES, "ok"), "parity": "timed out", "update": "failed"}
    assert found["parity"]["found"] == {"before": 1} and "limit of 3 s" in found["parity"]["error"]
    assert 3 <= found["parity"]["seconds"] < 30
    assert found["update"]["error"].endswith("RuntimeError: out of memory")
    battery.scripts |= {"parity": "pass", "update": "pass"}
    accelerator.run(battery)
    assert len(battery.results.read_text().splitlines()) == len(STAGES) + 2, "only what had not succeeded ran again"
    assert {line["status"] for line in read_results(battery.results).values()} == {"ok"}


def test_a_stage_without_time_is_skipped(battery):
    battery.end = time.monotonic() + 1
    line = run_stage(battery, "maze")
    assert line["status"] == "skipped" and not (battery.out / "maze.log").exists()


def test_interruption_stops_the_stage_and_writes_the_report(tmp_path):
    """The interruption happens in the first stage, during its imports."""
    command = [sys.executable, "-m", "benchmarks.accelerator", "--minutes", "5", "--size", "tiny", "--out", tmp_path]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE)
    log = tmp_path / "machine.log"
    while not log.exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert read_results(tmp_path / "results.jsonl")["machine"]["status"] == "interrupted"
    assert "| machine | interrupted |" in (tmp_path / "report.md").read_text()


def test_job_of_the_real_model_runs_with_a_tiny_one(tmp_path, monkeypatch):
    gguf_models = pytest.importorskip("tests.models.gguf_models")
    monkeypatch.setenv("TUNIX_LIKE_CACHE", str(tmp_path / "cache"))
    gguf_models.written(tmp_path / "tiny.gguf", "llama", options={"max_position_embeddings": 1024})
    problems = [{"question": f"{n} + 1?", "answer": f"It is {n + 1}.\n#### {n + 1}"} for n in range(8)]
    (tmp_path / "data").mkdir()
    for name in ("train", "test"):
        (tmp_path / "data" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, problems)))
    command = [sys.executable, "-m", "benchmarks.real_model"]
    model, file = ["--model", str(tmp_path / "tiny.gguf")], str(tmp_path / "reference.npz")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run([*command, "reference", file, *model], cwd=ROOT, env=environment, check=True)
    less = ["data.batch_size=2", "algorithm.num_generations=2", "rollout.max_tokens_to_generate=8", "sft.max_steps=1"]
    less += ["training.max_steps=1", "eval.samples=1", "eval.k=[1]", "eval.max_problems=4"]
    call = [*command, "run", "--minutes", "20", "--out", str(tmp_path / "out"), "--reference", file, *model]
    done = subprocess.run([*call, "--data", str(tmp_path / "data"), *less], cwd=ROOT, env=environment)
    lines = read_results(tmp_path / "out" / "results.jsonl")
    assert done.returncode == 0 and list(lines) == ["parity", "sums", "gsm8k"], lines
    parity = lines["parity"]["found"]
    assert parity["float32 plain"]["logprobs"] < 1e-6 and parity["float32 plain"]["same_first"] == 1
    assert 1e-4 < parity["bfloat16 blocked"]["gradient"]["median"] < 0.1
    assert lines["sums"]["found"]["step"] == 1 and "eval/pass@1" in lines["gsm8k"]["found"]


def test_report_shows_the_target_values(tmp_path):
    line = {"stage": "update", "size": "qwen3_0.6b", "status": "failed", "seconds": 3.0, "limit": 9.0}
    line |= {"error": "it failed", "found": {"mfu": 0.4, "model": {"bound": "a|b"}}}
    write_report(tmp_path / "report.md", [line])
    text = (tmp_path / "report.md").read_text()
    assert "| mfu | 0.4 | >= 0.45: missed |" in text and "| model.bound | a/b |  |" in text and "it failed" in text
    assert wanted(line, "mfu", 0.5) == ">= 0.45: met" and not wanted(line | {"size": "tiny"}, "mfu", 0.5)
    assert wanted(line | {"stage": "memory"}, "update.ratio", 1.2) == "0.9 to 1.1: missed"
    assert shown(123456.0) == "1.235e+05" and merged(tmp_path / "none.jsonl") == {}


def test_table_of_compiled_programs():
    work = Work(layers=1)
    costs = {"arguments": 7.7e8, "temporaries": 2.5e9, "cycles": 3e8, "operations": 2.5e13, "compile_seconds": 9.0}
    ours = costs | {"kernels": 12.0, "collectives": {"all-gather": 1e6}, "numbers": {"all-gather": 2.0}}
    peer = costs | {"kernels": 0.0, "collectives": {"all-reduce": 3e6}, "numbers": {"all-reduce": 1.0}}
    text = "\n".join(peer_compiled.table(work, {"update, ours": ours, "update, tunix": peer}))
    assert "| all-gather (number) | 1.0 MB (2) | - |" in text and "| network | 1.0 MB | 3.0 MB |" in text
    assert peer_compiled.kernel_cycles(work, peer) == 0
    pairs = 8 * sum(range(1, 385)) + 64 * sum(384 + own for own in range(1, 769))
    expected = 11 * 2 * 16 * 128 * pairs / 8 / (197e12 / 1.5e9)
    assert peer_compiled.kernel_cycles(work, ours) == pytest.approx(expected)
    assert f"| {expected / 1e6:.3g} | 0 |" in text


def test_peer_side_imports_only_modules_of_its_environment():
    known = {"benchmarks.compiled", "tunix_like.runtime.accelerators"} | {
        f"tunix_like.compile.{name}" for name in ("costs", "devices")
    }
    for name in ("compiled", "compiled_tunix"):
        tree = ast.parse((ROOT / "benchmarks" / f"{name}.py").read_text(encoding="utf-8"))
        found = {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert {module for module in found if module.partition(".")[0] in ("benchmarks", "tunix_like")} <= known
