"""Tests a run with an environment from the command line, which is killed during an episode and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from tunix_like import UserError
from tunix_like.cli.screen import announce
from tunix_like.config.load import load
from tunix_like.data import load_source
from tunix_like.runs.build import assemble
from tunix_like.runs.trained import open_trained

ENVIRONMENT = '''
import os, time

class Letters:
    """Rewards an answer that begins with the row's letter; three turns."""

    def reset(self, letter, **columns):
        self.letter, self.turns = letter, 0

    def step(self, completion):
        self.turns += 1
        place = os.environ.get("HANG_AT")
        if place and os.path.exists(place + ".armed") and not os.path.exists(place):
            open(place, "w").close()
            time.sleep(60)
        return self.letter, float(completion[:1] == self.letter), self.turns == 3
'''
CONFIG = {
    "model": {
        "init": "random",
        "config": {
            "model_type": "qwen2",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
        },
    },
    "data": {"name": "reverse_text", "train_size": 32, "eval_size": 4, "batch_size": 8},
    "algorithm": {"advantage_estimator": "rloo", "num_generations": 4},
    "rollout": {"max_prompt_length": 32, "max_tokens_to_generate": 40},
    "environment": {"max_turns": 4, "max_observation_tokens": 40, "workers": 2},
    "eval": {"samples": 1},
    "training": {"max_steps": 4, "checkpoint_every_n_steps": 1, "log_rollouts_every_n_steps": 1},
}


def write(folder: Path, **environment) -> Path:
    """Writes the config, with an environment that takes the column `answer` as `letter`."""
    (folder / "letters.py").write_text(ENVIRONMENT.replace("letter, **columns", "answer, **columns").replace(
        "self.letter, self.turns = letter", "self.letter, self.turns = answer[0]"))  # fmt: skip
    config = CONFIG | {"environment": {"name": f"{folder}/letters.py:Letters"} | CONFIG["environment"] | environment}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder / "run.yaml"


def start(config: Path, output: Path, **variables) -> subprocess.Popen:
    command = [sys.executable, "-m", "tunix_like", "train", str(config), f"training.output_dir={output}"]
    return subprocess.Popen(command, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def rollouts(run: Path) -> list[dict]:
    files = sorted((run / "rollouts").glob("step_*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.slow
def test_run_killed_during_an_episode_resumes_bitwise(tmp_path):
    config, marker = write(tmp_path), tmp_path / "hang"
    whole = start(config, tmp_path / "whole")
    assert whole.wait(300) == 0, whole.stdout.read().decode()
    killed = start(config, tmp_path / "killed", HANG_AT=str(marker))
    deadline = time.monotonic() + 300
    while not (tmp_path / "killed" / "checkpoints" / "2").exists():
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    (tmp_path / "hang.armed").touch()
    while not marker.exists():
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    again = start(config, tmp_path / "killed")
    assert again.wait(300) == 0, again.stdout.read().decode()
    one, other = (open_trained(str(tmp_path / name)).params for name in ("whole", "killed"))
    jax.tree.map(np.testing.assert_array_equal, one, other)
    expected, found = rollouts(tmp_path / "whole"), rollouts(tmp_path / "killed")
    assert expected == found and len(expected) == 4 * 32
    row = max(expected, key=lambda row: len(row["turns"]))
    assert [turn["role"] for turn in row["turns"]] == ["assistant", "user"] * (len(row["turns"]) // 2) + (
        ["assistant"] if len(row["turns"]) % 2 else []
    )
    assert row["sampled"] < row["length"] and row["reward"] == row["reward/environment"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"name": None}, "environment.max_turns: it needs an environment; set environment.name or environment.tools"),
        ({"tools": ["a.py:f"]}, "environment.tools: environment.name is set too; set one of them"),
        ({"name": None, "tools": []}, "environment.tools: the list is empty"),
        ({"name": "gues"}, "Environment 'gues' is unknown"),
        ({"name": "nowhere.py:Env"}, "nowhere.py"),
        ({"max_turns": 0}, "environment.max_turns: got 0; it must be at least 1"),
        ({"history": "template"}, "environment.history=template: it needs a chat template"),
        ({"history": "both"}, "environment.history: unknown value 'both'"),
        ({"mode": "lazy"}, "environment.mode: unknown value 'lazy'"),
        ({"max_observation_tokens": 5}, "environment.max_observation_tokens=5: .* increase this value"),
    ],
)
def test_invalid_environment_is_rejected_before_any_compilation(tmp_path, environment, message):
    with pytest.raises(UserError, match=message):
        assemble(load(write(tmp_path, **environment)), abstract=True)


@pytest.mark.slow
def test_the_summary_shows_the_first_observation_and_evaluations_share_the_environments(tmp_path, capsys):
    config = write(tmp_path)
    source = tmp_path / "letters.py"
    source.write_text(
        source.read_text().replace("answer[0], 0\n", "answer[0], 0\n        return ' letter ' + answer[0]\n")
    )
    parts = assemble(load(config))
    try:
        first = parts.source.train[0]["answer"][0]
        assert parts.first_observation == f" letter {first}"
        evaluator = parts.evaluator(parts.config.eval)
        assert evaluator.player.environments is parts.environments
        announce(parts, tmp_path)
        said = capsys.readouterr().out
        assert f"reset: the environment adds to the prompt of row 1: ' letter {first}'" in said
    finally:
        parts.environments.close()


@pytest.mark.slow
def test_prompt_that_is_too_long_with_its_first_observation_is_found_before_sft(tmp_path, caplog):
    config = write(tmp_path)
    source = tmp_path / "letters.py"
    text = source.read_text()
    source.write_text(text.replace("answer[0], 0\n", "answer[0], 0\n        return ' long' * 300\n"))
    with pytest.raises(UserError, match=r"rollout\.max_prompt_length"):
        assemble(load(config), abstract=True)
    first = load_source(load(config).data).train[0]["answer"]
    source.write_text(
        text.replace("answer[0], 0\n", f"answer[0], 0\n        return ' long' * 300 * (answer == {first!r})\n")
    )
    assemble(load(config), abstract=True).environments.close()
    assert "rollout.max_prompt_length" in caplog.text
