"""Limits of the connections of the HTTP server, which hold before a request shows its API key: their number, and the
time and the size of headers."""

from __future__ import annotations

import asyncio
import os
import resource
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0
"""Seconds in which a connection must send the headers of its first or next request."""

MOST_HEADER_BYTES = 64 * 1024

MOST_CONNECTIONS = 4096

ACCEPTED_AT_ONCE = 32
"""Maximum number of connections that are accepted before the limit is checked again."""


def http_config(app: ASGIApp, most: int | None = None, **options: Any) -> uvicorn.Config:
    """Returns the configuration of a server of `app` with at most `most` connections; None: as many as the limit of
    open files allows. One more connection closes the one that has waited longest for the headers of a request."""

    class LimitedConnection(_Connection):
        limit = most_connections() if most is None else most
        waiting: dict[_Connection, None] = {}  # noqa: RUF012 (of this server); the oldest first

    # The messages below the level `error` are of single requests, which anybody could repeat to fill the disk.
    return uvicorn.Config(
        app,
        http=LimitedConnection,
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        backlog=ACCEPTED_AT_ONCE,
        h11_max_incomplete_event_size=MOST_HEADER_BYTES,
        **options,
    )


def most_connections() -> int:
    """Raises the soft limit of open files, and returns how many connections it allows beside the open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MOST_CONNECTIONS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    free = wanted if soft == resource.RLIM_INFINITY else soft - len(os.listdir("/dev/fd"))
    return max(1, min(MOST_CONNECTIONS, free - ACCEPTED_AT_ONCE, free // 2))


class _Connection(H11Protocol):
    limit: int
    waiting: dict[_Connection, None]
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        while len(self.connections) >= self.limit:
            oldest = next(iter(self.waiting), None)
            if oldest is None:
                break
            oldest._close()
        super().connection_made(transport)
        if len(self.connections) > self.limit:
            self._close()
        else:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._stop_waiting()

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # The body is invalid, and the answer of the application would be a second one.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self._close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:
            self._wait()

    def _wait(self) -> None:
        self._stop_waiting()
        self.waiting[self] = None
        self._deadline = self.loop.call_later(HEADER_SECONDS, self._close)

    def _stop_waiting(self) -> None:
        self.waiting.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close(self) -> None:
        self._stop_waiting()
        self.connections.discard(self)
        self.transport.abort()
