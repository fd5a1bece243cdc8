"""Stored KV that is not what it should be: a miss that is counted by its cause, found by `cache verify`, and never text.

One conversation for each kind of damage, all in one store. Its second span is damaged, so that the first may still be of use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from disagg.memory.hashing import chain_root
from disagg.messages.layout import LayerGroup
from disagg.messages.stored import Span
from disagg.offload.keys import Scope
from disagg.offload.objects import decode_span
from disagg.offload.store import open_store
from disagg.offload.tier import StorageTier
from tests.cluster.cluster import Cluster
from tests.cluster.stored import PAGE, check_all_answered, disagg, misses, remember
from tests.cluster.talks import Talk, ask, hold
from tests.offload.pages import chain, store_span

VERSION_AT = 8  # of an object's frame
TALK = 2  # the longest: it has spans enough
Damage = Callable[["Kept"], dict[Path, str]]


class Kept:
    """What is stored under one salt. spans: in the order of the sequence."""

    def __init__(self, store: Path, salt: str) -> None:
        self.store = store
        tenant = chain_root("tenant", salt).hex()[:16]
        files = [file for file in store.glob(f"v1/*/{tenant}/spans/*/*") if file.is_file()]
        self.spans = sorted(files, key=lambda file: self.span(file).start)

    def span(self, file: Path) -> Span:
        return decode_span(file.read_bytes())

    def part(self, number: int) -> Path:
        """The only one of a span: there is one group, and one rank wrote it."""
        ((part,),) = (share.parts for share in self.span(self.spans[number]).shares)
        return self.store / part.path


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-len(data) // 4] ^= 1
    file.write_bytes(data)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def age(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[VERSION_AT : VERSION_AT + 4] = bytes(4)
    file.write_bytes(data)


def swap(a: Path, b: Path) -> None:
    was = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(was)


def one(file: Path, how: Callable[[Path], None], cause: str) -> dict[Path, str]:
    how(file)
    return {file: cause}


def swapped(a: Path, b: Path) -> dict[Path, str]:
    swap(a, b)
    return {a: "foreign", b: "foreign"}


def of_another_model(kept: Kept, *, part: bool) -> dict[Path, str]:
    """As a server with other weights would have stored pages of the same shape."""
    ours = kept.span(kept.spans[1])
    group = LayerGroup("full", (0, 1, 2), 2, 16, "float32")
    scope = Scope("other weights", "float32", PAGE, (group,), "other tenant")
    tier = StorageTier(open_store(f"file://{kept.store}.other", {}), scope, checkpoint_tokens=PAGE)
    hashes = chain(scope, range(3, 3 + PAGE * ours.stop))
    theirs = Kept(Path(f"{kept.store}.other"), scope.salt)
    asyncio.run(store_span(tier, hashes, ours.start, ours.stop))
    theirs = Kept(theirs.store, scope.salt)
    at, there = (kept.part(1), theirs.part(0)) if part else (kept.spans[1], theirs.spans[0])
    at.write_bytes(there.read_bytes())
    return {at: "foreign"}


DAMAGE: dict[str, Damage] = {
    "a flipped bit of KV": lambda kept: one(kept.part(1), flip, "corrupt"),
    "a flipped bit of a span": lambda kept: one(kept.spans[1], flip, "corrupt"),
    "a truncated part": lambda kept: one(kept.part(1), truncate, "truncated"),
    "a truncated span": lambda kept: one(kept.spans[1], truncate, "truncated"),
    "two parts swapped": lambda kept: swapped(kept.part(1), kept.part(2)),
    "two spans swapped": lambda kept: swapped(kept.spans[1], kept.spans[2]),
    "a part of an older version": lambda kept: one(kept.part(1), age, "version"),
    "a span of an older version": lambda kept: one(kept.spans[1], age, "version"),
    "a part of another model": lambda kept: of_another_model(kept, part=True),
    "a span of another model": lambda kept: of_another_model(kept, part=False),
    "a part that is gone": lambda kept: one(kept.part(1), Path.unlink, "absent"),
}


@pytest.mark.timeout(300)
def test_damage_is_found_by_verify_is_a_miss_by_its_cause_and_changes_no_answer(
    kept_on_disk: tuple[Cluster, Path], talks: list[Talk]
) -> None:
    cluster, directory = kept_on_disk
    store, talk = directory / "kv", talks[TALK]
    url = f"file://{store}"
    remember(cluster, [talk], list(DAMAGE))
    remember(cluster, talks, ["fills the pools 1", "fills the pools 2"])  # so that all else is in storage alone
    status, found = disagg("cache", "verify", "--storage", url)
    assert (status, found["damage"]) == (0, []) and found["parts"]
    damaged = {
        salt: {str(file.relative_to(store)): cause for file, cause in harm(Kept(store, salt)).items()}
        for salt, harm in DAMAGE.items()
    }
    check_verify_finds(url, damaged)
    for salt, files in damaged.items():
        before = misses(cluster)
        heard = ask(cluster, talk[-1], salt)

        def counted(before: dict[str, float] = before) -> dict[str, float]:
            return {cause: n - before.get(cause, 0) for cause, n in misses(cluster).items() if n > before.get(cause, 0)}

        cluster.wait(counted, 30, f"a counted miss for {salt}")
        assert set(counted()) == set(files.values()), f"{salt} counts {counted()}"
        first = Kept(store, salt)
        assert heard.cached_tokens <= first.span(first.spans[0]).stop * PAGE, f"{salt}: {heard.cached_tokens} cached"
    check_all_answered(cluster)
    cluster.check_adds_up()
