"""Compiles the programs of a run for devices that this machine does not have, and reports their memory and FLOPs.

The update, the prefill and the decoding step are lowered from shapes for the same number of simulated CPU devices, with
the sharding of the run. No arrays of the size of the model are allocated, and neither data nor weights are read.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from tunix_like.algorithms.objective import Objective, build_objective
from tunix_like.config.schema import Config, OptimizerConfig
from tunix_like.data import load_source, source_estimators
from tunix_like.errors import UserError, nearest
from tunix_like.models.decoder import Decoder
from tunix_like.models.loading import load_abstract
from tunix_like.models.lora import add_lora, split_params
from tunix_like.models.operations import forward_operations, update_operations
from tunix_like.models.sharding import (
    build_mesh,
    check_model,
    param_shapes,
    prompt_parts,
    replicated_shapes,
    scope,
    shardings_of,
    slot_shapes,
)
from tunix_like.rollout import decoding
from tunix_like.rollout.logits import SamplingParams
from tunix_like.rollout.sampler import slot_shape
from tunix_like.runs.build import check_batches, check_config, named_model, updates_per_batch
from tunix_like.runs.describe import describe_model
from tunix_like.runtime import console
from tunix_like.training.arguments import forward_options
from tunix_like.training.forward import place_packed
from tunix_like.training.memory import Phase, amount
from tunix_like.training.optimizer import build_optimizer, state_shapes
from tunix_like.training.packing import choose_layout, pack
from tunix_like.training.sizes import Device, MemoryEstimate, device_memory, estimate_memory
from tunix_like.training.train_step import StepInputs, StepSpec, TrainState, jit_train_step
from tunix_like.types import GroupBatch

KINDS = {
    "v5e": Device("tpu", 16 * 10**9),
    "v6e": Device("tpu", 32 * 10**9),
    "a100": Device("gpu", 80 * 10**9),
    "h100": Device("gpu", 80 * 10**9),
    "h200": Device("gpu", 141 * 10**9),
}
"""Backend and memory in bytes of one device, from the vendors' data sheets."""

MOST_DEVICES = 512
"""Maximum number of simulated devices, since each has its own threads."""

KERNELS = ("cudnn", "splash")
"""Attention kernels that the CPU backend does not support; they are replaced by blocked attention."""


def parse_devices(text: str) -> tuple[Device | None, int]:
    """Parses `v5e-8`, `8xh100` or `8` to a device and a number; the device of a bare number is None, the CPU of this
    host.

    Raises:
      UserError: the text has another form, the kind is unknown, or the number is out of range.
    """
    match = re.fullmatch(r"(?:(?P<kind>[a-z]\w*)-(?P<last>\d+)|(?P<first>\d+)(?:x(?P<other>[a-z]\w*))?)", text.lower())
    if match is None:
        raise UserError(f"--devices: expected KIND-N, NxKIND or N (v5e-8, 8xh100, 8), got '{text}'.")
    kind, number = match["kind"] or match["other"], int(match["last"] or match["first"])
    if kind is not None and kind not in KINDS:
        raise UserError(f"--devices: unknown kind '{kind}'. {nearest(kind, KINDS)}")
    if not 1 <= number <= MOST_DEVICES:
        raise UserError(f"--devices: {number} devices; give a number from 1 to {MOST_DEVICES}.")
    return (None if kind is None else KINDS[kind]), number


def pretend(number: int) -> None:
    """Sets the number of simulated devices of the CPU backend, which jax must not have initialised yet.

    Raises:
      UserError: jax has initialised the backend with another number of devices.
    """
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", number)
    except RuntimeError:  # the backend is initialised already, possibly with the same number of devices
        pass
    if len(jax.devices()) != number:
        raise UserError(f"--devices: jax runs with {len(jax.devices())} devices already; {number} need a new process.")


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program. Bytes and `flops` are per device; `operations` are those of a whole step on all devices.

    Attributes:
      arguments: bytes of all inputs.
      temporaries: bytes of temporary buffers of XLA, and of outputs that are not aliased to an input.
      flops: FLOPs as counted by XLA, which counts the body of a loop once.
      operations: required multiplications and additions of the step for completions of full length.
      estimate: the phase with the highest memory as estimated by `memory.py`, on the target device.
      seconds: compile time on this machine.
    """

    name: str
    arguments: int
    temporaries: int
    flops: float
    operations: float
    estimate: Phase | None
    seconds: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """A resolved config with its model, mesh and memory estimate for the target devices."""

    config: Config
    device: Device
    model: Decoder
    mesh: Mesh | None
    estimate: MemoryEstimate

    @property
    def widths(self) -> tuple[int, int]:
        return self.config.rollout.max_prompt_length, self.config.rollout.max_tokens_to_generate

    @property
    def group(self) -> tuple[int, int]:
        """Prompts per step, and completions per prompt."""
        return self.config.data.batch_size, self.config.algorithm.num_generations

    @functools.cached_property
    def split(self) -> tuple[Any, Any]:
        """The graph definition, and the shapes of the parameters with their shardings."""
        graphdef, state = nnx.split(self.model)
        return graphdef, param_shapes(nnx.to_pure_dict(state), self.mesh)

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Lengths of the prompts and completions of a step, all of full length."""
        (prompts, group), (width, steps) = self.group, self.widths
        return np.full(prompts, width), np.full((prompts, group), steps)

    def phase(self, *names: str) -> Phase:
        """Returns the estimated phase with the highest memory among these names."""
        return max((phase for phase in self.estimate.phases if phase.name in names), key=lambda phase: phase.bytes)


def make_plan(config: Config, kind: Device | None) -> Plan:
    """Resolves a config and builds its abstract model and mesh for all devices of the backend.

    Raises:
      UserError: a key is invalid, config.json is missing, or the mesh does not fit the devices or parameters.
    """
    config, _ = check_config(config)
    section, device = config.model, kind or Device("cpu", device_memory())
    incomplete = section.path is None and "vocab_size" not in (section.config or {})
    what = named_model(section, load_source(config.data).tokenizer if incomplete else None)
    dtype = section.dtype or ("float32" if kind is None else "bfloat16")
    attention = "blocked" if section.attention in KERNELS else section.attention
    kinds: dict[str, Any] = {
        "dtype": jnp.dtype(dtype),
        "param_dtype": jnp.dtype(section.param_dtype),
        "quantize": section.quantize,
    }
    model, _, _ = load_abstract(what, init=section.init, attention=attention, **kinds)
    model = model if config.lora.rank is None else add_lora(model, config.lora)
    mesh = build_mesh(config.mesh)
    check_model(mesh, model.config, nnx.to_pure_dict(nnx.split(model)[1]))
    check_batches(config, mesh)
    return Plan(
        config, device, model, mesh, estimate_memory(config, model, mesh, slot_shape, device=device, refuse=False)
    )


def compile_update(plan: Plan) -> Program:
    """Compiles one optimizer update as in `training/updates.py`."""
    config, graphdef = plan.config, plan.split[0]
    params, frozen = split_params(plan.split[1])
    own = source_estimators(config.data, config.algorithm)
    objective = build_objective(config.algorithm, plan.widths[1], updates_per_batch(config), own)
    training = dataclasses.replace(config.training, actor_optimizer=config.optimizer)
    optimizer = training.actor_optimizer or OptimizerConfig()
    if isinstance(optimizer, OptimizerConfig):
        optimizer = build_optimizer(optimizer, training.max_steps or 1)
    state = TrainState(params, state_shapes(optimizer, params))
    options = forward_options(config.rollout, training, config.algorithm)
    step = jit_train_step(StepSpec(graphdef, objective, optimizer, options, shardings_of(state, plan.mesh)))
    lower = functools.partial(step.lower, state, _step_inputs(plan, objective), frozen)
    done = update_operations(plan.model.config, *plan.lengths, frozen=plan.model.adapters is not None)
    operations = done * config.algorithm.num_iterations
    with scope(plan.mesh):
        return _compiled("update", lower, operations, plan.phase("update", "optimizer"))[0]


def _step_inputs(plan: Plan, objective: Objective) -> StepInputs:
    config, (prompts, group), (width, steps) = plan.config, plan.group, plan.widths
    most = min(config.training.mini_batch_size or prompts, prompts)
    layout = choose_layout(group, most, plan.widths, plan.estimate.micro_batch, prompt_parts(plan.mesh))
    lengths, first = np.full((prompts, group), steps, np.int32), np.zeros((prompts, group), bool)
    first[:most] = True
    packed = place_packed(pack(lengths, first, steps, layout, most), plan.mesh)  # small index arrays

    def shape(*axes: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(axes, dtype)

    floats = shape(prompts, group, steps, dtype=jnp.float32)
    batch = GroupBatch(
        prompt_tokens=shape(prompts, width),
        prompt_lengths=shape(prompts),
        completion_tokens=shape(prompts, group, steps),
        completion_lengths=shape(prompts, group),
        rollout_logprobs=floats,
        rewards=shape(prompts, group, dtype=jnp.float32),
        scored=shape(prompts, group, dtype=jnp.bool_),
        trained=shape(prompts, group, dtype=jnp.bool_),
        estimator_ids=shape(prompts),
        token_mask=shape(prompts, group, steps, dtype=jnp.bool_),
    )
    old = floats if updates_per_batch(config) > 1 else None
    ref = floats if objective.reference_in_loss else None
    batch, in_update, old, ref = replicated_shapes((batch, shape(prompts, dtype=jnp.bool_), old, ref), plan.mesh)
    return StepInputs(batch, in_update, packed, old, ref)


def compile_sampling(plan: Plan) -> list[Program]:
    """Compiles prefill and decoding as in `rollout/sampler.py`, with all rows active and the cache at its full size."""
    (graphdef, params), (prompts, group), (width, steps) = plan.split, plan.group, plan.widths
    rollout, phase = plan.config.rollout, plan.phase("rollout")
    slots, size = slot_shape(prompts, group, plan.estimate.rows, width, steps)
    inputs = jax.ShapeDtypeStruct((slots, width), jnp.int32), jax.ShapeDtypeStruct((slots,), jnp.int32)
    lower = functools.partial(decoding.prefill.lower, graphdef, params, *slot_shapes(inputs, plan.mesh))
    first = np.ones((prompts, 1), np.int32)  # a prompt predicts one token
    operations = forward_operations(plan.model.config, np.full(prompts, width), first)
    with scope(plan.mesh):
        prefill, made = _compiled("prefill", lower, operations, None)
    made = slot_shapes(made, plan.mesh)
    words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape[-1]
    empty = functools.partial(decoding.empty_rows, size=size, max_tokens=steps, room=steps, key_words=words)
    rows = slot_shapes(jax.eval_shape(empty, made), plan.mesh)
    sampling = SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k)
    ends = tuple(rollout.eos_tokens or (0,))
    lower = functools.partial(decoding.advance.lower, graphdef, params, made, rows, np.int32(0), sampling, ends)
    with scope(plan.mesh):
        decode = forward_operations(plan.model.config, *plan.lengths) - operations
        return [prefill, _compiled("decode", lower, decode, phase)[0]]


def _compiled(name: str, lower: Callable[[], Any], operations: float, estimate: Phase | None) -> tuple[Program, Any]:
    """Compiles a program; returns it and the shapes of its outputs with their shardings."""
    start = time.perf_counter()
    lowered = lower()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    memory, costs = compiled.memory_analysis(), compiled.cost_analysis() or {}
    temporaries = memory.temp_size_in_bytes + max(0, memory.output_size_in_bytes - memory.alias_size_in_bytes)
    flops = float(costs.get("flops", float("nan")))
    program = Program(name, memory.argument_size_in_bytes, temporaries, flops, operations, estimate, seconds)
    outputs = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        lowered.out_info,
        compiled.output_shardings,
    )
    return program, outputs


def print_report(config: Config, devices: str) -> int:
    """Compiles the programs of a config for `devices` and prints their memory and FLOPs. Returns the exit status, 0.

    Raises:
      UserError: as `parse_devices`, `pretend` and `make_plan`.
    """
    kind, number = parse_devices(devices)
    pretend(number)
    plan = make_plan(config, kind)
    mesh = "one device" if plan.mesh is None else ", ".join(f"{name} {size}" for name, size in plan.mesh.shape.items())
    console.say(f"{devices}: {mesh}; {amount(plan.device.memory)} per device; {plan.model.dtype} matrix products")
    console.say(f"{describe_model(plan.model)}, {plan.config.model.path or 'inline'}")
    for name, value in plan.estimate.lines():
        console.say(f"{name:>10}: {value}")
    console.say("compiling the update, the prefill and the decoding steps; a large model takes minutes")
    programs = [compile_update(plan), *compile_sampling(plan)]
    console.table("compiled, per device", ("", *(program.name for program in programs)), _rows(programs, number))
    for line in NOTES:
        console.say(line)
    return 0


NOTES = (
    "temporaries: for the CPU backend, which computes bfloat16 in float32 and undoes rematerialisation: an upper bound "
    "for TPU and GPU",
    "FLOPs by XLA: the body of a loop counts once; FLOPs of a step: computed from shapes, for completions of full "
    "length, on all devices together",
)


def _rows(programs: list[Program], number: int) -> list[tuple[str, ...]]:
    def row(name: str, cell: Callable[[Program], str]) -> tuple[str, ...]:
        return (name, *map(cell, programs))

    return [
        row("arguments", lambda p: amount(p.arguments)),
        row("temporaries", lambda p: amount(p.temporaries)),
        row("sum", lambda p: amount(p.arguments + p.temporaries)),
        row("estimated (memory.py)", lambda p: "-" if p.estimate is None else amount(p.estimate.bytes)),
        row("FLOPs by XLA", lambda p: f"{p.flops:.3g}"),
        row("FLOPs of a step", lambda p: f"{p.operations:.3g}"),
        row("FLOPs of a step, per device", lambda p: f"{p.operations / number:.3g}"),
        row("seconds to compile", lambda p: f"{p.seconds:.1f}"),
    ]
