"""The commands `runs`, which lists runs, and `sweep`, which trains several configs."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tunix_like.errors import UserError
from tunix_like.report.listing import list_runs, run_folders, show
from tunix_like.runs.sweep import Sweep, Trial, read_sweep
from tunix_like.runtime import console
from tunix_like.runtime.object_storage import is_remote
from tunix_like.storage.run_state import RunState, run_state

EVERY_SECONDS = 10.0
"""Seconds between two looks at the runs of a sweep that other processes train."""


def runs(arguments: argparse.Namespace) -> None:
    """Prints a table of the runs below a folder."""
    if is_remote(arguments.folder):
        raise UserError(f"runs: {arguments.folder}: runs are listed in local folders; `report` reads one in a bucket.")
    show(list_runs(Path(arguments.folder), arguments.metric, arguments.filters, arguments.sort), arguments.metric)


def sweep(arguments: argparse.Namespace) -> int:
    """Trains the runs of a sweep that are not finished, one after the other, and prints a table of all."""
    plan = read_sweep(Path(arguments.file))
    number = len(plan.trials)
    if arguments.dry_run:
        console.print_text("\n".join(f"{trial.name}: {_state(plan, trial).state}" for trial in plan.trials))
        return 0
    sweeping = _Sweeping(plan)
    failed = sweeping.run()
    if sweeping.stop:
        print("the sweep was stopped; the same command resumes", file=sys.stderr)
        return 75
    if run_folders(plan.folder):  # none if all runs failed at their start
        show(list_runs(plan.folder, plan.metric, order="metric"), plan.metric)
    for name, status in failed.items():
        console.print_text(f"{name}: failed with exit status {status}")
    if not failed:
        console.print_text(f"{number} runs finished; tunix-like report {plan.folder}")
    return 1 if failed else 0


class _Sweeping:
    """Trains each run in a process of its own, whose output appears unchanged."""

    def __init__(self, plan: Sweep):
        self.plan = plan
        self.ended = dict[str, int]()
        self.child: subprocess.Popen[bytes] | None = None
        self.stop = False

    def run(self) -> dict[str, int]:
        """Returns the exit status of each run that failed. A signal ends the call early (`stop`)."""
        trials = self.plan.trials
        # The tasks of an array job start at the same time, and at different runs.
        first = int(os.environ.get("SLURM_ARRAY_TASK_ID", 0)) % len(trials)
        order = [*trials[first:], *trials[:first]]
        handlers: dict[int, Any] = dict.fromkeys((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), self._asked)
        if (
            signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        ):  # with nohup; ignored signals would be ignored by runs too
            handlers[signal.SIGHUP] = lambda number, frame: None
        previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            while not self.stop and (left := [trial for trial in order if self._is_left(trial)]):
                free = [trial for trial in left if _state(self.plan, trial).state != "running"]
                if free:
                    self._train(free[0])
                else:
                    time.sleep(EVERY_SECONDS)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        return {name: status for name, status in self.ended.items() if status}

    def _is_left(self, trial: Trial) -> bool:
        return trial.name not in self.ended and _state(self.plan, trial).state != "finished"

    def _train(self, trial: Trial) -> None:
        trials = self.plan.trials
        done = sum(_state(self.plan, other).state == "finished" for other in trials)
        console.print_text(f"\nsweep: {trial.name} ({done} of {len(trials)} runs finished)")
        command = [sys.executable, "-m", "tunix_like", "train", str(self.plan.config), *trial.overrides]
        self.child = subprocess.Popen(command, start_new_session=True)
        if self.stop:  # since the last look
            self.child.send_signal(signal.SIGHUP)
        status = self.child.wait()
        self.child = None
        # Another process can have started the same run at the same moment; this one was refused then.
        if not status or _state(self.plan, trial).state not in ("running", "finished"):
            self.ended[trial.name] = status

    def _asked(self, number: int, frame: Any) -> None:
        """Passes a signal on to the run, which saves its state and ends. SIGTERM is passed on as SIGHUP: SLURM sends it
        to all processes, and a second SIGTERM would end the run before it is saved."""
        self.stop = True
        if self.child is not None:
            self.child.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGHUP)


def _state(plan: Sweep, trial: Trial) -> RunState:
    """Returns the state of a run, which is not finished if its number of steps was raised."""
    folder = plan.folder / trial.name
    if not folder.is_dir():
        return RunState("not started", 0, None)
    state = run_state(folder)
    more = state.state == "finished" and not state.over and trial.steps is not None and state.step < trial.steps
    return state._replace(state="stopped") if more else state
