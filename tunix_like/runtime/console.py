"""Prints the console output of a run: one line per step, tables, and text with control characters escaped.

The line of a step contains only the metrics that were computed in this step.
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
        """Raises the BrokenPipeError again. The overridden method of rich would exit the process without a message."""
        raise


_CONSOLE = _Console(highlight=False, emoji=False)
_LOG_WIDTH = 140  # width in characters if the output is not a terminal
_EXCERPT_LINES = 20
_last_printed = 0.0


def silence() -> None:
    """Disables all output of this module. In a run of several processes, all except process 0 call this function."""
    _CONSOLE.quiet = True


def print_text(text: str) -> None:
    """Prints an escaped text without markup or wrapping, above the progress line if there is one."""
    global _last_printed
    _last_printed = time.monotonic()
    _CONSOLE.print(visible(text), markup=False, soft_wrap=True)
    output.check()


def print_completion(text: str) -> None:
    """Prints a completion: escaped with `visible` on a terminal, unchanged to a file or a pipe."""
    print(visible(text) if sys.stdout.isatty() else text)


def step_line(name: str, step: int, total: int | None, metrics: Mapping[str, Any]) -> str:
    """Formats the metrics of a step of `train` or `sft` as one line; `total` is the number of steps, if known."""
    numbers = {key.removeprefix(f"{name}/"): value for key, value in metrics.items() if _is_number(value)}
    parts = [f"{name} {step}" if total is None else f"{name} {step:{len(str(total))}d}/{total}"]
    parts += [
        f"{label} {form.format(numbers[key])}"
        for key, label, form in (
            ("rewards/mean", "reward", "{:.3f}"),
            ("pass@1", "pass@1", "{:.1%}"),
            ("rewards/accuracies", "accuracy", "{:.1%}"),
            ("completions/mean_length", "length", "{:.1f}"),
            ("turns/mean", "turns", "{:.1f}"),
            ("completions/clipped_ratio", "clipped", "{:.0%}"),
            ("reward/unscored_frac", "unscored", "{:.0%}"),
            ("reward/timeout_frac", "late", "{:.0%}"),
            ("reward/error_frac", "failed", "{:.0%}"),
            ("loss", "loss", "{:.4g}"),
            ("perf/generation_tokens_per_sec", "tok/s", "{:,.0f}"),
        )
        if key in numbers and (numbers[key] or not key.startswith("reward/"))
    ]
    if "step_time_sec" in numbers:
        parts.append(f"{numbers['step_time_sec']:.2f} s{_time_shares(numbers)}")
    accuracy = numbers.get("eval/rewards/accuracies")
    parts += [] if accuracy is None else [f"eval/accuracy {accuracy:.1%}"]
    passes = [f"{key} {value:.1%}" for key, value in numbers.items() if key.startswith("eval/pass@")]
    if passes and (number := evaluated_samples(numbers)) is not None:
        passes.append(f"({samples_each(number)})")  # SFT evaluates one sample, RL evaluates eval.samples
    return "  ".join(parts + passes)


def row_line(row: Mapping[str, Any], total: int | None) -> str:
    """Formats a row of metrics, of SFT or of RL, as the line of its step."""
    name, step = ("train", row["step"]) if "step" in row else ("sft", row["sft/step"])
    return step_line(name, step, total, row)


def is_shown(row: Mapping[str, Any], total: int | None) -> bool:
    """Returns whether a row of metrics gets a line: all of RL; of SFT every 25th step, the last, and evaluations."""
    step = row.get("sft/step")
    return step is None or step % 25 == 0 or step == total or "sft/eval/pass@1" in row


def speed(tokens: float, seconds: float) -> str:
    """Formats the number of sampled tokens and the time that they took."""
    rate = f"{tokens / seconds:,.0f} tokens/s without compilation"
    return f"{tokens:,.0f} token{'s' * (tokens != 1)} in {seconds:.1f} s, {rate}"


def samples_each(number: int) -> str:
    return f"{number} sample{'s' * (number != 1)} each"


def evaluated_samples(metrics: Mapping[str, Any]) -> int | None:
    """Returns the number of samples per problem: the n in the name of the metric `eval/avg@n`."""
    return next((int(name.removeprefix("eval/avg@")) for name in metrics if name.startswith("eval/avg@")), None)


def problems(number: int, skipped: int, name: str = "problems") -> str:
    return f"{number} {name}" + (f" ({skipped} prompt{'s' * (skipped != 1)} skipped)" if skipped else "")


def figure(name: str, value: Any, low: Any = None, high: Any = None) -> str:
    """Formats a metric for a table: an int in full, a ratio in percent, any other number to three digits, with the ends
    of its interval: `61.2% [58.7, 63.6]`."""
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
    """Returns the table cell of each metric `eval/<name>`, with its interval from `eval/low/<name>` and
    `eval/high/<name>`."""
    values = {key.removeprefix("eval/"): value for key, value in metrics.items() if key.startswith("eval/")}
    return {
        name: figure(name, value, values.get(f"low/{name}"), values.get(f"high/{name}"))
        for name, value in values.items()
        if not name.startswith(("low/", "high/"))
    }


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, texts: Collection[str] = ()) -> None:
    """Prints a table. A column is aligned right if all its cells begin like numbers and its name is not in `texts`."""
    cells = [[visible(str(cell)) for cell in row] for row in rows]
    grid = rich.table.Table(box=rich.box.HEAVY_HEAD if _has_box_characters() else rich.box.ASCII)
    for index, column in enumerate(columns):
        numeric = column not in texts and all(row[index].lstrip("+-.")[:1].isdigit() for row in cells)
        grid.add_column(rich.text.Text(visible(column)), justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        grid.add_row(*map(rich.text.Text, row))
    console = _CONSOLE
    if not _is_on_terminal():
        console = _Console(width=_LOG_WIDTH, quiet=_CONSOLE.quiet, emoji=False)
    print_text(title)  # a title of the rich table would be wrapped to the width of the table
    console.print(grid)
    output.check()


def excerpt(text: str, most: int) -> str:
    """Shortens and escapes untrusted text for the screen.

    Line breaks are kept; tabs and non-printable characters are escaped (`\\x1b`). The middle of a text with more than
    `most` characters or 20 lines is omitted.
    """
    ends = [text]
    if len(text) > most or text.count("\n") >= _EXCERPT_LINES:
        half, lines = most // 2, _EXCERPT_LINES // 2
        ends = ["\n".join(text[:half].split("\n")[:lines]), "\n".join(text[-half:].split("\n")[-lines:])]
    omitted = len(text) - sum(map(len, ends))
    return f" ... [{omitted} characters] ... ".join(visible(end).replace("\t", "\\t") for end in ends)


def has_bottom_line() -> bool:
    """Returns whether a progress line can be shown below the output."""
    return _is_on_terminal() and _has_box_characters() and not _CONSOLE.is_dumb_terminal and not _CONSOLE.quiet


def in_notebook() -> bool:
    """Returns whether the code runs in a cell of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


def terminal() -> rich.console.Console:
    """Returns the console (of the package rich) that shows the output of the run."""
    return _CONSOLE


def last_printed() -> float:
    """Returns the `time.monotonic` time of the last call of `print_text`; 0 if there was no call."""
    return _last_printed


class LogHandler(logging.Handler):
    """Writes log records to the current `sys.stderr`, so that the records appear above a progress line."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(visible(self.format(record)), file=sys.stderr)
        except Exception:
            self.handleError(record)


def _is_on_terminal() -> bool:
    """FORCE_COLOR makes rich treat any file as a terminal, but only a real one can overwrite a line."""
    return _CONSOLE.is_terminal and _CONSOLE.file.isatty()


def _has_box_characters() -> bool:
    return (getattr(_CONSOLE.file, "encoding", None) or "utf-8").lower().startswith("utf")


def _time_shares(metrics: Mapping[str, float]) -> str:
    """Formats the share of each activity in the step time, largest first, from 5% on."""
    whole = metrics["step_time_sec"]
    shares = {key.removeprefix("time/"): value / whole for key, value in metrics.items() if key.startswith("time/")}
    shown = [f"{key} {share:.0%}" for key, share in sorted(shares.items(), key=lambda item: -item[1]) if share >= 0.05]
    return f" ({', '.join(shown)})" if shown else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
