"""The report of `benchmarks.accelerator`: a table of the stages, and their results with the wanted ranges."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

WANTED: dict[str, tuple[float, float]] = {
    "parity.logits.relative": (0.0, 0.05),
    "parity.attention.relative": (0.0, 0.05),
    "parity.logprobs.mean": (0.0, 0.02),
    "parity.gradients.relative": (0.0, 0.05),
    "update.mfu": (0.45, math.inf),
    "decode.memory_share": (0.6, math.inf),
    "memory.update.ratio": (0.9, 1.1),
    "memory.decode.ratio": (0.9, 1.1),
}
"""Smallest and largest wanted value by stage and name; those of speed are for an H200 at the size of Qwen3-0.6B."""


def write_report(file: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Writes the report of these lines of `results.jsonl`."""
    text = ["# Accelerator battery", "", "| stage | status | seconds | limit |", "|---|---|---|---|"]
    text += [f"| {line['stage']} | {line['status']} | {line['seconds']:g} | {line['limit']:g} |" for line in lines]
    for line in lines:
        text += ["", f"## {line['stage']}", ""]
        values = list(flat(line["found"]))
        if values:
            text += ["| value | found | wanted |", "|---|---|---|"]
            text += [f"| {name} | {shown(value)} | {wanted(line, name, value)} |" for name, value in values]
        if line["error"]:
            text += ["", "```", line["error"], "```"]
    file.write_text("\n".join(text) + "\n", encoding="utf-8")


def flat(found: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of nested mappings with names joined by dots."""
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def shown(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "/").replace("\n", " ")


def wanted(line: Mapping[str, Any], name: str, value: Any) -> str:
    """Returns the wanted range of a value and whether it is met. The result is empty for other values, and on the
    CPU."""
    limits = WANTED.get(f"{line['stage']}.{name}")
    if limits is None or line["size"] == "tiny" or not isinstance(value, float):
        return ""
    low, high = limits
    text = f">= {low:g}" if high == math.inf else f"<= {high:g}" if low == 0 else f"{low:g} to {high:g}"
    return f"{text}: {'met' if low <= value <= high else 'missed'}"
