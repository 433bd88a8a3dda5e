"""The completions that a run wrote, as groups for the page: which steps of them, their rewards, mazes and paths.

It knows the rows of `rollouts/step_*.jsonl` and how a page is kept to a size; it knows nothing of HTML.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunix_like.data.maze import grid_of
from tunix_like.errors import UserError
from tunix_like.rewards.maze import MOVES, walk
from tunix_like.storage import metrics

MOST_BYTES = 24_000_000
"""Of completions in one page, shared by its runs."""

_LETTERS = {step: name[0] for name, step in MOVES.items()}


def read_steps(run: Path, most_bytes: int) -> tuple[list[dict[str, Any]], str]:
    """Steps of a run with their groups, and what was left out, in words (nothing: all is there).

    The first, the newest and evenly spread steps between them, as many as their files have room for; of a newest step
    that has none alone, its first groups.

    Raises:
      UserError: a row that cannot be read (file and line are named).
    """
    files = sorted((run / "rollouts").glob("step_*.jsonl"))
    if not files:
        return [], "This run wrote no completions."
    sizes = [file.stat().st_size for file in files]
    chosen = _chosen(sizes, most_bytes)
    steps: list[dict[str, Any]] = [{"step": _step_of(files[i]), "groups": _groups(files[i])} for i in chosen]
    less = [f"{len(files) - len(chosen)} of {len(files)} written steps"] if len(chosen) < len(files) else []
    if sizes[chosen[-1]] > most_bytes:
        groups = steps[-1]["groups"]
        sums = itertools.accumulate(map(_size, groups))
        kept = max(1, sum(total <= most_bytes for total in sums))
        less += [f"{len(groups) - kept} of {len(groups)} prompts"] if kept < len(groups) else []
        steps[-1]["groups"] = groups[:kept]
    return steps, f"{' and '.join(less)} are left out to keep this page small." if less else ""


def _chosen(sizes: Sequence[int], most: int) -> list[int]:
    """Places of the largest evenly spread set of files with room in `most` bytes, both ends among them; at least the
    last."""
    for count in range(len(sizes), 1, -1):
        places = [round(i * (len(sizes) - 1) / (count - 1)) for i in range(count)]
        if sum(sizes[place] for place in places) <= most:
            return places
    return [len(sizes) - 1]


def _size(group: Mapping[str, Any]) -> int:
    texts = [group["prompt"], *(each["text"] for each in group["completions"])]
    return sum(len(text.encode(errors="replace")) for text in texts)


def _step_of(file: Path) -> int:
    number = file.stem.removeprefix("step_")
    if not number.isdigit():
        raise UserError(f"{file}: expected step_<number>.jsonl; move the file out of the run's folder.")
    return int(number)


def _groups(file: Path) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for number, row in enumerate(metrics.objects(file), 1):
        try:
            group = found.setdefault(row["problem"], _group(row))
            group["completions"].append(_completion(row, group))
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise UserError(f"{file}, line {number}: this is no completion of a run ({error!r}).") from None
    return list(found.values())


def _group(row: Mapping[str, Any]) -> dict[str, Any]:
    group: dict[str, Any] = {"problem": int(row["problem"]), "prompt": _text(row["prompt"]), "completions": []}
    if "data_source" in row:
        group["source"] = _text(row["data_source"])
    if (grid := grid_of(group["prompt"])) is not None:
        group["grid"] = grid
    return group


def _completion(row: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Keys whose value is missing or goes without saying are left out."""
    out: dict[str, Any] = {"text": _text(row["completion"])}
    for name in ("reward", "advantage"):
        if (value := _number(row.get(name))) is not None:
            out[name] = value
    if row.get("length") is not None:
        out["length"] = int(row["length"])
    if row.get("finished") is False:
        out["clipped"] = True
    if (shaped := _number(row.get("estimator_reward"))) not in (None, out.get("reward")):
        out["shaped"] = shaped
    if len(parts := dict(_parts(row))) > 1:
        out["parts"] = parts
    if "grid" in group:
        out["path"] = _path(group["grid"], out["text"])
    return out


def _parts(row: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    """What each reward function gave (None: could not score it)."""
    for name, value in row.items():
        if name.startswith("reward/"):
            yield name.removeprefix("reward/"), _number(value)


def _path(grid: str, completion: str) -> str:
    """The moves that a completion makes inside its maze, a letter each (U, D, L, R)."""
    cells = walk(grid, completion).cells
    steps = ((b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(cells))
    return "".join(_LETTERS[step] for step in steps)


def _number(value: Any) -> float | None:
    """To five digits; None where it is missing or not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, not {value!r:.40}")
    return value
