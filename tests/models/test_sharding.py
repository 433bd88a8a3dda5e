"""Training on a mesh of fake devices against one device, and what a mesh refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tunix_like import MaxRLConfig, MaxRLLearner, OptimizerConfig, RLTrainingConfig, RolloutConfig, UserError
from tunix_like.config import MeshConfig
from tunix_like.data.maze import tokenizer
from tunix_like.models.config import DecoderConfig
from tunix_like.models.decoder import Decoder
from tunix_like.models.sharding import build_mesh, parameter_shardings

CONFIG = DecoderConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    qkv_bias=True,
)


def train(mesh):
    """Two steps from the same start; the rewards are the first tokens' parity, so that groups differ."""
    learner = MaxRLLearner(
        model=Decoder(CONFIG, rngs=nnx.Rngs(0)),
        tokenizer=tokenizer(),
        reward_fns=lambda prompts, completions, **columns: [float(len(c) % 2) for c in completions],
        algo_config=MaxRLConfig(num_generations=4),
        rollout_config=RolloutConfig(max_prompt_length=8, max_tokens_to_generate=6),
        training_config=RLTrainingConfig(max_steps=2, actor_optimizer=OptimizerConfig(learning_rate=1e-2)),
        mesh=mesh,
    )
    rows = [{"prompt": "UP " * (i % 5 + 1)} for i in range(8)]
    return learner.train(rows, batch_size=4), learner


def test_a_mesh_trains_like_one_device():
    alone, single = train(None)
    row, learner = train(build_mesh(MeshConfig(shape=[2, 2])))
    kernel = learner.params["layers"][0]["mlp"]["up_proj"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (8, 16)
    for name in ("train/loss", "train/rewards/mean", "train/completions/mean_length"):
        assert row[name] == pytest.approx(alone[name], abs=1e-5), name
    for one, many in zip(jax.tree.leaves(single.params), jax.tree.leaves(learner.params), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(many), atol=2e-5)


def test_auto_uses_every_device_along_the_first_axis():
    assert dict(build_mesh(MeshConfig()).shape) == {"fsdp": len(jax.devices()), "tp": 1}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (MeshConfig(shape=[3, 1]), "mesh.shape: .* needs 3 devices, there are 4"),
        (MeshConfig(shape=[4]), "one positive number per axis"),
        (MeshConfig(shape="all"), "mesh.shape: expected auto"),
        (MeshConfig(axis_names=["fsdp", "model"]), "mesh.axis_names"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(config, said):
    with pytest.raises(UserError, match=said):
        build_mesh(config)


def test_a_dimension_that_the_mesh_does_not_divide_is_named():
    mesh = build_mesh(MeshConfig(shape=[4, 1]))
    with pytest.raises(UserError, match=r"do not divide layers\.0\.mlp\.up_proj\.kernel \[18, 4\]"):
        parameter_shardings({"layers": {0: {"mlp": {"up_proj": {"kernel": jnp.zeros((18, 4))}}}}}, mesh)
