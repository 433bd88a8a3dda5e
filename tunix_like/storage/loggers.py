"""Logs metrics to TensorBoard, Weights & Biases, trackio and Prometheus, in addition to `metrics.jsonl`. A logger that
fails never stops a run, and a resumed run continues the same curves.

TensorBoard files are written synchronously with the record writer of the `tensorboard` package. Asynchronous writers
lose rows if the process is killed, and block forever if their thread has died. Weights & Biases and trackio run in
threads. Their packages are imported when the first row is logged.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import queue
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, runtime_checkable

import yaml

from tunix_like.config.keys import shortened
from tunix_like.config.load import read_yaml
from tunix_like.config.shown import shown_sections
from tunix_like.errors import UserError, nearest
from tunix_like.runtime.atomic import write_atomically
from tunix_like.runtime.input_files import read_object
from tunix_like.runtime.processes import by_first, is_first
from tunix_like.storage.metrics import MetricsLog, Start, is_number, rows
from tunix_like.storage.prometheus import MetricsServer

logger = logging.getLogger("tunix_like")

EVENTS = "tensorboard"
ENDPOINT = "prometheus"
FILE = "tracking.json"
CURE = "Remove it to start a new curve."
_LOCK = threading.Lock()  # protects `FILE`, which each tool updates in its own thread

FINISH_SECONDS = 60.0
"""Maximum seconds to wait, at the end of a training phase, until all tools have sent their rows."""

WAITING_ROWS = 10_000
"""Maximum number of rows that wait to be logged by a tool. If more rows wait, the tool is disabled. 10,000 rows of 50
numbers take 55 MB."""


@runtime_checkable
class Logger(Protocol):
    """Writes rows of metrics to one destination, e.g. TensorBoard files. The methods may raise any exception."""

    def begin(self, start: Start) -> None:
        """Starts or resumes a training phase (supervised fine-tuning or reinforcement learning). Must be called before
        `write`."""

    def write(self, number: int, row: Mapping[str, Any]) -> None:
        """Logs a row of `metrics.jsonl`. `number` is the number of its line, from 1."""

    def close(self, failed: bool) -> None:
        """Ends the training phase; `failed` is True if the phase ended with an exception."""


class LoggedMetrics(MetricsLog):
    """Writes rows to `metrics.jsonl` and then to the loggers. A logger that fails is disabled with a warning."""

    def __init__(self, folder: Path | None, loggers: Sequence[Logger]) -> None:
        super().__init__(folder)
        self._loggers = list(loggers)
        self._number = 0

    def cut(self, key: str, last: int) -> int:
        self._number = super().cut(key, last)
        start = Start(key, last + 1, self._number)
        self._call_all(lambda each: each.begin(start))
        return self._number

    def write(self, row: Mapping[str, Any]) -> None:
        super().write(row)
        self._number += 1
        self._call_all(lambda each: each.write(self._number, row))

    def close(self) -> None:
        super().close()
        failed = sys.exception() is not None
        self._call_all(lambda each: each.close(failed))

    def _call_all(self, call: Callable[[Logger], None]) -> None:
        for each in list(self._loggers):
            try:
                call(each)
            except Exception as error:  # a logger may raise anything, which must not stop a run
                self._loggers.remove(each)
                logger.warning("%s: %s; this logger is off until the next start", each, error or type(error).__name__)


def check_loggers(names: Sequence[str]) -> None:
    """Raises UserError if a name in `training.loggers` is unknown, or if the package of a logger is not installed."""
    known = (EVENTS, ENDPOINT, *TOOLS)
    for name in names:
        if name not in known:
            raise UserError(f"training.loggers: unknown logger {shortened(name)}. {nearest(str(name), known)}")
        try:
            importlib.metadata.version("prometheus-client" if name == ENDPOINT else name)
        except importlib.metadata.PackageNotFoundError:
            extra = "" if name == EVENTS else f"[{name}]"
            raise UserError(
                f"training.loggers: {name} is not installed; pip install 'tunix_like{extra}', or leave it out."
            ) from None


def open_metrics(
    folder: Path | None,
    names: Sequence[str],
    settings: Mapping[str, Any],
    total: int | None = None,
    checkpoints: str = "checkpoints",
) -> MetricsLog:
    """Opens the metrics log of a run in `folder`. Only process 0 writes. If `folder` is None, no file is written.

    Args:
      names: `training.loggers`.
      settings: the hyperparameters that the loggers show if the folder has no `config.yaml`.
      total: the planned number of steps.
      checkpoints: the name of the folder of checkpoints in `folder`.

    Raises:
      UserError: `folder` is None, but Weights & Biases or trackio is selected, which need a folder; or Prometheus is
        selected in a run without rows, and its port cannot be used.
    """
    trackers = [name for name in names if name in TOOLS]
    if folder is None and trackers:
        raise UserError(
            f"training.loggers: {trackers[0]} needs training.output_dir, which stores the id of the run, so that a "
            "resumed run continues the same curve."
        )
    loggers: list[Logger] = []
    if ENDPOINT in names:
        server = MetricsServer(folder, total, checkpoints)
        loggers += [server] if by_first(lambda: _opens(server, folder)) else []
    if not is_first():
        return MetricsLog(None)
    if folder is not None:
        shown = _shown(folder / "config.yaml", settings)
        loggers += [EventFiles(folder / "tensorboard", shown)] if EVENTS in names else []
        loggers += [Trackers(trackers, folder, shown)] if trackers else []
    return MetricsLog(None) if folder is None and not loggers else LoggedMetrics(folder, loggers)


def _opens(server: MetricsServer, folder: Path | None) -> bool:
    """Opens the server, and returns whether it is open. A new run whose port is in use is refused, which loses
    nothing; one with rows, such as a run that a scheduler starts again, goes on without the server."""
    try:
        server.open()
    except UserError as error:
        if not MetricsLog(folder).rows():
            raise
        logger.warning("%s This logger is off until the next start.", error)
        return False
    return True


def _shown(file: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what may be shown of the YAML file `file`, or of `settings` if the file does not exist or cannot be read.
    The values are converted to JSON types."""
    if file.is_file():
        try:
            return dict(json.loads(json.dumps(shown_sections(read_yaml(file)), default=str)))
        except (ValueError, TypeError) as error:  # a UserError, or a value without a JSON type
            logger.warning("loggers show the settings of this run instead of config.yaml: %s", error)
    return dict(json.loads(json.dumps(shown_sections(settings), default=str)))


class EventFiles:
    """Writes TensorBoard files: the scalars of every row by step, and the config as text. Each start has a new file.

    When a run resumes from an earlier step, a `SessionLog.START` event (the `purge_step` of other writers) makes
    TensorBoard discard the later steps of all metrics in the folder. Supervised fine-tuning and reinforcement learning
    have separate folders, because they count their steps separately.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder = folder
        self._settings = settings
        self._start = Start("step", 0, 0)
        self._file: BinaryIO | None = None

    def __str__(self) -> str:
        return f"tensorboard ({self._folder})"

    def begin(self, start: Start) -> None:
        self._start = start

    def write(self, number: int, row: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto import summary_pb2

        first = self._file is None
        if self._file is None:
            self._file = self._open()
        values = [
            summary_pb2.Summary.Value(tag=name, simple_value=value)
            for name, value in scalars(row).items()
            if name != self._start.key
        ]
        if first:
            values.append(self._config())
        self._add(step=row[self._start.key], summary=summary_pb2.Summary(value=values))
        self._file.flush()

    def close(self, failed: bool) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self) -> BinaryIO:
        from tensorboard.compat.proto import event_pb2

        phase = self._folder / (self._start.key.rpartition("/")[0] or "train")
        phase.mkdir(parents=True, exist_ok=True)
        matches = [re.match(r"events\.out\.tfevents\.(\d+)\.", file.name) for file in phase.iterdir()]
        number = max((int(match[1]) + 1 for match in matches if match), default=0)
        # TensorBoard reads the files in the order of their names. The names contain a running number, which does not
        # depend on clocks.
        self._file = (phase / f"events.out.tfevents.{number:010d}.{socket.gethostname()}").open("xb")
        self._add(file_version="brain.Event:2")
        if number:
            restart = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(step=self._start.first, session_log=restart)
        return self._file

    def _add(self, **fields: Any) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        event = event_pb2.Event(wall_time=time.time(), **fields)
        RecordWriter(self._file).write(event.SerializeToString())

    def _config(self) -> Any:
        """Returns the config as a TensorBoard text. The text is indented, so Markdown shows it as a code block."""
        from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2

        lines = yaml.safe_dump(dict(self._settings), sort_keys=False).splitlines()
        text = "\n".join(f"    {line}" for line in lines).encode()
        shape = tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)])
        plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
        return summary_pb2.Summary.Value(
            tag="config/text_summary",
            metadata=summary_pb2.SummaryMetadata(plugin_data=plugin),
            tensor=tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[text], tensor_shape=shape),
        )


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the values of a row of metrics that are finite numbers, by name."""
    return {name: value for name, value in row.items() if is_number(value)}


class LoggedRun(NamedTuple):
    """The description of a run for a logging tool: a stable id, the run folder and the hyperparameters. `mark` is the
    number of rows of `metrics.jsonl` that the tool is known to have."""

    id: str
    folder: Path
    settings: dict[str, Any]
    mark: int


class Wandb:
    """A run of Weights & Biases. It drops a row whose step is smaller than an earlier step, so the number of the row in
    `metrics.jsonl` is passed as the step. The charts show training steps on their axes."""

    at_once = False  # a killed process loses unsent rows (offline: the rows of a 32 KB block that is not full)

    def __init__(self, run: LoggedRun) -> None:
        import wandb

        if wandb.setup().settings.mode in (None, "online") and not wandb.login(prompt=False):
            raise RuntimeError("there is no API key (wandb login, WANDB_API_KEY, or WANDB_MODE=offline)")
        environment = os.environ
        self._run = wandb.init(
            project=environment.get("WANDB_PROJECT", "tunix_like"),
            name=environment.get("WANDB_NAME", run.folder.name),
            dir=environment.get("WANDB_DIR", str(run.folder)),
            id=run.id,
            resume="allow",
            config=run.settings,
            allow_val_change=True,
            reinit="create_new",  # keeps a run that the user has opened
            # wandb otherwise captures the output, and the command line with the overrides of the config.
            settings={"console": environment.get("WANDB_CONSOLE", "off"), "x_disable_meta": True},
        )
        self.first = run.mark + 1 if self._run.offline else max(1, self._run.step)  # online: from the server
        for names, step in (("sft/*", "sft/step"), ("train/*", "step"), ("eval/*", "step")):
            self._run.define_metric(names, step_metric=step)

    def log(self, number: int, key: str, row: dict[str, float]) -> None:
        self._run.log(row, step=number)

    def finish(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Trackio:
    """A run of trackio. trackio identifies a run by its name, so the name ends with the id of the run."""

    at_once = True  # rows are stored within half a second

    def __init__(self, run: LoggedRun) -> None:
        import trackio

        project = os.environ.get("TRACKIO_PROJECT", "tunix_like")
        name = f"{run.folder.name}-{run.id}"
        self.first = run.mark + 1
        self._run = trackio.init(project=project, name=name, resume="allow", config=run.settings, embed=False)

    def log(self, number: int, key: str, row: dict[str, float]) -> None:
        self._run.log({name: value for name, value in row.items() if name != key}, step=int(row[key]))

    def finish(self, failed: bool) -> None:
        self._run.finish()


TOOLS: dict[str, Any] = {"wandb": Wandb, "trackio": Trackio}


class Trackers:
    """Logs to external tools under one run id, which is stored in the run folder.

    The tools cannot delete logged rows (Weights & Biases truncates a run only for some accounts). A run that resumes
    from a checkpoint repeats the same steps bit for bit, so rows that a tool already has are not logged again. (If
    `max_steps`, `eval.*` or `train_micro_batch_size` were changed, the repeated steps are not identical bit for bit;
    the tools keep the rows that were logged first.) If a tool lacks rows of `metrics.jsonl`, these rows are logged
    before new rows. A run that has no checkpoint starts from the beginning with a new id.

    `tracking.json` in the run folder stores the id, and for each tool the number of rows that the tool is known to
    have. These are all logged rows if the tool stores rows at once. Otherwise they are the rows up to the end of the
    last training phase (supervised fine-tuning or reinforcement learning) that was completed.
    """

    def __init__(self, names: Sequence[str], folder: Path, settings: dict[str, Any]) -> None:
        self._names = names
        self._file = folder / FILE
        self._settings = settings
        self._tools: list[Tool] = []

    def __str__(self) -> str:
        return " and ".join(self._names)

    def begin(self, start: Start) -> None:
        with _LOCK:
            state: dict[str, Any] = {"run": secrets.token_hex(4)}
            if start.kept and self._file.is_file():
                state = read_object(self._file, CURE)
            write_atomically(self._file, json.dumps(state))
        run = LoggedRun(state["run"], self._file.parent.resolve(), self._settings, 0)
        self._tools = [
            Tool(name, run._replace(mark=state.get(name, 0)), start) for name in self._names if not _is_busy(name)
        ]

    def write(self, number: int, row: Mapping[str, Any]) -> None:
        for tool in self._tools:
            tool.write(number, scalars(row))

    def close(self, failed: bool) -> None:
        # A second Ctrl-C (KeyboardInterrupt) must end the process at once. The first Ctrl-C raises another type,
        # `loop.Interrupted`.
        wait = 0.0 if type(sys.exception()) is KeyboardInterrupt else FINISH_SECONDS
        for tool in self._tools:
            tool.end(failed)
        until = time.monotonic() + wait
        for tool in self._tools:
            if not tool.ended(until):
                logger.warning("%s: not done after %g s; the run does not wait any longer", tool.name, wait)


def _is_busy(name: str) -> bool:
    """Returns whether the thread of a tool still logs an earlier training phase."""
    if busy := any(thread.name == _thread_name(name) for thread in threading.enumerate()):
        logger.warning("%s: still busy with an earlier phase; this logger is off until the next start", name)
    return busy


def _thread_name(name: str) -> str:
    return f"logger {name}"


class Tool:
    """Runs one logging tool in its own thread, so that the training does not wait for the tool. An exception of the
    tool is logged as a warning and ends the thread."""

    def __init__(self, name: str, run: LoggedRun, start: Start) -> None:
        self.name = name
        self._logged = run
        self._start = start
        self._rows: queue.Queue[tuple[int, dict[str, float]] | bool] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name=_thread_name(name), daemon=True)
        self._given_up = False

    def write(self, number: int, row: dict[str, float]) -> None:
        if self._thread.ident is None:
            self._thread.start()
        if self._given_up or not self._thread.is_alive():
            return
        self._given_up = self._rows.qsize() >= WAITING_ROWS
        if self._given_up:
            logger.warning("%s: %d rows wait for it; this logger is off until the next start", self.name, WAITING_ROWS)
        else:
            self._rows.put((number, row))

    def end(self, failed: bool) -> None:
        self._rows.put(failed)

    def ended(self, until: float) -> bool:
        """Waits for the thread until the `time.monotonic` value `until`. Returns whether it has ended or was given
        up."""
        if self._thread.ident is not None and not self._given_up:
            self._thread.join(max(0.0, until - time.monotonic()))
        return self._given_up or not self._thread.is_alive()

    def _work(self) -> None:
        try:
            session = TOOLS[self.name](self._logged)
            last = 0
            for last, row in enumerate(rows(self._logged.folder)[: self._start.kept], 1):
                self._log(session, last, scalars(row))
            while not isinstance(item := self._rows.get(), bool):
                last = item[0]
                self._log(session, *item)
            session.finish(item)
            self._note(last)
        except Exception as error:  # a tool may raise anything, which must not stop a run
            cause = str(error) or type(error).__name__
            logger.warning("%s: %s; this logger is off until the next start", self.name, cause)

    def _log(self, session: Any, number: int, row: dict[str, float]) -> None:
        if number >= session.first:
            session.log(number, self._start.key if self._start.key in row else "sft/step", row)
            if session.at_once:
                self._note(number)

    def _note(self, number: int) -> None:
        """Records that the tool has the rows up to `number`."""
        file = self._logged.folder / FILE
        with _LOCK, contextlib.suppress(OSError, UserError):  # e.g. a full disk; a later update may succeed
            state = read_object(file, CURE)
            if state.get("run") == self._logged.id:  # otherwise the run was started over in the meantime
                write_atomically(file, json.dumps(state | {self.name: max(state.get(self.name, 0), number)}))
