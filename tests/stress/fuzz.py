"""Draws thousands of invalid configurations and damaged model folders, and prints every one that is not rejected
correctly (`tests/runs/fuzzing.py` and `tests/runs/fuzzing_files.py` define the correct results).

    python tests/stress/fuzz.py [--configs 2000] [--files 1500] [--seed 0]

Not a part of the test suite: it takes some minutes on one core. Exit status 0: there was no violation.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"], os.environ["HF_HUB_OFFLINE"] = "cpu", "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tests.runs import fuzzing, fuzzing_files  # noqa: E402

ENDS = ("accepted", "refused", "violation")


class Tally:
    """Counts how often each kind of case had each result."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self.violations: list[str] = []
        self.slowest = (0.0, "")

    def add(self, words: Iterable[tuple[str, str]], run: Callable[[], str | None], shown: str) -> None:
        began = time.monotonic()
        try:
            end = "accepted" if run() is None else "refused"
        except fuzzing.Violation as violation:
            end = "violation"
            self.violations.append(str(violation))
            print(f"VIOLATION {violation}", flush=True)
        self.slowest = max(self.slowest, (time.monotonic() - began, shown))
        for table, word in [("all", "all"), *words]:
            self.counts[table, word, end] += 1

    def show(self) -> None:
        for table in dict.fromkeys(table for table, _, _ in self.counts):
            print(f"\n{table:<48}" + "".join(f"{end:>11}" for end in ENDS))
            for word in sorted({word for other, word, _ in self.counts if other == table}):
                print(f"{word:<48}" + "".join(f"{self.counts[table, word, end]:>11}" for end in ENDS))
        print(f"\nthe slowest took {self.slowest[0]:.1f} s: {self.slowest[1][:300]}", flush=True)


def draw(strategy: st.SearchStrategy[Any], count: int, number: int, use: Callable[[Any], None]) -> float:
    """Passes `count` draws to `use`. Returns the total seconds."""
    began = time.monotonic()
    checks = list(HealthCheck)

    @seed(number)
    @settings(max_examples=count, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=checks)
    @given(strategy)
    def each(value: Any) -> None:
        use(value)

    each()
    return time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=int, default=2000)
    parser.add_argument("--files", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    violations = 0
    with tempfile.TemporaryDirectory(prefix="fuzz_", ignore_cleanup_errors=True) as name:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{name}/xla")
        place = Path(name)
        os.chdir(place)
        fuzzing.make_place(place)
        fuzzing_files.make_folders(place / "folders")
        tally = Tally()

        def configure(case: fuzzing.Case) -> None:
            words = [("key", fuzzing.spelt(key)) for key in case.changes] + [("kind", kind) for kind in case.kinds]
            tally.add(words, lambda: fuzzing.run(case, place), str(case))

        def damage(case: fuzzing_files.Damage) -> None:
            words = [("file", f"{case.folder}/{case.file}")]
            tally.add(words, lambda: fuzzing_files.run(case, place / "folders", place / "scratch"), str(case[:3]))

        for what, strategy, count, use in (
            ("configurations", fuzzing.cases(), arguments.configs, configure),
            ("damaged files", fuzzing_files.damages(place / "folders"), arguments.files, damage),
        ):
            if count:
                tally = Tally()
                seconds = draw(strategy, count, arguments.seed, use)
                tally.show()
                print(f"{count} {what} in {seconds:.0f} s: {len(tally.violations)} violations\n", flush=True)
                violations += len(tally.violations)
        os.chdir("/")
    return min(1, violations)


if __name__ == "__main__":
    sys.exit(main())
