"""Tests the lock of a run folder in object storage: one owner, and not a dead one."""

from __future__ import annotations

import json
import threading

import fsspec
import pytest

from tests.buckets import KINDS, bucket_in, objects
from tunix_like.errors import UserError
from tunix_like.storage import bucket_lock
from tunix_like.storage.bucket_lock import BucketLock


@pytest.fixture(scope="module", params=KINDS)
def storage(request, tmp_path_factory):
    with bucket_in(request.param, tmp_path_factory.mktemp("bucket")) as url:
        yield url


@pytest.fixture
def url(storage, request, monkeypatch):
    monkeypatch.setattr(bucket_lock, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(bucket_lock, "LEASE_SECONDS", 1.0)
    return f"{storage}/{request.node.originalname}"


def test_a_living_owner_is_named(url):
    first = BucketLock(url)
    assert first.acquire(()) is False
    with pytest.raises(UserError, match=rf"{url} is in use by process \d+ on \S+ since .*, which is alive"):
        BucketLock(url).acquire(())
    first.check()
    first.release()
    second = BucketLock(url)
    second.acquire(())
    with pytest.raises(UserError, match="it was taken over by process"):
        first.check()
    second.release()


def test_a_silent_owner_loses_the_folder(url):
    dead = BucketLock(url)
    dead.acquire(())
    dead._ended.set()  # no beat and no release, as after SIGKILL
    dead._thread.join()
    heir = BucketLock(url)
    assert heir.acquire(()) is False
    with pytest.raises(UserError, match="it was taken over by process"):
        dead.check()
    dead._system.pipe_file(dead._path(dead._number), dead._content())  # it was only suspended, and beats again
    heir.check()
    heir.release()
    heir.check()


def test_an_owner_known_to_be_gone_is_not_waited_for(url, monkeypatch):
    monkeypatch.setattr(bucket_lock, "LEASE_SECONDS", 1e6)
    dead = BucketLock(url)
    dead.acquire(())
    dead._ended.set()
    dead._thread.join()
    heir = BucketLock(url)
    assert heir.acquire(["other", dead.token]) is True
    heir.release()


def test_a_deleted_lock_is_noticed(url):
    lock = BucketLock(url)
    lock.acquire(())
    lock._ended.set()
    lock._thread.join()
    lock._system.rm_file(lock._path(lock._number))
    with pytest.raises(UserError, match="its lock was deleted"):
        lock.check()


def test_one_of_many_takes_the_folder(url):
    locks = [BucketLock(url) for _ in range(6)]
    begin, taken, refused = threading.Barrier(len(locks)), [], []

    def take(lock):
        begin.wait()
        try:
            lock.acquire(())
            taken.append(lock)
        except UserError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=take, args=[lock]) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1 and len(refused) == 5 and all("which is alive" in text for text in refused)
    (owner,) = taken
    owner.check()
    owner.release()
    (name,) = objects(f"{url}/run.lock")
    system, root = fsspec.core.url_to_fs(f"{url}/run.lock/{name}")
    assert json.loads(system.cat_file(root)) | {"beat": 0} == {
        "token": owner.token, "process": owner._own.process, "host": owner._own.host, "since": owner._own.since,
        "beat": 0, "held": False,
    }  # fmt: skip


def test_a_bucket_that_cannot_be_written(url, monkeypatch):
    lock = BucketLock(url)

    def refuse(*_, **__):
        raise PermissionError("403, the account may not write")

    monkeypatch.setattr(lock._system, "pipe_file", refuse)
    with pytest.raises(UserError, match=f"training.output_dir: {url} cannot be written: .*may not write"):
        lock.acquire(())
