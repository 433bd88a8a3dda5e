"""Chooses the chunk size of updates and the number of concurrent completions, and estimates the memory of a run.

A number in the config is used as it is. `auto` chooses the largest useful size that fits into device memory, by the
estimates of `memory.py`. Nothing is allocated.
"""

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

from tunix_like.config.schema import Config, OptimizerConfig, RLTrainingConfig, RolloutConfig
from tunix_like.errors import UserError
from tunix_like.models.sharding import prompt_parts
from tunix_like.models.shares import Share, parameter_shapes, share_of
from tunix_like.runtime.processes import gather
from tunix_like.training.memory import Phase, Work, amount, rollout_phase, update_phases

if TYPE_CHECKING:
    from tunix_like.models.config import DecoderConfig
    from tunix_like.models.decoder import Decoder
    from tunix_like.models.layer_kinds import Adapters

SHARE = 0.8
"""Fraction of a device's memory that `auto` may use; estimates are accurate to about 20 %."""

USUAL_GROUP = 8
"""Assumed number of completions per prompt if the group size is not known."""

MOST_ROWS = 1 << 16
"""Maximum number of concurrent completions."""

CHUNK_TOKENS = 512
"""Completion tokens of a chunk on CPU with `auto`. An update of 4096 tokens of a 42 M model took 5.1 s and 2.1 GB with
chunks of 256, 5.1 s and 2.3 GB with 512, 5.7 s and 2.8 GB with 1024, 6.0 s and 3.4 GB with 2048, because larger
temporaries cause page faults."""

ACCELERATOR_CHUNK_TOKENS = 16384
"""Maximum completion tokens of a chunk on an accelerator. A matrix product with this number of rows does about 8,000
operations per byte of bfloat16 weights that it reads. A few hundred saturate the arithmetic units, so larger chunks are
not faster."""

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
      known: False if the device does not report its memory; `memory` is then that of the host.
    """

    backend: str
    memory: int
    known: bool = True


SlotShape = Callable[[int, int, int, int, int], tuple[int, int]]
"""`rollout.sampler.slot_shape`: returns the number of slots and of completions per slot."""


@functools.cache
def device_memory() -> int:
    """Returns the bytes of one device.

    If the device does not report its memory, this is the host's memory or its cgroup limit, divided by the number of
    local devices. With several processes it is the minimum over them, because all must choose the same sizes.
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


def this_device() -> Device:
    """Returns the backend and the memory of the current device."""
    backend = jax.default_backend()
    return Device(backend, device_memory(), known=backend == "cpu" or _reported_memory() is not None)


def micro_batch_size(width: int, backend: str = "cpu") -> int:
    """Returns the maximum number of bins of this width per chunk with `train_micro_batch_size: auto`."""
    return max(1, (CHUNK_TOKENS if backend == "cpu" else ACCELERATOR_CHUNK_TOKENS) // width)


def chunk_size(
    training: RLTrainingConfig,
    model: Decoder,
    shape: tuple[int, int],
    widths: tuple[int, int],
    reference: bool = False,
    mesh: Mesh | None = None,
    device: Device | None = None,
) -> int:
    """Returns the number of completions of full width per forward and backward pass.

    Args:
      shape: prompts of one update, and completions per prompt.
      widths: widths of the padded prompts and completions, `(S, T)`.
      reference: whether a second model is held for the KL.
      device: the device to choose for; defaults to the current one.

    Raises:
      UserError: with `auto`, a single completion does not fit beside weights and optimizer.
    """
    device = device or this_device()
    work = update_work(training, model, shape, widths, reference, mesh, device)
    return _chunk_size(training.train_micro_batch_size, work, device.memory)


def update_work(
    training: RLTrainingConfig,
    model: Decoder,
    shape: tuple[int, int],
    widths: tuple[int, int],
    reference: bool = False,
    mesh: Mesh | None = None,
    device: Device | None = None,
) -> Work:
    """Returns the quantities that the memory of one update depends on; arguments as `chunk_size`."""
    chosen = training.actor_optimizer or OptimizerConfig()
    return dataclasses.replace(
        _work(model, *shape, widths, mesh, device),
        clipped=isinstance(chosen, OptimizerConfig) and chosen.max_grad_norm is not None,
        reference=reference,
        remat=training.remat,
        logits_chunk=training.logprob_chunk_size,
    )


def _work(
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


@functools.lru_cache(64)
def _chunk_size(setting: int | str, work: Work, available: int) -> int:
    if isinstance(setting, int):
        return setting
    width = work.widths[1] if work.group > 1 else sum(work.widths)  # a single completion includes its prompt
    top = min(micro_batch_size(width, work.backend) * work.parts, work.prompts * work.group)

    def needed(size: int) -> int:
        return max(phase.bytes for phase in update_phases(work, size))

    if size := _most(top, needed, SHARE * available):
        return size
    alone, limit = max(phase.fixed for phase in update_phases(work, 1)), SHARE * available
    what, bytes_ = ("model", alone) if alone > limit else ("training", needed(1))
    raise _too_large("training.train_micro_batch_size", bytes_, limit, what)


def concurrent_rows(
    model: Decoder,
    rollout: RolloutConfig,
    slot_shape: SlotShape,
    mesh: Mesh | None = None,
    device: Device | None = None,
) -> int:
    """Returns the maximum number of completions that are sampled at the same time.

    With `auto` this is the number that fits beside a trainer's weights, moments and reference. If these do not fit, it
    is the number that fits beside the weights, because then the model cannot be in training.

    Raises:
      UserError: with `auto`, a single completion does not fit beside the weights.
    """
    setting = rollout.max_concurrent_rows
    if isinstance(setting, int):
        return setting
    device, widths = device or this_device(), (rollout.max_prompt_length, rollout.max_tokens_to_generate)
    filtered = rollout.top_p < 1 or rollout.top_k is not None
    work = dataclasses.replace(_work(model, 1, 1, widths, mesh, device), reference=True, filtered=filtered)

    def needed(rows: int, held: dict[str, int] | None) -> int:
        slots, _ = slot_shape(MOST_ROWS, USUAL_GROUP, rows, *widths)
        return rollout_phase(work, rows, slots, held).bytes

    alone, limit = {"weights": work.weights}, SHARE * device.memory
    for held in (None, alone):
        if rows := _most(MOST_ROWS, functools.partial(needed, held=held), limit):
            return rows
    raise _too_large("rollout.max_concurrent_rows", needed(1, alone), limit, "sampling")


def _too_large(key: str, needed: int, limit: float, what: str) -> UserError:
    need = f"about {amount(needed)}, but the limit is {amount(limit)} ({SHARE:.0%} of the device's memory)"
    if what == "model":
        return UserError(
            f"model: weights, gradients and optimizer alone need {need}. Use a smaller model or more devices, or set "
            f"{key}=1 to try it anyway."
        )
    return UserError(
        f"{key}: one completion at a time needs {need}. Lower {LOWER[what].removeprefix(f'{key}, ')}, or use a "
        f"smaller model or more devices, or set {key}=1 to try it anyway."
    )


def _most(top: int, needed: Callable[[int], int], limit: float) -> int:
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


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """The estimated peak memory of a run, and the sizes chosen for it.

    Attributes:
      micro_batch: completions per chunk of an update.
      rows: maximum number of concurrent completions.
      chosen: whether each of these two was chosen by `auto`.
      phases: the peak of each phase.
      available: bytes of the device.
      refused: errors of sizes for which a single completion does not fit.
      known: whether the device reports its memory (`Device`).
    """

    micro_batch: int
    rows: int
    chosen: tuple[bool, bool]
    phases: tuple[Phase, ...]
    available: int
    refused: tuple[str, ...] = ()
    known: bool = True

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.bytes)

    def lines(self) -> list[tuple[str, str]]:
        """Returns labels and texts for the screen: sizes, peak and available memory, phases by component, warnings."""
        update, rollout = ("auto" if auto else "as set" for auto in self.chosen)
        sizes = f"{self.micro_batch} completions per chunk ({update}), {self.rows} sampled at once ({rollout})"
        update_bytes = max(phase.bytes for phase in self.phases if phase.name == "update")
        shown = [phase for phase in self.phases if phase.name != "optimizer" or phase.bytes > update_bytes]
        phases = [(phase.name, str(phase)) for phase in shown]
        warnings = [("warning", problem) for problem in self.problems()]
        return [("sizes", sizes), ("memory", self.peak_line()), *phases, *warnings]

    def peak_line(self) -> str:
        """Returns a text with the peak and the memory of the device."""
        peak = f"{amount(self.peak.bytes)} at most ({self.peak.name})"
        if not self.known:
            return f"{peak}; the device does not report its memory"
        return f"{peak}, {amount(self.available)} on the device"

    def problems(self) -> list[str]:
        """Returns what does not fit and the remedy; empty if the run fits or the device memory is not known."""
        if not self.known:
            return []
        if self.refused:
            return list(self.refused)
        if self.peak.bytes <= self.available:
            return []
        lower = {"rollout": "sampling", "evaluation": "sampling"}.get(self.peak.name, "training")
        cure = "" if self.peak.fixed > self.available else f"lower {LOWER[lower]}, or "
        return [f"this exceeds the memory of the device: {cure}use a smaller model or more devices"]


def estimate_memory(
    config: Config,
    model: Decoder,
    mesh: Mesh | None,
    slot_shape: SlotShape,
    *,
    device: Device | None = None,
    refuse: bool = True,
) -> MemoryEstimate:
    """Estimates the sizes and the memory of each phase for a resolved config, with sequences of full length.

    Args:
      device: the device to estimate for; defaults to the current one.
      refuse: whether to raise if a single completion does not fit; if False, the size is 1 and the error is added to
        `MemoryEstimate.refused`.

    Raises:
      UserError: as `chunk_size` and `concurrent_rows`.
    """
    device, refused = device or this_device(), list[str]()

    def chosen(size: Callable[[], int]) -> int:
        try:
            return size()
        except UserError as error:
            if refuse:
                raise
            refused.append(str(error))
            return 1

    rollout, data, group = config.rollout, config.data, config.algorithm.num_generations
    widths = rollout.max_prompt_length, rollout.max_tokens_to_generate
    training = dataclasses.replace(config.training, actor_optimizer=config.optimizer)
    setting = training.train_micro_batch_size
    most = min(training.mini_batch_size or data.batch_size, data.batch_size)
    update = update_work(training, model, (most, group), widths, config.algorithm.beta > 0, mesh, device)
    size = chosen(lambda: _chunk_size(setting, update, device.memory))
    update = dataclasses.replace(update, prompts=data.batch_size, update_prompts=most)
    limit = chosen(lambda: concurrent_rows(model, rollout, slot_shape, mesh, device))
    phases = []
    for name, prompts, samples in (
        ("rollout", data.batch_size, group),
        ("evaluation", config.eval.batch_size, config.eval.samples),
    ):
        rows = min(limit, prompts * samples)
        slots, _ = slot_shape(prompts, samples, rows, *widths)
        work = dataclasses.replace(update, filtered=rollout.top_p < 1 or rollout.top_k is not None)
        phases.append(dataclasses.replace(rollout_phase(work, rows, slots), name=name))
    phases += update_phases(update, size)
    if config.sft.max_steps:
        single = update_work(training, model, (config.sft.batch_size, 1), widths, False, mesh, device)
        sft = update_phases(single, chosen(lambda: _chunk_size(setting, single, device.memory)))[0]
        phases.append(dataclasses.replace(sft, name="sft"))
    auto = (not isinstance(setting, int), not isinstance(rollout.max_concurrent_rows, int))
    rows = min(limit, data.batch_size * group)
    return MemoryEstimate(size, rows, auto, tuple(phases), device.memory, tuple(refused), device.known)
