"""Only the configuration reads the environment; written is only what UCX and torch can be told in no other way."""

from __future__ import annotations

import ast
import functools

import pytest

from tests.repository.source import name_of, source_files, tree_of

READERS = {"disagg/config/load.py"}
WRITERS = {"disagg/transfer/backends/nixl.py", "disagg/worker/__main__.py"}
NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv", "get_exec_path", "expandvars"}
WRITING_METHODS = {"update"}


@functools.cache
def uses(source: str) -> list[tuple[int, str]]:
    """(line, "read" or "write") of every use of the environment that names it."""
    found = []
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            found += [(node.lineno, "read") for alias in node.names if alias.name in NAMES]
        if isinstance(node, ast.Attribute) and node.attr in NAMES and _is_os(node.value):
            found.append((node.lineno, "write" if _is_write(node) else "read"))
    return found


def _is_os(node: ast.expr) -> bool:
    """`os`, or `os.path`."""
    return ast.unparse(node) in ("os", "os.path")


def _is_write(node: ast.Attribute) -> bool:
    if node.attr in ("putenv", "unsetenv"):
        return True
    parent = node.parent  # type: ignore[attr-defined]
    if isinstance(parent, ast.Subscript):
        return not isinstance(parent.ctx, ast.Load)
    is_call = isinstance(parent, ast.Attribute) and isinstance(parent.parent, ast.Call)  # type: ignore[attr-defined]
    return is_call and parent.attr in WRITING_METHODS


def test_only_the_configuration_reads_the_environment() -> None:
    readers = {name_of(file) for file in source_files() for _, how in uses(file.read_text()) if how == "read"}
    assert readers == READERS


def test_nothing_but_these_writes_the_environment() -> None:
    writers = {name_of(file) for file in source_files() for _, how in uses(file.read_text()) if how == "write"}
    assert writers == WRITERS


@pytest.mark.parametrize(
    ("source", "how"),
    [
        ("import os\nos.environ['A']", "read"),
        ("import os\nos.environ.get('A')", "read"),
        ("import os\nos.getenv('A')", "read"),
        ("import os\ncopy = dict(os.environ)", "read"),
        ("import os\nos.path.expandvars('$A')", "read"),
        ("from os import environ", "read"),
        ("from os import getenv as get", "read"),
        ("import os\nos.environ['A'] = 'b'", "write"),
        ("import os\nos.environ.update(a='b')", "write"),
        ("import os\nos.environ.setdefault('A', 'b')", "read"),
    ],
)
def test_every_way_to_the_environment_is_found(source: str, how: str) -> None:
    assert [kind for _, kind in uses(source)] == [how]
