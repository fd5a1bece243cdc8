"""The staging machine finds nothing wrong with arena, rings and sessions, and finds what is broken in them on purpose."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from disagg.engine.handoff.ring_table import LinkRing
from disagg.staging.ring import RingEntry, RingWriterView
from disagg.types.ids import LegKey
from tests.transfer.staging_machine import Staging


def campaign(examples: int, *, shrink: bool = True) -> settings:
    phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)
    return settings(
        max_examples=examples,
        stateful_step_count=60,
        derandomize=True,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.parametrize(
    ("examples", "steps"),
    [
        pytest.param(22, 500, marks=pytest.mark.short),
        pytest.param(110, 5_000, marks=pytest.mark.long),
        pytest.param(1_100, 50_000, marks=pytest.mark.slow),
    ],
)
def test_no_live_byte_is_overwritten_every_transfer_ends_and_nothing_leaks(examples: int, steps: int) -> None:
    """What hypothesis draws depends on which modules are loaded: where the examples were short, more are run."""
    for factor in (1, 2, 4):
        Staging.steps = 0
        run_state_machine_as_test(Staging, settings=campaign(factor * examples))
        if Staging.steps >= steps:
            break
    assert Staging.steps >= steps


def _writes_at_once(view: RingWriterView, entry: RingEntry) -> bool:
    return True


def _forgets(ring: LinkRing, key: LegKey) -> None:
    """An abort drops the leg, and leaves its entries."""


def _never_asks(ring: LinkRing, now_s: float) -> tuple[int, ...]:
    """The entry of a lost notification pins the watermark of a full ring, and SentAll never comes."""
    return ()


@pytest.mark.parametrize(
    ("owner", "method", "broken", "failure"),
    [
        (RingWriterView, "may_write", _writes_at_once, "overw"),
        (LinkRing, "free_leg", _forgets, "is left"),
        (LinkRing, "doubtful", _never_asks, "never ends"),  # only some of many find it
    ],
    ids=["the watermark is not looked at", "an abort leaks", "a lost notification is never noticed"],
)
def test_what_is_broken_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, broken: Callable[..., object], failure: str
) -> None:
    monkeypatch.setattr(owner, method, broken)

    def search() -> None:
        for examples in (400, 1600):
            run_state_machine_as_test(Staging, settings=campaign(examples, shrink=False))

    with pytest.raises(AssertionError, match=failure):
        search()
