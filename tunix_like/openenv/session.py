"""Exchanges messages with an OpenEnv server: reads the schemas of the server over HTTP, and opens a WebSocket session
for each trajectory.

The client of the package `openenv` is not used. The package depends on about 100 other packages. The client also
replaces a lost connection by a new session. The next step would then run in an environment that was never reset.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from tunix_like.environments.deadline import patience
from tunix_like.environments.protocol import show
from tunix_like.errors import EnvironmentMisconfigured, EnvironmentUnavailable, UserError, one_line

ANSWER_SECONDS = 10.0
"""Maximum seconds for the answer to an HTTP request. These requests are sent before training."""

MOST_BYTES = 100 << 20
"""Maximum size in bytes of a message from a server. The client of OpenEnv has the same limit. Observations are later
cut to a much smaller size."""

_MOST_REASON = 500

MOST_WAITING_SECONDS = 60.0
"""Maximum seconds for which attempts to open a session are repeated."""

PAUSES = (0.1, 2.0)
"""Pause in seconds after the first failed attempt to open a session, and maximum pause. The pause doubles after each
further failed attempt."""

_GATEWAY_ERRORS = (502, 503, 504)  # HTTP statuses of a proxy whose server does not answer
_SERVER_STOPS = (1001, 1012)  # WebSocket codes of a server that ends or restarts


class InvalidAction(Exception):
    """The text of a turn is not a valid action, or the action does not match the schema of the server. The error
    message gives the reason. The session continues."""


class ServerFull(EnvironmentMisconfigured):
    """The server already has its maximum number of sessions."""


def checked_url(url: Any) -> str:
    """Returns the address of a server without a slash at the end. Raises UserError if it does not have the form
    http://HOST or https://HOST, with an optional port and path."""
    problem = f"environment.arguments: url is {show(url)}; write the address of the server, e.g. http://127.0.0.1:8000."
    if not isinstance(url, str):
        raise UserError(problem)
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # e.g. the port is not a number
        valid = False
    if not valid or parts.query or parts.fragment:
        raise UserError(problem)
    return url.rstrip("/")


def require_websockets() -> None:
    """Raises UserError if the package `websockets` is missing or older than 15."""
    try:
        from websockets import sync  # noqa: F401
        from websockets.version import version
    except ImportError as error:
        raise UserError(
            f"environment.name=openenv: it needs the package websockets ({one_line(error)}); run pip install "
            "'tunix-like[openenv]'."
        ) from error
    if int(version.split(".")[0]) < 15:
        raise UserError(
            f"environment.name=openenv: it needs websockets 15 or newer, and this is {version}; run pip install "
            "'tunix-like[openenv]'."
        )


def schemas_of_server(url: str) -> dict[str, Any]:
    """Returns the JSON schemas of a server by name: `action`, `observation`, `state`. Raises UserError if the server
    cannot be reached, or is not an OpenEnv server."""
    answer = _ask(url, "/schema")
    if not isinstance(answer, dict) or not isinstance(answer.get("action"), dict):
        raise UserError(f"OpenEnv server {url}: {url}/schema has no schema of actions; is it an OpenEnv server?")
    return answer


def tools_of_server(url: str) -> list[dict[str, Any]]:
    """Returns the JSON schemas of the tools of a server, as chat templates take them."""
    answer = _ask(url, "/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}})
    try:
        return [_schema(tool) for tool in answer["result"]["tools"]]
    except (TypeError, KeyError, AttributeError):
        raise UserError(
            f"OpenEnv server {url}: it did not list its tools, but sent {show(answer)}; is it an OpenEnv server?"
        ) from None


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    parameters = tool.get("inputSchema") or tool.get("input_schema") or {"type": "object", "properties": {}}
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": function}


def _ask(url: str, path: str, content: Any = None) -> Any:
    """Sends one request over HTTP, with `content` as JSON unless it is None, and returns the JSON of the answer."""
    data = None if content is None else json.dumps(content).encode()
    kind: type[UserError] = UserError
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    proxies = urllib.request.ProxyHandler({} if _is_here(url) else None)
    try:
        with urllib.request.build_opener(proxies).open(request, timeout=ANSWER_SECONDS) as answer:
            return json.loads(answer.read(MOST_BYTES))
    except urllib.error.HTTPError as error:
        kind = EnvironmentUnavailable if error.code in _GATEWAY_ERRORS else UserError
        why = f"{url}{path} answered with status {error.code}; is it an OpenEnv server?"
    except OSError as error:
        kind = EnvironmentUnavailable
        why = f"it cannot be reached ({_reason(error)}); start it, or correct url in environment.arguments."
    except (ValueError, RecursionError):
        why = f"{url}{path} did not answer with JSON; is it an OpenEnv server?"
    except Exception as error:  # http.client raises several types if the answer is not HTTP
        why = f"{url}{path} did not answer with HTTP ({type(error).__name__}); is it an OpenEnv server?"
    raise kind(f"OpenEnv server {url}: {why}")


def _reason(error: BaseException) -> str:
    reason = getattr(error, "reason", error)
    if isinstance(reason, TimeoutError):
        return f"no answer within {ANSWER_SECONDS:g} s"
    return str(getattr(reason, "strerror", None) or reason or type(reason).__name__)[:_MOST_REASON]


def _is_here(url: str) -> bool:
    """Returns whether an address is on this machine. Requests to such an address must not use a proxy."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Session:
    """A WebSocket session, which is one environment of the server. The session ends when the connection is closed.

    Attempts to open the session are repeated for the time that `deadline.patience` returns. `call` has no time limit of
    its own: `EnvironmentPool` stops the process of a trajectory whose call exceeds the time limit. A lost connection is
    not replaced by a new one.

    Raises:
      EnvironmentUnavailable: the server cannot be reached.
      UserError: the server refuses sessions.
    """

    def __init__(self, url: str):
        self._url = url
        waiting = patience(MOST_WAITING_SECONDS)
        end = time.monotonic() + waiting
        pause = PAUSES[0]
        while True:
            try:
                return self._connect(max(end - time.monotonic(), 1.0) if waiting else None)
            except EnvironmentUnavailable:
                if time.monotonic() + pause > end:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, PAUSES[1])

    def _connect(self, seconds: float | None) -> None:
        from websockets.exceptions import InvalidStatus, WebSocketException
        from websockets.sync.client import connect

        self._open = contextlib.ExitStack()
        limits: dict[str, Any] = {
            "open_timeout": seconds,
            "ping_interval": None,
            "close_timeout": 1,
            "max_size": MOST_BYTES,
        }
        try:
            self._connection: Any = self._open.enter_context(
                connect(f"ws{self._url.removeprefix('http')}/ws", proxy=None if _is_here(self._url) else True, **limits)
            )
        except (OSError, WebSocketException) as error:
            answered = isinstance(error, InvalidStatus) and error.response.status_code not in _GATEWAY_ERRORS
            raise (UserError if answered else EnvironmentUnavailable)(
                f"OpenEnv server {self._url} (environment.arguments.url): no session could be opened "
                f"({_reason(error)})."
            ) from error

    def call(self, message: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a message, `reset` or `step`, and returns the content of the answer, with the observation.

        Raises:
          InvalidAction: the action of a step does not fit the server's schema. The session continues.
          EnvironmentUnavailable: the connection is lost.
          ServerFull: the server has no free session.
          UserError: the server has closed the session, has refused the message, or has sent an invalid answer.
        """
        try:
            return self._call(message, data)
        except UserError:
            self.close()
            raise

    def close(self) -> None:
        with contextlib.suppress(Exception):  # the connection may be lost
            self._open.close()

    def _call(self, message: str, data: Mapping[str, Any]) -> dict[str, Any]:
        from websockets.exceptions import ConnectionClosed

        with contextlib.suppress(ConnectionClosed):  # `recv` still returns the reason that the server sent
            self._connection.send(json.dumps({"type": message, "data": data}))
        try:
            received = self._connection.recv()
        except ConnectionClosed as error:
            lost = error.rcvd is None or error.rcvd.code in _SERVER_STOPS
            raise (EnvironmentUnavailable if lost else UserError)(
                f"OpenEnv server {self._url} (environment.arguments.url): it closed the session in {message} ({error})."
            ) from error
        try:
            answer = json.loads(received)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or not isinstance(answer.get("data"), dict):
            raise UserError(f"OpenEnv server {self._url}: it answered {message} with {show(received)}.")
        content: dict[str, Any] = answer["data"]
        if answer.get("type") == "error":
            self._refuse(message, content)
        if not isinstance(content.get("observation"), dict):
            raise UserError(f"OpenEnv server {self._url}: its answer to {message} has no observation: {show(content)}.")
        return content

    def _refuse(self, message: str, content: Mapping[str, Any]) -> None:
        code = content.get("code")
        text = str(content.get("message"))[:_MOST_REASON]
        if code == "VALIDATION_ERROR" and message == "step":
            raise InvalidAction(_invalid_fields(content.get("errors")) or text)
        if code == "CAPACITY_REACHED":
            text = text.rstrip(".") + (
                ". Each trajectory needs a session: set max_concurrent_envs of the server to at least data.batch_size "
                "x algorithm.num_generations, and eval.batch_size x eval.samples"
            )
        kind = ServerFull if code == "CAPACITY_REACHED" else UserError
        raise kind(f"OpenEnv server {self._url}: {message} failed: {text} ({code}).")


def _invalid_fields(errors: Any) -> str:
    if not isinstance(errors, list):
        return ""
    fields = [error for error in errors if isinstance(error, Mapping)]
    parts = [f"{'.'.join(map(str, error.get('loc') or ['action']))}: {error.get('msg')}" for error in fields]
    return "; ".join(parts)[:_MOST_REASON]
