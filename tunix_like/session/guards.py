"""Detects non-finite updates, and differences between the log-probabilities of sampler and trainer.

The inputs of skipped updates are saved for `tunix-like replay`.
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

from tunix_like.errors import SamplerDrifted, UserError
from tunix_like.rollout.files import remove_steps_after
from tunix_like.types import GroupBatch

logger = logging.getLogger("tunix_like")

FOLDER = "skipped"
"""Subfolder of a run folder with one file per skipped update."""


class SkipWatch:
    """Warns of skipped (non-finite) updates, and raises if too many consecutive updates are skipped.

    Args:
      loss: name of the loss, for warnings and error messages.
      most: `check` raises UserError after this many consecutive skipped updates.
    """

    def __init__(self, loss: str, most: int):
        self.loss = loss
        self.most = most
        self.in_a_row = 0

    def __call__(self, updates: Sequence[Mapping[str, Any]]) -> list[int]:
        """Warns of skipped updates of a step, and returns their indices. `updates` has the metrics of each update."""
        skipped = [number for number, row in enumerate(updates) if row["update/skipped"]]
        if skipped:
            message = "%d of %d updates of this step skipped: %s or its gradient is not finite"
            logger.warning(message, len(skipped), len(updates), self.loss)
        for number in range(len(updates)):
            self.in_a_row = self.in_a_row + 1 if number in skipped else 0
        return skipped

    def check(self) -> None:
        """Raises UserError if too many consecutive updates were skipped (after their inputs could be saved)."""
        if self.in_a_row >= self.most:
            raise UserError(
                f"{self.loss} or its gradient was not finite in {self.in_a_row} consecutive updates "
                "(training.max_skipped_updates); the weights are those before these updates. Lower the learning rate, "
                "or check the loss."
            )


class GapWatch:
    """Compares the sampler's log-probabilities with the trainer's in every update that has completions and is not
    skipped.

    If the difference is too large in the first step that has such an update, the call raises UserError. The first step
    shows that both compute the same, so a later difference is a drift of numerics or old weights. It is a warning, once
    for each time that the difference rises above the limit, and with `stop_later` an error of `check`.

    Args:
      most: largest allowed mean absolute difference in an update, in nats per token; None disables the check.
      stop_later: whether later differences are errors.
      external_engine: whether another engine than the in-process sampler is used. The error message mentions it.
    """

    def __init__(self, most: float | None, stop_later: bool = False, external_engine: bool = False):
        self.most = most
        self.stop_later = stop_later
        self.external_engine = external_engine
        self.agreed = False
        self.above = False
        self.drift = ""

    def __call__(self, step: int, updates: Sequence[Mapping[str, Any]]) -> None:
        compared = [row for row in updates if np.isfinite(row.get("logprob_gap/mean", np.nan))]
        if self.most is None or not compared:
            return
        worst = max(compared, key=lambda row: float(row["logprob_gap/mean"]))
        gap = float(worst["logprob_gap/mean"])
        largest = float(worst["logprob_gap/max"])
        difference = (
            f"their log-probabilities of the same tokens differ by {gap:.3g} nats per token on average, {largest:.3g} "
            f"at most (training.max_logprob_gap: {self.most:g})"
        )
        if gap > self.most and not self.agreed:
            fix = "Set model.attention=plain, then model.dtype=float32, to find the cause."
            if self.external_engine:
                fix = (
                    "The engine must return log-probabilities under the weights in its argument `params`. If it cannot "
                    f"do this, set training_config.max_logprob_gap=None. If it does: {fix[0].lower()}{fix[1:]}"
                )
            raise UserError(f"sampler and trainer disagree: {difference}. Nothing is saved. {fix}")
        if gap > self.most and not self.above:
            self.drift = f"step {step}: sampler and trainer disagree: {difference}; they agreed in the first step"
            logger.warning(
                "%s. Check that the sampler gets the current weights, or set algorithm.sampler_is. The warning is "
                "repeated if the difference falls below the limit and rises again; see train/logprob_gap/mean",
                self.drift,
            )
        self.agreed = True
        self.above = gap > self.most

    def check(self) -> None:
        """Raises SamplerDrifted if later differences are errors and there was one. It is called between two steps, when
        the step with the difference is complete and can be saved."""
        if self.stop_later and self.drift:
            raise SamplerDrifted(
                f"{self.drift}. The run stops after this step, which its folder has as a checkpoint "
                "(training.later_logprob_gap=error). Check that the sampler gets the current weights. To resume in "
                "spite of it, raise training.max_logprob_gap."
            )


class SkippedUpdate(NamedTuple):
    """The inputs of a skipped update in host memory, without the weights.

    `live` marks the completions of the rollout batch that have a gradient. `in_update` marks the groups of the update.
    In the update, the model processes the completions of these groups that have a gradient.
    """

    step: int
    update: int
    batch: GroupBatch
    live: Bool[np.ndarray, "P G"]
    in_update: Bool[np.ndarray, "P"]
    old_logprobs: Float[np.ndarray, "P G T"] | None
    ref_logprobs: Float[np.ndarray, "P G T"] | None


def save_skipped(run: Path, skipped: SkippedUpdate) -> None:
    """Writes a skipped update to `skipped/step_<step>_update_<update>.npz` in a run folder. A failed write is a
    warning, and leaves no partial file."""
    file = run / FOLDER / f"step_{skipped.step:06d}_update_{skipped.update}.npz"
    arrays = {f"batch/{name}": value for name, value in skipped.batch._asdict().items()}
    arrays |= {name: getattr(skipped, name) for name in ("live", "in_update", "old_logprobs", "ref_logprobs")}
    numbers = json.dumps({"step": skipped.step, "update": skipped.update})
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(file, numbers=numbers, **{name: value for name, value in arrays.items() if value is not None})
    except OSError as error:
        file.unlink(missing_ok=True)
        logger.warning("cannot write the inputs of the skipped update: %s", error)
    else:
        logger.warning("saved the inputs of the skipped update; inspect them with: tunix-like replay %s", file)


def remove_files_after(folder: Path, step: int) -> None:
    """Removes the completions and skipped updates of steps after `step` from a run folder."""
    remove_steps_after(folder / "rollouts", step)
    remove_steps_after(folder / FOLDER, step)


def read_skipped(file: Path) -> SkippedUpdate:
    """Reads the inputs of a skipped update from a file of the run folder. Raises UserError if the file cannot be read
    or has another format."""
    try:
        with np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        numbers = json.loads(str(arrays.pop("numbers")))
        batch = GroupBatch(**{name: arrays.get(f"batch/{name}") for name in GroupBatch._fields})
        logprobs = map(arrays.get, ("old_logprobs", "ref_logprobs"))
        return SkippedUpdate(numbers["step"], numbers["update"], batch, arrays["live"], arrays["in_update"], *logprobs)
    except (OSError, EOFError, zipfile.BadZipFile, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: not a skipped update ({error}); give a file of RUN/{FOLDER}.") from None
