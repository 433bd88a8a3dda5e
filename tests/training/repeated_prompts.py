"""A small decoder, a ragged batch, and the oracle of the step: the plain model on repeated prompts.

The oracle repeats each prompt for each completion and calls `model(tokens, attention_mask)` on the rows. It shares no
attention, no log-probability code, no packing and no loop over chunks with the step.
"""

from __future__ import annotations

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tunix_like.algorithms.losses import TokenInputs
from tunix_like.algorithms.objective import build_objective
from tunix_like.config.schema import LOSS_AGG_MODES, AlgorithmConfig
from tunix_like.models.config import DecoderConfig
from tunix_like.models.decoder import Decoder
from tunix_like.step.forward import ForwardOptions
from tunix_like.step.packing import Layout, pack
from tunix_like.step.train_step import StepInputs, StepSpec, TrainState, step_inputs, train_step
from tunix_like.types import GroupBatch

PROMPTS, SIZE, WIDTH, STEPS, VOCABULARY = 3, 4, 6, 5, 19
PROMPT_LENGTHS = np.array([6, 3, 1], np.int32)
LENGTHS = np.array([[5, 1, 3, 2], [1, 1, 1, 1], [4, 5, 2, 1]], np.int32)
"""In bins of 5: `5 | 3 2 | 1`, all four in one, and `5 | 4 1 | 2`."""
MASK = np.arange(STEPS) < LENGTHS[..., None]
WHOLE = Layout(PROMPTS, PROMPTS, SIZE, True)
"""One set of one chunk for all rows."""
LAYOUTS = (
    Layout(1, 1, SIZE, False),  # one chunk per group
    Layout(1, 1, 1, False),  # one chunk per bin
    Layout(2, 3, 2, False),  # several lanes of one prompt; the last set has space for one more
    Layout(3, 2, 1, False),  # chunks that start in the middle of a prompt's completions
    Layout(3, 2, 3, False),  # fewer lanes than prompts
    Layout(2, 2, 1, True),
    Layout(4, 4, 2, True),  # more prompts than the batch has
)


def make_model(seed: int = 0, *, dtype=jnp.float32, **changes) -> tuple:
    """Returns (graphdef, params) of a small decoder in which every weight, bias and norm affects the output."""
    numbers = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "qkv_bias": True,
        "qk_norm": True,
    }
    graphdef, state = nnx.split(Decoder(DecoderConfig(**numbers | changes), rngs=nnx.Rngs(seed), dtype=dtype))
    rng = np.random.default_rng(seed)
    spread = lambda x: x + jnp.asarray(0.2 * rng.normal(size=x.shape), x.dtype)  # noqa: E731
    return graphdef, jax.tree.map(spread, nnx.to_pure_dict(state))


GRAPHDEF, PARAMS = make_model()


def make_batch() -> GroupBatch:
    """Returns ragged prompts and completions, with a group of one-token completions and one unscored completion.
    Padding is filled with valid tokens, since masks depend on lengths only."""
    rng = np.random.default_rng(1)
    scored = np.ones((PROMPTS, SIZE), bool)
    scored[2, 1] = False
    return GroupBatch(
        prompt_tokens=rng.integers(0, VOCABULARY, (PROMPTS, WIDTH)).astype(np.int32),
        prompt_lengths=PROMPT_LENGTHS,
        completion_tokens=rng.integers(0, VOCABULARY, (PROMPTS, SIZE, STEPS)).astype(np.int32),
        completion_lengths=LENGTHS,
        rollout_logprobs=rng.uniform(-3, 0, (PROMPTS, SIZE, STEPS)).astype(np.float32),
        rewards=np.where(scored, rng.normal(size=(PROMPTS, SIZE)), 0).astype(np.float32),
        scored=scored,
    )


BATCH = make_batch()


def make_objective(updates: int = 1, sources=None, teacher=None, **changes):
    plain = {"advantage_estimator": "rloo", "policy_loss_fn": "reinforce", "loss_agg_mode": "seq-mean-token-sum"}
    settings = plain | {"kl_loss_mode": "low_var_kl", "kl_in_reward": False, "num_generations": SIZE} | changes
    return build_objective(AlgorithmConfig(**settings), STEPS, updates, sources, teacher)


class EveryMode:
    """The aggregation is selected by `estimator_ids`, so that one compilation is used for all four."""

    modes = tuple(make_objective(loss_agg_mode=mode) for mode in LOSS_AGG_MODES)
    token_loss = modes[0].token_loss

    def advantages(self, rewards, scored, lengths, ids):
        return self.modes[0].advantages(rewards, scored, lengths, jnp.zeros_like(ids))

    def weights(self, scored, trained, lengths, in_update, ids):
        own = jnp.zeros_like(ids)
        return jnp.stack([mode.weights(scored, trained, lengths, in_update, own) for mode in self.modes])[ids[0]]


BY_SOURCE = {"maxpo": {"k": 2}, "pkpo": {"k": 2}, "passk": {"k": 2}, "maxrl": {}}
OBJECTIVES = {
    "on-policy": make_objective(),
    "every term": make_objective(
        policy_loss_fn="ppo_clip",
        loss_agg_mode="token-mean",
        beta=0.3,
        entropy_coef=0.2,
        sampler_is="token",
        updates=2,
    ),
    "masked": make_objective(
        policy_loss_fn="ppo_clip",
        beta=0.3,
        kl_loss_mode="mse_kl",
        sampler_is="sequence_mask",
        sampler_is_threshold=30.0,
        sampler_is_min=0.005,
        sampler_is_kl=True,
        updates=2,
    ),
    "mixed": make_objective(
        advantage_estimator="grpo",
        policy_loss_fn="ppo_clip",
        loss_agg_mode="token-mean",
        sources={name: {"advantage_estimator": name, **params} for name, params in BY_SOURCE.items()},
    ),
    "every mode": EveryMode(),
}
PLAIN = ForwardOptions(temperature=1.0, logits_chunk=1000, remat=False)
keep_gradient = optax.GradientTransformation(
    init=lambda params: jax.tree.map(jnp.zeros_like, params),
    update=lambda grads, state, params: (jax.tree.map(jnp.zeros_like, grads), grads),
)
"""Does not change the parameters and returns the gradient as its state, so that it is not rounded by an update."""

TRACES: collections.Counter[str] = collections.Counter()


def plain_step(graphdef, objective, optimizer, options):
    """`(params, optimizer state, inputs) -> (params, optimizer state, metrics, advantages)`."""

    def run(params, opt_state, data, frozen=None):
        spec = StepSpec(graphdef, objective, optimizer, options)
        state, metrics, advantages = train_step(spec, TrainState(params, opt_state), data, frozen)
        return *state, metrics, advantages

    return run


@functools.cache
def step(objective="on-policy", options=PLAIN, optimizer=keep_gradient):
    def run(params, state, data):
        TRACES[objective] += 1
        return plain_step(GRAPHDEF, OBJECTIVES[objective], optimizer, options)(params, state, data)

    return jax.jit(run)


def rows_of(groups) -> np.ndarray:
    """Returns a mask of all completions of these groups."""
    return np.isin(np.arange(PROMPTS), list(groups))[:, None] & np.ones(SIZE, bool)


def packed_as(layout, rows=None, batch=BATCH, most_prompts=None):
    rows = rows_of(range(PROMPTS)) if rows is None else rows
    return pack(batch.completion_lengths, rows, batch.completion_tokens.shape[-1], layout, most_prompts)


def data_of(layout=WHOLE, groups=range(PROMPTS), batch=BATCH, rows=None, most_prompts=None, **logprobs) -> StepInputs:
    """Returns the data of one update of `groups`, in which only the completions `rows` go through the model."""
    packed = packed_as(layout, rows_of(groups) if rows is None else rows, batch, most_prompts)
    return step_inputs(batch, rows_of(groups)[:, 0], packed, **logprobs)


def gradient_of(data: StepInputs, **how) -> tuple:
    """Returns (gradient, metrics, advantages) of the step."""
    _, gradient, metrics, advantages = step(**how)(PARAMS, PARAMS, data)
    return gradient, {name: float(value) for name, value in metrics.items()}, np.asarray(advantages)


def repeated_logprobs(params, temperature: float, lengths=LENGTHS, graphdef=GRAPHDEF):
    """Returns log-probabilities and entropies `[P G T]` of the plain model. Each completion follows its own copy of its
    prompt, padded right."""
    rows, real = np.zeros((2, PROMPTS * SIZE, WIDTH + STEPS), np.int32)
    place = np.zeros((PROMPTS * SIZE, STEPS), np.int32)
    for row, (p, i) in enumerate(np.ndindex(PROMPTS, SIZE)):
        length = int(PROMPT_LENGTHS[p])
        tokens = [*BATCH.prompt_tokens[p, :length], *BATCH.completion_tokens[p, i, : lengths[p, i]]]
        rows[row, : len(tokens)], real[row, : len(tokens)] = tokens, 1
        place[row] = np.minimum(length + np.arange(STEPS), WIDTH + STEPS - 1)
    logits = nnx.merge(graphdef, params)(jnp.asarray(rows), jnp.asarray(real))
    every = np.arange(len(rows))[:, None]
    table = jax.nn.log_softmax(logits / temperature, axis=-1)[every, place - 1]
    chosen = jnp.take_along_axis(table, jnp.asarray(rows[every, place])[..., None], axis=-1)[..., 0]
    shape = (PROMPTS, SIZE, STEPS)
    return chosen.reshape(shape), -(jnp.exp(table) * table).sum(axis=-1).reshape(shape)


@functools.cache
def plain_logprobs(temperature: float = 1.0):
    """Returns the compiled function `params -> [P G T]`."""
    return jax.jit(lambda params: repeated_logprobs(params, temperature)[0])


def row_values(objective, in_update, lengths=LENGTHS) -> tuple[jax.Array, jax.Array]:
    """Returns advantages and weights `[P G]`, which are tested separately."""
    rewards, scored, lengths = (jnp.asarray(x) for x in (BATCH.rewards, BATCH.scored, lengths))
    ids, everyone = jnp.zeros(PROMPTS, jnp.int32), jnp.ones(scored.shape, bool)
    advantages = objective.advantages(rewards, scored, lengths, ids)
    return advantages, objective.weights(scored, everyone, lengths, in_update, ids)


@functools.cache
def repeated(objective: str = "on-policy", temperature: float = 1.0, longest: int = STEPS, graphdef=GRAPHDEF):
    """Returns the function `(params, in_update, old, ref) -> (loss, gradient)` of the loss on repeated prompts, with
    completions cut at `longest`."""
    objective, lengths = OBJECTIVES[objective], np.minimum(LENGTHS, longest)
    mask = jnp.asarray(np.arange(STEPS) < lengths[..., None])

    def loss(params, in_update, old, ref):
        advantages, weights = (values[..., None] for values in row_values(objective, in_update, lengths))
        new, entropy = repeated_logprobs(params, temperature, lengths, graphdef)
        tokens = TokenInputs(new, new if old is None else old, jnp.asarray(BATCH.rollout_logprobs), ref, entropy, mask)
        return (weights * objective.token_loss(tokens, advantages)[0]).sum()

    return jax.jit(jax.value_and_grad(loss))


def difference(found, expected) -> float:
    """Returns `||g1 - g2|| / ||g2||` over all parameters."""
    norm = lambda tree: float(optax.tree.norm(tree))  # noqa: E731
    assert norm(expected) > 1e-3
    return norm(jax.tree.map(jnp.subtract, found, expected)) / norm(expected)


EVERYONE = jnp.ones(PROMPTS, bool)


class Reinforce:
    """A simple objective that accepts any shape of group."""

    built_in = False

    def key(self):
        return "reinforce"

    def advantages(self, rewards, scored, lengths, ids):
        return rewards

    def weights(self, scored, trained, lengths, in_update, ids):
        return jnp.full(scored.shape, 1.0 / scored.size)

    def token_loss(self, tokens, advantages):
        return jnp.where(tokens.mask, -advantages * tokens.logprobs, 0.0), {}
