"""Who owns a run folder: one process at a time, and a dead one no longer."""

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
    """A lock as this process would write it, but for the changes."""
    (folder / "run.lock").write_text(json.dumps(run_lock._me() | changes))


def in_thread(work):
    """What `work` raised in another thread, or None."""
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
        with owned(lock.parent):  # the owner itself may
            pass
        check()
        assert lock.exists()
    assert not lock.exists()
    take(lock.parent)


def test_a_run_that_fails_gives_its_folder_back(tmp_path):
    with pytest.raises(RuntimeError), owned(tmp_path):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_without_a_folder_there_is_nothing_to_own(tmp_path, monkeypatch):
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
def test_one_that_its_parent_has_not_noticed_is_dead(tmp_path):
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
def test_a_lock_of_another_machine_is_taken_over_when_it_stays_untouched(tmp_path, quick, caplog, other):
    write(tmp_path, **other)
    began = time.monotonic()
    take(tmp_path)
    assert time.monotonic() - began >= 1.0 and "was not touched in that time" in caplog.text


def test_so_is_one_whose_owner_died_before_it_had_written_a_word(tmp_path, quick, caplog):
    (tmp_path / "run.lock").touch()
    take(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert "in use by an unknown process" in caplog.text and "None" not in caplog.text


def test_a_run_whose_folder_or_lock_is_deleted_says_so(tmp_path, monkeypatch):
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
def test_a_lock_of_another_machine_that_is_touched_is_respected(tmp_path, quick, monkeypatch, other):
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


def test_one_that_leaves_meanwhile_is_waited_for(tmp_path, quick):
    write(tmp_path, host="elsewhere")
    threading.Timer(0.2, (tmp_path / "run.lock").unlink).start()
    began = time.monotonic()
    take(tmp_path)
    assert time.monotonic() - began < 1.0


def test_the_owner_touches_its_lock(tmp_path, quick):
    with owned(tmp_path):
        before = (tmp_path / "run.lock").stat().st_mtime_ns
        time.sleep(0.3)
        assert (tmp_path / "run.lock").stat().st_mtime_ns > before


@pytest.mark.slow
def test_of_many_that_find_a_dead_owner_one_takes_over(tmp_path):
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


def test_one_that_stood_still_for_too_long_notices(tmp_path):
    """Another one has taken over: the first neither saves nor removes the other's lock."""
    with owned(tmp_path) as check:
        write(tmp_path, host="elsewhere", pid=7)
        with pytest.raises(UserError, match="no longer this process's run.*process 7 on elsewhere"):
            check()
    assert (tmp_path / "run.lock").exists()


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="run.lock cannot be written.*training.output_dir"):
        take(tmp_path / "file")


def test_a_disk_that_fails_to_read_the_lock_for_a_moment_ends_nothing(tmp_path, monkeypatch):
    """A network file system may; a lock that is gone, or another's, is lost at once."""
    with owned(tmp_path) as check:
        answers = [{}, {}]
        read = run_lock._read
        monkeypatch.setattr(run_lock, "_read", lambda lock: answers.pop() if answers else read(lock))
        check()
        assert not answers
        (tmp_path / "run.lock").unlink()
        with pytest.raises(UserError, match="run.lock was deleted"):
            check()
