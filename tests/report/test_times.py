"""Tests that the recorded parts of the time add up to the steps, with an environment and with stale completions, and
that the charts show each part once."""

from __future__ import annotations

import dataclasses
import time

import jax
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from tests.traces import calls, named, seconds, tracks_of
from tests.training import test_environments, test_staleness
from tests.training.small_learner import collect
from tunix_like.config.schema import MeshConfig
from tunix_like.environments.outcomes import Outcome
from tunix_like.models.sharding import build_mesh
from tunix_like.report import figures
from tunix_like.report.contents import TIME_PARTS
from tunix_like.report.page import page_data
from tunix_like.report.reading import read_runs
from tunix_like.runtime.trace import FILE

pytestmark = pytest.mark.slow

PAUSE = 0.3


class SlowOutcomes:
    """Environments of another process, which answer every wait after a pause with the end of the trajectory."""

    tools = ()

    def __init__(self):
        self.numbers = []

    def reset(self, number, columns):
        self.numbers.append(Outcome(number))

    def step(self, number, completion):
        self.numbers.append(Outcome(number, None, float(len(completion) % 2), True))

    def finish(self, number):
        self.numbers.append(Outcome(number))

    def outcomes(self, wait):
        time.sleep(PAUSE if wait else 0)
        ready, self.numbers = self.numbers, []
        return ready

    def close(self):
        self.numbers.clear()


class SlowStep(test_environments.Vowels):
    """An environment in the training process."""

    def step(self, completion):
        time.sleep(PAUSE / 16)
        return super().step(completion)


def slow_reward(prompts, completions, answer):
    time.sleep(PAUSE)
    return [float(len(completion) % 2) for completion in completions]


def stale_environment(folder):
    mesh = build_mesh(MeshConfig(), jax.devices()[: -test_staleness.SAMPLING])
    lengths = dataclasses.replace(test_environments.LENGTHS, max_staleness=1, devices=test_staleness.SAMPLING)
    settings = {"algo": test_staleness.CORRECTED, "rollout": lengths, "mesh": mesh, "max_steps": 3}
    return test_environments.learner(SlowOutcomes(), output_dir=str(folder), **settings)


RUNS = {
    "environment": lambda folder: test_environments.learner(SlowOutcomes(), output_dir=str(folder)),
    "environment in the process": lambda folder: test_environments.learner(SlowStep, output_dir=str(folder)),
    "stale": lambda folder: test_staleness.stale(reward=slow_reward, max_steps=4, output_dir=str(folder)),
    "stale environment": stale_environment,
}


@pytest.fixture(scope="module", params=RUNS)
def recorded(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return request.param, collect(RUNS[request.param](folder)), folder


def test_parts_add_up_to_the_step(recorded):
    name, rows, _ = recorded
    for row in rows:
        parts = {key: value for key, value in row.items() if key.startswith("train/time/")}
        assert min(parts.values()) >= 0
        assert 0.5 * row["train/step_time_sec"] < sum(parts.values()) <= row["train/step_time_sec"], parts
    if "environment" in name:
        waits = [row.get("train/time/environment", row.get("train/sampler_time/environment")) for row in rows]
        assert min(waits) >= PAUSE
    if "stale" in name:
        assert all("train/time/rollout" not in row and row["train/sampler_time/rollout"] > 0 for row in rows[1:])
        assert all(row["train/sampler_time/idle"] >= 0 for row in rows)
    if name == "stale":
        assert all(row["train/sampler_time/reward"] >= PAUSE for row in rows[1:])


def test_the_trace_has_the_same_times(recorded):
    name, rows, folder = recorded
    tracks = tracks_of(folder / FILE)
    threads = {"time": ["trainer"], "sampler_time": ["rollouts ahead", "rewards ahead"]}
    for prefix, names in threads.items():
        events = [event for track in names for event in tracks[track]]
        keys = {key for row in rows for key in row if key.startswith(f"train/{prefix}/")} - {"train/sampler_time/idle"}
        times = {key.rpartition("/")[2]: sum(row.get(key, 0.0) for row in rows) for key in keys}
        waited = times.pop("environment", 0.0)  # within the rollout
        times |= {"rollout": times["rollout"] + waited} if "rollout" in times else {}
        for part, expected in times.items():
            found = named(events, part)
            assert seconds(found) == pytest.approx(expected, abs=2e-6 * len(found)), part
        assert seconds(named(events, "environment")) >= waited * 0.9
    assert ("stale" in name) is bool(tracks["rollouts ahead"]) is bool(tracks["rewards ahead"])
    if name == "environment in the process":
        (steps,) = [named(track, "step") for title, track in tracks.items() if title.startswith("environment")]
        assert min(event["dur"] for event in steps) >= 1e6 * PAUSE / 16
    assert bool(calls(tracks, "environment calls")) is ("environment" in name)
    assert page_data(read_runs([folder]), [], folder.parent)["runs"][0]["trace"] == f"{folder.name}/{FILE}"


def test_chart_shows_each_part_once_in_its_own_colour(recorded, tmp_path, monkeypatch):
    _, rows, folder = recorded
    drawn = {}
    monkeypatch.setattr(Figure, "savefig", lambda self, file, **_: drawn.update({file.stem: self.axes}))
    runs = read_runs([folder])
    figures.save_figures(runs, tmp_path)
    (axes,) = drawn["time"]
    bars = {bar.get_label(): bar for bar in axes.containers}
    names = {key.removeprefix("train/time/") for row in rows for key in row if key.startswith("train/time/")}
    assert bars.keys() == names <= TIME_PARTS.keys() == set(page_data(runs, [], tmp_path)["parts"])
    assert len({to_hex(bar.patches[0].get_facecolor()) for bar in bars.values()}) == len(bars)
    whole = sum(bar.patches[0].get_width() for bar in bars.values())
    assert whole <= sum(row["train/step_time_sec"] for row in rows)
