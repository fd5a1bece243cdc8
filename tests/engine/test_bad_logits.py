"""KV whose logits are no numbers is kept nowhere, nor brought from where it was kept: what begins with it would have none."""

from __future__ import annotations

import pytest

from disagg.engine.facts import OffloadFacts
from disagg.engine.instructions import Instruction
from disagg.messages import link as m
from disagg.messages.layout import LayerGroup
from disagg.messages.legs import Outcome, StartLeg
from disagg.messages.pieces import Piece
from disagg.messages.plan import NO_TOKEN, SampledToken
from disagg.messages.tiers import CopiedIn, CopyIn, CopyOut, PartsRead
from disagg.messages.transfer import SendsDropped, Unbind, Unbound
from disagg.offload.instructions import Ask, Fetch, StoreFound
from disagg.offload.rates import MOST_WAIT_S
from tests.engine.lone_engine import (
    FULL,
    LINK,
    P_REF,
    STATE,
    WINDOW,
    Decode,
    Prefill,
    facts,
    outcomes,
    plans,
    start,
    to_transfer,
)
from tests.engine.lone_mixed import WIDE, Mixed, leg
from tests.engine.test_lone_offload import PAGES, done, loaded, store_commands, with_a_prompt_on_the_host_only

GROUPS = pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), (FULL, STATE)])


def fails(prefill: Prefill, leg: StartLeg) -> list[object]:
    """Its chunks are computed, and its first token cannot be chosen. What ranks are told."""
    prefill.start(leg)
    while not (plan := prefill.unreported[0]).runs or not plan.runs[-1].sample:
        prefill.compute()
    out = prefill.step(plan.plan_no, SampledToken(plan.runs[-1].seq_id, 0, NO_TOKEN))
    assert outcomes(out) == [Outcome.WORKER_LOST]
    return [*to_transfer(out), *to_transfer(prefill.event(SendsDropped(LINK, leg.key)))]


@GROUPS
def test_a_prompt_that_failed_is_computed_anew_from_its_first_token(groups: tuple[LayerGroup, ...]) -> None:
    """Also of what it had found cached: nobody knows what of it is wrong."""
    prefill = Prefill(facts(*groups, num_large=40))
    prefill.through(start("before", 16))
    assert prefill.cached() == 4
    fails(prefill, start("fails", 20))
    assert not prefill.known and prefill.used == 0
    out = prefill.start(start("again", 20))
    assert plans(out)[0].starts[0].computed == 0
    prefill.compute_all()
    assert prefill.cached() == 5, "what is well is kept as ever"


def test_nothing_of_it_goes_to_the_host() -> None:
    prefill = Prefill(facts(num_large=40, offload=OffloadFacts(40, 0, False)))
    assert not [each for each in fails(prefill, start("fails", 13)) if isinstance(each, CopyOut)]


@pytest.mark.parametrize("stored", [False, True])
def test_what_the_host_or_storage_has_of_it_is_not_brought_again(stored: bool) -> None:
    prefill = Prefill(facts(num_large=40, offload=OffloadFacts(40, 0, stored)))
    pages = 4

    def begins(leg: StartLeg) -> list[Instruction]:
        out = prefill.start(leg)
        for ask in store_commands(out, Ask):
            found = StoreFound(ask.ask, pages, (tuple(range(pages)),))
            out += prefill.do(prefill.engine.store_event(found, prefill.now))
        return out

    if not stored:
        before = start("before", 4 * pages + 1)
        prefill.start(before)
        prefill.compute_all()
        done(prefill, before)
    else:
        (fetch,) = store_commands(begins(start("first", 4 * pages + 1)), Fetch)
        loaded(prefill, prefill.do(prefill.engine.tier_event(0, PartsRead(fetch.op, "", 0, 0.0), prefill.now)))
        prefill.compute_all()
        assert prefill.hits == 4 * pages
    fails(prefill, start("fails", 4 * pages + 2))
    assert not prefill.known
    out = begins(start("again", 4 * pages + 1))
    assert not store_commands(out, Fetch) and not loaded(prefill, out)
    assert plans(out)[0].starts[0].computed == 0


@GROUPS
def test_nothing_is_kept_of_a_choice_that_failed_nor_of_the_step_after(groups: tuple[LayerGroup, ...]) -> None:
    decode = Decode(facts(*groups, num_large=40))
    leg = start("fails", 10, peer=P_REF)
    decode.joined(leg)
    assert decode.cached() == 2
    out = decode.step(0, SampledToken(0, 0, NO_TOKEN))
    assert outcomes(out) == [Outcome.WORKER_LOST] and not decode.known
    decode.step(1, SampledToken(0, 0, 5))  # it had been launched by then, and fills a page
    assert not decode.known and decode.used == 0
    assert decode.granted(start("again", 10, peer=P_REF)).wants[0] == 0


def test_choices_of_one_prompt_fail_together() -> None:
    mixed = Mixed(facts(num_large=40, **WIDE))
    mixed.start(leg("fails", 9, 9, choices=2))
    mixed.compute()
    mixed.compute()
    seq_ids = [run.seq_id for run in mixed.unreported[0].runs]
    assert mixed.cached() and len(seq_ids) == 2
    out = mixed.step(2, SampledToken(seq_ids[0], 0, 7), SampledToken(seq_ids[1], 1, NO_TOKEN))
    assert outcomes(out) == [Outcome.WORKER_LOST]
    mixed.compute_all()
    assert not mixed.known and mixed.used == 0


@pytest.mark.parametrize("aborted", [True, False])
def test_decode_keeps_nothing_of_what_prefill_gives_up_unless_nobody_wants_it_any_more(aborted: bool) -> None:
    """It may have given up because its logits were no numbers, which is known only when most of it has been sent."""
    decode = Decode(facts(FULL, STATE, num_large=40))
    leg = start("r", 18, peer=P_REF)
    decode.granted(leg)
    for expect in decode.offer(leg, Piece(0, 0, 2, 0, 8), Piece(1, 0, 1, 1, 2)):
        decode.land(expect)
    out = decode.link(m.Withdraw(leg.key, "for a reason", aborted))
    assert Unbind(leg.key, blank=not aborted) in to_transfer(out)
    decode.event(Unbound(leg.key))
    assert (decode.cached(0), decode.cached(1)) == ((2, 1) if aborted else (0, 0))


def test_what_is_on_its_way_from_the_host_when_it_fails_is_not_kept_either() -> None:
    """Nobody waits for it any more: it took so long that the prompt was computed meanwhile."""
    prefill = with_a_prompt_on_the_host_only()
    (copy,) = (each for each in to_transfer(prefill.start(start("fails", 4 * PAGES + 1))) if isinstance(each, CopyIn))
    prefill.now_s = 2 * MOST_WAIT_S
    prefill.do(prefill.engine.tick(prefill.now))
    while not (plan := prefill.unreported[0]).runs or not plan.runs[-1].sample:
        prefill.compute()
    assert outcomes(prefill.step(plan.plan_no, SampledToken(plan.runs[-1].seq_id, 0, NO_TOKEN)))
    left = set(prefill.known)
    prefill.do(prefill.engine.tier_event(0, CopiedIn(copy.op, 0, 0.0), prefill.now))
    assert prefill.known == left
