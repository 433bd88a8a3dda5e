"""What layers may have: windows, no positions or experts, read from Hugging Face's fields; and adapters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tunix_like.errors import UserError
from tunix_like.models.fields import EXPERT_NAMES, checked, spelt

EXPERT_FIELDS = frozenset({*EXPERT_NAMES.values(), "num_local_experts", "decoder_sparse_step", "mlp_only_layers"})


@dataclasses.dataclass(frozen=True)
class Experts:
    """A layer's MLP as several, of which a router picks some for every token.

    Attributes:
      number: of experts, E.
      per_token: experts that work on a token, k.
      intermediate_size: width of one expert's gated MLP.
      normalised: the weights of the k chosen add up to 1; else they are their shares of the softmax over all.

    Raises:
      UserError: a value of the wrong type, or more experts per token than there are.
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
    """Low-rank adapters beside some of the projections of every layer.

    Attributes:
      rank: columns of A and rows of B, r.
      alpha: what they add is multiplied by `alpha / rank`.
      targets: names of the projections.
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
    """The window of every layer. Without `layer_types`, every `pattern`th layer has none (0: all have one)."""
    size = fields.get("sliding_window")
    if not pattern:
        return (_window(size),) * count if size is not None else (None,) * count
    every = fields.get("sliding_window_pattern") or fields.get("_sliding_window_pattern") or pattern
    slides = [bool((layer + 1) % checked("sliding_window_pattern", every)) for layer in range(count)]
    if kinds := fields.get("layer_types"):
        slides = [kind == "sliding_attention" for kind in _per_layer("layer_types", kinds, count)]
    if any(slides) and size is None:
        raise UserError("required field(s) missing: sliding_window, since there are layers of 'sliding_attention'.")
    return tuple(_window(size) if slide else None for slide in slides)


def _window(size: Any) -> int:
    return checked("sliding_window", size)


def rotary_of(fields: Mapping[str, Any], count: int) -> tuple[bool, ...]:
    """Which layers rotate their queries and keys: `no_rope_layers` has 1 where one does (sic), and without it every
    `no_rope_layer_interval`th does not."""
    kinds = fields.get("no_rope_layers")
    if kinds is None:
        interval = checked("no_rope_layer_interval", fields.get("no_rope_layer_interval") or 4)
        return tuple(bool((layer + 1) % interval) for layer in range(count))
    kinds = _per_layer("no_rope_layers", kinds, count)
    if any(kind not in (0, 1) for kind in kinds):
        raise UserError(f"no_rope_layers must be of 0 and 1, not {kinds!r}.")
    return tuple(bool(kind) for kind in kinds)


def nope_fields(rotary: Sequence[bool]) -> dict[str, Any]:
    return {"no_rope_layers": [int(rotates) for rotates in rotary]}


def experts_of(fields: Mapping[str, Any], count: int) -> dict[str, Any]:
    """`experts` and which layers have them: every `decoder_sparse_step`th but for `mlp_only_layers`. transformers 5
    writes the number of experts under another name than those before."""
    names = [name for name in ("num_experts", "num_local_experts") if fields.get(name) is not None]
    if not names:
        raise UserError("required field(s) missing: num_experts.")
    if len({fields[name] for name in names}) > 1:
        raise UserError("num_experts and num_local_experts are both given and differ; keep one of them.")
    read = {**fields, "num_experts": fields[names[0]]}
    experts = Experts(**{ours: checked(ours, read[hf], EXPERT_NAMES) for ours, hf in EXPERT_NAMES.items()})
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int and 0 <= layer < count for layer in dense):
        raise UserError(f"mlp_only_layers must be numbers of layers, from 0 to {count - 1}, not {dense!r}.")
    step = checked("decoder_sparse_step", fields.get("decoder_sparse_step") or 1)
    layers = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(count))
    return {"experts": experts, "expert_layers": layers}


def _per_layer(name: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, list) or len(value) != count:
        raise UserError(f"{name} must be a list with an entry for each of {count} layers, not {value!r}.")
    return value
