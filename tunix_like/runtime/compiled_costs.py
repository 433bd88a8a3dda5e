"""Adds up the costs of a compiled program per device: matrix products, memory traffic, network traffic and cycles.

The body of a loop is counted once per iteration ("trip" in XLA). If the number of trips of a loop depends on data, the
caller passes this number in `trips`, under the name of the `jax.named_scope` of the loop.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping

from tunix_like.runtime.compiled_text import Computation, Instruction, Module, Shape

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")

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

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_KERNEL = re.compile(r'custom_call_target="(?:tpu_custom_call|__cudnn\$)')
_WINDOW = re.compile(r"(\w+)=([\dx_\-]+)")
_SCATTERED = "all-reduce-scatter"  # the TPU compiler's name for a fusion that is a reduce-scatter
_GEMM = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')


@dataclasses.dataclass
class Costs:
    """Total costs of a compiled program on one device.

    Attributes:
      operations: number of multiplications and additions in matrix products, except in those inside kernels.
      memory_bytes: number of bytes that instructions read from and write to main memory.
      cycles: number of cycles that the compiler estimates, without collectives and kernels; 0 if it estimates none.
      collectives: number of bytes that the device receives from other devices, by kind of collective.
      numbers: number of executed collectives, by kind.
      kernels: number of calls of kernels (Pallas, cuDNN). The operations and cycles of kernels are not known.
    """

    operations: float = 0.0
    memory_bytes: float = 0.0
    cycles: float = 0.0
    collectives: dict[str, float] = dataclasses.field(default_factory=dict)
    numbers: dict[str, float] = dataclasses.field(default_factory=dict)
    kernels: float = 0.0

    @property
    def network_bytes(self) -> float:
        return sum(self.collectives.values())

    def add(self, other: Costs, times: float = 1.0) -> None:
        """Adds the costs `other`, multiplied by `times`, to these costs."""
        self.operations += times * other.operations
        self.memory_bytes += times * other.memory_bytes
        self.cycles += times * other.cycles
        self.kernels += times * other.kernels
        for mine, theirs in ((self.collectives, other.collectives), (self.numbers, other.numbers)):
            for kind, value in theirs.items():
                mine[kind] = mine.get(kind, 0.0) + times * value


class Counter:
    """Adds up the costs of a compiled program.

    Args:
      text: the optimised program as text, from `compiled.as_text()`.
      trips: maps the `jax.named_scope` of a loop to its number of iterations; see `Trips`. It is for loops whose number
        of iterations is not in `text`. A loop counts as one iteration if neither gives a number.

    Attributes:
      unknown: scopes of the loops that counted as one iteration because their number of iterations was not given.
    """

    def __init__(self, text: str, trips: Trips):
        self.module, self.trips = Module(text), trips
        self.unknown: set[str] = set()
        self._costs = functools.cache(self._computation)

    def total(self) -> Costs:
        """Returns the costs of the whole program."""
        return self._costs(self.module.entry, 1.0)

    def one_trip(self, scope: str) -> Costs:
        """Returns the costs of one iteration of the loop in a `jax.named_scope`. If the scope has several loops, their
        costs are added; if it has none, the costs are 0."""
        found = Costs()
        for name, computation in self.module.computations.items():
            for loop in computation:
                if loop.opcode == "while" and loop.scope == scope:
                    found.add(self._costs(loop.attribute("body"), self._count(name, loop, 1.0)))
        return found

    def _computation(self, name: str, around: float) -> Costs:
        """Returns the costs of executing a computation of the program once.

        Args:
          around: the number of iterations of the enclosing loop; 1 if there is none.
        """
        total, channels = Costs(), set[str]()
        computation = self.module.computations[name]
        for instruction in computation:
            if instruction.opcode == "while":
                count = self._count(name, instruction, around)
                total.add(self._costs(instruction.attribute("body"), count), count)
                total.add(self._costs(instruction.attribute("condition"), count), count)
            elif instruction.opcode == "conditional":
                branches = [self._costs(branch, around) for branch in instruction.called]
                total.add(max(branches, key=lambda costs: (costs.cycles, costs.memory_bytes)))
            elif instruction.opcode in ("call", "async-start"):
                for called in instruction.called:
                    total.add(self._costs(called, around))
            else:
                total.add(self._instruction(computation, instruction, channels))
        return total

    def _count(self, parent: str, loop: Instruction, around: float) -> float:
        known = self.module.trip_count(parent, loop)
        if known is not None:
            return known
        given = self.trips.get(loop.scope)
        if given is None:
            self.unknown.add(loop.scope)
            return 1.0
        return given(around) if callable(given) else given

    def _instruction(self, computation: Computation, instruction: Instruction, channels: set[str]) -> Costs:
        costs = Costs()
        if (cycles := _CYCLES.search(instruction.attributes)) and int(cycles[1]) < UNKNOWN_CYCLES:
            costs.cycles = float(cycles[1])
        costs.memory_bytes = self._memory(computation, instruction)
        self._inside(computation, instruction, costs, channels)
        return costs

    def _inside(
        self, computation: Computation, instruction: Instruction, costs: Costs, channels: set[str], around: str = ""
    ) -> None:
        """Adds to `costs` the matrix products, kernels and collectives of an instruction. If it is a fusion, the
        instructions inside the fusion are included.

        A collective that overlaps with other work occurs in several fusions with the same channel id. To count it once,
        `channels` contains the channel ids that are counted already.

        Args:
          around: the name of the fused computation that contains the instruction; empty if there is none.
        """
        costs.operations += _products(computation, instruction)
        costs.kernels += instruction.opcode == "custom-call" and bool(_KERNEL.search(instruction.attributes))
        kind = instruction.opcode.removesuffix("-start")
        if kind == "all-reduce" and around.startswith(_SCATTERED):
            kind = "reduce-scatter"
        channel = instruction.attribute("channel_id") or instruction.name
        if kind in COLLECTIVES and channel not in channels:
            channels.add(channel)
            received = _received(computation, instruction, kind)
            costs.add(Costs(collectives={kind: received}, numbers={kind: 1.0}))
        if instruction.opcode == "fusion":
            for name in instruction.called:
                called = self.module.computations[name]
                for inner in called:
                    self._inside(called, inner, costs, channels, name)

    def _memory(self, computation: Computation, instruction: Instruction) -> float:
        """Returns the number of bytes that an instruction reads from and writes to main memory."""
        opcode = instruction.opcode
        if opcode in _FREE or opcode.endswith(("-done", "-update")):
            return 0.0
        operands = [computation.instructions.get(name) for name in instruction.operands]
        inputs = [operand for operand in operands if operand is not None]
        if opcode == "fusion":
            return self._fusion_memory(self.module.computations[instruction.called[0]], inputs, instruction)
        if opcode in ("dynamic-slice", "slice", "gather"):
            return _main(instruction.shapes) + sum(_main(each.shapes) > 0 for each in inputs[:1]) * instruction.bytes
        if opcode in ("dynamic-update-slice", "scatter"):
            return 2 * _main(inputs[1 if opcode == "dynamic-update-slice" else -1].shapes)
        if opcode.endswith("-start"):  # the result has source and destination first, in either order
            shapes = instruction.shapes
            small = min((shape.bytes for shape in shapes[:2]), default=0.0)
            return sum(small for shape in shapes[:2] if not shape.on_chip)
        return _main(instruction.shapes) + sum(_main(each.shapes) for each in inputs)

    def _fusion_memory(self, called: Computation, inputs: list[Instruction], fusion: Instruction) -> float:
        """Returns the number of bytes that a fusion reads from its operands and writes to its results in main
        memory."""
        total = 0.0
        for index, operand in enumerate(inputs):
            if index in called.parameters and _main(operand.shapes):
                total += min(_main(operand.shapes), _used(called, called.parameters[index]))
        roots = [called.root]
        if called.root.opcode == "tuple":
            roots = [called.instructions[name] for name in called.root.operands]
        for root, shape in zip(roots, fusion.shapes, strict=False):
            total += 0.0 if shape.on_chip else min(shape.bytes, _written(called, root))
        return total


def _main(shapes: list[Shape]) -> float:
    """Returns the total size in bytes of the arrays that are in main memory, given the shapes of several arrays."""
    return sum(shape.bytes for shape in shapes if not shape.on_chip)


def _used(called: Computation, value: Instruction) -> float:
    """Returns how many bytes the XLA fusion `called` reads of its parameter `value`. If the fusion reads only slices of
    the parameter, only the bytes of the slices are counted."""
    read = 0.0
    for user in called.users.get(value.name, []):
        if user.opcode == "bitcast":
            read += _used(called, user)
        elif user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == value.name:
            read += user.bytes
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == value.name:
            continue  # written in place
        elif user.opcode != "tuple" and not _is_async_collective(user):
            return value.bytes
    return read


def _written(called: Computation, value: Instruction) -> float:
    """Returns how many bytes the XLA fusion `called` writes for its result `value`. If the result is an operand of
    which a part is updated in place, only the bytes of this part are counted."""
    while value.opcode == "bitcast" and (inner := called.operand(value, 0)) is not None:
        value = inner
    if value.opcode == "dynamic-update-slice" and (update := called.operand(value, 1)) is not None:
        return update.bytes
    return 0.0 if value.opcode == "parameter" or _is_async_collective(value) else value.bytes


def _is_async_collective(instruction: Instruction) -> bool:
    return instruction.opcode == "custom-call" and "AsyncCollective" in instruction.attributes


def _received(computation: Computation, instruction: Instruction, kind: str) -> float:
    """Returns the number of bytes that a device receives in a collective. Assumes that each byte is sent only once.

    An all-reduce counts as a reduce-scatter followed by an all-gather.
    """
    operands = [computation.instructions.get(name) for name in instruction.operands]
    size = sum(operand.bytes for operand in operands if operand is not None)
    if kind == "collective-permute":
        return size
    devices = _group_size(instruction.attributes)
    if kind == "all-gather":
        return size * (devices - 1)
    return size * (devices - 1) / devices * (2 if kind == "all-reduce" else 1)


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
    left, right = computation.operand(instruction, 0), computation.operand(instruction, 1)
    if left is None or right is None or not left.shapes or not right.shapes:
        return 0.0
    if instruction.opcode == "convolution":
        return _convolution(instruction, left.shapes[0].dims, right.shapes[0].dims)
    if instruction.opcode == "dot":
        contracted = instruction.braces("lhs_contracting_dims")
    elif "gemm" in instruction.attribute("custom_call_target") or "$lt$matmul" in instruction.attributes:
        found = _GEMM.search(instruction.attributes)
        contracted = found[1].replace('"', "") if found else ""
    else:
        return 0.0
    depth = math.prod(left.shapes[0].dims[int(axis)] for axis in contracted.split(",") if axis)
    return 2.0 * depth * math.prod(instruction.shapes[0].dims)


def _convolution(instruction: Instruction, left: tuple[int, ...], right: tuple[int, ...]) -> float:
    """Returns the number of multiplications and additions of a convolution, except those whose input is padding.

    The TPU compiler represents matrix products as convolutions, and batch axes as spatial axes.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        return 0.0
    given, kernel, out = labels.groups()
    window = {name: value.split("x") for name, value in _WINDOW.findall(instruction.braces("window"))}
    sizes = instruction.shapes[0].dims
    total = 2.0 * sizes[out.index("b")] * sizes[out.index("f")] * right[kernel.index("i")]
    for axis in range(len(given) - 2):
        label = str(axis)

        def number(name: str, default: str, axis: int = axis) -> list[int]:
            return [int(part) for part in window.get(name, [default] * (axis + 1))[axis].split("_")]

        total *= _pairs(
            left[given.index(label)],
            right[kernel.index(label)],
            sizes[out.index(label)],
            (number("stride", "1")[0], number("pad", "0_0")[0]),
            (number("lhs_dilate", "1")[0], number("rhs_dilate", "1")[0]),
        )
    return total


@functools.lru_cache(4096)
def _pairs(given: int, kernel: int, out: int, placed: tuple[int, int], dilated: tuple[int, int]) -> int:
    """Counts the pairs (output position, kernel position) of a convolution on one axis that read an input element and
    not padding.

    Args:
      given, kernel, out: sizes of the input, of the kernel and of the output.
      placed: the stride, and the padding before the first element.
      dilated: the dilation of the input and of the kernel.
    """
    count = 0
    for position in range(out):
        for offset in range(kernel):
            place = position * placed[0] + offset * dilated[1] - placed[1]
            count += place % dilated[0] == 0 and 0 <= place // dilated[0] < given
    return count
