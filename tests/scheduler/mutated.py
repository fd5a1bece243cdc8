"""Copies of modules in which one text stands for another, for tests that ask whether tests notice."""

from __future__ import annotations

import inspect
from types import ModuleType


def mutated(module: ModuleType, old: str = "", new: str = "") -> ModuleType:
    """A copy with `new` where `old` stood once; without `old` as it is."""
    source = inspect.getsource(module)
    if old:
        assert source.count(old) == 1, f"{old!r} is there {source.count(old)} times: what was it changed to?"
        source = source.replace(old, new)
    copy = ModuleType(f"{module.__name__}_mutated")
    exec(compile(source, copy.__name__, "exec"), copy.__dict__)
    return copy
