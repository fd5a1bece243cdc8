"""What a router and a server say to each other about legs. `wire/` turns these into protobuf and back.

Both directions are numbered and acknowledged by a `ReliableChannel`, so each message is applied exactly once and in
order, also across a reconnect; only a new incarnation of the server's workers, or the end of the lease, loses state.
"""

from __future__ import annotations

import enum

from msgspec import Struct

from disagg.messages.plan import TokenLogprobs
from disagg.types.ids import FinishReason, LegKey, Role
from disagg.types.protocol import BEFORE_NUMBERS, Version
from disagg.types.sampling import SamplingParams


class PeerRef(Struct, frozen=True):
    """The other server of a pair. address: where its Peer.Link is dialled, host:port."""

    name: str
    address: str
    incarnation: str


class ServerState(enum.StrEnum):
    """The last three are a router's verdicts; a server never says them of itself."""

    LOADING = "loading"
    READY = "ready"
    NO_PEER = "no-peer"
    DRAINING = "draining"
    DRAINED = "drained"  # it drains, and nothing is left of what it had
    DEAD = "dead"
    MISMATCH = "mismatch"  # its model's files are not the router's, or its version cannot speak with the router's


# ---- router -> server


class StartLeg(Struct, frozen=True):
    """Run one phase of one leg. The server's role says which phase."""

    key: LegKey
    token_ids: tuple[int, ...]  # the prompt's, then outputs accepted in earlier attempts
    num_prompt: int  # how many of them are the prompt's: the next token has output index len(token_ids) - num_prompt
    params: SamplingParams
    choices: tuple[int, ...]
    peer: PeerRef  # the server of the other phase
    deadline_s: float  # seconds left
    cache_salt: str = ""  # one prefix cache per salt
    incarnation: str = ""  # of the recipient's workers, as the router knows them; others give the leg back
    tenant: str = ""  # whose request it is; tenants that wait take turns. Empty: a router that does not say
    priority: int = 0  # lower is more urgent, among the tenant's own
    # Not 0 where the recipient has handed this attempt of the request over (`HandOver`): it sends the peer what it keeps of these
    # choices, which have one token beyond token_ids.
    moves_attempt: int = 0
    moved: bool = False  # the peer has handed it over, and sends what it keeps
    traceparent: str = ""  # W3C trace context that the leg's spans belong to; empty: it is not traced
    # The recipient is a decode server, and computes what it has not cached of token_ids itself, or gives the leg back if that is
    # more than it computes (`ServerHello.local_prefill_tokens`). The peer is itself.
    local_prefill: bool = False


class AbortLeg(Struct, frozen=True):
    """Stop computing for this leg and free what it holds. Idempotent; unknown keys are ignored."""

    key: LegKey
    choice: int | None = None  # None: all of it; else only this choice (a stop string ended it)


class PodGone(Struct, frozen=True):
    """The pod, NAMESPACE/NAME/UID, is known to have ended, with all of its processes."""

    pod: str


class Drain(Struct, frozen=True):
    """Take nothing new, or do so again. Not every server knows it (`messages/needs`)."""

    on: bool


class HandOver(Struct, frozen=True):
    """Stop what goes on of this leg once all of its choices run, and keep their KV for a leg that moves it (`moves_attempt`).

    LegEnd follows, after every token. Unknown keys are ignored. Not every server knows it (`messages/needs`).
    """

    key: LegKey


class SetRole(Struct, frozen=True):
    """Become empty, as for `Drain`, and then a server of this role, under the same name. What comes of it says the hello that
    follows (`RoleChange`). Only to servers whose hello has one.
    """

    role: Role


# ---- server -> router


class LegTokens(Struct, frozen=True):
    """New tokens of one choice. first_index: output index of the first of them.

    logprobs: one per token, or empty when none were asked. finish: set on the choice's last message.
    """

    key: LegKey
    choice: int
    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None


class Outcome(enum.StrEnum):
    """How a leg ended on one server."""

    DONE = "done"
    ABORTED = "aborted"  # at the router's request
    REFUSED = "refused"  # it can never run here (too long for the pool, ...): the client's fault
    PEER_LOST = "peer_lost"  # the other server, or the link to it, was lost: try again
    WORKER_LOST = (
        "worker_lost"  # this server's workers died, or computed what is no number: try again; counts towards poison
    )
    BAD_TRANSFER = "bad_transfer"  # KV arrived that did not match its checksum, or never arrived: try again
    DRAINED = "drained"  # the server is shutting down: try again elsewhere
    GIVEN_BACK = "given_back"  # not started, given back by the prefill server: try again, free of charge
    HANDED_OVER = "handed_over"  # stopped as the router asked, and kept for another leg to move


class TimelineEvent(Struct, frozen=True):
    """Something that took from start to end, seconds since the epoch. name: "queued", "chunk", "piece", "decode", ..."""

    name: str
    start_unix_s: float
    end_unix_s: float
    detail: str = ""


class LegEnd(Struct, frozen=True):
    """The last message of a leg. cached_tokens: from all tiers; of these, host_tokens and storage_tokens came from there."""

    key: LegKey
    outcome: Outcome
    reason: str
    timeline: tuple[TimelineEvent, ...] = ()
    cached_tokens: int = 0
    host_tokens: int = 0
    storage_tokens: int = 0


class Tier(enum.StrEnum):
    """Where a server has KV."""

    GPU = "gpu"  # in its prefix cache; of a server without a GPU, too
    HOST = "host"
    STORAGE = "storage"  # as far as it knows; others that store at the same place have it, too


class KvEvents(Struct, frozen=True):
    """What entered and left one tier of a server, in order of happening within each list: (layer group, page hash).

    A hash names a page of tokens and all before it (see memory/hashing). No page is in both lists.
    """

    stored: tuple[tuple[int, bytes], ...] = ()
    removed: tuple[tuple[int, bytes], ...] = ()


class GroupMemory(Struct, frozen=True):
    """One layer group's part of a pool. Pages are small pages of the large pages that the group has taken."""

    name: str
    kind: str
    page_bytes: int
    empty_pages: int
    evictable_pages: int
    used_pages: int


class StorageState(enum.StrEnum):
    """Of storage for KV, as one server sees it."""

    OFF = "off"  # there is none
    OK = "ok"
    DEGRADED = "degraded"  # it fails, and is left alone for now


class HostMemory(Struct, frozen=True):
    """A rank's host pool, in large pages. pages_used: that hold KV, needed now or not. bytes: of all pages together."""

    pages_used: int
    pages_total: int
    bytes: int


class MemoryReport(Struct, frozen=True):
    """A rank's pool at one moment. Large pages: free + evictable + used is all of them. sizing: "lcm" or "max".

    fragmentation_bytes: of taken large pages, where no content can be: empty small pages, and padding between them.
    host: None without offload.
    """

    sizing: str
    large_bytes: int
    large_free: int
    large_evictable: int
    large_used: int
    fragmentation_bytes: int
    groups: tuple[GroupMemory, ...]
    host: HostMemory | None = None


class ArenaReport(Struct, frozen=True):
    """The staging arena of one rank, in bytes. quarantined: a lost peer may still write there."""

    free: int
    leased: int
    quarantined: int


class ReceivedFrom(Struct, frozen=True):
    """KV that came from one prefill server since the receiver's workers started. bytes: of all ranks.

    transfers: that were completed; they took `seconds` from the grant on, together. failures: that broke off.
    """

    peer: str
    bytes: int
    transfers: int
    failures: int
    seconds: float


class CarriedBy(Struct, frozen=True):
    """By what KV goes to one peer: ways as UCX writes them, such as "zero-copy tcp/eth0"; of several, by one of them, or by each
    for some ranks. slow: over TCP alone, though the server computes on GPUs.
    """

    peer: str
    ways: tuple[str, ...]
    slow: bool = False


class StepCosts(Struct, frozen=True):
    """What a server's steps cost lately, learned from `steps` of them, in seconds: fixed + token * tokens + attended * the tokens
    that they attend to. The rest bounds its steps: tokens of a chunk, tokens that its pool holds, sequences at once.
    """

    fixed_s: float
    token_s: float
    attended_s: float
    steps: int
    chunk_tokens: int
    kv_tokens: int
    max_running: int


class LoadCosts(Struct, frozen=True):
    """What it takes a server to bring KV back, in seconds for each token, as measured lately; 0: not yet. From storage it comes
    to the host, and from there it goes on.
    """

    host_token_s: float = 0.0
    storage_token_s: float = 0.0


class LoadReport(Struct, frozen=True):
    """A server's state and load, sent every heartbeat and at each change of state. Pages are large pages (memory/layout)."""

    state: ServerState
    running: int
    waiting: int
    pages_used: int
    pages_free: int
    pages_evictable: int
    pages_total: int
    memory: MemoryReport | None = None  # None while there is no pool
    store: StorageState = StorageState.OFF
    lost_pods: tuple[str, ...] = ()  # of lost peers that may still write here, as LinkHello.pod
    arena: ArenaReport | None = None  # None of a server without an engine, or one that does not say it
    received: tuple[ReceivedFrom, ...] = ()  # of a decode server, by prefill server
    loop_gap_s: float = 0.0  # the longest time for which its event loop stood still, in the last one to two minutes
    carried: tuple[CarriedBy, ...] = ()  # by what KV goes to which peer, of a server that sends
    steps: StepCosts | None = None  # None before enough of them
    loads: LoadCosts | None = None  # None without offload
    # For which there are pages that what has begun will not come to need as far as is looked ahead; None: not said.
    spare_tokens: int | None = None


class PrefixGroup(Struct, frozen=True):
    """One layer group, for whoever looks prefixes up. kind: of messages/layout.GroupKind, or one that only newer servers know.

    window_tokens: how many tokens before a new one a window attends to.
    """

    kind: str
    window_tokens: int = 0


class PrefixRules(Struct, frozen=True):
    """How a server names the pages of its prefix cache, and what of them a prompt needs.

    root_parts: what its hash chains begin with, before the cache salt (memory/hashing.chain_root). groups: by number.
    """

    root_parts: tuple[str, ...]
    page_tokens: int
    checkpoint_tokens: int
    groups: tuple[PrefixGroup, ...]


class RoleChange(Struct, frozen=True):
    """How a server came to its role. started: the one of its process, which is what discovery finds. becomes: what it is going
    to be, None if that is what it is. failed: why the last change has not come about, if it has not. asked: how many `SetRole`
    it has heard.
    """

    started: Role
    becomes: Role | None = None
    failed: str = ""
    asked: int = 0


class ServerHello(Struct, frozen=True):
    """Who a server is; sent first on every stream, and again when a new incarnation of its workers is up."""

    name: str
    role: Role
    tp: int
    pid: int
    worker_pids: tuple[int, ...]
    incarnation: str
    fingerprint: str  # digest of the KV layout and the weights; only equals are paired
    model: str  # the served model's name
    max_model_len: int
    max_tokens_in_pool: int
    link_address: str
    load: LoadReport
    weights_hash: str = ""  # of what the workers loaded; empty while they load, and of a server that does not say it
    files: dict[str, str] = {}  # digests of the small files beside the weights, by name; empty when weights_hash is
    note: str = ""  # what the operator should know, if anything
    # None while it loads, and of a server that has no prefix cache or does not say it.
    prefix: PrefixRules | None = None
    dp: int = 1  # data-parallel ranks
    pp: int = 1  # pipeline stages, of tp worker ranks each
    drains: bool = False  # it knows `Drain`; for routers of protocol 0: ask `messages/needs`
    # It knows `HandOver`, and can send what it kept; for routers of protocol 0: ask `messages/needs`.
    hands_over: bool = False
    version: Version = BEFORE_NUMBERS  # what the server's process speaks
    role_change: RoleChange | None = None  # None of a server that does not know `SetRole`
    storage: str = ""  # digest of where it stores KV; who says the same finds what it has stored. Empty: nowhere
    # Of a decode server: so many tokens of a prompt it computes itself, if it has the others cached. 0: none, as of one that does
    # not know how.
    local_prefill_tokens: int = 0


RouterMessage = StartLeg | AbortLeg | PodGone | Drain | HandOver | SetRole
ServerMessage = LegTokens | LegEnd
