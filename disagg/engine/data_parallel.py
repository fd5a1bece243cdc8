"""Data-parallel ranks of one server: engines with a pool, a batch and legs each, and one face for all of them.

                      ┌──> engine of rank 0 ──> plans for its workers
    a leg ── which? ──┤                                             steps at its own pace, or in lockstep:
                      └──> engine of rank 1 ──> plans for its workers

    lockstep    all ask ──> states of all ──> prompts begin, or wait ──> a plan for each, empty where nothing runs

Where the ranks share the experts of a model, each takes part in each step; then whether prompts begin is decided for all
at once (scheduler/prefill_delayer), and no pass begins before every rank has a place for its plan. A leg stays on the rank it
went to. A request that is replayed may go to another.

Has the calls of an `Engine` that a server without links and tiers makes. No I/O, no torch, and no clock but the one that it is
given, which measures and decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from disagg.engine.engine import Engine
from disagg.engine.instructions import Instruction, PublishKv, ToRouter, ToTransfer, ToWorkers
from disagg.engine.now import Now
from disagg.messages.legs import (
    AbortLeg,
    GroupMemory,
    KvEvents,
    LegEnd,
    LoadReport,
    MemoryReport,
    Outcome,
    ServerState,
    StartLeg,
    Tier,
)
from disagg.messages.plan import StepResult, WorkerPlan
from disagg.messages.tiers import TierEvent
from disagg.messages.transfer import TransferEvent
from disagg.offload.instructions import StoreEvent
from disagg.scheduler.prefill_delayer import Together
from disagg.scheduler.rank_choice import RankState, pick_rank
from disagg.types.errors import ProtocolError
from disagg.types.ids import LegKey


class DataParallel:
    """See the module. Workers count through all ranks: those of rank r are r * tp and the tp - 1 after it."""

    def __init__(
        self, ranks: tuple[Engine, ...], together: Together | None, clock: Callable[[], float] | None = None
    ) -> None:
        """together: what they hear of each other, in lockstep; None where each goes its own pace. clock: that of `Now.s`, for
        what passes take that follow each other at once; None: nothing.
        """
        self.ranks = ranks
        self._together = together
        self._clock = clock
        self._tp = ranks[0].core.facts.tp
        self._places: dict[LegKey, tuple[int, int]] = {}  # of legs that have not ended: the rank, and tokens to do
        self._tokens = [0] * len(ranks)
        self._cached = CacheUnion()

    # ---- legs

    def start_leg(self, router: int, start: StartLeg, now: Now) -> list[Instruction]:
        if any(start.key in rank.core.legs for rank in self.ranks):
            return []
        at = pick_rank(self._states(start))
        tokens = len(start.token_ids) + len(start.choices) * start.params.max_tokens
        self._places[start.key] = at, tokens
        self._tokens[at] += tokens
        return self._of({at: self.ranks[at].start_leg(router, start, now)})

    def _states(self, start: StartLeg) -> list[RankState]:
        _, hashes = self.ranks[0].core.pool.prefix(start)  # the same on all
        pools = [rank.core.pool.kv for rank in self.ranks]
        return [
            RankState(tokens, kv.lookup(hashes, len(start.token_ids)), kv.allocator.free_large)
            for tokens, kv in zip(self._tokens, pools, strict=True)
        ]

    def abort_leg(self, abort: AbortLeg) -> list[Instruction]:
        return self._of({at: rank.abort_leg(abort) for at, rank in enumerate(self.ranks)})

    def hand_over(self, key: LegKey) -> list[Instruction]:
        """What is on data-parallel ranks goes on there."""
        return []

    def end_router(self, router: int, reason: str) -> list[Instruction]:
        return self._of({at: rank.end_router(router, reason) for at, rank in enumerate(self.ranks)})

    def give_back(self, reason: str) -> list[Instruction]:
        return self._of({at: rank.give_back(reason) for at, rank in enumerate(self.ranks)})

    def end_all(self, outcome: Outcome, reason: str) -> list[Instruction]:
        return self._of({at: rank.end_all(outcome, reason) for at, rank in enumerate(self.ranks)})

    # ---- steps

    def schedule(self, now: Now) -> list[Instruction]:
        if self._together is None:
            return self._of({at: rank.schedule(now) for at, rank in enumerate(self.ranks)})
        for rank in self.ranks:
            rank.begin_passes(now)
        while self._one_pass(self._together, now):
            if self._clock is not None:
                now = now._replace(s=self._clock())
        return self._of({at: rank.end_passes() for at, rank in enumerate(self.ranks)})

    def _one_pass(self, together: Together, now: Now) -> bool:
        """Of all ranks. Whether another one follows at once."""
        if not all(rank.pipeline.has_room for rank in self.ranks):
            return False
        wants = [rank.begin_pass(now) for rank in self.ranks]
        if self.ranks[0].core.passes.delays:
            together.states = tuple(rank.core.passes.state(want) for rank, want in zip(self.ranks, wants, strict=True))
        for rank, want in zip(self.ranks, wants, strict=True):
            if want:
                rank.core.turns.begin(now)
        plans = self._joined([rank.core.batch.plan() for rank in self.ranks])
        if not (any(plans) or any(wants) or any(rank.core.passes.delayed for rank in self.ranks)):
            for rank in self.ranks:
                rank.core.passes.drop()
            return False
        computing = self.computing
        ended = [rank.end_pass(plan, now, computing=computing) for rank, plan in zip(self.ranks, plans, strict=True)]
        return any(ended)

    def _joined(self, plans: list[WorkerPlan | None]) -> list[WorkerPlan | None]:
        """If any rank has a plan, all have one, and each says how many rows all of them compute."""
        if not any(plans):
            return plans
        rows = tuple(0 if plan is None else sum(run.num_tokens for run in plan.runs) for plan in plans)
        sent = [plan or rank.core.batch.join_step() for plan, rank in zip(plans, self.ranks, strict=True)]
        return [replace(plan, rows=rows if any(rows) else ()) for plan in sent]

    def step_done(self, result: StepResult, now: Now) -> list[Instruction]:
        at, worker = divmod(result.rank, self._tp)
        return self._of({at: self.ranks[at].step_done(replace(result, rank=worker), now)})

    due_s: float | None = None  # no plan is held

    # ---- what workers and time do

    @property
    def linked(self) -> Engine | None:
        """Nothing hears of links: such a server has none."""
        return None

    def transfer_event(self, rank: int, message: TransferEvent, now: Now) -> list[Instruction]:
        at, worker = divmod(rank, self._tp)
        return self._of({at: self.ranks[at].transfer_event(worker, message, now)})

    def tier_event(self, rank: int, message: TierEvent, now: Now) -> list[Instruction]:
        raise ProtocolError(f"data-parallel ranks offload nothing: {type(message).__name__} of rank {rank}")

    def store_event(self, message: StoreEvent, now: Now) -> list[Instruction]:
        raise ProtocolError(f"data-parallel ranks offload nothing: {type(message).__name__}")

    def tick(self, now: Now) -> list[Instruction]:
        return self._of({at: rank.tick(now) for at, rank in enumerate(self.ranks)})

    def _of(self, out: dict[int, list[Instruction]]) -> list[Instruction]:
        """What these ranks said, as instructions of one engine."""
        said: list[Instruction] = []
        news: list[tuple[int, KvEvents]] = []
        for at, instructions in out.items():
            for each in instructions:
                match each:
                    case ToWorkers():
                        said.append(ToWorkers(replace(each.plan, dp_rank=at)))
                    case ToTransfer():
                        workers = range(self._tp) if each.rank is None else (each.rank,)
                        said += [ToTransfer(at * self._tp + worker, each.message) for worker in workers]
                    case PublishKv():
                        news.append((at, each.events))
                    case _:
                        self._note_end(each)
                        said.append(each)
        events = self._cached.told(events for _, events in news)
        return [*said, PublishKv(events)] if events.stored or events.removed else said

    def _note_end(self, instruction: Instruction) -> None:
        if isinstance(instruction, ToRouter) and isinstance(instruction.message, LegEnd):
            at, tokens = self._places.pop(instruction.message.key)
            self._tokens[at] -= tokens

    # ---- what the outside wants to know

    @property
    def computing(self) -> bool:
        return any(rank.computing for rank in self.ranks)

    @property
    def running_and_waiting(self) -> tuple[int, int]:
        each = [rank.running_and_waiting for rank in self.ranks]
        return sum(running for running, _ in each), sum(waiting for _, waiting in each)

    @property
    def idle(self) -> bool:
        return all(rank.idle for rank in self.ranks)

    @property
    def offloads(self) -> bool:
        return False

    @property
    def max_tokens_in_pool(self) -> int:
        """Of one rank's: a sequence is on one of them."""
        return self.ranks[0].max_tokens_in_pool

    def load(self, state: ServerState) -> LoadReport:
        """Of all ranks together."""
        each = [rank.load(state) for rank in self.ranks]
        sums = {
            name: sum(getattr(load, name) for load in each)
            for name in ("running", "waiting", "pages_used", "pages_free", "pages_evictable", "pages_total")
        }
        return LoadReport(state=state, memory=memory_of([load.memory for load in each if load.memory]), **sums)

    def parked(self, now_s: float) -> tuple[int, float]:
        each = [rank.parked(now_s) for rank in self.ranks]
        return sum(count for count, _ in each), max(longest_s for _, longest_s in each)

    def kv_snapshot(self, tier: Tier = Tier.GPU) -> KvEvents:
        return self._cached.snapshot() if tier is Tier.GPU else KvEvents()

    def arena_bytes(self) -> tuple[int, int, int]:
        return 0, 0, 0

    def dump(self) -> dict[str, object]:
        return {
            "lockstep": self._together is not None,
            "tokens to do": list(self._tokens),
            **{f"rank {at}": rank.dump() for at, rank in enumerate(self.ranks)},
        }

    def check_integrity(self) -> None:
        """What must hold between any two calls."""
        for rank in self.ranks:
            rank.check_integrity()
        to_do = Counter[int]()
        for key, (at, tokens) in self._places.items():
            assert key in self.ranks[at].core.legs, f"{key} is not on rank {at}"
            to_do[at] += tokens
        assert [to_do[at] for at in range(len(self.ranks))] == self._tokens
        pages = {page for rank in self.ranks for page in rank.kv_snapshot().stored}
        assert pages == set(self.kv_snapshot().stored), "what is cached on any rank"
        if self._together is not None:
            first = self.ranks[0].pipeline
            assert all(rank.core.passes.dump() == self.ranks[0].core.passes.dump() for rank in self.ranks), "delays"
            sent = first.reported + len(first.in_flight)
            assert all(rank.pipeline.reported + len(rank.pipeline.in_flight) == sent for rank in self.ranks), "plans"


AnyEngine = Engine | DataParallel


def memory_of(pools: list[MemoryReport]) -> MemoryReport:
    """Of pools that are cut alike, together."""
    groups = tuple(
        GroupMemory(
            first.name,
            first.kind,
            first.page_bytes,
            empty_pages=sum(pool.groups[g].empty_pages for pool in pools),
            evictable_pages=sum(pool.groups[g].evictable_pages for pool in pools),
            used_pages=sum(pool.groups[g].used_pages for pool in pools),
        )
        for g, first in enumerate(pools[0].groups)
    )
    sums = {
        name: sum(getattr(pool, name) for pool in pools)
        for name in ("large_free", "large_evictable", "large_used", "fragmentation_bytes")
    }
    return replace(pools[0], groups=groups, **sums)


class CacheUnion:
    """What is in any of several prefix caches, from what each of them says. Pages are (layer group, hash)."""

    def __init__(self) -> None:
        self._holders: dict[tuple[int, bytes], int] = {}  # in how many

    def told(self, news: Iterable[KvEvents]) -> KvEvents:
        """The news for the union: what is now in some cache, and what is in none any more."""
        before: dict[tuple[int, bytes], bool] = {}
        for events in news:
            for pages, by in ((events.stored, 1), (events.removed, -1)):
                for page in pages:
                    before.setdefault(page, page in self._holders)
                    holders = self._holders.pop(page, 0) + by
                    if holders:
                        self._holders[page] = holders
        return KvEvents(
            stored=tuple(page for page, was in before.items() if not was and page in self._holders),
            removed=tuple(page for page, was in before.items() if was and page not in self._holders),
        )

    def snapshot(self) -> KvEvents:
        return KvEvents(stored=tuple(self._holders))
