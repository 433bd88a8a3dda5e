"""Builds the in-process engine that samples completions, and checks the results of an engine of the user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from tunix_like.config.schema import RolloutConfig
from tunix_like.data.tokenizer import Tokenizer
from tunix_like.errors import UserError
from tunix_like.models.config import DecoderConfig
from tunix_like.rollout.rollouts import Task
from tunix_like.rollout.sampler import Sampler
from tunix_like.rollout.shapes import slot_shape
from tunix_like.training.rollout_layout import concurrent_rows, rollout_mesh
from tunix_like.types import Completions, Engine, Responder, SamplingParams

_KINDS = {
    "tokens": (np.integer, "integers"),
    "lengths": (np.integer, "integers"),
    "logprobs": (np.floating, "floating-point numbers"),
    "finished": (np.bool_, "booleans"),
    "token_mask": (np.bool_, "booleans"),
}
"""Field of `Completions` to the type of its entries, and its name in error messages."""


def make_engine(graphdef: Any, tokenizer: Tokenizer, rollout: RolloutConfig, mesh: Mesh | None = None) -> Sampler:
    """Builds the sampler for a model, its tokenizer and the `rollout` section of a config.

    Args:
      graphdef: graph of a `Decoder` (`nnx.split(model)[0]`).

    Raises:
      UserError: the device memory is too small for a single completion, or `rollout.mesh` does not fit.
    """
    model = nnx.merge(graphdef, [None] * graphdef.num_leaves)  # the module without weights
    sampling_mesh = rollout_mesh(model, rollout, mesh, slot_shape)
    return Sampler(
        graphdef,
        rollout.eos_tokens or tokenizer.eos_ids,
        max_prompt_length=rollout.max_prompt_length,
        max_tokens=rollout.max_tokens_to_generate,
        max_concurrent_rows=concurrent_rows(model, rollout, slot_shape, mesh, sampling_mesh),
        mesh=sampling_mesh,
    )


class CheckedEngine:
    """Checks the completions of another engine, which generates them.

    Args:
      engine: the engine of the user.
      model: the config of the model, which has the size of the vocabulary.
      task: what completions are sampled for. It has the maximum number of tokens of a completion.
    """

    def __init__(self, engine: Engine, model: DecoderConfig, task: Task):
        self.engine = engine
        self.vocab_size, self.max_tokens = model.vocab_size, task.rollout_config.max_tokens_to_generate

    @property
    def max_prompt_length(self) -> int:
        """The limit of the checked engine."""
        return self.engine.max_prompt_length

    @property
    def row_steps(self) -> int:
        """The count of the checked engine."""
        return self.engine.row_steps

    def place(self, params: Any) -> Any:
        """Returns the result of the checked engine."""
        return self.engine.place(params)

    def generate(
        self,
        params: Any,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        num_generations: int,
        key: Array,
        sampling: SamplingParams,
        responder: Responder | None = None,
    ) -> Completions:
        """Returns the completions of the checked engine.

        Raises:
          UserError: the result is not a `Completions`, or a field has a wrong type, shape or value. Entries at or
            beyond the length of a completion are not checked; nothing reads them.
        """
        given = params, prompts, numbers, num_generations, key, sampling
        # An engine without turns need not have the parameter `responder`.
        out = self.engine.generate(*given) if responder is None else self.engine.generate(*given, responder)
        self._check_arrays(out, (len(prompts), num_generations))
        most = min(out.tokens.shape[-1], self.max_tokens)
        limit = f"between 0 and {most} (width of `tokens`: {out.tokens.shape[-1]}, limit of a completion: "
        limit += f"{self.max_tokens} tokens)"
        self._check_values("lengths", out.lengths, (out.lengths < 0) | (out.lengths > most), limit)
        sampled = np.arange(out.tokens.shape[-1]) < out.lengths[..., None]
        outside = sampled & ((out.tokens < 0) | (out.tokens >= self.vocab_size))
        self._check_values("tokens", out.tokens, outside, f"token ids between 0 and {self.vocab_size - 1}")
        finite = "finite log-probabilities of the sampled tokens"
        self._check_values("logprobs", out.logprobs, sampled & ~np.isfinite(out.logprobs), finite)
        if out.token_mask is not None:
            inside = "True only for tokens of the completion"
            self._check_values("token_mask", out.token_mask, out.token_mask & ~sampled, inside)
        elif responder is not None:
            raise UserError(
                f"engine {type(self.engine).__name__}: `token_mask` must mark the sampled tokens, because completions "
                "have several turns."
            )
        return out

    def _check_arrays(self, out: Any, shape: tuple[int, int]) -> None:
        name = type(self.engine).__name__
        if not isinstance(out, Completions):
            raise UserError(
                f"engine {name}: `generate` must return a tunix_like.types.Completions; it returned an object of type "
                f"{type(out).__name__}."
            )
        for field, value in out._asdict().items():
            if field == "token_mask" and value is None:
                continue
            if not isinstance(value, np.ndarray):
                raise UserError(
                    f"engine {name}: `{field}` must be a numpy array; it is of type {type(value).__name__}. Convert it "
                    "with np.asarray."
                )
            kind, expected = _KINDS[field]
            if not np.issubdtype(value.dtype, kind):
                raise UserError(f"engine {name}: `{field}` must contain {expected}; its dtype is {value.dtype}.")
            per_token = field in ("tokens", "logprobs", "token_mask")
            width = out.tokens.shape[-1:] if per_token else ()
            if value.shape != (*shape, *width) or value.ndim != 2 + per_token:
                last = ", tokens" if per_token else ""
                raise UserError(
                    f"engine {name}: `{field}` must have the shape [prompts, completions per prompt{last}] = "
                    f"{list((*shape, *width)) if field != 'tokens' else [*shape, 'T']}; it has {list(value.shape)}."
                )

    def _check_values(self, field: str, values: np.ndarray, wrong: np.ndarray, expected: str) -> None:
        """Raises a UserError for the first entry of `values` that `wrong` marks."""
        if not wrong.any():
            return
        group, sample, *position = (int(i) for i in np.argwhere(wrong)[0])
        where = f"completion {sample} of prompt {group}" + "".join(f", token {i}" for i in position)
        raise UserError(
            f"engine {type(self.engine).__name__}: `{field}` must be {expected}; {where} has "
            f"{values[(group, sample, *position)]}."
        )
