"""An S3 endpoint that fails in one way after another, and works in between."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from tests.offload import s3_server
from tests.offload.s3_server import S3Server

# By turns, each for TURN_S.
FAULTS = {
    "500": s3_server.says_500,
    "bodies end early": s3_server.ends_early,
    "bodies are cut": s3_server.cuts_bodies,
    "slow bodies": s3_server.drips,
    "no answer": s3_server.says_nothing_for(1.0),
}
TURN_S = 2.0


class FailingStore:
    """turns: how often each fault has begun."""

    def __init__(self, server: S3Server) -> None:
        self._server = server
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._go_on, daemon=True)
        self.turns: Counter[str] = Counter()
        self._thread.start()

    @property
    def flags(self) -> tuple[str, ...]:
        options = {
            name: str(value).lower() if isinstance(value, bool) else value
            for name, value in self._server.options.items()
        }
        sets = (("--set", f"storage.options.{name}={value}") for name, value in options.items())
        return ("--storage", self._server.url, *itertools.chain(*sets))

    def _go_on(self) -> None:
        for name in itertools.cycle(FAULTS):
            for fault in (None, FAULTS[name]):
                self._server.fault = fault
                if self._over.wait(TURN_S):
                    return
            self.turns[name] += 1

    def close(self) -> None:
        self._over.set()
        self._thread.join()


@contextmanager
def failing_store() -> Iterator[FailingStore]:
    with s3_server.s3_server() as server:
        store = FailingStore(server)
        try:
            yield store
        finally:
            store.close()
