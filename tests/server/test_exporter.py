"""An engine's counts in Prometheus: sums that never go back, also when another incarnation counts from zero."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry

from disagg.engine.instructions import Tally
from disagg.messages.legs import GroupMemory, LoadReport, MemoryReport, ServerState
from disagg.server.exporter import Exporter
from disagg.telemetry.metrics import EngineMetrics

MEMORY = MemoryReport("lcm", 4096, 10, 20, 34, 512, (GroupMemory("full", "full", 1024, 1, 2, 3),))
LOAD = LoadReport(ServerState.READY, 2, 1, 34, 10, 20, 64, MEMORY)
LOADING = LoadReport(ServerState.LOADING, 0, 0, 0, 0, 0, 0)


class FakeEngine:
    """What an exporter reads of an engine."""

    def __init__(self) -> None:
        self.tally = Tally()

    def arena_bytes(self) -> tuple[int, int, int]:
        return (1, 2, 3)


class Exported:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.exporter = Exporter(EngineMetrics(self.registry), self.registry)

    def export(self, engine: Any, load: LoadReport = LOAD) -> None:
        self.exporter.export(engine, load, token_frames=4, router_expiries=0, link_expiries=0)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


def test_what_memory_counts_is_exported_by_its_labels() -> None:
    exported, engine = Exported(), FakeEngine()
    tally = engine.tally
    tally.query_tokens, tally.hit_tokens, tally.recomputed_tokens = 100, 60, 7
    tally.evictions["full"], tally.evictions["window-512"] = 3, 0
    tally.preemptions["age"] += 2
    tally.observe("run_pages", 12.0)
    exported.export(engine)
    assert exported.value("disagg_prefix_query_tokens_total") == 100
    assert exported.value("disagg_prefix_hit_tokens_total", tier="gpu") == 60
    assert exported.value("disagg_recomputed_tokens_total") == 7
    assert exported.value("disagg_kv_evictions_total", group="full") == 3
    assert exported.value("disagg_kv_evictions_total", group="window-512") == 0
    assert exported.value("disagg_preemptions_total", reason="age") == 2
    assert exported.value("disagg_preemptions_total", reason="memory") == 0
    assert exported.value("disagg_kv_run_pages_sum") == 12


def test_the_pool_is_that_of_the_load_report_and_gone_with_it() -> None:
    exported, engine = Exported(), FakeEngine()
    exported.export(engine)
    states = ("free", "evictable", "used")
    assert [exported.value("disagg_kv_large_pages", state=state) for state in states] == [10, 20, 34]
    assert exported.value("disagg_kv_bytes", group="full", state="used") == 3072
    exported.export(None, LOADING)
    assert [exported.value("disagg_kv_large_pages", state=state) for state in states] == [0, 0, 0]
    assert exported.value("disagg_kv_pages", group="full", state="used") is None


def test_counters_go_on_when_another_incarnation_begins_at_zero() -> None:
    exported, engine = Exported(), FakeEngine()
    engine.tally.hit_tokens, engine.tally.evictions["full"] = 5, 2
    exported.export(engine)
    engine.tally.hit_tokens = 8
    exported.exporter.retire(engine.tally)
    again = FakeEngine()
    again.tally.hit_tokens, again.tally.evictions["full"] = 4, 1
    exported.export(again)
    assert exported.value("disagg_prefix_hit_tokens_total", tier="gpu") == 12
    assert exported.value("disagg_kv_evictions_total", group="full") == 3


def test_what_is_observed_is_counted_once() -> None:
    exported, engine = Exported(), FakeEngine()
    engine.tally.observe("step", 0.5)
    exported.export(engine)
    exported.export(engine)
    assert exported.value("disagg_step_seconds_count") == 1
