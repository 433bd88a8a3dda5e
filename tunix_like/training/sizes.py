"""Chooses the chunk size of updates, and estimates the memory of a run.

A chunk is the group of completions that one forward and backward pass processes. A number in the config is used
unchanged. `auto` chooses the largest useful size that fits into device memory, according to the estimates of
`memory.py`. No device memory is allocated.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from jax.sharding import Mesh

from tunix_like.config.schema import Config, OptimizerConfig, RLTrainingConfig
from tunix_like.errors import UserError
from tunix_like.training.device import LOWER, Device, most_that_fits, this_device, too_large, work_of
from tunix_like.training.memory import Work, update_phases
from tunix_like.training.phases import Phase, amount
from tunix_like.training.rollout_layout import SlotShape, concurrent_rows, rollout_mesh, rollout_of, with_layout

if TYPE_CHECKING:
    from tunix_like.models.decoder import Decoder

CHUNK_TOKENS = 512
"""Maximum number of completion tokens per forward and backward pass (chunk) on the CPU, if `auto` chooses the size. An
update of 4096 tokens of a model with 42 M parameters was measured with chunks of 256, 512, 1024 and 2048 tokens. The
update took 5.1, 5.1, 5.7 and 6.0 s, and needed 2.1, 2.3, 2.8 and 3.4 GB. Larger temporary arrays are slower because
they cause page faults."""

ACCELERATOR_CHUNK_TOKENS = 16384
"""Maximum number of completion tokens per forward and backward pass (chunk) on an accelerator, if `auto` chooses the
size. A matrix product with this number of rows does about 16,000 operations per byte of bfloat16 weights that it reads.
A few hundred operations per byte are enough to use the arithmetic units fully, so larger chunks are not faster."""


def micro_batch_size(width: int, backend: str = "cpu") -> int:
    """Returns the maximum number of completions of `width` tokens per forward and backward pass, if
    `train_micro_batch_size` is `auto`. If the completions are divided over devices, each part has this maximum."""
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
      shape: number of prompts of one update, and number of completions per prompt.
      widths: lengths in tokens of the padded prompts and of the padded completions.
      reference: whether a second model, the reference of the KL, is held in memory.
      device: the device for which the size is chosen; defaults to the current device.

    Raises:
      UserError: with `auto`, the memory is too small for weights, optimizer and a single completion.
    """
    device = device or this_device()
    work = update_work(training, model, shape, widths, reference, mesh, device)
    return _chunk_size(training.train_micro_batch_size, work, device)


def update_work(
    training: RLTrainingConfig,
    model: Decoder,
    shape: tuple[int, int],
    widths: tuple[int, int],
    reference: bool = False,
    mesh: Mesh | None = None,
    device: Device | None = None,
) -> Work:
    """Returns the quantities on which the memory of one update depends.

    Args:
      shape: number of prompts of the update, and number of completions per prompt.
      widths: lengths in tokens of the padded prompts and of the padded completions.
      reference: whether a second model, the reference of the KL, is held in memory.
    """
    chosen = training.actor_optimizer or OptimizerConfig()
    return dataclasses.replace(
        work_of(model, *shape, widths, mesh, device),
        clipped=isinstance(chosen, OptimizerConfig) and chosen.max_grad_norm is not None,
        reference=reference,
        remat=training.remat,
        logits_chunk=training.logprob_chunk_size,
    )


@functools.lru_cache(64)
def _chunk_size(setting: int | str, work: Work, device: Device) -> int:
    if isinstance(setting, int):
        return setting
    width = work.widths[1] if work.group > 1 else sum(work.widths)  # in groups of 1, the prompt is included
    top = min(micro_batch_size(width, work.backend) * work.parts, work.prompts * work.group)

    def needed(size: int) -> int:
        return max(phase.bytes for phase in update_phases(work, size))

    if size := most_that_fits(top, needed, device.usable):
        return size
    alone = max(phase.fixed for phase in update_phases(work, 1))
    what, bytes_ = ("model", alone) if alone > device.usable else ("training", needed(1))
    raise too_large("training.train_micro_batch_size", bytes_, device, what)


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """The estimated peak memory of a run, and the sizes that were chosen for the run.

    Attributes:
      micro_batch: completions per forward and backward pass of an update.
      rows: maximum number of completions that are sampled at the same time.
      chosen: two flags: whether `auto` has chosen `micro_batch`, and whether `auto` has chosen `rows`.
      phases: the peak memory of each phase of the run.
      available: memory of the device in bytes.
      refused: error messages on sizes that could not be chosen, because not even one completion fits into memory.
      known: whether the memory of the device is known (`Device.known`).
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
        """Returns labels and texts for the screen: the batch sizes, the peak memory and the available memory, the
        memory of each phase of the run by component, and warnings."""
        update, rollout = ("auto" if auto else "as set" for auto in self.chosen)
        sizes = f"{self.micro_batch} completions per chunk ({update}), {self.rows} sampled at once ({rollout})"
        update_bytes = max(phase.bytes for phase in self.phases if phase.name == "update")
        shown = [phase for phase in self.phases if phase.name != "optimizer" or phase.bytes > update_bytes]
        phases = [(phase.name, str(phase)) for phase in shown]
        warnings = [("warning", problem) for problem in self.problems()]
        return [("sizes", sizes), ("memory", self.peak_line()), *phases, *warnings]

    def peak_line(self) -> str:
        """Returns a text with the estimated peak and the memory of the device."""
        peak = f"{amount(self.peak.bytes)} at most ({self.peak.name})"
        if not self.known:
            return f"{peak}; the device does not report its memory"
        return f"{peak}, {amount(self.available)} on the device"

    def problems(self) -> list[str]:
        """Returns messages about batch sizes and phases of the run that do not fit into device memory, with the remedy.

        The list is empty if the whole run fits, or if the memory of the device is not known.
        """
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
    """Chooses the batch sizes that are `auto` in a config, and estimates the memory of each phase of the run. The
    estimate assumes that all sequences have full length.

    Args:
      device: the device for which the memory is estimated; defaults to the current device.
      refuse: whether to raise UserError if a single completion does not fit into memory. If False, the size is set to 1
        and the error message is added to `MemoryEstimate.refused`.

    Raises:
      UserError: a single completion does not fit into memory and `refuse` is True, or `rollout.mesh` is not valid.
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
    size = chosen(lambda: _chunk_size(setting, update, device))
    update = dataclasses.replace(update, prompts=data.batch_size, update_prompts=most)
    sampling_mesh = rollout_mesh(model, rollout, mesh, slot_shape, device)
    limit, phases = data.batch_size * group, []
    sampled = [("rollout", data.batch_size, group), ("evaluation", config.eval.batch_size, config.eval.samples)]
    if rollout.engine == "local":
        limit = chosen(lambda: concurrent_rows(model, rollout, slot_shape, mesh, sampling_mesh, device))
    for name, prompts, samples in sampled if rollout.engine == "local" else ():
        rows = min(limit, prompts * samples)
        shape = slot_shape(prompts, samples, rows, *widths)
        work = dataclasses.replace(update, filtered=rollout.top_p < 1 or rollout.top_k is not None)
        work = with_layout(work, model, sampling_mesh)
        phases.append(dataclasses.replace(rollout_of(work, rows, shape, samples), name=name))
    phases += update_phases(update, size)
    if config.sft.max_steps:
        single = update_work(training, model, (config.sft.batch_size, 1), widths, False, mesh, device)
        sft = update_phases(single, chosen(lambda: _chunk_size(setting, single, device)))[0]
        phases.append(dataclasses.replace(sft, name="sft"))
    auto = (not isinstance(setting, int), not isinstance(rollout.max_concurrent_rows, int))
    rows = min(limit, data.batch_size * group)
    return MemoryEstimate(size, rows, auto, tuple(phases), device.memory, tuple(refused), device.known)
