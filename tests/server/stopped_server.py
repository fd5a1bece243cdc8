"""One worker that beats, and what its server knows of it: for `test_workers.py`. Says "ready", then why it has lost it."""

from __future__ import annotations

import asyncio

import uvloop

from disagg.messages.control import Dump
from tests.server.test_workers import workers_of


async def main() -> None:
    async with workers_of(0.0, beat_s=0.1) as workers:
        await workers.call(Dump(), 30.0)
        print("ready", flush=True)
        print(await asyncio.wait_for(workers.wait_lost(), 60.0), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
