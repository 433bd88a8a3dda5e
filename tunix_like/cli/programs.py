"""The command `doctor --config`: compiles the programs of a run for devices that this machine does not have.

It reports the memory, the network traffic and the predicted times of the programs.
The compiler of the devices is used if it is installed (XLA:TPU comes with `libtpu`, XLA:GPU with a CUDA plugin).
Otherwise the CPU compiler is used, for the same number of simulated devices.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from tunix_like.config.schema import Config
from tunix_like.errors import NotSaved, UserError, one_line
from tunix_like.models.sharding import scope
from tunix_like.runs.describe import describe_devices, describe_model
from tunix_like.runs.programs import Plan, Program, make_plan, programs_of
from tunix_like.runtime import accelerators, console
from tunix_like.runtime.accelerators import Accelerator
from tunix_like.runtime.compiled_costs import Costs, Counter
from tunix_like.runtime.time_model import Times, times
from tunix_like.training.device import Device, usable_share
from tunix_like.training.phases import amount

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
      arguments: bytes of all inputs.
      temporaries: bytes of temporary buffers, and of outputs that are not aliased to an input.
      seconds: time of the compilation.
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
        are simulated. Costs for simulated devices come from the CPU compiler and are not valid for the real devices."""
        if target.kind is None or target.described is None or self.refusal:
            return None
        return times(self.costs, self.program.operations / target.number, target.kind, target.number)


def pretend(number: int) -> None:
    """Sets the number of simulated CPU devices. Must be called before jax initialises the CPU backend.

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


def find_target(text: str) -> Target:
    """Parses `text`, the value of `--devices`, and finds a compiler for these devices. If no such compiler can be used,
    simulates the devices on the CPU.

    Raises:
      UserError: `text` is invalid, or jax already runs with another number of CPU devices.
    """
    kind, number = accelerators.parse_devices(text)
    if kind is not None:
        name, reason = accelerators.compiler_of(kind), "it is not installed"
        if name is not None:
            try:
                return Target(text, kind, number, accelerators.described_devices(kind, number), name)
            except Exception as error:  # a plugin that does not suit this machine or jax can raise anything
                reason = one_line(error)
        console.print_text(
            f"the compiler of {kind.name} cannot be used ({reason}); install it with "
            f"pip install {accelerators.EXTRAS[kind.backend]}. The programs are compiled for simulated CPU devices."
        )
    pretend(number)
    return Target(text, kind, number, None, f"XLA:CPU (jax {jax.__version__}), a simulation")


def check_size(plan: Plan, target: Target) -> None:
    """Raises UserError if the estimated weights, gradients and optimizer state exceed `FAR` times the device memory."""
    kind, fixed = target.kind, max(phase.fixed for phase in plan.estimate.phases)
    if kind is None or fixed <= FAR * kind.memory:
        return
    more = accelerators.at_least(kind, target.number * fixed / (usable_share(kind.backend) * kind.memory))
    same = [
        accelerators.at_least(other, target.number)
        for other in accelerators.KINDS.values()
        if fixed <= usable_share(other.backend) * other.memory
    ]
    fits = [name for name in (more, *same) if name is not None]
    raise UserError(
        f"--devices {target.devices}: weights, gradients and optimizer need about {amount(fixed)} per device; a device "
        f"has {amount(kind.memory)}. By estimate {' or '.join(fits) or 'only a smaller model'} would fit."
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
    seconds, memory = time.perf_counter() - start, compiled.memory_analysis()
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
    device = None if kind is None else Device(kind.backend, kind.memory)
    plan = make_plan(config, device, target.described)
    check_size(plan, target)
    mesh, dtype = describe_devices(plan.mesh), plan.model.dtype
    console.print_text(f"{devices}: {mesh}; {amount(plan.device.memory)} per device; {dtype} matrix products")
    if plan.sampling_mesh is not None:
        console.print_text(f"while sampling: {describe_devices(plan.sampling_mesh)}")
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
    for line in notes_of(done, target):
        console.print_text(line)
    if file is not None:
        write_json(Path(file), done, target)
    simulated = target.kind is not None and target.described is None
    return int(
        any(compiled.refusal or too_large(compiled, target) for compiled in done)
        or (simulated and bool(plan.estimate.problems()))
    )


def too_large(compiled: Compiled, target: Target) -> bool:
    """Returns whether a program needs more memory than a device has; False if the devices are simulated.

    The GPU compiler also compiles programs that need too much memory, so this function compares the memory.
    """
    return target.kind is not None and target.described is not None and compiled.bytes > target.kind.memory


def rows_of(done: Sequence[Compiled], target: Target) -> list[tuple[str, ...]]:
    """Returns the rows of a table with one column per program: memory, collectives and operations of a training step,
    and times."""
    kinds = sorted({kind for compiled in done for kind in compiled.costs.collectives})
    found = [compiled.times(target) for compiled in done]

    def row(name: str, cells: list[str]) -> tuple[str, ...]:
        return (name, *((compiled.refusal and "-") or cell for compiled, cell in zip(done, cells, strict=True)))

    def sent(costs: Costs, kind: str) -> str:
        if not costs.numbers.get(kind):
            return "-"
        return f"{amount(costs.collectives[kind])} ({costs.numbers[kind]:,.0f})"

    estimates = [compiled.program.estimate for compiled in done]
    needed = [compiled.program.operations / target.number for compiled in done]
    rows = [
        row("arguments", [amount(compiled.arguments) for compiled in done]),
        row("temporaries", [amount(compiled.temporaries) for compiled in done]),
        ("sum", *(_sum(compiled, target) for compiled in done)),
        ("estimated (memory.py)", *("-" if phase is None else amount(phase.bytes) for phase in estimates)),
        *(row(f"{kind} a step (number)", [sent(compiled.costs, kind) for compiled in done]) for kind in kinds),
        row("network a token", ["-" if c.token is None else amount(c.token.network_bytes) for c in done]),
        row("operations needed a step", [f"{number:.3g}" for number in needed]),
        row("operations compiled a step", [f"{compiled.costs.operations:.3g}" for compiled in done]),
    ]
    if any(compiled.costs.kernels for compiled in done):
        rows.append(row("kernels a step", [f"{compiled.costs.kernels:,.0f}" for compiled in done]))
    if any(found):
        rows.append(row("memory traffic a step", [amount(compiled.costs.memory_bytes) for compiled in done]))
        rows += [row(f"time by {name}", [_seconds(each, name) for each in found]) for name in Times._fields]
        rows += [
            row("bound", ["-" if each is None else f"{each.bound} ({each.share:.0%})" for each in found]),
            row("predicted time of a step", [_seconds(each, "predicted") for each in found]),
        ]
    rows.append(("seconds to compile", *(f"{compiled.seconds:.1f}" for compiled in done)))
    return rows


def _sum(compiled: Compiled, target: Target) -> str:
    if compiled.refusal:
        return compiled.refusal
    if too_large(compiled, target) and target.kind is not None:
        return f"does not fit: used {amount(compiled.bytes)} of {amount(target.kind.memory)}"
    return amount(compiled.bytes)


def _seconds(found: Times | None, name: str) -> str:
    value = None if found is None else getattr(found, name)
    if value is None:
        return "-"
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def notes_of(done: Sequence[Compiled], target: Target) -> list[str]:
    """Returns the notes that explain the table of memory, costs and times."""
    lines = [
        "step: all completions have full length. Operations needed: arithmetic without recomputation and padding. "
        "Operations compiled: the matrix products of the compiled program, without those inside kernels.",
        "collectives: the bytes that a device receives; a device sends as many.",
    ]
    if target.described is None:
        lines.append(
            "temporaries: values of the CPU backend, which computes bfloat16 in float32 and undoes rematerialisation. "
            "They are an upper bound for TPU and GPU. No times are predicted from a simulation."
        )
    else:
        lines.append(
            "times: arithmetic, memory and network are each computed alone, at the peak rate of the data sheet. Cycles "
            "are the estimate of the compiler, without collectives and kernels; a program with kernels takes longer. "
            "The predicted time is the largest of these times. It assumes that network and device work at the same "
            "time. The percentage is the predicted time divided by the time without this overlap."
        )
    if names := sorted({name for compiled in done for name in compiled.unknown}):
        lines.append(f"loops whose number of iterations depends on data, counted as one iteration: {', '.join(names)}")
    return lines


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
    program, found, fits = compiled.program, compiled.times(target), compiled.refusal is None
    costs = compiled.costs if fits else None
    return {
        "name": program.name,
        "compile_seconds": compiled.seconds,
        "argument_bytes": compiled.arguments if fits else None,
        "temporary_bytes": compiled.temporaries if fits else None,
        "estimated_bytes": None if program.estimate is None else program.estimate.bytes,
        "collective_bytes": None if costs is None else costs.network_bytes,
        **({} if program.token_loop is None else {"collective_bytes_per_token": _per_token(compiled)}),
        "flops": None if costs is None else costs.operations,
        "hbm_bytes": costs.memory_bytes if costs is not None and found is not None else None,
        "cycles": costs.cycles if costs is not None and costs.cycles else None,
        "predicted_seconds": None if found is None else found.predicted,
        "error": _sum(compiled, target) if not fits or too_large(compiled, target) else None,
    }


def _per_token(compiled: Compiled) -> float | None:
    return None if compiled.token is None else compiled.token.network_bytes
