"""What a run says: one readable line a step, small tables, texts that cannot command the terminal.

Knows rich, the terminal and how to abbreviate. Does NOT know where numbers come from: an absent metric is left out.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import rich.box
import rich.console
import rich.table
import rich.text

from tunix_like.runtime import output
from tunix_like.runtime.visible import visible


class _Console(rich.console.Console):
    def on_broken_pipe(self) -> None:
        """Raises the BrokenPipeError again. rich itself would end the process without a word."""
        raise


_CONSOLE = _Console(highlight=False, emoji=False)
_LOG_WIDTH = 140  # columns where there is no terminal to ask
_EXCERPT_LINES = 20
_said = 0.0


def silence() -> None:
    """Prints nothing from here on: in a run of several processes one does the talking."""
    _CONSOLE.quiet = True


def say(text: str) -> None:
    """Prints a text without markup and wrapping, above the line at the bottom if there is one. What does not print is
    written by its number (`visible`)."""
    global _said
    _said = time.monotonic()
    _CONSOLE.print(visible(text), markup=False, soft_wrap=True)
    output.check()


def print_completion(text: str) -> None:
    """Prints what a model wrote: on a terminal with `visible`, into a file or a pipe as it is."""
    print(visible(text) if sys.stdout.isatty() else text)


def step_line(name: str, step: int, total: int | None, metrics: Mapping[str, Any]) -> str:
    """A step in one line: rewards, success, length, loss, speed, where the time went, evaluation.

    Args:
      name: the phase (`train`, `sft`); metrics may carry it as a prefix.
      step: its number, from 1.
      total: how many steps there will be; None: not known.
      metrics: a row of `metrics.jsonl`. Times are in seconds, ratios between 0 and 1.
    """
    known = {key.removeprefix(f"{name}/"): value for key, value in metrics.items() if _is_number(value)}
    parts = [f"{name} {step}" if total is None else f"{name} {step:{len(str(total))}d}/{total}"]
    parts += [
        f"{label} {form.format(known[key])}"
        for key, label, form in (
            ("rewards/mean", "reward", "{:.3f}"),
            ("pass@1", "pass@1", "{:.1%}"),
            ("completions/mean_length", "length", "{:.1f}"),
            ("completions/clipped_ratio", "clipped", "{:.0%}"),
            ("reward/unscored_frac", "unscored", "{:.0%}"),
            ("reward/timeout_frac", "late", "{:.0%}"),
            ("reward/error_frac", "failed", "{:.0%}"),
            ("loss", "loss", "{:.4g}"),
            ("perf/generation_tokens_per_sec", "tok/s", "{:,.0f}"),
        )
        if key in known and (known[key] or not key.startswith("reward/"))
    ]
    if "step_time_sec" in known:
        parts.append(f"{known['step_time_sec']:.2f} s{_split(known)}")
    parts += [f"{key} {value:.1%}" for key, value in known.items() if key.startswith("eval/pass@")]
    return "  ".join(parts)


def samples_each(number: int) -> str:
    return f"{number} sample{'s' * (number != 1)} each"


def problems(number: int, skipped: int, name: str = "problems") -> str:
    """How many problems were evaluated, and how many prompts were skipped if any were."""
    return f"{number} {name}" + (f" ({skipped} prompt{'s' * (skipped != 1)} skipped)" if skipped else "")


def figure(name: str, value: Any, low: Any = None, high: Any = None) -> str:
    """A metric for a table: a count (an int) in full, a share in percent, any other number to three digits.

    Where both ends of its interval are known they follow: `61.2% [58.7, 63.6]`.
    """
    if not _is_number(value):
        return "-"
    share = ("@" in name and not name.startswith("avg@")) or name.endswith(("_frac", "_ratio"))
    if isinstance(value, int):
        return str(value)
    ends = ""
    if _is_number(low) and _is_number(high):
        ends = f" [{low * 100:.1f}, {high * 100:.1f}]" if share else f" [{low:.3g}, {high:.3g}]"
    return (f"{value:.1%}" if share else f"{value:.3g}") + ends


def evaluation_cells(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Of metrics `eval/<name>` a cell each by name, in their order; `eval/low/<name>` and `eval/high/<name>` are the
    ends of an interval."""
    found = {key.removeprefix("eval/"): value for key, value in metrics.items() if key.startswith("eval/")}
    return {
        name: figure(name, value, found.get(f"low/{name}"), found.get(f"high/{name}"))
        for name, value in found.items()
        if not name.startswith(("low/", "high/"))
    }


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, texts: Collection[str] = ()) -> None:
    """Prints a table; a column whose cells all start like numbers is aligned to the right, unless `texts` names it."""
    cells = [[visible(str(cell)) for cell in row] for row in rows]
    shown = rich.table.Table(box=rich.box.HEAVY_HEAD if _draws_lines() else rich.box.ASCII)
    for index, column in enumerate(columns):
        numeric = column not in texts and all(row[index].lstrip("+-.")[:1].isdigit() for row in cells)
        shown.add_column(rich.text.Text(visible(column)), justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        shown.add_row(*map(rich.text.Text, row))
    console = _CONSOLE
    if not _is_on_terminal():
        console = _Console(width=_LOG_WIDTH, quiet=_CONSOLE.quiet, emoji=False)
    say(title)  # not the table's own, which would be wrapped to its width
    console.print(shown)
    output.check()


def excerpt(text: str, most: int) -> str:
    """A text of foreign origin for the screen: line breaks stay, tabs and whatever does not print are written by their
    numbers (`\\x1b`), and of more than `most` characters, or 20 lines, the middle is left out."""
    ends = [text]
    if len(text) > most or text.count("\n") >= _EXCERPT_LINES:
        half, lines = most // 2, _EXCERPT_LINES // 2
        ends = ["\n".join(text[:half].split("\n")[:lines]), "\n".join(text[-half:].split("\n")[-lines:])]
    left_out = len(text) - sum(map(len, ends))
    return f" ... [{left_out} characters] ... ".join(visible(end).replace("\t", "\\t") for end in ends)


def has_bottom_line() -> bool:
    """Whether a line can stand below what is printed."""
    return _is_on_terminal() and _draws_lines() and not _CONSOLE.is_dumb_terminal and not _CONSOLE.quiet


def terminal() -> rich.console.Console:
    """What everything here is printed on."""
    return _CONSOLE


def last_said() -> float:
    """When something was printed last, by `time.monotonic`; 0: nothing yet."""
    return _said


class LogHandler(logging.Handler):
    """Log records to what is standard error at the time: where a line stands at the bottom, they go above it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(visible(self.format(record)), file=sys.stderr)
        except Exception:
            self.handleError(record)


def _is_on_terminal() -> bool:
    """FORCE_COLOR makes a terminal of any file for rich; a line that is overwritten is of use on a real one alone."""
    return _CONSOLE.is_terminal and _CONSOLE.file.isatty()


def _draws_lines() -> bool:
    """Whether the encoding of the output has the characters that lines are drawn with."""
    return (getattr(_CONSOLE.file, "encoding", None) or "utf-8").lower().startswith("utf")


def _split(known: Mapping[str, float]) -> str:
    """Shares of the step's time, largest first; small ones are left out, so that the line stays a line."""
    whole = known["step_time_sec"]
    shares = {key.removeprefix("time/"): value / whole for key, value in known.items() if key.startswith("time/")}
    shown = [f"{key} {share:.0%}" for key, share in sorted(shares.items(), key=lambda item: -item[1]) if share >= 0.05]
    return f" ({', '.join(shown)})" if shown else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
