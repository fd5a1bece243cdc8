"""`disagg bench transfer`: how fast KV crosses from prefill ranks to decode ranks, and where the time goes.

Starts one process per rank, has them move one sequence's KV again and again with the code that serves requests, compares
what landed, and draws a table. Knows processes and tables; nothing of tensors.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from rich.console import Console

from disagg.bench.serve.keep import keep, try_to_write
from disagg.bench.transfer import trial
from disagg.bench.transfer.dial import FarRanks
from disagg.bench.transfer.far import parse_address
from disagg.bench.transfer.measurement import FIRST_CONTACT, IDLE_S, STAGED, UNSTAGED, Measurement, ResolvedOptions
from disagg.bench.transfer.processes import STEP_TIMEOUT_S, RankPort, RankProcesses
from disagg.bench.transfer.report import curve_of, heading, legend, table_of
from disagg.messages.control import OpenTransfer
from disagg.messages.transfer import AddPeer
from disagg.server.device import memory_bytes
from disagg.server.networks import choose_net_devices
from disagg.staging.pieces import TRAILER_BYTES
from disagg.staging.slices import SliceError, heads_per_rank
from disagg.types.arithmetic import ceil_div
from disagg.types.errors import ConfigError, DisaggError

MIB = 1 << 20
START_DELAY_S = 0.003  # from saying when a trial starts to its start; NVLink stays awake for as long
WARM_UPS = 2
FILE_COLUMNS = 120  # of what is written into a file


class Defaults(Struct, frozen=True):
    """What suits a device."""

    shape: str
    tokens: tuple[int, ...]
    piece_bytes: int
    in_flight: int
    arena_bytes: int
    curve: tuple[int, ...]  # piece sizes
    ucx_tls: str
    ucx_net_devices: str
    repeats: int


DEFAULTS = {
    "cpu": Defaults(
        shape="smollm2-135m",
        tokens=(256, 1024),
        piece_bytes=4 * MIB,
        in_flight=4,
        arena_bytes=64 * MIB,
        curve=tuple(MIB // 4 << i for i in range(6)),
        ucx_tls="posix,cma,tcp",
        ucx_net_devices="lo",
        repeats=7,
    ),
    "cuda": Defaults(
        shape="llama-3.1-8b",
        tokens=(2048, 8192, 32768),
        piece_bytes=64 * MIB,
        in_flight=4,
        arena_bytes=1024 * MIB,
        curve=tuple(MIB << i for i in range(8)),
        ucx_tls="",
        ucx_net_devices="",
        repeats=15,
    ),
}
PAIRS = ("1:1", "1:2", "2:1", "2:2")


class TransferOptions(Struct, frozen=True, kw_only=True):
    """As given; what is None or empty follows from the device (`DEFAULTS`)."""

    device: str
    pairs: tuple[str, ...]
    tokens: tuple[int, ...]
    shape: str | None
    page_tokens: int
    piece_bytes: int | None
    in_flight: int | None
    arena_bytes: int | None
    kernels: str
    ucx_tls: str | None
    ucx_net_devices: str | None
    repeats: int | None
    unstaged: bool
    idle: bool
    curve: bool
    json_file: Path | None
    to: str | None = None  # HOST or HOST:PORT that has the decode ranks


def run_transfer_bench(options: TransferOptions, say: Callable[[str], None]) -> int:
    """Measure, print, and keep; `say` is told how far it is.

    Raises ConfigError for options that cannot be, DisaggError for a transfer that fails.
    """
    console = Console(highlight=False, width=None if sys.stdout.isatty() else FILE_COLUMNS)
    pairs = _pairs(options.pairs)
    if options.json_file is not None:
        try_to_write(options.json_file)
    resolved: ResolvedOptions | None = None
    gpus: tuple[str, ...] = ()
    measurements: list[Measurement] = []
    curve: list[Measurement] = []
    for pair in pairs:
        if resolved is not None and _left_out(resolved, pair, say):
            continue
        with ranks_of(options, pair) as ranks:
            if resolved is None:
                gpus = ranks.gpus
                resolved = _decide(options, ranks)
                if _left_out(resolved, pair, say):
                    continue
            resolved.check_memory(pair, memory_bytes())
            bench = PairBench(resolved, pair, ranks)
            say(f"TP {pair}: {', '.join(bench.placement.src)} to {', '.join(bench.placement.dst)}")
            measurements += bench.measure()
            if not curve and resolved.curve:
                curve = bench.measure_curve()
    if resolved is None or not measurements:
        raise ConfigError("no pair of TP sizes can hold these KV heads; --tp names others")
    console.print(heading(resolved, gpus))
    console.print(table_of(measurements))
    console.print(legend(measurements))
    if curve:
        console.print(curve_of(curve))
    if options.json_file is not None:
        kept = {"options": resolved, "gpus": gpus, "measurements": measurements, "curve": curve}
        keep(options.json_file, msgspec.json.format(msgspec.json.encode(kept)) + b"\n")
        say(f"figures kept in {options.json_file}")
    return 0


# ---- what is measured


def _pairs(texts: Sequence[str]) -> tuple[trial.Pair, ...]:
    try:
        return tuple(trial.Pair.parse(text) for text in texts or PAIRS)
    except ValueError as error:
        raise ConfigError(f"--tp: {error}") from error


Ranks = RankProcesses | FarRanks


def ranks_of(options: TransferOptions, pair: trial.Pair) -> Ranks:
    """All here, or the decode ranks on another machine. Raises ConfigError."""
    return RankProcesses(pair) if options.to is None else FarRanks(pair, *parse_address(options.to, "--to"))


def _decide(options: TransferOptions, ranks: Ranks) -> ResolvedOptions:
    num_gpus = len(ranks.gpus)
    if isinstance(ranks, FarRanks):
        num_gpus = min(num_gpus, len(ranks.far_gpus))
    device = options.device if options.device != "auto" else "cuda" if num_gpus else "cpu"
    if device == "cuda" and not num_gpus:
        where = "here and there" if options.to else "here"
        raise ConfigError(f"--device cuda: there is no GPU {where}; use --device cpu")
    defaults = DEFAULTS[device]
    name = options.shape or defaults.shape
    try:
        shape = trial.SHAPES.get(name) or trial.Shape.parse(name)
    except ValueError as error:
        raise ConfigError(f"--shape: {error}") from error
    piece_bytes = options.piece_bytes or defaults.piece_bytes
    arena_bytes = options.arena_bytes or defaults.arena_bytes
    curve = tuple(size for size in defaults.curve if size + trial.SEGMENT_ALIGN <= arena_bytes) if options.curve else ()
    return ResolvedOptions(
        device=device,
        num_gpus=num_gpus if device == "cuda" else 0,
        shape=shape,
        tokens=options.tokens or defaults.tokens,
        page_tokens=options.page_tokens,
        piece_bytes=piece_bytes,
        in_flight=options.in_flight or defaults.in_flight,
        arena_bytes=arena_bytes,
        kernels=options.kernels,
        ucx_tls=defaults.ucx_tls if options.ucx_tls is None else options.ucx_tls,
        ucx_net_devices=_net_devices(defaults, ranks) if options.ucx_net_devices is None else options.ucx_net_devices,
        repeats=options.repeats or defaults.repeats,
        unstaged=options.unstaged,
        idle=options.idle,
        curve=curve,
        to=options.to or "",
    )


def _net_devices(defaults: Defaults, ranks: Ranks) -> str:
    """UCX_NET_DEVICES of this side."""
    if isinstance(ranks, FarRanks) and defaults.ucx_net_devices:
        return choose_net_devices(f"{ranks.own_host}:0")
    return defaults.ucx_net_devices


def placement_of(resolved: ResolvedOptions, pair: trial.Pair, ranks: Ranks) -> trial.Placement:
    """On one machine as `trial.place` has it; on two each side has its own GPUs from the first on."""
    if not isinstance(ranks, FarRanks):
        return trial.place(pair, resolved.num_gpus)
    if not resolved.num_gpus:
        return trial.place(pair, 0)
    src = tuple(f"cuda:{rank % len(ranks.gpus)}" for rank in range(pair.src_tp))
    dst = tuple(f"cuda:{rank % len(ranks.far_gpus)}" for rank in range(pair.dst_tp))
    return trial.Placement(src, dst, pair.src_tp > len(ranks.gpus) or pair.dst_tp > len(ranks.far_gpus))


def _left_out(resolved: ResolvedOptions, pair: trial.Pair, say: Callable[[str], None]) -> bool:
    """Says so if the ranks cannot hold the heads."""
    try:
        for tp in (pair.src_tp, pair.dst_tp):
            heads_per_rank(tp, resolved.shape.kv_heads)
    except SliceError as error:
        say(f"TP {pair} is left out: {error}")
        return True
    return False


class PairBench:
    """The measurements of one pair of TP sizes, on processes that have just been started."""

    def __init__(self, resolved: ResolvedOptions, pair: trial.Pair, ranks: Ranks) -> None:
        self._resolved = resolved
        self._pair = pair
        self._ranks = ranks
        self.placement = placement_of(resolved, pair, ranks)
        self._src: Sequence[RankPort] = ranks.src
        self._dst: Sequence[RankPort] = ranks.dst
        self._all = (*self._src, *self._dst)
        self._ways: dict[str, None] = {}
        self._clock_error_s = ranks.clock_error_s if isinstance(ranks, FarRanks) else 0.0
        self._random = random.Random(7)
        self._trials = 0
        self._entries = 0

    def measure(self) -> list[Measurement]:
        """First contact, then every number of tokens."""
        self._open()
        measurements = [self._first_contact()]
        for tokens in self._resolved.tokens:
            copy_s = self._plain_copy(tokens)
            measurements.append(self._staged(tokens, self._resolved.piece_bytes, copy_s))
            if self._resolved.unstaged:
                measurements.append(self._unstaged(tokens, copy_s))
        return measurements

    def measure_curve(self) -> list[Measurement]:
        """One number of tokens, by size of pieces."""
        tokens = self._resolved.tokens[len(self._resolved.tokens) // 2]
        copy_s = self._plain_copy(tokens)
        return [self._staged(tokens, piece_bytes, copy_s) for piece_bytes in self._resolved.curve]

    def _open(self) -> None:
        resolved = self._resolved
        for side, processes in (("prefill", self._src), ("decode", self._dst)):
            decode = side == "decode"
            tp = len(processes)
            group = resolved.shape.on_rank(tp)
            replicas = max(1, tp // resolved.shape.kv_heads)
            for rank, process in enumerate(processes):
                process.tell(
                    trial.Open(
                        side="decode" if decode else "prefill",
                        rank=rank,
                        device=(self.placement.dst if decode else self.placement.src)[rank],
                        group=group,
                        first_head=rank // replicas * group.kv_heads,
                        page_tokens=resolved.page_tokens,
                        num_pages=self._resolved.num_pages,
                        transfer=OpenTransfer(
                            backend="nixl",
                            incarnation="D" if decode else "P",
                            arena_bytes=resolved.arena_bytes if decode else 0,
                            gather_bytes=resolved.largest_piece_bytes + TRAILER_BYTES,
                            gather_buffers=0 if decode else resolved.in_flight,
                            ucx_tls=resolved.ucx_tls,
                            ucx_net_devices=resolved.ucx_net_devices,
                            ucx_log=self._ranks.ucx_log("decode" if decode else "prefill"),
                            kernels=resolved.kernels,  # type: ignore[arg-type]  # the command line allows no other
                        ),
                        unstaged=resolved.unstaged,
                    )
                )
        self._opened = [process.hear(trial.Opened) for process in self._all]

    def _first_contact(self) -> Measurement:
        """From introducing ranks that have never met to one page in place."""
        started_s = time.monotonic()
        src, dst = self._opened[: self._pair.src_tp], self._opened[self._pair.src_tp :]
        for processes, others in ((self._src, dst), (self._dst, src)):
            peers = tuple(
                AddPeer(
                    link=trial.LINK,
                    peer_rank=other.transfer.rank,
                    metadata=other.transfer.metadata,
                    arena_address=other.transfer.arena_address,
                    arena_device=other.transfer.arena_device,
                    arena_bytes=other.transfer.arena_bytes,
                )
                for other in others
            )
            unstaged = tuple(other.unstaged for other in others if other.unstaged is not None)
            for process in processes:
                process.tell(trial.Meet(peers, unstaged))
        for process in self._all:
            process.hear(trial.Done)
        first = self._staged_once(self._resolved.page_tokens, self._resolved.piece_bytes, first=True)
        seconds = first.landed_s - started_s
        return Measurement(
            pair=str(self._pair),
            what=FIRST_CONTACT,
            tokens=self._resolved.page_tokens,
            payload_bytes=first.made.payload_bytes,
            pieces=first.made.pieces,
            piece_bytes=first.made.largest_piece_bytes,
            seconds=seconds,
            copy_s=0.0,
            shared_gpus=self.placement.shared,
        )

    def _plain_copy(self, tokens: int) -> float:
        """Median seconds of copying the same bytes along the same routes; 0 between machines, where nothing copies plainly."""
        if isinstance(self._ranks, FarRanks):
            return 0.0
        routes = trial.routes(self._resolved.shape, self._pair, self.placement, tokens)
        self._src[0].tell(trial.CopyAlong(routes, self._resolved.repeats, IDLE_S if self._resolved.idle else 0.0))
        return statistics.median(self._src[0].hear(trial.Copied).seconds)

    def _staged(self, tokens: int, piece_bytes: int, copy_s: float) -> Measurement:
        """Warm, measure, and compare what landed last."""
        for _ in range(WARM_UPS):
            self._staged_once(tokens, piece_bytes)
        runs = [self._staged_once(tokens, piece_bytes) for _ in range(self._resolved.repeats)]
        self._compare(runs[-1].seed, runs[-1].dst_pages, runs[-1].tokens)
        middle = trial.median_of([run.spent for run in runs])
        made = runs[-1].made
        return Measurement(
            pair=str(self._pair),
            what=STAGED,
            tokens=tokens,
            payload_bytes=made.payload_bytes,
            pieces=made.pieces,
            piece_bytes=made.largest_piece_bytes,
            seconds=middle.total_s,
            copy_s=copy_s,
            spent=middle,
            shared_gpus=self.placement.shared,
            all_seconds=tuple(run.spent.total_s for run in runs),
            ways=tuple(self._ways),
            clock_error_s=self._clock_error_s,
        )

    def _staged_once(self, tokens: int, piece_bytes: int, first: bool = False) -> _Run:
        """first: these ranks have sent nothing before, and this starts at once."""
        resolved = self._resolved
        lead = 0 if first else resolved.lead_tokens
        delay_s = 0.0 if first else IDLE_S if resolved.idle else START_DELAY_S
        pages = self._pick_pages(lead + tokens), self._pick_pages(lead + tokens)
        asked = trial.Asked(self._next_seed(), tokens, *pages, self._entries, lead)
        try:
            means = self._means(piece_bytes)
            made = trial.trial_of(means, asked)
        except ValueError as error:
            raise ConfigError(f"--piece: {error}") from error
        self._entries += sum(map(len, made.sends))
        self._fill(asked.number, asked.src_pages, asked.dst_pages)
        self._prepare(made, means.rings, time.monotonic() + STEP_TIMEOUT_S)
        start_s = time.monotonic() + delay_s
        for process in self._src:
            process.tell(trial.Start(start_s))
        sent = [process.hear(trial.Sent) for process in self._src]
        self._ways.update(dict.fromkeys(way for each in sent for way in each.ways))
        received = [process.hear(trial.Received) for process in self._dst]
        landed_s = max(each.landed_s for each in received)
        intervals = [interval for each in sent for interval in each.intervals]
        intervals += [interval for each in received for interval in each.intervals]
        spent = trial.spent(start_s, landed_s, intervals)
        return _Run(asked.number, lead + tokens, pages[1], made, landed_s, spent)

    def _means(self, piece_bytes: int) -> trial.Means:
        resolved = self._resolved
        rings = trial.Rings.of(resolved.arena_bytes, piece_bytes)
        return trial.Means(resolved.shape, self._pair, resolved.page_tokens, piece_bytes, rings)

    def _prepare(self, made: trial.Trial, rings: trial.Rings, deadline_s: float) -> None:
        """Every rank knows what it receives, or sends, and what was computed before has gone."""
        for rank, process in enumerate(self._dst):
            process.tell(
                trial.Receive(
                    bind=made.binds[rank],
                    entries=made.expects[rank],
                    ring_bytes=made.expect_ring_bytes[rank],
                    capacity_bytes=rings.capacity_bytes,
                    segment_bytes=rings.segment_bytes,
                    deadline_s=deadline_s,
                )
            )
        for process in self._dst:
            process.hear(trial.Done)
        for rank, process in enumerate(self._src):
            process.tell(
                trial.Send(
                    plan_no=made.plan_no,
                    lead=made.leads[rank],
                    pieces=made.sends[rank],
                    ring_bytes=made.send_ring_bytes[rank],
                    capacity_bytes=rings.capacity_bytes,
                    deadline_s=deadline_s,
                )
            )
        for process in self._src:
            process.hear(trial.Done)

    def _unstaged(self, tokens: int, copy_s: float) -> Measurement:
        slices = trial.unstaged_slices(self._resolved.shape, self._pair)
        seconds: list[float] = []
        for _ in range(1 + max(3, self._resolved.repeats // 3)):
            seed = self._next_seed()
            src_pages, dst_pages = self._pick_pages(tokens), self._pick_pages(tokens)
            self._fill(seed, src_pages, dst_pages)
            deadline_s = time.monotonic() + STEP_TIMEOUT_S
            for rank, process in enumerate(self._dst):
                writes = sum(part.dst_rank == rank for parts in slices for part in parts)
                process.tell(trial.ReceiveUnstaged(writes, deadline_s))
            for process in self._dst:
                process.hear(trial.Done)
            start_s = time.monotonic() + IDLE_S
            for parts, process in zip(slices, self._src, strict=True):
                process.tell(trial.SendUnstaged(parts, src_pages, dst_pages, start_s, deadline_s))
            for process in self._src:
                process.hear(trial.Sent)
            seconds.append(max(process.hear(trial.Received).landed_s for process in self._dst) - start_s)
        self._compare(seed, dst_pages, tokens)
        group = self._resolved.shape.on_rank(1)
        units = len(src_pages) * len(group.layers) * group.planes
        payload = len(src_pages) * self._resolved.page_tokens * self._resolved.shape.bytes_per_token
        pieces = units * sum(map(len, slices))
        return Measurement(
            pair=str(self._pair),
            what=UNSTAGED,
            tokens=tokens,
            payload_bytes=payload,
            pieces=pieces,
            piece_bytes=payload // pieces,
            seconds=statistics.median(seconds[1:]),
            copy_s=copy_s,
            shared_gpus=self.placement.shared,
            all_seconds=tuple(seconds[1:]),
        )

    def _pick_pages(self, tokens: int) -> tuple[int, ...]:
        """Random pages in random order, as in a pool that has served for a while."""
        return tuple(self._random.sample(range(self._resolved.num_pages), ceil_div(tokens, self._resolved.page_tokens)))

    def _fill(self, seed: int, src_pages: tuple[int, ...], dst_pages: tuple[int, ...]) -> None:
        for processes, pages in ((self._src, src_pages), (self._dst, dst_pages)):
            for process in processes:
                process.tell(trial.Fill(seed, pages))
        for process in self._all:
            process.hear(trial.Done)

    def _compare(self, seed: int, pages: tuple[int, ...], tokens: int) -> None:
        for process in self._dst:
            process.tell(trial.Check(seed, pages, tokens))
        for rank, process in enumerate(self._dst):
            wrong = process.hear(trial.Checked).wrong_pages
            if wrong:
                raise DisaggError(f"TP {self._pair}: {wrong} pages of decode rank {rank} are not what was sent")

    def _next_seed(self) -> int:
        self._trials += 1
        return self._trials


class _Run(Struct, frozen=True):
    seed: int
    tokens: int  # with those of the chunk before
    dst_pages: tuple[int, ...]
    made: trial.Trial
    landed_s: float
    spent: trial.Spent
