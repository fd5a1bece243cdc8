"""What an engine asks its server to do. Engines decide and return these; servers own the sockets and do them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from msgspec import Struct

from disagg.messages.legs import KvEvents, PeerRef, ServerMessage, Tier
from disagg.messages.link import LinkMessage
from disagg.messages.plan import WorkerPlan
from disagg.messages.tiers import TierCommand
from disagg.messages.transfer import TransferCommand
from disagg.offload.instructions import StoreCommand
from disagg.types.bounded import forget_oldest

MAX_PEERS = 256  # of which it is counted by name what came from them


class ToRouter(Struct, frozen=True):
    """Tell a router. router: the server's number for that router's lease, which may span several streams."""

    router: int
    message: ServerMessage


class ToLink(Struct, frozen=True):
    """Tell the engine at the other end of a link."""

    link: int
    message: LinkMessage


class ToTransfer(Struct, frozen=True):
    """Tell the transfer or offload thread of one rank, or of all."""

    rank: int | None
    message: TransferCommand | TierCommand


class ToWorkers(Struct, frozen=True):
    """Publish a plan."""

    plan: WorkerPlan


class DialLink(Struct, frozen=True):
    """A leg needs a link to this server: dial it, unless that is under way."""

    peer: PeerRef


class DropLink(Struct, frozen=True):
    """The link cannot go on. The server closes it and calls `link_down`."""

    link: int
    reason: str


class ForgetLink(Struct, frozen=True):
    """Nothing of this lost link is under way any more: whether its peer's workers exit is nobody's concern."""

    link: int


class PublishKv(Struct, frozen=True):
    """Tell every router what entered and left a tier."""

    events: KvEvents
    tier: Tier = Tier.GPU


class ToStore(Struct, frozen=True):
    """Have storage asked, or have something done there."""

    command: StoreCommand


Instruction = ToStore | ToRouter | ToLink | ToTransfer | ToWorkers | DialLink | DropLink | ForgetLink | PublishKv


@dataclass(slots=True)
class FromPeer:
    """KV that came from one prefill server: transfers that were completed or broke off, and how long the former took."""

    payload_bytes: int = 0
    transfers: int = 0
    failures: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Counters:
    """What an engine counts; the server exports it. Sums since the start of this incarnation; observations are drained."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    discarded_tokens: int = 0
    recomputed_tokens: int = 0
    handed_over_tokens: int = 0  # whose KV was kept for another server to go on with
    hit_tokens: int = 0  # in the prefix cache, wherever they were before
    brought_tokens: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # of these, by tier: host, storage
    loaded_tokens: dict[str, int] = field(default_factory=dict)  # by tier, whether found by whom they were for or not
    loads_left: dict[str, int] = field(default_factory=dict)  # by why: slower, late
    query_tokens: int = 0
    payload_bytes_sent: int = 0
    payload_bytes_received: int = 0
    pieces_sent: int = 0
    pieces_landed: int = 0
    checksum_failures: int = 0
    lost_notifications: int = 0
    bad_logits: int = 0  # tokens that could not be chosen, because their logits were no numbers
    aborts: int = 0
    max_steps_after_abort: int = 0
    legs: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by outcome
    received: dict[str, FromPeer] = field(default_factory=dict)  # by prefill server, of at most MAX_PEERS
    transfer_failures: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by reason
    steps_sat_out: int = 0  # by sequences that decode, for want of a page
    preemptions: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by reason: memory, age
    evictions: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # small pages, by layer group
    prefill_delays: dict[tuple[str, bool, str, bool], int] = field(  # by estimate, allow, reason, executed
        default_factory=lambda: defaultdict(int)
    )
    stage_seconds: dict[tuple[str, int], float] = field(default_factory=dict)  # by busy or bubble, and pipeline stage
    observations: list[tuple[str, float]] = field(default_factory=list)  # (histogram, seconds)

    def from_peer(self, name: str) -> FromPeer:
        """To be added to. Of too many peers the one that came first is forgotten."""
        found = self.received.get(name)
        if found is None:
            found = self.received[name] = FromPeer()
            forget_oldest(self.received, MAX_PEERS)
        return found

    def observe(self, histogram: str, seconds: float) -> None:
        self.observations.append((histogram, seconds))
