"""Descriptions of devices that this machine need not have, for the compilers. Does not import jax at the top, because
`prepare` must run before."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from typing import Any

from tunix_like.errors import UserError, nearest
from tunix_like.runtime.accelerators import KINDS, NODE, Accelerator

MOST_DEVICES = 256
"""Maximum number of devices: the size of the largest v5e slice."""

MOST_SLICES = 16
"""Maximum number of TPU slices."""

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


def parse_devices(text: str) -> tuple[Accelerator | None, int, int]:
    """Parses `v5e-8`, `2xv5e-16`, `8xh100` or `8` to an accelerator kind, a number of devices and a number of equal
    slices of these devices (1 for GPUs). A number without a kind means CPU devices of this host; the returned kind is
    then None.

    Raises:
      UserError: the text has another form, the kind is unknown, or this number of devices is not available.
    """
    match = re.fullmatch(
        r"(?:(?:(?P<slices>\d+)x)?(?P<kind>[a-z]\w*)-(?P<last>\d+)|(?P<first>\d+)(?:x(?P<other>[a-z]\w*))?)",
        text.lower(),
    )
    if match is None:
        raise UserError(
            f"--devices: expected KIND-N, SxKIND-N, NxKIND or N (v5e-8, 2xv5e-16, 8xh100, 8), got '{text}'."
        )
    name = match["kind"] or match["other"]
    number = int(match["last"] or match["first"])
    name = {"v5litepod": "v5e"}.get(name, name)  # the name of Cloud TPU
    slices = int(match["slices"] or 1)
    if name is not None and name not in KINDS:
        raise UserError(f"--devices: unknown kind '{name}'. {nearest(name, KINDS)}")
    kind = None if name is None else KINDS[name]
    if kind is not None and kind.slices and number not in _numbers(kind):
        sizes = ", ".join(map(str, _numbers(kind)))
        raise UserError(f"--devices: there is no {name} slice of {number} chips; the sizes are {sizes}.")
    if not 1 <= number <= MOST_DEVICES or (kind is not None and number not in _numbers(kind)):
        gpus = "" if kind is None else f", above {NODE} in whole nodes of {NODE}"
        raise UserError(f"--devices: {number} devices; give a number from 1 to {MOST_DEVICES}{gpus}.")
    if not 1 <= slices <= MOST_SLICES or (slices > 1 and (kind is None or number not in kind.slices)):
        raise UserError(f"--devices: '{text}'; give 1 to {MOST_SLICES} TPU slices of at least 4 chips (2xv5e-16).")
    return kind, slices * number, slices


def _numbers(kind: Accelerator) -> Sequence[int]:
    """Returns the available numbers of devices of a kind."""
    return (1, *kind.slices) if kind.slices else (*range(1, NODE), *range(NODE, MOST_DEVICES + 1, NODE))


def at_least(kind: Accelerator, number: float) -> str | None:
    """Returns the smallest value of `--devices` that gives at least `number` devices of a kind; None if there is
    none."""
    size = next((size for size in _numbers(kind) if size >= number), None)
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


def described_devices(kind: Accelerator, number: int, slices: int = 1) -> Sequence[Any]:
    """Returns `number` jax devices of an accelerator kind, in equal slices, for compilation only: they cannot hold
    arrays.

    One TPU chip is returned as a part of the smallest slice, because jax has no topology of one chip.

    Raises:
      RuntimeError: the compiler of the kind is not installed, or cannot be used.
    """
    from jax.experimental import topologies

    if kind.slices:
        name = f"{kind.name}:{kind.slices[max(number // slices, min(kind.slices))]}"
        several = {} if slices == 1 else {"num_slices": slices}
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **several).devices[:number]
    rates = {"memory": kind.memory, "memory_bytes": kind.memory_bytes}
    target = _TARGET.format(name=kind.name.upper(), **rates, **kind.description)
    shape = f"1x{math.ceil(number / NODE)}x{min(number, NODE)}"
    return topologies.get_topology_desc(
        platform="cuda", topology_name=kind.name, topology=shape, target_config=target
    ).devices
