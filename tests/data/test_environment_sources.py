"""Tests the data sources of the shipped environments: rows, held-out rows, tokenizers, and SFT answers that are legal
play."""

from __future__ import annotations

import collections
import re

import pytest

from tunix_like.config.schema import DataConfig
from tunix_like.data import calculator, games, load_source
from tunix_like.data.shared import shared_prompts
from tunix_like.environments import guess as guess_environment
from tunix_like.environments import maze_steps as maze_environment
from tunix_like.environments.calculator import calculator as tool
from tunix_like.errors import UserError
from tunix_like.text.tool_calls import tool_calls

NAMES = ("guess", "maze_steps", "calculator")


def source(name, **keys):
    return load_source(DataConfig(name=name, **keys))


def played(environment, answer):
    """Returns the results of the turns in an SFT answer, and asserts that the observations in it are those of the
    environment."""
    results = []
    for turn in answer.split(f" {games.END}"):
        given, _, move = turn.strip().rpartition(" ")
        if results:
            assert given == results[-1].observation
        results.append(environment.step(move))
    return results


@pytest.mark.parametrize("name", NAMES)
def test_rows_depend_only_on_the_seed(name):
    rows = [list(source(name, train_size=50, eval_size=8, seed=seed).train) for seed in (1, 1, 2)]
    assert rows[0] == rows[1] != rows[2] and len(rows[0]) == 50


@pytest.mark.parametrize("name", NAMES)
def test_every_word_has_a_token(name):
    data = source(name, train_size=200, eval_size=8)
    ids = data.tokenizer
    unknown = ids.encode("<unk>", add_special_tokens=False)
    for row in data.train:
        encoded = ids.encode_data(row["answer"], 100)
        assert not set(unknown) & set(encoded) and ids.decode(encoded) == row["answer"]
        assert not set(unknown) & set(ids.encode_prompt(row["prompt"], False)[1])


def test_games_are_legal_and_random():
    data = source("guess", train_size=2000)
    assert [row["number"] for row in data.eval] == [*range(64)]
    first, solved = collections.Counter(), 0
    for row in data.train:
        game = guess_environment.Guess()
        game.reset(row["number"])
        results = played(game, row["answer"])
        assert results[-1].done and not any(result.done for result in results[:-1])
        numbers = [int(number) for number in re.findall(r"\d+", row["answer"])]
        assert len(set(numbers)) == len(numbers), "a number that was excluded is not guessed again"
        first[numbers[0]] += 1
        solved += results[-1].reward > 0
    assert len(first) == 64 and max(first.values()) < 70 and 0.6 < solved / 2000 < 0.69
    with pytest.raises(UserError, match="only 64 numbers"):
        source("guess", eval_size=65)


def test_walks_are_legal_and_random():
    data = source("maze_steps", train_size=300, eval_size=40)
    reached = 0
    for row in data.train:
        walk = maze_environment.MazeSteps()
        first = walk.reset(row["hidden"])
        view, _, rest = row["answer"].partition(" ")
        assert f" {view}" == first
        results = played(walk, rest)
        assert results[-1].done and results[-1].info["blocked"] == 0
        reached += results[-1].reward
    assert 0 < reached / 300 < 0.2
    assert not {row["hidden"] for row in data.train} & {row["hidden"] for row in data.eval}
    shared = shared_prompts(data.train, data.eval)
    assert shared is not None and shared.both == 0, "rows of one prompt and two grids are different rows"
    assert shared_prompts(data.eval, data.eval).both == 40


def test_no_question_of_calculator_is_held_out_and_trained():
    data = source("calculator", train_size=4000, eval_size=256)
    assert not {row["prompt"][0]["content"] for row in data.train} & {row["prompt"][0]["content"] for row in data.eval}
    assert all(len(row["prompt"]) == 1 for row in data.eval)
    kinds = collections.Counter()
    for row in data.train:
        left, right = map(int, re.fullmatch(r"What is (\d{3}) \* (\d{3})\?", row["prompt"][0]["content"]).groups())
        assert row["gold"] == str(left * right)
        if len(row["prompt"]) > 1:
            (call,) = tool_calls(row["prompt"][1]["content"])
            assert (
                row["prompt"][2]
                == {"role": "tool", "content": row["gold"]}
                == {"role": "tool", "content": tool(**call.arguments)}
            )
            kinds["continued"] += 1
        if calls := tool_calls(row["answer"]):
            assert tool(**calls[0].arguments) == row["gold"] and len(row["prompt"]) == 1
            kinds["calls"] += 1
        else:
            assert row["answer"] == f"#### {row['gold']}"
    assert 1230 < kinds["continued"] < 1440 and 380 < kinds["calls"] < 510
    with pytest.raises(UserError, match="more than half of the 810000 possible questions"):
        source("calculator", eval_size=500_000)


def test_the_chat_template_of_calculator_writes_tools_and_results():
    tokenizer = calculator.tokenizer()
    question = [{"role": "user", "content": "What is 123 * 456?"}]
    schema = {"function": {"name": "calculator", "parameters": {"properties": {"expression": {}}}}}
    text = "<|im_start|>user\nWhat is 123 * 456?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render(question) == text
    with_tool = tokenizer.render(question, tools=[schema])
    assert with_tool == f"<|im_start|>system\n# Tools\ncalculator(expression)\n<|im_end|>\n{text}"
    assert tokenizer.decode(tokenizer.encode("####### 12/3.5 e"), skip_special_tokens=False) == "####### 12/3.5 e"
    digits = tokenizer.encode("56088")
    assert len(digits) == 5 and digits[3] == digits[4]


@pytest.mark.parametrize("name", NAMES)
def test_saved_tokenizer_matches_transformers(name, tmp_path):
    from transformers import AutoTokenizer

    row = source(name, train_size=5, eval_size=2).train[0]
    ours = source(name, train_size=5, eval_size=2).tokenizer
    ours.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(row["answer"])["input_ids"] == ours.encode(row["answer"])
    assert theirs.eos_token_id == ours.eos_id
