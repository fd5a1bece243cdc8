"""Metrics under vLLM's names: those that the guide lists, with the values that ours have, as Prometheus' parser reads them."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

from disagg.messages.legs import (
    GroupMemory,
    LoadReport,
    MemoryReport,
    PrefixGroup,
    PrefixRules,
    ServerHello,
    ServerState,
)
from disagg.router.metrics import RouterMetrics
from disagg.router.view import ClusterView, ServerView
from disagg.router.vllm_names import expose_vllm_names as of_router
from disagg.router.vllm_names import pool_of
from disagg.server.vllm_names import expose_vllm_names as of_server
from disagg.telemetry.metrics import EngineMetrics
from disagg.telemetry.vllm_names import Pool, Same, VllmNames, blocks_of
from disagg.types.ids import Role
from tests.repository.source import ROOT

LABELS = {"model_name": "m", "engine": "0"}
FULL, WINDOW, STATE = (
    GroupMemory(kind, kind, page, 0, 0, 0) for kind, page in (("full", 100), ("window", 200), ("state", 300))
)


def memory(*groups: GroupMemory, large_bytes: int = 400) -> MemoryReport:
    return MemoryReport("lcm", large_bytes, 10, 0, 0, 0, groups)


def server(name: str, role: Role, used: int, *, lost: bool = False) -> ServerView:
    load = LoadReport(ServerState.READY, 1, 0, used, 10 - used, 0, 10, memory(FULL))
    hello = ServerHello(
        name=name,
        role=role,
        tp=1,
        pid=1,
        worker_pids=(),
        incarnation="i",
        fingerprint="f",
        model="m",
        max_model_len=10,
        max_tokens_in_pool=640,
        link_address="",
        load=load,
        prefix=PrefixRules((), 16, 0, (PrefixGroup("full"),)),
    )
    return ServerView(name=name, role=role, address="", hello=hello, load=load, connected=not lost, lost=lost)


VIEW = ClusterView(
    (
        server("p0", Role.PREFILL, 9),
        server("d0", Role.DECODE, 4),
        server("m0", Role.MIXED, 8),
        server("d1", Role.DECODE, 10, lost=True),
    )
)


class FakeEngine:
    ranks = (SimpleNamespace(page_tokens=16),) * 2

    def load(self, state: ServerState) -> LoadReport:
        return LoadReport(state, 1, 0, 5, 15, 0, 20, memory(FULL))


def samples(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    return samples(registry)[name, tuple(sorted({**LABELS, **labels}.items()))]


@pytest.fixture(name="router")
def make_router() -> tuple[CollectorRegistry, RouterMetrics]:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    of_router(registry, "m", metrics, lambda: VIEW)
    return registry, metrics


@pytest.fixture(name="of_engine")
def make_engine() -> tuple[CollectorRegistry, EngineMetrics]:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry)
    engine: Any = FakeEngine()
    of_server(registry, "m", metrics, lambda: engine)
    return registry, metrics


def test_the_guide_lists_what_each_process_says_and_no_other(
    router: tuple[CollectorRegistry, RouterMetrics], of_engine: tuple[CollectorRegistry, EngineMetrics]
) -> None:
    listed: set[tuple[str, str]] = set()
    for row in re.findall(r"^\| (`vllm:.*)$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE):
        names, processes, *_ = row.split(" | ")
        listed |= {(name, who) for name in re.findall(r"`(vllm:\w+)`", names) for who in processes.split(", ")}
    there = set()
    for who, (registry, _) in (("router", router), ("server", of_engine)):
        for family in registry.collect():
            if family.name.startswith("vllm:"):
                there.add((family.name + ("_total" if family.type == "counter" else ""), who))
    assert listed == there


def test_a_router_says_under_both_names_the_same(router: tuple[CollectorRegistry, RouterMetrics]) -> None:
    registry, metrics = router
    metrics.running.set(3)
    metrics.waiting.set_function(lambda: 4)
    metrics.prompt_tokens.inc(100)
    metrics.completion_tokens.value += 7
    metrics.choices.labels(reason="stop").inc(2)
    for seconds in (0.03, 0.3, 300.0):
        metrics.ttft_s.observe(seconds)
        metrics.itl_s.observe(seconds)
    assert value(registry, "vllm:num_requests_running") == 3
    assert value(registry, "vllm:num_requests_waiting") == 4
    assert value(registry, "vllm:prompt_tokens_total") == 100
    assert value(registry, "vllm:generation_tokens_total") == 7
    assert value(registry, "vllm:request_success_total", finished_reason="stop") == 2
    assert value(registry, "vllm:request_success_total", finished_reason="length") == 0
    said = samples(registry)
    for theirs, ours in (
        ("vllm:time_to_first_token_seconds", "disagg_router_ttft_seconds"),
        ("vllm:inter_token_latency_seconds", "disagg_router_itl_seconds"),
        ("vllm:time_per_output_token_seconds", "disagg_router_itl_seconds"),
    ):
        mine = {
            (name.removeprefix(ours), labels): each
            for (name, labels), each in said.items()
            if name.startswith(f"{ours}_")
        }
        theirs_too = {
            (name.removeprefix(theirs), tuple(label for label in labels if label[0] == "le")): each
            for (name, labels), each in said.items()
            if name.startswith(f"{theirs}_")
        }
        mine = {key: each for key, each in mine.items() if key[0] != "_created"}
        assert theirs_too == mine and mine["_count", ()] == 3


def test_the_memory_of_a_router_is_that_of_servers_that_decode_and_can_be_sent_work(
    router: tuple[CollectorRegistry, RouterMetrics],
) -> None:
    registry, _ = router
    assert value(registry, "vllm:kv_cache_usage_perc") == value(registry, "vllm:gpu_cache_usage_perc") == 12 / 20
    assert value(registry, "vllm:cache_config_info", block_size="16", num_gpu_blocks="80") == 1
    # max_tokens_in_pool says what one sequence may come to have, which is not how many blocks there are.
    longer = server("d2", Role.DECODE, 0)
    assert longer.hello is not None and longer.hello.prefix is not None
    hello = replace(longer.hello, max_tokens_in_pool=99, prefix=replace(longer.hello.prefix, page_tokens=32))
    assert pool_of(ClusterView((server("d0", Role.DECODE, 0), replace(longer, hello=hello)))) == Pool(0.0, 16, 120)
    silent = replace(longer, hello=replace(longer.hello, prefix=None))
    assert pool_of(ClusterView((silent,))) == Pool(0.0, 0, 40)
    assert pool_of(ClusterView(())) is None
    assert pool_of(ClusterView((server("p0", Role.PREFILL, 3),))) is None


def test_a_server_sums_what_vllm_does_not_tell_apart(of_engine: tuple[CollectorRegistry, EngineMetrics]) -> None:
    registry, metrics = of_engine
    metrics.preemptions.labels("memory").inc(2)
    metrics.preemptions.labels("age").inc(3)
    metrics.prefix_query_tokens.inc(50)
    metrics.prefix_hit_tokens.labels("gpu").inc(20)
    metrics.prefix_hit_tokens.labels("host").inc(5)
    assert value(registry, "vllm:num_preemptions_total") == 5
    assert value(registry, "vllm:prefix_cache_queries_total") == 50
    assert value(registry, "vllm:prefix_cache_hits_total") == 25
    assert value(registry, "vllm:kv_cache_usage_perc") == 0.25
    assert value(registry, "vllm:cache_config_info", block_size="16", num_gpu_blocks="80") == 1


@pytest.mark.parametrize(
    ("report", "blocks"),
    [
        (memory(FULL), 40),
        (memory(FULL, STATE), 40),
        (memory(FULL, WINDOW), 40),
        (memory(WINDOW, STATE), 20),
        (memory(FULL, replace(WINDOW, kind="full")), 13),  # a block is a page of each: 3/4 of a large page
        (memory(FULL, large_bytes=99), 0),
        (memory(replace(FULL, page_bytes=0)), 0),
        (memory(STATE), 0),
        (memory(), 0),
        (None, 0),
    ],
)
def test_blocks_are_what_the_pool_has_room_for(report: MemoryReport | None, blocks: int) -> None:
    assert blocks_of(LoadReport(ServerState.READY, 0, 0, 0, 10, 0, 10, report)) == blocks


def test_openmetrics_reads_them_too(router: tuple[CollectorRegistry, RouterMetrics]) -> None:
    text = openmetrics.generate_latest(router[0]).decode()
    names = {family.name for family in openmetrics_parser.text_string_to_metric_families(text)}
    assert {"vllm:prompt_tokens", "vllm:time_to_first_token_seconds", "vllm:request_success"} <= names


def test_no_pool_no_numbers_of_it() -> None:
    registry = CollectorRegistry()
    pools: list[Pool | None] = [None]
    sources = (Gauge("g", "g", registry=registry), Counter("c", "c", registry=registry))
    histogram = Histogram("h", "h", registry=registry)
    same = (Same("vllm:g", sources[0]), Same("vllm:c", sources[1]), Same("vllm:h", histogram))
    VllmNames(registry, "m", same, lambda: pools[0])
    assert not any("cache" in name for name, _ in samples(registry))
    pools[0] = Pool(0.5, 16, 10)
    assert value(registry, "vllm:kv_cache_usage_perc") == 0.5
