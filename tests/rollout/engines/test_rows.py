"""Tests rows of an HTTP engine that begin with an opening and are restarted."""

from __future__ import annotations

import pytest

from tunix_like import UserError
from tunix_like.rollout.engines.rows import RowStates
from tunix_like.rollout.engines.server import SampledTokens
from tunix_like.types import Reply, Request


class Restarts:
    """Appends after the first turn, restarts after the second one, and ends after the third."""

    lockstep = True

    def __init__(self):
        self.turns = []

    def opening(self, group, sample):
        return [7, 7]

    def submit(self, turns):
        self.turns += turns

    def replies(self, wait):
        tokens = [[4], [5, 6], None][len(self.turns) - 1]
        return [Reply(0, 0, tokens, restart=len(self.turns) == 2)]


def test_restarted_row_continues_from_its_prompt():
    rows, samples, contexts = RowStates([Request([9, 8], 0, 1)], 20, Restarts()), [], []
    for token in (1, 2, 3):
        (index,) = rows.to_send()
        contexts.append(rows.rows[index].context)
        samples += rows.take({index: SampledTokens([token, 0], [-1.0, -2.0], True, [], [])})
    assert contexts == [[9, 8, 7, 7], [9, 8, 7, 7, 1, 0, 4], [9, 8, 5, 6]]
    (sample,) = samples
    assert sample.tokens.tolist() == [7, 7, 1, 0, 4, 2, 0, 5, 6, 3, 0]
    assert sample.token_mask.tolist() == [False, False, True, True, False, True, True, False, False, True, True]
    assert sample.segment_start.tolist() == [0] * 7 + [7] * 4
    with pytest.raises(UserError, match="max_tokens_to_generate=2: 2 tokens precede the first turn"):
        RowStates([Request([9], 0, 1)], 2, Restarts())
