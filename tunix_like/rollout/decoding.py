"""The compiled parts of sampling: prefill, many decode steps at once, and the moves of rows between them.

`A` slots hold one prompt each, with `g` completions beside it. Every row writes its keys and values into the same
column of a ring of `U`, so the write is one slice whatever the rows' ages; a row sees the columns of its own age. This
module knows no order of work: `sampler.py` says what happens when.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt32

from tunix_like.models.decoder import Decoder, KeyValue, prompt_mask
from tunix_like.models.quantization import LEAVES as QUANTIZED_LEAVES
from tunix_like.rollout.logits import SamplingParams, choose


class Prompts(NamedTuple):
    """Prefilled prompts, one a slot: their keys and values, and the hidden state that predicts the first token."""

    lengths: Int[Array, "A"]
    hidden: Float[Array, "A D"]
    cache: list[KeyValue]


class Rows(NamedTuple):
    """The completions in work. `age` counts a row's tokens; a row is no longer `live` once it `ended` (with an
    end-of-sequence token) or reached the limit. `column` is where the next keys and values go, `steps` counts the
    tokens that every row was worked on for, live or not."""

    column: Int[Array, ""]
    steps: Int[Array, ""]
    age: Int[Array, "A g"]
    live: Bool[Array, "A g"]
    ended: Bool[Array, "A g"]
    keys: UInt32[Array, "A g W"]
    hidden: Float[Array, "A g D"]
    tokens: Int[Array, "A g T"]
    logprobs: Float[Array, "A g T"]
    cache: list[KeyValue]

    @property
    def room(self) -> int:
        """Columns of the cache."""
        return self.cache[0][1].shape[2]


@functools.partial(jax.jit, static_argnames=("graphdef",))
def prefill(graphdef: Any, params: Any, tokens: Int[Array, "A S"], lengths: Int[Array, "A"]) -> Prompts:
    """Every prompt once, whatever the number of its completions."""
    return Prompts(lengths, *_merge(graphdef, params).prefill(tokens, lengths))


def _merge(graphdef: Any, params: Any) -> Decoder:
    """The model with its matrices in the compute dtype: converted here once, not at every step of a loop. Quantised
    ones stay small; the layers turn them back as they need them."""
    dtype = nnx.merge(graphdef, params).dtype

    def cast(path: Any, x: Array) -> Array:
        return x.astype(dtype) if x.ndim > 1 and path[-1].key not in QUANTIZED_LEAVES else x

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(cast, params))


@functools.partial(jax.jit, static_argnames=("size", "max_tokens", "room", "key_words"))
def empty_rows(prompts: Prompts, size: int, max_tokens: int, room: int, key_words: int) -> Rows:
    """`size` rows a slot, none of them live, with a cache for `room` tokens each."""
    shape = (prompts.hidden.shape[0], size)
    count = shape[0] * size
    return Rows(
        column=jnp.int32(0),
        steps=jnp.int32(0),
        age=jnp.zeros(shape, jnp.int32),
        live=jnp.zeros(shape, bool),
        ended=jnp.zeros(shape, bool),
        keys=jnp.zeros((*shape, key_words), jnp.uint32),
        hidden=jnp.zeros((*shape, prompts.hidden.shape[-1]), prompts.hidden.dtype),
        tokens=jnp.zeros((*shape, max_tokens), jnp.int32),
        logprobs=jnp.zeros((*shape, max_tokens), jnp.float32),
        cache=[
            (
                jnp.zeros((count, *k.shape[1:3], room), k.dtype),
                jnp.zeros((count, v.shape[1], room, v.shape[3]), v.dtype),
            )
            for k, v in prompts.cache
        ],
    )


@functools.partial(jax.jit, donate_argnames=("rows",))
def fill(
    rows: Rows,
    prompts: Prompts,
    take: Bool[Array, "A g"],
    numbers: UInt32[Array, "A"],
    samples: UInt32[Array, "A g"],
    key: Array,
) -> Rows:
    """Starts new completions of their slots' prompts where `take` says. A row's random numbers come from `key`, its
    prompt's number and its own number in the group, whatever slot it stands in."""
    row_key = lambda number, sample: jax.random.fold_in(jax.random.fold_in(key, number), sample)  # noqa: E731
    fresh = jax.vmap(jax.vmap(row_key, (None, 0)))(numbers, samples)
    return rows._replace(
        age=jnp.where(take, 0, rows.age),
        live=rows.live | take,
        ended=rows.ended & ~take,
        keys=jnp.where(take[..., None], jax.random.key_data(fresh), rows.keys),
        hidden=jnp.where(take[..., None], prompts.hidden[:, None], rows.hidden),
    )


@jax.jit
def pick_prompts(prompts: Prompts, source: Int[Array, "B"]) -> Prompts:
    """New slot `b` has the prompt of old slot `source[b]`."""
    return jax.tree.map(lambda x: x[source], prompts)


@functools.partial(jax.jit, donate_argnames=("prompts",))
def replace_prompts(
    prompts: Prompts, slots: Int[Array, "N"], source: Int[Array, "N"], fresh: Prompts | None
) -> Prompts:
    """Puts prompts into slots: `source` counts through the slots as they are, then through those freshly prefilled. A
    slot number beyond the last is dropped."""

    def moved(old: Array, new: Array | None = None) -> Array:
        count = old.shape[0]
        picked = old[jnp.minimum(source, count - 1)]
        if new is not None:
            here = (source < count).reshape(-1, *(1,) * (old.ndim - 1))
            picked = jnp.where(here, picked, new[jnp.clip(source - count, 0, new.shape[0] - 1)])
        return old.at[slots].set(picked, mode="drop")

    return jax.tree.map(moved, prompts) if fresh is None else jax.tree.map(moved, prompts, fresh)


@functools.partial(jax.jit, static_argnames=("graphdef", "sampling", "eos_ids"), donate_argnames=("rows",))
def advance(
    graphdef: Any,
    params: Any,
    prompts: Prompts,
    rows: Rows,
    stop_at: Int[Array, ""],
    sampling: SamplingParams,
    eos_ids: tuple[int, ...],
) -> Rows:
    """Samples until at most `stop_at` rows are live, or a live row has filled the cache."""
    model = _merge(graphdef, params)
    head = model.head()  # outside the loop: a tied head is a transpose
    room, (slots, size), limit = rows.room, rows.live.shape, rows.tokens.shape[-1]
    eos = jnp.array(eos_ids, jnp.int32)
    mask = prompt_mask(prompts.lengths, prompts.cache[0][1].shape[2])
    place = jnp.arange(slots)[:, None], jnp.arange(size)[None]

    def body(rows: Rows) -> Rows:
        logits = model.scores(rows.hidden, head).reshape(slots * size, -1)
        draw = jax.vmap(lambda data, age: jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(data), age)))
        uniform = draw(rows.keys.reshape(-1, rows.keys.shape[-1]), rows.age.reshape(-1))
        tokens, logprobs = (x.reshape(slots, size) for x in choose(logits, uniform, sampling))
        written = (*place, jnp.where(rows.live, rows.age, limit))  # beyond the last: dropped
        distance = ((rows.column - jnp.arange(room)) % room)[None, None]
        hidden, cache = model.decode(
            tokens,
            prompts.lengths[:, None] + rows.age,
            mask,
            prompts.cache,
            rows.cache,
            rows.column,
            distance <= rows.age[..., None],
        )
        age, ended = rows.age + rows.live, rows.ended | (rows.live & jnp.isin(tokens, eos))
        return rows._replace(
            column=(rows.column + 1) % room,
            steps=rows.steps + 1,
            age=age,
            live=rows.live & ~ended & (age < limit),
            ended=ended,
            hidden=hidden,
            tokens=rows.tokens.at[written].set(tokens, mode="drop"),
            logprobs=rows.logprobs.at[written].set(logprobs, mode="drop"),
            cache=cache,
        )

    def more(rows: Rows) -> Array:
        return (rows.live.sum() > stop_at) & (jnp.where(rows.live, rows.age, 0).max() < room)

    return jax.lax.while_loop(more, body, rows)


@functools.partial(jax.jit, static_argnames=("room",))
def grow(rows: Rows, room: int) -> Rows:
    """A larger cache: the ring is unrolled, its oldest column first, and the new columns come after it."""

    def wider(x: Array, axis: int) -> Array:
        width = [(0, 0)] * x.ndim
        width[axis] = (0, room - rows.room)
        return jnp.pad(jnp.roll(x, -rows.column, axis=axis), width)

    cache = [(wider(k, 3), wider(v, 2)) for k, v in rows.cache]
    return rows._replace(column=jnp.int32(rows.room), cache=cache)


@jax.jit
def regroup(
    prompts: Prompts, rows: Rows, source: Int[Array, "B"], picked: Int[Array, "B c"], real: Bool[Array, "B c"]
) -> tuple[Prompts, Rows]:
    """Other rows out of these: new slot `b` has the prompt of old slot `source[b]`, and where `real` the rows
    `picked[b]`, counted through all old slots. A prompt may stand in several slots."""
    moved = {
        name: (x := getattr(rows, name)).reshape(-1, *x.shape[2:])[picked]
        for name in ("age", "live", "ended", "keys", "hidden", "tokens", "logprobs")
    }
    moved["cache"] = jax.tree.map(lambda x: x[picked.reshape(-1)], rows.cache)
    moved["live"] &= real
    return pick_prompts(prompts, source), rows._replace(**moved)
