"""Which modules of transformers compute exactly what a fusion computes: those whose code says so, statement for statement.

Families copy their code from each other, so most have the forward of one of a few classes; what only looks alike (other
norms, partial or interleaved rotations) does not. Knows code; nothing of tensors.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any


def same_code(cls: type, reference: type, methods: Sequence[str] = ("forward",)) -> bool:
    """Whether those methods are the same but for names of types and comments."""
    return all(
        (code := _code(getattr(cls, method, None))) is not None and code == _code(getattr(reference, method))
        for method in methods
    )


def same_functions(cls: type, reference: type, names: Sequence[str]) -> bool:
    """Whether functions of those names are the same in the modules of both classes."""
    of_cls, of_reference = sys.modules[cls.__module__], sys.modules[reference.__module__]
    return all(
        (code := _code(getattr(of_cls, name, None))) is not None and code == _code(getattr(of_reference, name))
        for name in names
    )


@cache
def _code(function: Callable[..., Any] | None) -> str | None:
    """The body and the names of arguments; None if it has no source."""
    definition = _definition(function)
    if definition is None:
        return None
    arguments = [argument.arg for argument in ast.walk(definition.args) if isinstance(argument, ast.arg)]
    body = definition.body[1:] if ast.get_docstring(definition) is not None else definition.body
    statements = [_without_annotation(statement) for statement in body]
    return repr(arguments) + ast.dump(ast.Module(statements, []))


def _without_annotation(statement: ast.stmt) -> ast.stmt:
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        return ast.Assign([statement.target], statement.value)
    return statement


def _definition(function: Callable[..., Any] | None) -> ast.FunctionDef | None:
    if function is None:
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return None
    (definition,) = tree.body
    return definition if isinstance(definition, ast.FunctionDef) else None


def hands_on_unseen(function: Callable[..., Any], name: str) -> bool:
    """Whether a model's forward does nothing with `name` but hand it from layer to layer and at last to its norm.

    Then layers may hand on anything that the next one and the norm understand. Before the first layer it is a tensor still,
    of which anything may be asked.
    """
    definition = _definition(function)
    if definition is None:
        return False
    loops = [node for node in ast.walk(definition) if isinstance(node, ast.For)]
    layers = {
        name.id for loop in loops for name in ast.walk(loop.target) if isinstance(name, ast.Name)
    }  # with an index before it, in some
    allowed: set[ast.AST] = set()
    norms = 0
    for node in ast.walk(definition):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Name) and node.args[0].id == name:
            callee = ast.unparse(node.func)
            if callee in layers or callee == "self.norm":
                allowed.add(node.args[0])
                norms += callee == "self.norm"
        elif isinstance(node, ast.keyword) and node.arg == "last_hidden_state":
            allowed.add(node.value)
    uses = [
        node
        for node in ast.walk(definition)
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
    ]
    # A loop's body comes again: what is above the loop does not.
    first_line = min((loop.lineno for loop in loops), default=0)
    return norms == 1 and len(loops) == 1 and all(use in allowed or use.lineno < first_line for use in uses)
