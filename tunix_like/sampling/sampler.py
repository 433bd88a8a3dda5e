"""Prompts to completions: one prefill per prompt, then a loop on the device over all completions of all prompts.

The completions' cache grows by powers of two, so early steps read little and few shapes are compiled. Random numbers
are `fold_in(key, problem number, sample, position)`: a row's draws depend on nothing beside it. This module knows no
reward and no training; weights are an argument, so there is nothing to keep in step with the trainer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from tunix_like.config import RolloutConfig
from tunix_like.models.decoder import KeyValue
from tunix_like.models.sharding import place_prompts
from tunix_like.sampling.logits import SamplingParams, choose
from tunix_like.tokenizer import Tokenizer

FIRST_CACHE = 64
"""Completion positions in the first cache; it doubles from there."""


class Completions(NamedTuple):
    """What was sampled, on the host. Entries at or beyond a row's length are 0.

    `lengths` counts the end-of-sequence token; `finished` is False where the token limit cut the row.
    """

    tokens: Int[np.ndarray, "P G T"]
    lengths: Int[np.ndarray, "P G"]
    logprobs: Float[np.ndarray, "P G T"]
    finished: Bool[np.ndarray, "P G"]


class _State(NamedTuple):
    """The loop's only state. `step` tokens are sampled; `hidden` predicts position `step`."""

    step: Int[Array, ""]
    hidden: Float[Array, "P G D"]
    tokens: Int[Array, "P G T"]
    logprobs: Float[Array, "P G T"]
    lengths: Int[Array, "P G"]
    done: Bool[Array, "P G"]
    cache: list[KeyValue]


def length_bucket(length: int, limit: int | None = None) -> int:
    """The next of 16, 24, 32, 48, 64, 96, 128, ... at or above `length`, never above `limit`: bounds the number of
    compiled shapes while wasting at most a third."""
    size = 16
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size if limit is None else max(length, min(size, limit))


def pad_tokens(rows: Sequence[Sequence[int]], width: int) -> Int[np.ndarray, "N W"]:
    """Stacks ragged rows, padded to the right with 0."""
    out = np.zeros((len(rows), width), np.int32)
    for place, row in zip(out, rows, strict=True):
        place[: len(row)] = row
    return out


class Sampler:
    """Samples completions of prompts with a decoder's graph and whatever weights it is handed.

    Args:
      graphdef: of a `Decoder` (`nnx.split(model)`).
      eos_ids: a completion ends with the first of these, which belongs to it.
      max_prompt_length, max_tokens: limits, in tokens.
      max_concurrent_rows: completions sampled at once (at least one whole group); None is all of them.
      mesh: prompts are split over its `fsdp` axis; None is one device.
    """

    def __init__(
        self,
        graphdef: Any,
        eos_ids: Sequence[int],
        *,
        max_prompt_length: int,
        max_tokens: int,
        max_concurrent_rows: int | None = None,
        mesh: Mesh | None = None,
    ):
        self.graphdef = graphdef
        self.eos_ids = tuple(int(i) for i in eos_ids)
        self.max_prompt_length = max_prompt_length
        self.max_tokens = max_tokens
        self.max_concurrent_rows = max_concurrent_rows
        self.mesh = mesh

    def generate(
        self,
        params: Any,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        num_generations: int,
        key: Array,
        sampling: SamplingParams,
    ) -> Completions:
        """Samples `num_generations` completions of each prompt.

        Args:
          params: weights of the decoder.
          prompts: token ids, each at most `max_prompt_length` long and not empty.
          numbers: one distinct number per prompt; the random numbers of a row come from it and from `key`.
        """
        width = length_bucket(max(len(p) for p in prompts), self.max_prompt_length)
        size = len(prompts)
        if self.max_concurrent_rows is not None:
            size = min(size, max(1, self.max_concurrent_rows // num_generations))
        parts = []
        for start in range(0, len(prompts), size):
            part, places = list(prompts[start : start + size]), list(numbers[start : start + size])
            missing = size - len(part)  # made up, so that every part has one shape
            inputs = (
                pad_tokens(part + part[-1:] * missing, width),
                np.array([len(p) for p in part + part[-1:] * missing], np.int32),
                np.array(places + places[-1:] * missing, np.uint32),
            )
            out = self._generate(params, place_prompts(inputs, self.mesh, axis=0), num_generations, key, sampling)
            parts.append(Completions(*(values[: len(part)] for values in out)))
        return parts[0] if len(parts) == 1 else Completions(*map(np.concatenate, zip(*parts, strict=True)))

    def _generate(
        self, params: Any, inputs: tuple[Any, Any, Any], num_generations: int, key: Array, sampling: SamplingParams
    ) -> Completions:
        tokens, lengths, numbers = inputs
        room = min(FIRST_CACHE, self.max_tokens)
        state, prompt_cache, keys = _start(
            self.graphdef, params, tokens, lengths, numbers, key, num_generations, self.max_tokens, room
        )
        while True:
            state = _advance(self.graphdef, params, prompt_cache, lengths, keys, state, sampling, self.eos_ids)
            if room == self.max_tokens or bool(state.done.all()):
                break
            room = min(2 * room, self.max_tokens)
            state = _grow(state, room)
        return Completions(*jax.device_get((state.tokens, state.lengths, state.logprobs, state.done)))


def make_sampler(graphdef: Any, tokenizer: Tokenizer, rollout: RolloutConfig, mesh: Mesh | None = None) -> Sampler:
    """The sampler of a model, its tokenizer and the `rollout` section."""
    return Sampler(
        graphdef,
        rollout.eos_tokens or tokenizer.eos_ids,
        max_prompt_length=rollout.max_prompt_length,
        max_tokens=rollout.max_tokens_to_generate,
        max_concurrent_rows=rollout.max_concurrent_rows,
        mesh=mesh,
    )


@functools.partial(jax.jit, static_argnames=("graphdef", "size", "max_tokens", "room"))
def _start(
    graphdef: Any,
    params: Any,
    tokens: Array,
    lengths: Array,
    numbers: Array,
    key: Array,
    size: int,
    max_tokens: int,
    room: int,
) -> tuple[_State, list[KeyValue], Array]:
    """Prefill, once per prompt; empty completions; one random key per row."""
    hidden, cache = nnx.merge(graphdef, params).prefill(tokens, lengths)
    groups = tokens.shape[0]
    by_prompt = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
    keys = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(by_prompt, jnp.arange(size))
    empty = jax.tree.map(lambda x: jnp.zeros((groups, size, room, *x.shape[2:]), x.dtype), cache)
    state = _State(
        step=jnp.int32(0),
        hidden=jnp.broadcast_to(hidden[:, None], (groups, size, hidden.shape[-1])),
        tokens=jnp.zeros((groups, size, max_tokens), jnp.int32),
        logprobs=jnp.zeros((groups, size, max_tokens), jnp.float32),
        lengths=jnp.zeros((groups, size), jnp.int32),
        done=jnp.zeros((groups, size), bool),
        cache=empty,
    )
    return state, cache, keys


@functools.partial(jax.jit, static_argnames=("graphdef", "sampling", "eos_ids"), donate_argnames=("state",))
def _advance(
    graphdef: Any,
    params: Any,
    prompt_cache: list[KeyValue],
    prompt_lengths: Array,
    keys: Array,
    state: _State,
    sampling: SamplingParams,
    eos_ids: tuple[int, ...],
) -> _State:
    """Samples until every row is done or the cache is full."""
    model = nnx.merge(graphdef, params)
    head = model.head()  # outside the loop: a tied head is a transpose
    room, (groups, size) = state.cache[0][0].shape[2], state.done.shape
    eos = jnp.array(eos_ids, jnp.int32)

    def body(state: _State) -> _State:
        logits = jnp.matmul(state.hidden, head, preferred_element_type=jnp.float32).reshape(groups * size, -1)
        draw = jax.vmap(lambda row_key: jax.random.uniform(jax.random.fold_in(row_key, state.step)))
        tokens, logprobs = choose(logits, draw(keys.reshape(-1)), sampling)
        live = ~state.done
        tokens = jnp.where(live, tokens.reshape(groups, size), 0)
        logprobs = jnp.where(live, logprobs.reshape(groups, size), 0.0)
        hidden, cache = model.decode(tokens, state.step, prompt_lengths, prompt_cache, state.cache)
        return _State(
            step=state.step + 1,
            hidden=hidden,
            tokens=state.tokens.at[:, :, state.step].set(tokens),
            logprobs=state.logprobs.at[:, :, state.step].set(logprobs),
            lengths=state.lengths + live,
            done=state.done | (live & jnp.isin(tokens, eos)),
            cache=cache,
        )

    return jax.lax.while_loop(lambda s: (s.step < room) & ~s.done.all(), body, state)


@functools.partial(jax.jit, static_argnames=("room",))
def _grow(state: _State, room: int) -> _State:
    extra = room - state.cache[0][0].shape[2]
    pad = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, extra), (0, 0), (0, 0)))  # noqa: E731
    return state._replace(cache=jax.tree.map(pad, state.cache))
