"""What a bench of transfers measures, with everything decided, and what it found. Pure."""

from __future__ import annotations

from msgspec import Struct

from disagg.bench.transfer import trial
from disagg.config.sizes import show_bytes
from disagg.types.arithmetic import ceil_div
from disagg.types.errors import ConfigError

FIRST_CONTACT = "first contact"
STAGED, UNSTAGED = "staged", "unstaged"
IDLE_S = 0.05  # after which NVLink is asleep
SPARE_PAGES = 5  # one page in so many is not part of the sequence: pages are picked at random
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

    @property
    def num_pages(self) -> int:
        """Of each rank's pool."""
        return ceil_div(self.most_tokens, self.page_tokens) * SPARE_PAGES // (SPARE_PAGES - 1) + 1

    def memory_bytes(self, pair: trial.Pair) -> int:
        """What ranks allocate: on a CPU those of both sides, with --to those of prefill. Raises SliceError."""
        tokens = self.num_pages * self.page_tokens
        pools = [tp * tokens * self.shape.on_rank(tp).bytes_per_token for tp in (pair.src_tp, pair.dst_tp)]
        src = pools[0] + pair.src_tp * self.in_flight * self.largest_piece_bytes
        return src if self.to else src + pools[1] + pair.dst_tp * self.arena_bytes

    def check_memory(self, pair: trial.Pair, there: int) -> None:
        """Raises ConfigError for what a machine with so many bytes cannot hold; 0: it is not known. Of GPUs it never is."""
        needed = self.memory_bytes(pair)
        if self.device == "cpu" and there and needed > there:
            raise ConfigError(
                f"TP {pair} of {max(self.tokens)} tokens needs {show_bytes(needed)} for pools, buffers and arenas, and this "
                f"machine has {show_bytes(there)}; --shape, --tokens, --piece, --in-flight and --arena say how much"
            )


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
