"""`python -m benchmarks.credit`: credit by turn and by trajectory, on `guess`, `maze_steps` and `calculator`.

    python -m benchmarks.credit variance [--groups 256]   # of the gradient, at the weights after SFT
    python -m benchmarks.credit train [--seeds 3]         # held-out results after equally many groups, from there
    python -m benchmarks.credit picture --run RUN         # of trajectories of a run with algorithm.credit=turn

The variance is the trace of the covariance of the gradient of one group, over prompts and completions; an optimizer
that changes nothing adds up the gradients and their squares, so that all kinds of credit see the same completions.
Results that are in the folder are not made again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tunix_like.config.load import load
from tunix_like.runs.build import assemble
from tunix_like.runs.recipe import make_learner

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "environments"
NEAR_GOAL = f"rewards.functions=[{{name: {EXAMPLES / 'turn_rewards.py'}:near_goal, per: potential}}]"
CALLS = f"{{name: {EXAMPLES / 'turn_rewards.py'}:calls, per: turn, weight: 0.1}}"
TURN = "algorithm.credit=turn"
CREDITS: dict[str, list[str]] = {
    "trajectory": [],
    "turn, fixed_index": [TURN],
    "turn, reached": [TURN, "algorithm.turn_baseline=reached"],
    "turn, state": [TURN, "algorithm.turn_baseline=state"],
    "turn, potential": [TURN, NEAR_GOAL],
}
TASKS: dict[str, tuple[list[str], list[str]]] = {
    "guess": (["training.max_steps=60"], ["turn, potential"]),
    "maze_steps": (["training.max_steps=40"], []),
    "calculator": (
        ["training.max_steps=40", f"rewards.functions=[{{name: gsm8k}}, {CALLS}]"],
        ["turn, state", "turn, potential"],
    ),
}
"""Further settings of each task, and the kinds of credit that it does not have."""


def settings(task: str, credit: str, seed: int, folder: Path, sft: Path | None = None) -> list[str]:
    """Returns the arguments of a run; `sft`: the run whose weights it starts from."""
    own = ["algorithm.advantage_estimator=rloo", f"training.seed={seed}", f"training.output_dir={folder}"]
    start = (
        [] if sft is None else [f"model.path={sft}", "model.init=pretrained", "model.config=null", "sft.max_steps=0"]
    )
    return [str(EXAMPLES / f"{task}.yaml"), *own, "rewards.workers=0", *TASKS[task][0], *CREDITS[credit], *start]


def command(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "tunix_like", *arguments], check=True, stdout=subprocess.DEVNULL)


def recorder() -> optax.GradientTransformation:
    """Returns an optimizer that changes no weight. Its state is the sums of the gradients and of their squares."""

    def init(params: Any) -> Any:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
        return zeros, zeros

    def update(gradients: Any, state: Any, params: Any = None) -> Any:
        sums, squares = state
        sums = jax.tree.map(jnp.add, sums, gradients)
        squares = jax.tree.map(lambda old, g: old + g * g, squares, gradients)
        return jax.tree.map(jnp.zeros_like, gradients), (sums, squares)

    return optax.GradientTransformation(init, update)


def variance(task: str, credit: str, sft: Path, folder: Path, groups: int) -> dict[str, float]:
    """Returns the trace of the covariance of the gradient of one group, and the squared norm of its mean."""
    file, *overrides = settings(task, credit, 0, folder, sft)
    more = [f"training.max_steps={groups}", "data.batch_size=1", "eval.max_problems=1"]
    parts = assemble(load(file, [*overrides, *more]))
    config: Any = dataclasses.replace(parts.config, optimizer=recorder())  # type: ignore[arg-type]
    learner: Any = make_learner(parts._replace(config=config), folder)
    learner.train(parts.source.train, batch_size=1)
    sums, squares = learner.state.opt_state
    mean = [np.asarray(leaf, np.float64) / groups for leaf in jax.tree.leaves(sums)]
    square = [np.asarray(leaf, np.float64) / groups for leaf in jax.tree.leaves(squares)]
    signal = sum(float((leaf**2).sum()) for leaf in mean)
    total = sum(float(leaf.sum()) for leaf in square)
    noise = (total - signal) * groups / (groups - 1)
    return {"variance": noise, "signal": signal - noise / groups}


def trained(task: str, credit: str, seed: int, sft: Path, folder: Path) -> dict[str, Any]:
    command("train", *settings(task, credit, seed, folder, sft))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "step" in row]
    last = [row for row in steps if "eval/pass@1" in row][-1]
    first = next(row for row in steps if "eval/pass@1" in row)
    kept = {"before": first["eval/pass@1"], "after": last["eval/pass@1"]}
    kept |= {"low": last["eval/low/pass@1"], "high": last["eval/high/pass@1"], "reward": last["eval/rewards/mean"]}
    length = sum(row.get("train/completions/mean_length", 0.0) for row in steps)
    return kept | {"mean_length": length / max(1, sum("train/completions/mean_length" in row for row in steps))}


def picture(run: Path, file: Path, trajectories: int = 4) -> None:
    """Draws trajectories of the group with different rewards whose advantages of turns vary most: the text of each turn
    in the colour of its advantage, of the whole trajectory (`rloo`) and of the turn."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    rollouts = sorted((run / "rollouts").glob("step_*.jsonl"))[-1]
    groups: dict[int, list[dict[str, Any]]] = {}
    for line in rollouts.read_text().splitlines():
        row = json.loads(line)
        groups.setdefault(row["problem"], []).append(row)
    mixed = [rows for rows in groups.values() if len({row["reward"] for row in rows}) > 1]
    group = max(mixed, key=lambda rows: sum(float(np.ptp(row["turn_advantages"])) for row in rows))
    total = sum(row["reward"] for row in group)
    chosen = sorted(group, key=lambda row: (-row["reward"], len(row["turn_rewards"])))
    chosen = [*chosen[: trajectories // 2], *chosen[-(trajectories - trajectories // 2) :]]
    longest = max(len(row["turn_advantages"]) for row in chosen)
    figure = Figure(figsize=(1.2 + 0.62 * longest, 0.9 + 0.95 * trajectories))
    for place, title in enumerate(("credit: trajectory", "credit: turn")):
        axes = figure.add_subplot(2, 1, place + 1)
        for level, row in enumerate(chosen):
            whole = row["reward"] - (total - row["reward"]) / (len(group) - 1)
            own = row["turn_advantages"] if place else [whole] * len(row["turn_advantages"])
            texts = [turn["content"].split()[0] for turn in row["turns"] if turn["role"] == "assistant"]
            for t, (advantage, text) in enumerate(zip(own, texts, strict=True)):
                colour = "#1f6fb4" if advantage > 0 else "#c4512d"
                strength = min(1.0, abs(advantage))
                axes.add_patch(Rectangle((t, -level), 0.94, 0.88, color=colour, alpha=0.08 + 0.75 * strength, lw=0))
                axes.text(t + 0.47, -level + 0.58, text, ha="center", va="center", fontsize=7)
                axes.text(t + 0.47, -level + 0.26, f"{advantage:+.2f}", ha="center", va="center", fontsize=7)
            axes.text(-0.1, -level + 0.44, f"reward {row['reward']:g}", ha="right", va="center", fontsize=8)
        axes.set_xlim(-1.6, longest)
        axes.set_ylim(1.0 - len(chosen), 1.0)
        axes.set_title(title, fontsize=9, loc="left")
        axes.axis("off")
    figure.tight_layout()
    figure.savefig(file, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("variance", "train", "picture"))
    parser.add_argument("--run", type=Path, help="picture: run folder")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/credit"))
    parser.add_argument("--groups", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=TASKS)
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    if arguments.what == "picture":
        picture(arguments.run, out / "credit.png")
        return
    for task in arguments.tasks:
        sft = out / f"{task}-sft"
        if not sft.exists():
            command(
                "train", *settings(task, "trajectory", 0, sft), "training.max_steps=1", "optimizer.learning_rate=1e-12"
            )
        for credit in (each for each in CREDITS if each not in TASKS[task][1]):
            for seed in range(arguments.seeds if arguments.what == "train" else 1):
                name = f"{arguments.what}-{task}-{credit.replace(', ', '-')}-s{seed}"
                file = out / f"{name}.json"
                if not file.exists():
                    made = (
                        trained(task, credit, seed, sft, out / name)
                        if arguments.what == "train"
                        else variance(task, credit, sft, out / name, arguments.groups)
                    )
                    file.write_text(json.dumps(made) + "\n")
                print(name, json.loads(file.read_text()), flush=True)


if __name__ == "__main__":
    main()
