"""Training on pairs of completions, the columns `chosen` and `rejected`: DPO with its variants, and reward models.

A pair is a group of two completions, so the model processes its prompt once. Both are in the same chunk, and the loss
of the pair is computed in the compiled step.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from tunix_like.algorithms.preferences import CHOSEN, REJECTED, PairObjective, over_pairs
from tunix_like.config.argument_names import named_arguments
from tunix_like.config.load import as_dict
from tunix_like.config.schema import OptimizerConfig, PreferenceConfig, RLTrainingConfig, RolloutConfig
from tunix_like.data.shared import warn_shared, warn_text_prompts
from tunix_like.data.source import MappedRows, with_prompt
from tunix_like.data.stream import Prompt, check_prompts, refusing, render, usable
from tunix_like.environments.history import Demonstration
from tunix_like.errors import UserError, check_type, nearest
from tunix_like.models.decoder import Decoder
from tunix_like.models.lora import fingerprint
from tunix_like.models.sharding import check_batch, fetch, place_replicated, scope
from tunix_like.planning.memory import Companions
from tunix_like.rollout.shapes import length_bucket, pad_tokens
from tunix_like.runtime import progress, trace
from tunix_like.runtime.profile import Profile
from tunix_like.session.callbacks import Callback
from tunix_like.session.guards import SkipWatch
from tunix_like.step.forward import place_packed
from tunix_like.step.optimizer import updates_done
from tunix_like.step.packing import Packed
from tunix_like.step.train_step import step_inputs
from tunix_like.training import loop
from tunix_like.training.answers import Answers
from tunix_like.training.arguments import likelihood_options
from tunix_like.training.companions import Reference, make_reference
from tunix_like.training.teacher import check_reference
from tunix_like.training.trainer import Trainer, check_batch_size
from tunix_like.types import GroupBatch

COLUMNS = ("chosen", "rejected")


class DPOLearner(Trainer):
    """Direct Preference Optimization (arXiv 2305.18290) and its variants IPO and ORPO; `algorithms/preferences.py` has
    the formulas.

    Args:
      model: a `Decoder`. If it has adapters, only the adapters are trained, otherwise all weights. The trained weights
        are donated to the compiled step, and written back to the model at the end.
      tokenizer: a `tunix_like` tokenizer or a transformers fast tokenizer.
      preference_config: loss, `beta`, label smoothing.
      rollout_config: `max_prompt_length` (longer prompts are skipped) and `max_tokens_to_generate` (longer completions
        are truncated, and then have no end-of-sequence token).
      training_config: steps, optimizer, seed, folder, checkpoints and evaluations.
      ref_model: the reference model; defaults to the model with its initial weights. If the adapters are newly
        initialised, the default is the frozen base without adapters, and nothing is copied.
      mesh: devices to train on; defaults to a single device.
      evaluate: `f(params, step) -> metrics` called at each evaluation, in addition to the loss of the held-out pairs.
      metrics_of_evaluate: names of these metrics that `training.best_metric` can name.
    """

    name = "train"
    step_key = "step"
    who = "preferences need"

    def __init__(
        self,
        *,
        model: Decoder,
        tokenizer: Any,
        preference_config: PreferenceConfig | None = None,
        rollout_config: RolloutConfig | None = None,
        training_config: RLTrainingConfig | None = None,
        ref_model: Decoder | None = None,
        mesh: Mesh | None = None,
        evaluate: Callable[[Any, int], Mapping[str, float]] | None = None,
        metrics_of_evaluate: Iterable[str] = (),
    ):
        super().__init__(model, tokenizer, rollout_config, training_config, mesh)
        self.preference = PreferenceConfig() if preference_config is None else preference_config
        check_type(
            "preference_config", self.preference, PreferenceConfig, "give a tunix_like.PreferenceConfig(loss=...)"
        )
        self.check_preference(self.preference)
        if self.training.mini_batch_size is not None:
            raise UserError("training.mini_batch_size: pairs have one update per step; set data.batch_size instead.")
        if ref_model is not None:
            check_reference(ref_model, self.tokenizer, mesh)
            if not self._needs_reference:
                raise UserError(f"ref_model: {self._described()[0]} needs no reference; leave it out.")
        self._evaluate = evaluate
        self._also_evaluated = tuple(metrics_of_evaluate)
        self.objective = self._make_objective()
        self.reference: Reference | None = make_reference(self, ref_model) if self._needs_reference else None
        self._given_reference = None
        if ref_model is not None and self.reference is not None:
            self._given_reference = fingerprint(ref_model.config, self.reference.params, self.mesh)["all"]
        self.watch = SkipWatch("the loss", self.training.max_skipped_updates)
        self._answers = Answers(self.tokenizer, self.rollout_config)
        self._several_turns = False
        self._rows: dict[str, tuple[Any, Sequence[Mapping[str, Any]]]] = {}
        self._profile = Profile(None, None)
        self._held_out: list[Prompt] = []
        self._arguments = frozenset(inspect.signature(DPOLearner).parameters)

    @staticmethod
    def check_preference(config: PreferenceConfig) -> None:
        """Raises UserError for a key of the section `preference` that has no effect on this learner."""
        if config.loss != "sigmoid" and config.label_smoothing:
            raise UserError(f"preference.label_smoothing: the loss '{config.loss}' does not read it. Unset it.")
        if config.loss == "orpo" and config.reference_free:
            raise UserError("preference.reference_free: the loss 'orpo' never has a reference. Unset it.")
        if config.center_rewards is not None:
            raise UserError("preference.center_rewards: only the reward model reads it. Unset it.")

    @property
    def _needs_reference(self) -> bool:
        return self.preference.loss != "orpo" and not self.preference.reference_free

    @property
    def companions(self) -> Companions:
        return Companions(self.reference is not None)

    def _make_objective(self) -> PairObjective:
        return PairObjective(self.preference.loss, self.preference.beta, self.preference.label_smoothing)

    def _described(self) -> list[str]:
        return [f"the loss '{self.preference.loss}'"]

    @named_arguments
    def train(
        self,
        train_ds: Sequence[Mapping[str, Any]],
        eval_ds: Sequence[Mapping[str, Any]] | None = None,
        *,
        batch_size: int = 8,
        shuffle: bool = True,
        overlong_prompts: str = "skip",
        callbacks: Sequence[Callback] = (),
    ) -> dict[str, Any]:
        """Trains on rows with `prompt`, `chosen` and `rejected`: texts, or messages. Without a `prompt`, two lists of
        messages must begin with the same ones, which are then the prompt.

        Resumes if `training_config.output_dir` has a checkpoint. Without a folder, a second call trains for another
        `max_steps` steps (None: one epoch). Returns the last row of metrics. Raises the errors of `Learner.train`.

        Args:
          eval_ds: held-out rows, evaluated before and after training, and every `eval_every_n_steps`.
          batch_size: pairs per step.
          overlong_prompts: what to do with rows whose prompt is empty or longer than `max_prompt_length`: "skip" or
            "error".
          callbacks: as in `Learner.train`.
        """
        check_batch_size(batch_size)

        def prepare() -> None:
            self._prepare(train_ds, eval_ds, batch_size, shuffle, overlong_prompts)

        return loop.train(self, prepare, callbacks)

    def end(self) -> None:
        self._profile.close()

    def _settings(self) -> dict[str, Any]:
        parts = {"preference": self.preference, "rollout": self.rollout_config, "training": self.training}
        return {name: as_dict(part) for name, part in parts.items()}

    def _prepare(self, train_ds: Any, eval_ds: Any, batch_size: int, shuffle: bool, overlong: str) -> None:
        """Checks the data, and builds the batches and the compiled step for this call of `train`."""
        training = self.training
        limit = self.rollout_config.max_prompt_length
        rows = self._pairs(train_ds, "training")
        held_out = self._pairs(() if eval_ds is None else eval_ds, "evaluation")
        self._answers = Answers(self.tokenizer, self.rollout_config)
        checked = check_prompts(rows, self.tokenizer, limit, overlong, "training")
        checked.warn("training")
        batch_size = checked.fitting_batch(batch_size)
        check_batch(self.mesh, "data.batch_size", batch_size)
        self._several_turns = False
        for part, what in ((rows, "training"), (held_out, "evaluation")):
            self._several_turns |= check_pairs(part, self._answers, self.who, what)
        warn_shared(rows, held_out)
        warn_text_prompts(rows, self.tokenizer)
        prompts = (render(held_out[i], self.tokenizer, limit) for i in range(len(held_out)))
        self._held_out = [prompt for prompt in prompts if usable(prompt, limit)]
        self._check_best_metric()
        steps = (len(rows) - checked.prompts) // batch_size if training.max_steps is None else training.max_steps
        self.total = self.done + steps
        forever = training.max_steps is not None
        self._batches = refusing(self._open_stream(rows, batch_size, shuffle, forever), overlong)
        self._batch_size = batch_size
        self._profile = Profile(training.profile_steps, self.folder)
        optimizer = training.actor_optimizer or OptimizerConfig()
        lengths = self.rollout_config
        self.identity = self._identity(rows, optimizer) | {
            "learner": type(self).__name__,
            "preference": as_dict(self.preference),
            "batch_size": batch_size,
            "lengths": [lengths.max_prompt_length, lengths.max_tokens_to_generate],
            "ref_model": self._given_reference,
        }
        self._compile(self.objective, likelihood_options(training), optimizer, self.total)

    def _pairs(self, rows: Any, what: str) -> Sequence[Mapping[str, Any]]:
        """Returns rows whose prompt is implicit as rows with a prompt, and checks that all have both completions. Equal
        rows of a second call give the same object, so that it continues with the next batch."""
        if not isinstance(rows, Sequence) or isinstance(rows, str):
            raise UserError(f"the {what} data must be a list of rows with {' and '.join(COLUMNS)}.")
        given, made = self._rows.get(what, (None, ()))
        if given is not rows:
            made = with_prompts(rows, what)
            self._rows[what] = rows, made
        return made

    def _check_best_metric(self) -> None:
        name = self.training.best_metric
        training = self.training
        if name is None:
            return
        if not self._held_out:
            raise UserError("training.best_metric: there are no held-out rows for an evaluation; leave it unset.")
        names = ["eval/rewards/accuracies", "eval/rewards/margins", *self._also_evaluated]
        if name not in names:
            raise UserError(f"training.best_metric: got '{name}', which no evaluation computes. {nearest(name, names)}")
        if training.eval_every_n_steps is None or self.folder is None:
            raise UserError(
                f"training.best_metric: {name} needs evaluations during training and a run folder; set "
                "training.eval_every_n_steps and training.output_dir."
            )

    def step(self, number: int) -> dict[str, Any] | None:
        with self._profile.around(number), scope(self.mesh):
            prompts = next(self._batches, None)
            if prompts is None:
                return None
            batch = self._batch(prompts)
            placed, packed = self._placed(batch)
            ref = self._reference_logprobs(placed, packed)
            inputs = step_inputs(placed, np.ones(len(prompts), bool), packed, ref_logprobs=ref)
            rate = None if self.schedule is None else float(self.schedule(updates_done(self.state.opt_state)))
            self.state, metrics, _ = self.programs.train_step(self.state, inputs, self.frozen)
            out = {name: float(value) for name, value in fetch(metrics, self.mesh).items()}
            self.watch([out])
            self.watch.check()
            return over_pairs(out) | ({} if rate is None else {"learning_rate": rate})

    def _batch(self, prompts: Sequence[Prompt]) -> GroupBatch:
        both = [[self._encoded(prompt, name) for name in COLUMNS] for prompt in prompts]
        lengths = np.array([len(prompt.tokens) for prompt in prompts], np.int32)
        width = length_bucket(int(lengths.max()), self.rollout_config.max_prompt_length)
        sizes = np.array([[len(answer.tokens) for answer in pair] for pair in both], np.int32)
        steps = length_bucket(int(sizes.max()), self.rollout_config.max_tokens_to_generate)

        def padded(values: Iterable[Sequence[int]]) -> np.ndarray:
            return pad_tokens(list(values), steps).reshape(len(prompts), 2, steps)

        mask = padded([answer.sampled for pair in both for answer in pair]).astype(bool)
        return GroupBatch(
            prompt_tokens=pad_tokens([prompt.tokens for prompt in prompts], width),
            prompt_lengths=lengths,
            completion_tokens=padded([answer.tokens for pair in both for answer in pair]),
            completion_lengths=sizes,
            token_mask=mask if self._several_turns or self._trains_scalar_head else None,
            rollout_logprobs=None,
            rewards=np.tile(np.array([CHOSEN, REJECTED], np.float32), (len(prompts), 1)),
            scored=np.ones((len(prompts), 2), bool),
        )

    def _encoded(self, prompt: Prompt, column: str) -> Demonstration:
        return self._answers.encode(prompt.source, prompt.columns[column], prompt.columns)

    def _placed(self, batch: GroupBatch) -> tuple[GroupBatch, Packed]:
        """Packs a batch, with both completions of a pair in the same chunk, and places it on the devices."""
        packed = self.planner.pack(batch, batch.scored, len(batch.scored), whole_groups=True)
        return place_replicated(batch, self.mesh), place_packed(packed, self.mesh)

    def _reference_logprobs(self, placed: GroupBatch, packed: Packed) -> Any:
        return None if self.reference is None else self.programs.logprobs(*self.reference, placed, packed)

    def evaluate_if_due(self, step: int, last: bool) -> dict[str, float]:
        every = self.training.eval_every_n_steps
        if not self._held_out or not (step == 0 or last or (every is not None and step % every == 0)):
            return {}
        found = {f"eval/{name}": value for name, value in self.evaluate_pairs(self._held_out).items()}
        return found if self._evaluate is None else found | dict(self._evaluate(self.params, step))

    def evaluate_pairs(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """Returns the loss and the metrics of pairs under the current weights, in batches of the training's size."""
        parts = []
        mask = []
        with scope(self.mesh), progress.task("evaluation", len(prompts)) as advance, trace.span("evaluation"):
            for start in range(0, len(prompts), self._batch_size):
                part = list(prompts[start : start + self._batch_size])
                batch = self._batch(part + [part[-1]] * (self._batch_size - len(part)))  # one shape for all batches
                placed, packed = self._placed(batch)
                logprobs = self.programs.logprobs(self.graphdef, self.params, placed, packed)
                found = fetch((logprobs, self._reference_logprobs(placed, packed)), self.mesh)
                sums = [None if x is None else np.where(batch.sampled, x, 0).sum(-1)[: len(part)] for x in found]
                parts.append(sums)
                mask.append(batch.sampled.sum(-1)[: len(part)])
                advance(len(part))
        logps, ref = (None if each[0] is None else np.concatenate(each) for each in zip(*parts, strict=True))
        means = self.objective.of_batch(logps, ref, np.concatenate(mask))
        return {name: float(value) for name, value in means.items()}


class RewardModelLearner(DPOLearner):
    """Trains a reward model with the loss of Bradley and Terry on pairs: `-log sigma(r_c - r_r)`, plus
    `preference.center_rewards` times `(r_c + r_r)^2`.

    The reward of a completion is what a scalar head gives for the last token of prompt and completion. The arguments
    are those of `DPOLearner` without `ref_model`; `model` has a scalar head (`tunix_like.add_scalar_head`).
    `tunix_like.export_model` writes a folder that transformers loads as a sequence classifier with one label.
    """

    who = "a reward model needs"
    _trains_scalar_head = True
    _needs_reference = False

    @staticmethod
    def check_preference(config: PreferenceConfig) -> None:
        changed = dataclasses.replace(PreferenceConfig(), center_rewards=config.center_rewards)
        for name, value in as_dict(config).items():
            if value != getattr(changed, name):
                raise UserError(f"preference.{name}: the reward model does not read it. Unset it.")

    def _make_objective(self) -> PairObjective:
        return PairObjective("bradley_terry", center=self.preference.center_rewards or 0.0)

    def _described(self) -> list[str]:
        return ["a reward model"]

    def _encoded(self, prompt: Prompt, column: str) -> Demonstration:
        """Returns the completion with one more token: the head reads the hidden state before each token, and only that
        before the added token counts."""
        tokens = super()._encoded(prompt, column).tokens
        return Demonstration([*tokens, 0], [False] * len(tokens) + [True])

    def step(self, number: int) -> dict[str, Any] | None:
        metrics = super().step(number)
        return metrics and {name: value for name, value in metrics.items() if name != "entropy"}


PAIR_LEARNER_CLASSES: dict[str, type[DPOLearner]] = {"dpo": DPOLearner, "reward_model": RewardModelLearner}
"""Maps values of `algorithm.advantage_estimator` (`schema.PAIR_LEARNERS`) to learner classes."""


def check_columns(row: Mapping[str, Any], what: str) -> None:
    """Raises UserError if a row lacks a completion. `what` names the rows in the message."""
    if missing := [name for name in COLUMNS if name not in row]:
        raise UserError(
            f"preferences need the columns 'chosen' and 'rejected'; the {what} rows have no '{missing[0]}', but "
            f"{', '.join(map(str, row)) or 'none'}."
        )


def with_prompts(rows: Sequence[Mapping[str, Any]], what: str) -> Sequence[Mapping[str, Any]]:
    if not len(rows):
        return rows
    check_columns(rows[0], what)
    if "prompt" in rows[0]:
        return rows
    for number in range(len(rows)):
        try:
            with_prompt(rows[number])
        except UserError as error:
            raise UserError(f"{what} row {number} (counted from 0): {error}") from error
    return MappedRows(rows, with_prompt)


def check_pairs(rows: Sequence[Mapping[str, Any]], answers: Answers, who: str, what: str) -> bool:
    """Checks that all rows (of `with_prompts`) have two completions that differ. Returns whether any completion has
    several turns. `who` needs them, `what` is the name of the rows."""
    several_turns = answers.check(rows, COLUMNS, who, what)
    _check_differ(rows, what)
    return several_turns


def _check_differ(rows: Sequence[Mapping[str, Any]], what: str) -> None:
    for number in range(len(rows)):
        if rows[number]["chosen"] == rows[number]["rejected"]:
            raise UserError(
                f"{what} row {number} (counted from 0): chosen and rejected are equal, so the pair teaches nothing; "
                "remove the row."
            )
