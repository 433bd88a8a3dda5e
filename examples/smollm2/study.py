"""Learners on a task with SmolLM2-135M-Instruct, three seeds each: `results/TASK/LEARNER-sSEED.json` beside this file.

    python examples/smollm2/study.py sums --out runs/smollm2 [--seeds 3]    # or letters
    python examples/smollm2/study.py gsm8k --out runs/smollm2 --seeds 1 --data FOLDER    # train.jsonl and test.jsonl
    python examples/smollm2/study.py sums --table         # of the results that are there, as Markdown
    python examples/smollm2/study.py sums --figure FILE   # their pass@k

Every run of a task has the completions, the constant learning rate and the held-out problems of its config. Its result
is written as soon as it ends, and results that are there are not made again; some 15 minutes a run of sums on two idle
cores, 5 of letters. GSM8K is cut to what two cores do in an hour; its learner starts from a supervised model.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.stats

from tunix_like.evaluation.statistics import pass_at_k

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"


class Task(NamedTuple):
    """A config beside this file, and what is trained on it.

    Attributes:
      overrides: of all runs and evaluations.
      supervised: overrides of the supervised run from which the learners start; empty without one.
    """

    config: str
    steps: int
    learners: tuple[str, ...]
    samples: int = 64
    ks: tuple[int, ...] = (1, 4, 16, 64)
    problems: str = "null"
    overrides: tuple[str, ...] = ()
    supervised: tuple[str, ...] = ()


TASKS = {
    "sums": Task("sums.yaml", 16, ("maxrl", "rloo", "grpo", "maxpo", "drgrpo")),
    "letters": Task("reasoning_gym.yaml", 32, ("maxrl", "rloo", "maxpo")),
    "gsm8k": Task(
        "gsm8k.yaml",
        16,
        ("maxrl",),
        samples=16,
        ks=(1, 4, 16),
        problems="100",
        overrides=("rollout.max_prompt_length=128", "rollout.max_tokens_to_generate=128", "data.batch_size=8"),
        supervised=("sft.max_steps=40", "sft.optimizer.warmup_steps=4"),
    ),
}
ARGUMENTS = {"maxpo": ("algorithm.k=4",)}
BEFORE = "before"
SUPERVISED = "supervised"
LABELS = {
    BEFORE: "before",
    SUPERVISED: "supervised",
    "maxrl": "MaxRL",
    "rloo": "RLOO",
    "grpo": "GRPO",
    "maxpo": "MaxPO, k = 4",
    "drgrpo": "Dr. GRPO",
}
COLOURS = {
    BEFORE: "#7f7f7f",
    SUPERVISED: "#000000",
    "maxrl": "#0072b2",
    "rloo": "#e69f00",
    "grpo": "#d55e00",
    "maxpo": "#009e73",
    "drgrpo": "#cc79a7",
}
KEPT = ("step", "train/rewards/mean", "train/entropy", "train/grad_norm", "train/completions/mean_length")
BINS = ("train/pass_rate/drawn", "train/pass_rate/advantage")


def tunix_like(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "tunix_like", *arguments], check=True, stdout=subprocess.DEVNULL)


def evaluated(source: str, out: Path, task: Task, *overrides: str) -> dict[str, Any]:
    """Evaluates a run or the config before training. Returns pass@k with intervals, the number of right samples of each
    held-out problem, and how often each of the most frequent completions was sampled."""
    own = [f"eval.samples={task.samples}", f"eval.k={list(task.ks)}", f"eval.max_problems={task.problems}"]
    tunix_like("eval", source, *own, *overrides, "--out", str(out))
    metrics = json.loads(out.with_suffix(".summary.json").read_text())["metrics"]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    pass_at = {name: round(value, 4) for name, value in metrics.items() if "pass@" in name}
    right = [sum(reward >= 1 for reward in row["rewards"]) for row in rows]
    replies = collections.Counter(text.strip() for row in rows for text in row["completions"])
    return {"pass_at": pass_at, "right": right, "replies": {text: n for text, n in replies.most_common(8) if n > 1}}


# The evaluations of a run are one sample: those that count come afterwards.
SHORT_EVALUATION = ("eval.max_problems=1", "eval.samples=1", "eval.k=[1]")


def trained(folder: Path, task: Task, learner: str, seed: int, *overrides: str) -> dict[str, Any]:
    """Trains and evaluates one run. Returns what is kept of it."""
    run = folder / f"{learner}-s{seed}"
    own = [f"algorithm.advantage_estimator={learner}", f"training.seed={seed}", f"training.max_steps={task.steps}"]
    own += [f"training.output_dir={run}", *SHORT_EVALUATION, *ARGUMENTS.get(learner, ())]
    own += [f"model.path={folder / SUPERVISED}", "sft.max_steps=0"] if task.supervised else []
    tunix_like("train", str(HERE / task.config), *overrides, *own)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [{name: row[name] for name in (*KEPT, *BINS) if name in row} for row in rows if row.get("step")]
    found = evaluated(str(run), folder / "eval" / f"{learner}-s{seed}.jsonl", task)
    return found | {"steps": steps, "minutes": round(sum(row.get("train/step_time_sec", 0) for row in rows) / 60, 1)}


def results(name: str) -> dict[str, list[dict[str, Any]]]:
    """Returns a task's stored results of each learner (and of the model before training) by seed."""
    patterns = {BEFORE: BEFORE, SUPERVISED: SUPERVISED} | {learner: f"{learner}-s*" for learner in TASKS[name].learners}
    found = {
        learner: [json.loads(file.read_text()) for file in sorted((RESULTS / name).glob(f"{pattern}.json"))]
        for learner, pattern in patterns.items()
    }
    return {learner: runs for learner, runs in found.items() if runs}


def mean(values: Sequence[float], digits: int = 1) -> str:
    """Returns the mean with its 95% interval over seeds by Student's t; one or two values as they are."""
    if len(values) < 3:
        return ", ".join(str(value) if isinstance(value, int) else f"{value:.{digits}f}" for value in values)
    half = scipy.stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    return f"{np.mean(values):.{digits}f} ± {half:.{digits}f}"


def table(name: str) -> str:
    """Returns pass@k of each learner, the number of held-out problems that a sample solved, and the last entropy;
    pass@1 also of each seed with its 95% interval over problems."""
    ks = TASKS[name].ks
    lines = [f"| | {' | '.join(f'pass@{k}' for k in ks)} | problems solved | entropy | pass@1 of each seed |"]
    lines.append("|---" * (len(ks) + 4) + "|")
    for learner, runs in results(name).items():
        scores = [{key.removeprefix("eval/pass@"): 100 * x for key, x in run["pass_at"].items()} for run in runs]
        cells = [mean([score[str(k)] for score in scores]) for k in ks]
        cells.append(mean([sum(right > 0 for right in run["right"]) for run in runs]) + f" of {len(runs[0]['right'])}")
        entropies = [[step["train/entropy"] for step in run["steps"]] for run in runs if "steps" in run]
        # None in a step in which no group has a signal
        cells.append(mean([[x for x in values if x is not None][-1] for values in entropies], 2))
        cells.append(", ".join(f"{score['1']:.1f} [{score['1/low']:.1f}, {score['1/high']:.1f}]" for score in scores))
        lines.append(f"| {LABELS[learner]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(name: str, file: Path) -> None:
    """Draws pass@k of each learner, exactly from the numbers of right samples: the mean over seeds, and each seed."""
    from matplotlib.figure import Figure

    figure = Figure((6, 4), layout="constrained")
    axes = figure.subplots()
    task = TASKS[name]
    ks = [k for k in range(1, task.samples + 1) if k in task.ks or k % 4 == 0 or k < 8]
    found = results(name)
    samples = np.full(len(found[BEFORE][0]["right"]), task.samples)
    for learner, runs in found.items():
        curves = [[100 * pass_at_k(samples, np.array(run["right"]), k).mean() for k in ks] for run in runs]
        for curve in curves if len(curves) > 1 else ():
            axes.plot(ks, curve, color=COLOURS[learner], linewidth=0.6, alpha=0.5)
        axes.plot(ks, np.mean(curves, axis=0), color=COLOURS[learner], linewidth=2, label=LABELS[learner])
    axes.set(xscale="log", xlabel="k", ylabel="pass@k in per cent", xticks=task.ks, xticklabels=task.ks)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--out", type=Path, help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", help="folder of GSM8K")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    if arguments.table:
        print(table(arguments.task))
        return
    if arguments.figure is not None:
        draw(arguments.task, arguments.figure)
        return
    if arguments.out is None:
        parser.error("--out: give the folder of the runs")
    task = TASKS[arguments.task]
    overrides = task.overrides
    if arguments.task == "gsm8k":
        if arguments.data is None:
            parser.error("--data: give the folder with train.jsonl and test.jsonl of GSM8K")
        overrides += (f"data.path={Path(arguments.data).resolve()}",)
    runs = arguments.out.resolve() / arguments.task
    (runs / "eval").mkdir(parents=True, exist_ok=True)
    stored = RESULTS / arguments.task
    stored.mkdir(parents=True, exist_ok=True)

    def write(name: str, found: dict[str, Any]) -> None:
        (stored / f"{name}.json").write_text(json.dumps(found) + "\n")
        print(name, found["pass_at"], flush=True)

    if not (stored / f"{BEFORE}.json").exists():
        write(BEFORE, evaluated(str(HERE / task.config), runs / "eval" / f"{BEFORE}.jsonl", task, *overrides))
    if task.supervised:
        own = [f"training.output_dir={runs / SUPERVISED}", *SHORT_EVALUATION, *task.supervised]
        tunix_like("sft", str(HERE / task.config), *overrides, *own)  # a finished run is not trained again
        if not (stored / f"{SUPERVISED}.json").exists():
            write(SUPERVISED, evaluated(str(runs / SUPERVISED), runs / "eval" / f"{SUPERVISED}.jsonl", task))
    for seed in range(arguments.seeds):
        for learner in task.learners:
            if not (stored / f"{learner}-s{seed}.json").exists():
                write(f"{learner}-s{seed}", trained(runs, task, learner, seed, *overrides))


if __name__ == "__main__":
    main()
