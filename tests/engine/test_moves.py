"""A decode engine hands answers over: stopped between two steps, and kept for as long as somebody may come for them."""

from __future__ import annotations

from msgspec.structs import replace

from disagg.engine.moves import GRANT_S, KEEP_S
from disagg.messages import link as m
from disagg.messages.legs import Outcome, PeerRef, StartLeg
from disagg.messages.transfer import Unbound
from disagg.types.ids import LegKey
from tests.engine.lone_engine import P_REF, PARAMS, Decode, facts, hello, outcomes, plans, said, start, to_link

OTHER = PeerRef("E", "e:1", "e1")
BACK = 8  # the link that OTHER dials


def answering(choices: int = 1) -> tuple[Decode, StartLeg]:
    """A prompt of 5 tokens; a token of each choice has come from prefill, and two from here."""
    decode = Decode(facts(max_slots=choices))
    leg = start(tokens=5, choices=choices, params=replace(PARAMS, max_tokens=20, n=choices), peer=P_REF)
    leg = replace(leg, key=LegKey("r", 1, 0))
    decode.joined(leg)
    decode.compute()
    decode.compute()
    return decode, leg


def handed_over() -> tuple[Decode, StartLeg]:
    """And the leg that moves it, which is not started."""
    decode, leg = answering()
    out = decode.do(decode.engine.hand_over(leg.key))
    assert not outcomes(out), "plans in flight name it"
    told = [9, 100, 101]
    while decode.unreported:
        out += decode.compute()
    told += [token for *_, token in said(out)]
    assert outcomes(out) == [Outcome.HANDED_OVER] and not any(plan.runs for plan in plans(out))
    assert decode.engine.counters.handed_over_tokens == 5 + len(told) - 1
    moves = replace(leg, key=LegKey("r", 2, 0), token_ids=(*leg.token_ids, *told[:-1]), peer=OTHER, moves_attempt=1)
    return decode, moves


def test_what_was_handed_over_is_announced_with_its_last_token_and_let_go_when_it_is_there() -> None:
    decode, moves = handed_over()
    assert decode.used and decode.batch.slots.free == decode.batch.slots.total
    decode.start(moves)
    told = to_link(decode.do(decode.engine.link_up(BACK, hello(OTHER), decode.now, dialled=False)))
    announce, first = (message for message in told if isinstance(message, m.Announce | m.FirstTokens))
    assert announce == m.Announce(moves.key, len(moves.token_ids))
    assert isinstance(first, m.FirstTokens) and [token.choice for token in first.tokens] == [0]
    opened = m.OpenRing(0, 0, 4096, (0,))
    decode.link(opened, BACK)
    (offer,) = to_link(decode.link(m.Grant(moves.key, (0,)), BACK))
    assert isinstance(offer, m.OfferPieces) and offer.pieces[-1].token_stop == len(moves.token_ids)
    out = decode.link(m.Revoke(moves.key, "the other one has no use for it"), BACK)
    assert outcomes(out) == [Outcome.PEER_LOST] and decode.used, "a write may be under way"


def test_what_nobody_comes_for_is_let_go() -> None:
    decode, moves = handed_over()
    decode.tick(KEEP_S + 1)
    assert not decode.used and decode.engine.idle
    assert outcomes(decode.start(moves)) == [Outcome.GIVEN_BACK]
    assert decode.engine.idle


def test_what_gets_no_pages_at_the_other_server_is_given_back() -> None:
    decode, moves = handed_over()
    decode.start(moves)
    decode.tick(GRANT_S - 1)
    assert decode.used
    assert outcomes(decode.tick(GRANT_S + 1)) == [Outcome.GIVEN_BACK]
    assert not decode.used and decode.engine.idle


def test_other_tokens_than_those_that_are_kept_move_nothing() -> None:
    decode, moves = handed_over()
    wrong = replace(moves, token_ids=(*moves.token_ids[:-1], 7))
    assert outcomes(decode.start(wrong)) == [Outcome.GIVEN_BACK]
    assert not decode.used and decode.engine.idle


def test_a_leg_that_is_not_here_yet_stops_when_it_has_begun() -> None:
    decode, leg = Decode(facts()), replace(start(tokens=5, peer=P_REF), key=LegKey("r", 1, 0))
    grant = decode.granted(leg)
    assert not outcomes(decode.do(decode.engine.hand_over(leg.key)))
    out = decode.arrived(leg, grant)
    assert said(out) == [("r", 0, 0, 9)] and not plans(out) and not outcomes(out), "ranks have its pages bound"
    assert outcomes(decode.event(Unbound(leg.key))) == [Outcome.HANDED_OVER]


def test_a_choice_that_was_dropped_does_not_keep_the_others() -> None:
    decode, leg = answering(choices=2)
    decode.abort(leg, choice=1)
    out = decode.do(decode.engine.hand_over(leg.key))
    while decode.unreported:
        out += decode.compute()
    assert outcomes(out) == [Outcome.HANDED_OVER]


def test_an_answer_that_ends_while_it_stops_is_done() -> None:
    decode, leg = Decode(facts()), replace(start(tokens=5, peer=P_REF), key=LegKey("r", 1, 0))
    decode.joined(replace(leg, params=replace(PARAMS, max_tokens=2)))
    out = decode.do(decode.engine.hand_over(leg.key)) + decode.compute_all()
    assert outcomes(out) == [Outcome.DONE] and decode.engine.idle
