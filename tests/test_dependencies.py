"""Packages depend on each other one way, whether a module imports them first, later in a function or for types."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PREFIX = "dynamo_megatron"


def package_graph() -> dict[str, set[str]]:
    """package -> the packages that it imports; a module that is in none stands for itself."""
    graph: dict[str, set[str]] = {}
    folders = {ROOT / PREFIX: (), ROOT / "kernels": ("kernels",), ROOT / "launcher": ("launcher",)}
    for folder, above in folders.items():
        for file in folder.rglob("*.py"):
            here = (*above, *file.relative_to(folder).with_suffix("").parts)[0]
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
                if isinstance(node, ast.ImportFrom):
                    names = [f"{node.module}.{name}" for name in names]
                there = {name.split(".")[1] for name in names if name.startswith(f"{PREFIX}.")}
                graph.setdefault(here, set()).update(there - {here, "__version__"})
    return graph


GRAPH = package_graph()


@pytest.mark.parametrize("package", sorted(GRAPH))
def test_no_package_depends_on_itself_through_others(package):
    below, found = set(), {package}
    while found:
        found = set().union(*(GRAPH.get(name, set()) for name in found)) - below
        below |= found
    assert package not in below


@pytest.mark.parametrize("package", ["algorithm", "config", "models", "kernels"])
def test_what_is_pure_knows_nothing_of_processes_and_servers(package):
    allowed = {"algorithm", "config", "models", "kernels", "types", "errors", "runtime"}
    assert GRAPH.get(package, set()) <= allowed
