"""Parses the arguments of the command line, runs one command and returns its exit status.

Exit status:
  0: done.
  1: `doctor` or `check-rewards` found a problem.
  2: invalid input; one line describes the problem.
  70: in a run of several processes, this process failed or another process was lost.
  74: the last checkpoint of a run could not be written, or the output of another command could not be written.
  75: a run saved a checkpoint and stopped, after a signal, after the loss of its sampling servers, or because no
    completion could be scored any more.
  141: the program that reads the output exited (see `output.py`). A training run does not exit then, but continues.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Sequence

import tunix_like
from tunix_like.cli.commands import ON_CPU, add_commands, function_of
from tunix_like.errors import UserError
from tunix_like.runtime import console, output, progress
from tunix_like.runtime.accelerators import avoid_absent_tpu
from tunix_like.runtime.visible import visible


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status."""
    output.guard()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", handlers=[console.LogHandler()])
    logging.getLogger("tunix_like").setLevel(logging.INFO)
    arguments = parse(argv)
    joined = False
    try:
        avoid_absent_tpu()
        if "proxy" in os.environ.get("JAX_PLATFORMS", ""):
            from tunix_like.runtime import processes

            processes.start_pathways()
        joined = _join(arguments)
        output.set_continue_on_error(joined or _trains(arguments))
        if arguments.command in ON_CPU:
            os.environ.setdefault("JAX_PLATFORMS", "cpu")
        with progress.shown(lines=arguments.command != "generate"):  # the output of `generate` is the completion only
            status = int(function_of(arguments.function)(arguments) or 0)
        output.finish()
        return status
    except UserError as error:
        print(visible(f"error: {error}"), file=sys.stderr)
        if joined:
            from tunix_like.runtime import processes

            processes.leave_refused(error.status)
        return error.status
    except (SystemExit, KeyboardInterrupt) as stop:
        if message := getattr(stop, "message", ""):
            print(f"{message}; the same command resumes", file=sys.stderr)
            return 75
        if type(stop) is not SystemExit:
            raise
        if joined:
            from tunix_like.runtime import processes

            processes.leave(stop)
        print(f"error: code that the configuration names called sys.exit({stop.code!r}).", file=sys.stderr)
        return 2
    except Exception as error:
        if joined:
            from tunix_like.runtime import processes

            processes.leave(error)
        raise


def _trains(arguments: argparse.Namespace) -> bool:
    return arguments.command in ("train", "sft") and not getattr(arguments, "dry_run", False)


def _join(arguments: argparse.Namespace) -> bool:
    """Connects this process to the others of the run. Returns False if neither options nor variables specify
    several."""
    if not hasattr(arguments, "coordinator"):
        return False
    coordinator, count, index = options = arguments.coordinator, arguments.num_processes, arguments.process_id
    if any(option is None for option in options) and any(option is not None for option in options):
        raise UserError(
            "--coordinator, --num-processes and --process-id must be given together; --distributed takes them from the "
            "cluster."
        )
    if coordinator is None and not arguments.distributed and not _started_by_scheduler():
        return False
    from tunix_like.runtime import processes

    if coordinator is not None and not re.fullmatch(r".+:\d+", coordinator):
        raise UserError(f"--coordinator {coordinator}: give host and port of process 0, e.g. localhost:12345.")
    processes.start(coordinator, count, index)
    if not processes.is_first():
        console.silence()
    return True


def _started_by_scheduler() -> bool:
    if int(os.environ.get("MEGASCALE_NUM_SLICES") or 1) > 1:  # several TPU slices, each possibly of one host
        return True
    if "SLURM_STEP_NODELIST" in os.environ:
        return int(os.environ.get("SLURM_NTASKS", "1")) > 1
    return "," in (os.environ.get("TPU_WORKER_HOSTNAMES") or os.environ.get("TPU_PROCESS_ADDRESSES") or "")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments. Accepts config overrides (`key=value`) before and after options. A plain argparse parser
    rejects overrides after options."""
    parser = build_parser()
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["advantages"]:  # the space keeps argparse from parsing a negative first reward as an option
        words = [f" {word}" if word[:1] == "-" and word[1:2] in "0123456789." else word for word in words]
    arguments, left = parser.parse_known_args(words)
    if not all("=" in word and not word.startswith("-") for word in left) or (left and "overrides" not in arguments):
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    if left:
        arguments.overrides += left
    return arguments


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="tunix-like", description="RL post-training of language models in JAX/Flax.",
        epilog="example: tunix-like train examples/maze.yaml algorithm.advantage_estimator=rloo training.seed=1\n\n"
        "exit status: 0 done, 1 doctor or check-rewards found a problem, 2 invalid input, 70 an error in one of\n"
        "several processes, 74 the last checkpoint, or the output of another command, could not be written,\n"
        "75 a run saved and stopped, after a signal, the loss of its servers or steps in which nothing could be\n"
        "scored (the same command resumes),\n"
        "141 the program that reads the output exited (runs continue instead)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"tunix-like {tunix_like.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_commands(commands)
    return parser
