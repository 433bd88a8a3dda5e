"""Grading numbers: a table of how models write answers, and what each is worth."""

import threading
import time

import pytest

from tunix_like.errors import UserError
from tunix_like.rewards import REWARDS
from tunix_like.rewards.math import final_answer, grade

RIGHT = [
    # separators, signs, currency, units
    ("1000", "#### 1000"),
    ("1000", "so we get\n#### 1,000\n"),
    ("1,000", "#### 1000.0"),
    ("1000", "#### $1,000"),
    ("1000", "#### \\$1,000.00"),
    ("1000", "#### 1000 dollars"),
    ("1000", "#### $1{,}000 per year."),
    ("1000", "#### 1e3"),
    ("1000", "#### **1000**"),
    ("1000", "#### 1000."),
    ("1000", "####1000"),
    ("5", "#### $5/hour"),
    ("5", "#### = 5"),
    ("5", "#### 5<|im_end|>"),
    ("5", "#### 5 (five) apples"),
    ("-7", "#### \u22127"),
    ("-7", "#### - 7"),
    ("0.5", "#### .5"),
    ("1234567.5", "#### 1,234,567.50"),
    # percentages and fractions
    ("50", "#### 50%"),
    ("0.5", "#### 50 %"),
    ("50%", "#### 0.5"),
    ("50", "\\boxed{50\\%}"),
    ("50", "#### 50 percent"),
    ("3/4", "#### 0.75"),
    ("0.75", "#### 3/4"),
    ("1.5", "#### 1 1/2 cups"),
    ("2", "#### 6/3"),
    # boxes and tags
    ("5", "The answer is \\boxed{5}."),
    ("5", "$\\boxed {5}$"),
    ("1000", "\\boxed{\\$1{,}000\\text{ dollars}}"),
    ("5", "<answer>5</answer>"),
    ("5", "<answer>\n5 apples\n</answer>"),
    ("5", "<answer>\\boxed{5}</answer>"),
    ("5", "<answer>#### 5</answer>"),
    ("5", "#### \\boxed{5}"),
    # several answers: the last counts
    ("5", "#### 4\nno, #### 5"),
    ("5", "#### 4 \\boxed{5}"),
    ("5", "\\boxed{4} <answer>5</answer>"),
    ("5", "\\boxed{5} and then \\boxed{6"),  # the last is cut off
    ("5", "#### 5\n####\n"),  # the last is empty
    # what only a parser settles
    ("1/2", "\\boxed{\\frac{1}{2}}"),
    ("0.75", "\\boxed{\\dfrac{3}{4}}"),
    ("7/2", "\\boxed{3\\frac{1}{2}}"),
    ("6", "\\boxed{2 \\times 3}"),
    ("5", "#### x = 5"),
    ("4", "\\boxed{\\sqrt{16}}"),
    ("x^2", "\\boxed{x \\cdot x}"),
]
WRONG = [
    ("5", ""),
    ("5", "5"),
    ("5", "The answer is 5"),
    ("5", "#### 6"),
    ("5", "#### -5"),
    ("5", "#### 5\n#### 6"),
    ("5", "####"),
    ("5", "#### five"),
    ("5", "#### 3 or 5"),
    ("5", "#### 5, 6"),
    ("5", "#### 5 apples and 4 oranges"),
    ("5", "#### 5/0"),
    ("5", "#### 55"),
    ("5", "\\boxed{}"),
    ("5", "\\boxed{5"),
    ("5", "<answer>5"),
    ("5", "</answer>5<answer>"),
    ("5", "\\boxed{((((}"),
    ("5", "\\boxed{\\frac{5}{}}"),
    ("1000", "#### 1.000"),
    ("0.3333", "#### 1/3"),
    ("5", "#### " + "5" * 100_000),
    ("5", "#### 1e999999999"),
    ("5", "#### " + "(" * 5000),
    ("5", "\\boxed{" * 20_000),
    ("5", "<answer>" * 20_000),
    ("5", "#" * 100_000),
]


@pytest.mark.parametrize("gold, completion", RIGHT, ids=lambda text: text[:40])
def test_right(gold, completion):
    assert grade(completion, gold) == 1.0


@pytest.mark.parametrize("gold, completion", WRONG, ids=lambda text: text[:40])
def test_wrong_and_quickly(gold, completion):
    start = time.perf_counter()
    assert grade(completion, gold) == 0.0
    assert time.perf_counter() - start < 5


def test_the_parser_runs_out_of_time_as_unscored(monkeypatch):
    monkeypatch.setattr("tunix_like.rewards.math.SECONDS", 1)
    start = time.perf_counter()
    assert grade("\\boxed{9^{9^9}}", "5") is None
    assert time.perf_counter() - start < 5


def test_outside_the_main_thread_only_plain_comparisons_are_settled():
    got = []
    thread = threading.Thread(
        target=lambda: got.extend(grade(text, "0.5") for text in ("#### 1/2", "#### 2", "\\boxed{\\frac{1}{2}}"))
    )
    thread.start()
    thread.join()
    assert got == [1.0, 0.0, None]


def test_nested_braces():
    assert final_answer("\\boxed{\\frac{1}{\\frac{2}{3}}} trailing }") == "\\frac{1}{\\frac{2}{3}}"
    assert final_answer("\\boxed{a \\{ b}") == "a \\{ b"
    assert final_answer("none") is None


def test_as_a_reward_function():
    reward = REWARDS["gsm8k"]
    assert reward(["p", "p"], ["#### 8", "#### 9"], gold=["8", "8"], question=["q", "q"]) == [1.0, 0.0]
    assert reward(["p"], ["#### 8"], gold=[8]) == [1.0]
    with pytest.raises(UserError, match="column 'gold' is empty"):
        reward(["p"], ["#### 8"], gold=[" "])
