"""Where a request's time went, drawn."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from disagg.cli.timeline import print_timeline, show_s, timeline_rows
from disagg.messages.legs import TimelineEvent

T0 = 1_700_000_000.0


def event(name: str, start_s: float, end_s: float, detail: str = "") -> TimelineEvent:
    return TimelineEvent(name, T0 + start_s, T0 + end_s, detail)


def bar(cells: tuple[bool, ...]) -> str:
    return "".join("#" if cell else "." for cell in cells)


def test_bars_are_proportional_and_rows_in_order_of_their_beginning() -> None:
    events = [event("decode", 0.5, 1.0), event("queued", 0.0, 0.1), event("chunk", 0.1, 0.5, "256 tokens")]
    rows = timeline_rows(events, cells=10)
    assert [(row.name, bar(row.cells)) for row in rows] == [
        ("queued", "#........."),
        ("chunk", ".####....."),
        ("decode", ".....#####"),
    ]
    assert rows[1].start_s == pytest.approx(0.1)
    assert rows[1].took_s == pytest.approx(0.4)
    assert rows[1].detail == "256 tokens"


def test_an_instant_still_shows() -> None:
    rows = timeline_rows([event("queued", 0.0, 1.0), event("first token", 1.0, 1.0)], cells=10)
    assert bar(rows[1].cells) == ".........#"


def test_many_events_of_one_name_share_a_row_that_shows_each() -> None:
    pieces = [event("piece", at, at + 0.1, f"piece {at:.1f}") for at in (0.0, 0.2, 0.4, 0.6, 0.8)]
    (row,) = timeline_rows([*pieces, event("piece", 0.8, 0.9)], cells=9)
    assert row.count == 6
    assert bar(row.cells) == "#.#.#.#.#"
    assert row.took_s == pytest.approx(0.5)


def test_few_events_of_one_name_keep_their_rows() -> None:
    assert len(timeline_rows([event("chunk", at, at + 1) for at in (0, 1, 2, 3)])) == 4


def test_time_covered_twice_counts_once() -> None:
    (row,) = timeline_rows([event("piece", 0, 1)] * 5)
    assert row.took_s == pytest.approx(1.0)


def test_clocks_that_disagree_do_not_break_the_drawing() -> None:
    rows = timeline_rows([event("decode", 1.0, 0.5), event("queued", 0.9, 0.95)], cells=10)
    assert [row.name for row in rows] == ["queued", "decode"]
    assert rows[1].took_s == 0.0


def test_one_instant_alone_and_nothing_at_all_can_be_drawn() -> None:
    assert bar(timeline_rows([event("queued", 1, 1)], cells=3)[0].cells) == "###"
    assert timeline_rows([]) == ()


def test_the_table_names_events_times_and_details() -> None:
    out = io.StringIO()
    console = Console(file=out, width=110, force_terminal=False)
    print_timeline(console, [event("queued", 0, 0.003), event("chunk", 0.003, 0.4, "300 [tokens]")], "request r1")
    text = out.getvalue()
    for each in ("request r1", "queued", "3.0 ms", "397 ms", "0 to 400 ms", "300 [tokens]", "█"):
        assert each in text
    assert max(map(len, text.splitlines())) <= 110


def test_no_events_are_said_in_words() -> None:
    out = io.StringIO()
    print_timeline(Console(file=out, width=80), [])
    assert out.getvalue() == "timeline: nothing was recorded\n"


@pytest.mark.parametrize(("seconds", "text"), [(0.0004, "0.4 ms"), (0.012, "12 ms"), (1.254, "1.25 s"), (0, "0.0 ms")])
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert show_s(seconds) == text


def test_times_that_no_clock_shows_and_names_with_markup_break_no_table() -> None:
    out = io.StringIO()
    never = TimelineEvent("never", -1e308, 1e308)
    print_timeline(Console(file=out, width=100), (never, TimelineEvent("queued", 1.0, 2.0)), "request [/red]\x1b[2J")
    text = out.getvalue()
    assert "queued" in text and "never" not in text and "[/red]\\x1b[2J" in text
    print_timeline(Console(file=out, width=100), (), "request [/red]")
