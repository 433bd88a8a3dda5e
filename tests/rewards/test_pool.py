"""Tests reward functions in real workers: if one completion fails, the others are scored, in bounded time, and no
process is left."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest

from tests.parameters import others_slow
from tests.process import ROOT
from tests.rewards import misbehaving
from tests.traces import calls, tracks_of
from tunix_like.errors import UserError
from tunix_like.rewards import close_pools, pooled, resolve, score, verl_compatible
from tunix_like.rewards import pool as pool_module
from tunix_like.runtime import trace
from tunix_like.workers import supervisor

TIMEOUT = 0.6


@pytest.fixture(scope="module")
def workers():
    """Two workers for every function of `misbehaving`, shared by the tests."""
    names = ("deed", "too_few", "no_list", "printing", "compares", "light", "nested")
    functions = pooled({name: getattr(misbehaving, name) for name in names}, workers=2, timeout_seconds=TIMEOUT)
    yield functions
    close_pools(functions.values())


def run(function, completions, group_size=4, **columns):
    return score(
        [("mine", function, 1.0)], [f"p{i}" for i in range(len(completions))], completions, columns, group_size
    )


def pids(functions):
    return [worker.pid for worker in next(iter(functions.values())).pool.idle]


def running(pid):
    """Returns whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


GOOD = ["a", "bb", "ccc", "dddd", "e", "ff", "ggg"]
FAILS = {
    "hang": ("timeout", "did not return within rewards.timeout_seconds=0.6 s"),
    "spin": ("timeout", "did not return within"),
    "deadlock": ("timeout", "did not return within"),
    "raise": ("error", "raised KeyError: 'no such key'\nTraceback"),
    "exit": ("error", "raised SystemExit: leaving"),
    "interrupt": ("error", "raised KeyboardInterrupt"),
    "recursion": ("error", "raised RecursionError"),
    "os._exit": ("error", "its process ended with status 3"),
    "kill": ("error", "its process was killed by signal 9"),
    "crash": ("error", "Fatal Python error: Segmentation fault"),
    "close": ("error", "its process"),
    "garbage": ("error", "which is not an answer"),
    "answer": ("error", "which is not an answer"),
    "text": ("error", "'1', is not a number"),
    "infinite": ("error", "inf, is not within"),
}


@pytest.mark.parametrize("what", others_slow(FAILS, "raise", "os._exit", "kill", "close", "text"))
def test_only_the_failing_completion_is_unscored(workers, what):
    """Uses groups of four. One completion of the second group fails, and the seven others have their rewards."""
    kind, reason = FAILS[what]
    completions = [*GOOD[:5], what, *GOOD[5:]]
    began = time.monotonic()
    got = run(workers["deed"], completions)
    assert time.monotonic() - began < 30
    expected = [float("nan") if text == what else len(text) for text in completions]
    np.testing.assert_array_equal(got.total, expected)
    np.testing.assert_array_equal(got.timeouts, [kind == "timeout" and text == what for text in completions])
    np.testing.assert_array_equal(got.errors, [kind == "error" and text == what for text in completions])
    assert reason in got.first_failure and f"Prompt: 'p5'\nCompletion: {what!r}" in got.first_failure


def test_calls_are_events_of_the_trace(workers, tmp_path):
    """The call of the second group fails, and is followed by one call per completion."""
    with trace.writing(tmp_path):
        run(workers["deed"], [*GOOD, "raise"])
    tracks = tracks_of(tmp_path / trace.FILE)
    events = calls(tracks, "reward calls")
    sizes = [(event["name"], event["args"]["completions"]) for event in events]
    assert sorted(sizes) == [*[("mine", 1)] * 3, ("mine", 4), ("mine failed", 1), ("mine failed", 4)]
    assert {event["name"] for event in tracks["trainer"]} == {"mine"} and len(tracks) <= 3


@pytest.mark.parametrize("what", ["none", "nan"])
def test_none_is_unscored_and_not_a_failure(workers, what):
    got = run(workers["deed"], ["a", what, "bb"], group_size=3)
    np.testing.assert_array_equal(got.total, [1, np.nan, 2])
    assert not got.timeouts.any() and not got.errors.any() and got.first_failure is None


def test_invalid_return_values_leave_the_group_unscored(workers):
    """The values cannot be assigned to completions, so the group is unscored."""
    got = run(workers["too_few"], ["a", "few", "b", "c"], group_size=2)
    np.testing.assert_array_equal(got.total, [np.nan, np.nan, 1, 1])
    assert got.errors.tolist() == [True, True, False, False]
    assert "'mine' returned 1 values for 2 completions" in got.first_failure
    got = run(workers["no_list"], ["a", "b"], group_size=2)
    assert got.errors.all() and "must return one number per completion; it returned 1.0" in got.first_failure


def test_forked_child_of_a_worker_sends_no_result(workers):
    assert run(workers["deed"], ["fork", "a", "bb", "fork"], group_size=1).total.tolist() == [1, 1, 2, 1]


def test_a_lock_that_is_never_released(workers):
    """The next completion that needs the lock in the same worker times out, and the one after that has a new worker."""
    got = run(workers["deed"], ["a", "lock", "bb", "lock", "lock", "ccc"], group_size=1)
    assert got.total[[0, 2, 5]].tolist() == [1, 2, 3] and not got.errors.any()
    assert set(got.total[[1, 3, 4]][~np.isnan(got.total[[1, 3, 4]])]) == {1.0}


def test_printed_text_is_forwarded_up_to_a_limit(workers, capfd):
    assert run(workers["printing"], ["a", "bb"], group_size=2).total.tolist() == [1, 2]
    assert run(workers["deed"], ["flood", "a"], group_size=2).total.tolist() == [4, 1]
    shown = capfd.readouterr()
    assert shown.out == "" and "] one line of mine\n" in shown.err and "] xxx" in shown.err
    assert len(shown.err) < 300_000 and "(it prints more, which is not shown)" in shown.err


def test_closed_stderr_loses_only_the_output(workers, monkeypatch):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    closed = io.StringIO()
    closed.close()
    for stream in (closed, Gone(), None):
        monkeypatch.setattr(sys, "stderr", stream)
        assert run(workers["printing"], ["a", "bb"], group_size=2).total.tolist() == [1, 2]


HOSTILE = "\x1b[31m\r\u202etxt\u2066 \u00e9\U0001f600\t\x07\x9b2J\u2028."
SHOWN = "\\x1b[31m\\r\\u202etxt\\u2066 \u00e9\U0001f600\t\\x07\\x9b2J\\u2028."


def test_lines_of_two_workers_are_not_mixed_and_control_characters_are_escaped(capfd):
    """Both workers write at the same time, in parts that split characters. The last line of each has no line end."""
    functions = pooled([misbehaving.ragged], workers=2, timeout_seconds=20)
    completions = [f"{name} {i} {HOSTILE}" for name in ("a", "b") for i in range(30)]
    assert run(functions["ragged"], completions, group_size=30).scored.all()
    workers = pids(functions)
    close_pools(functions.values())
    said = capfd.readouterr().err.split("\n")
    assert said.pop() == "" and len(workers) == 2
    found = {pid: [line for line in said if line.startswith(f"[reward worker {pid}] ")] for pid in workers}
    assert sum(map(len, found.values())) == len(said)
    texts = sorted([line.partition("] ")[2] for line in lines] for lines in found.values())
    assert texts == [[f"<{name} {i} {SHOWN}>" for i in range(30)] for name in ("a", "b")]


@pytest.mark.parametrize("apart", [True, False])
def test_failure_message_is_printable(apart):
    functions = pooled([misbehaving.quotes], workers=1) if apart else {"quotes": misbehaving.quotes}
    got = run(functions["quotes"], [HOSTILE], group_size=1)
    close_pools(functions.values())
    assert f"raised ValueError: cannot read {SHOWN}" in got.first_failure
    assert got.first_failure.replace("\n", "").replace("\t", "").isprintable()


def test_groups_are_not_split_between_workers(workers):
    completions = ["a", "bb", "cc", "d", "ee", "fff"]
    assert run(workers["compares"], completions, group_size=3).total.tolist() == [1, 3, 3, 1, 2, 3]
    assert workers["compares"](prompts=["p"] * 2, completions=["a", "bb"]) == [1, 2]


def test_columns_of_any_kind(workers):
    extra = [{"numbers": np.arange(n)} for n in range(4)]
    assert run(workers["nested"], list("abcd"), extra=extra, unread=[print] * 4).total.tolist() == [0, 0, 1, 3]
    with pytest.raises(UserError, match="'mine': a column .completions, extra. cannot be sent.*set rewards.workers=0"):
        run(workers["nested"], list("ab"), extra=[{"numbers": lambda: 0}] * 2)
    assert run(workers["nested"], list("abcd"), extra=extra).total.tolist() == [0, 0, 1, 3]


def test_worker_is_a_new_process_without_heavy_imports(workers):
    assert run(workers["light"], ["a"], group_size=1).total.tolist() == [1]


def test_workers_start_when_needed_and_leave_no_files_or_processes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    functions = pooled([misbehaving.deed], workers=2, timeout_seconds=TIMEOUT)
    assert pids(functions) == []
    run(functions["deed"], ["a", "bb"], group_size=2)
    assert len(pids(functions)) == 1, "one group, one worker"
    assert [os.getsid(pid) for pid in pids(functions)] == pids(functions), "SIGHUP of the run's terminal passes it by"
    assert run(functions["deed"], ["a", "child"], group_size=1).timeouts.tolist() == [False, True]
    child = int((tmp_path / "child").read_text())
    assert until(lambda: not running(child)), "what a function started goes with its worker"
    before = pids(functions)
    os.kill(before[0], signal.SIGKILL)
    assert until(lambda: not running(before[0]))
    assert run(functions["deed"], ["a", "bb"], group_size=1).total.tolist() == [1, 2], "replaced without a failure"
    left = pids(functions)
    close_pools(functions.values())
    assert left and not any(map(running, left)) and pids(functions) == []
    assert run(functions["deed"], ["a"], group_size=1).total.tolist() == [1], "and they start again"
    close_pools(functions.values())


@pytest.mark.parametrize("what", ["daemon", "daemon and exit"])
def test_daemons_of_a_function_end_with_its_worker(tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    functions = pooled([misbehaving.deed], workers=1, timeout_seconds=20)
    run(functions["deed"], [what], group_size=1)
    daemon = int((tmp_path / "daemon").read_text())
    close_pools(functions.values())
    assert until(lambda: not running(daemon))


@pytest.mark.slow
def test_memory_has_a_limit(monkeypatch):
    """A leaking worker is replaced between calls. A worker that grows during a call is stopped in it."""
    functions = pooled([misbehaving.leaking, misbehaving.deed], workers=1, timeout_seconds=20, memory_gb=0.15)
    with monkeypatch.context() as context:
        context.setattr(supervisor, "POLL_SECONDS", 15.0)  # a leaking call may be slow on a busy machine
        got = run(functions["leaking"], list("abcdefghi"), group_size=1)
    grown = run(functions["deed"], ["a", "grow"], group_size=2)
    close_pools(functions.values())
    assert grown.errors.tolist() == [False, True] and grown.total[0] == 1
    assert "it used more than rewards.memory_gb=0.15 GB in the call and was stopped" in grown.first_failure
    assert got.scored.all() and 3 <= len(set(got.total)) <= 5, "one worker holds four or fewer of 30 MB each"


def test_bounded_time_when_every_call_hangs(monkeypatch):
    """100 completions of 0.2 s each would take 20 s in one worker, and over a minute with a new worker for each."""
    monkeypatch.setattr(pool_module, "PATIENCE", 2)
    functions = pooled([misbehaving.deed], workers=1, timeout_seconds=0.2)
    began = time.monotonic()
    got = run(functions["deed"], ["a", *["hang"] * 100], group_size=1)
    assert time.monotonic() - began < 15
    close_pools(functions.values())
    np.testing.assert_array_equal(got.timeouts, [False] + [True] * 100)
    assert got.total[0] == 1


SCRIPT = """
import os, sys, threading, time
from tunix_like.rewards import pooled, score
from tests.rewards import misbehaving

functions = pooled([misbehaving.deed], workers=2, timeout_seconds=1000)
deed = functions["deed"]
score([("deed", deed, 1.0)], ["p"] * 2, ["a", "b"], {}, 1)
print(*[worker.pid for worker in deed.pool.idle], flush=True)
what = sys.argv[1]
if what == "killed":
    score([("deed", deed, 1.0)], ["p"] * 2, ["spin", "b"], {}, 1)
elif what == "raises":
    raise RuntimeError("the run fails")
"""


@pytest.mark.parametrize("how", ["killed", "ends", "raises"])
def test_workers_end_when_the_run_is_killed(how):
    """One worker is idle and one runs C code when the run is killed. Both end."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, how],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    found = [int(pid) for pid in process.stdout.readline().split()]
    assert len(found) == 2
    if how == "killed":
        time.sleep(0.3)
        assert all(map(running, found))
        process.kill()
    process.wait(30)
    process.stdout.close()
    assert until(lambda: not any(map(running, found)))


def test_functions_that_cannot_run_in_a_worker_raise_an_error(tmp_path, monkeypatch):
    for function in (lambda completions: [], verl_compatible(misbehaving.deed), str.upper):
        with pytest.raises(UserError, match="cannot run in a worker.*Move it to the top level of a file"):
            pooled({"mine": function}, workers=1)
    with pytest.raises(UserError, match="the same __name__"):
        pooled([misbehaving.deed, misbehaving.deed], workers=1)
    (tmp_path / "mine.py").write_text("score = lambda completions: [2.0] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    functions = pooled({"mine.py:score": resolve("mine.py:score")}, workers=1)  # a lambda works too
    monkeypatch.chdir("/")
    assert run(functions["mine.py:score"], ["a"], group_size=1).total.tolist() == [2]
    (tmp_path / "mine.py").write_text("1 / 0\n")
    close_pools(functions.values())
    got = run(functions["mine.py:score"], ["a"], group_size=1)
    close_pools(functions.values())
    assert "could not be loaded in a worker. Reward" in got.first_failure and "ZeroDivisionError" in got.first_failure


def test_a_function_that_cannot_be_loaded_fails_alone(tmp_path, monkeypatch):
    """The worker is kept, and calls the other functions."""
    monkeypatch.setenv("RUN", str(os.getpid()))
    (tmp_path / "mine.py").write_text(
        "import os\n1 / (os.environ['RUN'] == str(os.getpid()))\ndef f(completions):\n    return []\n"
    )
    functions = pooled({"bad": resolve(f"{tmp_path}/mine.py:f"), "good": misbehaving.deed}, workers=1)
    failed = run(functions["bad"], ["a", "bb"], group_size=2)
    before = pids(functions)
    assert run(functions["good"], ["a", "bb"], group_size=2).total.tolist() == [1, 2]
    assert failed.errors.all() and "'mine' could not be loaded in a worker. Reward" in failed.first_failure
    assert "ZeroDivisionError" in failed.first_failure and "was not called" not in failed.first_failure
    assert run(functions["bad"], ["a"], group_size=1).errors.all() and pids(functions) == before != []
    close_pools(functions.values())


def test_arguments_that_the_worker_cannot_load_are_errors_of_their_function(monkeypatch):
    """The worker has called another function before."""
    only_here = types.ModuleType("only_here")
    exec("class Value: pass", only_here.__dict__)
    monkeypatch.setitem(sys.modules, "only_here", only_here)
    functions = pooled([misbehaving.deed, misbehaving.nested], workers=1)
    assert score([("first", functions["deed"], 1.0)], ["p"], ["a"], {}, 1).total.tolist() == [1]
    extra = {"extra": [only_here.Value()]}
    got = score([("second", functions["nested"], 1.0)], ["p"], ["a"], extra, 1)
    close_pools(functions.values())
    assert "Reward function 'second' raised ModuleNotFoundError" in got.first_failure
