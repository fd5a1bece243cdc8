"""Spans on their way to storage: which wait, which ranks are writing, and which are written and not found yet. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from disagg.offload.acks import Acks
from disagg.offload.instructions import Discard, Upload
from disagg.offload.spans import Span, SpanState


class Uploads:
    """Of one incarnation. most: that ranks are at, at once; the others wait in the order in which they came to the host.

    What storage has of a sequence that has ended it may still have to say (`Flow.asked`): its spans wait for that.
    """

    def __init__(self, ranks: int, most: int) -> None:
        self._acks = Acks(ranks)
        self._most = most
        self._transfers = 0  # that ranks are at
        self._waiting: deque[Span] = deque()
        self._begun: dict[int, Span] = {}  # from its upload to its end

    def __iter__(self) -> Iterator[Span]:
        """All of them."""
        return iter((*self._waiting, *self._begun.values()))

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._begun)

    def wait(self, span: Span) -> None:
        span.state = SpanState.WAITING
        self._waiting.append(span)

    def leave(self, span: Span) -> None:
        """It waits no longer."""
        self._waiting.remove(span)

    def next(self) -> Span | None:
        """The first one that may go, if there is a place. It waits no longer."""
        if self._transfers >= self._most:
            return None
        span = next((span for span in self._waiting if not any(flow.asked for flow in span.followers)), None)
        if span is not None:
            self.leave(span)
        return span

    def begin(self, span: Span) -> Upload:
        span.state, span.upload = SpanState.UPLOADING, self._acks.issue()
        self._begun[span.upload] = span
        self._transfers += 1
        return span.as_upload()

    def report(self, rank: int, last: int, failed: Iterable[int]) -> Iterator[tuple[Span, bool]]:
        """What is written on every rank now, and whether it failed on one. Raises ProtocolError as `Acks.report`."""
        for op in self._acks.report(rank, last, failed):
            self._transfers -= 1
            yield self._begun[op], self._acks.take_failed(op)

    def end(self, op: int) -> Span:
        return self._begun.pop(op)

    def give_up(self, span: Span) -> Discard:
        return Discard(self.end(span.upload).upload)
