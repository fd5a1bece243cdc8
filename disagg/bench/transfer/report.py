"""Draws what a bench of transfers found: a table, and a curve by size of pieces. Pure: rows in, text out."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from disagg.bench.transfer.rows import FIRST_CONTACT, IDLE_S, UNSTAGED, Plan, Row
from disagg.config.sizes import show_bytes

BAR_CELLS = 40


def heading(plan: Plan, gpus: Sequence[str]) -> Text:
    shape = plan.shape
    to = f", to {plan.to}" if plan.to else ""
    where = f"{plan.num_gpus} x {gpus[0]}" if plan.num_gpus else "CPU"
    after = f"each after {1e3 * IDLE_S:.0f} ms without traffic" if plan.idle else "each soon after a chunk before it"
    return Text(
        f"\nKV of {shape.layers} layers x {shape.kv_heads} heads x {shape.head_dim} in {shape.dtype} "
        f"({show_bytes(shape.bytes_per_token)} a token), pages of {plan.page_tokens} tokens at random places, on {where}.\n"
        f"Pieces of {show_bytes(plan.piece_bytes)}, {plan.in_flight} gather buffers, an arena of "
        f"{show_bytes(plan.arena_bytes)}{to}, kernels {plan.kernels}, UCX_TLS {plan.ucx_tls or 'left to UCX'}; "
        f"medians of {plan.repeats}, {after}. What landed was compared."
    )


def table_of(rows: Sequence[Row]) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("TP", no_wrap=True)
    table.add_column("transfer")
    for name in ("tokens", "bytes", "writes", "ms", "GB/s", "of a copy", "gather", "wire", "scatter", "waiting"):
        table.add_column(name, justify="right", no_wrap=True)
    before = ""
    for row in rows:
        if before not in ("", row.pair):
            table.add_section()
        before = row.pair
        stages = [""] * 4
        if row.spent is not None:
            spent = row.spent
            stages = [
                f"{1e3 * seconds:.2f}"
                for seconds in (spent.gather_s, spent.wire_s, spent.scatter_s, max(0.0, spent.waiting_s))
            ]
        table.add_row(
            row.pair + ("*" if row.shared_gpus else ""),
            row.what,
            str(row.tokens),
            show_bytes(row.payload_bytes),
            str(row.pieces),
            f"{1e3 * row.seconds:.2f}",
            f"{row.gb_per_s:.1f}" if row.what != FIRST_CONTACT else "",
            f"{100 * row.share:.0f}%" if row.copy_s else "",
            *stages,
        )
    return table


def legend(rows: Sequence[Row]) -> Text:
    lines = [
        "gather, wire, scatter: ms in which at least one piece was there; they overlap. waiting: ms in which none was.",
        "of a copy: its rate divided by that of a plain copy of the same bytes along the same routes, in this run.",
        "first contact: from introducing ranks that never met to one page in place.",
    ]
    if ways := dict.fromkeys(way for row in rows for way in row.ways):
        lines.append(f"UCX wrote by {' or '.join(ways)}.")
    if error_s := max((row.clock_error_s for row in rows), default=0.0):
        lines.append(
            f"between two machines: their clocks were compared to {1e6 * error_s:.0f} us; there is no plain copy."
        )
    if any(row.what == UNSTAGED for row in rows):
        lines.append("unstaged: one descriptor per page, layer and plane, pool to pool, prepared once per peer.")
    if any(row.shared_gpus for row in rows):
        lines.append("*: there are fewer GPUs than ranks, so ranks share GPUs and the links between them.")
    return Text("\n".join(lines), style="dim")


def curve_of(rows: Sequence[Row]) -> Text:
    """GB/s by size of pieces, as bars on the scale of the plain copy, or of the best where there is none."""
    first = rows[0]
    if first.copy_s:
        scale = first.payload_bytes / first.copy_s / 1e9
        beside = f"; a plain copy: {scale:.1f}"
    else:
        scale, beside = max(row.gb_per_s for row in rows), ""
    out = Text(f"\nGB/s by size of pieces: TP {first.pair}, {first.tokens} tokens{beside}\n")
    for row in rows:
        cells = min(BAR_CELLS, round(BAR_CELLS * row.gb_per_s / scale))
        out.append(f"{show_bytes(row.piece_bytes):>9} ")
        out.append("█" * cells, style="cyan")
        out.append("░" * (BAR_CELLS - cells), style="bright_black")
        out.append(f" {row.gb_per_s:6.1f}" + (f"  {100 * row.share:3.0f}%\n" if row.copy_s else "\n"))
    return out
