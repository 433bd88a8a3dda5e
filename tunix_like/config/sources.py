"""Reads and checks the entries of `data.sources`, the sources of a mix.

An entry has the `data` keys of one source, and the label, the weight, the teacher and the advantage estimator of this
source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tunix_like.config.keys import check_ranges, key
from tunix_like.config.load import read_section
from tunix_like.config.schema import AlgorithmConfig, Config, DataConfig, TeacherConfig
from tunix_like.errors import UserError, nearest

ESTIMATOR_KEYS = ("k", "truncation_order", "ddof", "alpha", "coefficients", "weights", "statistic")
"""The keys of `algorithm` that are parameters of estimators."""

OF_THE_RUN = (
    *("batch_size", "shuffle", "overlong_prompts"),
    *("curriculum", "curriculum_correct", "curriculum_floor", "curriculum_discount"),
)
"""Keys of the section `data` that apply to the rows of any source."""

OF_OTHER_SOURCES = "teacher.path"
"""The key of the teacher of rows whose source has none of its own."""

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
    teacher: str | None = key(doc="teacher of its rows, as teacher.path; unset: that of teacher.path, if it is set")

    def __post_init__(self) -> None:
        check_ranges(self, self.section)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One entry of `data.sources`. `place` is its key, `label` the value of the column `data_source` in its rows,
    `weight` its share of the training prompts (None: by number of rows), `teacher` the path of its own teacher,
    `config` the `data` section of a run with this source only, and `estimator` the estimator and its parameters that
    the entry sets."""

    place: str
    label: str
    weight: float | None
    teacher: str | None
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
    return Entry(place, label, share.weight, share.teacher, config, chosen)


class NamedTeacher(NamedTuple):
    """A teacher that a config names.

    Attributes:
      key: the first key that names it: `OF_OTHER_SOURCES` or that of an entry.
      settings: the section `teacher` with the path of this teacher.
      sources: the labels of the entries of a mix whose rows it scores.
    """

    key: str
    settings: TeacherConfig
    sources: tuple[str, ...] = ()


def teachers_of(config: Config) -> list[NamedTeacher]:
    """Returns the teachers of a config, each path once. Rows of a source without a teacher of its own have that of
    `teacher.path`.

    Raises:
      UserError: a setting of the section `teacher` does not fit one of them, or no row has the teacher of
        `teacher.path`.
    """
    shared = config.teacher
    parts = entries(config.data)
    found = dict[str | None, NamedTeacher]()
    if shared.path is not None:
        found[shared.path] = NamedTeacher(OF_OTHER_SOURCES, shared)
    for entry in parts:
        key = f"{entry.place}.teacher"
        settings = shared if entry.teacher is None else shared.with_path(entry.teacher, key)
        if settings.path is not None:
            named = found.get(settings.path, NamedTeacher(key, settings))
            found[settings.path] = named._replace(sources=(*named.sources, entry.label))
    if parts and shared.path is not None and not found[shared.path].sources:
        raise UserError(
            f"{OF_OTHER_SOURCES}: every entry of data.sources has its own teacher, so no row has it. Unset it."
        )
    return list(found.values())


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
