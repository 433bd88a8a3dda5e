"""One decoder for every family: tokens to logits, with the prompt of a group computed once.

Modules carry Hugging Face's attribute names, so that the table of weight names is mechanical. Four ways through the
same layers: a plain forward (`__call__`), `prefill` of prompts, and behind it `decode` for sampling or
`completion_hidden` for training. This module knows no tokenizer, no sampling and no loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Shaped

from tunix_like.models.attention import attention, group_attention, resolve_attention
from tunix_like.models.attention_parts import Causal, Lengths, Part, laid_out, part_of
from tunix_like.models.config import DecoderConfig
from tunix_like.models.sharding import split_batch

KeyValue = tuple[Array, Array]
Attend = Callable[[Array, Array, Array], Array]
"""`attend(q [... H h], k [... K h], v [... K h]) -> [... H h]`: which keys a query sees is the caller's business."""


def rope_tables(config: DecoderConfig, positions: Int[Array, "..."]) -> tuple[Array, Array]:
    """Cosine and sine `[..., head_dim / 2]` of rotary positions, float32, with Llama-3 frequency scaling if
    configured."""
    exponents = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if (scaling := config.rope_scaling) is not None:
        wavelengths = 2 * jnp.pi / frequencies
        low = scaling.original_max_positions / scaling.low_freq_factor
        high = scaling.original_max_positions / scaling.high_freq_factor
        blend = (scaling.original_max_positions / wavelengths - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        between = (1 - blend) * frequencies / scaling.factor + blend * frequencies
        frequencies = jnp.where(
            wavelengths > low, frequencies / scaling.factor, jnp.where(wavelengths < high, frequencies, between)
        )
    angles = jnp.multiply.outer(positions.astype(jnp.float32), frequencies)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "... N h"], tables: tuple[Array, Array]) -> Float[Array, "... N h"]:
    """Rotary embedding, halves convention (Su et al., 2104.09864, in Hugging Face's layout)."""
    cosine, sine = (table[..., None, :] for table in tables)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(x.dtype)


class Linear(nnx.Module):
    def __init__(self, inputs: int, outputs: int, *, bias: bool, rngs: nnx.Rngs, dtype: Any, param_dtype: Any):
        self.kernel = nnx.Param(inputs**-0.5 * jax.random.normal(rngs.params(), (inputs, outputs), param_dtype))
        self.bias = nnx.Param(jnp.zeros(outputs, param_dtype)) if bias else None
        self.dtype = dtype

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        out = x @ self.kernel[...].astype(self.dtype)
        return out if self.bias is None else out + jnp.broadcast_to(self.bias[...].astype(self.dtype), out.shape)


class RMSNorm(nnx.Module):
    def __init__(self, width: int, epsilon: float, *, param_dtype: Any):
        self.scale = nnx.Param(jnp.ones(width, param_dtype))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return (wide * jnp.broadcast_to(self.scale[...].astype(jnp.float32), wide.shape)).astype(x.dtype)


class Embedding(nnx.Module):
    def __init__(self, vocabulary: int, width: int, *, rngs: nnx.Rngs, dtype: Any, param_dtype: Any):
        self.embedding = nnx.Param(width**-0.5 * jax.random.normal(rngs.params(), (vocabulary, width), param_dtype))
        self.dtype = dtype

    def __call__(self, tokens: Int[Array, "..."]) -> Float[Array, "... D"]:
        return split_batch(self.embedding[...][tokens].astype(self.dtype))


class Attention(nnx.Module):
    def __init__(self, config: DecoderConfig, **kinds: Any):
        width, head = config.hidden_size, config.head_dim
        self.q_proj = Linear(width, config.num_heads * head, bias=config.qkv_bias, **kinds)
        self.k_proj = Linear(width, config.num_kv_heads * head, bias=config.qkv_bias, **kinds)
        self.v_proj = Linear(width, config.num_kv_heads * head, bias=config.qkv_bias, **kinds)
        self.o_proj = Linear(config.num_heads * head, width, bias=False, **kinds)
        norm = lambda: RMSNorm(head, config.norm_eps, param_dtype=kinds["param_dtype"])  # noqa: E731
        self.q_norm = norm() if config.qk_norm else None
        self.k_norm = norm() if config.qk_norm else None
        self.head_dim = head

    def __call__(self, x: Float[Array, "... D"], rope: tuple[Array, Array], attend: Attend) -> tuple[Array, KeyValue]:
        heads = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (project(x).reshape(heads) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, rope), rotate(k, rope)
        return self.o_proj(attend(q, k, v).reshape(*x.shape[:-1], -1)), (k, v)


class MLP(nnx.Module):
    def __init__(self, config: DecoderConfig, **kinds: Any):
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False, **kinds)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False, **kinds)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False, **kinds)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    def __init__(self, config: DecoderConfig, **kinds: Any):
        norm = {"width": config.hidden_size, "epsilon": config.norm_eps, "param_dtype": kinds["param_dtype"]}
        self.input_layernorm = RMSNorm(**norm)
        self.self_attn = Attention(config, **kinds)
        self.post_attention_layernorm = RMSNorm(**norm)
        self.mlp = MLP(config, **kinds)

    def __call__(self, x: Float[Array, "... D"], rope: tuple[Array, Array], attend: Attend) -> tuple[Array, KeyValue]:
        """Returns the new residual stream and this layer's rotated keys and values."""
        mixed, key_value = self.self_attn(self.input_layernorm(x), rope, attend)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), key_value


class Decoder(nnx.Module):
    """A pre-norm, rotary, gated-MLP transformer (Qwen2/2.5, Qwen3, Llama-3, SmolLM2 shapes).

    Args:
      config: numbers and switches; no family name.
      rngs: initial weights, normal with standard deviation `inputs ** -0.5` (a constant 0.02 would suit widths near
        2,500 and is too small for the tiny models that are trained from nothing).
      dtype: compute dtype of matrix products; norms, softmax and logits are float32 whatever it is.
      param_dtype: dtype of the stored weights.
      attention: how to attend where sequences may be long, one of `config.ATTENTIONS`; `decode` goes the plain way.

    Raises:
      UserError: this machine cannot attend that way.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        attention: str = "auto",
    ):
        self.attention = resolve_attention(attention, dtype, config.head_dim)
        kinds = {"rngs": rngs, "dtype": dtype, "param_dtype": param_dtype}
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, **kinds)
        self.layers = nnx.List([Layer(config, **kinds) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, param_dtype=param_dtype)
        self.lm_head = (
            None if config.tie_embeddings else Linear(config.hidden_size, config.vocab_size, bias=False, **kinds)
        )
        self.dtype = dtype

    def __call__(self, tokens: Int[Array, "B L"], attention_mask: Array | None = None) -> Float[Array, "B L V"]:
        """Logits (float32) at every position. `attention_mask` is 1 where a token is real; padding may stand left or
        right, positions count real tokens only. Logits at padded positions mean nothing."""
        if attention_mask is None:
            positions, mask = jnp.arange(tokens.shape[1])[None], Causal()
        else:
            real = attention_mask.astype(bool)
            positions = jnp.maximum(jnp.cumsum(real, axis=1) - 1, 0)
            mask = Causal(jnp.where(real, 0, -1))
        hidden, _ = self._causal(tokens, positions, mask)
        return self.logits(self.norm(hidden))

    def _causal(
        self, tokens: Int[Array, "B L"], positions: Int[Array, "#B L"], mask: Causal, remat: bool = False
    ) -> tuple[Float[Array, "B L D"], list[KeyValue]]:
        rope = rope_tables(self.config, positions)

        def attend(q: Array, k: Array, v: Array) -> Array:
            return attention(q, part_of(k, v, mask), self.attention)

        def run(layer: Layer, x: Array) -> tuple[Array, KeyValue]:
            x, (k, v) = layer(x, rope, attend)
            return x, laid_out(k, v)

        run = nnx.remat(run) if remat else run
        x, cache = self.embed_tokens(tokens), []
        for layer in self.layers:
            x, key_value = run(layer, x)
            cache.append(key_value)
        return x, cache

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Vocabulary scores of already normed hidden states, float32."""
        return hidden_to_logits(hidden, self.head())

    def head(self) -> Float[Array, "D V"]:
        """The output matrix in the compute dtype: the transposed embedding when tied."""
        return self.output_weights().astype(self.dtype)

    def output_weights(self) -> Float[Array, "D V"]:
        """The output matrix as it is stored."""
        return self.embed_tokens.embedding[...].T if self.lm_head is None else self.lm_head.kernel[...]

    def prefill(
        self, tokens: Int[Array, "P S"], lengths: Int[Array, "P"], remat: bool = False
    ) -> tuple[Float[Array, "P D"], list[KeyValue]]:
        """Normed hidden state of each prompt's last token; every layer's keys `[P K h S]` and values `[P K S h]`.
        `remat` recomputes each layer in the backward pass."""
        # No real token stands behind padding, so causal attention needs no other mask.
        hidden, cache = self._causal(tokens, jnp.arange(tokens.shape[1])[None], Causal(), remat)
        return self.norm(hidden[jnp.arange(tokens.shape[0]), lengths - 1]), cache

    def decode(
        self,
        tokens: Int[Array, "P G"],
        positions: Int[Array, "P G"],
        prompt_mask: Bool[Array, "P 1 S"],
        prompt_cache: list[KeyValue],
        cache: list[KeyValue],
        column: Int[Array, ""],
        seen: Bool[Array, "P G U"],
    ) -> tuple[Float[Array, "P G D"], list[KeyValue]]:
        """One token of every completion.

        Args:
          positions: place of each token in its sequence, prompt included.
          prompt_cache: from `prefill`, shared by the group.
          cache: the completions' own keys `[R K h U]` and values `[R K U h]` per layer, `R = P G`.
          column: where in `U` this token's keys and values go, the same for all rows.
          seen: the columns that each row may look at, `column` among them.

        Returns:
          normed hidden states that predict the next token, and the cache with `column` filled in.
        """
        rope = rope_tables(self.config, positions[:, :, None])
        x = self.embed_tokens(tokens[:, :, None])
        filled: list[KeyValue] = []
        for layer, (prompt_k, prompt_v), own in zip(self.layers, prompt_cache, cache, strict=True):
            x, _ = layer(x, rope, cached_attend(Part(prompt_k, prompt_v, prompt_mask), own, column, seen, filled))
        return self.norm(x[:, :, 0]), filled

    def completion_hidden(
        self,
        first: Float[Array, "A D"],
        prompt_cache: list[KeyValue],
        prompt_lengths: Int[Array, "A"],
        tokens: Int[Array, "A b T"],
        offsets: Int[Array, "A b T"],
        segments: Int[Array, "A b T"],
        remat: bool = False,
    ) -> Float[Array, "A b T D"]:
        """Normed hidden states that predict each token of completions whose prompts went through `prefill`.

        A bin of `T` holds one or several completions of its lane's prompt, one behind the other; the gradient flows
        into `first` and `prompt_cache`, so that a prompt is computed once however its completions are split.

        Args:
          first, prompt_cache: from `prefill`; `first` predicts the first token of every completion.
          offsets: place of each token in its completion, from 0.
          segments: which completion of its bin a token belongs to (-1: none); it sees the same completion's tokens
            only.
          remat: recompute each layer in the backward pass.
        """
        rope = rope_tables(self.config, prompt_lengths[:, None, None] + offsets)
        real, own = Lengths(prompt_lengths), Causal(to_rows(segments))

        def run(layer: Layer, x: Array, prompt: KeyValue) -> Array:
            def attend(q: Array, k: Array, v: Array) -> Array:
                parts = Part(*prompt, real), part_of(to_rows(k), to_rows(v), own)
                return group_attention(q, *parts, kind=self.attention)

            return layer(x, rope, attend)[0]

        run = nnx.remat(run) if remat else run
        x = self.embed_tokens(tokens)
        for layer, prompt in zip(self.layers, prompt_cache, strict=True):
            x = run(layer, x, prompt)
        before = jnp.concatenate([jnp.zeros_like(x[:, :, :1]), self.norm(x[:, :, :-1])], axis=2)
        return jnp.where((offsets == 0)[..., None], first[:, None, None].astype(x.dtype), before)


def prompt_mask(lengths: Int[Array, "P"], width: int) -> Bool[Array, "P 1 S"]:
    return (jnp.arange(width)[None] < lengths[:, None])[:, None]


def to_rows(x: Shaped[Array, "P G ..."]) -> Shaped[Array, "R ..."]:
    return x.reshape(-1, *x.shape[2:])


def cached_attend(prompt: Part, own: KeyValue, column: Array, seen: Array, filled: list[KeyValue]) -> Attend:
    """Attention of one new token per completion: its keys and values go into the cache at `column`, the new cache is
    appended to `filled`, and the query reads its prompt and what of the cache is `seen`."""

    def attend(q: Array, k: Array, v: Array) -> Array:
        k, v = laid_out(to_rows(k), to_rows(v))
        keys = jax.lax.dynamic_update_slice_in_dim(own[0], k, column, axis=3)
        values = jax.lax.dynamic_update_slice_in_dim(own[1], v, column, axis=2)
        filled.append((keys, values))
        return group_attention(q, prompt, Part(keys, values, to_rows(seen)[:, None]))

    return attend


def hidden_to_logits(hidden: Float[Array, "... D"], head: Float[Array, "D V"]) -> Float[Array, "... V"]:
    return jnp.matmul(hidden, head, preferred_element_type=jnp.float32)
