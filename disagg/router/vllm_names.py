"""What a router, which is the model server that gateways see, says under vLLM's names."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from disagg.router.metrics import RouterMetrics
from disagg.router.view import ClusterView
from disagg.telemetry.vllm_names import Pool, Same, VllmNames
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
    hellos = [each.hello for each in servers if each.hello is not None]
    block_tokens = min((hello.prefix.page_tokens for hello in hellos if hello.prefix is not None), default=0)
    tokens = sum(hello.max_tokens_in_pool for hello in hellos)
    blocks = tokens // block_tokens if block_tokens else 0
    return Pool(sum(load.pages_used for load in loads) / total, block_tokens, blocks)
