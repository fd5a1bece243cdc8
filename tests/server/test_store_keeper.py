"""What an engine has done in storage: published once, found and read by others, and nothing stays that is not wanted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from disagg.messages.tiers import PartsWritten, WriteParts
from disagg.offload.causes import Cause
from disagg.offload.instructions import Ask, Beyond, Discard, ForgetAsk, Publish, StoreFound, StorePublished
from disagg.offload.keys import span_path
from disagg.offload.objects import VERSION
from disagg.offload.survey import statistics
from disagg.server import store_keeper
from disagg.server.keeper_facts import KeeperLimits
from tests.offload.pages import chain
from tests.server.store_servers import OTHER, SCOPE, TOKENS, Server, open_at, parts_in, surveyed, upload_of


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    server = Server(open_at(tmp_path))
    yield server
    await server.keeper.close()


# ---- what works


async def test_what_one_server_publishes_another_finds_and_reads_at_another_size(
    server: Server, tmp_path: Path
) -> None:
    assert await server.publish(1, TOKENS, 0, 4) == 4
    assert await server.publish(2, TOKENS, 4, 10) == 6
    assert server.keeper.idle
    other = Server(open_at(tmp_path), tp=4)
    found = await other.ask(TOKENS)
    assert found == StoreFound(1, 10, (tuple(range(10)), tuple(range(10)), (3, 9)))
    reports = await other.fetch(1, 1, TOKENS, [range(10), (8, 9), (9,)])
    assert [report.error for report in reports] == [""] * 4
    await other.settle()
    stats = statistics(await surveyed(tmp_path))
    assert stats.pages == stats.distinct_pages == server.sums.published_pages == 22
    assert server.sums.duplicate_pages == 0 and not other.sums.misses
    assert any(path.parts[-3] == "reads" for path in (tmp_path / "kv").rglob("*")), "what was fetched is spared by gc"
    await other.keeper.close()


async def test_what_begins_within_a_span_is_found_by_looking_from_the_start(server: Server) -> None:
    await server.publish(1, TOKENS, 0, 6)
    await server.publish(2, TOKENS, 6, 10)
    assert (await server.ask(TOKENS, first=6)).pages == 10
    assert (await server.ask(TOKENS, first=3)).pages == 10
    assert (await server.ask(OTHER, first=3)).pages == 5
    assert await server.ask(list(range(500, 540)), first=3) == StoreFound(4, 3, ())
    assert await server.ask(list(range(500, 540))) == StoreFound(5, 0, ())


async def test_of_two_servers_that_publish_at_once_one_is_kept_and_both_know_what_is_there(tmp_path: Path) -> None:
    servers = [Server(open_at(tmp_path), tp) for tp in (1, 2, 4)]
    plans = [(TOKENS, 6), (TOKENS, 10), (OTHER, 8)]
    pages = await asyncio.gather(
        *(server.publish(1, tokens, 0, stop) for server, (tokens, stop) in zip(servers, plans, strict=True))
    )
    for server in servers:
        await server.settle()
        await server.keeper.close()
    found = await surveyed(tmp_path)
    assert len(found.spans) == 1 and statistics(found).unused_parts == 0, "the others' parts are gone"
    there = found.spans[0].span.hashes
    for (tokens, stop), num in zip(plans, pages, strict=True):
        hashes = chain(SCOPE, tokens)[:stop]
        assert num == next(
            (i for i, (a, b) in enumerate(zip(hashes, there, strict=False)) if a != b), min(stop, len(there))
        )
    assert sum(server.sums.published_pages for server in servers) == statistics(found).pages
    assert sum(server.sums.duplicate_pages > 0 for server in servers) == 2


async def test_what_else_is_in_spans_that_a_sequence_goes_through_is_told(server: Server) -> None:
    await server.publish(1, TOKENS, 0, 7)
    hashes, others = chain(SCOPE, TOKENS), chain(SCOPE, OTHER)
    rest = Beyond(tuple(hashes[5:7]), (*((g, hashes[at]) for g in (0, 1) for at in (5, 6)), (2, hashes[6])))
    assert (await server.ask(OTHER)).beyond == rest, "it leaves the span"
    assert (await server.ask(TOKENS[:20])).beyond == rest, "it ends within the span"
    assert (await server.ask(TOKENS)).beyond == Beyond()
    for op, tokens, stop, pages in ((2, TOKENS, 5, 5), (3, OTHER, 8, 5)):
        await server.upload(op, tokens, 0, stop)
        server.keeper.do(Publish(op))
        assert await server.next(StorePublished) == StorePublished(op, pages, rest)
    assert await server.publish(4, OTHER, 5, 8) == 3
    assert (await server.ask(OTHER)).pages == 8 and len(set(others[:8]) & set(hashes)) == 5


async def test_tenants_share_nothing(server: Server) -> None:
    await server.publish(1, TOKENS, 0, 4)
    server.keeper.do(Ask(7, "other", tuple(chain(SCOPE, TOKENS)), 0))
    assert await server.next(StoreFound) == StoreFound(7, 0, ())


# ---- what is not wanted


async def test_what_is_discarded_is_deleted_also_when_it_is_reported_later(server: Server, tmp_path: Path) -> None:
    server.keeper.do(upload_of(1, TOKENS, 0, 4))
    (first, one), (second, two) = server.taken()
    assert isinstance(one, WriteParts) and isinstance(two, WriteParts)
    server.keeper.rank_report(first, await server.ranks.write(first, one))
    server.keeper.do(Discard(1))
    await server.settle()
    assert not server.keeper.idle and parts_in(tmp_path) == []
    late = await server.ranks.write(second, two)
    assert parts_in(tmp_path)
    server.keeper.rank_report(second, late)
    await server.settle()
    assert server.keeper.idle and parts_in(tmp_path) == []
    server.keeper.rank_report(second, late)  # of what nobody knows any more


async def test_of_a_failed_upload_nothing_stays(server: Server, tmp_path: Path) -> None:
    server.keeper.do(upload_of(1, TOKENS, 0, 4))
    (first, one), (second, _) = server.taken()
    assert isinstance(one, WriteParts)
    server.keeper.rank_report(second, PartsWritten(1, "no room", ((), (), ()), 0, 0.0))
    server.keeper.rank_report(first, await server.ranks.write(first, one))
    server.keeper.do(Discard(1))
    await server.settle()
    assert server.keeper.idle and parts_in(tmp_path) == [] and server.sums.failures == 1


async def test_a_fetch_of_an_unknown_or_forgotten_ask_goes_to_the_ranks_which_refuse_it(server: Server) -> None:
    await server.publish(1, TOKENS, 0, 4)
    await server.ask(TOKENS)
    server.keeper.do(ForgetAsk(1))
    server.keeper.do(ForgetAsk(99))
    for op, ask in enumerate((1, 99), 1):
        reports = await server.fetch(op, ask, TOKENS, [(0, 1), (), ()])
        assert all(report.error for report in reports)


async def test_what_is_remembered_is_bounded_and_the_oldest_goes(tmp_path: Path) -> None:
    server = Server(open_at(tmp_path), limits=KeeperLimits(known_asks=2))
    await server.publish(1, TOKENS, 0, 4)
    for _ in range(3):
        await server.ask(TOKENS)
    errors = [[each.error for each in await server.fetch(op, op, TOKENS, [(0,), (), ()])] for op in (1, 2, 3)]
    assert all(errors[0]) and not any((*errors[1], *errors[2]))
    await server.keeper.close()


async def test_tenants_are_bounded_and_misses_of_those_forgotten_stay_counted(server: Server, tmp_path: Path) -> None:
    await server.publish(1, TOKENS, 0, 4)
    [path] = [path for path in (tmp_path / "kv").rglob("spans/*/*") if path.is_file()]
    path.write_bytes(b"nonsense")
    assert (await server.ask(TOKENS)).pages == 0
    for n in range(store_keeper.TENANTS + 5):
        server.keeper.do(Ask(100 + n, f"salt {n}", tuple(chain(SCOPE, TOKENS)), 0))
        await server.next(StoreFound)
    assert len(server.keeper._tiers) == store_keeper.TENANTS
    assert sum(server.sums.misses.values()) == 1


# ---- what is damaged, or of another version


async def test_a_damaged_part_is_found_out_counted_and_replaced(server: Server, tmp_path: Path) -> None:
    await server.publish(1, TOKENS, 0, 4)
    for path in parts_in(tmp_path):
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
    other = Server(open_at(tmp_path), tp=1)
    assert (await other.ask(TOKENS)).pages == 4
    [report] = await other.fetch(1, 1, TOKENS, [range(4), (), ()])
    assert report.error
    await other.settle()
    assert other.sums.misses == {Cause.CORRUPT: 1}
    assert (await other.ask(TOKENS)).pages == 0, "not found again by the same server"
    assert await other.publish(1, TOKENS, 0, 4) == 4
    assert (await other.ask(TOKENS)).pages == 4
    assert [each.error for each in await other.fetch(2, 3, TOKENS, [range(4), range(4), (3,)])] in (
        [""],
        [report.error],
    )
    await other.keeper.close()
    await surveyed(tmp_path)


async def test_what_a_newer_version_has_published_stays(server: Server, tmp_path: Path) -> None:
    await server.publish(1, TOKENS, 0, 4)
    path = tmp_path / "kv" / span_path(SCOPE.place, chain(SCOPE, TOKENS)[0])
    data = bytearray(path.read_bytes())
    data[8:12] = (VERSION + 1).to_bytes(4, "little")
    path.write_bytes(data)
    other = Server(open_at(tmp_path), tp=1)
    assert (await other.ask(TOKENS)).pages == 0 and other.sums.misses == {Cause.VERSION: 1}
    assert await other.publish(1, TOKENS, 0, 4) is None
    assert path.read_bytes() == bytes(data)
    await other.keeper.close()
