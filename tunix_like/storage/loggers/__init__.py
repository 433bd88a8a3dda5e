"""Logs metrics to TensorBoard, Weights & Biases and trackio, in addition to `metrics.jsonl`.

A logger that fails never stops a run.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunix_like.config.keys import shortened
from tunix_like.config.load import read_yaml
from tunix_like.errors import UserError, nearest
from tunix_like.runtime.processes import is_first
from tunix_like.storage.loggers.events import EventFiles
from tunix_like.storage.loggers.trackers import TOOLS, Logger, Start, Trackers
from tunix_like.storage.metrics import MetricsLog

logger = logging.getLogger("tunix_like")

EVENTS = "tensorboard"
"""Name of the logger that writes TensorBoard event files."""


class LoggedMetrics(MetricsLog):
    """Writes rows to `metrics.jsonl` and then to the loggers. A logger that fails is disabled with a warning."""

    def __init__(self, folder: Path, loggers: Sequence[Logger]) -> None:
        super().__init__(folder)
        self._loggers, self._number = list(loggers), 0

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
    known = (EVENTS, *TOOLS)
    for name in names:
        if name not in known:
            raise UserError(f"training.loggers: unknown logger {shortened(name)}. {nearest(str(name), known)}")
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            extra = f"[{name}]" if name in TOOLS else ""
            raise UserError(
                f"training.loggers: {name} is not installed; pip install 'tunix_like{extra}', or leave it out."
            ) from None


def open_metrics(folder: Path | None, names: Sequence[str], settings: Mapping[str, Any]) -> MetricsLog:
    """Opens the metrics log of a run in `folder`. Only process 0 writes. If `folder` is None, nothing is written.

    Args:
      names: `training.loggers`.
      settings: the hyperparameters that the loggers show if the folder has no `config.yaml`.

    Raises:
      UserError: `folder` is None, but Weights & Biases or trackio is selected, which need a folder.
    """
    trackers = [name for name in names if name in TOOLS]
    if folder is None and trackers:
        raise UserError(
            f"training.loggers: {trackers[0]} needs training.output_dir, which stores the id of the run, so that a "
            "resumed run continues the same curve."
        )
    if folder is None or not is_first():
        return MetricsLog(None)
    shown = _shown(folder / "config.yaml", settings)
    loggers: list[Logger] = [EventFiles(folder / "tensorboard", shown)] if EVENTS in names else []
    loggers += [Trackers(trackers, folder, shown)] if trackers else []
    return LoggedMetrics(folder, loggers)


def _shown(file: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of the YAML file `file`, or `settings` if the file does not exist or cannot be read. The
    values are converted to JSON types."""
    if file.is_file():
        try:
            return dict(json.loads(json.dumps(read_yaml(file), default=str)))
        except (ValueError, TypeError) as error:  # a UserError, or a value without a JSON type
            logger.warning("loggers show the settings of this run instead of config.yaml: %s", error)
    return dict(json.loads(json.dumps(settings, default=str)))
