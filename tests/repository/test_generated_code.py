"""Generated protobuf code is used through disagg.wire alone (import-linter does not see a package without __init__)."""

from __future__ import annotations

import ast

import pytest

from tests.repository.source import name_of, source_files, tree_of


def imports_generated(source: str) -> bool:
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.Import) and any(alias.name.startswith("disagg.v1") for alias in node.names):
            return True
        if isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            if any(name == "disagg.v1" or name.startswith("disagg.v1.") for name in names):
                return True
    return False


def test_only_wire_imports_the_generated_code() -> None:
    users = {name_of(file) for file in source_files() if imports_generated(file.read_text())}
    assert users == {"disagg/wire/pb.py"}


@pytest.mark.parametrize(
    "source",
    ["from disagg.v1 import server_pb2", "from disagg import v1", "import disagg.v1.server_pb2 as server"],
)
def test_every_way_to_the_generated_code_is_found(source: str) -> None:
    assert imports_generated(source)
