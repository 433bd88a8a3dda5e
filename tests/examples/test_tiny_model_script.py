"""The tiny model for data of one's own: the commands that `tunix-like init` writes, and what the script refuses."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from tunix_like.cli import main as cli

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "gsm8k" / "make_tiny_model.py"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["make", *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_the_head_of_a_new_run_tries_it_without_weights(monkeypatch, capsys):
    assert cli.main(["init", "mine"]) == 0
    head = Path("mine.yaml").read_text()
    make = re.search(r"#   python examples/gsm8k/make_tiny_model.py (.*)", head)
    train = re.search(r"#   tunix-like (train .*model.init=random)", head)
    assert make and train
    run(monkeypatch, *shlex.split(make[1]))
    assert cli.main([*shlex.split(train[1]), "data.batch_size=8", "--dry-run"]) == 0, capsys.readouterr().err


def test_a_file_without_the_column(monkeypatch, capsys):
    Path("a.jsonl").write_text('{"q": "hi", "n": 1}\n')
    with pytest.raises(SystemExit) as raised:
        run(monkeypatch, "--data", "a.jsonl", "--out", "tiny")
    assert raised.value.code == (
        "error: a.jsonl:1: no text in column 'question'; columns with text: q. Name one by --column."
    )
    with pytest.raises(SystemExit):
        run(monkeypatch, "--data", "b.jsonl", "--out", "tiny")
    assert "b.jsonl does not exist" in capsys.readouterr().err
    assert not Path("tiny").exists()
