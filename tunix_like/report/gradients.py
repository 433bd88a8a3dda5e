"""Measures gradient norms of single prompts by pass rate, at a run's newest checkpoint (as in arXiv 2602.02710).

A training step computes only the sum of the gradients of its prompts. This module samples and scores completions of
training prompts as in a step, and computes the gradient of each prompt separately. The loss of a prompt has the same
weight as in a step. The model weights and the run folder are not changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from tunix_like.algorithms.objective import Objective, build_objective
from tunix_like.algorithms.pass_rates import bins_of
from tunix_like.algorithms.sources import source_estimators
from tunix_like.data import load_source
from tunix_like.errors import UserError
from tunix_like.evaluation.evaluate import eval_problems
from tunix_like.models.loading import check_fit
from tunix_like.report.replay import norms_of, program_of, refuse_others
from tunix_like.rollout.collection import training_batch
from tunix_like.rollout.requests import collect, requests_of
from tunix_like.rollout.rollouts import Rollout, Task, completion_texts, score_completions, succeeds, with_width
from tunix_like.rollout.sampler import Sampler
from tunix_like.runs.checks import check_config
from tunix_like.runs.reward_functions import reward_functions
from tunix_like.runs.trained import Trained, open_trained
from tunix_like.training.engine import make_engine
from tunix_like.types import GroupBatch, Problem, SamplingParams

GRADIENT_KEY = 3
"""Number that is folded into the run's random key to sample completions for gradient norms. Training folds in
`collection.TRAIN_KEY` instead, and evaluation folds in `evaluate.EVAL_KEY`."""


class Gradients(NamedTuple):
    """Pass rate, pass-rate bin (`algorithms/pass_rates.py`) and gradient norm of each measured prompt.

    `origin` is the path of the checkpoint at which the gradients were computed.
    """

    rates: list[float]
    bins: list[int]
    norms: list[float]
    origin: str


def measure(run: Path, batches: int, on_progress: Callable[[int], None] = lambda done: None) -> Gradients:
    """Measures the gradient norm of each prompt in the first `batches` batches of a run's training data, at the newest
    checkpoint of the run.

    The KL term of the loss is left out, because it needs the reference model. Prompts without a scored completion are
    excluded.

    Args:
      on_progress: called with the number of prompts that were measured since the last call.

    Raises:
      UserError: the folder has no config or checkpoint, or the training data of the config cannot be loaded.
    """
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run} has no config.yaml, which --gradients needs to sample its prompts.")
    trained = open_trained(str(run))
    config, _ = check_config(trained.config)
    refuse_others(config, "report --gradients")
    check_fit(trained.model_config, trained.tokenizer, config.rollout)
    source = load_source(config.data)
    algorithm = dataclasses.replace(config.algorithm, beta=0.0)
    by_source = source_estimators(config.data, config.algorithm)
    step = int(Path(trained.origin).name)
    objective = build_objective(algorithm, config.rollout.max_tokens_to_generate, 1, by_source).at(step)
    program = program_of(trained, objective)
    task = Task(objective.config, config.rollout, reward_functions(config, source), config.rewards.success_threshold)
    problems, _ = eval_problems(
        source.train, trained.tokenizer, config.rollout.max_prompt_length, batches * config.data.batch_size
    )
    size = min(config.data.batch_size, len(problems))
    sampler = make_engine(trained.graphdef, trained.tokenizer, config.rollout, trained.mesh)
    out = Gradients([], [], [], trained.origin)
    for start in range(0, len(problems) - size + 1, size):
        at_checkpoint = [dataclasses.replace(each, moment=trained.moment) for each in problems[start : start + size]]
        rollout = _sample(trained, sampler, at_checkpoint, task)
        batch = training_batch(rollout, task, objective)
        norms = _norms(batch, objective, trained, program, on_progress)
        scored = batch.scored
        passed = scored & succeeds(rollout.scores.total.reshape(scored.shape), task.success_threshold)
        known = scored.any(axis=1)
        out.rates.extend((passed.sum(axis=1)[known] / scored.sum(axis=1)[known]).tolist())
        out.bins.extend(bins_of(passed, scored)[known].tolist())
        out.norms.extend(norms[known].tolist())
    return out


def _sample(trained: Trained, sampler: Sampler, problems: list[Problem], task: Task) -> Rollout:
    rollout = task.rollout_config
    size = task.algo.num_generations
    key = jax.random.fold_in(jax.random.key(trained.config.training.seed), GRADIENT_KEY)
    params = SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k)
    requests = requests_of(problems, size)
    samples = sampler.generate(sampler.place(trained.params), requests, key, params)
    completions = with_width(collect(samples, requests), rollout.max_tokens_to_generate)
    texts = completion_texts(completions, trained.tokenizer)
    return Rollout(problems, texts, completions, score_completions(task.rewards, problems, texts, size))


def _norms(
    batch: GroupBatch, objective: Objective, trained: Trained, program: Any, on_progress: Callable[[int], None]
) -> Float[np.ndarray, "P"]:
    """Computes the gradient norm of each prompt; 0 if none of its completions has a gradient. The loss of a completion
    has the weight that it has in an update with all prompts of the batch."""
    ids = batch.group_estimators
    batch = batch._replace(rewards=objective.float32_rewards(batch.rewards, batch.scored, ids))
    live = objective.live_rows(batch.rewards, batch.scored, ids)
    if batch.trained is not None:
        live = live & batch.trained
    norms = np.zeros(len(live))
    groups = np.flatnonzero(live.any(axis=1))
    masks = [live & (np.arange(len(live)) == group)[:, None] for group in groups]
    found = norms_of(trained, program, batch, np.ones(len(live), bool), masks, on_progress=on_progress)
    norms[groups] = [norm for _, norm in found]
    on_progress(len(live) - len(groups))
    return norms
