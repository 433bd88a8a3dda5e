"""Defines the compiled programs of the server, which start completions, sample tokens of all completions and resize the
caches.

The programs work on the arrays of `decoding.py`, with one row per prompt: each of the `A` rows has a prompt of its own.
The sampling parameters are arrays, so requests with different parameters share the programs. The caches have only the
widths that `widths_of` returns, so there are few array shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt32

from tunix_like.models.decoder import EarlierTokens, Kept
from tunix_like.models.delta_rule import Memory
from tunix_like.rollout.decoding import TOKENS, Prompts, Rows, decode, empty_rows, prefill, without_columns
from tunix_like.rollout.logits import RowSampling, choose_each, in_blocks, most_likely, uniform_number

if TYPE_CHECKING:
    from tunix_like.types import AnyArray

MOST_STEPS = 64
"""Maximum number of tokens per row in one call of `advance`."""

MOST_TOP = 20
"""Maximum number of most probable tokens per position whose log-probabilities a request can ask for."""

KEY_WORDS = 2
KEYS = "threefry2x32"
"""Name of the random number generator for the keys of `jax.random`. The data of such a key are two 32-bit words."""

FIRST_WIDTH = 64
FACTOR = 4
SHORTEST_PROMPT = 32
TOKENS_OF_PREFILL = 1024
PROMPTS_OF_PREFILL = 8

SHORTEST_CHUNK = 128
"""Minimum number of tokens that one call of `continue_prompt` computes. On an accelerator, a call for fewer tokens
hardly takes less time, because it reads all weights."""


class SamplingState(NamedTuple):
    """The prompts and completions of the rows; `limits` is the maximum number of tokens of each completion."""

    prompts: Prompts
    rows: Rows
    limits: Int[Array, "A"]
    sampling: RowSampling

    @property
    def width(self) -> int:
        """Number of tokens per completion for which the cache has space."""
        return self.rows.room

    @property
    def prompt_width(self) -> int:
        """Number of tokens per prompt for which the cache has space."""
        return _columns(self.prompts.cache)


class Starts(NamedTuple):
    """The completions to start, one entry per row. Rows for which `take` is False are not changed.

    Attributes:
      source: index of the prompt in the argument `fresh` of the function `start`.
      seed: the high and the low 32 bits of `JobSampling.seed`.
      number, sample: index of the prompt in its request, and index of the completion among the completions of the
        prompt.
    """

    take: Bool[AnyArray, "A"]
    source: Int[AnyArray, "A"]
    seed: UInt32[AnyArray, "A 2"]
    number: UInt32[AnyArray, "A"]
    sample: UInt32[AnyArray, "A"]
    limits: Int[AnyArray, "A"]
    sampling: RowSampling


def widths_of(longest: int) -> list[int]:
    """Returns the sizes that the caches of keys and values can have, in tokens per prompt or completion, in ascending
    order. The last size is `longest`."""
    return _powers(FIRST_WIDTH, FACTOR, longest)


def prompt_widths_of(longest: int) -> list[int]:
    """Returns the numbers of tokens to which prompts can be padded, in ascending order."""
    return _powers(SHORTEST_PROMPT, 2, longest)


def _powers(width: int, factor: int, longest: int) -> list[int]:
    widths = []
    while width < longest:
        widths.append(width)
        width *= factor
    return [*widths, longest]


def prompts_at_once(width: int) -> int:
    """Returns the maximum number of prompts of `width` tokens in one prefill. A prefill of more than one prompt is
    padded to this number of prompts."""
    return PROMPTS_OF_PREFILL if width * PROMPTS_OF_PREFILL <= TOKENS_OF_PREFILL else 1


def chunk_of(width: int) -> int:
    """Returns the number of tokens that one call of `continue_prompt` computes, for a prompt padded to `width` tokens.
    A prompt is continued if this takes at most half as many tokens as its prefill."""
    return max(SHORTEST_CHUNK, width // 8)


@functools.partial(jax.jit, static_argnames=("graphdef",))
def continue_prompt(
    graphdef: Any, params: Any, prompts: Prompts, begin: Int[AnyArray, ""], tokens: Int[AnyArray, "A N"]
) -> Prompts:
    """Computes the tokens of prompts from position `begin` on; the keys and values before it are those of `prompts`.
    The caches must have `begin + N` columns or more."""
    count, width = tokens.shape
    positions = jnp.broadcast_to(begin + jnp.arange(width), (count, 1, width))
    column = jnp.arange(_columns(prompts.cache))
    columns = jnp.broadcast_to(jnp.where(column < begin, column, -1), (count, 1, len(column)))
    # To `extend` they are the tokens of a completion whose prompt has no tokens.
    nothing = [(k[..., :1], v[:, :, :1]) for k, v in prompts.cache]
    earlier = EarlierTokens(jnp.zeros(count, jnp.int32), nothing, prompts.cache, begin, columns)
    hidden, cache, _ = nnx.merge(graphdef, params).extend(tokens[:, None], positions, earlier)
    return Prompts(jnp.full(count, begin + width), hidden[:, 0], cache)


def _columns(cache: list[Kept]) -> int:
    return next(layer[1].shape[2] for layer in cache if not isinstance(layer, Memory))


@functools.partial(jax.jit, static_argnames=("graphdef", "count", "width"))
def empty_state(graphdef: Any, params: Any, count: int, width: int) -> SamplingState:
    """Allocates the arrays of `count` rows without completions, and caches for `width` tokens."""
    tokens = jax.ShapeDtypeStruct((count, width), jnp.int32)
    lengths = jax.ShapeDtypeStruct((count,), jnp.int32)
    shapes = jax.eval_shape(functools.partial(prefill, graphdef), params, tokens, lengths)
    prompts = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    # Rows without a completion are computed too. Their prompts have one token, because attention over no tokens is
    # undefined.
    prompts = prompts._replace(lengths=jnp.ones(count, jnp.int32))
    rows = empty_rows(prompts, 1, MOST_STEPS, width, KEY_WORDS)
    sampling = RowSampling(jnp.zeros(count), jnp.ones(count), jnp.ones(count, jnp.int32))
    return SamplingState(prompts, rows, jnp.zeros(count, jnp.int32), sampling)


def start(state: SamplingState, fresh: Prompts, starts: Starts) -> SamplingState:
    """Copies prompts of `fresh` to rows, and starts a completion in each of these rows. Donates the arrays of `state`.

    Several rows can use the same prompt of `fresh`. The random numbers of a completion depend only on its seed,
    `number` and `sample`. `rollout.sampler.Sampler` uses the same random numbers if its key is made from the same seed.
    """
    caches = state.prompts.cache, state.rows.cache
    placed = _place(caches[0], fresh.cache, starts.take, starts.source)
    # `_begin` does not get the caches. Otherwise it would be compiled for each shape of the caches, which takes long
    # because of its random keys.
    rest = state._replace(prompts=state.prompts._replace(cache=[]), rows=state.rows._replace(cache=[]))
    rest = _begin(rest, fresh._replace(cache=[]), starts)
    return rest._replace(prompts=rest.prompts._replace(cache=placed), rows=rest.rows._replace(cache=caches[1]))


@functools.partial(jax.jit, donate_argnames=("cache",))
def _place(cache: list[Kept], fresh: list[Kept], take: Bool[Array, "A"], source: Int[Array, "A"]) -> list[Kept]:
    """Writes keys and values of prompt `source[a]` to the first columns of each row `a` with `take[a]`, and its memory
    of recurrent layers to the row."""

    def placed(old: Array, new: Array, axis: int) -> Array:
        here = take.reshape(-1, *(1,) * (old.ndim - 1))
        kept = jax.lax.slice_in_dim(old, 0, new.shape[axis], axis=axis)
        return jax.lax.dynamic_update_slice_in_dim(old, jnp.where(here, new[source], kept), 0, axis=axis)

    def of_layer(old: Kept, new: Kept) -> Kept:
        if isinstance(old, Memory):
            return Memory(*(placed(x, y, 1) for x, y in zip(old, new, strict=True)))
        return placed(old[0], new[0], 3), placed(old[1], new[1], 2)

    return [of_layer(old, new) for old, new in zip(cache, fresh, strict=True)]


@functools.partial(jax.jit, donate_argnames=("state",))
def _begin(state: SamplingState, fresh: Prompts, starts: Starts) -> SamplingState:
    """Does the work of `start` except for the caches, whose lists are empty."""
    take = starts.take
    rows = state.rows

    def key_of(seed: Array, number: Array, sample: Array) -> Array:
        key = jax.random.wrap_key_data(seed, impl=KEYS)
        return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, number), sample))

    keys = jax.vmap(key_of)(starts.seed, starts.number, starts.sample)[:, None]
    new = take[:, None]
    hidden = jnp.where(new, fresh.hidden[starts.source], state.prompts.hidden)
    lengths = jnp.where(take, fresh.lengths[starts.source], state.prompts.lengths)
    rows = without_columns(rows, new)._replace(
        age=jnp.where(new, 0, rows.age),
        live=rows.live | new,
        ended=rows.ended & ~new,
        keys=jnp.where(new[..., None], keys, rows.keys),
        hidden=jnp.where(new[..., None], hidden[:, None], rows.hidden),
    )
    sampling = [jnp.where(take, new, old) for old, new in zip(state.sampling, starts.sampling, strict=True)]
    limits = jnp.where(take, starts.limits, state.limits)
    return SamplingState(Prompts(lengths, hidden, []), rows, limits, RowSampling(*sampling))


@functools.partial(jax.jit, static_argnames=("graphdef", "eos_ids"), donate_argnames=("state",))
def advance(
    graphdef: Any,
    params: Any,
    head: Float[Array, "D V"],
    state: SamplingState,
    keep: Bool[Array, "A"],
    until: Int[Array, "2"],
    eos_ids: tuple[int, ...],
    top: Bool[Array, "A"],
) -> tuple[SamplingState, tuple[Int[Array, "K A N"], Float[Array, "K A N"]]]:
    """Samples tokens of all running completions, each with its own sampling parameters.

    Args:
      params: weights in the compute dtype, from `decoding.cast_params`.
      head: the output matrix, `Decoder.head()`.
      keep: False for rows that are cancelled.
      until: the loop ends when at most `until[0]` rows are live, or after `until[1]` steps (at most `MOST_STEPS`). The
        loop also ends when a live row has filled the cache.
      top: rows for which the most probable tokens are computed. They are computed for all rows or for none.

    Returns:
      the new state, and the `MOST_TOP` most probable tokens of each step with their log-probabilities.
        `rows.tokens[:, 0, i]` and `rows.logprobs[:, 0, i]` are the results of step `i`. Only the first `n` results of a
        row are valid, where `n` is the increase of its number of tokens, `rows.age`.
    """
    model = nnx.merge(graphdef, params)
    prompts = state.prompts
    eos = jnp.array(eos_ids, jnp.int32)
    live_at_start = state.rows.live & keep[:, None]
    # Rows without a completion are sampled greedily, because their top-k and top-p would add work.
    idle = ~live_at_start[:, 0]
    sampling = state.sampling._replace(temperature=jnp.where(idle, 0.0, state.sampling.temperature))

    count = min(MOST_TOP, head.shape[1])
    head = in_blocks(head)
    shape = (MOST_STEPS, len(keep), count)
    none = jnp.zeros(shape[1:], jnp.int32), jnp.zeros(shape[1:], jnp.float32)

    def body(carry: tuple[Array, Rows, tuple[Array, Array]]) -> tuple[Array, Rows, tuple[Array, Array]]:
        step, rows, tops = carry
        logits = model.scores(rows.hidden[:, 0], head)

        def draw(data: Array, age: Array) -> Array:
            return uniform_number(jax.random.fold_in(jax.random.wrap_key_data(data, impl=KEYS), age))

        uniform = jax.vmap(draw)(rows.keys[:, 0], rows.age[:, 0])
        tokens, logprobs = (x[:, None] for x in choose_each(logits, uniform, sampling))
        found = jax.lax.cond(top.any(), lambda: most_likely(logits, sampling.temperature, count), lambda: none)
        tops = jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y[None], step, 0), tops, found)
        ended = rows.ended | (rows.live & jnp.isin(tokens, eos))
        rows, _ = decode(model, prompts, rows, tokens)
        rows = rows._replace(
            live=rows.live & ~ended & (rows.age < state.limits[:, None]),
            ended=ended,
            tokens=jax.lax.dynamic_update_slice_in_dim(rows.tokens, tokens[..., None], step, axis=2),
            logprobs=jax.lax.dynamic_update_slice_in_dim(rows.logprobs, logprobs[..., None], step, axis=2),
        )
        return step + 1, rows, tops

    def more(carry: tuple[Array, Rows, tuple[Array, Array]]) -> Array:
        step, rows, _ = carry
        used = jnp.where(rows.live, rows.span, 0).max()
        return (rows.live.sum() > until[0]) & (step < until[1]) & (used < state.width)

    with jax.named_scope(TOKENS):
        start = jnp.int32(0), state.rows._replace(live=live_at_start), (jnp.zeros(shape, jnp.int32), jnp.zeros(shape))
        _, rows, tops = jax.lax.while_loop(more, body, start)
    return state._replace(rows=rows), tops


def resized(state: SamplingState, prompt_width: int, width: int) -> SamplingState:
    """Changes the caches of prompts to `prompt_width` columns, and the caches of completions to `width` columns. All
    running completions and their prompts must fit."""
    prompts = state.prompts
    rows = state.rows
    if prompt_width != state.prompt_width:
        # Rows without a completion may have had a longer prompt.
        lengths = jnp.minimum(prompts.lengths, prompt_width)
        prompts = prompts._replace(cache=resized_prompts(prompts.cache, prompt_width), lengths=lengths)
    if width != state.width:
        rows = rows._replace(**_resized_rows(rows.cache, rows.positions, rows.column, width))
    return state._replace(prompts=prompts, rows=rows)


@functools.partial(jax.jit, static_argnames=("width",))
def resized_prompts(cache: list[Kept], width: int) -> list[Kept]:
    """Changes the caches of prompts to `width` columns."""
    return _by_axis(cache, lambda x, axis: _fitted(x, axis, width))


def _by_axis(cache: list[Kept], change: Callable[[Array, int], Array]) -> list[Kept]:
    """Changes the keys and values of each layer, given the axis of their columns. Recurrent layers have no columns."""
    return [layer if isinstance(layer, Memory) else (change(layer[0], 3), change(layer[1], 2)) for layer in cache]


@functools.partial(jax.jit, static_argnames=("width",))
def _resized_rows(
    cache: list[Kept], positions: Int[Array, "A 1 U"], column: Int[Array, ""], width: int
) -> dict[str, Any]:
    """Changes the cache of completions, a ring buffer, to `width` columns: moves the oldest column to the front, then
    drops the oldest columns or appends empty columns. Returns the fields of `Rows` that change."""
    old = positions.shape[2]

    def unrolled(x: Array, axis: int, empty: int = 0) -> Array:
        x = jnp.roll(x, -column, axis=axis)
        return _fitted(jax.lax.slice_in_dim(x, max(old - width, 0), old, axis=axis), axis, width, empty)

    return {
        "cache": _by_axis(cache, unrolled),
        "positions": unrolled(positions, 2, empty=-1),
        "column": jnp.int32(old if width > old else 0),
    }


def _fitted(x: Array, axis: int, width: int, empty: int = 0) -> Array:
    """Changes the length of an axis to `width`: appends entries with the value `empty`, or drops the last entries."""
    if width <= x.shape[axis]:
        return jax.lax.slice_in_dim(x, 0, width, axis=axis)
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, width - x.shape[axis])
    return jnp.pad(x, padding, constant_values=empty)
