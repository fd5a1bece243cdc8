"""Transfer commands: both ends of an entry say what it holds with one value."""

from __future__ import annotations

from msgspec.structs import fields

from disagg.messages.pieces import HeadSlice, Piece, RankSlice
from disagg.messages.transfer import CommandFrame, ExpectPiece, SendPiece, decode_commands, encode_commands
from disagg.types.ids import LegKey

SLICE = RankSlice(LegKey("r-1", 1, 2), Piece(0, 4, 8, 16, 32), HeadSlice(3, 1, 0, 2, 2), "aa", "bb")


def test_a_slice_comes_to_either_worker_as_it_was_sent() -> None:
    send, expect = SendPiece(1, 7, SLICE, (5, 9), 4096, 264, after_plan=3), ExpectPiece(1, 7, SLICE, 4096, 264)
    frame = CommandFrame(4, (send, expect))
    assert decode_commands(encode_commands(frame)) == frame


def test_a_worker_that_sends_and_one_that_receives_are_told_the_same_of_an_entry_and_in_the_same_words() -> None:
    send, expect = ({field.name for field in fields(kind)} for kind in (SendPiece, ExpectPiece))
    assert send - expect == {"pages", "after_plan"} and expect <= send
    described = {field.name for kind in (RankSlice, HeadSlice, Piece, LegKey) for field in fields(kind)}
    assert not send & described, "a field of the slice stands beside it once more"
