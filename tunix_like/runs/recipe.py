"""Runs the training that a config describes: supervised fine-tuning, then reinforcement learning.

`run` is the Python equivalent of `tunix-like train`; the command line calls the same functions.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tunix_like.config.argument_names import named_arguments
from tunix_like.config.load import load
from tunix_like.config.schema import Config
from tunix_like.data.curriculum import curriculum_of
from tunix_like.data.shared import rows_warned_once
from tunix_like.environments.arguments import check_turns
from tunix_like.errors import NotSaved, UserError
from tunix_like.rewards.served_model import ServedModel
from tunix_like.rollout.engines.registry import EngineSetup, engine_of, find_engine
from tunix_like.runs.build import Parts, assemble
from tunix_like.runs.folder import claim, run_folder
from tunix_like.runtime import console, processes
from tunix_like.runtime.moment import moment_of
from tunix_like.session.callbacks import Callback, check_callbacks
from tunix_like.session.display import displayed
from tunix_like.storage.mirror import local_folder
from tunix_like.storage.run_lock import owned
from tunix_like.training.answers import Answers
from tunix_like.training.learner import Learner
from tunix_like.training.preferences import DPOLearner, check_pairs
from tunix_like.training.preferences import with_prompts as pairs_with_prompts
from tunix_like.training.sft import SFTTrainer, checked_answers, with_prompts
from tunix_like.types import Engine


@named_arguments
def run(
    config: Config | str | Path, overrides: Sequence[str] = (), *, callbacks: Sequence[Callback] = ()
) -> dict[str, Any]:
    """Trains a model as `tunix-like train` does: SFT, RL and evaluations, with a run folder. A second call with the
    same config resumes the run.

    Args:
      config: a YAML file, or a `tunix_like.config.schema.Config`.
      overrides: `key=value` strings, e.g. `["training.seed=1"]`; ignored if `config` is a `Config`.
      callbacks: as in `Learner.train`. Of SFT before it, only those that show progress are told.

    Returns:
      the last row of metrics.

    Raises:
      UserError: the config or the data is wrong; further errors are those of `Learner.train`.
    """
    name = "run" if isinstance(config, Config) else config
    config = config if isinstance(config, Config) else load(config, overrides)
    check_callbacks(callbacks)
    with contextlib.ExitStack() as stack:
        all_callbacks = stack.enter_context(displayed(callbacks))
        parts = assemble(config)
        folder = run_folder(config, name, str(parts.config.algorithm.advantage_estimator))
        displays = [callback for callback in all_callbacks if callback.shows_progress]
        learner = stack.enter_context(prepared(parts, folder, displays))
        options = data_options(parts.config)
        return learner.train(parts.source.train, parts.source.eval, callbacks=all_callbacks, **options)


@contextlib.contextmanager
def prepared(
    parts: Parts,
    place: str | Path,
    callbacks: Sequence[Callback] = (),
    on_claim: Callable[[], None] = lambda: None,
) -> Iterator[Learner | DPOLearner]:
    """Context manager that prepares the run folder, runs SFT (if configured), and yields the learner for RL.

    If the last checkpoint of SFT could not be written, RL can still run. `NotSaved` is then raised at the end of the
    context, unless the body raises an error.

    Args:
      place: the run folder, or its address in object storage.
      callbacks: told of SFT. Those of RL are an argument of `Learner.train`.
      on_claim: called after the folder was checked and the config of the run was written into it (`folder.claim`).
    """
    source = parts.source
    unsaved = None
    folder = local_folder(place)
    with owned(place):
        claim(place, parts)
        on_claim()
        # Servers of rewards and the engine are checked before SFT, which can take hours.
        check_reward_servers(parts)
        with rows_warned_once(source.train, source.eval), chosen_engine(parts, folder) as engine:
            if parts.config.sft.max_steps:
                unsaved = fine_tune(parts, folder, callbacks, another_follows=True)
            yield make_learner(parts, folder, engine)
    if unsaved is not None:
        raise unsaved


def check_answers(parts: Parts) -> None:
    """Checks the answers of SFT, and the pairs, of all rows, as their trainers do. Raises UserError."""
    config = parts.config
    source = parts.source
    if config.sft.max_steps:
        checked_answers(with_prompts(source.train), parts.tokenizer, config.rollout)
    if issubclass(parts.learner, DPOLearner):
        for rows, what in ((source.train, "training"), (source.eval, "evaluation")):
            answers = Answers(parts.tokenizer, config.rollout)
            check_pairs(pairs_with_prompts(rows, what), answers, parts.learner.who, what)


def data_options(config: Config) -> dict[str, Any]:
    """Returns the keyword arguments of `Learner.train` that a config sets."""
    data = config.data
    options = {
        "batch_size": data.batch_size,
        "shuffle": data.shuffle,
        "overlong_prompts": data.overlong_prompts,
    }
    return options | ({"curriculum": curriculum_of(data)} if data.curriculum else {})


@contextlib.contextmanager
def chosen_engine(parts: Parts, folder: Path) -> Iterator[Engine | None]:
    """Context manager that makes the engine of `rollout.engine`, and closes it at the end if it has a method `close`.
    Yields None for the sampler of this process, which the learner makes itself.

    Raises:
      UserError: the engine cannot be used.
    """
    engine = engine_of(_engine_setup(parts, folder))
    try:
        if engine is not None:
            check_turns(parts.environments is not None, engine)
        yield engine
    finally:
        if callable(close := getattr(engine, "close", None)):
            close()


def _engine_setup(parts: Parts, folder: Path) -> EngineSetup:
    config = parts.config
    return EngineSetup(
        parts.model, parts.tokenizer, config.rollout, folder, parts.mesh, config.training.max_logprob_gap
    )


def check_reward_servers(parts: Parts) -> None:
    """Prints one line about each server of the rewards. Raises UserError if it does not answer."""
    for name, function, _ in parts.rewards:
        if isinstance(function, ServedModel):
            model = processes.by_first(function.check)
            console.print_text(f"{name:>9}: {function.url}, model {model}")


def check_servers(parts: Parts) -> None:
    """Prints one line about each server of the rewards and the engine. Raises UserError if a run could not use one of
    them."""
    check_reward_servers(parts)
    ask = find_engine(parts.config.rollout.engine).ask_servers
    if ask is None:
        return
    answers = ask(_engine_setup(parts, Path()))
    for url, answer in answers:
        console.print_text(f"{'server':>9}: {answer if isinstance(answer, UserError) else f'{url}, {answer}'}")
    if unfit := [url for url, answer in answers if isinstance(answer, UserError)]:
        raise UserError(f"dry run: {len(unfit)} of {len(answers)} servers of rollout.urls cannot be used; see above.")


def make_learner(parts: Parts, folder: Path, engine: Engine | None = None) -> Learner | DPOLearner:
    """Builds the learner of the config, which trains the run's model in place. Without an engine, this process
    samples."""
    config = parts.config
    if issubclass(parts.learner, DPOLearner):
        return _make_pair_learner(parts, parts.learner, folder)
    return parts.learner(
        model=parts.model,
        tokenizer=parts.tokenizer,
        reward_fns={name: function for name, function, _ in parts.rewards},
        reward_weights=[weight for _, _, weight in parts.rewards],
        algo_config=config.algorithm,
        rollout_config=config.rollout,
        training_config=dataclasses.replace(config.training, output_dir=str(folder), actor_optimizer=config.optimizer),
        eval_config=config.eval,
        teacher=parts.teacher,
        source_teachers=parts.source_teachers,
        teacher_config=config.teacher,
        critic=parts.critic,
        critic_config=config.critic,
        mesh=parts.mesh,
        environment=parts.environments,
        environment_config=config.environment,
        engine=engine,
        success_threshold=config.rewards.success_threshold,
        source_estimators=parts.source_estimators,
    )


def _make_pair_learner(parts: Parts, learner: type[DPOLearner], folder: Path) -> DPOLearner:
    """Builds a learner on pairs of completions. If there are rewards, its evaluations also sample and score answers."""
    config = parts.config
    evaluate = None
    names = list[str]()
    if len(parts.source.eval) and parts.rewards:
        evaluator = parts.evaluator(config.eval)
        names = evaluator.objectives()
        kept = folder / "rollouts" / "eval" if processes.is_first() else None
        evaluate = lambda params, step: evaluator(params, kept, step, moment_of(step, step, made.total)).metrics  # noqa: E731
    made: DPOLearner = learner(
        model=parts.model,
        tokenizer=parts.tokenizer,
        preference_config=config.preference,
        rollout_config=config.rollout,
        training_config=dataclasses.replace(config.training, output_dir=str(folder), actor_optimizer=config.optimizer),
        mesh=parts.mesh,
        evaluate=evaluate,
        metrics_of_evaluate=names,
    )
    return made


def fine_tune(parts: Parts, folder: Path, callbacks: Sequence[Callback], another_follows: bool) -> NotSaved | None:
    """Runs SFT on the run's model in place. `training.callbacks` are those of training that follows. If the last
    checkpoint cannot be written and no signal stopped SFT, the error is returned, so that the run can continue."""
    config = parts.config
    evaluate = None
    evaluator = None
    if len(parts.source.eval) and parts.judged:
        quick = dataclasses.replace(config.eval, samples=1, k=[1], batch_size=4 * config.eval.batch_size)
        evaluator = parts.evaluator(quick)
        kept = folder / "rollouts" / "sft_eval" if processes.is_first() else None
        evaluate = lambda params, step: evaluator(params, rollouts=kept, step=step).metrics  # noqa: E731
    training = dataclasses.replace(config.training, output_dir=str(folder))
    training = dataclasses.replace(training, callbacks=None) if another_follows else training
    trainer = SFTTrainer(
        model=parts.model,
        tokenizer=parts.tokenizer,
        sft_config=config.sft,
        rollout_config=config.rollout,
        training_config=training,
        mesh=parts.mesh,
        evaluate=evaluate,
    )
    options = {"shuffle": config.data.shuffle, "another_follows": another_follows}
    try:
        trainer.train(parts.source.train, callbacks=callbacks, **options)
    except NotSaved as error:
        if error.stopped:
            raise
        return error.with_traceback(None)  # a traceback would keep the trainer and its optimizer state in memory
    finally:
        if evaluator is not None:
            evaluator.close()  # the learner starts its own worker processes
    return None
