"""Tests that `data.prompt_template` and `data.answer_template` build prompt and answer from columns of any names."""

import json
import sys
import types

import pytest

from tunix_like.config.schema import DataConfig
from tunix_like.data import load_source
from tunix_like.errors import UserError
from tunix_like.rewards import check_arguments, resolve

ROWS = [{"Task No.": i, "x[0]": i, "y": 3, "the sum": i + 3} for i in range(4)]


def write(tmp_path, rows):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def source(tmp_path, rows, **keys):
    return load_source(DataConfig(name="jsonl", path=write(tmp_path, rows), eval_size=1, **keys))


def test_templates_read_columns_with_unusual_names(tmp_path):
    keys = {"prompt_template": "{Task No.}) {x[0]:02d} + {y}?", "answer_template": "{the sum}"}
    data = source(tmp_path, ROWS, **keys)
    expected = [{**row, "prompt": f"{i}) {i:02d} + 3?", "answer": str(i + 3)} for i, row in enumerate(ROWS)]
    assert [*data.train, *data.eval] == expected
    assert all(type(row["answer"]) is str for row in data.train)
    check_arguments([("exact_match", resolve("exact_match"), 1.0)], list(data.train[0]))


def test_column_name_takes_precedence_over_field_access(tmp_path):
    row = {"q": {"text": "hi"}, "q[text]": "whole", "n": 3}
    assert source(tmp_path, [row] * 2, prompt_template="{q[text]}").train[0]["prompt"] == "whole"
    del row["q[text]"]
    assert source(tmp_path, [row] * 2, prompt_template="{q[text]} {n.real}").train[0]["prompt"] == "hi 3"


def test_templates_read_the_original_columns(tmp_path):
    """Neither template reads the result of the other."""
    rows = [{"prompt": "p", "answer": "a"}] * 2
    data = source(tmp_path, rows, prompt_template="<{answer}>", answer_template="[{prompt}]")
    assert data.train[0] == {"prompt": "<a>", "answer": "[p]"}


def test_templates_in_a_mix_and_of_a_hub_data_set(tmp_path, monkeypatch):
    keys = {"prompt_template": "{y}", "answer_template": "{the sum}"}
    entry = {"name": "jsonl", "path": write(tmp_path, ROWS), "eval_size": 1, **keys}
    mixed = load_source(DataConfig(name="mix", sources=[entry]))
    assert sorted(row["answer"] for row in mixed.train) == ["3", "4", "5"]
    rows = types.SimpleNamespace(load_dataset=lambda name, configuration, split: ROWS)
    monkeypatch.setitem(sys.modules, "datasets", rows)
    assert load_source(DataConfig(name="hub", path="me/set", **keys)).eval[3]["answer"] == "6"


@pytest.mark.parametrize(
    "keys, message",
    [
        (
            {"answer_template": "{sum}"},
            "a.jsonl:1: data.answer_template names column 'sum'; the row has: Task No., a:b, the",
        ),
        ({"answer_template": "{Task Nr.}"}, "data.answer_template names column 'Task Nr.'; the row has"),
        ({"answer_template": "{y"}, "data.answer_template '{y' is not a Python format string"),
        ({"answer_template": "{}"}, "data.answer_template '{}' must name its columns"),
        ({"answer_template": "{the sum:s}"}, "a.jsonl:1: data.answer_template .* failed: ValueError"),
        ({"prompt_template": "{a}"}, "names column 'a'; the row has: .* a column name ends at .* rename 'a:b'"),
    ],
)
def test_invalid_template_raises_a_message(tmp_path, keys, message):
    with pytest.raises(UserError, match=message):
        source(tmp_path, [{**row, "a:b": 0} for row in ROWS], **{"prompt_template": "{y}", **keys})


def test_template_key_that_is_unused_or_missing_raises_a_message(tmp_path):
    with pytest.raises(UserError, match="data.answer_template is not read by data.name=gsm8k"):
        load_source(DataConfig(name="gsm8k", path=str(tmp_path), answer_template="{answer}"))
    with pytest.raises(UserError, match="'answer', but the rows have no such column.* data.answer_template builds it"):
        check_arguments([("exact_match", resolve("exact_match"), 1.0)], list(ROWS[0]))
