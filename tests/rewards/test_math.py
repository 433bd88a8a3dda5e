"""Tests the grading of numbers: a table of answers in the notations of models with their rewards, in this process and
in a worker."""

import json
import random
import re
import threading
import time
import unicodedata
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from tunix_like.errors import UserError
from tunix_like.rewards import REWARDS, close_pools, pooled, score
from tunix_like.rewards.math import final_answer, grade, gsm8k, gsm8k_lenient
from tunix_like.tasks.numbers import parse_number

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
    # boxes and tags
    ("5", "The answer is \\boxed{5}."),
    ("5", "$\\boxed {5}$"),
    ("1000", "\\boxed{\\$1{,}000\\text{ dollars}}"),
    ("5", "<answer>5</answer>"),
    ("5", "<answer>\n5 apples\n</answer>"),
    ("5", "<answer>\\boxed{5}</answer>"),
    ("5", "<answer>#### 5</answer>"),
    ("5", "#### \\boxed{5}"),
    # several answers: the last one counts
    ("5", "#### 4\nno, #### 5"),
    ("5", "#### 4 \\boxed{5}"),
    ("5", "\\boxed{4} <answer>5</answer>"),
    ("5", "#### 5\n####\n"),  # the last one is empty
    ("5", "Step 1: \\boxed{2}. Step 2: \\boxed{3}. In all \\boxed{5}"),
    ("5", "junk " * 2000 + "#### 5"),  # ten thousand characters before the answer
    # LaTeX
    ("1/2", "\\boxed{\\frac{1}{2}}"),
    ("0.75", "\\boxed{\\dfrac{3}{4}}"),
    ("7/2", "\\boxed{3\\frac{1}{2}}"),
    ("5", "#### x = 5"),
    ("7/2", "\\boxed{3 \\frac 12}"),
    ("-0.5", "\\boxed{\\frac{-1}{2}}"),
    ("5600", "\\boxed{5\\,600}"),
    ("1234567", "\\boxed{1,\\!234,\\!567}"),
    ("18", "\\boxed{\\mathbf{18}}"),
    ("18", "\\boxed{\\left(18\\right)}"),
    ("18", "\\boxed{18^{\\circ}\\text{C}}"),
    ("18", "#### $18$ dollars"),
    ("18", "#### \\(18\\)"),
    ("72", "\\boxed{72\\text{ m}^2}"),
    ("1500", "\\boxed{1.5 \\times 10^{3}}"),
    # trailing zeros, signs, scientific notation, equations whose right side is a number
    ("18", "#### 18.00"),
    ("1234.5", "#### $1,234.50"),
    ("-18", "#### -$18"),
    ("-18", "#### $-18.0"),
    ("18", "#### +18"),
    ("0.0015", "#### 1.5e-3"),
    ("1500", "#### 1.5 x 10^3"),
    ("18", "#### 2*9 = 18"),
    ("3000", "#### $1,000 + $2,000 = $3,000"),
    ("18", "#### x ≈ 18"),
    # Unicode
    ("0.5", "#### ½"),
    ("2.5", "#### 2½"),
    ("2.5", "#### 2 ½ cups"),
    ("-1/3", "#### −⅓"),
    ("1/2", "#### 1⁄2"),
    ("1500", "#### 1.5×10³"),
    ("72", "#### 72 m²"),
    ("1234", "#### 1 234"),  # a no-break space groups digits
    ("1234567", "#### 1 234 567"),
    ("18", "#### １８"),
    ("18", "#### ١٨"),
    # formulas as gold answers, compared by math-verify
    ("x^2", "\\boxed{x \\cdot x}"),
    ("\\sqrt{8}", "\\boxed{2\\sqrt{2}}"),
    ("36/2", "#### 36/2"),
]
ARITHMETIC = [
    ("18", "2*9"),
    ("18", "9+9"),
    ("18", "20 - 2"),
    ("18", "36/2"),
    ("18", "18/1"),
    ("18", "\\frac{36}{2}"),
    ("18", "x = 2 \\times 9"),
    ("18", "\\sum_{i=1}^{18} 1"),
    ("18", "18 \\cdot 1"),
    ("4", "\\sqrt{16}"),
    ("25", "5²"),
    ("25", "5^2"),
    ("1000000", "10^6"),
    ("1/25", "5⁻²"),
    ("1.5", "\\frac{1}{2} + 1"),
]
"""Answers that equal the gold number only after arithmetic. Only the lenient reward accepts them."""

NEIGHBOURS = [
    ("11", "5 6"),
    ("56", "5 6"),
    ("30", "5 6"),
    ("235", "1 234"),
    ("1234", "1 234"),  # a plain space separates numbers
    ("56", "5\\,6"),
    ("56", "5\\!6"),
    ("11", "5\\ 6"),
    ("56", "5\\;6"),
    ("11", "5\n6"),
    ("11", "5 6/1"),
    ("11", "5\\frac{6}{1}"),
    ("1", "\\frac{1}{2}\\frac{1}{2}"),
    ("52", "5²"),
    ("29", "2**9"),
    ("182", "18₂"),
    ("51", "5①"),
    ("51", "5㏠"),  # a single character for "day 1"
    ("56", "5\\text{6}"),
    ("56", "5$6"),
    ("11", "5\\thinspace 6"),
    ("11", "{5}{6}"),
    ("56", "5'6"),
]
"""Adjacent numbers: neither reward joins, adds or multiplies them."""

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
    ("100000", "#### 1,00,000"),
    ("2.5", "#### 2,5"),
    ("1234.5", "#### 1.234,50"),
    ("5", "#### |5|"),
    ("5", "#### 5 ± 0"),
    ("5", "#### x != 5"),
    ("5", "#### about 5"),
    ("5", "#### x = 4 or x = 5"),
    ("5", "#### x = 4, y = 5"),
    ("0", "#### 5² - 25"),
    ("5", "\\boxed{9^{9^9}}"),
    *((gold, f"<answer>{text}</answer>") for gold, text in ARITHMETIC + NEIGHBOURS),
]


NEAR_MISSES = [
    # a letter, a function or a mark after the number
    *(("5", f"\\boxed{{{text}}}") for text in (
        "5x", "5i", "5!", "5!!", "5k", "5K", "5M", "5B", "5e", "5 x", "5 k", "5n + 0", "5\\pi", "5π", "5θ", "5a",
        "5xy", "5 xy",
        "5 abc", "5m", "5\\text{x}", "5\\,y", "5\\sqrt{x}", "5_x", "5 < x", "5 > y", "5|x", "5~n", "5'x", "5(x)",
        "5(x+1)", "5[k]",
        "5 \\mod p", "5%x", "5𝑥", "5ℵ", "5°x", "5^x", "5 & x", "5?", "5x apples", "5!\\text{ ways}", "5.x", "5:x",
        "5/x", "$5k$",
    )),
    *(("3", f"#### {text}") for text in ("n = 3k", "n = 3k, k an integer", "x = 3y", "3 mod m", "x ≡ 3k",
    "f(n) = 3n", "3+i")),
    # a word that changes the number
    *(("5", f"#### {text}") for text in (
        "5 thousand", "$5 million", "5 Billion", "5 dozen", "5 dozens of eggs", "5 hundred thousand", "5 hundredths",
        "5 gross",
        "5 and a half", "5 and a half hours", "5 hours and a half", "5 and three quarters", "5 halves",
        "5 thirds of x", "5 tenths",
        "5 plus x", "5 apples plus tax", "5 minus one", "5 times x", "5 over x", "5 more than x", "5 less than y",
        "5 squared",
        "5 cubed", "5 factorial", "5 mod seven", "5 theta", "5 pi", "5 or six", "5 or more", "5 to one", "5 (six)",
        "5 is wrong",
        "5 is not it", "5 isn't it", "5 hours and ten minutes", "5 choose two", "5 base six", "5 if x", "5 lakh",
        "5万", "5 百個",
        "5 Millionen", "5 тысяч", "5 per x", "5 for all x", "5 sin", "5 null",
    )),
    # an equation as the gold answer
    ("x^2+y^2=25", "\\boxed{a+b=25}"),
    ("x^2+y^2=25", "\\boxed{x^2-y^2=25}"),
    ("x^2+y^2=25", "#### 25"),
    ("x^2+y^2=25", "\\boxed{x+y=25}"),
    ("2x+3y=6", "\\boxed{2x-3y=6}"),
    ("x+y=0", "\\boxed{0}"),
    ("y=2x+1", "\\boxed{y=2x-1}"),
    ("n=3k", "\\boxed{n=3}"),
    ("n=3k", "\\boxed{n=2k}"),
    ("f(x)=5x", "\\boxed{f(x)=5}"),
    # formulas that rounding makes equal
    ("10^{-30}", "\\boxed{10^{-20}}"),
    ("10^{-30}", "\\boxed{0}"),
    ("x+10^{-20}", "\\boxed{x+10^{-30}}"),
    ("e^{-40}", "\\boxed{2e^{-40}}"),
    ("x=10^{-30}", "\\boxed{x=10^{-20}}"),
    ("\\frac{1}{10^{12}}", "\\boxed{\\frac{1}{10^{13}}}"),
    ("\\sqrt{2}", "\\boxed{1.414214}"),
    ("\\pi^{-50}", "\\boxed{\\pi^{-60}}"),
    # the last answer is cut
    ("5", "\\boxed{5} and then \\boxed{6"),
    ("5", "\\boxed{5} then \\boxed {"),
    ("5", "\\boxed{5} then \\boxed"),
    ("5", "#### 5 Mio"),
    ("5", "#### 5\u2062x"),
    ("5", "#### 5 apples × 2"),
    ("5", "#### 5 ᵏ"),
    ("5", "<answer>5</answer> no: <answer>6"),
    ("5", "#### 5\nor \\boxed{\\frac{1}{2}"),
    ("5", "\\boxed{5} <answer>"),
    ("5", "<answer>5</answer> \\boxed{" + "6" * 500 + "}"),
]  # fmt: skip
"""Answers that differ from the gold answer by what stands after the number, or by what a comparison could overlook."""


@pytest.mark.parametrize("gold, completion", NEAR_MISSES, ids=lambda text: text[:40])
def test_near_misses_get_no_reward(gold, completion):
    assert grade(completion, gold) == 0.0 == grade(completion, gold, lenient=True)


WITH_UNITS = [
    "5 m", "5 cm", "5cm", "5 kg", "5kg", "5km/h", "5 km / h", "5 m^2", "5\\text{ cm}^3", "5 ft", "5 mph", "5 L",
    "5 mL", "5 hrs",
    "5 min", "5 lbs", "5 USD", "5€", "5 €", "5°", "5°C", "5 degrees", "5th", "5 apples!", "5 apples.", "5 a day",
    "5 (apples)",
    "5 dollars per hour", "5 dollars/hour.", "5 more than Ann", "5 times a week", "5 of them",
    "5 hours in two weeks", "5 CDs",
    "5 students in class C", "5 people did not come", "5 square feet", "5 cubic meters", "5 (five)", "5个苹果", "5 元",
    "5 Äpfel",
    "5 рублей", "5</s>", "5<|eot_id|>", "5 🍎", "5 left", "5 total, as computed", "5 pairs of shoes, for two people",
    "5 for two days",
]  # fmt: skip


@pytest.mark.parametrize("text", WITH_UNITS)
def test_units_and_words_leave_the_number(text):
    assert grade(f"\\boxed{{{text}}}", "5") == 1.0 == grade(f"<answer>{text}</answer>", "5")


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("x^2+y^2=25", "y^2+x^2=25"), ("x^2+y^2=25", "x^2+y^2-25=0"), ("y=2x+1", "2x+1"), ("y=2x+1",
        "y=1+2x"), ("n=3k", "3k"),
        ("x=5", "5"), ("x=5", "x=5"), ("2*9=18", "18"), ("0.1x", "\\frac{x}{10}"), ("10^{-30}", "\\frac{1}{10^{30}}"),
        ("\\sqrt{2}+\\sqrt{3}", "\\sqrt{5+2\\sqrt{6}}"),
    ],
)  # fmt: skip
def test_equal_formulas_get_the_reward(gold, answer):
    assert grade(f"\\boxed{{{answer}}}", gold) == 1.0


GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"


@pytest.mark.slow
@pytest.mark.skipif(not GSM8K.is_dir(), reason="needs the files of GSM8K")
@pytest.mark.parametrize("split", ["train", "test"])
def test_the_solutions_of_gsm8k_get_the_reward(split):
    """Each solution answers its own question, and not a question with another answer."""
    rows = [json.loads(line)["answer"] for line in (GSM8K / f"{split}.jsonl").read_text().splitlines()]
    gold = [row.rpartition("#### ")[2] for row in rows]
    for row, right in zip(rows, gold, strict=True):
        assert grade(row, right) == 1.0, row
    wrong = [right for right in gold if parse_number(right).value != parse_number(gold[0]).value]
    assert {grade(rows[0], other) for other in wrong} == {0.0}


@pytest.mark.parametrize("gold, completion", RIGHT, ids=lambda text: text[:40])
def test_correct_answers_get_reward_1(gold, completion):
    assert grade(completion, gold) == 1.0


@pytest.mark.parametrize("gold, completion", WRONG, ids=lambda text: text[:40])
def test_incorrect_answers_get_reward_0_in_bounded_time(gold, completion):
    start = time.perf_counter()
    assert grade(completion, gold) == 0.0
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("gold, text", ARITHMETIC)
def test_only_the_lenient_reward_accepts_arithmetic(gold, text):
    rewards = [REWARDS[name](["p"], [f"<answer>{text}</answer>"], gold=[gold]) for name in ("gsm8k", "gsm8k_lenient")]
    assert rewards == [[0.0], [1.0]]


def test_lenient_reward_differs_only_for_arithmetic():
    done = [(gold, text, 1.0) for gold, text in RIGHT] + [
        (gold, f"<answer>{text}</answer>", 0.0) for gold, text in NEIGHBOURS
    ]
    assert [grade(text, gold, lenient=True) for gold, text, _ in done] == [right for *_, right in done]


SIX = dict.fromkeys(["=", "==", "===", "::=", "\u2248"], Fraction(6))
BETWEEN = SIX | {"e": Fraction(5 * 10**6), "E": Fraction(5 * 10**6), ".": Fraction("5.6"), "/": Fraction(5, 6)}
BETWEEN |= dict.fromkeys("\u2044\u2215", Fraction(5, 6))
"""The characters, other than digits, that make a number together with a 5 before and a 6 after them."""


@pytest.mark.slow
def test_characters_between_digits_do_not_join_them():
    """Tests the characters of the first Unicode plane between and after digits: ASCII, characters with a compatibility
    form, marks, numerals and spaces. The oracle is the table of numeric values of Unicode."""
    for character in map(chr, range(0x10000)):
        plain = character.isascii() or unicodedata.decomposition(character)
        if not plain and (character.isalpha() or unicodedata.category(character) in ("So", "Cn", "Co", "Cs")):
            continue
        between, behind = parse_number(f"5{character}6"), parse_number(f"5{character}")
        if character.isdecimal():
            digit = unicodedata.decimal(character)
            assert (between.value, behind.value) == (506 + 10 * digit, 50 + digit)
            continue
        folded = unicodedata.normalize("NFKC", character)
        assert (between and between.value) == BETWEEN.get(character, BETWEEN.get(folded)), ascii(character)
        vulgar = unicodedata.numeric(character, 0) if re.fullmatch(r"\d+\u2044\d+", folded) else 0
        assert behind is None or abs(float(behind.value) - 5 - vulgar) < 1e-9, ascii(character)
        if vulgar and character != "\u2189":  # 0/3 is not a valid fraction
            assert behind is not None


def test_all_notations_of_a_number_equal_its_decimal():
    """The oracle is `fractions` with format strings, which produce the notations. Each has reward 1 for its value and 0
    for other values."""
    draw = random.Random(0)
    for _ in range(30):
        cents = draw.randrange(-10_000_000, 10_000_000)
        value = Fraction(cents, 100)
        digits, sign = f"{abs(cents) / 100:,.2f}", "-" if cents < 0 else ""
        forms = [
            f"{sign}{digits}", f"{sign}${digits}", f"${sign}{digits}", f"{sign}{digits.replace(',', '')}00",
            f"{sign}{digits} dollars", f"\\text{{{sign}{digits}}}", f"{sign}{digits.replace(',', '{,}')}",
            f"{sign}{digits.replace(',', chr(0x202F))}", f"{cents / 100:.9e}", f"{cents}%",
        ]  # fmt: skip
        if value.denominator > 1:
            whole, rest = divmod(abs(value), 1)
            forms += [str(value), f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"]
            forms += [f"{sign}{whole} {rest}"] if whole else []
        for form in forms:
            text = f"#### {form}"
            assert grade(text, str(value)) == 1.0, form
            for wrong in {value + 1, -value, value * 10} - {value}:
                assert grade(text, str(wrong)) == 0.0, (form, wrong)


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
"""Short answers whose evaluation would take very long or never end."""


@pytest.mark.slow
def test_expensive_expressions_get_reward_0_in_bounded_time():
    """The functions run in workers, as in a run by default. Two evaluations of at most `SECONDS` each stay below the
    timeout of the pool. Correct answers of the same batch get their reward. With a formula as the gold answer such an
    answer is unscored."""
    functions = pooled([gsm8k_lenient], workers=2, timeout_seconds=20)
    completions = [text for bomb in BOMBS for text in (f"\\boxed{{{bomb}}}", "#### 3/4")]
    gold = ["0.75"] * len(completions)
    completions, gold = [*completions, completions[0], "#### 3"], [*gold, "\\frac{x}{4}", "\\sqrt{9}"]
    start = time.perf_counter()
    scores = score([("gsm8k", functions["gsm8k_lenient"], 1.0)], gold, completions, {"gold": gold}, 2)
    assert time.perf_counter() - start < 60
    close_pools(functions.values())
    assert scores.total[1::2].tolist() == [1.0] * (len(BOMBS) + 1)
    bombs = scores.total[::2]
    assert bombs[:-1].tolist() == [0.0] * len(BOMBS) and np.isnan(bombs[-1])
    assert scores.first_failure is None


def test_rewards_in_a_worker_equal_those_in_this_process():
    """The rewards equal those in this process."""
    functions = pooled([gsm8k], workers=1)
    gold, completions = zip(*RIGHT, *WRONG, strict=True)
    scores = score([("gsm8k", functions["gsm8k"], 1.0)], gold, completions, {"gold": gold}, 8)
    close_pools(functions.values())
    assert scores.total.tolist() == [1.0] * len(RIGHT) + [0.0] * len(WRONG)


def test_outside_the_main_thread_formulas_are_not_evaluated():
    got = []
    texts = ("#### 1/2", "#### 2", "\\boxed{\\frac{1}{2}}")

    def ask():
        got.extend(grade(text, "0.5") for text in texts)
        got.append(grade("\\boxed{x \\cdot x}", "x^2"))
        got.append(grade("\\boxed{\\sqrt{0.25}}", "0.5", lenient=True))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert got == [1.0, 0.0, 1.0, None, 0.0]


def test_nested_braces():
    assert final_answer("\\boxed{\\frac{1}{\\frac{2}{3}}} trailing }") == "\\frac{1}{\\frac{2}{3}}"
    assert final_answer("\\boxed{a \\{ b}") == "a \\{ b"
    assert final_answer("none") is None


def test_gsm8k_reward_function():
    reward = REWARDS["gsm8k"]
    assert reward(["p", "p"], ["#### 8", "#### 9"], gold=["8", "8"], question=["q", "q"]) == [1.0, 0.0]
    assert reward(["p"], ["#### 8"], gold=[8]) == [1.0]
    for missing in (" ", "", None, float("nan")):
        with pytest.raises(UserError, match="column 'gold' is empty"):
            reward(["p"], ["#### None"], gold=[missing])
