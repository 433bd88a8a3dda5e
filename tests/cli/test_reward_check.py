"""Tests `tunix-like check-rewards` with valid functions and with functions that have one error each."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tunix_like.cli import main as cli

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
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

def hostile(completions, answer):
    print("\\x1b[2J\\u202eone\\rtwo")
    return good(completions, answer)

def loud(completions, answer):
    print(f"called for {len(completions)}")
    return good(completions, answer)
"""
SUSPICIOUS = {
    "never": ["gold answer: fails in 50 of 50 rows. The first, row 1: prompt "],
    "always": ["another row's answer: succeeds in 50 of 50", "no text: succeeds in 50 of 50", "prompt again: succeeds"],
    "not_empty": ["another row's answer: succeeds", "'I do not know.': succeeds in 50 of 50"],
    "unsure": ["gold answer: not scored in 50 of 50 rows"],
    "broken": ["gold answer: error in 50 of 50 rows", "ZeroDivisionError"],
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
def test_valid_function_gives_no_warning(functions, capsys):
    status, said = check(capsys, f"rewards.functions={functions}")
    assert status == 0 and "nothing suspicious" in said.out and "50 training rows" in said.out
    rows = {line.split("│")[1].strip(): line.split("│")[2:] for line in said.out.splitlines() if "│" in line}
    assert [cell.strip() for cell in rows["gold answer"][:3]] == ["1.000", "100.0%", "0.0%"]
    assert [cell.strip() for cell in rows["no text"][:3]] == ["0.000", "0.0%", "0.0%"]


@pytest.mark.parametrize("name", SUSPICIOUS)
def test_suspicious_functions_give_a_warning_with_an_example(name, capsys):
    status, said = check(capsys, f"rewards.functions=[{{name: mine.py:{name}}}]")
    assert status == 1 and "nothing suspicious" not in said.out
    assert [part for part in SUSPICIOUS[name] if part not in said.out] == []


def test_without_a_gold_answer(tmp_path, capsys):
    """The output states that `answer` is missing, in all or in some rows, and that no completion succeeds."""
    for rows in (['{"question": "1"}', '{"question": "2"}'], ['{"question": "1", "answer": "1"}', '{"question": "2"}']):
        (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
        (tmp_path / "run.yaml").write_text(
            "data: {name: jsonl, path: rows.jsonl, prompt_template: '{question}'}\n"
            "rewards: {workers: 0, functions: [{name: mine.py:never}]}\n"
        )
        status, said = cli.main(["check-rewards", "run.yaml"]), capsys.readouterr()
        assert status == 0 and "nothing suspicious" not in said.out, said.err
        assert "no column `answer`" in said.out and "data.answer_template" in said.out
        assert "nothing succeeds: no completion above reaches rewards.success_threshold=1" in said.out


@pytest.mark.parametrize("column", ["messages", "answer"])
def test_gold_answers_of_messages(tmp_path, capsys, column):
    """The text is that of the last message."""
    (tmp_path / "mine.py").write_text(
        "def last(completions, answer):\n    "
        "return [float(c == a[-1]['content']) for c, a in zip(completions, answer)]\n"
    )
    rows = []
    for number in range(6):
        user, answer = {"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": f"is {number}"}
        rows.append({"messages": [user, answer]} if column == "messages" else {"prompt": [user], "answer": [answer]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.yaml").write_text(
        "data: {name: jsonl, path: rows.jsonl}\nrewards: {workers: 0, functions: [{name: mine.py:last}]}\n"
    )
    status, said = cli.main(["check-rewards", "run.yaml"]), capsys.readouterr()
    assert status == 0 and "nothing suspicious" in said.out, said
    assert re.search(r"gold answer +│ +1\.000 ", said.out)


@pytest.mark.parametrize(("name", "alarm"), [("low_or_right", False), ("always_but_empty", True)])
def test_rows_with_one_prompt(name, alarm, tmp_path, capsys):
    """The answer of another row is a guess, which some rows may accept. An alarm remains if all rows accept it."""
    (tmp_path / "mine.py").write_text(
        "def low_or_right(completions, answer):\n"
        "    return [float(c == a or (a in '123' and c.isdigit())) for c, a in zip(completions, answer)]\n\n"
        "def always_but_empty(completions):\n    return [float(c.isdigit()) for c in completions]\n"
    )
    rows = [f'{{"question": "Guess my number.", "answer": "{number}"}}' for number in range(1, 8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "run.yaml").write_text(
        "data: {name: jsonl, path: rows.jsonl, prompt_template: '{question}'}\n"
        f"rewards: {{workers: 0, functions: [{{name: mine.py:{name}}}]}}\n"
    )
    status, said = cli.main(["check-rewards", "run.yaml"]), capsys.readouterr()
    assert (status == 1) == ("another row's answer: succeeds in 7 of 7 rows" in said.out) == alarm, said
    other = next(line for line in said.out.splitlines() if "another row's answer" in line).split("│")
    assert float(other[2]) > 0.1, "the answer of another row succeeds in some rows"


def test_failures_are_reported_once(capsys):
    said = check(capsys, "rewards.functions=[{name: mine.py:broken}]")[1].out
    assert said.count("\nPrompt: ") == 1 and "nan" not in said


@pytest.mark.parametrize("workers", [0, 1])
def test_printed_lines_of_functions_are_shown(workers, capsys):
    """For 5 kinds of completions with 50 rows each, a worker calls the function once per row, and this process once per
    kind."""
    status, said = check(capsys, "rewards.functions=[{name: mine.py:loud}]", workers=workers)
    assert status == 0 and "called for" not in said.out
    shown = [line for line in said.err.splitlines() if "[reward worker" in line]  # a line that is split counts twice
    assert len(shown) == 20 if workers else said.err.count("called for") == 5
    assert ("more lines printed by the functions are not shown)" in said.err) == bool(workers)


def test_in_workers_and_with_several_functions(capsys):
    """There is a column for each function. The sum decides about success, and a nonsense completion with a reward of
    one function gives a warning."""
    entries = "[{name: exact_match, weight: 0.5}, {name: mine.py:not_empty, weight: 0.5}]"
    status, said = check(capsys, f"rewards.functions={entries}", workers=1)
    assert status == 0 and "mine.py:not_empty" in said.out and "nothing suspicious" not in said.out
    assert "'I do not know.': gets the full reward of mine.py:not_empty in 50 of 50 rows" in said.out
    assert "full reward of exact_match" not in said.out


def test_no_model_is_needed_and_invalid_input_raises_a_message(capsys):
    status, said = check(capsys, "model.path=nowhere", "model.config=null", "model.init=pretrained")
    assert status == 0, said.err
    status, said = check(capsys, "rewards.functions=[{name: mine.py:missing}]")
    assert status == 2 and "missing" in said.err


def test_gold_answers_of_the_maze_example_succeed(capsys):
    assert cli.main(["check-rewards", str(EXAMPLES / "maze.yaml"), "data.train_size=300"]) == 0
    assert "256 training rows" in capsys.readouterr().out


@pytest.mark.parametrize("workers", [0, 1])
def test_printed_control_characters_are_escaped(capsys, workers):
    status, said = check(capsys, "rewards.functions=[{name: mine.py:hostile}]", workers=workers)
    lines = said.err.splitlines()[:5]
    assert status == 0 and len(lines) == 5 and all(line.endswith("\\x1b[2J\\u202eone\\rtwo") for line in lines)
