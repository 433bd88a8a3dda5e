"""Rollouts to the work of one update, on the host: which completions go through the model, and beside which others.

Prompts go through the model in sets of `p`, once each, whatever the number of their completions. The completions of a
set follow in chunks: a chunk has `A` lanes of one prompt each, a lane `b` bins, and a bin holds as many whole
completions of the lane's prompt as fit into the width `T` of the batch, one behind the other. A completion that teaches
nothing is not there at all, and short ones share a bin, so that the cost follows real tokens. All shapes are worst
cases that hold for any batch of the same width; how many sets and chunks are used is data, hence one compilation. This
module knows no model, no loss and no jax.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

if TYPE_CHECKING:
    from tunix_like.types import AnyArray

ROWS_PER_BIN = 16
"""At most so many completions share a bin: bounds the arrays of a chunk that are laid out by completion."""


class Layout(NamedTuple):
    """The shape of the work.

    Attributes:
      prompts: `p`, prompts that go through the model together.
      lanes: `A`, prompts whose completions are in one chunk.
      bins: `b`, bins of each of them.
      own_lanes: lane `i` belongs to prompt `i` of its set (then `lanes == prompts`), so that on several devices each
        keeps its prompts; else a lane may have any prompt of its set.
    """

    prompts: int
    lanes: int
    bins: int
    own_lanes: bool


class Packed(NamedTuple):
    """Where each completion goes: `M` sets of `C` chunks, of which the first `chunks[m]` are used; unused sets have
    none, and stand last.

    `prompts` and `sample` are places in the `[P, G]` batch; `start` is a completion's first position in its bin. A
    length of 0 says that there is none.
    """

    sets: Int[AnyArray, ""]
    prompts: Int[AnyArray, "M p"]
    chunks: Int[AnyArray, "M"]
    lane: Int[AnyArray, "M C A"] | None
    sample: Int[AnyArray, "M C A b r"]
    start: Int[AnyArray, "M C A b r"]
    length: Int[AnyArray, "M C A b r"]


def choose_layout(
    num_generations: int,
    most_prompts: int,
    widths: tuple[int, int],
    micro_batch_size: int,
    device_parts: int = 1,
) -> Layout:
    """The layout whose chunks have about `micro_batch_size` bins.

    Args:
      most_prompts: of one update.
      widths: of the padded prompts and completions, `(S, T)`.
      micro_batch_size: completions of full width per forward and backward.
      device_parts: prompts per set are a multiple of this, and lanes then have their own prompts.

    A set has at most as many prompt tokens as `micro_batch_size` completions of full width (but one prompt at least,
    and as many as `device_parts` asks for), so that the activations of the prompts, which are held while their
    completions go through, never outweigh those of such a chunk. Where a prompt has one completion, the two count
    together: `micro_batch_size` is then of examples. Each lane brings a copy of its prompt's keys; where
    prompts are long, lanes have several bins. No lane is beyond what the completions of a whole set can fill.
    """
    width, steps = widths
    size = min(micro_batch_size, most_prompts * num_generations)
    prompts = max(1, min(most_prompts, micro_batch_size * steps // width if num_generations > 1 else size))
    own_lanes = device_parts > 1 or num_generations == 1
    if own_lanes:
        prompts = -(-min(prompts, size) // device_parts) * device_parts
        return Layout(prompts, prompts, max(1, min(size // prompts, num_generations)), True)
    if prompts == 1:
        return Layout(1, 1, min(size, num_generations), False)
    bins = min(size, num_generations, max(1, width // (2 * steps)))
    return Layout(prompts, max(1, min(size // bins, prompts * math.ceil(num_generations / bins))), bins, False)


def pack(
    lengths: Int[np.ndarray, "P G"],
    rows: Bool[np.ndarray, "P G"],
    width: int,
    layout: Layout,
    most_prompts: int | None = None,
) -> Packed:
    """Lays the completions `rows` out.

    Args:
      lengths: tokens of each completion; one without tokens goes nowhere.
      width: `T`, of a bin; no completion is longer.
      most_prompts: make room for this many groups with all their completions, whatever the number of `rows`, so that
        the shapes do not depend on it (None: for as many groups as there are).
    """
    total, size = rows.shape
    live = rows & (lengths > 0)
    filled = {group: _bins(live[group], lengths[group], width) for group in np.flatnonzero(live.any(axis=1)).tolist()}
    groups = sorted(filled, key=lambda group: -len(filled[group])) if layout.own_lanes else list(filled)
    count = max(1, math.ceil((most_prompts or total) / layout.prompts), math.ceil(len(groups) / layout.prompts))
    pieces = math.ceil(size / layout.bins)  # of a group whose completions are all of full width
    most = pieces if layout.own_lanes else math.ceil(layout.prompts * pieces / layout.lanes)
    shape = (count, most, layout.lanes, layout.bins, min(size, ROWS_PER_BIN))
    prompts = np.full((count, layout.prompts), groups[-1] if groups else 0, np.int32)
    chunks, lane = np.zeros(count, np.int32), np.zeros(shape[:3], np.int32)
    sample, start, length = (np.zeros(shape, np.int32) for _ in range(3))
    for number in range(math.ceil(len(groups) / layout.prompts)):
        chosen = groups[number * layout.prompts :][: layout.prompts]
        prompts[number, : len(chosen)] = chosen
        places = _places([math.ceil(len(filled[group]) / layout.bins) for group in chosen], layout)
        for prompt, piece, chunk, at in places:
            chunks[number] = max(chunks[number], chunk + 1)
            lane[number, chunk, at] = prompt
            bins = filled[chosen[prompt]][piece * layout.bins :][: layout.bins]
            for place, members in enumerate(bins):
                own = lengths[chosen[prompt], members]
                into = (number, chunk, at, place, slice(len(members)))
                sample[into], length[into], start[into] = members, own, np.cumsum(own) - own
    sets = np.int32(np.count_nonzero(chunks))
    return Packed(sets, prompts, chunks, None if layout.own_lanes else lane, sample, start, length)


def token_places(packed: Packed, width: int) -> int:
    """Token places that the used chunks have; the lengths in `packed` say how many of them are completion tokens."""
    return int(np.sum(packed.chunks)) * math.prod(packed.length.shape[2:4]) * width


def _bins(live: Bool[np.ndarray, "G"], lengths: Int[np.ndarray, "G"], width: int) -> list[list[int]]:
    """The live completions of a group in bins: the longest first, each into the first bin that has room for it."""
    bins: list[list[int]] = []
    room: list[int] = []
    for sample in sorted(np.flatnonzero(live).tolist(), key=lambda i: -lengths[i]):
        own = int(lengths[sample])
        fits = (i for i, free in enumerate(room) if free >= own and len(bins[i]) < ROWS_PER_BIN)
        place = next(fits, len(bins))
        if place == len(bins):
            bins.append([])
            room.append(width)
        bins[place].append(sample)
        room[place] -= own
    return bins


def _places(pieces: list[int], layout: Layout) -> list[tuple[int, int, int, int]]:
    """`(prompt in its set, piece, chunk, lane)` of every lane's worth of bins, given how many each prompt has."""
    every = [(prompt, piece) for prompt, count in enumerate(pieces) for piece in range(count)]
    if layout.own_lanes:
        return [(prompt, piece, piece, prompt) for prompt, piece in every]
    return [(*piece, *divmod(number, layout.lanes)) for number, piece in enumerate(every)]
