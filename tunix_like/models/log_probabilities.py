"""Computes log-probabilities and entropies of tokens from hidden states, without an array of all logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from tunix_like.models.sharding import replicate, sequence_split, split_tokens, split_vocabulary, vocabulary_parts


def token_logprobs(
    hidden: Float[Array, "A N D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "A N"],
    temperature: float,
    chunk: int,
    entropy_gradient: bool = False,
    cap: float | None = None,
) -> tuple[Float[Array, "A N"], Float[Array, "A N"]]:
    """Computes the log-probabilities `log_softmax(hidden @ head / temperature)` of the tokens `targets`, and the
    entropy of the distribution at each token, in nats. `hidden` are hidden states, and `head` is the output matrix.

    The entropy has a gradient only if `entropy_gradient` is set. With `cap`, logits become `cap tanh(logits / cap)`
    before the temperature.

    Tokens are processed in pieces of about `chunk` tokens. The backward pass computes the logits of each piece again,
    so the array of all logits is never materialised. If a mesh splits the vocabulary into n parts, a piece has
    `n * chunk` tokens. Each device then holds as many logits as a single device without a mesh.
    """
    parts = vocabulary_parts(head.shape[-1])
    options = LogitOptions(temperature, entropy_gradient, cap, parts > 1)
    arrays = hidden, targets
    logprobs, entropy = in_pieces(lambda *piece: _piece(options, piece[0], head, piece[1]), arrays, chunk * parts)
    return logprobs, entropy


def token_score_norms(
    hidden: Float[Array, "A N D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "A N"],
    temperature: float,
    chunk: int,
    cap: float | None = None,
) -> Float[Array, "A N"]:
    """Computes the squared norm of the gradient of each token's log-probability with respect to the logits (after the
    temperature): `1 - 2 p_t + sum(p^2)`. No gradient is defined. The arguments are those of `token_logprobs`."""
    parts = vocabulary_parts(head.shape[-1])
    options = LogitOptions(temperature, False, cap, parts > 1)

    def piece(hidden: Array, targets: Array) -> tuple[Array]:
        logits, _ = logits_of(options, replicate(hidden) if options.split else hidden, head)
        weights = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
        total = weights.sum(axis=-1)
        squares = (weights**2).sum(axis=-1)
        return (1.0 - 2.0 * value_of(weights, targets, options.split) / total + squares / total**2,)

    return in_pieces(piece, (hidden, targets), chunk * parts)[0]


def in_pieces(
    function: Callable[..., tuple[Array, ...]], arrays: Sequence[Shaped[Array, "A N ..."]], chunk: int
) -> tuple[Float[Array, "A N"], ...]:
    """Returns `function(*arrays)`, computed for about `chunk` tokens at a time. A piece has tokens of every device that
    the axis `cp` of a mesh has, so that the tokens are not gathered first (if lanes have one bin)."""
    lanes, count = arrays[0].shape[:2]
    pieces = min(count, -(-lanes * count // chunk))
    parts = sequence_split(count)
    if pieces == 1:
        return function(*arrays)
    each = -(-count // parts // pieces)
    pad = pieces * each - count // parts

    def split(x: Array) -> Array:
        of_devices = x.reshape(lanes, parts, -1, *x.shape[2:])
        padded = jnp.pad(of_devices, ((0, 0), (0, 0), (0, pad), *((0, 0) for _ in x.shape[2:])))
        divided = padded.reshape(lanes, parts, pieces, each, *x.shape[2:])
        return jnp.moveaxis(divided, 2, 0).reshape(pieces, lanes, -1, *x.shape[2:])

    def joined(x: Array) -> Array:
        divided = jnp.moveaxis(x.reshape(pieces, lanes, parts, each), 0, 2)
        return divided.reshape(lanes, parts, -1)[:, :, : count // parts].reshape(lanes, count)

    results = jax.lax.map(lambda xs: function(*xs), tuple(map(split, arrays)))
    return tuple(map(joined, results))


class LogitOptions(NamedTuple):
    """How logits are computed; `split`: each device holds only a part of the vocabulary."""

    temperature: float
    entropy_gradient: bool
    cap: float | None
    split: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _piece(options: LogitOptions, hidden: Array, head: Array, targets: Array) -> tuple[Array, Array]:
    """Computes log-probabilities and entropies of some of the tokens that `token_logprobs` processes piece by piece.

    The gradient is defined explicitly, and needs one pass over the recomputed logits. Automatic differentiation would
    need three passes. The forward pass stores the log-sum-exp `lse`, so the backward pass computes the probabilities
    `exp(logits - lse)` without a maximum or a sum.
    """
    return _piece_forward(options, hidden, head, targets)[0]


def _piece_forward(options: LogitOptions, hidden: Array, head: Array, targets: Array) -> tuple[Any, Any]:
    whole = replicate(hidden) if options.split else hidden
    logits, _ = logits_of(options, whole, head)
    top = logits.max(axis=-1, keepdims=True)
    weights = jnp.exp(logits - top)
    total = weights.sum(axis=-1)
    lse = jnp.log(total) + top[..., 0]
    mean = (weights * logits).sum(axis=-1) / total  # in the same pass over the logits as `total`
    chosen = value_of(logits, targets, options.split)
    return (chosen - lse, lse - mean), (hidden, head, targets, lse, mean)


def value_of(values: Float[Array, "A N V"], targets: Int[Array, "A N"], split: bool) -> Float[Array, "A N"]:
    """Returns the values of the tokens `targets`. `split`: each device holds only a part of the vocabulary."""
    if not split:
        return jnp.take_along_axis(values, targets[..., None], axis=-1)[..., 0]
    # Each device looks up the targets in its own part of the vocabulary. The barrier makes `index` and `zero` depend on
    # the piece. Otherwise XLA:GPU computes both before the loop over pieces, as arrays of the size of the logits.
    index, zero, own = jax.lax.optimization_barrier((jnp.arange(values.shape[-1]), jnp.float32(0.0), targets))
    return jnp.where(index[None, None] == own[..., None], values, zero).sum(axis=-1)


def _piece_forward_with_zeros(options: LogitOptions, hidden: Any, head: Any, targets: Any) -> tuple[Any, Any]:
    """Computes log-probabilities and entropies. Saves for the backward pass whether the output matrix is trained,
    because no gradient is computed for a frozen matrix."""
    out, saved = _piece_forward(options, hidden.value, head.value, targets.value)
    return out, (saved, () if head.perturbed else None)


def _piece_backward(options: LogitOptions, saved: Any, cotangents: Any) -> tuple[Array, Array | None, None]:
    """Computes the gradients of log-probabilities and entropies with respect to hidden states and output matrix.

    For logits `l`, `p = softmax(l)`, target `t`, entropy `H` and `mean = sum(p * l)`, the derivatives are
    `d log p_t / dl = onehot(t) - p` and `dH / dl = p * (mean - l)`.
    """
    (hidden, head, targets, lse, mean), trained = saved
    zeros = jax.custom_derivatives.SymbolicZero
    of_chosen, of_entropy = (
        (jnp.zeros(x.shape, x.dtype) if isinstance(x, zeros) else x)[..., None] for x in cotangents
    )
    hidden = replicate(hidden) if options.split else hidden  # replicated again instead of stored
    logits, slope = logits_of(options, hidden, head)
    probabilities = jnp.exp(logits - lse[..., None])
    is_target = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]
    of_logits = of_chosen * (jnp.where(is_target, 1.0, 0.0) - probabilities)
    if options.entropy_gradient:
        of_logits += of_entropy * probabilities * (mean[..., None] - logits)
    of_logits = (of_logits * slope / options.temperature).astype(hidden.dtype)
    of_hidden = jnp.matmul(of_logits, head.astype(hidden.dtype).T)
    of_hidden = split_tokens(of_hidden) if options.split else of_hidden
    if trained is None:
        return of_hidden, None, None
    of_head = jnp.einsum("and,anv->dv", hidden, of_logits, preferred_element_type=jnp.float32)
    return of_hidden, of_head.astype(head.dtype), None


_piece.defvjp(_piece_forward_with_zeros, _piece_backward, symbolic_zeros=True)


def logits_of(options: LogitOptions, hidden: Array, head: Array) -> tuple[Float[Array, "A N V"], Array | float]:
    """Computes logits (float32) from hidden states and the output matrix `head`, and applies cap and temperature. Also
    returns the derivative of the cap function at each logit; 1 without a cap."""
    logits = jnp.matmul(hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)
    logits = split_vocabulary(logits) if options.split else logits
    if options.cap is None:
        return logits / options.temperature, 1.0
    bounded = jnp.tanh(logits / options.cap)
    return options.cap * bounded / options.temperature, 1 - bounded**2
