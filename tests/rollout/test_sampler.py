"""Tests sampled rows against the full forward pass, and that a row does not depend on the other rows.

The tokens of a row without end-of-sequence tokens are the oracle of the row with them, since random numbers depend on
the position only.
"""

from __future__ import annotations

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx

from tests.parameters import others_slow
from tests.rollout.arrays import sample_groups
from tunix_like.config.schema import RolloutConfig
from tunix_like.models.config import DecoderConfig
from tunix_like.models.decoder import Decoder, EarlierTokens
from tunix_like.rollout import decoding, sampler, schedule
from tunix_like.rollout.sampler import Sampler
from tunix_like.rollout.shapes import length_bucket, pad_tokens, slot_shape
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.training.engine import make_engine
from tunix_like.types import Request, SamplingParams

VOCABULARY, SIZE, TEMPERATURE = 19, 2, 0.7
RNG = np.random.default_rng(0)
A, B, C, LONG = (RNG.integers(0, VOCABULARY, length).tolist() for length in (5, 1, 11, 20))
KEY, WARM = jax.random.key(5), SamplingParams(TEMPERATURE)


def make_model() -> tuple:
    """Returns (graphdef, params) of a model with two query heads for each key head, and weights large enough for logits
    that differ."""
    config = DecoderConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        qkv_bias=True,
        qk_norm=True,
    )
    graphdef, state = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    spread = lambda x: x + jnp.asarray(0.3 * RNG.normal(size=x.shape), x.dtype)  # noqa: E731
    return graphdef, jax.tree.map(spread, nnx.to_pure_dict(state))


GRAPHDEF, PARAMS = make_model()
forward = jax.jit(lambda params, tokens, real: nnx.merge(GRAPHDEF, params)(tokens, real))


def sample(
    prompts=(A, B, C), numbers=(3, 8, 1), size=SIZE, key=KEY, sampling=WARM, eos_ids=(), max_tokens=12, **limits
):
    made = Sampler(GRAPHDEF, eos_ids, max_prompt_length=24, max_tokens=max_tokens, **limits)
    return sample_groups(made, PARAMS, prompts, numbers, size, key, sampling)


def full_logits(prompts, tokens: np.ndarray) -> np.ndarray:
    """Returns `[P G T V]`: the logits of the plain model at every position of complete rows."""
    count, size, steps = tokens.shape
    rows = [[*prompts[p], *tokens[p, i].tolist()] for p, i in np.ndindex(count, size)]
    padded = pad_tokens(rows, max(map(len, rows)))
    real = np.arange(padded.shape[1]) < np.array([len(row) for row in rows])[:, None]
    logits = np.asarray(forward(PARAMS, jnp.asarray(padded), jnp.asarray(real)))
    logits = logits.reshape(count, size, *logits.shape[1:])
    return np.stack([logits[p, :, len(prompts[p]) - 1 :][:, :steps] for p in range(count)])


def chosen_logprobs(logits: np.ndarray, tokens: np.ndarray, temperature: float) -> np.ndarray:
    scaled = logits.astype(np.float64) / temperature
    table = scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))
    return np.take_along_axis(table, tokens[..., None], axis=-1)[..., 0]


@pytest.fixture(scope="module")
def endless():
    """Returns twelve tokens for every row, without end-of-sequence tokens."""
    return sample()


def test_tokens_are_reported_while_no_completion_has_ended(monkeypatch, endless):
    """The reports change no number."""
    told = []

    @contextlib.contextmanager
    def task(name, total=None, done=0):
        yield lambda done, note="": told.append((done, note))

    monkeypatch.setattr(sampler.progress, "task", task)
    for every, times in ((5, 2), (12, 1), (1000, 0)):
        monkeypatch.setitem(schedule.REPORTED_STEPS, "cpu", every)
        told.clear()
        found = sample()
        jax.tree.map(np.testing.assert_array_equal, found, endless)
        early = [note for done, note in told if not done]
        assert len(early) == times and told[-1][0] == 3 * SIZE
        assert all(f"up to {(i + 1) * every} of 12 tokens, " in note for i, note in enumerate(early))
        assert all(note.endswith(" tokens/s") for note in early)


def test_logprobs_are_those_of_the_full_forward(monkeypatch):
    """The rows have more than 70 tokens, so that the cache grows during sampling."""
    monkeypatch.setattr(schedule, "FIRST_CACHE", 32)
    found = sample(max_tokens=70)
    assert found.tokens.shape == (3, SIZE, 70)
    logits = full_logits([A, B, C], found.tokens)
    assert logits.std() > 0.5, "flat logits would agree with anything"
    expected = chosen_logprobs(logits, found.tokens, TEMPERATURE)
    np.testing.assert_allclose(found.logprobs, expected, rtol=0, atol=1e-4)
    assert (found.lengths == 70).all() and not found.finished.any()


@pytest.mark.parametrize("room", [12, 16])
def test_cached_decode_equals_the_full_forward_pass(endless, room):
    """Compares all logits at every step of `prefill` and `decode` on given tokens. The ring of the cache starts at any
    position."""
    steps, first_column = endless.tokens.shape[-1], 5

    @jax.jit
    def logits_of(params, prompts, lengths, tokens):
        model = nnx.merge(GRAPHDEF, params)
        first, prompt_cache, _ = model.prefill(prompts, lengths)
        empty = [
            (jnp.full((3 * SIZE, *k.shape[1:3], room), 9.0), jnp.full((3 * SIZE, v.shape[1], room, v.shape[3]), 9.0))
            for k, v in prompt_cache
        ]

        def one(cache, step):
            column = (first_column + step) % room
            distance = ((column - jnp.arange(room)) % room)[None, None]
            positions = jnp.broadcast_to(lengths[:, None] + step, (3, SIZE))
            columns = jnp.where(distance <= step, positions[..., None] - distance, -1)
            earlier = EarlierTokens(lengths, prompt_cache, cache, column, columns)
            hidden, cache, _ = model.decode(tokens[:, :, step], positions, earlier)
            return cache, hidden

        _, hidden = jax.lax.scan(one, empty, jnp.arange(steps - 1))
        first = jnp.broadcast_to(first[None, :, None], (1, *hidden.shape[1:]))
        return model.logits(jnp.moveaxis(jnp.concatenate([first, hidden]), 0, 2))

    lengths = jnp.asarray([len(A), len(B), len(C)])
    found = logits_of(PARAMS, jnp.asarray(pad_tokens([A, B, C], 16)), lengths, jnp.asarray(endless.tokens))
    np.testing.assert_allclose(found, full_logits([A, B, C], endless.tokens), rtol=0, atol=1e-4)


def test_greedy_tokens_are_the_argmax():
    found = sample(sampling=SamplingParams(temperature=0.0))
    logits = full_logits([A, B, C], found.tokens)
    np.testing.assert_array_equal(found.tokens, logits.argmax(axis=-1))
    np.testing.assert_array_equal(found.tokens[:, 0], found.tokens[:, 1])
    np.testing.assert_allclose(found.logprobs, chosen_logprobs(logits, found.tokens, 1.0), rtol=0, atol=1e-4)


def test_row_does_not_depend_on_other_rows(endless):
    """The prompts are reordered and combined with others. Then a longer prompt (another padded width) is added and the
    group size is changed. Equal numbers give equal rows."""
    swapped = sample(prompts=(C, [4, 4], A), numbers=(1, 9, 3))
    wider = sample(prompts=(LONG, C, A), numbers=(7, 1, 3), size=SIZE + 1)
    for other, places in ((swapped, {2: 0, 0: 2}), (wider, {0: 2, 2: 1})):
        for here, there in places.items():
            np.testing.assert_array_equal(other.tokens[there, :SIZE], endless.tokens[here])
            np.testing.assert_allclose(other.logprobs[there, :SIZE], endless.logprobs[here], rtol=0, atol=1e-5)


MANY, PROMPTS, NUMBERS = 6, (A, B, C, LONG), (3, 8, 1, 7)


@pytest.fixture(scope="module")
def ragged():
    """Returns six completions of four prompts, with 1 to 80 tokens. All are computed together and never moved."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "FEWEST_TOKENS_LEFT", 1000)
        found = sample(PROMPTS, NUMBERS, MANY, eos_ids=(4,), max_tokens=80)
    assert found.lengths.min() < 5 and (found.lengths == 80).any() and len(np.unique(found.lengths)) > 8
    return found


def events(monkeypatch) -> list[tuple]:
    """Records the names of the moves that `generate` makes, with the shape of the rows after each."""
    seen = []

    def spied(name: str, move):
        def spy(*inputs, **more):
            out = move(*inputs, **more)
            rows = out[1] if name == "regroup" else out
            seen.append((name, rows.live.shape if isinstance(rows, decoding.Rows) else rows.hidden.shape[:1]))
            return out

        return spy

    for name in ("prefill", "fill", "replace_prompts", "grow", "regroup"):
        monkeypatch.setattr(decoding, name, spied(name, getattr(decoding, name)))
    return seen


@pytest.mark.parametrize("rows", others_slow([1, 4, 6, 7, 13, 18], 7))
def test_tokens_do_not_depend_on_the_number_of_rows(ragged, monkeypatch, rows):
    """Fewer rows than a group, a whole group, and several groups. Waiting completions take the rows that become
    free."""
    seen = events(monkeypatch)
    found = sample(PROMPTS, NUMBERS, MANY, eos_ids=(4,), max_tokens=80, max_concurrent_rows=rows)
    for values, expected in zip(found[:5], ragged[:5], strict=True):
        assert values.dtype == expected.dtype
        np.testing.assert_allclose(values, expected, rtol=0, atol=1e-5)
    names = [name for name, _ in seen]
    assert names.count("fill") > 1 and max(np.prod(shape) for name, shape in seen if name == "fill") <= rows
    prefilled = [shape[0] for name, shape in seen if name == "prefill"]
    assert sum(prefilled) >= len(PROMPTS)
    assert len(prefilled) > 1 or rows >= len(PROMPTS), "prompts that wait are computed when their turn comes"


def test_tokens_do_not_depend_on_moves(ragged, monkeypatch):
    """Rows are gathered as others finish, one prompt has several slots, and the cache grows."""
    monkeypatch.setattr(schedule, "FEWEST_TOKENS_LEFT", 1)
    monkeypatch.setattr(schedule, "FEWEST_ROWS", {"cpu": 1})
    monkeypatch.setattr(schedule, "FIRST_CACHE", 32)
    seen = events(monkeypatch)
    found = sample(PROMPTS, NUMBERS, MANY, eos_ids=(4,), max_tokens=80)
    for values, expected in zip(found[:5], ragged[:5], strict=True):
        np.testing.assert_allclose(values, expected, rtol=0, atol=1e-5)
    shapes = [int(np.prod(shape)) for name, shape in seen if name == "regroup"]
    assert len(shapes) >= 2 and shapes == sorted(shapes, reverse=True) and shapes[0] <= 12, seen
    assert [name for name, _ in seen].count("prefill") == 1


@pytest.mark.slow
def test_a_ring_that_has_wrapped_grows_in_order(monkeypatch):
    """Waiting rows keep the small cache in use as a ring. Then one row needs more of it than there is."""
    monkeypatch.setattr(schedule, "FIRST_CACHE", 8)
    whole = sample(PROMPTS, NUMBERS, MANY, eos_ids=(0, 3), max_tokens=40)
    assert (whole.lengths < 6).any() and (whole.lengths > 17).any()
    seen = events(monkeypatch)
    found = sample(PROMPTS, NUMBERS, MANY, eos_ids=(0, 3), max_tokens=40, max_concurrent_rows=2)
    for values, expected in zip(found[:5], whole[:5], strict=True):
        np.testing.assert_allclose(values, expected, rtol=0, atol=1e-5)
    assert [name for name, _ in seen].count("grow") >= 2


def test_memory_never_holds_two_caches(monkeypatch):
    """Before a layer of the cache is replaced, the earlier layers of the old cache are deleted."""
    prompts = decoding.prefill(GRAPHDEF, PARAMS, jnp.asarray([A]), jnp.asarray([len(A)]))
    rows = decoding.empty_rows(prompts, 2, 16, 8, 2)
    old, replaced = [jax.tree.leaves(rows.cache), jax.tree.leaves(prompts.cache)], []
    assert len(rows.cache) > 1

    def spied(name):
        original = getattr(decoding, name)

        def call(*given, **named):
            replaced.append([x.is_deleted() for x in old[0]])
            return original(*given, **named)

        monkeypatch.setattr(decoding, name, call)

    spied("_grown_layer")
    rows = decoding.grow(rows, 16)
    assert [sum(each) for each in replaced] == [2 * layer for layer in range(len(rows.cache))]
    old[0] = jax.tree.leaves(rows.cache)
    decoding.regroup(prompts, rows, np.array([0]), np.array([[1]]), np.array([[True]]), None)
    assert all(x.is_deleted() for x in (*old[0], *old[1]))


def test_random_numbers_depend_on_number_sample_position_and_key(endless):
    """The prompts are equal, so equal random numbers would give equal rows."""
    same = sample(prompts=(A, A, A), numbers=(0, 1, 3))
    other = sample(prompts=(A, A, A), numbers=(0, 1, 3), key=jax.random.fold_in(KEY, 1))
    np.testing.assert_array_equal(same.tokens[2], endless.tokens[0])
    rows = [tuple(row) for row in np.concatenate([same.tokens, other.tokens]).reshape(-1, 12).tolist()]
    assert len(set(rows)) == len(rows)
    uniform = SamplingParams(temperature=1e6)  # all tokens are equally likely: a reused number would repeat a token
    flat = sample(prompts=(A, A, A), numbers=(0, 1, 3), sampling=uniform).tokens
    assert (np.diff(flat, axis=-1) != 0).mean() > 0.8, "positions"
    assert (flat[0] != flat[1]).mean() > 0.7, "numbers"
    assert (flat[:, 0] != flat[:, 1]).mean() > 0.7, "samples"


def test_each_end_token_ends_a_row_and_is_part_of_it(endless):
    """The end token is sampled first, in the middle, and last, where it counts as an end and not as a truncation."""
    eos_ids = tuple(int(endless.tokens[place]) for place in ((0, 0, 11), (0, 1, 5), (2, 0, 0)))
    found = sample(eos_ids=eos_ids)
    ends = np.isin(endless.tokens, eos_ids)
    finished = ends.any(axis=-1)
    lengths = np.where(finished, ends.argmax(axis=-1) + 1, 12)
    inside = np.arange(12) < lengths[..., None]
    assert set(lengths[finished]) > {1, 12} and not finished.all(), "the seed makes every case"
    np.testing.assert_array_equal(found.lengths, lengths)
    np.testing.assert_array_equal(found.finished, finished)
    np.testing.assert_array_equal(found.tokens, np.where(inside, endless.tokens, 0))
    np.testing.assert_allclose(found.logprobs, np.where(inside, endless.logprobs, 0), rtol=0, atol=1e-6)


def test_length_buckets():
    """16, 24, 32, 48, 64, ...: few values, each at least the length and at most half as much again, never above the
    limit."""
    assert [length_bucket(n) for n in (1, 16, 17, 24, 25, 33, 48, 49, 64, 65, 97)] == [
        16, 16, 24, 24, 32, 48, 48, 64, 64, 96, 128,
    ]  # fmt: skip
    buckets = {length_bucket(n) for n in range(1, 2049)}
    assert len(buckets) == 15
    assert all(n <= length_bucket(n) < max(1.5 * n, 17) for n in range(1, 2049))
    assert [length_bucket(n, 20) for n in (1, 16, 17, 20)] == [16, 16, 20, 20]
    assert length_bucket(30, 20) == 30


def test_pad_tokens():
    np.testing.assert_array_equal(pad_tokens([[3, 4], [], [5]], 3), [[3, 4, 0], [0, 0, 0], [5, 0, 0]])


def test_make_engine_takes_the_configs_end_tokens_before_the_tokenizers():
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<eos>": 1, "b": 2}, unk_token="a"))
    tokenizer = Tokenizer(backend, eos_token="<eos>")
    rollout = RolloutConfig(max_prompt_length=9, max_tokens_to_generate=4)
    plain = make_engine(GRAPHDEF, tokenizer, rollout)
    assert (plain.eos_ids, plain.max_prompt_length, plain.max_tokens) == ((1,), 9, 4)
    assert make_engine(GRAPHDEF, tokenizer, RolloutConfig(eos_tokens=[2, 0])).eos_ids == (2, 0)


def test_number_of_slots_and_rows_per_slot():
    """If the rows suffice, each prompt has one slot, with turns of equal size. Otherwise each row of a short prompt has
    a slot, and rows of a long prompt share one."""
    assert slot_shape(4, 8, 32, 64, 128) == slot_shape(4, 8, 1000, 64, 128) == (4, 8)
    assert slot_shape(64, 16, 512, 256, 1024, 8) == slot_shape(64, 16, 575, 256, 1024, 8) == (64, 8)
    assert slot_shape(64, 16, 400, 256, 1024) == (64, 6)  # 6 + 5 + 5, and not 6 + 6 + 4
    assert slot_shape(64, 16, 60, 256, 1024, 8) == (56, 1)
    assert slot_shape(64, 16, 60, 4096, 64)[1] == 16
    assert slot_shape(63, 16, 512, 256, 1024, 8) == (512, 1)  # eight devices cannot share 63 slots
    for prompts, size, at_once in itertools.product((1, 3, 8), (1, 5, 8), (1, 2, 7, 23)):
        for lengths in ((8, 512), (64, 64), (2048, 16)):
            slots, width = slot_shape(prompts, size, at_once, *lengths)
            assert 1 <= width <= size and slots >= 1 and slots * width <= min(at_once, prompts * size + size)


def test_each_prompt_has_one_slot_if_the_rows_suffice():
    """Four prompts with eight completions in 16 rows: no prompt waits for another one's slot."""
    settings = schedule.SamplerSettings(GRAPHDEF, (4,), 24, 8, 16, None, False)
    requests = [Request(prompt, number, 8) for number, prompt in enumerate([A, B, C, LONG])]
    first = schedule.RowSchedule(settings, PARAMS, requests, KEY, SamplingParams())
    assert first.slot_prompt.tolist() == [0, 1, 2, 3] and first.row_sample.tolist() == [[0, 1, 2, 3]] * 4


@pytest.mark.parametrize("width", [1, 2])
def test_a_prompt_in_several_slots_is_computed_once(ragged, monkeypatch, width):
    """Of four prompts, one is in all slots at first. The others follow, and are moved between slots."""
    monkeypatch.setattr(schedule, "slot_shape", lambda *_: (6 // width, width))
    seen = events(monkeypatch)
    found = sample(PROMPTS, NUMBERS, MANY, eos_ids=(4,), max_tokens=80, max_concurrent_rows=8)
    for values, expected in zip(found[:5], ragged[:5], strict=True):
        np.testing.assert_allclose(values, expected, rtol=0, atol=1e-5)
    assert sum(shape[0] for name, shape in seen if name == "prefill") == len(PROMPTS)
    assert [name for name, _ in seen].count("replace_prompts") > 2


def test_useful_share_counts_all_allocated_rows(ragged, monkeypatch):
    """Every allocated row of a step counts, whether it is still sampled or not."""
    made = {
        rows: Sampler(GRAPHDEF, (4,), max_prompt_length=24, max_tokens=80, max_concurrent_rows=rows) for rows in (1, 24)
    }
    monkeypatch.setattr(schedule, "FEWEST_TOKENS_LEFT", 1000)
    for one in made.values():
        sample_groups(one, PARAMS, PROMPTS, NUMBERS, MANY, KEY, WARM)
    assert made[1].row_steps == ragged.lengths.sum(), "one row is live until it is done"
    assert made[24].row_steps == 80 * len(PROMPTS) * MANY
