"""The HTTP endpoint at which the program of one trajectory asks the policy, in the process of this trajectory.

It listens on this machine only, and refuses requests without the key of the trajectory. Each connection has a thread,
which reads a request, waits for its answer and writes it.
"""

from __future__ import annotations

import contextlib
import hmac
import http.server
import itertools
import json
import queue
import secrets
import socket
import threading
from collections.abc import Mapping
from typing import Any

from tunix_like.environments.agent_calls import Call, refusal_of
from tunix_like.environments.chat_messages import RequestError
from tunix_like.environments.protocol import MOST_CHARACTERS
from tunix_like.workers.routes import LOCAL, ROUTES

MOST_BYTES = 8 << 20
"""Maximum size of the body of a request."""

MOST_CONNECTIONS = 256
"""Maximum number of open connections. One more closes the oldest that has not shown the key, or is closed itself."""

_READ = 1 << 20


class Asked:
    """A request that waits for its answer.

    Attributes:
      text: the request for `unpacked_call`.
    """

    def __init__(self, call: Call, text: str, connection: socket.socket):
        self.call = call
        self.text = text
        self._connection = connection
        self._answer: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()

    def answer(self, message: Mapping[str, Any]) -> None:
        """Answers the request with a message of `agent_calls`."""
        self._answer.put(message)

    def wait(self) -> Mapping[str, Any]:
        return self._answer.get()

    def is_abandoned(self) -> bool:
        """Returns whether the program has closed the connection."""
        try:
            return not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


class Endpoint(http.server.ThreadingHTTPServer):
    """The endpoint of one trajectory. Its threads end with the process.

    Args:
      news: gets each request of the program that is valid, as an `Asked`.

    Attributes:
      key: the secret without which requests are refused.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, news: queue.SimpleQueue[Any]):
        super().__init__((LOCAL, 0), _Connection)
        self.key = secrets.token_urlsafe(32)
        self.news = news
        self.numbers = itertools.count()
        self.strangers: dict[socket.socket, None] = {}  # connections that have not shown the key; the oldest first

    @property
    def url(self) -> str:
        return f"http://{LOCAL}:{self.server_port}"

    def start(self) -> None:
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        if threading.active_count() > MOST_CONNECTIONS:
            if (oldest := next(iter(self.strangers), None)) is None:
                self.shutdown_request(request)
                return
            self.close_stranger(oldest)
        self.strangers[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.strangers.pop(request, None)
        super().shutdown_request(request)

    def close_stranger(self, connection: socket.socket) -> None:
        self.strangers.pop(connection, None)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Drops a connection that the program has closed before it was answered."""


class _Connection(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # an answer is one packet
    disable_nagle_algorithm = True
    server: Endpoint

    def do_POST(self) -> None:
        path = self.path.partition("?")[0]
        try:
            asked = self._asked(path)
        except RequestError as error:
            self._send(refusal_of(0, path, error.http, str(error)))
            return
        self.server.news.put(asked)
        self._send(asked.wait())

    def do_GET(self) -> None:
        self._send(refusal_of(0, self.path, 404, f"requests are POST, to {', '.join(ROUTES)}"))

    def _asked(self, path: str) -> Asked:
        """Reads and checks a request. Raises RequestError if it is refused."""
        body = self._body()
        given = self.headers.get("x-api-key") or self.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(errors="replace"), self.server.key.encode()):
            raise RequestError("the key of this trajectory is missing or wrong", http=401)
        self.server.strangers.pop(self.connection, None)
        if path not in ROUTES:
            raise RequestError(f"there is no route {path[:200]}; there are {', '.join(ROUTES)}", http=404)
        if body is None:
            raise RequestError(f"the body has more than {MOST_BYTES} bytes", http=413)
        try:
            content = json.loads(body)
        except (ValueError, RecursionError):
            raise RequestError("the body is not JSON") from None
        if not isinstance(content, dict):
            raise RequestError("the body must be a JSON object")
        call = Call.of(next(self.server.numbers), path, content)
        text = json.dumps([call.route, call.messages, call.variables])
        if len(text) > MOST_CHARACTERS:
            raise RequestError(f"the conversation has more than {MOST_CHARACTERS} characters", http=413)
        return Asked(call, text, self.connection)

    def _body(self) -> bytes | None:
        """Reads the body; None if it is larger than `MOST_BYTES`. Its bytes are read all the same, because the program
        would otherwise see a broken connection instead of the answer."""
        length = self.headers.get("content-length", "")
        if not length.isdecimal():
            self.close_connection = True  # where the next request begins is not known
            raise RequestError("the request needs the header content-length", http=411)
        left = int(length)
        if left <= MOST_BYTES:
            return self.rfile.read(left)
        while left > 0 and (part := self.rfile.read(min(left, _READ))):
            left -= len(part)
        return None

    def _send(self, message: Mapping[str, Any]) -> None:
        kind = "text/event-stream" if message["stream"] else "application/json"
        body = message["body"] if message["stream"] else json.dumps(message["body"])
        content = body.encode(errors="replace")
        self.send_response(message["status"])
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing."""


def unpacked_call(text: str) -> Call:
    """Returns the request of `Asked.text`, in the training process."""
    route, messages, variables = json.loads(text)
    return Call(0, route, messages, variables, stream=False)
