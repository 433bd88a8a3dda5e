"""Packs the completions of one update into sets, chunks, lanes and bins, on the host.

The model processes prompts in sets of `p` prompts. Each prompt is processed once, whatever the number of its
completions. Then the completions of the set are processed in chunks. A chunk has `A` lanes. A lane belongs to one
prompt and has `b` bins. A bin has `T` token positions, where `T` is the padded length of the batch's completions. A bin
holds as many whole completions of the prompt as fit, one after the other. Completions without a gradient are left out,
and short completions share a bin. The cost is therefore proportional to the number of real tokens. All array shapes are
large enough for any batch with the same `T`. The numbers of used sets and chunks are data and not shapes, so the step
is compiled once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

if TYPE_CHECKING:
    from tunix_like.types import AnyArray

ROWS_PER_BIN = 16
"""Maximum number of completions per bin. This number limits the size of arrays with one entry per completion of a
chunk."""


class Layout(NamedTuple):
    """The sizes of a packed update.

    The model processes a set of prompts at once, and then the completions of these prompts in chunks. A chunk consists
    of lanes, and a lane of bins. A bin holds whole completions of one prompt, one after the other.

    Attributes:
      prompts: `p`, number of prompts per set.
      lanes: `A`, number of lanes per chunk; all completions of a lane have the same prompt.
      bins: `b`, number of bins per lane.
      own_lanes: if True, lane `i` belongs to prompt `i` of its set, and `lanes == prompts`. Prompts are then not moved
        between devices. If False, a lane can belong to any prompt of its set.
    """

    prompts: int
    lanes: int
    bins: int
    own_lanes: bool


class Packed(NamedTuple):
    """The place of each completion in a packed update: `M` sets of `C` chunks of `A` lanes of `b` bins (see `Layout`).

    Attributes:
      sets: number of used sets; the other sets come last.
      prompts: index in the batch of each prompt of a set.
      chunks: number of used chunks of each set; the other chunks come last.
      lane: index in the set of the prompt to which the lane belongs; None if `Layout.own_lanes` is True.
      sample: index of each completion in its group. The last axis, `r`, runs over the completions of a bin.
      start: first position of each completion in its bin.
      length: number of tokens of each completion; 0 for unused entries.
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
    """Chooses a layout whose chunks have at most about `micro_batch_size` bins. A bin holds one completion of full
    width or several short completions.

    Args:
      num_generations: completions per prompt.
      most_prompts: maximum number of prompts of an update.
      widths: widths of the padded prompts and completions, `(S, T)`.
      micro_batch_size: completions of full width per forward and backward pass. If there is one completion per prompt:
        pairs of a prompt and a completion.
      device_parts: number of shards. The number of prompts per set is a multiple of `device_parts`. If `device_parts`
        is above 1, `Layout.own_lanes` is True.

    A set has at most `micro_batch_size * T` prompt tokens, but at least one prompt and at least `device_parts` prompts.
    With this limit, the activations of the prompts, which are kept while the completions are processed, are at most as
    large as the activations of a chunk. The limit does not apply if there is one completion per prompt. Each lane has a
    copy of its prompt's keys and values. If prompts are long, a lane therefore has several bins. A chunk has no more
    lanes than the completions of a whole set can fill.
    """
    width, steps = widths
    size = min(micro_batch_size, most_prompts * num_generations)
    prompts = max(1, min(most_prompts, micro_batch_size * steps // width if num_generations > 1 else size))
    own_lanes = device_parts > 1 or num_generations == 1
    if own_lanes:
        prompts = min(prompts, size)
        if device_parts > 1:  # sets of equal size, so that the last set is not mostly padding
            prompts = -(-most_prompts // -(-most_prompts // prompts))
        prompts = -(-prompts // device_parts) * device_parts
        return Layout(prompts, prompts, _bins_per_lane(max(1, size // prompts), num_generations), True)
    if prompts == 1:
        return Layout(1, 1, _bins_per_lane(size, num_generations), False)
    bins = _bins_per_lane(min(size, max(1, width // (2 * steps))), num_generations)
    return Layout(prompts, max(1, min(size // bins, prompts * math.ceil(num_generations / bins))), bins, False)


def _bins_per_lane(most: int, num_generations: int) -> int:
    """Returns the number of bins per lane that leaves the fewest bins empty if all completions have the full width.

    The result is above `most / 2` and at most `most`. For example, a group of 16 completions in two lanes of 15 bins
    leaves 14 bins empty. In two lanes of 8 bins, it leaves no bin empty.
    """
    most = min(most, num_generations)
    return min(range(most, most // 2, -1), key=lambda bins: bins * math.ceil(num_generations / bins))


def pack(
    lengths: Int[np.ndarray, "P G"],
    rows: Bool[np.ndarray, "P G"],
    width: int,
    layout: Layout,
    most_prompts: int | None = None,
) -> Packed:
    """Assigns each completion that the mask `rows` selects to a set, chunk, lane and bin (see `Layout`).

    Args:
      lengths: number of tokens of each completion; completions without tokens are left out.
      width: `T`, the number of token positions of a bin, which is at least the length of every completion.
      most_prompts: the arrays have space for all completions of this number of groups, so that the array shapes do not
        depend on `rows`. Defaults to the number of groups in the batch.
    """
    total, size = rows.shape
    live = rows & (lengths > 0)
    filled = {group: _bins(live[group], lengths[group], width) for group in np.flatnonzero(live.any(axis=1)).tolist()}
    groups = sorted(filled, key=lambda group: -len(filled[group])) if layout.own_lanes else list(filled)
    count = max(1, math.ceil((most_prompts or total) / layout.prompts), math.ceil(len(groups) / layout.prompts))
    pieces = math.ceil(size / layout.bins)  # number of lanes of a group if all completions have full width
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
            for index, members in enumerate(bins):
                sizes = lengths[chosen[prompt], members]
                into = (number, chunk, at, index, slice(len(members)))
                sample[into], length[into], start[into] = members, sizes, np.cumsum(sizes) - sizes
    sets = np.int32(np.count_nonzero(chunks))
    return Packed(sets, prompts, chunks, None if layout.own_lanes else lane, sample, start, length)


def token_places(packed: Packed, width: int) -> int:
    """Returns the number of token positions in the used chunks, including padding."""
    return int(np.sum(packed.chunks)) * math.prod(packed.length.shape[2:4]) * width


def _bins(live: Bool[np.ndarray, "G"], lengths: Int[np.ndarray, "G"], width: int) -> list[list[int]]:
    """Packs the completions of one group that `live` marks into bins. Returns, for each bin, the indices of its
    completions.

    Completions are packed in descending order of length, each into the first bin with enough space.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for sample in sorted(np.flatnonzero(live).tolist(), key=lambda i: -lengths[i]):
        length = int(lengths[sample])
        fits = (i for i, free in enumerate(room) if free >= length and len(bins[i]) < ROWS_PER_BIN)
        index = next(fits, len(bins))
        if index == len(bins):
            bins.append([])
            room.append(width)
        bins[index].append(sample)
        room[index] -= length
    return bins


def _places(pieces: list[int], layout: Layout) -> list[tuple[int, int, int, int]]:
    """Assigns the bins of each prompt of a set to lanes. The bins of a prompt are divided into pieces of at most one
    lane.

    Args:
      pieces: number of pieces of each prompt of the set.

    Returns:
      four indices for each piece: the prompt in the set, the piece among the prompt's pieces, the chunk in the set, and
      the lane in the chunk.
    """
    every = [(prompt, piece) for prompt, count in enumerate(pieces) for piece in range(count)]
    if layout.own_lanes:
        return [(prompt, piece, piece, prompt) for prompt, piece in every]
    return [(*piece, *divmod(number, layout.lanes)) for number, piece in enumerate(every)]
