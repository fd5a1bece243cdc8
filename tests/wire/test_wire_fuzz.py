"""Whatever bytes come in place of a message: a value of ours, or one error of ours, and what is taken survives the way back."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, Phase, given, settings

from disagg.types.errors import ConfigError, ProtocolError, RequestError
from disagg.types.plain import MESSAGE_CHARS
from disagg.wire import inference, pb, peer, server
from tests.campaigns import Campaign, sizes
from tests.wire.wire_hostile import raw

MAX_IDS = 8192
READERS: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "what a router says": (pb.server.RouterFrame, server.router_frame_from_proto),
    "what a server says": (pb.server.ServerFrame, server.server_says_from_proto),
    "what a peer says": (pb.peer.LinkFrame, peer.link_frame_from_proto),
    "what a client asks": (
        pb.inference.GenerateRequest,
        lambda message: inference.generate_request_from_proto(message, MAX_IDS),
    ),
}


@pytest.mark.parametrize("who", READERS)
@sizes(100)
def test_whatever_comes_is_read_or_refused_in_our_words(who: str, examples: int) -> None:
    kind, read = READERS[who]
    campaign = Campaign(examples)
    found = {"read": 0, "refused": 0, "no message": 0}

    @settings(
        derandomize=True,
        deadline=None,
        database=None,
        max_examples=campaign.examples,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 2**63))
    def run(number: int) -> None:
        campaign.begin()
        try:
            message = kind.FromString(raw(Random(number), kind, [kind().SerializeToString()]))
        except DecodeError:
            found["no message"] += 1
            return
        try:
            read(message)
        except (ProtocolError, RequestError, ConfigError) as error:
            found["refused"] += 1
            said = str(error)
        else:
            found["read"] += 1
            said = "it is read"
        assert 0 < len(said) < 2 * MESSAGE_CHARS and said.isprintable()

    run()
    campaign.check()
    assert all(found.values()), found
