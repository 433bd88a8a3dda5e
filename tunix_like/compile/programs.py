"""Describes the programs of a run: how each is lowered, how often it runs, and its operation count.

The programs are built from shapes for devices that this machine need not have. No arrays of the size of the model are
allocated, and neither data nor weights are read.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from tunix_like.algorithms.objective import build_objective
from tunix_like.algorithms.ppo import PPO, ValueObjective
from tunix_like.algorithms.sources import source_estimators
from tunix_like.algorithms.token_baseline import TOKEN_BASELINE
from tunix_like.compile.costs import Trips
from tunix_like.config.schema import SELF, Config
from tunix_like.config.sources import OF_OTHER_SOURCES, teachers_of
from tunix_like.data import load_source
from tunix_like.errors import UserError
from tunix_like.models.attention import resolve_attention
from tunix_like.models.attention_blocked import ALL_BLOCKS, BLOCK, CAUSAL_BLOCKS
from tunix_like.models.attention_decoding import decoding_kernel
from tunix_like.models.counts import forward_operations, update_operations
from tunix_like.models.decoder import Decoder
from tunix_like.models.layers import ROUNDS
from tunix_like.models.lora import add_lora, split_params
from tunix_like.models.opening import load_abstract
from tunix_like.models.quantized_base import dequantized_kernels, dequantized_model, with_kernels
from tunix_like.models.sharding import (
    build_mesh,
    check_model,
    param_shapes,
    prompt_parts,
    replicated_shapes,
    sequence_parts,
    shardings_of,
    slot_shapes,
    token_parts,
)
from tunix_like.planning.bounds import decode_bytes, held_bytes, prefill_bytes, update_bytes, weight_bytes
from tunix_like.planning.memory import Phase
from tunix_like.planning.sizes import (
    Device,
    MemoryEstimate,
    device_memory,
    estimate_memory,
    prefilled_prompts,
)
from tunix_like.rollout import decoding
from tunix_like.rollout.logits import SamplingParams
from tunix_like.rollout.sampler import jit_place, sampled_params
from tunix_like.rollout.shapes import slot_shape
from tunix_like.runs.build import chosen_tokenizer, named_model
from tunix_like.runs.checks import check_batches, check_config, updates_per_batch
from tunix_like.step.forward import CHUNKS, SETS, batch_logprobs, packed_shapes
from tunix_like.step.optimizer import build_optimizer, critic_optimizer, moment_segments, state_shapes
from tunix_like.step.packing import Packed, choose_layout, pack
from tunix_like.step.train_step import StepInputs, StepSpec, TeacherInputs, TeacherSpec, TrainState, jit_train_step
from tunix_like.training.arguments import forward_options, likelihood_options
from tunix_like.training.critic import new_critic
from tunix_like.training.engine import warn_of_settings
from tunix_like.training.teacher import resolve_teacher
from tunix_like.types import GroupBatch

logger = logging.getLogger("tunix_like")


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of a run before it is compiled. Its numbers are for completions of full length.

    Attributes:
      lower: returns a `jax.stages.Lowered`.
      operations: number of multiplications and additions of this program in a training step, summed over all devices,
        without recomputation and padding.
      needed_bytes: number of bytes that each device must read and write in a training step (`bounds.py`).
      calls: number of times that the program runs in a training step.
      trips: number of iterations of the loops whose length is an input of the program.
      estimate: the estimated memory of the part of a training step in which the program runs; None if there is none.
      token_loop: name of the loop that samples one token per completion in each iteration; None if there is none.
    """

    name: str
    lower: Callable[[], Any]
    mesh: Mesh | None
    operations: float
    needed_bytes: float
    calls: float
    trips: Trips
    estimate: Phase | None = None
    token_loop: str | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """A resolved config with its model, mesh and memory estimate for the target devices."""

    config: Config
    device: Device
    model: Decoder
    mesh: Mesh | None
    sampling_mesh: Mesh | None
    estimate: MemoryEstimate
    teacher: Decoder | None = None
    critic: Decoder | None = None

    @property
    def widths(self) -> tuple[int, int]:
        return self.config.rollout.max_prompt_length, self.config.rollout.max_tokens_to_generate

    @property
    def group(self) -> tuple[int, int]:
        """Number of prompts per step, and number of completions per prompt."""
        return self.config.data.batch_size, self.config.algorithm.num_generations

    @functools.cached_property
    def split(self) -> tuple[Any, Any]:
        """The graph definition, and the shapes of the parameters with their shardings."""
        return self._split(self.model)

    @functools.cached_property
    def taught_by(self) -> tuple[Any, Any]:
        """The same for the teacher. The weights are those of the policy if it is its own teacher; the initial weights
        have the same shapes."""
        return self.split if self.teacher is None else self._split(self.teacher)

    @functools.cached_property
    def judged_by(self) -> tuple[Any, Any]:
        """The same for the critic."""
        assert self.critic is not None
        return self._split(self.critic)

    def _split(self, model: Decoder) -> tuple[Any, Any]:
        graphdef, state = nnx.split(model)
        return graphdef, param_shapes(nnx.to_pure_dict(state), self.mesh)

    @property
    def lays_out(self) -> bool:
        """Whether the weights are converted to another form or layout for sampling (`Sampler.place`)."""
        return self.estimate.dequantizes or (self.sampling_mesh is not None and self.sampling_mesh.size > 1)

    @property
    def sampled_model(self) -> Decoder:
        """The model in the form in which it samples (`Planner.dequantizes`)."""
        return dequantized_model(self.model) if self.estimate.dequantizes else self.model

    @functools.cached_property
    def sampled(self) -> tuple[Any, Any]:
        """The graph definition during sampling, and the shapes and shardings of the parameters."""
        graphdef, params = self.split

        def converted(params: Any) -> Any:
            if self.sampling_mesh is None:
                return with_kernels(graphdef, params, dequantized_kernels(graphdef, params))
            return sampled_params(graphdef, params, self.estimate.dequantizes)

        if self.lays_out:
            params = jax.eval_shape(converted, params)
        graphdef = nnx.split(self.sampled_model)[0]
        return graphdef, params if self.sampling_mesh is None else param_shapes(params, self.sampling_mesh)

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Lengths of the prompts and of the completions of a step, as arrays. All lengths are the maximum lengths."""
        prompts, group = self.group
        width, steps = self.widths
        return np.full(prompts, width), np.full((prompts, group), steps)

    def phase(self, *names: str) -> Phase:
        """Returns the largest of the named phases."""
        return max((phase for phase in self.estimate.phases if phase.name in names), key=lambda phase: phase.bytes)


def make_plan(config: Config, device: Device | None, devices: Sequence[Any] | None = None) -> Plan:
    """Resolves the defaults of a config, and builds its mesh and its abstract model.

    Args:
      device: the backend and memory to plan for; None: the CPU of this machine.
      devices: descriptions of the devices to compile for; None: all devices of the current backend.

    Raises:
      UserError: a config key is invalid, the config.json of the model is missing, or the mesh does not fit the devices
        or the parameters.
    """
    config, _ = check_config(config)
    warn_of_settings(config.algorithm, config.rollout)
    if config.trains_pairs:
        name = config.algorithm.advantage_estimator
        raise UserError(f"doctor: programs of algorithm.advantage_estimator={name} are not described; use --dry-run.")
    if of_sources := [each.key for each in teachers_of(config) if each.key != OF_OTHER_SOURCES]:
        raise UserError(f"doctor: programs of {of_sources[0]} are not described; use --dry-run.")
    section = config.model
    incomplete = section.path is None and "vocab_size" not in (section.config or {})
    what = named_model(section, chosen_tokenizer(config, load_source(config.data)) if incomplete else None)
    kinds: dict[str, Any] = {
        "dtype": jnp.dtype(section.dtype or ("float32" if device is None else "bfloat16")),
        "param_dtype": jnp.dtype(section.param_dtype),
        "quantize": section.quantize,
    }
    model, _, _ = load_abstract(what, init=section.init, **kinds)
    model.attention, model.decoding = _attention(section.attention, model, devices)
    model = model if config.lora.rank is None else add_lora(model, config.lora)
    mesh = build_mesh(config.mesh, devices)
    check_model(mesh, model.config, nnx.to_pure_dict(nnx.split(model)[1]))
    check_batches(config, mesh)
    device = device or Device("cpu", device_memory())
    estimate = estimate_memory(config, model, mesh, device=device, refuse=False)
    sampling_mesh = None if estimate.layout is None else estimate.layout.mesh
    teacher = None
    if config.teacher.path not in (None, SELF) and not config.teacher.served:
        teacher, _, _ = load_abstract(
            str(config.teacher.path), dtype=model.dtype, param_dtype=model.dtype, quantize=config.teacher.quantize
        )
        teacher.attention, teacher.decoding = _attention(section.attention, teacher, devices)
    critic = None
    if config.algorithm.advantage_estimator == PPO:
        path = config.critic.path
        base = model if path is None else load_abstract(path, **kinds)[0]
        critic = new_critic(base, None if config.lora.rank is None else config.lora, 0)
        critic.attention, critic.decoding = _attention(section.attention, critic, devices)
    return Plan(config, device, model, mesh, sampling_mesh, estimate, teacher, critic)


def _attention(name: str, model: Decoder, devices: Sequence[Any] | None) -> tuple[str, str | None]:
    """Returns the attention implementation that the setting `name` (`model.attention`) selects on the devices, and the
    kernel of decoding."""
    name = "blocked" if devices is None and name in ("cudnn", "splash") else name  # kernels that a CPU cannot compile
    resolved = resolve_attention(name, model.dtype, model.config.only_head_dim, devices, model.config.sinks)
    decoding = decoding_kernel(resolved, model.config.head_dim)
    installed = importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.cudnn") is not None
    if devices is not None and resolved == "cudnn" and not installed:
        logger.warning("cuDNN is not installed here, so blocked attention is compiled instead of cudnn")
        return "blocked", decoding
    return resolved, decoding


def update_program(plan: Plan) -> Program:
    """Describes the program of one optimizer update (`training/updates.py`)."""
    config = plan.config
    own = source_estimators(config.data, config.algorithm)
    taught_with = resolve_teacher(None, config.teacher, of_sources=False)
    objective = build_objective(config.algorithm, plan.widths[1], updates_per_batch(config), own, taught_with)
    options = forward_options(config.rollout, config.training, config.algorithm, plan.device.backend)
    beta = objective.teacher_in_loss
    teacher = None if beta is None else TeacherSpec(plan.taught_by[0], beta)
    spec = StepSpec(None, objective, config.optimizer, options, teacher=teacher)
    made = _update(plan, "update", plan.model, plan.split, spec)
    if teacher is None:
        return made
    taught = config.algorithm.num_iterations * _teacher_operations(plan)
    return dataclasses.replace(made, operations=made.operations + taught)


def critic_program(plan: Plan) -> Program | None:
    """Describes the program of one update of the critic."""
    if plan.critic is None:
        return None
    settings = plan.config.critic
    options = likelihood_options(plan.config.training, plan.device.backend)
    optimizer = critic_optimizer(plan.config.optimizer, settings.learning_rate)
    spec = StepSpec(None, ValueObjective(settings.value_clip), optimizer, options)
    return _update(plan, "critic", plan.critic, plan.judged_by, spec)


def values_program(plan: Plan) -> Program | None:
    """Describes the program that computes the values of a batch."""
    if plan.critic is None:
        return None
    return _logprobs("values", plan, plan.critic, plan.judged_by, _batch(plan), 1)


def _update(plan: Plan, name: str, model: Decoder, split: tuple[Any, Any], spec: StepSpec) -> Program:
    """Describes the program of an update of a model. `spec` has the settings of the optimizer, and no graph."""
    config = plan.config
    graphdef = split[0]
    params, frozen = split_params(split[1])
    spec = spec._replace(options=spec.options.for_trained(bool(frozen), plan.mesh))
    segments = moment_segments(model.config, spec.optimizer, spec.options.stacked)
    optimizer = build_optimizer(spec.optimizer, config.training.max_steps or 1, segments is not None)
    state = TrainState(params, state_shapes(optimizer, params, segments))
    shardings = shardings_of(state, plan.mesh)
    step = jit_train_step(spec._replace(graphdef=graphdef, optimizer=optimizer, shardings=shardings, segments=segments))
    most = config.training.prompts_per_update(plan.group[0])
    packed = _packed(plan, most)
    calls = updates_per_batch(config)
    lower = functools.partial(step.lower, state, _step_inputs(plan, spec.objective, packed), frozen)
    done = update_operations(model.config, *plan.lengths, frozen=model.adapters is not None)
    return Program(
        name,
        lower,
        plan.mesh,
        config.algorithm.num_iterations * done,
        calls * update_bytes(model, plan.mesh, _tokens(plan, most), state),
        calls,
        _packed_trips(plan, packed),
        plan.phase(*(("update", "optimizer") if name == "update" else (name,))),
    )


def logprobs_program(plan: Plan) -> Program | None:
    """Describes the program of `Trainer.token_logprobs`, the log-probabilities of a batch without a gradient. A step
    runs it if a batch has several updates or advantages of a teacher, if there is a KL term, and once more if
    this is in the reward. The program of score norms, which has the same shapes, counts as one more run."""
    config = plan.config
    algorithm = plan.config.algorithm
    several = updates_per_batch(config) > 1 or _scores_before(config)
    penalised = algorithm.beta > 0 and bool(algorithm.kl_in_reward)
    policy = several + penalised if plan.critic is None else several or penalised  # with a critic, one result for both
    calls = policy + (algorithm.beta > 0) + (algorithm.advantage_estimator == TOKEN_BASELINE)
    return None if not calls else _logprobs("logprobs", plan, plan.model, plan.split, _batch(plan), calls)


def teacher_program(plan: Plan) -> Program | None:
    """Describes the program that computes the log-probabilities of a teacher, if these give the advantages."""
    if not _scores_before(plan.config) or plan.config.teacher.served:
        return None
    return _logprobs("teacher", plan, plan.teacher or plan.model, plan.taught_by, _taught_batch(plan), 1)


def _scores_before(config: Config) -> bool:
    """Whether a teacher gives advantages per token, which are computed before the updates."""
    return config.teacher.path is not None and config.teacher.mixture is None


def _logprobs(name: str, plan: Plan, model: Decoder, split: tuple[Any, Any], batch: GroupBatch, calls: int) -> Program:
    config = plan.config
    options = forward_options(config.rollout, config.training, config.algorithm, plan.device.backend)
    options = options.for_trained(config.lora.rank is not None, plan.mesh)
    packed = _packed(plan, plan.group[0])
    if name != "logprobs":  # experts are those of the policy
        packed = packed._replace(experts=None, prompt_experts=None)
    program = jax.jit(functools.partial(batch_logprobs, options=options), static_argnums=0)
    lower = functools.partial(program.lower, *split, batch, packed_shapes(packed, plan.mesh))
    operations = calls * forward_operations(
        model.config, np.full(plan.group[0], batch.prompt_tokens.shape[1]), plan.lengths[1]
    )
    needed = calls * weight_bytes(model, plan.mesh, _tokens(plan, plan.group[0]) / token_parts(plan.mesh))
    return Program(name, lower, plan.mesh, operations, needed, calls, _packed_trips(plan, packed))


def _teacher_operations(plan: Plan) -> float:
    prompts = np.full(plan.group[0], plan.config.teacher.max_prompt_length or plan.widths[0])
    return forward_operations((plan.teacher or plan.model).config, prompts, plan.lengths[1])


def _tokens(plan: Plan, prompts: int) -> int:
    """Returns the number of tokens of `prompts` prompts and their completions."""
    return prompts * (plan.widths[0] + plan.group[1] * plan.widths[1])


def _packed_trips(plan: Plan, packed: Packed) -> Trips:
    return {SETS: float(packed.sets), CHUNKS: float(packed.chunks.sum() / packed.sets), **_block_trips(plan)}


def _block_trips(plan: Plan) -> Trips:
    """Returns the numbers of iterations of the loops over blocks of keys in blocked attention, for causal attention the
    mean over the blocks of queries, and of rounds of experts (`ep`), if all get the same number of rows. Sliding
    windows would reduce the numbers, but are not considered."""
    parts = sequence_parts(plan.mesh)  # a device has the queries of a part, and all keys
    return {
        CAUSAL_BLOCKS: lambda around: (parts * around + 1) / 2,
        ALL_BLOCKS: float(math.ceil(plan.widths[0] / BLOCK)),
        ROUNDS: 1.0,
    }


def _packed(plan: Plan, most: int) -> Packed:
    """Packs the completions of the first `most` prompts of a step (`step/packing.py`)."""
    prompts, group = plan.group
    layout = choose_layout(group, most, plan.widths, plan.estimate.micro_batch, prompt_parts(plan.mesh))
    first = np.zeros((prompts, group), bool)
    first[:most] = True
    packed = pack(plan.lengths[1].astype(np.int32), first, plan.widths[1], layout, most)
    config = plan.model.config
    if not plan.config.rollout.routing_replay or config.experts is None:
        return packed
    layers = sum(map(config.has_experts, range(config.num_layers)))
    ids = np.empty((), config.experts.index_dtype), (layers, config.experts.per_token)
    places = (*packed.length.shape[:4], plan.widths[1]), (*packed.prompts.shape, plan.widths[0])
    experts, of_prompts = (np.broadcast_to(ids[0], (*place, *ids[1])) for place in places)
    return packed._replace(experts=experts, prompt_experts=of_prompts)


def _batch(plan: Plan) -> GroupBatch:
    """Returns a rollout batch with shapes instead of arrays."""
    prompts, group = plan.group
    width, steps = plan.widths

    def shape(*axes: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(axes, dtype)

    batch = GroupBatch(
        prompt_tokens=shape(prompts, width),
        prompt_lengths=shape(prompts),
        completion_tokens=shape(prompts, group, steps),
        completion_lengths=shape(prompts, group),
        rollout_logprobs=shape(prompts, group, steps, dtype=jnp.float32),
        rewards=shape(prompts, group, dtype=jnp.float32),
        scored=shape(prompts, group, dtype=jnp.bool_),
        trained=shape(prompts, group, dtype=jnp.bool_),
        estimator_ids=shape(prompts),
        token_mask=shape(prompts, group, steps, dtype=jnp.bool_),
        segment_start=shape(prompts, group, steps) if plan.config.environment.history == "template" else None,
    )
    return replicated_shapes(batch, plan.mesh)


def _taught_batch(plan: Plan) -> GroupBatch:
    """Returns the shapes of a batch with the prompts of the teacher."""
    width = plan.config.teacher.max_prompt_length or plan.widths[0]
    tokens = replicated_shapes(jax.ShapeDtypeStruct((plan.group[0], width), jnp.int32), plan.mesh)
    return _batch(plan)._replace(prompt_tokens=tokens)


def _step_inputs(plan: Plan, objective: Any, packed: Packed) -> StepInputs:
    batch = _batch(plan)
    in_update = replicated_shapes(jax.ShapeDtypeStruct(plan.group[:1], jnp.bool_), plan.mesh)
    if isinstance(objective, ValueObjective):
        values = batch.rollout_logprobs
        packed = packed._replace(experts=None, prompt_experts=None)
        return StepInputs(
            batch._replace(rollout_logprobs=None),
            in_update,
            packed_shapes(packed, plan.mesh),
            values,
            token_advantages=values,
        )
    old = batch.rollout_logprobs if updates_per_batch(plan.config) > 1 else None
    ref = batch.rollout_logprobs if objective.reference_in_loss else None
    by_token = batch.rollout_logprobs if objective.gives_token_advantages else None
    teacher = None
    if objective.teacher_in_loss is not None:
        taught = _taught_batch(plan)
        params = None if plan.config.teacher.of_policy else plan.taught_by[1]
        teacher = TeacherInputs(params, taught.prompt_tokens, taught.prompt_lengths)
    scheduled = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), objective.scheduled(1))
    scheduled = replicated_shapes(scheduled, plan.mesh)
    return StepInputs(batch, in_update, packed_shapes(packed, plan.mesh), old, ref, by_token, teacher, scheduled)


def _slots(plan: Plan) -> tuple[int, int]:
    """Returns the number of slots of the sampler, and the number of completions per slot."""
    return slot_shape(*plan.group, plan.estimate.rows, *plan.widths, prompt_parts(plan.sampling_mesh))


def _prompt_inputs(plan: Plan, prompts: int) -> tuple[Any, Any]:
    inputs = jax.ShapeDtypeStruct((prompts, plan.widths[0]), jnp.int32), jax.ShapeDtypeStruct((prompts,), jnp.int32)
    return slot_shapes(inputs, plan.sampling_mesh)


def reshard_program(plan: Plan) -> Program | None:
    """Describes the program that converts the weights for sampling; a single device mostly needs none."""
    if not plan.lays_out:
        return None
    graphdef, params = plan.split
    dequantizes = plan.estimate.dequantizes
    if plan.sampling_mesh is None:
        lower = functools.partial(dequantized_kernels.lower, graphdef, params)
    else:
        place = jit_place(graphdef, params, plan.sampling_mesh, dequantizes)
        lower = functools.partial(place.lower, graphdef, params, dequantizes)
    return Program("reshard", lower, plan.mesh, 0.0, held_bytes(params) + held_bytes(plan.sampled[1]), 1, {})


def prefill_program(plan: Plan) -> Program:
    """Describes the program that prefills the first prompts of a step (`rollout/schedule.py`)."""
    shape = _slots(plan)
    prompts = prefilled_prompts(shape, *plan.group)
    if prompts < shape[0]:  # the sampler pads the prompts to a multiple of the shards
        prompts += -prompts % prompt_parts(plan.sampling_mesh)
    lower = functools.partial(
        decoding.prefill.lower,
        *plan.sampled,
        *_prompt_inputs(plan, prompts),
        record=plan.config.rollout.routing_replay,
    )
    calls = math.ceil(plan.group[0] / prompts)
    needed = prefill_bytes(plan.sampled_model, plan.sampling_mesh, plan.group[0], plan.widths[0], calls)
    return Program("prefill", lower, plan.sampling_mesh, _prompt_operations(plan), needed, calls, _block_trips(plan))


def _prompt_operations(plan: Plan) -> float:
    first = np.ones((plan.group[0], 1), np.int32)  # a prompt predicts one token
    return forward_operations(plan.model.config, plan.lengths[0], first)


def decode_program(plan: Plan) -> Program:
    """Describes the decoding program (`rollout/sampler.py`) with all completions active and a cache of full size."""
    graphdef, params = plan.sampled
    prompts, group = plan.group
    steps = plan.widths[1]
    slots, size = _slots(plan)
    rollout = plan.config.rollout
    record = plan.config.rollout.routing_replay
    prefill = functools.partial(decoding.prefill, graphdef, record=record)
    made = jax.eval_shape(prefill, params, *_prompt_inputs(plan, slots))
    made = slot_shapes(made, plan.sampling_mesh)
    words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape[-1]
    empty = functools.partial(decoding.empty_rows, size=size, max_tokens=steps, room=steps, key_words=words)
    rows = slot_shapes(jax.eval_shape(empty, made), plan.sampling_mesh)
    sampling = SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k)
    ends = tuple(rollout.eos_tokens or (0,))
    lower = functools.partial(decoding.advance.lower, graphdef, params, made, rows, np.int32(0), sampling, ends)
    operations = forward_operations(plan.model.config, *plan.lengths) - _prompt_operations(plan)
    rounds = math.ceil(prompts * group / (slots * size))
    needed = decode_bytes(plan.sampled_model, plan.sampling_mesh, plan.group, plan.widths, rounds)
    rollout_phase = plan.phase("rollout")
    weights = {} if plan.lays_out else {"weights": rollout_phase.parts["weights"]}
    phase = Phase("decode", weights | rollout_phase.decode)
    trips = {decoding.TOKENS: float(steps * rounds), ROUNDS: 1.0}
    return Program("decode", lower, plan.sampling_mesh, operations, needed, 1, trips, phase, decoding.TOKENS)


def programs_of(plan: Plan) -> list[Program]:
    """Describes all programs of a run, in the order of the report."""
    found = (
        update_program,
        critic_program,
        logprobs_program,
        values_program,
        teacher_program,
        reshard_program,
        prefill_program,
        decode_program,
    )
    return [program for describe in found if (program := describe(plan)) is not None]
