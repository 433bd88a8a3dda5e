"""What a newcomer with an instruct model is told: the prompt and its template, text that gets no template, completions
that are cut, and the speed of sampling."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

import tunix_like
from tests.environments.test_bridge import build
from tests.tiny_model import HF
from tunix_like.cli.generate import _prompt
from tunix_like.cli.main import main
from tunix_like.config.schema import Config, DataConfig
from tunix_like.data.shared import warn_text_prompts
from tunix_like.data.stream import grain

LENGTHS = ("rollout.max_prompt_length=64", "rollout.max_tokens_to_generate=4", "eval.samples=2")
TRAINING = ("algorithm.num_generations=2", "data.batch_size=8", "training.max_steps=1", "sft.max_steps=1",
            "training.output_dir=out", "sft.batch_size=8")  # fmt: skip
TEXT = "the prompts are text"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """An instruct model of random weights, and rows with a question and with messages."""
    place = tmp_path_factory.mktemp("said")
    tokenizer, _ = build("qwen25")
    model, _ = tunix_like.load_model(
        HF | {"vocab_size": tokenizer.vocab_size, "max_position_embeddings": 256}, init="random"
    )
    tunix_like.export_model(model, tokenizer, place / "chat")
    rows = [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(8)]
    (place / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chats = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    (place / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    (place / "run.yaml").write_text("model: {path: chat}\nalgorithm: {advantage_estimator: maxrl}\n")
    return place


@pytest.fixture
def said(place, monkeypatch, capsys, caplog):
    """Runs a command; returns standard output, standard error and the warnings."""
    monkeypatch.chdir(place)

    def call(*argv):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "tunix_like"):
            code = main(argv)
        out, err = capsys.readouterr()
        assert code == 0, err
        return out, err, caplog.text

    return call


@pytest.mark.parametrize(
    ("data", "warned", "template"),
    [
        (("data.path=text.jsonl",), True, "none"),
        (("data.path=text.jsonl", "data.apply_chat_template=false"), False, "none"),
        (("data.path=text.jsonl", "data.apply_chat_template=true"), False, "that of the tokenizer"),
        (("data.path=text.jsonl", "data.system_prompt=Add."), False, "that of the tokenizer"),
        (("data.path=chat.jsonl",), False, "that of the tokenizer"),
    ],
    ids=["text", "meant", "applied", "system", "messages"],
)
def test_text_without_the_template(said, data, warned, template):
    for command in (
        ("train", "run.yaml", "--dry-run", *TRAINING),
        ("eval", "run.yaml", "data.eval_size=2"),
        ("eval", "chat", "data.eval_size=2"),
    ):
        name = "data.name=jsonl", *data, *LENGTHS
        out, err, log = said(*command, *name)
        out += err
        assert (log.count(TEXT), f"template: {template}" in out) == (int(warned), True), command
        assert "prompt: '" in out
    keys = [word for word in data if not word.startswith("data.path")]
    if not keys or keys[0] != "data.system_prompt=Add.":
        _, _, log = said("generate", "chat", "--prompt", "1 + 1 =", *keys, *LENGTHS)
        assert (TEXT in log) == (warned or not keys)


def test_prompts_of_agents_are_no_texts_of_the_model(said):
    agent = "environment.name=program", "environment.arguments={command: [python, agent.py]}"
    Path("agent.py").write_text(
        "import json, os, urllib.request\n"
        "body = json.dumps({'model': 'any', 'messages': [{'role': 'user', 'content': 'a'}]}).encode()\n"
        "head = {'Content-Type': 'application/json', 'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "urllib.request.urlopen(urllib.request.Request(url, body, head))\n"
    )
    data = "data.name=jsonl", "data.path=text.jsonl", *LENGTHS, *TRAINING
    out, _, log = said("train", "run.yaml", "--dry-run", *data, *agent, "sft.max_steps=0",
                     "rollout.max_tokens_to_generate=64")  # fmt: skip
    assert "template: that of the tokenizer, around the requests of the agent" in out
    assert "prompt: of the row, for the agent: '0 + 1 ='" in out and TEXT not in log


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "sft"])
def test_the_warning_comes_once_in_training(said, command):
    _, _, log = said(command, "run.yaml", "data.name=jsonl", "data.path=text.jsonl", *LENGTHS, *TRAINING,
                     f"training.output_dir=once-{command}")  # fmt: skip
    assert log.count(TEXT) == 1
    assert log.count("cut at rollout.max_tokens_to_generate") == (command == "train")


@pytest.mark.parametrize(
    "rows", [[], [{"answer": "a"}], [{"prompt": [{"role": "user", "content": "a"}]}], iter([{"prompt": "a"}])]
)
def test_rows_without_text_prompts(place, rows, caplog):
    _, tokenizer = tunix_like.load_model(place / "chat")
    warn_text_prompts(rows, tokenizer)
    assert not caplog.text
    warn_text_prompts(grain.MapDataset.source([{"prompt": "a"}]), tokenizer)
    assert caplog.text.count(TEXT) == 1


def test_cut_completions_and_speed(said):
    ends = "rollout.eos_tokens=[0]", "data.name=jsonl", "data.path=chat.jsonl"
    ends = *ends, "data.eval_size=7"
    out, _, log = said("eval", "chat", *ends, *LENGTHS)
    assert re.search(r"evaluation: (100|9\d)% of the completions were cut at rollout.max_tokens_to_generate", log)
    tokens, rate = re.search(r"(\d+) tokens in \S+ s, ([\d,]+) tokens/s", out).groups()
    assert 50 <= int(tokens) <= 7 * 2 * 4 and rate != "0"
    *_, log = said("eval", "chat", *ends, *LENGTHS, "rollout.eos_tokens=" + str(list(range(300))).replace(" ", ""))
    assert "were cut" not in log


def test_answers_that_are_not_found(said):
    """The reward `gsm8k` reads `####`, of which a random model knows nothing."""
    (rows := Path("numbers.jsonl")).write_text('{"prompt": "2 + 2", "answer": "#### 4", "gold": 4}\n' * 20)
    data = "data.name=jsonl", f"data.path={rows}", "data.eval_size=4"
    *_, log = said("eval", "chat", *data, *LENGTHS, "rewards.functions=[{name: gsm8k}]")
    assert "in 8 of 8 completions no answer is found" in log and "data.system_prompt" in log
    *_, log = said("eval", "chat", *data, *LENGTHS, "rewards.functions=[{name: exact_match}]")
    assert "no answer is found" not in log


@pytest.mark.parametrize("of_run, template, expected", [(True, None, True), (True, False, False), (False, None, False)])
def test_a_prompt_is_a_chat_message_if_a_run_was_trained_on_chats(of_run, template, expected):
    config = Config(data=DataConfig(name="sums", train_size=4, eval_size=2, apply_chat_template=template))
    assert isinstance(_prompt(config, "What is 12 + 7?", of_run), list) is expected
    assert _prompt(Config(data=DataConfig(name="reverse_text", train_size=4, eval_size=2)), "abc>", of_run) == "abc>"


def test_a_misspelt_run_names_the_right_one(tmp_path, capsys):
    run = tmp_path / "tickets-maxrl-s0"
    run.mkdir()
    (run / "config.yaml").write_text("{}")
    assert main(["eval", str(tmp_path / "ticket-maxrl-s0")]) == 2
    assert f"Or is it the run {run}?" in capsys.readouterr().err


def test_a_row_is_printed_in_the_order_in_which_it_is_read(said, monkeypatch):
    """The prompt comes before the completion, and the name of the gold column cannot be taken for the model's text."""
    lines = []
    monkeypatch.setattr("builtins.print", lambda text="", *given, **named: lines.append(text))
    said("generate", "chat", "--row", "1", "data.name=jsonl", "data.path=text.jsonl", "data.eval_size=2", *LENGTHS)
    starts = [
        next(i for i, line in enumerate(lines) if line.startswith(each)) for each in ("prompt: 6", "column answer: 7")
    ]
    (speed,) = (i for i, line in enumerate(lines) if "tokens/s" in line)
    assert starts[0] < speed - 1 < speed < starts[1], lines
