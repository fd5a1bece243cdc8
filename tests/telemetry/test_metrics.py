"""Metrics have unique, prefixed names and add up when set."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from disagg.messages.legs import GroupMemory, MemoryReport
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


def memory() -> MemoryReport:
    full = GroupMemory("full", "full", 100, empty_pages=1, evictable_pages=2, used_pages=3)
    window = GroupMemory("window_512", "window", 40, empty_pages=0, evictable_pages=5, used_pages=10)
    return MemoryReport("lcm", 200, 4, 5, 6, 148, (full, window))


def samples(registry: CollectorRegistry, name: str) -> dict[str, float]:
    """Values of a gauge by its labels' values, joined."""
    [family] = [family for family in registry.collect() if family.name == name]
    return {" ".join(sample.labels.values()): sample.value for sample in family.samples}


def test_the_pool_is_set_by_group_and_state() -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry)
    metrics.set_memory(memory())
    assert samples(registry, "disagg_kv_large_pages") == {"free": 4, "evictable": 5, "used": 6}
    pages = {"full empty": 1, "full evictable": 2, "full used": 3}
    pages |= {"window_512 empty": 0, "window_512 evictable": 5, "window_512 used": 10}
    assert samples(registry, "disagg_kv_pages") == pages
    page_bytes = {"full": 100, "window_512": 40}
    assert samples(registry, "disagg_kv_bytes") == {
        labels: count * page_bytes[labels.partition(" ")[0]] for labels, count in pages.items()
    }
    assert registry.get_sample_value("disagg_kv_fragmentation_bytes") == 148


def test_a_pool_that_is_gone_leaves_no_pages_behind() -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry)
    metrics.set_memory(memory())
    metrics.set_memory(None)
    assert samples(registry, "disagg_kv_large_pages") == {"free": 0, "evictable": 0, "used": 0}
    assert samples(registry, "disagg_kv_pages") == samples(registry, "disagg_kv_bytes") == {}
    assert registry.get_sample_value("disagg_kv_fragmentation_bytes") == 0


def test_the_arena_is_set_by_state() -> None:
    registry = CollectorRegistry()
    EngineMetrics(registry).set_arena(free_bytes=10, leased_bytes=20, quarantined_bytes=30)
    assert samples(registry, "disagg_arena_bytes") == {"free": 10, "leased": 20, "quarantined": 30}


def test_counters_by_reason_are_there_once_counted() -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry)
    metrics.legs.labels("done").inc()
    metrics.transfer_failures.labels("progress").inc()
    metrics.transfer_bytes.labels("sent").inc(4096)
    assert registry.get_sample_value("disagg_legs_total", {"outcome": "done"}) == 1
    assert registry.get_sample_value("disagg_transfer_failures_total", {"reason": "progress"}) == 1
    assert registry.get_sample_value("disagg_transfer_payload_bytes_total", {"direction": "sent"}) == 4096
