"""`python -m benchmarks.staleness`: the time of a step whose completions are sampled during an earlier update.

There are eight devices on the CPU, four for training and four for sampling. They share the cores of the machine, so the
real work is small, and sampling, rewards and update are extended by the same time without computation: a simulated
equal split. Runs with `rollout.max_staleness` 0, 1, 2 and 4 alternate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from tunix_like import (
    Callback,
    MaxRLConfig,
    MaxRLLearner,
    OptimizerConfig,
    RLTrainingConfig,
    RolloutConfig,
    RunControl,
    load_model,
)
from tunix_like.config.schema import MeshConfig
from tunix_like.data import reverse_text
from tunix_like.models.sharding import build_mesh
from tunix_like.types import Sample

DEVICES, SAMPLING = 8, 4
AGES = (0, 1, 2, 4)
MODEL = {
    "model_type": "qwen2",
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
ROWS = [reverse_text.record(text) for text in ("ab", "cd", "ef", "gh", "ba", "dc", "fe", "hg")]


class StepTimes(Callback):
    shows_progress = True

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_row(self, run: RunControl, row: dict[str, Any]) -> None:
        self.seconds.append(row["train/step_time_sec"])


def learner(staleness: int, seconds: float, steps: int) -> MaxRLLearner:
    """Returns a learner whose sampling, rewards and updates take `seconds` longer."""

    def wait(*_: Any, **__: Any) -> dict[str, Any]:
        time.sleep(seconds)
        return {}

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        time.sleep(seconds)
        return [float(len(text) % 2) for text in completions]

    made = MaxRLLearner(
        model=load_model(MODEL, init="random")[0],
        tokenizer=reverse_text.tokenizer(),
        reward_fns=reward,
        algo_config=MaxRLConfig(num_generations=4, sampler_is="token"),
        rollout_config=RolloutConfig(
            max_prompt_length=8, max_tokens_to_generate=4, max_staleness=staleness, devices=SAMPLING
        ),
        training_config=RLTrainingConfig(max_steps=steps, actor_optimizer=OptimizerConfig(learning_rate=1e-3)),
        mesh=build_mesh(MeshConfig(), jax.devices()[:-SAMPLING]),
        metric_fns=[wait],
    )
    generate = made.engine.generate

    def slower(*arguments: Any) -> Iterator[Sample]:
        time.sleep(seconds)
        yield from generate(*arguments)

    made.engine.generate = slower  # type: ignore[method-assign]
    return made


def measure(seconds: float, steps: int, repeats: int) -> dict[str, list[float]]:
    """Returns the median seconds of a step of each run, by staleness, without the steps that are sampled at the start
    of a run."""
    found: dict[str, list[float]] = {str(age): [] for age in AGES}
    for repeat in range(repeats + 1):
        for staleness in AGES:
            times = StepTimes()
            learner(staleness, seconds, steps).train(ROWS, batch_size=4, callbacks=[times])
            if repeat:  # the first run of each side compiles
                found[str(staleness)].append(statistics.median(times.seconds[max(AGES) + 1 :]))
    return found


def main() -> None:
    """Prints the seconds of a step and their ratio to those of synchronous steps, and writes them to `--json FILE`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="time that is added to each part")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    found = measure(arguments.seconds, arguments.steps, arguments.repeats)
    for staleness, values in found.items():
        spread = f"({min(values):.3f} to {max(values):.3f})"
        ratio = statistics.median(stale / synchronous for synchronous, stale in zip(found["0"], values, strict=True))
        print(f"max_staleness {staleness}: {statistics.median(values):.3f} s per step {spread}, ratio {ratio:.2f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
