"""The command `generate`: completes one prompt."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunix_like.cli.common import chosen_source, setup_jax
from tunix_like.config.load import load
from tunix_like.errors import UserError
from tunix_like.runtime import console

if TYPE_CHECKING:
    from tunix_like.data.tokenizer import Tokenizer
    from tunix_like.types import Engine, SamplingParams


def _greedy(overrides: Sequence[str]) -> list[str]:
    """Returns the overrides for greedy decoding.

    Raises:
      UserError: an override sets other sampling parameters.
    """
    names = [f"rollout.{name}" for name in ("temperature", "top_p", "top_k")]
    given = [word for word in overrides if word.partition("=")[0].strip() in names]
    greedy = ["rollout.temperature=0"]
    if given and load(None, given).rollout != load(None, greedy).rollout:
        raise UserError(f"generate: --greedy sets rollout.temperature=0; remove {' and '.join(given)} or --greedy.")
    return [*overrides, *greedy]


def generate(arguments: argparse.Namespace) -> None:
    """Completes one prompt and prints the completion."""
    overrides = _greedy(arguments.overrides) if arguments.greedy else arguments.overrides
    setup_jax()
    from tunix_like.models.loading import check_fit
    from tunix_like.runs.trained import open_trained
    from tunix_like.training.engine import make_engine
    from tunix_like.types import SamplingParams

    trained = open_trained(chosen_source(arguments.source, arguments.best), overrides)
    check_fit(trained.model_config, trained.tokenizer, trained.config.rollout)
    data, rollout = trained.config.data, trained.config.rollout
    prompt: Any = arguments.prompt
    if data.apply_chat_template or data.system_prompt is not None:
        system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
        prompt = [*system, {"role": "user", "content": prompt}]
    sampler = make_engine(trained.graphdef, trained.tokenizer, rollout, trained.mesh)
    sampling = SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k)
    seed = trained.config.training.seed
    print(_sampling_line(sampling, seed), file=sys.stderr)
    completion = complete(sampler, trained.params, trained.tokenizer, prompt, sampling, seed)
    if not completion:
        print("the completion is empty: the model ended it before any text", file=sys.stderr)
    console.print_completion(completion)


def _sampling_line(sampling: SamplingParams, seed: int) -> str:
    """Describes the sampling parameters, since an evaluation or another program may use others."""
    if sampling.temperature == 0:
        return "greedy: the most likely token at every position"
    top_k = "" if sampling.top_k is None else f", top-k {sampling.top_k}"
    return (
        f"sampled at temperature {sampling.temperature:g}, top-p {sampling.top_p:g}{top_k}, seed {seed}; --greedy "
        "takes the most likely token at every position"
    )


def complete(
    engine: Engine, params: Any, tokenizer: Tokenizer, prompt: Any, sampling: SamplingParams, seed: int
) -> str:
    """Samples one completion of `prompt`.

    Raises:
      UserError: the prompt has no tokens, or too many.
    """
    import jax

    from tunix_like.data.stream import render
    from tunix_like.rollout.rollouts import completion_texts

    limit = engine.max_prompt_length
    tokens = render({"prompt": prompt}, tokenizer, limit).tokens
    if not tokens:
        raise UserError("the prompt has no tokens; give a text with --prompt.")
    if len(tokens) > limit:
        size = f"over {2 * limit}" if len(tokens) > 2 * limit else len(tokens)
        raise UserError(f"the prompt has {size} tokens; raise rollout.max_prompt_length ({limit}).")
    out = engine.generate(engine.place(params), [tokens], [0], 1, jax.random.key(seed), sampling)
    return completion_texts(out, tokenizer)[0]
