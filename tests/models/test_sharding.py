"""Tests training on a mesh of simulated devices against one device, and the errors for invalid meshes."""

import bisect
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.models.layer_kinds import EXPERTS_BESIDE, SHARED_KEYS
from tests.rollout.arrays import sample_groups
from tunix_like import (
    LoraConfig,
    MaxRLConfig,
    MaxRLLearner,
    OptimizerConfig,
    RLTrainingConfig,
    RolloutConfig,
    UserError,
    add_lora,
)
from tunix_like.config.schema import MeshConfig
from tunix_like.data.maze import tokenizer
from tunix_like.models import quantization
from tunix_like.models.config import DecoderConfig
from tunix_like.models.decoder import Bins, Decoder
from tunix_like.models.fields import DeltaRule, Experts, YarnScaling
from tunix_like.models.lora import join_params, split_params
from tunix_like.models.quantized_base import quantize_base
from tunix_like.models.sharding import (
    build_mesh,
    check_divides,
    parameter_shardings,
    place_params,
    place_prompts,
    place_replicated,
    place_slots,
    scope,
    shardings_of,
)
from tunix_like.planning.bounds import decode_bytes
from tunix_like.planning.sizes import COLLECTIVE_SECONDS, Device, Planner, SamplingLayout, decode_seconds
from tunix_like.rollout import decoding, sampler, schedule
from tunix_like.runtime.accelerators import KINDS, Accelerator
from tunix_like.step.forward import ForwardOptions, place_packed
from tunix_like.step.packing import Layout, pack
from tunix_like.step.train_step import StepSpec, TrainState, gradient, step_inputs
from tunix_like.training.engine import make_engine
from tunix_like.training.sft import _Likelihood
from tunix_like.types import GroupBatch, SamplingParams

pytestmark = pytest.mark.slow

CONFIG = DecoderConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=8,
    num_kv_heads=8,
    head_dim=4,
    qkv_bias=True,
)
OTHER_CONFIGS = {
    "OLMo 3": dict(
        windows=(4, None), local_rope_theta=1e4, qk_norm=True, joint_qk_norm=True, input_norms=False, post_norms=True
    ),
    "Qwen3.5-MoE": dict(
        output_gate=True,
        experts=Experts(number=4, per_token=2, intermediate_size=24, normalised=True, shared="gated"),
    ),
    "Ministral 3": dict(rope_scaling=YarnScaling(2.0, 8), query_scaling=0.5),
    "Gemma 4": SHARED_KEYS,
    "GPT-OSS": dict(
        windows=(4, None),
        qkv_bias=True,
        o_bias=True,
        sinks=True,
        activation="clamped_swiglu",
        experts=Experts(number=4, per_token=2, intermediate_size=24, normalised=True, biases=True),
    ),
}
AXES = ["data", "fsdp", "tp"]
MESHES = {"8 fsdp": [1, 8, 1], "8 tp": [1, 1, 8], "2 x 4": [1, 2, 4], "2 x 2 x 2": [2, 2, 2]}


ADAM = OptimizerConfig(learning_rate=1e-2)


def make(mesh, seen, /, config=CONFIG, optimizer=ADAM, steps=3, **rollout):
    """Returns a learner of some steps. The reward is the parity of the length, so that the rewards of a group
    differ."""
    return MaxRLLearner(
        model=Decoder(config, rngs=nnx.Rngs(0)),
        tokenizer=tokenizer(),
        reward_fns=lambda prompts, completions, **columns: (
            seen.append(list(completions)) or [float(len(c) % 2) for c in completions]
        ),
        algo_config=MaxRLConfig(num_generations=4, beta=0.01),
        rollout_config=RolloutConfig(**{"max_prompt_length": 8, "max_tokens_to_generate": 24} | rollout),
        training_config=RLTrainingConfig(max_steps=steps, actor_optimizer=optimizer),
        mesh=mesh,
    )


def train(mesh, /, **rollout):
    seen = []
    learner = make(mesh, seen, **rollout)
    rows = [{"prompt": "UP " * (i % 5 + 1)} for i in range(16)]
    return learner.train(rows, batch_size=8), learner, seen


@pytest.fixture(scope="module")
def alone():
    return train(None)


@pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES)
def test_training_on_a_mesh_equals_training_on_one_device(alone, shape):
    """Every step has the same tokens and loss, and the final weights are equal. Each device holds its part, and no step
    is compiled again."""
    expected, single, said = alone
    row, learner, seen = train(build_mesh(MeshConfig(shape=shape, axis_names=AXES)))
    assert seen == said
    for name in ("train/loss", "train/kl", "train/rewards/mean", "train/completions/mean_length"):
        assert row[name] == pytest.approx(expected[name], abs=1e-5), name
    for one, many in zip(jax.tree.leaves(single.params), jax.tree.leaves(learner.params), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(many), atol=5e-5)
    kernel = learner.params["layers"][0]["mlp"]["up_proj"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (16 // shape[1], 32 // shape[2])
    assert row["train/perf/update_programs"] == 1 and row["train/perf/programs_compiled"] == 0


@pytest.mark.parametrize("name", OTHER_CONFIGS)
def test_training_of_other_families_on_a_mesh(name):
    config = dataclasses.replace(CONFIG, **{"qkv_bias": False} | OTHER_CONFIGS[name])
    # The unscaled scores of Gemma 4 magnify rounding in the weights until a sample of the third step differs.
    more = {"optimizer": optax.sgd(1.0), "steps": 1} if name == "Gemma 4" else {}
    expected, single, said = train(None, config=config, **more)
    row, learner, seen = train(build_mesh(MeshConfig(shape=[2, 2, 2], axis_names=AXES)), config=config, **more)
    assert seen == said and row["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-5)
    for one, many in zip(jax.tree.leaves(single.params), jax.tree.leaves(learner.params), strict=True):
        # Adam magnifies the rounding of gradients near 0, which experts with few tokens have.
        np.testing.assert_allclose(np.asarray(one), np.asarray(many), atol=5e-5 if config.experts is None else 1e-3)
        assert np.abs(np.asarray(one) - np.asarray(many)).mean() < 1e-5


@pytest.mark.parametrize("sizes", [{"data": 2, "fsdp": 2, "tp": 2}, {"fsdp": 2, "ep": 2, "tp": 2}], ids=str)
def test_gradient_of_experts_beside_an_mlp_on_a_mesh(sizes):
    """Not the weights after Adam, which magnifies rounding: without a scale of scores, small changes grow."""
    config = dataclasses.replace(CONFIG, **{"qkv_bias": False} | EXPERTS_BESIDE | {"full_kv_heads": 2})
    random = np.random.default_rng(0)
    graphdef, state = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    params = jax.tree.map(lambda x: x + 0.1 * random.normal(size=x.shape).astype(x.dtype), nnx.to_pure_dict(state))
    tokens, weights = random.integers(0, 32, (8, 16)), random.normal(size=(8, 16, 32)).astype(np.float32)

    def loss(params):
        return (jax.nn.log_softmax(nnx.merge(graphdef, params)(jnp.asarray(tokens))) * weights).sum()

    mesh = build_mesh(MeshConfig(shape=list(sizes.values()), axis_names=list(sizes)))
    expected = jax.jit(jax.grad(loss))(params)
    with scope(mesh):
        found = jax.jit(jax.grad(loss))(place_params(params, mesh))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=3e-5 * np.abs(np.asarray(other)).max())


MOE = dataclasses.replace(CONFIG, qkv_bias=False, qk_norm=True, experts=Experts(8, 2, 24, True))


@pytest.fixture(scope="module")
def experts_alone():
    return train(None, config=MOE, routing_replay=True)


@pytest.mark.parametrize(
    ("sizes", "sampling"),
    [
        ({"ep": 8}, "auto"),
        ({"fsdp": 2, "ep": 4}, [2, 1, 4, 1]),
        ({"fsdp": 2, "ep": 2, "tp": 2}, [1, 1, 4, 2]),
        ({"data": 2, "ep": 4}, [1, 2, 2, 2]),
    ],
    ids=str,
)
def test_experts_split_over_devices_train_and_sample_as_on_one_device(experts_alone, sizes, sampling):
    """With recorded experts in the update."""
    expected, single, said = experts_alone
    mesh = build_mesh(MeshConfig(shape=list(sizes.values()), axis_names=list(sizes)))
    row, learner, seen = train(mesh, config=MOE, mesh=sampling, routing_replay=True)
    assert seen == said and row["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-5)
    for one, many in zip(jax.tree.leaves(single.params), jax.tree.leaves(learner.params), strict=True):
        # Adam magnifies the rounding of gradients near 0, which experts with few tokens have.
        np.testing.assert_allclose(np.asarray(one), np.asarray(many), atol=1e-3)
        assert np.abs(np.asarray(one) - np.asarray(many)).mean() < 1e-5
    layer, fsdp, ep = learner.params["layers"][0], sizes.get("fsdp", 1), sizes["ep"]
    kernels = layer["mlp"]["experts"]["up_proj"]["kernel"], layer["self_attn"]["q_proj"]["kernel"]
    tp = sizes.get("tp", 1)
    shapes = (8 // ep, 16 // fsdp, 24 // tp), (16 // (fsdp * ep if fsdp > 1 else 1), 32 // tp)
    assert tuple(kernel.addressable_shards[0].data.shape for kernel in kernels) == shapes
    placed = learner.engine.place(learner.params)["layers"][0]["mlp"]["experts"]["up_proj"]["kernel"]
    sampled_ep = 1 if sampling == "auto" else sampling[2]
    assert placed.addressable_shards[0].data.shape[0] == 8 // sampled_ep
    assert row["train/perf/update_programs"] == 1 and row["train/perf/programs_compiled"] == 0


def test_errors_of_the_axis_for_experts():
    mesh = build_mesh(MeshConfig(shape=[8], axis_names=["ep"]))
    with pytest.raises(UserError, match="'ep' splits experts, and this model has none"):
        make(mesh, [])
    with pytest.raises(UserError, match="8 devices along 'ep' do not divide layers.0.mlp.experts.*kernel"):
        make(mesh, [], config=dataclasses.replace(MOE, experts=Experts(4, 2, 24, True)))


@pytest.mark.parametrize("shape", [[1, 8, 1], [2, 2, 2]], ids=str)
def test_recurrent_layers_on_a_mesh_equal_those_on_one_device(shape):
    rule = DeltaRule(key_heads=2, value_heads=4, key_width=8, value_width=8, taps=4)
    changes = {"delta_rule": rule, "recurrent_layers": (True, False), "output_gate": True, "rotary_width": 2}
    # the gradient of a bias of keys that are not rotated is rounding, which Adam enlarges
    config = dataclasses.replace(CONFIG, qkv_bias=False, **changes)
    expected, single, said = train(None, config=config)
    row, learner, seen = train(build_mesh(MeshConfig(shape=shape, axis_names=AXES)), config=config)
    assert seen == said
    assert row["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-5)
    for one, many in zip(jax.tree.leaves(single.params), jax.tree.leaves(learner.params), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(many), atol=1e-3)  # of 3e-2, Adam's steps
    kernel = learner.params["layers"][0]["linear_attn"]["in_proj_qkv"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (16 // shape[1], 64 // shape[2])
    assert row["train/perf/update_programs"] == 1 and row["train/perf/programs_compiled"] == 0


LONG = {"max_prompt_length": 16, "max_tokens_to_generate": 32}


@pytest.fixture(scope="module")
def alone_long():
    return train(None, **LONG)


@pytest.mark.parametrize("shape", [[4, 2, 1], [2, 4, 1], [1, 8, 1], [2, 2, 2]], ids=str)
def test_sequences_split_over_devices_train_the_same_weights(alone_long, shape):
    expected, single, said = alone_long
    row, learner, seen = train(build_mesh(MeshConfig(shape=shape, axis_names=["fsdp", "cp", "tp"])), **LONG)
    assert seen == said
    for name in ("train/loss", "train/kl", "train/rewards/mean"):
        assert row[name] == pytest.approx(expected[name], abs=1e-5), name
    for one, many in zip(jax.tree.leaves(single.params), jax.tree.leaves(learner.params), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(many), atol=5e-5)
    kernel = learner.params["layers"][0]["mlp"]["up_proj"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (16 // shape[0] // shape[1], 32 // shape[2])
    assert row["train/perf/update_programs"] == 1 and row["train/perf/programs_compiled"] == 0


@pytest.mark.parametrize("name", OTHER_CONFIGS)
def test_split_sequences_of_other_families(name):
    config = dataclasses.replace(CONFIG, **{"qkv_bias": False} | OTHER_CONFIGS[name])
    expected, single, said = train(None, config=config, **LONG)
    mesh = build_mesh(MeshConfig(shape=[2, 4], axis_names=["fsdp", "cp"]))
    row, learner, seen = train(mesh, config=config, **LONG)
    assert seen == said and row["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-5)
    for one, many in zip(jax.tree.leaves(single.params), jax.tree.leaves(learner.params), strict=True):
        assert np.abs(np.asarray(one) - np.asarray(many)).mean() < 1e-5


@pytest.mark.parametrize("layout", [[8, 1, 1], [2, 1, 4], [1, 8, 1], [1, 2, 4]], ids=str)
def test_every_rollout_layout_samples_the_same_tokens(alone, layout):
    """Tokens and losses are the same with weights sharded over fsdp in training and in any other way in sampling."""
    expected, _, completions = alone
    row, learner, seen = train(build_mesh(MeshConfig(shape=[1, 8, 1], axis_names=AXES)), mesh=layout)
    assert seen == completions
    assert row["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-5)
    assert list(learner.engine.mesh.shape.values()) == layout
    kernel = learner.engine.place(learner.params)["layers"][0]["mlp"]["up_proj"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (16 // layout[1], 32 // layout[2])
    assert row["train/perf/programs_compiled"] == 0 and row["train/time/reshard"] > 0


def test_weights_are_replicated_while_sampling_where_they_fit():
    """With little memory, the smallest possible number of devices shares the weights."""
    mesh = build_mesh(MeshConfig(shape=[1, 8, 1], axis_names=AXES))
    model = Decoder(dataclasses.replace(CONFIG, intermediate_size=4096), rngs=nnx.Rngs(0))
    rollout = RolloutConfig(max_prompt_length=8, max_tokens_to_generate=24, max_concurrent_rows=8)

    def chosen(memory: int) -> list[int]:
        layout = Planner(model, mesh, rollout=rollout, device=Device("cpu", memory)).layout().mesh
        return list(layout.shape.values())

    assert chosen(10**9) == [8, 1, 1]
    # The memory from which on a device holds 1, or half, of the weights. With more memory, `tp` never grows.
    sizes = range(10**5, 10**7, 10**4)
    whole, split = (sizes[bisect.bisect_left(sizes, -tp, key=lambda memory: -chosen(memory)[2])] for tp in (1, 2))
    assert split < whole and chosen(split) == [4, 1, 2]
    assert chosen(1000) == [1, 1, 8]


def test_layout_with_the_shortest_predicted_decode_step_is_chosen():
    """With many weights per completion it is worth sending, with few it is not."""
    mesh = build_mesh(MeshConfig(shape=[1, 8, 1], axis_names=AXES))
    rollout = RolloutConfig(max_prompt_length=1, max_tokens_to_generate=4)

    def chosen(memory: int, width: int, kind: Accelerator | None) -> SamplingLayout:
        model = Decoder(dataclasses.replace(CONFIG, intermediate_size=width), rngs=nnx.Rngs(0))
        return Planner(model, mesh, rollout=rollout, device=Device("tpu", memory, kind)).layout()

    slow = dataclasses.replace(KINDS["v5e"], memory_bytes=1e9, network_bytes=1e9)
    layout = chosen(10**9, 4096, slow)
    assert layout.mesh.shape["tp"] > 1 and "ms with tp 1, " in layout.reason
    assert chosen(10**9, 4096, KINDS["v5e"]).mesh.shape["tp"] == 1  # the sums take longer than the weights
    assert chosen(10**9, 4096, None).mesh.shape["tp"] == 1
    assert chosen(10**9, 16, dataclasses.replace(slow, network_bytes=1e6)).mesh.shape["tp"] == 1
    least = next(size for size in range(10**6, 10**7, 5 * 10**5) if "with tp 2" in chosen(size, 4096, slow).reason)
    few = chosen(least, 4096, dataclasses.replace(slow, network_bytes=1e3))
    assert few.mesh.shape["tp"] == 2 and "with tp 1" not in few.reason, "layouts that do not fit are left out"


def test_moved_caches_stay_sharded():
    """After a move to fewer rows, each device holds its part of the rows and heads."""
    mesh = build_mesh(MeshConfig(shape=[2, 2, 2], axis_names=AXES))
    graphdef, state = nnx.split(Decoder(CONFIG, rngs=nnx.Rngs(0)))
    with scope(mesh):
        params = place_params(nnx.to_pure_dict(state), mesh)
        inputs = place_prompts((jnp.ones((4, 8), jnp.int32), jnp.full(4, 8)), mesh, axis=0)
        prompts = place_slots(decoding.prefill(graphdef, params, *inputs), mesh)
        rows = place_slots(decoding.empty_rows(prompts, 4, 16, 8, 2), mesh)
        grown = decoding.grow(rows, 16)
        picked = np.arange(16).reshape(4, 4)[:, :2]
        moved = decoding.regroup(prompts, grown, np.arange(4), picked, np.ones((4, 2), bool), mesh)
    for (k, v), count in [(layer, 8) for layer in moved[1].cache] + [(layer, 4) for layer in moved[0].cache]:
        assert k.sharding.shard_shape(k.shape)[:2] == v.sharding.shard_shape(v.shape)[:2] == (count // 4, 4)


def test_predicted_time_of_a_decode_step():
    """At 1 byte per second, from memory the needed bytes, and from the network two sums per layer."""
    model, mesh = Decoder(CONFIG, rngs=nnx.Rngs(0)), build_mesh(MeshConfig(shape=[4, 1, 2], axis_names=AXES))
    slow = dataclasses.replace(KINDS["v5e"], memory_bytes=1.0, network_bytes=math.inf)
    needed = decode_bytes(model, mesh, (4, 8), (8, 24), rounds=1) / 24
    sums = 2 * CONFIG.num_layers
    assert decode_seconds(model, mesh, 32, (8, 24), slow) == pytest.approx(needed + sums * COLLECTIVE_SECONDS)
    slow = dataclasses.replace(slow, memory_bytes=math.inf, network_bytes=1.0)
    sent = 8 * CONFIG.hidden_size * 4  # an all-reduce of two devices receives its operand once
    assert decode_seconds(model, mesh, 32, (8, 24), slow) == pytest.approx(sums * (sent + COLLECTIVE_SECONDS))
    alone = build_mesh(MeshConfig(shape=[8, 1, 1], axis_names=AXES))
    assert decode_seconds(model, alone, 32, (8, 24), slow) == 0


@pytest.fixture
def traced_anew():
    """A product that was traced before would not be traced again, and other tests must not get the one of this test."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize("prompts", [8, 2])
@pytest.mark.parametrize("shape", [[1, 8, 1], [2, 2, 2]], ids=str)
def test_quantised_products_count_the_rows_of_one_device(monkeypatch, traced_anew, shape, prompts):
    """The oracle is the sharding that the compiler gives the inputs of the products, in the forward and the backward
    pass of prompts and completions. Two prompts cannot be split, so each device has all rows."""
    counted, held = [], []
    rows, product = quantization._rows_per_device, quantization.plain_product

    def recorded(x):
        counted.append(rows(x))
        return counted[-1]

    def inspected(dtype, x, codes, scale):
        jax.debug.inspect_array_sharding(x, callback=lambda s: held.append(math.prod(s.shard_shape(x.shape)[:-1])))
        return product(dtype, x, codes, scale)

    monkeypatch.setattr(quantization, "_rows_per_device", recorded)
    monkeypatch.setattr(quantization, "plain_product", inspected)
    mesh = build_mesh(MeshConfig(shape=shape, axis_names=AXES))
    model = quantize_base(Decoder(dataclasses.replace(CONFIG, num_layers=1), rngs=nnx.Rngs(0)), "int8")
    graphdef, state = nnx.split(add_lora(model, LoraConfig(rank=2)))
    trained, frozen = split_params(place_params(nnx.to_pure_dict(state), mesh))

    def loss(trained, frozen, tokens, lengths):
        decoder = nnx.merge(graphdef, join_params(trained, frozen))
        first, cache, _ = decoder.prefill(tokens[:, 0], lengths)
        offsets, segments = (jnp.broadcast_to(x, tokens.shape) for x in (jnp.arange(tokens.shape[2]), 0))
        return decoder.completion_hidden(first, cache, lengths, Bins(tokens, offsets, segments)).sum()

    with scope(mesh):
        inputs = place_prompts((np.ones((prompts, 3, 4), np.int32), np.full(prompts, 4)), mesh, axis=0)
        jax.jit(jax.grad(loss)).lower(trained, frozen, *inputs).compile()
    parts = 1 if prompts == 2 else shape[0] * shape[1]
    assert set(counted) == set(held) == {prompts * 4 // parts, prompts * 12 // parts}


@pytest.mark.parametrize("kinds", [{"param_dtype": jnp.bfloat16}, {"quantize": "int8"}], ids=str)
def test_models_that_cannot_be_trained_are_sampled_on_a_mesh(kinds):
    """A layout is also chosen for these models, although their weights have no optimizer."""
    mesh = build_mesh(MeshConfig(shape=[1, 8, 1], axis_names=AXES))
    model = Decoder(CONFIG, rngs=nnx.Rngs(0), param_dtype=kinds.get("param_dtype", jnp.float32))
    model = quantize_base(model, kinds.get("quantize"))
    graphdef, state = nnx.split(model)
    rollout = RolloutConfig(max_prompt_length=8, max_tokens_to_generate=4, max_concurrent_rows=8)
    engine = make_engine(graphdef, tokenizer(), rollout, mesh)
    params = engine.place(place_params(nnx.to_pure_dict(state), mesh))
    out = sample_groups(engine, params, [[4, 5]] * 8, range(8), 1, jax.random.key(0), SamplingParams())
    assert (out.lengths > 0).all()


def test_a_layout_that_does_not_divide_the_model_is_not_chosen():
    """An odd vocabulary cannot be split over tp. Without memory the weights keep the layout of training."""
    mesh = build_mesh(MeshConfig(shape=[1, 8, 1], axis_names=AXES))
    model = Decoder(dataclasses.replace(CONFIG, vocab_size=33), rngs=nnx.Rngs(0))
    rollout = RolloutConfig(max_prompt_length=8, max_tokens_to_generate=24)
    layout = Planner(model, mesh, rollout=rollout, device=Device("cpu", 1000)).layout().mesh
    assert list(layout.shape.values()) == [1, 8, 1]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ([4, 1, 1], r"rollout.mesh: got \[4, 1, 1\]; give the numbers .* whose product must be 8"),
        ([8], r"rollout.mesh: got \[8\]; give auto, or the numbers of devices along data, fsdp and tp"),
        ("replicated", "rollout.mesh: got 'replicated'"),
        ([True, 1, 8], "rollout.mesh: got .True"),
    ],
)
def test_invalid_rollout_layout_raises_an_error(layout, message):
    with pytest.raises(UserError, match=message):
        make(build_mesh(MeshConfig(shape=[1, 8, 1], axis_names=AXES)), [], mesh=layout)


def test_rows_are_moved_and_refilled_on_a_mesh(alone):
    mesh = build_mesh(MeshConfig(shape=[2, 2, 2], axis_names=AXES))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "FEWEST_TOKENS_LEFT", 1)
        patch.setattr(schedule, "FEWEST_ROWS", {"cpu": 1})
        moved = train(mesh)
    waiting = train(mesh, max_concurrent_rows=8)
    assert moved[2] == waiting[2] == alone[2]


def test_sampler_state_is_sharded_over_all_devices(monkeypatch):
    """Checks the completion cache, which is the largest array besides the weights, while rows are filled, grown and
    moved: of every leaf each of the eight devices holds an eighth."""
    mesh = build_mesh(MeshConfig(shape=[2, 2, 2], axis_names=AXES))
    advance, seen = decoding.advance, set()

    def spy(graphdef, params, prompts, rows, *rest):
        for leaf in jax.tree.leaves(rows.cache):
            assert {8 * shard.data.nbytes for shard in leaf.addressable_shards} == {leaf.nbytes}, leaf.shape
        seen.add((rows.live.shape, rows.room))
        return advance(graphdef, params, prompts, rows, *rest)

    monkeypatch.setattr(decoding, "advance", spy)
    monkeypatch.setattr(schedule, "FIRST_CACHE", 16)
    monkeypatch.setattr(schedule, "FEWEST_TOKENS_LEFT", 1)
    monkeypatch.setattr(schedule, "FEWEST_ROWS", {"cpu": 1})
    config = dataclasses.replace(CONFIG, num_layers=1)
    graphdef, state = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    params = place_params(nnx.to_pure_dict(state), mesh)
    work = sampler.Sampler(graphdef, range(4), max_prompt_length=8, max_tokens=24, mesh=mesh)
    sample_groups(work, params, [[4, 5]] * 8, range(8), 4, jax.random.key(0), SamplingParams(1.0, 1.0, None))
    shapes, rooms = zip(*seen, strict=True)
    assert len(set(shapes)) > 1 and set(rooms) == {16, 24}, "rows were moved, and the cache grew"


def test_each_device_computes_its_own_prompts_only():
    """Compares the memory of the compiled gradient and prefill on one of eight devices with that of one device. It is
    slightly more than an eighth. If every device computed every token, it would be all of it."""
    config = DecoderConfig(
        vocab_size=512, hidden_size=64, intermediate_size=256, num_layers=2, num_heads=8, num_kv_heads=8, head_dim=8
    )
    graphdef, state = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    lengths, ones = np.full((16, 1), 32, np.int32), np.ones((16, 1), np.float32)
    batch = GroupBatch(
        np.zeros((16, 32), np.int32), lengths[:, 0], np.zeros((16, 1, 32), np.int32), lengths, None, ones, ones > 0
    )
    packed = pack(lengths, ones > 0, 32, Layout(16, 16, 1, True))
    options = ForwardOptions(1.0, 64, False)
    data = step_inputs(batch, np.ones(16, bool), packed)

    def bytes_on(mesh) -> list[int]:
        params = place_params(nnx.to_pure_dict(state), mesh)
        placed = data._replace(batch=place_replicated(data.batch, mesh), packed=place_packed(packed, mesh))
        prompts = place_prompts((batch.prompt_tokens, batch.prompt_lengths), mesh, axis=0)
        weight, own = jnp.asarray(ones), shardings_of(params, mesh)
        spec = StepSpec(graphdef, _Likelihood(), optax.identity(), options, mesh and TrainState(own, None))
        run = jax.jit(lambda params, data: gradient(spec, params, data, weight[..., None], weight, data.packed.sets))
        with scope(mesh):
            programs = run.lower(params, placed), decoding.prefill.lower(graphdef, params, *prompts)
            return [program.compile().memory_analysis().temp_size_in_bytes for program in programs]

    for many, one in zip(bytes_on(build_mesh(MeshConfig(shape=[8, 1]))), bytes_on(None), strict=True):
        assert many < 0.4 * one


def test_cache_has_the_sharding_of_its_rows_and_heads():
    mesh = build_mesh(MeshConfig(shape=[2, 2, 2], axis_names=AXES))
    cache, scalar = place_slots((jnp.zeros((8, 4, 3, 5)), jnp.int32(0)), mesh)
    assert cache.addressable_shards[0].data.shape == (2, 2, 3, 5) and scalar.shape == ()
    odd = place_slots(jnp.zeros((6, 3, 3, 5)), mesh)
    assert odd.addressable_shards[0].data.shape == odd.shape, "what is not divided is everywhere"


def test_auto_uses_every_device_along_the_first_axis():
    assert dict(build_mesh(MeshConfig()).shape) == {"fsdp": 8, "tp": 1}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (MeshConfig(shape=[3, 1]), "mesh.shape: .* needs 3 devices, but there are 8"),
        (MeshConfig(shape=[4]), "one positive number per axis"),
        (MeshConfig(shape="all"), "mesh.shape: expected auto"),
        (MeshConfig(axis_names=["fsdp", "model"]), "mesh.axis_names"),
    ],
)
def test_invalid_mesh_raises_an_error(config, said):
    with pytest.raises(UserError, match=said):
        build_mesh(config)


def test_a_dimension_that_the_mesh_does_not_divide_is_named():
    mesh = build_mesh(MeshConfig(shape=[4, 2]))
    with pytest.raises(UserError, match=r"do not divide layers\.0\.mlp\.up_proj\.kernel \[18, 4\]"):
        parameter_shardings({"layers": {0: {"mlp": {"up_proj": {"kernel": jnp.zeros((18, 4))}}}}}, mesh)


def test_heads_and_batches_that_the_mesh_does_not_divide_are_named():
    few = DecoderConfig(**{**dataclasses.asdict(CONFIG), "num_kv_heads": 4})
    with pytest.raises(UserError, match=r"mesh.shape: 8 devices along 'tp' do not divide the 4 key heads"):
        check_divides(build_mesh(MeshConfig(shape=[1, 8])), few)
    with pytest.raises(UserError, match=r"data.batch_size: 6 prompts are not divisible by the 4 devices"):
        learner = make(build_mesh(MeshConfig(shape=[2, 2, 2], axis_names=AXES)), [])
        learner.train([{"prompt": "UP"}] * 6, batch_size=6)
