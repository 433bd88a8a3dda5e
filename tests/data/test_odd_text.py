"""Tests unusual text: unreadable input is an error with file and line before anything starts, unusable prompts are
skipped and counted, everything else is read unchanged, and memory use does not grow with the text."""

from __future__ import annotations

import json
import logging
import sys
import tracemalloc
import types

import grain.python as grain
import numpy as np
import optax
import pytest
from tokenizers import pre_tokenizers

import tunix_like
from tests.data.test_chat import make_tokenizer
from tests.tiny_model import HF
from tunix_like import MaxRLConfig, MaxRLLearner, RLTrainingConfig, RolloutConfig, UserError
from tunix_like.config.schema import DataConfig
from tunix_like.data import load_source, reverse_text, stream
from tunix_like.data.jsonl import MOST_COLUMNS, JsonlRows
from tunix_like.data.stream import check_prompts, prompt_batches, refusing, render, usable
from tunix_like.evaluation.evaluate import eval_problems
from tunix_like.rewards import REWARDS, pooled, resolve, score
from tunix_like.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

BYTES = make_tokenizer("qwen", pre_tokenizers.ByteLevel.alphabet(), ["hello hello hello world"], 280)


def source(path, **keys):
    return load_source(DataConfig(name="jsonl", path=str(path), **keys))


def nested(levels):
    """Returns a row with this number of nesting levels, its own level included."""
    return b'{"prompt": "a", "x": ' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "caf\xe9"}', r"byte 16 of the line \(0xe9\) is not UTF-8; convert .* -f LATIN1 -t UTF-8"),
        (b'{"prompt": "a", "b\xff": 1}', r"byte 19 of the line \(0xff\) is not UTF-8"),
        ("\ufeff{}".encode("utf-16-le"), r"byte 1 of the line \(0xff\) is not UTF-8; convert .* -f UTF-16 -t UTF-8"),
        (b'{"prompt": "\xed\xa0\x80"}', r"byte 13 of the line \(0xed\) is not UTF-8"),  # half a character, as bytes
        (rb'{"prompt": "a\ud83d"}', r"contains a lone surrogate \('\\ud83d'"),
        (rb'{"prompt": "a", "more": {"x": ["\uDE00"]}}', r"contains a lone surrogate \('\\ude00'"),
        (rb'{"prompt": "a", "\udfff": 1}', r"contains a lone surrogate"),
        (b'{"prompt": "a\0b"}', r"not valid JSON \(Invalid control character at at column 14\)"),
        (b"\0" * 50, r"not valid JSON \(Expecting value at column 1\)"),
        (nested(1_000_000), r"nested too deeply"),
        (b'{"prompt": "a", "x": ' + b"9" * 5000 + b"}", r"a number has more than 4300 digits; write it as text"),
        (json.dumps({"prompt": "a", **{f"c{i}": 0 for i in range(MOST_COLUMNS)}}).encode(), r"more than 1000 differen"),
    ],
)
def test_unreadable_input_gives_an_error_with_file_and_line(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "good"}\n\n' + line + b"\n")
    with pytest.raises(UserError, match=rf"a\.jsonl:3: .*{message}"):
        source(tmp_path / "a.jsonl")


ODD = [
    {"prompt": "a\0b"},
    {"prompt": "\ud83d\ude00 \u2028 \ufeff \x1b[31m \u202e", "big": 10**30},
    {"prompt": "x" * 1_000_000, "list": [[[]]] * 200},
    {"prompt": "y", "": 1, "prompt ": None, "x.y": {"a": [1, "\ud83d\ude00"]}},
    {"prompt": "z", "infinite": float("inf")},
]


@pytest.mark.parametrize("ascii_alone", [True, False])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\n \n\n"])
def test_readable_input_is_read_unchanged(tmp_path, ascii_alone, end):
    lines = [json.dumps(row, ensure_ascii=ascii_alone) for row in ODD]
    lines = [line.encode("utf-16", "surrogatepass").decode("utf-16") for line in lines]
    lines[4] = lines[4].replace("Infinity", "1e400")
    (tmp_path / "a.jsonl").write_bytes(end.join(["\ufeff" + lines[0], *lines[1:]]).encode())  # a byte order mark
    (tmp_path / "b.jsonl").write_bytes(nested(100))
    rows = JsonlRows(tmp_path / "a.jsonl", lambda row, where: None)
    whole = [json.loads(json.dumps(row).encode()) for row in ODD]
    assert [{name: value for name, value in row.items() if value is not None} for row in rows] == [
        {name: value for name, value in row.items() if value is not None} for row in whole
    ]
    assert len({tuple(row) for row in rows}) == 1, "every row has all columns"
    assert len(source(tmp_path / "b.jsonl").train) == 1
    for row in whole[:2]:
        ids = render(row, BYTES).tokens
        assert BYTES.decode(ids) == row["prompt"]


MIXED = [{"prompt": p} for p in ("", "ab", "x" * 100_000, "cd", "", "ef", "w " * 50_000, "gh")]


def texts(batches):
    return [prompt.text for batch in batches for prompt in batch]


def test_prompts_without_tokens_or_with_too_many_are_skipped_and_counted(caplog):
    assert BYTES.encode("") == []
    found = check_prompts(MIXED, BYTES, 8, "skip", "training")
    assert (found.long, found.empty) == (2, 2)
    assert str(found) == "2 of them longer than 8 tokens and skipped, 2 of them empty and skipped"
    given = {"batch_size": 2, "max_prompt_length": 8, "seed": 0, "shuffle": False, "forever": False}
    for rows in (MIXED, iter(MIXED), stream.grain.MapDataset.source(MIXED).to_iter_dataset()):
        assert texts(prompt_batches(rows, BYTES, **given)) == ["ab", "cd", "ef", "gh"]
    assert [problem.text for problem in eval_problems(MIXED, BYTES, 8, None)[0]] == ["ab", "cd", "ef", "gh"]
    with pytest.raises(UserError, match="training row 0 .counted from 0.: its prompt is empty. Remove the row, or set"):
        check_prompts(MIXED, BYTES, 8, "error", "training")
    with pytest.raises(UserError, match="row 1 .counted from 0.: its prompt has 100000 tokens.*Raise it, or set"):
        check_prompts(MIXED[1:3], BYTES, 8, "error", "training")


def test_empty_message_is_a_prompt_and_empty_template_result_is_not(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": ""}]}, {"prompt": [{"role": "user", "content": "x" * 100_000}]}]
    found = check_prompts(rows, BYTES, 64, "skip", "training")
    assert (found.long, found.empty) == (1, 0)
    assert "<|im_start|>user\n<|im_end|>" in render(rows[0], BYTES).text
    (tmp_path / "a.jsonl").write_text('{"q": ""}\n{"q": "ab"}\n')
    data = source(tmp_path / "a.jsonl", prompt_template="{q}")
    found = check_prompts(data.train, BYTES, 64, "skip", "training")
    assert (found.long, found.empty) == (0, 1)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [""],
            "all 3 training prompts are unusable: 3 empty, 0 longer than .*=8. Check data.path",
        ),
        (["", "x" * 100_000], "all 6 training prompts are unusable: 3 empty, 3 longer than"),
        (["x" * 100_000], "all 3 training prompts are longer than rollout.max_prompt_length=8; raise it"),
    ],
)
def test_data_without_a_single_usable_prompt_is_an_error(rows, message):
    with pytest.raises(UserError, match=message):
        check_prompts([{"prompt": text} for text in rows] * 3, BYTES, 8, "skip", "training")


def test_check_reports_only_the_scanned_rows(monkeypatch):
    monkeypatch.setattr(stream, "SCANNED_ROWS", 3)
    rows = [{"prompt": text} for text in ("a", "b", "", "c", "")]
    assert str(check_prompts(rows, BYTES, 8, "skip", "training")) == "1 of the first 3 empty and skipped"
    with pytest.raises(UserError, match="the first 3 training prompts are unusable"):
        check_prompts([{"prompt": ""}] * 4, BYTES, 8, "skip", "training")


@pytest.mark.parametrize("text", ["hello world " * 9000, "x" * 100_000, "<|im_end|>" * 10_000, " " * 100_000])
@pytest.mark.parametrize("chat", [True, False])
def test_long_prompts_are_encoded_only_in_part(text, chat, monkeypatch):
    """The oracle is the encoding of the whole prompt: the same prompts are usable, and usable prompts have equal
    tokens."""
    seen, encode = [], Tokenizer.encode

    def counted(self, text, add_special_tokens=True):
        seen.append(len(text))
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    for size in (10, 200, 2_000, 100_000):
        row = {"prompt": [{"role": "user", "content": text[:size]}] if chat else text[:size]}
        whole = render(row, BYTES)
        seen.clear()
        prompt = render(row, BYTES, 100)
        assert sum(seen) <= 16_000, "characters that were tokenised, a beginning of the content and of the prompt"
        assert usable(prompt, 100) == usable(whole, 100)
        assert prompt == whole or not usable(whole, 100)


def test_invalid_row_beyond_the_scanned_rows_is_skipped_with_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(stream, "SCANNED_ROWS", 2)
    rows = [{"prompt": text} for text in ("a", "b", "\ud800", "c", "\udfff", "d")]
    rows[4] = {"question": "no prompt"}
    check_prompts(rows, BYTES, 8, "skip", "training")
    with caplog.at_level(logging.WARNING):
        batches = prompt_batches(rows, BYTES, batch_size=2, max_prompt_length=8, seed=0, shuffle=False, forever=False)
        assert texts(batches) == ["a", "b", "c", "d"]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "skipped a row" in said[0] and "half of a character" in said[0]
    with pytest.raises(UserError, match="training row 0: the text .* lone surrogate"):
        check_prompts(rows[2:], BYTES, 8, "skip", "training")


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize(
    ("text", "said"),
    [("x" * 9, "9 tokens, but rollout.max_prompt_length is 8"), ("", "is empty"), ("\ud800", "surrogate")],
)
def test_invalid_row_beyond_the_scanned_rows_is_an_error_if_configured(monkeypatch, filtered, text, said):
    """The error names the row by its index in the data, also in the order of a shuffled second epoch."""
    monkeypatch.setattr(stream, "SCANNED_ROWS", 2)
    rows = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "left out"}, {"prompt": "c"}, {"prompt": "d"}]
    data = grain.MapDataset.source(rows).filter(lambda row: row["prompt"] != "left out") if filtered else rows
    check_prompts(data, BYTES, 8, "error", "training")
    given = {"batch_size": 1, "max_prompt_length": 8, "seed": 0, "shuffle": True, "forever": True}
    batches = refusing(prompt_batches(data, BYTES, **given), "error")
    if filtered:
        assert {next(batches)[0].text for _ in range(12)} == set("abcd")
    rows[3]["prompt"] = text
    with pytest.raises(UserError, match=f"training row 3.*{said}"):
        for _ in range(12):
            next(batches)
    assert next(refusing(batches, "skip"))[0].text in set("abcd") | {"left out"}


def test_every_row_of_a_hub_data_set_is_checked(monkeypatch):
    rows = [{"prompt": "a"}] * 3 + [{"prompt": None}]
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=lambda *_, split: rows))
    with pytest.raises(UserError, match="me/set, row 4 of train: .*needs column 'prompt'"):
        load_source(DataConfig(name="hub", path="me/set"))


def test_function_named_in_a_row_is_not_run(tmp_path):
    """Covers the column that a mix fills with the names of its own functions."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef f(completions): return [1.0]\n")
    for name in (f"{tmp_path / 'evil.py'}:f", "os:getcwd", None, ["x"]):
        found = score([("by_source", REWARDS["by_source"], 1.0)], ["p"], ["c"], {"source_reward": [name]})
        assert found.errors.all() and np.isnan(found.total).all()
    assert not (tmp_path / "ran").exists()
    taken = {"prompts": 1, "completions": 1}
    for column in taken:
        with pytest.raises(UserError, match=f"must not be called '{column}'"):
            score([("exact_match", REWARDS["exact_match"], 1.0)], ["p"], ["c"], {column: ["x"], "answer": ["x"]})


REWARD = """
import json

def seen(prompts, completions, id):
    with open(FILE, "a") as file:
        file.write(json.dumps([prompts, completions, id]) + "\\n")
    return [float(len(text) % 2) for text in completions]
"""


def test_a_run_on_odd_rows(tmp_path):
    """The rows have NUL, a direction mark, a repeated row with the same id, an empty prompt and a long prompt. They
    pass through a worker, the update and the files."""
    odd = [
        {"prompt": text, "id": 7} for text in ("", "a\0b", "x" * 100_000, "a\0b", "a\0b", "\u202e\x1b[31m\u2028", "")
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in odd))
    (tmp_path / "reward.py").write_text(REWARD.replace("FILE", repr(str(tmp_path / "seen.jsonl"))))
    rows = source(tmp_path / "rows.jsonl").train
    name = f"{tmp_path / 'reward.py'}:seen"
    MaxRLLearner(
        model=tunix_like.load_model(HF | {"vocab_size": BYTES.vocab_size}, init="random")[0],
        tokenizer=BYTES,
        reward_fns=pooled({name: resolve(name)}, workers=1),
        algo_config=MaxRLConfig(num_generations=4),
        rollout_config=RolloutConfig(max_prompt_length=16, max_tokens_to_generate=4),
        training_config=RLTrainingConfig(max_steps=1, actor_optimizer=optax.sgd(0.1), output_dir=str(tmp_path / "run")),
    ).train(rows, batch_size=4, shuffle=False)
    with (tmp_path / "run" / "rollouts" / "step_000001.jsonl").open(encoding="utf-8", newline="\n") as file:
        kept = [json.loads(line) for line in file]
    prompts = [odd[i]["prompt"] for i in (1, 3, 4, 5)]
    assert [row["prompt"] for row in kept[::4]] == prompts
    assert [row["problem"] for row in kept] == [i for i in range(4) for _ in range(4)], "the same row is another group"
    groups = [tuple(row["completion"] for row in kept[i : i + 4]) for i in (0, 4, 8)]
    assert len(set(groups)) == 3, "and has draws of its own"
    calls = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    assert [prompt for call in calls for prompt in call[0]] == [row["prompt"] for row in kept]
    assert [text for call in calls for text in call[1]] == [row["completion"] for row in kept]
    assert {number for call in calls for number in call[2]} == {7}


def large(folder, rows):
    """The same rows as a file, as GSM8K, and in a mix of two sources."""
    (folder / "gsm8k").mkdir(parents=True)
    few = "".join(json.dumps({"question": f"q{i}", "answer": f"#### {i}"}) + "\n" for i in range(50))
    with (folder / "gsm8k" / "train.jsonl").open("w") as file:
        for i in range(50, rows + 50):
            file.write(json.dumps({"question": f"{i}", "answer": f"#### {i}"}) + "\n")
    (folder / "gsm8k" / "test.jsonl").write_text(few)
    file = {"name": "jsonl", "path": str(folder / "gsm8k" / "train.jsonl"), "prompt_template": "{question}"}
    other = file | {"path": str(folder / "gsm8k" / "test.jsonl"), "label": "few", "eval_size": 5}
    return {
        "file": DataConfig(**file, eval_size=rows // 2),
        "gsm8k": DataConfig(name="gsm8k", path=str(folder / "gsm8k")),
        "mix": DataConfig(name="mix", sources=[file, other]),
    }


@pytest.mark.parametrize(("kind", "most"), [("file", 24), ("gsm8k", 24), ("mix", 100)])
def test_memory_per_row_is_that_of_an_offset(tmp_path, kind, most):
    """Measures the peak bytes per additional row, from opening the file to the last of several shuffled batches.
    `tests/stress/million_rows.py` measures a million rows with the memory of the whole process."""

    def peak(rows):
        config, tokenizer = large(tmp_path / str(rows), rows)[kind], reverse_text.tokenizer()
        tracemalloc.start()
        data = load_source(config)
        batches = prompt_batches(
            data.train, tokenizer, batch_size=8, max_prompt_length=16, seed=0, shuffle=True, forever=True
        )
        for _ in range(4):
            next(batches)
        held, _ = eval_problems(data.eval, tokenizer, 16, 10)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(held) <= 10 and len(data.train) + len(data.eval) >= rows
        return found

    peak(100)  # allocates what is imported or created once
    few, many = peak(500), peak(2_500)
    assert (many - few) / 2_000 < most
