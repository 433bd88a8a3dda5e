"""Tests windows, caps, sinks, YaRN, queries scaled by position and a layer that reads the keys of an earlier one, in
sampling with a cache that is refilled and grows, and in the bins of training."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.rollout.arrays import sample_groups
from tunix_like.models import attention_decoding, attention_kernels, decoder
from tunix_like.models.config import DecoderConfig
from tunix_like.models.decoder import Decoder
from tunix_like.models.fields import YarnScaling
from tunix_like.rollout import schedule
from tunix_like.rollout.sampler import Sampler
from tunix_like.rollout.shapes import pad_tokens
from tunix_like.step.forward import ForwardOptions, batch_logprobs
from tunix_like.step.packing import choose_layout, pack
from tunix_like.types import GroupBatch, SamplingParams

CONFIG = DecoderConfig(
    vocab_size=19,
    hidden_size=16,
    intermediate_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    windows=(5, None, 9),
    shared_kv_layers=1,
    layer_input_width=4,
    layer_input_vocab=19,
    rotary=(True, True, False),
    rope_scaling=YarnScaling(2.0, 16, beta_fast=2.0, beta_slow=0.2),
    query_scaling=0.5,
    local_rope_theta=30.0,
    attention_cap=1.0,
    logits_cap=2.0,
    sinks=True,
)
RNG = np.random.default_rng(1)
PROMPTS = [RNG.integers(0, 19, length).tolist() for length in (5, 1, 11, 20, 7)]
SIZE, STEPS, TEMPERATURE = 3, 60, 0.7


def make_params(attention="auto"):
    graphdef, state = nnx.split(Decoder(CONFIG, rngs=nnx.Rngs(0), attention=attention))
    spread = lambda x: x + jnp.asarray(0.3 * RNG.normal(size=x.shape), x.dtype)  # noqa: E731
    return graphdef, jax.tree.map(spread, nnx.to_pure_dict(state))


GRAPHDEF, PARAMS = make_params()


@pytest.fixture(scope="module", params=["plain", "tpu", "gpu"])
def drawn(request):
    """Draws rows of 1 to 60 tokens, at most four at a time, in a cache that starts small. New rows start in the middle
    of the ring buffer, which grows while longer rows continue. The kernels run in interpret mode."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "FIRST_CACHE", 16)
        patch.setattr(attention_kernels, "INTERPRET", True)
        patch.setattr(attention_decoding, "_LANES", 16)
        patch.setattr(decoder, "decoding_kernel", lambda kind, width: request.param if kind == "blocked" else None)
        graphdef = GRAPHDEF if request.param == "plain" else make_params("blocked")[0]
        made = Sampler(graphdef, (3,), max_prompt_length=24, max_tokens=STEPS, max_concurrent_rows=4)
        found = sample_groups(made, PARAMS, PROMPTS, range(5), SIZE, jax.random.key(0), SamplingParams(TEMPERATURE))
    lengths = np.sort(found.lengths, axis=None)
    assert lengths[0] < 6 and lengths[-1] > 40, lengths
    return found


@pytest.fixture(scope="module")
def expected(drawn):
    """Returns the log-probabilities of the drawn tokens by the plain model on each whole sequence."""
    rows = [[*PROMPTS[p], *drawn.tokens[p, i, : drawn.lengths[p, i]].tolist()] for p, i in np.ndindex(5, SIZE)]
    padded = pad_tokens(rows, max(map(len, rows)))
    real = np.arange(padded.shape[1])[None] < np.array([len(row) for row in rows])[:, None]
    run = jax.jit(lambda params, tokens, real: nnx.merge(GRAPHDEF, params)(tokens, real))
    logits = np.asarray(run(PARAMS, jnp.asarray(padded), jnp.asarray(real)), np.float64) / TEMPERATURE
    table = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    out = np.zeros(drawn.tokens.shape)
    for row, (p, i) in enumerate(np.ndindex(5, SIZE)):
        places = np.arange(drawn.lengths[p, i])
        out[p, i, places] = table[row, len(PROMPTS[p]) - 1 + places, drawn.tokens[p, i, places]]
    return out


def real_of(drawn):
    return np.arange(STEPS)[None, None] < drawn.lengths[..., None]


@pytest.mark.slow
def test_sampler_matches_the_plain_model(drawn, expected):
    np.testing.assert_allclose(np.where(real_of(drawn), drawn.logprobs, 0), expected, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["plain", "blocked"])
def test_bins_match_the_plain_model(drawn, expected, attention):
    model = nnx.merge(GRAPHDEF, PARAMS)
    model.attention = attention
    batch = GroupBatch(
        pad_tokens(PROMPTS, 24), np.array([len(p) for p in PROMPTS], np.int32), drawn.tokens, drawn.lengths, None,
        rewards=np.zeros((5, SIZE), np.float32), scored=np.ones((5, SIZE), bool),
    )  # fmt: skip
    packed = pack(drawn.lengths, batch.scored, STEPS, choose_layout(SIZE, 5, (24, STEPS), 4))
    assert (np.asarray(packed.start) > 0).any(), "no bin holds two completions"
    options = ForwardOptions(TEMPERATURE, logits_chunk=100, remat=True)
    run = jax.jit(batch_logprobs, static_argnums=(0, 4))
    found = run(nnx.split(model)[0], PARAMS, batch, packed, options)
    np.testing.assert_allclose(np.where(real_of(drawn), found, 0), expected, rtol=0, atol=1e-4)
