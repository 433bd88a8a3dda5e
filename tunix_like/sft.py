"""Supervised fine-tuning on the `answer` column: loss on the answer and its end-of-sequence token only.

It is the same compiled step as reinforcement learning with one completion a prompt, advantage 1 and no estimator, run
by the same loop. This module knows no reward.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from tunix_like.checkpoints import Checkpoints
from tunix_like.config import RLTrainingConfig, RolloutConfig, SFTConfig
from tunix_like.config_file import as_dict
from tunix_like.data.stream import Prompt, check_prompts, prompt_batches
from tunix_like.errors import UserError, check_type
from tunix_like.loggers import check_loggers, open_metrics
from tunix_like.loop import run
from tunix_like.models.decoder import Decoder, check_decoder
from tunix_like.models.loading import check_fit
from tunix_like.models.lora import fingerprint, join_params, split_params
from tunix_like.models.sharding import (
    check_batch,
    check_divides,
    fetch,
    place_params,
    place_replicated,
    prompt_parts,
    scope,
    shardings_of,
)
from tunix_like.optimizer import build_optimizer, build_schedule, follows_total, init_optimizer
from tunix_like.rl.forward import ForwardOptions, place_packed
from tunix_like.rl.guards import SkipWatch
from tunix_like.rl.losses import Rows, TokenInputs, Tokens, aggregation_weights
from tunix_like.rl.packing import choose_layout, pack
from tunix_like.rl.update import jit_update, update_input
from tunix_like.run_lock import owned
from tunix_like.sampling.sampler import length_bucket, pad_tokens
from tunix_like.sizes import chunk_size
from tunix_like.tokenizer import Tokenizer
from tunix_like.types import GroupBatch

logger = logging.getLogger("tunix_like")


class _Likelihood:
    """`-log pi` per token, averaged over the tokens of the batch."""

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


class SFTTrainer:
    """Fits a model to the `answer` column of a dataset.

    Args:
      model: a `Decoder`; its weights, of one with adapters these alone, are donated while training and put back,
        trained, at the end.
      tokenizer: ours, or a transformers fast tokenizer.
      sft_config: steps, batch size, optimizer.
      rollout_config: `max_prompt_length` (longer prompts are skipped) and `max_tokens_to_generate` (longer answers are
        cut, and then without an end-of-sequence token).
      training_config: seed, folder and checkpoints, as for a learner; the folder gets `sft_checkpoints/`.
      mesh: devices to train on; one when left out.
      evaluate: `f(params, step) -> metrics` (names as they shall be logged under `sft/`), called every
        `sft.eval_every_n_steps`; `sft.stop_at_success` looks at its `eval/pass@1`.
    """

    name, step_key = "sft", "sft/step"

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
        check_decoder("model", model)
        self.config = sft_config
        self.rollout = rollout_config or RolloutConfig()
        self.training = training_config or RLTrainingConfig()
        check_type("sft_config", sft_config, SFTConfig, "give a tunix_like.SFTConfig(max_steps=...)")
        check_type("rollout_config", self.rollout, RolloutConfig, "give a tunix_like.RolloutConfig(...)")
        check_type("training_config", self.training, RLTrainingConfig, "give a tunix_like.RLTrainingConfig(...)")
        check_loggers(self.training.loggers)
        self.tokenizer = Tokenizer.wrap(tokenizer)
        check_fit(model.config, self.tokenizer, self.rollout)
        # What ends an answer must end a completion too; a tokenizer's own token is the one of its chat template.
        own = self.tokenizer.eos_ids[:1] if self.tokenizer.eos_id is None else [self.tokenizer.eos_id]
        self.eos_id = (self.rollout.eos_tokens or own)[0]
        self.model = model
        graphdef, state = nnx.split(model)
        check_divides(mesh, model.config)
        check_batch(mesh, "sft.batch_size", sft_config.batch_size)
        self.mesh = mesh
        self.trained, self.frozen = split_params(place_params(nnx.to_pure_dict(state), mesh))
        self.total: int | None = sft_config.max_steps
        self.rate_follows_total = follows_total(sft_config.optimizer)
        self.schedule = build_schedule(sft_config.optimizer, self.total)
        optimizer = build_optimizer(sft_config.optimizer, self.total)
        self.opt_state = init_optimizer(optimizer, self.trained)
        self.watch = SkipWatch("the loss", self.training.max_skipped_updates)
        self.iterator: Any = None
        self.identity: dict[str, Any] = {"sft_batch_size": sft_config.batch_size, "seed": self.training.seed}
        self.identity |= {"adapters": model.adapters and str(model.adapters), "quantized": model.quantized}
        if model.adapters is not None:
            self.identity["base"] = fingerprint(model.config, self.frozen, mesh)
        self._evaluate = evaluate
        options = ForwardOptions(1.0, self.training.logprob_chunk_size, self.training.remat)
        shardings = shardings_of((self.trained, self.opt_state), mesh)
        self._step = jit_update(graphdef, _Likelihood(), optimizer, options, shardings)

    def train(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        shuffle: bool = True,
        on_row: Callable[[dict[str, Any]], None] = lambda row: None,
        another_follows: bool = False,
    ) -> dict[str, Any]:
        """Trains for `sft.max_steps`, resuming from `training.output_dir` if it holds a checkpoint. Returns the last
        row of metrics (`sft/...`). Raises what `Learner.train` raises.

        Args:
          another_follows: more training comes after this in the same process, so that SIGTERM or SIGINT in the last
            step raises as in any other; else it changes nothing there.
        """
        with owned(self.training.output_dir) as check_owner:
            return self._train(rows, shuffle, on_row, check_owner, another_follows)

    def _train(
        self,
        rows: Sequence[Mapping[str, Any]],
        shuffle: bool,
        on_row: Callable[[dict[str, Any]], None],
        check_owner: Callable[[], None],
        another_follows: bool,
    ) -> dict[str, Any]:
        check_prompts(rows, self.tokenizer, self.rollout.max_prompt_length, "skip", "training")
        if "answer" not in rows[0]:
            columns = ", ".join(map(str, rows[0]))
            raise UserError(
                f"SFT needs an 'answer' column; the rows have {columns}. data.answer_template makes it out of others."
            )
        for number in range(len(rows)):
            _check_answer(rows[number], number)
        self.identity["rows"] = len(rows)
        self.iterator = prompt_batches(
            rows,
            self.tokenizer,
            batch_size=self.config.batch_size,
            max_prompt_length=self.rollout.max_prompt_length,
            seed=self.training.seed,
            shuffle=shuffle,
            forever=True,
        )
        folder = None if self.training.output_dir is None else Path(self.training.output_dir)
        parts = {"sft": self.config, "rollout": self.rollout, "training": self.training}
        log = open_metrics(folder, self.training.loggers, {name: as_dict(part) for name, part in parts.items()})
        checkpoints = None if folder is None else Checkpoints(folder / "sft_checkpoints", 2)  # one may be damaged
        last: dict[str, Any] = {}

        def keep(row: dict[str, Any]) -> None:
            last.update(row)
            on_row(row)

        try:
            every = self.training.checkpoint_every_n_steps
            run(
                self,
                checkpoints=checkpoints,
                log=log,
                checkpoint_every=every,
                on_row=keep,
                before_save=check_owner,
                another_follows=another_follows,
            )
        finally:
            if checkpoints is not None:
                checkpoints.close()
            nnx.update(self.model, self.params)
        return last

    @property
    def params(self) -> Any:
        """All weights of the model."""
        return join_params(self.trained, self.frozen)

    def state(self) -> Any:
        return {"params": self.trained, "opt_state": self.opt_state}

    def load_state(self, state: Any, step: int) -> None:
        self.trained, self.opt_state = state["params"], state["opt_state"]

    def cut(self, step: int) -> None:
        """It writes no files of its own."""

    def advance(self, step: int) -> dict[str, float] | None:
        with scope(self.mesh):
            return self._advance(step)

    def _advance(self, step: int) -> dict[str, float]:
        batch = self._batch(next(self.iterator))
        widths = batch.prompt_tokens.shape[1], batch.completion_tokens.shape[2]
        shape = self.config.batch_size, 1
        size = chunk_size(self.training, self.model, shape, widths, mesh=self.mesh)
        layout = choose_layout(1, self.config.batch_size, widths, size, prompt_parts(self.mesh))
        packed = place_packed(pack(batch.completion_lengths, batch.scored, widths[1], layout), self.mesh)
        batch = place_replicated(batch, self.mesh)
        data = update_input(batch, np.ones(self.config.batch_size, bool), packed)
        self.trained, self.opt_state, metrics, _ = self._step(self.trained, self.opt_state, data, self.frozen)
        out = {name: float(value) for name, value in fetch(metrics, self.mesh).items()}
        self.watch([out])
        self.watch.check()
        return out | {"learning_rate": float(self.schedule(step - 1))}

    def _batch(self, prompts: list[Prompt]) -> GroupBatch:
        limit = self.rollout.max_tokens_to_generate
        answers = [self._answer(prompt)[:limit] for prompt in prompts]
        lengths = np.array([len(prompt.tokens) for prompt in prompts], np.int32)
        width = length_bucket(int(lengths.max()), self.rollout.max_prompt_length)
        tokens = pad_tokens(answers, length_bucket(max(map(len, answers)), limit))[:, None]
        return GroupBatch(
            prompt_tokens=pad_tokens([prompt.tokens for prompt in prompts], width),
            prompt_lengths=lengths,
            completion_tokens=tokens,
            completion_lengths=np.array([[len(answer)] for answer in answers], np.int32),
            rollout_logprobs=None,
            rewards=np.ones((len(answers), 1), np.float32),
            scored=np.ones((len(answers), 1), bool),
        )

    def _answer(self, prompt: Prompt) -> list[int]:
        return [*self.tokenizer.encode_data(prompt.columns["answer"]), self.eos_id]

    def evaluate(self, step: int, last: bool) -> dict[str, float]:
        due = last or (self.config.stop_at_success is not None and step and step % self.config.eval_every_n_steps == 0)
        if self._evaluate is None or not due:
            return {}
        return {f"sft/{name}": value for name, value in self._evaluate(self.params, step).items()}

    def finished(self, row: dict[str, Any]) -> bool:
        target, success = self.config.stop_at_success, row.get("sft/eval/pass@1", 0.0)
        if target is None or success < target:
            return False
        message = "sft stopped at step %d of %s because success %.3g >= stop_at_success %g"
        logger.info(message, row["sft/step"], self.total, success, target)
        return True


def _check_answer(row: Mapping[str, Any], number: int) -> None:
    answer = row.get("answer")
    if not isinstance(answer, str) or not answer:
        raise UserError(
            f"SFT needs text in the 'answer' column; training row {number} of prompt {row.get('prompt')!r:.60} has "
            f"{answer!r:.60}. Of a number, data.answer_template='{{answer}}' makes text."
        )
