"""A router that says what it must not has its leg refused, on either role: no crash, and no order to a worker.

Legs cross the wire's own conversion first, so what is tried is what can come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from disagg.messages.channel import Frame
from disagg.messages.legs import LegEnd, Outcome, StartLeg
from disagg.types.errors import ProtocolError
from disagg.types.ids import LegKey
from disagg.types.sampling import SamplingParams
from disagg.wire.server import router_frame_from_proto, router_frame_to_proto
from tests.campaigns import Campaign, sizes
from tests.engine.lone_engine import D_REF, P_REF, Decode, Lone, Prefill, facts, plans, start, to_router, to_transfer

VOCAB = 100
Make = Callable[[], Lone]


def prefill() -> Lone:
    return Prefill(facts(vocab_size=VOCAB))


def decode() -> Lone:
    return Decode(facts(vocab_size=VOCAB))


def leg(**changes: Any) -> StartLeg:
    return replace(start(), **changes)


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=5, **changes)


def over_the_wire(asked: StartLeg) -> StartLeg:
    frame = router_frame_from_proto(router_frame_to_proto(Frame(1, 0, (asked,))))
    assert isinstance(frame, Frame)
    [arrived] = frame.messages
    return arrived


HOSTILE = {
    "an id that is one too many": leg(token_ids=(1, 2, 3, 4, 5, VOCAB)),
    "the largest id of the wire": leg(token_ids=(2**32 - 1,) * 6),
    "a prompt out of another vocabulary": leg(token_ids=tuple(range(VOCAB, VOCAB + 6))),
    "an output id of an earlier attempt": leg(token_ids=(1, 2, 3, 4, 5, VOCAB), num_prompt=3),
    "a bias of an id that is not there": leg(params=params(logit_bias=((VOCAB, 1.0),))),
    "a bias that is no number": leg(params=params(logit_bias=((3, float("nan")),))),
    "a stop id that is not there": leg(params=params(stop_token_ids=(3, VOCAB))),
    "too many biases": leg(params=params(logit_bias=((1, 1.0),) * 1025)),
    "a temperature that is no number": leg(params=params(temperature=float("nan"))),
    "more logprobs than there are": leg(params=params(logprobs=2**31 - 1)),
    "a negative top_k": leg(params=params(top_k=-5)),
    "choices that are one": leg(choices=(1, 1)),
    "a choice that is none": leg(choices=(0, 2**32 - 1)),
    "no choice": leg(choices=()),
    "no prompt": leg(num_prompt=0),
    "no token": leg(token_ids=(), num_prompt=0),
    "a prompt beyond the context": leg(token_ids=(1,) * 5000),
}


@pytest.mark.parametrize("make", [prefill, decode])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_leg_that_no_router_may_send_is_refused_and_reaches_no_worker(name: str, make: Make) -> None:
    lone = make()
    out = lone.do(lone.start(over_the_wire(HOSTILE[name])))
    [end] = to_router(out)
    assert isinstance(end, LegEnd) and end.outcome is Outcome.REFUSED and end.reason
    assert not plans(out) and not to_transfer(out)
    lone.engine.check_integrity()
    assert lone.engine.idle


@pytest.mark.parametrize("make", [prefill, decode])
def test_ids_that_cannot_even_be_on_the_wire_are_refused_too(make: Make) -> None:
    lone = make()
    for asked in (leg(token_ids=(1, -1)), leg(token_ids=(1, -1), num_prompt=1), leg(choices=(-1,))):
        [end] = to_router(lone.do(lone.start(replace(asked, num_prompt=min(2, asked.num_prompt)))))
        assert isinstance(end, LegEnd) and end.outcome is Outcome.REFUSED


IDS = st.one_of(st.integers(0, VOCAB + 2), st.integers(0, 2**32 - 1))
LEGS = st.builds(
    StartLeg,
    key=st.just(LegKey("h", 0, 0)),
    token_ids=st.lists(IDS, max_size=12).map(tuple),
    num_prompt=st.integers(0, 14),
    params=st.builds(
        SamplingParams,
        max_tokens=st.integers(-1, 2**31 - 1),
        min_tokens=st.integers(-1, 20),
        temperature=st.floats(width=64),
        top_k=st.integers(-2, 200),
        top_p=st.floats(width=64),
        repetition_penalty=st.floats(width=64),
        logit_bias=st.lists(st.tuples(IDS, st.floats(width=64)), max_size=3).map(tuple),
        stop_token_ids=st.lists(IDS, max_size=3).map(tuple),
        logprobs=st.none() | st.integers(-1, 30),
    ),
    choices=st.lists(st.integers(0, 70), max_size=6).map(tuple),
    peer=st.sampled_from([D_REF, P_REF]),
    deadline_s=st.floats(-1.0, 1e9),
)


@sizes()
def test_no_leg_ends_an_engine_and_what_it_takes_has_ids_of_the_model(examples: int) -> None:
    campaign = Campaign(examples)

    @settings(derandomize=True, deadline=None, database=None, max_examples=campaign.examples)
    @given(asked=LEGS, make=st.sampled_from([prefill, decode]))
    def run(asked: StartLeg, make: Make) -> None:
        campaign.begin()
        begin_one(asked, make)

    run()
    campaign.check()


def begin_one(asked: StartLeg, make: Make) -> None:
    try:
        arrived = over_the_wire(asked)
    except ProtocolError:
        return
    lone = make()
    out = lone.do(lone.start(arrived))
    lone.engine.check_integrity()
    ends = [end for end in to_router(out) if isinstance(end, LegEnd)]
    if ends:
        assert ends[0].outcome is Outcome.REFUSED and not plans(out) and not to_transfer(out)
        return
    assert all(0 <= token_id < VOCAB for token_id in arrived.token_ids)
    arrived.params.validate(VOCAB)
