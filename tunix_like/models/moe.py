"""Mixture-of-experts MLP: a router selects experts for every token, and each expert processes its tokens.

Experts have no capacity limit, so no token is dropped. Tokens are sorted by expert, and a grouped matrix product
processes groups of any size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from tunix_like.models.layer_kinds import Experts
from tunix_like.models.sharding import per_device

Activation = Callable[[Array], Array]


class Kernel(nnx.Module):
    """Holds one weight matrix or, if `number` is given, a stack of `number` matrices (one per expert)."""

    def __init__(
        self, inputs: int, outputs: int, number: int | None = None, *, rngs: nnx.Rngs, dtype: Any, param_dtype: Any
    ):
        shape = (inputs, outputs) if number is None else (number, inputs, outputs)
        self.kernel = nnx.Param(inputs**-0.5 * jax.random.normal(rngs.params(), shape, param_dtype))
        self.dtype = dtype


class ExpertMLPs(nnx.Module):
    """The gated MLPs of all experts. For E experts of width i and model width D, the gate and up kernels are
    `[E, D, i]`, and the down kernel is `[E, i, D]`."""

    def __init__(self, width: int, experts: Experts, activation: Activation, **kinds: Any):
        self.gate_proj = Kernel(width, experts.intermediate_size, experts.number, **kinds)
        self.up_proj = Kernel(width, experts.intermediate_size, experts.number, **kinds)
        self.down_proj = Kernel(experts.intermediate_size, width, experts.number, **kinds)
        self.activation = activation
        self.dtype = kinds["dtype"]

    def __call__(self, x: Float[Array, "N D"], sizes: Int[Array, "E"]) -> Float[Array, "N D"]:
        """Applies the first expert to the first `sizes[0]` rows of `x`, the second expert to the next `sizes[1]` rows,
        and so on."""
        gate, up = (self._product(x, projection, sizes) for projection in (self.gate_proj, self.up_proj))
        return self._product(self.activation(gate) * up, self.down_proj, sizes)

    def _product(self, x: Float[Array, "N I"], projection: Kernel, sizes: Int[Array, "E"]) -> Float[Array, "N O"]:
        return jax.lax.ragged_dot(x, projection.kernel[...].astype(self.dtype), sizes)


class MixtureOfExperts(nnx.Module):
    """Computes `sum over the k selected experts of weight * expert(x)`. The weights come from the router's softmax, in
    float32 (`route`).

    On a mesh, each device sorts and multiplies its own tokens (`per_device`). Without `per_device`, the compiler would
    sort the tokens of all devices together. The router matrix is cast to the compute dtype in training and in sampling,
    because trainer and sampler must select the same experts. On the CPU, XLA computes a grouped product as one product
    over all experts, with the same result.
    """

    def __init__(self, width: int, experts: Experts, activation: Activation, **kinds: Any):
        self.gate = Kernel(width, experts.number, **kinds)
        self.experts = ExpertMLPs(width, experts, activation, **kinds)
        self.numbers = experts

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        graph, params = nnx.split(self)
        run = per_device(lambda params, rows: nnx.merge(graph, params)._mix(rows), nnx.to_pure_dict(params), x.shape[0])
        return run(nnx.to_pure_dict(params), x)

    def _mix(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(flat)
        assigned = chosen.reshape(-1)
        order = jnp.argsort(assigned, stable=True)
        sizes = jnp.bincount(assigned, length=self.numbers.number).astype(jnp.int32)
        out = self.experts(flat[order // self.numbers.per_token], sizes)
        back = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0]), unique_indices=True)
        out = out[back].reshape(*chosen.shape, -1)  # the k outputs of a token, in the order of `chosen`
        mixed = jnp.einsum("nkd,nk->nd", out, weights.astype(out.dtype), preferred_element_type=jnp.float32)
        return mixed.astype(x.dtype).reshape(x.shape)

    def route(self, x: Float[Array, "N D"]) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
        """Returns the weights (float32) and indices of the k selected experts of each token."""
        logits = jnp.matmul(x, self.gate.kernel[...].astype(x.dtype), preferred_element_type=jnp.float32)
        weights, chosen = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), self.numbers.per_token)
        if self.numbers.normalised:
            weights /= weights.sum(-1, keepdims=True)
        return weights, chosen
