"""What failed attempts teach a router: which servers fail (`circuits`), and how much may be run again (`retries`)."""

from __future__ import annotations

import logging
from collections.abc import Callable

from disagg.config.tree import RouterConfig
from disagg.messages.legs import LegEnd, Outcome
from disagg.router.circuits import DECODES_CAUSES, Circuits, verdicts
from disagg.router.events import NeedPair
from disagg.router.live import Live
from disagg.router.metrics import RouterMetrics
from disagg.router.retries import WINDOW_S, RetryBudget
from disagg.router.view import Circuit, Pair, Work
from disagg.types.errors import RetriesSpent
from disagg.types.ids import Role

logger = logging.getLogger(__name__)

WORKS = {Role.PREFILL: (Work.PREFILL,), Role.DECODE: (Work.DECODE,), Role.MIXED: tuple(Work)}


class Failures:
    """Of one router."""

    def __init__(
        self, config: RouterConfig, circuits: Circuits, metrics: RouterMetrics, clock: Callable[[], float]
    ) -> None:
        self._config = config
        self._circuits = circuits
        self._retries = RetryBudget(config.retry_share, config.retry_floor)
        self._metrics = metrics
        self._clock = clock

    def attempted(self, pair: Pair) -> None:
        now_s = self._clock()
        self._circuits.sent(pair.decode.name, Work.DECODE, now_s)
        if not pair.moves:
            self._circuits.sent(pair.prefill.name, Work.PREFILL, now_s)

    def leg_ended(self, live: Live, server: str, end: LegEnd) -> None:
        pair = live.machine.pair
        if pair is None or end.key.attempt != live.machine.attempt:
            return
        now_s = self._clock()
        for name, work, done in verdicts(pair, server, end.outcome):
            if end.outcome is Outcome.WORKER_LOST:
                ref = pair.decode if work is Work.DECODE else pair.prefill
                self._changed(name, work, self._circuits.lost(name, ref.incarnation, work, now_s))
            else:
                self._changed(name, work, self._circuits.ended(name, work, done, now_s))

    def workers_died(self, server: str, role: Role, incarnation: str) -> None:
        now_s = self._clock()
        for work in WORKS[role]:
            self._changed(server, work, self._circuits.lost(server, incarnation, work, now_s))

    def request_ended(self) -> None:
        self._retries.request_ended(self._clock())

    def replayed(self, live: Live, need: NeedPair, running: int) -> RetriesSpent | None:
        """Another attempt is wanted; why there may be none. running: requests under way."""
        now_s = self._clock()
        pair = live.machine.pair
        if pair is not None and need.cause in DECODES_CAUSES:
            name = pair.decode.name
            self._changed(name, Work.DECODE, self._circuits.ended(name, Work.DECODE, False, now_s))
        if need.source is not None or need.cause == Outcome.GIVEN_BACK.value or self._retries.allows(running, now_s):
            return None
        share, floor = self._config.retry_share, self._config.retry_floor
        return RetriesSpent(
            f"the request was lost ({need.reason}) and is not run again: of the requests of the last {WINDOW_S} s so many were "
            f"lost already that the router's budget for that is spent (router.retry_share = {share:g}, "
            f"router.retry_floor = {floor:g} a second); try again"
        )

    def _changed(self, server: str, work: Work, now: Circuit | None) -> None:
        if now is None:
            return
        opens = now is Circuit.OPEN
        self._metrics.circuits_open.labels(server=server, leg=work.value).set(opens)
        if opens:
            self._metrics.circuits_opened.labels(server=server, leg=work.value).inc()
            logger.warning(
                "%s fails what it is sent to %s: nothing is while there is another server", server, work.value
            )
        else:
            logger.info("%s can %s again", server, work.value)
