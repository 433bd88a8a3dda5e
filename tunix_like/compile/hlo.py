"""Reads the text of an optimised XLA program (`compiled.as_text()`) of the TPU, GPU or CPU compiler: computations,
instructions, shapes, and the trip counts of loops."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"\s([a-z][a-z0-9\-]*)\(")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](\{[^{}]*\})?")
_CALLED = re.compile(r"\b(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
# Newer versions of XLA:TPU name a loop with a kernel after the kernel.
_SCOPE = re.compile(r'op_name="[^"]*?([\w.]+)\)*/while(?:/body/pallas_call)?"')
_BROKEN = re.compile(r'\n(?=["}][^\n])')  # a line break inside the attributes of a kernel
_PASSED_ON = ("copy", "bitcast", "convert")


class Shape(NamedTuple):
    """An array; `on_chip` is True if it is in on-chip memory and not in main memory."""

    dtype: str
    dims: tuple[int, ...]
    on_chip: bool

    @property
    def bytes(self) -> float:
        """Size without padding; 0 for XLA tokens, which have no data."""
        bits = re.search(r"\d+", self.dtype)
        return math.prod(self.dims) * (1.0 if self.dtype == "pred" else float(bits[0]) / 8 if bits else 0.0)


class Instruction(NamedTuple):
    """An instruction of an XLA computation.

    Attributes:
      type: type of the result, as text.
      operands: names of the operands.
      attributes: the text after the operands.
      value: the text between the parentheses: operands, the value of a constant, or the index of a parameter.
      root: whether the result of the instruction is the result of its computation.
    """

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    value: str
    root: bool

    @property
    def shapes(self) -> list[Shape]:
        return shapes_of(self.type)

    @property
    def bytes(self) -> float:
        return sum(shape.bytes for shape in self.shapes)

    @property
    def called(self) -> list[str]:
        """Names of the computations that the instruction calls, except the body and the condition of a loop."""
        branches = ",".join(_BRANCHES.findall(self.attributes))
        return _CALLED.findall(self.attributes) + re.findall(r"[\w.\-]+", branches)

    @property
    def scope(self) -> str:
        """The innermost `jax.named_scope` of a loop. A loop without a scope has an empty text or the name of a jax
        transformation."""
        found = _SCOPE.search(self.attributes)
        return found[1] if found else ""

    def attribute(self, name: str) -> str:
        """Returns the value of `name=...` or `name={...}` in the attributes; empty if it is missing."""
        found = re.search(rf"\b{name}=(?:\{{([^}}]*)\}}|%?([\w.\-]+))", self.attributes)
        return (found[1] or found[2] or "") if found else ""


class Computation(dict[str, Instruction]):
    """The instructions of an XLA computation by name, in the order of the text."""

    @functools.cached_property
    def root(self) -> Instruction:
        return next(instruction for instruction in self.values() if instruction.root)

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {int(each.value): each for each in self.values() if each.opcode == "parameter"}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Maps the name of an instruction to the instructions that use its result."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.values():
            for name in dict.fromkeys(instruction.operands):
                found.setdefault(name, []).append(instruction)
        return found

    def operands(self, instruction: Instruction) -> list[Instruction]:
        return [self[name] for name in instruction.operands if name in self]

    def constant(self, name: str) -> int | None:
        """Returns the value of an integer constant or of a copy of one; None for other instructions."""
        instruction = self.get(name)
        while instruction is not None and instruction.opcode in _PASSED_ON:
            instruction = self.get(instruction.operands[0])
        is_number = instruction and instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.value)
        return int(instruction.value) if instruction and is_number else None


class Module(dict[str, Computation]):
    """The computations of a compiled program by name; `entry` is the name of the one that runs first."""

    def __init__(self, text: str):
        self.entry = name = ""
        for line in _BROKEN.sub(" ", text).splitlines():
            if header := _HEADER.match(line):
                name = header[2]
                self[name] = Computation()
                self.entry = name if header[1] else self.entry
            elif instruction := _instruction(line):
                self[name][instruction.name] = instruction
        if not self.entry:
            raise ValueError("the text of the compiled program has no ENTRY computation")

    def loops(self) -> Iterator[tuple[str, Instruction]]:
        """Yields the name of the enclosing computation and the instruction of each loop."""
        for name, computation in self.items():
            yield from ((name, each) for each in computation.values() if each.opcode == "while")

    def trip_count(self, parent: str, loop: Instruction) -> int | None:
        """Returns the number of iterations of a loop in the computation `parent`; None if the number depends on data.

        The number is `known_trip_count` if the compiler gives it. Otherwise it is computed if the loop runs while a
        counter, which starts at a constant (by default 0) and increases by constants, is less than a constant.
        """
        if known := _KNOWN.search(loop.attributes):
            return int(known[1])
        condition = self[loop.attribute("condition")]
        body = self[loop.attribute("body")]
        if condition.root.opcode != "compare" or condition.root.attribute("direction") != "LT":
            return None
        name, limit = condition.root.operands
        end = condition.constant(limit)
        if name not in condition or condition[name].opcode != "get-tuple-element" or end is None:
            return None
        index = int(condition[name].attribute("index"))
        state = self[parent].get(loop.operands[0])
        start = self[parent].constant(state.operands[index]) if state and state.opcode == "tuple" else 0
        step = _increment(body, body.root.operands[index]) if body.root.opcode == "tuple" else 0
        return math.ceil(max(0, end - (start or 0)) / step) if step else None


def _increment(body: Computation, name: str) -> int:
    """Returns the sum of the constants that are added up to the value `name` in the body of a loop; 0 if a number is
    added that is not constant."""
    total = 0
    value = body.get(name)
    while value is not None and value.opcode in ("add", *_PASSED_ON):
        constants = {name: constant for name in value.operands if (constant := body.constant(name)) is not None}
        if len(value.operands) - len(constants) != 1:
            return 0
        total += sum(constants.values())
        value = body.get(next(name for name in value.operands if name not in constants))
    return total


def shapes_of(text: str) -> list[Shape]:
    """Returns the shapes of the arrays in the text of an instruction's type."""
    return [
        Shape(dtype, tuple(int(size) for size in re.findall(r"\d+", dims)), bool(re.search(r"S\([1-9]", layout)))
        for dtype, dims, layout in _SHAPE.findall(text)
    ]


def _instruction(line: str) -> Instruction | None:
    match = _LINE.match(line)
    opcode = _OPCODE.search(match[3]) if match else None
    if match is None or opcode is None:
        return None
    text = match[3]
    depth = 0
    end = opcode.end() - 1
    for end in range(opcode.end() - 1, len(text)):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        if depth == 0:
            break
    value = text[opcode.end() : end]
    operands = () if opcode[1] in ("constant", "parameter") else tuple(re.findall(r"%([\w.\-]+)", value))
    return Instruction(
        match[2], text[: opcode.start()], opcode[1], operands, text[end + 1 :], value, match[1] is not None
    )
