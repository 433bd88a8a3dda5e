"""Tests the file of a trace: complete JSON at any time, of bounded size, without overlaps of the events of a track."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.traces import calls, tracks_of
from tunix_like.runtime import trace
from tunix_like.runtime.trace import EARLIER, FILE, writing

KILLED = """
import os, pathlib, signal, sys, time
from tunix_like.runtime import trace
with trace.writing(pathlib.Path(sys.argv[1])):
    start = time.perf_counter()
    trace.add_call("environment calls", "step", start, start + 1e-3, turn=1)
    trace.add("rollout", start, time.perf_counter())
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_a_file_to_which_the_next_one_appends(tmp_path):
    for count in (1, 2):
        done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
        assert done.returncode == -signal.SIGKILL
        tracks = tracks_of(tmp_path / FILE)
        assert {name: len(track) for name, track in tracks.items()} == {
            "environment calls 1": count,
            "trainer": count,
        }
    first, second = tracks["trainer"]
    assert first["ts"] + first["dur"] < second["ts"], "the times are wall time"


@pytest.mark.parametrize(
    ("left", "kept"),
    [
        (b"", 0),
        (b"[", 0),
        (b"[\n]", 0),
        (b'[\n{"name":"a","ph":"M"},\n{"name":"b","p', 1),
        (b'[\n{"name":"a","ph":"M"},\n', 1),
        (b'[\n{"name":"a","ph":"M"},\n{"name":"b","ph":"M"}\n]', 2),
        (b'[\n{"name":"a","ph":"M"}\n\0\0\0\0', 1),
    ],
)
def test_an_incomplete_event_is_cut(left, kept, tmp_path):
    (tmp_path / FILE).write_bytes(left)
    with writing(tmp_path):
        assert len(json.loads((tmp_path / FILE).read_text())) == kept
        trace.add("rollout", 1.0, 2.0)
    assert [event["name"] for event in json.loads((tmp_path / FILE).read_text())[kept:]] == [
        "process_name",
        "thread_name",
        "rollout",
    ]


def test_calls_at_the_same_time_get_tracks_of_their_own(tmp_path):
    """Of calls in the order of their ends, each goes to the track that was free for the shortest time."""
    with writing(tmp_path):
        for start, end in ((0.0, 1.0), (0.5, 2.0), (3.0, 4.0), (1.5, 5.0), (0.0, 6.0)):
            trace.add_call("reward calls", "judge", start, end)
    tracks = tracks_of(tmp_path / FILE)
    starts = {name: [(event["ts"] - tracks["reward calls 3"][0]["ts"]) / 1e6 for event in track]
              for name, track in tracks.items()}  # fmt: skip
    assert starts == {"reward calls 1": [0, 1.5], "reward calls 2": [0.5, 3], "reward calls 3": [0]}


def test_threads_write_whole_events(tmp_path):
    def work():
        for i in range(200):
            trace.add_call("environment calls", 'a "name"\n\u2028', 0.0, 1.0, turn=i)
            trace.add("save", i * 1.0, i + 0.5, track="checkpoints")

    with writing(tmp_path):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with ThreadPoolExecutor() as other:
            other.submit(trace.add, "compile", 0.0, 1.0).result()  # of no track
    assert len(tracks_of(tmp_path / FILE)["checkpoints"]) == 800
    events = calls(tracks_of(tmp_path / FILE), "environment calls")
    assert sorted(event["args"]["turn"] for event in events) == sorted([*range(200)] * 4)
    assert {event["name"] for event in events} == {'a "name"\n\u2028'}
    assert "compile" not in (tmp_path / FILE).read_text()


def test_the_newest_events_of_a_long_run_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "MOST_BYTES", 1000)
    with writing(tmp_path):
        for i in range(100):
            trace.add("rollout", float(i), i + 0.5, step=i)
    before, last = (tracks_of(tmp_path / name).get("trainer", []) for name in (EARLIER, FILE))
    steps = [event["args"]["step"] for event in [*before, *last]]
    assert steps == [*range(steps[0], 100)] and len(before) >= 5
    assert all((tmp_path / name).stat().st_size < 1300 for name in (EARLIER, FILE))
    assert len(os.listdir(tmp_path)) == 2


def test_a_full_disk_stops_neither_the_run_nor_later_events(tmp_path, monkeypatch, caplog):
    write, full = os.pwrite, []

    def pwrite(file, data, place):
        return write(file, data[:7] if full and len(data) > 2 else data, place)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with writing(tmp_path):
        full.append(True)
        trace.add("evaluation", 0.0, 1.0)
        full.clear()
        trace.add("data", 0.0, 1.0)
        full.append(True)
        trace.add("rollout", 1.0, 2.0)
        trace.add("reward", 2.0, 3.0)
        assert [event["name"] for event in tracks_of(tmp_path / FILE)["trainer"]] == ["data"]
        full.clear()
        trace.add("update", 3.0, 4.0)
    assert [event["name"] for event in tracks_of(tmp_path / FILE)["trainer"]] == ["data", "update"]
    assert len(caplog.messages) == 1 and FILE in caplog.text


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / FILE).mkdir()
    with writing(tmp_path):
        trace.add("data", 0.0, 1.0)
    assert FILE in caplog.text


def test_a_run_that_lost_its_folder_leaves_the_file_to_the_other_one(tmp_path, caplog):
    with writing(tmp_path):
        trace.add("data", 0.0, 1.0)
        subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
        trace.add("rollout", 1.0, 2.0)
        trace.add("update", 2.0, 3.0)
    assert [event["name"] for event in tracks_of(tmp_path / FILE)["trainer"]] == ["data", "rollout"]
    assert len(caplog.messages) == 1 and FILE in caplog.text


def test_an_error_at_the_end_of_the_file_does_not_end_the_run(tmp_path, monkeypatch):
    really, failed = os.close, []

    def close(file):
        really(file)
        failed.append(file)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with writing(tmp_path):
        trace.add("data", 0.0, 1.0)
        monkeypatch.setattr(os, "close", close)
    monkeypatch.undo()
    assert failed and list(tracks_of(tmp_path / FILE)) == ["trainer"]
