"""Whether a request is taken at all, by how long it would wait for its first token. Pure.

    expected wait = the least of any server's prompts under way + what waits in the router, shared out, at measured speeds
    refused       if that and computing its own prompt is more than its client has use for (slo_ttft_s, its deadline), or
                  if the wait is more than `router.shed_wait_s`: half of that for whoever says that it is less urgent, and
                  twice for whoever says that it is more

So a queue stays short where it could only grow, and the least urgent are refused first. Tenants take turns wherever they wait, so
one waits no longer than for what is its own, as often as there are tenants: nobody is refused for another one's flood. Where
nothing waits nobody is refused, however slow servers seem: only what is computed is timed.
"""

from __future__ import annotations

from msgspec import Struct

from disagg.router.policies import RequestFacts, own_s, under_way_s
from disagg.router.view import ClusterView
from disagg.types.ids import Role

LESS_URGENT, MORE_URGENT = 0.5, 2.0  # of router.shed_wait_s
LEAST_RETRY_S = 0.5


class Queue(Struct, frozen=True):
    """What waits in the router, for a place or a server."""

    prompts: int = 0
    tokens: int = 0


class Expected(Struct, frozen=True):
    """Until a request's first token: for others' prompts, and what its own adds to that."""

    wait_s: float
    compute_s: float


def expected(view: ClusterView, facts: RequestFacts, queue: Queue) -> Expected | None:
    """The least wait on any server, and its end on the one that is done with it first. Where there is no wait, nothing else is
    looked up. None: there is no server now, so it is not known."""
    servers = [server for server in view.servers if server.usable and server.role is not Role.DECODE]
    if not servers:
        return None
    queue_s = servers[0].usual_speed.seconds(queue.prompts, queue.tokens) / len(servers)
    waits_s = [queue_s + under_way_s(server) for server in servers]
    least_s = min(waits_s)
    if least_s <= 0:
        return Expected(0.0, 0.0)
    end_s = min(wait_s + own_s(server, facts) for server, wait_s in zip(servers, waits_s, strict=True))
    return Expected(least_s, end_s - least_s)


def share_of(own: int, all_prompts: int, tenants: int) -> float:
    """Of the wait for everything, what a tenant waits that has `own` of all prompts: it takes turns with the others."""
    return min(1.0, tenants * own / max(1, all_prompts))


def refused(found: Expected, priority: int, in_time_s: float, shed_wait_s: float) -> tuple[float, str] | None:
    """When to try again, and why, if it is not to be taken. priority: lower is more urgent. in_time_s: after which its first
    token is of no use. shed_wait_s: of a request of priority 0; 0: none is shed."""
    if found.wait_s <= 0:
        return None
    late_s = found.wait_s + found.compute_s - in_time_s
    if late_s > 0:
        took = f"{found.wait_s + found.compute_s:.3g} s"
        return max(LEAST_RETRY_S, late_s), (
            f"its first token is expected after {took}, and is of no use after {max(0.0, in_time_s):.3g} s "
            "(x-slo-ttft-ms, or the deadline)"
        )
    factor = LESS_URGENT if priority > 0 else MORE_URGENT if priority < 0 else 1.0
    over_s = found.wait_s - factor * shed_wait_s
    if shed_wait_s > 0 and over_s > 0:
        return max(LEAST_RETRY_S, over_s), (
            f"it would wait for {found.wait_s:.3g} s for prompts before it; with priority {priority} at most "
            f"{factor * shed_wait_s:g} s are allowed (router.shed_wait_s)"
        )
    return None
