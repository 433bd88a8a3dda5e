"""Loads a frozen `Config` from a YAML file and `key=value` overrides, and writes it back to YAML.

This module checks types and ranges. The learner checks whether the values of several keys are compatible.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from ml_collections import ConfigDict, config_dict

from tunix_like.config.schema import Config
from tunix_like.config.yaml_files import Dumper, config_file, parse_override, read_mapping, text_of
from tunix_like.errors import UserError
from tunix_like.runtime.atomic import write_atomically

_NAMES = {str: "string", int: "integer", float: "number", bool: "true/false", dict: "mapping", list: "list"}
_BOUNDS = {"at_least": "at least", "above": "above", "at_most": "at most", "below": "below"}


_hints: Callable[[Any], dict[str, Any]] = functools.cache(typing.get_type_hints)


def load(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Loads a config: the defaults, then the YAML file at `path` (None: no file), then the `a.b=value` overrides.

    Later values replace earlier ones.

    Raises:
      UserError: the file is missing or cannot be parsed, a key is unknown, a value has the wrong type or is out of
        range, or an override is not `key=value`. The message names the file, the full path of the key and the remedy.
    """
    leaves = dict(_leaves(Config))
    tree = ConfigDict(_defaults(Config()))
    tree.lock()
    if path is not None:
        for name, value in _flatten(read_mapping(config_file(Path(path))), leaves, f"{path}: "):
            _assign(tree, name, _converted(value, leaves[name], f"{path}: {name}"))
    for override in overrides:
        _override(tree, override, leaves)
    return typing.cast(Config, _build(Config, tree.to_dict(), ""))


def read_section(cls: type, values: Mapping[str, Any], path: str) -> Any:
    """Builds a config dataclass from a mapping that is an item of a list in a config, with the checks of `load`.

    Args:
      values: values by key; every key must be a field of `cls`.
      path: path of the mapping in the config, for error messages.

    Raises:
      UserError: a value has the wrong type or is out of range; the message starts with `path`.
    """
    hints = _hints(cls)
    return _build(cls, {name: _converted(value, hints[name], f"{path}.{name}") for name, value in values.items()}, path)


def as_dict(config: Any) -> dict[str, Any]:
    """Converts a config or a section to plain dicts, lists and scalars, without the keys that only Python can set."""
    result = {}
    for field in _fields(type(config)):
        value = getattr(config, field.name)
        result[field.name] = as_dict(value) if dataclasses.is_dataclass(value) else copy.deepcopy(value)
    return result


def save(config: Config, path: str | Path) -> None:
    """Writes every key to a YAML file; `load` of that file gives an equal config.

    A file with the same content is not rewritten. A file with other content is replaced atomically, so a killed process
    leaves either the old or the new file.
    """
    path = Path(path)
    text = yaml.dump(as_dict(config), Dumper=Dumper, sort_keys=False)
    if not path.is_file() or path.read_bytes() != text.encode():
        write_atomically(path, text)


def read_yaml(path: str | Path) -> Mapping[Any, Any]:
    """Reads a config file that `save` wrote. Parses YAML like `load`, but does not check the keys and values.

    Raises:
      UserError: the file cannot be read, is not valid YAML, or is empty.
    """
    cure = "This file is written by the run: restore a copy of it, or use another folder."
    try:
        values = read_mapping(config_file(Path(path)))
    except UserError as error:
        raise UserError(f"{error} {cure}") from None
    if not values:
        raise UserError(f"{path}: this file is empty. {cure}")
    return values


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Returns the dotted keys whose values differ between the configs `a` and `b` (results of `as_dict`), each as the
    text `key: value in a -> value in b`."""
    left, right = dict(flat(a)), dict(flat(b))
    return [
        f"{name}: {left.get(name, '(absent)')!r} -> {right.get(name, '(absent)')!r}"
        for name in [*left, *(name for name in right if name not in left)]
        if name not in left or name not in right or left[name] != right[name]
    ]


def with_defaults(saved: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `saved` with the keys of `defaults` that it lacks, also in nested mappings.

    Settings that an earlier version wrote lack the keys that were added later. The default of such a key has the effect
    that the earlier version had.
    """
    result = dict(defaults) | dict(saved)
    for name, value in defaults.items():
        if isinstance(value, Mapping) and isinstance(result[name], Mapping):
            result[name] = with_defaults(result[name], value)
    return result


class Key(NamedTuple):
    """The documentation of a key.

    Attributes:
      name: dotted name.
      default: as YAML.
      doc: its meaning.
      rule: its allowed values.
      may_change: whether a resumed run may have another value than its checkpoint.
    """

    name: str
    default: str
    doc: str
    rule: str
    may_change: bool


def keys(section: Any = None, path: str = "") -> Iterator[Key]:
    """Yields the documentation of every key of a config section (None: of all sections) in declaration order."""
    section = Config() if section is None else section
    hints = _hints(type(section))
    for field in _fields(type(section)):
        value = getattr(section, field.name)
        name = f"{path}.{field.name}".lstrip(".")
        if dataclasses.is_dataclass(value):
            yield from keys(value, name)
            continue
        text = yaml.dump(value, Dumper=Dumper, default_flow_style=True, width=10**6).removesuffix("...\n").strip()
        rule = _rule(field, hints[field.name])
        yield Key(name, text, field.metadata["doc"], rule, field.metadata["may_change"])


def _fields(cls: type) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(cls) if not field.metadata.get("python_only")]


def _leaves(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted name and the declared type of every key in a config dataclass."""
    hints = _hints(cls)
    for field in _fields(cls):
        hint = hints[field.name]
        name = prefix + field.name
        if dataclasses.is_dataclass(hint):
            yield from _leaves(typing.cast(type, hint), f"{name}.")
        else:
            yield name, hint


def _is_section(name: str, leaves: Mapping[str, Any]) -> bool:
    return any(leaf.startswith(f"{name}.") for leaf in leaves)


def _options(hint: Any) -> tuple[Any, ...]:
    """Returns the alternatives of a union type without None; for a plain type, the type itself."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return tuple(option for option in typing.get_args(hint) if option is not types.NoneType)
    return (hint,)


def _describe(hint: Any) -> str:
    """Describes a declared type in words, e.g. 'list of integers or null'."""
    names = [_NAMES[typing.get_origin(option) or option] for option in _options(hint)]
    for index, option in enumerate(_options(hint)):
        if typing.get_origin(option) is list:
            item = typing.get_args(option)[0]
            names[index] += f" of {_NAMES[typing.get_origin(item) or item]}s"
    return " or ".join(names + (["null"] if _optional(hint) else []))


def _optional(hint: Any) -> bool:
    return types.NoneType in typing.get_args(hint)


def _defaults(section: Any) -> dict[str, Any]:
    """Returns the defaults of a config section as nested dicts. A default of a key of type str, int, float or bool is
    returned as it is. Any other default is wrapped in a `FieldReference` of type `object`, so that ml_collections
    accepts values of any type for its key."""
    hints = _hints(type(section))
    result = {}
    for field in _fields(type(section)):
        value = getattr(section, field.name)
        hint = hints[field.name]
        if dataclasses.is_dataclass(value):
            result[field.name] = _defaults(value)
        elif hint in (str, int, float, bool):
            result[field.name] = value
        else:
            result[field.name] = config_dict.FieldReference(copy.deepcopy(value), field_type=object)
    return result


def _build(cls: type, values: Mapping[str, Any], path: str) -> Any:
    """Builds the frozen dataclass `cls` from nested mappings whose values have the declared types. The error for a
    value out of range names the full path of the key."""
    hints = _hints(cls)
    arguments = {}
    for name, value in values.items():
        nested = dataclasses.is_dataclass(hints[name])
        arguments[name] = _build(hints[name], value, f"{path}.{name}".lstrip(".")) if nested else value
    try:
        return cls(**arguments)
    except UserError as error:
        section = getattr(cls, "section", "")
        raise UserError(path + str(error).removeprefix(section)) from None


def _converted(value: Any, hint: Any, name: str) -> Any:
    """Converts `value` to the declared type, or raises a `UserError` that names the key, the value and the type."""
    if value is None and _optional(hint):
        return None
    for option in _options(hint):
        try:
            return _fit(value, option)
        except TypeError:
            continue
    shown = "null" if value is None else f"{value!r} ({_NAMES.get(type(value), type(value).__name__)})"
    meaning = next((f" ({key.doc})" for key in keys() if name.endswith(key.name)), "")
    if isinstance(value, float) and float in _options(hint):
        raise UserError(f"{name}: got {value}; expected: a finite number{meaning}.")
    raise UserError(f"{name}: got {shown}; expected: {_describe(hint)}{meaning}.")


def _fit(value: Any, hint: Any) -> Any:
    """Returns `value` as the type `hint` (a plain type, list[...] or dict[...]). Raises TypeError if the value does not
    have this type."""
    origin = typing.get_origin(hint) or hint
    if origin is float:
        return _number(value)
    if not isinstance(value, origin) or (isinstance(value, bool) and origin is not bool):
        raise TypeError
    if origin is list:
        return [_fit(item, typing.get_args(hint)[0]) for item in value]
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise TypeError from None
    if not math.isfinite(number):
        raise TypeError
    return number


def _flatten(
    values: Mapping[Any, Any], leaves: Mapping[str, Any], source: str, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yields the dotted name and the value of every key in the nested mapping of a config file.

    Raises:
      UserError: a key is unknown, or a section is not a mapping.
    """
    for key, value in values.items():
        name = f"{prefix}{key}"
        _refuse_secret(name)
        if "." in str(key):
            raise UserError(
                f"{source}'{name}': dotted keys work on the command line only; in a file, write the section, then its "
                "keys."
            )
        if name in leaves:
            yield name, value
        elif not _is_section(name, leaves):
            raise UserError(f"{source}unknown key '{name}'. {_hint(name, leaves)}")
        elif isinstance(value, Mapping):
            yield from _flatten(value, leaves, source, f"{name}.")
        elif value is not None:  # a section whose keys are all commented out reads as null
            colon = re.fullmatch(r"(\w+):(\S+)", value) if isinstance(value, str) else None
            hint = f" (a space must follow the colon: '{colon[1]}: {colon[2]}')" if colon else ""
            raise UserError(f"{source}{name}: got {value!r}; this is a section: indent its keys below it{hint}.")


def _refuse_secret(name: str) -> None:
    """Raises UserError if the name of a key ends with `api_key` or `password`. The message does not show the value."""
    if name.endswith(("api_key", "password")):
        raise UserError(
            f"{name}: keys and passwords do not belong in files and commands; set an environment variable instead "
            "(VLLM_API_KEY for the servers of rollout.urls)."
        )


def _hint(name: str, leaves: Mapping[str, Any]) -> str:
    """Returns a hint that names the valid keys nearest to an unknown key: a similar key of the same section (or
    one whose beginning or initials it is), else the
    same key of another section, else any similar name."""
    section, _, last = name.rpartition(".")
    siblings = sorted(leaf.rpartition(".")[2] for leaf in leaves if leaf.rpartition(".")[0] == section)
    sections = sorted({leaf.rpartition(".")[0] for leaf in leaves})
    initials = {key: "".join(word[0] for word in key.split("_")) for key in siblings}
    abbreviated = [key for key in siblings if last and (key.startswith(last) or initials[key] == last)]
    near = [f"{section}.{key}" for key in abbreviated[:1] or difflib.get_close_matches(last, siblings, n=1)]
    if not siblings:  # the section is misspelt: `trainng.max_steps` means `training.max_steps`, not `sft.max_steps`
        candidates = (f"{close}.{last}" for close in difflib.get_close_matches(section, sections, n=3))
        near = [name for name in candidates if name in leaves][:1]
    near = near or [leaf for leaf in leaves if leaf.endswith(f".{last}")]
    if not siblings:
        near = near or difflib.get_close_matches(name, [*leaves, *sections], n=1)
    hint = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
    return f"{hint}Keys of {section}: {', '.join(siblings)}." if siblings else f"{hint}Sections: {', '.join(sections)}."


def _override(tree: ConfigDict, override: str, leaves: Mapping[str, Any]) -> None:
    name, equals, text = override.partition("=")
    name = name.strip()
    _refuse_secret(name)
    if not equals or not name:
        raise UserError(f"override '{override}': write it as section.key=value.")
    free = next((leaf for leaf, hint in leaves.items() if name.startswith(f"{leaf}.") and _is_free(hint)), None)
    if free is not None:
        return _assign_inside(tree, free, name.removeprefix(f"{free}."), parse_override(text, name))
    if name not in leaves:
        if _is_section(name, leaves):
            example = next(leaf for leaf in leaves if leaf.startswith(f"{name}."))
            raise UserError(
                f"override '{override}': {name} is a section; set its keys one by one, e.g. {example}=value."
            )
        raise UserError(f"override '{override}': unknown key '{name}'. {_hint(name, leaves)}")
    hint = leaves[name]
    value = text_of(text) if _options(hint) == (str,) else parse_override(text, name)
    _assign(tree, name, _converted(value, hint, name))


def _is_free(hint: Any) -> bool:
    return any(typing.get_origin(option) is dict for option in _options(hint))


def _assign(tree: ConfigDict, name: str, value: Any) -> None:
    section, _, last = name.rpartition(".")
    for part in section.split("."):
        tree = tree[part]
    tree[last] = value


def _assign_inside(tree: ConfigDict, free: str, rest: str, value: Any) -> None:
    """Sets a key inside a config value that is a mapping, such as `model.config`. Creates missing mappings on the way.

    Args:
      tree: the config; changed in place.
      free: dotted name of the config key whose value is the mapping.
      rest: dotted path of the key to set inside this mapping.

    Raises:
      UserError: a value on the path `rest` is not a mapping.
    """
    whole: Any = tree.to_dict()
    for part in free.split("."):
        whole = whole[part]
    whole = copy.deepcopy(whole) or {}
    *parents, last = rest.split(".")
    inner = whole
    seen = free
    for part in parents:
        inner = inner.setdefault(part, {})
        seen = f"{seen}.{part}"
        if not isinstance(inner, dict):
            raise UserError(f"{free}.{rest}: {seen} is {inner!r}, which has no keys; set {seen} as a whole.")
    inner[last] = value
    _assign(tree, free, whole)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested mappings with their dotted names; an empty mapping is a leaf."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _rule(field: dataclasses.Field[Any], hint: Any) -> str:
    rule = field.metadata
    bounds = [f"{words} {rule[key]}" for key, words in _BOUNDS.items() if rule[key] is not None]
    if rule["choices"] is not None:
        number = [f"or {_describe(_options(hint)[0])}", *bounds] if bounds else []
        return ", ".join([*rule["choices"], *number, *(["null"] if _optional(hint) else [])])
    return ", ".join([_describe(hint), *bounds])
