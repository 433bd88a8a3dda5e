"""The command line: load the config, build the parts, hand them to the learner its `advantage_estimator` names.

Exit status: 0 done, 1 `doctor` or `check-rewards` found something wrong, 2 bad input (one line says what), 70 in a run
of several processes after an error of this one or the loss of another, 74 the last checkpoint, or the output of another
command, could not be written, 75 stopped by a signal after saving, 141 nobody reads the output (`output.py`). This
module knows no algorithm.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Sequence

from tunix_like.cli.commands import ON_CPU, add_commands, function_of
from tunix_like.errors import UserError
from tunix_like.runtime import console, output, progress
from tunix_like.runtime.visible import visible


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status."""
    output.guard()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", handlers=[console.LogHandler()])
    logging.getLogger("tunix_like").setLevel(logging.INFO)
    arguments = _parse(argv)
    joined = False
    try:
        joined = _join(arguments)
        output.go_on(joined or _trains(arguments))
        if arguments.command in ON_CPU:
            os.environ.setdefault("JAX_PLATFORMS", "cpu")
        with progress.shown(lines=arguments.command != "generate"):  # whose output is the completion and nothing else
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
        raise
    except Exception as error:
        if joined:
            from tunix_like.runtime import processes

            processes.leave(error)
        raise


def _trains(arguments: argparse.Namespace) -> bool:
    """Whether the command makes a run, which must outlive its output."""
    return arguments.command in ("train", "sft") and not getattr(arguments, "dry_run", False)


def _join(arguments: argparse.Namespace) -> bool:
    """Joins the other processes of the run, where the command line or the environment says that there are some.

    Raises:
      UserError: only some of the three options are given, or the processes do not find each other.
    """
    if not hasattr(arguments, "coordinator"):
        return False
    place = arguments.coordinator, arguments.num_processes, arguments.process_id
    if any(each is None for each in place) and any(each is not None for each in place):
        raise UserError("--coordinator, --num-processes and --process-id go together; --distributed asks the cluster.")
    if place[0] is None and not arguments.distributed and not _started_by_scheduler():
        return False
    from tunix_like.runtime import processes

    if place[0] is not None and not re.fullmatch(r".+:\d+", place[0]):
        raise UserError(f"--coordinator {place[0]}: give host and port of process 0, as in localhost:12345.")
    processes.start(*place)
    if not processes.is_first():
        console.silence()
    return True


def _started_by_scheduler() -> bool:
    """Whether this is one of several processes, by the variables that SLURM (`srun`) and GKE set for each of them."""
    if "SLURM_STEP_NODELIST" in os.environ:
        return int(os.environ.get("SLURM_NTASKS", "1")) > 1
    return "," in (os.environ.get("TPU_WORKER_HOSTNAMES") or os.environ.get("TPU_PROCESS_ADDRESSES") or "")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, overrides before or after options: argparse by itself leaves over those that stand after one."""
    parser = _parser()
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["advantages"]:  # a reward below zero may come first: a blank tells argparse that it is no option
        words = [f" {word}" if word[:1] == "-" and word[1:2] in "0123456789." else word for word in words]
    arguments, left = parser.parse_known_args(words)
    if not all("=" in word and not word.startswith("-") for word in left) or (left and "overrides" not in arguments):
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    if left:
        arguments.overrides += left
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tunix-like", description="RL post-training of language models in JAX/Flax.",
        epilog="example: tunix-like train examples/maze.yaml algorithm.advantage_estimator=rloo training.seed=1\n\n"
        "exit status: 0 done, 1 doctor or check-rewards found something wrong, 2 bad input, 70 an error in one of\n"
        "several processes, 74 the last checkpoint, or the output of another command, could not be written,\n"
        "75 stopped by a signal after saving (the same command resumes), 141 nobody reads the output (of no run)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_commands(commands)
    return parser
