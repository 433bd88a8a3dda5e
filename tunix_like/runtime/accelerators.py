"""Describes accelerators, which this machine need not have: specifications, slices, and jax devices to compile for."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from typing import Any

from tunix_like.errors import UserError, nearest


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """The specifications of one device of an accelerator kind.

    Attributes:
      backend: name of the jax backend.
      memory: bytes of main memory.
      operations: peak bfloat16 multiplications and additions per second, without sparsity.
      memory_bytes: bandwidth of the main memory in bytes per second.
      network_bytes: bytes per second that a device receives from other devices if all its links are in use.
      between_nodes: bytes per second that a device receives from other nodes; None if all devices are in one network.
      clock: cycles per second, to convert the cycles that the TPU compiler reports to seconds; None for a GPU.
      slices: maps the number of chips of each available TPU slice to the shape of the slice; empty for a GPU.
      description: for a GPU, further values for its description for XLA (`_TARGET`); empty for a TPU.
    """

    name: str
    backend: str
    memory: int
    operations: float
    memory_bytes: float
    network_bytes: float
    between_nodes: float | None = None
    clock: float | None = None
    slices: dict[int, str] = dataclasses.field(default_factory=dict, hash=False)
    description: dict[str, str] = dataclasses.field(default_factory=dict, hash=False)

    def network(self, number: int) -> float:
        """Returns how many bytes per second each device can receive from the other devices of a group of `number`."""
        if self.between_nodes is not None and number > NODE:
            return self.between_nodes
        return self.network_bytes


NODE = 8
"""Number of GPUs per node."""

MOST_DEVICES = 256
"""Maximum number of devices: the size of the largest v5e slice."""

_FLAT = {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBES = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8"}

# `cores` is the number of processors, and `units` is the number of arithmetic units of each. `shared` and `optin` are
# the shared memory per processor and per block (opt-in) in bytes. `cache` is the level-2 cache in bytes. `clock` is in
# GHz. The values are from the vendor's white papers of the A100 and the H100 and its table of compute capabilities.
_AMPERE = {
    "capability": "major: 8 minor: 0", "cores": "108", "units": "64", "shared": "167936", "optin": "166912",
    "cache": "41943040", "clock": "1.41",
}  # fmt: skip
_HOPPER = {
    "capability": "major: 9 minor: 0", "cores": "132", "units": "128", "shared": "233472", "optin": "232448",
    "cache": "52428800", "clock": "1.98",
}  # fmt: skip

KINDS = {
    kind.name: kind
    for kind in (
        # The memory of the v5e is the limit of XLA:TPU (`CompileTimeHbmOom: used .. of 15.75G`). The pages of Cloud TPU
        # give the memory of v5p and v6e. For all three kinds, they give the peak arithmetic in bfloat16, the memory
        # bandwidth and the interconnect (v5e 1,600, v5p 4,800, v6e 3,584 Gbit/s per chip). The clock is the peak
        # divided by the operations per cycle of the matrix units, which are 4 of 128 x 128 (v5e), 2 x 4 of 128 x 128
        # (v5p) and 4 of 256 x 256 (v6e).
        Accelerator("v5e", "tpu", int(15.75 * 2**30), 197e12, 819e9, 200e9, clock=1.5e9, slices=_FLAT),
        Accelerator("v5p", "tpu", 95 * 10**9, 459e12, 2765e9, 600e9, clock=1.75e9, slices=_CUBES),
        Accelerator("v6e", "tpu", 32 * 10**9, 918e12, 1640e9, 448e9, clock=1.75e9, slices=_FLAT),
        # The dense bfloat16 peak, the memory, its bandwidth and the NVLink bandwidth are from the data sheets of the
        # SXM modules. The NVLink bandwidth is halved, because the data sheets count both directions. Between nodes,
        # each GPU has one adapter of 200 (A100) or 400 Gbit/s, as in the vendor's DGX systems.
        Accelerator("a100", "gpu", 80 * 10**9, 312e12, 2039e9, 300e9, 25e9, description=_AMPERE),
        Accelerator("h100", "gpu", 80 * 10**9, 989e12, 3350e9, 450e9, 50e9, description=_HOPPER),
        Accelerator("h200", "gpu", 141 * 10**9, 989e12, 4800e9, 450e9, 50e9, description=_HOPPER),
    )
}

PLUGINS = {"tpu": ("libtpu",), "gpu": ("jax-cuda12-plugin", "jax-cuda13-plugin")}
"""The packages that contain the compiler of each jax backend; one installed package is enough."""

EXTRAS = {"tpu": "'tunix-like[tpu]'", "gpu": "'tunix-like[cuda12]'"}

_TARGET = """
gpu_device_info {{
  cuda_compute_capability {{ {capability} }}
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {shared} shared_memory_per_block_optin: {optin}
  core_count: {cores} fpus_per_core: {units} clock_rate_ghz: {clock} l2_cache_size: {cache}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {memory_bytes:.0f} device_memory_size: {memory}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "NVIDIA {name}"
"""
"""Template of the description of a GPU for XLA, a `GpuTargetConfigProto` in text format."""


def parse_devices(text: str) -> tuple[Accelerator | None, int]:
    """Parses `v5e-8`, `8xh100` or `8` to an accelerator kind and a number of devices. A number without a kind means
    CPU devices of this host; the returned kind is then None.

    Raises:
      UserError: the text has another form, the kind is unknown, or this number of devices is not available.
    """
    match = re.fullmatch(r"(?:(?P<kind>[a-z]\w*)-(?P<last>\d+)|(?P<first>\d+)(?:x(?P<other>[a-z]\w*))?)", text.lower())
    if match is None:
        raise UserError(f"--devices: expected KIND-N, NxKIND or N (v5e-8, 8xh100, 8), got '{text}'.")
    name, number = match["kind"] or match["other"], int(match["last"] or match["first"])
    if name is not None and name not in KINDS:
        raise UserError(f"--devices: unknown kind '{name}'. {nearest(name, KINDS)}")
    kind = None if name is None else KINDS[name]
    if kind is not None and kind.slices and number not in (1, *kind.slices):
        raise UserError(f"--devices: there is no {name} slice of {number} chips; the sizes are {sizes_of(kind)}.")
    if not 1 <= number <= MOST_DEVICES:
        raise UserError(f"--devices: {number} devices; give a number from 1 to {MOST_DEVICES}.")
    if kind is not None and not kind.slices and number not in _nodes():
        raise UserError(f"--devices: {number} GPUs; give 1 to {NODE}, or whole nodes of {NODE}.")
    return kind, number


def sizes_of(kind: Accelerator) -> str:
    """Returns the available numbers of chips of a TPU kind as text, for an error message."""
    return ", ".join(map(str, (1, *kind.slices)))


def _nodes() -> tuple[int, ...]:
    return (*range(1, NODE), *range(NODE, MOST_DEVICES + 1, NODE))


def at_least(kind: Accelerator, number: float) -> str | None:
    """Returns the smallest value of `--devices` that gives at least `number` devices of a kind; None if there is
    none."""
    sizes = (1, *kind.slices) if kind.slices else _nodes()
    size = next((size for size in sizes if size >= number), None)
    return None if size is None else f"{kind.name}-{size}" if kind.slices else f"{size}x{kind.name}"


def prepare() -> None:
    """Sets the environment variables for compiling for accelerators that this machine does not have. Must be called
    before jax is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # otherwise jax searches for devices for seconds and prints many warnings
    for name, value in {
        "TPU_SKIP_MDS_QUERY": "1",  # do not query the metadata server of a TPU host
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",  # any value; libtpu prints a warning without a value
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # ignore the lock file of libtpu, because no device is used
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "TPU_STDERR_LOG_LEVEL": "3",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }.items():
        os.environ.setdefault(name, value)


def compiler_of(kind: Accelerator) -> str | None:
    """Returns the name and version of the installed compiler for an accelerator kind; None if there is none."""
    for package in PLUGINS[kind.backend]:
        if importlib.util.find_spec(package.replace("-", "_")) is not None:
            return f"XLA:{kind.backend.upper()} ({package} {importlib.metadata.version(package)})"
    return None


def cudnn_installed() -> bool:
    """Returns whether the package of cuDNN is installed. Without this package, jax cannot compile cuDNN kernels."""
    return importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.cudnn") is not None


def described_devices(kind: Accelerator, number: int) -> Sequence[Any]:
    """Returns `number` jax devices of an accelerator kind for compilation only: they cannot hold arrays.

    One TPU chip is returned as a part of the smallest slice, because jax has no topology of one chip.

    Raises:
      RuntimeError: the compiler of the kind is not installed, or cannot be used.
    """
    from jax.experimental import topologies  # not at the top, because `prepare` must run first

    if kind.slices:
        name = f"{kind.name}:{kind.slices[max(number, min(kind.slices))]}"
        return topologies.get_topology_desc(platform="tpu", topology_name=name).devices[:number]
    target = _TARGET.format(
        name=kind.name.upper(), memory=kind.memory, memory_bytes=kind.memory_bytes, **kind.description
    )
    shape = f"1x{math.ceil(number / NODE)}x{min(number, NODE)}"
    found = topologies.get_topology_desc(platform="cuda", topology_name=kind.name, topology=shape, target_config=target)
    return found.devices
