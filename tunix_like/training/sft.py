"""Supervised fine-tuning on the `answer` column. Only the answer and its end-of-sequence token have a loss, and of an
answer of several turns only the assistant's messages.

The trainer uses the loop and the compiled step of reinforcement learning. Each prompt has one completion, whose
advantage is 1.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from tunix_like.algorithms.losses import Rows, TokenInputs, Tokens, aggregation_weights
from tunix_like.config.argument_names import named_arguments
from tunix_like.config.load import as_dict
from tunix_like.config.schema import RLTrainingConfig, RolloutConfig, SFTConfig
from tunix_like.data.shared import warn_text_prompts
from tunix_like.data.source import MappedRows, with_prompt
from tunix_like.data.stream import Prompt, check_prompts
from tunix_like.environments.history import Demonstration
from tunix_like.errors import UserError, check_type
from tunix_like.models.decoder import Decoder
from tunix_like.models.sharding import check_batch, fetch, place_replicated, scope
from tunix_like.rollout.shapes import length_bucket, pad_tokens
from tunix_like.session.callbacks import Callback
from tunix_like.session.guards import SkipWatch
from tunix_like.step.forward import place_packed
from tunix_like.step.optimizer import updates_done
from tunix_like.step.train_step import step_inputs
from tunix_like.storage.checkpoints import Checkpoints
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.training import loop
from tunix_like.training.answers import Answers
from tunix_like.training.arguments import likelihood_options
from tunix_like.training.trainer import Trainer
from tunix_like.types import GroupBatch

logger = logging.getLogger("tunix_like")


class _Likelihood:
    """The objective of SFT: `-log pi` per token, averaged over the tokens of the batch."""

    built_in = True

    def key(self) -> str:
        return "likelihood"

    def advantages(self, rewards: Array, scored: Array, lengths: Array, ids: Array) -> Array:
        return rewards

    def weights(
        self,
        scored: Bool[Array, "P G"],
        trained: Bool[Array, "P G"],
        lengths: Int[Array, "P G"],
        in_update: Bool[Array, "P"],
        ids: Int[Array, "P"],
    ) -> Float[Array, "P G"]:
        return aggregation_weights("token-mean", lengths, scored, 1)

    def token_loss(self, tokens: TokenInputs, advantages: Rows) -> tuple[Tokens, dict[str, Tokens]]:
        return jnp.where(tokens.mask, -tokens.logprobs, 0.0), {}


class SFTTrainer(Trainer):
    """Fine-tunes a model on the `answer` column of a dataset: a text, or messages that begin and end with one of the
    assistant. Instead of `prompt` and `answer`, rows can have the column `messages` (and `tools`) of OpenAI and TRL.

    Args:
      model: a `Decoder`. If it has adapters, only the adapters are trained, otherwise all weights. The trained weights
        are donated to the compiled step, and written back to the model at the end.
      tokenizer: a `tunix_like` tokenizer or a transformers fast tokenizer.
      sft_config: steps, batch size, optimizer.
      rollout_config: `max_prompt_length` (longer prompts are skipped) and `max_tokens_to_generate` (longer answers are
        truncated, and then have no end-of-sequence token).
      training_config: seed, folder and checkpoints. Checkpoints are written to `sft_checkpoints/` in the folder.
      mesh: devices to train on; defaults to a single device.
      evaluate: `f(params, step) -> metrics` (logged as `sft/<name>`), called after the last step. If
        `sft.stop_at_success` is set, the function is also called every `sft.eval_every_n_steps` steps, and must return
        the metric `eval/pass@1`.
    """

    name = "sft"
    step_key = "sft/step"
    checkpoint_folder = "sft_checkpoints"

    def __init__(
        self,
        *,
        model: Decoder,
        tokenizer: Any,
        sft_config: SFTConfig,
        rollout_config: RolloutConfig | None = None,
        training_config: RLTrainingConfig | None = None,
        mesh: Mesh | None = None,
        evaluate: Callable[[Any, int], dict[str, float]] | None = None,
    ):
        super().__init__(model, tokenizer, rollout_config, training_config, mesh)
        check_type("sft_config", sft_config, SFTConfig, "give a tunix_like.SFTConfig(max_steps=...)")
        check_batch(mesh, "sft.batch_size", sft_config.batch_size)
        self.config = sft_config
        self._evaluate = evaluate
        self._answers = Answers(self.tokenizer, self.rollout_config)
        self._several_turns = False
        self._given: Any = None
        self._rows: Sequence[Mapping[str, Any]] = ()
        self.watch = SkipWatch("the loss", self.training.max_skipped_updates)
        self._arguments = frozenset(inspect.signature(SFTTrainer).parameters)

    @named_arguments
    def train(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        shuffle: bool = True,
        callbacks: Sequence[Callback] = (),
        another_follows: bool = False,
    ) -> dict[str, Any]:
        """Trains for `sft.max_steps` steps, and resumes if `training.output_dir` has a checkpoint.

        Without a folder, a second call trains for another `sft.max_steps` steps. Returns the last row of metrics
        (`sft/...`). Raises the errors of `Learner.train`.

        Args:
          callbacks: as in `Learner.train`.
          another_follows: whether more training follows in the same process. If True, a stop signal in the last step
            raises an exception, as in other steps. If False, a signal in the last step is ignored.
        """
        return loop.train(self, lambda: self._prepare(rows, shuffle), callbacks, another_follows)

    @property
    def _planned_training(self) -> RLTrainingConfig:
        return dataclasses.replace(self.training, actor_optimizer=self.config.optimizer)

    def open_checkpoints(self) -> Checkpoints | None:
        # Keeps two checkpoints, because one of them can be damaged.
        return None if self.folder is None else Checkpoints(self.folder / self.checkpoint_folder, 2)

    def _settings(self) -> dict[str, Any]:
        parts = {"sft": self.config, "rollout": self.rollout_config, "training": self.training}
        return {name: as_dict(part) for name, part in parts.items()}

    def _prepare(self, rows: Sequence[Mapping[str, Any]], shuffle: bool) -> None:
        """Checks the data, and builds the batches and the compiled step for this call of `train`."""
        if self._given is not rows:  # equal rows let a second call continue with the next batch
            self._given = rows
            self._rows = with_prompts(rows)
        rows = self._rows
        self._answers, self._several_turns = checked_answers(rows, self.tokenizer, self.rollout_config)
        warn_text_prompts(rows, self.tokenizer)
        self.total = self.done + self.config.max_steps
        self._batches = self._open_stream(rows, self.config.batch_size, shuffle, forever=True)
        lengths = self.rollout_config
        self.identity = self._identity(rows, self.config.optimizer) | {
            "sft_batch_size": self.config.batch_size,
            "rows": len(rows),  # also of data sets that are not a Sequence
            "lengths": [lengths.max_prompt_length, lengths.max_tokens_to_generate],
        }
        self._compile(_Likelihood(), likelihood_options(self.training), self.config.optimizer, self.total)

    def step(self, number: int) -> dict[str, Any] | None:
        with scope(self.mesh):
            batch = self._batch(next(self._batches))
            count = self.config.batch_size
            packed = self.planner.pack(batch, batch.scored, count)
            placed = place_packed(packed, self.mesh)
            inputs = step_inputs(place_replicated(batch, self.mesh), np.ones(count, bool), placed)
            assert self.schedule is not None
            rate = float(self.schedule(updates_done(self.state.opt_state)))
            self.state, metrics, _ = self.programs.train_step(self.state, inputs, self.frozen)
            out = {name: float(value) for name, value in fetch(metrics, self.mesh).items()}
            self.watch([out])
            self.watch.check()
            return out | {"learning_rate": rate}

    def _batch(self, prompts: list[Prompt]) -> GroupBatch:
        limit = self.rollout_config.max_tokens_to_generate
        answers, masks = zip(*map(self._answer, prompts), strict=True)
        lengths = np.array([len(prompt.tokens) for prompt in prompts], np.int32)
        width = length_bucket(int(lengths.max()), self.rollout_config.max_prompt_length)
        steps = length_bucket(max(map(len, answers)), limit)
        return GroupBatch(
            prompt_tokens=pad_tokens([prompt.tokens for prompt in prompts], width),
            prompt_lengths=lengths,
            completion_tokens=pad_tokens(answers, steps)[:, None],
            completion_lengths=np.array([[len(answer)] for answer in answers], np.int32),
            token_mask=pad_tokens(masks, steps)[:, None].astype(bool) if self._several_turns else None,
            rollout_logprobs=None,
            rewards=np.ones((len(answers), 1), np.float32),
            scored=np.ones((len(answers), 1), bool),
        )

    def _answer(self, prompt: Prompt) -> Demonstration:
        """Returns the tokens of the answer and an end-of-sequence token, cut to the maximum length of a completion."""
        return self._answers.encode(prompt.source, prompt.columns["answer"], prompt.columns)

    def evaluate_if_due(self, step: int, last: bool) -> dict[str, float]:
        due = last or (self.config.stop_at_success is not None and step and step % self.config.eval_every_n_steps == 0)
        if self._evaluate is None or not due:
            return {}
        return {f"sft/{name}": value for name, value in self._evaluate(self.params, step).items()}

    def finished(self, row: dict[str, Any]) -> bool:
        target = self.config.stop_at_success
        success = row.get("sft/eval/pass@1", 0.0)
        if target is None or success < target:
            return False
        message = "sft stopped at step %d of %s because success %.3g >= stop_at_success %g"
        logger.info(message, row["sft/step"], self.total, success, target)
        return True


def checked_answers(
    rows: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, rollout: RolloutConfig
) -> tuple[Answers, bool]:
    """Checks the prompts and answers of all rows (of `with_prompts`). Returns what encodes the answers, and whether any
    answer has several turns."""
    check_prompts(rows, tokenizer, rollout.max_prompt_length, "skip", "training").warn("training")
    if "answer" not in rows[0]:
        columns = ", ".join(map(str, rows[0]))
        raise UserError(
            f"SFT needs an 'answer' column; the rows have {columns}. data.answer_template builds it from other columns."
        )
    answers = Answers(tokenizer, rollout)
    return answers, answers.check(rows, ["answer"], "SFT needs")


def with_prompts(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Returns rows with the column `messages` as rows with `prompt` and `answer`; other rows unchanged."""
    if not len(rows) or not isinstance(rows[0], Mapping) or "prompt" in rows[0] or "messages" not in rows[0]:
        return rows
    for number in range(len(rows)):
        try:
            with_prompt(rows[number])
        except UserError as error:
            raise UserError(f"training row {number} (counted from 0): {error}") from error
    return MappedRows(rows, with_prompt)
