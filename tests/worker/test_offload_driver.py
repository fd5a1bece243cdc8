"""What a rank's offload refuses, in which order it reports copies, and what it says of itself."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from disagg.messages.control import OffloadOpen
from disagg.messages.stored import MAX_PAGES, PartRead, PartRef, Share, Span
from disagg.messages.tiers import (
    CopiedIn,
    CopiedOut,
    CopyIn,
    CopyOut,
    GroupParts,
    PageMove,
    PartsRead,
    ReadParts,
    TierCommand,
    WriteParts,
)
from disagg.offload.keys import Scope
from disagg.types.errors import ConfigError, ProtocolError
from disagg.worker.offload_driver import OffloadDriver
from tests.offload.pages import FULL, PAGE_TOKENS, SCOPES, STATE, WINDOW
from tests.worker.offload_ranks import HOST_LARGE, Rank, opening
from tests.worker.rank_pools import layout_of, pool_of

SCOPE = SCOPES["everything"]
NAME = bytes(32)
NOTHING: tuple[Any, ...] = ((), (), ())


@pytest.fixture
def rank() -> Any:
    made = Rank(SCOPE)
    yield made
    made.close()


def move(group: int = 0, gpu_page: int = 0, host_page: int = 0) -> PageMove:
    return PageMove(group, gpu_page, host_page)


def test_copies_are_made_and_reported_in_order(rank: Rank) -> None:
    there = rank.pool.views[0].bytes.clone()
    rank.tell(
        CopyOut(3, (move(0, 1, 5), move(0, 2, 6), move(0, 7, 0))),
        CopyIn(0, (move(0, 9, 5), move(0, 10, 6))),
        CopyOut(4, ()),
        CopyOut(9, (move(0, 9, 8),)),
    )
    reports = rank.reports(4)
    assert [(type(each), each.last) for each in reports if isinstance(each, CopiedOut | CopiedIn)] == [
        (CopiedOut, 3),
        (CopiedIn, 0),
        (CopiedOut, 4),
        (CopiedOut, 9),
    ]
    page_bytes = rank.pool.views[0].page_bytes
    assert [each.nbytes for each in reports] == [3 * page_bytes, 2 * page_bytes, 0, page_bytes]
    assert all(0 <= each.seconds < 20 for each in reports)
    for page, was in {9: 1, 10: 2, 7: 7}.items():
        assert torch.equal(rank.pool.views[0].bytes[page], there[was])
    for page, was in {5: 1, 6: 2, 0: 7, 8: 1}.items():
        assert torch.equal(torch.from_numpy(rank.host(0, page)), there[was])


SPAN = Span(NAME, NAME, 0, (NAME,), (), tuple(Share(NAME, 8, 12, (0,), ()) for _ in range(3)))
REF = PartRef("path", 2, 6, 1)


def reading(group: int = 0, start: int = 2, stop: int = 6, span: Span = SPAN) -> ReadParts:
    return ReadParts(0, "", (PartRead(span, group, REF, start, stop, (0,)),), NOTHING)


REFUSED: dict[str, TierCommand] = {
    "a group too far": CopyOut(0, (move(), move(group=3))),
    "a group before": CopyIn(0, (move(group=-1),)),
    "a page of the device too far": CopyOut(0, (move(), move(0, 1 << 40, 1))),
    "a page of the device before": CopyOut(0, (move(gpu_page=-1),)),
    "a page of the host too far": CopyIn(0, (move(), move(0, 1, 1 << 40))),
    "a page of the host before": CopyIn(0, (move(host_page=-1),)),
    "two to one place out": CopyOut(0, (move(0, 0, 1), move(0, 1, 1))),
    "two to one place in": CopyIn(0, (move(0, 1, 0), move(0, 1, 1))),
    "too few groups": WriteParts(0, "", (GroupParts((), ()),)),
    "a page of the host": WriteParts(0, "", (GroupParts((NAME,), (1 << 40,)), GroupParts((), ()), GroupParts((), ()))),
    "names": WriteParts(0, "", (GroupParts((NAME,), ()), GroupParts((), ()), GroupParts((), ()))),
    "a name": WriteParts(0, "", (GroupParts((b"x",), (0,)), GroupParts((), ()), GroupParts((), ()))),
    "too many": WriteParts(
        0, "", (GroupParts((NAME,) * (MAX_PAGES + 1), (0,) * (MAX_PAGES + 1)), GroupParts((), ()), GroupParts((), ()))
    ),
    "too few places": ReadParts(0, "", (), ((),)),
    "a place": ReadParts(0, "", (), (((0, -1),), (), ())),
    "a page number twice": ReadParts(0, "", (), (((4, 0), (4, 1)), (), ())),
    "a page twice": ReadParts(0, "", (), (((4, 0), (5, 0)), (), ())),
    "a part of no group": reading(group=3),
    "heads that the part has not": reading(start=1),
    "no heads": reading(start=4, stop=4),
    "a span of another model": reading(span=replace(SPAN, shares=())),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_names_nothing_that_is_there_is_refused_before_anything_is_done(name: str, rank: Rank) -> None:
    before, host_before = rank.pool.bytes.clone(), rank.driver._host.bytes.clone()
    with pytest.raises(ProtocolError):
        rank.tell(REFUSED[name])
    assert rank.reports(1, timeout_s=0.05) == []
    assert torch.equal(rank.pool.bytes, before) and torch.equal(rank.driver._host.bytes, host_before)


def test_heads_of_other_ranks_are_not_read() -> None:
    rank = Rank(SCOPE, rank=1, tp=2)  # it has heads 6 to 11
    with pytest.raises(ProtocolError, match="heads 2 to 5, of 6 to 5, are to be read"):
        rank.tell(reading())
    rank.close()


@pytest.mark.parametrize("kind", [CopyOut, CopyIn])
def test_operations_of_a_kind_rise(kind: Any, rank: Rank) -> None:
    rank.tell(kind(4, ()), ReadParts(0, "", (), NOTHING))
    with pytest.raises(ProtocolError, match=rf"{kind.__name__} 4 came after 4"):
        rank.tell(kind(4, ()))


def test_a_copy_that_fails_ends_the_worker(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(rank.driver._copier, "begin", fail)
    rank.tell(CopyOut(0, (move(),)))
    with pytest.raises(RuntimeError, match="copies: RuntimeError: an illegal memory access"):
        rank.reports(1)


class Slow:
    """Copies that are over when they are told so, as a device's are."""

    def __init__(self) -> None:
        self.said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.all_told = threading.Event()  # before the first one begins
        self.may_end = [threading.Event() for _ in range(4)]
        self._begun = 0

    def begin(self, *_: Any, **__: Any) -> Callable[[], None]:
        assert self.all_told.wait(20)
        number, self._begun = self._begun, self._begun + 1
        self.said.put(f"{number} begun")

        def wait() -> None:
            assert self.may_end[number].wait(20)
            self.said.put(f"{number} over")

        return wait

    def hear(self, count: int) -> list[str]:
        return [self.said.get(timeout=20) for _ in range(count)]


def test_two_copies_are_begun_at_once_and_each_is_reported_when_it_is_over(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow()
    monkeypatch.setattr(rank.driver, "_copier", slow)
    rank.tell(*(CopyOut(op, (move(0, op, op),)) for op in range(4)))
    slow.all_told.set()
    assert slow.hear(2) == ["0 begun", "1 begun"]
    assert rank.reports(1, timeout_s=0.05) == [] and slow.said.empty(), "no third one, and none is over"
    slow.may_end[0].set()
    assert slow.hear(2) == ["0 over", "2 begun"] and [each.last for each in rank.reports(1)] == [0]
    rank.driver.close()
    for each in slow.may_end:
        each.set()
    assert slow.hear(4) == ["1 over", "3 begun", "2 over", "3 over"]
    assert [each.last for each in rank.reports(3)] == [1, 2, 3], "what was told before the end is done"


def test_what_a_copy_took_is_without_the_one_before_it(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow()
    monkeypatch.setattr(rank.driver, "_copier", slow)
    rank.tell(CopyOut(0, (move(0, 0, 0),)), CopyOut(1, (move(0, 1, 1),)))
    slow.all_told.set()
    assert slow.hear(2) == ["0 begun", "1 begun"]
    time.sleep(0.4)
    for each in slow.may_end:
        each.set()
    first, second = rank.reports(2)
    assert first.seconds >= 0.4 > second.seconds


def test_what_is_open_is_said(rank: Rank) -> None:
    nbytes = HOST_LARGE * layout_of(SCOPE, 1).large_bytes
    assert rank.driver.opened() == OffloadOpen(0, nbytes, "plain: there is no GPU")
    assert rank.ask(ReadParts(0, "", (), NOTHING), PartsRead).error
    assert rank.driver.describe() == (
        f"plain: there is no GPU, 0 copies made, 0 waiting; host pool of {nbytes} bytes; no storage"
    )


def test_windows_that_are_kept_whole_are_stored_as_they_are_kept() -> None:
    """The pool's pages are the same."""
    kept = Scope("weights", "float32", PAGE_TOKENS, (FULL, WINDOW.keeping_all(), STATE))
    driver = OffloadDriver(0, 1, opening(kept, layout_of(SCOPE, 1)), pool_of(SCOPE, 1), lambda: None)
    driver.close()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"num_large": 0}, "host pool of 0 large pages"),
        ({"num_large": 1 << 50}, "bytes of host memory for each rank cannot be had"),
        ({"url": "nfs://there"}, "must begin with one of"),
        ({"url": "s3://bucket", "options": {"colour": "red"}}, "storage.options.colour is not an option"),
    ],
)
def test_what_cannot_work_is_a_configuration_error(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        OffloadDriver(0, 1, opening(SCOPE, layout_of(SCOPE, 1), **changed), pool_of(SCOPE, 1), lambda: None)
