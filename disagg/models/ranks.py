"""The ranks that compute one model together: what they add up, put together and agree on. One object per process.

Collectives go through torch.distributed: gloo over loopback on CPU, NCCL between GPUs. All ranks of a server are on one
host and find each other by a file. They run the same plans in the same order, so their collectives match by themselves;
none waits for longer than it is told, and whoever waits in vain fails its rank, and with it all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

if TYPE_CHECKING:
    from disagg.models.sums.shared import SharedRows

dist: Any = torch.distributed  # much of it is compiled, and declared nowhere

LOOPBACK = "127.0.0.1"
TOKENS_FROM = 0  # the rank that samples


class Ranks:
    """`connect` once every rank's model is loaded; of a single rank every method does nothing."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        assert 0 <= rank < size, f"rank {rank} of {size}"
        self.rank = rank
        self.size = size
        self._group: Any = None  # of torch.distributed, once connected
        self.collective_s = 0.0
        self.shared: SharedRows | None = None
        """Where layers that can add up few rows do so without a collective; None: nowhere, or not yet."""

    @property
    def samples(self) -> bool:
        """Whether this rank chooses the tokens that all take (of pipeline stages, in the last one)."""
        return self.rank == TOKENS_FROM

    def connect(self, meeting: Path, device: torch.device, meet_s: float, collective_s: float) -> None:
        """Wait until all ranks are here. meeting: a file that no others use.

        meet_s: how long for the others; collective_s: how long any later collective may wait for them. Raises RuntimeError
        when that is over, here and in every collective.
        """
        if self.size == 1:
            return
        self._group = meet(meeting, self.rank, self.size, device, meet_s, collective_s)
        self.collective_s = collective_s

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors of this shape; in place."""
        if self.size > 1:
            part = part.contiguous()
            self._backend.allreduce([part]).wait()
        return part

    def join(self, part: torch.Tensor, dim: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """All ranks' tensors of this shape, one after the other along `dim`; in `out`, if that is given, of several ranks."""
        if self.size == 1:
            return part
        return torch.cat(self._of_all(part), dim, out=out)

    def gather(self, part: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """All ranks' rows, one rank's after the other. part: this rank's, [n, width]; rows: how many each rank has."""
        if self.size == 1:
            return part
        padded = part.new_zeros((max(rows), *part.shape[1:]))
        padded[: part.shape[0]] = part
        return torch.cat([each[:count] for each, count in zip(self._of_all(padded), rows, strict=True)])

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """The values of the rank that samples, which all then have; in place, and on GPUs without waiting for them.

        values: contiguous, and of one shape on all ranks.
        """
        if self.size > 1:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = TOKENS_FROM, 0
            self._backend.broadcast([values], options).wait()
        return values

    def exchange(self, mine: bytes, most: int, device: torch.device) -> list[bytes]:
        """What each rank gives, at most so many bytes. Waits for them."""
        assert len(mine) <= most, f"{len(mine)} bytes of at most {most}"
        if self.size == 1:
            return [mine]
        padded = torch.tensor(
            [*len(mine).to_bytes(4), *mine, *bytes(most - len(mine))], dtype=torch.uint8, device=device
        )
        found = [bytes(each.tolist()) for each in self._of_all(padded)]
        return [each[4 : 4 + int.from_bytes(each[:4])] for each in found]

    def all_have(self, mine: bool, device: torch.device) -> bool:
        """Whether it is so on every rank. Waits for them."""
        if self.size == 1:
            return mine
        return int(self.sum(torch.tensor([int(mine)], device=device))) == self.size

    def _of_all(self, part: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Every rank's tensor of this shape."""
        mine = part.contiguous().view(-1)
        parts = part.new_empty(self.size * mine.numel())
        self._backend._allgather_base(parts, mine).wait()
        return parts.view(self.size, *part.shape).unbind()

    @property
    def _backend(self) -> Any:
        assert self._group is not None, "the ranks are not connected"
        return self._group


def meet(meeting: Path, rank: int, size: int, device: torch.device, meet_s: float, wait_s: float) -> Any:
    """A process group of all who come to this file, once they are here. Arguments as of Ranks.connect."""
    store = dist.FileStore(str(meeting), size)
    if store.add("here", 1) == size:
        store.set("all here", "yes")
    store.wait(["all here"], timedelta(seconds=meet_s))
    return (_nccl if device.type == "cuda" else _gloo)(store, rank, size, timedelta(seconds=wait_s))


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()
    # By default gloo listens on whatever address the host's name has.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)
