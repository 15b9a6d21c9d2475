"""Nobody outside of a noun's file writes its attributes."""

import ast
from collections.abc import Iterator
from pathlib import Path

import shardwise
from shardwise.engine import core

SOURCE = Path(shardwise.__file__).parent
CORE = Path(core.__file__).parent
# What a unit consists of, and what its gradients pass through.
NOUNS = {
    "FullBuffer": "full_buffer.py",
    "Gathered": "master.py",
    "Master": "master.py",
    "MasterWrites": "master_writes.py",
    "Gradients": "flat_gradients.py",
    "FlatParams": "flat.py",
    "Unit": "unit.py",
    "Segment": "segment.py",
    "ReduceBucket": "bucket.py",
    "UsedFlags": "used.py",
}


def written(tree: ast.AST) -> Iterator[ast.Attribute]:
    """The attributes that are assigned or deleted, also in tuples, loops and `with`."""
    return (
        node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)
    )


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def attributes(tree: ast.AST) -> set[str]:
    """The attributes that the classes of a file give themselves."""
    fields = (node for made in ast.walk(tree) if isinstance(made, ast.ClassDef) for node in made.body)
    named = {n.target.id for n in fields if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    return named | {node.attr for node in written(tree) if is_own(node)}


def writes_from_outside() -> list[str]:
    """Writes to an attribute of a noun's name, in files that have no class with such an attribute."""
    trees = {path: ast.parse(path.read_text()) for path in sorted((SOURCE / "engine").rglob("*.py"))}
    of_nouns = {name: attributes(_class(trees[CORE / file], name)) for name, file in NOUNS.items()}
    return [
        f"{path.relative_to(SOURCE)}:{node.lineno} {ast.unparse(node)} of {name}"
        for path, tree in trees.items()
        for node in written(tree)
        for name, found in of_nouns.items()
        if node.attr in found and not is_own(node) and node.attr not in attributes(tree) and not _is_log(node)
    ]


def _class(tree: ast.Module, name: str) -> ast.ClassDef:
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def _is_log(node: ast.Attribute) -> bool:
    """Whoever issues a collective names it in its group's log."""
    return ast.unparse(node).endswith(".log.name")


def test_nobody_outside_of_a_nouns_file_writes_its_attributes() -> None:
    assert writes_from_outside() == []


def test_a_write_is_found_however_it_is_written() -> None:
    text = (
        "flat.a = flat.b, c.d = 1\nflat.e += 1\ndel flat.f\nfor flat.g in x: pass\nwith y as flat.h: pass\nself.i = 1"
    )
    assert {node.attr for node in written(ast.parse(text)) if not is_own(node)} == set("abdefgh")


def test_the_largest_object_of_the_core_has_at_most_20_attributes() -> None:
    found = {
        f"{path.name} {node.name}": len(attributes(node))
        for path in CORE.glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    assert max(found.values()) <= 20, sorted(found.items(), key=lambda pair: -pair[1])[:5]
