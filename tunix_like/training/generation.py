"""Generates text from prompts, for Python and for the commands `generate` and `train`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from tunix_like.config.argument_names import hint
from tunix_like.config.schema import RolloutConfig
from tunix_like.data.stream import Prompt, render
from tunix_like.errors import UserError
from tunix_like.models.decoder import Decoder, check_decoder
from tunix_like.models.loading import check_fit
from tunix_like.rollout.requests import collect
from tunix_like.rollout.rollouts import completion_texts
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.training.engine import make_engine
from tunix_like.types import Completions, Engine, Request, SamplingParams


def generate(
    model: Decoder,
    tokenizer: Any,
    prompts: Sequence[Any],
    *,
    seed: int = 0,
    mesh: Mesh | None = None,
    **rollout: Any,
) -> list[str]:
    """Samples one completion of each prompt. Returns the texts of the completions.

    Args:
      tokenizer: a `tunix_like` tokenizer or a transformers fast tokenizer.
      prompts: a list whose elements are texts, or lists of chat messages, which are rendered with the chat template.
        Equal prompts have different completions, unless `temperature` is 0.
      mesh: the mesh on which the model was loaded.
      rollout: fields of `RolloutConfig`, such as `temperature` (0: the most likely token at every position), `top_p`,
        `top_k`, `max_prompt_length` and `max_tokens_to_generate`.

    Raises:
      UserError: an argument is wrong, or a prompt has no tokens or more than `max_prompt_length` (the message names the
        prompt).
    """
    check_decoder("model", model)
    graphdef, state = nnx.split(model)
    wrapped = Tokenizer.wrap(tokenizer)
    config = with_rollout(RolloutConfig(), rollout)
    check_fit(model.config, wrapped, config)
    return complete(
        make_engine(graphdef, wrapped, config, mesh),
        nnx.to_pure_dict(state),
        wrapped,
        prompts,
        sampling_of(config),
        seed,
    )


def with_rollout(config: RolloutConfig, changes: Mapping[str, Any]) -> RolloutConfig:
    """Returns `config` with other values of some fields. Raises UserError for unknown names and wrong values."""
    names = [field.name for field in dataclasses.fields(config)]
    if unknown := [name for name in changes if name not in names]:
        raise UserError(f"generate: unknown argument '{unknown[0]}'. {hint(unknown[0], names)}")
    return dataclasses.replace(config, **changes)


def sampling_of(rollout: RolloutConfig) -> SamplingParams:
    return SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k)


def complete(
    engine: Engine, params: Any, tokenizer: Tokenizer, prompts: Sequence[Any], sampling: SamplingParams, seed: int
) -> list[str]:
    """Samples one completion of each prompt with an engine. Returns the texts. Errors are those of `completed`."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence):
        raise UserError(
            f"prompts: got {type(prompts).__name__}; give a list, each element a text or a list of messages."
        )
    rows = [{"prompt": prompt} for prompt in prompts]
    return completion_texts(completed(engine, params, tokenizer, rows, sampling, seed), tokenizer) if rows else []


def completed(
    engine: Engine,
    params: Any,
    tokenizer: Tokenizer,
    rows: Sequence[Mapping[str, Any]],
    sampling: SamplingParams,
    seed: int,
) -> Completions:
    """Samples one completion of the prompt of each row with an engine. Raises UserError for a prompt without tokens or
    with too many."""
    requests = []
    for number, row in enumerate(rows):
        try:
            tokens = rendered(row, tokenizer, engine.max_prompt_length).tokens
        except UserError as error:
            raise error if len(rows) == 1 else UserError(f"prompts[{number}]: {error}") from None
        requests.append(Request(tokens, number=number, samples=1))
    return collect(engine.generate(engine.place(params), requests, jax.random.key(seed), sampling), requests)


def rendered(row: Mapping[str, Any], tokenizer: Tokenizer, limit: int) -> Prompt:
    """Renders and tokenises the prompt of a row. Raises UserError if it has no tokens or more than `limit` tokens."""
    found = render(row, tokenizer, limit)
    if not found.tokens:
        raise UserError("the prompt has no tokens; give a text.")
    if len(found.tokens) > limit:
        size = f"over {2 * limit}" if len(found.tokens) > 2 * limit else len(found.tokens)
        raise UserError(f"the prompt has {size} tokens; raise rollout.max_prompt_length ({limit}).")
    return found
