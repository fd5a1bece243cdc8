"""A measured transfer between ranks of two TP sizes: what is sent where, what is said to the processes that do it, and
where the time went. Pure: knows shapes, pieces and times; nothing of tensors, processes or terminals.

The plan of a trial is made with the code that engines use: pieces, head slices and the ring's entries. What engines say
to each other over the link, how far a ring is free, is told through shared memory here.

    coordinator ── Open, Meet ─────────> every rank         Opened, Done
                ── Fill ───────────────> every rank         Done          random content; other content on the decode side
                ── Receive ────────────> decode ranks       Done          pages are bound, entries expected
                ── Send(start_s) ──────> prefill ranks      Sent          all at one moment
                                         decode ranks       Received
                ── Check ──────────────> decode ranks       Checked       bit for bit
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from disagg.messages.control import OpenTransfer, TransferOpen
from disagg.messages.layout import DTYPE_BYTES, GroupPages, LayerGroup
from disagg.messages.pieces import HeadSlice, Piece, RankSlice
from disagg.messages.transfer import AddPeer, Bind, ExpectPiece, SendPiece
from disagg.staging.pieces import TRAILER_BYTES, group_payload_bytes, group_piece_bytes, split_group_piece
from disagg.staging.ring import RingAllocator
from disagg.staging.slices import head_slices, heads_per_rank
from disagg.types.arithmetic import ceil_div, round_up
from disagg.types.ids import LegKey

LINK = 0
MOST_LAYERS, MOST_HEADS, MOST_HEAD_DIM, MOST_TP = 1024, 1024, 4096, 64
SEGMENT_ALIGN = 4096
STAGES = ("gather", "wire", "scatter")

Side = Literal["prefill", "decode"]


class Shape(Struct, frozen=True):
    """The KV cache of a model's attention layers. kv_heads: of the whole model."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str  # a key of DTYPE_BYTES

    @classmethod
    def parse(cls, text: str) -> Shape:
        """ "32x8x128xbfloat16": layers, KV heads, head_dim, dtype. Raises ValueError."""
        parts = text.split("x", 3)
        if len(parts) != 4 or not all(part.isascii() and part.isdigit() for part in parts[:3]):
            raise ValueError(f"{text!r} is no shape; it must be LAYERSxKV_HEADSxHEAD_DIMxDTYPE or a known name")
        sizes = [int(part[:9]) for part in parts[:3]]
        if not all(
            0 < size <= most for size, most in zip(sizes, (MOST_LAYERS, MOST_HEADS, MOST_HEAD_DIM), strict=True)
        ):
            raise ValueError(
                f"{text!r} is no shape: it may have 1 to {MOST_LAYERS} layers, 1 to {MOST_HEADS} KV heads and a head_dim of 1 to "
                f"{MOST_HEAD_DIM}"
            )
        if parts[3] not in DTYPE_BYTES:
            raise ValueError(f"{text!r} has an unknown dtype; known: {', '.join(DTYPE_BYTES)}")
        return cls(sizes[0], sizes[1], sizes[2], parts[3])

    @property
    def bytes_per_token(self) -> int:
        return self.on_rank(1).bytes_per_token

    def on_rank(self, tp: int) -> LayerGroup:
        """The layer group as one of `tp` ranks keeps it. Raises SliceError."""
        return LayerGroup(
            "full", tuple(range(self.layers)), heads_per_rank(tp, self.kv_heads), self.head_dim, self.dtype
        )


SHAPES = {
    "llama-3.1-8b": Shape(32, 8, 128, "bfloat16"),
    "smollm2-135m": Shape(30, 3, 64, "float32"),
}


class Pair(Struct, frozen=True):
    """TP sizes of the two sides."""

    src_tp: int
    dst_tp: int

    def __str__(self) -> str:
        return f"{self.src_tp}:{self.dst_tp}"

    @classmethod
    def parse(cls, text: str) -> Pair:
        """ "2:1": two prefill ranks, one decode rank. Raises ValueError."""
        src, _, dst = text.partition(":")
        if not all(part.isascii() and part.isdigit() and 0 < int(part[:9]) <= MOST_TP for part in (src, dst)):
            raise ValueError(
                f"{text!r} is no pair of TP sizes; it must be PREFILL:DECODE, such as 2:1, each 1 to {MOST_TP}"
            )
        return cls(int(src), int(dst))


class Placement(Struct, frozen=True):
    """Device of every rank. shared: some GPU has several ranks, so they share its links."""

    src: tuple[str, ...]
    dst: tuple[str, ...]
    shared: bool


def place(pair: Pair, num_gpus: int) -> Placement:
    """Every rank on a GPU of its own; with too few, the two sides on different halves; with none, on the CPU."""
    if num_gpus == 0:
        return Placement(("cpu",) * pair.src_tp, ("cpu",) * pair.dst_tp, shared=False)
    total = pair.src_tp + pair.dst_tp
    if total <= num_gpus:
        src, dst = list(range(pair.src_tp)), list(range(pair.src_tp, total))
    else:
        half = max(1, num_gpus // 2)
        src = [rank % half for rank in range(pair.src_tp)]
        dst = [min(half, num_gpus - 1) + rank % max(1, num_gpus - half) for rank in range(pair.dst_tp)]
    return Placement(tuple(f"cuda:{i}" for i in src), tuple(f"cuda:{i}" for i in dst), total > num_gpus)


# ---- what is said to the processes


class Open(Struct, frozen=True, tag="open"):
    """Make a pool of random bytes, and the transfer driver. group: as this rank keeps it. first_head: of the model."""

    side: Side
    rank: int
    device: str
    group: LayerGroup
    first_head: int
    page_tokens: int
    num_pages: int
    transfer: OpenTransfer
    unstaged: bool  # register the pool too, with an agent of its own, for transfers without staging


class Meet(Struct, frozen=True, tag="meet"):
    """Introduce these peers. unstaged: metadata of their pools' agents, and where the pools lie."""

    peers: tuple[AddPeer, ...]
    unstaged: tuple[UnstagedPeer, ...] = ()


class UnstagedPeer(Struct, frozen=True):
    """pool_address: of its pool, whose pages are [layers, planes, kv_heads, page_tokens, head_dim]."""

    rank: int
    name: str
    metadata: bytes
    pool_address: int
    pool_device: int
    num_pages: int
    group: LayerGroup


class Fill(Struct, frozen=True, tag="fill"):
    """Prefill: draw the content of these pages from the seed. Decode: overwrite them with something else."""

    seed: int
    pages: tuple[int, ...]


class Receive(Struct, frozen=True, tag="receive"):
    """Bind, expect, and answer Received when every entry has landed. ring_byte, nbytes: of the entries in the ring."""

    bind: Bind
    entries: tuple[ExpectPiece, ...]
    ring_bytes: tuple[int, ...]
    capacity_bytes: int
    segment_bytes: int
    deadline_s: float


class Send(Struct, frozen=True, tag="send"):
    """Send the first `lead` pieces, which plan_no - 1 has computed, and answer Done. Then hear Start, send the others, which
    plan_no computes, and answer Sent. Pieces go as fast as the rings allow; the driver is told of them before they are
    computed, as far as the rings have room, as it is while a plan runs."""

    plan_no: int
    lead: int
    pieces: tuple[SendPiece, ...]
    ring_bytes: tuple[int, ...]
    capacity_bytes: int
    deadline_s: float


class Start(Struct, frozen=True, tag="start"):
    """At start_s of the monotonic clock the plan ends."""

    start_s: float


class SendUnstaged(Struct, frozen=True, tag="send_unstaged"):
    """At start_s, write every page, layer and plane of these slices by a descriptor of its own, and answer Sent."""

    slices: tuple[HeadSlice, ...]
    src_pages: tuple[int, ...]
    dst_pages: tuple[int, ...]
    start_s: float
    deadline_s: float


class ReceiveUnstaged(Struct, frozen=True, tag="receive_unstaged"):
    """Wait for this many notifications."""

    writes: int
    deadline_s: float


class Check(Struct, frozen=True, tag="check"):
    """Decode: compare the sequence's rows in these pages with what the seed gives."""

    seed: int
    pages: tuple[int, ...]
    num_tokens: int


class CopyAlong(Struct, frozen=True, tag="copy_along"):
    """Copy as many bytes between each of these pairs of devices, all at once, plainly, `repeats` times, with pauses between."""

    routes: tuple[tuple[str, str, int], ...]  # (from, to, bytes)
    repeats: int
    pause_s: float


class Quit(Struct, frozen=True, tag="quit"):
    pass


class Hello(Struct, frozen=True, tag="hello"):
    """First thing a rank says. gpus: their names."""

    gpus: tuple[str, ...]


class Opened(Struct, frozen=True, tag="opened"):
    transfer: TransferOpen
    unstaged: UnstagedPeer | None


class Done(Struct, frozen=True, tag="done"):
    pass


class Interval(Struct, frozen=True, array_like=True):
    """One stage of one piece, by the monotonic clock."""

    stage: str
    start_s: float
    stop_s: float


class Sent(Struct, frozen=True, tag="sent"):
    """ways: by what this rank has written so far, as in transfer/backends/base.Wired."""

    intervals: tuple[Interval, ...]
    ways: tuple[str, ...] = ()


class Received(Struct, frozen=True, tag="received"):
    landed_s: float  # the last one, by the monotonic clock
    intervals: tuple[Interval, ...]


class Checked(Struct, frozen=True, tag="checked"):
    wrong_pages: int


class Copied(Struct, frozen=True, tag="copied"):
    seconds: tuple[float, ...]


class Failed(Struct, frozen=True, tag="failed"):
    reason: str
    refused: bool = False  # an option that cannot be, not a failure


Command = Open | Meet | Fill | Receive | Send | Start | SendUnstaged | ReceiveUnstaged | Check | CopyAlong | Quit
Answer = Hello | Opened | Done | Sent | Received | Checked | Copied | Failed

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


# ---- the plan


class Rings(Struct, frozen=True):
    """One ring per decode rank, at the beginning of its arena."""

    capacity_bytes: int
    segment_bytes: int

    @classmethod
    def of(cls, arena_bytes: int, piece_bytes: int) -> Rings:
        """As many segments as fit, each for one piece of the largest size."""
        segment = round_up(piece_bytes + TRAILER_BYTES, SEGMENT_ALIGN)
        segments = arena_bytes // segment
        if not segments:
            raise ValueError(f"pieces of {piece_bytes} bytes do not fit an arena of {arena_bytes}")
        return cls(segments * segment, segment)


class Trial(Struct, frozen=True):
    """One sequence's way from one side to the other, by rank. leads: how many of a rank's sends come first, and do not count."""

    plan_no: int
    leads: tuple[int, ...]
    sends: tuple[tuple[SendPiece, ...], ...]
    send_ring_bytes: tuple[tuple[int, ...], ...]
    binds: tuple[Bind, ...]
    expects: tuple[tuple[ExpectPiece, ...], ...]
    expect_ring_bytes: tuple[tuple[int, ...], ...]
    payload_bytes: int
    pieces: int  # entries, over all ranks
    largest_piece_bytes: int


class Means(Struct, frozen=True):
    """What all trials of a pair of TP sizes with pieces of one size have in common. piece_bytes: of rows, at most."""

    shape: Shape
    pair: Pair
    page_tokens: int
    piece_bytes: int
    rings: Rings


class Asked(Struct, frozen=True):
    """One trial's sequence. src_pages, dst_pages: its pages in order, the same on every rank of a side. number: of the trial.

    lead_tokens: whole pages before the num_tokens, of a chunk that was computed before.
    """

    number: int
    num_tokens: int
    src_pages: tuple[int, ...]
    dst_pages: tuple[int, ...]
    first_entry_id: int
    lead_tokens: int = 0

    @property
    def plan_no(self) -> int:
        """Of the plan that computes the num_tokens; the one before it computes the lead."""
        return 2 * self.number + 1


def trial_of(means: Means, asked: Asked) -> Trial:
    """payload_bytes, pieces and largest_piece_bytes are without the lead.

    Raises SliceError if the TP sizes cannot hold the heads, ValueError if not one row fits into a piece.
    """
    page_tokens = means.page_tokens
    assert asked.lead_tokens % page_tokens == 0
    slices = head_slices(means.pair.src_tp, means.pair.dst_tp, means.shape.kv_heads)
    entries = _Entries(means, asked)
    lead, plan_no = asked.lead_tokens, asked.plan_no
    for computed_by, start, stop in ((plan_no - 1, 0, lead), (plan_no, lead, lead + asked.num_tokens)):
        for piece in _pieces(means, slices, start, stop):
            for part in slices:
                entries.add(piece, part, computed_by)
    return entries.trial()


def _pieces(means: Means, slices: Sequence[HeadSlice], start: int, stop: int) -> Iterable[Piece]:
    """Of these tokens of the sequence."""
    if start == stop:
        return ()
    whole = Piece(0, 0, means.shape.layers, start, stop)
    widest = max(part.heads for part in slices)
    limit = means.piece_bytes + TRAILER_BYTES
    return split_group_piece(whole, widest, means.shape.on_rank(1), limit, means.page_tokens)


class _Entries:
    """A trial's ring entries, one after the other, as ranks of both sides are told of them."""

    def __init__(self, means: Means, asked: Asked) -> None:
        self._means, self._asked = means, asked
        self._key = LegKey(f"trial-{asked.number}", 0, 0)
        self._group = means.shape.on_rank(1)
        src, dst = range(means.pair.src_tp), range(means.pair.dst_tp)
        self._allocators = [RingAllocator(means.rings.capacity_bytes, means.rings.segment_bytes) for _ in dst]
        self._sends: list[list[SendPiece]] = [[] for _ in src]
        self._send_ring_bytes: list[list[int]] = [[] for _ in src]
        self._expects: list[list[ExpectPiece]] = [[] for _ in dst]
        self._expect_ring_bytes: list[list[int]] = [[] for _ in dst]
        self._leads = [0 for _ in src]
        self._entry_id = asked.first_entry_id
        self._payload = self._largest = 0

    def add(self, piece: Piece, part: HeadSlice, computed_by: int) -> None:
        """One piece's heads of one pair of ranks."""
        src, dst, page_tokens = part.src_rank, part.dst_rank, self._means.page_tokens
        rank_slice = RankSlice(self._key, piece, part, "P", "D")
        nbytes = group_piece_bytes(piece, part.heads, self._group)
        ring_byte = self._allocators[dst].assign(nbytes).ring_byte
        offset = ring_byte % self._means.rings.capacity_bytes
        pages = slice(piece.token_start // page_tokens, ceil_div(piece.token_stop, page_tokens))
        send = SendPiece(
            link=LINK,
            entry_id=self._entry_id,
            slice=rank_slice,
            pages=self._asked.src_pages[pages],
            arena_offset=offset,
            nbytes=nbytes,
            after_plan=computed_by,
        )
        self._sends[src].append(send)
        self._send_ring_bytes[src].append(ring_byte)
        self._expects[dst].append(ExpectPiece(LINK, self._entry_id, rank_slice, offset, nbytes))
        self._expect_ring_bytes[dst].append(ring_byte)
        self._entry_id += 1
        if computed_by == self._asked.plan_no:
            of_rows = group_payload_bytes(piece, part.heads, self._group)
            self._payload += of_rows
            self._largest = max(self._largest, of_rows)
        else:
            self._leads[src] += 1

    def trial(self) -> Trial:
        bind = Bind(self._key, (GroupPages(0, self._asked.dst_pages),))
        return Trial(
            plan_no=self._asked.plan_no,
            leads=tuple(self._leads),
            sends=tuple(map(tuple, self._sends)),
            send_ring_bytes=tuple(map(tuple, self._send_ring_bytes)),
            binds=(bind,) * self._means.pair.dst_tp,
            expects=tuple(map(tuple, self._expects)),
            expect_ring_bytes=tuple(map(tuple, self._expect_ring_bytes)),
            payload_bytes=self._payload,
            pieces=self._entry_id - self._asked.first_entry_id - sum(self._leads),
            largest_piece_bytes=self._largest,
        )


def unstaged_slices(shape: Shape, pair: Pair) -> tuple[tuple[HeadSlice, ...], ...]:
    """By source rank: which heads go to which decode rank."""
    out: list[list[HeadSlice]] = [[] for _ in range(pair.src_tp)]
    for part in head_slices(pair.src_tp, pair.dst_tp, shape.kv_heads):
        out[part.src_rank].append(part)
    return tuple(map(tuple, out))


def routes(shape: Shape, pair: Pair, placement: Placement, num_tokens: int) -> tuple[tuple[str, str, int], ...]:
    """The bytes that each source rank owes each decode rank, as (device, device, bytes)."""
    per_head = num_tokens * shape.bytes_per_token // shape.kv_heads
    return tuple(
        (placement.src[part.src_rank], placement.dst[part.dst_rank], part.heads * per_head)
        for part in head_slices(pair.src_tp, pair.dst_tp, shape.kv_heads)
    )


# ---- where the time went


class Spent(Struct, frozen=True):
    """Of one trial: how long at least one piece, on any rank, was in each stage; waiting: no piece was in any."""

    total_s: float
    gather_s: float
    wire_s: float
    scatter_s: float
    waiting_s: float


def spent(start_s: float, stop_s: float, intervals: Iterable[Interval]) -> Spent:
    """Stages overlap, so they add up to more than the total."""
    by_stage: dict[str, list[tuple[float, float]]] = {stage: [] for stage in STAGES}
    for each in intervals:
        first, last = max(each.start_s, start_s), min(each.stop_s, stop_s)
        if first < last:
            by_stage[each.stage].append((first, last))
    everything = [span for spans in by_stage.values() for span in spans]
    gather_s, wire_s, scatter_s = (covered(by_stage[stage]) for stage in STAGES)
    return Spent(stop_s - start_s, gather_s, wire_s, scatter_s, stop_s - start_s - covered(everything))


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total


def median_of(trials: Sequence[Spent]) -> Spent:
    """The trial with the median total (of an even number, the lower one)."""
    middle = statistics.median_low(trial.total_s for trial in trials)
    return next(trial for trial in trials if trial.total_s == middle)
