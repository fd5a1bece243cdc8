"""Files, functions and signatures have a size that one can take in. What is still over is listed, and the lists only shrink."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.repository.source import ROOT, name_of, source_files, tree_of

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 500, 60, 8
MOST_COMPOSITION_LINES = 60
KERNELS = "kernels.py"  # one table of launches, or one kernel: as long as it is, with a parameter for every stride

# Take an entry out once its code is cut. Put none in: cut the code.
LONG_FILES: set[str] = set()
LONG_FUNCTIONS: set[str] = set()
WIDE_SIGNATURES: set[str] = set()


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for file in source_files():
        if file.name == KERNELS:
            continue
        for node in ast.walk(tree_of(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                of = node.parent  # type: ignore[attr-defined]
                within = f"{of.name}." if isinstance(of, ast.ClassDef) else ""
                yield f"{name_of(file)} {within}{node.name}", node


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without the object or class that it is called on."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    bound = bool(positional) and positional[0].arg in ("self", "cls")
    variadic = [each for each in (arguments.vararg, arguments.kwarg) if each is not None]
    return len(positional) - bound + len(arguments.kwonlyargs) + len(variadic)


def test_no_file_is_longer_than_one_reads_at_once() -> None:
    long = {
        name_of(file)
        for file in source_files()
        if file.name != KERNELS and len(file.read_text().splitlines()) > MAX_FILE_LINES
    }
    assert long == LONG_FILES


def test_nor_is_one_of_tests_or_benchmarks() -> None:
    files = [file for folder in ("tests", "bench") for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    assert not [str(file.relative_to(ROOT)) for file in files if len(file.read_text().splitlines()) > MAX_FILE_LINES]


def test_no_function_is_longer_than_a_screen() -> None:
    lengths = {name: (node.end_lineno or 0) - node.lineno + 1 for name, node in functions()}
    assert {name for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES} == LONG_FUNCTIONS


def test_no_signature_is_wider_than_one_remembers() -> None:
    wide = {name for name, node in functions() if num_parameters(node) > MAX_PARAMETERS}
    assert wide == WIDE_SIGNATURES


def test_a_mixed_role_is_composed_in_a_test_of_sixty_lines() -> None:
    """Of both handoffs and one batch, with fakes: what needs more has a wall in the wrong place."""
    composition = ROOT / "tests" / "engine" / "test_mixed_composition.py"
    assert len(composition.read_text().splitlines()) <= MOST_COMPOSITION_LINES
