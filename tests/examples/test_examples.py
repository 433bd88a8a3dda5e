"""Tests that the files under examples/ work as their headers state: every YAML, the library script, the text task with
every learner, a user-defined estimator, and GSM8K on its real rows with a tiny model, from the weights to an exported
folder that transformers loads."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import yaml

import tunix_like
from tests.training.test_learner_algorithms import DEFAULTS as LEARNER_DEFAULTS
from tunix_like.cli import main as cli
from tunix_like.config.load import load
from tunix_like.runs.checks import check_config
from tunix_like.storage.metrics import rows as metric_rows
from tunix_like.training.learners import LEARNERS, CustomLearner
from tunix_like.training.preferences import PAIR_LEARNER_CLASSES

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
GSM8K = Path(os.environ.get("TUNIX_LIKE_GSM8K", ROOT.parent / "shared" / "data" / "gsm8k"))
SCRIPT = str(Path(sys.executable).with_name("tunix-like"))
YAMLS = sorted(
    path.relative_to(EXAMPLES).as_posix()
    for path in EXAMPLES.rglob("*.yaml")
    if path.parent.name != "launch" and path.name != "maze_sweep.yaml"  # read by tests/cli/test_sweep.py
)


def call(*argv, cwd, **environment):
    done = subprocess.run(
        argv, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{argv}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


OWN = "own_estimator/maze.yaml"
GSM8K_YAMLS = ("qwen2.5_0.5b", "qwen3_0.6b", "qwen3_1.7b", "llama3.2_1b", "gemma3_1b", "smollm2_360m", "qwen3_8b_lora")
PLAIN = ("maze.yaml", "debug/reverse_text.yaml", *(f"gsm8k/{name}.yaml" for name in GSM8K_YAMLS), OWN)
"""Examples that name an estimator and leave the other algorithm keys to the defaults of the learner."""
PARAMETERS = {name: ["algorithm.k=4"] for name in ("maxpo", "pkpo", "passk")}
PARAMETERS |= {"maxk_mix": ["algorithm.alpha=0.5"], "order_statistic": ["algorithm.k=4", "algorithm.statistic=median"]}
PARAMETERS |= {"distillation": ["teacher.path=teacher"]}


def test_examples_exist():
    assert set(PLAIN) <= set(YAMLS)


@pytest.mark.parametrize("name", YAMLS)
def test_every_yaml_loads(name, monkeypatch):
    """The configs are loaded from the folder in which the command of the header is run."""
    monkeypatch.chdir(ROOT)
    assert f"tunix-like train examples/{name}" in (EXAMPLES / name).read_text(), "the header says the command"
    config, learner = check_config(load(f"examples/{name}"))
    assert learner is (LEARNERS | PAIR_LEARNER_CLASSES).get(str(config.algorithm.advantage_estimator), CustomLearner)


@pytest.mark.parametrize("name", PLAIN)
def test_every_learner_by_one_override(name):
    assert set(yaml.safe_load((EXAMPLES / name).read_text())["algorithm"]) == {"advantage_estimator", "num_generations"}
    named = load(EXAMPLES / name).algorithm.advantage_estimator
    for estimator, learner in LEARNERS.items():
        given = [f"algorithm.advantage_estimator={estimator}", *PARAMETERS.get(estimator, [])]
        asked = load(EXAMPLES / name, [] if estimator == named else given)
        config, found = check_config(asked)
        assert found is learner
        default = learner.config_class()
        assert config.algorithm.loss_agg_mode == default.loss_agg_mode
        assert config.algorithm.policy_loss_fn == default.policy_loss_fn


def module(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


FORM = "2 * 9 = 18</reasoning>\n<answer>{}</answer>"


@pytest.mark.parametrize(
    ("completion", "gold", "reward"),
    [
        (FORM.format(r"\boxed{18}"), "18", 1.0),
        (FORM.format(r"\boxed{1,218}"), "1218", 1.0),
        (FORM.format(r"\boxed{17}, no: \boxed{18}"), "18", 1.0),
        (FORM.format(r"\boxed{17}"), "18", 0.1),
        (FORM.format("18"), "18", 0.0),  # no box
        (r"so \boxed{18}", "18", 0.5),
        (FORM.format(r"\boxed{18}") + "<answer>", "18", 0.5),
        (r"<answer>\boxed{18}</answer></reasoning>", "18", 0.5),
        (r"<answer>\boxed{17}</answer> \boxed{18}", "18", 0.0),
        ("", "18", 0.0),
    ],
)
def test_partial_credit_of_maxtext(completion, gold, reward):
    assert module("maxtext/rewards").partial_credit([completion], gold=[gold], question=["?"]) == [reward]


def test_reward_of_the_maxrl_paper():
    """Numbers and formulas are compared by value."""
    completions = [r"so \boxed{\frac{1}{2}}", r"\boxed{x+1}", r"\boxed{4}", "4"]
    scores = module("maxrl_paper/rewards").boxed([""] * 4, completions, answer=["0.5", "1+x", "5", "4"])
    assert scores == [1.0, 1.0, 0.0, 0.0]


def test_library_use(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = module("library_use").main()
    assert result["after"] > result["before"] + 0.3
    assert re.search(r"pass@1 0\.\d\d -> [01]\.\d\d after 60 steps", capsys.readouterr().out)
    assert list(tmp_path.iterdir()) == [], "no folder is written unless one is asked for"


DEFAULTS = {
    name: f"loss: {loss}, aggregation {aggregation}, KL none (beta 0)"
    for name, (_, aggregation, loss, *_) in LEARNER_DEFAULTS.items()
    if name not in ("ppo", "distillation")
}
TRAINED = ("grpo", "drgrpo", "rloo", "maxrl", "maxpo")  # tests/training/test_learner_algorithms.py trains the others


def test_reverse_text_trains_by_every_learner(tmp_path):
    """One process runs all learners, each with one override. The output names the learner, its loss and its
    aggregation."""
    yaml_file = str(EXAMPLES / "debug" / "reverse_text.yaml")
    small = ["sft.max_steps=0", "training.max_steps=3", "data.batch_size=4", "eval.max_problems=8", "eval.batch_size=8",
             "model.config.num_hidden_layers=1"]  # fmt: skip
    commands = [
        ["train", yaml_file, *small, f"algorithm.advantage_estimator={name}"]
        + PARAMETERS.get(name, [])
        + ([] if name in TRAINED else ["--dry-run"])
        for name in DEFAULTS
    ]
    code = "import json, sys; from tunix_like.cli.main import main; sys.exit(max(map(main, json.loads(sys.argv[1]))))"
    said = call(sys.executable, "-c", code, json.dumps(commands), cwd=tmp_path)
    parts = said.split("  learner: ")[1:]
    for part, (name, line) in zip(parts, DEFAULTS.items(), strict=True):
        assert part.startswith(f"{LEARNERS[name].__name__} ({name})\n") and line in part
        assert f"folder: runs/reverse_text-{name}-s0\n" in part
        if name not in TRAINED:
            continue
        rows = [row for row in metric_rows(tmp_path / "runs" / f"reverse_text-{name}-s0") if "step" in row]
        assert [row["step"] for row in rows] == [0, 1, 2, 3]
        assert all(np.isfinite(row["train/loss"]) for row in rows[1:]) and "eval/pass@1" in rows[3]


def test_own_estimator_example_trains_resumes_and_exports(tmp_path, monkeypatch, capsys):
    """Runs the command of the header of examples/own_estimator at a small size. The same command resumes the run, and
    the export does not need the file of the estimator. The limits of the estimator are drgrpo and maxrl."""
    monkeypatch.chdir(ROOT)
    small = ["data.maze_size=7", "data.train_size=64", "model.config.hidden_size=16",
             "model.config.num_hidden_layers=1", "sft.max_steps=0",
             "data.batch_size=8", "algorithm.num_generations=8", "algorithm.estimator_params.power=0.3",
             "rewards.functions=[{name: " + f"{tmp_path}/luck.py:luck" + "}]", "eval.samples=8", "eval.batch_size=4",
             "data.eval_size=4", "eval.k=[1]", f"training.output_dir={tmp_path}/run"]  # fmt: skip
    (tmp_path / "luck.py").write_text(
        "def luck(completions):\n    return [float(len(c) % 3 == 0) for c in completions]\n"
    )
    for steps in (2, 3):
        assert cli.main(["train", f"examples/{OWN}", *small, f"training.max_steps={steps}"]) == 0
        said = capsys.readouterr().out
        assert "learner: CustomLearner (examples/own_estimator/estimator.py:tempered)" in said
    assert "train 3/3" in said and "train 2/3" not in said, "the second command resumed"
    rows = [row for row in metric_rows(tmp_path / "run") if "step" in row]
    assert [row["step"] for row in rows] == [0, 1, 2, 3] and all(row["train/grad_norm"] > 0 for row in rows[1:])
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["algorithm"]["advantage_estimator"] == (
        "examples/own_estimator/estimator.py:tempered"
    )
    kept = [json.loads(line) for line in (tmp_path / "run/rollouts/step_000001.jsonl").read_text().splitlines()]
    rewards, found = (np.reshape([row[name] for row in kept], (8, 8)) for name in ("reward", "advantage"))
    assert 0 < rewards.mean() < 1
    mean = rewards.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(found, (rewards - mean) / np.where(mean > 0, mean, 1) ** 0.3, rtol=1e-5, atol=1e-6)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", "run", "out"]) == 0 and (tmp_path / "out" / "model.safetensors").is_file()

    groups = [[1, 0, 0, 0], [1, 1, None, 0], [0, 0, 0, 0], [1, 1, 1, None]]
    place = str(EXAMPLES / "own_estimator" / "estimator.py:tempered")
    for power, name in ((0.0, "drgrpo"), (1.0, "maxrl")):
        expected = tunix_like.compute_advantages(groups, name)
        np.testing.assert_allclose(tunix_like.compute_advantages(groups, place, power=power), expected, rtol=1e-6)


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory):
    """A folder with the two tiny models. The rows are read from their own folder."""
    if not (GSM8K / "train.jsonl").is_file():
        pytest.skip(f"GSM8K is not in {GSM8K}; set TUNIX_LIKE_GSM8K to its folder")
    home = tmp_path_factory.mktemp("gsm8k")
    (home / "odd.py").write_text(ODD)
    for family in ("qwen2", "qwen3"):
        maker = str(EXAMPLES / "gsm8k" / "make_tiny_model.py")
        call(sys.executable, maker, "--data", str(GSM8K), "--out", f"tiny_{family}", "--family", family, cwd=home)
    return home


SMALL = (
    "model.init=random",
    f"data.path={GSM8K}",
    "data.batch_size=2",
    "algorithm.num_generations=2",
    "rollout.max_tokens_to_generate=16",
    "eval.max_problems=4",
    "eval.samples=2",
    "eval.k=[1, 2]",
    "eval.batch_size=4",
    "training.max_steps=3",
    "training.remat=false",
    "rollout.max_prompt_length=256",
    "rewards.functions=[{name: gsm8k}, {name: odd.py:odd, weight: 0.1}]",
)
# A random model never solves a problem. This reward gives the steps a nonzero gradient.
ODD = """
def odd(completions):
    return [float(len(completion) % 2) for completion in completions]
"""


def check_run(said, folder, learner):
    """Checks three steps on the real rows with an evaluation before and after, and the count of prompts that are too
    long."""
    assert f"learner: {learner}" in said
    assert re.search(r"training: 7473 prompts, \d+ of them longer than 256 tokens and skipped", said)
    assert "Reason step by step" in said and "<|im_start|>assistant" in said, "the prompt is shown as the model sees it"
    rows = [row for row in metric_rows(folder) if "step" in row]
    assert [row["step"] for row in rows] == [0, 1, 2, 3] and "eval/pass@2" in rows[0] and "eval/pass@2" in rows[3]
    rollout = json.loads((folder / "rollouts" / "step_000001.jsonl").read_text().splitlines()[0])
    assert rollout["prompt"].startswith("<|im_start|>system") and rollout["reward/gsm8k"] in (0.0, 1.0)
    assert any(row["train/grad_norm"] > 0 for row in rows[1:])


def check_export(run, out, cwd, family):
    """Checks that transformers loads the exported folder, with equal logits and equal ids."""
    import torch
    import transformers

    call(SCRIPT, "export", run, out, cwd=cwd)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(cwd / out, dtype=torch.float32)
    assert theirs.config.model_type == family
    model, tokenizer = tunix_like.load_model(cwd / out)
    question = "Natalia sold 48 clips to her friends in April. How many did she sell altogether?"
    ids = tokenizer.encode(question)
    assert transformers.AutoTokenizer.from_pretrained(cwd / out)(question)["input_ids"] == ids
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits.numpy()
    np.testing.assert_allclose(model(jnp.asarray([ids])), expected, rtol=0, atol=1e-4)
    assert np.abs(expected).max() > 0.05


def test_gsm8k_by_the_script(gsm8k):
    """examples/gsm8k/run_qwen3.sh trains on the real rows and evaluates, without an installation."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    argv = [str(EXAMPLES / "gsm8k" / "run_qwen3.sh"), "rloo", "model.path=tiny_qwen3", *SMALL]
    said = call(*argv, cwd=gsm8k, EXTRA="none", PATH=path)
    folder = gsm8k / "runs" / "qwen3_0.6b-rloo-s0"
    check_run(said, folder, "RLOOLearner (rloo)")
    assert "checkpoints/3: 4 problems, 2 samples each" in said, "the script evaluates what it has trained"
    check_export(str(folder), "out_qwen3", gsm8k, "qwen3")


def test_gsm8k_by_the_command(gsm8k):
    """examples/gsm8k/qwen2.5_0.5b.yaml runs with another learner, selected by one override."""
    override = "algorithm.advantage_estimator=grpo"
    yaml_file = str(EXAMPLES / "gsm8k" / "qwen2.5_0.5b.yaml")
    said = call(SCRIPT, "train", yaml_file, "model.path=tiny_qwen2", override, *SMALL, cwd=gsm8k)
    run = "runs/qwen2.5_0.5b-grpo-s0"
    check_run(said, gsm8k / run, "GRPOLearner (grpo)")
    check_export(run, "out_qwen2", gsm8k, "qwen2")
