"""Defines the decoder of all model families. It maps tokens to logits, and processes a prompt once for all completions.

Modules have the attribute names of Hugging Face, and the names of weights follow from the attribute names. The same
layers run in several ways. `__call__` is a plain forward pass. `prefill` processes prompts. After `prefill`, `decode`
and `extend` process new tokens of completions for sampling, and `completion_hidden` processes completions for training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Integer, Shaped

from tunix_like.config.schema import LORA_TARGETS
from tunix_like.errors import UserError, check_type
from tunix_like.models.attention import attention, group_attention, resolve_attention
from tunix_like.models.attention_blocked import capped
from tunix_like.models.attention_decoding import decoding_attention, decoding_kernel
from tunix_like.models.attention_parts import Causal, Lengths, Part, Positions, laid_out
from tunix_like.models.config import Adapters, DecoderConfig
from tunix_like.models.delta_rule import Memory, Past
from tunix_like.models.layer_stack import Segment
from tunix_like.models.layers import Chosen, Embedding, KeyValue, Layer, Linear, Rotation, norm_of, rotation
from tunix_like.models.sharding import constrain_slots, gather_after, gather_layer

Kept = KeyValue | Memory
"""What later tokens need of a layer: keys and values, or the memory of a recurrent layer."""


class Decoder(nnx.Module):
    """A transformer with gated MLPs, whose layers may differ in windows, rotary positions and experts.

    Args:
      config: the configuration; it contains no family name.
      rngs: random keys of the initial weights. The weights are normal. Their standard deviation is `inputs ** -0.5` for
        a matrix `[inputs, outputs]`, and `hidden_size ** -0.5` for the embedding. (The common constant 0.02 suits
        widths near 2,500, and is too small for tiny models that are trained from scratch.)
      dtype: compute dtype of matrix products; norms, softmax and logits are always float32.
      param_dtype: dtype of the stored weights.
      attention: attention implementation, one of `schema.ATTENTIONS`.

    Attributes:
      decoding: device of the kernel of `attention_decoding.py` that `decode` uses, or None for the plain attention.
      adapters: rank, alpha and targets of the adapters that `lora.add_lora` added to the projections, or None.
      segments: the repeated patterns of layers (`layer_stack.py`) if the layers are stacked, else None.
      output_matrix: the transposed embedding table in a training step with tied embeddings, else None.
      quantized: the quantisation of the projections (`quantized_base.py`), one of `schema.QUANTIZATIONS`, or None.

    Raises:
      UserError: this device does not support the attention implementation.
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
        self.attention = resolve_attention(attention, dtype, config.only_head_dim, sinks=config.sinks)
        self.decoding = decoding_kernel(self.attention, config.head_dim)
        kinds = {"rngs": rngs, "dtype": dtype, "param_dtype": param_dtype}
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, scaled=config.scale_embeddings, **kinds)
        second = config.layer_input_width
        parts = config.num_layers
        rows = config.layer_input_vocab
        if second is None or rows is None:
            self.embed_tokens_per_layer = None
        else:
            self.embed_tokens_per_layer = Embedding(rows, second, parts=parts, scaled=True, **kinds)
            self.per_layer_model_projection = Linear(config.hidden_size, parts * second, bias=False, **kinds)
            self.per_layer_projection_norm = norm_of(second, config, **kinds)
        self.layers = nnx.List([Layer(config, index, **kinds) for index in range(config.num_layers)])
        self.norm = norm_of(config.hidden_size, config, **kinds)
        headless = config.tie_embeddings or config.scalar_head
        self.lm_head = None if headless else Linear(config.hidden_size, config.vocab_size, bias=False, **kinds)
        scalar = kinds | {"param_dtype": jnp.float32}
        score = Linear(config.hidden_size, 1, bias=False, **scalar) if config.scalar_head else None
        self.score: Linear | None = nnx.data(score)
        self.dtype, self.param_dtype = dtype, jnp.dtype(param_dtype)
        self.adapters: Adapters | None = None
        self.quantized: str | None = None
        self.segments: tuple[Segment, ...] | None = None
        self.output_matrix: nnx.Param | None = nnx.data(None)

    def __call__(self, tokens: Int[Array, "B L"], attention_mask: Array | None = None) -> Float[Array, "B L V"]:
        """Computes logits (float32) at every position.

        `attention_mask` is 1 for real tokens and 0 for padding. Padding can be on the left or on the right. Positions
        count real tokens only. Logits at padded positions are undefined.
        """
        if attention_mask is None:
            positions = jnp.arange(tokens.shape[1])[None]
            segments = None
            offsets = jnp.broadcast_to(positions, tokens.shape)
        else:
            real = attention_mask.astype(bool)
            positions = jnp.maximum(jnp.cumsum(real, axis=1) - 1, 0)
            segments = jnp.where(real, 0, -1)
            offsets = jnp.where(real, positions, -1)
        hidden, _, _ = self._causal(tokens, positions, offsets, segments)
        return self.logits(self.norm(hidden))

    def _causal(
        self,
        tokens: Int[Array, "B L"],
        positions: Int[Array, "#B L"],
        offsets: Int[Array, "B L"],
        segments: Int[Array, "B L"] | None = None,
        remat: bool = False,
        experts: Integer[Array, "B L l k"] | None = None,
    ) -> tuple[Float[Array, "B L D"], list[Kept], Chosen]:
        """Runs all layers with causal attention; returns the hidden states, what later tokens need of every layer, and
        the selected experts. `offsets` are the positions, and -1 at padding. The real tokens of a sequence must be
        contiguous, because windows count columns of `tokens` instead of positions."""
        ropes = self._ropes(positions)

        def run(
            layer: Layer, x: Array, given: Any, index: int, source: Any
        ) -> tuple[Array, tuple[Kept | None, Chosen]]:
            chosen, own_input = given
            if self.config.is_recurrent(index):
                x, memory, chosen = layer.recur(x, Past(self._no_memory(len(tokens)), offsets), chosen)
                return x, (memory, chosen)

            def attend(q: Array, k: Array | None, v: Array | None, sinks: Array | None) -> Array:
                keys: KeyValue = source[0] if k is None or v is None else laid_out(k, v)
                return attention(q, Part(*keys, Causal(segments, self.config.window(index))), *self._attention, sinks)

            x, (k, v), chosen = layer(x, ropes[index], attend, chosen, own_input)
            return x, (None if k is None or v is None else laid_out(k, v), chosen)

        x = self.embed_tokens(tokens)
        inputs = list(zip(self._by_layer(experts), self._own_inputs(tokens, x), strict=True))
        x, made = self._run_layers(run, x, inputs, remat)
        kept, chosen = zip(*made, strict=True)
        cache = [each for each in kept if each is not None]
        return x, cache, None if self.segments is not None else self._recorded(chosen)

    def _recorded(self, chosen: Iterable[Chosen]) -> Chosen:
        """Returns the selected experts of all layers, `[... l k]`: those of layers with experts."""
        found = [each for each in chosen if each is not None]
        if not found:
            return None
        assert self.config.experts is not None
        return jnp.stack(found, axis=-2).astype(self.config.experts.index_dtype)

    def _by_layer(self, experts: Integer[Array, "... l k"] | None) -> list[Chosen]:
        """Returns the experts that each layer, or each stack of layers (on its first axis), is to use; None for those
        of its router."""
        slots = self._slots
        if experts is None:
            return [None] * len(slots)
        order = np.cumsum([self.config.has_experts(index) for index in range(self.config.num_layers)]) - 1
        chosen: list[Chosen] = []
        for layers in slots:
            own = jnp.moveaxis(experts[..., order[list(layers)], :], -2, 0)
            chosen.append((own[0] if self.segments is None else own) if self.config.has_experts(layers[0]) else None)
        return chosen

    @property
    def _slots(self) -> list[range]:
        """The layers of each stack, or each layer alone if layers are not stacked."""
        segments = self.segments or [Segment(index, 1, 1) for index in range(self.config.num_layers)]
        return [segment.layers(offset) for segment in segments for offset in range(segment.period)]

    def _of_layer(self, entries: list[Any], layer: int) -> Any:
        """Returns the entry of a layer in a list with one entry per layer or per stack of layers."""
        slot, layers = next((slot, layers) for slot, layers in enumerate(self._slots) if layer in layers)
        if self.segments is None:
            return entries[slot]
        return jax.tree.map(lambda x: x[layers.index(layer)], entries[slot])

    def _own_inputs(self, tokens: Int[Array, "*B"], x: Float[Array, "*B D"]) -> list[Array | None]:
        """Returns the part of each layer, or of each stack of layers (on its first axis), in the second embedding of
        each token (`DecoderConfig.layer_input_width`), with a projection of the embedding `x` added; None without."""
        slots = self._slots
        width = self.config.layer_input_width
        if self.embed_tokens_per_layer is None or width is None:
            return [None] * len(slots)
        parts = *x.shape[:-1], self.config.num_layers, width
        projected = (self.per_layer_model_projection(x) * x.shape[-1] ** -0.5).reshape(parts)
        both = self.per_layer_projection_norm(projected) + self.embed_tokens_per_layer(tokens).reshape(parts)
        by_layer = jnp.moveaxis(both * 2**-0.5, -2, 0)
        return [by_layer[layers[0]] if self.segments is None else by_layer[np.array(layers)] for layers in slots]

    def _run_layers(
        self,
        run: Callable[[Layer, Array, Any, int, Any], tuple[Array, Any]],
        x: Array,
        inputs: list[Any],
        remat: bool,
    ) -> tuple[Array, list[Any]]:
        """Applies `run(layer, x, input, index, source) -> (x, output)` to all layers, in order.

        `x` is the hidden state, and `index` is the index of the layer (with stacked layers, of the first layer of the
        stack). `source` is the output of the layer whose keys and values this layer uses; None if it has its own.

        Args:
          inputs: one input per layer. If layers are stacked (`layer_stack.py`), one input per stack of layers; the
            first axis of such an input runs over the layers of the stack.
          remat: whether each layer is recomputed in the backward pass.

        Returns:
          the `x` that the last layer returns, and the outputs, one per layer or one per stack of layers.
        """
        outputs: list[Any] = []
        for segment in self.segments or [Segment(index, 1, 1) for index in range(self.config.num_layers)]:
            slots = slice(len(outputs), len(outputs) + segment.period)
            graphs, weights = zip(*(_split(layer) for layer in self.layers[slots]), strict=True)
            sources = [self._source(index, outputs) for index in range(segment.start, segment.start + segment.period)]

            def pattern(
                x: Array, given: Any, segment: Segment = segment, graphs: Any = graphs, sources: Any = sources
            ) -> tuple[Array, Any]:
                made = []
                for offset, (graph, weights, one) in enumerate(zip(graphs, *given, strict=True)):

                    def layer(
                        x: Array, weights: Any, one: Any, source: Any, graph: Any = graph, offset: int = offset
                    ) -> Any:
                        whole = nnx.merge(graph, gather_layer(weights))
                        return run(whole, x, one, segment.start + offset, source)

                    # `prevent_cse` keeps the compiler from merging the recomputation with the forward pass. A loop over
                    # a single layer does not need it. In a loop over several layers without it, the compiler would
                    # recompute all layers before their backward passes.
                    looped = self.segments is not None and segment.repeats > 1 and segment.period == 1
                    layer = jax.checkpoint(layer, prevent_cse=not looped) if remat else layer
                    x, output = layer(x, weights, one, sources[offset])
                    made.append(output)
                return x, made

            given = weights, tuple(inputs[slots])
            x, made = pattern(x, given) if self.segments is None else jax.lax.scan(pattern, x, given)
            outputs += made
        return x, outputs

    def _source(self, index: int, outputs: list[Any]) -> Any:
        """Returns the output of the layer whose keys and values layer `index` uses; None if it has its own."""
        source = self.config.kv_source(index)
        return None if source == index else self._of_layer(outputs, source)

    def _no_memory(self, rows: int) -> Memory:
        rule = self.config.delta_rule
        assert rule is not None
        state = rows, rule.value_heads, rule.key_width, rule.value_width
        return Memory(jnp.zeros(state), jnp.zeros((rows, rule.taps - 1, rule.channels), self.dtype))

    def _ropes(self, positions: Int[Array, "..."]) -> list[Rotation | None]:
        tables: dict[Any, Rotation | None] = {None: None}
        ropes = [(self.config.head_width(index), self.config.rope(index)) for index in range(self.config.num_layers)]
        kinds = [None if rope is None else (width, *rope) for width, rope in ropes]
        for kind in kinds:
            if kind is not None and kind not in tables:
                tables[kind] = rotation(self.config, *kind, positions)
        return [tables[kind] for kind in kinds]

    @property
    def _attention(self) -> tuple[str, float | None]:
        return self.attention, self.config.attention_cap

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Computes logits (float32) from normalised hidden states."""
        return self.scores(hidden, self.head())

    def scores(self, hidden: Float[Array, "... D"], head: Float[Array, "D *V"]) -> Float[Array, "... *V"]:
        """Computes logits (float32) from normalised hidden states and the output matrix `head` (the result of the
        method `head`), which several calls can share. Its vocabulary can have one axis or two."""
        logits = jnp.tensordot(hidden, head, axes=1, preferred_element_type=jnp.float32)
        return capped(logits, self.config.logits_cap)

    def head(self) -> Float[Array, "D V"]:
        """Returns the output matrix in the compute dtype."""
        return self.output_weights().astype(self.dtype)

    def output_weights(self) -> Float[Array, "D V"]:
        """Returns the output matrix in its stored dtype."""
        if self.score is not None:
            raise UserError("a reward model has no output matrix, so it cannot sample or be trained as a policy.")
        if self.output_matrix is not None:
            return self.output_matrix[...]
        if self.lm_head is None:
            return self.embed_tokens.embedding[...].T
        assert self.lm_head.kernel is not None  # the head is never quantised
        return self.lm_head.kernel[...]

    def values(self, hidden: Float[Array, "... D"]) -> Float[Array, "..."]:
        """Computes the numbers (float32) that the scalar head gives for normalised hidden states."""
        assert self.score is not None and self.score.kernel is not None
        return jnp.tensordot(hidden.astype(jnp.float32), self.score.kernel[...], axes=1)[..., 0]

    def projections(self) -> dict[str, Linear]:
        """Returns the projections to which adapters and quantisation apply, by dotted name: the matrices of
        `LORA_TARGETS` in attention, recurrent layers, MLPs and shared experts."""
        parts = {
            f"layers.{index}.{name}": module
            for index, layer in enumerate(self.layers)
            for name, module in (
                ("self_attn", layer.self_attn),
                ("linear_attn", layer.linear_attn),
                ("mlp", layer.mlp),
                ("mlp.shared_expert", getattr(layer.mlp, "shared_expert", None)),
            )
        }
        modules = {
            f"{part}.{name}": getattr(module, name, None) for part, module in parts.items() for name in LORA_TARGETS
        }
        return {name: module for name, module in modules.items() if isinstance(module, Linear)}

    def prefill(
        self,
        tokens: Int[Array, "P S"],
        lengths: Int[Array, "P"],
        remat: bool = False,
        experts: Integer[Array, "P S l k"] | None = None,
    ) -> tuple[Float[Array, "P D"], list[Kept], Chosen]:
        """Processes prompts, which are padded on the right. Returns the normalised hidden state of the last token of
        each prompt, the keys `[P K h S]` and values `[P K S h]` of every layer (P prompts of S tokens, K key heads of
        width h) except those that use the keys and values of another layer, and the selected experts `[P S l k]` (None
        without experts, or if layers are stacked). A recurrent layer has a `Memory` instead of keys and values.

        Args:
          remat: whether each layer is recomputed in the backward pass.
          experts: the experts to use in each of the `l` layers that have experts; None: those of the router.
        """
        places = jnp.arange(tokens.shape[1])[None]
        # Padding is on the right, so causal attention needs no other mask.
        offsets = jnp.where(places < lengths[:, None], places, -1)
        hidden, cache, chosen = self._causal(tokens, places, offsets, remat=remat, experts=experts)
        return self.norm(hidden[jnp.arange(tokens.shape[0]), lengths - 1]), cache, chosen

    def prefill_in_pieces(
        self, tokens: Int[Array, "P S"], lengths: Int[Array, "P"], piece: int
    ) -> tuple[Float[Array, "P D"], list[Kept], Chosen]:
        """Like `prefill`, without a gradient, for `piece` tokens of every prompt at a time. The activations are those
        of a piece, but attention of a kernel also computes the scores of later pieces."""
        count, width = tokens.shape
        config = self.config
        number = -(-width // piece)
        columns = jnp.arange(number * piece)
        whole = jnp.pad(tokens, ((0, 0), (0, number * piece - width)))
        nothing, cache = (self._empty_cache(count, size) for size in (1, number * piece))

        def one(carry: tuple[Array, list[Kept]], begin: Array) -> tuple[tuple[Array, list[Kept]], Chosen]:
            last, cache = carry
            places = begin + jnp.arange(piece)
            positions = jnp.where(places[None] < lengths[:, None], places[None], -1)[:, None]
            earlier = jnp.broadcast_to(jnp.where(columns < begin, columns, -1), (count, 1, len(columns)))
            own = jax.lax.dynamic_slice_in_dim(whole, begin, piece, axis=1)[:, None]
            place = lengths - 1 - begin
            ends = (place >= 0) & (place < piece)
            # They are the tokens of a completion whose prompt has no tokens.
            no_prompt = jnp.zeros(count, jnp.int32)
            ending = jnp.clip(place, 0, piece - 1)[:, None]
            hidden, cache, chosen = self.extend(own, positions, no_prompt, nothing, cache, begin, earlier, last=ending)
            return (jnp.where(ends[:, None], hidden[:, 0], last), cache), chosen

        start = jnp.zeros((count, config.hidden_size), self.dtype), cache
        (last, cache), chosen = jax.lax.scan(one, start, piece * jnp.arange(number))
        if number * piece > width:
            cache = [
                kept if isinstance(kept, Memory) else (kept[0][..., :width], kept[1][:, :, :width]) for kept in cache
            ]
        if chosen is not None:  # [pieces P 1 N l k]
            chosen = jnp.moveaxis(chosen[:, :, 0], 0, 1).reshape(count, -1, *chosen.shape[4:])[:, :width]
        return last, cache, chosen

    def _empty_cache(self, rows: int, width: int) -> list[Kept]:
        config = self.config
        mesh = jax.sharding.get_abstract_mesh()

        def empty(layer: int) -> Kept:
            if config.is_recurrent(layer):
                return self._no_memory(rows)
            heads = (rows, config.kv_heads(layer))
            head = config.head_width(layer)
            return jnp.zeros((*heads, head, width), self.dtype), jnp.zeros((*heads, width, head), self.dtype)

        cache = [empty(layer) for layer in range(config.num_layers - config.shared_kv_layers)]
        return constrain_slots(cache, None if mesh.empty else mesh)

    def decode(
        self,
        tokens: Int[Array, "P G"],
        positions: Int[Array, "P G"],
        prompt_lengths: Int[Array, "P"],
        prompt_cache: list[Kept],
        cache: list[Kept],
        column: Int[Array, ""],
        columns: Int[Array, "P G U"],
    ) -> tuple[Float[Array, "P G D"], list[Kept], Chosen]:
        """Runs one decoding step, which processes one new token of every completion.

        Args:
          positions: position of each token in its sequence, which begins with the prompt. The result of a completion
            with position -1 is undefined.
          prompt_lengths: number of tokens of each prompt.
          prompt_cache: what `prefill` returned, which all completions of a prompt share.
          cache: keys `[R K h U]` and values `[R K U h]` per layer, as in the result of `prefill`: R completions, K key
            heads of width h, U columns. A recurrent layer has a `Memory` of R rows. It is read from the second token of
            a completion on.
          column: index of the column to which the keys and values of the new token are written; the same for all
            completions.
          columns: for each column of the cache, the position of the token in this column. The entry at index `column`
            is the position of the new token. A completion attends to the columns with a position of at least 0, except
            those before the window of a layer.

        Returns:
          normalised hidden states that predict the next token, the cache, which contains the new token at `column`, and
          the selected experts `[P G l k]` of the tokens (None without experts).
        """
        ropes = self._ropes(positions[:, :, None])
        x = self.embed_tokens(tokens[:, :, None])
        filled: list[Kept] = []
        routes: list[Chosen] = []
        offsets = jnp.where(positions >= 0, 0, -1)[..., None]
        first = positions == prompt_lengths[:, None]
        own_inputs = self._own_inputs(tokens[:, :, None], x)
        for index, (layer, own_input) in enumerate(zip(self.layers, own_inputs, strict=True)):
            x, layer = _after(x, layer)
            source = self.config.kv_source(index)
            prompt: Any = prompt_cache[source]
            own: Any = (filled if source < index else cache)[source]
            if isinstance(prompt, Memory) and isinstance(own, Memory):
                x, memory, chosen = layer.recur(x, Past(_memory_before(prompt, own, first), to_rows(offsets)))
                filled.append(memory)
                routes.append(chosen)
                continue
            window = self.config.window(index)
            starts = None if window is None else jnp.maximum(positions - window + 1, 0)
            of_prompt = Part(prompt[0], prompt[1], Lengths(prompt_lengths, starts))
            seen = Positions(to_rows(columns), None if starts is None else starts.reshape(-1, 1))

            def attend(
                q: Array,
                k: Array | None,
                v: Array | None,
                sinks: Array | None,
                prompt: Part = of_prompt,
                own: Any = own,
                seen: Positions = seen,
            ) -> Array:
                if k is not None and v is not None:
                    # Without the barrier, XLA computes the keys of a TPU in the layout of their column in the cache,
                    # whose last axis of one element is padded to 128.
                    k, v = laid_out(to_rows(jax.lax.optimization_barrier(k)), to_rows(v))
                    write = jax.lax.dynamic_update_slice_in_dim
                    own = write(own[0], k, column, axis=3), write(own[1], v, column, axis=2)
                    filled.append(own)
                parts = prompt, Part(own[0], own[1], seen)
                if self.decoding is not None:
                    return decoding_attention(q, *parts, self.decoding, self.config.attention_cap, sinks)
                return group_attention(q, *parts, kind="plain", cap=self.config.attention_cap, sinks=sinks)

            x, _, chosen = layer(x, ropes[index], attend, None, own_input)
            routes.append(chosen)
        recorded = self._recorded(routes)
        return self.norm(x[:, :, 0]), filled, None if recorded is None else recorded[:, :, 0]

    def extend(
        self,
        tokens: Int[Array, "P G N"],
        positions: Int[Array, "P G N"],
        prompt_lengths: Int[Array, "P"],
        prompt_cache: list[Kept],
        cache: list[Kept],
        column: Int[Array, ""],
        columns: Int[Array, "P G U"],
        last: Int[Array, "P G"] | None = None,
    ) -> tuple[Float[Array, "P G D"], list[Kept], Chosen]:
        """Runs the model on several new tokens of every completion, given the keys and values of the earlier tokens.

        Args: (others as in `decode`)
          tokens: padded on the left, or with `last` on either side; `positions` is -1 there.
          column: index of the first column to which keys and values are written; there is one column per new token.
          columns: for each column of the cache, the position of the earlier token in this column; -1 for a column
            without an earlier token.
          last: index of the last new token of each completion; None: that of the last column.

        Returns:
          the normalised hidden states that predict the token after the last new token, the cache with the new columns,
          and the selected experts `[P G N l k]` (None without experts). The hidden state is undefined for a completion
          without new tokens.
        """
        segments = to_rows(jnp.where(positions >= 0, 0, -1))
        ropes = self._ropes(positions)
        x = self.embed_tokens(tokens)
        filled: list[Kept] = []
        routes: list[Chosen] = []
        real = positions >= 0
        offsets = jnp.where(real, jnp.cumsum(real, axis=2) - 1, -1)
        first = (positions == prompt_lengths[:, None, None]).any(axis=2)
        blocks: dict[int, KeyValue] = {}
        for index, (layer, own_input) in enumerate(zip(self.layers, self._own_inputs(tokens, x), strict=True)):
            x, layer = _after(x, layer)
            source = self.config.kv_source(index)
            prompt: Any = prompt_cache[source]
            own: Any = (filled if source < index else cache)[source]
            if isinstance(prompt, Memory) and isinstance(own, Memory):
                x, memory, chosen = layer.recur(x, Past(_memory_before(prompt, own, first), to_rows(offsets)))
                filled.append(memory)
                routes.append(chosen)
                continue
            window = self.config.window(index)
            starts = None if window is None else jnp.maximum(positions - window + 1, 0)
            by_prompt = None if starts is None else starts.reshape(len(starts), -1)
            of_prompt = Part(prompt[0], prompt[1], Lengths(prompt_lengths, by_prompt))
            earlier = Positions(to_rows(columns), None if starts is None else to_rows(starts))

            def attend(
                q: Array,
                k: Array | None,
                v: Array | None,
                sinks: Array | None,
                of_prompt: Part = of_prompt,
                kept: Any = own,
                source: int = source,
                earlier: Positions = earlier,
                window: Any = window,
            ) -> Array:
                if k is not None and v is not None:
                    keys, values = blocks[source] = laid_out(to_rows(k), to_rows(v))
                    write = jax.lax.dynamic_update_slice_in_dim
                    kept = write(kept[0], keys, column, 3), write(kept[1], values, column, 2)
                    filled.append(kept)
                # Attention reads the updated cache, so the update needs no copy. The mask `earlier` hides the new
                # columns.
                own = Part(kept[0], kept[1], earlier)
                block = Part(*blocks[source], Causal(segments, window))
                cap = self.config.attention_cap
                return group_attention(q, of_prompt, own, block, kind="auto", cap=cap, sinks=sinks)

            x, _, chosen = layer(x, ropes[index], attend, None, own_input)
            routes.append(chosen)
        ends = x[:, :, -1] if last is None else jnp.take_along_axis(x, last[..., None, None], axis=2)[:, :, 0]
        return self.norm(ends), filled, self._recorded(routes)

    def completion_hidden(
        self,
        first: Float[Array, "A D"],
        prompt_cache: list[Kept],
        prompt_lengths: Int[Array, "A"],
        tokens: Int[Array, "A b T"],
        offsets: Int[Array, "A b T"],
        segments: Int[Array, "A b T"],
        remat: bool = False,
        experts: Integer[Array, "A b T l k"] | None = None,
    ) -> Float[Array, "A b T D"]:
        """Computes the normalised hidden states that predict each token of completions, given the results of `prefill`.

        The first axis runs over lanes: a lane has one prompt and `b` bins. A bin of length `T` contains one or several
        completions of this prompt, one after another. Gradients flow into `first` and `prompt_cache`, so a prompt is
        computed only once, even if its completions are split over several calls.

        Args:
          first, prompt_cache: the results of `prefill`; `first` is the hidden state that predicts the first token of
            every completion.
          offsets: position of each token relative to the end of its prompt, from 0.
          segments: for each token of a bin, the number of the completion (or part of a completion) to which the token
            belongs; -1 for padding. Within the bin, a token sees only earlier tokens with the same number, and itself.
          remat: whether each layer is recomputed in the backward pass.
          experts: the experts to use in each of the `l` layers that have experts; None: those of the router.
        """
        positions = prompt_lengths[:, None, None] + offsets
        ropes = self._ropes(positions)

        in_sequence = to_rows(jnp.where(segments >= 0, offsets, -1))
        config = self.config
        slots = self._slots
        sources = {
            config.kv_source(index) for index in range(config.num_layers - config.shared_kv_layers, config.num_layers)
        }
        read_later = {layers[0] for layers in slots if sources & set(layers)}

        def run(layer: Layer, x: Array, given: Any, index: int, source: Any) -> tuple[Array, Any]:
            prompt, chosen, own_input = given
            if prompt is None:
                prompt = self._of_layer(prompt_cache, config.kv_source(index))
            if isinstance(prompt, Memory):
                before = Memory(*(jnp.repeat(part, tokens.shape[1], axis=0) for part in prompt))
                return layer.recur(x, Past(before, in_sequence), chosen)[0], None
            window = self.config.window(index)
            starts = None if window is None else positions.reshape(len(positions), -1) - window + 1

            def attend(q: Array, k: Array | None, v: Array | None, sinks: Array | None) -> Array:
                keys: KeyValue = source if k is None or v is None else laid_out(to_rows(k), to_rows(v))
                of_prompt = Part(prompt[0], prompt[1], Lengths(prompt_lengths, starts))
                kind, cap = self._attention
                own = Part(*keys, Causal(to_rows(segments), window))
                return group_attention(q, of_prompt, own, kind=kind, cap=cap, sinks=sinks)

            x, (k, v), _ = layer(x, ropes[index], attend, chosen, own_input)
            if k is None or v is None or index not in read_later:
                return x, None
            return x, laid_out(to_rows(k), to_rows(v))

        x = self.embed_tokens(tokens)
        prompts = [*prompt_cache, *[None] * (len(slots) - len(prompt_cache))]
        inputs = list(zip(prompts, self._by_layer(experts), self._own_inputs(tokens, x), strict=True))
        x, _ = self._run_layers(run, x, inputs, remat)
        before = jnp.concatenate([jnp.zeros_like(x[:, :, :1]), self.norm(x[:, :, :-1])], axis=2)
        return jnp.where((offsets == 0)[..., None], first[:, None, None].astype(x.dtype), before)


def _split(layer: Layer) -> tuple[Any, dict[Any, Any]]:
    graph, state = nnx.split(layer)
    return graph, nnx.to_pure_dict(state)


def _after(x: Array, layer: Layer) -> tuple[Array, Layer]:
    """Returns the input of a layer, and the layer, whose parameters are gathered after the input (`gather_after`)."""
    graph, weights = _split(layer)
    x, weights = gather_after(x, weights)
    return x, nnx.merge(graph, weights)


def _memory_before(prompt: Memory, own: Memory, first: Bool[Array, "P G"]) -> Memory:
    """Returns the memory before the next tokens of completions: that of the prompt if they are the `first` ones."""

    def chosen(of_prompt: Array, of_row: Array) -> Array:
        rows = of_row.reshape(*first.shape, *of_row.shape[1:])
        here = first.reshape(*first.shape, *[1] * (of_row.ndim - 1))
        return to_rows(jnp.where(here, of_prompt[:, None], rows))

    return jax.tree.map(chosen, prompt, own)


def check_decoder(name: str, value: Any) -> None:
    check_type(name, value, Decoder, "give a Decoder; tunix_like.load_model(folder) returns one, and its tokenizer")


def add_scalar_head(model: Decoder, seed: int = 0) -> Decoder:
    """Returns the model with a scalar head instead of its output matrix, such as a reward model.

    The weights of the head are normal with the standard deviation `hidden_size ** -0.5`. The other arrays are shared
    with the model, and may be abstract (shapes only).
    """
    check_decoder("model", model)
    if model.score is not None:
        return model
    if model.adapters is not None:
        raise UserError("the model has adapters; add the scalar head first, and then adapters (add_lora).")
    graphdef, state = nnx.split(model)
    changed = nnx.merge(graphdef, nnx.to_pure_dict(state))  # with variables of its own
    changed.config = dataclasses.replace(model.config, scalar_head=True)
    changed.lm_head = None
    kinds = {"dtype": model.dtype, "param_dtype": jnp.float32}
    make = lambda: Linear(model.config.hidden_size, 1, bias=False, rngs=nnx.Rngs(params=seed), **kinds)  # noqa: E731
    abstract = isinstance(model.embed_tokens.embedding.get_value(), jax.ShapeDtypeStruct)
    changed.score = nnx.data(nnx.eval_shape(make) if abstract else make())
    return changed


def to_rows(x: Shaped[Array, "P G ..."]) -> Shaped[Array, "R ..."]:
    return x.reshape(-1, *x.shape[2:])
