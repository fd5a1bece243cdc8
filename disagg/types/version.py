"""Which version of disagg this is."""

from __future__ import annotations

import importlib.metadata


def version() -> str:
    """Of the installed package; "unknown" in a bare checkout."""
    try:
        return importlib.metadata.version("disagg")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
