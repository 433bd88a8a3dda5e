"""Adds up the costs of a compiled program per device (matrix products, memory traffic, network traffic, cycles), and
predicts its time from them.

The body of a loop is counted once per iteration ("trip" in XLA). If the number of trips of a loop depends on data, the
caller passes this number in `trips`, under the name of the `jax.named_scope` of the loop. `compiled.cost_analysis()`
cannot replace this count: it counts such loops once, and has no collectives and no cycles.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from tunix_like.compile.hlo import Computation, Instruction, Module, Shape
from tunix_like.runtime.accelerators import Accelerator

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
BETWEEN_SLICES = " between slices"
"""End of the kinds of collectives between TPU slices, which the compiler turns into sends and receives of the hosts."""
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')

Trips = Mapping[str, float | Callable[[float], float]]
"""Maps the name of the `jax.named_scope` of a loop to the number of iterations of the loop. The value can also be a
function that computes this number from the number of iterations of the enclosing loop."""

_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "while", "conditional", "call",
}  # fmt: skip
"""Opcodes of XLA instructions that read and write no main memory themselves."""

UNKNOWN_CYCLES = 2**62
"""A number of cycles at or above this limit is not an estimate. XLA:TPU writes the largest 64-bit integer for a few
fusions."""

KERNEL_BANDWIDTH = 0.7
"""Share of the peak memory bandwidth at which kernels are assumed to read and write, because the compiler has no cycles
for them. Published measurements of attention kernels for decoding: 0.7 to 0.86 (arXiv:2604.15464)."""

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_KERNEL = re.compile(r'custom_call_target="(?:tpu_custom_call|__gpu\$xla\.gpu\.triton|triton_k|mosaic_gpu|__cudnn\$)')
_KERNEL_BYTES = re.compile(r'(?:"cost_estimate":\{[^}]*"bytes_accessed":|\bbytes_accessed=)"(\d+)"')
_WINDOW = re.compile(r"(\w+)=([\dx_\-]+)")
_SCATTERED = "all-reduce-scatter"  # the TPU compiler's name for a fusion that is a reduce-scatter
_GEMM = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')


@dataclasses.dataclass
class Costs:
    """Total costs of a compiled program on one device.

    Attributes:
      operations: number of multiplications and additions in matrix products, except in those inside kernels.
      memory_bytes: number of bytes that instructions read from and write to main memory, kernels included.
      kernel_bytes: the part of `memory_bytes` that kernels read and write.
      cycles: number of cycles that the compiler estimates, without collectives and kernels; 0 if it estimates none.
      collectives: number of bytes that the device receives from other devices, by kind of collective.
      numbers: number of executed collectives, by kind.
      kernels: number of calls of kernels (Pallas, cuDNN). Their operations and cycles are not known.
    """

    operations: float = 0.0
    memory_bytes: float = 0.0
    kernel_bytes: float = 0.0
    cycles: float = 0.0
    collectives: dict[str, float] = dataclasses.field(default_factory=dict)
    numbers: dict[str, float] = dataclasses.field(default_factory=dict)
    kernels: float = 0.0

    @property
    def network_bytes(self) -> float:
        """Bytes received from other devices, without those from other TPU slices, whose network has another rate."""
        return sum(value for kind, value in self.collectives.items() if not kind.endswith(BETWEEN_SLICES))

    def add(self, other: Costs, times: float = 1.0) -> None:
        """Adds the costs `other`, multiplied by `times`, to these costs."""
        self.operations += times * other.operations
        self.memory_bytes += times * other.memory_bytes
        self.kernel_bytes += times * other.kernel_bytes
        self.cycles += times * other.cycles
        self.kernels += times * other.kernels
        for mine, theirs in ((self.collectives, other.collectives), (self.numbers, other.numbers)):
            for kind, value in theirs.items():
                mine[kind] = mine.get(kind, 0.0) + times * value


class Counter:
    """Adds up the costs of a compiled program.

    Args:
      text: the optimised program as text, from `compiled.as_text()`.
      trips: see `Trips`, for loops whose number of iterations is not in `text`.

    Attributes:
      unknown: scopes of the loops that counted as one iteration, because neither `text` nor `trips` has their number.
    """

    def __init__(self, text: str, trips: Trips):
        self.module = Module(text)
        self.trips = trips
        self.unknown: set[str] = set()
        self._costs = functools.cache(self._computation)

    def total(self) -> Costs:
        """Returns the costs of the whole program."""
        return self._costs(self.module.entry, 1.0)

    def one_trip(self, scope: str) -> Costs:
        """Returns the costs of one iteration of the loops in a `jax.named_scope`; 0 if there is none."""
        found = Costs()
        for name, loop in self.module.loops():
            if loop.scope == scope:
                found.add(self._costs(loop.attribute("body"), self._count(name, loop, 1.0)))
        return found

    def _computation(self, name: str, around: float) -> Costs:
        """Returns the costs of executing a computation once, in a loop of `around` iterations (1 if there is none)."""
        total = Costs()
        channels = set[str]()
        computation = self.module[name]
        for instruction in computation.values():
            if instruction.opcode == "while":
                count = self._count(name, instruction, around)
                for part in ("body", "condition"):
                    total.add(self._costs(instruction.attribute(part), count), count)
            elif instruction.opcode == "conditional":
                branches = [self._costs(branch, around) for branch in instruction.called]
                total.add(max(branches, key=lambda costs: (costs.cycles, costs.memory_bytes)))
            elif instruction.opcode in ("call", "async-start"):
                for called in instruction.called:
                    total.add(self._costs(called, around))
            else:
                cycles = _CYCLES.search(instruction.attributes)
                total.cycles += float(cycles[1]) if cycles and int(cycles[1]) < UNKNOWN_CYCLES else 0.0
                moved = self._memory(computation, instruction)
                total.memory_bytes += moved
                total.kernel_bytes += moved * _is_kernel(instruction)
                self._add_work(computation, instruction, total, channels)
        return total

    def _count(self, parent: str, loop: Instruction, around: float) -> float:
        known = self.module.trip_count(parent, loop)
        given = self.trips.get(loop.scope) if known is None else float(known)
        if given is None:
            self.unknown.add(loop.scope)
            return 1.0
        return given(around) if callable(given) else given

    def _add_work(
        self, computation: Computation, instruction: Instruction, costs: Costs, channels: set[str], fusion: str = ""
    ) -> None:
        """Adds to `costs` the matrix products, kernels and collectives of an instruction, also those inside a fusion.

        Args:
          channels: ids of the collectives that are counted. A collective that overlaps with other work occurs in
            several fusions with the same id.
          fusion: the name of the fused computation that contains the instruction; empty if there is none.
        """
        costs.operations += _products(computation, instruction)
        costs.kernels += _is_kernel(instruction)
        kind = instruction.opcode.removesuffix("-start")
        if kind == "all-reduce" and fusion.startswith(_SCATTERED):
            kind = "reduce-scatter"
        channel = instruction.attribute("channel_id") or instruction.name
        if kind in COLLECTIVES and channel not in channels:
            channels.add(channel)
            costs.add(Costs(collectives={kind: _received(computation, instruction, kind)}, numbers={kind: 1.0}))
        if instruction.opcode == "recv" and (transfer := _TRANSFER.search(instruction.attributes)):
            kind = transfer[1].lower().replace("_", "-") + BETWEEN_SLICES
            costs.add(Costs(collectives={kind: instruction.shapes[0].bytes}, numbers={kind: 1.0}))
        if instruction.opcode == "fusion":
            for name in instruction.called:
                for inner in self.module[name].values():
                    self._add_work(self.module[name], inner, costs, channels, name)

    def _memory(self, computation: Computation, instruction: Instruction) -> float:
        """Returns the number of bytes that an instruction reads from and writes to main memory.

        For a kernel, this is `bytes_accessed` of its `pl.CostEstimate` or, on a GPU, of its `set_xla_metadata`. Kernels
        without an estimate are assumed to read every operand and to write every result once.
        """
        opcode = instruction.opcode
        shapes = instruction.shapes
        inputs = computation.operands(instruction)
        if opcode in _FREE or opcode.endswith(("-done", "-update")):
            return 0.0
        if _is_kernel(instruction) and (estimate := _KERNEL_BYTES.search(instruction.attributes)):
            return float(estimate[1])
        if opcode == "fusion":
            return _fusion_memory(self.module, self.module[instruction.called[0]], inputs, shapes)
        if opcode in ("dynamic-slice", "slice", "gather"):
            return _main(shapes) + (_main(inputs[0].shapes) > 0) * instruction.bytes
        if opcode in ("dynamic-update-slice", "scatter"):
            return 2 * _main(inputs[1 if opcode == "dynamic-update-slice" else -1].shapes)
        if opcode.endswith("-start"):  # the result has source and destination first, in either order
            small = min((shape.bytes for shape in shapes[:2]), default=0.0)
            return sum(small for shape in shapes[:2] if not shape.on_chip)
        return _main(shapes) + sum(_main(each.shapes) for each in inputs)


def _main(shapes: Iterable[Shape]) -> float:
    """Returns the total size in bytes of the arrays that are in main memory."""
    return sum(shape.bytes for shape in shapes if not shape.on_chip)


def _fusion_memory(module: Module, called: Computation, inputs: list[Instruction], results: list[Shape]) -> float:
    """Returns the number of bytes that a fusion reads from its operands and writes to its results in main memory."""
    total = 0.0
    for index, operand in enumerate(inputs):
        if index in called.parameters and (size := _main(operand.shapes)):
            total += min(size, _read(module, called, called.parameters[index]))
    roots = [called[name] for name in called.root.operands] if called.root.opcode == "tuple" else [called.root]
    return total + sum(
        min(shape.bytes, _written(module, called, root))
        for root, shape in zip(roots, results, strict=False)
        if not shape.on_chip
    )


def _read(module: Module, called: Computation, value: Instruction) -> float:
    """Returns how many bytes of its parameter `value` a fusion reads: only those of slices if it reads only slices,
    also in fusions inside it."""
    read = 0.0
    for user in called.users.get(value.name, []):
        first = user.operands[0] == value.name
        if user.opcode == "bitcast":
            read += _read(module, called, user)
        elif user.opcode == "fusion":
            inner = module[user.called[0]]
            indices = [index for index, name in enumerate(user.operands) if name == value.name]
            read += sum(_read(module, inner, inner.parameters[index]) for index in indices)
            if _result(module, inner, inner.root)[1].opcode in ("parameter", "dynamic-update-slice"):  # passed on
                read += _read(module, called, user)
        elif user.opcode in ("dynamic-slice", "slice", "gather") and first:
            read += user.bytes
        elif user.opcode == "dynamic-update-slice" and first:
            read += _read(module, called, user)  # written in place, and possibly read afterwards
        elif user.opcode != "tuple" and not _is_async_collective(user):
            return value.bytes
    return read


def _written(module: Module, called: Computation, value: Instruction) -> float:
    """Returns how many bytes a fusion writes for its result `value`: only those of the update if it updates a part,
    also in a fusion inside it."""
    called, value = _result(module, called, value)
    if value.opcode == "dynamic-update-slice":
        return called[value.operands[1]].bytes
    return 0.0 if value.opcode == "parameter" or _is_async_collective(value) else value.bytes


def _result(module: Module, called: Computation, value: Instruction) -> tuple[Computation, Instruction]:
    """Returns the instruction that computes `value`, also in a fusion inside the fusion, and its computation."""
    while value.opcode in ("bitcast", "fusion"):
        if value.opcode == "bitcast":
            value = called[value.operands[0]]
        else:
            called = module[value.called[0]]
            value = called.root
    return called, value


def _is_kernel(instruction: Instruction) -> bool:
    return instruction.opcode == "custom-call" and _KERNEL.search(instruction.attributes) is not None


def _is_async_collective(instruction: Instruction) -> bool:
    return instruction.opcode == "custom-call" and "AsyncCollective" in instruction.attributes


def _received(computation: Computation, instruction: Instruction, kind: str) -> float:
    """Returns the number of bytes that a device receives in a collective, if each byte is sent only once.

    An all-reduce counts as a reduce-scatter followed by an all-gather.
    """
    size = sum(each.bytes for each in computation.operands(instruction))
    devices = _group_size(instruction.attributes)
    if kind == "collective-permute":
        return size
    return size * (devices - 1) * {"all-gather": 1.0, "all-reduce": 2.0 / devices}.get(kind, 1.0 / devices)


def _group_size(attributes: str) -> int:
    """Returns the number of devices of each group of a collective.

    The groups are written as lists `{{0,1},{2,3}}`, as a shape `[2,4]<=[8]`, or as axes `mesh['a'=2,'b'=4] {'b'}`.
    """
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return listed[1].count(",") + 1
    if shape := re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
        return int(shape[1])
    if mesh := re.search(r"replica_groups=(?:@\w+)?mesh\[([^\]]*)\][^{]*\{([^}]*)\}", attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'?(\w+)'?=(\d+)", mesh[1])}
        return math.prod(sizes.get(name, 1) for name in re.findall(r"\w+", mesh[2]))
    return 1


def _products(computation: Computation, instruction: Instruction) -> float:
    """Returns the number of multiplications and additions of a matrix product; 0 for other instructions."""
    if instruction.opcode not in ("dot", "convolution", "custom-call"):
        return 0.0
    arrays = [each.shapes[0].dims for each in computation.operands(instruction)[:2] if each.shapes]
    if len(arrays) < 2:
        return 0.0
    if instruction.opcode == "convolution":
        return _convolution(instruction, *arrays)
    if instruction.opcode == "dot":
        contracted = instruction.attribute("lhs_contracting_dims")
    elif "gemm" in instruction.attribute("custom_call_target") or "$lt$matmul" in instruction.attributes:
        found = _GEMM.search(instruction.attributes)
        contracted = found[1] if found else ""
    else:
        return 0.0
    depth = math.prod(arrays[0][int(axis)] for axis in re.findall(r"\d+", contracted))
    return 2.0 * depth * math.prod(instruction.shapes[0].dims)


def _convolution(instruction: Instruction, left: tuple[int, ...], right: tuple[int, ...]) -> float:
    """Returns the number of multiplications and additions of a convolution, except those whose input is padding.

    The TPU compiler represents matrix products as convolutions, and batch axes as spatial axes.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        return 0.0
    inputs, kernel, out = labels.groups()
    window = {name: value.split("x") for name, value in _WINDOW.findall(instruction.attribute("window"))}
    sizes = instruction.shapes[0].dims
    total = 2.0 * sizes[out.index("b")] * sizes[out.index("f")] * right[kernel.index("i")]
    for axis in range(len(inputs) - 2):
        label = str(axis)
        stride, padding, spread, dilation = (
            int(window[name][axis].split("_")[0]) if name in window else default
            for name, default in (("stride", 1), ("pad", 0), ("lhs_dilate", 1), ("rhs_dilate", 1))
        )
        total *= _pairs(
            left[inputs.index(label)], right[kernel.index(label)], sizes[out.index(label)], stride, padding, spread,
            dilation,
        )  # fmt: skip
    return total


@functools.lru_cache(4096)
def _pairs(size: int, kernel: int, out: int, stride: int, padding: int, spread: int, dilation: int) -> int:
    """Counts the pairs (output position, kernel position) of a convolution on one axis that read one of `size` input
    elements and not padding. The input is dilated by `spread`, the kernel by `dilation`."""
    place = np.arange(out)[:, None] * stride + np.arange(kernel) * dilation - padding
    return int(((place % spread == 0) & (place >= 0) & (place < size * spread)).sum())


class Times(NamedTuple):
    """Predicted seconds of a program for each resource (arithmetic, memory, network), computed as if this resource were
    the only limit. `cycles` is the time in seconds that the compiler estimates, and the time of the kernels, for which
    it has no estimate; None if it gives no estimate."""

    arithmetic: float
    memory: float
    network: float
    cycles: float | None

    @property
    def device(self) -> float:
        """Predicted seconds of the program without the network."""
        return max(self.arithmetic, self.memory, self.cycles or 0.0)

    @property
    def predicted(self) -> float:
        """Predicted seconds of the program, if device and network work at the same time."""
        return max(self.device, self.network)

    @property
    def limit(self) -> str:
        """Name of the longest time."""
        return max(self._fields, key=lambda name: getattr(self, name) or 0.0)

    @property
    def share(self) -> float:
        """The predicted time divided by the sum of the times of device and network; 1 if the sum is 0."""
        total = self.device + self.network
        return self.predicted / total if total else 1.0


def times(costs: Costs, needed: float, kind: Accelerator, number: int) -> Times:
    """Predicts the times of a program on `number` devices of a kind, from its costs per device.

    Args:
      needed: number of operations per device, calculated from the size of the model. The larger of `needed` and
        `costs.operations` is used, because `costs` does not contain the matrix products inside kernels.
    """
    kernels = costs.kernel_bytes / (KERNEL_BANDWIDTH * kind.memory_bytes)
    return Times(
        arithmetic=max(costs.operations, needed) / kind.operations,
        memory=(costs.memory_bytes - costs.kernel_bytes) / kind.memory_bytes + kernels,
        network=costs.network_bytes / kind.network(number),
        cycles=costs.cycles / kind.clock + kernels if kind.clock and costs.cycles else None,
    )
