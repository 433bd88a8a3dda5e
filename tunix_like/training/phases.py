"""Defines `Phase`, the estimated peak memory of a phase of a run, by component."""

from __future__ import annotations

import dataclasses

OF_THE_MODEL = ("weights", "reference", "optimizer", "gradients", "gradients and new weights", "cast weights")
"""Components of a phase that do not depend on lengths or on the number of completions."""


@dataclasses.dataclass(frozen=True)
class Phase:
    """The estimated peak memory of a phase on one device.

    Attributes:
      name: name of the phase.
      parts: bytes by component.
      decode: bytes by component of a decode step, without the arrays that are always held (weights, optimizer state and
        reference); empty if the phase does not sample.
    """

    name: str
    parts: dict[str, int]
    decode: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def fixed(self) -> int:
        """Bytes of the components that do not depend on lengths or on the number of completions."""
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
