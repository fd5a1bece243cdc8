"""A prefill engine alone, call by call: which instructions an event gives. What memory has to do with it: test_lone_memory."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from disagg.engine.handoff import withdrawals
from disagg.engine.instructions import DropLink, ToLink
from disagg.messages import link as m
from disagg.messages.legs import LegEnd, LegTokens, Outcome, PeerRef, StartLeg
from disagg.messages.pieces import Piece
from disagg.messages.plan import NO_TOKEN, SampledToken
from disagg.messages.transfer import (
    DropSends,
    PeerAdded,
    PeerRemoved,
    PieceFailed,
    RemovePeer,
    SendPiece,
    SendsDropped,
)
from disagg.types.errors import ProtocolError
from disagg.types.ids import LegKey
from tests.engine.lone_engine import (
    D_REF,
    LINK,
    P_REF,
    Decode,
    Prefill,
    changed,
    facts,
    hello,
    outcomes,
    plans,
    sent,
    start,
    to_link,
    to_router,
    to_transfer,
)

FACTS = facts(prefix_cache=False)


def test_prefill_goes_from_the_leg_to_the_end_of_the_transfer() -> None:
    prefill = Prefill(FACTS)
    prefill.open_ring()
    leg = start()
    out = prefill.start(leg)
    (plan,) = plans(out)
    assert [(r.num_tokens, r.sample) for r in plan.runs] == [(6, True)]
    assert to_link(out) == [m.Announce(leg.key, 6)]
    piece = Piece(0, 0, 2, 0, 6)
    assert to_link(prefill.link(m.Grant(leg.key, (0,)))) == [m.OfferPieces(leg.key, 0, (piece,))]
    entry = m.Entry(3, 0, 0, 0, 0, 2, 0, 200)
    (send,) = to_transfer(prefill.link(m.AssignEntries(leg.key, 0, (entry,))))
    assert isinstance(send, SendPiece)
    assert (send.entry_id, send.slice.piece, send.pages, send.after_plan) == (3, piece, (0, 1), 0)
    assert send.arena_offset == 4096
    out = prefill.step(0, SampledToken(0, 0, 9))
    assert to_router(out) == [LegTokens(leg.key, 0, 0, (9,))]
    assert to_link(out) == [m.FirstTokens(leg.key, (m.FirstToken(0, 9, None, None),))]
    assert to_link(prefill.event(sent(send))) == [m.SentAll(leg.key, 1)]
    assert prefill.used == 2, "kept until decode confirms"
    assert outcomes(prefill.link(m.Complete(leg.key))) == [Outcome.DONE]
    assert prefill.engine.idle
    assert prefill.used == 0


def test_a_prompt_whose_first_token_has_logits_that_are_no_numbers_ends_on_both_sides() -> None:
    prefill = Prefill(FACTS)
    leg = start()
    send = prefill.sending(leg)
    out = prefill.step(0, SampledToken(0, 0, NO_TOKEN))
    (end,) = to_router(out)
    assert isinstance(end, LegEnd) and end.outcome is Outcome.WORKER_LOST and "no numbers" in end.reason
    prefill.event(sent(send))
    assert to_link(prefill.event(SendsDropped(LINK, leg.key))) == [m.Withdraw(leg.key, end.reason, False)]
    assert prefill.engine.idle and prefill.used == 0 and prefill.engine.counters.bad_logits == 1


def test_a_leg_that_failed_before_decode_dialled_is_withdrawn_as_soon_as_it_does() -> None:
    """Or decode would wait for its announcement, and the router for decode's verdict."""
    prefill = Prefill(FACTS, linked=False)
    leg, aborted = start(), start("aborted")
    prefill.start(leg)
    (end,) = to_router(prefill.step(0, SampledToken(0, 0, NO_TOKEN)))
    assert isinstance(end, LegEnd) and end.outcome is Outcome.WORKER_LOST
    prefill.start(aborted)
    prefill.abort(aborted)
    assert to_link(prefill.do(prefill.link_up(hello(D_REF)))) == [m.Withdraw(leg.key, end.reason)]


def test_a_leg_that_fails_before_it_is_announced_is_withdrawn_all_the_same() -> None:
    prefill = Prefill(changed(FACTS, num_large=2))
    prefill.start(start("first"))
    waiting = start("second")
    prefill.start(waiting)
    prefill.do(prefill.engine.end_router(1, "its lease is over"))
    assert m.Withdraw(waiting.key, "its lease is over") in to_link(prefill.event(SendsDropped(LINK, waiting.key)))


@pytest.mark.parametrize("announced", [True, False])
def test_a_leg_that_was_withdrawn_before_the_router_told_of_it_ends_at_once(announced: bool) -> None:
    decode = Decode(FACTS)
    leg = start(peer=P_REF)
    if announced:
        decode.link(m.Announce(leg.key, 6))
    decode.link(m.Withdraw(leg.key, "for a reason"))
    (end,) = to_router(decode.start(leg))
    assert isinstance(end, LegEnd) and end.outcome is Outcome.PEER_LOST and "for a reason" in end.reason
    assert decode.engine.idle and decode.used == 0


def test_a_leg_that_was_withdrawn_over_a_link_that_is_gone_ends_at_once_too() -> None:
    decode = Decode(FACTS)
    leg = start(peer=P_REF)
    decode.link(m.Withdraw(leg.key, "for a reason"))
    decode.lose_link("cut")
    assert outcomes(decode.start(leg)) == [Outcome.PEER_LOST]
    decode.link_up(hello(P_REF), LINK + 1)
    decode.link(m.Withdraw(LegKey("other", 0, 0), "for a reason"), LINK + 1)
    assert outcomes(decode.start(start("other", peer=PeerRef("P", "p:1", "p2")))) == [], "another incarnation's"


def test_a_leg_whose_link_is_lost_is_withdrawn_over_the_one_after_it() -> None:
    """Decode may have had no link when it heard of the leg, and wait for it on the next one."""
    prefill = Prefill(FACTS)
    leg, failed = start(), start("failed", first_token=50)
    prefill.start(failed)
    prefill.step(0, SampledToken(0, 0, NO_TOKEN))
    prefill.start(leg)
    assert outcomes(prefill.lose_link("cut")) == [Outcome.PEER_LOST], (
        "the other one's ranks have yet to drop its writes"
    )
    told = to_link(prefill.do(prefill.link_up(hello(D_REF), LINK + 1)))
    assert {each.key: each.reason[:12] for each in told if isinstance(each, m.Withdraw)} == {
        failed.key: "the logits o",
        leg.key: "cut",
    }


def test_no_more_than_so_many_withdrawn_legs_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(withdrawals, "MOST_WITHDRAWALS", 2)
    decode = Decode(FACTS)
    legs = [start(f"leg-{number}", peer=P_REF) for number in range(3)]
    for leg in legs:
        decode.link(m.Withdraw(leg.key, "for a reason"))
    assert [outcomes(decode.start(leg)) for leg in legs] == [[], [Outcome.PEER_LOST], [Outcome.PEER_LOST]]


def test_prefill_announces_when_decode_dials_late_and_repeats_its_first_tokens() -> None:
    prefill = Prefill(FACTS, linked=False)
    leg = start()
    assert to_link(prefill.start(leg)) == []
    assert to_link(prefill.step(0, SampledToken(0, 0, 9))) == []
    out = prefill.do(prefill.link_up(hello(D_REF)))
    first = m.FirstTokens(leg.key, (m.FirstToken(0, 9, None, None),))
    assert to_link(out) == [m.Announce(leg.key, 6), first]


def test_prefill_has_no_more_than_two_plans_in_flight() -> None:
    prefill = Prefill(FACTS)
    assert len(plans(prefill.start(start(tokens=40)))) == 2, "five chunks of eight"
    assert plans(prefill.start(start("s"))) == []
    assert len(plans(prefill.step(0))) == 1


def test_a_write_waits_for_its_ring_bytes() -> None:
    prefill = Prefill(FACTS)
    leg = start()
    prefill.granted(leg)
    beyond = m.Entry(3, 0, 0, 0, 0, 2, 4096, 200)
    assert to_transfer(prefill.link(m.AssignEntries(leg.key, 0, (beyond,)))) == []
    assert to_transfer(prefill.link(m.Watermarks(0, (199,)))) == []
    (send,) = to_transfer(prefill.link(m.Watermarks(0, (200,))))
    assert isinstance(send, SendPiece)
    assert send.arena_offset == 4096, "the second round begins where the first did"


def test_an_abort_while_waiting_frees_at_once_and_tells_decode_nothing() -> None:
    prefill = Prefill(changed(FACTS, num_large=2))
    prefill.start(start("first"))
    waiting = start("second")
    prefill.start(waiting)
    out = prefill.abort(waiting)
    assert outcomes(out) == [Outcome.ABORTED]
    assert to_link(out) == []
    out = prefill.event(SendsDropped(LINK, waiting.key))
    assert to_link(out) == []
    assert waiting.key not in prefill.engine.core.legs


def test_an_abort_while_computing_keeps_pages_until_the_plan_has_reported() -> None:
    prefill = Prefill(FACTS)
    leg = start()
    prefill.start(leg)
    out = prefill.abort(leg)
    assert outcomes(out) == [Outcome.ABORTED]
    assert to_transfer(out) == [DropSends(LINK, leg.key)]
    assert to_link(prefill.event(SendsDropped(LINK, leg.key))) == [m.Withdraw(leg.key, "aborted by the router", True)]
    assert prefill.used == 2
    assert to_router(prefill.step(0, SampledToken(0, 0, 9))) == [], "the token of an aborted leg is nobody's"
    assert prefill.used == 0
    assert prefill.engine.counters.max_steps_after_abort == 1


def test_an_abort_while_sending_keeps_pages_until_the_writers_are_quiet() -> None:
    prefill = Prefill(FACTS)
    leg = start()
    send = prefill.sending(leg)
    prefill.step(0, SampledToken(0, 0, 9))
    out = prefill.abort(leg)
    assert to_link(out) == [], "Withdraw means that nothing is under way, so not yet"
    assert to_link(prefill.event(sent(send))) == []
    assert prefill.used == 2
    assert to_link(prefill.event(SendsDropped(LINK, leg.key))) == [m.Withdraw(leg.key, "aborted by the router", True)]
    assert prefill.used == 0


def test_a_revocation_is_answered_when_the_writers_are_quiet() -> None:
    prefill = Prefill(FACTS)
    leg = start()
    prefill.sending(leg)
    out = prefill.link(m.Revoke(leg.key, "no"))
    assert outcomes(out) == [Outcome.PEER_LOST]
    assert to_link(out) == []
    assert to_link(prefill.event(SendsDropped(LINK, leg.key))) == [m.Drained(leg.key)]


def test_a_leg_whose_abort_reaches_decode_first_ends_as_aborted_on_prefill_too() -> None:
    prefill = Prefill(FACTS)
    leg = start()
    prefill.sending(leg)
    out = prefill.link(m.Revoke(leg.key, "aborted by the router", aborted=True))
    assert outcomes(out) == [Outcome.ABORTED]
    assert outcomes(prefill.abort(leg)) == [], "it has ended"
    assert to_link(prefill.event(SendsDropped(LINK, leg.key))) == [m.Drained(leg.key)]
    assert dict(prefill.engine.counters.legs) == {"aborted": 1}


def test_a_leg_that_a_routers_lease_took_along_is_no_abort_for_the_other_server() -> None:
    """The router may live, and wait for what decode says."""
    prefill = Prefill(FACTS)
    leg = start()
    prefill.sending(leg)
    assert outcomes(prefill.do(prefill.engine.end_router(1, "its lease is over"))) == [Outcome.ABORTED]
    assert to_link(prefill.event(SendsDropped(LINK, leg.key))) == [m.Withdraw(leg.key, "its lease is over", False)]


def test_what_concerns_a_leg_that_has_gone_is_answered_with_drained() -> None:
    prefill = Prefill(FACTS)
    key = LegKey("gone", 0, 0)
    assert to_link(prefill.link(m.Revoke(key, "no"))) == [m.Drained(key)]
    assert to_link(prefill.link(m.Grant(key, (0,)))) == [m.Drained(key)]
    assert to_link(prefill.link(m.Complete(key))) == []


def test_completion_before_the_first_token_is_refused() -> None:
    prefill = Prefill(FACTS)
    leg = start()
    prefill.granted(leg)
    with pytest.raises(ProtocolError, match="before its first token"):
        prefill.link(m.Complete(leg.key))
    prefill.engine.check_integrity()


def test_a_lost_link_frees_pages_only_when_the_workers_have_removed_the_peer() -> None:
    prefill = Prefill(FACTS)
    leg = start()
    send = prefill.sending(leg)
    prefill.step(0, SampledToken(0, 0, 9))
    out = prefill.lose_link("silence")
    assert to_transfer(out) == [RemovePeer(LINK)]
    assert outcomes(out) == [Outcome.PEER_LOST]
    prefill.event(PieceFailed(LINK, send.entry_id, leg.key, "removed"))
    assert prefill.used == 2
    prefill.event(PeerRemoved(LINK, True))
    assert prefill.used == 0
    assert prefill.engine.idle


def test_prefill_says_that_a_lost_link_is_quiet_when_its_workers_have_removed_the_peer() -> None:
    """To the same decode server, whether it has dialled anew before or does so afterwards; to nobody else."""
    prefill = Prefill(FACTS)
    prefill.lose_link("silence")
    assert to_link(prefill.do(prefill.link_up(hello(D_REF), LINK + 1))) == [], "its workers may be writing"
    prefill.do(prefill.link_up(hello(PeerRef("other", "", "1")), LINK + 2))
    assert prefill.event(PeerRemoved(LINK, True)) == [ToLink(LINK + 1, m.QuietLinks(("generation",)))]
    out = prefill.do(prefill.link_up(hello(D_REF), LINK + 3))
    assert ToLink(LINK + 3, m.QuietLinks(("generation",))) in out


def test_a_lost_link_of_which_a_write_has_failed_is_never_said_to_be_quiet() -> None:
    """Some of its bytes may yet land, wherever they are on their way."""
    prefill = Prefill(FACTS)
    leg = start()
    prefill.sending(leg)
    prefill.compute_all()
    prefill.lose_link("silence")
    prefill.do(prefill.link_up(hello(D_REF), LINK + 1))
    assert to_link(prefill.event(PeerRemoved(LINK, False))) == []
    assert prefill.engine.idle, "its leg is over all the same"
    assert to_link(prefill.do(prefill.link_up(hello(D_REF), LINK + 2))) == []


def test_prefill_says_which_entries_are_written_and_not_which_are_to_come() -> None:
    prefill = Prefill(FACTS)
    leg, waiting = start(), start("waiting")
    send = prefill.sending(leg)
    prefill.granted(waiting)
    next_round = m.Entry(4, 0, 0, 0, 0, 2, 4096, 200)
    assert to_transfer(prefill.link(m.AssignEntries(waiting.key, 0, (next_round,)))) == [], "the ring is full"
    ask = m.AskWritten(0, (3, 4, 5))
    assert to_link(prefill.link(ask)) == [], "one is under way, one waits, one was never assigned"
    prefill.event(sent(send))
    assert to_link(prefill.link(ask)) == [m.Written(0, (3,))]
    assert to_link(prefill.link(m.AskWritten(1, (3,)))) == [], "a ring that is not open"


def test_a_failed_write_drops_the_link() -> None:
    prefill = Prefill(FACTS)
    leg = start()
    send = prefill.sending(leg)
    out = prefill.event(PieceFailed(LINK, send.entry_id, leg.key, "broken"))
    assert out == [DropLink(LINK, "broken")]


def test_a_peer_that_cannot_be_met_drops_the_link() -> None:
    assert Prefill(FACTS).event(PeerAdded(LINK, 0, "no route")) == [DropLink(LINK, "no route")]


def test_a_ring_is_closed_when_no_write_of_it_is_under_way() -> None:
    prefill = Prefill(FACTS)
    send = prefill.sending(start())
    assert to_link(prefill.link(m.CloseRing(0))) == []
    assert m.RingClosed(0) in to_link(prefill.event(sent(send)))
    with pytest.raises(ProtocolError, match="ring 0 is not open"):
        prefill.link(m.CloseRing(0))


def test_finished_prompts_that_nobody_grants_are_capped() -> None:
    prefill = Prefill(
        changed(FACTS, max_slots=8, ungranted_share=0.2)
    )  # of 12 pages: more than 2 and no more are admitted
    for name in "abcd":
        prefill.start(start(name, tokens=8))
    for plan_no in range(2):
        prefill.step(plan_no, SampledToken(plan_no, 0, 9))
    assert {leg.key.request_id for leg in prefill.engine.core.legs} == set("abcd")
    used = prefill.used
    prefill.start(start("e", tokens=8))
    assert prefill.used == used, "past the cap nobody is admitted"
    prefill.open_ring()
    for name in "ab":
        prefill.link(m.Grant(LegKey(name, 0, 0), (8,)))
    assert any(each.key.request_id == "e" for each in prefill.engine.core.batch.running.values())


def test_prefill_admits_in_order_and_nobody_overtakes() -> None:
    prefill = Prefill(changed(FACTS, num_large=4))
    prefill.start(start("a", tokens=8))
    prefill.start(start("long", tokens=16))
    prefill.start(start("short", tokens=1))
    assert [prompt.leg.key.request_id for prompt in prefill.prompts.queue] == ["long", "short"]


@pytest.mark.parametrize(
    ("leg", "reason"),
    [
        (start(tokens=64), "64 tokens leave no room within the model's 64"),
        (start(tokens=50), "50 prompt tokens do not fit the prefill server's KV pool of 48 tokens"),
        (start(choices=5), "5 choices are more than the server's 4 slots"),
        (replace(start(), choices=()), "a leg needs at least one token and one choice"),
    ],
)
def test_prefill_refuses_what_can_never_run_and_says_why(leg: StartLeg, reason: str) -> None:
    assert to_router(Prefill(FACTS).start(leg)) == [LegEnd(leg.key, Outcome.REFUSED, reason)]


def test_prefill_gives_back_what_it_has_no_room_to_queue() -> None:
    prefill = Prefill(changed(FACTS, num_large=2, max_waiting=1))
    prefill.start(start("a"))
    prefill.start(start("b"))
    assert outcomes(prefill.start(start("c"))) == [Outcome.GIVEN_BACK]


def test_prefill_that_drains_gives_back_what_has_not_begun_and_computes_the_rest() -> None:
    prefill = Prefill(changed(FACTS, num_large=2))
    begun, waits = start("begun"), start("waits", first_token=50)
    prefill.start(begun)
    prefill.start(waits)
    out = prefill.do(prefill.engine.give_back("P drains"))
    assert [(end.key, end.outcome, end.reason) for end in to_router(out)] == [
        (waits.key, Outcome.GIVEN_BACK, "P drains")
    ]
    assert to_link([*out, *prefill.event(SendsDropped(LINK, waits.key))]) == [], "decode never heard of it"
    prefill.open_ring()
    prefill.link(m.Grant(begun.key, (0,)))
    prefill.compute_all()
    prefill.end(begun)
    assert prefill.engine.idle


def test_a_prompt_that_a_ring_would_cut_into_countless_pieces_ends_alone_and_with_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("disagg.engine.handoff.fitting.MAX_PIECES", 16)
    prefill = Prefill(FACTS)
    prefill.link(m.OpenRing(0, 0, 48, (0,)))
    short, long = start("short", tokens=3), start("long", tokens=24)
    prefill.start(short)
    prefill.start(long)
    assert to_link(prefill.link(m.Grant(short.key, (0,)))), "the other leg of the link is sent"
    out = prefill.link(m.Grant(long.key, (0,)))
    assert not [i for i in out if isinstance(i, DropLink)]
    (end,) = [message for message in to_router(out) if isinstance(message, LegEnd)]
    assert (end.key, end.outcome) == (long.key, Outcome.PEER_LOST)
    assert re.match(
        r"24 tokens would be sent in \d+ pieces, as transfer.gather_bytes = 4096 here and transfer.segment_bytes = 48 there "
        r"cut them; at most 16 may be",
        end.reason,
    )
    assert to_link(prefill.event(SendsDropped(LINK, long.key))) == [m.Withdraw(long.key, end.reason, False)]


def test_a_prompt_whose_chunks_came_out_so_small_that_its_pieces_are_too_many_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("disagg.transfer.session.MAX_PIECES", 1)
    prefill = Prefill(FACTS)
    leg = start(tokens=16)
    prefill.open_ring()
    prefill.start(leg)
    prefill.link(m.Grant(leg.key, (0,)))
    out = prefill.do(prefill.engine.tick(prefill.now))
    (end,) = [message for message in to_router(out) if isinstance(message, LegEnd)]
    assert (end.outcome, "more than" in end.reason) == (Outcome.PEER_LOST, True)
    assert not [message for message in to_link(out) if isinstance(message, m.SentAll)]
