"""The one training loop, shared by supervised fine-tuning and reinforcement learning: steps, signals, checkpoints,
metrics.

It knows when things happen and what must be on disk before what; it does not know what a step is.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
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
"""Exit status of a run that was told to stop (SIGTERM, SIGINT, SIGHUP) and saved itself first."""


class Stopped(SystemExit):
    """Raised after SIGTERM or SIGHUP, once the checkpoint is written (if the run has a folder). The same command
    resumes the run."""

    def __init__(self, step: int, saved: bool) -> None:
        super().__init__(EXIT_STOPPED)
        self.message = _stopped_after(step, saved)


class Interrupted(KeyboardInterrupt):
    """Raised in the same way after SIGINT (Ctrl-C), which must not end the process of a notebook."""

    def __init__(self, step: int, saved: bool) -> None:
        self.message = _stopped_after(step, saved)
        super().__init__(self.message)


def _stopped_after(step: int, saved: bool) -> str:
    return f"stopped by a signal after step {step}, " + ("which is saved" if saved else "nothing is saved")


@runtime_checkable
class Stepper(Protocol):
    """What the loop drives.

    Attributes:
      name: prefix of the metrics (`train`, `sft`).
      step_key: the metrics' step column (`step`, `sft/step`).
      done: steps done so far in this process; a call that is not resumed from a checkpoint starts after them.
      total: number of the last step, or None to go on until `step` returns None.
      rate_follows_total: whether the learning rate of a step depends on `total`.
      iterator: the data iterator to save with a checkpoint, or None.
      identity: what must be the same when a checkpoint is taken up again; `base`, of frozen weights, is a
        `models.lora.fingerprint`.
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
        """Continues after `step` from the pytree saved there."""

    def cut(self, step: int) -> None:
        """Removes what it wrote itself of the steps after `step` (-1: of all), which will be done again."""

    def step(self, number: int) -> dict[str, Any] | None:
        """Does step `number` (from 1); returns its metrics (numbers, and lists of them) without prefix, or None when
        the data is used up."""

    def evaluate_if_due(self, step: int, last: bool) -> dict[str, float]:
        """Metrics (with prefix) of an evaluation after `step` if one is due, else empty; `step` 0 is the start."""

    def finished(self, row: dict[str, Any]) -> bool:
        """True when the row just logged ends the trainer early."""


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

    A row of metrics is on disk before the checkpoint of its step; on resume, rows beyond the checkpoint are cut. A
    checkpoint that cannot be written is warned of, and the next one is tried when its time comes.

    Args:
      before_save: called before each checkpoint; raises where none may be written.
      another_follows: another trainer comes after this one, so that a signal in the last step stops it too; else that
        step is the end anyway, and the signal changes nothing.

    Raises:
      UserError: the checkpoint belongs to another run, or every one is damaged.
      NotSaved: all steps are done, or a signal asked for the end, and the last checkpoint could not be written.
      Stopped, Interrupted: SIGTERM, SIGHUP or SIGINT asked for the end; the state is saved.
    """
    with _closed_together(log):
        done = _run(trainer, checkpoints, log, checkpoint_every, on_row, before_save, another_follows)
        if checkpoints is not None:
            with progress.task("writing the checkpoint"):
                checkpoints.wait()
    return done


@contextlib.contextmanager
def _closed_together(log: MetricsLog) -> Iterator[None]:
    """Closes the log. Its loggers may keep process 0 longer than the others, at their exit, wait for it: after an end
    that all come to, all wait here."""
    try:
        yield
    finally:
        log.close()
        if isinstance(sys.exception(), Stopped | Interrupted | NotSaved | None):
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
        """The row as it was written, and whether its step is the best to be kept."""
        row = _write(log, on_row, row)
        return row, checkpoints is not None and checkpoints.improves(row)

    def keep(step: int, over: bool) -> None:
        if checkpoints is not None:
            before_save()
            save(trainer, checkpoints, step, over)

    with contextlib.ExitStack() as stack:
        with progress.task("taking up the checkpoint"):
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
                stop = max(gather(asked()))  # asked once: what stops the run also saves it
                skipped = row.get(f"{trainer.name}/update/skipped", 0) > 0  # `replay` needs its checkpoint
                if last or stop or skipped or better or done % checkpoint_every == 0:
                    keep(done, over)
                if stop and (another_follows or not last):
                    _end(stop, done, checkpoints)
                if last:
                    return done
        # The data was used up: only now is the last step known, unless an earlier start came this far.
        if not by_first(lambda: _evaluated(trainer, log, done)) and (final := trainer.evaluate_if_due(done, last=True)):
            record({trainer.step_key: done} | final)  # before the last save, which removes what is no longer the best
        if checkpoints is not None and done and checkpoints.latest_step() != done:
            keep(done, False)
        return done


def _step(trainer: Stepper, step: int) -> dict[str, Any] | None:
    """Does a step, and the evaluation that is due after it; its row, or None when the data is used up."""
    began = time.perf_counter()
    metrics = trainer.step(step)
    if metrics is None:
        return None
    metrics["step_time_sec"] = time.perf_counter() - began
    row = {trainer.step_key: step} | {f"{trainer.name}/{name}": value for name, value in metrics.items()}
    return row | trainer.evaluate_if_due(step, last=_complete(trainer, step))


def _evaluated(trainer: Stepper, log: MetricsLog, done: int) -> bool:
    """Whether there is a row of this step that holds an evaluation alone."""
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
    """Loads the newest undamaged checkpoint into the trainer; returns its step (0: none) and whether the trainer ended
    early there."""
    step = checkpoints.newest() if checkpoints is not None else None
    if checkpoints is None or step is None:
        log.cut(trainer.step_key, -1)
        trainer.cut(-1)
        return trainer.done, False
    meta = checkpoints.meta(step)
    check_base(checkpoints.folder, meta["identity"], trainer.identity)
    own = [
        {name: value for name, value in each.items() if name != "base"} for each in (meta["identity"], trainer.identity)
    ]
    _check_same_run(checkpoints, *own)
    log.cut(trainer.step_key, step)  # only now: a run that is refused leaves the other's rows alone
    trainer.cut(step)
    checkpoints.take_up(log.rows(), sound=step)
    if trainer.rate_follows_total and meta["total"] != trainer.total and not _complete(trainer, step):
        message = "%s steps now, %s when the checkpoint was written: the schedule follows the new number from here"
        logger.warning(message, trainer.total, meta["total"])
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), trainer.to_save())
    trainer.restore(checkpoints.restore(step, abstract, trainer.iterator)[0], step)
    logger.info("resumed from %s/%d", checkpoints.folder, step)
    return step, bool(meta["over"])


def _check_same_run(checkpoints: Checkpoints, there: Any, here: dict[str, Any]) -> None:
    changed = differences(there, json.loads(json.dumps(here)))
    if changed:
        raise UserError(
            f"{checkpoints.folder}: the checkpoint is of another run. There and now:\n  "
            + "\n  ".join(changed)
            + "\nUse another output_dir, or the settings it was made with. Steps, evaluation and intervals may change."
        )


def save(trainer: Stepper, checkpoints: Checkpoints, step: int, over: bool) -> None:
    """Starts writing a checkpoint; the arrays are copied before this returns."""
    meta = {"identity": trainer.identity, "over": over, "total": trainer.total}
    checkpoints.save(step, trainer.to_save(), trainer.iterator, meta)


def _write(log: MetricsLog, on_row: Callable[[dict[str, Any]], None], row: dict[str, Any]) -> dict[str, Any]:
    """Writes a row of metrics, and returns it as it was written: plain numbers."""
    row = {name: float(value) if isinstance(value, np.generic | jax.Array) else value for name, value in row.items()}
    log.write(row)
    on_row(row)
    return row


@contextlib.contextmanager
def _stop_signals() -> Iterator[Callable[[], int]]:
    """Turns SIGTERM, SIGINT and SIGHUP into a question that the loop asks after each step (the signal's number, 0:
    none). A second SIGTERM or SIGINT acts at once. A second SIGHUP does not: a terminal that is closed sends two, one
    from its shell and one from the kernel. Where SIGHUP is ignored (`nohup`) it stays ignored."""
    asked: list[int] = [0]
    previous: dict[int, Any] = {}

    def ask(number: int, frame: Any) -> None:
        asked.append(number)
        if number != signal.SIGHUP:
            signal.signal(number, previous[number])
        # A logger may be in the midst of a line that this interrupts, and would wait for itself. On a terminal the line
        # at the bottom is written over.
        second = "" if number == signal.SIGHUP else "; a second one ends at once"
        said = f"{signal.Signals(number).name}: the step under way is finished first{second}\n"
        output.from_handler(f"\r\x1b[2K{said}" if os.isatty(2) else said)

    if threading.current_thread() is threading.main_thread():
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        previous = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield lambda: asked[-1]
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
