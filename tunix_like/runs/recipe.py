"""Runs the training that a config describes: supervised fine-tuning, then reinforcement learning.

`run` is the Python equivalent of `tunix-like train`; the command line calls the same functions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tunix_like.config.load import load
from tunix_like.config.schema import Config
from tunix_like.data.shared import compared_once
from tunix_like.errors import NotSaved, UserError
from tunix_like.rollout.samples import Samples
from tunix_like.runs.build import Parts, assemble
from tunix_like.runs.folder import claim, run_folder
from tunix_like.runtime import processes
from tunix_like.storage.run_lock import owned
from tunix_like.training.learner import Learner
from tunix_like.training.sft import SFTTrainer
from tunix_like.types import Engine

OnRow = Callable[[dict[str, Any], int | None], None]
"""Function `f(row, total)` that is called with each row of metrics. `total` is the number of steps of the training
phase; None if this number is not known."""


def run(
    config: Config | str | Path, overrides: Sequence[str] = (), *, on_row: OnRow = lambda row, total: None
) -> dict[str, Any]:
    """Trains a model as `tunix-like train` does: SFT, RL and evaluations, with a run folder. A second call with the
    same config resumes the run.

    Args:
      config: a YAML file, or a `tunix_like.config.schema.Config`.
      overrides: `key=value` strings, e.g. `["training.seed=1"]`; ignored if `config` is a `Config`.
      on_row: called with every row of metrics when the row is logged.

    Returns:
      the last row of metrics.

    Raises:
      UserError: the config or the data is wrong.
      Further errors are those of `Learner.train`.
    """
    name = "run" if isinstance(config, Config) else config
    config = config if isinstance(config, Config) else load(config, overrides)
    parts = assemble(config)
    folder = run_folder(config, name, str(parts.config.algorithm.advantage_estimator))
    with prepared(parts, folder, on_row) as learner:
        return learner.train(parts.source.train, parts.source.eval, **data_options(parts.config))


@contextlib.contextmanager
def prepared(
    parts: Parts,
    folder: Path,
    on_row: OnRow,
    on_samples: Callable[[int, Samples], None] | None = None,
    on_claim: Callable[[], None] = lambda: None,
) -> Iterator[Learner]:
    """Context manager that prepares the run folder, runs SFT (if configured), and yields the learner for RL.

    If the last checkpoint of SFT could not be written, RL can still run. `NotSaved` is then raised at the end of the
    context, unless the body raises an error.

    Args:
      on_row: called with every row of metrics.
      on_samples: called with the step and its best and worst completion of one prompt; see `Learner`.
      on_claim: called after the folder was checked and the config of the run was written into it (`folder.claim`).
    """
    source, unsaved = parts.source, None
    with owned(folder):
        claim(folder, parts)
        on_claim()
        # The servers are checked before SFT, which can take hours.
        with compared_once(source.train, source.eval), server_engine(parts, folder) as engine:
            if parts.config.sft.max_steps:
                unsaved = fine_tune(parts, folder, on_row, another_follows=True)
            yield make_learner(parts, folder, on_row, on_samples, engine)
    if unsaved is not None:
        raise unsaved


def data_options(config: Config) -> dict[str, Any]:
    """Returns the keyword arguments of `Learner.train` that a config sets."""
    data = config.data
    return {"batch_size": data.batch_size, "shuffle": data.shuffle, "overlong_prompts": data.overlong_prompts}


@contextlib.contextmanager
def server_engine(parts: Parts, folder: Path) -> Iterator[Engine | None]:
    """Context manager that connects to the servers of `rollout.urls` and yields an engine that samples on these
    servers. Yields None if this process samples the completions.

    Raises:
      UserError: a server cannot be reached or used, or the package `aiohttp` is missing.
    """
    rollout = parts.config.rollout
    if rollout.engine == "local":
        yield None
        return
    try:
        from tunix_like.rollout.engines.vllm import VLLMEngine
    except ModuleNotFoundError as error:
        raise UserError(
            f"rollout.engine: vllm needs the package {error.name}; install it with pip install 'tunix-like[vllm]'."
        ) from None
    own = folder / "engine_weights"
    if processes.is_first():
        shutil.rmtree(own, ignore_errors=True)  # left by a process that was killed
    weights = own if rollout.weights_folder is None else Path(rollout.weights_folder)
    engine = VLLMEngine(
        parts.model,
        parts.tokenizer,
        rollout,
        weights,
        max_gap=parts.config.training.max_logprob_gap,
        mesh=parts.mesh,
    )
    try:
        yield engine
    finally:
        engine.close()


def make_learner(
    parts: Parts,
    folder: Path,
    on_row: OnRow,
    on_samples: Callable[[int, Samples], None] | None = None,
    engine: Engine | None = None,
) -> Learner:
    """Builds the learner of the config, which trains the run's model in place.

    Args:
      engine: samples the completions; None means that this process samples.
    """
    config = parts.config
    return parts.learner(
        model=parts.model,
        tokenizer=parts.tokenizer,
        reward_fns={name: function for name, function, _ in parts.rewards},
        reward_weights=[weight for _, _, weight in parts.rewards],
        algo_config=config.algorithm,
        rollout_config=config.rollout,
        training_config=dataclasses.replace(config.training, output_dir=str(folder), actor_optimizer=config.optimizer),
        eval_config=config.eval,
        mesh=parts.mesh,
        environment=parts.environments,
        environment_config=config.environment,
        engine=engine,
        success_threshold=config.rewards.success_threshold,
        source_estimators=parts.source_estimators,
        on_row=on_row,
        on_samples=on_samples,
    )


def fine_tune(parts: Parts, folder: Path, on_row: OnRow, another_follows: bool) -> NotSaved | None:
    """Runs SFT on the run's model in place, with checkpoints in the run's folder.

    If the last checkpoint cannot be written, the error is returned instead of raised, so that the run can continue. If
    a signal stopped SFT, an exception is raised in any case.
    """
    config, evaluate, evaluator = parts.config, None, None
    if len(parts.source.eval):
        quick = dataclasses.replace(config.eval, samples=1, k=[1], batch_size=4 * config.eval.batch_size)
        evaluator = parts.evaluator(quick)
        kept = folder / "rollouts" / "eval" if processes.is_first() else None
        evaluate = lambda params, step: evaluator(params, rollouts=kept, step=step).metrics  # noqa: E731
    trainer = SFTTrainer(
        model=parts.model,
        tokenizer=parts.tokenizer,
        sft_config=config.sft,
        rollout_config=config.rollout,
        training_config=dataclasses.replace(config.training, output_dir=str(folder)),
        mesh=parts.mesh,
        evaluate=evaluate,
    )
    total = config.sft.max_steps
    try:
        trainer.train(
            parts.source.train,
            on_row=lambda row: on_row(row, total),
            shuffle=config.data.shuffle,
            another_follows=another_follows,
        )
    except NotSaved as error:
        if error.stopped:
            raise
        return error.with_traceback(None)  # a traceback would keep the trainer and its optimizer state in memory
    finally:
        if evaluator is not None:
            evaluator.close()  # the learner starts its own worker processes
    return None
