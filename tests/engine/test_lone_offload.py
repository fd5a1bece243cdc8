"""Which of two servers stores the KV of a prompt."""

from __future__ import annotations

import pytest

from disagg.engine.facts import OffloadFacts
from disagg.engine.instructions import Instruction, ToStore
from disagg.messages import link as m
from disagg.messages.legs import StartLeg
from disagg.messages.tiers import CopiedOut, CopyOut
from disagg.messages.transfer import SendsDropped
from disagg.offload.instructions import Ask, StoreFound, Upload
from disagg.types.sampling import SamplingParams
from tests.engine.lone_engine import LINK, Prefill, facts, start, to_transfer

PAGES = 3


def ended(prefill: Prefill, leg: StartLeg) -> list[Instruction]:
    """What follows when decode has all of it. Nothing is stored before; copies to the host are made at once."""
    for each in prefill.start(leg):
        if isinstance(each, ToStore) and isinstance(each.command, Ask):
            prefill.do(prefill.engine.store_event(StoreFound(each.command.ask, 0, ()), prefill.now))
    prefill.compute_all()
    prefill.link(m.Complete(leg.key))
    out = prefill.event(SendsDropped(LINK, leg.key))
    for copy in [message for message in to_transfer(out) if isinstance(message, CopyOut)]:
        out += prefill.do(prefill.engine.tier_event(0, CopiedOut(copy.op, 0, 0.0), prefill.now))
    return out


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
