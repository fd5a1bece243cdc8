"""The rows of data-parallel ranks of one host, gathered in each pass over Unix sockets, apart from whatever they compute.

    rank 1 ── pass, row ──> rank 0 ── pass, every row ──> rank 1
    rank 2 ── pass, row ──>        ──      "       ────> rank 2         no rank goes on before all have said their row

A rank that is gone, says what it may not, or nothing until the deadline, ends the group: rank 0 tells the others which one
it was, and each of them raises RankLost; so does whoever loses rank 0. Ranks that end at different passes have had the same
rows in all passes before. Blocks for as long as the slowest rank takes: not for the loop of a server.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import time
from pathlib import Path

from disagg.scheduler.prefill_delayer import Row
from disagg.types.errors import RankLost

HELLO = struct.Struct("!I")  # rank
ROW = struct.Struct("!Q??II")  # pass, prefillable, force, running, largest batch
ANSWER = struct.Struct("!QI")  # pass, which rank is lost; then a ROW of every rank
NOBODY = (1 << 32) - 1
RETRY_S = 0.02
TOLD_S = 1.0  # in which rank 0 tells the others that the deadline is over


class RankGather:
    """See the module. `connect` on every rank, then `gather` once in each pass, then `close`."""

    def __init__(self, rank: int, ranks: int, deadline_s: float) -> None:
        """deadline_s: how long the slowest rank may take from when rank 0 begins to gather."""
        assert 0 <= rank < ranks, f"rank {rank} of {ranks}"
        self.rank = rank
        self.ranks = ranks
        self._deadline_s = deadline_s
        self._pass_no = 0
        self._sockets: dict[int, socket.socket] = {}  # by rank, of rank 0; of others, the one to rank 0
        self._lost = ""

    # ---- the group

    def connect(self, path: Path, meet_s: float) -> None:
        """Wait until all ranks are here. path: of a socket that no other group uses. Raises RankLost."""
        until_s = time.monotonic() + meet_s
        try:
            if self.rank:
                self._sockets[0] = _dialled(path, until_s)
                self._sockets[0].sendall(HELLO.pack(self.rank))
            else:
                self._accept(path, until_s)
        except OSError as error:
            self._end(f"the {self.ranks} data-parallel ranks did not find each other in {meet_s:g} s: {error}")

    def _accept(self, path: Path, until_s: float) -> None:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            listening.listen(self.ranks)
            while len(self._sockets) < self.ranks - 1:
                listening.settimeout(_left(until_s))
                accepted, _ = listening.accept()
                (rank,) = HELLO.unpack(_read(accepted, HELLO.size, until_s))
                if not 0 < rank < self.ranks or rank in self._sockets:
                    accepted.close()
                    raise OSError(f"a process says that it is rank {rank}")
                self._sockets[rank] = accepted

    def close(self) -> None:
        """The others hear that this rank is gone."""
        for each in self._sockets.values():
            each.close()
        self._sockets.clear()

    def _end(self, why: str) -> None:
        self._lost = why
        self.close()
        raise RankLost(why)

    # ---- a pass

    def gather(self, row: Row) -> tuple[Row, ...]:
        """Raises RankLost, from then on every time."""
        if self._lost:
            raise RankLost(self._lost)
        mine = _packed(self._pass_no, row)
        rows = self._ask(mine) if self.rank else self._hear(mine)
        self._pass_no += 1
        return rows

    def _ask(self, mine: bytes) -> tuple[Row, ...]:
        """Of rank 0, which notices first who is silent, and says so."""
        answer, rank_0 = b"", self._sockets[0]
        until_s = (
            time.monotonic() + 2 * self._deadline_s + TOLD_S
        )  # rank 0 may come late, and then waits for the others
        try:
            rank_0.settimeout(self._deadline_s)
            with contextlib.suppress(
                BrokenPipeError, ConnectionResetError
            ):  # what it said before it ended is still here
                rank_0.sendall(mine)
            answer = _read(rank_0, ANSWER.size + self.ranks * ROW.size, until_s)
        except OSError as error:
            self._end(f"data-parallel rank 0 is lost ({error}): its group of {self.ranks} ends")
        pass_no, lost = ANSWER.unpack_from(answer)
        if lost != NOBODY:
            self._end(f"data-parallel rank {lost} is lost: its group of {self.ranks} ends")
        if pass_no != self._pass_no:
            self._end(f"data-parallel rank 0 is at pass {pass_no} and rank {self.rank} at {self._pass_no}: both end")
        return tuple(_unpacked(answer[at : at + ROW.size])[1] for at in range(ANSWER.size, len(answer), ROW.size))

    def _hear(self, mine: bytes) -> tuple[Row, ...]:
        said = dict.fromkeys(self._sockets, b"")
        until_s = time.monotonic() + self._deadline_s
        with selectors.DefaultSelector() as selector:
            for rank, each in self._sockets.items():
                each.setblocking(False)
                selector.register(each, selectors.EVENT_READ, rank)
            while missing := [rank for rank, so_far in said.items() if len(so_far) < ROW.size]:
                ready = selector.select(_left(until_s, at_least_s=0.0))
                if not ready:
                    self._lose(missing[0], f"nothing came of it for {self._deadline_s:g} s")
                for key, _ in ready:
                    said[key.data] += self._heard(key.data, ROW.size - len(said[key.data]))
        everyone = [mine, *(said[rank] for rank in sorted(said))]
        for rank, frame in enumerate(everyone):
            pass_no, _ = _unpacked(frame)
            if pass_no != self._pass_no:
                self._lose(rank, f"it is at pass {pass_no}, rank 0 at {self._pass_no}")
        answer = ANSWER.pack(self._pass_no, NOBODY) + b"".join(everyone)
        for rank, each in self._sockets.items():
            try:
                each.settimeout(self._deadline_s)
                each.sendall(answer)
            except OSError as error:
                self._lose(rank, str(error))
        return tuple(_unpacked(frame)[1] for frame in everyone)

    def _heard(self, rank: int, wanted: int) -> bytes:
        """wanted: bytes of its row that are still to come; none: it waits for the answer, and can only be gone."""
        more = b""
        try:
            more = self._sockets[rank].recv(max(1, wanted))
        except OSError as error:
            self._lose(rank, str(error))
        if not more:
            self._lose(rank, "it has closed its socket")
        if not wanted:
            self._lose(rank, "it says more than its row")
        return more

    def _lose(self, rank: int, why: str) -> None:
        """Everybody else is told."""
        answer = ANSWER.pack(self._pass_no, rank) + bytes(self.ranks * ROW.size)
        for each in self._sockets.values():
            with contextlib.suppress(OSError):
                each.settimeout(RETRY_S)
                each.sendall(answer)
        self._end(f"data-parallel rank {rank} is lost ({why}): its group of {self.ranks} ends")


def _packed(pass_no: int, row: Row) -> bytes:
    return ROW.pack(pass_no, row.prefillable, row.force, row.running, row.largest_batch)


def _unpacked(frame: bytes) -> tuple[int, Row]:
    pass_no, prefillable, force, running, largest_batch = ROW.unpack(frame)
    return pass_no, Row(prefillable, force, running, largest_batch)


def _dialled(path: Path, until_s: float) -> socket.socket:
    """Once rank 0 listens."""
    while True:
        dialled = socket.socket(socket.AF_UNIX)
        dialled.settimeout(_left(until_s))
        try:
            dialled.connect(str(path))
            return dialled
        except (FileNotFoundError, ConnectionRefusedError):
            dialled.close()
            time.sleep(RETRY_S)


def _read(source: socket.socket, size: int, until_s: float) -> bytes:
    """Raises OSError when it ends, or the time does."""
    so_far = b""
    while len(so_far) < size:
        source.settimeout(_left(until_s))
        more = source.recv(size - len(so_far))
        if not more:
            raise OSError("it has closed its socket")
        so_far += more
    return so_far


def _left(until_s: float, at_least_s: float | None = None) -> float:
    """Raises TimeoutError when none is left, unless a least is named."""
    left_s = until_s - time.monotonic()
    if left_s <= 0 and at_least_s is None:
        raise TimeoutError("nothing came in time")
    return left_s if at_least_s is None else max(at_least_s, left_s)
