"""Checks whether an input file can be read and, if not, describes the problem."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
    b"\xfd7zXZ\x00": ("xz", "unxz"),
    b"BZh": ("bzip2", "bunzip2"),
    b"PK\x03\x04": ("zip", "unzip"),
}
"""Maps the first bytes of a compressed file to its format and its decompression program."""

_KINDS = {
    stat.S_IFDIR: "is a folder, not a file",
    stat.S_IFIFO: "is a named pipe (FIFO), which cannot be read twice; write its content to a file instead",
    stat.S_IFSOCK: "is a socket, not a file",
    stat.S_IFCHR: "is a device, not a file",
    stat.S_IFBLK: "is a device, not a file",
}


def file_problem(path: str | Path) -> str | None:
    """Returns why a file cannot be read, as the predicate of a sentence ("does not exist"); None if it can be read.

    A pipe is rejected without opening it, because opening a pipe waits for a writer.
    """
    path = Path(path)
    try:
        kind = stat.S_IFMT(os.stat(path).st_mode)
        if kind != stat.S_IFREG:
            return _KINDS.get(kind, "is not a regular file")
        with path.open("rb") as file:
            head = file.read(max(map(len, _COMPRESSED)))
    except (FileNotFoundError, NotADirectoryError):
        dangling = path.is_symlink()
        return f"is a symbolic link to {os.readlink(path)}, which does not exist" if dangling else "does not exist"
    except OSError as error:
        loop = error.errno == errno.ELOOP
        return "is a loop of symbolic links" if loop else f"cannot be read ({error.strerror})"
    except ValueError:  # a NUL character or a lone surrogate
        return "is not a valid file name"
    for magic, (name, program) in _COMPRESSED.items():
        if head.startswith(magic):
            return f"is compressed ({name}); decompress it with {program}"
    return None
