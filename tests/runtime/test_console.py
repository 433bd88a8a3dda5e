"""Tests the output of a run, on a terminal and in a log file."""

from __future__ import annotations

import io
import logging
import math
import sys

import pytest
import rich.console

from tunix_like.cli import main as cli
from tunix_like.runtime import console

ROW = {
    "step": 7,
    "train/rewards/mean": 0.3125,
    "train/pass@1": 0.25,
    "train/completions/mean_length": 17.33,
    "train/completions/clipped_ratio": 0.02,
    "train/loss": -0.00123,
    "train/perf/generation_tokens_per_sec": 12345.6,
    "train/step_time_sec": 2.0,
    "train/time/update": 0.5,
    "train/time/rollout": 1.5,
    "train/time/data": 0.001,
    "eval/pass@4": 0.7,
}


def test_step_is_one_line():
    assert console.step_line("train", 7, 100, ROW) == (
        "train   7/100  reward 0.312  pass@1 25.0%  length 17.3  clipped 2%  loss -0.00123  tok/s 12,346  "
        "2.00 s (rollout 75%, update 25%)  eval/pass@4 70.0%"
    )


def test_times_of_the_sampling_thread_have_no_share():
    row = {"train/step_time_sec": 2.0, "train/time/update": 1.5, "train/time/trainer_idle": 0.5, "train/staleness": 1.0}
    row |= {"train/sampler_time/rollout": 6.0, "train/sampler_time/idle": 148.0}
    assert console.step_line("train", 1, 2, row) == "train 1/2  2.00 s (update 75%, trainer_idle 25%)"


def test_turns_are_shown_after_the_length():
    row = {"train/completions/mean_length": 9.0, "train/turns/mean": 2.25}
    assert console.step_line("train", 1, 2, row) == "train 1/2  length 9.0  turns 2.2"


def test_line_of_an_evaluation_has_the_number_of_samples():
    for metrics, name in (
        ({"eval/pass@1": 0.5, "eval/avg@4": 0.4}, "train"),
        ({"sft/eval/pass@1": 0.5, "sft/eval/avg@1": 0}, "sft"),
    ):
        number = "4 samples" if name == "train" else "1 sample"
        assert console.step_line(name, 0, 9, metrics) == f"{name} 0/9  eval/pass@1 50.0%  ({number} each)"


def test_share_of_unscored_completions_is_shown_if_not_zero():
    known = {"train/rewards/mean": 0.5, "train/reward/timeout_frac": 0.0}
    assert console.step_line("train", 1, 9, known) == "train 1/9  reward 0.500"
    known |= {"train/reward/unscored_frac": 0.25, "train/reward/timeout_frac": 0.17, "train/reward/error_frac": 0.08}
    assert console.step_line("train", 1, 9, known) == "train 1/9  reward 0.500  unscored 25%  late 17%  failed 8%"


def test_absent_and_non_finite_metrics_are_omitted():
    assert console.step_line("sft", 3, None, {"sft/loss": 1.5, "rewards/mean": None, "eval/pass@1": float("nan")}) == (
        "sft 3  loss 1.5"
    )


def test_print_text_prints_the_text_unchanged(capsys):
    text = "[bold]x[/bold] :smile: [1, 2] " + "long " * 60
    console.print_text(text)
    assert capsys.readouterr().out == text + "\n"


def test_table_holds_every_cell_and_takes_no_markup(capsys):
    console.table("Result :x:", ("what :x:", "n"), [("a [b] :x:", 1.5), ("c" * 90, "-20%")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "Result :x:" and "what :x:" in lines[2]
    assert any("a [b] :x:" in line and "│  1.5 │" in line for line in lines)
    assert any("c" * 90 in line and "│ -20% │" in line for line in lines)


def test_excerpt_escapes_control_characters():
    assert console.excerpt("a\x1b[2J\u202eb\r\n\tc\udc80é", 99) == "a\\x1b[2J\\u202eb\\r\n\\tc\\udc80é"
    assert console.excerpt("x" * 50 + "y" * 900 + "z" * 50, 100) == ("x" * 50 + " ... [900 characters] ... " + "z" * 50)


HOSTILE = "a\x1b]0;title\x07\x1b[2J\r\x9b\u202eb\u2066\u200f\u2028\x7fc\udc80"
SHOWN = "a\\x1b]0;title\\x07\\x1b[2J\\r\\x9b\\u202eb\\u2066\\u200f\\u2028\\x7fc\\udc80"


def test_output_escapes_control_characters(capsys, monkeypatch):
    """This covers a line, a table, a log record, the error that ends a command, and a completion on a terminal. A
    completion that is written to a file is unchanged."""
    console.print_text(f"{HOSTILE}\n\t\u3000\xa0\u00e9")
    console.table(f"t {HOSTILE}", (HOSTILE, "n"), [(HOSTILE, "1")])
    record = logging.LogRecord("tunix_like", logging.WARNING, "", 0, "%s", (HOSTILE,), None)
    console.LogHandler().emit(record)
    assert cli.main(["report", f"no/{HOSTILE}/folder"]) == 2
    said = capsys.readouterr()
    assert said.out.startswith(f"{SHOWN}\n") and said.out.count(SHOWN) == 4 and said.err.count(SHOWN) == 2
    assert all(c.isprintable() or c in "\n\t\u3000\xa0" for c in said.out + said.err)
    text = HOSTILE.replace("\udc80", "")
    for real, expected in ((True, SHOWN.replace("\\udc80", "")), (False, text)):
        file = io.StringIO()
        monkeypatch.setattr(file, "isatty", lambda real=real: real, raising=False)
        monkeypatch.setattr(sys, "stdout", file)
        console.print_completion(text)
        assert file.getvalue() == f"{expected}\n"


def test_excerpt_limits_the_number_of_lines():
    assert console.excerpt("\n" * 606, 600) == "\n" * 9 + " ... [588 characters] ... " + "\n" * 9
    lines = [f"line {i}" for i in range(30)]
    found = console.excerpt("\n".join(lines), 600).split("\n")
    assert found[:9] == lines[:9] and found[-9:] == lines[-9:] and len(found) == 19
    assert console.excerpt("\n".join(lines[:20]), 600).split("\n") == lines[:20]


def test_character_outside_the_output_encoding_is_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "latin-1"))
    assert cli.main(["init", "a\u0416\xe9"]) == 0
    console.table("t", ("n", "text"), [("1", "\u0416")])
    sys.stdout.flush()
    said = sys.stdout.buffer.getvalue().decode("latin-1")
    assert said.startswith("wrote a\\u0416\xe9.yaml") and "\\u2" not in said and "\\u0416" in said.splitlines()[-2]


@pytest.mark.parametrize("real", [False, True])
def test_file_is_not_a_terminal_despite_force_color(monkeypatch, real):
    monkeypatch.setenv("TERM", "xterm")
    file = io.StringIO()
    monkeypatch.setattr(file, "isatty", lambda: real, raising=False)
    monkeypatch.setattr(console, "_CONSOLE", rich.console.Console(file=file, force_terminal=True))
    assert console.has_bottom_line() == real


def test_columns_of_texts_are_not_aligned_as_numbers(capsys):
    console.table("t", ("n", "text"), [("1", "7"), ("2", "12345")], texts=("text",))
    assert any("│ 7     │" in line for line in capsys.readouterr().out.splitlines())


def test_numbers_with_intervals():
    metrics = {"eval/pass@1": 0.6123, "eval/avg@4": 1.25, "eval/maj@4": math.nan, "eval/mean_length": 17.04}
    metrics |= {"eval/low/pass@1": 0.587, "eval/high/pass@1": 0.636, "eval/low/avg@4": 1.0, "eval/high/avg@4": 1.5}
    metrics |= {"eval/low/maj@4": None, "eval/pass@1/low": 0.5, "eval/error_frac": 0.0, "train/loss": 1.0}
    metrics["eval/skipped_prompts"] = 12345
    assert console.evaluation_cells(metrics) == {
        "pass@1": "61.2% [58.7, 63.6]", "avg@4": "1.25 [1, 1.5]", "maj@4": "-", "mean_length": "17",
        "pass@1/low": "50.0%", "error_frac": "0.0%", "skipped_prompts": "12345",
    }  # fmt: skip
