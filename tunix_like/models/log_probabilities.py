"""Computes log-probabilities and entropies of tokens from hidden states, without an array of all logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tunix_like.models.sharding import gather_batch, split_vocabulary, vocabulary_parts


def token_logprobs(
    hidden: Float[Array, "A N D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "A N"],
    temperature: float,
    chunk: int,
    entropy_gradient: bool = False,
    cap: float | None = None,
) -> tuple[Float[Array, "A N"], Float[Array, "A N"]]:
    """Computes `log_softmax(hidden @ head / temperature)` at the targets, and the entropy, both in nats.

    The entropy has no gradient unless `entropy_gradient` is set. With `cap`, logits become `cap tanh(logits / cap)`
    before the temperature.

    Tokens are processed in pieces of about `chunk` tokens, which are recomputed in the backward pass, so the full
    `[A, N, V]` array is never materialised. On a mesh that splits the vocabulary, a piece has `chunk` tokens for every
    part of the vocabulary, so a device holds as many logits as a single device would.
    """
    parts = vocabulary_parts(head.shape[-1])

    @jax.checkpoint
    def one(hidden: Array, targets: Array) -> tuple[Array, Array]:
        # The cast is inside the piece, so that the gradients of the pieces are accumulated in the dtype of the weights.
        hidden = gather_batch(hidden) if parts > 1 else hidden
        logits = jnp.matmul(hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)
        logits = split_vocabulary(logits) if parts > 1 else logits
        logits = (logits if cap is None else cap * jnp.tanh(logits / cap)) / temperature
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        chosen = _at(logits, targets, parts) - normaliser
        seen, seen_normaliser = (
            (logits, normaliser) if entropy_gradient else jax.lax.stop_gradient((logits, normaliser))
        )
        return chosen, seen_normaliser - (jax.nn.softmax(seen, axis=-1) * seen).sum(axis=-1)

    lanes, count = targets.shape
    pieces = min(count, -(-lanes * count // (chunk * parts)))
    if pieces == 1:
        return one(hidden, targets)
    even = -(-count // pieces)
    pad = pieces * even - count
    hidden = jnp.pad(hidden, ((0, 0), (0, pad), (0, 0))).reshape(lanes, pieces, even, -1)
    targets = jnp.pad(targets, ((0, 0), (0, pad))).reshape(lanes, pieces, even)
    results = jax.lax.map(lambda xs: one(*xs), (hidden.swapaxes(0, 1), targets.swapaxes(0, 1)))
    chosen, entropy = (x.swapaxes(0, 1).reshape(lanes, -1)[:, :count] for x in results)
    return chosen, entropy


def _at(logits: Float[Array, "A N V"], targets: Int[Array, "A N"], parts: int) -> Float[Array, "A N"]:
    """Returns the logits of the targets; if the vocabulary is split, each device looks up those of its own part."""
    if parts == 1:
        return jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.where(jnp.arange(logits.shape[-1]) == targets[..., None], logits, 0.0).sum(axis=-1)
