"""One engine alone, call by call: facts, legs, and what the other end and the workers would say."""

from __future__ import annotations

import itertools
from typing import Any

from msgspec.structs import replace

from disagg.decode_server.role import decode_engine
from disagg.engine.choices import Choices
from disagg.engine.engine import Engine
from disagg.engine.facts import EngineFacts, MemoryFacts, ModelFacts, SchedulingFacts, TransferFacts
from disagg.engine.handoff.receive import Receiver
from disagg.engine.handoff.send import Sender
from disagg.engine.instructions import Instruction, PublishKv, ToLink, ToRouter, ToTransfer, ToWorkers
from disagg.engine.now import Now
from disagg.engine.prompts import Prompts
from disagg.memory.groups import spec_of
from disagg.memory.layout import PageSizing, pool_layout
from disagg.messages import link as m
from disagg.messages.layout import GroupKind, GroupPages, LayerGroup, StatePart
from disagg.messages.legs import AbortLeg, LegEnd, LegTokens, Outcome, PeerRef, ServerMessage, StartLeg, Tier
from disagg.messages.pieces import Piece
from disagg.messages.plan import SampledToken, SamplerStart, StepResult, WorkerPlan
from disagg.messages.transfer import (
    AddPeer,
    Bound,
    DropSends,
    ExpectPiece,
    Landing,
    PieceSent,
    SendPiece,
    SendsDropped,
    TransferCommand,
    TransferEvent,
    Unbound,
)
from disagg.offload.keys import Scope
from disagg.prefill_server.role import prefill_engine
from disagg.staging.pieces import group_piece_bytes
from disagg.staging.ring import RingAllocator
from disagg.types.ids import LegKey
from disagg.types.sampling import SamplingParams

PAGE_TOKENS = 4
CHECKPOINT_TOKENS = 8
FULL = LayerGroup("full", (0, 1), 2, 1, "float32")
WINDOW = LayerGroup("window", (2, 3), 2, 1, "float32", GroupKind.WINDOW, window=6)  # five tokens and the new one
STATE = LayerGroup.of_states("state", (4,), (StatePart("ssm", (8,), "float32"),))

P_REF, D_REF = PeerRef("P", "p:1", "p1"), PeerRef("D", "d:1", "d1")
RANK = m.RankInfo(0, 1, 1, b"agent", 4096, 0, 8192)
LINK = 7
PARAMS = SamplingParams(max_tokens=5)


PARTS: dict[str, Any] = {
    "model": ModelFacts,
    "memory": MemoryFacts,
    "scheduling": SchedulingFacts,
    "transfer": TransferFacts,
}


def changed(facts: EngineFacts, **changes: Any) -> EngineFacts:
    """With other values of these fields, wherever they stand."""
    for name, part in PARTS.items():
        own = {field: changes.pop(field) for field in part.__struct_fields__ if field in changes}
        facts = replace(facts, **{name: replace(getattr(facts, name), **own)})
    return replace(facts, **changes)


def facts(*groups: LayerGroup, num_large: int = 12, **changes: Any) -> EngineFacts:
    """Of an engine for a model of these groups; pages of four tokens, chunks of eight, a checkpoint after each eight."""
    groups = groups or (FULL,)
    specs = [spec_of(group, PAGE_TOKENS) for group in groups]
    layout = pool_layout(specs, PAGE_TOKENS, CHECKPOINT_TOKENS, PageSizing.MAX)
    usual = EngineFacts(
        incarnation="own",
        tp=1,
        model=ModelFacts(groups=groups, vocab_size=100_000, eos_token_ids=(0,), max_model_len=64),
        memory=MemoryFacts(
            layout=layout,
            num_large=num_large,
            prefix_cache=True,
            scope=Scope("w", "float32", PAGE_TOKENS, groups),
        ),
        scheduling=SchedulingFacts(
            max_slots=4,
            max_running=100,
            chunk_tokens=8,
            target_step_s=0.0,
            policy="",
            max_waiting=8,
            local_prefill_tokens=8,
            ungranted_share=0.5,
            spare_tokens=64,
            lookahead_tokens=0,
            preempt_after_s=2.0,
            preemption="latest",
            prefill_delay_passes=0,
            prefill_delay_low_usage=0.0,
        ),
        transfer=TransferFacts(
            gather_bytes=4096,
            arena_bytes=4 * 4096,
            segment_bytes=4096,
            link_segments=1,
            link_idle_s=1.0,
            progress_s=30.0,
        ),
    )
    return changed(usual, **changes)


def hello(ref: PeerRef) -> m.LinkHello:
    return m.LinkHello(ref.name, "generation", ref.incarnation, "same", 1, "host", (RANK,))


def start(
    name: str = "r",
    tokens: int = 6,
    choices: int = 1,
    params: SamplingParams = PARAMS,
    peer: PeerRef = D_REF,
    first_token: int = 1,
    salt: str = "",
) -> StartLeg:
    """A leg of a prompt of rising token ids."""
    ids = tuple(range(first_token, first_token + tokens))
    return StartLeg(LegKey(name, 0, 0), ids, tokens, params, tuple(range(choices)), peer, 600.0, salt)


def pages_of(*tables: tuple[int, tuple[int, ...]]) -> tuple[GroupPages, ...]:
    return tuple(GroupPages(first, pages) for first, pages in tables)


def result(plan_no: int, *sampled: SampledToken) -> StepResult:
    # Shorter than any plan is held; tests/engine/test_late_plans has others.
    return StepResult(0, plan_no, sampled, 0.0001, 1.0, 2.0)


def to_router(out: list[Instruction]) -> list[ServerMessage]:
    return [i.message for i in out if isinstance(i, ToRouter)]


def to_link(out: list[Instruction]) -> list[m.LinkMessage]:
    return [i.message for i in out if isinstance(i, ToLink)]


def to_transfer(out: list[Instruction]) -> list[TransferCommand]:
    return [i.message for i in out if isinstance(i, ToTransfer)]


def plans(out: list[Instruction]) -> list[WorkerPlan]:
    return [i.plan for i in out if isinstance(i, ToWorkers)]


def outcomes(out: list[Instruction]) -> list[Outcome]:
    return [message.outcome for message in to_router(out) if isinstance(message, LegEnd)]


def said(out: list[Instruction]) -> list[tuple[str, int, int, int]]:
    """Tokens that a router was told: (request, choice, output index, token)."""
    return [
        (message.key.request_id, message.choice, index, token)
        for message in to_router(out)
        if isinstance(message, LegTokens)
        for index, token in enumerate(message.token_ids, start=message.first_index)
    ]


class Lone:
    """What both kinds have. known: what the cache events came to; unreported: plans that are in flight, oldest first."""

    engine: Engine
    dials: bool

    def __init__(self) -> None:
        self.now_s = 0.0
        self.known: set[tuple[int, bytes]] = set()
        self.unreported: list[WorkerPlan] = []
        self._samplers: dict[int, tuple[SamplerStart, ...]] = {}  # by sequence
        self._next_token = 100

    @property
    def now(self) -> Now:
        return Now(self.now_s)

    @property
    def used(self) -> int:
        """Large pages that somebody holds."""
        return self.engine.core.pool.kv.allocator.used_large

    @property
    def hits(self) -> int:
        """Tokens that the prefix cache has spared."""
        return self.engine.core.pool.kv.hit_tokens

    def cached(self, g: int = 0) -> int:
        """Pages of a group that the cache knows."""
        return sum(group == g for group, _ in self.known)

    def do(self, out: list[Instruction]) -> list[Instruction]:
        """Schedules after each call, as the server does, and listens to what is published."""
        out = [*out, *self.engine.schedule(self.now)]
        for instruction in out:
            if isinstance(instruction, PublishKv) and instruction.tier is Tier.GPU:
                self.known.update(instruction.events.stored)
                self.known.difference_update(instruction.events.removed)
        for plan in plans(out):
            self._samplers.update((begun.seq_id, begun.samplers) for begun in plan.starts)
            self.unreported.append(plan)
        self.engine.check_integrity()
        assert self.known == set(self.engine.kv_snapshot().stored), "cache events do not add up to the cache"
        return out

    def start(self, leg: StartLeg) -> list[Instruction]:
        return self.do(self.engine.start_leg(1, leg, self.now))

    def link_up(self, hello: m.LinkHello, number: int = LINK) -> list[Instruction]:
        """Nothing is scheduled yet."""
        return self.engine.link_up(number, hello, self.now, dialled=self.dials)

    def link(self, message: m.LinkMessage, number: int = LINK) -> list[Instruction]:
        return self.do(self.engine.link_message(number, message, self.now))

    def lose_link(self, reason: str, number: int = LINK, gone: bool = False) -> list[Instruction]:
        return self.do(self.engine.link_down(number, gone, reason))

    def event(self, report: TransferEvent) -> list[Instruction]:
        return self.do(self.engine.transfer_event(0, report, self.now))

    def abort(self, leg: StartLeg, choice: int | None = None) -> list[Instruction]:
        return self.do(self.engine.abort_leg(AbortLeg(leg.key, choice)))

    def step(self, plan_no: int, *sampled: SampledToken) -> list[Instruction]:
        """The oldest plan has been computed, and gave this."""
        assert self.unreported.pop(0).plan_no == plan_no
        return self.do(self.engine.step_done(result(plan_no, *sampled), self.now))

    def compute(self) -> list[Instruction]:
        """The oldest plan has been computed; it samples other tokens each time, 100, 101 and so on."""
        plan = self.unreported[0]
        sampled = []
        for run in plan.runs:
            for sampler in self._samplers[run.seq_id] if run.sample else ():
                sampled.append(SampledToken(run.seq_id, sampler.choice, self._next_token))
                self._next_token += 1
        return self.step(plan.plan_no, *sampled)

    def compute_all(self) -> list[Instruction]:
        """Until there is nothing more to compute."""
        out: list[Instruction] = []
        for _ in range(500):
            if not self.unreported:
                return out
            out += self.compute()
        raise AssertionError("there is no end of plans")


class Prefill(Lone):
    """A prefill engine."""

    dials = False

    def __init__(self, facts: EngineFacts, linked: bool = True) -> None:
        super().__init__()
        self.engine = prefill_engine(facts)
        prompts, sender = self.engine.stages
        assert isinstance(prompts, Prompts) and isinstance(sender, Sender)
        self.prompts, self.sender = prompts, sender
        self._entry_ids = itertools.count(16)
        self._ring = RingAllocator(4096, 4096)
        if linked:
            assert to_transfer(self.link_up(hello(D_REF))) == [AddPeer(LINK, 0, b"agent", 4096, 0, 8192)]

    def open_ring(self) -> None:
        """Unless it is open."""
        if not self.sender.links[LINK].rings:
            assert self.link(m.OpenRing(0, 0, 4096, (4096,))) == []

    def granted(self, leg: StartLeg) -> m.OfferPieces:
        """Up to the offer."""
        self.open_ring()
        self.start(leg)
        (offer,) = to_link(self.link(m.Grant(leg.key, (0,))))
        assert isinstance(offer, m.OfferPieces)
        return offer

    def sending(self, leg: StartLeg) -> SendPiece:
        """Up to the first write."""
        self.granted(leg)
        entry = m.Entry(3, 0, 0, 0, 0, 2, 0, 200)
        (send,) = to_transfer(self.link(m.AssignEntries(leg.key, 0, (entry,))))
        assert isinstance(send, SendPiece)
        return send

    def send(self, leg: StartLeg, offer: m.OfferPieces) -> list[SendPiece]:
        """Each of these pieces gets an entry, and room in the ring for its write."""
        entries = []
        for piece_no, piece in enumerate(offer.pieces, start=offer.first_piece_no):
            group = self.engine.core.facts.model.groups[piece.group]
            nbytes = group_piece_bytes(piece, group.kv_heads, group)
            entry_id = next(self._entry_ids)
            entries.append(
                m.Entry(entry_id, piece_no, 0, 0, 0, group.kv_heads, self._ring.assign(nbytes).ring_byte, nbytes)
            )
        sends = to_transfer(self.link(m.AssignEntries(leg.key, 0, tuple(entries))))
        assert len(sends) == len(entries)
        return [send for send in sends if isinstance(send, SendPiece)]

    def end(self, leg: StartLeg) -> None:
        """A leg whose first tokens are known ends, whatever has been sent of it."""
        out = self.link(m.Complete(leg.key))
        assert outcomes(out) == [Outcome.DONE]
        if DropSends(LINK, leg.key) in to_transfer(out):
            self.event(SendsDropped(LINK, leg.key))

    def through(self, leg: StartLeg) -> None:
        """A leg from its start to its end: what stays is what the cache keeps."""
        self.start(leg)
        self.compute_all()
        self.end(leg)


def sent(send: SendPiece) -> PieceSent:
    return PieceSent(LINK, send.entry_id, send.slice.key, 192, 0.0, 0.0)


class Decode(Lone):
    """A decode engine."""

    dials = True

    def __init__(self, facts: EngineFacts, linked: bool = True) -> None:
        super().__init__()
        self.engine = decode_engine(facts)
        _, choices, receiver, *_ = self.engine.stages
        assert isinstance(choices, Choices) and isinstance(receiver, Receiver)
        self.choices, self.receiver, self.batch = choices, receiver, self.engine.core.batch
        self._next_piece: dict[LegKey, int] = {}
        if linked:
            added = to_transfer(self.link_up(hello(P_REF)))
            assert added == [AddPeer(LINK, 0, b"agent", 0, 0, 0)], "nothing is written into prefill"

    def tick(self, now_s: float) -> list[Instruction]:
        self.now_s = now_s
        return self.do(self.engine.tick(self.now))

    def announced(self, leg: StartLeg) -> list[Instruction]:
        """Up to the binding, if there are pages for it."""
        return [*self.start(leg), *self.link(m.Announce(leg.key, len(leg.token_ids)))]

    def granted(self, leg: StartLeg) -> m.Grant:
        """Up to the grant."""
        self.announced(leg)
        return self.bound(leg)

    def bound(self, leg: StartLeg) -> m.Grant:
        (grant,) = to_link(self.event(Bound(leg.key)))
        assert isinstance(grant, m.Grant)
        return grant

    def wanted(self, leg: StartLeg, grant: m.Grant) -> list[Piece]:
        """All that a grant wants, a piece for each group."""
        pieces = []
        for g, (group, want) in enumerate(zip(self.engine.core.facts.model.groups, grant.wants, strict=True)):
            stop = 1 if group.is_state else len(leg.token_ids)
            if want < stop:
                pieces.append(Piece(g, 0, len(group.layers), want, stop))
        return pieces

    def offer(self, leg: StartLeg, *pieces: Piece) -> list[ExpectPiece]:
        """Up to the entries of these pieces."""
        first = self._next_piece.get(leg.key, 0)
        self._next_piece[leg.key] = first + len(pieces)
        expects = to_transfer(self.link(m.OfferPieces(leg.key, first, pieces)))
        assert len(expects) == len(pieces)
        return [expect for expect in expects if isinstance(expect, ExpectPiece)]

    def receiving(self, leg: StartLeg) -> ExpectPiece:
        """Up to the entry of the one piece."""
        (expect,) = self.offer(leg, *self.wanted(leg, self.granted(leg)))
        return expect

    def land(self, expect: ExpectPiece, ok: bool = True) -> list[Instruction]:
        reason = "" if ok else "checksum"
        return self.event(Landing(LINK, expect.entry_id, expect.slice.key, ok, reason, 192, 0.0, 0.0))

    def missed(self, expect: ExpectPiece) -> list[Instruction]:
        """A rank has waited for this in vain, and forgets it."""
        return self.event(Landing(LINK, expect.entry_id, expect.slice.key, False, "lost", 0, 0.0, 0.0))

    def first_tokens(self, leg: StartLeg, token: int = 9) -> list[Instruction]:
        first = tuple(m.FirstToken(choice, token, None, None) for choice in leg.choices)
        return self.link(m.FirstTokens(leg.key, first))

    def arrived(self, leg: StartLeg, grant: m.Grant) -> list[Instruction]:
        """From the grant to the first plan of its own: everything wanted lands."""
        expects = self.offer(leg, *self.wanted(leg, grant))
        out = self.first_tokens(leg)
        for expect in expects:
            out += self.land(expect)
        return out

    def running(self, leg: StartLeg) -> list[Instruction]:
        """Up to the first plan of its own."""
        return self.arrived(leg, self.granted(leg))

    def joined(self, leg: StartLeg) -> list[Instruction]:
        """As `running`, and no rank has its pages bound any more."""
        return [*self.running(leg), *self.event(Unbound(leg.key))]

    def through(self, leg: StartLeg) -> list[Instruction]:
        """A leg from its start to its end: what stays is what the cache keeps."""
        out = self.joined(leg) + self.compute_all()
        assert outcomes(out) == [Outcome.DONE]
        self.link(m.Drained(leg.key))
        return out
