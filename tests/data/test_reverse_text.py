"""Tests the smallest text task: prompts, answers, ids, and held-out strings that do not occur in the training data."""

import collections

import pytest

from tunix_like.config.schema import DataConfig
from tunix_like.data import load_source, reverse_text
from tunix_like.errors import UserError


def source(**keys):
    return load_source(DataConfig(name="reverse_text", **keys))


def test_rows():
    data = source()
    assert len(data.train) == 2000 and len(data.eval) == 64 and data.reward == "exact_match"
    lengths = collections.Counter()
    for row in [*data.train, *data.eval]:
        text = row["prompt"].removesuffix(">")
        assert set(text) <= set("abcdefgh") and row["prompt"] == text + ">" and row["answer"] == text[::-1]
        lengths[len(text)] += 1
    assert set(lengths) == {2, 3, 4} and min(lengths.values()) > 500


@pytest.mark.parametrize("longest", [2, 4, 7])
def test_held_out_strings_are_distinct_and_not_in_training(longest):
    data = source(text_length=longest, seed=5)
    held_out = [row["text"] for row in data.eval]
    assert len(set(held_out)) == len(held_out) > 0
    assert not set(held_out) & {row["text"] for row in data.train}
    assert max(len(text) for text in held_out) == longest


def test_rows_depend_only_on_the_seed():
    assert list(source(seed=1).train) == list(source(seed=1).train) != list(source(seed=2).train)


def test_tokenizer_and_its_saved_form(tmp_path):
    from transformers import AutoTokenizer

    ours = reverse_text.tokenizer()
    assert ours.encode("abcd>") == [1, 5, 6, 7, 8, 4] and ours.vocab_size == 13
    assert ours.decode([8, 7, 6, 5, 2]) == "dcba"
    ours.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs("hgfa>")["input_ids"] == ours.encode("hgfa>")
    assert theirs.decode([1, 8, 7, 5, 2], skip_special_tokens=True) == "dca"


def test_too_few_strings():
    with pytest.raises(UserError, match="data.eval_size=40 is more than half of the 64 possible strings"):
        source(text_length=2, eval_size=40)
    with pytest.raises(UserError, match="data.maze_size is not read"):
        source(maze_size=9)
