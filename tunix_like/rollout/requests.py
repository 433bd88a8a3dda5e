"""Samples completions of problems, with or without environments: requests to an engine, and its samples as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array

from tunix_like.errors import UserError
from tunix_like.rollout.episodes import Episode
from tunix_like.types import Completions, Engine, Problem, Request, Responder, Sample, SamplingParams


def requests_of(problems: Sequence[Problem], size: int) -> list[Request]:
    """Returns one request per problem, each for `size` completions."""
    return [Request(problem.tokens, problem.number, size) for problem in problems]


def opening_of(responder: Responder, group: int, sample: int, limit: int) -> Sequence[int]:
    """Returns the tokens that precede the first turn of the completion `sample` of prompt `group`.

    Raises:
      UserError: there are `limit` tokens or more, so a completion of at most `limit` tokens has no space for a turn.
    """
    tokens = responder.opening(group, sample)
    if len(tokens) >= limit:
        problem = f"{len(tokens)} tokens precede the first turn"
        raise UserError(f"rollout.max_tokens_to_generate={limit}: {problem}; increase this value.")
    return tokens


def collect(samples: Iterable[Sample], requests: Sequence[Request]) -> Completions:
    """Collects the samples of one call of `Engine.generate` in arrays. The token axis has the length of the longest
    completion, and at least length 1.

    Args:
      samples: one for each completion of each request.
      requests: the requests, all with the same number of completions, `G`.
    """
    shape = len(requests), requests[0].samples
    found: dict[tuple[int, int], Sample] = {(sample.request, sample.sample): sample for sample in samples}
    width = max(1, *(len(sample.tokens) for sample in found.values()))
    out = Completions(
        np.zeros((*shape, width), np.int32),
        np.zeros(shape, np.int32),
        np.zeros((*shape, width), np.float32),
        np.zeros(shape, bool),
        np.zeros((*shape, width), bool),
    )
    assert out.token_mask is not None
    for index, sample in found.items():
        length = out.lengths[index] = len(sample.tokens)
        out.tokens[index][:length] = sample.tokens
        out.logprobs[index][:length] = sample.logprobs
        out.token_mask[index][:length] = True if sample.token_mask is None else sample.token_mask
        out.finished[index] = sample.finished
    out = _with_experts(out, found, max(len(request.tokens) for request in requests))
    if all(sample.segment_start is None for sample in found.values()):
        return out
    starts = np.zeros((*shape, width), np.int32)
    for index, sample in found.items():
        starts[index][: len(sample.tokens)] = 0 if sample.segment_start is None else sample.segment_start
    return out._replace(segment_start=starts)


def _with_experts(out: Completions, found: dict[tuple[int, int], Sample], width: int) -> Completions:
    """Adds the recorded experts of samples, if all have them. `width` is the length of the longest prompt."""
    first = next(iter(found.values())).experts
    if first is None or any(sample.experts is None for sample in found.values()):
        return out
    experts = np.zeros((*out.tokens.shape, *first.shape[1:]), first.dtype)
    of_prompts = np.zeros((len(experts), width, *first.shape[1:]), first.dtype)
    for (prompt, number), sample in found.items():
        experts[prompt, number, : len(sample.tokens)] = sample.experts
        if number == 0 and sample.prompt_experts is not None:
            of_prompts[prompt, : len(sample.prompt_experts)] = sample.prompt_experts
    return out._replace(experts=experts, prompt_experts=of_prompts)


def samples_of(completions: Completions) -> Iterator[Sample]:
    """Yields each completion of `completions` as a `Sample`. This function is the inverse of `collect`, and is used by
    engines that compute arrays."""
    for request, sample in np.ndindex(*completions.lengths.shape):
        index = request, sample, slice(completions.lengths[request, sample])
        mask = None if completions.token_mask is None else completions.token_mask[index]
        finished = bool(completions.finished[request, sample])
        start = None if completions.segment_start is None else completions.segment_start[index]
        experts = None if completions.experts is None else completions.experts[index]
        of_prompt = None if completions.prompt_experts is None else completions.prompt_experts[request]
        tokens, logprobs = completions.tokens[index], completions.logprobs[index]
        yield Sample(request, sample, tokens, logprobs, finished, mask, start, experts, of_prompt)


@runtime_checkable
class RolloutTrajectories(Responder, Protocol):
    """The trajectories of one rollout, as `environments.trajectories.Trajectories`."""

    problems: list[Problem]

    def check_rows(self, out: Completions, engine: str) -> None: ...

    def episodes(self) -> list[Episode]: ...

    def environments(self) -> list[Any] | None: ...


@runtime_checkable
class RolloutPlayer(Protocol):
    """Starts the trajectories of rollouts, as `environments.trajectories.Player`."""

    seconds: float

    @property
    def rewrites(self) -> bool: ...

    def start(self, problems: Sequence[Problem], size: int, max_prompt_length: int) -> RolloutTrajectories: ...


def generate(
    engine: Engine,
    player: RolloutPlayer | None,
    params: Any,
    problems: Sequence[Problem],
    size: int,
    key: Array,
    sampling: SamplingParams,
) -> tuple[list[Problem], Completions, RolloutTrajectories | None]:
    """Samples `size` completions of each problem. If `player` is not None, environments answer each turn of the policy.

    Returns:
      the problems, with the first observations of the environments added to their prompts; the completions; and the
      trajectories, or None if `player` is None.
    """
    trajectories = None if player is None else player.start(problems, size, engine.max_prompt_length)
    if trajectories is not None:
        problems = trajectories.problems
    requests = requests_of(problems, size)
    # An engine that supports only single turns may lack the parameter `responder`.
    samples = (
        engine.generate(params, requests, key, sampling)
        if trajectories is None
        else engine.generate(params, requests, key, sampling, trajectories)
    )
    out = collect(samples, requests)
    if trajectories is not None and player is not None and player.rewrites:
        while isinstance(inner := getattr(engine, "engine", None), Engine):  # the error message names the inner engine
            engine = inner
        trajectories.check_rows(out, type(engine).__name__)
    return list(problems), out, trajectories
