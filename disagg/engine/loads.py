"""KV that comes back: what the host and storage have of a sequence enters the prefix cache before the sequence begins.

    ask ──> ASKED ──storage has answered──> planned ──┬─ nothing to gain ───────────────────────────────> OVER
              (without storage: at once)      ^       ├─ some is in storage only ──> FETCHING (to the host) ─┐
                                              └───────┼──────────────────────────────────────────────────────┘
                                                      └─ all is on the host, or the GPU ──> LOADING ──> cached, OVER

A load writes to pages that nobody else knows, and they enter the cache when every rank has written them: so nothing of it can be
read before, whoever waits may stop waiting at any time, and a load that fails leaves nothing behind. A sequence that
waits for its load holds nothing, and lets others go on. Then it begins as always, behind the longest prefix that is cached.

What has come for one that waits is cached, no more, and gives way when its memory is needed. So no more is brought than can begin
together (`_has_room`): else each would push out what came for those before it, and all of it would be read again, or computed.

Which prefixes are of use, the rules of the cache say (offload/rules): one of n pages needs, of each group, `needed(g, n)`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial

from disagg.engine.asks import Asks
from disagg.engine.facts import OffloadFacts
from disagg.engine.instructions import Instruction, ToStore, ToTransfer
from disagg.engine.load import Load, LoadState, Urgency
from disagg.engine.offload import Offload
from disagg.memory.kv_memory import KvMemory
from disagg.messages.layout import GroupKind
from disagg.messages.legs import LoadCosts
from disagg.messages.tiers import CopiedIn, CopyIn, PageMove, PartsRead
from disagg.offload.acks import Acks
from disagg.offload.host import Placed
from disagg.offload.instructions import Fetch, StoreFound
from disagg.offload.rates import Rates
from disagg.types.bounded import forget_oldest
from disagg.types.errors import ProtocolError

MOST_AT_ONCE = 16  # loads that fetch or copy; the others wait
MOST_ROUNDS = 3  # loads of one sequence
MOST_DISTRUSTED = 1 << 16  # pages that are known to be wrong on the host or in storage
TRIES = 4  # of one load, whose pages may be evicted under it


class Loads:
    """See the module. Of one incarnation; instructions are appended to `out`."""

    def __init__(
        self,
        facts: OffloadFacts,
        ranks: int,
        memory: KvMemory,
        offload: Offload,
        asks: Asks,
        out: list[Instruction],
        clock: Callable[[], int],
    ) -> None:
        self._memory = memory
        self._layout = memory.layout
        self._page_tokens = memory.layout.page_tokens
        self._offload = offload
        self._stores = facts.storage
        self._out = out
        self._clock = clock
        self._ranks = ranks
        self._loads: dict[Hashable, Load] = {}  # by who waits
        self._all: list[Load] = []  # that are not over
        self._fetches: dict[int, Load] = {}
        self._copies: dict[int, Load] = {}
        self._copy_acks = Acks(ranks)
        self._arriving: dict[tuple[int, bytes], Load] = {}  # by group and hash, what loads bring
        self._distrusted: OrderedDict[bytes, None] = OrderedDict()
        self._asks = asks
        self._fetch_ops = 0
        self._reserved_large = 0  # by all loads
        self._forgotten = 0  # sequences that have begun, or ended
        self.rates = Rates(load_always=facts.load_always)
        self.left: Counter[str] = Counter()  # loads that were not made, or not waited for, by why: slower, late
        self.tokens: Counter[str] = Counter()  # that loads brought, by tier
        self.failures = 0

    # ---- who waits

    def brought_back(
        self,
        who: Hashable,
        salt: str,
        root: bytes,
        hashes: Sequence[bytes],
        num_tokens: int,
        now_s: float,
        *,
        urgency: Urgency,
        storage: bool = True,
    ) -> bool:
        """A sequence of num_tokens tokens will begin: what is kept of it elsewhere is cached again, or not worth waiting for.

        When this is asked for the first time it begins to be brought, as far as that pays. storage: look there, too, and not
        on the host only. When it is its turn, what had no room, or gave way since, is brought once more.
        """
        load = self._loads.get(who)
        if load is None or (urgency is not Urgency.AHEAD and self._gave_way(load)):
            pages = min(len(hashes), (num_tokens - 1) // self._page_tokens)
            rounds = 1
            if load is not None:
                rounds = load.rounds + 1
                self._let_go_of_room(load)
            large = self._memory.large_pages_to_prefill(num_tokens, 0)
            load = Load(salt, root, tuple(hashes[:pages]), now_s, large, urgency, rounds=rounds)
            self._begin(who, load, storage)
        elif load.for_room:
            self._ask_for_room(load, urgency, now_s)
        return load.given_up or load.state is LoadState.OVER or load.waits_for_pool

    def _ask_for_room(self, load: Load, urgency: Urgency, now_s: float) -> None:
        """It is not waited for before its turn, nor is it late as long as others begin and end, which makes room for it."""
        progress = self._memory.releases + self._forgotten
        if progress != load.progress or (urgency is Urgency.AHEAD and not load.had_turn):
            load.since_s, load.progress = now_s, progress
        load.urgency, load.had_turn = urgency, urgency is not Urgency.AHEAD
        if not self._full and self._has_room(load):
            self._go_on(load)

    def _gave_way(self, load: Load) -> bool:
        """What it has brought, or could have, is not cached now."""
        over = load.state is LoadState.OVER and not (load.given_up or load.slower)
        if not over or load.rounds >= MOST_ROUNDS or load.looked_at == self._memory.releases:
            return False
        load.looked_at = self._memory.releases
        cached = self._memory.cache.lookup(load.hashes, len(load.hashes) * self._page_tokens)
        return cached < load.point * self._page_tokens

    def _begin(self, who: Hashable, load: Load, storage: bool) -> None:
        self._loads[who] = load
        self._all.append(load)
        pages = len(load.hashes)
        if storage and self._stores and self._longest(load, 0) < self._offload.rules.last_point(pages):
            load.state = LoadState.ASKED
            load.ask = self._asks.ask(load.salt, load.hashes, partial(self._found, load))
        else:
            self._go_on(load)

    def forget(self, who: Hashable) -> Mapping[str, int]:
        """It has begun, or has ended. What is under way goes on, and is cached. Tokens that its load brought, by tier."""
        load = self._loads.pop(who, None)
        if load is None:
            return {}
        load.given_up = True
        self._forgotten += 1
        self._let_go_of_room(load)
        if load.state is LoadState.WAITING:
            self._over(load)
        return load.brought

    def distrust(self, hashes: Sequence[bytes]) -> None:
        """What the host and storage have under these names may be wrong: it is not brought again, so that what begins with it is
        computed, and nobody finds it used lately.
        """
        self._distrusted.update(dict.fromkeys(hashes))
        forget_oldest(self._distrusted, MOST_DISTRUSTED)

    def tick(self, now_s: float) -> None:
        """Computing would have been faster than what takes too long."""
        for load in [*self._all]:
            if load.given_up or load.waits_for_pool:
                continue
            if now_s - load.since_s > self.rates.patience_s(self._tokens_of(load)):
                load.given_up = True
                self.left["late"] += 1
                if load.state is LoadState.WAITING:
                    self._over(load)

    def _tokens_of(self, load: Load) -> int:
        return (load.gain or len(load.hashes)) * self._page_tokens

    # ---- what storage and ranks say

    def _found(self, load: Load, answer: StoreFound) -> None:
        pages = min(answer.pages, len(load.hashes))
        load.stored = tuple(frozenset(page_no for page_no in group if page_no < pages) for group in answer.page_nos)
        self._offload.learn(load.hashes, answer)
        load.state = LoadState.WAITING
        if load.given_up:
            self._over(load)
        else:
            self._go_on(load)

    def parts_read(self, rank: int, report: PartsRead) -> None:
        """Raises ProtocolError for what was not asked for."""
        load = self._fetches.get(report.op)
        if load is None or rank in load.reported or not 0 <= rank < self._ranks:
            raise ProtocolError(f"rank {rank} reports to have read {report.op}, which it was not asked for")
        load.reported.add(rank)
        load.failed |= bool(report.error)
        if rank == 0 and not report.error:
            self.rates.from_storage.add(report.nbytes, report.seconds)
        if len(load.reported) == self._ranks:
            del self._fetches[report.op]
            self._fetched(load)

    def _fetched(self, load: Load) -> None:
        self._arrived(load, load.fetched)
        if load.failed:
            self.failures += 1
            load.stored = ()
            self._offload.manager.found(load.hashes, 0)
        else:
            host = self._offload.host
            for g, page_no, page in load.fetched:
                if host.find(g, load.hashes[page_no]) is None:
                    before = load.hashes[page_no - 1] if page_no else load.root
                    host.name(g, page, load.hashes[page_no], before)
                load.from_storage.add(page_no)
        self._let_go_of_host(load)
        load.state = LoadState.WAITING
        if load.given_up:
            self._over(load)
        else:
            self._go_on(load)
        self._let_others_go_on(load)

    def copied_in(self, rank: int, report: CopiedIn) -> None:
        """Raises ProtocolError for a copy that was not asked for."""
        if rank == 0:
            self.rates.from_host.add(report.nbytes, report.seconds)
        for op in self._copy_acks.report(rank, report.last):
            load = self._copies.pop(op)
            for g, page_no, page in load.gpu:
                if load.hashes[page_no] not in self._distrusted:
                    self._memory.keep(g, load.hashes[page_no], page)
            for page_no in range(load.point - load.gain, load.point):
                load.brought["storage" if page_no in load.from_storage else "host"] += self._page_tokens
            self.tokens.update(load.brought)
            self._over(load)

    # ---- how a load goes on

    def _let_others_go_on(self, ended: Load) -> None:
        """Who waited for this one, and, in their order, who waits for a place, as long as there are any. To find out what a
        load has to bring takes time for each of its pages, so nobody else is looked at."""
        for load in [load for load in self._all if load.state is LoadState.WAITING]:
            waits_for = load.waits_for
            free = waits_for is None and not self._full and (not load.for_room or self._has_room(load))
            if load.state is LoadState.WAITING and (waits_for is ended or free):
                self._go_on(load)

    @property
    def _full(self) -> bool:
        return len(self._fetches) + len(self._copies) >= MOST_AT_ONCE

    def _has_room(self, load: Load) -> bool:
        """Its sequence can begin beside those that run and those for which something has been brought. Without these there is
        nothing that it could push out, and it may come before it can begin."""
        if load.waits_for_pool:
            return load.looked_at != self._memory.releases
        if load.reserved or load.urgency is Urgency.FIRST:
            return True
        others, allocator = self._reserved_large, self._memory.allocator
        return not others or allocator.used_large + others + load.large <= allocator.num_large

    def _reserve(self, load: Load) -> None:
        self._reserved_large += load.large - load.reserved
        load.reserved = load.large

    def _let_go_of_room(self, load: Load) -> None:
        self._reserved_large -= load.reserved
        load.reserved = 0

    def _wait(self, load: Load, waits_for: Load | None = None, *, for_room: bool = False) -> None:
        load.tries -= 1
        load.state, load.waits_for, load.for_room = LoadState.WAITING, waits_for, for_room

    def _arrived(self, load: Load, pages: Sequence[Placed]) -> None:
        for g, page_no, _ in pages:
            del self._arriving[g, load.hashes[page_no]]

    def _go_on(self, load: Load) -> None:
        """What has to be brought is decided anew: meanwhile others have come and gone."""
        load.tries += 1
        load.waits_for, load.for_room = None, False
        self._let_go_of_host(load)
        cached = self._memory.cache.lookup(load.hashes, len(load.hashes) * self._page_tokens) // self._page_tokens
        load.point = self._longest(load, cached)
        load.gain = load.point - cached
        if load.gain <= 0 or load.tries > TRIES:
            self._over(load)
            return
        needed = [(g, page_no) for g, _ in enumerate(self._layout.groups) for page_no in self._needed(g, load.point)]
        lacking = [(g, p) for g, p in needed if self._memory.cache.find(g, load.hashes[p]) is None]
        keys = ((g, load.hashes[p]) for g, p in lacking)
        same = next((self._arriving[key] for key in keys if key in self._arriving), None)
        if same is not None or self._full:
            self._wait(load, same)
            return
        remote = [(g, p) for g, p in lacking if self._offload.host.find(g, load.hashes[p]) is None]
        if not self.rates.worth_loading(load.gain * self._page_tokens, self._bytes(lacking), self._bytes(remote)):
            load.slower = True
            self.left["slower"] += 1
            self._over(load)
        elif not self._has_room(load):
            self._wait(load, for_room=True)
        elif remote:
            self._fetch(load, lacking, remote)
        else:
            self._copy(load, needed, lacking)

    def _needed(self, g: int, point: int) -> range:
        return self._offload.rules.needed(g, point)

    def _by_group(self, pages: Sequence[tuple[int, int]]) -> list[list[int]]:
        """Positions."""
        return [[page_no for group, page_no in pages if group == g] for g, _ in enumerate(self._layout.groups)]

    def _bytes(self, pages: Sequence[tuple[int, int]]) -> int:
        return sum(self._layout.groups[g].page_bytes for g, _ in pages)

    def _longest(self, load: Load, cached: int) -> int:
        """Pages of the longest prefix that is of use and can be had, from wherever; `cached` if there is none longer."""
        rules, groups = self._offload.rules, self._layout.groups
        point = len(load.hashes)
        for g, group in enumerate(groups):
            if group.kind is GroupKind.FULL:
                point = next((p for p in range(point) if not self._there(load, g, p)), point)
        point = rules.last_point(point)
        rest = [g for g, group in enumerate(groups) if group.kind is not GroupKind.FULL]
        while point > cached:
            missing = [p for g in rest for p in self._needed(g, point) if not self._there(load, g, p)]
            if not missing:
                return point
            # Of states it is the one at the end that is missing; a window's page is missing to all that need it.
            point = min(rules.last_point(max(missing)), point - rules.unit)
        return cached

    def _there(self, load: Load, g: int, page_no: int) -> bool:
        page_hash = load.hashes[page_no]
        if self._memory.cache.find(g, page_hash) is not None:
            return True
        if page_hash in self._distrusted:
            return False
        return self._offload.host.find(g, page_hash) is not None or (bool(load.stored) and page_no in load.stored[g])

    def _fetch(self, load: Load, lacking: Sequence[tuple[int, int]], remote: Sequence[tuple[int, int]]) -> None:
        """From storage to the host, where what is there already is held."""
        host = self._offload.host
        for g, page_no in set(lacking) - set(remote):
            page = host.find(g, load.hashes[page_no])
            assert page is not None
            host.hold(g, page)
            load.host.append((g, page_no, page))
        by_group = self._by_group(remote)
        taken = host.take([len(page_nos) for page_nos in by_group])
        if taken is None:
            self._let_go_of_host(load)
            holder = next((other for other in self._all if other.host), None)
            if holder is not None:  # whose part of the host is free when it ends
                self._wait(load, holder)
                return
            load.stored = ()  # the host is full of what is being written: only what is there can be had
            self._go_on(load)
            return
        places = tuple(
            tuple(zip(page_nos, pages, strict=True)) for page_nos, pages in zip(by_group, taken, strict=True)
        )
        load.fetched = [(g, page_no, page) for g, group in enumerate(places) for page_no, page in group]
        load.host += load.fetched
        load.state, load.failed = LoadState.FETCHING, False
        self._reserve(load)
        load.reported.clear()
        self._arriving.update({(g, load.hashes[page_no]): load for g, page_no, _ in load.fetched})
        self._fetch_ops += 1
        self._fetches[self._fetch_ops] = load
        self._out.append(ToStore(Fetch(self._fetch_ops, load.ask, places)))

    def _let_go_of_host(self, load: Load) -> None:
        self._offload.host.release(load.host)
        load.host, load.fetched = [], []

    def _copy(self, load: Load, needed: Sequence[tuple[int, int]], lacking: Sequence[tuple[int, int]]) -> None:
        """From the host into pages of the pool. What is there of the prefix is held, lest it make room for the rest."""
        memory, host = self._memory, self._offload.host
        for g, page_no in set(needed) - set(lacking):
            page = memory.cache.find(g, load.hashes[page_no])
            assert page is not None
            self._offload.pin(g, page)
            load.pinned.append((g, page_no, page))
        by_group = self._by_group(lacking)
        owner = memory.new_owner()
        taken = memory.allocator.allocate_all([len(page_nos) for page_nos in by_group], owner)
        memory.allocator.forget_owner(owner)
        if taken is not None:
            load.gpu = [
                (g, p, page) for g, group in enumerate(by_group) for p, page in zip(group, taken[g], strict=True)
            ]
        if taken is None or not memory.can_go_on():
            self._wait_for_pool(load, lacking)
            return
        moves = []
        for g, page_no, page in load.gpu:
            host_page = host.find(g, load.hashes[page_no])
            assert host_page is not None
            host.hold(g, host_page)
            load.host.append((g, page_no, host_page))
            moves.append(PageMove(g, page, host_page))
        load.state = LoadState.LOADING
        self._reserve(load)
        self._arriving.update({(g, load.hashes[page_no]): load for g, page_no, _ in load.gpu})
        op = self._copy_acks.issue()
        self._copies[op] = load
        self._out.append(ToTransfer(None, CopyIn(op, tuple(moves))))

    def _wait_for_pool(self, load: Load, lacking: Sequence[tuple[int, int]]) -> None:
        """What it brings stays on the host until something has been let go of in the pool."""
        self._let_go_of_pool(load)
        host = self._offload.host
        for g, page_no in lacking:
            page = host.find(g, load.hashes[page_no])
            assert page is not None
            host.hold(g, page)
            load.host.append((g, page_no, page))
        self._reserve(load)
        load.looked_at = self._memory.releases
        self._wait(load, for_room=True)

    def _let_go_of_pool(self, load: Load) -> None:
        for g, page_no, page in load.pinned:
            self._offload.unpin(g, page_no, page)
        for g, page_no, page in load.gpu:
            self._memory.release(g, [page], self._clock(), [page_no + 1])
        load.pinned, load.gpu = [], []

    def _over(self, load: Load) -> None:
        """It lets go of all that it holds; what it filled is cached until its memory is needed."""
        if load.state is LoadState.LOADING:
            self._arrived(load, load.gpu)
        others_wait = load.under_way or bool(load.host)
        load.state, load.for_room = LoadState.OVER, False
        if not load.brought:
            self._let_go_of_room(load)
        self._all.remove(load)
        self._let_go_of_host(load)
        self._let_go_of_pool(load)
        if load.ask:
            self._asks.forget(load.ask)
        if others_wait:
            self._let_others_go_on(load)

    # ---- what others need to know of it

    def costs(self) -> LoadCosts:
        """As measured lately, of tokens that need a page of every group of full attention and nothing else."""
        groups, rates = self._layout.groups, self.rates
        page_bytes = sum(group.page_bytes for group in groups if group.kind is GroupKind.FULL)
        host_s, storage_s = (rate.seconds(page_bytes) or 0.0 for rate in (rates.from_host, rates.from_storage))
        return LoadCosts(host_s / self._page_tokens, storage_s / self._page_tokens)

    def held(self) -> list[tuple[int, int]]:
        """Pages of the pool that loads fill, by group and page."""
        return [(g, page) for load in self._all for g, _, page in load.gpu]

    def held_on_host(self) -> list[Placed]:
        return [placed for load in self._all for placed in load.host]

    def dump(self) -> dict[str, object]:
        """For a person."""
        states = [load.state.value for load in self._all]
        counts: dict[str, object] = {state: states.count(state) for state in sorted(set(states))}
        if for_room := sum(load.for_room for load in self._all):
            counts["waiting for room"] = for_room
        return counts | {"tokens": dict(self.tokens)}

    def check_integrity(self) -> None:
        """What must hold between any two calls."""
        assert all(load.state is not LoadState.OVER for load in self._all)
        arriving = [(g, load.hashes[p]) for load in self._all for g, p, _ in (*load.fetched, *load.gpu)]
        assert len(arriving) == len(set(arriving)) and set(arriving) == self._arriving.keys(), (
            "what is on its way, and what loads bring"
        )
        assert len(self._fetches) + len(self._copies) == sum(load.under_way for load in self._all)
        waiting = [load for load in self._all if load.state is LoadState.WAITING]
        assert all(load.waits_for is None or load.waits_for.under_way or load.waits_for.host for load in waiting)
        assert self._full or all(load.waits_for or load.for_room for load in waiting), (
            "who waits for a place that is free"
        )
        assert all(load in waiting for load in self._all if load.for_room)
        assert self._reserved_large == sum(load.reserved for load in self._loads.values()), "room that nobody needs"
        assert all(load.given_up or load.state is LoadState.OVER or load in self._all for load in self._loads.values())
