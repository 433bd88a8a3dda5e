"""Grading numbers: a table of how models write answers, and what each is worth, here and in a worker."""

import threading
import time

import numpy as np
import pytest

from tunix_like.errors import UserError
from tunix_like.rewards import REWARDS, close_pools, pooled, score
from tunix_like.rewards.math import final_answer, grade, gsm8k

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
    ("1234567", "#### 1{,}234{,}567"),
    ("1234567", "\\boxed{1,234,567}"),
    ("1000000", "\\boxed{10^6}"),
    ("72", "#### 72 clips"),
    ("72", "\\boxed{72\\text{ km}}"),
    ("72", "\\boxed{72\\,\\text{km/h}}"),
    ("2.5", "#### €2.50"),
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
    ("12.5", "#### 12.5%"),
    ("0.125", "\\boxed{12.5\\%}"),
    ("3/4", "#### 0.75"),
    ("3/4", "\\boxed{\\tfrac{6}{8}}"),
    ("1/3", "\\boxed{\\frac13}"),
    ("-1/2", "\\boxed{-\\frac{1}{2}}"),
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
    ("5", "Step 1: \\boxed{2}. Step 2: \\boxed{3}. In all \\boxed{5}"),
    ("5", "junk " * 2000 + "#### 5"),  # ten thousand characters of thought
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
    ("5", "The total is therefore five."),
    ("5", "junk \\boxed " * 1000),
    ("5", "\\frac{" * 2000),
    ("5", "\x00\ufffd\u202e" * 3000),
    ("5", "\\boxed{\x00}"),
    ("72", "#### 72 clips in April and 36 in May"),
    ("72", "#### 7.2"),
    ("1000", "#### 1,00"),
    ("50", "#### 500%"),
    ("1/3", "\\boxed{\\frac{3}{1}}"),
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


BOMBS = [
    "9^{9^9}",
    "((10!)!)!",
    "2^{2^{2^{2^{2^{2}}}}}",
    "\\sum_{n=1}^{10^{10}} \\frac{1}{n^n}",
    "\\frac{1}{" * 18 + "2" + "}" * 18,
    "\\frac{1}{1+" * 14 + "1" + "}" * 14,
    "\\begin{pmatrix}" + "x&y&z\\\\" * 20 + "\\end{pmatrix}^{-1}",
    "(a+b+c+d+e+f)^{40}",
]
"""Answers short enough to be read, and without end, or nearly, for who computes them."""


def test_what_blows_up_a_simplifier_is_wrong_or_unscored_in_bounded_time():
    """In workers, as a run asks by default: two steps of at most `SECONDS` each, so that none is a timeout of the pool;
    and the right answers beside them are right."""
    functions = pooled([gsm8k], workers=2, timeout_seconds=20)
    completions = [text for bomb in BOMBS for text in (f"\\boxed{{{bomb}}}", "#### 3/4")]
    gold = ["0.75"] * len(completions)
    start = time.perf_counter()
    scores = score([("gsm8k", functions["gsm8k"], 1.0)], gold, completions, {"gold": gold}, 2)
    assert time.perf_counter() - start < 60
    close_pools(functions.values())
    assert scores.total[1::2].tolist() == [1.0] * len(BOMBS)
    bombs = scores.total[::2]
    assert ((bombs == 0) | np.isnan(bombs)).all() and np.isnan(bombs[:3]).all()
    assert scores.first_failure is None


def test_the_corpus_in_a_worker():
    """Word for word what it is worth in this process."""
    functions = pooled([gsm8k], workers=1)
    gold, completions = zip(*RIGHT, *WRONG, strict=True)
    scores = score([("gsm8k", functions["gsm8k"], 1.0)], gold, completions, {"gold": gold}, 8)
    close_pools(functions.values())
    assert scores.total.tolist() == [1.0] * len(RIGHT) + [0.0] * len(WRONG)


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
