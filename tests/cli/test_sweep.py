"""Tests `sweep`, `runs` and reports of a folder of runs: the trials, names and errors of a sweep, and a sweep that is
killed and resumed, beside another one in the same folder."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.cli.calls import SCRIPT, SMALL, YAML, call
from tunix_like.cli import runs as commands
from tunix_like.cli.main import main
from tunix_like.config.load import load, save
from tunix_like.errors import UserError
from tunix_like.report.listing import list_runs
from tunix_like.runs.sweep import draw, read_sweep
from tunix_like.storage.metrics import rows
from tunix_like.storage.run_state import RunState, run_state

PR_SET_CHILD_SUBREAPER = 36
RATES = {"optimizer.learning_rate": [1e-3, 3e-3]}


def write(place, **fields):
    file = place / "rates.yaml"
    file.write_text(yaml.safe_dump(sort_keys=False, data={"config": YAML, "parameters": RATES} | fields))
    return file


def test_grid(tmp_path):
    parameters = RATES | {"sft.optimizer.learning_rate": [0.1], "algorithm.advantage_estimator": ["maxrl", "rloo"]}
    plan = read_sweep(write(tmp_path, parameters=parameters, overrides=["data.batch_size=4"], folder="out"))
    start = "optimizer.learning_rate=0.001,sft.optimizer.learning_rate=0.1,advantage_estimator"
    assert [trial.name for trial in plan.trials][:2] == [f"{start}=maxrl", f"{start}=rloo"] and len(plan.trials) == 4
    first = plan.trials[0].overrides
    assert first[0] == "data.batch_size=4" and first[-1] == f"training.output_dir=out/{start}=maxrl"
    assert "optimizer.learning_rate=0.001" in first and plan.metric == "eval/pass@1"


def test_the_shipped_sweep(monkeypatch, tmp_path):
    """By its name, from any folder."""
    monkeypatch.chdir(tmp_path)
    plan = read_sweep(Path("maze_sweep"))
    assert [trial.name for trial in plan.trials] == [f"learning_rate={rate}" for rate in ("0.0001", "0.0003", "0.001")]


def test_random_trials(tmp_path):
    ranges = {"optimizer.learning_rate": {"low": 1e-5, "high": 1e-2, "log": True}}
    ranges |= {"algorithm.num_generations": {"low": 2, "high": 3}, "algorithm.binarize": [True, False]}
    plan = read_sweep(write(tmp_path, parameters=ranges, trials=20))
    drawn = [dict(each.split("=", 1) for each in trial.overrides) for trial in plan.trials]
    assert len({each["optimizer.learning_rate"] for each in drawn}) > 15
    assert {each["algorithm.num_generations"] for each in drawn} == {"2", "3"}
    assert {each["algorithm.binarize"] for each in drawn} == {"true", "false"}
    assert read_sweep(write(tmp_path, parameters=ranges, trials=20)) == plan
    assert read_sweep(write(tmp_path, parameters=ranges, trials=20, seed=1)).trials != plan.trials


def test_ranges():
    rng = np.random.default_rng(0)
    rates = [draw({"low": 1e-5, "high": 1e-2, "log": True}, rng) for _ in range(4000)]
    assert np.histogram(np.log10(rates), 3, (-5, -2))[0] == pytest.approx([4000 / 3] * 3, rel=0.08)
    shares = [draw({"low": 0.0, "high": 3.0}, rng) for _ in range(4000)]
    assert np.histogram(shares, 3, (0, 3))[0] == pytest.approx([4000 / 3] * 3, rel=0.08)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"parameter": {}}, "parameter"),
        ({"config": None}, "config"),
        ({"config": "none.yaml"}, "none.yaml"),
        ({"parameters": {"optimizer.learning_rat": [1]}}, "learning_rat"),
        ({"parameters": {"optimizer.learning_rate": [-1]}}, "learning_rate"),
        ({"parameters": {"optimizer.learning_rate": []}}, "list of values"),
        ({"parameters": {"optimizer.learning_rate": {"low": 1, "high": 2}}}, "trials"),
        ({"parameters": {"optimizer.learning_rate": {"low": 2, "high": 1}}, "trials": 2}, "low"),
        ({"parameters": {"optimizer.learning_rate": {"low": 0, "high": 1, "log": True}}, "trials": 2}, "low"),
        ({"trials": 0}, "trials"),
        ({"overrides": "a=b"}, "overrides"),
        ({"folder": "gs://bucket/runs"}, "folder"),
    ],
)
def test_bad_sweeps(fields, message, tmp_path):
    with pytest.raises(UserError, match=message):
        read_sweep(write(tmp_path, **fields))


@pytest.mark.parametrize("program, status", [("true", 0), ("false", 1)])
def test_a_run_that_ends_is_not_started_again(program, status, tmp_path, monkeypatch, capsys):
    """The first program stands for a run that has nothing to do, because max_steps was reduced."""
    monkeypatch.setattr(commands.sys, "executable", shutil.which(program))
    assert main(["sweep", str(write(tmp_path, folder=str(tmp_path / "out")))]) == status
    assert capsys.readouterr().out.count("failed with exit status 1") == 2 * status


def test_a_sweep_that_is_stopped_while_it_waits_starts_no_run(tmp_path, monkeypatch):
    states = iter(["running"] * 4)  # of another sweep, which is stopped by the same signal
    monkeypatch.setattr(commands, "_state", lambda *_: RunState(next(states, "stopped"), 0, None))
    monkeypatch.setattr(commands.time, "sleep", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(commands.sys, "executable", "none")
    assert main(["sweep", str(write(tmp_path, folder=str(tmp_path / "out")))]) == 75


@pytest.mark.parametrize("number, passed", [(signal.SIGTERM, "HUP"), (signal.SIGHUP, "HUP"), (signal.SIGINT, "INT")])
def test_signals_that_a_run_gets(number, passed, tmp_path, monkeypatch):
    """A run that got SIGTERM itself, as from SLURM, would end at once by a second one."""
    program = tmp_path / "run"
    traps = "".join(f"trap 'echo {name} > {program}.got; exit 75' {name}\n" for name in ("TERM", "HUP", "INT"))
    program.write_text(f"#!/bin/sh\n{traps}touch {program}.ready\nwhile :; do sleep 0.05; done\n")
    program.chmod(0o755)
    monkeypatch.setattr(commands.sys, "executable", str(program))

    def stop():
        while not program.with_name("run.ready").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=stop)
    thread.start()
    assert main(["sweep", str(write(tmp_path, folder=str(tmp_path / "out")))]) == 75
    thread.join()
    assert program.with_name("run.got").read_text().strip() == passed


@pytest.mark.slow
def test_a_sweep_that_is_killed_is_resumed_and_nothing_runs_twice(tmp_path, capsys):
    """Kills sweep and run with SIGKILL in the middle, stops the next by SIGTERM, and lets two finish together."""
    overrides = [*SMALL, "training.max_steps=12", "training.checkpoint_every_n_steps=3", "eval.samples=1", "eval.k=[1]"]
    write(tmp_path, overrides=overrides, folder="out", parameters=RATES | {"training.seed": [0, 1]})
    out, environment = tmp_path / "out", os.environ | {"JAX_PLATFORMS": "cpu"}

    def started():
        return subprocess.Popen(
            [SCRIPT, "sweep", "rates.yaml"], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
        )

    def steps():
        return {run.name: [row["step"] for row in rows(out / run.name) if "step" in row] for run in out.iterdir()}

    def children(sweep):
        found = subprocess.check_output(["pgrep", "-P", str(sweep.pid), "-f", "train"], text=True)
        return [int(child) for child in found.split()]

    def wait_for(reached):
        end = time.monotonic() + 240
        while not (out.is_dir() and reached(steps())):
            assert time.monotonic() < end
            time.sleep(0.1)

    sweep = started()
    wait_for(lambda found: any(5 in each for each in found.values()))
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # process 1 of a container may not reap the run, which would seem alive
    (run,) = children(sweep)
    for process in (sweep.pid, run):
        os.kill(process, signal.SIGKILL)
    sweep.wait()
    os.waitpid(run, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0)

    sweep = started()
    wait_for(lambda found: sorted(12 in each for each in found.values() if 1 in each) == [False, True])
    finished, other = sorted(steps(), key=lambda name: 12 not in steps()[name])
    before = (out / finished / "metrics.jsonl").stat()
    for process in (*children(sweep), sweep.pid):  # as SLURM does
        os.kill(process, signal.SIGTERM)
    assert sweep.wait(timeout=120) == 75
    assert run_state(out / other).step == steps()[other][-1] > 0

    pair = [started(), started()]
    assert [process.wait(timeout=300) for process in pair] == [0, 0]
    assert (out / finished / "metrics.jsonl").stat().st_mtime_ns == before.st_mtime_ns
    found = steps()
    assert len(found) == 4 and all(each == [0, *range(1, 13)] for each in found.values()), found

    runs = list_runs(out, "eval/pass@1", ["training.seed=1"], "metric")
    assert [run.state.state for run in runs] == ["finished"] * 2
    assert [run.last for run in runs] == sorted((run.last for run in runs), reverse=True)
    assert all(run.state.step == run.state.total == 12 and run.size > 1000 for run in runs)
    with pytest.raises(UserError, match="training.sed"):
        list_runs(out, wanted=["training.sed=1"])
    assert main(["runs", str(out)]) == 0 and "4 runs" in capsys.readouterr().out
    assert main(["report", str(out)]) == 0
    assert all(json.dumps(name)[1:-1] in (out / "report.html").read_text() for name in found)
    call(SCRIPT, "sweep", "rates.yaml", cwd=tmp_path)  # finished


def written(folder, rows, *overrides):
    folder.mkdir(parents=True)
    save(load(None, overrides), folder / "config.yaml")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_runs_are_ordered_by_the_last_value_and_each_column_has_its_name(tmp_path, capsys):
    for name, values in {"fell": (0.141, 0.5, 0.078), "rose": (0.1, 0.141), "none": ()}.items():
        written(tmp_path / name, [{"step": i, "eval/pass@1": value} for i, value in enumerate(values)])
    assert [run.name for run in list_runs(tmp_path, order="metric")] == ["rose", "fell", "none"]
    for order in ("name", "state", "step", "metric", "age", "size"):
        assert main(["runs", str(tmp_path), "--sort", order]) == 0
        said = capsys.readouterr().out
        assert ("eval/pass@1, last" if order == "metric" else {"name": "run"}.get(order, order)) in said.split("fell")[
            0
        ]
    assert "7.8%" in said and "50.0%" in said and "eval/pass@1, best" in said


SFT, RL = [{"sft/step": 2}, {"sft/step": 4}], [{"step": 0}, {"step": 3}]


@pytest.mark.parametrize(
    ("rows", "saved", "shown"),
    [
        ([], RunState("started", 0, None), "0/9"),
        (SFT, RunState("started", 0, None), "sft 4/6"),
        (SFT, RunState("sft finished", 6, 6, of_sft=True), "sft 6/6"),
        (SFT + RL[:1], RunState("sft finished", 6, 6, of_sft=True), "0/9"),
        (SFT + RL, RunState("running", 6, 6, of_sft=True), "3/9"),
        (SFT + RL, RunState("stopped", 2, 5), "3/9"),
    ],
)
def test_counts_are_those_of_their_phase(tmp_path, monkeypatch, capsys, rows, saved, shown):
    written(tmp_path / "run", rows, "sft.max_steps=6", "training.max_steps=9")
    monkeypatch.setattr("tunix_like.report.listing.run_state", lambda folder: saved)
    assert main(["runs", str(tmp_path)]) == 0
    assert f" {shown} " in capsys.readouterr().out


def test_the_number_of_steps_of_an_epoch_is_that_of_the_checkpoint(tmp_path, monkeypatch, capsys):
    written(tmp_path / "run", RL)
    for total, shown in ((7, "3/7"), (None, "3/?")):
        monkeypatch.setattr("tunix_like.report.listing.run_state", lambda folder, n=total: RunState("stopped", 2, n))
        assert main(["runs", str(tmp_path)]) == 0 and f" {shown} " in capsys.readouterr().out


def test_a_dry_run_names_runs_that_have_not_begun(tmp_path, capsys):
    assert main(["sweep", str(write(tmp_path, folder=str(tmp_path / "out"))), "--dry-run"]) == 0
    assert capsys.readouterr().out.count("not started") == 2


def test_filters_are_read_as_overrides_are(tmp_path):
    (tmp_path / "run" / "model").mkdir(parents=True)
    save(load(None, ["optimizer.learning_rate=1e-4", "algorithm.binarize=true"]), tmp_path / "run" / "config.yaml")
    for wanted, number in ("optimizer.learning_rate=1e-4", 1), ("algorithm.binarize=true", 1), ("model.path=null", 1):
        assert len(list_runs(tmp_path, wanted=[wanted])) == number, wanted
    assert not list_runs(tmp_path, wanted=["algorithm.binarize=false"])


def test_runs_of_a_folder_without_runs(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match=folder.name):
            list_runs(folder)
