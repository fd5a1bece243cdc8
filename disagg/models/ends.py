"""How a forward begins and ends: token ids in, logits of the rows where they are wanted out.

Plain, on any device; for GPUs models/fused/ends has another way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor

from disagg.models.batch import ForwardBatch


class Ends:
    """Plain: as the batch says it."""

    def token_ids(self, batch: ForwardBatch) -> Tensor:
        """[N] int64, of all rows."""
        return batch.token_ids()

    @contextlib.contextmanager
    def keeping(self, batch: ForwardBatch, logits_out: Tensor | None) -> Iterator[Tensor | int]:
        """For one forward: what transformers is told to keep, rows, or 0 for all of them. logits_out: where logits are wanted."""
        yield batch.logits_rows


def logits_into(logits: Tensor, out: Tensor | None) -> Tensor:
    """logits: [R, vocab], where they are wanted; they may be there already."""
    if out is None or logits.data_ptr() == out.data_ptr():
        return logits
    return out.copy_(logits)
