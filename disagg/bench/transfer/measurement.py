"""What a bench of transfers measures, with everything decided, and what it found. Pure."""

from __future__ import annotations

from msgspec import Struct

from disagg.bench.transfer import trial
from disagg.types.arithmetic import ceil_div

FIRST_CONTACT = "first contact"
STAGED, UNSTAGED = "staged", "unstaged"
IDLE_S = 0.05  # after which NVLink is asleep
LEAD_PIECES = 2  # as many bytes go before what is measured: they take longer than NVLink takes to wake


class ResolvedOptions(Struct, frozen=True):
    """Options with everything decided."""

    device: str
    num_gpus: int
    shape: trial.Shape
    tokens: tuple[int, ...]
    page_tokens: int
    piece_bytes: int
    in_flight: int
    arena_bytes: int
    kernels: str
    ucx_tls: str
    ucx_net_devices: str
    repeats: int
    unstaged: bool
    idle: bool
    curve: tuple[int, ...]
    to: str = ""  # the machine of the decode ranks; empty: this one

    @property
    def largest_piece_bytes(self) -> int:
        return max((self.piece_bytes, *self.curve))

    @property
    def most_tokens(self) -> int:
        """Of one trial."""
        return max(self.tokens) + self.lead_tokens

    @property
    def lead_tokens(self) -> int:
        """Whole pages of a chunk that goes before the one that is measured, as in prefill that runs in chunks."""
        if self.idle:
            return 0
        pages = ceil_div(LEAD_PIECES * self.piece_bytes, self.shape.bytes_per_token * self.page_tokens)
        return pages * self.page_tokens


class Measurement(Struct, frozen=True):
    """One measurement. copy_s: a plain copy of the same bytes over the same routes; 0 where it says nothing."""

    pair: str
    what: str
    tokens: int
    payload_bytes: int
    pieces: int
    piece_bytes: int
    seconds: float
    copy_s: float
    spent: trial.Spent | None = None
    shared_gpus: bool = False
    all_seconds: tuple[float, ...] = ()
    ways: tuple[str, ...] = ()  # by what UCX wrote, in its words
    clock_error_s: float = 0.0  # by so much at most are times between two machines wrong

    @property
    def gb_per_s(self) -> float:
        return self.payload_bytes / self.seconds / 1e9

    @property
    def share(self) -> float:
        """Of the plain copy's rate; 0 where there is none."""
        return self.copy_s / self.seconds
