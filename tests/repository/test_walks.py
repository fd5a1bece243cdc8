"""The two walks of docs/architecture.md: every row names what is there, and leads to the next one."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

import pytest

from tests.repository.source import PACKAGE, ROOT, tree_of

ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
ROW = re.compile(r"^\| `([\w/]+)` `([\w.]+)` \| (.*?) \| `(\w+)` \|$", re.MULTILINE)
WALKS = {
    heading: ROW.findall(text)
    for heading, text in re.findall(r"^### (A .+?, from .+?)\n(.*?)(?=^##)", ARCHITECTURE, re.MULTILINE | re.DOTALL)
}


def file_of(module: str) -> Path:
    return PACKAGE / f"{module}.py"


def names_in(node: ast.AST) -> set[str]:
    """Identifiers, attributes, arguments and keywords."""
    found = set()
    for each in ast.walk(node):
        match each:
            case ast.Name(name) | ast.Attribute(attr=name) | ast.alias(name):
                found.add(name)
            case ast.arg(name) | ast.keyword(name):
                found.add(name or "")
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case _:
                pass
    return found


def definition(module: str, name: str) -> ast.AST:
    """Of `function`, `Class` or `Class.method`. Raises LookupError if it is not there."""
    node: ast.AST = tree_of(file_of(module).read_text())
    for part in name.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        inside = [each for each in ast.walk(node) if isinstance(each, kinds) and each.name == part]
        if not inside:
            raise LookupError(f"{module} has no {name}")
        node = inside[0]
    return node


def test_there_are_two_walks() -> None:
    assert len(WALKS) == 2 and all(len(rows) > 10 for rows in WALKS.values())


@pytest.mark.parametrize("walk", WALKS)
def test_each_row_of_a_walk_names_what_is_there(walk: str) -> None:
    wrong = [
        f"{module} {name} says nothing of {called}"
        for module, name, _, called in WALKS[walk]
        if called not in names_in(definition(module, name))
    ]
    assert not wrong


@pytest.mark.parametrize("walk", WALKS)
def test_each_row_of_a_walk_leads_to_the_next(walk: str) -> None:
    apart = []
    rows = WALKS[walk]
    for (before, called_before, _, _), (module, name, done, _) in itertools.pairwise(rows):
        here, there = (names_in(tree_of(file_of(each).read_text())) for each in (before, module))
        steps = {name.split(".")[-1], name.split(".")[0]}, {called_before.split(".")[-1], called_before.split(".")[0]}
        messages = set(re.findall(r"`(\w+)`", done))
        said, heard = names_in(definition(before, called_before)), names_in(definition(module, name))
        if before != module and not (steps[0] & here or steps[1] & there or messages & said & heard):
            apart.append(f"{before} -> {module} {name}")
    assert not apart


@pytest.mark.parametrize("walk", WALKS)
def test_no_walk_is_longer_than_one_can_follow(walk: str) -> None:
    """Files that it goes through; a walk that comes to need more has a wall in the wrong place."""
    assert len({module for module, *_ in WALKS[walk]}) <= 28
