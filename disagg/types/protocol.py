"""The protocol that routers and servers speak with each other, as a number, and which numbers can speak together. Pure.

The number is raised when messages change their meaning, or one is sent that others must know: not for a field that may be
ignored. Each side says the range that it speaks, and both speak the highest number that is in both ranges:

    speaks 1 to 2    ├──┤
    speaks 2 to 3       ├──┤    they speak 2
    speaks 3 to 4          ├──┤ refused by the first, and refuses it: both ranges are named

A peer that says nothing is of protocol 0, as all were before there were numbers. docs/versions.md says how to raise it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from msgspec import Struct

from disagg.types.plain import one_line

PROTOCOL = 2
OLDEST_PROTOCOL = (
    0  # that this code still speaks: those of the release before, or a rolling upgrade needs a second cluster
)

SOFTWARE_CHARS = 64


class Version(Struct, frozen=True):
    """What a process speaks: every number from `oldest` to `protocol`. software: for people; empty if it is not said."""

    protocol: int = 0
    oldest: int = 0
    software: str = ""

    def __str__(self) -> str:
        software = (
            f"disagg {one_line(self.software, SOFTWARE_CHARS)}" if self.software else "a version that does not say"
        )
        return f"{software}, which speaks {self.range}"

    @property
    def range(self) -> str:
        if self.protocol == self.oldest:
            return f"protocol {self.protocol}"
        return f"protocols {self.oldest} to {self.protocol}"


BEFORE_NUMBERS = Version()


def spoken(one: Version, other: Version) -> int | None:
    """The number that both speak; None where they cannot speak with each other."""
    highest = min(one.protocol, other.protocol)
    return highest if highest >= max(one.oldest, other.oldest) else None


def refusal(name: str, own: Version, peer_name: str, peer: Version) -> str:
    """Why the two cannot speak, with both versions and what to do; empty if they can."""
    if spoken(own, peer) is not None:
        return ""
    older = name if own.protocol < peer.protocol else peer_name
    both = f"{one_line(name)} is {own}; {one_line(peer_name)} is {peer}"
    return f"{both}: they have no protocol in common; upgrade {one_line(older)}"


def circles(versions: Iterable[Version]) -> tuple[int, ...]:
    """Protocols such that any two of these versions that can speak with each other both speak one of them. The lowest first.

    Usually one, the oldest version's highest. None of them has only speakers that also speak another one of them.
    """
    ranges = {(version.oldest, version.protocol) for version in versions}
    begins = sorted(oldest for oldest, _ in ranges)
    found: list[int] = []
    for end in sorted({protocol for _, protocol in ranges}):
        # Whoever speaks it and not the last one found begins after that one: is there any?
        after = bisect_right(begins, found[-1]) if found else 0
        if after < len(begins) and begins[after] <= end:
            found.append(end)
    return tuple(found)
