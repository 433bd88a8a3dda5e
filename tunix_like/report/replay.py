"""Recomputes an optimizer update that training skipped, to find the completions whose loss or gradient is non-finite.
The run folder is not changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Bool

from tunix_like.algorithms.objective import Objective, build_objective
from tunix_like.algorithms.ppo import PPO
from tunix_like.algorithms.sources import source_estimators
from tunix_like.algorithms.token_baseline import TOKEN_BASELINE
from tunix_like.config.schema import Config
from tunix_like.config.sources import teachers_of
from tunix_like.errors import UserError
from tunix_like.models.lora import split_params
from tunix_like.models.sharding import fetch, place_replicated, scope
from tunix_like.planning.sizes import Planner
from tunix_like.runs.checks import check_config, updates_per_batch
from tunix_like.runs.trained import Trained, open_trained
from tunix_like.runtime import console, progress
from tunix_like.session.guards import FOLDER, SkippedUpdate, read_skipped
from tunix_like.step.forward import place_packed
from tunix_like.step.train_step import StepSpec, gradient, loss_weights, step_inputs
from tunix_like.storage.checkpoints import Checkpoints
from tunix_like.training.arguments import forward_options
from tunix_like.types import GroupBatch

SHOWN = 10
"""Maximum number of completions in the printed table."""


class Losses(NamedTuple):
    """Loss and gradient norm of a whole optimizer update, and `(group, sample, loss, norm)` of each single completion.
    `group` is the index of its prompt, and `sample` its index among the completions of the prompt."""

    loss: float
    norm: float
    by_completion: list[tuple[int, int, float, float]]

    @property
    def non_finite(self) -> list[tuple[int, int, float, float]]:
        """The single completions whose loss or gradient norm is non-finite, as entries of `by_completion`."""
        return [row for row in self.by_completion if not np.isfinite(row[2:]).all()]


def open_run(file: Path, overrides: Sequence[str] = ()) -> tuple[SkippedUpdate, Trained, int]:
    """Opens a skipped update, and the checkpoint of its run whose step (the last result) is nearest to that of the
    update."""
    skipped = read_skipped(file)
    run = file.parent.parent
    if file.parent.name != FOLDER:
        raise UserError(f"{file}: give a file in RUN/{FOLDER}/, where RUN is the run folder with the checkpoints.")
    with Checkpoints(run / "checkpoints") as checkpoints:
        steps = checkpoints.steps()
    if not steps:
        raise UserError(f"{run} has no checkpoint, which is needed to compute the update again.")
    step = min(steps, key=lambda step: (abs(step - skipped.step), step))
    return skipped, open_trained(str(run / "checkpoints" / str(step)), overrides), step


def replay(skipped: SkippedUpdate, trained: Trained, on_progress: Callable[[int], None] = lambda done: None) -> Losses:
    """Computes the loss and gradient norm of a whole skipped update, and of each of its completions alone.

    A completion alone has the same advantage and loss weight as in the whole update. The model weights are not changed.
    """
    config, _ = check_config(trained.config)
    refuse_others(config, "replay")
    by_source = source_estimators(config.data, config.algorithm)
    max_tokens = config.rollout.max_tokens_to_generate
    objective = build_objective(config.algorithm, max_tokens, updates_per_batch(config), by_source).at(skipped.step)
    live = skipped.live & skipped.in_update[:, None]
    indices = [(int(group), int(sample)) for group, sample in np.argwhere(live)]
    masks = [live]
    for index in indices:
        masks.append(np.zeros_like(live))
        masks[-1][index] = True
    logprobs = skipped.old_logprobs, skipped.ref_logprobs
    program = program_of(trained, objective)
    batch = skipped.batch
    batch = batch._replace(rewards=objective.float32_rewards(batch.rewards, batch.scored, batch.group_estimators))
    (loss, norm), *alone = norms_of(
        trained, program, batch, skipped.in_update, masks, logprobs, on_progress=on_progress
    )
    return Losses(loss, norm, [(*index, *numbers) for index, numbers in zip(indices, alone, strict=True)])


def refuse_others(config: Config, command: str) -> None:
    """Raises UserError if a run has a teacher or a critic, which these commands do not load."""
    if teachers := teachers_of(config):
        raise UserError(f"{teachers[0].key}: {command} cannot compute the gradients of a run with a teacher.")
    if config.algorithm.credit == "turn":
        raise UserError(f"algorithm.credit: {command} cannot compute the gradients of advantages of turns.")
    of_sources = source_estimators(config.data, config.algorithm).values()
    for algorithm in (vars(config.algorithm), *of_sources):
        if (name := algorithm.get("advantage_estimator")) in (PPO, TOKEN_BASELINE):
            raise UserError(f"algorithm.advantage_estimator: {command} cannot compute the gradients of {name}.")


def program_of(trained: Trained, objective: Objective) -> Any:
    """Returns a jitted function `(parameters, frozen parameters, StepInputs) -> (loss, gradient norm)` for an optimizer
    update."""
    config, _ = check_config(trained.config)
    options = forward_options(config.rollout, config.training, config.algorithm)
    options = options.for_trained(config.lora.rank is not None, trained.mesh)
    spec = StepSpec(trained.graphdef, objective, optax.identity(), options)

    @jax.jit
    def numbers(params: Any, frozen: Any, data: Any) -> tuple[Any, Any]:
        batch = jax.tree.map(jnp.asarray, data.batch)
        lengths = batch.sampled_lengths
        ids = batch.estimator_ids
        advantages = objective.advantages(batch.rewards, batch.scored, lengths, ids)
        weights = loss_weights(objective, batch, data.in_update)
        grads, totals = gradient(spec, params, data, advantages[..., None], weights, data.packed.sets, frozen=frozen)
        return totals["sums"]["loss"], optax.tree.norm(grads)

    return numbers


def norms_of(
    trained: Trained,
    program: Any,
    batch: GroupBatch,
    in_update: Bool[np.ndarray, "P"],
    masks: Sequence[Bool[np.ndarray, "P G"]],
    logprobs: tuple[Any, Any] = (None, None),
    *,
    on_progress: Callable[[int], None] = lambda done: None,
) -> list[tuple[float, float]]:
    """Computes for each mask the loss and the gradient norm of the completions that the mask selects from an update.

    A completion keeps the advantage and the loss weight that it has in the whole update.

    Args:
      program: a function that `program_of` returned.
      in_update: mask of the groups of the update.
      masks: one mask of completions per result.
      logprobs: the log-probabilities before the first update of the batch, and those of the reference model.
      on_progress: called with 1 after each mask.
    """
    config = trained.config
    mesh = trained.mesh
    params, frozen = split_params(trained.params)
    planner = Planner(trained.model, mesh, config.training, config.rollout)
    most = int(in_update.sum())
    placed, *placed_logprobs = place_replicated((batch.routed_freely, *logprobs), mesh)

    def of(rows: np.ndarray) -> tuple[float, float]:
        packed = place_packed(planner.pack(batch, rows, most), mesh)
        data = step_inputs(placed, in_update, packed, *placed_logprobs)
        loss, norm = fetch(program(params, frozen, data), mesh)
        on_progress(1)
        return float(loss), float(norm)

    with scope(mesh):
        return [of(rows) for rows in masks]


def print_report(file: Path, overrides: Sequence[str] = ()) -> None:
    """Recomputes a skipped optimizer update and prints the completions with a non-finite loss or gradient. If there are
    none, prints the completions with the largest gradient norms."""
    skipped, trained, step = open_run(file, overrides)
    console.print_text(f"update {skipped.update} of step {skipped.step}, with the weights after step {step}")
    bad = [
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(trained.params)
        if jnp.issubdtype(leaf.dtype, jnp.floating) and not bool(jnp.isfinite(leaf).all())
    ]
    console.print_text(f"weights: {'not finite in ' + ', '.join(bad[:3]) if bad else 'all finite'}")
    live = int((skipped.live & skipped.in_update[:, None]).sum())
    with progress.task("completions", live + 1) as advance:
        result = replay(skipped, trained, advance)
    console.print_text(f"the whole update: loss {result.loss:.4g}, gradient norm {result.norm:.4g}")
    rows = result.non_finite or sorted(result.by_completion, key=lambda row: -row[3])
    title = (
        f"{len(result.non_finite)} of {len(result.by_completion)} completions have a non-finite loss or gradient"
        if result.non_finite
        else "all single completions are finite; those with the largest gradients"
    )
    batch = skipped.batch
    table = [
        (group, sample, int(batch.completion_lengths[group, sample]), f"{batch.rewards[group, sample]:g}",
         f"{loss:.4g}", f"{norm:.4g}", _text(trained, skipped, group, sample))
        for group, sample, loss, norm in rows[:SHOWN]
    ]  # fmt: skip
    console.table(title, ["group", "sample", "tokens", "reward", "loss", "gradient norm", "completion"], table)


def _text(trained: Trained, skipped: SkippedUpdate, group: int, sample: int) -> str:
    length = skipped.batch.completion_lengths[group, sample]
    return trained.tokenizer.decode(skipped.batch.completion_tokens[group, sample, :length].tolist())[:60]
