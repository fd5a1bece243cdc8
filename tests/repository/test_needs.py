"""What routers say that servers of the release before do not understand has its row in `disagg/messages/needs.py`."""

from __future__ import annotations

import typing

from msgspec.structs import fields

from disagg.messages.legs import AbortLeg, PodGone, RouterMessage, ServerHello, StartLeg
from disagg.messages.link import LinkMessage
from disagg.messages.needs import MAY_BE_PASSED_OVER, NEEDS
from disagg.types.protocol import OLDEST_PROTOCOL, PROTOCOL
from tests.repository.source import ROOT

# What every server of OLDEST_PROTOCOL understands.
KNOWN = {StartLeg, AbortLeg, PodGone}
KNOWN_OF_START_LEG = {
    "key",
    "token_ids",
    "num_prompt",
    "params",
    "choices",
    "peer",
    "deadline_s",
    "cache_salt",
    "incarnation",
    "tenant",
    "priority",
}
KNOWN_BETWEEN_SERVERS = {
    "OpenRing",
    "CloseRing",
    "Grant",
    "AssignEntries",
    "Watermarks",
    "AskWritten",
    "Complete",
    "Revoke",
    "WantPieces",
    "Announce",
    "OfferPieces",
    "FirstTokens",
    "SentAll",
    "Written",
    "Withdraw",
    "Drained",
    "RingClosed",
    "QuietLinks",
}
WHAT_TO_DO = "say in disagg/messages/needs.py which protocol understands it (docs/versions.md), and send it to no other"


def test_every_message_to_servers_is_known_to_all_or_has_a_row() -> None:
    new = {each for each in typing.get_args(RouterMessage) if each not in KNOWN and (each, "") not in NEEDS}
    assert not new, f"{new}: {WHAT_TO_DO}"


def test_every_field_of_a_leg_is_known_to_all_has_a_row_or_may_be_passed_over() -> None:
    names = {field.name for field in fields(StartLeg)} - KNOWN_OF_START_LEG
    new = {name for name in names if (StartLeg, name) not in {*NEEDS, *MAY_BE_PASSED_OVER}}
    assert not new, f"StartLeg.{new}: {WHAT_TO_DO}; or that it may be passed over"


def test_servers_say_nothing_to_each_other_that_not_all_of_them_know() -> None:
    """A link has no such rows yet: the first one makes them."""
    assert {each.__name__ for each in typing.get_args(LinkMessage)} == KNOWN_BETWEEN_SERVERS, WHAT_TO_DO


def test_rows_are_of_protocols_that_not_all_speak_and_of_what_hellos_say() -> None:
    said = {field.name for field in fields(ServerHello)}
    for (message, field), need in NEEDS.items():
        assert OLDEST_PROTOCOL < need.protocol <= PROTOCOL, "the row has had its time"
        assert need.said_by in said
        assert not field or field in {each.name for each in fields(message)}


def test_the_operators_page_lists_every_row() -> None:
    page = (ROOT / "docs" / "versions.md").read_text()
    rows = [*NEEDS, *MAY_BE_PASSED_OVER]
    names = [f"`{message.__name__}.{field}`" if field else f"`{message.__name__}`" for message, field in rows]
    assert [name for name in names if name not in page] == []
    assert [need.said_by for need in NEEDS.values() if f"`ServerHello.{need.said_by}`" not in page] == []
