"""Tests standard output and standard error of a command when the reader ends, the terminal closes, or the disk
is full."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

from tests.process import ROOT
from tunix_like.runtime import output

GUARDED = """
import os, pathlib, signal, sys, time
from tunix_like.runtime import output
output.guard()
output.set_continue_on_error({run})
{body}
"""


def start(body, run=True, **streams):
    argv = [sys.executable, "-c", GUARDED.format(run=run, body=body)]
    return subprocess.Popen(
        ["timeout", "--foreground", "60", *argv], env=os.environ | {"PYTHONPATH": str(ROOT)}, **streams
    )


def readerless():
    """Returns the write end of a pipe whose read end is closed."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def test_a_run_continues_in_its_folder_when_the_reader_ends(tmp_path):
    """The file of the run also contains what C code prints. What was printed before the folder was known is lost."""
    body = f"""
print("early")
output.set_fallback_folder(pathlib.Path({str(tmp_path)!r}))
print("caf\\u00e9")
os.write(1, b"from C\\n")
print("no newline", end="")
"""
    writer = readerless()
    with start(body, stdout=writer, stderr=subprocess.PIPE, text=True) as process:
        os.close(writer)
        said = process.communicate(timeout=60)[1]
    log = tmp_path / output.FILE
    assert process.returncode == 0
    assert said == f"WARNING: standard output cannot be written (Broken pipe): further output goes to {log}\n"
    assert log.read_text() == "caf\u00e9\nfrom C\nno newline"


def test_both_streams_go_to_one_file_after_the_reader_ends(tmp_path):
    body = f"""
output.set_fallback_folder(pathlib.Path({str(tmp_path)!r}))
print("out")
print("err", file=sys.stderr)
"""
    writer = readerless()
    with start(body, stdout=writer, stderr=writer) as process:
        os.close(writer)
    said = (tmp_path / output.FILE).read_text().splitlines()
    assert process.returncode == 0 and {"out", "err"} <= set(said)
    assert sum(line.startswith("WARNING: standard ") for line in said) == 2 and len(said) == 4


def test_run_continues_after_a_full_disk(tmp_path):
    file = tmp_path / "said.txt"
    body = """
print("before")
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (7, limits[1]))
print("meanwhile")
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
print("after")
"""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    with file.open("wb") as stream, start(f"import resource{body}", stdout=stream) as process:
        pass
    assert process.returncode == 0 and file.read_text() == "before\nafter\n"


def test_command_without_a_run_ends_as_unix_tools_do():
    """The exit status is 141 without a message if the reader has ended, as a shell reports for a tool that SIGPIPE
    ends. It is 74 with the reason for a full disk. The interpreter prints no message in either case. Closed streams are
    treated as streams without a reader."""
    body = """
try:
    print("text")
    output.finish()
except output.UserError as error:
    print("error:", error, file=sys.stderr)
    sys.exit(error.status)
"""
    writer = readerless()
    with start(body, False, stdout=writer, stderr=subprocess.PIPE, text=True) as process:
        os.close(writer)
        assert process.communicate(timeout=60)[1] == "" and process.returncode == output.EXIT_UNREAD == 141
    with (
        Path("/dev/full").open("wb") as full,
        start(body, False, stdout=full, stderr=subprocess.PIPE, text=True) as process,
    ):
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 74 and said.count("\n") == 1
    assert said.startswith("error: standard output cannot be written (No space left on device)")


def test_closed_descriptors_are_not_given_to_the_next_file(tmp_path):
    body = f"""
with open({str(tmp_path / "file")!r}, "w") as file:
    os.write(1, b"one"); os.write(2, b"two"); print("three"); print("four", file=sys.stderr)
    file.write("its own")
output.finish()
"""
    argv = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", GUARDED.format(run=False, body=body)]
    done = subprocess.run(argv, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False, timeout=60)
    assert done.returncode == 0 and (tmp_path / "file").read_text() == "its own"
