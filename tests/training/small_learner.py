"""Helpers for the tests of learners: a small learner, its data and rewards, and functions that record its values."""

import functools

import grain.python as grain
import jax
import numpy as np
import optax
from flax import nnx

import tunix_like
from tests.callbacks import OnRow
from tests.tiny_model import HF
from tunix_like import (
    MaxRLConfig,
    MaxRLLearner,
    OptimizerConfig,
    RLTrainingConfig,
    RolloutConfig,
)
from tunix_like.data import reverse_text
from tunix_like.rollout import requests as requests_module
from tunix_like.rollout.rollouts import with_width

TEXTS = ["ab", "cd", "ef", "gh", "ba", "dc", "fe", "hg"]
ROWS = [reverse_text.record(text) for text in TEXTS]
TOKENIZER = reverse_text.tokenizer()
SGD = optax.sgd(0.5)
OWN = ("tokenizer", "engine", "mesh", "metric_fns", "eval_config", "ref_model", "on_row", "reward_weights",
       "source_estimators", "success_threshold", "environment", "environment_config",
       "teacher", "source_teachers", "teacher_config", "critic", "critic_config")  # fmt: skip


def make_model(seed=0):
    return tunix_like.load_model(HF, init="random", seed=seed)[0]


def params_of(model):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.split(model)[1]))


def assert_same(one, two):
    jax.tree.map(np.testing.assert_array_equal, one, two)


def differ(one, two):
    return any(not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True))


def long_or_short(prompts, completions, answer):
    """Returns 0/1 rewards that are mixed in most groups of a random model."""
    return [float(len(completion) % 2) for completion in completions]


def varied(prompts, completions, answer):
    """Returns different rewards for different completions, so that every estimator gets a signal."""
    return [0.25 * sum(map(ord, completion)) % 1 + 0.5 * len(completion) for completion in completions]


def make(algo=None, *, learner=MaxRLLearner, reward=long_or_short, model=None, rollout=None, **training):
    """Returns a small learner. `training` are fields of its RLTrainingConfig, or further arguments."""
    arguments = {name: training.pop(name) for name in OWN if name in training}
    settings = {"max_steps": 2, "actor_optimizer": SGD} | training
    listeners = [arguments.pop("on_row", lambda row, total: None)]
    made = learner(
        model=make_model() if model is None else model,
        tokenizer=arguments.pop("tokenizer", TOKENIZER),
        reward_fns=reward,
        algo_config=MaxRLConfig(num_generations=4) if algo is None else algo,
        rollout_config=rollout or RolloutConfig(max_prompt_length=8, max_tokens_to_generate=4),
        training_config=RLTrainingConfig(**settings),
        **arguments,
    )
    made._listeners = listeners  # replaced if a test gives its own
    made.train = functools.partial(made.train, callbacks=[OnRow(lambda row: listeners[0](row, made.total))])
    return made


def collect(learner, data=ROWS, eval_ds=None, **arguments):
    """Trains and returns all rows of metrics."""
    found = []
    learner._listeners[0] = lambda row, total: found.append(dict(row))
    learner.train(data, eval_ds, **{"batch_size": 4} | arguments)
    return found


ADAMW = OptimizerConfig(learning_rate=1e-2)


def watch_advantages(kept):
    """Returns a metric function that records the advantages of every step, `[groups, completions]`."""

    def keep(prompts, completions, rewards, advantages, **columns):
        kept.append(np.asarray(advantages).reshape(-1, 4))
        return {}

    return keep


def watch_rewards(kept, reward=varied):
    """Returns `reward` with its values recorded, `[groups, completions]`."""

    def watched(prompts, completions, answer):
        kept.append(np.reshape(reward(prompts, completions, answer), (-1, 4)))
        return kept[-1].reshape(-1)

    return watched


def watch_sampler(learner):
    """Records the completions of each later call of the learner's sampler, as arrays."""
    caught, generate = [], learner.engine.generate
    limit = learner.task.rollout_config.max_tokens_to_generate

    def watched(params, requests, *rest):
        caught.append(with_width(requests_module.collect(generate(params, requests, *rest), requests), limit))
        return requests_module.samples_of(caught[-1])

    learner.engine.generate = watched
    return caught


def plain(rows):
    yield from rows


class NotASequence:
    def __iter__(self):
        return iter(ROWS)


SOURCES = {
    "generator": lambda: plain(ROWS),
    "iterable": NotASequence,
    "MapDataset": lambda: grain.MapDataset.source(ROWS),
    "MapDataset with a filter": lambda: grain.MapDataset.source([*ROWS, {"prompt": ""}]).filter(lambda r: r["prompt"]),
    "IterDataset": lambda: grain.MapDataset.source(ROWS).to_iter_dataset(),
    "tuple": lambda: tuple(ROWS),
}
