"""Tests run folders in object storage: what a kill at any moment leaves, other hosts, and uploads that fail or last."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
import threading
import time
from pathlib import Path

import fsspec
import jax.numpy as jnp
import numpy as np
import pytest

from tests.buckets import EMULATED, KINDS, SERVERS, InMemory, bucket_in, objects
from tests.stress.kill_bucket import stress
from tunix_like.errors import NotSaved, UserError
from tunix_like.rollout.files import remove_steps_after
from tunix_like.storage import bucket_lock, mirror
from tunix_like.storage.checkpoints import Checkpoints
from tunix_like.storage.metrics import MetricsLog, rows
from tunix_like.storage.mirror import local_folder
from tunix_like.storage.output_folder import check_target
from tunix_like.storage.run_lock import owned


@pytest.fixture(params=KINDS)
def url(request, tmp_path, quick):
    with bucket_in(request.param, tmp_path) as bucket:
        yield f"{bucket}/runs/one"


@pytest.fixture
def memory(tmp_path, quick):
    with bucket_in("memory", tmp_path) as bucket:
        yield f"{bucket}/runs/one"


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(bucket_lock, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(bucket_lock, "LEASE_SECONDS", 0.5)
    monkeypatch.setattr(mirror, "SCAN_SECONDS", 0.01)
    monkeypatch.setattr(mirror, "FILES_SECONDS", 0.01)
    monkeypatch.setattr(mirror, "LONGEST_WAIT", 0.02)
    monkeypatch.setattr(mirror.time, "sleep", lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.05)))


def weights(step):
    return {"w": np.full([100], step, np.float32)}


def train(folder, last, keep=2, every=lambda: None):
    """Does the steps up to `last` of a run that writes what `training.loop.run` writes, after a resume of its newest
    checkpoint. Returns the step from which it resumed."""
    (folder / "config.yaml").write_text("{}")
    with Checkpoints(folder / "checkpoints", keep) as checkpoints:
        first = checkpoints.newest() or 0
        if first:
            state, _ = checkpoints.restore(first, weights(0))
            np.testing.assert_array_equal(state["w"], weights(first)["w"])
        log = MetricsLog(folder)
        log.cut("step", first)
        (folder / "rollouts").mkdir(exist_ok=True)
        remove_steps_after(folder / "rollouts", first)
        for step in range(first + 1, last + 1):
            log.write({"step": step, "value": step / 7})
            (folder / "rollouts" / f"step_{step:06d}.jsonl").write_text(f"{step}\n")
            if step % 2 == 0 or step == last:
                checkpoints.save(step, {name: jnp.asarray(value) for name, value in weights(step).items()})
                checkpoints.wait()
            every()
    return first


def check_whole(folder, last):
    """Checks that a folder has all that a run of `last` steps leaves, and no more."""
    assert rows(folder) == [{"step": step, "value": step / 7} for step in range(1, last + 1)]
    found = {path.name: path.read_text() for path in (folder / "rollouts").iterdir()}
    assert found == {f"step_{step:06d}.jsonl": f"{step}\n" for step in range(1, last + 1)}
    with Checkpoints(folder / "checkpoints") as checkpoints:
        assert checkpoints.newest() == last
        np.testing.assert_array_equal(checkpoints.restore(last, weights(0))[0]["w"], weights(last)["w"])


@contextlib.contextmanager
def another_host(tmp_path, monkeypatch):
    """A context without the local copies made so far."""
    with monkeypatch.context() as patch:
        patch.setenv("TUNIX_LIKE_CACHE", str(tmp_path / f"cache{time.monotonic_ns()}"))
        yield


def copied(url, target):
    system, root = fsspec.core.url_to_fs(url)
    for name in objects(url):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        system.get_file(f"{root}/{name}", str(target / name))
    return target


def test_a_run_goes_on_here_and_on_another_host(url, tmp_path, monkeypatch):
    with owned(url):
        assert train(local_folder(url), 3) == 0
    check_whole(copied(url, tmp_path / "a"), 3)
    with monkeypatch.context() as patch:
        patch.setattr(mirror.Mirror, "_get", None)  # nothing is downloaded on the same host
        with owned(url):
            assert train(local_folder(url), 5) == 3
    with another_host(tmp_path, monkeypatch), owned(url):
        assert train(local_folder(url), 8) == 5
        with owned(local_folder(url)) as check:  # as the learner of the run does
            check()
    names = objects(url)
    assert {name.split("/")[1] for name in names if name.startswith("checkpoints/")} == {"6", "8"}
    assert not any(name.startswith("mirror.json") or name.endswith((".tmp", ".part")) for name in names)
    with owned(url):  # the copy of the first host is out of date
        assert train(local_folder(url), 9) == 8
    check_whole(copied(url, tmp_path / "b"), 9)


@pytest.mark.slow
def test_each_state_of_the_bucket_can_be_resumed(memory, tmp_path, monkeypatch):
    """The states after each write or removal of an object are those that a kill can leave."""
    monkeypatch.setattr(mirror, "FILES_SECONDS", 1e6)  # files are stored only before checkpoints
    states, lock = [], threading.Lock()

    def recorded(name):
        original = getattr(InMemory, name)

        def call(self, *arguments, **named):
            with lock:
                result = original(self, *arguments, **named)
                states.append(dict(InMemory.store))
            return result

        monkeypatch.setattr(InMemory, name, call)

    for name in ("put_file", "rm_file"):
        recorded(name)
    with owned(memory):
        train(local_folder(memory), 6, every=lambda: time.sleep(0.05))
    with another_host(tmp_path, monkeypatch), owned(memory):
        folder = local_folder(memory)
        (folder / "checkpoints" / "6" / "checksums.json").write_text("damaged only here")
        assert train(folder, 9, every=lambda: time.sleep(0.05)) == 4
    monkeypatch.undo()
    with bucket_in("memory", tmp_path / "again"):
        monkeypatch.setattr(mirror, "SCAN_SECONDS", 0.01)
        monkeypatch.setattr(mirror, "_each", lambda work, items: [work(item) for item in items])
        resumed = set()
        for state in states:
            InMemory.store.clear()
            InMemory.store |= {name: copy.copy(file) for name, file in state.items() if "/run.lock/" not in name}
            with another_host(tmp_path, monkeypatch), owned(memory):
                folder = local_folder(memory)
                with Checkpoints(folder / "checkpoints") as checkpoints:
                    step = checkpoints.newest() or 0
                    resumed.add(step)
                kept = [row for row in rows(folder) if row["step"] <= step]
                assert [row["step"] for row in kept] == list(range(1, step + 1))
                for each in range(1, step + 1):
                    assert (folder / "rollouts" / f"step_{each:06d}.jsonl").read_text() == f"{each}\n"
    assert len(states) > 50 and {0, 4, 6, 9} <= resumed


def test_an_upload_that_fails_is_repeated(url, tmp_path, monkeypatch, caplog):
    system, _ = fsspec.core.url_to_fs(url)
    put, failed = system.put_file, []

    def lose(source, target, *arguments, **named):
        if failed.count(target) < 2:
            failed.append(target)
            raise OSError("the connection was reset")
        return put(source, target, *arguments, **named)

    monkeypatch.setattr(system, "put_file", lose)
    with owned(url):
        train(local_folder(url), 3)
    check_whole(copied(url, tmp_path / "a"), 3)
    warnings = [record.getMessage() for record in caplog.records if "cannot be written" in record.getMessage()]
    assert warnings and all(f"{url} cannot be written" in text and "reset" in text for text in warnings)
    assert len(failed) > 2 * len(warnings)  # one warning for a series of failures


@pytest.mark.parametrize("lost", ["checkpoints/4/", "metrics.jsonl"])
def test_what_cannot_be_stored_stays_here(memory, tmp_path, monkeypatch, lost):
    """The next start on this host stores it, and the bucket never has a checkpoint without its metrics."""
    with owned(memory):
        train(local_folder(memory), 2)
    put = InMemory.put_file

    def refuse(self, source, target, *arguments, **named):
        if lost in target:
            raise OSError("no quota")
        return put(self, source, target, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(InMemory, "put_file", refuse)
        patch.setattr(mirror, "GIVE_UP_SECONDS", 0.2)
        with pytest.raises(NotSaved, match="could not be stored .*no quota.*is in") as caught, owned(memory):
            train(local_folder(memory), 4)
        assert str(local_folder(memory)) in str(caught.value) and not caught.value.stopped
        with pytest.raises(ZeroDivisionError), owned(memory):  # the error of the run is the one that is raised
            raise ZeroDivisionError
        with pytest.raises(NotSaved) as caught, owned(memory):
            raise SystemExit(75)
        assert caught.value.stopped
    assert "checkpoints/4/_CHECKPOINT_METADATA" not in objects(memory)
    with owned(memory):
        assert train(local_folder(memory), 4) == 4
    check_whole(copied(memory, tmp_path / "a"), 4)


def test_a_slow_upload_does_not_hold_the_run(memory, tmp_path, monkeypatch):
    """Its checkpoint is whole in the bucket although the run has removed it meanwhile; those between are left out."""
    put, reached, go_on, stored = InMemory.put_file, threading.Event(), threading.Event(), []

    def slow(self, source, target, *arguments, **named):
        if "/checkpoints/2/" in target:
            reached.set()
            assert go_on.wait(60)
        if target.endswith("/_CHECKPOINT_METADATA"):
            stored.append(int(target.split("/")[-2]))
        return put(self, source, target, *arguments, **named)

    monkeypatch.setattr(InMemory, "put_file", slow)
    with owned(memory):
        folder = local_folder(memory)
        train(folder, 2, keep=1)
        assert reached.wait(60)
        train(folder, 10, keep=1)
        assert [path.name for path in (folder / "checkpoints").iterdir()] == ["10"] and stored == []
        go_on.set()
    assert stored == [2, 10]
    check_whole(copied(memory, tmp_path / "a"), 10)


def test_a_damaged_object_costs_one_checkpoint(memory, tmp_path, monkeypatch):
    with owned(memory):
        train(local_folder(memory), 4)
    system, root = fsspec.core.url_to_fs(memory)
    largest = max((path for path in system.find(f"{root}/checkpoints/4/state")), key=system.size)
    system.pipe_file(largest, system.cat_file(largest)[:-1] + b"?")
    with another_host(tmp_path, monkeypatch), owned(memory):
        assert train(local_folder(memory), 3) == 2
        assert (local_folder(memory) / "checkpoints" / "4.damaged").is_dir()
    check_whole(copied(memory, tmp_path / "a"), 3)
    assert not any(name.startswith("4/") for name in objects(f"{memory}/checkpoints"))


def test_a_run_that_was_taken_over_writes_nothing_more(memory, monkeypatch):
    with pytest.raises(UserError, match="it was taken over by process 7 on elsewhere"):
        with owned(memory) as check:
            train(local_folder(memory), 2)
            system, root = fsspec.core.url_to_fs(memory)
            other = {"token": "x", "process": 7, "host": "elsewhere", "since": "now", "beat": 0, "held": True}
            system.pipe_file(f"{root}/run.lock/000009", json.dumps(other).encode())
            time.sleep(0.1)
            before = objects(memory)
            train(local_folder(memory), 4)
            limit = time.monotonic() + 30
            while time.monotonic() < limit:
                check()
                time.sleep(0.01)
    assert [name for name in objects(memory) if "/4/" in name] == [] and before
    assert "run.lock/000009" in objects(memory)


def test_other_objects_are_left_alone(memory):
    system, root = fsspec.core.url_to_fs(memory)
    system.pipe_file(f"{root}/photo.jpg", b"1")
    with pytest.raises(UserError, match="has objects and is not a run folder; choose another"), owned(memory):
        pass
    assert [name for name in objects(memory) if not name.startswith("run.lock/")] == ["photo.jpg"]


def test_a_deleted_local_file_is_fetched_again(memory):
    """Not the bucket follows a local copy that somebody has emptied."""
    with owned(memory):
        train(local_folder(memory), 4)
    folder = local_folder(memory)
    shutil.rmtree(folder / "checkpoints")
    (folder / "metrics.jsonl").unlink()
    with owned(memory):
        assert train(folder, 5) == 4
        check_whole(folder, 5)


@pytest.mark.parametrize("storage", [pytest.param(name, marks=EMULATED) for name in SERVERS])
def test_a_killed_run_equals_an_uninterrupted_one(storage, tmp_path):
    assert stress(storage, kills=2, seed=0, folder=tmp_path)


def test_a_start_that_fails_leaves_no_old_copy_that_counts_as_new(memory, tmp_path, monkeypatch):
    with owned(memory):
        train(local_folder(memory), 2)
    with another_host(tmp_path, monkeypatch), owned(memory):
        train(local_folder(memory), 5)
    find, failed = mirror.object_storage.find, []

    def fail_once(system, root):
        if not failed and not root.endswith("run.lock"):
            failed.append(root)
            raise OSError("503")
        return find(system, root)

    monkeypatch.setattr(mirror.object_storage, "find", fail_once)
    with pytest.raises(UserError, match="503"), owned(memory):
        pass
    with owned(memory):
        check_whole(local_folder(memory), 5)
    check_whole(copied(memory, tmp_path / "a"), 5)


def test_a_checkpoint_that_is_removed_during_the_copy_is_not_stored(memory, monkeypatch):
    copytree, removed = shutil.copytree, []

    def copy_a_part(source, target, *arguments, **named):
        if not removed and Path(source).name == "2":  # copytree calls itself with strings
            removed.append(source)
            shutil.rmtree(source / "state")
            copytree(source, target, *arguments, **named)
            shutil.rmtree(source)
            return
        copytree(source, target, *arguments, **named)

    monkeypatch.setattr(mirror.shutil, "copytree", copy_a_part)
    with owned(memory):
        train(local_folder(memory), 2)
        while not removed:
            time.sleep(0.01)
    assert not [name for name in objects(memory) if name.startswith("checkpoints/2/")]


def test_a_removed_checkpoint_whose_upload_failed_leaves_nothing(memory, tmp_path, monkeypatch, caplog):
    put, failed = InMemory.put_file, threading.Event()

    def refuse(self, source, target, *arguments, **named):
        if "/checkpoints/2/" in target and target.endswith("_CHECKPOINT_METADATA"):
            failed.set()
            raise OSError("no quota")
        return put(self, source, target, *arguments, **named)

    monkeypatch.setattr(InMemory, "put_file", refuse)
    with owned(memory):
        folder = local_folder(memory)
        train(folder, 2, keep=1)
        assert failed.wait(60)
        train(folder, 4, keep=1)
    assert not [name for name in objects(memory) if name.startswith("checkpoints/2/")]
    assert not list((tmp_path / "cache" / "uploads").rglob("2"))
    check_whole(copied(memory, tmp_path / "a"), 4)


def test_an_export_replaces_no_run(memory):
    with owned(memory):
        train(local_folder(memory), 2)
    before = objects(memory)
    runs = memory.rpartition("/")[0]
    for target in (memory, runs, f"{memory}/model", f"{memory}/model/a", f"{memory}/checkpoints/2/state"):
        with pytest.raises(UserError, match="so an export does not replace it"):
            check_target(target, overwrite=True)
    check_target(f"{runs}/model", overwrite=True)
    assert objects(memory) == before


def test_a_ctrl_c_outside_the_steps_gives_the_folder_back(memory, tmp_path, monkeypatch):
    """In a notebook the process goes on; without an end of the threads, its lock would stay alive for other hosts."""
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt), owned(memory):
        raise KeyboardInterrupt
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
    assert set(threading.enumerate()) <= before
    with another_host(tmp_path, monkeypatch), owned(memory):
        assert train(local_folder(memory), 2) == 0


def test_files_of_the_user_in_the_bucket_stay_there(memory, tmp_path, monkeypatch):
    """Also below the folders whose files are not stored one by one."""
    with owned(memory):
        train(local_folder(memory), 2)
    system, root = fsspec.core.url_to_fs(memory)
    names = ["checkpoints/notes.txt", "checkpoints/009/state", "notes.tmp", "engine_weights/notes", "notes.txt"]
    for name in names:
        system.pipe_file(f"{root}/{name}", b"mine")
    with another_host(tmp_path, monkeypatch), owned(memory):
        train(local_folder(memory), 3)
    assert set(names) <= set(objects(memory))
