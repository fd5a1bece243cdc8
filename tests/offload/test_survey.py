"""What is counted, what is found to be damaged, and what goes first when there is too much."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from msgspec.structs import replace

from disagg.cli.main import cli
from disagg.messages.stored import Span
from disagg.offload.directory import Entry
from disagg.offload.keys import PARTS, READS, SPANS, Scope, part_path, span_path
from disagg.offload.store import ObjectStore, open_store
from disagg.offload.survey import Survey, collect, eviction_order, statistics, survey, verify
from disagg.offload.tier import Missed, StorageTier
from tests.offload.pages import SCOPES, chain, of_version, store_span
from tests.offload.s3_server import S3Server

SCOPE = SCOPES["full"]
PAGE = SCOPE.groups[0].page_bytes(SCOPE.page_tokens)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(f"file://{tmp_path}/kv", {})


def tier_of(store: ObjectStore) -> StorageTier:
    return StorageTier(store, SCOPE, checkpoint_tokens=8)


def conversation(number: int, pages: int = 6) -> list[bytes]:
    return chain(SCOPE, [1000 * number + i for i in range(4 * pages)])


async def write(store: ObjectStore, number: int, cuts: tuple[int, ...] = (2, 4, 6)) -> list[Span]:
    hashes, start, spans = conversation(number), 0, []
    for stop in cuts:
        spans.append(await store_span(tier_of(store), hashes, start, stop))
        start = stop
    return spans


def age(tmp_path: Path, span: Span, seconds: float, kind: str = SPANS) -> None:
    """As if it had been written (or, with kind READS, read) at this time."""
    file = tmp_path / "kv" / span_path(SCOPE.place, span.hashes[0]).replace(f"/{SPANS}/", f"/{kind}/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    os.utime(file, (seconds, seconds))


def left(found: Survey) -> set[bytes]:
    return {each.span.hashes[0] for each in found.spans}


async def test_what_goes_on_from_a_span_goes_before_it(store: ObjectStore, tmp_path: Path) -> None:
    old, new = await write(store, 1), await write(store, 2)
    for spans, seconds in ((old, 1000.0), (new, 2000.0)):
        for i, span in enumerate(spans):
            age(tmp_path, span, seconds + 10 * i)  # the first span of all is the oldest, and must stay the longest
    found = await survey(store)
    order = [each.span.hashes[0] for each in eviction_order(found.spans)]
    assert order == [span.hashes[0] for span in (*reversed(old), *reversed(new))]
    whole = found.all_bytes
    each = whole // 6
    for kept in (5, 4, 3, 2, 1):
        done = await collect(store, each * kept + 100)
        assert left(await survey(store)) == set(order[6 - kept :])
        assert done.left_bytes == (await survey(store)).all_bytes <= each * kept + 100
        assert await verify(store, await survey(store)) == []


async def test_what_was_read_lately_is_spared(store: ObjectStore, tmp_path: Path) -> None:
    old, new = await write(store, 1), await write(store, 2)
    for seconds, spans in ((1000.0, old), (2000.0, new)):
        for span in spans:
            age(tmp_path, span, seconds)
    tier = tier_of(store)
    await tier.note_read(await tier.walk(conversation(1)))
    found = await survey(store)
    await collect(store, found.all_bytes // 2 + 200)
    assert left(await survey(store)) == {span.hashes[0] for span in old}


async def test_collecting_while_others_read_ends_in_pages_or_misses(store: ObjectStore) -> None:
    """Nobody reads wrong bytes, and nobody fails, because something is removed meanwhile."""
    for number in range(8):
        await write(store, number)
    tier, whole = tier_of(store), (await survey(store)).all_bytes
    hits = []

    async def read() -> None:
        for _ in range(3):
            for number in range(8):
                hashes = conversation(number)
                found = await tier.walk(hashes)
                pages = tier.hit(hashes, found, 24) // 4
                for each in tier.reads(found, 0, range(pages), range(12)):
                    with contextlib.suppress(Missed):
                        hits.append(len(await tier.fetch(each)))

    async def shrink() -> None:
        for share in (6, 4, 2):
            await collect(store, whole * share // 8)

    await asyncio.gather(read(), read(), shrink())
    assert hits and (await survey(store)).all_bytes <= whole // 4
    assert await verify(store, await survey(store)) == []


async def test_garbage_is_removed_when_it_is_old_and_what_is_about_to_be_published_is_not(
    store: ObjectStore, tmp_path: Path
) -> None:
    [span] = await write(store, 1, (6,))
    orphan = part_path(SCOPE.place, bytes(32), 1, 0, 12)
    await store.create(orphan, [b"x" * 100])
    age(tmp_path, replace(span, hashes=(bytes(32),)), 1000.0, READS)
    assert statistics(await survey(store)).unused_parts == 1
    assert (await collect(store, 0)).objects == 1, "the note of a read, which is old"
    assert (await collect(store, 0, grace_s=-10.0)).objects == 1
    assert left(await survey(store)) == {span.hashes[0]}
    assert statistics(await survey(store)).unused_parts == 0


async def test_what_was_being_written_when_its_writer_was_killed_is_counted_and_removed_when_it_is_old(
    store: ObjectStore, tmp_path: Path
) -> None:
    [span] = await write(store, 1, (6,))
    before = (await survey(store)).all_bytes
    part = tmp_path / "kv" / span.shares[0].parts[0].path
    old, new = (part.with_name(part.name + end) for end in ("#1", "#2"))
    strange = part.parent / "#notes#"
    for file in (old, new, strange):
        file.write_bytes(b"x" * 1000)
    for file in (old, strange):
        os.utime(file, (1000.0, 1000.0))
    found = await survey(store)
    assert (found.all_bytes, found.strangers) == (before + 2000, 1)
    done = await collect(store, 0)
    assert (done.spans, done.objects, done.freed_bytes, done.left_bytes) == (0, 1, 1000, before + 1000)
    assert not old.exists() and new.exists() and strange.exists() and part.exists()


async def test_what_is_stored_while_a_collection_lists_the_store_stays(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts come before spans in a listing: it has the span, and not its parts, which were there before it."""
    [there], written = await write(store, 1, (6,)), list[Span]()
    listing = store.listing

    async def slow(prefix: str) -> AsyncIterator[Entry]:
        for entry in sorted([each async for each in listing(prefix)], key=lambda each: each.path):
            if f"/{PARTS}/" in entry.path:
                yield entry
        written.extend(await write(store, 2, (6,)))
        async for entry in listing(prefix):
            if f"/{PARTS}/" not in entry.path:
                yield entry

    monkeypatch.setattr(store, "listing", slow)
    assert (await collect(store, 1 << 30)).spans == 0
    monkeypatch.undo()
    found = await survey(store)
    assert left(found) == {there.hashes[0], written[0].hashes[0]}
    assert await verify(store, found) == []


async def test_what_goes_on_from_what_a_listing_has_missed_is_not_the_first_to_go(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both were written meanwhile, the first of them where the listing had been."""
    [old] = await write(store, 1, (6,))
    age(tmp_path, old, 1000.0)
    first, second = await write(store, 2, (3, 6))
    listing, missed = store.listing, span_path(SCOPE.place, first.hashes[0])

    async def before(prefix: str) -> AsyncIterator[Entry]:
        async for entry in listing(prefix):
            if entry.path != missed:
                yield entry

    monkeypatch.setattr(store, "listing", before)
    found = await survey(store)
    assert [each.path for each in await verify(store, found)] == [span_path(SCOPE.place, second.hashes[0])]
    await collect(store, found.all_bytes - 1)
    monkeypatch.undo()
    assert await verify(store, found) == [], "it is looked at again"
    assert left(await survey(store)) == {first.hashes[0], second.hashes[0]}


async def test_what_cannot_be_used_is_removed_but_not_what_another_version_wrote(
    store: ObjectStore, tmp_path: Path
) -> None:
    spans = [(await write(store, number, (6,)))[0] for number in range(3)]
    corrupt, other, lost = (tmp_path / "kv" / span_path(SCOPE.place, each.hashes[0]) for each in spans)
    corrupt.write_bytes(corrupt.read_bytes()[:-1] + b"?")
    other.write_bytes(of_version(other.read_bytes(), 9))
    (tmp_path / "kv" / spans[2].shares[0].parts[0].path).unlink()
    done = await collect(store, 0, grace_s=-10.0)
    assert not corrupt.exists() and other.exists() and not lost.exists()
    found = await survey(store)
    assert done.left_bytes == found.all_bytes
    assert len(found.parts) == 2, "whose parts they are, only the other version knows"


async def test_a_flipped_version_is_damage_and_spares_nothing(store: ObjectStore, tmp_path: Path) -> None:
    flipped, lost = [(await write(store, number, (6,)))[0] for number in range(2)]
    file = tmp_path / "kv" / span_path(SCOPE.place, flipped.hashes[0])
    file.write_bytes(file.read_bytes()[:8] + b"\x41" + file.read_bytes()[9:])
    (tmp_path / "kv" / span_path(SCOPE.place, lost.hashes[0])).unlink()
    assert [each.spared for each in (await survey(store)).damage] == [False]
    done = await collect(store, 0, grace_s=-10.0)
    assert done.left_bytes == (await survey(store)).all_bytes == 0


async def test_a_span_of_another_version_spares_the_parts_of_its_own_tenant_only(
    store: ObjectStore, tmp_path: Path
) -> None:
    (span,) = await write(store, 1, (6,))
    other = Scope(SCOPE.weights, SCOPE.dtype, SCOPE.page_tokens, SCOPE.groups, "another tenant")
    hashes = chain(other, [*range(24)])
    elsewhere = await store_span(StorageTier(store, other, checkpoint_tokens=8), hashes, 0, 6)
    file = tmp_path / "kv" / span_path(SCOPE.place, span.hashes[0])
    file.write_bytes(of_version(file.read_bytes(), 9))
    (tmp_path / "kv" / span_path(other.place, elsewhere.hashes[0])).unlink()
    await collect(store, 0, grace_s=-10.0)
    found = await survey(store)
    assert [each.spared for each in found.damage] == [True]
    assert {*found.parts} == {part.path for share in span.shares for part in share.parts}


async def test_what_is_about_to_be_published_pushes_out_no_more_than_half_of_what_can_be_used(
    store: ObjectStore, tmp_path: Path
) -> None:
    spans = [(await write(store, number, (6,)))[0] for number in range(12)]
    for number, span in enumerate(spans):
        age(tmp_path, span, 1000.0 + number)
    for span in spans[8:]:
        (tmp_path / "kv" / span_path(SCOPE.place, span.hashes[0])).unlink()  # their parts are young
    all_bytes = (await survey(store)).all_bytes
    usable_bytes = sum(each.nbytes for each in (await survey(store)).spans) + 8 * 6 * PAGE
    budget_bytes = usable_bytes * 5 // 8  # of five of eight spans
    done = await collect(store, budget_bytes)
    assert left(await survey(store)) >= {span.hashes[0] for span in spans[6:8]}, (
        "used last, and within half of the budget"
    )
    assert done.young_bytes and "may be about to be used" in done.reasons(budget_bytes)
    assert done.left_bytes == (await survey(store)).all_bytes == all_bytes - done.freed_bytes > budget_bytes
    assert (await collect(store, budget_bytes, grace_s=-10.0)).left_bytes <= budget_bytes, "once they are old"


async def test_one_object_that_cannot_be_removed_stops_nothing(store: ObjectStore, tmp_path: Path) -> None:
    spans = [(await write(store, number, (6,)))[0] for number in range(4)]
    stuck = tmp_path / "kv" / spans[0].shares[0].parts[0].path
    stuck.unlink()
    (stuck / "x").mkdir(parents=True)
    budget_bytes = (await survey(store)).all_bytes // 3
    done = await collect(store, budget_bytes, grace_s=-10.0)
    assert (done.undeleted, done.why.partition(": ")[0]) == (1, spans[0].shares[0].parts[0].path)
    assert "1 could not be removed, such as" in done.reasons(budget_bytes)
    found = await survey(store)
    assert 0 < done.left_bytes == found.all_bytes <= budget_bytes and len(found.spans) == 1
    assert await verify(store, found) == []


async def test_what_is_damaged_can_be_removed_with_the_spans_that_name_it_and_what_goes_on_from_these(
    store: ObjectStore, tmp_path: Path
) -> None:
    whole, cut, flipped = await write(store, 1), await write(store, 2), (await write(store, 3, (6,)))[0]
    lost = await write(store, 4, (1, 2, 3, 4, 5, 6))
    part = tmp_path / "kv" / cut[1].shares[0].parts[0].path
    part.write_bytes(part.read_bytes()[:-1])
    for span in (flipped, lost[0]):
        file = tmp_path / "kv" / span_path(SCOPE.place, span.hashes[0])
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    url = f"file://{tmp_path}/kv"
    code, output = await asyncio.to_thread(disagg, "verify", "--storage", url, "--remove", "--json")
    assert code == 1 and json.loads(output)["removed"]["spans"] == 2 + 5
    assert not part.exists() and not file.exists()
    found = await survey(store)
    assert left(found) == {span.hashes[0] for span in (*whole, cut[0])}
    assert await verify(store, found) == []
    code, output = await asyncio.to_thread(disagg, "verify", "--storage", url, "--remove")
    assert code == 0 and "all whole" in output


async def test_what_nobody_can_find_goes_first(store: ObjectStore, tmp_path: Path) -> None:
    reachable, lost = await write(store, 1), await write(store, 2)
    for span in reachable:
        age(tmp_path, span, 1000.0)
    (tmp_path / "kv" / span_path(SCOPE.place, lost[0].hashes[0])).unlink()
    order = [each.span.hashes[0] for each in eviction_order((await survey(store)).spans)]
    assert order[:2] == [lost[2].hashes[0], lost[1].hashes[0]]
    assert (await collect(store, 0)).spans == 0, "whoever has the beginning may write it again"
    assert len(await verify(store, await survey(store))) == 1
    assert (await collect(store, 0, grace_s=-10.0)).spans == 2
    assert left(await survey(store)) == {span.hashes[0] for span in reachable}
    assert await verify(store, await survey(store)) == []


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_whatever_was_read_when_no_chain_gets_a_hole(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tmp_path = tmp_path_factory.mktemp("kv")

    async def run() -> None:
        store = open_store(f"file://{tmp_path}/kv", {})
        for number in range(3):
            cuts = sorted(data.draw(st.sets(st.integers(1, 6), min_size=1)))
            for span in await write(store, number, tuple(cuts)):
                age(tmp_path, span, data.draw(st.integers(1, 5)))
                if data.draw(st.booleans()):
                    age(tmp_path, span, data.draw(st.integers(1, 9)), READS)
        whole = (await survey(store)).all_bytes
        for share in (3, 2, 1):
            await collect(store, whole * share // 4)
            found = await survey(store)
            assert found.all_bytes <= whole * share // 4
            assert await verify(store, found) == []

    asyncio.run(run())


# ---- the commands


def disagg(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["cache", *arguments], catch_exceptions=False)
    return result.exit_code, result.output


def test_the_commands_count_list_verify_and_collect(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/kv"
    store = open_store(url, {})
    spans = asyncio.run(write(store, 1)) + asyncio.run(write(store, 2))
    code, output = disagg("stats", "--storage", url, "--json")
    stats = json.loads(output)
    assert code == 0
    assert (stats["pages"], stats["distinct_pages"], stats["tenants"], stats["bytes"]) == (12, 12, 1, 12 * PAGE)
    assert stats["object_bytes"] == sum(f.stat().st_size for f in (tmp_path / "kv").rglob("*") if f.is_file())
    code, output = disagg("ls", "--storage", url, "--json")
    assert code == 0 and {each["first_page"] for each in json.loads(output)["spans"]} == {
        s.hashes[0].hex() for s in spans
    }
    assert disagg("verify", "--storage", url)[0] == 0
    part = tmp_path / "kv" / spans[0].shares[0].parts[0].path
    part.write_bytes(part.read_bytes()[:-1])
    code, output = disagg("verify", "--storage", url)
    assert code == 1 and f"truncated: {spans[0].shares[0].parts[0].path}" in output
    code, output = disagg("verify", "--storage", url, "--json")
    assert code == 1 and [each["cause"] for each in json.loads(output)["damage"]] == ["truncated"]
    code, output = disagg("gc", "--storage", url, "--budget", "8KiB", "--json")
    assert code == 0 and 0 < json.loads(output)["left_bytes"] <= 8192
    assert json.loads(disagg("stats", "--storage", url, "--json")[1])["object_bytes"] <= 8192
    for command in ("stats", "ls", "gc"):
        assert disagg(command, "--storage", url)[0] == 0


def test_the_budget_is_that_of_the_settings_where_no_flag_says_another(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/kv"
    asyncio.run(write(open_store(url, {}), 1))
    file = tmp_path / "config.toml"
    file.write_text(f'[storage]\nurl = "{url}"\nbudget_bytes = "4KiB"\n')
    code, output = disagg("gc", "--config", str(file), "--json")
    assert code == 0 and json.loads(output)["budget_bytes"] == 4096 >= json.loads(output)["left_bytes"]


def test_the_commands_reach_s3_with_options_from_the_settings(s3: S3Server, tmp_path: Path) -> None:
    asyncio.run(write(open_store(s3.url, s3.options), 1))
    flags = [flag for name, value in s3.options.items() for flag in ("--set", f"storage.options.{name}={value}")]
    code, output = disagg("stats", "--storage", s3.url, "--json", *flags)
    assert code == 0 and json.loads(output)["pages"] == 6
    assert disagg("verify", "--storage", s3.url, *flags)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("stats",), 2, "storage.url is empty"),
        (("stats", "--storage", "file:///nowhere/at/all"), 2, "there is no directory"),
        (("verify", "--storage", "s3://b", "--set", "storage.options.alow_http=true"), 2, "storage.options.alow_http"),
        (("gc", "--storage", "file:///tmp", "--budget", "0"), 2, "more than nothing"),
        (("gc", "--storage", "file:///tmp", "--budget", "x"), 2, "a number of bytes"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: tuple[str, ...], code: int, says: str) -> None:
    exit_code, output = disagg(*arguments)
    assert exit_code == code and says in output


def test_a_command_that_has_done_its_work_ends_with_its_status(tmp_path: Path) -> None:
    """The runtime of the store's client still has threads then, and the interpreter must not be taken apart under them."""
    command = [sys.executable, "-m", "disagg", "cache", "stats", "--json", "--storage", f"file://{tmp_path}"]
    for _ in range(6):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "") and json.loads(done.stdout)["pages"] == 0


def test_a_store_that_does_not_answer_is_an_error_and_no_verdict(s3: S3Server) -> None:
    from tests.offload.s3_server import says_500

    s3.fault = says_500
    flags = [flag for name, value in s3.options.items() for flag in ("--set", f"storage.options.{name}={value}")]
    code, output = disagg("verify", "--storage", s3.url, *flags)
    assert code == 1 and "did not do what it was asked" in output and "whole" not in output


async def test_where_nothing_is_stored_nothing_is_written(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(exist_ok=True)
    (tmp_path / "kv" / "strange").write_text("a file of somebody else")
    done = await collect(store, 1, grace_s=-10.0)
    assert (done.spans, done.objects, done.freed_bytes, done.left_bytes) == (0, 0, 0, 0)
    assert [path.name for path in (tmp_path / "kv").rglob("*")] == ["strange"]
