"""Objectives of the pass rate and of order statistics, and PPO, on two tasks: pass@1 to pass@16, and diversity.

    python -m benchmarks.objectives FOLDER [--tasks maze maze_steps] [--seeds N]

For each task and seed, the supervised part of the example is trained once, and every objective continues from it with
the same number of completions. Runs that are complete in FOLDER are not repeated. `distinct` is the number of different
completions among the samples of a problem, divided by the number of samples.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from tunix_like.cli.main import main as command

EXAMPLES = Path(__file__).parents[1] / "examples"
TASKS = {"maze": EXAMPLES / "maze.yaml", "maze_steps": EXAMPLES / "environments" / "maze_steps.yaml"}
SIZE = 16  # completions per prompt
MIX, RANKS = "maxk_mix", "order_statistic"
OBJECTIVES: dict[str, dict[str, object]] = {
    "alpha 0 (rloo)": {"advantage_estimator": MIX, "alpha": 0.0},
    "alpha 0.5": {"advantage_estimator": MIX, "alpha": 0.5},
    "alpha 1 (maxrl)": {"advantage_estimator": MIX, "alpha": 1.0},
    "alpha 1.5": {"advantage_estimator": MIX, "alpha": 1.5},
    "alpha 1.5 to 0": {"advantage_estimator": MIX, "alpha": "{start: 1.5, end: 0.0, steps: 120}"},
    "max of 8": {"advantage_estimator": RANKS, "k": 8, "statistic": "top_mean:1"},
    "best half of 8": {"advantage_estimator": RANKS, "k": 8, "statistic": "upper_tail_mean:0.5"},
    "ppo": {"advantage_estimator": "ppo", "critic.learning_rate": 1e-3},
    "worst half of 8": {"advantage_estimator": RANKS, "k": 8, "statistic": "lower_tail_mean:0.5"},
}
SAMPLES, KS = 64, (1, 2, 4, 8, 16)
STEPS = {"maze": 120, "maze_steps": 50}


def call(*arguments: str) -> None:
    if status := command(list(arguments)):
        raise SystemExit(status)


def start(task: str, seed: int, folder: Path) -> Path:
    """Returns the folder of the start model of a task and a seed."""
    run, model = folder / f"{task}-start-s{seed}", folder / f"{task}-start-s{seed}-model"
    if not (model / "config.json").exists():
        call("sft", str(TASKS[task]), f"training.seed={seed}", f"training.output_dir={run}")
        call("export", str(run), str(model))
    return model


def train(task: str, seed: int, objective: str, folder: Path) -> Path:
    """Trains an objective from the start model of a task and a seed. Returns the run folder."""
    run = folder / f"{task}-s{seed}-{objective.replace(' ', '_')}"
    if not (run / "done").exists():
        model = start(task, seed, folder)
        keys = {key if "." in key else f"algorithm.{key}": value for key, value in OBJECTIVES[objective].items()}
        of_objective = [f"{key}={value}" for key, value in keys.items()]
        call(
            "train", str(TASKS[task]), f"model.path={model}", "model.init=pretrained", "model.config=null",
            "sft.max_steps=0", f"algorithm.num_generations={SIZE}", "data.batch_size=16", "eval.samples=1",
            "eval.k=[1]", f"training.max_steps={STEPS[task]}", f"training.seed={seed}",
            f"training.output_dir={run}", *of_objective,
        )  # fmt: skip
        (run / "done").touch()
    return run


def evaluate(run: Path) -> dict[str, float]:
    """Returns pass@k and `distinct` of the held-out problems."""
    out = run / "samples.jsonl"
    if not out.with_suffix(".summary.json").exists():
        out.unlink(missing_ok=True)  # half of a pair, from a call that was stopped between the two files
        call("eval", str(run), f"eval.samples={SAMPLES}", f"eval.k=[{', '.join(map(str, KS))}]", "--out", str(out))
    summary = json.loads(out.with_suffix(".summary.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    found = {f"pass@{k}": summary["metrics"][f"eval/pass@{k}"] for k in KS}
    return found | {"distinct": float(np.mean([len(set(row["completions"])) / SAMPLES for row in rows]))}


def main() -> None:
    """Prints the results, and writes those of each run to FOLDER/results.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    results = []
    for task in arguments.tasks:
        for seed in range(arguments.seeds):
            for objective in OBJECTIVES:
                found = evaluate(train(task, seed, objective, arguments.folder))
                results.append({"task": task, "seed": seed, "objective": objective} | found)
                print(task, seed, objective, {name: round(value, 3) for name, value in found.items()}, flush=True)
    (arguments.folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for task in arguments.tasks:
        print(f"\n{task}: means over seeds, with 95 % intervals by Student's t")
        for objective in OBJECTIVES:
            rows = [row for row in results if row["task"] == task and row["objective"] == objective]
            cells = [interval([row[name] for row in rows]) for name in (*(f"pass@{k}" for k in KS), "distinct")]
            print(f"| {objective} | " + " | ".join(cells) + " |")


def interval(values: Sequence[float]) -> str:
    numbers = 100 * np.asarray(values)
    half = stats.t.ppf(0.975, len(numbers) - 1) * numbers.std(ddof=1) / len(numbers) ** 0.5 if len(numbers) > 1 else 0
    return f"{numbers.mean():.1f} ± {half:.1f}"


if __name__ == "__main__":
    main()
