"""Stacks the parameters of layers of the same kind. A compiled program then has one copy of the code per stack instead
of one copy per layer.

Layers of the same kind (`DecoderConfig.kind`) have equal windows and rotary positions, and either all or none of them
have experts, are recurrent, or use the keys and values of another layer. A decoder with stacked layers runs each stack
with `jax.lax.scan`. The compilation time and the memory of the compiled program then hardly depend on the number of
layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tunix_like.models.config import DecoderConfig

LONGEST_PERIOD = 8
"""Maximum number of layers in a repeated pattern. Gemma 3 has a pattern of 6 layers."""


class Segment(NamedTuple):
    """A pattern of `period` layers from layer `start` on, which occurs `repeats` times in a row.

    The layers of a pattern may have different windows, rotary positions and MLPs.
    """

    start: int
    period: int
    repeats: int

    def layers(self, offset: int) -> range:
        """Returns the indices of the layers at position `offset` of the pattern, one per repetition."""
        end = self.start + self.period * self.repeats
        return range(self.start + offset, end, self.period)


def segments_of(config: DecoderConfig) -> tuple[Segment, ...]:
    """Splits the layers of a model into segments, each of which covers as many layers as possible."""
    kinds = [config.kind(index) for index in range(config.num_layers)]
    segments: list[Segment] = []
    start = 0
    while start < len(kinds):
        candidates = [
            Segment(start, period, _repeats(kinds[start:], period)) for period in range(1, LONGEST_PERIOD + 1)
        ]
        segments.append(max(candidates, key=lambda segment: (_covered(segment), -segment.period)))
        start += segments[-1].period * segments[-1].repeats
    return tuple(segments)


def longest_period(config: DecoderConfig) -> int:
    return max(segment.period for segment in segments_of(config))


def _covered(segment: Segment) -> int:
    """Rates a segment, which is a pattern of layers and its repetitions. Returns the number of its layers if the
    pattern occurs at least twice; otherwise 1 for a pattern of one layer, and 0 for a longer pattern."""
    return segment.period * segment.repeats if segment.repeats > 1 else int(segment.period == 1)


def _repeats(kinds: Sequence[Any], period: int) -> int:
    """Counts the consecutive copies of a pattern with which `kinds` begins. The pattern is the first `period` entries
    of `kinds`. For `a b a b c` and `period` 2, the result is 2."""
    repeats = 1
    while list(kinds[repeats * period : (repeats + 1) * period]) == list(kinds[:period]):
        repeats += 1
    return repeats


def stack_layers(layers: Mapping[int, Any], segments: Sequence[Segment]) -> dict[int, Any]:
    """Stacks the parameters of layers. For each segment, the result has one entry per layer of the pattern. The first
    axis of the stacked arrays runs over the repetitions."""
    stacked = [
        jax.tree.map(lambda *arrays: jnp.stack(arrays), *(layers[i] for i in segment.layers(offset)))
        for segment in segments
        for offset in range(segment.period)
    ]
    return dict(enumerate(stacked))


def unstack_layers(stacked: Mapping[int, Any], segments: Sequence[Segment]) -> dict[int, Any]:
    """Inverts `stack_layers`."""
    layers: dict[int, Any] = {}
    slot = 0
    for segment in segments:
        for offset in range(segment.period):
            for repeat, index in enumerate(segment.layers(offset)):
                layers[index] = jax.tree.map(lambda x, repeat=repeat: x[repeat], stacked[slot])
            slot += 1
    return dict(sorted(layers.items()))


def with_stacked_layers(tree: Any, segments: Sequence[Segment] | None) -> Any:
    """Stacks layers in a parameter tree, or in all parameter trees of an optimizer state; None changes nothing."""
    return _map_layers(tree, segments, stack_layers)


def with_single_layers(tree: Any, segments: Sequence[Segment] | None) -> Any:
    """Inverts `with_stacked_layers`."""
    return _map_layers(tree, segments, unstack_layers)


def _map_layers(tree: Any, segments: Sequence[Segment] | None, function: Any) -> Any:
    def is_parameters(node: Any) -> bool:
        return isinstance(node, dict) and "layers" in node

    def mapped(node: Any) -> Any:
        return node | {"layers": function(node["layers"], segments)} if is_parameters(node) else node

    return tree if segments is None else jax.tree.map(mapped, tree, is_leaf=is_parameters)
