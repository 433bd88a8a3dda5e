"""Buckets for tests: in memory, or in emulators of S3 and of Google Cloud Storage, which are processes of their own and
are looked for in the folder `TUNIX_LIKE_EMULATORS` (docs/contributing.md)."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

EMULATORS = os.environ.get("TUNIX_LIKE_EMULATORS")
SERVERS = {
    "s3": ["moto_server", "-H", "127.0.0.1", "-p", "{port}"],
    "gs": ["gcp-storage-emulator", "start", "--host", "127.0.0.1", "--port", "{port}", "--in-memory"],
}
EMULATED = [pytest.mark.slow, pytest.mark.skipif(EMULATORS is None, reason="TUNIX_LIKE_EMULATORS: no folder of them")]
KINDS = ["memory", *(pytest.param(name, marks=EMULATED) for name in SERVERS)]


class InMemory(MemoryFileSystem):
    """Takes the place of `gs://`."""

    protocol = "gs"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("gs://", "memory://"))


@contextlib.contextmanager
def bucket_in(kind, folder):
    """Yields the address of an empty bucket in memory or in the emulator `kind`. `folder` gets its log and the cache of
    local copies. The variables of the environment reach child processes."""
    patch = pytest.MonkeyPatch()
    patch.setenv("TUNIX_LIKE_CACHE", str(folder / "cache"))
    if kind == "memory":
        patch.setitem(sys.modules["fsspec.registry"]._registry, "gs", InMemory)
        InMemory.store.clear()
        yield "gs://bucket"
        patch.undo()
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", folder / "log"
    program, *arguments = (part.format(port=port) for part in SERVERS[kind])
    for name, value in {
        "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key",
        "AWS_DEFAULT_REGION": "us-east-1", "STORAGE_EMULATOR_HOST": url,
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # it would ask Google for the kind of the bucket
    }.items():  # fmt: skip
        patch.setenv(name, value)
    with log.open("wb") as out:
        server = subprocess.Popen([shutil.which(program, path=EMULATORS), *arguments], stdout=out, stderr=out)
    limit = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(url, timeout=5)
            break
        except urllib.error.HTTPError:
            break
        except OSError:
            assert time.monotonic() < limit and server.poll() is None, log.read_text()
            time.sleep(0.1)
    fsspec.filesystem(kind, skip_instance_cache=True).mkdir("bucket")
    try:
        yield f"{kind}://bucket"
    finally:
        server.kill()
        server.wait()
        fsspec.get_filesystem_class(kind).clear_instance_cache()  # another emulator has another port
        patch.undo()


def objects(url):
    """Returns the names of the objects below an address."""
    system, root = fsspec.core.url_to_fs(url)
    system.invalidate_cache()
    return sorted(path.removeprefix(f"{root}/") for path in system.find(root))
