"""A notification alone, behind no write: what no server sends, and what peers of tests answer with."""

from __future__ import annotations

from disagg.transfer.backends.base import Peer, TransferBackend
from tests.transfer_backends.loopback import LoopbackBackend


def say(backend: TransferBackend, peer: Peer, notification: bytes) -> None:
    if isinstance(backend, LoopbackBackend):
        backend.say(peer, notification)
        return
    from disagg.transfer.backends import nixl

    assert isinstance(backend, nixl.NixlBackend)
    backend._agent.send_notif(peer.name, nixl._CALLER + notification)
