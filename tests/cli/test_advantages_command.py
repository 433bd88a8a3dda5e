"""Tests `tunix-like advantages`: the table, the lines below it, the figure, and errors."""

from __future__ import annotations

import ast
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tunix_like
from tunix_like.algorithms.objective import GroupEstimator
from tunix_like.cli import advantages as advantages_table
from tunix_like.cli import main as cli

PACKAGE = Path(tunix_like.__file__).parent
OWN = """
import jax.numpy as jnp


def twice(rewards, *, scored, lengths, factor=2.0, sign="plus"):
    out = factor * (rewards - rewards.mean(axis=1, keepdims=True))
    return jnp.where(scored, out if sign == "plus" else -out, 0.0)


def over_the_batch(rewards, *, scored, lengths):
    return rewards - rewards.mean()


def grouped(rewards, *, scored, lengths):
    return rewards.mean(axis=1)


def share(rewards, *, scored, lengths):
    return rewards / rewards.sum(axis=1, keepdims=True)


def broken(rewards, *, scored, lengths):
    raise KeyError("prices")
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    return path


@pytest.fixture
def command(capsys):
    """Runs the command. Returns its columns by header (several tables are joined) and the lines below them."""

    def run(*words):
        assert cli.main(["advantages", *words]) == 0
        out = capsys.readouterr().out
        columns: dict[str, list[str]] = {}
        names: list[str] = []
        for line in out.splitlines():
            cells = [cell.strip() for cell in re.split("[│┃]", line)[1:-1]]
            if line.startswith("┃"):
                names = cells
                columns |= {name: [] for name in names}
            for name, cell in zip(names, cells if line.startswith("│") else [], strict=False):
                columns[name].append(cell)
        return columns, out.rpartition("┘")[2].strip().splitlines()

    return run


def numbers(cells):
    return [float(cell) for cell in cells]


def test_values_computed_by_hand(command):
    columns, notes = command(
        "1,0,0,0", "k=2", "truncation_order=2", "ddof=0", "lengths=3,1,2,5", "alpha=0.5", "weights=3,-1"
    )
    third = 0.3333
    values = {  # four completions, their sum, their mean size
        "completion": None,
        "reward": [1, 0, 0, 0, 1, 0.25],
        "length": [3, 1, 2, 5, 11, 2.75],
        "grpo ddof=0": [1.732, -0.5773, -0.5773, -0.5773, 0, 0.866],
        "drgrpo": [0.75, -0.25, -0.25, -0.25, 0, 0.375],
        "rloo": [1, -third, -third, -third, 0, 0.5],
        "maxrl": [3, -1, -1, -1, 0, 1.5],
        "maxrl truncation_order=2": [2, -0.6667, -0.6667, -0.6667, 0, 1],
        "maxpo k=2": [2, -0.6667, -0.6667, -0.6667, 0, 1],
        "pkpo k=2": [2, 0, 0, 0, 2, 0.5],
        "passk k=2": [1, -third, -third, -third, 0, 0.5],
        "maxk_mix alpha=0.5": [1.875, -0.625, -0.625, -0.625, 0, 0.9375],  # 1 + 1/2 + 3/8
        "order_statistic k=2 weights=3,-1": [6, -2, -2, -2, 0, 3],
        "opo": [1 - 3 / 11, -3 / 11, -3 / 11, -3 / 11, 1 - 12 / 11, 0.3864],
        "reinforce_pp": None,
        "gdpo": [1.5, -0.5, -0.5, -0.5, 0, 0.75],
    }
    assert list(columns) == list(values)
    assert columns["completion"] == ["1", "2", "3", "4", "sum", "mean size"]
    for name, expected in values.items():
        if expected is not None:
            assert numbers(columns[name]) == pytest.approx(expected, abs=5e-5), name
    assert notes == []


@pytest.mark.parametrize(
    ("k", "expected"),
    [(2, [-0.8333, -0.8333, -0.4167, 0.4167, 1.6667]), (3, [-0.4167, -0.4167, -0.4167, 0, 1.25])],
)
def test_rewards_that_are_not_binary(command, k, expected):
    columns, notes = command("1,2,3,4,5", f"k={k}")
    assert numbers(columns[f"maxpo k={k}"][:5]) == pytest.approx([k * value for value in expected], abs=1e-3)
    assert numbers(columns["maxrl"][:5]) == pytest.approx([-0.6667, -0.3333, 0, 0.3333, 0.6667])
    assert f"passk k={k}" not in columns
    assert any(note.startswith("passk is not shown: ") and "not 0 or 1" in note for note in notes)


def test_several_groups_are_whitened_together(command):
    rewards = np.array([[1.0, 0, 0, 0], [1, 1, 0, 0]])
    lengths = np.array([[3, 1, 2, 5], [1, 2, 3, 4]])
    columns, _ = command("1,0,0,0;1,1,0,0", "lengths=3,1,2,5;1,2,3,4")
    assert columns["group"] == ["1"] * 6 + ["2"] * 6
    tokens = np.repeat((rewards - rewards.mean(axis=1, keepdims=True)).ravel(), lengths.ravel())
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    expected = (centred - tokens.mean()) / np.sqrt(tokens.var(ddof=1))
    found = columns["reinforce_pp"]
    assert numbers(found[:4] + found[6:10]) == pytest.approx(expected.ravel(), rel=1e-3)
    baselines = (lengths * rewards).sum(axis=1) / lengths.sum(axis=1)
    assert numbers(columns["opo"][6:10]) == pytest.approx(rewards[1] - baselines[1], abs=1e-4)


def test_unscored_completions(command):
    columns, notes = command("1,none,0,NaN;none,1,none,none", "k=2")
    assert columns["reward"] == ["1", "none", "0", "none", "1", "0.5", "none", "1", "none", "none", "1", "1"]
    assert columns["rloo"][:4] == ["1", "0", "-1", "0"]
    assert all(set(cells[6:]) == {"0"} for name, cells in columns.items() if name == "rloo" or "k=" in name)
    assert "group 1 has 2 scored completions, too few for maxpo k=2: dropped." in notes
    assert "group 2 has 1 scored completions, too few for every estimator: dropped." in notes


def test_a_mix_or_statistic_that_is_not_given_or_wrong_is_explained(command):
    columns, notes = command("1,0,0,0")
    assert not any(name.startswith(("maxk_mix", "order_statistic")) for name in columns)
    for part in ("maxk_mix is not shown: alpha, coefficients", "order_statistic is not shown: weights, statistic"):
        assert any(note.startswith(part) for note in notes)
    columns, notes = command("3,0,1,1", "coefficients=0,2", "k=3", "statistic=medain")
    assert numbers(columns["maxk_mix coefficients=0,2"][:4]) == numbers(command("3,0,1,1", "k=2")[0]["maxpo k=2"][:4])
    assert any("unknown value 'medain'. Did you mean 'median'" in note for note in notes)
    columns, _ = command("3,0,1,1", "k=3", "statistic=median")  # the median with i is 1, without i 1, 1, 1, 1
    assert set(columns["order_statistic k=3 statistic=median"][:4]) == {"0"}


def test_rewards_below_zero(command):
    columns, notes = command("-1,0,.5,-.5", "k=1", "truncation_order=3")
    assert columns["reward"][:4] == ["-1", "0", "0.5", "-0.5"]
    assert "maxrl" not in columns
    assert "maxrl truncation_order=3" in columns
    assert any(note.startswith("maxrl is not shown: ") and "negative" in note for note in notes)
    assert numbers(columns["pkpo k=1"][:4]) == [-1, 0, 0.5, -0.5]


def test_missing_parameters_and_values_out_of_range(command):
    columns, notes = command("1,0,0,0")
    assert {"maxpo k=2", "pkpo k=2", "passk k=2"} <= set(columns)
    assert "k is not given: k=2 is shown." in notes
    assert any("lengths are not given" in note and "opo" in note for note in notes)
    columns, notes = command("1,0", "k=2")
    assert [name for name in columns if "k=" in name] == ["pkpo k=2"]
    assert [note for note in notes if "not shown" in note and "1 <= k <= 1" in note]
    assert not any("not given: k" in note for note in notes)
    assert "maxpo k=1" in command("1,0")[0]


def test_a_group_of_one(command):
    columns, notes = command("1")
    assert {"grpo", "rloo", "maxrl", "opo", "reinforce_pp"} <= set(columns)
    assert all(cells == ["0", "0", "0"] for name, cells in columns.items() if name not in ("completion", "reward"))
    assert len(notes) == 1
    assert "a group of one has no advantage" in notes[0]


@pytest.mark.slow
def test_a_large_group_has_a_row_per_reward(command):
    size = 1024
    columns, _ = command(",".join(["0"] * (size - 4) + ["1", "none", "1", "1"]), "k=8")
    assert columns["count"] == ["3", "1020", "1", "sum", "mean size"]
    assert columns["reward"][:3] == ["1", "0", "none"]
    mean = 3 / (size - 1)
    assert numbers(columns["maxrl"]) == pytest.approx([1 / mean - 1, -1, 0, 0, 2040 / size], rel=1e-3)


def test_equal_rewards_with_unequal_advantages_keep_their_rows(command, tmp_path):
    path = tmp_path / "by_place.py"
    path.write_text("import jax.numpy as jnp\n\n\ndef f(rewards, *, scored, lengths):\n    return rewards * lengths\n")
    lengths = ",".join(["1"] * 10 + ["2"] * 10)
    columns, _ = command(",".join(["1"] * 20), f"lengths={lengths}", f"estimator={path}:f")
    assert columns["count"][:2] == ["10", "10"]
    assert columns["by_place.py:f"][:2] == ["1", "2"]


def test_small_rewards_are_not_rounded_to_zero(command):
    columns, _ = command("1,1e-9,0,0")
    assert columns["reward"][:4] == ["1", "1e-09", "0", "0"]


def test_rounding_errors_are_not_shown(command):
    columns, _ = command("0.7,0.7,0.7,0.1,0.3,0.3", "k=3")
    for name in ("grpo", "drgrpo", "rloo", "maxrl", "maxpo k=3"):
        assert columns[name][6] == "0", name
    assert columns["drgrpo"][:3] == ["0.2333"] * 3
    columns, _ = command("0.1,0.2,0.3")
    assert {columns[name][1] for name in ("grpo", "drgrpo", "rloo", "maxrl", "opo", "reinforce_pp")} == {"0"}


def test_table_is_split_on_a_narrow_terminal():
    rows = [["completion", "reward", "grpo", "drgrpo", "maxpo k=2"], ["1", "-1", "0.3333", "1", "2"]]
    parts = advantages_table.side_by_side(2, rows, 40)
    assert [part[0] for part in parts] == [
        ["completion", "reward", "grpo"],
        [*rows[0][:2], "drgrpo"],
        [*rows[0][:2], "maxpo k=2"],
    ]
    assert all(sum(len(cell) + 3 for cell in part[0]) < 40 for part in parts)
    assert advantages_table.side_by_side(2, rows, 140) == [rows]
    assert [part[1] for part in parts] == [["1", "-1", "0.3333"], ["1", "-1", "1"], ["1", "-1", "2"]]


def test_user_defined_estimator(command, own):
    columns, _ = command("1,0,0,0", f"estimator={own}:twice", "factor=4")
    assert columns["mine.py:twice factor=4"][:4] == ["3", "-1", "-1", "-1"]
    columns, _ = command("1,0,0,0", "factor=.5", f"estimator={own}:twice", "sign=minus")
    assert columns["mine.py:twice factor=0.5 sign=minus"][:4] == ["-0.375", "0.125", "0.125", "0.125"]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["1,0,x,0"], ["reward 3 of group 1", "'x'"]),
        (["1,0;1,"], ["reward 2 of group 2", "''"]),
        ([""], ["group 1", "empty"]),
        (["1,0;"], ["group 2", "empty"]),
        (["1,0;1,0,0"], ["group 2", "3", "group 1", "2", "same size"]),
        (["inf,0"], ["reward 1 of group 1", "1e+15"]),
        (["0,-1e16"], ["reward 2 of group 1", "1e+15"]),
        (["1,0", "kk=2"], ["kk", "Did you mean 'k'?", "lengths"]),
        (["1,0", "factor=2"], ["factor", "estimator"]),
        (["1,0", "1,1"], ["'1,1'", "key=value"]),
        (["1,0", "k=1", "k=1"], ["k: given twice"]),
        (["1,0", "k=two"], ["k", "'two'"]),
        (["1,0", "k=0"], ["k", "at least 1"]),
        (["1,0", "ddof=2"], ["ddof", "at most 1"]),
        (["1,0", "alpha=half"], ["alpha: expected a number", "'half'"]),
        (["1,0", "alpha=-1"], ["alpha", "at least 0"]),
        (["1,0", "coefficients=1,x"], ["coefficients: expected numbers such as 1,0.5", "'1,x'"]),
        (["1,0", "weights="], ["weights: expected numbers"]),
        (["1,0", "lengths=1,2,3"], ["lengths", "1 group of 2", "1 group of 3"]),
        (["1,0", "lengths=1,-2"], ["length 2 of group 1", "'-2'"]),
        (["1,0", "estimator=maxrll"], ["maxrll", "Did you mean 'maxrl'?"]),
        (["1,0", "estimator={own}:nothing"], ["nothing", "twice"]),
        (["1,0", "estimator={own}:grouped"], ["mine.py:grouped", "[1]", "[1, 2]"]),
        (["0,0", "estimator={own}:share"], ["mine.py:share", "nan", "completion 1 of group 1"]),
        (["1,0", "estimator={own}:broken"], ["mine.py:broken", "KeyError", "prices"]),
        (["1,0", "--plot", "{own}/w.png"], ["--plot", "w.png"]),
        (["1,0", "--plot", "{own.parent}/w.what"], ["--plot", "w.what", ".png"]),
        (["1", "--plot", "{own.parent}/w.png"], ["--plot", "group of one"]),
    ],
)
def test_bad_input(words, parts, own, capsys):
    assert cli.main(["advantages", *(word.format(own=own) for word in words)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert all(part in error for part in parts), error


def line_of(figure, label):
    (found,) = [line for line in figure.axes[0].get_lines() if line.get_label() == label]
    return found


def test_the_lines_of_the_figure():
    size = 8
    p = advantages_table.pass_rates(size)
    curves = advantages_table.curves_of(
        advantages_table.drawn_estimators(size, {"k": 2, "truncation_order": 3, "ddof": 0}), size, p
    )
    figure = advantages_table.weights_figure(curves, size, p)
    expected = {
        "ML, 1/p": 1 / p,
        "RL = MaxRL order 1": np.ones_like(p),
        "MaxRL order 3": (1 - (1 - p) ** 3) / p,
        "MaxRL order 4": (1 - (1 - p) ** 4) / p,
        "MaxRL order 7": (1 - (1 - p) ** 7) / p,
        "MaxPO(2) = PKPO(2)": 2 * (1 - p),
    }
    axes = figure.axes[0]
    assert {line.get_label() for line in axes.get_lines()} == {*expected, "GRPO (ddof 0)"}
    for label, weights in expected.items():
        np.testing.assert_array_equal(line_of(figure, label).get_xdata(), p)
        np.testing.assert_allclose(line_of(figure, label).get_ydata(), weights, rtol=1e-5)
    given = {"k": 2, "alpha": 0.5, "weights": [0.0, 1.0]}
    (*_, mix, worst) = advantages_table.curves_of(advantages_table.drawn_estimators(size, given), size, p)
    assert (mix.label, worst.label) == ("mix (alpha 0.5)", "order statistic (weights 0,1)")
    series = [1, 1 / 2, 3 / 8, 5 / 16, 35 / 128, 63 / 256, 231 / 1024]
    np.testing.assert_allclose(mix.weights, sum(c * (1 - p) ** k for k, c in enumerate(series)), rtol=1e-5)
    np.testing.assert_allclose(worst.weights, 2 * p, rtol=1e-5, atol=1e-6)  # both of two succeed: p^2
    grpo = line_of(figure, "GRPO (ddof 0)").get_ydata()
    np.testing.assert_allclose(grpo[0], grpo[np.argmin(abs(p - (1 - p[0])))], rtol=1e-3)  # symmetric about one half
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("pass rate p", "weight w(p)")
    assert f"G = {size}" in axes.get_title(loc="left")
    shown = [
        text.get_text().replace("\n", " ").replace("\N{NO-BREAK SPACE}", " ") for text in figure.legends[0].get_texts()
    ]
    assert sorted(shown) == sorted(line.get_label() for line in axes.get_lines())
    colours = [line.get_color() for line in axes.get_lines()]
    assert len(set(colours)) == len(colours)


@pytest.mark.parametrize(
    ("size", "k", "labels"),
    [
        (2, 1, {"ML, 1/p", "RL = MaxRL order 1 = MaxPO(1) = PKPO(1)", "GRPO"}),
        (4, 4, {"ML, 1/p", "RL = MaxRL order 1", "GRPO", "MaxRL order 3", "PKPO(4)"}),
        (5, 9, {"ML, 1/p", "RL = MaxRL order 1", "GRPO", "MaxRL order 4"}),
    ],
)
def test_figure_of_small_group_sizes(size, k, labels):
    p = advantages_table.pass_rates(size)
    curves = advantages_table.curves_of(advantages_table.drawn_estimators(size, {"k": k}), size, p)
    assert {curve.label for curve in curves} == labels


def test_weights_that_are_never_positive_do_not_break_the_axes():
    p = advantages_table.pass_rates(4)
    curves = [
        advantages_table.WeightCurve("ML, 1/p", "ml", 1 / p),
        advantages_table.WeightCurve("against", "other", -p),
        advantages_table.WeightCurve("tiny", "other", 1e-3 * p),
    ]
    figure = advantages_table.weights_figure(curves, 4, p)
    assert np.isnan(line_of(figure, "against").get_ydata()).all()
    bottom, top = figure.axes[0].get_ylim()
    assert bottom < 1e-3 and top > 1 / p[0]


def size_of_png(path):
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


@pytest.mark.slow
def test_figure_file(command, own, tmp_path):
    path = tmp_path / "w.png"
    _, notes = command("1,0,0,0", "--plot", str(path), "k=3", f"estimator={own}:twice")
    assert size_of_png(path) == (1200, 750)
    assert path.stat().st_size > 20_000
    assert notes[-1].endswith(str(path))


@pytest.mark.slow
def test_an_estimator_across_groups_is_shown_but_not_drawn(command, own, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(advantages_table, "weights_figure", lambda curves, *rest: drawn.append(curves))
    monkeypatch.setattr(advantages_table, "save", lambda figure, path: None)
    columns, notes = command("1,0,0,0", f"estimator={own}:over_the_batch", "--plot", "w.png")
    assert "mine.py:over_the_batch" in columns
    assert any("over_the_batch" in note and "other groups" in note for note in notes)
    assert "MaxRL order 3" in {curve.label for curve in drawn[0]}
    command("1,0,0,0", f"estimator={own}:twice", "--plot", "w.png")
    (twice,) = [curve for curve in drawn[1] if curve.label == "mine.py:twice"]
    np.testing.assert_allclose(twice.weights, 2 * 3 / 4, rtol=1e-6)


def test_every_parameter_reaches_its_estimator(own):
    request = advantages_table.read_request("1,0", [f"estimator={own}:twice", "factor=1e1", "sign=true"])
    assert request.own == GroupEstimator(f"{own}:twice", {"factor": 10.0, "sign": True})


@pytest.mark.slow
def test_only_the_figure_imports_matplotlib(tmp_path):
    """The package, training and the table do not import matplotlib. The figure does not import pyplot, whose state is
    global."""
    modules = [
        ".".join(("tunix_like", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        for path in PACKAGE.rglob("*.py")
        if path.name != "__main__.py"
    ]
    code = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
from tunix_like.cli.main import main
assert main(["advantages", "1,0"]) == 0
assert "matplotlib" not in sys.modules
assert main(["advantages", "1,0", "--plot", "w.png"]) == 0
assert "matplotlib" in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert size_of_png(tmp_path / "w.png") == (1200, 750)
    naming = {
        path.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.ImportFrom) and str(node.module).startswith("matplotlib"))
        or (isinstance(node, ast.Import) and any(alias.name.startswith("matplotlib") for alias in node.names))
    }
    assert naming == {"advantages.py", "display.py", "figures.py"}
