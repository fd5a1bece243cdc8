"""A worker whose rank 0 spoils one head, once a file says so: `python -m tests.cluster.spoiling_worker DIRECTORY ...`.

DIRECTORY/swap   a prefill server's rank 0 sends the next of its heads in the place of each: whole, and well signed
DIRECTORY/zero   a decode server's rank 0 forgets its first head of whatever has landed
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from disagg.messages.control import OpenTransfer
from disagg.messages.transfer import Bind, Landing, SendPiece, TransferCommand, TransferEvent
from disagg.models.pool import AttentionPages, Pool
from disagg.types.ids import LegKey
from disagg.worker import transfer_driver
from disagg.worker.__main__ import main

SPOIL = Path(sys.argv.pop(1))


class SpoilingDriver(transfer_driver.TransferDriver):
    """Does what is asked, but to the wrong head."""

    def __init__(self, rank: int, opened: OpenTransfer, pool: Pool, *others: Any) -> None:
        super().__init__(rank, opened, pool, *others)
        self._spoils = rank == 0
        self._views = pool.views
        self._pages: dict[LegKey, Bind] = {}

    def handle(self, request: TransferCommand) -> None:
        if self._spoils and isinstance(request, Bind):
            self._pages[request.key] = request
        if self._spoils and isinstance(request, SendPiece) and (SPOIL / "swap").exists():
            request = self._swapped(request)
        super().handle(request)

    def _swapped(self, request: SendPiece) -> SendPiece:
        view = self._views[request.slice.piece.group]
        if not isinstance(view, AttentionPages):
            return request
        held, part = view.group.kv_heads, request.slice.head_slice
        assert part.heads < held, "it has no other heads"
        other = replace(part, src_head_start=(part.src_head_start + part.heads) % (held - part.heads + 1))
        return replace(request, slice=replace(request.slice, head_slice=other))

    def take_events(self) -> tuple[TransferEvent, ...]:
        reports = super().take_events()
        if self._spoils and (SPOIL / "zero").exists():
            for report in reports:
                if isinstance(report, Landing) and report.key in self._pages:
                    self._zero(self._pages[report.key])
        return reports

    def _zero(self, bound: Bind) -> None:
        for view, table in zip(self._views, bound.tables, strict=True):
            if isinstance(view, AttentionPages):
                view.kv[list(table.pages), :, :, 0] = 0


transfer_driver.TransferDriver = SpoilingDriver  # type: ignore[misc]

if __name__ == "__main__":
    sys.exit(main())
