"""Opens data with many rows, draws shuffled batches, and compares the memory of the process with that for fewer rows.

    python tests/stress/million_rows.py [--rows 1000000]

Not a part of the test suite: it takes a minute or two. Each source is read in a new process, with a tenth of the rows
and with all rows. Exit status 0: each additional row takes at most 16 bytes (a file, GSM8K) or 64 bytes (a mix), with a
tolerance of 8 MB.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tunix_like.config.schema import DataConfig
from tunix_like.data import load_source, reverse_text
from tunix_like.data.stream import check_prompts, prompt_batches

MOST = {"file": 16, "gsm8k": 16, "mix": 64}
NOISE, BATCHES = 8e6, 100


def write(folder: Path, rows: int) -> None:
    folder.mkdir()
    for split, count in (("train", rows), ("test", 100)):
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for i in range(count):
                row = {"question": f"{split} {i} + {i}?", "answer": f"Twice it.\n#### {2 * i}", "id": i}
                file.write(json.dumps(row) + "\n")


def config(kind: str, folder: Path) -> DataConfig:
    train: dict[str, Any] = {"name": "jsonl", "path": str(folder / "train.jsonl"), "prompt_template": "{question}"}
    if kind == "file":
        return DataConfig(**train, eval_size=50_000)
    if kind == "gsm8k":
        return DataConfig(name="gsm8k", path=str(folder))
    other = train | {"path": str(folder / "test.jsonl"), "label": "few"}
    return DataConfig(name="mix", sources=[train | {"label": "many"}, other])


def read(kind: str, folder: Path) -> dict[str, float]:
    """Returns the seconds and the peak memory of the process in bytes."""
    began = time.monotonic()
    data, tokenizer = load_source(config(kind, folder)), reverse_text.tokenizer()
    opened = time.monotonic()
    check_prompts(data.train, tokenizer, 64, "skip", "training")
    checked = time.monotonic()
    batches = prompt_batches(
        data.train, tokenizer, batch_size=64, max_prompt_length=64, seed=0, shuffle=True, forever=True
    )
    for _ in range(BATCHES):
        next(batches)
    drawn = time.monotonic()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    return {
        "rows": len(data.train) + len(data.eval),
        "open": opened - began,
        "check": checked - opened,
        "batch": (drawn - checked) / BATCHES,
        "memory": memory,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--read", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        print(json.dumps(read(arguments.read[0], Path(arguments.read[1]))))
        return 0
    status = 0
    with tempfile.TemporaryDirectory() as name:
        sizes = {rows: Path(name) / str(rows) for rows in (arguments.rows // 10, arguments.rows)}
        for rows, folder in sizes.items():
            write(folder, rows)
        for kind, most in MOST.items():
            found = []
            for rows, folder in sizes.items():
                command = [sys.executable, __file__, "--read", kind, str(folder)]
                said = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
                found.append(json.loads(said.splitlines()[-1]))  # the lines before it are the progress of slow reading
                each = found[-1]
                print(
                    f"{kind:>6}, {rows:>9,} rows: opened in {each['open']:.1f} s, first 20,000 tokenised in "
                    f"{each['check']:.1f} s, {each['batch'] * 1e3:.1f} ms a batch of 64, {each['memory'] / 1e6:.1f} MB",
                    flush=True,
                )
            growth, further = found[1]["memory"] - found[0]["memory"], found[1]["rows"] - found[0]["rows"]
            print(f"{kind:>6}: {growth / further:.1f} bytes for each further row")
            status |= growth > most * further + NOISE
    return status


if __name__ == "__main__":
    sys.exit(main())
