"""What the entries of `data.sources` say: each is the `data` section of one source, and its place in the mix.

It knows keys, types and which keys contradict each other. It does NOT know any row, or what an estimator computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tunix_like.algorithms.registry import check_parameters
from tunix_like.config.load import read_section
from tunix_like.config.schema import AlgorithmConfig, DataConfig, check_ranges, key
from tunix_like.errors import UserError, nearest

_OF_THE_RUN = ("batch_size", "shuffle", "overlong_prompts")
_OF_A_SOURCE = tuple(
    field.name for field in dataclasses.fields(DataConfig) if field.name not in (*_OF_THE_RUN, "sources")
)
_OF_AN_ESTIMATOR = ("advantage_estimator", "k", "truncation_order", "ddof")


@dataclasses.dataclass(frozen=True)
class _Share:
    """The keys of an entry that no section has."""

    section = "data"
    label: str | None = key(doc="what rows, metrics and messages call the source; unset: its name")
    weight: float | None = key(doc="share of the training prompts, as a ratio; unset: by number of rows", above=0)

    def __post_init__(self) -> None:
        check_ranges(self, self.section)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One entry of `data.sources`.

    Attributes:
      place: where it stands, `data.sources[0]`.
      label: what its rows carry in the column `data_source`.
      weight: its share of the training prompts relative to the others', or None: by number of rows.
      config: the `data` section of a run that had this source alone.
      estimator: those of `advantage_estimator, k, truncation_order, ddof` that it sets.
    """

    place: str
    label: str
    weight: float | None
    config: DataConfig
    estimator: dict[str, Any]


def entries(config: DataConfig) -> list[Entry]:
    """The sources of a mix, from `data.sources`; none for any other source.

    Raises:
      UserError: an unknown key, a value of the wrong type or out of range, doubled labels, weights in some entries
        only, keys beside `data.sources` that belong into an entry, or `data.sources` without a mix.
    """
    if config.name != "mix":
        if config.sources is not None:
            raise UserError(f"data.sources is read by data.name=mix only, not by {config.name}; set data.name=mix.")
        return []
    if not config.sources:
        raise UserError("data.sources: data.name=mix needs a list of sources, each {name: ..., <its keys>}.")
    plain = DataConfig()
    for name in _OF_A_SOURCE:
        if name != "name" and getattr(config, name) != getattr(plain, name):
            raise UserError(
                f"data.{name} stands beside data.sources, where no source reads it; write it into the entries of "
                "data.sources that it is meant for."
            )
    found = [_entry(values, f"data.sources[{i}]") for i, values in enumerate(config.sources)]
    labels = [entry.label for entry in found]
    for i, label in enumerate(labels):
        if label in labels[:i]:
            first = found[labels.index(label)].place
            raise UserError(f"{found[i].place}: {first} is called '{label}' too; give one of them another `label`.")
    unset = [entry.place for entry in found if entry.weight is None]
    if 0 < len(unset) < len(found):
        raise UserError(
            f"{unset[0]}.weight is unset, but other entries have one; give every entry a weight, or none (then each "
            "has its share by its number of rows)."
        )
    return found


def _entry(values: Mapping[str, Any], place: str) -> Entry:
    own = [field.name for field in dataclasses.fields(_Share)]
    known = [*_OF_A_SOURCE, *own, *_OF_AN_ESTIMATOR]
    for name in values:
        if name in _OF_THE_RUN:
            raise UserError(f"{place}.{name}: it is one for all sources; write it beside data.sources.")
        if name not in known:
            raise UserError(f"{place}.{name}: unknown key. {nearest(str(name), known)}")
    if values.get("name") is None:
        raise UserError(f"{place}.name is missing: it says which source this is, e.g. {{name: jsonl, path: ...}}.")
    if values["name"] == "mix":
        raise UserError(f"{place}.name: a mix holds no mix; write its entries into this list.")

    def section(cls: type, names: Sequence[str]) -> Any:
        return read_section(cls, {name: value for name, value in values.items() if name in names}, place)

    share, config = section(_Share, own), section(DataConfig, _OF_A_SOURCE)
    estimator = dataclasses.asdict(section(AlgorithmConfig, _OF_AN_ESTIMATOR))
    label = config.name if share.label is None else share.label
    chosen = {name: estimator[name] for name in _OF_AN_ESTIMATOR if estimator[name] is not None}
    return Entry(place, label, share.weight, config, chosen)


def template_variables(config: DataConfig) -> dict[str, Any]:
    """What the run's chat template is given: `chat_template_args`, in which the sources of a mix must agree.

    Raises:
      UserError: naming two entries that differ.
    """
    found = entries(config)
    first, *others = [entry.config.chat_template_args or {} for entry in found] or [config.chat_template_args or {}]
    for i, other in enumerate(others, start=1):
        if other != first:
            raise UserError(
                f"{found[i].place}.chat_template_args is {other}, that of {found[0].place} is {first}: one tokenizer "
                "renders the prompts of all sources; give every entry the same."
            )
    return first


def source_estimators(config: DataConfig, algorithm: AlgorithmConfig) -> dict[str, dict[str, Any]]:
    """What the learner is told of those sources of a mix that set an estimator or its parameters, by label.

    Args:
      algorithm: resolved; its estimator is that of entries which name none.

    Raises:
      UserError: an unknown estimator, or parameters that it does not take, naming the entry.
    """
    found = {}
    for entry in entries(config):
        if not entry.estimator:
            continue
        params = dict(entry.estimator)
        name = str(params.pop("advantage_estimator", algorithm.advantage_estimator))
        try:
            check_parameters(name, params, algorithm.num_generations, key=entry.place)
        except UserError as error:
            own = f"{entry.place}.advantage_estimator"
            raise UserError(str(error).replace("algorithm.advantage_estimator", own, 1)) from error
        found[entry.label] = {"advantage_estimator": name, **params}
    return found
