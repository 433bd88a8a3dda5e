"""Tests log-probabilities of packed completions against the plain model, and the cost of a forward pass."""

from __future__ import annotations

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tunix_like.models.decoder import Decoder
from tunix_like.rollout import decoding
from tunix_like.step import forward, packing
from tunix_like.step.forward import batch_logprobs, chunk_logprobs, chunk_of, prompt_states
from tunix_like.step.packing import Layout, pack
from tunix_like.step.train_step import StepSpec, chunk_loss, step_inputs
from tunix_like.types import GroupBatch

from .repeated_prompts import (
    BATCH,
    EVERYONE,
    GRAPHDEF,
    LAYOUTS,
    LENGTHS,
    MASK,
    OBJECTIVES,
    PARAMS,
    PLAIN,
    PROMPTS,
    SIZE,
    STEPS,
    VOCABULARY,
    WHOLE,
    Reinforce,
    data_of,
    keep_gradient,
    make_model,
    packed_as,
    plain_logprobs,
    plain_step,
    repeated_logprobs,
    row_values,
)

logprobs_of = jax.jit(functools.partial(batch_logprobs, GRAPHDEF, options=PLAIN))


@pytest.mark.parametrize("layout", [WHOLE, *LAYOUTS[1:4], LAYOUTS[5]], ids=str)
def test_logprobs_without_gradient(layout):
    """These are the values of `old` and `ref`: each at its position, and 0 at positions without a token."""
    found = np.asarray(logprobs_of(PARAMS, BATCH, packed_as(layout)))
    expected = np.asarray(plain_logprobs()(PARAMS))
    np.testing.assert_allclose(found, np.where(MASK, expected, 0), rtol=0, atol=1e-5)
    rows = np.array([[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]], bool)
    some = np.asarray(logprobs_of(PARAMS, BATCH, packed_as(layout, rows)))
    np.testing.assert_allclose(some, np.where(rows[..., None] & MASK, expected, 0), rtol=0, atol=1e-5)


def test_entropies_of_a_chunk():
    """They equal those of the plain model. `chunk_logprobs` passes them to the loss."""
    chunk = chunk_of(packed_as(WHOLE), 0, 0)
    prompts = np.arange(PROMPTS)[np.asarray(chunk.group)]

    def found(params):
        states = prompt_states(GRAPHDEF, params, BATCH, jnp.asarray(prompts), PLAIN._replace(temperature=0.7))
        return chunk_logprobs(GRAPHDEF, params, states, BATCH, chunk, PLAIN._replace(temperature=0.7))

    values = jax.jit(found)(PARAMS)
    expected = jax.jit(lambda params: repeated_logprobs(params, 0.7))(PARAMS)
    mask = np.arange(STEPS) < np.asarray(chunk.length)[..., None]
    assert mask.sum() == LENGTHS.sum()
    for mine, plain in zip(values[:2], expected, strict=True):
        np.testing.assert_allclose(np.asarray(mine)[mask], np.asarray(chunk.rows_of(plain))[mask], rtol=0, atol=1e-5)


def test_completions_of_a_bin_do_not_attend_to_each_other():
    """Other tokens in one completion, or none at all, change no bit of the completions before and after it."""
    packed = packed_as(WHOLE)
    before = np.asarray(logprobs_of(PARAMS, BATCH, packed))
    assert (packed.length > 0).all(axis=-1).any(), "all completions of a group in one bin"
    for sample in range(SIZE):
        others = np.arange(SIZE) != sample
        tokens = BATCH.completion_tokens.copy()
        tokens[:, sample] = (tokens[:, sample] + 7) % VOCABULARY
        after = np.asarray(logprobs_of(PARAMS, BATCH._replace(completion_tokens=tokens), packed))
        np.testing.assert_array_equal(after[:, others], before[:, others])
        assert (after[:, sample] != before[:, sample])[MASK[:, sample]].all()
        gone = packed._replace(length=np.where(packed.sample == sample, 0, packed.length))
        without = np.asarray(logprobs_of(PARAMS, BATCH, gone))
        np.testing.assert_array_equal(without[:, others], before[:, others])


def test_shared_bin_equals_separate_bins(monkeypatch):
    """Positions and log-probabilities, also of first tokens, equal those with one completion per bin."""
    together = packed_as(WHOLE)
    assert (together.start > 0).any()
    monkeypatch.setattr(packing, "ROWS_PER_BIN", 1)
    alone = packed_as(WHOLE)
    assert alone.sample.shape[-1] == 1 and not alone.start.any()
    found, expected = (np.asarray(logprobs_of(PARAMS, BATCH, packed)) for packed in (together, alone))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


def test_remat_recomputes_layers_and_chunks_use_a_loop():
    """Counts primitives of the traced programs. With remat each of the two layers is recomputed, also for prompts. With
    chunks log-probabilities are computed in a loop."""
    chunk = chunk_of(packed_as(WHOLE), 0, 0)
    everyone = jnp.arange(PROMPTS)

    def count(part: str, names: set[str], **options) -> int:
        how = PLAIN._replace(**options)
        states = jax.eval_shape(lambda params: prompt_states(GRAPHDEF, params, BATCH, everyone, how), PARAMS)
        run = {
            "prompts": lambda params, _: prompt_states(GRAPHDEF, params, BATCH, everyone, how),
            "completions": lambda params, states: chunk_logprobs(GRAPHDEF, params, states, BATCH, chunk, how),
        }[part]
        return sum(equation.primitive.name in names for equation in jax.make_jaxpr(run)(PARAMS, states).eqns)

    recomputed = {"remat2", "checkpoint"}
    for part in ("prompts", "completions"):
        assert count(part, recomputed, remat=True) == count(part, recomputed) + 2
    assert count("completions", {"scan"}, logits_chunk=7) == 1 and count("completions", {"scan"}) == 0


@pytest.mark.slow
def test_every_token_up_to_the_last_is_trained(monkeypatch):
    """The derivative of the loss by each token's log-probability is weight times advantage up to and including the
    end-of-sequence token at `length - 1`. It is exactly zero at positions of the bin without a completion."""
    original, objective = forward.token_logprobs, OBJECTIVES["on-policy"]
    data = data_of()
    chunk = chunk_of(data.packed, 0, 0)
    advantages, weights = row_values(objective, EVERYONE)
    states = prompt_states(GRAPHDEF, PARAMS, BATCH, jnp.asarray(data.packed.prompts[0]), PLAIN)

    spec = StepSpec(GRAPHDEF, objective, optax.identity(), PLAIN)

    def loss(delta):
        monkeypatch.setattr(forward, "token_logprobs", lambda *a: (original(*a)[0] + delta, original(*a)[1]))
        return chunk_loss(spec, PARAMS, states, chunk, data, advantages[..., None], weights)[0]

    found = np.asarray(jax.jit(jax.grad(loss))(jnp.zeros((PROMPTS, SIZE * STEPS))))
    expected = np.zeros((PROMPTS, SIZE, STEPS))  # by lane and bin
    for place in zip(*np.nonzero(data.packed.length), strict=True):
        lane, bin_ = place[2:4]
        row = data.packed.prompts[0, lane], data.packed.sample[place]
        start = data.packed.start[place]
        expected[lane, bin_, start : start + LENGTHS[row]] = -float(weights[row] * advantages[row])
    assert (np.abs(expected) > 1e-4).sum() == LENGTHS[BATCH.scored].sum()
    np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=1e-6)


# --- cost ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def passes(monkeypatch) -> collections.Counter[str]:
    """Counts how often each pass through the layers runs, by its name. It affects programs that are compiled while it
    is active."""
    counted: collections.Counter[str] = collections.Counter()

    def count(name: str) -> None:
        original = getattr(Decoder, name)

        def run(self, *args, **keywords):
            jax.debug.callback(lambda: counted.update([name]))
            return original(self, *args, **keywords)

        monkeypatch.setattr(Decoder, name, run)

    count("prefill")
    count("completion_hidden")
    return counted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "chunks"),
    [(Layout(1, 1, 1, False), [7, 1, 0]), pytest.param(Layout(2, 2, 1, True), [4, 1, 0], marks=pytest.mark.slow)],
    ids=str,
)
def test_prompts_are_computed_once_and_padding_is_skipped(layout, chunks, passes):
    """A prompt goes through the model once, however its group is split. Sets and chunks without a completion are not
    computed. This holds in the step and for the log-probabilities."""
    step = jax.jit(plain_step(GRAPHDEF, OBJECTIVES["on-policy"], keep_gradient, PLAIN))
    logprobs = jax.jit(functools.partial(batch_logprobs, GRAPHDEF, options=PLAIN))
    for groups, count in zip(([0, 1, 2], [1], []), chunks, strict=True):
        data = data_of(layout, groups, most_prompts=PROMPTS)
        expected = collections.Counter(prefill=-(-len(groups) // layout.prompts), completion_hidden=count)
        for run, arguments in ((step, (PARAMS, PARAMS, data)), (logprobs, (PARAMS, BATCH, data.packed))):
            passes.clear()
            jax.block_until_ready(run(*arguments))
            jax.effects_barrier()
            assert passes == expected


COST = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_layers": 2}
LONG, SHORT, MANY = 512, 16, 16


def flops(function, *arguments, **keywords) -> float:
    return jax.jit(function).lower(*arguments, **keywords).compile().cost_analysis()["flops"]


def cost_batch(groups: int, size: int) -> GroupBatch:
    ones = lambda *shape: np.ones(shape, np.int32)  # noqa: E731
    shape = (groups, size)
    return GroupBatch(
        prompt_tokens=ones(groups, LONG),
        prompt_lengths=LONG * ones(groups),
        completion_tokens=ones(*shape, SHORT),
        completion_lengths=SHORT * ones(*shape),
        rollout_logprobs=np.zeros((*shape, SHORT), np.float32),
        rewards=np.ones(shape, np.float32),
        scored=np.ones(shape, bool),
    )


@pytest.mark.slow
def test_the_prompt_is_computed_once():
    """Compares compiled FLOPs of one group of 16 on a prompt of 512 with 16 groups of one on the same prompt. A loop's
    body is counted once and run once: layers are unrolled, and there is one set, one chunk and one piece of
    log-probabilities."""
    graphdef, params = make_model(**COST)
    weights = sum(x.size for x in jax.tree.leaves(params["layers"]))

    def train_step(groups: int, size: int) -> float:
        batch = cost_batch(groups, size)
        packed = pack(batch.completion_lengths, batch.scored, SHORT, Layout(groups, groups, size, True))
        assert packed.sets == packed.chunks.sum() == 1
        data = step_inputs(batch, np.ones(groups, bool), packed)
        run = plain_step(graphdef, Reinforce(), keep_gradient, PLAIN)
        return flops(run, params, params, data)

    def prefill(groups: int, size: int) -> float:
        batch = cost_batch(groups, size)
        run = functools.partial(decoding.prefill, graphdef)
        return flops(run, params, batch.prompt_tokens, batch.prompt_lengths)

    for cost, times in ((train_step, 3), (prefill, 1)):
        shared, repeated = cost(1, MANY), cost(MANY, 1)
        assert repeated >= 2 * times * weights * MANY * LONG, "the matrix products are counted"
        print(f"{cost.__name__}: {shared:.3g} / {repeated:.3g} = {shared / repeated:.4f}")
        assert shared <= repeated / 5
