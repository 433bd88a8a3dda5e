"""Tests what the trace of a run contains: the times of its metrics, the calls of environments and rewards, evaluations
and checkpoints, before and after a kill."""

from __future__ import annotations

import signal

import pytest

from tests.process import python
from tests.traces import Tracks, calls, named, seconds, tracks_of
from tests.training.traced_run import BATCH, GROUP, run
from tunix_like.runtime.trace import FILE

pytestmark = pytest.mark.slow


def within(event, outer):
    return outer["ts"] <= event["ts"] and event["ts"] + event["dur"] <= outer["ts"] + outer["dur"]


def steps_of(tracks: Tracks):
    return [event["name"] for event in tracks["steps"]]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Returns the trace at the kill, and the rows and the trace of the resumed run."""
    folder = tmp_path_factory.mktemp("run")
    done = python("-m", "tests.training.traced_run", str(folder), "4", "3", cwd=folder)
    assert done.returncode == -signal.SIGKILL, done.stderr
    killed, rows = tracks_of(folder / FILE), run(folder, 4)
    return killed, rows, tracks_of(folder / FILE)


def test_a_resumed_run_appends(resumed):
    killed, rows, tracks = resumed
    assert steps_of(killed) == ["train 1", "train 2", "train 3"]
    assert [row["step"] for row in rows] == [3, 4], "the checkpoint is of step 2"
    assert steps_of(tracks) == ["train 1", "train 2", "train 3", "train 3", "train 4"]
    for name, track in killed.items():
        assert tracks[name][: len(track)] == track, name


def test_durations_are_those_of_the_metrics(resumed):
    _, rows, tracks = resumed
    for row, step in zip(rows, tracks["steps"][-2:], strict=True):
        assert seconds([step]) == pytest.approx(row["train/step_time_sec"], abs=2e-6)
        inside = [event for event in tracks["trainer"] if within(event, step)]
        times = {key.removeprefix("train/time/"): row[key] for key in row if key.startswith("train/time/")}
        times["rollout"] += times.pop("environment")
        for name, expected in times.items():
            events = named(inside, name)
            assert seconds(events) == pytest.approx(expected, abs=2e-6 * len(events)), name
        waits = named(inside, "environment")
        (rollout,) = named(inside, "rollout")
        assert waits and all(within(wait, rollout) for wait in waits)
    assert named(tracks["trainer"], "compile decoding")


def test_every_call_is_an_event(resumed):
    _, rows, tracks = resumed
    environment, rewards = calls(tracks, "environment calls"), calls(tracks, "reward calls")
    assert {name for name in tracks if name.startswith("environment")} == {
        "environment calls 1",
        "environment calls 2",
    }, "two processes"
    for row, step in zip(rows, tracks["steps"][-2:], strict=True):
        inside = [event for event in environment if within(event, step)]
        assert len(named(inside, "reset")) == len(named(inside, "finish")) == BATCH * GROUP
        assert {event["args"]["trajectory"] for event in inside} == {*range(BATCH * GROUP)}
        assert len(named(inside, "step")) <= row["train/turns/mean"] * BATCH * GROUP
        assert max(event["args"]["turn"] for event in inside) == row["train/turns/max"]
        scored = [event for event in rewards if within(event, step)]
        assert len(scored) == row["train/reward/service/calls"] == BATCH * GROUP
        assert min(event["dur"] for event in scored) >= 20_000
        assert {event["name"] for event in scored} == {"service"}
        (whole,) = [event for event in named(tracks["trainer"], "service") if within(event, step)]
        assert all(within(event, whole) for event in scored)


def test_evaluations_and_checkpoints(resumed):
    _, _, tracks = resumed
    assert len(named(tracks["trainer"], "evaluation")) == 3, "before training, and after steps 2 and 4"
    assert [event["name"] for event in tracks["checkpoints"]] == ["checkpoint 2", "checkpoint 4"]
    begun = named(tracks["trainer"], "checkpoint")
    assert len(begun) == 2 and all(
        one["ts"] <= other["ts"] for one, other in zip(begun, tracks["checkpoints"], strict=True)
    )
    assert len(named(tracks["trainer"], "restore")) == 2
