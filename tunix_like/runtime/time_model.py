"""Predicts the time of a compiled program on an accelerator from its costs, and which resource bounds this time."""

from __future__ import annotations

from typing import NamedTuple

from tunix_like.runtime.accelerators import Accelerator
from tunix_like.runtime.compiled_costs import Costs


class Times(NamedTuple):
    """Predicted seconds of a program for each resource (arithmetic, memory, network), computed as if this resource were
    the only limit. `cycles` is the time in seconds that the compiler estimates; None if it gives no estimate."""

    arithmetic: float
    memory: float
    network: float
    cycles: float | None

    @property
    def device(self) -> float:
        """Predicted seconds of the program without the network: the largest of the arithmetic time, the memory time and
        the time that the compiler estimates."""
        return max(self.arithmetic, self.memory, self.cycles or 0.0)

    @property
    def predicted(self) -> float:
        """Predicted seconds of the program: the larger of the time of the device (arithmetic and memory) and the time
        of the network. This assumes that device and network work at the same time."""
        return max(self.device, self.network)

    @property
    def bound(self) -> str:
        """Name of the longest predicted time: `arithmetic`, `memory`, `network` or `cycles` (compiler's estimate)."""
        seconds = {name: value for name, value in self._asdict().items() if value is not None}
        return max(seconds, key=lambda name: seconds[name])

    @property
    def share(self) -> float:
        """The predicted time divided by the sum of the times of device and network; 1 if the sum is 0."""
        total = self.device + self.network
        return self.predicted / total if total else 1.0


def times(costs: Costs, needed: float, kind: Accelerator, number: int) -> Times:
    """Predicts the times of a program on `number` devices of an accelerator kind. `costs` are per device.

    Args:
      needed: number of operations per device, calculated from the size of the model. The larger of `needed` and
        `costs.operations` is used, because `costs` does not contain the matrix products inside kernels.
    """
    return Times(
        arithmetic=max(costs.operations, needed) / kind.operations,
        memory=costs.memory_bytes / kind.memory_bytes,
        network=costs.network_bytes / kind.network(number),
        cycles=costs.cycles / kind.clock if kind.clock and costs.cycles else None,
    )
