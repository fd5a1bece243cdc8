"""Who understands what, by the number that it says or by its word."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from disagg.messages.legs import AbortLeg, Drain, HandOver, LoadReport, PeerRef, ServerHello, ServerState, StartLeg
from disagg.messages.needs import lacks, understands
from disagg.types.ids import LegKey, Role
from disagg.types.protocol import BEFORE_NUMBERS, Version
from disagg.types.sampling import SamplingParams

KEY = LegKey("r", 1, 0)
LEG = StartLeg(KEY, (1,), 1, SamplingParams(max_tokens=1), (0,), PeerRef("p", "p:1", "i"), 1.0)
LOAD = LoadReport(ServerState.READY, 0, 0, 0, 64, 0, 64)


def server(role: Role, protocol: int, *, drains: bool = False, hands_over: bool = False) -> ServerHello:
    version = Version(protocol, 0, "v") if protocol else BEFORE_NUMBERS
    hello = ServerHello("s", role, 1, 1, (2,), "i", "f", "m", 64, 64, "s:1", LOAD)
    return replace(hello, version=version, drains=drains, hands_over=hands_over)


@pytest.mark.parametrize("role", Role)
def test_all_understand_a_plain_leg_and_its_end(role: Role) -> None:
    for message in (LEG, AbortLeg(KEY)):
        assert lacks(server(role, 0), message) == ""


@pytest.mark.parametrize(
    ("role", "protocol", "said", "drains", "hands_over"),
    [
        (Role.DECODE, 0, False, False, False),
        (Role.DECODE, 0, True, True, True),  # from between the releases: it says so itself
        (Role.DECODE, 1, False, True, True),
        (Role.DECODE, 7, False, True, True),
        (Role.PREFILL, 1, False, True, False),
        (Role.MIXED, 1, False, True, False),
    ],
)
def test_draining_and_handing_over_are_understood_by_number_and_role_or_by_word(
    role: Role, protocol: int, said: bool, drains: bool, hands_over: bool
) -> None:
    it = server(role, protocol, drains=said, hands_over=said)
    assert understands(it, Drain) is drains
    assert understands(it, HandOver) is understands(it, StartLeg, "moved") is hands_over
    messages = {
        Drain(True): drains,
        HandOver(KEY): hands_over,
        replace(LEG, moved=True): hands_over,
        replace(LEG, moves_attempt=2): hands_over,
    }
    for message, known in messages.items():
        assert (lacks(it, message) == "") is known
    if not hands_over:
        assert lacks(it, HandOver(KEY)) == (
            f"HandOver needs protocol 1 of decode servers; it is a {role.value} server of {it.version}"
        )
