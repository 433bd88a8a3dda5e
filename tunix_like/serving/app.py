"""Implements the HTTP interface of the server: routes, limits, the API key, and errors in the format of OpenAI or
Anthropic."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as Http
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tunix_like.environments.chat_messages import RequestError
from tunix_like.environments.messages_api import error_of
from tunix_like.serving import requests
from tunix_like.serving.answers import (
    Answer,
    ChatAnswer,
    CompletionAnswer,
    GenerateAnswer,
    MessagesAnswer,
    ResponsesAnswer,
    error_content,
)
from tunix_like.serving.requests import ParsedRequest, Settings
from tunix_like.serving.server import Failed, ModelServer
from tunix_like.text.tokenizer import Tokenizer

MOST_BYTES = 8 << 20
"""Maximum size of the body of a request."""

MOST_READ = 256 << 20
"""Maximum size of all bodies that are being read and parsed."""

LARGE = 1 << 20
"""Bodies above this size are parsed one after the other, because a parsed body can take 40 times its size."""

MESSAGES = "/v1/messages"
"""The route of Anthropic's protocol."""

_CLOSE = {"connection": "close"}
"""Of answers without a key: a connection gets one, so none is kept by a client that does not read its answers."""

DISCONNECTED = 499
"""HTTP status that the metrics record for a request whose client disconnected."""

_LOG = logging.getLogger(__name__)

_Parsed = TypeVar("_Parsed")
Parse = Callable[[bytes, Settings, Tokenizer], ParsedRequest]
MakeAnswer = Callable[[ParsedRequest, Settings, Tokenizer], Answer]


def make_app(server: ModelServer, key: str | None) -> ASGIApp:
    """Builds the ASGI application of the server. If `key` is not None, all requests except those of `/health` must send
    it as a bearer token or, as Anthropic's clients do, in the header `x-api-key`. Otherwise all must name this machine
    in the header `host`: a page of the web could reach the server by a name that its owner lets point here."""
    settings = server.settings
    card = {
        "id": settings.name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "tunix_like",
        "max_model_len": settings.longest,
    }

    def sampling(path: str, parse: Parse, answer: MakeAnswer) -> Route:
        async def endpoint(http: Http) -> Response:
            return await _sample(server, http, parse, answer)

        return Route(path, endpoint, methods=["POST"])

    async def count(http: Http) -> Response:
        async def answer(size: int) -> Response:
            return JSONResponse({"input_tokens": size})

        return await _answered(server, http, requests.count_request, answer)

    async def models(http: Http) -> Response:
        return JSONResponse({"object": "list", "data": [card]})

    async def health(http: Http) -> Response:
        return Response(headers=_CLOSE)

    async def metrics(http: Http) -> Response:
        return Response(generate_latest(server.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    routes = [
        Route("/v1/models", models),
        sampling("/v1/completions", requests.completion_request, CompletionAnswer),
        sampling("/v1/chat/completions", requests.chat_request, ChatAnswer),
        sampling("/v1/responses", requests.responses_request, ResponsesAnswer),
        sampling(MESSAGES, requests.messages_request, MessagesAnswer),
        Route(f"{MESSAGES}/count_tokens", count, methods=["POST"]),
        sampling("/inference/v1/generate", requests.generate_request, GenerateAnswer),
        Route("/health", health),
        Route("/metrics", metrics),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error})
    return _Guard(app, server, key, {route.path for route in routes})


async def _http_error(http: Http, error: Exception) -> Response:
    """Returns the error response to a request with an unknown route or method."""
    assert isinstance(error, HTTPException)
    message = f"{http.method} {http.url.path[:200]}: {error.detail}"
    found = RequestError(message, http=error.status_code, kind="not_found_error")
    return error_response(http.url.path, found, error.headers)


def error_response(path: str, error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    """Returns a response with the error in the format of the route `path`."""
    body = error_of(str(error), error.http) if path.startswith(MESSAGES) else error_content(error)
    # A text of the request may contain half a surrogate pair.
    text = json.dumps(body, ensure_ascii=False).encode(errors="replace")
    return Response(text, error.http, headers, media_type="application/json")


class _Guard:
    """Checks the API key, counts the requests, and measures the duration of the successful requests that sample."""

    def __init__(self, app: ASGIApp, server: ModelServer, key: str | None, paths: set[str]):
        self._app = app
        self._metrics = server.metrics
        self._paths = paths
        self._expected = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = DISCONNECTED
        began = time.monotonic()

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        path = scope["path"]
        try:
            if (error := self._error(scope)) is not None:
                headers = _CLOSE | ({"www-authenticate": "Bearer"} if error.http == 401 else {})
                await error_response(path, error, headers)(scope, receive, counted)
            else:
                await self._app(scope, receive, counted)
        except ClientDisconnect:
            status = DISCONNECTED
        finally:
            known = path if path in self._paths else "other"
            self._metrics.requests.labels(known, str(status)).inc()
            if status == 200 and scope["method"] == "POST":
                self._metrics.latency.observe(time.monotonic() - began)

    def _error(self, scope: Scope) -> RequestError | None:
        headers = dict(scope["headers"])
        if self._expected is None:
            if _is_loopback(headers.get(b"host", b"")):
                return None
            message = "without an API key, the server answers requests to localhost or 127.0.0.1 (header host) only"
            return RequestError(message, http=403, kind="permission_error")
        given = headers.get(b"authorization") or b"Bearer " + headers.get(b"x-api-key", b"")
        if scope["path"] == "/health" or hmac.compare_digest(given, self._expected):
            return None
        return RequestError("the API key is missing or wrong", http=401, kind="authentication_error")


def _is_loopback(host: bytes) -> bool:
    """Whether the value of the header `host` is an address or a name of this machine that needs no name server."""
    found = re.fullmatch(rb"(?:\[([0-9a-f:]+)\]|([\w.-]+))(?::\d*)?", host.lower())
    name = (found[1] or found[2]).decode() if found else ""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class _Events(StreamingResponse):
    """A streamed response. Its generator of events is closed at once when the client disconnects."""

    def __init__(self, events: AsyncGenerator[str, None]):
        super().__init__(events, media_type="text/event-stream")
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()


async def _sample(server: ModelServer, http: Http, parse: Parse, make: MakeAnswer) -> Response:
    """Answers a request that samples completions."""
    began = time.monotonic()

    def checked(body: bytes, settings: Settings, tokenizer: Tokenizer) -> ParsedRequest:
        server.check_room()
        return parse(body, settings, tokenizer)

    async def answered(request: ParsedRequest) -> Response:
        server.check_room()
        answer = make(request, server.settings, server.tokenizer)
        if request.stream:
            return _Events(_events(server, answer, began))
        return await _whole(server, http, answer, began)

    return await _answered(server, http, checked, answered)


async def _answered(
    server: ModelServer,
    http: Http,
    parse: Callable[[bytes, Settings, Tokenizer], _Parsed],
    answer: Callable[[_Parsed], Awaitable[Response]],
) -> Response:
    """Reads the body of a request and answers it. Errors become error responses."""
    path = http.url.path
    try:
        return await answer(await _parsed(server, http, parse))
    except RequestError as error:
        headers = {"retry-after": str(server.retry_after())} if error.http == 429 else None
        return error_response(path, error, headers)
    except ClientDisconnect:
        return Response(status_code=DISCONNECTED)
    except Exception as error:
        return error_response(path, _failure(error))


def _failure(error: Exception) -> RequestError:
    if not isinstance(error, Failed):  # the batcher has logged the reason
        _LOG.error("a request failed", exc_info=error)
    return RequestError("the server failed; its log says why", http=500, kind="internal_server_error")


async def _parsed(server: ModelServer, http: Http, parse: Callable[[bytes, Settings, Tokenizer], _Parsed]) -> _Parsed:
    """Reads and parses the body of a request. Raises RequestError if the body is not valid or too large, or its content
    type is not JSON."""
    # This check prevents cross-site requests: a web page cannot send JSON to another origin unless the server allows
    # it.
    if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestError("the content type must be application/json", http=415)
    parts = []
    size = 0
    try:
        async for part in http.stream():
            parts.append(part)
            size += len(part)
            server.read += len(part)
            if size > MOST_BYTES:
                raise RequestError(f"the body has more than {MOST_BYTES} bytes", http=413)
            if server.read > MOST_READ:
                message = f"the requests that are being read have more than {MOST_READ} bytes; try again later"
                raise RequestError(message, http=429, kind="rate_limit_error")
        async with server.large if size > LARGE else contextlib.nullcontext():
            # In a thread, because long texts take milliseconds to encode and a chat template can take seconds.
            return await run_in_threadpool(parse, b"".join(parts), server.settings, server.tokenizer)
    finally:
        server.read -= size


async def _whole(server: ModelServer, http: Http, answer: Answer, began: float) -> Response:
    """Samples all completions and returns the whole answer. If the client disconnects, cancels the sampling and raises
    ClientDisconnect."""
    sampling = asyncio.ensure_future(_collect(server, answer, began))
    gone = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait((sampling, gone), return_when=asyncio.FIRST_COMPLETED)
        if not sampling.done():
            raise ClientDisconnect
        sampling.result()
        return JSONResponse(answer.whole())
    finally:
        for task in (sampling, gone):
            task.cancel()
        await asyncio.gather(sampling, gone, return_exceptions=True)


async def _disconnected(http: Http) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _collect(server: ModelServer, answer: Answer, began: float) -> None:
    async for _ in server.sample(answer, began):
        pass


async def _events(server: ModelServer, answer: Answer, began: float) -> AsyncGenerator[str, None]:
    """Yields the events of a streamed answer. The response closes this generator when the client disconnects."""
    try:
        async with contextlib.aclosing(server.sample(answer, began)) as parts:
            async for choice, text, tokens in parts:
                for line in answer.events(choice, text, tokens):
                    yield line
        for line in answer.last_events():
            yield line
    except Exception as error:
        yield answer.failed(_failure(error))
