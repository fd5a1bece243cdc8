"""The servers of a simulated cluster, and where requests go. Pure; randomness and time are arguments.

A server has two plans in flight, as an engine has: what the second one computes is decided when the first one begins.

    plans     │ 0 ......│ 1 ......│ 2 ......│
    decided   0,1       2         3               a sequence that comes during step 1 is in plan 3

Prompts go by `scheduler.policies`; sequences that decode have a token in each step, so of them a step needs only their number
and the sum of their contexts, and the times of their tokens are a part of the server's row of step ends.
"""

from __future__ import annotations

import heapq
import random
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from disagg.bench.plan.costs import ServerFacts
from disagg.memory.spans import PLANS_IN_FLIGHT
from disagg.scheduler.budget import of_tokens
from disagg.scheduler.policies import Candidate, Phase, StepState, prefill_only


class Asked(Struct, frozen=True):
    """One request. hash_ids: of the blocks with which its prompt begins; equal ones are equal tokens."""

    number: int
    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()

    @property
    def kv_tokens(self) -> int:
        return self.input_tokens + self.output_tokens


class Job:
    """A request under way. place: tokens that came before it to its server. computed: tokens that need no computing any more."""

    __slots__ = (
        "asked",
        "computed",
        "decode",
        "first_s",
        "first_step",
        "granted_s",
        "place",
        "prefill",
        "prompt_s",
        "queued_s",
    )

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.computed = 0
        self.place = 0
        self.prefill: Server | None = None
        self.decode: Server | None = None
        self.granted_s: float | None = None
        self.prompt_s: float | None = None  # when its last chunk was computed
        self.queued_s = 0.0  # that its prompt was thought to take
        self.first_s = 0.0
        self.first_step = 0


SPELL_STEPS = 32


class Noise:
    """Shares by which steps are off, as they followed each other where they were measured, so many at a time: what holds one step
    up holds up the next ones, too, and queues come of that."""

    def __init__(self, ratios: Sequence[float], rng: random.Random) -> None:
        self._ratios, self._rng = ratios, rng
        self._at = self._left = 0

    def draw(self) -> float:
        if not self._left:
            self._at, self._left = int(self._rng.random() * len(self._ratios)), SPELL_STEPS
        self._left -= 1
        self._at = (self._at + 1) % len(self._ratios)
        return self._ratios[self._at]


class Step(Struct):
    """A step in flight. prompts: those whose last chunk it computes. number: of the step of those that decode, by which tokens
    are found."""

    end_s: float
    prompts: list[Job]
    number: int | None


class Server:
    """One server: prompts, or sequences that decode, or both."""

    def __init__(self, index: int, prompts: ServerFacts, decodes: ServerFacts, seed: int) -> None:
        """prompts, decodes: what either adds to a step; the limits are those of `decodes`."""
        self.index = index
        self._prompt_facts, self._decode_facts = prompts, decodes
        rng = random.Random(f"{seed} {index}")
        self._prompt_noise, self._decode_noise = Noise(prompts.cost.ratios, rng), Noise(decodes.cost.ratios, rng)
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []  # prompts that have chunks left
        self._held = 0  # prompts whose KV is here
        self.kv_used = 0
        self._granted = 0  # sequences that decode here, or will
        self._places = 0
        self._decoding = 0
        self.most_decoding = 0
        self._attended = 0.0  # contexts of those that decode
        self._lasts: list[tuple[int, int, Job]] = []  # by their last step
        self._leaving: deque[Job] = deque()  # in a plan with their last token
        self.ends_s = array("d")  # of each step that decoded
        self._free_s = 0.0
        self.in_flight: deque[Step] = deque()
        self.busy_s = 0.0
        self.steps = 0
        self.prompt_tokens = 0  # computed

    @property
    def kv_tokens(self) -> int:
        return self._decode_facts.kv_tokens

    # ---- prompts

    def ask(self, job: Job) -> None:
        job.place = self._places
        self._places += job.asked.input_tokens - job.computed
        self._waiting.append(job)

    def _admit(self, whole: bool) -> None:
        """whole: they decode here, too, so all that they may come to have is set aside."""
        while self._waiting and self._held + self._granted < self._prompt_facts.max_running:
            asked = self._waiting[0].asked
            needed = asked.kv_tokens if whole else asked.input_tokens
            if self.kv_used and self.kv_used + needed > self.kv_tokens:
                return
            self.kv_used += needed
            self._held += 1
            self._running.append(self._waiting.popleft())

    def let_go(self, tokens: int) -> None:
        """Of a prompt whose KV is not needed here any more."""
        self.kv_used -= tokens
        self._held -= 1

    # ---- sequences that decode

    def has_room(self, asked: Asked) -> bool:
        """An empty one takes whatever fits it at all."""
        facts = self._decode_facts
        return self._granted < facts.max_running and (
            not self.kv_used or self.kv_used + asked.kv_tokens <= facts.kv_tokens
        )

    def take(self, asked: Asked) -> None:
        """All KV that it may come to have is set aside."""
        self._granted += 1
        self.kv_used += asked.kv_tokens

    def end(self, asked: Asked) -> None:
        """It has its last token."""
        self._granted -= 1
        self.kv_used -= asked.kv_tokens

    def join(self, job: Job) -> None:
        """It decodes from the next plan on; it has at least one token to make still."""
        job.first_step = len(self.ends_s)
        asked = job.asked
        heapq.heappush(self._lasts, (job.first_step + asked.output_tokens - 2, asked.number, job))
        self._decoding += 1
        self._attended += asked.input_tokens + 1

    # ---- steps

    def plan(self, now_s: float, whole: bool) -> list[Step]:
        """Steps that begin to be on their way now, as many as may be."""
        out = []
        while len(self.in_flight) < PLANS_IN_FLIGHT and (step := self._next(now_s, whole)) is not None:
            self.in_flight.append(step)
            out.append(step)
        return out

    def _next(self, now_s: float, whole: bool) -> Step | None:
        lasts, number = self._lasts, len(self.ends_s)
        decoding, attended = self._decoding, self._attended
        tokens, chunk_attended, ended = self._chunks(decoding, whole)
        if not tokens and not decoding:
            return None
        prompts, decodes = self._prompt_facts.cost, self._decode_facts.cost
        seconds, noise, fixed_s = 0.0, self._decode_noise, 0.0
        self.most_decoding = max(self.most_decoding, decoding)
        if decoding:
            seconds, fixed_s = decodes.work_s(decoding, attended), decodes.fixed_s
        if tokens:
            seconds += prompts.work_s(tokens, chunk_attended)
            noise, fixed_s = self._prompt_noise, max(fixed_s, prompts.fixed_s)
        seconds = (seconds + fixed_s) * noise.draw()
        self._free_s = max(now_s, self._free_s) + seconds
        self.busy_s += seconds
        self.steps += 1
        if decoding:
            self.ends_s.append(self._free_s)
        self._attended += decoding
        while lasts and lasts[0][0] == number:  # its last token is made here, so it is in no later plan
            job = heapq.heappop(lasts)[2]
            self._leaving.append(job)
            self._decoding -= 1
            self._attended -= job.asked.kv_tokens
        for job in ended if whole else ():
            self._held -= 1
            self._granted += 1
            if job.asked.output_tokens > 1:
                self.join(job)
        return Step(self._free_s, ended, number if decoding else None)

    def _chunks(self, decoding: int, whole: bool) -> tuple[int, float, list[Job]]:
        """(tokens, what they attend to, prompts that end) of the next step."""
        self._admit(whole)
        left = self._prompt_facts.chunk_tokens - decoding
        if not self._running or left <= 0:
            return 0, 0.0, []
        self._running.sort(key=_turn)
        candidates, wanted = [], 0
        for number, job in enumerate(self._running):
            remaining = job.asked.input_tokens - job.computed
            candidates.append(Candidate(number, Phase.PREFILL, remaining, start=job.computed))
            wanted += remaining
            if wanted >= left:
                break
        tokens, attended, ended = 0, 0.0, []
        for run in prefill_only(tuple(candidates), StepState(of_tokens(left))).runs:
            job = self._running[run.seq_id]
            attended += run.num_tokens * (job.computed + run.num_tokens / 2)
            tokens += run.num_tokens
            job.computed += run.num_tokens
            if run.sample:
                ended.append(job)
        if ended:
            self._running = [job for job in self._running if job.computed < job.asked.input_tokens]
        self.prompt_tokens += tokens
        return tokens, attended, ended

    def done(self) -> tuple[Step, list[Job]]:
        """The oldest step has ended: with it, and whose last token it made."""
        step = self.in_flight.popleft()
        left = []
        while step.number is not None and self._leaving and last_step(self._leaving[0]) <= step.number:
            left.append(self._leaving.popleft())
        return step, left

    def tokens_s(self, job: Job) -> np.ndarray:
        """When each of its tokens but the first was made: [output_tokens - 1]."""
        first = job.first_step
        return np.frombuffer(self.ends_s, dtype=np.float64)[first : first + job.asked.output_tokens - 1].copy()


def last_step(job: Job) -> int:
    return job.first_step + job.asked.output_tokens - 2


def _turn(job: Job) -> int:
    """As an engine orders prompts: short ones first, but none is overtaken for ever."""
    return job.place + job.asked.input_tokens - job.computed


class Caches:
    """Which blocks each of so many prefill servers has, the least recently used going first."""

    def __init__(self, servers: int, blocks: int) -> None:
        """blocks: that one server holds."""
        self._most = blocks
        self._of: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(servers)]
        self._holders: dict[int, set[int]] = {}

    def hits(self, hash_ids: Sequence[int]) -> dict[int, int]:
        """How many blocks each server has of a prompt, from its beginning on; those that have none are left out."""
        found: dict[int, int] = {}
        here: set[int] | None = None
        for count, block in enumerate(hash_ids):
            holders = self._holders.get(block)
            now = set() if not holders else set(holders) if here is None else here & holders
            for server in (here or set()) - now:
                found[server] = count
            here = now
            if not here:
                return found
        found.update(dict.fromkeys(here or (), len(hash_ids)))
        return found

    def keep(self, server: int, hash_ids: Sequence[int]) -> None:
        """They were used, the last block first, so that beginnings stay longest."""
        held = self._of[server]
        for block in reversed(hash_ids[: self._most]):
            if block in held:
                held.move_to_end(block)
            else:
                held[block] = None
                self._holders.setdefault(block, set()).add(server)
        while len(held) > self._most:
            gone, _ = held.popitem(last=False)
            self._holders[gone].discard(server)
            if not self._holders[gone]:
                del self._holders[gone]
