"""The staging arena of one decode rank: segments of memory, leased to links.

A segment is free, leased to one link, or quarantined. Quarantined means that a peer may still write to it: the link
is gone from our side, and nothing proves that the last write is finished (docs/architecture.md). Only the caller can know
that such a peer is *gone* or quiet; time alone never frees a segment. Knows segments and shares; nothing of memory,
rings or peers.

        lease            release
    free ────> leased ─────────────> free
                  │ quarantine          ▲ unquarantine
                  └───> quarantined ────┘
"""

from __future__ import annotations

from msgspec import Struct


class SegmentLease(Struct, frozen=True):
    """Segments of one link's ring, in ring order. `lease_id` is never used again within an arena."""

    lease_id: int
    link: str
    segments: tuple[int, ...]  # indices in the arena
    segment_bytes: int

    @property
    def nbytes(self) -> int:
        """The capacity of the ring that fits."""
        return len(self.segments) * self.segment_bytes


def locate(lease: SegmentLease, offset: int) -> int:
    """Arena byte offset of byte `offset` of the lease's ring."""
    index, within = divmod(offset, lease.segment_bytes)
    assert 0 <= index < len(lease.segments), f"offset {offset} is outside of a ring of {lease.nbytes} bytes"
    return lease.segments[index] * lease.segment_bytes + within


class Arena:
    """Owner of the segments. No link holds more than its share, what is quarantined under its name included: a peer
    that keeps breaking its link cannot take the arena away from the others."""

    def __init__(self, arena_bytes: int, segment_bytes: int, max_share: float = 0.25) -> None:
        """`arena_bytes` is a whole number of segments; `max_share` is in (0, 1], rounded down, at least 1 segment."""
        if segment_bytes <= 0 or arena_bytes < segment_bytes or arena_bytes % segment_bytes:
            raise ValueError(f"arena_bytes is {arena_bytes}; it must be a positive multiple of {segment_bytes}")
        if not 0.0 < max_share <= 1.0:
            raise ValueError(f"max_share is {max_share}; it must be above 0 and at most 1")
        self.arena_bytes = arena_bytes
        self.segment_bytes = segment_bytes
        self.num_segments = arena_bytes // segment_bytes
        self.share_segments = max(1, int(self.num_segments * max_share))
        self._free: set[int] = set(range(self.num_segments))
        self._leased: dict[int, SegmentLease] = {}
        self._quarantined: dict[int, SegmentLease] = {}
        self._next_lease_id = 0

    def lease(self, link: str, segments: int) -> SegmentLease | None:
        """`segments` segments, all or nothing: None if too few are free or the link would exceed its share.

        Takes adjacent segments when it can; a ring works as well on scattered ones.
        """
        if segments < 1:
            raise ValueError(f"a lease of {segments} segments was asked for; at least 1 is needed")
        if segments > len(self._free) or self.held_segments(link) + segments > self.share_segments:
            return None
        taken = _adjacent_or_lowest(sorted(self._free), segments)
        self._free.difference_update(taken)
        lease = SegmentLease(self._next_lease_id, link, taken, self.segment_bytes)
        self._next_lease_id += 1
        self._leased[lease.lease_id] = lease
        return lease

    def release(self, lease: SegmentLease) -> None:
        """The link says itself that it is quiet, or its peer is gone: the segments are free."""
        assert self._leased.get(lease.lease_id) == lease, f"{lease} is not leased here"
        del self._leased[lease.lease_id]
        self._free.update(lease.segments)

    def quarantine(self, lease: SegmentLease) -> None:
        """The link ended and a write may still come: nobody gets the segments until `unquarantine`."""
        assert self._leased.get(lease.lease_id) == lease, f"{lease} is not leased here"
        self._quarantined[lease.lease_id] = self._leased.pop(lease.lease_id)

    def unquarantine(self, lease: SegmentLease) -> None:
        """No write can come any more: the segments are free."""
        assert self._quarantined.get(lease.lease_id) == lease, f"{lease} is not quarantined here"
        del self._quarantined[lease.lease_id]
        self._free.update(lease.segments)

    def held_segments(self, link: str) -> int:
        """Segments under the link's name, leased and quarantined."""
        return sum(
            len(lease.segments)
            for table in (self._leased, self._quarantined)
            for lease in table.values()
            if lease.link == link
        )

    @property
    def leased(self) -> tuple[SegmentLease, ...]:
        return tuple(self._leased.values())

    @property
    def quarantined(self) -> tuple[SegmentLease, ...]:
        return tuple(self._quarantined.values())

    @property
    def free_bytes(self) -> int:
        return len(self._free) * self.segment_bytes

    @property
    def leased_bytes(self) -> int:
        return sum(lease.nbytes for lease in self._leased.values())

    @property
    def quarantined_bytes(self) -> int:
        return sum(lease.nbytes for lease in self._quarantined.values())

    def check_integrity(self) -> None:
        """What must hold between any two calls: every segment is in one place, and the bytes add up."""
        held = [s for table in (self._leased, self._quarantined) for lease in table.values() for s in lease.segments]
        assert sorted([*held, *self._free]) == list(range(self.num_segments)), "a segment is lost or held twice"
        assert self.free_bytes + self.leased_bytes + self.quarantined_bytes == self.arena_bytes
        for link in {lease.link for table in (self._leased, self._quarantined) for lease in table.values()}:
            assert self.held_segments(link) <= self.share_segments


def _adjacent_or_lowest(free: list[int], count: int) -> tuple[int, ...]:
    """`free`: sorted. The first run of `count` adjacent indices, or the lowest `count` if there is no such run."""
    for i in range(len(free) - count + 1):
        if free[i + count - 1] - free[i] == count - 1:
            return tuple(free[i : i + count])
    return tuple(free[:count])
