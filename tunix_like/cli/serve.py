"""The command `serve`: serves a model over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import ipaddress
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunix_like.cli.common import chosen_source, setup_jax
from tunix_like.errors import UserError, one_line
from tunix_like.storage.checkpoint_files import step_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from tunix_like.runs.trained import Trained
    from tunix_like.serving.requests import Settings
    from tunix_like.serving.server import ModelServer

KEY = "TUNIX_LIKE_API_KEY"
"""Environment variable with the API key."""

BACKLOG = 2048
"""Maximum number of connections that wait to be accepted."""

ROWS = 32
ROWS_ON_CPU = 8
"""Default of `--max-rows`. Each step of the decode loop computes all rows, which costs time on a CPU: SmolLM2 gave one
client 26 tokens/s with 2 rows, 15 with 8 and 8 with 32, on two cores."""

SECONDS_TO_FINISH = 25
"""Seconds that running requests have to finish after SIGTERM. Supervisors usually kill a process after 30 seconds."""


def serve(arguments: argparse.Namespace) -> None:
    """Serves a model until SIGTERM or Ctrl-C."""
    _check(arguments)
    key = _api_key(arguments.host)
    listener = _listen(arguments.host, arguments.port)
    with listener:
        setup_jax()
        from tunix_like.runs.trained import open_trained
        from tunix_like.serving.app import make_app

        trained = open_trained(chosen_source(arguments.source, arguments.best), arguments.overrides)
        settings = _settings(arguments, trained)
        server = _server(arguments, settings, trained)
        del trained  # frees the weights in the stored dtype; the server has a copy in the compute dtype
        gc.collect()
        try:
            listener.listen(BACKLOG)  # before the message below, so that clients can connect when it appears
        except OSError as error:  # another process has started to listen on the same port meanwhile
            raise _refused(arguments.host, arguments.port, error) from None
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"serving {settings.name} at http://{shown}:{port}/v1", file=sys.stderr, flush=True)
        print("programs are compiled while there are no requests", file=sys.stderr, flush=True)
        asyncio.run(_run(make_app(server, key), server, listener))
        print("stopped", file=sys.stderr, flush=True)


def _check(arguments: argparse.Namespace) -> None:
    for name, least in (("max_rows", 1), ("max_length", 2), ("max_waiting", 1), ("port", 0)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise UserError(f"serve: --{name.replace('_', '-')} {value}: it must be at least {least}.")
    if arguments.port > 65535:
        raise UserError(f"serve: --port {arguments.port}: it must be at most 65535.")
    try:
        import prometheus_client  # noqa: F401
        import pydantic  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UserError(f"serve needs more packages ({one_line(error)}): pip install 'tunix-like[serve]'") from None


def _api_key(host: str) -> str | None:
    """Returns the API key from the environment; an address that other machines can reach needs one."""
    key = os.environ.get(KEY, "").strip()
    if key:
        return key
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise UserError(
            f"serve: --host {host} is reachable from other machines; set the environment variable {KEY} to a key that "
            "clients must send, or use 127.0.0.1."
        )
    return None


def _listen(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound and does not listen yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise _refused(host, port, error) from None
    return listener


def _refused(host: str, port: int, error: OSError) -> UserError:
    return UserError(f"serve: cannot listen on {host}, port {port}: {error.strerror or error}; choose another --port.")


def _settings(arguments: argparse.Namespace, trained: Trained) -> Settings:
    from tunix_like.serving.requests import Settings

    rollout = trained.config.rollout
    model = trained.model_config
    usual = rollout.max_prompt_length + rollout.max_tokens_to_generate
    longest = arguments.max_length or min(usual, model.max_positions)
    if longest > model.max_positions:
        raise UserError(
            f"serve: --max-length {longest}: the model has {model.max_positions} positions (max_position_embeddings)."
        )
    step = Path(trained.origin).name
    return Settings(
        name=arguments.source,
        version=step if step_of(step) is not None else "default",
        vocab_size=model.vocab_size,
        longest=longest,
        max_tokens=rollout.max_tokens_to_generate,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_waiting=arguments.max_waiting,
    )


def _server(arguments: argparse.Namespace, settings: Settings, trained: Trained) -> ModelServer:
    import jax

    from tunix_like.models.loading import check_fit
    from tunix_like.serving.runner import Runner, Weights
    from tunix_like.serving.server import ModelServer
    from tunix_like.training.engine import make_engine

    longest = settings.longest
    rows = arguments.max_rows or (ROWS_ON_CPU if jax.default_backend() == "cpu" else ROWS)
    rollout = dataclasses.replace(
        trained.config.rollout,
        max_prompt_length=longest // 2,
        max_tokens_to_generate=longest - longest // 2,
        max_concurrent_rows=rows,
    )
    check_fit(trained.model_config, trained.tokenizer, rollout)
    engine = make_engine(trained.graphdef, trained.tokenizer, rollout, trained.mesh)
    weights = Weights(engine.graphdef, engine.place(trained.params), engine.eos_ids, engine.mesh)
    return ModelServer(settings, trained.tokenizer, Runner(weights, rows, longest))


async def _run(app: ASGIApp, server: ModelServer, listener: socket.socket) -> None:
    import uvicorn

    from tunix_like.serving.connections import http_config

    class Stoppable(uvicorn.Server):
        """A server that finishes running requests after the first signal and exits at once after the second one."""

        def handle_exit(self, sig: int, frame: Any) -> None:
            self.should_exit, self.force_exit = True, bool(self.should_exit)

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            listener.listen(BACKLOG)  # the event loop has set the number of connections that it accepts at once

    server.open(warm_up=True, when_compiled=lambda: print("all programs are compiled", file=sys.stderr, flush=True))
    await Stoppable(http_config(app, timeout_graceful_shutdown=SECONDS_TO_FINISH)).serve(sockets=[listener])
    server.batcher.close()
