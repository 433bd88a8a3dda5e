"""The peer's side of `benchmarks.peer_compiled`, run inside the peer's environment: google-tunix 0.1.7's own programs.

The update is `PeftTrainer._train_step` with the loss that `GRPOLearner` gives it and AdamW, its Qwen3 with
rematerialisation of each decoder layer, float32 parameters and bfloat16 products. Decoding is `Sampler._decode_fn`
(temperature 1, top-p 1) without rematerialisation, which its sampler does not support. Objects whose constructors
need arrays are made without them; what is compiled is the peer's code.
"""

from __future__ import annotations

import functools
from typing import Any

from benchmarks.compiled import Work, read_costs, serve
from tunix_like.compile.devices import prepare

prepare()

import jax  # noqa: E402 (after `prepare`)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from jax.interpreters import pxla  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402
from tunix.generate import sampler as tunix_sampler  # noqa: E402
from tunix.models.qwen3 import model as qwen3  # noqa: E402
from tunix.rl import common, function_registry  # noqa: E402
from tunix.rl.grpo.grpo_learner import GRPOConfig  # noqa: E402
from tunix.sft.peft_trainer import PeftTrainer  # noqa: E402

PAD, EOS = 0, 1
AXES = ("fsdp", "tp")
LOOP = "_decode_fn"
"""The name of the loop over tokens, which is the name of the jitted function that contains it."""


def shard(x: Any, axes: tuple[str | None, ...]) -> Any:
    """Constrains activations as the peer's `shard` does on a TPU; on a host without a TPU the peer's has no effect."""
    mesh = pxla.thread_resources.env.physical_mesh
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))


qwen3.shard = shard


def mesh_of(work: Work) -> Mesh:
    devices = work.described()
    return Mesh(np.array(devices).reshape(len(devices), 1), AXES)


def make_model(work: Work, remat: qwen3.RematConfig) -> qwen3.Qwen3:
    """Builds the peer's model; call it inside `eval_shape`."""
    shape = work.model
    config = qwen3.ModelConfig(
        num_layers=work.layers,
        vocab_size=shape["vocab_size"],
        embed_dim=shape["hidden_size"],
        hidden_dim=shape["intermediate_size"],
        num_heads=shape["num_attention_heads"],
        head_dim=shape["head_dim"],
        num_kv_heads=shape["num_key_value_heads"],
        rope_theta=1_000_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
        remat_config=remat,
        dtype=jnp.bfloat16,
    )
    return qwen3.Qwen3(config, rngs=nnx.Rngs(0))


def shapes_on(mesh: Mesh, state: Any) -> Any:
    """Returns the shapes of a state with the shardings that the peer's model declares."""
    specs = nnx.get_partition_spec(state)

    def placed(shape: Any, spec: Any) -> Any:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec or PartitionSpec()))

    return jax.tree.map(placed, state, specs)


def rows_on(mesh: Mesh, *sizes: int, dtype: Any = jnp.int32) -> Any:
    """Returns a shape whose rows are split over the devices."""
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))


def trainer_of() -> PeftTrainer:
    """Returns the peer's trainer with the loss and the inputs that its GRPO learner sets, without model and files."""
    trainer, algorithm = object.__new__(PeftTrainer), GRPOConfig(beta=0.0)
    algorithm.temperature = 1.0  # as the learner sets it, from the rollout's
    loss = function_registry.get_policy_loss_fn(algorithm.policy_loss_fn)

    def of_example(model: Any, train_example: Any, algo_config: Any) -> Any:
        return loss(model, train_example, algo_config=algorithm, pad_id=PAD, eos_id=EOS)

    trainer.loss_fn, trainer._lora_enabled, trainer._has_aux = of_example, False, True
    trainer.gen_model_input_fn = lambda example: {"train_example": example, "algo_config": algorithm}
    return trainer


def update(work: Work) -> dict[str, Any]:
    """Compiles an update of all completions at once, the peer's default micro-batch."""
    mesh, trainer, rows = mesh_of(work), trainer_of(), work.prompts * work.group

    def made() -> Any:
        model = make_model(work, qwen3.RematConfig.DECODER)
        return model, nnx.Optimizer(model, optax.adamw(1e-6), wrt=nnx.Param)

    def step(params: Any, optimizer: Any, example: Any) -> Any:
        model, updater = nnx.merge(graphdef, params, optimizer)
        found = trainer._train_step(model, updater, example)
        return found, nnx.split((model, updater), nnx.Param, ...)[1:]

    with mesh:
        graphdef, params, optimizer = nnx.split(nnx.eval_shape(made), nnx.Param, ...)
        example = common.TrainExample(
            prompt_ids=rows_on(mesh, rows, work.prompt_length),
            prompt_mask=rows_on(mesh, rows, work.prompt_length, dtype=jnp.bool_),
            completion_ids=rows_on(mesh, rows, work.length),
            completion_mask=rows_on(mesh, rows, work.length, dtype=jnp.bool_),
            advantages=rows_on(mesh, rows, dtype=jnp.float32),
            ref_per_token_logps=None,
            old_per_token_logps=None,
        )
        states = shapes_on(mesh, params), shapes_on(mesh, optimizer)
        # Both are donated here; the peer donates the optimizer only, and its weights then exist twice.
        lower = functools.partial(jax.jit(step, donate_argnums=(0, 1)).lower, *states, example)
        return read_costs(lower, {}) | {"attention": "plain"}


class Tokenizer:
    """The part of a tokenizer that the peer's sampler uses while it decodes."""

    def pad_id(self) -> int:
        return PAD


def decode(work: Work) -> dict[str, Any]:
    """Compiles the peer's decoding with all rows; the costs are those of one token of every row."""
    mesh, total = mesh_of(work), work.prompt_length + work.length
    sampler = object.__new__(tunix_sampler.Sampler)

    def started() -> Any:
        prompts = jnp.ones((work.rows, work.prompt_length), jnp.int32)
        return sampler.init_sample_state(prompts, total, False, None, 1.0, 1.0, None, jax.random.key(0), None)

    with mesh:
        graphdef, params = nnx.split(nnx.eval_shape(lambda: make_model(work, qwen3.RematConfig.NONE)))
        sampler.tokenizer, sampler.eos_ids = Tokenizer(), jnp.array([EOS])
        sizes = work.model["num_key_value_heads"], work.model["head_dim"]
        sampler.cache_config = tunix_sampler.CacheConfig(total, work.layers, *sizes)
        sampler._transformer_graphdef, sampler._transformer_state = graphdef, params
        sampler._flattened_transformer_state = jax.tree.leaves(params)
        state = split_rows(mesh, work.rows, jax.eval_shape(started))
        jitted = jax.jit(sampler._decode_fn, donate_argnums=(1,))
        lower = functools.partial(jitted.lower, shapes_on(mesh, params), state)
        found = read_costs(lower, {}, LOOP)
    return found | {"layout": f"fsdp {mesh.size}"}


def split_rows(mesh: Mesh, rows: int, state: Any) -> Any:
    """Returns the shapes of the sampler's state with its rows split over the devices, as its prefill leaves them."""

    def placed(shape: Any) -> Any:
        split = shape.ndim > 0 and shape.shape[0] == rows
        sharding = NamedSharding(mesh, PartitionSpec("fsdp") if split else PartitionSpec())
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    return jax.tree.map(placed, state)


if __name__ == "__main__":
    serve({"update": update, "decode": decode})
