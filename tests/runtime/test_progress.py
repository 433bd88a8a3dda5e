"""Tests the display of progress: the line at the bottom of a terminal and plain lines in a log file, both only on
request."""

from __future__ import annotations

import base64
import contextlib
import io
import logging
import sys
import threading
import types

import jax
import pytest
import rich.console
from flax import nnx

from tests.callbacks import OnRow
from tests.tiny_model import HF
from tests.training.test_loop import run_control
from tunix_like import RolloutConfig, load_model
from tunix_like.data import reverse_text
from tunix_like.runtime import console, progress
from tunix_like.runtime import profile as speed
from tunix_like.session import display
from tunix_like.training.engine import make_engine
from tunix_like.types import Request, SamplingParams


class Clock:
    """Replaces `time`; the test sets the seconds."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    own = Clock()
    monkeypatch.setattr(progress, "time", own)
    monkeypatch.setattr(console, "time", own)
    monkeypatch.setattr(console, "_last_printed", 0.0)
    return own


class Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Returns what is written to a terminal of 100 columns."""
    screen = Screen()
    kinds = {"force_terminal": True, "width": 100, "color_system": None, "legacy_windows": False}
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(console, "_CONSOLE", rich.console.Console(file=screen, highlight=False, **kinds))
    return screen


def test_nothing_is_shown_without_a_request(clock, capsys):
    with progress.task("train", 3) as advance:
        clock.now += 1000
        advance(1, "a note")
        progress.compiling("update")
    assert capsys.readouterr() == ("", "") and progress._SHOWN is None


def test_log_file_gets_a_line_after_an_interval_without_output(clock, capsys):
    with progress.shown(every=30), progress.task("train", 100, done=8) as advance:
        display = progress._SHOWN
        for _ in range(4):
            clock.now += 10
            advance(1)
            display.tick()
        console.print_text("a line of the step")  # other output counts too: no line for another 30 s
        clock.now += 29
        display.tick()
        with progress.task("sampling", 64) as sampled:
            clock.now += 2
            sampled(16, "up to 128 of 512 tokens")
            progress.compiling("decoding")
            clock.now += 70
            display.tick()
            progress.compiling(None)
            clock.now += 31
            display.tick()
    assert capsys.readouterr().out.splitlines() == [
        "train 11/100, 30 s, 14:50 left",
        "a line of the step",
        "train 12/100, 2:21, 14:30 left: sampling 16/64, up to 128 of 512 tokens, 1:12 > compiling decoding, 1:10",
        "train 12/100, 2:52, 14:30 left: sampling 16/64, up to 128 of 512 tokens, 1:43",
    ]


def test_lines_are_written_while_the_main_thread_is_blocked(capsys):
    with progress.shown(every=0.05), progress.task("loading weights", 9):
        threading.Event().wait(0.6)
    assert capsys.readouterr().out.startswith("loading weights 0/9, ")
    assert not any(thread.name == "progress" for thread in threading.enumerate())


def test_no_line_is_written_if_lines_are_disabled(capsys):
    with progress.shown(lines=False, every=0.01), progress.task("loading weights", 9):
        threading.Event().wait(0.1)
    assert capsys.readouterr().out == ""


def test_remaining_time_ignores_the_first_step(clock):
    task = progress._Task("train", 10, 0)
    assert task.left(clock.now) is None
    for seconds in (100, 2, 2):
        clock.now += seconds
        task.advance(1)
    assert task.left(clock.now) == pytest.approx(14)
    assert task.left(clock.now + 1) == pytest.approx(13)
    assert task.left(clock.now + 99) == pytest.approx(12), "the step under way may be long, the others are not yet"
    task.advance(7)
    assert task.left(clock.now) is None


def test_remaining_time_contains_no_compilation(clock):
    """Neither that of the first step nor that of a later one; a step before the task is not its own."""
    with progress.shown(lines=False), progress.task("train", 10) as advance:
        left = lambda: progress._SHOWN.tasks[0].left(clock.now)  # noqa: E731
        for seconds, compiled in ((3, 60), (2, 0), (2, 90)):
            progress.compiling("update")
            clock.now += compiled
            progress.compiling(None)
            clock.now += seconds
            advance(1)
            expected = {1: 27, 2: 16, 3: 14}[progress._SHOWN.tasks[0].done]
            assert left() == pytest.approx(expected)


def test_remaining_time_uses_the_last_twenty_steps(clock):
    task = progress._Task("train", 100, 0)
    for seconds in (100, 42, *[2] * 19):
        clock.now += seconds
        task.advance(1)
    assert task.left(clock.now) == pytest.approx(79 * 4)
    clock.now += 2
    task.advance(1)
    assert task.left(clock.now) == pytest.approx(78 * 2)


def test_terminal_shows_output_above_one_progress_line(clock, terminal, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # a file, to which warnings go
    log = logging.getLogger("of this test")
    log.addHandler(console.LogHandler())
    with progress.shown(), progress.task("train [x]", 12) as advance:
        advance(4)
        with progress.task("sampling", 64) as sampled:
            clock.now += 3
            sampled(16)
            progress._SHOWN._live.refresh()
            console.print_text("a step [y]")
            print("a print")
            log.warning("a warning")
        shown = terminal.getvalue()
        assert "train [x] 4/12" in shown and "sampling 16/64, 3 s" in shown
        assert "a step [y]" in shown and "a print" in shown and "a warning" not in shown
        assert sys.stderr.getvalue() == "a warning\n"
    assert progress._SHOWN is None
    assert terminal.getvalue().endswith("\x1b[2K")  # the line is erased


def test_part_is_shown_after_one_second(clock, terminal):
    with progress.shown(), progress.task("train", 12), progress.task("rewards"):
        assert progress._SHOWN.parts(clock.now) == ""
        clock.now += 1
        assert progress._SHOWN.parts(clock.now) == "rewards, 1 s"


def test_failed_compilation_is_removed_with_its_part(clock, terminal):
    with progress.shown(), progress.task("train", 12):
        with pytest.raises(ValueError), progress.task("update"):
            progress.compiling("update")
            raise ValueError
        clock.now += 5
        assert progress._SHOWN.parts(clock.now) == ""


def test_only_the_first_process_shows_progress(terminal, monkeypatch):
    monkeypatch.setattr(console._CONSOLE, "quiet", True)
    with progress.shown(every=0.01), progress.task("train", 12):
        assert progress._SHOWN._live is None
        assert not any(thread.name == "progress" for thread in threading.enumerate())
    assert terminal.getvalue() == ""


def test_sampler_reports_rows_and_compilations(monkeypatch):
    told, compiled = [], []

    class Task(progress._Task):
        def advance(self, done, note=""):
            super().advance(done, note)
            told.append((self.name, self.count.strip(), self.note))

    monkeypatch.setattr(progress, "_Task", Task)
    monkeypatch.setattr(speed.progress, "compiling", compiled.append)
    model, tokenizer = load_model(HF, init="random")[0], reverse_text.tokenizer()
    graphdef, state = nnx.split(model)
    # Lengths that no other test uses, because a process does not compile the same program twice.
    sampler = make_engine(graphdef, tokenizer, RolloutConfig(max_prompt_length=11, max_tokens_to_generate=7))
    with progress.shown(lines=False):
        requests = [Request([3, 4], 0, 3), Request([5], 1, 3)]
        list(sampler.generate(nnx.to_pure_dict(state), requests, jax.random.key(0), SamplingParams()))
    assert told[-1][:2] == ("sampling", "6/6") and "of 7 tokens" in told[-1][2]
    begun = [name for name in compiled if name]
    assert "decoding" in begun and "prefill" in begun and compiled.count(None) == len(begun)


def test_durations():
    assert [progress.duration(s) for s in (0.2, 59.4, 59.6, 245, 3845)] == ["0 s", "59 s", "1:00", "4:05", "1:04:05"]


@pytest.fixture
def cell(monkeypatch):
    """Simulates a notebook. Returns the outputs of the cell, `{id: [data, ...]}` with the oldest first."""
    outputs = {}

    def display(data, *, raw, display_id):
        assert raw and display_id not in outputs
        outputs[display_id] = [data]

    def update_display(data, *, metadata, raw, display_id):
        assert raw
        outputs[display_id].append(data)

    shell = types.SimpleNamespace(kernel=object())
    package, module = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    package.get_ipython, package.version_info = (lambda: shell), (9, 0)
    module.display, module.update_display = display, update_display
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return outputs


def test_a_notebook_has_curves_the_newest_step_the_newest_evaluation_and_the_progress(cell, clock, capsys):
    run = run_control(4)
    with contextlib.ExitStack() as stack:
        (curves,) = stack.enter_context(display.displayed([]))
        with progress.task("loading"):
            progress._SHOWN.tick()
        advance = stack.enter_context(progress.task("train", 4))
        curves.on_begin(run, [])
        for step in range(5):
            clock.now += 10
            evaluated = {"eval/pass@1": 0.25} if step % 2 == 0 else {}
            curves.on_row(run, {"step": step, "train/loss": step / 8} | evaluated)
            if step:
                advance(1)
            progress._SHOWN.tick()
        curves.on_end(run)
    figures, texts = cell.values()
    texts = [data["text/plain"] for data in texts]
    assert texts[1].startswith("loading")
    steps = [[line.split("  ")[0] for line in text.splitlines()] for text in texts]
    assert steps[-1] == ["train 4/4", "train 4/4, 50 s"]
    assert ["train 2/4", "train 3/4"] in [lines[:2] for lines in steps]
    assert base64.b64decode(figures[-1]["image/png"]).startswith(b"\x89PNG") and len(figures) > 2
    assert capsys.readouterr().out == ""


def test_a_terminal_shows_rows_unless_a_callback_shows_them(terminal):
    rows, run = [], run_control(4)
    with display.displayed([]) as callbacks:
        for callback in callbacks:
            callback.on_row(run, {"step": 1, "train/loss": 0.5})
    assert "train 1/4" in terminal.getvalue()
    with display.displayed([OnRow(rows.append)]) as callbacks:
        for callback in callbacks:
            callback.on_row(run, {"step": 2})
    assert rows == [{"step": 2}] and "train 2/4" not in terminal.getvalue()


def test_other_programs_see_nothing(capsys):
    with display.displayed([]) as callbacks, progress.task("train", 4):
        assert callbacks == []
    assert capsys.readouterr() == ("", "")
