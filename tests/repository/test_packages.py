"""Every folder with tests is a package, so that two files of one name in two folders are two modules."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_folders_of_tests_are_packages() -> None:
    folders = {file.parent for file in TESTS.rglob("*.py")}
    assert TESTS in folders
    assert [
        str(folder.relative_to(TESTS)) for folder in sorted(folders) if not (folder / "__init__.py").is_file()
    ] == []
