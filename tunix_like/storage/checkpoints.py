"""Numbered steps in a folder: arrays, the data stream's place and a JSON dict, written together or not at all.

Knows orbax and its traps. Does NOT know what the arrays mean, when to save, or which run the folder belongs to (say
that in `meta`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import orbax.checkpoint as ocp

from tunix_like.errors import NotSaved, UserError
from tunix_like.runtime.processes import any_of, by_first, is_first
from tunix_like.storage import checkpoint_files, checksums

if TYPE_CHECKING:
    from tunix_like.storage.best import Best

logger = logging.getLogger("tunix_like")


def _not_chatter(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


# Orbax warns about its own defaults through absl. What a user can act on arrives as an exception.
logging.getLogger("absl").addFilter(_not_chatter)


class Checkpoints:
    """The checkpoints of one run.

    A step is written under another name, its SHA-256 checksums last, and gets its number in one move: what has a number
    was written to its end.

    Args:
      folder: where the numbered steps live. A writer makes it.
      max_to_keep: how many of the newest steps to keep. None opens for reading only: nothing is made or removed, so
        it is safe beside a running writer.
      best: the step that it calls the best is kept too, however old, until a better one is whole and was read back.
    """

    def __init__(self, folder: str | Path, max_to_keep: int | None = None, best: Best | None = None) -> None:
        self.folder = Path(folder).absolute()
        self._max_to_keep, self._best = max_to_keep, best
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
        # Called in the first process when all files are there, before the move that makes them count.
        options = ocp.options.AsyncOptions(post_finalization_callback=self._write_checksums)
        return ocp.AsyncCheckpointer(handler, async_options=options)

    def save(self, step: int, state: Any, iterator: Any = None, meta: Mapping[str, Any] | None = None) -> None:
        """Starts writing a step and returns once `state` may be changed or donated; `wait` for the end.

        Where it cannot be written (a full disk), a warning says so, what there is of it is removed, and the steps
        before it are kept.

        Args:
          step: its number, above every number saved so far.
          state: a pytree of arrays.
          iterator: a `data.stream.Resumable` whose place is saved, or None.
          meta: what `json` can write.

        Raises:
          ValueError: `step` is not above the latest, or the folder was opened for reading.
          TypeError: `meta` holds what JSON cannot.
        """
        if self._max_to_keep is None:
            raise ValueError(f"{self.folder} was opened for reading; give max_to_keep to write")
        latest = self.latest_step()
        if latest is not None and step <= latest:
            raise ValueError(f"step {step} is not above the latest checkpoint, {latest}, in {self.folder}")
        items = {"state": ocp.args.PyTreeSave(state), "meta": ocp.args.JsonSave(json.loads(json.dumps(meta or {})))}
        if iterator is not None:
            items["iterator"] = ocp.args.JsonSave(iterator.get_state())
        if self._failure is not None:  # one that failed may raise what is left of its error at any later call
            self._checkpointer = self._new_checkpointer()
        self._step, self._failure = step, None
        try:
            self._checkpointer.save(self.folder / str(step), args=ocp.args.Composite(**items))
        except OSError as error:
            self._give_up(error)
            return
        self._writer = threading.Thread(target=self._finish, name=f"checkpoint {step}")
        self._writer.start()

    def _finish(self) -> None:
        """In the background: waits until the step is there, then removes those that are too many. A new best step is
        read back before, as the old one may be among them."""
        try:
            self._checkpointer.wait_until_finished()
        except Exception as error:  # orbax and tensorstore raise many kinds
            self._give_up(error)
        else:
            if is_first():
                assert self._max_to_keep is not None
                steps = checkpoint_files.whole_steps(self.folder)
                best = None if self._best is None else self._best.among(steps)
                if best == self._step and (damage := checkpoint_files.damage(self.folder / str(best))) is not None:
                    self._failure = self._set_aside(self.folder / str(best), damage)
                    logger.warning("%s", self._failure)
                    return
                for step in steps[: -self._max_to_keep]:
                    if step != best:
                        checkpoint_files.remove(self.folder / str(step))

    def _write_checksums(self) -> None:
        (written,) = self._unfinished()
        checksums.write(written)

    def _unfinished(self) -> list[Path]:
        """The folders of a step that is being written. Without a glob: a pattern for each step would stay in caches."""
        begin = f"{self._step}.orbax-checkpoint-tmp"
        return [path for path in self.folder.iterdir() if path.name.startswith(begin)]

    def _give_up(self, error: Exception) -> None:
        self._failure = (
            f"{self.folder}: the checkpoint of step {self._step} could not be written ({_short(error)}). Is the "
            "disk full or the folder not writable? The checkpoints before it are kept."
        )
        logger.warning("%s", self._failure)
        if is_first():
            with contextlib.suppress(OSError):  # the folder may be what cannot be read
                for path in self._unfinished():
                    checkpoint_files.clear(path)

    def _settle(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def steps(self) -> list[int]:
        """The numbers of all whole steps, ascending; a save under way is waited for."""
        self._settle()
        # Another process may see them a moment later than the first.
        return list(by_first(lambda: checkpoint_files.whole_steps(self.folder)))

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

    def newest(self) -> int | None:
        """The newest step whose files are as they were written; None where there is no step.

        A damaged one is warned of, and a writer sets it aside: it is renamed `<step>.damaged`, so that this step can be
        saved again.

        Raises:
          UserError: there are steps, and all are damaged.
        """
        self._settle()
        found = by_first(self._find_undamaged)
        return None if found is None else int(found)

    def _find_undamaged(self) -> int | None:
        damaged: dict[Path, str] = {}
        for step in reversed(checkpoint_files.whole_steps(self.folder)):
            path = self.folder / str(step)
            damage = checkpoint_files.damage(path)
            if damage is None:
                for other, what in damaged.items():
                    logger.warning("%s", self._set_aside(other, what) + f"; step {step} is used instead")
                return step
            if not checkpoint_files.is_whole(path):  # removed meanwhile by the run that writes here
                return self._find_undamaged()
            damaged[path] = damage
        if damaged:
            raise UserError(
                f"{self.folder}: every checkpoint is damaged ("
                + "; ".join(f"{path.name}: {what}" for path, what in damaged.items())
                + "). Put back a copy of one, or remove this folder to start over."
            )
        return None

    def _set_aside(self, step: Path, damage: str) -> str:
        said = f"{step}: this checkpoint is damaged: {damage}"
        if self._max_to_keep is None:
            return said
        place = step.with_name(f"{step.name}.damaged")
        count = 1
        while place.exists():
            count += 1
            place = step.with_name(f"{step.name}.damaged-{count}")
        step.rename(place)
        return f"{said}; it is now {place.name}, remove it when you have no use for it"

    def improves(self, row: Mapping[str, Any]) -> bool:
        """Takes note of a row of metrics; whether its step, once saved, is the best (if one is to be kept)."""
        best = self._best
        if best is None or best.metric not in row:
            return False
        self._settle()

        def newest_is_best() -> bool:
            best.learn([row])
            return best.among([*checkpoint_files.whole_steps(self.folder), row[best.step_key]]) == row[best.step_key]

        return bool(by_first(newest_is_best))

    def take_up(self, rows: Iterable[Mapping[str, Any]], sound: int) -> None:
        """Learns from the rows of a run which of its steps is best. One that is damaged is warned of and set aside.

        Args:
          sound: a step that need not be compared with its checksums, because it has been.
        """
        if self._best is not None:
            self._best.learn(rows)
            by_first(lambda: self._confirm_best(sound))

    def _confirm_best(self, sound: int) -> None:
        best = self._best
        assert best is not None
        while (step := best.among(checkpoint_files.whole_steps(self.folder))) not in (None, sound):
            damage = checkpoint_files.damage(self.folder / str(step))
            if damage is None:
                return
            said = self._set_aside(self.folder / str(step), damage)
            left = best.among(checkpoint_files.whole_steps(self.folder))
            logger.warning(
                "%s. It was the best by %s; now %s", said, best.metric, "none is" if left is None else best.said(left)
            )

    def check(self, step: int) -> None:
        """Compares a step with its checksums. Raises `UserError`, naming the file, where it is damaged or absent."""
        self._require(step)
        damage = by_first(lambda: checkpoint_files.damage(self.folder / str(step)))
        if damage is not None:
            others = [other for other in self.steps() if other != step]
            raise UserError(
                f"{self.folder}/{step}: this checkpoint is damaged: {damage}. Put back a copy of it, or take another "
                f"step; there are: {others or 'none'}."
            )

    def wait(self) -> None:
        """Returns once the save under way is whole on disk. Raises `NotSaved` where it could not be written."""
        self._settle()
        if any_of(self._failure is not None):
            raise NotSaved(self._failure or f"{self.folder}: another process could not write step {self._step}.")

    def close(self) -> None:
        """Waits, then ends orbax's threads. What could not be written has been warned of."""
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
        except Exception as error:  # orbax raises many kinds; to the user all of them mean a damaged step
            raise UserError(
                f"{self.folder}/{step}: this checkpoint cannot be read ({str(error)[:300]}). Remove that folder to go "
                "back to the step before it."
            ) from error

    def _check_same(self, step: int, target: Any) -> None:
        self._require(step)
        with self._reading(step):
            stored = _described(self._checkpointer.metadata(self.folder / str(step)).item_metadata["state"].tree)
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


def _short(error: Exception) -> str:
    """Tensorstore begins with what it was about, and ends with what was wrong."""
    text = str(error)
    return text if len(text) < 400 else f"{text[:150]} ... {text[-250:]}"
