"""Defines `Learner`, the base class of all RL algorithms: rollouts, rewards and the compiled training step.

`learners.py` declares the algorithms.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import grain.python as grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from tunix_like.algorithms.objective import Objective, build_objective, check_accepts_negative, trace_user_functions
from tunix_like.algorithms.ppo import PPO
from tunix_like.config.argument_names import named_arguments
from tunix_like.config.load import as_dict
from tunix_like.config.schema import (
    AlgorithmConfig,
    CriticConfig,
    EnvironmentConfig,
    EvalConfig,
    OptimizerConfig,
    RLTrainingConfig,
    RolloutConfig,
    TeacherConfig,
)
from tunix_like.data.curriculum import Curriculum, CurriculumBatches, check_curriculum
from tunix_like.data.shared import warn_shared, warn_text_prompts
from tunix_like.data.stream import Prompt, check_prompts, refusing
from tunix_like.environments.arguments import (
    check_reward_names,
    check_turn_rewards,
    check_turns,
    make_player,
)
from tunix_like.environments.outcomes import are_agents
from tunix_like.errors import EngineLost, UserError
from tunix_like.evaluation.evaluate import EVAL_KEY, Evaluation, Evaluator, check_best_metric, eval_problems
from tunix_like.models.decoder import Decoder
from tunix_like.models.loading import check_fit
from tunix_like.models.sharding import check_batch, fetch, place_replicated, scope
from tunix_like.planning.memory import Companions
from tunix_like.rewards import close_pools
from tunix_like.rewards.turns import TurnReward, is_potential
from tunix_like.rollout.collection import (
    Collector,
    advantages_of_turns,
    credit_of_turns,
    longest_batch,
    training_batch,
)
from tunix_like.rollout.files import FirstFailure, RolloutFiles, saved_on_failure
from tunix_like.rollout.rollouts import Rollout, Task, WeightedReward, warn_cut, weighted_rewards
from tunix_like.rollout.samples import pick_samples
from tunix_like.runtime import progress
from tunix_like.runtime.moment import START, Moment, moment_of
from tunix_like.runtime.profile import Clock, Compilations, Profile
from tunix_like.session.callbacks import Callback
from tunix_like.session.diagnosis import SignalWatch
from tunix_like.session.guards import remove_files_after
from tunix_like.training import loop
from tunix_like.training.arguments import (
    check_arguments,
    check_rows,
    environment_identity,
    forward_options,
    resolve_algorithm,
    rollout_identity,
    source_settings,
)
from tunix_like.training.companions import Reference, make_reference, make_teachers
from tunix_like.training.critic import Critic, resolve_critic
from tunix_like.training.engine import (
    CheckedEngine,
    check_routing_replay,
    check_settings,
    make_engine,
    warn_of_settings,
)
from tunix_like.training.generation import complete, sampling_of, with_rollout
from tunix_like.training.rollouts_ahead import RolloutsAhead
from tunix_like.training.step_metrics import advantage_metrics, speed_metrics, user_metrics
from tunix_like.training.teacher import Teacher, Teachers, check_reference, resolve_teacher
from tunix_like.training.token_signals import signal_sources
from tunix_like.training.trainer import Trainer, check_batch_size
from tunix_like.training.updates import Updates
from tunix_like.types import Engine, GroupBatch, Problem, RewardFunction

logger = logging.getLogger("tunix_like")


@dataclasses.dataclass
class _Call:
    """The objects that one call of `Learner.train` uses."""

    rollouts: RolloutsAhead
    updates: Updates
    evaluator: Evaluator | None
    files: RolloutFiles
    signal_watch: SignalWatch
    profile: Profile
    compilations: Compilations = dataclasses.field(default_factory=Compilations)


class _Data(NamedTuple):
    """The arguments of `Learner.train` that concern data."""

    train: Any
    eval: Sequence[Mapping[str, Any]] | None
    batch_size: int
    shuffle: bool
    overlong: str
    curriculum: Curriculum | None


class Learner(Trainer):
    """Trains a model with reinforcement learning: samples groups of completions, scores them and updates the weights.

    Args:
      model: a `Decoder`. If it has adapters, only the adapters are trained, otherwise all weights. The trained weights
        are donated to the compiled step; `train` writes them back to the model when it ends.
      tokenizer: a `tunix_like` tokenizer or a transformers fast tokenizer.
      reward_fns: one or several functions `f(prompts, completions, **columns) -> list of numbers`. A mapping gives
        names to the functions. The (weighted) sum of their numbers is the reward. None means that a function does not
        apply to a completion, NaN or an exception that the completion cannot be scored. Functions run in this process;
        functions made by `tunix_like.rewards.pooled` run in worker processes, with a time limit.
      algo_config: an instance of the learner's config class; defaults to `config_class()`.
      rollout_config: settings of sampling.
      training_config: settings of training.
      eval_config: settings of evaluation.
      ref_model: reference model of the KL if `beta > 0`; it can be quantised. Its weights are copied only if they share
        memory with trained weights. Defaults to the model with its initial weights. If the adapters are newly
        initialised, the default is the frozen base without adapters, and nothing is copied.
      teacher: scores every sampled token (on-policy distillation), in addition to the rewards, or alone with
        `DistillationLearner`. It can be another model with the same vocabulary, and can be quantised.
      source_teachers: `{data source: model}`: the teacher of rows with this data source in their column `data_source`;
        the address of a vLLM server or "self" can take the place of a model. Rows of other sources have `teacher`, or
        no teacher.
      teacher_config: settings of all teachers. With `path="self"`, the policy with another prompt is the teacher.
      critic: the critic of `PPOLearner`, a model with a scalar head (`tunix_like.add_scalar_head`) and the vocabulary
        of the policy. Its trained weights are donated and written back like those of the model. Defaults to the model
        with its initial weights (if it has adapters: its frozen base, with new adapters) and a head that gives 0.
      critic_config: settings of the critic.
      mesh: devices to train on, from `tunix_like.models.sharding.build_mesh`; defaults to a single device.
      reward_weights: one factor per reward function; defaults to ones.
      success_threshold: a completion succeeds (pass@k) if its total reward is at least this value.
      source_estimators: `{data source: {"advantage_estimator": ..., <its parameters>}}`: the estimator of groups with
        this data source in their column `data_source`. Loss and aggregation are the same for all groups.
      metric_fns: `f(prompts, completions, rewards, advantages, **columns) -> {name: (value, aggregation)}`, called in
        every step. `aggregation` is a function that reduces `value` to a number.
      engine: generates completions; defaults to the in-process sampler of this model.
      environment: gives completions several turns. It is a class or factory of `Environment`s (which run in this
        process), a list of functions that the model can call as tools, or an object that runs environments, such as an
        `EnvironmentPool`. The rewards of environments are added to the rewards of `reward_fns`, which can be empty.
      environment_config: settings of the environment, such as the maximum number of turns.

    Raises:
      UserError: the config belongs to another learner, a key is set that has no effect, or a value is out of range.
    """

    name = "train"
    step_key = "step"
    _how_to_change = (
        "`set_rewards(reward_fns, reward_weights)` changes the rewards. For other settings construct another learner; "
        "learners with equal settings share compiled programs."
    )
    config_class: ClassVar[type[AlgorithmConfig]] = AlgorithmConfig

    def __init__(
        self,
        *,
        model: Decoder,
        tokenizer: Any,
        reward_fns: RewardFunction | Sequence[RewardFunction] | Mapping[str, RewardFunction] = (),
        algo_config: AlgorithmConfig | None = None,
        rollout_config: RolloutConfig | None = None,
        training_config: RLTrainingConfig | None = None,
        eval_config: EvalConfig | None = None,
        ref_model: Decoder | None = None,
        teacher: Decoder | None = None,
        source_teachers: Mapping[str, Decoder | str] | None = None,
        teacher_config: TeacherConfig | None = None,
        critic: Decoder | None = None,
        critic_config: CriticConfig | None = None,
        mesh: Mesh | None = None,
        reward_weights: Sequence[float] | None = None,
        success_threshold: float = 1.0,
        source_estimators: Mapping[str, Mapping[str, Any]] | None = None,
        metric_fns: Sequence[Callable[..., Mapping[str, tuple[Any, Callable[[Any], float]]]]] = (),
        engine: Engine | None = None,
        environment: Any = None,
        environment_config: EnvironmentConfig | None = None,
    ):
        super().__init__(model, tokenizer, rollout_config, training_config, mesh)
        if ref_model is not None:
            check_reference(ref_model, self.tokenizer, mesh)
        check_arguments(
            eval_config=eval_config,
            metric_fns=metric_fns,
            engine=engine,
            success_threshold=success_threshold,
            source_estimators=source_estimators,
            source_teachers=source_teachers,
        )
        self.algo = resolve_algorithm(type(self).__name__, self.config_class, algo_config)
        self.eval_config = EvalConfig() if eval_config is None else eval_config
        self.metric_fns = tuple(metric_fns)
        self.player = make_player(environment, environment_config, self.tokenizer, self.rollout_config)
        self.tokenizer = self.tokenizer if self.player is None else self.player.tokenizer
        self.success_threshold = success_threshold
        if ref_model is not None and self.algo.beta == 0:
            raise UserError("ref_model: algorithm.beta is 0, so no reference is read. Set beta, or leave it out.")
        if engine is None and self.rollout_config.engine != "local":
            raise UserError(
                f"rollout.engine: got '{self.rollout_config.engine}'; give the engine itself: engine=VLLMEngine(...)."
            )
        plays = self.player is not None
        check_settings(self.algo, self.rollout_config, self.training, plays=plays, elsewhere=engine is not None)
        warn_of_settings(self.algo, self.rollout_config)
        self.source_estimators = source_settings(source_estimators or {})
        self.teacher_config = resolve_teacher(teacher, teacher_config, of_sources=bool(source_teachers))
        self.critic_config = resolve_critic(critic, critic_config, self.algo)
        objective = self._objective(1)
        trace_user_functions(objective, 2, self.algo.num_generations)
        self.set_rewards(reward_fns, reward_weights)
        check_turns(plays, engine)
        check_routing_replay(self.rollout_config, model.config)
        self.teachers: Teachers | None = None
        if self.teacher_config is not None:
            self.teachers = make_teachers(self, self.teacher_config, teacher, source_teachers or {}, plays)
        self.options = forward_options(self.rollout_config, self.training, self.algo)
        self.reference: Reference | None = make_reference(self, ref_model) if self.algo.beta > 0 else None
        self.critic: Critic | None = None
        if self.algo.advantage_estimator == PPO:
            others = (self.reference, *self._distinct_teachers)
            held = [model.params for model in others if model is not None]
            self.critic = Critic(self.critic_config, self, critic, held)
        self.engine: Engine = (
            make_engine(self.graphdef, self.tokenizer, self.rollout_config, mesh, self.companions, self.training)
            if engine is None
            else CheckedEngine(engine, model.config, self.task)
        )
        self._warmup = 0 if self.critic is None else self.critic_config.warmup_steps
        """Steps without an update of the policy."""
        self.key = jax.random.key(self.training.seed)
        self.first_failure = FirstFailure()
        self._call: _Call | None = None
        self._arguments = frozenset(inspect.signature(Learner).parameters)

    def set_rewards(
        self,
        reward_fns: RewardFunction | Sequence[RewardFunction] | Mapping[str, RewardFunction],
        reward_weights: Sequence[float] | None = None,
    ) -> None:
        """Replaces the reward functions and their weights, between two calls of `train`. Weights, optimizer state, step
        number and compiled programs are kept. The arguments are those of the constructor, with the same checks.

        With a run folder, the names and weights of the rewards must be those of the checkpoint.
        """
        objective = self._objective(1)
        # An environment gives rewards itself, and a teacher alone needs none.
        nothing = (self.player is not None or not objective.reads_rewards) and not reward_fns
        rewards = [] if nothing else weighted_rewards(reward_fns, reward_weights)
        check_reward_names(self.player, [name for name, _, _ in rewards])
        check_turn_rewards(rewards, self.algo, self.player is not None)
        if any(weight < 0 and not is_potential(function) for _, function, weight in rewards):
            check_accepts_negative(objective, "reward_weights", "weights of at least 0")
        self._rewards = rewards

    def _objective(self, updates_per_batch: int) -> Objective:
        length = self.rollout_config.max_tokens_to_generate
        return build_objective(self.algo, length, updates_per_batch, self.source_estimators, self.teacher_config)

    @property
    def _distinct_teachers(self) -> list[Teacher]:
        return [] if self.teachers is None else self.teachers.distinct

    @property
    def companions(self) -> Companions:
        works = tuple(teacher.work for teacher in self._distinct_teachers if teacher.work is not None)
        return Companions(self.reference is not None, works, None if self.critic is None else self.critic.work)

    @property
    def rewards(self) -> list[WeightedReward]:
        """The name, the function and the weight of each reward function."""
        return self._rewards

    @property
    def task(self) -> Task:
        """The settings of sampling and scoring."""
        return Task(self.algo, self.rollout_config, self._rewards, self.success_threshold)

    @named_arguments
    def train(
        self,
        train_ds: Any,
        eval_ds: Sequence[Mapping[str, Any]] | None = None,
        *,
        batch_size: int = 8,
        shuffle: bool = True,
        overlong_prompts: str = "skip",
        curriculum: Curriculum | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> dict[str, Any]:
        """Trains on a dataset of dicts with a `prompt` (text or messages) and any other columns.

        Args:
          train_ds: a sequence, a grain dataset (unbatched) or an iterable. `training_config.max_steps=None` trains for
            one epoch; an incomplete last batch is dropped.
          eval_ds: held-out rows, evaluated before and after training, and every `eval_every_n_steps`.
          batch_size: prompts per step. If fewer rows are usable, their number is used, and a warning is logged.
          shuffle: shuffles a sequence or a grain `MapDataset` in every epoch; other data keep their order.
          overlong_prompts: what to do with rows whose prompt is empty or longer than `max_prompt_length`: "skip" drops
            these rows and warns of their number; "error" raises. The evaluated rows of `eval_ds` and the first 20,000
            rows of `train_ds` are checked before training, other rows when they are read. With an iterable, rows
            with such prompts are always dropped.
          curriculum: draws the prompts by their estimated difficulty, for data with a length; `shuffle` then has no
            effect. An epoch has as many draws as there are rows.
          callbacks: objects that are told of rows of metrics, samples and checkpoints, and can stop the run. Without a
            callback that has `shows_progress`, progress and metrics are shown in a notebook and on a terminal.

        Returns:
          the last row of metrics. With `training_config.output_dir`, metrics, rollouts and checkpoints are written to
          this folder, and a second call resumes the run. Without a folder, a second call runs another `max_steps` steps
          (or one epoch), and continues step numbers, random numbers and the optimizer state. If the data is the same
          (object, batch size and shuffling), the second call continues with the next prompts. All calls of a learner,
          and learners with equal settings, share compiled programs. Unless the schedule is `constant`, the step is
          compiled again if the number of the last step changes.

        Raises:
          UserError: the data is wrong; the reward functions failed for all completions of the first step (these
            completions are written to `rollouts/`); another process uses the run folder; or all checkpoints are damaged
            or belong to a run with other settings.
          NotSaved: all steps are done, or a signal stopped the run, and the last checkpoint could not be written.
          EngineLost: the servers that generate completions, or the service of the environments, do not answer, or no
            completion could be scored in `training_config.max_unscored_steps` consecutive steps.
          CallbackFailed: a callback raised an exception.
          SamplerDrifted: `training_config.later_logprob_gap` is "error", and the log-probabilities of sampler and
            trainer differed too much in a step after the first.
          Stopped, Interrupted: SIGTERM, SIGHUP or SIGINT (Ctrl-C) stopped the run.

        If a run with a folder ends with `EngineLost`, `SamplerDrifted`, `CallbackFailed`, `Stopped` or `Interrupted`,
        its last complete step is saved.
        """
        check_batch_size(batch_size)
        if eval_ds is not None:
            check_rows(eval_ds)
        if self.folder is None and self.training.best_metric is not None:
            raise UserError("training.best_metric: it needs an output folder; set training.output_dir.")

        def prepare() -> None:
            self._call = self._prepare(_Data(train_ds, eval_ds, batch_size, shuffle, overlong_prompts, curriculum))

        return loop.train(self, prepare, callbacks)

    def begin(self) -> None:
        super().begin()
        if self.critic is not None:
            self.critic.begin(self.folder is not None)

    def end(self) -> None:
        assert self._call is not None
        self._call.rollouts.close()
        self._call.profile.close()
        self._close_workers()
        if self.critic is not None:
            self.critic.write_back()

    def _described(self) -> list[str]:
        names = ", ".join(name for name, _, _ in self.rewards)
        return [f"rewards {names or ('none' if self.player is None else 'of the environment')}"]

    def _prepare(self, data: _Data) -> _Call:
        """Checks the data, and builds the objects that this call of `train` uses, such as the evaluator."""
        batch_size = self._check_prompts(data)
        mini = self.training.prompts_per_update(batch_size)
        check_batch(self.mesh, "data.batch_size", batch_size)
        check_batch(self.mesh, "training.mini_batch_size", mini)
        updates = -(-batch_size // mini) * self.algo.num_iterations
        objective = self._objective(updates)
        profile = Profile(self.training.profile_steps, self.folder)
        batches = self._open_batches(data, batch_size, objective)
        evaluator = self._open_evaluator(data)
        self.identity = self._identity(data.train, self._optimizer_config, self.rewards) | self._own_identity()
        self.identity |= {"batch_size": batch_size, "mini_batch_size": mini}
        self.identity |= {} if data.curriculum is None else {"curriculum": dataclasses.asdict(data.curriculum)}
        self._compile_updates(objective, updates)
        files = RolloutFiles(None if self.written_folder is None else self.written_folder / "rollouts")
        drawn = self._call.rollouts.drawn if self._call is not None and self.folder is None else 0
        sources = signal_sources(objective, self.teachers, self.critic)
        external_engine = isinstance(self.engine, CheckedEngine)
        step_updates = Updates(self, objective, mini, sources, self.reference, self.critic, external_engine)

        def compile_ahead(problems: Sequence[Problem]) -> None:
            step_updates.compile_ahead(longest_batch(problems, self.task, objective))

        collector = Collector(
            task=self.task,
            engine=self.engine,
            tokenizer=self.tokenizer,
            objective=objective,
            batches=batches,
            batch_size=batch_size,
            key=self.key,
            folder=files.folder,
            first_failure=self.first_failure,
            drawn=drawn,
            player=self.player,
            most_unscored=self.training.max_unscored_steps,
            total=self.total,
            on_first_prompts=compile_ahead if self.player is None and not self.rollout_config.routing_replay else None,
        )
        rollouts = RolloutsAhead(collector, self.engine, self.iterator, self.rollout_config.max_staleness, self.total)
        self.iterator = None if self.iterator is None else rollouts
        watch = SignalWatch(self.task, objective.extra_term)
        return _Call(rollouts, step_updates, evaluator, files, watch, profile)

    @property
    def _optimizer_config(self) -> Any:
        return self.training.actor_optimizer or OptimizerConfig()

    def _check_prompts(self, data: _Data) -> int:
        """Checks the prompts of training, and sets the number of the last step. Returns the number of prompts per
        step."""
        check_curriculum(data.curriculum, self.algo, self.rollout_config)
        steps = self.training.max_steps
        batch_size = data.batch_size
        if isinstance(data.train, Sequence | grain.MapDataset):
            limit = self.rollout_config.max_prompt_length
            if self.player is not None:
                self.player.check(data.train, limit)
            skipped = check_prompts(data.train, self.tokenizer, limit, data.overlong, "training")
            skipped.warn("training")
            batch_size = skipped.fitting_batch(batch_size)
            if steps is None and not self.algo.dynamic_sampling:
                steps = (len(data.train) - skipped.prompts) // batch_size
        elif data.curriculum is not None:
            kind = type(data.train).__name__
            raise UserError(f"curriculum: it needs a sequence or a grain MapDataset, got {kind}.")
        self.total = None if steps is None else self.done + steps
        return batch_size

    def _open_batches(self, data: _Data, batch_size: int, objective: Objective) -> Iterator[list[Prompt]]:
        """Opens the stream of the prompts of training."""
        if self.teachers is not None:
            self.teachers.check_rows(data.train, self.rollout_config.max_prompt_length, objective)
        drawn_by = None if data.curriculum is None else (data.curriculum, self.algo.num_generations)
        forever = self.training.max_steps is not None
        stream = self._open_stream(data.train, batch_size, data.shuffle, forever, curriculum=drawn_by)
        warn_shared(data.train, data.eval)
        if self.player is None or not are_agents(self.player.environments):
            warn_text_prompts(data.train, self.tokenizer)
        return refusing(stream, data.overlong)

    def _open_evaluator(self, data: _Data) -> Evaluator | None:
        judged = bool(self.rewards) or self.player is not None
        evaluator = None
        if data.eval is not None and len(data.eval) and judged:
            evaluator = self.evaluator(data.eval, data.overlong)
        check_best_metric(self.training, evaluator)
        return evaluator

    def _compile_updates(self, objective: Objective, updates: int) -> None:
        """Builds the compiled steps of the policy and the critic, for `updates` updates per step."""
        self._compile(
            objective,
            self.options,
            self._optimizer_config,
            None if self.total is None else max(self.total - self._warmup, 1) * updates,
            None if self.teachers is None else self.teachers.spec,
        )
        if self.critic is not None:
            self.critic.compile(self.training, None if self.total is None else self.total * updates)

    def _own_identity(self) -> dict[str, Any]:
        """Returns the settings of a learner on which the next step depends, besides those of every trainer."""
        own = {
            "algorithm": dataclasses.asdict(self.algo),
            "rollout": rollout_identity(self.rollout_config),
            "rewards": {name: weight for name, _, weight in self.rewards},
            "success_threshold": self.success_threshold,
            "source_estimators": self.source_estimators,
        }
        of_turns = {
            name: "potential" if f.potential else "turn" for name, f, _ in self.rewards if isinstance(f, TurnReward)
        }
        own |= {"reward_per": of_turns} if of_turns else {}
        if self.teachers is not None:
            own |= self.teachers.identity(self.mesh)
        if self.critic is not None:
            own["critic"] = self.critic.identity()
        if self.player is not None:
            own["environment"] = environment_identity(self.player.config)
        return own

    def to_save(self) -> Any:
        assert self._call is not None
        drawn = place_replicated(jnp.asarray(self._call.rollouts.drawn, jnp.int32), self.mesh)
        saved = super().to_save() | {"drawn": drawn}
        if self.critic is not None:
            saved["critic"] = self.critic.to_save()
        batches = self._call.rollouts.collector.batches
        if isinstance(batches, CurriculumBatches):
            saved["curriculum"] = place_replicated(jnp.asarray(batches.counts), self.mesh)
        return saved

    def restore(self, saved: Any, step: int, inputs_changed: bool) -> None:
        super().restore(saved, step, inputs_changed)
        if self.critic is not None:
            self.critic.restore(saved["critic"])
        assert self._call is not None
        batches = self._call.rollouts.collector.batches
        if isinstance(batches, CurriculumBatches):
            batches.counts = np.array(fetch(saved["curriculum"], self.mesh))
        self._call.rollouts.resume(int(saved["drawn"]), keep_ahead=not inputs_changed)

    def cut(self, step: int) -> None:
        if self.written_folder is not None:
            remove_files_after(self.written_folder, step)

    def evaluate_if_due(self, step: int, last: bool) -> dict[str, float]:
        assert self._call is not None
        every = self.training.eval_every_n_steps
        evaluator = self._call.evaluator
        if evaluator is None or not (step == 0 or last or (every is not None and step % every == 0)):
            return {}
        self._call.rollouts.wait()  # engine and rewards must not be used by two threads at the same time
        files = self._call.files.folder
        rollouts = None if files is None else files / "eval"
        return evaluator(self.params, rollouts, step, moment_of(step, step, self.total)).metrics

    def step(self, number: int) -> dict[str, Any] | None:
        assert self._call is not None
        call = self._call
        call.updates.gap_watch.check()
        with call.profile.around(number), scope(self.mesh):
            collected = call.rollouts.take(number, self.params)
            if collected is None:
                return None
            clock = Clock()
            rollout, metrics = collected
            objective = call.updates.objective.at(number)
            batch = training_batch(rollout, self.task, objective)
            with progress.task("reference"):
                batch, ref, kl_metrics = call.updates.apply_reference(batch)
            if ref is not None:
                clock.lap("reference")
            with progress.task("update"), saved_on_failure(call.files.folder, number, rollout.problems, rollout.texts):
                stale = metrics.get("staleness", 0) > 0
                try:
                    turn_credit = credit_of_turns(rollout, batch, objective) if self.algo.credit == "turn" else None
                    advantages, update_metrics = call.updates.run(
                        number, rollout.problems, batch, ref, stale, turn_credit
                    )
                except EngineLost:  # of a teacher
                    call.rollouts.put_back()
                    raise
            self.done = number  # set before functions of the user run, because they can fail
            clock.lap("update")
            made = kl_metrics | update_metrics
            made |= advantage_metrics(rollout, batch, advantages, objective, self.success_threshold)
            metrics = made | user_metrics(self.metric_fns, rollout, advantages) | metrics
            self._show(call, number, rollout, batch, advantages, turn_credit if self.critic is None else None)
            clock.lap("other")
            metrics |= clock.seconds
            speed = speed_metrics(self.model.config, batch, metrics, call.compilations)
            return metrics | speed | {"perf/update_programs": float(self.programs.traces)}

    def _show(
        self,
        call: _Call,
        number: int,
        rollout: Rollout,
        batch: GroupBatch,
        advantages: Float[np.ndarray, "P G"],
        turn_credit: Float[np.ndarray, "P G T"] | None,
    ) -> None:
        """Writes completions and picks samples at the configured steps, and warns if there is no training signal."""
        if number == 1 or number % self.training.log_rollouts_every_n_steps == 0:
            of_turns = None
            if turn_credit is not None:
                of_turns = advantages_of_turns(rollout, batch, turn_credit, advantages)
            call.files.write(number, rollout, batch, advantages, of_turns)
        if number == 1 and call.evaluator is None:  # which has warned before the first step
            warn_cut(f"step {number}", rollout.completions.finished)
        if call.updates.objective.reads_rewards:
            call.signal_watch(number, rollout, batch, advantages)
        every = self.training.log_samples_every_n_steps
        due = every is not None and (number == 1 or number % every == 0)
        self.samples = pick_samples(rollout, advantages) if due else None

    def _settings(self) -> dict[str, Any]:
        parts = {"algorithm": self.algo, "rollout": self.rollout_config, "training": self.training}
        parts |= {"eval": self.eval_config, "optimizer": self.training.actor_optimizer}
        return {name: as_dict(part) for name, part in parts.items() if dataclasses.is_dataclass(part)}

    def evaluate(self, eval_ds: Sequence[Mapping[str, Any]], *, overlong_prompts: str = "skip") -> Evaluation:
        """Evaluates the current weights on held-out rows. Rows whose prompt is empty or too long are skipped, or raise
        an error if `overlong_prompts` is "error"."""
        check_rows(eval_ds)
        try:
            with progress.watched():
                return self.evaluator(eval_ds, overlong_prompts)(self.params, moment=self._moment())
        finally:
            self._close_workers()

    def _moment(self) -> Moment:
        """Returns the moment of the newest weights."""
        return moment_of(self.done, self.done, self.total) if self.done else START

    def generate(self, prompts: Sequence[Any], *, seed: int = 0, **rollout: Any) -> list[str]:
        """Samples one completion of each prompt with the current weights. Returns the texts of the completions.

        The arguments are those of `tunix_like.generate`. Settings that are not given are those of the learner's
        `rollout_config`. The in-process sampler is used, and an environment does not answer.
        """
        config = with_rollout(self.rollout_config, rollout)
        check_fit(self.model.config, self.tokenizer, config)
        engine = make_engine(self.graphdef, self.tokenizer, config, self.mesh, self.companions, self.training)
        return complete(engine, self.params, self.tokenizer, prompts, sampling_of(config), seed)

    def _close_workers(self) -> None:
        close_pools(function for _, function, _ in self.rewards)
        if self.player is not None:
            self.player.environments.close()

    def evaluator(self, eval_ds: Sequence[Mapping[str, Any]], overlong_prompts: str = "skip") -> Evaluator:
        """Builds an evaluator for held-out rows. Warns if rows with an empty or too long prompt are skipped."""
        problems, skipped = eval_problems(
            eval_ds,
            self.tokenizer,
            self.rollout_config.max_prompt_length,
            self.eval_config.max_problems,
            overlong_prompts,
        )
        skipped.warn("evaluation")
        return Evaluator(
            self.engine,
            self.tokenizer,
            problems,
            self.rewards,
            self.eval_config,
            self.success_threshold,
            jax.random.fold_in(self.key, EVAL_KEY),
            self.first_failure,
            skipped,
            self.player,
        )
