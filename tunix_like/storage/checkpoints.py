"""Saves and restores checkpoints with orbax.

Orbax writes the arrays in the background and renames the finished folder. Its `CheckpointManager` is not used: it also
counts and deletes numbered folders that are half removed or no checkpoints, and after a write that failed it neither
lists nor removes the earlier checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import orbax.checkpoint as ocp

from tunix_like.errors import NotSaved, UserError
from tunix_like.runtime import trace
from tunix_like.runtime.processes import any_of, by_first, is_first
from tunix_like.storage import checkpoint_files

if TYPE_CHECKING:
    from tunix_like.storage.metrics import Best

logger = logging.getLogger("tunix_like")


# Orbax logs warnings about its own defaults through absl; they are not shown. Errors that a user can fix are raised as
# exceptions.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)


def _without_late_writes(unraisable: sys.UnraisableHookArgs) -> None:
    if unraisable.object is not None or str(unraisable.exc_value) != "Event loop is closed":
        _previous_hook(unraisable)


# When one write of a checkpoint fails (for example, because the disk is full), orbax raises its error and closes its
# event loop. The other writes then fail too, with a traceback each: asyncio logs errors that nobody retrieved, and the
# threads of tensorstore (which give no object) find the loop closed. `Checkpoints` has logged the first error.
logging.getLogger("asyncio").addFilter(lambda record: "orbax" not in record.getMessage())
_previous_hook = sys.unraisablehook
sys.unraisablehook = _without_late_writes


class Checkpoints:
    """The checkpoints of one run.

    A checkpoint contains arrays, the position in the data stream and a JSON dict, `meta`, in which the caller stores
    what identifies the run. It is written to a folder with a temporary name, SHA-256 checksums last. The folder is then
    renamed to the number of the step.

    Args:
      folder: folder of the checkpoints, created if it is opened for writing.
      max_to_keep: number of newest checkpoints to keep. None opens the folder for reading only: nothing is created or
        removed, so this is safe while another process writes.
      best: selects the best checkpoint, which is kept in addition, until a better one is complete and verified.
    """

    def __init__(self, folder: str | Path, max_to_keep: int | None = None, best: Best | None = None) -> None:
        self.folder = Path(folder).absolute()
        self._max_to_keep = max_to_keep
        self._best = best
        if max_to_keep is not None:
            by_first(lambda: checkpoint_files.prepare(self.folder))
        self._checkpointer = self._new_checkpointer()
        self._writer: threading.Thread | None = None
        self._step = -1
        self._failure: str | None = None

    def _new_checkpointer(self) -> ocp.AsyncCheckpointer:
        handler = ocp.CompositeCheckpointHandler(
            state=ocp.PyTreeCheckpointHandler(), meta=ocp.JsonCheckpointHandler(), iterator=ocp.JsonCheckpointHandler()
        )

        def write_checksums() -> None:  # in the first process, before the rename that completes the step
            (written,) = self._unfinished()
            checkpoint_files.write_checksums(written)

        options = ocp.options.AsyncOptions(post_finalization_callback=write_checksums)
        return ocp.AsyncCheckpointer(handler, async_options=options)

    def save(self, step: int, state: Any, iterator: Any = None, meta: Mapping[str, Any] | None = None) -> None:
        """Starts to write the checkpoint of a step in the background. Returns as soon as `state` can be changed or
        donated. The method `wait` waits until the checkpoint is written.

        If the checkpoint cannot be written (for example, because the disk is full), a warning is logged, its files are
        removed, and the earlier checkpoints are kept.

        Args:
          state: a pytree of arrays.
          iterator: a `data.stream.Resumable` whose position is saved, or None.

        Raises:
          ValueError: `step` is not above the latest step, or the folder was opened for reading.
          TypeError: `meta` is not JSON-serialisable.
        """
        if self._max_to_keep is None:
            raise ValueError(f"{self.folder} was opened for reading; give max_to_keep to write")
        latest = self.latest_step()
        if latest is not None and step <= latest:
            raise ValueError(f"step {step} is not above the latest checkpoint, {latest}, in {self.folder}")
        items = {"state": ocp.args.PyTreeSave(state), "meta": ocp.args.JsonSave(json.loads(json.dumps(meta or {})))}
        if iterator is not None:
            items["iterator"] = ocp.args.JsonSave(iterator.get_state())
        if self._failure is not None:  # the old checkpointer may raise the earlier error again
            self._checkpointer = self._new_checkpointer()
        self._step = step
        self._failure = None
        try:
            self._checkpointer.save(self.folder / str(step), args=ocp.args.Composite(**items))
        except OSError as error:
            self._give_up(error)
            return
        self._writer = threading.Thread(target=self._finish, name=f"checkpoint {step}")
        self._writer.start()

    def _finish(self) -> None:
        """Waits in a background thread until the checkpoint is written, then removes old checkpoints. If the new
        checkpoint has the best evaluation metric, it is verified before the previous best checkpoint is removed."""
        with trace.span(f"checkpoint {self._step}", "checkpoints"):
            try:
                self._checkpointer.wait_until_finished()
            except Exception as error:  # orbax and tensorstore raise many types of exceptions
                self._give_up(error)
            else:
                if is_first():
                    assert self._max_to_keep is not None
                    steps = checkpoint_files.complete_steps(self.folder)
                    best = None if self._best is None else self._best.among(steps)
                    if best == self._step and (damage := checkpoint_files.damage(self.folder / str(best))) is not None:
                        self._failure = self._set_aside(self.folder / str(best), damage)
                        logger.warning("%s", self._failure)
                        return
                    for step in steps[: -self._max_to_keep]:
                        if step != best:
                            checkpoint_files.remove(self.folder / str(step))

    def _unfinished(self) -> list[Path]:
        """Returns the temporary folders of the checkpoint that is being written. Does not use `glob`, because Python
        caches its patterns, which differ at every step."""
        begin = f"{self._step}.orbax-checkpoint-tmp"
        return [path for path in self.folder.iterdir() if path.name.startswith(begin)]

    def _give_up(self, error: Exception) -> None:
        self._failure = (
            f"{self.folder}: the checkpoint of step {self._step} could not be written ({_short(error)}). Is the "
            "disk full or the folder not writable? The checkpoints before it are kept."
        )
        logger.warning("%s", self._failure)
        if is_first():
            with contextlib.suppress(OSError):  # the folder itself may be unreadable
                for path in self._unfinished():
                    checkpoint_files.clear(path)

    def _settle(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    @property
    def idle(self) -> bool:
        """Whether no save is running in this process."""
        return self._writer is None or not self._writer.is_alive()

    def steps(self) -> list[int]:
        """Waits for a running save, and returns the step numbers of all complete checkpoints, ascending."""
        self._settle()
        # The first process lists the steps, because other processes may see a new step later.
        return list(by_first(lambda: checkpoint_files.complete_steps(self.folder)))

    def latest_step(self) -> int | None:
        steps = self.steps()
        return steps[-1] if steps else None

    def meta(self, step: int) -> dict[str, Any]:
        """Returns the dict `meta` of a checkpoint."""
        return self._read(step, meta=ocp.args.JsonRestore())["meta"]

    def restore(self, step: int, abstract_state: Any, iterator: Any = None) -> tuple[Any, dict[str, Any]]:
        """Returns the state and the `meta` dict in the checkpoint of a step, and sets `iterator` to the saved position.

        Args:
          abstract_state: a tree of arrays or `jax.ShapeDtypeStruct`s with the structure of the state. An array is
            restored with the `sharding` of its leaf in this tree, or on the first device if the leaf has none.
            Top-level keys of the saved state that are missing in this tree are not read.
          iterator: a new iterator over the same data, or None to ignore the saved position.

        Raises:
          UserError: the checkpoint does not exist or is damaged, or its arrays differ from `abstract_state` in names,
            shapes or dtypes (orbax alone would cast dtypes silently).
        """
        target = jax.tree.map(_with_sharding, abstract_state)
        self._check_same(step, target)
        items = {
            "state": ocp.args.PyTreeRestore(
                target, restore_args=ocp.checkpoint_utils.construct_restore_args(target), partial_restore=True
            ),
            "meta": ocp.args.JsonRestore(),
        }
        if iterator is not None:
            if not (self.folder / str(step) / "iterator").is_dir():
                raise UserError(
                    f"{self.folder}/{step}: this checkpoint has no position in the data stream, so the data cannot be "
                    "resumed. Choose another step."
                )
            items["iterator"] = ocp.args.JsonRestore()
        restored = self._read(step, **items)
        if iterator is not None:
            iterator.set_state(restored["iterator"])
        return restored["state"], restored["meta"]

    def newest(self) -> int | None:
        """Returns the step of the newest checkpoint whose files match their checksums, or None if there are no
        checkpoints.

        For each damaged checkpoint, a warning is logged. If the folder was opened for writing, a damaged checkpoint is
        renamed to `<step>.damaged`, so that its step can be saved again.

        Raises:
          UserError: all checkpoints are damaged.
        """
        self._settle()
        step = by_first(self._find_undamaged)
        return None if step is None else int(step)

    def _find_undamaged(self) -> int | None:
        damaged: dict[Path, str] = {}
        for step in reversed(checkpoint_files.complete_steps(self.folder)):
            path = self.folder / str(step)
            damage = checkpoint_files.damage(path)
            if damage is None:
                for other, what in damaged.items():
                    logger.warning("%s", self._set_aside(other, what) + f"; step {step} is used instead")
                return step
            if not checkpoint_files.is_complete(path):  # the run that writes this folder has removed the step
                return self._find_undamaged()
            damaged[path] = damage
        if damaged:
            raise UserError(
                f"{self.folder}: every checkpoint is damaged ("
                + "; ".join(f"{path.name}: {what}" for path, what in damaged.items())
                + "). Restore a copy of one, or remove this folder to start over."
            )
        return None

    def _set_aside(self, step: Path, damage: str) -> str:
        """Renames a damaged checkpoint unless the folder is open for reading only. Returns a message."""
        message = f"{step}: this checkpoint is damaged: {damage}"
        if self._max_to_keep is None:
            return message
        target = step.with_name(f"{step.name}.damaged")
        count = 1
        while target.exists():
            count += 1
            target = step.with_name(f"{step.name}.damaged-{count}")
        step.rename(target)
        return f"{message}; it was renamed to {target.name}, which you can delete"

    def improves(self, row: Mapping[str, Any]) -> bool:
        """Adds the row of metrics of a step. Returns whether a checkpoint of this step would have the best value of the
        evaluation metric; False if the row lacks this metric, or if no best checkpoint is kept."""
        best = self._best
        if best is None or best.metric not in row:
            return False
        self._settle()

        def newest_is_best() -> bool:
            best.add([row])
            return best.among([*checkpoint_files.complete_steps(self.folder), row[best.step_key]]) == row[best.step_key]

        return bool(by_first(newest_is_best))

    def find_best(self, rows: Iterable[Mapping[str, Any]], verified: int) -> None:
        """Finds the best checkpoint of a resumed run from the rows of its `metrics.jsonl`. If it is damaged, it is
        renamed with a warning, and the next best one is used. The step `verified` is not verified again."""
        if self._best is not None:
            self._best.add(rows)
            by_first(lambda: self._confirm_best(verified))

    def _confirm_best(self, verified: int) -> None:
        best = self._best
        assert best is not None
        while (step := best.among(checkpoint_files.complete_steps(self.folder))) not in (None, verified):
            damage = checkpoint_files.damage(self.folder / str(step))
            if damage is None:
                return
            message = self._set_aside(self.folder / str(step), damage)
            left = best.among(checkpoint_files.complete_steps(self.folder))
            now = "no other has this metric" if left is None else f"the best is now {best.describe(left)}"
            logger.warning("%s. It was the best checkpoint by %s; %s", message, best.metric, now)

    def check(self, step: int) -> None:
        """Verifies the checksums of a checkpoint. Raises `UserError` if the checkpoint is damaged or does not exist."""
        self._require(step)
        damage = by_first(lambda: checkpoint_files.damage(self.folder / str(step)))
        if damage is not None:
            others = [other for other in self.steps() if other != step]
            raise UserError(
                f"{self.folder}/{step}: this checkpoint is damaged: {damage}. Restore a copy of it, or use another "
                f"step; there are: {others or 'none'}."
            )

    def wait(self) -> None:
        """Waits until the running save is complete on disk. Raises `NotSaved` if the checkpoint of the last save could
        not be written."""
        self._settle()
        if any_of(self._failure is not None):
            raise NotSaved(self._failure or f"{self.folder}: another process could not write step {self._step}.")

    def close(self) -> None:
        """Waits for the running save, then stops the threads of orbax. Raises no error if the save failed, because the
        failure has been logged."""
        self._settle()
        if self._failure is None:
            self._checkpointer.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require(self, step: int) -> None:
        steps = self.steps()
        if step not in steps:
            raise UserError(f"{self.folder}: no checkpoint of step {step}; there are: {steps or 'none'}.")

    def _read(self, step: int, **items: Any) -> Any:
        self._require(step)
        with self._reading(step):
            return self._checkpointer.restore(self.folder / str(step), args=ocp.args.Composite(**items))

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # orbax raises many types of exceptions; for the user, all mean a damaged step
            raise UserError(
                f"{self.folder}/{step}: this checkpoint cannot be read ({str(error)[:300]}). Remove this folder to use "
                "the previous step."
            ) from error

    def _check_same(self, step: int, target: Any) -> None:
        self._require(step)
        with self._reading(step):
            stored = _described(self._checkpointer.metadata(self.folder / str(step)).item_metadata["state"].tree)
        expected = _described(target)
        if isinstance(target, Mapping):
            stored = {path: what for path, what in stored.items() if path.split("/")[0] in map(str, target)}
        wrong = [
            f"{path}: stored {stored.get(path, 'nothing')}, expected {expected.get(path, 'nothing')}"
            for path in sorted({*expected, *stored})
            if expected.get(path) != stored.get(path)
        ]
        if wrong:
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise UserError(
                f"{self.folder}/{step}: this checkpoint is of another model or optimizer: {'; '.join(wrong[:5])}{more}."
                " Use the configuration of that run, or another folder."
            )


def _with_sharding(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _described(tree: Any) -> dict[str, str]:
    """Maps the path of every array, as orbax writes it, to the text `dtype[shape]`."""
    result = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.ShapeDtypeStruct) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)  # random keys are stored as their key data
        names = [str(getattr(part, "key", getattr(part, "idx", getattr(part, "name", "")))) for part in path]
        result["/".join(names)] = f"{leaf.dtype}{list(leaf.shape)}"
    return result


def _short(error: Exception) -> str:
    """Shortens a message of tensorstore, which begins with the operation and ends with the cause."""
    text = str(error)
    return text if len(text) < 400 else f"{text[:150]} ... {text[-250:]}"
