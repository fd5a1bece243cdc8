"""Draws what a bench of transfers found: a table, and a curve by size of pieces. Pure: measurements in, text out."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from disagg.bench.transfer.measurement import FIRST_CONTACT, IDLE_S, UNSTAGED, Measurement, ResolvedOptions
from disagg.config.sizes import show_bytes

BAR_CELLS = 40


def heading(resolved: ResolvedOptions, gpus: Sequence[str]) -> Text:
    shape = resolved.shape
    to = f", to {resolved.to}" if resolved.to else ""
    where = f"{resolved.num_gpus} x {gpus[0]}" if resolved.num_gpus else "CPU"
    after = (
        f"each after {1e3 * IDLE_S:.0f} ms without traffic" if resolved.idle else "each soon after a chunk before it"
    )
    return Text(
        f"\nKV of {shape.layers} layers x {shape.kv_heads} heads x {shape.head_dim} in {shape.dtype} "
        f"({show_bytes(shape.bytes_per_token)} a token), pages of {resolved.page_tokens} tokens at random places, on {where}.\n"
        f"Pieces of {show_bytes(resolved.piece_bytes)}, {resolved.in_flight} gather buffers, an arena of "
        f"{show_bytes(resolved.arena_bytes)}{to}, kernels {resolved.kernels}, UCX_TLS {resolved.ucx_tls or 'left to UCX'}; "
        f"medians of {resolved.repeats}, {after}. What landed was compared."
    )


def table_of(measurements: Sequence[Measurement]) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("TP", no_wrap=True)
    table.add_column("transfer")
    for name in ("tokens", "bytes", "writes", "ms", "GB/s", "of a copy", "gather", "wire", "scatter", "waiting"):
        table.add_column(name, justify="right", no_wrap=True)
    before = ""
    for measurement in measurements:
        if before not in ("", measurement.pair):
            table.add_section()
        before = measurement.pair
        stages = [""] * 4
        if measurement.spent is not None:
            spent = measurement.spent
            stages = [
                f"{1e3 * seconds:.2f}"
                for seconds in (spent.gather_s, spent.wire_s, spent.scatter_s, max(0.0, spent.waiting_s))
            ]
        table.add_row(
            measurement.pair + ("*" if measurement.shared_gpus else ""),
            measurement.what,
            str(measurement.tokens),
            show_bytes(measurement.payload_bytes),
            str(measurement.pieces),
            f"{1e3 * measurement.seconds:.2f}",
            f"{measurement.gb_per_s:.1f}" if measurement.what != FIRST_CONTACT else "",
            f"{100 * measurement.share:.0f}%" if measurement.copy_s else "",
            *stages,
        )
    return table


def legend(measurements: Sequence[Measurement]) -> Text:
    lines = [
        "gather, wire, scatter: ms in which at least one piece was there; they overlap. waiting: ms in which none was.",
        "of a copy: its rate divided by that of a plain copy of the same bytes along the same routes, in this run.",
        "first contact: from introducing ranks that never met to one page in place.",
    ]
    if ways := dict.fromkeys(way for measurement in measurements for way in measurement.ways):
        lines.append(f"UCX wrote by {' or '.join(ways)}.")
    if error_s := max((measurement.clock_error_s for measurement in measurements), default=0.0):
        lines.append(
            f"between two machines: their clocks were compared to {1e6 * error_s:.0f} us; there is no plain copy."
        )
    if any(measurement.what == UNSTAGED for measurement in measurements):
        lines.append("unstaged: one descriptor per page, layer and plane, pool to pool, prepared once per peer.")
    if any(measurement.shared_gpus for measurement in measurements):
        lines.append("*: there are fewer GPUs than ranks, so ranks share GPUs and the links between them.")
    return Text("\n".join(lines), style="dim")


def curve_of(measurements: Sequence[Measurement]) -> Text:
    """GB/s by size of pieces, as bars on the scale of the plain copy, or of the best where there is none."""
    first = measurements[0]
    if first.copy_s:
        scale = first.payload_bytes / first.copy_s / 1e9
        beside = f"; a plain copy: {scale:.1f}"
    else:
        scale, beside = max(measurement.gb_per_s for measurement in measurements), ""
    out = Text(f"\nGB/s by size of pieces: TP {first.pair}, {first.tokens} tokens{beside}\n")
    for measurement in measurements:
        cells = min(BAR_CELLS, round(BAR_CELLS * measurement.gb_per_s / scale))
        out.append(f"{show_bytes(measurement.piece_bytes):>9} ")
        out.append("█" * cells, style="cyan")
        out.append("░" * (BAR_CELLS - cells), style="bright_black")
        out.append(
            f" {measurement.gb_per_s:6.1f}" + (f"  {100 * measurement.share:3.0f}%\n" if measurement.copy_s else "\n")
        )
    return out
