"""Who begins, who goes on and who waits: slots, tenants, and room for those that have begun."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from msgspec.structs import replace

from disagg.engine.instructions import Instruction
from disagg.engine.sequences import State
from disagg.engine.turns import TURN_TOKENS, Turn, Turns
from disagg.messages import link as m
from disagg.messages.legs import LegEnd, LegTokens, Outcome, ServerState, StartLeg
from disagg.messages.transfer import Bind, Unbound
from disagg.types.sampling import SamplingParams
from tests.engine.lone_engine import (
    FULL,
    P_REF,
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


def leg(
    name: str, tokens: int = 6, choices: int = 1, max_tokens: int = 8, tenant: str = "", first_token: int = 1
) -> StartLeg:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    made = start(name, tokens, choices, params, P_REF, first_token)
    return replace(made, tenant=tenant)


def indices(out: list[Instruction], name: str, choice: int = 0) -> list[int]:
    return [index for request, c, index, _ in said(out) if (request, c) == (name, choice)]


def binds(out: list[Instruction]) -> list[str]:
    """Who was granted, in order."""
    return [message.key.request_id for message in to_transfer(out) if isinstance(message, Bind)]


def parked(decode: Decode) -> list[str]:
    return [sequence.key.request_id for sequence in decode.batch.parked]


# ---- slots


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), (FULL, STATE)])
def test_a_request_with_more_choices_than_slots_is_served_choice_by_choice(groups, prefix_cache: bool) -> None:  # type: ignore[no-untyped-def]
    decode = Decode(facts(*groups, num_large=60, max_slots=2, prefix_cache=prefix_cache))
    asked = leg("r", choices=5)
    out = decode.joined(asked)
    most = 0
    while decode.unreported:
        most = max(most, len(decode.batch.running))
        out += decode.compute()
    assert most == 2
    assert [indices(out, "r", choice) for choice in range(5)] == [list(range(8))] * 5
    assert outcomes(out) == [Outcome.DONE]
    assert decode.engine.counters.preemptions == {}
    decode.link(m.Drained(asked.key))
    assert decode.engine.idle and decode.used == 0


def test_a_grant_says_how_many_choices_begin_and_the_others_are_not_heard_of_before_they_do() -> None:
    decode = Decode(facts(num_large=60, max_slots=2))
    asked = leg("r", choices=3)
    grant = decode.granted(asked)
    assert grant.choices == 2
    out = decode.arrived(asked, grant) + decode.event(Unbound(asked.key))
    assert {message.choice for message in to_router(out) if isinstance(message, LegTokens)} == {0, 1}
    waiting = [s for s in decode.choices.sequences(asked.key) if s.state is State.WAITING]
    assert [s.choice for s in waiting] == [2]
    assert indices(decode.compute_all(), "r", 2) == list(range(8)), "with its first token"


def test_a_request_of_many_choices_silences_nobody() -> None:
    """Everybody who has begun gets a token in each step, however many choices wait for slots."""
    decode = Decode(facts(num_large=200, max_slots=4))
    plain = [leg(f"p{i}", first_token=100 * (i + 1), max_tokens=40) for i in range(3)]
    out: list[Instruction] = []
    for each in plain:
        out += decode.joined(each)
    many = leg("many", choices=64, max_tokens=4, first_token=600)
    out += decode.joined(many)
    out += decode.compute() + decode.compute()  # the plans that were in flight
    for _ in range(30):
        before = [len(indices(out, each.key.request_id)) for each in plain]
        decode.tick(decode.now_s + 10.0)
        out += decode.compute()
        after = [len(indices(out, each.key.request_id)) for each in plain]
        assert all(b == a + 1 for a, b in zip(before, after, strict=True))
    out += decode.compute_all()
    assert decode.engine.counters.preemptions == {}
    assert all(indices(out, "many", choice) == list(range(4)) for choice in range(64))


def test_choices_that_cannot_begin_are_asked_about_once_for_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """If each were asked about, 30 requests of 64 choices would hold everybody up for 20 ms in each step."""
    decode = Decode(facts(num_large=400, max_slots=16))
    for number in range(2):
        decode.joined(leg(f"many {number}", choices=64, max_tokens=50, first_token=100 + 500 * number))
    assert decode.engine.load(ServerState.READY).waiting == 2 * 64 - 15 and decode.batch.slots.free
    asked: list[Turn] = []
    is_due = Turns.is_due

    def noted(self: Turns, turn: Turn) -> bool:
        asked.append(turn)
        return is_due(self, turn)

    monkeypatch.setattr(Turns, "is_due", noted)
    decode.do([])
    assert len(asked) == 2


def test_choices_that_wait_for_slots_take_turns_with_other_tenants() -> None:
    decode = Decode(facts(num_large=200, max_slots=2))
    out = decode.joined(leg("many", choices=8, tenant="a"))
    out += decode.announced(leg("one", first_token=100, tenant="b"))
    while "one" not in binds(out):
        out += decode.compute()
    begun = [choice for choice in range(8) if indices(out, "many", choice)]
    assert len(begun) <= 3, "not after all the choices of another"


def test_a_choice_that_waits_for_a_slot_can_be_aborted() -> None:
    decode = Decode(facts(num_large=60, max_slots=1))
    asked = leg("r", choices=3)
    out = decode.joined(asked)
    assert outcomes(decode.abort(asked, 1)) == []
    out += decode.compute_all()
    assert indices(out, "r", 1) == []
    assert indices(out, "r", 0) == indices(out, "r", 2) == list(range(8))
    assert outcomes(out) == [Outcome.DONE]


# ---- pages


def test_nothing_begins_beside_which_those_that_have_begun_could_not_go_on() -> None:
    """Two answers of eight tokens after seven come to four pages each, and there are five."""
    small = facts(num_large=5, spare_tokens=0, link_idle_s=1000.0)
    careless, careful = Decode(small), Decode(changed(small, lookahead_tokens=100))
    for decode in (careless, careful):
        decode.joined(leg("a", 7))
        out = decode.announced(leg("b", 7, first_token=50))
        assert binds(out) == (["b"] if decode is careless else [])
    out = careful.compute_all()
    assert binds(out) == ["b"], "when a has ended"
    assert careful.engine.counters.preemptions == {}


def test_looking_ahead_is_not_adding_up() -> None:
    """What ends soon gives its pages to what goes on for longer."""
    decode = Decode(facts(num_large=8, spare_tokens=0, lookahead_tokens=100))
    out = decode.joined(leg("short", 8, max_tokens=3))
    long = leg("long", 7, first_token=50, max_tokens=16)
    assert binds(decode.announced(long)) == ["long"], "three pages for a while, and six in the end"
    out += decode.arrived(long, decode.bound(long)) + decode.event(Unbound(long.key)) + decode.compute_all()
    assert decode.engine.counters.preemptions == {}
    assert indices(out, "long") == list(range(16))


def test_a_younger_one_gives_way_to_an_older_one_that_has_been_parked_for_long() -> None:
    """Where who loses least gives way, that may be the oldest."""
    decode = Decode(facts(num_large=12, spare_tokens=4, preempt_after_s=2.0, preemption="fewest_tokens"))
    out = decode.joined(leg("old", 4, max_tokens=40))
    out += decode.joined(leg("young", 12, first_token=50, max_tokens=22))
    while not parked(decode):
        out += decode.compute()
    assert parked(decode) == ["old"]
    silent_for = 0
    while parked(decode) == ["old"]:
        decode.tick(decode.now_s + 1.0)
        out += decode.compute()
        silent_for += 1
        assert silent_for <= TURN_TOKENS + 6
    assert decode.engine.counters.preemptions == {"memory": 1, "age": 1}
    out += decode.compute_all()
    assert indices(out, "old") == list(range(40)) and indices(out, "young") == list(range(22))
    ends = {message.key.request_id: message for message in to_router(out) if isinstance(message, LegEnd)}
    pauses = {
        name: [
            (event.end_unix_s - event.start_unix_s, event.detail) for event in end.timeline if event.name == "parked"
        ]
        for name, end in ends.items()
    }
    ((old_s, what),) = pauses["old"]
    assert old_s >= silent_for - 1 and what == "choice 0", "its timeline says for how long"
    assert len(pauses["young"]) == 1


# ---- tenants


def granted_in_turn(decode: Decode, legs: list[StartLeg]) -> list[str]:
    """Who gets the only slot, in order, of legs that are announced together: each as soon as the one before has ended."""
    out = [instruction for each in legs for instruction in decode.announced(each)]
    order: list[str] = []
    while binds(out) != order:
        (name,) = binds(out)[len(order) :]
        order.append(name)
        granted = next(each for each in legs if each.key.request_id == name)
        out += decode.arrived(granted, decode.bound(granted)) + decode.event(Unbound(granted.key))
        out += decode.compute_all() + decode.link(m.Drained(granted.key))
    return order


def test_grants_go_to_tenants_in_turns() -> None:
    decode = Decode(facts(num_large=400, max_slots=1, max_waiting=100))
    legs = [leg(f"a{i}", 8, tenant="a", first_token=10 * i + 1) for i in range(20)]
    legs.append(leg("b", 8, tenant="b", first_token=500))
    order = granted_in_turn(decode, legs)
    assert order[0] == "a0" and "b" in order[:3], "not after all that another has asked for"
    assert [name for name in order if name != "b"] == [f"a{i}" for i in range(20)], "each tenant's in their order"


def test_an_answer_that_comes_from_another_server_goes_before_all_that_has_not_begun() -> None:
    """Of every tenant, however little that one has been served: its client has begun to read, and nothing comes."""
    decode = Decode(facts(num_large=400, max_slots=1, max_waiting=100))
    legs = [leg("first", 8, tenant="a")]
    legs += [leg(f"b{i}", 8, tenant="b", first_token=10 * i + 100) for i in range(3)]
    legs += [replace(leg(f"moved{i}", 8, tenant="a", first_token=10 * i + 500), moved=True) for i in range(2)]
    assert granted_in_turn(decode, legs) == ["first", "moved0", "moved1", "b0", "b1", "b2"]


def test_a_router_that_names_no_tenant_is_one() -> None:
    decode = Decode(facts(num_large=400, max_slots=1, max_waiting=100))
    decode.joined(leg("a", 8))
    for i in range(5):
        decode.announced(leg(f"a{i}", 8, first_token=10 * i + 50))
    assert decode.engine.core.turns.queue.num_tenants == 1


def test_prompts_are_admitted_tenant_by_tenant() -> None:
    prefill = Prefill(facts(num_large=400, max_slots=1, max_waiting=100))
    for i in range(20):
        prefill.start(replace(start(f"a{i}", 8, first_token=10 * i + 1), tenant="a"))
    prefill.start(replace(start("b", 8, first_token=500), tenant="b"))
    out = prefill.compute_all()
    order = [message.key.request_id for message in to_link(out) if isinstance(message, m.FirstTokens)]
    assert order[0] == "a0" and "b" in order[:3]
    assert [name for name in order if name != "b"] == [f"a{i}" for i in range(20)], "each tenant's in their order"


def test_a_long_prompt_of_one_does_not_hold_up_a_short_one_of_another() -> None:
    prefill = Prefill(facts(num_large=400, max_model_len=400))
    prefill.start(replace(start("long", 320), tenant="a"))
    prefill.compute()
    out = prefill.start(replace(start("short", 8, first_token=500), tenant="b"))
    steps = 0
    while not any(isinstance(message, m.FirstTokens) for message in to_link(out)):
        out += prefill.compute()
        steps += 1
    (first,) = [message for message in to_link(out) if isinstance(message, m.FirstTokens)]
    assert first.key.request_id == "short"
    assert steps <= 4, "of forty that the long one needs"


def test_a_prompt_with_as_many_choices_as_there_may_be_is_computed_beside_others() -> None:
    prefill = Prefill(facts(num_large=400, max_running=3, max_slots=3 - 1 + 64, max_model_len=400))
    for first, (name, choices) in enumerate((("long", 1), ("many", 64), ("third", 1), ("waits", 1)), start=1):
        prefill.start(start(name, 80, choices, first_token=first))
    prefill.compute()
    assert [each.key.request_id for each in prefill.engine.core.batch.running.values()] == ["long", "many", "third"]


def test_a_full_queue_gives_back_the_youngest_of_whoever_has_most_there() -> None:
    prefill = Prefill(facts(num_large=400, max_slots=1, max_waiting=4))
    out = prefill.start(replace(start("running", 30, first_token=900), tenant="a"))
    for i in range(5):
        out += prefill.start(replace(start(f"a{i}", 8, first_token=10 * i + 1), tenant="a"))
    assert outcomes(out) == [Outcome.GIVEN_BACK], "of its own, the newcomer goes"
    out = prefill.start(replace(start("b", 8, first_token=500), tenant="b"))
    ((end),) = to_router(out)
    assert end.key.request_id == "a3"
    assert [prompt.leg.key.request_id for prompt in prefill.prompts.queue].count("b") == 1


# ---- the first token


def test_prefill_tells_the_first_token_when_decode_has_room_to_go_on() -> None:
    prefill = Prefill(facts())
    asked = start("r", 6)
    out = prefill.start(asked) + prefill.compute_all()
    assert [type(message) for message in to_link(out)] == [m.Announce, m.OfferPieces, m.FirstTokens] or any(
        isinstance(message, m.FirstTokens) for message in to_link(out)
    ), "decode knows it"
    assert said(out) == [], "the client does not: it might hear nothing more for long"
    prefill.open_ring()
    assert [index for _, _, index, _ in said(prefill.link(m.Grant(asked.key, (0,))))] == [0]


def test_prefill_tells_the_first_tokens_of_the_choices_that_begin() -> None:
    prefill = Prefill(facts())
    asked = start("r", 6, choices=3)
    prefill.open_ring()
    prefill.start(asked)
    prefill.link(m.Grant(asked.key, (0,), 2))
    assert [choice for _, choice, _, _ in said(prefill.compute_all())] == [0, 1]


def test_a_first_token_that_is_the_last_is_told_at_once() -> None:
    prefill = Prefill(facts())
    out = prefill.start(start("r", 6, params=SamplingParams(max_tokens=1))) + prefill.compute_all()
    assert [index for _, _, index, _ in said(out)] == [0]
    assert plans(out)


# ---- overload


class Open:
    """More comes at each step than can be answered; whoever is granted has its KV at once. Time is counted in steps."""

    def __init__(self, seed: int, **changes: Any) -> None:
        self.rng = random.Random(seed)
        usual = {"num_large": 30, "max_slots": 6, "max_waiting": 10_000, "spare_tokens": 4, "max_model_len": 200}
        self.decode = Decode(facts(**{**usual, **changes}))
        self.legs: dict[str, StartLeg] = {}
        self.step = 0
        self.heard: dict[tuple[str, int], list[int]] = {}  # by request and choice: at which steps
        self.ended: dict[str, int] = {}

    def take(self, out: list[Instruction]) -> None:
        for name, choice, _, _ in said(out):
            self.heard.setdefault((name, choice), []).append(self.step)
        for message in to_router(out):
            if isinstance(message, LegEnd):
                assert message.outcome is Outcome.DONE, message
                self.ended[message.key.request_id] = self.step
        for name in binds(out):
            granted = self.legs[name]
            self.take(self.decode.arrived(granted, self.decode.bound(granted)))
            self.take(self.decode.event(Unbound(granted.key)))
            self.take(self.decode.link(m.Drained(granted.key)))

    def run(self, arrivals: int, max_tokens: int, choices: int = 1) -> None:
        while len(self.ended) < arrivals:
            self.step += 1
            assert self.step < 20_000, "it hangs"
            if len(self.legs) < arrivals and self.rng.random() < 0.5:
                number = len(self.legs)
                tokens, most = self.rng.randint(1, 30), self.rng.randint(2, max_tokens)
                made = leg(f"r{number}", tokens, self.rng.randint(1, choices), most, first_token=40 * number)
                self.legs[f"r{number}"] = made
                self.take(self.decode.announced(made))
            self.decode.now_s = 0.05 * self.step
            if self.decode.unreported:
                self.take(self.decode.compute())

    @property
    def silence(self) -> int:
        """Steps, the longest of any choice."""
        return max(b - a for steps in self.heard.values() for a, b in itertools.pairwise(steps))

    @property
    def overtaken(self) -> int:
        """Most that came later and ended before."""
        order = [self.ended[name] for name in self.legs]
        return max(sum(later < ended for later in order[place:]) for place, ended in enumerate(order))


@pytest.mark.parametrize("seed", range(6))
def test_in_overload_nobody_who_has_begun_is_silent_while_answers_are_no_longer_than_is_looked_ahead(seed: int) -> None:
    world = Open(seed, lookahead_tokens=40)
    world.run(arrivals=60, max_tokens=40)
    assert world.decode.engine.counters.preemptions == {}
    assert world.silence <= 4, "two plans are in flight when it joins"
    assert world.overtaken <= 12, "those that decode together"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("lookahead_tokens", [0, 8])
def test_in_overload_silence_is_bounded_by_what_older_answers_still_have_to_write(
    seed: int, lookahead_tokens: int
) -> None:
    """And by computing again what has left the cache, a chunk a step."""
    world = Open(seed, lookahead_tokens=lookahead_tokens)
    world.run(arrivals=60, max_tokens=80)
    assert world.silence <= 80 + 110 // 8 + 4
    assert world.overtaken <= 20


@pytest.mark.parametrize("seed", range(4))
def test_in_overload_choices_of_many_requests_come_to_their_ends(seed: int) -> None:
    world = Open(seed, lookahead_tokens=(0, 40)[seed % 2])
    world.run(arrivals=30, max_tokens=30, choices=9)
    for name, made in world.legs.items():
        assert all(len(world.heard[name, c]) == made.params.max_tokens for c in made.choices)


def test_a_request_with_many_choices_leaves_slots_for_those_who_come_later() -> None:
    """Its choices end together, so whoever waited for one of their slots would wait for all of the request."""
    decode = Decode(facts(num_large=200, max_slots=16))
    decode.joined(leg("many", choices=30, max_tokens=40, tenant="a"))
    assert len(decode.batch.running) == 14
    for number in range(2):
        decode.joined(leg(f"one-{number}", max_tokens=4, tenant="b", first_token=100 * (number + 1)))
    assert len(decode.batch.running) == 16
    out = decode.compute()
    while decode.unreported:
        out += decode.compute()
    assert [indices(out, "many", choice)[-1] for choice in range(30)] == [39] * 30
    assert all(indices(out, f"one-{number}")[-1] == 3 for number in range(2))


# ---- pages


@pytest.mark.parametrize("tenant", ["a", "b"])
@pytest.mark.parametrize("choices", [8, 32])
def test_a_request_of_many_choices_leaves_pages_to_those_that_have_none(choices: int, tenant: str) -> None:
    """Its own tenant's next request, too, begins while its choices run, as it does where slots are what is short."""
    decode = Decode(facts(num_large=128, max_slots=64, max_waiting=100, lookahead_tokens=100))
    many = leg("many", tokens=6, choices=choices, max_tokens=40, tenant="a")
    out = decode.joined(many)
    begun = len(decode.batch.running)
    assert 1 < begun <= choices, "as many begin at once as can go on together"
    out += decode.compute()
    one = leg("one", tokens=6, max_tokens=20, tenant=tenant, first_token=500)
    assert binds(decode.announced(one)) == ["one"]
    out += decode.arrived(one, decode.bound(one)) + decode.event(Unbound(one.key))
    out += decode.compute_all()
    assert outcomes(out) == [Outcome.DONE, Outcome.DONE]
    assert [indices(out, "many", choice) for choice in range(choices)] == [list(range(40))] * choices
    assert indices(out, "one") == list(range(20))
    assert decode.engine.counters.preemptions == {}


def test_a_choice_that_many_overtook_takes_pages_that_are_left_to_others() -> None:
    """Whoever sends small requests without end does not keep it waiting for ever."""
    decode = Decode(facts(num_large=64, max_slots=16, max_waiting=100, lookahead_tokens=100))
    many = leg("many", tokens=6, choices=6, max_tokens=40)
    out = decode.joined(many)
    asked: dict[str, StartLeg] = {}
    going_on = 0
    for number in range(400):
        if len(asked) < 12 + going_on:
            small = leg(f"s{number}", tokens=6, max_tokens=12, tenant="b", first_token=100 * number + 500)
            asked[f"s{number}"] = small
            out += decode.announced(small)
        for name in binds(out)[going_on:]:
            out += decode.arrived(asked[name], decode.bound(asked[name])) + decode.event(Unbound(asked[name].key))
            decode.link(m.Drained(asked[name].key))
            going_on += 1
        if decode.unreported:
            out += decode.compute()
        if all(indices(out, "many", choice) for choice in range(6)):
            assert going_on >= 2, "one slot in eight, of 16, is for others"
            return
    pytest.fail("some choice has not begun")


def test_an_answer_that_stands_still_has_its_grant_before_what_has_not_begun() -> None:
    decode = Decode(facts(max_slots=1, max_waiting=100))
    first = leg("first")
    out = decode.joined(first)
    decode.announced(leg("new", first_token=100))
    moved = replace(leg("moved", first_token=500), moved=True)
    decode.announced(moved)
    while "moved" not in binds(out):
        assert "new" not in binds(out)
        out += decode.compute()
    assert "new" not in binds(out)


def test_a_server_says_for_how_many_tokens_those_that_have_begun_leave_room() -> None:
    decode = Decode(facts(num_large=20, spare_tokens=0, lookahead_tokens=100))
    assert decode.engine.load(ServerState.READY).spare_tokens == 20 * 4
    decode.joined(leg("r", tokens=6, max_tokens=40))
    load = decode.engine.load(ServerState.READY)
    assert load.spare_tokens is not None and load.pages_free + load.pages_evictable >= 17
    assert 5 * 4 <= load.spare_tokens <= (20 - 12) * 4, "it comes to 45 tokens in pages of four"
    decode.compute_all()
    assert decode.engine.load(ServerState.READY).spare_tokens == 20 * 4
