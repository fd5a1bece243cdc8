"""Keeps a store to its budget, once: what `disagg cache gc` does, for a server, in a process of its own beside its loop.

`python -m disagg.offload.collector PID`, with which it ends, reads a `Job` as JSON and prints what `collect` says, as JSON, too.
"""

from __future__ import annotations

import asyncio
import os
import sys

import msgspec

from disagg.offload.options import OptionValue
from disagg.offload.store import StoreError, open_store
from disagg.offload.survey import collect
from disagg.telemetry.process import die_with_parent, leave
from disagg.types.errors import DisaggError, first_of
from disagg.types.status import DONE, FAILED

NICENESS = 10  # whoever computes answers goes first
MOST_JOB_BYTES = 1 << 20


class Job(msgspec.Struct, frozen=True):
    """A store, and how many bytes may stay in it."""

    url: str
    options: dict[str, OptionValue]
    budget_bytes: int


def main(parent_pid: int) -> int:
    die_with_parent(parent_pid)
    os.nice(NICENESS)
    job = msgspec.json.decode(sys.stdin.buffer.read(MOST_JOB_BYTES), type=Job)

    async def run() -> bytes:
        store = open_store(job.url, job.options, make=False)
        return msgspec.json.encode(await collect(store, job.budget_bytes))

    failed: BaseException | None = None
    try:
        print(asyncio.run(run()).decode())
    except* (StoreError, DisaggError) as errors:
        failed = errors
    if failed is None:
        return DONE
    print(first_of(failed), file=sys.stderr)
    return FAILED


if __name__ == "__main__":
    leave(main(int(sys.argv[1])))
