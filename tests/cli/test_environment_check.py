"""Tests `tunix-like check-rewards` with valid environments, environments with one error each, and tools."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunix_like.cli import main as cli
from tunix_like.cli.check_rewards import arguments_of
from tunix_like.environments.tools import argument_problem, schema_of

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MINE = '''
import os
import random
import time


class Good:
    def reset(self, answer):
        self.answer = answer
        return "first look"

    def step(self, completion):
        return "\\x1b[2Jno, again", float(completion == self.answer), completion == self.answer


class Letters:
    """One letter of the answer a turn."""

    def reset(self, answer):
        self.left = answer.split()

    def step(self, completion):
        right = completion == self.left.pop(0)
        done = not right or not self.left
        return "go on", float(right and done), done


class Always(Good):
    def step(self, completion):
        return None, 1.0, True


class Never(Good):
    def step(self, completion):
        return None, 0.0, True


class Broken(Good):
    def step(self, completion):
        if len(completion) > 1000:
            os._exit(3)
        if not completion:
            time.sleep(60)
        return super().step(completion)


class Moody(Good):
    def reset(self, answer):
        self.answer = answer
        return str(random.random())


def add(a: int, b: int = 1) -> int:
    """Adds numbers.

    Args:
      a: the first.
      b: the second.
    """
    return a + b


def fails(text: str) -> str:
    """Fails.

    Args:
      text: anything.
    """
    raise ValueError("not " + text)


def exits(text: str) -> str:
    """Ends its process.

    Args:
      text: anything.
    """
    os._exit(4)


def right(completions, answer):
    return [float(c.endswith(a)) for c, a in zip(completions, answer)]
'''


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "rows.jsonl").write_text('{"question": "1", "answer": "a b c"}\n{"question": "2", "answer": "d e"}\n')
    monkeypatch.chdir(tmp_path)


def check(capsys, *overrides):
    data = ["data.name=jsonl", "data.path=rows.jsonl", 'data.prompt_template="{question}"', "data.eval_size=null"]
    few = ["data.train_size=null", "environment.max_turns=3", "data.text_length=null"]
    config = str(EXAMPLES / "debug" / "reverse_text.yaml")
    status = cli.main(["check-rewards", config, *data, *few, *overrides])
    return status, capsys.readouterr()


def rows_of(text):
    lines = [line for line in text.splitlines() if "│" in line]
    return {line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]] for line in lines}


def test_valid_environment_gives_no_warning(capsys):
    status, said = check(capsys, "environment.name=mine.py:Good")
    assert status == 0, said
    assert "nothing suspicious" in said.out and "2 training rows, one episode of up to 3 turns" in said.out
    rows = rows_of(said.out)
    assert rows["gold answer"][:5] == ["1.000", "100.0%", "1.0", "100%", "-"]
    assert rows["another row's answer"][:5] == ["0.000", "0.0%", "3.0", "0%", "-"]
    assert float(rows["no text"][5]) < 5 and r"\x1b[2Jno, again" in rows["no text"][6]
    assert "first observation of row 1: first look" in said.out and "\x1b" not in said.out


@pytest.mark.slow
def test_answer_with_one_word_per_turn(capsys):
    status, said = check(capsys, "environment.name=mine.py:Letters")
    rows = rows_of(said.out)
    assert status == 0 and rows["gold answer"][1] == "0.0%" and "nothing suspicious" in said.out
    assert rows["gold answer, a word a turn"][:4] == ["1.000", "100.0%", "2.5", "100%"]
    assert "reset gives no first observation" in said.out


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (
            "Always",
            [
                "no text: succeeds in 2 of 2 rows. The first, row 1: prompt '1', completion '', reward 1",
                "a broken tool call:",
            ],
        ),
        ("Moody", ["row 1: two episodes began with different observations"]),
    ],
)
def test_suspicious_environments_give_a_warning(name, parts, capsys):
    status, said = check(capsys, f"environment.name=mine.py:{name}")
    assert status == 1 and "nothing suspicious" not in said.out
    assert [part for part in parts if part not in said.out] == []


def test_right_guesses_of_a_hidden_number_are_no_alarm(capsys):
    """With this seed one of the eight hidden numbers is the first guess in the answer of another row."""
    status = cli.main(["check-rewards", str(EXAMPLES / "environments" / "guess.yaml"), "data.seed=3"])
    said = capsys.readouterr()
    assert status == 0 and "nothing suspicious" in said.out, said
    assert rows_of(said.out)["another row's answer"][1] == "12.5%"


def test_failing_gold_answers_are_reported_without_an_error(capsys):
    """A gold answer need not have the form of a turn."""
    status, said = check(capsys, "environment.name=mine.py:Never")
    assert status == 0 and "nothing succeeds: no completion above reaches rewards.success_threshold=1" in said.out
    assert (
        "gold answer: fails in 2 of 2 rows. The first, row 1: prompt '1', completion 'a b c'" in said.out
        and "nothing suspicious" not in said.out
    )


@pytest.mark.slow
def test_failures_by_cause(capsys):
    status, said = check(capsys, "environment.name=mine.py:Broken", "environment.timeout_seconds=1")
    rows = rows_of(said.out)
    assert status == 1 and rows["no text"][4] == "2 timeout" and rows["a very long text"][4] == "2 error"
    assert rows["gold answer"][4] == "-"
    assert "no text: timeout in 2 of 2 rows. The first, row 1: " in said.out and "status 3" in said.out


@pytest.mark.slow
def test_tools_are_called_once_and_their_schemas_shown(capsys):
    functions = "rewards.functions=[{name: mine.py:right}]"
    status, said = check(capsys, "environment.tools=[mine.py:add, mine.py:fails]", functions)
    assert status == 0, said
    assert '"description": "Adds numbers."' in said.out and "2 tools, each called once" in said.out
    rows = rows_of(said.out)
    assert rows["add"] == ['{"a": 1, "b": 1}', "2"] and rows["fails"][1] == "error: ValueError: not 1"
    assert "tool fails: its call returned an error" in said.out and rows["gold answer"][1] == "100.0%"
    assert "error: the tool call is not valid" in rows["a broken tool call"][6]


@pytest.mark.slow
def test_a_tool_that_ends_its_process(capsys):
    status, said = check(capsys, "environment.tools=[mine.py:exits]", "rewards.functions=[{name: mine.py:right}]")
    assert status == 1 and "tool exits: Environment 'tools': " in said.out


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("environment.name=mine.py:Nothing", "Nothing"),
        ("environment.name=guesss", "is unknown"),
        ("environment.tools=[]", "the list is empty"),
    ],
)
def test_bad_input_is_one_line(override, part, capsys):
    status, said = check(capsys, override)
    assert status == 2 and part in said.err and len(said.err.strip().splitlines()) == 1


def test_arguments_fit_the_schema():
    def tool(a: int, b: list[float], c: dict[str, str], d: str | None, e: bool, f: int | str, g: list):
        """Takes everything.

        Args:
          a: a
          b: b
          c: c
          d: d
          e: e
          f: f
          g: g
        """

    schema = schema_of(tool)
    assert argument_problem(schema, arguments_of(schema["function"])) is None


def test_reward_functions_of_turns_score_the_turns(capsys, monkeypatch, tmp_path):
    """Not the whole text as one turn. Potentials are no part of the reward."""
    functions = """
def marked(completions, conversation):
    assert len(conversation) % 2 == 1
    return [0.05 if "LEFT" in text else None for text in completions]


def far(completions, conversation):
    return [7.0] * len(completions)
"""
    (tmp_path / "turns.py").write_text(functions, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    entries = "rewards.functions=[{name: turns.py:marked, per: turn}, {name: turns.py:far, per: potential}]"
    config = str(EXAMPLES / "environments" / "credit.yaml")
    status = cli.main(["check-rewards", config, entries, "rewards.workers=0", "data.train_size=8", "data.eval_size=2"])
    said = capsys.readouterr()
    assert status == 0, said
    rows = rows_of(said.out)
    assert float(rows["no text"][0]) == 0 and 0.05 <= float(rows["gold answer, a word a turn"][0]) < 1
