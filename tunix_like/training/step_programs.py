"""Compiles the functions of a training step, once for all learners with equal settings in a process.

A program depends on the model's graph, the objective, the optimizer and the shardings, but not on weights. Programs
that contain functions of the user are not shared between learners. Such a function can read a global variable whose
value changes, and a compiled program keeps the old value.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Hashable

import jax

from tunix_like.training.forward import batch_logprobs
from tunix_like.training.train_step import StepSpec, jit_train_step
from tunix_like.types import ById

MOST_PROGRAMS = 16
"""Maximum number of entries of a cache of compiled programs. If there are more entries, the least recently used entry
is dropped."""


class StepPrograms:
    """The compiled functions of a training step.

    Attributes:
      train_step: runs one optimizer update (see `jit_train_step`).
      logprobs: compiled `batch_logprobs`, a function of graph, parameters, batch and packed completions.
      advantages: compiled `StepObjective.advantages`.
      traces: number of times `train_step` was traced so far, once for each set of array shapes.
    """

    def __init__(self, spec: StepSpec):
        self.traces = 0

        def count() -> None:
            self.traces += 1

        self.train_step = jit_train_step(spec, count)
        self.logprobs = jax.jit(functools.partial(batch_logprobs, options=spec.options), static_argnums=0)
        self.advantages = jax.jit(spec.objective.advantages)


ProgramCache = OrderedDict[Hashable, StepPrograms]

_SHARED: ProgramCache = OrderedDict()


def step_programs(spec: StepSpec, own: ProgramCache | None) -> StepPrograms:
    """Returns the compiled functions for the settings in `spec`, from the cache if the cache has them.

    Args:
      own: the learner's own cache, used if the objective or optimizer is not part of this library; None means the cache
        that all learners share.
    """
    cache = _SHARED if own is None else own
    leaves, structure = jax.tree.flatten(spec.shardings)
    static = spec.graphdef, spec.objective.key(), ById(spec.optimizer), spec.options, spec.segments
    key = (*static, tuple(leaves), structure)
    if key not in cache:
        cache[key] = StepPrograms(spec)
    cache.move_to_end(key)
    if len(cache) > MOST_PROGRAMS:
        cache.popitem(last=False)
    return cache[key]
