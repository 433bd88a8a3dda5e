"""Kills and resumes a real run whose folder is in object storage, and compares it with the same run without
interruption.

    TUNIX_LIKE_EMULATORS=FOLDER python tests/stress/kill_bucket.py [--storage gs] [--kills 20] [--seed 0]

Not a part of the test suite, except with few kills: it takes some minutes. The bucket is in an emulator
(docs/contributing.md). Each process of the run gets SIGKILL at a random time after it has stored its first checkpoint,
every fourth after it has stored its first file. In turn, the next process runs on the same host, or on another one,
which has no local copy and waits for the lock (2 seconds here). Exit status 0: metrics (except times), completions and
weights are bitwise equal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import fsspec
from safetensors.numpy import load_file

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.buckets import bucket_in, objects
from tests.stress.tiny_run import RUN as TINY
from tests.stress.tiny_run import YAML, command, prepare

RUN = [
    *TINY, "training.max_steps=100", "training.checkpoint_every_n_steps=2", "training.eval_every_n_steps=10",
    "training.log_rollouts_every_n_steps=1", "sft.max_steps=8",
]  # fmt: skip

PROGRAM = """
import sys
from tunix_like.storage import bucket_lock, mirror
bucket_lock.BEAT_SECONDS, bucket_lock.LEASE_SECONDS = 0.3, 2.0
mirror.SCAN_SECONDS = mirror.FILES_SECONDS = 0.05
from tunix_like.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
"""`tunix-like` with a short lease and frequent uploads, so that more kills hit an upload."""


def start(url: str, folder: Path) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", PROGRAM, "train", str(YAML), *RUN, f"training.output_dir={url}"]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(words, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def newest(url: str) -> str:
    """Returns the newest complete checkpoint in the bucket, as `checkpoints/12`."""
    marks = [name for name in objects(url) if name.endswith("/_CHECKPOINT_METADATA")]
    steps = [name.split("/")[:2] for name in marks]
    return "/".join(max(steps, key=lambda step: (step[0] == "checkpoints", int(step[1])), default=["none"]))


def states(url: str) -> set[str]:
    return {name for name in objects(url) if not name.startswith("run.lock/")}


def outcome(url: str, folder: Path) -> dict[str, Any]:
    """Returns all results that must be equal."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    subprocess.run(command("export", url, "out"), cwd=folder, check=True, capture_output=True)
    system, root = fsspec.core.url_to_fs(url)
    system.invalidate_cache()
    rows = [json.loads(line) for line in system.cat_file(f"{root}/metrics.jsonl").splitlines()]
    rows = [{k: v for k, v in row.items() if "time" not in k and "perf" not in k} for row in rows]
    weights = {name: value.tobytes() for name, value in load_file(folder / "out" / "model.safetensors").items()}
    rollouts = {name: system.cat_file(f"{root}/{name}") for name in objects(url) if name.startswith("rollouts/")}
    return {"rows of metrics": rows, "tensors": weights, "files of rollouts": rollouts}


def stress(storage: str, kills: int, seed: int, folder: Path) -> bool:
    """Returns whether a run with `kills` kills equals one without."""
    whole, parts = folder / "whole", folder / "parts"
    for each in (whole, parts):
        prepare(each)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "xla"))
    chance = random.Random(seed)
    with bucket_in(storage, folder) as bucket:
        assert start(f"{bucket}/whole", whole).wait() == 0, (whole / "log").read_text()
        expected = outcome(f"{bucket}/whole", whole)
        url, hosts = f"{bucket}/parts", 1
        for kill in range(1, kills + 1):
            before, newest_before, state = states(url), newest(url), states if kill % 4 == 0 else newest
            process = start(url, parts)
            while process.poll() is None and state(url) in (before, newest_before):
                time.sleep(0.02)
            time.sleep(chance.uniform(0, 1))
            process.kill()
            if process.wait() == 0:
                print(f"{kill:>4}  done before the kill", flush=True)
                break
            assert process.returncode == -9, (parts / "log").read_text()
            print(f"{kill:>4}  host {hosts}  {newest_before} -> {newest(url)}", flush=True)
            if kill % 2 == 0:
                hosts += 1
                shutil.rmtree(folder / "cache" / "runs")
        process = start(url, parts)
        assert process.wait() == 0, (parts / "log").read_text()
        found = outcome(url, parts)
    for name, value in expected.items():
        print(f"{len(value)} {name}: {'the same' if found[name] == value else 'DIFFERENT'}")
    print(f"{kill} kills on {hosts} hosts: {'the same to the bit' if found == expected else 'NOT the same'}")
    return bool(found == expected)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", choices=["gs", "s3"], default="gs")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return 0 if stress(arguments.storage, arguments.kills, arguments.seed, Path(folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
