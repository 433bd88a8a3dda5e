"""Tests GSM8K rows, on a small copy and, if present, on the real files, and the tiny model folder made from them."""

import importlib.util
import json
import os
import sys
import types
from pathlib import Path

import pytest

from tests.parameters import others_slow
from tunix_like.config.schema import DataConfig
from tunix_like.data import load_source
from tunix_like.errors import UserError
from tunix_like.rewards.math import grade
from tunix_like.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
REAL = Path(os.environ.get("TUNIX_LIKE_GSM8K", ROOT.parent / "shared" / "data" / "gsm8k"))
ROWS = [
    {"question": "How much is 500 + 500?", "answer": "It is 500 + 500 = <<500+500=1000>>1000.\n#### 1,000"},
    {"question": "How many legs have 2 cats?", "answer": "2 * 4 = 8.\n#### 8"},
]


def folder(path, train=ROWS, test=ROWS[1:]):
    for name, rows in (("train", train), ("test", test)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_columns_and_prompt(tmp_path):
    data = load_source(DataConfig(name="gsm8k", path=folder(tmp_path)))
    assert data.train[0] == {**ROWS[0], "gold": "1,000", "prompt": "How much is 500 + 500?"}
    assert (len(data.train), len(data.eval), data.reward, data.tokenizer) == (2, 1, "gsm8k", None)
    chat = load_source(
        DataConfig(name="gsm8k", path=str(tmp_path), system_prompt="Think.", prompt_template="Q: {question}")
    )
    assert chat.eval[0]["prompt"] == [
        {"role": "system", "content": "Think."},
        {"role": "user", "content": "Q: How many legs have 2 cats?"},
    ]


@pytest.mark.parametrize(
    "row, message",
    [
        ({"question": "a"}, "train.jsonl:2: .*column 'answer'"),
        ({"question": "a", "answer": "7"}, "train.jsonl:2: column 'answer' must end in"),
        ({"question": "a", "answer": "#### seven"}, "train.jsonl:2: column 'answer' must end in"),
    ],
)
def test_bad_rows(tmp_path, row, message):
    with pytest.raises(UserError, match=message):
        load_source(DataConfig(name="gsm8k", path=folder(tmp_path, [ROWS[0], row])))


def test_bad_paths_and_keys(tmp_path):
    with pytest.raises(UserError, match="must be a folder"):
        load_source(DataConfig(name="gsm8k", path="/no/such/folder"))
    with pytest.raises(UserError, match="data.maze_size is not read by data.name=gsm8k"):
        load_source(DataConfig(name="gsm8k", maze_size=9))
    with pytest.raises(UserError, match="train.jsonl does not exist"):
        load_source(DataConfig(name="gsm8k", path=str(tmp_path)))


def test_rows_come_from_the_hub_by_default(monkeypatch):
    calls = []

    def load_dataset(name, configuration, split):
        calls.append((name, configuration, split))
        return ROWS

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert load_source(DataConfig(name="gsm8k")).train[1]["gold"] == "8"
    assert calls == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="openai/gsm8k:main.*'datasets'"):
        load_source(DataConfig(name="gsm8k"))


def real():
    if not (REAL / "train.jsonl").is_file():
        pytest.skip(f"GSM8K is not in {REAL}; set TUNIX_LIKE_GSM8K to its folder")
    return REAL


@pytest.mark.slow
def test_real_rows_load_and_only_their_solutions_get_reward_1():
    data = load_source(DataConfig(name="gsm8k", path=str(real())))
    assert (len(data.train), len(data.eval)) == (7473, 1319)
    for rows in (data.train, data.eval):
        for row in rows:
            assert grade(row["answer"], row["gold"]) == 1.0
            assert grade(row["answer"] + "1", row["gold"]) == 0.0
    for row in data.eval:
        value = int(row["gold"].replace(",", ""))
        assert grade(f"#### ${value:,}.00", row["gold"]) == 1.0
        assert grade(f"#### {value - 1} + 1", row["gold"]) == 0.0


def example():
    spec = importlib.util.spec_from_file_location("make_tiny_model", ROOT / "examples" / "gsm8k" / "make_tiny_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("family", others_slow(["qwen2", "qwen3"], "qwen3"))
def test_tiny_model_folder_is_read_by_transformers(tmp_path, monkeypatch, family):
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    out = tmp_path / "tiny"
    monkeypatch.setattr(sys, "argv", ["make", "--data", str(real()), "--out", str(out), "--family", family])
    example().main()
    config, ours, theirs = (
        AutoConfig.from_pretrained(out),
        Tokenizer.from_folder(out),
        AutoTokenizer.from_pretrained(out),
    )
    assert config.model_type == family and config.tie_word_embeddings and config.hidden_size == 64
    assert ours.vocab_size == len(theirs) == config.vocab_size == 2048
    assert GenerationConfig.from_pretrained(out).eos_token_id == [*ours.eos_ids, ours.pad_id]
    chat = [{"role": "user", "content": "It's 1,234 + 5 apples -- n'est-ce pas, café?\n\n  Yes."}]
    text, ids = ours.encode_prompt(chat, apply_chat_template=True)
    assert ids == theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids) == text
    assert theirs.eos_token == "<|im_end|>" and theirs.pad_token == "<|endoftext|>"
