"""From what the router of a running cluster says of its servers to what a plan needs. Pure.

Servers learn what their steps cost from some of the last ones (`scheduler.step_times.ToldTimes`). What lies between steps, how KV
goes on, and by how much steps are off their line is not in it: records know that (`learn`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from disagg.bench.plan.costs import Handoff, Measured, ServerFacts, StepCost
from disagg.messages.legs import StepCosts
from disagg.types.errors import ConfigError
from disagg.types.plain import NAME_CHARS, one_line

MOST = 1e15  # of seconds, tokens and steps that a server may say: beyond it nothing can be reckoned


def running(status: Any, url: str) -> Measured:
    """status: of /status. Servers of one role and TP size count as one, with what their steps cost on average.

    Raises ConfigError for what is no status, or says too little.
    """
    found: dict[tuple[str, int], list[StepCosts]] = {}
    silent = []
    for server in _servers(status, url):
        name, role, tp = server.get("name"), server.get("role"), server.get("tp")
        try:
            costs = msgspec.convert(server.get("steps"), StepCosts | None)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{url}: what it says of steps is of another version: {error}") from error
        if costs is not None and any(not 0 <= each <= MOST for each in msgspec.structs.astuple(costs)):
            raise ConfigError(f"{url}: what it says of steps is of no server: it must be from 0 to {MOST:g}")
        if costs is None or not costs.token_s > 0 or not isinstance(tp, int) or tp < 1:
            silent.append(one_line(str(name), NAME_CHARS))
        else:
            found.setdefault((str(role), tp), []).append(costs)
    pools: dict[str, dict[int, ServerFacts]] = {"prefill": {}, "decode": {}, "mixed": {}}
    for (role, tp), each in sorted(found.items()):
        if role in pools:
            pools[role][tp] = _together(tp, each)
    if not pools["mixed"] and not (pools["prefill"] and pools["decode"]):
        said = f"; nothing yet of {', '.join(silent[:8])}" if silent else ""
        raise ConfigError(
            f"{url}: a plan needs step times of a prefill and a decode server, or of a mixed one{said}; put load on it first"
        )
    return Measured(pools["prefill"], pools["decode"], pools["mixed"], Handoff(), f"the servers of {url}")


def _servers(status: Any, url: str) -> list[Mapping[str, Any]]:
    servers = status.get("servers") if isinstance(status, dict) else None
    if not isinstance(servers, list) or not all(isinstance(server, dict) for server in servers):
        raise ConfigError(f"{url}: its /status is not that of a router")
    return servers


def _together(tp: int, each: list[StepCosts]) -> ServerFacts:
    count = len(each)
    cost = StepCost(
        sum(one.fixed_s for one in each) / count,
        sum(one.token_s for one in each) / count,
        sum(one.attended_s for one in each) / count,
        steps=sum(one.steps for one in each),
    )
    chunk, kv = min(one.chunk_tokens for one in each), min(one.kv_tokens for one in each)
    return ServerFacts(tp, cost, max(1, chunk), kv or 1 << 40, min(one.max_running for one in each) or 256)
