"""Starts and controls, from the training process, the process of an environment of the package `verifiers`."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Mapping
from typing import Any

from tunix_like.errors import UserError
from tunix_like.workers.messages import Lost
from tunix_like.workers.process import Process, wait_for

SECONDS_TO_START = 300.0
"""Maximum seconds to load an environment. The limit is high, because an environment can load a data set."""

SECONDS_TO_END = 5.0
"""Time limit in seconds for the process of an environment to end, or to cancel an episode. A process that takes longer
is killed."""

_POLL_SECONDS = 0.5
_REST_SECONDS = 0.05  # the rest of a message that has arrived in part follows at once, unless the process is busy
_MOST = 1 << 36  # bytes; a message can hold all tasks of an environment


class VerifiersProcess(Process):
    """A process that runs an environment of the package `verifiers`.

    Args:
      settings: settings of the environment (see `program.load`).

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
        super().__init__("tunix_like.verifiers.program", settings, None, SECONDS_TO_END, _MOST)
        late = f"it was not loaded within {SECONDS_TO_START:g} s; set data.train_size if its tasks are not limited"
        try:
            self.first = self.next(SECONDS_TO_START) or {"kind": "unusable", "reason": late}
        except Lost as error:
            self.first = {"kind": "unusable", "reason": str(error)}
        if self.first["kind"] == "unusable":
            self.kill()
            reason = self.first["reason"].rstrip(".")
            raise UserError(f"data.path={settings['path']}: the environment cannot be used. {reason}.")

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message. If the process has ended, `next` raises `Lost` after the last message."""
        self.connection.send(json.dumps(message).encode())

    def next(self, seconds: float) -> dict[str, Any] | None:
        """Returns the next message; None if no message arrives within `seconds`. A message that has arrived in part is
        read to its end, so that one call does not read only as much as the socket holds.

        Raises:
          Lost: the process has ended.
        """
        limit = time.monotonic() + seconds
        while True:
            ended = self.ended  # read before the socket, so that the last message is not missed
            if (message := self.receive()) is not None:
                return message
            if ended is not None:
                raise Lost(f"its process {ended}.{self.last_output()}")
            if (left := limit - time.monotonic()) <= 0:
                if self.connection.has_part() and wait_for([self], _REST_SECONDS):
                    continue
                return None
            wait_for([self], min(left, _POLL_SECONDS))
