"""Describes the device for which batch sizes are chosen, and the quantities on which the memory of a run depends."""

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
"""Fraction of a device's memory that a run may use if `auto` chooses its batch sizes: the value of the backend in
`SHARE`, or `ACCELERATOR_SHARE` for a backend that is not in `SHARE`.

The estimated memory of an update is accurate to about 20 % on a CPU. For most programs that are compiled for
accelerators, the estimate is accurate to 8 %. On a CPU, other programs use the memory too."""

LOWER = {
    "sampling": "rollout.max_concurrent_rows, rollout.max_prompt_length or rollout.max_tokens_to_generate",
    "training": "training.train_micro_batch_size, training.logprob_chunk_size, rollout.max_prompt_length or "
    "rollout.max_tokens_to_generate",
}
"""The config keys to lower if sampling or training does not fit into memory."""


@dataclasses.dataclass(frozen=True)
class Device:
    """The device for which batch sizes are chosen.

    Attributes:
      backend: name of the JAX backend.
      memory: memory of one device in bytes.
      known: False if an accelerator does not report its memory. `memory` is then computed from the memory of the host.
    """

    backend: str
    memory: int
    known: bool = True

    @property
    def usable(self) -> float:
        """Maximum estimated peak memory, in bytes, of a run whose batch sizes are chosen by `auto`."""
        return usable_share(self.backend) * self.memory


@functools.cache
def device_memory() -> int:
    """Returns the memory of one device in bytes.

    If the device does not report its memory, the result is the smaller of the host's memory and the cgroup limit,
    divided by the number of local devices. With several processes, the result is the minimum over all processes,
    because all processes must choose the same sizes.
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
    """Returns the memory in bytes that the device reports, or None if it reports no memory."""
    stats = jax.local_devices()[0].memory_stats()
    return int(stats["bytes_limit"]) if stats and "bytes_limit" in stats else None


def usable_share(backend: str) -> float:
    """Returns the fraction of a device's memory that a run may use if `auto` in the config chooses its batch sizes."""
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
    """Searches for the largest number up to `top` for which `needed` is at most `limit`. Returns 0 if there is none.

    The search is a bisection. If `needed` is not monotonic, the result can be smaller than the largest such number. One
    example is the memory of completions that are processed at once: their layout changes in discrete steps, so that
    more completions can need less memory.
    """
    if needed(top) <= limit:
        return top
    low, high = 0, top
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= limit else (low, middle)
    return low
