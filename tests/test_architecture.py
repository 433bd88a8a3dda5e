"""Tests the structure of the source code: the direction of imports, and which libraries are imported where."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tunix_like"

ORDER = [
    "errors",
    "types",
    "runtime",
    "text",
    "tasks",
    "workers",
    "config",
    "algorithms",
    "storage",
    "rewards",
    "data",
    "models",
    "rollout",
    "environments",
    "evaluation",
    "step",
    "planning",
    "session",
    "training",
    "runs",
    "verifiers",
    "openenv",
    "serving",
    "compile",
    "report",
    "cli",
]
"""A package imports only from packages before it in this list. Imports for type checkers count too."""

NEIGHBOURS = ("algorithms", "rewards", "data", "models")
"""These packages import none of each other."""

EXTENSIONS = ("verifiers", "openenv", "serving", "compile", "report")
"""Only commands import these packages. Others reach them by an entry of a registry, which names a function as text."""


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "/".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def package_of(name: str) -> str:
    return name.split("/")[0]


def imports_of(tree: ast.Module) -> Iterator[str]:
    """Returns the dotted names of all imports, at any depth, those for type checkers too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write imports in full"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def edges(name: str) -> set[str]:
    """Returns the modules of `tunix_like` that the module `name` imports."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    dotted = (imported for imported in imports_of(tree) if imported.split(".")[0] == "tunix_like")
    found = {imported.removeprefix("tunix_like").lstrip(".").replace(".", "/") for imported in dotted}
    return {target for target in found if target in MODULES and target != name}


def imports_between(package: str, others: set[str]) -> list[str]:
    """Returns the imports of modules of `others` by modules of `package`."""
    return [
        f"{name} imports {target}"
        for name in MODULES
        if package_of(name) == package
        for target in edges(name)
        if package_of(target) in others
    ]


def test_all_packages_are_in_the_import_order():
    top = {path.stem for path in PACKAGE.iterdir() if path.name not in ("__pycache__", "py.typed")}
    assert top - {"__init__", "__main__"} == set(ORDER)


@pytest.mark.parametrize("package", ORDER)
def test_packages_import_only_earlier_packages(package):
    assert not imports_between(package, set(ORDER[ORDER.index(package) + 1 :]))


@pytest.mark.parametrize("package", NEIGHBOURS)
def test_neighbours_do_not_import_each_other(package):
    others = set(NEIGHBOURS) - {package}
    assert not imports_between(package, others)


@pytest.mark.parametrize("package", sorted({*ORDER} - {*EXTENSIONS, "cli"}))
def test_only_commands_import_extensions(package):
    assert not imports_between(package, set(EXTENSIONS))


@pytest.mark.parametrize("package", ORDER)
def test_modules_of_a_package_do_not_import_each_other_in_a_circle(package):
    """Imports inside functions and imports for type checkers count, because they hide a circle."""
    graph = {name: edges(name) for name in MODULES if package_of(name) == package}
    graphlib.TopologicalSorter(graph).prepare()


def test_reference_libraries_are_imported_only_by_tests():
    guilty = {
        f"{name}: {imported}"
        for name, path in MODULES.items()
        for imported in imports_of(ast.parse(path.read_text(encoding="utf-8")))
        if imported.split(".")[0] in ("torch", "transformers", "peft")
    }
    assert not guilty


def test_importing_the_package_does_not_import_heavy_libraries():
    heavy = {"jax", "torch", "transformers", "flax", "pydantic", "prometheus_client"}
    code = f"import sys, tunix_like; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_importing_a_learner_does_not_import_scipy():
    """Only the exact confidence interval needs scipy."""
    code = "import sys\nfrom tunix_like import MaxRLLearner\nsys.exit('scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
