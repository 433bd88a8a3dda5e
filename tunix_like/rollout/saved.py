"""Converts collected groups to text for a checkpoint, and back."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from tunix_like.rewards import Scores
from tunix_like.rollout.collection import Collected
from tunix_like.rollout.episodes import Episode
from tunix_like.rollout.rollouts import Rollout
from tunix_like.types import Completions, Problem


def to_text(collected: Sequence[tuple[dict[str, Any], Collected]]) -> str:
    """Returns JSON with groups, their metrics, and a dict of the caller for each. The columns and the source of a
    problem are not saved, because data can contain objects of any type."""
    return json.dumps([[about, metrics, _plain(rollout)] for about, (rollout, metrics) in collected], default=_packed)


def from_text(text: str) -> list[tuple[dict[str, Any], Collected]]:
    """Returns the argument of `to_text`, with problems that have no columns and no source."""
    parts = json.loads(text, object_hook=_unpacked)
    return [(about, (_rollout(**plain), metrics)) for about, metrics, plain in parts]


def _plain(rollout: Rollout) -> dict[str, Any]:
    problems = [(problem.number, problem.text, list(map(int, problem.tokens))) for problem in rollout.problems]
    return rollout._asdict() | {"problems": problems, "scores": vars(rollout.scores)}


def _rollout(problems: Any, texts: Any, completions: Any, scores: Any, episodes: Any) -> Rollout:
    return Rollout(
        [Problem(number, text, tokens, {}) for number, text, tokens in problems],
        texts,
        Completions(*completions),
        Scores(**{"failed": np.isnan(scores["total"]), **scores}),  # checkpoints before this field lack it
        None if episodes is None else [Episode(*fields) for fields in episodes],
    )


def _packed(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    assert isinstance(value, np.ndarray), type(value)
    data = base64.b64encode(zlib.compress(np.ascontiguousarray(value).tobytes(), 1)).decode()
    return {"dtype": value.dtype.str, "shape": value.shape, "data": data}


def _unpacked(value: dict[str, Any]) -> Any:
    if value.keys() != {"dtype", "shape", "data"}:
        return value
    data = zlib.decompress(base64.b64decode(value["data"]))
    return np.frombuffer(data, value["dtype"]).reshape(value["shape"]).copy()
