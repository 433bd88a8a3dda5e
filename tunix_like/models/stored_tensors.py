"""Tensors in weight files, which are read in blocks of rows: whole ones, those of one expert, and packed ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tunix_like.errors import UserError

READ_BYTES = 4 * 1024**2
"""Maximum number of bytes of a file that are read to the host at once. The array to which these bytes are copied takes
memory in addition."""
FLOATS = ("F64", "F32", "F16", "BF16")
_MX_BLOCK = 32
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4 = np.concatenate([_FP4, -_FP4])

Index = tuple[slice, ...]


class Stored(NamedTuple):
    """A tensor in an open safetensors file."""

    file: Path
    reader: Any
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.reader.get_slice(self.name).get_shape())

    @property
    def kind(self) -> str:
        """The safetensors name of the dtype of the values, such as `BF16`."""
        return str(self.reader.get_slice(self.name).get_dtype())

    def blocks(self, index: Index) -> Iterator[tuple[slice, np.ndarray]]:
        """Yields the slice `index` in blocks: the range of the block's rows, from the start of the slice, and the
        block."""
        part = self.reader.get_slice(self.name)
        rows = slice(*index[0].indices(self.shape[0])[:2])
        width = np.prod([len(range(*i.indices(n))) for i, n in zip(index[1:], self.shape[1:], strict=True)], initial=1)
        for within, of_file in row_blocks(rows, int(width)):
            yield within, part[(of_file, *index[1:])]


@dataclasses.dataclass(frozen=True)
class _PartOfWhole:
    """A part of a tensor of all experts, with the interface of `Stored`."""

    whole: Stored
    expert: int

    @property
    def file(self) -> Path:
        return self.whole.file

    @property
    def name(self) -> str:
        return self.whole.name

    @property
    def kind(self) -> str:
        return self.whole.kind


@dataclasses.dataclass(frozen=True)
class OfExpert(_PartOfWhole):
    """Those columns of one expert in a tensor of all experts that belong to a parameter."""

    columns: slice

    @property
    def shape(self) -> tuple[int, ...]:
        _, *inner, columns = self.whole.shape
        return *inner, columns // self.columns.step

    def blocks(self, index: Index) -> Iterator[tuple[slice, np.ndarray]]:
        part = self.whole.reader.get_slice(self.name)
        *rows, columns = (slice(*i.indices(n)[:2]) for i, n in zip(index, self.shape, strict=True))
        columns = slice(columns.start * self.columns.step, columns.stop * self.columns.step)

        def block(*rows: slice) -> np.ndarray:
            return part[(slice(self.expert, self.expert + 1), *rows, columns)][0][..., self.columns]

        if not rows:  # a bias
            yield slice(None), block()
            return
        for within, of_file in row_blocks(rows[0], columns.stop - columns.start):
            yield within, block(of_file)


@dataclasses.dataclass(frozen=True)
class RowsOfExpert(_PartOfWhole):
    """One of `parts` equal groups of rows of one expert `[outputs, inputs]` in a tensor of all experts."""

    part: int
    parts: int

    @property
    def shape(self) -> tuple[int, ...]:
        _, rows, *inner = self.whole.shape
        return rows // self.parts, *inner

    def blocks(self, index: Index) -> Iterator[tuple[slice, np.ndarray]]:
        part = self.whole.reader.get_slice(self.name)
        count = self.shape[0]
        rows, columns = (slice(*i.indices(n)[:2]) for i, n in zip(index, self.shape, strict=True))
        before = self.part * count
        for within, of_file in row_blocks(slice(before + rows.start, before + rows.stop), columns.stop - columns.start):
            yield within, part[(slice(self.expert, self.expert + 1), of_file, columns)][0]


class PackedExpert(NamedTuple):
    """The matrix `[outputs, inputs]` of one expert, as `OfExpert`, that is packed in MXFP4 (Open Compute Project,
    Microscaling Formats 1.0): 32 inputs of an output have one exponent in `scales` `[E, O, I / 32]`, and two of them
    one byte in `codes` `[E, O, I / 32, 16]`, the first in the low bits. The columns of gate and up, which alternate in
    `OfExpert`, are rows here."""

    codes: Stored
    scales: Stored
    expert: int
    columns: slice

    @property
    def file(self) -> Path:
        return self.codes.file

    @property
    def name(self) -> str:
        return self.codes.name

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outputs, blocks, size = [*self.codes.shape, 0, 0, 0, 0][:4]
        if self.scales.shape != (experts, outputs, blocks) or size * 2 != _MX_BLOCK or len(self.codes.shape) != 4:
            raise UserError(
                f"{self.file}: tensor {self.name} has shape {self.codes.shape}, and {self.scales.name}"
                f" {self.scales.shape}; MXFP4 needs [E, O, B, {_MX_BLOCK // 2}] and [E, O, B]. Download the file again."
            )
        return outputs // self.columns.step, blocks * _MX_BLOCK

    @property
    def kind(self) -> str:
        kinds = [tensor.kind for tensor in (self.codes, self.scales) if tensor.kind != "U8"]
        return kinds[0] + " instead of bytes of MXFP4" if kinds else FLOATS[1]

    def blocks(self, index: Index) -> Iterator[tuple[slice, np.ndarray]]:
        codes, scales = (tensor.reader.get_slice(tensor.name) for tensor in (self.codes, self.scales))
        rows, columns = (slice(*i.indices(n)[:2]) for i, n in zip(index, self.shape, strict=True))
        groups = slice(columns.start // _MX_BLOCK, -(-columns.stop // _MX_BLOCK))
        inner = slice(columns.start - groups.start * _MX_BLOCK, columns.stop - groups.start * _MX_BLOCK)
        one = slice(self.expert, self.expert + 1)
        for within, of_file in row_blocks(rows, (groups.stop - groups.start) * _MX_BLOCK):
            lines = slice(of_file.start * self.columns.step, of_file.stop * self.columns.step)
            pairs, exponents = (part[one, lines, groups][0, self.columns] for part in (codes, scales))
            values = _FP4[np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*exponents.shape, _MX_BLOCK)]
            with np.errstate(over="ignore", invalid="ignore"):  # the caller refuses infinite values and NaN
                values = values * np.ldexp(np.float32(1), exponents.astype(np.int32)[..., None] - 127)
            yield within, values.reshape(len(values), -1)[:, inner]


class GGUFTensor(NamedTuple):
    """A matrix or vector in an open GGUF file (`gguf_files.py`), which is dequantised.

    Attributes:
      data: the stored rows, packed if `packing` is a quantisation.
      order: for each row of the Hugging Face tensor, its row in the file; None: the same. Files of the architecture
        `llama` have the rows of queries and keys in the order of interleaved rotations.
      less: number that is subtracted from the values. Files of Gemma have norms with 1 added.
    """

    file: Path
    name: str
    data: np.ndarray
    packing: Any
    shape: tuple[int, ...]
    order: np.ndarray | None
    less: float

    @property
    def kind(self) -> str:
        return "F32"

    def blocks(self, index: Index) -> Iterator[tuple[slice, np.ndarray]]:
        from gguf.quants import dequantize  # an extra

        rows = slice(*index[0].indices(self.shape[0])[:2])
        for within, of_file in row_blocks(rows, math.prod(self.shape[1:])):
            stored = self.data[of_file if self.order is None else self.order[of_file]]
            values = dequantize(stored, self.packing).reshape(-1, *self.shape[1:])
            yield within, (values[(slice(None), *index[1:])] - np.float32(self.less))


Tensor = Stored | OfExpert | RowsOfExpert | PackedExpert | GGUFTensor


def row_blocks(rows: slice, width: int) -> Iterator[tuple[slice, slice]]:
    """Splits rows of `width` numbers into blocks; yields the rows of each from the first one on, and in the file."""
    size = max(1, READ_BYTES // max(8 * width, 1))
    for first in range(rows.start, rows.stop, size):
        last = min(first + size, rows.stop)
        yield slice(first - rows.start, last - rows.start), slice(first, last)
