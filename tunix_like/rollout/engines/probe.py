"""Compares the log-probabilities that a server and this process compute for the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from tunix_like.config.schema import RolloutConfig
from tunix_like.errors import UserError
from tunix_like.models.sharding import fetch, prompt_parts
from tunix_like.rollout.engines.server import Server

PROMPTS = 4
LENGTH = 16
TOP = 5
"""Number of prompts, maximum length of a prompt in tokens, and number of most probable next tokens after each prompt
whose log-probabilities are compared."""


_TIED = (
    " On a CPU, vLLM does not update the output matrix of this model, because the model shares it with the input "
    "embeddings (tie_word_embeddings: true); use a GPU there, or a model with tie_word_embeddings: false."
)


_BASE = (
    " It gets adapters only, so it must hold the weights on which they are trained: restart it if another run has "
    "changed them, or start it without --enable-lora to send whole weights."
)


class Probe:
    """Computes the log-probabilities of the next token after a few random prompts, and compares these log-probabilities
    with those of a server.

    Args:
      max_gap: largest allowed mean absolute difference of the log-probabilities, in nats. If `max_gap` is None, nothing
        is compared.
    """

    def __init__(
        self, graphdef: Any, rollout: RolloutConfig, eos_ids: Sequence[int], max_gap: float | None, mesh: Mesh | None
    ):
        self.graphdef = graphdef
        self.max_gap = max_gap
        self.mesh = mesh
        self.eos_ids = list(eos_ids)
        self.temperature = rollout.temperature
        parts = prompt_parts(mesh)
        config = nnx.merge(graphdef, [None] * graphdef.num_leaves).config
        ids = np.setdiff1d(np.arange(config.vocab_size), eos_ids)
        shape = -(-PROMPTS // parts) * parts, min(LENGTH, rollout.max_prompt_length)
        self.tied = config.tie_embeddings
        self.prompts = np.random.default_rng(0).choice(ids, shape)

    def logprobs(self, params: Any) -> Float[np.ndarray, "P V"]:
        """Computes the log-probability of each vocabulary entry as the next token after each of a few random prompts,
        with the weights `params`. If there are several processes, all processes must call this method."""
        return fetch(_next_logprobs(self.graphdef, params, self.prompts, self.temperature), self.mesh)

    async def check(self, expected: Float[np.ndarray, "P V"], server: Server) -> None:
        """Compares the log-probabilities of a server with `expected`, the result of `logprobs` for the same weights.

        Raises:
          UserError: the mean absolute difference is larger than the argument `max_gap` of `Probe`, in nats.
        """
        if self.max_gap is None:
            return
        parameters = {
            "max_tokens": 1,
            "temperature": self.temperature,
            "logprobs": TOP,
            "stop_token_ids": self.eos_ids,
            "ignore_eos": True,
            "skip_special_tokens": False,
            "detokenize": False,
        }
        gaps = []
        for prompt, logprobs in zip(self.prompts[:PROMPTS], expected, strict=False):
            answer = await server.sample(prompt.tolist(), parameters)
            # A token id outside the vocabulary means that the server has another model.
            known = {token: logprobs[token] for token in answer.top[0] if 0 <= token < len(logprobs)}
            gaps += [abs(value - known.get(token, np.inf)) for token, value in answer.top[0].items()]
        gap = float(np.mean(gaps))
        if not gap <= self.max_gap:
            raise UserError(
                f"rollout.urls: the server {server.url} computes other log-probabilities with these weights than the "
                f"trainer: they differ by {gap:.3g} nats on average (training.max_logprob_gap: {self.max_gap:g}). The "
                "server has another model or dtype, or another run uses it. Start it with the folder of this model and "
                "the same --dtype. If rollout.temperature is not 1, it also needs --logprobs-mode processed_logprobs."
                + (_BASE if server.adapter_rank is not None else _TIED if self.tied else "")
            )


@jax.jit(static_argnums=(0,))
def _next_logprobs(
    graphdef: Any, params: Any, prompts: Int[Array, "P S"], temperature: Float[Array, ""]
) -> Float[Array, "P V"]:
    """Computes the log-probability of each of V vocabulary entries as the next token after each of P prompts."""
    model = nnx.merge(graphdef, params)
    hidden, *_ = model.prefill(prompts, jnp.full(prompts.shape[0], prompts.shape[1]))
    return jax.nn.log_softmax(model.scores(hidden, model.head()) / temperature)
