"""`python -m benchmarks.prefixes`: tokens per second of the server with and without the reuse of common prefixes.

Two servers answer alternately, one of which finds no earlier prompts. In one load all prompts begin with the same
tokens, and in the other no two prompts do. Each run has new prompts. Model and clients are those of
`benchmarks.serving`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving import END, Running, make_weights, start_clients
from benchmarks.turns import VOCABULARY

COMMON, OWN, ANSWER = 400, 20, 64


def make_prompts(count: int, common: int, rng: np.random.Generator) -> list[list[int]]:
    """Returns prompts of `COMMON + OWN` tokens, whose first `common` tokens are equal, for answers of `ANSWER`
    tokens."""
    first = np.random.default_rng(0).integers(0, VOCABULARY, common).tolist()
    rest = COMMON + OWN - common - 1
    return [[*first, *rng.integers(0, VOCABULARY, rest).tolist(), END - ANSWER] for _ in range(count)]


def measure(rows: int, clients: int, requests: int, repeats: int) -> dict[str, Any]:
    """Runs both servers alternately with each load, after one run of each."""
    weights, rng = make_weights(), np.random.default_rng(1)
    servers = {name: Running(weights, rows, COMMON + OWN + ANSWER + 1) for name in ("reuse", "no reuse")}
    servers["no reuse"].server.batcher.runner.prefixes.find = lambda prompt: None  # type: ignore[method-assign]
    process, orders = start_clients(clients)
    loads = {"common prefix": COMMON, "no common prefix": 0}
    speeds: dict[str, dict[str, list[float]]] = {load: {name: [] for name in servers} for load in loads}
    averages = []
    for repeat in range(repeats + 1):
        for load, common in loads.items():
            prompts = make_prompts(requests, common, rng)
            for name in sorted(servers, reverse=bool(repeat % 2)):
                start = time.perf_counter()
                orders.send((servers[name].address, prompts))
                tokens = orders.recv()
                assert tokens == requests * ANSWER, tokens
                if repeat:
                    speeds[load][name].append(tokens / (time.perf_counter() - start))
        averages.append(os.getloadavg()[0])
    orders.send(None)
    process.join()
    for each in servers.values():
        each.close()
    metrics = servers["reuse"].server.metrics
    reused = metrics.value("reused_prompt_tokens_total") / metrics.value("prompt_tokens_total")
    return {"tokens per second": speeds, "reused fraction of both loads": reused, "load": averages}


def main() -> None:
    """Prints medians with their spread, and writes them to `--json FILE`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments.rows, arguments.clients, arguments.requests, arguments.repeats)
    for load, speeds in found["tokens per second"].items():
        ratios = [ours / other for ours, other in zip(speeds["reuse"], speeds["no reuse"], strict=True)]
        print(load)
        for name, values in speeds.items():
            print(f"  {name:<20}{statistics.median(values):>8.0f} tokens/s  ({min(values):.0f} to {max(values):.0f})")
        print(f"  {'ratio':<20}{statistics.median(ratios):>8.2f}  ({min(ratios):.2f} to {max(ratios):.2f})")
    print(f"{'reused of prompts':<22}{found['reused fraction of both loads']:>8.2f}")
    print(f"{'load average':<22}{statistics.median(found['load']):>8.1f}  (the servers included)")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
