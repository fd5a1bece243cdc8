"""What a server says under vLLM's names: of its memory, and of what waits for it. What clients see is the router's to say."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from disagg.engine.data_parallel import AnyEngine
from disagg.messages.legs import ServerState
from disagg.telemetry.metrics import EngineMetrics
from disagg.telemetry.vllm_names import Pool, Same, VllmNames, blocks_of


def expose_vllm_names(
    registry: CollectorRegistry,
    model: str,
    metrics: EngineMetrics,
    engine: Callable[[], AnyEngine | None],
) -> None:
    """Once per registry."""
    same = (
        Same("vllm:num_requests_running", metrics.requests_running),
        Same("vllm:num_requests_waiting", metrics.requests_waiting),
        Same("vllm:num_preemptions", metrics.preemptions, summed=True),
        Same("vllm:prefix_cache_queries", metrics.prefix_query_tokens),
        Same("vllm:prefix_cache_hits", metrics.prefix_hit_tokens, summed=True),
    )
    VllmNames(registry, model, same, lambda: pool_of(engine()))


def pool_of(engine: AnyEngine | None) -> Pool | None:
    """None while there is none."""
    if engine is None:
        return None
    load = engine.load(ServerState.READY)
    if not load.pages_total:
        return None
    return Pool(load.pages_used / load.pages_total, engine.ranks[0].page_tokens, blocks_of(load))
