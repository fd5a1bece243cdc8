"""Who waits for what while he holds what: the order of resources of a transfer as a small explicit-state model.

    request   WAITING ── admit ──> COMPUTED ── grant ──> RECEIVING ── its pieces ──> RUNNING ── grow ──> DONE
                          P's pages            D's pages            ring entry, then     │ ^
                                               the link's segment   P's staging          v │ give way, resume
                                                                                        PARKED

A link's segment is its link's, not its legs': it is taken when a leg of it waits, and given back when no leg of it is
receiving and another link waits. A parked sequence holds nothing. `explore` visits every state that any interleaving
reaches. `Order` switches single rules off, to show what they are there for.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace


class Phase(enum.IntEnum):
    WAITING = 0
    COMPUTED = 1  # holds prefill pages; waits for its grant
    RECEIVING = 2
    RUNNING = 3  # holds decode pages only
    PARKED = 4  # gave way
    DONE = 5


class Part(enum.IntEnum):
    """What the leg holds for the piece that is being moved."""

    NOTHING = 0
    ENTRY = 1  # a ring entry
    WRITING = 2  # and a staging buffer
    WRITTEN = 3  # the buffer is free again


class Spec(Struct, frozen=True):
    """What a request needs. growth: pages that it takes one by one while it decodes."""

    prefill: int
    decode: int
    prefill_pages: int = 1
    decode_pages: int = 1
    pieces: int = 1
    growth: int = 0


class Sizes(Struct, frozen=True):
    """Of each server or link."""

    prefill_pages: int = 2
    decode_pages: int = 2
    staging: int = 1
    entries: int = 1
    segments: int = 1  # of a decode server's arena; a link takes one


class Order(Struct, frozen=True):
    """As shipped. Each field switched to the other value is an order that somebody might take for right."""

    grant_before_entry: bool = True  # a ring entry is taken only for a granted request
    grant_before_staging: bool = True  # P gathers nothing for a request that is not granted
    segment_on_demand: bool = (
        True  # the holder of a segment gives it back as soon as it receives nothing and another waits
    )
    segment_with_grant: bool = True  # nobody holds decode pages while his link waits for a segment
    all_or_nothing: bool = True  # a grant takes all its pages at once
    oldest_first: bool = True  # nobody overtakes one who waits for pages
    gives_way: bool = True  # a running sequence is preempted when pages are short


class Leg(Struct, frozen=True):
    phase: Phase = Phase.WAITING
    pages: int = 0  # of decode, held
    grown: int = 0
    moved: int = 0  # pieces
    part: Part = Part.NOTHING
    staging: bool = False  # held while it waits for its grant


class State(Struct, frozen=True):
    """queues: per decode server, who waits for pages, longest first. rings: links (prefill, decode) that hold a segment."""

    legs: tuple[Leg, ...]
    queues: tuple[tuple[int, ...], ...]
    rings: frozenset[tuple[int, int]] = frozenset()

    @property
    def complete(self) -> bool:
        return all(leg.phase is Phase.DONE for leg in self.legs)


Step = tuple[str, int]  # what is done, and for which request or (open, close) link


class Model:
    """The rules. Knows counts only."""

    def __init__(self, specs: tuple[Spec, ...], sizes: Sizes, order: Order, again: tuple[int, ...] = ()) -> None:
        """again: requests that come anew when they are done, for ever."""
        self.specs, self.sizes, self.order, self.again = specs, sizes, order, again
        self.decodes = 1 + max(spec.decode for spec in specs)
        self.links = sorted({(spec.prefill, spec.decode) for spec in specs})
        self._of_link = {
            link: [number for number in range(len(specs)) if self._link(number) == link] for link in self.links
        }

    def start(self) -> State:
        return State(tuple(Leg() for _ in self.specs), ((),) * self.decodes)

    def steps(self, state: State) -> Iterator[tuple[Step, State]]:
        """Everything that can happen next."""
        for number, leg in enumerate(state.legs):
            match leg.phase:
                case Phase.WAITING:
                    yield from self._admit(state, number)
                case Phase.COMPUTED:
                    yield from self._computed(state, number, leg)
                case Phase.RECEIVING:
                    yield from self._receiving(state, number, leg)
                case Phase.RUNNING:
                    yield from self._running(state, number, leg)
                case Phase.PARKED:
                    if self._free(state, number) >= self._whole(number, leg) and self._is_next(state, number):
                        whole = replace(leg, phase=Phase.RUNNING, pages=self._whole(number, leg))
                        yield ("resume", number), self._leave_queue(self._with(state, number, whole), number)
                case Phase.DONE:
                    if number in self.again:
                        yield ("again", number), self._with(state, number, Leg())
        yield from self._segments(state)

    # ---- what is free

    def _of(self, state: State, number: int, *, prefill: bool) -> list[tuple[Spec, Leg]]:
        """All legs of the same prefill, or decode, server."""
        own = self.specs[number]
        return [
            (spec, leg)
            for spec, leg in zip(self.specs, state.legs, strict=True)
            if (spec.prefill == own.prefill if prefill else spec.decode == own.decode)
        ]

    def _free(self, state: State, number: int) -> int:
        """Pages of its decode server."""
        return self.sizes.decode_pages - sum(leg.pages for _, leg in self._of(state, number, prefill=False))

    def _staging_free(self, state: State, number: int) -> bool:
        held = sum(leg.staging or leg.part is Part.WRITING for _, leg in self._of(state, number, prefill=True))
        return held < self.sizes.staging

    def _entry_free(self, state: State, number: int) -> bool:
        link = self._link(number)
        held = sum(leg.part is not Part.NOTHING for n, leg in enumerate(state.legs) if self._link(n) == link)
        return held < self.sizes.entries

    def _link(self, number: int) -> tuple[int, int]:
        return self.specs[number].prefill, self.specs[number].decode

    def _whole(self, number: int, leg: Leg) -> int:
        return self.specs[number].decode_pages + leg.grown

    def _is_next(self, state: State, number: int) -> bool:
        """Who gave way goes first, of them who has waited longest; then nobody who has waited longer waits for pages: who waits
        for his link's segment does not keep others waiting.
        """
        if not self.order.oldest_first:
            return True
        queue = state.queues[self.specs[number].decode]
        parked = [other for other in queue if state.legs[other].phase is Phase.PARKED]
        if parked:
            return parked[0] == number
        for other in queue:
            if other == number:
                return True
            if self._link(other) in state.rings:
                return False
        return True

    # ---- changes

    def _with(self, state: State, number: int, leg: Leg) -> State:
        return replace(state, legs=(*state.legs[:number], leg, *state.legs[number + 1 :]))

    def _queue(self, state: State, number: int) -> State:
        decode = self.specs[number].decode
        queues = list(state.queues)
        queues[decode] = (*queues[decode], number)
        return replace(state, queues=tuple(queues))

    def _leave_queue(self, state: State, number: int) -> State:
        return replace(state, queues=tuple(tuple(n for n in queue if n != number) for queue in state.queues))

    def _admit(self, state: State, number: int) -> Iterator[tuple[Step, State]]:
        held = sum(
            spec.prefill_pages
            for spec, leg in self._of(state, number, prefill=True)
            if leg.phase in (Phase.COMPUTED, Phase.RECEIVING)
        )
        if held + self.specs[number].prefill_pages <= self.sizes.prefill_pages:
            yield ("admit", number), self._queue(self._with(state, number, Leg(Phase.COMPUTED)), number)

    def _computed(self, state: State, number: int, leg: Leg) -> Iterator[tuple[Step, State]]:
        spec, order = self.specs[number], self.order
        if not order.grant_before_entry and leg.part is Part.NOTHING:
            if self._link(number) in state.rings and self._entry_free(state, number):
                yield ("take entry", number), self._with(state, number, replace(leg, part=Part.ENTRY))
            return
        if not order.grant_before_staging and not leg.staging:
            if self._staging_free(state, number):
                yield ("gather", number), self._with(state, number, replace(leg, staging=True))
            return
        ring = self._link(number) in state.rings
        missing = spec.decode_pages - leg.pages
        take = missing if order.all_or_nothing else min(1, missing)
        if take and (ring or not order.segment_with_grant) and self._is_next(state, number):
            if self._free(state, number) < take:
                return
            leg = replace(leg, pages=leg.pages + take)
            state = self._with(state, number, leg)
            if leg.pages < spec.decode_pages or not ring:
                yield ("take pages", number), state
                return
        if leg.pages == spec.decode_pages and ring:
            granted = self._with(state, number, replace(leg, phase=Phase.RECEIVING))
            yield ("grant", number), self._leave_queue(granted, number)

    def _receiving(self, state: State, number: int, leg: Leg) -> Iterator[tuple[Step, State]]:
        match leg.part:
            case Part.NOTHING:
                if self._entry_free(state, number):
                    yield ("take entry", number), self._with(state, number, replace(leg, part=Part.ENTRY))
            case Part.ENTRY:
                if leg.staging or self._staging_free(state, number):
                    yield (
                        ("gather and write", number),
                        self._with(state, number, replace(leg, part=Part.WRITING, staging=False)),
                    )
            case Part.WRITING:
                yield ("written", number), self._with(state, number, replace(leg, part=Part.WRITTEN))
            case Part.WRITTEN:
                moved = leg.moved + 1
                phase = Phase.RUNNING if moved == self.specs[number].pieces else Phase.RECEIVING
                yield (
                    ("scatter", number),
                    self._with(state, number, replace(leg, part=Part.NOTHING, moved=moved, phase=phase)),
                )

    def _running(self, state: State, number: int, leg: Leg) -> Iterator[tuple[Step, State]]:
        if leg.grown == self.specs[number].growth:
            yield ("finish", number), self._with(state, number, Leg(Phase.DONE))
            return
        if self._free(state, number):
            grown = replace(leg, pages=leg.pages + 1, grown=leg.grown + 1)
            yield ("grow", number), self._with(state, number, grown)
        if self.order.gives_way and self._short(state, number):
            parked = replace(leg, phase=Phase.PARKED, pages=0)
            yield ("give way", number), self._queue(self._with(state, number, parked), number)

    def _short(self, state: State, number: int) -> bool:
        """Another one of this decode server lacks pages to grow. Nobody gives way to one that waits for its grant."""
        free = self._free(state, number)
        for other, leg in enumerate(state.legs):
            if other == number or self.specs[other].decode != self.specs[number].decode:
                continue
            if leg.phase is Phase.RUNNING and leg.grown < self.specs[other].growth and not free:
                return True
        return False

    def _segments(self, state: State) -> Iterator[tuple[Step, State]]:
        for index, link in enumerate(self.links):
            legs = [state.legs[number] for number in self._of_link[link]]
            if link not in state.rings:
                held = sum(decode == link[1] for _, decode in state.rings)
                if any(leg.phase is Phase.COMPUTED for leg in legs) and held < self.sizes.segments:
                    yield ("open ring", index), replace(state, rings=state.rings | {link})
                continue
            busy = {Phase.RECEIVING} if self.order.segment_on_demand else {Phase.RECEIVING, Phase.COMPUTED}
            holds = any(leg.phase in busy or leg.part is not Part.NOTHING for leg in legs)
            if not holds and self._another_waits(state, link):
                yield ("close ring", index), replace(state, rings=state.rings - {link})

    def _another_waits(self, state: State, link: tuple[int, int]) -> bool:
        return any(
            state.legs[number].phase is Phase.COMPUTED
            for other, numbers in self._of_link.items()
            if other[1] == link[1] and other not in state.rings
            for number in numbers
        )


class Explored(Struct, frozen=True):
    """Every reachable state, with how it was first reached and what can follow."""

    parents: dict[State, tuple[Step, State] | None]
    following: dict[State, tuple[tuple[Step, State], ...]]

    def stuck(self) -> State | None:
        """The state first reached from which no interleaving, however lucky, comes to an end; None if there is none."""
        before: dict[State, list[State]] = {}
        for state, nexts in self.following.items():
            for _, following in nexts:
                before.setdefault(following, []).append(state)
        good = {state for state in self.following if state.complete}
        todo = deque(good)
        while todo:
            for state in before.get(todo.popleft(), ()):
                if state not in good:
                    good.add(state)
                    todo.append(state)
        return next((state for state in self.parents if state not in good), None)

    def trace(self, state: State) -> list[Step]:
        """The steps of a shortest way there."""
        steps: list[Step] = []
        while (parent := self.parents[state]) is not None:
            step, state = parent
            steps.append(step)
        return steps[::-1]

    def overtaken_for_ever(self, number: int) -> bool:
        """Some cycle grants others, again and again, while request `number` waits and is in no state of it grantable."""
        waits = {
            state
            for state, nexts in self.following.items()
            if state.legs[number].phase is Phase.COMPUTED and ("grant", number) not in {step for step, _ in nexts}
        }
        for state in waits:
            for step, following in self.following[state]:
                if step[0] == "grant" and following in waits and self._leads_back(following, state, waits):
                    return True
        return False

    def _leads_back(self, start: State, goal: State, within: set[State]) -> bool:
        seen, todo = {start}, [start]
        while todo:
            state = todo.pop()
            if state == goal:
                return True
            for _, following in self.following[state]:
                if following in within and following not in seen:
                    seen.add(following)
                    todo.append(following)
        return False


def explore(model: Model, max_states: int = 400_000) -> Explored:
    """Breadth first, over all interleavings."""
    start = model.start()
    parents: dict[State, tuple[Step, State] | None] = {start: None}
    following: dict[State, tuple[tuple[Step, State], ...]] = {}
    todo = deque([start])
    while todo:
        state = todo.popleft()
        following[state] = nexts = tuple(model.steps(state))
        for step, after in nexts:
            if after not in parents:
                parents[after] = (step, state)
                todo.append(after)
        assert len(parents) <= max_states, "the model is too large to be explored"
    return Explored(parents, following)
