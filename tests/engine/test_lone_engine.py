"""Each engine alone, call by call: which instructions an event gives. What memory has to do with it: test_short_of_memory."""

from __future__ import annotations

import re
from typing import get_args

import pytest
from msgspec.structs import replace

from disagg.decode_server.role import DECODE
from disagg.engine.handoff import withdrawals
from disagg.engine.handoff.receive import WANT_AFTER_S
from disagg.engine.handoff.ring_table import DOUBTFUL_S
from disagg.engine.instructions import DialLink, DropLink, ToLink
from disagg.engine.now import Now
from disagg.messages import link as m
from disagg.messages.legs import LegEnd, LegTokens, Outcome, PeerRef, StartLeg
from disagg.messages.pieces import Piece
from disagg.messages.plan import NO_TOKEN, PageCopy, SampledToken
from disagg.messages.transfer import (
    Beat,
    Bind,
    Bound,
    DropSends,
    ExpectPiece,
    ForgetEntry,
    Landing,
    PeerAdded,
    PeerRemoved,
    PeerWired,
    PieceFailed,
    PieceSent,
    RemovePeer,
    SendPiece,
    SendsDropped,
    TransferEvent,
    Unbind,
    Unbound,
)
from disagg.mixed_server.role import MIXED
from disagg.prefill_server.role import PREFILL
from disagg.server.role import ServerRole
from disagg.transfer.session import MAX_WANTS
from disagg.types.errors import ProtocolError
from disagg.types.ids import FinishReason, LegKey, Role
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
    pages_of,
    plans,
    sent,
    start,
    to_link,
    to_router,
    to_transfer,
)

FACTS = facts(prefix_cache=False)


# ---- prefill


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


# ---- decode


def test_decode_goes_from_the_leg_to_its_last_token() -> None:
    decode = Decode(FACTS)
    leg = start(peer=P_REF)
    assert decode.start(leg) == []
    out = decode.link(m.Announce(leg.key, 6))
    assert to_link(out) == [m.OpenRing(0, 0, 4096, (0,))]
    assert to_transfer(out) == [Bind(leg.key, pages_of((0, (0, 1))))]
    assert decode.used == 3, "and a page for more outputs"
    assert to_link(decode.event(Bound(leg.key))) == [m.Grant(leg.key, (0,))]
    out = decode.link(m.OfferPieces(leg.key, 0, (Piece(0, 0, 2, 0, 6),)))
    (expect,) = to_transfer(out)
    assert isinstance(expect, ExpectPiece)
    entry = m.Entry(expect.entry_id, 0, 0, 0, 0, 2, 0, 200)
    assert to_link(out) == [m.AssignEntries(leg.key, 0, (entry,))]
    assert decode.link(m.FirstTokens(leg.key, (m.FirstToken(0, 9, None, None),))) == []
    out = decode.land(expect)
    assert to_link(out) == [m.Watermarks(0, (208,)), m.Complete(leg.key)]
    assert to_router(out) == [LegTokens(leg.key, 0, 0, (9,))]
    assert to_transfer(out) == [Unbind(leg.key)]
    first, second = plans(out)
    (sequence,) = first.starts
    assert (sequence.token_ids, sequence.computed) == ((1, 2, 3, 4, 5, 6, 9), 6)
    assert sequence.tables == pages_of((0, (0, 1)))
    assert [(run.num_tokens, run.new_pages) for run in (*first.runs, *second.runs)] == [(1, ()), (1, ())]
    decode.event(Unbound(leg.key))
    said: list[object] = []
    new_pages = []
    for plan_no, token in enumerate((11, 12, 13, 14)):
        out = decode.step(plan_no, SampledToken(0, 0, token))
        said += to_router(out)
        new_pages += [run.new_pages for plan in plans(out) for run in plan.runs]
    assert said[:3] == [LegTokens(leg.key, 0, i, (10 + i,)) for i in (1, 2, 3)]
    assert said[3] == LegTokens(leg.key, 0, 4, (14,), (), FinishReason.LENGTH)
    assert isinstance(said[4], LegEnd)
    assert said[4].outcome is Outcome.DONE
    assert decode.used == 0
    assert new_pages == [((2,),), ()], "for the ninth token"
    assert decode.engine.counters.discarded_tokens == 0, "the length is known ahead"


def test_a_choice_whose_logits_are_no_numbers_ends_its_leg_and_no_token_is_made_up() -> None:
    decode = Decode(FACTS)
    leg = start(choices=2, peer=P_REF)
    decode.running(leg)
    decode.event(Unbound(leg.key))
    out = decode.step(0, SampledToken(0, 0, 11), SampledToken(1, 1, NO_TOKEN))
    tokens, end = to_router(out)
    assert tokens == LegTokens(leg.key, 0, 1, (11,))
    assert isinstance(end, LegEnd) and end.outcome is Outcome.WORKER_LOST
    assert end.reason.startswith("the logits of output token 1 are no numbers")
    decode.step(1, SampledToken(0, 0, 12), SampledToken(1, 1, 0))  # it had been launched by then
    assert decode.engine.idle and decode.used == 0 and decode.engine.counters.bad_logits == 1


def test_a_stop_is_learnt_one_step_late_and_the_extra_token_is_discarded_and_counted() -> None:
    decode = Decode(FACTS)
    leg = start(peer=P_REF)
    assert len(plans(decode.running(leg))) == 2
    out = decode.step(0, SampledToken(0, 0, 0))
    assert to_router(out)[0] == LegTokens(leg.key, 0, 1, (0,), (), FinishReason.STOP)
    decode.event(Unbound(leg.key))
    assert decode.used == 3, "plan 1 still names them"
    out = decode.step(1, SampledToken(0, 0, 5))
    assert to_router(out) == []
    assert decode.engine.counters.discarded_tokens == 1
    assert decode.used == 0


def test_a_first_token_that_ends_it_needs_no_transfer() -> None:
    decode = Decode(FACTS)
    leg = start(peer=P_REF)
    decode.granted(leg)
    out = decode.link(m.FirstTokens(leg.key, (m.FirstToken(0, 0, None, FinishReason.STOP),)))
    assert to_link(out) == [m.Complete(leg.key)]
    assert to_router(out)[0] == LegTokens(leg.key, 0, 0, (0,), (), FinishReason.STOP)
    assert outcomes(out) == [Outcome.DONE]
    assert decode.used == 3
    decode.event(Unbound(leg.key))
    assert decode.engine.idle
    assert decode.used == 0


def test_choices_share_full_pages_and_copy_the_partial_one() -> None:
    decode = Decode(FACTS)
    first = plans(decode.running(start(choices=3, peer=P_REF)))[0]
    tables = [s.tables[0].pages for s in first.starts]
    assert [table[0] for table in tables] == [0, 0, 0]
    assert first.copies == tuple(PageCopy(0, tables[0][1], table[1]) for table in tables[1:])
    assert len({table[1] for table in tables}) == 3
    assert len({s.samplers[0].slot for s in first.starts}) == 3


def test_an_announcement_before_the_leg_is_remembered() -> None:
    decode = Decode(FACTS)
    leg = start(peer=P_REF)
    first = m.FirstTokens(leg.key, (m.FirstToken(0, 0, None, FinishReason.STOP),))
    assert decode.link(m.Announce(leg.key, 6)) == []
    assert decode.link(first) == []
    assert outcomes(decode.start(leg)) == [Outcome.DONE]
    assert not decode.receiver.links[LINK].early
    assert not decode.receiver.links[LINK].early_tokens


def test_an_announcement_of_a_leg_that_has_ended_is_revoked() -> None:
    decode = Decode(FACTS)
    leg = start(peer=P_REF)
    decode.start(leg)
    assert outcomes(decode.abort(leg)) == [Outcome.ABORTED]
    assert to_link(decode.link(m.Announce(leg.key, 6))) == [m.Revoke(leg.key, "not wanted", aborted=True)]


def test_an_unknown_peer_is_dialled_and_its_failure_ends_the_leg() -> None:
    decode = Decode(FACTS, linked=False)
    leg = start(peer=P_REF)
    assert decode.start(leg) == [DialLink(P_REF)]
    out = decode.do(decode.engine.dial_failed("P", "p1", "nobody there"))
    assert to_router(out) == [LegEnd(leg.key, Outcome.GIVEN_BACK, "nobody there")]


def test_a_peer_that_has_restarted_ends_the_legs_of_its_former_self() -> None:
    decode = Decode(FACTS, linked=False)
    leg = start(peer=P_REF)
    decode.start(leg)
    out = decode.do(decode.link_up(hello(PeerRef("P", "p:1", "p2"))))
    assert outcomes(out) == [Outcome.GIVEN_BACK]


@pytest.mark.parametrize("phase", ["waiting", "queued", "binding", "receiving", "running"])
def test_an_abort_in_any_phase_gives_everything_back(phase: str) -> None:
    decode = Decode(changed(FACTS, num_large=3) if phase == "queued" else FACTS)
    other, leg = start("other", peer=P_REF), start(peer=P_REF)
    if phase == "queued":
        decode.granted(other)
    if phase == "running":
        decode.running(leg)
    elif phase == "receiving":
        decode.receiving(leg)
    else:
        decode.start(leg)
        if phase != "waiting":
            decode.link(m.Announce(leg.key, 6))
    out = decode.abort(leg)
    assert outcomes(out) == [Outcome.ABORTED]
    revoked = m.Revoke(leg.key, "aborted by the router", True) in to_link(out)
    assert revoked == (phase not in ("waiting", "running"))
    assert (Unbind(leg.key) in to_transfer(out)) == (phase in ("binding", "receiving"))
    if phase == "running":
        assert decode.step(0, SampledToken(0, 0, 5))[:0] == []
        decode.step(1, SampledToken(0, 0, 5))
        decode.step(2)
        assert decode.engine.counters.max_steps_after_abort <= 2
    decode.event(Unbound(leg.key))
    decode.link(m.Drained(leg.key))
    assert leg.key not in decode.engine.core.legs
    assert decode.used == (3 if phase == "queued" else 0)
    assert not decode.receiver.rings.table.links[LINK].live


def test_entries_of_a_revoked_leg_are_kept_until_prefill_is_quiet() -> None:
    decode = Decode(FACTS)
    leg = start(peer=P_REF)
    decode.receiving(leg)
    decode.abort(leg)
    decode.event(Unbound(leg.key))
    assert decode.used == 0
    assert decode.receiver.rings.table.links[LINK].live, "prefill may still write there"
    assert to_link(decode.link(m.Drained(leg.key))) == [m.Watermarks(0, (208,))]
    assert not decode.receiver.rings.table.links[LINK].live


@pytest.mark.parametrize("aborted", [True, False])
def test_a_leg_that_prefill_gives_up_in_mid_transfer_ends_as_what_it_is(aborted: bool) -> None:
    decode = Decode(FACTS)
    leg = start(peer=P_REF)
    decode.receiving(leg)
    out = decode.link(m.Withdraw(leg.key, "for a reason", aborted))
    assert outcomes(out) == [Outcome.ABORTED if aborted else Outcome.PEER_LOST]
    assert dict(decode.engine.counters.transfer_failures) == ({} if aborted else {"peer_lost": 1})
    assert dict(decode.engine.counters.legs) == {"aborted" if aborted else "peer_lost": 1}
    assert outcomes(decode.abort(leg)) == [], "it has ended"


def test_an_aborted_choice_leaves_the_others_running() -> None:
    decode = Decode(FACTS)
    leg = start(choices=2, peer=P_REF)
    decode.running(leg)
    assert outcomes(decode.abort(leg, 0)) == []
    out = decode.step(0, SampledToken(0, 0, 5), SampledToken(1, 1, 6))
    assert to_router(out) == [LegTokens(leg.key, 1, 1, (6,))]
    assert outcomes(decode.abort(leg, 1)) == [Outcome.ABORTED]


def test_choices_that_are_dropped_one_by_one_before_their_pages_are_unbound_end_the_leg() -> None:
    """They begin late after a piece that was asked for twice, and nothing that they say would end the leg."""
    decode = Decode(FACTS)
    leg = start(choices=2, peer=P_REF)
    decode.receiving(leg)
    decode.first_tokens(leg)
    decode.link(m.SentAll(leg.key, 1))
    decode.tick(WANT_AFTER_S + 0.1)
    (again,) = decode.offer(leg, Piece(0, 0, 2, 0, 6))
    assert outcomes(decode.land(again) + decode.abort(leg, 0) + decode.abort(leg, 1)) == []
    assert outcomes(decode.event(Unbound(leg.key)) + decode.compute_all()) == [Outcome.ABORTED]
    decode.link(m.Drained(leg.key))
    assert decode.engine.idle and decode.used == 0


def test_a_piece_with_a_wrong_checksum_ends_the_attempt() -> None:
    decode = Decode(FACTS)
    leg = start(peer=P_REF)
    out = decode.land(decode.receiving(leg), ok=False)
    assert outcomes(out) == [Outcome.BAD_TRANSFER]
    assert m.Revoke(leg.key, "a piece failed its checksum check") in to_link(out)
    assert decode.engine.counters.checksum_failures == 1


def test_pieces_that_were_sent_and_did_not_come_are_wanted_again_and_at_last_given_up() -> None:
    decode = Decode(FACTS)
    leg = start(peer=P_REF)
    decode.receiving(leg)
    now_s = 0.0
    for attempt in range(MAX_WANTS):
        decode.link(m.SentAll(leg.key, attempt + 1))
        now_s += WANT_AFTER_S + 0.1
        assert m.WantPieces(leg.key, (Piece(0, 0, 2, 0, 6),)) in to_link(decode.tick(now_s))
        decode.offer(leg, Piece(0, 0, 2, 0, 6))
    decode.link(m.SentAll(leg.key, MAX_WANTS + 1))
    assert outcomes(decode.tick(now_s + WANT_AFTER_S + 0.1)) == [Outcome.BAD_TRANSFER]


def test_the_entry_of_a_lost_notification_does_not_stay_live_for_ever() -> None:
    """Its piece was sent twice and came once; it would pin the watermark and keep the ring from ever closing."""
    decode = Decode(FACTS)
    leg = start(peer=P_REF)
    decode.receiving(leg)  # written, but its notification is lost
    decode.link(m.SentAll(leg.key, 1))
    decode.tick(WANT_AFTER_S + 0.1)
    (again,) = decode.offer(leg, Piece(0, 0, 2, 0, 6))
    decode.link(m.FirstTokens(leg.key, (m.FirstToken(0, 9, None, None),)))
    decode.link(m.SentAll(leg.key, 2))  # before the second one lands
    decode.land(again)
    assert decode.receiver.rings.table.links[LINK].live
    decode.event(Unbound(leg.key))
    assert not decode.receiver.rings.table.links[LINK].live


def test_before_a_piece_is_asked_for_again_its_ranks_forget_the_entry_and_the_ring_goes_on() -> None:
    decode = Decode(FACTS)
    leg, other = start("lost", peer=P_REF), start("other", peer=P_REF)
    lost = decode.receiving(leg)  # written, but its notification is lost
    behind = decode.receiving(other)
    ring = decode.receiver.rings.table.links[LINK]
    decode.link(m.SentAll(leg.key, 1))
    assert ForgetEntry(LINK, lost.entry_id) in to_transfer(decode.tick(WANT_AFTER_S + 0.1))
    (again,) = decode.offer(leg, Piece(0, 0, 2, 0, 6))
    decode.first_tokens(other)
    decode.land(behind)
    assert ring.watermarks == (0,)
    decode.missed(lost)
    assert ring.watermarks == (ring.live[again.entry_id].entry.ring_byte,)
    decode.link(m.SentAll(leg.key, 2))
    decode.first_tokens(leg)
    assert m.Complete(leg.key) in to_link(decode.land(again)), "it cost no attempt"


def test_where_a_ring_is_full_prefill_is_asked_which_entries_are_written() -> None:
    """SentAll never comes of a leg whose last pieces wait for the entry of a notification that was lost."""
    decode = Decode(changed(FACTS, gather_bytes=512, segment_bytes=512, arena_bytes=4 * 512))
    leg, other = start("lost", tokens=12, peer=P_REF), start("other", tokens=4, peer=P_REF)
    decode.granted(leg)
    first, second, third = decode.offer(leg, *(Piece(0, 0, 2, token, token + 4) for token in (0, 4, 8)))
    assert to_link(decode.tick(DOUBTFUL_S + 0.1)) == [], "there is room: nobody waits for anything"
    decode.receiving(other)
    (ask,) = to_link(decode.tick(DOUBTFUL_S + 0.2))
    assert ask == m.AskWritten(0, (first.entry_id, second.entry_id, third.entry_id)), "the other's is young"
    assert to_link(decode.tick(DOUBTFUL_S + 0.3)) == [], "it was asked a moment ago"

    out = decode.link(m.Written(0, (first.entry_id, 999)))
    assert to_transfer(out) == [ForgetEntry(LINK, first.entry_id)]
    ring = decode.receiver.rings.table.links[LINK]
    assert to_link(decode.missed(first)) == [m.Watermarks(0, (ring.live[second.entry_id].entry.ring_byte,))]
    assert decode.engine.counters.lost_notifications == 1
    decode.land(second)
    assert to_transfer(decode.link(m.Written(0, (second.entry_id,)))) == [], "it has landed meanwhile"
    assert to_transfer(decode.link(m.Written(1, (third.entry_id,)))) == [], "of another ring"


def test_a_transfer_that_stands_still_is_given_up() -> None:
    decode = Decode(FACTS)
    leg = start(peer=P_REF)
    decode.receiving(leg)
    assert outcomes(decode.tick(FACTS.transfer.progress_s)) == []
    assert outcomes(decode.tick(FACTS.transfer.progress_s + 1)) == [Outcome.PEER_LOST]


def test_a_transfer_is_not_given_up_for_its_place_behind_one_that_stands_still() -> None:
    decode = Decode(FACTS)
    first, second, third = (start(name, peer=P_REF) for name in ("first", "second", "third"))
    for leg in (first, second, third):
        decode.receiving(leg)

    def given_up(now_s: float) -> list[str]:
        return [end.key.request_id for end in to_router(decode.tick(now_s)) if isinstance(end, LegEnd)]

    assert given_up(1.0) == []
    assert given_up(FACTS.transfer.progress_s + 2) == ["first"]
    decode.event(Unbound(first.key))
    decode.link(m.Drained(first.key))  # now it is the second's turn
    assert given_up(FACTS.transfer.progress_s + 3) == []
    assert given_up(2 * FACTS.transfer.progress_s + 4) == ["second"]
    # Prefill never says that it is quiet, and for that the third waits as long again.
    assert given_up(2 * FACTS.transfer.progress_s + 5) == []
    assert given_up(3 * FACTS.transfer.progress_s + 5) == []
    assert given_up(3 * FACTS.transfer.progress_s + 6) == ["third"]


def test_a_lost_link_after_everything_landed_costs_nothing() -> None:
    decode = Decode(FACTS)
    leg = start(peer=P_REF)
    decode.running(leg)
    assert outcomes(decode.lose_link("silence")) == []
    assert to_router(decode.step(0, SampledToken(0, 0, 5))) == [LegTokens(leg.key, 0, 1, (5,))]


def test_a_lost_link_gives_back_what_was_never_announced_on_it() -> None:
    decode = Decode(FACTS)
    announced, waits = start("announced", peer=P_REF), start("waits", first_token=50, peer=P_REF)
    decode.announced(announced)
    decode.start(waits)
    ends = {
        end.key: end.outcome for end in to_router(decode.lose_link("P is shutting down")) if isinstance(end, LegEnd)
    }
    assert ends == {announced.key: Outcome.PEER_LOST, waits.key: Outcome.GIVEN_BACK}


@pytest.mark.parametrize("gone", [False, True])
def test_the_segments_of_a_lost_link_are_quarantined_unless_its_workers_are_gone(gone: bool) -> None:
    decode = Decode(FACTS)
    decode.receiving(start(peer=P_REF))
    out = decode.lose_link("silence", gone=gone)
    assert outcomes(out) == [Outcome.PEER_LOST]
    assert decode.engine.arena_bytes()[2] == (0 if gone else 4096)
    decode.engine.peer_gone(LINK)
    assert decode.engine.arena_bytes() == (4 * 4096, 0, 0)


def test_the_segments_of_a_lost_link_come_back_when_its_living_peer_says_that_it_is_quiet() -> None:
    decode = Decode(FACTS)
    decode.receiving(start(peer=P_REF))
    decode.lose_link("silence")
    other = PeerRef("other", "", "1")
    decode.do(decode.link_up(hello(other), LINK + 1))
    decode.link(m.QuietLinks(("generation",)), LINK + 1)
    assert decode.engine.arena_bytes()[2] == 4096, "nobody speaks for another"
    decode.do(decode.link_up(hello(P_REF), LINK + 2))
    decode.link(m.QuietLinks(("another",)), LINK + 2)
    assert decode.engine.arena_bytes()[2] == 4096
    decode.link(m.QuietLinks(("another", "generation")), LINK + 2)
    assert decode.engine.arena_bytes() == (4 * 4096, 0, 0)


def test_a_leg_whose_peer_can_get_no_ring_is_given_back_and_not_kept() -> None:
    """The peer's share is quarantined, and it lives: no ring for it until it has exited, or says that it is quiet."""
    decode = Decode(FACTS)
    decode.receiving(start("a", peer=P_REF))
    decode.lose_link("silence")
    decode.do(decode.link_up(hello(P_REF), LINK + 1))
    leg = start("b", peer=P_REF)
    decode.start(leg)
    out = decode.link(m.Announce(leg.key, 6), LINK + 1)
    assert outcomes(out) == [Outcome.GIVEN_BACK]
    assert isinstance(to_link(out)[0], m.Revoke)


def test_grants_go_to_the_oldest_first_and_nobody_overtakes() -> None:
    decode = Decode(changed(FACTS, num_large=7))
    a, b, c = start("a", peer=P_REF), start("b", tokens=20, peer=P_REF), start("c", tokens=1, peer=P_REF)
    for leg in (a, b, c):
        decode.start(leg)
    bound = [to_transfer(decode.link(m.Announce(leg.key, len(leg.token_ids)))) for leg in (a, b, c)]
    assert bound == [[Bind(a.key, pages_of((0, (0, 1))))], [], []], "c would fit, but b waits for pages before it"
    decode.abort(a)
    out = decode.event(Unbound(a.key))
    assert to_transfer(out) == [Bind(b.key, pages_of((0, (0, 1, 2, 3, 4))))]


def test_an_idle_ring_is_closed_and_its_segments_come_back() -> None:
    decode = Decode(FACTS)
    leg = start(peer=P_REF)
    decode.receiving(leg)
    decode.abort(leg)
    decode.event(Unbound(leg.key))
    decode.link(m.Drained(leg.key))
    decode.tick(5.0)
    (close,) = to_link(decode.tick(5.0 + FACTS.transfer.link_idle_s)) or [m.CloseRing(0)]
    assert close == m.CloseRing(0)
    decode.link(m.RingClosed(0))
    assert decode.engine.arena_bytes() == (4 * 4096, 0, 0)
    with pytest.raises(ProtocolError, match="not asked for"):
        decode.link(m.RingClosed(0))


@pytest.mark.parametrize(
    ("leg", "reason"),
    [
        (start(tokens=64), "64 tokens leave no room within the model's 64"),
        (
            start(tokens=50),
            "prompt and max_tokens come to 54 tokens for each of 1 choices; the decode server has KV memory for 48 tokens of one",
        ),
        (start(tokens=1, choices=65), "65 choices are more than a request may have, 64"),
        (replace(start(), token_ids=()), "a leg needs at least one token and one choice"),
    ],
)
def test_decode_refuses_what_can_never_run_and_says_why(leg: StartLeg, reason: str) -> None:
    assert to_router(Decode(FACTS).start(leg)) == [LegEnd(leg.key, Outcome.REFUSED, reason)]


def test_messages_that_a_side_may_not_send_are_errors() -> None:
    key = LegKey("r", 0, 0)
    with pytest.raises(ProtocolError, match="decode server may not send Announce"):
        Prefill(FACTS).link(m.Announce(key, 1))
    with pytest.raises(ProtocolError, match="prefill server may not send Grant"):
        Decode(FACTS).link(m.Grant(key, (0,)))


KEY = LegKey("r", 0, 0)
# Of nothing that is known there: whoever may report them is not contradicted.
REPORTS: tuple[TransferEvent, ...] = (
    PeerAdded(LINK, 0, ""),
    PeerWired(LINK, 0, ("tcp",)),
    PeerRemoved(LINK, True),
    PieceSent(LINK, 3, KEY, 1, 0.0, 0.0),
    PieceFailed(LINK + 1, 3, KEY, "gone"),
    SendsDropped(LINK, KEY),
    Bound(KEY),
    Unbound(KEY),
    Landing(LINK + 1, 3, KEY, True, "", 1, 0.0, 0.0),
    Beat(0, 0.0, 0, 0),
)
WRITERS_REPORT = {PeerAdded, PeerRemoved, PieceSent, PieceFailed, SendsDropped}
MAY_REPORT: dict[Role, set[type[TransferEvent]]] = {
    Role.PREFILL: {Beat, *WRITERS_REPORT},
    Role.DECODE: {Beat, *WRITERS_REPORT, Bound, Unbound, Landing},  # which hands over what it has begun, too
    Role.MIXED: {Beat},
}


@pytest.mark.parametrize("role", [PREFILL, DECODE, MIXED], ids=lambda role: role.role.value)
def test_what_a_roles_worker_has_no_part_in_it_may_not_report(role: ServerRole) -> None:
    assert {type(report) for report in REPORTS} == set(get_args(TransferEvent))
    for report in REPORTS:
        engine = role.engine(FACTS)
        if type(report) in MAY_REPORT[role.role]:
            engine.transfer_event(0, report, Now(0.0, 0.0))
            continue
        with pytest.raises(ProtocolError, match=f"{role.role.value} worker may not report {type(report).__name__}$"):
            engine.transfer_event(0, report, Now(0.0, 0.0))


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
