"""What keeps numbers honest: updates that are no numbers are skipped, told and kept for a second look, and a sampler
that computes other probabilities than the trainer is found at the start.

It knows the metrics of an update and the arrays it was made from; what to do about them is the user's business.
"""

from __future__ import annotations

import json
import logging
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from tunix_like.errors import UserError
from tunix_like.rollout.rollouts import cut_steps
from tunix_like.types import GroupBatch

logger = logging.getLogger("tunix_like")

FOLDER = "skipped"
"""In a run's folder: one file for each skipped update."""


class SkipWatch:
    """Called with the metrics of each step's updates: warns of skipped ones, and stops when too many follow each other.

    Args:
      what: whose numbers they are, for messages.
      most: so many in a row are too many.

    Raises:
      UserError: `most` updates in a row were skipped.
    """

    def __init__(self, what: str, most: int):
        self.what, self.most, self.in_a_row = what, most, 0

    def __call__(self, updates: Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the numbers of the skipped ones."""
        skipped = [number for number, row in enumerate(updates) if row["update/skipped"]]
        if skipped:
            message = "%d of %d updates of this step skipped: %s or its gradient is not finite"
            logger.warning(message, len(skipped), len(updates), self.what)
        for number in range(len(updates)):
            self.in_a_row = self.in_a_row + 1 if number in skipped else 0
        return skipped

    def check(self) -> None:
        """Apart from the call, so that what was skipped can be kept before the run stops."""
        if self.in_a_row >= self.most:
            raise UserError(
                f"{self.what} or its gradient was not finite in {self.in_a_row} updates in a row "
                "(training.max_skipped_updates); the weights are as they were before them. Lower the learning rate, or "
                "look at the loss."
            )


class GapWatch:
    """Called with the metrics of each step's updates until one of them has tokens: how far the sampler's
    log-probabilities are from the trainer's.

    Raises:
      UserError: further than `most` nats a token, on average.
    """

    def __init__(self, most: float | None):
        self.most = most

    def __call__(self, updates: Sequence[Mapping[str, Any]]) -> None:
        if self.most is None or "logprob_gap/mean" not in updates[0]:
            return
        gap = float(updates[0]["logprob_gap/mean"])
        if not np.isfinite(gap):  # no completion went through the model, or the update is skipped
            return
        if gap > self.most:
            raise UserError(
                f"sampler and trainer disagree: their log-probabilities of the same tokens differ by {gap:.3g} nats a "
                f"token on average, {float(updates[0]['logprob_gap/max']):.3g} at most (training.max_logprob_gap: "
                f"{self.most:g}). Nothing is saved. Try model.attention=plain, then model.dtype=float32, to see which "
                "of them it is."
            )
        self.most = None


class Skipped(NamedTuple):
    """A skipped update, all but the weights. `live` are the completions that go through the model, of the groups
    `in_update`."""

    step: int
    update: int
    batch: GroupBatch
    live: Bool[np.ndarray, "P G"]
    in_update: Bool[np.ndarray, "P"]
    old_logprobs: Float[np.ndarray, "P G T"] | None
    ref_logprobs: Float[np.ndarray, "P G T"] | None


def keep(folder: Path, skipped: Skipped) -> Path:
    """Writes all that an update was made from, but for the weights, to `folder/step_<n>_update_<m>.npz`. Raises
    OSError where it cannot, and leaves no half file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"step_{skipped.step:06d}_update_{skipped.update}.npz"
    arrays = {f"batch/{name}": value for name, value in skipped.batch._asdict().items()}
    arrays |= {name: getattr(skipped, name) for name in ("live", "in_update", "old_logprobs", "ref_logprobs")}
    numbers = json.dumps({"step": skipped.step, "update": skipped.update})
    try:
        np.savez(file, numbers=numbers, **{name: value for name, value in arrays.items() if value is not None})
    except OSError:
        file.unlink(missing_ok=True)
        raise
    return file


def guard(
    rows: Sequence[Mapping[str, Any]],
    updates: Sequence[Skipped],
    skip_watch: SkipWatch,
    gap_watch: GapWatch,
    folder: Path | None,
) -> None:
    """Writes the inputs of skipped updates to a run folder (None: nowhere), then stops the run where its numbers are
    wrong.

    Args:
      rows: metrics of each update of a step.
      updates: their inputs.

    Raises:
      UserError: what the two watches raise.
    """
    for number in skip_watch(rows):
        if folder is None:
            continue
        try:
            file = keep(folder / FOLDER, updates[number])
            logger.warning("what the skipped update was made from is kept: tunix-like replay %s", file)
        except OSError as error:
            logger.warning("what the skipped update was made from cannot be written: %s", error)
    skip_watch.check()
    gap_watch(rows)


def cut_run(folder: Path, step: int) -> None:
    """Removes the completions and the skipped updates of steps after `step` from a run folder."""
    cut_steps(folder / "rollouts", step)
    cut_steps(folder / FOLDER, step)


def read(file: Path) -> Skipped:
    """What `keep` wrote. Raises UserError where the file is something else."""
    try:
        with np.load(file, allow_pickle=False) as held:
            arrays = {name: held[name] for name in held.files}
        numbers = json.loads(str(arrays.pop("numbers")))
        batch = GroupBatch(**{name: arrays.get(f"batch/{name}") for name in GroupBatch._fields})
        masks, logprobs = (arrays["live"], arrays["in_update"]), map(arrays.get, ("old_logprobs", "ref_logprobs"))
        return Skipped(numbers["step"], numbers["update"], batch, *masks, *logprobs)
    except (OSError, EOFError, zipfile.BadZipFile, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: not a skipped update ({error}); give a file of RUN/{FOLDER}.") from None
