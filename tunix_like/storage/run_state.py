"""Reads the state of a run from its folder, while another process may write to it."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

from filelock import SoftFileLease

from tunix_like.runtime.input_files import read_object
from tunix_like.storage.checkpoint_files import complete_steps
from tunix_like.storage.run_lock import FILE as LOCK
from tunix_like.storage.run_lock import LEASE_SECONDS

State = Literal["running", "finished", "sft finished", "stopped", "started", "not started"]


class RunState(NamedTuple):
    """The state of a run, and its newest saved step.

    Attributes:
      state: `started`: there is no checkpoint yet; `sft finished`: there is none of RL; `not started`: there is no
        folder.
      over: the run ended before its last planned step, because its data or a callback ended it.
    """

    state: State
    step: int
    total: int | None
    over: bool = False
    of_sft: bool = False
    """Whether `step` and `total` are those of SFT, because there is no checkpoint of RL."""


def run_state(folder: Path) -> RunState:
    """Returns the state of a run from its newest complete checkpoint and its lock."""
    checkpoints = folder / "checkpoints"
    of_sft = not complete_steps(checkpoints)
    checkpoints = folder / "sft_checkpoints" if of_sft else checkpoints
    step = max(complete_steps(checkpoints), default=0)
    meta = dict[str, Any]()
    if step:
        meta = read_object(checkpoints / str(step) / "meta" / "metadata", "The checkpoint is damaged: remove it.")
    total = meta.get("total")
    over = bool(meta.get("over"))
    total = total if type(total) is int else None
    state: State = "stopped" if step else "started"
    if _is_owned(folder / LOCK):
        state = "running"
    elif over or (total is not None and step >= total):
        state = "sft finished" if of_sft else "finished"
    return RunState(state, step, total, over, of_sft and step > 0)


def _is_owned(lock: Path) -> bool:
    """Whether a process owns a run folder: it has touched the lock within the lease, and is alive if it is here."""
    try:
        age = time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        return False
    owner = SoftFileLease(lock).owner
    if owner is None or age > LEASE_SECONDS:
        return False
    if owner.hostname != socket.gethostname():
        return True
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
