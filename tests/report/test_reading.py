"""Tests that runs are read from disk, against loops over the rows: omitted rows, the summary, and errors for folders
that are not runs."""

from __future__ import annotations

import json
import os
import random
import re

import numpy as np
import pytest

from tests.report.runs import (
    ADVANTAGES,
    GRID,
    LENGTHS,
    PATHS,
    REWARDS,
    SHOWN,
    TURNS,
    problems,
    texts,
    write_run,
    write_trajectories,
)  # fmt: skip
from tunix_like.cli.main import main
from tunix_like.data import maze
from tunix_like.report import contents
from tunix_like.report import reading as reading_module
from tunix_like.report.gradients import Gradients
from tunix_like.report.page import _finite, embedded
from tunix_like.report.reading import read_runs
from tunix_like.report.rollouts import read_steps
from tunix_like.storage.metrics import MetricsLog
from tunix_like.tasks.maze import walk


def run_of(folder, *rows):
    log = MetricsLog(folder)
    for row in rows:
        log.write(row)
    return read_runs([folder])[0]


def test_rows_become_columns_with_none_for_missing_values(tmp_path):
    """The rows are unordered, partial, with NaN, of both phases, and without a phase."""
    run = run_of(
        tmp_path,
        {"sft/step": 1, "sft/loss": 2.0},
        {"step": 0, "eval/pass@1": 0.5},
        {"step": 2, "train/loss": float("nan"), "train/step_time_sec": 2.0, "train/name": "text", "train/flag": True},
        {"step": 1, "train/loss": 3, "train/step_time_sec": 1.5},
        {"note": 1},
        {"step": 2, "eval/pass@1": 0.75},
    )
    assert run.rl.steps == [0, 1, 2] and run.sft.steps == [1]
    assert run.rl.columns == {
        "eval/pass@1": [0.5, None, 0.75],
        "train/loss": [None, 3, None],
        "train/step_time_sec": [None, 1.5, 2.0],
        "seconds": [0.0, 1.5, 3.5],
    }
    assert run.sft.columns == {"sft/loss": [2.0], "seconds": [0.0]} and run.rl.histograms == {}


def test_incomplete_last_line_is_ignored(tmp_path):
    write_run(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "train/rew')
    assert read_runs([tmp_path])[0].rl.steps == list(range(7))


def test_histograms_are_assigned_to_their_steps(tmp_path):
    whole = list(range(10))
    rows = [{"step": 1}, {"step": 2, "train/pass_rate/drawn": whole}, {"step": 3, "train/pass_rate/drawn": whole[1:]}]
    assert run_of(tmp_path, *rows).rl.histograms == {"drawn": [None, whole, None]}


def test_rows_of_a_long_run_are_subsampled_except_evaluations(tmp_path, monkeypatch):
    monkeypatch.setattr(reading_module, "MOST_STEPS", 10)
    rows = [{"step": i, "train/loss": i} | ({"eval/pass@1": 0.5} if i in (0, 17) else {}) for i in range(100)]
    table = run_of(tmp_path, *rows).rl
    assert table.steps == sorted({0, 11, 22, 33, 44, 55, 66, 77, 88, 99, 17}) and table.left_out == 89
    assert table.columns["train/loss"] == table.steps


def test_names_of_runs_are_distinct(tmp_path):
    folders = [write_run(tmp_path / a / b) for a, b in (("x", "run"), ("y", "run"), ("y", "other"))]
    assert [run.name for run in read_runs(folders)] == ["x/run", "y/run", "y/other"]
    assert [run.name for run in read_runs(folders[1:])] == ["run", "other"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: (run / "metrics.jsonl").unlink(), "has no metrics.jsonl: give the folder of a run"),
        (
            lambda run: (run / "metrics.jsonl").rename(run / "x") and (run / "metrics.jsonl").mkdir(),
            "metrics.jsonl is a folder, not a file",
        ),
        (lambda run: (run / "metrics.jsonl").write_text(""), "metrics.jsonl has no row of a step yet"),
        (lambda run: (run / "metrics.jsonl").write_text('[1]\n{"step": 1}\n'), "metrics.jsonl, line 1"),
        (lambda run: (run / "metrics.jsonl").write_text('{"step": "one"}\n'), "metrics.jsonl, line 1: step is 'one'"),
        (lambda run: (run / "config.yaml").write_text("a: [1"), "config.yaml, line 1: expected"),
        (lambda run: (run / "config.yaml").write_text("- 1"), "config.yaml: a config file is a mapping of sections"),
        (
            lambda run: (run / "config.yaml").write_text(""),
            "config.yaml: this file is empty. This file is written by the run",
        ),
        (lambda run: (run / "rollouts/step_000002.jsonl").write_text("1\n{}\n"), "step_000002.jsonl, line 1"),
        (lambda run: (run / "rollouts/step_000004.jsonl").write_text('{"problem": 1}\n'), "step_000004.jsonl, line 1"),
        (lambda run: os.mkfifo(run / "rollouts/step_000008.jsonl"), "step_000008.jsonl is not a regular file"),
        (
            lambda run: (run / "rollouts/step_000008.jsonl").symlink_to("/dev/zero"),
            "step_000008.jsonl is not a regular",
        ),
        (lambda run: (run / "metrics.jsonl").write_text("[" * 100_000 + "\n{}\n"), "metrics.jsonl, line 1"),
        (lambda run: (run / "rollouts/step_last.jsonl").write_text("{}\n"), "step_last.jsonl: expected step_<number>"),
    ],
)
def test_error_names_the_invalid_file_of_a_run(tmp_path, capsys, damage, message):
    damage(write_run(tmp_path))
    assert main(["report", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "report.html").exists()


def test_runs_that_never_started_are_left_out_of_several(tmp_path, caplog):
    write_run(tmp_path / "ran")
    (tmp_path / "failed" / "model").mkdir(parents=True)
    (tmp_path / "failed" / "config.yaml").write_text("seed: 1\n")
    assert main(["report", str(tmp_path)]) == 0
    assert "failed is left out: it has no metrics.jsonl" in caplog.text
    assert main(["report", str(tmp_path / "failed")]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}/nothing"], "nothing is not a folder"),
        (["{tmp}", "{tmp}/."], "is given twice"),
        (["{tmp}", "--out", "{tmp}/no/page.html"], "/no does not exist; create it"),
        (["{tmp}", "--png", "{tmp}/metrics.jsonl"], "metrics.jsonl: cannot write it: File exists"),
    ],
)
def test_invalid_paths_raise_a_message(tmp_path, capsys, arguments, message):
    write_run(tmp_path)
    assert main(["report", *(each.format(tmp=tmp_path) for each in arguments)]) == 2
    assert message in capsys.readouterr().err


def test_a_run_of_the_python_interface_has_no_config(tmp_path):
    run = run_of(tmp_path, {"step": 1, "train/rewards/mean": 0.5})
    assert run.config == {} and contents.facts(run) == [("RL steps", "1 (0.0 s in steps)")]
    assert main(["report", str(tmp_path)]) == 0 and (tmp_path / "report.html").exists()


def test_summary_equals_a_loop_over_the_rows(tmp_path):
    rng = random.Random(0)
    values = [rng.random() for _ in range(37)]
    rows = [{"step": i + 1, "train/rewards/mean": value, "train/entropy": value} for i, value in enumerate(values)]
    rows[4]["eval/pass@4"], rows[20]["eval/pass@4"], rows[36]["eval/pass@4"] = 0.5, 0.75, 0.625
    rows[36]["eval/pass@1"] = 0.25
    run = run_of(tmp_path, *rows)
    means = [sum(values[i : i + 10]) / 10 for i in range(28)]
    found = {row["title"]: row["cells"][0] for row in contents.summary([run])}
    best = max(range(28), key=lambda i: means[i])
    expected = {"first": means[0], "last": means[-1], "best": means[best], "step": best + 10}
    assert found["Reward"] == pytest.approx(expected) and found["Entropy"] == pytest.approx(
        {"first": means[0], "last": means[-1]}
    )
    assert found["pass@4, held out"] == {"first": 0.5, "last": 0.625, "best": 0.75, "step": 21}
    assert found["pass@1, held out"] == {"last": 0.25}


def test_only_different_config_keys_are_listed(tmp_path):
    runs = read_runs([write_run(tmp_path / "a", learning_rate=0.1, b2=1), write_run(tmp_path / "b", learning_rate=0.2)])
    assert contents.differing(runs) == [
        {"key": "optimizer.b2", "values": ["1", "-"]},
        {"key": "optimizer.learning_rate", "values": ["0.1", "0.2"]},
    ]


def test_completions_are_read_as_written(tmp_path):
    steps, left_out = read_steps(write_run(tmp_path) / "rollouts", 10**9)
    assert [each["step"] for each in steps] == [2, 4, 6] and left_out == ""
    for step in steps:
        found, said = step["groups"], texts(step["step"])
        assert [group["prompt"] for group in found] == [problem.text for problem in problems(step["step"])]
        for g, group in enumerate(found):
            assert [each["text"] for each in group["completions"]] == said[4 * g : 4 * g + 4]
            for s, each in enumerate(group["completions"]):
                assert each.get("reward") == (None if np.isnan(REWARDS[g, s]) else REWARDS[g, s])
                assert (each["advantage"], each["length"]) == (ADVANTAGES[g, s], LENGTHS[g, s])
                assert each.get("clipped", False) == (LENGTHS[g, s] == 12) and len(each["parts"]) == 2
    assert [group.get("grid") for group in steps[0]["groups"]] == [None, None, GRID]
    assert [each["path"] for each in steps[0]["groups"][2]["completions"]] == ["RRDD", "RRDU", "", ""]


def test_turns_are_read_as_written(tmp_path):
    """The text of all turns is not stored a second time."""
    ((step,), _) = read_steps(write_trajectories(tmp_path) / "rollouts", 10**9)
    several, one = step["groups"][0]["completions"]
    names = [turn.get("name") for turn in several["turns"]]
    assert [(turn["role"], turn["text"]) for turn in several["turns"]] == [(t["role"], t["content"]) for t in TURNS[0]]
    assert names == [turn.get("name") for turn in TURNS[0]] and several["sampled"] == 25 and "text" not in several
    assert one["turns"] == [{"role": "assistant", "text": "one turn"}]
    (step,), said = read_steps(tmp_path / "rollouts", 10)
    assert len(step["groups"]) == 1 and said == ""


def test_maze_path_equals_the_walk_of_the_reward(tmp_path):
    """The letters of the path, followed from the start, give the cells of `walk`."""
    steps, _ = read_steps(write_run(tmp_path) / "rollouts", 10**9)
    for text, each in zip(PATHS, steps[0]["groups"][2]["completions"], strict=True):
        cells = [(1, 1)]
        for letter in each["path"]:
            down, right = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}[letter]
            cells.append((cells[-1][0] + down, cells[-1][1] + right))
        assert cells == walk(GRID, text).cells


def test_page_size_is_limited_and_omissions_are_stated(tmp_path):
    run = write_run(tmp_path, steps=20)  # ten files
    size = max(file.stat().st_size for file in (run / "rollouts").glob("*.jsonl"))
    steps, said = read_steps(run / "rollouts", 3 * size)
    assert [each["step"] for each in steps] == [2, 10, 20]
    assert said == "7 of 10 written steps are left out to keep this page small."
    steps, said = read_steps(run / "rollouts", size)
    assert [each["step"] for each in steps] == [20] and "9 of 10 written steps are" in said
    steps, said = read_steps(run / "rollouts", 400)
    assert [len(each["groups"]) for each in steps] == [1]
    assert said == "9 of 10 written steps and 2 of 3 prompts are left out to keep this page small."


def test_grid_is_recovered_from_the_prompt():
    for size in (5, 9, 15):
        grid = maze.make(size, random.Random(size))
        assert maze.grid_of(maze.record(grid)["prompt"]) == grid
    whole = maze.record(GRID)["prompt"]
    for other in ("", "GRID_START", "2 + 2 =", whole.replace("START ", "PATH ", 2), whole.replace("NEWLINE", "", 1)):
        assert maze.grid_of(other) is None, other
    assert maze.grid_of(whole.replace("WALL", "HOLE", 1)) is None
    assert maze.grid_of(whole.replace("WALL", "PATH", 1)) is None, "one could walk out of it"


def test_non_finite_gradients_are_left_out():
    found = _finite(Gradients([0.0, 0.5, 1.0], [0, 4, 9], [1.0, float("nan"), 2.0], "step 1"))
    assert found == Gradients([0.0, 1.0], [0, 9], [1.0, 2.0], "step 1")
    assert _finite(Gradients([0.5], [4], [float("inf")], "step 1")).norms == []


def test_page_contains_only_printable_characters(tmp_path):
    """Reads the data block of the page: prompts, completions, the config, and the names of runs, sources and metrics.
    Maze paths are those of the completions as written."""
    folder = write_run(tmp_path / "run \u202e\x1b")
    run_of(folder, {"step": 7, "train/odd\u2067": 1.0})
    assert main(["report", str(folder), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])

    def strings(value):
        if isinstance(value, dict):
            yield from (each for item in value.items() for part in item for each in strings(part))
        elif isinstance(value, list):
            yield from (each for part in value for each in strings(part))
        elif isinstance(value, str):
            yield value

    found = list(strings(data))
    assert all(text.replace("\n", "").isprintable() for text in found)
    assert {SHOWN, f"{SHOWN} 0", "run \\u202e\\x1b", "train/odd\\u2067"} <= set(found)
    (raw,), (own,) = (
        [group for group in steps[-1]["groups"] if "grid" in group]
        for steps in (read_steps(folder / "rollouts", 10**9)[0], data["runs"][0]["rollouts"][0]["steps"])
    )
    assert [each["path"] for each in raw["completions"]] == [each["path"] for each in own["completions"]]


def test_embedded_data_cannot_close_its_block():
    data = {"</script>": ["<!--", "\u2028&]]>", "\ud800"]}
    text = embedded(data)
    assert text.isascii() and not re.search("[<>&]", text) and json.loads(text) == data


def _write(name, text):
    def damage(run):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    return damage


def _checkpoint(metadata):
    def damage(run):
        for name in ("_CHECKPOINT_METADATA", "state/_METADATA"):
            _write(f"checkpoints/3/{name}", "{}")(run)
        _write("checkpoints/3/meta/metadata", metadata)(run)

    return damage


DAMAGED = {
    "a line that is no JSON": _write("metrics.jsonl", '{"step": 1}\nx\n{"step": 2}\n'),
    "a line that is no object": _write("metrics.jsonl", "[1]\n{}\n"),
    "binary metrics": _write("metrics.jsonl", bytes(range(256)) * 9),
    "a step that is no number": _write("metrics.jsonl", '{"step": "x"}\n'),
    "a number of 5,000 digits": _write("metrics.jsonl", '{"step": ' + "1" * 5000 + "}\n{}\n"),
    "deep JSON": _write("metrics.jsonl", "[" * 100_000 + "\n{}\n"),
    "config that is no YAML": _write("config.yaml", "a: [\n"),
    "config that is empty": _write("config.yaml", ""),
    "config that is a list": _write("config.yaml", "[1]"),
    "binary config": _write("config.yaml", bytes(range(256))),
    "config with a number of 5,000 digits": _write("config.yaml", "training: {seed: " + "1" * 5000 + "}\n"),
    "checkpoint without meta": _checkpoint("x"),
    "checkpoint with a list": _checkpoint("[]"),
    "checkpoint with deep JSON": _checkpoint("[" * 100_000),
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_run_is_left_out_of_a_list(tmp_path, damage, capsys, caplog):
    for name in ("good", "bad"):
        write_run(tmp_path / name)
    damage(tmp_path / "bad")
    assert main(["runs", str(tmp_path)]) == 0
    assert "good" in capsys.readouterr().out and f"{tmp_path}/bad is left out: " in caplog.text
    assert main(["runs", str(tmp_path / "bad")]) == 2


ODD_NUMBERS = ["1e999", "-1e999", "NaN", "1" * 400, "-" + "1" * 400, "true", '"x"', "[1e999]", "{}", "null", "1e-400"]


@pytest.mark.parametrize("number", ODD_NUMBERS, ids=lambda number: number[:8])
def test_numbers_that_cannot_be_drawn_are_left_out(tmp_path, number):
    folder = write_run(tmp_path / "run")
    names = ["train/rewards/mean", "eval/pass@1", "train/step_time_sec", "train/pass_rate/drawn", "sft/loss"]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, ' + ", ".join(f'"{name}": {number}' for name in names) + "}\n")
    config = folder / "config.yaml"
    config.write_text(config.read_text() + f"rewards: {{success_threshold: {'.inf' if 'e' in number else number}}}\n")
    assert main(["report", str(folder), "--png", str(tmp_path / "png")]) == 0
    assert main(["runs", str(tmp_path)]) == 0
    rollouts = folder / "rollouts" / "step_000006.jsonl"
    row = rollouts.read_text().partition("\n")[0]
    rollouts.write_text(row.replace('"reward": 1.0', f'"reward": {number}') + "\n")
    assert main(["report", str(folder)]) in (0, 2)
