"""Reads the text of an optimised XLA program: computations, instructions, shapes and the trip counts of loops.

The text is the result of `compiled.as_text()` for a program from the TPU, GPU or CPU compiler.
"""

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
_SCOPE = re.compile(r'op_name="[^"]*?([\w.]+)\)*/while"')
_BROKEN = re.compile(r'\n(?=["}][^\n])')  # a line break inside the attributes of a kernel
_PASSED_ON = ("copy", "bitcast", "convert")


class Shape(NamedTuple):
    """The dtype and the dimensions of an array, and whether it is in on-chip memory instead of main memory."""

    dtype: str
    dims: tuple[int, ...]
    on_chip: bool

    @property
    def bytes(self) -> float:
        """Size of the array in bytes, without padding; 0 for XLA tokens, which have no data."""
        bits = re.search(r"\d+", self.dtype)
        size = 1.0 if self.dtype == "pred" else float(bits[0]) / 8 if bits else 0.0
        return size * math.prod(self.dims)


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
        """Shapes of the arrays in the result of the instruction; several if the result is a tuple."""
        return shapes_of(self.type)

    @property
    def bytes(self) -> float:
        return sum(shape.bytes for shape in self.shapes)

    @property
    def called(self) -> list[str]:
        """Names of the computations that the instruction calls. For a loop the list is empty: its body and its
        condition are attributes."""
        found = _CALLED.findall(self.attributes)
        for names in _BRANCHES.findall(self.attributes):
            found += [name.strip(" %") for name in names.split(",")]
        return found

    @property
    def scope(self) -> str:
        """The innermost `jax.named_scope` of a loop. A loop without a scope has an empty text or the name of a jax
        transformation."""
        found = _SCOPE.search(self.attributes)
        return found[1] if found else ""

    def attribute(self, name: str) -> str:
        """Returns the value of the attribute `name=...` of an instruction as text; empty if it is missing."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else ""

    def braces(self, name: str) -> str:
        """Returns the text between the braces of the instruction's attribute `name={...}`; empty if it is missing."""
        found = re.search(rf"\b{name}=\{{([^}}]*)\}}", self.attributes)
        return found[1] if found else ""


class Computation:
    """The instructions of an XLA computation by name, in the order of the program's text."""

    def __init__(self, instructions: list[Instruction]):
        self.instructions = {instruction.name: instruction for instruction in instructions}

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    @functools.cached_property
    def root(self) -> Instruction:
        return next(instruction for instruction in self if instruction.root)

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {int(each.value): each for each in self if each.opcode == "parameter"}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Maps the name of an instruction to the instructions that use its result."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self:
            for name in dict.fromkeys(instruction.operands):
                found.setdefault(name, []).append(instruction)
        return found

    def operand(self, instruction: Instruction, index: int) -> Instruction | None:
        if index >= len(instruction.operands):
            return None
        return self.instructions.get(instruction.operands[index])

    def constant(self, name: str) -> int | None:
        """Returns the value of the instruction `name` if it is an integer constant or a copy of such a constant, else
        None."""
        instruction = self.instructions.get(name)
        while instruction is not None and instruction.opcode in _PASSED_ON:
            instruction = self.operand(instruction, 0)
        if instruction is None or instruction.opcode != "constant" or not re.fullmatch(r"-?\d+", instruction.value):
            return None
        return int(instruction.value)


class Module:
    """A compiled program.

    Attributes:
      computations: all computations by name.
      entry: the name of the computation that runs first.
    """

    def __init__(self, text: str):
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        name, lines = "", list[Instruction]()
        for line in _BROKEN.sub(" ", text).splitlines():
            if header := _HEADER.match(line):
                name, lines = header[2], []
                self.entry = name if header[1] else self.entry
            elif line == "}":
                self.computations[name] = Computation(lines)
            elif instruction := _instruction(line):
                lines.append(instruction)
        if self.entry not in self.computations:
            raise ValueError("the text of the compiled program has no ENTRY computation")

    def trip_count(self, parent: str, loop: Instruction) -> int | None:
        """Returns the number of iterations of a loop in the computation `parent`; None if the number depends on data.

        The number is `known_trip_count` if the compiler gives it. Otherwise it is computed if the loop runs while a
        counter is less than a constant, and is None for other loops.
        """
        if known := _KNOWN.search(loop.attributes):
            return int(known[1])
        condition = self.computations[loop.attribute("condition")]
        if condition.root.opcode != "compare" or loop_direction(condition.root) != "LT":
            return None
        counter, limit = (condition.instructions.get(name) for name in condition.root.operands)
        end = None if limit is None else condition.constant(limit.name)
        if counter is None or counter.opcode != "get-tuple-element" or end is None:
            return None
        index = int(counter.attribute("index"))
        step = self._step(self.computations[loop.attribute("body")], index)
        start = self._start(self.computations[parent], loop, index)
        return math.ceil(max(0, end - start) / step) if step else None

    def _start(self, parent: Computation, loop: Instruction, index: int) -> int:
        """Returns the initial value of a loop's counter; 0 if this value is not a constant of the computation `parent`.
        `index` is the position of the counter in the state of the loop."""
        state = parent.operand(loop, 0)
        if state is None or state.opcode != "tuple":
            return 0
        return parent.constant(state.operands[index]) or 0

    def _step(self, body: Computation, index: int) -> int:
        """Returns the increment of a loop's counter; 0 if the increment is not a sum of constants. `index` is the
        position of the counter in the state of the loop."""
        if body.root.opcode != "tuple":
            return 0
        total, value = 0, body.operand(body.root, index)
        while value is not None and value.opcode in ("add", *_PASSED_ON):
            constants = [body.constant(name) for name in value.operands]
            rest = [name for name, constant in zip(value.operands, constants, strict=True) if constant is None]
            if len(rest) != 1:
                return 0
            total += sum(constant for constant in constants if constant is not None)
            value = body.instructions.get(rest[0])
        return total


def loop_direction(compare: Instruction) -> str:
    """Returns the direction of a comparison instruction, e.g. `LT` for "less than"."""
    return compare.attribute("direction")


def shapes_of(text: str) -> list[Shape]:
    """Returns the shapes of the arrays in the text of an instruction's type."""
    found = []
    for dtype, dims, layout in _SHAPE.findall(text):
        sizes = tuple(int(size) for size in dims.replace("<=", "").split(",") if size)
        found.append(Shape(dtype, sizes, bool(re.search(r"S\([1-9]", layout))))
    return found


def _instruction(line: str) -> Instruction | None:
    match = _LINE.match(line)
    opcode = _OPCODE.search(match[3]) if match else None
    if match is None or opcode is None:
        return None
    text, depth, end = match[3], 0, opcode.end() - 1
    for end in range(opcode.end() - 1, len(text)):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        if depth == 0:
            break
    value = text[opcode.end() : end]
    operands = () if opcode[1] in ("constant", "parameter") else tuple(re.findall(r"%([\w.\-]+)", value))
    return Instruction(
        match[2], text[: opcode.start()], opcode[1], operands, text[end + 1 :], value, match[1] is not None
    )
