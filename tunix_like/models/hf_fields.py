"""The two-way fields of a Hugging Face config.json: each reads some fields of `DecoderConfig`, and writes them for an
export. `families.py` lists those of each family. This module does not import jax.

Here, HF fields are the fields of a config.json, and `values` are fields of `DecoderConfig` by name.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, NamedTuple

from tunix_like.errors import UserError
from tunix_like.models.fields import (
    DELTA_NAMES,
    EXPERT_NAMES,
    HF_NAMES,
    LAYER_NAMES,
    QUERY_SCALING,
    ROPE_NAMES,
    DeltaRule,
    Experts,
    LinearScaling,
    ProportionalScaling,
    RopeScaling,
    Scaling,
    YarnScaling,
    checked,
)

PER_LAYER = {"windows": None, "rotary": True, "expert_layers": True, "recurrent_layers": False}
"""Maps the fields of `DecoderConfig` with one value per layer to the default of a layer."""


class ConfigFile(NamedTuple):
    """The HF fields of a config.json.

    Attributes:
      only_known: whether a field that transformers does not read is an error.
    """

    fields: Mapping[str, Any]
    only_known: bool

    @property
    def layers(self) -> int:
        return checked("num_layers", self.fields["num_hidden_layers"])

    def per_layer(self, name: str) -> list[Any]:
        """Returns the field `name`, which must have one entry per layer."""
        value = self.fields[name]
        if not isinstance(value, list) or len(value) != self.layers:
            raise UserError(
                f"{name} must be a list with one entry for each of the {self.layers} layers, not {value!r}."
            )
        return value


class TwoWay(abc.ABC):
    """A conversion between some HF fields and some fields of `DecoderConfig`, in both directions.

    Attributes:
      options: the fields of `DecoderConfig` that a family with this conversion may set, and others may not.
      needed: those of `options` without which a decoder is not exported as such a family.
      hf: the HF fields that are allowed only in a family with this conversion.
      required: the HF fields that a config.json with this conversion must set.
    """

    options: Set[str] = frozenset()
    needed: Set[str] = frozenset()
    hf: Set[str] = frozenset()
    required: Sequence[str] = ()

    @abc.abstractmethod
    def read(self, file: ConfigFile) -> dict[str, Any]:
        """Returns fields of `DecoderConfig`, without those that are absent in the file. As in transformers, null counts
        as absent."""

    @abc.abstractmethod
    def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns HF fields. `values` has all fields of a `DecoderConfig`; those of `PER_LAYER` with an entry for every
        layer."""

    def unsupported(self, values: Mapping[str, Any]) -> str | None:
        """Returns which of `values` cannot be written, for an error message; None if all can."""
        return None


class Numbers(TwoWay):
    """Single values that need no conversion. `names` maps fields of `DecoderConfig` to HF fields."""

    def __init__(self, names: Mapping[str, str]):
        self.names = names
        self.options = frozenset(names)
        self.hf = frozenset(names.values())

    def read(self, file: ConfigFile) -> dict[str, Any]:
        given = {ours: file.fields.get(hf) for ours, hf in self.names.items()}
        return {ours: checked(ours, value) for ours, value in given.items() if value is not None}

    def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {hf: values[ours] for ours, hf in self.names.items()}


class Sizes(Numbers):
    """The values of every family. The HF field of `intermediate_size` is `width`."""

    def __init__(self, width: str = "intermediate_size"):
        self.names = HF_NAMES | {"intermediate_size": width}
        self.required = ["vocab_size", "hidden_size", width, "num_hidden_layers", "num_attention_heads"]


class ScoreDivisor(Numbers):
    """`query_pre_attn_scalar`, whose default here is the width of a head. transformers expects an int if possible."""

    def __init__(self) -> None:
        super().__init__({"query_pre_attn_scalar": "query_pre_attn_scalar"})

    def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        value = values["query_pre_attn_scalar"]
        value = values["head_dim"] if value is None else value
        return {"query_pre_attn_scalar": int(value) if value == int(value) else value}


LOCAL_THETA = "rope_local_base_freq"

_SCALINGS: dict[str, type[Scaling] | None] = {
    "default": None,
    "proportional": ProportionalScaling,
    "linear": LinearScaling,
    "llama3": RopeScaling,
    "yarn": YarnScaling,
}


class Rope(TwoWay):
    """Base and scaling of the rotary positions: the older HF fields `rope_theta` and `rope_scaling`, or the newer field
    `rope_parameters`. An export has the older ones, which all readers support, including transformers 5.

    Args:
      scaled: whether a model of the family needs a scaling.
      query_scaling: whether the mapping must have `DecoderConfig.query_scaling`. It may then have a copy of
        `max_position_embeddings`, which has no effect.
    """

    options: Set[str] = frozenset({"rope_scaling"})

    def __init__(self, *, scaled: bool = False, query_scaling: bool = False):
        self.scaled = scaled
        self.query_scaling = query_scaling
        self.needed = frozenset({"rope_scaling"} if scaled else ())
        if query_scaling:
            self.options = self.options | {"query_scaling"}

    def read(self, file: ConfigFile) -> dict[str, Any]:
        old = file.fields.get("rope_scaling")
        new = file.fields.get("rope_parameters")
        if old and new and old != new:
            raise UserError("rope_scaling and rope_parameters are both given and differ; keep one of them.")
        rope = new or old or {}
        if not isinstance(rope, Mapping):
            raise UserError(f"rope_scaling / rope_parameters must be a mapping, not {rope!r}.")
        thetas = [each["rope_theta"] for each in (file.fields, rope) if each.get("rope_theta") is not None]
        if len(thetas) == 2 and thetas[0] != thetas[1]:
            raise UserError(f"rope_theta is given twice, as {thetas[0]!r} and {thetas[1]!r}; keep one of them.")
        result: dict[str, Any] = {"rope_theta": checked("rope_theta", thetas[0])} if thetas else {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if not isinstance(kind, str) or kind not in _SCALINGS:
            raise UserError(
                f"rope_scaling / rope_parameters: rope_type {kind!r} is not supported; only "
                f"{', '.join(map(repr, _SCALINGS))} are."
            )
        scaling = self._scaling(kind, rope, file.only_known)
        if self.query_scaling and rope[QUERY_SCALING] != 0:
            result["query_scaling"] = checked("query_scaling", rope[QUERY_SCALING])
        if scaling is not None:
            result["rope_scaling"] = scaling
        elif self.scaled:
            raise UserError("required field(s) missing: rope_scaling.")
        return result

    def _scaling(self, kind: str, rope: Mapping[str, Any], only_known: bool) -> Scaling | None:
        scaling = _SCALINGS[kind]
        accepted = () if scaling is None else dataclasses.fields(scaling)
        wanted = {field.name: ROPE_NAMES[field.name] for field in accepted}
        partial = "partial_rotary_factor"
        known = {"rope_type", "type", "rope_theta", partial, *wanted.values()}
        if self.query_scaling:
            known |= {QUERY_SCALING, "max_position_embeddings"}
        unknown = sorted(map(str, set(rope) - known)) if only_known else []  # a key from YAML may be no str
        if unknown or (partial not in wanted.values() and rope.get(partial, 1) != 1):
            raise UserError(
                f"rope_scaling / rope_parameters: field(s) not supported with rope_type {kind!r}: "
                f"{', '.join(map(repr, unknown or [partial]))}."
            )
        # transformers counts an mscale of 0 as absent
        given = {
            name: rope[hf]
            for name, hf in wanted.items()
            if rope.get(hf) is not None and not (name in ("mscale", "mscale_all_dim") and rope[hf] == 0)
        }
        required = [field.name for field in accepted if field.default is dataclasses.MISSING]
        missing = [wanted[name] for name in required if name not in given]
        if self.query_scaling and rope.get(QUERY_SCALING) is None:
            missing.append(QUERY_SCALING)
        if missing:
            raise UserError(f"required field(s) missing for rope_type {kind!r}: {', '.join(missing)}.")
        return None if scaling is None else scaling(**{name: checked(name, value) for name, value in given.items()})

    def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        scaling: Scaling | None = values["rope_scaling"]
        theta = {"rope_theta": values["rope_theta"]}
        if scaling is None:
            return theta
        kind = next(name for name, scaling_type in _SCALINGS.items() if scaling_type is type(scaling))
        numbers = {ROPE_NAMES[name]: value for name, value in dataclasses.asdict(scaling).items() if value is not None}
        query = {QUERY_SCALING: values["query_scaling"] or 0.0} if self.query_scaling else {}
        return theta | {"rope_scaling": {"rope_type": kind, **numbers, **query}}


class PartialRope(Rope):
    """Rotary positions of the first `rotary_width` entries of a head only: a share `partial_rotary_factor` of the head,
    by default a quarter. Fields of multimodal positions have no effect on text."""

    options = Rope.options | {"rotary_width"}
    hf = frozenset({"partial_rotary_factor", "mrope_section", "mrope_interleaved"})

    def read(self, file: ConfigFile) -> dict[str, Any]:
        key = "rope_parameters" if file.fields.get("rope_parameters") else "rope_scaling"
        rope = file.fields.get(key) or {}
        if not isinstance(rope, Mapping):
            raise UserError(f"{key} must be a mapping, not {rope!r}.")
        plain = {name: value for name, value in rope.items() if name not in self.hf}
        share = rope.get("partial_rotary_factor", file.fields.get("partial_rotary_factor", 0.25))
        width = checked("head_dim", file.fields["head_dim"]) * checked("partial_rotary_factor", share)
        whole = file._replace(fields={**file.fields, key: plain})
        return super().read(whole) | {"rotary_width": int(width)}

    def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        result = super().write(values)
        if (width := values["rotary_width"]) is not None:
            share = width / values["head_dim"]
            exact = int(values["head_dim"] * share) == width  # what readers compute
            result["partial_rotary_factor"] = share if exact else math.nextafter(share, 1.0)
        return result


class TwoRopes(Rope):
    """Rotary positions of which layers with a window have their own base, `local_rope_theta`, and no scaling. The field
    `rope_parameters` has one entry per kind of layer."""

    options = Rope.options | {"local_rope_theta"}

    def read(self, file: ConfigFile) -> dict[str, Any]:
        both = file.fields.get("rope_parameters") or {}
        if not isinstance(both, Mapping) or set(both) - {"full_attention", "sliding_attention"}:
            raise UserError(f"rope_parameters must have only full_attention and sliding_attention, not {both!r}.")
        full = {**file.fields, "rope_parameters": both.get("full_attention")}
        result = super().read(file._replace(fields=full))
        sliding = {"rope_theta": file.fields.get(LOCAL_THETA), "rope_parameters": both.get("sliding_attention")}
        local = super().read(file._replace(fields=sliding))
        if "rope_scaling" in local:
            raise UserError("rope_parameters: a scaling of sliding_attention layers is not supported.")
        scaling = result.get("rope_scaling")
        if isinstance(scaling, YarnScaling) and not scaling.truncate:
            raise UserError("truncate = false is not supported; transformers does not read it in this family.")
        return result | ({"local_rope_theta": local["rope_theta"]} if local else {})

    def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        older = super().write(values)
        full = {"rope_type": "default"} | older.get("rope_scaling", {}) | {"rope_theta": older["rope_theta"]}
        local = {"rope_type": "default", "rope_theta": _local_theta(values)}
        return {"rope_parameters": {"full_attention": full, "sliding_attention": local}}


class NamedLocalRope(TwoRopes):
    """Like `TwoRopes`, but exports have the older fields. `LOCAL_THETA` is then the base of layers with a window."""

    hf = frozenset({LOCAL_THETA})

    def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return Rope.write(self, values) | {LOCAL_THETA: _local_theta(values)}


class FixedLocalRope(TwoRopes):
    """Like `TwoRopes`, without an older field for the base of layers with a window. The older field `rope_theta` is the
    base of all layers in transformers 4. In transformers 5 it is that of the other layers, and layers with a window
    have the base `theta`."""

    def __init__(self, theta: float):
        super().__init__()
        self.theta = theta

    def read(self, file: ConfigFile) -> dict[str, Any]:
        result = super().read(file)
        theta = file.fields.get("rope_theta")
        if theta not in (None, self.theta) and "local_rope_theta" not in result:
            raise UserError(
                f"rope_theta = {theta!r} is ambiguous: transformers 4 uses it for all layers, transformers 5 uses"
                f" {self.theta:g} for layers with a window. Give rope_parameters with a rope_theta for full_attention"
                " and one for sliding_attention."
            )
        return result

    def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        unambiguous = values["rope_theta"] == _local_theta(values) == self.theta
        return Rope.write(self, values) if unambiguous else super().write(values)


class ProportionalRopes(TwoRopes):
    """Like `TwoRopes`, of which only the newer field exists. The scaling of layers without a window may only be a
    `ProportionalScaling`, which is also the default."""

    def read(self, file: ConfigFile) -> dict[str, Any]:
        both = file.fields.get("rope_parameters")
        if both is None:
            return {"rope_scaling": ProportionalScaling(0.25)}
        if not isinstance(both, Mapping) or len(both) < 2:
            raise UserError("rope_parameters must have full_attention and sliding_attention.")
        result = super().read(file)
        if not isinstance(result.setdefault("rope_scaling", None), ProportionalScaling | None):
            raise UserError("rope_parameters: full_attention must have the rope_type 'default' or 'proportional'.")
        return result


def _local_theta(values: Mapping[str, Any]) -> float:
    return values["rope_theta"] if values["local_rope_theta"] is None else values["local_rope_theta"]


class Windows(TwoWay):
    """The window of every layer, in positions; None for a layer without a window.

    `layer_types` defines which layers have a window. Without this field, every n-th layer has no window, and all other
    layers have a window; n is the HF field `sliding_window_pattern`, or else `pattern`. With `pattern` 0, these fields
    are not read, and all layers have the same window.
    """

    options: Set[str] = frozenset({"windows"})

    def __init__(self, pattern: int):
        self.pattern = pattern

    def read(self, file: ConfigFile) -> dict[str, Any]:
        size = file.fields.get("sliding_window")
        count = file.layers
        if not self.pattern:
            return {"windows": (None if size is None else checked("sliding_window", size),) * count}
        named = file.fields.get("sliding_window_pattern") or file.fields.get("_sliding_window_pattern")
        period = checked("sliding_window_pattern", named or self.pattern)
        slides = [bool((layer + 1) % period) for layer in range(count)]
        if file.fields.get("layer_types"):
            slides = [kind == "sliding_attention" for kind in file.per_layer("layer_types")]
        if any(slides) and size is None:
            raise UserError("required field(s) missing: sliding_window, because some layers use 'sliding_attention'.")
        return {"windows": tuple(checked("sliding_window", size) if slide else None for slide in slides)}

    def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        windows = values["windows"]
        size = next((window for window in windows if window is not None), None)
        if not self.pattern:
            return {"sliding_window": size}
        # transformers needs a number, also if no layer has a window
        unused = (values["source"] or {}).get("sliding_window") or values["max_positions"]
        kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
        return {"sliding_window": size or unused, "layer_types": kinds}

    def unsupported(self, values: Mapping[str, Any]) -> str | None:
        windows = values["windows"]
        alike = set(windows) - {None} if self.pattern else set(windows)
        return f"the windows {windows}" if len(alike) > 1 else None


class UnlikeLayers(Windows):
    """Windows, and the fields of `LAYER_NAMES`. As in transformers, the last layer has no window.

    Width and number of the key heads of layers without a window are in `global_head_dim` and, for `attention_k_eq_v`,
    `num_global_key_value_heads`; or since transformers 5.24 in `per_layer_config`, which has an entry for each of these
    layers.
    """

    options = Windows.options | LAYER_NAMES.keys()
    hf = frozenset({"per_layer_config", *LAYER_NAMES.values()})

    def read(self, file: ConfigFile) -> dict[str, Any]:
        windows = super().read(file)["windows"]
        if windows[-1] is not None:
            if file.fields.get("layer_types"):
                raise UserError("layer_types: the last layer must be 'full_attention'; transformers would make it so.")
            windows = (*windows[:-1], None)
        given = {ours: file.fields[hf] for ours, hf in LAYER_NAMES.items() if file.fields.get(hf) is not None}
        if file.fields.get("per_layer_config") is not None:
            given |= self._full_layers(file, given.keys(), windows)
        elif "full_head_dim" not in given:
            raise UserError("required field(s) missing: global_head_dim, or per_layer_config.")
        elif not given.get("keys_as_values"):
            given.pop("full_kv_heads", None)  # as in transformers
        absent = {name for name in ("shared_kv_layers", "layer_input_width") if given.get(name) == 0}
        if given.get("layer_input_width", 0) == 0:
            absent.add("layer_input_vocab")
        elif "layer_input_vocab" not in given:
            raise UserError("required field(s) missing: vocab_size_per_layer_input.")
        read = {name: checked(name, value) for name, value in given.items() if name not in absent}
        return read | {"windows": windows}

    def _full_layers(self, file: ConfigFile, given: Any, windows: Sequence[int | None]) -> dict[str, Any]:
        """Reads `per_layer_config`; `given` has the fields of `DecoderConfig` that other HF fields set."""
        per_layer = file.fields["per_layer_config"]
        if given & {"full_head_dim", "full_kv_heads"}:
            raise UserError("per_layer_config and global_head_dim (or num_global_key_value_heads): keep one of them.")
        full = {str(layer) for layer, window in enumerate(windows) if window is None}
        if not isinstance(per_layer, Mapping):
            raise UserError(f"per_layer_config must be a mapping, not {per_layer!r}.")
        entries = list(per_layer.values())
        one = entries[0] if entries and isinstance(entries[0], Mapping) else {}
        # without an entry, all layers have the width and the number of the others
        if {str(key) for key in per_layer} not in (full, set()) or any(entry != one for entry in entries):
            raise UserError("per_layer_config must have equal mappings for all 'full_attention' layers and no others.")
        if unknown := sorted(map(str, one.keys() - {"head_dim", "num_key_value_heads"})):
            raise UserError(f"per_layer_config: {', '.join(unknown)} is not supported.")
        heads = {"full_kv_heads": one["num_key_value_heads"]} if "num_key_value_heads" in one else {}
        return {"full_head_dim": one.get("head_dim", file.fields["head_dim"])} | heads

    def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        written = {hf: values[ours] for ours, hf in LAYER_NAMES.items()}
        defaults = {"full_head_dim": values["head_dim"], "layer_input_vocab": values["vocab_size"]}
        for ours, default in (defaults | {"layer_input_width": 0}).items():
            written[LAYER_NAMES[ours]] = values[ours] or default
        return super().write(values) | written


class RotaryLayers(TwoWay):
    """Which layers have rotary positions.

    Contrary to its name, the HF field `no_rope_layers` has a 1 for each layer with rotary positions, and a 0 for each
    other layer. Without this field, every `no_rope_layer_interval`-th layer (by default every fourth) has no rotary
    positions.
    """

    options = frozenset({"rotary"})
    hf = frozenset({"no_rope_layers", "no_rope_layer_interval"})

    def read(self, file: ConfigFile) -> dict[str, Any]:
        if file.fields.get("no_rope_layers") is None:
            interval = checked("no_rope_layer_interval", file.fields.get("no_rope_layer_interval") or 4)
            return {"rotary": tuple(bool((layer + 1) % interval) for layer in range(file.layers))}
        kinds = file.per_layer("no_rope_layers")
        if any(kind not in (0, 1) for kind in kinds):
            raise UserError(f"no_rope_layers must contain only 0 and 1, not {kinds!r}.")
        return {"rotary": tuple(bool(kind) for kind in kinds)}

    def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {"no_rope_layers": [int(rotates) for rotates in values["rotary"]]}


_SPELLINGS = {
    "number": ("num_experts", "num_local_experts"),
    "per_token": ("num_experts_per_tok", "experts_per_token", "top_k_experts"),
}
"""The HF fields of a field of `Experts`, of any family. transformers 5 writes other ones than transformers 4."""


class ExpertLayers(TwoWay):
    """The mixture of experts, and the layers with experts: every `decoder_sparse_step`-th layer, except those in
    `mlp_only_layers`.

    Args:
      fixed: the fields of `Experts` that are equal in all models of the family.
      names: the HF fields of an export, if they differ from `EXPERT_NAMES`.
      others: further HF fields of the family with the same meaning.
      dense_layers: whether the family has HF fields for layers without experts.
      switch: HF field of whether a model has experts; None: every model of the family has.
    """

    def __init__(
        self,
        fixed: Mapping[str, Any],
        *,
        names: Mapping[str, str] = MappingProxyType({}),
        others: Set[str] = frozenset(),
        dense_layers: bool = False,
        switch: str | None = None,
    ):
        self.fixed = fixed
        self.names = {ours: hf for ours, hf in {**EXPERT_NAMES, **names}.items() if ours not in fixed}
        self.dense_layers = dense_layers
        self.switch = switch
        self.options = {"experts", "expert_layers"} if dense_layers else {"experts"}
        self.needed = {"experts"} if switch is None else set()
        layers = {"decoder_sparse_step", "mlp_only_layers"} if dense_layers else set()
        self.hf = {*self.names.values(), *others, *layers} | (set() if switch is None else {switch})

    def read(self, file: ConfigFile) -> dict[str, Any]:
        if self.switch is not None and not file.fields.get(self.switch):
            return {}
        given = {ours: self._given(ours, file.fields) for ours in self.names}
        if given["number"] is None:
            raise UserError("required field(s) missing: num_experts.")
        numbers = {ours: checked(ours, value, EXPERT_NAMES) for ours, value in given.items()}
        dense = file.fields.get("mlp_only_layers") or []
        count = file.layers
        if not isinstance(dense, list) or not all(type(layer) is int and 0 <= layer < count for layer in dense):
            raise UserError(f"mlp_only_layers must be a list of layer numbers from 0 to {count - 1}, not {dense!r}.")
        step = checked("decoder_sparse_step", file.fields.get("decoder_sparse_step") or 1)
        layers = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(count))
        return {"experts": Experts(**numbers, **self.fixed), "expert_layers": layers}

    def _given(self, ours: str, fields: Mapping[str, Any]) -> Any:
        spellings = _SPELLINGS.get(ours) or (self.names[ours],)
        given = {name: fields[name] for name in spellings if fields.get(name) is not None}
        values = list(given.values())
        if any(value != values[0] for value in values):
            raise UserError(f"{' and '.join(given)} are both given and differ; keep one of them.")
        return values[0] if values else None

    def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        experts: Experts | None = values["experts"]
        switch = {} if self.switch is None else {self.switch: experts is not None}
        if experts is None:
            return switch
        result = switch | {hf: getattr(experts, ours) for ours, hf in self.names.items()}
        if self.dense_layers:
            dense = [layer for layer, has_experts in enumerate(values["expert_layers"]) if not has_experts]
            result |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
        return result

    def unsupported(self, values: Mapping[str, Any]) -> str | None:
        experts: Experts | None = values["experts"]
        differs = any(getattr(experts, ours, value) != value for ours, value in self.fixed.items())
        return str(experts) if differs else None


class RecurrentLayers(TwoWay):
    """The sizes of recurrent layers, and which layers are recurrent: those of the type 'linear_attention', or without
    `layer_types` all but every `full_attention_interval`-th one (by default every fourth)."""

    options = frozenset({"delta_rule", "recurrent_layers"})
    hf = frozenset({"full_attention_interval", *DELTA_NAMES.values()})
    required = tuple(DELTA_NAMES.values())

    def read(self, file: ConfigFile) -> dict[str, Any]:
        rule = DeltaRule(**{ours: checked(ours, file.fields[hf], DELTA_NAMES) for ours, hf in DELTA_NAMES.items()})
        if file.fields.get("layer_types"):
            layers = tuple(kind == "linear_attention" for kind in file.per_layer("layer_types"))
        else:
            interval = checked("full_attention_interval", file.fields.get("full_attention_interval") or 4)
            layers = tuple(bool((layer + 1) % interval) for layer in range(file.layers))
        if all(layers):
            raise UserError("every layer is recurrent ('linear_attention'); at least one must have 'full_attention'.")
        return {"delta_rule": rule, "recurrent_layers": layers}

    def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        if (rule := values["delta_rule"]) is None:
            return {}
        layers = ["linear_attention" if recurrent else "full_attention" for recurrent in values["recurrent_layers"]]
        return {hf: getattr(rule, ours) for ours, hf in DELTA_NAMES.items()} | {"layer_types": layers}
