"""Locks a run folder in object storage, so that only one run at a time can write to it.

The lock is a sequence of objects `run.lock/<number>`. A run takes the folder by creating the next number, which the
storage does for one process only; the highest number owns the folder. Its run writes the object again every
`BEAT_SECONDS`. Another run takes over if the object does not change for `LEASE_SECONDS` of its own clock.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection
from pathlib import PurePosixPath

from tunix_like.errors import UserError, one_line
from tunix_like.runtime import object_storage

logger = logging.getLogger("tunix_like")

FOLDER = "run.lock"

BEAT_SECONDS = 20.0
"""Seconds between two writes of the lock by its owner. A second run in the same folder waits about this long until it
knows that the first is alive."""

LEASE_SECONDS = 180.0
"""Seconds without a write after which the owner counts as dead."""


@dataclasses.dataclass(frozen=True)
class Owner:
    """The content of a lock object. `beat` counts its writes."""

    token: str
    process: int
    host: str
    since: str
    beat: int = 0
    held: bool = True

    def __str__(self) -> str:
        return f"process {self.process} on {self.host} since {self.since}"


class BucketLock:
    """The lock of the run folder `url`.

    Attributes:
      token: identifies this run among all owners of the folder.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._system, root = object_storage.opened(url, "training.output_dir")
        self._root = f"{root}/{FOLDER}"
        self._number = -1
        self.token = secrets.token_hex(8)
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        self._own = Owner(self.token, os.getpid(), socket.gethostname(), since)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lock of the run folder", daemon=True)

    def acquire(self, gone: Collection[str], before: Callable[[bool], None] = lambda known: None) -> bool:
        """Takes the folder. Returns whether the owner before is one of `gone`, the tokens of runs that have ended;
        `before` is called with the same just before the lock is written.

        Raises:
          UserError: the owner is alive, or the lock cannot be written.
        """
        try:
            seen = None
            began = time.monotonic()
            while True:
                number, owner = self._newest()
                if owner is not None and owner.held and owner.token not in gone:
                    used = f"{self._url} is in use by {owner}"
                    if seen is not None and seen != (number, owner):
                        raise UserError(
                            f"{used}, which is alive. Wait for it, stop it, or choose another training.output_dir. If "
                            f"that process has exited, remove the objects in {self._url}/{FOLDER}."
                        )
                    if seen is None:
                        seen = number, owner
                        logger.warning("%s; checking for up to %g s whether it is alive", used, LEASE_SECONDS)
                    if time.monotonic() - began < LEASE_SECONDS:
                        time.sleep(min(1.0, BEAT_SECONDS / 5))
                        continue
                    logger.warning("%s: %s is gone; its lock is taken over", self._url, owner)
                known = owner is not None and owner.token in gone
                before(known)
                if self._create(number + 1):
                    self._thread.start()
                    return known
        except UserError:
            raise
        except Exception as error:  # each client has its own exceptions
            raise UserError(f"training.output_dir: {self._url} cannot be written: {one_line(error)}.") from error

    def _newest(self) -> tuple[int, Owner | None]:
        """Returns the highest number and the owner; -1 and None if nobody has owned the folder."""
        while True:
            numbers = self._numbers()
            if not numbers:
                return -1, None
            try:
                found = json.loads(self._system.cat_file(numbers[max(numbers)]))
            except FileNotFoundError:  # a new owner has removed it
                continue
            return max(numbers), Owner(**found)

    def _numbers(self) -> dict[int, str]:
        paths = object_storage.find(self._system, self._root)
        names = {path: PurePosixPath(path).name for path in paths}
        return {int(name): path for path, name in names.items() if re.fullmatch("[0-9]{6,18}", name)}

    def _create(self, number: int) -> bool:
        """Returns whether this run has created the object `number`, and then removes those of earlier owners."""
        path = self._path(number)
        failure = None
        try:
            self._system.pipe_file(path, self._content(), mode="create")
        except Exception as error:  # the object exists; or the answer was lost, and the object may be this run's
            failure = error
        number_now, owner = self._newest()
        if owner is None or number_now < number:
            assert failure is not None
            raise failure
        if (number_now, owner.token) != (number, self.token):
            return False
        self._number = number
        for older, old in self._numbers().items():
            if older < number:
                self._system.rm_file(old)
        return True

    def _path(self, number: int) -> str:
        return f"{self._root}/{number:06d}"

    def _content(self) -> bytes:
        return json.dumps(dataclasses.asdict(self._own)).encode()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            self._own = dataclasses.replace(self._own, beat=self._own.beat + 1)
            try:
                self._system.pipe_file(self._path(self._number), self._content())
            except Exception as error:  # the storage may answer again before the lease ends
                logger.debug("%s: the lock cannot be written: %s", self._url, one_line(error))

    def check(self) -> None:
        """Raises UserError if another run owns the folder; other exceptions if the storage does not answer."""
        number, owner = self._newest()
        if owner is not None and (number, owner.token) == (self._number, self.token):
            return
        how = "its lock was deleted" if owner is None else f"it was taken over by {owner}"
        raise UserError(
            f"{self._url} is no longer this process's run: {how}. Nothing more is written there; the same command "
            "resumes from the newest checkpoint."
        )

    def release(self) -> None:
        """Says in the lock that the run has ended; the storage may be unreachable or the lock another's, which changes
        nothing."""
        self._ended.set()
        self._thread.join(LEASE_SECONDS)  # it may wait for an answer
        try:
            self.check()
            self._own = dataclasses.replace(self._own, held=False)
            self._system.pipe_file(self._path(self._number), self._content())
        except Exception as error:
            logger.debug("%s: the lock is not released: %s", self._url, one_line(error))
