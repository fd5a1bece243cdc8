"""Who was let in and who was not, line by line in the log. Names tenants; never a key or a token.

A flood of refusals must not push the rest out of the log, whose lines are bounded: so many a second are said, and the next
one says how many were not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter

logger = logging.getLogger(__name__)

REFUSALS_PER_S = 50


class Audit:
    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._second = 0
        self._said = 0  # in this second
        self._left_out = 0
        self._counted = Counter(
            "disagg_router_callers", "Requests by what their credentials were worth", ["outcome"], registry=registry
        )

    def admitted(self, tenant: str, face: str, asked: str, client: str) -> None:
        """face: "http" or "grpc". asked: the method and path, or gRPC's method. client: an address, where it is known."""
        self._counted.labels(outcome="admitted").inc()
        if logger.isEnabledFor(logging.INFO):
            logger.info("admitted %s", tenant, extra={"tenant": tenant, "face": face, "asked": asked, "client": client})

    def refused(self, reason: str, face: str, asked: str, client: str) -> None:
        """reason: one of a few words."""
        self._counted.labels(outcome=reason).inc()
        second = int(self._clock())
        if second != self._second:
            self._second, self._said = second, 0
        if self._said >= REFUSALS_PER_S:
            self._left_out += 1
            return
        self._said += 1
        extra: dict[str, object] = {"reason": reason, "face": face, "asked": asked, "client": client}
        if self._left_out:
            extra["refused_unsaid"], self._left_out = self._left_out, 0
        logger.warning("refused: %s", reason, extra=extra)
