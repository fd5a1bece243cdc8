"""Where the time of requests went: of those that run, and of the last few that ended. No clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from msgspec.structs import replace

from disagg.messages.legs import TimelineEvent
from disagg.types.bounded import forget_oldest

KEPT_TIMELINES = 256  # of requests that ended


class Timelines:
    """Of requests that ended; their servers may still have something to say."""

    def __init__(self, most: int = KEPT_TIMELINES) -> None:
        self._most = most
        self._kept: OrderedDict[str, list[TimelineEvent]] = OrderedDict()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._kept

    def keep(self, request_id: str, events: Iterable[TimelineEvent]) -> None:
        self._kept[request_id] = list(events)
        forget_oldest(self._kept, self._most)

    def add(self, request_id: str, server: str, events: Iterable[TimelineEvent]) -> None:
        """What a server says of a request that has ended; nothing, if it is kept no more."""
        kept = self._kept.get(request_id)
        if kept is not None:
            kept.extend(replace(event, name=f"{server}/{event.name}") for event in events)

    def summaries(self) -> list[dict[str, object]]:
        """Of requests that ended, the last one first: when each began, what it took, and the last thing said of its attempts."""
        return [summary(request_id, events) for request_id, events in reversed(self._kept.items())]

    def of(self, request_id: str) -> tuple[TimelineEvent, ...] | None:
        kept = self._kept.get(request_id)
        return None if kept is None else in_order(kept)


def in_order(events: Iterable[TimelineEvent]) -> tuple[TimelineEvent, ...]:
    return tuple(sorted(events, key=lambda event: (event.start_unix_s, event.end_unix_s)))


def summary(request_id: str, events: Iterable[TimelineEvent]) -> dict[str, object]:
    """For a list of requests. detail: of its last attempt, such as "prefill-0 > decode-0: done"; empty if it had none."""
    ordered = in_order(events)
    began_s = ordered[0].start_unix_s if ordered else 0.0
    ended_s = max((event.end_unix_s for event in ordered), default=0.0)
    attempts = [event for event in ordered if event.name.startswith("attempt ")]
    return {
        "request_id": request_id,
        "began_unix_s": began_s,
        "took_s": max(0.0, ended_s - began_s),
        "attempts": len(attempts),
        "detail": attempts[-1].detail if attempts else "",
    }
