"""Helpers that call engines with arrays instead of requests and samples."""

from tunix_like.rollout.requests import collect
from tunix_like.rollout.rollouts import with_width
from tunix_like.types import Request


def requests_of(prompts, numbers, size):
    return [Request(tokens, int(number), size) for tokens, number in zip(prompts, numbers, strict=True)]


def sample_groups(engine, params, prompts, numbers, size, *rest):
    """Returns the `Completions` of a call, as wide as the limit of the engine."""
    requests = requests_of(prompts, numbers, size)
    return with_width(collect(engine.generate(params, requests, *rest), requests), engine.max_tokens)
