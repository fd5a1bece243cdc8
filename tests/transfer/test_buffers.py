"""Gather buffers are never lost and never held twice, and no frozen peer keeps a live one from writing."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from disagg.transfer.buffers import GatherBuffers

COUNT, OVERDUE_S = 6, 1.0
LIVE, FROZEN = "live", ("frozen 1", "frozen 2")
PEERS = (LIVE, *FROZEN)


class BuffersMachine(RuleBasedStateMachine):
    """Two of three peers never give a buffer back once they are frozen; `live` always does."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers = GatherBuffers(COUNT, OVERDUE_S)
        self.held: dict[int, tuple[str, float]] = {}
        self.now_s = 10.0

    @rule(peer=st.sampled_from(PEERS))
    def takes_what_it_may(self, peer: str) -> None:
        if self.buffers.may_take(peer, len(PEERS), self.now_s):
            buffer = self.buffers.take(peer, self.now_s)
            assert buffer not in self.held
            self.held[buffer] = (peer, self.now_s)

    @rule(pick=st.integers(0))
    def the_live_one_gives_back(self, pick: int) -> None:
        mine = [buffer for buffer, (peer, _) in self.held.items() if peer == LIVE]
        if mine:
            buffer = mine[pick % len(mine)]
            del self.held[buffer]
            self.buffers.give_back(buffer, self.now_s)

    @rule(seconds=st.sampled_from([0.001, 0.3, OVERDUE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(peer=st.sampled_from(PEERS))
    def is_forgotten(self, peer: str) -> None:
        self.buffers.forget(peer)

    @precondition(lambda self: not any(peer == LIVE for peer, _ in self.held.values()))
    @invariant()
    def the_live_one_may_always_have_one(self) -> None:
        assert self.buffers.may_take(LIVE, len(PEERS), self.now_s)

    @invariant()
    def the_books_are_right(self) -> None:
        self.buffers.check_integrity()
        for peer in PEERS:
            mine = [since_s for holder, since_s in self.held.values() if holder == peer]
            assert self.buffers.held(peer) == len(mine) <= COUNT // 2
            overdue = bool(mine) and self.now_s - min(mine) >= OVERDUE_S
            assert self.buffers.overdue(peer, self.now_s) == overdue
            assert not (overdue and self.buffers.may_take(peer, len(PEERS), self.now_s))


def test_whatever_peers_do_the_live_one_may_have_a_buffer() -> None:
    campaign = settings(derandomize=True, deadline=None, database=None, max_examples=150, stateful_step_count=40)
    run_state_machine_as_test(BuffersMachine, settings=campaign)


def test_a_peer_that_is_alone_may_have_every_buffer() -> None:
    buffers = GatherBuffers(2)
    for _ in range(2):
        assert buffers.may_take(LIVE, 1, 0.0)
        buffers.take(LIVE, 0.0)
    assert not buffers.may_take(LIVE, 1, 0.0) and buffers.held(LIVE) == 2
