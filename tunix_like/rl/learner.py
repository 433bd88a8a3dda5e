"""The learner: rollouts, rewards, and one compiled step of advantage and loss together.

`Learner` is the base of every algorithm (`learners.py` declares them). It owns the weights while it trains and hands
them back to the model it was given. It knows no file format and no command line.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from tunix_like.best import Best
from tunix_like.checkpoints import Checkpoints
from tunix_like.config import AlgorithmConfig, EvalConfig, RLTrainingConfig, RolloutConfig
from tunix_like.config_file import as_dict
from tunix_like.errors import UserError, check_type
from tunix_like.evaluate import EVAL_KEY, Evaluation, Evaluator, eval_problems
from tunix_like.loggers import check_loggers, open_metrics
from tunix_like.loop import run
from tunix_like.metrics import rows
from tunix_like.models.decoder import Decoder, check_decoder
from tunix_like.models.loading import check_fit, save_description
from tunix_like.models.lora import join_params, save_adapter_config, split_params, without_adapters
from tunix_like.models.sharding import check_divides, fetch, place_params
from tunix_like.processes import by_first
from tunix_like.rewards import check_form, close_pools
from tunix_like.rl.forward import ForwardOptions
from tunix_like.rl.objective import build_objective, check_takes_negative, resolve, trace_own
from tunix_like.rl.phase import RLPhase
from tunix_like.rl.rollouts import FirstFailure, WeightedReward
from tunix_like.rl.samples import Samples
from tunix_like.run_lock import owned
from tunix_like.sampling.sampler import make_sampler
from tunix_like.tokenizer import Tokenizer
from tunix_like.types import RewardFunction

logger = logging.getLogger("tunix_like")


def forward_options(rollout: RolloutConfig, training: RLTrainingConfig, algorithm: AlgorithmConfig) -> ForwardOptions:
    """How a learner computes log-probabilities."""
    entropy = algorithm.entropy_coef > 0
    return ForwardOptions(rollout.temperature, training.logprob_chunk_size, training.remat, entropy_gradient=entropy)


class Learner:
    """Samples groups, scores them and follows the gradient of its objective.

    Args:
      model: a `Decoder`. The learner takes the weights that it trains over, all of them or, where there are any, the
        adapters: they are donated to the compiled step, and `train` puts the trained ones back when it ends.
      tokenizer: ours, or a transformers fast tokenizer.
      reward_fns: one function or several (a mapping gives them names),
        `f(prompts, completions, **columns) -> list of numbers`; their (weighted) sum
        is the reward. None or NaN means "could not be scored", and so does a function that fails. They run in this
        process; those of `tunix_like.rewards.pooled` in others, with a deadline.
      algo_config: the learner's config class (its defaults when left out).
      rollout_config, training_config, eval_config: lengths and sampling; optimizer, steps and files; evaluation.
      ref_model: reference of the KL when `beta > 0`, quantised or not; only what it shares with the trained weights is
        copied. Left out it is the model as it starts: a copy of its weights; of adapters that have learnt nothing yet,
        the frozen weights without them and no copy.
      mesh: devices to train on, from `tunix_like.models.sharding.build_mesh`; one device when left out.
      reward_weights: one factor per reward function; ones when left out.
      success_threshold: a completion succeeds (pass@k) when its total reward reaches this.
      source_estimators: `{data source: {"advantage_estimator": ..., <its parameters>}}`: groups whose row has that
        source in its column `data_source` get that estimator's advantages; loss and aggregation stay the run's.
      metric_fns: `f(prompts, completions, rewards, advantages, **columns) -> {name: (value, aggregation)}`, called
        every step; `aggregation` reduces the value over completions.
      on_row: `f(row, total steps or None)`, called with every row of metrics as it is logged.
      on_samples: `f(step, samples)`, called at step 1 and every `log_samples_every_n_steps` with the best and the worst
        completion of one prompt, a `tunix_like.rl.samples.Samples`.

    Raises:
      UserError: a config of another learner, a key nothing reads, a value out of range.
    """

    config_class: ClassVar[type[AlgorithmConfig]] = AlgorithmConfig

    def __init__(
        self,
        *,
        model: Decoder,
        tokenizer: Any,
        reward_fns: RewardFunction | Sequence[RewardFunction] | Mapping[str, RewardFunction],
        algo_config: AlgorithmConfig | None = None,
        rollout_config: RolloutConfig | None = None,
        training_config: RLTrainingConfig | None = None,
        eval_config: EvalConfig | None = None,
        ref_model: Decoder | None = None,
        mesh: Mesh | None = None,
        reward_weights: Sequence[float] | None = None,
        success_threshold: float = 1.0,
        source_estimators: Mapping[str, Mapping[str, Any]] | None = None,
        metric_fns: Sequence[Callable[..., Mapping[str, tuple[Any, Callable[[Any], float]]]]] = (),
        on_row: Callable[[dict[str, Any], int | None], None] = lambda row, total: None,
        on_samples: Callable[[int, Samples], None] | None = None,
    ):
        check_decoder("model", model)
        if ref_model is not None:
            check_decoder("ref_model", ref_model)
        _check_types(
            rollout_config=rollout_config,
            training_config=training_config,
            eval_config=eval_config,
            metric_fns=metric_fns,
            success_threshold=success_threshold,
            source_estimators=source_estimators,
        )
        self.algo = self._resolve(algo_config)
        self.rollout_config = rollout_config or RolloutConfig()
        self.training = training_config or RLTrainingConfig()
        self.eval_config = eval_config or EvalConfig()
        check_loggers(self.training.loggers)
        self.success_threshold = success_threshold
        self.metric_fns = tuple(metric_fns)
        self._on_row, self.on_samples = on_row, on_samples
        self.rewards = _weighted(reward_fns, reward_weights)
        self.first_failure = FirstFailure()
        self.tokenizer = Tokenizer.wrap(tokenizer)
        check_fit(model.config, self.tokenizer, self.rollout_config)
        if self.rollout_config.temperature == 0:
            raise UserError("rollout.temperature: 0 is greedy, which explores nothing; training needs it above 0.")
        if self.rollout_config.top_p < 1 or self.rollout_config.top_k is not None:
            logger.warning("rollout.top_p and top_k cut what the policy can say: samples are no longer from the policy")
        self.source_estimators = {name: _settings(name, given) for name, given in (source_estimators or {}).items()}
        objective = build_objective(self.algo, self.rollout_config.max_tokens_to_generate, 1, self.source_estimators)
        trace_own(objective, 2, self.algo.num_generations)
        if any(weight < 0 for _, _, weight in self.rewards):
            check_takes_negative(objective, "reward_weights", "weights of at least 0")
        check_divides(mesh, model.config)
        self.model, self.mesh = model, mesh
        self.graphdef = nnx.split(model)[0]
        self._take_weights()
        self.sampler = make_sampler(self.graphdef, self.tokenizer, self.rollout_config, self.mesh)
        self.options = forward_options(self.rollout_config, self.training, self.algo)
        self.ref_graphdef: Any = None
        self.ref_params: Any = None
        if self.algo.beta > 0:
            self.ref_graphdef, self.ref_params = self._reference(ref_model)
        self.key = jax.random.key(self.training.seed)
        self.compilations = 0

    def _take_weights(self) -> None:
        """The model's weights as they are now, placed on the mesh; the model keeps pointing at them."""
        params = place_params(nnx.to_pure_dict(nnx.split(self.model)[1]), self.mesh)
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(params)):
            raise UserError("the model's weights belong to a trainer that was interrupted; load the model again.")
        nnx.update(self.model, params)
        self.trained, self.frozen = split_params(params)

    @property
    def params(self) -> Any:
        """All weights of the model: those that are trained, and those that stay."""
        return join_params(self.trained, self.frozen)

    def _reference(self, ref_model: Decoder | None) -> tuple[Any, Any]:
        """Graph and weights of the reference."""
        graphdef, params = self.graphdef, self.params
        if ref_model is not None:
            graphdef, state = nnx.split(ref_model)
            params = place_params(nnx.to_pure_dict(state), self.mesh)
        elif self.frozen and not any(fetch([leaf.any() for leaf in _second_halves(self.trained)], self.mesh)):
            return without_adapters(graphdef), self.frozen
        # The step takes over the weights that it trains: of what lies in the same memory the reference needs a copy.
        taken = set().union(*map(_addresses, jax.tree.leaves(self.trained)))
        return graphdef, jax.tree.map(lambda x: jnp.copy(x) if _addresses(x) & taken else x, params)

    def _resolve(self, config: AlgorithmConfig | None) -> AlgorithmConfig:
        config = self.config_class() if config is None else config
        if type(config) not in (AlgorithmConfig, self.config_class):
            raise UserError(
                f"{type(self).__name__} takes a {self.config_class.__name__}, got a {type(config).__name__}; "
                "each learner has its own config, which brings its loss and aggregation."
            )
        named = self.config_class().advantage_estimator
        if named is not None and config.advantage_estimator not in (None, named):
            raise UserError(
                f"{type(self).__name__} is the learner of '{named}', the config names '{config.advantage_estimator}'; "
                "take that estimator's learner, which brings its own loss and aggregation."
            )
        return resolve(config, self.config_class)

    def train(
        self,
        train_ds: Any,
        eval_ds: Sequence[Mapping[str, Any]] | None = None,
        *,
        batch_size: int = 8,
        shuffle: bool = True,
    ) -> dict[str, Any]:
        """Trains on a dataset of dicts with a `prompt` (text or messages) and any other columns.

        Args:
          train_ds: a sequence, a grain dataset (unbatched) or an iterable. `training_config.max_steps=None` is one
            pass; an incomplete last batch is dropped.
          eval_ds: held-out rows, evaluated before and after, and every `eval_every_n_steps`.
          batch_size: prompts per step; a smaller dataset is one batch.
          shuffle: a sequence or a grain `MapDataset`, anew every epoch; other data come as they come.

        Returns:
          the last row of metrics. With `training_config.output_dir`, metrics, rollouts and checkpoints are written
          there, and a second call resumes.

        Raises:
          UserError: bad data; reward functions that failed for every completion of the first step (these are in
            `rollouts/` by then); another process at work in that folder; every checkpoint damaged, or of a run with
            other settings.
          NotSaved: the training is done, and its last checkpoint could not be written.
          Stopped, Interrupted: SIGTERM or SIGINT (Ctrl-C) asked for the end; the state is saved.
        """
        check_type("batch_size", batch_size, int, "give a whole number of at least 1")
        if batch_size < 1:
            raise UserError(f"batch_size: got {batch_size}; give a whole number of at least 1.")
        if eval_ds is not None:
            _check_rows(eval_ds)
        with owned(self.training.output_dir) as check_owner:
            return self._train(train_ds, eval_ds, batch_size, shuffle, check_owner)

    def _train(
        self, train_ds: Any, eval_ds: Any, batch_size: int, shuffle: bool, check_owner: Callable[[], None]
    ) -> dict[str, Any]:
        folder = None if self.training.output_dir is None else Path(self.training.output_dir)
        if folder is None and self.training.best_metric is not None:
            raise UserError("training.best_metric: a checkpoint is kept in a folder; set training.output_dir.")
        log = open_metrics(folder, self.training.loggers, self._settings())
        self._take_weights()
        phase = RLPhase(self, train_ds, eval_ds, batch_size, shuffle, folder)
        checkpoints = None
        if folder is not None:
            best = None if self.training.best_metric is None else Best(self.training.best_metric)
            checkpoints = Checkpoints(folder / "checkpoints", self.training.max_checkpoints_to_keep, best)
            by_first(lambda: self._describe(folder / "model"))
        last: dict[str, Any] = {}

        def on_row(row: dict[str, Any]) -> None:
            last.update(row)
            self._on_row(row, phase.total)

        try:
            run(
                phase,
                checkpoints=checkpoints,
                log=log,
                checkpoint_every=self.training.checkpoint_every_n_steps,
                on_row=on_row,
                before_save=check_owner,
            )
        finally:
            phase.profile.close()
            if checkpoints is not None:
                checkpoints.close()
            close_pools(function for _, function, _ in self.rewards)
            nnx.update(self.model, self.params)
        if not last and folder is not None:  # the run was finished before
            last = by_first(lambda: [row for row in rows(folder) if phase.step_key in row][-1])
        return last

    def _settings(self) -> dict[str, Any]:
        """What loggers show of a run that has no `config.yaml`."""
        parts = {"algorithm": self.algo, "rollout": self.rollout_config, "training": self.training}
        parts |= {"eval": self.eval_config, "optimizer": self.training.actor_optimizer}
        return {name: as_dict(part) for name, part in parts.items() if dataclasses.is_dataclass(part)}

    def _describe(self, folder: Path) -> None:
        """Writes what the model is, and for adapters what they belong to."""
        model = self.model
        save_description(model.config, self.tokenizer, folder, model.param_dtype.name)
        if model.adapters is not None:
            save_adapter_config(model, folder, quantize=model.quantized, param_dtype=model.param_dtype.name)

    def evaluate(self, eval_ds: Sequence[Mapping[str, Any]]) -> Evaluation:
        """Samples held-out rows with the current weights; see `tunix_like.evaluate`."""
        _check_rows(eval_ds)
        try:
            return self.evaluator(eval_ds)(self.params)
        finally:
            close_pools(function for _, function, _ in self.rewards)

    def evaluator(self, eval_ds: Sequence[Mapping[str, Any]]) -> Evaluator:
        limits = self.rollout_config.max_prompt_length, self.eval_config.max_problems
        return Evaluator(
            self.sampler,
            self.tokenizer,
            eval_problems(eval_ds, self.tokenizer, *limits),
            self.rewards,
            self.eval_config,
            self.success_threshold,
            jax.random.fold_in(self.key, EVAL_KEY),
            self.first_failure,
        )


_TYPES: dict[str, tuple[Any, str]] = {
    "rollout_config": (RolloutConfig, "give a tunix_like.RolloutConfig(...)"),
    "training_config": (RLTrainingConfig, "give a tunix_like.RLTrainingConfig(...)"),
    "eval_config": (EvalConfig, "give a tunix_like.EvalConfig(...)"),
    "metric_fns": (Sequence, "give a list of functions"),
    "success_threshold": ((int, float, np.number), "give a number"),
    "source_estimators": (Mapping, "give {data source: {'advantage_estimator': ...}}"),
}
"""Arguments of a learner: what each must be, and what to give in place of anything else."""


def _check_types(**given: Any) -> None:
    """Raises UserError naming the first of these arguments that is of another type; those whose default is None may be
    None."""
    for name, value in given.items():
        if value is not None or name in ("metric_fns", "success_threshold"):
            check_type(name, value, *_TYPES[name])
    for i, function in enumerate(given["metric_fns"]):
        check_type(f"metric_fns[{i}]", function, Callable, _TYPES["metric_fns"][1])  # type: ignore[arg-type]


def _addresses(x: jax.Array) -> set[int]:
    """Where an array lies on this process's devices: several arrays may share their memory."""
    return {shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards}


def _second_halves(adapters: Any) -> list[jax.Array]:
    """The Bs of adapters: where all are 0, nothing is added to the frozen weights."""
    found = jax.tree_util.tree_leaves_with_path(adapters)
    return [leaf for path, leaf in found if path[-1].key == "lora_b"]


def _check_rows(rows: Any) -> None:
    """Raises UserError where held-out rows cannot be counted and read by their number."""
    if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")) or isinstance(rows, str | Mapping):
        raise UserError(f"eval_ds: got {type(rows).__name__}; give a list of rows, each a dict with a 'prompt'.")


def _settings(source: str, given: Any) -> dict[str, Any]:
    """One entry of `source_estimators`. Raises UserError naming the source."""
    if not isinstance(given, Mapping):
        raise UserError(
            f"source_estimators['{source}']: expected {{'advantage_estimator': ..., <its parameters>}}, got {given!r}."
        )
    return dict(given)


def _weighted(functions: Any, weights: Sequence[float] | None) -> list[WeightedReward]:
    """Name, function and weight of each. Raises UserError naming `reward_fns` or `reward_weights`."""
    named = functions if isinstance(functions, Mapping) else None
    if not callable(functions):
        cure = "give a function f(prompts, completions, **columns), a list of functions, or a mapping of names to them"
        check_type("reward_fns", functions, (Mapping, list, tuple), cure)
    functions = [functions] if callable(functions) else list(functions if named is None else named.values())
    weights = [1.0] * len(functions) if weights is None else list(weights)
    if not functions:
        raise UserError("reward_fns: give at least one reward function.")
    if len(weights) != len(functions):
        raise UserError(f"reward_weights: got {len(weights)} for {len(functions)} reward functions.")
    for i, weight in enumerate(weights):
        cure = "give one finite number per reward function"
        check_type(f"reward_weights[{i}]", weight, (int, float, np.number), cure)
        if not math.isfinite(weight):
            raise UserError(f"reward_weights[{i}]: got {weight}; {cure}.")
    if named is None:
        names = [getattr(function, "__name__", type(function).__name__) for function in functions]
        names = [f"{name}_{names[:i].count(name) + 1}" if name in names[:i] else name for i, name in enumerate(names)]
    else:
        names = list(named)
    for name, function in zip(names, functions, strict=True):
        check_form(name, function)
    return list(zip(names, functions, weights, strict=True))
