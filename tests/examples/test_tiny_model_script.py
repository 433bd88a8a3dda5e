"""Tests the script that makes a tiny model for user data: the commands that `tunix-like init` writes, and the errors of
the script."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from tunix_like.cli import main as cli
from tunix_like.config.load import load
from tunix_like.environments.bridge import Bridge
from tunix_like.runs.build import assemble
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.text.tool_calls import ToolCall, tool_calls

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "gsm8k" / "make_tiny_model.py"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["make", *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_commands_in_the_header_of_a_new_config_run_without_weights(monkeypatch, capsys):
    assert cli.main(["init", "mine"]) == 0
    head = Path("mine.yaml").read_text()
    make = re.search(r"#   python examples/gsm8k/make_tiny_model.py (.*)", head)
    train = re.search(r"#   tunix-like (train .*model.init=random)", head)
    assert make and train
    run(monkeypatch, *shlex.split(make[1]))
    assert cli.main([*shlex.split(train[1]), "data.batch_size=8", "--dry-run"]) == 0, capsys.readouterr().err


def test_file_without_the_column_is_an_error(monkeypatch, capsys):
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


def test_the_template_renders_tools_and_tool_calls(monkeypatch):
    """The parser of tool calls reads the rendered calls. Without tools, the text is that of ChatML."""
    Path("a.jsonl").write_text('{"question": "How many?"}\n' * 9)
    run(monkeypatch, "--data", "a.jsonl", "--out", "tiny")
    tokenizer = Tokenizer.from_folder("tiny")
    tool = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
    system, question = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Q"}
    assert tokenizer.render([system, question]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    )
    text = tokenizer.render([system, question], tools=[tool])
    assert text.count("<|im_start|>") == 3 and text.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert json.dumps(tool) in text and "Be brief" not in tokenizer.render([question], tools=[tool])
    with_tool = tokenizer.with_template_variables({"tools": [tool]})
    Bridge(with_tool, True, tokenizer.eos_ids, True, most_tokens=200, overlong="cut")
    for given in ({"a": 5, "b": "é"}, '{"a": 5, "b": "é"}'):
        call = {"type": "function", "function": {"name": "add", "arguments": given}}
        turn = {"role": "assistant", "content": None, "tool_calls": [call, call]}
        said = tokenizer.render([question, turn, {"role": "tool", "content": "7"}], tools=[tool]).split("<|im_start|>")
        assert tool_calls(said[3]) == [ToolCall("add", {"a": 5, "b": "é"})] * 2 and said[4].startswith(
            "tool\n7<|im_end|>"
        )


def test_sizes_and_a_model_from_scratch_with_this_tokenizer(monkeypatch):
    """The options set the shape that a run has; a run with another shape can use the tokenizer alone."""
    rows = [json.dumps({"prompt": f"{i} + 1 =", "answer": str(i + 1)}) for i in range(40)]
    Path("mine.jsonl").write_text("\n".join(rows))
    sizes = ["--layers", "3", "--width", "48", "--heads", "6"]
    run(monkeypatch, "--data", "mine.jsonl", "--column", "prompt", "--out", "tiny", *sizes)
    data = [
        "algorithm.advantage_estimator=maxrl",
        "data.name=jsonl",
        "data.path=mine.jsonl",
        "rewards.functions=[{name: exact_match}]",
        "model.init=random",
    ]
    made = assemble(load(None, [*data, "model.path=tiny"]), abstract=True).model.config
    assert (made.num_layers, made.hidden_size, made.num_heads, made.num_kv_heads, made.head_dim) == (3, 48, 6, 3, 8)
    assert made.vocab_size == Tokenizer.from_folder("tiny").vocab_size  # every token that is sampled has a text
    shape = "{model_type: llama, hidden_size: 32, intermediate_size: 40, num_hidden_layers: 1, num_attention_heads: 2}"
    parts = assemble(load(None, [*data, "model.tokenizer=tiny", f"model.config={shape}"]), abstract=True)
    folder = Tokenizer.from_folder("tiny")
    assert parts.model.config.vocab_size == folder.vocab_size and parts.model.config.num_layers == 1
    assert parts.tokenizer.encode("7 + 1 =") == folder.encode("7 + 1 =")
    with pytest.raises(SystemExit):
        run(monkeypatch, "--data", "mine.jsonl", "--column", "prompt", "--out", "other", "--width", "50")
