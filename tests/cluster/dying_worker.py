"""A worker that kills itself in mid-offload, once a file says so: `python -m tests.cluster.dying_worker DIRECTORY ...`.

DIRECTORY/copying   a decode server's rank has copied half of some pages to the host
DIRECTORY/writing   a decode server's rank has written its parts to storage, and nobody knows yet

As from `kill -9`: nothing is said, nothing is put away. The file goes when it is heeded, so one worker dies of it.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from disagg.messages.tiers import CopyIn, CopyOut, PartsWritten, WriteParts
from disagg.worker.__main__ import main
from disagg.worker.offload_driver import Begun, OffloadDriver
from disagg.worker.page_copies import by_group
from disagg.worker.rank_storage import RankStorage

ORDERS = Path(sys.argv.pop(1))
IS_DECODE = sys.argv[sys.argv.index("--name") + 1].startswith("decode")

shipped_begin_copy = OffloadDriver._begin_copy
shipped_write = RankStorage.write


def die_if_told(when: str) -> None:
    try:
        (ORDERS / when).unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def begin_copy(driver: OffloadDriver, command: CopyOut | CopyIn) -> Begun:
    if IS_DECODE and isinstance(command, CopyOut) and (ORDERS / "copying").exists():
        driver._copier.begin(by_group(command.moves[: len(command.moves) // 2]), out=True)()
        die_if_told("copying")
    return shipped_begin_copy(driver, command)


async def write(storage: RankStorage, command: WriteParts) -> PartsWritten:
    report = await shipped_write(storage, command)
    if IS_DECODE:
        die_if_told("writing")
    return report


OffloadDriver._begin_copy = begin_copy  # type: ignore[method-assign]
RankStorage.write = write  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(main())
