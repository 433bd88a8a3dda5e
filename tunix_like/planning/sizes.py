"""Chooses what the memory of the devices decides: the chunk size of updates, the number of completions that are sampled
at once, and the layout of weights and completions for sampling.

A chunk is the group of completions that one forward and backward pass processes; `Planner.pack` packs a batch into
chunks. A number in the config is used unchanged; `auto` chooses the largest useful size that fits by the estimates of
`memory.py`.

The layout for sampling is different from the layout for training. Training shards weights over `fsdp` and gathers them
layer by layer. In the decode loop, this gathering would move every weight over the network for every token. Therefore
the weights are converted once before each rollout, to the layout for sampling and to the compute dtype.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh
from jaxtyping import Bool

from tunix_like.algorithms.ppo import PPO
from tunix_like.config.schema import SELF, Config, OptimizerConfig, RLTrainingConfig, RolloutConfig, TeacherConfig
from tunix_like.config.sources import teachers_of
from tunix_like.errors import UserError
from tunix_like.models.counts import Share, parameter_shapes, share_of
from tunix_like.models.lora import part_params
from tunix_like.models.opening import load_config
from tunix_like.models.quantization import NF4_BYTES
from tunix_like.models.quantized_base import dequantized_model
from tunix_like.models.sharding import (
    check_experts,
    check_model,
    check_slices,
    count_slices,
    layout_mesh,
    param_shapes,
    prompt_parts,
    sequence_parts,
)
from tunix_like.planning.bounds import decode_bytes, held_bytes
from tunix_like.planning.memory import (
    ALONE,
    Companions,
    CriticWork,
    Phase,
    TeacherWork,
    Work,
    amount,
    rollout_phase,
    update_phases,
)
from tunix_like.rollout.engines.registry import find_engine
from tunix_like.rollout.shapes import slot_shape
from tunix_like.runtime.accelerators import Accelerator, find_kind
from tunix_like.runtime.processes import gather
from tunix_like.step.optimizer import build_optimizer, critic_optimizer, state_shapes
from tunix_like.step.packing import Packed, choose_layout, pack, with_experts
from tunix_like.types import GroupBatch

if TYPE_CHECKING:
    from tunix_like.models.config import Adapters, DecoderConfig
    from tunix_like.models.decoder import Decoder

CHUNK_TOKENS = 512
"""Maximum number of completion tokens per chunk on the CPU, if `auto` chooses the size. An update of 4096 tokens of a
model with 42 M parameters was measured with chunks of 256, 512, 1024 and 2048 tokens. The update took 5.1, 5.1, 5.7 and
6.0 s, and needed 2.1, 2.3, 2.8 and 3.4 GB. Larger temporary arrays are slower because they cause page faults."""

ACCELERATOR_CHUNK_TOKENS = 16384
"""Maximum number of completion tokens per chunk on an accelerator, if `auto` chooses the size. A matrix product with
this number of rows does about 16,000 operations per byte of bfloat16 weights that it reads. A few hundred operations
per byte are enough to use the arithmetic units fully, so larger chunks are not faster."""

USUAL_GROUP = 8
"""Assumed number of completions per prompt if the group size is not known."""

ROWS_PER_DEVICE = 16
"""Number of completions per device that must fit into memory if `rollout.mesh` and `rollout.max_concurrent_rows` are
`auto`."""

COLLECTIVE_SECONDS = 1e-5
"""Assumed time of an all-reduce of few bytes."""

NF4_READS = 3
"""Time in which a decode step dequantises NF4, in times of reading the same weights in 16 bits. XLA:TPU needs 3.2 for
few rows (`quantization.FEW_ROWS`). XLA:GPU writes and reads the dequantised matrices."""

MOST_ROWS_PER_DEVICE = 1024
"""Largest number of completions per device for which a dequantised copy of the base is compared with its codes."""

USUAL_ROWS_PER_DEVICE = 64
"""Number of completions per device for which `rollout.mesh: auto` compares layouts."""

LOWER = {
    "sampling": "rollout.max_concurrent_rows, rollout.max_prompt_length or rollout.max_tokens_to_generate",
    "training": "training.train_micro_batch_size, training.logprob_chunk_size, rollout.max_prompt_length or "
    "rollout.max_tokens_to_generate",
}
"""The config keys to lower if sampling or training does not fit into memory."""


@dataclasses.dataclass(frozen=True)
class Device:
    """The device for which sizes are chosen.

    Attributes:
      backend: name of the JAX backend.
      memory: memory of one device in bytes.
      kind: the peak rates of the device; None if they are not known.
      known: False if an accelerator does not report its memory. `memory` is then computed from the memory of the host.
    """

    backend: str
    memory: int
    kind: Accelerator | None = None
    known: bool = True

    @property
    def share(self) -> float:
        """Fraction of the memory that a run may use if `auto` chooses its sizes. On a CPU the estimates are accurate to
        about 20 %, and other programs use the memory too; for accelerators most are accurate to 8 %."""
        return 0.8 if self.backend == "cpu" else 0.9

    @property
    def usable(self) -> float:
        """Maximum estimated bytes of a run whose sizes are chosen by `auto`."""
        return self.share * self.memory


@functools.cache
def device_memory() -> int:
    """Returns the memory of one device in bytes.

    If the device does not report its memory, the result is the smaller of the host's memory and the cgroup limit,
    divided by the number of local devices. With several processes, the result is the minimum over all processes,
    because all processes must choose the same sizes.
    """
    reported = _reported_memory()
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroups of version 2 and 1
        file = Path("/sys/fs/cgroup") / name
        if file.is_file() and (text := file.read_text().strip()).isdigit():
            limits.append(int(text))
    return min(gather(min(limits) // jax.local_device_count() if reported is None else reported))


def _reported_memory() -> int | None:
    stats = jax.local_devices()[0].memory_stats()
    return int(stats["bytes_limit"]) if stats and "bytes_limit" in stats else None


def this_device() -> Device:
    """Returns the backend, the memory and the kind of the current device."""
    backend = jax.default_backend()
    kind = find_kind(jax.devices()[0].device_kind)
    return Device(backend, device_memory(), kind, known=backend == "cpu" or _reported_memory() is not None)


@functools.lru_cache(64)
def _share(
    model: DecoderConfig, param_dtype: Any, adapters: Adapters | None, quantized: str | None, mesh: Mesh | None
) -> Share:
    return share_of(parameter_shapes(model, param_dtype, adapters, quantized), mesh)


@functools.lru_cache(64)
def _moments(
    model: DecoderConfig,
    param_dtype: Any,
    adapters: Adapters | None,
    quantized: str | None,
    mesh: Mesh | None,
    optimizer: OptimizerConfig | optax.GradientTransformation,
) -> int:
    """Returns the bytes of the optimizer state of a model on one device."""
    params = param_shapes(parameter_shapes(model, param_dtype, adapters, quantized), mesh)
    # The state has the same shapes for any number of updates.
    built = build_optimizer(optimizer, 1) if isinstance(optimizer, OptimizerConfig) else optimizer
    return int(held_bytes(state_shapes(built, part_params(params)[0])))


@dataclasses.dataclass(frozen=True, eq=False)
class Planner:
    """Chooses the sizes of a run by what fits into the memory of its devices.

    Attributes:
      model: the policy, whose weights are not read.
      mesh: the mesh of the trainer.
      companions: the models that are held in memory beside the policy.
      device: None: the current one.
    """

    model: Decoder
    mesh: Mesh | None = None
    training: RLTrainingConfig = RLTrainingConfig()
    rollout: RolloutConfig = RolloutConfig()
    companions: Companions = ALONE
    device: Device | None = None

    def update_work(self, shape: tuple[int, int], widths: tuple[int, int], whole_groups: bool = False) -> Work:
        """Returns the quantities on which the memory of one update depends.

        Args:
          shape: number of prompts of the update, and number of completions per prompt.
          widths: lengths in tokens of the padded prompts and of the padded completions.
          whole_groups: whether all completions of a prompt are in one chunk.
        """
        chosen = self._optimizer
        return dataclasses.replace(
            self._work(*shape, widths),
            clipped=isinstance(chosen, OptimizerConfig) and chosen.max_grad_norm is not None,
            muon=isinstance(chosen, OptimizerConfig) and chosen.name == "muon",
            remat=self.training.remat,
            logits_chunk=self.training.logprob_chunk_size,
            whole_groups=whole_groups,
        )

    def chunk_size(self, work: Work) -> int:
        """Returns the number of completions of full width per chunk of an update (`training.train_micro_batch_size`).
        Raises UserError if `auto` finds no memory for a single one."""
        return chunk_size(self.training.train_micro_batch_size, work, self.device)

    def pack(
        self, batch: GroupBatch, rows: Bool[np.ndarray, "P G"], most_prompts: int, whole_groups: bool = False
    ) -> Packed:
        """Packs completions of a rollout batch into chunks. The model processes one chunk per forward and backward pass
        (see `chunk_size`).

        Args:
          rows: mask of the completions to pack.
          most_prompts: maximum number of prompts of an update.
          whole_groups: whether all completions of a prompt are in one chunk.
        """
        size = rows.shape[1]
        chunk = self.chunk_size(self.update_work((most_prompts, size), batch.widths, whole_groups))
        layout = choose_layout(size, most_prompts, batch.widths, chunk, prompt_parts(self.mesh), whole_groups)
        packed = pack(batch.completion_lengths, rows, batch.widths[1], layout, most_prompts)
        if batch.experts is None or self.model.config.experts is None:
            return packed
        return with_experts(packed, batch, self.model.config.experts.number)

    def layout(self) -> SamplingLayout | None:
        """Returns the layout of the sampler; None if `mesh` and `rollout.devices` are None. The sampler has the devices
        of `mesh`, or those that `rollout.devices` reserves for sampling.

        With `rollout.mesh: auto`, the weights are split along `tp` over as many devices of a host as gives the shortest
        predicted decode step, among the layouts that fit into memory together with the trainer's arrays and the cache
        of keys and values. A larger `tp` reads fewer weights per device, but sends more. If the rates of the device are
        not known, the smallest `tp` that fits is used. If the weights fit for no size of `tp`, they are also split
        along `fsdp`.

        Raises:
          UserError: `rollout.mesh` does not use every device, heads or weights of the model are not divisible by its
            axis sizes, or its `data` is not a multiple of the TPU slices.
        """
        model = self.model
        rollout = self.rollout
        mesh = self.mesh
        if rollout.devices is not None:
            mesh = Mesh(np.array(jax.devices()[-rollout.devices :]), ("data",), axis_types=(AxisType.Auto,))
        if mesh is None:
            return None
        if isinstance(rollout.mesh, list):
            chosen_mesh = _layout_as_set(rollout.mesh, mesh, model)
            return SamplingLayout(chosen_mesh, "as set", self._copy_pays(chosen_mesh))
        size = mesh.size
        device = self.device or this_device()
        processes = [d.process_index for d in mesh.devices.flat]  # also of absent devices
        slices = count_slices(mesh.devices.flat)
        per_process = math.gcd(processes.count(processes[0]), size // slices)
        splits = [tp for tp in range(1, per_process + 1) if per_process % tp == 0]
        possible = [
            layout for tp in splits if (layout := _possible(mesh, {"data": size // tp, "tp": tp}, model)) is not None
        ]
        on_devices = dataclasses.replace(self, mesh=mesh)
        copies = [on_devices._copy_pays(layout) for layout in possible]
        works = [on_devices._sampling_work(*pair) for pair in zip(possible, copies, strict=True)]
        rows = rollout.max_concurrent_rows
        least, usual = (
            rows if isinstance(rows, int) else each * size for each in (ROWS_PER_DEVICE, USUAL_ROWS_PER_DEVICE)
        )
        fitting = [
            i for i, work in enumerate(works) if _sampling(work, least, USUAL_GROUP, least).bytes <= device.usable
        ]
        if not fitting:
            tp = possible[-1].shape["tp"]
            split = _possible(mesh, {"data": slices, "fsdp": size // slices // tp, "tp": tp}, model)
            return SamplingLayout(split or mesh, "the weights fit for no tp alone")
        if (kind := device.kind) is None:
            return SamplingLayout(possible[fitting[0]], "the smallest tp that fits", copies[fitting[0]])
        widths = rollout.max_prompt_length, rollout.max_tokens_to_generate
        forms = {False: model, True: dequantized_model(model) if any(copies) else model}
        seconds = {i: decode_seconds(forms[copies[i]], possible[i], usual, widths, kind) for i in fitting}
        each = ", ".join(f"{1e3 * seconds[i]:.3g} ms with tp {possible[i].shape['tp']}" for i in fitting)
        reason = f"predicted for a token of {usual} completions at peak rates: {each}"
        chosen = min(seconds, key=lambda i: seconds[i])
        return SamplingLayout(possible[chosen], reason, copies[chosen])

    def rows(self, prompts: int, group: int, sampling_mesh: Mesh | None = None, dequantizes: bool = False) -> int:
        """Returns the maximum number of completions that are sampled at the same time, of `group` completions of each
        of `prompts` prompts.

        With `rollout.max_concurrent_rows: auto`, the result is the largest number for which sampling fits into memory
        together with a trainer's weights and moments, and the companions. If not even one completion fits together with
        these arrays, there can be no trainer on this device, so the number is computed with the weights only.

        Args:
          sampling_mesh: the mesh of the sampler (`layout`).
          dequantizes: whether sampling reads a dequantised copy of the base.

        Raises:
          UserError: with `auto`, the memory is too small for the weights and a single completion.
        """
        setting = self.rollout.max_concurrent_rows
        if isinstance(setting, int):
            return setting
        device = self.device or this_device()
        work = self._sampling_work(sampling_mesh, dequantizes)

        def needed(rows: int, held: dict[str, int] | None) -> int:
            return _sampling(work, prompts, group, rows, held).bytes

        alone = {"weights": work.weights}
        for held in (None, alone):
            if rows := _most_that_fits(prompts * group, functools.partial(needed, held=held), device.usable):
                return math.prod(_slot_shape(work, prompts, group, rows))
        raise _too_large("rollout.max_concurrent_rows", needed(1, alone), device, "sampling")

    def dequantizes(self, layout: SamplingLayout | None) -> bool:
        """Returns whether sampling in a layout (`self.layout()`) reads a dequantised copy of the base, which is made
        before each rollout."""
        return self._copy_pays(None) if layout is None else layout.dequantizes

    def _copy_pays(self, sampling_mesh: Mesh | None) -> bool:
        """Returns whether sampling on a mesh is faster from a dequantised copy of a base in NF4.

        Otherwise each step of the decode loop dequantises all projections, which takes about `NF4_READS` times as long
        as reading them in 16 bits. But the copy leaves memory for fewer completions, so a batch may need more rounds:
        at least half as many completions must fit beside it, or the set number. Codes of int8 are read faster than a
        copy on TPUs, so they are kept.
        """
        if self.model.quantized != "nf4":
            return False
        device = self.device or this_device()
        rows = self.rollout.max_concurrent_rows
        as_codes, as_copy = (self._sampling_work(sampling_mesh, each) for each in (False, True))
        if isinstance(rows, int):
            return _bytes_of_rows(as_copy, rows) <= device.usable
        top = MOST_ROWS_PER_DEVICE * (1 if sampling_mesh is None else sampling_mesh.size)
        with_codes, with_copy = (
            _most_that_fits(top, functools.partial(_bytes_of_rows, work), device.usable) for work in (as_codes, as_copy)
        )
        return with_copy > 0 and 2 * with_copy >= with_codes

    def _sampling_work(self, sampling_mesh: Mesh | None, dequantizes: bool) -> Work:
        """Returns the quantities on which the memory of sampling depends."""
        widths = self.rollout.max_prompt_length, self.rollout.max_tokens_to_generate
        return _for_sampling(self._work(1, 1, widths), self.model, self.rollout, sampling_mesh, dequantizes)

    @property
    def _optimizer(self) -> OptimizerConfig | optax.GradientTransformation:
        return self.training.actor_optimizer or OptimizerConfig()

    def _work(self, prompts: int, group: int, widths: tuple[int, int]) -> Work:
        model = self.model
        mesh = self.mesh
        return Work(
            model.config,
            _share(model.config, model.param_dtype, model.adapters, model.quantized, mesh),
            _moments(model.config, model.param_dtype, model.adapters, model.quantized, mesh, self._optimizer),
            prompts,
            group,
            widths,
            dtype=jnp.dtype(model.dtype),
            param_dtype=model.param_dtype,
            adapters=model.adapters,
            quantized=model.quantized,
            attention=model.attention,
            backend=jax.default_backend() if self.device is None else self.device.backend,
            devices=1 if mesh is None else mesh.size,
            parts=prompt_parts(mesh),
            sequence=sequence_parts(mesh),
            expert_parts=1 if mesh is None else mesh.shape.get("ep", 1),
            **self.companions._asdict(),
        )


def teacher_work(
    settings: TeacherConfig,
    rollout: RolloutConfig,
    policy: Decoder,
    kinds: tuple[DecoderConfig, Any, str | None],
    mesh: Mesh | None,
) -> TeacherWork:
    """Returns the quantities of a teacher on which the memory depends.

    Args:
      kinds: config, dtype of the weights and quantisation of the teacher; those of the policy if it is the teacher.
    """
    config, dtype, quantized = kinds
    if settings.of_policy or (settings.path == SELF and policy.adapters is not None):
        share = None  # those of the policy, or its frozen base
    else:
        share = _share(config, jnp.dtype(dtype), None, quantized, mesh)
    width = settings.max_prompt_length or rollout.max_prompt_length
    return TeacherWork(config, share, jnp.dtype(dtype), quantized, width, settings.mixture is not None)


def described_teachers(config: Config, policy: Decoder, mesh: Mesh | None) -> tuple[TeacherWork, ...]:
    """Returns `teacher_work` of each teacher of a config that is held in memory, from its config.json. Their weights
    have the compute dtype of the policy."""
    works = []
    for key, settings, _ in teachers_of(config):
        kinds = (policy.config, policy.param_dtype, policy.quantized)
        if settings.served:
            continue
        if settings.path != SELF:
            kinds = (load_config(str(settings.path), key), policy.dtype, settings.quantize)
        works.append(teacher_work(settings, config.rollout, policy, kinds, mesh))
    return tuple(works)


def critic_work(
    config: DecoderConfig,
    kinds: tuple[Any, Adapters | None, str | None],
    own_base: bool,
    mesh: Mesh | None,
    optimizer: OptimizerConfig,
) -> CriticWork:
    """Returns the quantities of a critic on which the memory depends.

    Args:
      kinds: dtype of the weights, adapters and quantisation.
      own_base: whether its frozen weights are not those of the policy.
      optimizer: that of the critic.
    """
    share = _share(config, *kinds, mesh)
    moments = _moments(config, *kinds, mesh, optimizer)
    return CriticWork(config, share, share.weights if own_base else share.trained, moments)


def described_companions(config: Config, policy: Decoder, mesh: Mesh | None) -> Companions:
    """Returns the models that a run holds in memory beside the policy. The critic is that of the config.json of
    `critic.path`."""
    teachers = described_teachers(config, policy, mesh)
    if config.algorithm.advantage_estimator != PPO:
        return Companions(config.has_reference, teachers)
    path = config.critic.path
    described = policy.config if path is None else load_config(path, "critic.path")
    described = dataclasses.replace(described, scalar_head=True)
    kinds = policy.param_dtype, policy.adapters, policy.quantized
    own_base = path is not None or policy.adapters is None
    optimizer = critic_optimizer(config.optimizer, config.critic.learning_rate)
    return Companions(config.has_reference, teachers, critic_work(described, kinds, own_base, mesh, optimizer))


def micro_batch_size(width: int, backend: str = "cpu") -> int:
    """Returns the maximum number of completions per chunk, each with `width` tokens on a device, if
    `train_micro_batch_size` is `auto`. If the completions are divided over devices, each part has this maximum."""
    return max(1, (CHUNK_TOKENS if backend == "cpu" else ACCELERATOR_CHUNK_TOKENS) // width)


def chunk_size(setting: int | str, work: Work, device: Device | None = None) -> int:
    """Returns the number of completions of full width per chunk.

    Args:
      setting: the key `training.train_micro_batch_size`.
      device: defaults to the current device.

    Raises:
      UserError: with `auto`, the memory is too small for weights, optimizer and a single completion.
    """
    return setting if isinstance(setting, int) else _chunk_size(work, device or this_device())


@functools.lru_cache(64)
def _chunk_size(work: Work, device: Device) -> int:
    width = work.widths[1] if work.group > 1 else sum(work.widths)  # in groups of 1, the prompt is included
    top = min(micro_batch_size(-(-width // work.sequence), work.backend) * work.parts, work.prompts * work.group)

    def needed(size: int) -> int:
        return max(phase.bytes for phase in update_phases(work, size))

    if size := _most_that_fits(top, needed, device.usable):
        return size
    alone = max(phase.fixed for phase in update_phases(work, 1))
    what, size = ("model", alone) if alone > device.usable else ("training", needed(1))
    raise _too_large("training.train_micro_batch_size", size, device, what)


def _too_large(key: str, needed: int, device: Device, what: str) -> UserError:
    need = (
        f"about {amount(needed)}, but the limit is {amount(device.usable)} ({device.share:.0%} of the device's memory)"
    )
    problem = f"model: weights, gradients and optimizer alone need {need}"
    cure = "Use"
    if what != "model":
        problem = f"{key}: one completion at a time needs {need}"
        # more devices along the other axes do not divide a completion
        split = " split its tokens over devices (cp of mesh.axis_names)," if what == "training" else ""
        cure = f"Lower {LOWER[what].removeprefix(f'{key}, ')},{split} or use"
    return UserError(f"{problem}. {cure} a smaller model or more devices, or set {key}=1 to try it anyway.")


def _most_that_fits(top: int, needed: Callable[[int], int], limit: float) -> int:
    """Returns the largest number up to `top` for which `needed` is at most `limit`; 0 if there is none.

    The search is a bisection. `needed` is not always monotonic, as the layout of chunks changes in discrete steps; the
    result can then be smaller than the largest such number.
    """
    if needed(top) <= limit:
        return top
    low = 0
    high = top
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= limit else (low, middle)
    return low


class SamplingLayout(NamedTuple):
    """The mesh of the sampler (`layout_mesh`), and why it was chosen. `dequantizes`: `Planner.dequantizes`."""

    mesh: Mesh
    reason: str
    dequantizes: bool = False

    def __str__(self) -> str:
        return f"{', '.join(f'{name} {size}' for name, size in self.mesh.shape.items())} ({self.reason})"


def _layout_as_set(numbers: list[int], mesh: Mesh, model: Decoder) -> Mesh:
    """Returns the mesh of the key `rollout.mesh` with the devices of `mesh`."""
    if math.prod(numbers) != mesh.size:
        raise UserError(
            f"rollout.mesh: got {numbers}; give the numbers of devices along data, fsdp and tp (or data, fsdp, ep and "
            f"tp), whose product must be {mesh.size}, e.g. [{mesh.size}, 1, 1], or set auto."
        )
    names = ("data", "fsdp", "tp") if len(numbers) == 3 else ("data", "fsdp", "ep", "tp")
    sizes = dict(zip(names, numbers, strict=True))
    check_slices("rollout.mesh", sizes, mesh.devices.flat)
    check_experts("rollout.mesh", layout_mesh(mesh, sizes), model.config)
    try:
        return _dividing(mesh, sizes, model)
    except UserError as error:
        raise UserError(str(error).replace("mesh.shape", "rollout.mesh", 1)) from None


def decode_seconds(model: Decoder, mesh: Mesh, rows: int, widths: tuple[int, int], kind: Accelerator) -> float:
    """Predicts the time in which one token of each of `rows` completions is sampled, at the peak rates of the device.

    Each device reads `decode_bytes`; projections in NF4 take as long as `NF4_READS` times their 16 bits. With `tp`, two
    all-reduces per layer sum the outputs of attention and MLP; each takes `COLLECTIVE_SECONDS` besides its bytes.
    """
    read = decode_bytes(model, mesh, (-(-rows // USUAL_GROUP), USUAL_GROUP), widths, rounds=1) / widths[1]
    if model.quantized == "nf4":
        quantized = sum(_share(model.config, model.param_dtype, model.adapters, "nf4", mesh).quantized)
        read += (NF4_READS * jnp.dtype(model.dtype).itemsize - NF4_BYTES) * quantized
    tp = mesh.shape["tp"]
    layers = model.config.num_layers
    sums = 2 * layers * (tp > 1)
    hidden = rows / prompt_parts(mesh) * model.config.hidden_size * jnp.dtype(model.dtype).itemsize
    sent = sums * hidden * 2 * (tp - 1) / tp
    return read / kind.memory_bytes + sent / kind.network(tp) + sums * COLLECTIVE_SECONDS


def _dividing(mesh: Mesh, sizes: Mapping[str, int], model: Decoder) -> Mesh:
    """Returns a mesh with axis sizes `sizes`. Raises UserError if heads or weights of the model are not divisible by
    these sizes."""
    chosen = layout_mesh(mesh, sizes)
    check_model(chosen, model.config, _shapes(model))
    return chosen


def _possible(mesh: Mesh, sizes: Mapping[str, int], model: Decoder) -> Mesh | None:
    try:
        return _dividing(mesh, sizes, model)
    except UserError:
        return None


def _shapes(model: Decoder) -> Any:
    return parameter_shapes(model.config, model.param_dtype, model.adapters, model.quantized)


def _sampling(work: Work, prompts: int, group: int, rows: int, held: dict[str, int] | None = None) -> Phase:
    """Estimates the memory of sampling `group` completions of each of `prompts` prompts, at most `rows` at once."""
    shape = _slot_shape(work, prompts, group, rows)
    return rollout_phase(work, math.prod(shape), shape[0], held, prefilled_prompts(shape, prompts, group))


def _slot_shape(work: Work, prompts: int, group: int, rows: int) -> tuple[int, int]:
    parts, _ = work.rollout_parts or (work.parts, 1)
    return slot_shape(prompts, group, rows, *work.widths, parts)


def prefilled_prompts(shape: tuple[int, int], prompts: int, group: int) -> int:
    """Returns the number of different prompts in the slots at first. `shape` are the numbers of slots and of
    completions per slot. If there are fewer slots than prompts, a prompt has a slot for each `width` of its `group`
    completions."""
    slots, width = shape
    return prompts if slots == prompts else -(-slots // -(-group // width))


def _bytes_of_rows(work: Work, rows: int) -> int:
    """Estimates the memory of sampling `rows` completions at once, all those of their prompts."""
    return _sampling(work, -(-rows // USUAL_GROUP), USUAL_GROUP, rows).bytes


def _for_sampling(work: Work, model: Decoder, rollout: RolloutConfig, chosen: Mesh | None, dequantizes: bool) -> Work:
    """Returns `work` with the sharding of weights and completions on `chosen`, the mesh of the sampler. On a single
    device, the weights are not copied to another layout; if `dequantizes`, the quantised ones are copied."""
    recorded = model.config.recorded_bytes if rollout.routing_replay else 0
    work = dataclasses.replace(work, filtered=rollout.top_p < 1 or rollout.top_k is not None, recorded=recorded)
    quantized = None if dequantizes else work.quantized
    if chosen is None or chosen.size == 1:
        copied = work.size * sum(work.share.quantized) if dequantizes else 0
        return dataclasses.replace(work, quantized=quantized, copied=copied)
    return dataclasses.replace(
        work,
        quantized=quantized,
        rollout_share=_share(model.config, model.param_dtype, model.adapters, quantized, chosen),
        rollout_parts=(prompt_parts(chosen), chosen.shape.get("tp", 1)),
    )


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """The estimated peak memory of a run, and the sizes that were chosen for the run.

    Attributes:
      micro_batch: completions per chunk of an update.
      rows: maximum number of completions that are sampled at the same time; 0 if nothing is sampled.
      chosen: whether `auto` has chosen `micro_batch`, and whether `auto` has chosen `rows`.
      phases: the peak memory of each phase of the run.
      layout: the layout of the sampler; None if it has one device.
      dequantizes: whether sampling reads a dequantised copy of the weights (`Planner.dequantizes`).
      refused: error messages on sizes that could not be chosen, because not even one completion fits into memory.
    """

    micro_batch: int
    rows: int
    chosen: tuple[bool, bool]
    phases: tuple[Phase, ...]
    device: Device
    layout: SamplingLayout | None = None
    dequantizes: bool = False
    refused: tuple[str, ...] = ()

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.bytes)

    def lines(self) -> list[tuple[str, str]]:
        """Returns labels and texts for the screen: the sizes, the peak memory and the available memory, the memory of
        each phase of the run by component, and warnings."""
        update, rollout = ("auto" if auto else "as set" for auto in self.chosen)
        sizes = f"{self.micro_batch} completions per chunk ({update})"
        sizes += f", {self.rows} sampled at once ({rollout})" if self.rows else ""
        update_bytes = max(phase.bytes for phase in self.phases if phase.name == "update")
        shown = [phase for phase in self.phases if phase.name != "optimizer" or phase.bytes > update_bytes]
        phases = [(phase.name, str(phase)) for phase in shown]
        inside = any(phase.name == "rollout" for phase in self.phases)  # not in an engine outside
        layout = [("sampling", str(self.layout))] if inside and self.layout is not None else []
        copy = [("sampling", "with a dequantised copy of the base")] if inside and self.dequantizes else []
        warnings = [("warning", problem) for problem in self.problems()]
        return [("sizes", sizes), *layout, *copy, ("memory", self.peak_line()), *phases, *warnings]

    def peak_line(self) -> str:
        """Returns a text with the estimated peak and the memory of the device."""
        peak = f"{amount(self.peak.bytes)} at most ({self.peak.name})"
        if not self.device.known:
            return f"{peak}; the device does not report its memory"
        return f"{peak}, {amount(self.device.memory)} on the device"

    def problems(self) -> list[str]:
        """Returns messages about sizes and phases that do not fit into device memory, with the remedy; none if the
        memory of the device is not known."""
        if not self.device.known:
            return []
        if self.refused or self.peak.bytes <= self.device.memory:
            return list(self.refused)
        lower = {"rollout": "sampling", "evaluation": "sampling"}.get(self.peak.name, "training")
        cure = "" if self.peak.fixed > self.device.memory else f"lower {LOWER[lower]}, or "
        return [f"this exceeds the memory of the device: {cure}use a smaller model or more devices"]


def estimate_memory(
    config: Config,
    model: Decoder,
    mesh: Mesh | None,
    *,
    device: Device | None = None,
    refuse: bool = True,
) -> MemoryEstimate:
    """Chooses the sizes that are `auto` in a config, and estimates the memory of each phase of the run. The estimate
    assumes that all sequences have full length.

    Args:
      device: the device for which the memory is estimated; defaults to the current device.
      refuse: whether to raise UserError if a single completion does not fit into memory. If False, the size is set to 1
        and the error message is added to `MemoryEstimate.refused`.

    Raises:
      UserError: a single completion does not fit into memory and `refuse` is True, or `rollout.mesh` is not valid.
    """
    device = device or this_device()
    refused = list[str]()

    def chosen(size: Callable[[], int]) -> int:
        try:
            return size()
        except UserError as error:
            if refuse:
                raise
            refused.extend({str(error)} - set(refused))
            return 1

    rollout = config.rollout
    data = config.data
    group = config.algorithm.num_generations
    widths = rollout.max_prompt_length, rollout.max_tokens_to_generate
    training = dataclasses.replace(config.training, actor_optimizer=config.optimizer)
    planner = Planner(model, mesh, training, rollout, described_companions(config, model, mesh), device)
    most = training.prompts_per_update(data.batch_size)
    pairs = config.trains_pairs
    update = planner.update_work((most, group), widths, whole_groups=pairs)
    size = chosen(lambda: planner.chunk_size(update))
    recorded = model.config.recorded_bytes if rollout.routing_replay else 0
    update = dataclasses.replace(update, prompts=data.batch_size, update_prompts=most, recorded=recorded)
    layout = planner.layout()
    evaluated = config.eval.batch_size, config.eval.samples
    sampling_mesh = None if layout is None else layout.mesh
    dequantizes = planner.dequantizes(layout)
    rows = math.prod(evaluated) if pairs else data.batch_size * group
    phases = []
    if pairs and config.rewards.functions is None:
        rows = 0  # nothing is sampled
    elif find_engine(rollout.engine).make is None:
        work = _for_sampling(update, model, rollout, sampling_mesh, dequantizes)
        calls = {"evaluation": evaluated} if pairs else {"rollout": (data.batch_size, group), "evaluation": evaluated}
        for name, (prompts, samples) in calls.items():
            at_once = chosen(functools.partial(planner.rows, prompts, samples, sampling_mesh, dequantizes))
            rows = min(at_once, rows) if name == "rollout" or pairs else rows
            phases.append(dataclasses.replace(_sampling(work, prompts, samples, at_once), name=name))
    phases += update_phases(update, size)
    if config.sft.max_steps:
        settings = dataclasses.replace(training, actor_optimizer=config.sft.optimizer)
        alone = dataclasses.replace(planner, companions=ALONE, training=settings)
        single = alone.update_work((config.sft.batch_size, 1), widths)
        sft = update_phases(single, chosen(lambda: alone.chunk_size(single)))[0]
        phases.append(dataclasses.replace(sft, name="sft"))
    auto = (not isinstance(training.train_micro_batch_size, int), not isinstance(rollout.max_concurrent_rows, int))
    return MemoryEstimate(size, rows, auto, tuple(phases), device, layout, dequantizes, tuple(refused))
