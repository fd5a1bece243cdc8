"""An engine alone, with little memory: who waits, who gives way, and what fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from disagg.engine.instructions import Instruction
from disagg.memory.groups import spec_of
from disagg.memory.layout import pool_layout
from disagg.messages import link as m
from disagg.messages.layout import GroupKind, LayerGroup
from disagg.messages.legs import LegEnd, LegTokens, Outcome, ServerState, StartLeg
from disagg.messages.plan import PageCopy, SampledToken
from disagg.messages.transfer import Bind, Unbound
from disagg.types.ids import FinishReason
from tests.engine.lone_engine import (
    CHECKPOINT_TOKENS,
    FULL,
    PAGE_TOKENS,
    STATE,
    WINDOW,
    Decode,
    Prefill,
    changed,
    facts,
    outcomes,
    plans,
    said,
    start,
    to_link,
    to_router,
    to_transfer,
)
from tests.engine.lone_legs import indices, leg_for_decode, runs_of

# ---- decode: too little memory


def both_run(max_tokens: int = 8, **changes: Any) -> tuple[Decode, list[Instruction]]:
    """a and b have seven tokens of their own each, and five pages between them: three are needed from nine tokens on."""
    usual: dict[str, Any] = {"num_large": 5, "spare_tokens": 0, "preempt_after_s": 1000.0}
    decode = Decode(facts(**{**usual, **changes}))
    out = decode.joined(leg_for_decode("a", 7, max_tokens=max_tokens))
    return decode, out + decode.joined(leg_for_decode("b", 7, first_token=50, max_tokens=max_tokens))


def compute_until(decode: Decode, is_so: Callable[[list[Instruction]], bool]) -> list[Instruction]:
    """Plan after plan. is_so: of what came of them."""
    out: list[Instruction] = []
    for _ in range(100):
        if is_so(out):
            return out
        out += decode.compute()
    raise AssertionError("a hundred plans, and it is not so")


def compute_until_parked(decode: Decode) -> list[Instruction]:
    return compute_until(decode, lambda _: bool(parked(decode)))


def parked(decode: Decode) -> list[tuple[str, int]]:
    return [(sequence.key.request_id, sequence.choice) for sequence in decode.batch.parked]


def one_parked(**changes: Any) -> tuple[Decode, list[Instruction]]:
    """Up to where b has given way and holds nothing."""
    decode, out = both_run(**changes)
    out += compute_until_parked(decode)
    return decode, out


def test_a_sequence_without_a_page_sits_the_step_out_and_the_latest_gives_way() -> None:
    decode, _ = both_run()
    assert [run.seq_id for run in decode.unreported[1].runs] == [0], "a has the last page"
    out = decode.compute()
    assert [run.seq_id for run in runs_of(out)] == [0, 1], "b's eighth token fits in what it has"
    out = decode.compute()
    assert [run.seq_id for run in runs_of(out)] == [0]
    assert decode.engine.counters.preemptions == {"memory": 1}
    assert parked(decode) == [], "a plan still names it"
    assert decode.used == 5
    decode.compute()
    assert parked(decode) == [("b", 0)]
    assert decode.used == 4, "a has a page for its thirteenth token already, which comes in two steps"
    load = decode.engine.load(ServerState.READY)
    assert (load.running, load.waiting) == (1, 1)


def test_who_loses_least_gives_way_where_that_is_the_policy() -> None:
    decode = Decode(facts(num_large=9, spare_tokens=0, preemption="fewest_tokens"))
    decode.joined(leg_for_decode("short", 7))
    decode.joined(leg_for_decode("long", 22, first_token=50))
    compute_until_parked(decode)
    assert parked(decode) == [("short", 0)]


@pytest.mark.parametrize(("prefix_cache", "computed"), [(True, 4), (False, 0)])
def test_a_preempted_sequence_goes_on_with_all_its_tokens_and_says_none_twice(
    prefix_cache: bool, computed: int
) -> None:
    decode, out = one_parked(prefix_cache=prefix_cache)
    before = indices(out, "b")
    out += decode.compute_all()
    again = [begun for plan in plans(out) for begun in plan.starts][-1]
    known = tuple(token for request, _, _, token in said(out) if request == "b")[: len(before)]
    assert again.token_ids == (*range(50, 57), *known), "its outputs so far are known"
    assert (again.num_prompt, again.computed) == (7, computed)
    runs = [(run.num_tokens, run.sample) for run in runs_of(out) if run.seq_id == again.seq_id]
    assert runs == [*([(5, True)] if prefix_cache else [(8, False), (1, True)]), *[(1, True)] * 5]
    assert indices(out, "a") == indices(out, "b") == list(range(8)), "each index once, in order"
    assert outcomes(out) == [Outcome.DONE, Outcome.DONE]
    assert decode.engine.counters.recomputed_tokens == 8 - computed
    decode.link(m.Drained(leg_for_decode("b", 7).key))
    assert decode.used == 0 and decode.batch.slots.free == decode.batch.slots.total


def test_what_is_computed_again_is_computed_in_chunks_beside_the_others() -> None:
    decode = Decode(facts(num_large=17, prefix_cache=False, spare_tokens=0, chunk_tokens=4, max_slots=3))
    decode.joined(leg_for_decode("a", 7, max_tokens=20))
    decode.joined(leg_for_decode("b", 31, first_token=50))
    holder = leg_for_decode("holds pages for a while", 24, first_token=200)
    decode.granted(holder)
    compute_until_parked(decode)
    assert parked(decode) == [("b", 0)]
    decode.abort(holder)
    out = decode.event(Unbound(holder.key))
    out += compute_until(decode, lambda out: bool(indices(out, "b")))
    (again,) = (begun for plan in plans(out) for begun in plan.starts)
    beside = [
        plan for plan in plans(out) if any(run.seq_id == again.seq_id and run.num_tokens > 1 for run in plan.runs)
    ]
    chunks = [run for plan in beside for run in plan.runs if run.seq_id == again.seq_id]
    assert [run.num_tokens for run in chunks] == [4] * 8, "the last of the 33 is like any other"
    assert not any(run.sample for run in chunks)
    assert all([run.num_tokens for run in plan.runs[:-1]] == [1] for plan in beside), "a goes on all the while"


def test_one_that_ends_while_it_gives_way_is_not_parked() -> None:
    decode, _ = both_run()
    decode.compute()
    decode.compute()
    plan = decode.unreported[0]
    out = decode.step(plan.plan_no, *(SampledToken(run.seq_id, 0, 0) for run in plan.runs))
    assert LegTokens(leg_for_decode("b", 7).key, 0, 1, (0,), (), FinishReason.STOP) in to_router(out)
    assert parked(decode) == []
    decode.compute_all()
    assert decode.used == 0


def test_a_parked_sequence_that_is_aborted_leaves_nothing() -> None:
    decode, _ = one_parked()
    leg = leg_for_decode("b", 7)
    out = decode.abort(leg)
    assert outcomes(out) == [Outcome.ABORTED]
    assert parked(decode) == []
    decode.link(m.Drained(leg.key))
    assert leg.key not in decode.engine.core.legs
    out = decode.compute_all()
    assert not [begun for plan in plans(out) for begun in plan.starts]
    assert outcomes(out) == [Outcome.DONE]
    assert decode.used == 0


def test_one_that_is_aborted_while_it_gives_way_keeps_its_pages_until_its_plan_has_reported() -> None:
    decode, _ = both_run()
    decode.compute()
    decode.compute()
    assert outcomes(decode.abort(leg_for_decode("b", 7))) == [Outcome.ABORTED]
    assert decode.used == 5
    decode.compute()
    assert parked(decode) == []
    assert decode.used == 4, "a has one for its thirteenth token"


def test_one_that_gives_way_just_after_its_transfer_keeps_its_pages_until_no_rank_has_them_bound() -> None:
    decode = Decode(facts(num_large=5, spare_tokens=0))
    decode.joined(leg_for_decode("a", 7))
    leg = leg_for_decode("b", 8, first_token=50)
    decode.running(leg)
    decode.compute_all()
    assert decode.engine.counters.preemptions == {"memory": 1}
    assert parked(decode) == []
    decode.event(Unbound(leg.key))
    assert parked(decode) == [("b", 0)]


def test_whoever_is_alone_gives_way_too_and_goes_on_when_what_transfers_hold_comes_free() -> None:
    decode = Decode(facts(num_large=5, spare_tokens=0))
    out = decode.joined(leg_for_decode("a", 7))
    holder = leg_for_decode("b", 7, first_token=50)
    decode.granted(holder)
    out += decode.compute_all()
    assert parked(decode) == [("a", 0)], "its thirteenth token has no page, perhaps because of where its own lie"
    assert outcomes(decode.abort(holder)) == [Outcome.ABORTED]
    out += decode.event(Unbound(holder.key)) + decode.compute_all()
    assert indices(out, "a") == list(range(8))
    assert outcomes(out) == [Outcome.DONE]
    assert decode.engine.counters.preemptions == {"memory": 1}


def running_and_waiting() -> tuple[Decode, StartLeg, list[Instruction]]:
    """a runs and holds eleven of twelve pages; b, which needs three, is announced at 0 s."""
    decode = Decode(facts(link_idle_s=1000.0))
    out = decode.joined(leg_for_decode("a", 4, max_tokens=40))
    waiting = leg_for_decode("b", 6, first_token=50)
    out += decode.announced(waiting)
    assert Bind not in map(type, to_transfer(out)[2:])
    return decode, waiting, out


def test_nobody_gives_way_to_what_has_not_begun() -> None:
    decode, waiting, out = running_and_waiting()
    for seconds in range(1, 40):
        decode.tick(float(seconds))
        out += decode.compute()
    assert decode.engine.counters.preemptions == {}
    assert indices(out, "a") == list(range(40))
    binds = [message.key for message in to_transfer(out + decode.compute_all()) if isinstance(message, Bind)]
    assert binds == [waiting.key], "when a has ended"


def test_who_has_begun_and_gave_way_goes_on_before_anything_new_begins() -> None:
    decode, _ = both_run(max_tokens=6)
    early, late = leg_for_decode("early", 8, first_token=100), leg_for_decode("late", 4, first_token=150)
    decode.now_s = 0.5
    decode.announced(early)
    decode.now_s = 1.0
    compute_until(decode, lambda _: bool(decode.engine.counters.preemptions))
    out = compute_until_parked(decode) + decode.compute()
    assert parked(decode) == [("b", 0)]
    assert to_transfer(out) == [], "there are pages for the early one, but not before b goes on"
    decode.now_s = 2.0
    out += decode.announced(late)
    assert to_transfer(out) == []
    while not any(isinstance(message, Bind) for message in to_transfer(out)):
        out += decode.compute()
    assert parked(decode) == [], "b, which has begun, goes before both"
    out += decode.compute_all()
    assert outcomes(out) == [Outcome.DONE, Outcome.DONE], "a, then b"
    binds = [message for message in to_transfer(out) if isinstance(message, Bind)]
    assert [bind.key for bind in binds] == [early.key, late.key]


def test_pages_that_come_free_go_to_who_runs_before_anybody_goes_on_with_them() -> None:
    """Or else who gave way takes its pages back, as often as it gives them."""
    decode = Decode(facts(num_large=7, spare_tokens=7))
    out = decode.joined(leg_for_decode("a", 7, max_tokens=20))
    out += compute_until(decode, lambda out: len(indices(out, "a")) == 5)
    out += decode.joined(leg_for_decode("b", 5, first_token=50))
    assert decode.used == 7, "b has all pages that it will ever need"
    out += decode.compute_all()
    assert outcomes(out) == [Outcome.DONE, Outcome.DONE]
    assert indices(out, "a") == list(range(20)) and indices(out, "b") == list(range(8))
    assert decode.engine.counters.preemptions == {"memory": 1}


# ---- decode: choices


def test_of_several_choices_each_may_give_way_alone() -> None:
    decode = Decode(facts(num_large=9, spare_tokens=0, max_slots=4))
    leg = leg_for_decode("r", 6, choices=2)
    out = decode.joined(leg)
    (first, *_) = plans(out)
    one, other = (begun.tables[0].pages for begun in first.starts)
    assert one[0] == other[0], "a full page is shared"
    assert first.copies == (PageCopy(0, one[1], other[1]),), "a partial one is copied"
    holder = leg_for_decode("holds pages for a while", 16, first_token=50)
    decode.granted(holder)
    out += compute_until_parked(decode)
    assert parked(decode) == [("r", 1)]
    before = indices(out, "r", 1)
    out += decode.compute()
    assert indices(out, "r", 1) == before and len(indices(out, "r", 0)) > len(before)
    decode.abort(holder)
    out += decode.event(Unbound(holder.key)) + decode.compute_all()
    assert indices(out, "r", 0) == indices(out, "r", 1) == list(range(8))
    samplers = [begun.samplers[0].choice for plan in plans(out) for begun in plan.starts]
    assert samplers == [0, 1, 1], "it goes on as the choice that it was"
    assert outcomes(out).count(Outcome.DONE) == 1
    decode.link(m.Drained(leg.key))
    decode.link(m.Drained(holder.key))
    assert decode.used == 0 and decode.engine.idle


def test_an_aborted_choice_that_is_parked_leaves_the_other_running() -> None:
    decode = Decode(facts(num_large=9, spare_tokens=0))
    leg = leg_for_decode("r", 6, choices=2)
    out = decode.joined(leg)
    decode.granted(leg_for_decode("holds pages", 16, first_token=50))
    out += compute_until_parked(decode)
    assert outcomes(decode.abort(leg, 1)) == []
    assert parked(decode) == []
    out += decode.compute_all()
    assert indices(out, "r", 0) == list(range(8))
    assert outcomes(out) == [Outcome.DONE]


def test_choices_read_one_state_and_write_each_its_own() -> None:
    decode = Decode(facts(FULL, STATE, num_large=20, prefix_cache=False))
    first, second = plans(decode.joined(leg_for_decode("r", 6, choices=2)))
    states = {begun.tables[1].pages for begun in first.starts}
    assert len(states) == 1
    written = [run.new_pages[1] for run in first.runs]
    assert [len(pages) for pages in written] == [1, 1]
    assert len({*states, *written}) == 3
    assert all(not run.new_pages or not run.new_pages[1] for run in second.runs), "from then on in place"


@pytest.mark.parametrize(("tokens", "fresh"), [(8, [1, 0]), (7, [0, 1]), (6, [0, 0])])
def test_decode_writes_over_no_state_that_is_a_checkpoint(tokens: int, fresh: list[int]) -> None:
    decode = Decode(facts(FULL, STATE, num_large=20))
    first, second = plans(decode.joined(leg_for_decode("r", tokens)))
    assert [len(run.new_pages[1]) if run.new_pages else 0 for run in (*first.runs, *second.runs)] == fresh
    decode.compute()
    decode.compute()
    assert decode.cached(1) == sum(fresh)


# ---- what does not fit


def test_what_does_not_fit_alone_is_refused_by_name() -> None:
    groups = (FULL, WINDOW, STATE)
    prefill, decode = Prefill(facts(*groups, num_large=20)), Decode(facts(*groups, num_large=20))
    most = prefill.engine.max_tokens_in_pool
    refused = to_router(prefill.start(start("p", most + 1)))
    assert refused == [
        LegEnd(
            start("p").key,
            Outcome.REFUSED,
            f"{most + 1} prompt tokens do not fit the prefill server's KV pool of {most} tokens",
        )
    ]
    assert plans(prefill.start(start("q", most))) != []
    assert decode.engine.max_tokens_in_pool == most, "it must be able to compute a prompt itself"
    leg = leg_for_decode("d", most - 10, choices=3, max_tokens=12)
    (end,) = to_router(decode.start(leg))
    assert isinstance(end, LegEnd)
    assert end.reason == (
        f"prompt and max_tokens come to {most + 1} tokens for each of 3 choices; the decode server has KV memory for "
        f"{most} tokens of one"
    )


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), (FULL, STATE), (WINDOW, STATE), (FULL, WINDOW, STATE)])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_what_just_fits_is_computed_and_decoded_to_its_end(groups: tuple[LayerGroup, ...], prefix_cache: bool) -> None:
    just = facts(*groups, num_large=16, prefix_cache=prefix_cache, max_model_len=200)
    prefill, decode = Prefill(just), Decode(just)
    most = min(prefill.engine.max_tokens_in_pool, 199)
    prefill.through(start("p", most))
    prefill.through(start("again", most))
    most = min(decode.engine.max_tokens_in_pool, 199)
    leg = leg_for_decode("d", most - 11, max_tokens=12)
    assert outcomes(decode.through(leg)) == [Outcome.DONE]
    assert outcomes(decode.through(replace(leg, key=replace(leg.key, attempt=1)))) == [Outcome.DONE]
    assert prefill.used == decode.used == 0


def test_a_prompt_that_fits_is_admitted_however_what_is_cached_of_it_lies() -> None:
    """Three small pages of the one group make a large page, and two of the other: a hit may pin one of each."""
    groups = (FULL, LayerGroup("window", (2, 3, 4), 2, 1, "float32", GroupKind.WINDOW, window=6))
    layout = pool_layout([spec_of(group, PAGE_TOKENS) for group in groups], PAGE_TOKENS, CHECKPOINT_TOKENS)
    assert layout.per_large == (3, 2)
    prefill = Prefill(facts(*groups, layout=layout, num_large=5))
    for number, tokens in enumerate((4, 12, 8, 12, 16)):
        prefill.through(start(str(number), tokens))


def computed(out: list[Instruction]) -> set[str]:
    """Whose prompts prefill has computed."""
    return {message.key.request_id for message in to_link(out) if isinstance(message, m.FirstTokens)}


def test_a_long_prompt_does_not_wait_for_one_that_shares_its_window() -> None:
    prefill = Prefill(facts(WINDOW, num_large=16, max_model_len=200))
    long, beginning = start("long", 100), start("its beginning", 7)  # less than a step, so it does not wait for it
    prefill.start(long)
    prefill.compute()
    prefill.compute()
    prefill.compute()
    out = prefill.start(beginning) + prefill.compute_all()
    assert computed(out) == {"long", "its beginning"}


def gives_way_to(decode: Decode, leg: StartLeg, *others: StartLeg) -> list[Instruction]:
    """The one runs alone, has no page for its next token while transfers hold the others', and goes on when those have ended."""
    out = decode.joined(leg)
    grants = [decode.granted(other) for other in others]
    out += compute_until_parked(decode)
    assert parked(decode) == [(leg.key.request_id, 0)]
    assert len(indices(out, leg.key.request_id)) < leg.params.max_tokens
    for other, grant in zip(others, grants, strict=True):
        out += decode.arrived(other, grant) + decode.event(Unbound(other.key))
    out += decode.compute_all()
    assert decode.engine.counters.preemptions == {"memory": 1}
    assert decode.engine.counters.recomputed_tokens > 0
    assert outcomes(out) == [Outcome.DONE] * (1 + len(others))
    return out


def test_what_just_fits_goes_on_after_it_gave_way() -> None:
    decode = Decode(facts(num_large=8, spare_tokens=0, link_idle_s=1000.0))
    leg, other = leg_for_decode("b", 3, max_tokens=30), leg_for_decode("c", 4, first_token=80, max_tokens=2)
    assert decode.engine.max_tokens_in_pool == 32, "all of it but the last output's"
    out = gives_way_to(decode, leg, other)
    assert indices(out, "b") == list(range(30))


def test_what_is_computed_again_is_computed_in_no_larger_chunks_than_its_window_has_pages_for() -> None:
    small = facts(WINDOW, num_large=10, max_slots=60, spare_tokens=0, max_model_len=200, prefix_cache=False)
    leg = leg_for_decode("b", 100, max_tokens=30)
    holder = leg_for_decode("c", 6, first_token=200, choices=8, max_tokens=2)  # two pages until its choices run
    more = [leg_for_decode(name, tokens, first_token=300, max_tokens=2) for name, tokens in (("d", 9), ("e", 5))]
    out = gives_way_to(Decode(changed(small, link_idle_s=1000.0)), leg, holder, *more)
    assert all(indices(out, "c", choice) == [0, 1] for choice in range(8))
    assert max(run.num_tokens for run in runs_of(out)) == 8
    assert indices(out, "b") == list(range(30))


def test_a_grant_reserves_no_more_of_a_window_than_it_can_hold() -> None:
    decode = Decode(facts(WINDOW, num_large=33, max_slots=8, max_model_len=400))
    leg = leg_for_decode("r", 40, choices=8, max_tokens=100)
    out = decode.announced(leg)
    assert [type(message) for message in to_transfer(out)] == [Bind]
    out = decode.arrived(leg, decode.bound(leg)) + decode.event(Unbound(leg.key)) + decode.compute_all()
    assert all(indices(out, "r", choice) == list(range(100)) for choice in range(8))


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), (FULL, STATE)])
def test_what_two_prompts_begin_with_is_computed_once(groups: tuple[LayerGroup, ...]) -> None:
    prefill = Prefill(facts(*groups, num_large=400, max_model_len=200))
    out = prefill.start(start("first", 100)) + prefill.start(start("second", 100)) + prefill.compute_all()
    assert computed(out) == {"first", "second"}
    tokens = sum(run.num_tokens for run in runs_of(out))
    assert 100 < tokens <= 100 + 2 * prefill.engine.core.facts.scheduling.chunk_tokens


def test_a_prompt_whose_forerunner_is_given_up_goes_on_alone() -> None:
    prefill = Prefill(facts(FULL, num_large=400, max_model_len=200))
    first, second = start("first", 100), start("second", 100)
    out = prefill.start(first) + prefill.start(second)  # which waits
    assert {begun.num_prompt for plan in plans(out) for begun in plan.starts} == {100}
    out = prefill.abort(first) + prefill.compute_all()
    assert computed(out) == {"second"}
