"""Which of two servers stores the KV of a prompt, and when what the host has of it comes back."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from disagg.engine.facts import OffloadFacts
from disagg.engine.handoff.sending import Sending
from disagg.engine.instructions import Instruction, ToStore
from disagg.engine.load import Load
from disagg.engine.loads import MOST_AT_ONCE, Loads
from disagg.messages import link as m
from disagg.messages.legs import StartLeg
from disagg.messages.pieces import Piece
from disagg.messages.tiers import CopiedIn, CopiedOut, CopyIn, CopyOut, PartsRead
from disagg.messages.transfer import SendsDropped, Unbound
from disagg.offload.instructions import Ask, Fetch, StoreFound, Upload
from disagg.types.ids import LegKey
from disagg.types.sampling import SamplingParams
from tests.engine.lone_engine import FULL, LINK, STATE, Decode, Lone, Prefill, facts, start, to_transfer
from tests.engine.lone_legs import leg_for_decode

PAGES = 3
S = TypeVar("S")


def ended(prefill: Prefill, leg: StartLeg) -> list[Instruction]:
    """What follows when decode has all of it. Nothing is stored before; copies to the host are made at once."""
    for each in prefill.start(leg):
        if isinstance(each, ToStore) and isinstance(each.command, Ask):
            prefill.do(prefill.engine.store_event(StoreFound(each.command.ask, 0, ()), prefill.now))
    prefill.compute_all()
    return done(prefill, leg)


def uploaded(out: list[Instruction]) -> int:
    """Pages."""
    uploads = [each.command for each in out if isinstance(each, ToStore) and isinstance(each.command, Upload)]
    return sum(len(upload.hashes) for upload in uploads)


@pytest.mark.parametrize(("max_tokens", "stored_here"), [(5, 0), (1, PAGES)])
def test_prefill_stores_what_decode_goes_on_with_nothing_of(max_tokens: int, stored_here: int) -> None:
    """Also when all of it was sent before its first token, which was its last, was known."""
    prefill = Prefill(facts(num_large=40, offload=OffloadFacts(40, 0, True)))
    leg = start("r", 4 * PAGES + 1, params=SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    assert uploaded(ended(prefill, leg)) == stored_here


def done(prefill: Prefill, leg: StartLeg) -> list[Instruction]:
    """Decode has all of it; what follows. Copies to the host are made at once."""
    prefill.link(m.Complete(leg.key))
    out = prefill.event(SendsDropped(LINK, leg.key))
    for copy in [message for message in to_transfer(out) if isinstance(message, CopyOut)]:
        out += prefill.do(prefill.engine.tier_event(0, CopiedOut(copy.op, 0, 0.0), prefill.now))
    return out


def store_commands(out: list[Instruction], kind: type[S]) -> list[S]:
    return [each.command for each in out if isinstance(each, ToStore) and isinstance(each.command, kind)]


def loaded(prefill: Prefill, out: list[Instruction]) -> int:
    """Pages that come back from the host, which they do at once."""
    copies = [message for message in to_transfer(out) if isinstance(message, CopyIn)]
    for copy in copies:
        prefill.do(prefill.engine.tier_event(0, CopiedIn(copy.op, 0, 0.0), prefill.now))
    return sum(len(copy.moves) for copy in copies)


def with_a_prompt_on_the_host() -> Prefill:
    """Of PAGES whole pages; the pool has eight."""
    prefill = Prefill(facts(num_large=8, ungranted_share=1.0, offload=OffloadFacts(40, 0, False)))
    leg = start("before", 4 * PAGES + 1)
    prefill.start(leg)
    prefill.compute_all()
    done(prefill, leg)
    return prefill


def with_a_prompt_on_the_host_only() -> Prefill:
    """Another one has had all of the pool since."""
    prefill = with_a_prompt_on_the_host()
    large = start("large", 4 * 8, first_token=500)
    prefill.start(large)
    prefill.compute_all()
    done(prefill, large)
    return prefill


def test_what_had_no_room_in_the_pool_is_brought_when_there_is_some() -> None:
    prefill = with_a_prompt_on_the_host()
    large, again = start("large", 4 * 8, first_token=500), start("again", 4 * PAGES + 1)
    prefill.start(large)
    prefill.compute_all()
    assert prefill.used == 8 and not loaded(prefill, prefill.start(again))
    for _ in range(9):  # which may be often
        prefill.do([])
    assert loaded(prefill, done(prefill, large)) == PAGES
    prefill.compute_all()
    assert prefill.hits == 4 * PAGES


def test_what_was_there_ahead_of_its_turn_and_gave_way_is_brought_at_its_turn() -> None:
    prefill = with_a_prompt_on_the_host()
    first, again = start("first", 4 * 5, first_token=500), start("again", 4 * 7)
    prefill.start(first)
    prefill.compute_all()
    assert not loaded(prefill, prefill.start(again)), (
        "what the host has is in the pool, too, and there is no room for the rest"
    )
    small = replace(start("small", 4 * PAGES, first_token=800), priority=-1)
    prefill.start(small)
    prefill.compute_all()
    assert prefill.used == 8, "it takes the pages that the other would have found"
    assert loaded(prefill, done(prefill, small)) == PAGES
    assert not loaded(prefill, done(prefill, first)), "it is there still"
    prefill.compute_all()
    assert prefill.hits == 4 * PAGES


def test_what_comes_from_storage_while_it_is_copied_to_the_host_is_there_once() -> None:
    """A load took too long, so its prompt was computed; its pages are copied out when the load ends."""
    prefill = Prefill(facts(num_large=40, offload=OffloadFacts(40, 0, True)))
    leg = start("slow", 4 * PAGES + 1)
    (ask,) = store_commands(prefill.start(leg), Ask)
    out = prefill.do(prefill.engine.store_event(StoreFound(ask.ask, PAGES, (tuple(range(PAGES)),)), prefill.now))
    (fetch,) = store_commands(out, Fetch)
    prefill.now_s = 20.0
    prefill.do(prefill.engine.tick(prefill.now))
    assert prefill.engine.counters.loads_left == {"late": 1}
    prefill.compute_all()
    prefill.link(m.Complete(leg.key))
    copies = [each for each in to_transfer(prefill.event(SendsDropped(LINK, leg.key))) if isinstance(each, CopyOut)]
    assert sum(len(copy.moves) for copy in copies) == PAGES
    prefill.do(prefill.engine.tier_event(0, PartsRead(fetch.op, "", 0, 0.0), prefill.now))
    prefill.do(prefill.engine.tier_event(0, CopiedOut(copies[-1].op, 0, 0.0), prefill.now))
    tiers = prefill.engine.core.tiers
    assert tiers is not None and tiers.offload.host.filled_large == PAGES, "the second copies are let go of"


def test_what_is_computed_because_it_comes_more_slowly_is_counted() -> None:
    prefill = with_a_prompt_on_the_host_only()
    tiers = prefill.engine.core.tiers
    assert tiers is not None
    tiers.loads.rates.computing.add(1_000_000, 1.0)
    tiers.loads.rates.from_host.add(1, 1.0)
    assert not loaded(prefill, prefill.start(start("again", 4 * PAGES + 1)))
    assert prefill.engine.counters.loads_left == {"slower": 1}


def test_a_checkpoint_that_lands_when_decode_has_begun_is_stored_too() -> None:
    decode = Decode(facts(FULL, STATE, num_large=20, offload=OffloadFacts(40, 0, True)))
    leg = leg_for_decode("r", 12, max_tokens=8)
    grant = decode.granted(leg)
    (gift,) = decode.offer(leg, Piece(1, 0, 1, 1, 2))
    decode.land(gift)
    out = decode.arrived(leg, grant)
    (ask,) = [each.command.ask for each in out if isinstance(each, ToStore) and isinstance(each.command, Ask)]
    out += decode.do(decode.engine.store_event(StoreFound(ask, 0, ()), decode.now))
    out += decode.compute()
    out += decode.event(Unbound(leg.key))
    out += decode.compute_all()
    copied = [move.group for message in to_transfer(out) if isinstance(message, CopyOut) for move in message.moves]
    assert copied.count(1) == 2, "the states after eight tokens and after sixteen"
    assert copied.count(0) == 4


def on_the_host(server: Lone, legs: list[StartLeg]) -> None:
    """As if these prompts had been here before."""
    assert server.engine.core.tiers is not None
    host = server.engine.core.tiers.offload.host
    for leg in legs:
        before, hashes = server.engine.core.pool.prefix(leg)
        taken = host.take([len(hashes)])
        assert taken is not None
        pages = taken[0]
        for page, page_hash in zip(pages, hashes, strict=True):
            host.name(0, page, page_hash, before)
            before = page_hash
        host.release([(0, page_no, page) for page_no, page in enumerate(pages)])


def test_who_waits_for_a_place_among_loads_is_looked_at_when_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """If each load that ends had all others look for each of their pages, 200 prompts of 512 would take an engine 0.2 s."""
    waiting = 20
    legs = [leg_for_decode(f"r{i}", 4 * PAGES + 1, first_token=1 + 100 * i) for i in range(MOST_AT_ONCE + waiting)]
    decode = Decode(
        facts(num_large=400, max_slots=64, max_waiting=100, spare_tokens=0, offload=OffloadFacts(400, 0, False))
    )
    on_the_host(decode, legs)
    copies = [each for leg in legs for each in to_transfer(decode.announced(leg)) if isinstance(each, CopyIn)]
    assert len(copies) == MOST_AT_ONCE
    looked: list[object] = []
    longest = Loads._longest

    def noted(self: Loads, load: Load, cached: int) -> int:
        looked.append(load)
        return longest(self, load, cached)

    monkeypatch.setattr(Loads, "_longest", noted)
    for ended, copy in enumerate(copies, 1):
        decode.do(decode.engine.tier_event(0, CopiedIn(copy.op, 0, 0.0), decode.now))
        assert len(looked) == ended, "of those that wait the first one has its place, and nobody else is looked at"


def test_a_prompt_that_waits_for_its_load_does_not_look_at_all_the_others_that_do() -> None:
    """They let each other go on, so all of them are asked in each step: 800 would take 30 ms of each."""
    looked = 0

    class Transfers(dict[LegKey, Sending]):
        def values(self) -> Any:
            nonlocal looked
            looked += len(self)
            return super().values()

    prefill = Prefill(facts(num_large=400, max_waiting=100, offload=OffloadFacts(400, 0, False)))
    legs = [start(f"r{i}", 4 * PAGES + 1, first_token=1 + 100 * i) for i in range(30)]
    on_the_host(prefill, legs)
    for leg in legs:
        prefill.start(leg)
    prefill.sender.transfers = Transfers(prefill.sender.transfers)
    prefill.do([])
    assert len(list(prefill.prompts.queue)) == 30 and not looked


def in_storage(prefill: Prefill, out: list[Instruction]) -> list[Instruction]:
    """What follows when storage answers that it has PAGES pages of each sequence that it was asked of."""
    found: list[Instruction] = []
    for ask in store_commands(out, Ask):
        answer = StoreFound(ask.ask, PAGES, (tuple(range(PAGES)),))
        found += prefill.do(prefill.engine.store_event(answer, prefill.now))
    return found


def brought(prefill: Prefill, out: list[Instruction]) -> int:
    """All that is asked for comes to the host, and to the pool, until nothing is: how many fetches these were."""
    fetches = 0
    while out:
        answers: list[Instruction] = []
        for fetch in store_commands(out, Fetch):
            fetches += 1
            answers += prefill.do(prefill.engine.tier_event(0, PartsRead(fetch.op, "", 0, 0.0), prefill.now))
        for copy in [message for message in to_transfer(out) if isinstance(message, CopyIn)]:
            answers += prefill.do(prefill.engine.tier_event(0, CopiedIn(copy.op, 0, 0.0), prefill.now))
        out = answers
    return fetches


def from_storage(num_large: int, host_large: int, prompts: int) -> tuple[int, int, int]:
    """Prompts that come together, and that storage has PAGES pages of: how many of them are fetched at once; how many in all,
    and the tokens that are hit, when all have been answered."""
    prefill = Prefill(facts(num_large=num_large, ungranted_share=1.0, offload=OffloadFacts(host_large, 0, True)))
    legs = [start(f"r{no}", 4 * PAGES + 1, first_token=100 * no + 1) for no in range(prompts)]
    out: list[Instruction] = []
    for leg in legs:
        out += prefill.start(leg)
    out = in_storage(prefill, out)
    at_once, total = len(store_commands(out, Fetch)), brought(prefill, out)
    for leg in legs:
        total += brought(prefill, prefill.compute_all())
        total += brought(prefill, done(prefill, leg))
    return at_once, total, prefill.hits


def test_no_more_is_brought_than_can_begin_together() -> None:
    """The pool has room for two of them, of four pages each: a third one would push out what came for the first."""
    assert from_storage(num_large=8, host_large=40, prompts=3) == (2, 3, 3 * 4 * PAGES)


def test_whose_pages_have_no_place_on_the_host_waits_for_those_that_are_read() -> None:
    """Of four prompts the host has place for one; so far the others were computed."""
    assert from_storage(num_large=40, host_large=PAGES + 1, prompts=4) == (1, 4, 4 * 4 * PAGES)


def test_who_comes_before_all_others_does_not_wait_for_room_that_they_have_taken() -> None:
    prefill = Prefill(facts(num_large=8, ungranted_share=1.0, offload=OffloadFacts(40, 0, True)))
    prefill.start(start("runs", 4 * 4, first_token=500))
    prefill.compute_all()
    out = prefill.start(start("before", 4 * PAGES + 1))
    (fetch,) = store_commands(in_storage(prefill, out), Fetch)
    first = replace(start("first", 4 * PAGES + 1, first_token=100), priority=-1)
    (later,) = store_commands(in_storage(prefill, prefill.start(first)), Fetch)
    assert later.op != fetch.op
    other = start("other", 4 * PAGES + 1, first_token=200)
    assert not store_commands(in_storage(prefill, prefill.start(other)), Fetch), "there is no room beside those two"
