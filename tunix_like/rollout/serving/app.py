"""Implements the HTTP interface of the server: routes, limits, the API key, and errors in the format of OpenAI."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as Http
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tunix_like.data.tokenizer import Tokenizer
from tunix_like.rollout.serving import requests
from tunix_like.rollout.serving.answers import (
    Answer,
    ChatAnswer,
    Choice,
    CompletionAnswer,
    GenerateAnswer,
    StreamedAnswer,
    event,
)
from tunix_like.rollout.serving.fields import RequestError, parse_object
from tunix_like.rollout.serving.hub import Exchange, Hub
from tunix_like.rollout.serving.metrics import CONTENT_TYPE
from tunix_like.rollout.serving.requests import Request, Settings

MOST_BYTES = 8 << 20
"""Maximum size of the body of a request."""

OPEN = ("/health",)
"""Routes that need no API key."""

DISCONNECTED = 499
"""HTTP status that the metrics record for a request whose client disconnected."""

Parse = Callable[[Mapping[str, Any], Settings, Tokenizer], Request]
MakeAnswer = Callable[[Request, Settings, Tokenizer], Answer]


class Failed(Exception):
    """Raised if an error ended the sampling of a request."""


class Server(NamedTuple):
    """The objects that the HTTP routes of the server use."""

    settings: Settings
    tokenizer: Tokenizer
    hub: Hub


def make_app(server: Server, key: str | None) -> ASGIApp:
    """Builds the ASGI application of the server. If `key` is not None, requests must send `key` as a bearer token.
    Requests to the routes in `OPEN` need no token."""
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

    async def models(http: Http) -> Response:
        return JSONResponse({"object": "list", "data": [card]})

    async def health(http: Http) -> Response:
        return Response()

    async def metrics(http: Http) -> Response:
        batcher = server.hub.batcher
        gauges = {
            "running": ("Completions that are being sampled.", float(batcher.running)),
            "waiting": ("Completions that wait for a free row.", float(batcher.waiting)),
        }
        return PlainTextResponse(server.hub.metrics.text(gauges), headers={"content-type": CONTENT_TYPE})

    routes = [
        Route("/v1/models", models),
        sampling("/v1/completions", requests.completion_request, CompletionAnswer),
        sampling("/v1/chat/completions", requests.chat_request, ChatAnswer),
        sampling(
            "/inference/v1/generate", lambda body, given, _: requests.generate_request(body, given), GenerateAnswer
        ),
        Route("/health", health),
        Route("/metrics", metrics),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error})
    return _Guard(app, server.hub, key, {route.path for route in routes})


async def _http_error(http: Http, error: Exception) -> Response:
    """Returns the error response to a request with an unknown route or method."""
    assert isinstance(error, HTTPException)
    message = f"{http.method} {http.url.path[:200]}: {error.detail}"
    return error_response(RequestError(message, http=error.status_code, kind="not_found_error"), error.headers)


def error_response(error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    """Returns a response with the error in the format of OpenAI."""
    content = {"message": str(error), "type": error.kind, "param": error.param, "code": error.http}
    return JSONResponse({"error": content}, error.http, headers)


class _Guard:
    """Checks the API key, counts the requests, and measures the duration of the successful requests that sample."""

    def __init__(self, app: ASGIApp, hub: Hub, key: str | None, paths: set[str]):
        self._app, self._hub, self._paths = app, hub, paths
        self._expected = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, began = DISCONNECTED, time.monotonic()

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        path = scope["path"]
        try:
            if self._refused(scope):
                error = RequestError("the API key is missing or wrong", http=401, kind="authentication_error")
                await error_response(error, {"www-authenticate": "Bearer"})(scope, receive, counted)
            else:
                await self._app(scope, receive, counted)
        except ClientDisconnect:
            status = DISCONNECTED
        finally:
            known = path if path in self._paths else "other"
            self._hub.metrics.requests[known, status] += 1
            if status == 200 and scope["method"] == "POST":
                self._hub.metrics.latency.add(time.monotonic() - began)

    def _refused(self, scope: Scope) -> bool:
        if self._expected is None or scope["path"] in OPEN:
            return False
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return not hmac.compare_digest(given, self._expected)


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


async def _sample(server: Server, http: Http, parse: Parse, make: MakeAnswer) -> Response:
    """Answers a request that samples completions."""
    began = time.monotonic()
    try:
        body = parse_object(await _body(http))
        server.hub.check_room()
        # The request is parsed in a thread, because long texts take milliseconds to encode and a chat template can take
        # seconds.
        request = await run_in_threadpool(parse, body, server.settings, server.tokenizer)
        server.hub.check_room()
        answer = make(request, server.settings, server.tokenizer)
        if request.stream:
            assert isinstance(answer, StreamedAnswer), "`parse` refuses streams of other answers"
            return _Events(_events(server.hub, answer, began))
        return await _whole(server.hub, http, answer, began)
    except RequestError as error:
        headers = {"retry-after": str(server.hub.retry_after())} if error.http == 429 else None
        return error_response(error, headers)
    except Failed:
        return error_response(_failure())
    except ClientDisconnect:
        return Response(status_code=DISCONNECTED)


def _failure() -> RequestError:
    return RequestError("the server failed; its log says why", http=500, kind="internal_server_error")


async def _body(http: Http) -> bytes:
    """Reads the body of a request. Raises RequestError if the body is too large or the content type is not JSON."""
    # This check prevents cross-site requests: a web page cannot send JSON to another origin unless the server allows
    # it.
    if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestError("the content type must be application/json", http=415)
    parts, size = [], 0
    async for part in http.stream():
        parts.append(part)
        size += len(part)
        if size > MOST_BYTES:
            raise RequestError(f"the body has more than {MOST_BYTES} bytes", http=413)
    return b"".join(parts)


async def _whole(hub: Hub, http: Http, answer: Answer, began: float) -> Response:
    """Samples all completions and returns the whole answer. If the client disconnects, cancels the sampling and raises
    ClientDisconnect."""
    sampling = asyncio.ensure_future(_collect(hub, answer, began))
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


async def _collect(hub: Hub, answer: Answer, began: float) -> None:
    async for _ in _grown(hub, answer, began):
        pass


async def _grown(hub: Hub, answer: Answer, began: float) -> AsyncGenerator[tuple[Choice, str, slice], None]:
    """Yields one tuple per new part of a completion: the completion, its new text and the indices of its new tokens.

    Raises:
      Failed: an error ended the sampling.
    """
    async with Exchange(hub, answer.request.jobs, began) as exchange:
        async for job, part in exchange.parts():
            if part.reason == "error":
                raise Failed
            choice = answer.choices[job, part.sample]
            before = len(choice.tokens)
            text = choice.add(part)
            if choice.reason is not None:
                exchange.stop(job, part.sample)
            yield choice, text, slice(before, len(choice.tokens))


async def _events(hub: Hub, answer: StreamedAnswer, began: float) -> AsyncGenerator[str, None]:
    """Yields the events of a streamed answer. The response closes this generator when the client disconnects."""
    grown = _grown(hub, answer, began)
    try:
        async for choice, text, tokens in grown:
            for line in answer.events(choice, text, tokens):
                yield line
        for line in answer.last_events():
            yield line
    except Failed:
        error = _failure()
        yield event({"error": {"message": str(error), "type": error.kind, "param": None, "code": error.http}})
    finally:
        await grown.aclose()
