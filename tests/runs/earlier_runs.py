"""Writes the runs of `tests/runs/earlier`, which `test_earlier_runs.py` resumes: `python -m tests.runs.earlier_runs`.

Run it with the library of the version whose runs are wanted first on `PYTHONPATH`. Each archive has the run folder
after two of four steps, `expected.npz`: the weights of the uninterrupted run, and `processor.txt`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np

JAX = "0.10.2"
"""The version that wrote the archives, on a CPU."""
ARCHIVES = Path(__file__).parent / "earlier"
CONFIG = """
model:
  init: random
  config: {model_type: qwen2, hidden_size: 8, intermediate_size: 8, num_hidden_layers: 1, num_attention_heads: 2,
           num_key_value_heads: 1, max_position_embeddings: 256, tie_word_embeddings: true}
data: {name: reverse_text, text_length: 2, train_size: 32, eval_size: 2, batch_size: 4}
algorithm: {advantage_estimator: maxrl, num_generations: 4}
rollout: {max_prompt_length: 8, max_tokens_to_generate: 4}
optimizer: {learning_rate: 0.01}
eval: {samples: 2, k: [1]}
training: {max_steps: 4, checkpoint_every_n_steps: 2, loggers: []}
"""
PAIRS = ("data.name=maze_pairs", "data.maze_size=7", "data.text_length=null", "algorithm.num_generations=8")
PAIRS += ("rollout.max_prompt_length=80", "rollout.max_tokens_to_generate=16")
REWARDS = """
def varied(prompts, completions, **columns):
    return [float(sum(map(ord, completion)) % 2) for completion in completions]
"""
OWN = "rewards.functions=[{name: rewards.py:varied}]"
RUNS = {
    "maxrl": (OWN, "algorithm.beta=0.05", "lora.rank=2"),
    "ppo": (OWN, "algorithm.advantage_estimator=ppo", "algorithm.num_iterations=2"),
    "dpo": (*PAIRS, "algorithm.advantage_estimator=dpo"),
    "reward_model": (*PAIRS, "algorithm.advantage_estimator=reward_model"),
    "sft": ("sft.max_steps=4", "sft.optimizer.learning_rate=0.02", "training.max_steps=1"),
}
"""Maps the name of a run to its overrides of CONFIG."""


def write_config(place: Path) -> Path:
    """Writes CONFIG and the reward function of RUNS to a folder. Returns the file of the config."""
    (place / "rewards.py").write_text(REWARDS)
    (place / "run.yaml").write_text(CONFIG)
    return place / "run.yaml"


def tunix_like(*arguments: str, cwd: Path | None = None) -> None:
    """Runs a command with the usual optimisation of the compiler, which the tests turn off."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run([sys.executable, "-m", "tunix_like", *arguments], check=True, cwd=cwd, env=environment)


def train(config: Path, folder: Path, name: str, steps: int) -> None:
    key = "sft.max_steps" if name == "sft" else "training.max_steps"
    overrides = [*RUNS[name], f"training.output_dir={folder}", f"{key}={steps}"]
    tunix_like("sft" if name == "sft" else "train", str(config), *overrides, cwd=config.parent)


def weights(folder: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of the export of a run."""
    from safetensors.numpy import load_file

    with tempfile.TemporaryDirectory() as place:
        tunix_like("export", str(folder), f"{place}/out")
        return load_file(f"{place}/out/model.safetensors")


def processor() -> str:
    """Describes the processor, for which XLA compiles: programs for another one round differently."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().split("\n\n")[0].splitlines() if info.exists() else []
    return "\n".join(line for line in lines if line.startswith(("vendor_id", "cpu family", "model", "flags")))


def main() -> None:
    for name in RUNS:
        with tempfile.TemporaryDirectory() as place:
            config = write_config(Path(place))
            train(config, Path(place) / "whole", name, 4)
            folder = Path(place) / name
            if name == "sft":  # `sft.max_steps` may not change, so the run loses its last checkpoint instead
                shutil.copytree(Path(place) / "whole", folder)
                shutil.rmtree(folder / "sft_checkpoints" / "4")
            else:
                train(config, folder, name, 2)
            shutil.rmtree(folder / "rollouts", ignore_errors=True)
            np.savez_compressed(folder / "expected.npz", **weights(Path(place) / "whole"))
            (folder / "processor.txt").write_text(processor())
            with tarfile.open(ARCHIVES / f"{name}.tar.xz", "w:xz") as archive:
                archive.add(folder, arcname=name)


if __name__ == "__main__":
    main()
