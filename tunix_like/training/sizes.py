"""Sizes chosen from memory: completions per chunk of an update, completions sampled at once; and what a run will hold.

A number in the config is taken as it is. `auto` takes as much as pays and fits, by the predictions of `memory.py`. This
module knows the device's memory and the config; it allocates nothing.
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
"""Of a device's memory that `auto` may fill: predictions are good to a fifth."""

USUAL_GROUP = 8
"""Completions of a prompt, where the size of the groups is not known."""

MOST_ROWS = 1 << 16
"""More are never sampled at once."""

CHUNK_TOKENS = 512
"""Completion tokens of a chunk on a CPU under `auto`. An update of 4096 tokens of a model of 42 M took 5.1 s and 2.1 GB
with chunks of 256, 5.1 s and 2.3 GB with 512, 5.7 s and 2.8 GB with 1024, 6.0 s and 3.4 GB with 2048: larger
temporaries cost page faults."""

ACCELERATOR_CHUNK_TOKENS = 16384
"""The most on an accelerator. A matrix product of so many rows does some 8,000 operations for each byte of bfloat16
weights that it reads, where a few hundred fill the arithmetic units: more of them cannot make it faster."""

LOWER = {
    "sampling": "rollout.max_concurrent_rows, rollout.max_prompt_length or rollout.max_tokens_to_generate",
    "training": "training.train_micro_batch_size, training.logprob_chunk_size, rollout.max_prompt_length or "
    "rollout.max_tokens_to_generate",
}
"""The keys that the memory of a phase depends on."""


@dataclasses.dataclass(frozen=True)
class Device:
    """What sizes are chosen for: jax's name of the backend, and the bytes of one device. `known` is False where the
    device does not say, and `memory` is the host's in its place."""

    backend: str
    memory: int
    known: bool = True


SlotShape = Callable[[int, int, int, int, int], tuple[int, int]]
"""`rollout.sampler.slot_shape`: slots and completions a slot."""


@functools.cache
def device_memory() -> int:
    """Bytes of one device: what it says itself, else the host's memory or its cgroup's limit, shared by its devices. Of
    several processes the least, since all must choose the same sizes."""
    return min(gather(_own_memory()))


def _own_memory() -> int:
    if (said := _said_memory()) is not None:
        return said
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroups of version 2 and 1
        file = Path("/sys/fs/cgroup") / name
        if file.is_file() and (text := file.read_text().strip()).isdigit():
            limits.append(int(text))
    return min(limits) // jax.local_device_count()


def _said_memory() -> int | None:
    """Bytes of a device by its own word, if it gives one."""
    stats = jax.local_devices()[0].memory_stats()
    return int(stats["bytes_limit"]) if stats and "bytes_limit" in stats else None


def this_device() -> Device:
    backend = jax.default_backend()
    return Device(backend, device_memory(), known=backend == "cpu" or _said_memory() is not None)


def micro_batch_size(width: int, backend: str = "cpu") -> int:
    """Bins of this width that a chunk has under `train_micro_batch_size: auto`, as far as they fit."""
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
    """Completions of full width per forward and backward pass.

    Args:
      shape: prompts of one update, and completions of each.
      widths: of the padded prompts and completions, `(S, T)`.
      device: to choose for; this one when left out.

    Raises:
      UserError: not even one fits beside weights and optimizer.
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
    """What the memory of one update depends on; arguments as `chunk_size`."""
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
    width = work.widths[1] if work.group > 1 else sum(work.widths)  # a single completion brings its prompt along
    top = min(micro_batch_size(width, work.backend) * work.parts, work.prompts * work.group)

    def needed(size: int) -> int:
        return max(phase.bytes for phase in update_phases(work, size))

    if found := _most(top, needed, SHARE * available):
        return found
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
    """Most completions that are sampled at once.

    Under `auto` as many as fit beside a trainer's weights, moments and reference; where these alone do not fit, beside
    the weights, since then nothing is being trained.

    Raises:
      UserError: not even one fits beside the weights.
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
        if found := _most(MOST_ROWS, functools.partial(needed, held=held), limit):
            return found
    raise _too_large("rollout.max_concurrent_rows", needed(1, alone), limit, "sampling")


def _too_large(key: str, needed: int, limit: float, what: str) -> UserError:
    said = f"about {amount(needed)}, and {amount(limit)} may be filled ({SHARE:.0%} of the device's memory)"
    if what == "model":
        return UserError(
            f"model: weights, gradients and optimizer alone need {said}. Take a smaller model or more devices; "
            f"{key}=1 tries all the same."
        )
    return UserError(
        f"{key}: one completion at a time needs {said}. Lower {LOWER[what].removeprefix(f'{key}, ')}, or take a "
        f"smaller model or more devices. {key}=1 tries all the same."
    )


def _most(top: int, needed: Callable[[int], int], limit: float) -> int:
    """The largest number up to `top` whose need fits; 0 where none does. More never need less, but for steps in the
    layout of chunks, which is why a smaller one may be found than there is."""
    if needed(top) <= limit:
        return top
    low, high = 0, top
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= limit else (low, middle)
    return low


@dataclasses.dataclass(frozen=True)
class Foreseen:
    """What a run will hold at its worst moments, and the sizes chosen for it.

    Attributes:
      micro_batch: completions a chunk of an update.
      rows: completions sampled at once.
      chosen: whether these two were chosen here (`auto`).
      phases: the worst moments.
      available: bytes of the device, `known` or guessed (`Device`).
      refused: why a size could not be chosen, as one completion does not fit.
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
        """For the screen: sizes, the peak beside what there is, each phase by component, and what to do if it is too
        much."""
        update, rollout = ("auto" if auto else "as set" for auto in self.chosen)
        sizes = f"{self.micro_batch} completions a chunk ({update}), {self.rows} sampled at once ({rollout})"
        update_bytes = max(phase.bytes for phase in self.phases if phase.name == "update")
        shown = [phase for phase in self.phases if phase.name != "optimizer" or phase.bytes > update_bytes]
        phases = [(phase.name, str(phase)) for phase in shown]
        warnings = [("warning", problem) for problem in self.problems()]
        return [("sizes", sizes), ("memory", self.peak_line()), *phases, *warnings]

    def peak_line(self) -> str:
        """The peak, and beside it what the device has."""
        peak = f"{amount(self.peak.bytes)} at most ({self.peak.name})"
        if not self.known:
            return f"{peak}; the device does not say how much it has"
        return f"{peak}, {amount(self.available)} on the device"

    def problems(self) -> list[str]:
        """Why this is more than the device has, and what to do; empty where it fits, or where it is not known."""
        if not self.known:
            return []
        if self.refused:
            return list(self.refused)
        if self.peak.bytes <= self.available:
            return []
        lower = {"rollout": "sampling", "evaluation": "sampling"}.get(self.peak.name, "training")
        cure = "" if self.peak.fixed > self.available else f"lower {LOWER[lower]}, or "
        return [f"this is more than the device has: {cure}take a smaller model or more devices"]


def foresee(
    config: Config,
    model: Decoder,
    mesh: Mesh | None,
    slot_shape: SlotShape,
    *,
    device: Device | None = None,
    refuse: bool = True,
) -> Foreseen:
    """The sizes and phases of a resolved config, for prompts and completions of full length.

    Args:
      device: to foresee for; this one when left out.
      refuse: raise where not one completion fits; else go on with one, and say so in `Foreseen.refused`.

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
        found = update_phases(single, chosen(lambda: _chunk_size(setting, single, device.memory)))[0]
        phases.append(dataclasses.replace(found, name="sft"))
    auto = (not isinstance(setting, int), not isinstance(rollout.max_concurrent_rows, int))
    rows = min(limit, data.batch_size * group)
    return Foreseen(size, rows, auto, tuple(phases), device.memory, tuple(refused), device.known)
