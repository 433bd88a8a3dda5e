"""The commands and their options. The function of a command is named `file:function` and loaded when it is run."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import Any

OVERRIDES = "a.b=value ...: overrides of single keys; see tunix_like/config/base_config.yaml for all of them"

KINDS = ("own", "gsm8k", "maze")
"""What `init --like` takes; each is a YAML and a reward file in `starts/`."""

ON_CPU = ("export", "check-rewards", "advantages")
"""Commands that compute little: they leave accelerators to other processes."""

AddCommand = Callable[[str, str, str, str], argparse.ArgumentParser]
"""`f(name, function, summary, example)` adds a command."""


def function_of(place: str) -> Callable[[argparse.Namespace], Any]:
    """Loads the function of a command from `file:function` in this package."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"tunix_like.cli.{module}"), name)


def add_commands(commands: Any) -> None:
    """Adds every command to the parser's subparsers."""

    def command(name: str, function: str, summary: str, example: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=summary, description=summary, epilog=f"example: tunix-like {example}")
        sub.set_defaults(command=name, function=function)
        return sub

    _add_training(command)
    _add_trained(command)
    _add_looking(command)
    _add_checking(command)


def _add_training(command: AddCommand) -> None:
    """The commands that begin and make a run."""
    init = command(
        "init", "init:init", "write a commented YAML and a reward file to start from", "init mine --like gsm8k"
    )
    init.add_argument("name", help="what the files and the run are called")
    init.add_argument("--like", choices=KINDS, default="own", help="own: a JSONL file of yours (the default)")
    train = command("train", "train:train", "train from a YAML; the same command resumes", "train examples/maze.yaml")
    train.add_argument("--dry-run", action="store_true", help="check everything but the weights, show what would run")
    sft = command("sft", "train:sft", "supervised fine-tuning only", "sft examples/maze.yaml sft.max_steps=100")
    for sub in (train, sft):
        sub.add_argument("config", help="a YAML file")
        sub.add_argument("overrides", nargs="*", help=OVERRIDES)
        add_processes(sub)


def _add_trained(command: AddCommand) -> None:
    """The commands that use what was trained."""
    source = "run folder, RUN/checkpoints/STEP, RUN/checkpoints/best, model folder or hub id"
    evaluate = command(
        "eval",
        "eval:run",
        "pass@k, avg@n and maj@k of a run or a model, with intervals",
        "eval runs/maze-maxrl-s0 eval.samples=64",
    )
    evaluate.add_argument(
        "--out", metavar="FILE.jsonl", help="write every problem with its completions; the summary goes beside it"
    )
    evaluate.add_argument(
        "--preset",
        choices=("greedy", "sampled"),
        help="greedy: the most likely completion alone; sampled: 16 at temperature 1; unset: the run's `eval` section",
    )
    evaluate.add_argument(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help="instead of one source two, or two files of --out: what B does better, problem by problem",
    )
    evaluate.add_argument("source", nargs="?", help=source)
    generate = command(
        "generate", "generate:generate", "complete one prompt", 'generate runs/x --prompt "2 + 2 =" --greedy'
    )
    generate.add_argument(
        "--prompt",
        required=True,
        help="text; a chat message where the run has a system prompt or data.apply_chat_template; no prompt_template",
    )
    generate.add_argument(
        "--greedy",
        action="store_true",
        help="the most likely token at every place, as eval --preset greedy, instead of one drawn at the run's "
        "rollout.temperature; the same as rollout.temperature=0",
    )
    generate.add_argument("source", help=source)
    export = command("export", "export:export", "write a Hugging Face folder", "export runs/maze-maxrl-s0 exported")
    export.add_argument("source", help=source)
    export.add_argument("out", help="folder to write")
    export.add_argument("--adapter", action="store_true", help="the LoRA adapters alone, in PEFT's format")
    export.add_argument("--overwrite", action="store_true", help="replace OUT, all of it, if it is an earlier export")
    for sub in (evaluate, generate, export):
        sub.add_argument(
            "--best", action="store_true", help="of a run the best checkpoint by training.best_metric, not the newest"
        )
        sub.add_argument("overrides", nargs="*", help=OVERRIDES)
    add_processes(evaluate)


def _add_looking(command: AddCommand) -> None:
    """The commands that show what a run did, or an estimator would do."""
    report = command(
        "report",
        "report:report",
        "one HTML file of one or several runs: curves, pass rates, time, rollouts",
        "report runs/maze-maxrl-s0 runs/maze-grpo-s0 --out both.html",
    )
    report.add_argument("runs", nargs="+", metavar="RUN", help="run folder; several are laid over each other")
    report.add_argument("--out", metavar="FILE", help="where to write it (default: report.html in the first RUN)")
    report.add_argument(
        "--gradients",
        type=int,
        metavar="N",
        help="measure the gradient norms of the prompts of N batches, by pass rate, under each newest checkpoint",
    )
    report.add_argument("--png", metavar="FOLDER", help="write the figures too, as PNG files for papers")
    replay = command(
        "replay",
        "replay:replay",
        "look again at an update that was skipped because it was no number",
        "replay runs/maze-maxrl-s0/skipped/step_000012_update_0.npz",
    )
    replay.add_argument("file", help="RUN/skipped/step_N_update_M.npz")
    replay.add_argument("overrides", nargs="*", help=OVERRIDES)
    advantages = command(
        "advantages",
        "advantages:run",
        "what every estimator makes of a group's rewards",
        "advantages 1,0,0,0 k=2 --plot w.png",
    )
    advantages.add_argument("rewards", help="1,0,0,0; more groups of the same size after ';'; none: not scored")
    advantages.add_argument(
        "overrides", nargs="*", help="k=2 truncation_order=3 ddof=0 lengths=3,1,2,5 estimator=FILE.py:f"
    )
    advantages.add_argument("--plot", metavar="FILE.png", help="draw the population weights w(p) at this group size")


def _add_checking(command: AddCommand) -> None:
    """The commands that look at a config or a machine before anything is trained."""
    rewards = command(
        "check-rewards",
        "check_rewards:run",
        "what the reward functions give to gold answers and to wrong ones; no model is needed",
        "check-rewards examples/maze.yaml",
    )
    rewards.add_argument("config", help="a YAML file")
    doctor = command(
        "doctor",
        "doctor:run",
        "versions, devices, memory, extras, and what to do about them; with --config, what a run's programs hold on "
        "devices that are not here",
        "doctor --config examples/gsm8k/qwen3_1.7b.yaml --devices v5e-8",
    )
    doctor.add_argument("--config", help="a YAML file whose programs are compiled from shapes alone")
    doctor.add_argument("--devices", help="KIND-N, NxKIND or N: v5e-8, 8xh100, 8")
    for sub in (rewards, doctor):
        sub.add_argument("overrides", nargs="*", help=OVERRIDES)


def add_processes(parser: argparse.ArgumentParser) -> None:
    """Adds the options of several processes."""
    several = parser.add_argument_group(
        "several processes", "start the same command in each; under SLURM and on a GKE TPU slice nothing is needed"
    )
    several.add_argument("--distributed", action="store_true", help="ask the cluster (Cloud TPU, Open MPI) for them")
    several.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0, the same for all")
    several.add_argument("--num-processes", type=int, metavar="N", help="how many there are")
    several.add_argument("--process-id", type=int, metavar="I", help="number of this one, from 0")
