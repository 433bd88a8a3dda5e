"""Tests the comparison of two evaluations: paired differences against resampling by hand, and errors for evaluations
that cannot be compared."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest

from tunix_like.cli import main as cli
from tunix_like.errors import UserError
from tunix_like.evaluation.compare import cells, check_same, differences
from tunix_like.evaluation.statistics import intervals


def rows(values, gold=None, prompt="p"):
    """Returns one row for each value of pass@1, with the gold answers, if given, as a column."""
    return [
        {"problem": i, "prompt": f"{prompt}{i}", "columns": {} if gold is None else {"gold": gold[i]},
         "values": {"pass@1": value}}
        for i, value in enumerate(values)
    ]  # fmt: skip


def write(file, rows):
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def test_differences_are_paired():
    """The interval is that of the differences. It is much narrower than that of either side if the same problems are
    hard."""
    rng = np.random.default_rng(5)
    a = rng.random(600)
    b = np.clip(a + 0.05 + 0.02 * rng.standard_normal(600), 0, 1)
    b[:2] = a[:2]
    (found,) = differences(rows([None, *a[1:]]), rows(b))
    change = np.where(np.arange(600) == 0, np.nan, b - a)
    assert (found.low, found.high) == pytest.approx(intervals({"x": change}, {"x": (-1.0, 1.0)})["x"])
    unpaired = intervals({"a": a, "b": b}, {"a": (0.0, 1.0), "b": (0.0, 1.0)})
    assert found.high - found.low < 0.03 < 0.045 < min(high - low for low, high in unpaired.values())
    assert (found.a, found.b) == pytest.approx((a[1:].mean(), b[1:].mean())), "only what both know"
    assert found.difference == pytest.approx(found.b - found.a)
    assert (found.won, found.lost) == ((b > a + 1e-9).sum(), (b < a - 1e-9).sum()) and found.won + found.lost == 598


def test_cells_and_metrics_of_only_one():
    a, b = rows([1.0, 0.0, 0.5, 0.5]), rows([1.0, 1.0, 1.0, 0.0])
    for row in a:
        row["values"]["avg@4"] = 0.5
    for row in b:
        row["values"]["avg@8"] = 0.5
    ((name, left, right, change, counts),) = cells(differences(a, b))
    assert (name, left, right, counts) == ("pass@1", "50.0%", "75.0%", "2 / 1")
    assert change.startswith("+25.0% [-")
    assert math.isnan(differences(a[:1], b[:1])[0].low), "one problem has no interval"


def test_interval_without_any_success_has_positive_width():
    """Without any success in A and B, the interval still covers the rates that the sample size allows. Rewards range up
    to the threshold."""
    a = rows([0.0] * 64)
    for row in a:
        row["values"]["avg@4"] = 0.0
    unseen = 1 - 0.025 ** (1 / 64)
    for threshold in (1.0, 10.0):
        rate, reward = differences(a, a, threshold)
        assert (rate.low, rate.high) == pytest.approx((-unseen, unseen), abs=0.002)
        assert (reward.low, reward.high) == pytest.approx((-threshold * unseen, threshold * unseen), rel=0.04)


def test_different_problems_raise_an_error():
    check_same(rows([1], ["7"], prompt="<user>"), rows([0], ["7"], prompt="<|im_start|>user"), ("a", "b"))
    for other, words in (
        (rows([0, 0], ["7", "9"]), "problem 1 is not the same in a and b: 'p1' and 'p1'"),
        (rows([0, 0], prompt="q"), "problem 0 is not the same"),
        (rows([0], ["7"]), "a has 2 problems, b 1"),
    ):
        with pytest.raises(UserError, match=words):
            check_same(rows([1, 1], ["7", "8"]), other, ("a", "b"))
    with pytest.raises(UserError, match="problem 0 is not the same"):
        check_same(rows([1]), rows([1], prompt="q"), ("a", "b"))
    skipped_second, skipped_third = (rows([0] * 4, gold="7777") for _ in range(2))
    del skipped_second[1], skipped_third[2]
    with pytest.raises(UserError, match="problem 1 is in b, but not in a: .*fit into rollout.max_prompt_length"):
        check_same(skipped_second, skipped_third, ("a", "b"))
    with pytest.raises(UserError, match="problem 1 is in b, but not in a"):
        check_same(
            *([row | {"columns": {"n": row["problem"]}} for row in side] for side in (skipped_second, skipped_third)),
            ("a", "b"),
        )


def test_compare_prints_paired_differences_of_two_files(tmp_path, capsys):
    one = write(tmp_path / "a.jsonl", rows([1.0, 0.0, None], prompt="line\u2028separator"))
    two = write(tmp_path / "b.jsonl", rows([1.0, 1.0, 1.0], prompt="line\u2028separator"))
    assert cli.main(["eval", "--compare", one, two]) == 0
    said = capsys.readouterr().out
    assert f"A: {one}\nB: {two}\n3 problems, paired" in said
    assert all(cell in said for cell in ("50.0%", "100.0%", "1 / 0"))
    assert re.search(r"\+50\.0% \[-\d\d\.\d, 98\.[678]\]", said), "the 97.5 % quantile of Beta(2, 1) is 98.7 %"


def test_different_settings_are_printed(tmp_path, capsys):
    """Prints only the settings that differ, and nothing if a summary is missing or invalid."""
    greedy, sampled = ({"samples": 1, "temperature": 0.0, "top_p": 1.0}, {"samples": 8, "temperature": 1, "top_p": 1})
    files = [write(tmp_path / name, rows([1.0, 0.0])) for name in ("a.jsonl", "b.jsonl")]
    line = "A: 1 sample, temperature 0; B: 8 samples, temperature 1\n"
    for summaries, told in (((greedy, sampled), True), ((greedy, greedy), False), ((greedy, [1]), False)):
        for name, summary in zip("ab", summaries, strict=True):
            (tmp_path / f"{name}.summary.json").write_text(json.dumps(summary))
        assert cli.main(["eval", "--compare", *files]) == 0
        said = capsys.readouterr().out
        assert (line in said) == told and (f"A: {files[0]}\nB: {files[1]}\n2 problems" in said) == (not told)
    (tmp_path / "b.summary.json").unlink()
    assert cli.main(["eval", "--compare", *files]) == 0 and "sample" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--compare", "a.jsonl", "nothing.jsonl"), ["nothing.jsonl: cannot be read", "eval --out"]),
        (("--compare", "a.jsonl", "torn.jsonl"), ["torn.jsonl:2: not valid JSON"]),
        (
            ("--compare", "a.jsonl", "other.jsonl"),
            ["other.jsonl:1: not a problem of an evaluation, 'problem' is missing"],
        ),
        (("--compare", "a.jsonl", "text.jsonl"), ["text.jsonl:1: values['pass@1'] is not a number, got 'x'"]),
        (("--compare", "a.jsonl", "empty.jsonl"), ["empty.jsonl is empty"]),
        (("--compare", "a.jsonl", "b.jsonl"), ["problem 0 is not the same in a.jsonl and b.jsonl"]),
        (("--compare", "a.jsonl", "avg.jsonl"), ["have no metric in common"]),
        (("--compare", "a.jsonl", "a.jsonl", "eval.samples=4"), ["eval.samples=4 has no effect on files"]),
        (("a.jsonl", "--compare", "a.jsonl", "a.jsonl"), ["leave a.jsonl out"]),
        (("--compare", "a.jsonl", "a.jsonl", "--out", "c.jsonl"), ["leave --out c.jsonl out", "with --out"]),
        ((), ["give a run or a model, or two of them"]),
    ],
)
def test_bad_input(tmp_path, monkeypatch, capsys, argv, words):
    monkeypatch.chdir(tmp_path)
    first = rows([1.0])
    write(tmp_path / "a.jsonl", first)
    write(tmp_path / "b.jsonl", rows([1.0], prompt="q"))
    write(tmp_path / "avg.jsonl", [first[0] | {"values": {"avg@4": 1.0}}])
    write(tmp_path / "text.jsonl", [first[0] | {"values": {"pass@1": "x"}}])
    write(tmp_path / "other.jsonl", [{"prompt": "p", "completion": "c"}])
    (tmp_path / "torn.jsonl").write_text(json.dumps(first[0]) + '\n{"problem": 1')
    (tmp_path / "empty.jsonl").write_text("")
    assert cli.main(["eval", *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and all(word in error for word in words), error
