"""By what this server's KV goes to each peer, for operators: in the log when it is learned, in reports while the link is up.

Knows what workers say of links; nothing of transports but that TCP is the slow one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from disagg.config.staging import Device
from disagg.messages.legs import CarriedBy
from disagg.messages.transfer import PeerWired

logger = logging.getLogger(__name__)

MAX_SAID = 256  # of peers
SLOW = (
    "though this server computes on GPUs: RDMA needs devices in both pods; cuda_ipc needs both processes on one machine, "
    "where each sees the other's GPUs"
)


def over_tcp(ways: Iterable[str]) -> bool:
    """Whether all of them are TCP alone. way: as UCX writes it, such as "zero-copy 50% on tcp/eth0 and 50% on tcp/eth1"."""
    known = tuple(ways)
    return bool(known) and all("tcp/" in way and way.count("/") == way.count("tcp/") for way in known)


class Carriers:
    """`learned` from workers; `report` to routers."""

    def __init__(self, peer_of: Callable[[int], str]) -> None:
        """peer_of: name of the peer at the other end of a link; empty when the link is down."""
        self._peer_of = peer_of
        self._ways: dict[int, dict[str, None]] = {}  # by link

    def learned(self, message: PeerWired, device: Device) -> None:
        """From one rank, of one rank of the peer."""
        peer, known = self._peer_of(message.link), self._ways.setdefault(message.link, {})
        new = [way for way in message.ways if way not in known]
        known.update(dict.fromkeys(new))
        if not new or not peer:
            return
        if device == "cuda" and over_tcp(new):
            logger.warning("KV to %s goes over TCP (%s), %s", peer, " or ".join(new), SLOW)
        else:
            logger.info("KV to %s goes by %s", peer, " or ".join(new))

    def report(self, device: Device) -> tuple[CarriedBy, ...]:
        """Of links that are up."""
        for link in [link for link in self._ways if not self._peer_of(link)]:
            del self._ways[link]
        said = [
            CarriedBy(self._peer_of(link), tuple(ways), slow=device == "cuda" and over_tcp(ways))
            for link, ways in self._ways.items()
            if ways
        ]
        return tuple(said[-MAX_SAID:])
