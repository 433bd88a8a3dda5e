"""Tests standard output and standard error of a command when the reader ends, the terminal closes or pauses, or the
disk is full."""

from __future__ import annotations

import os
import pty
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

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


def wait_for(path):
    for _ in range(600):
        if path.exists():
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} did not come")


def test_a_run_continues_in_its_folder_when_the_reader_ends(tmp_path):
    """The file of the run also contains what was printed before the folder was known, and what C code prints."""
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
    assert log.read_text() == "early\ncaf\u00e9\nfrom C\nno newline"


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


@pytest.mark.parametrize("stream", ["pipe", "terminal"])
def test_blocked_stream_stops_neither_the_run_nor_its_signal_handlers(tmp_path, stream):
    """Without a reader the run is delayed by a second, and its signal handler is called and returns. When the reader
    continues, the text is written from the position where it stopped. Text beyond the buffer is dropped and counted."""
    reader, writer = os.pipe() if stream == "pipe" else pty.openpty()
    body = f"""
def handler(number, frame):
    output.from_handler("told")
    pathlib.Path({str(tmp_path / "told")!r}).touch()
signal.signal(signal.SIGTERM, handler)
began = time.monotonic()
for i in range(30_000):
    print(f"{{i:099d}}")
pathlib.Path({str(tmp_path / "seconds.part")!r}).write_text(str(time.monotonic() - began))
os.rename({str(tmp_path / "seconds.part")!r}, {str(tmp_path / "seconds")!r})
while not os.path.exists({str(tmp_path / "told")!r}):
    time.sleep(0.01)
"""
    with start(body, stdout=writer, stderr=writer) as process:
        os.close(writer)
        wait_for(tmp_path / "seconds")
        assert output.PATIENCE <= float((tmp_path / "seconds").read_text()) < 10 * output.PATIENCE
        process.terminate()
        wait_for(tmp_path / "told")
        said = b""
        try:
            while part := os.read(reader, 1 << 16):
                said += part
        except OSError:  # the way in which a terminal closes
            pass
    os.close(reader)
    assert process.returncode == 0
    lines = said.decode().replace("\r\n", "\n").splitlines()
    lost = [line for line in lines if line.startswith("[")]
    numbers = [int(line) for line in lines if line[:1] == "0" and len(line) == 99]
    assert numbers == sorted(numbers) and numbers[0] == 0 and numbers[-1] == 29_999
    assert len(lost) == 1 and 29_000 > len(numbers) > output.KEPT / 2 / 100
    assert int(lost[0].split()[0][1:]) == pytest.approx((30_000 - len(numbers)) * 100, abs=600)


def test_lines_of_a_full_disk_are_written_when_there_is_space(tmp_path):
    file = tmp_path / "said.txt"
    body = """
print("before")
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (9, limits[1]))
print("meanwhile")
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
print("after")
"""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    with file.open("wb") as stream, start(f"import resource{body}", stdout=stream) as process:
        pass
    assert process.returncode == 0 and file.read_text() == "before\nmeanwhile\nafter\n"


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
