"""Tests the server against clients without an API key: connections that are not used or not read, headers without an
end, requests that are none, names of other machines, and large bodies."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import resource
import socket
import threading
import time

import httpx
import pytest

from tests.serving import served
from tunix_like.serving import app, connections, requests

KEY, MOST = "secret", 8


@pytest.fixture(scope="module")
def letters():
    return served.letters()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.5)


@pytest.fixture
def keyed(letters, quick):
    with served.running(*letters, key=KEY, most=MOST) as (url, server):
        yield url, server


def connect(url, sent=b""):
    host, port = url.removeprefix("http://").split(":")
    opened = socket.create_connection((host, int(port)), timeout=10)
    opened.sendall(sent)
    return opened


def ended(opened):
    """Reads until the server closes the connection, and returns what it sent."""
    got = b""
    with contextlib.suppress(ConnectionError):
        while part := opened.recv(1 << 16):
            got += part
    return got


def is_healthy(url):
    return httpx.get(f"{url}/health", timeout=5).status_code == 200


def test_connections_that_wait_make_room(keyed):
    url, _ = keyed
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(connect(url, b"GET /hea" * (i % 2))) for i in range(10 * MOST)]
        began = time.monotonic()
        assert is_healthy(url) and time.monotonic() - began < 5
        for each in opened:
            assert ended(each) == b""
    assert is_healthy(url)


def test_headers_have_a_time(keyed):
    """They come byte by byte, after those of a request with the key."""
    url, _ = keyed
    began, first = time.monotonic(), b"GET /v1/models HTTP/1.1\r\nhost: a\r\nx-api-key: secret\r\n\r\n"
    with connect(url) as opened, contextlib.suppress(ConnectionError):
        for byte in first + b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 1000:
            opened.sendall(bytes([byte]))
            time.sleep(0.005 if time.monotonic() - began < 0.4 else 0.02)
        raise AssertionError("the server waits for headers without an end")
    assert time.monotonic() - began < 5


def test_all_requests_at_work_keep_their_connections(letters, quick):
    """No further connection is accepted, and the requests end as usual."""
    with served.running(*letters, most=2) as (url, server), concurrent.futures.ThreadPoolExecutor(2) as pool:
        body = {"prompt": "a>", "max_tokens": 150, "temperature": 0}
        posts = [pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60) for _ in range(2)]
        while len(server.queues) < 2:
            time.sleep(0.001)
        with connect(url) as opened:
            assert ended(opened) == b""
        assert [post.result().status_code for post in posts] == [200, 200]


ENDLESS = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
REQUESTS = {
    "nothing": b"\r\n\r\n",
    "binary": bytes(range(256)) * 8,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 300,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "HTTP/9.9": b"GET /health HTTP/9.9\r\nhost: a\r\n\r\n",
    "no host": b"GET /v1/models HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    "long target": b"GET /" + b"a" * 300_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
    "long header": b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 300_000 + b"\r\n\r\n",
    "many headers": b"GET /health HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * 100_000 + b"\r\n",
    "folded header": b"GET /health HTTP/1.1\r\nhost: a\r\nx: y\r\n" + b" z\r\n" * 30_000 + b"\r\n",
    "header with NUL": b"GET /health HTTP/1.1\r\nhost: a\r\nx: \x00\r\n\r\n",
    "target with escapes": b"GET /%ff%00%0d%0a HTTP/1.1\r\nhost: a\r\n\r\n",
    "key with UTF-8": b"GET /v1/models HTTP/1.1\r\nhost: a\r\nauthorization: Bearer \xc3\xa9\xff\r\n\r\n",
    "long key": b"GET /v1/models HTTP/1.1\r\nhost: a\r\nx-api-key: " + b"k" * 60_000 + b"\r\n\r\n",
    "upgrade": b"GET /v1/models HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n",
    "connect": b"CONNECT example.com:443 HTTP/1.1\r\nhost: example.com:443\r\n\r\n",
    "trace": b"TRACE / HTTP/1.1\r\nhost: a\r\n\r\n",
    "absolute target": b"GET http://example.com/v1/models HTTP/1.1\r\nhost: a\r\n\r\n",
    "two lengths": ENDLESS + b"content-length: 5\r\ncontent-length: 6\r\n\r\nabcdef",
    "negative length": ENDLESS + b"content-length: -1\r\n\r\n",
    "huge length": ENDLESS + b"content-length: 99999999999999999999\r\n\r\n{",
    "length and chunks": ENDLESS
    + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /x HTTP/1.1\r\n\r\n",
    "chunk without end": ENDLESS + b"transfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n{",
    "chunk extension": ENDLESS + b"transfer-encoding: chunked\r\n\r\n1;" + b"a" * 300_000,
    "waits for continue": ENDLESS + b"expect: 100-continue\r\ncontent-length: 1000\r\n\r\n",
    "pipelined": b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n" * 5000,
    "pipelined without key": b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n" * 5000,
}


@pytest.mark.parametrize("sent", REQUESTS.values(), ids=REQUESTS)
def test_requests_without_a_key_are_answered_and_closed(keyed, sent, caplog):
    url, _ = keyed
    caplog.set_level(logging.DEBUG)
    with connect(url) as opened:
        with contextlib.suppress(ConnectionError):
            opened.sendall(sent)
        got = ended(opened)
    assert b" 200 " not in got.partition(b"\r\n")[0] or sent.startswith(b"GET /health HTTP")
    assert got.count(b"HTTP/1.1 ") <= 1 and is_healthy(url)
    assert not [record for record in caplog.records if record.exc_info or record.name.startswith("uvicorn")]


def test_a_body_without_an_end_does_not_keep_a_connection_without_a_key(keyed):
    url, _ = keyed
    with connect(url, ENDLESS + b"transfer-encoding: chunked\r\n\r\n") as opened, pytest.raises(ConnectionError):
        for _ in range(100_000):
            opened.sendall(b"1000\r\n" + b"x" * 4096 + b"\r\n")
    assert is_healthy(url)


HOSTS = {
    200: ["localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:8000", "127.1.2.3", "[::1]", "[::1]:8000", "localhost:"],
    403: ["example.com", "localhost.example.com", "127.0.0.1.nip.io", "0.0.0.0", "192.0.2.1:8000", "[fe80::1]", "::1",
          "localhost@example.com", "localhost:x", "127.0.0.1:80:80", "127.1", "0x7f.1", "2130706433",
          "[::ffff:1.2.3.4]", "localhost,example.com", "", "\xff", "localhost "[:-1] + "\t.com", "[127.0.0.1"],
}  # fmt: skip


@pytest.fixture(scope="module")
def open_to_all(letters):
    with served.running(*letters) as (url, server):
        yield url, server


@pytest.mark.parametrize("status, host", [(status, host) for status, hosts in HOSTS.items() for host in hosts])
@pytest.mark.parametrize("path", ["/v1/models", "/health"])
def test_without_a_key_only_names_of_this_machine_are_answered(open_to_all, status, host, path):
    answer = httpx.get(f"{open_to_all[0]}{path}", headers=[("host", host.encode("latin1"))])
    assert answer.status_code in {200: [200], 403: [403, 400]}[status], answer.text


def test_large_bodies_are_parsed_one_after_the_other(letters, monkeypatch):
    at_once, most, lock = 0, 0, threading.Lock()

    def count(body, *_):
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.1)
        with lock:
            at_once -= 1
        return len(body)

    monkeypatch.setattr(app, "LARGE", 1000)
    monkeypatch.setattr(requests, "count_request", count)
    with served.running(*letters) as (url, server), concurrent.futures.ThreadPoolExecutor(8) as pool:
        call = lambda _: httpx.post(f"{url}{app.MESSAGES}/count_tokens", json="x" * 2000, timeout=60)  # noqa: E731
        assert [answer.json() for answer in pool.map(call, range(8))] == [{"input_tokens": 2002}] * 8
        assert most == 1 and server.read == 0


def test_all_bodies_have_a_limit(open_to_all, monkeypatch):
    """Bodies that do not end are counted while they are read."""
    url, server = open_to_all
    monkeypatch.setattr(app, "MOST_READ", 100_000)
    start = ENDLESS.replace(b"host: a", b"host: localhost") + b"content-length: 90000\r\n\r\n"
    with connect(url, start + b"x" * 60_000), connect(url, start + b"x" * 60_000) as second:
        assert b" 429 " in second.recv(100)
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x" * 50_000}).status_code == 429
    while server.read:
        time.sleep(0.01)
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "x" * 50_000}).status_code == 400


def test_the_number_of_connections_follows_the_limit_of_open_files(monkeypatch):
    few = 200 - len(os.listdir("/dev/fd")) - connections.ACCEPTED_AT_ONCE
    unlimited = resource.RLIM_INFINITY
    for limits, least, most in [((200, 200), 1, few), ((1024, 1 << 20), 4000, 4096), ((unlimited,) * 2, 4096, 4096)]:
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
        assert least <= connections.most_connections() <= most
