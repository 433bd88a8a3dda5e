"""Tests the sources whose problems are generated for pretrained models: sums, and tasks of `reasoning_gym`."""

import json

import pytest

from tests.tiny_model import HF
from tunix_like.config.load import load
from tunix_like.config.schema import DataConfig
from tunix_like.data import load_source
from tunix_like.errors import UserError
from tunix_like.rewards import REWARDS


def terms(row):
    first, second = (int(word.strip("?")) for word in row["prompt"][0]["content"].split() if word.strip("?").isdigit())
    return frozenset((first, second)), first + second


def test_no_sum_is_both_trained_on_and_held_out():
    source = load_source(DataConfig(name="sums", eval_size=64))
    held_out, trained = ({terms(row)[0] for row in rows} for rows in (source.eval, source.train))
    assert (len(held_out), len(trained)) == (64, len(source.train)) and not held_out & trained
    assert all(row["gold"] == row["answer"] == str(terms(row)[1]) for row in [*source.eval, *source.train])
    with pytest.raises(UserError, match="eval_size"):
        load_source(DataConfig(name="sums", eval_size=435))


@pytest.mark.parametrize(
    ("completion", "gold", "reward"),
    [
        ("7", "7", 1),
        ("3 + 4 = 7", "7", 1),
        ("3 + 4 = 7.", "7", 1),
        ("It is 7, since 4 + 3 is 7!", "7", 1),
        ("1,007", "1007", 1),
        ("-7", "7", 0),
        ("10-7", "7", 1),
        ("17", "7", 0),
        ("7.5", "7", 0),
        ("7 or 8", "7", 0),
        ("seven", "7", 0),
        ("", "7", 0),
        ("٧", "7", 0),
        ("9" * 5000, "7", 0),
        ("7", "$7", 1),
    ],
)
def test_the_last_number_counts(completion, gold, reward):
    assert REWARDS["last_number"](["?"], [completion], gold=[gold]) == [reward]


TASK = {"name": "reasoning_gym", "task": "letter_counting", "train_size": 60, "eval_size": 20, "seed": 3}


def test_problems_are_those_of_the_package_and_the_held_out_ones_are_not_trained_on():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    source = load_source(DataConfig(**TASK, arguments={"max_words": 9}))
    assert (len(source.train), len(source.eval)) == (60, 20)
    theirs = reasoning_gym.create_dataset("letter_counting", seed=3, size=1600, max_words=9)
    known = {problem["question"]: problem["answer"] for problem in theirs}
    rows = [*source.train, *source.eval]
    assert all(known[row["question"]] == row["answer"] and row["prompt"] == row["question"] for row in rows)
    assert not {row["question"] for row in source.train} & {row["question"] for row in source.eval}
    assert len({row["question"] for row in source.eval}) == 20


def test_an_answer_that_a_task_cannot_read_is_wrong():
    pytest.importorskip("reasoning_gym")
    source = load_source(DataConfig(**TASK | {"task": "prime_factorization"}))
    row = source.train[0]
    columns = {"generator": [row["generator"]], "number": [row["number"]]}
    assert REWARDS[source.reward](["?"], ["I think it is 2 x 2"], **columns) == [0]
    assert REWARDS[source.reward](["?"], [row["answer"]], **columns) == [1]


def test_gold_without_a_number_names_the_prompt():
    with pytest.raises(UserError, match="'gold' has no number for the prompt 'How many"):
        REWARDS["last_number"](["How many?"], ["7"], gold=["seven"])


def test_answers_are_scored_by_the_task():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    source = load_source(DataConfig(**TASK | {"task": "countdown"}))
    row = source.train[4]
    completions = [f"Let me see.\n<answer> {row['answer']} </answer> done", f"So\n{row['answer']}\n", "1 + 1", ""]
    found = REWARDS[source.reward](
        [""] * 4, completions, generator=[row["generator"]] * 4, number=[row["number"]] * 4, answer=[row["answer"]] * 4
    )
    task = reasoning_gym.create_dataset("countdown", seed=3, size=1600)
    entry = task[row["number"]]
    assert found == [task.score_answer(answer, entry) for answer in (entry["answer"], entry["answer"], "1 + 1", None)]
    assert found[0] == found[1] == 1 > found[2]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"task": None}, "data.task"),
        ({"task": "leter_counting"}, "Did you mean 'letter_counting'"),
        ({"arguments": {"words": 3}}, "data.arguments"),
        ({"arguments": {"min_words": 9, "max_words": 3}}, "data.arguments"),
        ({"task": "count_bits", "arguments": {"min_n": 1, "max_n": 5}}, "only 5 differ"),
        ({"path": "x"}, "data.path is not read"),
    ],
)
def test_mistakes_name_the_key(changed, said):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(UserError, match=said):
        load_source(DataConfig(**TASK | changed))


def test_several_tasks_are_a_mix_with_their_names_as_labels(tmp_path):
    pytest.importorskip("reasoning_gym")
    entry = {"name": "reasoning_gym", "train_size": 8, "eval_size": 2}
    sources = [entry | {"task": task} for task in ("chain_sum", "spell_backward")]
    config = load(
        None, [f"data.sources={json.dumps(sources)}", "data.name=mix", "model.init=random", f"model.config={HF}"]
    )
    source = load_source(config.data)
    assert set(source.parts) == {"chain_sum", "spell_backward"} and source.reward == "reasoning_gym"
