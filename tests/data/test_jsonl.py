"""Tests JSON-lines rows: reading by offset, validation, splits without overlap, and conversion to prompts."""

import json
import pickle
import sys
import tracemalloc
import types

import pytest

from tunix_like.config.schema import DataConfig
from tunix_like.data import load_source
from tunix_like.data.jsonl import JsonlRows
from tunix_like.errors import UserError


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def numbered(n):
    return [{"prompt": f"p{i} é", "answer": str(i)} for i in range(n)]


def source(path, **keys):
    return load_source(DataConfig(name="jsonl", path=str(path), **keys))


def test_rows_are_read_in_order_with_blank_lines_crlf_and_no_final_newline(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes('{"prompt": "é\\n"}\r\n\n  \n{"prompt": "b", "x": 1}\n{"prompt": "c"}'.encode())
    rows = JsonlRows(file, lambda row, where: None)
    expected = [{"prompt": "é\n", "x": None}, {"prompt": "b", "x": 1}, {"prompt": "c", "x": None}]
    assert list(rows) == expected and rows[-1] == expected[2] and rows[0:2] == expected[:2]
    with pytest.raises(IndexError):
        rows[3]
    copy = pickle.loads(pickle.dumps(rows))
    del rows  # and thereby the open file
    assert list(copy) == expected


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text_of_the_rows(tmp_path):
    file = tmp_path / "big.jsonl"
    with file.open("w") as out:
        for i in range(2_000):
            out.write(json.dumps({"prompt": "x" * 4000, "i": i}) + "\n")
    tracemalloc.start()
    rows = JsonlRows(file, lambda row, where: None)
    assert sum(row["i"] for row in rows) == sum(range(2_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000, peak  # the rows themselves are 8 MB of text


def test_last_rows_of_a_single_file_are_held_out(tmp_path):
    path = write(tmp_path / "a.jsonl", numbered(50))
    data = source(path)
    assert [row["answer"] for row in data.train] == [str(i) for i in range(45)]
    assert [row["answer"] for row in data.eval] == [str(i) for i in range(45, 50)]
    assert data.tokenizer is None and data.reward == "exact_match" and data.train[1]["prompt"] == "p1 é"
    data = source(path, eval_size=10, train_size=3)
    assert (len(data.train), data.eval[0]["answer"], data.train[2:5]) == (3, "40", [data.train[2]])
    assert len(source(write(tmp_path / "b.jsonl", numbered(3000))).eval) == 256
    with pytest.raises(UserError, match="data.train_size=46, but there are only 45"):
        source(path, train_size=46)
    with pytest.raises(UserError, match="data.eval_size=50 leaves no training rows"):
        source(path, eval_size=50)
    with pytest.raises(UserError, match="data.split is set"):
        source(path, split="dev")


def test_a_folder_has_a_file_per_split(tmp_path):
    write(tmp_path / "train.jsonl", numbered(5))
    write(tmp_path / "dev.jsonl", numbered(3))
    data = source(tmp_path, eval_split="dev", eval_size=2)
    assert (len(data.train), len(data.eval)) == (5, 2)
    with pytest.raises(UserError, match=r"test.jsonl does not exist .*data.path=\S+ has dev.jsonl, train.jsonl"):
        source(tmp_path)
    with pytest.raises(UserError, match="held out"):
        source(tmp_path, eval_split="train")


@pytest.mark.parametrize(
    "content, message",
    [
        (b'{"prompt": "a"}\n\n{"prompt": }\n', r"a.jsonl:3: not valid JSON"),
        (b'{"prompt": "a"}\n[1]\n', r"a.jsonl:2: a row must be a JSON object, not list"),
        (b'{"prompt": "a"}\n\xff\n', r"a.jsonl:2: byte 1 of the line \(0xff\) is not UTF-8; convert"),
        (b'{"prompt": "a"}\n{"text": "b"}\n', r"a.jsonl:2: .* needs column 'prompt'; the row has: text"),
        (b'{"prompt": 3}\n', r"a.jsonl:1: column 'prompt' must be text"),
        (b'{"prompt": [{"role": "user"}]}\n', r"a.jsonl:1: .*content: it must be a text"),
        (b"\n\n", r"a.jsonl is empty"),
    ],
)
def test_bad_rows_are_named_by_file_and_line(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=message):
        source(tmp_path / "a.jsonl")


def test_missing_paths():
    with pytest.raises(UserError, match="does not exist"):
        source("/nowhere/x.jsonl")
    with pytest.raises(UserError, match="data.path is required"):
        load_source(DataConfig(name="jsonl"))


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "row, keys, prompt",
    [
        ({"prompt": "hi"}, {}, "hi"),
        ({"prompt": MESSAGES}, {}, MESSAGES),
        ({"prompt": "hi"}, {"apply_chat_template": True}, MESSAGES),
        ({"prompt": "hi"}, {"system_prompt": "S"}, [{"role": "system", "content": "S"}, *MESSAGES]),
        ({"prompt": MESSAGES}, {"system_prompt": "S"}, [{"role": "system", "content": "S"}, *MESSAGES]),
        ({"q": "1+1", "n": 2}, {"prompt_template": "{{{q}}} {n:02d}\nA:"}, "{1+1} 02\nA:"),
    ],
)
def test_prompts(tmp_path, row, keys, prompt):
    path = write(tmp_path / "a.jsonl", [row])
    made = source(path, **keys).train[0]
    assert made["prompt"] == prompt
    assert {**made, "prompt": None} == {**row, "prompt": None}  # the columns are kept


@pytest.mark.parametrize(
    "row, keys, message",
    [
        ({"q": "1"}, {"prompt_template": "{question}"}, "a.jsonl:1: .*'question'; the row has: q"),
        ({"q": "1"}, {"prompt_template": "{q"}, "data.prompt_template '{q' is not a Python format string"),
        ({"q": "1"}, {"prompt_template": "{}"}, "must name its columns"),
        ({"q": "1"}, {"prompt_template": "{q:d}"}, "a.jsonl:1: .*failed: ValueError"),
        ({"prompt": MESSAGES}, {"apply_chat_template": False}, "contains messages"),
        ({"prompt": "x"}, {"apply_chat_template": False, "system_prompt": "S"}, "needs the chat template"),
        ({"prompt": [{"role": "system", "content": "T"}]}, {"system_prompt": "S"}, "already begins"),
    ],
)
def test_prompt_errors(tmp_path, row, keys, message):
    path = write(tmp_path / "a.jsonl", [row])
    with pytest.raises(UserError, match=message):
        source(path, **keys)


def test_hub_source_loads_the_configured_splits(monkeypatch):
    calls = []

    def load_dataset(name, configuration, split):
        calls.append((name, configuration, split))
        if split == "none":
            raise ValueError("no such split")
        return numbered(4 if split == "train" else 2)

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    data = load_source(DataConfig(name="hub", path="me/set:hard", prompt_template="Q: {prompt}"))
    assert calls == [("me/set", "hard", "train"), ("me/set", "hard", "test")]
    assert (len(data.train), len(data.eval), data.train[0]["prompt"]) == (4, 2, "Q: p0 é")
    with pytest.raises(
        UserError, match="me/set .*huggingface.co/datasets/me/set .*set data.path to a folder.*no such split"
    ):
        load_source(DataConfig(name="hub", path="me/set", split="none"))
    with pytest.raises(UserError, match="me/set.*'question'"):
        load_source(DataConfig(name="hub", path="me/set", prompt_template="{question}"))
    monkeypatch.setitem(sys.modules, "datasets", None)  # import raises
    with pytest.raises(UserError, match=r"tunix-like\[hub\]"):
        load_source(DataConfig(name="hub", path="me/set"))


def test_an_answer_with_the_column_role_is_data(tmp_path):
    """Only SFT reads an answer as messages. A reward gets what the file has."""
    answer = [{"role": "ceo", "name": "Ann", "since": None}]
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps({'prompt': 'who?', 'answer': answer})}\n" * 2)
    source = load_source(DataConfig(name="jsonl", path=str(tmp_path / "rows.jsonl"), eval_size=1))
    assert source.train[0]["answer"] == answer
