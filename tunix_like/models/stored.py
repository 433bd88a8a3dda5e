"""Reads tensors from safetensors files slice by slice. Each device receives only the slices of its own shards. Pickled
weights are never opened."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import safetensors

from tunix_like.errors import UserError
from tunix_like.runtime.json_files import read_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
BLOCK = 4 * 1024**2
"""Maximum number of bytes of a file that are read to the host at once. The array to which these bytes are copied takes
memory in addition."""

_DECODER = "language_model."  # in the tensor names of the text decoder of a multimodal model, before or after `model.`
_OTHER_PARTS = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")

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
        """The safetensors name of the tensor's dtype, such as `BF16`."""
        return str(self.reader.get_slice(self.name).get_dtype())

    def blocks(self, index: Index) -> Iterator[tuple[slice, np.ndarray]]:
        """Yields the slice `index` of the tensor in blocks of a few rows. Each item is a pair: the range of the rows of
        the block, counted from the start of the slice, and the block."""
        part = self.reader.get_slice(self.name)
        start, stop, _ = index[0].indices(self.shape[0])
        width = np.prod([len(range(*i.indices(n))) for i, n in zip(index[1:], self.shape[1:], strict=True)], initial=1)
        rows = max(1, BLOCK // max(8 * int(width), 1))
        for first in range(start, stop, rows):
            last = min(first + rows, stop)
            yield slice(first - start, last - start), part[(slice(first, last), *index[1:])]


def place(tensors: Sequence[Stored], leaf: Any, *, transposed: bool, stacked: bool) -> jax.Array:
    """Reads one parameter from its tensor, or from several tensors if `stacked`.

    Every device receives its own shard, and at most one shard is on the host at a time.

    Args:
      leaf: shape, dtype and sharding of the parameter; without a sharding, the default device is used.
      transposed: whether the last two axes are swapped in the file.
      stacked: whether the first axis of the parameter runs over the tensors.
    """
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    holders: dict[Any, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        full = tuple(slice(*part.indices(size)) for part, size in zip(index or (), leaf.shape, strict=True))
        holders.setdefault(tuple((part.start, part.stop) for part in full), []).append(device)

    def to_devices(index: Index, devices: list[Any]) -> list[jax.Array]:
        host = _read(tensors, index, leaf.dtype, transposed, stacked)
        return jax.block_until_ready([jax.device_put(host, device) for device in devices])

    parts: list[jax.Array] = []
    for bounds, devices in holders.items():
        parts += to_devices(tuple(slice(*ends) for ends in bounds), devices)
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)


def _read(tensors: Sequence[Stored], index: Index, dtype: Any, transposed: bool, stacked: bool) -> np.ndarray:
    out = np.empty([part.stop - part.start for part in index], dtype)
    pairs: Iterable[tuple[Stored, np.ndarray]] = [(tensors[0], out)]
    if stacked:
        pairs = zip(tensors[index[0]], list(out), strict=True)
    within = index[1:] if stacked else index
    for tensor, array in pairs:
        file_index, target = (within[::-1], array.T) if transposed else (within, array)
        for rows, block in tensor.blocks(file_index):
            target[rows] = block
    return out


def tensors_equal(first: Stored, second: Stored) -> bool:
    """Returns whether two tensors have the same shape and values."""
    if first.shape != second.shape:
        return False
    everything = tuple(slice(None) for _ in first.shape)
    pairs = zip(first.blocks(everything), second.blocks(everything), strict=True)
    return all(np.array_equal(one, other) for (_, one), (_, other) in pairs)


def open_tensors(folder: Path, stack: contextlib.ExitStack) -> dict[str, Stored]:
    """Opens the weight files of a folder and returns the tensors of the decoder, keyed by the names that a text-only
    model uses.

    Raises:
      UserError: there are no safetensors, or files are missing or not readable.
    """
    tensors: dict[str, Stored] = {}
    for file in _files(folder):
        try:
            reader = stack.enter_context(safetensors.safe_open(file, framework="numpy"))
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(
                f"{file}: cannot be read as safetensors ({error}). It may be truncated or a Git LFS pointer;"
                " download it again."
            ) from None
        tensors |= {name: Stored(file, reader, name) for name in reader.keys()}  # noqa: SIM118 (not a mapping)
    return of_decoder(tensors)


def of_decoder(tensors: dict[str, Any]) -> dict[str, Any]:
    """Selects the tensors of the text decoder and renames them to the names that a text-only model uses."""
    if not any(_DECODER in name for name in tensors):
        return tensors
    decoder = {name: tensor for name, tensor in tensors.items() if not _OTHER_PARTS.match(name)}
    return {name.replace(_DECODER, "", 1): tensor for name, tensor in decoder.items()}


def _files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
        if pickles:
            raise UserError(
                f"{folder}: has only pickled weights ({', '.join(pickles[:3])}), which can run code when opened and"
                f" are never read here. Save the model as safetensors (with transformers: `AutoModelForCausalLM"
                f'.from_pretrained("{folder}").save_pretrained("OUT")`), or download its safetensors files.'
            )
        raise UserError(
            f"{folder}: has no {SINGLE} and no {INDEX}. Put the model's safetensors there, or set init to 'random'."
        )
    names = sorted(set(index_of(folder).values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise UserError(f"{index}: names a file outside its folder: {outside[0]!r}. Download it again.")
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise UserError(f"{folder}: {INDEX} names files that do not exist: {', '.join(absent)}. Download them.")
    return [folder / name for name in names]


def index_of(folder: Path) -> dict[str, str]:
    """Reads the weight index of a folder: tensor name -> file name."""
    index = folder / INDEX
    files = read_object(index, "Download it again.").get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
        raise UserError(f"{index}: not a valid weight index, since its weight_map names no files. Download it again.")
    return files
