"""What an operator must know now: what servers say, and what has become of requests in the last minute. Pure.

An alarm goes away by itself when what it says is over. The texts are for people; who wants numbers reads metrics.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from msgspec import Struct

from disagg.messages.legs import ServerState, StorageState
from disagg.router.versions import mixed_versions
from disagg.router.view import ClusterView, ServerView
from disagg.types.protocol import BEFORE_NUMBERS, Version

WINDOW_S = 60
LOOP_GAP_S = 0.25  # as telemetry.loop warns of
FULL_SHARE = 0.95  # of a KV pool that running sequences need, with others waiting
MAX_ALARMS = 200
NOTHING: Mapping[str, str] = {}


class Level(enum.StrEnum):
    """How soon somebody must look."""

    BAD = "bad"  # requests fail, or a server is not there
    WARN = "warn"  # less is served, or served slower, than could be


class Alarm(Struct, frozen=True):
    """subject: a server's name, or "router" or "requests"."""

    level: Level
    subject: str
    text: str


_STATES = {
    ServerState.DEAD: (Level.BAD, "is lost: its stream is silent, or nothing answers at its address"),
    ServerState.MISMATCH: (Level.BAD, "is not used"),
    ServerState.LOADING: (Level.WARN, "is loading"),
    ServerState.NO_PEER: (Level.WARN, "is ready, but no ready server of the other role has its KV layout and model"),
    ServerState.DRAINING: (Level.WARN, "is draining, and takes nothing new"),
    ServerState.DRAINED: (Level.WARN, "is drained: end it, or have it take requests again by `disagg drain --undo`"),
}
_SLOW = "KV to {} goes over TCP, though it computes on GPUs: neither RDMA nor cuda_ipc joins them"
# Of requests that ended; "invalid" and "cancelled" are their clients' doing.
_OUTCOMES = {
    "failed": (Level.BAD, "failed after as many attempts as are allowed"),
    "unavailable": (Level.BAD, "found no servers"),
    "no_compatible_peer": (Level.BAD, "found no prefill and decode server that fit together"),
    "retries_spent": (Level.BAD, "were lost with servers, more than may be run again (router.retry_share)"),
    "deadline": (Level.WARN, "ran into their deadline"),
    "shed": (Level.WARN, "were refused, because they would have waited too long for their first token"),
    "overloaded": (Level.WARN, "were refused, because the queue was full or the router had no memory for them"),
}


def alarms(
    view: ClusterView,
    ended: Mapping[str, int],
    loop_gap_s: float,
    rival: str = "",
    own: Version = BEFORE_NUMBERS,
    certificate_left_s: float | None = None,
    no_servers: Mapping[str, str] = NOTHING,
) -> tuple[Alarm, ...]:
    """The worst first; at most MAX_ALARMS, of which the last then says how many are left out.

    ended: requests of the last WINDOW_S, by outcome. loop_gap_s: of the router. rival: another router's claim on its name.
    own: this router's version. certificate_left_s: until its certificate expires, if that is soon.
    no_servers: what discovery finds that can be no server, though it is meant to be one, and why.
    """
    found = [*_of_requests(view, ended), *_of_router(loop_gap_s, rival), *_of_certificate(certificate_left_s)]
    if mixed := mixed_versions(view, own):
        found.append(Alarm(Level.WARN, "router", mixed))
    found += [Alarm(Level.WARN, name, f"it can be no server: {fault}") for name, fault in no_servers.items()]
    for server in view.servers:
        found += _of_server(server, view)
    found.sort(key=lambda alarm: alarm.level is not Level.BAD)
    if len(found) > MAX_ALARMS:
        left = len(found) - (MAX_ALARMS - 1)
        found = [*found[: MAX_ALARMS - 1], Alarm(Level.WARN, "router", f"{left} alarms more are not listed")]
    return tuple(found)


def _of_requests(view: ClusterView, ended: Mapping[str, int]) -> list[Alarm]:
    found = []
    if not view.has_pair:
        found.append(Alarm(Level.BAD, "requests", "none can be served: no ready servers fit together"))
    whole = sum(ended.values())
    for outcome, (level, words) in _OUTCOMES.items():
        if count := ended.get(outcome, 0):
            found.append(Alarm(level, "requests", f"{count} of {whole} in the last minute {words}"))
    return found


def _of_router(loop_gap_s: float, rival: str) -> list[Alarm]:
    found = [Alarm(Level.BAD, "router", rival)] if rival else []
    return found + _of_loop("router", loop_gap_s)


def _of_certificate(left_s: float | None) -> list[Alarm]:
    if left_s is None:
        return []
    if left_s < 0:
        words = "its certificate (tls.cert), or what it rests on, has expired: clients and servers do not take it"
        return [Alarm(Level.BAD, "router", words)]
    left = f"{left_s / 86400:.1f} days" if left_s >= 86400 else f"{left_s / 3600:.1f} hours"
    return [
        Alarm(Level.WARN, "router", f"its certificate (tls.cert), or what it rests on, expires in {left}: renew it")
    ]


def _of_loop(subject: str, gap_s: float) -> list[Alarm]:
    if gap_s < LOOP_GAP_S:
        return []
    return [Alarm(Level.WARN, subject, f"its event loop stood still for {gap_s:.2f} s in the last two minutes")]


def _of_server(server: ServerView, view: ClusterView) -> list[Alarm]:
    state, load = view.state(server), server.load
    found = []
    if state in _STATES:
        level, words = _STATES[state]
        loading = state is ServerState.LOADING  # for as long as what it says of itself is refused, too
        more = server.error if state is ServerState.DEAD or (loading and not server.reason) else server.reason
        found.append(Alarm(level, server.name, f"{words}: {more}" if more else words))
    elif server.reason and server.reason != server.started_as:  # which was asked for, and is as it should be
        found.append(Alarm(Level.WARN, server.name, server.reason))
    for work in server.circuits if state is not ServerState.DEAD else ():
        words = f"fails too much of what it is sent to {work.value}: nothing is while there is another server"
        found.append(Alarm(Level.WARN, server.name, words))
    if state is ServerState.DEAD or load is None:
        return found  # what it last said is not what is
    if load.store is StorageState.DEGRADED:
        found.append(Alarm(Level.WARN, server.name, "storage for KV fails, and is left alone until it works again"))
    if load.arena is not None and load.arena.quarantined:
        mib = load.arena.quarantined / (1 << 20)
        words = f"{mib:.1f} MiB of its staging arena are quarantined: a lost peer may still write there"
        found.append(Alarm(Level.WARN, server.name, words))
    if load.waiting and load.pages_total and load.pages_used >= FULL_SHARE * load.pages_total:
        found.append(Alarm(Level.WARN, server.name, f"its KV memory is full, and {load.waiting} wait for it"))
    found += [Alarm(Level.WARN, server.name, _SLOW.format(each.peer)) for each in load.carried if each.slow]
    return found + _of_loop(server.name, load.loop_gap_s)


class Recent:
    """How many requests ended in the last `window_s` seconds, by outcome, to the second. Time is an argument."""

    def __init__(self, window_s: int = WINDOW_S) -> None:
        self._window_s = window_s
        self._seconds: dict[int, dict[str, int]] = {}  # oldest first

    def note(self, outcome: str, now_s: float) -> None:
        self._forget(now_s)
        counts = self._seconds.setdefault(int(now_s), {})
        counts[outcome] = counts.get(outcome, 0) + 1

    def counts(self, now_s: float) -> dict[str, int]:
        self._forget(now_s)
        sums: dict[str, int] = {}
        for counts in self._seconds.values():
            for outcome, count in counts.items():
                sums[outcome] = sums.get(outcome, 0) + count
        return sums

    def _forget(self, now_s: float) -> None:
        for second in [second for second in self._seconds if second <= int(now_s) - self._window_s]:
            del self._seconds[second]
