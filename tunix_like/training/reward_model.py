"""Models as reward functions in this process: `rewards.functions: [{name: "model:FOLDER"}]` for a trained reward model,
`likelihood:FOLDER` for the probability of the answer."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Float

from tunix_like.config.schema import RLTrainingConfig
from tunix_like.config.urls import plain_hub_id
from tunix_like.errors import UserError
from tunix_like.models.loading import default_dtype
from tunix_like.models.opening import load_config, load_model
from tunix_like.models.sharding import fetch, place_replicated, prompt_parts, scope
from tunix_like.planning.sizes import micro_batch_size
from tunix_like.rewards.calls import given_text
from tunix_like.rollout.shapes import length_bucket, pad_tokens
from tunix_like.step.forward import batch_logprobs, place_packed
from tunix_like.step.packing import choose_layout, pack
from tunix_like.training.arguments import likelihood_options
from tunix_like.types import GroupBatch

PREFIX = "model:"
"""Beginning of the names of reward models in `rewards.functions`; the folder follows."""

LIKELIHOOD = "likelihood:"
"""Beginning of the names of likelihoods of the answer in `rewards.functions`; the model follows."""


class ScoringModel:
    """A model that scores texts after prompts, on the devices of this process. Each prompt is computed once for the
    texts that follow it. The weights are read at the first call, in the compute dtype of the device.

    Args:
      folder: a folder, or a hub id.
      mesh: devices; defaults to a single device.
    """

    prefix: ClassVar[str]
    scalar_head: ClassVar[bool]
    cure: ClassVar[str]

    def __init__(self, folder: str | Path, mesh: Mesh | None = None) -> None:
        folder = plain_hub_id(folder, type(self).__name__)
        self.config = load_config(folder)
        if self.config.scalar_head != self.scalar_head:
            raise UserError(f"{self.prefix}{folder}: {self.cure}")
        if jax.process_count() > 1:
            raise UserError(f"{self.prefix}{folder}: scoring models are supported in runs of one process only.")
        self.folder = folder
        self._mesh = mesh

    @functools.cached_property
    def _loaded(self) -> tuple[Any, Any, Any, Any]:
        """Returns graph, weights, tokenizer and the compiled function of the scores."""
        model, tokenizer = load_model(self.folder, param_dtype=default_dtype(), mesh=self._mesh)
        if tokenizer is None:
            raise UserError(f"{self.prefix}{self.folder}: the folder has no tokenizer.")
        graphdef, state = nnx.split(model)
        options = likelihood_options(RLTrainingConfig())
        program = jax.jit(functools.partial(batch_logprobs, options=options), static_argnums=0)
        return graphdef, nnx.to_pure_dict(state), tokenizer, program

    def _values(
        self, contexts: list[list[int]], texts: list[list[list[int]]], size: int
    ) -> Float[np.ndarray, "P size T"]:
        """Returns a number per token of up to `size` texts after each of P contexts: its log-probability, or, with a
        scalar head, the score of the state before it."""
        graphdef, params, _, program = self._loaded
        lengths = np.zeros((len(contexts), size), np.int32)
        for row, group in enumerate(texts):
            lengths[row, : len(group)] = [len(text) for text in group]
        rows = lengths > 0
        if not rows.any():
            return np.zeros((*rows.shape, 1))
        kept = [context if fit.any() else [0] for context, fit in zip(contexts, rows, strict=True)]
        widths = length_bucket(max(map(len, kept))), length_bucket(int(lengths.max()))
        tokens = np.zeros((*rows.shape, widths[1]), np.int32)
        for row, column in np.argwhere(rows).tolist():
            tokens[row, column, : lengths[row, column]] = texts[row][column]
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
            placed = place_replicated(batch, self._mesh)
            values = program(graphdef, params, placed, place_packed(packed, self._mesh))
            return np.asarray(fetch(values, self._mesh))


class RewardModel(ScoringModel):
    """Scores completions with a reward model.

    The score is that of the last token of the text: the prompt as the policy received it, the completion, and an
    end-of-sequence token. If this is also the pad token in config.json, the score is that of the token before it, which
    transformers reads. A text with more tokens than the model has positions has no score.

    Args:
      folder: a folder of `tunix_like.export_model` or of transformers (`...ForSequenceClassification`, one label), or a
        hub id.
    """

    prefix = PREFIX
    scalar_head = True
    unrendered = True  # of a turn: the messages before it
    cure = (
        "this model is no reward model (...ForSequenceClassification with one label in config.json). Train one with "
        "algorithm.advantage_estimator=reward_model, and export its run."
    )

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str]) -> list[float]:
        """Returns the score of each completion, NaN for one without a score. Prompts are texts or messages; consecutive
        completions of the same prompt form a group."""
        _, _, tokenizer, _ = self._loaded
        most = self.config.max_positions
        runs = [list(run) for _, run in itertools.groupby(range(len(prompts)), key=lambda i: prompts[i])]
        size = statistics.mode(map(len, runs))  # a prompt may occur in two consecutive groups
        groups = [run[i : i + size] for run in runs for i in range(0, len(run), size)]
        end = tokenizer.eos_ids[0] if tokenizer.eos_id is None else tokenizer.eos_id
        ends = [] if (self.config.source or {}).get("pad_token_id") == end else [end]
        contexts = [tokenizer.encode_prompt(prompts[group[0]], False, most)[1] for group in groups]
        texts = []
        for context, group in zip(contexts, groups, strict=True):
            answers = [[*tokenizer.encode_data(completions[i], most), *ends] for i in group]
            # The head reads the state before each token: one more token is needed to read that of the last one.
            texts.append([[*text, 0] if 0 < len(context) <= most - len(text) else [] for text in answers])
        values = self._values(contexts, texts, size)
        out = [math.nan] * len(prompts)  # None would mean that the other functions score the completion
        for row, group in enumerate(groups):
            for column, i in enumerate(group):
                if texts[row][column]:
                    out[i] = float(values[row, column, len(texts[row][column]) - 1])
        return out


class AnswerLikelihood(ScoringModel):
    """The log-probability, in nats, of the row's `answer` after the prompt and the completion, under a frozen model.
    With `per: potential` and the initial policy it is the potential of TRACE (arXiv 2607.13988).

    An answer that is empty for the tokenizer, or does not fit into the positions of the model, has NaN: its completion
    is unscored.

    Args:
      folder: a model as in `model.path`, without a scalar head.
    """

    prefix = LIKELIHOOD
    scalar_head = False
    cure = "this model is a reward model, and gives no probabilities of tokens."
    unrendered = True  # of a turn: the messages before it

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[Any]) -> list[float]:
        _, _, tokenizer, _ = self._loaded
        most = self.config.max_positions
        contexts: list[list[int]] = []
        texts: list[list[list[int]]] = []
        for prompt, completion, gold in zip(prompts, completions, answer, strict=True):
            context = [*tokenizer.encode_prompt(prompt, False, most)[1], *tokenizer.encode_data(completion, most)]
            text = tokenizer.encode_data(given_text(gold, "answer", prompt), most)
            contexts.append(context)
            texts.append([text if 0 < len(context) <= most - len(text) else []])
        count = len(contexts)
        # The number of turns differs between steps; without padding each number would be compiled.
        missing = length_bucket(count) - count
        contexts.extend([[0]] * missing)
        texts.extend([[[]]] * missing)
        values = self._values(contexts, texts, 1)[:count, 0]
        sums = [float(row[: len(text)].sum()) for row, (text,) in zip(values, texts[:count], strict=True)]
        return [total if text else math.nan for total, (text,) in zip(sums, texts[:count], strict=True)]
