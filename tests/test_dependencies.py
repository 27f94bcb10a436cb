"""Packages depend on each other one way: what a module imports when it is imported, or later in a function."""

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PREFIX = "dynamo_megatron"


def modules() -> dict[str, Path]:
    """Dotted name -> file, of the package and of what is installed as a part of it."""
    folders = {ROOT / PREFIX: PREFIX, ROOT / "kernels": f"{PREFIX}.kernels", ROOT / "launcher": f"{PREFIX}.launcher"}
    found = {}
    for folder, name in folders.items():
        for file in folder.rglob("*.py"):
            parts = file.relative_to(folder).with_suffix("").parts
            found[".".join([name, *(part for part in parts if part != "__init__")])] = file
    return found


class Imports(ast.NodeVisitor):
    """The modules that a file imports, but for types alone."""

    def __init__(self, known: dict[str, Path]):
        self.known, self.found = known, set()

    def visit_If(self, node):
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.generic_visit(node)

    def visit_ImportFrom(self, node):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        self.found |= {name if name in self.known else node.module for name in names}

    def visit_Import(self, node):
        self.found |= {alias.name for alias in node.names}


def package_graph(known: dict[str, Path]) -> dict[str, set[str]]:
    """package -> the packages that it imports; a module that is in none stands for itself."""
    graph: dict[str, set[str]] = {}
    for name, file in known.items():
        imports = Imports(known)
        imports.visit(ast.parse(file.read_text()))
        here = name.split(".")[1:2]
        for other in imports.found:
            there = other.split(".")[1:2]
            if other.startswith(f"{PREFIX}.") and here and there and here != there:
                graph.setdefault(here[0], set()).add(there[0])
    return graph


def test_no_package_depends_on_itself_through_others():
    order = list(graphlib.TopologicalSorter(package_graph(modules())).static_order())
    assert {"types", "runtime"} <= set(order[: order.index("train")])


@pytest.mark.parametrize("package", ["algorithm", "config", "models", "kernels"])
def test_what_is_pure_knows_nothing_of_processes_and_servers(package):
    allowed = {"algorithm", "config", "models", "kernels", "types", "errors", "runtime", "seeds"}
    assert package_graph(modules()).get(package, set()) <= allowed


def test_a_circle_is_found(tmp_path):
    files = {
        f"{PREFIX}.a.one": "from dynamo_megatron.b import two",
        f"{PREFIX}.b.two": "def f():\n    import dynamo_megatron.a.one",
    }
    known = {}
    for name, text in files.items():
        known[name] = tmp_path / name
        known[name].write_text(text)
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(package_graph(known)).prepare()
