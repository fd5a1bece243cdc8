"""What an engine asks of each half of a transfer: it has links to servers, and a share of what transfer threads say."""

from __future__ import annotations

from disagg.engine.legs import Stage
from disagg.engine.now import Now
from disagg.memory.sequence import SequencePages
from disagg.messages.link import LinkHello, LinkMessage
from disagg.messages.transfer import TransferEvent


class Handoff(Stage):
    """See the module. What has no body here is nothing to a half that has no use for it."""

    def link_up(self, number: int, hello: LinkHello, now: Now) -> None:
        """A link to a server of the other role. Raises SliceError if the two TP sizes cannot exchange heads."""
        raise NotImplementedError

    def link_down(self, number: int, gone: bool, reason: str) -> None:
        """The link is lost for good. gone: its workers are known to have exited, so nothing can write to its ring."""
        raise NotImplementedError

    def link_message(self, number: int, message: LinkMessage, now: Now) -> None:
        """Raises ProtocolError for what the other role may not say."""
        raise NotImplementedError

    def transfer_event(self, rank: int, message: TransferEvent, now: Now) -> bool:
        """False for what no transfer thread may say to this half."""
        raise NotImplementedError

    def dial_failed(self, name: str, incarnation: str, reason: str) -> None:
        """No link to that server could be made."""

    def peer_gone(self, number: int) -> None:
        """The workers behind a lost link have exited at last."""

    def arena_bytes(self) -> tuple[int, int, int]:
        """(free, leased, quarantined), of each rank, of memory that peers write to."""
        return 0, 0, 0

    def pages(self) -> list[SequencePages]:
        """That are held here, and by no sequence of the batch."""
        return []

    def held_slots(self) -> int:
        """Likewise."""
        return 0
