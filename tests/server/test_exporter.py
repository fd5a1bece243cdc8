"""An engine's counts in Prometheus: sums that never go back, also when another incarnation counts from zero."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from disagg.config.tree import Config
from disagg.engine.instructions import Counters
from disagg.messages.legs import GroupMemory, HostMemory, LoadReport, MemoryReport, ServerState, StorageState
from disagg.messages.tiers import CopiedIn, CopiedOut, PartsRead, PartsWritten
from disagg.offload.causes import Cause
from disagg.server.exporter import Exporter
from disagg.server.offloading import Offloading
from disagg.telemetry.metrics import EngineMetrics

MEMORY = MemoryReport("lcm", 4096, 10, 20, 34, 512, (GroupMemory("full", "full", 1024, 1, 2, 3),))
LOAD = LoadReport(ServerState.READY, 2, 1, 34, 10, 20, 64, MEMORY)
LOADING = LoadReport(ServerState.LOADING, 0, 0, 0, 0, 0, 0)


class FakeEngine:
    """What an exporter reads of an engine."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.ranks = [self]

    def arena_bytes(self) -> tuple[int, int, int]:
        return (1, 2, 3)

    def parked(self, now_s: float) -> tuple[int, float]:
        return (0, 0.0)


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
    counters = engine.counters
    counters.query_tokens, counters.hit_tokens, counters.recomputed_tokens = 100, 60, 7
    counters.evictions["full"], counters.evictions["window-512"] = 3, 0
    counters.preemptions["age"] += 2
    counters.observe("run_pages", 12.0)
    exported.export(engine)
    assert exported.value("disagg_prefix_query_tokens_total") == 100
    assert exported.value("disagg_prefix_hit_tokens_total", tier="gpu") == 60
    assert exported.value("disagg_recomputed_tokens_total") == 7
    assert exported.value("disagg_kv_evictions_total", group="full") == 3
    assert exported.value("disagg_kv_evictions_total", group="window-512") == 0
    assert exported.value("disagg_preemptions_total", reason="age") == 2
    assert exported.value("disagg_preemptions_total", reason="memory") == 0
    assert exported.value("disagg_kv_run_pages_sum") == 12


def test_passes_in_which_prompts_wait_are_exported_by_what_came_of_them() -> None:
    exported, engine = Exported(), FakeEngine()
    counters = engine.counters
    counters.prefill_delays["all", False, "delay", False] += 5
    counters.prefill_delays["all", True, "wait_timeout", True] += 1
    counters.observe("prefill_delay_passes", 5)
    counters.observe("prefill_delay_seconds", 0.25)
    for _ in range(2):  # none is counted twice
        exported.export(engine)
    name = "disagg_prefill_delay_outcomes_total"
    waited = {"estimate": "all", "allow": "false", "reason": "delay", "executed": "false"}
    assert exported.value(name, **waited) == 5
    ran = {"estimate": "all", "allow": "true", "reason": "wait_timeout", "executed": "true"}
    assert exported.value(name, **ran) == 1
    assert exported.value("disagg_prefill_delay_passes_sum") == 5
    assert exported.value("disagg_prefill_delay_seconds_sum") == 0.25
    exported.exporter.retire(counters)
    again = FakeEngine()
    again.counters.prefill_delays["all", False, "delay", False] += 2
    exported.export(again)
    assert exported.value(name, **waited) == 7


def test_the_pool_is_that_of_the_load_report_and_gone_with_it() -> None:
    exported, engine = Exported(), FakeEngine()
    exported.export(engine)
    states = ("free", "evictable", "used")
    assert [exported.value("disagg_kv_large_pages", state=state) for state in states] == [10, 20, 34]
    assert exported.value("disagg_kv_bytes", group="full", state="used") == 3072
    exported.export(None, LOADING)
    assert [exported.value("disagg_kv_large_pages", state=state) for state in states] == [0, 0, 0]
    assert exported.value("disagg_kv_pages", group="full", state="used") is None


def test_the_host_pool_is_that_of_the_load_report() -> None:
    exported = Exported()
    with_host = replace(LOAD, memory=replace(MEMORY, host=HostMemory(30, 128, 128 * 4096)))
    for load, pages in ((with_host, [30, 98]), (LOAD, [0, 0])):
        exported.export(FakeEngine(), load)
        assert [exported.value("disagg_host_pages", state=state) for state in ("used", "empty")] == pages


def test_what_tiers_did_is_exported_by_tier_and_cause() -> None:
    exported, offloading = Exported(), Offloading(Config())
    sums = offloading.sums
    for report in (CopiedOut(1, 100, 0.5), CopiedOut(2, 50, 0.25), CopiedIn(1, 7, 0.1), PartsRead(1, "", 9, 1.0)):
        sums.count(report)
    sums.count(PartsWritten(1, "", (), 11, 2.0))
    sums.misses[Cause.CORRUPT] += 2
    sums.published_pages, sums.duplicate_pages, sums.failures = 5, 3, 1
    for _ in range(2):  # sums are not added twice
        exported.exporter.export_tiers(offloading)
    moved = [("host", "out", 150, 0.75), ("host", "in", 7, 0.1), ("storage", "out", 11, 2.0), ("storage", "in", 9, 1.0)]
    for tier, direction, nbytes, seconds in moved:
        assert exported.value("disagg_tier_bytes_total", tier=tier, direction=direction) == nbytes
        assert exported.value("disagg_tier_seconds_total", tier=tier, direction=direction) == seconds
    assert exported.value("disagg_store_misses_total", cause="corrupt") == 2
    assert exported.value("disagg_store_published_pages_total") == 5
    assert exported.value("disagg_store_duplicate_pages_total") == 3
    assert exported.value("disagg_store_failures_total") == 1
    assert exported.value("disagg_store_up") == 1


def test_a_store_that_fails_is_not_up(monkeypatch: pytest.MonkeyPatch) -> None:
    exported, offloading = Exported(), Offloading(Config())
    monkeypatch.setattr(Offloading, "state", StorageState.DEGRADED)
    exported.exporter.export_tiers(offloading)
    assert exported.value("disagg_store_up") == 0


def test_counters_go_on_when_another_incarnation_begins_at_zero() -> None:
    exported, engine = Exported(), FakeEngine()
    engine.counters.hit_tokens, engine.counters.evictions["full"] = 5, 2
    exported.export(engine)
    engine.counters.hit_tokens = 8
    exported.exporter.retire(engine.counters)
    again = FakeEngine()
    again.counters.hit_tokens, again.counters.evictions["full"] = 4, 1
    exported.export(again)
    assert exported.value("disagg_prefix_hit_tokens_total", tier="gpu") == 12
    assert exported.value("disagg_kv_evictions_total", group="full") == 3


def test_what_was_loaded_in_vain_is_told_from_what_was_found() -> None:
    exported, engine = Exported(), FakeEngine()
    engine.counters.loaded_tokens["storage"], engine.counters.brought_tokens["storage"] = 48, 16
    exported.export(engine)
    assert exported.value("disagg_prefix_loaded_tokens_total", tier="storage") == 48
    assert exported.value("disagg_prefix_hit_tokens_total", tier="storage") == 16


def test_what_was_not_loaded_is_counted_by_why() -> None:
    exported, engine = Exported(), FakeEngine()
    engine.counters.loads_left = {"slower": 3, "late": 1}
    exported.export(engine)
    assert exported.value("disagg_prefix_loads_left_total", why="slower") == 3
    assert exported.value("disagg_prefix_loads_left_total", why="late") == 1


def test_what_is_observed_is_counted_once() -> None:
    exported, engine = Exported(), FakeEngine()
    engine.counters.observe("step", 0.5)
    exported.export(engine)
    exported.export(engine)
    assert exported.value("disagg_step_seconds_count") == 1


def test_data_parallel_ranks_are_counted_together() -> None:
    exported, engine, other = Exported(), FakeEngine(), FakeEngine()
    engine.ranks.append(other)
    for round_no in (1, 2):
        engine.counters.decode_tokens, other.counters.decode_tokens = 10 * round_no, 3
        engine.counters.max_steps_after_abort = 2
        exported.export(engine)
        assert exported.value("disagg_decode_tokens_total") == 10 * round_no + 3
    assert exported.value("disagg_steps_after_abort") == 2
    exported.exporter.retire(engine.counters, other.counters)
    again = FakeEngine()
    again.ranks.append(FakeEngine())
    again.ranks[1].counters.decode_tokens = 4
    exported.export(again)
    assert exported.value("disagg_decode_tokens_total") == 27
