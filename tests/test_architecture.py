"""The order of the rooms, read from the source: who may import whom, and what nobody may import."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tunix_like"

ROWS = (
    "visible",
    "types errors checksums untrusted eval_statistics input_files",
    "output",
    "console",
    "json_files starting eval_compare progress checkpoint_files output_folder coordinator chat_templates",
    "template_worker tokenizer_files",
    "config tokenizer user_code speed processes",
    "config_file run_lock rl/estimators rl/order_statistics rl/advantages rl/losses models rewards optimizer metrics "
    "checkpoints doctor sampling/logits rl/packing",
    "memory config_reference loggers",
    "sizes",
    "data sampling loop rl/objective",
    "rl/pass_rates",
    "rl/rollouts rl/forward rl/guards rl/population_weights",
    "rl/update",
    "evaluate weights_figure",
    "best",
    "sft rl advantages_table report",
    "runs",
    "trained",
    "programs replay reward_check eval_command",
    "report/gradients report/command",
    "cli",
    "__main__",
)
"""A module imports from rows above or from its own package. A name covers all below it that has no row itself."""

ROW_OF = {name: row for row, names in enumerate(ROWS) for name in names.split()}


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "/".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def row_of(name: str) -> int:
    while name not in ROW_OF and "/" in name:
        name = name.rpartition("/")[0]
    assert name in ROW_OF, f"tunix_like/{name} stands in no row of {__file__}: give it one"
    return ROW_OF[name]


def imports_of(tree: ast.Module) -> Iterator[str]:
    """Dotted names of everything imported at any depth, except what only a type checker reads."""
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in (node for node in ast.walk(tree) if id(node) not in skipped):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write imports in full"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def edges(name: str) -> set[str]:
    """The modules of the package that `name` imports."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    dotted = (imported for imported in imports_of(tree) if imported.split(".")[0] == "tunix_like")
    found = {imported.removeprefix("tunix_like").lstrip(".").replace(".", "/") for imported in dotted}
    return {target for target in found if target in MODULES and target != name}


def package_of(name: str) -> str:
    return name.split("/")[0] if (PACKAGE / name.split("/")[0]).is_dir() else ""


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"__init__"}))
def test_imports_come_from_rows_above(name):
    row = row_of(name)
    wrong = {
        target
        for target in edges(name)
        if row_of(target) >= row and not (package_of(name) and package_of(name) == package_of(target))
    }
    assert not wrong, f"{name} (row {row}) imports {sorted(wrong)}"


def test_there_are_no_cycles():
    graph = {name: edges(name) for name in MODULES if name != "__init__"}
    while leaves := [name for name, targets in graph.items() if not targets & graph.keys()]:
        for name in leaves:
            del graph[name]
    # A package's __init__ imports its modules and they may not import it back, so even packages leave nothing here.
    assert not graph, f"in or behind a cycle: {sorted(graph)}"


def test_the_reference_libraries_stay_in_the_tests():
    guilty = {
        f"{name}: {imported}"
        for name, path in MODULES.items()
        for imported in imports_of(ast.parse(path.read_text(encoding="utf-8")))
        if imported.split(".")[0] in ("torch", "transformers", "peft")
    }
    assert not guilty


def test_importing_the_package_is_light():
    code = "import sys, tunix_like; sys.exit(bool({'jax', 'torch', 'transformers', 'flax'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_row_names_only_what_exists():
    assert {name for name in ROW_OF if not any(f"{module}/".startswith(f"{name}/") for module in MODULES)} == set()
