"""Tests that groups in a checkpoint are restored exactly."""

import dataclasses

import numpy as np

from tunix_like.rewards import Scores
from tunix_like.rollout.episodes import Episode
from tunix_like.rollout.rollouts import Rollout
from tunix_like.rollout.saved import from_text, to_text
from tunix_like.types import Completions, Problem


def test_groups_are_restored_exactly():
    """NaN, missing parts, types of arrays and random last bits are kept. Columns and sources are left to the data."""
    random = np.random.default_rng(0)
    shape = 2, 3, 5
    completions = Completions(
        random.integers(0, 9, shape).astype(np.int32),
        random.integers(1, 6, shape[:2]).astype(np.int32),
        random.normal(size=shape).astype(np.float32),
        random.random(shape[:2]) < 0.5,
        np.moveaxis(random.random((5, 3, 2)) < 0.5, 0, 2).swapaxes(0, 1),  # not contiguous
    )
    flags = random.random(6) < 0.5
    scores = Scores(
        np.array([np.nan, *random.normal(size=5)]), {"f": random.normal(size=6)}, flags, flags, ~flags, "why"
    )
    episodes = [Episode([{"role": "user", "content": "ä"}], 2, True, 0, np.float64(0.1), {"x": np.nan}, None)] * 6
    problems = [Problem(7, "ab", [3, 4], {"answer": object()}, "ab"), Problem(9, "c", [5], {}, None)]
    metrics = {"a": np.float32(0.1), "pass_rate/drawn": [0.0, 1.0], "b": float("nan")}
    rollout = Rollout(problems, ["x"] * 6, completions, scores, episodes)
    for given in (rollout, rollout._replace(episodes=None)):
        [(about, (found, back))] = from_text(to_text([({"step": 3}, (given, metrics))]))
        assert about == {"step": 3}
        np.testing.assert_equal(back, metrics)
        assert [(p.number, p.text, p.tokens, p.columns) for p in found.problems] == [
            (7, "ab", [3, 4], {}), (9, "c", [5], {}),
        ]  # fmt: skip
        for one, two in zip(found.completions, completions, strict=True):
            np.testing.assert_array_equal(one, two)
            assert one is None or (one.dtype == two.dtype and one.flags.writeable)
        np.testing.assert_equal(dataclasses.asdict(found.scores), dataclasses.asdict(scores))
        np.testing.assert_equal(found.episodes, given.episodes)
        assert found.texts == given.texts
