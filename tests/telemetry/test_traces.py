"""Spans on their way: bounded, counted, never waited for; and delivered to a real receiver with the official exporters."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from disagg.messages.legs import TimelineEvent
from disagg.telemetry.traces import (
    MANY,
    OtlpTraces,
    Span,
    TraceMetrics,
    Traces,
    open_traces,
    read_endpoint,
    spans_of,
)
from disagg.types.errors import ConfigError
from disagg.types.trace_context import TraceContext

CONTEXT = TraceContext("ab" * 16, "cd" * 8, True)


def span(name: str = "s", **more: object) -> Span:
    fields = {"name": name, "context": CONTEXT, "parent_span_id": "", "start_unix_s": 1.5, "end_unix_s": 2.0}
    return Span(**{**fields, **more})  # type: ignore[arg-type]


def counted(registry: CollectorRegistry) -> dict[str, float]:
    outcomes = ("delivered", "dropped", "failed")
    return {each: registry.get_sample_value("disagg_trace_spans_total", {"outcome": each}) or 0.0 for each in outcomes}


def test_a_collector_that_hangs_costs_nothing_but_dropped_spans() -> None:
    registry = CollectorRegistry()
    held, go_on = threading.Event(), threading.Event()

    def export(batch: Sequence[Span]) -> bool:
        held.set()
        return go_on.wait(60)

    traces = OtlpTraces(1.0, TraceMetrics(registry), export, max_queued=10)
    traces.put([span()])
    assert held.wait(60)
    traces.put([span() for _ in range(25)])  # comes back at once: nobody takes any
    assert counted(registry)["dropped"] == 15
    go_on.set()
    traces.close()
    assert counted(registry) == {"delivered": 11, "dropped": 15, "failed": 0}


def test_what_a_collector_refuses_or_breaks_on_is_counted_and_the_rest_goes_on() -> None:
    registry = CollectorRegistry()
    answers: list[bool | Exception] = [False, RuntimeError("broken"), True]

    def export(batch: Sequence[Span]) -> bool:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    traces = OtlpTraces(1.0, TraceMetrics(registry), export)
    for number in range(3):
        traces.put([span()] * (number + 1))
        while sum(counted(registry).values()) < (1, 3, 6)[number]:
            threading.Event().wait(0.01)
    traces.close()
    assert counted(registry) == {"delivered": 3, "dropped": 0, "failed": 3}


def test_without_an_endpoint_nothing_is_traced_and_nothing_is_needed() -> None:
    traces = open_traces("", 1.0, CollectorRegistry(), "router")
    assert type(traces) is Traces and traces.begin(CONTEXT.traceparent) is None
    traces.put([span()])
    traces.close()


@pytest.mark.parametrize(
    ("endpoint", "found"),
    [
        ("collector:4317", ("grpc", "collector:4317", False)),
        ("grpc://collector", ("grpc", "collector:4317", False)),
        ("grpcs://[::1]:9", ("grpc", "[::1]:9", True)),
        ("http://collector:4317", ("grpc", "collector:4317", False)),
        ("http://collector:4318", ("http", "http://collector:4318/v1/traces", False)),
        ("http://collector:4318/", ("http", "http://collector:4318/v1/traces", False)),
        ("https://collector/otlp/v1/traces", ("http", "https://collector/otlp/v1/traces", True)),
    ],
)
def test_an_endpoint_says_what_is_spoken_there(endpoint: str, found: tuple[str, str, bool]) -> None:
    assert read_endpoint(endpoint) == found


@pytest.mark.parametrize(
    "endpoint",
    [
        "foo",
        "foo:",
        ":4317",
        "a b:4317",
        "foo:4317/v1",
        "http://a b:1",
        "ftp://x:1",
        "http://",
        "http://x:99999",
        "http://me:secret@x:1",
        "http://x:1?key=secret",
        "://",
        "http://[x",
    ],
)
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"tracing\.otlp_endpoint") as raised:
        open_traces(endpoint, 1.0, CollectorRegistry(), "router")
    assert "secret" not in str(raised.value)


EVENTS = st.builds(TimelineEvent, st.sampled_from("abcq"), st.floats(0, 1e9), st.floats(0, 1e9), st.text(max_size=5))


@given(st.lists(EVENTS, max_size=100))
def test_a_timeline_becomes_children_with_ids_of_their_own_and_of_many_events_one(events: list[TimelineEvent]) -> None:
    spans = spans_of(events, CONTEXT, {"q": "queue"})
    assert len({each.context.span_id for each in spans}) == len(spans)
    assert all(each.parent_span_id == CONTEXT.span_id and each.context.trace_id == CONTEXT.trace_id for each in spans)
    assert all(each.end_unix_s >= each.start_unix_s for each in spans)
    for name in "abcq":
        same = [event for event in events if event.name == name]
        mine = [each for each in spans if each.name == ("queue" if name == "q" else name)]
        assert len(mine) == (1 if len(same) > MANY else len(same))
        assert sum(int(str(each.attributes.get("disagg.count", 1))) for each in mine) == len(same)
        assert min((e.start_unix_s for e in mine), default=0) == min((e.start_unix_s for e in same), default=0)


@pytest.mark.parametrize("way", ["over_http", "over_grpc"])
def test_spans_arrive_as_they_were_put(way: str) -> None:
    pytest.importorskip("opentelemetry.proto", reason="the extra `tracing` is not installed")
    pytest.importorskip("opentelemetry.sdk", reason="the extra `tracing` is not installed")
    from tests.telemetry import otlp_receiver

    registry = CollectorRegistry()
    with getattr(otlp_receiver, way)() as receiver:
        traces = open_traces(receiver.endpoint, 1.0, registry, "router-1")
        attributes = {
            "gen_ai.usage.input_tokens": 7,
            "gen_ai.response.finish_reasons": ("stop", "length"),
            "t": "x" * 5000,
        }
        traces.put(
            [span("whole", kind="server", attributes=attributes), span("part", parent_span_id="ef" * 8, error="e")]
        )
        whole, part = receiver.wait(lambda spans: len(spans) == 2)
        traces.close()
    assert (whole.process, whole.name, whole.trace_id, whole.span_id) == ("router-1", "whole", "ab" * 16, "cd" * 8)
    assert (whole.start_ns, whole.end_ns, whole.kind, whole.parent_id) == (1_500_000_000, 2_000_000_000, 2, "")
    assert whole.attributes["gen_ai.usage.input_tokens"] == 7 and len(whole.attributes["t"]) == 1024
    assert whole.attributes["gen_ai.response.finish_reasons"] == ["stop", "length"]
    assert part.parent_id == "ef" * 8 and part.failed and not whole.failed
    assert counted(registry)["delivered"] == 2
