"""Tests `tunix_like.run`: SFT and RL of one small config in one folder."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
import yaml

import tunix_like
from tests.callbacks import OnRow
from tests.tiny_model import HF
from tunix_like import UserError
from tunix_like.cli.main import main
from tunix_like.config.load import load
from tunix_like.errors import NotSaved
from tunix_like.runs import recipe
from tunix_like.training.learner import Learner

YAML = Path(__file__).resolve().parents[2] / "examples" / "debug" / "reverse_text.yaml"
SMALL = (
    *(f"model.config.{key}={HF[key]}" for key in ("hidden_size", "intermediate_size", "num_hidden_layers")),
    "data.train_size=16",
    "data.eval_size=4",
    "data.batch_size=8",
    "algorithm.num_generations=2",
    "rollout.max_prompt_length=16",
    "rollout.max_tokens_to_generate=4",
    "sft.max_steps=2",
    "sft.batch_size=8",
    "eval.samples=4",
    "eval.k=null",
    "eval.batch_size=8",
    "training.max_steps=1",
    "training.loggers=[]",
)


@pytest.fixture
def shared(monkeypatch):
    """Makes the first training rows of a run also its held-out rows."""

    def assembled(config):
        parts = assemble(config)
        source = parts.source
        return parts._replace(source=dataclasses.replace(source, eval=list(source.train[:4])))

    assemble = recipe.assemble
    monkeypatch.setattr(recipe, "assemble", assembled)


@pytest.mark.slow
def test_held_out_prompts_in_the_training_data_give_one_warning_before_sft(shared, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "tunix_like"):
        tunix_like.run(
            load(YAML, [*SMALL, f"training.output_dir={tmp_path}"]),
            callbacks=[OnRow(lambda row: logging.getLogger("tunix_like").info("row of %s", next(iter(row))))],
        )
    said = [record.getMessage() for record in caplog.records]
    places = [place for place, text in enumerate(said) if "also in the training data" in text]
    assert len(places) == 1
    assert places[0] < said.index("row of sft/step") < said.index("row of step")


def test_servers_are_checked_before_sft(tmp_path):
    rows, servers = [], ["rollout.engine=vllm", "rollout.urls=[http://127.0.0.1:9]"]
    with pytest.raises(UserError, match=r"the server http://127.0.0.1:9 cannot be used"):
        tunix_like.run(
            load(YAML, [*SMALL, *servers, f"training.output_dir={tmp_path}"]),
            callbacks=[OnRow(rows.append)],
        )
    assert not rows


@pytest.mark.parametrize(
    ("sft", "rl", "stopped"),
    [("SFT", None, False), ("SFT", "RL", False), (None, "RL", False), (None, "RL", True)],
    ids=["SFT", "both", "RL", "RL, stopped by a signal"],
)
def test_results_are_printed_before_the_error_of_a_checkpoint_that_was_not_saved(
    sft, rl, stopped, monkeypatch, tmp_path, capsys
):
    """The error of RL replaces the error of SFT. After a signal, steps are missing, so there are no results."""

    def error(text):
        unsaved = NotSaved(text)
        unsaved.stopped = stopped
        return unsaved

    def train(self, *rows, **options):
        if rl is not None:
            raise error(rl)

    monkeypatch.setattr(recipe, "fine_tune", lambda *parts, **options: None if sft is None else error(sft))
    monkeypatch.setattr(Learner, "train", train)
    assert main(["train", str(YAML), *SMALL, f"training.output_dir={tmp_path}"]) == NotSaved.status
    printed = capsys.readouterr()
    assert printed.err.endswith(f"error: {rl or sft}\n")
    assert ("run folder:" in printed.out) == (not stopped)


@pytest.mark.slow
def test_run_folder_of_an_earlier_version_is_resumed(tmp_path):
    """Keys that its config lacks count as set to their defaults."""
    tunix_like.run(YAML, [*SMALL, f"training.output_dir={tmp_path}"])
    file = tmp_path / "config.yaml"
    config = yaml.safe_load(file.read_text())
    del config["environment"], config["algorithm"]["binarize"]
    file.write_text(yaml.safe_dump(config))
    more = [*SMALL, f"training.output_dir={tmp_path}", "training.max_steps=2"]
    with pytest.raises(UserError, match=r"another config:\n  algorithm.binarize: False -> True\nUse the same"):
        tunix_like.run(YAML, [*more, "algorithm.binarize=true"])
    assert tunix_like.run(YAML, more)["step"] == 2
