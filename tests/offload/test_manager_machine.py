"""The offload manager in a naive world: 200 times 200 operations in `make test`, 20 times in `make check`, 2,000 times (400,000
operations) in the slow campaign."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.memory.machines import run_campaign
from tests.offload.machines import manager_machine

MUST_HAPPEN = ("Copy", "Upload", "Publish", "Discard", "conflict", "stored", "dropped", "failed", "whole")


@pytest.mark.parametrize(
    "examples",
    [
        pytest.param(20, marks=pytest.mark.short),
        pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(1200)]),
        pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
def test_nothing_is_lost_leaked_stale_or_behind_a_hole(examples: int) -> None:
    run_campaign(lambda seen: manager_machine(seen=seen), examples, MUST_HAPPEN, at_least=5)


def test_what_a_span_finds_on_the_host_is_held_as_long_as_the_sequence_runs() -> None:
    """A page of full attention whose state has left the host: it may leave, too, when nobody holds it."""
    machine = manager_machine(seen=Counter())()
    machine.make(
        model="full and state", ranks=1, stride_tokens=0, host_large=3, storage=False, lingering=0, faults=False
    )

    def decode(number: int, prompt: int, tokens: list[int]) -> None:
        machine.decode(number=number, prompt=list(range(prompt)), tokens=tokens)
        machine.everything_adds_up()
        machine.no_chain_on_the_host_has_a_hole()

    def hear(times: int) -> None:
        for _ in range(times):
            machine.hear(others=0)

    hear(6)
    decode(0, 5, [0])
    machine.finish(number=0, tail=False, asked=False)
    hear(10)
    decode(0, 3, [0, 0])
    decode(3, 13, [0])
    hear(3)
    decode(3, 1, [0])
    machine.teardown()
