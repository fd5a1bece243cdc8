"""Whatever a sequence may still read is there: 200 campaigns of 100 calls, 2,000 of them in `make test-slow` and 20 in
`make check`."""

from __future__ import annotations

import collections

from tests.memory.machines import EXAMPLES, run_campaign
from tests.memory.sequence_machine import machine

MUST_HAPPEN = (
    "hit",
    "wants less",
    "refused",
    "no page",
    "evicted",
    "recycled",
    "copied",
    "kept a checkpoint to send",
    "kept of a broken transfer",
    "fitted alone",
)


@EXAMPLES
def test_whatever_may_still_be_read_is_there(examples: int) -> None:
    run_campaign(machine, examples, MUST_HAPPEN, at_least=examples // 4, steps=100)


def test_several_choices_that_fit_alone_fit_beside_what_is_cached() -> None:
    """Two cached pages of full attention lie in two large pages, which keeps these from the states of three choices."""
    one = machine(collections.Counter())()
    one.make(pool="full and state", caching=True, prefills=False)
    one.compute(document=0, runs=2, sends=False, spare=0, tokens=1)
    one.receive(choices=1, document=0, spare=0, tokens=1)
    one.arrive(number=0, runs=3)
    one.nothing_is_lost()
    one.teardown()
