"""The command `eval`: evaluates a run or a model on held-out problems, or compares two runs or models.

The command prints tables. With `--out`, it also writes a JSONL file with one line per problem.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tunix_like.cli.common import chosen_source, setup_jax
from tunix_like.cli.screen import prompt_lines
from tunix_like.errors import UserError
from tunix_like.evaluation import compare as eval_compare
from tunix_like.evaluation.evaluate import Evaluation, Evaluator
from tunix_like.runs.trained import Trained, evaluator_of, open_trained
from tunix_like.runtime import console
from tunix_like.runtime.atomic import replacing
from tunix_like.runtime.processes import by_first, is_first

SPLIT = "data.split="

PRESETS = {
    "greedy": ("eval.temperature=0", "eval.top_p=1", "eval.samples=1", "eval.k=null"),
    "sampled": ("eval.temperature=1", "eval.top_p=1", "eval.samples=16", "eval.k=null"),
}
"""Presets of sampling parameters, as overrides of the run's config; overrides of the command line take precedence."""


class Measured(NamedTuple):
    """An evaluated model, the name of the data split, the evaluator and its result."""

    trained: Trained
    split: str
    evaluator: Evaluator
    result: Evaluation


def evaluate(source: str, overrides: Sequence[str], out: str | None) -> None:
    """Evaluates a run, a checkpoint or a model and prints a table of metrics; writes `out` and a summary file.
    Arguments are checked before sampling."""
    files = None if out is None else out_files(Path(out))
    evaluated = measured(source, overrides)
    size = len(evaluated.evaluator.problems)
    samples = evaluated.evaluator.config.samples
    number = console.problems(size, evaluated.evaluator.skipped_prompts)
    title = f"{evaluated.trained.origin}: {number}, {console.samples_each(samples)}, with 95% intervals"
    if files is not None:  # written before printing, because printing to a closed output ends the command
        by_first(lambda: _write(files, problem_rows(evaluated), summary_of(evaluated)))
    console.table(title, ["", "value"], list(console.evaluation_cells(evaluated.result.metrics).items()))
    metrics = evaluated.result.metrics
    console.print_text(console.speed(metrics["eval/mean_length"] * size * samples, evaluated.result.seconds))
    if files is not None:
        console.print_text(f"wrote every problem to {files[0]}, the summary to {files[1]}")


def compare(a: str, b: str, overrides: Sequence[str]) -> None:
    """Prints the paired differences between A and B on the same problems. A and B are each a run, a model or a file
    that `--out` wrote. Overrides apply to runs and models, not to files."""
    files = {name: Path(name) for name in (a, b) if Path(name).is_file() or name.endswith(".jsonl")}
    if overrides and a in files and b in files:
        raise UserError(f"--compare: {overrides[0]} has no effect on files of finished evaluations; leave it out.")
    rows = {name: eval_compare.read_problems(file) for name, file in files.items()}
    settings = {name: eval_compare.read_settings(_summary_file(file)) for name, file in files.items()}
    for name in (a, b):
        if name not in rows:
            evaluated = measured(name, overrides)
            rows[name] = problem_rows(evaluated)
            settings[name] = summary_of(evaluated)
    eval_compare.check_same(rows[a], rows[b], (a, b))
    differences = eval_compare.differences(rows[a], rows[b], eval_compare.threshold_of(settings.values()))
    if not differences:
        raise UserError(f"--compare: {a} and {b} have no metric in common; evaluate both with the same eval.k.")
    console.print_text(f"A: {a}\nB: {b}")
    for line in (
        eval_compare.settings_line(settings[a], settings[b]),
        eval_compare.skipped_line(settings[a], settings[b]),
    ):
        if line:
            console.print_text(line)
    title = f"{len(rows[a])} problems, paired, with 95% intervals"
    console.table(title, ["", "A", "B", "B - A", "B better / worse"], eval_compare.cells(differences))


def measured(source: str, overrides: Sequence[str]) -> Measured:
    """Evaluates a run, a checkpoint or a model. The override `data.split=NAME` selects the rows. By default, the
    held-out rows are evaluated."""
    splits = [word.removeprefix(SPLIT) for word in overrides if word.startswith(SPLIT)]
    others = [word for word in overrides if not word.startswith(SPLIT)]
    trained = _with_fitting_k(open_trained(source, others, need_data=True), others)
    data = trained.config.data
    split = splits[-1] if splits else data.eval_split
    on_training_rows = bool(splits) and split == data.split
    if not on_training_rows:
        data = dataclasses.replace(data, eval_split=split)
        trained = trained._replace(config=dataclasses.replace(trained.config, data=data))
    evaluator = evaluator_of(trained, on_training_rows)
    if is_first():  # to standard error: if standard output cannot be written, the files still are
        environments = None if evaluator.player is None else evaluator.player.environments
        print("\n".join(prompt_lines(evaluator.problems[0], environments)), file=sys.stderr)
    try:
        return Measured(trained, split, evaluator, evaluator(trained.params, moment=trained.moment))
    finally:
        evaluator.close()


def _with_fitting_k(trained: Trained, overrides: Sequence[str]) -> Trained:
    """Removes values of `eval.k` above `eval.samples` if the overrides set `eval.samples` but not `eval.k`."""
    names = {word.partition("=")[0] for word in overrides}
    settings = trained.config.eval
    beyond = [k for k in settings.k or () if k > settings.samples]
    if not beyond or "eval.samples" not in names or "eval.k" in names:
        return trained
    kept = [k for k in settings.k or () if k <= settings.samples] or None
    left_out = ", ".join(map(str, beyond))
    console.print_text(f"eval.k of the run: {left_out} left out, above eval.samples={settings.samples}")
    settings = dataclasses.replace(settings, k=kept)
    return trained._replace(config=dataclasses.replace(trained.config, eval=settings))


def problem_rows(found: Measured) -> list[dict[str, Any]]:
    """Returns the result of each problem as a row of JSON values; unknown rewards, successes and metric values are
    None."""
    rows = []
    result = found.result
    for i, problem in enumerate(found.evaluator.problems):
        rewards = result.rewards[i].tolist()
        answers = result.answers[i]
        row: dict[str, Any] = {"problem": problem.number, "prompt": problem.text, "columns": dict(problem.columns)}
        row |= {"completions": result.texts[i], "rewards": [_known(reward) for reward in rewards]}
        row["succeeded"] = [
            None if reward is None else bool(yes)
            for reward, yes in zip(row["rewards"], result.succeeded[i], strict=True)
        ]
        if answers is not None:
            row["answers"] = [None if answer is None else str(answer) for answer in answers]
        rows.append(row | {"values": {name: _known(float(each[i])) for name, each in result.values.items()}})
    return rows


def summary_of(found: Measured) -> dict[str, Any]:
    """Returns the settings and all metrics of an evaluation. `eval/<name>/low` and `eval/<name>/high` are the ends of
    the confidence interval of the metric `eval/<name>`."""
    settings = found.evaluator.config
    config = found.trained.config
    metrics: dict[str, Any] = {}
    for key, value in found.result.metrics.items():
        name = key.removeprefix("eval/")
        end = next((end for end in ("low", "high") if name.startswith(f"{end}/")), None)
        metrics[key if end is None else f"eval/{name.removeprefix(f'{end}/')}/{end}"] = _known(value)
    return {
        "origin": found.trained.origin,
        "data": config.data.name,
        "split": found.split,
        "problems": len(found.evaluator.problems),
        "skipped_prompts": found.evaluator.skipped_prompts,
        "samples": settings.samples,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "seed": config.training.seed,
        "success_threshold": found.evaluator.success_threshold,
        "metrics": metrics,
    }


def out_files(file: Path) -> tuple[Path, Path]:
    """Returns the paths of the results and of the summary, and checks that both can be written as new files."""
    if file.suffix != ".jsonl":
        raise UserError(f"--out {file}: this file has one JSON object per problem; give a name that ends in .jsonl.")
    files = file, _summary_file(file)
    for path in files:
        if path.exists():
            raise UserError(f"--out {file}: {path} exists already; give another name, or delete it.")
    parent = next(folder for folder in file.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"--out {file}: {parent} is not a writable folder; give another path.")
    return files


def _summary_file(file: Path) -> Path:
    return file.with_suffix(".summary.json")


def _write(files: tuple[Path, Path], rows: Sequence[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Writes both files, each completely or not at all. Values whose type JSON lacks are written as text."""
    lines = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    try:
        files[0].parent.mkdir(parents=True, exist_ok=True)
        with replacing(files[1]) as described, replacing(files[0]) as results:  # the last one is replaced first
            results.write_text(lines, encoding="utf-8")
            described.write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {files[0]}: cannot be written: {error.strerror or error}.") from error


def _known(value: float) -> float | None:
    return None if value != value else value


def run(arguments: argparse.Namespace) -> None:
    """Evaluates a run or a model, or compares two runs or models."""
    setup_jax()
    source = arguments.source
    overrides = arguments.overrides
    # argparse takes the first override as the source if there is no source.
    if arguments.compare is not None and source is not None and "=" in source:
        source, overrides = None, [source, *overrides]
    overrides = [*PRESETS.get(arguments.preset, ()), *overrides]
    if arguments.compare is None:
        if source is None:
            raise UserError("eval: give a run or a model, or two of them: --compare A B.")
        return evaluate(chosen_source(source, arguments.best), overrides, arguments.out)
    if arguments.best:
        raise UserError("eval --compare A B: leave --best out, and write RUN/checkpoints/best for a run.")
    if source is not None or arguments.out is not None:
        extra = f"--out {arguments.out}" if source is None else source
        raise UserError(
            f"eval --compare A B: leave {extra} out; to save the results, evaluate each with --out and compare the "
            "files."
        )
    a, b = arguments.compare
    return compare(a, b, overrides)
