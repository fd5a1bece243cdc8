"""Stored KV that is not what it should be: a miss that is counted by its cause, found by `cache verify`, and never text.

One conversation for each kind of damage, all in one store. Its second span is damaged, so that the first may still be of use.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
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
from tests.cluster.stored import PAGE, check_all_answered, disagg, fill_pools, legs, misses, remember
from tests.cluster.talks import Talk, ask, hold
from tests.offload.pages import chain, of_version, store_span

TALK = 2  # the longest: it has spans enough
Damage = Callable[["Kept"], dict[Path, str]]


class Kept:
    """What is stored under one salt. spans: in the order of the sequence."""

    def __init__(self, store: Path, salt: str) -> None:
        self.store = store
        files = store.glob(f"v1/*/{tenant_of(salt)}/spans/*/*")
        self.spans = sorted(files, key=lambda file: self.span(file).start)

    def span(self, file: Path) -> Span:
        return decode_span(file.read_bytes())

    def part(self, number: int) -> Path:
        """The only one of a span: there is one group, and one rank wrote it."""
        ((part,),) = (share.parts for share in self.span(self.spans[number]).shares)
        return self.store / part.path


def tenant_of(salt: str) -> str:
    """The name of its folder."""
    return chain_root("tenant", salt).hex()[:16]


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-len(data) // 4] ^= 1
    file.write_bytes(data)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def age(file: Path) -> None:
    file.write_bytes(of_version(file.read_bytes(), 0))


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
    asyncio.run(store_span(tier, hashes, ours.start, ours.stop))
    theirs = Kept(Path(f"{kept.store}.other"), scope.salt)
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


@pytest.mark.timeout(900)
def test_damage_is_found_by_verify_is_a_miss_by_its_cause_and_changes_no_answer(
    kept_on_disk: tuple[Cluster, Path], talks: list[Talk]
) -> None:
    cluster, directory = kept_on_disk
    store, talk = directory / "kv", talks[TALK]
    url = f"file://{store}"
    remember(cluster, [talk], list(DAMAGE))
    fill_pools(cluster, talks, "before there is damage")
    status, found = disagg("cache", "verify", "--storage", url)
    assert (status, found["damage"]) == (0, []) and found["parts"]
    whole = {salt: Kept(store, salt) for salt in DAMAGE}
    known = {salt: kept.span(kept.spans[0]).stop * PAGE for salt, kept in whole.items()}
    damaged = {salt: harm(whole[salt]) for salt, harm in DAMAGE.items()}
    check_verify_finds(store, damaged)
    for salt, files in damaged.items():
        before, ended = misses(cluster), legs(cluster)
        heard = ask(cluster, talk[-1], salt)

        def told(ended: dict[str, float] = ended) -> bool:
            return all(count > ended[name] for name, count in legs(cluster).items())

        def counted(before: dict[str, float] = before) -> dict[str, float]:
            return {cause: n - before.get(cause, 0) for cause, n in misses(cluster).items() if n > before.get(cause, 0)}

        # All that both servers missed, so that none of it counts for the next salt.
        cluster.wait(told, 120, f"what both servers tell of {salt}")
        cluster.wait(counted, 120, f"a counted miss for {salt}")
        assert set(counted()) == set(files.values()), f"{salt} counts {counted()}"
        assert heard.cached_tokens <= known[salt], f"{salt}: {heard.cached_tokens} tokens are cached"
    check_all_answered(cluster)
    cluster.check_adds_up()
    others = {salt for salt, files in damaged.items() if "version" in files.values()}
    for salt in set(DAMAGE) - others:
        ask(cluster, talk[-1], salt)

    def mended() -> bool:
        """What was damaged is stored again, but for what another version may have written."""
        told = disagg("cache", "verify", "--storage", url)[1]["damage"]
        return all(any(tenant_of(salt) in each["path"] for salt in others) for each in told)

    cluster.wait(mended, 180, "all that is damaged to be stored again")
    cluster.wait_offloaded()  # what is being written is not whole yet, for whoever verifies
    assert disagg("cache", "gc", "--storage", url)[0] == 0
    assert all(file.exists() for salt in others for file in damaged[salt])
    for salt in others:  # what it cannot mend, an operator removes: here with the tenant's whole folder
        for folder in store.glob(f"v1/*/{tenant_of(salt)}"):
            shutil.rmtree(folder)
    status, found = disagg("cache", "verify", "--storage", url)
    assert (status, found["damage"]) == (0, []) and found["parts"]


def check_verify_finds(store: Path, damaged: dict[str, dict[Path, str]]) -> None:
    """All that is damaged, and otherwise only what nobody can find because of that."""
    status, found = disagg("cache", "verify", "--storage", f"file://{store}")
    assert status == bool(found["damage"])
    told = {(store / each["path"], each["cause"]) for each in found["damage"]}
    meant = {each for files in damaged.values() for each in files.items()}
    assert meant <= told, meant - told
    others = [each for each in found["damage"] if (store / each["path"], each["cause"]) not in meant]
    assert all("nobody can find it" in each["why"] for each in others), others


@pytest.mark.timeout(900)
def test_gc_keeps_the_budget_while_servers_read_and_write(
    kept_on_disk: tuple[Cluster, Path], talks: list[Talk]
) -> None:
    cluster, directory = kept_on_disk
    url, salts = f"file://{directory}/kv", [f"under gc {number}" for number in range(4)]
    remember(cluster, talks, salts)
    whole_bytes = disagg("cache", "stats", "--storage", url)[1]["object_bytes"]
    ended = threading.Event()

    def go_on() -> int:
        rounds = 0
        while not ended.is_set() or not rounds:
            hold(cluster, talks, salts[rounds % len(salts)])
            hold(cluster, talks, f"new under gc {rounds}")
            rounds += 1
        return rounds

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(go_on)
        try:
            for tenths in (8, 6, 4):  # far above the parts of spans that are about to be published, which stay
                budget = whole_bytes * tenths // 10
                status, done = disagg("cache", "gc", "--storage", url, "--budget", str(budget))
                assert status == 0 and done["left_bytes"] <= budget == done["budget_bytes"], done
                assert done["spans"], "there was something to be removed"
        finally:
            ended.set()
        print(f"{2 * reader.result()} rounds of talks while the store shrank from {whole_bytes} bytes")
    check_all_answered(cluster)
    cluster.check_adds_up()
    cluster.wait_offloaded()  # else the last of it is stored when the budget has been kept
    budget = whole_bytes * 3 // 10
    assert disagg("cache", "gc", "--storage", url, "--budget", str(budget))[0] == 0
    assert disagg("cache", "stats", "--storage", url)[1]["object_bytes"] <= budget
    check_verify_finds(directory / "kv", {})
    hold(cluster, talks, salts[0])
