"""Converts problems to requests for an engine, which samples completions. Converts the sampled completions to arrays,
and arrays to single completions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from tunix_like.errors import UserError
from tunix_like.types import Completions, Problem, Request, Responder, Sample


def requests_of(problems: Sequence[Problem], size: int) -> list[Request]:
    """Returns one request per problem, each for `size` completions."""
    return [Request(problem.tokens, problem.number, size) for problem in problems]


def opening_of(responder: Responder, group: int, limit: int) -> Sequence[int]:
    """Returns the tokens that precede the first turn of the completions of prompt `group`.

    Raises:
      UserError: there are `limit` tokens or more, so a completion of at most `limit` tokens has no space for a turn.
    """
    tokens = responder.opening(group)
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
        out.tokens[index][:length], out.logprobs[index][:length] = sample.tokens, sample.logprobs
        out.token_mask[index][:length] = True if sample.token_mask is None else sample.token_mask
        out.finished[index] = sample.finished
    if all(sample.segment_start is None for sample in found.values()):
        return out
    starts = np.zeros((*shape, width), np.int32)
    for index, sample in found.items():
        starts[index][: len(sample.tokens)] = 0 if sample.segment_start is None else sample.segment_start
    return out._replace(segment_start=starts)


def samples_of(completions: Completions) -> Iterator[Sample]:
    """Yields each completion of `completions` as a `Sample`. This function is the inverse of `collect`, and is used by
    engines that compute arrays."""
    for request, sample in np.ndindex(*completions.lengths.shape):
        index = request, sample, slice(completions.lengths[request, sample])
        mask = None if completions.token_mask is None else completions.token_mask[index]
        finished = bool(completions.finished[request, sample])
        start = None if completions.segment_start is None else completions.segment_start[index]
        yield Sample(request, sample, completions.tokens[index], completions.logprobs[index], finished, mask, start)
