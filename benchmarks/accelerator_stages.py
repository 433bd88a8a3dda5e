"""The stages of `benchmarks.accelerator`, each run in a separate process: `STAGE SIZE DIR`.

The results of a stage are appended to `DIR/STAGE.jsonl` as soon as they are known, so that a stage that is stopped at
its limit keeps what it has measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib.metadata
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import ours
from benchmarks.accelerator import merged
from benchmarks.cases import MODELS, Case, Model, floating_operations
from benchmarks.worker import Finished, Gate, median
from tunix_like import load_model
from tunix_like.cli.common import setup_jax
from tunix_like.compile import programs
from tunix_like.compile.report import Target, compile_program
from tunix_like.config.load import load
from tunix_like.models.counts import parameter_count
from tunix_like.planning.sizes import this_device
from tunix_like.runtime.accelerators import KINDS, Accelerator, known_name

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")


@dataclasses.dataclass(frozen=True)
class Size:
    """What the stages compute.

    Attributes:
      case: the batch of the update and of the whole step; decoding has half of its prompts and of its tokens.
      small: the batch of parity and memory.
      matmul: rows of the square matrices whose product is timed.
      copied: bytes of the array that is copied.
    """

    case: Case
    small: Case
    matmul: int
    copied: int


def _size(model: Model, case: Mapping[str, int], small: Mapping[str, int], matmul: int, copied: int) -> Size:
    def made(sizes: Mapping[str, int]) -> Case:
        return Case(model, "update", **dict(sizes))

    return Size(made(case), made(small), matmul, copied)


SIZES = {
    "tiny": _size(
        Model(layers=1, width=64, inner=128, heads=2, kv_heads=1, head=32, vocab=512),
        {"prompts": 2, "group": 4, "prompt_length": 16, "length": 24},
        {"prompts": 2, "group": 2, "prompt_length": 16, "length": 16},
        256,
        1 << 22,
    ),
    "qwen3_0.6b": _size(
        MODELS["qwen3_0.6b"],
        {"prompts": 32, "group": 16, "prompt_length": 256, "length": 1024},
        {"prompts": 16, "group": 8, "prompt_length": 256, "length": 256},
        8192,
        1 << 30,
    ),
}

Report = Callable[[Mapping[str, Any]], None]


class Repeats(Gate):
    """A gate in the same process. It lets a case run one repeat, which compiles, and `number` more, and keeps these."""

    def __init__(self, number: int) -> None:
        self._left, self._compilations, self.rows = number, list[float](), list[dict[str, Any]]()
        self.first: dict[str, Any] | None = None
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def begin(self) -> None:
        self._compilations.clear()
        self._started = time.perf_counter()

    def end(self, tokens: int, **more: Any) -> None:
        """Keeps a repeat. Raises `Finished` after the last one."""
        row = {"seconds": time.perf_counter() - self._started, "tokens": tokens, **more}
        row |= {"compile_seconds": sum(self._compilations), "programs": len(self._compilations)}
        if self.first is None:
            self.first = row
        else:
            self.rows.append(row)
        if len(self.rows) == self._left:
            raise Finished
        self.begin()


def repeats_of(case: Case, number: int) -> Repeats:
    """Runs a case; its weights are random."""
    gate = Repeats(number)
    with contextlib.suppress(Finished):
        ours.run_case(case, gate, None)
    gc.collect()  # the weights are kept for the next case in this process
    return gate


def kind_of(measured: Mapping[str, Any]) -> Accelerator:
    """Returns the peak values of this device: those of its data sheet, or those that the stage `machine` has
    measured."""
    name = jax.devices()[0].device_kind
    for kind in KINDS.values():
        if kind.jax_name == known_name(name):
            return kind
    if "matmul_operations" not in measured or "copy_bytes" not in measured:
        raise RuntimeError(f"{name} has no data sheet here, and the stage machine has measured nothing")
    memory = this_device().memory
    rates = measured["matmul_operations"], measured["copy_bytes"], measured["copy_bytes"]
    return Accelerator("measured", name, jax.default_backend(), memory, *rates)


def best_seconds(call: Callable[[Any], Any], value: Any, chained: int = 10, tries: int = 5) -> float:
    """Returns the seconds of one call, the best of some tries of several calls in a row."""
    value = jax.block_until_ready(call(value))
    found = []
    for _ in range(tries):
        start = time.perf_counter()
        for _ in range(chained):
            value = call(value)
        jax.block_until_ready(value)
        found.append((time.perf_counter() - start) / chained)
    return min(found)


def machine(size: Size, report: Report, out: Path) -> None:
    """Reports versions, devices, and the measured speed of a copy and of a product in bfloat16."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    device = jax.devices()[0]
    report({"versions": versions, "backend": jax.default_backend()})
    report({"device": device.device_kind, "devices": jax.device_count(), "memory": this_device().memory})
    array = jnp.ones(size.copied // 4, jnp.float32)
    seconds = best_seconds(jax.jit(lambda x: x + 1), array)
    report({"copy_bytes": 2 * array.nbytes / seconds})
    matrix = jnp.full((size.matmul, size.matmul), 1 / size.matmul, jnp.bfloat16)  # a matrix whose powers equal itself
    seconds = best_seconds(jax.jit(lambda x: x @ matrix), matrix)
    rate = 2.0 * size.matmul**3 / seconds
    report({"matmul_operations": rate})
    kind = kind_of({"matmul_operations": rate, "copy_bytes": 2 * array.nbytes / seconds})
    if kind.name in KINDS:
        found = merged(out / "machine.jsonl")
        report({"copy_share": found["copy_bytes"] / kind.memory_bytes, "matmul_share": rate / kind.operations})


def parity(size: Size, report: Report, out: Path) -> None:
    """Reports the errors of bfloat16, of the attention kernel and of the sampler against their references.

    Raises:
      RuntimeError: a part failed; the others are reported.
    """
    failed = []
    for part in (_logits, _attention, _logprobs, _gradients):
        name = part.__name__.strip("_")
        try:
            report({name: part(size.small)})
        except Exception as error:  # the other parts may still succeed
            failed.append(name)
            report({name: {"error": f"{type(error).__name__}: {error}"[:500]}})
    if failed:
        raise RuntimeError(f"parts that failed: {', '.join(failed)}")


def _logits(case: Case) -> dict[str, float]:
    """Compares logits in bfloat16 with those in float32, on the same random weights."""
    with jax.default_matmul_precision("highest"):
        exact = _logits_of(case, "float32", "plain")
    found = _logits_of(case, "bfloat16", "plain")
    first, second = (jax.nn.log_softmax(logits, axis=-1) for logits in (exact, found))
    divergence = float((jnp.exp(first) * (first - second)).sum(-1).mean())
    same = float((exact.argmax(-1) == found.argmax(-1)).mean())
    return {"relative": relative(found, exact), "kl": divergence, "same_first": same}


def _attention(case: Case) -> dict[str, Any]:
    """Compares logits with the attention of this device with those with plain attention, both in bfloat16."""
    name = programs.resolve_attention("auto", jnp.bfloat16, case.model.head)
    name = "blocked" if name == "auto" else name
    found, plain = _logits_of(case, "bfloat16", name), _logits_of(case, "bfloat16", "plain")
    return {"kind": name, "relative": relative(found, plain)}


def _logits_of(case: Case, dtype: str, attention: str) -> jax.Array:
    model, _ = load_model(case.model.hf_config(), init="random", dtype=dtype, attention=attention)
    graphdef, state = nnx.split(model)
    tokens = jnp.asarray(case.batch().prompts[:2])
    return jax.jit(lambda state, tokens: nnx.merge(graphdef, state)(tokens))(state, tokens)


def relative(found: jax.Array, exact: jax.Array) -> float:
    """Returns the root mean square of the difference over that of the deviation of the exact values."""
    return float(jnp.sqrt(((found - exact) ** 2).mean()) / exact.std())


def _logprobs(case: Case) -> dict[str, float]:
    """Compares the sampler's log-probabilities with the trainer's, in bfloat16."""
    row = repeats_of(dataclasses.replace(case, kind="step", dtype="bfloat16"), 1).rows[0]
    return {name: row[f"train/logprob_gap/{name}"] for name in ("mean", "max")}


def _gradients(case: Case) -> dict[str, float]:
    """Compares the norm of the gradient in bfloat16 with that in float32."""
    with jax.default_matmul_precision("highest"):
        exact = repeats_of(dataclasses.replace(case, dtype="float32"), 1).first["grad_norm"]
    found = repeats_of(dataclasses.replace(case, dtype="bfloat16"), 1).first["grad_norm"]
    return {"float32": exact, "bfloat16": found, "relative": abs(found - exact) / exact}


def plan_of(case: Case) -> programs.Plan:
    """Returns the plan of a run with a case's batch, on the devices of this machine."""
    overrides = [
        "model.init=random",
        f"model.config={case.model.hf_config()}",
        "data.name=maze",
        f"data.batch_size={case.prompts}",
        "algorithm.advantage_estimator=grpo",
        f"algorithm.num_generations={case.group}",
        f"rollout.max_prompt_length={case.prompt_length}",
        f"rollout.max_tokens_to_generate={case.length}",
        "optimizer.max_grad_norm=null",
        "training.max_steps=1",
    ]
    return programs.make_plan(load(None, overrides), this_device())


def predicted(case: Case, described: Callable[[programs.Plan], programs.Program], kind: Accelerator) -> dict[str, Any]:
    """Returns the time model's prediction for a program of a case and the memory that its compiler reports."""
    compiled = compile_program(described(plan_of(case)))
    times = compiled.times(Target(kind.name, kind, 1, jax.devices(), jax.__version__))
    found: dict[str, Any] = {"compiled_bytes": compiled.bytes, "compile_seconds": compiled.seconds}
    if times is None:
        return found | {"error": compiled.refusal}
    return found | {"predicted_seconds": times.predicted, "limit": times.limit, **_parts(times)}


def _parts(times: Any) -> dict[str, float]:
    return {f"by_{name}": value for name, value in times._asdict().items() if value is not None}


def timed(case: Case, report: Report, key: str) -> tuple[float, Repeats]:
    """Reports the repeats of a case; returns the median of `key` and the repeats."""
    gate = repeats_of(case, 2)
    assert gate.first is not None
    seconds = median([row[key] for row in gate.rows])
    report({"first_seconds": gate.first["seconds"], "compile_seconds": gate.first["compile_seconds"]})
    report({"seconds": seconds, "tokens_per_second": median([row["tokens"] for row in gate.rows]) / seconds})
    last = gate.rows[-1]
    names = ("predicted_mb", "measured_mb", "peak_mb")
    report({"memory": {name: last[name] for name in names if name in last}})
    return seconds, gate


def compare(report: Report, seconds: float, found: Mapping[str, Any]) -> None:
    """Reports a prediction together with the measured seconds."""
    ratio = {} if "predicted_seconds" not in found else {"over_predicted": seconds / found["predicted_seconds"]}
    report({"model": {**found, **ratio}})


def update(size: Size, report: Report, out: Path) -> None:
    """Reports the time of an update, with its share of the peak and the time model's prediction."""
    case, kind = size.case, kind_of(merged(out / "machine.jsonl"))
    seconds, _ = timed(case, report, "train/time/update")
    needed = floating_operations(case, case.batch().lengths)
    report({"peak": kind.name, "mfu": needed / seconds / kind.operations})
    compare(report, seconds, predicted(case, programs.update_program, kind))


def decode(size: Size, report: Report, out: Path) -> None:
    """Reports the time of a rollout, with its share of the memory's bandwidth and the time model's prediction.

    The share is the time to read the weights for every token, and the keys and values that are there, over the time.
    """
    # All rows have full length here. With a quarter of the tokens, three repeats stay within the stage's limit.
    shape = {"prompts": size.case.prompts // 2, "length": size.case.length // 2}
    case = dataclasses.replace(size.case, kind="rollout", **shape)
    kind = kind_of(merged(out / "machine.jsonl"))
    seconds, _ = timed(case, report, "seconds")
    needed = floating_operations(case, np.full(case.rows, float(case.length)))
    report({"peak": kind.name, "mfu": needed / seconds / kind.operations})
    report({"memory_share": decode_bytes(case) / kind.memory_bytes / seconds})
    compare(report, seconds, predicted(case, programs.decode_program, kind))


def decode_bytes(case: Case) -> float:
    """Returns the bytes that decoding has to read: per token the weights, each prompt's keys once, and own keys."""
    model, size = plan_of(case).model, jnp.dtype(ours.default_dtype()).itemsize
    position = 2 * size * case.model.layers * case.model.kv_heads * case.model.head
    positions = case.prompts * case.prompt_length + case.rows * (case.length + 1) / 2
    return case.length * (parameter_count(model.config) * size + positions * position)


def step(size: Size, report: Report, out: Path) -> None:
    """Reports the time of a whole training step with completions that end at random, and its parts."""
    case = dataclasses.replace(size.case, kind="step", spread=True)
    kind = kind_of(merged(out / "machine.jsonl"))
    seconds, gate = timed(case, report, "seconds")
    last = gate.rows[-1]
    report({"parts": {name.removeprefix("train/"): last[name] for name in last if name.startswith("train/")}})
    needed = floating_operations(case, np.full(case.rows, last["tokens"] / case.rows))
    report({"peak": kind.name, "mfu": needed / seconds / kind.operations})


def memory(size: Size, report: Report, out: Path) -> None:
    """Reports the measured peak of decoding and of an update, with the estimate and the compiler's value.

    The rollout is first, because the device keeps one maximum of its use, and an update needs more.
    """
    kind = kind_of(merged(out / "machine.jsonl"))
    plan = plan_of(size.small)
    report({"estimate": {phase.name: phase.bytes for phase in plan.estimate.phases}})
    for name, which, described in (
        ("decode", "rollout", programs.decode_program),
        ("update", "update", programs.update_program),
    ):
        last = repeats_of(dataclasses.replace(size.small, kind=which), 2).rows[-1]
        found = {key: last[key] for key in ("measured_mb", "predicted_mb", "peak_mb") if key in last}
        if "measured_mb" in found:
            found["ratio"] = found["predicted_mb"] / found["measured_mb"]
        report({name: found | {"compiled_mb": predicted(size.small, described, kind)["compiled_bytes"] / 1e6}})


FUNCTIONS = {function.__name__: function for function in (machine, parity, update, decode, step, memory)}


def main() -> None:
    stage, size, out = sys.argv[1], SIZES[sys.argv[2]], Path(sys.argv[3])
    setup_jax()

    def report(found: Mapping[str, Any], file: Path) -> None:
        with file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(found) + "\n")

    FUNCTIONS[stage](size, functools.partial(report, file=out / f"{stage}.jsonl"), out)


if __name__ == "__main__":
    main()
