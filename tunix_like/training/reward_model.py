"""A trained reward model as a reward function: `rewards.functions: [{name: "model:FOLDER"}]`."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from tunix_like.config.schema import RLTrainingConfig
from tunix_like.config.urls import plain_hub_id
from tunix_like.errors import UserError
from tunix_like.models.loading import default_dtype
from tunix_like.models.opening import load_config, load_model
from tunix_like.models.sharding import fetch, place_replicated, prompt_parts, scope
from tunix_like.planning.sizes import micro_batch_size
from tunix_like.rollout.shapes import length_bucket, pad_tokens
from tunix_like.step.forward import batch_logprobs, place_packed
from tunix_like.step.packing import choose_layout, pack
from tunix_like.training.arguments import likelihood_options
from tunix_like.types import GroupBatch

PREFIX = "model:"
"""Beginning of the names of reward models in `rewards.functions`; the folder follows."""


class RewardModel:
    """Scores completions with a reward model, on the devices of this process. Each prompt is computed once for its
    completions.

    The score is that of the last token of the text: the prompt as the policy received it, the completion, and an
    end-of-sequence token. If this is also the pad token in config.json, the score is that of the token before it, which
    transformers reads. A text with more tokens than the model has positions has no score. The weights are read at
    the first call, in the compute dtype of the device.

    Args:
      folder: a folder of `tunix_like.export_model` or of transformers (`...ForSequenceClassification`, one label), or a
        hub id.
      mesh: devices; defaults to a single device.
    """

    def __init__(self, folder: str | Path, mesh: Mesh | None = None) -> None:
        folder = plain_hub_id(folder, "RewardModel")
        self.config = load_config(folder)
        if not self.config.scalar_head:
            raise UserError(
                f"{PREFIX}{folder}: this model is no reward model (...ForSequenceClassification with one label in "
                "config.json). Train one with algorithm.advantage_estimator=reward_model, and export its run."
            )
        if jax.process_count() > 1:
            raise UserError(f"{PREFIX}{folder}: reward models are supported in runs of one process only.")
        self.folder = folder
        self._mesh = mesh

    def __call__(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        """Returns the score of each completion, NaN for one without a score. Consecutive completions of the same prompt
        form a group."""
        _, _, tokenizer, _ = self._loaded
        most = self.config.max_positions
        runs = [list(run) for _, run in itertools.groupby(range(len(prompts)), key=lambda i: prompts[i])]
        size = statistics.mode(map(len, runs))  # a prompt may occur in two consecutive groups
        groups = [run[i : i + size] for run in runs for i in range(0, len(run), size)]
        end = tokenizer.eos_ids[0] if tokenizer.eos_id is None else tokenizer.eos_id
        ends = [] if (self.config.source or {}).get("pad_token_id") == end else [end]
        contexts = [tokenizer.encode_prompt(prompts[group[0]], False, most)[1] for group in groups]
        answers = [[[*tokenizer.encode_data(completions[i], most), *ends] for i in group] for group in groups]
        fits = [
            [0 < len(context) <= most - len(answer) for answer in group]
            for context, group in zip(contexts, answers, strict=True)
        ]
        scores = self._scores(contexts, answers, fits, size)
        out = [math.nan] * len(prompts)  # None would mean that the other functions score the completion
        for row, group in enumerate(groups):
            for column, i in enumerate(group):
                out[i] = float(scores[row, column]) if fits[row][column] else math.nan
        return out

    @functools.cached_property
    def _loaded(self) -> tuple[Any, Any, Any, Any]:
        """Returns graph, weights, tokenizer and the compiled function of the scores."""
        model, tokenizer = load_model(self.folder, param_dtype=default_dtype(), mesh=self._mesh)
        if tokenizer is None:
            raise UserError(f"{PREFIX}{self.folder}: the folder has no tokenizer.")
        graphdef, state = nnx.split(model)
        options = likelihood_options(RLTrainingConfig())
        program = jax.jit(functools.partial(batch_logprobs, options=options), static_argnums=0)
        return graphdef, nnx.to_pure_dict(state), tokenizer, program

    def _scores(
        self, contexts: list[list[int]], answers: list[list[list[int]]], fits: list[list[bool]], size: int
    ) -> np.ndarray:
        """Returns scores [P, size] of the completions of P prompts; completions that do not fit have none."""
        graphdef, params, _, program = self._loaded
        rows = np.array([[*fit, *[False] * (size - len(fit))] for fit in fits])
        # The head reads the hidden state before each token, so that before one more token is that of the last token.
        lengths = np.zeros(rows.shape, np.int32)
        for place in np.argwhere(rows).tolist():
            lengths[tuple(place)] = len(answers[place[0]][place[1]]) + 1
        if not rows.any():
            return np.zeros(rows.shape)
        kept = [context if fit.any() else [0] for context, fit in zip(contexts, rows, strict=True)]
        widths = length_bucket(max(map(len, kept))), length_bucket(int(lengths.max()))
        tokens = np.zeros((*rows.shape, widths[1]), np.int32)
        for row, column in np.argwhere(rows).tolist():
            tokens[row, column, : lengths[row, column] - 1] = answers[row][column]
        batch = GroupBatch(
            prompt_tokens=pad_tokens(kept, widths[0]),
            prompt_lengths=np.array(list(map(len, kept)), np.int32),
            completion_tokens=tokens,
            completion_lengths=lengths,
            rollout_logprobs=None,
            rewards=np.zeros(rows.shape, np.float32),
            scored=rows,
        )
        parts = prompt_parts(self._mesh)
        chunk = parts * micro_batch_size(widths[1], jax.default_backend())
        packed = pack(lengths, rows, widths[1], choose_layout(size, len(rows), widths, chunk, parts))
        with scope(self._mesh):
            values = np.asarray(
                fetch(
                    program(graphdef, params, place_replicated(batch, self._mesh), place_packed(packed, self._mesh)),
                    self._mesh,
                )
            )
        return np.take_along_axis(values, np.maximum(lengths - 1, 0)[..., None], axis=-1)[..., 0]
