"""Tests `tunix-like init`: the files that it writes pass the check, the dry run and the training of their header."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import tunix_like
from tests.tiny_model import HF
from tunix_like.cli import init as starting
from tunix_like.cli import main as cli
from tunix_like.cli.commands import KINDS
from tunix_like.config.load import load
from tunix_like.data import gsm8k, reverse_text
from tunix_like.runs.checks import check_config

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_init_writes_the_files_of_a_run(kind, capsys):
    assert cli.main(["init", "my-run", "--like", kind]) == 0
    code = f"my-run_{kind if kind in ('env', 'tools') else 'rewards'}.py"
    names = {"my-run.yaml", code} | ({"my-run.jsonl"} if kind == "own" else set())
    assert {path.name for path in Path().iterdir()} == names and "wrote my-run.yaml, " in capsys.readouterr().out
    text = Path("my-run.yaml").read_text()
    assert "NAME" not in text and f"{code}:" in text and "tunix-like train my-run.yaml" in text
    config, learner = check_config(load("my-run.yaml"))
    assert learner is tunix_like.MaxRLLearner and config.training.eval_every_n_steps


def test_init_overwrites_no_file(capsys):
    Path("mine_rewards.py").write_text("mine")
    assert cli.main(["init", "mine"]) == 2
    assert "mine_rewards.py: exists already" in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["mine_rewards.py"]
    assert Path("mine_rewards.py").read_text() == "mine"


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a b", "-x", "3"])
def test_invalid_names_raise_an_error(name, capsys):
    with pytest.raises(tunix_like.UserError, match="give a name of letters"):
        starting.write_start(name, "own", Path())


def test_config_for_user_data_runs(capsys):
    """Runs the commands of the header, with a tiny model in place of that of the hub."""
    assert cli.main(["init", "mine"]) == 0
    assert cli.main(["check-rewards", "mine.yaml"]) == 0, capsys.readouterr().out
    assert "nothing suspicious" in capsys.readouterr().out
    model, _ = tunix_like.load_model(HF, init="random")
    tunix_like.export_model(model, reverse_text.tokenizer(), "tiny")
    small = ["model.path=tiny", "data.system_prompt=null", "rollout.max_prompt_length=40", "training.max_steps=1"]
    small += ["rollout.max_tokens_to_generate=4", "eval.samples=1", "data.batch_size=8", "algorithm.num_generations=2"]
    assert cli.main(["train", "mine.yaml", *small]) == 0
    said = capsys.readouterr().out
    assert (
        "training: 8 prompts" in said
        and "evaluation: 4 prompts" in said
        and "rewards: 1 x mine_rewards.py:right" in said
    )
    assert Path("runs/mine-maxrl-s0/checkpoints/1").is_dir()


def test_maze_config_is_checked(capsys):
    assert cli.main(["init", "walk", "--like", "maze"]) == 0
    assert cli.main(["check-rewards", "walk.yaml", "data.train_size=60", "data.eval_size=4"]) == 0
    said = capsys.readouterr().out
    assert "nothing suspicious" in said and "walk_rewards.py:few_moves" in said
    ours, example = load("walk.yaml"), load(EXAMPLES / "maze.yaml")
    assert ours.model == example.model and ours.rollout == example.rollout and ours.algorithm == example.algorithm


def test_the_sums_of_a_real_model(capsys):
    assert cli.main(["init", "add", "--like", "sums"]) == 0
    assert cli.main(["check-rewards", "add.yaml"]) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert "nothing suspicious" in said and "add_rewards.py:number_alone" in said
    ours, example = load("add.yaml"), load(EXAMPLES / "smollm2" / "sums.yaml")
    assert (ours.model, ours.data, ours.rollout) == (example.model, example.data, example.rollout)
    assert (ours.algorithm, ours.optimizer) == (example.algorithm, example.optimizer)
    assert ours.training.max_steps == example.training.max_steps
    starting.write_start("other", "sums", Path())
    module = importlib.util.module_from_spec(spec := importlib.util.spec_from_file_location("s", "other_rewards.py"))
    spec.loader.exec_module(module)
    assert module.number_alone(None, ["12", " 12\n", "12.", "13", "It is 12"], gold=["12"] * 5) == [1, 1, 0, 0, 0]


def test_answer_format_reward():
    starting.write_start("school", "gsm8k", Path())
    spec = importlib.util.spec_from_file_location("school_rewards", "school_rewards.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    texts = ["48 / 2 = 24\n#### 24", "#### 1,024 ", "24", "#### 24\nbecause", "the answer is #### 24"]
    assert module.in_form(texts, question=[]) == [1, 1, 0, 0, 0]
    assert gsm8k.gold(texts[0]) == "24"


def test_user_defined_environment_is_checked_trained_and_played(capsys):
    assert cli.main(["init", "mine", "--like", "env"]) == 0
    assert cli.main(["check-rewards", "mine.yaml"]) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert "nothing succeeds" in said and "INVALID" in said, "the answers are games with more numbers"
    small = ["training.max_steps=1", "training.eval_every_n_steps=1", "sft.max_steps=1", "data.batch_size=8"]
    small += ["eval.max_problems=8", "eval.samples=1", "algorithm.num_generations=2", "data.train_size=64"]
    assert cli.main(["train", "mine.yaml", *small]) == 0
    said = capsys.readouterr().out
    assert "  turns " in said and "turns/mean" in said and "environment/solved" in said
    assert cli.main(["generate", "runs/mine-maxrl-s0", "--row", "40"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("assistant: ") and "reward of the environment" in said.err


def test_user_defined_tool_is_checked_trained_and_called(capsys):
    assert cli.main(["init", "mine", "--like", "tools"]) == 0
    assert cli.main(["check-rewards", "mine.yaml", "data.train_size=64"]) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert "nothing suspicious" in said and '"name": "calculator"' in said
    small = ["training.max_steps=1", "training.eval_every_n_steps=1", "sft.max_steps=1", "data.batch_size=8"]
    small += ["eval.max_problems=8", "eval.samples=1", "algorithm.num_generations=2", "data.train_size=64"]
    assert cli.main(["train", "mine.yaml", *small]) == 0
    said = capsys.readouterr().out
    assert "tools mine_tools.py:calculator" in said and "environment/tool_calls" in said
    assert cli.main(["generate", "runs/mine-maxrl-s0", "--row", "3"]) == 0
    assert "reward of the environment" in capsys.readouterr().err


def test_the_tool_of_a_new_run():
    starting.write_start("mine", "tools", Path())
    spec = importlib.util.spec_from_file_location("mine_tools", "mine_tools.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for expression, result in (("123 * 456", "56088"), (" -2+3 ", "1"), ("5 - -7", "12"), ("2--2", "4")):
        assert module.calculator(expression) == result == str(eval(expression.strip()))
    for wrong in ("1", "2 ** 9", "1 / 0", "print(1)", "9" * 21 + " * 1", ""):
        with pytest.raises(ValueError, match="write two integers"):
            module.calculator(wrong)
