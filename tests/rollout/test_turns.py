"""Tests completions of several turns: the tokens of replies are in the row and in the cache, and the rest is unchanged.

The full forward pass over each whole row is the oracle.
"""

from __future__ import annotations

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.parameters import others_slow
from tests.rollout.arrays import sample_groups
from tests.rollout.test_sampler import KEY, WARM, chosen_logprobs
from tunix_like.config.schema import MeshConfig
from tunix_like.models import attention
from tunix_like.models.config import DecoderConfig
from tunix_like.models.decoder import Decoder
from tunix_like.models.fields import DeltaRule, YarnScaling
from tunix_like.models.sharding import build_mesh, place_params
from tunix_like.rollout import decoding, schedule, turns
from tunix_like.rollout.sampler import Sampler
from tunix_like.types import Completions, Reply

RNG = np.random.default_rng(0)
VOCABULARY, MOST = 20, 70
PROMPTS = [RNG.integers(0, VOCABULARY, length).tolist() for length in (5, 1, 11, 20, 3, 7)]
ENDS, SIZE = (3, 5, 7), 4
# Programs of other shapes, or for other devices, add float32 numbers in another order. On one device, the
# log-probabilities of this file and of `test_restarts.py` differ by up to 1.5e-5 from the same model in float64. Two
# programs differed by up to 1.9e-5.
ROUNDING = 5e-5
PLAIN = DecoderConfig(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    qk_norm=True,
)
WINDOWS = dataclasses.replace(
    PLAIN,
    windows=(9, None),
    attention_cap=5.0,
    rope_scaling=YarnScaling(2.0, 16),
    query_scaling=0.5,
    joint_qk_norm=True,
    sinks=True,
)
RULE = DeltaRule(key_heads=2, value_heads=4, key_width=8, value_width=6, taps=4)
RECURRENT = dataclasses.replace(
    PLAIN, delta_rule=RULE, recurrent_layers=(True, False), output_gate=True, norm_offset=True, rotary_width=4
)


def make_model(config: DecoderConfig) -> tuple:
    graphdef, state = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(1)
    spread = lambda x: x + jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype)  # noqa: E731
    return graphdef, jax.tree.map(spread, nnx.to_pure_dict(state))


MODELS = {"plain": make_model(PLAIN), "windows": make_model(WINDOWS), "recurrent": make_model(RECURRENT)}


class Scripted:
    """Replies with a number of tokens that depends on the trajectory and the turn. Some of the tokens are end tokens.

    In eager mode it delays some of the replies.
    """

    def __init__(self, lockstep=True, most_turns=3, seed=None):
        self.lockstep, self.most_turns, self.turns, self.waiting = lockstep, most_turns, {}, []
        self.given, self.rng = {}, None if seed is None else random.Random(seed)

    def reply(self, group: int, sample: int, turn: int) -> list[int] | None:
        if turn == self.most_turns + group % 2:
            return None
        return [(7 * i + turn + sample) % VOCABULARY for i in range((5 * group + 3 * sample + 4 * turn) % 21)]

    def opening(self, group: int, sample: int) -> list[int]:
        return []

    def submit(self, turns):
        for turn in turns:
            of_row = self.turns.setdefault((turn.group, turn.sample), [])
            of_row.append(list(turn.tokens))
            if turn.truncated:
                continue
            assert turn.tokens[-1] in ENDS and not set(turn.tokens[:-1]) & set(ENDS)
            tokens = self.reply(turn.group, turn.sample, len(of_row))
            self.given.setdefault((turn.group, turn.sample), []).append(tokens)
            self.waiting.append(Reply(turn.group, turn.sample, tokens))

    def replies(self, wait: bool):
        count = len(self.waiting)
        if self.rng is not None:
            self.rng.shuffle(self.waiting)
            count = self.rng.randint(1 if wait and count else 0, count)
        ready, self.waiting = self.waiting[:count], self.waiting[count:]
        return ready


def play(responder, model="plain", mesh=None, **limits) -> Completions:
    graphdef, params = MODELS[model]
    made = Sampler(graphdef, ENDS, max_prompt_length=24, max_tokens=MOST, mesh=mesh, **limits)
    params = made.place(params if mesh is None else place_params(params, mesh))
    return sample_groups(made, params, PROMPTS, range(2, 2 + len(PROMPTS)), SIZE, KEY, WARM, responder)


def expected_logprobs(found: Completions, model="plain") -> np.ndarray:
    graphdef, params = MODELS[model]
    prompts = max(map(len, PROMPTS))
    rows = np.zeros((len(PROMPTS) * SIZE, prompts + MOST), np.int32)
    for row, (p, i) in enumerate(np.ndindex(len(PROMPTS), SIZE)):
        tokens = [*PROMPTS[p], *found.tokens[p, i]]
        rows[row, : len(tokens)] = tokens
    run = jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens))
    logits = np.asarray(run(params, jnp.asarray(rows))).reshape(len(PROMPTS), SIZE, *rows.shape[1:], VOCABULARY)
    logits = np.stack([logits[p, :, len(PROMPTS[p]) - 1 :][:, :MOST] for p in range(len(PROMPTS))])
    return chosen_logprobs(logits, found.tokens, WARM.temperature)


@pytest.fixture(scope="module")
def steps():
    """Samples the rows in lockstep, all of them at once."""
    responder = Scripted()
    return play(responder), responder


@pytest.mark.slow
def test_row_contains_the_sampled_tokens_and_the_replies(steps):
    """Compares all tokens of all turns. A reply that leaves no space for another token ends the row before the
    reply."""
    found, responder = steps
    cut = 0
    for index in np.ndindex(*found.lengths.shape):
        sampled, replies = responder.turns[index], responder.given.get(index, [])
        tokens, mask = [], []
        for number, turn in enumerate(sampled):
            tokens, mask = tokens + turn, mask + [True] * len(turn)
            if number + 1 < len(sampled):
                tokens, mask = tokens + replies[number], mask + [False] * len(replies[number])
        length = found.lengths[index]
        assert found.tokens[index][:length].tolist() == tokens
        assert found.token_mask[index].tolist() == mask + [False] * (MOST - length)
        assert found.finished[index] == (len(replies) == len(sampled) and replies[-1] is None)
        if not found.finished[index] and len(replies) == len(sampled):
            assert length + len(replies[-1]) >= MOST
            cut += 1
    assert cut and found.finished.any() and (found.lengths == MOST).any(), "rows end in each of the three ways"
    assert (found.logprobs[~found.token_mask] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("model", others_slow(MODELS, "plain"))
def test_cache_of_several_turns_equals_the_full_forward_pass(monkeypatch, model):
    """The cache grows while rows wait, and its columns without tokens are removed. Replies take several blocks, which
    attend to the keys of earlier turns."""
    monkeypatch.setattr(schedule, "FIRST_CACHE", 16)
    monkeypatch.setattr(turns, "MOST_APPENDED", 16)
    moves = []
    for name in ("grow", "compact_columns"):
        run = getattr(decoding, name)
        counted = lambda *a, name=name, run=run, **k: moves.append((name, a[0].room)) or run(*a, **k)  # noqa: E731
        monkeypatch.setattr(decoding, name, counted)
    found = play(Scripted(), model)
    assert ("grow", MOST) in moves, "a block of replies needs more columns than the longest completion"
    assert [name for name, _ in moves].count("compact_columns") > 2
    gap = np.abs(found.logprobs - expected_logprobs(found, model))
    assert gap[found.token_mask].max() < 1e-4
    assert found.token_mask.sum() > 300 and (~found.token_mask[found.lengths > 30]).any()


@pytest.mark.slow
def test_blocked_attention_gives_the_same_rows(monkeypatch, steps):
    jax.clear_caches()
    monkeypatch.setattr(attention, "SCORES", 0)
    found = play(Scripted())
    jax.clear_caches()
    np.testing.assert_array_equal(found.tokens, steps[0].tokens)
    np.testing.assert_allclose(found.logprobs, steps[0].logprobs, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "seed"),
    [(None, 0), (5, None), (1, None), (5, 1), (None, None)],
)
@pytest.mark.slow
def test_tokens_do_not_depend_on_the_schedule(monkeypatch, steps, rows, seed):
    """Eager replies in any order, few rows at a time, and rows that are moved together give the same tokens."""
    monkeypatch.setattr(schedule, "FEWEST_TOKENS_LEFT", 1)
    monkeypatch.setattr(schedule, "FEWEST_ROWS", {"cpu": 1})
    monkeypatch.setattr(schedule, "FIRST_CACHE", 16)
    found = play(Scripted(lockstep=seed is None, seed=seed), max_concurrent_rows=rows)
    for name in ("tokens", "lengths", "finished", "token_mask"):
        np.testing.assert_array_equal(getattr(found, name), getattr(steps[0], name), err_msg=name)
    np.testing.assert_allclose(found.logprobs, steps[0].logprobs, atol=ROUNDING)


def test_without_replies_it_equals_the_one_turn_sampler():
    found, single = play(Scripted(most_turns=1)), play(None)
    for name in ("tokens", "lengths", "finished", "token_mask"):  # every other group; the rest has one turn more
        np.testing.assert_array_equal(getattr(found, name)[::2], getattr(single, name)[::2], err_msg=name)
    np.testing.assert_allclose(found.logprobs[::2], single.logprobs[::2], atol=1e-5)


def test_history_is_not_recomputed(monkeypatch):
    """All prompts are computed in one prefill. Later calls of the model are as wide as the longest reply."""
    prefilled, appended = [], []
    prefill, append = decoding.prefill, decoding.append
    monkeypatch.setattr(decoding, "prefill", lambda *a, **k: prefilled.append(a[2].shape) or prefill(*a, **k))
    monkeypatch.setattr(decoding, "append", lambda *a, **k: appended.append(a[4].shape[-1]) or append(*a, **k))
    play(Scripted())
    assert len(prefilled) == 1 and max(appended) <= 20, "at most 20 tokens are replied"
    assert len(appended) <= 4, "one block for all rows of a turn"


@pytest.mark.slow
@pytest.mark.parametrize("shape", [[8, 1, 1], [2, 2, 2]])
def test_mesh_samples_the_same_tokens(steps, shape):
    found = play(Scripted(), mesh=build_mesh(MeshConfig(shape=shape, axis_names=["data", "fsdp", "tp"])))
    np.testing.assert_array_equal(found.tokens, steps[0].tokens)
    np.testing.assert_array_equal(found.token_mask, steps[0].token_mask)
    np.testing.assert_allclose(found.logprobs, steps[0].logprobs, atol=ROUNDING)
