"""Compiles the programs of a run for devices that this machine need not have, and reports memory, network traffic and
predicted times (`doctor --config`).

The compiler of the devices is used if it is installed (XLA:TPU comes with `libtpu`, XLA:GPU with a CUDA plugin).
Otherwise the CPU compiler is used, for the same number of simulated devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from tunix_like.compile.costs import BETWEEN_SLICES, KERNEL_BANDWIDTH, Costs, Counter, Times, times
from tunix_like.compile.devices import EXTRAS, at_least, compiler_of, described_devices, parse_devices
from tunix_like.compile.programs import Plan, Program, make_plan, programs_of
from tunix_like.config.schema import Config
from tunix_like.errors import NotSaved, UserError, one_line
from tunix_like.models.sharding import scope
from tunix_like.planning.bounds import PEAK, TYPICAL, bound_seconds
from tunix_like.planning.memory import amount
from tunix_like.planning.sizes import Device
from tunix_like.runs.describe import describe_devices, describe_model
from tunix_like.runtime import console
from tunix_like.runtime.accelerators import KINDS, Accelerator

FAR = 1.25
"""Programs are not compiled if the estimated memory of weights, gradients and optimizer state exceeds this multiple of
the memory of a device."""

_OUT_OF_MEMORY = re.compile(r"Used ([\d.]+\w) of ([\d.]+\w)|\(([\d.]+\w)\) exceeds available \w+ \(([\d.]+\w)\)")
"""Matches both forms of the compiler message for programs that do not fit into memory. The groups of each form are the
required and the available memory."""


@dataclasses.dataclass(frozen=True)
class Target:
    """The devices that programs are compiled for.

    Attributes:
      devices: the value of `--devices`.
      kind: the kind of accelerator; None for the CPU of this host.
      number: number of devices.
      described: jax device objects for compilation only, which need no hardware; None if the devices are simulated on
        the CPU.
      compiler: name and version of the compiler.
    """

    devices: str
    kind: Accelerator | None
    number: int
    described: Sequence[Any] | None
    compiler: str


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program. Bytes and operations are per device.

    Attributes:
      seconds: time of the compilation.
      arguments: bytes of all inputs.
      temporaries: bytes of temporary buffers, and of outputs that are not aliased to an input.
      costs: costs of all calls of this program in one training step.
      token: costs of one iteration of the loop over tokens; None if the program has no such loop.
      unknown: loops whose number of iterations is an input of the program; `costs` counts one iteration of each.
      refusal: the compiler's message that the program does not fit into memory; all costs are then 0. None if the
        program was compiled.
    """

    program: Program
    seconds: float
    arguments: int = 0
    temporaries: int = 0
    costs: Costs = dataclasses.field(default_factory=Costs)
    token: Costs | None = None
    unknown: frozenset[str] = frozenset()
    refusal: str | None = None

    @property
    def bytes(self) -> int:
        return self.arguments + self.temporaries

    def times(self, target: Target) -> Times | None:
        """Returns the predicted times of a training step; None if the program does not fit into memory or the devices
        are simulated: the costs of the CPU compiler are not those of the real devices."""
        if target.kind is None or target.described is None or self.refusal:
            return None
        return times(self.costs, self.program.operations / target.number, target.kind, target.number)

    def bound(self, target: Target, shares: tuple[float, float] = PEAK) -> float | None:
        """Returns the lower bound of the seconds of a training step, at `shares` of the peak arithmetic and memory
        bandwidth; None if there are no predicted times."""
        if target.kind is None or self.times(target) is None:
            return None
        return bound_seconds(self.program.operations / target.number, self.program.needed_bytes, target.kind, shares)

    def problem(self, target: Target) -> str | None:
        """Returns why the program does not fit into a device; None if it fits or the devices are simulated. The GPU
        compiler also compiles programs that need too much memory."""
        kind = target.kind
        if self.refusal or kind is None or target.described is None or self.bytes <= kind.memory:
            return self.refusal
        return f"does not fit: used {amount(self.bytes)} of {amount(kind.memory)}"


def pretend(number: int) -> None:
    """Sets the number of simulated CPU devices. Must be called before jax initialises the CPU backend.

    Raises:
      UserError: jax has initialised the backend with another number of devices.
    """
    with contextlib.suppress(RuntimeError):  # the backend is initialised, possibly with the same number of devices
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", number)
    if len(jax.devices()) != number:
        raise UserError(f"--devices: jax runs with {len(jax.devices())} devices already; {number} need a new process.")


def find_target(text: str) -> Target:
    """Parses `text`, the value of `--devices`, and finds a compiler for these devices. If no such compiler can be used,
    simulates the devices on the CPU.

    Raises:
      UserError: `text` is invalid, or jax already runs with another number of CPU devices.
    """
    kind, number, slices = parse_devices(text)
    if kind is not None:
        name = compiler_of(kind)
        reason = "it is not installed"
        if name is not None:
            try:
                return Target(text, kind, number, described_devices(kind, number, slices), name)
            except Exception as error:  # a plugin that does not suit this machine or jax can raise anything
                reason = one_line(error)
        if slices > 1:
            raise UserError(
                f"--devices {text}: the compiler of {kind.name} cannot be used ({reason}), and simulated CPU devices "
                f"have no slices; install it with pip install {EXTRAS[kind.backend]}."
            )
        console.print_text(
            f"the compiler of {kind.name} cannot be used ({reason}); install it with "
            f"pip install {EXTRAS[kind.backend]}. The programs are compiled for simulated CPU devices."
        )
    pretend(number)
    return Target(text, kind, number, None, f"XLA:CPU (jax {jax.__version__}), a simulation")


def check_size(plan: Plan, target: Target) -> None:
    """Raises UserError if the estimated weights, gradients and optimizer state exceed `FAR` times the device memory."""
    kind = target.kind
    fixed = max(phase.fixed for phase in plan.estimate.phases)
    if kind is None or fixed <= FAR * kind.memory:
        return

    def usable(other: Accelerator) -> float:
        return Device(other.backend, other.memory).usable

    fits = [at_least(kind, target.number * fixed / usable(kind))]
    fits += [at_least(other, target.number) for other in KINDS.values() if fixed <= usable(other)]
    names = " or ".join(filter(None, fits)) or "only a smaller model"
    raise UserError(
        f"--devices {target.devices}: weights, gradients and optimizer need about {amount(fixed)} per device; a device "
        f"has {amount(kind.memory)}. By estimate {names} would fit."
    )


def compile_program(program: Program) -> Compiled:
    """Compiles a program. Returns its memory, its costs and the time of compilation."""
    start = time.perf_counter()
    try:
        with scope(program.mesh):
            compiled = program.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "HbmOom" not in str(error) and "Ran out of memory" not in str(error):
            raise  # an error that does not concern memory
        return Compiled(program, time.perf_counter() - start, refusal=refusal_of(str(error)))
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    temporaries = memory.temp_size_in_bytes + max(0, memory.output_size_in_bytes - memory.alias_size_in_bytes)
    counter = Counter(compiled.as_text(), program.trips)
    step = Costs()
    step.add(counter.total(), program.calls)
    token = None if program.token_loop is None else counter.one_trip(program.token_loop)
    unknown = frozenset(counter.unknown)
    return Compiled(program, seconds, memory.argument_size_in_bytes, temporaries, step, token, unknown)


def refusal_of(message: str) -> str:
    """Shortens the out-of-memory message of a compiler to the amounts of used and available memory."""
    used = _OUT_OF_MEMORY.search(message)
    if used is None:
        return "does not fit"
    return f"does not fit: used {used[1] or used[3]} of {used[2] or used[4]}"


def print_report(config: Config, devices: str, file: str | None = None) -> int:
    """Compiles the programs of a config for `devices`. Prints the memory, the network traffic and the predicted times
    of the programs.

    Args:
      file: JSON file to which the report is also written; None writes no file.

    Returns:
      the exit status: 1 if a program does not fit into the memory of a device, else 0. If the devices are simulated,
        the status is also 1 if the estimated memory exceeds the memory of a device.

    Raises:
      UserError: `config` or `devices` is invalid, the model is much too large for the devices, or the folder of `file`
        does not exist.
      NotSaved: the file cannot be written.
    """
    if file is not None and not Path(file).resolve().parent.is_dir():
        raise UserError(f"--json {file}: the folder {Path(file).resolve().parent} does not exist; create it.")
    target = find_target(devices)
    kind = target.kind
    device = None if kind is None else Device(kind.backend, kind.memory, kind)
    plan = make_plan(config, device, target.described)
    check_size(plan, target)
    mesh = describe_devices(plan.mesh)
    dtype = plan.model.dtype
    console.print_text(f"{devices}: {mesh}; {amount(plan.device.memory)} per device; {dtype} matrix products")
    model = f"{describe_model(plan.model)}, {plan.config.model.path or 'inline'}"
    console.print_text(f"{model}; attention {plan.model.attention}")
    for name, value in plan.estimate.lines():
        console.print_text(f"{name:>10}: {value}")
    programs = programs_of(plan)
    names = ", ".join(program.name for program in programs)
    console.print_text(f"compiling with {target.compiler}: {names}; a large model takes minutes")
    done = []
    for program in programs:
        done.append(compile_program(program))
        console.print_text(f"{program.name:>10}: {done[-1].refusal or 'compiled'}, {done[-1].seconds:.1f} s")
    columns = ("per device", *(compiled.program.name for compiled in done))
    console.table(f"compiled for {devices} with {target.compiler}", columns, rows_of(done, target))
    for line in notes_of(done, target, plan.config):
        console.print_text(line)
    if file is not None:
        write_json(Path(file), done, target)
    simulated = target.kind is not None and target.described is None
    too_large = any(compiled.problem(target) for compiled in done)
    return int(too_large or (simulated and bool(plan.estimate.problems())))


def rows_of(done: Sequence[Compiled], target: Target) -> list[tuple[str, ...]]:
    """Returns the rows of a table with one column per program: memory, collectives and operations of a training step,
    and times."""
    kinds = sorted({kind for compiled in done for kind in compiled.costs.collectives})
    predicted = {compiled.program.name: compiled.times(target) for compiled in done}

    def row(name: str, cell: Callable[[Compiled], str]) -> tuple[str, ...]:
        return (name, *("-" if compiled.refusal else cell(compiled) for compiled in done))

    def sent(compiled: Compiled, kind: str) -> str:
        number = compiled.costs.numbers.get(kind)
        return f"{amount(compiled.costs.collectives[kind])} ({number:,.0f})" if number else "-"

    def seconds(compiled: Compiled, name: str) -> str:
        return duration(getattr(predicted[compiled.program.name], name, None))

    def limit(compiled: Compiled) -> str:
        found = predicted[compiled.program.name]
        return "-" if found is None else f"{found.limit} ({found.share:.0%})"

    def of_the_bound(compiled: Compiled) -> str:
        found = predicted[compiled.program.name]
        bound = compiled.bound(target)
        return "-" if found is None or bound is None else f"{bound / found.predicted:.0%}"

    def duration(value: float | None) -> str:
        return "-" if value is None else f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"

    estimates = [compiled.program.estimate for compiled in done]
    rows = [
        row("arguments", lambda each: amount(each.arguments)),
        row("temporaries", lambda each: amount(each.temporaries)),
        ("sum", *(compiled.problem(target) or amount(compiled.bytes) for compiled in done)),
        ("estimated (memory.py)", *("-" if phase is None else amount(phase.bytes) for phase in estimates)),
        *(row(f"{kind} a step (number)", functools.partial(sent, kind=kind)) for kind in kinds),
        row("network a token", lambda each: "-" if each.token is None else amount(each.token.network_bytes)),
        row("operations needed a step", lambda each: f"{each.program.operations / target.number:.3g}"),
        row("operations compiled a step", lambda each: f"{each.costs.operations:.3g}"),
    ]
    if any(compiled.costs.kernels for compiled in done):
        rows.append(row("kernels a step", lambda each: f"{each.costs.kernels:,.0f}"))
    rows.append(row("bytes needed a step", lambda each: amount(each.program.needed_bytes)))
    if any(predicted.values()):
        rows += [
            row("memory traffic a step", lambda each: amount(each.costs.memory_bytes)),
            *(row(f"time by {name}", functools.partial(seconds, name=name)) for name in Times._fields),
            row("limited by", limit),
            row("predicted time of a step", functools.partial(seconds, name="predicted")),
            row("bound of a step", lambda each: duration(each.bound(target))),
            row("of the bound", of_the_bound),
        ]
    rows.append(("seconds to compile", *(f"{compiled.seconds:.1f}" for compiled in done)))
    return rows


def notes_of(done: Sequence[Compiled], target: Target, config: Config) -> list[str]:
    """Returns the notes that explain the table of memory, costs and times, and the time of the whole run."""
    lines = [
        "step: all completions have full length. Operations needed: arithmetic without recomputation and padding. "
        "Operations compiled: the matrix products of the compiled program, without those inside kernels.",
        "collectives: the bytes that a device receives; a device sends as many.",
        "bytes needed: what a device must read and write. Decoding: its weights once per token, in the compute dtype "
        "or quantised; keys and values of the filled positions, on average half of those of a full completion; those "
        "of a prompt once per group. Update: its weights twice, and the trained weights with their moments in and out. "
        "Activations and logits are not counted.",
    ]
    if any(kind.endswith(BETWEEN_SLICES) for each in done for kind in each.costs.collectives):
        lines.append(
            "collectives between slices: the bytes that a device receives over the network of the hosts; the predicted "
            "times do not contain them."
        )
    seconds = _sum(found and found.predicted for found in (each.times(target) for each in done))
    if (steps := config.training.max_steps) is not None and seconds is not None:
        lines.append(
            f"training.max_steps: {steps} steps x {seconds:.3g} s = {steps * seconds / 3600:.2g} hours, the sum of the "
            "predicted times above, without rewards, environments, evaluations and checkpoints."
        )
    if target.described is None:
        lines.append(
            "temporaries: values of the CPU backend, which computes bfloat16 in float32 and undoes rematerialisation. "
            "They are an upper bound for TPU and GPU. No times are predicted from a simulation."
        )
    else:
        lines.append(
            "times: arithmetic, memory and network are each computed alone, at the peak rate of the data sheet. Cycles "
            "are the estimate of the compiler without collectives, plus the time of kernels (Pallas, cuDNN), for which "
            f"the compiler has no cycles: their bytes at {KERNEL_BANDWIDTH:.0%} of the bandwidth. The predicted time "
            "is the largest of these times, if network and device work at the same time. The percentage is "
            "the predicted time divided by the time without this overlap."
        )
    least, best, worst = (_sum(each.bound(target, shares) for each in done) for shares in (PEAK, *TYPICAL))
    if least is not None:
        (arithmetic, bandwidth), (low, slow) = TYPICAL
        lines.append(
            "bound: the operations or the bytes needed at the peak rates, whichever take longer; of the bound: the "
            f"bound divided by the predicted time. The bound of the whole step is {least:.3g} s; typical are "
            f"{best:.3g} to {worst:.3g} s, at {low:.0%} to {arithmetic:.0%} of the peak arithmetic and {slow:.0%} to "
            f"{bandwidth:.0%} of the bandwidth, which other libraries reach by published measurements."
        )
    if names := sorted({name for compiled in done for name in compiled.unknown}):
        lines.append(f"loops whose number of iterations depends on data, counted as one iteration: {', '.join(names)}")
    return lines


def _sum(values: Iterable[float | None]) -> float | None:
    """Returns the sum of numbers; None if one of them is None."""
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def write_json(file: Path, done: Sequence[Compiled], target: Target) -> None:
    """Writes memory, costs and predicted times of the compiled programs as JSON; unavailable values are null. Raises
    NotSaved if the file cannot be written."""
    content = {
        "devices": target.devices,
        "compiler": target.compiler,
        "programs": [_as_json(compiled, target) for compiled in done],
    }
    try:
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise NotSaved(f"--json {file}: {one_line(error)}") from error


def _as_json(compiled: Compiled, target: Target) -> dict[str, Any]:
    program = compiled.program
    costs = compiled.costs
    token = compiled.token
    found = compiled.times(target)
    known = {
        "argument_bytes": compiled.arguments,
        "temporary_bytes": compiled.temporaries,
        "collective_bytes": costs.network_bytes,
        "flops": costs.operations,
        "needed_bytes": program.needed_bytes,
        "hbm_bytes": None if found is None else costs.memory_bytes,
        "cycles": costs.cycles or None,
        "predicted_seconds": None if found is None else found.predicted,
        "bound_seconds": compiled.bound(target),
        "typical_seconds": None if found is None else [compiled.bound(target, shares) for shares in TYPICAL],
    }
    per_token = {"collective_bytes_per_token": None if token is None else token.network_bytes}
    return {
        "name": program.name,
        "compile_seconds": compiled.seconds,
        "estimated_bytes": None if program.estimate is None else program.estimate.bytes,
        **(dict.fromkeys(known) if compiled.refusal else known),
        **({} if program.token_loop is None else per_token),
        "error": compiled.problem(target),
    }
