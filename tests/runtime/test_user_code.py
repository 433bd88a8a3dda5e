"""Tests that code of the user which ends the program when it is imported is an error, under every key that names
code."""

from __future__ import annotations

import re

import pytest

from tunix_like.cli.main import main
from tunix_like.errors import UserError
from tunix_like.runtime.user_code import load_function

ENDING = [
    "import sys; sys.exit(0)", "import sys; sys.exit()", "import sys; sys.exit('text')", "exit()", "quit(0)",
    "raise SystemExit", "import argparse; argparse.ArgumentParser().parse_args(['--no'])",
    "import argparse; argparse.ArgumentParser().parse_args(['--help'])", "raise GeneratorExit",
    "import asyncio; raise asyncio.CancelledError", "raise BaseException('x')", "import no_such_module", "1 / 0", "def",
    "\x00", "import unittest; unittest.main(argv=['x'])",
]  # fmt: skip


@pytest.mark.parametrize("code", ENDING)
@pytest.mark.parametrize("place", ["{}.py:score", "{}:score", "{}.score"])
def test_code_that_ends_at_its_import(code, place, tmp_path, monkeypatch):
    name = f"ending{ENDING.index(code)}{'.:'.index(place[2])}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=f"Reward '{name}.*failed to"):
        load_function(place.format(name), "Reward")


KEYS = [
    "rewards.functions=[{name: 'ending.py:score'}]",
    "algorithm.advantage_estimator=ending.py:score",
    "algorithm.policy_loss_fn=ending.py:score",
    "environment.name=ending.py:score",
    "environment.tools=['ending.py:score']",
    "rollout.engine=ending.py:score",
    "training.callbacks=[{name: 'ending.py:score'}]",
]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("code", ["raise SystemExit(0)", "def score(*a, **b): raise SystemExit(0)\nscore()"])
def test_a_run_does_not_end_as_if_it_were_done(key, code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ending.py").write_text(code)
    (tmp_path / "run.yaml").write_text(
        "model: {init: random, config: {model_type: qwen2, hidden_size: 16, intermediate_size: 16, num_hidden_layers: "
        "1, num_attention_heads: 2, num_key_value_heads: 2, max_position_embeddings: 4096}}\n"
        "data: {name: reverse_text, train_size: 20}\nalgorithm: {advantage_estimator: rloo}"
    )
    assert main(["train", "run.yaml", key]) == 2
    assert re.match("error: .*ending.py failed to load: SystemExit", capsys.readouterr().err.splitlines()[-1])
