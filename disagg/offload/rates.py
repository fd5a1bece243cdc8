"""Whether KV is here sooner when it is loaded or when it is computed again: by what both took lately. Pure.

Rates are of the last seconds that anything was measured for: every new second of work halves what an older one weighs
after HALF_S. What has not been measured yet is tried; and so is, once in TRY_EVERY times, what was slower, since a store
that was slow may have become fast.
"""

from __future__ import annotations

HALF_S = 5.0  # of work
TRY_EVERY = 16
PATIENCE = 2.0  # a load may take so many times as long as computing would
LEAST_WAIT_S = 0.25  # below this nobody gives up: what was measured is not that exact
MOST_WAIT_S = 10.0
ALWAYS_WAIT_S = 60.0  # where all is to be loaded
LEAST_TOKENS = 16  # of prompts in a step from which their speed is learnt


class Rate:
    """Amounts per second of work."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """So much was done in so much time of work."""
        if seconds <= 0 or amount <= 0:
            return
        weight = 0.5 ** (seconds / HALF_S)
        self._amount = self._amount * weight + amount
        self._seconds = self._seconds * weight + seconds

    def seconds(self, amount: float) -> float | None:
        """How long so much takes; None while nothing is known."""
        return amount * self._seconds / self._amount if self._amount else None


class Rates:
    """Of one engine: computing tokens of prompts, and moving bytes of its pages from the host and from storage.

    load_always: whatever is faster.
    """

    def __init__(self, *, load_always: bool = False) -> None:
        self._always = load_always
        self.computing = Rate()
        self.from_host = Rate()
        self.from_storage = Rate()
        self._slower = 0

    def computed(self, runs: tuple[int, ...], seconds: float) -> None:
        """A step took so long, of these runs, each of so many tokens. Steps that mostly decode tell nothing of prompts."""
        tokens = sum(count for count in runs if count > 1)
        if tokens >= max(LEAST_TOKENS, len(runs)):
            self.computing.add(tokens, seconds)

    def worth_loading(self, tokens: int, host_bytes: int, storage_bytes: int) -> bool:
        """Rather than to compute so many tokens, move so many bytes from storage to the host, and from there to the GPU."""
        compute_s, load_s = self.computing.seconds(tokens), self._load_s(host_bytes, storage_bytes)
        if self._always or compute_s is None or load_s is None or load_s <= compute_s:
            return True
        self._slower += 1
        return self._slower % TRY_EVERY == 0

    def _load_s(self, host_bytes: int, storage_bytes: int) -> float | None:
        host_s = self.from_host.seconds(host_bytes) if host_bytes else 0.0
        storage_s = self.from_storage.seconds(storage_bytes) if storage_bytes else 0.0
        return None if host_s is None or storage_s is None else host_s + storage_s

    def patience_s(self, tokens: int) -> float:
        """After how long a load of so many tokens is waited for no longer."""
        if self._always:
            return ALWAYS_WAIT_S
        compute_s = self.computing.seconds(tokens)
        if compute_s is None:
            return MOST_WAIT_S
        return min(MOST_WAIT_S, max(LEAST_WAIT_S, PATIENCE * compute_s))
