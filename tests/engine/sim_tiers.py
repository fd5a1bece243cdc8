"""Host memory and storage of a simulation: what `worker/offload_driver` and `server/store_keeper` are, over cells.

Storage belongs to the world: all servers of it read what any of them has written, at any TP size. What fails, and when, is the
world's choice. Knows commands, reports and cells; nothing of engines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from msgspec.structs import replace

from disagg.engine.facts import EngineFacts
from disagg.messages.stored import PartRead, PartRef, Share, Span
from disagg.messages.tiers import (
    CopiedIn,
    CopiedOut,
    CopyIn,
    CopyOut,
    GroupParts,
    PartsRead,
    PartsWritten,
    ReadParts,
    TierCommand,
    TierEvent,
    WriteParts,
)
from disagg.offload.instructions import (
    Ask,
    Discard,
    Fetch,
    ForgetAsk,
    Publish,
    StoreCommand,
    StoreEvent,
    StoreFound,
    StorePublished,
    StoreWorks,
    Upload,
)
from disagg.offload.tier import Found, beyond, what_is_found
from disagg.offload.units import heads_of, written_by
from tests.engine.sim_pages import Cells, SimPages


@dataclass
class SimStore:
    """parts: by path, {(head, place in the share): cells of that head}. spans: by the first page's hash."""

    parts: dict[str, dict[tuple[int, int], Cells]] = field(default_factory=dict)
    spans: dict[bytes, Span] = field(default_factory=dict)
    reads: int = 0
    writes: int = 0

    def walk(self, hashes: Sequence[bytes], root: bytes | None = None) -> list[Span]:
        """Those that this sequence goes through, each with its pages cut to the sequence's."""
        found: list[Span] = []
        at = 0
        while at < len(hashes) and (span := self.spans.get(hashes[at])) is not None:
            assert span.start == at and (not at or span.parent == hashes[at - 1]), "a span in the wrong place"
            matched = _common(span.hashes, hashes[at:])
            found.append(replace(span, hashes=span.hashes[:matched]))
            at += matched
        return found

    def check(self) -> None:
        """No chain has a hole, and every part of what can be found is there."""
        known = {page_hash for span in self.spans.values() for page_hash in span.hashes}
        assert len(known) == sum(len(span.hashes) for span in self.spans.values()), "a page is in two spans"
        for span in self.spans.values():
            assert not span.start or span.parent in known, "a span goes on from what is not stored"
            for share in span.shares:
                heads = sorted(head for ref in share.parts for head in range(ref.head_start, ref.head_stop))
                assert not share.pages or heads == list(range(share.heads)), (
                    "heads that nobody, or two ranks, have written"
                )
                for ref in share.parts:
                    assert ref.path in self.parts


class SimRankTiers:
    """One rank's offload thread. copies and store: commands, each in their order."""

    def __init__(
        self, facts: EngineFacts, rank: int, pages: SimPages, store: SimStore, fails: Callable[[], bool]
    ) -> None:
        self._facts = facts
        self._rank = rank
        self._pages = pages
        self._host = SimPages(facts, f"host of rank {rank}")
        self._store = store
        self._fails = fails
        self.copies: deque[CopyOut | CopyIn] = deque()
        self.transfers: deque[WriteParts | ReadParts] = deque()
        self.events: deque[TierEvent] = deque()

    def take(self, command: TierCommand) -> None:
        if isinstance(command, CopyOut | CopyIn):
            self.copies.append(command)
        else:
            self.transfers.append(command)

    def copy(self) -> None:
        command = self.copies.popleft()
        for move in command.moves:
            if isinstance(command, CopyOut):
                self._host.put(move.group, move.host_page, self._pages.contents(move.group, move.gpu_page))
            else:
                self._pages.put(move.group, move.gpu_page, self._host.contents(move.group, move.host_page))
        if isinstance(command, CopyOut):
            self.events.append(CopiedOut(command.op, 1, 1e-6))
        else:
            self.events.append(CopiedIn(command.op, 1, 1e-6))

    def transfer(self) -> None:
        command = self.transfers.popleft()
        failed = "a fault" if self._fails() else ""
        if isinstance(command, WriteParts):
            parts = () if failed else tuple(self._write(g, group) for g, group in enumerate(command.groups))
            self.events.append(PartsWritten(command.op, failed, parts, 1, 1e-6))
        else:
            self.events.append(PartsRead(command.op, failed or self._read(command), 1, 1e-6))

    def _write(self, g: int, named: GroupParts) -> tuple[PartRef, ...]:
        group = self._facts.model.groups[g]
        heads = written_by(self._rank, self._facts.tp, group)
        if not heads or not named.hashes:
            return ()
        first = heads_of(self._rank, self._facts.tp, group).start
        units: dict[tuple[int, int], Cells] = {}
        for index, page in enumerate(named.host_pages):
            cells = self._host.contents(g, page)
            assert cells, "a page is stored that was never copied"
            for head in heads:
                units[head, index] = {
                    (row, layer, 0): cell for (row, layer, own), cell in cells.items() if own == head - first
                }
        self._store.writes += 1
        path = f"part {self._store.writes}"
        self._store.parts[path] = units
        return (PartRef(path, heads.start, heads.stop, 1),)

    def _read(self, command: ReadParts) -> str:
        for g, places in enumerate(command.places):
            heads = heads_of(self._rank, self._facts.tp, self._facts.model.groups[g])
            reads = [read for read in command.reads if read.group == g]
            for page_no, page in places:
                cells: Cells = {}
                for head in heads:
                    found = [unit for read in reads if (unit := self._unit(read, head, page_no)) is not None]
                    if not found:
                        return f"head {head} of page {page_no} is nowhere"
                    cells.update({(row, layer, head - heads.start): cell for (row, layer, _), cell in found[0].items()})
                self._host.put(g, page, cells)
        self._store.reads += 1
        return ""

    def _unit(self, read: PartRead, head: int, page_no: int) -> Cells | None:
        if page_no not in read.page_nos or not read.head_start <= head < read.head_stop:
            return None
        return self._store.parts[read.ref.path][head, read.span.shares[read.group].pages.index(page_no)]


class SimKeeper:
    """send: to all ranks, or to one. fails: whether the store fails now."""

    def __init__(
        self,
        facts: EngineFacts,
        store: SimStore,
        send: Callable[[int, TierCommand], None],
        fails: Callable[[], bool],
    ) -> None:
        self._facts = facts
        self._store = store
        self._send = send
        self._fails = fails
        self._uploads: dict[int, tuple[Upload, dict[int, PartsWritten]]] = {}
        self._asks: dict[int, list[Span]] = {}
        self.works = True
        self.commands: deque[StoreCommand] = deque()
        self.events: deque[StoreEvent] = deque()

    def do(self, command: StoreCommand) -> None:
        """Ranks hear of it in order; what storage itself is asked, it answers in its own time (`serve`)."""
        match command:
            case Upload():
                self._uploads[command.op] = command, {}
                groups = tuple(GroupParts(share.hashes, share.host_pages) for share in command.shares)
                for rank in range(self._facts.tp):
                    self._send(rank, WriteParts(command.op, command.salt, groups))
            case Discard():
                del self._uploads[command.op]
            case Fetch():
                for rank in range(self._facts.tp):
                    reads = self._reads(rank, self._asks[command.ask], command)
                    self._send(rank, ReadParts(command.op, "", reads, command.places))
            case ForgetAsk():
                self._asks.pop(command.ask, None)
            case _:
                self.commands.append(command)

    def _reads(self, rank: int, found: list[Span], command: Fetch) -> tuple[PartRead, ...]:
        reads = []
        for g, places in enumerate(command.places):
            left = {page_no for page_no, _ in places}
            for span in found:
                share = span.shares[g]
                here = tuple(p for p in share.pages if p in left and p < span.stop)
                left -= set(here)
                reads += [PartRead(span, g, ref, ref.head_start, ref.head_stop, here) for ref in share.parts if here]
            assert not left, "pages are wanted that were not found"
        return tuple(read for read in reads if self._overlaps(rank, read))

    def _overlaps(self, rank: int, read: PartRead) -> bool:
        heads = heads_of(rank, self._facts.tp, self._facts.model.groups[read.group])
        return read.head_start < heads.stop and heads.start < read.head_stop

    def rank_report(self, rank: int, report: PartsWritten | PartsRead) -> None:
        if isinstance(report, PartsWritten) and report.op in self._uploads:
            self._uploads[report.op][1][rank] = report

    def serve(self) -> None:
        command = self.commands.popleft()
        if isinstance(command, Ask):
            fails = self._fails()
            found = [] if fails else self._store.walk(command.hashes)
            self._asks[command.ask] = found
            pages = found[-1].stop if found else 0
            page_nos = tuple(
                tuple({p for span in found for p in span.shares[g].pages if p < span.stop})
                for g, _ in enumerate(self._facts.model.groups)
            )
            others = beyond(Found(self._store.spans[span.hashes[0]], len(span.hashes)) for span in found)
            self.events.append(StoreFound(command.ask, pages, page_nos if found else (), not fails, others))
        else:
            assert isinstance(command, Publish)
            self.events.append(self._publish(*self._uploads.pop(command.op)))

    def _publish(self, upload: Upload, reports: dict[int, PartsWritten]) -> StorePublished:
        assert len(reports) == self._facts.tp, "published before all parts are there"
        if self._fails():
            return StorePublished(upload.op, None)
        shares = tuple(
            Share(
                b"",
                0,
                group.kv_heads,
                share.page_nos,
                tuple(ref for report in reports.values() for ref in report.parts[g]),
            )
            for g, (group, share) in enumerate(zip(self._facts.model.groups, upload.shares, strict=True))
        )
        span = Span(b"", upload.parent, upload.start, upload.hashes, upload.before, shares)
        there = self._store.spans.setdefault(upload.hashes[0], span)
        return what_is_found(upload.op, there, span)

    def turn(self) -> None:
        """The store breaks, or works again."""
        self.works = not self.works
        self.events.append(StoreWorks(self.works))


def _common(ours: Sequence[bytes], others: Sequence[bytes]) -> int:
    """How many of the first are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, others, strict=False)))
