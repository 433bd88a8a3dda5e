"""Tests Weights & Biases (offline) and trackio: a run is killed with SIGKILL and started again, and the files of the
tools must contain every row of `metrics.jsonl` once, under one id.

    pip install -e '.[wandb,trackio]' && python tests/stress/trackers.py
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tunix_like.storage.loggers import open_metrics

TRACKIO_SENDS = 3.0
"""Seconds after which trackio has written its rows (it writes every half second)."""


def phase(folder: Path, tool: str, key: str, last: int, steps: range, die: bool = False) -> None:
    log = open_metrics(folder, [tool], {"algorithm": {"k": 2}})
    log.cut(key, last)
    for step in steps:
        log.write({key: step, f"{key.rpartition('/')[0] or 'train'}/loss": 1 / (step + 1)})
    if die:
        time.sleep(TRACKIO_SENDS)
        os.kill(os.getpid(), signal.SIGKILL)
    log.close()


def start(number: int, folder: Path, tool: str) -> None:
    """The first start is killed after step 5 of its second phase. The second one resumes from a checkpoint of step
    2."""
    if number == 1:
        phase(folder, tool, "sft/step", -1, range(1, 4))
        phase(folder, tool, "step", -1, range(6), die=True)
    phase(folder, tool, "sft/step", 3, range(0))
    phase(folder, tool, "step", 2, range(3, 8))


def wandb_rows(folder: Path, run: str) -> list[tuple[int, dict[str, float]]]:
    from wandb.proto import wandb_internal_pb2

    found = []
    for file in sorted(folder.glob(f"wandb/offline-run-*-{run}/*.wandb")):
        for data in _records(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                row = {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                found.append((row["_step"], {name: value for name, value in row.items() if name[0] != "_"}))
    return found


def _records(data: bytes) -> Iterator[bytes]:
    """Yields the records of a LevelDB log in blocks of 32 KB, which begins after a header of 7 bytes."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if not kind:
            return
        whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # a record, or the last part of one
            yield whole
            whole = b""


def trackio_rows(folder: Path, run: str) -> list[tuple[int, dict[str, float]]]:
    with sqlite3.connect(folder / "trackio" / "tunix_like.db") as database:
        found = database.execute("select step, metrics from metrics where run_name = ? order by id", [f"run-{run}"])
        return [(step, json.loads(metrics)) for step, metrics in found]


def check(tool: str, folder: Path) -> bool:
    for number in (1, 2):
        done = subprocess.run([sys.executable, __file__, str(number), str(folder), tool], check=False)
        assert done.returncode == (-signal.SIGKILL if number == 1 else 0), done.returncode
    run = json.loads((folder / "tracking.json").read_text())["run"]
    wanted = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if tool == "wandb":
        same = wandb_rows(folder, run) == list(enumerate(wanted, 1))
    else:
        keyed = [(row.pop("sft/step" if "sft/step" in row else "step"), row) for row in wanted]
        same = trackio_rows(folder, run) == keyed
    print(f"{tool}: {len(wanted)} rows, each once and under one id: {'kept' if same else 'BROKEN'}")
    return same


if __name__ == "__main__":
    if len(sys.argv) > 1:
        start(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
        sys.exit()
    with tempfile.TemporaryDirectory() as place:
        os.environ |= {"WANDB_MODE": "offline", "TRACKIO_DIR": f"{place}/trackio/run/trackio"}
        results = [check(tool, Path(place) / tool / "run") for tool in ("wandb", "trackio")]
    sys.exit(not all(results))
