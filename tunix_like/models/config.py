"""The configuration of a decoder, read from and written to a Hugging Face `config.json`.

The fields of each model family are in `families.py`. This module does not import jax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunix_like.errors import UserError
from tunix_like.models.families import NOT_COPIED, family_of, numbers, scalar_head, text_fields, written
from tunix_like.models.fields import (
    HF_NAMES,
    LAYER_NAMES,
    OPTION_NAMES,
    SWITCHES,
    DeltaRule,
    Experts,
    RopeScaling,
    Scaling,
    YarnScaling,
    checked,
    spelt,
)
from tunix_like.models.hf_fields import PER_LAYER
from tunix_like.runtime.input_files import read_object

ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The configuration of one decoder. A config is hashable, so it can be a static argument of `jax.jit`.

    Attributes:
      vocab_size: rows of the embedding table, V.
      hidden_size: model width, D.
      intermediate_size: width of the gated MLP, in a layer with experts of the one beside the experts.
      num_layers: number of layers.
      num_heads: query heads, H.
      num_kv_heads: key and value heads, K; it divides H.
      head_dim: width of one head, h. It is even and can differ from D / H.
      full_head_dim, full_kv_heads: width of a head, and number of key and value heads, in layers without a window.
        None: as in the other layers.
      keys_as_values: whether the values of layers without a window are their keys before norm and rotation.
      shared_kv_layers: number of layers at the end that have no keys and values of their own. A layer with a window
        uses those of the last earlier layer with a window, another layer those of the last one without.
      wide_shared_mlps: whether the MLPs of these layers are twice as wide.
      layer_input_width: width of a second embedding of each token, of which every layer has its own part, that layers
        add to the hidden states through a gate (Gemma 4: per-layer embeddings). None: no such embedding.
      layer_input_vocab: rows of its table.
      rope_theta: base of the rotary wavelengths.
      rope_scaling: scaling of the rotary frequencies, or None.
      query_scaling: beta of a factor by which rotated queries are multiplied: `1 + beta ln(1 + p // n)` at position p,
        with n = `rope_scaling.original_max_positions`. None: no factor.
      local_rope_theta: base of the rotary wavelengths in layers with a window; these layers then have no scaling. None:
        all layers have the same base and scaling.
      rotary_width: number of entries of a head, from the first on, that are rotated; None: all.
      norm_eps: number added to the mean square in every RMS norm.
      tie_embeddings: whether the output head is the embedding table.
      qkv_bias, o_bias: whether the q, k and v projections, and the output projection of attention, have a bias.
      sinks: whether each query head has a learned logit that takes part in every softmax of attention, without a key.
      qk_norm: whether each head of q and k has an RMS norm before the rotation.
      joint_qk_norm: whether this is one norm of all heads together instead.
      value_norm: whether each head of v has an RMS norm without a weight.
      input_norms, post_norms: whether the inputs, and the outputs before the residual addition, of attention and MLP
        have an RMS norm; one of both is needed.
      norm_offset: whether RMS norms multiply by 1 + weight.
      layer_scalars: whether the hidden states after each layer are multiplied by a number of this layer, which is not
        trained.
      output_gate: whether the outputs of attention are multiplied by a sigmoid gate, which `q_proj` computes too.
      scale_embeddings: whether embeddings are multiplied by sqrt(D), rounded to the compute dtype.
      activation: activation of the gated MLP, one of `ACTIVATIONS`. With a gate g and an input u, `clamped_swiglu`
        (GPT-OSS) is `(u + 1) g sigmoid(1.702 g)`, where g is at most 7 and u is from -7 to 7; the others are
        `activation(g) u`.
      query_pre_attn_scalar: attention scores are divided by the square root of this number. None: by the square root of
        `head_dim`.
      attention_cap, logits_cap: caps of attention scores and of final logits. A value x becomes `cap * tanh(x / cap)`.
        None: no cap.
      windows: per layer, the number of positions that a query sees, including its own; None: all earlier positions.
      rotary: per layer, whether queries and keys are rotated.
      experts: the mixture of experts of the MLPs, or None.
      expert_layers: per layer, whether its MLP is a mixture of experts.
      delta_rule: the sizes of recurrent layers, or None.
      recurrent_layers: per layer, whether it is recurrent (gated delta rule) instead of having attention.
      max_positions: maximum sequence length of the model, in tokens.
      scalar_head: whether the model has, instead of the output matrix, a head that maps a hidden state to one number
        (HF: `...ForSequenceClassification` with one label), as reward models do.
      source: the HF mapping from which this config was read. An export copies the fields that do not define the model.
        The mapping is not compared or hashed, and no field that defines the model is read from the mapping again.

    `windows`, `rotary`, `expert_layers` and `recurrent_layers` are empty if all layers have the default: no window,
    rotated queries and keys, experts if the model has experts, attention. Entries beyond the last layer are dropped.

    Raises:
      UserError: a value is invalid.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    full_head_dim: int | None = None
    full_kv_heads: int | None = None
    keys_as_values: bool = False
    shared_kv_layers: int = 0
    wide_shared_mlps: bool = False
    layer_input_width: int | None = None
    layer_input_vocab: int | None = None
    rope_theta: float = 1e4
    rope_scaling: Scaling | None = None
    query_scaling: float | None = None
    local_rope_theta: float | None = None
    rotary_width: int | None = None
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    sinks: bool = False
    qk_norm: bool = False
    joint_qk_norm: bool = False
    value_norm: bool = False
    input_norms: bool = True
    post_norms: bool = False
    norm_offset: bool = False
    scale_embeddings: bool = False
    layer_scalars: bool = False
    output_gate: bool = False
    activation: str = "silu"
    query_pre_attn_scalar: float | None = None
    attention_cap: float | None = None
    logits_cap: float | None = None
    windows: tuple[int | None, ...] = ()
    rotary: tuple[bool, ...] = ()
    experts: Experts | None = None
    expert_layers: tuple[bool, ...] = ()
    delta_rule: DeltaRule | None = None
    recurrent_layers: tuple[bool, ...] = ()
    max_positions: int = 32768
    scalar_head: bool = False
    source: Mapping[str, Any] | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in (*HF_NAMES, *SWITCHES, "rope_theta"):
            checked(name, getattr(self, name))
        for name in (*OPTION_NAMES, *LAYER_NAMES, "local_rope_theta", "query_scaling", "rotary_width"):
            if getattr(self, name) not in (None, 0) or name in ("keys_as_values", "wide_shared_mlps"):
                checked(name, getattr(self, name))
        if self.activation not in ACTIVATIONS:
            raise UserError(f"activation must be one of {', '.join(ACTIVATIONS)}, not {self.activation!r}.")
        for name in ("num_kv_heads", "full_kv_heads"):
            if self.num_heads % (heads := getattr(self, name) or 1):
                raise UserError(
                    f"{spelt('num_heads')} is {self.num_heads}, which is not a multiple of {spelt(name)} = {heads};"
                    " every key head must have the same number of query heads."
                )
        for name in ("head_dim", "full_head_dim"):
            if (width := getattr(self, name) or 0) % 2:
                raise UserError(f"{spelt(name)} is {width}; rotary positions need an even number.")
        if isinstance(self.rope_scaling, YarnScaling) and self.rope_theta <= 1:
            raise UserError(f"rope_theta is {self.rope_theta}; YaRN needs a number above 1.")
        if self.query_scaling is not None and not isinstance(self.rope_scaling, YarnScaling | RopeScaling):
            raise UserError(f"{spelt('query_scaling')} needs a rope_scaling with original_max_position_embeddings.")
        if self.joint_qk_norm and not self.qk_norm:
            raise UserError("joint_qk_norm needs qk_norm.")
        if not self.input_norms and not self.post_norms:
            raise UserError("input_norms and post_norms are both false; a layer needs norms.")
        if self.rotary_width is not None and (self.rotary_width % 2 or self.rotary_width > self.head_dim):
            raise UserError(
                f"partial_rotary_factor gives {self.rotary_width} rotated entries of a head of {self.head_dim}; the"
                " number must be even, and at most that of the head."
            )
        if self.full_kv_heads not in (None, self.num_kv_heads) and not self.keys_as_values:
            raise UserError(f"{spelt('full_kv_heads')} = {self.full_kv_heads} needs {spelt('keys_as_values')}.")
        if (self.layer_input_width is None) != (self.layer_input_vocab is None):
            raise UserError(f"{spelt('layer_input_width')} and {spelt('layer_input_vocab')} need each other.")
        if self.layer_input_vocab is not None and self.layer_input_vocab < self.vocab_size:
            raise UserError(
                f"{spelt('layer_input_vocab')} is {self.layer_input_vocab}, less than {spelt('vocab_size')} ="
                f" {self.vocab_size}."
            )
        for window in self.windows:
            if window is not None:
                checked("sliding_window", window)
        for name, plain in PER_LAYER.items():
            entries = getattr(self, name)[: self.num_layers]
            if entries and len(entries) < self.num_layers:
                raise UserError(f"{name} has {len(entries)} entries for {self.num_layers} layers.")
            # canonical form, so that equal decoders compare equal
            object.__setattr__(self, name, () if all(entry is plain for entry in entries) else entries)
        for name, of_all in (("full_head_dim", self.head_dim), ("full_kv_heads", self.num_kv_heads)):
            if getattr(self, name) == of_all:
                object.__setattr__(self, name, None)
        first = self.num_layers - self.shared_kv_layers
        kinds = [self.window(layer) is None for layer in range(self.num_layers)]
        if self.shared_kv_layers and (first < 1 or set(kinds[first:]) - set(kinds[:first])):
            raise UserError(
                f"{spelt('shared_kv_layers')} is {self.shared_kv_layers}; every kind of these layers (with and without"
                f" a window) must also occur among the earlier ones of the {self.num_layers} layers."
            )

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def rope(self, layer: int) -> tuple[float, Scaling | None] | None:
        """Returns base (theta) and scaling of this layer's rotary positions; None: it has none."""
        if self.rotary and not self.rotary[layer]:
            return None
        if self.local_rope_theta is not None and self.window(layer) is not None:
            return self.local_rope_theta, None
        return self.rope_theta, self.rope_scaling

    def head_width(self, layer: int) -> int:
        return self.head_dim if self.full_head_dim is None or self.window(layer) is not None else self.full_head_dim

    def kv_heads(self, layer: int) -> int:
        full = self.full_kv_heads is not None and self.window(layer) is None
        return self.full_kv_heads if full else self.num_kv_heads  # type: ignore[return-value]

    @property
    def only_head_dim(self) -> int | None:
        """Width of a head in all layers; None if layers differ."""
        return self.head_dim if self.full_head_dim is None else None

    def kv_source(self, layer: int) -> int:
        """Returns the layer whose keys and values this layer reads: itself, or that of `shared_kv_layers`."""
        first = self.num_layers - self.shared_kv_layers
        if layer < first:
            return layer
        full = self.window(layer) is None
        return max(index for index in range(first) if (self.window(index) is None) == full)

    @property
    def key_widths(self) -> tuple[int, ...]:
        """Total width of the key heads of each layer that keeps keys and values."""
        layers = range(self.num_layers - self.shared_kv_layers)
        return tuple(self.kv_heads(layer) * self.head_width(layer) for layer in layers if not self.is_recurrent(layer))

    def kind(self, layer: int) -> tuple[Any, ...]:
        """Returns what decides the computation of a layer. Layers of the same kind have weights of the same shapes."""
        shared = self.kv_source(layer) != layer
        return self.window(layer), self.rope(layer), self.has_experts(layer), self.is_recurrent(layer), shared

    def mlp_width(self, layer: int) -> int:
        """Returns the width of the gated MLP of a layer without experts, or of the one beside its experts."""
        wide = self.wide_shared_mlps and self.kv_source(layer) != layer
        return self.intermediate_size * (2 if wide else 1)

    def is_recurrent(self, layer: int) -> bool:
        return bool(self.recurrent_layers) and self.recurrent_layers[layer]

    @property
    def recorded_bytes(self) -> int:
        """Bytes per token of the indices of its experts in all layers; 0 without experts."""
        if self.experts is None:
            return 0
        layers = sum(map(self.has_experts, range(self.num_layers)))
        return layers * self.experts.per_token * (1 if self.experts.index_dtype == "uint8" else 2)

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and (not self.expert_layers or self.expert_layers[layer])

    def active_width(self, layer: int) -> int:
        """Returns the total width of the gated MLPs that process a token in this layer."""
        if self.experts is None or not self.has_experts(layer):
            return self.mlp_width(layer)
        shared = self.mlp_width(layer) if self.experts.shared else 0
        return self.experts.per_token * self.experts.intermediate_size + shared

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path) -> DecoderConfig:
        """Reads an HF config: a mapping, a folder with a `config.json`, or the path of such a file.

        For a multimodal model, the config of its text decoder is read. Fields of a file that transformers does not read
        are ignored, as there. In a mapping, which people write, they are an error, because they are often misspelt.
        """
        where, fields = _read(source)
        try:
            fields = text_fields(fields)
            return cls(**numbers(fields, isinstance(source, Mapping)), scalar_head=scalar_head(fields), source=fields)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None

    def to_hf(
        self, eos_ids: Sequence[int] | None = None, bos_id: int | None = None, pad_id: int | None = None
    ) -> dict[str, Any]:
        """Returns the fields of a `config.json` with which transformers loads this decoder, without `torch_dtype`.
        Fields of `source` that do not define the model are kept, and so are ids that are None. Raises UserError if no
        Hugging Face family has this combination of options."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        changed = {
            field.name: values[field.name] for field in dataclasses.fields(self) if values[field.name] != field.default
        }
        source = self.source or {}
        family = family_of(changed, source.get("model_type"))
        whole = {name: values[name] or (plain,) * self.num_layers for name, plain in PER_LAYER.items()}
        result = {name: value for name, value in source.items() if name not in NOT_COPIED}
        result |= written(family, values | whole)
        eos = None if not eos_ids else eos_ids[0] if len(eos_ids) == 1 else list(eos_ids)
        for name, value in (("eos_token_id", eos), ("bos_token_id", bos_id), ("pad_token_id", pad_id)):
            # Written even if null: transformers replaces an absent id by a default of the family.
            result[name] = result.get(name) if value is None else value
        return result


@dataclasses.dataclass(frozen=True)
class Adapters:
    """Low-rank adapters of some projections in every layer.

    Attributes:
      rank: r, the number of columns of each matrix A and of rows of each matrix B (`lora.py`).
      alpha: the output of each adapter is multiplied by `alpha / rank`.
      targets: names of the projections that have adapters.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def __str__(self) -> str:
        return f"LoRA of rank {self.rank}, alpha {self.alpha:g}, on {', '.join(self.targets)}"


def _read(source: Mapping[str, Any] | str | Path) -> tuple[str, dict[str, Any]]:
    """Returns the name of the HF config `source` for error messages, and its fields."""
    if isinstance(source, Mapping):
        return "HF config (model.config of a YAML)", dict(source)
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    cure = "A model folder needs the Hugging Face config.json of the model; download the file again or correct it."
    return str(path), read_object(path, cure)
