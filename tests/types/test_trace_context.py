"""Trace context as W3C writes it, and which requests are traced."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.types.trace_context import MAX_CHARS, TraceContext, begun, read_traceparent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_traceparent_is_read() -> None:
    assert read_traceparent(f"00-{TRACE}-{SPAN}-01") == TraceContext(TRACE, SPAN, True)
    assert read_traceparent(f" 00-{TRACE}-{SPAN}-00 ") == TraceContext(TRACE, SPAN, False)
    assert read_traceparent(f"01-{TRACE}-{SPAN}-03-more") == TraceContext(TRACE, SPAN, True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}",
        f"01-{TRACE}-{SPAN}-01-" + "x" * MAX_CHARS,
    ],
)
def test_nonsense_is_none(text: str) -> None:
    assert read_traceparent(text) is None


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=8, max_size=8), st.booleans())
def test_what_is_written_is_read_again(trace: bytes, span: bytes, sampled: bool) -> None:
    context = TraceContext(trace.hex(), span.hex(), sampled)
    assert read_traceparent(context.traceparent) == (context if any(trace) and any(span) else None)


@given(st.text(max_size=80))
def test_any_text_may_come(text: str) -> None:
    read_traceparent(text)


@given(st.floats(0, 1), st.integers())
def test_a_clients_word_counts_and_its_trace_goes_on(ratio: float, seed: int) -> None:
    draw = random.Random(seed).randbytes
    mine = begun(f"00-{TRACE}-{SPAN}-01", ratio, draw)
    assert mine is not None and mine.trace_id == TRACE and mine.span_id != SPAN and mine.sampled
    assert begun(f"00-{TRACE}-{SPAN}-00", ratio, draw) is None


def test_of_other_requests_as_many_are_traced_as_are_asked_for() -> None:
    draw = random.Random(1).randbytes
    assert all(begun("", 1.0, draw) for _ in range(100)) and not any(begun("nonsense", 0.0, draw) for _ in range(100))
    assert 200 < sum(begun("", 0.25, draw) is not None for _ in range(1000)) < 300
    assert begun("", 1.0, lambda size: b"\0" * size) == TraceContext("01" * 16, "01" * 8, True)
