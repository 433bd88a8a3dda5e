"""Tests the ownership of a run folder: one process at a time, and not a dead process."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tunix_like.errors import UserError
from tunix_like.storage import run_lock
from tunix_like.storage.run_lock import owned


def write(folder, **changes):
    """Writes a lock as this process would write it, except for the changes."""
    (folder / "run.lock").write_text(json.dumps(run_lock._me() | changes))


def in_thread(work):
    """Runs `work` in another thread. Returns the exception that it raised, or None."""
    found = []

    def go():
        try:
            work()
            found.append(None)
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=go)
    thread.start()
    thread.join()
    return found[0]


def take(folder):
    with owned(folder):
        pass


def test_one_owner_at_a_time(tmp_path):
    with owned(tmp_path / "new" / "run") as check:
        lock = tmp_path / "new" / "run" / "run.lock"
        assert json.loads(lock.read_text())["pid"] == os.getpid()
        refused = in_thread(lambda: take(lock.parent))
        assert isinstance(refused, UserError) and f"is in use by process {os.getpid()} on " in str(refused)
        assert str(lock) in str(refused) and "training.output_dir" in str(refused)
        with owned(lock.parent):  # the owner may take it again
            pass
        check()
        assert lock.exists()
    assert not lock.exists()
    take(lock.parent)


def test_failed_run_removes_its_lock(tmp_path):
    with pytest.raises(RuntimeError), owned(tmp_path):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_no_lock_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with owned(None) as check, owned(None):
        check()
    assert list(tmp_path.iterdir()) == []


def dead():
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


@pytest.mark.parametrize("kind", ["dead", "another process by now"])
def test_the_lock_of_a_dead_process_is_taken_over_at_once(tmp_path, caplog, kind):
    write(tmp_path, **({"pid": dead()} if kind == "dead" else {"began": "1"}))
    with owned(tmp_path) as check:
        check()
    assert "is gone; its lock is taken over" in caplog.text and list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only /proc tells a zombie")
def test_zombie_process_counts_as_dead(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as process:
        write(tmp_path, pid=process.pid, began=run_lock._began(process.pid))
        assert isinstance(in_thread(lambda: take(tmp_path)), UserError)
        process.kill()
        while run_lock._began(process.pid) is not None:
            time.sleep(0.01)
        take(tmp_path)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(run_lock, "PATIENCE_SECONDS", 1.0)


OTHERS = [{"host": "elsewhere"}, {"place": "another boot or container"}]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_unchanged_lock_of_another_machine_is_taken_over(tmp_path, quick, caplog, other):
    write(tmp_path, **other)
    began = time.monotonic()
    take(tmp_path)
    assert time.monotonic() - began >= 1.0 and "was not touched in that time" in caplog.text


def test_empty_lock_is_taken_over(tmp_path, quick, caplog):
    (tmp_path / "run.lock").touch()
    take(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert "in use by an unknown process" in caplog.text and "None" not in caplog.text


def test_deleted_folder_or_lock_raises_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock.time, "sleep", lambda seconds: pytest.fail("what is gone is not waited for"))
    with owned(tmp_path / "run") as check:
        (tmp_path / "run" / "run.lock").unlink()
        with pytest.raises(UserError, match=r"run/run\.lock was deleted .*Nothing more is written.* start it again"):
            check()
        (tmp_path / "run").rmdir()
        with pytest.raises(UserError, match=r"run was deleted .*Nothing more is written.*starts a new run") as found:
            check()
        assert "None" not in str(found.value) and "\n" not in str(found.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_updated_lock_of_another_machine_is_not_taken_over(tmp_path, quick, monkeypatch, other):
    monkeypatch.setattr(run_lock, "PATIENCE_SECONDS", 60.0)
    write(tmp_path, **other)
    done, began = threading.Event(), time.monotonic()
    me = run_lock._me()
    beats = threading.Thread(
        target=lambda: [os.utime(tmp_path / "run.lock") for _ in iter(lambda: done.wait(0.1), True)]
    )
    beats.start()
    try:
        with pytest.raises(UserError, match=f"process {os.getpid()} on .*which is alive.*remove that file"):
            take(tmp_path)
    finally:
        done.set()
        beats.join()
    assert time.monotonic() - began < 30, "it ends when the file is touched, not after the whole wait"
    assert json.loads((tmp_path / "run.lock").read_text()) == me | other


def test_lock_is_taken_when_its_owner_ends(tmp_path, quick):
    write(tmp_path, host="elsewhere")
    threading.Timer(0.2, (tmp_path / "run.lock").unlink).start()
    began = time.monotonic()
    take(tmp_path)
    assert time.monotonic() - began < 1.0


def test_owner_updates_the_time_of_its_lock(tmp_path, quick):
    with owned(tmp_path):
        before = (tmp_path / "run.lock").stat().st_mtime_ns
        time.sleep(0.3)
        assert (tmp_path / "run.lock").stat().st_mtime_ns > before


@pytest.mark.slow
def test_only_one_of_many_processes_takes_over_a_dead_lock(tmp_path):
    for _ in range(20):
        write(tmp_path, pid=dead())
        start, results = threading.Barrier(8), []

        def race(start=start, results=results):
            start.wait()
            results.append(in_thread(lambda: run_lock._take(tmp_path / "run.lock")))

        threads = [threading.Thread(target=race) for _ in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert sorted(type(result).__name__ for result in results) == ["NoneType"] + ["UserError"] * 7
        assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]


def test_suspended_owner_detects_that_its_lock_was_taken_over(tmp_path):
    """Another process has taken over. The first one neither saves nor removes the lock of the other."""
    with owned(tmp_path) as check:
        write(tmp_path, host="elsewhere", pid=7)
        with pytest.raises(UserError, match="no longer this process's run.*process 7 on elsewhere"):
            check()
    assert (tmp_path / "run.lock").exists()


def test_unwritable_folder_raises_a_message(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="run.lock cannot be written.*training.output_dir"):
        take(tmp_path / "file")


def test_temporary_read_error_keeps_the_ownership(tmp_path, monkeypatch):
    """Reads of a network file system may fail temporarily. A missing lock, or the lock of another process, ends the
    ownership at once."""
    with owned(tmp_path) as check:
        answers = [{}, {}]
        read = run_lock._read
        monkeypatch.setattr(run_lock, "_read", lambda lock: answers.pop() if answers else read(lock))
        check()
        assert not answers
        (tmp_path / "run.lock").unlink()
        with pytest.raises(UserError, match="run.lock was deleted"):
            check()
