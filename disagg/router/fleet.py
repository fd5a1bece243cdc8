"""Who is there: the streams to all servers, and the picture of them that decisions are made on. Knows nothing of requests.

What a stream says goes on to the `FleetOwner`; what servers have in common (weights, the longest context) is judged here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Protocol

from disagg.config.tree import ServerRef
from disagg.messages.legs import RouterMessage, ServerMessage
from disagg.router.outstanding import Outstanding
from disagg.router.streams import Caller, Dialer, ServerStream
from disagg.router.view import ClusterView, Work

logger = logging.getLogger(__name__)


class FleetOwner(Protocol):
    """Is told what happens, on the event loop; must not block."""

    def fleet_changed(self) -> None: ...

    def server_said(self, name: str, message: ServerMessage) -> None: ...

    def server_lost(self, name: str, incarnation: str, crashed: bool, reason: str) -> None: ...


class Fleet:
    """The servers of one router."""

    def __init__(
        self, refs: Iterable[ServerRef], caller: Caller, outstanding: Outstanding, owner: FleetOwner, dial: Dialer
    ) -> None:
        self._caller = caller
        self._outstanding = outstanding
        self._owner = owner
        self._streams = {ref.name: ServerStream(ref, caller, dial=dial, owner=self) for ref in refs}
        self._weights: frozenset[str] = frozenset()  # of all servers, when last heard

    async def start(self) -> None:
        for stream in self._streams.values():
            stream.start()

    async def close(self, flush_s: float) -> None:
        """Waits flush_s at most for what was sent to arrive."""
        await asyncio.gather(*(stream.flush(flush_s) for stream in self._streams.values()))
        await asyncio.gather(*(stream.close() for stream in self._streams.values()))

    def send(self, server: str, message: RouterMessage) -> None:
        self._streams[server].send(message)

    def view(self) -> ClusterView:
        amount = self._outstanding.amount
        return ClusterView(
            tuple(
                stream.view(amount(name, Work.PREFILL), amount(name, Work.DECODE))
                for name, stream in self._streams.items()
            )
        )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._streams)

    @property
    def rival(self) -> str:
        """Who holds this router's name at a server, if somebody else does."""
        return next((stream.error for stream in self._streams.values() if stream.name_taken), "")

    def longest(self, at_most: int) -> int:
        """Prompt and output together, as far as is known now; what a pool can hold is checked with the pair."""
        hellos = [s.hello for s in self._streams.values() if s.hello is not None and s.hello.max_model_len > 0]
        served = [hello.max_model_len for hello in hellos if hello.model == self._caller.model]
        return min(at_most, max(served, default=at_most))

    # ---- streams call these

    def server_changed(self, name: str) -> None:
        weights = frozenset(s.hello.weights_hash for s in self._streams.values() if s.hello is not None) - {""}
        if len(weights) > 1 and weights != self._weights:
            logger.warning(
                "servers of %s have different weights (%s): only equals are paired, and answers depend on which are taken",
                self._caller.model,
                ", ".join(sorted(each[:12] for each in weights)),
            )
        self._weights = weights
        self._owner.fleet_changed()

    def server_said(self, name: str, message: ServerMessage) -> None:
        self._owner.server_said(name, message)

    def server_lost(self, name: str, incarnation: str, crashed: bool, reason: str) -> None:
        self._owner.server_lost(name, incarnation, crashed, reason)
