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

    def of(self, request_id: str) -> tuple[TimelineEvent, ...] | None:
        kept = self._kept.get(request_id)
        return None if kept is None else in_order(kept)


def in_order(events: Iterable[TimelineEvent]) -> tuple[TimelineEvent, ...]:
    return tuple(sorted(events, key=lambda event: (event.start_unix_s, event.end_unix_s)))
