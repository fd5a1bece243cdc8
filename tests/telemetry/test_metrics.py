"""Metrics have unique, prefixed names and add up when set."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from disagg.telemetry.metrics import EngineMetrics, new_registry


def test_every_name_starts_with_our_prefix() -> None:
    registry = CollectorRegistry()
    EngineMetrics(registry)
    names = [family.name for family in registry.collect()]
    assert names
    assert all(name.startswith("disagg_") for name in names)


def test_a_registry_shows_the_process_beside_our_metrics() -> None:
    registry = new_registry()
    EngineMetrics(registry)
    assert b"process_resident_memory_bytes" in generate_latest(registry)


def test_two_processes_in_one_test_do_not_share_counts() -> None:
    one, other = EngineMetrics(CollectorRegistry()), CollectorRegistry()
    EngineMetrics(other)
    one.decode_tokens.inc(3)
    assert other.get_sample_value("disagg_decode_tokens_total") == 0


def test_pages_and_arena_are_set_by_state() -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry)
    metrics.set_pages(free=5, used=3, evictable=2, quarantined=0)
    metrics.set_arena(free_bytes=10, leased_bytes=20, quarantined_bytes=30)
    pages = [registry.get_sample_value("disagg_kv_pages", {"state": state}) for state in ("free", "used", "evictable")]
    assert pages == [5, 3, 2]
    assert registry.get_sample_value("disagg_arena_bytes", {"state": "quarantined"}) == 30


def test_counters_by_reason_are_there_once_counted() -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry)
    metrics.legs.labels("done").inc()
    metrics.transfer_failures.labels("progress").inc()
    metrics.transfer_bytes.labels("sent").inc(4096)
    assert registry.get_sample_value("disagg_legs_total", {"outcome": "done"}) == 1
    assert registry.get_sample_value("disagg_transfer_failures_total", {"reason": "progress"}) == 1
    assert registry.get_sample_value("disagg_transfer_payload_bytes_total", {"direction": "sent"}) == 4096
