"""What a worker knows of the engine's sequences: how plans are encoded as diffs of it, and how they are applied. Pure.

Both halves live here so that they cannot drift apart: whatever `DiffEncoder` leaves out, `KnownSequences` has already.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from disagg.messages.plan import PageCopy, Run, SamplerStart, SequenceStart, WorkerPlan
from disagg.types.errors import ProtocolError
from disagg.types.sampling import SamplingParams


class DiffEncoder:
    """Engine side: turns decisions into numbered diffs. `end` is applied by the next plan."""

    def __init__(self) -> None:
        self._next_plan_no = 0
        self._starts: dict[int, SequenceStart] = {}
        self._ends: list[int] = []
        self._copies: list[PageCopy] = []
        self._known: set[int] = set()

    @property
    def next_plan_no(self) -> int:
        return self._next_plan_no

    @property
    def has_housekeeping(self) -> bool:
        """Sequences have ended that the worker still remembers, or pages wait to be copied."""
        return bool(self._ends or self._copies)

    def start(self, start: SequenceStart) -> None:
        """Introduce a sequence; it travels with the first plan that runs it."""
        assert start.seq_id not in self._known and start.seq_id not in self._starts
        self._starts[start.seq_id] = start

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Pages to copy before anything in the next plan runs."""
        self._copies.extend(copies)

    def end(self, seq_id: int) -> None:
        """Forget a sequence. One that the worker never saw is simply not sent."""
        if self._starts.pop(seq_id, None) is None and seq_id in self._known:
            self._known.discard(seq_id)
            self._ends.append(seq_id)

    def encode(self, runs: Sequence[Run]) -> WorkerPlan:
        starts = tuple(self._starts.pop(run.seq_id) for run in runs if run.seq_id in self._starts)
        self._known.update(start.seq_id for start in starts)
        plan = WorkerPlan(
            plan_no=self._next_plan_no,
            ends=tuple(self._ends),
            copies=tuple(self._copies),
            starts=starts,
            runs=tuple(runs),
        )
        self._next_plan_no += 1
        self._ends.clear()
        self._copies.clear()
        return plan


def page_table(pages: Iterable[int] = ()) -> array[int]:
    """In memory as tensors have them: a batch takes some of it without looking at each number."""
    return array("q", pages)


@dataclass(slots=True)
class KnownSequence:
    """What a worker knows of one sequence. tokens: known ids, prompt first; computed: how many of them pages hold.

    tables: per layer group, a page for every page number, 64 bits each; those before the first that was given are 0 and
    never read.
    """

    seq_id: int
    tokens: list[int]
    num_prompt: int
    computed: int
    tables: list[array[int]]
    params: SamplingParams
    samplers: tuple[SamplerStart, ...]


class RunView(Struct, frozen=True):
    """One run, resolved: tokens[start : start + num_tokens] of the sequence.

    last_pages: per layer group, the last page of the table as it was before this run's pages were appended; -1 if none.
    """

    sequence: KnownSequence
    start: int
    num_tokens: int
    sample: bool
    last_pages: tuple[int, ...]

    @property
    def token_ids(self) -> list[int]:
        return self.sequence.tokens[self.start : self.start + self.num_tokens]


@dataclass(slots=True)
class KnownSequences:
    """Worker side. `apply` in plan order; whoever samples appends the tokens."""

    sequences: dict[int, KnownSequence] = field(default_factory=dict)
    next_plan_no: int = 0

    def apply(self, plan: WorkerPlan) -> tuple[list[KnownSequence], list[KnownSequence], list[RunView]]:
        """(ended, started, runs). Raises ProtocolError on a gap in plan numbers or an unknown sequence."""
        if plan.plan_no != self.next_plan_no:
            raise ProtocolError(f"plan {plan.plan_no} arrived where plan {self.next_plan_no} was due: a plan was lost")
        self.next_plan_no += 1
        ended = [self._known(seq_id, plan) for seq_id in plan.ends]
        for sequence in ended:
            del self.sequences[sequence.seq_id]
        started = []
        for start in plan.starts:
            sequence = KnownSequence(
                start.seq_id,
                list(start.token_ids),
                start.num_prompt,
                start.computed,
                [page_table([0] * table.first + list(table.pages)) for table in start.tables],
                start.params,
                start.samplers,
            )
            self.sequences[start.seq_id] = sequence
            started.append(sequence)
        runs = []
        for run in plan.runs:
            sequence = self._known(run.seq_id, plan)
            sequence.tokens.extend(run.token_ids)
            last_pages = tuple(table[-1] if table else -1 for table in sequence.tables)
            if run.new_pages:
                for table, pages in zip(sequence.tables, run.new_pages, strict=True):
                    table.extend(pages)
            runs.append(RunView(sequence, sequence.computed, run.num_tokens, run.sample, last_pages))
            sequence.computed += run.num_tokens
        return ended, started, runs

    def _known(self, seq_id: int, plan: WorkerPlan) -> KnownSequence:
        sequence = self.sequences.get(seq_id)
        if sequence is None:
            raise ProtocolError(f"plan {plan.plan_no} names sequence {seq_id}, which this worker does not know")
        return sequence
