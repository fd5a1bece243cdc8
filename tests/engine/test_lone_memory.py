"""Each engine alone: prefix hits, layer groups, and which pages decode asks for."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from disagg.engine.instructions import PublishKv
from disagg.messages import link as m
from disagg.messages.pieces import Piece
from disagg.messages.transfer import Bind, Bound, Unbind, Unbound
from disagg.types.errors import ProtocolError
from tests.engine.lone_engine import (
    FULL,
    STATE,
    WINDOW,
    Decode,
    Prefill,
    facts,
    pages_of,
    plans,
    sent,
    start,
    to_link,
    to_transfer,
)
from tests.engine.lone_legs import end_of, leg_for_decode, runs_of

# ---- prefill: hits


@pytest.mark.parametrize(("want", "offered"), [(0, [(0, 8), (8, 10)]), (4, [(4, 8), (8, 10)]), (8, [(8, 10)])])
def test_prefill_computes_what_its_cache_lacks_and_offers_what_decode_lacks(
    want: int, offered: list[tuple[int, int]]
) -> None:
    prefill = Prefill(facts())
    prefill.through(start("before", 10))
    prefill.open_ring()
    leg = start("r", 10)
    (plan,) = plans(prefill.start(leg))
    (begun,) = plan.starts
    assert (begun.computed, len(begun.tables[0].pages)) == (8, 2), "two pages are there"
    assert [(run.num_tokens, run.sample) for run in plan.runs] == [(2, True)]
    (offer,) = to_link(prefill.link(m.Grant(leg.key, (want,))))
    assert isinstance(offer, m.OfferPieces)
    assert [(piece.token_start, piece.token_stop) for piece in offer.pieces] == offered
    sends = prefill.send(leg, offer)
    assert [send.after_plan for send in sends] == [
        plan.plan_no if send.slice.piece.token_start == 8 else -1 for send in sends
    ]
    assert sends[-1].pages == plan.runs[0].new_pages[0]
    if want == 0:
        assert sends[0].pages == begun.tables[0].pages


def test_pages_of_a_hit_are_kept_until_the_transfer_ends() -> None:
    prefill = Prefill(facts(num_large=4))
    prefill.through(start("before", 10))
    assert prefill.used == 0
    prefill.open_ring()
    leg = start("r", 10)
    prefill.start(leg)
    prefill.compute_all()
    (offer,) = to_link(prefill.link(m.Grant(leg.key, (0,))))
    assert isinstance(offer, m.OfferPieces)
    prefill.start(start("greedy", 8, first_token=50))
    assert prefill.used == 3 and prefill.cached() == 2, "one page is free, and nobody may evict the two"
    for send in prefill.send(leg, offer):
        prefill.event(sent(send))
    prefill.end(leg)
    assert prefill.used == 2, "only now the greedy one has its pages"


def test_pages_enter_the_cache_chunk_by_chunk() -> None:
    prefill = Prefill(facts())
    prefill.start(start("long", 20))
    assert prefill.cached() == 0, "two chunks are under way, and none is computed"
    for pages in (2, 4, 5):
        prefill.compute()
        assert prefill.cached() == pages
    prefill = Prefill(facts(max_slots=2))
    prefill.start(start("long", 20))
    prefill.compute()
    out = prefill.start(start("same beginning", 9)) + prefill.compute()
    (begun,) = (begun for plan in plans(out) for begun in plan.starts)
    assert begun.computed == 8, "while the first one still runs"


def test_different_salts_share_nothing() -> None:
    prefill = Prefill(facts())
    prefill.through(start("a", 10, salt="one"))
    prefill.through(start("b", 10, salt="another"))
    assert prefill.hits == 0
    assert prefill.cached() == 4
    prefill.through(start("c", 10, salt="one"))
    assert prefill.hits == 8


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    prefill = Prefill(facts(prefix_cache=False))
    prefill.through(start("a", 10))
    prefill.through(start("b", 10))
    assert prefill.hits == prefill.cached() == 0


def test_the_last_token_is_always_computed_for_its_logits() -> None:
    prefill = Prefill(facts())
    prefill.through(start("a", 8))
    assert prefill.cached() == 2
    (run,) = runs_of(prefill.start(start("b", 8)))
    assert (run.num_tokens, run.sample) == (4, True), "the last page, though it is cached"


def test_a_leg_says_how_much_of_it_was_cached() -> None:
    prefill = Prefill(facts())
    prefill.through(start("before", 10))
    leg = start("r", 10)
    prefill.start(leg)
    prefill.compute_all()
    assert end_of(prefill.link(m.Complete(leg.key))).cached_tokens == 8
    decode = Decode(facts())
    assert end_of(decode.through(leg_for_decode("before", 10))).cached_tokens == 0
    assert end_of(decode.through(leg_for_decode("r", 10))).cached_tokens == 8


def test_what_is_cached_and_what_is_evicted_is_published_and_adds_up() -> None:
    prefill = Prefill(facts(num_large=3))
    out = prefill.start(start("a", 12)) + prefill.compute_all()
    told = [instruction.events for instruction in out if isinstance(instruction, PublishKv)]
    stored = [page for events in told for page in events.stored]
    assert len(stored) == 3
    assert set(stored) == set(prefill.engine.kv_snapshot().stored)
    prefill.end(start("a", 12))
    out = prefill.start(start("b", 12, first_token=50))
    (events,) = (instruction.events for instruction in out if isinstance(instruction, PublishKv))
    assert set(events.removed) == set(stored), "its pages are taken before any of b is computed"
    assert events.stored == ()
    prefill.compute_all()
    assert prefill.cached() == 3


# ---- prefill: layer groups


def test_a_window_is_let_go_while_the_prompt_is_computed_but_for_what_is_to_be_sent() -> None:
    prefill = Prefill(facts(FULL, WINDOW, num_large=40, chunk_tokens=4, prefix_cache=False))
    prefill.open_ring()
    leg = start("r", 42)
    prefill.start(leg)
    used = [prefill.used]
    while prefill.unreported:
        prefill.compute()
        used.append(prefill.used)
    assert max(used) <= 11 + 7, "all of the one; of the other not much more than a window and three chunks need"
    assert used[-1] == 11 + 3, "and when nothing more is computed, what its end needs"
    with pytest.raises(ProtocolError, match="a grant wants window from 28 on; 32 to 42 can be had"):
        prefill.link(m.Grant(leg.key, (0, 28)))
    (offer,) = to_link(prefill.link(m.Grant(leg.key, (0, 32))))
    assert isinstance(offer, m.OfferPieces)
    ranges = {g: [(p.token_start, p.token_stop) for p in offer.pieces if p.group == g] for g in (0, 1)}
    assert ranges == {0: [(at, min(at + 4, 42)) for at in range(0, 42, 4)], 1: [(32, 36), (36, 40), (40, 42)]}
    sends = prefill.send(leg, offer)
    assert len({(send.slice.piece.group, send.pages) for send in sends}) == len(sends)


def test_chunks_of_a_model_with_states_end_at_checkpoints_and_leave_the_rest_of_the_budget_to_others() -> None:
    prefill = Prefill(facts(FULL, STATE, chunk_tokens=12))
    first, second = plans(prefill.start(start("a", 20)))
    assert [run.num_tokens for run in (*first.runs, *second.runs)] == [8, 8]
    prefill.start(start("b", 20, first_token=50))
    (third,) = plans(prefill.compute())
    assert [(run.seq_id, run.num_tokens) for run in third.runs] == [(0, 4), (1, 8)]


def test_a_state_is_written_in_place_but_never_over_a_checkpoint() -> None:
    prefill = Prefill(facts(FULL, STATE, chunk_tokens=4))
    out = prefill.start(start("r", 24)) + prefill.compute_all()
    states = [run.new_pages[1] for run in runs_of(out)]
    assert [len(pages) for pages in states] == [1, 0, 1, 0, 1, 0], "before the runs that begin at 0, 8 and 16"
    assert len({page for pages in states for page in pages}) == 3


def test_checkpoints_are_kept_and_a_prompt_goes_on_from_the_last_one_that_it_shares() -> None:
    prefill = Prefill(facts(FULL, STATE))
    prefill.through(start("a", 20))
    assert prefill.cached(1) == 2, "after 8 and after 16 tokens"
    for tokens, computed in ((20, 16), (16, 8), (15, 8), (8, 0)):
        leg = start(f"of {tokens}", tokens)
        (plan, *_) = plans(prefill.start(leg))
        assert plan.starts[0].computed == computed, "whole pages are there up to the end, a state is not"
        assert plan.starts[0].tables[1] == pages_of((0, plan.starts[0].tables[1].pages))[0]
        prefill.compute_all()
        prefill.end(leg)


def test_the_state_after_a_whole_prompt_is_a_checkpoint_if_it_falls_on_one() -> None:
    prefill = Prefill(facts(FULL, STATE))
    prefill.through(start("a", 16))
    assert prefill.cached(1) == 2
    (run, *_) = runs_of(prefill.start(start("longer", 18)))
    assert run.num_tokens == 2
    assert len(run.new_pages[1]) == 1, "what others may read is not written over"


def test_without_a_prefix_cache_a_state_has_one_page() -> None:
    prefill = Prefill(facts(FULL, STATE, prefix_cache=False))
    out = prefill.start(start("r", 24)) + prefill.compute_all()
    assert [len(run.new_pages[1]) for run in runs_of(out)] == [1, 0, 0]


def test_the_last_checkpoint_is_sent_with_the_state_after_the_prompt() -> None:
    prefill = Prefill(facts(FULL, STATE))
    prefill.open_ring()
    leg = start("r", 20)
    out = prefill.start(leg)
    out += prefill.link(m.Grant(leg.key, (0, 0))) + prefill.compute_all()
    offers = [message for message in to_link(out) if isinstance(message, m.OfferPieces)]
    states = [piece for offer in offers for piece in offer.pieces if piece.group == 1]
    assert states == [Piece(1, 0, 1, 1, 2), Piece(1, 0, 1, 0, 1)]
    pages = {send.slice.piece: send.pages for offer in offers for send in prefill.send(leg, offer)}
    written = [run.new_pages[1] for run in runs_of(out)]
    assert pages[states[0]] == written[1] and pages[states[1]] == written[2]


def test_a_checkpoint_that_prefill_had_is_sent_too() -> None:
    prefill = Prefill(facts(FULL, STATE))
    prefill.through(start("before", 20))
    prefill.open_ring()
    leg = start("r", 20)
    (plan,) = plans(prefill.start(leg))
    (offer,) = to_link(prefill.link(m.Grant(leg.key, (0, 0))))
    assert isinstance(offer, m.OfferPieces)
    sends = {send.slice.piece: send for send in prefill.send(leg, offer)}
    checkpoint = sends[Piece(1, 0, 1, 1, 2)]
    assert (checkpoint.pages, checkpoint.after_plan) == (plan.starts[0].tables[1].pages, -1)
    assert sends[Piece(1, 0, 1, 0, 1)].pages == plan.runs[0].new_pages[1]


# ---- decode: grants


def test_a_grant_wants_only_what_decode_lacks() -> None:
    decode = Decode(facts())
    decode.through(leg_for_decode("before", 10))
    leg = leg_for_decode("r", 10)
    (bind,) = to_transfer(decode.announced(leg))
    assert isinstance(bind, Bind)
    assert bind.tables[0].first == 2 and len(bind.tables[0].pages) == 1, "no rank writes into what is cached"
    grant = decode.bound(leg)
    assert grant.wants == (8,)
    (plan, *_) = plans(decode.arrived(leg, grant))
    assert len(plan.starts[0].tables[0].pages) == 3


def test_each_group_wants_what_it_lacks() -> None:
    decode = Decode(facts(FULL, WINDOW, num_large=40))
    decode.through(leg_for_decode("before", 10))
    longer, same = leg_for_decode("longer", 20), leg_for_decode("same", 10)
    decode.announced(longer)
    assert decode.bound(longer).wants == (8, 12), "of the window nothing that is cached is needed any more"
    decode.announced(same)
    assert decode.bound(same).wants == (8, 8)


def test_a_grant_wants_only_the_last_window() -> None:
    decode = Decode(facts(FULL, WINDOW, num_large=40))
    leg = leg_for_decode("r", 18)
    (bind,) = to_transfer(decode.announced(leg))
    assert isinstance(bind, Bind)
    assert [(table.first, len(table.pages)) for table in bind.tables] == [(0, 5), (2, 3)]
    grant = decode.bound(leg)
    assert grant.wants == (0, 8), "from the last full page back, so that its prefix can be a hit"
    decode.arrived(leg, grant)
    assert decode.cached(0) == 4 and decode.cached(1) == 2


@pytest.mark.parametrize("tokens_first", [True, False])
def test_a_transfer_with_nothing_to_send_is_complete_when_the_first_tokens_are_there(tokens_first: bool) -> None:
    decode = Decode(facts())
    decode.through(leg_for_decode("before", 8))
    leg = leg_for_decode("r", 8)
    decode.announced(leg)
    out = decode.first_tokens(leg) if tokens_first else []
    assert out == [], "not before every rank has answered"
    out = decode.event(Bound(leg.key))
    assert to_link(out)[0] == m.Grant(leg.key, (8,))
    if not tokens_first:
        out = decode.first_tokens(leg)
    assert m.Complete(leg.key) in to_link(out)
    assert Unbind(leg.key) in to_transfer(out)
    assert [run.num_tokens for run in runs_of(out)] == [1, 1]


def test_prefill_has_sent_all_when_nothing_is_wanted_of_it() -> None:
    prefill = Prefill(facts())
    prefill.open_ring()
    leg = start("r", 8)
    prefill.start(leg)
    assert to_link(prefill.link(m.Grant(leg.key, (8,)))) == []
    assert m.SentAll(leg.key, 0) in to_link(prefill.compute())


@pytest.mark.parametrize("reason", ["aborted", "corrupt"])
def test_what_landed_of_a_broken_transfer_is_kept_and_shortens_the_next(reason: str) -> None:
    decode = Decode(facts())
    leg = leg_for_decode("r", 18)
    decode.granted(leg)
    landed, partly, missing = decode.offer(leg, Piece(0, 0, 2, 0, 8), Piece(0, 0, 1, 8, 12), Piece(0, 0, 2, 12, 18))
    decode.land(landed)
    decode.land(partly)
    assert decode.cached() == 0, "a rank may still write into them"
    if reason == "aborted":
        decode.abort(leg)
    else:
        decode.land(missing, ok=False)
    decode.event(Unbound(leg.key))
    assert decode.cached() == 2, "of the third page one layer is missing"
    decode.link(m.Drained(leg.key))
    assert decode.used == 0
    again = replace(leg, key=replace(leg.key, attempt=1))
    assert decode.granted(again).wants == (8,)


def test_a_checkpoint_that_landed_is_kept_for_what_may_have_to_be_computed_again() -> None:
    decode = Decode(facts(FULL, STATE, num_large=20))
    leg = leg_for_decode("r", 12)
    (bind,) = to_transfer(decode.announced(leg))
    assert isinstance(bind, Bind)
    assert len(bind.tables[1].pages) == 2, "the state, and the checkpoint after eight tokens"
    grant = decode.bound(leg)
    (gift,) = decode.offer(leg, Piece(1, 0, 1, 1, 2))
    decode.land(gift)
    decode.arrived(leg, grant)
    assert decode.cached(1) == 0
    decode.event(Unbound(leg.key))
    assert decode.cached(1) == 1
    without = leg_for_decode("without", 12, first_token=50)
    decode.joined(without)
    assert decode.cached(1) == 1, "it is never waited for"
