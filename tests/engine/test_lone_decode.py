"""A decode engine alone, call by call: which instructions an event gives. What memory has to do with it: test_short_of_memory."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from disagg.engine.handoff.receive import WANT_AFTER_S
from disagg.engine.handoff.ring_table import DOUBTFUL_S
from disagg.engine.instructions import DialLink
from disagg.messages import link as m
from disagg.messages.legs import LegEnd, LegTokens, Outcome, PeerRef, StartLeg
from disagg.messages.pieces import Piece
from disagg.messages.plan import NO_TOKEN, PageCopy, SampledToken
from disagg.messages.transfer import (
    Bind,
    Bound,
    ExpectPiece,
    ForgetEntry,
    Unbind,
    Unbound,
)
from disagg.transfer.session import MAX_WANTS
from disagg.types.errors import ProtocolError
from disagg.types.ids import FinishReason
from tests.engine.lone_engine import (
    LINK,
    P_REF,
    Decode,
    changed,
    facts,
    hello,
    outcomes,
    pages_of,
    plans,
    start,
    to_link,
    to_router,
    to_transfer,
)

FACTS = facts(prefix_cache=False)


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
