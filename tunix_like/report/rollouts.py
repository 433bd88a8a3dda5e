"""Reads the completions that a run kept, of training and of evaluations, for the report page, up to a maximum size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunix_like.data.maze import grid_of
from tunix_like.errors import UserError
from tunix_like.storage import metrics
from tunix_like.storage.checkpoint_files import step_of
from tunix_like.tasks.maze import MOVES, walk

MOST_BYTES = 24_000_000
"""Maximum size in bytes of all completions in one report page. Each run of the page gets an equal part."""

FOLDERS = {"training": "rollouts", "held out": "rollouts/eval", "held out during SFT": "rollouts/sft_eval"}
"""Folders of a run with files `step_*.jsonl`, by the name that the page shows."""

_LETTERS = {step: name[0] for name, step in MOVES.items()}


def read_kept(run: Path, most_bytes: int) -> list[dict[str, Any]]:
    """Returns `{name, steps, left_out}` for each of `FOLDERS` that has files (see `read_steps`), with at most
    `most_bytes` in total."""
    kept = {name: run / folder for name, folder in FOLDERS.items() if any((run / folder).glob("step_*.jsonl"))}
    each = {name: read_steps(folder, most_bytes // len(kept)) for name, folder in kept.items()}
    return [{"name": name, "steps": steps, "left_out": left_out} for name, (steps, left_out) in each.items()]


def read_steps(folder: Path, most_bytes: int) -> tuple[list[dict[str, Any]], str]:
    """Returns a selection of the steps in a folder of completions, and a note on what is left out: the first step, the
    newest and evenly spread ones between them, as many as fit into `most_bytes`, or else the newest with its first
    prompts."""
    files = sorted(folder.glob("step_*.jsonl"))
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
    """Returns the first, the last and evenly spaced files, as many as fit into `most` bytes; at least the last."""
    for count in range(len(sizes), 1, -1):
        indices = [round(i * (len(sizes) - 1) / (count - 1)) for i in range(count)]
        if sum(sizes[index] for index in indices) <= most:
            return indices
    return [len(sizes) - 1]


def _size(group: Mapping[str, Any]) -> int:
    texts = [group["prompt"], *(text for completion in group["completions"] for text in _texts(completion))]
    return sum(len(text.encode(errors="replace")) for text in texts)


def _texts(completion: Mapping[str, Any]) -> list[str]:
    return [turn["text"] for turn in completion["turns"]] if "turns" in completion else [completion["text"]]


def _step_of(file: Path) -> int:
    number = file.stem.removeprefix("step_")
    step = step_of(number.lstrip("0") or number[:1])
    if step is None:
        raise UserError(f"{file}: expected step_<number>.jsonl; move the file out of the run's folder.")
    return step


def _groups(file: Path) -> list[dict[str, Any]]:
    groups: dict[int, dict[str, Any]] = {}
    for number, row in enumerate(metrics.objects(file), 1):
        try:
            group = groups.setdefault(row["problem"], _group(row))
            group["completions"].append(_completion(row, group))
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise UserError(f"{file}, line {number}: not a completion of a run ({error!r}); remove the line.") from None
    return list(groups.values())


def _group(row: Mapping[str, Any]) -> dict[str, Any]:
    group: dict[str, Any] = {"problem": int(row["problem"]), "prompt": _text(row["prompt"]), "completions": []}
    if "data_source" in row:
        group["source"] = _text(row["data_source"])
    if (grid := grid_of(group["prompt"])) is not None:
        group["grid"] = grid
    return group


def _completion(row: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a row of `step_*.jsonl` to the format of the page, without missing and default values."""
    text = _text(row["completion"])
    out: dict[str, Any] = {"text": text} if row.get("turns") is None else {"turns": _turns(row)}
    for name in ("reward", "advantage"):
        if (value := _number(row.get(name))) is not None:
            out[name] = value
    if row.get("length") is not None:
        out["length"] = int(row["length"])
    if "turns" in out and row.get("sampled") is not None:
        out["sampled"] = int(row["sampled"])
    if row.get("finished") is False:
        out["clipped"] = True
    if (shaped := _number(row.get("estimator_reward"))) not in (None, out.get("reward")):
        out["shaped"] = shaped
    if len(parts := dict(_parts(row))) > 1:
        out["parts"] = parts
    if "grid" in group:
        out["path"] = _path(group["grid"], text)
    return out


def _turns(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the messages of a trajectory; those of the model with the advantage of the turn and, if not only last
    turns have one, with its reward."""
    found = [_turn(turn) for turn in row["turns"]]
    own = [turn for turn in found if turn["role"] == "assistant"]
    rewards = row.get("turn_rewards") or ()
    advantages = row.get("turn_advantages") or ()
    shown = {"reward": rewards if any(rewards[:-1]) or advantages else (), "advantage": advantages}
    for name, values in shown.items():
        for turn, value in zip(own, values, strict=False):
            if (number := _number(value)) is not None:
                turn[name] = number
    return found


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    out = {"role": _text(turn["role"]), "text": _text(turn["content"])}
    return out | ({"name": turn["name"]} if isinstance(turn.get("name"), str) else {})


def _parts(row: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    for name, value in row.items():
        if name.startswith("reward/"):
            yield name.removeprefix("reward/"), _number(value)


def _path(grid: str, completion: str) -> str:
    """Returns the moves of a completion in the maze of its prompt, one letter each (U, D, L, R)."""
    cells = walk(grid, completion).cells
    steps = ((b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(cells))
    return "".join(_LETTERS[step] for step in steps)


def _number(value: Any) -> float | None:
    """Rounds to five significant digits; None if the number is missing or non-finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, not {value!r:.40}")
    return value
