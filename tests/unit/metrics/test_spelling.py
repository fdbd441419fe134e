"""A metric's name is spelled in the catalogue alone; the rest of the code uses its constant."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from leeway.metrics import all_metrics

ROOT = Path(__file__).parents[3]
FOLDERS = ("shared", "services", "host", "lab")
CATALOGUE = ROOT / "shared" / "leeway" / "metrics" / "areas"
NAMES = {str(name) for name in all_metrics() if "/" in name}


def spelled(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of string literals that are a metric's name or, in an f-string, begin like one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            first = node.values[0] if node.values else None
            if isinstance(first, ast.Constant):
                begin = str(first.value)
                if "/" in begin and " " not in begin and any(name.startswith(begin) for name in NAMES):
                    yield node.lineno, begin
        elif isinstance(node, ast.Constant) and node.value in NAMES:
            yield node.lineno, node.value


def sources() -> list[Path]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return [path for path in found if CATALOGUE not in path.parents]


def test_no_name_of_the_catalogue_is_spelled_elsewhere() -> None:
    paths = sources()
    assert len(paths) > 100
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name!r}: use the constant of leeway.metrics.areas"
        for path in paths
        for line, name in spelled(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('metrics["lag/ess_tok"]', ["lag/ess_tok"]),
        ('metrics[f"disc/kl/{name}"]', ["disc/kl/"]),
        ('metrics[f"lag/ess_{level}"]', ["lag/ess_"]),
        ('metrics[LAG_ESS_TOK], f"{name}/mean", "version/age", f"a/b {x}"', []),
    ],
)
def test_the_search_finds_names(source: str, found: list[str]) -> None:
    assert [name for _, name in spelled(ast.parse(source))] == found
