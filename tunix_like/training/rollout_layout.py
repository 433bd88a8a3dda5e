"""Chooses how weights and completions are laid out over the devices for sampling.

This layout is different from the layout for training. Training shards weights over `fsdp` and gathers them layer by
layer. In the decode loop, this gathering would move every weight over the network for every token. Therefore the
weights are converted once before each rollout, to the layout for sampling and to the compute dtype.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from tunix_like.config.schema import RolloutConfig
from tunix_like.errors import UserError
from tunix_like.models.decoder import Decoder
from tunix_like.models.sharding import AXES, check_model, layout_mesh, prompt_parts
from tunix_like.models.shares import parameter_shapes, share_of
from tunix_like.training.device import Device, most_that_fits, this_device, too_large, work_of
from tunix_like.training.memory import Work, rollout_phase
from tunix_like.training.phases import Phase

SlotShape = Callable[[int, int, int, int, int], tuple[int, int]]
"""Type of `rollout.shapes.slot_shape`, which returns the number of slots and the number of completions per slot. All
completions of a slot have the same prompt."""

USUAL_GROUP = 8
"""Assumed number of completions per prompt if the group size is not known."""

MOST_ROWS = 1 << 16
"""Maximum number of concurrent completions with `rollout.max_concurrent_rows: auto`."""

ROWS_PER_DEVICE = 16
"""Number of completions per device that must fit into memory if `rollout.mesh` and `rollout.max_concurrent_rows` are
`auto`."""


def rollout_mesh(
    model: Decoder, rollout: RolloutConfig, mesh: Mesh | None, slot_shape: SlotShape, device: Device | None = None
) -> Mesh | None:
    """Returns the mesh of the sampler, with axes `data`, `fsdp` and `tp`.

    Returns None if `mesh` and `rollout.devices` are None.

    The sampler has the devices of `mesh`, or the devices that `rollout.devices` reserves for sampling.

    With `rollout.mesh: auto`, the weights are replicated if they fit into memory together with the trainer's arrays and
    the cache of keys and values. Sampling then needs no communication. Otherwise the weights are split along `tp` over
    the smallest number of devices for which they fit. If they fit for no size of `tp`, the weights are also split along
    `fsdp`.

    Raises:
      UserError: `rollout.mesh` does not use every device, or heads or weights of the model are not divisible by the
        axis sizes of `rollout.mesh`.
    """
    if rollout.devices is not None:
        own = np.array(jax.devices()[-rollout.devices :]).reshape(rollout.devices, 1, 1)
        mesh = Mesh(own, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    if mesh is None:
        return None
    if isinstance(rollout.mesh, list):
        return _checked(mesh, rollout.mesh, model)
    device = device or this_device()
    limit = device.usable
    possible = [_possible(mesh, (mesh.size // tp, 1, tp), model) for tp in _divisors(mesh)]
    layouts = [layout for layout in possible if layout is not None]
    for layout in layouts:
        if _needed(model, rollout, mesh, layout, slot_shape, device) <= limit:
            return layout
    tp = layouts[-1].shape["tp"]
    return _possible(mesh, (1, mesh.size // tp, tp), model) or mesh


def _checked(mesh: Mesh, shape: list[int], model: Decoder) -> Mesh:
    if math.prod(shape) != mesh.size:
        raise UserError(
            f"rollout.mesh: got {shape}; give the numbers of devices along data, fsdp and tp, whose product must be "
            f"{mesh.size}, e.g. [{mesh.size}, 1, 1], or set auto."
        )
    try:
        return _dividing(mesh, shape, model)
    except UserError as error:
        raise UserError(str(error).replace("mesh.shape", "rollout.mesh", 1)) from None


def _possible(mesh: Mesh, shape: tuple[int, int, int], model: Decoder) -> Mesh | None:
    """Returns a mesh with axis sizes `shape`, or None if heads or weights of the model are not divisible by them."""
    try:
        return _dividing(mesh, shape, model)
    except UserError:
        return None


def _dividing(mesh: Mesh, shape: Sequence[int], model: Decoder) -> Mesh:
    """Returns a mesh with axis sizes `shape`. Raises UserError if heads or weights of the model are not divisible by
    these sizes."""
    chosen = layout_mesh(mesh, shape)
    check_model(chosen, model.config, _shapes(model))
    return chosen


def _divisors(mesh: Mesh) -> list[int]:
    """Returns the possible sizes of the mesh axis `tp` in ascending order: the divisors of the number of devices per
    process."""
    per_process = mesh.size // jax.process_count()
    return [tp for tp in range(1, per_process + 1) if per_process % tp == 0]


def _shapes(model: Decoder) -> Any:
    return parameter_shapes(model.config, model.param_dtype, model.adapters, model.quantized)


def _needed(
    model: Decoder, rollout: RolloutConfig, mesh: Mesh, chosen: Mesh, slot_shape: SlotShape, device: Device
) -> int:
    """Returns the estimated bytes that each device needs while sampling on the mesh `chosen`."""
    rows = rollout.max_concurrent_rows
    rows = rows if isinstance(rows, int) else ROWS_PER_DEVICE * mesh.size
    work = with_layout(_rollout_work(model, rollout, mesh, device), model, chosen)
    return rollout_of(work, rows, slot_shape(rows, USUAL_GROUP, rows, *work.widths), USUAL_GROUP).bytes


def rollout_of(work: Work, rows: int, shape: tuple[int, int], group: int, held: dict[str, int] | None = None) -> Phase:
    """Estimates the peak memory of sampling with `rows` concurrent completions.

    Args:
      shape: number of slots, and of completions per slot. A slot holds completions of one prompt that are sampled at
        the same time.
      group: completions per prompt.
      held: number of bytes, by component, of the arrays that are always in memory; defaults to those of a trainer.
    """
    return rollout_phase(work, rows, shape[0], held, prefilled_prompts(shape, group))


def prefilled_prompts(shape: tuple[int, int], group: int) -> int:
    """Returns the number of different prompts that are sampled at the same time.

    Args:
      shape: number of slots, and of completions per slot. A slot holds completions of one prompt that are sampled at
        the same time.
      group: completions per prompt. If they do not fit into one slot, the prompt has several slots.
    """
    slots, width = shape
    return -(-slots // -(-group // width))


def _rollout_work(model: Decoder, rollout: RolloutConfig, mesh: Mesh | None, device: Device) -> Work:
    widths = rollout.max_prompt_length, rollout.max_tokens_to_generate
    filtered = rollout.top_p < 1 or rollout.top_k is not None
    return dataclasses.replace(work_of(model, 1, 1, widths, mesh, device), reference=True, filtered=filtered)


def with_layout(work: Work, model: Decoder, chosen: Mesh | None) -> Work:
    """Returns `work` with the sharding of weights and completions on `chosen`, the mesh of the sampler.

    On a single device, the weights are not copied to another layout, and `work` is returned unchanged.
    """
    if chosen is None or chosen.size == 1:
        return work
    parts = prompt_parts(chosen), chosen.shape.get("tp", 1)
    return dataclasses.replace(work, rollout_share=share_of(_shapes(model), chosen), rollout_parts=parts)


def concurrent_rows(
    model: Decoder,
    rollout: RolloutConfig,
    slot_shape: SlotShape,
    mesh: Mesh | None = None,
    sampling_mesh: Mesh | None = None,
    device: Device | None = None,
) -> int:
    """Returns the maximum number of completions that are sampled at the same time.

    With `rollout.max_concurrent_rows: auto`, the result is the largest number for which sampling fits into memory
    together with a trainer's weights, moments and reference model. If not even one completion fits together with these
    arrays, there can be no trainer on this device, so the number is computed with the weights only.

    Args:
      mesh, sampling_mesh: the meshes of the trainer and of the sampler.

    Raises:
      UserError: with `auto`, the memory is too small for the weights and a single completion.
    """
    setting = rollout.max_concurrent_rows
    if isinstance(setting, int):
        return setting
    device = device or this_device()
    work = with_layout(_rollout_work(model, rollout, mesh, device), model, sampling_mesh)

    def needed(rows: int, held: dict[str, int] | None) -> int:
        return rollout_of(work, rows, slot_shape(MOST_ROWS, USUAL_GROUP, rows, *work.widths), USUAL_GROUP, held).bytes

    alone, limit = {"weights": work.weights}, device.usable
    for held in (None, alone):
        if rows := most_that_fits(MOST_ROWS, functools.partial(needed, held=held), limit):
            return rows
    raise too_large("rollout.max_concurrent_rows", needed(1, alone), device, "sampling")
