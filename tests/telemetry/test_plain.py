"""Plain metrics, by the library's own: what is scraped must be the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from disagg.telemetry.plain import PlainCounter, PlainCounts, PlainHistogram

BOUNDS = (0.001, 0.5, 1.0, 5.0)


def scraped(registry: CollectorRegistry) -> list[str]:
    """Without when a series began, which is not said of plain ones."""
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.001, 0.4, 0.5, 2.0, 5.0, 7.0]), st.integers(1, 3)), max_size=20))
def test_a_plain_histogram_says_what_another_one_says(observed: list[tuple[float, int]]) -> None:
    usual, plain = CollectorRegistry(), CollectorRegistry()
    theirs, ours = (
        Histogram("h", "Help", buckets=BOUNDS, registry=usual),
        PlainHistogram("h", "Help", BOUNDS, plain),
    )
    for value, times in observed:
        ours.observe(value, times)
        for _ in range(times):
            theirs.observe(value)
    for line, other in zip(scraped(plain), scraped(usual), strict=True):
        name, _, value = line.rpartition(" ")
        other_name, _, other_value = other.rpartition(" ")
        assert name == other_name
        assert value == other_value if line.startswith("#") else float(value) == pytest.approx(float(other_value))


def test_plain_counters_say_what_others_say() -> None:
    usual, plain = CollectorRegistry(), CollectorRegistry()
    Counter("c", "Help", registry=usual).inc(3)
    by_label = Counter("l", "Help", ["server"], registry=usual)
    by_label.labels("a").inc()
    by_label.labels('b "quoted"').inc(2)
    PlainCounter("c", "Help", plain).value += 3
    PlainCounts("l", "Help", "server", plain).values.update({"a": 1, 'b "quoted"': 2})
    assert scraped(plain) == scraped(usual)
