"""Measures the time saved by omitting groups without a signal: updates with half of the groups constant and full ones.

    python -m benchmarks.zero_signal [--repeats N] [--json FILE]

Both kinds of batch go through one compiled step, alternately, as in a training step: choose the completions that can
change the gradient, pack them, update. A group is constant when all its rewards are equal; its advantages are exactly 0
under GRPO. The target is a ratio of medians of at most 0.65.

The processor time of the whole process is reported too, because other load on the machine affects it less.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from benchmarks.worker import count
from tunix_like.algorithms.objective import build_objective
from tunix_like.config.schema import OptimizerConfig
from tunix_like.models.config import DecoderConfig
from tunix_like.models.decoder import Decoder
from tunix_like.planning.sizes import micro_batch_size
from tunix_like.step.forward import ForwardOptions
from tunix_like.step.optimizer import build_optimizer, init_optimizer
from tunix_like.step.packing import choose_layout, pack
from tunix_like.step.train_step import StepSpec, TrainState, jit_train_step, step_inputs
from tunix_like.training.learners import GRPOConfig
from tunix_like.types import GroupBatch

AIM = 0.65

MODEL = DecoderConfig(
    vocab_size=8192, hidden_size=256, intermediate_size=1024, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=64
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """The update's configuration: the model, `prompts` groups of `size` completions, and their lengths in tokens."""

    model: DecoderConfig = MODEL
    prompts: int = 8
    size: int = 8
    prompt_length: int = 64
    completion_length: int = 128


def make_batch(setting: Setting, constant: int) -> GroupBatch:
    """Returns random tokens with every row at full length. Rewards are 0 and 1 alternately, but equal in the `constant`
    first groups."""
    rng = np.random.default_rng(0)
    groups, size, steps = setting.prompts, setting.size, setting.completion_length
    rewards = np.tile(np.arange(size) % 2, (groups, 1)).astype(np.float32)
    rewards[:constant] = 1.0
    vocabulary = setting.model.vocab_size
    return GroupBatch(
        prompt_tokens=rng.integers(0, vocabulary, (groups, setting.prompt_length), np.int32),
        prompt_lengths=np.full(groups, setting.prompt_length, np.int32),
        completion_tokens=rng.integers(0, vocabulary, (groups, size, steps), np.int32),
        completion_lengths=np.full((groups, size), steps, np.int32),
        rollout_logprobs=None,
        rewards=rewards,
        scored=np.ones((groups, size), bool),
    )


class Timed(NamedTuple):
    """An update: its wall time and processor time in seconds, and the number of completions that went through the
    model."""

    wall: float
    processor: float
    computed: int


def make_update(setting: Setting) -> tuple[Callable[[GroupBatch], Timed], list[int]]:
    """Returns the update of a batch, and a list that gets one entry for every compilation."""
    compilations: list[int] = []
    objective = build_objective(GRPOConfig(num_generations=setting.size), setting.completion_length, 1)
    optimizer = build_optimizer(OptimizerConfig(), None)
    graphdef, split = nnx.split(Decoder(setting.model, rngs=nnx.Rngs(0)))
    weights = nnx.to_pure_dict(split)
    options = ForwardOptions(temperature=1.0, logits_chunk=1024, remat=False)
    widths = setting.prompt_length, setting.completion_length
    layout = choose_layout(setting.size, setting.prompts, widths, micro_batch_size(widths[1]))
    spec = StepSpec(graphdef, objective, optimizer, options)
    state = [TrainState(weights, init_optimizer(optimizer, weights))]
    ids, everyone = np.zeros(setting.prompts, np.int32), np.ones(setting.prompts, bool)

    step = jit_train_step(spec, lambda: compilations.append(1))

    def update(batch: GroupBatch) -> Timed:
        start, processor = time.perf_counter(), time.process_time()
        live = objective.live_rows(batch.rewards, batch.scored, ids)
        packed = pack(batch.completion_lengths, live, widths[1], layout)
        state[0], _, _ = step(state[0], step_inputs(batch, everyone, packed), None)
        jax.block_until_ready(state)
        return Timed(time.perf_counter() - start, time.process_time() - processor, int(live.sum()))

    return update, compilations


def measure(setting: Setting, repeats: int) -> dict[str, Any]:
    """Runs full and half-constant updates alternately. The first of each, which compiles, is not counted."""
    update, compilations = make_update(setting)
    batches = {"full": make_batch(setting, 0), "half": make_batch(setting, setting.prompts // 2)}
    computed = {name: update(batch).computed for name, batch in batches.items()}
    found: dict[str, list[Timed]] = {name: [] for name in batches}
    for _ in range(repeats):
        for name, batch in batches.items():
            found[name].append(update(batch))
    result: dict[str, Any] = {
        "setting": dataclasses.asdict(setting),
        "device": jax.devices()[0].device_kind,
        "load_average": os.getloadavg()[0],
        "compilations": len(compilations),
        "completions_computed": computed,
        "aim": AIM,
    }
    for clock in ("wall", "processor"):
        seconds = {name: [getattr(each, clock) for each in times] for name, times in found.items()}
        median = {name: float(np.median(values)) for name, values in seconds.items()}
        turns = [half / full for half, full in zip(seconds["half"], seconds["full"], strict=True)]
        result[clock] = {"seconds": seconds, "median": median, "ratio": median["half"] / median["full"], "turns": turns}
    return result


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time of an update with half of its groups constant.")
    parser.add_argument("--repeats", type=count, default=9)
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/zero_signal.json"))
    arguments = parser.parse_args(argv)
    result = measure(Setting(), arguments.repeats)
    print(f"{result['device']}, load average {result['load_average']:.1f}, {result['compilations']} compilation(s)")
    for clock in ("wall", "processor"):
        found = result[clock]
        for name, values in found["seconds"].items():
            spread = f"{min(values):.2f} to {max(values):.2f}, {len(values)} repeats"
            computed = result["completions_computed"][name]
            print(f"{clock} time, {name}: median {found['median'][name]:.2f} s ({spread}), {computed} completions")
        turns = f"{min(found['turns']):.2f} to {max(found['turns']):.2f}"
        print(f"{clock} time: ratio of medians {found['ratio']:.2f} (of single turns {turns}), aim {AIM}")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {arguments.json}")


if __name__ == "__main__":
    main()
