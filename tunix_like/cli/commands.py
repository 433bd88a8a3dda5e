"""Declares the commands and their options.

The function of a command is given as `module:function`. The module is imported when the command runs.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import Any

OVERRIDES = "a.b=value ...: overrides of single keys; see tunix_like/config/base_config.yaml for all of them"

KINDS = ("own", "gsm8k", "maze", "sums", "env", "tools")
"""Values of `init --like`; each has a YAML and a Python file in `starts/`."""

ON_CPU = ("export", "check-rewards", "advantages")
"""Commands that run on the CPU by default, since they compute little."""

AddCommand = Callable[[str, str, str, str], argparse.ArgumentParser]
"""`f(name, function, summary, example)` adds a command."""


def function_of(place: str) -> Callable[[argparse.Namespace], Any]:
    """Loads the function of a command; `place` is `module:function`, with a module of the package `tunix_like.cli`."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"tunix_like.cli.{module}"), name)


def add_commands(commands: Any) -> None:
    """Adds every command to `commands`, the subparsers action of the argument parser."""

    def command(name: str, function: str, summary: str, example: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=summary, description=summary, epilog=f"example: tunix-like {example}")
        sub.set_defaults(command=name, function=function)
        return sub

    _add_training(command)
    _add_inference(command)
    _add_analysis(command)
    _add_checks(command)


def _add_training(command: AddCommand) -> None:
    init = command(
        "init", "init:init", "write a commented YAML and a Python file to start from", "init mine --like gsm8k"
    )
    init.add_argument("name", help="name of the files and of the run")
    init.add_argument(
        "--like",
        choices=KINDS,
        default="own",
        help="own: a JSONL file of your own (the default); env: an environment of your own; tools: a tool of your own",
    )
    train = command(
        "train", "train:train", "train from a YAML file; the same command resumes", "train examples/maze.yaml"
    )
    train.add_argument("--dry-run", action="store_true", help="check everything but the weights, and print the plan")
    sft = command("sft", "train:sft", "supervised fine-tuning only", "sft examples/maze.yaml sft.max_steps=100")
    sweep = command(
        "sweep",
        "runs:sweep",
        "train several configs, a grid or random ones; the same command resumes, also beside others in the same folder",
        "sweep rates.yaml",
    )
    sweep.add_argument(
        "file", help="a YAML file: config, parameters, and optionally overrides, trials, seed, folder, metric"
    )
    sweep.add_argument("--dry-run", action="store_true", help="check all configs, and print the runs and their states")
    for sub in (train, sft):
        sub.add_argument("config", help="a YAML file")
        sub.add_argument("overrides", nargs="*", default=[], help=OVERRIDES)
        add_processes(sub)


def _add_inference(command: AddCommand) -> None:
    source = "run folder, RUN/checkpoints/STEP, RUN/checkpoints/best, model folder, hub id or config file"
    evaluate = command(
        "eval",
        "eval:run",
        "pass@k, avg@n and maj@k of a run or a model, with intervals",
        "eval runs/maze-maxrl-s0 eval.samples=64",
    )
    evaluate.add_argument(
        "--out", metavar="FILE.jsonl", help="write every problem with its completions, and a summary file next to it"
    )
    evaluate.add_argument(
        "--preset",
        choices=("greedy", "sampled"),
        help="greedy: one greedy completion; sampled: 16 at temperature 1; unset: the `eval` section of the run",
    )
    evaluate.add_argument(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help="compare two sources, or two files of --out, problem by problem, instead of evaluating one source",
    )
    evaluate.add_argument("source", nargs="?", help=source)
    generate = _add_generate(command, source)
    serve = _add_serve(command, source)
    export = command("export", "export:export", "write a Hugging Face folder", "export runs/maze-maxrl-s0 exported")
    export.add_argument("source", help=source)
    export.add_argument("out", help="folder to write")
    export.add_argument("--adapter", action="store_true", help="write only the LoRA adapters, in the PEFT format")
    export.add_argument("--license", metavar="ID", help="licence in the card, e.g. apache-2.0")
    export.add_argument("--push", metavar="OWNER/NAME", help="then upload OUT to the Hugging Face hub, with --yes")
    export.add_argument(
        "--yes", action="store_true", help="with --push: upload, instead of saying what it would upload"
    )
    export.add_argument("--overwrite", action="store_true", help="replace the whole folder OUT if it is an export")
    for sub in (evaluate, generate, serve, export):
        sub.add_argument(
            "--best", action="store_true", help="use the best checkpoint by training.best_metric instead of the newest"
        )
        sub.add_argument("overrides", nargs="*", default=[], help=OVERRIDES)
    add_processes(evaluate)


def _add_generate(command: AddCommand, source: str) -> argparse.ArgumentParser:
    generate = command(
        "generate",
        "generate:generate",
        "complete one prompt, play an environment, or talk to the model",
        'generate runs/x --prompt "2 + 2 =" --greedy',
    )
    generate.add_argument(
        "--prompt",
        help="text of the prompt; a chat message if the prompts of the run's data are messages, or with "
        "data.apply_chat_template=true or data.system_prompt; data.prompt_template is not applied",
    )
    generate.add_argument(
        "--greedy",
        action="store_true",
        help="take the most likely token at every position instead of sampling; the same as rollout.temperature=0",
    )
    generate.add_argument(
        "--row",
        type=int,
        metavar="N",
        help="take the prompt from row N (from 1) of the held-out data, or of the training data if there is no "
        "held-out data; an environment gets the columns of the row",
    )
    generate.add_argument(
        "--interactive",
        action="store_true",
        help="answer the turns of the model yourself: each line of standard input is an observation; the end of the "
        "input or /quit ends the conversation; without --prompt and --row, the first line is the prompt",
    )
    generate.add_argument("source", help=source)
    return generate


def _add_serve(command: AddCommand, source: str) -> argparse.ArgumentParser:
    serve = command(
        "serve",
        "serve:serve",
        "answer requests in the form of OpenAI over HTTP; needs the extra `serve`",
        "serve runs/maze-maxrl-s0 --port 8000",
    )
    serve.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; an address other than loopback needs an API key"
    )
    serve.add_argument("--port", type=int, default=8000, metavar="N", help="port (default 8000); 0 selects a free port")
    serve.add_argument(
        "--max-rows",
        type=int,
        metavar="N",
        help="maximum number of completions sampled at once (default 32, on a CPU 8); each step computes all of them, "
        "so on a CPU fewer are faster for a single user",
    )
    serve.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="maximum number of tokens of prompt and completion together; default: rollout.max_prompt_length + "
        "rollout.max_tokens_to_generate, but at most the number of positions of the model",
    )
    serve.add_argument(
        "--max-waiting",
        type=int,
        default=256,
        metavar="N",
        help="maximum number of completions that wait; further requests get the status 429 (default 256)",
    )
    serve.add_argument("source", help=source)
    return serve


def _add_analysis(command: AddCommand) -> None:
    report = command(
        "report",
        "report:report",
        "write an HTML report of one or several runs: curves, pass rates, time, rollouts",
        "report runs/maze-maxrl-s0 runs/maze-grpo-s0 --out both.html",
    )
    report.add_argument(
        "runs", nargs="+", metavar="RUN", help="run folder, or a folder of runs; several runs share the plots"
    )
    report.add_argument("--out", metavar="FILE", help="output file (default: report.html in the first RUN)")
    report.add_argument(
        "--gradients",
        type=int,
        metavar="N",
        help="measure the gradient norms of the prompts of N batches, by pass rate, with the newest checkpoint of each "
        "run; needs --run-code",
    )
    report.add_argument(
        "--run-code",
        action="store_true",
        help="with --gradients: run the code that the configurations of the runs name, such as reward functions",
    )
    report.add_argument("--png", metavar="FOLDER", help="also write the figures as PNG files")
    runs = command("runs", "runs:runs", "list runs: state, steps, a metric, age and size", "runs --sort metric")
    runs.add_argument("folder", nargs="?", default="runs", help="folder that contains runs (default: runs)")
    runs.add_argument("filters", nargs="*", metavar="a.b=value", help="only runs whose config has this value")
    runs.add_argument(
        "--metric", default="eval/pass@1", help="metric whose last and best value are shown (default: eval/pass@1)"
    )
    orders = ("name", "state", "step", "metric", "age", "size")
    runs.add_argument("--sort", default="name", choices=orders, help="order (default: name); metric: by the last value")
    replay = command(
        "replay",
        "report:replay",
        "recompute an update that was skipped because it was non-finite",
        "replay runs/maze-maxrl-s0/skipped/step_000012_update_0.npz",
    )
    replay.add_argument("file", help="RUN/skipped/step_N_update_M.npz")
    replay.add_argument("overrides", nargs="*", default=[], help=OVERRIDES)
    advantages = command(
        "advantages",
        "advantages:run",
        "print the advantages of every estimator for given rewards",
        "advantages 1,0,0,0 k=2 --plot w.png",
    )
    advantages.add_argument(
        "rewards", help="e.g. 1,0,0,0; ';' separates groups of the same size; none: an unscored completion"
    )
    advantages.add_argument(
        "overrides",
        nargs="*",
        help="k=2 truncation_order=3 ddof=0 alpha=0.5 coefficients=1,0.5 weights=0,1 statistic=median lengths=3,1,2,5 "
        "estimator=FILE.py:f",
    )
    advantages.add_argument("--plot", metavar="FILE.png", help="draw the population weights w(p) at this group size")


def _add_checks(command: AddCommand) -> None:
    rewards = command(
        "check-rewards",
        "check_rewards:run",
        "score gold answers and wrong answers with the reward functions or the environment; no model is needed",
        "check-rewards examples/maze.yaml",
    )
    rewards.add_argument("config", help="a YAML file")
    doctor = command(
        "doctor",
        "doctor:run",
        "check versions, devices, memory and extras; with --config, compile the programs of a run for devices that "
        "this machine does not have, and report memory, network and times",
        "doctor --config examples/gsm8k/qwen3_1.7b.yaml --devices v5e-8",
    )
    doctor.add_argument("--config", help="a YAML file whose programs are compiled from shapes, without weights")
    doctor.add_argument("--devices", help="KIND-N, SxKIND-N (slices), NxKIND or N: v5e-8, 2xv5e-16, 8xh100, 8")
    doctor.add_argument("--json", metavar="FILE", help="with --config: also write the report as JSON")
    for sub in (rewards, doctor):
        sub.add_argument("overrides", nargs="*", default=[], help=OVERRIDES)


def add_processes(parser: argparse.ArgumentParser) -> None:
    several = parser.add_argument_group(
        "several processes",
        "start the same command in every process; under SLURM and on a GKE TPU slice no option is needed",
    )
    several.add_argument(
        "--distributed", action="store_true", help="detect the processes from the cluster (Cloud TPU, Open MPI)"
    )
    several.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0, the same for all processes")
    several.add_argument("--num-processes", type=int, metavar="N", help="number of processes")
    several.add_argument("--process-id", type=int, metavar="I", help="index of this process, from 0")
