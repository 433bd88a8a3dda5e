"""Tests the training loop with a phase that adds up step numbers: the order of rows and checkpoints, resumption, and
all kinds of ends."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
import types

import jax.numpy as jnp
import numpy as np
import pytest

from tests.callbacks import OnRow
from tunix_like import RunControl
from tunix_like.errors import NotSaved, UserError
from tunix_like.storage.checkpoints import Checkpoints
from tunix_like.storage.metrics import MetricsLog, rows
from tunix_like.training import loop
from tunix_like.training.loop import EXIT_STOPPED, Interrupted, Stopped
from tunix_like.training.trainer import Trainer


class Counting(Trainer):
    """Adds the step's number to a sum. `at` maps a step to a function that is called within it."""

    name, step_key, iterator, rate_follows_total = "count", "count/step", None, False

    def __init__(self, total=5, *, at=None, data=None, evaluate_every=None, end_at=None, **identity):
        self.total, self.at, self.data, self.done = total, at or {}, data, 0
        self.evaluate_every, self.end_at, self.identity = evaluate_every, end_at, {"seed": 1, "lr": 0.1} | identity
        self.sum, self.seen, self.loaded, self.cut_after = jnp.zeros(()), [], None, None

    def running(self):
        return contextlib.nullcontext()

    def open_checkpoints(self):
        return self.files[0]

    def open_log(self):
        return self.files[1]

    def _settings(self):
        return self.identity

    def to_save(self):
        return {"sum": self.sum}

    def restore(self, state, step, inputs_changed):
        self.sum, self.loaded = state["sum"], step

    def cut(self, step):
        assert not self.seen, "before the first step"
        self.cut_after = step

    def step(self, step):
        if self.data is not None and step > self.data:
            return None
        self.seen.append(step)
        self.at.get(step, lambda: None)()
        self.sum = self.sum + step
        return {"sum": np.float32(self.sum)}

    def evaluate_if_due(self, step, last):
        every = self.evaluate_every
        return {"eval/sum": self.sum} if every is not None and (last or step % every == 0) else {}

    def finished(self, row):
        return bool(row["count/sum"] == self.end_at)


def run_control(total, step=0):
    """Returns what a callback gets from a run of RL."""
    trainer = type("RL", (Counting,), {"name": "train", "step_key": "step"})(total)
    trainer.done = step
    return RunControl(trainer)


def run(phase, *, checkpoints, log, checkpoint_every, on_row=None, **more) -> int:
    """Runs a phase with these files. Returns the number of its last step."""
    phase.files = (checkpoints, log)
    phase.training = types.SimpleNamespace(
        checkpoint_every_n_steps=checkpoint_every, changed_inputs="warn", eval_every_n_steps=None, output_dir=None
    )
    loop.run(phase, more.pop("callbacks", [] if on_row is None else [OnRow(on_row)]), **more)
    return phase.done


class Watched(Checkpoints):
    """Asserts at every save that the row of its step is already written."""

    def save(self, step, state, iterator=None, meta=None):
        assert rows(self.folder.parent)[-1]["count/step"] == step
        super().save(step, state, iterator, meta)


def go(phase, folder, *, every=2, seen=None, **more) -> int:
    with Watched(folder / "checkpoints", 10) as checkpoints:
        kinds = {"checkpoint_every": every, "on_row": None if seen is None else seen.append} | more
        return run(phase, checkpoints=checkpoints, log=MetricsLog(folder), **kinds)


def saved(folder) -> list[int]:
    with Checkpoints(folder / "checkpoints") as checkpoints:
        return checkpoints.steps()


def sums(folder) -> dict[int, float]:
    found = [(row["count/step"], row["count/sum"]) for row in rows(folder) if "count/sum" in row]
    assert len(dict(found)) == len(found), "a step has one row"
    return dict(found)


ALL = {1: 1, 2: 3, 3: 6, 4: 10, 5: 15}


def fail():
    raise RuntimeError("the machine is gone")


def term():
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_whole_run(tmp_path):
    """Rows have the phase's prefix and plain numbers. Checkpoints are saved every second step and at the end. Signal
    handlers are restored."""
    seen, handlers = [], (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
    assert go(Counting(), tmp_path, seen=seen) == 5
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    assert sums(tmp_path) == ALL and saved(tmp_path) == [2, 4, 5]
    assert [set(row) for row in rows(tmp_path)] == [{"count/step", "count/sum", "count/step_time_sec"}] * 5
    assert [row["count/sum"] for row in seen] == list(ALL.values())
    assert all(type(row["count/sum"]) is float and row["count/step_time_sec"] >= 0 for row in seen)


@pytest.mark.parametrize(
    ("end", "raised", "met"), [(lambda: None, None, 6), (term, Stopped, 3), (fail, RuntimeError, 1)]
)
def test_processes_synchronize_after_an_end_that_all_reach(monkeypatch, end, raised, met):
    """Processes also communicate once per step. They do not after an error, which may occur in one process only."""
    meetings = []
    monkeypatch.setattr(loop, "gather", lambda value: meetings.append(value) or [value])
    phase = Counting(5, at={2: end})
    with pytest.raises(raised) if raised else contextlib.nullcontext():
        run(phase, checkpoints=None, log=MetricsLog(None), checkpoint_every=9)
    assert len(meetings) == met


def test_without_files():
    seen = []
    done = run(Counting(3), checkpoints=None, log=MetricsLog(None), checkpoint_every=1, on_row=seen.append)
    assert done == 3 and [row["count/step"] for row in seen] == [1, 2, 3]


def test_evaluations(tmp_path):
    """Evaluations run at step 0, when due, and at the last step. Each is in the row of its step."""
    go(Counting(evaluate_every=2), tmp_path)
    assert {row["count/step"]: row["eval/sum"] for row in rows(tmp_path) if "eval/sum" in row} == {
        0: 0.0, 2: 3.0, 4: 10.0, 5: 15.0,
    }  # fmt: skip
    assert rows(tmp_path)[0] == {"count/step": 0, "eval/sum": 0.0}


def test_killed_run_is_resumed_from_its_checkpoint(tmp_path):
    """The row of step 3 is later than the checkpoint of step 2. It is removed, and step 3 is repeated."""
    with pytest.raises(RuntimeError, match="the machine is gone"):
        go(Counting(evaluate_every=4, at={4: fail}), tmp_path)
    assert sums(tmp_path) == {1: 1, 2: 3, 3: 6} and saved(tmp_path) == [2]
    again, seen = Counting(evaluate_every=4), []
    assert go(again, tmp_path, seen=seen) == 5
    assert again.loaded == again.cut_after == 2 and again.seen == [3, 4, 5]
    assert sums(tmp_path) == ALL and [row["count/step"] for row in seen] == [3, 4, 5]
    assert [row["count/step"] for row in rows(tmp_path)] == [0, 1, 2, 3, 4, 5], "no second evaluation at step 0"


def test_rows_without_a_checkpoint_are_removed(tmp_path):
    with pytest.raises(RuntimeError):
        go(Counting(at={2: fail}), tmp_path)
    MetricsLog(tmp_path).write({"other/step": 9})
    again = Counting()
    go(again, tmp_path)
    assert sums(tmp_path) == ALL and rows(tmp_path)[0] == {"other/step": 9}
    assert again.cut_after == -1, "and what the phase wrote"


def test_finished_run_is_not_repeated_but_can_be_extended(tmp_path, caplog):
    go(Counting(3), tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    again = Counting(3)
    assert go(again, tmp_path) == 3 and again.seen == []
    assert float(again.sum) == 6, "its state is loaded all the same"
    assert go(Counting(2), tmp_path) == 3, "nor taken back"
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    longer = Counting(4)
    caplog.clear()
    assert go(longer, tmp_path) == 4 and longer.seen == [4]
    assert "in the checkpoint: the schedule" not in caplog.text, "nothing depends on the number of steps"
    longer = Counting(5)
    longer.rate_follows_total = True
    assert go(longer, tmp_path) == 5 and longer.seen == [5]
    assert "the number of steps is now 5 and was 4 in the checkpoint" in caplog.text
    assert sums(tmp_path) == ALL


def test_end_of_the_data_ends_the_run(tmp_path):
    """The last step is only known then: its evaluation is a separate row, and its state is saved."""
    phase = Counting(None, data=3, evaluate_every=100)
    assert go(phase, tmp_path) == 3
    assert sums(tmp_path) == {1: 1, 2: 3, 3: 6} and saved(tmp_path) == [2, 3]
    assert rows(tmp_path)[-1] == {"count/step": 3, "eval/sum": 6.0}
    before = (tmp_path / "metrics.jsonl").read_bytes()
    for _ in range(2):
        assert go(Counting(None, data=3, evaluate_every=100), tmp_path) == 3
        assert (tmp_path / "metrics.jsonl").read_bytes() == before, "a further start finds it there"
    assert go(Counting(None, data=4, evaluate_every=100), tmp_path) == 4
    assert [row["count/step"] for row in rows(tmp_path)] == [0, 1, 2, 3, 3, 4, 4], "of its own step alone"


def test_data_that_ends_with_a_checkpoint_is_saved_once(tmp_path):
    assert go(Counting(None, data=4), tmp_path) == 4
    assert saved(tmp_path) == [2, 4]


def test_early_end_is_recorded(tmp_path):
    """The row contains the end (here: the sum is 6), and the checkpoint records it."""
    assert go(Counting(end_at=6), tmp_path) == 3
    assert saved(tmp_path) == [2, 3]
    again = Counting(end_at=6)
    assert go(again, tmp_path) == 3 and again.seen == []


@pytest.mark.parametrize(
    ("number", "kind"),
    [(signal.SIGTERM, Stopped), (signal.SIGINT, Interrupted), (signal.SIGHUP, Stopped)],
    ids=["SIGTERM", "SIGINT", "SIGHUP"],
)
def test_a_signal_saves_and_stops(heard_hangups, tmp_path, capfd, number, kind):
    """The step is completed, its row and its checkpoint are written, and the handlers are restored. The exit status of
    SIGTERM and SIGHUP is 75. Ctrl-C raises a KeyboardInterrupt, which does not end a notebook's process."""
    before = signal.getsignal(number)
    phase = Counting(at={3: lambda: os.kill(os.getpid(), number)})
    with pytest.raises(kind) as stopped:
        go(phase, tmp_path)
    assert isinstance(stopped.value, KeyboardInterrupt) or stopped.value.code == EXIT_STOPPED == 75
    assert stopped.value.message == "stopped by a signal after step 3, which is saved"
    second = "" if number == signal.SIGHUP else "; a second signal ends it at once"
    said = f"{signal.Signals(number).name}: the run stops after the current step{second}\n"
    assert capfd.readouterr().err.count(said) == 1, "said as it arrives"
    assert phase.seen == [1, 2, 3] and sums(tmp_path) == {1: 1, 2: 3, 3: 6} and saved(tmp_path) == [2, 3]
    assert signal.getsignal(number) is before
    again = Counting()
    assert go(again, tmp_path) == 5 and again.seen == [4, 5]
    assert sums(tmp_path) == ALL


def test_checkpoint_is_complete_before_stopped_is_raised(tmp_path):
    with Watched(tmp_path / "checkpoints", 10) as checkpoints:
        waits = []
        wait, save = checkpoints.wait, checkpoints.save
        checkpoints.wait = lambda: (wait(), waits.append("wait"))
        checkpoints.save = lambda *a, **k: (save(*a, **k), waits.append("save"))
        with pytest.raises(Stopped):
            run(
                Counting(at={1: term}),
                checkpoints=checkpoints,
                log=MetricsLog(tmp_path),
                checkpoint_every=10,
            )
        assert waits[waits.index("save") :] == ["save", "wait"]


def test_signal_between_two_checks_is_not_lost(tmp_path, monkeypatch):
    """The loop saves the step at which it stops, however often it checks for signals within a step."""

    @contextlib.contextmanager
    def answers():
        asked = iter([0] * 3 + [signal.SIGTERM] * 100)
        yield lambda: next(asked)

    monkeypatch.setattr(loop, "_stop_signals", answers)
    phase = Counting(100)
    with pytest.raises(Stopped):
        go(phase, tmp_path, every=100)
    assert saved(tmp_path) == phase.seen[-1:]


def test_a_signal_in_the_last_step_changes_nothing(tmp_path):
    assert go(Counting(at={5: term}), tmp_path) == 5
    assert saved(tmp_path) == [2, 4, 5]


def test_signal_in_the_last_step_stops_before_another_phase(tmp_path):
    """The next phase must not start, because the scheduler will end the process. The next start finds this phase
    completed and continues."""
    with pytest.raises(Stopped) as stopped:
        go(Counting(at={5: term}), tmp_path, another_follows=True)
    assert stopped.value.message == "stopped by a signal after step 5, which is saved" and saved(tmp_path) == [2, 4, 5]
    assert go(Counting(), tmp_path, another_follows=True) == 5 and sums(tmp_path) == ALL
    with pytest.raises(Interrupted):
        at = {3: lambda: os.kill(os.getpid(), signal.SIGINT)}
        go(Counting(end_at=6, at=at), tmp_path / "early", another_follows=True)


def test_a_signal_without_checkpoints_stops_too():
    with pytest.raises(Stopped) as stopped:
        run(
            Counting(at={1: term}),
            checkpoints=None,
            log=MetricsLog(None),
            checkpoint_every=1,
        )
    assert stopped.value.message == "stopped by a signal after step 1, nothing is saved"


def test_a_second_signal_acts_at_once(tmp_path):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("now"))
    try:
        with pytest.raises(Stopped):
            go(Counting(at={1: lambda: (term(), heard.append("first"), term(), heard.append("second"))}), tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == ["first", "now", "second"]


def test_a_second_hangup_changes_nothing(heard_hangups, tmp_path):
    """A closed terminal sends two signals: one from the shell and one from the kernel."""
    hang_up = lambda: os.kill(os.getpid(), signal.SIGHUP)  # noqa: E731
    with pytest.raises(Stopped):
        go(Counting(at={3: lambda: (hang_up(), hang_up())}), tmp_path)
    assert saved(tmp_path) == [2, 3]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_is_ignored_stays_ignored(tmp_path, number):
    """`nohup` ignores the signal, and so does a shell that starts a process in the background."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        assert go(Counting(at={3: lambda: os.kill(os.getpid(), number)}), tmp_path) == 5
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


def plain(phase, folder, every=1):
    """As `go`, with checkpoints that do not check the rows on disk."""
    with Checkpoints(folder / "checkpoints", 10) as checkpoints:
        log = MetricsLog(folder)
        return run(phase, checkpoints=checkpoints, log=log, checkpoint_every=every)


@pytest.fixture
def heard_hangups():
    """Sets the default handler of SIGHUP, because `nohup` may have started the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def disk():
    """After `full()` no file can grow. `free()` removes the limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    set_to = lambda soft: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, before[1]))  # noqa: E731
    yield types.SimpleNamespace(full=lambda: set_to(0), free=lambda: set_to(before[0]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_run_continues_on_a_full_disk(tmp_path, caplog, disk):
    """Steps 2 and 3 are not saved and a warning is logged. Their rows are kept until they can be written."""

    def full():
        while 1 not in saved(tmp_path):  # checkpoints are written in the background
            time.sleep(0.01)
        disk.full()

    def free():
        time.sleep(1)  # until then the write of step 3 is retried in the background
        disk.free()

    phase = Counting(at={2: full, 4: free})
    assert plain(phase, tmp_path) == 5 and phase.seen == [1, 2, 3, 4, 5]
    assert saved(tmp_path) == [1, 4, 5] and sums(tmp_path) == ALL
    for step, lost in enumerate([False, True, True, False, False], 1):
        assert (f"the checkpoint of step {step} could not be written" in caplog.text) == lost
    assert caplog.text.count("rows are kept until it can") == 1 and "the 2 rows that were kept" in caplog.text


@pytest.mark.parametrize("stop", [False, True])
def test_unwritten_last_checkpoint_raises(tmp_path, caplog, disk, stop):
    """This includes a stop by a signal, because status 75 means that the run is saved. The same run is resumed from the
    last checkpoint."""

    def at_3():
        while 2 not in saved(tmp_path):
            time.sleep(0.01)
        disk.full()
        if stop:
            term()

    phase = Counting(4 if stop else 3, at={3: at_3})
    with pytest.raises(NotSaved, match="step 3") as refused:
        plain(phase, tmp_path)
    disk.free()
    assert refused.value.stopped == stop, "which whoever would go on to another phase must know"
    assert refused.value.status == 74 and phase.seen == [1, 2, 3] and "last 1 rows could not be written" in caplog.text
    assert saved(tmp_path) == [1, 2]
    again = Counting()
    assert plain(again, tmp_path) == 5 and again.loaded == 2 and sums(tmp_path) == ALL


def test_damaged_checkpoint_is_replaced_by_the_previous_one(tmp_path, caplog):
    with pytest.raises(RuntimeError):
        go(Counting(at={5: fail}), tmp_path)
    (file,) = (tmp_path / "checkpoints" / "4" / "state" / "d").iterdir()
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 128]))
    again = Counting()
    assert go(again, tmp_path) == 5 and (again.loaded, again.seen) == (2, [3, 4, 5])
    assert "4: this checkpoint is damaged" in caplog.text and "step 2 is used instead" in caplog.text
    assert saved(tmp_path) == [2, 4, 5] and (tmp_path / "checkpoints" / "4.damaged").is_dir()
    assert sums(tmp_path) == ALL and float(again.sum) == 15


def test_nothing_is_saved_if_another_process_has_the_run(tmp_path):
    def refuse():
        raise UserError("no longer this process's run")

    with Checkpoints(tmp_path / "checkpoints", 10) as checkpoints, pytest.raises(UserError, match="no longer"):
        kinds = {"checkpoint_every": 2, "before_save": refuse}
        run(Counting(), checkpoints=checkpoints, log=MetricsLog(tmp_path), **kinds)
    assert saved(tmp_path) == []


def test_checkpoint_of_another_run_is_rejected(tmp_path):
    """The message names each difference with both values. No step is computed and no file changes, including rows after
    the checkpoint."""
    with pytest.raises(RuntimeError):
        go(Counting(at={4: fail}), tmp_path)
    other = Counting(lr=0.2)
    with pytest.raises(
        UserError, match="is of another run. Different settings .checkpoint, now.:\n  lr: 0.1 -> 0.2\nUse"
    ) as refused:
        go(other, tmp_path)
    assert str(tmp_path / "checkpoints") in str(refused.value)
    assert (
        other.seen == [] and other.cut_after is None and saved(tmp_path) == [2] and sums(tmp_path) == {1: 1, 2: 3, 3: 6}
    )
    with pytest.raises(UserError, match=r"new: .\(absent\). -> 7"):
        go(Counting(new=7), tmp_path)


def test_keys_that_were_added_after_the_checkpoint_have_their_defaults(tmp_path):
    """A checkpoint of an earlier version is resumed if the new keys have their defaults, and refused otherwise."""
    assert go(Counting(2, rollout={"temperature": 0.5}), tmp_path) == 2
    with pytest.raises(UserError, match="rollout.max_staleness: 0 -> 1"):
        go(Counting(4, rollout={"temperature": 0.5, "max_staleness": 1}), tmp_path)
    resumed = Counting(4, rollout={"temperature": 0.5, "max_staleness": 0})
    assert go(resumed, tmp_path) == 4 and resumed.loaded == 2
