"""Computes the divergence of next-token distributions from those of a teacher, without an array of all logits."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tunix_like.models.log_probabilities import LogitOptions, in_pieces, logits_of, value_of
from tunix_like.models.sharding import replicate, split_tokens, split_vocabulary, vocabulary_parts


class Outputs(NamedTuple):
    """Hidden states of a model, its output matrix, and the bound `logits_cap` of its logits (None: no bound)."""

    hidden: Float[Array, "A N D"]
    head: Float[Array, "D V"]
    cap: float | None


def token_divergence(
    policy: Outputs, teacher: Outputs, targets: Int[Array, "A N"], beta: float, temperature: float, chunk: int
) -> tuple[Float[Array, "A N"], Float[Array, "A N"]]:
    """Computes the generalised Jensen-Shannon divergence of each next-token distribution, in nats, and the teacher's
    log-probabilities of the tokens `targets`. The gradient is that with respect to the policy; the teacher has none.

    With `p = softmax(policy logits / temperature)`, `q` likewise of the teacher and `m = beta q + (1 - beta) p`, the
    divergence is `beta KL(q || m) + (1 - beta) KL(p || m)` (GKD, arXiv 2306.13649). At the limits, where this is 0, the
    result is `KL(q || p)` for `beta` 0 and `KL(p || q)` for `beta` 1, as in TRL's GKDTrainer.

    If one vocabulary is larger (padding), the distributions are those over the tokens of the smaller one.

    Tokens are processed in pieces, like those of `token_logprobs`: the logits of both models exist for one piece only.
    """
    sizes = policy.head.shape[-1], teacher.head.shape[-1]
    parts = min(map(vocabulary_parts, sizes))
    ours, theirs = (LogitOptions(temperature, False, outputs.cap, parts > 1) for outputs in (policy, teacher))
    options = _Options(ours, theirs, beta, min(sizes))

    def piece(hidden: Array, of_teacher: Array, targets: Array) -> tuple[Array, Array]:
        return _piece(options, hidden, policy.head, of_teacher, teacher.head, targets)

    divergence, known = in_pieces(piece, (policy.hidden, teacher.hidden, targets), chunk * parts)
    return divergence, known


class _Options(NamedTuple):
    """`size`: number of tokens that both vocabularies have."""

    policy: LogitOptions
    teacher: LogitOptions
    beta: float
    size: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _piece(
    options: _Options, hidden: Array, head: Array, of_teacher: Array, teacher_head: Array, targets: Array
) -> tuple[Array, Array]:
    """Computes divergences and the teacher's log-probabilities for some of the tokens."""
    return _piece_forward(options, hidden, head, of_teacher, teacher_head, targets)[0]


def _piece_forward(
    options: _Options, hidden: Array, head: Array, of_teacher: Array, teacher_head: Array, targets: Array
) -> tuple[Any, Any]:
    p_logits, _ = _common_logits(options, options.policy, hidden, head)
    q_logits, _ = _common_logits(options, options.teacher, of_teacher, teacher_head)
    p_parts, q_parts = map(_normaliser, (p_logits, q_logits))
    log_p, log_q = _normalised(p_logits, p_parts), _normalised(q_logits, q_parts)
    beta = options.beta
    of_p, of_q = _log_ratios(options.beta, log_p, log_q)
    ours, theirs = (beta, 1 - beta) if beta in (0, 1) else (1 - beta, beta)
    divergence = (ours * jnp.exp(log_p) * of_p + theirs * jnp.exp(log_q) * of_q).sum(axis=-1)
    known = value_of(log_q, jnp.minimum(targets, options.size - 1), options.teacher.split)
    chosen = jnp.where(targets < options.size, known, -jnp.inf)
    return (divergence, chosen), (hidden, head, of_teacher, teacher_head, p_parts, q_parts)


def _piece_forward_with_zeros(options: _Options, *arguments: Any) -> tuple[Any, Any]:
    """Like `_piece_forward`. Saves for the backward pass whether the output matrix is trained."""
    out, saved = _piece_forward(options, *(argument.value for argument in arguments))
    return out, (saved, () if arguments[1].perturbed else None)


def _piece_backward(options: _Options, saved: Any, cotangents: Any) -> tuple[Array | None, ...]:
    """Computes the gradients of the divergences with respect to hidden states and output matrix of the policy.

    For logits `l` of the policy, `dD/dl = (1 - beta) p (r - sum(p r))` with `r = log(p / m)`. For `beta` 1 it is the
    same with `r = log(p / q)` and factor 1, for `beta` 0 it is `p - q`. The forward pass stores the normalisers.
    """
    (hidden, head, of_teacher, teacher_head, p_parts, q_parts), trained = saved
    of_divergence = cotangents[0]
    if isinstance(of_divergence, jax.custom_derivatives.SymbolicZero):
        of_divergence = jnp.zeros(of_divergence.shape, of_divergence.dtype)
    p_logits, slope = _common_logits(options, options.policy, hidden, head)
    q_logits, _ = _common_logits(options, options.teacher, of_teacher, teacher_head)
    log_p, log_q = _normalised(p_logits, p_parts), _normalised(q_logits, q_parts)
    p = jnp.exp(log_p)
    if options.beta == 0:
        of_logits = p - jnp.exp(log_q)
    else:
        ratio, _ = _log_ratios(options.beta, log_p, log_q)
        of_logits = p * (ratio - (p * ratio).sum(axis=-1, keepdims=True))
        of_logits *= 1.0 if options.beta == 1 else 1.0 - options.beta
    of_logits = of_divergence[..., None] * of_logits
    of_logits = jnp.pad(of_logits, ((0, 0), (0, 0), (0, head.shape[-1] - options.size)))
    of_logits = (of_logits * slope / options.policy.temperature).astype(hidden.dtype)
    whole = replicate(hidden) if options.policy.split else hidden
    of_hidden = jnp.matmul(of_logits, head.astype(hidden.dtype).T)
    of_hidden = split_tokens(of_hidden) if options.policy.split else of_hidden
    if trained is None:
        return of_hidden, None, None, None, None
    of_head = jnp.einsum("and,anv->dv", whole, of_logits, preferred_element_type=jnp.float32)
    return of_hidden, of_head.astype(head.dtype), None, None, None


_piece.defvjp(_piece_forward_with_zeros, _piece_backward, symbolic_zeros=True)


def _common_logits(options: _Options, of_model: LogitOptions, hidden: Array, head: Array) -> tuple[Array, Any]:
    """Returns the logits of the tokens that both vocabularies have, and the derivative of the bound of all logits."""
    whole = replicate(hidden) if of_model.split else hidden
    logits, slope = logits_of(of_model, whole, head)
    if logits.shape[-1] != options.size:
        logits = logits[..., : options.size]
        logits = split_vocabulary(logits) if of_model.split else logits
    return logits, slope


def _normaliser(logits: Array) -> tuple[Array, Array]:
    """Returns the largest logit and the logarithm of the sum of `exp(logits - largest)`; their sum would be rounded."""
    top = logits.max(axis=-1, keepdims=True)
    return top, jnp.log(jnp.exp(logits - top).sum(axis=-1, keepdims=True))


def _normalised(logits: Array, parts: tuple[Array, Array]) -> Array:
    return (logits - parts[0]) - parts[1]


def _log_ratios(beta: float, log_p: Array, log_q: Array) -> tuple[Array, Array]:
    """Returns `log(p / m)` and `log(q / m)` with `m = beta q + (1 - beta) p`, both exactly 0 where `p = q`."""
    d = log_q - log_p
    if beta in (0, 1):
        return -beta * d, (1 - beta) * d
    # With the larger of p and q taken out of m, nothing overflows and no large numbers are subtracted.
    rest = jnp.log1p(jnp.where(d > 0, 1 - beta, beta) * jnp.expm1(-jnp.abs(d)))
    return -jnp.maximum(d, 0.0) - rest, jnp.minimum(d, 0.0) - rest
