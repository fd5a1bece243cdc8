"""The channel: exactly once, in order, whatever the stream below it does, and everything in the end."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from disagg.messages.channel import Frame, ReliableChannel

RETRANSMIT_S = 0.5


class ChannelMachine(RuleBasedStateMachine):
    """Two ends, and two bags of frames in flight that may be lost, doubled, delayed and reordered."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = [ReliableChannel[int](RETRANSMIT_S) for _ in range(2)]
        self.flying: list[list[Frame[int]]] = [[], []]  # towards end 0, towards end 1
        self.pushed: list[list[int]] = [[], []]  # by sender
        self.taken: list[list[int]] = [[], []]  # by receiver
        self.now_s = 0.0
        self.next_message = 0

    sides = st.integers(0, 1)

    @rule(side=sides, count=st.integers(0, 3))
    def push(self, side: int, count: int) -> None:
        messages = tuple(range(self.next_message, self.next_message + count))
        self.next_message += count
        self.pushed[side] += messages
        self.flying[1 - side].append(self.ends[side].push(messages, self.now_s))

    @rule(side=sides)
    def acknowledge(self, side: int) -> None:
        self.flying[1 - side].append(self.ends[side].ack_frame())
        assert not self.ends[side].ack_owed

    @rule(seconds=st.floats(0, 1), side=sides)
    def repeat_what_is_overdue(self, seconds: float, side: int) -> None:
        self.now_s += seconds
        self.flying[1 - side] += self.ends[side].overdue(self.now_s)

    @precondition(lambda self: self.flying[0] or self.flying[1])
    @rule(data=st.data(), lost=st.booleans(), doubled=st.booleans())
    def something_happens_to_a_frame(self, data: st.DataObject, lost: bool, doubled: bool) -> None:
        side = data.draw(st.sampled_from([s for s in range(2) if self.flying[s]]))
        index = data.draw(st.integers(0, len(self.flying[side]) - 1))
        frame = self.flying[side][index]
        if not doubled:
            del self.flying[side][index]
        if not lost or doubled:
            self.deliver(side, frame)

    def deliver(self, side: int, frame: Frame[int]) -> None:
        self.taken[side] += self.ends[side].take(frame, self.now_s)
        if frame.number:
            assert self.ends[side].ack_owed

    @rule()
    def the_stream_breaks_and_is_made_again(self) -> None:
        """Everything in flight is lost. Each side says what it has; each repeats the rest."""
        self.flying = [[], []]
        for side in range(2):
            greeting = Frame[int](number=0, ack=self.ends[1 - side].received, messages=())
            assert self.ends[side].take(greeting, self.now_s) == ()
            self.flying[1 - side] += self.ends[side].repeat(self.now_s)

    @invariant()
    def what_arrived_is_a_prefix_of_what_was_sent(self) -> None:
        for side in range(2):
            assert self.taken[side] == self.pushed[1 - side][: len(self.taken[side])]

    def teardown(self) -> None:
        """A fair stream from here on: everything arrives, everything is acknowledged."""
        for _ in range(4):
            for side in range(2):
                for frame in self.flying[side]:
                    self.deliver(side, frame)
                self.flying[side] = []
            self.now_s += RETRANSMIT_S
            for side in range(2):
                self.flying[1 - side] += [*self.ends[side].overdue(self.now_s), self.ends[side].ack_frame()]
        for side in range(2):
            assert self.taken[side] == self.pushed[1 - side]
            assert self.ends[side].unacked == 0


TestChannel = ChannelMachine.TestCase
TestChannel.settings = settings(max_examples=80, stateful_step_count=40, deadline=None, derandomize=True)


def test_nothing_is_repeated_before_it_is_overdue() -> None:
    channel = ReliableChannel[str](RETRANSMIT_S)
    assert channel.overdue(100.0) == ()
    frame = channel.push(("a",), 100.0)
    assert channel.overdue(100.4) == ()
    assert channel.overdue(100.5) == (frame,)
    assert channel.overdue(100.6) == (), "it was just repeated"


def test_a_repetition_carries_the_acknowledgement_of_now() -> None:
    ours, theirs = ReliableChannel[str](), ReliableChannel[str]()
    ours.push(("a",), 0.0)
    ours.take(theirs.push(("b",), 0.0), 0.0)
    (frame,) = ours.repeat(1.0)
    assert frame == Frame(number=1, ack=1, messages=("a",))


def test_an_acknowledgement_of_what_was_never_sent_frees_nothing_later() -> None:
    channel = ReliableChannel[str]()
    channel.push(("a",), 0.0)
    channel.take(Frame(number=0, ack=99, messages=()), 0.0)
    assert channel.unacked == 0
    channel.push(("b",), 0.0)
    assert channel.unacked == 1
