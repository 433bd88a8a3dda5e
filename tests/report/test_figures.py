"""Tests the figures for papers: which files are written, and that they show the metrics of the runs."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.report.runs import write_run
from tunix_like.cli.main import main
from tunix_like.report import figures
from tunix_like.report.contents import curves
from tunix_like.report.reading import read_runs


@pytest.mark.slow
def test_every_curve_of_the_page_is_written_as_a_file(tmp_path):
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b", steps=9)
    assert main(["report", str(first), str(second), "--png", str(tmp_path / "out")]) == 0
    files = {path.stem for path in (tmp_path / "out").iterdir()}
    further = {"pass_rates", "advantage_by_pass_rate_over_training", "advantage_by_pass_rate", "time"}
    assert files == {figures.slug(curve.title) for curve in curves(read_runs([first, second]))} | further
    assert {"reward", "pass_at_4_held_out", "gradient_norm", "sft_loss"} <= files
    assert all(path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for path in (tmp_path / "out").iterdir())


def test_lines_show_the_metrics(tmp_path, monkeypatch):
    runs = read_runs([write_run(tmp_path / "a"), write_run(tmp_path / "b", steps=9)])
    drawn = {}
    monkeypatch.setattr(Figure, "savefig", lambda self, file, **_: drawn.update({file.stem: self.axes}))
    figures.save_figures(runs, tmp_path)
    (axes,) = drawn["reward"]
    raw = [line for line in axes.get_lines() if line.get_alpha() is not None]
    np.testing.assert_allclose(raw[1].get_ydata()[1:], np.arange(1, 10) / 9)
    (axes,) = drawn["pass_at_4_held_out"]
    assert [line.get_xydata().tolist() for line in axes.get_lines()] == [[[0, 50], [6, 75]], [[0, 50], [9, 75]]]


def test_smoothing_is_the_weighted_mean_of_the_values_so_far():
    values = np.array([np.nan, 2.0, 5.0, np.nan, -1.0])
    weights = 0.6 ** np.arange(3)
    expected = [np.nan, 2.0, np.average([5, 2], weights=weights[:2]), np.nan, np.average([-1, 5, 2], weights=weights)]
    np.testing.assert_allclose(figures.smoothed(values, 0.6), expected)


@pytest.mark.parametrize("count", [1, 4, 100])
def test_windows_contain_all_rows(tmp_path, count):
    (run,) = read_runs([write_run(tmp_path, steps=10)])
    ends, sums = figures.windows(run.rl, "advantage", count)
    rows = np.array([row for row in run.rl.histograms["advantage"] if row is not None])
    assert len(ends) == min(count, 10) and ends[-1] == 10
    np.testing.assert_allclose(sums.sum(axis=0), rows.sum(axis=0))
    np.testing.assert_allclose(sums[-1], rows[-(10 - int(ends[-2])) :].sum(axis=0) if count > 1 else rows.sum(axis=0))
