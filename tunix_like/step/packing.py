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
from jaxtyping import Bool, Int, Integer

if TYPE_CHECKING:
    from tunix_like.types import AnyArray, GroupBatch

ROWS_PER_BIN = 16
"""Maximum number of completions per bin. This number limits the size of arrays with one entry per completion of a
chunk."""


class Layout(NamedTuple):
    """The sizes of a packed update.

    Attributes:
      prompts: `p`, number of prompts per set.
      lanes: `A`, number of lanes per chunk.
      bins: `b`, number of bins per lane.
      own_lanes: if True, lane `i` belongs to prompt `i` of its set, and `lanes == prompts`. Prompts are then not moved
        between devices. If False, a lane can belong to any prompt of its set.
    """

    prompts: int
    lanes: int
    bins: int
    own_lanes: bool


class Packed(NamedTuple):
    """The place of each completion in the computation of an update: `M` sets of `p` prompts, `C` chunks per set, `A`
    lanes per chunk, `b` bins per lane, and space for `r` completions in a bin.

    Attributes:
      sets: number of used sets; the unused sets come last.
      prompts: index in the batch of each prompt of a set.
      chunks: number of used chunks of each set; the unused chunks come last.
      lane: index in the set of each lane's prompt; None if lane `i` of every chunk belongs to prompt `i` of the set.
      sample: index of each completion among the completions of its prompt.
      start: first position of each completion in its bin.
      length: number of tokens of each completion; 0 for unused entries.
      experts: experts of each place of a bin, in each of `l` layers with experts; None: those of the router.
      prompt_experts: experts of each token of the prompts of a set.
    """

    sets: Int[AnyArray, ""]
    prompts: Int[AnyArray, "M p"]
    chunks: Int[AnyArray, "M"]
    lane: Int[AnyArray, "M C A"] | None
    sample: Int[AnyArray, "M C A b r"]
    start: Int[AnyArray, "M C A b r"]
    length: Int[AnyArray, "M C A b r"]
    experts: Integer[AnyArray, "M C A b T l k"] | None = None
    prompt_experts: Integer[AnyArray, "M p S l k"] | None = None


def choose_layout(
    num_generations: int,
    most_prompts: int,
    widths: tuple[int, int],
    micro_batch_size: int,
    device_parts: int = 1,
    whole_groups: bool = False,
) -> Layout:
    """Chooses how the prompts and completions of an update are divided into forward and backward passes.

    A chunk has at most about `micro_batch_size` bins, and no more lanes than the completions of a set can fill. A lane
    has a copy of its prompt's keys and values, so if prompts are long, lanes have several bins. The activations of the
    prompts are kept while the completions are processed. A set has at most about `micro_batch_size * T` prompt tokens,
    so that these activations are not larger than those of a chunk. This limit does not apply if there is one completion
    per prompt.

    Args:
      num_generations: completions per prompt.
      most_prompts: maximum number of prompts of an update.
      widths: lengths of the padded prompts and of the padded completions, `(S, T)`.
      micro_batch_size: completions of full length per chunk. If there is one completion per prompt: pairs of a prompt
        and a completion.
      device_parts: number of devices that share the prompts of a set. The number of prompts of a set is a multiple of
        `device_parts`. If `device_parts` is above 1, each prompt of a set has one lane in every chunk.
      whole_groups: whether all completions of a prompt are in one lane, and so in one chunk.
    """
    width, steps = widths
    size = min(micro_batch_size, most_prompts * num_generations)
    if whole_groups:
        size = max(size, num_generations)
    prompts = max(1, min(most_prompts, micro_batch_size * steps // width if num_generations > 1 else size))
    own_lanes = device_parts > 1 or num_generations == 1
    if own_lanes:
        prompts = min(prompts, size // num_generations if whole_groups else size)
        if device_parts > 1:  # sets of equal size, so that the last set is not mostly padding
            prompts = -(-most_prompts // -(-most_prompts // prompts))
        prompts = -(-prompts // device_parts) * device_parts
        most = num_generations if whole_groups else max(1, size // prompts)
        return Layout(prompts, prompts, _bins_per_lane(most, num_generations), True)
    if prompts == 1:
        return Layout(1, 1, _bins_per_lane(size, num_generations), False)
    most = num_generations if whole_groups else min(size, max(1, width // (2 * steps)))
    bins = _bins_per_lane(most, num_generations)
    return Layout(prompts, max(1, min(size // bins, prompts * math.ceil(num_generations / bins))), bins, False)


def _bins_per_lane(most: int, num_generations: int) -> int:
    """Chooses how many bins a lane has, so that the fewest bins stay empty.

    Let `m` be the smaller of `most` and `num_generations`. The result is at most `m` and above `m / 2`. For example, 16
    completions of one prompt leave 14 bins empty in two lanes of 15 bins, and none in two lanes of 8 bins.
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
    """Assigns each completion that the mask `rows` selects to a place in the computation of an update.

    Args:
      lengths: number of tokens of each completion; completions without tokens are left out.
      width: the number of token positions of a bin, which is at least the length of every completion.
      most_prompts: the arrays have space for all completions of this number of prompts, so that the array shapes do not
        depend on `rows`. Defaults to the number of prompts in the batch.
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
    chunks = np.zeros(count, np.int32)
    lane = np.zeros(shape[:3], np.int32)
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
                sample[into] = members
                length[into] = sizes
                start[into] = np.cumsum(sizes) - sizes
    sets = np.int32(np.count_nonzero(chunks))
    return Packed(sets, prompts, chunks, None if layout.own_lanes else lane, sample, start, length)


def with_experts(packed: Packed, batch: GroupBatch, number: int) -> Packed:
    """Adds the recorded experts of a batch to packed completions. `number` is the number of experts; places without a
    token get all of them in turn, because one device would otherwise process all these places (`ep`)."""
    recorded = batch.experts
    of_prompts = batch.prompt_experts
    assert recorded is not None and of_prompts is not None
    (*_, width, layers, k) = recorded.shape
    shape = packed.length.shape

    def spread(steps: int) -> np.ndarray:
        turns = (np.arange(steps * k) % number).astype(recorded.dtype)
        return np.repeat(turns.reshape(steps, 1, k), layers, axis=1)

    of_prompts = of_prompts[packed.prompts]
    beyond = np.arange(of_prompts.shape[2]) >= batch.prompt_lengths[packed.prompts][..., None]
    of_prompts = np.where(beyond[..., None, None], spread(of_prompts.shape[2]), of_prompts)
    experts = np.broadcast_to(spread(width), (*shape[:4], width, layers, k)).copy()
    for place in np.argwhere(packed.length > 0).tolist():
        number_of_set, chunk, at, bin, _ = place
        prompt = at if packed.lane is None else packed.lane[number_of_set, chunk, at]
        group = packed.prompts[number_of_set, prompt]
        sample = packed.sample[tuple(place)]
        start, length = packed.start[tuple(place)], packed.length[tuple(place)]
        experts[number_of_set, chunk, at, bin, start : start + length] = recorded[group, sample, :length]
    return packed._replace(experts=experts, prompt_experts=of_prompts)


def token_places(packed: Packed, width: int) -> int:
    """Returns the number of token positions that the model processes for packed completions, including padding."""
    return int(np.sum(packed.chunks)) * math.prod(packed.length.shape[2:4]) * width


def _bins(live: Bool[np.ndarray, "G"], lengths: Int[np.ndarray, "G"], width: int) -> list[list[int]]:
    """Packs the completions of one group that the mask `live` selects into bins of `width` token positions. Returns
    the indices of the completions of each bin.

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
    """Distributes the lanes of a set of prompts over chunks. `pieces` has the number of lanes that each prompt needs.

    Returns four indices for each lane: of its prompt in the set, of the lane among the lanes of its prompt, of its
    chunk in the set, and of the lane in its chunk.
    """
    every = [(prompt, piece) for prompt, count in enumerate(pieces) for piece in range(count)]
    if layout.own_lanes:
        return [(prompt, piece, piece, prompt) for prompt, piece in every]
    return [(*piece, *divmod(number, layout.lanes)) for number, piece in enumerate(every)]
