"""Data-sheet values of accelerators: the one table of memory and peak rates per device. Finds those of this machine."""

from __future__ import annotations

import dataclasses
import glob
import importlib.util
import os
import shutil
from pathlib import Path

NODE = 8
"""Number of GPUs per node."""


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """The values of one device of a kind.

    Attributes:
      jax_name: beginning of jax's name of the device (`device_kind`).
      backend: name of the jax backend.
      memory: bytes of main memory.
      operations: peak bfloat16 multiplications and additions per second, without sparsity.
      memory_bytes: bandwidth of the main memory in bytes per second.
      network_bytes: bytes per second that a device receives from other devices if all its links are in use.
      between_nodes: bytes per second that a device receives from other nodes; None if all devices are in one network.
      clock: cycles per second, to convert the cycles that the TPU compiler reports to seconds; None for a GPU.
      slices: maps the number of chips of each available TPU slice to the shape of the slice; empty for a GPU.
      description: for a GPU, further values for its description for XLA (`compile/devices.py`); empty for a TPU.
    """

    name: str
    jax_name: str
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
        return self.between_nodes if self.between_nodes is not None and number > NODE else self.network_bytes


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
        Accelerator("v5e", "TPU v5 lite", "tpu", int(15.75 * 2**30), 197e12, 819e9, 200e9, clock=1.5e9, slices=_FLAT),
        Accelerator("v5p", "TPU v5", "tpu", 95 * 10**9, 459e12, 2765e9, 600e9, clock=1.75e9, slices=_CUBES),
        Accelerator("v6e", "TPU v6 lite", "tpu", 32 * 10**9, 918e12, 1640e9, 448e9, clock=1.75e9, slices=_FLAT),
        # The dense bfloat16 peak, the memory, its bandwidth and the NVLink bandwidth are from the data sheets of the
        # SXM modules. The NVLink bandwidth is halved, because the data sheets count both directions. Between nodes,
        # each GPU has one adapter of 200 (A100) or 400 Gbit/s, as in the vendor's DGX systems.
        Accelerator("a100", "NVIDIA A100", "gpu", 80 * 10**9, 312e12, 2039e9, 300e9, 25e9, description=_AMPERE),
        Accelerator("h100", "NVIDIA H100", "gpu", 80 * 10**9, 989e12, 3350e9, 450e9, 50e9, description=_HOPPER),
        Accelerator("h200", "NVIDIA H200", "gpu", 141 * 10**9, 989e12, 4800e9, 450e9, 50e9, description=_HOPPER),
    )
}

PEAK_FLOPS = {kind.jax_name: kind.operations for kind in KINDS.values()} | {
    "TPU v4": 275e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L4": 121e12,
}
"""Maps the beginning of jax's name of a device to its dense bfloat16 FLOPs per second, also for devices whose other
values are not needed here."""


def find_kind(device_kind: str) -> Accelerator | None:
    """Returns the accelerator with jax's name `device_kind`; None if it is not in `KINDS`, such as a PCIe card."""
    name = None if "PCIe" in device_kind else known_name(device_kind)
    return next((kind for kind in KINDS.values() if kind.jax_name == name), None)


def known_name(device_kind: str) -> str | None:
    """Returns the longest key of `PEAK_FLOPS` with which jax's name of a device begins; None if there is none."""
    return max((name for name in PEAK_FLOPS if device_kind.startswith(name)), key=len, default=None)


def attached() -> str | None:
    """Returns the jax backend of the accelerators of this machine, by its device files; None without any."""
    if glob.glob("/dev/nvidia[0-9]*") or shutil.which("nvidia-smi") or os.path.exists("/dev/kfd"):
        return "gpu"
    devices = [(_read(vendor), _read(vendor.with_name("device"))) for vendor in _vendors()]
    on_pci = any(vendor == _GOOGLE and device != _NETWORK_CARD for vendor, device in devices)
    named = any(name.startswith("TPU_") and name not in _SET_BY_JAX for name in os.environ)  # of a host of a slice
    return "tpu" if on_pci or named or glob.glob("/dev/accel*") else None


def avoid_absent_tpu() -> None:
    """Makes jax use the CPU if the package libtpu is installed on a machine without accelerators, where libtpu prints
    errors. Must be called before jax is imported."""
    if "JAX_PLATFORMS" not in os.environ and importlib.util.find_spec("libtpu") and attached() is None:
        os.environ["JAX_PLATFORMS"] = "cpu"


_SET_BY_JAX = ("TPU_SKIP_MDS_QUERY", "TPU_ML_PLATFORM", "TPU_ML_PLATFORM_VERSION")
"""Environment variables that jax sets also on machines without a TPU."""

_GOOGLE = "0x1ae0"
_NETWORK_CARD = "0x0042"
"""PCI numbers of the vendor of TPUs, and of the network card of its virtual machines."""


def _vendors() -> list[Path]:
    return [Path(file) for file in glob.glob("/sys/bus/pci/devices/*/vendor")]


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
