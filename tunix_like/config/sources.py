"""Reads and checks the entries of `data.sources`, the sources of a mix.

An entry has the `data` keys of one source, and the label, the weight and the advantage estimator of this source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tunix_like.config.keys import check_ranges, key
from tunix_like.config.load import read_section
from tunix_like.config.schema import AlgorithmConfig, DataConfig
from tunix_like.errors import UserError, nearest

ESTIMATOR_KEYS = ("k", "truncation_order", "ddof", "alpha", "coefficients", "weights", "statistic")
"""The keys of `algorithm` that are parameters of estimators."""

OF_THE_RUN = (
    *("batch_size", "shuffle", "overlong_prompts"),
    *("curriculum", "curriculum_correct", "curriculum_floor", "curriculum_discount"),
)
"""Keys of the section `data` that apply to the rows of any source."""

_OF_A_SOURCE = tuple(
    field.name for field in dataclasses.fields(DataConfig) if field.name not in (*OF_THE_RUN, "sources")
)
_OF_AN_ESTIMATOR = ("advantage_estimator", *ESTIMATOR_KEYS)


@dataclasses.dataclass(frozen=True)
class _Share:
    """The keys of an entry of `data.sources` that are keys neither of `data` nor of `algorithm`."""

    section = "data"
    label: str | None = key(doc="name of the source in rows, metrics and messages; unset: its `name`")
    weight: float | None = key(doc="share of the training prompts, as a ratio; unset: by number of rows", above=0)

    def __post_init__(self) -> None:
        check_ranges(self, self.section)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One entry of `data.sources`. `place` is its key, `label` the value of the column `data_source` in its rows,
    `weight` its share of the training prompts (None: by number of rows), `config` the `data` section of a run with this
    source only, and `estimator` the estimator and its parameters that the entry sets."""

    place: str
    label: str
    weight: float | None
    config: DataConfig
    estimator: dict[str, Any]


def entries(config: DataConfig) -> list[Entry]:
    """Parses the entries of `data.sources`; returns an empty list for any other source than `mix`."""
    if config.name != "mix":
        if config.sources is not None:
            raise UserError(f"data.sources is read by data.name=mix only, not by {config.name}; set data.name=mix.")
        return []
    if not config.sources:
        raise UserError("data.sources: data.name=mix needs a list of sources, each {name: ..., <its keys>}.")
    defaults = DataConfig()
    for name in _OF_A_SOURCE:
        if name != "name" and getattr(config, name) != getattr(defaults, name):
            raise UserError(
                f"data.{name} is set beside data.sources, but no source reads it there; move it into the entries of "
                "data.sources that need it."
            )
    result = [_entry(values, f"data.sources[{i}]") for i, values in enumerate(config.sources)]
    labels = [entry.label for entry in result]
    for i, label in enumerate(labels):
        if label in labels[:i]:
            first = result[labels.index(label)].place
            raise UserError(f"{result[i].place}: {first} has the label '{label}' too; set `label` in one of them.")
    unset = [entry.place for entry in result if entry.weight is None]
    if 0 < len(unset) < len(result):
        raise UserError(
            f"{unset[0]}.weight is unset, but other entries have a weight; set it in every entry, or in none. "
            "Without weights, the shares are proportional to the numbers of rows."
        )
    return result


def _entry(values: Mapping[str, Any], place: str) -> Entry:
    share_keys = [field.name for field in dataclasses.fields(_Share)]
    allowed = [*_OF_A_SOURCE, *share_keys, *_OF_AN_ESTIMATOR]
    for name in values:
        if name in OF_THE_RUN:
            raise UserError(f"{place}.{name} applies to all sources; set it as data.{name}, beside data.sources.")
        if name not in allowed:
            raise UserError(f"{place}.{name}: unknown key. {nearest(str(name), allowed)}")
    if values.get("name") is None:
        raise UserError(f"{place}.name is missing; set it to the name of a source, e.g. {{name: jsonl, path: ...}}.")
    if values["name"] == "mix":
        raise UserError(f"{place}.name=mix: a mix cannot contain a mix; write its entries into this list.")

    def section(cls: type, names: Sequence[str]) -> Any:
        return read_section(cls, {name: value for name, value in values.items() if name in names}, place)

    share, config = section(_Share, share_keys), section(DataConfig, _OF_A_SOURCE)
    estimator = dataclasses.asdict(section(AlgorithmConfig, _OF_AN_ESTIMATOR))
    label = (config.task or config.name) if share.label is None else share.label
    chosen = {name: estimator[name] for name in _OF_AN_ESTIMATOR if estimator[name] is not None}
    return Entry(place, label, share.weight, config, chosen)


def template_variables(config: DataConfig) -> dict[str, Any]:
    """Returns the variables of the chat template (`chat_template_args`), which must be equal in all entries of a
    mix."""
    parts = entries(config)
    first, *others = [entry.config.chat_template_args or {} for entry in parts] or [config.chat_template_args or {}]
    for i, other in enumerate(others, start=1):
        if other != first:
            raise UserError(
                f"{parts[i].place}.chat_template_args is {other}, but {parts[0].place}.chat_template_args is {first}. "
                "One tokenizer renders the prompts of all sources; set the same value in every entry."
            )
    return first
