"""Tests environments in separate processes: a fault affects only its own trajectory, calls end within the time limit,
and no process or file descriptor is left."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.environments import misbehaving
from tests.process import ROOT
from tunix_like.environments.pool import EnvironmentPool
from tunix_like.environments.protocol import MOST_CHARACTERS
from tunix_like.environments.registry import environment_place
from tunix_like.errors import UserError
from tunix_like.workers import fork_server, supervisor
from tunix_like.workers.process import children_of, members_of


def place(thing):
    return environment_place(thing.__name__, thing)


def make(thing=misbehaving.Env, **settings):
    given = {"workers": 2, "timeout_seconds": 20.0, "memory_gb": 4.0} | settings
    return EnvironmentPool(place(thing), **given)


@pytest.fixture(scope="module")
def patient():
    """A pool for environments that end by themselves."""
    pool = make()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def hasty():
    """A pool for environments that do not end."""
    pool = make(timeout_seconds=0.8, memory_gb=0.15)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def limited():
    """A pool for environments that exceed the memory limit. On a busy machine they take seconds to allocate it."""
    pool = make(memory_gb=0.15)
    yield pool
    pool.close()


def answers(pool, count):
    """Returns the next `count` outcomes by number."""
    got = []
    while len(got) < count:
        part = pool.outcomes(True)
        assert part, "an outcome is missing"
        got += part
    assert len(got) == count
    return {outcome.number: outcome for outcome in got}


def end(pool, numbers):
    for number in numbers:
        pool.finish(number)
    answers(pool, len(numbers))


def running(pid):
    """Returns whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition, seconds=20):
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.02)
    return condition()


def descriptors():
    return len(os.listdir("/proc/self/fd"))


ENDING = {
    "raise": "raised KeyError: 'no such key'\nTraceback",
    "exit": "raised SystemExit: leaving",
    "interrupt": "raised KeyboardInterrupt",
    "os._exit": "its process ended with status 3 in step.",
    "orphan": "its process ended with status 5 in step.",
    "kill": "its process was killed by signal 9 (Killed) in step.",
    "crash": "Fatal Python error: Segmentation fault",
    "garbage": "which is not an answer",
    "long": "which is not an answer",
    "other": "sent b'[1, 2]', which is not an answer",
    "wrong": "which is not an answer",
    "bytes": "Env.step: the observation is b'bytes', of type bytes; decode it",
    "infinite": "Env.step: reward inf is not a finite number",
    "none": "Env.step returned None; return EnvStepResult",
}
LASTING = {
    "hang": ("timeout", "step did not return within environment.timeout_seconds=0.8 s"),
    "spin": ("timeout", "step did not return within"),
    "catch": ("timeout", "step did not return within"),
    "print": ("timeout", "step did not return within"),
    "trickle": ("timeout", "step did not return within"),
    "close": ("error", "its process closed its socket in step"),
}
GROWING = {
    "grow": ("error", "it used more than environment.memory_gb=0.15 GB in step and was stopped"),
    "grow elsewhere": ("error", "it used more than environment.memory_gb=0.15 GB"),
}


def check_alone(pool, what, kind, reason):
    """Checks that a fault `what` of the second of three trajectories does not affect the other two."""
    for number in range(3):
        pool.reset(number, {"start": f"s{number}", "unread": print})
    assert {n: o.observation for n, o in answers(pool, 3).items()} == {n: f"start s{n}" for n in range(3)}
    for number, turn in enumerate(("a", what, "ccc")):
        pool.step(number, turn)
    got = answers(pool, 3)
    assert got[0][:6] == (0, "heard a", 1.0, False, {"turns": 1.0}, None)
    assert got[2][:6] == (2, "heard ccc", 3.0, False, {"turns": 1.0}, None)
    assert got[1].failure.kind == kind and reason in got[1].failure.reason
    with pytest.raises(ValueError, match="Trajectory 1 has no environment"):
        pool.step(1, "b")
    pool.step(0, "end")
    assert answers(pool, 1)[0][:6] == (0, "heard end", 3.0, True, {"turns": 2.0}, None)
    end(pool, range(3))


@pytest.mark.parametrize("what", ENDING)
def test_only_the_trajectory_at_fault_fails(patient, what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_alone(patient, what, "error", ENDING[what])


@pytest.mark.parametrize("what", LASTING)
def test_call_that_does_not_end_is_stopped(hasty, what):
    check_alone(hasty, what, *LASTING[what])


@pytest.mark.parametrize("what", GROWING)
def test_environment_above_the_memory_limit_is_stopped(limited, what):
    check_alone(limited, what, *GROWING[what])


@pytest.mark.parametrize("what", ["os._exit", "raise", "garbage"])
def test_failed_reset_affects_only_its_trajectory(patient, what):
    patient.reset(0, {"deed": what})
    patient.reset(1, {"start": "x"})
    got = answers(patient, 2)
    assert ENDING[what].replace("in step", "in reset") in got[0].failure.reason and got[1].failure is None
    end(patient, [1])


def test_failure_names_its_cause_and_the_line(patient):
    patient.reset(0, {})
    answers(patient, 1)
    patient.step(0, "raise")
    reason = answers(patient, 1)[0].failure.reason
    assert reason.startswith("Environment 'Env' raised KeyError") and "misbehaving.py" in reason
    assert "adapters.py" not in reason and "fork_server.py" not in reason


def test_forks_and_signals_of_an_environment_have_no_effect(patient):
    """A forked child does not answer for its environment. Signals to the server, and handlers for them, have no
    effect."""
    for number, what in enumerate(("fork", "ignore", "signal")):
        patient.reset(number, {})
        answers(patient, 1)
        patient.step(number, what)
        got = answers(patient, 1)[number]
        assert got.failure is None and got.observation == {0: "parent", 1: "ignored", 2: "sent"}[number]
        patient.step(number, "again")
        assert answers(patient, 1)[number].observation == "heard again"
    end(patient, range(3))


def test_large_observation_is_cut_in_the_process_of_the_environment(patient, monkeypatch):
    monkeypatch.setattr(fork_server, "MOST_ANSWER", MOST_CHARACTERS + 1000)
    patient.reset(0, {})
    answers(patient, 1)
    patient.step(0, "large")
    got = answers(patient, 1)[0]
    assert got.failure is None and got.observation == "x" * MOST_CHARACTERS
    end(patient, [0])


def test_children_draw_different_numbers(patient):
    for number in range(4):
        patient.reset(number, {})
    answers(patient, 4)
    for number in range(4):
        patient.step(number, "draw")
    drawn = [outcome.observation.split() for outcome in answers(patient, 4).values()]
    assert len({pair[0] for pair in drawn}) == len({pair[1] for pair in drawn}) == 4
    end(patient, range(4))


def test_one_process_per_trajectory_and_few_calls_at_a_time(patient):
    """Calls beyond `workers` wait. Their deadline starts when they start."""
    count = 12
    assert list(patient.tools) == []  # the server has started
    for number in range(count):
        patient.reset(number, {})
        assert len(patient._supervisor.calls) <= 2
    answers(patient, count)
    for number in range(count):
        patient.step(number, "pid")
    pids = {outcome.observation for outcome in answers(patient, count).values()}
    assert len(pids) == count and set(map(int, pids)) <= set(children_of(patient._server.pid))
    end(patient, range(count))


def episode(pool, *turns):
    """Returns the observations of one trajectory after its reset."""
    pool.reset(0, {})
    assert answers(pool, 1)[0].failure is None
    observations = []
    for turn in turns:
        pool.step(0, turn)
        (outcome,) = answers(pool, 1).values()
        assert outcome.failure is None, outcome
        observations.append(outcome.observation)
    end(pool, [0])
    return observations


def test_process_runs_another_trajectory_if_it_is_like_new():
    pool = make(workers=1)
    (first,) = episode(pool, "pid")
    assert episode(pool, "a", "pid") == ["heard a", first]
    for what in misbehaving.LEFTOVERS:
        left, pid = episode(pool, what, "pid")
        assert left == "left" and episode(pool, "pid") != [pid], what
        assert until(lambda pid=pid: not running(pid)), what
    pool.close()


def test_idle_process_that_has_ended_is_not_used():
    pool = make(workers=1)
    for told in (False, True):
        (pid,) = episode(pool, "pid")
        os.kill(int(pid), signal.SIGKILL)
        assert until(lambda pid=pid: not running(pid))
        if told:
            pool.outcomes(False)
        assert episode(pool, "a") == ["heard a"]
    pool.close()


def test_time_before_an_answer_is_read_does_not_count(hasty):
    """An answer of a megabyte is read only after the deadline. The call does not time out."""
    for number in range(2):
        hasty.reset(number, {})
    answers(hasty, 2)
    hasty.step(0, "large")
    hasty.step(1, "a")
    time.sleep(1.5)
    assert {n: o.failure for n, o in answers(hasty, 2).items()} == {0: None, 1: None}
    end(hasty, range(2))


def test_processes_that_an_environment_started_are_ended(hasty, tmp_path):
    hasty.close()
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        for number in range(3):
            hasty.reset(number, {})
        answers(hasty, 3)
    finally:
        os.chdir(before)
    hasty.step(0, "child")
    hasty.step(1, "orphan")
    got = answers(hasty, 2)
    assert got[0].failure.kind == "timeout" and "status 5" in got[1].failure.reason
    left = [int(line) for line in (tmp_path / "children").read_text().split()]
    left.append(int((tmp_path / "orphan").read_text()))
    assert len(left) == 3 and until(lambda: not any(map(running, left)))
    hasty.step(2, "a")
    assert answers(hasty, 1)[2].failure is None
    end(hasty, [2])


@pytest.mark.parametrize("what", ["server", pytest.param("freeze", marks=pytest.mark.slow)])
def test_lost_server_is_replaced(what, monkeypatch):
    pool = make(workers=1, timeout_seconds=1.0)
    for number in range(2):
        pool.reset(number, {})
    answers(pool, 2)
    session = pool._server.pid
    pool.step(0, what)
    failure = answers(pool, 1)[0].failure
    if what == "server":
        assert "the process that starts environments was killed by signal 9" in failure.reason
    else:  # the failure is detected at the next order
        assert failure.kind == "timeout"
        monkeypatch.setattr(fork_server, "PATIENCE", 0.3)  # from here, because a busy machine may take longer to fork
        assert until(lambda: (pool.outcomes(False), pool._server is None)[1])
    pool.step(1, "a")
    assert "before the call of step" in answers(pool, 1)[1].failure.reason
    pool.reset(0, {"start": "new"})
    assert answers(pool, 1)[0].observation == "start new" and pool._server.pid != session
    assert until(lambda: not any(map(running, members_of(session))))
    pool.close()


def test_close_ends_all_processes_and_closes_all_descriptors():
    count = descriptors()
    pool = make(workers=2)
    for number in range(6):
        pool.reset(number, {})
    answers(pool, 6)
    for number in range(6):
        pool.step(number, "hang")
    session = pool._server.pid
    assert len(list(members_of(session))) == 7
    pool.close()
    assert list(members_of(session)) == [] and descriptors() == count
    assert pool.outcomes(True) == []
    pool.reset(0, {"start": "x"})
    assert answers(pool, 1)[0].observation == "start x"
    pool.close()
    assert descriptors() == count


def test_many_trajectories_raise_the_limit_of_open_files(monkeypatch):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    pool = make()
    assert list(pool.tools) == []
    free = os.dup(0)  # the lowest free descriptor
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 5, limits[1]))
    try:
        for number in range(12):
            pool.reset(number, {})
        assert all(outcome.failure is None for outcome in answers(pool, 12).values())
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limits[1], limits[1])
        pool.close()
        pool.reset(0, {})
        answers(pool, 1)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 5, limits[1]))
        monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
        with pytest.raises(UserError, match="no more files can be opened.*raise the limit with 'ulimit -n'"):
            for number in range(1, 12):
                pool.reset(number, {})
                answers(pool, 1)
    finally:
        monkeypatch.undo()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        pool.close()


def test_misuse_raises(patient):
    patient.reset(0, {})
    with pytest.raises(ValueError, match="Trajectory 0 already has an environment"):
        patient.reset(0, {})
    with pytest.raises(UserError, match="a column .start. cannot be sent to its process"):
        patient.reset(1, {"start": lambda: 0})
    answers(patient, 1)
    end(patient, [0])
    patient.finish(5)
    assert answers(patient, 1)[5][:6] == (5, None, 0.0, False, {}, None)
    assert patient.outcomes(False) == []


def test_tools_and_the_reward_at_the_end():
    pool = make(misbehaving.Scored, timeout_seconds=2)
    assert [tool["function"]["name"] for tool in pool.tools] == ["add"]
    for number in range(2):
        pool.reset(number, {"start": 10, "other": "kept"})
    answers(pool, 2)
    pool.step(0, '<tool_call>{"name": "add", "arguments": {"number": 5}}</tool_call>')
    pool.step(1, '<tool_call>{"name": "add", "arguments": {"number": 3}}</tool_call>')
    got = answers(pool, 2)
    assert got[0].observation == [{"role": "tool", "content": "15", "name": "add"}] and not got[0].done
    for number in range(2):
        pool.step(number, "That is all.")
    assert all(outcome.done and outcome.observation is None for outcome in answers(pool, 2).values())
    for number in range(2):
        pool.finish(number)
    got = answers(pool, 2)
    assert got[0][:6] == (0, None, 15.0, False, {}, None)
    assert got[1].failure.kind == "timeout" and "finish did not return" in got[1].failure.reason
    pool.close()


def test_plain_functions_as_tools():
    pool = EnvironmentPool([place(misbehaving.double)], workers=1, timeout_seconds=20, memory_gb=4)
    assert [tool["function"]["name"] for tool in pool.tools] == ["double"]
    pool.reset(0, {"x": 1})
    assert answers(pool, 1)[0].observation is None
    pool.step(0, '{"name": "double", "parameters": {"number": 21}}')
    assert answers(pool, 1)[0].observation == [{"role": "tool", "content": "42", "name": "double"}]
    pool.finish(0)
    assert answers(pool, 1)[0].environment is None
    pool.close()


FILES = {
    "1 / 0\n": "ZeroDivisionError",
    "class Env:\n    def reset(self):\n        return None\n": "has no method 'step'",
    "def Env():\n    return 3\n": "Environment 'int' has no method",
    "import os\nos._exit(4)\n": "its process ended with status 4 in the import of its module",
}


@pytest.mark.parametrize("text", FILES)
def test_a_module_that_cannot_be_loaded(tmp_path, text):
    """All waiting trajectories get the error of a single start."""
    (tmp_path / "mine.py").write_text(text)
    pool = EnvironmentPool(f"{tmp_path}/mine.py:Env", workers=1, timeout_seconds=20, memory_gb=4)
    for number in range(3):
        pool.reset(number, {})
    for outcome in answers(pool, 3).values():
        assert outcome.failure.kind == "error" and FILES[text] in outcome.failure.reason
    with pytest.raises(UserError, match=FILES[text]):
        _ = pool.tools
    (tmp_path / "mine.py").write_text("from tests.environments.misbehaving import Env\n")
    pool.reset(0, {"start": "x"})
    assert answers(pool, 1)[0].observation == "start x"
    pool.close()


@pytest.mark.slow
def test_a_module_that_is_not_loaded_in_time(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.setattr(supervisor, "START_SECONDS", 0.5)
    pool = EnvironmentPool(f"{tmp_path}/mine.py:Env", workers=1, timeout_seconds=20, memory_gb=4)
    pool.reset(0, {})
    assert "the import of its module did not return within 0.5 s" in answers(pool, 1)[0].failure.reason
    pool.close()


def soak(episodes):
    """Runs episodes of all kinds. Returns the number of descriptors before and after, and the remaining processes."""
    pool = make(timeout_seconds=3, workers=2)  # enough for a reset on a busy machine
    pool.reset(0, {})
    answers(pool, 1)
    end(pool, [0])
    before = descriptors()
    kinds = ["a", "os._exit", "raise", "a", "garbage", "fork", "a", "kill", "hang", "a"]
    for start in range(0, episodes, len(kinds)):
        numbers = range(start, start + len(kinds))
        for number in numbers:
            pool.reset(number, {})
        answers(pool, len(kinds))
        for number in numbers:
            pool.step(number, kinds[number - start])
        failed = {n - start for n, outcome in answers(pool, len(kinds)).items() if outcome.failure is not None}
        assert {kinds[i] for i in failed} == {"os._exit", "raise", "garbage", "kill", "hang"} and len(failed) == 5
        end(pool, numbers)
    server = pool._server.pid
    idle = len(pool._idle)
    assert idle <= len(kinds) and until(lambda: len(list(children_of(server))) == idle)
    until(lambda: (pool.outcomes(False), not pool._server._unanswered)[1])
    assert not pool._forks and len(pool._server._forks) == idle and not pool._server._unanswered
    opened = len(os.listdir(f"/proc/{server}/fd"))
    resident = int(Path(f"/proc/{server}/statm").read_text().split()[1])
    after = descriptors() - idle + 1
    pool.close()
    return before, after, opened, resident


@pytest.mark.slow
def test_episodes_leave_no_processes_or_descriptors():
    before, after, opened, _ = soak(20)
    assert after == before and opened < 12


@pytest.mark.slow
def test_many_episodes_leave_no_processes_or_descriptors():
    _, _, opened, resident = soak(20)
    before, after, opened_later, resident_later = soak(120)
    assert after == before and opened_later == opened and resident_later < 1.1 * resident


SCRIPT = """
import os, sys, time
from tunix_like.environments.pool import EnvironmentPool

pool = EnvironmentPool("tests.environments.misbehaving:Env", workers=3, timeout_seconds=1000, memory_gb=4)
for number in range(3):
    pool.reset(number, {})
answers = []
while len(answers) < 3 or None in [fork.pid for fork in pool._forks.values()]:
    answers.extend(pool.outcomes(False))
print(pool._server.pid, *[fork.pid for fork in pool._forks.values()], flush=True)
pool.step(0, "child")
pool.step(1, "spin")
if sys.argv[1] in ("killed", "both"):
    pool.outcomes(True)
while not os.path.exists("children") or open("children").read().count("\\n") < 2:
    time.sleep(0.02)
if sys.argv[1] == "raises":
    raise RuntimeError("the run fails")
"""


@pytest.mark.parametrize(
    "how", ["killed", "both", *(pytest.param(how, marks=pytest.mark.slow) for how in ("ends", "raises"))]
)
def test_no_process_outlives_the_training_process(how, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, how],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    found = [int(pid) for pid in process.stdout.readline().split()]
    assert len(found) == 4
    children = tmp_path / "children"
    assert until(lambda: children.exists() and children.read_text().count("\n") == 2)
    found += [int(pid) for pid in children.read_text().split()]
    if how in ("killed", "both"):
        assert all(map(running, found))
        process.send_signal(signal.SIGKILL)
    if how == "both":  # the server cannot clean up, so processes that an environment started remain
        os.kill(found[0], signal.SIGKILL)
        process.wait(30)
        assert until(lambda: not any(map(running, found[:4])))
        for pid in filter(running, found[4:]):
            os.kill(pid, signal.SIGKILL)
    process.wait(30)
    process.stdout.close()
    assert until(lambda: not any(map(running, found)))


def test_arguments_of_an_environment(tmp_path):
    (tmp_path / "mine.py").write_text(
        "class Env:\n"
        "    def __init__(self, word, times=2):\n"
        "        self.word, self.times = word, times\n"
        "    def reset(self):\n"
        "        return self.word * self.times\n"
        "    def step(self, text):\n"
        "        return None, 0.0, True\n"
        "    def close(self):\n"
        f"        open({str(tmp_path / 'closed')!r}, 'w').close()\n"
    )
    pool = EnvironmentPool(f"{tmp_path}/mine.py:Env", arguments={"word": "ab"}, workers=1)
    assert pool.tools == []
    pool.reset(0, {"number": 1})
    (outcome,) = pool.outcomes(wait=True)
    assert outcome.observation == "abab"
    pool.finish(0)
    pool.outcomes(wait=True)
    pool.close()
    assert (tmp_path / "closed").exists()
    for arguments, message in (
        ({}, "'Env' needs a value for word; set environment.arguments.word"),
        ({"word": "a", "size": 1}, "'Env' has no parameter 'size'; it has: word, times"),
    ):
        pool = EnvironmentPool(f"{tmp_path}/mine.py:Env", arguments=arguments, workers=1)
        with pytest.raises(UserError, match=message):
            _ = pool.tools
    with pytest.raises(UserError, match="cannot be written as JSON"):
        EnvironmentPool(f"{tmp_path}/mine.py:Env", arguments={"word": object()})
    with pytest.raises(UserError, match="tools take no arguments"):
        EnvironmentPool(["a.py:f"], arguments={"word": "a"})


def test_finish_returns_the_plain_attributes_of_the_environment():
    pool = make(misbehaving.Scored)
    pool.reset(0, {"start": 10})
    answers(pool, 1)
    pool.finish(0)
    environment = answers(pool, 1)[0].environment
    assert environment.total == 10 and environment.best == [0.5, {"a": 1}] and environment.kind == "scored"
    with pytest.raises(AttributeError, match="lock"):
        _ = environment.lock
    assert pickle.loads(pickle.dumps(environment)) == environment
    pool.close()
