"""Two ends of one stream over connections that break, are made again, lose, repeat and reorder what they carry."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from disagg.messages.channel import FRAME_MESSAGES, Frame
from disagg.streams import state
from disagg.streams.state import ACK_DELAY_S, Queue, StreamState, Verdict, frame_length

HEARTBEAT_S = 1.0
LEASE_S = 3.0
MAX_KEPT = 40
FRAME_SIZE = 4
RETRANSMIT_S = 0.5
SIDES = st.integers(0, 1)
PICK = st.integers(0, 1 << 20)


@dataclass(eq=False)
class Connection:
    """numbers: what each side calls it, once it has the other's greeting. flying: frames towards each side."""

    numbers: list[int | None] = field(default_factory=lambda: [None, None])
    flying: list[list[Frame[int]]] = field(default_factory=lambda: [[], []])


def new_end(now_s: float = 0.0) -> StreamState[int, int]:
    return StreamState(Queue(frame_size=FRAME_SIZE), HEARTBEAT_S, MAX_KEPT, now_s)


class StreamMachine(RuleBasedStateMachine):
    """Side 0 dials. It may dial again before it knows that its last connection is broken, and greetings take their time:
    so each side may believe another connection to be the one that serves."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.ends = [new_end(), new_end()]
        self.connections: list[Connection] = []
        self.answers: list[tuple[Connection, int]] = []  # greetings on their way back to side 0
        self.put: list[list[int]] = [[], []]  # by sender
        self.flushed = [0, 0]  # of them
        self.taken: list[list[int]] = [[], []]  # by receiver
        self.heard_s = [0.0, 0.0]
        self.next_message = 0

    # ---- the owners

    @rule(side=SIDES, count=st.integers(1, 6), flush=st.booleans())
    def say(self, side: int, count: int, flush: bool) -> None:
        for _ in range(count):
            self.ends[side].put(self.next_message)
            self.put[side].append(self.next_message)
            self.next_message += 1
        if flush:
            assert self.ends[side].flush()
            self.flushed[side] = len(self.put[side])

    @rule(seconds=st.sampled_from((0.01, ACK_DELAY_S, 0.3, RETRANSMIT_S, HEARTBEAT_S)))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    # ---- connections

    @rule()
    def dial(self) -> None:
        connection = Connection()
        self.connections.append(connection)
        connection.numbers[1] = self.ends[1].connect(self.ends[0].received, self.now_s)
        self.heard_s[1] = self.now_s
        self.answers.append((connection, self.ends[1].received))

    @precondition(lambda self: self.answers)
    @rule(lost=st.booleans())
    def an_answer_arrives(self, lost: bool) -> None:
        connection, received = self.answers.pop(0)
        if lost or (connection is not self.connections[-1]):
            return  # whoever dials waits for one answer at a time
        connection.numbers[0] = self.ends[0].connect(received, self.now_s)
        self.heard_s[0] = self.now_s

    @precondition(lambda self: self.connections)
    @rule(side=SIDES, which=PICK)
    def a_side_learns_that_a_connection_is_broken(self, side: int, which: int) -> None:
        connection = self.connections[which % len(self.connections)]
        number = connection.numbers[side]
        if number is not None:
            self.ends[side].disconnect(number)
            assert not self.ends[side].serves(number)

    @precondition(lambda self: self.connections)
    @rule(side=SIDES)
    def write(self, side: int) -> None:
        """What is due, on the connection that serves."""
        end = self.ends[side]
        for connection in self.connections[-3:]:
            number = connection.numbers[side]
            if number is None or not end.serves(number):
                continue
            while (frame := end.next_frame(self.now_s)) is not None:
                assert frame.number == 0 or len(frame.messages) <= FRAME_SIZE
                connection.flying[1 - side].append(frame)
            assert end.due_s > self.now_s, "it says that there is more and gives nothing"

    @precondition(lambda self: any(any(c.flying) for c in self.connections))
    @rule(data=st.data(), lost=st.booleans(), doubled=st.booleans())
    def something_happens_to_a_frame(self, data: st.DataObject, lost: bool, doubled: bool) -> None:
        carrying = [(c, side) for c in self.connections for side in range(2) if c.flying[side]]
        connection, side = data.draw(st.sampled_from(carrying))
        at = data.draw(st.integers(0, len(connection.flying[side]) - 1))  # any of them: they overtake each other
        frame = connection.flying[side][at]
        if not doubled:
            del connection.flying[side][at]
        if not lost:
            self.deliver(connection, side, frame)

    def deliver(self, connection: Connection, side: int, frame: Frame[int]) -> None:
        number = connection.numbers[side]
        if number is None or not self.ends[side].serves(number):
            return  # as `ResumableStream.listen` does
        self.taken[side] += self.ends[side].hear(frame, self.now_s)
        self.heard_s[side] = self.now_s

    # ---- what holds

    @invariant()
    def each_message_arrives_once_and_in_order(self) -> None:
        for side in range(2):
            sent = self.put[1 - side][: self.flushed[1 - side]]
            assert self.taken[side] == sent[: len(self.taken[side])], "or it was not let go yet"

    @invariant()
    def what_is_kept_is_what_may_be_lacking(self) -> None:
        """Nothing that the other end has not taken is forgotten; and no more is kept than it may not have acknowledged."""
        for side, end in enumerate(self.ends):
            lacking = len(self.put[side]) - len(self.taken[1 - side])
            assert lacking <= end.kept <= len(self.put[side])
            assert end.idle == (end.kept == 0)

    @invariant()
    def whoever_is_overdue_is_noticed(self) -> None:
        for side, end in enumerate(self.ends):
            silent = self.now_s - self.heard_s[side] > LEASE_S
            expected = Verdict.SILENT if silent else Verdict.OVERFULL if end.kept > MAX_KEPT else None
            assert end.verdict(LEASE_S, self.now_s) is expected

    def teardown(self) -> None:
        """A connection that holds, from here on: everything arrives, is acknowledged, and nobody is given up."""
        connection = Connection()
        connection.numbers[1] = self.ends[1].connect(self.ends[0].received, self.now_s)
        connection.numbers[0] = self.ends[0].connect(self.ends[1].received, self.now_s)
        for side in range(2):
            self.ends[side].flush()
            self.flushed[side] = len(self.put[side])
        for _ in range(20):
            for side in range(2):
                number = connection.numbers[side]
                assert number is not None and self.ends[side].serves(number)
                while (frame := self.ends[side].next_frame(self.now_s)) is not None:
                    self.deliver(connection, 1 - side, frame)
            self.now_s += ACK_DELAY_S
        for side in range(2):
            assert self.taken[side] == self.put[1 - side]
            assert self.ends[side].idle
            assert self.ends[side].verdict(LEASE_S, self.now_s) is None


TestStream = StreamMachine.TestCase


def test_an_end_that_settles_is_idle_when_all_that_was_sent_before_it_was_heard_has_come() -> None:
    server, router = new_end(), new_end()
    server.connect(0, 0.0)
    router.connect(0, 0.0)
    router.put(7)
    router.flush()
    late = router.next_frame(0.0)  # which the router sent before it heard
    assert late is not None
    server.settle()
    server.flush()  # by whoever has nothing to say
    assert not server.idle and server.due_s == -math.inf
    asked = server.next_frame(0.0)
    assert asked is not None and (asked.number, asked.messages) == (1, ())
    assert server.next_frame(0.0) is None and not server.idle
    assert router.hear(asked, 0.0) == ()
    answer = router.next_frame(ACK_DELAY_S)
    assert answer is not None
    assert server.hear(late, ACK_DELAY_S) == (7,) and not server.idle
    server.hear(answer, ACK_DELAY_S)
    assert server.idle


TestStream.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)


# ---- one thing at a time


def pair() -> tuple[StreamState[int, int], StreamState[int, int]]:
    """Two ends with one connection."""
    ours, theirs = new_end(), new_end()
    assert ours.connect(0, 0.0) == theirs.connect(0, 0.0) == 1
    return ours, theirs


def say(end: StreamState[int, int], *messages: int) -> None:
    for message in messages:
        end.put(message)
    end.flush()


def due(end: StreamState[int, int], now_s: float) -> list[Frame[int]]:
    frames = []
    while (frame := end.next_frame(now_s)) is not None:
        frames.append(frame)
    return frames


def test_what_is_put_waits_until_it_is_let_go() -> None:
    ours, _ = pair()
    ours.put(1)
    assert due(ours, 0.0) == []
    ours.flush()
    assert due(ours, 0.0) == [Frame(1, 0, (1,))]


def test_an_acknowledgement_waits_for_a_frame_to_ride_on_and_not_for_long() -> None:
    ours, theirs = pair()
    say(ours, 1)
    (frame,) = due(ours, 0.0)
    theirs.hear(frame, 0.0)
    assert theirs.due_s == ACK_DELAY_S
    assert due(theirs, ACK_DELAY_S / 2) == []
    assert due(theirs, ACK_DELAY_S) == [Frame(0, 1, ())]
    say(ours, 2)
    (frame,) = due(ours, 0.2)
    theirs.hear(frame, 0.2)
    say(theirs, 7)
    assert due(theirs, 0.2) == [Frame(1, 2, (7,))]
    assert due(theirs, 0.2 + ACK_DELAY_S) == [], "it rode on that one"


def test_a_beat_goes_out_also_while_messages_do() -> None:
    ours, _ = pair()
    beats = 0
    for tick in range(50):
        now_s = tick / 10
        say(ours, tick)
        frames = due(ours, now_s)
        beats += sum(frame.number == 0 for frame in frames)
    assert beats == 4, "at 1, 2, 3 and 4 s"


def test_what_nobody_acknowledges_is_repeated_in_order_and_before_what_is_new() -> None:
    ours, theirs = pair()
    say(ours, 1)
    say(ours, 2)
    first = due(ours, 0.0)
    say(ours, 3)
    assert ours.due_s < 0.0
    assert due(ours, 0.1) == [Frame(2, 0, (3,))]
    say(ours, 4)
    ours.next_frame(0.2)
    say(ours, 5)
    assert due(ours, RETRANSMIT_S)[:3] == [*first, Frame(2, 0, (3,)), Frame(3, 0, (4,))]
    assert theirs.hear(first[0], 0.6) == (1, 2)
    assert theirs.hear(first[0], 0.7) == ()


def test_a_new_connection_repeats_what_the_other_end_lacks_and_ends_the_old_one() -> None:
    ours, theirs = pair()
    for message in range(3):
        say(ours, message)
        for frame in due(ours, 0.0):
            if message == 0:
                theirs.hear(frame, 0.0)
    number = ours.connect(theirs.received, 0.1)
    assert number == 2 and ours.serves(2) and not ours.serves(1)
    ours.disconnect(1)
    assert ours.serves(2), "that the old one is broken is no news"
    assert [frame.messages for frame in due(ours, 0.1)] == [(1,), (2,)]


def test_a_stream_that_has_ended_is_served_by_nothing() -> None:
    ours, _ = pair()
    ours.end()
    assert ours.ended and not ours.served and not ours.serves(1)
    ours.disconnect(1)
    assert ours.ended


def test_silence_is_counted_from_whatever_was_heard_last() -> None:
    ours, theirs = pair()
    for second in range(10):
        ours.hear(theirs.beat(second), second)
    assert ours.verdict(LEASE_S, 9.0 + LEASE_S) is None
    assert ours.verdict(LEASE_S, 9.1 + LEASE_S) is Verdict.SILENT
    ours.connect(0, 20.0)
    assert ours.verdict(LEASE_S, 20.0) is None


@pytest.mark.parametrize("acknowledged", [True, False])
def test_a_backlog_has_a_bound_whether_it_waits_or_was_sent(acknowledged: bool) -> None:
    ours, theirs = pair()
    for message in range(MAX_KEPT + 1):
        assert ours.verdict(math.inf, 0.0) is None
        say(ours, message)
        for frame in due(ours, 0.0) if message % 2 else ():
            theirs.hear(frame, 0.0)
            if acknowledged:
                ours.hear(theirs.beat(0.0), 0.0)
    assert ours.verdict(math.inf, 0.0) is (None if acknowledged else Verdict.OVERFULL)


def test_messages_of_no_size_have_a_bound_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MAX_KEPT_MESSAGES", 20)
    ours: StreamState[int, int] = StreamState(Queue(lambda message: 0), HEARTBEAT_S, MAX_KEPT, 0.0)
    for message in range(20):
        say(ours, message)
        assert due(ours, 0.0)[0].messages == (message,)
        assert not ours.overfull
    ours.put(20)
    assert ours.overfull
    ours.hear(Frame(0, 1, ()), 0.0)
    assert ours.kept == 0 and not ours.overfull


def test_a_frame_holds_what_fits_and_at_least_one_message() -> None:
    def length(*sizes: int) -> int:
        return frame_length(sizes, lambda size: size, 10)

    assert length() == 0
    assert length(11) == length(11, 1) == 1
    assert length(4, 6, 1) == 2
    assert length(4, 7) == 1
    assert length(*[0] * 3000) == FRAME_MESSAGES
