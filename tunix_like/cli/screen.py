"""Prints the output of `train` and `sft` besides the steps: a summary of the run and the final table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tunix_like.data.stream import Prompt, check_prompts, render, usable
from tunix_like.environments.outcomes import Environments, are_agents
from tunix_like.runs.build import Parts
from tunix_like.runs.describe import describe
from tunix_like.runtime import console, processes, progress
from tunix_like.runtime.object_storage import is_remote
from tunix_like.storage import metrics
from tunix_like.storage.checkpoint_files import complete_steps
from tunix_like.storage.mirror import local_folder
from tunix_like.training.engine import make_engine
from tunix_like.training.generation import complete
from tunix_like.training.learner import Learner
from tunix_like.training.preferences import DPOLearner
from tunix_like.types import Problem, SamplingParams


def announce(parts: Parts, place: str | Path) -> None:
    """Prints a summary of the run, the first prompt as the model receives it, and what an environment adds to this
    prompt."""
    for name, value in [*describe(parts), ("folder", _named(place))]:
        console.print_text(f"{name:>9}: {value}")
    config = parts.config
    for rows, what in ((parts.source.train, "training"), (parts.source.eval, "evaluation")):
        if len(rows):
            limit = config.rollout.max_prompt_length
            policy = config.data.overlong_prompts
            with progress.task(f"reading the {what} prompts"):
                skipped = str(check_prompts(rows, parts.tokenizer, limit, policy, what))
            most = config.eval.max_problems if what == "evaluation" else None
            used = f"{len(rows)}" if most is None or most >= len(rows) else f"the first {most} of {len(rows)}"
            unit = "pairs" if config.trains_pairs else "prompts"
            console.print_text(f"{what:>10}: {used} {unit}{skipped and f', {skipped}'}")
    rendered = (render(row, parts.tokenizer, limit) for row in parts.source.train)
    first = next(prompt for prompt in rendered if usable(prompt, limit))
    for line in prompt_lines(first, parts.environments):
        console.print_text(line)
    if parts.first_observation:
        added = parts.first_observation
        text = added if isinstance(added, str) else "\n".join(f"{each['role']}: {each['content']}" for each in added)
        console.print_text(f"{'reset':>9}: the environment adds to the prompt of row 1: {_both_ends(text, 600)}")


def prompt_lines(prompt: Prompt | Problem, environments: Environments | None) -> list[str]:
    """Returns lines with a prompt as the model receives it, and what made it. Agents get the prompt of their row, and
    the model gets their requests."""
    if are_agents(environments):
        return [
            f"{'template':>9}: that of the tokenizer, around the requests of the agent",
            f"{'prompt':>9}: of the row, for the agent: {_both_ends(prompt.text, 600)}",
        ]
    made = "none, the prompt is text" if isinstance(prompt.source, str) else "that of the tokenizer, around messages"
    return [
        f"{'template':>9}: {made}",
        f"{'prompt':>9}: {_both_ends(prompt.text, 600)}",
        f"{'ids':>9}: {_both_ends([*prompt.tokens], 40)}",
    ]


def _named(place: str | Path) -> str:
    return f"{place} (local copy: {local_folder(place)})" if is_remote(place) else str(place)


def _both_ends(values: str | list[int], most: int) -> str:
    """Shortens a text or token ids. Both ends show what a chat template adds."""
    half = most // 2
    return repr(values) if len(values) <= most else f"{values[:half]!r} ... {values[-half:]!r}"


def results(place: str | Path, parts: Parts, learner: Learner | DPOLearner) -> None:
    """Prints what `train` shows at the end: the evaluations, the best checkpoint, the run folder and, if the data
    source can draw problems, a drawing of one problem."""
    closing_table(place, parts)
    picture(parts, learner)


def closing_table(place: str | Path, parts: Parts) -> None:
    """Prints the evaluations before and after RL, the best checkpoint if `training.best_metric` is set, and the run
    folder."""
    if not processes.is_first():  # only the first process writes the metrics
        return
    folder = local_folder(place)
    evaluations = [row for row in metrics.rows(folder) if "step" in row and any(k.startswith("eval/") for k in row)]
    if len(evaluations) > 1:
        _before_and_after(evaluations[0], evaluations[-1], parts)
    elif not evaluations:
        console.print_text("no evaluation: the data has no held-out rows")
    if (metric := parts.config.training.best_metric) is not None:
        _say_best(folder, metric, place)
    console.print_text(
        f"run folder: {place} (tunix-like eval | generate | export | report {place}). To continue a run "
        "that did not end early, raise training.max_steps; to start anew, set another training.output_dir or delete "
        "the folder."
    )


def _say_best(folder: Path, metric: str, place: str | Path) -> None:
    best = metrics.best_of(folder, metric)
    kept = best.among(complete_steps(folder / "checkpoints"))  # `Checkpoints.steps` would wait for the other processes
    if kept is None:
        console.print_text(f"best: no checkpoint has a value of {metric}")
    else:
        console.print_text(f"best: {best.describe(kept)}, kept in {place}/checkpoints/{kept} (use it with --best)")


def _before_and_after(before: dict[str, Any], after: dict[str, Any], parts: Parts) -> None:
    limit = len(parts.source.eval)
    first = console.evaluation_cells(before)
    cells = console.evaluation_cells(after)

    def is_needless(name: str) -> bool:  # a rate of failures that is 0 in both evaluations
        is_rate = name.endswith(("_frac", "_ratio", "skipped_prompts")) and not name.startswith("environment/")
        return is_rate and not any(row.get(f"eval/{name}") for row in (before, after))

    shown = [name for name in cells if not is_needless(name)]
    rows = [(name, first.get(name, "-"), cells[name]) for name in shown]
    skipped = int(after.get("eval/skipped_prompts", 0))  # rows of an earlier version of this package lack it
    size = min(parts.config.eval.max_problems or limit, limit - skipped)
    number = console.problems(size, skipped, "held-out problems")
    samples = console.evaluated_samples(after)
    each = "" if samples is None else f", {console.samples_each(samples)}"  # the config can have changed since
    known = ", with 95% intervals" if any(key.startswith("eval/low/") for key in after) else ""
    console.table(
        f"{parts.learner.__name__}, {number}{each}{known}",
        ["", f"step {before['step']}", f"step {after['step']}"],
        rows,
    )


def picture(parts: Parts, learner: Learner | DPOLearner) -> None:
    """Prints a drawing of the first held-out problem with the greedy answer, if the data source can draw it."""
    if parts.source.draw is None or not len(parts.source.eval) or parts.model.config.scalar_head:
        return
    row = parts.source.eval[0]
    greedy = SamplingParams(temperature=0)
    # Uses a new engine, because the sampling servers of a run are disconnected when the run ends.
    engine = make_engine(
        learner.graphdef, parts.tokenizer, parts.config.rollout, parts.mesh, learner.companions, learner.training
    )
    (answer,) = complete(engine, learner.params, parts.tokenizer, [row["prompt"]], greedy, seed=0)
    console.print_text("the first held-out problem with the greedy answer of the model:")
    console.print_text(parts.source.draw(row, answer))
