"""Sampling from a dequantised copy of a base in NF4."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.published_configs import QWEN3_8B
from tests.parameters import others_slow
from tests.rollout.arrays import sample_groups
from tunix_like.config.schema import LoraConfig, MeshConfig, RolloutConfig
from tunix_like.data.maze import tokenizer
from tunix_like.models import quantized_base
from tunix_like.models.config import DecoderConfig
from tunix_like.models.decoder import Decoder
from tunix_like.models.fields import Experts
from tunix_like.models.lora import add_lora
from tunix_like.models.opening import load_abstract
from tunix_like.models.quantized_base import dequantized_model, quantize_base
from tunix_like.models.sharding import build_mesh, place_params
from tunix_like.planning import sizes
from tunix_like.planning.sizes import Device, Planner
from tunix_like.rollout.sampler import Sampler
from tunix_like.runtime.accelerators import KINDS
from tunix_like.serving.runner import Runner, Weights
from tunix_like.training.engine import make_engine
from tunix_like.types import SamplingParams

CONFIG = DecoderConfig(
    vocab_size=tokenizer().vocab_size,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=8,
    num_kv_heads=8,
    head_dim=8,
)
ROLLOUT = RolloutConfig(max_prompt_length=8, max_tokens_to_generate=12, max_concurrent_rows=32)
PROMPTS = [[4, 5, 6], [7], [5, 5], [3, 4]] * 2
LORA = LoraConfig(rank=4)
LONG = RolloutConfig(max_prompt_length=384, max_tokens_to_generate=768)


def adapted(quantized="nf4"):
    """Returns graph and weights of a quantised model whose adapters change its outputs."""
    graphdef, state = nnx.split(add_lora(quantize_base(Decoder(CONFIG, rngs=nnx.Rngs(0)), quantized), LORA))
    params = nnx.to_pure_dict(state)
    noise = np.random.default_rng(0)
    spread = lambda path, x: x + 0.3 * noise.normal(size=x.shape) if path[-1].key == "lora_b" else x  # noqa: E731
    return graphdef, jax.tree_util.tree_map_with_path(spread, params)


def qwen3_8b(quantized):
    kinds = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "quantize": quantized}
    return add_lora(load_abstract(QWEN3_8B, init="random", **kinds)[0], LORA)


def is_quantized(params):
    return any(leaf.dtype == jnp.uint8 for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("place", others_slow(["one device", "mesh", "other devices"], "mesh"))
def test_the_copy_samples_what_the_codes_sample(place):
    graphdef, params = adapted()
    devices = jax.devices()
    mesh = None
    if place != "one device":
        chosen = devices[:8] if place == "mesh" else devices[:4]
        mesh = build_mesh(MeshConfig(shape=[1, len(chosen), 1], axis_names=["data", "fsdp", "tp"]), chosen)
        params = place_params(params, mesh)
    rollout = ROLLOUT if place != "other devices" else RolloutConfig(**{**vars(ROLLOUT), "devices": 4})
    engine = make_engine(graphdef, tokenizer(), rollout, mesh)
    placed = engine.place(params)
    assert is_quantized(params) and not is_quantized(placed)
    sampling = SamplingParams(1.0)
    key = jax.random.key(1)
    found = sample_groups(engine, placed, PROMPTS, range(8), 4, key, sampling)

    alone, weights = adapted()
    plain = Sampler(alone, engine.eos_ids, max_prompt_length=8, max_tokens=12)
    wanted = sample_groups(plain, plain.place(weights), PROMPTS, range(8), 4, key, sampling)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=1e-4)
    assert len({tuple(row) for row in found.tokens.reshape(-1, 12)}) > 8


def test_another_sampler_compiles_nothing_and_copies_only_projections(monkeypatch):
    graphdef, params = adapted()
    first, second = (make_engine(graphdef, tokenizer(), ROLLOUT) for _ in range(2))
    placed = first.place(params)
    monkeypatch.setattr(quantized_base, "dequantize", None)  # would fail if it were traced again
    assert jax.tree.structure(second.place(params)) == jax.tree.structure(placed)
    assert placed["embed_tokens"]["embedding"] is params["embed_tokens"]["embedding"]
    # the server of `serve` reads the same graph
    Runner(Weights(first.graphdef, placed, first.eos_ids, first.mesh), 4, 16)


@pytest.mark.parametrize(
    ("quantized", "gigabytes", "copies"),
    [
        ("nf4", 80, True),
        pytest.param("nf4", 24, False, marks=pytest.mark.slow),
        pytest.param("int8", 80, False, marks=pytest.mark.slow),
    ],
)
def test_memory_decides_about_the_copy(quantized, gigabytes, copies):
    """The base of Qwen3-8B takes 6.4 GB in NF4, and the copy of its projections 13.9 GB."""
    planner = Planner(qwen3_8b(quantized), rollout=LONG, device=Device("gpu", gigabytes * 10**9))
    assert planner.dequantizes(planner.layout()) == copies
    needed = sizes._sampling(planner._sampling_work(None, copies), 1, 1, 1).bytes
    assert (needed > 6.4e9 + 13.9e9) == copies
    if copies:  # not if it would not leave memory for a set number of completions
        rows = dataclasses.replace(LONG, max_concurrent_rows=512)
        assert not dataclasses.replace(planner, rollout=rows).dequantizes(None)


@pytest.mark.slow
def test_layout_counts_the_time_to_dequantise():
    """On 8 chips of 16 GB, NF4 fits without tp, but there is room for a copy only if tp splits it."""
    kind = KINDS["v5e"]
    mesh = build_mesh(MeshConfig(shape=[1, 8, 1], axis_names=["data", "fsdp", "tp"]))
    planner = Planner(qwen3_8b("nf4"), mesh, rollout=LONG, device=Device("tpu", kind.memory, kind))
    chosen = planner.layout()
    assert chosen.mesh.shape["tp"] >= 4 and planner.dequantizes(chosen)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [None, 4], ids=["of training", "of their own"])
def test_the_sampler_does_what_its_layout_assumes(devices, monkeypatch):
    kind = KINDS["v5e"]
    monkeypatch.setattr(sizes, "this_device", lambda: Device("tpu", kind.memory, kind))
    rollout = dataclasses.replace(LONG, devices=devices)
    mesh = build_mesh(MeshConfig(shape=[1, 4, 1], axis_names=["data", "fsdp", "tp"]), jax.devices()[:4])
    model = qwen3_8b("nf4")
    layout = Planner(model, mesh, rollout=rollout).layout()
    engine = make_engine(nnx.split(model)[0], tokenizer(), rollout, mesh)
    assert engine.mesh == layout.mesh
    assert (nnx.merge(engine.graphdef, [None] * engine.graphdef.num_leaves).quantized is None) == layout.dequantizes


def test_time_to_dequantise_counts_projections_only():
    """Of a mixture of experts, nearly all weights are experts, which are not quantised."""
    sparse = dataclasses.replace(CONFIG, experts=Experts(64, 2, 256, normalised=True))
    mesh = build_mesh(MeshConfig(shape=[8, 1, 1], axis_names=["data", "fsdp", "tp"]))
    codes = quantize_base(Decoder(sparse, rngs=nnx.Rngs(0)), "nf4")
    seconds = [
        sizes.decode_seconds(model, mesh, 64, (8, 12), KINDS["v5e"]) for model in (codes, dequantized_model(codes))
    ]
    quantized = sizes._share(sparse, codes.param_dtype, None, "nf4", mesh).quantized
    read = sum(quantized) * jnp.dtype(codes.dtype).itemsize / KINDS["v5e"].memory_bytes
    assert seconds[0] - seconds[1] == pytest.approx((sizes.NF4_READS - 1) * read, rel=0.05)
