"""Tests quantized weights: against the nearest code by exhaustive search, their error, loading tensor by tensor, and
that programs keep them quantized in memory."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.test_lora import HF
from tests.models.test_parity import FAMILIES
from tests.parameters import others_slow
from tunix_like import LoraConfig, UserError, add_lora, load_model, merge_lora
from tunix_like.models import quantization, weights
from tunix_like.models.loading import load_abstract, save_model
from tunix_like.models.lora import _bit_sum, split_params
from tunix_like.models.quantization import BLOCK, NF4, dequantize, fused_product, quantize, quantized_product
from tunix_like.rollout.decoding import _merge

RNG = np.random.default_rng(0)
KERNEL = (RNG.standard_normal((4 * BLOCK, 9)) * np.geomspace(1e-3, 10, 9)).astype(np.float32)
KERNEL[:, 3] = 0
KERNEL[:BLOCK, 4] = 0
ONE_LAYER = {"num_hidden_layers": 1, "head_dim": BLOCK // 4}
WIDE = HF | ONE_LAYER | {"hidden_size": BLOCK, "intermediate_size": 2 * BLOCK}


def test_int8_is_within_half_a_step():
    codes, scale = quantize(jnp.asarray(KERNEL), "int8")
    assert codes.dtype == jnp.int8 and codes.shape == KERNEL.shape and scale.shape == (1, 9)
    np.testing.assert_allclose(scale[0], np.abs(KERNEL).max(axis=0) / 127, rtol=1e-6)
    error = np.abs(np.asarray(dequantize(codes, scale)) - KERNEL)
    assert (error <= np.asarray(scale) / 2 * (1 + 1e-4)).all() and np.abs(codes).max() == 127


def test_nf4_takes_the_nearest_of_all_codes():
    """Every number of every block gets the nearest of all 16 codes, computed in float64. Two codes share a byte."""
    codes, scale = quantize(jnp.asarray(KERNEL), "nf4")
    assert codes.dtype == jnp.uint8 and codes.shape == (2 * BLOCK, 9) and scale.shape == (4, 9)
    found = np.asarray(dequantize(codes, scale)).reshape(4, BLOCK, 9)
    blocks = KERNEL.astype(np.float64).reshape(4, BLOCK, 9)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    candidates = np.array(NF4) * largest[..., None]
    nearest = np.abs(blocks[..., None] - candidates).min(axis=-1)
    np.testing.assert_allclose(np.abs(blocks - found), nearest, atol=1e-6 * largest.max())
    assert (np.abs(found) <= largest * (1 + 1e-6)).all() and not found[:, :, 3].any()


def test_nf4_table_is_the_published_table():
    """The table has 16 quantiles of a normal distribution, by the appendix of QLoRA: asymmetric, with an exact zero."""
    from scipy.stats import norm

    offset = 0.9677083
    positive = norm.ppf(np.linspace(offset, 0.5, 9)[:-1])
    negative = -norm.ppf(np.linspace(offset, 0.5, 8)[:-1])
    expected = np.sort(np.concatenate([positive, [0], negative]))
    np.testing.assert_allclose(NF4, expected / expected.max(), atol=1e-6)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("lead", others_slow([(3,), (2, 3), ()], (2, 3)))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("form", ["of the platform", "many rows", "fused"])
def test_product_and_gradient_match_float64(monkeypatch, kind, lead, dtype, form):
    """Compares with products in float64 with the matrix that the codes represent."""
    monkeypatch.setattr(quantization, "FEW_ROWS", 0 if form == "many rows" else 3)
    codes, scale = quantize(jnp.asarray(KERNEL), kind)
    x = jnp.asarray(RNG.standard_normal((*lead, len(KERNEL))), dtype)
    gradient = jnp.asarray(RNG.standard_normal((*lead, KERNEL.shape[1])), dtype)
    fused = functools.partial(fused_product, dtype, codes=codes, scale=scale)
    out, pull = jax.vjp(fused if form == "fused" else lambda x: quantized_product(x, codes, scale, dtype), x)
    (found,) = pull(gradient)
    assert out.dtype == found.dtype == dtype
    matrix, rounding = np.asarray(dequantize(codes, scale), np.float64), jnp.finfo(dtype).eps * 4
    for result, left, right in ((out, x, matrix), (found, gradient, matrix.T)):
        left = np.asarray(left, np.float64)
        np.testing.assert_array_less(np.abs(result - left @ right), rounding * (np.abs(left) @ np.abs(right) + 1e-9))


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_backward_pass_dequantizes_again(kind):
    codes, scale = quantize(jnp.asarray(KERNEL), kind)
    x = jnp.ones((3, len(KERNEL)))
    _, kept = jax.vjp(lambda x: quantized_product(x, codes, scale, jnp.float32), x)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(kept)) <= codes.nbytes + scale.nbytes + x.nbytes


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_second_product_compiles_nothing(kind, compiled):
    """Outside of a compiled function too: there, each call of a quantized model once compiled all of its products."""
    codes, scale = quantize(jnp.asarray(KERNEL), kind)
    x = jnp.ones((3, len(KERNEL)))
    quantized_product(x, codes, scale, jnp.float32)
    compiled.clear()
    quantized_product(x, codes, scale, jnp.float32)
    assert compiled == []


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "olmo3", "ministral3", "gemma4"])
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_loading_quantizes_tensor_by_tensor(kind, family, tmp_path, monkeypatch):
    """Each tensor is quantized before the next one is read. The codes equal those of the quantized whole model, the
    shapes those of an abstract model, and a merge restores the represented weights."""
    fields = WIDE | FAMILIES.get(family, ("", {}))[1] | ONE_LAYER | {"model_type": family}
    if family == "gemma4":
        layers, width = len(fields["layer_types"]), fields["head_dim"]
        fields |= {"model_type": "gemma4_text", "num_hidden_layers": layers, "global_head_dim": width}
    whole, _ = load_model(fields, init="random")
    save_model(nnx.to_pure_dict(nnx.split(whole)[1]), whole.config, None, tmp_path)
    order = []
    for name in ("place", "quantize"):
        original = getattr(weights, name)
        monkeypatch.setattr(weights, name, lambda *a, f=original, n=name, **k: order.append(n) or f(*a, **k))
    model, _ = load_model(tmp_path, quantize=kind)
    assert order.count("quantize") == len(whole.projections())
    assert all(before == "place" for before, name in itertools.pairwise(order) if name == "quantize")
    assert model.quantized == kind
    monkeypatch.undo()
    for name, linear in merge_lora(model).projections().items():
        codes, scale = quantize(whole.projections()[name].kernel[...], kind)
        held = model.projections()[name]
        np.testing.assert_array_equal(held.kernel_codes[...], codes)
        np.testing.assert_array_equal(held.kernel_scale[...], scale)
        assert held.kernel is None
        np.testing.assert_array_equal(linear.kernel[...], dequantize(codes, scale))
    np.testing.assert_array_equal(model.embed_tokens.embedding[...], whole.embed_tokens.embedding[...])
    shapes, _, found = load_abstract(tmp_path, quantize=kind)
    assert "tensors match" in found and nnx.split(shapes)[0] == nnx.split(model)[0]
    tokens = jnp.arange(20).reshape(2, 10)
    drift = np.abs(np.asarray(model(tokens) - whole(tokens))).max() / np.abs(np.asarray(whole(tokens))).max()
    # scores of Gemma 4 are not scaled, so a softmax of random weights magnifies the error
    assert 0 < drift < {"int8": 0.05, "nf4": 0.5}[kind] * (4 if family == "gemma4" else 1)
    np.testing.assert_allclose(merge_lora(model)(tokens), model(tokens), atol=1e-5)


def test_sampling_keeps_weights_quantized():
    """The cast to the compute dtype before the loop does not change codes and scales, and casts all other weights."""
    model, _ = load_model(WIDE, init="random", quantize="nf4", dtype=jnp.bfloat16)
    graphdef, state = nnx.split(add_lora(model, LoraConfig(rank=2)))
    cast = nnx.to_pure_dict(nnx.split(_merge(graphdef, nnx.to_pure_dict(state)))[1])
    projection = cast["layers"][0]["mlp"]["up_proj"]
    dtypes = {name: leaf.dtype for name, leaf in projection.items()}
    small = {"kernel_codes": np.uint8, "kernel_scale": np.float32}
    assert dtypes == small | {"lora_a": jnp.bfloat16, "lora_b": jnp.bfloat16}
    assert cast["embed_tokens"]["embedding"].dtype == jnp.bfloat16


def test_the_fingerprint_of_nf4_is_that_of_earlier_versions():
    """Earlier versions stored the codes of two neighboring inputs in one byte."""
    codes, _ = quantize(jnp.asarray(KERNEL), "nf4")
    halves = np.asarray(codes).reshape(-1, 1, BLOCK // 2, 9)
    inputs = np.concatenate([halves & 15, halves >> 4], axis=1).reshape(-1, 9)
    earlier = inputs[::2] | (inputs[1::2] << 4)
    assert int(_bit_sum(codes)) == int(earlier.astype(np.uint64).sum()) != int(np.asarray(codes, np.uint64).sum())


def test_invalid_arguments_raise_an_error():
    said = r"model\.quantize: nf4 has blocks of 64 inputs.* the 96 inputs of layers\.0\.mlp\.down_proj; use int8"
    with pytest.raises(UserError, match=said):
        load_abstract(WIDE | {"intermediate_size": 96}, init="random", quantize="nf4")
    with pytest.raises(UserError, match=r"model\.quantize: unknown value 'int4'\. .*nf4"):
        load_model(HF, init="random", quantize="int4")
    model, _ = load_model(HF, init="random", quantize="int8")
    with pytest.raises(UserError, match=r"quantised and cannot be trained; add adapters"):
        split_params(nnx.to_pure_dict(nnx.split(model)[1]))
