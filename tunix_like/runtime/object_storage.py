"""Reads and writes models, data and runs in object storage: `gs://bucket/path` and `s3://bucket/path`, through fsspec.

Objects are copied to a local folder before they are read. Credentials are those of the clients: the application default
credentials of Google Cloud, or the variables and files of AWS (`AWS_ENDPOINT_URL` for other S3 services).
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from filelock import FileLock

from tunix_like.errors import UserError, one_line
from tunix_like.runtime import progress
from tunix_like.runtime.input_files import path_below

_EXTRAS = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}
"""Maps the beginning of an address to the package that reads it and the extra that installs the package."""


def is_remote(path: Any, key: str = "") -> bool:
    """Whether `path`, the value of the config key `key`, is an address in object storage. Raises UserError for other
    and incomplete addresses, which would become folders of this machine; so does a `Path`, which has lost a slash."""
    if not isinstance(path, str | os.PathLike):
        return False
    scheme, colon, rest = str(path).partition(":")
    if scheme in _EXTRAS and rest.startswith("//") and rest[2:3] not in ("", "/"):
        return True
    if colon and (rest.startswith("//") or scheme.lower() in (*_EXTRAS, "hf")):
        raise UserError(
            f"{f'{key}: ' if key else ''}{path}: addresses of files and folders begin with gs://BUCKET or s3://BUCKET "
            "(in Python texts, no Path)."
        )
    return False


def local_copy(url: str, key: str, patterns: Sequence[str] = ("*",)) -> Path:
    """Returns the local copy of a folder in object storage, or of a single object. It is downloaded if there is none
    with the same versions of all objects.

    Copies are in `$TUNIX_LIKE_CACHE`, by default `~/.cache/tunix_like`; those of earlier versions stay there.

    Args:
      key: the config key with the address, for the error messages.
      patterns: which files of a folder are copied, by their names or their paths in the folder.

    Raises:
      UserError: the address cannot be read, or nothing is there.
    """
    system, root = opened(url, key)
    objects = _chosen(url, key, patterns)
    single = root in objects
    versions = sorted((path, str(system.ukey(path))) for path in objects)
    digest = hashlib.sha256(json.dumps([url, versions]).encode()).hexdigest()[:24]
    cache = cache_folder()
    folder = cache / digest
    part = cache / f"{digest}.part"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{digest}.lock"):  # processes of a host share the copy
            if not folder.is_dir():
                shutil.rmtree(part, ignore_errors=True)
                _download(system, root if not single else str(PurePosixPath(root).parent), objects, part, url)
                part.rename(folder)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{key}: {url} cannot be copied to {folder}: {one_line(error)}.") from error
    return folder / PurePosixPath(root).name if single else folder


def download(url: str, key: str, patterns: Sequence[str], folder: Path) -> None:
    """Copies the files of a folder in object storage that match `patterns` to the new folder `folder`; arguments and
    errors as in `local_copy`."""
    system, root = opened(url, key)
    try:
        _download(system, root, _chosen(url, key, patterns), folder, url)
    except UserError:
        raise
    except Exception as error:  # each client has its own exceptions
        raise UserError(f"{key}: {url} cannot be copied to {folder}: {one_line(error)}.") from error


def _chosen(url: str, key: str, patterns: Sequence[str]) -> dict[str, Any]:
    """Returns the object `url`, or the objects below it that match `patterns`."""
    system, root = opened(url, key)
    try:
        objects = find(system, root)
    except Exception as error:  # each client has its own exceptions
        raise UserError(f"{key}: {url} cannot be read: {one_line(error)}.") from error
    if root not in objects:
        objects = {path: info for path, info in objects.items() if _matches(path.removeprefix(f"{root}/"), patterns)}
    if not objects:
        raise UserError(f"{key}: {url}: there is no such object, and no folder with files of a kind that is needed.")
    return objects


def cache_folder() -> Path:
    return Path(os.environ.get("TUNIX_LIKE_CACHE", "~/.cache/tunix_like")).expanduser().absolute()


def cannot_cache(error: OSError) -> str:
    """Returns the sentence of an error message that the cache cannot be written."""
    return f"the cache {cache_folder()} cannot be written ({one_line(error)}); set TUNIX_LIKE_CACHE to another folder."


def find(system: Any, root: str) -> dict[str, Any]:
    """Returns the objects below `root` by their paths in the file system, as they are now, with `size`. Raises
    FileNotFoundError if there is no bucket."""
    system.invalidate_cache()
    try:
        found = system.find(root, detail=True)
    except FileNotFoundError as error:  # not raised for a folder without objects
        raise FileNotFoundError("the bucket does not exist") from error
    return {path: info for path, info in found.items() if info["type"] == "file"}


def names_below(url: str, key: str) -> set[str]:
    """Returns the paths of the objects in a folder in object storage. Raises UserError if they cannot be listed."""
    system, root = opened(url, key)
    try:
        return {path.removeprefix(f"{root}/") for path in find(system, root)}
    except Exception as error:
        raise UserError(f"{key}: {url} cannot be read: {one_line(error)}.") from error


def exists(url: str, key: str) -> bool:
    """Whether there is an object or a folder. Raises UserError if the storage does not say."""
    system, root = opened(url, key)
    try:
        return bool(system.exists(root))
    except Exception as error:
        raise UserError(f"{key}: {url} cannot be read: {one_line(error)}.") from error


def _matches(path: str, patterns: Sequence[str]) -> bool:
    names = path, PurePosixPath(path).name
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns for name in names)


def _download(system: Any, root: str, objects: dict[str, Any], part: Path, url: str) -> None:
    with progress.task(f"downloading {url} (MiB)", sum(info["size"] for info in objects.values()) >> 20) as advance:
        for path, info in objects.items():
            target = path_below(part, path.removeprefix(f"{root}/"), url)
            target.parent.mkdir(parents=True, exist_ok=True)
            system.get_file(path, str(target))
            if target.stat().st_size != info["size"]:
                raise OSError(f"{path} has {info['size']} bytes, and {target.stat().st_size} arrived")
            advance(info["size"] >> 20)


def upload_file(file: Path, url: str) -> None:
    """Writes one object. Raises UserError if it cannot be written."""
    system, path = opened(url, "the report")
    try:
        system.put_file(str(file), path)
    except Exception as error:
        raise UserError(f"{url} cannot be written: {one_line(error)}.") from error


def check_target(url: str, overwrite: bool) -> None:
    """Raises UserError if files cannot be written below an address, or are there already and `overwrite` is False."""
    if _existing(url) and not overwrite:
        raise UserError(
            f"{url} has objects: give another address, or --overwrite (overwrite=True in Python) to replace them."
        )


def upload(folder: Path, url: str, last: Sequence[str]) -> None:
    """Replaces the objects below an address by the files of a folder. Readers take the files `last` as the sign of a
    complete folder: these are deleted first and written last.

    Raises:
      UserError: an object cannot be written.
    """
    system, root = opened(url, "the export")
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    is_last = lambda name: PurePosixPath(name).name in last  # noqa: E731
    try:
        for old in sorted(_existing(url), key=is_last, reverse=True):
            system.rm_file(old)
        with progress.task(f"uploading {url} (MiB)", sum(file.stat().st_size for file in files) >> 20) as advance:
            for file in sorted(files, key=lambda file: is_last(file.name)):
                system.put_file(str(file), f"{root}/{file.relative_to(folder).as_posix()}")
                advance(file.stat().st_size >> 20)
    except Exception as error:
        raise UserError(f"{url} cannot be written: {one_line(error)}.") from error


def _existing(url: str) -> list[str]:
    system, root = opened(url, "the export")
    try:
        return list(find(system, root))
    except Exception as error:
        raise UserError(f"{url} cannot be written: {one_line(error)}.") from error


def opened(url: str, key: str) -> tuple[Any, str]:
    """Returns the file system of an address, and the path in it."""
    package, extra = _EXTRAS[url.partition("://")[0]]
    try:
        import fsspec

        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs tracebacks of what it raises
        system, root = fsspec.core.url_to_fs(url.rstrip("/"))
    except ImportError as error:
        why = one_line(error.__cause__ or error)  # fsspec raises an error of its own
        raise UserError(
            f"{key}: {url} needs the package {package} ({why}); run pip install 'tunix-like[{extra}]'."
        ) from None
    except Exception as error:
        raise UserError(f"{key}: {url} cannot be opened: {one_line(error)}.") from error
    return system, root
