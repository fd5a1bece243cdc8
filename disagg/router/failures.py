"""What failed attempts teach a router: which servers fail (`circuits`), and how much may be run again (`retries`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from disagg.config.tree import RouterConfig
from disagg.messages.legs import LegEnd, Outcome, PeerRef
from disagg.router.blame import Blame, Charge
from disagg.router.circuits import Circuits
from disagg.router.events import NeedPair
from disagg.router.live import Live
from disagg.router.metrics import RouterMetrics
from disagg.router.retries import WINDOW_S, RetryBudget
from disagg.router.view import Circuit, Pair, Work
from disagg.types.errors import RetriesSpent
from disagg.types.ids import Role

logger = logging.getLogger(__name__)

WORKS = {Role.PREFILL: (Work.PREFILL,), Role.DECODE: (Work.DECODE,), Role.MIXED: tuple(Work)}


class Standing(Protocol):
    """What is known of servers."""

    def role_of(self, name: str) -> Role | None:
        """None: there is no such server, or not any more."""

    def ends(self, ref: PeerRef) -> bool:
        """Whether this incarnation is known to be gone, or to be going."""


class Failures:
    """Of one router."""

    def __init__(
        self,
        config: RouterConfig,
        circuits: Circuits,
        standing: Standing,
        metrics: RouterMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._circuits = circuits
        self._standing = standing
        self._blame = Blame(standing.ends)
        self._retries = RetryBudget(config.retry_share, config.retry_floor)
        self._metrics = metrics
        self._clock = clock

    def attempted(self, pair: Pair) -> None:
        now_s = self._clock()
        self._charge(self._blame.due(now_s), now_s)
        self._circuits.sent(pair.decode.name, Work.DECODE, now_s)
        if not pair.moves:
            self._circuits.sent(pair.prefill.name, Work.PREFILL, now_s)

    def leg_ended(self, live: Live, server: str, end: LegEnd) -> None:
        pair, now_s = live.machine.pair, self._clock()
        if pair is None or end.key.attempt != live.machine.attempt:
            return
        attempt = end.key.request_id, end.key.attempt
        self._charge(self._blame.leg_ended(attempt, pair, server, end.outcome, now_s), now_s)

    def began_to_answer(self, pair: Pair) -> None:
        """The first token of a leg came from its decode server."""
        now_s, name = self._clock(), pair.decode.name
        for work in Work if pair.whole else (Work.DECODE,):
            self._changed(name, work, self._circuits.answers(name, work, now_s))

    def workers_died(self, server: str, role: Role, incarnation: str) -> None:
        now_s = self._clock()
        for work in WORKS[role]:
            self._changed(server, work, self._circuits.lost(server, incarnation, work, now_s))

    def request_ended(self) -> None:
        now_s = self._clock()
        self._charge(self._blame.due(now_s), now_s)
        self._retries.request_ended(now_s)

    def replayed(self, live: Live, need: NeedPair, running: int) -> RetriesSpent | None:
        """Another attempt is wanted; why there may be none. running: requests under way."""
        now_s = self._clock()
        pair = live.machine.pair
        self._charge(self._blame.due(now_s), now_s)
        if pair is not None:
            attempt = live.machine.request_id, live.machine.attempt
            self._charge(self._blame.replayed(attempt, pair, need.cause), now_s)
        if need.source is not None or need.cause == Outcome.GIVEN_BACK.value or self._retries.allows(running, now_s):
            return None
        share, floor = self._config.retry_share, self._config.retry_floor
        return RetriesSpent(
            f"the request was lost ({need.reason}) and is not run again: of the requests of the last {WINDOW_S} s so many were "
            f"lost already that the router's budget for that is spent (router.retry_share = {share:g}, "
            f"router.retry_floor = {floor:g} a second); try again"
        )

    def _charge(self, charges: Iterable[Charge], now_s: float) -> None:
        """Of servers that have left, or do other work now, nothing is kept."""
        for each in charges:
            role = self._standing.role_of(each.server)
            if role is None or each.work not in WORKS[role]:
                continue
            if each.lost:
                now = self._circuits.lost(each.server, each.lost, each.work, now_s)
            else:
                now = self._circuits.ended(each.server, each.work, each.done, now_s)
            self._changed(each.server, each.work, now)

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
