"""Five learners on sums with SmolLM2-135M-Instruct, three seeds each: `results/LEARNER-sSEED.json` beside this file.

    python examples/smollm2/study.py --out runs/smollm2 [--seeds 3]
    python examples/smollm2/study.py --table     # of the results that are there, as Markdown

Every run has the completions, the constant learning rate and the held-out problems of `sums.yaml`. Its result is
written as soon as it ends, and results that are there are not made again; some 15 minutes a run on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
LEARNERS: dict[str, tuple[str, ...]] = {
    "maxrl": (),
    "rloo": (),
    "grpo": (),
    "maxpo": ("algorithm.k=4",),
    "drgrpo": (),
}
BEFORE = "before"
STEPS = 16
SAMPLES = 64
KEPT = ("step", "train/rewards/mean", "train/entropy", "train/grad_norm", "train/completions/mean_length")
BINS = ("train/pass_rate/drawn", "train/pass_rate/advantage")


def tunix_like(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "tunix_like", *arguments], check=True, stdout=subprocess.DEVNULL)


def evaluated(source: str, out: Path, *overrides: str) -> dict[str, Any]:
    """Evaluates a run or the config before training. Returns pass@k with intervals, and the number of right samples of
    each held-out problem."""
    tunix_like("eval", source, f"eval.samples={SAMPLES}", "eval.k=[1,4,16,64]", *overrides, "--out", str(out))
    metrics = json.loads(out.with_suffix(".summary.json").read_text())["metrics"]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    pass_at = {name: round(value, 4) for name, value in metrics.items() if "pass@" in name}
    return {"pass_at": pass_at, "right": [sum(reward >= 1 for reward in row["rewards"]) for row in rows]}


def trained(folder: Path, learner: str, seed: int) -> dict[str, Any]:
    """Trains and evaluates one run. Returns what is kept of it."""
    run = folder / f"{learner}-s{seed}"
    own = [f"algorithm.advantage_estimator={learner}", f"training.seed={seed}", f"training.max_steps={STEPS}"]
    # The evaluations of the run are one sample: those that count come afterwards.
    own += [f"training.output_dir={run}", "eval.max_problems=1", "eval.samples=1", "eval.k=[1]", *LEARNERS[learner]]
    tunix_like("train", str(HERE / "sums.yaml"), *own)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [{name: row[name] for name in (*KEPT, *BINS) if name in row} for row in rows if row.get("step")]
    found = evaluated(str(run), folder / "eval" / f"{learner}-s{seed}.jsonl", "eval.max_problems=null")
    return found | {"steps": steps, "minutes": round(sum(row.get("train/step_time_sec", 0) for row in rows) / 60, 1)}


def table() -> str:
    """Returns pass@k of each result (with its 95% interval for k = 1), the number of held-out problems that a sample
    solved, and the entropy of the last step."""
    lines = ["| | pass@1 | pass@4 | pass@16 | pass@64 | problems solved | entropy |", "|---|---|---|---|---|---|---|"]
    patterns = [BEFORE, *(f"{learner}-s*" for learner in LEARNERS)]
    for file in (file for pattern in patterns for file in sorted(RESULTS.glob(f"{pattern}.json"))):
        found = json.loads(file.read_text())
        at = {key.removeprefix("eval/pass@"): 100 * value for key, value in found["pass_at"].items()}
        solved = sum(right > 0 for right in found["right"])
        steps = found.get("steps")
        entropy = f"{steps[-1]['train/entropy']:.2f}" if steps else ""
        interval = f"{at['1']:.1f} [{at['1/low']:.1f}, {at['1/high']:.1f}]"
        lines.append(
            f"| {file.stem} | {interval} | {at['4']:.1f} | {at['16']:.1f} | {at['64']:.1f} | "
            f"{solved} of {len(found['right'])} | {entropy} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if arguments.table:
        print(table())
        return
    if arguments.out is None:
        parser.error("--out: give the folder of the runs")
    (arguments.out / "eval").mkdir(parents=True, exist_ok=True)
    RESULTS.mkdir(exist_ok=True)

    def write(name: str, found: dict[str, Any]) -> None:
        (RESULTS / f"{name}.json").write_text(json.dumps(found) + "\n")
        print(name, found["pass_at"], flush=True)

    if not (RESULTS / f"{BEFORE}.json").exists():
        write(BEFORE, evaluated(str(HERE / "sums.yaml"), arguments.out / "eval" / f"{BEFORE}.jsonl"))
    for seed in range(arguments.seeds):
        for learner in LEARNERS:
            if not (RESULTS / f"{learner}-s{seed}.json").exists():
                write(f"{learner}-s{seed}", trained(arguments.out.resolve(), learner, seed))


if __name__ == "__main__":
    main()
