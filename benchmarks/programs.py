"""`python -m benchmarks.programs`: what a turn of a program costs more than one of an environment in its own process.

Trajectories play turns in lockstep, and answers of the policy are ready at once. The time of a turn is that of all
turns but the first, in which clients make their classes, divided by their number; `core` is the time that all processes
have computed for it, which other work on the machine changes little (Linux only). The start of a trajectory is timed
separately. The programs are: one that sends plain HTTP, one with OpenAI's client, and an async function. Each request
has one message: with 33, OpenAI's client alone computes 10 ms. The environment has the same observations
and does nothing else.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.environments import ENVIRONMENT
from tunix_like.environments.outcomes import Environments
from tunix_like.environments.pool import EnvironmentPool
from tunix_like.environments.program import Program
from tunix_like.workers.process import descendants_of

PLAIN = """
import http.client, json, os, urllib.parse

place = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
connection = http.client.HTTPConnection(place.hostname, place.port)
headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"}
messages = [{"role": "user", "content": "begin"}]
while True:
    connection.request("POST", place.path + "/chat/completions", json.dumps({"messages": messages}), headers)
    if "error" in json.loads(connection.getresponse().read()):
        break
"""
CLIENT = """
import openai

client = openai.OpenAI()
messages = [{"role": "user", "content": "begin"}]
while True:
    try:
        client.chat.completions.create(model="policy", messages=messages)
    except openai.BadRequestError:
        break
"""
FUNCTION = """
import openai

async def agent(client, row):
    messages = [{"role": "user", "content": "begin"}]
    while True:
        try:
            await client.chat.completions.create(model="policy", messages=messages)
        except openai.BadRequestError:
            break
"""


def computed() -> float:
    """Returns the seconds that this process and its descendants have computed."""
    pids = [os.getpid(), *descendants_of(os.getpid())]
    files = [file for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def play(environments: Environments, trajectories: int, turns: int) -> dict[str, float]:
    """Returns the milliseconds per turn and per start of a trajectory."""

    def wait() -> None:
        got = 0
        while got < trajectories:
            outcomes = environments.outcomes(True)
            assert all(outcome.failure is None for outcome in outcomes), outcomes
            got += len(outcomes)

    def turn() -> None:
        for number in range(trajectories):
            environments.step(number, "a turn of some words")
        wait()

    first = time.perf_counter()
    for number in range(trajectories):
        environments.reset(number, {})
    wait()
    start = time.perf_counter() - first
    turn()
    begun = time.perf_counter()
    before = computed()
    for _ in range(turns):
        turn()
    core = computed() - before
    end = time.perf_counter()
    for number in range(trajectories):
        environments.finish(number)
    wait()
    each = 1000 / (trajectories * turns)
    return {"turn": (end - begun) * each, "core": core * each, "start": start / trajectories * 1000}


def measure(folder: Path, trajectories: int, turns: int, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Runs all cases `repeats` times, one after the other."""
    for name, code in {"env": ENVIRONMENT, "plain": PLAIN, "client": CLIENT, "function": FUNCTION}.items():
        (folder / f"{name}.py").write_text(code)
    sys.path.insert(0, str(folder))
    function = importlib.import_module("function")

    limits: Mapping[str, Any] = {"workers": 8, "timeout_seconds": 120.0}
    cases: dict[str, Callable[[], Any]] = {
        "environment": lambda: EnvironmentPool(f"{folder}/env.py:Env", **limits),
        "program, plain HTTP": lambda: Program([sys.executable, f"{folder}/plain.py"], **limits),
        "program, openai": lambda: Program([sys.executable, f"{folder}/client.py"], **limits),
        "async function": lambda: Program(function.agent, **limits),
    }
    found: dict[str, dict[str, list[float]]] = {name: {"turn": [], "core": [], "start": []} for name in cases}
    for _ in range(repeats):
        for name, make in cases.items():
            environments = make()
            try:
                play(environments, 1, 1)  # loads the modules
                times = play(environments, trajectories, turns)
            finally:
                environments.close()
            for what, value in times.items():
                found[name][what].append(value)
    return found


def main() -> None:
    """Prints medians with their spread, and writes them to `--json FILE`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=32)
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), arguments.trajectories, arguments.turns, arguments.repeats)
    print(f"{arguments.trajectories} trajectories, {arguments.turns} turns: ms")
    for name, rows in found.items():
        text = [f"{what} {statistics.median(v):.2f} ({min(v):.2f} to {max(v):.2f})" for what, v in rows.items()]
        print(f"{name:<22}" + "   ".join(text))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
