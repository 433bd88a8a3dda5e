"""`python -m benchmarks.environments`: the time of a call of an environment whose own work takes microseconds.

Each round has as many trajectories as a batch, in lockstep: reset, some steps and the end of each. The round divided by
its calls is the time of a call. With `--before FOLDER`, the package of another checkout runs the same rounds, and both
sides take turns. Each turn is a process of its own, which runs a first round, where the processes of environments are
forked, and then further rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]
ENVIRONMENT = """
class Env:
    def reset(self):
        return None

    def step(self, completion):
        return "ok", 0.0, False
"""
MODULES = {"plain": "", "imports jax and flax": "import flax, jax\n"}


def rounds(environments: Any, trajectories: int, turns: int, count: int) -> list[float]:
    """Returns the milliseconds per call of each of `count` rounds."""

    def wait() -> None:
        got = 0
        while got < trajectories:
            outcomes = environments.outcomes(True)
            assert all(outcome.failure is None for outcome in outcomes), outcomes
            got += len(outcomes)

    times = []
    for _ in range(count):
        start = time.perf_counter()
        for number in range(trajectories):
            environments.reset(number, {})
        wait()
        for _ in range(turns):
            for number in range(trajectories):
                environments.step(number, "a turn of some words")
            wait()
        for number in range(trajectories):
            environments.finish(number)
        wait()
        times.append((time.perf_counter() - start) / (trajectories * (turns + 2)) * 1000)
    return times


def side(file: str, workers: int, trajectories: int, turns: int, count: int) -> list[float]:
    """Runs the rounds with the package that this process imports."""
    from tunix_like.environments.local import LocalEnvironments
    from tunix_like.environments.pool import EnvironmentPool
    from tunix_like.runtime.user_code import load_function

    place = f"{file}:Env"
    if workers == 0:
        return rounds(LocalEnvironments(load_function(place, "Environment")), trajectories, turns, count)
    pool = EnvironmentPool(place, workers=workers)
    _ = pool.tools  # loads the module
    try:
        return rounds(pool, trajectories, turns, count)
    finally:
        pool.close()


def measure(before: Path | None, trajectories: int, turns: int, workers: int, repeats: int) -> dict[str, Any]:
    """Runs all cases `repeats` times, both sides alternately. Returns milliseconds per call."""
    cases = [(name, workers, root) for name in MODULES for root in (before, HERE) if root is not None]
    cases.append(("plain, workers 0", 0, HERE))
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, text in enumerate(MODULES.values()):
            (Path(folder) / f"env{number}.py").write_text(text + ENVIRONMENT)
        files = {name: f"{folder}/env{number}.py" for number, name in enumerate(MODULES)}
        for _ in range(repeats):
            for name, count, root in cases:
                given = [files.get(name, files["plain"]), count, trajectories, turns, 4]
                done = subprocess.run(
                    [sys.executable, __file__, "--side", json.dumps(given)],
                    env=os.environ | {"PYTHONPATH": str(root)},
                    stdout=subprocess.PIPE,
                    check=True,
                )
                first, *later = json.loads(done.stdout.splitlines()[-1])
                at = found.setdefault(f"{name}, {'after' if root == HERE else 'before'}", {"first": [], "later": []})
                at["first"].append(first)
                at["later"].append(statistics.median(later))
    return found


def main() -> None:
    """Prints medians with their spread, and writes them to `--json FILE`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="root of another checkout")
    parser.add_argument("--trajectories", type=int, default=256)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side is not None:
        print(json.dumps(side(*arguments.side)))
        return
    before = None if arguments.before is None else arguments.before.resolve()
    found = measure(before, arguments.trajectories, arguments.turns, arguments.workers, arguments.repeats)
    print(
        f"{arguments.trajectories} trajectories, {arguments.turns} turns, {arguments.workers} calls at a time: ms/call"
    )
    for name, rows in found.items():
        text = [
            f"{which} {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"
            for which, values in rows.items()
        ]
        print(f"{name:<30}" + "   ".join(text))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
