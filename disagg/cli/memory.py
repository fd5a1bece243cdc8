"""Draws the KV pools of `/status`: large pages, and each layer group's part of them. Pure: what a router said in, lines out.

decode-0, ready: 512 MiB of KV memory, 2097 large pages of 250 KiB (lcm)
                                      used  evictable  empty    bytes  share
  large pages  ██████▒▒▒▒▒▒▒▒░░░░░░    593        801    703  512 MiB   100%
  full         ████▒▒▒▒▒              9000      10120     12  229 MiB    45%
  window-512   ██▒▒▒                  4100       7800    300   95 MiB    19%
  host memory  ██████████░░░░░░░░    2330          0   1864    1 GiB   200%

Every bar has the scale of the whole pool: the groups' bars together are as long as the first is before its empty part. The
host's has a scale of its own; its large pages are as long as the pool's.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from rich.text import Text

from disagg.cli.answers import MemorySaid, ServerSaid
from disagg.config.sizes import show_bytes
from disagg.types.plain import NAME_CHARS, one_line

STATES = (("used", "█", "cyan"), ("evictable", "▒", "yellow"), ("empty", "░", "bright_black"))
LEAST_CELLS, MOST_CELLS = 8, 48
LEAST_NAME = 8
GAP = "  "
HOST = "host memory"


class Row(Struct, frozen=True):
    """One line. pages: (used, evictable, empty), each of page_bytes."""

    name: str
    pages: tuple[int, int, int]
    page_bytes: int

    @property
    def nbytes(self) -> int:
        return sum(self.pages) * self.page_bytes


def memory_rows(memory: MemorySaid) -> tuple[Row, ...]:
    """The pool's large pages, then its groups, and the host pool if there is one."""
    large = (memory.large_used, memory.large_evictable, memory.large_free)
    groups = (
        Row(
            one_line(group.name, NAME_CHARS),
            (group.used_pages, group.evictable_pages, group.empty_pages),
            group.page_bytes,
        )
        for group in memory.groups
    )
    rows = Row("large pages", large, memory.large_bytes), *groups
    host = memory.host
    if host is None or not host.pages_total:
        return rows
    free = max(0, host.pages_total - host.pages_used)
    return *rows, Row(HOST, (host.pages_used, 0, free), host.bytes // host.pages_total)


def memory_lines(server: ServerSaid, width: int) -> list[Text]:
    """One server's pool below a line that says what it is, in `width` columns or, if they are too few, in what it takes."""
    title = f"{one_line(server.name)}, {one_line(server.state, NAME_CHARS)}"
    memory = server.memory
    if memory is None:
        return [Text(f"{title}: no KV memory")]
    rows = memory_rows(memory)
    pool = rows[0]
    title += (
        f": {show_bytes(pool.nbytes)} of KV memory{' on each rank' if (server.tp or 1) > 1 else ''}, "
        f"{sum(pool.pages)} large pages of {show_bytes(pool.page_bytes)} ({one_line(memory.sizing, NAME_CHARS)})"
    )
    table = [["", *(state for state, _, _ in STATES), "bytes", "share"]]
    for row in rows:
        counts = (str(count) for count in row.pages)
        table.append([row.name, *counts, show_bytes(row.nbytes), show_share(row.nbytes, pool.nbytes)])
    longest, *widths = (max(map(len, column)) for column in zip(*table, strict=True))
    room = width - sum(widths) - len(GAP) * (len(widths) + 2)
    names = min(longest, max(LEAST_NAME, room - LEAST_CELLS))
    cells = max(LEAST_CELLS, min(MOST_CELLS, room - names))
    bars = [Text(), *(_bar(row, row.nbytes if row.name == HOST else pool.nbytes, cells) for row in rows)]
    lines = [Text(title)]
    for (name, *values), bar in zip(table, bars, strict=True):
        short = name if len(name) <= names else name[: names - 1] + "…"
        bar.pad_right(cells - len(bar))
        numbers = GAP.join(value.rjust(each) for value, each in zip(values, widths, strict=True))
        lines.append(Text.assemble(GAP, short.ljust(names), GAP, bar, GAP, numbers))
    lost = memory.fragmentation_bytes
    if lost:
        share = show_share(lost, pool.nbytes)
        lines.append(Text(f"{GAP}{show_bytes(lost)} ({share}) lost to empty small pages and padding"))
    return lines


def legend() -> Text:
    """What the cells of the bars mean."""
    return Text(GAP).join(Text.assemble((cell, style), f" {state}") for state, cell, style in STATES)


def bar_cells(parts: Sequence[int], total: int, cells: int) -> tuple[int, ...]:
    """How many of `cells`, which stand for `total`, each part takes: rounded so that the whole bar has the right length.

    A part that is not 0 takes one at least; where none is left, the longest part gives it up, if it has two. Parts of more than
    the total take all of it.
    """
    ends = [min(cells, round(sum(parts[: index + 1]) / total * cells)) if total else 0 for index in range(len(parts))]
    taken = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    for index, part in enumerate(parts):
        if part and not taken[index]:
            longest = taken.index(max(taken))
            if sum(taken) == cells and taken[longest] > 1:
                taken[longest] -= 1
            if sum(taken) < cells:
                taken[index] = 1
    return tuple(taken)


def show_share(part: int, whole: int) -> str:
    """A percentage; "<1%" for what is not nothing."""
    percent = round(100 * part / whole) if whole else 0
    return f"{percent}%" if percent or not part else "<1%"


def _bar(row: Row, pool_bytes: int, cells: int) -> Text:
    taken = bar_cells([count * row.page_bytes for count in row.pages], pool_bytes, cells)
    return Text.assemble(*((cell * count, style) for count, (_, cell, style) in zip(taken, STATES, strict=True)))
