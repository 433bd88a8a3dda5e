"""`tunix-like check-rewards`: good functions and functions that are wrong in one way each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunix_like import cli

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
REWARDS = """
def good(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer)]

def never(completions):
    return [0.0] * len(completions)

def always(completions):
    return [1.0] * len(completions)

def not_empty(completions):
    return [float(c != "") for c in completions]

def unsure(completions, answer):
    return [None if c == a else 0.0 for c, a in zip(completions, answer)]

def broken(completions):
    return [1 / 0 for c in completions]
"""
SUSPICIOUS = {
    "never": ["gold answer: fails in 50 of 50 rows. The first, row 1: prompt "],
    "always": ["another row's answer: succeeds in 50 of 50", "no text: succeeds in 50 of 50", "prompt again: succeeds"],
    "not_empty": ["another row's answer: succeeds", "'I do not know.': succeeds in 50 of 50"],
    "unsure": ["gold answer: not scored in 50 of 50 rows"],
    "broken": ["gold answer: the function failed or was late in 50 of 50 rows", "ZeroDivisionError"],
}


def check(capsys, *overrides, workers=0):
    argv = [str(EXAMPLES / "debug" / "reverse_text.yaml"), "data.train_size=50", f"rewards.workers={workers}"]
    status = cli.main(["check-rewards", *argv, *overrides])
    return status, capsys.readouterr()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("functions", ["[{name: exact_match}]", "[{name: mine.py:good}]", "null"])
def test_nothing_to_say_of_a_good_one(functions, capsys):
    status, said = check(capsys, f"rewards.functions={functions}")
    assert status == 0 and "nothing suspicious" in said.out and "50 training rows" in said.out
    rows = {line.split("│")[1].strip(): line.split("│")[2:] for line in said.out.splitlines() if "│" in line}
    assert [cell.strip() for cell in rows["gold answer"][:3]] == ["1.000", "100.0%", "0.0%"]
    assert [cell.strip() for cell in rows["no text"][:3]] == ["0.000", "0.0%", "0.0%"]


@pytest.mark.parametrize("name", SUSPICIOUS)
def test_what_is_suspicious_is_said_with_its_first_case(name, capsys):
    status, said = check(capsys, f"rewards.functions=[{{name: mine.py:{name}}}]")
    assert status == 1 and "nothing suspicious" not in said.out
    assert [part for part in SUSPICIOUS[name] if part not in said.out] == []


def test_in_workers_and_with_several_functions(capsys):
    """A column for each function; the sum is what succeeds."""
    entries = "[{name: exact_match, weight: 0.5}, {name: mine.py:not_empty, weight: 0.5}]"
    status, said = check(capsys, f"rewards.functions={entries}", workers=1)
    assert status == 0 and "mine.py:not_empty" in said.out and "nothing suspicious" in said.out


def test_no_model_is_needed_and_bad_input_is_told(capsys):
    status, said = check(capsys, "model.path=nowhere", "model.config=null", "model.init=pretrained")
    assert status == 0, said.err
    status, said = check(capsys, "rewards.functions=[{name: mine.py:missing}]")
    assert status == 2 and "missing" in said.err


def test_mazes_are_solved_by_their_answers(capsys):
    assert cli.main(["check-rewards", str(EXAMPLES / "maze.yaml"), "data.train_size=300"]) == 0
    assert "256 training rows" in capsys.readouterr().out
