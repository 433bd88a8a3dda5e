"""Defines `Phase`, the estimated peak memory of a phase of a run, by component."""

from __future__ import annotations

import dataclasses

OF_THE_MODEL = ("weights", "reference", "optimizer", "gradients", "gradients and new weights", "cast weights")
"""Components of the memory of a phase that do not depend on lengths or on the number of completions."""


@dataclasses.dataclass(frozen=True)
class Phase:
    """The estimated peak memory of a phase of a run (such as sampling or the update) on one device.

    Attributes:
      name: name of the phase.
      parts: number of bytes of each component, such as the weights.
      decode: number of bytes of each component of a decode step, without the arrays that are always in memory (weights,
        optimizer state and reference model); empty if the phase does not sample.
    """

    name: str
    parts: dict[str, int]
    decode: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def fixed(self) -> int:
        """Number of bytes of the components that do not depend on lengths or on the number of completions."""
        return sum(self.parts.get(name, 0) for name in OF_THE_MODEL)

    def __str__(self) -> str:
        parts = sorted(self.parts.items(), key=lambda part: -part[1])
        shown = [f"{name} {amount(size)}" for name, size in parts if size >= 0.01 * self.bytes]
        return f"{amount(self.bytes)} = {' + '.join(shown)}"


def amount(size: float) -> str:
    """Formats a number of bytes with a decimal unit and three significant digits."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size / 1e3:.3g} kB"
