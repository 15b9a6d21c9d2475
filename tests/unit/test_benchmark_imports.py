"""What a benchmark imports from another one or from Shardwise is there: no type checker reads them, and few are run."""

import ast
import importlib.util
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODULES = {
    ".".join(file.relative_to(BENCHMARKS).with_suffix("").parts): ast.parse(file.read_text())
    for file in BENCHMARKS.rglob("*.py")
    # They import frameworks, some of which set environment variables; test_integrations.py runs them.
    if file.parent.name != "integration_rows"
}


def defined(module: ast.Module) -> set[str]:
    """The names of a module's own, and those that it imports."""
    names = set()
    for node in ast.walk(module):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.ImportFrom(names=imported) | ast.Import(names=imported):
                names |= {alias.asname or alias.name for alias in imported}
    return names


def imports(module: ast.Module) -> list[tuple[str, str]]:
    """(module, name) of what is imported by name."""
    found = [node for node in ast.walk(module) if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return [(node.module, alias.name) for node in found if node.module for alias in node.names]


@pytest.mark.parametrize("benchmark", sorted(MODULES))
def test_what_a_benchmark_imports_is_there(benchmark: str) -> None:
    for module, name in imports(MODULES[benchmark]):
        if module in MODULES:
            assert name in defined(MODULES[module]), f"{benchmark}.py: from {module} import {name}"
        elif module.split(".")[0] == "shardwise":
            found = importlib.import_module(module)
            assert hasattr(found, name) or importlib.util.find_spec(f"{module}.{name}"), (
                f"{benchmark}.py: {module}.{name}"
            )
