"""A peer that says what it must not costs its link, and nothing else: no crash, no memory, no order to a worker that cannot be.

Messages cross the wire's own conversion first, so numbers are those that can come: unsigned, of 32 or 64 bits.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from msgspec.structs import replace

from disagg.messages import link as m
from disagg.messages.channel import Frame
from disagg.messages.pieces import Piece
from disagg.messages.plan import TokenLogprobs
from disagg.staging.slices import SliceError
from disagg.transfer.session import MAX_WANTS
from disagg.types.errors import ProtocolError
from disagg.types.ids import LegKey
from disagg.types.sampling import MAX_CHOICES
from disagg.wire.fields import MAX_REQUEST_ID_CHARS
from disagg.wire.peer import MAX_RANKS, LinkGreeting, link_frame_from_proto, link_frame_to_proto, link_greeting_to_proto
from tests.engine.hostile_peers import (
    FACTS,
    KEYS,
    SEGMENT,
    HostileDecode,
    HostilePrefill,
    footprint,
    heard,
    hostile,
    lists_first,
)
from tests.engine.lone_engine import (
    D_REF,
    LINK,
    P_REF,
    RANK,
    Decode,
    Prefill,
    changed,
    facts,
    hello,
    start,
)


@pytest.fixture(scope="module", autouse=True)
def _traced() -> Any:
    tracemalloc.start()
    yield
    tracemalloc.stop()


CAMPAIGNS = pytest.mark.parametrize(
    "examples",
    [
        pytest.param(10, marks=pytest.mark.short),
        pytest.param(50, marks=pytest.mark.long),
        pytest.param(1_500, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)


def campaign(examples: int, body: Callable[[st.DataObject], None]) -> None:
    health = list(HealthCheck)
    limits = settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=health
    )
    limits(given(st.data())(body))()


@CAMPAIGNS
def test_a_prefill_server_survives_whatever_a_decode_server_says(examples: int) -> None:
    campaign(examples, _hostile_decode)


def _hostile_decode(data: st.DataObject) -> None:
    peer = HostileDecode()
    for _ in range(data.draw(st.integers(1, 12))):
        message = data.draw(hostile(data.draw(lists_first(peer.legal()))))
        if message is None:
            continue
        if not heard(peer, peer.prefill, message):
            break
        if peer.prefill.unreported and data.draw(st.booleans()):
            peer.do(peer.prefill.compute())
    peer.the_rest_goes_on()


@CAMPAIGNS
def test_a_decode_server_survives_whatever_a_prefill_server_says(examples: int) -> None:
    campaign(examples, _hostile_prefill)


def _hostile_prefill(data: st.DataObject) -> None:
    peer = HostilePrefill()
    for _ in range(data.draw(st.integers(1, 12))):
        message = data.draw(hostile(data.draw(lists_first(peer.legal()))))
        if message is None:
            continue
        if not heard(peer, peer.decode, message):
            break
        if peer.flying and data.draw(st.booleans()):
            peer.land()
        if peer.decode.unreported and data.draw(st.booleans()):
            peer.do(peer.decode.compute())
    peer.the_rest_goes_on()


# ---- one by one


ENTRY = m.Entry(3, 0, 0, 0, 0, 2, 0, 200)  # of the one piece of `start()`


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        (replace(ENTRY, piece_no=1), "was not offered"),
        (replace(ENTRY, src_rank=1), "no rank slice"),
        (replace(ENTRY, dst_rank=1), "not there"),
        (replace(ENTRY, src_head_start=1), "no rank slice"),
        (replace(ENTRY, heads=2**31), "no rank slice"),
        (replace(ENTRY, nbytes=208), "not as large"),
        (replace(ENTRY, ring_byte=8), "does not follow"),
        (replace(ENTRY, ring_byte=4096 - 192), "does not follow"),
        (replace(ENTRY, ring_byte=2**62), "does not follow"),
        (replace(ENTRY, nbytes=2**63), "does not follow"),
    ],
)
def test_an_entry_that_cannot_be_written_never_reaches_a_worker(entry: m.Entry, error: str) -> None:
    prefill = Prefill(facts(prefix_cache=False))
    leg = start()
    prefill.granted(leg)
    with pytest.raises(ProtocolError, match=error):
        prefill.link(m.AssignEntries(leg.key, 0, (entry,)))
    assert not prefill.sender.links[LINK].writing


def test_an_entry_id_is_given_once_and_two_entries_share_no_byte() -> None:
    for second in (replace(ENTRY, ring_byte=208), replace(ENTRY, entry_id=4, ring_byte=192)):
        prefill = Prefill(facts(prefix_cache=False))
        leg = start()
        prefill.granted(leg)
        with pytest.raises(ProtocolError, match=r"was assigned before|does not follow"):
            prefill.link(m.AssignEntries(leg.key, 0, (ENTRY, second)))


@pytest.mark.parametrize(
    ("ring", "error"),
    [
        (m.OpenRing(1, 0, SEGMENT, (0,)), "while another one is open"),
        (m.OpenRing(0, 0, SEGMENT, (0,)), "again on rank 0"),
        (m.OpenRing(0, 7, SEGMENT, (0,)), "on rank 7 cannot be"),
    ],
)
def test_a_link_has_one_ring_that_is_opened_once(ring: m.OpenRing, error: str) -> None:
    prefill = Prefill(FACTS)
    prefill.open_ring()
    with pytest.raises(ProtocolError, match=error):
        prefill.link(ring)


@pytest.mark.parametrize(
    ("ring", "error"),
    [
        (m.OpenRing(0, 0, 16, (0,)), "takes .* bytes; at most 16 fit"),
        (m.OpenRing(0, 0, SEGMENT, ()), "0 segments"),
        (m.OpenRing(0, 0, SEGMENT, (0,) * 100_000), "100000 segments"),
        (m.OpenRing(0, 0, SEGMENT + 1, (0,)), "4097 bytes"),
        (m.OpenRing(0, 0, SEGMENT, (2**63,)), "beyond what an arena may have"),
    ],
)
def test_a_ring_that_cannot_be_is_not_opened(ring: m.OpenRing, error: str) -> None:
    prefill = Prefill(FACTS)
    with pytest.raises(ProtocolError, match=error):
        prefill.link(ring)
    assert not prefill.sender.links[LINK].rings


def test_watermarks_are_of_every_rank_and_of_what_was_assigned() -> None:
    prefill = Prefill(FACTS)
    prefill.open_ring()
    with pytest.raises(ProtocolError, match="beyond"):
        prefill.link(m.Watermarks(0, (16,)))
    with pytest.raises(ProtocolError, match="of 1 ranks"):
        prefill.link(m.Watermarks(0, (0,) * 1000))


def test_pieces_are_not_wanted_again_without_end() -> None:
    prefill = Prefill(facts(prefix_cache=False))
    leg = start()
    prefill.granted(leg)
    whole = Piece(0, 0, 2, 0, 6)
    with pytest.raises(ProtocolError, match="wanted again: more than all of them"):
        prefill.link(m.WantPieces(leg.key, (whole, whole)))
    for _ in range(MAX_WANTS):
        prefill.link(m.WantPieces(leg.key, (whole,)))
    with pytest.raises(ProtocolError, match="more than 3 times"):
        prefill.link(m.WantPieces(leg.key, (whole,)))


def test_what_was_not_announced_cannot_be_granted() -> None:
    prefill = Prefill(changed(FACTS, max_slots=1))
    prefill.start(start("a"))
    prefill.start(start("b", tokens=20))
    with pytest.raises(ProtocolError, match="before it was announced"):
        prefill.link(m.Grant(LegKey("b", 0, 0), (0, 12, 0)))


def test_an_announcement_repeated_leaves_nothing_behind() -> None:
    decode = Decode(FACTS)
    leg = start(peer=P_REF)
    decode.announced(leg)
    before = footprint(decode.engine)
    for _ in range(1000):
        decode.link(m.Announce(leg.key, 6))
    assert footprint(decode.engine) == before


def test_pieces_are_not_offered_again_without_end() -> None:
    decode = Decode(facts(prefix_cache=False))
    leg = start(peer=P_REF)
    decode.receiving(leg)
    with pytest.raises(ProtocolError, match="pieces of 24 cells were offered where 12 were granted"):
        decode.link(m.OfferPieces(leg.key, 1, (Piece(0, 0, 2, 0, 6),)))
    assert len(decode.receiver.rings.table.links[LINK].live) == 1


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ((m.FirstToken(0, FACTS.model.vocab_size, None, None),), "first token 100000 is not among the model's 100000"),
        ((m.FirstToken(0, 1, TokenLogprobs(0.0, ((1, 0.0),) * 1000), None),), "1000 logprobs"),
        ((m.FirstToken(0, 1, None, None),) * (MAX_CHOICES + 1), "65 choices"),
    ],
)
@pytest.mark.parametrize("key", KEYS[:2])
def test_first_tokens_that_no_leg_can_have_are_not_kept(
    tokens: tuple[m.FirstToken, ...], error: str, key: LegKey
) -> None:
    decode = Decode(FACTS)
    decode.start(start("a", peer=P_REF))
    for announced in KEYS[:2]:
        decode.link(m.Announce(announced, 6))
    with pytest.raises(ProtocolError, match=error):
        decode.link(m.FirstTokens(key, tokens))


def test_sizes_that_exchange_no_heads_are_refused_on_either_side() -> None:
    three = replace(hello(D_REF), tp=3, ranks=tuple(replace(RANK, rank=r) for r in range(3)))
    with pytest.raises(SliceError, match="TP size 3 cannot hold 2 KV heads"):
        Prefill(FACTS, linked=False).link_up(three)
    with pytest.raises(SliceError, match="TP size 3 cannot hold 2 KV heads"):
        Decode(FACTS, linked=False).link_up(three)


@pytest.mark.parametrize(
    "bad",
    [
        replace(hello(D_REF), tp=2**32 - 1),
        replace(hello(D_REF), tp=0, ranks=()),
        replace(hello(D_REF), tp=2, ranks=(RANK, RANK)),
        replace(hello(D_REF), tp=MAX_RANKS + 1, ranks=tuple(replace(RANK, rank=r) for r in range(MAX_RANKS + 1))),
        replace(hello(D_REF), ranks=(replace(RANK, arena_address=2**64 - 1),)),
    ],
)
def test_a_greeting_with_ranks_that_cannot_be_is_refused(bad: m.LinkHello) -> None:
    with pytest.raises(ProtocolError, match=r"LinkHello\.ranks"):
        link_frame_from_proto(link_greeting_to_proto(LinkGreeting(bad, 0)))


def test_a_request_id_is_not_kept_whatever_its_length() -> None:
    long = m.Announce(LegKey("x" * (MAX_REQUEST_ID_CHARS + 1), 0, 0), 1)
    with pytest.raises(ProtocolError, match="has 257 characters; at most 256 may be"):
        link_frame_from_proto(link_frame_to_proto(Frame(1, 0, (long,))))
