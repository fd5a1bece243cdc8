"""What a server's tiers have done since its process began, summed over its workers' incarnations. Numbers only."""

from __future__ import annotations

from collections import Counter

from disagg.messages.tiers import CopiedIn, CopiedOut, PartsRead, PartsWritten, TierEvent
from disagg.offload.causes import Cause

Way = tuple[str, str]  # tier, and "out" (away from the GPU) or "in"
WAYS: dict[type[TierEvent], Way] = {
    CopiedOut: ("host", "out"),
    CopiedIn: ("host", "in"),
    PartsWritten: ("storage", "out"),
    PartsRead: ("storage", "in"),
}


class TierSums:
    """misses: in storage, by cause. published_pages: that can be found because of this server, once per layer group;
    duplicate_pages: that others had stored before it. failures: of ranks, that could not write or read.
    nbytes, seconds: by way, over all ranks, as they report.
    """

    def __init__(self) -> None:
        self.misses: Counter[Cause] = Counter()
        self.published_pages = 0
        self.duplicate_pages = 0
        self.failures = 0
        self.nbytes: Counter[Way] = Counter()
        self.seconds: dict[Way, float] = dict.fromkeys(WAYS.values(), 0.0)

    def count(self, report: TierEvent) -> None:
        way = WAYS[type(report)]
        self.nbytes[way] += report.nbytes
        self.seconds[way] += report.seconds
