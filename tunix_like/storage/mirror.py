"""Keeps a run folder in object storage: the run works in a local copy, and a thread stores what it writes.

Objects are whole or absent, and a reader of the bucket finds a state that a run can leave when it is killed: files are
stored before the checkpoints that were complete before them, and the object that marks a checkpoint as complete comes
last and is removed first. So a resumed run, which cuts metrics and completions back to its checkpoint, finds all rows
that belong to it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from tunix_like.errors import NotSaved, UserError, one_line
from tunix_like.runtime import object_storage, progress
from tunix_like.runtime.atomic import replacing, write_atomically
from tunix_like.runtime.input_files import path_below
from tunix_like.runtime.object_storage import is_remote
from tunix_like.runtime.processes import all_or_none, by_first, is_first
from tunix_like.storage import bucket_lock, checkpoint_files
from tunix_like.storage.bucket_lock import BucketLock
from tunix_like.storage.output_folder import RUN_FILES

logger = logging.getLogger("tunix_like")

STATE = "mirror.json"
"""The file of a local copy with the tokens of the runs that used it, `owners`, and the time and size of each stored
file, `stored`. The copy is up to date if one of its owners was the last owner of the bucket's folder."""

SCAN_SECONDS = 2.0
"""Seconds between two looks for new checkpoints."""

FILES_SECONDS = 30.0
"""Seconds between two uploads of changed files while no checkpoint is written."""

GIVE_UP_SECONDS = 600.0
"""Seconds without a stored object after which a run that has ended does not try any longer."""

LONGEST_WAIT = 60.0
"""Maximum seconds between two attempts; the first is repeated after one second."""

_COPIES = 5
"""Attempts to copy a file while nothing writes to it."""

_GROUPS = ("checkpoints", "sft_checkpoints")
_LOCAL = ("run.lock", STATE, "engine_weights")  # beginnings of names at the top of the folder


def local_folder(place: str | Path) -> Path:
    """Returns the folder in which a run writes: `place`, or the local copy of an address in object storage."""
    if not is_remote(place):
        return Path(place)
    url = str(place).rstrip("/")
    digest = hashlib.sha256(url.encode()).hexdigest()[:8]
    return object_storage.cache_folder() / "runs" / f"{url.rpartition('/')[2]}-{digest}"


@contextlib.contextmanager
def mirrored(url: str, folder: Path) -> Iterator[Callable[[], None]]:
    """Takes the run folder `url`, brings `folder` up to date and stores what is written there. `folder` must be locked.
    At the end it waits until all is stored.

    Yields:
      a function for process 0 that raises UserError if another run has taken over the folder.

    Raises:
      UserError: another run owns the folder, it is no run folder, or it cannot be read or written; or the processes do
        not share `folder`.
      NotSaved: not all could be stored at the end.
    """
    mirrors: list[Mirror] = []
    by_first(lambda: mirrors.append(Mirror(url, folder)))
    mirror = mirrors[0] if mirrors else None

    def close() -> str | None:
        return None if mirror is None else mirror.close()

    try:
        _check_shared(url, folder)
        yield mirror.check if mirror is not None else lambda: None
    except BaseException as error:
        if type(error) is KeyboardInterrupt:  # outside the steps, or the second Ctrl-C: the process ends at once
            if mirror is not None:
                mirror.abandon()
        elif isinstance(error, SystemExit | KeyboardInterrupt):
            # A signal stops all processes. They wait for the first one, which would be ended if they left.
            failure = close() if type(error) is SystemExit else by_first(close)
            if failure is not None:
                unsaved = NotSaved(failure)
                unsaved.stopped = True
                raise unsaved from error
        elif (failure := close()) is not None:
            logger.warning("%s", failure)
        raise
    failure = by_first(close)
    if failure is not None:
        raise NotSaved(failure)


def _check_shared(url: str, folder: Path) -> None:
    """Raises UserError if a process does not see the copy of process 0."""
    state = folder / STATE
    token = by_first(lambda: _read_state(state)["owners"])

    def check() -> None:
        if not is_first() and _read_state(state)["owners"] != token:
            raise UserError(
                f"training.output_dir: {url} has a local copy, {folder}, which all processes of a run must share: set "
                "TUNIX_LIKE_CACHE to a folder on a file system of all hosts."
            )

    all_or_none(check)


def _read_state(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_bytes()))
    except (OSError, ValueError):
        return {"owners": [], "stored": {}}


class Mirror:
    """The copy `folder` of a run folder in object storage; see `mirrored`."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url.rstrip("/")
        self._folder = folder
        self._system, self._root = object_storage.opened(url, "training.output_dir")
        self._lock = BucketLock(self._url)
        self._state = folder / STATE
        self._stage = object_storage.cache_folder() / "uploads" / folder.name
        state = _read_state(self._state)
        self._files: dict[str, list[int]] = state["stored"]
        self._closing = threading.Event()
        self._abandoned = False
        self._lost = ""
        self._failure: str | None = None
        self._newest_object = time.monotonic()
        self._files_at = 0.0

        def before(current: bool) -> None:
            if current:  # before the lock: if this process dies in between, the copy still counts as up to date
                self._write_state([*state["owners"], self._lock.token])
            else:  # if this start fails, the next one must not take the old copy for that of this owner
                self._state.unlink(missing_ok=True)

        current = self._lock.acquire(state["owners"], before)
        try:
            self._checkpoints, self._broken = self._fetch(current)
            self._write_state([self._lock.token])
        except BaseException as error:
            self._lock.release()
            if isinstance(error, UserError) or not isinstance(error, Exception):
                raise
            raise UserError(
                f"training.output_dir: {self._url} cannot be copied to {folder}: {one_line(error)}."
            ) from error
        self._thread = threading.Thread(target=self._work, name="upload of the run folder", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises UserError if another run has taken over the folder."""
        if self._lost:
            raise UserError(self._lost)

    def close(self) -> str | None:
        """Waits until all is stored, and releases the lock. Returns why not all could be stored."""
        self._newest_object = time.monotonic()
        self._closing.set()
        with progress.task(f"uploading to {self._url}"):
            self._thread.join()
        self._lock.release()
        return self._lost or self._failure

    def abandon(self) -> None:
        """Lets the upload end without another attempt, and releases the lock."""
        self._abandoned = True
        self._closing.set()
        self._lock.release()

    def _write_state(self, owners: list[str]) -> None:
        write_atomically(self._state, json.dumps({"owners": owners, "stored": self._files}))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    # At the start: from the bucket to the local copy.

    def _fetch(self, current: bool) -> tuple[set[str], set[str]]:
        """Brings the local copy up to date; `current` says whether it already has all that is in the bucket. Returns
        the complete checkpoints of the bucket, as `checkpoints/10`, and the others, which a killed run left."""
        found = object_storage.find(self._system, self._root)
        sizes = {path.removeprefix(f"{self._root}/"): int(info["size"]) for path, info in found.items()}
        for name in sizes:
            path_below(self._folder, name, self._url)
        sizes = {name: size for name, size in sizes.items() if not name.startswith(f"{bucket_lock.FOLDER}/")}
        if sizes and not any(name.partition("/")[0] in (*RUN_FILES, "model") for name in sizes):
            raise UserError(f"{self._url} has objects and is not a run folder; choose another training.output_dir.")
        shutil.rmtree(self._stage, ignore_errors=True)
        if not current:
            self._files = {}
            for path in self._folder.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif not path.name.startswith("run.lock"):
                    path.unlink()
        complete, broken = checkpoints_among(sizes)
        present = {name for name in complete if checkpoint_files.is_complete(self._folder / name)}
        for name in complete - present:
            shutil.rmtree(self._folder / name, ignore_errors=True)
        wanted = [
            name
            for name in sizes
            if (checkpoint_of(name) or name) not in present | broken and not (self._folder / name).exists()
        ]
        wanted.sort(key=checkpoint_files.is_mark)  # the sort is stable
        if wanted:
            with progress.task(f"downloading {self._url} (MiB)", sum(sizes[name] for name in wanted) >> 20) as advance:

                def get(name: str) -> None:
                    self._get(name, sizes[name])
                    advance(sizes[name] >> 20)

                _each(get, [name for name in wanted if not checkpoint_files.is_mark(name)])
                _each(get, [name for name in wanted if checkpoint_files.is_mark(name)])
        return complete, broken

    def _get(self, name: str, size: int) -> None:
        target = self._folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as part:
            self._system.get_file(self._path(name), str(part))
            if part.stat().st_size != size:
                raise OSError(f"{name} has {size} bytes, and {part.stat().st_size} arrived")
        if _is_single(name):
            self._files[name] = _version(target)

    # During the run: from the local copy to the bucket.

    def _work(self) -> None:
        wait = 1.0
        failing = False
        while True:
            if self._abandoned:
                return
            closing = self._closing.is_set()  # what was written before is stored by this round
            try:
                self._round(closing)
            except UserError as error:  # of the lock
                self._lost = str(error)
                logger.warning("%s", self._lost)
                return
            except Exception as error:  # each client has its own exceptions
                cause = one_line(error)
                if closing and time.monotonic() - self._newest_object > GIVE_UP_SECONDS:
                    self._failure = (
                        f"{self._url}: the end of the run could not be stored ({cause}). It is in {self._folder}; the "
                        "same command on this host stores it."
                    )
                    return
                if not failing:
                    logger.warning("%s cannot be written (%s); this is tried again until it succeeds", self._url, cause)
                failing = True
                (time.sleep if closing else self._closing.wait)(wait)
                wait = min(2 * wait, LONGEST_WAIT)
                continue
            if failing:
                logger.warning("%s can be written again, and has all files", self._url)
            wait = 1.0
            failing = False
            if closing:
                return
            self._closing.wait(SCAN_SECONDS)

    def _round(self, closing: bool) -> None:
        """Stores the files, and the checkpoints that are complete now, the newest first. Checkpoints that appear
        meanwhile wait for the next round; one that is removed meanwhile is left out, so the run never waits."""
        steps = self._steps()
        missing = sorted(steps - self._checkpoints, key=_number, reverse=True)
        due = closing or time.monotonic() - self._files_at > FILES_SECONDS
        # Their upload failed, and the run has removed them since.
        stale = {f"{group}/{path.name}" for group in _GROUPS for path in self._stage.glob(f"{group}/*")} - steps
        if not (missing or due or stale):
            return
        self._lock.check()
        for name in stale:
            self._remove(name)
            shutil.rmtree(self._stage / name)
        changed = self._copy_files()
        # A run that resumes from an earlier checkpoint renames the damaged ones before it cuts its files back. So they
        # are removed if a copy is of a file that was cut.
        now = self._steps()
        for name in self._broken | {each for each in self._checkpoints if _is_abandoned(each, now)}:
            self._remove(name)
        self._store_files(changed)
        for name in missing:
            self._store_checkpoint(name)
        for name in self._checkpoints - steps:
            if any(name != other and _later(other, name) for other in self._checkpoints):
                self._remove(name)
        self._write_state([self._lock.token])

    def _steps(self) -> set[str]:
        """Returns the complete checkpoints of the local copy."""
        return {
            f"{group}/{step}" for group in _GROUPS for step in checkpoint_files.complete_steps(self._folder / group)
        }

    def _copy_files(self) -> dict[str, list[int] | None]:
        """Copies the changed files, to which the run may append during the upload. Returns the version of each; None
        if it was removed."""
        shutil.rmtree(self._stage / "files", ignore_errors=True)
        changed: dict[str, list[int] | None] = dict.fromkeys(self._files)
        for path in _files_of(self._folder):
            name = path.relative_to(self._folder).as_posix()
            try:
                version = _version(path)
                if self._files.get(name) == version:
                    del changed[name]
                    continue
                copy = self._stage / "files" / name
                copy.parent.mkdir(parents=True, exist_ok=True)
                for _ in range(_COPIES):
                    shutil.copyfile(path, copy)
                    if _version(path) == version:
                        break
                    version = _version(path)
                changed[name] = version
            except FileNotFoundError:  # removed meanwhile
                continue
        return changed

    def _store_files(self, changed: dict[str, list[int] | None]) -> None:
        def store(name: str) -> None:
            version = changed[name]
            if version is None:
                with contextlib.suppress(FileNotFoundError):
                    self._system.rm_file(self._path(name))
                del self._files[name]
            else:
                self._put(self._stage / "files" / name, name)
                self._files[name] = version

        _each(store, list(changed))
        self._files_at = time.monotonic()

    def _store_checkpoint(self, name: str) -> None:
        """Stores a checkpoint. Hard links keep its files if the run removes the checkpoint meanwhile. A further attempt
        stores only the objects that are missing."""
        source, stage = self._folder / name, self._stage / name
        if not stage.is_dir():
            if not checkpoint_files.is_complete(source):
                return
            part = stage.with_name(f"{stage.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            try:
                shutil.copytree(source, part, copy_function=_link)
            except (FileNotFoundError, shutil.Error):
                if checkpoint_files.is_complete(source):
                    raise
                return
            if not checkpoint_files.is_complete(source):  # removed meanwhile, and the copy may lack files
                shutil.rmtree(part)
                return
            part.rename(stage)
            self._remove(name)  # what an earlier process left
        files = [path for path in stage.rglob("*") if path.is_file()]

        def store(path: Path) -> None:
            self._put(path, f"{name}/{path.relative_to(stage).as_posix()}")
            if not checkpoint_files.is_mark(path.as_posix()):
                path.unlink()

        marks = [path for path in files if checkpoint_files.is_mark(path.as_posix())]
        _each(store, [path for path in files if path not in marks])
        self._lock.check()
        _each(store, marks)
        self._checkpoints.add(name)
        shutil.rmtree(stage)

    def _put(self, path: Path, name: str) -> None:
        self._system.put_file(str(path), self._path(name))
        self._newest_object = time.monotonic()

    def _remove(self, name: str) -> None:
        """Removes a checkpoint, first the object that marks it as complete."""
        self._checkpoints.discard(name)
        found = object_storage.find(self._system, self._path(name))
        for path in sorted(found, key=checkpoint_files.is_mark, reverse=True):
            self._system.rm_file(path)
        self._broken.discard(name)


def checkpoint_of(name: str) -> str | None:
    """Returns `checkpoints/10` for the name of one of its files, None for other files of a run folder."""
    parts = name.split("/")
    is_step = len(parts) > 2 and parts[0] in _GROUPS and checkpoint_files.step_of(parts[1]) is not None
    return "/".join(parts[:2]) if is_step else None


def checkpoints_among(names: Collection[str]) -> tuple[set[str], set[str]]:
    """Returns the complete checkpoints, as `checkpoints/10`, and the incomplete ones among the files of a run."""
    every = {step for name in names if (step := checkpoint_of(name)) is not None}
    complete = {step for step in every if all(f"{step}/{mark}" in names for mark in checkpoint_files.MARKS)}
    return complete, every - complete


def latest(steps: Iterable[str]) -> str | None:
    """Returns the newest of the checkpoints of RL, or else of SFT."""
    return max(steps, key=lambda step: (step.startswith(f"{_GROUPS[0]}/"), _number(step)), default=None)


def _number(name: str) -> int:
    return int(name.rpartition("/")[2])


def _later(a: str, b: str) -> bool:
    """Whether `a` is a later checkpoint of the same kind as `b`."""
    return a.partition("/")[0] == b.partition("/")[0] and _number(a) > _number(b)


def _is_abandoned(name: str, steps: set[str]) -> bool:
    """Whether a stored checkpoint is later than all local ones: it was damaged, and the run continues from an earlier
    one."""
    same = [each for each in steps if each.partition("/")[0] == name.partition("/")[0]]
    return bool(same) and all(_later(name, each) for each in same)


def _is_single(name: str) -> bool:
    """Whether a file of a run folder is stored by itself: all but checkpoints and those of this host."""
    top = name.partition("/")[0]
    return top not in _GROUPS and not top.startswith(_LOCAL) and not name.endswith((".tmp", ".part"))


def _files_of(folder: Path) -> Iterator[Path]:
    """Yields the files of a run folder that are stored one by one."""
    for top in folder.iterdir():
        if not _is_single(top.name) or top.is_symlink():
            continue
        for path in [top] if top.is_file() else top.rglob("*"):
            if _is_single(path.name) and path.is_file() and not path.is_symlink():
                yield path


def _version(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_mtime_ns, found.st_size]


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


def _each(work: Callable[[Any], None], items: list[Any]) -> None:
    """Calls `work` for all items in threads. Raises the first error after all have ended."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, item) for item in items]:
            future.result()
