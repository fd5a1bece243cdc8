"""A frozen picture of the cluster, as one router sees it. Policies decide on it; nothing here changes or waits.

A server's state is the router's judgement over what the server said and whether it can be heard:

    never heard                                loading
    lost (lease over, refused, ...)            dead
    it said loading or draining                that; drained, when it has nothing left, of this router or of others
    its model's files are not the router's     mismatch
    its version and the router's cannot speak  mismatch
    it said ready, and is mixed, or a ready server of the other role has the same fingerprint and model    ready
    it said ready, and there is none    no-peer
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Collection, Container, Mapping
from types import MappingProxyType

from msgspec import Struct, field

from disagg.messages.legs import HandOver, KvEvents, LoadReport, PeerRef, ServerHello, ServerState
from disagg.messages.needs import understands
from disagg.router.speeds import GUESS, Speed
from disagg.types.ids import Role
from disagg.types.protocol import spoken

# Whether there is a peer is for the router to say: the server knows only those that it has met.
_READY = frozenset({ServerState.READY, ServerState.NO_PEER})
_NO_PAGES: frozenset[bytes] = frozenset()


class Work(enum.Enum):
    """What a server does for a request: a stage of its way."""

    PREFILL = "prefill"
    DECODE = "decode"


class Circuit(enum.StrEnum):
    """What a router thinks of a server's way with one kind of work (`circuits`)."""

    CLOSED = "closed"
    OPEN = "open"  # it fails: nothing is sent there while there is another
    HALF_OPEN = "half-open"  # the next attempt that comes there says whether it works again


NO_CIRCUITS: Mapping[Work, Circuit] = MappingProxyType({})

MAX_CACHED_PAGES = 1 << 19  # of one server; they take 200 bytes each


class CachedPages:
    """What one incarnation of a server has in a tier, as far as it has said so: pages by layer group and hash.

    A hint: it lags behind by about a tenth of a second, and more when much changes; of more than `most` pages it knows those that
    it heard of last.
    """

    def __init__(self, most: int = MAX_CACHED_PAGES) -> None:
        self._most = most
        self._groups: dict[int, OrderedDict[bytes, None]] = {}  # oldest first

    def apply(self, events: KvEvents, *, reset: bool = False) -> None:
        """reset: what was known before is void."""
        if reset:
            self._groups.clear()
        for group, key in events.removed:
            if group in self._groups:
                self._groups[group].pop(key, None)
        for group, key in events.stored:
            pages = self._groups.setdefault(group, OrderedDict())
            pages[key] = None
            pages.move_to_end(key)
        excess = sum(map(len, self._groups.values())) - self._most
        for _ in range(excess):
            max(self._groups.values(), key=len).popitem(last=False)

    def clear(self) -> None:
        self._groups.clear()

    def holds(self, group: int, key: bytes) -> bool:
        return key in self._groups.get(group, ())

    @property
    def groups(self) -> tuple[Collection[bytes], ...]:
        """Pages by layer group, up to the last group that has any."""
        return tuple(self._groups.get(group, _NO_PAGES) for group in range(max(self._groups, default=-1) + 1))

    def counts(self) -> tuple[int, ...]:
        """Pages per layer group, up to the last group that has any."""
        return tuple(map(len, self.groups))


def others_prompts(role: Role, load: LoadReport, ours: int) -> int:
    """Prompts, in choices, that a server has by its load and not from this router, which has sent it `ours`.

    Of a mixed server, whose load counts what it decodes too, only those that wait.
    """
    if role is Role.DECODE:
        return 0
    return max(0, load.waiting + (load.running if role is Role.PREFILL else 0) - ours)


class ServerView(Struct, frozen=True, kw_only=True):
    """One server that was found."""

    name: str
    role: Role
    address: str
    hello: ServerHello | None = None  # its latest; None when it was never heard
    load: LoadReport | None = None  # likewise
    connected: bool = False  # its stream is up
    lost: bool = False  # given up by the router
    fresh: bool = True  # heard within the last few heartbeats
    # What this router sent it and does not know to be done: tokens that it has to compute, and choices that it decodes.
    outstanding_prompt_tokens: int = 0
    outstanding_choices: int = 0
    outstanding_prompts: int = 0  # choices of the prompts that it has to compute
    others_prompts: int = 0  # that others had it compute when its load came: see `others_prompts`
    coming: Container[bytes] = _NO_PAGES  # names of the pages of the prompts that it has to compute
    speed: Speed = GUESS  # at which it computes prompts
    usual_speed: Speed = GUESS  # at which all servers do
    # The parts that are not frozen, by tier (`known_kv`): they are too large to be copied for each decision.
    cached: CachedPages = field(default_factory=CachedPages)
    on_host: CachedPages = field(default_factory=CachedPages)
    stored: CachedPages = field(default_factory=CachedPages)
    error: str = ""
    refused: str = ""  # why its version and this router's cannot speak with each other, if so
    differing: tuple[str, ...] = ()  # of its model's files, those that this router does not make tokens and text with
    changed: str = ""  # how its model differs from the one that it had before, if it does
    silent_s: float = 0.0  # for how long it was not heard; 0 while it is fresh
    held: str = ""
    circuits: Mapping[Work, Circuit] = NO_CIRCUITS  # those that are not closed

    @property
    def said_ready(self) -> bool:
        """It is ready, and its model is the one that this router's text is of."""
        return self._ready and not self.differing

    @property
    def mismatched(self) -> bool:
        """It would be ready but for its version or its model's files."""
        return bool(self.refused) or (self._ready and bool(self.differing))

    @property
    def _ready(self) -> bool:
        if self.lost or self.refused:
            return False
        return self.hello is not None and self.load is not None and self.load.state in _READY

    @property
    def drains(self) -> bool:
        """It takes nothing new, and says what becomes of what it has."""
        return self.connected and not self.lost and self.load is not None and self.load.state is ServerState.DRAINING

    @property
    def hands_over(self) -> bool:
        """It drains, and what it decodes can go on elsewhere."""
        return self.drains and self.can_hand_over

    @property
    def can_hand_over(self) -> bool:
        """What stands still there to go on elsewhere can be had, whether it still drains or not."""
        hello = self.hello if self.connected and not self.lost else None
        return hello is not None and bool(hello.incarnation) and understands(hello, HandOver)

    @property
    def _empty(self) -> bool:
        ours = self.outstanding_choices or self.outstanding_prompts
        return self.load is not None and not (ours or self.load.running or self.load.waiting)

    @property
    def weights(self) -> str:
        """What tokens of one answer must have in common; of a server that does not say it, all that it has in common."""
        assert self.hello is not None
        return self.hello.weights_hash or self.hello.fingerprint

    @property
    def reason(self) -> str:
        """What the operator should know, if anything."""
        if self.refused:
            return self.refused
        if self.differing:
            return (
                f"its {', '.join(self.differing)} is not what this router has loaded, so nothing is sent to it; restart "
                "whichever of the two has the old files"
            )
        said = (self.hello.note or self._role_news) if self.hello is not None else ""
        return self.held or said or self.changed

    @property
    def becomes(self) -> str:
        """The role that it is going to have, if that is not the one it has."""
        change = self.hello.role_change if self.hello is not None else None
        return change.becomes.value if change is not None and change.becomes is not None else ""

    @property
    def _role_news(self) -> str:
        assert self.hello is not None
        change = self.hello.role_change
        if change is None:
            return ""
        if self.becomes:
            return f"it becomes a {self.becomes} server"
        return change.failed or self.started_as

    @property
    def started_as(self) -> str:
        """That it was given another role, for information; empty if it was not."""
        change = self.hello.role_change if self.hello is not None else None
        if change is None or change.started is self.role:
            return ""
        return f"it was started as a {change.started.value} server"

    @property
    def usable(self) -> bool:
        """Work can be sent to it now."""
        return self.said_ready and self.connected and not self.held

    def fails(self, *works: Work) -> bool:
        """What it is sent of one of these kinds fails."""
        return any(self.circuits.get(work) is Circuit.OPEN for work in works)

    def fits(self, other: ServerView) -> bool:
        """One of the two is for prefill, the other for decode, and they have one layout and model."""
        return {self.role, other.role} == {Role.PREFILL, Role.DECODE} and self.alike(other)

    def alike(self, other: ServerView) -> bool:
        """Both have one layout and model, and speak one protocol."""
        if self.hello is None or other.hello is None or spoken(self.hello.version, other.hello.version) is None:
            return False
        return (self.hello.fingerprint, self.hello.model) == (other.hello.fingerprint, other.hello.model)

    @property
    def peer_ref(self) -> PeerRef:
        assert self.hello is not None
        return PeerRef(name=self.name, address=self.hello.link_address, incarnation=self.hello.incarnation)


class ClusterView(Struct, frozen=True):
    """All servers that were found, in the order in which they were."""

    servers: tuple[ServerView, ...]

    def state(self, server: ServerView) -> ServerState:
        if server.refused:
            return ServerState.MISMATCH
        if server.lost:
            return ServerState.DEAD
        if server.hello is None or server.load is None:
            return ServerState.LOADING
        if server.load.state not in _READY:
            drained = server.drains and server._empty
            return ServerState.DRAINED if drained else server.load.state
        if server.differing:
            return ServerState.MISMATCH
        if server.held:
            return ServerState.DRAINING
        if server.role is Role.MIXED or any(other.said_ready and server.fits(other) for other in self.servers):
            return ServerState.READY
        return ServerState.NO_PEER

    def of_role(self, role: Role) -> tuple[ServerView, ...]:
        return tuple(server for server in self.servers if server.role is role)

    @property
    def has_pair(self) -> bool:
        """At least one prefill and one decode server are ready and fit together, or a mixed one is ready."""
        if any(server.usable for server in self.of_role(Role.MIXED)):
            return True
        decodes = [server for server in self.of_role(Role.DECODE) if server.usable]
        return any(p.usable and any(p.fits(d) for d in decodes) for p in self.of_role(Role.PREFILL))


class Pair(Struct, frozen=True):
    """Where one attempt runs. max_total_tokens: the longest prompt plus output that the decode server can hold. weights:
    of both servers, as ServerView.weights. hit_tokens: of the prompt, what prefill is expected to have cached. pages: their
    names, of all that prefill will then have, as far as they are known. moves: nothing is computed at `prefill`, a decode server
    that has handed the request over and sends what it keeps. local_prefill: both are one decode server, which has most of the
    prompt cached."""

    prefill: PeerRef
    decode: PeerRef
    max_total_tokens: int
    weights: str = ""
    hit_tokens: int = 0
    pages: tuple[bytes, ...] = ()
    moves: bool = False
    local_prefill: bool = False

    @property
    def whole(self) -> bool:
        """One server does both: a mixed one, or a decode server that computes the rest of the prompt itself."""
        return self.prefill == self.decode

    @property
    def servers(self) -> tuple[str, ...]:
        """Their names, each once."""
        return (self.prefill.name,) if self.whole else (self.prefill.name, self.decode.name)


class NoPairReason(enum.Enum):
    """Why there is no pair; the value is fit to be shown."""

    LOADING = "servers are still loading"
    EMPTY_POOL = "no server of one role is ready, and no mixed one"
    NO_COMPATIBLE = "prefill and decode servers are ready, but their KV layouts, models or protocols differ"
    MISMATCH = (
        "servers have loaded another tokenizer, chat template or configuration than this router, or speak no protocol of its; "
        "see their reasons"
    )
    OTHER_WEIGHTS = "every server has other weights now than those that the answer was begun with"
    NO_PLACE = "the router is at its limit of requests in flight"
    NO_SHARE = "the client has its share of the router's requests in flight"
    COMPUTING = "other prompts of the same call or client are being computed"
    TOO_LARGE = "no pair can hold a request of this length"


class NoPair(Struct, frozen=True):
    """No pair now. limit_tokens: with TOO_LARGE, the longest prompt plus output that some pair can hold."""

    reason: NoPairReason
    limit_tokens: int = 0
