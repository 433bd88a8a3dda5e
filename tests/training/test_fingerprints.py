"""Tests the fingerprints of reward code and rows: which edits change them, and what a resumed run does then."""

import functools
import subprocess
import sys

import grain.python as grain
import numpy as np
import pytest

from tests.rewards import misbehaving
from tests.training.small_learner import (
    ROWS,
    TOKENIZER,
    assert_same,
    long_or_short,
    make,
    make_model,
    params_of,
    varied,
)
from tunix_like import RLTrainingConfig, RolloutConfig, SFTConfig, SFTTrainer, UserError
from tunix_like.rewards import pooled, resolve, verl_compatible
from tunix_like.session import fingerprints
from tunix_like.session.fingerprints import of_code, of_rows

HELPERS = """
import re

SHARE = 0.5

def parse(text):
    return text.strip()
"""
REWARDS = '''
import re
from helpers import parse
import helpers

LIMIT = 3
PATTERN = re.compile("a+")
UNUSED = 1
seen = []

def inner(text):
    """Returns a number."""
    return len(text) + 1

class Judge:
    bonus = 2

    def value(self, text):
        return self.bonus + len(text)

def reward(prompts, completions, **columns):
    seen.append(len(completions))
    judge = Judge()
    return [inner(parse(c)) + LIMIT + judge.value(c) + helpers.SHARE for c in completions if PATTERN]

def unused():
    return 1
'''


def written(folder, edit=("", ""), file="rewards.py"):
    """Returns the fingerprint of `reward` in a new process, from files in which one text was replaced."""
    folder.mkdir(exist_ok=True)
    for name, text in (("helpers.py", HELPERS), ("rewards.py", REWARDS)):
        assert name != file or edit[0] in text
        (folder / name).write_text(text.replace(*edit) if name == file and edit[0] else text)
    code = (
        "from tunix_like.rewards import resolve; from tunix_like.session.fingerprints import of_code; "
        "print(of_code(resolve('rewards.py:reward')))"
    )
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True).stdout


EDITS = {
    "the function": (True, ("+ LIMIT", "- LIMIT"), "rewards.py"),
    "a function it calls": (True, ("+ 1", "+ 2"), "rewards.py"),
    "a constant": (True, ("LIMIT = 3", "LIMIT = 4"), "rewards.py"),
    "a pattern": (True, ('"a+"', '"b+"'), "rewards.py"),
    "a method of a class": (True, ("self.bonus + len", "self.bonus * len"), "rewards.py"),
    "a constant of a class": (True, ("bonus = 2", "bonus = 3"), "rewards.py"),
    "an imported function": (True, ("text.strip()", "text.lower()"), "helpers.py"),
    "a constant of an imported module": (True, ("SHARE = 0.5", "SHARE = 0.25"), "helpers.py"),
    "another function": (False, ("return 1\n", "return 2\n"), "rewards.py"),
    "a constant that is not used": (False, ("UNUSED = 1", "UNUSED = 2"), "rewards.py"),
    "the place in the file": (False, ("UNUSED = 1", "\n\nUNUSED = 1"), "rewards.py"),
}


@pytest.mark.slow
def test_an_edit_changes_the_fingerprint_if_the_reward_depends_on_it(tmp_path):
    before = written(tmp_path / "before")
    assert before.strip() not in ("", "None") and before == written(tmp_path / "moved")
    found = {name: written(tmp_path / name, *edit) != before for name, (_, *edit) in EDITS.items()}
    assert found == {name: changes for name, (changes, *_) in EDITS.items()}


def scaled(scale, completions):
    return [scale * len(each) for each in completions]


def test_lambdas_partials_closures_objects_and_wrapped_functions():
    one, two = (lambda completions, **_: [1.0] * len(completions)), (lambda completions, **_: [2.0] * len(completions))
    same = lambda completions, **_: [1.0] * len(completions)  # noqa: E731
    assert of_code(one) != of_code(two) and of_code(one) == of_code(same)
    partials = [of_code(functools.partial(scaled, scale)) for scale in (1, 2, 1)]
    assert partials[0] == partials[2] != partials[1]

    def closure(bound, state):
        def reward(completions):
            state.append(1)
            return [bound for _ in completions]

        return reward

    state = []
    closures = [of_code(closure(bound, state)) for bound in (1, 2, 1)]
    assert closures[0] == closures[2] != closures[1]
    state.append(1)
    assert of_code(closure(1, state)) == closures[0], "the state of a reward is not its code"
    assert of_code(verl_compatible(varied)) != of_code(verl_compatible(long_or_short))
    assert of_code(functools.cache(varied)) == of_code(varied) is not None
    moved = pooled([misbehaving.later, misbehaving.ragged], workers=1)
    assert of_code(moved["later"]) == of_code(misbehaving.later) != of_code(moved["ragged"])


CALLS = 0
SCALE = 2


def counted():
    global CALLS
    CALLS += 1


def test_a_counter_of_calls_is_not_code(monkeypatch):
    """Neither a global variable that a function assigns, which another one reads, nor a variable of a closure."""

    def counting():
        calls = 0

        def reward(completions):
            nonlocal calls
            calls += 1
            return [1.0] * len(completions)

        return reward

    def reward(completions):
        counted()
        return [CALLS * SCALE] * len(completions)

    closure = counting()
    before = of_code(reward), of_code(closure)
    reward([""])
    closure([""])
    assert CALLS == 1 and (of_code(reward), of_code(closure)) == before
    monkeypatch.setitem(globals(), "SCALE", 3)
    assert of_code(reward) != before[0]


def test_code_of_this_package_and_code_without_source_have_no_fingerprint():
    assert of_code(resolve("gsm8k")) is None
    made = {}
    exec("def reward(completions):\n    return [1.0 for _ in completions]", made)
    assert of_code(made["reward"]) is None


ROW = {"prompt": [{"role": "user", "content": "é\ud800"}], "array": np.arange(3), "text": None, "bytes": b"\xff"}


def test_rows_differ_by_content_order_and_number_and_not_by_the_order_of_columns_or_the_container():
    rows = [ROW | {"number": i} for i in range(20)]
    other = [dict(reversed(row.items())) for row in rows]
    assert of_rows(rows) == of_rows(other) == of_rows(tuple(rows)) == of_rows(grain.MapDataset.source(rows))
    changed = [rows[:19], rows[::-1], [*rows[:19], ROW | {"number": 20}]]
    changed.append([*rows[:19], rows[19] | {"array": np.arange(1, 4)}])
    assert len({of_rows(rows), *map(of_rows, changed)}) == 5


def test_of_many_rows_a_bounded_number_is_read(monkeypatch):
    monkeypatch.setattr(fingerprints, "READ_ROWS", 10)

    class Counting(list):
        reads = 0

        def __getitem__(self, place):
            self.reads += 1
            return super().__getitem__(place)

    rows = Counting([{"prompt": str(i)} for i in range(95)])
    first = of_rows(rows)
    assert rows.reads == 10
    assert of_rows(rows[:94]) != first and of_rows([{"prompt": "x"}, *rows[1:]]) != first


def begin(folder, steps, reward=long_or_short, rows=ROWS, **settings):
    learner = make(reward={"r": reward}, output_dir=str(folder), max_steps=steps, **settings)
    learner.train(rows, batch_size=4)
    return learner


def warned(caplog):
    return [record.message for record in caplog.records if "changed since" in record.message]


OTHER_ROWS = [*ROWS[:-1], ROWS[-1] | {"answer": "x"}]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        pytest.param({"reward": varied}, "reward function 'r'", id="code"),
        pytest.param({"rows": OTHER_ROWS}, "training rows", id="rows", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_names_what_changed_or_refuses(change, named, tmp_path, caplog):
    folder = tmp_path / "run"
    begin(folder, 1)
    with pytest.raises(UserError, match=f"{named}.*changed_inputs"):
        begin(folder, 2, changed_inputs="error", **change)
    begin(folder, 2, **change)
    (message,) = warned(caplog)
    assert named in message and "changed_inputs" in message and ("rows" in message) == ("rows" in change)
    begin(folder, 3, changed_inputs="error", **change)
    assert len(warned(caplog)) == 1, "the newest checkpoint has the new fingerprints"


@pytest.mark.slow
def test_a_run_without_fingerprints_resumes_in_silence_and_exactly(tmp_path, caplog, monkeypatch):
    with monkeypatch.context() as patch:  # as checkpoints of earlier versions
        patch.setattr("tunix_like.training.trainer.fingerprints", lambda *_: {})
        begin(tmp_path / "old", 1)
    old = begin(tmp_path / "old", 2)
    assert not warned(caplog)
    assert_same(params_of(old.model), params_of(begin(tmp_path / "whole", 2).model))


def test_sft_compares_its_rows(tmp_path, caplog):
    def tune(steps, rows):
        SFTTrainer(
            model=make_model(),
            tokenizer=TOKENIZER,
            sft_config=SFTConfig(max_steps=steps, batch_size=4),
            rollout_config=RolloutConfig(max_prompt_length=8, max_tokens_to_generate=4),
            training_config=RLTrainingConfig(output_dir=str(tmp_path / "run")),
        ).train(rows)

    tune(1, ROWS)
    tune(2, ROWS)
    assert not warned(caplog)
    tune(3, OTHER_ROWS)
    assert "training rows" in warned(caplog)[0]
