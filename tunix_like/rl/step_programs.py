"""Compiles the functions of a training step, once for all learners with equal settings in a process.

A program depends on the model's graph, the objective, the optimizer and the shardings, and on no weights. Programs that
contain a function of the user are not shared between learners: the function may read a global that has changed since.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Protocol

import jax
import optax

from tunix_like.rl.forward import ForwardOptions, batch_logprobs
from tunix_like.rl.update import StepObjective, jit_update


class SharedObjective(StepObjective, Protocol):
    """An objective whose programs can be shared; `rl.objective.Objective` and that of supervised fine-tuning are."""

    @property
    def built_in(self) -> bool:
        """True when no function comes from the user."""

    def key(self) -> Hashable:
        """Equal for objectives that are traced to the same program."""


KEPT = 16
"""Programs that are kept for later learners of the process; the least recently used one is dropped."""


class StepPrograms:
    """The compiled functions of a training step.

    Attributes:
      update: see `jit_update`.
      logprobs: `batch_logprobs` of graph, parameters, batch and packing.
      advantages: `Objective.advantages`.
      traces: how many times `update` was traced so far: once for each set of array shapes.
    """

    def __init__(
        self,
        graphdef: Any,
        objective: SharedObjective,
        optimizer: optax.GradientTransformation,
        options: ForwardOptions,
        shardings: Any,
    ):
        self.traces = 0
        self.update = jit_update(graphdef, objective, optimizer, options, shardings, self._count)
        self.logprobs = jax.jit(functools.partial(batch_logprobs, options=options), static_argnums=0)
        self.advantages = jax.jit(objective.advantages)

    def _count(self) -> None:
        self.traces += 1


ProgramCache = OrderedDict[Hashable, StepPrograms]

_SHARED: ProgramCache = OrderedDict()


def step_programs(
    graphdef: Any,
    objective: SharedObjective,
    optimizer: optax.GradientTransformation,
    options: ForwardOptions,
    shardings: Any,
    own: ProgramCache,
) -> StepPrograms:
    """Returns the programs for these settings: those of an earlier call with equal ones, or new ones.

    Args:
      shardings: of trained parameters and optimizer state, as `jit_update` takes them.
      own: the learner's own cache, for objectives with a function that is not part of this package.
    """
    cache = _SHARED if objective.built_in else own
    leaves, structure = jax.tree.flatten(shardings)
    key = (graphdef, objective.key(), optimizer, options, tuple(leaves), structure)
    if key not in cache:
        cache[key] = StepPrograms(graphdef, objective, optimizer, options, shardings)
    cache.move_to_end(key)
    if len(cache) > KEPT:
        cache.popitem(last=False)
    return cache[key]
