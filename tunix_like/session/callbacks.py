"""Callbacks of `train`: what they are told, what they can ask for, and the two that this library ships."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tunix_like.errors import CallbackFailed, UserError, check_type, nearest
from tunix_like.rollout.samples import Samples
from tunix_like.runtime import console
from tunix_like.runtime.processes import all_or_none, is_first
from tunix_like.runtime.user_code import check_arguments, describe_error, is_place, load_function

logger = logging.getLogger("tunix_like")


class RunControl:
    """The run that a callback is told of. What one callback asks for in one process is done in all.

    Attributes:
      trainer: the learner (a `training.trainer.Trainer`), for example for `trainer.generate([...])`.
      asked: what callbacks asked for since the last step, with the reason.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.asked: dict[str, str] = {}

    @property
    def step(self) -> int:
        """The number of complete steps."""
        return self.trainer.done

    @property
    def total(self) -> int | None:
        return self.trainer.total

    def stop(self, reason: str) -> None:
        """Ends the run after the current step, with the last evaluation and checkpoint. It then counts as complete."""
        self.asked.setdefault("stop", reason)

    def evaluate(self) -> None:
        """Evaluates after the current step, if there are held-out rows and it was not evaluated."""
        self.asked["evaluate"] = ""

    def save(self) -> None:
        """Saves a checkpoint of the current step, if the run has a folder."""
        self.asked["save"] = ""


class Callback:
    """Base class of callbacks. Every process calls every method; an exception, also that of `sys.exit`, ends the run,
    and its last complete step is saved.

    Attributes:
      shows_progress: whether this callback shows the progress. The library then shows nothing itself.
    """

    shows_progress = False

    def on_begin(self, run: RunControl, rows: Sequence[Mapping[str, Any]]) -> None:
        """Called before the first step of a call of `train`. `rows` are the rows of metrics up to the checkpoint of a
        resumed run (only in process 0). State that is derived from them equals that of the uninterrupted run."""

    def on_row(self, run: RunControl, row: dict[str, Any]) -> None:
        """Called with each logged row of metrics: one per step, with the evaluation of this step if there was one, and
        one per evaluation that belongs to no step."""

    def on_evaluation(self, run: RunControl, row: dict[str, Any]) -> None:
        """Called after `on_row` if the row has an evaluation."""

    def on_samples(self, run: RunControl, samples: Samples) -> None:
        """Called after `on_row` at step 1 and every `training.log_samples_every_n_steps` of reinforcement learning."""

    def on_checkpoint(self, run: RunControl, folder: Path) -> None:
        """Called when a checkpoint is complete on the disk, which can be some steps after its own."""

    def on_end(self, run: RunControl) -> None:
        """Called when training ends, also by an error or a signal. Processes must not communicate here."""


class Callbacks:
    """The callbacks of one call of `loop.run`."""

    def __init__(self, trainer: Any, callbacks: Sequence[Callback]) -> None:
        self._run = RunControl(trainer)
        self._callbacks = callbacks
        self._asked: dict[str, str] = {}

    def tell(self, *events: tuple[str, Any]) -> None:
        """Calls methods of all callbacks, each with one argument.

        Raises:
          CallbackFailed: a callback raised an exception in some process.
        """

        def call() -> dict[str, str]:
            for event, argument in events:
                for callback in self._callbacks:
                    try:
                        getattr(callback, event)(self._run, argument)
                    except KeyboardInterrupt:
                        raise
                    except BaseException as error:  # includes SystemExit and asyncio.CancelledError
                        known = isinstance(error, UserError)
                        problem = str(error).rstrip(".") if known else describe_error(error)
                        raise UserError(f"callback {type(callback).__name__}.{event}: {problem}.") from error
            asked = self._run.asked
            self._run.asked = {}
            return asked

        try:
            answers = all_or_none(call)
        except UserError as error:
            raise CallbackFailed(str(error)) from error.__cause__
        for answer in answers:
            self._asked |= answer

    def take_requests(self) -> dict[str, str]:
        """Returns what was asked for since the last call, with the reasons; the same in all processes."""
        asked = self._asked
        self._asked = {}
        return asked

    def end(self, failed: bool) -> None:
        """Calls `on_end`. `failed`: an error is on its way, which an error of a callback must not replace."""
        for callback in self._callbacks:
            try:
                callback.on_end(self._run)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # includes SystemExit and asyncio.CancelledError
                message = f"callback {type(callback).__name__}.on_end: {describe_error(error)}."
                if not failed:
                    raise CallbackFailed(message) from error
                logger.warning("%s", message)


class EarlyStopping(Callback):
    """Stops when a metric was not better than its best value for `patience` consecutive rows that have it.

    Args:
      metric: name in the rows of metrics, such as `eval/pass@1` or `train/rewards/mean`.
      mode: "max" if higher is better, "min" if lower is better.
      min_delta: a value is better if it exceeds the best by more than this.
    """

    def __init__(self, metric: str, patience: int = 5, mode: str = "max", min_delta: float = 0.0) -> None:
        check_type("early_stopping.metric", metric, str, "give the name of a metric")
        check_type("early_stopping.patience", patience, int, "give an integer of at least 1")
        check_type("early_stopping.min_delta", min_delta, (int, float), "give a number of at least 0")
        if patience < 1:
            raise UserError(f"early_stopping.patience: got {patience}; it must be at least 1.")
        if mode not in ("max", "min"):
            raise UserError(f"early_stopping.mode: unknown value '{mode}'. {nearest(str(mode), ('max', 'min'))}")
        if not 0 <= min_delta < math.inf:
            raise UserError(f"early_stopping.min_delta: got {min_delta}; it must be at least 0.")
        self.metric = metric
        self.patience = patience
        self.sign = 1 if mode == "max" else -1
        self.min_delta = min_delta

    def on_begin(self, run: RunControl, rows: Sequence[Mapping[str, Any]]) -> None:
        every = run.trainer.training.eval_every_n_steps
        if self.metric.startswith("eval/") and every is None:
            raise UserError(f"{self.metric} needs evaluations during training; set training.eval_every_n_steps")
        # The first step that must have the metric: in this call, because earlier ones may have had other intervals, and
        # only process 0 has their rows.
        every = every if self.metric.startswith("eval/") else None if "eval/" in self.metric else 1
        self._first = None if every is None else (run.step // every + 1) * every
        self._best: float | None = None
        self._waited = 0
        self._seen = False
        for row in rows:
            self._add(row)

    def on_row(self, run: RunControl, row: dict[str, Any]) -> None:
        self._add(row)
        # An environment may report a value only in some episodes.
        always = self.metric.startswith("eval/") and not self.metric.startswith("eval/environment/")
        evaluated = always and any(name.startswith("eval/") for name in row)
        if not self._seen and (evaluated or (self._first is not None and run.step >= self._first)):
            numbers = [name for name, value in row.items() if isinstance(value, int | float)]
            raise UserError(
                f"no row up to step {run.step} has the metric '{self.metric}'. {nearest(self.metric, numbers)}"
            )
        if self._waited >= self.patience and is_first():  # only process 0 has the rows of before the run was resumed
            best = f"{self._best:.4g}" if self._best is not None else "none"
            run.stop(f"{self.metric} was not better than {best} in the last {self._waited} rows that have it")

    def _add(self, row: Mapping[str, Any]) -> None:
        self._seen |= self.metric in row
        value = row.get(self.metric)
        if not isinstance(value, int | float) or not math.isfinite(value):
            return
        if self._best is None or self.sign * (value - self._best) > self.min_delta:
            self._best = float(value)
            self._waited = 0
        else:
            self._waited += 1


class RateProbe(Callback):
    """Finds the learning rates up to which training is stable, in one run whose rate rises: `optimizer.schedule` is
    exponential and `end_fraction` above 1.

    Every step is a training step at a higher rate. The reward (in other training than RL: minus the loss), averaged
    over `window` steps, has collapsed if it is below its best by more than six standard errors of the difference of
    two such means; its noise is estimated from consecutive differences before the window. The run then stops. A policy
    at a high rate was trained at the lower ones before, so the result is a limit, not the best rate, and says nothing
    about the stability of long runs.

    Attributes:
      stable: the highest rate before the collapse, or of the run if there is none; None before enough steps.
      unstable: the rate at which the collapse was found, or None.
    """

    def __init__(self, window: int = 5) -> None:
        check_type("rate_probe.window", window, int, "give an integer of at least 2")
        if window < 2:
            raise UserError(f"rate_probe.window: got {window}; it must be at least 2.")
        self.window = window

    def on_begin(self, run: RunControl, rows: Sequence[Mapping[str, Any]]) -> None:
        schedule = run.trainer.schedule
        self._name = run.trainer.name
        if schedule is None or not schedule(10**9) > schedule(0):
            raise UserError("the rate must rise; set optimizer.schedule=exponential, optimizer.end_fraction above 1")
        self._rows: list[dict[str, float]] = []
        self._signals: list[float] = []
        self.stable: float | None = None
        self.unstable: float | None = None
        self._why = ""
        for row in rows:
            self._add(row)

    def on_row(self, run: RunControl, row: dict[str, Any]) -> None:
        self._add(row)
        if self.unstable is not None and is_first():
            run.stop(self._why)

    def _add(self, row: Mapping[str, Any]) -> None:
        rate = row.get(f"{self._name}/learning_rate")
        if rate is None or self.unstable is not None:
            return
        if row.get(f"{self._name}/update/skipped"):
            self.unstable = rate
            self._why = f"an update was not finite at the learning rate {rate:.2g}"
            return
        numbers = {name: row.get(f"{self._name}/{name}") for name in _PROBED}
        reward, loss = numbers["rewards/mean"], numbers["loss"]
        signal = reward if reward is not None else -loss if loss is not None else math.nan
        if not math.isfinite(signal):  # no completion was scored
            return
        self._rows.append({"rate": rate} | {name: value for name, value in numbers.items() if value is not None})
        self._signals.append(signal)
        values = np.array(self._signals)
        width = self.window
        if len(values) < 2 * width:
            return
        means = np.convolve(values, np.full(width, 1 / width), "valid")
        noise = math.sqrt(float(np.mean(np.diff(values[:-width]) ** 2)) / 2)
        allowed = 6 * noise * math.sqrt(2 / width)
        last_good = int(np.flatnonzero(means >= means.max() - allowed / 2)[-1]) + width - 1
        self.stable = self._rows[last_good]["rate"]
        if means[-1] < means.max() - allowed:
            self.unstable = rate
            what = "reward" if reward is not None else "-loss"
            self._why = f"{what} fell from {means.max():.3g} to {means[-1]:.3g} at the learning rate {rate:.2g}"

    def on_end(self, run: RunControl) -> None:
        columns = [name for name in _PROBED if any(name in row for row in self._rows)]
        size = -(-len(self._rows) // 10) or 1
        parts = [self._rows[start : start + size] for start in range(0, len(self._rows), size)]
        cells = [[f"{part[-1]['rate']:.2g}", *(_mean(row.get(n) for row in part) for n in columns)] for part in parts]
        title = f"probe of the learning rate: the last rate of every {size} steps, and means over these steps"
        console.table(title, ["rate", *columns], cells)
        stable = "none yet: too few steps" if self.stable is None else f"up to {self.stable:.2g}"
        found = f"; {self._why}" if self._why else "; no collapse was found"
        console.print_text(f"stable learning rates: {stable}{found}")


_PROBED = ("rewards/mean", "loss", "grad_norm", "entropy")


def _mean(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None and math.isfinite(value)]  # NaN: a step without an update
    return f"{sum(known) / len(known):.3g}" if known else "-"


CALLBACKS: dict[str, type[Callback]] = {"early_stopping": EarlyStopping, "rate_probe": RateProbe}
"""The shipped callbacks, by their name in `training.callbacks`."""


def named_callbacks(entries: Sequence[Mapping[str, Any]] | None) -> list[Callback]:
    """Makes the callbacks of `training.callbacks`. Raises UserError for an unknown name or a wrong parameter."""
    made = []
    for i, entry in enumerate(entries or ()):
        key = f"training.callbacks[{i}]"
        name = entry.get("name")
        if not isinstance(name, str):
            raise UserError(f"{key}: expected {{name: ..., <parameters>}}; got {dict(entry)}.")
        if name not in CALLBACKS and not is_place(name):
            raise UserError(f"{key}: unknown callback '{name}'. {nearest(name, CALLBACKS)} Or FILE.py:CLASS.")
        kind = CALLBACKS.get(name) or load_function(name, "Callback")
        arguments = {argument: value for argument, value in entry.items() if argument != "name"}
        check_arguments(key, name, kind, arguments)
        try:
            made.append(kind(**arguments))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # includes SystemExit and asyncio.CancelledError
            problem = str(error) if isinstance(error, UserError) else f"{name}: {describe_error(error)}."
            raise UserError(f"{key}: {problem}") from error
        check_callbacks(made[-1:], key)
    return made


def check_callbacks(callbacks: Sequence[Any], key: str = "callbacks") -> None:
    """Raises UserError if an item is no callback, for example a class instead of its object."""
    check_type(key, callbacks, Sequence, "give a list of tunix_like.Callback objects")
    for callback in callbacks:
        check_type(key, callback, Callback, "give an object of a subclass of tunix_like.Callback")
