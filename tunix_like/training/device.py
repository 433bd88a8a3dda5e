"""Describes the device that sizes are chosen for, and the quantities that its memory depends on."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tunix_like.errors import UserError
from tunix_like.models.sharding import prompt_parts
from tunix_like.models.shares import Share, parameter_shapes, share_of
from tunix_like.runtime.processes import gather
from tunix_like.training.memory import Work
from tunix_like.training.phases import amount

if TYPE_CHECKING:
    from tunix_like.models.config import DecoderConfig
    from tunix_like.models.decoder import Decoder
    from tunix_like.models.layer_kinds import Adapters

SHARE = {"cpu": 0.8}
ACCELERATOR_SHARE = 0.9
"""Fraction of a device's memory that `auto` may use, by backend; for all other backends it is `ACCELERATOR_SHARE`.

The estimate of an update is accurate to about 20 % on a CPU, and to 8 % on most programs that were compiled for
accelerators. The memory of a CPU is also used by other programs."""

LOWER = {
    "sampling": "rollout.max_concurrent_rows, rollout.max_prompt_length or rollout.max_tokens_to_generate",
    "training": "training.train_micro_batch_size, training.logprob_chunk_size, rollout.max_prompt_length or "
    "rollout.max_tokens_to_generate",
}
"""The keys to lower if a phase does not fit into memory."""


@dataclasses.dataclass(frozen=True)
class Device:
    """The device that sizes are chosen for.

    Attributes:
      backend: name of the jax backend.
      memory: bytes of one device.
      known: False if the device does not report its memory; `memory` is then the memory of the host.
    """

    backend: str
    memory: int
    known: bool = True

    @property
    def usable(self) -> float:
        """Bytes that `auto` may use."""
        return usable_share(self.backend) * self.memory


@functools.cache
def device_memory() -> int:
    """Returns the bytes of one device.

    If the device does not report its memory, this is the host's memory or its cgroup limit, divided by the number of
    local devices. With several processes, the minimum over all processes is returned, because all must choose the same
    sizes.
    """
    return min(gather(_own_memory()))


def _own_memory() -> int:
    if (reported := _reported_memory()) is not None:
        return reported
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroups of version 2 and 1
        file = Path("/sys/fs/cgroup") / name
        if file.is_file() and (text := file.read_text().strip()).isdigit():
            limits.append(int(text))
    return min(limits) // jax.local_device_count()


def _reported_memory() -> int | None:
    """Returns the bytes of a device as it reports them, or None."""
    stats = jax.local_devices()[0].memory_stats()
    return int(stats["bytes_limit"]) if stats and "bytes_limit" in stats else None


def usable_share(backend: str) -> float:
    """Returns the fraction of a device's memory that `auto` may use."""
    return SHARE.get(backend, ACCELERATOR_SHARE)


def this_device() -> Device:
    """Returns the backend and the memory of the current device."""
    backend = jax.default_backend()
    return Device(backend, device_memory(), known=backend == "cpu" or _reported_memory() is not None)


def work_of(
    model: Decoder, prompts: int, group: int, widths: tuple[int, int], mesh: Mesh | None, device: Device | None
) -> Work:
    return Work(
        model.config,
        _share(model.config, model.param_dtype, model.adapters, model.quantized, mesh),
        prompts,
        group,
        widths,
        dtype=jnp.dtype(model.dtype),
        param_dtype=model.param_dtype,
        adapters=model.adapters,
        quantized=model.quantized,
        attention=model.attention,
        backend=jax.default_backend() if device is None else device.backend,
        parts=prompt_parts(mesh),
    )


@functools.lru_cache(64)
def _share(
    model: DecoderConfig, param_dtype: Any, adapters: Adapters | None, quantized: str | None, mesh: Mesh | None
) -> Share:
    return share_of(parameter_shapes(model, param_dtype, adapters, quantized), mesh)


def too_large(key: str, needed: int, device: Device, what: str) -> UserError:
    share = f"{usable_share(device.backend):.0%} of the device's memory"
    need = f"about {amount(needed)}, but the limit is {amount(device.usable)} ({share})"
    if what == "model":
        return UserError(
            f"model: weights, gradients and optimizer alone need {need}. Use a smaller model or more devices, or set "
            f"{key}=1 to try it anyway."
        )
    return UserError(
        f"{key}: one completion at a time needs {need}. Lower {LOWER[what].removeprefix(f'{key}, ')}, or use a "
        f"smaller model or more devices, or set {key}=1 to try it anyway."
    )


def most_that_fits(top: int, needed: Callable[[int], int], limit: float) -> int:
    """Returns the largest number up to `top` for which `needed` is within the limit; 0 if there is none.

    This is a bisection. `needed` is not strictly monotonic, because the layout of chunks has steps, so the result may
    be smaller than the maximum.
    """
    if needed(top) <= limit:
        return top
    low, high = 0, top
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= limit else (low, middle)
    return low
