"""Runs the training loop of supervised fine-tuning and reinforcement learning: steps, signals, checkpoints, metrics."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import numpy as np

from tunix_like.config.load import differences, with_defaults
from tunix_like.config.schema import AlgorithmConfig, EnvironmentConfig, OptimizerConfig, RolloutConfig
from tunix_like.errors import EngineLost, NotSaved, UserError
from tunix_like.models.lora import check_base
from tunix_like.runtime import output, progress
from tunix_like.runtime.processes import by_first, gather
from tunix_like.storage.checkpoints import Checkpoints
from tunix_like.storage.metrics import MetricsLog
from tunix_like.training.trainer import Trainer

logger = logging.getLogger("tunix_like")

EXIT_STOPPED = 75
"""Exit status of a run that was stopped by SIGTERM, SIGINT or SIGHUP after it wrote a checkpoint."""


class Stopped(SystemExit):
    """Raised after SIGTERM or SIGHUP, when the current training step is done. If the run has a folder, a checkpoint is
    written before the error is raised.

    The command that started the run also resumes the run from this checkpoint.
    """

    def __init__(self, step: int, saved: bool) -> None:
        super().__init__(EXIT_STOPPED)
        self.message = _stopped_after(step, saved)


class Interrupted(KeyboardInterrupt):
    """Raised after SIGINT (Ctrl-C), when the current training step is done. If the run has a folder, a checkpoint is
    written before the error is raised.

    The class is a `KeyboardInterrupt` and not a `SystemExit`, so that the process of a notebook continues.
    """

    def __init__(self, step: int, saved: bool) -> None:
        self.message = _stopped_after(step, saved)
        super().__init__(self.message)


def _stopped_after(step: int, saved: bool) -> str:
    return f"stopped by a signal after step {step}, " + ("which is saved" if saved else "nothing is saved")


def run(
    trainer: Trainer,
    on_row: Callable[[dict[str, Any]], None],
    before_save: Callable[[], None] = lambda: None,
    another_follows: bool = False,
) -> dict[str, Any]:
    """Runs the steps of a trainer, and returns the newest value of each metric. If the run folder has checkpoints,
    resumes from the newest checkpoint that is not damaged.

    A row of metrics is written before the checkpoint of its step. When a run resumes, the rows of steps after the
    checkpoint are removed. If a checkpoint cannot be written, a warning is logged and training continues to the next
    checkpoint. At the end, the weights are written back to the trainer's model. If a run with a folder ends with
    `EngineLost`, `Stopped` or `Interrupted`, its last complete step is saved.

    Args:
      on_row: called with each row after the row is written.
      before_save: called before each checkpoint. If `before_save` raises an error, the checkpoint is not written and
        the run ends.
      another_follows: whether another trainer runs after this one. If True, a signal in the last step raises an
        exception, as in other steps. If False, a signal in the last step is ignored, because the run ends after this
        step anyway.

    Raises:
      UserError: the checkpoint belongs to another run, or all checkpoints are damaged.
      NotSaved: all steps are done, or a signal stopped the run, and the last checkpoint could not be written.
      EngineLost: the servers that generate completions, or the service of the environments, do not answer.
      Stopped, Interrupted: SIGTERM, SIGHUP or SIGINT stopped the run.
    """
    with _opened(trainer, on_row, before_save) as files:
        with progress.task("restoring the checkpoint"):
            last = _resume(trainer, files.checkpoints, files.log)
        if last:
            return files.last_row
        with progress.task(trainer.name, trainer.total, trainer.done) as advance:
            fresh = trainer.done == 0 and files.latest_step() is None
            start = trainer.evaluate_if_due(0, last=False) if fresh else {}
            if start and files.write({trainer.step_key: 0} | start):
                files.save(over=False)
            with _stop_signals() as asked:
                while not last:
                    step, began = trainer.done + 1, time.perf_counter()
                    row: dict[str, Any] = {}
                    try:
                        if (metrics := trainer.step(step)) is None:
                            break
                        row = files.step_done(step, metrics, time.perf_counter() - began)
                        row |= trainer.evaluate_if_due(step, last=trainer.complete)
                    except EngineLost:
                        files.save_done(row)
                        raise
                    better = files.write(row)
                    advance(1)
                    over = trainer.finished(row)
                    last = over or trainer.complete
                    stop = max(gather(asked()))  # read once, so that a signal that ends the run also causes the save
                    skipped = row.get(f"{trainer.name}/update/skipped", 0) > 0  # `replay` needs this step's checkpoint
                    due = step % trainer.training.checkpoint_every_n_steps == 0
                    if due or last or stop or skipped or better:
                        files.save(over)
                    if stop and (another_follows or not last):
                        files.end(stop)
            if not last:
                _finish_exhausted(trainer, files)
        if files.checkpoints is not None:
            with progress.task("writing the checkpoint"):
                files.checkpoints.wait()
    return files.last_row


def _finish_exhausted(trainer: Trainer, files: _Files) -> None:
    """Runs the final evaluation and saves the last checkpoint of a run that ends because its data is exhausted.

    This happens after the loop over the steps: only the attempt to run a further step shows that there is no more data.
    """
    evaluated = by_first(lambda: _evaluated(trainer, files.log))  # before the run was resumed
    if not evaluated and (final := trainer.evaluate_if_due(trainer.done, last=True)):
        files.write({trainer.step_key: trainer.done} | final)  # before a save, which can remove the best
    if trainer.done and files.latest_step() != trainer.done:
        files.save(over=False)


@dataclasses.dataclass
class _Files:
    """The checkpoints and the log of one call of `run`.

    Attributes:
      last_row: the newest value of each metric, from all rows so far.
    """

    trainer: Trainer
    checkpoints: Checkpoints | None
    log: MetricsLog
    on_row: Callable[[dict[str, Any]], None]
    before_save: Callable[[], None]
    last_row: dict[str, Any] = dataclasses.field(default_factory=dict)

    def step_done(self, step: int, metrics: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Marks a step as done before its evaluation, which can fail. Returns a row of metrics: the step number, the
        step time, and `metrics` with the name of the trainer as a prefix (such as `train/`)."""
        trainer = self.trainer
        trainer.done = step
        prefixed = {f"{trainer.name}/{name}": value for name, value in metrics.items()}
        return {trainer.step_key: step} | prefixed | {f"{trainer.name}/step_time_sec": seconds}

    def write(self, row: dict[str, Any]) -> bool:
        """Writes a row of metrics. Converts arrays in `row` to numbers.

        Returns whether the row has the best value so far of the metric that selects the best checkpoint.
        """
        row |= {name: float(value) for name, value in row.items() if isinstance(value, np.generic | jax.Array)}
        self.log.write(row)
        self.last_row.update(row)
        self.on_row(row)
        return self.checkpoints is not None and self.checkpoints.improves(row)

    def save(self, over: bool) -> None:
        """Starts to write a checkpoint of the newest completed step. `over` is True if training ends early, before its
        last planned step."""
        if self.checkpoints is not None:
            self.before_save()
            meta = {"identity": self.trainer.identity, "over": over, "total": self.trainer.total}
            self.checkpoints.save(self.trainer.done, self.trainer.to_save(), self.trainer.iterator, meta)

    def save_done(self, row: dict[str, Any]) -> None:
        """Saves the last complete step if it has no checkpoint, and waits for the write. If `row` is not empty, writes
        this row of metrics first."""
        if row:
            self.write(row)
        if self.checkpoints is not None and self.trainer.done and self.latest_step() != self.trainer.done:
            self.save(over=False)
            self.checkpoints.wait()

    def latest_step(self) -> int | None:
        return None if self.checkpoints is None else self.checkpoints.latest_step()

    def end(self, stop: int) -> NoReturn:
        """Waits until the last checkpoint is written, then raises `Interrupted` or `Stopped`. `stop` is the number of
        the signal that stopped the run."""
        if self.checkpoints is not None:
            try:
                self.checkpoints.wait()
            except NotSaved as error:
                error.stopped = True
                raise
        raise (Interrupted if stop == signal.SIGINT else Stopped)(self.trainer.done, self.checkpoints is not None)


@contextlib.contextmanager
def _opened(
    trainer: Trainer, on_row: Callable[[dict[str, Any]], None], before_save: Callable[[], None]
) -> Iterator[_Files]:
    """Opens the checkpoints and the log of a trainer, and closes both at the end of the context.

    The weights are written back to the model before the checkpoints are closed, because a signal can interrupt the
    closing. If no unexpected error occurred, all processes wait until process 0 has closed its loggers, which can take
    long. Without this wait, the other processes would exit, and an exiting process waits for process 0 only for a
    limited time.
    """
    checkpoints = trainer.open_checkpoints()
    with checkpoints or contextlib.nullcontext(), trainer.running():
        log, together = trainer.open_log(), True
        try:
            yield _Files(trainer, checkpoints, log, on_row, before_save)
        except BaseException as error:  # `sys.exception()` would also see an exception that the caller handles
            together = isinstance(error, Stopped | Interrupted | NotSaved)
            raise
        finally:
            log.close()
            if together:
                gather(None)


def _evaluated(trainer: Trainer, log: MetricsLog) -> bool:
    """Returns whether the log has a row for step `trainer.done` that contains only an evaluation."""
    return any(f"{trainer.name}/step_time_sec" not in row for row in log.of_step(trainer.step_key, trainer.done))


def _resume(trainer: Trainer, checkpoints: Checkpoints | None, log: MetricsLog) -> bool:
    """Restores the newest undamaged checkpoint, if any, into the trainer. Returns whether no step is left to run: all
    steps are done, or training ended early."""
    step = checkpoints.newest() if checkpoints is not None else None
    if checkpoints is None or step is None:
        log.cut(trainer.step_key, -1)
        trainer.cut(-1)
        return trainer.complete
    meta = checkpoints.meta(step)
    _check_same_run(checkpoints, meta["identity"], trainer.identity)
    log.cut(trainer.step_key, step)  # after the checks, so that a rejected run does not remove rows of another run
    trainer.cut(step)
    checkpoints.find_best(log.rows(), verified=step)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), trainer.to_save())
    trainer.restore(checkpoints.restore(step, abstract, trainer.iterator)[0], step)
    trainer.done = step
    if trainer.rate_follows_total and meta["total"] != trainer.total and not trainer.complete:
        message = "the number of steps is now %s and was %s in the checkpoint: the schedule uses the new number"
        logger.warning(message, trainer.total, meta["total"])
    logger.info("resumed from %s/%d", checkpoints.folder, step)
    return bool(meta["over"]) or trainer.complete


_SECTIONS = {
    "algorithm": AlgorithmConfig,
    "rollout": RolloutConfig,
    "optimizer": OptimizerConfig,
    "environment": EnvironmentConfig,
}
"""The parts of an identity (`Trainer.identity`) that are sections of a config."""


def _check_same_run(checkpoints: Checkpoints, saved: dict[str, Any], current: dict[str, Any]) -> None:
    check_base(checkpoints.folder, saved, current)
    for name, section in _SECTIONS.items():  # keys that were added after the checkpoint was written
        if isinstance(saved.get(name), dict) and isinstance(current.get(name), dict):
            added = {key: value for key, value in dataclasses.asdict(section()).items() if key in current[name]}
            saved = saved | {name: with_defaults(saved[name], added)}
    changed = differences(*(json.loads(json.dumps(identity | {"base": None})) for identity in (saved, current)))
    if changed:
        raise UserError(
            f"{checkpoints.folder}: the checkpoint is of another run. Different settings (checkpoint, now):\n  "
            + "\n  ".join(changed)
            + "\nUse another output_dir, or the settings of the checkpoint. Steps, evaluation and intervals may change."
        )


@contextlib.contextmanager
def _stop_signals() -> Iterator[Callable[[], int]]:
    """Context manager in which SIGTERM, SIGINT and SIGHUP do not stop the process before the current step is done.

    Yields a function that returns the number of the received signal, or 0 if there is none. The training loop calls
    this function after each step. If SIGTERM or SIGINT arrives a second time, the signal has its usual effect at once.
    When a terminal is closed, the shell and the kernel each send a SIGHUP; therefore a second SIGHUP has no effect. If
    SIGINT or SIGHUP is ignored at the start (with `nohup`, or in a background job of a shell), it stays ignored.
    """
    received: list[int] = [0]
    previous: dict[int, Any] = {}

    def ask(number: int, frame: Any) -> None:
        received.append(number)
        if number != signal.SIGHUP:
            signal.signal(number, previous[number])
        # This does not use a logger. The signal can interrupt a logger that holds its lock, and a second use of the
        # logger would deadlock. On a terminal, the message overwrites the progress line.
        second = "" if number == signal.SIGHUP else "; a second signal ends it at once"
        text = f"{signal.Signals(number).name}: the run stops after the current step{second}\n"
        output.from_handler(f"\r\x1b[2K{text}" if os.isatty(2) else text)

    if threading.current_thread() is threading.main_thread():
        unless_ignored = [
            number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN
        ]
        numbers = [signal.SIGTERM, *unless_ignored]
        previous = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield lambda: received[-1]
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
