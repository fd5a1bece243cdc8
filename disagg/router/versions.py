"""Which versions serve together, for the operator: a rolling upgrade should come to an end. Pure."""

from __future__ import annotations

from disagg.router.view import ClusterView
from disagg.types.plain import one_line
from disagg.types.protocol import Version

MOST_NAMES = 5  # of each version


def mixed_versions(view: ClusterView, own: Version) -> str:
    """What runs where, if servers that are there or this router differ; empty if they do not."""
    names: dict[Version, list[str]] = {own: ["this router"]}
    for server in view.servers:
        if server.hello is not None and not server.lost:
            names.setdefault(server.hello.version, []).append(one_line(server.name))
    if len(names) == 1:
        return ""
    newest_first = sorted(names, key=lambda version: (-version.protocol, version.software))
    return "several versions serve together: " + "; ".join(
        f"{version}: {_some(names[version])}" for version in newest_first
    )


def _some(names: list[str]) -> str:
    shown, more = names[:MOST_NAMES], len(names) - MOST_NAMES
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")
