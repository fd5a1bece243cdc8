"""Legs of traced requests, as spans: what this server did for each, and its timeline below it. Decides nothing."""

from __future__ import annotations

import secrets

from disagg.engine.now import Now
from disagg.messages.legs import LegEnd, Outcome, ServerMessage, StartLeg
from disagg.telemetry.traces import Span, Traces, spans_of
from disagg.types.ids import LegKey
from disagg.types.trace_context import TraceContext, read_traceparent

NAMES = {"queued": "queue"}
_WELL = (Outcome.DONE, Outcome.ABORTED)


class LegSpans:
    """Of one server. name, role: its own, as spans say it."""

    def __init__(self, traces: Traces, name: str, role: str) -> None:
        self._traces = traces
        self._name, self._role = name, role
        self._under_way: dict[LegKey, tuple[StartLeg, Now]] = {}  # as many as an engine has legs, at most

    def started(self, start: StartLeg, now: Now) -> None:
        if start.traceparent:
            self._under_way[start.key] = (start, now)

    def told(self, message: ServerMessage, now: Now) -> None:
        """A router is told of tokens, or of a leg's end."""
        if self._under_way and isinstance(message, LegEnd):
            found = self._under_way.pop(message.key, None)
            parent = read_traceparent(found[0].traceparent) if found is not None else None
            if found is not None and parent is not None:
                self._traces.put(self._spans(*found, message, now, parent))

    def down(self) -> None:
        """The engine is gone, and routers have been told of what it had."""
        self._under_way.clear()

    def _spans(self, start: StartLeg, began: Now, end: LegEnd, now: Now, parent: TraceContext) -> list[Span]:
        mine = TraceContext(parent.trace_id, secrets.token_hex(8), True)
        key = start.key
        leg = Span(
            name=self._role,
            context=mine,
            parent_span_id=parent.span_id,
            start_unix_s=began.unix_s,
            end_unix_s=max(began.unix_s, now.unix_s),
            attributes={
                "disagg.server": self._name,
                "disagg.role": self._role,
                "disagg.peer": start.peer.name,
                "disagg.attempt": key.attempt,
                "disagg.trunk": key.prefix_no,
                "disagg.outcome": end.outcome.value,
                "disagg.cached_tokens": end.cached_tokens,
                "gen_ai.response.id": key.request_id,
            },
            error="" if end.outcome in _WELL else f"{end.outcome.value}: {end.reason}",
        )
        return [leg, *spans_of(end.timeline, mine, NAMES)]
