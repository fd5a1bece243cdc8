"""What an engine of each role may be told by its peers and workers."""

from __future__ import annotations

from typing import get_args

import pytest

from disagg.decode_server.role import DECODE
from disagg.engine.now import Now
from disagg.messages import link as m
from disagg.messages.transfer import (
    Beat,
    Bound,
    Landing,
    PeerAdded,
    PeerRemoved,
    PeerWired,
    PieceFailed,
    PieceSent,
    SendsDropped,
    TransferEvent,
    Unbound,
)
from disagg.mixed_server.role import MIXED
from disagg.prefill_server.role import PREFILL
from disagg.server.role import ServerRole
from disagg.types.errors import ProtocolError
from disagg.types.ids import LegKey, Role
from tests.engine.lone_engine import (
    LINK,
    Decode,
    Prefill,
    facts,
)

FACTS = facts(prefix_cache=False)


def test_messages_that_a_side_may_not_send_are_errors() -> None:
    key = LegKey("r", 0, 0)
    with pytest.raises(ProtocolError, match="decode server may not send Announce"):
        Prefill(FACTS).link(m.Announce(key, 1))
    with pytest.raises(ProtocolError, match="prefill server may not send Grant"):
        Decode(FACTS).link(m.Grant(key, (0,)))


KEY = LegKey("r", 0, 0)
# Of nothing that is known there: whoever may report them is not contradicted.
REPORTS: tuple[TransferEvent, ...] = (
    PeerAdded(LINK, 0, ""),
    PeerWired(LINK, 0, ("tcp",)),
    PeerRemoved(LINK, True),
    PieceSent(LINK, 3, KEY, 1, 0.0, 0.0),
    PieceFailed(LINK + 1, 3, KEY, "gone"),
    SendsDropped(LINK, KEY),
    Bound(KEY),
    Unbound(KEY),
    Landing(LINK + 1, 3, KEY, True, "", 1, 0.0, 0.0),
    Beat(0, 0.0, 0, 0),
)
WRITERS_REPORT = {PeerAdded, PeerRemoved, PieceSent, PieceFailed, SendsDropped}
MAY_REPORT: dict[Role, set[type[TransferEvent]]] = {
    Role.PREFILL: {Beat, *WRITERS_REPORT},
    Role.DECODE: {Beat, *WRITERS_REPORT, Bound, Unbound, Landing},  # which hands over what it has begun, too
    Role.MIXED: {Beat},
}


@pytest.mark.parametrize("role", [PREFILL, DECODE, MIXED], ids=lambda role: role.role.value)
def test_what_a_roles_worker_has_no_part_in_it_may_not_report(role: ServerRole) -> None:
    assert {type(report) for report in REPORTS} == set(get_args(TransferEvent))
    for report in REPORTS:
        engine = role.engine(FACTS)
        if type(report) in MAY_REPORT[role.role]:
            engine.transfer_event(0, report, Now(0.0, 0.0))
            continue
        with pytest.raises(ProtocolError, match=f"{role.role.value} worker may not report {type(report).__name__}$"):
            engine.transfer_event(0, report, Now(0.0, 0.0))
