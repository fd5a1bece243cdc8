"""Memory of several ranks that all of them write, for sums of few rows (kernels). Knows ranks and tensors; nothing of modules.

    a rank's memory   │ slot 0: area of rank 0, area of rank 1, ... │ slot 1: area of rank 0, area of rank 1, ... │

Every rank maps that of the others: by CUDA's handles between processes, on GPUs of one host that reach each other. A sum sends
a rank's rows to each other one, which for more than few ranks and rows is more than NCCL sends.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from disagg.models.ranks import Ranks
from disagg.types.errors import ConfigError

MOST_RANKS = 8
MOST_SENT_BYTES = 6 << 20  # by a rank, in a sum: 768 rows of 4096 in two bytes to one other
MOST_ROWS = 1024  # each is a program, which waits for that of the same row of other ranks
LEAST_ROWS = 2  # of which an area holds a multiple, in the model's dtype: of one row four bytes of each number are sent
SLOTS = 2
POLL_S = 4e-7  # at least, of a look at what has not arrived
EMPTY_BYTE = 0xFF
MOST_HANDLE_BYTES = 1024
_BITS = {2: torch.int16, 4: torch.int32}
logger = logging.getLogger(__name__)


def most_rows(ranks: int, width: int, itemsize: int) -> int:
    """Up to how many rows' sums are made here; 0: none. width: of a row, in numbers of that many bytes. Pure."""
    if not 1 < ranks <= MOST_RANKS:
        return 0
    rows = MOST_SENT_BYTES // ((ranks - 1) * width * itemsize)
    return min(rows, MOST_ROWS) // LEAST_ROWS * LEAST_ROWS


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a sum is made. number: 0 or 1; between two sums with the same one all ranks add up something else."""

    shared: SharedRows
    number: int

    def arguments(self, itemsize: int) -> dict[str, Any]:
        """Of a kernel that has `sum_of_ranks` in it, of parts of so many bytes a number."""
        return self.shared.arguments[self.number, itemsize]

    def whole(self, part: Tensor) -> Tensor:
        """The sum by itself. In place."""
        return self.shared.ranks.sum(part)


class SharedRows:
    """The memory of all ranks of a group, as this rank sees it. most_rows: of a sum."""

    def __init__(self, ranks: Ranks, memory: Sequence[Tensor], rows: int) -> None:
        """memory: of each rank, [SLOTS, ranks, area] uint8, all of it EMPTY_BYTE."""
        assert len(memory) == ranks.size
        self.ranks = ranks
        self.most_rows = rows
        self._memory = tuple(memory)  # holds the mappings
        polls = min(int(ranks.collective_s / POLL_S), 2**31 - 1)  # before this rank fails
        self.arguments = {
            (slot, itemsize): {
                "slots": tuple(each[slot].view(-1).view(_BITS[itemsize]) for each in memory),
                "area": memory[0].shape[2] // itemsize,
                "most_polls": polls,
                "RANK": ranks.rank,
                "RANKS": ranks.size,
                "ON_GPU": memory[0].device.type == "cuda",
            }
            for slot in range(SLOTS)
            for itemsize in _BITS
        }

    def slot(self, number: int) -> Slot:
        return Slot(self, number)


def no_sum(like: Tensor) -> dict[str, Any]:
    """Arguments of a kernel that could make a sum of ranks, and is to make none. like: any tensor."""
    return {"slots": (like,), "area": 0, "most_polls": 0, "RANK": 0, "RANKS": 1, "ON_GPU": False}


def share_rows(ranks: Ranks, width: int, itemsize: int, device: torch.device) -> SharedRows | None:
    """Of ranks that are connected, all of which call this. None, and the reason in the log, where sums stay NCCL's."""
    rows = most_rows(ranks.size, width, itemsize)
    if not rows:
        return None
    shape = (SLOTS, ranks.size, rows * width * itemsize)
    mine = lent = torch.empty(0, dtype=torch.uint8, device=device)
    why, handle, others = "", b"", tuple[Tensor | None, ...]()
    try:
        mine = torch.full(shape, EMPTY_BYTE, dtype=torch.uint8, device=device)
        # By another name, since torch keeps account of what is shared: what still is when a process ends, it warns of.
        lent = torch.utils.dlpack.from_dlpack(mine)
        handle = msgspec.msgpack.encode(lent.untyped_storage()._share_cuda_())  # type: ignore[no-untyped-call]
    except (RuntimeError, TypeError) as error:  # other versions of torch may give other handles
        why = str(error)
    handles = ranks.exchange(handle, MOST_HANDLE_BYTES, device)
    releases = (ranks.rank + 1) % ranks.size  # torch counts on one receiver of what it lends
    try:
        others = tuple(
            None if rank == ranks.rank else _mapped(each, shape, device, releases=rank == releases)
            for rank, each in enumerate(handles)
        )
    except (RuntimeError, TypeError, ConfigError, msgspec.DecodeError) as error:
        why = why or str(error)
    all_have = ranks.all_have(not why, device)
    del lent
    if not all_have:
        logger.warning("sums of few rows are NCCL's: %s", why.partition("\n")[0] or "another rank cannot map memory")
        return None
    memory = [mine if each is None else each for each in others]
    if not _reach_each_other(ranks, memory, device):
        logger.warning("sums of few rows are NCCL's: what a rank writes does not arrive at another one")
        return None
    return SharedRows(ranks, memory, rows)


def _mapped(handle: bytes, shape: tuple[int, ...], device: torch.device, *, releases: bool) -> Tensor:
    """Another process's tensor, as this device sees it. releases: torch's account there of what is lent, since the owner keeps it
    anyway; of one receiver only. Raises ConfigError, RuntimeError.
    """
    if not handle:
        raise ConfigError("another rank has no memory to share")
    peer, *rest = msgspec.msgpack.decode(handle)
    if not torch.cuda.can_device_access_peer(device, peer):
        raise ConfigError(f"{device} does not reach GPU {peer}")
    storage = torch.UntypedStorage._new_shared_cuda(device.index, *rest)
    if releases:
        torch.UntypedStorage._release_ipc_counter_cuda(rest[3], rest[4])
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage).view(-1)[: math.prod(shape)].view(shape)


def _reach_each_other(ranks: Ranks, memory: Sequence[Tensor], device: torch.device) -> bool:
    """Whether what every rank writes at the others arrives there. Leaves all of it empty."""
    mine = memory[ranks.rank]
    for each in memory:
        each[:, ranks.rank, -1:] = ranks.rank + 1
    torch.cuda.synchronize(device)
    ranks.all_have(True, device)  # all have written
    arrived = mine[:, :, -1].tolist() == [list(range(1, ranks.size + 1))] * SLOTS
    mine.fill_(EMPTY_BYTE)
    torch.cuda.synchronize(device)
    return ranks.all_have(arrived, device)  # and all is empty before anyone writes again
