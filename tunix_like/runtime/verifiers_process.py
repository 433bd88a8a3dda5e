"""Starts and controls, from the training process, the process of an environment of the package `verifiers`."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunix_like.errors import UserError

SECONDS_TO_START = 300.0
"""Maximum seconds to load an environment. The limit is high, because an environment can load a data set."""

_ROOT = Path(__file__).parents[2]
_WORKER = "tunix_like.runtime.verifiers_worker"
_SHOWN = 2000
_SECONDS_TO_READ = 1.0


class Lost(Exception):
    """The process of the environment has ended. The message of this exception gives the exit status of the process and
    the end of its error output."""


class VerifiersProcess:
    """Starts a process that runs an environment of the package `verifiers`, and exchanges messages with it.

    Args:
      settings: the first message to the process (see `verifiers_worker.load`).

    Attributes:
      first: the first message from the process.

    Raises:
      UserError: the package `verifiers` is not installed, or the environment cannot be used.
    """

    def __init__(self, settings: Mapping[str, Any]):
        if importlib.util.find_spec("verifiers") is None:
            raise UserError(
                "data.name=verifiers needs the package verifiers; install it with pip install 'tunix-like[envs]'."
            )
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `_release`
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", _WORKER, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C reaches only the training process, which then ends this process
        )
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="verifiers", daemon=True)
        self._reader.start()
        self.send(settings)
        try:
            self.first = self.next(SECONDS_TO_START)
        except Lost as error:
            self.first = {"kind": "unusable", "reason": str(error)}
        if self.first is None or self.first["kind"] == "unusable":
            self.kill()
            late = f"it was not loaded within {SECONDS_TO_START:g} s; set data.train_size if its tasks are not limited"
            reason = late if self.first is None else self.first["reason"]
            raise UserError(f"data.path={settings['path']}: the environment cannot be used. {reason.rstrip('.')}.")

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message to the environment's process. If the process has ended, no error is raised here, but `next`
        raises `Lost` after the last message."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def next(self, seconds: float) -> dict[str, Any] | None:
        """Returns the next message from the environment's process; None if no message arrives within `seconds`.

        Raises:
          Lost: the process has ended.
        """
        try:
            message = self._messages.get(seconds > 0, seconds if seconds > 0 else None)
        except queue.Empty:
            return None
        if message is None:
            self._messages.put(None)
            raise Lost(self._why())
        return message

    def end(self, seconds: float) -> bool:
        """Closes the standard input of the environment's process, so that the process ends. Returns whether it has
        ended within `seconds`."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        self._release()
        return True

    def kill(self) -> None:
        """Kills the environment's process and waits for its end."""
        self._process.kill()
        self._process.wait()
        self._release()

    def _release(self) -> None:
        """Closes the pipes and the error file of the environment's process after it has ended."""
        # Waits with a limit, because a child of the process can keep its output open.
        self._reader.join(_SECONDS_TO_READ)
        files = [self._process.stdin, self._errors, *([] if self._reader.is_alive() else [self._process.stdout])]
        for file in files:
            assert file is not None
            with contextlib.suppress(OSError):
                file.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            for line in self._process.stdout:
                self._messages.put(json.loads(line))
        self._messages.put(None)

    def _why(self) -> str:
        status = self._process.wait()
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _SHOWN))
        said = self._errors.read().decode(errors="replace").strip()
        return f"its process has ended with status {status}" + (f": {said}" if said else "")
