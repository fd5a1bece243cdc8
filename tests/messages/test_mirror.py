"""The mirror: whatever the engine leaves out of a diff, the worker knows."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from disagg.messages.mirror import Mirror, MirrorEncoder
from disagg.messages.plan import Run, SamplerStart, SequenceStart, decode_to_worker, encode_to_worker
from disagg.types.errors import ProtocolError
from disagg.types.sampling import SamplingParams

PARAMS = SamplingParams(max_tokens=8)


def start(seq_id: int, tokens: int, computed: int = 0, slot: int = 0) -> SequenceStart:
    return SequenceStart(
        seq_id, tuple(range(tokens)), tokens, computed, (seq_id, seq_id + 1), PARAMS, (SamplerStart(slot, 0),)
    )


class MirrorMachine(RuleBasedStateMachine):
    """The engine's full truth, and the worker's after every plan, which crosses as bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mirror = MirrorEncoder(), Mirror()
        self.truth: dict[int, dict[str, list[int] | int]] = {}  # live in the engine
        self.seen: set[int] = set()  # have run at least once
        self.copies: list[tuple[int, int]] = []
        self.next_id = 0

    @rule(tokens=st.integers(1, 12), data=st.data())
    def begin(self, tokens: int, data: st.DataObject) -> None:
        computed = data.draw(st.integers(0, tokens - 1))
        seq_id, self.next_id = self.next_id, self.next_id + 1
        self.encoder.start(start(seq_id, tokens, computed))
        self.truth[seq_id] = {"tokens": list(range(tokens)), "computed": computed, "pages": [seq_id, seq_id + 1]}

    @precondition(lambda self: self.truth)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.truth)))
        del self.truth[seq_id]
        self.encoder.end(seq_id)
        self.encoder.end(seq_id)  # again: nothing

    @rule(pages=st.tuples(st.integers(0, 9), st.integers(0, 9)))
    def copy(self, pages: tuple[int, int]) -> None:
        self.encoder.copy_pages([pages])
        self.copies.append(pages)

    @rule(data=st.data())
    def plan(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.truth)), unique=True)) if self.truth else []
        runs = []
        for seq_id in chosen:
            known = self.truth[seq_id]
            assert isinstance(known["tokens"], list)
            assert isinstance(known["computed"], int)
            left = len(known["tokens"]) - known["computed"]
            if left:
                pages = data.draw(st.sampled_from([(), (7,), (8, 9)]))
                runs.append(Run(seq_id, data.draw(st.integers(1, left)), True, pages))
        plan = self.encoder.encode(runs)
        assert not self.encoder.has_housekeeping
        crossed = decode_to_worker(encode_to_worker(plan))
        assert crossed == plan
        assert list(plan.copies) == self.copies
        self.copies.clear()
        before = {run.seq_id: self.truth[run.seq_id]["computed"] for run in runs}
        ended, started, views = self.mirror.apply(plan)
        assert {s.seq_id for s in ended} <= self.seen
        assert {s.seq_id for s in started} == {run.seq_id for run in runs} - self.seen, (
            "introduced once, when first run"
        )
        for run, view in zip(runs, views, strict=True):
            known = self.truth[run.seq_id]
            assert isinstance(known["tokens"], list)
            assert isinstance(known["pages"], list)
            assert isinstance(known["computed"], int)
            assert (view.start, view.num_tokens) == (before[run.seq_id], run.num_tokens)
            assert view.token_ids == known["tokens"][view.start : view.start + view.num_tokens]
            known["computed"] += run.num_tokens
            known["pages"] += run.new_pages
            if known["computed"] == len(known["tokens"]):
                token = data.draw(st.integers(100, 200))
                known["tokens"].append(token)
                self.mirror.append_token(run.seq_id, token)
        self.seen |= {run.seq_id for run in runs}
        self.check()

    def check(self) -> None:
        """Right after a plan the worker knows exactly the live sequences that have run."""
        assert set(self.mirror.sequences) == self.seen & set(self.truth)
        for seq_id, sequence in self.mirror.sequences.items():
            known = self.truth[seq_id]
            assert (sequence.tokens, sequence.computed, sequence.pages) == (
                known["tokens"],
                known["computed"],
                known["pages"],
            )

    @invariant()
    def the_worker_lags_only_by_what_housekeeping_will_say(self) -> None:
        stale = set(self.mirror.sequences) - set(self.truth)
        assert self.encoder.has_housekeeping == bool(stale or self.copies)


TestMirror = MirrorMachine.TestCase
TestMirror.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)


def test_a_lost_plan_ends_the_worker() -> None:
    encoder, mirror = MirrorEncoder(), Mirror()
    encoder.start(start(0, 3))
    encoder.encode([Run(0, 1, False)])
    second = encoder.encode([Run(0, 1, False)])
    with pytest.raises(ProtocolError, match="plan 1 arrived where plan 0 was due"):
        mirror.apply(second)


def test_a_repeated_plan_ends_the_worker() -> None:
    encoder, mirror = MirrorEncoder(), Mirror()
    plan = encoder.encode([])
    mirror.apply(plan)
    with pytest.raises(ProtocolError, match="plan 0 arrived where plan 1 was due"):
        mirror.apply(plan)


def test_a_plan_may_not_name_a_sequence_that_was_never_introduced() -> None:
    plan = MirrorEncoder().encode([Run(5, 1, False)])
    with pytest.raises(ProtocolError, match="names sequence 5"):
        Mirror().apply(plan)


def test_a_sequence_that_never_ran_is_never_mentioned() -> None:
    encoder = MirrorEncoder()
    encoder.start(start(0, 3))
    encoder.end(0)
    assert not encoder.has_housekeeping
    plan = encoder.encode([])
    assert plan.starts == plan.ends == ()


def test_a_sequence_that_ends_makes_room_for_one_that_starts_in_the_same_plan() -> None:
    encoder, mirror = MirrorEncoder(), Mirror()
    encoder.start(start(0, 2))
    mirror.apply(encoder.encode([Run(0, 2, True)]))
    encoder.end(0)
    encoder.start(start(1, 2))
    ended, started, _ = mirror.apply(encoder.encode([Run(1, 2, True)]))
    assert [s.seq_id for s in ended] == [0]
    assert [s.seq_id for s in started] == [1]
