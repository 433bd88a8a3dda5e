"""Every row of every group goes into a micro-batch exactly once, with its own prompt, and comes back to its place."""

from __future__ import annotations

import numpy as np
import pytest

from tunix_like.rl.packing import pack, split_shape, unpack
from tunix_like.types import GroupBatch

PROMPTS, SIZE, STEPS = 4, 5, 3


def make_batch() -> GroupBatch:
    """Every number names its place: token `t` of completion `i` of group `p` is `100 p + 10 i + t`."""
    p, i, t = np.ogrid[:PROMPTS, :SIZE, :STEPS]
    names = (100 * p + 10 * i + t).astype(np.int32)
    return GroupBatch(
        prompt_tokens=np.arange(PROMPTS, dtype=np.int32)[:, None] + np.zeros(6, np.int32),
        prompt_lengths=np.arange(1, PROMPTS + 1, dtype=np.int32),
        completion_tokens=names,
        completion_lengths=1 + (p + i)[..., 0].astype(np.int32) % STEPS,
        rollout_logprobs=names.astype(np.float32) / 500,
        rewards=np.zeros((PROMPTS, SIZE), np.float32),
        scored=np.ones((PROMPTS, SIZE), bool),
    )


@pytest.mark.parametrize(
    ("generations", "micro_batch", "expected"),
    [
        (8, None, (1, 8)),  # one whole group
        (8, 8, (1, 8)),
        (8, 16, (2, 8)),
        (8, 23, (2, 8)),  # whole groups only
        (8, 1000, (6, 8)),  # never more prompts than there are
        (8, 7, (1, 4)),  # even parts
        (8, 4, (1, 4)),
        (8, 3, (1, 3)),
        (8, 1, (1, 1)),
        (5, 4, (1, 3)),
        (1, 4, (4, 1)),
    ],
)
def test_split_shape(generations, micro_batch, expected):
    assert split_shape(generations, micro_batch, 6) == expected


def test_split_shape_gives_every_device_as_many_prompts():
    assert split_shape(8, None, 6, device_parts=4) == (4, 8)
    assert split_shape(8, 40, 6, device_parts=4) == (8, 8)
    assert split_shape(8, 3, 6, device_parts=2) == (2, 3)


def rows_of(*groups: int) -> np.ndarray:
    """All completions of these groups."""
    return np.isin(np.arange(PROMPTS), groups)[:, None] & np.ones(SIZE, bool)


ROWS = {
    "all": rows_of(*range(PROMPTS)),
    "one group": rows_of(2),
    "two groups": rows_of(1, 3),
    "some of each": np.array([[1, 0, 0, 1, 1], [0, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 1, 0, 1]], bool),
    "one": rows_of(3) & (np.arange(SIZE) == 4),
    "none": rows_of(),
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("shape", [(1, SIZE), (2, SIZE), (3, SIZE), (1, 2), (2, 2), (1, 3), (4, 1), (8, SIZE)], ids=str)
def test_pack_and_unpack(shape, rows):
    batch = make_batch()
    names = batch.completion_tokens
    old = names.astype(np.float32) / 1000
    micro = pack(batch, rows, shape, old_logprobs=old, ref_logprobs=old + 1)
    assert micro.tokens.shape[1:] == (*shape, STEPS)
    parts = sum(-(-live // shape[1]) for live in rows.sum(axis=1))
    assert len(micro.tokens) == max(1, -(-parts // shape[0])), "no more micro-batches than the live rows need"
    seen = []
    for place in zip(*np.nonzero(micro.lengths), strict=True):
        group, sample = micro.group[place[:2]], micro.sample[place]
        seen.append((group, sample))
        assert micro.lengths[place] == batch.completion_lengths[group, sample]
        np.testing.assert_array_equal(micro.tokens[place], names[group, sample])
        np.testing.assert_array_equal(micro.rollout_logprobs[place], batch.rollout_logprobs[group, sample])
        np.testing.assert_array_equal(micro.old_logprobs[place], old[group, sample])
        np.testing.assert_array_equal(micro.ref_logprobs[place], old[group, sample] + 1)
        assert micro.prompt_lengths[place[:2]] == batch.prompt_lengths[group]
        np.testing.assert_array_equal(micro.prompt_tokens[place[:2]], batch.prompt_tokens[group])
    assert sorted(seen) == [tuple(place) for place in np.argwhere(rows)], "each row once"
    assert (micro.prompt_lengths > 0).all(), "padding rows still go through the model"
    results = np.where(micro.lengths[..., None] > 0, micro.tokens, -1)  # what padding rows yield must go nowhere
    expected = np.where(rows[..., None], names, 0)
    np.testing.assert_array_equal(unpack(results, micro, (PROMPTS, SIZE)), expected)


@pytest.mark.parametrize(
    ("rows", "shape", "room", "count"),
    [
        (rows_of(1), (2, SIZE), 4, 2),
        (rows_of(0, 3), (1, SIZE), 3, 3),
        (rows_of(2), (1, 2), 2, 6),
        (rows_of(), (2, SIZE), 3, 2),
        (rows_of(1, 2), (1, SIZE), 1, 2),
        (ROWS["some of each"], (1, SIZE), 4, 4),
        (ROWS["some of each"], (2, 2), 4, 6),
        (ROWS["one"], (1, 2), 1, 3),
    ],
)
def test_room_makes_as_many_micro_batches_whatever_the_rows(rows, shape, room, count):
    batch = make_batch()
    micro = pack(batch, rows, shape, room)
    assert micro.tokens.shape == (count, *shape, STEPS)
    assert (micro.prompt_lengths > 0).all()
    expected = np.where(rows, batch.completion_lengths, 0)
    np.testing.assert_array_equal(unpack(micro.lengths, micro, (PROMPTS, SIZE)), expected)
    assert micro.lengths.sum() == expected.sum()


def test_a_split_group_holds_only_live_rows():
    """Six of ten completions in micro-batches of three cost two of them, not four, and the rest of the room nothing."""
    batch = make_batch()
    live = np.array([[1, 0, 1, 0, 1], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 0, 1, 0]], bool)
    micro = pack(batch, live, (1, 3), room=PROMPTS)
    assert (micro.lengths > 0).any(axis=(1, 2)).tolist() == [True, True] + [False] * 6
    assert micro.group[:2].tolist() == [[0], [3]] and micro.sample[:2].tolist() == [[[0, 2, 4]], [[0, 1, 3]]]


def test_an_empty_completion_goes_nowhere():
    batch = make_batch()
    batch.completion_lengths[1, 2] = 0
    micro = pack(batch, rows_of(1), (1, SIZE))
    back = unpack(micro.tokens, micro, (PROMPTS, SIZE))
    assert not back[1, 2].any() and (back[1, [0, 1, 3, 4]] == batch.completion_tokens[1, [0, 1, 3, 4]]).all()


def test_no_log_probabilities_are_made_up():
    micro = pack(make_batch()._replace(rollout_logprobs=None), ROWS["all"], (1, SIZE))
    assert micro.old_logprobs is None and micro.ref_logprobs is None and micro.rollout_logprobs is None
