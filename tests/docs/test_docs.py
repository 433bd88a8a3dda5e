"""Tests the examples in README and docs without a run: configs load, commands parse, and code compiles and imports
existing names."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

import tunix_like
import tunix_like.algorithms.advantages
from tunix_like.algorithms.losses import POLICY_LOSSES
from tunix_like.algorithms.registry import ADVANTAGE_ESTIMATORS
from tunix_like.cli import main as cli
from tunix_like.cli.commands import function_of
from tunix_like.config.load import load
from tunix_like.data import SOURCES
from tunix_like.environments.registry import ENVIRONMENTS
from tunix_like.rewards import REWARDS
from tunix_like.runs.sweep import read_sweep

ESTIMATOR = "advantage_estimator"
ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^( *)```(\w+)[^\n]*\n(.*?)^\1```", re.M | re.S)


def blocks(*languages):
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in BLOCK.finditer(text):
            if block[2] in languages:
                place = f"{page.name}:{text[: block.start()].count(chr(10)) + 1}"
                found.append(pytest.param(block[3], id=place))
    return found


def test_documentation_has_blocks_of_each_kind():
    assert min(len(blocks(kind)) for kind in ("python", "yaml", "bash")) > 3


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_blocks_load_as_configs(text, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "shown.yaml").write_text(text)
    if "\nparameters:" in text:
        assert read_sweep(tmp_path / "shown.yaml").trials
        return
    config = load(tmp_path / "shown.yaml")
    for section, values in yaml.safe_load(text).items():
        assert hasattr(config, section) and values


@pytest.mark.parametrize("text", blocks("json"))
def test_json_blocks_parse(text):
    assert [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("text", blocks("python"))
def test_code_compiles_and_imports_existing_names(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("tunix_like"):
            module = importlib.import_module(str(node.module))
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tunix_like":
            module = importlib.import_module("tunix_like")
            assert hasattr(module, node.attr), node.attr


@pytest.mark.parametrize("text", blocks("bash"))
def test_commands_parse(text):
    for line in re.split(r"\n|&&", text.replace("\\\n", " ")):
        shown = line.partition("tunix-like ")[2]
        if not shown:
            continue
        inside = shown.replace('"', "") if shown.count('"') % 2 else shown  # a command within the quotes of another one
        arguments = cli.parse(shlex.split(inside, comments=True))
        assert callable(function_of(arguments.function)), "anything it does not know ends in a status"
        named = getattr(arguments, "config", None)
        if named and named.startswith("examples/"):
            load(ROOT / named, [each for each in arguments.overrides if not each.startswith("rewards")])


def anchors(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = [re.sub(r"[^\w\- ]", "", title.lower()) for title in re.findall(r"^#+ (.*)$", text, re.M)]
    return {re.sub(r"[- ]+", "-", title) for title in titles}


@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in PAGES])
def test_links_lead_to_files_and_headings(page):
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_packages_have_a_row_and_a_map_of_files_that_exist():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", text.split("##")[0], re.M)))
    packages = {path.parent.name: path for path in (ROOT / "tunix_like").glob("*/__init__.py")}
    assert {*packages, "errors", "types"} == set(listed)
    for package, path in packages.items():
        map_of_files = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        named = re.findall(r"`(\w+\.py)`", map_of_files)
        missing = [name for name in named if not (path.parent / name).is_file()]
        assert named and not missing, (package, missing)


def test_python_reference_has_every_public_name():
    listed = re.findall(r"^::: tunix_like\.(\w+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.M)
    assert sorted(listed) == sorted(set(tunix_like.__all__) - {"__version__"})


@pytest.mark.parametrize("name", sorted(cli.build_parser()._subparsers._group_actions[0].choices))
def test_command_page_lists_every_option(name):
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    section = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    actions = cli.build_parser()._subparsers._group_actions[0].choices[name]._actions
    options = {option for action in actions for option in action.option_strings if option.startswith("--")} - {"--help"}
    assert section and not [option for option in options if f"`{option}" not in section and f"{option} " not in section]
    several = text.partition("\n## Several processes\n")[2]
    assert all(f"| `{option}" in several for option in options if "process" in option or option == "--coordinator")


CLASSES = {name: each for name, each in ENVIRONMENTS.items() if not isinstance(each, str)}


def built_in(functions):
    """Returns the names of functions of this package; other tests register their own."""
    return {name for name, function in functions.items() if function.__module__.startswith("tunix_like.")}


@pytest.mark.parametrize(
    ("names", "page", "key"),
    [
        (set(SOURCES), "data", "data.name"),
        (built_in({name: each.function for name, each in ADVANTAGE_ESTIMATORS.items()}), "algorithms", ESTIMATOR),
        (built_in({name: each.function for name, each in POLICY_LOSSES.items()}), "algorithms", "policy_loss_fn"),
        (built_in(REWARDS), "rewards", None),
        ({"openenv", "program"} | built_in(CLASSES), "environments", "environment.name"),
    ],
    ids=["sources", "estimators", "losses", "rewards", "environments"],
)
def test_registered_names_are_on_their_page_and_in_the_comment_of_their_key(names, page, key):
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    assert not [name for name in sorted(names) if not re.search(rf"`{name}[`(]|name: {name}\b", text)]
    if key is not None:
        table = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
        (row,) = [line for line in table.splitlines() if re.match(rf"\| `(algorithm\.)?{key}` ", line)]
        assert names <= set(re.findall(r"\w+", row))
