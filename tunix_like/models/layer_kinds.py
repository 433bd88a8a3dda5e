"""Reads per-layer properties (windows, rotary positions, experts) from Hugging Face fields, and describes LoRA
adapters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tunix_like.errors import UserError
from tunix_like.models.fields import EXPERT_NAMES, checked, spelt

EXPERT_FIELDS = frozenset({*EXPERT_NAMES.values(), "num_local_experts", "decoder_sparse_step", "mlp_only_layers"})


@dataclasses.dataclass(frozen=True)
class Experts:
    """The mixture of experts of an MLP: a router selects some experts for every token.

    Attributes:
      number: number of experts, E.
      per_token: experts per token, k.
      intermediate_size: width of the gated MLP of one expert.
      normalised: whether the weights of the k selected experts are normalised to a sum of 1. If False, the weights are
        the softmax probabilities over all experts.

    Raises:
      UserError: a value has the wrong type, or `per_token` exceeds `number`.
    """

    number: int
    per_token: int
    intermediate_size: int
    normalised: bool

    def __post_init__(self) -> None:
        for name in EXPERT_NAMES:
            checked(name, getattr(self, name), EXPERT_NAMES)
        if self.per_token > self.number:
            raise UserError(
                f"{spelt('per_token', EXPERT_NAMES)} is {self.per_token}, but there are {self.number} experts."
            )


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


def windows_of(fields: Mapping[str, Any], count: int, pattern: int) -> tuple[int | None, ...]:
    """Returns the window of every layer, in positions; None for a layer without a window.

    In config.json, the field `layer_types` defines which layers have a window. Without this field, every n-th layer has
    no window, and all other layers have a window; n is the field `sliding_window_pattern`, or else `pattern`. With
    `pattern` 0, these fields are not read, and all layers have the same window.
    """
    size = fields.get("sliding_window")
    if not pattern:
        return (_window(size),) * count if size is not None else (None,) * count
    period = fields.get("sliding_window_pattern") or fields.get("_sliding_window_pattern") or pattern
    slides = [bool((layer + 1) % checked("sliding_window_pattern", period)) for layer in range(count)]
    if kinds := fields.get("layer_types"):
        slides = [kind == "sliding_attention" for kind in _per_layer("layer_types", kinds, count)]
    if any(slides) and size is None:
        raise UserError("required field(s) missing: sliding_window, because some layers use 'sliding_attention'.")
    return tuple(_window(size) if slide else None for slide in slides)


def _window(size: Any) -> int:
    return checked("sliding_window", size)


def rotary_of(fields: Mapping[str, Any], count: int) -> tuple[bool, ...]:
    """Returns which layers have rotary positions.

    Contrary to its name, the field `no_rope_layers` of config.json has a 1 for each layer with rotary positions, and a
    0 for each other layer. Without this field, every `no_rope_layer_interval`-th layer (by default every fourth) has no
    rotary positions.
    """
    kinds = fields.get("no_rope_layers")
    if kinds is None:
        interval = checked("no_rope_layer_interval", fields.get("no_rope_layer_interval") or 4)
        return tuple(bool((layer + 1) % interval) for layer in range(count))
    kinds = _per_layer("no_rope_layers", kinds, count)
    if any(kind not in (0, 1) for kind in kinds):
        raise UserError(f"no_rope_layers must contain only 0 and 1, not {kinds!r}.")
    return tuple(bool(kind) for kind in kinds)


def nope_fields(rotary: Sequence[bool]) -> dict[str, Any]:
    return {"no_rope_layers": [int(rotates) for rotates in rotary]}


def experts_of(fields: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Reads the fields `experts` and `expert_layers` of `DecoderConfig` from the fields of a config.json.

    Every `decoder_sparse_step`-th layer has experts, except the layers in `mlp_only_layers`. The number of experts is
    in the field `num_experts`, or in `num_local_experts` if transformers 5 wrote the config.json.
    """
    names = [name for name in ("num_experts", "num_local_experts") if fields.get(name) is not None]
    if not names:
        raise UserError("required field(s) missing: num_experts.")
    if len({fields[name] for name in names}) > 1:
        raise UserError("num_experts and num_local_experts are both given and differ; keep one of them.")
    values = {**fields, "num_experts": fields[names[0]]}
    experts = Experts(**{ours: checked(ours, values[hf], EXPERT_NAMES) for ours, hf in EXPERT_NAMES.items()})
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int and 0 <= layer < count for layer in dense):
        raise UserError(f"mlp_only_layers must be a list of layer numbers from 0 to {count - 1}, not {dense!r}.")
    step = checked("decoder_sparse_step", fields.get("decoder_sparse_step") or 1)
    layers = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(count))
    return {"experts": experts, "expert_layers": layers}


def _per_layer(name: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, list) or len(value) != count:
        raise UserError(f"{name} must be a list with one entry for each of the {count} layers, not {value!r}.")
    return value
