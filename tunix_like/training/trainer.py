"""Defines `Trainer`, the base class of reinforcement learning and supervised fine-tuning.

A trainer owns the weights while it trains, and writes them back to its model at the end.
"""

from __future__ import annotations

import abc
import contextlib
import functools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import grain.python as grain
import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Bool, Float

from tunix_like.config.argument_names import NamedArguments
from tunix_like.config.load import as_dict
from tunix_like.config.schema import OptimizerConfig, RLTrainingConfig, RolloutConfig
from tunix_like.data.curriculum import Curriculum, CurriculumBatches
from tunix_like.data.stream import Prompt, Resumable, SharedBatches, prompt_batches
from tunix_like.errors import UserError, check_type, nearest
from tunix_like.models.decoder import Decoder, check_decoder
from tunix_like.models.loading import check_fit, save_description
from tunix_like.models.lora import fingerprint, join_params, save_adapter_config, split_params
from tunix_like.models.sharding import (
    check_divides,
    check_experts,
    check_lengths,
    fetch,
    place_params,
    place_replicated,
    shardings_of,
)
from tunix_like.planning.memory import ALONE, Companions
from tunix_like.planning.sizes import Planner
from tunix_like.rollout.rollouts import WeightedReward
from tunix_like.rollout.samples import Samples
from tunix_like.runtime.processes import by_first, is_first
from tunix_like.session.fingerprints import INPUTS, fingerprints
from tunix_like.step.forward import ForwardOptions, place_packed
from tunix_like.step.optimizer import (
    build_optimizer,
    build_schedule,
    init_optimizer,
    moment_segments,
    stack_moments,
    unstack_moments,
)
from tunix_like.step.train_step import (
    ProgramCache,
    StepObjective,
    StepPrograms,
    StepSpec,
    TeacherSpec,
    TrainState,
    step_programs,
)
from tunix_like.storage.checkpoints import Checkpoints
from tunix_like.storage.loggers import check_loggers, open_metrics
from tunix_like.storage.metrics import Best, MetricsLog
from tunix_like.storage.mirror import local_folder
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.types import GroupBatch


class _Stream(NamedTuple):
    """The iterator over batches of prompts of a call of `train`, with the rows and settings from which it was made."""

    rows: Any
    settings: tuple[Any, ...]
    batches: Iterator[list[Prompt]]


class ModelInTraining:
    """A model whose weights a compiled step replaces.

    Attributes:
      state: trained parameters and optimizer state, which each step replaces.
      frozen: the other parameters of the model; empty if all parameters are trained.
      rate_follows_total: whether the learning rate depends on the number of updates of the whole run.
      schedule: maps the number of an update to its learning rate; None if unknown.
      programs: the compiled functions of a step, built by `_compile`.
    """

    programs: StepPrograms

    def __init__(self, model: Decoder, mesh: Mesh | None):
        self.model = model
        self.mesh = mesh
        self.graphdef = nnx.split(model)[0]
        self.rate_follows_total = False
        self.schedule: optax.Schedule | None = None
        self.state = TrainState(None, None)
        self._own_programs: ProgramCache = OrderedDict()
        self._take_weights()

    @property
    def params(self) -> Any:
        """All weights of the model, trained and frozen."""
        return join_params(self.state.params, self.frozen)

    def _take_weights(self) -> None:
        """Shards the model's current weights over the mesh. The model and the trainer share the arrays."""
        params = place_params(nnx.to_pure_dict(nnx.split(self.model)[1]), self.mesh)
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(params)):
            raise UserError("the model's weights belong to a trainer that was interrupted; load the model again.")
        nnx.update(self.model, params)
        trained, self.frozen = split_params(params)
        self.state = self.state._replace(params=trained)

    def write_back(self) -> None:
        """Writes the current weights to the model."""
        nnx.update(self.model, self.params)

    def to_save(self) -> Any:
        """Returns the pytree to save in a checkpoint. Each layer has its own entry, so that every backend can restore
        it."""
        params, moments = self.state
        return {"params": params, "opt_state": unstack_moments(self._optimizer, moments, params, self._segments)}

    def _restore_state(self, saved: Any) -> None:
        params, moments = saved["params"], saved["opt_state"]
        self.state = TrainState(params, stack_moments(self._optimizer, moments, params, self._segments))

    def _compile(
        self,
        objective: StepObjective,
        options: ForwardOptions,
        optimizer: Any,
        updates: int | None,
        teacher: TeacherSpec | None = None,
    ) -> None:
        """Builds the optimizer, its state if there is none yet, and the compiled functions of a step.

        Args:
          optimizer: an `OptimizerConfig` or an optax transformation.
          updates: number of updates of the whole run; None if it is not known.
          teacher: the teacher whose divergence is a term of the loss.
        """
        shared = objective.built_in and isinstance(optimizer, OptimizerConfig)
        options = options.for_trained(bool(self.frozen), self.mesh)
        self._segments = moment_segments(self.model.config, optimizer, options.stacked)
        self.rate_follows_total = False
        if isinstance(optimizer, OptimizerConfig):
            self.rate_follows_total = optimizer.schedule != "constant"
            self.schedule = build_schedule(optimizer, updates)
            optimizer = build_optimizer(optimizer, updates, self._segments is not None)
        self._optimizer = optimizer
        if self.state.opt_state is None:
            moments = init_optimizer(optimizer, self.state.params, self._segments)
            self.state = self.state._replace(opt_state=moments)
        shardings = shardings_of(self.state, self.mesh)
        spec = StepSpec(self.graphdef, objective, optimizer, options, shardings, self._segments, teacher)
        self.programs = step_programs(spec, None if shared else self._own_programs)


_STATE = frozenset(
    [
        "done",
        "total",
        "rate_follows_total",
        "schedule",
        "programs",
        "iterator",
        "identity",
        "state",
        "frozen",
        "samples",
    ]
)
"""The public attributes of a trainer that change while it trains."""


class Trainer(NamedArguments, ModelInTraining, abc.ABC):
    """Base of `Learner` and `SFTTrainer`. A subclass implements `step`, which `loop.run` calls.

    Attributes:
      name: prefix of the metrics (`train`, `sft`).
      step_key: name of the metric that has the step number (`step`, `sft/step`).
      checkpoint_folder: name of the folder of checkpoints in the run folder.
      done: number of steps done so far. Without a run folder, a further call of `train` continues after this step. With
        a run folder, the call resumes from the newest checkpoint.
      total: number of the last step, or None to continue until the data is exhausted.
      iterator: the data iterator whose position is saved with a checkpoint; None if its position cannot be saved.
      identity: settings that a run must share with the checkpoint that it restores. For a model with adapters, the
        entry `base` is the `models.lora.fingerprint` of the frozen weights.
      samples: completions of the newest step to show to callbacks, or None.
    """

    samples: Samples | None = None
    name: ClassVar[str]
    step_key: ClassVar[str]
    checkpoint_folder: ClassVar[str] = "checkpoints"
    _trains_scalar_head: ClassVar[bool] = False
    _arguments: frozenset[str] = frozenset()  # those of the constructor, once it has run

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute. After construction, raises AttributeError for unknown names, and for settings, which would
        have no effect. A subclass of the user may set attributes of its own."""
        kind = type(self)
        arguments = self._arguments
        attribute = getattr(kind, name, None)
        settable = attribute is not None and getattr(attribute, "fset", True) is not None  # such as a method
        own = kind.__module__.startswith("tunix_like.")
        if not arguments or name.startswith("_") or name in _STATE or settable or not (own or name in arguments):
            return super().__setattr__(name, value)
        problem = f"is not a setting. {nearest(name, arguments)}"
        if name in arguments or hasattr(self, name):
            problem = "cannot be changed after construction."
        raise AttributeError(f"{kind.__name__}.{name} {problem} {self._how_to_change}", name=name)

    _how_to_change: ClassVar[str] = "Construct another trainer; equal settings share compiled programs."

    def __init__(
        self,
        model: Decoder,
        tokenizer: Any,
        rollout_config: RolloutConfig | None,
        training_config: RLTrainingConfig | None,
        mesh: Mesh | None,
    ):
        check_decoder("model", model)
        if model.config.scalar_head is not self._trains_scalar_head:
            other = "has no scalar head; call tunix_like.add_scalar_head(model)"
            raise UserError(f"model: it {'is a reward model' if model.config.scalar_head else other}.")
        self.rollout_config = RolloutConfig() if rollout_config is None else rollout_config
        self.training = RLTrainingConfig() if training_config is None else training_config
        check_type("rollout_config", self.rollout_config, RolloutConfig, "give a tunix_like.RolloutConfig(...)")
        check_type("training_config", self.training, RLTrainingConfig, "give a tunix_like.RLTrainingConfig(...)")
        check_loggers(self.training.loggers)
        self.tokenizer = Tokenizer.wrap(tokenizer)
        check_fit(model.config, self.tokenizer, self.rollout_config)
        check_divides(mesh, model.config)
        check_experts("mesh.axis_names", mesh, model.config)
        check_lengths(mesh, self.rollout_config)
        super().__init__(model, mesh)
        self.done = 0
        self.total: int | None = None
        self.iterator: Any = None
        self.identity: dict[str, Any] = {}
        self._stream: _Stream | None = None
        self._completed = False  # whether the previous call of `train` did all its steps

    def __repr__(self) -> str:
        sizes = (sum(leaf.size for leaf in jax.tree.leaves(part)) for part in (self.state.params, self.frozen))
        trained, frozen = sizes
        parts = [f"{trained:,} trained parameters", *([f"{frozen:,} frozen"] if frozen else [])]
        parts += [f"step {self.done}", *([] if self.folder is None else [f"folder {self.folder}"])]
        return f"{type(self).__name__}({', '.join([*parts, *self._described()])})"

    def _described(self) -> list[str]:
        """Returns further parts of the text `repr(self)`."""
        return []

    @property
    def companions(self) -> Companions:
        """The models that are held in memory beside the policy."""
        return ALONE

    @functools.cached_property
    def planner(self) -> Planner:
        return Planner(self.model, self.mesh, self._planned_training, self.rollout_config, self.companions)

    @property
    def _planned_training(self) -> RLTrainingConfig:
        """The settings of training, with the optimizer of this trainer."""
        return self.training

    @property
    def folder(self) -> Path | None:
        """The run folder, or its local copy if it is in object storage; None if the run has no folder."""
        return None if self.training.output_dir is None else local_folder(self.training.output_dir)

    @property
    def written_folder(self) -> Path | None:
        """The run folder if this process writes the files of the run (process 0), otherwise None."""
        return self.folder if is_first() else None

    @property
    def complete(self) -> bool:
        """Whether all steps up to `total` are done."""
        return self.total is not None and self.done >= self.total

    def token_logprobs(
        self, graphdef: Any, params: Any, batch: GroupBatch, rows: Bool[np.ndarray, "P G"] | None = None
    ) -> Float[np.ndarray, "P G T"]:
        """Returns a model's log-probabilities of the tokens of the completions that the mask `rows` selects (None: of
        all completions), 0 elsewhere. With a scalar head, these are the values of the states before the tokens."""
        rows = np.ones(batch.scored.shape, bool) if rows is None else rows
        return self.run_per_token(self.programs.logprobs, graphdef, params, batch, rows)

    def run_per_token(
        self, program: Any, graphdef: Any, params: Any, batch: GroupBatch, rows: Bool[np.ndarray, "P G"]
    ) -> Float[np.ndarray, "P G T"]:
        """Runs a program that gives one number per token on the completions `rows`; the other entries are 0."""
        packed = place_packed(self.planner.pack(batch, rows, len(rows)), self.mesh)
        placed = place_replicated(batch.routed_freely, self.mesh)
        return np.asarray(fetch(program(graphdef, params, placed, packed), self.mesh))

    # The loop calls the following methods.

    def begin(self) -> None:
        """Takes the model's current weights. With a run folder, also discards the step number, the data position and
        the optimizer state of the previous call of `train`, because the run resumes from a checkpoint."""
        self._take_weights()
        if self.folder is not None:
            self.done = 0
            self._stream = None
            self.state = self.state._replace(opt_state=None)

    def end(self) -> None:
        """Closes what a call of `train` has opened besides checkpoints and log, also after an error."""

    def open_checkpoints(self) -> Checkpoints | None:
        """Opens the checkpoints of the run folder, beside the description of the model; None without a run folder."""
        if self.folder is None:
            return None
        model = self.folder / "model"
        best = self.training.best_metric
        by_first(lambda: _write_description(self.model, self.tokenizer, model))
        kept = self.training.max_checkpoints_to_keep
        return Checkpoints(self.folder / self.checkpoint_folder, kept, None if best is None else Best(best))

    def open_log(self) -> MetricsLog:
        """Opens the log of metrics, with the configured loggers."""
        return open_metrics(self.folder, self.training.loggers, self._settings(), self.total, self.checkpoint_folder)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context manager for the steps of a call of `train`. Writes the weights back to the model."""
        self._completed = False
        try:
            yield
            self._completed = True
        except Exception:
            if self._stream is not None and not isinstance(self._stream.batches, SharedBatches):
                self._stream = None  # a generator yields nothing after it has raised
            raise
        finally:
            self.write_back()

    @abc.abstractmethod
    def step(self, number: int) -> dict[str, Any] | None:
        """Runs training step `number` (counted from 1). Returns the metrics of the step, or None if the data is
        exhausted.

        Metrics are numbers and lists of numbers. Their names do not have the prefix `self.name`, which the caller adds.
        """

    def restore(self, saved: Any, step: int, inputs_changed: bool) -> None:
        """Restores the trainer's state after step `step` from the pytree that `to_save` returned. `inputs_changed`
        says whether the reward functions or the training rows are no longer those of the checkpoint."""
        self._restore_state(saved)

    def cut(self, step: int) -> None:
        """Removes the files that the trainer wrote in steps after `step` (-1: in all steps), because the run repeats
        these steps."""

    def evaluate_if_due(self, step: int, last: bool) -> dict[str, float]:
        """Runs an evaluation if one is due after step `step` (0: before training). `last` is True after the last step.

        Returns the metrics of the evaluation under their logged names, or an empty dict if no evaluation is due.
        """
        return {}

    def finished(self, row: dict[str, Any]) -> bool:
        """Returns whether training ends early, because of the newest row of metrics."""
        return False

    @abc.abstractmethod
    def _settings(self) -> dict[str, Any]:
        """Returns the settings that loggers record if the run has no `config.yaml`."""

    # Subclasses call the following methods at the start of `train`.

    def _open_stream(
        self,
        rows: Any,
        batch_size: int,
        shuffle: bool,
        forever: bool,
        curriculum: tuple[Curriculum, int] | None = None,
    ) -> Iterator[list[Prompt]]:
        """Returns an iterator over batches of prompts. With a `curriculum`, settings and the number of completions per
        prompt, the rows are drawn by their difficulty, in no order.

        Without a run folder, it continues after the last batch of the previous call of `train` with the same data
        object and settings, unless an iterable is read for one epoch only.
        """
        size = len(rows) if isinstance(rows, Sequence | grain.MapDataset) else None
        settings = (size, batch_size, shuffle, forever, curriculum)
        limit = self.rollout_config.max_prompt_length
        seed = self.training.seed
        batches: Iterator[list[Prompt]]
        if (previous := self._previous_batches(rows, settings, forever)) is not None:
            batches = previous
        elif curriculum is not None:
            batches = CurriculumBatches(rows, self.tokenizer, batch_size, limit, seed, *curriculum, forever=forever)
        else:
            batches = prompt_batches(
                rows,
                self.tokenizer,
                batch_size=batch_size,
                max_prompt_length=limit,
                seed=seed,
                shuffle=shuffle,
                forever=forever,
            )
        # The position of a plain iterable cannot be saved; a resumed run skips the items that were read before.
        self.iterator = batches if isinstance(batches, Resumable) else None
        self._stream = _Stream(rows, settings, batches)
        return batches

    def _previous_batches(self, rows: Any, settings: tuple[Any, ...], forever: bool) -> Iterator[list[Prompt]] | None:
        """Returns the iterator of the previous call of `train` if this call continues with it; otherwise None."""
        previous = self._stream
        if previous is None or previous.rows is not rows or previous.settings != settings:
            return None
        if isinstance(previous.batches, SharedBatches):
            if self._completed:
                previous.batches.next_epoch()
            return previous.batches
        return previous.batches if forever else None

    def _identity(self, rows: Any, optimizer: Any, rewards: Sequence[WeightedReward] = ()) -> dict[str, Any]:
        """Returns the part of `identity` that all trainers have."""
        adapters = self.model.adapters
        shared: dict[str, Any] = {
            "optimizer": as_dict(optimizer) if isinstance(optimizer, OptimizerConfig) else None,
            "adapters": adapters and str(adapters),
            "quantized": self.model.quantized,
            "seed": self.training.seed,
        }
        if isinstance(rows, Sequence | grain.MapDataset):
            shared["rows"] = len(rows)
        if adapters is not None:
            shared["base"] = fingerprint(self.model.config, self.frozen, self.mesh)
        if self.folder is not None:
            shared[INPUTS] = fingerprints(rows, rewards)
        return shared


def check_batch_size(batch_size: int) -> None:
    check_type("batch_size", batch_size, int, "give an integer of at least 1")
    if batch_size < 1:
        raise UserError(f"batch_size: got {batch_size}; give an integer of at least 1.")


def _write_description(model: Decoder, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the config and the tokenizer of a model to `folder`, and the adapter config if the model has adapters."""
    save_description(model.config, tokenizer, folder, model.param_dtype.name)
    if model.adapters is not None:
        save_adapter_config(model, folder, quantize=model.quantized, param_dtype=model.param_dtype.name)
