"""A GPU, ranks with host memory, and a store, each kept naively, that do what the offload manager says and check all of it.

What is in a page is its name: (group, hash). So whoever reads a page can say whether it is the right one, and a page that was
given up too early, copied into twice, or read before it was written is noticed where it happens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from disagg.memory.groups import GroupSpec
from disagg.memory.hashing import chain_root, extend_hashes
from disagg.memory.layout import PoolLayout, pool_layout
from disagg.messages.layout import GroupKind
from disagg.offload.host import HostPool
from disagg.offload.instructions import Beyond, Copy, Discard, GpuPage, Instruction, Pin, Publish, Unpin, Upload
from disagg.offload.manager import OffloadManager
from disagg.offload.rules import offload_rules

PAGE_TOKENS, CHECKPOINT_TOKENS = 2, 4
ROOT = chain_root("world")
FULL = GroupSpec("full", GroupKind.FULL, 12)
NARROW = GroupSpec("narrow", GroupKind.WINDOW, 12, window_tokens=3)
WIDE = GroupSpec("wide", GroupKind.WINDOW, 4, window_tokens=9)
STATE = GroupSpec("state", GroupKind.STATE, 24)
MODELS = {
    "full": (FULL,),
    "full and windows": (FULL, NARROW, WIDE),
    "full and state": (FULL, STATE),
    "windows and state": (NARROW, STATE),
    "everything": (FULL, WIDE, STATE),
}

Name = tuple[int, bytes]  # (group, hash)
NOTHING: Name = (-1, b"")


def layout_of(model: str) -> PoolLayout:
    return pool_layout(MODELS[model], PAGE_TOKENS, CHECKPOINT_TOKENS)


@dataclass(eq=False)
class Running:
    """tokens: the prompt and what was sampled; the last one sampled is not written. tables: by group, pages by number."""

    name: str
    tokens: list[int]
    prompt_tokens: int
    tables: list[dict[int, int]]
    hashes: list[bytes] = field(default_factory=list)
    written: int = 0

    @property
    def may_write(self) -> int:
        return self.prompt_tokens if len(self.tokens) == self.prompt_tokens else len(self.tokens) - 1


class World:
    """manager: of the class under test. host_large: large pages of the host. conflicts etc. are played by `tell`."""

    def __init__(
        self,
        model: str,
        *,
        stride_tokens: int = 4,
        ranks: int = 2,
        host_large: int = 64,
        storage: bool = True,
        lingering: int = 0,
        manager: Callable[..., OffloadManager] = OffloadManager,
        host: Callable[..., HostPool] = HostPool,
    ) -> None:
        self.rules = offload_rules(layout_of(model), stride_tokens)
        self.groups = range(len(MODELS[model]))
        self.kinds = [group.kind for group in MODELS[model]]
        self.manager = manager(
            self.rules,
            lambda layout, gone: host(layout, host_large, gone),
            ranks=ranks,
            storage=storage,
            most_uploads=3,
            most_lingering=lingering,
        )
        self.storing = storage
        self.ranks = range(ranks)
        self.sequences: dict[str, Running] = {}
        self.gpu: dict[int, Name] = {}  # by page: what is in it
        self.holders: Counter[int] = Counter()
        self.pins: Counter[int] = Counter()
        self.released: Counter[int] = Counter()  # how often each page was let go of by its sequence
        self.host: list[dict[tuple[int, int], Name]] = [{} for _ in self.ranks]  # by rank, group and page
        self.copies: list[Copy] = []
        self.copied = [0 for _ in self.ranks]  # operations that a rank has made
        self.uploads: dict[int, Upload] = {}
        self.uploaded = [0 for _ in self.ranks]
        self.failing: list[set[int]] = [set() for _ in self.ranks]
        self.to_publish: list[int] = []
        self.discarded: set[int] = set()
        self.published: dict[bytes, tuple[bytes, ...]] = {}  # by first hash: the pages that can be found
        self.before: dict[bytes, bytes] = {}  # by hash: of the page before, of pages that can be found
        self.stored: Counter[Name] = Counter()
        self.pages: dict[bytes, tuple[Name, ...]] = {}  # by first hash: what can be read there
        self.points: set[bytes] = set()  # the last pages of spans
        self.seen: Counter[str] = Counter()
        self.asked: dict[int, list[bytes]] = {}  # hashes of what has ended, of which storage has yet to say what it has
        self.num_asked = 0
        self.to_be_stored: list[list[bytes]] = []  # of sequences that may go there

    # ---- sequences

    def begin(self, name: str, tokens: Sequence[int], *, to_storage: bool = True) -> None:
        sequence = Running(name, list(tokens), len(tokens), [{} for _ in self.groups])
        extend_hashes(sequence.hashes, ROOT, sequence.tokens, PAGE_TOKENS)
        self.sequences[name] = sequence
        if to_storage:
            self.to_be_stored.append(sequence.hashes)
        self.manager.begin(name, ROOT, sequence.hashes, sequence.prompt_tokens, to_storage=to_storage)

    def sample(self, name: str, token: int) -> None:
        sequence = self.sequences[name]
        sequence.tokens.append(token)
        extend_hashes(sequence.hashes, ROOT, sequence.tokens, PAGE_TOKENS)

    def write(self, name: str, tokens: int) -> None:
        """So many tokens more get their KV, as far as there are some without, up to the next checkpoint."""
        sequence = self.sequences[name]
        stop = min(sequence.may_write, sequence.written + tokens)
        if any(kind is GroupKind.STATE for kind in self.kinds):
            stop = min(stop, (sequence.written // CHECKPOINT_TOKENS + 1) * CHECKPOINT_TOKENS)
        if stop <= sequence.written:
            return
        for g in self.groups:
            table = sequence.tables[g]
            if self.kinds[g] is GroupKind.STATE:
                if stop % CHECKPOINT_TOKENS == 0:
                    self._have(table, g, stop // PAGE_TOKENS - 1, sequence)
                continue
            for page_no in range(sequence.written // PAGE_TOKENS, -(-stop // PAGE_TOKENS)):
                if page_no not in table:
                    table[page_no] = self._new_page()
                if (page_no + 1) * PAGE_TOKENS <= stop:
                    self.gpu[table[page_no]] = g, sequence.hashes[page_no]
        sequence.written = stop
        self.do(self.manager.progress(name, stop, self.view(name)))
        self._leave_windows(sequence)

    def _have(self, table: dict[int, int], g: int, page_no: int, sequence: Running) -> None:
        table[page_no] = self._new_page()
        self.gpu[table[page_no]] = g, sequence.hashes[page_no]

    def _leave_windows(self, sequence: Running) -> None:
        """What the model does not need any more is let go of; of states all but the newest checkpoint."""
        full = sequence.written // PAGE_TOKENS
        for g in self.groups:
            if self.kinds[g] is GroupKind.FULL:
                continue
            least = self.rules.needed(g, self.rules.last_point(full) if self.kinds[g] is GroupKind.STATE else full)
            for page_no in [each for each in sequence.tables[g] if least and each < least.start]:
                self._let_go(sequence.tables[g].pop(page_no))

    def view(self, name: str) -> Callable[[int, int], int | None]:
        sequence = self.sequences[name]
        return lambda g, page_no: sequence.tables[g].get(page_no)

    def finish(self, name: str, *, tail: bool = True, asked: bool = False) -> None:
        """asked: what storage has of it comes later, by `answer`."""
        sequence = self.sequences.pop(name)
        view = lambda g, page_no: sequence.tables[g].get(page_no)  # noqa: E731
        number = 0
        if asked:
            self.num_asked += 1
            self.asked[number := self.num_asked] = sequence.hashes
        self.do(self.manager.finish(name, sequence.written, view, tail=tail, asked=number))
        for table in sequence.tables:
            for page in table.values():
                self._let_go(page)

    def _new_page(self) -> int:
        """The page that was given up last, so that whatever still reads it reads another's content."""
        free = [page for page, name in self.gpu.items() if name is NOTHING and not self.holders[page]]
        page = free[-1] if free else len(self.gpu)
        self.gpu[page] = NOTHING
        self.holders[page] += 1
        self.released[page] = 0
        return page

    def _let_go(self, page: int) -> None:
        self.released[page] += 1
        assert self.released[page] == 1, "a sequence lets go of a page twice"
        self._drop_holder(page)

    def _drop_holder(self, page: int) -> None:
        assert self.holders[page] > 0, f"page {page} is released more often than it was held"
        self.holders[page] -= 1
        if not self.holders[page]:
            self.gpu[page] = NOTHING

    # ---- instructions

    def do(self, instructions: Sequence[Instruction]) -> None:
        for each in instructions:
            getattr(self, f"_do_{type(each).__name__.lower()}")(each)
            self.seen[type(each).__name__] += 1

    def _do_pin(self, pin: Pin) -> None:
        for page in pin.pages:
            assert self.holders[page.page], "a page is pinned that nobody holds"
            self.holders[page.page] += 1
            self.pins[page.page] += 1

    def _do_unpin(self, unpin: Unpin) -> None:
        for page in unpin.pages:
            assert self.pins[page.page] > 0, "a page is unpinned that is not pinned"
            self.pins[page.page] -= 1
            self._drop_holder(page.page)

    def _do_copy(self, copy: Copy) -> None:
        assert copy.op == len(self.copies) + 1
        assert copy.moves
        for move in copy.moves:
            assert self.pins[move.gpu_page], "a page is copied that is not pinned"
        self.copies.append(copy)

    def _do_upload(self, upload: Upload) -> None:
        assert upload.op == len(self.uploads) + 1
        self.uploads[upload.op] = upload
        pages = list(range(upload.start, upload.start + len(upload.hashes)))
        may_go = (hashes[upload.start :][: len(upload.hashes)] for hashes in self.to_be_stored)
        assert list(upload.hashes) in may_go, "what is kept on the host only is stored"
        for g, share in enumerate(upload.shares):
            assert self.kinds[g] is not GroupKind.FULL or list(share.page_nos) == pages, (
                "a span has not all of its pages"
            )
            assert len(share.page_nos) == len(share.hashes) == len(share.host_pages)

    def _do_publish(self, publish: Publish) -> None:
        upload = self.uploads[publish.op]
        assert min(self.uploaded) >= publish.op, "an upload is published that a rank has not made"
        assert not any(publish.op in failing for failing in self.failing), "an upload is published that failed"
        assert publish.op not in self.discarded
        assert upload.parent == ROOT or upload.parent in self.before, "a hole: the page before is not stored"
        self.to_publish.append(publish.op)

    def _do_discard(self, discard: Discard) -> None:
        assert discard.op not in self.discarded, "discarded twice"
        self.discarded.add(discard.op)

    # ---- ranks

    def make_copy(self, rank: int) -> None:
        """A rank makes its next copy: what is in the GPU's pages now is on the host from then on."""
        if self.copied[rank] < len(self.copies):
            copy = self.copies[self.copied[rank]]
            self.copied[rank] += 1
            for move in copy.moves:
                content = self.gpu[move.gpu_page]
                assert content[0] == move.group, f"copy {copy.op} reads a page that was given up"
                self.host[rank][move.group, move.host_page] = content

    def report_copies(self, rank: int, late: int) -> None:
        """late: an older report comes (again)."""
        last = max(0, self.copied[rank] - late)
        self.do(self.manager.copied(rank, last))

    def make_upload(self, rank: int, *, fails: bool = False) -> None:
        if self.uploaded[rank] < len(self.uploads):
            self.uploaded[rank] += 1
            upload = self.uploads[self.uploaded[rank]]
            if fails:
                self.failing[rank].add(upload.op)
            for g, share in enumerate(upload.shares):
                for page_hash, page in zip(share.hashes, share.host_pages, strict=True):
                    assert self.host[rank].get((g, page)) == (g, page_hash), f"upload {upload.op} reads another page"

    def report_uploads(self, rank: int, late: int) -> None:
        last = max(0, self.uploaded[rank] - late)
        failed = [op for op in self.failing[rank] if op <= last]
        self.do(self.manager.uploaded(rank, last, failed))

    # ---- the store

    def publish(self, number: int, outcome: str) -> None:
        """outcome: "done", "lost" (it is done, and nobody hears of it) or "failed"."""
        if not self.to_publish:
            return
        op = self.to_publish.pop(number % len(self.to_publish))
        upload = self.uploads[op]
        self.seen[f"publish {outcome}"] += 1
        if outcome == "failed":
            self.do(self.manager.published(op, None))
            return
        there = self.published.get(upload.hashes[0])
        if there is None:
            self.put(upload.parent, upload.hashes, [(g, h) for g, s in enumerate(upload.shares) for h in s.hashes])
            there = upload.hashes
        else:
            self.seen["conflict"] += 1
        matching = 0
        while matching < min(len(there), len(upload.hashes)) and there[matching] == upload.hashes[matching]:
            matching += 1
        told = (None,) if outcome == "lost" else (matching, self.beyond(upload.hashes[:matching]))
        self.do(self.manager.published(op, *told))

    def answer(self, number: int, *, known: bool = True) -> None:
        """To one that has ended. known: storage can say it."""
        if not self.asked:
            return
        asked = sorted(self.asked)[number % len(self.asked)]
        hashes = self.asked.pop(asked)
        if known:
            self.find(hashes)
        self.seen["an answer that is late"] += 1
        self.do(self.manager.answered(asked))

    def put(self, parent: bytes, hashes: tuple[bytes, ...], pages: Sequence[Name]) -> None:
        self.published[hashes[0]], self.pages[hashes[0]] = hashes, tuple(pages)
        self.stored.update(pages)
        twice = [name for name in pages if self.stored[name] > 1 and self.kinds[name[0]] is GroupKind.FULL]
        assert not twice, "a page is stored twice"
        self.points.add(hashes[-1])
        for page_hash in hashes:
            self.before[page_hash] = parent
            parent = page_hash

    def find(self, hashes: Sequence[bytes]) -> None:
        """The manager is told what storage has of a sequence."""
        pages = self.stored_pages(hashes)
        keys = [(g, each) for g, each in self.stored if each in hashes[:pages]]
        self.manager.found(hashes, pages, keys, self.beyond(hashes[:pages]))

    def beyond(self, hashes: Sequence[bytes]) -> Beyond:
        """Of a sequence that is stored: what else is in its spans."""
        spans = [span for first, span in self.published.items() if first in hashes]
        rest = [each for span in spans for each in span if each not in hashes]
        self.seen["a span that goes on beyond ours"] += bool(rest)
        return Beyond(tuple(rest), tuple(key for span in spans for key in self.pages[span[0]] if key[1] in rest))

    def stored_pages(self, hashes: Sequence[bytes]) -> int:
        """Pages of a sequence that can be found."""
        return next((i for i, each in enumerate(hashes) if each not in self.before), len(hashes))

    def other_server(self, name: str, pages: int) -> None:
        """Somebody else stores some pages of a sequence before we do; all that FULL groups have of them."""
        hashes = self.sequences[name].hashes
        first = self.stored_pages(hashes)
        taken = tuple(hashes[first : first + pages])
        if taken and taken[0] not in self.published:
            full = [g for g in self.groups if self.kinds[g] is GroupKind.FULL]
            self.put(hashes[first - 1] if first else ROOT, taken, [(g, each) for g in full for each in taken])

    def set_store(self, works: bool) -> None:
        self.storing = works
        self.manager.set_store(works)

    # ---- the end

    def settle(self, rounds: int = 400) -> None:
        """Everything that is under way is done and reported."""
        for _ in range(rounds):
            for rank in self.ranks:
                for _ in self.copies:
                    self.make_copy(rank)
                self.report_copies(rank, 0)
                for _ in self.uploads:
                    self.make_upload(rank)
                self.report_uploads(rank, 0)
            self.publish(0, "done")
            self.answer(0)
            if self.manager.idle and not self.to_publish:
                return
        raise AssertionError("what is under way does not end")

    def check(self) -> None:
        self.manager.check_integrity()
        for (g, page), page_hash in self.manager.host._hash_of.items():
            assert all(host.get((g, page)) == (g, page_hash) for host in self.host), "a page of the host is stale"

    def check_end(self) -> None:
        """Nothing is held by anybody."""
        assert not self.sequences and self.manager.idle and not self.manager._lingering
        assert not +self.pins, f"pages that stay pinned: {+self.pins}"
        assert not +self.holders, f"pages that are never released: {+self.holders}"
        assert not self.manager.host.holders(), "pages of the host that are held for ever"
        assert not self.manager._keepers and not self.manager._in_flight.hashes

    def dump(self) -> dict[str, Any]:
        return {"seen": dict(self.seen), "counts": dict(self.manager.counts)}


def all_pages(pages: Sequence[GpuPage]) -> list[int]:
    return [page.page for page in pages]
