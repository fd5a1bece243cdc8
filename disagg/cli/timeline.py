"""Draws where a request's time went, as a table with proportional bars. Pure: events in, table out.

event       start    took   │ 0 ms                       412 ms │ detail
queued       0 ms    3 ms   │█                                  │
chunk x2     3 ms  180 ms   │████████████████                   │ 512 tokens
decode     190 ms  222 ms   │                ███████████████████│
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from disagg.cli.terminal import full_block
from disagg.messages.legs import TimelineEvent
from disagg.types.plain import one_line

LATEST_UNIX_S = 1e11  # what is said to be later, or as much before 1970, cannot be drawn with the rest
ONE_ROW_ABOVE = 4  # more events of one name than this share a row
BAR_CELLS = 40
_STYLES = ("cyan", "green", "yellow", "magenta", "blue", "red")


class Row(Struct, frozen=True):
    """One line. start_s: since the first event; took_s: time covered by any of its events; cells: the bar, on or off."""

    name: str
    count: int
    start_s: float
    took_s: float
    cells: tuple[bool, ...]
    detail: str


def timeline_rows(events: Iterable[TimelineEvent], cells: int = BAR_CELLS) -> tuple[Row, ...]:
    """One row per event, or per name where there are many of it; in the order in which they begin.

    An event that ends before it starts (clocks of two hosts) counts as one instant. Every event shows at least one cell.
    """
    ordered = sorted(_drawable(events), key=lambda event: (event.start_unix_s, event.end_unix_s))
    if not ordered:
        return ()
    begin_s = ordered[0].start_unix_s
    total_s = max(max(event.end_unix_s, event.start_unix_s) for event in ordered) - begin_s
    by_name: dict[str, list[TimelineEvent]] = {}
    for event in ordered:
        by_name.setdefault(event.name, []).append(event)
    groups: list[list[TimelineEvent]] = []
    for same in by_name.values():
        groups += [same] if len(same) > ONE_ROW_ABOVE else [[event] for event in same]
    groups.sort(key=lambda group: group[0].start_unix_s)
    return tuple(_row(group, begin_s, total_s, cells) for group in groups)


def timeline_table(
    events: Sequence[TimelineEvent], title: str = "timeline", cells: int = BAR_CELLS, block: str = "█"
) -> Table:
    """The rows as a table for a terminal. block: what bars are made of."""
    events = _drawable(events)
    rows = timeline_rows(events, cells)
    end_s = max((event.end_unix_s for event in events), default=0.0)
    total_s = max(0.0, end_s - min((event.start_unix_s for event in events), default=0.0))
    table = Table(title=Text(one_line(title)), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("event", no_wrap=True)
    table.add_column("start", justify="right", no_wrap=True)
    table.add_column("took", justify="right", no_wrap=True)
    table.add_column(f"0 to {show_s(total_s)}", no_wrap=True, min_width=cells)
    table.add_column("detail", overflow="fold")
    styles: dict[str, str] = {}
    for row in rows:
        style = styles.setdefault(row.name, _STYLES[len(styles) % len(_STYLES)])
        name = f"{row.name} x{row.count}" if row.count > 1 else row.name
        bar = "".join(block if cell else " " for cell in row.cells)
        table.add_row(
            Text(one_line(name)),
            show_s(row.start_s),
            show_s(row.took_s),
            Text(bar, style=style),
            Text(one_line(row.detail)),
        )
    return table


def print_timeline(console: Console, events: Sequence[TimelineEvent], title: str = "timeline") -> None:
    """Draws it as wide as the console allows, or says that there is nothing to draw."""
    if not events:
        console.print(Text(f"{one_line(title)}: nothing was recorded"))
        return
    beside = max(len(event.name) for event in events) + 32  # the other columns and what is between them
    room = max(0, console.width - beside)
    detail = min(room // 2, max(len(event.detail) for event in events))
    block = full_block(console.encoding)
    console.print(timeline_table(events, title, cells=max(10, min(60, room - detail)), block=block))


def show_s(seconds: float) -> str:
    """A duration for people: "0.4 ms", "12 ms", "1.25 s"."""
    if seconds < 0.00995:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.2f} s"


def _drawable(events: Iterable[TimelineEvent]) -> list[TimelineEvent]:
    return [each for each in events if max(abs(each.start_unix_s), abs(each.end_unix_s)) <= LATEST_UNIX_S]


def _row(group: list[TimelineEvent], begin_s: float, total_s: float, cells: int) -> Row:
    spans = [(event.start_unix_s - begin_s, max(event.end_unix_s, event.start_unix_s) - begin_s) for event in group]
    on = [False] * cells
    for start_s, end_s in spans:
        # Seconds since the epoch are exact to a quarter of a microsecond: what begins at a cell's edge is in that cell.
        first = min(cells - 1, int(start_s / total_s * cells + 0.001)) if total_s else 0
        last = min(cells, max(first + 1, round(end_s / total_s * cells))) if total_s else cells
        on[first:last] = [True] * (last - first)
    return Row(
        name=group[0].name,
        count=len(group),
        start_s=spans[0][0],
        took_s=_covered(spans),
        cells=tuple(on),
        detail=group[0].detail if len(group) == 1 else _details(group),
    )


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals that are sorted by their start."""
    covered, reach = 0.0, float("-inf")
    for start_s, end_s in spans:
        covered += max(0.0, end_s - max(start_s, reach))
        reach = max(reach, end_s)
    return covered


def _details(group: list[TimelineEvent]) -> str:
    """The first and the last detail of many."""
    first, last = group[0].detail, group[-1].detail
    return first if first == last else f"{first} ... {last}"
