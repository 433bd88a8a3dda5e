"""Defines the decoder of all model families. It maps tokens to logits, and processes a prompt once for all completions.

Modules have the attribute names of Hugging Face, and the names of weights follow from the attribute names. The same
layers run in several passes, which share one loop over the layers (`_run`) and differ in its `Context`. `__call__` is
a plain forward pass. `prefill` processes prompts. After `prefill`, `decode` and `extend` process new tokens of
completions for sampling, and `completion_hidden` processes completions for training.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

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


class EarlierTokens(NamedTuple):
    """The tokens before the new ones of completions, which all completions of a prompt begin with.

    Attributes:
      prompt_lengths: number of tokens of each prompt.
      prompt_cache: what `prefill` returned, which all completions of a prompt share.
      cache: keys `[R K h U]` and values `[R K U h]` per layer, as in the result of `prefill`: R completions, K key
        heads of width h, U columns. A recurrent layer has a `Memory` of R rows. It is read from the second token of a
        completion on.
      column: index of the first column to which keys and values are written; there is one column per new token, the
        same for all completions.
      columns: for each column of the cache, the position of the token in this column. A completion attends to the
        columns with a position of at least 0, except those before the window of a layer.
    """

    prompt_lengths: Int[Array, "P"]
    prompt_cache: list[Kept]
    cache: list[Kept]
    column: Int[Array, ""]
    columns: Int[Array, "P G U"]


class Bins(NamedTuple):
    """Tokens of completions for training. The first axis runs over lanes: a lane has one prompt and `b` bins. A bin of
    length `T` contains one or several completions of this prompt, one after another.

    Attributes:
      offsets: position of each token relative to the end of its prompt, from 0.
      segments: for each token of a bin, the number of the completion (or part of a completion) to which the token
        belongs; -1 for padding. Within the bin, a token sees only earlier tokens with the same number, and itself.
    """

    tokens: Int[Array, "A b T"]
    offsets: Int[Array, "A b T"]
    segments: Int[Array, "A b T"]


class Place(NamedTuple):
    """A layer in a pass.

    Attributes:
      layer: its index; with stacked layers, that of the first layer of the stack.
      earlier: its entry of `Context.earlier`.
      source: what `attend` returned to keep in the layer whose keys and values this layer uses; None if it has its own.
    """

    layer: int
    earlier: Any
    source: Any


def _gathered(x: Array, weights: Any) -> tuple[Array, Any]:
    return x, gather_layer(weights)


class Context(NamedTuple):
    """How the tokens of a pass see other tokens. Compiled programs contain only the results of its functions.

    Attributes:
      positions: position of each token of the pass.
      attend: `attend(place, q, k, v, sinks) -> (out, kept)`, the attention of a layer (`layers.Attend`).
      past: `past(place)`, what the tokens continue in a recurrent layer.
      earlier: what the pass has of earlier tokens, one entry per layer, or per stack of layers (on its first axis).
      final: whether no later tokens need what a layer keeps. It is then kept only if another layer uses it.
      gather: `gather(x, weights)`, applied to the input and the weights of a layer on a mesh.
    """

    positions: Int[Array, "..."]
    attend: Callable[[Place, Array, Any, Any, Array | None], tuple[Array, Any]]
    past: Callable[[Place], Past]
    earlier: Sequence[Any] | None = None
    final: bool = False
    gather: Callable[[Array, Any], tuple[Array, Any]] = _gathered


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

        def attend(place: Place, q: Array, k: Any, v: Any, sinks: Array | None) -> tuple[Array, KeyValue | None]:
            keys: KeyValue = place.source if k is None else laid_out(k, v)
            part = Part(*keys, Causal(segments, self.config.window(place.layer)))
            out = attention(q, part, self.attention, self.config.attention_cap, sinks)
            # What is kept is transposed separately, because XLA fuses the other transposition into attention.
            return out, None if k is None else laid_out(k, v)

        def past(place: Place) -> Past:
            return Past(self._no_memory(len(tokens)), offsets)

        return self._run(tokens, Context(positions, attend, past), remat, experts)

    def _run(
        self,
        tokens: Int[Array, "*B"],
        context: Context,
        remat: bool = False,
        experts: Integer[Array, "*B l k"] | None = None,
    ) -> tuple[Float[Array, "*B D"], list[Any], Chosen]:
        """Runs all layers on `tokens`.

        Args:
          remat: whether each layer is recomputed in the backward pass.
          experts: the experts to use in each of the `l` layers that have experts; None: those of the router.

        Returns:
          the hidden states; what is kept (`Context.attend`, or the memory of a recurrent layer) of each layer that does
          not use the keys of another one, or of each stack of such layers; and the selected experts `[*B l k]` (None
          without experts, or if layers are stacked).
        """
        ropes = self._ropes(context.positions)
        x = self.embed_tokens(tokens)
        earlier = context.earlier or [None] * len(self._slots)
        inputs = list(zip(earlier, self._by_layer(experts), self._own_inputs(tokens, x), strict=True))
        sources = [self.config.kv_source(index) for index in range(self.config.num_layers)]
        owners = {source for index, source in enumerate(sources) if not context.final or source != index}
        keeping = {layers[0] for layers in self._slots if not owners.isdisjoint(layers)}

        def run(index: int, graph: Any, x: Array, weights: Any, given: Any, source: Any) -> tuple[Array, Any]:
            x, weights = context.gather(x, weights)
            layer = nnx.merge(graph, weights)
            earlier, chosen, own_input = given
            place = Place(index, earlier, source)
            if self.config.is_recurrent(index):
                x, keys, chosen = layer.recur(x, context.past(place), chosen)
            else:
                attend = functools.partial(context.attend, place)
                x, keys, chosen = layer(x, ropes[index], attend, chosen, own_input)
            return x, (keys if index in keeping else None, None if context.final else chosen)

        kept: list[Any] = []
        selected: list[Chosen] = []
        for segment in self.segments or [Segment(index, 1, 1) for index in range(self.config.num_layers)]:
            slots = slice(len(kept), len(kept) + segment.period)
            graphs, weights = zip(*(_split(layer) for layer in self.layers[slots]), strict=True)
            lent = [self._lent(index, kept) for index in range(segment.start, segment.start + segment.period)]

            def pattern(
                x: Array, given: Any, segment: Segment = segment, graphs: Any = graphs, lent: Any = lent
            ) -> tuple[Array, Any]:
                made = []
                for offset, (graph, weights, one) in enumerate(zip(graphs, *given, strict=True)):
                    layer: Callable[..., Any] = functools.partial(run, segment.start + offset, graph)
                    # `prevent_cse` keeps the compiler from merging the recomputation with the forward pass. A loop over
                    # a single layer does not need it. In a loop over several layers without it, the compiler would
                    # recompute all layers before their backward passes.
                    looped = self.segments is not None and segment.repeats > 1 and segment.period == 1
                    layer = jax.checkpoint(layer, prevent_cse=not looped) if remat else layer
                    x, output = layer(x, weights, one, lent[offset])
                    made.append(output)
                return x, made

            given = weights, tuple(inputs[slots])
            x, made = pattern(x, given) if self.segments is None else jax.lax.scan(pattern, x, given)
            kept += [keys for keys, _ in made]
            selected += [chosen for _, chosen in made]
        recorded = None if self.segments is not None else self._recorded(selected)
        return x, [each for each in kept if each is not None], recorded

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

    def _lent(self, index: int, kept: list[Any]) -> Any:
        """Returns what is kept of the layer whose keys and values layer `index` uses; None if it has its own."""
        source = self.config.kv_source(index)
        return None if source == index else self._of_layer(kept, source)

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
            before = EarlierTokens(no_prompt, nothing, cache, begin, earlier)
            hidden, cache, chosen = self.extend(own, positions, before, last=ending)
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
        self, tokens: Int[Array, "P G"], positions: Int[Array, "P G"], earlier: EarlierTokens
    ) -> tuple[Float[Array, "P G D"], list[Kept], Chosen]:
        """Runs one decoding step, which processes one new token of every completion.

        Args:
          positions: position of each token in its sequence, which begins with the prompt. The result of a completion
            with position -1 is undefined.
          earlier: the entry of `columns` at index `column` is the position of the new token.

        Returns:
          normalised hidden states that predict the next token, the cache, which contains the new token at `column`, and
          the selected experts `[P G l k]` of the tokens (None without experts).
        """
        positions = positions[..., None]

        def attend(place: Place, q: Array, k: Any, v: Any, sinks: Array | None) -> tuple[Array, KeyValue]:
            cap = self.config.attention_cap
            if k is None:
                cache = place.source
            else:
                # Without the barrier, XLA computes the keys of a TPU in the layout of their column in the cache, whose
                # last axis of one element is padded to 128.
                keys = laid_out(to_rows(jax.lax.optimization_barrier(k)), to_rows(v))
                cache = _written(place.earlier[1], keys, earlier.column)
            parts = self._earlier_parts(place, cache, positions, earlier)
            if self.decoding is not None:
                return decoding_attention(q, *parts, self.decoding, cap, sinks), cache
            return group_attention(q, *parts, kind="plain", cap=cap, sinks=sinks), cache

        x, cache, chosen = self._continue(tokens[..., None], positions, earlier, attend)
        return self.norm(x[:, :, 0]), cache, None if chosen is None else chosen[:, :, 0]

    def extend(
        self,
        tokens: Int[Array, "P G N"],
        positions: Int[Array, "P G N"],
        earlier: EarlierTokens,
        last: Int[Array, "P G"] | None = None,
    ) -> tuple[Float[Array, "P G D"], list[Kept], Chosen]:
        """Runs the model on several new tokens of every completion, given the keys and values of the earlier tokens.

        Args:
          tokens: padded on the left, or with `last` on either side; `positions` is -1 there.
          earlier: unlike in `decode`, `columns` has only the positions of earlier tokens, and -1 for each column
            without one.
          last: index of the last new token of each completion; None: that of the last column.

        Returns:
          the normalised hidden states that predict the token after the last new token, the cache with the new columns,
          and the selected experts `[P G N l k]` (None without experts). The hidden state is undefined for a completion
          without new tokens.
        """
        segments = to_rows(jnp.where(positions >= 0, 0, -1))

        def attend(place: Place, q: Array, k: Any, v: Any, sinks: Array | None) -> tuple[Array, Any]:
            new: KeyValue
            if k is None:
                cache, new = place.source
            else:
                new = laid_out(to_rows(k), to_rows(v))
                cache = _written(place.earlier[1], new, earlier.column)
            # Attention reads the updated cache, so the update needs no copy. The mask of the earlier tokens hides the
            # new columns.
            parts = self._earlier_parts(place, cache, positions, earlier)
            block = Part(*new, Causal(segments, self.config.window(place.layer)))
            cap = self.config.attention_cap
            return group_attention(q, *parts, block, kind="auto", cap=cap, sinks=sinks), (cache, new)

        x, kept, chosen = self._continue(tokens, positions, earlier, attend)
        ends = x[:, :, -1] if last is None else jnp.take_along_axis(x, last[..., None, None], axis=2)[:, :, 0]
        return self.norm(ends), [layer if isinstance(layer, Memory) else layer[0] for layer in kept], chosen

    def _continue(
        self, tokens: Int[Array, "P G N"], positions: Int[Array, "P G N"], earlier: EarlierTokens, attend: Any
    ) -> tuple[Float[Array, "P G N D"], list[Any], Chosen]:
        """Runs all layers on new tokens of completions. `attend` is that of the `Context`, in which `Place.earlier` has
        the entries of `prompt_cache` and `cache` for the layer."""
        real = positions >= 0
        offsets = to_rows(jnp.where(real, jnp.cumsum(real, axis=2) - 1, -1))
        first = (positions == earlier.prompt_lengths[:, None, None]).any(axis=2)

        def past(place: Place) -> Past:
            prompt, own = place.earlier
            return Past(_memory_before(prompt, own, first), offsets)

        sources = [self.config.kv_source(index) for index in range(self.config.num_layers)]
        caches = [(earlier.prompt_cache[source], earlier.cache[source]) for source in sources]
        return self._run(tokens, Context(positions, attend, past, caches, gather=gather_after))

    def _earlier_parts(
        self, place: Place, cache: KeyValue, positions: Int[Array, "P G N"], earlier: EarlierTokens
    ) -> tuple[Part, Part]:
        """Returns the keys and values of the prompts and those of `cache`, with the masks for new tokens."""
        window = self.config.window(place.layer)
        starts = None if window is None else jnp.maximum(positions - window + 1, 0)
        by_prompt = None if starts is None else starts.reshape(len(starts), -1)
        seen = Positions(to_rows(earlier.columns), None if starts is None else to_rows(starts))
        prompt, _ = place.earlier
        return Part(prompt[0], prompt[1], Lengths(earlier.prompt_lengths, by_prompt)), Part(*cache, seen)

    def completion_hidden(
        self,
        first: Float[Array, "A D"],
        prompt_cache: list[Kept],
        prompt_lengths: Int[Array, "A"],
        bins: Bins,
        remat: bool = False,
        experts: Integer[Array, "A b T l k"] | None = None,
    ) -> Float[Array, "A b T D"]:
        """Computes the normalised hidden states that predict each token of completions, given the results of `prefill`.

        Gradients flow into `first` and `prompt_cache`, so a prompt is computed only once, even if its completions are
        split over several calls.

        Args:
          first, prompt_cache: the results of `prefill`; `first` is the hidden state that predicts the first token of
            every completion.
          remat: whether each layer is recomputed in the backward pass.
          experts: the experts to use in each of the `l` layers that have experts; None: those of the router.
        """
        positions = prompt_lengths[:, None, None] + bins.offsets
        in_sequence = to_rows(jnp.where(bins.segments >= 0, bins.offsets, -1))

        def attend(place: Place, q: Array, k: Any, v: Any, sinks: Array | None) -> tuple[Array, KeyValue | None]:
            prompt: KeyValue | None = place.earlier
            if prompt is None:
                prompt = self._of_layer(prompt_cache, self.config.kv_source(place.layer))
            window = self.config.window(place.layer)
            starts = None if window is None else positions.reshape(len(positions), -1) - window + 1
            of_prompt = Part(prompt[0], prompt[1], Lengths(prompt_lengths, starts))
            keys: KeyValue = place.source if k is None else laid_out(to_rows(k), to_rows(v))
            own = Part(*keys, Causal(to_rows(bins.segments), window))
            cap = self.config.attention_cap
            out = group_attention(q, of_prompt, own, kind=self.attention, cap=cap, sinks=sinks)
            return out, None if k is None else laid_out(to_rows(k), to_rows(v))

        def past(place: Place) -> Past:
            return Past(
                Memory(*(jnp.repeat(part, bins.tokens.shape[1], axis=0) for part in place.earlier)), in_sequence
            )

        prompts = [*prompt_cache, *[None] * (len(self._slots) - len(prompt_cache))]
        x, _, _ = self._run(bins.tokens, Context(positions, attend, past, prompts, final=True), remat, experts)
        before = jnp.concatenate([jnp.zeros_like(x[:, :, :1]), self.norm(x[:, :, :-1])], axis=2)
        return jnp.where((bins.offsets == 0)[..., None], first[:, None, None].astype(x.dtype), before)


def _split(layer: Layer) -> tuple[Any, dict[Any, Any]]:
    graph, state = nnx.split(layer)
    return graph, nnx.to_pure_dict(state)


def _written(cache: KeyValue, keys: KeyValue, column: Int[Array, ""]) -> KeyValue:
    """Writes new keys and values (`laid_out`) to the columns of the cache from `column` on."""
    write = jax.lax.dynamic_update_slice_in_dim
    return write(cache[0], keys[0], column, axis=3), write(cache[1], keys[1], column, axis=2)


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
