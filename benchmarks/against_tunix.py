"""`python -m benchmarks.against_tunix`: compares this library with google-tunix in one run.

Creates a separate virtual environment for the peer if there is none, gives both sides the same weights, prompts,
lengths, dtype (float32) and optimizer, and runs them alternately: two processes exist, and one of them computes. A
ratio is of useful tokens (completion tokens up to each end) per second, repeat by repeat, because sampled lengths
differ between the sides. Where the completions are given it is the ratio of times. Before a case is timed, both sides
must compute the same logits of the model; where one update is timed, both gradients must have the same norm.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import MODELS, Case, make_case, write_model
from benchmarks.run import machine
from benchmarks.worker import ROOT, Worker, alternate, case_command, count, median

VERSION = "0.1.7"
REQUIREMENTS = ("torch==2.13.0", f"google-tunix=={VERSION}")
"""Torch is installed first, because the peer needs it and would install another version."""

VENV = Path.home() / ".cache" / "tunix_like" / f"tunix-{VERSION}"
PEER = "benchmarks.peer_tunix"


@dataclasses.dataclass(frozen=True)
class Row:
    """A case of a size, with its targets: the least speed relative to the peer, and the least ratio of the peer's peak
    memory to this library's."""

    size: str
    case: str
    speed: float | None = None
    memory: float | None = None

    @property
    def name(self) -> str:
        return f"{self.size}/{self.case}"


TABLE = (
    Row("mid", "rollout", 1.5),
    Row("mid", "rollout_eos", 2.5),
    Row("mid", "rollout_room_1024", 6),
    Row("mid", "rollout_top_p", 8),
    Row("mid", "rollout_s512", 5, 2),
    Row("mid", "update", 1.6, 2.5),
    Row("mid", "update_split"),
    Row("mid", "update_eos", 3),
    Row("mid", "update_2x16_s256", 4, 3),
    Row("tiny", "update_s512_g64", 6, 4),
    Row("mid", "step", 3, 3),
    Row("tiny", "rollout", 1.5),
    Row("tiny", "update", 1.5),
    Row("tiny", "step_full", 1.5),
)
IMPORTS = {"import tunix_like": ("import tunix", 0.3), "from tunix_like import GRPOLearner": ("import tunix", None)}
"""This library's statement and the peer's, and the most seconds wanted of this library's; with None, half of the
peer's."""

HEADER = (
    f"{'case':<24}{'peer s':>8}{'ours s':>8}{'ratio':>7}{'min..max':>15}{'wanted':>9}{'peer tok/s':>12}"
    f"{'ours tok/s':>12}{'peer MB':>9}{'ours MB':>9}{'ratio':>7}{'wanted':>9}"
)


def install_commands(venv: Path) -> list[list[str]]:
    pip = [str(python_of(venv)), "-m", "pip", "install", "--quiet"]
    return [[sys.executable, "-m", "venv", str(venv)], *([*pip, requirement] for requirement in REQUIREMENTS)]


def python_of(venv: Path) -> Path:
    return venv / "bin" / "python"


def prepare(venv: Path) -> Path:
    """Returns the peer's interpreter. Creates its environment if it does not contain the peer.

    Raises:
      subprocess.CalledProcessError: the environment cannot be created (no package index, no space).
    """
    ask = [str(python_of(venv)), "-c", "import importlib.metadata as m; print(m.version('google-tunix'))"]
    if python_of(venv).exists():
        found = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()
        if found == VERSION:
            return python_of(venv)
    print(f"making the peer's environment in {venv} (some minutes, some GB)", flush=True)
    for command in install_commands(venv):
        subprocess.run(command, check=True)
    return python_of(venv)


def compare(case: Case, python: Path, folder: Path, repeats: int) -> dict[str, Any]:
    """Runs both sides of a case alternately.

    Raises:
      RuntimeError: a side failed, or the two sides do not compute the same.
    """
    with Worker(case_command(case, folder, PEER, str(python))) as peer, Worker(case_command(case, folder)) as ours:
        found = alternate(peer, ours, repeats)
    if case.kind == "update" and case.peer_prompts is None:
        same("the gradient's norm", found["peer"]["repeats"][-1], found["ours"]["first"], ("grad_norm",), 1e-3)
    return found


def check_model(case: Case, python: Path, folder: Path) -> None:
    """Compares the logits of a few tokens of both sides.

    Raises:
      RuntimeError: they differ.
    """
    asked = dataclasses.replace(case, kind="logits", prompt_length=16, room=None)
    with Worker(case_command(asked, folder, PEER, str(python))) as peer, Worker(case_command(asked, folder)) as ours:
        same("the logits", peer.repeat(), ours.repeat(), ("mean", "deviation", "last"), 1e-3)


def same(what: str, peer: dict[str, float], ours: dict[str, float], names: Sequence[str], tolerance: float) -> None:
    for name in names:
        if not math.isclose(peer[name], ours[name], rel_tol=tolerance, abs_tol=tolerance):
            raise RuntimeError(f"not the same work: {what} ({name}) is {peer[name]} there and {ours[name]} here")


def line(row: Row, found: dict[str, Any]) -> str:
    def wanted(least: float | None) -> str:
        return f"{'':>9}" if least is None else f"{'>= ' + format(least, 'g'):>9}"

    peer, ours = found["peer"], found["ours"]
    spread = f"{found['ratio_min']:.2f}..{found['ratio_max']:.2f}"
    return (
        f"{row.name:<24}{peer['median_s']:>8.2f}{ours['median_s']:>8.2f}{found['ratio']:>7.2f}{spread:>15}"
        f"{wanted(row.speed)}{peer['tokens_per_s']:>12.0f}{ours['tokens_per_s']:>12.0f}{peer['peak_mb']:>9.0f}"
        f"{ours['peak_mb']:>9.0f}{found['memory']:>7.2f}{wanted(row.memory)}"
    )


def compare_imports(python: Path, repeats: int) -> dict[str, Any]:
    """Returns the seconds of a statement in a fresh interpreter, minus those of an empty one, alternately for both
    sides."""

    def seconds(interpreter: str, statement: str) -> float:
        start = time.perf_counter()
        subprocess.run([interpreter, "-c", statement], cwd=ROOT, check=True, capture_output=True)
        return time.perf_counter() - start

    rows = {}
    for statement, (theirs, most) in IMPORTS.items():
        pairs = []
        for _ in range(repeats + 1):  # the first run reads from the disk
            peer = seconds(str(python), theirs) - seconds(str(python), "pass")
            pairs.append((peer, seconds(sys.executable, statement) - seconds(sys.executable, "pass")))
        peer, ours = (median(values) for values in zip(*pairs[1:], strict=True))
        goal = "half of the peer's" if most is None else f"{most:g} s"
        print(f"{statement:<40} peer {peer:.2f} s, ours {ours:.2f} s; wanted: at most {goal}", flush=True)
        rows[statement] = {"peer_s": peer, "ours_s": ours, "pairs": pairs}
    return rows


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [row.name for row in TABLE]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against_tunix", description=__doc__)
    parser.add_argument("--case", nargs="+", choices=[*names, "import"], default=[*names, "import"], metavar="NAME")
    parser.add_argument("--size", choices=MODELS, help="this model in every case, to try things out")
    parser.add_argument("--repeats", type=count, default=5, help="after the one that compiles (default: 5)")
    parser.add_argument("--venv", type=Path, default=VENV, help=f"the peer's environment (default: {VENV})")
    parser.add_argument("--json", type=Path, help="file for everything measured")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    python = prepare(options.venv)
    found: dict[str, Any] = {"machine": machine(), "peer": VERSION, "cases": {}}
    failed = False
    print(HEADER, flush=True)
    rows = [row for row in TABLE if row.name in options.case]
    if options.size is not None:
        rows = list(dict.fromkeys(Row(options.size, row.case) for row in rows))
    for row in rows:
        case = dataclasses.replace(make_case(row.case, row.size), dtype="float32")  # the peer's default
        try:
            with tempfile.TemporaryDirectory(prefix="benchmark_") as folder:
                write_model(case, Path(folder))
                check_model(case, python, Path(folder))
                result = compare(case, python, Path(folder), options.repeats)
        except RuntimeError as error:  # a case out of memory must not discard the others
            failed = True
            print(f"{row.name:<24}{error}", flush=True)
            continue
        found["cases"][row.name] = result | {"wanted_speed": row.speed, "wanted_memory": row.memory}
        print(line(row, result), flush=True)
    if "import" in options.case:
        found["import"] = compare_imports(python, options.repeats)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
