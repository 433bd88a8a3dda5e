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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from tunix_like.config.load import differences, with_defaults
from tunix_like.config.schema import AlgorithmConfig, EnvironmentConfig, OptimizerConfig, RolloutConfig
from tunix_like.errors import CallbackFailed, EngineLost, NotSaved, SamplerDrifted, UserError
from tunix_like.models.lora import check_base
from tunix_like.rewards.registry import labels_of
from tunix_like.runtime import output, progress, trace
from tunix_like.runtime.processes import by_first, gather
from tunix_like.session.callbacks import Callback, Callbacks
from tunix_like.session.display import shown
from tunix_like.session.fingerprints import INPUTS
from tunix_like.storage.checkpoints import Checkpoints
from tunix_like.storage.metrics import MetricsLog
from tunix_like.storage.run_lock import owned
from tunix_like.training.trainer import Trainer

logger = logging.getLogger("tunix_like")

EXIT_STOPPED = 75
"""Exit status of a run that was stopped by SIGTERM, SIGINT or SIGHUP after it wrote a checkpoint."""


class Stopped(SystemExit):
    """Raised after SIGTERM or SIGHUP, when the current training step is done and, if the run has a folder, saved."""

    def __init__(self, step: int, saved: bool) -> None:
        super().__init__(EXIT_STOPPED)
        self.message = _stopped_after(step, saved)


class Interrupted(KeyboardInterrupt):
    """Raised after SIGINT (Ctrl-C), when the current training step is done and, if the run has a folder, saved.

    It is a `KeyboardInterrupt` and not a `SystemExit`, so that the process of a notebook continues.
    """

    def __init__(self, step: int, saved: bool) -> None:
        self.message = _stopped_after(step, saved)
        super().__init__(self.message)


def _stopped_after(step: int, saved: bool) -> str:
    return f"stopped by a signal after step {step}, " + ("which is saved" if saved else "nothing is saved")


def train(
    trainer: Trainer, prepare: Callable[[], None], callbacks: Sequence[Callback], another_follows: bool = False
) -> dict[str, Any]:
    """Runs a call of a trainer's `train`: claims the run folder, takes the model's weights, checks the data and builds
    what the call needs (`prepare`), runs the steps, and closes what was opened, also after an error. Returns and raises
    what `run` does."""
    with owned(trainer.training.output_dir) as check_owner, shown(trainer.training, callbacks) as all_callbacks:
        trainer.begin()
        prepare()
        try:
            return run(trainer, all_callbacks, check_owner, another_follows)
        finally:
            trainer.end()


def run(
    trainer: Trainer,
    callbacks: Sequence[Callback] = (),
    before_save: Callable[[], None] = lambda: None,
    another_follows: bool = False,
) -> dict[str, Any]:
    """Runs the steps of a trainer, and returns the newest value of each metric. If the run folder has checkpoints,
    resumes from the newest checkpoint that is not damaged. For a finished run, the values in its log are returned.

    A row of metrics is written before the checkpoint of its step. When a run resumes, the rows of steps after the
    checkpoint are removed. If a checkpoint cannot be written, a warning is logged and training continues to the next
    checkpoint. At the end, the weights are written back to the trainer's model. If a run with a folder ends with
    `EngineLost`, `SamplerDrifted`, `CallbackFailed`, `Stopped` or `Interrupted`, its last complete step is saved.

    Args:
      callbacks: told of each row after the row is written.
      before_save: called before each checkpoint. If `before_save` raises an error, the checkpoint is not written and
        the run ends.
      another_follows: whether another trainer runs after this one. If True, a signal in the last step raises an
        exception, as in other steps. If False, a signal in the last step is ignored, because the run ends after this
        step anyway.

    Raises:
      UserError: the checkpoint belongs to another run, or all checkpoints are damaged.
      NotSaved: all steps are done, or a signal stopped the run, and the last checkpoint could not be written.
      EngineLost, SamplerDrifted, CallbackFailed: see `tunix_like.errors`.
      Stopped, Interrupted: SIGTERM, SIGHUP or SIGINT stopped the run.
    """
    with _opened(trainer, callbacks, before_save) as out:
        with progress.task("restoring the checkpoint"), trace.span("restore"):
            last = _resume(trainer, out.checkpoints, out.log)
        if last:
            _tell_finished(trainer, out, another_follows)
            return out.last_row
        with progress.task(trainer.name, trainer.total, trainer.done) as advance, out.told():
            _evaluate_start(trainer, out)
            with _stop_signals() as asked:
                while not last and (done := _step(trainer, out, trainer.done + 1)) is not None:
                    advance(1)
                    over = trainer.finished(done.row) or "stop" in done.wishes
                    last = over or trainer.complete
                    stop = max(gather(asked()))  # read once, so that a signal that ends the run also causes the save
                    due = trainer.done % trainer.training.checkpoint_every_n_steps == 0
                    if due or last or stop or done.needs_checkpoint:
                        out.save(over)
                    if stop and (another_follows or not last):
                        _stop(out, stop, trainer.done)
            if not last:
                _finish_exhausted(trainer, out)
            out.wait()
    return out.last_row


def _tell_finished(trainer: Trainer, out: _Output, another_follows: bool) -> None:
    """Reads the newest metrics of a run that is already finished, and warns that nothing is trained."""
    out.last_row.update(by_first(lambda: out.log.newest(trainer.step_key)))
    if not another_follows:
        key = f"{'training' if trainer.name == 'train' else trainer.name}.max_steps"
        how = f"raise {key} to continue" if trainer.complete else "it ended early"
        message = "this run is already finished (step %d of %s), so nothing was trained; %s"
        logger.warning(message, trainer.done, trainer.total, how)


def _evaluate_start(trainer: Trainer, out: _Output) -> None:
    """Evaluates the weights before the first step of a new run."""
    fresh = trainer.done == 0 and out.latest_step() is None
    start = trainer.evaluate_if_due(0, last=False) if fresh else {}
    if start and out.write({trainer.step_key: 0} | start, start):
        out.save(over=False)


class _Step(NamedTuple):
    """What a step gave: its row of metrics, what the callbacks asked for, and whether a checkpoint should follow."""

    row: dict[str, Any]
    wishes: Mapping[str, str]
    needs_checkpoint: bool


def _step(trainer: Trainer, out: _Output, step: int) -> _Step | None:
    """Runs, evaluates and writes a step. Returns None if the data is exhausted. After an error that ends the run, the
    last complete step is saved."""
    began = time.perf_counter()
    row: dict[str, Any] = {}
    written = False
    try:
        if (metrics := trainer.step(step)) is None:
            return None
        trainer.done = step  # before the evaluation, which can fail
        row = {trainer.step_key: step}
        row |= {f"{trainer.name}/{name}": value for name, value in metrics.items()}
        ended = time.perf_counter()
        row[f"{trainer.name}/step_time_sec"] = ended - began
        trace.add(f"{trainer.name} {step}", began, ended, "steps")
        evaluated = trainer.evaluate_if_due(step, last=trainer.complete)
        row |= evaluated
        written = True
        better = out.write(row, evaluated)
        wishes = out.callbacks.take_requests()
        if not evaluated and ("stop" in wishes or "evaluate" in wishes):
            evaluated = trainer.evaluate_if_due(step, last=True)
            if evaluated:
                better |= out.write({trainer.step_key: step} | evaluated, evaluated)
                wishes |= out.callbacks.take_requests()
    except (EngineLost, SamplerDrifted, CallbackFailed):
        if row and not written:
            out.log_row(row)
        if out.save_last():
            out.wait()
        raise
    if "stop" in wishes:
        logger.warning("stopped after step %d of %s: %s", step, trainer.total, wishes["stop"])
    skipped = row.get(f"{trainer.name}/update/skipped", 0) > 0  # `replay` needs this step's checkpoint
    return _Step(row, wishes, skipped or better or "save" in wishes)


def _stop(out: _Output, stop: int, step: int) -> NoReturn:
    """Ends a run that the signal `stop` stops, after its checkpoint is written."""
    try:
        out.wait()
    except NotSaved as error:
        error.stopped = True
        raise
    out.tell_saved()
    raise (Interrupted if stop == signal.SIGINT else Stopped)(step, out.checkpoints is not None)


def _finish_exhausted(trainer: Trainer, out: _Output) -> None:
    """Runs the final evaluation and saves the last checkpoint of a run that ends because its data is exhausted."""

    def evaluated() -> bool:  # whether this evaluation has run before the run was resumed
        done = out.log.of_step(trainer.step_key, trainer.done)
        return any(f"{trainer.name}/step_time_sec" not in row for row in done)

    try:
        if not by_first(evaluated) and (final := trainer.evaluate_if_due(trainer.done, last=True)):
            out.write({trainer.step_key: trainer.done} | final, final)  # before a save, which can remove the best
    except (EngineLost, CallbackFailed):
        out.save_last()
        raise
    out.save_last()


@dataclasses.dataclass
class _Output:
    """The checkpoints and the log of one call of `run`.

    Attributes:
      last_row: the newest value of each metric, from all rows so far.
    """

    trainer: Trainer
    checkpoints: Checkpoints | None
    log: MetricsLog
    callbacks: Callbacks
    before_save: Callable[[], None]
    last_row: dict[str, Any] = dataclasses.field(default_factory=dict)
    _saving: int | None = None
    _saved: list[int] = dataclasses.field(default_factory=list)

    def log_row(self, row: dict[str, Any]) -> None:
        """Writes a row of metrics, with arrays as numbers."""
        row |= {name: float(value) for name, value in row.items() if isinstance(value, np.generic | jax.Array)}
        self.log.write(row)
        self.last_row.update(row)

    def write(self, row: dict[str, Any], evaluated: Mapping[str, Any]) -> bool:
        """Writes a row of metrics and tells the callbacks, also of a checkpoint that has become complete. Returns
        whether the row has the best value so far of the metric that selects the best checkpoint.

        Args:
          evaluated: the part of the row that is an evaluation.
        """
        self.log_row(row)
        if self._saving is not None and self.checkpoints is not None and all(gather(self.checkpoints.idle)):
            self._settle()
        events: list[tuple[str, Any]] = [*self._complete_checkpoints(), ("on_row", row)]
        events += [("on_evaluation", row)] if evaluated else []
        if self.trainer.samples is not None:
            events.append(("on_samples", self.trainer.samples))
            self.trainer.samples = None
        better = self.checkpoints is not None and self.checkpoints.improves(row)
        self.callbacks.tell(*events)
        return better

    def _settle(self) -> None:
        """Waits for the running save, and notes whether its checkpoint is complete."""
        if self._saving is not None:
            self._saved += [self._saving] if self.latest_step() == self._saving else []
            self._saving = None

    def tell_saved(self) -> None:
        """Waits for the running save, and tells the callbacks of it."""
        self._settle()
        self.callbacks.tell(*self._complete_checkpoints())

    def _complete_checkpoints(self) -> list[tuple[str, Any]]:
        """Returns the events of the checkpoints that became complete since the last call."""
        saved = self._saved
        self._saved = []
        return [
            ("on_checkpoint", self.checkpoints.folder / str(step)) for step in saved if self.checkpoints is not None
        ]

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Tells the callbacks the beginning and the end of training, and that the last checkpoint is complete."""
        failed = True
        self.callbacks.tell(("on_begin", self.log.rows()))
        try:
            yield
            self.tell_saved()
            failed = False
        finally:
            self.callbacks.end(failed)

    def save(self, over: bool) -> None:
        """Starts to write a checkpoint of the newest completed step. `over`: training ends before its last planned
        step."""
        if self.checkpoints is not None:
            self.before_save()
            with trace.span("checkpoint"):
                self._settle()
                meta = {"identity": self.trainer.identity, "over": over, "total": self.trainer.total}
                self.checkpoints.save(self.trainer.done, self.trainer.to_save(), self.trainer.iterator, meta)
            self._saving = self.trainer.done

    def save_last(self) -> bool:
        """Starts to save the last complete step. Returns False if there is none, or if it has a checkpoint."""
        missing = self.trainer.done > 0 and self.latest_step() != self.trainer.done
        if missing:
            self.save(over=False)
        return missing

    def wait(self) -> None:
        """Waits until checkpoints are written. Raises NotSaved if the last one could not be written."""
        if self.checkpoints is not None:
            with progress.task("writing the checkpoint"):
                self.checkpoints.wait()

    def latest_step(self) -> int | None:
        return None if self.checkpoints is None else self.checkpoints.latest_step()


@contextlib.contextmanager
def _opened(trainer: Trainer, callbacks: Sequence[Callback], before_save: Callable[[], None]) -> Iterator[_Output]:
    """Opens the checkpoints and the log of a trainer, and closes both at the end of the context.

    The weights are written back to the model before the checkpoints are closed, because a signal can interrupt the
    closing. If no unexpected error occurred, all processes wait until process 0 has closed its loggers, which can take
    long. Without this wait, the other processes would exit, and an exiting process waits for process 0 only for a
    limited time.
    """
    checkpoints = trainer.open_checkpoints()
    with trace.writing(trainer.written_folder), checkpoints or contextlib.nullcontext(), trainer.running():
        log = trainer.open_log()
        together = True
        try:
            yield _Output(trainer, checkpoints, log, Callbacks(trainer, callbacks), before_save)
        except BaseException as error:  # `sys.exception()` would also see an exception that the caller handles
            together = isinstance(error, Stopped | Interrupted | NotSaved)
            raise
        finally:
            log.close()
            if together:
                gather(None)


def _resume(trainer: Trainer, checkpoints: Checkpoints | None, log: MetricsLog) -> bool:
    """Restores the newest undamaged checkpoint, if any, into the trainer. Returns whether no step is left to run: all
    steps are done, or training ended early."""
    step = checkpoints.newest() if checkpoints is not None else None
    if checkpoints is None or step is None:
        log.cut(trainer.step_key, -1)
        trainer.cut(-1)
        return trainer.complete
    meta = checkpoints.meta(step)
    saved = dict(meta["identity"])
    current = dict(trainer.identity)
    saved_inputs = saved.pop(INPUTS, {})
    current_inputs = current.pop(INPUTS, {})
    _check_same_run(checkpoints, saved, current)
    refuse = trainer.training.changed_inputs == "error"
    changed = _check_same_inputs(checkpoints, saved_inputs, current_inputs, refuse=refuse)
    log.cut(trainer.step_key, step)  # after the checks, so that a rejected run does not remove rows of another run
    trainer.cut(step)
    checkpoints.find_best(log.rows(), verified=step)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), trainer.to_save())
    trainer.restore(checkpoints.restore(step, abstract, trainer.iterator)[0], step, changed)
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
    for name in ("optimizer", "lengths"):  # earlier versions of SFT stored neither
        if name in current:
            saved = {name: current[name]} | saved
    if (rewards := saved.get("rewards")) and rewards != current.get("rewards"):
        # Earlier versions stored the names with the folders of their files.
        saved = saved | {"rewards": dict(zip(labels_of(rewards), rewards.values(), strict=True))}
    changed = differences(*(json.loads(json.dumps(identity | {"base": None})) for identity in (saved, current)))
    if changed:
        raise UserError(
            f"{checkpoints.folder}: the checkpoint is of another run. Different settings (checkpoint, now):\n  "
            + "\n  ".join(changed)
            + "\nUse another output_dir, or the settings of the checkpoint. Steps, evaluation and intervals may change."
        )


def _check_same_inputs(checkpoints: Checkpoints, saved: dict[str, str], current: dict[str, str], refuse: bool) -> bool:
    """Returns whether a fingerprint that both a checkpoint and this run have differs; earlier versions stored none."""
    changed = [name for name in current if saved.get(name, current[name]) != current[name]]
    if not changed:
        return False
    message = f"{checkpoints.folder}: {' and '.join(changed)} changed since the checkpoint"
    if refuse:
        raise UserError(f"{message}. Use those of the checkpoint, another output_dir, or training.changed_inputs=warn.")
    logger.warning("%s; the run continues with the new ones (training.changed_inputs=error refuses this)", message)
    return True


@contextlib.contextmanager
def _stop_signals() -> Iterator[Callable[[], int]]:
    """Context manager in which SIGTERM, SIGINT and SIGHUP do not stop the process before the current step is done.

    Yields a function that returns the number of the received signal, or 0 if there is none. A second SIGTERM or SIGINT
    has its usual effect at once. A second SIGHUP has none, because the shell and the kernel each send one when a
    terminal is closed. A SIGINT or SIGHUP that is ignored at the start (with `nohup`, or in a background job of a
    shell) stays ignored.
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
