"""Defines the scaling of rotary frequencies, and converts this scaling from and to Hugging Face fields. This module
does not import jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tunix_like.errors import UserError
from tunix_like.models.fields import ROPE_NAMES, checked

ROPE_FIELDS = frozenset({"rope_theta", "rope_scaling", "rope_parameters"})


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3 scaling of the rotary frequencies.

    Wavelengths (in positions) above `original_max_positions / low_freq_factor` are multiplied by `factor`. Wavelengths
    below `original_max_positions / high_freq_factor` are unchanged. Wavelengths in between are interpolated.

    Raises:
      UserError: a value is not a positive number, or `high_freq_factor <= low_freq_factor`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        for name in ROPE_NAMES:
            checked(name, getattr(self, name))
        if self.high_freq_factor <= self.low_freq_factor:
            raise UserError(
                f"high_freq_factor ({self.high_freq_factor}) must be larger than low_freq_factor"
                f" ({self.low_freq_factor})."
            )


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Linear scaling: every wavelength is multiplied by `factor`, which is equivalent to dividing positions by
    `factor`.

    Raises:
      UserError: `factor` is not a positive number.
    """

    factor: float

    def __post_init__(self) -> None:
        checked("factor", self.factor)


_KINDS: dict[str, type | None] = {"default": None, "linear": LinearScaling, "llama3": RopeScaling}


def read_rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads `rope_theta` and `rope_scaling` from the older HF fields of the same names, or from the newer field
    `rope_parameters`. The result has no entry for an absent value.

    Raises:
      UserError: the older fields and the newer field are both present and differ, the type of scaling is not supported,
        or a field is missing, unknown or of the wrong type.
    """
    old, new = fields.get("rope_scaling"), fields.get("rope_parameters")
    if old and new and old != new:
        raise UserError("rope_scaling and rope_parameters are both given and differ; keep one of them.")
    rope = new or old or {}
    if not isinstance(rope, Mapping):
        raise UserError(f"rope_scaling / rope_parameters must be a mapping, not {rope!r}.")
    thetas = [mapping["rope_theta"] for mapping in (fields, rope) if mapping.get("rope_theta") is not None]
    if len(thetas) == 2 and thetas[0] != thetas[1]:
        raise UserError(f"rope_theta is given twice, as {thetas[0]!r} and {thetas[1]!r}; keep one of them.")
    result: dict[str, Any] = {"rope_theta": checked("rope_theta", thetas[0])} if thetas else {}

    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _KINDS:
        raise UserError(
            f"rope_scaling / rope_parameters: rope_type {kind!r} is not supported; only 'default', 'linear' and "
            "'llama3' are."
        )
    scaling = _KINDS[kind]
    wanted = {} if scaling is None else {field.name: ROPE_NAMES[field.name] for field in dataclasses.fields(scaling)}
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *wanted.values()}
    unknown = sorted(map(str, set(rope) - known))  # a key from YAML can have another type than str
    if unknown or rope.get("partial_rotary_factor", 1) != 1:
        raise UserError(
            f"rope_scaling / rope_parameters: field(s) not supported with rope_type {kind!r}: "
            f"{', '.join(map(repr, unknown)) or 'partial_rotary_factor'}."
        )
    missing = [hf for hf in wanted.values() if rope.get(hf) is None]
    if missing:
        raise UserError(f"required field(s) missing for rope_type {kind!r}: {', '.join(missing)}.")
    if scaling is not None:
        result["rope_scaling"] = scaling(**{name: checked(name, rope[hf]) for name, hf in wanted.items()})
    return result


def read_two_ropes(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the rotary fields of a family in which layers with a window have their own theta.

    Older HF folders have this theta in `rope_local_base_freq`. Newer folders have it in `rope_parameters`, which then
    has one entry per kind of layer.

    Returns:
      `rope_theta` and `rope_scaling` of the layers without a window, and `local_rope_theta`, the theta of the layers
        with a window. An absent value has no entry.

    Raises:
      UserError: as in `read_rope`, or the layers with a window have a scaling.
    """
    both = fields.get("rope_parameters") or {}
    if not isinstance(both, Mapping) or set(both) - {"full_attention", "sliding_attention"}:
        raise UserError(f"rope_parameters must have only full_attention and sliding_attention, not {both!r}.")
    rest = {name: value for name, value in fields.items() if name != "rope_parameters"}
    result = read_rope(rest | {"rope_parameters": both.get("full_attention")})
    theta = fields.get("rope_local_base_freq")
    local = read_rope({"rope_theta": theta, "rope_parameters": both.get("sliding_attention")})
    if "rope_scaling" in local:
        raise UserError("rope_parameters: a scaling of sliding_attention layers is not supported.")
    return result | ({"local_rope_theta": local["rope_theta"]} if local else {})


def rope_fields(theta: float, scaling: RopeScaling | LinearScaling | None) -> dict[str, Any]:
    """Returns the rotary fields of config.json in the older form, which all readers support, including transformers
    5."""
    if scaling is None:
        return {"rope_theta": theta}
    kind = next(name for name, scaling_type in _KINDS.items() if scaling_type is type(scaling))
    numbers = {ROPE_NAMES[name]: value for name, value in dataclasses.asdict(scaling).items()}
    return {"rope_theta": theta, "rope_scaling": {"rope_type": kind, **numbers}}
