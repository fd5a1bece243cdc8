"""What requests hold in a router's memory, and the most that they may: bodies, prompts, and answers nobody has read yet.

Counted as it grows, not reserved: a request that may say 100,000 tokens mostly says 500. So one limit serves all:

    used    0 ............. half ................. total
    new requests   taken        refused                       (Overloaded: try again)
    answers        grow         grow                 end      (the one that grows)

Whoever holds less than SMALL_BYTES is always served: those who fill the memory are refused, not those who come by.
"""

from __future__ import annotations

from disagg.config.sizes import format_size
from disagg.types.errors import Overloaded

SMALL_BYTES = 256 << 10
RETRY_AFTER_S = 1.0


class Budget:
    """Of one router."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.used_bytes = 0

    def hold(self) -> Held:
        """An account of one request, to be released at its end."""
        return Held(self)


class Held:
    """What one request holds of a budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.bytes = 0

    def add(self, count: int, new: bool = False) -> None:
        """Counts `count` bytes more. new: the request is not accepted yet, and may fill half of the budget. Raises Overloaded."""
        budget = self._budget
        most = budget.total_bytes // 2 if new else budget.total_bytes
        if self.bytes + count > SMALL_BYTES and budget.used_bytes + count > most:
            raise Overloaded(
                f"the requests that the router holds have {format_size(budget.used_bytes)} of text and answers in memory; "
                f"router.memory_bytes = {format_size(budget.total_bytes)}",
                RETRY_AFTER_S,
            )
        self.bytes += count
        budget.used_bytes += count

    def give(self, count: int) -> None:
        assert count <= self.bytes, (count, self.bytes)
        self.bytes -= count
        self._budget.used_bytes -= count

    def release(self) -> None:
        """Idempotent."""
        self.give(self.bytes)
