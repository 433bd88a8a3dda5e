"""A skipped update, looked at again: which completions make its loss or gradient no number.

It knows how to put a kept update back together with the run's weights; it changes neither.
"""

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
from tunix_like.data import source_estimators
from tunix_like.errors import UserError
from tunix_like.models.lora import split_params
from tunix_like.models.sharding import fetch, place_replicated, prompt_parts, scope
from tunix_like.runs.build import check_config, updates_per_batch
from tunix_like.runs.trained import Trained, open_trained
from tunix_like.runtime import console, progress
from tunix_like.storage.checkpoints import Checkpoints
from tunix_like.training.arguments import forward_options
from tunix_like.training.forward import place_packed
from tunix_like.training.guards import FOLDER, Skipped, read
from tunix_like.training.packing import choose_layout, pack
from tunix_like.training.sizes import chunk_size
from tunix_like.training.train_step import StepSpec, gradient, step_inputs

SHOWN = 10
"""Completions in the table."""


class Found(NamedTuple):
    """Loss and gradient norm of the whole update, and `(group, sample, loss, norm)` of each completion alone."""

    loss: float
    norm: float
    alone: list[tuple[int, int, float, float]]

    @property
    def guilty(self) -> list[tuple[int, int, float, float]]:
        return [row for row in self.alone if not np.isfinite(row[2:]).all()]


def open_run(file: Path, overrides: Sequence[str] = ()) -> tuple[Skipped, Trained, int]:
    """A kept update, the run it is of with the weights of the checkpoint nearest to it, and that checkpoint's step.

    Raises:
      UserError: the file is no kept update, or its run has no checkpoint.
    """
    skipped, run = read(file), file.parent.parent
    if file.parent.name != FOLDER:
        raise UserError(f"{file}: give a file where the run wrote it, RUN/{FOLDER}/..., beside its checkpoints.")
    with Checkpoints(run / "checkpoints") as checkpoints:
        steps = checkpoints.steps()
    if not steps:
        raise UserError(f"{run} has no checkpoint, so the update cannot be computed again.")
    step = min(steps, key=lambda step: (abs(step - skipped.step), step))
    return skipped, open_trained(str(run / "checkpoints" / str(step)), overrides), step


def replay(skipped: Skipped, trained: Trained, on_progress: Callable[[int], None] = lambda done: None) -> Found:
    """Computes the update's loss and gradient again, whole and for each completion alone (with the advantages and
    weights that it has in the whole). The weights stay as they are."""
    config, _ = check_config(trained.config)
    own = source_estimators(config.data, config.algorithm)
    lengths = config.rollout.max_tokens_to_generate
    objective = build_objective(config.algorithm, lengths, updates_per_batch(config), own)
    live = skipped.live & skipped.in_update[:, None]
    places = [(int(group), int(sample)) for group, sample in np.argwhere(live)]
    masks = [live]
    for place in places:
        masks.append(np.zeros_like(live))
        masks[-1][place] = True
    (loss, norm), *alone = norms_of(skipped, trained, program_of(trained, objective), masks, on_progress)
    return Found(loss, norm, [(*place, *numbers) for place, numbers in zip(places, alone, strict=True)])


def program_of(trained: Trained, objective: Objective) -> Any:
    """`(parameters, frozen parameters, StepInputs) -> (loss, gradient norm)`, compiled once for each shape."""
    config, _ = check_config(trained.config)
    options = forward_options(config.rollout, config.training, config.algorithm)
    spec = StepSpec(trained.graphdef, objective, optax.identity(), options)

    @jax.jit
    def numbers(params: Any, frozen: Any, data: Any) -> tuple[Any, Any]:
        given = jax.tree.map(jnp.asarray, data.batch)
        count, ids = given.sampled_lengths, given.estimator_ids
        advantages = objective.advantages(given.rewards, given.scored, count, ids)
        weights = objective.weights(given.scored, given.trained, count, data.in_update, ids)
        args = advantages[..., None], weights, data.packed.sets
        grads, totals = gradient(spec, params, data, *args, frozen=frozen)
        return totals["sums"]["loss"], optax.tree.norm(grads)

    return numbers


def norms_of(
    update: Skipped,
    trained: Trained,
    program: Any,
    masks: Sequence[Bool[np.ndarray, "P G"]],
    on_progress: Callable[[int], None] = lambda done: None,
) -> list[tuple[float, float]]:
    """Loss and gradient norm of the completions of each mask alone, with the advantages and weights that they have in
    the whole update; `program` is `program_of`'s."""
    config, batch, mesh = trained.config, update.batch, trained.mesh
    params, frozen = split_params(trained.params)
    widths = batch.prompt_tokens.shape[1], batch.completion_tokens.shape[2]
    most, size = int(update.in_update.sum()), batch.rewards.shape[1]
    chunk = chunk_size(config.training, trained.model, (most, size), widths, mesh=mesh)
    layout = choose_layout(size, most, widths, chunk, prompt_parts(mesh))
    whole = place_replicated((batch, update.old_logprobs, update.ref_logprobs), mesh)

    def of(rows: np.ndarray) -> tuple[float, float]:
        packed = place_packed(pack(batch.completion_lengths, rows, widths[1], layout, most), mesh)
        data = step_inputs(whole[0], update.in_update, packed, *whole[1:])
        loss, norm = fetch(program(params, frozen, data), mesh)
        on_progress(1)
        return float(loss), float(norm)

    with scope(mesh):
        return [of(rows) for rows in masks]


def print_report(file: Path, overrides: Sequence[str] = ()) -> None:
    """Replays a kept update and says what is wrong with it."""
    skipped, trained, step = open_run(file, overrides)
    console.say(f"update {skipped.update} of step {skipped.step}, with the weights after step {step}")
    bad = [
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(trained.params)
        if jnp.issubdtype(leaf.dtype, jnp.floating) and not bool(jnp.isfinite(leaf).all())
    ]
    console.say(f"weights: {'not finite in ' + ', '.join(bad[:3]) if bad else 'all finite'}")
    live = int((skipped.live & skipped.in_update[:, None]).sum())
    with progress.task("completions", live + 1) as advance:
        found = replay(skipped, trained, advance)
    console.say(f"the whole update: loss {found.loss:.4g}, gradient norm {found.norm:.4g}")
    rows = found.guilty or sorted(found.alone, key=lambda row: -row[3])
    title = (
        f"{len(found.guilty)} of {len(found.alone)} completions are not finite alone"
        if found.guilty
        else "every completion is finite alone; those with the largest gradients"
    )
    batch = skipped.batch
    table = [
        (group, sample, int(batch.completion_lengths[group, sample]), f"{batch.rewards[group, sample]:g}",
         f"{loss:.4g}", f"{norm:.4g}", _text(trained, skipped, group, sample))
        for group, sample, loss, norm in rows[:SHOWN]
    ]  # fmt: skip
    console.table(title, ["group", "sample", "tokens", "reward", "loss", "gradient norm", "completion"], table)


def _text(trained: Trained, skipped: Skipped, group: int, sample: int) -> str:
    length = skipped.batch.completion_lengths[group, sample]
    return trained.tokenizer.decode(skipped.batch.completion_tokens[group, sample, :length].tolist())[:60]
