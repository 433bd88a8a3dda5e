"""The time of concurrent calls of a judge whose server answers slowly and sometimes fails, beside the ideal.

    python -m benchmarks.judges [--calls 200] [--concurrency 200] [--seconds 0.5] [--failures 0.05] [--repeats N]

The ideal is that of the same attempts and their pauses in a simulation without any other cost: each slot takes the next
call when it is free. Each answer's score is known, so a wrong or lost one is seen.
"""

from __future__ import annotations

import argparse
import heapq
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.request

import numpy as np

from tunix_like.rewards import Judge, Limits, score
from tunix_like.rewards.services import FIRST_DELAY


def main() -> None:
    """Prints one JSON object per repeat, and the median of the times over the ideal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--failures", type=float, default=0.05)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="file for the results")
    arguments = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = [sys.executable, "-m", "benchmarks.judge_server", "--port", str(port)]
    server += ["--seconds", str(arguments.seconds), "--failures", str(arguments.failures)]
    process = subprocess.Popen(server)
    try:
        judge = Judge(f"http://127.0.0.1:{port}", "The quality.", limits=Limits(arguments.concurrency, 30.0, 6))
        _attempts(judge.url)  # waits for the server
        judge(["task"], ["quality 0"])  # loads the client
        judge.take_counts()
        results = [_measure(judge, arguments, repeat) for repeat in range(arguments.repeats)]
        judge.close()
    finally:
        process.terminate()
    ratios = [result["over_ideal"] for result in results]
    print(f"time over ideal: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


def _measure(judge: Judge, arguments: argparse.Namespace, repeat: int) -> dict[str, float]:
    calls = arguments.calls
    quality = np.random.default_rng(repeat).integers(0, 11, calls)
    answers = [f"answer {repeat}-{i}, quality {number}" for i, number in enumerate(quality)]
    _attempts(judge.url)
    began = time.perf_counter()
    scores = score([("judge", judge, 1.0)], ["task"] * calls, answers, {}, 8)
    seconds = time.perf_counter() - began
    attempts, counts = _attempts(judge.url), judge.take_counts()
    ideal = _ideal(attempts, arguments)
    result = {
        "seconds": seconds,
        "ideal": ideal,
        "over_ideal": seconds / ideal,
        "requests": sum(attempts),
        "most_attempts": max(attempts),
        "calls": counts["calls"],
        "retries": counts["retries"],
        "unscored": int(np.isnan(scores.total).sum()),
        "wrong": int((np.nan_to_num(scores.total) != quality / 10).sum()),
    }
    print(json.dumps(result), flush=True)
    return result


def _ideal(attempts: list[int], arguments: argparse.Namespace) -> float:
    """Simulates calls with these attempts, with the mean pause before each retry and no other cost."""
    slots = [0.0] * arguments.concurrency
    for count in attempts:
        pauses = sum(1.125 * FIRST_DELAY * 2**i for i in range(count - 1))
        heapq.heapreplace(slots, slots[0] + count * arguments.seconds + pauses)
    return max(slots)


def _attempts(url: str) -> list[int]:
    for _ in range(100):
        try:
            with urllib.request.urlopen(f"{url}/requests", timeout=5) as answer:
                return list(json.load(answer))
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"{url}: the server does not start")


if __name__ == "__main__":
    main()
