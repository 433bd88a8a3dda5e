"""Applies every change that docs/contributing.md shows to a copy of the package, and uses all of them in one run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
SECTION = re.compile(r"^### (An? [^\n]+)\n(.*?)(?=^##|\Z)", re.M | re.S)
SECTIONS = {name: re.findall(r"^```diff\n(.*?)^```", text, re.M | re.S) for name, text in SECTION.findall(PAGE)}
MOST_LINES = 16

CONFIG = {
    "model": {
        "init": "random",
        "config": {
            "model_type": "my_llama",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 64,
            "tie_word_embeddings": True,
        },
    },
    "data": {"name": "letters", "batch_size": 2},
    "algorithm": {"advantage_estimator": "midrange", "policy_loss_fn": "tempered", "num_generations": 4},
    "rewards": {"functions": [{"name": "contains"}]},
    "rollout": {
        "max_prompt_length": 4,
        "max_tokens_to_generate": 2,
        "eos_tokens": [*range(4, 12)],  # many, so that some turns end before the limit of tokens
        "engine": "recorder",
        "engine_arguments": {"file": "tokens.txt"},
    },
    "environment": {"name": "parity"},
    "eval": {"samples": 4, "batch_size": 2},
    "training": {"max_steps": 1, "loggers": ["mytracker"], "output_dir": "run"},
}

TRACKER = """
def start(name, settings):
    return Run()
class Run:
    def log(self, row, step):
        print("logged", step, sorted(row), file=open("tracked.txt", "a"))
    def finish(self):
        print("finished", file=open("tracked.txt", "a"))
"""

PROGRAM = """
import sys
from tunix_like.cli import main
import tunix_like.algorithms.advantages
from tunix_like.algorithms.registry import ADVANTAGE_ESTIMATORS
from tunix_like.algorithms.losses import POLICY_LOSSES
from tunix_like.rewards import REWARDS
assert {"midrange"} <= set(ADVANTAGE_ESTIMATORS) and {"tempered"} <= set(POLICY_LOSSES) and {"contains"} <= set(REWARDS)
import tunix_like
assert tunix_like.compute_advantages([0.0, 1.0, 5.0], "midrange").tolist() == [-2.5, -1.5, 2.5]
assert main.main(["rows", "config.yaml"]) == 0
assert main.main(["rows", "config.yaml", "data.train_size=4", "data.eval_size=1"]) == 0
sys.exit(main.main(["train", "config.yaml"]))
"""


def changes(block: str) -> list[tuple[str, list[str]]]:
    """Returns `(file, lines)` of each file that a block changes."""
    found: list[tuple[str, list[str]]] = []
    for line in block.splitlines():
        if line.startswith("--- "):
            found.append((line[4:], []))
        else:
            found[-1][1].append(line)
    return found


def hunks(lines: list[str]) -> list[tuple[str, str]]:
    """Returns `(old text, new text)` of the parts of a change: unchanged or removed lines, followed by added lines."""
    found: list[tuple[list[str], list[str]]] = []
    before = "+"
    for line in lines:
        sign, text = line[:1], line[1:]
        if not found or (before == "+" and sign != "+"):
            found.append(([], []))
        if sign != "+":
            found[-1][0].append(text)
        if sign != "-":
            found[-1][1].append(text)
        before = sign
    return [("".join(f"{text}\n" for text in old), "".join(f"{text}\n" for text in new)) for old, new in found]


def apply(folder: Path, block: str) -> None:
    for name, lines in changes(block):
        file = folder / name
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        for old, new in hunks(lines):
            assert not old or text.count(old) == 1, f"{name} has not once:\n{old}"
            text = text.replace(old, new) if old else f"{text}\n\n{new}"
        file.write_text(text, encoding="utf-8")


def test_page_has_a_section_for_each_kind_of_extension():
    assert list(SECTIONS) == [
        "An estimator",
        "A loss",
        "A reward",
        "A data source",
        "An engine",
        "An environment",
        "A signal per token",
        "A metric",
        "A logger",
        "A model family",
        "A command",
    ]


@pytest.mark.parametrize("name", [name for name, blocks in SECTIONS.items() if blocks])
def test_changes_are_within_the_line_limit(name):
    assert len(SECTIONS[name]) == 1
    added = [line for _, lines in changes(SECTIONS[name][0]) for line in lines if line.startswith("+")]
    assert len(added) - sum("import" in line or line == "+" for line in added) <= MOST_LINES


@pytest.mark.parametrize("name", ["A data source", "A logger", "A model family", "A metric"])
def test_registration_takes_one_line_in_existing_files(name):
    existing = [lines for file, lines in changes(SECTIONS[name][0]) if (ROOT / file).exists()]
    assert len(existing) == 1 and not any(line.startswith("-") for line in existing[0])
    entries = [line for line in existing[0] if re.match(r'\+( +"\w|\w+\[)', line)]  # in a mapping, or an assignment
    assert len(entries) == 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The run of a copy of the package with all changes of the page."""
    folder = tmp_path_factory.mktemp("contributing")
    shutil.copytree(ROOT / "tunix_like", folder / "tunix_like", ignore=shutil.ignore_patterns("__pycache__"))
    for blocks in SECTIONS.values():
        for block in blocks:
            apply(folder, block)
    (folder / "mytracker.py").write_text(TRACKER)
    metadata = folder / "mytracker-1.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: mytracker\nVersion: 1.0\n")
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    environment = os.environ | {"PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    (folder / "said.txt").write_text(done.stdout)
    assert done.returncode == 0, done.stderr
    return folder


def last_row(folder: Path) -> dict:
    return json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.slow
def test_estimator_loss_and_reward_train_a_model_of_the_family(folder):
    config = yaml.safe_load((folder / "run" / "config.yaml").read_text())
    assert config["algorithm"]["advantage_estimator"] == "midrange"
    assert config["algorithm"]["policy_loss_fn"] == "tempered"
    assert json.loads((folder / "run" / "model" / "config.json").read_text())["model_type"] == "my_llama"
    assert last_row(folder)["step"] == 1 and last_row(folder)["train/update/skipped"] == 0


@pytest.mark.slow
def test_the_source_has_rows_and_the_command_counts_them(folder):
    assert (folder / "said.txt").read_text().splitlines()[:2] == ["6", "4"], "data.train_size is read"


@pytest.mark.slow
def test_the_engine_samples_and_the_environment_answers(folder):
    """The engine writes all completions: 8 of a step, and 2 held-out problems with 4 samples before and after."""
    completions = [json.loads(line) for line in (folder / "tokens.txt").read_text().splitlines()]
    assert len(completions) == 8 + 2 * 2 * 4 and all(1 <= len(tokens) <= 2 for tokens in completions)
    row = last_row(folder)
    assert row["train/logprob_gap/max"] < 1e-4 and row["train/environment/turns"] == 1
    assert row["train/reward/unscored_frac"] == 0


@pytest.mark.slow
def test_the_signal_per_token_is_computed(folder):
    assert last_row(folder)["train/surprise/bonus"] > 0


@pytest.mark.slow
def test_the_metric_is_in_the_rows_and_the_logger_gets_them(folder):
    assert last_row(folder)["train/advantage/std"] >= 0
    tracked = (folder / "tracked.txt").read_text().splitlines()
    assert tracked[-1] == "finished" and "'train/advantage/std'" in tracked[-2]
