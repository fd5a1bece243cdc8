"""Storage as a tier: what one server wrote another reads, at any TP size; everything else is a miss that says why."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from disagg.offload.causes import Cause
from disagg.offload.keys import Scope, read_path, span_path
from disagg.offload.objects import VERSION, Compression
from disagg.offload.store import ObjectStore, open_store
from disagg.offload.survey import statistics, survey, verify
from disagg.offload.tier import Missed, StorageTier
from tests.offload import s3_server
from tests.offload.pages import CHECKPOINT_TOKENS, SCOPES, chain, load_page, rank_page, store_span
from tests.offload.s3_server import S3Server

EVERYTHING = SCOPES["everything"]
TOKENS = list(range(40))
SIZES = (1, 2, 4)  # of TP, that 12 and 2 heads allow


def tier_of(
    store: ObjectStore, scope: Scope = EVERYTHING, compression: Compression = "none", seed: int = 0
) -> StorageTier:
    return StorageTier(store, scope, checkpoint_tokens=CHECKPOINT_TOKENS, compression=compression, random=Random(seed))


@pytest.fixture
def directory(tmp_path: Path) -> ObjectStore:
    return open_store(f"file://{tmp_path}/kv", {})


def file_of(tmp_path: Path, path: str) -> Path:
    return tmp_path / "kv" / path


@pytest.mark.parametrize("compression", ["none", "zstd"])
async def test_what_one_tp_size_wrote_every_other_reads(directory: ObjectStore, compression: Compression) -> None:
    hashes = chain(EVERYTHING, TOKENS)
    writer = tier_of(directory, compression=compression)
    await store_span(writer, hashes, 0, 4, tp=2)
    await store_span(writer, hashes, 4, 10, tp=4)
    for tp in (1, 2, 3, 4, 6):
        reader = tier_of(directory)
        for rank in range(tp):
            for g, group in enumerate(EVERYTHING.groups):
                if not group.is_state and group.kv_heads % tp and tp % group.kv_heads:
                    continue
                for page_no in (9,) if group.is_state else (0, 3, 7, 9):
                    page = await load_page(reader, hashes, g, page_no, rank, tp)
                    assert (page == rank_page(EVERYTHING, g, hashes[page_no], rank, tp)).all()
        assert not reader.misses
    found = await survey(directory)
    assert statistics(found).pages == statistics(found).distinct_pages == 10 + 10 + 2
    assert await verify(directory, found) == []


async def test_what_two_sequences_share_is_stored_once(directory: ObjectStore) -> None:
    scope = SCOPES["full"]
    tier, one, other = tier_of(directory, scope), TOKENS, [*TOKENS[:22], *range(100, 118)]
    await store_span(tier, chain(scope, one), 0, 6)
    await store_span(tier, chain(scope, one), 6, 10)
    found = await tier.walk(chain(scope, other))
    assert [(each.span.start, each.pages) for each in found] == [(0, 5)]
    assert tier.hit(chain(scope, other), found, 40) == 20
    await store_span(tier, chain(scope, other), 5, 10)
    found = await tier.walk(chain(scope, other))
    assert [(each.span.start, each.pages) for each in found] == [(0, 5), (5, 5)]
    stats = statistics(await survey(directory))
    assert stats.pages == stats.distinct_pages == 15
    assert stats.bytes == 15 * scope.groups[0].page_bytes(scope.page_tokens)


async def test_tenants_share_nothing(directory: ObjectStore) -> None:
    for salt in ("", "other"):
        scope = replace(SCOPES["full"], salt=salt)
        tier = tier_of(directory, scope)
        assert await tier.walk(chain(scope, TOKENS)) == []
        await store_span(tier, chain(scope, TOKENS), 0, 10)
    stats = statistics(await survey(directory))
    assert (stats.tenants, stats.models, stats.pages, stats.distinct_pages) == (2, 1, 20, 20)


async def test_of_two_servers_that_write_equal_prefixes_at_once_one_is_kept(directory: ObjectStore) -> None:
    """At other TP sizes, with other cuts: what is found is whole, and the others' bytes are gone."""
    hashes = chain(EVERYTHING, TOKENS)
    tiers = [tier_of(directory, seed=seed) for seed in range(6)]
    cuts = [4, 4, 6, 6, 10, 10]
    published = await asyncio.gather(
        *(
            store_span(tier, hashes, 0, stop, tp=SIZES[i % 3])
            for i, (tier, stop) in enumerate(zip(tiers, cuts, strict=True))
        )
    )
    assert len({each.hashes for each in published}) == 1
    found = await survey(directory)
    stats = statistics(found)
    assert stats.spans == 1 and stats.unused_parts == 0
    assert stats.pages == stats.distinct_pages == 2 * published[0].stop + 1
    assert await verify(directory, found) == []


async def test_an_answer_that_was_lost_does_not_discard_what_it_published(directory: ObjectStore) -> None:
    tier, hashes = tier_of(directory), chain(EVERYTHING, TOKENS)
    span = await store_span(tier, hashes, 0, 4)
    assert await tier.publish(span) == span
    assert (await load_page(tier, hashes, 0, 0, 0, 1)).size


@pytest.mark.parametrize("scope", sorted(SCOPES))
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_hit_is_valid_in_every_group_and_the_longest(
    scope: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Spans are cut anywhere, and lack pages of windows and states: against the rules, said naively."""
    model, hashes = SCOPES[scope], chain(SCOPES[scope], TOKENS)
    cuts = sorted(data.draw(st.sets(st.integers(1, 10), min_size=1, max_size=4)))
    stored: list[set[int]] = [set() for _ in model.groups]

    async def run() -> tuple[int, int]:
        store = open_store(f"file://{tmp_path_factory.mktemp('kv')}", {})
        tier = tier_of(store, model)
        start = 0
        for stop in cuts:
            page_nos = []
            for g, group in enumerate(model.groups):
                pages = (
                    set(range(start, stop)) if g == 0 else data.draw(st.sets(st.integers(max(0, start - 1), stop - 1)))
                )
                pages -= stored[g]
                if group.is_state:
                    pages &= {stop - 1}
                stored[g] |= pages
                page_nos.append(sorted(pages))
            await store_span(tier, hashes, start, stop, page_nos=page_nos)
            start = stop
        cap = data.draw(st.integers(0, 40))
        found = await tier.walk(hashes)
        assert [each.span.stop for each in found] == cuts
        return tier.hit(hashes, found, cap), cap

    hit, cap = asyncio.run(run())

    def valid(pages: int) -> bool:
        for g, group in enumerate(model.groups):
            tokens = pages * model.page_tokens
            if group.is_state:
                needed = {pages - 1} if pages else set()
                if tokens % CHECKPOINT_TOKENS:
                    return False
            elif group.window:
                needed = set(range(max(0, tokens - (group.window - 1)) // model.page_tokens, pages))
                held = -(-(group.window - 1) // model.page_tokens)
                needed = set(range(max(0, pages - held), pages))
            else:
                needed = set(range(pages))
            if not needed <= stored[g]:
                return False
        return True

    longest = max(pages for pages in range(min(cuts[-1], cap // model.page_tokens) + 1) if valid(pages))
    assert hit == longest * model.page_tokens


# ---- what is not as it was written


async def two_spans(directory: ObjectStore) -> tuple[list[bytes], list[str], list[str]]:
    """Hashes, and the paths of spans and of parts."""
    hashes, tier = chain(EVERYTHING, TOKENS), tier_of(directory)
    spans = [await store_span(tier, hashes, 0, 4, tp=2), await store_span(tier, hashes, 4, 8, tp=2)]
    parts = [part.path for span in spans for share in span.shares for part in share.parts]
    return hashes, [span_path(EVERYTHING.place, span.hashes[0]) for span in spans], parts


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)


def older(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:8] + (VERSION - 1).to_bytes(4, "little") + data[12:])


def of_another_model(file: Path, directory: ObjectStore, tmp_path: Path, kind: str) -> None:
    scope = replace(EVERYTHING, weights="other")

    async def write() -> str:
        span = await store_span(tier_of(directory, scope), chain(scope, TOKENS), 0, 4, tp=2)
        return span_path(scope.place, span.hashes[0]) if kind == "span" else span.shares[0].parts[0].path

    other = asyncio.run(write())
    file.write_bytes(file_of(tmp_path, other).read_bytes())


DAMAGES = ("flipped bit", "truncated", "swapped", "older version", "another model", "missing")
CAUSES = {
    "flipped bit": Cause.CORRUPT,
    "truncated": Cause.TRUNCATED,
    "swapped": Cause.FOREIGN,
    "older version": Cause.VERSION,
    "another model": Cause.FOREIGN,
    "missing": Cause.ABSENT,
}


@pytest.mark.parametrize("kind", ["span", "part"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damage_is_a_miss_counted_by_cause_and_found_by_verify(
    damage: str, kind: str, directory: ObjectStore, tmp_path: Path
) -> None:
    hashes, spans, parts = asyncio.run(two_spans(directory))
    first, second = (spans[0], spans[1]) if kind == "span" else (parts[0], parts[5])
    file, other = file_of(tmp_path, first), file_of(tmp_path, second)
    if damage == "flipped bit":
        flip(file, len(file.read_bytes()) - 9)
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[:-9])
    elif damage == "swapped":
        one, two = file.read_bytes(), other.read_bytes()
        file.write_bytes(two)
        other.write_bytes(one)
    elif damage == "older version":
        older(file)
    elif damage == "another model":
        of_another_model(file, directory, tmp_path, kind)
    else:
        file.unlink()

    async def check() -> None:
        tier = tier_of(directory)
        found = await tier.walk(hashes)
        if kind == "span":
            assert found == [] and tier.hit(hashes, found, 40) == 0
            assert tier.misses == ({} if damage == "missing" else {CAUSES[damage]: 1})
        else:
            with pytest.raises(Missed) as caught:
                await load_page(tier, hashes, 0, 0, 0, 2)
            assert caught.value.cause is CAUSES[damage]
            assert tier.misses == {CAUSES[damage]: 1}
            assert await tier.walk(hashes) == [], "what is known to be damaged is not read again"
        result = {each.path: each.cause for each in await verify(directory, await survey(directory))}
        if damage == "missing" and kind == "span":
            assert result == {second: Cause.ABSENT}, "what follows a missing span cannot be found"
        else:
            assert result[first] is CAUSES[damage]
            lost = {second} if kind == "span" or damage == "swapped" else set()
            assert set(result) == {first} | lost

    asyncio.run(check())


@pytest.mark.parametrize("left", [0, 100, 1500, 5000])
async def test_a_part_that_ends_before_the_heads_that_are_read_is_truncated(
    left: int, directory: ObjectStore, tmp_path: Path
) -> None:
    """As after a loss of power. A store that was asked for what is not there any more has not failed."""
    hashes, tier = chain(EVERYTHING, TOKENS), tier_of(directory)
    span = await store_span(tier, hashes, 0, 4)
    file = file_of(tmp_path, span.shares[0].parts[0].path)
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(Missed) as caught:
        await load_page(tier, hashes, 0, 0, 3, 4)
    assert caught.value.cause is Cause.TRUNCATED
    assert await tier.walk(hashes) == [], "what is known to be damaged is not read again"
    assert not directory.breaker.failed_calls


@pytest.mark.parametrize("kind", ["span", "part"])
async def test_what_is_damaged_can_be_written_again(kind: str, directory: ObjectStore, tmp_path: Path) -> None:
    hashes, spans, parts = await two_spans(directory)
    flip(file_of(tmp_path, spans[0] if kind == "span" else parts[0]), 60)
    tier = tier_of(directory, seed=7)
    if kind == "part":
        with pytest.raises(Missed):
            await load_page(tier, hashes, 0, 0, 0, 2)
    assert await tier.walk(hashes) == []
    await store_span(tier, hashes, 0, 4)
    assert len(await tier.walk(hashes)) == 2
    assert (await load_page(tier, hashes, 0, 0, 0, 2) == rank_page(EVERYTHING, 0, hashes[0], 0, 2)).all()
    assert await verify(directory, await survey(directory)) == []


async def test_what_a_newer_version_wrote_stays(directory: ObjectStore, tmp_path: Path) -> None:
    hashes, [first, _], _ = await two_spans(directory)
    file = file_of(tmp_path, first)
    data = file.read_bytes()
    newer = data[:8] + (VERSION + 1).to_bytes(4, "little") + data[12:]
    file.write_bytes(newer)
    with pytest.raises(Exception, match="version"):
        await store_span(tier_of(directory, seed=7), hashes, 0, 4)
    assert file.read_bytes() == newer


@pytest.mark.parametrize(
    "fault",
    [s3_server.says_500, s3_server.ends_early, s3_server.cuts_bodies, s3_server.drips, s3_server.says_nothing_for(1.0)],
)
async def test_a_store_that_misbehaves_never_gives_other_bytes(s3: S3Server, fault: s3_server.Fault) -> None:
    store = open_store(s3.url, s3.options)
    hashes = chain(EVERYTHING, TOKENS)
    await store_span(tier_of(store), hashes, 0, 4)
    store._call_s, store._bytes_per_s = 0.5, 1e12
    found = await tier_of(store).walk(hashes)
    s3.fault = fault
    tier = tier_of(store)
    assert await tier.walk(hashes) == []
    [read] = tier.reads(found, 0, range(4), range(12))
    with pytest.raises(Missed) as caught:
        await tier.fetch(read)
    assert caught.value.cause in (Cause.FAILED, Cause.LATE, Cause.TRUNCATED, Cause.DEGRADED)
    assert sum(tier.misses.values()) == 2


async def test_a_long_prefix_takes_few_rounds(s3: S3Server) -> None:
    scope, tokens = SCOPES["full"], list(range(4 * 64))
    store, hashes = open_store(s3.url, s3.options), chain(scope, tokens)
    writer = tier_of(store, scope)
    for start in range(0, 64, 2):
        await store_span(writer, hashes, start, start + 2)
    reader, rounds = tier_of(store, scope), []
    gather = asyncio.gather

    def counted(*calls: object) -> object:
        rounds.append(len(calls))
        return gather(*calls)  # type: ignore[call-overload]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "gather", counted)
        assert len(await reader.walk(hashes)) == 32
    assert len(rounds) <= 5 and sum(rounds) == 32


async def test_reads_are_noted_once_in_a_while_and_failures_to_note_are_nobodys_concern(
    directory: ObjectStore, tmp_path: Path
) -> None:
    clock = [0.0]
    hashes = chain(EVERYTHING, TOKENS)
    await store_span(tier_of(directory), hashes, 0, 4)
    tier = StorageTier(directory, EVERYTHING, checkpoint_tokens=8, clock=lambda: clock[0])
    found = await tier.walk(hashes)
    note = file_of(tmp_path, read_path(EVERYTHING.place, hashes[0]))
    await tier.note_read(found)
    note.unlink()
    clock[0] = 59.0
    await tier.note_read(found)
    assert not note.exists()
    clock[0] = 61.0
    await tier.note_read(found)
    assert note.exists()
