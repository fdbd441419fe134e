"""Which package may import which, and that no two modules import each other in a circle."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {
    "leeway": "shared",
    "leeway_sampler": "services/sampler",
    "leeway_trainer": "services/trainer",
    "leeway_controller": "services/controller",
    "leeway_host": "host",
    "leeway_lab": "lab",
    "leeway_simulation": "simulation",
}
ALLOWED = {
    "leeway": set(),
    "leeway_sampler": {"leeway"},
    "leeway_trainer": {"leeway"},
    "leeway_controller": {"leeway"},
    "leeway_host": {"leeway"},
    # The lab runs whole runs and builds their models with the launcher's own code.
    "leeway_lab": {"leeway", "leeway_host"},
    # The only package with all services in one process: it runs their loops against each other.
    "leeway_simulation": {"leeway", "leeway_sampler", "leeway_trainer", "leeway_controller", "leeway_host"},
}
"""Package -> the packages of Leeway that it may import beside itself."""


def module_files() -> dict[str, Path]:
    """Dotted name -> file, of every module of Leeway."""
    found = {}
    for package, folder in SOURCES.items():
        root = ROOT / folder
        for path in (root / package).rglob("*.py"):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def imports(tree: ast.AST, modules: dict[str, Path], *, at_import_time: bool) -> set[str]:
    """Modules of Leeway that a module imports; with `at_import_time` only those at its top level."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in modules else node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif not (at_import_time and runs_later(node)):
            found |= imports(node, modules, at_import_time=at_import_time)
    return {name for name in found if name.split(".")[0] in SOURCES}


def runs_later(node: ast.AST) -> bool:
    """True for code that does not run when its module is imported."""
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


MODULES = module_files()
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


@pytest.mark.parametrize("package", SOURCES)
def test_a_package_imports_only_what_it_may(package: str) -> None:
    allowed = {package, *ALLOWED[package]}
    wrong = {
        f"{name} -> {target}"
        for name, tree in TREES.items()
        if name.split(".")[0] == package
        for target in imports(tree, MODULES, at_import_time=False)
        if target.split(".")[0] not in allowed
    }
    assert not wrong


def test_no_circle_of_imports() -> None:
    graph = {name: imports(tree, MODULES, at_import_time=True) - {name} for name, tree in TREES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_the_search_finds_nested_and_late_imports() -> None:
    source = "import leeway.config\ndef f():\n    from leeway_lab import spec\n"
    tree = ast.parse(source)
    assert imports(tree, MODULES, at_import_time=False) == {"leeway.config", "leeway_lab.spec"}
    assert imports(tree, MODULES, at_import_time=True) == {"leeway.config"}
