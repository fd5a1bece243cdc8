"""Engines without a model: the shipped scheduling policies, step by step, over one memory manager or another.

    DecodeEngine     requests land with their prompts computed, first come first served, while memory has room for them;
                     every step gives each a token (`decode_only`). A sequence that finds no page for its next token puts
                     the youngest one back into the queue.
    PrefillEngine    prompts are looked up in the prefix cache and computed in chunks (`prefill_only`), with two plans in
                     flight as in the real one; a prompt ends when it is computed.

Know requests and tokens; what a page is, only the memory managers know (`Memory`, `Pages`).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import ParamSpec, Protocol, TypeVar

from bench.memory_models import PAGE_TOKENS, BenchModel
from bench.memory_trace import BenchRequest, text_of
from disagg.memory.spans import PLANS_IN_FLIGHT
from disagg.scheduler.admission import common_pages, should_wait
from disagg.scheduler.budget import of_tokens
from disagg.scheduler.policies import Candidate, Phase, StepState, decodes_first, prefill_only

P = ParamSpec("P")
T = TypeVar("T")


class Pages(Protocol):
    """The pages of one sequence. Positions count its text tokens; images are there from the beginning.

    hit_tokens, hit_image_tokens: what was cached when it began.
    """

    hit_tokens: int
    hit_image_tokens: int

    def longest_run(self, start: int) -> int:
        """Tokens that one run from `start` on may have at most."""

    def grow(self, start: int, stop: int) -> bool:
        """Have pages for a run of tokens [start, stop). False: there are none, and nothing has changed."""

    def advance(self, num_tokens: int, hashes: list[bytes], step: int) -> None:
        """So many tokens are computed."""

    def end_prefill(self, num_tokens: int, hashes: list[bytes], step: int) -> None:
        """That was the whole prompt."""

    def close(self, step: int) -> None:
        """Let go of everything."""


class Memory(Protocol):
    """One pool under one management."""

    model: BenchModel
    caching: bool
    keeps_back: bool  # not all of a prompt can be found before all of it is computed

    def extend_hashes(self, hashes: list[bytes], request: BenchRequest, text: array[int]) -> None:
        """Name the pages that `text`, the request's tokens so far, fills beyond those that are named."""

    def land(self, request: BenchRequest, num_tokens: int, step: int) -> Pages | None:
        """Pages that hold num_tokens text tokens, and the image, all computed elsewhere; None if they do not fit now."""

    def open(self, request: BenchRequest, hashes: list[bytes], num_tokens: int, step: int) -> Pages | None:
        """Pages to compute a prompt of num_tokens text tokens, and the image, in chunks; None if they do not fit now."""

    def used_bytes(self) -> int:
        """What nobody else can have now: pages of running sequences, and what is lost around them."""


@dataclass(slots=True)
class Outcome:
    """What came of a list of requests. Bytes are sums over steps; management_s is time spent in the memory manager.

    needed: what the model reads or writes in the step, or will have to keep of the prompt when it is complete: computed
    from its layers and the numbers of tokens alone. What is held and not needed is waste.
    """

    preemptions: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    held_bytes: int = 0
    needed_bytes: int = 0
    management_s: float = 0.0
    requests: int = 0
    batches: list[int] = field(default_factory=list)  # tokens of each step

    @property
    def waste(self) -> float:
        """Share of the bytes held."""
        return 1 - self.needed_bytes / self.held_bytes

    @property
    def steps(self) -> int:
        return len(self.batches)

    @property
    def mean_batch(self) -> float:
        """Tokens of a step: of an engine that decodes, sequences."""
        return sum(self.batches) / len(self.batches)

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens, text and images, that need not be computed."""
        return self.hit_tokens / self.prompt_tokens

    @property
    def computed_tokens(self) -> int:
        """Of prompts, text and images, that were not found."""
        return self.prompt_tokens - self.hit_tokens

    def count_bytes(self, held: int, needed: int) -> None:
        self.held_bytes += held
        self.needed_bytes += needed

    def timed(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        started = perf_counter()
        result = call(*args, **kwargs)
        self.management_s += perf_counter() - started
        return result


def needed_bytes(model: BenchModel, request: BenchRequest, start: int, stop: int, total: int) -> int:
    """While tokens [start, stop) of a sequence run whose prompt, when complete, has `total` tokens."""
    image_tokens = request.image_tokens
    return sum(
        model.row_bytes(g)
        * max(model.needed_rows(g, start, stop, image_tokens), model.needed_rows(g, total, total, image_tokens))
        for g in range(len(model.groups))
    )


@dataclass(slots=True, eq=False)
class _Decoding:
    """outputs: sampled so far, the first of them elsewhere. computed: tokens whose KV is in pages."""

    request: BenchRequest
    pages: Pages
    outputs: int

    @property
    def computed(self) -> int:
        return self.request.prompt_tokens + self.outputs - 1


class DecodeEngine:
    """See the module. max_running: how many sequences it runs at most."""

    def __init__(self, memory: Memory, requests: Sequence[BenchRequest], max_running: int) -> None:
        self.outcome = Outcome(requests=len(requests))
        self._memory = memory
        self._max_running = max_running
        self._waiting = deque((request, 1) for request in requests)  # and how many outputs it has already
        self._running: list[_Decoding] = []  # in order of admission
        self._full = False  # somebody was refused, and nobody has ended since

    def fill(self) -> int:
        """How many of the requests, in their order, fit at once."""
        self._admit()
        return len(self._running)

    def run(self) -> Outcome:
        """All requests to their ends."""
        while self._waiting or self._running:
            self._admit()
            assert self._running, "memory is too small for the first request in the queue"
            self._step()
        return self.outcome

    def _admit(self) -> None:
        while self._waiting and not self._full and len(self._running) < self._max_running:
            request, outputs = self._waiting[0]
            num_tokens = request.prompt_tokens + outputs - 1
            pages = self.outcome.timed(self._memory.land, request, num_tokens, self.outcome.steps)
            if pages is None:
                self._full = True
            else:
                self._waiting.popleft()
                self._running.append(_Decoding(request, pages, outputs))

    def _step(self) -> None:
        out = self.outcome
        candidates = tuple(Candidate(number, Phase.DECODE, remaining=1, most=1) for number in range(len(self._running)))
        sequences = [
            self._running[run.seq_id] for run in decodes_first(candidates, StepState(of_tokens(self._max_running))).runs
        ]
        scheduled = [sequence for sequence in sequences if sequence in self._running and self._grow(sequence)]
        scheduled = [sequence for sequence in scheduled if sequence in self._running]
        out.batches.append(len(scheduled))
        model = self._memory.model
        needed = sum(
            needed_bytes(model, s.request, s.computed, s.computed + 1, s.request.prompt_tokens) for s in scheduled
        )
        out.count_bytes(self._memory.used_bytes(), needed)
        for sequence in scheduled:
            sequence.outputs += 1
            out.timed(sequence.pages.advance, sequence.computed, [], out.steps)
            if sequence.outputs == sequence.request.outputs:
                self._end(sequence)
                self._full = False

    def _grow(self, sequence: _Decoding) -> bool:
        while not self.outcome.timed(sequence.pages.grow, sequence.computed, sequence.computed + 1):
            youngest = self._running[-1]
            self._end(youngest)
            self._waiting.appendleft((youngest.request, youngest.outputs))
            self._full = True  # until somebody ends, or the two would take turns
            self.outcome.preemptions += 1
            if youngest is sequence:
                return False
        return True

    def _end(self, sequence: _Decoding) -> None:
        self.outcome.timed(sequence.pages.close, self.outcome.steps)
        self._running.remove(sequence)


@dataclass(slots=True, eq=False)
class _Prefilling:
    """scheduled, computed: tokens of the prompt that a plan names, and that a plan that has reported named."""

    request: BenchRequest
    pages: Pages
    hashes: list[bytes]
    scheduled: int
    computed: int

    @property
    def total(self) -> int:
        return self.request.prompt_tokens


class PrefillEngine:
    """See the module. max_running: prompts at once; chunk_tokens: of one step.

    measure: count bytes, too, which would count pages twice that two prompts share.
    """

    def __init__(
        self,
        memory: Memory,
        requests: Sequence[BenchRequest],
        max_running: int,
        chunk_tokens: int,
        *,
        measure: bool,
    ) -> None:
        self.outcome = Outcome(requests=len(requests))
        self._memory = memory
        self._max_running = max_running
        self._chunk = chunk_tokens
        self._measure = measure
        self._waiting = deque(requests)
        self._running: list[_Prefilling] = []  # in order of admission
        self._plans: deque[list[tuple[_Prefilling, int]]] = deque()  # in flight: (sequence, tokens after its run)
        self._full = False

    def run(self) -> Outcome:
        """All requests to the ends of their prompts."""
        while self._waiting or self._running:
            self._admit()
            assert self._running, "memory is too small for the first request in the queue"
            if not self._schedule() or len(self._plans) == PLANS_IN_FLIGHT:
                self._report()
        return self.outcome

    def _admit(self) -> None:
        out = self.outcome
        while self._waiting and not self._full and len(self._running) < self._max_running:
            request = self._waiting[0]
            hashes: list[bytes] = []
            if self._memory.caching:
                text = text_of(request)[: request.prompt_tokens]
                out.timed(self._memory.extend_hashes, hashes, request, text)
            if any(self._computes_for(sequence, hashes) for sequence in self._running):
                return
            pages = out.timed(self._memory.open, request, hashes, request.prompt_tokens, out.steps)
            if pages is None:
                self._full = True
                return
            self._waiting.popleft()
            self._running.append(_Prefilling(request, pages, hashes, pages.hit_tokens, pages.hit_tokens))
            out.prompt_tokens += request.prompt_tokens + request.image_tokens
            out.hit_tokens += pages.hit_tokens + pages.hit_image_tokens

    def _computes_for(self, sequence: _Prefilling, hashes: list[bytes]) -> bool:
        """It is worth waiting until a sequence has computed what a prompt with these hashes begins with, too."""
        common = common_pages(sequence.hashes, hashes) * PAGE_TOKENS
        last = sequence.total if self._memory.keeps_back else common
        return should_wait(common, sequence.pages.hit_tokens, sequence.computed, last, self._chunk)

    def _schedule(self) -> bool:
        """One more plan, if there is anything left to plan."""
        out = self.outcome
        unplanned = [sequence for sequence in self._running if sequence.scheduled < sequence.total]
        candidates = tuple(
            Candidate(number, Phase.PREFILL, s.total - s.scheduled, s.pages.longest_run(s.scheduled))
            for number, s in enumerate(unplanned)
        )
        plan = []
        runs = prefill_only(candidates, StepState(of_tokens(self._chunk))).runs
        for run in runs:
            sequence = unplanned[run.seq_id]
            stop = sequence.scheduled + run.num_tokens
            fits = out.timed(sequence.pages.grow, sequence.scheduled, stop)
            assert fits, "a prompt had reserved all pages that it needs"
            sequence.scheduled = stop
            plan.append((sequence, stop))
        if not plan:
            return False
        self._plans.append(plan)
        out.batches.append(sum(run.num_tokens for run in runs))
        if self._measure:
            model = self._memory.model
            needed = sum(needed_bytes(model, s.request, s.computed, s.scheduled, s.total) for s in self._running)
            out.count_bytes(self._memory.used_bytes(), needed)
        return True

    def _report(self) -> None:
        out = self.outcome
        for sequence, computed in self._plans.popleft():
            sequence.computed = computed
            out.timed(sequence.pages.advance, computed, sequence.hashes, out.steps)
            if computed == sequence.total:
                out.timed(sequence.pages.end_prefill, computed, sequence.hashes, out.steps)
                out.timed(sequence.pages.close, out.steps)
                self._running.remove(sequence)
                self._full = False
