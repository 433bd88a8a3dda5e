"""The compiled programs of sampling: prefill, decode loop, and moves of rows between slots.

Each of the `A` slots holds one prompt and `g` rows, one completion per row. All rows write their keys and values into
the same column of a ring buffer with `U` columns, so the write is a single slice even if rows have different ages. A
row attends only to the columns written since it started. A row that waits for a reply (completions of several turns)
keeps its columns, while other rows go on; `append` moves them to the current column again. A row may be restarted: its
next tokens follow the prompt, and its earlier tokens leave the cache. `schedule.py` and `turns.py` schedule these
programs.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt32

from tunix_like.models.decoder import Decoder, KeyValue, prompt_mask
from tunix_like.models.quantization import LEAVES as QUANTIZED_LEAVES
from tunix_like.rollout.logits import SamplingParams, choose

TOKENS = "tokens"
"""Name of the decoding loop in a compiled program; one trip samples a token of every row."""


class Prompts(NamedTuple):
    """Prefilled prompts, one per slot: keys and values, and the hidden state that predicts the first token."""

    lengths: Int[Array, "A"]
    hidden: Float[Array, "A D"]
    cache: list[KeyValue]


class Rows(NamedTuple):
    """The state of the completions that are being sampled.

    Attributes:
      column: index of the cache column for the next keys and values.
      steps: number of decode steps so far; each step processes all rows, live or not.
      age: number of tokens of each row.
      first: number of tokens of each row before it was last restarted; they are not in the cache.
      live: False once a row has `ended` or reached the length limit.
      ended: whether the row ended with an end-of-sequence token.
      gap: number of columns that were written since the last token of a row that is not live.
      held: True for rows whose columns must be kept even if they are not live, because they may continue.
      keys: random key data of each row.
    """

    column: Int[Array, ""]
    steps: Int[Array, ""]
    age: Int[Array, "A g"]
    first: Int[Array, "A g"]
    live: Bool[Array, "A g"]
    ended: Bool[Array, "A g"]
    gap: Int[Array, "A g"]
    held: Bool[Array, "A g"]
    keys: UInt32[Array, "A g W"]
    hidden: Float[Array, "A g D"]
    tokens: Int[Array, "A g T"]
    logprobs: Float[Array, "A g T"]
    cache: list[KeyValue]

    @property
    def room(self) -> int:
        """Number of columns of the cache."""
        return self.cache[0][1].shape[2]

    @property
    def cached(self) -> Int[Array, "A g"]:
        """Number of tokens of each row in the cache."""
        return self.age - self.first


@functools.partial(jax.jit, static_argnames=("graphdef",))
def prefill(graphdef: Any, params: Any, tokens: Int[Array, "A S"], lengths: Int[Array, "A"]) -> Prompts:
    """Runs the model on each prompt once, independent of the number of completions."""
    return Prompts(lengths, *_merge(graphdef, params).prefill(tokens, lengths))


def _merge(graphdef: Any, params: Any) -> Decoder:
    """Builds the model with its matrices cast to the compute dtype.

    The cast is done once here and not at every step of a loop. Quantised matrices stay quantised; the layers dequantise
    them.
    """
    return nnx.merge(graphdef, cast_params(graphdef, params))


def cast_params(graphdef: Any, params: Any) -> Any:
    """Casts the matrices of a decoder to its compute dtype, except for quantised ones."""
    dtype = nnx.merge(graphdef, params).dtype

    def cast(path: Any, x: Array) -> Array:
        return x.astype(dtype) if x.ndim > 1 and path[-1].key not in QUANTIZED_LEAVES else x

    return jax.tree_util.tree_map_with_path(cast, params)


@functools.partial(jax.jit, static_argnames=("size", "max_tokens", "room", "key_words"))
def empty_rows(prompts: Prompts, size: int, max_tokens: int, room: int, key_words: int) -> Rows:
    """Allocates `size` rows per slot, none of them live, with a cache of `room` columns."""
    shape = (prompts.hidden.shape[0], size)
    count = shape[0] * size
    return Rows(
        column=jnp.int32(0),
        steps=jnp.int32(0),
        age=jnp.zeros(shape, jnp.int32),
        first=jnp.zeros(shape, jnp.int32),
        live=jnp.zeros(shape, bool),
        ended=jnp.zeros(shape, bool),
        gap=jnp.zeros(shape, jnp.int32),
        held=jnp.zeros(shape, bool),
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
    """Starts new completions of the slots' prompts in the rows selected by `take`.

    The random numbers of a row depend on `key`, the number of its prompt and the sample's index in the group, and not
    on the slot.
    """
    row_key = lambda number, sample: jax.random.fold_in(jax.random.fold_in(key, number), sample)  # noqa: E731
    fresh = jax.vmap(jax.vmap(row_key, (None, 0)))(numbers, samples)
    return rows._replace(
        age=jnp.where(take, 0, rows.age),
        first=jnp.where(take, 0, rows.first),
        live=rows.live | take,
        ended=rows.ended & ~take,
        gap=jnp.where(take, 0, rows.gap),
        keys=jnp.where(take[..., None], jax.random.key_data(fresh), rows.keys),
        hidden=jnp.where(take[..., None], prompts.hidden[:, None], rows.hidden),
    )


@jax.jit
def pick_prompts(prompts: Prompts, source: Int[Array, "B"]) -> Prompts:
    """Gathers prompts: new slot `b` gets the prompt of old slot `source[b]`."""
    return jax.tree.map(lambda x: x[source], prompts)


@functools.partial(jax.jit, donate_argnames=("prompts",))
def replace_prompts(
    prompts: Prompts, slots: Int[Array, "N"], source: Int[Array, "N"], fresh: Prompts | None
) -> Prompts:
    """Writes prompts into `slots`. `source` indexes the old slots followed by the newly prefilled prompts (`fresh`).

    Slot numbers out of range are dropped.
    """

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
    """Samples tokens until at most `stop_at` rows are live, or until the next column would overwrite one that a live or
    held row needs."""
    model = _merge(graphdef, params)
    head = model.head()  # outside the loop, because a tied head is a transpose
    room, (slots, size), limit = rows.room, rows.live.shape, rows.tokens.shape[-1]
    eos = jnp.array(eos_ids, jnp.int32)
    mask = prompt_mask(prompts.lengths, prompts.cache[0][1].shape[2])
    row_index = _row_index(rows)

    def body(rows: Rows) -> Rows:
        logits = model.scores(rows.hidden, head).reshape(slots * size, -1)
        draw = jax.vmap(lambda data, age: jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(data), age)))
        uniform = draw(rows.keys.reshape(-1, rows.keys.shape[-1]), rows.age.reshape(-1))
        tokens, logprobs = (x.reshape(slots, size) for x in choose(logits, uniform, sampling))
        written = (*row_index, jnp.where(rows.live, rows.age, limit))  # the index `limit` is out of range: dropped
        hidden, cache = decode(model, prompts, rows, mask, tokens)
        age, ended = rows.age + rows.live, rows.ended | (rows.live & jnp.isin(tokens, eos))
        return rows._replace(
            column=(rows.column + 1) % room,
            steps=rows.steps + 1,
            age=age,
            live=rows.live & ~ended & (age < limit),
            ended=ended,
            gap=jnp.where(rows.live, 0, rows.gap + 1),
            hidden=jnp.where(rows.live[..., None], hidden, rows.hidden),
            tokens=rows.tokens.at[written].set(tokens, mode="drop"),
            logprobs=rows.logprobs.at[written].set(logprobs, mode="drop"),
            cache=cache,
        )

    def more(rows: Rows) -> Array:
        used = jnp.where(rows.live | rows.held, rows.cached + rows.gap, 0).max()
        return (rows.live.sum() > stop_at) & (used < room)

    with jax.named_scope(TOKENS):
        return jax.lax.while_loop(more, body, rows)


def decode(
    model: Decoder, prompts: Prompts, rows: Rows, mask: Array, tokens: Int[Array, "A g"]
) -> tuple[Float[Array, "A g D"], list[KeyValue]]:
    """Runs the model on the next token of every row. Returns the hidden states and the caches with the new column.

    Args:
      mask: that of the prompts, from `prompt_mask`.
    """
    distance = ((rows.column - jnp.arange(rows.room)) % rows.room)[None, None]
    return model.decode(
        tokens,
        prompts.lengths[:, None] + rows.cached,
        mask,
        prompts.cache,
        rows.cache,
        rows.column,
        distance <= rows.cached[..., None],
    )


def align(rows: Rows, counts: Int[np.ndarray, "A g"]) -> Rows:
    """Moves the columns of every row, so that no row has a gap and its last `counts` columns are free.

    The arrays of `rows` are donated. Each layer is moved by a program of its own, because one program for all would
    hold a second cache.
    """
    first = ((rows.column - rows.gap + counts) % rows.room).reshape(-1)
    cache = [_rolled_layer(k, v, first) for k, v in rows.cache]
    return rows._replace(column=jnp.zeros_like(rows.column), gap=jnp.zeros_like(rows.gap), cache=cache)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _rolled_layer(k: Array, v: Array, first: Int[Array, "R"]) -> KeyValue:
    return _rolled(k, first, 3), _rolled(v, first, 2)


def _rolled(x: Array, first: Int[Array, "R"], axis: int) -> Array:
    """Rolls each row along `axis`, so that its column `first` becomes column 0."""
    twice = jnp.concatenate([x, x], axis)
    roll = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=x.shape[axis], axis=axis - 1)
    return jax.vmap(roll)(twice, first)


def _row_index(rows: Rows) -> tuple[Int[Array, "A 1"], Int[Array, "1 g"]]:
    slots, size = rows.age.shape
    return jnp.arange(slots)[:, None], jnp.arange(size)[None]


@functools.partial(jax.jit, static_argnames=("room",))
def grow(rows: Rows, room: int) -> Rows:
    """Enlarges the cache: unrolls the ring buffer (oldest column first) and appends empty columns."""

    def wider(x: Array, axis: int) -> Array:
        width = [(0, 0)] * x.ndim
        width[axis] = (0, room - rows.room)
        return jnp.pad(jnp.roll(x, -rows.column, axis=axis), width)

    cache = [(wider(k, 3), wider(v, 2)) for k, v in rows.cache]
    return rows._replace(column=jnp.int32(rows.room), cache=cache)


@functools.partial(jax.jit, donate_argnames=("rows",))
def restart(rows: Rows, prompts: Prompts, chosen: Bool[Array, "A g"]) -> Rows:
    """Restarts the `chosen` rows: their next tokens follow the prompt."""
    return rows._replace(
        first=jnp.where(chosen, rows.age, rows.first),
        gap=jnp.where(chosen, 0, rows.gap),
        hidden=jnp.where(chosen[..., None], prompts.hidden[:, None], rows.hidden),
    )


@jax.jit
def regroup(
    prompts: Prompts, rows: Rows, source: Int[Array, "B"], picked: Int[Array, "B c"], real: Bool[Array, "B c"]
) -> tuple[Prompts, Rows]:
    """Gathers rows and prompts into new slots.

    New slot `b` gets the prompt of old slot `source[b]`, and, where `real`, the rows `picked[b]` (flat indices over all
    old slots). A prompt may be in several slots.
    """
    moved = {
        name: (x := getattr(rows, name)).reshape(-1, *x.shape[2:])[picked]
        for name in ("age", "first", "live", "ended", "gap", "held", "keys", "hidden", "tokens", "logprobs")
    }
    moved["cache"] = jax.tree.map(lambda x: x[picked.reshape(-1)], rows.cache)
    moved["live"] &= real
    return pick_prompts(prompts, source), rows._replace(**moved)


@functools.partial(jax.jit, static_argnames=("graphdef",), donate_argnames=("rows",))
def append(
    graphdef: Any, params: Any, prompts: Prompts, rows: Rows, tokens: Int[Array, "A g N"], counts: Int[Array, "A g"]
) -> Rows:
    """Appends tokens that the policy did not sample to rows, with one forward pass over these tokens only.

    `align` has made space for them: the last `counts` columns of each row.

    Args:
      tokens: padded on the left; `N` is at most the number of columns of the cache.
      counts: number of tokens of each row; may be 0. `cached + counts` is at most the number of columns.
    """
    model, width = _merge(graphdef, params), tokens.shape[-1]
    hidden, cache = model.extend(tokens, counts, rows.cached, prompts.lengths, prompts.cache, rows.cache)
    number = jnp.arange(width)[None, None] - (width - counts[..., None])
    place, real = rows.age[..., None] + number, number >= 0
    slots, samples = _row_index(rows)
    place = jnp.where(real, place, rows.tokens.shape[-1])  # out of range: dropped
    written = slots[..., None], samples[..., None], place
    return rows._replace(
        age=rows.age + counts,
        hidden=jnp.where((counts > 0)[..., None], hidden, rows.hidden),
        tokens=rows.tokens.at[written].set(tokens, mode="drop"),
        logprobs=rows.logprobs.at[written].set(0.0, mode="drop"),
        cache=cache,
    )
