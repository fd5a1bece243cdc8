"""Lets one in at each turn of the event loop, tenants in turns: many that come at once would hold the loop together."""

from __future__ import annotations

import asyncio

from disagg.scheduler.fairness import FairQueue


class Turnstile:
    """Of one router."""

    def __init__(self) -> None:
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()
        self._turning = False

    async def turn(self, tenant: str) -> None:
        """Returns when it is the turn of one more of this tenant's."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(tenant, turn, 1.0)
        if not self._turning:
            self._turn_soon()
        try:
            await turn
        finally:
            self._waiting.discard(turn)

    def _turn_soon(self) -> None:
        self._turning = True
        asyncio.get_running_loop().call_soon(self._let_in)

    def _let_in(self) -> None:
        self._turning = False
        for turn in self._waiting:
            self._waiting.take(turn)
            if not turn.done():  # else it has just left
                turn.set_result(None)
            self._turn_soon()
            return
