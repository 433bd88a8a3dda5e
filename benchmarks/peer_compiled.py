"""`python -m benchmarks.peer_compiled`: compiles google-tunix 0.1.7 and this library for a TPU, without a TPU.

Both compile their own update (by default 64 completions of 384 + 768 tokens; here 8 prompts x 8) and their own decoding
(128 rows, one token of each) for v5e-8 with XLA:TPU, at Qwen3-1.7B's widths with `--layers` layers. It prints
the memory of a device, the compiler's cycles with the trip counts of loops, the bytes that a device receives by kind of
collective, and the seconds to compile, which are only comparable on an idle machine. It needs this library's extra
`tpu`. An environment for the peer is created if there is none. Each of the four programs is compiled once, which takes
some minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.against_tunix import VERSION, python_of
from benchmarks.compiled import Work
from benchmarks.worker import ROOT, count
from tunix_like.compile.devices import compiler_of

VENV = Path.home() / ".cache" / "tunix_like" / f"tunix-{VERSION}-tpu"
PROGRAMS = ("update", "decode")
SIDES = {"ours": "benchmarks.compiled_ours", "tunix": "benchmarks.compiled_tunix"}

PRODUCTS = 11
"""Matrix products over all visible pairs in the attention kernels of an update: two forward, two when a layer is
recomputed, three for the queries' gradient and four for that of keys and values."""


def prepare_peer(venv: Path) -> Path:
    """Returns the peer's interpreter; its environment is made, with this one's jax, if it does not have the peer.

    Raises:
      subprocess.CalledProcessError: the environment cannot be made.
    """
    python = python_of(venv)
    if python.exists() and subprocess.run([str(python), "-c", "import tunix, libtpu"], check=False).returncode == 0:
        return python
    print(f"making the peer's environment in {venv} (some minutes, some GB)", flush=True)
    same = {name: importlib.metadata.version(name) for name in ("jax", "flax", "libtpu")}
    packages = [f"google-tunix=={VERSION}", f"jax[tpu]=={same['jax']}", f"flax=={same['flax']}"]
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *packages, f"libtpu=={same['libtpu']}"], check=True)
    return python


def compile_side(python: str, side: str, program: str, work: Work) -> dict[str, Any]:
    """Compiles a program of a side in a separate process and returns its costs.

    Raises:
      RuntimeError: the process failed; the message has the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="compiled_") as folder:
        out = Path(folder) / "found.json"
        command = [python, "-m", SIDES[side], program, json.dumps(dataclasses.asdict(work)), str(out)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{side} {program} ended ({done.returncode}):\n{done.stderr[-3000:]}")
        return dict(json.loads(out.read_text(encoding="utf-8")))


def kernel_cycles(work: Work, found: Mapping[str, Any]) -> float:
    """Returns the cycles of the products inside attention kernels, which the compiler does not count.

    They are the products of visible pairs at the peak, so the true number is larger; 0 without kernels.
    """
    if not found["kernels"]:
        return 0.0
    kind, devices = work.target
    assert kind.clock is not None
    length, rows = work.length, work.prompts * work.group
    pairs = work.prompts * work.prompt_length * (work.prompt_length + 1) / 2
    pairs += rows * (length * work.prompt_length + length * (length + 1) / 2)
    width = work.model["num_attention_heads"] * work.model["head_dim"]
    return PRODUCTS * 2.0 * width * pairs * work.layers / devices / (kind.operations / kind.clock)


def table(work: Work, found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the lines of a Markdown table with a column per program and side."""
    kinds = sorted({kind for each in found.values() for kind in each["collectives"]})

    def row(name: str, cell: Callable[[Mapping[str, Any]], str]) -> str:
        return f"| {name} | " + " | ".join(cell(each) for each in found.values()) + " |"

    def received(kind: str) -> Callable[[Mapping[str, Any]], str]:
        return lambda each: (
            f"{each['collectives'][kind] / 1e6:,.1f} MB ({each['numbers'][kind]:.0f})"
            if kind in each["collectives"]
            else "-"
        )

    return [
        f"| {work.devices}, {work.layers} layers, per device | " + " | ".join(found) + " |",
        "|---" * (len(found) + 1) + "|",
        row("arguments", lambda each: f"{each['arguments'] / 1e9:.2f} GB"),
        row("temporaries", lambda each: f"{each['temporaries'] / 1e9:.2f} GB"),
        row("Mcycles by the compiler", lambda each: f"{each['cycles'] / 1e6:.4g}"),
        row("Mcycles of products in kernels", lambda each: f"{kernel_cycles(work, each) / 1e6:.3g}"),
        row("operations outside kernels", lambda each: f"{each['operations']:.3g}"),
        *(row(f"{kind} (number)", received(kind)) for kind in kinds),
        row("network", lambda each: f"{sum(each['collectives'].values()) / 1e6:,.1f} MB"),
        row("seconds to compile", lambda each: f"{each['compile_seconds']:.0f}"),
    ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer_compiled", description=__doc__)
    parser.add_argument("--layers", type=count, default=4, help="layers of the model (default: 4)")
    for field in ("prompts", "group", "prompt_length", "length"):
        option, value = f"--{field.replace('_', '-')}", getattr(Work(), field)
        parser.add_argument(option, type=count, default=value, help=f"of the update (default: {value})")
    parser.add_argument("--side", nargs="+", choices=SIDES, default=list(SIDES), help="default: both")
    parser.add_argument("--program", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), help="default: both")
    parser.add_argument("--size", choices=("tiny", "qwen3_1.7b"), default="qwen3_1.7b", help="tiny: to try things out")
    parser.add_argument("--venv", type=Path, default=VENV, help=f"the peer's environment (default: {VENV})")
    parser.add_argument("--json", type=Path, help="file for everything found")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    sizes = {name: getattr(options, name) for name in ("layers", "prompts", "group", "prompt_length", "length")}
    work = Work(**sizes, tiny=options.size == "tiny")
    if compiler_of(work.target[0]) is None:
        print("XLA:TPU is not installed: pip install 'tunix-like[tpu]'", file=sys.stderr)
        return 1
    pythons = {"ours": sys.executable}
    if "tunix" in options.side:
        pythons["tunix"] = str(prepare_peer(options.venv))
    found: dict[str, dict[str, Any]] = {}
    failed = False
    for program in options.program:
        for side in options.side:
            try:
                found[f"{program}, {side}"] = compile_side(pythons[side], side, program, work)
            except RuntimeError as error:  # the results of the other programs are still useful
                failed = True
                print(error, flush=True)
    print("\n".join(table(work, found)), flush=True)
    if unknown := sorted({name for each in found.values() for name in each["unknown"]}):
        print(f"loops counted once because their number of trips is data: {', '.join(unknown)}")
    if options.json is not None:
        options.json.write_text(json.dumps({"work": dataclasses.asdict(work), "found": found}, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
