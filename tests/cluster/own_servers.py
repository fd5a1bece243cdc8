"""`disagg up` whose servers are started by a module of the tests, so that it can change something in them first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

ROLES = ("prefill", "decode")


def start_servers_by(command: Sequence[str]) -> None:
    """Servers of this `up` are `command` with their own arguments; the router is as ever."""
    from disagg.cli import up

    shipped = up.ChildSpec

    def wrapped(name: str, argv: tuple[str, ...], log: Path) -> up.ChildSpec:
        role = argv[argv.index("disagg.cli") + 1]
        given = argv[argv.index(role) :]
        return shipped(name, (*command, *given) if role in ROLES else argv, log)

    up.ChildSpec = wrapped  # type: ignore[assignment,misc]
