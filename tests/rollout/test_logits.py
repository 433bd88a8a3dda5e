"""Tests sampled tokens against the exact distribution: by counts, by an even grid of uniform numbers, and by a plain
sort."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tunix_like.compile.costs import Counter
from tunix_like.config.schema import MeshConfig
from tunix_like.models.sharding import build_mesh, scope
from tunix_like.rollout.logits import (
    LARGEST_BLOCK,
    RowSampling,
    SamplingParams,
    choose,
    choose_each,
    from_bits,
    in_blocks,
    inverse_cdf,
    keep_each_top_k,
    keep_top_k,
    keep_top_p,
    uniform_number,
)

SMALL = np.array([1.3, -0.2, 0.4, 2.1, -3.0, 0.5, -1.0], np.float32)
LARGE = (1.5 * np.random.default_rng(0).normal(size=3000)).astype(np.float32)
"""Twelve blocks of the two-level search, the last one incomplete."""


@functools.partial(jax.jit, static_argnames=("params", "count"))
def draw(logits, key, params: SamplingParams, count: int):
    """Returns how often each token is sampled from one row of logits in `count` draws."""

    def some(total, key):
        rows = 2000
        uniform = jax.vmap(uniform_number)(jax.random.split(key, rows))
        tokens, _ = choose(jnp.broadcast_to(logits, (rows, logits.size)), uniform, params)
        return total.at[tokens].add(1), None

    return jax.lax.scan(some, jnp.zeros(logits.size, jnp.int32), jax.random.split(key, count // 2000))[0]


def softmax(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    scaled = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    return scaled / scaled.sum()


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """Returns the chi-square statistic of counts against probabilities, in standard deviations by the cube root
    transform of Wilson and Hilferty. Rare tokens are pooled until 20 are expected."""
    order = np.argsort(probs)
    pooled: list[tuple[float, float]] = []
    seen = expected = 0.0
    for token in order:
        seen, expected = seen + counts[token], expected + counts.sum() * probs[token]
        if expected >= 20:
            pooled.append((seen, expected))
            seen = expected = 0.0
    statistic = sum((s - e) ** 2 / e for s, e in pooled)
    freedom = len(pooled) - 1
    assert freedom > 1
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5


def nucleus(probs: np.ndarray, top_p: float) -> np.ndarray:
    """Returns the smallest set of most probable tokens with at least `top_p` of the mass, by a sort."""
    order = np.argsort(-probs, kind="stable")
    enough = int(np.searchsorted(np.cumsum(probs[order]), top_p * probs.sum()))
    return np.isin(np.arange(len(probs)), order[: enough + 1])


def kept(probs: np.ndarray, where: np.ndarray) -> np.ndarray:
    return np.where(where, probs, 0) / probs[where].sum()


def most_probable(probs: np.ndarray, k: int) -> np.ndarray:
    return probs >= np.sort(probs)[-k]


def distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Returns the sampling distribution: temperature, then the k most probable tokens, then their nucleus."""
    probs = softmax(logits, params.temperature)
    if params.top_k is not None:
        probs = kept(probs, most_probable(probs, params.top_k))
    return kept(probs, nucleus(probs, params.top_p)) if params.top_p < 1 else probs


@pytest.mark.parametrize(
    ("logits", "params"),
    [
        (SMALL, SamplingParams()),
        (SMALL, SamplingParams(temperature=0.5)),
        (SMALL, SamplingParams(top_k=3)),
        (SMALL, SamplingParams(top_p=0.8)),
        (SMALL, SamplingParams(temperature=1.7, top_k=5, top_p=0.9)),
        (LARGE, SamplingParams()),
        (LARGE, SamplingParams(temperature=1.7)),
        (LARGE, SamplingParams(temperature=1.3, top_k=1500, top_p=0.8)),
    ],
    ids=lambda value: str(value) if isinstance(value, SamplingParams) else f"V={len(value)}",
)
def test_counts_follow_the_distribution(logits, params):
    probs = distribution(logits, params)
    counts = np.asarray(draw(jnp.asarray(logits), jax.random.key(1), params, 20_000))
    assert counts.sum() == 20_000
    assert counts[probs == 0].sum() == 0, "what was cut off is never drawn"
    assert chi_square(counts, probs) < 3


def test_random_number_is_the_middle_of_its_cell_rounded_down():
    """Compares with the exact integers, at and around each power of two and at random."""
    rng = np.random.default_rng(0)
    near = np.concatenate([(1 << np.arange(33))[:, None] + np.arange(-3, 4), rng.integers(0, 2**32, (999, 7))]).ravel()
    bits = np.unique(near[(near >= 0) & (near < 2**32)]).astype(np.uint32)
    found = np.asarray(jax.jit(from_bits)(bits)).astype(np.float64)
    middle = (bits.astype(np.float64) + 0.5) / 2.0**32
    below = middle - found
    assert (below >= 0).all() and (below < np.spacing(found.astype(np.float32))).all()
    assert found.min() > 0 and found.max() < 1


@pytest.mark.parametrize("logits", [[-40.0, 0, 0, 0], [0, 0, 0, -40.0], [-12.0, 0.3, -15.0, 0, -12.0], SMALL])
def test_each_token_is_drawn_by_its_share_of_the_2_to_the_32_bit_patterns(logits):
    """Tokens ascend with the bits, so bisection counts the patterns of each token. Cumulative weights are rounded to
    float32, which moves a border by at most two cells of `2**-24`."""
    logits = jnp.asarray(logits, jnp.float32)
    token_of = jax.jit(lambda bits: choose(logits[None], from_bits(bits)[None], SamplingParams())[0][0])
    borders = []
    for token in range(len(logits)):  # the number of patterns that draw `token` or an earlier one
        low, high = 0, 2**32
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if int(token_of(np.uint32(middle))) <= token else (low, middle)
        borders.append(low)
    exact = softmax(np.asarray(logits))
    shares = np.diff([0, *borders]) / 2.0**32
    assert borders[-1] == 2**32
    assert np.abs(shares - exact).max() <= 2 * 2.0**-24
    assert abs(shares[0] - exact[0]) <= 2.0**-32 + 1e-6 * exact[0], "the borders near 0 are as fine as the bits"
    assert (shares[exact < 2.0**-40] == 0).all()


@pytest.mark.parametrize("size", [5, LARGEST_BLOCK, 3 * LARGEST_BLOCK, 1000])
def test_even_grid_samples_tokens_in_proportion(size):
    """With `u = (i + 1/2) / N` the count of a token is `N p` to within 1 (2 with rounding at the borders of blocks),
    and tokens ascend."""
    rng = np.random.default_rng(size)
    weights = rng.uniform(size=size) * (rng.uniform(size=size) < 0.7)
    count = 20_000
    grid = jnp.asarray((np.arange(count) + 0.5) / count, jnp.float32)
    found = jax.jit(jax.vmap(lambda u: inverse_cdf(jnp.asarray(weights, jnp.float32)[None], u[None])[0]))(grid)
    tokens = np.asarray(found)
    assert (np.diff(tokens) >= 0).all()
    counts = np.bincount(tokens, minlength=size)
    assert np.abs(counts - count * weights / weights.sum()).max() <= 2
    assert counts[weights == 0].sum() == 0


def test_token_of_weight_zero_is_never_sampled():
    """Uses both ends of the unit interval. One case has a few tokens among zeros, with weights that differ by 1e30. The
    other has many tokens followed by zeros, whose running sum may end below their sum because of rounding."""
    rng = np.random.default_rng(0)
    sparse = np.zeros((90, 600), np.float32)
    for row, alive in zip(sparse, [1, 2, 5] * 30, strict=True):
        row[rng.choice(600, alive, replace=False)] = 10.0 ** rng.uniform(-30, 0, alive)
    dense = rng.uniform(size=(90, 600)).astype(np.float32) * (np.arange(600) < rng.integers(100, 600, (90, 1)))
    weights = np.concatenate([sparse, dense.astype(np.float32)])
    for uniform in (0.0, 1e-30, 0.5, 1 - 2.0**-24):
        tokens = np.asarray(inverse_cdf(jnp.asarray(weights), jnp.full(len(weights), uniform, jnp.float32)))
        assert (weights[np.arange(len(weights)), tokens] > 0).all()


def test_rounding_at_the_border_of_a_block_draws_no_zero():
    """`u` is exactly the end of the first block, and subtracting the sum of the second block again overshoots it."""
    sums = np.random.default_rng(0).uniform(0.1, 1, (20_000, 3)).astype(np.float32)
    first, second = sums[:, 0], sums[:, 1]
    total = first + second + sums[:, 2]
    uniform = first / total
    chosen = (uniform * total == first) & (first + second - second > first)
    assert chosen.sum() > 100
    weights = np.zeros((chosen.sum(), 3 * LARGEST_BLOCK), np.float32)
    weights[:, [5, LARGEST_BLOCK + 5, 2 * LARGEST_BLOCK + 5]] = sums[chosen]
    tokens = np.asarray(inverse_cdf(jnp.asarray(weights), jnp.asarray(uniform[chosen])))
    assert (weights[np.arange(len(weights)), tokens] > 0).all()


def rows_of_logits() -> np.ndarray:
    """Returns `[40, 300]` logits, flat and peaked."""
    rng = np.random.default_rng(3)
    return (rng.normal(size=(40, 300)) * rng.uniform(0.1, 6, (40, 1))).astype(np.float32)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_top_p_keeps_exactly_the_smallest_set(top_p):
    probs = np.asarray(jax.nn.softmax(rows_of_logits(), axis=-1))
    found = np.asarray(keep_top_p(jnp.asarray(probs), top_p))
    for row, out in zip(probs.astype(np.float64), found, strict=True):
        border = np.cumsum(np.sort(row)[::-1]) - top_p * row.sum()
        if np.abs(border).min() > 1e-5:  # otherwise float32 may put the token at the border on either side
            np.testing.assert_array_equal(out > 0, nucleus(row, top_p))
        np.testing.assert_array_equal(out[out > 0], row[out > 0].astype(np.float32))


def test_top_p_keeps_ties_and_zeros():
    """Ties with the last token are kept, a total below one is used unchanged, and zeros stay zero."""
    probs = jnp.asarray([[0.5, 0.2, 0.2, 0.1], [0.1, 0.4, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    found = keep_top_p(probs, 0.6)
    np.testing.assert_array_equal(found > 0, [[1, 1, 1, 0], [0, 1, 0, 0], [0, 1, 0, 0]])
    assert (np.asarray(keep_top_p(probs, 1e-6)) > 0).sum(axis=1).tolist() == [1, 1, 1]


def test_top_p_distinguishes_adjacent_floats():
    below = np.nextafter(np.float32(0.3), np.float32(0))
    probs = jnp.asarray([[0.4, 0.3, below, 0.0], [below, 0.3, below, 0.1]], jnp.float32)
    np.testing.assert_array_equal(keep_top_p(probs, 0.65) > 0, [[1, 1, 0, 0], [1, 1, 1, 0]])
    np.testing.assert_array_equal(keep_top_p(probs, 0.2) > 0, [[1, 0, 0, 0], [0, 1, 0, 0]])


def test_top_k_keeps_k_and_ties():
    probs = np.asarray(jax.nn.softmax(rows_of_logits(), axis=-1))
    for k in (1, 7, 300):
        found = np.asarray(keep_top_k(jnp.asarray(probs), k))
        expected = np.where(probs >= np.sort(probs, axis=1)[:, [-k]], probs, 0)
        np.testing.assert_array_equal(found, expected)
        assert ((found > 0).sum(axis=1) == k).all()
    np.testing.assert_array_equal(keep_top_k(jnp.asarray([[0.4, 0.1, 0.4, 0.1]]), 1), np.float32([[0.4, 0, 0.4, 0]]))


def test_greedy_is_the_argmax():
    logits = rows_of_logits()
    tokens, logprobs = choose(jnp.asarray(logits), jnp.zeros(40), SamplingParams(temperature=0.0))
    np.testing.assert_array_equal(tokens, logits.argmax(axis=1))
    np.testing.assert_allclose(logprobs, np.log([softmax(row).max() for row in logits]), atol=1e-5)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(0.6)], ids=str)
@pytest.mark.parametrize(("shape", "tokens"), [([1, 1, 8], 4800), ([2, 2, 2], 4800), ([2, 2, 2], 1514)], ids=str)
def test_sharded_vocabulary_samples_the_same_tokens(shape, tokens, params):
    """The tokens equal those of one device. Devices exchange single numbers per row, never logits. A part of 757 tokens
    has no divisor between 8 and the largest block."""
    rng = np.random.default_rng(5)
    logits, uniform = (2 * rng.normal(size=(40, tokens))).astype(np.float32), rng.uniform(size=40).astype(np.float32)
    mesh = build_mesh(MeshConfig(shape=shape, axis_names=["data", "fsdp", "tp"]))
    rows = PartitionSpec(("data", "fsdp"))
    placed = (
        jax.device_put(logits, NamedSharding(mesh, PartitionSpec(*rows, "tp"))),
        jax.device_put(uniform, NamedSharding(mesh, rows)),
    )
    with scope(mesh):
        compiled = jax.jit(functools.partial(choose, params=params)).lower(*placed).compile()
        tokens, logprobs = compiled(*placed)
    expected = choose(jnp.asarray(logits), jnp.asarray(uniform), params)
    np.testing.assert_array_equal(tokens, expected[0])
    np.testing.assert_allclose(logprobs, expected[1], atol=1e-5)
    assert sum(Counter(compiled.as_text(), {}).total().collectives.values()) < 100 * 40


@pytest.mark.parametrize("params", [(1.0,), (0.6, 0.5, 4), (1.3, 0.9), (0.0,)], ids=str)
@pytest.mark.parametrize("tokens", [700, 758])
def test_logits_in_blocks_give_the_tokens_of_plain_logits(tokens, params):
    """758 has no divisor between 8 and the largest block."""
    rng = np.random.default_rng(3)
    hidden, head = rng.normal(size=(40, 16)).astype(np.float32), rng.normal(size=(16, tokens)).astype(np.float32)
    uniform = jnp.asarray(rng.random(40), jnp.float32)
    blocks = in_blocks(jnp.asarray(head))
    assert blocks.shape == ((16, 4, 175) if tokens == 700 else (16, 758))
    found = choose(jnp.tensordot(hidden, blocks, 1), uniform, SamplingParams(*params))
    expected = choose(
        jnp.pad(hidden @ head, ((0, 0), (0, 1)), constant_values=-jnp.inf), uniform, SamplingParams(*params)
    )
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_allclose(found[1], expected[1], atol=1e-5)


@pytest.mark.parametrize("params", [SamplingParams(0.6), SamplingParams(0.6, top_p=0.5, top_k=4)], ids=str)
def test_log_probabilities_cover_the_whole_vocabulary(params):
    """They are computed at the temperature and not restricted by top-k or top-p, as the trainer computes them."""
    logits = rows_of_logits()
    uniform = jnp.asarray(np.random.default_rng(4).uniform(size=40), jnp.float32)
    tokens, logprobs = choose(jnp.asarray(logits), uniform, params)
    expected = [np.log(softmax(row, 0.6)[token]) for row, token in zip(logits, np.asarray(tokens), strict=True)]
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_parameters_by_row_equal_common_parameters(seed):
    """Rows with their own parameters equal `choose` with one row's parameters for all."""
    rng = np.random.default_rng(seed)
    rows = [(0.0, 1.0, None), (1.0, 1.0, None), (0.7, 0.6, None), (1.3, 1.0, 7), (1.0, 0.9, 30), (2.0, 0.05, 1)]
    rows = [rows[index] for index in rng.integers(0, len(rows), 24)]
    logits = jnp.asarray(1.5 * rng.normal(size=(24, 700)), jnp.float32)
    uniform = jnp.asarray(rng.random(24), jnp.float32)
    temperature, top_p, top_k = zip(*rows, strict=True)
    each = RowSampling(
        np.array(temperature, np.float32), np.array(top_p, np.float32), np.array([k or 700 for k in top_k], np.int32)
    )
    tokens, logprobs = jax.jit(choose_each)(logits, uniform, each)
    wanted = {params: choose(logits, uniform, SamplingParams(*params)) for params in set(rows)}
    for row, params in enumerate(rows):
        expected = wanted[params]
        assert tokens[row] == expected[0][row]
        np.testing.assert_allclose(logprobs[row], expected[1][row], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_top_k_by_row_equals_common_top_k():
    """Cases with ties, with k equal to the number of tokens, and with zeros."""
    rng = np.random.default_rng(0)
    probs = jnp.asarray(rng.integers(0, 6, (40, 50)) * rng.random((40, 1)), jnp.float32)
    sizes = rng.integers(1, 51, 40)
    found = keep_each_top_k(probs, jnp.asarray(sizes, jnp.int32))
    for row, size in enumerate(sizes.tolist()):
        np.testing.assert_array_equal(found[row], keep_top_k(probs[row : row + 1], size)[0])
