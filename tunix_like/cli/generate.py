"""The command `generate`: completes one prompt. Conversations of several turns are in `conversation.py`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tunix_like.cli.common import chosen_source, setup_jax
from tunix_like.config.load import load
from tunix_like.errors import UserError
from tunix_like.runtime import console

if TYPE_CHECKING:
    from tunix_like.config.schema import Config
    from tunix_like.data.stream import Prompt
    from tunix_like.data.tokenizer import Tokenizer
    from tunix_like.types import Engine, SamplingParams


def _greedy(overrides: Sequence[str]) -> list[str]:
    """Returns `overrides` with an additional override for greedy decoding.

    Raises:
      UserError: an element of `overrides` sets a sampling parameter to a value that contradicts greedy decoding.
    """
    names = [f"rollout.{name}" for name in ("temperature", "top_p", "top_k")]
    given = [word for word in overrides if word.partition("=")[0].strip() in names]
    greedy = ["rollout.temperature=0"]
    if given and load(None, given).rollout != load(None, greedy).rollout:
        raise UserError(f"generate: --greedy sets rollout.temperature=0; remove {' and '.join(given)} or --greedy.")
    return [*overrides, *greedy]


def generate(arguments: argparse.Namespace) -> None:
    """Completes one prompt and prints the completion. If an environment or a person answers the turns of the model,
    prints all turns.

    Raises:
      UserError: the options conflict, the prompt cannot be used, or the environment failed.
    """
    _check_options(arguments)
    overrides = _greedy(arguments.overrides) if arguments.greedy else arguments.overrides
    setup_jax()
    from tunix_like.cli.conversation import play, talk
    from tunix_like.models.loading import check_fit
    from tunix_like.runs.environments import environments_of, has_environment, with_tools
    from tunix_like.runs.trained import open_trained
    from tunix_like.training.engine import make_engine
    from tunix_like.types import SamplingParams

    source, by_row = chosen_source(arguments.source, arguments.best), arguments.row is not None
    trained = open_trained(source, overrides, need_data=by_row)
    config, rollout = trained.config, trained.config.rollout
    check_fit(trained.model_config, trained.tokenizer, rollout)
    environments = environments_of(config) if has_environment(config) else None
    try:
        trained = trained._replace(tokenizer=with_tools(trained.tokenizer, environments))
        row = _row(config, arguments.row) if by_row else {"prompt": _prompt(config, arguments.prompt)}
        sampler = make_engine(trained.graphdef, trained.tokenizer, rollout, trained.mesh)
        sampling = SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k)
        print(_sampling_line(sampling, config.training.seed), file=sys.stderr)
        if arguments.interactive:
            talk(sampler, trained, row["prompt"], sampling, () if environments is None else environments.tools)
        elif environments is not None:
            play(sampler, trained, row, sampling, environments)
        else:
            given = sampler, trained.params, trained.tokenizer, row["prompt"], sampling, config.training.seed
            _print_completion(complete(*given))
    finally:
        if environments is not None:
            environments.close()


def _check_options(arguments: argparse.Namespace) -> None:
    """Raises UserError if no prompt or two prompts are given, or if `--row` is below 1. With `--interactive`, the
    prompt can be omitted and is then the first line of standard input."""
    given = [f"--{name}" for name in ("prompt", "row") if getattr(arguments, name) is not None]
    if len(given) > 1:
        raise UserError("generate: --prompt and --row both set the prompt; give one of them.")
    if not given and not arguments.interactive:
        raise UserError("generate: give the prompt by --prompt TEXT or --row N, or type it with --interactive.")
    if arguments.row is not None and arguments.row < 1:
        raise UserError(f"generate: --row {arguments.row}: rows are counted from 1.")


def _prompt(config: Config, text: str | None) -> Any:
    """Returns the prompt: `text`, or a list of messages if the run uses the chat template.

    Args:
      text: text of the prompt; None reads it from the first line of standard input.

    Raises:
      UserError: standard input has no line.
    """
    if text is None:
        from tunix_like.cli.conversation import read_line

        text = read_line("prompt> ")
        if text is None:
            raise UserError("generate: no prompt was written; give one by --prompt TEXT.")
    data = config.data
    if not data.apply_chat_template and data.system_prompt is None:
        return text
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    return [*system, {"role": "user", "content": text}]


def _row(config: Config, number: int) -> Mapping[str, Any]:
    """Returns row `number` (from 1) of the held-out data, or of the training data if there are no held-out rows."""
    from tunix_like.data import load_source

    source = load_source(config.data)
    rows, what = (source.eval, "held-out") if len(source.eval) else (source.train, "training")
    if number > len(rows):
        raise UserError(f"generate: --row {number}: the data has {len(rows)} {what} rows.")
    return rows[number - 1]


def _print_completion(completion: str) -> None:
    if not completion:
        print("the completion is empty: the model ended it before any text", file=sys.stderr)
    console.print_completion(completion)


def _sampling_line(sampling: SamplingParams, seed: int) -> str:
    """Describes the sampling parameters of `generate` in one line. Evaluations can use other sampling parameters."""
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
      UserError: the prompt has no tokens, or too many tokens.
    """
    import jax

    from tunix_like.rollout.requests import collect
    from tunix_like.rollout.rollouts import completion_texts
    from tunix_like.types import Request

    tokens = rendered(prompt, tokenizer, engine.max_prompt_length).tokens
    requests = [Request(tokens, number=0, samples=1)]
    samples = engine.generate(engine.place(params), requests, jax.random.key(seed), sampling)
    return completion_texts(collect(samples, requests), tokenizer)[0]


def rendered(prompt: Any, tokenizer: Tokenizer, limit: int) -> Prompt:
    """Renders and tokenises a prompt. Raises UserError if the prompt has no tokens or more than `limit` tokens."""
    from tunix_like.data.stream import render

    found = render({"prompt": prompt}, tokenizer, limit)
    if not found.tokens:
        raise UserError("the prompt has no tokens; give a text with --prompt.")
    if len(found.tokens) > limit:
        size = f"over {2 * limit}" if len(found.tokens) > 2 * limit else len(found.tokens)
        raise UserError(f"the prompt has {size} tokens; raise rollout.max_prompt_length ({limit}).")
    return found
