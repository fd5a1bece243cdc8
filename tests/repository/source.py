"""The package's source as syntax trees, for tests of rules that no tool checks."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "disagg"
GENERATED = PACKAGE / "v1"


def source_files() -> Iterator[Path]:
    """Every file of the package that a person wrote."""
    for file in sorted(PACKAGE.rglob("*.py")):
        if GENERATED not in file.parents:
            yield file


@functools.cache
def tree_of(source: str) -> ast.Module:
    """Its syntax tree, where every node knows the one that it is part of, as `parent`."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            child.parent = node  # type: ignore[attr-defined]
    return tree


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()
