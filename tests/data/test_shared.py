"""Tests the count of held-out prompts that also occur in the training data, against brute force, with one read per
row."""

import logging
import random

import pytest

from tunix_like.config.schema import DataConfig
from tunix_like.data import load_source, shared
from tunix_like.data.shared import Overlap, shared_prompts, warn_shared
from tunix_like.data.stream import grain
from tunix_like.errors import UserError


def row(kind, number):
    text = f"question {number} \U0001f600"
    turns = [{"role": "system", "content": "be brief"}, {"content": text, "role": "user"}]
    return {"prompt": text if kind == "text" else turns, "answer": str(random.random())}


class Counted(list):
    """A list of rows that counts its reads."""

    asked = 0

    def __getitem__(self, index):
        Counted.asked += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("kind", ["text", "messages"])
def test_count_of_shared_prompts_equals_brute_force(kind):
    rng = random.Random(0)
    train = Counted(row(kind, rng.randrange(400)) for _ in range(300))
    held_out = [row(kind, rng.randrange(400)) for _ in range(100)]
    if kind == "messages":  # the order of the fields of a turn does not matter
        held_out = [{"prompt": [dict(sorted(turn.items())) for turn in each["prompt"]]} for each in held_out]
    prompts = list(train)
    expected = sum(any(each["prompt"] == other["prompt"] for other in prompts) for each in held_out)
    assert 20 < expected < 80
    Counted.asked = 0
    assert shared_prompts(train, held_out) == Overlap(expected, 100, 300, 300) and Counted.asked == 300
    assert shared_prompts(held_out, held_out).both == 100
    assert shared_prompts([row("text", -1)], held_out).both == 0
    assert shared_prompts(train, held_out[:0]) is None and shared_prompts(iter(train), held_out) is None


def test_unusable_rows_are_not_compared():
    class Broken(list):
        def __getitem__(self, index):
            if index == 0:
                raise UserError("no prompt can be made of this row")
            return super().__getitem__(index)

    rows = [{"prompt": "a"}, {"question": "b"}, {"prompt": None}, {"prompt": "c"}]
    assert shared_prompts(Broken(rows), [{"prompt": "a"}, {"prompt": None}, {}, {"prompt": "c"}]).both == 1
    even = grain.MapDataset.source(rows).filter(lambda each: "prompt" in each)
    assert shared_prompts(even, [{"prompt": "c"}]) == Overlap(1, 1, 4, 4)


def test_number_of_compared_rows_is_limited(monkeypatch, caplog):
    monkeypatch.setattr(shared, "MOST_COMPARED", 5)
    rows = [row("text", number) for number in range(9)]
    warn_shared(rows, [rows[3], rows[7], row("text", -1)])
    assert "1 of 3 held-out prompts are also in the training data (the first 5 of its 9 rows" in caplog.text
    caplog.clear()
    warn_shared(rows, rows[7:])
    assert not caplog.text


def test_no_warning_if_all_training_rows_have_one_prompt(caplog):
    """Then the prompt does not tell problems apart, for example where an environment hides a number."""
    rows = [{"prompt": "Guess.", "number": number} for number in range(8)]
    warn_shared(rows, rows[:2])
    assert not caplog.text
    warn_shared([*rows, {"prompt": "Other."}], rows[:2])
    assert "2 held-out prompts are also" in caplog.text


@pytest.mark.parametrize("name", ["maze", "reverse_text"])
def test_generated_sources_share_no_prompts_between_splits(name, caplog):
    data = load_source(DataConfig(name=name, train_size=200, eval_size=50))
    with caplog.at_level(logging.WARNING):
        warn_shared(data.train, data.eval)
    assert not caplog.text and shared_prompts(data.train, data.eval) == Overlap(0, 50, 200, 200)


def test_hidden_columns_of_any_kind_are_compared():
    rows = [{"prompt": "a", "hidden": {"x": [1]}}, {"prompt": "a", "hidden": [2]}, {"prompt": "b", "hidden": {3}}]
    assert shared_prompts(rows, rows).both == 3 and shared_prompts(rows[:2], rows[1:]).both == 1
