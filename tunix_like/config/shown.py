"""What others may see of a configuration. Readers of model cards, reports and loggers must not get the keys, addresses,
paths and texts in it, so only what is known to be harmless is shown."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tunix_like.config.schema import SELF, Config
from tunix_like.config.urls import HUB_ID

HIDDEN = "(not shown)"
"""Stands for a value that is not shown."""

_NAMES = (
    "data.name",
    "algorithm.advantage_estimator",
    "algorithm.policy_loss_fn",
    "algorithm.statistic",
    "environment.name",
    "environment.tools",
    "rollout.engine",
    "lora.targets",
    "mesh.axis_names",
    "training.loggers",
)
_NUMBERS = tuple(f"algorithm.{name}" for name in ("k", "truncation_order", "alpha", "estimator_params", "loss_params"))
_ENTRIES = ("data.sources", "rewards.functions", "training.callbacks")
_NAME = re.compile(r"(?:[^:]*/)?([\w.+-]{1,60}(?::[\w.]{1,60})?)")  # of code: without the folder of its file


def _fields(section: Any, path: str = "") -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        name = f"{path}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from _fields(value, f"{name}.")
        elif not field.metadata.get("python_only"):
            yield name, value, field.metadata


_FILES = frozenset(
    {".json", ".jsonl", ".csv", ".tsv", ".parquet", ".gguf", ".yaml", ".yml", ".py", ".gz", ".zst", ".xz"}
)
_KEYS = {name: (default, metadata) for name, default, metadata in _fields(Config())}
_LAST = {name.rpartition(".")[2] for name in _KEYS} | {"weight"}


def given(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of the known keys in a nested configuration, by their dotted names; nothing is hidden."""
    out = {}
    for name in _KEYS:
        value: Any = settings
        for part in name.split("."):
            value = value.get(part, HIDDEN) if isinstance(value, Mapping) else HIDDEN
        if value is not HIDDEN:
            out[name] = value
    return out


def shown(key: str, value: Any) -> Any:
    """Returns the value of a known key, or what may be shown of it."""
    default, metadata = _KEYS[key]
    if value is None or _is_number(value) or value == default or value in (metadata["choices"] or ()):
        return value
    if isinstance(value, list):
        if key in _ENTRIES:
            return [_entry(item) for item in value]
        return [item if _is_number(item) else _name(item) if key in _NAMES else HIDDEN for item in value]
    if isinstance(value, Mapping) and key in _NUMBERS:
        return _numbers(value)
    if metadata["hub"] and isinstance(value, str):
        return value if _is_hub_id(value) or value == SELF else HIDDEN
    return _name(value) if key in _NAMES else HIDDEN


def shown_sections(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a nested configuration with what may be shown of it."""
    out: dict[str, Any] = {}
    for key, value in given(settings).items():
        *sections, name = key.split(".")
        place = out
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = shown(key, value)
    return out


def _is_hub_id(value: str) -> bool:
    """Returns whether a text is a hub id and not a path, as far as the text says."""
    looks_local = value.startswith("runs/") or Path(value).suffix in _FILES or Path(value).exists()
    return HUB_ID.fullmatch(value.partition(":")[0]) is not None and not looks_local


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def _name(value: Any) -> str:
    found = _NAME.fullmatch(value) if isinstance(value, str) else None
    return found[1] if found else HIDDEN


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if _is_number(value) else HIDDEN for name, value in values.items()}


def _entry(item: Any) -> Any:
    """Returns the name and the numbers of a reward function, callback or data source."""
    if not isinstance(item, Mapping):
        return HIDDEN
    numbers = {name: value for name, value in item.items() if name in _LAST and _is_number(value)}
    return {"name": _name(item.get("name")), **numbers}
