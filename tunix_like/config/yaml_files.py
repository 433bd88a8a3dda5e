"""Reads and writes YAML: a strict loader with the number syntax of JSON, and errors that name file, line and remedy."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tunix_like.errors import UserError
from tunix_like.runtime.input_files import file_problem


class Loader(yaml.SafeLoader):
    """Loads YAML with the number syntax of JSON: 1e-3 is a float; 010, 1:30 and 2020-01-01 are text.

    Raises an error for duplicate keys, for tags, for aliases (they allow cycles and exponential expansion), and for
    `{a:1}`, which YAML parses as a key 'a:1' without a value.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        mark = typing.cast(Any, event).start_mark
        if isinstance(event, yaml.AliasEvent):
            problem = (
                f"'*{event.anchor}' is an alias, which is not supported; write the value itself (text that begins with "
                "* needs quotes)"
            )
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        if getattr(event, "tag", None) is not None:
            problem = "tags (!...) are not supported; write a plain value (text that begins with ! needs quotes)"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key '{key.value}' is given twice", problem_mark=key.start_mark)
            seen.add(key.value)
        if node.flow_style:
            for key, value in node.value:
                _check_colon(key, value)
        return super().construct_mapping(node, deep)


def _check_colon(key: yaml.Node, value: yaml.Node) -> None:
    """Raises `MarkedYAMLError` for an entry of a mapping in braces that is written as `name:value` or `name=value`."""
    plain = isinstance(key, yaml.ScalarNode) and key.style is None
    entry = re.fullmatch(r"([^:=]+)[:=](.+)", key.value) if plain else None
    if entry is not None and isinstance(value, yaml.ScalarNode) and value.value == "":
        problem = (
            f"'{{{key.value}}}' is parsed as a key without a value; write {{{entry[1]}: {entry[2]}}}, with a space "
            "after the colon (text in braces needs quotes)"
        )
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)


class Dumper(yaml.SafeDumper):
    """Writes YAML. Strings that `Loader` would read as numbers are quoted."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_NUMBERS = {
    "tag:yaml.org,2002:int": re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$"),
    "tag:yaml.org,2002:float": re.compile(
        r"(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan)$"
    ),
}


def _use_numbers(resolver: Any) -> None:
    replaced = {*_NUMBERS, "tag:yaml.org,2002:timestamp"}
    resolver.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in rules if tag not in replaced]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for tag, pattern in _NUMBERS.items():
        resolver.add_implicit_resolver(tag, pattern, list("-+.0123456789"))


PACKAGE = Path(__file__).parents[1]
_EXAMPLES = next((each for each in (PACKAGE / "examples", PACKAGE.parent / "examples") if each.is_dir()), PACKAGE)
"""The shipped configs: in the installed package, or in the checkout."""

SHIPPED = ("maze*.yaml", "debug/*.yaml", "gsm8k/*.yaml", "smollm2/*.yaml")
"""Those that need no other file; `setup.py` installs them."""

_use_numbers(Loader)
_use_numbers(Dumper)


def config_file(path: Path) -> Path:
    """Returns `path`, or the file of a shipped config if it is a name such as `maze` or `gsm8k/qwen3_0.6b`."""
    shipped = _EXAMPLES / f"{path}.yaml"
    return shipped if not path.is_absolute() and not path.exists() and shipped.is_file() else path


def shipped_configs() -> list[str]:
    """Returns the names of the configs that are installed with the package."""
    files = [file for pattern in SHIPPED for file in _EXAMPLES.glob(pattern)]
    return sorted(file.relative_to(_EXAMPLES).as_posix().removesuffix(".yaml") for file in files)


def read_mapping(path: Path) -> Mapping[Any, Any]:
    """Reads a YAML file whose content is a mapping. An empty file gives an empty mapping.

    Raises:
      UserError: the file cannot be read or parsed, or its content is not a mapping. The message names the file and, if
        known, the line.
    """
    if str(path).startswith("package:") or path.suffix == ".gguf" or (path / "config.json").is_file():
        raise UserError(f"{path} is a model; give the path of a YAML file, in which model.path can be {path}.")
    others = (path.with_suffix(suffix) for suffix in (".yaml", ".yml"))
    if not path.exists() and (other := next((each for each in others if each.is_file()), None)):
        raise UserError(f"{path}: there is no such file. Did you mean '{other}'?")
    if problem := file_problem(path):
        raise UserError(
            f"{path}: cannot read this config file (it {problem}); give the path of a YAML file, or a shipped config: "
            f"{', '.join(shipped_configs())}."
        )
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=Loader)  # Loader is a SafeLoader
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path}{_problem(error)}") from None
    except RecursionError:
        raise UserError(f"{path}: nested too deeply; a config file contains sections and their keys.") from None
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise UserError(
            f"{path}: a config file is a mapping of sections, but this one contains a {type(values).__name__}."
        )
    return values


def _problem(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f", line {error.problem_mark.line + 1}: {error.problem}."
    return f": this is not valid YAML in UTF-8 ({error})."


def parse_override(text: str, name: str) -> Any:
    """Parses the value of the override `name=text`. Raises UserError if the text is not valid YAML."""
    try:
        return yaml.load(text, Loader=Loader)
    except (yaml.YAMLError, ValueError) as error:
        problem = getattr(error, "problem", None) or error
        if type(error) is yaml.MarkedYAMLError:  # raised by `Loader`, whose messages contain the remedy
            raise UserError(f"override {name}={text}: {problem}.") from None
        raise UserError(f"override {name}={text}: the value is not valid YAML ({problem}); quote it.") from None
    except RecursionError:
        raise UserError(f"override {name}={text:.40}...: nested too deeply.") from None


def text_of(text: str) -> str | None:
    """Parses the value that the command line gives for a config key of type text. Returns None for `null`, and a text
    in YAML quotes without the quotes. Any other text is returned unchanged, so `{question}` needs no quotes."""
    try:
        value = yaml.load(text, Loader=Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    return value if value is None or isinstance(value, str) else text
