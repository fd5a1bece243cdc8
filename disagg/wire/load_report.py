"""A server's load as it is written on the wire."""

from __future__ import annotations

from disagg.messages.legs import (
    ArenaReport,
    CarriedBy,
    GroupMemory,
    HostMemory,
    LoadCosts,
    LoadReport,
    MemoryReport,
    ReceivedFrom,
    ServerState,
    StepCosts,
    StorageState,
)
from disagg.wire import pb
from disagg.wire.fields import read_enum, read_pod, read_seconds, refuse, refuse_long

MAX_LOST_PODS = 1024
MAX_RECEIVED_FROM = 1024
MAX_CARRIED = 1024
MAX_WAYS, MAX_WAY_CHARS = 256, 1024  # to one peer

# ServerState.DRAINED, DEAD and MISMATCH have no row: a server never says them of itself.
STATE_TO_PROTO = {
    ServerState.LOADING: pb.server.SERVER_STATE_LOADING,
    ServerState.READY: pb.server.SERVER_STATE_READY,
    ServerState.NO_PEER: pb.server.SERVER_STATE_NO_PEER,
    ServerState.DRAINING: pb.server.SERVER_STATE_DRAINING,
}
STORAGE_TO_PROTO = {
    StorageState.OFF: pb.server.STORAGE_STATE_OFF,
    StorageState.OK: pb.server.STORAGE_STATE_OK,
    StorageState.DEGRADED: pb.server.STORAGE_STATE_DEGRADED,
}
STORAGE_FROM_PROTO = {int(v): k for k, v in STORAGE_TO_PROTO.items()}
STATE_FROM_PROTO = {int(v): k for k, v in STATE_TO_PROTO.items()}


def fill_load(out: pb.server.LoadReport, load: LoadReport) -> None:
    out.state = STATE_TO_PROTO[load.state]
    out.running = load.running
    out.waiting = load.waiting
    out.pages_used = load.pages_used
    out.pages_free = load.pages_free
    out.pages_evictable = load.pages_evictable
    out.pages_total = load.pages_total
    out.store = STORAGE_TO_PROTO[load.store]
    out.lost_pods.extend(load.lost_pods)
    out.loop_gap_s = load.loop_gap_s
    if load.memory is not None:
        _fill_memory(out.memory, load.memory)
    if load.arena is not None:
        arena = load.arena
        out.arena.CopyFrom(pb.server.ArenaReport(free=arena.free, leased=arena.leased, quarantined=arena.quarantined))
    for each in load.received:
        out.received.add(
            peer=each.peer, bytes=each.bytes, transfers=each.transfers, failures=each.failures, seconds=each.seconds
        )
    for to in load.carried:
        out.carried.add(peer=to.peer, ways=to.ways, slow=to.slow)
    if load.spare_tokens is not None:
        out.spare_tokens = load.spare_tokens
    if (loads := load.loads) is not None:
        out.loads.CopyFrom(pb.server.LoadCosts(host_token_s=loads.host_token_s, storage_token_s=loads.storage_token_s))
    if (steps := load.steps) is not None:
        out.steps.CopyFrom(
            pb.server.StepCosts(
                fixed_s=steps.fixed_s,
                token_s=steps.token_s,
                attended_s=steps.attended_s,
                steps=steps.steps,
                chunk_tokens=steps.chunk_tokens,
                kv_tokens=steps.kv_tokens,
                max_running=steps.max_running,
            )
        )


def read_load(message: pb.server.LoadReport) -> LoadReport:
    if len(message.lost_pods) > MAX_LOST_PODS:
        refuse(message, "lost_pods", f"has {len(message.lost_pods)} entries; at most {MAX_LOST_PODS} are read")
    if len(message.received) > MAX_RECEIVED_FROM:
        refuse(message, "received", f"has {len(message.received)} entries; at most {MAX_RECEIVED_FROM} are read")
    if len(message.carried) > MAX_CARRIED:
        refuse(message, "carried", f"has {len(message.carried)} entries; at most {MAX_CARRIED} are read")
    return LoadReport(
        state=read_enum(message, "state", STATE_FROM_PROTO),
        running=message.running,
        waiting=message.waiting,
        pages_used=message.pages_used,
        pages_free=message.pages_free,
        pages_evictable=message.pages_evictable,
        pages_total=message.pages_total,
        memory=_read_memory(message.memory) if message.HasField("memory") else None,
        store=read_enum(message, "store", STORAGE_FROM_PROTO) if message.store else StorageState.OFF,
        lost_pods=tuple(read_pod(message, pod) for pod in message.lost_pods),
        arena=_read_arena(message.arena) if message.HasField("arena") else None,
        received=tuple(map(_read_received, message.received)),
        loop_gap_s=read_seconds(message, "loop_gap_s"),
        carried=tuple(map(_read_carried, message.carried)),
        steps=_read_steps(message.steps) if message.HasField("steps") else None,
        loads=_read_loads(message.loads) if message.HasField("loads") else None,
        spare_tokens=message.spare_tokens if message.HasField("spare_tokens") else None,
    )


def _read_loads(message: pb.server.LoadCosts) -> LoadCosts:
    return LoadCosts(_read_cost(message, "host_token_s"), _read_cost(message, "storage_token_s"))


def _read_cost(message: pb.server.LoadCosts, field: str) -> float:
    seconds = read_seconds(message, field)
    if seconds < 0:
        refuse(message, field, f"is {seconds}; nothing is brought in less than no time")
    return seconds


def _read_steps(message: pb.server.StepCosts) -> StepCosts:
    return StepCosts(
        fixed_s=read_seconds(message, "fixed_s"),
        token_s=read_seconds(message, "token_s"),
        attended_s=read_seconds(message, "attended_s"),
        steps=message.steps,
        chunk_tokens=message.chunk_tokens,
        kv_tokens=message.kv_tokens,
        max_running=message.max_running,
    )


def _read_carried(message: pb.server.CarriedBy) -> CarriedBy:
    refuse_long(message, "peer")
    if len(message.ways) > MAX_WAYS:
        refuse(message, "ways", f"has {len(message.ways)} entries; at most {MAX_WAYS} are read")
    if any(len(way) > MAX_WAY_CHARS for way in message.ways):
        refuse(message, "ways", f"has one of more than {MAX_WAY_CHARS} characters")
    return CarriedBy(message.peer, tuple(message.ways), message.slow)


def _read_arena(message: pb.server.ArenaReport) -> ArenaReport:
    return ArenaReport(free=message.free, leased=message.leased, quarantined=message.quarantined)


def _read_received(message: pb.server.ReceivedFrom) -> ReceivedFrom:
    refuse_long(message, "peer")
    return ReceivedFrom(
        peer=message.peer,
        bytes=message.bytes,
        transfers=message.transfers,
        failures=message.failures,
        seconds=read_seconds(message, "seconds"),
    )


def _fill_memory(out: pb.server.MemoryReport, memory: MemoryReport) -> None:
    out.SetInParent()
    out.sizing = memory.sizing
    out.large_bytes = memory.large_bytes
    out.large_free = memory.large_free
    out.large_evictable = memory.large_evictable
    out.large_used = memory.large_used
    out.fragmentation_bytes = memory.fragmentation_bytes
    if memory.host is not None:
        host = memory.host
        out.host.CopyFrom(
            pb.server.HostMemory(pages_used=host.pages_used, pages_total=host.pages_total, bytes=host.bytes)
        )
    for group in memory.groups:
        out.groups.add(
            name=group.name,
            kind=group.kind,
            page_bytes=group.page_bytes,
            empty_pages=group.empty_pages,
            evictable_pages=group.evictable_pages,
            used_pages=group.used_pages,
        )


def _read_memory(message: pb.server.MemoryReport) -> MemoryReport:
    return MemoryReport(
        sizing=message.sizing,
        large_bytes=message.large_bytes,
        large_free=message.large_free,
        large_evictable=message.large_evictable,
        large_used=message.large_used,
        fragmentation_bytes=message.fragmentation_bytes,
        groups=tuple(
            GroupMemory(
                name=group.name,
                kind=group.kind,
                page_bytes=group.page_bytes,
                empty_pages=group.empty_pages,
                evictable_pages=group.evictable_pages,
                used_pages=group.used_pages,
            )
            for group in message.groups
        ),
        host=_read_host(message.host) if message.HasField("host") else None,
    )


def _read_host(message: pb.server.HostMemory) -> HostMemory:
    return HostMemory(pages_used=message.pages_used, pages_total=message.pages_total, bytes=message.bytes)
