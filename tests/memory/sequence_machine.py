"""The pages of sequences against a model of what every page holds.

A token's place holds a number that stands for all tokens up to it; a state page one for all tokens that it has seen. Runs
are computed in the order in which they were planned, one or two behind the planning; what lands, lands at any time. A page
that is handed out is blank from that moment on, and so is whatever another group had in its large page.
"""

from __future__ import annotations

import collections
from collections import deque

import hypothesis.strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from disagg.memory.kv_memory import KvMemory
from disagg.memory.sequence import SequencePages
from disagg.memory.spans import last_checkpoint, pages_for, window_start
from disagg.messages.layout import GroupKind
from tests.memory.machines import PICK, pick
from tests.memory.sequence_texts import (
    BLANK,
    CHECKPOINT_TOKENS,
    CHUNK_TOKENS,
    DOCUMENTS,
    MAX_IN_FLIGHT,
    MAX_LIVE,
    MAX_TOKENS,
    NUMBERS,
    PAGE_TOKENS,
    POOLS,
    ROOT,
    Arriving,
    Live,
    Planned,
    Text,
)


def machine(seen: collections.Counter[str]) -> type[RuleBasedStateMachine]:
    """seen: is told how often what the test is about has happened."""

    class SequenceMachine(RuleBasedStateMachine):
        @initialize(
            pool=st.sampled_from(sorted(POOLS)),
            caching=st.sampled_from((True, True, True, False)),
            prefills=st.sampled_from((False, False, False, True)),
        )
        def make(self, pool: str, caching: bool, prefills: bool) -> None:
            """prefills: as a prefill server's, where few runs of all sequences together are under way."""
            self.layout, num_large = POOLS[pool]
            self.prefills = prefills
            late = MAX_IN_FLIGHT * CHUNK_TOKENS if prefills else 0
            self.memory = KvMemory(self.layout, num_large, caching=caching, common_late_tokens=late)
            self.kinds = [group.kind for group in self.layout.groups]
            self.paged = [g for g, kind in enumerate(self.kinds) if kind is not GroupKind.STATE]
            self.states = [g for g, kind in enumerate(self.kinds) if kind is GroupKind.STATE]
            self.contents: list[dict[int, list[int]]] = [{} for _ in self.kinds]
            self.texts: dict[bytes, tuple[Text, int]] = {}  # by hash: whose page that is, and which
            self.live: list[Live] = []
            self.arriving: list[Arriving] = []
            self.plans: deque[Planned] = deque()
            self.clock = 0
            for text in DOCUMENTS:
                self._told(text)

        # ---- the model of the pool

        def _told(self, text: Text) -> Text:
            self.texts.update((name, (text, page_no)) for page_no, name in enumerate(text.names))
            return text

        def _hashes(self, text: Text, num_tokens: int) -> list[bytes]:
            hashes: list[bytes] = []
            self.memory.extend_hashes(hashes, ROOT, text.tokens[:num_tokens])
            return hashes

        def _hand_out(self, g: int, pages: tuple[int, ...]) -> None:
            """They are blank, and nothing of other groups lies in their large pages."""
            per_large = self.layout.per_large
            for page in pages:
                large = page // per_large[g]
                for other, contents in enumerate(self.contents):
                    if other != g:
                        for lost in range(large * per_large[other], (large + 1) * per_large[other]):
                            contents.pop(lost, None)
                self.contents[g][page] = list(BLANK)

        def _holds(self, g: int, page: int, page_no: int, text: Text, start: int, stop: int) -> bool:
            """The page of this number holds tokens [start, stop) of the text, as far as they lie in it."""
            first = page_no * PAGE_TOKENS
            low, high = max(start, first), min(stop, first + PAGE_TOKENS)
            content = self.contents[g].get(page, BLANK)
            return content[low - first : high - first] == text.marks[low:high]

        def _check_readable(self, live: Live, stop: int) -> None:
            """What the run that begins at `stop` needs, by its worker's tables."""
            for g in self.paged:
                window = self.layout.groups[g].window_tokens
                start = max(0, stop - window) if self.kinds[g] is GroupKind.WINDOW else 0
                table = live.tables[g]
                for page_no in range(start // PAGE_TOKENS, pages_for(stop, PAGE_TOKENS)):
                    assert self._holds(g, table[page_no], page_no, live.text, start, stop), (
                        f"group {g} page number {page_no} of {stop} tokens"
                    )
            for g in self.states:
                if stop:
                    assert self.contents[g][live.tables[g][-1]][0] == live.text.marks[stop - 1], (
                        f"state of {stop} tokens"
                    )

        def _check_sendable(self, live: Live) -> None:
            """What decode may ask of a computed prompt, and the checkpoint if there is one."""
            tokens = live.num_prompt
            for g, group in enumerate(self.layout.groups):
                if g in self.states:
                    (page,) = live.pages.pages(g, 0, 1)
                    assert self.contents[g][page][0] == live.text.marks[tokens - 1]
                    if live.pages.has_checkpoint:
                        (page,) = live.pages.pages(g, 1, 2)
                        checkpoint = last_checkpoint(tokens, CHECKPOINT_TOKENS)
                        assert self.contents[g][page][0] == live.text.marks[checkpoint - 1]
                    continue
                start = 0
                if group.kind is GroupKind.WINDOW:
                    start = window_start(tokens, group.window_tokens, PAGE_TOKENS)
                first = start // PAGE_TOKENS
                pages = live.pages.pages(g, first, pages_for(tokens, PAGE_TOKENS))
                for page_no, page in enumerate(pages, start=first):
                    assert self._holds(g, page, page_no, live.text, start, tokens)

        # ---- how sequences begin

        @precondition(lambda self: len(self.live) + len(self.arriving) < MAX_LIVE)
        @rule(
            document=NUMBERS,
            tokens=st.integers(1, MAX_TOKENS),
            sends=st.booleans(),
            spare=st.integers(0, 6),
            runs=st.integers(0, 16),
        )
        def compute(self, document: int, tokens: int, sends: bool, spare: int, runs: int) -> None:
            """A prompt, or (for decode) all of a sequence that gave way, is computed as far as it is not cached."""
            text = DOCUMENTS[document]
            hashes = self._hashes(text, tokens)
            sends = sends or self.prefills
            reserved = tokens if sends else min(tokens + spare, MAX_TOKENS)
            pages = self.memory.open(hashes, tokens, reserved, CHUNK_TOKENS, self.clock)
            if pages is None:
                self._make_room()
                return
            if sends:
                pages.hold_for_sending(tokens)
            hit = pages.computed
            assert hit < tokens and hit % PAGE_TOKENS == 0
            seen["hit"] += hit > 0
            self._go_on(self._begin(text, pages, hashes, tokens, hit, sends, tokens), runs)

        def _make_room(self) -> None:
            """Something was refused: one ends, so that there is room for the next."""
            seen["refused"] += 1
            if self.live:
                self.close(0)
            elif self.arriving:
                self.break_off(0)

        def _begin(
            self, text: Text, pages: SequencePages, hashes: list[bytes], known: int, at: int, sends: bool, sure: int
        ) -> Live:
            tables = [[0] * table.first + list(table.pages) for table in pages.tables()]
            live = Live(text, pages, tables, hashes, known, known, at, sends, sure)
            self.live.append(live)
            self._check_readable(live, at)
            return live

        @rule(document=NUMBERS, tokens=st.integers(1, MAX_TOKENS))
        def look(self, document: int, tokens: int) -> None:
            """What a lookup says is there is there, in every group."""
            text = DOCUMENTS[document]
            hit = self.memory.lookup(text.names, tokens)
            pages = SequencePages(self.memory)
            pages.pin_hit(text.names, hit)
            seen["hit"] += hit > 0
            self._begin(text, pages, [], tokens, hit, True, 0)
            self.live.pop()
            pages.close(self.clock)

        @precondition(lambda self: not self.prefills and len(self.live) + len(self.arriving) < MAX_LIVE)
        @rule(
            document=NUMBERS,
            tokens=st.integers(1, MAX_TOKENS),
            spare=st.integers(0, 6),
            choices=st.integers(1, 3),
        )
        def receive(self, document: int, tokens: int, spare: int, choices: int) -> None:
            text = DOCUMENTS[document]
            spare = min(spare, MAX_TOKENS - tokens)
            alone = self.memory.allocator.used_large == 0  # then it gets what it must have, and perhaps no more
            pages = self.memory.receive(self._hashes(text, tokens), tokens, spare, choices, self.clock)
            if pages is None:
                self._make_room()
                return
            tables = pages.landing(tokens)
            for g, table in enumerate(tables):
                self._hand_out(g, table.pages)
                start = 0
                if self.kinds[g] is GroupKind.WINDOW:
                    start = window_start(tokens, self.layout.groups[g].window_tokens, PAGE_TOKENS)
                assert start <= pages.wants[g] <= tokens
                seen["wants less"] += pages.wants[g] > start
            sure = tokens if alone or self.states else tokens + spare
            self.arriving.append(Arriving(text, pages, tables, tokens, sure, choices, [set() for _ in tables]))

        # ---- what lands

        @precondition(lambda self: self.arriving)
        @rule(number=PICK, g=PICK, first=PICK, count=st.integers(1, 9))
        def land(self, number: int, g: int, first: int, count: int) -> None:
            """A piece, of whatever rows."""
            arriving = pick(self.arriving, number)
            g = pick(range(len(self.kinds)), g)
            want, stop = arriving.pages.wants[g], arriving.num_tokens
            if g in self.states:
                stop = len(arriving.tables[g].pages)
            if want < stop:
                first = want + first % (stop - want)
                self._land(arriving, g, range(first, min(first + count, stop)))

        def _land(self, arriving: Arriving, g: int, places: range) -> None:
            table, marks = arriving.tables[g], arriving.text.marks
            for place in places:
                if g in self.states:
                    tokens = (arriving.num_tokens, last_checkpoint(arriving.num_tokens, CHECKPOINT_TOKENS))[place]
                    self.contents[g][table.pages[place]][0] = marks[tokens - 1]
                else:
                    page = table.pages[place // PAGE_TOKENS - table.first]
                    self.contents[g][page][place % PAGE_TOKENS] = marks[place]
                arriving.landed[g].add(place)

        @precondition(lambda self: self.arriving)
        @rule(number=PICK, runs=st.integers(0, 8))
        def arrive(self, number: int, runs: int) -> None:
            """Everything wanted lands, and the choices go on from there."""
            arriving = self.arriving.pop(number % len(self.arriving))
            for g, want in enumerate(arriving.pages.wants):
                self._land(arriving, g, range(want, 1 if g in self.states else arriving.num_tokens))
            tokens = arriving.num_tokens
            hashes = self._hashes(arriving.text, tokens)
            arriving.pages.landed(tokens, hashes, self.clock)
            forks, copies = arriving.pages.fork(arriving.choices)
            assert len(forks) == arriving.choices
            seen["copied"] += len(copies)
            begun = []
            for choice, pages in enumerate(forks):
                text = self._told(arriving.text.continued(tokens, choice))
                known = min(tokens + 1, MAX_TOKENS)
                tables = [[0] * table.first + list(table.pages) for table in pages.tables()]
                begun.append(Live(text, pages, tables, [*hashes], known, known, tokens, False, arriving.sure))
            self.live += begun
            begun[0].bound = arriving
            for copy in copies:
                self._hand_out(copy.group, (copy.destination,))
            if copies:
                self._plan(Planned(begun, copies=copies))
            for live in begun:
                self._go_on(live, runs)

        @precondition(lambda self: self.arriving)
        @rule(number=PICK)
        def break_off(self, number: int) -> None:
            """The transfer ends early: whole pages of it are kept."""
            arriving = self.arriving.pop(number % len(self.arriving))
            hashes = self._hashes(arriving.text, arriving.num_tokens)
            self._take_checkpoint(arriving, hashes)
            ranges = []
            for g, landed in enumerate(arriving.landed):
                whole = [
                    page_no
                    for page_no in range(arriving.num_tokens // PAGE_TOKENS)
                    if g in self.paged and landed.issuperset(range(page_no * PAGE_TOKENS, (page_no + 1) * PAGE_TOKENS))
                ]
                seen["kept of a broken transfer"] += len(whole)
                ranges.append([(page_no, page_no + 1) for page_no in whole])
            arriving.pages.landed_partly(arriving.num_tokens, hashes, ranges)
            arriving.pages.close(self.clock)

        def _take_checkpoint(self, arriving: Arriving, hashes: list[bytes]) -> None:
            landed = all(1 in arriving.landed[g] for g in self.states)
            arriving.pages.take_checkpoint(arriving.num_tokens, hashes, landed, self.clock)

        @precondition(lambda self: any(live.bound for live in self.live))
        @rule(number=PICK)
        def unbind(self, number: int) -> None:
            self._unbind(pick([live for live in self.live if live.bound], number))

        def _unbind(self, live: Live) -> None:
            assert live.bound is not None
            self._take_checkpoint(live.bound, live.hashes)
            live.bound = None

        # ---- runs

        @precondition(lambda self: any(live.left for live in self.live))
        @rule(number=PICK, tokens=st.integers(1, CHUNK_TOKENS))
        def plan(self, number: int, tokens: int) -> None:
            self._run(pick([live for live in self.live if live.left], number), tokens)

        @precondition(lambda self: any(live.left for live in self.live))
        @rule(number=PICK, runs=st.integers(4, 16), lag=st.integers(0, 1))
        def go_on(self, number: int, runs: int, lag: int) -> None:
            """One sequence computes a while."""
            self._go_on(pick([live for live in self.live if live.left], number), runs, lag)

        def _go_on(self, live: Live, runs: int, lag: int = 1) -> None:
            for _ in range(runs):
                if not live.left or not self._run(live, CHUNK_TOKENS):
                    return
                while live.in_flight > lag:
                    self.report()

        def _run(self, live: Live, tokens: int) -> bool:
            while self.prefills and len(self.plans) >= MAX_IN_FLIGHT:
                self.report()
            start = live.scheduled
            tokens = min(tokens, live.left)
            if self.states:
                tokens = min(tokens, CHECKPOINT_TOKENS - start % CHECKPOINT_TOKENS)
            stop = start + tokens
            new_pages = live.pages.grow(start, stop)
            if new_pages is None:
                seen["no page"] += 1
                assert stop > live.sure, "what was reserved was not there"
                return False
            for g, pages in enumerate(new_pages):
                seen["recycled"] += g in self.paged and not set(pages).isdisjoint(live.tables[g])
                self._hand_out(g, pages)
            live.scheduled = stop
            self._plan(Planned([live], start, stop, new_pages))
            return True

        def _plan(self, planned: Planned) -> None:
            self.plans.append(planned)
            for live in planned.lives:
                live.in_flight += 1

        @precondition(lambda self: any(not planned.computed for planned in self.plans))
        @rule()
        def compute_one(self) -> None:
            self._compute(next(planned for planned in self.plans if not planned.computed))

        def _compute(self, planned: Planned) -> None:
            planned.computed = True
            for copy in planned.copies:
                self.contents[copy.group][copy.destination] = list(self.contents[copy.group].get(copy.source, BLANK))
            if planned.copies:
                for live in planned.lives:
                    self._check_readable(live, live.computed)
                return
            (live,) = planned.lives
            self._check_readable(live, planned.start)
            for table, pages in zip(live.tables, planned.new_pages, strict=False):
                table += pages
            for g in self.paged:
                for token in range(planned.start, planned.stop):
                    page = live.tables[g][token // PAGE_TOKENS]
                    self.contents[g][page][token % PAGE_TOKENS] = live.text.marks[token]
            for g in self.states:
                self.contents[g][live.tables[g][-1]][0] = live.text.marks[planned.stop - 1]
            live.computed = planned.stop

        @precondition(lambda self: self.plans)
        @rule()
        def report(self) -> None:
            planned = self.plans.popleft()
            for live in planned.lives:
                live.in_flight -= 1
            if not planned.computed:
                self._compute(planned)
            self.clock += 1
            if planned.copies:
                return
            (live,) = planned.lives
            live.reported = planned.stop
            if not live.sends and not live.stopped:
                live.known = min(max(live.known, planned.stop + 1), MAX_TOKENS)
            self.memory.extend_hashes(live.hashes, ROOT, live.text.tokens[: live.known])
            live.pages.advance(planned.stop, live.hashes, self.clock)
            if planned.stop == live.num_prompt:
                live.pages.end_prefill(live.hashes, self.clock, goes_on=not live.sends)
                if live.sends:
                    live.pages.seal(planned.stop, live.hashes)
                    seen["kept a checkpoint to send"] += live.pages.has_checkpoint

        # ---- how sequences end

        @precondition(lambda self: self.live)
        @rule(number=PICK)
        def stop(self, number: int) -> None:
            """It plans no more, and learns of no more tokens."""
            pick(self.live, number).stopped = True

        @precondition(lambda self: self.live)
        @rule(number=PICK)
        def close(self, number: int) -> None:
            """Once no plan and no rank names its pages."""
            live = pick(self.live, number)
            live.stopped = True
            while live.in_flight:
                self.report()
            if live.bound:
                self._unbind(live)
            live.pages.seal(live.computed, live.hashes)
            live.pages.close(self.clock)
            self.live.remove(live)

        # ---- what holds after each of these

        @invariant()
        def nothing_is_lost(self) -> None:
            if not hasattr(self, "memory"):
                return
            self.memory.check_integrity([live.pages for live in self.live] + [each.pages for each in self.arriving])
            copying = {
                live for planned in self.plans if planned.copies and not planned.computed for live in planned.lives
            }
            for live in self.live:
                if live not in copying:
                    self._check_readable(live, live.computed)
                if live.sends and live.reported == live.num_prompt:
                    self._check_sendable(live)
            for g, key in self.memory.cache.snapshot().stored:
                page = self.memory.cache.find(g, key)
                assert page is not None
                text, page_no = self.texts[key]
                if g in self.states:
                    assert self.contents[g][page][0] == text.page(page_no)[-1], f"cached state {page} of group {g}"
                else:
                    assert self.contents[g][page] == text.page(page_no), f"cached page {page} of group {g}"

        def teardown(self) -> None:
            if not hasattr(self, "memory"):
                return
            while self.arriving:
                self.break_off(0)
            while self.live:
                self.close(0)
            self.memory.check_integrity([])
            allocator = self.memory.allocator
            assert allocator.used_large == 0
            if not self.memory.caching:
                assert allocator.free_large == allocator.num_large
            seen["evicted"] += sum(allocator.evictions)
            self._fit_alone()

        def _fit_alone(self) -> None:
            """Where nobody holds anything, what is said to fit fits, however it lies that is cached."""
            num_large = self.memory.allocator.num_large
            tokens, choices = 1 + self.clock % MAX_TOKENS, 1 + self.clock % 3
            total = min(tokens + self.clock % 11, MAX_TOKENS)
            for text in DOCUMENTS:
                hashes = self._hashes(text, tokens)
                if self.memory.large_pages_to_prefill(tokens, CHUNK_TOKENS) <= num_large:
                    pages = self.memory.open(hashes, tokens, total, CHUNK_TOKENS, self.clock)
                    assert pages is not None
                    pages.close(self.clock)
                    seen["fitted alone"] += 1
                if self.memory.large_pages_to_decode(tokens, total, choices) <= num_large:
                    pages = self.memory.receive(hashes, tokens, total - tokens, choices, self.clock)
                    assert pages is not None
                    pages.close(self.clock)
                    seen["fitted alone"] += 1

    return SequenceMachine
