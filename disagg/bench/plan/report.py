"""The figures of a plan, as JSON and as words. Pure.

What router and links cost is computed from measured rates of one router process, and from the number of pairs of servers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from disagg.bench.plan.costs import Measured, ServerFacts, mixed_facts
from disagg.bench.plan.search import Verdict
from disagg.bench.plan.simulate import Cluster, Simulated
from disagg.bench.serve.figures import Answered, figures
from disagg.bench.serve.goodput import Slo

BEATS_PER_S = 1.0  # of a stream between a router and a server, in either direction


class RouterRates(Struct, frozen=True):
    """Of one router process that has a core for itself."""

    requests_per_s: float
    tokens_per_s: float


def figures_of(cluster: Cluster, result: Simulated, slo: Slo) -> dict[str, Any]:
    """What its clients would see, and how busy its pools are."""
    answered = [each for each in result.outcomes if isinstance(each, Answered)]
    found = figures(result.outcomes, result.duration_s)
    good = sum(map(slo.good, answered))
    kept = {
        name: found[name] for name in ("completed", "failed", "duration_s", "requests_per_s", "output_tokens_per_s")
    }
    times = {name: found[name] for name in ("ttft_s", "itl_s", "tpot_s", "e2e_s")}
    return {
        **servers_of(cluster),
        **kept,
        **times,
        "good_requests_per_s": good / result.duration_s,
        "good_share": good / len(result.outcomes),
        "utilization": {
            name: {"busy": use.busy, "busiest": use.busiest, "steps": use.steps, "prompt_tokens": use.prompt_tokens}
            for name, use in result.pools.items()
        },
    }


def servers_of(cluster: Cluster) -> dict[str, Any]:
    if cluster.mixed:
        return {"mixed": cluster.mixed, "mixed_tp": cluster.mixed_tp, "gpus": cluster.gpus}
    return {
        "prefill": cluster.prefill,
        "decode": cluster.decode,
        "prefill_tp": cluster.prefill_tp,
        "decode_tp": cluster.decode_tp,
        "gpus": cluster.gpus,
    }


def alternative(verdict: Verdict, slo: Slo) -> dict[str, Any]:
    """One that was found, or that came nearest."""
    if verdict.within:
        return {**figures_of(verdict.cluster, verdict.result, slo), "within": True, "over": {}}
    over = {name: found if math.isfinite(found) else None for name, (found, _) in verdict.over.items()}
    return {**servers_of(verdict.cluster), "within": False, "over": over}


def overheads(cluster: Cluster, requests_per_s: float, tokens_per_s: float, rates: RouterRates) -> dict[str, Any]:
    """What stands beside the servers: routers for so much, and links between all pairs."""
    share = requests_per_s / rates.requests_per_s + tokens_per_s / rates.tokens_per_s
    servers = cluster.prefill + cluster.decode + cluster.mixed
    processes = max(1, math.ceil(share / 0.7))
    return {
        "router_cores": share,
        "router_processes": processes,
        "router_streams": servers * processes,
        "links": cluster.prefill * cluster.decode,
        "links_per_prefill": cluster.decode,
        "links_per_decode": cluster.prefill,
        "beats_per_s": 2 * BEATS_PER_S * (servers * processes + cluster.prefill * cluster.decode),
    }


def costs_of(measured: Measured) -> dict[str, Any]:
    """What the plan rests on."""
    pools = {
        name: {str(tp): _facts(facts) for tp, facts in getattr(measured, name).items()}
        for name in ("prefill", "decode")
    }
    mixed = {
        str(tp): {"measured": facts.measured, "prefill": _facts(facts.prefill), "decode": _facts(facts.decode)}
        for tp, facts in mixed_facts(measured).items()
    }
    handoff = measured.handoff
    return {
        "source": measured.source,
        "assumed": measured.assumed,
        **pools,
        "mixed": mixed,
        "handoff": {"fixed_s": handoff.fixed_s, "token_s": handoff.token_s},
        "router_s": measured.router_s,
    }


def _facts(facts: ServerFacts) -> dict[str, Any]:
    cost = facts.cost
    return {
        "fixed_s": cost.fixed_s,
        "token_s": cost.token_s,
        "attended_s": cost.attended_s,
        "steps": cost.steps,
        "chunk_tokens": facts.chunk_tokens,
        "kv_tokens": facts.kv_tokens,
        "max_running": facts.max_running,
    }


def best_of(verdicts: Sequence[Verdict]) -> Verdict | None:
    """Of those that are within, the one with the fewest GPUs, and of these the fewest servers."""
    within = [each for each in verdicts if each.within]
    key = lambda each: (each.cluster.gpus, each.cluster.prefill + each.cluster.decode + each.cluster.mixed)  # noqa: E731
    return min(within, key=key, default=None)
