"""Writes TensorBoard event files. Supervised fine-tuning and reinforcement learning have separate folders, and each
start of a run writes a new file.

The files are written synchronously with the record writer of the `tensorboard` package. The asynchronous writers of
`tensorboard` and other packages lose rows if the process is killed, and block forever if their thread has died.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from tunix_like.storage.loggers.trackers import Start, scalars


class EventFiles:
    """Writes the scalars of every row of metrics by step, and the config as text.

    When a run resumes from an earlier step, a `SessionLog.START` event (the `purge_step` of other writers) makes
    TensorBoard discard the later steps of all metrics in the folder. Supervised fine-tuning and reinforcement learning
    have separate folders, because they count their steps separately.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder, self._settings = folder, settings
        self._start = Start("step", 0, 0)
        self._file: BinaryIO | None = None

    def __str__(self) -> str:
        return f"tensorboard ({self._folder})"

    def begin(self, start: Start) -> None:
        self._start = start

    def write(self, number: int, row: Mapping[str, Any]) -> None:
        """Appends a row of metrics to the file and flushes the file. The first call opens the file."""
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
