"""Tests the ownership of a run folder, with real processes: one at a time, and not a dead process."""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import signal
import subprocess
import sys
import threading
import time

import filelock
import pytest

from tests.process import ROOT
from tunix_like.errors import UserError
from tunix_like.storage import run_lock
from tunix_like.storage.run_lock import owned

HOLDER = """
import sys, time
from tunix_like.storage import run_lock
run_lock.BEAT_SECONDS, run_lock.LEASE_SECONDS = 0.1, 1.0
with run_lock.owned(sys.argv[1]) as check:
    print("owned", flush=True)
    sys.stdin.readline()
    check()
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(run_lock, "LEASE_SECONDS", 1.0)


@contextlib.contextmanager
def holder(folder):
    """Starts a process that owns `folder` until it gets a line."""
    argv = [sys.executable, "-c", HOLDER, str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(argv, env=environment, text=True, **pipes) as process:
        assert process.stdout.readline() == "owned\n"
        try:
            yield process
        finally:
            process.kill()


def elsewhere(folder):
    """Writes the lock of an owner on another host."""
    text = "filelock/2\npid=7\nhost=elsewhere\nmode=lease\ntoken=0\nduration=1.0\n"
    (folder / "run.lock").write_text(text)


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


@pytest.mark.slow
def test_another_process_is_refused_while_the_owner_lives(tmp_path, monkeypatch, caplog):
    with holder(tmp_path) as process:
        with pytest.raises(UserError, match=f"in use by process {process.pid} on .*which is alive"):
            take(tmp_path)
        process.kill()
        process.wait()
        monkeypatch.setattr(run_lock, "LEASE_SECONDS", 60.0)
        began = time.monotonic()
        with owned(tmp_path) as check:  # at once, whatever the owner's lease was
            check()
        assert time.monotonic() - began < 30
    assert "is gone; its lock is taken over" in caplog.text and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_suspended_owner_detects_that_its_lock_was_taken_over(tmp_path):
    """The suspended run neither writes nor removes the lock of the other."""
    with holder(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        with owned(tmp_path) as check:
            process.send_signal(signal.SIGCONT)
            said = process.communicate("\n", timeout=60)[1]
            assert process.returncode == 1
            assert f"no longer this process's run: it was taken over by process {os.getpid()} on" in said
            check()


def test_untouched_lock_of_another_host_is_taken_over(tmp_path, caplog):
    elsewhere(tmp_path)
    began = time.monotonic()
    take(tmp_path)
    assert time.monotonic() - began >= 1.0 and "process 7 on elsewhere, which owned this run" in caplog.text


def test_touched_lock_of_another_host_is_not_taken_over(tmp_path):
    elsewhere(tmp_path)
    done, lock = threading.Event(), tmp_path / "run.lock"
    beats = threading.Thread(target=lambda: [os.utime(lock) for _ in iter(lambda: done.wait(0.1), True)])
    beats.start()
    try:
        with pytest.raises(UserError, match="process 7 on elsewhere .*which is alive.*remove that file"):
            take(tmp_path)
    finally:
        done.set()
        beats.join()
    assert "elsewhere" in lock.read_text()


def test_lock_is_taken_when_its_owner_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "LEASE_SECONDS", 60.0)
    elsewhere(tmp_path)
    (tmp_path / "run.lock").write_text((tmp_path / "run.lock").read_text().replace("1.0", "60.0"))
    threading.Timer(0.2, (tmp_path / "run.lock").unlink).start()
    began = time.monotonic()
    take(tmp_path)
    assert time.monotonic() - began < 30


def test_lock_of_an_earlier_version_is_taken_over(tmp_path, monkeypatch, caplog):
    """Earlier versions wrote JSON. A run that was killed left it behind."""
    monkeypatch.setattr(run_lock, "LEASE_SECONDS", 10.0)
    (tmp_path / "run.lock").write_text('{"pid": 7, "host": "elsewhere", "place": null, "began": "1"}')
    take(tmp_path)
    assert "in use by an unknown process" in caplog.text and "None" not in caplog.text


def test_empty_lock_is_taken_over(tmp_path):
    """A host that loses its power just after it created the lock leaves an empty file."""
    (tmp_path / "run.lock").touch()
    take(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("host", ["here", "elsewhere"])
def test_lock_is_taken_over_on_a_file_system_without_exchange_of_names(tmp_path, monkeypatch, host):
    """NFS and SMB refuse the system call with which filelock replaces the lock of a dead process."""
    names = [info.name for info in pkgutil.walk_packages(filelock.__path__, "filelock.")]
    modules = [module for module in map(importlib.import_module, names) if "exchange_names" in vars(module)]
    assert modules, "filelock has another way to replace a lock"
    for module in modules:  # each has its own reference to the function
        monkeypatch.setattr(module, "exchange_names", lambda source, target: False)
    if host == "elsewhere":
        elsewhere(tmp_path)
    else:
        with holder(tmp_path) as process:
            process.kill()
    with owned(tmp_path) as check:
        check()
    assert list(tmp_path.iterdir()) == []


def test_deleted_folder_or_lock_raises_an_error(tmp_path):
    with owned(tmp_path / "run") as check:
        (tmp_path / "run" / "run.lock").unlink()
        with pytest.raises(UserError, match=r"run/run\.lock was deleted .*Nothing more is written.* start it again"):
            check()
        (tmp_path / "run").rmdir()
        with pytest.raises(UserError, match=r"run was deleted .*Nothing more is written.*starts a new run"):
            check()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_only_one_of_many_processes_takes_over_a_dead_lock(tmp_path):
    for _ in range(4):
        with holder(tmp_path) as process:
            process.kill()
        start, results, done = threading.Barrier(8), [], threading.Event()

        def take_and_hold(done=done):
            with owned(tmp_path):
                done.wait()

        def race(start=start, results=results, hold=take_and_hold):
            start.wait()
            results.append(in_thread(hold))

        threads = [threading.Thread(target=race) for _ in range(8)]
        [thread.start() for thread in threads]
        while len(results) < 7:
            time.sleep(0.01)
        done.set()
        [thread.join() for thread in threads]
        assert sorted(type(result).__name__ for result in results) == ["NoneType"] + ["UserError"] * 7
        assert list(tmp_path.iterdir()) == []


def test_unwritable_folder_raises_a_message(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="run.lock cannot be written.*training.output_dir"):
        take(tmp_path / "file")
