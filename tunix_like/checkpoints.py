"""Numbered steps in a folder: arrays, the data stream's place and a JSON dict, written together or not at all.

Knows orbax, its traps, and how to tell a whole step from the remains of a killed process. Does NOT know what the arrays
mean, when to save, or which run the folder belongs to (say that in `meta`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from tunix_like.errors import UserError
from tunix_like.processes import by_first


def _not_chatter(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or "orbax" not in record.pathname


# Orbax warns about its own defaults through absl. What a user can act on arrives as an exception.
logging.getLogger("absl").addFilter(_not_chatter)


class Checkpoints:
    """The checkpoints of one run.

    Args:
      folder: where the numbered steps live. A writer makes it.
      max_to_keep: how many of the newest steps to keep. None opens for reading only: nothing is made or removed, so
        it is safe beside a running writer.
    """

    def __init__(self, folder: str | Path, max_to_keep: int | None = None) -> None:
        self.folder = Path(folder).absolute()
        self._writes = max_to_keep is not None
        if self._writes:
            by_first(lambda: _remove_remains(self.folder))
        options = ocp.CheckpointManagerOptions(
            read_only=not self._writes,
            preservation_policy=checkpoint_managers.LatestN(max_to_keep),
            save_root_metadata=False,
        )
        handlers = {
            "state": ocp.PyTreeCheckpointHandler(),
            "meta": ocp.JsonCheckpointHandler(),
            "iterator": ocp.JsonCheckpointHandler(),
        }
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

    def save(self, step: int, state: Any, iterator: Any = None, meta: Mapping[str, Any] | None = None) -> None:
        """Starts writing a step and returns once `state` may be changed or donated; `wait` for the end.

        Args:
          step: its number, above every number saved so far.
          state: a pytree of arrays.
          iterator: a `data.stream.Resumable` whose place is saved, or None.
          meta: what `json` can write.

        Raises:
          ValueError: `step` is not above the latest, or the folder was opened for reading.
          TypeError: `meta` holds what JSON cannot.
          UserError: this write, or the one before, failed (a full disk, no permission).
        """
        if not self._writes:
            raise ValueError(f"{self.folder} was opened for reading; give max_to_keep to write")
        latest = self.latest_step()
        if latest is not None and step <= latest:  # orbax would return False and write nothing
            raise ValueError(f"step {step} is not above the latest checkpoint, {latest}, in {self.folder}")
        items = {"state": ocp.args.PyTreeSave(state), "meta": ocp.args.JsonSave(json.loads(json.dumps(meta or {})))}
        if iterator is not None:
            items["iterator"] = ocp.args.JsonSave(iterator.get_state())
        with self._writing(OSError):
            self._manager.save(step, args=ocp.args.Composite(**items))

    def steps(self) -> list[int]:
        """The numbers of all whole steps, ascending; a save under way is waited for."""
        self.wait()
        return list(by_first(lambda: _whole_steps(self.folder)))  # another process may see them a moment later

    def latest_step(self) -> int | None:
        """The number of the newest whole step, or None."""
        steps = self.steps()
        return steps[-1] if steps else None

    def meta(self, step: int) -> dict[str, Any]:
        """The JSON dict of a step. Raises `UserError` where it is absent or cannot be read."""
        return self._read(step, meta=ocp.args.JsonRestore())["meta"]

    def restore(self, step: int, abstract_state: Any, iterator: Any = None) -> tuple[Any, dict[str, Any]]:
        """The state and the JSON dict of a step; `iterator` is moved to the place that was saved.

        Args:
          step: one of `steps()`.
          abstract_state: the tree to restore, of arrays or `jax.ShapeDtypeStruct`s. A leaf's `sharding` says where the
            array goes; without one it goes to the first device. Top-level keys that are not asked for are not read.
          iterator: a fresh iterator over the same data, or None to leave the saved place unread.

        Raises:
          UserError: the step is absent or damaged, or what it holds differs from `abstract_state` in names, shapes or
            dtypes (orbax alone would cast a dtype silently).
        """
        target = jax.tree.map(_placed, abstract_state)
        self._check_same(step, target)
        items = {
            "state": ocp.args.PyTreeRestore(
                target, restore_args=ocp.checkpoint_utils.construct_restore_args(target), partial_restore=True
            ),
            "meta": ocp.args.JsonRestore(),
        }
        if iterator is not None:
            if not (self.folder / str(step) / "iterator").is_dir():
                raise UserError(f"{self.folder}/{step}: holds no place in the data stream, so data cannot be resumed.")
            items["iterator"] = ocp.args.JsonRestore()
        restored = self._read(step, **items)
        if iterator is not None:
            iterator.set_state(restored["iterator"])
        return restored["state"], restored["meta"]

    def wait(self) -> None:
        """Returns once the save under way is whole on disk. Raises `UserError` if it failed."""
        with self._writing(Exception):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, then ends orbax's threads."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _writing(self, failure: type[Exception]) -> Iterator[None]:
        try:
            yield
        except failure as error:
            raise UserError(
                f"{self.folder}: writing a checkpoint failed ({error}). Is the disk full or the folder not writable? "
                "Earlier checkpoints are whole: start the run again once there is room."
            ) from error

    def _require(self, step: int) -> None:
        steps = self.steps()
        if step not in steps:
            raise UserError(f"{self.folder}: no checkpoint of step {step}; there are: {steps or 'none'}.")

    def _read(self, step: int, **items: Any) -> Any:
        self._require(step)
        with self._reading(step):
            return self._manager.restore(step, args=ocp.args.Composite(**items))

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # orbax raises many kinds; to the user all of them mean a damaged step
            raise UserError(
                f"{self.folder}/{step}: this checkpoint cannot be read ({str(error)[:300]}). Remove that folder to go "
                "back to the step before it."
            ) from error

    def _check_same(self, step: int, target: Any) -> None:
        self._require(step)
        with self._reading(step):
            stored = _described(self._manager.item_metadata(step)["state"].tree)
        asked = _described(target)
        if isinstance(target, Mapping):
            stored = {path: what for path, what in stored.items() if path.split("/")[0] in map(str, target)}
        wrong = [
            f"{path}: stored {stored.get(path, 'nothing')}, expected {asked.get(path, 'nothing')}"
            for path in sorted({*asked, *stored})
            if asked.get(path) != stored.get(path)
        ]
        if wrong:
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise UserError(
                f"{self.folder}/{step}: this checkpoint is of another model or optimizer: {'; '.join(wrong[:5])}{more}."
                " Use the configuration it was written with, or another folder."
            )


def _placed(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _described(tree: Any) -> dict[str, str]:
    """`path: dtype[shape]` of every array; a path spells dict keys, tuple places and field names as orbax does."""
    result = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.ShapeDtypeStruct) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)  # stored as what it is made of
        names = [str(getattr(part, "key", getattr(part, "idx", getattr(part, "name", "")))) for part in path]
        result["/".join(names)] = f"{leaf.dtype}{list(leaf.shape)}"
    return result


def _whole_steps(folder: Path) -> list[int]:
    """Orbax takes any numbered folder for a step; one whose removal was interrupted lacks its last-written files."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit() and _is_whole(path))


def _is_whole(step: Path) -> bool:
    return (step / "_CHECKPOINT_METADATA").is_file() and (step / "state" / "_METADATA").is_file()


def _remove_remains(folder: Path) -> None:
    """Removes what a killed writer left: temporary folders, and numbered ones that are not whole."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if ".orbax-checkpoint-tmp" in path.name or (path.name.isdigit() and not _is_whole(path)):
            shutil.rmtree(path)
