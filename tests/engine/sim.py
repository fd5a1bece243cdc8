"""A deterministic world for both roles: real engines, simulated links, workers, memory, router and time.

Every queue delivers in order, after any delay; what happens next is drawn from a seed. Pools hold (token id, position)
cells per layer and head, or states that name every token they have seen; arenas hold the writes that lie in them; and a
"model" checks every cell that it attends over: a wrong page, a page that another layer group has taken, a stale byte of a
ring, a page reused too early or a missing copy-on-write is an assertion here, at the step where it would have become
text. Servers are real from their engines up to `server/dispatch`.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from disagg.decode_server.role import DECODE
from disagg.engine.engine import Engine
from disagg.engine.facts import EngineFacts, MemoryFacts, ModelFacts, OffloadFacts, SchedulingFacts, TransferFacts
from disagg.engine.handoff.receive import Receiver
from disagg.engine.handoff.send import Sender
from disagg.engine.now import Now
from disagg.memory.groups import spec_of
from disagg.memory.kv_memory import KvMemory
from disagg.memory.layout import PageSizing, pool_layout
from disagg.messages.layout import GroupKind, LayerGroup, StatePart
from disagg.messages.legs import (
    AbortLeg,
    HandOver,
    KvEvents,
    LegEnd,
    LegTokens,
    Outcome,
    PeerRef,
    ServerMessage,
    ServerState,
    StartLeg,
    Tier,
)
from disagg.messages.link import LinkHello, LinkMessage, RankInfo
from disagg.messages.plan import SampledToken, StepResult, WorkerPlan
from disagg.messages.sequence_diff import KnownSequences, RunView
from disagg.messages.tiers import TierCommand
from disagg.messages.transfer import TransferCommand
from disagg.offload.keys import Scope
from disagg.prefill_server.role import PREFILL
from disagg.scheduler.policies import POLICIES
from disagg.server.dispatch import Dispatch
from disagg.server.role import ServerRole
from disagg.types.ids import FinishReason, LegKey
from disagg.types.sampling import SamplingParams
from tests.engine.mixed_role import NOBODY, mixed_engine
from tests.engine.sim_pages import SimPages
from tests.engine.sim_tiers import SimKeeper, SimRankTiers, SimStore
from tests.engine.sim_transfer import SimTransfer, Write
from tests.scheduler.mixed_policies import MIXED_POLICIES

VOCAB, EOS = 24, 0
FULL = LayerGroup("full", (0, 1), 2, 1, "float32")
STATE = LayerGroup.of_states("state", (2,), (StatePart("conv", (2,), "float32"),))
STALL_S = 8.0  # the router's patience where prefill failed or a dispatch was lost
FAILURES = ("its peer was removed", "its peer is not known here", "its peer has exited", "the wire broke")  # of writes
MAX_ATTEMPTS = 40  # faults are bounded, so attempts are, but for those that this world itself costs: more is a livelock


def window(tokens: int) -> LayerGroup:
    return LayerGroup(f"window-{tokens}", (3, 4, 5), 2, 1, "float32", GroupKind.WINDOW, window=tokens)


def models(rng: random.Random) -> tuple[LayerGroup, ...]:
    """The layer groups of some model."""
    windowed = window(rng.choice((1, 2, 5, 13)))
    kinds = ((FULL,), (FULL,), (FULL, windowed), (windowed,), (FULL, STATE), (STATE,), (FULL, windowed, STATE))
    return rng.choice(kinds)


def next_token(token_ids: tuple[int, ...], choice: int, seed: int) -> int:
    """The model and the sampler in one: a function of everything that was attended over."""
    digest = hashlib.blake2b(repr((token_ids, choice, seed)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % VOCAB


def reference(prompt: tuple[int, ...], choice: int, params: SamplingParams, max_model_len: int) -> tuple[int, ...]:
    """What a choice must come to, by the definition of its limits."""
    outputs: list[int] = []
    while True:
        outputs.append(next_token((*prompt, *outputs), choice, params.seed))
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
        if len(outputs) > params.min_tokens and outputs[-1] in stops:
            return tuple(outputs)
        if len(outputs) >= params.max_tokens or len(prompt) + len(outputs) >= max_model_len:
            return tuple(outputs)


class Faults(Struct, frozen=True):
    """How much may go wrong. Counts are totals over a run."""

    abort_share: float = 0.0  # of requests: aborted by the client, whole or by choice
    corrupt_pieces: int = 0
    lost_notifications: int = 0
    failed_writes: int = 0
    lost_links: int = 0
    lost_workers: int = 0
    lost_dispatches: int = 0
    store_failures: int = 0
    store_outages: int = 0
    drains: int = 0  # of decode servers, whose answers go on elsewhere; costs no attempt

    @property
    def any(self) -> bool:
        """Something that may cost an attempt."""
        return bool(
            self.corrupt_pieces
            or self.lost_notifications
            or self.failed_writes
            or self.lost_links
            or self.lost_workers
            or self.lost_dispatches
        )


class SimWire:
    """Between the transfer threads of the world's workers."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._world = server.world
        self.gather_buffers = server.world.gather_buffers

    def target(self, link: int, rank: int) -> SimTransfer | None:
        worker = self._world.worker_behind(self._server, link, rank)
        return worker.transfer if worker is not None and worker.transfer.alive else None

    def breaks(self) -> bool:
        return self._world.spend("failed_writes", 0.02)

    def corrupts(self) -> bool:
        return self._world.spend("corrupt_pieces", 0.1)

    def notify(self, target: SimTransfer, entry_id: int) -> None:
        world = self._world
        if not world.spend("lost_notifications", 0.1):
            target.notifications.append(entry_id)
        elif world.rng.random() < 0.5:  # not lost: it comes when nobody waits for it any more
            world.late.append((world.steps + world.rng.randrange(3000), target, entry_id))

    def stray(self, writer: SimTransfer, write: Write) -> None:
        world = self._world
        if world.rng.random() < 0.5:
            world.stray.append((world.steps + world.rng.randrange(1000), writer, write))

    def bad_checksum(self) -> None:
        world = self._world
        world.bad_checksums += 1
        assert world.bad_checksums <= world.spent["corrupt_pieces"], "a checksum failed that nobody corrupted"


class Worker:
    """One rank: a compute thread that runs plans in order, and a transfer thread."""

    def __init__(self, server: Server, rank: int) -> None:
        self.server, self.rank = server, rank
        self.plans: deque[WorkerPlan] = deque()
        self.results: deque[StepResult] = deque()
        self.known = KnownSequences()
        self.computed_plan = -1
        self.slots: dict[int, int] = {}  # slot -> sequence
        self.pages = SimPages(server.facts, f"{server.name} rank {rank}")
        self.transfer = SimTransfer(
            server.facts, self.pages, SimWire(server), lambda: self.computed_plan, overwrites=server.world.overwrites
        )
        self.tiers = SimRankTiers(server.facts, rank, self.pages, server.world.store, server.world.store_fails)

    def compute(self) -> None:
        plan = self.plans.popleft()
        ended, begun, runs = self.known.apply(plan)
        for sequence in ended:
            for sampler in sequence.samplers:
                assert self.slots.pop(sampler.slot) == sequence.seq_id
        for copy in plan.copies:
            self.pages.copy(copy.group, copy.source, copy.destination)
        for sequence in begun:
            for sampler in sequence.samplers:
                assert sampler.slot not in self.slots, "a sampling slot was opened twice"
                self.slots[sampler.slot] = sequence.seq_id
        sampled = [token for run in runs for token in self._run(run)]
        self.computed_plan = plan.plan_no
        tokens = tuple(sampled) if self.rank == self.server.facts.sampling_rank else ()
        self.results.append(StepResult(self.rank, plan.plan_no, tokens, self.server.world.compute_s, 0.0, 0.0))

    def _run(self, run: RunView) -> list[SampledToken]:
        sequence, stop = run.sequence, run.start + run.num_tokens
        assert stop <= len(sequence.tokens), "a run names tokens that this worker does not know"
        for g, group in enumerate(self.server.facts.model.groups):
            if group.is_state:
                self._update_state(g, run)
            else:
                self._attend(g, run)
        if not run.sample:
            return []
        context, seed = tuple(sequence.tokens[:stop]), sequence.params.seed
        sampled = [
            SampledToken(sequence.seq_id, sampler.choice, next_token(context, sampler.choice, seed))
            for sampler in sequence.samplers
        ]
        if len(sampled) == 1 and self.server.facts.pp == 1:  # stages learn it from the plan that computes it
            sequence.tokens.append(sampled[0].token_id)
        return sampled

    def _update_state(self, g: int, run: RunView) -> None:
        tokens, stop = tuple(run.sequence.tokens), run.start + run.num_tokens
        if run.start:
            assert self.pages.row(g, run.last_pages[g], 0) == tokens[: run.start]
        self.pages.write_row(g, run.sequence.tables[g][-1], 0, tokens[:stop])
        checkpoint = self.server.facts.memory.checkpoint_tokens
        assert (stop - 1) // checkpoint == run.start // checkpoint, "a run crosses a checkpoint"

    def _attend(self, g: int, run: RunView) -> None:
        page_tokens, table, tokens = self.server.facts.memory.page_tokens, run.sequence.tables[g], run.sequence.tokens
        stop = run.start + run.num_tokens
        for position in range(run.start, stop):
            cell = (tokens[position], position)
            self.pages.write_row(g, table[position // page_tokens], position % page_tokens, cell)
        seen = self.server.facts.model.groups[g].window or stop
        for position in range(max(0, run.start - seen + 1), stop):
            held = self.pages.row(g, table[position // page_tokens], position % page_tokens)
            assert held == (tokens[position], position), f"{self.server.name} group {g}: {position} holds {held}"


class SimWorkers:
    """What a server's dispatch publishes, and sends to transfer threads."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def publish(self, plan: WorkerPlan) -> None:
        for worker in self._server.workers:
            worker.plans.append(plan)

    def send(self, rank: int, messages: Sequence[TransferCommand | TierCommand]) -> None:
        worker = self._server.workers[rank]
        for message in messages:
            if isinstance(message, TierCommand):
                worker.tiers.take(message)
            else:
                worker.transfer.commands.append(message)


class SimRouters:
    """What it tells the one router. known: what the cache events came to."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.known: dict[Tier, set[tuple[int, bytes]]] = {tier: set() for tier in Tier}

    def tell(self, router: int, message: ServerMessage) -> None:
        self._server.to_router.append(message)

    def publish(self, tier: Tier, events: KvEvents) -> None:
        known = self.known[tier]
        assert set(events.stored).isdisjoint(events.removed), "a page came and left"
        if tier is not Tier.STORAGE:  # of which others, too, may have told what is found to be gone
            assert known.isdisjoint(events.stored) and known.issuperset(events.removed), f"no news of {tier}"
        known.update(events.stored)
        known.difference_update(events.removed)

    def flush(self) -> None:
        pass


class SimLinks:
    """What it sends over links, and what becomes of them."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def send(self, number: int, message: LinkMessage) -> None:
        self._server.world.send(self._server, number, message)

    def flush(self) -> None:
        pass

    def dial(self, peer: PeerRef) -> None:
        self._server.world.dial(self._server, peer)

    def drop(self, number: int, reason: str) -> None:
        assert reason in FAILURES, f"no fault explains why a link is dropped: {reason}"
        self._server.world.lose(self._server, number, reason)

    def pod_gone(self, pod: str) -> None:
        raise AssertionError("nothing here runs in a pod")

    def forget(self, number: int) -> None:
        pass


class Server:
    """One server: an engine and what carries out its instructions, as in a real one; its workers, its end of links."""

    def __init__(self, world: World, name: str, role: ServerRole, facts: EngineFacts) -> None:
        self.world, self.name, self.role = world, name, role
        self.facts = facts
        self.workers: list[Worker] = []
        self.incarnations = 0
        self.to_router: deque[Any] = deque()
        self.from_router: deque[Any] = deque()
        self.alarms: deque[float] = deque(maxlen=1)
        self.dispatch = Dispatch(name, facts.tp, lambda: world.now, lambda leg: "", wake_at=self.alarms.append)
        self.start()

    def start(self) -> None:
        self.incarnations += 1
        incarnation = f"{self.name}.{self.incarnations}"
        self.facts = replace(self.facts, incarnation=incarnation)
        self.routers = self.dispatch.routers = SimRouters(self)
        self.dispatch.links = SimLinks(self)
        workers = SimWorkers(self)
        send = lambda rank, command: workers.send(rank, [command])  # noqa: E731
        self.keeper = SimKeeper(self.facts, self.world.store, send, self.world.store_fails)
        self.dispatch.attach(self.role.engine(self.facts), workers, self.keeper)
        self.workers = [Worker(self, rank) for rank in range(self.facts.tp)]

    @property
    def engine(self) -> Engine:
        assert self.dispatch.engine is not None
        return self.dispatch.engine

    @property
    def ref(self) -> PeerRef:
        return PeerRef(self.name, "somewhere:1", self.facts.incarnation)

    def hello(self, generation: str) -> LinkHello:
        ranks = tuple(RankInfo(rank, 1, 1, b"", 0, 0, 0) for rank in range(self.facts.tp))
        return LinkHello(self.name, generation, self.facts.incarnation, "same", self.facts.tp, "host", ranks)

    def hear(self, event: Callable[[Dispatch], None]) -> None:
        """Something happens, and all is well afterwards."""
        event(self.dispatch)
        assert len(self.engine.pipeline.in_flight) <= 2
        self.engine.check_integrity()
        for tier, known in self.routers.known.items():
            has = set(self.engine.kv_snapshot(tier).stored)
            # What a server forgets of storage is there still.
            assert known >= has if tier is Tier.STORAGE else known == has, f"events do not add up to what {tier} has"


@dataclass
class Ends:
    """One end of a link. number: this server's number for it."""

    server: Server
    incarnation: str
    number: int
    queue: deque[Any] = field(default_factory=deque)  # on its way to this end
    established: bool = False
    up: bool = True


@dataclass
class SimLink:
    prefill: Ends
    decode: Ends
    ever_down: bool = False

    def other(self, end: Ends) -> Ends:
        return self.decode if end is self.prefill else self.prefill


@dataclass
class Request:
    """What a router remembers of a request."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    attempt: int = 0
    credited: int = (
        0  # attempts that may have been lost as this world restarted workers, which is no fault of its profile
    )
    moves: int = 0  # attempts that went on elsewhere, with all of their KV
    asked: int = 0  # the attempt that decode was asked to hand over
    handed_over: set[LegKey] = field(default_factory=set)
    accepted: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, FinishReason | None] = field(default_factory=dict)
    held: dict[int, dict[int, tuple[int, FinishReason | None]]] = field(default_factory=dict)
    legs: dict[LegKey, tuple[int, ...]] = field(default_factory=dict)  # of this attempt -> choices
    local: bool = False  # its attempt is a decode server's alone
    given_back: int = 0  # attempts, by decode servers that were to compute too much
    answering: dict[LegKey, Server] = field(default_factory=dict)  # who says the last token, of every attempt
    decode_next: dict[tuple[LegKey, int], int] = field(default_factory=dict)
    pair: tuple[Server, Server] | None = None
    pair_incarnations: tuple[str, str] = ("", "")
    stalled_since_s: float | None = None
    done_s: float | None = None
    lingered: bool = False
    aborted: bool = False
    dropped: set[int] = field(default_factory=set)
    abort_at: int | None = None  # simulated step; until the request arrives: steps after that
    after: Request | None = None  # that it goes on from: it arrives when that one is answered

    @property
    def done(self) -> bool:
        return self.aborted or len(self.finished) == self.params.n


class World:
    """Everything, and what happens next. `run` until every request is done, then `settle` and `check_nothing_leaked`."""

    def __init__(
        self,
        seed: int,
        faults: Faults,
        max_steps: int = 60_000,
        *,
        tight: bool = False,
        mixed: bool = False,
        offload: bool = False,
        careless: bool = False,
    ) -> None:
        """tight: two servers of each kind, pools and arenas as small as they can be, and many requests. mixed: each server has
        both phases, and some requests stay with one. offload: KV goes to hosts, and mostly to one storage, and comes back.
        careless: what begins is not asked whether all can go on, so that sequences give way.
        """
        self.store = SimStore()
        self.tiers_rng = random.Random(seed)  # of its own, so that other worlds are as they were
        self.local_rng = random.Random(f"local {seed}")  # likewise
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.faults = faults
        self.max_steps = max_steps
        self.now_s = 0.0
        self.steps = 0
        self.spent: dict[str, int] = dict.fromkeys(Faults.__struct_fields__, 0)
        self.bad_checksums = 0
        self.settling = False
        self.gather_buffers = rng.choice((1, 2))
        self.overwrites = seed % 2 == 1  # as on a GPU
        self.compute_s = (0.001, 0.02, 0.3)[seed // 2 % 3]  # of a step: whether plans are held, and for whom
        self.mixed = mixed
        self.links: list[SimLink] = []
        self.late: list[tuple[int, SimTransfer, int]] = []  # notifications: (step at which they come, to whom, entry)
        self.stray: list[tuple[int, SimTransfer, Write]] = []  # failed writes: (step at which they land, writer, write)
        self.dials: list[tuple[Server, str, PeerRef]] = []
        self._numbers = itertools.count()
        self._weights: dict[object, float] = {}
        page_tokens = rng.choice((1, 4, 16))
        if offload:
            page_tokens = self.tiers_rng.choice((1, 2, 4))
        max_prompt = rng.choice((3, 12, 40))
        max_new = rng.choice((1, 3, 12))
        if offload:
            max_prompt = self.tiers_rng.choice((16, 40))
        max_n = rng.choice((1, 1, 2, 3))
        self.max_model_len = max_prompt + max_new + rng.choice((-1, 2))
        segment = rng.choice((48, 128, 256))
        segments = 1 if tight else rng.choice((1, 2, 4, 8))
        most = min(max_prompt + max_new, self.max_model_len)
        groups = models(rng)
        layout = pool_layout(
            [spec_of(group, page_tokens) for group in groups],
            page_tokens,
            page_tokens * rng.choice((1, 2, 4)),
            rng.choice((PageSizing.LCM, PageSizing.LCM, PageSizing.MAX)),
        )
        chunk_tokens = rng.choice((4, 8, 16, 64))
        policy = random.Random(f"policy of {seed}").choice(("", *MIXED_POLICIES)) if mixed else ""
        if policy and POLICIES[policy].whole_prompts:
            chunk_tokens = most
        kv = KvMemory(layout, 1)
        to_prefill = max(kv.large_pages_to_prefill(k, chunk_tokens) for k in range(1, most + 1))
        to_decode = max(to_prefill, *(kv.large_pages_to_decode(k, most, max_n) for k in range(most)))
        facts = EngineFacts(
            incarnation="",
            tp=1,
            model=ModelFacts(groups, VOCAB, (EOS,), self.max_model_len),
            memory=MemoryFacts(
                layout,
                0,
                prefix_cache=rng.random() < 0.75,
                scope=Scope("weights", "float32", page_tokens, groups),
            ),
            scheduling=SchedulingFacts(
                max_slots=max_n + rng.choice((0, 1, 5)),
                chunk_tokens=chunk_tokens,
                target_step_s=0.0,
                policy=policy,
                max_waiting=10_000,
                local_prefill_tokens=self.local_rng.choice((0, page_tokens, 1000)),
                ungranted_share=rng.choice((0.1, 0.5)),
                spare_tokens=rng.choice((0, 1, 5, 64)),
                lookahead_tokens=rng.choice((0, 0, 3, 1000)),
                preempt_after_s=rng.choice((0.2, 2.0)),
                prefill_delay_passes=0,
                prefill_delay_low_usage=0.0,
                preemption=rng.choice(("latest", "fewest_tokens")),
                max_running=rng.choice((1, 2, 100)),
            ),
            transfer=TransferFacts(
                gather_bytes=rng.choice((48, 128, 256)),
                arena_bytes=segment * segments,
                segment_bytes=segment,
                link_segments=rng.choice((1, 2)),
                link_idle_s=0.5,
                progress_s=20.0,
            ),
        )
        if careless:
            scheduling = replace(facts.scheduling, lookahead_tokens=0, spare_tokens=0, max_running=100)
            facts = replace(facts, scheduling=scheduling)
        self.many_tenants = rng.random() < 0.5
        if offload:
            draw = self.tiers_rng
            storage, stride = draw.random() < 0.75, draw.choice((0, 4, 16))
            memory = replace(facts.memory, prefix_cache=True)
            host = (to_decode if draw.random() < 0.3 else 6 * to_decode) + 1
            facts = replace(facts, memory=memory, offload=OffloadFacts(host, stride, storage))

        def server(name: str, role: ServerRole, pages: int) -> Server:
            own = replace(facts, tp=rng.choice((1, 1, 2)), memory=replace(facts.memory, num_large=pages))
            if role is DECODE and not mixed and rng.random() < 0.3:  # choices of one request take turns in its slots
                own = replace(own, scheduling=replace(own.scheduling, max_slots=rng.randint(1, max_n)))
            if mixed:
                role = replace(role, engine=mixed_engine)
            return Server(self, name, role, own)

        grow = 1 if tight or offload else rng.choice((1, 1, 2, 4))
        counts = (2,) if tight else (1, 1, 2)
        self.prefills = [
            server(f"P{i}", PREFILL, (to_decode if mixed else to_prefill) * grow) for i in range(rng.choice(counts))
        ]
        num_decodes = max(rng.choice(counts), 2 if faults.drains else 1)
        self.decodes = [server(f"D{i}", DECODE, to_decode * grow) for i in range(num_decodes)]
        self.draining: Server | None = None
        self.servers = self.prefills + self.decodes
        self.requests: list[Request] = []
        self.cached_tokens: Counter[str] = Counter()  # that legs had, as their ends say: of all tiers, and by tier
        documents = [tuple(rng.randrange(VOCAB) for _ in range(max_prompt)) for _ in range(rng.choice((1, 3)))]
        for i in range(14 if tight or offload else rng.choice((1, 4, 8, 14))):
            length = rng.randint(1, max(1, min(max_prompt, self.max_model_len - 1)))
            shared = rng.choice(documents)[: rng.choice((0, length // 2, length))]
            prompt = shared + tuple(rng.randrange(VOCAB) for _ in range(length - len(shared)))
            new = rng.randint(1, max_new)
            params = SamplingParams(
                max_tokens=new,
                min_tokens=rng.choice((0, 0, 0, min(2, new))),
                n=rng.randint(1, max_n),
                seed=rng.randrange(100),
                stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice((0, 0, 3)))),
                ignore_eos=rng.random() < 0.2,
            )
            self.requests.append(Request(f"r{i}", prompt, params))
            if rng.random() < faults.abort_share:
                self.requests[-1].abort_at = rng.randrange(rng.choice((30, 150, 400)))
        self._haste = 0.3  # of requests, to arrive
        if offload:
            self._converse(max_prompt)
            self._haste = self.tiers_rng.choice((0.01, 0.03, 0.3))
        self._arrivals = deque(self.requests)

    def _converse(self, max_prompt: int) -> None:
        """Some requests go on from what earlier ones said and were answered, as far as it fits."""
        draw = self.tiers_rng
        for i, request in enumerate(self.requests[1:]):
            before = self.requests[draw.randint(0, i)]
            if draw.random() < 0.7:
                request.after = before
                said = reference(before.prompt, 0, before.params, self.max_model_len)
                longest = min(max_prompt, self.max_model_len - 1)
                request.prompt = (*before.prompt, *said, *request.prompt)[
                    : draw.choice((longest, draw.randint(1, longest)))
                ]

    @property
    def now(self) -> Now:
        return Now(self.now_s, self.now_s)

    # ---- chance

    def spend(self, fault: str, chance: float) -> bool:
        """True if this fault happens now."""
        if self.settling or self.spent[fault] >= getattr(self.faults, fault) or self.rng.random() >= chance:
            return False
        self.spent[fault] += 1
        return True

    def _weight(self, what: object) -> float:
        """Some queues are slow for a while."""
        if self.steps % 300 == 0:
            self._weights.clear()
        return self._weights.setdefault(what, self.rng.choice((0.02, 0.3, 1.0, 1.0, 3.0)))

    # ---- links

    def worker_behind(self, server: Server, number: int, rank: int) -> Worker | None:
        for link in self.links:
            if link.prefill.server is server and link.prefill.number == number:
                peer = link.decode
                if peer.server.facts.incarnation == peer.incarnation:
                    return peer.server.workers[rank]
        return None

    def _end(self, server: Server, number: int) -> tuple[SimLink, Ends] | None:
        for link in self.links:
            for end in (link.prefill, link.decode):
                same = end.server is server and end.incarnation == server.facts.incarnation
                if same and end.number == number and end.up and end.established:
                    return link, end
        return None

    def send(self, server: Server, number: int, message: Any) -> None:
        found = self._end(server, number)
        if found is not None and found[0].other(found[1]).up:
            found[0].other(found[1]).queue.append(message)

    def dial(self, server: Server, peer: PeerRef) -> None:
        for link in self.links:
            if link.decode.server is server and link.decode.up and link.prefill.incarnation == peer.incarnation:
                return
        dialled = (server, server.facts.incarnation, peer)
        if dialled not in self.dials:
            self.dials.append(dialled)

    def _answer(self, dialled: tuple[Server, str, PeerRef]) -> None:
        """Prefill answers a dial: its end is up now, decode's when the greeting arrives."""
        self.dials.remove(dialled)
        decode, incarnation, peer = dialled
        if decode.facts.incarnation != incarnation:
            return
        prefill = next(server for server in self.servers if server.name == peer.name)
        if prefill.facts.incarnation != peer.incarnation:
            decode.hear(lambda dispatch: dispatch.dial_failed(peer, "it has restarted"))
            return
        for other in self.links:  # it dials one link per incarnation: what it had before, it has given up
            mine = other.prefill.server is prefill and other.prefill.incarnation == peer.incarnation
            if mine and other.prefill.up and other.decode.server is decode:
                self._lose_end(other, other.prefill, "dialled anew")
        link = SimLink(
            Ends(prefill, peer.incarnation, next(self._numbers), established=True),
            Ends(decode, incarnation, next(self._numbers)),
        )
        self.links.append(link)
        hello = decode.hello(str(link.decode.number))
        prefill.hear(lambda dispatch: dispatch.link_up(link.prefill.number, hello, dialled=False))

    def _greeted(self, link: SimLink) -> None:
        end = link.decode
        end.established = True
        hello = link.prefill.server.hello(str(end.number))
        if hello.incarnation != link.prefill.incarnation:
            end.up = False
            ref = PeerRef(link.prefill.server.name, "", link.prefill.incarnation)
            end.server.hear(lambda dispatch: dispatch.dial_failed(ref, "it has restarted"))
            return
        for other in self.links:  # as Links._establish: a server starts workers only after its old ones have exited
            stale = other.prefill.server.name == hello.name and other.prefill.incarnation != hello.incarnation
            if other.decode.server is end.server and not other.decode.up and stale:
                end.server.dispatch.link_gone(other.decode.number)
        end.server.hear(lambda dispatch: dispatch.link_up(end.number, hello, dialled=True))

    def lose(self, server: Server, number: int, reason: str) -> None:
        found = self._end(server, number)
        if found is not None:
            self._lose_end(*found, reason)

    def _lose_end(self, link: SimLink, end: Ends, reason: str) -> None:
        end.up = False
        end.queue.clear()
        server = end.server
        if server.facts.incarnation != end.incarnation:
            return
        if not end.established:
            ref = PeerRef(link.prefill.server.name, "", link.prefill.incarnation)
            server.hear(lambda dispatch: dispatch.dial_failed(ref, reason))
        else:
            gone = link.prefill.server.facts.incarnation != link.prefill.incarnation
            server.hear(lambda dispatch: dispatch.link_down(end.number, gone, reason))

    def lose_workers(self, server: Server) -> None:
        """Ranks share fate: the group dies, and comes back as another incarnation."""
        for worker in server.workers:
            worker.transfer.alive = False
        server.dispatch.detach("killed")
        old = server.facts.incarnation
        for link in self.links:
            for end in (link.prefill, link.decode):
                if end.server is server and end.incarnation == old:
                    end.up = False
                    end.queue.clear()
        server.start()
        for link in self.links:  # those who lost a link before learn that its workers have exited
            if link.prefill.incarnation == old and link.decode.established and not link.decode.up:
                decode = link.decode.server
                if decode.facts.incarnation == link.decode.incarnation:
                    decode.dispatch.link_gone(link.decode.number)

    # ---- the router

    def _start(self, request: Request, source: Server | None = None) -> None:
        """The next attempt: one leg for each distinct prefix. source: who has the KV of the one before, and hands it over."""
        moves, request.attempt = request.attempt, request.attempt + 1
        assert request.attempt - request.credited < MAX_ATTEMPTS, f"{request.request_id} is tried for ever"
        request.stalled_since_s = None
        request.legs, request.held = {}, {}
        taking = [server for server in self.decodes if server is not self.draining]
        prefill, decode = source or self.rng.choice(self.prefills), self.rng.choice(taking)
        if self.mixed and source is None and self.rng.random() < 0.5:
            prefill = decode = self.rng.choice(self.servers)
        request.local = not self.mixed and request.attempt == request.params.n == 1 and self.local_rng.random() < 0.2
        if request.local:
            prefill = decode = self.local_rng.choice(taking)
        request.pair = (prefill, decode)
        request.pair_incarnations = (prefill.facts.incarnation, decode.facts.incarnation)
        groups: dict[tuple[int, ...], list[int]] = {}
        for choice in range(request.params.n):
            if choice not in request.finished:
                groups.setdefault(tuple(request.accepted.get(choice, ())), []).append(choice)
        for prefix_no, (outputs, choices) in enumerate(groups.items()):
            key = LegKey(request.request_id, request.attempt, prefix_no)
            request.legs[key] = tuple(choices)
            request.answering[key] = decode
            whole = ((decode, decode.ref if request.local else NOBODY),)
            pair = ((prefill, decode.ref), (decode, prefill.ref))
            for server, peer in whole if prefill is decode else pair:
                start = StartLeg(
                    key,
                    request.prompt + (outputs if source is None else outputs[:-1]),
                    len(request.prompt),
                    request.params,
                    tuple(choices),
                    peer,
                    1e9,
                    tenant=request.request_id[-1] if self.many_tenants else "",
                    moves_attempt=moves if server is source else 0,
                    moved=source is not None and server is decode,
                    local_prefill=request.local,
                )
                if self.spend("lost_dispatches", 0.1):
                    request.stalled_since_s = self.now_s
                else:
                    server.from_router.append((server.facts.incarnation, start))

    def _arrive(self) -> None:
        request = self._arrivals.popleft()
        if request.abort_at is not None:
            request.abort_at += self.steps
        self._start(request)

    def _retire(self, request: Request) -> None:
        for key in request.legs:
            for server in request.pair or ():
                server.from_router.append((server.facts.incarnation, AbortLeg(key)))

    def _replay(self, request: Request) -> None:
        self._retire(request)
        self._start(request)

    def _abort(self, request: Request) -> None:
        """A client goes away, or a stop string ends one choice."""
        open_choices = [c for c in range(request.params.n) if c not in request.finished]
        if len(open_choices) < 2 or self.rng.random() < 0.5:
            request.aborted = True
            self._retire(request)
            return
        request.abort_at = None
        choice = self.rng.choice(open_choices)
        request.finished[choice] = None
        request.dropped.add(choice)
        for key, choices in request.legs.items():
            if choice in choices and request.pair is not None:
                for server in request.pair:
                    server.from_router.append((server.facts.incarnation, AbortLeg(key, choice)))
        if self.rng.random() < 0.3:
            request.abort_at = self.steps + self.rng.randrange(100)

    def _hear(self, server: Server) -> None:
        message = server.to_router.popleft()
        request = next(r for r in self.requests if r.request_id == message.key.request_id)
        if isinstance(message, LegTokens):
            self._tokens(server, request, message)
            return
        told = Counter(all=message.cached_tokens, host=message.host_tokens, storage=message.storage_tokens)
        assert told["host"] + told["storage"] <= told["all"], message
        self.cached_tokens += told
        if server in self.decodes:
            self.cached_tokens["host, by decode"] += message.host_tokens
        if message.key in request.legs:
            if server is request.answering[message.key]:
                if not request.done:
                    self._leg_ended(server, request, message)
            elif message.outcome is not Outcome.DONE and request.stalled_since_s is None:
                request.stalled_since_s = self.now_s

    def _tokens(self, server: Server, request: Request, message: LegTokens) -> None:
        if server is request.answering[message.key]:
            due = request.decode_next.get((message.key, message.choice), message.first_index)
            assert message.first_index == due, f"{message} came where index {due} was due"
            request.decode_next[message.key, message.choice] = due + len(message.token_ids)
        accepted = request.accepted.setdefault(message.choice, [])
        if request.aborted or message.choice in request.finished or message.key not in request.legs:
            for index, token in enumerate(message.token_ids, start=message.first_index):
                assert index >= len(accepted) or accepted[index] == token, "an accepted token was contradicted"
            return
        held = request.held.setdefault(message.choice, {})
        for index, token in enumerate(message.token_ids, start=message.first_index):
            last = index == message.first_index + len(message.token_ids) - 1
            if index < len(accepted):
                assert accepted[index] == token, "an accepted token was contradicted"
            else:
                held[index] = (token, message.finish if last else None)
        while len(accepted) in held and message.choice not in request.finished:
            token, finish = held.pop(len(accepted))
            accepted.append(token)
            if finish is not None:
                request.finished[message.choice] = finish

    def _leg_ended(self, server: Server, request: Request, end: LegEnd) -> None:
        assert end.outcome is not Outcome.REFUSED, end
        if end.outcome is Outcome.DONE:
            for choice in request.legs[end.key]:
                assert choice in request.finished, f"decode says done of {end.key}; choice {choice} has not finished"
        elif end.outcome is Outcome.HANDED_OVER:
            request.handed_over.add(end.key)
            going_on = [key for key, choices in request.legs.items() if set(choices) - request.finished.keys()]
            if request.handed_over.issuperset(going_on):
                request.moves += 1
                self._start(request, source=server)
        elif request.local and end.outcome is Outcome.GIVEN_BACK:
            assert "not cached any more" in end.reason
            request.given_back += 1
            self._replay(request)
        else:
            assert self.faults.any, f"an attempt was lost though nothing went wrong: {end}"
            if (
                "quarantined" in end.reason
            ):  # only the end of those workers brings the arena back: somebody restarts them
                for prefill in self.prefills:
                    self.lose_workers(prefill)
                for each in self.requests:
                    each.credited += not each.done
            self._replay(request)

    def _drain(self) -> None:
        """One decode server at a time drains, and begins again when it is empty."""
        if self.draining is None and self.spend("drains", 0.01):
            self.draining = self.rng.choice(self.decodes)
        at = self.draining
        if at is None:
            return
        here = [r for r in self.requests if not r.done and r.pair is not None and r.pair[1] is at]
        for request in here:
            has_it = request.pair is not None and (request.pair[0] is not at or request.local)
            if request.asked != request.attempt and has_it:
                request.asked = request.attempt
                for key in request.legs:
                    at.from_router.append((request.pair_incarnations[1], HandOver(key)))
        if not here and at.engine.idle and not at.from_router:
            self.draining = None

    def _router_looks_around(self) -> None:
        """Lost incarnations, and patience."""
        for request in self.requests:
            stalled = request.stalled_since_s is not None and self.now_s - request.stalled_since_s > STALL_S
            if request.done and self.faults.any and not request.lingered:
                if request.done_s is None:
                    request.done_s = self.now_s
                elif self.now_s - request.done_s > STALL_S:  # one server has lost it, so the other would wait for ever
                    request.lingered = True
                    self._retire(request)
            if request.done or request.pair is None:
                continue
            prefill, decode = request.pair
            if decode.facts.incarnation != request.pair_incarnations[1]:
                self._replay(request)
            elif prefill.facts.incarnation != request.pair_incarnations[0] and request.stalled_since_s is None:
                request.stalled_since_s = self.now_s
            elif stalled:
                self._replay(request)

    def _dispatched(self, server: Server) -> None:
        incarnation, message = server.from_router.popleft()
        if incarnation != server.facts.incarnation:
            return  # its channel went with the old workers' engine
        server.hear(lambda dispatch: dispatch.router_message(0, message))

    # ---- what can happen

    def _actions(self) -> list[tuple[float, Callable[[], None]]]:
        out: list[tuple[float, Callable[[], None]]] = []

        def maybe(what: object, queue: object, act: Callable[[], None]) -> None:
            if queue:
                out.append((self._weight(what), act))

        if self._arrivals and (self._arrivals[0].after is None or self._arrivals[0].after.done):
            out.append((self._haste, self._arrive))
        for dialled in self.dials:
            maybe("dial", True, lambda d=dialled: self._answer(d))  # type: ignore[misc]
        for server in self.servers:
            maybe((server.name, "hear"), server.to_router, lambda s=server: self._hear(s))  # type: ignore[misc]
            maybe((server.name, "tell"), server.from_router, lambda s=server: self._dispatched(s))  # type: ignore[misc]
            maybe((server.name, "alarm"), server.alarms, lambda s=server: self._wake(s))  # type: ignore[misc]
            for worker in server.workers:
                at, transfer = (server.name, worker.rank), worker.transfer
                maybe((*at, "compute"), worker.plans, worker.compute)
                maybe((*at, "serve"), transfer.commands, transfer.serve)
                maybe((*at, "result"), worker.results, lambda w=worker: self._result(w))  # type: ignore[misc]
                maybe((*at, "report"), transfer.events, lambda w=worker: self._report(w))  # type: ignore[misc]
                maybe((*at, "copy"), worker.tiers.copies, worker.tiers.copy)
                maybe((*at, "store"), worker.tiers.transfers, worker.tiers.transfer)
                maybe((*at, "tiers"), worker.tiers.events, lambda w=worker: self._tier_report(w))  # type: ignore[misc]
                maybe((*at, "gather"), transfer.sendable, transfer.start_write)
                maybe((*at, "wire"), transfer.writing, lambda t=transfer: self._wire(t))  # type: ignore[misc]
                maybe((*at, "notify"), transfer.notifications, lambda t=transfer: self._notify(t))  # type: ignore[misc]
            maybe((server.name, "ask"), server.keeper.commands, server.keeper.serve)
            maybe((server.name, "told"), server.keeper.events, lambda s=server: self._store_says(s))  # type: ignore[misc]
        for link in self.links:
            if not link.decode.established and link.decode.up:
                maybe("greeting", True, lambda x=link: self._greeted(x))  # type: ignore[misc]
                continue
            for end in (link.prefill, link.decode):
                maybe((end.number, "link"), end.queue, lambda e=end: self._deliver(e))  # type: ignore[misc]
                if end.up and not link.other(end).up:
                    weight = self._weight((end.number, "loss")) / 3
                    out.append((weight, lambda x=link, e=end: self._lose_end(x, e, "lost at the other end")))  # type: ignore[misc]
        return out

    def _wake(self, server: Server) -> None:
        self.now_s = max(self.now_s, server.alarms.popleft())
        server.hear(Dispatch.wake)

    def _result(self, worker: Worker) -> None:
        server = worker.server
        result = worker.results.popleft()
        server.hear(lambda dispatch: dispatch.step_done(result))

    def _report(self, worker: Worker) -> None:
        server, report = worker.server, worker.transfer.events.popleft()
        server.hear(lambda dispatch: dispatch.transfer_event(worker.rank, report))

    def _tier_report(self, worker: Worker) -> None:
        server, report = worker.server, worker.tiers.events.popleft()
        server.hear(lambda dispatch: dispatch.transfer_event(worker.rank, report))

    def _store_says(self, server: Server) -> None:
        event = server.keeper.events.popleft()
        server.hear(lambda dispatch: dispatch.store_event(event))

    def store_fails(self) -> bool:
        """A call of the store comes to nothing."""
        return self.spend("store_failures", 0.1)

    def _wire(self, transfer: SimTransfer) -> None:
        transfer.advance(self.rng.choice(transfer.writing))

    def _notify(self, transfer: SimTransfer) -> None:
        transfer.notified(self.rng.choice(transfer.notifications))

    def _deliver(self, end: Ends) -> None:
        server, message = end.server, end.queue.popleft()
        server.hear(lambda dispatch: dispatch.link_message(end.number, message))

    def _tick(self) -> None:
        self.now_s += 0.1
        for server in self.servers:
            server.hear(Dispatch.tick)
        self._router_looks_around()

    def _fault(self) -> None:
        if self.spend("lost_workers", 0.001):
            self.lose_workers(self.rng.choice(self.servers))
            self._router_looks_around()
        offloading = [
            server for server in self.servers if server.facts.offload is not None and server.facts.offload.storage
        ]
        broken = [server for server in offloading if not server.keeper.works]
        if broken and (self.settling or self.tiers_rng.random() < 0.02):
            broken[0].keeper.turn()
        elif offloading and self.spend("store_outages", 0.002):
            self.tiers_rng.choice(offloading).keeper.turn()
        ups = [(link, end) for link in self.links for end in (link.prefill, link.decode) if end.up and end.established]
        if ups and self.spend("lost_links", 0.003):
            self._lose_end(*self.rng.choice(ups), "a fault")
        for request in self.requests:
            due = request.abort_at is not None and request.attempt > 0 and request.abort_at <= self.steps
            if due and not request.done:
                self._abort(request)

    def step(self) -> bool:
        """One thing happens. False if only time could pass."""
        self.steps += 1
        self._fault()
        self._drain()
        for stray in [stray for stray in self.stray if stray[0] <= self.steps or self.settling]:
            self.stray.remove(stray)
            stray[1].land_stray(stray[2])
        for late in [late for late in self.late if late[0] <= self.steps or self.settling]:
            self.late.remove(late)
            late[1].notifications.append(late[2])
        actions = self._actions()
        if not actions or self.rng.random() < 0.01:
            self._tick()
            return bool(actions)
        weights = [weight for weight, _ in actions]
        self.rng.choices([act for _, act in actions], weights)[0]()
        self.links = [x for x in self.links if x.prefill.up or x.decode.up or self._remembered(x)]
        return True

    def _remembered(self, link: SimLink) -> bool:
        """A dead link whose prefill workers live: decode will want to know when they are gone."""
        alive = link.prefill.server.facts.incarnation == link.prefill.incarnation
        return alive and link.decode.server.facts.incarnation == link.decode.incarnation

    def run(self) -> None:
        """Until every request has its answer, or as many steps as no healthy run needs."""
        while self._arrivals or not all(request.done for request in self.requests):
            self.step()
            assert self.steps < self.max_steps, f"hangs (seed {self.seed}):\n{self.dump()}"

    def settle(self) -> None:
        """Everything still under way comes to its end, and idle rings go back."""
        self.settling = True
        quiet = 0
        while quiet < 10 * (STALL_S + 4):
            quiet = 0 if self.step() else quiet + 1
            assert self.steps < 2 * self.max_steps, f"never quiet (seed {self.seed}):\n{self.dump()}"

    def check_answers(self) -> None:
        for request in self.requests:
            for choice in range(request.params.n):
                expected = reference(request.prompt, choice, request.params, self.max_model_len)
                got = tuple(request.accepted.get(choice, ()))
                if request.aborted or choice in request.dropped:
                    assert got == expected[: len(got)]
                else:
                    assert got == expected, f"{request.request_id} choice {choice}"
            if not self.faults.any:
                assert request.attempt <= 1 + request.moves + request.given_back, (
                    f"{request.request_id} was replayed though nothing went wrong"
                )

    def check_nothing_leaked(self) -> None:
        """At rest: what must be empty is."""
        self.store.check()
        for server in self.servers:
            engine = server.engine
            engine.check_integrity()
            where = f"{server.name} (seed {self.seed})"
            if (tiers := engine.core.tiers) is not None:
                assert tiers.offload.manager.idle and not tiers.held() and not tiers.loads.dump().keys() - {"tokens"}, (
                    where
                )
                assert not tiers.offload.host.holders(), f"{where}: pages of the host are held"
            assert engine.idle, f"{where}: legs {engine.dump()['legs']}"
            assert engine.core.pool.kv.allocator.used_large == 0, where
            assert engine.core.batch.slots.free == engine.core.batch.slots.total, where
            assert not engine.pipeline.in_flight, where
            assert engine.counters.max_steps_after_abort <= 2, where
            if not self.faults.any:
                assert not engine.counters.legs.get("peer_lost"), f"{where}: no peer was lost, legs were aborted"
            for worker in server.workers:
                assert not worker.known.sequences and not worker.slots, f"{where}: the worker remembers sequences"
                transfer = worker.transfer
                assert not transfer.bound and not transfer.expected, f"{where}: {transfer.expected}"
                assert not transfer.to_send and not transfer.writing and not transfer.dropping, where
            batch = engine.core.batch
            assert not batch.pages() and not batch.running and not batch.parked, where
            assert not engine.core.turns.queue and not engine.core.turns.moving, where
            for stage in engine.stages:
                if isinstance(stage, Sender):
                    check_sender_quiet(stage, where)
                elif isinstance(stage, Receiver):
                    check_receiver_quiet(stage, where)
            assert engine.load(ServerState.READY).waiting == 0
        others = self.decodes[:1] if self.faults.drains else []
        for server in self.prefills + others:
            self.lose_workers(server)
        for server in self.decodes:
            assert server.engine.arena_bytes()[2] == 0, f"{server.name}: quarantined though every prefill is gone"

    def dump(self) -> str:
        lines = [f"time {self.now_s:.1f}, step {self.steps}"]
        lines += [str(r) for r in self.requests if not r.done]
        lines += [f"{server.name}: {server.engine.dump()}" for server in self.servers]
        return "\n".join(lines)


def check_sender_quiet(sender: Sender, where: str) -> None:
    """At rest, nothing is being written."""
    assert not sender.lost_links, where
    for link in sender.links.values():
        assert not link.writing and not link.rings, f"{where}: {link}"


def check_receiver_quiet(receiver: Receiver, where: str) -> None:
    """At rest, nothing is expected, and no link holds segments or wants them."""
    for link in receiver.links.values():
        assert not link.early and not link.early_tokens, f"{where}: {link.early}"
    assert not any(ring.live for ring in receiver.rings.table.links.values()), where
    assert receiver.arena_bytes()[1] == 0, f"{where}: idle links hold segments: {receiver.dump()}"
    assert not receiver.rings.table._wanted, where
