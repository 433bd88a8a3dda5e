"""The training loop of supervised fine-tuning and reinforcement learning: steps, signals, checkpoints and metrics."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NoReturn, Protocol, runtime_checkable

import jax
import numpy as np

from tunix_like.config.load import differences
from tunix_like.errors import NotSaved, UserError
from tunix_like.models.lora import check_base
from tunix_like.runtime import output, progress
from tunix_like.runtime.processes import by_first, gather
from tunix_like.storage.checkpoints import Checkpoints
from tunix_like.storage.metrics import MetricsLog

logger = logging.getLogger("tunix_like")

EXIT_STOPPED = 75
"""Exit status of a run that was stopped by SIGTERM, SIGINT or SIGHUP after it wrote a checkpoint."""


class Stopped(SystemExit):
    """Raised after SIGTERM or SIGHUP, when the checkpoint is written (if the run has a folder).

    The same command resumes the run.
    """

    def __init__(self, step: int, saved: bool) -> None:
        super().__init__(EXIT_STOPPED)
        self.message = _stopped_after(step, saved)


class Interrupted(KeyboardInterrupt):
    """Raised like `Stopped` after SIGINT (Ctrl-C). As a KeyboardInterrupt it does not end the process of a notebook."""

    def __init__(self, step: int, saved: bool) -> None:
        self.message = _stopped_after(step, saved)
        super().__init__(self.message)


def _stopped_after(step: int, saved: bool) -> str:
    return f"stopped by a signal after step {step}, " + ("which is saved" if saved else "nothing is saved")


@runtime_checkable
class Stepper(Protocol):
    """The interface of a trainer that the loop runs.

    Attributes:
      name: prefix of the metrics (`train`, `sft`).
      step_key: the metrics' step column (`step`, `sft/step`).
      done: number of steps done so far in this process; a call that does not resume from a checkpoint continues there.
      total: number of the last step, or None to continue until `step` returns None.
      rate_follows_total: whether the learning rate of a step depends on `total`.
      iterator: the data iterator to save with a checkpoint, or None.
      identity: settings that must be equal when a checkpoint is restored; `base` is the `models.lora.fingerprint` of
        the frozen weights.
    """

    name: ClassVar[str]
    step_key: ClassVar[str]
    done: int
    total: int | None
    rate_follows_total: bool
    iterator: Any
    identity: dict[str, Any]

    def to_save(self) -> Any:
        """Returns the pytree of a checkpoint."""

    def restore(self, saved: Any, step: int) -> None:
        """Restores the state after `step` from its saved pytree."""

    def cut(self, step: int) -> None:
        """Removes the trainer's own files of steps after `step` (-1: of all steps), which will be repeated."""

    def step(self, number: int) -> dict[str, Any] | None:
        """Runs step `number` (from 1).

        Returns its metrics (numbers and lists of numbers) without prefix, or None when the data is exhausted.
        """

    def evaluate_if_due(self, step: int, last: bool) -> dict[str, float]:
        """Returns the metrics (with prefix) of an evaluation after `step` if one is due, else {}; 0 is the start."""

    def finished(self, row: dict[str, Any]) -> bool:
        """Returns True when the row just logged ends the training early."""


def run(
    trainer: Stepper,
    *,
    checkpoints: Checkpoints | None,
    log: MetricsLog,
    checkpoint_every: int,
    on_row: Callable[[dict[str, Any]], None],
    before_save: Callable[[], None] = lambda: None,
    another_follows: bool = False,
) -> int:
    """Runs the steps of a trainer, from its newest checkpoint if there is one. Returns the number of the last step.

    A row of metrics is written before the checkpoint of its step; on resume, rows after the checkpoint are removed. A
    checkpoint that cannot be written gives a warning, and training continues to the next checkpoint.

    Args:
      before_save: called before each checkpoint; raises if none may be written.
      another_follows: whether another trainer runs after this one. If so, a signal in the last step also raises; else
        the run ends after that step anyway and the signal is ignored.

    Raises:
      UserError: the checkpoint belongs to another run, or all checkpoints are damaged.
      NotSaved: all steps are done, or a signal stopped the run, and the last checkpoint could not be written.
      Stopped, Interrupted: SIGTERM, SIGHUP or SIGINT stopped the run; the state is saved.
    """
    with _closed_together(log):
        done = _run(trainer, checkpoints, log, checkpoint_every, on_row, before_save, another_follows)
        if checkpoints is not None:
            with progress.task("writing the checkpoint"):
                checkpoints.wait()
    return done


@contextlib.contextmanager
def _closed_together(log: MetricsLog) -> Iterator[None]:
    """Closes the log, and synchronises all processes after an end that all of them reach.

    The loggers may keep process 0 busy for longer than the other processes wait for it at their exit.
    """
    together = True
    try:
        yield
    except BaseException as error:  # `sys.exception()` would also see an exception that the caller handles
        together = isinstance(error, Stopped | Interrupted | NotSaved)
        raise
    finally:
        log.close()
        if together:
            gather(None)


def _run(
    trainer: Stepper,
    checkpoints: Checkpoints | None,
    log: MetricsLog,
    checkpoint_every: int,
    on_row: Callable[[dict[str, Any]], None],
    before_save: Callable[[], None],
    another_follows: bool,
) -> int:
    def record(row: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Writes a row. Returns the written row, and whether its step is the best so far and must be saved."""
        row = _write(log, on_row, row)
        return row, checkpoints is not None and checkpoints.improves(row)

    def keep(step: int, over: bool) -> None:
        if checkpoints is not None:
            before_save()
            save(trainer, checkpoints, step, over)

    with contextlib.ExitStack() as stack:
        with progress.task("restoring the checkpoint"):
            done, over = resume(trainer, checkpoints, log)
            trainer.done = done
        if over or _complete(trainer, done):
            return done
        advance = stack.enter_context(progress.task(trainer.name, trainer.total, done))
        fresh = done == 0 and (checkpoints is None or checkpoints.latest_step() is None)
        if fresh and (start := trainer.evaluate_if_due(0, last=False)) and record({trainer.step_key: 0} | start)[1]:
            keep(0, False)
        with _stop_signals() as asked:
            while not _complete(trainer, done) and (row := _step(trainer, done + 1)) is not None:
                trainer.done = done = done + 1
                row, better = record(row)
                advance(1)
                over = trainer.finished(row)
                last = over or _complete(trainer, done)
                stop = max(gather(asked()))  # read once, so that a signal that stops the run also triggers the save
                skipped = row.get(f"{trainer.name}/update/skipped", 0) > 0  # `replay` needs a checkpoint of this step
                if last or stop or skipped or better or done % checkpoint_every == 0:
                    keep(done, over)
                if stop and (another_follows or not last):
                    _end(stop, done, checkpoints)
                if last:
                    return done
        # The data is exhausted, so the last step is known only now. A resumed run may have evaluated it before.
        if not by_first(lambda: _evaluated(trainer, log, done)) and (final := trainer.evaluate_if_due(done, last=True)):
            record({trainer.step_key: done} | final)  # before the last save, which removes a former best checkpoint
        if checkpoints is not None and done and checkpoints.latest_step() != done:
            keep(done, False)
        return done


def _step(trainer: Stepper, step: int) -> dict[str, Any] | None:
    """Runs a step and the evaluation that is due after it. Returns its row, or None when the data is exhausted."""
    began = time.perf_counter()
    metrics = trainer.step(step)
    if metrics is None:
        return None
    trainer.done = step  # the weights are those of this step, even if an evaluation or a logger fails now
    metrics["step_time_sec"] = time.perf_counter() - began
    row = {trainer.step_key: step} | {f"{trainer.name}/{name}": value for name, value in metrics.items()}
    return row | trainer.evaluate_if_due(step, last=_complete(trainer, step))


def _evaluated(trainer: Stepper, log: MetricsLog, done: int) -> bool:
    """Returns whether the log has a row of this step that contains only an evaluation."""
    return any(f"{trainer.name}/step_time_sec" not in row for row in log.of_step(trainer.step_key, done))


def _end(stop: int, done: int, checkpoints: Checkpoints | None) -> NoReturn:
    if checkpoints is not None:
        try:
            checkpoints.wait()
        except NotSaved as error:
            error.stopped = True
            raise
    raise (Interrupted if stop == signal.SIGINT else Stopped)(done, checkpoints is not None)


def _complete(trainer: Stepper, done: int) -> bool:
    return trainer.total is not None and done >= trainer.total


def resume(trainer: Stepper, checkpoints: Checkpoints | None, log: MetricsLog) -> tuple[int, bool]:
    """Restores the newest undamaged checkpoint into the trainer.

    Returns its step (0 if there is none), and whether the training ended early there.
    """
    step = checkpoints.newest() if checkpoints is not None else None
    if checkpoints is None or step is None:
        log.cut(trainer.step_key, -1)
        trainer.cut(-1)
        return trainer.done, False
    meta = checkpoints.meta(step)
    check_base(checkpoints.folder, meta["identity"], trainer.identity)
    saved, current = (
        {name: value for name, value in identity.items() if name != "base"}
        for identity in (meta["identity"], trainer.identity)
    )
    _check_same_run(checkpoints, saved, current)
    log.cut(trainer.step_key, step)  # after the checks, so that a rejected run does not remove rows of another run
    trainer.cut(step)
    checkpoints.take_up(log.rows(), sound=step)
    if trainer.rate_follows_total and meta["total"] != trainer.total and not _complete(trainer, step):
        message = "the number of steps is now %s and was %s in the checkpoint: the schedule uses the new number"
        logger.warning(message, trainer.total, meta["total"])
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), trainer.to_save())
    trainer.restore(checkpoints.restore(step, abstract, trainer.iterator)[0], step)
    logger.info("resumed from %s/%d", checkpoints.folder, step)
    return step, bool(meta["over"])


def _check_same_run(checkpoints: Checkpoints, saved: Any, current: dict[str, Any]) -> None:
    changed = differences(saved, json.loads(json.dumps(current)))
    if changed:
        raise UserError(
            f"{checkpoints.folder}: the checkpoint is of another run. Different settings (checkpoint, now):\n  "
            + "\n  ".join(changed)
            + "\nUse another output_dir, or the settings of the checkpoint. Steps, evaluation and intervals may change."
        )


def save(trainer: Stepper, checkpoints: Checkpoints, step: int, over: bool) -> None:
    """Starts writing a checkpoint. The arrays are copied before this function returns."""
    meta = {"identity": trainer.identity, "over": over, "total": trainer.total}
    checkpoints.save(step, trainer.to_save(), trainer.iterator, meta)


def _write(log: MetricsLog, on_row: Callable[[dict[str, Any]], None], row: dict[str, Any]) -> dict[str, Any]:
    """Writes a row of metrics, and returns it with arrays converted to plain numbers, as written."""
    row = {name: float(value) if isinstance(value, np.generic | jax.Array) else value for name, value in row.items()}
    log.write(row)
    on_row(row)
    return row


@contextlib.contextmanager
def _stop_signals() -> Iterator[Callable[[], int]]:
    """Handles SIGTERM, SIGINT and SIGHUP so that the current step is finished first.

    Yields a function that returns the number of the received signal (0: none); the loop calls it after each step. A
    second SIGTERM or SIGINT has its usual effect at once. A second SIGHUP has not, because a closed terminal sends two,
    one from its shell and one from the kernel. SIGINT and SIGHUP stay ignored if they are (`nohup`, shell background).
    """
    received: list[int] = [0]
    previous: dict[int, Any] = {}

    def ask(number: int, frame: Any) -> None:
        received.append(number)
        if number != signal.SIGHUP:
            signal.signal(number, previous[number])
        # Does not use a logger: the signal may interrupt it while it holds its lock, which would deadlock. On a
        # terminal the message overwrites the progress line.
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
