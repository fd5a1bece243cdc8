"""A deterministic world for the two engines: real engines, simulated links, lanes, workers, memory, router and time.

Every queue delivers in order, after any delay; what happens next is drawn from a seed. Pools hold (token id, position)
cells per layer and head, or states that name every token they have seen; arenas hold the writes that lie in them; and a
"model" checks every cell that it attends over: a wrong page, a page that another layer group has taken, a stale byte of a
ring, a page reused too early or a missing copy-on-write is an assertion here, at the step where it would have become
text. Knows the engines' public calls; carries out their instructions as servers do.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from disagg.engine.decode import DecodeEngine
from disagg.engine.facts import EngineFacts
from disagg.engine.instructions import DialLink, DropLink, Instruction, PublishKv, ToLane, ToLink, ToRouter, ToWorkers
from disagg.engine.prefill import PrefillEngine
from disagg.memory.groups import spec_of
from disagg.memory.layout import PageSizing, plan_layout
from disagg.memory.sequence import KvMemory
from disagg.messages.lane import (
    AddPeer,
    Bind,
    Bound,
    DropSends,
    ExpectPiece,
    ForgetEntry,
    Landing,
    LaneRequest,
    PeerAdded,
    PeerRemoved,
    PieceFailed,
    PieceSent,
    RemovePeer,
    SendPiece,
    SendsDropped,
    Unbind,
    Unbound,
)
from disagg.messages.layout import GroupKind, GroupPages, LayerGroup, StatePart
from disagg.messages.legs import AbortLeg, LegEnd, LegTokens, Outcome, PeerRef, ServerState, StartLeg
from disagg.messages.link import LinkHello, RankInfo
from disagg.messages.mirror import Mirror, RunView
from disagg.messages.pieces import RankSlice
from disagg.messages.plan import SampledToken, StepResult, WorkerPlan
from disagg.staging.slices import heads_per_rank
from disagg.types.ids import FinishReason, LegKey
from disagg.types.sampling import SamplingParams

VOCAB, EOS = 24, 0
FULL = LayerGroup("full", (0, 1), 2, 1, "float32")
STATE = LayerGroup.of_states("state", (2,), (StatePart("conv", (2,), "float32"),))
GRANULE = 8
STALL_S = 8.0  # the router's patience where prefill failed or a dispatch was lost
MAX_ATTEMPTS = 40  # faults are bounded, so attempts are: more is a livelock

Cell = tuple[int, ...]  # (token id, position), or all tokens that a state has seen


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


@dataclass
class ArenaWrite:
    """A write as it lies in an arena. identity: what the checksum is seeded with; cells: by (layer, head of the slice)."""

    identity: tuple[object, ...]
    nbytes: int
    cells: dict[tuple[int, int, int], Cell]  # (layer, head in slice, token position) -> cell
    corrupt: bool = False


def _identity(of: RankSlice) -> tuple[object, ...]:
    ranks = of.head_slice
    return (of.key, of.piece, of.src_incarnation, of.dst_incarnation, ranks.src_rank, ranks.dst_rank)


@dataclass
class Write:
    """A write under way. It goes in two halves; the notification follows the second."""

    request: SendPiece
    target: Worker
    data: ArenaWrite
    halves: int = 0


class Worker:
    """One rank: a compute thread that runs plans in order and a transfer thread that serves the lane, as worker/ does."""

    def __init__(self, server: Server, rank: int) -> None:
        self.server, self.rank = server, rank
        self.alive = True
        self.plans: deque[WorkerPlan] = deque()
        self.results: deque[StepResult] = deque()
        self.requests: deque[LaneRequest] = deque()
        self.reports: deque[Any] = deque()
        self.mirror = Mirror()
        self.computed_plan = -1
        self.slots: dict[int, int] = {}  # slot -> sequence
        self.pages: dict[
            tuple[int, int], dict[tuple[int, int, int], Cell]
        ] = {}  # (group, page) -> (row, layer, own head)
        self.large_group: dict[int, int] = {}  # who wrote last into a large page
        self.arena: list[ArenaWrite | None] = [None] * (server.facts.arena_bytes // GRANULE)
        self.peers: set[tuple[int, int]] = set()
        self.to_send: deque[SendPiece] = deque()
        self.writing: list[Write] = []
        self.unsure: set[int] = set()  # links of which a write has failed
        self.dropping: dict[tuple[int, LegKey], None] = {}
        self.bound: dict[LegKey, tuple[GroupPages, ...]] = {}
        self.expected: dict[int, ExpectPiece] = {}
        self.abandoned: dict[int, ExpectPiece] = {}
        self.early: set[int] = set()
        self.notifications: list[int] = []  # delivered in any order

    # ---- compute thread

    def compute(self) -> None:
        plan = self.plans.popleft()
        ended, begun, runs = self.mirror.apply(plan)
        for sequence in ended:
            for sampler in sequence.samplers:
                assert self.slots.pop(sampler.slot) == sequence.seq_id
        for copy in plan.copies:
            source = dict(self.pages.get((copy.group, copy.source), {}))
            self._page(copy.group, copy.destination).clear()
            self._page(copy.group, copy.destination).update(source)
        for sequence in begun:
            for sampler in sequence.samplers:
                assert sampler.slot not in self.slots, "a sampling slot was opened twice"
                self.slots[sampler.slot] = sequence.seq_id
        sampled = []
        for run in runs:
            sequence = run.sequence
            stop = run.start + run.num_tokens
            assert stop <= len(sequence.tokens), "a run names tokens that this worker does not know"
            for g, group in enumerate(self.groups):
                if group.is_state:
                    self._update_state(g, run)
                else:
                    self._attend(g, run)
            context = tuple(sequence.tokens[:stop])
            if not run.sample:
                continue
            for sampler in sequence.samplers:
                token = next_token(context, sampler.choice, sequence.params.seed)
                sampled.append(SampledToken(sequence.seq_id, sampler.choice, token))
            if len(sequence.samplers) == 1:
                sequence.tokens.append(token)
        self.computed_plan = plan.plan_no
        tokens = tuple(sampled) if self.rank == 0 else ()
        self.results.append(StepResult(self.rank, plan.plan_no, tokens, 0.001, 0.0, 0.0))

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        return self.server.facts.groups

    def heads(self, group: LayerGroup) -> int:
        return heads_per_rank(self.server.facts.tp, group.kv_heads)

    def _page(self, g: int, page: int) -> dict[tuple[int, int, int], Cell]:
        """A page to write to: what another group had in its large page is lost."""
        large = page // self.server.facts.layout.per_large[g]
        if self.large_group.get(large) != g:
            for other, per_large in enumerate(self.server.facts.layout.per_large):
                for lost in range(large * per_large, (large + 1) * per_large):
                    self.pages.pop((other, lost), None)
            self.large_group[large] = g
        return self.pages.setdefault((g, page), {})

    def _row(self, g: int, page: int, offset: int) -> Cell:
        """What all layers and heads hold of one position."""
        cells = self.pages.get((g, page), {})
        layers, heads = range(len(self.groups[g].layers)), range(self.heads(self.groups[g]))
        found = {cells.get((offset, layer, head)) for layer, head in itertools.product(layers, heads)}
        where = f"{self.server.name} rank {self.rank} group {g} page {page}"
        assert len(found) == 1, f"{where}: cells differ: {found}"
        cell = found.pop()
        assert cell is not None, f"{where}: row {offset} was never written, or was lost"
        return cell

    def _write(self, g: int, page: int, offset: int, cell: Cell) -> None:
        layers, heads = range(len(self.groups[g].layers)), range(self.heads(self.groups[g]))
        cells = self._page(g, page)
        for layer, head in itertools.product(layers, heads):
            cells[offset, layer, head] = cell

    def _update_state(self, g: int, run: RunView) -> None:
        tokens, stop = tuple(run.sequence.tokens), run.start + run.num_tokens
        if run.start:
            assert self._row(g, run.last_pages[g], 0) == tokens[: run.start]
        self._write(g, run.sequence.tables[g][-1], 0, tokens[:stop])
        checkpoint = self.server.facts.checkpoint_tokens
        assert (stop - 1) // checkpoint == run.start // checkpoint, "a run crosses a checkpoint"

    def _attend(self, g: int, run: RunView) -> None:
        page_tokens, table, tokens = self.server.facts.page_tokens, run.sequence.tables[g], run.sequence.tokens
        stop = run.start + run.num_tokens
        for position in range(run.start, stop):
            self._write(g, table[position // page_tokens], position % page_tokens, (tokens[position], position))
        seen = self.groups[g].window or stop
        for position in range(max(0, run.start - seen + 1), stop):
            cell = self._row(g, table[position // page_tokens], position % page_tokens)
            assert cell == (tokens[position], position), f"{self.server.name} group {g}: {position} holds {cell}"

    # ---- transfer thread

    def serve_lane(self) -> None:
        request = self.requests.popleft()
        match request:
            case AddPeer():
                self.peers.add((request.link, request.peer_rank))
                self.reports.append(PeerAdded(request.link, request.peer_rank, "", 0.0))
            case RemovePeer():
                self.peers = {peer for peer in self.peers if peer[0] != request.link}
                self.to_send = deque(r for r in self.to_send if r.link != request.link)
                for write in [w for w in self.writing if w.request.link == request.link]:
                    self._give_up(write)
                    self._failed(write.request, "its peer was removed")
                for where in [where for where in self.dropping if where[0] == request.link]:
                    del self.dropping[where]
                for entry_id in [e for e, expected in self.expected.items() if expected.link == request.link]:
                    del self.expected[entry_id]
                clean = request.link not in self.unsure
                self.unsure.discard(request.link)
                self.reports.append(PeerRemoved(request.link, clean))
            case SendPiece():
                self.to_send.append(request)
            case DropSends():
                self.to_send = deque(r for r in self.to_send if (r.link, r.slice.key) != (request.link, request.key))
                self.dropping[request.link, request.key] = None
                self._report_dropped()
            case Bind():
                self.bound[request.key] = request.tables
                self.reports.append(Bound(request.key))
            case ExpectPiece():
                self.expected[request.entry_id] = request
                if request.entry_id in self.early:
                    self.early.discard(request.entry_id)
                    self._land(request.entry_id)
            case ForgetEntry():
                lost = self.expected.pop(request.entry_id, None) or self.abandoned.pop(request.entry_id, None)
                if lost is not None:
                    self._landing(lost, False, "lost")
            case Unbind():
                self.bound.pop(request.key, None)
                for entry_id in [e for e, expected in self.expected.items() if expected.slice.key == request.key]:
                    self.abandoned[entry_id] = self.expected.pop(entry_id)
                self.reports.append(Unbound(request.key))

    def _give_up(self, write: Write) -> None:
        """A write fails. What is on its way may still land, as long as this worker lives."""
        self.writing.remove(write)
        self.unsure.add(write.request.link)
        world = self.server.world
        if world.rng.random() < 0.5:
            world.stray.append((world.steps + world.rng.randrange(1000), self, write))

    def land_stray(self, write: Write) -> None:
        first, count = write.request.arena_offset // GRANULE, write.request.nbytes // GRANULE
        if self.alive and write.target.alive:
            for index in range(count // 2, count):
                write.target.arena[first + index] = write.data

    def _report_dropped(self) -> None:
        under_way = {(w.request.link, w.request.slice.key) for w in self.writing}
        for where in [where for where in self.dropping if where not in under_way]:
            del self.dropping[where]
            self.reports.append(SendsDropped(*where))

    def _failed(self, request: SendPiece, reason: str) -> None:
        self.reports.append(PieceFailed(request.link, request.entry_id, request.slice.key, reason))

    @property
    def sendable(self) -> bool:
        buffers = len(self.writing) < self.server.world.gather_buffers
        return bool(self.to_send) and buffers and self.to_send[0].after_plan <= self.computed_plan

    def start_write(self) -> None:
        """Gather, as it is now, what the pages hold."""
        request = self.to_send.popleft()
        part = request.slice.head_slice
        if (request.link, part.dst_rank) not in self.peers:
            self._failed(request, "its peer is not known here")
            return
        facts = self.server.facts
        assert request.nbytes <= facts.gather_bytes
        piece = request.slice.piece
        rows = self.groups[piece.group].rows_per_page(facts.page_tokens)
        first_page = piece.token_start // rows
        cells: dict[tuple[int, int, int], Cell] = {}
        for position in range(piece.token_start, piece.token_stop):
            page, offset = request.pages[position // rows - first_page], position % rows
            for layer in range(piece.layer_start, piece.layer_stop):
                for head in range(part.heads):
                    cell = self.pages[piece.group, page][offset, layer, part.src_head_start + head]
                    cells[layer, head, position] = cell
        target = self.server.world.worker_behind(self.server, request.link, part.dst_rank)
        if target is None or not target.alive:
            self._failed(request, "its peer has exited")
            return
        self.writing.append(Write(request, target, ArenaWrite(_identity(request.slice), request.nbytes, cells)))

    def advance(self, write: Write, world: World) -> None:
        """Half of a write goes over the wire; with the second half its notification."""
        request = write.request
        if not write.target.alive or world.spend("failed_writes", 0.02):
            self._give_up(write)
            self._failed(request, "the wire broke")
            self._report_dropped()
            return
        assert request.arena_offset % 16 == 0
        first = request.arena_offset // GRANULE
        count = request.nbytes // GRANULE
        assert first + count <= len(write.target.arena), "a write outside of the arena"
        half = count // 2
        for index in range(half) if write.halves == 0 else range(half, count):
            write.target.arena[first + index] = write.data
        write.halves += 1
        if write.halves < 2:
            return
        if world.spend("corrupt_pieces", 0.1):
            write.data.corrupt = True
        self.writing.remove(write)
        self.reports.append(PieceSent(request.link, request.entry_id, request.slice.key, request.nbytes, 0.0, 0.0))
        self._report_dropped()
        if not world.spend("lost_notifications", 0.1):
            write.target.notifications.append(request.entry_id)
        elif world.rng.random() < 0.5:  # not lost: it comes when nobody waits for it any more
            world.late.append((world.steps + world.rng.randrange(3000), write.target, request.entry_id))

    def notified(self, entry_id: int) -> None:
        self.notifications.remove(entry_id)
        if entry_id in self.expected:
            self._land(entry_id)
        elif (abandoned := self.abandoned.pop(entry_id, None)) is not None:
            self._landing(abandoned, False, "unbound")
        else:
            self.early.add(entry_id)

    def _land(self, entry_id: int) -> None:
        expected = self.expected.pop(entry_id)
        tables = self.bound.get(expected.slice.key)
        if tables is None:
            self._landing(expected, False, "unbound")
            return
        first = expected.arena_offset // GRANULE
        lies = self.arena[first : first + expected.nbytes // GRANULE]
        data = lies[0]
        right = data is not None and all(each is data for each in lies) and data.nbytes == expected.nbytes
        if data is None or not right or data.identity != _identity(expected.slice) or data.corrupt:
            world = self.server.world
            world.bad_checksums += 1
            assert world.bad_checksums <= world.spent["corrupt_pieces"], "a checksum failed that nobody corrupted"
            self._landing(expected, False, "checksum")
            return
        piece, part = expected.slice.piece, expected.slice.head_slice
        table = tables[piece.group]
        rows = self.groups[piece.group].rows_per_page(self.server.facts.page_tokens)
        for (layer, head, position), cell in data.cells.items():
            assert position // rows >= table.first, "a piece lands outside of what was bound"
            page = self._page(piece.group, table.pages[position // rows - table.first])
            page[position % rows, layer, part.dst_head_start + head] = cell
        self._landing(expected, True, "")

    def _landing(self, expected: ExpectPiece, ok: bool, reason: str) -> None:
        self.reports.append(Landing(expected.link, expected.entry_id, expected.slice.key, ok, reason, 1, 0.0, 0.0))


class Server:
    """One server: an engine, its workers, its end of links. Carries out instructions in the server's order."""

    def __init__(self, world: World, name: str, role: str, facts: EngineFacts) -> None:
        self.world, self.name, self.role = world, name, role
        self.facts = facts
        self.engine: Any = None
        self.workers: list[Worker] = []
        self.incarnations = 0
        self.to_router: deque[Any] = deque()
        self.from_router: deque[Any] = deque()
        self.start()

    def start(self) -> None:
        self.incarnations += 1
        incarnation = f"{self.name}.{self.incarnations}"
        self.facts = EngineFacts(**{**_fields(self.facts), "incarnation": incarnation})
        self.known: set[tuple[int, bytes]] = set()  # what the cache events came to
        self.engine = (PrefillEngine if self.role == "prefill" else DecodeEngine)(self.facts)
        self.workers = [Worker(self, rank) for rank in range(self.facts.tp)]

    @property
    def ref(self) -> PeerRef:
        return PeerRef(self.name, "somewhere:1", self.facts.incarnation)

    def hello(self, generation: str) -> LinkHello:
        ranks = tuple(RankInfo(rank, 1, 1, b"", 0, 0, 0) for rank in range(self.facts.tp))
        return LinkHello(self.name, generation, self.facts.incarnation, "same", self.facts.tp, "host", ranks)

    def do(self, instructions: list[Instruction]) -> None:
        world = self.world
        drops = []
        for instruction in [*instructions, *self.engine.schedule(world.now_s, world.now_s)]:
            match instruction:
                case ToWorkers():
                    for worker in self.workers:
                        worker.plans.append(instruction.plan)
                case ToRouter():
                    self.to_router.append(instruction.message)
                case ToLane():
                    for worker in self.workers:
                        if instruction.rank in (None, worker.rank):
                            worker.requests.append(instruction.message)
                case ToLink():
                    world.send(self, instruction.link, instruction.message)
                case PublishKv():
                    self.known.update(instruction.events.stored)
                    self.known.difference_update(instruction.events.removed)
                case DialLink():
                    world.dial(self, instruction.peer)
                case DropLink():
                    drops.append(instruction)
        assert len(self.engine.pipeline.in_flight) <= 2
        self.engine.check_integrity()
        assert self.known == set(self.engine.kv_snapshot().stored), "cache events do not add up to the cache"
        for drop in drops:
            world.lose(self, drop.link, drop.reason)


def _fields(facts: EngineFacts) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in facts.__struct_fields__}


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
    attempt: int = -1
    accepted: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, FinishReason | None] = field(default_factory=dict)
    held: dict[int, dict[int, tuple[int, FinishReason | None]]] = field(default_factory=dict)
    legs: dict[LegKey, tuple[int, ...]] = field(default_factory=dict)  # of this attempt -> choices
    decode_next: dict[tuple[LegKey, int], int] = field(default_factory=dict)
    pair: tuple[Server, Server] | None = None
    pair_incarnations: tuple[str, str] = ("", "")
    stalled_since_s: float | None = None
    done_s: float | None = None
    lingered: bool = False
    aborted: bool = False
    dropped: set[int] = field(default_factory=set)
    abort_at: int | None = None  # simulated step; until the request arrives: steps after that

    @property
    def done(self) -> bool:
        return self.aborted or len(self.finished) == self.params.n


class World:
    """Everything, and what happens next. `run` until every request is done, then `settle` and `check_nothing_leaked`."""

    def __init__(self, seed: int, faults: Faults, max_steps: int = 60_000, *, tight: bool = False) -> None:
        """tight: two servers of each kind, pools and arenas as small as they can be, and many requests."""
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
        self.links: list[SimLink] = []
        self.late: list[tuple[int, Worker, int]] = []  # notifications: (step at which they come, worker, entry)
        self.stray: list[tuple[int, Worker, Write]] = []  # failed writes: (step at which they land, writer, write)
        self.dials: list[tuple[Server, str, PeerRef]] = []
        self._numbers = itertools.count()
        self._weights: dict[object, float] = {}
        page_tokens = rng.choice((1, 4, 16))
        max_prompt = rng.choice((3, 12, 40))
        max_new = rng.choice((1, 3, 12))
        max_n = rng.choice((1, 1, 2, 3))
        self.max_model_len = max_prompt + max_new + rng.choice((-1, 2))
        segment = rng.choice((48, 128, 256))
        segments = 1 if tight else rng.choice((1, 2, 4, 8))
        most = min(max_prompt + max_new, self.max_model_len)
        groups = models(rng)
        layout = plan_layout(
            [spec_of(group, page_tokens) for group in groups],
            page_tokens,
            page_tokens * rng.choice((1, 2, 4)),
            rng.choice((PageSizing.LCM, PageSizing.LCM, PageSizing.MAX)),
        )
        chunk_tokens = rng.choice((4, 8, 16, 64))
        kv = KvMemory(layout, 1)
        to_prefill = max(kv.large_pages_to_prefill(k, chunk_tokens) for k in range(1, most + 1))
        to_decode = max(to_prefill, *(kv.large_pages_to_decode(k, most, max_n) for k in range(most)))
        facts = EngineFacts(
            incarnation="",
            tp=1,
            groups=groups,
            layout=layout,
            num_large=0,
            prefix_cache=rng.random() < 0.75,
            cache_root="weights",
            max_slots=max_n + rng.choice((0, 1, 5)),
            chunk_tokens=chunk_tokens,
            max_model_len=self.max_model_len,
            vocab_size=VOCAB,
            eos_token_ids=(EOS,),
            max_waiting=10_000,
            ungranted_share=rng.choice((0.1, 0.5)),
            spare_tokens=rng.choice((0, 1, 5, 64)),
            lookahead_tokens=rng.choice((0, 0, 3, 1000)),
            preempt_after_s=rng.choice((0.2, 2.0)),
            preemption=rng.choice(("latest", "fewest_tokens")),
            gather_bytes=rng.choice((48, 128, 256)),
            arena_bytes=segment * segments,
            segment_bytes=segment,
            link_segments=rng.choice((1, 2)),
            link_idle_s=0.5,
            progress_s=20.0,
        )
        everything = _fields(facts)
        self.many_tenants = rng.random() < 0.5

        def server(name: str, role: str, pages: int) -> Server:
            own = {"num_large": pages, "tp": rng.choice((1, 1, 2))}
            if role == "decode" and rng.random() < 0.3:  # choices of one request take turns in its slots
                own["max_slots"] = rng.randint(1, max_n)
            return Server(self, name, role, EngineFacts(**{**everything, **own}))

        grow = 1 if tight else rng.choice((1, 1, 2, 4))
        counts = (2,) if tight else (1, 1, 2)
        self.prefills = [server(f"P{i}", "prefill", to_prefill * grow) for i in range(rng.choice(counts))]
        self.decodes = [server(f"D{i}", "decode", to_decode * grow) for i in range(rng.choice(counts))]
        self.servers = self.prefills + self.decodes
        self.requests: list[Request] = []
        documents = [tuple(rng.randrange(VOCAB) for _ in range(max_prompt)) for _ in range(rng.choice((1, 3)))]
        for i in range(14 if tight else rng.choice((1, 4, 8, 14))):
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
        self._arrivals = deque(self.requests)

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
        prefill = next(server for server in self.prefills if server.name == peer.name)
        if prefill.facts.incarnation != peer.incarnation:
            decode.do(decode.engine.dial_failed(peer.name, peer.incarnation, "it has restarted"))
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
        prefill.do(prefill.engine.link_up(link.prefill.number, decode.hello(str(link.decode.number))))

    def _greeted(self, link: SimLink) -> None:
        end = link.decode
        end.established = True
        hello = link.prefill.server.hello(str(end.number))
        if hello.incarnation != link.prefill.incarnation:
            end.up = False
            ref = PeerRef(link.prefill.server.name, "", link.prefill.incarnation)
            end.server.do(end.server.engine.dial_failed(ref.name, ref.incarnation, "it has restarted"))
            return
        for other in self.links:  # as Links._establish: a server starts workers only after its old ones have exited
            stale = other.prefill.server.name == hello.name and other.prefill.incarnation != hello.incarnation
            if other.decode.server is end.server and not other.decode.up and stale:
                end.server.engine.peer_gone(other.decode.number)
        end.server.do(end.server.engine.link_up(end.number, hello, self.now_s, self.now_s))

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
            ref = link.prefill
            server.do(server.engine.dial_failed(ref.server.name, ref.incarnation, reason))
        elif server.role == "prefill":
            server.do(server.engine.link_down(end.number, reason))
        else:
            gone = link.prefill.server.facts.incarnation != link.prefill.incarnation
            server.do(server.engine.link_down(end.number, gone, reason))

    def lose_workers(self, server: Server) -> None:
        """Ranks share fate: the group dies, and comes back as another incarnation."""
        for worker in server.workers:
            worker.alive = False
        for instruction in server.engine.end_all(Outcome.WORKER_LOST, "killed"):
            if isinstance(instruction, ToRouter):
                server.to_router.append(instruction.message)
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
                    decode.engine.peer_gone(link.decode.number)

    # ---- the router

    def _start(self, request: Request) -> None:
        """The next attempt: one leg for each distinct prefix."""
        request.attempt += 1
        assert request.attempt < MAX_ATTEMPTS, f"{request.request_id} is tried for ever"
        request.stalled_since_s = None
        request.legs, request.held = {}, {}
        prefill, decode = self.rng.choice(self.prefills), self.rng.choice(self.decodes)
        request.pair = (prefill, decode)
        request.pair_incarnations = (prefill.facts.incarnation, decode.facts.incarnation)
        groups: dict[tuple[int, ...], list[int]] = {}
        for choice in range(request.params.n):
            if choice not in request.finished:
                groups.setdefault(tuple(request.accepted.get(choice, ())), []).append(choice)
        for trunk, (outputs, choices) in enumerate(groups.items()):
            key = LegKey(request.request_id, request.attempt, trunk)
            request.legs[key] = tuple(choices)
            for server, peer in ((prefill, decode), (decode, prefill)):
                start = StartLeg(
                    key,
                    request.prompt + outputs,
                    len(request.prompt),
                    request.params,
                    tuple(choices),
                    peer.ref,
                    1e9,
                    tenant=request.request_id[-1] if self.many_tenants else "",
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
        elif message.key in request.legs:
            if server.role == "prefill" and message.outcome is not Outcome.DONE and request.stalled_since_s is None:
                request.stalled_since_s = self.now_s
            elif server.role == "decode" and not request.done:
                self._leg_ended(server, request, message)

    def _tokens(self, server: Server, request: Request, message: LegTokens) -> None:
        if server.role == "decode":
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
        else:
            assert self.faults.any, f"an attempt was lost though nothing went wrong: {end}"
            if (
                "quarantined" in end.reason
            ):  # only the end of those workers brings the arena back: somebody restarts them
                for prefill in self.prefills:
                    self.lose_workers(prefill)
            self._replay(request)

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
        if isinstance(message, StartLeg):
            server.do(server.engine.start_leg(0, message, self.now_s, self.now_s))
        elif server.role == "prefill":
            server.do(server.engine.abort_leg(message))
        else:
            server.do(server.engine.abort_leg(message, self.now_s))

    # ---- what can happen

    def _actions(self) -> list[tuple[float, Callable[[], None]]]:
        out: list[tuple[float, Callable[[], None]]] = []

        def maybe(what: object, queue: object, act: Callable[[], None]) -> None:
            if queue:
                out.append((self._weight(what), act))

        if self._arrivals:
            out.append((0.3, self._arrive))
        for dialled in self.dials:
            maybe("dial", True, lambda d=dialled: self._answer(d))  # type: ignore[misc]
        for server in self.servers:
            maybe((server.name, "hear"), server.to_router, lambda s=server: self._hear(s))  # type: ignore[misc]
            maybe((server.name, "tell"), server.from_router, lambda s=server: self._dispatched(s))  # type: ignore[misc]
            for worker in server.workers:
                at = (server.name, worker.rank)
                maybe((*at, "compute"), worker.plans, worker.compute)
                maybe((*at, "lane"), worker.requests, worker.serve_lane)
                maybe((*at, "result"), worker.results, lambda w=worker: self._result(w))  # type: ignore[misc]
                maybe((*at, "report"), worker.reports, lambda w=worker: self._report(w))  # type: ignore[misc]
                maybe((*at, "gather"), worker.sendable, worker.start_write)
                maybe((*at, "wire"), worker.writing, lambda w=worker: self._wire(w))  # type: ignore[misc]
                maybe((*at, "notify"), worker.notifications, lambda w=worker: self._notify(w))  # type: ignore[misc]
        for link in self.links:
            if not link.decode.established and link.decode.up:
                maybe("greeting", True, lambda x=link: self._greeted(x))  # type: ignore[misc]
                continue
            for end in (link.prefill, link.decode):
                maybe((id(end), "link"), end.queue, lambda e=end: self._deliver(e))  # type: ignore[misc]
                if end.up and not link.other(end).up:
                    out.append(
                        (
                            self._weight((id(link), "loss")) / 3,
                            lambda x=link, e=end: self._lose_end(x, e, "lost at the other end"),
                        )
                    )  # type: ignore[misc]
        return out

    def _result(self, worker: Worker) -> None:
        server = worker.server
        server.do(server.engine.step_done(worker.results.popleft(), self.now_s, self.now_s))

    def _report(self, worker: Worker) -> None:
        server, report = worker.server, worker.reports.popleft()
        if server.role == "prefill":
            server.do(server.engine.lane_report(worker.rank, report, self.now_s))
        else:
            server.do(server.engine.lane_report(worker.rank, report, self.now_s, self.now_s))

    def _wire(self, worker: Worker) -> None:
        worker.advance(self.rng.choice(worker.writing), self)

    def _notify(self, worker: Worker) -> None:
        worker.notified(self.rng.choice(worker.notifications))

    def _deliver(self, end: Ends) -> None:
        server, message = end.server, end.queue.popleft()
        if server.role == "prefill":
            server.do(server.engine.link_message(end.number, message, self.now_s))
        else:
            server.do(server.engine.link_message(end.number, message, self.now_s, self.now_s))

    def _tick(self) -> None:
        self.now_s += 0.1
        for server in self.servers:
            if server.role == "prefill":
                server.do(server.engine.tick(self.now_s))
            else:
                server.do(server.engine.tick(self.now_s, self.now_s))
        self._router_looks_around()

    def _fault(self) -> None:
        if self.spend("lost_workers", 0.001):
            self.lose_workers(self.rng.choice(self.servers))
            self._router_looks_around()
        ups = [(link, end) for link in self.links for end in (link.prefill, link.decode) if end.up and end.established]
        if ups and self.spend("lost_links", 0.003):
            self._lose_end(*self.rng.choice(ups), "a fault")
        for request in self.requests:
            due = request.abort_at is not None and request.attempt >= 0 and request.abort_at <= self.steps
            if due and not request.done:
                self._abort(request)

    def step(self) -> bool:
        """One thing happens. False if only time could pass."""
        self.steps += 1
        self._fault()
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
                assert request.attempt <= 0, f"{request.request_id} was replayed though nothing went wrong"

    def check_nothing_leaked(self) -> None:
        """At rest: what must be empty is."""
        for server in self.servers:
            engine = server.engine
            engine.check_integrity()
            where = f"{server.name} (seed {self.seed})"
            assert engine.idle, f"{where}: legs {engine.dump()['legs']}"
            assert engine.pool.kv.allocator.used_large == 0, where
            assert engine.slots.free == engine.slots.total, where
            assert not engine.pipeline.in_flight, where
            assert engine.tally.max_steps_after_abort <= 2, where
            for worker in server.workers:
                assert not worker.mirror.sequences and not worker.slots, f"{where}: the worker remembers sequences"
                assert not worker.bound and not worker.expected, f"{where}: {worker.expected}"
                assert not worker.to_send and not worker.writing and not worker.dropping, where
            if server.role == "prefill":
                assert not engine._by_seq and not engine._running, where
                assert not engine._waiting and not engine._lost_links, where
                for link in engine._links.values():
                    assert not link.writing and not link.rings, f"{where}: {link}"
            else:
                assert not engine.batch.pages() and not engine.batch.running and not engine.batch.parked, where
                for link in engine._links.values():
                    assert not link.early and not link.early_tokens, f"{where}: {link.early}"
                assert not any(ring.live for ring in engine.rings.table.links.values()), where
                assert engine.arena_bytes()[1] == 0, f"{where}: idle links hold segments: {engine.dump()['links']}"
                assert not engine.rings.table._wanted, where
            assert engine.load(ServerState.READY).waiting == 0
        for server in self.prefills:
            self.lose_workers(server)
        for server in self.decodes:
            assert server.engine.arena_bytes()[2] == 0, f"{server.name}: quarantined though every prefill is gone"

    def dump(self) -> str:
        lines = [f"time {self.now_s:.1f}, step {self.steps}"]
        lines += [str(r) for r in self.requests if not r.done]
        lines += [f"{server.name}: {server.engine.dump()}" for server in self.servers]
        return "\n".join(lines)
