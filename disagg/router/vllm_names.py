"""What a router, which is the model server that gateways see, says under vLLM's names."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from disagg.router.metrics import RouterMetrics
from disagg.router.view import ClusterView, ServerView
from disagg.telemetry.vllm_names import Pool, Same, VllmNames, blocks_of
from disagg.types.ids import Role


def expose_vllm_names(
    registry: CollectorRegistry, model: str, metrics: RouterMetrics, view: Callable[[], ClusterView]
) -> None:
    """Once per registry."""
    same = (
        Same("vllm:num_requests_running", metrics.running),
        Same("vllm:num_requests_waiting", metrics.waiting),
        Same("vllm:time_to_first_token_seconds", metrics.ttft_s),
        Same("vllm:inter_token_latency_seconds", metrics.itl_s),
        Same("vllm:time_per_output_token_seconds", metrics.itl_s),
        Same("vllm:e2e_request_latency_seconds", metrics.whole_s),
        Same("vllm:request_queue_time_seconds", metrics.queue_s),
        Same("vllm:prompt_tokens", metrics.prompt_tokens),
        Same("vllm:generation_tokens", metrics.completion_tokens),
        Same("vllm:request_success", metrics.choices, labels={"reason": "finished_reason"}),
    )
    VllmNames(registry, model, same, lambda: pool_of(view()))


def pool_of(view: ClusterView) -> Pool | None:
    """Of all servers that decode together: their memory is what answers wait for. None while no one of them says what it has."""
    servers = [each for each in view.servers if each.role is not Role.PREFILL and each.usable]
    loads = [each.load for each in servers if each.load is not None]
    total = sum(load.pages_total for load in loads)
    if not total:
        return None
    usage = sum(load.pages_used for load in loads) / total
    block_tokens = min((tokens for each in servers if (tokens := _page_tokens(each))), default=0)
    if not block_tokens:
        return Pool(usage, 0, sum(map(blocks_of, loads)))
    # A server with longer pages has room for more of the shortest.
    tokens = sum(
        blocks_of(each.load) * (_page_tokens(each) or block_tokens) for each in servers if each.load is not None
    )
    return Pool(usage, block_tokens, tokens // block_tokens)


def _page_tokens(server: ServerView) -> int:
    """0 where it does not say."""
    hello = server.hello
    return hello.prefix.page_tokens if hello is not None and hello.prefix is not None else 0
