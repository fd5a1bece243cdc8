"""How much goes wrong in the simulated world."""

from __future__ import annotations

from msgspec import Struct


class Faults(Struct, frozen=True):
    """How much may go wrong. Counts are totals over a run."""

    abort_share: float = 0.0  # of requests: aborted by the client, whole or by choice
    corrupt_pieces: int = 0
    lost_notifications: int = 0
    failed_writes: int = 0
    lost_links: int = 0
    lost_workers: int = 0
    lost_dispatches: int = 0
    store_failures: int = 0
    store_outages: int = 0
    drains: int = 0  # of decode servers, whose answers go on elsewhere; costs no attempt

    @property
    def any(self) -> bool:
        """Something that may cost an attempt."""
        return bool(
            self.corrupt_pieces
            or self.lost_notifications
            or self.failed_writes
            or self.lost_links
            or self.lost_workers
            or self.lost_dispatches
        )
