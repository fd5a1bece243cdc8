"""Memory that large requests took goes back once they are done with it."""

from __future__ import annotations

import asyncio

import pytest

from disagg.telemetry import memory
from disagg.telemetry.memory import LARGE_BYTES, GiveBack


async def test_what_is_free_goes_back_after_the_last_large_request_and_not_only_after_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[float] = []
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(memory, "GIVE_BACK_AFTER_S", 0.2)
    monkeypatch.setattr(memory, "give_back_memory", lambda: given.append(loop.time()))
    give_back = GiveBack()
    give_back.after(LARGE_BYTES)
    await asyncio.sleep(0.3)
    assert not given, "small ones find their memory again"
    give_back.after(LARGE_BYTES + 1)
    await asyncio.sleep(0.15)
    give_back.after(LARGE_BYTES + 1)
    last_s = loop.time()
    async with asyncio.timeout(10):
        while not given or given[-1] < last_s + 0.2:
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)
    assert len(given) == 2
