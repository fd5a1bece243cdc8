"""How requests ended: counted, timed, traced, and kept for who asks later. Decides nothing of a request."""

from __future__ import annotations

import time

from disagg.router.alarms import Recent
from disagg.router.live import Live
from disagg.router.metrics import RouterMetrics
from disagg.router.request_spans import Ended, request_spans
from disagg.router.requests import Finished
from disagg.router.timelines import Timelines
from disagg.telemetry.traces import Traces
from disagg.types.errors import (
    Cancelled,
    DeadlineExceeded,
    DisaggError,
    NoCompatiblePeer,
    Overloaded,
    QuotaExceeded,
    RequestError,
    RetriesSpent,
    Shed,
    Unavailable,
)

_OUTCOMES: tuple[tuple[type[DisaggError], str], ...] = (
    (RequestError, "invalid"),
    (QuotaExceeded, "quota_exceeded"),
    (Shed, "shed"),
    (Overloaded, "overloaded"),
    (NoCompatiblePeer, "no_compatible_peer"),
    (RetriesSpent, "retries_spent"),
    (Unavailable, "unavailable"),
    (DeadlineExceeded, "deadline"),
    (Cancelled, "cancelled"),
)


def outcome_of(error: DisaggError) -> str:
    return next((name for kind, name in _OUTCOMES if isinstance(error, kind)), "failed")


class Outcomes:
    """Of one router. model: its public name, for spans."""

    def __init__(self, metrics: RouterMetrics, model: str) -> None:
        self.timelines = Timelines()
        self.recent = Recent()
        self.traces = Traces()
        self._metrics = metrics
        self._model = model

    def note(self, outcome: str, now_s: float) -> None:
        """Of a request that ended, or was not begun."""
        self._metrics.requests.labels(outcome=outcome).inc()
        self.recent.note(outcome, now_s)

    def ended(self, live: Live, end: Finished | DisaggError, now_s: float) -> str:
        """What it is counted as."""
        machine = live.machine
        outcome = "ok" if isinstance(end, Finished) else outcome_of(end)
        if isinstance(end, DisaggError):
            live.note_attempt(outcome, time.time())
            reason = "abort" if isinstance(end, Cancelled) else "error"
            self._metrics.choices.labels(reason=reason).inc(len(machine.table.unfinished()))
        self.timelines.keep(machine.request_id, live.events)
        self._count(live, outcome, now_s)
        self._trace(live, outcome, end)
        return outcome

    def _count(self, live: Live, outcome: str, now_s: float) -> None:
        counts = live.machine.table.counts
        self._metrics.duplicates.inc(counts.duplicates)
        self._metrics.stale.inc(counts.stale)
        self._metrics.contradictions.inc(counts.contradictions)
        self.note(outcome, now_s)
        self._metrics.whole_s.observe(now_s - live.arrived_s)
        if live.began:
            silences_s = [live.longest_silence_s, *(now_s - last_s for last_s in live.heard_s.values())]
            self._metrics.longest_silence_s.observe(max(silences_s))

    def _trace(self, live: Live, outcome: str, end: Finished | DisaggError) -> None:
        machine = live.machine
        trace = machine.asked.trace
        if trace is None:
            return
        failed = isinstance(end, DisaggError) and not isinstance(end, Cancelled)
        ended = Ended(
            asked=machine.asked,
            model=self._model,
            arrived_unix_s=live.arrived_unix_s,
            ended_unix_s=time.time(),
            output_tokens=live.num_tokens,
            cached_tokens=machine.cached_tokens,
            attempts=machine.attempts_counted,
            finish_reasons=tuple(live.finish_reasons),
            timeline=tuple(live.timeline),
            outcome=outcome,
            error=str(end) if failed else "",
        )
        self.traces.put(request_spans(ended, trace))
