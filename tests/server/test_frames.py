"""What waits for a router goes out in frames of bounded size, merged where it can be, and none of it is lost."""

from __future__ import annotations

import itertools

from disagg.messages.channel import Frame
from disagg.messages.legs import LegEnd, LegTokens, Outcome, ServerMessage
from disagg.messages.plan import TokenLogprobs
from disagg.server.routers import FRAME_BYTES, LOGPROB_BYTES, Lease, MergingOutbox
from disagg.types.ids import LegKey
from disagg.wire.server import RouterHello


def test_a_frame_holds_a_bounded_number_of_messages_and_none_is_lost() -> None:
    stream = Lease(0, RouterHello("r", "i", "s", 0), "here", heartbeat_s=3600.0).stream.state
    ends = [LegEnd(LegKey(f"r{number}", 1, 0), Outcome.DONE, "") for number in range(2500)]
    for end in ends:
        stream.put(end)
    taken: list[ServerMessage] = []
    stream.flush()
    while (frame := stream.next_frame(0.0)) is not None:
        assert len(frame.messages) <= 1024
        taken += frame.messages
    assert taken == ends
    assert stream.outbox.size == 0
    assert stream.kept > 0
    stream.hear(Frame(number=0, ack=99, messages=()), 0.0)
    assert stream.kept == 0


def tokens(first: int, count: int, choice: int = 0, top: int = 0) -> LegTokens:
    rows = tuple(TokenLogprobs(-1.0, ((1, -1.0),) * top) for _ in range(count)) if top else ()
    return LegTokens(LegKey("r", 1, 0), choice, first, tuple(range(first, first + count)), rows)


def test_what_waited_for_a_router_goes_out_in_frames_that_its_loop_reads_at_once() -> None:
    waiting = MergingOutbox()
    for step in range(2000):
        for choice in range(4):
            waiting.put(tokens(step, 1, choice, top=20))
    before = waiting.size
    frames = []
    while len(waiting):
        frames.append(waiting.take())
        if len(frames) == 3:
            waiting.put(tokens(2000, 1, 0, top=20))  # more comes meanwhile
    assert waiting.size == 0
    assert len(frames) > 8
    sizes = [sum(LOGPROB_BYTES * 21 * len(m.logprobs) for m in frame) for frame in frames]
    assert max(sizes) <= FRAME_BYTES < before
    for choice, count in ((0, 2001), (1, 2000)):
        said = [m for frame in frames for m in frame if m.choice == choice]
        assert [token for m in said for token in m.token_ids] == list(range(count))
        assert all(a.first_index + len(a.token_ids) == b.first_index for a, b in itertools.pairwise(said))


def test_a_token_without_log_probabilities_is_no_part_of_a_message_that_has_them() -> None:
    """As of an answer that goes on from elsewhere, where its last token was told with them."""
    waiting = MergingOutbox()
    for message in (tokens(0, 1), tokens(1, 1, top=2), tokens(2, 1, top=2), tokens(3, 1), tokens(4, 1)):
        waiting.put(message)
    said = waiting.take()
    assert [(m.token_ids, len(m.logprobs)) for m in said] == [((0,), 0), ((1, 2), 2), ((3, 4), 0)]
    assert waiting.size == 0


def test_a_message_larger_than_a_frame_goes_out_alone() -> None:
    waiting = MergingOutbox()
    waiting.put(tokens(0, 2000, top=20))
    waiting.put(tokens(2000, 1))
    assert [len(waiting.take()) for _ in range(2)] == [1, 1]
