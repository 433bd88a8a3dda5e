"""This library's side of a case: builds it from the public classes and runs repeats until told to stop.

What is called of the library: `load_model`, `Sampler.generate`, a `Learner` for whole steps, the same with a stand-in
for its sampler for updates, and `SFTTrainer` for the update of single completions, which no learner takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from flax import nnx

import tunix_like
from benchmarks.cases import Case
from benchmarks.worker import Gate, serve
from tunix_like.config import OptimizerConfig, RLTrainingConfig, RolloutConfig, SFTConfig
from tunix_like.models.decoder import Decoder
from tunix_like.models.loading import default_dtype
from tunix_like.rl.learners import GRPOConfig, GRPOLearner
from tunix_like.sampling.logits import SamplingParams
from tunix_like.sampling.sampler import Completions, Sampler
from tunix_like.tokenizer import Tokenizer

LEARNING_RATE = 1e-6
FOREVER = 10**6


def run_case(case: Case, gate: Gate, folder: Path | None) -> None:
    """Repeats the case until the gate raises `Finished`; without a folder the weights are drawn here."""
    if case.kind == "matmul":
        return _matmul(case, gate)
    if folder is None:
        model = tunix_like.load_model(case.model.hf_config(), init="random", dtype=case.dtype)[0]
    else:
        model = tunix_like.load_model(folder, dtype=case.dtype)[0]
    kinds = {"rollout": _rollout, "update": _update, "step": _step, "logits": _logits}
    kinds[case.kind](case, model, gate)


def _rollout(case: Case, model: Decoder, gate: Gate) -> None:
    graphdef, state = nnx.split(model)
    params = nnx.to_pure_dict(state)
    sampler = Sampler(graphdef, case.eos_ids(), max_prompt_length=case.prompt_length, max_tokens=case.max_tokens)
    prompts, numbers = case.batch().prompts.tolist(), list(range(case.prompts))
    sampling = SamplingParams(1.0, case.top_p)
    gate.begin()
    for repeat in range(FOREVER):
        out = sampler.generate(params, prompts, numbers, case.group, jax.random.key(repeat), sampling)
        gate.end(int(out.lengths.sum()))


class _Given:
    """Stands in for a learner's sampler: the completions are there already."""

    def __init__(self, completions: Completions):
        self.completions = completions

    def generate(self, *_: Any, **__: Any) -> Completions:
        return self.completions


def _update(case: Case, model: Decoder, gate: Gate) -> None:
    if case.group == 1:
        return _update_single(case, model, gate)
    batch = case.batch()
    logprobs = np.where(batch.completions > 0, -np.log(case.model.vocab), 0.0).astype(np.float32)
    finished = np.ones(batch.lengths.shape, bool)
    given = _Given(Completions(batch.completions, batch.lengths, logprobs, finished))
    _learn(case, model, gate, given)


def _step(case: Case, model: Decoder, gate: Gate) -> None:
    _learn(case, model, gate, None)


def _learn(case: Case, model: Decoder, gate: Gate, given: _Given | None) -> None:
    """Whole steps of a GRPO learner; the prompts of each are the same."""
    batch = case.batch()

    def reward(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
        return batch.rewards.tolist()

    def on_row(row: dict[str, Any], total: int | None) -> None:
        tokens = round(row["train/completions/mean_length"] * case.rows)
        gate.end(tokens, loss=row["train/loss"], grad_norm=row["train/grad_norm"])

    learner = GRPOLearner(
        model=model,
        tokenizer=_tokenizer(case.model.vocab),
        reward_fns=reward,
        algo_config=GRPOConfig(num_generations=case.group, beta=case.beta),
        rollout_config=RolloutConfig(
            max_prompt_length=case.prompt_length,
            max_tokens_to_generate=case.max_tokens,
            eos_tokens=[min(i, case.model.vocab - 1) for i in case.eos_ids()],
        ),
        training_config=RLTrainingConfig(max_steps=FOREVER, actor_optimizer=optax.adamw(LEARNING_RATE)),
        on_row=on_row,
    )
    if given is not None:
        learner.sampler = given  # type: ignore[assignment]
    rows = [{"prompt": _text(prompt)} for prompt in batch.prompts]
    gate.begin()
    learner.train(rows, batch_size=case.prompts, shuffle=False)


def _update_single(case: Case, model: Decoder, gate: Gate) -> None:
    """One completion a prompt: the same compiled step, fed by the supervised trainer."""
    batch = case.batch()
    rows = [
        {"prompt": _text(prompt), "answer": _text(completion[0, : length[0] - 1])}  # the end token is the trainer's
        for prompt, completion, length in zip(batch.prompts, batch.completions, batch.lengths, strict=True)
    ]
    trainer = tunix_like.SFTTrainer(
        model=model,
        tokenizer=_tokenizer(case.model.vocab),
        sft_config=SFTConfig(
            max_steps=FOREVER,
            batch_size=case.prompts,
            eval_every_n_steps=FOREVER,
            optimizer=OptimizerConfig(learning_rate=LEARNING_RATE, max_grad_norm=None),
        ),
        rollout_config=RolloutConfig(
            max_prompt_length=case.prompt_length, max_tokens_to_generate=case.max_tokens, eos_tokens=[1]
        ),
    )
    tokens = int(batch.lengths.sum())
    gate.begin()
    trainer.train(rows, on_row=lambda row: gate.end(tokens))


def _logits(case: Case, model: Decoder, gate: Gate) -> None:
    """A few numbers of the logits, to see that two libraries hold the same model."""
    tokens = jnp.asarray(case.batch().prompts[:1])
    gate.begin()
    while True:
        logits = np.asarray(model(tokens), np.float64)
        gate.end(tokens.size, mean=logits.mean(), deviation=logits.std(), last=logits[0, -1, -1])


def _matmul(case: Case, gate: Gate) -> None:
    """A square matrix product in the dtype that a model would compute in; twice as wide on an accelerator."""
    size = case.length * (1 if jax.default_backend() == "cpu" else 2)
    left = jnp.ones((size, size), default_dtype())
    multiply = jax.jit(lambda x: x @ x)
    gate.begin()
    while True:
        multiply(left).block_until_ready()
        gate.end(0, operations=2.0 * size**3)


def _tokenizer(vocab: int) -> Tokenizer:
    """Words `t0`, `t1`, ... for the ids."""
    words = tokenizers.models.WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t0")
    backend = tokenizers.Tokenizer(words)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return Tokenizer(backend, eos_token="t1")


def _text(tokens: np.ndarray) -> str:
    return " ".join(f"t{i}" for i in tokens.tolist())


if __name__ == "__main__":
    serve(run_case)
