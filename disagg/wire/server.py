"""Router streams (`disagg.v1.Server`): legs' messages and hellos to protobuf and back. Pure; knows nothing of streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from disagg.messages.channel import Frame
from disagg.messages.legs import (
    AbortLeg,
    Drain,
    HandOver,
    KvEvents,
    LegEnd,
    LegTokens,
    LoadReport,
    Outcome,
    PeerRef,
    PodGone,
    PrefixGroup,
    PrefixRules,
    RouterMessage,
    ServerHello,
    ServerMessage,
    SetRole,
    StartLeg,
    Tier,
)
from disagg.types.protocol import BEFORE_NUMBERS, Version
from disagg.types.sampling import MAX_CACHE_SALT_CHARS, MAX_CHOICES, MAX_PRIORITY
from disagg.wire import pb
from disagg.wire.fields import (
    FINISH_TO_PROTO,
    Fill,
    Read,
    fill_frame,
    fill_key,
    fill_logprobs,
    fill_timeline,
    read_enum,
    read_finish,
    read_frame,
    read_key,
    read_logprobs,
    read_opening,
    read_pod,
    read_seconds,
    read_timeline,
    refuse,
    refuse_long,
    refuse_undecodable,
    require,
)
from disagg.wire.inference import fill_sampling, read_sampling
from disagg.wire.load_report import fill_load, read_load
from disagg.wire.roles import (
    ROLE_FROM_PROTO,
    ROLE_TO_PROTO,
    fill_role_change,
    fill_set_role,
    read_role_change,
    read_set_role,
)
from disagg.wire.versions import fill_version, read_version

MAX_LEG_TOKENS = 1 << 22  # of one leg; longer than any model's context. Read, they are 150 MB at most

OUTCOME_TO_PROTO = {
    Outcome.DONE: pb.server.OUTCOME_DONE,
    Outcome.ABORTED: pb.server.OUTCOME_ABORTED,
    Outcome.REFUSED: pb.server.OUTCOME_REFUSED,
    Outcome.PEER_LOST: pb.server.OUTCOME_PEER_LOST,
    Outcome.WORKER_LOST: pb.server.OUTCOME_WORKER_LOST,
    Outcome.BAD_TRANSFER: pb.server.OUTCOME_BAD_TRANSFER,
    Outcome.DRAINED: pb.server.OUTCOME_DRAINED,
    Outcome.GIVEN_BACK: pb.server.OUTCOME_GIVEN_BACK,
    Outcome.HANDED_OVER: pb.server.OUTCOME_HANDED_OVER,
}
OUTCOME_FROM_PROTO = {int(v): k for k, v in OUTCOME_TO_PROTO.items()}
TIER_TO_PROTO = {Tier.HOST: pb.server.TIER_HOST, Tier.STORAGE: pb.server.TIER_STORAGE}
TIER_FROM_PROTO = {int(v): k for k, v in TIER_TO_PROTO.items()}

MAX_MODEL_FILES = 64
MAX_NOTE_CHARS = 4096


class RouterHello(Struct, frozen=True):
    """First message of a router on a stream."""

    router_name: str
    router_incarnation: str  # new for every router process
    stream_id: str  # names the ReliableChannel, new for each; the server resumes the channel of this id only
    last_received: int  # of that channel, 0 on a new one
    expected_server_incarnation: str = ""  # empty when the router knows none
    server_name: str = ""  # who is meant; empty from a router that is too old to say
    version: Version = BEFORE_NUMBERS


class AttachReply(Struct, frozen=True):
    """The server's answer to RouterHello. resumed: the channel goes on; else a new one begins and knows no legs."""

    last_received: int
    resumed: bool


class KvUpdate(Struct, frozen=True):
    """What a router should know of a server's tier. reset: all that was said before of it is void."""

    events: KvEvents
    reset: bool = False
    tier: Tier = Tier.GPU


class ServerSays(Struct, frozen=True):
    """One message of a server on a stream.

    attached: in the first message only. hello: in the first, and again when a new incarnation of the workers is up. kv:
    after every hello comes a reset of each tier, with all that it has in one message or several, and then what has changed.
    """

    frame: Frame[ServerMessage]
    load: LoadReport | None = None
    hello: ServerHello | None = None
    attached: AttachReply | None = None
    kv: KvUpdate | None = None


# ---- router -> server

MAX_GROUPS = 4096  # layer groups of a model; some have three
MAX_ROOT_PARTS = MAX_GROUPS + 16  # of a hash chain's beginning: a few, and one for each layer group
MAX_ROOT_CHARS = 1 << 20  # of all of them together
MAX_PAGE_HASH_BYTES = 64  # of a page's name in a cache; ours have 32
MAX_TENANT_CHARS = 256  # of a leg; engines keep one per tenant that waits


def router_hello_to_proto(hello: RouterHello) -> pb.server.RouterFrame:
    out = pb.server.RouterFrame()
    out.hello.router_name = hello.router_name
    out.hello.router_incarnation = hello.router_incarnation
    out.hello.stream_id = hello.stream_id
    out.hello.last_received = hello.last_received
    out.hello.expected_server_incarnation = hello.expected_server_incarnation
    out.hello.server_name = hello.server_name
    fill_version(out.hello.version, hello.version)
    return out


def router_frame_to_proto(frame: Frame[RouterMessage]) -> pb.server.RouterFrame:
    out = pb.server.RouterFrame()
    fill_frame(out, frame, _ROUTER_FILL)
    return out


def router_frame_from_proto(message: pb.server.RouterFrame) -> RouterHello | Frame[RouterMessage]:
    """Raises ProtocolError."""
    names = ("router_name", "router_incarnation", "stream_id")
    also = ("expected_server_incarnation", "server_name")
    if (frame := read_opening(message, _ROUTER_READ, names, also)) is not None:
        return frame
    hello = message.hello
    return RouterHello(
        router_name=hello.router_name,
        router_incarnation=hello.router_incarnation,
        stream_id=hello.stream_id,
        last_received=hello.last_received,
        expected_server_incarnation=hello.expected_server_incarnation,
        server_name=hello.server_name,
        version=read_version(hello),
    )


def _fill_start_leg(out: pb.server.StartLeg, leg: StartLeg) -> None:
    fill_key(out.key, leg.key)
    out.token_ids.extend(leg.token_ids)
    out.num_prompt = leg.num_prompt
    fill_sampling(out.params, leg.params)
    out.choices.extend(leg.choices)
    out.peer.SetInParent()
    out.peer.name = leg.peer.name
    out.peer.address = leg.peer.address
    out.peer.incarnation = leg.peer.incarnation
    out.deadline_s = leg.deadline_s
    out.cache_salt = leg.cache_salt
    out.incarnation = leg.incarnation
    out.tenant = leg.tenant
    out.priority = leg.priority
    out.moves_attempt = leg.moves_attempt
    out.moved = leg.moved
    out.traceparent = leg.traceparent
    out.local_prefill = leg.local_prefill


def _read_start_leg(message: pb.server.StartLeg) -> StartLeg:
    key = read_key(message)
    require(message, "params")
    require(message, "peer")
    if not message.params.HasField("max_tokens"):
        refuse(message, "params.max_tokens", "is missing; a router sets it")
    if len(message.token_ids) > MAX_LEG_TOKENS:
        refuse(message, "token_ids", f"are {len(message.token_ids)}; at most {MAX_LEG_TOKENS} may be")
    for what, most, unit in (
        ("choices", MAX_CHOICES, "entries"),
        ("cache_salt", MAX_CACHE_SALT_CHARS, "characters"),
    ):
        if len(getattr(message, what)) > most:
            refuse(message, what, f"has {len(getattr(message, what))} {unit}; at most {most} may be")
    refuse_long(message.peer, "name", "address", "incarnation")
    if message.num_prompt > len(message.token_ids):
        refuse(message, "num_prompt", f"is {message.num_prompt}, but there are {len(message.token_ids)} tokens")
    if len(message.tenant) > MAX_TENANT_CHARS:
        refuse(message, "tenant", f"has {len(message.tenant)} characters; at most {MAX_TENANT_CHARS} are allowed")
    refuse_long(message, "traceparent")
    if abs(message.priority) > MAX_PRIORITY:
        refuse(message, "priority", f"is {message.priority}; it must be from {-MAX_PRIORITY} to {MAX_PRIORITY}")
    return StartLeg(
        key=key,
        token_ids=tuple(message.token_ids),
        num_prompt=message.num_prompt,
        params=read_sampling(message.params),
        choices=tuple(message.choices),
        peer=PeerRef(name=message.peer.name, address=message.peer.address, incarnation=message.peer.incarnation),
        deadline_s=read_seconds(message, "deadline_s"),
        cache_salt=message.cache_salt,
        incarnation=message.incarnation,
        tenant=message.tenant,
        priority=message.priority,
        moves_attempt=message.moves_attempt,
        moved=message.moved,
        traceparent=message.traceparent,
        local_prefill=message.local_prefill,
    )


def _fill_abort_leg(out: pb.server.AbortLeg, leg: AbortLeg) -> None:
    fill_key(out.key, leg.key)
    if leg.choice is not None:
        out.choice = leg.choice


def _read_abort_leg(message: pb.server.AbortLeg) -> AbortLeg:
    return AbortLeg(key=read_key(message), choice=message.choice if message.HasField("choice") else None)


def _fill_pod_gone(out: pb.server.PodGone, gone: PodGone) -> None:
    out.pod = gone.pod


def _read_pod_gone(message: pb.server.PodGone) -> PodGone:
    return PodGone(read_pod(message, message.pod))


def _fill_drain(out: pb.server.Drain, drain: Drain) -> None:
    out.on = drain.on


def _read_drain(message: pb.server.Drain) -> Drain:
    return Drain(message.on)


def _fill_hand_over(out: pb.server.HandOver, hand_over: HandOver) -> None:
    fill_key(out.key, hand_over.key)


def _read_hand_over(message: pb.server.HandOver) -> HandOver:
    return HandOver(read_key(message))


_ROUTER_FILL: Mapping[type, tuple[str, Fill]] = {
    StartLeg: ("start_leg", _fill_start_leg),
    AbortLeg: ("abort_leg", _fill_abort_leg),
    PodGone: ("pod_gone", _fill_pod_gone),
    Drain: ("drain", _fill_drain),
    HandOver: ("hand_over", _fill_hand_over),
    SetRole: ("set_role", fill_set_role),
}
_ROUTER_READ: Mapping[str, Read[RouterMessage]] = {
    "start_leg": _read_start_leg,
    "abort_leg": _read_abort_leg,
    "pod_gone": _read_pod_gone,
    "drain": _read_drain,
    "hand_over": _read_hand_over,
    "set_role": read_set_role,
}


# ---- server -> router


def server_says_to_proto(says: ServerSays) -> pb.server.ServerFrame:
    out = pb.server.ServerFrame()
    fill_frame(out, says.frame, _SERVER_FILL)
    if says.load is not None:
        fill_load(out.load, says.load)
    if says.hello is not None:
        _fill_server_hello(out.hello, says.hello)
    if says.attached is not None:
        out.attached.last_received = says.attached.last_received
        out.attached.resumed = says.attached.resumed
        out.attached.SetInParent()
    if says.kv is not None and says.kv.tier is Tier.GPU:
        _fill_kv(out.kv, says.kv)
    elif says.kv is not None:
        out.below.tier = TIER_TO_PROTO[says.kv.tier]
        _fill_kv(out.below.update, says.kv)
    return out


def server_says_from_proto(message: pb.server.ServerFrame) -> ServerSays:
    """Raises ProtocolError."""
    refuse_undecodable(message)
    attached = None
    if message.HasField("attached"):
        require(message, "hello")
        attached = AttachReply(last_received=message.attached.last_received, resumed=message.attached.resumed)
    return ServerSays(
        frame=read_frame(message, _SERVER_READ),
        load=read_load(message.load) if message.HasField("load") else None,
        hello=_read_server_hello(message.hello) if message.HasField("hello") else None,
        attached=attached,
        kv=_read_kv_of_a_tier(message),
    )


def _read_kv_of_a_tier(message: pb.server.ServerFrame) -> KvUpdate | None:
    """At most one; of a tier that only newer servers know, none."""
    if message.HasField("kv"):
        return _read_kv(message.kv, Tier.GPU)
    tier = TIER_FROM_PROTO.get(message.below.tier)
    return _read_kv(message.below.update, tier) if tier is not None else None


def _fill_kv(out: pb.server.KvUpdate, kv: KvUpdate) -> None:
    out.SetInParent()
    out.reset = kv.reset
    for column, pages in (("stored", kv.events.stored), ("removed", kv.events.removed)):
        getattr(out, column).extend(key for _, key in pages)
        getattr(out, f"{column}_groups").extend(group for group, _ in pages)


def _read_kv(message: pb.server.KvUpdate, tier: Tier) -> KvUpdate:
    columns = {}
    for column in ("stored", "removed"):
        keys, groups = getattr(message, column), getattr(message, f"{column}_groups")
        if len(keys) != len(groups):
            refuse(message, f"{column}_groups", f"has {len(groups)} entries for {len(keys)} of {column}")
        if groups and max(groups) >= MAX_GROUPS:
            refuse(message, f"{column}_groups", f"has a layer group {max(groups)}; at most {MAX_GROUPS} may be")
        if keys and max(map(len, keys)) > MAX_PAGE_HASH_BYTES:
            refuse(message, column, f"has a name of {max(map(len, keys))} bytes; at most {MAX_PAGE_HASH_BYTES} may be")
        columns[column] = tuple(zip(groups, keys, strict=True))
    return KvUpdate(KvEvents(**columns), message.reset, tier)


def _fill_server_hello(out: pb.server.ServerHello, hello: ServerHello) -> None:
    out.name = hello.name
    out.role = ROLE_TO_PROTO[hello.role]
    out.tp, out.dp, out.pp = hello.tp, hello.dp, hello.pp
    out.pid = hello.pid
    out.worker_pids.extend(hello.worker_pids)
    out.incarnation = hello.incarnation
    out.fingerprint = hello.fingerprint
    out.model = hello.model
    out.max_model_len = hello.max_model_len
    out.max_tokens_in_pool = hello.max_tokens_in_pool
    out.link_address = hello.link_address
    fill_load(out.load, hello.load)
    out.weights_hash = hello.weights_hash
    for name, sha256 in hello.files.items():
        out.files.add(name=name, sha256=sha256)
    out.note = hello.note
    if hello.prefix is not None:
        _fill_prefix(out.prefix, hello.prefix)
    out.drains = hello.drains
    out.hands_over = hello.hands_over
    fill_version(out.version, hello.version)
    if hello.role_change is not None:
        fill_role_change(out.role_change, hello.role_change)
    out.storage = hello.storage
    out.local_prefill_tokens = hello.local_prefill_tokens


def _fill_prefix(out: pb.server.PrefixRules, rules: PrefixRules) -> None:
    out.root_parts.extend(rules.root_parts)
    out.page_tokens = rules.page_tokens
    out.checkpoint_tokens = rules.checkpoint_tokens
    for group in rules.groups:
        out.groups.add(kind=group.kind, window_tokens=group.window_tokens)


def _read_prefix(message: pb.server.PrefixRules) -> PrefixRules:
    if not message.page_tokens:
        refuse(message, "page_tokens", "is 0; a page has at least one token")
    if not message.groups or len(message.groups) > MAX_GROUPS:
        refuse(message, "groups", f"has {len(message.groups)} entries; it must have 1 to {MAX_GROUPS}")
    chars = sum(map(len, message.root_parts))
    if len(message.root_parts) > MAX_ROOT_PARTS or chars > MAX_ROOT_CHARS:
        said = f"has {len(message.root_parts)} entries of {chars} characters"
        refuse(message, "root_parts", f"{said}; at most {MAX_ROOT_PARTS} of {MAX_ROOT_CHARS} are read")
    return PrefixRules(
        root_parts=tuple(message.root_parts),
        page_tokens=message.page_tokens,
        checkpoint_tokens=message.checkpoint_tokens,
        groups=tuple(PrefixGroup(group.kind, group.window_tokens) for group in message.groups),
    )


def _read_server_hello(message: pb.server.ServerHello) -> ServerHello:
    # incarnation, fingerprint and the like are empty while the server loads its model.
    if not message.name:
        refuse(message, "name", "is empty")
    require(message, "load")
    if len(message.files) > MAX_MODEL_FILES:
        refuse(message, "files", f"has {len(message.files)} entries; at most {MAX_MODEL_FILES} are read")
    refuse_long(message, "storage")
    if len(message.note) > MAX_NOTE_CHARS:
        refuse(message, "note", f"has {len(message.note)} characters; at most {MAX_NOTE_CHARS} are read")
    return ServerHello(
        name=message.name,
        role=read_enum(message, "role", ROLE_FROM_PROTO),
        tp=message.tp,
        pid=message.pid,
        worker_pids=tuple(message.worker_pids),
        incarnation=message.incarnation,
        fingerprint=message.fingerprint,
        model=message.model,
        max_model_len=message.max_model_len,
        max_tokens_in_pool=message.max_tokens_in_pool,
        link_address=message.link_address,
        load=read_load(message.load),
        weights_hash=message.weights_hash,
        files={file.name: file.sha256 for file in message.files},
        note=message.note,
        prefix=_read_prefix(message.prefix) if message.HasField("prefix") else None,
        dp=message.dp or 1,
        pp=message.pp or 1,
        drains=message.drains,
        hands_over=message.hands_over,
        version=read_version(message),
        role_change=read_role_change(message.role_change) if message.HasField("role_change") else None,
        storage=message.storage,
        local_prefill_tokens=message.local_prefill_tokens,
    )


def _fill_leg_tokens(out: pb.server.LegTokens, tokens: LegTokens) -> None:
    fill_key(out.key, tokens.key)
    out.choice = tokens.choice
    out.first_index = tokens.first_index
    out.token_ids.extend(tokens.token_ids)
    if tokens.logprobs:
        fill_logprobs(out.logprobs, tokens.logprobs)
    if tokens.finish is not None:
        out.finish = FINISH_TO_PROTO[tokens.finish]


def _read_leg_tokens(message: Any) -> LegTokens:
    token_ids = tuple(message.token_ids)
    return LegTokens(
        key=read_key(message),
        choice=message.choice,
        first_index=message.first_index,
        token_ids=token_ids,
        logprobs=read_logprobs(message.logprobs, len(token_ids)) if message.HasField("logprobs") else (),
        finish=read_finish(message),
    )


def _fill_leg_end(out: pb.server.LegEnd, end: LegEnd) -> None:
    fill_key(out.key, end.key)
    out.outcome = OUTCOME_TO_PROTO[end.outcome]
    out.reason = end.reason
    fill_timeline(out.timeline, end.timeline)
    out.cached_tokens = end.cached_tokens
    out.host_tokens = end.host_tokens
    out.storage_tokens = end.storage_tokens


def _read_leg_end(message: pb.server.LegEnd) -> LegEnd:
    return LegEnd(
        key=read_key(message),
        outcome=read_enum(message, "outcome", OUTCOME_FROM_PROTO),
        reason=message.reason,
        timeline=read_timeline(message.timeline),
        cached_tokens=message.cached_tokens,
        host_tokens=message.host_tokens,
        storage_tokens=message.storage_tokens,
    )


_SERVER_FILL: Mapping[type, tuple[str, Fill]] = {
    LegTokens: ("leg_tokens", _fill_leg_tokens),
    LegEnd: ("leg_end", _fill_leg_end),
}
_SERVER_READ: Mapping[str, Read[ServerMessage]] = {"leg_tokens": _read_leg_tokens, "leg_end": _read_leg_end}
