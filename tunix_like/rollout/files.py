"""Writes the completions of a step to files, and reports reward functions that fail."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from tunix_like.data.source import SOURCE_COLUMN
from tunix_like.errors import EngineLost, UserError
from tunix_like.rewards import Scores
from tunix_like.rollout.episodes import REWARD
from tunix_like.rollout.rollouts import Rollout, segment_starts
from tunix_like.types import GroupBatch, Problem

logger = logging.getLogger("tunix_like")


def write_rollouts(
    folder: Path, step: int, problems: Sequence[Problem], texts: Sequence[str], columns: dict[str, Any]
) -> Path:
    """Writes one line of JSON per completion to `folder/step_<n>.jsonl`, and returns the path of the file.

    Each line has the step, `Problem.number`, the index of the completion among the completions of its prompt, the data
    source (if the problem has one), the prompt, the completion and its value of each entry of `columns`.

    Args:
      columns: further values of the completions, by name: a list or an array of `P * G` values, or an array of shape
        `[P, G]`, for `P` prompts with `G` completions each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"step_{step:06d}.jsonl"
    size = len(texts) // len(problems)
    flat = {
        name: values if isinstance(values, list) else np.asarray(values).reshape(-1).tolist()
        for name, values in columns.items()
    }
    with file.open("w", encoding="utf-8") as out:
        for index, text in enumerate(texts):
            problem = problems[index // size]
            row: dict[str, Any] = {"step": step, "problem": problem.number, "sample": index % size}
            if isinstance(source := problem.columns.get(SOURCE_COLUMN), str):
                row["data_source"] = source
            row |= {"prompt": problem.text, "completion": text}
            row |= {name: _plain(values[index]) for name, values in flat.items()}
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
    return file


class RolloutFiles:
    """Writes the completions of training steps to `folder` (unless it is None). Only the first failed write of a run is
    a warning, so that a full disk does not flood the log."""

    def __init__(self, folder: Path | None):
        self.folder = folder
        self._warned = False

    def write(
        self,
        step: int,
        rollout: Rollout,
        batch: GroupBatch,
        advantages: Float[np.ndarray, "P G"],
        of_turns: list[list[float]] | None = None,
    ) -> None:
        """Writes the completions of a step. `of_turns`: the advantages of the turns of each trajectory."""
        if self.folder is None:
            return
        columns = _columns(rollout) | {"estimator_reward": np.where(batch.scored, batch.rewards, np.nan)}
        columns |= {"advantage": advantages} | ({} if of_turns is None else {"turn_advantages": of_turns})
        try:
            write_rollouts(self.folder, step, rollout.problems, rollout.texts, columns)
        except OSError as error:
            if not self._warned:
                logger.warning("%s: cannot write the completions of step %d (%s)", self.folder, step, error)
            self._warned = True


def _columns(rollout: Rollout) -> dict[str, Any]:
    """Returns the values of each completion by name: rewards, lengths, turns."""
    columns: dict[str, Any] = {"reward": rollout.scores.total, "length": rollout.completions.lengths}
    columns |= {"finished": rollout.completions.finished}
    columns |= {f"reward/{name}": values for name, values in rollout.scores.by_function.items()}
    if rollout.episodes is not None:
        columns |= {"sampled": rollout.sampled_lengths, "turns": [e.messages for e in rollout.episodes]}
        for name in ("turn_rewards", "turn_states", "turn_potentials"):
            rows = [getattr(episode, name) for episode in rollout.episodes]
            if name == "turn_rewards" or any(map(any, rows)):
                columns[name] = [[None if value != value else value for value in row] for row in rows]
        if any(episode.failure is not None for episode in rollout.episodes):
            columns["failure"] = [None if e.failure is None else _written(e.failure[1]) for e in rollout.episodes]
    if rollout.completions.segment_start is not None:
        columns["segments"] = segment_starts(rollout.completions)
    return columns


def write_evaluation(folder: Path, step: int, parts: Sequence[Rollout]) -> None:
    """Writes the completions of an evaluation as one file. A failed write is a warning."""
    found = [
        {name: values if isinstance(values, list) else values.reshape(-1).tolist() for name, values in columns.items()}
        for columns in map(_columns, parts)
    ]
    none = [[None] * len(part.texts) for part in parts]  # only some batches may have segments
    columns = {
        name: [value for each, missing in zip(found, none, strict=True) for value in each.get(name, missing)]
        for name in dict.fromkeys(itertools.chain.from_iterable(found))
    }
    problems = [problem for part in parts for problem in part.problems]
    try:
        write_rollouts(folder, step, problems, [text for part in parts for text in part.texts], columns)
    except OSError as error:
        logger.warning("%s: cannot write the completions of the evaluation at step %d (%s)", folder, step, error)


@contextlib.contextmanager
def saved_on_failure(
    folder: Path | None, step: int, problems: Sequence[Problem], texts: Sequence[str]
) -> Iterator[None]:
    """Writes the completions to `folder` (unless it is None) if the body raises a UserError, and names the file in its
    message. If the write fails, a warning is logged and the original error is raised."""
    try:
        yield
    except UserError as error:
        if folder is None:
            raise
        try:
            file = write_rollouts(folder, step, problems, texts, {})
        except OSError as full:
            logger.warning("%s: cannot write the completions of step %d (%s)", folder, step, full)
            raise error from None
        kind = EngineLost if isinstance(error, EngineLost) else UserError
        raise kind(f"{error} The completions are in {file}.") from error


class FirstFailure:
    """Logs the full text of the first failure of a reward function or an environment in a run."""

    def __init__(self) -> None:
        self._shown = False

    def __call__(self, scores: Scores, folder: Path | None) -> None:
        """Logs `scores.first_failure`, and writes it to `folder/reward_failure.txt` (unless `folder` is None)."""
        if scores.first_failure is None or self._shown:
            return
        self._shown = True
        text = _written(scores.first_failure)
        note = ""
        if folder is not None:
            file = folder / "reward_failure.txt"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                file.write_text(text + "\n", encoding="utf-8")
                note = f" It is also in {file}."
            except OSError as error:
                note = f" It could not be written to {file} ({error})."
        logger.warning(
            "%d of %d completions are unscored because a reward function or environment failed. Only the first failure "
            "is shown; the metrics timeout_frac and error_frac count all of them.%s\n%s",
            int((scores.timeouts | scores.errors).sum()),
            len(scores.total),
            note,
            text,
        )


def nothing_scored_message(scores: Scores) -> str:
    """Returns the message of the error that is raised if no completion has a reward."""
    where = "the environment and rewards.functions" if REWARD in scores.by_function else "rewards.functions"
    if scores.first_failure is None:
        return f"no completion could be scored: every reward is None or NaN. Check {where}."
    return f"no completion could be scored; check {where}. The first failure: {scores.first_failure}\n"


def remove_steps_after(folder: Path, last: int) -> None:
    """Removes the files `step_<n>.*` and `step_<n>_*` of the steps after `last`, which a resumed run writes again."""
    for file in folder.glob("step_*"):
        if int(file.stem.split("_")[1]) > last:
            file.unlink()


def _written(text: str) -> str:
    """Returns a text with escapes for lone surrogates, which a file cannot hold."""
    return text.encode("utf-8", "backslashreplace").decode()


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and value != value else value
