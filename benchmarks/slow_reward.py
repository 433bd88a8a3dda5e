"""Training with a slow reward and samplers of several ages: seconds per step, and held-out pass@1 after equal steps.

    tunix-like train examples/maze.yaml training.max_steps=1 training.output_dir=runs/start
    tunix-like export runs/start start_model
    python -m benchmarks.slow_reward start_model [--steps N] [--seeds N] [--json FILE]

The task is `examples/maze.yaml` with small batches, after its supervised part. The reward of a batch waits
without computing, as a remote judge does: 0.1 s, and 0.9 s in every fourth batch. There are two devices on the CPU, one
of them only samples. The runs of different ages alternate.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from tunix_like.cli.main import main as command
from tunix_like.rewards.maze import maze

AGES = (0, 1, 2, 4)
WAITS = itertools.cycle([0.1, 0.1, 0.1, 0.9])
CONFIG = Path(__file__).parents[1] / "examples" / "maze.yaml"
KEYS = (
    "model.init=pretrained", "model.config=null", "sft.max_steps=0", "data.batch_size=16", "data.eval_size=128",
    "data.train_size=4000", "algorithm.num_generations=8", "algorithm.sampler_is=token", "rollout.devices=1",
    "optimizer.learning_rate=5e-5", "optimizer.schedule=constant", "eval.samples=8", "eval.k=[1]", "rewards.workers=0",
    f"rewards.functions=[{{name: '{__file__}:slow_maze'}}]",
)  # fmt: skip


def slow_maze(prompts: list[str], completions: list[str], grid: list[str], **_: Any) -> list[float]:
    time.sleep(next(WAITS))
    return maze(prompts, completions, grid)


def trained(model: str, age: int, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """Trains one run. Returns the mean seconds of a step, and pass@1 with its interval before and after."""
    keys = (f"model.path={model}", f"rollout.max_staleness={age}", f"training.seed={seed}")
    keys += (f"training.max_steps={steps}", f"training.output_dir={folder}")
    if status := command(["train", str(CONFIG), *KEYS, *keys]):
        raise SystemExit(status)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    scores = [[row[f"eval/{name}"] for name in ("pass@1", "low/pass@1", "high/pass@1")] for row in rows
              if "eval/pass@1" in row]  # fmt: skip
    late = [row for row in rows if row.get("step", 0) > max(AGES) + 4]  # compiled, and with the groups of all ages
    return {
        "age": age,
        "seed": seed,
        "step_seconds": statistics.mean(row["train/step_time_sec"] for row in late),
        "staleness": statistics.mean(row["train/staleness"] for row in late) if age else 0.0,
        "before": scores[0],
        "after": scores[-1],
    }


def main() -> None:
    """Prints the seconds of a step and pass@1 of each run, and writes them to `--json FILE`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the model that the training starts from")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2)
    found = []
    for seed in range(arguments.seeds):
        for age in AGES:
            with tempfile.TemporaryDirectory() as folder:
                found.append(trained(arguments.model, age, seed, arguments.steps, Path(folder) / "run"))
            row = found[-1]
            after, low, high = row["after"]
            print(
                f"seed {seed}  max_staleness {age}: {row['step_seconds']:.2f} s per step, pass@1 "
                f"{row['before'][0]:.3f} -> {after:.3f} ({low:.3f} to {high:.3f})",
                flush=True,
            )
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
