"""A server calls its engine, whichever it is: nothing under `disagg/server` asks which one it has."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.repository.source import PACKAGE, name_of, source_files, tree_of

ENGINE, SERVER = PACKAGE / "engine", PACKAGE / "server"
VALUES = ENGINE / "instructions.py"  # what engines return is told apart


def engine_names() -> set[str]:
    """Of all classes of the engine, and of names that stand for several of them."""
    names = set()
    for file in source_files():
        if ENGINE in file.parents and file != VALUES:
            for node in ast.walk(tree_of(file.read_text())):
                match node:
                    case ast.ClassDef(name=name) | ast.Assign(targets=[ast.Name(name)]):
                        names.add(name)
    return names


def names_told_apart(tree: ast.AST) -> Iterator[str]:
    """Classes that `isinstance` or a `case` asks for."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name("isinstance"), args=[_, asked]) | ast.MatchClass(cls=asked):
                yield from (each.id for each in ast.walk(asked) if isinstance(each, ast.Name))
                yield from (each.attr for each in ast.walk(asked) if isinstance(each, ast.Attribute))


def test_no_server_asks_which_engine_it_has() -> None:
    engines = engine_names()
    assert {"Engine", "DataParallel", "AnyEngine"} <= engines
    asked = [
        f"{name_of(file)} asks for {name}"
        for file in source_files()
        if SERVER in file.parents
        for name in names_told_apart(tree_of(file.read_text()))
        if name in engines
    ]
    assert not asked
