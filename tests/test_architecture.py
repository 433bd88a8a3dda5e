"""Tests the structure of the source code: the packages and the direction of their imports, the sizes of files and
functions, and which libraries are imported where."""

from __future__ import annotations

import ast
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
    "config",
    "algorithms",
    "storage",
    "rewards",
    "data",
    "models",
    "rollout",
    "evaluation",
    "training",
    "runs",
    "report",
    "cli",
]
"""A package imports only from packages before it in this list. Imports for type checkers count too."""

MOST_LINES, MOST_BODY, MOST_PARAMETERS = 400, 50, 7

LONG_FILES = {
    "data/tokenizer.py": "one class, whose methods share the control tokens and the caches",
    "config/schema.py": "one table: every key with its type, default, range and documentation",
}
LONG_BODIES: dict[str, str] = {}
MANY_PARAMETERS = {
    "config/keys.py:key": "declares a field; one keyword for each of its properties",
    "models/loading.py:load_model": "a public constructor",
}
"""Exceptions, each with its reason. The tests compare the lists exactly, so an entry that is no longer needed fails."""


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "/".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def package_of(name: str) -> str:
    return name.split("/")[0]


def imports_of(tree: ast.Module) -> Iterator[str]:
    """Returns the dotted names of all imports, at any depth, including those for type checkers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write imports in full"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def edges(name: str) -> set[str]:
    """Returns the modules of the package that `name` imports."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    dotted = (imported for imported in imports_of(tree) if imported.split(".")[0] == "tunix_like")
    found = {imported.removeprefix("tunix_like").lstrip(".").replace(".", "/") for imported in dotted}
    return {target for target in found if target in MODULES and target != name}


def functions() -> Iterator[tuple[str, ast.FunctionDef, bool]]:
    """Yields `(file:name, function, whether it is a constructor)` of every function and method."""
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                yield f"{path.relative_to(PACKAGE)}:{node.name}", node, node.name == "__init__"


def body_lines(node: ast.FunctionDef) -> int:
    """Returns the number of lines of the body without its docstring."""
    docstring = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
    body = node.body[1:] if docstring else node.body
    return int(body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_all_packages_are_in_the_import_order():
    """The package contains at most 15 names besides `__init__` and `__main__`."""
    top = {path.stem for path in PACKAGE.iterdir() if path.name not in ("__pycache__", "py.typed")}
    assert top - {"__init__", "__main__"} == set(ORDER) and len(ORDER) <= 15


@pytest.mark.parametrize("package", ORDER)
def test_packages_import_only_earlier_packages(package):
    allowed = {*ORDER[: ORDER.index(package) + 1], "__init__"}
    wrong = {
        f"{name} imports {target}"
        for name in MODULES
        if package_of(name) == package
        for target in edges(name)
        if package_of(target) not in allowed
    }
    assert not wrong


def test_files_are_within_the_line_limit():
    long = {
        str(path.relative_to(PACKAGE))
        for path in MODULES.values()
        if len(path.read_text(encoding="utf-8").splitlines()) > MOST_LINES
    }
    assert long == set(LONG_FILES)


def test_function_bodies_are_within_the_line_limit():
    assert {name for name, node, _ in functions() if body_lines(node) > MOST_BODY} == set(LONG_BODIES)


def test_functions_are_within_the_parameter_limit():
    """`self` does not count, and constructors are not checked."""

    def count(node: ast.FunctionDef) -> int:
        names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        return len([name for name in names if name not in ("self", "cls")])

    many = {name for name, node, constructor in functions() if not constructor and count(node) > MOST_PARAMETERS}
    assert many == set(MANY_PARAMETERS)


def test_reference_libraries_are_imported_only_by_tests():
    guilty = {
        f"{name}: {imported}"
        for name, path in MODULES.items()
        for imported in imports_of(ast.parse(path.read_text(encoding="utf-8")))
        if imported.split(".")[0] in ("torch", "transformers", "peft")
    }
    assert not guilty


def test_importing_the_package_does_not_import_heavy_libraries():
    code = "import sys, tunix_like; sys.exit(bool({'jax', 'torch', 'transformers', 'flax'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_importing_a_learner_does_not_import_scipy():
    """Only the exact confidence interval needs scipy."""
    code = "import sys\nfrom tunix_like import MaxRLLearner\nsys.exit('scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
