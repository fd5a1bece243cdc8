"""A store that fails while conversations run: nobody's answer is wrong, fails or waits for it; an alarm says so, and ends.

One cluster goes through one fault after the other. Under each it reads what was stored before, and stores what is new.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from disagg.offload.store import CALL_S
from tests.cluster.cluster import Cluster
from tests.cluster.stored import (
    CLEAR_S,
    FAILURES,
    READ,
    SERVERS,
    check_all_answered,
    degraded,
    disagg,
    fill_pools,
    flags,
    misses,
    remember,
    sets_of,
    works,
)
from tests.cluster.talks import Talk, ask, hold
from tests.offload import s3_server as faults
from tests.offload.s3_server import S3Server


@dataclass(frozen=True)
class Fault:
    """made: while it is entered, the store has it. causes: of which at least one is counted as why something stored could not
    be had. spoils: requests that must have met it. alarm: whether it must be raised; else it may be."""

    made: Callable[[S3Server], AbstractContextManager[None]]
    causes: tuple[str, ...]
    spoils: tuple[str, ...]
    alarm: bool = True


@contextmanager
def spoiling(s3: S3Server, fault: faults.Fault) -> Iterator[None]:
    s3.fault = fault
    try:
        yield
    finally:
        s3.fault = None


@contextmanager
def hanging(s3: S3Server) -> Iterator[None]:
    released = threading.Event()
    with spoiling(s3, faults.says_nothing_until(released)):
        try:
            yield
        finally:
            released.set()


@contextmanager
def vanished(s3: S3Server) -> Iterator[None]:
    s3.lose_bucket()
    try:
        yield
    finally:
        s3.make_bucket()


FAULTS = {
    "500s": Fault(lambda s3: spoiling(s3, faults.says_500), ("failed", "degraded"), ("GET spans", "PUT parts")),
    "silence": Fault(hanging, ("late", "degraded"), ("GET spans", "PUT parts")),
    "bodies that end early": Fault(
        lambda s3: spoiling(s3, faults.ends_early), ("failed", "truncated", "degraded"), ("GET spans",), alarm=False
    ),
    "half of each span": Fault(
        lambda s3: spoiling(s3, faults.only("spans", faults.cuts_bodies)), ("truncated",), ("GET spans",), alarm=False
    ),
    "half of each part": Fault(
        lambda s3: spoiling(s3, faults.only("parts", faults.cuts_bodies)), ("truncated",), ("GET parts",), alarm=False
    ),
    "bodies that drip": Fault(
        lambda s3: spoiling(s3, faults.drips), ("late", "failed", "degraded"), ("GET spans",), alarm=False
    ),
    "a bucket that vanishes": Fault(vanished, ("failed", "degraded"), ()),
}


# ---- S3


def campaign(
    tmp_path: Path, model: Path, talks: list[Talk], rounds: list[list[str]], most_silent_s: float, **options: Any
) -> None:
    """rounds: faults, of which one that loses what is stored is the last. most_silent_s: less than what the
    store's client waits for an answer, for which no stream may wait.
    """
    with faults.s3_server() as s3:
        told = {**s3.options, **options}
        with Cluster(tmp_path / "run", *flags(model, s3.url, **told)) as cluster:
            for number, names in enumerate(rounds):
                heard = remember(cluster, talks, [f"{name}, round {number}" for name in names])
                print(f"without faults: silent for {max(each.silence_s for each in heard):.2f} s")
                for name in names:
                    through(cluster, s3, talks, name, f"{name}, round {number}", most_silent_s)
            check_all_answered(cluster)
            cluster.check_adds_up()
        status, found = disagg("cache", "verify", "--storage", s3.url, *sets_of(told))
        assert (status, found["damage"]) == (0, []) and found["parts"], found


def through(cluster: Cluster, s3: S3Server, talks: list[Talk], name: str, salt: str, most_silent_s: float) -> None:
    """One fault, from one end to the other. What is stored under this salt is read, partly while it lasts."""
    fault = FAULTS[name]
    before, spoiled = misses(cluster), s3.spoiled.copy()
    with fault.made(s3):
        heard = hold(cluster, [talk[-1:] for talk in talks[:-1]], salt)
        heard += hold(cluster, talks, f"new in {salt}")
        if fault.alarm:
            cluster.wait(lambda: len(degraded(cluster)) == len(SERVERS), CLEAR_S, f"an alarm for {name}")
            told = disagg("status", "--http", cluster.http)[1]["servers"]
            assert [each["offload"]["store"] for each in told] == ["degraded"] * len(SERVERS)
        met = s3.spoiled - spoiled
    silent = max(each.silence_s for each in heard)
    print(f"{name}: silent for {silent:.2f} s, first tokens within {max(h.first_s for h in heard):.2f} s, {dict(met)}")
    assert all(met[kind] for kind in fault.spoils), met
    cluster.wait(lambda: works(cluster), CLEAR_S, f"the end of the alarm for {name}")
    cluster.wait(lambda: any(misses(cluster).get(c, 0) > before.get(c, 0) for c in fault.causes), 60, "counted misses")
    assert silent < most_silent_s, f"{name}: a stream was silent for {silent:.2f} s"
    # It is used again: what the fault hid is found, if it is not lost, and what is new is stored.
    fill_pools(cluster, talks, f"after {salt}")
    read = cluster.metrics("prefill-0").get(READ, 0)
    ask(cluster, talks[-1][-1], salt)
    assert fault.made is vanished or cluster.metrics("prefill-0").get(READ, 0) > read, f"nothing is read after {name}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_store_that_fails_costs_no_answer_and_is_used_again_when_it_works(
    tmp_path: Path, talking_model: Path, talks: list[Talk]
) -> None:
    names = ["500s", "silence", "half of each part", "a bucket that vanishes"]
    campaign(tmp_path, talking_model, talks, [names], 3.0, timeout=3.0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_store_that_fails_in_every_way_again_and_again_costs_no_answer(
    tmp_path: Path, talking_model: Path, talks: list[Talk]
) -> None:
    """With the deadlines and retries that everybody has, who sets none."""
    campaign(
        tmp_path,
        talking_model,
        talks,
        [list(FAULTS), ["silence", "500s", "a bucket that vanishes"], list(FAULTS)],
        CALL_S,
        max_retries=2,
    )


# ---- a full disk


@contextmanager
def full(directory: Path) -> Iterator[Path]:
    """All that is free is taken by one file."""
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass
    assert os.statvfs(directory).f_bfree == 0
    try:
        yield filler
    finally:
        filler.unlink()


@pytest.mark.timeout(900)
def test_a_full_disk_costs_no_answer_and_is_written_again_when_it_has_room(
    kept_on_disk: tuple[Cluster, Path], talks: list[Talk]
) -> None:
    cluster, directory = kept_on_disk
    if not directory.is_mount():
        pytest.skip("no small disk can be mounted here")
    heard = remember(cluster, talks, ["before it is full"])
    print(f"with room: silent for {max(each.silence_s for each in heard):.2f} s")
    failures = cluster.metrics("decode-0")[FAILURES]
    with full(directory):
        heard = hold(cluster, talks, "on a full disk")
        cluster.wait(lambda: "decode-0" in degraded(cluster), CLEAR_S, "an alarm")
        heard += hold(cluster, talks, "on a full disk, with an alarm")
        assert os.statvfs(directory).f_bfree == 0, "what could not be written takes no room, and leaves none"
        assert "decode-0" in degraded(cluster)
    silent = max(each.silence_s for each in heard)
    print(f"full: silent for {silent:.2f} s, first tokens within {max(each.first_s for each in heard):.2f} s")
    assert cluster.metrics("decode-0")[FAILURES] > failures
    assert silent < CALL_S
    cluster.wait(lambda: works(cluster), CLEAR_S, "the end of the alarm")
    fill_pools(cluster, talks, "after it was full")
    read = cluster.metrics("prefill-0").get(READ, 0)
    hold(cluster, [talk[-1:] for talk in talks], "before it is full")
    cluster.wait(lambda: cluster.metrics("prefill-0").get(READ, 0) > read, 30, "the count of what was read")
    check_all_answered(cluster)
    cluster.check_adds_up()
    cluster.wait_offloaded()
    status, found = disagg("cache", "verify", "--storage", f"file://{directory}/kv")
    assert (status, found["damage"]) == (0, []), found
