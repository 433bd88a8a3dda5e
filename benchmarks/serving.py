"""`python -m benchmarks.serving`: tokens per second of the server, compared with the in-process sampler with as many
rows.

Both sample the same completions, greedily and alternately: the sampler in one call, and the server for clients that
each send the next request when they have an answer. The model counts: token `i` is followed by `i + 1`, up to the end
token, so the last token of a prompt determines the length of its completion. Its arithmetic is that of any other model
of its size. The server runs in a thread of this process, the clients in a separate process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import tokenizers
import uvicorn

from benchmarks.turns import GREEDY, VOCABULARY, WIDTH, counting_model
from tunix_like.rollout.requests import collect
from tunix_like.rollout.sampler import Sampler
from tunix_like.serving.app import make_app
from tunix_like.serving.requests import Settings
from tunix_like.serving.runner import Runner, Weights
from tunix_like.serving.server import ModelServer
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.types import Request

PROMPT, SHORTEST, LONGEST = 32, 64, 255
END = LONGEST


def make_weights() -> Weights:
    """Returns a model that counts to `END`."""
    graphdef, params = counting_model()
    head = np.zeros((WIDTH, VOCABULARY), np.float32)
    head[np.arange(END), np.arange(1, END + 1)] = 1.0
    params["lm_head"]["kernel"] = jax.numpy.asarray(head)
    return Weights(graphdef, params, (END,))


def make_prompts(count: int) -> list[list[int]]:
    """Returns prompts whose completions have `SHORTEST` to `LONGEST` tokens."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(SHORTEST, LONGEST + 1, count).tolist()
    return [[*rng.integers(0, VOCABULARY, PROMPT - 1).tolist(), END - length] for length in lengths]


class Running:
    """A server in a thread, warmed up, that runs until `close`."""

    def __init__(self, weights: Weights, rows: int, longest: int):
        runner = Runner(weights, rows, longest)
        runner.warm_up()
        words = {f"t{token}": token for token in range(VOCABULARY)}
        tokenizer = Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0")))
        settings = Settings("counting", "default", VOCABULARY, longest, LONGEST, max_waiting=1 << 20)
        self.server = ModelServer(settings, tokenizer, runner)
        app = make_app(self.server, None)
        self.http = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
        self.thread = threading.Thread(target=lambda: asyncio.run(self.run()))
        self.thread.start()
        while not self.http.started:
            time.sleep(0.01)
        self.address = f"http://127.0.0.1:{self.http.servers[0].sockets[0].getsockname()[1]}"

    async def run(self) -> None:
        """Serves until `close`."""
        self.server.open()
        await self.http.serve()

    def close(self) -> None:
        """Ends the server."""
        self.http.should_exit = True
        self.thread.join()
        self.server.batcher.close()


def run_clients(count: int, orders: Connection) -> None:
    """Runs in the process of the clients. For each order, which is the address of a server and prompts, it sends all
    prompts and returns the number of tokens."""

    async def everything(address: str, prompts: list[list[int]]) -> int:
        left, tokens = list(reversed(prompts)), 0

        async def client(http: httpx.AsyncClient) -> None:
            nonlocal tokens
            while left:
                body = {"token_ids": left.pop(), "sampling_params": {"temperature": 0}}
                answer = await http.post("/inference/v1/generate", json=body)
                answer.raise_for_status()
                tokens += len(answer.json()["choices"][0]["token_ids"])

        limits = httpx.Limits(max_connections=count, max_keepalive_connections=count)
        async with httpx.AsyncClient(base_url=address, timeout=600, limits=limits) as http:
            await asyncio.gather(*(client(http) for _ in range(count)))
        return tokens

    while (order := orders.recv()) is not None:
        orders.send(asyncio.run(everything(*order)))


def start_clients(count: int) -> tuple[BaseProcess, Connection]:
    """Starts the process of the clients; the order None ends it."""
    context = multiprocessing.get_context("spawn")
    orders, theirs = context.Pipe()
    process = context.Process(target=run_clients, args=(count, theirs), daemon=True)
    process.start()
    return process, orders


def measure(rows: int, clients: int, requests: int, repeats: int) -> dict[str, Any]:
    """Runs both sides alternately, after one run of each for the compilations."""
    weights, prompts = make_weights(), make_prompts(requests)
    server = Running(weights, rows, PROMPT + LONGEST + 1)
    process, orders = start_clients(clients)
    sampler = Sampler(
        weights.graphdef, weights.eos_ids, max_prompt_length=PROMPT, max_tokens=LONGEST, max_concurrent_rows=rows
    )

    def served() -> int:
        orders.send((server.address, prompts))
        return int(orders.recv())

    def sampled() -> int:
        given = [Request(tokens, number, 1) for number, tokens in enumerate(prompts)]
        out = collect(sampler.generate(weights.params, given, jax.random.key(0), GREEDY), given)
        return int(out.lengths.sum())

    sides: dict[str, Callable[[], int]] = {"server": served, "sampler": sampled}
    counts = {name: run() for name, run in sides.items()}
    assert len(set(counts.values())) == 1, counts
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    load = []
    for _ in range(repeats):
        for name, run in sides.items():
            start = time.perf_counter()
            tokens = run()
            speeds[name].append(tokens / (time.perf_counter() - start))
        load.append(os.getloadavg()[0])
    orders.send(None)
    process.join()
    server.close()
    ratios = [ours / other for ours, other in zip(*speeds.values(), strict=True)]
    return {"tokens": counts["server"], "tokens per second": speeds, "server / sampler": ratios, "load": load}


def main() -> None:
    """Prints medians with their spread, and writes them to `--json FILE`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments.rows, arguments.clients, arguments.requests, arguments.repeats)
    print(
        f"{arguments.requests} requests, {found['tokens']} tokens, {arguments.clients} clients, {arguments.rows} rows"
    )
    for name, values in found["tokens per second"].items():
        print(f"{name:<20}{statistics.median(values):>10.0f} tokens/s  ({min(values):.0f} to {max(values):.0f})")
    values = found["server / sampler"]
    print(f"{'server / sampler':<20}{statistics.median(values):>10.2f}  ({min(values):.2f} to {max(values):.2f})")
    print(f"{'load average':<20}{statistics.median(found['load']):>10.1f}  (both sides included)")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
