"""What passes between the pipeline stages of one server: hidden states, from each stage to the next one. One object per process.

By torch.distributed, gloo over loopback on CPU and NCCL between GPUs. With several ranks in a stage, rank t of a stage sends to
rank t of the next one: all of them have the whole hidden states. All stages compute the same plans in the same order, so what
is sent and what is awaited match by themselves; nobody waits for longer than it is told.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import torch

from disagg.models.ranks import meet

MOST_UNSENT = 2  # hidden states that the next stage has not taken, beside those of one plan for each stage


class StageLinks:
    """`connect` once every rank's model is loaded; where there is one stage, nothing passes."""

    def __init__(self, stage: int = 0, count: int = 1) -> None:
        assert 0 <= stage < count, f"stage {stage} of {count}"
        self.stage = stage
        self.count = count
        self._group: Any = None
        self._unsent: deque[tuple[Any, torch.Tensor]] = deque()

    @property
    def several(self) -> bool:
        return self.count > 1

    @property
    def is_last(self) -> bool:
        return self.stage == self.count - 1

    def connect(self, meeting: Path, device: torch.device, meet_s: float, wait_s: float) -> None:
        """As Ranks.connect. wait_s: how long to wait for what the stage before computes."""
        if self.several:
            self._group = meet(meeting, self.stage, self.count, device, meet_s, wait_s)

    def send(self, hidden: torch.Tensor) -> None:
        """To the next stage. Waits only while that has not taken what was sent long ago."""
        while self._unsent and self._unsent[0][0].is_completed():  # gloo says so only of what was waited for
            self._unsent.popleft()
        while len(self._unsent) >= self.count + MOST_UNSENT:
            self._unsent.popleft()[0].wait()
        hidden = hidden.contiguous()
        self._unsent.append((self._group.send([hidden], self.stage + 1, 0), hidden))

    def receive(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """[1, rows, width], from the stage before. Raises RuntimeError when it does not come."""
        hidden = torch.empty((1, rows, width), dtype=dtype, device=device)
        self._group.recv([hidden], self.stage - 1, 0).wait()
        if device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # what is measured from here on is this stage's own
        return hidden
