"""Defines the compiled programs for sampling: the prefill, the decode loop, and functions that start, move and restart
completions.

There are `A` slots. A slot holds one prompt and `g` rows, and a row holds one completion of this prompt. The keys and
values of a row are stored in a ring buffer with `U` columns, one per token. In each decode step all rows write to the
same column, so the write is a single slice even if the rows have different lengths. `Rows.positions` stores for each
row the positions of the tokens in its columns. A row attends only to columns that hold one of its tokens.

If completions have several turns, a row can wait for a reply while other rows are decoded. The columns that are written
during this time are empty in the waiting row. When the buffer is full, `compact_columns` removes the empty columns of
each row. A row can also be restarted: its tokens are removed from the cache, and its next tokens follow the prompt
directly. `schedule.py` and `turns.py` call the programs of this file.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Integer, UInt32

from tunix_like.models.decoder import Decoder, EarlierTokens, Kept, KeyValue, to_rows
from tunix_like.models.delta_rule import Memory
from tunix_like.models.quantization import LEAVES as QUANTIZED_LEAVES
from tunix_like.models.sharding import constrain_slots, row_axes
from tunix_like.rollout.logits import SamplingParams, choose, in_blocks, uniform_number
from tunix_like.rollout.shapes import prefill_piece

LAST = np.int32(2**31 - 1)
TOKENS = "tokens"
"""Name of the decoding loop in a compiled program. Each iteration samples one token of every row."""


class Prompts(NamedTuple):
    """Prefilled prompts: their keys and values, and the hidden states from which the first tokens of completions are
    predicted. `experts` are the selected experts of their tokens, if they are recorded."""

    lengths: Int[Array, "A"]
    hidden: Float[Array, "A D"]
    cache: list[Kept]
    experts: Integer[Array, "A S l k"] | None = None


class Rows(NamedTuple):
    """The state of the completions that are being sampled. Each row of the arrays holds one completion.

    The keys and values of a row are stored in a ring buffer, the cache. A column of the cache holds one token of the
    row or is empty.

    Attributes:
      column: index of the cache column for the next keys and values.
      positions: position of the token in each column, counted from the start of the prompt; -1 if the column is empty.
      span: number of columns, counted back from the most recently written one, that contain all tokens of the row.
      steps: number of decode steps so far. A step computes all rows, including rows that are not live.
      age: number of completion tokens of each row.
      first: number of completion tokens of each row at its last restart; 0 for a row that was never restarted. A
        restart removes the earlier tokens of the completion from the cache.
      live: whether a row is being sampled; False after it has `ended` or reached the length limit.
      ended: whether the row ended with an end-of-sequence token.
      held: whether the completion of a row can still get tokens, for example after a reply. The columns of a held row
        are kept even if the row is not live. Always False if completions have a single turn.
      keys: data of each row's random key (`jax.random.key_data`).
      experts: the selected experts of each token in the layers with experts; None if they are not recorded.
    """

    column: Int[Array, ""]
    positions: Int[Array, "A g U"]
    span: Int[Array, "A g"]
    steps: Int[Array, ""]
    age: Int[Array, "A g"]
    first: Int[Array, "A g"]
    live: Bool[Array, "A g"]
    ended: Bool[Array, "A g"]
    held: Bool[Array, "A g"]
    keys: UInt32[Array, "A g W"]
    hidden: Float[Array, "A g D"]
    tokens: Int[Array, "A g T"]
    logprobs: Float[Array, "A g T"]
    cache: list[Kept]
    experts: Integer[Array, "A g T l k"] | None = None

    @property
    def room(self) -> int:
        """Number of tokens per completion for which the cache has space."""
        return self.positions.shape[2]

    @property
    def cached(self) -> Int[Array, "A g"]:
        """Number of tokens of each completion whose keys and values are in the cache."""
        return self.age - self.first


@functools.partial(jax.jit, static_argnames=("graphdef", "record"))
def prefill(
    graphdef: Any, params: Any, tokens: Int[Array, "A S"], lengths: Int[Array, "A"], record: bool = False
) -> Prompts:
    """Computes the keys and values of each prompt, and the hidden state of its last token. All completions of a prompt
    share this result. With `record`, the result has the selected experts, also of later tokens (`Rows.experts`)."""
    model = _merge(graphdef, params)
    count, width = tokens.shape
    mesh = jax.sharding.get_abstract_mesh()
    parts = 1 if mesh.empty else math.prod(mesh.shape[axis] for axis in row_axes(mesh, count))
    piece = prefill_piece(count // parts, width)
    prefill = functools.partial(model.prefill_in_pieces, piece=piece) if piece < width else model.prefill
    hidden, cache, experts = prefill(tokens, lengths)
    return Prompts(lengths, hidden, cache, experts if record else None)


def _merge(graphdef: Any, params: Any) -> Decoder:
    """Builds the decoder from its graph and its weights, and casts its matrices to the compute dtype.

    A program casts the matrices once per call, and not in every step of its decode loop. Quantised matrices stay
    quantised; the layers dequantise them.
    """
    return nnx.merge(graphdef, cast_params(graphdef, params))


def cast_params(graphdef: Any, params: Any) -> Any:
    """Casts the matrices of a decoder to its compute dtype, except for quantised matrices."""
    return cast_matrices(nnx.merge(graphdef, params).dtype, params)


def cast_matrices(dtype: Any, params: Any) -> Any:
    """Casts all matrices except for quantised ones."""

    def cast(path: Any, x: Array) -> Array:
        return x.astype(dtype) if x.ndim > 1 and path[-1].key not in QUANTIZED_LEAVES else x

    return jax.tree_util.tree_map_with_path(cast, params)


@functools.partial(jax.jit, static_argnames=("size", "max_tokens", "room", "key_words"))
def empty_rows(prompts: Prompts, size: int, max_tokens: int, room: int, key_words: int) -> Rows:
    """Allocates the arrays for `size` completions of each prompt, with a cache for `room` tokens per completion. No
    completion is started.

    Args:
      max_tokens: length of the last axis of `Rows.tokens` and `Rows.logprobs`, which get the sampled tokens.
      key_words: number of 32-bit words of a random key.
    """
    shape = (prompts.hidden.shape[0], size)
    count = shape[0] * size
    return Rows(
        column=jnp.int32(0),
        positions=jnp.full((*shape, room), -1, jnp.int32),
        span=jnp.zeros(shape, jnp.int32),
        steps=jnp.int32(0),
        age=jnp.zeros(shape, jnp.int32),
        first=jnp.zeros(shape, jnp.int32),
        live=jnp.zeros(shape, bool),
        ended=jnp.zeros(shape, bool),
        held=jnp.zeros(shape, bool),
        keys=jnp.zeros((*shape, key_words), jnp.uint32),
        hidden=jnp.zeros((*shape, prompts.hidden.shape[-1]), prompts.hidden.dtype),
        tokens=jnp.zeros((*shape, max_tokens), jnp.int32),
        logprobs=jnp.zeros((*shape, max_tokens), jnp.float32),
        cache=[_empty_layer(layer, count, room) for layer in prompts.cache],
        experts=None
        if (experts := prompts.experts) is None
        else jnp.zeros((*shape, max_tokens, *experts.shape[2:]), experts.dtype),
    )


def _empty_layer(of_prompts: Kept, count: int, room: int) -> Kept:
    if isinstance(of_prompts, Memory):
        return Memory(*(jnp.zeros((count, *x.shape[1:]), x.dtype) for x in of_prompts))
    k, v = of_prompts
    return (
        jnp.zeros((count, *k.shape[1:3], room), k.dtype),
        jnp.zeros((count, v.shape[1], room, v.shape[3]), v.dtype),
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
    """Starts a new completion in each row for which `take` is True. A slot holds one prompt and several rows, and a row
    holds one completion of this prompt.

    The random numbers of a completion depend on `key`, `numbers` and `samples`, and not on the slot.

    Args:
      numbers: `Request.number` of the prompt in each slot.
      samples: index of each row's completion among the completions of its prompt.
    """
    row_key = lambda number, sample: jax.random.fold_in(jax.random.fold_in(key, number), sample)  # noqa: E731
    fresh = jax.vmap(jax.vmap(row_key, (None, 0)))(numbers, samples)
    return without_columns(rows, take)._replace(
        age=jnp.where(take, 0, rows.age),
        first=jnp.where(take, 0, rows.first),
        live=rows.live | take,
        ended=rows.ended & ~take,
        keys=jnp.where(take[..., None], jax.random.key_data(fresh), rows.keys),
        hidden=jnp.where(take[..., None], prompts.hidden[:, None], rows.hidden),
    )


def without_columns(rows: Rows, chosen: Bool[Array, "A g"]) -> Rows:
    """Removes from the cache all tokens of the completions for which `chosen` is True."""
    positions = jnp.where(chosen[..., None], -1, rows.positions)
    return rows._replace(positions=positions, span=jnp.where(chosen, 0, rows.span))


@functools.partial(jax.jit, static_argnames=("mesh",))
def pick(tree: Any, source: Int[Array, "B"], mesh: Mesh | None) -> Any:
    """Copies entries of arrays, e.g. prefilled prompts: entry `b` of the result is entry `source[b]` of `tree`. The
    result is sharded over `mesh` like the arrays of slots; otherwise every device would hold all of it."""
    return constrain_slots(jax.tree.map(lambda x: x[source], tree), mesh)


@functools.partial(jax.jit, donate_argnames=("prompts",))
def replace_prompts(
    prompts: Prompts, slots: Int[Array, "N"], source: Int[Array, "N"], fresh: Prompts | None
) -> Prompts:
    """Replaces prefilled prompts: prompt `slots[i]` of `prompts` becomes a copy of prompt `source[i]`.

    If `source[i]` is less than the number `A` of `prompts`, prompt `source[i]` of `prompts` is copied, as it was before
    the call. Otherwise prompt `source[i] - A` of `fresh` is copied. `fresh` has newly prefilled prompts. Values of
    `slots` that are out of range are ignored.
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
    last: Int[Array, ""] | np.int32 = LAST,
) -> Rows:
    """Samples tokens of the live rows (completions that are being sampled) until at most `stop_at` rows are live, until
    `Rows.steps` is `last`, or until the cache is full. The cache is a ring buffer. It is full if the next tokens would
    overwrite a token of a completion that can still get tokens."""
    model = _merge(graphdef, params)
    head = in_blocks(model.head())  # outside the loop, because a tied head must be transposed
    slots, size = rows.live.shape
    limit = rows.tokens.shape[-1]
    eos = jnp.array(eos_ids, jnp.int32)
    row_index = _row_index(rows)

    def body(rows: Rows) -> Rows:
        logits = model.scores(rows.hidden.reshape(slots * size, -1), head)
        draw = jax.vmap(lambda data, age: uniform_number(jax.random.fold_in(jax.random.wrap_key_data(data), age)))
        uniform = draw(rows.keys.reshape(-1, rows.keys.shape[-1]), rows.age.reshape(-1))
        tokens, logprobs = (x.reshape(slots, size) for x in choose(logits, uniform, sampling))
        written = (*row_index, jnp.where(rows.live, rows.age, limit))  # the index `limit` is out of range and dropped
        ended = rows.ended | (rows.live & jnp.isin(tokens, eos))
        rows, experts = decode(model, prompts, rows, tokens)
        return rows._replace(
            live=rows.live & ~ended & (rows.age < limit),
            ended=ended,
            tokens=rows.tokens.at[written].set(tokens, mode="drop"),
            logprobs=rows.logprobs.at[written].set(logprobs, mode="drop"),
            experts=_with_experts(rows.experts, written, experts),
        )

    def more(rows: Rows) -> Array:
        used = jnp.where(rows.live | rows.held, rows.span, 0).max()
        return (rows.live.sum() > stop_at) & (used < rows.room) & (rows.steps < last)

    with jax.named_scope(TOKENS):
        return jax.lax.while_loop(more, body, rows)


def _with_experts(recorded: Array | None, place: Any, experts: Array | None) -> Array | None:
    """Writes the selected experts of tokens to their places in `Rows.experts`, if they are recorded."""
    return None if recorded is None else recorded.at[place].set(experts, mode="drop")


def decode(model: Decoder, prompts: Prompts, rows: Rows, tokens: Int[Array, "A g"]) -> tuple[Rows, Array | None]:
    """Runs the model on the next token of every completion, and writes the keys and values of these tokens to the
    cache.

    Args:
      tokens: the next token of each completion; has no effect on completions for which `Rows.live` is False.

    Returns:
      the updated rows. Each completion that is being sampled has one more token in the cache, and the hidden state of
      this token. `Rows.tokens` and `Rows.experts` are not changed. Also the selected experts of the tokens, `[A g l k]`
      (None without experts).
    """
    new = jnp.where(rows.live, prompts.lengths[:, None] + rows.cached, -1)
    positions = jax.lax.dynamic_update_slice_in_dim(rows.positions, new[..., None], rows.column, axis=2)
    earlier = EarlierTokens(prompts.lengths, prompts.cache, rows.cache, rows.column, positions)
    hidden, cache, experts = model.decode(tokens, new, earlier)
    return rows._replace(
        column=(rows.column + 1) % rows.room,
        positions=positions,
        span=rows.span + 1,
        steps=rows.steps + 1,
        age=rows.age + rows.live,
        hidden=jnp.where(rows.live[..., None], hidden, rows.hidden),
        cache=cache,
    ), experts


def compact_columns(rows: Rows) -> Rows:
    """Removes the empty columns between the tokens of each completion in the cache: moves the keys and values of these
    tokens to the last columns.

    The cache arrays of `rows` are donated. The cache of each layer is moved by a separate program call, because a
    single program for all layers would need memory for a second cache.
    """
    positions, order = _order(rows.positions)
    cache = [layer if isinstance(layer, Memory) else _moved_layer(*layer, order) for layer in rows.cache]
    return rows._replace(column=jnp.zeros_like(rows.column), positions=positions, span=rows.cached, cache=cache)


@jax.jit
def _order(positions: Int[Array, "A g U"]) -> tuple[Int[Array, "A g U"], Int[Array, "R U"]]:
    """Sorts the cache columns of each completion by the position of their token. Empty columns come first (position
    -1). Returns the sorted positions, and the old index of each column. The latter has one row per completion
    (`R = A * g`)."""
    return jnp.sort(positions, axis=-1), to_rows(jnp.argsort(positions, axis=-1))


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _moved_layer(k: Float[Array, "R K h U"], v: Float[Array, "R K U h"], order: Int[Array, "R U"]) -> KeyValue:
    return jnp.take_along_axis(k, order[:, None, None], 3), jnp.take_along_axis(v, order[:, None, :, None], 2)


def _row_index(rows: Rows) -> tuple[Int[Array, "A 1"], Int[Array, "1 g"]]:
    slots, size = rows.age.shape
    return jnp.arange(slots)[:, None], jnp.arange(size)[None]


def grow(rows: Rows, room: int) -> Rows:
    """Enlarges the cache of keys and values, a ring buffer, to `room` columns: moves the oldest column to the front and
    appends empty columns. The cache arrays of `rows` are deleted."""
    wide = [index for index, layer in enumerate(rows.cache) if not isinstance(layer, Memory)]
    grown = _by_layer(lambda layer: _grown_layer(*layer, rows.column, room), [rows.cache[index] for index in wide])
    cache = [dict(zip(wide, grown, strict=True)).get(index, layer) for index, layer in enumerate(rows.cache)]
    positions = _wider(rows.positions, rows.column, room, axis=2, empty=-1)
    return rows._replace(column=jnp.full_like(rows.column, rows.room), positions=positions, cache=cache)


def _by_layer(change: Callable[[Any], Kept], cache: list[Kept]) -> list[Kept]:
    """Replaces the arrays of each layer and deletes the old ones, so that memory never holds two caches."""
    changed = []
    for layer in cache:
        changed.append(jax.block_until_ready(change(layer)))
        for x in layer:
            x.delete()
    return changed


@functools.partial(jax.jit, static_argnames=("room",))
def _grown_layer(k: Float[Array, "R K h U"], v: Float[Array, "R K U h"], column: Array, room: int) -> KeyValue:
    return _wider(k, column, room, axis=3), _wider(v, column, room, axis=2)


@functools.partial(jax.jit, static_argnames=("room", "axis", "empty"))
def _wider(x: Array, column: Int[Array, ""], room: int, axis: int, empty: int = 0) -> Array:
    width = [(0, 0)] * x.ndim
    width[axis] = (0, room - x.shape[axis])
    return jnp.pad(jnp.roll(x, -column, axis=axis), width, constant_values=empty)


@functools.partial(jax.jit, donate_argnames=("rows",))
def restart(rows: Rows, prompts: Prompts, chosen: Bool[Array, "A g"]) -> Rows:
    """Removes from the cache the tokens of the completions for which `chosen` is True. The model computes the next
    tokens of these completions as if they followed the prompt directly."""
    return without_columns(rows, chosen)._replace(
        first=jnp.where(chosen, rows.age, rows.first),
        hidden=jnp.where(chosen[..., None], prompts.hidden[:, None], rows.hidden),
    )


def regroup(
    prompts: Prompts,
    rows: Rows,
    source: Int[np.ndarray, "B"],
    picked: Int[np.ndarray, "B c"],
    real: Bool[np.ndarray, "B c"],
    mesh: Mesh | None,
) -> tuple[Prompts, Rows]:
    """Copies completions and their prompts to new arrays. A slot holds one prompt and several rows, and a row holds one
    completion of this prompt.

    New slot `b` gets the prompt of old slot `source[b]`, and the old rows with the indices `picked[b]`. Row `i` of old
    slot `a` has the index `a * g + i`, where `g` is the number of rows per old slot. A new row for which `real` is
    False is padding and is not sampled. Several new slots can get the same prompt. The old caches are deleted.
    """
    moved = _regrouped(rows._replace(cache=[]), picked, real)
    of_rows = picked.reshape(-1)
    kept = pick(prompts._replace(cache=[]), source, mesh)
    return (
        kept._replace(cache=_by_layer(lambda layer: pick(layer, source, mesh), prompts.cache)),
        moved._replace(cache=_by_layer(lambda layer: pick(layer, of_rows, mesh), rows.cache)),
    )


@jax.jit
def _regrouped(rows: Rows, picked: Int[Array, "B c"], real: Bool[Array, "B c"]) -> Rows:
    moved = {
        name: x.reshape(-1, *x.shape[2:])[picked]
        for name, x in rows._asdict().items()
        if name not in ("column", "steps", "cache") and x is not None
    }
    moved["live"] &= real
    return rows._replace(**moved)


@functools.partial(jax.jit, static_argnames=("graphdef",), donate_argnames=("rows",))
def append(
    graphdef: Any, params: Any, prompts: Prompts, rows: Rows, tokens: Int[Array, "A g N"], counts: Int[Array, "A g"]
) -> Rows:
    """Appends tokens that were not sampled, e.g. the tokens of a reply, to completions. One forward pass computes the
    appended tokens; the earlier tokens are not computed again.

    Args:
      rows: the completions. The next `N` columns (from `rows.column` on) must exist in the cache, and must not contain
        a token of a completion that continues.
      tokens: the tokens to append, padded on the left.
      counts: number of tokens to append to each completion; can be 0.
    """
    model = _merge(graphdef, params)
    width = tokens.shape[-1]
    number = jnp.arange(width)[None, None] - (width - counts[..., None])
    real = number >= 0
    new = jnp.where(real, prompts.lengths[:, None, None] + rows.cached[..., None] + number, -1)
    earlier = EarlierTokens(prompts.lengths, prompts.cache, rows.cache, rows.column, rows.positions)
    hidden, cache, experts = model.extend(tokens, new, earlier)
    slots, samples = _row_index(rows)
    place = jnp.where(real, rows.age[..., None] + number, rows.tokens.shape[-1])  # padding is not written
    written = slots[..., None], samples[..., None], place
    return rows._replace(
        column=(rows.column + width) % rows.room,
        positions=jax.lax.dynamic_update_slice_in_dim(rows.positions, new, rows.column, axis=2),
        span=rows.span + width,
        age=rows.age + counts,
        hidden=jnp.where((counts > 0)[..., None], hidden, rows.hidden),
        tokens=rows.tokens.at[written].set(tokens, mode="drop"),
        logprobs=rows.logprobs.at[written].set(0.0, mode="drop"),
        experts=_with_experts(rows.experts, written, experts),
        cache=cache,
    )
