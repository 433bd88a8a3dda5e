"""Tests rows that a reply restarts: each segment is the prompt and its own tokens, and the rest of a row is unchanged.

The full forward pass over each segment is the oracle.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.parameters import others_slow
from tests.rollout.test_sampler import WARM, chosen_logprobs
from tests.rollout.test_turns import MODELS, MOST, PROMPTS, ROUNDING, SIZE, VOCABULARY, Scripted, play
from tunix_like import UserError
from tunix_like.config.schema import MeshConfig
from tunix_like.models.sharding import build_mesh
from tunix_like.rollout import decoding, schedule, turns
from tunix_like.types import Completions, Reply


class Restarting(Scripted):
    """Restarts two of three rows, some of them twice, and some without an additional token."""

    def restarts(self, group: int, sample: int, turn: int) -> bool:
        return (group + sample + turn) % 3 > 0

    def replies(self, wait: bool) -> list[Reply]:
        def restarted(reply: Reply) -> Reply:
            turn = len(self.turns[reply.group, reply.sample])
            return reply._replace(restart=self.restarts(reply.group, reply.sample, turn))

        return [restarted(reply) for reply in super().replies(wait)]


class Opening(Restarting):
    """Adds tokens before the first turn, in some groups."""

    def opening(self, group: int, sample: int) -> list[int]:
        return [2, 4, 6][: group % 4]


class Always(Restarting):
    def restarts(self, group: int, sample: int, turn: int) -> bool:
        return True

    def reply(self, group: int, sample: int, turn: int) -> list[int] | None:
        return None if turn == 9 else [1, 2, 4]


def segment_logprobs(found: Completions, model: str) -> np.ndarray:
    """Returns log-probabilities of the plain model, computed with one row for each segment of each completion."""
    graphdef, params = MODELS[model]
    places = [
        (p, i, int(start))
        for p, i in np.ndindex(*found.lengths.shape)
        for start in np.unique(found.segment_start[p, i, : found.lengths[p, i]])
    ]
    rows = np.zeros((len(places), max(map(len, PROMPTS)) + MOST), np.int32)
    for row, (p, i, start) in zip(rows, places, strict=True):
        own = found.segment_start[p, i, : found.lengths[p, i]] == start
        tokens = [*PROMPTS[p], *found.tokens[p, i, : found.lengths[p, i]][own]]
        row[: len(tokens)] = tokens
    logits = np.asarray(jax.jit(lambda params, rows: nnx.merge(graphdef, params)(rows))(params, jnp.asarray(rows)))
    out = np.zeros((len(PROMPTS), SIZE, MOST, VOCABULARY), np.float32)
    for values, (p, i, start) in zip(logits, places, strict=True):
        place = start + np.flatnonzero(found.segment_start[p, i, start : found.lengths[p, i]] == start)
        out[p, i, place] = values[len(PROMPTS[p]) - 1 :][: len(place)]
    return chosen_logprobs(out, found.tokens, WARM.temperature)


@pytest.fixture(scope="module")
def steps() -> tuple[Completions, Restarting]:
    responder = Restarting()
    return play(responder), responder


def test_row_keeps_all_tokens_and_records_segment_starts(steps):
    found, responder = steps
    several = 0
    for index in np.ndindex(*found.lengths.shape):
        tokens, starts, start = [], [], 0
        for number, turn in enumerate(responder.turns[index]):
            if number:
                start = len(tokens) if responder.restarts(*index, number) else start
                tokens += responder.given[index][number - 1]
            tokens += turn
            starts += [start] * (len(tokens) - len(starts))
        assert found.tokens[index][: found.lengths[index]].tolist() == tokens
        assert found.segment_start[index][: len(tokens)].tolist() == starts
        several += len(set(starts)) > 2
    assert several, "some rows were restarted twice"


@pytest.mark.parametrize("rows", others_slow([None, 5], None))
def test_opening_precedes_the_first_turn(rows):
    """This includes completions that start after others have ended. The opening is not sampled."""
    found, responder = play(Opening(), max_concurrent_rows=rows), Opening()
    for p, i in np.ndindex(*found.lengths.shape):
        opening = responder.opening(p, i)
        assert found.tokens[p, i, : len(opening)].tolist() == opening
        assert found.token_mask[p, i, : len(opening) + 1].tolist() == [False] * len(opening) + [True]
    gap = np.abs(found.logprobs - segment_logprobs(found, "plain"))
    assert gap[found.token_mask].max() < 1e-4

    class Long(Opening):
        def opening(self, group: int, sample: int) -> list[int]:
            return [2] * MOST

    with pytest.raises(UserError, match=rf"max_tokens_to_generate={MOST}: {MOST} tokens precede the first turn"):
        play(Long())


@pytest.mark.slow
@pytest.mark.parametrize("model", others_slow(MODELS, "plain"))
def test_segment_logprobs_equal_the_full_forward_pass(monkeypatch, model):
    monkeypatch.setattr(schedule, "FIRST_CACHE", 16)
    monkeypatch.setattr(turns, "MOST_APPENDED", 16)
    found = play(Restarting(), model)
    assert found.segment_start is not None and (found.segment_start > 0)[found.token_mask].sum() > 50
    gap = np.abs(found.logprobs - segment_logprobs(found, model))
    assert gap[found.token_mask].max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "seed"), [(5, 1), (None, 0), (5, None)])
def test_tokens_do_not_depend_on_the_schedule(monkeypatch, steps, rows, seed):
    """Eager replies in any order, few rows at a time, and rows that are moved together give the same tokens."""
    monkeypatch.setattr(schedule, "FEWEST_TOKENS_LEFT", 1)
    monkeypatch.setattr(schedule, "FEWEST_ROWS", {"cpu": 1})
    monkeypatch.setattr(schedule, "FIRST_CACHE", 16)
    found = play(Restarting(lockstep=seed is None, seed=seed), max_concurrent_rows=rows)
    for name in ("tokens", "lengths", "finished", "token_mask", "segment_start"):
        np.testing.assert_array_equal(getattr(found, name), getattr(steps[0], name), err_msg=name)
    np.testing.assert_allclose(found.logprobs, steps[0].logprobs, atol=ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [[8, 1, 1], [2, 2, 2]])
def test_mesh_samples_the_same_tokens(steps, shape):
    found = play(Restarting(), mesh=build_mesh(MeshConfig(shape=shape, axis_names=["data", "fsdp", "tp"])))
    np.testing.assert_array_equal(found.tokens, steps[0].tokens)
    np.testing.assert_array_equal(found.segment_start, steps[0].segment_start)
    np.testing.assert_allclose(found.logprobs, steps[0].logprobs, atol=ROUNDING)


@pytest.mark.slow
def test_the_cache_holds_the_current_segment_and_the_prompt_is_prefilled_once(monkeypatch):
    """Rows are longer than the cache."""
    monkeypatch.setattr(schedule, "FIRST_CACHE", 16)
    rooms, prefilled = [], []
    append, prefill = decoding.append, decoding.prefill
    monkeypatch.setattr(decoding, "append", lambda *a, **k: rooms.append(a[3].room) or append(*a, **k))
    monkeypatch.setattr(decoding, "prefill", lambda *a, **k: prefilled.append(a) or prefill(*a, **k))
    found = play(Always())
    assert len(prefilled) == 1 and found.lengths.max() == MOST
    assert max(rooms) == 64, "the longest segment has 42 tokens"


@pytest.mark.slow
def test_without_a_restart_there_are_no_segments():
    class Never(Restarting):
        def restarts(self, group, sample, turn):
            return False

    found, expected = play(Never()), play(Scripted())
    assert found.segment_start is None
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
