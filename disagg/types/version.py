"""Which version of disagg this is."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from pathlib import Path

from disagg.types.protocol import OLDEST_PROTOCOL, PROTOCOL, Version

DIGITS = 8  # of the code's digest, that are shown


def version() -> str:
    """Of the installed package; "unknown" in a bare checkout."""
    try:
        return importlib.metadata.version("disagg")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def code_digest() -> str:
    """SHA-256 of the package's source files as they are on disk now; empty where they cannot be read. Takes 30 ms."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    try:
        for file in sorted(root.rglob("*.py")):
            digest.update(f"{file.relative_to(root)}\0".encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    except OSError:
        return ""
    return digest.hexdigest()


@functools.cache
def code_at_start() -> str:
    """`code_digest` as it was when this was first asked: ask when the process starts."""
    return code_digest()


@functools.cache
def own_version() -> Version:
    """What this process says of itself to routers and servers. Two builds of one release differ in their digits."""
    digits = code_at_start()[:DIGITS]
    return Version(PROTOCOL, OLDEST_PROTOCOL, f"{version()}+{digits}" if digits else version())
