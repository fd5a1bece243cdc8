"""What storage is asked: which pages of a sequence it has. Each question is answered once, to whoever asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from disagg.engine.instructions import Instruction, ToStore
from disagg.offload.instructions import Ask, ForgetAsk, StoreFound
from disagg.types.errors import ProtocolError


class Asks:
    """Of one incarnation. Instructions are appended to `out`."""

    def __init__(self, out: list[Instruction]) -> None:
        self._out = out
        self._last = 0
        self._open: dict[int, Callable[[StoreFound], None]] = {}

    def ask(self, salt: str, hashes: Sequence[bytes], then: Callable[[StoreFound], None]) -> int:
        """The question's number. then: hears the answer. What it has found, storage remembers until `forget`."""
        self._last += 1
        self._open[self._last] = then
        self._out.append(ToStore(Ask(self._last, salt, tuple(hashes), 0)))
        return self._last

    def found(self, answer: StoreFound) -> None:
        """Raises ProtocolError for what was not asked."""
        then = self._open.pop(answer.ask, None)
        if then is None:
            raise ProtocolError(f"storage answers {answer.ask}, which was not asked")
        then(answer)

    def forget(self, ask: int) -> None:
        """What storage has found is not needed any more."""
        self._out.append(ToStore(ForgetAsk(ask)))
