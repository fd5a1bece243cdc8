"""Whatever the engine leaves out of a diff, the worker knows."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from disagg.messages.layout import GroupPages
from disagg.messages.plan import PageCopy, Run, SamplerStart, SequenceStart, decode_to_worker, encode_to_worker
from disagg.messages.sequence_diff import DiffEncoder, KnownSequences
from disagg.types.errors import ProtocolError
from disagg.types.sampling import SamplingParams

PARAMS = SamplingParams(max_tokens=8)
# Of three groups: everything, a window, and a state that has not been written yet.
PAGES = (GroupPages(0, (3, 4)), GroupPages(2, (5,)), GroupPages(0, ()))
NEW_PAGES: tuple[tuple[tuple[int, ...], ...], ...] = ((), ((7,), (), ()), ((8, 9), (8,), (6,)), ((), (), (1,)))


def start(seq_id: int, tokens: int, computed: int = 0, slot: int = 0) -> SequenceStart:
    return SequenceStart(seq_id, tuple(range(tokens)), tokens, computed, PAGES, PARAMS, (SamplerStart(slot, 0),))


@dataclass
class Truth:
    """A sequence as the engine knows it."""

    tokens: list[int]
    computed: int
    tables: list[list[int]]


class DiffMachine(RuleBasedStateMachine):
    """The engine's full truth, and the worker's after every plan, which crosses as bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.known = DiffEncoder(), KnownSequences()
        self.truth: dict[int, Truth] = {}  # live in the engine
        self.seen: set[int] = set()  # have run at least once
        self.copies: list[PageCopy] = []
        self.next_id = 0

    @rule(tokens=st.integers(1, 12), data=st.data())
    def begin(self, tokens: int, data: st.DataObject) -> None:
        computed = data.draw(st.integers(0, tokens - 1))
        seq_id, self.next_id = self.next_id, self.next_id + 1
        self.encoder.start(start(seq_id, tokens, computed))
        self.truth[seq_id] = Truth(list(range(tokens)), computed, [[3, 4], [0, 0, 5], []])

    @precondition(lambda self: self.truth)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.truth)))
        del self.truth[seq_id]
        self.encoder.end(seq_id)
        self.encoder.end(seq_id)  # again: nothing

    @rule(copy=st.builds(PageCopy, st.integers(0, 2), st.integers(0, 9), st.integers(0, 9)))
    def copy(self, copy: PageCopy) -> None:
        self.encoder.copy_pages([copy])
        self.copies.append(copy)

    @rule(data=st.data())
    def plan(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.truth)), unique=True)) if self.truth else []
        runs = []
        for seq_id in chosen:
            left = len(self.truth[seq_id].tokens) - self.truth[seq_id].computed
            if left:
                pages = data.draw(st.sampled_from(NEW_PAGES))
                runs.append(Run(seq_id, data.draw(st.integers(1, left)), True, pages))
        plan = self.encoder.encode(runs)
        assert not self.encoder.has_housekeeping
        crossed = decode_to_worker(encode_to_worker(plan))
        assert crossed == plan
        assert list(plan.copies) == self.copies
        self.copies.clear()
        ended, started, views = self.known.apply(plan)
        assert {s.seq_id for s in ended} <= self.seen
        assert {s.seq_id for s in started} == {run.seq_id for run in runs} - self.seen, (
            "introduced once, when first run"
        )
        for run, view in zip(runs, views, strict=True):
            known = self.truth[run.seq_id]
            assert (view.start, view.num_tokens) == (known.computed, run.num_tokens)
            assert view.token_ids == known.tokens[view.start : view.start + view.num_tokens]
            assert view.last_pages == tuple(table[-1] if table else -1 for table in known.tables), "before new ones"
            known.computed += run.num_tokens
            for table, fresh in zip(known.tables, run.new_pages or ((), (), ()), strict=True):
                table += fresh
            if known.computed == len(known.tokens):
                token = data.draw(st.integers(100, 200))
                known.tokens.append(token)
                self.known.sequences[run.seq_id].tokens.append(token)
        self.seen |= {run.seq_id for run in runs}
        self.check()

    def check(self) -> None:
        """Right after a plan the worker knows exactly the live sequences that have run."""
        assert set(self.known.sequences) == self.seen & set(self.truth)
        for seq_id, sequence in self.known.sequences.items():
            known = self.truth[seq_id]
            tables = [table.tolist() for table in sequence.tables]
            assert (sequence.tokens, sequence.computed, tables) == (known.tokens, known.computed, known.tables)

    @invariant()
    def the_worker_lags_only_by_what_housekeeping_will_say(self) -> None:
        stale = set(self.known.sequences) - set(self.truth)
        assert self.encoder.has_housekeeping == bool(stale or self.copies)


TestDiffs = DiffMachine.TestCase
TestDiffs.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)


def test_a_lost_plan_ends_the_worker() -> None:
    encoder, known = DiffEncoder(), KnownSequences()
    encoder.start(start(0, 3))
    encoder.encode([Run(0, 1, False)])
    second = encoder.encode([Run(0, 1, False)])
    with pytest.raises(ProtocolError, match="plan 1 arrived where plan 0 was due"):
        known.apply(second)


def test_a_repeated_plan_ends_the_worker() -> None:
    encoder, known = DiffEncoder(), KnownSequences()
    plan = encoder.encode([])
    known.apply(plan)
    with pytest.raises(ProtocolError, match="plan 0 arrived where plan 1 was due"):
        known.apply(plan)


def test_a_plan_may_not_name_a_sequence_that_was_never_introduced() -> None:
    plan = DiffEncoder().encode([Run(5, 1, False)])
    with pytest.raises(ProtocolError, match="names sequence 5"):
        KnownSequences().apply(plan)


def test_a_sequence_that_never_ran_is_never_mentioned() -> None:
    encoder = DiffEncoder()
    encoder.start(start(0, 3))
    encoder.end(0)
    assert not encoder.has_housekeeping
    plan = encoder.encode([])
    assert plan.starts == plan.ends == ()


def test_a_sequence_that_ends_makes_room_for_one_that_starts_in_the_same_plan() -> None:
    encoder, known = DiffEncoder(), KnownSequences()
    encoder.start(start(0, 2))
    known.apply(encoder.encode([Run(0, 2, True)]))
    encoder.end(0)
    encoder.start(start(1, 2))
    ended, started, _ = known.apply(encoder.encode([Run(1, 2, True)]))
    assert [s.seq_id for s in ended] == [0]
    assert [s.seq_id for s in started] == [1]


def test_a_position_means_the_same_whichever_page_a_table_begins_with() -> None:
    encoder, known = DiffEncoder(), KnownSequences()
    encoder.start(start(0, 9, computed=8))
    _, (sequence,), _ = known.apply(encoder.encode([Run(0, 1, True)]))
    tables = [table.tolist() for table in sequence.tables]
    assert tables == [[3, 4], [0, 0, 5], []], "what left the window is not there, and counts"


def test_a_run_reads_the_state_before_its_own_pages_and_writes_the_last() -> None:
    encoder, known = DiffEncoder(), KnownSequences()
    encoder.start(start(0, 6))
    seen = []
    for pages in (((), (), (1,)), (), ((), (), (2,)), ()):
        _, _, (view,) = known.apply(encoder.encode([Run(0, 1, False, pages)]))
        seen.append((view.last_pages[2], view.sequence.tables[2][-1]))
    assert seen == [(-1, 1), (1, 1), (1, 2), (2, 2)], "nothing, then in place, then apart from a checkpoint"


def test_pages_are_copied_once_and_before_anything_else_of_the_next_plan() -> None:
    encoder = DiffEncoder()
    copy = PageCopy(1, 5, 6)
    encoder.copy_pages([copy])
    assert encoder.has_housekeeping
    assert encoder.encode([]).copies == (copy,)
    assert not encoder.has_housekeeping
    assert encoder.encode([]).copies == ()
