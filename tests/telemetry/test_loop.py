"""How long a loop stood still, and when that is said."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest
from prometheus_client import CollectorRegistry

from disagg.telemetry.loop import ALARM_S, SAY_EVERY_S, WINDOW_S, Gaps, LoopWatch


def test_the_longest_gap_of_late_is_kept_and_then_forgotten() -> None:
    gaps = Gaps(0.0)
    gaps.note(0.1, 0.05, 1.0)
    gaps.note(0.2, 0.9, 2.0)
    gaps.note(0.15, 0.0, 3.0)
    assert gaps.longest(4.0) == (0.2, 0.2)
    assert gaps.longest(WINDOW_S + 1) == (0.2, 0.2)
    assert gaps.longest(2 * WINDOW_S + 1) == (0.0, 0.0)
    gaps.note(0.1, 0.1, 10 * WINDOW_S)
    assert gaps.longest(11.5 * WINDOW_S) == (0.1, 0.1)


def test_a_gap_that_is_too_long_is_said_but_not_ten_times_a_second() -> None:
    gaps = Gaps(0.0)
    assert gaps.note(ALARM_S - 0.001, 1.0, 1.0) == ""
    assert "stood still for 0.500 s, in 0.300 s of which this process computed" in gaps.note(0.5, 0.3, 2.0)
    for tenth in range(20):
        assert gaps.note(0.5, 0.5, 2.0 + tenth / 10) == ""
    assert gaps.note(1.0, 1.0, 2.0 + SAY_EVERY_S).endswith("; 20 more since the last warning")
    assert gaps.take_alarms() == 22
    assert gaps.take_alarms() == 0


async def test_a_process_without_metrics_says_it_where_it_is_read() -> None:
    said: list[str] = []
    watch = LoopWatch(None, warn=said.append)
    watch.start()
    await asyncio.sleep(0)
    time.sleep(2 * ALARM_S)  # noqa: ASYNC251  the loop is held on purpose
    await asyncio.sleep(0.05)
    watch.stop()
    assert len(said) == 1 and "the event loop stood still" in said[0]


async def test_a_call_that_holds_the_loop_is_measured_and_said(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    watch = LoopWatch(registry)
    watch.start()
    await asyncio.sleep(0.05)
    until_s = time.process_time() + 2 * ALARM_S
    while time.process_time() < until_s:
        pass
    with caplog.at_level(logging.WARNING):
        await asyncio.sleep(0.05)
    watch.stop()
    assert (registry.get_sample_value("disagg_loop_longest_gap_seconds") or 0) > 1.5 * ALARM_S
    assert (registry.get_sample_value("disagg_loop_longest_hold_seconds") or 0) > 1.5 * ALARM_S
    assert (registry.get_sample_value("disagg_loop_alarms_total") or 0) >= 1
    assert "the event loop stood still" in caplog.text
