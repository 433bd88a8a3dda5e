"""Tests that the trainer uses the experts that the sampler chose."""

from __future__ import annotations

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tunix_like import MaxRLConfig, MaxRLLearner, OptimizerConfig, RLTrainingConfig, RolloutConfig, UserError
from tunix_like.config.schema import MeshConfig
from tunix_like.data.maze import tokenizer
from tunix_like.models.config import DecoderConfig
from tunix_like.models.decoder import Decoder
from tunix_like.models.fields import Experts
from tunix_like.models.sharding import build_mesh
from tunix_like.rollout.requests import collect
from tunix_like.rollout.rollouts import with_length
from tunix_like.rollout.sampler import Sampler
from tunix_like.rollout.shapes import pad_tokens
from tunix_like.step.forward import ForwardOptions, batch_logprobs
from tunix_like.step.packing import choose_layout, pack, with_experts
from tunix_like.types import GroupBatch, Reply, Request, SamplingParams

pytestmark = pytest.mark.slow

CONFIG = DecoderConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_layers=4,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    qk_norm=True,
    experts=Experts(number=16, per_token=2, intermediate_size=16, normalised=True),
    expert_layers=(True, False, True, True),
)
PROMPTS, WIDTH, STEPS, GROUP = ((3, 1, 4, 1, 5), (9, 2), (6, 5, 3)), 8, 24, 4
OPTIONS = ForwardOptions(1.0, 64, remat=False)


class Answers:
    """Opens each completion with two tokens, and answers its first turn with three."""

    lockstep = True

    def __init__(self):
        self.waiting, self.answered = [], set()

    def opening(self, group, sample):
        return [7, 8]

    def submit(self, turns):
        self.waiting += [turn[:2] for turn in turns if not turn.truncated]

    def replies(self, wait):
        found = [Reply(*each, None if each in self.answered else [4, 5, 6]) for each in self.waiting]
        self.answered |= set(self.waiting)
        self.waiting = []
        return found


def sampled(dtype, responder=None, eos=(0,)):
    """Returns the float32 graph, the weights and the batch that a sampler with compute dtype `dtype` gives."""
    graphdef, state = nnx.split(Decoder(CONFIG, rngs=nnx.Rngs(0)))
    params = jax.tree.map(lambda x: 2 * x, nnx.to_pure_dict(state))  # larger activations, more decisive router
    graph = nnx.split(Decoder(CONFIG, rngs=nnx.Rngs(0), dtype=dtype))[0]
    sizes = {"max_prompt_length": WIDTH, "max_tokens": STEPS, "max_concurrent_rows": 5}
    sampler = Sampler(graph, eos, **sizes, record_experts=True)
    requests = [Request(prompt, number, GROUP) for number, prompt in enumerate(PROMPTS)]
    out = collect(sampler.generate(params, requests, jax.random.key(1), SamplingParams(), responder), requests)
    batch = GroupBatch(
        prompt_tokens=pad_tokens(PROMPTS, WIDTH),
        prompt_lengths=np.array([len(prompt) for prompt in PROMPTS], np.int32),
        completion_tokens=out.tokens,
        completion_lengths=out.lengths,
        rollout_logprobs=out.logprobs,
        rewards=np.zeros(out.lengths.shape, np.float32),
        scored=np.ones(out.lengths.shape, bool),
        token_mask=out.token_mask,
        experts=out.experts,
        prompt_experts=with_length(out.prompt_experts, WIDTH, axis=1),
    )
    return graphdef, params, batch


def trained(graphdef, params, batch, replayed, stacked=False, change=lambda packed: packed):
    width = batch.completion_tokens.shape[2]
    layout = choose_layout(GROUP, len(PROMPTS), (WIDTH, width), 4)
    packed = pack(batch.completion_lengths, batch.scored, width, layout)
    packed = change(with_experts(packed, batch, CONFIG.experts.number) if replayed else packed)
    options = OPTIONS._replace(stacked=stacked)
    program = jax.jit(batch_logprobs, static_argnums=(0, 4))
    return np.asarray(program(graphdef, params, batch.routed_freely, packed, options))


def gaps(batch, logprobs):
    return np.abs(logprobs - batch.rollout_logprobs)[batch.sampled]


def test_the_gap_between_samplers_and_trainers_of_different_dtypes():
    """The sampler computes in bfloat16, so that its router chooses other experts for some tokens."""
    graphdef, params, batch = sampled(jnp.bfloat16)
    free, replayed = (gaps(batch, trained(graphdef, params, batch, each)) for each in (False, True))
    assert replayed.max() < 0.5 * free.max() and replayed.mean() < 0.7 * free.mean()


def test_experts_of_turns_are_recorded():
    """Also those of the tokens that an environment adds."""
    graphdef, params, batch = sampled(jnp.float32, Answers(), eos=tuple(range(8)))
    inside = np.arange(batch.sampled.shape[2]) < batch.completion_lengths[..., None]
    added = inside & ~batch.sampled
    assert added[..., 3:].any(), "no completion has a second turn"
    free, replayed = (trained(graphdef, params, batch, each) for each in (False, True))
    np.testing.assert_allclose(replayed, free, atol=1e-6)
    changed = np.where(added[..., None, None], (batch.experts + 1) % CONFIG.experts.number, batch.experts)
    other = trained(graphdef, params, batch._replace(experts=changed.astype(np.uint8)), True)
    assert np.abs(other - free).max() > 1e-2


@pytest.mark.parametrize("stacked", [False, True], ids=["layers", "stacks"])
def test_with_the_same_numbers_nothing_changes(stacked):
    """The recorded experts are those that the trainer would choose. With others, the log-probabilities differ."""
    graphdef, params, batch = sampled(jnp.float32)
    assert batch.experts.dtype == np.uint8 and batch.experts.shape[3:] == (3, 2)
    free, replayed = (trained(graphdef, params, batch, each, stacked) for each in (False, True))
    np.testing.assert_allclose(replayed, free, atol=1e-6)
    np.testing.assert_allclose(free[batch.sampled], batch.rollout_logprobs[batch.sampled], atol=1e-4)
    for name in ("experts", "prompt_experts"):
        changed = batch._replace(**{name: (getattr(batch, name) + 1) % CONFIG.experts.number})
        other = trained(graphdef, params, changed, True, stacked)
        assert np.abs(other - free).max() > 1e-2, name


def test_forced_experts_equal_a_model_without_the_others():
    """The oracle is a plain forward pass of each sequence alone, whose router has no other experts to choose from: the
    same experts for all tokens of a layer, with the others removed."""
    graphdef, params, batch = sampled(jnp.float32)
    kept = np.array([[3, 7], [0, 15], [9, 2]])
    chosen = {name: np.broadcast_to(kept, getattr(batch, name).shape) for name in ("experts", "prompt_experts")}
    found = trained(graphdef, params, batch._replace(**{k: v.astype(np.uint8) for k, v in chosen.items()}), True)
    small = dataclasses.replace(CONFIG, experts=dataclasses.replace(CONFIG.experts, number=2))
    layers = dict(params["layers"])
    for index, own in zip((0, 2, 3), kept, strict=True):
        mlp = layers[index]["mlp"]
        gate = {"kernel": mlp["gate"]["kernel"][:, own]}
        layers[index] = layers[index] | {
            "mlp": {"experts": jax.tree.map(lambda x, own=own: x[own], mlp["experts"]), "gate": gate}
        }
    model = nnx.merge(nnx.split(Decoder(small, rngs=nnx.Rngs(0)))[0], params | {"layers": layers})
    for prompt, number in np.ndindex(len(PROMPTS), GROUP):
        tokens = batch.completion_tokens[prompt, number, : batch.completion_lengths[prompt, number]]
        whole = jnp.array([[*PROMPTS[prompt], *tokens.tolist()]])
        logprobs = jax.nn.log_softmax(model(whole)[0, len(PROMPTS[prompt]) - 1 : -1])
        wanted = np.asarray(logprobs)[np.arange(len(tokens)), tokens]
        np.testing.assert_allclose(found[prompt, number, : len(tokens)], wanted, atol=1e-4)


def learner(config=CONFIG, replay=True, steps=3, ahead=0, **settings):
    return MaxRLLearner(
        model=Decoder(config, rngs=nnx.Rngs(0)),
        tokenizer=tokenizer(),
        reward_fns=lambda prompts, completions, **columns: [float(len(c) % 2) for c in completions],
        algo_config=MaxRLConfig(num_generations=4, beta=0.01),
        rollout_config=RolloutConfig(
            max_prompt_length=8,
            max_tokens_to_generate=STEPS,
            routing_replay=replay,
            max_staleness=ahead,
            devices=4 if ahead else None,
        ),
        mesh=build_mesh(MeshConfig(axis_names=["ep"]), jax.devices()[:4]) if ahead else None,
        training_config=RLTrainingConfig(
            max_steps=steps, actor_optimizer=OptimizerConfig(learning_rate=1e-2), **settings
        ),
    )


ROWS = [{"prompt": "UP " * (i % 5 + 1)} for i in range(16)]


def test_training_with_the_same_numbers_is_the_same():
    """With one update per batch. In a second update, the router could choose other experts than the sampler did."""
    rows, weights = [], []
    for replay in (False, True):
        made = learner(replay=replay)
        rows.append(made.train(ROWS, batch_size=4))
        weights.append(made.params)
    assert rows[1]["train/loss"] == pytest.approx(rows[0]["train/loss"], abs=1e-6)
    assert 1 <= rows[1]["train/experts/load_mean"] <= rows[1]["train/experts/load_max"] <= 16
    for one, other in zip(*map(jax.tree.leaves, weights), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), atol=1e-4)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, ahead):
    """The oracle is the run before its last checkpoint was removed. With groups sampled ahead, the checkpoint before it
    contains their experts."""
    whole, resumed = (learner(steps=4, ahead=ahead, output_dir=str(tmp_path), checkpoint_every_n_steps=2) for _ in "ab")
    whole.train(ROWS, batch_size=4)
    shutil.rmtree(tmp_path / "checkpoints" / "4")
    resumed.train(ROWS, batch_size=4)
    assert (tmp_path / "checkpoints" / "4").is_dir()
    for one, other in zip(jax.tree.leaves(whole.params), jax.tree.leaves(resumed.params), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_errors():
    with pytest.raises(UserError, match="rollout.routing_replay: this model has no experts"):
        learner(config=dataclasses.replace(CONFIG, experts=None, expert_layers=()))
    with pytest.raises(UserError, match="rollout.routing_replay.*vLLM"):
        RolloutConfig(routing_replay=True, engine="vllm", urls=["http://127.0.0.1:1"])
