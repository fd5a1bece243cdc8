"""Decides what KV is copied to the host and written to storage, and when. Pure: events in, instructions out.

A sequence is offloaded in *spans* of pages (see rules), each of which goes through

    COPYING ──every rank has copied──> WAITING ──a place is free──> UPLOADING ──every rank has written──> UPLOADED
       │                                 │ (nothing to copy: here)                │ failed on a rank           │ all before it
       └─ no storage, or none for it ────┴──────────> ENDED <─────────────────────┴───────────── PUBLISHING <──┘ is published

and nothing behind a page that is not written is ever written: spans are made in order, a span is copied only if all before
it are on the host (or on their way, which ranks do in order), and published only if all before it are. What fails takes what
goes on from it along, and is tried again by whoever comes by.

Pages of the GPU are pinned from the moment when a copy is ordered until every rank has made it; the sequence holds them, and
lets go of them, as if there were no offload. So however a request ends, each page is released once by it and once by each pin,
of whatever part of the request it is: the prompt, an increment or the end.

`written` is how many tokens of a sequence have their KV in pages, as every rank has reported. The token that was sampled
last has none, and is never counted. A view says where a page is now, or None if it is not on the GPU any more.

Knows hashes, page numbers, pages and ranks; nothing of tensors, stores or requests beside their names.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from disagg.memory.layout import PoolLayout
from disagg.messages.tiers import PageMove
from disagg.offload.acks import Acks
from disagg.offload.host import HostPool, Placed
from disagg.offload.instructions import Beyond, Copy, GpuPage, Instruction, Pin, Publish, Unpin
from disagg.offload.rules import OffloadRules
from disagg.offload.spans import Flow, InFlightSpans, Key, Span, SpanState, View, gpu_pages, know
from disagg.offload.stored import StoredPages
from disagg.offload.uploads import Uploads

NEVER = 1 << 62
NOTHING = Beyond()


class OffloadManager:
    """Of one incarnation of a server's workers.

    storage: there is one (see `set_store`). most_uploads: at once. most_lingering: pages of the GPU that wait for room on
    the host though their request has ended. counts: pages "copied", "stored" and "dropped", and spans "failed".
    """

    def __init__(
        self,
        rules: OffloadRules,
        host: Callable[[PoolLayout, Callable[[bytes], object]], HostPool],
        *,
        ranks: int,
        storage: bool,
        most_uploads: int = 8,
        most_lingering: int = 0,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.host = host(rules.layout, lambda page_hash: self._copied.pop(page_hash, None))
        self._rules = rules
        self._groups = range(len(rules.layout.groups))
        self._copies, self._uploads = Acks(ranks), Uploads(ranks, most_uploads)
        self._storing = storage
        self.host.whole_prefixes = not storage
        self._most_lingering = most_lingering
        self._flows: dict[str, Flow] = {}
        self._lingering: list[Flow] = []
        self._keepers: dict[Flow, None] = {}  # sequences that have not let go of the host's pages
        self._in_flight = InFlightSpans()
        self._copied: OrderedDict[bytes, None] = OrderedDict()  # pages whose content, if there is any, is on the host
        self.stored = StoredPages(self._groups)
        self._copying: dict[int, Span] = {}
        self._asked: dict[int, Flow] = {}
        self._version = 0  # changes when what could not go on may be able to
        self._out: list[Instruction] = []

    # ---- sequences

    def begin(
        self,
        request: str,
        root: bytes,
        hashes: Sequence[bytes],
        prompt_tokens: int,
        salt: str = "",
        *,
        to_storage: bool = True,
    ) -> None:
        """hashes: of the sequence's whole pages; whoever has the list goes on filling it. salt: the tenant's.

        to_storage: False of what somebody else stores, and which is kept on the host only.
        """
        assert request not in self._flows, f"{request} has begun already"
        prompt_end = self._rules.prompt_end(prompt_tokens)
        flow = self._flows[request] = Flow(root, hashes, prompt_end, salt, to_storage=to_storage)
        self._keepers[flow] = None

    def progress(self, request: str, written: int, view: View) -> list[Instruction]:
        """More of a sequence is written. To be called before the sequence lets go of what left a window."""
        flow = self._flows[request]
        flow.pages = max(flow.pages, min(written // self._rules.layout.page_tokens, len(flow.hashes)))
        if flow.pages >= flow.next and flow.blocked_since != self._version:
            self._advance(flow, view)
        return self._take()

    def finish(self, request: str, written: int, view: View, *, tail: bool = True, asked: int = 0) -> list[Instruction]:
        """The sequence has ended, and lets go of its pages when these instructions are carried out. The name is free.

        tail: what is below a stride is offloaded, too; not so of a request that was aborted. asked: what storage has been asked
        for it, and has not answered: until it has (`answered`), what is copied now waits on the host.
        """
        flow = self._flows.pop(request)
        if not tail:
            self._let_go(flow)
            return self._take()
        flow.ended = True
        if asked and self._stores(flow):
            flow.asked, self._asked[asked] = True, flow
        flow.pages = max(flow.pages, min(written // self._rules.layout.page_tokens, len(flow.hashes)))
        self._advance(flow, view)
        if flow.at >= self._rules.last_point(flow.pages) or not self._linger(flow, view):
            self._let_go(flow)
        return self._take()

    def found(self, hashes: Sequence[bytes], pages: int, keys: Iterable[Key] = (), beyond: Beyond = NOTHING) -> None:
        """Storage was asked for a sequence, and has its first so many pages, in these groups. What it has not it has lost."""
        self.stored.add(hashes[:pages], keys)
        self.stored.lost(hashes[pages:])
        self.stored.add(beyond.hashes, beyond.keys)

    def answered(self, asked: int) -> list[Instruction]:
        """Storage has said what it has (`found`), or that it cannot."""
        flow = self._asked.pop(asked, None)
        if flow is not None:
            flow.asked = False
        return self._take()

    def set_store(self, works: bool) -> None:
        """Storage is degraded to none, or is there again: then what is on the host only is written, as sequences come by."""
        if works and not self._storing:
            for flow in (*self._flows.values(), *self._lingering):
                flow.go_back(0)
            for flow in self._keepers:
                self._release_kept(flow)
        self._storing = works
        self.host.whole_prefixes = not works
        self._version += 1

    def give_up_waiting(self) -> list[Instruction]:
        """The GPU's memory is needed: pages of sequences that have ended wait no longer for room on the host."""
        for flow in self._lingering:
            self._drop(flow)
        self._lingering.clear()
        return self._take()

    # ---- what ranks and the store report

    def copied(self, rank: int, last: int) -> list[Instruction]:
        """A rank has made all copies up to this number."""
        for op in self._copies.report(rank, last):
            span = self._copying.pop(op)
            for page, host_page in span.moved:
                page_hash, before = span.names[page.group, page.page_no]
                if self.host.find(page.group, page_hash) is None:  # else a load brought it from storage meanwhile
                    self.host.name(page.group, host_page, page_hash, before)
            self.counts["copied"] += len(span.moved)
            self._out.append(Unpin(tuple(page for page, _ in span.moved)))
            self._on_host(span)
        return self._take()

    def uploaded(self, rank: int, last: int, failed: Iterable[int] = ()) -> list[Instruction]:
        """A rank has ended all uploads up to this number, of which it could not write `failed`."""
        for span, failed_somewhere in self._uploads.report(rank, last, failed):
            if failed_somewhere or not span.to_storage:
                self._out.append(self._uploads.give_up(span))
                if span.to_storage:
                    self._fail(span)
                else:
                    self._end(span, SpanState.ENDED)
                continue
            span.state = SpanState.UPLOADED
            self._publish(span)
        return self._take()

    def published(self, op: int, pages: int | None, beyond: Beyond = NOTHING) -> list[Instruction]:
        """So many of an upload's pages can be found from now on: all, or as many as somebody else had stored before. None: it is
        not known whether any. beyond: what else is in the span that has them."""
        span = self._uploads.end(op)
        assert span.state is SpanState.PUBLISHING, f"upload {op} is {span.state.value}"
        found = 0 if pages is None else min(pages, len(span.hashes))
        self.stored.add(span.hashes[:found])
        self.stored.add(beyond.hashes, beyond.keys)
        if found < len(span.hashes):
            if found and self._storing:
                self._go_on_from(span, found)
            else:
                self._fail(span)
            return self._take()
        self.stored.add((), span.keys)
        self.counts["stored"] += sum(map(len, span.placed))
        self._is_stored(span)
        return self._take()

    # ---- how a sequence goes on

    def _advance(self, flow: Flow, view: View) -> None:
        """Makes spans of all that can be one now."""
        flow.blocked_since = -1
        while self._skip(flow):
            stop = self._rules.cut(flow.at, flow.prompt_end)
            if flow.pages < stop:
                last = self._rules.last_point(flow.pages) if flow.ended else 0
                if last <= flow.at:
                    flow.next = stop
                    return
                stop = last
            if not self._make_span(flow, self._before_what_is_there(flow, stop), view):
                break
        flow.blocked_since = self._version

    def _stores(self, flow: Flow) -> bool:
        return self._storing and flow.to_storage

    def _skip(self, flow: Flow) -> bool:
        """Goes over what is done or under way. False: somebody else's copy has to be waited for."""
        stores = self._stores(flow)
        while flow.at < min(flow.pages, len(flow.hashes)):
            page_hash = flow.hashes[flow.at]
            span = self._in_flight.hashes.get(page_hash)
            if stores and self.stored.has_prefix(page_hash):
                pass
            elif span is not None:
                if stores and not span.to_storage:
                    return False
                if flow not in span.followers:
                    span.follow(flow)
            elif not stores and page_hash in self._copied:
                self._keep(flow, flow.at)
            else:
                return True
            flow.at += 1
        return True

    def _before_what_is_there(self, flow: Flow, stop: int) -> int:
        """A span ends where the next page is stored, or in a span already, though pages before it are not."""
        for page_no in range(flow.at + 1, stop):
            page_hash = flow.hashes[page_no]
            if page_hash in self._in_flight.hashes or (self._stores(flow) and self.stored.has_prefix(page_hash)):
                return page_no
        return stop

    def _keep(self, flow: Flow, page_no: int) -> None:
        """Hold what the host has of a page, as long as the sequence runs."""
        for g in self._groups:
            page = self.host.find(g, flow.hashes[page_no])
            if page is not None:
                self.host.hold(g, page)
                flow.kept.append((g, page_no, page))

    def _release_kept(self, flow: Flow) -> None:
        self.host.release(flow.kept)
        flow.kept = []
        self._version += 1

    def _let_go(self, flow: Flow) -> None:
        """The sequence is over, or its last span."""
        flow.gone = True
        if not flow.open:
            self._release_kept(flow)
            self._keepers.pop(flow, None)

    def _make_span(self, flow: Flow, stop: int, view: View) -> bool:
        """Pages [flow.at, stop). False: not now, and nothing has changed."""
        before, stores = flow.hash_before(flow.at), self._stores(flow)
        is_stored = not flow.at or (stores and self.stored.has_prefix(before))
        parent = None if is_stored else self._in_flight.hashes.get(before)
        if stores and not is_stored:
            if parent is None:
                flow.go_back(0)  # it is not stored any more, or nobody remembers that it is
                return True
            if not parent.to_storage:
                return False
        span = Span(flow, flow.hashes[flow.at : stop], before, parent)
        ready: list[dict[int, int]] = []
        copies: list[list[GpuPage]] = []
        for g in self._groups:
            page_nos = {*range(flow.at, stop), *self._rules.needed(g, stop)}
            if stores and self._in_flight.only_to_host((g, flow.hashes[page_no]) for page_no in page_nos):
                return False
            wanted = self._wanted(flow, g, stop, view)
            if wanted is None:
                flow.next = NEVER  # pages that every prefix from here on needs are gone
                return False
            ready.append({})
            copies.append([])
            for page_no in wanted:
                host_page, page = self.host.find(g, span.name(flow, g, page_no)), view(g, page_no)
                if host_page is not None:
                    ready[g][page_no] = host_page
                else:
                    assert page is not None
                    copies[g].append(GpuPage(g, page_no, page))
        held = [(g, page_no, page) for g, pages in enumerate(ready) for page_no, page in pages.items()]
        for g, _, page in held:
            self.host.hold(g, page)
        taken = self.host.take([len(pages) for pages in copies])
        if taken is None:
            self.host.release(held)
            return False
        span.place(flow, ready, [list(zip(*moved, strict=True)) for moved in zip(copies, taken, strict=True)])
        self._begin_span(flow, span)
        return True

    def _wanted(self, flow: Flow, g: int, stop: int, view: View) -> list[int] | None:
        """Positions of a group's pages that the span up to `stop` has, as far as they can be had. None: it cannot be made."""

        def there(page_no: int) -> bool:
            return self.host.find(g, flow.hashes[page_no]) is not None or view(g, page_no) is not None

        def kept(page_no: int) -> bool:
            key = g, flow.hashes[page_no]
            return key in self._in_flight.keys or (self.stored.has_page(key) and self._stores(flow))

        return self._rules.wanted(g, range(flow.at, stop), flow.prompt_end, there, kept)

    def _begin_span(self, flow: Flow, span: Span) -> None:
        span.to_storage = self._stores(flow)
        self._in_flight.add(span)
        if span.parent is not None:
            span.parent.children.append(span)
        flow.at = span.stop
        span.follow(flow)
        if not span.moved:
            self._on_host(span)
            return
        pages = tuple(page for page, _ in span.moved)
        pins = tuple(page for page in pages if flow.pinned.pop((page.group, page.page_no), None) is None)
        if pins:
            self._out.append(Pin(pins))
        op = self._copies.issue()
        self._copying[op] = span
        self._out.append(Copy(op, tuple(PageMove(page.group, page.page, at) for page, at in span.moved)))

    # ---- how a span goes on

    def _on_host(self, span: Span) -> None:
        know(self._copied, span.hashes)
        if span.to_storage:
            self._uploads.wait(span)
        else:
            self._end(span, SpanState.ENDED)

    def _start_uploads(self) -> None:
        while (span := self._uploads.next()) is not None:
            if not self._leave_to_others(span):
                self._out.append(self._uploads.begin(span))

    def _publish(self, span: Span) -> None:
        is_next = span.parent is None or span.parent.state is SpanState.STORED
        if span.state is SpanState.UPLOADED and is_next and not self._leave_to_others(span):
            span.state = SpanState.PUBLISHING
            self._out.append(Publish(span.upload))

    def _leave_to_others(self, span: Span) -> bool:
        """Somebody else has stored its first pages, as is known by now: only what follows these is left of it. Storage, which
        finds a span by its first page, would have the others twice."""
        known = next((i for i, each in enumerate(span.hashes) if not self.stored.has_prefix(each)), len(span.hashes))
        if not known:
            return False
        span.leave_parent()
        if span.state is SpanState.UPLOADED:
            self._out.append(self._uploads.give_up(span))
        if known < len(span.hashes):
            self._go_on_from(span, known)
        else:
            self._is_stored(span)
        return True

    def _is_stored(self, span: Span) -> None:
        self._end(span, SpanState.STORED)
        for child in tuple(span.children):
            self._publish(child)

    def _fail(self, span: Span) -> None:
        """It is not stored; what goes on from it will not be, either."""
        self.counts["failed"] += 1
        for flow in (*self._flows.values(), *self._lingering):
            if flow.at > span.start and flow.hashes[span.start] == span.hashes[0]:
                flow.go_back(span.start)
        self._end(span, SpanState.ENDED)
        for child in span.children:
            self._doom(child)

    def _go_on_from(self, span: Span, found: int) -> None:
        """What follows somebody else's span is on the host: the sequence may have ended, and nobody else come by for it."""
        self._in_flight.remove(span)
        left, others = span.goes_on_from(found, self._rules)
        self._in_flight.add(span)
        self.host.release(left)
        self._version += 1
        self._on_host(span)
        for child in others:
            self._publish(child)

    def _doom(self, first: Span) -> None:
        """A span whose parent failed, and all that go on from it, go no further than to the host."""
        doomed = [first]
        while doomed:
            span = doomed.pop()
            doomed += span.children
            span.to_storage = False
            if span.state is SpanState.WAITING:
                self._uploads.leave(span)
                self._end(span, SpanState.ENDED)
            elif span.state is SpanState.UPLOADED:
                self._out.append(self._uploads.give_up(span))
                self._end(span, SpanState.ENDED)

    def _end(self, span: Span, state: SpanState) -> None:
        """Its pages stay on the host until their memory is needed."""
        span.state = state
        placed = span.held
        for flow in span.followers:
            if not self._stores(flow):
                for g, _, page in placed:
                    self.host.hold(g, page)
                flow.kept += placed
        self.host.release(placed)
        self._in_flight.remove(span)
        self._version += 1
        for flow in span.followers:
            flow.open -= 1
            if flow.gone:
                self._let_go(flow)
        span.parent, span.followers = None, []

    # ---- sequences that have ended, and wait for room on the host

    def _linger(self, flow: Flow, view: View) -> bool:
        """Pins what is still to be copied, if that is not too much. False: it is dropped."""
        wanted = flow.to_be_copied(self._rules, self.host, view)
        waiting = sum(len(each.pinned) for each in self._lingering)
        if flow.next == NEVER or waiting + len(wanted) > self._most_lingering:
            self.counts["dropped"] += self._rules.last_point(flow.pages) - flow.at
            return False
        flow.pinned = wanted
        if wanted:
            self._out.append(Pin(gpu_pages(wanted)))
        self._lingering.append(flow)
        return True

    def _try_lingering(self) -> None:
        for flow in [*self._lingering]:
            if flow.blocked_since == self._version:
                continue
            pinned = dict(flow.pinned)
            self._advance(flow, lambda g, page_no, pinned=pinned: pinned.get((g, page_no)))  # type: ignore[misc]
            if flow.at >= self._rules.last_point(flow.pages) or flow.next == NEVER:
                self._drop(flow)
                self._lingering.remove(flow)

    def _drop(self, flow: Flow) -> None:
        self.counts["dropped"] += max(0, self._rules.last_point(flow.pages) - flow.at)
        if flow.pinned:
            self._out.append(Unpin(gpu_pages(flow.pinned)))
        flow.pinned = {}
        self._let_go(flow)

    # ---- the end of every event

    def _take(self) -> list[Instruction]:
        before = None
        while before != (self._version, len(self._out)):
            before = self._version, len(self._out)
            self._try_lingering()
            self._start_uploads()
        out, self._out = self._out, []
        return out

    @property
    def idle(self) -> bool:
        """Nothing is under way; what waits for room on the host, waits."""
        return not self._copying and self._uploads.idle

    def check_integrity(self, others: Iterable[Placed] = ()) -> None:
        """What must hold between any two events: what is held on the host is held by spans and running sequences.

        others: what of the host is held by somebody else.
        """
        self.host.check_integrity()
        spans = {*self._copying.values(), *self._uploads}
        holding = [[*others], *(span.held for span in spans), *(flow.kept for flow in self._keepers)]
        held = Counter((g, page) for placed in holding for g, _, page in placed)
        assert held == self.host.holders(), "pages of the host that are held, and who holds them, differ"
        assert {*self._flows.values(), *self._lingering} <= self._keepers.keys()
        assert all(flow.open > 0 for flow in self._keepers.keys() - {*self._flows.values(), *self._lingering})
        assert set(self._in_flight.hashes.values()) <= spans
        assert {key: span for span in spans for key in span.keys} == self._in_flight.keys
