"""This library's side of a case: builds it from the public classes and repeats it until no repeat is requested.

It uses `load_model`, `Sampler.generate`, a `Learner` for whole steps, the same with a stand-in for its sampler for
updates, and `SFTTrainer` for the update of single completions, which learners do not support.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
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
from benchmarks.worker import Gate, peak_memory_mb, serve
from tunix_like.config.schema import OptimizerConfig, RLTrainingConfig, RolloutConfig, SFTConfig
from tunix_like.errors import CallbackFailed
from tunix_like.models.decoder import Decoder
from tunix_like.models.loading import default_dtype
from tunix_like.planning import sizes
from tunix_like.planning.memory import Phase, rollout_phase, update_phases
from tunix_like.rollout.logits import SamplingParams
from tunix_like.rollout.requests import collect, samples_of
from tunix_like.rollout.sampler import Sampler
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.training.learners import GRPOConfig, GRPOLearner
from tunix_like.types import Completions, Request, Sample

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")

STEP_METRICS = ("train/time/", "train/perf/", "train/logprob_gap/")
"""Prefixes of the names of a step's metrics that are reported with its time."""

LEARNING_RATE = 1e-6
FOREVER = 10**6


class Memory:
    """Compares the predicted peak memory of a case with the measured one.

    On a device that counts its own bytes the two are directly comparable. On the CPU the process also contains an
    interpreter, libraries and compiled programs, so the first repeat, which compiles, is excluded. After it the
    system's maximum of the resident memory is reset, and the resident memory besides the live arrays is the base.
    `measured_mb` is the maximum of the later repeats minus that base.
    """

    def __init__(self, *phases: Phase):
        self.predicted = max(phase.bytes for phase in phases) / 1e6
        self.base: float | None = None
        self.highest = 0.0

    def read(self) -> dict[str, float]:
        """Returns the values to report at the end of a repeat. `peak_mb` is that of all repeats, as without this
        class."""
        peak = peak_memory_mb()
        self.highest = max(self.highest, peak)
        known = {"peak_mb": self.highest, "predicted_mb": self.predicted}
        if jax.local_devices()[0].memory_stats() is not None:
            return known | {"measured_mb": peak}
        if not RESET.exists():
            return known
        if self.base is None:
            self.base = _settled_mb() - sum(x.nbytes for x in jax.live_arrays()) / 1e6
            RESET.write_text("5")
            return known
        return known | {"measured_mb": peak - self.base}


def _settled_mb() -> float:
    """Returns the resident memory after freed memory is released: the compiler's on request, and the last program's,
    which the runtime releases some time after its results exist."""
    ctypes.CDLL(None).malloc_trim(0)
    found = []
    for _ in range(10):
        time.sleep(0.1)
        lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
        found.append(int(lines["VmRSS"].split()[0]) * 1024 / 1e6)
    return min(found)


def run_case(case: Case, gate: Gate, folder: Path | None) -> None:
    """Repeats the case until the gate raises `Finished`. Without a folder the weights are random."""
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
    requests = [Request(tokens, number, case.group) for number, tokens in enumerate(case.batch().prompts.tolist())]
    sampling = SamplingParams(1.0, case.top_p)
    work = sizes.Planner(model).update_work((case.prompts, case.group), (case.prompt_length, case.max_tokens))
    work = dataclasses.replace(work, filtered=case.top_p < 1)
    memory = Memory(rollout_phase(work, case.rows, case.prompts, {"weights": work.weights}))
    gate.begin()
    for repeat in range(FOREVER):
        out = collect(sampler.generate(params, requests, jax.random.key(repeat), sampling), requests)
        gate.end(int(out.lengths.sum()), **memory.read())


class _Given:
    """An engine that returns given completions."""

    max_prompt_length = 1 << 30

    def __init__(self, completions: Completions):
        self.completions = completions
        self.row_steps = 0

    def place(self, params: Any) -> Any:
        return params

    def generate(self, *_: Any, **__: Any) -> Iterator[Sample]:
        return samples_of(self.completions)


def _update(case: Case, model: Decoder, gate: Gate) -> None:
    if case.group == 1:
        return _update_single(case, model, gate)
    batch = case.batch()
    logprobs = np.where(batch.completions > 0, -np.log(case.model.vocab), 0.0).astype(np.float32)
    finished = np.ones(batch.lengths.shape, bool)
    given = _Given(Completions(batch.completions, batch.lengths, logprobs, finished))
    _learn(case, model, gate, given)


class _OnRow(tunix_like.Callback):
    shows_progress = True

    def __init__(self, function: Callable[[dict[str, Any]], None]) -> None:
        self._function = function

    def on_row(self, run: tunix_like.RunControl, row: dict[str, Any]) -> None:
        self._function(row)


def train_until_raised(train: Callable[..., Any], on_row: Callable[[dict[str, Any]], None]) -> None:
    """Trains until `on_row` raises, and raises the same: a run reports whatever a callback raises as its failure."""
    try:
        train(callbacks=[_OnRow(on_row)])
    except CallbackFailed as failure:
        raise failure.__cause__ or failure from None


def _step(case: Case, model: Decoder, gate: Gate) -> None:
    _learn(case, model, gate, None)


def _learn(case: Case, model: Decoder, gate: Gate, given: _Given | None) -> None:
    """Runs whole steps of a GRPO learner. The prompts of each step are the same."""
    batch = case.batch()

    def reward(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
        return batch.rewards.tolist()

    def on_row(row: dict[str, Any]) -> None:
        tokens = round(row["train/completions/mean_length"] * case.rows)
        parts = {name: value for name, value in row.items() if name.startswith(STEP_METRICS)}
        gate.end(tokens, loss=row["train/loss"], grad_norm=row["train/grad_norm"], **parts, **memory.read())

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
        # An update alone is given completions that were not sampled, with log-probabilities of no model.
        training_config=RLTrainingConfig(
            max_steps=FOREVER, actor_optimizer=optax.adamw(LEARNING_RATE), max_logprob_gap=None
        ),
        engine=given,
    )
    rows = [{"prompt": _text(prompt)} for prompt in batch.prompts]
    shape, widths = (case.prompts, case.group), (case.prompt_length, case.length)
    work = learner.planner.update_work(shape, widths)
    phases = update_phases(work, learner.planner.chunk_size(work))
    memory = Memory(*phases, *([] if given else [rollout_phase(work, case.rows, case.prompts)]))
    gate.begin()
    train_until_raised(functools.partial(learner.train, rows, batch_size=case.prompts, shuffle=False), on_row)


def _update_single(case: Case, model: Decoder, gate: Gate) -> None:
    """Runs an update with one completion per prompt: the same compiled step, called by the supervised trainer."""
    batch = case.batch()
    rows = [
        {"prompt": _text(prompt), "answer": _text(completion[0, : length[0] - 1])}  # the trainer adds the end token
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
    shape, widths = (case.prompts, 1), (case.prompt_length, case.length)
    work = dataclasses.replace(trainer.planner.update_work(shape, widths), clipped=False)
    memory = Memory(*update_phases(work, trainer.planner.chunk_size(work)))
    gate.begin()
    train_until_raised(functools.partial(trainer.train, rows), lambda row: gate.end(tokens, **memory.read()))


def _logits(case: Case, model: Decoder, gate: Gate) -> None:
    """Returns a few logits, to check that two libraries have the same model."""
    tokens = jnp.asarray(case.batch().prompts[:1])
    gate.begin()
    while True:
        logits = np.asarray(model(tokens), np.float64)
        gate.end(tokens.size, mean=logits.mean(), deviation=logits.std(), last=logits[0, -1, -1])


def _matmul(case: Case, gate: Gate) -> None:
    """Runs a square matrix product in the compute dtype of a model, with twice the width on an accelerator."""
    size = case.length * (1 if jax.default_backend() == "cpu" else 2)
    left = jnp.ones((size, size), default_dtype())
    multiply = jax.jit(lambda x: x @ x)
    gate.begin()
    while True:
        multiply(left).block_until_ready()
        gate.end(0, operations=2.0 * size**3)


def _tokenizer(vocab: int) -> Tokenizer:
    """Returns a tokenizer with words `t0`, `t1`, ... for the ids."""
    words = tokenizers.models.WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t0")
    backend = tokenizers.Tokenizer(words)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return Tokenizer(backend, eos_token="t1")


def _text(tokens: np.ndarray) -> str:
    return " ".join(f"t{i}" for i in tokens.tolist())


if __name__ == "__main__":
    serve(run_case)
