"""`python -m benchmarks.run`: this library's time and memory in every case, and its ratio to the arithmetic lower
bound.

The cases run one after the other, each in a separate process. The lower bound of a case is its required arithmetic
(`cases.floating_operations`) at the rate of a plain matrix product measured in the same run. No program reaches it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cases import CASES, MODELS, ON_REQUEST, Case, floating_operations, make_case, write_model
from benchmarks.worker import Series, Worker, case_command, count

HEADER = (
    f"{'case':<28}{'median s':>9}{'min':>9}{'max':>9}{'tokens/s':>10}{'x floor':>9}{'compile s':>10}{'programs':>9}"
    f"{'later':>6}{'peak MB':>9}{'case MB':>9}{'predicted':>10}{'ratio':>7}"
)
"""`tokens/s` counts completion tokens up to each end; `programs` were compiled by the first repeat, `later` after it.
`peak MB` is of the whole process; `case MB` excludes memory besides the case's arrays (`ours.Memory`), and is to be
compared with `predicted`."""


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Runs one case in a separate process. The first repeat, which compiles, is not counted."""
    with _model_folder(case) as folder, Worker(case_command(case, folder)) as worker:
        series = Series(worker)
        for _ in range(repeats):
            series.add()
        return series.summary()


@contextlib.contextmanager
def _model_folder(case: Case) -> Iterator[Path | None]:
    """Yields the model folder of a case with counting weights, or None. The worker creates random weights itself."""
    if not case.counting:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="benchmark_") as folder:
        write_model(case, Path(folder))
        yield Path(folder)


def matmul_rate(repeats: int) -> float:
    """Returns the operations per second of a matrix product: the best of the repeats."""
    with Worker(case_command(Case(MODELS["tiny"], "matmul", length=4096), None)) as worker:
        series = Series(worker)
        for _ in range(repeats):
            series.add()
    return max(repeat["operations"] / repeat["seconds"] for repeat in series.repeats)


def floor_seconds(case: Case, tokens: float, rate: float) -> float:
    """Returns the seconds of a case's arithmetic at `rate`. Only the sum of sampled lengths is known, so they are
    assumed to be equal."""
    lengths = case.batch().lengths if case.kind == "update" else np.full(case.rows, tokens / case.rows)
    return floating_operations(case, lengths) / rate


def line(name: str, row: dict[str, Any]) -> str:
    last = row["repeats"][-1]
    predicted, measured = (last.get(key, float("nan")) for key in ("predicted_mb", "measured_mb"))
    return (
        f"{name:<28}{row['median_s']:>9.3f}{row['min_s']:>9.3f}{row['max_s']:>9.3f}{row['tokens_per_s']:>10.0f}"
        f"{row['median_s'] / row['floor_s']:>9.1f}{row['compile_s']:>10.1f}{row['programs']:>9.0f}"
        f"{row['later_programs']:>6.0f}{row['peak_mb']:>9.0f}{measured:>9.0f}{predicted:>10.0f}"
        f"{predicted / measured:>7.2f}"
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--case", nargs="+", choices=CASES, help="default: all but those for accelerators (large)")
    parser.add_argument("--size", choices=MODELS, default="tiny", help="the model (default: tiny)")
    parser.add_argument("--repeats", type=count, default=5, help="after the one that compiles (default: 5)")
    parser.add_argument("--json", type=Path, help="file for everything measured")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    names = options.case or [name for name in CASES if name not in ON_REQUEST]
    rate = matmul_rate(max(options.repeats, 3))
    print(f"matrix product: {rate / 1e9:.0f} GFLOP/s\n{HEADER}", flush=True)
    rows: dict[str, dict[str, Any]] = {}
    failed = False
    for name in names:
        case = make_case(name, options.size)
        label = f"{options.size}/{name}"
        try:
            row = measure(case, options.repeats)
        except RuntimeError as error:  # a case out of memory must not discard the others
            failed = True
            print(f"{label:<28}{error}", flush=True)
            continue
        row["floor_s"] = floor_seconds(case, row["tokens"], rate)
        row["operations"] = row["floor_s"] * rate
        rows[label] = row
        print(line(label, row), flush=True)
    if options.json is not None:
        found = {"machine": machine(), "matmul_flops": rate, "cases": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(failed)


def machine() -> dict[str, Any]:
    """Describes the machine of the measurement."""
    info = Path("/proc/cpuinfo")
    names = [row.split(":", 1)[1].strip() for row in info.read_text().splitlines() if row.startswith("model name")]
    return {"cpu": names[0] if names else platform.processor(), "cores": os.cpu_count(), "python": sys.version}


if __name__ == "__main__":
    sys.exit(main())
