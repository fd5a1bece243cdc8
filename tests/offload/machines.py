"""The state machine that drives an offload manager in a world. Given the classes to be tested."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from disagg.offload.host import HostPool
from disagg.offload.manager import OffloadManager
from tests.memory.machines import PICK, pick
from tests.offload.world import MODELS, PAGE_TOKENS, World

NAMES = ("a", "b", "c", HOST_ONLY := "kept on the host only")
PROMPTS = [list(range(n)) for n in (1, 2, 3, 5, 8, 13, 21)] + [
    [0, 1, 2, 3, 4, 99, *range(20)],
    [7] * 9,
    [0, 1, 2, 3, 4, 5, 6, 7, 77, 78, 79, 80],
]


def manager_machine(
    manager: Callable[..., OffloadManager] = OffloadManager,
    host: Callable[..., HostPool] = HostPool,
    seen: collections.Counter[str] | None = None,
) -> type[RuleBasedStateMachine]:
    """seen: is told what happened."""
    counter = collections.Counter() if seen is None else seen

    class ManagerMachine(RuleBasedStateMachine):
        @initialize(
            model=st.sampled_from(sorted(MODELS)),
            ranks=st.integers(1, 3),
            stride_tokens=st.sampled_from([0, 4, 8, 9]),
            host_large=st.sampled_from([1, 3, 6, 40, 400]),
            storage=st.booleans(),
            lingering=st.sampled_from([0, 3, 40]),
            faults=st.booleans(),
        )
        def make(self, faults: bool, **world: Any) -> None:
            self.world = World(**world, manager=manager, host=host)
            self.storage, self.faults = world["storage"], faults
            self.whole: list[
                tuple[list[bytes], int]
            ] = []  # what must be stored at the end, if nothing was lost on the way
            self.lost = False

        def _some(self, number: int) -> str:
            return pick(sorted(self.world.sequences), number)

        # ---- sequences

        def _running(self, number: int, prompt: list[int]) -> str:
            """One of the sequences; names are used again as soon as they are free."""
            name = pick(NAMES, number)
            if name not in self.world.sequences:
                self.world.begin(name, prompt, to_storage=name != HOST_ONLY)
            return name

        @rule(number=PICK, prompt=st.sampled_from(PROMPTS), tokens=st.integers(1, 9))
        def write(self, number: int, prompt: list[int], tokens: int) -> None:
            self.world.write(self._running(number, prompt), tokens)

        @rule(number=PICK, prompt=st.sampled_from(PROMPTS), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
        def decode(self, number: int, prompt: list[int], tokens: list[int]) -> None:
            name = self._running(number, prompt)
            sequence = self.world.sequences[name]
            while sequence.written < sequence.prompt_tokens:
                self.world.write(name, 9)
            for token in tokens:
                self.world.sample(name, token)
                self.world.write(name, 1)

        @rule(number=PICK, prompt=st.sampled_from(PROMPTS), others=PICK)
        def serve(self, number: int, prompt: list[int], others: int) -> None:
            """A prompt and some tokens, as far as what is under way lets it."""
            self.decode(number, prompt, [others & 1, others >> 1 & 1, others >> 2 & 1])
            self.hear(others)

        @precondition(lambda self: self.world.sequences)
        @rule(number=PICK, tail=st.booleans(), asked=st.booleans())
        def finish(self, number: int, tail: bool, asked: bool) -> None:
            name = self._some(number)
            sequence = self.world.sequences[name]
            if tail and name != HOST_ONLY:
                pages = self.world.rules.last_point(sequence.written // PAGE_TOKENS)
                self.whole.append((sequence.hashes, pages))
            self.world.finish(name, tail=tail, asked=asked and self.storage)

        # ---- ranks

        @rule(rank=PICK, copies=st.integers(1, 3))
        def copy(self, rank: int, copies: int) -> None:
            for _ in range(copies):
                self.world.make_copy(rank % len(self.world.ranks))

        @rule(rank=PICK, late=st.sampled_from([0, 0, 0, 1, 2]))
        def report_copies(self, rank: int, late: int) -> None:
            self.world.report_copies(rank % len(self.world.ranks), late)

        @precondition(lambda self: self.world.uploads)
        @rule(rank=PICK, uploads=st.integers(1, 3), fails=st.sampled_from([False] * 5 + [True]))
        def upload(self, rank: int, uploads: int, fails: bool) -> None:
            fails = fails and self.faults
            self.lost |= fails
            for _ in range(uploads):
                self.world.make_upload(rank % len(self.world.ranks), fails=fails)

        @precondition(lambda self: self.world.uploads)
        @rule(rank=PICK, late=st.sampled_from([0, 0, 0, 1, 2]))
        def report_uploads(self, rank: int, late: int) -> None:
            self.world.report_uploads(rank % len(self.world.ranks), late)

        @rule(others=PICK)
        def hear(self, others: int) -> None:
            """Every rank makes what there is to make, and reports; what can be published is."""
            for rank in self.world.ranks:
                for _ in range(9):
                    self.world.make_copy(rank)
                    self.world.make_upload(rank)
                self.world.report_copies(rank, 0)
                self.world.report_uploads(rank, 0)
            if others & 8:
                self.world.publish(others, "done")

        # ---- the store

        @precondition(lambda self: self.world.to_publish)
        @rule(number=PICK, outcome=st.sampled_from(["done"] * 6 + ["lost", "failed"]))
        def publish(self, number: int, outcome: str) -> None:
            outcome = outcome if self.faults else "done"
            self.lost |= outcome != "done"
            self.world.publish(number, outcome)

        @precondition(lambda self: self.world.sequences and self.storage and self.faults)
        @rule(number=PICK, pages=st.integers(1, 5))
        def somebody_else_stores(self, number: int, pages: int) -> None:
            self.lost = True  # our points may lie within their spans
            self.world.other_server(self._some(number), pages)

        @precondition(lambda self: self.world.sequences and self.storage)
        @rule(number=PICK)
        def look_up(self, number: int) -> None:
            self.world.find(self.world.sequences[self._some(number)].hashes)

        @precondition(lambda self: self.world.asked)
        @rule(number=PICK, known=st.booleans())
        def answer(self, number: int, known: bool) -> None:
            self.world.answer(number, known=known)

        @precondition(lambda self: self.storage and self.faults)
        @rule(works=st.sampled_from([True, True, False]))
        def store_fails_or_comes_back(self, works: bool) -> None:
            self.lost |= works is not self.world.storing
            self.world.set_store(works)

        @precondition(lambda self: self.faults)
        @rule()
        def memory_is_needed(self) -> None:
            self.world.do(self.world.manager.give_up_waiting())

        # ---- what holds

        @invariant()
        def everything_adds_up(self) -> None:
            self.world.check()

        @invariant()
        def no_chain_on_the_host_has_a_hole(self) -> None:
            """Without storage, what a running sequence has passed is on the host, or on its way there."""
            manager = self.world.manager
            if self.storage:
                return
            full = [g for g in self.world.groups if self.world.kinds[g].value == "full"]
            for flow in manager._flows.values():
                for page_hash in flow.hashes[: flow.at]:
                    there = all(manager.host.find(g, page_hash) is not None for g in full)
                    assert there or page_hash in manager._in_flight.hashes, "a hole on the host"

        def teardown(self) -> None:
            if not hasattr(self, "world"):
                return
            for name in [*self.world.sequences]:
                self.world.finish(name, tail=False)
            self.world.settle()
            self.world.do(self.world.manager.give_up_waiting())
            self.world.check()
            self.world.check_end()
            if self.storage and not self.lost and not self.world.manager.counts["dropped"]:
                counter["whole"] += 1
                for hashes, pages in self.whole:
                    assert self.world.stored_pages(hashes) >= pages, "pages that were never stored"
                assert max(self.world.stored.values(), default=1) == 1, "a page is stored twice"
            counter.update(self.world.seen.keys())
            counter.update(what for what, times in self.world.manager.counts.items() if times)

    return ManagerMachine
