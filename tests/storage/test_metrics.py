"""Tests the metrics file: accepted values, its state after a kill, and the rows that a resumption removes."""

from __future__ import annotations

import json
import os
import resource

import jax.numpy as jnp
import numpy as np
import pytest

from tunix_like.errors import UserError
from tunix_like.storage.metrics import MetricsLog, best_of, rows


def test_rows_are_read_as_plain_numbers(tmp_path):
    log = MetricsLog(tmp_path / "run")
    log.write({"step": 1, "a": np.float32(0.5), "b": jnp.float32(0.25), "c": jnp.bfloat16(2), "d": np.int64(3)})
    log.write(
        {"e": [np.float64(1.5), 2], "f": jnp.arange(2), "g": None, "h": "text", "i": True, "j": {"k": np.bool_(1)}}
    )
    assert rows(tmp_path / "run") == [
        {"step": 1, "a": 0.5, "b": 0.25, "c": 2.0, "d": 3},
        {"e": [1.5, 2], "f": [0, 1], "g": None, "h": "text", "i": True, "j": {"k": True}},
    ]


def test_non_finite_values_become_null(tmp_path):
    log = MetricsLog(tmp_path)
    log.write({"a": float("nan"), "b": np.float32("inf"), "c": jnp.array([1.0, -jnp.inf]), "d": np.float64("nan")})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"a": None, "b": None, "c": [1.0, None], "d": None}


def test_write_flushes_the_row_and_an_invalid_row_writes_nothing(tmp_path):
    log = MetricsLog(tmp_path)
    log.write({"step": 1})
    with pytest.raises(TypeError, match="a metric must be a number or text, not object"):
        log.write({"step": 2, "x": object()})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_cut_removes_only_later_rows(tmp_path):
    log = MetricsLog(tmp_path)
    for row in ({"sft/step": 9}, {"step": 0}, {"step": 1, "x": 0.1}, {"step": 3}, {"step": 2}, {"step": None}):
        log.write(row)
    assert log.cut("step", 2) == len(rows(tmp_path))
    assert rows(tmp_path) == [{"sft/step": 9}, {"step": 0}, {"step": 1, "x": 0.1}, {"step": 2}, {"step": None}]
    log.write({"step": 3})
    assert rows(tmp_path)[-1] == {"step": 3}
    log.cut("sft/step", 0)
    assert "sft/step" not in rows(tmp_path)[0]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


@pytest.mark.parametrize("torn", [b'{"step": 2, "x', b'{"step": 2, "x": "\xc3', b"3", b"", b'{"step": 2}'])
def test_incomplete_last_line_is_ignored_and_repaired(tmp_path, torn):
    log = MetricsLog(tmp_path)
    log.write({"step": 1})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    assert rows(tmp_path)[0] == {"step": 1}
    log.cut("step", 1)
    log.write({"step": 2})
    assert rows(tmp_path) == [{"step": 1}, {"step": 2}]


def test_kill_during_a_cut_keeps_the_old_file(tmp_path, monkeypatch):
    log = MetricsLog(tmp_path)
    for step in (1, 2):
        log.write({"step": step})
    monkeypatch.setattr(os, "replace", lambda *_: None)  # the rename does not happen
    log.cut("step", 1)
    assert rows(tmp_path) == [{"step": 1}, {"step": 2}]


def test_full_disk_during_a_cut_keeps_the_old_file_and_states_a_remedy(tmp_path):
    log = MetricsLog(tmp_path)
    for step in (1, 2):
        log.write({"step": step})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, before[1]))
    try:
        with pytest.raises(UserError, match=r"metrics\.jsonl cannot be cut .*Free disk space and start again"):
            log.cut("step", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert rows(tmp_path) == [{"step": 1}, {"step": 2}] and os.listdir(tmp_path) == ["metrics.jsonl"]


def test_rows_that_cannot_be_written_are_kept_in_memory(tmp_path, caplog):
    """A row is written completely or not at all. The part of a row that was written before the disk was full is
    removed."""
    log = MetricsLog(tmp_path)
    log.write({"step": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))  # the file has 12 bytes; the next row has more than 8
    try:
        log.write({"step": 2})
        log.write({"step": 3})
        assert rows(tmp_path) == [{"step": 1}] and (tmp_path / "metrics.jsonl").stat().st_size == 12
        log.close()
        assert "its last 2 rows could not be written" in caplog.text
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    log.write({"step": 4})
    assert rows(tmp_path) == [{"step": step} for step in (1, 2, 3, 4)]
    assert caplog.text.count("rows are kept until it can") == 1 and "the 2 rows that were kept" in caplog.text
    caplog.clear()
    log.close()
    assert not caplog.text


def test_error_names_an_invalid_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2"):
        rows(tmp_path)


def test_damaged_lines_do_not_stop_a_resumed_run(tmp_path, caplog):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1}\nnonsense \xff\n{"step": 2}\n{"step": "3"}\n{"step": 3}\n{"step": 4, "x')
    log = MetricsLog(tmp_path)
    assert log.cut("step", 2) == 2 and rows(tmp_path) == [{"step": 1}, {"step": 2}]
    assert (tmp_path / "metrics_damaged.txt").read_bytes() == b'nonsense \xff\n{"step": "3"}\n'
    assert "damaged lines (2, 4) are moved to" in caplog.text and "metrics_damaged.txt" in caplog.text
    caplog.clear()
    assert log.cut("step", 2) == 2 and not caplog.text


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = MetricsLog(None)
    log.write({"step": 1})
    log.cut("step", 0)
    assert os.listdir(tmp_path) == []
    assert rows(tmp_path) == []


LOST = {
    "cut": (lambda lines: lines[:3], "2 of the 5 steps before the checkpoint (step 4 to 5)"),
    "cut in a line": (lambda lines: [*lines[:3], lines[3][:5]], "2 of the 5 steps before the checkpoint (step 4 to 5)"),
    "emptied": (lambda lines: [], "5 of the 5 steps before the checkpoint (step 1 to 5)"),
    "deleted": (lambda lines: None, "5 of the 5 steps before the checkpoint (step 1 to 5)"),
    "a line removed": (lambda lines: lines[:1] + lines[2:], "1 of the 5 steps before the checkpoint (step 2 to 2)"),
    "of another phase": (lambda lines: ['{"sft/step": 1}'] * 9, "5 of the 5 steps before the checkpoint (step 1 to 5)"),
    "whole": (lambda lines: lines, ""),
}


@pytest.mark.parametrize("damage, message", LOST.values(), ids=LOST)
def test_a_resumed_run_says_which_rows_are_lost(tmp_path, damage, message, caplog):
    log = MetricsLog(tmp_path)
    for step in range(1, 8):
        log.write({"step": step})
    file = tmp_path / "metrics.jsonl"
    left = damage(file.read_text().splitlines(keepends=True))
    file.unlink()
    if left is not None:
        file.write_text("".join(left))
    MetricsLog(tmp_path).cut("step", 5)
    assert message in caplog.text and bool(message) == bool(caplog.text)


@pytest.mark.parametrize("step", ['"3"', "3.0", "-1", "true", "1e400", "NaN", "[1]", "{}", "1" * 400, "2147483648"])
@pytest.mark.parametrize("key", ["step", "sft/step"])
def test_a_step_that_is_no_number_is_named(tmp_path, key, step):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{{"{key}": {step}}}\n')
    for reads in (rows, lambda folder: best_of(folder, "x")):
        with pytest.raises(UserError, match=f"metrics.jsonl, line 2: {key} is "):
            reads(tmp_path)
