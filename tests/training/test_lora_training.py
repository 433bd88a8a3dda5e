"""Tests the training of adapters: their gradient equals that of the plain model, the base is bitwise unchanged and has
neither gradient nor moments, the reference is the base, and runs are resumed and sharded as without adapters."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tunix_like
from tests.callbacks import OnRow
from tests.tiny_model import HF
from tunix_like import GRPOConfig, GRPOLearner, LoraConfig, OptimizerConfig, RolloutConfig, UserError, add_lora
from tunix_like.config.schema import MeshConfig, RLTrainingConfig, SFTConfig
from tunix_like.models.lora import check_base, fingerprint, join_params, split_params
from tunix_like.models.sharding import build_mesh, place_params
from tunix_like.runs.trained import open_trained
from tunix_like.step.forward import batch_logprobs
from tunix_like.storage.checkpoints import Checkpoints
from tunix_like.training import arguments
from tunix_like.training.sft import SFTTrainer

from .repeated_prompts import (
    BATCH,
    EVERYONE,
    GRAPHDEF,
    LAYOUTS,
    OBJECTIVES,
    PARAMS,
    PLAIN,
    data_of,
    difference,
    keep_gradient,
    packed_as,
    plain_step,
    repeated,
)
from .small_learner import ROWS, TOKENIZER, assert_same, collect, differ, make, make_model, varied

pytestmark = pytest.mark.slow

HF = HF | {
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
GRPO = GRPOConfig(num_generations=4, beta=0.1)


def adapted(quantize=None, seed=0, rank=4, **kinds):
    base, _ = tunix_like.load_model(HF, init="random", quantize=quantize, **kinds)
    return add_lora(base, LoraConfig(rank=rank), seed)


def learner_of(model=None, algo=GRPO, **training):
    training = {"actor_optimizer": OptimizerConfig(learning_rate=0.02), **training}
    return make(algo, learner=GRPOLearner, reward=varied, model=adapted() if model is None else model, **training)


def copied(tree):
    return jax.tree.map(np.array, tree)


@pytest.fixture(scope="module")
def taken_apart():
    """Returns graph, non-zero adapters, and frozen weights of the model that is used to test the full step."""
    graphdef, state = nnx.split(add_lora(nnx.merge(GRAPHDEF, PARAMS), LoraConfig(rank=3, alpha=5)))
    trained, frozen = split_params(nnx.to_pure_dict(state))
    leaves, structure = jax.tree.flatten(trained)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [x + 0.1 * jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)]
    return graphdef, jax.tree.unflatten(structure, moved), frozen


def test_gradient_equals_that_of_the_plain_model(taken_apart):
    """The gradient of every adapter equals that of the plain forward pass of repeated prompts. Layers are
    recomputed."""
    graphdef, trained, frozen = taken_apart
    loss, expected = repeated(graphdef=graphdef)(join_params(trained, frozen), EVERYONE, None, None)
    expected, _ = split_params(expected)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(expected))
    options = PLAIN._replace(remat=True)
    run = plain_step(graphdef, OBJECTIVES["on-policy"], keep_gradient, options)
    _, gradient, metrics, _ = jax.jit(run)(trained, trained, data_of(), frozen=frozen)
    assert jax.tree.structure(gradient) == jax.tree.structure(expected)
    assert difference(gradient, expected) <= 1e-5
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(float(optax.tree.norm(expected)), rel=1e-5)


@pytest.mark.parametrize("quantize", [None, "int8", "nf4"])
def test_step_computes_no_gradient_of_the_base(quantize):
    """Only adapters have moments. In the traced step no product has the shape of a frozen matrix, and nothing is
    scattered into one; either would be a gradient of the base."""
    plain = nnx.to_pure_dict(nnx.split(adapted())[1])
    matrices = {x.shape for x in jax.tree.leaves(split_params(plain)[1]) if x.ndim > 1}
    graphdef, state = nnx.split(adapted(quantize))
    trained, frozen = split_params(nnx.to_pure_dict(state))
    optimizer = optax.adam(1e-3)
    moments = optimizer.init(trained)
    assert max(x.size for x in jax.tree.leaves((trained, moments))) == 4 * 64

    def made(trained, moments, frozen):
        run = plain_step(graphdef, OBJECTIVES["on-policy"], optimizer, PLAIN)
        found = shapes_made(jax.make_jaxpr(run)(trained, moments, data_of(), frozen=frozen).jaxpr)
        return found & (matrices | {shape[::-1] for shape in matrices})

    assert made(trained, moments, frozen) == set()
    if quantize is not None:
        return
    everything = join_params(trained, frozen)
    output = {x.shape[::-1] for x in [plain["embed_tokens"]["embedding"]]}  # the transposed gradient of the embedding
    assert made(everything, optimizer.init(everything), {}) == matrices | output, "as it is with everything trained"


def make_base():
    return tunix_like.load_model(HF, init="random")[0]


def shapes_made(jaxpr):
    """Returns the shapes of all products and scattered sums, including those of inner programs."""
    found = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("dot_general", "scatter-add"):
            found |= {variable.aval.shape for variable in equation.outvars}
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            found |= shapes_made(inner) if hasattr(inner, "eqns") else set()
    return found


def test_base_is_unchanged():
    """It is bitwise unchanged in the learner and in the model, and not copied. The adapters change."""
    model = adapted("nf4")
    learner = learner_of(model)
    trained, frozen = copied(learner.state.params), copied(learner.frozen)
    arrays = {id(leaf) for leaf in jax.tree.leaves(learner.frozen)}
    assert {id(leaf) for leaf in jax.tree.leaves(learner.reference.params)} == arrays
    rows = collect(learner)
    assert_same(copied(learner.frozen), frozen)
    assert differ(copied(learner.state.params), trained) and rows[-1]["train/kl"] > 1e-6 > abs(rows[0]["train/kl"])
    assert_same(copied(nnx.to_pure_dict(nnx.split(model)[1])), copied(learner.params))
    assert_same(copied(nnx.to_pure_dict(nnx.split(adapted("nf4"))[1])), join_params(trained, frozen))


def test_reference_is_the_initial_model():
    """For new adapters the reference is the base. For trained adapters it is the base with these adapters."""
    data = data_of()
    logprobs = jax.jit(functools.partial(batch_logprobs, options=PLAIN), static_argnums=0)
    base, state = nnx.split(make_base())
    learner = learner_of()
    expected = logprobs(base, nnx.to_pure_dict(state), data.batch, data.packed)
    np.testing.assert_array_equal(logprobs(*learner.reference, data.batch, data.packed), expected)
    learner.train(ROWS, batch_size=4)
    np.testing.assert_array_equal(logprobs(*learner.reference, data.batch, data.packed), expected)
    assert differ(logprobs(learner.graphdef, learner.params, data.batch, data.packed), expected)
    again = learner_of(learner.model)
    assert_same(copied(again.reference.params), copied(again.params))
    assert again.reference.graphdef == again.graphdef
    mine, reference = (split_params(params) for params in (again.params, again.reference.params))
    same = jax.tree.map(lambda a, b: a is b, mine, reference)
    assert not any(jax.tree.leaves(same[0])) and all(jax.tree.leaves(same[1])), "adapters are copied, the base is not"


def test_the_base_itself_as_reference():
    """The base stays quantised and is not copied."""
    base, _ = tunix_like.load_model(HF, init="random", quantize="nf4")
    learner = learner_of(add_lora(base, LoraConfig(rank=4)), ref_model=base)
    where = lambda tree: sorted(leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree))  # noqa: E731
    assert where(learner.reference.params) == where(learner.frozen) and learner.reference.graphdef == nnx.split(base)[0]


def test_resumed_run_is_bitwise_equal(tmp_path):
    """The checkpoint contains only adapters and their moments."""
    folder = {"output_dir": str(tmp_path / "run"), "checkpoint_every_n_steps": 1}
    learner_of(max_steps=1, **folder).train(ROWS, batch_size=4)
    resumed, whole = learner_of(max_steps=3, **folder), learner_of(max_steps=3)
    resumed.train(ROWS, batch_size=4)
    whole.train(ROWS, batch_size=4)
    assert_same(copied(resumed.params), copied(whole.params))
    with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        adapters = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), whole.state.params)
        restored = checkpoints.restore(3, {"params": adapters})[0]["params"]  # raises if the checkpoint has more arrays
    assert_same(copied(restored), copied(whole.state.params))
    other = add_lora(make_base(), LoraConfig(rank=4, alpha=9))
    with pytest.raises(UserError, match="(?s)another run.*  adapters: .*alpha 4.*alpha 9"):
        learner_of(other, max_steps=4, **folder).train(ROWS, batch_size=4)
    other = add_lora(tunix_like.load_model(HF, init="random", seed=1)[0], LoraConfig(rank=4))
    with pytest.raises(UserError, match="checkpoints: the adapters were trained with another base"):
        learner_of(other, max_steps=4, **folder).train(ROWS, batch_size=4)


@pytest.mark.parametrize("kinds", [{}, {"quantize": "nf4"}, {"param_dtype": jnp.bfloat16}])
def test_fingerprint_of_the_base_does_not_depend_on_sharding(kinds, tmp_path):
    """It is equal on one device and on a mesh, and different if one bit differs. Another backend matters only if
    weights were read from files."""

    def of(model, mesh=None):
        params = place_params(nnx.to_pure_dict(nnx.split(model)[1]), mesh)
        return fingerprint(model.config, split_params(params)[1], mesh)

    model = adapted(**kinds)
    found = of(model)
    assert found == of(model, build_mesh(MeshConfig(shape=[2, 4]))) and found["read"] is None
    changed = adapted(**kinds)
    norm = changed.norm.scale
    norm.set_value(norm[...].at[3].set(jnp.nextafter(norm[3], norm[3] + 1)))
    assert of(changed)["all"] != found["all"]
    check_base(tmp_path, {"base": found}, {"base": found | {"all": ""} | {"backend": "another"}})
    with pytest.raises(UserError, match="the adapters were trained with another base"):
        check_base(tmp_path, {"base": found}, {"base": found | {"read": "", "backend": "another"}})


def write(model, folder):
    tunix_like.export_model(model, TOKENIZER, folder)


def test_trained_adapters_are_opened_with_their_base(tmp_path):
    """The base is found by the name it was loaded by, and quantised again. If it is missing or another model, the error
    names the setting to change."""
    base, moved, run = tmp_path / "base", tmp_path / "moved", tmp_path / "run"
    write(make_base(), base)
    model = add_lora(tunix_like.load_model(base, quantize="int8")[0], LoraConfig(rank=2))
    learner = learner_of(model, max_steps=1, output_dir=str(run))
    learner.train(ROWS, batch_size=4)
    found = open_trained(str(run))
    assert_same(copied(found.params), copied(learner.params))
    assert found.graphdef == learner.graphdef
    base.rename(moved)
    with pytest.raises(UserError, match=r"run has only adapters, and their base cannot be loaded: .* model\.path="):
        open_trained(str(run))
    there = open_trained(str(run), [f"model.path={moved}"])
    assert_same(copied(there.params), copied(learner.params))
    write(tunix_like.load_model(HF, init="random", seed=1)[0], tmp_path / "stranger")
    with pytest.raises(UserError, match=r"checkpoints.1: the adapters were .* another base model: .*model\.path"):
        open_trained(str(run), [f"model.path={tmp_path / 'stranger'}"])
    write(tunix_like.load_model(HF | {"num_hidden_layers": 2}, init="random")[0], tmp_path / "other")
    with pytest.raises(UserError, match="has adapters of another model than"):
        open_trained(str(run), [f"model.path={tmp_path / 'other'}"])
    file = run / "model" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": None}))
    with pytest.raises(UserError, match=r"does not name their base\. Set the base: model\.path="):
        open_trained(str(run))


def test_mesh_training_equals_one_device():
    """Tokens, losses and adapters are equal on 2 x 4 devices, each of which has its shard."""
    meshes = None, build_mesh(MeshConfig(shape=[2, 4]))
    alone, many = (learner_of(adapted("nf4"), GRPOConfig(num_generations=4), mesh=mesh) for mesh in meshes)
    expected, found = collect(alone), collect(many)
    assert len(expected) == 2
    for one, other in zip(expected, found, strict=True):
        for name in ("loss", "rewards/mean", "completions/mean_length", "grad_norm"):
            assert other[f"train/{name}"] == pytest.approx(one[f"train/{name}"], abs=1e-5), name
    same = lambda a, b: np.testing.assert_allclose(np.array(a), np.array(b), atol=5e-5)  # noqa: E731
    jax.tree.map(same, alone.state.params, many.state.params)
    projection = many.params["layers"][0]["mlp"]["up_proj"]
    shares = {name: leaf.addressable_shards[0].data.shape for name, leaf in projection.items()}
    # 64 inputs are a single block, which two devices cannot share.
    whole = {"lora_a": (32, 4), "lora_b": (4, 16), "kernel_codes": (16, 16), "kernel_scale": (1, 16)}
    assert shares == whole


def sft_of(model, max_steps=20, **training):
    return SFTTrainer(
        model=model,
        tokenizer=TOKENIZER,
        sft_config=SFTConfig(max_steps=max_steps, batch_size=4, optimizer=OptimizerConfig(learning_rate=0.02)),
        rollout_config=RolloutConfig(max_prompt_length=8, max_tokens_to_generate=4),
        training_config=RLTrainingConfig(**training),
    )


def test_supervised_fine_tuning_trains_adapters_alone(tmp_path):
    """Adapters are float32, whatever dtype the base has. The run is resumed with the same base only."""
    kinds = {"quantize": "int8", "param_dtype": jnp.bfloat16, "dtype": jnp.bfloat16}
    trainer = sft_of(adapted(**kinds), output_dir=str(tmp_path))
    frozen, rows = copied(trainer.frozen), []
    trainer.train(ROWS, callbacks=[OnRow(rows.append)])
    assert max(leaf.size for leaf in jax.tree.leaves(trainer.state.opt_state)) == 4 * 64
    assert rows[-1]["sft/loss"] < 0.8 * rows[0]["sft/loss"]
    assert_same(copied(trainer.frozen), frozen)
    assert {leaf.dtype for leaf in jax.tree.leaves(trainer.state.params)} == {np.dtype("float32")}
    assert trainer.frozen["norm"]["scale"].dtype == jnp.bfloat16
    other = add_lora(tunix_like.load_model(HF, init="random", seed=1, **kinds)[0], LoraConfig(rank=4))
    with pytest.raises(UserError, match="sft_checkpoints: the adapters were trained with another base"):
        sft_of(other, max_steps=21, output_dir=str(tmp_path)).train(ROWS)


def test_quantised_base_without_adapters_is_rejected():
    model, _ = tunix_like.load_model(HF, init="random", quantize="int8")
    with pytest.raises(UserError, match=r"quantised and cannot be trained; add adapters \(lora\.rank, add_lora\)"):
        learner_of(model)


@pytest.mark.parametrize("make_trainer", [lambda model: learner_of(model), lambda model: sft_of(model)])
def test_weights_in_half_precision_are_rejected(make_trainer):
    model, _ = tunix_like.load_model(HF, init="random", param_dtype=jnp.bfloat16)
    with pytest.raises(UserError, match=r"stored in bfloat16, .*load_model\(\.\.\., param_dtype=jnp\.float32"):
        make_trainer(model)


def test_layers_beside_adapters_on_one_device_are_never_stacked(monkeypatch):
    """On accelerators, layers are stacked; a stacked base would be a second one in memory, in every program."""
    chosen = arguments.likelihood_options
    monkeypatch.setattr(arguments, "likelihood_options", lambda *given: chosen(*given)._replace(stacked=True))
    scans = {}
    for name, model in {"all weights": make_model(), "adapters": adapted()}.items():
        learner = make(GRPO, learner=GRPOLearner, model=model, reward=varied)
        collect(learner)
        program = functools.partial(learner.programs.logprobs, learner.graphdef)
        scans[name] = str(jax.make_jaxpr(program)(learner.params, BATCH, packed_as(LAYOUTS[0]))).count("scan[")
    assert scans["all weights"] > scans["adapters"]
