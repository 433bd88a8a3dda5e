"""Kills a real run again and again at random moments, and compares what it comes to with the same run left alone.

    python tests/stress/kill_resume.py [--kills 20] [--seed 0] [--folder FOLDER]

Not a part of the test suite: it takes some minutes. Every life of the run gets SIGKILL after 0.3 to 2 times the
seconds that the life before took to its first step; the last one is let finish. Exit status 0: metrics (times
aside), completions and weights are the same to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

YAML = Path(__file__).resolve().parents[2] / "examples" / "debug" / "reverse_text.yaml"
RUN = [
    "model.config.hidden_size=64", "model.config.intermediate_size=64", "model.config.num_hidden_layers=1",
    "data.batch_size=8", "data.train_size=200", "data.eval_size=8", "algorithm.num_generations=4",
    "algorithm.advantage_estimator=grpo", "algorithm.beta=0.05", "algorithm.dynamic_sampling=true",
    "sft.max_steps=20", "sft.batch_size=8", "eval.batch_size=8", "eval.samples=2", "training.max_steps=100",
    "training.checkpoint_every_n_steps=1", "training.eval_every_n_steps=10", "training.log_rollouts_every_n_steps=1",
    "training.output_dir=run", "rewards.functions=[{name: reward.py:graded}]",
]  # fmt: skip

REWARD = """
def graded(prompts, completions, answer, **columns):
    return [sum(a == b for a, b in zip(text, gold)) + 0.1 * len(text) for text, gold in zip(completions, answer)]
"""


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "tunix_like", *words]


def newest(folder: Path) -> str:
    """The newest whole checkpoint, as `checkpoints/12`."""
    for name in ("checkpoints", "sft_checkpoints"):
        steps = [int(path.name) for path in (folder / name).glob("*") if path.name.isdigit()]
        if steps:
            return f"{name}/{max(steps)}"
    return "none"


def live(folder: Path, seconds: float | None) -> tuple[int, float, str]:
    """One life of the run: its exit status, how long it took to its first step of training, and what it said."""
    began, first, said = time.monotonic(), float("nan"), []
    with subprocess.Popen(
        command("train", str(YAML), *RUN), cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        killer = None
        if seconds is not None:
            killer = subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -9 {process.pid} 2>/dev/null"])
        for line in process.stdout or ():
            said.append(line)
            if re.match(r"train +[1-9]\d*/", line) and first != first:
                first = time.monotonic() - began
        code = process.wait()
    if killer is not None:
        killer.kill()
        killer.wait()
    return code, first, "".join(said)


def outcome(folder: Path) -> dict[str, Any]:
    """All that must be the same."""
    subprocess.run(command("export", "run", "out"), cwd=folder, check=True, capture_output=True)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = [{k: v for k, v in row.items() if "time" not in k and "perf" not in k} for row in rows]
    weights = {name: value.tobytes() for name, value in load_file(folder / "out" / "model.safetensors").items()}
    rollouts = {path.name: path.read_text() for path in (folder / "run" / "rollouts").glob("*.jsonl")}
    return {"rows of metrics": rows, "tensors": weights, "files of rollouts": rollouts}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="kill_resume_"))
    whole, parts = folder / "whole", folder / "parts"
    for each in (whole, parts):
        each.mkdir(parents=True)
        (each / "reward.py").write_text(REWARD)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "xla"))
    code, first, said = live(whole, None)  # compiles
    assert code == 0, said
    expected = outcome(whole)
    chance, kills = random.Random(arguments.seed), 0
    print(f"{'kill':>4}  {'after':>7}  {'first step':>10}  newest checkpoint  warnings", flush=True)
    while kills < arguments.kills:
        seconds = chance.uniform(0.3, 2.0) * first
        before = newest(parts / "run")
        code, reached, said = live(parts, seconds)
        if code != -signal.SIGKILL:
            print(f"ended with {code} instead of being killed: {'finished' if code == 0 else said}")
            break
        kills += 1
        first = reached if reached == reached else first
        reached_text = "-" if reached != reached else f"{reached:.1f} s"
        warned = len(re.findall(r"^WARNING", said, re.M))
        print(
            f"{kills:>4}  {seconds:5.1f} s  {reached_text:>10}  {before} -> {newest(parts / 'run')}  {warned}",
            flush=True,
        )
    code, _, said = live(parts, None)
    assert code == 0, said
    found, same = outcome(parts), True
    for name, value in expected.items():
        equal = found[name] == value
        same &= equal
        print(f"{len(value)} {name}: {'the same' if equal else 'DIFFERENT'}")
    print(f"{kills} kills: {'the same to the bit' if same else 'NOT the same'}")
    return 0 if same and kills == arguments.kills else 1


if __name__ == "__main__":
    sys.exit(main())
