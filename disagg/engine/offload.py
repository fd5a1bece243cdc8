"""What an engine does for KV beyond its pool: the offload manager's instructions, carried out on this engine's memory.

    batch ── joined, advanced, left ──> OffloadManager ── Pin, Unpin ──────────> the pool's pages
    ranks ── CopiedOut, PartsWritten ─>                ── Copy ────────────────> CopyOut of every rank
    store ── StorePublished, ... ─────>                ── Upload, Publish ... ─> storage

Where a page is now, the prefix cache says: all that is written and whole is in it, of every kind of pages, until its memory is
needed. So sequences let go of their pages as if there were no offload, and what is to be copied is held here once more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from functools import partial

from disagg.engine.asks import Asks
from disagg.engine.facts import OffloadFacts
from disagg.engine.instructions import Instruction, ToStore, ToTransfer
from disagg.engine.sequences import Sequence
from disagg.memory.kv_memory import KvMemory
from disagg.messages.layout import GroupKind
from disagg.messages.tiers import CopiedOut, CopyOut, PartsWritten
from disagg.offload.host import HostPool, Placed
from disagg.offload.instructions import (
    Copy,
    Discard,
    Pin,
    Publish,
    StoreFound,
    StorePublished,
    StoreWorks,
    Unpin,
    Upload,
)
from disagg.offload.instructions import Instruction as Wanted
from disagg.offload.manager import OffloadManager
from disagg.offload.rules import offload_rules
from disagg.types.errors import ProtocolError


class Offload:
    """Of one incarnation. clock: the logical time at which pages are used. Instructions are appended to `out`."""

    def __init__(
        self,
        facts: OffloadFacts,
        ranks: int,
        memory: KvMemory,
        asks: Asks,
        out: list[Instruction],
        clock: Callable[[], int],
    ) -> None:
        self._memory = memory
        self._stores = facts.storage
        self._asks = asks
        self._asking: dict[str, int] = {}  # by name of what runs: which question storage has not answered
        self._out = out
        self._clock = clock
        self._page_tokens = memory.layout.page_tokens
        # A state enters the cache when the run that reads it has reported.
        self._lag_tokens = int(any(group.kind is GroupKind.STATE for group in memory.layout.groups))
        self._published: set[int] = set()  # uploads that storage is told of, and has not answered
        self.rules = offload_rules(memory.layout, facts.stride_tokens)
        self.manager = OffloadManager(
            self.rules,
            lambda layout, gone: HostPool(layout, facts.host_large, gone),
            ranks=ranks,
            storage=facts.storage,
        )
        self._pinned: Counter[tuple[int, int]] = Counter()  # by group and page: how often it is held here

    @property
    def host(self) -> HostPool:
        return self.manager.host

    # ---- sequences

    def joined(self, sequence: Sequence) -> None:
        """A choice runs from now on. Of prompts, see `left`.

        Storage is asked what it has of it: another server may have stored it, and what was stored may be gone.
        """
        if sequence.is_prompt:
            return
        self._begin(sequence)
        if self._stores and sequence.hashes:
            hashes = tuple(sequence.hashes)
            self._asking[_name(sequence)] = self._asks.ask(
                sequence.salt, hashes, partial(self._found, sequence, _name(sequence), hashes)
            )

    def _found(self, sequence: Sequence, name: str, hashes: tuple[bytes, ...], answer: StoreFound) -> None:
        self.learn(hashes, answer)
        self._asks.forget(answer.ask)
        if self._asking.get(name) == answer.ask:
            del self._asking[name]
            self._progress(sequence)
        else:
            self._do(self.manager.answered(answer.ask))

    def learn(self, hashes: List[bytes], answer: StoreFound) -> None:
        """Storage has said what it has of these pages, one after the other."""
        if answer.known:
            pages = min(answer.pages, len(hashes))
            keys = [(g, hashes[at]) for g, group in enumerate(answer.page_nos) for at in group if at < pages]
            self.manager.found(hashes, pages, keys, answer.beyond)

    def advanced(self, sequence: Sequence, num_tokens: int) -> None:
        """num_tokens more of the sequence are written; its full pages are in the cache."""
        if sequence.is_prompt or _name(sequence) in self._asking:
            return
        if (sequence.computed - self._lag_tokens) % self._page_tokens < num_tokens:  # a page was filled
            self._progress(sequence)

    def _progress(self, sequence: Sequence) -> None:
        if sequence.distrusted:
            return
        if sequence.pages is not None and sequence.pages.has_checkpoint:
            return  # ranks may still write to it; once it is cached or let go, nothing of what came before is passed over
        written = sequence.computed - self._lag_tokens
        self._do(self.manager.progress(_name(sequence), written, partial(self._view, sequence)))

    def left(self, sequence: Sequence) -> None:
        """It has let go of its pages: it has ended, or gave way.

        A prompt's KV is on this host from now on, lest it be gone when the pool's memory is needed. It is a decode server's to
        store, which has all of it, but for those that went to none.
        """
        if sequence.is_prompt:
            self._begin(sequence)
        asked = self._asking.pop(_name(sequence), 0)
        view, tail = partial(self._view, sequence), not sequence.distrusted
        self._do(self.manager.finish(_name(sequence), sequence.computed, view, tail=tail, asked=asked))

    def _begin(self, sequence: Sequence) -> None:
        self.manager.begin(
            _name(sequence),
            sequence.root,
            sequence.hashes,
            sequence.num_prompt,
            sequence.salt,
            to_storage=not sequence.handed_over,
        )

    def _view(self, sequence: Sequence, g: int, page_no: int) -> int | None:
        return self._memory.cache.find(g, sequence.hashes[page_no])

    # ---- what ranks and storage report

    def copied_out(self, rank: int, report: CopiedOut) -> None:
        """Raises ProtocolError for a copy that was not asked for."""
        self._do(self.manager.copied(rank, report.last))

    def parts_written(self, rank: int, report: PartsWritten) -> None:
        """Raises ProtocolError for an upload that was not asked for."""
        self._do(self.manager.uploaded(rank, report.op, (report.op,) if report.error else ()))

    def published(self, answer: StorePublished) -> None:
        """Raises ProtocolError for what was not to be published."""
        if answer.op not in self._published:
            raise ProtocolError(f"upload {answer.op} is said to be published, and was not to be")
        self._published.remove(answer.op)
        self._do(self.manager.published(answer.op, answer.pages, answer.beyond))

    def store_works(self, answer: StoreWorks) -> None:
        self.manager.set_store(answer.works)
        self._do(self.manager.give_up_waiting() if not answer.works else [])

    # ---- what the manager wants done

    def _do(self, wanted: list[Wanted]) -> None:
        for each in wanted:
            match each:
                case Pin():
                    for page in each.pages:
                        self.pin(page.group, page.page)
                case Unpin():
                    for page in each.pages:
                        self.unpin(page.group, page.page_no, page.page)
                case Copy():
                    self._out.append(ToTransfer(None, CopyOut(each.op, each.moves)))
                case Publish():
                    self._published.add(each.op)
                    self._out.append(ToStore(each))
                case Upload() | Discard():
                    self._out.append(ToStore(each))

    def pin(self, g: int, page: int) -> None:
        """Hold a page of the pool, which is used or cached."""
        self._memory.allocator.share(g, [page])
        self._pinned[g, page] += 1

    def unpin(self, g: int, page_no: int, page: int) -> None:
        """Let go of it. page_no: which of its sequence it is."""
        self._pinned[g, page] -= 1
        if not self._pinned[g, page]:
            del self._pinned[g, page]
        self._memory.release(g, [page], self._clock(), [page_no + 1])

    def held(self) -> Counter[tuple[int, int]]:
        """Pages of the pool that are held here, and how often."""
        return Counter(self._pinned)

    def dump(self) -> dict[str, object]:
        """For a person."""
        manager = self.manager
        return {
            "host large pages": {"used": self.host.used_large, "total": self.host.num_large},
            "pages held for copies": sum(self._pinned.values()),
            "idle": manager.idle,
            **manager.counts,
        }

    def check_integrity(self, others: Iterable[Placed]) -> None:
        """others: what of the host loads hold."""
        self.manager.check_integrity(others)


def _name(sequence: Sequence) -> str:
    return f"{sequence.seq_id}"
