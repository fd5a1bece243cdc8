"""`disagg status --memory`: bars that have the right length, numbers that line up, and what there may be none of."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import convert
from rich.console import Console

from disagg.cli.answers import ServerSaid
from disagg.cli.memory import bar_cells, memory_lines, show_share
from disagg.cli.status import print_memory
from disagg.config.sizes import show_bytes
from tests.cli.routers import status_of

KIB, MIB = 1 << 10, 1 << 20


def group(name: str, page_bytes: int, used: int, evictable: int, empty: int) -> dict[str, Any]:
    pages = {"used_pages": used, "evictable_pages": evictable, "empty_pages": empty}
    return {"name": name, "kind": "full", "page_bytes": page_bytes, **pages}


def server(*groups: dict[str, Any], name: str = "decode-0", tp: int = 1, lost: int = 0) -> dict[str, Any]:
    """64 MiB in large pages of 64 KiB: 256 used, 512 evictable, 256 free."""
    large = {"large_bytes": 64 * KIB, "large_used": 256, "large_evictable": 512, "large_free": 256}
    memory = {"sizing": "lcm", **large, "fragmentation_bytes": lost, "groups": list(groups)}
    return {"name": name, "role": "decode", "state": "ready", "tp": tp, "memory": memory}


TWO = server(
    group("full", 16 * KIB, used=512, evictable=1400, empty=136),
    group("window-512", 32 * KIB, 256, 240, 16),
    lost=3 * MIB,
)


def said(server: dict[str, Any]) -> ServerSaid:
    return convert(server, ServerSaid)


def drawn(*servers: dict[str, Any], width: int = 80, terminal: bool = False) -> str:
    out = io.StringIO()
    colours = "standard" if terminal else None
    console = Console(file=out, width=width, force_terminal=terminal, color_system=colours, highlight=False)
    print_memory(console, status_of(*servers))
    return out.getvalue()


def test_a_pool_is_drawn_with_the_bars_of_its_groups_on_its_own_scale() -> None:
    assert drawn(TWO).splitlines() == [
        "decode-0, ready: 64 MiB of KV memory, 1024 large pages of 64 KiB (lcm)",
        "                                           used  evictable  empty   bytes  share",
        "  large pages  ██████▒▒▒▒▒▒▒▒▒▒▒▒▒▒░░░░░░   256        512    256  64 MiB   100%",
        "  full         ███▒▒▒▒▒▒▒▒▒░                512       1400    136  32 MiB    50%",
        "  window-512   ███▒▒▒░                      256        240     16  16 MiB    25%",
        "  3 MiB (5%) lost to empty small pages and padding",
        "",
        "█ used  ▒ evictable  ░ empty",
    ]


@pytest.mark.parametrize("width", [72, 80, 120, 300])
def test_lines_fit_and_their_columns_end_at_the_same_place(width: int) -> None:
    long_name = group("window-4096-8x128", 100, 100_000, 0, 0)
    lines = [line.plain for line in memory_lines(said(server(*TWO["memory"]["groups"], long_name)), width)]
    table = lines[1:]
    assert {len(line) for line in table} == {len(table[0])}
    assert len(table[0]) <= width
    assert all(line.endswith("%") for line in table[1:])


def test_the_host_pool_is_drawn_below_on_a_scale_of_its_own() -> None:
    with_host = server(group("full", 64 * KIB, used=256, evictable=512, empty=0))
    with_host["memory"]["host"] = {"pages_used": 512, "pages_total": 2048, "bytes": 128 * MIB}
    assert drawn(with_host).splitlines()[1:5] == [
        "                                          used  evictable  empty    bytes  share",
        "  large pages  ██████▒▒▒▒▒▒▒▒▒▒▒▒▒░░░░░░   256        512    256   64 MiB   100%",
        "  full         ██████▒▒▒▒▒▒▒▒▒▒▒▒▒         256        512      0   48 MiB    75%",
        "  host memory  ██████░░░░░░░░░░░░░░░░░░░   512          0   1536  128 MiB   200%",
    ]
    with_host["memory"]["host"] = None
    assert "host" not in drawn(with_host)


def test_names_that_are_too_long_are_cut_and_the_bar_stays() -> None:
    [_, _, _, row] = [
        line.plain for line in memory_lines(said(server(group("window-4096-8x128", 64 * KIB, 1, 0, 0))), 60)
    ]
    assert "…" in row
    assert "█" in row


def test_colours_are_for_terminals_only() -> None:
    assert "\x1b[36m█" in drawn(TWO, terminal=True)
    assert "\x1b" not in drawn(TWO)


def test_what_there_is_none_of_is_said_or_left_out() -> None:
    assert drawn() == "no servers\n"
    loading = {"name": "decode-1", "role": "decode", "state": "loading", "tp": 1, "memory": None}
    assert drawn(loading).splitlines()[0] == "decode-1, loading: no KV memory"
    bare = drawn(server()).splitlines()
    assert len(bare) == 5  # title, header, large pages, blank, legend
    assert "lost" not in drawn(server(group("full", 64 * KIB, 256, 512, 0)))


def test_ranks_have_a_pool_each() -> None:
    assert "64 MiB of KV memory on each rank" in drawn(server(tp=2), width=120)


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=4), st.integers(0, 10**12), st.integers(4, 60))
def test_a_bar_is_as_long_as_its_share_and_shows_whatever_is_there(parts: list[int], rest: int, cells: int) -> None:
    total = sum(parts) + rest
    taken = bar_cells(parts, total, cells)
    assert sum(taken) <= cells
    assert all((count > 0) == (part > 0) for part, count in zip(parts, taken, strict=True) if part == 0 or total)
    if total:
        assert abs(sum(taken) - sum(parts) / total * cells) <= len(parts)


def test_a_bar_of_nothing_is_empty() -> None:
    assert bar_cells((0, 0), 0, 10) == (0, 0)


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (250 * KIB, "250 KiB"),
        (1023 * KIB + 600, "1 MiB"),
        (1536 * KIB, "1.5 MiB"),
        (int(12.34 * MIB), "12.3 MiB"),
        (100 * MIB, "100 MiB"),
        (5 << 40, "5 TiB"),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_bytes_are_shown_in_three_digits(num_bytes: int, shown: str) -> None:
    assert show_bytes(num_bytes) == shown


def test_a_share_that_is_not_nothing_is_not_zero() -> None:
    assert [show_share(part, 1000) for part in (0, 1, 5, 500, 1000)] == ["0%", "<1%", "<1%", "50%", "100%"]
    assert show_share(0, 0) == "0%"


def test_what_a_server_says_of_itself_neither_drives_a_terminal_nor_forges_a_line() -> None:
    forged = "\x1b[2J\nforged [red]\u202e"
    bad = server(group(forged, 64 * KIB, 1, 0, 0), name="d")
    bad["state"] = bad["memory"]["sizing"] = forged
    text = drawn(bad, width=200)
    assert text.count("\\x1b[2J\\nforged [red]\\u202e") == 3
    assert "\x1b" not in text and "\u202e" not in text and "\nforged" not in text


def test_numbers_that_no_pool_has_draw_bars_no_longer_than_the_pool() -> None:
    huge = server(group("g" * 1_000_000, 1 << 62, 1 << 62, 1 << 62, 1 << 62))
    huge["memory"]["host"] = {"pages_used": 1 << 62, "pages_total": 1, "bytes": 1 << 62}
    assert max(map(len, drawn(huge, width=120).splitlines())) < 500
