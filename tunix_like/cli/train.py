"""The commands `train` and `sft`."""

from __future__ import annotations

import argparse
import dataclasses

from tunix_like.cli.common import setup_jax
from tunix_like.config.load import load
from tunix_like.errors import NotSaved, UserError
from tunix_like.runtime import console, output


def train(arguments: argparse.Namespace) -> None:
    """Trains from a YAML file: SFT if `sft.max_steps` is set, then RL. The same command resumes the run."""
    config = load(arguments.config, arguments.overrides)
    setup_jax()
    from tunix_like.cli import screen
    from tunix_like.data.shared import warn_shared
    from tunix_like.runs import build, recipe
    from tunix_like.runs.describe import check_memory
    from tunix_like.runs.folder import check_place, run_folder
    from tunix_like.runtime import processes
    from tunix_like.runtime.object_storage import is_remote, names_below
    from tunix_like.session.display import StepLines
    from tunix_like.storage.mirror import local_folder

    parts = build.assemble(config, abstract=arguments.dry_run)
    place = run_folder(config, arguments.config, str(parts.config.algorithm.advantage_estimator))
    folder = local_folder(place)
    screen.announce(parts, place)
    if arguments.dry_run:
        warn_shared(parts.source.train, parts.source.eval)
        recipe.check_servers(parts)
        recipe.check_answers(parts)
        if is_remote(place):
            names_below(str(place), "training.output_dir")
        else:
            check_place(place, parts)
        checked = "" if check_memory(parts) else ", except memory, which the device does not report"
        print(
            "memory and times on other devices: tunix-like doctor --config CONFIG --devices v5e-8\n"
            f"dry run: everything above was checked{checked}. No weights were loaded, and nothing was trained."
        )
        return

    def on_claim() -> None:
        if processes.is_first():  # only the first process writes to the folder
            output.set_fallback_folder(folder)

    unsaved: NotSaved | None = None
    try:
        with recipe.prepared(parts, place, [StepLines()], on_claim) as learner:
            learner.train(
                parts.source.train, parts.source.eval, callbacks=[StepLines()], **recipe.data_options(parts.config)
            )
    except NotSaved as error:
        if error.stopped:
            raise
        unsaved = error  # all steps are done, so the results are printed first
    screen.results(place, parts, learner)
    if unsaved is not None:
        raise unsaved


def sft(arguments: argparse.Namespace) -> None:
    """Runs supervised fine-tuning on the column `answer`, without RL."""
    config = load(arguments.config, arguments.overrides)
    if not config.sft.max_steps:
        raise UserError("sft.max_steps: 0 means no training; set it, e.g. sft.max_steps=300.")
    if config.algorithm.advantage_estimator is None:  # SFT has none, but a config with RL does
        config = dataclasses.replace(
            config, algorithm=dataclasses.replace(config.algorithm, advantage_estimator="grpo")
        )
    setup_jax()
    from tunix_like.cli import screen
    from tunix_like.data.shared import rows_warned_once
    from tunix_like.runs import build, recipe
    from tunix_like.runs.folder import claim, run_folder
    from tunix_like.runtime import processes
    from tunix_like.session.display import StepLines
    from tunix_like.storage.mirror import local_folder
    from tunix_like.storage.run_lock import owned

    parts = build.assemble(config)
    place = run_folder(config, arguments.config, "sft")
    folder = local_folder(place)
    screen.announce(parts, place)
    with rows_warned_once(parts.source.train, parts.source.eval), owned(place):
        claim(place, parts)
        if processes.is_first():
            output.set_fallback_folder(folder)
        unsaved = recipe.fine_tune(parts, folder, [StepLines()], another_follows=False)
    if unsaved is not None:
        raise unsaved
    console.print_text(f"supervised fine-tuning is done: tunix-like eval {place}, tunix-like export {place} OUT")
