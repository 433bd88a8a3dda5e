"""Tests every attention implementation against a softmax in float64, in values and gradients, and its memory and device
requirements.

Splash attention runs in interpret mode and is lowered for TPUs. The cuDNN implementation is replaced by the reference
implementation of the same interface.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.attention_oracle import oracle, seen_of
from tests.tiny_model import HF
from tunix_like.config.schema import Config, MeshConfig, ModelConfig
from tunix_like.errors import UserError
from tunix_like.models import attention as roads
from tunix_like.models import attention_blocked, attention_kernels
from tunix_like.models.attention import attention, group_attention, resolve_attention
from tunix_like.models.attention_parts import Causal, Lengths, Positions, part_of
from tunix_like.models.config import DecoderConfig
from tunix_like.models.decoder import Bins, Decoder
from tunix_like.models.loading import load_model
from tunix_like.models.sharding import build_mesh, place_prompts, scope
from tunix_like.runs import build as runs

pytestmark = pytest.mark.slow

P, G, T, S, H, K, WIDTH = 2, 2, 7, 6, 4, 2, 8
KINDS = ("plain", "blocked", "cudnn", "splash")
LENGTHS = np.array([6, 3], np.int32)
EMPTY = np.array([4, 0], np.int32)
BINS = np.array([[0, 0, 0, 1, 1, 2, -1], [0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, -1, -1, -1], [-1] * 7], np.int32)
COLUMNS = np.array([[4, 5, -1, -1, 0, 2, 3], [-1, -1, -1, 9, -1, -1, -1], [-1] * 7, [6, 0, 5, 1, 4, 2, 3]], np.int32)
PADDED = np.where(np.array([[0] * 7, [1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1], [1] * 7]) == 1, -1, 0)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Sets small block sizes, so that there are several blocks and a partial last one. Replaces cuDNN by the reference,
    with the errors of cuDNN for unsupported arguments."""
    reference = jax.nn.dot_product_attention

    def like_cudnn(q, k, v, *, implementation, **changes):
        assert implementation == "cudnn" and q.shape[1] % 2 == k.shape[1] % 2 == 0
        assert len({x.dtype for x in (q, k, v)}) == 1
        return reference(q, k, v, implementation="xla", **changes)

    monkeypatch.setattr(attention_blocked, "BLOCK", 3)
    monkeypatch.setattr(attention_kernels, "INTERPRET", True)
    monkeypatch.setattr(jax.nn, "dot_product_attention", like_cudnn)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def offsets_of(bins: np.ndarray) -> np.ndarray:
    """Returns the position of every token in its completion."""
    return np.array([[int((row[:i] == row[i]).sum()) for i in range(T)] for row in bins])


def found_by(function, cotangent, *arrays):
    """Returns output and gradients of one implementation."""

    def run(arrays, cotangent):
        out, pull = jax.vjp(function, *arrays)
        return out, *pull(cotangent.astype(out.dtype))

    return [np.asarray(x, np.float32) for x in jax.jit(run)(arrays, cotangent)]


def assert_same(found, wanted, tolerance):
    for one, other in zip(found, wanted, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * max(1.0, np.abs(other).max()))


SINGLE = {
    "prompts": Causal(),
    "bins": Causal(BINS),
    "padded left or right": Causal(PADDED),
    "key padding": Lengths(np.array([7, 1, 3, 0], np.int32)),
    "windows": Causal(window=3),
    "windows in bins": Causal(BINS, window=2),
    "starts": Lengths(np.array([7, 1, 3, 5], np.int32), jnp.arange(-3, 25).reshape(4, 7) % 6),
    "positions": Positions(jnp.asarray(COLUMNS)),
    "starts of positions": Positions(jnp.asarray(COLUMNS), jnp.arange(28).reshape(4, 7) % 6),
}


@pytest.mark.parametrize(("case", "dtype"), [*((case, "float32") for case in SINGLE), ("bins", "bfloat16")])
@pytest.mark.parametrize("kind", KINDS)
def test_one_part_equals_the_oracle(kind, case, dtype):
    """Padded rows have no cotangent, as in a loss, and their values are finite. There are 7 positions in blocks of 3
    and 128."""
    mask, batch = SINGLE[case], 4
    q, k, v = (normal(batch, T, heads, WIDTH) + shift for heads, shift in ((H, 0.0), (K, 0.1), (K, 0.2)))
    if dtype == "bfloat16":
        q, k, v = (np.asarray(jnp.asarray(x, jnp.bfloat16)) for x in (q, k, v))
    seen = seen_of(mask, batch, T, T)
    real = seen.any(-1)[..., None, None]
    cotangent = np.where(real, normal(batch, T, H, WIDTH + 1)[..., 1:], 0).astype(np.float32)
    found = found_by(lambda q, k, v: attention(q, part_of(k, v, mask), kind), cotangent, q, k, v)
    assert np.isfinite(found[0]).all()
    found[0] = np.where(real, found[0], 0)
    assert_same(found, oracle(q, k, v, seen, cotangent), {"float32": 1e-5, "bfloat16": 4e-2}[dtype])


def test_window_of_the_oracle():
    """Tests the oracle itself: with a window of 3, a query sees itself and the two tokens before it, within its
    completion."""
    seen = seen_of(Causal(BINS[:1], window=3), 1, T, T)[0]
    assert [np.flatnonzero(row).tolist() for row in seen] == [[0], [0, 1], [0, 1, 2], [3], [3, 4], [5], []]


SINKS = np.array([-0.5, 1.5, 0.3, 2.5], np.float32)


@pytest.mark.parametrize(
    ("lengths", "window", "cap", "sinks"),
    [
        (LENGTHS, None, None, None),
        (EMPTY, None, None, None),
        (LENGTHS, 5, None, None),
        (LENGTHS, None, 0.7, None),
        (LENGTHS, 4, 0.7, None),
        (LENGTHS, None, None, SINKS),
        (EMPTY, 4, None, SINKS),
        (LENGTHS, None, None, SINKS + 200),
    ],
    ids=["prompts", "an empty prompt", "windows", "caps", "windows and caps", "sinks", "sinks, windows", "far sinks"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_two_parts_equal_one_softmax(kind, lengths, window, cap, sinks):
    """Tests bins of completions over their prompts. The oracle gets the keys of every prompt once per bin. In the
    second case one bin sees no keys. With windows, later tokens see a part of the prompt or nothing."""
    starts = None
    if window is not None:
        starts = jnp.asarray(offsets_of(BINS).reshape(P, G * T) + lengths[:, None] - window + 1)
    prompt_mask, own_mask = Lengths(lengths, starts), Causal(BINS, window)
    q, cotangent = normal(P, G, T, H, WIDTH), normal(P, G, T, H, WIDTH + 1)[..., 1:]
    keys = [normal(P, S, K, WIDTH), normal(P, S, K, WIDTH + 1)[..., 1:]]
    keys += [normal(P, G, T, K, WIDTH), normal(P, G, T, K, WIDTH + 1)[..., 1:]]
    of_prompt = seen_of(prompt_mask, P, G * T, S).reshape(P * G, T, S)
    seen = np.concatenate([of_prompt, seen_of(own_mask, P * G, T, T)], axis=-1)
    real = seen.any(-1)[..., None, None]
    cotangent = np.where(real.reshape(P, G, T, 1, 1), cotangent, 0)

    def rows(x):
        return x.reshape(P * G, *x.shape[2:])

    def run(q, prompt_k, prompt_v, own_k, own_v, sinks=None):
        own = part_of(rows(own_k), rows(own_v), own_mask)
        return group_attention(q, part_of(prompt_k, prompt_v, prompt_mask), own, kind=kind, cap=cap, sinks=sinks)

    out, of_q, *of_keys = found_by(run, cotangent, q, *keys, *([] if sinks is None else [sinks]))
    k, v = (np.concatenate([np.repeat(keys[i], G, axis=0), rows(keys[i + 2])], axis=1) for i in (0, 1))
    wanted, wanted_q, of_k, of_v, *of_sinks = oracle(rows(q), k, v, seen, rows(cotangent), cap, sinks)
    prompts = [x[:, :S].reshape(P, G, S, K, WIDTH).sum(1) for x in (of_k, of_v)]
    own = [x[:, S:].reshape(P, G, T, K, WIDTH) for x in (of_k, of_v)]
    assert np.isfinite(out).all()
    found = [np.where(real, rows(out), 0), rows(of_q), *of_keys]
    assert_same(found, [wanted, wanted_q, *prompts, *own, *of_sinks], 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_one_part_with_sinks(kind):
    mask, (q, k, v) = Causal(), (normal(4, T, heads, WIDTH) + shift for heads, shift in ((H, 0), (K, 0.1), (K, 0.2)))
    cotangent = normal(4, T, H, WIDTH + 1)[..., 1:]
    run = lambda q, k, v, sinks: attention(q, part_of(k, v, mask), kind, sinks=sinks)  # noqa: E731
    found = found_by(run, cotangent, q, k, v, SINKS)
    assert_same(found, oracle(q, k, v, seen_of(mask, 4, T, T), cotangent, sinks=SINKS), 1e-5)


def test_splash_attention_translates_for_tpus(monkeypatch):
    """Lowers the forward and backward kernels, with lengths that are not multiples of a tile."""
    monkeypatch.setattr(attention_kernels, "INTERPRET", False)
    q, k = (jax.ShapeDtypeStruct((1, 150, heads, WIDTH), jnp.bfloat16) for heads in (H, K))

    def loss(mask, q, k, v):
        return attention(q, part_of(k, v, mask), "splash").astype(jnp.float32).sum()

    for mask in (Causal(), Causal(jnp.zeros((1, 150), jnp.int32))):
        gradient = jax.jit(jax.grad(functools.partial(loss, mask), argnums=(0, 1, 2)))
        program = gradient.trace(q, k, k).lower(lowering_platforms=("tpu",)).as_text()
        assert program.count("tpu_custom_call") == 3


@pytest.mark.parametrize("shape", [[8, 1, 1], [2, 2, 2]], ids=str)
def test_splash_attention_on_a_mesh(shape):
    """Each device runs the kernel for its own rows and heads, with sinks. Values and gradients equal those of one
    device."""
    mesh = build_mesh(MeshConfig(shape=shape, axis_names=["data", "fsdp", "tp"]))
    q, k, v = (normal(8, T, heads, WIDTH + shift)[..., :WIDTH] for heads, shift in ((H, 0), (K, 1), (K, 2)))
    prompt_k, prompt_v = (normal(4, S, K, WIDTH + shift)[..., :WIDTH] for shift in (3, 4))
    lengths, segments = jnp.asarray([6, 3, 1, 5]), jnp.asarray(np.tile(BINS, (2, 1)))

    def run(q, k, v, prompt_k, prompt_v, sinks):
        own = part_of(k, v, Causal(segments))
        prompt = part_of(prompt_k, prompt_v, Lengths(lengths))
        return group_attention(q.reshape(4, 2, T, H, WIDTH), prompt, own, kind="splash", sinks=sinks)

    real = np.tile(BINS, (2, 1)).reshape(4, 2, T, 1, 1) >= 0
    cotangent = np.where(real, normal(4, 2, T, H, WIDTH), 0)
    expected = found_by(run, cotangent, q, k, v, prompt_k, prompt_v, SINKS)
    with scope(mesh):
        placed = [place_prompts(x, mesh, axis=0) for x in (q, k, v, prompt_k, prompt_v)]
        found = found_by(run, cotangent, *placed, SINKS)
    assert_same([np.where(real, found[0], 0), *found[1:]], [np.where(real, expected[0], 0), *expected[1:]], 1e-5)


def test_blocked_attention_without_keys_is_zero():
    """A query without a key gets 0 and contributes no gradient, whatever its cotangent."""
    q, k, v = normal(1, T, H, WIDTH), normal(1, T, K, WIDTH), normal(1, T, K, WIDTH)
    nobody = Lengths(np.zeros(1, np.int32))
    for found in found_by(lambda q, k, v: attention(q, part_of(k, v, nobody), "blocked"), np.ones_like(q), q, k, v):
        assert (found == 0).all()


def test_blocks_without_visible_keys_are_skipped():
    """Causal blocks end at the diagonal, bins at their completions, key padding at the longest prompt. Windows exclude
    the blocks before them."""
    blocks = attention_blocked._Blocks(2, 2, attention_blocked.CAUSAL_BLOCKS)
    rows = jnp.arange(8)
    ids = jnp.asarray([[0, 0, 1, 1, 1, 2, 2, -1]])
    order, number = attention_blocked._meetings(
        jnp.where(ids < 0, -2, ids), ids, blocks, jnp.arange(8)[None], rows, None
    )
    visited = [sorted(map(int, row[:count])) for row, count in zip(order, number, strict=True)]
    assert visited == [[0], [1], [1, 2], [2, 3]]
    keys = jnp.asarray([[0, 0, 0, -1, -1, -1], [0, -1, -1, -1, -1, -1]])
    zeros = jnp.zeros((2, 4), jnp.int32)
    starts = jnp.arange(8)[None] - 2  # windows of 3
    order, number = attention_blocked._meetings(
        jnp.zeros_like(ids), jnp.zeros_like(ids), blocks, jnp.arange(8)[None], rows, starts
    )
    visited = [sorted(map(int, row[:count])) for row, count in zip(order, number, strict=True)]
    assert visited == [[0], [0, 1], [1, 2], [2, 3]]
    backwards = jnp.arange(8)[None, ::-1]
    order, number = attention_blocked._meetings(
        jnp.zeros_like(ids), jnp.zeros_like(ids), blocks, backwards, None, starts
    )
    visited = [sorted(map(int, row[:count])) for row, count in zip(order, number, strict=True)]
    assert visited == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2], [0, 1]]
    found = attention_blocked._meetings(zeros, keys, blocks, jnp.arange(6)[None], None, None)
    assert found[1].tolist() == [2, 2]


@pytest.mark.parametrize("own", [False, True], ids=["causal", "two parts"])
def test_memory_is_a_fraction_of_the_scores(own, monkeypatch):
    """At 2048 positions, forward and backward passes together need a fraction of the memory of the scores of one
    pass."""
    monkeypatch.undo()  # the default block sizes
    length, heads, width = 2048, 2, 16
    shapes = [(1, length, heads, width)] * 3
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def loss(kind, q, k, v):
        if not own:
            return attention(q, part_of(k, v, Causal()), kind).sum()
        parts = part_of(k, v, Lengths(jnp.full(1, 9))), part_of(k, v, Causal(jnp.zeros((1, length), jnp.int32)))
        return group_attention(q[None], *parts, kind=kind).sum()

    def temporary(kind):
        compiled = jax.jit(jax.grad(functools.partial(loss, kind), argnums=(0, 1, 2))).lower(*arrays).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    plain, blocked = temporary("plain"), temporary("blocked")
    assert plain > heads * length**2 * 4
    assert blocked < plain / 5


NUMBERS = {"vocab_size": 11, "hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "head_dim": WIDTH}
CONFIG = DecoderConfig(**NUMBERS, num_heads=H, num_kv_heads=K)
SHALLOW = DecoderConfig(**NUMBERS | {"num_layers": 1}, num_heads=H, num_kv_heads=K)


def everything(graphdef, params):
    """Returns a number that depends on `__call__`, with and without padding, and on `completion_hidden` after
    `prefill`, and their logits and hidden states at unpadded positions."""
    model = nnx.merge(graphdef, params)
    rng = np.random.default_rng(0)
    tokens, mask = rng.integers(0, 11, (4, T)), (PADDED >= 0).astype(np.int32)
    mask[3] = 1
    logits = jnp.where(mask[..., None] == 1, model(jnp.asarray(tokens), jnp.asarray(mask)), 0.0)
    whole = model(jnp.asarray(tokens))
    lengths = jnp.asarray(LENGTHS)
    first, cache, _ = model.prefill(jnp.asarray(rng.integers(0, 11, (P, S))), lengths, remat=True)
    bins = BINS.reshape(P, G, T)
    offsets = offsets_of(BINS).reshape(P, G, T)
    bin_tokens = jnp.asarray(rng.integers(0, 11, (P, G, T)))
    packed = Bins(bin_tokens, jnp.asarray(offsets), jnp.asarray(bins))
    hidden = model.completion_hidden(first, cache, lengths, packed)
    hidden = jnp.where(bins[..., None] >= 0, hidden, 0.0)
    return jnp.sin(logits).mean() + jnp.sin(whole).mean() + (hidden**3).mean(), (logits, whole, hidden)


WINDOWED = dataclasses.replace(CONFIG, windows=(3, None))
CAPPED = dataclasses.replace(WINDOWED, attention_cap=0.7, sinks=True)


@pytest.mark.parametrize(("kind", "config"), [("blocked", CAPPED), ("cudnn", WINDOWED), ("splash", SHALLOW)])
def test_decoder_gives_the_same_results_with_every_implementation(kind, config):
    """Compares logits, hidden states and the gradient of every weight. The model has one layer, because splash
    attention compiles slowly in interpret mode."""
    model, results = Decoder(config, rngs=nnx.Rngs(0), attention="plain"), []
    for model.attention in ("plain", kind):
        graphdef, state = nnx.split(model)
        run = jax.jit(jax.value_and_grad(functools.partial(everything, graphdef), has_aux=True))
        results.append(jax.tree.leaves(run(nnx.to_pure_dict(state))))
    assert_same(results[1], results[0], 2e-5)


def test_auto_selects_by_the_size_of_the_scores(monkeypatch):
    """Blocks are used if the scores of all parts together exceed the constant, and the plain implementation for arrays
    of masks. This also holds with kernels that do not support caps, windows or sinks."""
    taken = []
    monkeypatch.setattr(roads, "joined_attention", lambda q, parts, cap=None, sinks=None: taken.append(len(parts)) or q)
    refuse = lambda *_: pytest.fail("a kernel was called")  # noqa: E731
    for kernel in ("cudnn_attention", "splash_attention"):
        monkeypatch.setattr(roads, kernel, refuse)
    monkeypatch.setattr(roads, "SCORES", P * G * T * H * (S + T))
    q = jnp.zeros((P, G, T, H, WIDTH))
    prompt = part_of(jnp.zeros((P, S, K, WIDTH)), jnp.zeros((P, S, K, WIDTH)), Lengths(jnp.asarray(LENGTHS)))
    keys = jnp.zeros((P * G, T, K, WIDTH))
    own, dense = part_of(keys, keys, Causal()), part_of(keys, keys, jnp.ones((1, T, T), bool))
    group_attention(q, prompt, own)
    assert taken == []
    monkeypatch.setattr(roads, "SCORES", P * G * T * H * (S + T) - 1)
    group_attention(q, prompt, own)
    group_attention(q, prompt, dense)
    assert taken == [2]
    group_attention(q, prompt, own, kind="cudnn", cap=5.0)
    group_attention(q, prompt, own, kind="splash", cap=5.0)
    group_attention(q, prompt, part_of(keys, keys, Causal(window=2)), kind="splash")
    group_attention(q, prompt, own, kind="cudnn", sinks=jnp.zeros(H))
    assert taken == [2] * 5


def test_large_masks_are_not_materialized_for_cudnn(monkeypatch):
    """Beyond the limit the same call runs in blocks, with the same result."""
    q, k, v = (jnp.asarray(normal(2, T, heads, WIDTH)) for heads in (H, K, K))
    run = lambda: attention(q, part_of(k, v, Causal(jnp.asarray(BINS[:2]))), "cudnn")  # noqa: E731
    written = run()
    monkeypatch.setattr(attention_kernels, "MASK_ELEMENTS", 2 * T * T - 1)
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *args, **kwargs: pytest.fail("called"))
    np.testing.assert_allclose(np.asarray(run())[:, :6], np.asarray(written)[:, :6], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "said"), [("cudnn", "NVIDIA"), ("splash", "TPU"), ("blokced", "Did you mean 'blocked'")]
)
def test_unavailable_implementation_raises_an_error(name, said):
    with pytest.raises(UserError, match=rf"model\.attention: .*{said}"):
        Decoder(CONFIG, rngs=nnx.Rngs(0), attention=name)
    assert resolve_attention("auto", jnp.float32, WIDTH) == "auto"
    gpu = [Device("NVIDIA H200")]
    with pytest.raises(UserError, match=r"model\.attention: cudnn does not support the attention sinks"):
        resolve_attention("cudnn", jnp.bfloat16, 64, gpu, sinks=True)
    assert resolve_attention("auto", jnp.bfloat16, 64, gpu, sinks=True) == "cudnn"


def test_config_key_selects_the_implementation_of_the_model():
    """The config key selects the implementation of loaded and abstract decoders. An unavailable one raises an error
    before weights are allocated."""
    kinds = runs.kinds_of(Config(model=ModelConfig(attention="blocked")))
    assert load_model(HF, init="random", **kinds)[0].attention == "blocked"
    assert load_model(HF, init="random")[0].attention == "auto"
    with pytest.raises(UserError, match=r"model\.attention: splash needs a TPU"):
        load_model(HF, init="random", attention="splash")
    with pytest.raises(UserError, match=r"model\.attention: unknown value 'flash'"):
        ModelConfig(attention="flash")


class Device:
    def __init__(self, kind, capability="9.0", platform="gpu"):
        self.device_kind, self.compute_capability, self.platform = kind, capability, platform


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "resolved"),
    [
        (Device("NVIDIA H200"), "bfloat16", 128, "cudnn"),
        (Device("NVIDIA H200"), "float32", 128, "auto"),
        (Device("NVIDIA H200"), "bfloat16", 256, "auto"),
        (Device("NVIDIA H200"), "bfloat16", 60, "auto"),
        (Device("NVIDIA TITAN V", "7.0"), "bfloat16", 64, "auto"),
        (Device("AMD Instinct MI300X", "gfx942"), "bfloat16", 64, "auto"),
    ],
)
def test_auto_takes_the_kernel_of_the_gpu(monkeypatch, device, dtype, head_dim, resolved):
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert resolve_attention("auto", jnp.dtype(dtype), head_dim) == resolved
    monkeypatch.undo()
    assert resolve_attention("auto", jnp.dtype(dtype), head_dim, [device]) == resolved
    if resolved == "auto":
        with pytest.raises(UserError, match=r"model\.attention: cudnn needs"):
            resolve_attention("cudnn", jnp.dtype(dtype), head_dim, [device])


def test_auto_takes_splash_attention_on_tpus(monkeypatch):
    tpus = [Device("TPU v5 lite", platform="tpu")] * 4
    assert resolve_attention("auto", jnp.bfloat16, 128, tpus) == "splash"
    assert resolve_attention("auto", jnp.bfloat16, None, tpus) == "auto"
    with pytest.raises(UserError, match=r"model\.attention: splash needs heads of one width"):
        resolve_attention("splash", jnp.bfloat16, None, tpus)
    monkeypatch.setattr(jax, "devices", lambda: tpus)
    assert resolve_attention("auto", jnp.bfloat16, 128) == "splash"
