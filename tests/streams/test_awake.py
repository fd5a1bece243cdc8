"""Who stood still first reads what came meanwhile, and then calls others silent."""

from __future__ import annotations

from disagg.streams.awake import READ_S, STILL_S, Awake
from disagg.streams.state import Queue, StreamState, Verdict
from tests.streams.test_state import LEASE_S


def test_who_looks_as_often_as_it_should_believes_what_it_hears() -> None:
    awake = Awake(0.0)
    assert all(awake.look(at / 10) for at in range(100))
    assert awake.look(9.9 + STILL_S), "late, but not for long"


def test_who_stood_still_has_time_to_read_each_time() -> None:
    awake = Awake(0.0)
    assert awake.look(0.0)
    for woke_s in (30.0, 33.0, 100.0):
        assert not awake.look(woke_s)
        assert not awake.look(woke_s + 0.5)
    for tenth in range(5, round(10 * READ_S)):
        assert not awake.look(100.0 + tenth / 10)
    assert awake.look(100.0 + READ_S)


def test_silence_is_no_verdict_of_one_who_could_not_hear() -> None:
    state: StreamState[int, int] = StreamState(Queue(lambda message: 0), 1.0, 10, 0.0)
    assert state.verdict(LEASE_S, LEASE_S + 1, awake=False) is None
    assert state.verdict(LEASE_S, LEASE_S + 1) is Verdict.SILENT
