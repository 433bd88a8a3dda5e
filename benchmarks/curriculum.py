"""Ways to choose training prompts: held-out pass@1 against the number of sampled completions.

    tunix-like train examples/maze.yaml training.max_steps=1 training.output_dir=runs/start
    tunix-like export runs/start start_model
    python -m benchmarks.curriculum start_model [--steps N] [--seeds N] [--json FILE]

The task is `examples/maze.yaml` with RLOO, few training prompts and small batches, after its supervised part. Dynamic
sampling takes fewer steps, because it samples further batches in a step. The target is halfway between the first
evaluation and the best one of uniform draws, so it depends on the seed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from tunix_like.cli.main import main as command

KINDS = {
    "uniform": (),
    "dynamic sampling": ("algorithm.dynamic_sampling=true",),
    "curriculum": ("data.curriculum=true",),
    "curriculum, not corrected": ("data.curriculum=true", "data.curriculum_correct=false"),
}
BATCH, SIZE = 16, 8
CONFIG = Path(__file__).parents[1] / "examples" / "maze.yaml"
KEYS = (
    "model.init=pretrained", "model.config=null", "sft.max_steps=0", f"data.batch_size={BATCH}", "data.eval_size=256",
    "data.train_size=512", f"algorithm.num_generations={SIZE}", "algorithm.advantage_estimator=rloo",
    "optimizer.learning_rate=1e-4", "optimizer.schedule=constant", "eval.samples=8", "eval.k=[1, 8]",
    "training.eval_every_n_steps=8",
)  # fmt: skip


def trained(model: str, kind: str, seed: int, steps: int, folder: Path) -> list[dict[str, float]]:
    """Trains one run. Returns a row per evaluation: completions sampled so far, pass@1 with its interval, pass@8, and
    the fraction of mixed groups since the evaluation before."""
    keys = (f"model.path={model}", f"training.seed={seed}", f"training.max_steps={steps}")
    if status := command(["train", str(CONFIG), *KEYS, *KINDS[kind], *keys, f"training.output_dir={folder}"]):
        raise SystemExit(status)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found, sampled, mixed = [], 0.0, []
    for row in rows:
        if "train/loss" in row:
            sampled += BATCH * SIZE * (1 + row.get("train/dynamic_sampling/extra_batches", 0.0))
            mixed.append(row["train/groups/mixed_frac"])
        if "eval/pass@1" in row:
            scores = {name: row[f"eval/{name}"] for name in ("pass@1", "low/pass@1", "high/pass@1", "pass@8")}
            found.append({"sampled": sampled, "mixed": sum(mixed) / max(len(mixed), 1)} | scores)
            mixed = []
    return found


def reached(rows: list[dict[str, float]], target: float) -> float | None:
    """Returns the number of sampled completions at the first evaluation whose pass@1 is at least `target`."""
    return next((row["sampled"] for row in rows if row["pass@1"] >= target), None)


def main() -> None:
    """Prints the results of each seed, and writes all evaluations to `--json FILE`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the model that the training starts from")
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: list[dict[str, Any]] = []
    for seed in range(arguments.seeds):
        of_seed = {}
        for kind in KINDS:
            steps = arguments.steps // 2 if kind == "dynamic sampling" else arguments.steps
            with tempfile.TemporaryDirectory() as folder:
                of_seed[kind] = trained(arguments.model, kind, seed, steps, Path(folder) / "run")
            found.append({"seed": seed, "kind": kind, "evaluations": of_seed[kind]})
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        uniform = [row["pass@1"] for row in of_seed["uniform"]]
        target = (uniform[0] + max(uniform)) / 2
        for kind, rows in of_seed.items():
            last = rows[-1]
            print(
                f"seed {seed}  {kind:<26} pass@1 {target:.3f} after {reached(rows, target)} completions; at the end, "
                f"{last['sampled']:.0f} completions, pass@1 {last['pass@1']:.3f} ({last['low/pass@1']:.3f} to "
                f"{last['high/pass@1']:.3f}), pass@8 {last['pass@8']:.3f}, mixed groups {last['mixed']:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
