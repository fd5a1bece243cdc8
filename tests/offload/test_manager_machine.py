"""The offload manager in a naive world: 200 times 200 operations in `make test`, 20 times in `make check`, 2,000 times (400,000
operations) in the slow campaign."""

from __future__ import annotations

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
