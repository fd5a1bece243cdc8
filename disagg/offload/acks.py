"""What every rank of a server has done of a numbered series of operations. Pure.

Ranks do operations in the order of their numbers, and report the last one that they have done. An operation is done when
every rank has done it: the least over what they have reported. Reports may be late, repeated and out of order; one that says
less than an earlier one says nothing.

    rank 0   1 2 3 4 5
    rank 1   1 2 3          done: 3
    rank 2   1 2 3 4
"""

from __future__ import annotations

from collections.abc import Iterable

from disagg.types.errors import ProtocolError


class Acks:
    """One series of operations of `ranks` ranks."""

    def __init__(self, ranks: int) -> None:
        assert ranks > 0, "a server has at least one rank"
        self.issued = 0
        self.done = 0
        self._reported = [0] * ranks
        self._failed: set[int] = set()

    def issue(self) -> int:
        """The number of the next operation; the first is 1."""
        self.issued += 1
        return self.issued

    def report(self, rank: int, last: int, failed: Iterable[int] = ()) -> range:
        """A rank has done all up to number `last`, of which `failed` came to nothing. Returns what is done by that on every rank.

        Raises ProtocolError for a rank or an operation that there is not.
        """
        failed = frozenset(failed)
        if not 0 <= rank < len(self._reported):
            raise ProtocolError(f"rank {rank} reports; there are {len(self._reported)}")
        if not 0 <= last <= self.issued or any(not 0 < each <= last for each in failed):
            raise ProtocolError(f"rank {rank} reports operation {max((last, *failed))}; {self.issued} were given out")
        self._failed |= {each for each in failed if each > self.done}
        self._reported[rank] = max(self._reported[rank], last)
        before, self.done = self.done, min(self._reported)
        return range(before + 1, self.done + 1)

    def take_failed(self, number: int) -> bool:
        """Whether an operation that is done failed on some rank. Asked once of each."""
        assert number <= self.done, f"operation {number} is not done"
        if number in self._failed:
            self._failed.discard(number)
            return True
        return False
