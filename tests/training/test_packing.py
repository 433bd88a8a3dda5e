"""Tests that each requested completion goes through the model exactly once, with its own prompt, in the smallest number
of chunks, and that shapes do not depend on the requested completions."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest

from tunix_like.step.packing import ROWS_PER_BIN, Layout, Packed, choose_layout, pack

PLACES = ("sample", "start", "length")


def members(packed: Packed) -> dict[tuple[int, ...], list[tuple[int, ...]]]:
    """Returns `(set, chunk, lane, bin) -> [(group, sample, start, length), ...]` of the packed completions."""
    found: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for place in zip(*np.nonzero(packed.length), strict=True):
        number, chunk, lane, *_ = place
        prompt = lane if packed.lane is None else packed.lane[number, chunk, lane]
        row = (packed.prompts[number, prompt], *(getattr(packed, name)[place] for name in PLACES))
        found.setdefault(tuple(map(int, place[:4])), []).append(tuple(map(int, row)))
    return found


@functools.cache
def fewest_bins(lengths: tuple[int, ...], width: int) -> int:
    """Returns the smallest number of bins, by trying every bin for the first completion."""
    if not lengths:
        return 0
    first, rest = lengths[0], range(1, len(lengths))
    together = (beside for count in range(ROWS_PER_BIN) for beside in itertools.combinations(rest, count))
    fits = (beside for beside in together if first + sum(lengths[i] for i in beside) <= width)
    return min(1 + fewest_bins(tuple(lengths[i] for i in rest if i not in beside), width) for beside in fits)


def divisions(groups: tuple[int, ...], size: int):
    """Yields every division of groups into the smallest number of sets of at most `size`."""

    def sets(groups):
        if not groups:
            yield []
            return
        for count in range(min(size - 1, len(groups) - 1) + 1):
            for beside in itertools.combinations(groups[1:], count):
                left = tuple(group for group in groups[1:] if group not in beside)
                yield from ([(groups[0], *beside), *more] for more in sets(left))

    return (found for found in sets(groups) if len(found) == math.ceil(len(groups) / size))


def fewest_chunks(lengths: np.ndarray, live: np.ndarray, width: int, layout: Layout) -> int:
    """Returns the smallest number over every division of groups into sets and of completions into bins."""
    bins = [fewest_bins(tuple(own[kept].tolist()), width) for own, kept in zip(lengths, live, strict=True)]
    pieces = [math.ceil(count / layout.bins) for count in bins]

    def chunks(groups):
        own = [pieces[group] for group in groups]
        return max(own) if layout.own_lanes else math.ceil(sum(own) / layout.lanes)

    groups = tuple(group for group, count in enumerate(pieces) if count)
    return min(sum(map(chunks, division)) for division in divisions(groups, layout.prompts))


def random_cases(count: int, own_lanes: bool):
    """Yields seeded `(lengths, rows, width, layout)`. Some completions are empty, and some are not requested."""
    rng = np.random.default_rng(own_lanes)
    for _ in range(count):
        prompts, size, width = (int(rng.integers(1, most)) for most in (6, 8, 9))
        lengths = rng.integers(0, width + 1, (prompts, size)).astype(np.int32)
        rows = rng.random((prompts, size)) < rng.choice([0.2, 0.6, 1.0])
        together, bins = int(rng.integers(1, prompts + 2)), int(rng.integers(1, size + 1))
        lanes = together if own_lanes else int(rng.integers(1, together * math.ceil(size / bins) + 1))
        yield lengths, rows, width, Layout(together, lanes, bins, own_lanes)


@pytest.mark.parametrize("own_lanes", [False, True])
def test_each_completion_is_packed_once_and_no_bin_exceeds_its_width(own_lanes):
    for lengths, rows, width, layout in random_cases(300, own_lanes):
        packed = pack(lengths, rows, width, layout)
        found = members(packed)
        laid_out = [(group, sample) for bin_ in found.values() for group, sample, *_ in bin_]
        assert sorted(laid_out) == [tuple(place) for place in np.argwhere(rows & (lengths > 0)).tolist()]
        for inside in found.values():
            assert len({group for group, *_ in inside}) == 1 and len(inside) <= ROWS_PER_BIN
            taken = np.zeros(width, int)
            for group, sample, start, length in inside:
                assert length == lengths[group, sample] and start + length <= width
                taken[start : start + length] += 1
            assert taken.max() == 1, "they overlap"
        assert (packed.prompts < len(rows)).all() and (packed.prompts >= 0).all()


@pytest.mark.parametrize("own_lanes", [False, True])
def test_used_sets_and_chunks_come_first(own_lanes):
    """Positions after the counts are empty. Each prompt is in one set, and with own lanes, lane `i` has prompt `i` of
    its set."""
    for lengths, rows, width, layout in random_cases(100, own_lanes):
        packed = pack(lengths, rows, width, layout)
        live = (rows & (lengths > 0)).any(axis=1)
        assert packed.sets == math.ceil(live.sum() / layout.prompts) == np.count_nonzero(packed.chunks[: packed.sets])
        assert not packed.chunks[packed.sets :].any()
        used = (packed.length > 0).any(axis=(2, 3, 4))
        assert used.tolist() == [[chunk < count for chunk in range(used.shape[1])] for count in packed.chunks]
        seen = packed.prompts[: packed.sets].reshape(-1)
        assert sorted(seen[: live.sum()]) == np.flatnonzero(live).tolist()
        assert (packed.lane is None) == layout.own_lanes


@pytest.mark.parametrize("own_lanes", [False, True])
def test_number_of_chunks_is_almost_always_minimal(own_lanes):
    """First fit is optimal in almost all cases of this size, and never uses more than one chunk too many."""
    beyond = []
    for lengths, rows, width, layout in random_cases(300, own_lanes):
        packed = pack(lengths, rows, width, layout)
        beyond.append(packed.chunks.sum() - fewest_chunks(lengths, rows & (lengths > 0), width, layout))
    assert min(beyond) == 0 and max(beyond) <= 1 and np.mean(beyond) <= 0.02


@pytest.mark.parametrize("own_lanes", [False, True])
def test_shapes_do_not_depend_on_the_rows(own_lanes):
    """Cases with no rows, with some, and with all rows at full width, which fill the shapes exactly."""
    for lengths, rows, width, layout in random_cases(100, own_lanes):
        room = len(rows) + 2
        shapes = {
            tuple(np.shape(x) for x in pack(own, kept, width, layout, room))
            for own in (lengths, np.full_like(lengths, width))
            for kept in (rows, np.ones_like(rows), np.zeros_like(rows))
        }
        assert len(shapes) == 1
        full = pack(np.full_like(lengths, width), np.ones_like(rows), width, layout)
        whole_sets = full.chunks[: len(rows) // layout.prompts]
        assert (whole_sets == full.length.shape[1]).all()


def test_a_group_split_over_chunks_is_laid_out_as_expected():
    """Seven of ten completions are live. A bin holds at most four completions, a chunk two bins."""
    lengths = np.array([[6, 1, 4, 2, 3, 1, 1, 5, 1, 6]], np.int32)
    rows = np.array([[1, 1, 1, 1, 0, 1, 1, 0, 1, 0]], bool)
    packed = pack(lengths, rows, 6, Layout(1, 1, 2, False), most_prompts=2)
    assert packed.sets == 1 and packed.chunks.tolist() == [2, 0]
    assert members(packed) == {
        (0, 0, 0, 0): [(0, 0, 0, 6)],
        (0, 0, 0, 1): [(0, 2, 0, 4), (0, 3, 4, 2)],
        (0, 1, 0, 0): [(0, 1, 0, 1), (0, 5, 1, 1), (0, 6, 2, 1), (0, 8, 3, 1)],
    }


def test_groups_with_many_bins_share_a_set_with_own_lanes():
    """The number of chunks of a set is that of its longest group, so groups with similar numbers of bins are
    combined."""
    lengths = np.array([[8, 8, 8, 8], [2, 2, 2, 2], [8, 8, 8, 8], [2, 2, 2, 2]], np.int32)
    packed = pack(lengths, np.ones((4, 4), bool), 8, Layout(2, 2, 1, True))
    assert packed.prompts.tolist() == [[0, 2], [1, 3]] and packed.chunks.tolist() == [4, 1]


# --- choice of the layout ------------------------------------------------------------------------------------------


def layouts(count: int):
    """Yields seeded `((generations, prompts, widths, micro-batch, parts), layout)`."""
    rng = np.random.default_rng(0)
    choices = ([1, 2, 3, 8, 16], range(1, 33), [1, 16, 100, 512], [1, 8, 64, 300, 1024], [1, 2, 3, 16, 128], [1, 2, 8])
    for _ in range(count):
        size, prompts, width, steps, micro, parts = (int(rng.choice(each)) for each in choices)
        asked = (size, prompts, (width, steps), micro, parts)
        yield asked, choose_layout(*asked)


def test_layout_respects_its_bounds():
    """Bins per chunk and prompt tokens per set are bounded by `micro_batch_size`, except for one prompt per device.
    Lanes and bins are bounded by the number that a set can fill."""
    for (size, prompts, (width, steps), micro, parts), layout in layouts(2000):
        assert min(layout[:3]) >= 1 and layout.prompts % parts == 0
        assert layout.own_lanes == (parts > 1 or size == 1)
        before_rounding = layout.prompts - parts + 1  # a lower bound
        assert before_rounding <= prompts
        examples = before_rounding <= micro if size == 1 else before_rounding * width <= micro * steps
        assert layout.prompts == parts or examples
        assert layout.lanes * layout.bins <= micro or (layout.bins == 1 and layout.lanes - parts < micro)
        assert layout.bins <= size
        assert layout.lanes == layout.prompts or not layout.own_lanes
        assert layout.lanes <= layout.prompts * math.ceil(size / layout.bins), "lanes that nothing can fill"


def test_layout_uses_the_micro_batch_size():
    """The layout uses more than half of the bins that `micro_batch_size` allows and a set can fill, and as many prompts
    as fit."""
    for (size, prompts, (width, steps), micro, parts), layout in layouts(2000):
        asked = min(micro, prompts * size)
        if parts == 1 and size > 1:
            assert 2 * layout.lanes * layout.bins > min(asked, layout.prompts * size)
            assert layout.prompts == prompts or (layout.prompts + 1) * width > micro * steps
        if layout.own_lanes:  # no more computed bins per group than with all the bins that fit
            most = max(1, min(asked // layout.prompts, size))
            assert 2 * layout.bins > most
            assert layout.bins * math.ceil(size / layout.bins) <= most * math.ceil(size / most)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((8, 6, (64, 64), 16), Layout(6, 16, 1, False)),  # short prompts: one bin per lane
        ((8, 6, (512, 64), 16), Layout(2, 4, 4, False)),  # long prompts are not copied for every bin
        ((8, 6, (512, 64), 8), Layout(1, 1, 8, False)),
        ((8, 6, (64, 64), 1), Layout(1, 1, 1, False)),
        ((8, 6, (64, 64), 1000), Layout(6, 48, 1, False)),  # no more lanes than completions
        ((8, 30, (512, 8), 128), Layout(2, 2, 8, False)),  # no more lanes than two prompts can fill
        ((1, 6, (64, 64), 4), Layout(4, 4, 1, True)),  # one completion per prompt
        ((8, 6, (64, 64), 16, 4), Layout(8, 8, 2, True)),  # a multiple of the devices
        ((8, 6, (512, 64), 2, 4), Layout(4, 4, 1, True)),
        ((16, 1, (64, 64), 7), Layout(1, 1, 4, False)),  # 4 x 4 bins, not 3 x 7
        ((16, 4, (2048, 64), 128), Layout(4, 4, 16, False)),
        ((16, 2, (448, 32), 7), Layout(1, 1, 4, False)),
        ((16, 2, (448, 32), 28), Layout(2, 7, 4, False)),  # not 7 bins per shared lane
        ((16, 64, (384, 768), 1023, 64), Layout(64, 64, 8, True)),  # not 15, which would leave 14 of 30 bins empty
    ],
)
def test_layouts_of_examples(asked, expected):
    assert choose_layout(*asked) == expected


def test_whole_groups_are_in_one_lane():
    """So that a loss of all completions of a prompt can be computed in one chunk, also if chunks are to be smaller."""
    rng = np.random.default_rng(0)
    given = itertools.product((1, 2, 5), (16, 64, 512), (1, 2, 3, 8, 100), (1, 4))
    for prompts, width, micro, parts in given:
        lengths = rng.integers(1, 65, (prompts, 2))
        layout = choose_layout(2, prompts, (width, 64), micro, parts, whole_groups=True)
        assert layout.lanes * layout.bins <= max(2 * parts, micro + 2 * parts)
        lanes: dict[int, set[tuple[int, ...]]] = {}
        for place, rows in members(pack(lengths, np.ones((prompts, 2), bool), 64, layout)).items():
            for group, sample, *_ in rows:
                lanes.setdefault(group, set()).add((*place[:3], sample))
        assert all(len(both) == 2 and len({place[:3] for place in both}) == 1 for both in lanes.values())
        assert len(lanes) == prompts
